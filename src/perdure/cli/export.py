"""`perdure export`: conversations as JSONL."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.app import DB, Threads, app, opened, thread_id
from perdure.cli.output import as_json
from perdure.cli.progress import progress_bar
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.checkpointers.checkpointer import Checkpointer


@app.command()
def export(
    thread: Threads = None,
    every: Annotated[bool, typer.Option("--all", help="Export all threads.")] = False,
    db: DB = None,
) -> None:
    """Write threads as JSONL, a line each.

    'perdure import' reads it. Branches are left out.
    """
    if bool(thread) == every:
        raise ConfigurationError("name threads, or give --all")
    with opened(db, reads=True) as file:
        ids = [thread_id(file, each) for each in thread or ()]
        # all there are now: paging would miss those that are written to meanwhile
        ids = ids or [each.thread_id for each in file.saver.threads(limit=sys.maxsize)]
        with progress_bar("exporting", "thread") as show:
            for number, each in enumerate(ids, 1):
                as_json(_exported(file.saver, each), indent=None)
                show(number / len(ids), number)


def _exported(saver: Checkpointer, thread: str) -> dict[str, Any]:
    from langchain_core.messages import convert_to_openai_messages

    from perdure.checkpointers.titles import WHOSE, about

    said = [item.value for item in saver.history(thread) if not item.branch]
    messages: Any = convert_to_openai_messages(said, include_id=True)
    for message, value in zip(messages, said, strict=True):
        known = value.response_metadata
        if "create_time" in known:
            message["create_time"] = known["create_time"]
        kept = {name: known[name] for name in ("model_name", "remember") if name in known}
        if kept:
            message["response_metadata"] = kept
        if "canvas" in value.additional_kwargs:
            message["canvas"] = value.additional_kwargs["canvas"]
    newest = saver.head(thread).metadata
    whose = {name: newest[name] for name in WHOSE if newest.get(name)}
    return {"thread_id": thread, **about(saver, thread, newest), **whose, "messages": messages}

"""`perdure export`: conversations as JSONL."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from perdure.cli.app import DB, app, completed_thread, opened, thread_id
from perdure.cli.conversation import ABOUT, TITLED
from perdure.cli.output import json_safe
from perdure.cli.progress import progress_bar
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.checkpointers import SQLiteCheckpointer


@app.command()
def export(
    thread: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]...",
            help="The threads; a beginning will do.",
            autocompletion=completed_thread,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All threads.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file.")] = None,
    db: DB = None,
) -> None:
    """Write what was said on threads as JSONL, a conversation a line, as `import` reads it."""
    if bool(thread) == every:
        raise ConfigurationError("name threads, or give --all")
    with opened(db, reads=True) as file:
        ids = [thread_id(file, each) for each in thread or ()]
        # all there are now: paging would miss those that are written to meanwhile
        ids = ids or [each.thread_id for each in file.saver.threads(limit=sys.maxsize)]
        target = _replacing(output) if output else nullcontext(sys.stdout)
        with target as to, progress_bar("exporting", "thread") as show:
            for number, each in enumerate(ids, 1):
                text = json.dumps(_exported(file.saver, each), ensure_ascii=False)
                to.write(json_safe(text) + "\n")
                show(number / len(ids), number)


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes its place only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    except OSError as exc:
        raise ConfigurationError(f"{str(path)!r} cannot be written: {exc.strerror}") from exc
    finally:
        partial.unlink(missing_ok=True)


def _exported(saver: SQLiteCheckpointer, thread: str) -> dict[str, Any]:
    from langchain_core.messages import convert_to_openai_messages

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
    return {"thread_id": thread, **about_thread(saver, thread), "messages": messages}


def about_thread(saver: SQLiteCheckpointer, thread: str) -> dict[str, Any]:
    """The title, model and times that an import left in a thread, those that it has.

    They stand in the metadata of its checkpoints. The newest has them, unless the thread went on
    in a program of its own; then those that an import put are found by their tag.
    """
    newest = saver.checkpoints(thread, checkpoint_ns="", limit=1)
    metadata: Any = newest[0].metadata if newest else {}
    if "title" not in metadata:
        where: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        tagged = next(iter(saver.list(where, filter={TITLED: True}, limit=1)), None)
        metadata = tagged.metadata if tagged is not None else metadata
    return {name: metadata[name] for name in ABOUT if name in metadata}

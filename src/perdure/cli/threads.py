"""`perdure threads`: the conversations, the latest first, and what is known of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, Database, Limit, app, opened
from perdure.cli.output import ago, line, note, show
from perdure.errors import UnknownThread

if TYPE_CHECKING:
    from perdure.checkpointers.checkpointer import Checkpointer

ABOUT: Final = ("title", "model", "gizmo_id", "create_time", "update_time")  # of a conversation
TITLED: Final = "titled"  # metadata by which a checkpoint with a title is found
_BEGINNING: Final = 2  # messages among which the first of a human is looked for
_LONGEST: Final = 60  # characters of a title


@app.command()
def threads(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="Only threads with this in the title or id."),
    ] = None,
    limit: Limit = 50,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List threads, latest activity first.

    One without a title has the first words of what a human said in its place.
    """
    with opened(db, reads=True) as file:
        found = list(_described(file, (text or "").casefold(), limit + 1))
        found, more = found[:limit], found[limit:]
        rows = [
            (info["thread_id"], title_of(file, info), info["items"], ago(info["active_at"]))
            for info in ([] if json else found)
        ]
    columns, ids = ("id", "title", "messages", "last activity"), ("id", "last activity")
    nothing = "" if text is None else f"no thread has {text!r} in its title or id"
    show(found, json, columns, rows, ids=ids, nothing=nothing)
    if more:
        note(f"there are more than {limit}; --limit N shows them")
    if nothing and not found:
        raise typer.Exit(1)


def _described(file: Database, text: str, limit: int) -> Iterator[dict[str, Any]]:
    """What is known of threads; only of those that have the text, and only of so many."""
    for head in file.saver.heads(limit=sys.maxsize if text else limit):
        title = about(file.saver, head.thread_id, head.metadata).get("title")
        if text not in head.thread_id.casefold() and text not in (title or "").casefold():
            continue
        with suppress(UnknownThread):  # another process deletes it
            yield {**asdict(file.saver.thread(head.thread_id)), "title": title}
            limit -= 1
        if not limit:
            return


def in_utc(seconds: Any) -> datetime | None:
    """The moment so many seconds after 1970; None if they are none."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def about(saver: Checkpointer, thread: str, newest: Any = None) -> dict[str, Any]:
    """The title and times that an import left in a thread, those that it has.

    They are in the metadata of its `newest` checkpoint, unless the thread went on in a program of
    its own; then they are found by a tag.
    """
    where: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
    if newest is None:
        found = saver.checkpoints(thread, checkpoint_ns="", limit=1)
        newest = found[0].metadata if found else {}
    if "title" not in newest:
        tagged = next(saver.list(where, filter={TITLED: True}, limit=1), None)
        newest = newest if tagged is None else tagged.metadata
    known = {name: newest[name] for name in ABOUT if name in newest}
    return {**known, "title": str(known["title"])} if "title" in known else known


def title_of(file: Database, info: Mapping[str, Any]) -> str:
    """The title of a thread; without one, the first words of the first human message."""
    if info.get("title"):
        return line(info["title"], _LONGEST)
    with suppress(UnknownThread):  # another process deletes it
        for item in file.saver.history(info["thread_id"], ends=(_BEGINNING, 0)):
            if getattr(item.value, "type", None) == "human":
                return line(item.value.text, _LONGEST)
    return ""

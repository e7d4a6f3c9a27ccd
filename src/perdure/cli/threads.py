"""`perdure threads`: the conversations, the latest first, and what is known of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, Database, app, opened, thread_id
from perdure.cli.output import ago, as_json, note, table
from perdure.errors import UnknownThread

if TYPE_CHECKING:
    from perdure.checkpointers import SQLiteCheckpointer, ThreadHead

ABOUT: Final = ("title", "model", "gizmo_id", "create_time", "update_time")  # of a conversation
TITLED: Final = "titled"  # metadata by which a checkpoint with a title is found


@app.command()
def threads(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="Only threads with this in the title or id."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most N.")] = 50,
    after: Annotated[
        str | None, typer.Option(metavar="ID", help="Begin after this thread.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only ids that begin with this.")] = "",
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List threads, latest activity first."""
    with opened(db, reads=True) as file:
        start = None if after is None else thread_id(file, after)
        many = limit if text is None else sys.maxsize
        heads = file.saver.heads(limit=many, after=start, prefix=prefix)
        found = list(_described(file, heads, (text or "").casefold(), limit))
    if json:
        as_json(found)
    elif found or text is None:
        columns = ("id", "title", "messages", "last activity")
        rows = [(t["thread_id"], t["title"] or "", t["items"], ago(t["active_at"])) for t in found]
        table(columns, rows, ids=("id", "last activity"))
    if text is not None and not found:
        note(f"no thread has {text!r} in its title or id")
        raise typer.Exit(1)


def _described(
    file: Database, heads: list[ThreadHead], text: str, limit: int
) -> Iterator[dict[str, Any]]:
    """What is known of threads; only of those that have the text, and only of so many."""
    for head in heads:
        title = about(file.saver, head.thread_id, head.metadata).get("title")
        if text not in head.thread_id.casefold() and text not in (title or "").casefold():
            continue
        with suppress(UnknownThread):  # another process deletes it
            info = file.saver.thread(head.thread_id)
            yield {**asdict(info), "title": title}
            limit -= 1
        if not limit:
            return


def in_utc(seconds: Any) -> datetime | None:
    """The moment so many seconds after 1970; None if they are none."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def about(saver: SQLiteCheckpointer, thread: str, newest: Any = None) -> dict[str, Any]:
    """The title and times that an import left in a thread, those that it has.

    They are in the metadata of its `newest` checkpoint, unless the thread went on in a program of
    its own; then they are found by a tag.
    """
    where: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
    if newest is None:
        newest = next(
            (i.metadata for i in saver.checkpoints(thread, checkpoint_ns="", limit=1)), {}
        )
    if "title" not in newest:
        tagged = next(saver.list(where, filter={TITLED: True}, limit=1), None)
        newest = newest if tagged is None else tagged.metadata
    known = {name: newest[name] for name in ABOUT if name in newest}
    return {**known, "title": str(known["title"])} if "title" in known else known

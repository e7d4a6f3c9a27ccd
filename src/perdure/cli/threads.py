"""`perdure threads`: the conversations, the latest first, and what is known of them."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, Ids, Limit, OpenedDatabase, app, opened, short_id
from perdure.cli.output import ago, line, note, show
from perdure.errors import UnknownThread

if TYPE_CHECKING:
    from perdure.checkpointers import ThreadStatus

_LONGEST: Final = 60  # characters of a title
_LONGEST_QUESTION: Final = 500


@app.command()
def threads(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="Only threads with this in the title or id."),
    ] = None,
    limit: Limit = 50,
    ids: Ids = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List threads, the last written first.

    One without a title has the first words of what a human said in its place. The last activity of
    an imported thread is that of its conversation.
    """
    with opened(db, reads=True) as file:
        found = list(_described(file, (text or "").casefold(), limit + 1))
        found, more = found[:limit], found[limit:]
        rows = [
            [
                short_id(file, info["thread_id"], whole=ids),
                title_of(file, info),
                info["messages"],
                ago(info["active_at"]),
            ]
            for info in ([] if json else found)
        ]
    columns, fixed = ["id", "title", "messages", "last activity"], ("id", "last activity")
    if any(info["status"] != "idle" for info in found):
        columns.append("status")
        rows = [[*row, info["status"]] for row, info in zip(rows, found, strict=False)]
    nothing = "" if text is None else f"no thread has {text!r} in its title or id"
    show(found, json, columns, rows, ids=fixed, nothing=nothing)
    if more:
        note(f"there are more than {limit}; --limit N shows them")
    if nothing and not found:
        raise typer.Exit(1)


def _described(file: OpenedDatabase, text: str, limit: int) -> Iterator[dict[str, Any]]:
    """What is known of threads; only of those that have the text, and only of so many."""
    from perdure.checkpointers.titles import about

    for head in file.saver.heads(limit=sys.maxsize if text else limit):
        if text not in f"{head.thread_id}\0{head.title}".casefold():
            continue
        title = about(file.saver, head.thread_id, head.metadata).get("title")
        with suppress(UnknownThread):  # another process deletes it
            yield {
                **asdict(file.saver.thread(head.thread_id)),
                "title": title,
                "status": head.status.state,
                "next": head.status.next,
                "waits_for_answers_to": [question for _, question in head.status.questions],
            }
            limit -= 1
        if not limit:
            return


def in_utc(seconds: Any) -> datetime | None:
    """The moment so many seconds after 1970; None if they are none."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def stands(status: ThreadStatus) -> str:
    """That a thread waits, and for what, or before which nodes it was cut off; "": neither."""
    if status.state == "waiting":
        questions = (
            f"at {line(node)!r}: {line(_text(question), _LONGEST_QUESTION)}"
            for node, question in status.questions
        )
        return f"waits for an answer ({'; '.join(questions)})"
    nodes = ", ".join(repr(line(node)) for node in dict.fromkeys(status.next))
    where = f"before {nodes}" if nodes else "at the end of a step"
    return f"was cut off, or stopped, {where}" if status.tasks else ""


def _text(value: Any) -> str:
    return (
        value if isinstance(value, str) else jsonlib.dumps(value, ensure_ascii=False, default=str)
    )


def title_of(file: OpenedDatabase, info: Mapping[str, Any]) -> str:
    """The title of a thread in a line; without one, the first words of a human."""
    from perdure.checkpointers.titles import title

    return line(title(file.saver, info["thread_id"], info), _LONGEST)

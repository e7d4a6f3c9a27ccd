"""`perdure delete`: threads gone for good, with the memories that rest on them."""

from __future__ import annotations

from contextlib import suppress
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.app import (
    DB,
    AsJson,
    OpenedDatabase,
    Yes,
    app,
    completed_thread,
    confirm,
    opened,
    thread_id,
)
from perdure.cli.output import as_json, counted, note, say, say_clean
from perdure.cli.progress import at_work
from perdure.cli.threads import title_of
from perdure.errors import PerdureError

if TYPE_CHECKING:
    from perdure.stores import Receipt


@app.command()
def delete(
    thread: Annotated[
        list[str],
        typer.Argument(
            metavar="ID...",
            help="Threads, or the beginnings of their ids.",
            autocompletion=completed_thread,
        ),
    ],
    keep_memories: Annotated[
        bool, typer.Option("--keep-memories", help="Do not erase memories of them.")
    ] = False,
    yes: Yes = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Delete threads and their memories for good.

    A conversation comes back when its export is imported again.
    """
    with opened(db) as file:
        ids = list(dict.fromkeys(thread_id(file, each) for each in thread))
        messages = sum(_messages(file, each) for each in ids)
        memories = 0 if keep_memories else _forget(file, ids, dry_run=True).items
        of_them = f" and {counted(memories, 'memory', 'memories')}" if memories else ""
        what = f"{counted(len(ids), 'thread')} with {counted(messages, 'message')}{of_them}"
        names = ", ".join(_named(file, each) for each in ids[:3]) + (", …" if len(ids) > 3 else "")
        confirm(f"Delete {what}, of {names}, for good?", yes)
        with at_work("deleting …"):
            # the memories first: of a thread that is gone none would be found after a crash
            clean = keep_memories or _forget(file, ids).clean
            *others, last = ids  # the last one scrubs the file of all of them
            file.saver.prune(others, strategy="delete")
            clean = file.saver.erase(last).scrubbed and clean
    if json:
        as_json({"threads": ids, "messages": messages, "memories": memories, "clean": clean})
    else:
        say(f"deleted {what}, of {names}")
        say_clean(clean)
        note("what other threads quote of it stays there")


def _messages(file: OpenedDatabase, thread: str) -> int:
    with suppress(PerdureError):  # it goes all the same
        return len(file.saver.history(thread))
    return file.saver.thread(thread).items


def _named(file: OpenedDatabase, thread: str) -> str:
    from perdure.checkpointers.titles import about

    title = title_of(file, {"thread_id": thread, **about(file.saver, thread)})
    return f"{thread!r} ({title})" if title else repr(thread)


def _forget(file: OpenedDatabase, ids: list[str], *, dry_run: bool = False) -> Receipt:
    """Erase the memories of some threads, whosever they are, with what waits in quarantine."""
    from perdure.memory.records import QUARANTINE, WATERMARKS, notes_of

    own: list[tuple[str, ...]] = [("memories",), ("examples",)]
    what: dict[str, Any] = {"provenance": {"thread_id": {"$in": ids}}, "dry_run": dry_run}
    places = (*own, *(notes_of(QUARANTINE, place) for place in own))
    if not dry_run:  # a thread of this id that is imported again is read from its beginning
        read = {"thread_id": {"$in": ids}}
        file.store.forget(notes_of(WATERMARKS, own[0]), filter=read)
    return reduce(add, [file.store.forget(place, **what) for place in places])

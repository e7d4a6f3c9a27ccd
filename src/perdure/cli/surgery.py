"""`perdure fork`, `rewind`, `prune` and `delete`: changing threads as a whole."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from perdure.cli.app import DB, AsJson, Yes, app, confirm, open_saver, opened
from perdure.cli.output import as_json, console, counted, notes
from perdure.cli.threads import Thread, full_id
from perdure.errors import PerdureError

Threads = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="The threads.")]


@app.command()
def fork(
    thread: Thread,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Id of the copy.")],
    at: Annotated[str | None, typer.Option(help="Copy only the way to this checkpoint.")] = None,
    db: DB = None,
) -> None:
    """Copy a thread, or its way to a checkpoint, into a thread of its own."""
    with open_saver(db, create=False) as saver:
        chosen = full_id(saver, thread, at) if at else None
        saver.copy_thread(thread, new, checkpoint_id=chosen)
    console.print(f"{thread!r} was copied to {new!r}", markup=False)


@app.command()
def rewind(
    thread: Thread,
    to: Annotated[str, typer.Option(help="The checkpoint to go on from.")],
    db: DB = None,
) -> None:
    """Let a thread go on from an older checkpoint. Nothing is deleted."""
    with open_saver(db, create=False) as saver:
        chosen = full_id(saver, thread, to)
        saver.rewind(thread, chosen)
    console.print(f"{thread!r} goes on from {chosen}", markup=False)


@app.command()
def prune(
    thread: Threads = None,
    last: Annotated[int | None, typer.Option(help="Keep the newest so many.")] = None,
    days: Annotated[float | None, typer.Option(help="Keep those of so many days.")] = None,
    turns: Annotated[bool, typer.Option("--turns", help="Keep the ends of turns.")] = False,
    drop_history: Annotated[
        bool, typer.Option("--drop-history", help="Forget what was said and is not kept.")
    ] = False,
    yes: Yes = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Delete checkpoints that no rule keeps (by default all but the newest).

    What was said on the way to one that is kept stays; what was said on branches alone goes.
    """
    from perdure.checkpointers import Retention

    if last is None and days is None and not turns:
        last = 1
    if not thread:
        confirm("Prune all threads?", yes)
    with open_saver(db, create=False) as saver:
        for thread_id in thread or ():
            saver.thread(thread_id)
        rule = Retention(last=last, days=days, turns=turns, history=not drop_history)
        done = saver.retain(rule, thread_ids=thread or None)
    if json:
        as_json({"checkpoints": done.checkpoints, "items": done.items, "threads": done.threads})
    else:
        console.print(
            f"deleted {counted(done.checkpoints, 'checkpoint')} and {counted(done.items, 'item')} "
            f"of {counted(done.threads, 'thread')}"
        )


@app.command()
def delete(
    thread: Annotated[list[str], typer.Argument(metavar="ID...", help="The threads.")],
    yes: Yes = False,
    db: DB = None,
) -> None:
    """Delete threads, with all that was said on them."""
    confirm(f"Delete {', '.join(map(repr, thread))} for good?", yes)
    with open_saver(db, create=False) as saver:
        for thread_id in thread:
            saver.thread(thread_id)
        saver.prune(thread, strategy="delete")
    console.print(f"{len(thread)} deleted")
    if _is_remembered(thread, db):
        notes.print(
            "memories of what was said there stay; 'perdure forget --thread' erases them",
            markup=False,
        )


def _is_remembered(threads: list[str], db: str | None) -> bool:
    """Whether memories come from some threads, whosever they are."""
    from perdure.stores import SQLiteStore

    whence = {"thread_id": {"$in": threads}}
    with (
        suppress(PerdureError),  # the threads are gone, and that is what was asked for
        opened(SQLiteStore, db, create=False, reads=True, begin="perdure remember") as store,
    ):
        return bool(store.search(("memories",), provenance=whence, limit=1, refresh_ttl=False))
    return False

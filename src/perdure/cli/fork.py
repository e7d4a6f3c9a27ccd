"""`perdure fork` and `rewind`: another course for a thread."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure.cli.app import DB, Thread, app, checkpoint_id, opened, thread_id
from perdure.cli.output import say
from perdure.errors import ConfigurationError


@app.command()
def fork(
    thread: Thread,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The id of the copy.")],
    at: Annotated[
        str | None, typer.Option(metavar="ID", help="Copy only what led to this checkpoint.")
    ] = None,
    db: DB = None,
) -> None:
    """Copy a thread, all of it or up to a checkpoint."""
    with opened(db) as file:
        source = thread_id(file, thread)
        if not new or any(info.thread_id == new for info in file.saver.threads(prefix=new)):
            wrong = f"there is a thread {new!r} already" if new else "the id of the copy is empty"
            raise ConfigurationError(f"{wrong}; give another id")
        chosen = checkpoint_id(file, source, at) if at else None
        file.saver.copy_thread(source, new, checkpoint_id=chosen)
    say(f"{source!r} is copied to {new!r}")


@app.command()
def rewind(
    thread: Thread,
    to: Annotated[str, typer.Option(metavar="ID", help="The checkpoint to go on from.")],
    db: DB = None,
) -> None:
    """Let a thread go on from an older checkpoint.

    Nothing is deleted: what came later stays as a branch.
    """
    with opened(db) as file:
        source = thread_id(file, thread)
        chosen = checkpoint_id(file, source, to)
        file.saver.rewind(source, chosen)
    say(f"{source!r} goes on from {chosen}")

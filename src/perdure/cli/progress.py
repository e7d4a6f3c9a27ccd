"""What a long command shows: how far it is, that it is at work, what is kept if it is cut off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Final

from perdure.cli.output import notes

_PATIENCE_S: Final = 0.5  # what is done by then needs no word


def on_terminal() -> bool:
    """Whether somebody may be looking."""
    return sys.stderr.isatty()


@contextmanager
def progress_bar(doing: str, noun: str) -> Iterator[Callable[[float | None, int], None]]:
    """A bar on a terminal, on stderr.

    Args:
        doing: What is being done.
        noun: What is counted.

    Yields:
        What moves it to a share of the whole (None: not known), and says a count.
    """
    if not on_terminal():
        yield lambda share, count: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=notes, transient=True) as progress:
        task = progress.add_task(doing, total=None, said="")

        def show(share: float | None, count: int) -> None:
            percent = "" if share is None else f"{share:>4.0%}, "
            said = f"{percent}{count:,} {noun}s"
            progress.update(task, total=None if share is None else 1.0, completed=share, said=said)

        yield show


@contextmanager
def at_work(doing: str) -> Iterator[None]:
    """Show on a terminal, on stderr, what is being done, if it is not done at once."""
    if not on_terminal():
        yield
        return
    status = notes.status(doing)
    late = Timer(_PATIENCE_S, status.start)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()  # it may be starting just now
        status.stop()


@contextmanager
def resumable(kept: Callable[[], str]) -> Iterator[None]:
    """Say on stderr, when Ctrl-C ends a command, what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        notes.print(f"cut off: {kept()}; run it again to go on", markup=False)
        raise

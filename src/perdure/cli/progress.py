"""A bar that shows how far a long command is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perdure.cli.output import notes


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

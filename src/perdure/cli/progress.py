"""What a long command shows on stderr: how far it is, and what is kept if it is cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Final

from perdure.cli.output import console, note, safe

_PATIENCE_S: Final = 0.5  # what is done by then needs no word


@contextmanager
def progress_bar(doing: str, noun: str) -> Iterator[Callable[[float | None, int], None]]:
    """A bar on a terminal.

    Args:
        doing: What is being done.
        noun: What is counted.

    Yields:
        What moves it to a share of the whole (None: not known), and says a count.
    """
    if not console(stderr=True).is_terminal:
        yield lambda share, count: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[reached]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(safe(doing), total=None, reached="")

        def show(share: float | None, count: int) -> None:
            percent = "" if share is None else f"{share:>4.0%}, "
            reached, total = f"{percent}{count:,} {noun}s", None if share is None else 1.0
            progress.update(task, total=total, completed=share, reached=reached)

        yield show


@contextmanager
def at_work(doing: str) -> Iterator[None]:
    """Show on a terminal what is being done, if it is not done at once."""
    if not console(stderr=True).is_terminal:
        yield
        return
    from rich.text import Text

    status = console(stderr=True).status(Text(safe(doing)))  # of a str it would read markup
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
    """Say, when Ctrl-C ends a command, what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"cut off: {kept()}; run it again to go on")
        raise

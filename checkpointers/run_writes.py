"""Wait for the writes of a run that are in progress, and refuse all later ones.

A cancelled run may still be writing. LangGraph starts each put as a separate task, and cancelling
the run ends the wait for these tasks, but not the tasks. The code that cleans up after a run
therefore closes its `RunWrites` first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

from perdure.errors import RunEnded
from perdure.storage.flow import Flow

T = TypeVar("T")

_POLL_S: Final = 0.002  # seconds between two checks while writes are in progress
_QUIET_ROUNDS: Final = 20  # event-loop rounds without a write before a run counts as ended


class RunWrites:
    """Counts the writes of a run that are in progress, in any thread."""

    def __init__(self) -> None:
        self._in_progress = set[object]()  # adding and removing are atomic
        self._closed = False

    @contextmanager
    def count_write(self) -> Iterator[None]:
        """Count one write while the block is executed.

        Raises:
            RunEnded: The run has ended.
        """
        write = object()
        self._in_progress.add(write)
        try:
            self.check_open()
            yield
        finally:
            self._in_progress.discard(write)

    def check_open(self) -> None:
        """Check that the run has not ended.

        Raises:
            RunEnded: The run has ended.
        """
        if self._closed:
            raise RunEnded("the run has ended, so its writes are no longer stored")

    def refuse_when_closed(self, make: Callable[[], Flow[T]]) -> Callable[[], Flow[T]]:
        """Return a function that builds a flow, and raises RunEnded if the run has ended by then.

        A write can wait in the queue for longer than `close` waits.
        """

        def make_if_open() -> Flow[T]:
            self.check_open()
            return make()

        return make_if_open

    async def close(self, timeout_s: float) -> None:
        """Wait until no write is in progress, and refuse all further writes.

        Args:
            timeout_s: How long to wait, in seconds.
        """
        if self._closed:
            return
        until, quiet = time.monotonic() + timeout_s, 0
        while quiet < _QUIET_ROUNDS and time.monotonic() < until:
            is_busy = bool(self._in_progress)
            quiet = 0 if is_busy else quiet + 1
            await asyncio.sleep(_POLL_S if is_busy else 0)
            self._closed = (
                quiet == _QUIET_ROUNDS - 1
            )  # one more round, for a write that has just started in another thread
        self._closed = True


RUN_WRITES: ContextVar[RunWrites | None] = ContextVar("RUN_WRITES", default=None)
"""The `RunWrites` of the run in whose context the code runs, or None if they are not counted."""

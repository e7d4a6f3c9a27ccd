"""Wait for a run's in-progress writes to finish, and reject later writes.

LangGraph starts a separate asyncio task for each checkpoint that a run stores. If the run is
cancelled, the asyncio tasks that store its checkpoints keep running, so a checkpoint may be stored
after the run has ended. Before the server cleans up after a run, it calls `RunWrites.close`, which
waits for the writes in progress and rejects later writes.
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

# Interval in seconds between checks for writes in progress.
_POLL_S: Final = 0.002
# After this number of consecutive event loop iterations without a write in progress, `close`
# assumes that the run has no more writes.
_QUIET_ROUNDS: Final = 20


class RunWrites:
    """Tracks a run's in-progress writes across all OS threads."""

    def __init__(self) -> None:
        # No lock is needed, because adding and removing a set element are atomic operations.
        self._in_progress = set[object]()
        self._closed = False

    @contextmanager
    def register_write_in_progress(self) -> Iterator[None]:
        """Register a write as in progress while the `with` block runs.

        Raises:
            RunEnded: The run has ended.
        """
        write = object()
        self._in_progress.add(write)
        try:
            self.check_run_not_ended()
            yield
        finally:
            self._in_progress.discard(write)

    def check_run_not_ended(self) -> None:
        """Check that the run has not ended.

        Raises:
            RunEnded: The run has ended.
        """
        if self._closed:
            raise RunEnded("the run has already ended, so this write was discarded")

    def make_flow_fail_after_run_end(
        self, make_flow: Callable[[], Flow[T]]
    ) -> Callable[[], Flow[T]]:
        """Return a function that calls `make_flow` if the run has not ended yet.

        If the run has already ended, the returned function raises RunEnded and does not call
        `make_flow`.

        When `close` times out after the end of the run, a write can still be in the queue. The
        returned function prevents queued writes from being stored after the end of the run. Just
        before a queued write is executed, the returned function checks whether the run has ended.
        """

        def make_if_open() -> Flow[T]:
            self.check_run_not_ended()
            return make_flow()

        return make_if_open

    async def close(self, timeout_s: float) -> None:
        """Wait until all writes in progress have finished, and reject any further writes.

        Args:
            timeout_s: The maximum number of seconds to wait. Further writes are rejected even if
                some writes have not finished by then.
        """
        if self._closed:
            return
        until, quiet = time.monotonic() + timeout_s, 0
        while quiet < _QUIET_ROUNDS and time.monotonic() < until:
            is_busy = bool(self._in_progress)
            quiet = 0 if is_busy else quiet + 1
            await asyncio.sleep(_POLL_S if is_busy else 0)
            # During the last iteration of the waiting loop, new writes are already rejected. If the
            # last iteration finds a write that another OS thread began before the rejection, the
            # loop accepts new writes again and continues to wait.
            self._closed = quiet == _QUIET_ROUNDS - 1
        self._closed = True


RUN_WRITES: ContextVar[RunWrites | None] = ContextVar("RUN_WRITES", default=None)
"""The `RunWrites` of the run in whose context the code is executed.

None if the writes of the run are not tracked.
"""

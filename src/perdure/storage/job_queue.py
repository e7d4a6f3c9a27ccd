"""A queue of write jobs, which any OS threads fill and one writing thread empties.

The queue has its own implementation because `queue.SimpleQueue` has a fault in CPython 3.11 and
3.12. `get(timeout)` can wait without limit, instead of raising `Empty`, if its timeout is only a
few microseconds; see docs/decisions/0042-the-writer-waits-on-a-lock.md.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from perdure.storage.flow import Job


class JobQueue:
    """A first-in, first-out queue that any number of threads fill, and that one thread empties.

    The value None in the queue tells the emptying thread to stop.
    """

    __slots__ = ("_arrival", "_jobs")

    def __init__(self) -> None:
        self._jobs: deque[Job[Any] | None] = deque()
        # The emptying thread waits for new jobs by acquiring this lock. The lock is free if jobs
        # have been added since the last wait.
        self._arrival = threading.Lock()
        self._arrival.acquire()

    def put(self, job: Job[Any] | None) -> None:
        """Add a job, and wake the emptying thread if it waits for one."""
        self._jobs.append(job)
        if self._arrival.locked():
            # `release` raises RuntimeError if another thread has just released the lock.
            with suppress(RuntimeError):
                self._arrival.release()

    def is_empty(self) -> bool:
        """Return whether the queue has no jobs."""
        return not self._jobs

    def get(self) -> Job[Any] | None:
        """Wait until the queue has a job, remove the first job, and return it."""
        while not self._jobs:
            self._arrival.acquire()
        return self._jobs.popleft()

    def wait_for_job(self, timeout_s: float) -> bool:
        """Wait until the queue has a job, or the time is over. Return whether it has a job.

        Args:
            timeout_s: The time to wait in seconds. With a number that is not positive, the method
                does not wait.
        """
        # The lock may be free because of an earlier job, which the thread took without waiting.
        # Then the first call of `acquire` does not wait.
        while not self._jobs and timeout_s > 0:
            start = time.monotonic()
            if not self._arrival.acquire(timeout=timeout_s):
                break
            timeout_s -= time.monotonic() - start
        return bool(self._jobs)

"""Pause Python's cyclic garbage collector while many objects are created."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _CollectorPause:
    """Builds context managers that pause Python's cyclic garbage collector.

    By default, Python runs the garbage collector after every few hundred new container objects. A
    garbage collection that runs while messages are being decoded frees no memory (see
    docs/decisions/0003). To pause the garbage collector, its threshold is set to 0, which stops
    automatic garbage collections. `gc.disable()` is not called, because the application decides
    whether the garbage collector is enabled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Number of `with` blocks that are pausing the garbage collector now.
        self._active_pauses = 0
        # The application's garbage collection thresholds, saved when the pause began.
        self._thresholds = gc.get_threshold()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Pause the garbage collector during a `with` block.

        Several OS threads can pause the garbage collector at the same time. Garbage collection
        resumes when the last active `with` block ends.
        """
        with self._lock:
            self._active_pauses += 1
            if self._active_pauses == 1:
                self._thresholds = gc.get_threshold()
                gc.set_threshold(0)
        try:
            yield
        finally:
            with self._lock:
                if self._active_pauses == 1:
                    self._restore_thresholds()
                # Use `max`, because `reset_after_fork` sets `_active_pauses` to 0 if the process is
                # forked inside a `with` block.
                self._active_pauses = max(0, self._active_pauses - 1)

    def _restore_thresholds(self) -> None:
        # If the application has set a nonzero threshold while the garbage collector was paused,
        # keep the application's threshold.
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*self._thresholds)

    def reset_after_fork(self) -> None:
        """End the pause in a forked process.

        A forked process contains only the OS thread that called `fork`. If another OS thread of the
        parent process has paused the garbage collector, this other thread cannot end the pause in
        the forked process.
        """
        if self._active_pauses:
            self._restore_thresholds()
        self._lock, self._active_pauses = threading.Lock(), 0


collector_paused = _CollectorPause()
"""Pauses the garbage collector in `with collector_paused():`."""
# Windows has no `register_at_fork`.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector_paused.reset_after_fork)

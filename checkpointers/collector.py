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
    docs/decisions/0003). The pause sets the garbage collector's threshold to 0, which stops
    automatic garbage collections. `gc.disable()` is not called, because the application decides
    whether the garbage collector is enabled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Number of `with` blocks that are pausing the garbage collector now.
        self._active_pauses = 0
        # The application's thresholds, read when the pause began.
        self._thresholds = gc.get_threshold()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Pause the garbage collector during a `with` block.

        Several OS threads can pause the garbage collector at the same time. The garbage collector
        resumes when the last of their `with` blocks ends.
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
                # The number of active pauses is already 0 if the process was forked during the
                # pause.
                self._active_pauses = max(0, self._active_pauses - 1)

    def _restore_thresholds(self) -> None:
        # If the garbage collector's threshold is not 0, the application set it during the pause, so
        # leave it unchanged.
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*self._thresholds)

    def reset_after_fork(self) -> None:
        """End the pause in a forked process.

        Other OS threads that paused the garbage collector do not exist in a forked process, so the
        pause would never end there.
        """
        if self._active_pauses:
            self._restore_thresholds()
        self._lock, self._active_pauses = threading.Lock(), 0


collector_paused = _CollectorPause()
"""Pauses the garbage collector in `with collector_paused():`."""
# Windows has no `register_at_fork`.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector_paused.reset_after_fork)

"""Pause Python's cyclic garbage collector while many objects are created."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _CollectorPause:
    """A context manager that pauses Python's cyclic garbage collector.

    By default, Python runs the garbage collector after every 700 new container objects. A garbage
    collection that runs while messages are being decoded frees no memory (see docs/decisions/0003).
    The context manager sets the garbage collector's threshold to 0, which stops automatic garbage
    collections. `gc.disable()` is not called, because the application decides whether the garbage
    collector is enabled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused = 0
        self._thresholds = gc.get_threshold()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Pause the garbage collector.

        Several OS threads can pause the garbage collector at the same time.
        """
        with self._lock:
            self._paused += 1
            if self._paused == 1:
                self._thresholds = gc.get_threshold()
                gc.set_threshold(0)
        try:
            yield
        finally:
            with self._lock:
                if self._paused == 1:
                    self._restore_thresholds()
                self._paused = max(0, self._paused - 1)

    def _restore_thresholds(self) -> None:
        # If the garbage collector's threshold is not 0, the application set it during the pause, so
        # leave it unchanged.
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*self._thresholds)

    def reset_after_fork(self) -> None:
        """End the pause in a forked process.

        The OS threads that paused the garbage collector do not exist in a forked process, so the
        pause would never end there.
        """
        if self._paused:
            self._restore_thresholds()
        self._lock, self._paused = threading.Lock(), 0


collector_paused = _CollectorPause()
# Windows has no `register_at_fork`.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=collector_paused.reset_after_fork)

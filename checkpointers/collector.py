"""Pause Python's cyclic garbage collector while many objects are created."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _CollectorPause:
    """A context manager that pauses Python's cyclic garbage collector.

    Every 700 new containers start a collection. While messages are rebuilt, it finds nothing to
    collect (docs/decisions/0003). The pause sets the threshold to 0 and does not call
    `gc.disable()`, because the application decides whether the collector is enabled, also while
    another thread reads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused = 0
        self._thresholds = gc.get_threshold()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Pause the collector. Several threads may pause it at once."""
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
        if gc.get_threshold()[0] == 0:  # otherwise the application has changed it meanwhile
            gc.set_threshold(*self._thresholds)

    def reset_in_child(self) -> None:
        """End the pause in a forked process, which has none of the threads that paused it."""
        if self._paused:
            self._restore_thresholds()
        self._lock, self._paused = threading.Lock(), 0


collector_paused = _CollectorPause()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=collector_paused.reset_in_child)

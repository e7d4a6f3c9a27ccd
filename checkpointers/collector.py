"""A pause of Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _CollectorPause:
    """A pause of Python's cyclic garbage collector while many objects are made at once.

    Each 700 new containers start a collection, and while messages are rebuilt there is nothing for
    them to find (docs/decisions/0003). It is a threshold of 0, not `gc.disable()`: whether the
    collector is enabled is the application's to say, also while another thread reads.
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
                    self._resume()
                self._paused = max(0, self._paused - 1)

    def _resume(self) -> None:
        if gc.get_threshold()[0] == 0:  # else the application has set another meanwhile
            gc.set_threshold(*self._thresholds)

    def in_child(self) -> None:
        """The threads that paused it are not there to end the pause, or to release the lock."""
        if self._paused:
            self._resume()
        self._lock, self._paused = threading.Lock(), 0


collector_paused = _CollectorPause()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=collector_paused.in_child)

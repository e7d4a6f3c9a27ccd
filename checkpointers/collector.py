"""Pauses of Python's cyclic garbage collector while many objects are made at once.

Each 700 new containers start a collection, and now and then one of the whole heap; while a list of
messages is rebuilt there is nothing for them to find, and they were half of the time it took
(docs/decisions/0003). One collection follows when the pause ends.

The pause is a threshold of 0, not `gc.disable()`: whether the collector is enabled is the
application's to say, also while another thread reads.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused = 0
        self._thresholds = gc.get_threshold()

    def begin(self) -> None:
        with self._lock:
            if not self._paused:
                self._thresholds = gc.get_threshold()
                gc.set_threshold(0)
            self._paused += 1

    def end(self) -> None:
        with self._lock:
            if self._paused == 1:
                self._resume()
            self._paused = max(0, self._paused - 1)

    def _resume(self) -> None:
        if gc.get_threshold()[0] == 0:  # else the application has set another meanwhile
            gc.set_threshold(*self._thresholds)

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork(self) -> None:
        self._lock.release()

    def in_child(self) -> None:
        """The threads that paused it are not there to end the pause."""
        if self._paused:
            self._resume()
            self._paused = 0
        self._lock.release()


_pause = _Pause()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector. Several threads may pause it at once."""
    _pause.begin()
    try:
        yield
    finally:
        _pause.end()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_pause.before_fork,
        after_in_parent=_pause.after_fork,
        after_in_child=_pause.in_child,
    )

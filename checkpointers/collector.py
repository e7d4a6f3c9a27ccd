"""Pausing Python's cyclic garbage collector while many objects are made at once.

Each 700 new containers start a collection, and now and then one of the whole heap; while a list of
messages is rebuilt there is nothing for them to find, and they were half of the time it took
(docs/decisions/0003). One collection follows when the pause ends.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_paused = 0


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, unless it is off anyway. Several threads may pause it at once."""
    global _paused
    with _lock:
        if not _paused and not gc.isenabled():
            mine = False
        else:
            mine = True
            _paused += 1
            gc.disable()
    try:
        yield
    finally:
        if mine:
            with _lock:
                _paused -= 1
                if not _paused:
                    gc.enable()

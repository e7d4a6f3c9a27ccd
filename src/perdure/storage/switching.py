"""Shorten Python's thread switch interval, for writes that must start at once.

A thread that is woken waits until the running thread releases the interpreter lock, by default for
5 ms (`sys.getswitchinterval`). In this time a program can already act on an answer, and can crash,
before the thread that stores the answer has started.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SHORT_INTERVAL_S: Final = 0.0001  # seconds
# one object for each `with` block that is being executed in any thread
_running_blocks = set[object]()
_former_s: float | None = None  # the interval to restore after the last block, in seconds


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the interpreter's thread switch interval to 0.1 ms while the block is executed.

    If several threads execute such blocks at the same time, the former interval is restored after
    the last block.
    """
    global _former_s
    block = object()
    _running_blocks.add(block)
    interval = sys.getswitchinterval()
    if interval > 2 * _SHORT_INTERVAL_S:
        _former_s = interval
        sys.setswitchinterval(_SHORT_INTERVAL_S)
    try:
        yield
    finally:
        _running_blocks.discard(block)
        if not _running_blocks:
            former_interval_s, _former_s = _former_s, None
            if former_interval_s is not None and sys.getswitchinterval() <= 2 * _SHORT_INTERVAL_S:
                sys.setswitchinterval(former_interval_s)

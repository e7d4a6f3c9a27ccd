"""Shorten Python's thread switch interval for writes that must not be delayed.

A thread that wakes up has to wait until the running thread releases the global interpreter lock
(GIL), which takes up to 5 ms by default (`sys.getswitchinterval`). While the OS thread that stores
a user's answer waits for the GIL, other OS threads may already process the answer. If the process
crashes before a user's answer is stored, the answer is lost, although other OS threads may already
have acted on it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Thread switch interval in seconds while any thread is inside a `with` block of
# `use_short_switch_interval`
_SHORT_INTERVAL_S: Final = 0.0001
# A set that contains one marker object for each active `with` block of `use_short_switch_interval`,
# in any OS thread
_running_blocks = set[object]()
# Thread switch interval, in seconds, that is restored when the last `with` block of
# `use_short_switch_interval` ends, or None if the interval has not been changed
_former_s: float | None = None


@contextmanager
def use_short_switch_interval() -> Iterator[None]:
    """Shorten the interpreter's thread switch interval to 0.1 ms during the `with` block.

    If the thread switch interval is already 0.2 ms or less, it is left unchanged. A longer interval
    that other code sets during the `with` block stays in effect after the block.

    If several threads use `use_short_switch_interval` at the same time, the original interval is
    restored when the last of their `with` blocks ends.
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

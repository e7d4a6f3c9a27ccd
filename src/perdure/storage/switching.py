"""Shorten Python's thread switch interval for writes that must not be delayed.

A thread that wakes up has to wait until the running thread releases the global interpreter lock
(GIL), which takes up to 5 ms by default (`sys.getswitchinterval`). If the thread that stores the
answer to an interrupt has to wait for the GIL, the rest of the program may act on the answer, and
then crash before the answer is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Thread switch interval in seconds while any thread is inside a `with` block of
# `use_short_switch_interval`
_SHORT_INTERVAL_S: Final = 0.0001
# Set with one marker object for each `with` block of `use_short_switch_interval` that is currently
# running, in any OS thread
_running_blocks = set[object]()
# Thread switch interval, in seconds, to restore when the last `with` block of
# `use_short_switch_interval` ends, or None if there is nothing to restore
_former_s: float | None = None


@contextmanager
def use_short_switch_interval() -> Iterator[None]:
    """Shorten the interpreter's thread switch interval to 0.1 ms during the `with` block.

    An interval of 0.2 ms or less is not changed. If other code sets a longer interval during the
    `with` block, that interval is kept.

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

"""Let another thread run at once, for a write that must not wait.

A thread that is woken waits for the interpreter lock until the running thread gives the lock up, by
default for 5 ms (`sys.getswitchinterval`). In this time a program can run the code that acts on an
answer, and can die from it, before the thread that stores the answer has begun.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SHORT_S: Final = 0.0001
_in_use = set[object]()  # one object for each block that is being executed, in any thread
_former_s: float | None = None  # the interval to restore, while it is shortened


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the interpreter's thread switch interval to 0.1 ms while the block is executed.

    The former interval is restored after the last of several blocks at the same time.
    """
    global _former_s
    block = object()
    _in_use.add(block)
    interval = sys.getswitchinterval()
    if interval > 2 * _SHORT_S:
        _former_s = interval
        sys.setswitchinterval(_SHORT_S)
    try:
        yield
    finally:
        _in_use.discard(block)
        if not _in_use:
            former, _former_s = _former_s, None
            if former is not None and sys.getswitchinterval() <= 2 * _SHORT_S:
                sys.setswitchinterval(former)

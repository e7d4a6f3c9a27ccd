"""A process that forms memories and does nothing else: what `perdure worker` runs."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Final

from perdure.errors import ConfigurationError
from perdure.memory.background.background import Background

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def work(background: Background, *, timeout_s: float = 30.0) -> None:
    """Form in the background until the process is told to end, by SIGINT or SIGTERM.

    What is being formed then is finished; a second signal ends the process at once, and what it was
    at is formed by another, or after the next start. Call it in the main thread.

    Args:
        background: Works. Its `told`, and the logger `perdure.forming`, say a line for each job.
        timeout_s: How long to wait, at the end, for what is being formed.

    Raises:
        ConfigurationError: It only schedules, or this process runs DBOS already.
        StorageUnavailable: The jobs' database cannot be reached.
    """
    if not background.work:
        raise ConfigurationError("the Background has work=False; a worker needs one that works")
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()
        restore()

    before = {each: signal.signal(each, end) for each in _SIGNALS}

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    try:
        background.start()
        while not ended.wait(1.0):  # a wait without an end would not be interrupted everywhere
            pass
    finally:
        restore()
        background.stop(timeout_s)

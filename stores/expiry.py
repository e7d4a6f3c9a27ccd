"""The thread that sweeps expired items now and then."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, Self

from perdure.errors import ConfigurationError, PerdureError
from perdure.storage.database import in_event_loop

_LOG = logging.getLogger("perdure")


class Sweeper(threading.Thread):
    """Calls a function at intervals until it is stopped; awaited, it is returned at once.

    Args:
        sweep: The function; an error of perdure is logged, and the next call tries again.
        minutes: The interval.

    Raises:
        ConfigurationError: The interval is no positive number.
    """

    def __init__(self, sweep: Callable[[], object], minutes: Any) -> None:
        if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes > 0:
            raise ConfigurationError(
                f"the sweep interval is {minutes!r}; expected minutes, more than zero"
            )
        super().__init__(name="perdure-sweep", daemon=True)
        self._sweep = sweep
        self._interval_s = minutes * 60
        self._stopped = threading.Event()

    def run(self) -> None:
        """Sweep until `stop` is called."""
        while not self._stopped.wait(self._interval_s):
            try:
                self._sweep()
            except PerdureError:
                _LOG.exception("expired items could not be swept; the next sweep tries again")

    def stop(self) -> None:
        """Begin no other sweep."""
        self._stopped.set()

    def __await__(self) -> Generator[Any, Any, Self]:
        return self
        yield


class SweeperEnd:
    """Whether a sweeper that was stopped has ended, as a truth value or by `await`.

    It is waited for when this is made, or, in an event loop, when this is awaited.

    Args:
        sweeper: The sweeper; None: there is nothing to wait for.
        timeout: How long to wait, in seconds; None: as long as it takes.
    """

    def __init__(self, sweeper: Sweeper | None, timeout: float | None) -> None:
        self._sweeper, self._timeout = sweeper, timeout
        if not in_event_loop():
            self._wait()

    def _wait(self) -> None:
        if self._sweeper is not None:
            self._sweeper.join(self._timeout)

    def __bool__(self) -> bool:
        return self._sweeper is None or not self._sweeper.is_alive()

    def __await__(self) -> Generator[Any, Any, bool]:
        yield from asyncio.to_thread(self._wait).__await__()
        return bool(self)

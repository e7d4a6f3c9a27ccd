"""Calls of one turn of an event loop, handed to a thread together.

A hop to a thread and back costs more than a small read. Coroutines that ask at the same moment
share one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from perdure.errors import PerdureError
from perdure.storage.sqlite import Database

T = TypeVar("T")
_TOGETHER = 16  # calls in one hop: the first waits for the last


class _Call(NamedTuple):
    work: Callable[[], Any]
    future: asyncio.Future[Any]


class Gatherer:
    """Runs blocking calls of coroutines in a database's threads, those of one turn together.

    Args:
        database: Whose threads.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._calls: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Call]] = WeakKeyDictionary()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Have a call made.

        Raises:
            StorageUnavailable: The database is closed; raised where it is awaited.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        calls = self._calls.get(loop)
        if calls is None:
            self._calls[loop] = [_Call(work, future)]
            loop.call_soon(self._hand_over, loop)
        else:
            calls.append(_Call(work, future))
        return future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        calls = self._calls.pop(loop)
        for start in range(0, len(calls), _TOGETHER):
            some = calls[start : start + _TOGETHER]
            try:
                done = self._database.in_thread(partial(_outcomes, some))
            except PerdureError as exc:
                _deliver(some, [(None, exc)] * len(some))
            else:
                done.add_done_callback(partial(_told, some))


def _outcomes(calls: list[_Call]) -> list[tuple[Any, BaseException | None]]:
    return [_outcome(call) for call in calls]


def _outcome(call: _Call) -> tuple[Any, BaseException | None]:
    if call.future.cancelled():
        return None, None
    try:
        return call.work(), None
    except BaseException as exc:
        return None, exc


def _told(calls: list[_Call], done: asyncio.Future[list[tuple[Any, BaseException | None]]]) -> None:
    if done.cancelled():
        for call in calls:
            call.future.cancel()
    else:
        _deliver(calls, done.result())


def _deliver(calls: list[_Call], outcomes: Iterable[tuple[Any, BaseException | None]]) -> None:
    for call, (result, error) in zip(calls, outcomes, strict=True):
        if call.future.done():
            continue
        if error is None:
            call.future.set_result(result)
        else:
            call.future.set_exception(error)

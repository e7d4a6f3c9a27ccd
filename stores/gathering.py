"""What coroutines ask in one turn of an event loop, done together.

A hop to a thread and back costs more than a small read, and a transaction more than a small write:
those who ask at the same moment share them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from perdure.errors import PerdureError
from perdure.storage.database import Database
from perdure.stores.models import Model
from perdure.stores.writing import Put, Writer

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
                done = asyncio.ensure_future(self._database.in_thread(partial(_outcomes, some)))
            except PerdureError as exc:
                _deliver(some, [(None, exc)] * len(some))
            else:
                done.add_done_callback(partial(_told, some))


class _Wish(NamedTuple):
    puts: Sequence[Put]
    now: int
    model: Model | None
    future: asyncio.Future[None]


class PutGatherer:
    """Writes the puts of coroutines, those of one turn in one go.

    Only puts that nothing but the database can refuse: if it refuses them together, each is tried
    by itself, so that nobody fails for another.

    Args:
        database: Where to write.
        writer: The flows that write.
    """

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer
        self._wishes: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Wish]] = (
            WeakKeyDictionary()
        )

    def run(self, puts: Sequence[Put], now: int, model: Model | None) -> asyncio.Future[None]:
        """Have puts written."""
        loop = asyncio.get_running_loop()
        wish = _Wish(puts, now, model, loop.create_future())
        wishes = self._wishes.setdefault(loop, [])
        wishes.append(wish)
        if len(wishes) == 1:
            loop.call_soon(self._hand_over, loop)
        return wish.future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        wishes = [wish for wish in self._wishes.pop(loop) if not wish.future.cancelled()]
        if wishes:
            self._write(wishes)

    def _write(self, wishes: list[_Wish]) -> None:
        puts = [put for wish in wishes for put in wish.puts]
        model = next((wish.model for wish in wishes if wish.model is not None), None)
        make = partial(self._writer.write, puts, max(wish.now for wish in wishes), model)
        try:
            done = asyncio.ensure_future(self._database.awrite(make))
        except PerdureError as exc:
            _settle(wishes, exc)
        else:
            done.add_done_callback(partial(self._told, wishes))

    def _told(self, wishes: list[_Wish], done: asyncio.Future[None]) -> None:
        error = done.exception()
        if error is None or len(wishes) == 1:
            _settle(wishes, error)
        else:
            for wish in wishes:
                self._write([wish])


def _settle(wishes: list[_Wish], error: BaseException | None) -> None:
    for wish in wishes:
        if wish.future.done():
            continue
        if error is None:
            wish.future.set_result(None)
        else:
            wish.future.set_exception(error)


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

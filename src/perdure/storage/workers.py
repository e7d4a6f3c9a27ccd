"""Handing work to threads and being told the outcome, from a thread or from an event loop.

`concurrent.futures` with `asyncio.wrap_future` does the same at twice the cost (measured in
docs/decisions/0001): each outcome crosses two futures and their callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from perdure.storage.flow import Flow

T = TypeVar("T")
_log = logging.getLogger("perdure")


class Promise(Generic[T]):
    """The outcome of work that another thread does.

    Made within a coroutine with `awaited=True`, it is awaited there; else `result()` blocks for it.
    """

    __slots__ = ("_error", "_loop", "_result", "future")

    def __init__(self, *, awaited: bool) -> None:
        self._loop = asyncio.get_running_loop() if awaited else None
        self.future: Future[T] | asyncio.Future[T] = (
            self._loop.create_future() if self._loop else Future()
        )
        self._result: T
        self._error: BaseException | None = None

    def claim(self) -> bool:
        """Whether the work is still wanted."""
        if isinstance(self.future, Future):
            return self.future.set_running_or_notify_cancel()
        return not self.future.cancelled()

    def keep(self, result: T) -> None:
        """Note the result; `settle` tells it."""
        self._result = result

    def fail(self, error: BaseException) -> None:
        """Note the error; `settle` tells it."""
        self._error = error

    def _tell(self) -> None:
        if self.future.done():
            return  # cancelled while the work was being done
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._result)


class Job(Generic[T]):
    """A flow waiting for the writer, and who is told how it ended.

    `committed` and `undone` are called in the writer's thread, before the promise is settled.
    """

    __slots__ = ("committed", "flow", "promise", "result", "undone")

    def __init__(
        self,
        flow: Flow[T],
        committed: Callable[[T], None] | None,
        undone: Callable[[], None] | None,
        promise: Promise[T],
    ) -> None:
        self.flow = flow
        self.committed = committed
        self.undone = undone
        self.promise = promise
        self.result: T

    def succeed(self) -> None:
        """Its transaction is committed."""
        self.promise.keep(self.result)
        try:
            if self.committed is not None:
                self.committed(self.result)
        except Exception:
            _log.exception("what was committed could not be noted; it is read again when needed")
            self._undo()

    def fail(self, error: BaseException) -> None:
        """It, or the commit, failed."""
        self.promise.fail(error)
        self._undo()

    def _undo(self) -> None:
        if self.undone is not None:
            self.undone()


def settle(promises: Iterable[Promise[Any]]) -> None:
    """Tell outcomes, waking each event loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[Promise[Any]]] = {}
    for promise in promises:
        if promise._loop is None:
            promise._tell()
        else:
            loops.setdefault(promise._loop, []).append(promise)
    for loop, of_loop in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_tell_all, of_loop)


def _tell_all(promises: list[Promise[Any]]) -> None:
    for promise in promises:
        promise._tell()


class Workers:
    """A few daemon threads that do work in the order in which it comes.

    Args:
        count: How many threads.
        name: What they are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[tuple[Promise[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._name = name
        self._count = count
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T], *, awaited: bool) -> Promise[T]:
        """Have work done; threads are started with the first."""
        if not self._threads:
            self._start()
        promise: Promise[T] = Promise(awaited=awaited)
        self._queue.put((promise, work))
        return promise

    def _start(self) -> None:
        with self._lock:
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._loop, name=f"{self._name}-{i}", daemon=True)
                    for i in range(self._count)
                ]
                for thread in self._threads:
                    thread.start()

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            promise, work = task
            if promise.claim():
                try:
                    promise.keep(work())
                except BaseException as exc:
                    promise.fail(exc)
                settle([promise])
            del task, promise, work  # else the last result lives until the next

    def close(self) -> None:
        """Finish what was handed in, then end the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

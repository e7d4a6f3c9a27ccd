"""Work in other threads, and its outcome back to a thread or an event loop.

`concurrent.futures` with `asyncio.wrap_future` does the same at twice the cost (measured in
docs/decisions/0001): each outcome crosses two futures and their callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """The outcome of work that another thread does.

    Made within a coroutine with `awaited=True`, its `future` is awaited there; else
    `future.result()` blocks for it.
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
        if self._loop is None:
            return self.future.set_running_or_notify_cancel()  # type: ignore[union-attr]
        return not self.future.cancelled()

    def keep(self, result: T) -> None:
        """Record the result; `settle` delivers it."""
        self._result = result

    def fail(self, error: BaseException) -> None:
        """Record the error; `settle` delivers it."""
        self._error = error

    def _deliver(self) -> None:
        if self.future.done():
            return  # cancelled while the work was being done
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._result)


def settle(promises: Sequence[Promise[Any]]) -> None:
    """Deliver outcomes; each event loop is woken once."""
    loops: dict[asyncio.AbstractEventLoop, list[Promise[Any]]] = {}
    for promise in promises:
        if promise._loop is None:
            promise._deliver()
        else:
            loops.setdefault(promise._loop, []).append(promise)
    for loop, of_loop in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_deliver_all, of_loop)


def _deliver_all(promises: list[Promise[Any]]) -> None:
    for promise in promises:
        promise._deliver()


class Threads:
    """A few daemon threads that do work in the order in which it comes.

    One is started only while all others are at work: who does one thing after another has one
    thread, and the connection and the caches that go with it.

    Args:
        count: How many threads at most.
        name: What they are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[tuple[Promise[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._count, self._name = count, name
        self._threads: list[threading.Thread] = []
        self._undone = 0
        self._counting = threading.Lock()

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Have work done for a coroutine."""
        promise: Promise[T] = Promise(awaited=True)
        with self._counting:
            self._undone += 1
            if len(self._threads) < min(self._undone, self._count):
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._queue.put((promise, work))
        return promise.future  # type: ignore[return-value]

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            promise, work = task
            wanted = promise.claim()
            if wanted:
                try:
                    promise.keep(work())
                except BaseException as exc:
                    promise.fail(exc)
            with self._counting:  # first: who is told the outcome may have more work at once
                self._undone -= 1
            if wanted:
                settle([promise])
            del task, promise, work  # else the last result lives until the next

    def close(self) -> None:
        """Finish what was handed in, then end the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

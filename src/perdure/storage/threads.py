"""Work in other threads, and its outcome back to a thread or an event loop.

`concurrent.futures` with `asyncio.wrap_future` does the same at twice the cost (measured in
docs/decisions/0001): each outcome crosses two futures and their callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """The outcome of work that another thread does, `result` or `error`; `settle` delivers it.

    With `awaited` it is made within a coroutine, and its `future` is asyncio's.
    """

    __slots__ = ("_loop", "error", "future", "result")

    def __init__(self, *, is_async: bool) -> None:
        self._loop = asyncio.get_running_loop() if is_async else None
        self.future: Future[T] | asyncio.Future[T] = (
            self._loop.create_future() if self._loop else Future()
        )
        self.result: T
        self.error: BaseException | None = None

    def claim(self) -> bool:
        """Whether the work is still wanted."""
        if self._loop is None:
            return self.future.set_running_or_notify_cancel()  # type: ignore[union-attr]
        return not self.future.cancelled()


def settle_promises(promises: Sequence[Promise[Any]]) -> None:
    """Deliver outcomes; each event loop is woken once."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Promise[Any]]] = {}
    for promise in promises:
        by_loop.setdefault(promise._loop, []).append(promise)
    for loop, of_loop in by_loop.items():
        if loop is None:
            deliver_outcomes(of_loop)
        else:
            with contextlib.suppress(RuntimeError):  # it was closed: nobody waits any more
                loop.call_soon_threadsafe(deliver_outcomes, of_loop)


def deliver_outcomes(promises: Sequence[Promise[Any]]) -> None:
    """Deliver outcomes in the event loop's own thread, or of threads."""
    for promise in promises:
        if promise.future.done():
            continue  # cancelled while the work was being done
        if isinstance(promise.error, StopIteration):  # which no future takes
            error = RuntimeError("a call raised StopIteration")
            error.__cause__ = promise.error
            promise.future.set_exception(error)
        elif promise.error is not None:
            promise.future.set_exception(promise.error)
        else:
            promise.future.set_result(promise.result)


_ENDS_S = 0.05  # for a thread that was told to end
_Task = tuple[Promise[Any] | None, Callable[[], Any]]  # None: nobody waits, and nothing is raised


class ThreadPool:
    """A few daemon threads that do work in the order in which it comes.

    One is started only while all others are at work: who does one thing after another has one
    thread, and the connection and the caches that go with it.

    Args:
        max_threads: How many threads at most.
        name: What they are called.
        is_permanent: Whether idle threads wait for more work until `close`. Otherwise they end.
    """

    def __init__(self, max_threads: int, name: str, *, is_permanent: bool) -> None:
        self._max_threads, self._name, self._is_permanent = max_threads, name, is_permanent
        self._lock = threading.Lock()  # of what follows
        self._waiting: deque[_Task] = deque()
        self._undone = 0
        self._threads: list[threading.Thread] = []
        self._wake: SimpleQueue[bool] = SimpleQueue()  # of lasting ones; False: no more will come

    def submit(self, work: Callable[[], object], *, is_async: bool | None) -> Any:
        """Have work done. Returns its future: asyncio's for a coroutine that calls.

        With None there is none: the work tells its outcome itself, and raises nothing.
        """
        promise: Promise[Any] | None = None if is_async is None else Promise(is_async=is_async)
        with self._lock:
            # else what was cancelled piles up behind threads that hang
            while self._waiting and (first := self._waiting[0][0]) and first.future.cancelled():
                self._waiting.popleft()
                self._undone -= 1
            if len(self._threads) < min(self._undone + 1, self._max_threads):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()  # first: if it cannot, nothing has been handed in
                self._threads.append(thread)
            self._waiting.append((promise, work))
            self._undone += 1
        if self._is_permanent:
            self._wake.put(True)
        return None if promise is None else promise.future

    def _run(self) -> None:
        while (task := self._next()) is not None:
            promise, work = task
            if promise is None:
                work()
            elif is_wanted := promise.claim():
                try:
                    promise.result = work()
                except BaseException as exc:
                    promise.error = exc
            with self._lock:  # first: who is told the outcome may have more work at once
                self._undone -= 1
            if promise is not None and is_wanted:
                settle_promises([promise])
            del task, promise, work  # else the last result lives until the next

    def _next(self) -> _Task | None:
        while True:
            is_open = self._is_permanent and self._wake.get()
            with self._lock:
                if self._waiting:
                    return self._waiting.popleft()
                if not self._is_permanent:
                    self._threads.remove(threading.current_thread())
                if not is_open:
                    return None

    def close(self) -> None:
        """Finish what was handed in, then end lasting threads."""
        for _ in self._threads:
            self._wake.put(False)
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            alive[0].join(_ENDS_S)
            if alive[0].is_alive():  # one that began meanwhile was told in its place
                self._wake.put(False)


class Ticket:
    """A place in queues: `reached` is done once it is the first in each of them.

    An event loop waits for that, or, with None, a thread; `with` waits, and leaves in the end.
    """

    __slots__ = ("_queues", "loop", "names", "reached")

    def __init__(
        self, queues: Queues, names: tuple[str, ...], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self._queues, self.names, self.loop = queues, names, loop
        self.reached: Future[None] = Future()

    @property
    def is_abandoned(self) -> bool:
        """Whether its event loop was closed, so that nobody waits or will leave."""
        return self.loop is not None and self.loop.is_closed()

    def __enter__(self) -> None:
        try:
            self.reached.result()
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *exc: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the queues, also without having waited. Twice is no error."""
        self._queues.leave(self)


class Queues:
    """Queues for names, in which work waits in the order in which it came."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of what follows; held for moments only
        self._queues: dict[str, deque[Ticket]] = {}

    def ask(self, *names: str, loop: asyncio.AbstractEventLoop | None = None) -> Ticket:
        """A place at the end of each queue."""
        ticket = Ticket(self, tuple(dict.fromkeys(names)), loop)
        with self._guard:
            for name in ticket.names:
                queue = self._queues.setdefault(name, deque())
                while queue and queue[0].is_abandoned:  # since it was told
                    self._remove(queue[0])
                    queue = self._queues.setdefault(name, deque())
                queue.append(ticket)
            self._tell(ticket)
        return ticket

    def first(self, name: str) -> Ticket | None:
        """Who is first, if anybody waits."""
        with self._guard:
            queue = self._queues.get(name)
            return queue[0] if queue else None

    def leave(self, ticket: Ticket) -> None:
        """See `Ticket.leave`."""
        with self._guard:
            self._remove(ticket)

    def _remove(self, ticket: Ticket) -> None:
        for name in ticket.names:
            queue = self._queues.get(name)
            if queue is None or ticket not in queue:
                continue
            queue.remove(ticket)
            if queue:
                self._tell(queue[0])
            else:
                del self._queues[name]

    def _tell(self, ticket: Ticket) -> None:
        """Tell who waits, if it is the first; if its event loop was closed, nobody does."""
        if ticket.reached.done() or any(
            self._queues[name][0] is not ticket for name in ticket.names
        ):
            return
        if ticket.is_abandoned:
            self._remove(ticket)
        elif ticket.reached.set_running_or_notify_cancel():
            ticket.reached.set_result(None)


# -- calls of what a user gives, which may hang


class TimedOut(TimeoutError):
    """A call took longer than its limit. It may go on; its outcome is ignored."""


def wait_for_outcome(future: Future[T], timeout_s: float | None) -> T:
    """The outcome of a call, for which a thread waits.

    Raises:
        TimedOut: There was none in time. A `TimeoutError` of the call itself is raised as it is.
    """
    try:
        return future.result(timeout_s)
    except TimeoutError as exc:
        if future.done():
            raise
        future.cancel()
        raise TimedOut(f"no answer within {timeout_s} s") from exc


async def await_outcome(call: Awaitable[T], timeout_s: float | None) -> T:
    """See `waited_for`."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except Exception as exc:
        if limit.expired():
            raise TimedOut(f"no answer within {timeout_s} s") from exc
        raise

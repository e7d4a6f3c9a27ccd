"""Thread pools and queues whose results are delivered to a thread or to an event loop.

`concurrent.futures` with `asyncio.wrap_future` costs twice as much (docs/decisions/0001), because
each result passes through two futures and their callbacks.
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
    """The future result of work that another thread does.

    The other thread sets `result` or `error`, then calls `deliver_promises`.

    Args:
        is_async: Whether a coroutine waits. The promise must then be created within the coroutine.

    Attributes:
        future: The future that the waiting side uses, which is asyncio's if a coroutine waits.
        result: The result of the work.
        error: The error that the work raised, or None.
    """

    __slots__ = ("_loop", "error", "future", "result")

    def __init__(self, *, is_async: bool) -> None:
        self._loop = asyncio.get_running_loop() if is_async else None
        self.future: Future[T] | asyncio.Future[T] = (
            self._loop.create_future() if self._loop else Future()
        )
        self.result: T
        self.error: BaseException | None = None

    def try_start(self) -> bool:
        """Return whether to start the work, which is False if its future was cancelled."""
        if self._loop is None:
            return self.future.set_running_or_notify_cancel()  # type: ignore[union-attr]
        return not self.future.cancelled()


def deliver_promises(promises: Sequence[Promise[Any]]) -> None:
    """Deliver the results of several promises. Each event loop is woken only once."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Promise[Any]]] = {}
    for promise in promises:
        by_loop.setdefault(promise._loop, []).append(promise)
    for loop, loop_promises in by_loop.items():
        if loop is None:
            set_outcomes(loop_promises)
        else:
            # The event loop was closed, so nobody waits for the result.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(set_outcomes, loop_promises)


def set_outcomes(promises: Sequence[Promise[Any]]) -> None:
    """Set the results of futures; those of an event loop must be set in the loop's own thread."""
    for promise in promises:
        if promise.future.done():
            continue  # The future was cancelled while the work was done.
        if isinstance(promise.error, StopIteration):  # futures do not accept it
            error = RuntimeError("a call raised StopIteration")
            error.__cause__ = promise.error
            promise.future.set_exception(error)
        elif promise.error is not None:
            promise.future.set_exception(promise.error)
        else:
            promise.future.set_result(promise.result)


_JOIN_S = 0.05  # seconds to wait for the end of a thread before it is signalled again
_Task = tuple[
    Promise[Any] | None, Callable[[], Any]
]  # a task without a promise has no caller that waits for the result


class ThreadPool:
    """Daemon threads that run tasks in the order of their submission.

    A thread is started only if all others are busy. A caller with one task after another therefore
    uses one thread, with its connection and its caches.

    Args:
        max_threads: The maximum number of threads.
        name: The name of the threads.
        is_permanent: Whether idle threads wait for more work until `close`. Otherwise they end.
    """

    def __init__(self, max_threads: int, name: str, *, is_permanent: bool) -> None:
        self._max_threads, self._name, self._is_permanent = max_threads, name, is_permanent
        self._lock = threading.Lock()  # protects the attributes below
        self._queued_tasks: deque[_Task] = deque()
        self._unfinished_count = 0
        self._threads: list[threading.Thread] = []
        self._wake_signals: SimpleQueue[bool] = (
            SimpleQueue()
        )  # for permanent threads; False ends one

    def submit(self, work: Callable[[], object], *, is_async: bool | None) -> Any:
        """Submit a function to be called in one of the threads.

        Args:
            work: The function.
            is_async: Whether a coroutine waits for the result. None means that nobody waits, and
                that `work` handles its own errors.

        Returns:
            A future of the result, which is asyncio's if `is_async`. None if nobody waits.
        """
        promise: Promise[Any] | None = None if is_async is None else Promise(is_async=is_async)
        with self._lock:
            # Remove cancelled tasks, because they would pile up behind threads that hang.
            while (
                self._queued_tasks
                and (first_promise := self._queued_tasks[0][0])
                and first_promise.future.cancelled()
            ):
                self._queued_tasks.popleft()
                self._unfinished_count -= 1
            if len(self._threads) < min(self._unfinished_count + 1, self._max_threads):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                # Start the thread first, because a failure must not leave a task in the queue.
                thread.start()
                self._threads.append(thread)
            self._queued_tasks.append((promise, work))
            self._unfinished_count += 1
        if self._is_permanent:
            self._wake_signals.put(True)
        return None if promise is None else promise.future

    def _run(self) -> None:
        """Run queued tasks until `_take_task` returns None."""
        while (task := self._take_task()) is not None:
            promise, work = task
            if promise is None:
                work()
            elif is_wanted := promise.try_start():
                try:
                    promise.result = work()
                except BaseException as exc:
                    promise.error = exc
            # Mark the thread as idle before the delivery, because the caller may submit more work
            # at once.
            with self._lock:
                self._unfinished_count -= 1
            if promise is not None and is_wanted:
                deliver_promises([promise])
            del (
                task,
                promise,
                work,
                # Delete the references, because the last result would stay in memory until the next
                # task.
            )

    def _take_task(self) -> _Task | None:
        """Return the next task. Return None if the thread must end."""
        while True:
            is_open = self._is_permanent and self._wake_signals.get()
            with self._lock:
                if self._queued_tasks:
                    return self._queued_tasks.popleft()
                if not self._is_permanent:
                    self._threads.remove(threading.current_thread())
                if not is_open:
                    return None

    def close(self) -> None:
        """Finish all submitted tasks, then end permanent threads."""
        for _ in self._threads:
            self._wake_signals.put(False)
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            alive[0].join(_JOIN_S)
            # A thread that started in the meantime may have received the signal.
            if alive[0].is_alive():
                self._wake_signals.put(False)


class Ticket:
    """A place in one or several queues.

    In a `with` block, a thread waits for its turn, and leaves the queues at the end.

    Attributes:
        names: The names of the queues.
        loop: The event loop that waits for the turn, or None if a thread waits.
        turn: A future that is done once the ticket is the first in each queue.
    """

    __slots__ = ("_queues", "loop", "names", "turn")

    def __init__(
        self, queues: Queues, names: tuple[str, ...], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self._queues, self.names, self.loop = queues, names, loop
        self.turn: Future[None] = Future()

    @property
    def is_abandoned(self) -> bool:
        """Whether the event loop was closed, so that nobody waits or leaves any more."""
        return self.loop is not None and self.loop.is_closed()

    def __enter__(self) -> None:
        try:
            self.turn.result()
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *exc: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the queues, even before the turn has come. A second call does nothing."""
        self._queues.leave(self)


class Queues:
    """One queue for each name, in which tickets wait in the order of their arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects `_queues`
        self._queues: dict[str, deque[Ticket]] = {}

    def join(self, *names: str, loop: asyncio.AbstractEventLoop | None = None) -> Ticket:
        """Return a ticket at the end of the queues with these names."""
        ticket = Ticket(self, tuple(dict.fromkeys(names)), loop)
        with self._lock:
            for name in ticket.names:
                queue = self._queues.setdefault(name, deque())
                while (
                    queue and queue[0].is_abandoned
                ):  # The event loop of this ticket was closed after its turn had come.
                    self._remove(queue[0])
                    queue = self._queues.setdefault(name, deque())
                queue.append(ticket)
            self._notify_if_first(ticket)
        return ticket

    def first_ticket(self, name: str) -> Ticket | None:
        """Return the first ticket in a queue, or None if the queue is empty."""
        with self._lock:
            queue = self._queues.get(name)
            return queue[0] if queue else None

    def leave(self, ticket: Ticket) -> None:
        """See `Ticket.leave`."""
        with self._lock:
            self._remove(ticket)

    def _remove(self, ticket: Ticket) -> None:
        """Remove a ticket from its queues, and notify the tickets that become the first."""
        for name in ticket.names:
            queue = self._queues.get(name)
            if queue is None or ticket not in queue:
                continue
            queue.remove(ticket)
            if queue:
                self._notify_if_first(queue[0])
            else:
                del self._queues[name]

    def _notify_if_first(self, ticket: Ticket) -> None:
        """Complete the turn of a ticket that is first in all its queues, unless it is abandoned."""
        if ticket.turn.done() or any(self._queues[name][0] is not ticket for name in ticket.names):
            return
        if ticket.is_abandoned:
            self._remove(ticket)
        elif ticket.turn.set_running_or_notify_cancel():
            ticket.turn.set_result(None)


# -- calls of a user's functions, which may hang


class TimedOut(TimeoutError):
    """A call took longer than its limit. It may still be running, and its result is ignored."""


def wait_for_outcome(future: Future[T], timeout_s: float | None) -> T:
    """Wait for the result of a call in the calling thread, and return it.

    Raises:
        TimedOut: The call took longer than `timeout_s`. A `TimeoutError` that the call itself
            raised is passed on unchanged.
    """
    try:
        return future.result(timeout_s)
    except TimeoutError as exc:
        if future.done():
            raise
        future.cancel()
        raise TimedOut(f"no answer within {timeout_s} s") from exc


async def await_outcome(call: Awaitable[T], timeout_s: float | None) -> T:
    """Await the result of a call, with a limit of time; see `wait_for_outcome`."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except Exception as exc:
        if limit.expired():
            raise TimedOut(f"no answer within {timeout_s} s") from exc
        raise

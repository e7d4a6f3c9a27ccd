"""Run functions in thread pools, wait in queues, and limit the time of calls.

Both OS threads and coroutines can wait for the results of pools, for their turn in queues, and for
calls. The pools do not use the executors of `concurrent.futures`. With executors and
`asyncio.wrap_future`, the overhead per call would double (docs/decisions/0001), because each result
would pass through two futures and their callbacks.
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
    """The outcome of a task that runs in another thread, and a future for the waiting caller.

    The thread that executes the task sets `result` or `error`, then calls
    `resolve_futures_in_their_threads`.

    Args:
        is_async: Whether a coroutine waits. The promise must then be created within the coroutine.

    Attributes:
        future: The future that the waiting side uses, which is asyncio's if a coroutine waits.
        result: The result of the task. It is not set before the task has succeeded.
        error: The error that the task raised, or None.
    """

    __slots__ = ("_loop", "error", "future", "result")

    def __init__(self, *, is_async: bool) -> None:
        self._loop = asyncio.get_running_loop() if is_async else None
        self.future: Future[T] | asyncio.Future[T] = (
            self._loop.create_future() if self._loop else Future()
        )
        self.result: T
        self.error: BaseException | None = None

    def start_unless_cancelled(self) -> bool:
        """Return whether the task should be executed.

        The result is False if the promise's future was cancelled. If the result is True and the
        waiting caller is a blocked thread (not a coroutine), the future can no longer be cancelled.
        """
        if self._loop is None:
            return self.future.set_running_or_notify_cancel()  # type: ignore[union-attr]
        return not self.future.cancelled()


def resolve_futures_in_their_threads(promises: Sequence[Promise[Any]]) -> None:
    """Resolve the futures of several promises.

    If a coroutine waits for a future, the future is resolved in the OS thread of the coroutine's
    event loop. Each event loop is woken only once. If a thread waits for a future by blocking, the
    future is resolved in the calling thread.
    """
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Promise[Any]]] = {}
    for promise in promises:
        by_loop.setdefault(promise._loop, []).append(promise)
    for loop, loop_promises in by_loop.items():
        if loop is None:
            resolve_futures_in_this_thread(loop_promises)
        else:
            # RuntimeError means that the event loop is closed. Nothing waits for the results then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve_futures_in_this_thread, loop_promises)


def resolve_futures_in_this_thread(promises: Sequence[Promise[Any]]) -> None:
    """Set the results of futures.

    An asyncio future must be resolved in the thread of its event loop.
    """
    for promise in promises:
        if promise.future.done():
            # Skip a future that was cancelled while its task was running.
            continue
        if isinstance(promise.error, StopIteration):  # A future does not accept StopIteration.
            error = RuntimeError("a call raised StopIteration")
            error.__cause__ = promise.error
            promise.future.set_exception(error)
        elif promise.error is not None:
            promise.future.set_exception(promise.error)
        else:
            promise.future.set_result(promise.result)


# Number of seconds that `close` waits for a worker thread to end before it sends one more stop
# signal
_JOIN_S = 0.05
# A task consists of a function and a promise for its result. The promise is None if no caller waits
# for the result.
_Task = tuple[Promise[Any] | None, Callable[[], Any]]


class ThreadPool:
    """A pool of daemon threads that start tasks in submission order.

    A new thread is started only if all threads in the pool are busy, up to `max_threads`. If a
    caller waits for each task to finish before submitting the next one, all its tasks run in the
    same thread and can reuse the thread's connection and caches.

    Args:
        max_threads: The maximum number of threads.
        name: The name of the threads.
        is_permanent: Whether idle threads wait for more work until `close`. Otherwise they end.
    """

    def __init__(self, max_threads: int, name: str, *, is_permanent: bool) -> None:
        self._max_threads, self._name, self._is_permanent = max_threads, name, is_permanent
        self._lock = threading.Lock()  # This lock protects the other attributes of the pool.
        self._queued_tasks: deque[_Task] = deque()
        self._unfinished_count = 0
        self._threads: list[threading.Thread] = []
        # Signals for the threads of a permanent pool. True tells a thread to take a task, and False
        # tells it to stop.
        self._wake_signals: SimpleQueue[bool] = SimpleQueue()

    def submit_without_result(self, work: Callable[[], object]) -> None:
        """Submit a function whose result nobody waits for, and which handles its own errors."""
        self.submit(work, is_async=None)

    def submit(self, work: Callable[[], object], *, is_async: bool | None) -> Any:
        """Submit a function to run in one of the pool's threads, and return a future of its result.

        Args:
            work: The function.
            is_async: Whether a coroutine waits for the result. The future is then asyncio's. If it
                is None, nobody waits for the result, and None is returned.
        """
        promise = None if is_async is None else Promise[Any](is_async=is_async)
        with self._lock:
            # Remove cancelled tasks from the front of the queue. They would otherwise accumulate
            # there while all threads are blocked.
            while (
                self._queued_tasks
                and (first_promise := self._queued_tasks[0][0])
                and first_promise.future.cancelled()
            ):
                self._queued_tasks.popleft()
                self._unfinished_count -= 1
            if len(self._threads) < min(self._unfinished_count + 1, self._max_threads):
                thread = threading.Thread(
                    target=self._run_queued_tasks, name=self._name, daemon=True
                )
                # Start the thread before queueing the task, so that a failed start does not leave
                # the task in the queue.
                thread.start()
                self._threads.append(thread)
            self._queued_tasks.append((promise, work))
            self._unfinished_count += 1
        if self._is_permanent:
            self._wake_signals.put(True)
        return None if promise is None else promise.future

    def _run_queued_tasks(self) -> None:
        """Execute queued tasks until this thread has to stop."""
        while (task := self._take_task()) is not None:
            promise, work = task
            if promise is None:
                work()
            elif is_wanted := promise.start_unless_cancelled():
                try:
                    promise.result = work()
                except BaseException as exc:
                    promise.error = exc
            # Mark this thread as idle before delivering the result, because a caller that receives
            # the result may immediately submit more work.
            with self._lock:
                self._unfinished_count -= 1
            if promise is not None and is_wanted:
                resolve_futures_in_their_threads([promise])
            # Delete the references to the finished task, so that its result is not kept in memory
            # until the next task.
            del task, promise, work

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
        """Wait until all submitted tasks are finished and all threads of the pool have ended."""
        for _ in self._threads:
            self._wake_signals.put(False)
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            alive[0].join(_JOIN_S)
            # Send one more stop signal. A thread that received a stop signal may have executed a
            # queued task instead of ending, and a thread may have been started after the first
            # signals were sent.
            if alive[0].is_alive():
                self._wake_signals.put(False)


class Ticket:
    """A waiting task's place in one or more queues of a `Queues` object.

    The statement `with ticket:` waits until the ticket is first in all of its queues. At the end of
    the `with` block, the ticket is removed from all queues.

    Attributes:
        names: The names of the queues.
        loop: The event loop that waits for the turn, or None if a thread waits.
        turn: A future that is done once the ticket is first in all its queues.
    """

    __slots__ = ("_queues", "loop", "names", "turn")

    def __init__(
        self, queues: Queues, names: tuple[str, ...], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self._queues, self.names, self.loop = queues, names, loop
        self.turn: Future[None] = Future()

    @property
    def is_abandoned(self) -> bool:
        """Whether the event loop that was waiting for the ticket has been closed.

        An abandoned ticket has no waiting caller left that would remove it from its queues.
        """
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
        """Remove the ticket from all its queues, even if it was never first in them.

        A second call does nothing.
        """
        self._queues.leave(self)


class Queues:
    """First-in, first-out queues with names. An entry of a queue is a `Ticket`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # This lock protects `_queues`.
        self._queues: dict[str, deque[Ticket]] = {}

    def append_ticket_to_queues(
        self, *names: str, loop: asyncio.AbstractEventLoop | None = None
    ) -> Ticket:
        """Append a new ticket to each of the named queues, and return the ticket."""
        ticket = Ticket(self, tuple(dict.fromkeys(names)), loop)
        with self._lock:
            for name in ticket.names:
                queue = self._queues.setdefault(name, deque())
                # Remove tickets that were abandoned after they had become first in the queue.
                # Their callers no longer exist, so nothing else removes them.
                while queue and queue[0].is_abandoned:
                    self._remove_ticket_and_notify_next(queue[0])
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
            self._remove_ticket_and_notify_next(ticket)

    def _remove_ticket_and_notify_next(self, ticket: Ticket) -> None:
        """Remove a ticket from its queues, and notify each ticket that has become first in a queue.

        A ticket is notified only when it is first in all of its queues.
        """
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
        """Wake the thread or coroutine of a ticket if the ticket is first in all of its queues.

        If the ticket is first but abandoned, it is removed from its queues instead.
        """
        if ticket.turn.done() or any(self._queues[name][0] is not ticket for name in ticket.names):
            return
        if ticket.is_abandoned:
            self._remove_ticket_and_notify_next(ticket)
        elif ticket.turn.set_running_or_notify_cancel():
            ticket.turn.set_result(None)


# -- calls of a user's functions, which may hang


class TimedOut(TimeoutError):
    """Raised if a call took longer than its time limit.

    The called function may still be running. The result of the function is ignored.
    """


def wait_for_outcome(future: Future[T], timeout_s: float | None) -> T:
    """Block until a call has finished, and return its result.

    If `timeout_s` is None, there is no time limit.

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
    """Await the result of a call, with a time limit; see `wait_for_outcome`."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except Exception as exc:
        if limit.expired():
            raise TimedOut(f"no answer within {timeout_s} s") from exc
        raise

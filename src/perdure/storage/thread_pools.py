"""Run functions in thread pools, and wait for results with a timeout.

Both OS threads and coroutines can wait for the result of a function that runs in a pool.
`wait_for_outcome` is for OS threads, and `await_outcome` is for coroutines. The pools do not use
the executors of `concurrent.futures` (docs/decisions/0001). Executors with `asyncio.wrap_future`
would pass each result through two futures, and double the overhead per call.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from perdure.storage.flow import Promise, resolve_futures_in_their_threads

T = TypeVar("T")
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
        # This lock must be held to read or change the other attributes of the pool.
        self._lock = threading.Lock()
        self._queued_tasks: deque[_Task] = deque()
        self._unfinished_count = 0
        self._threads: list[threading.Thread] = []
        # Signals for the idle OS threads of a permanent pool. True tells a thread to take a task
        # from the queue, and False tells a thread to stop.
        self._wake_signals: SimpleQueue[bool] = SimpleQueue()

    def submit_without_result(self, work: Callable[[], object]) -> None:
        """Submit a function that handles its own errors and whose result is not needed."""
        self.submit(work, is_async=None)

    def submit(self, work: Callable[[], object], *, is_async: bool | None) -> Any:
        """Submit a function to run in one of the pool's threads, and return a future of its result.

        Args:
            work: The function.
            is_async: Whether a coroutine waits for the result. The future is then asyncio's. If it
                is None, nobody waits for the result, and None is returned.
        """
        promise: Promise[Any] | None = None
        if is_async is not None:
            promise = Promise(asyncio.get_running_loop().create_future() if is_async else Future())
        with self._lock:
            # Remove cancelled tasks from the front of the queue. If they stayed there, they would
            # accumulate while all threads of the pool are blocked.
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
                # Start the thread before the task is added to the queue, so that a failure to start
                # the thread leaves the queue unchanged.
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
            # Send another stop signal, because one stop signal per thread may be too few. A thread
            # that receives a stop signal while a task is queued executes the task instead of
            # ending. A thread that was started after the signals were sent also needs a stop
            # signal.
            if alive[0].is_alive():
                self._wake_signals.put(False)


# -- calls of a user's functions, which may hang


class TimedOut(TimeoutError):
    """Raised if a call took longer than its time limit.

    The function that was called might still be running. Its result is ignored.
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

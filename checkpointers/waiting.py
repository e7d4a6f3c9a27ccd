"""`on_conflict="wait"`: a run on a thread that another run holds waits until that one has ended.

langgraph tells a checkpointer when a run reads and writes, not when it ends. An end is any of:

- its stream writer is gone: each run's `Runtime` has one of its own, a function made for it;
- it stored an error or an interrupt: it will put no further checkpoint;
- the asyncio task that awaited it is done, or the same task or thread begins another run.

Within one process; across processes the compare-and-swap on the head still holds.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.base import Address
from perdure.checkpointers.conflicts import runtime_of
from perdure.errors import BlockingCallInLoop, ConcurrentUpdate, ConfigurationError

_Ticket = Future[None]  # told when it is a run's turn
_COLLECT_AFTER_S: Final = 1.0  # a failed run may live on in a cycle with its own traceback


class _Run(NamedTuple):
    """A run, and the asyncio task or thread that began it."""

    id: int
    owner: Any


class Queue:
    """Who holds each thread, and who waits for it.

    Args:
        wait_s: How long a run waits at most.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._holders: dict[str, _Run] = {}
        self._waiting: dict[str, deque[tuple[_Run, _Ticket]]] = {}
        self._ended: deque[tuple[str, int]] = deque()
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    # -- beginnings

    def _turn(self, config: RunnableConfig, at: Address) -> _Ticket | None:
        """None when the caller may go on; else what tells when."""
        runtime = runtime_of(config)
        if runtime is None or at.checkpoint_ns or at.checkpoint_id is not None:
            return None
        life = runtime.stream_writer
        if "<locals>" not in getattr(life, "__qualname__", ""):
            raise ConfigurationError(
                "on_conflict='wait' cannot tell when a run of this langgraph ends: its runtime has "
                f"the stream writer {life!r}, which all runs share; use 'fork' or 'error'"
            )
        run = _Run(id(life), self._owner())
        with self._lock:
            holder = self._holders.get(at.thread_id)
            if holder is not None and holder.id != run.id and holder.owner == run.owner:
                self._release(at.thread_id, holder.id)
            known = self._holders.setdefault(at.thread_id, run).id == run.id
            ticket = None if known else _Ticket()
            if ticket is not None:
                self._waiting.setdefault(at.thread_id, deque()).append((run, ticket))
        weakref.finalize(life, self._note_end, at.thread_id, run.id).atexit = False
        self._pass_on()
        return ticket

    def _owner(self) -> Any:
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        if task is None:
            return threading.get_ident()
        if task not in self._tasks:
            self._tasks.add(task)
            task.add_done_callback(self._task_done)
        return weakref.ref(task)

    # -- ends

    def stopped(self, config: RunnableConfig, at: Address) -> None:
        """A run stored an error or an interrupt."""
        runtime = runtime_of(config)
        if runtime is not None and not at.checkpoint_ns:
            self._note_end(at.thread_id, id(runtime.stream_writer))

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        owner = weakref.ref(task)
        for thread_id, run in list(self._holders.items()):
            if run.owner == owner:
                self._note_end(thread_id, run.id)

    def _note_end(self, thread_id: str, run: int) -> None:
        # called wherever an object is let go, also by a thread that holds the lock
        self._ended.append((thread_id, run))
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the threads of ended runs to those who wait; whoever has the lock does it."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._release(*self._ended.popleft())
            finally:
                self._lock.release()

    def _release(self, thread_id: str, run: int) -> None:
        waiting = self._waiting.get(thread_id, deque())
        holder = self._holders.get(thread_id)
        if holder is None or holder.id != run:
            self._waiting[thread_id] = deque(w for w in waiting if w[0].id != run)
            return
        while waiting:
            self._holders[thread_id], ticket = waiting.popleft()
            if ticket.set_running_or_notify_cancel():  # else whoever waited has given up
                ticket.set_result(None)
                return
        del self._holders[thread_id]
        self._waiting.pop(thread_id, None)

    # -- waiting

    def _patience(self, thread_id: str) -> Iterator[float]:
        """For how many seconds to wait, again and again, until there is no more patience."""
        until = time.monotonic() + self._wait_s
        yield min(_COLLECT_AFTER_S, self._wait_s)
        gc.collect()
        while (left := until - time.monotonic()) > 0:
            yield left
        raise ConcurrentUpdate(
            f"thread {thread_id!r} was held by another run for {self._wait_s} s; is one of them "
            "an iterator of stream() that was left open? wait_s= sets how long to wait"
        )

    def wait(self, config: RunnableConfig, at: Address) -> None:
        """Block until the thread is free for this run.

        Raises:
            BlockingCallInLoop: That would stop the event loop on which the other run may be.
            ConcurrentUpdate: It was not free in time.
            ConfigurationError: Nothing tells when a run ends.
        """
        ticket = self._turn(config, at)
        if ticket is None:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            for seconds in self._patience(at.thread_id):
                with suppress(TimeoutError):
                    ticket.result(seconds)
                    return
        ticket.cancel()
        raise BlockingCallInLoop(
            f"thread {at.thread_id!r} is held by another run, and waiting for it here would block "
            "the event loop: use ainvoke() or astream()"
        )

    async def await_(self, config: RunnableConfig, at: Address) -> None:
        """See `wait`."""
        ticket = self._turn(config, at)
        if ticket is None:
            return
        told = asyncio.wrap_future(ticket)
        try:
            for seconds in self._patience(at.thread_id):
                if (await asyncio.wait({told}, timeout=seconds))[0]:
                    return
        finally:
            told.cancel()

"""`on_conflict="wait"`: a run on a thread that another run holds waits until that one is over.

An end is what langchain's callbacks tell (`chains.py`), or that nothing holds the run's stream
writer any more, or that the event loop it ran on is closed. Where an end cannot be seen, or could
not come because the one who waits keeps it from coming, the runs overlap instead: the
compare-and-swap on the head holds in any case, and the one that lost is a branch.

Within one checkpointer; between several, and across processes, only the compare-and-swap holds.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import partial
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.base import Address
from perdure.checkpointers.chains import Chain, current, watch
from perdure.checkpointers.runs import Run, run_of, runtime_of
from perdure.errors import (
    BlockingCallInLoop,
    ConcurrentUpdate,
    ConfigurationError,
    StorageUnavailable,
)

LOOK_S: Final = 1.0  # how often one who waits looks whether it waits in vain


class _Turn:
    """A run's turn on a thread, or its place among those who wait for one.

    Attributes:
        chain: Tells when it is over, if anything does.
        driver: The task or thread that began it.
        loop: The event loop it runs on, if any.
        ticket: Done when it may go on.
        seen: When it last read or wrote (monotonic).
        over: Whether it has ended, or waits no longer.
    """

    __slots__ = ("chain", "driver", "loop", "over", "run", "seen", "thread_id", "ticket")

    def __init__(self, thread_id: str, run: Run) -> None:
        self.thread_id = thread_id
        self.run = run
        self.chain: Chain | None = current()
        self.loop = _running_loop()
        task = asyncio.current_task() if self.loop is not None else None
        self.driver: weakref.ref[Any] = weakref.ref(task or threading.current_thread())
        self.ticket: Future[None] = Future()
        self.seen = time.monotonic()
        self.over = False

    def is_inside(self, other: _Turn) -> bool:
        """Whether the other run cannot go on before this one has ended."""
        return bool(self.chain and other.chain and self.chain.within(other.chain))


class Queue:
    """Who holds each thread, and who waits for it.

    Args:
        wait_s: How long a run waits at most.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._look_s = min(LOOK_S, wait_s)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._holders: dict[str, _Turn] = {}
        self._waiting: dict[str, deque[_Turn]] = {}
        self._ended: deque[_Turn] = deque()
        self._closed = False
        watch()

    # -- beginnings

    def _turn(self, config: RunnableConfig, at: Address) -> _Turn | None:
        """None when the caller may go on; else its place in the queue."""
        runtime = runtime_of(config)
        if runtime is None or at.checkpoint_ns or at.checkpoint_id is not None:
            return None
        run = run_of(runtime)
        if run is None:
            raise ConfigurationError(
                "on_conflict='wait' cannot tell one run of this langgraph from another: their "
                f"runtimes share the stream writer {runtime.stream_writer!r}; use 'fork' or 'error'"
            )
        if run.began or self._pid != os.getpid():  # a node that looks around; a forked process
            return None
        turn = _Turn(at.thread_id, run)
        with self._lock:
            waits = self._enter(turn)
        weakref.finalize(runtime.stream_writer, self._note_end, turn).atexit = False
        if turn.chain is not None:
            turn.chain.when_over(partial(self._note_end, turn))
        self._pass_on()
        return turn if waits else None

    def _enter(self, turn: _Turn) -> bool:
        """Returns whether it has to wait."""
        if self._closed:
            raise _closed(turn.thread_id)
        holder = self._holders.setdefault(turn.thread_id, turn)
        if holder is turn or holder.run is turn.run or turn.is_inside(holder):
            return False
        self._waiting.setdefault(turn.thread_id, deque()).append(turn)
        return True

    def heard(self, thread_id: str) -> None:
        """Something was written to a thread: whoever holds it is alive."""
        holder = self._holders.get(thread_id)
        if holder is not None:
            holder.seen = time.monotonic()

    # -- ends

    def _note_end(self, turn: _Turn) -> None:
        # called wherever an object is let go, also by a thread that holds the lock
        turn.over = True
        self._ended.append(turn)
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the threads of ended runs to those who wait; whoever has the lock does it."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._release(self._ended.popleft())
            finally:
                self._lock.release()

    def _release(self, turn: _Turn) -> None:
        waiting = self._waiting.get(turn.thread_id, deque())
        if self._holders.get(turn.thread_id) is turn:
            del self._holders[turn.thread_id]
            while waiting and turn.thread_id not in self._holders:
                heir = waiting.popleft()
                if heir.ticket.set_running_or_notify_cancel():
                    heir.ticket.set_result(None)
                    if not heir.over:
                        heir.seen = time.monotonic()
                        self._holders[turn.thread_id] = heir
        elif turn.ticket.cancelled():
            with suppress(ValueError):
                waiting.remove(turn)
        if not waiting:
            self._waiting.pop(turn.thread_id, None)

    def _look(self, turn: _Turn) -> None:
        """Whether one who waits does so in vain; then the holder loses the thread."""
        with self._lock:
            holder = self._holders.get(turn.thread_id)
            if holder is not None and holder is not turn:
                quiet = time.monotonic() - holder.seen >= self._look_s
                # it may be that nobody but the one who waits would drive it on; or tell its end
                in_vain = quiet and (holder.driver == turn.driver or holder.chain is None)
                if in_vain or (holder.loop is not None and holder.loop.is_closed()):
                    self._release(holder)
        self._pass_on()

    def close(self) -> None:
        """Those who wait are told that nothing will come of it."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            for turn in (turn for turns in self._waiting.values() for turn in turns):
                if turn.ticket.set_running_or_notify_cancel():
                    turn.ticket.set_exception(_closed(turn.thread_id))
            self._waiting.clear()

    # -- waiting

    def _patience(self, turn: _Turn) -> Iterator[float]:
        """For how many seconds to wait, again and again, until it is told or has no patience."""
        until = time.monotonic() + self._wait_s
        while not turn.ticket.done():
            left = until - time.monotonic()
            if left <= 0:
                raise ConcurrentUpdate(
                    f"thread {turn.thread_id!r} was held by another run for {self._wait_s} s; is "
                    "one of them an iterator of stream() that was left open? wait_s= sets how "
                    "long to wait"
                )
            yield min(self._look_s, left)
            self._look(turn)

    def wait(self, config: RunnableConfig, at: Address) -> None:
        """Block until the thread is free for this run.

        Raises:
            BlockingCallInLoop: That would stop the event loop on which the other run may be.
            ConcurrentUpdate: It was not free in time.
            ConfigurationError: Nothing tells one run from another.
            StorageUnavailable: The checkpointer was closed meanwhile.
        """
        turn = self._turn(config, at)
        if turn is None:
            return
        try:
            if turn.loop is not None:
                raise BlockingCallInLoop(
                    f"thread {at.thread_id!r} is held by another run, and waiting for it here "
                    "would block the event loop: use ainvoke() or astream()"
                )
            for seconds in self._patience(turn):
                wait_for([turn.ticket], seconds)
            turn.ticket.result()
        except BaseException:
            self._leave(turn)
            raise

    async def await_(self, config: RunnableConfig, at: Address) -> None:
        """See `wait`."""
        turn = self._turn(config, at)
        if turn is None:
            return
        try:
            told = asyncio.wrap_future(turn.ticket)
            for seconds in self._patience(turn):
                await asyncio.wait({told}, timeout=seconds)
            await told
        except BaseException:
            self._leave(turn)
            raise

    def _leave(self, turn: _Turn) -> None:
        """It waits no longer; if its turn has come meanwhile, it is passed on."""
        turn.ticket.cancel()
        self._note_end(turn)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _closed(thread_id: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"the checkpointer was closed while a run waited for thread {thread_id!r}"
    )

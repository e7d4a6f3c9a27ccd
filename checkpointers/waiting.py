"""`on_conflict="wait"`: a run on a thread that another run holds waits until that one has ended.

langgraph tells a checkpointer when a run reads and writes, not when it ends. But each run has a
`Runtime` with a stream writer of its own, a function made for it that nobody keeps once the run is
over: a run has ended when its stream writer is gone. Within one process; across processes the
compare-and-swap on the head still holds.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from concurrent.futures import Future

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.base import Address
from perdure.checkpointers.conflicts import runtime_of
from perdure.errors import BlockingCallInLoop, ConfigurationError

_Ticket = Future[None]  # told when it is a run's turn


class Queue:
    """Who holds each thread, and who waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, _Ticket]]] = {}
        self._ended: deque[tuple[str, int]] = deque()

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
        run = id(life)
        with self._lock:
            known = self._holders.setdefault(at.thread_id, run) == run
            waiting = self._waiting.setdefault(at.thread_id, deque())
            ticket = None if known else _Ticket()
            if ticket is not None:
                waiting.append((run, ticket))
        # may be called wherever an object is let go, also by a thread that holds the lock
        weakref.finalize(life, self._note_end, at.thread_id, run).atexit = False
        self._pass_on()
        return ticket

    def _note_end(self, thread_id: str, run: int) -> None:
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
        if self._holders.get(thread_id) != run:
            self._waiting[thread_id] = deque(w for w in waiting if w[0] != run)
            return
        while waiting:
            self._holders[thread_id], ticket = waiting.popleft()
            if ticket.set_running_or_notify_cancel():  # else whoever waited has given up
                ticket.set_result(None)
                return
        del self._holders[thread_id]
        self._waiting.pop(thread_id, None)

    def wait(self, config: RunnableConfig, at: Address) -> None:
        """Block until the thread is free for this run.

        Raises:
            BlockingCallInLoop: That would stop the event loop on which the other run may be.
            ConfigurationError: Nothing tells when a run ends.
        """
        ticket = self._turn(config, at)
        if ticket is None:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            ticket.result()
            return
        ticket.cancel()
        raise BlockingCallInLoop(
            f"thread {at.thread_id!r} is held by another run, and waiting for it here would block "
            "the event loop: use ainvoke() or astream()"
        )

    async def await_(self, config: RunnableConfig, at: Address) -> None:
        """Wait until the thread is free for this run."""
        ticket = self._turn(config, at)
        if ticket is not None:
            await asyncio.wrap_future(ticket)

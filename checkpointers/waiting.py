"""`on_conflict="wait"`: a run on a thread that another run holds waits until that one has ended.

A run is known by the `Runtime` that langgraph puts into its config; it has ended when that object
is gone. Within one process; across processes the compare-and-swap on the head still holds.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.base import Address
from perdure.checkpointers.conflicts import runtime_of
from perdure.errors import BlockingCallInLoop


class Queue:
    """Who holds each thread, and who waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, Future[None]]]] = {}

    def _turn(self, config: RunnableConfig, at: Address) -> Future[None] | None:
        """None when the caller may go on; else what tells when."""
        runtime: Any = runtime_of(config)
        if runtime is None or at.checkpoint_ns or at.checkpoint_id is not None:
            return None
        run = id(runtime)
        with self._lock:
            holder = self._holders.setdefault(at.thread_id, run)
            if holder == run:
                ticket = None
            else:
                ticket = Future[None]()
                self._waiting.setdefault(at.thread_id, deque()).append((run, ticket))
        weakref.finalize(runtime, self._ended, at.thread_id, run)
        return ticket

    def _ended(self, thread_id: str, run: int) -> None:
        with self._lock:
            waiting = self._waiting.get(thread_id, deque())
            if self._holders.get(thread_id) != run:
                self._waiting[thread_id] = deque(w for w in waiting if w[0] != run)
                return
            if not waiting:
                self._holders.pop(thread_id, None)
                self._waiting.pop(thread_id, None)
                return
            self._holders[thread_id], ticket = waiting.popleft()
        ticket.set_result(None)

    def wait(self, config: RunnableConfig, at: Address) -> None:
        """Block until the thread is free for this run.

        Raises:
            BlockingCallInLoop: That would stop the event loop on which the other run may be.
        """
        ticket = self._turn(config, at)
        if ticket is None:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            ticket.result()
            return
        raise BlockingCallInLoop(
            f"thread {at.thread_id!r} is held by another run, and waiting for it here would block "
            "the event loop: use ainvoke() or astream()"
        )

    async def await_(self, config: RunnableConfig, at: Address) -> None:
        """Wait until the thread is free for this run."""
        ticket = self._turn(config, at)
        if ticket is not None:
            await asyncio.wrap_future(ticket)

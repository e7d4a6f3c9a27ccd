"""Queueing: what one thing is done to goes one after another, in the order in which it came.

Threads wait by blocking and tasks by awaiting, of whatever event loop, all in one queue.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Final
from weakref import WeakValueDictionary

from perdure.memory.effects import Effect, Effects, T

PATIENCE: Final = 10.0
"""Seconds after which who has a turn loses it: it waits for a model, or its loop has stopped."""


class _Queue:
    """Who waits for a thing, and who has it."""

    def __init__(self) -> None:
        # one that is collected as garbage leaves, and that may happen in the midst of another's
        self._lock = threading.RLock()
        self._waiting: deque[_Turn] = deque()
        self._first: _Turn | None = None
        self._since = 0.0

    def join(self, turn: _Turn, blocks: bool) -> bool:
        """Stand at the end. Returns whether the turn can be waited for at all.

        Not by who has one already, nor by blocking an event loop: those in front may need it.
        """
        with self._lock:
            busy = self._first
            if busy is not None and (busy.owner == turn.owner or (blocks and turn.loop)):
                return False
            self._waiting.append(turn)
            if busy is None:
                self._call()
            return True

    def leave(self, turn: _Turn) -> None:
        """Go, be it one's turn or not."""
        with self._lock:
            if self._first is turn:
                self._call()
            elif turn in self._waiting:
                self._waiting.remove(turn)

    def hurry(self) -> None:
        """Call the next if the one in front has been there for too long."""
        with self._lock:
            if self._first is not None and time.monotonic() - self._since >= PATIENCE:
                self._call()

    def _call(self) -> None:
        self._first = None
        while self._waiting:
            turn = self._waiting.popleft()
            if turn.loop is None or not turn.loop.is_closed():
                self._first, self._since = turn, time.monotonic()
                turn.called.set_result(None)
                return


_QUEUES: WeakValueDictionary[Hashable, _Queue] = WeakValueDictionary()
"""Those in which somebody stands; each turn holds its own."""
_LOCK: Final = threading.Lock()


class _Turn:
    """A place in a queue."""

    def __init__(self, thing: Hashable) -> None:
        with _LOCK:
            self._queue = _QUEUES.setdefault(thing, _Queue())
        self.called: Future[None] = Future()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.owner: Any = None

    def wait(self) -> None:
        self.loop, self.owner = _running(), threading.get_ident()
        if not self._queue.join(self, blocks=True):
            return
        try:
            while not self.called.done():
                try:
                    self.called.result(PATIENCE)
                except TimeoutError:
                    self._queue.hurry()
        except BaseException:
            self.leave()
            raise

    async def await_(self) -> None:
        self.loop, self.owner = asyncio.get_running_loop(), asyncio.current_task()
        if not self._queue.join(self, blocks=False):
            return
        try:
            if not self.called.done():
                called = asyncio.wrap_future(self.called)
                while not called.done():
                    await asyncio.wait([called], timeout=PATIENCE)
                    self._queue.hurry()
        except BaseException:  # cancelled, maybe at the moment at which it was called
            self.leave()
            raise

    def leave(self) -> None:
        self._queue.leave(self)


def in_turn(thing: Hashable, work: Callable[[], Effects[T]]) -> Effects[T]:
    """Do a work when it is its turn: those on one thing go one after another, in this process.

    It is politeness and no lock. Who has not ended after ten seconds is overtaken, and who would
    wait for itself goes at once, so nothing stands still; what must not happen at the same time has
    to be prevented otherwise.

    Args:
        thing: What it is done to.
        work: Makes the steps.
    """
    turn = _Turn(thing)
    yield Effect(turn.wait, turn.await_)
    try:
        return (yield from work())
    finally:
        turn.leave()


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

"""What a process has open, for all who open the same: opened once, and closed by the last of them.

It is also closed at the end of the process, and a process that was forked has none of it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final, Generic, TypeVar
from weakref import WeakSet

from perdure.errors import StorageUnavailable
from perdure.storage.threads import ThreadPool

T = TypeVar("T")
S = TypeVar("S", bound="Shared")


class Shared(ABC):
    """A file, or the connections to a server.

    Args:
        name: What errors call it.
        threads: Do the work of coroutines.

    Attributes:
        users: How many have it open.
        refused: Why there is no more to do, if so.
        busy: Held while a transaction is made which a forked process must not inherit.
        was_idle: Whether its connections were not in use when this process was forked. It is
            read only in a forked process, for what the process has inherited.
        gate: Held while work is handed in, and while it is refused from then on.
        lock: Of its kind, so that a server that does not answer keeps no file waiting; held while
            one is opened, joined or left.
    """

    lock: ClassVar[threading.RLock]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.lock = threading.RLock()
        _locks.append(cls.lock)

    def __init__(self, name: str, threads: ThreadPool) -> None:
        self.name, self.threads = name, threads
        self.users = 1
        self.refused = ""
        self.busy, self.gate = threading.Lock(), threading.Lock()
        self.was_idle = True

    def pause_for_fork(self) -> None:
        """Wait for the current transaction to end, and block new ones until `resume_after_fork`."""
        self.busy.acquire()

    def resume_after_fork(self) -> None:
        """Let transactions begin again after `pause_for_fork`, in the parent and in the child."""
        self.busy.release()

    def check(self) -> None:
        """Refuse work once it is closed, and in a forked process."""
        if self.refused:
            raise StorageUnavailable(f"the database {self.name} {self.refused}")

    def run_in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        """See `Database.in_thread`."""
        self.check()  # before the gate: a forked process may have it closed
        with self.gate:
            self.check()
            return self.threads.submit(work, is_async=True)  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Count one user less; the last one ends it."""
        with self.lock:
            self.users -= 1
            if self.users or self.refused:
                return
            for key in [key for key, shared in list(_open.items()) if shared is self]:
                del _open[key]
        self.end()

    @abstractmethod
    def end(self) -> None:
        """Finish what was handed in, and close all connections. Twice is no error."""


_open: Final[dict[Any, Any]] = {}  # what others may join, by what they name
_all: Final[WeakSet[Shared]] = WeakSet()
_locks: Final = list[threading.RLock]()  # see `Shared.lock`
inherited: Final = list[Shared]()
"""The files and servers that the parent had open when this process was forked."""


class Opening(ABC, Generic[S]):
    """The part of a `Database` that is opened, at its first use, and closed."""

    _kind: type[S]
    _shared: S | None = None
    _closed = False

    @property
    @abstractmethod
    def path(self) -> str:
        """See `Database.path`."""

    @property
    def _name(self) -> str:
        return self.path

    @abstractmethod
    def _opened(self) -> S:
        """Open it, or join those who have."""

    def _joined(self, key: Any, make: Callable[[], S]) -> S:
        """What this process has open under a key, with one user more; None: nobody joins it."""
        shared: S | None = None if key is None else _open.get(key)
        if shared is not None and not shared.refused:
            shared.users += 1
            return shared
        shared = make()
        _all.add(shared)
        if key is not None:
            _open[key] = shared
        return shared

    def connect(self) -> None:
        """See `Database.connect`."""
        self._connected()

    async def aconnect(self) -> None:
        """See `Database.aconnect`."""
        if self._shared is None:
            await asyncio.to_thread(self.connect)

    def _connected(self) -> S:
        shared = self._shared
        if shared is None:
            with self._kind.lock:
                shared = self._shared
                if shared is None:
                    self._check_open()
                    shared = self._shared = self._opened()
        shared.check()
        return shared

    def _check_open(self) -> None:
        if self._closed:
            raise StorageUnavailable(f"the database {self._name} is closed")

    def run_in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        """See `Database.in_thread`."""
        if self._shared is None:
            return self._later(lambda shared: shared.run_in_thread(work))
        return self._shared.run_in_thread(work)

    def _later(self, call: Callable[[S], Awaitable[T]]) -> Awaitable[T]:
        """What a call answers once the database is open."""

        async def after_connecting() -> T:
            await self.aconnect()
            return await call(self._connected())

        self._check_open()
        return asyncio.ensure_future(after_connecting())

    def close(self) -> None:
        """See `Database.close`. The last of those who share it closes it."""
        with self._kind.lock:
            self._closed = True
            shared, self._shared = self._shared, None
        if shared is not None:
            shared.leave()


@atexit.register
def _end_all() -> None:
    for shared in list(_all):
        shared.end()


def _before_fork() -> None:
    for lock in _locks:
        lock.acquire()
    for shared in _all:
        shared.pause_for_fork()


def _after_fork() -> None:
    for shared in _all:
        shared.resume_after_fork()
    for lock in _locks:
        lock.release()


def _after_fork_in_child() -> None:
    inherited.extend(_all)
    for shared in _all:
        shared.resume_after_fork()
        shared.refused = "is closed in this forked process: open it again here"
    _all.clear()
    _open.clear()
    for lock in _locks:
        lock.release()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )

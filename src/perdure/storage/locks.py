"""Locks on names, across threads, event loops and processes.

A lock is held by one *run*: the context (`contextvars`) in which it was taken, with the tasks and
`to_thread` calls that inherit it. Within a process the next holder is the one that waited longest.
Between processes no order is kept: they try again after short pauses. A process that dies releases
its locks, because they are locks of the operating system on bytes of a file beside the database,
one byte a name.

POSIX drops such locks when the process closes *any* descriptor of the file
(https://pubs.opengroup.org/onlinepubs/9799919799/functions/fcntl.html), so a process opens the file
once for each database, and closes it with the database. Locks are advisory, and hold only on file
systems where `fcntl` locks work.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import Final

from perdure.errors import AlreadyLocked, ConfigurationError, StorageError, StorageUnavailable

_PAUSE_S: Final = 0.01  # between two tries to take a lock that another process has

if sys.platform == "win32":
    import msvcrt

    _OFFSETS: Final = 1 << 31  # `msvcrt.locking` locks at the file position, a long

    def _lock_byte(fd: int, offset: int) -> None:
        os.lseek(fd, offset, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

    def _unlock_byte(fd: int, offset: int) -> None:
        os.lseek(fd, offset, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    _OFFSETS: Final = 1 << 62

    def _lock_byte(fd: int, offset: int) -> None:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)

    def _unlock_byte(fd: int, offset: int) -> None:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, offset)


def offset_of(name: str) -> int:
    """The byte that stands for a name. Names of one byte exclude each other between processes."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _OFFSETS


class Turn:
    """A place in the queue for a name; the first in the queue may take the byte.

    An event loop waits for it, or, with None, a thread.
    """

    def __init__(
        self, name: str, timeout_s: float | None, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.name, self.timeout_s, self._loop = name, timeout_s, loop
        self.has_byte = False
        self.reached: Future[None] = Future()
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def reach(self) -> bool:
        """Tell the one that waits that it is first. Returns False if its event loop is closed."""
        if self._loop is not None and self._loop.is_closed():
            return False
        if self.reached.set_running_or_notify_cancel():
            self.reached.set_result(None)
        return True

    def left_s(self) -> float | None:
        """The remaining time to wait for it."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def pause_s(self) -> float:
        """The pause before the next try between processes; TimeoutError if the time is over."""
        left = self.left_s()
        if left == 0:
            raise TimeoutError
        return _PAUSE_S if left is None else min(_PAUSE_S, left)


_held: ContextVar[tuple[Turn, ...]] = ContextVar("perdure_locks", default=())


class Locks:
    """The locks that one process has on the names of one database.

    Args:
        path: The file whose bytes are locked, made when it is first needed and never removed; None:
            no other process can have the database open.
        offset: The byte for a name.
    """

    def __init__(self, path: str | None, offset: Callable[[str], int] = offset_of) -> None:
        self._path = path
        self._offset = offset
        self._pid = os.getpid()
        self._guard = threading.Lock()  # of what follows; held for moments only
        self._queues: dict[str, deque[Turn]] = {}
        self._bytes: dict[int, int] = {}  # how many turns of this process share a locked byte
        self._fd: int | None = None
        self._closed = False

    def acquire(self, name: str, timeout_s: float | None) -> Turn:
        """Take a lock; the turn is given back with `release`.

        Raises:
            AlreadyLocked: This run has it.
            StorageUnavailable: It was not free in time, or the database is closed.
            StorageError: The file of locks cannot be used.
        """
        turn = Turn(name, timeout_s, None)
        with self._taking(turn) as first:
            if not first:
                turn.reached.result(turn.left_s())
            self._open()
            while not self._take_byte(turn):
                time.sleep(turn.pause_s())
        return turn

    async def aacquire(self, name: str, timeout_s: float | None) -> Turn:
        """See `acquire`. If the task is cancelled, the lock is not taken."""
        turn = Turn(name, timeout_s, asyncio.get_running_loop())
        with self._taking(turn) as first:
            if not first:
                async with asyncio.timeout(turn.left_s()):
                    await asyncio.wrap_future(turn.reached)
            if self._fd is None:
                await asyncio.to_thread(self._open)
            while not self._take_byte(turn):  # noqa: ASYNC110 - no event spans processes
                await asyncio.sleep(turn.pause_s())
        return turn

    @contextlib.contextmanager
    def _taking(self, turn: Turn) -> Iterator[bool]:
        """Join the queue, and leave it if the lock cannot be had. Yields whether it is first."""
        with self._guard:
            queue = self._queues.setdefault(turn.name, deque())
            if queue and queue[0] in _held.get():
                raise AlreadyLocked(
                    f"{turn.name!r} is locked by this run already; it would wait for itself: take "
                    "the lock once, around all that needs it"
                )
            queue.append(turn)
            first = len(queue) == 1
        try:
            yield first
        except BaseException as exc:
            self.release(turn)
            if isinstance(exc, TimeoutError):
                raise StorageUnavailable(
                    f"{turn.name!r} has been locked by another run for {turn.timeout_s} s; try "
                    "again, or wait longer with timeout_s"
                ) from None
            raise
        _held.set((*_held.get(), turn))

    def release(self, turn: Turn) -> None:
        """Give a lock, or a place in the queue, to the next. In a forked process: do nothing."""
        _held.set(tuple(held for held in _held.get() if held is not turn))
        if self._pid != os.getpid():
            return
        with self._guard:
            queue = self._queues.get(turn.name)
            if queue is None or turn not in queue:
                return  # its event loop was closed, and others passed it over
            if turn.has_byte:
                self._give_byte_back(self._offset(turn.name))
            was_first = turn is queue[0]
            queue.remove(turn)
            while was_first and queue and not queue[0].reach():
                queue.popleft()
            if not queue:
                del self._queues[turn.name]

    def close(self) -> None:
        """Release all between processes; those that wait are refused when their turn has come."""
        with self._guard:
            self._closed = True
            self._bytes.clear()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _open(self) -> None:
        if self._path is None or self._fd is not None:
            return
        with self._guard:
            if self._closed:
                raise StorageUnavailable(f"the database of {self._path!r} is closed")
            if self._fd is None:
                try:
                    self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
                except OSError as exc:
                    raise StorageError(
                        f"the file of locks {self._path!r} cannot be opened ({exc.strerror}): "
                        "check the permissions of its folder"
                    ) from exc

    def _take_byte(self, turn: Turn) -> bool:
        if self._path is None:
            return True
        offset = self._offset(turn.name)
        with self._guard:
            if self._fd is None:
                raise StorageUnavailable(f"the database of {self._path!r} is closed")
            if offset not in self._bytes:
                try:
                    _lock_byte(self._fd, offset)
                except (BlockingIOError, PermissionError):
                    return False
                except OSError as exc:
                    raise StorageError(
                        f"the file system of {self._path!r} has no locks between processes ({exc})"
                    ) from exc
            self._bytes[offset] = self._bytes.get(offset, 0) + 1
            turn.has_byte = True
        return True

    def _give_byte_back(self, offset: int) -> None:
        if self._fd is None:
            return
        self._bytes[offset] -= 1
        if not self._bytes[offset]:
            del self._bytes[offset]
            with contextlib.suppress(OSError):  # the file system may have gone
                _unlock_byte(self._fd, offset)


class NamedLock:
    """A lock for `with` and for `async with`; see `Database.lock`.

    Args:
        locks: Opens the database if need be, and returns its locks.
        aconnect: Opens the database, awaited.
        name: What is locked.
        timeout_s: How long to wait for it; None: as long as it takes.

    Raises:
        ConfigurationError: The name is no text, or the time no number from zero on.
    """

    def __init__(
        self,
        locks: Callable[[], Locks],
        aconnect: Callable[[], Awaitable[None]],
        name: str,
        timeout_s: float | None,
    ) -> None:
        if not isinstance(name, str):
            raise ConfigurationError(f"the name of a lock is {name!r}; expected text")
        number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (number and 0 <= timeout_s <= threading.TIMEOUT_MAX):
            raise ConfigurationError(
                f"timeout_s is {timeout_s!r}; expected seconds, zero or more, or None"
            )
        self._locks, self._aconnect = locks, aconnect
        self._wanted = name, timeout_s
        self._release: Callable[[], None] | None = None

    def __enter__(self) -> None:
        locks = self._locks()
        self._release = partial(locks.release, locks.acquire(*self._wanted))

    async def __aenter__(self) -> None:
        await self._aconnect()
        locks = self._locks()
        self._release = partial(locks.release, await locks.aacquire(*self._wanted))

    def __exit__(self, *exc: object) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release()

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__()

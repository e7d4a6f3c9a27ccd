"""Locks on names, across threads, event loops and processes.

A lock is held by one *run*: the context (`contextvars`) in which it was taken, with the tasks and
`to_thread` calls that inherit it. Within a process the next holder is the one that waited longest.
Between processes no order is kept: they try again after short pauses. A process that dies releases
its locks: `FileLocks` are locks of the operating system on bytes of a file beside the database, one
byte a name; those of Postgres belong to a connection.

POSIX drops locks on files when the process closes *any* descriptor of the file
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
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Final, Protocol, Self

from perdure.errors import AlreadyLocked, ConfigurationError, StorageError, StorageUnavailable
from perdure.storage.threads import Queues, Ticket

if sys.platform == "win32":
    import msvcrt

    _OFFSETS: Final = 1 << 31  # `msvcrt.locking` locks at the file position, a long

    def _lock_byte(fd: int, offset: int) -> None:
        os.lseek(fd, offset, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

    def _unlock_byte(fd: int, offset: int) -> None:
        os.lseek(fd, offset, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

    def _lock_whole(fd: int) -> None:
        _lock_byte(fd, 0)

    def _unlock_whole(fd: int) -> None:
        _unlock_byte(fd, 0)
else:
    import fcntl

    _OFFSETS: Final = 1 << 62

    def _lock_byte(fd: int, offset: int) -> None:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)

    def _unlock_byte(fd: int, offset: int) -> None:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, offset)

    def _lock_whole(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this descriptor, not of the process

    def _unlock_whole(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)  # also of its copy in a child that was forked just then


_PAUSE_S: Final = 0.01  # between two tries
_whole_files: Final = set[int]()  # descriptors of files that are locked as a whole


@contextlib.contextmanager
def file_lock(path: str, timeout_s: float) -> Iterator[None]:
    """Hold a file alone, which is made if need be; the others are threads and processes.

    Raises:
        TimeoutError: It was not free within `timeout_s` seconds.
        OSError: The file cannot be opened, or its file system has no locks.
    """
    until = time.monotonic() + timeout_s
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _whole_files.add(fd)
    try:
        while True:
            try:
                _lock_whole(fd)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= until:
                    raise TimeoutError(f"{path!r} was not free within {timeout_s} s") from None
                time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            if fd in _whole_files:
                with contextlib.suppress(OSError):  # the file system may have gone
                    _unlock_whole(fd)
    finally:
        if fd in _whole_files:
            _whole_files.remove(fd)
            os.close(fd)


def _close_in_child() -> None:
    """A forked process holds no lock: else it would keep one when its parent gives it back."""
    while _whole_files:
        os.close(_whole_files.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def offset_of(name: str) -> int:
    """The byte that stands for a name. Names of one byte exclude each other between processes."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _OFFSETS


class Hold:
    """A lock that a run has, or waits for. The first in the queue may take it between processes."""

    def __init__(self, owner: Locks, name: str, timeout_s: float | None) -> None:
        self.owner, self.name, self.timeout_s = owner, name, timeout_s
        self.ticket: Ticket | None = None
        self.taken, self.session = False, 0  # between processes, and in which session
        self.given_back = False
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """The remaining time to wait for it."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


_held: ContextVar[tuple[Hold, ...]] = ContextVar("perdure_locks", default=())


class ProcessLocks(Protocol):
    """Locks between processes, of the process that has this object; at most one for each name."""

    pause_s: float  # between two tries
    session: int  # another number when all that were taken have been lost
    is_prompt: bool  # whether taking one is a call of the operating system, as giving it back is

    def take(self, name: str) -> bool:
        """Take a lock if no other process has it."""

    def give_back(self, name: str) -> None:
        """Release a lock."""

    def check(self) -> None:
        """Change `session` if the locks were lost."""

    def close(self) -> None:
        """Release all."""


class FileLocks(ProcessLocks):
    """Locks on bytes of a file, one for each name.

    Args:
        path: The file, made when it is first needed and never removed.
        offset: The byte for a name.
    """

    pause_s = _PAUSE_S
    session = 0
    is_prompt = True

    def __init__(self, path: str, offset: Callable[[str], int] = offset_of) -> None:
        self._path, self._offset = path, offset
        self._guard = threading.Lock()
        self._taken: Counter[int] = Counter()  # how many names have a locked byte
        self._fd: int | None = None

    def take(self, name: str) -> bool:
        """See `Between.take`.

        Raises:
            StorageError: The file cannot be used.
        """
        offset = self._offset(name)
        with self._guard:
            fd = self._opened()
            if not self._taken[offset]:
                try:
                    _lock_byte(fd, offset)
                except (BlockingIOError, PermissionError):
                    return False
                except OSError as exc:
                    raise StorageError(
                        f"the file system of {self._path!r} has no locks between processes ({exc})"
                    ) from exc
            self._taken[offset] += 1
        return True

    def _opened(self) -> int:
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as exc:
                raise StorageError(
                    f"the file of locks {self._path!r} cannot be opened ({exc.strerror}): "
                    "check the permissions of its folder"
                ) from exc
        return self._fd

    def give_back(self, name: str) -> None:
        """See `Between.give_back`."""
        offset = self._offset(name)
        with self._guard:
            self._taken[offset] -= 1
            if self._fd is not None and not self._taken[offset]:
                with contextlib.suppress(OSError):  # the file system may have gone
                    _unlock_byte(self._fd, offset)

    def check(self) -> None:
        """See `Between.check`: they last as long as the process."""

    def close(self) -> None:
        """See `Between.close`."""
        with self._guard:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class Locks:
    """The locks that one process has on the names of one database.

    Args:
        between: Keeps other processes out; None: none can have the database open.
    """

    def __init__(self, between: ProcessLocks | None) -> None:
        self._between = between
        self._pid = os.getpid()
        self._queues = Queues()
        self._guard = threading.Lock()  # between taking and giving back
        self._closed = False

    def acquire(self, name: str, timeout_s: float | None) -> Hold:
        """Take a lock, which is given back with `release`.

        Raises:
            AlreadyLocked: This run has it.
            StorageUnavailable: It was not free in time, or the database is closed.
            StorageError: There can be no locks between processes.
        """
        hold = Hold(self, name, timeout_s)
        with self._taking(hold, None) as ticket:
            ticket.turn.result(hold.left_s())
            while not self._take(hold):
                time.sleep(self._pause_s(hold))
        return hold

    async def aacquire(self, name: str, timeout_s: float | None) -> Hold:
        """See `acquire`. If the task is cancelled, the lock is not taken."""
        hold = Hold(self, name, timeout_s)
        with self._taking(hold, asyncio.get_running_loop()) as ticket:
            if not ticket.turn.done():
                async with asyncio.timeout(hold.left_s()):
                    await asyncio.wrap_future(ticket.turn)
            while not await self._atake(hold):  # noqa: ASYNC110 - across processes
                await asyncio.sleep(self._pause_s(hold))
        return hold

    async def _atake(self, hold: Hold) -> bool:
        if self._between is None or self._between.is_prompt:
            return self._take(hold)
        return await asyncio.to_thread(self._take, hold)

    @contextlib.contextmanager
    def _taking(self, hold: Hold, loop: asyncio.AbstractEventLoop | None) -> Iterator[Ticket]:
        """Join the queue, and leave it if the lock cannot be had."""
        first = self._queues.first_ticket(hold.name)
        if first is not None and any(held.ticket is first for held in _held.get()):
            raise AlreadyLocked(
                f"{hold.name!r} is locked by this run already; it would wait for itself: take "
                "the lock once, around all that needs it"
            )
        ticket = hold.ticket = self._queues.join(hold.name, loop=loop)
        try:
            yield ticket
        except BaseException as exc:
            self.release(hold)
            if isinstance(exc, TimeoutError):
                raise StorageUnavailable(
                    f"{hold.name!r} has been locked by another run for {hold.timeout_s} s; try "
                    "again, or wait longer with timeout_s"
                ) from exc
            raise
        _held.set((*_held.get(), hold))

    def _take(self, hold: Hold) -> bool:
        """Take the lock between processes for the first of the queue, unless it has left."""
        if self._between is None:
            return True
        if self._closed:
            raise StorageUnavailable("the database is closed")
        if not self._between.take(hold.name):
            return False
        with self._guard:
            hold.taken = not hold.given_back
            hold.session = self._between.session
        if not hold.taken:
            self._between.give_back(hold.name)
        return hold.taken

    def _pause_s(self, hold: Hold) -> float:
        """The pause before the next try; TimeoutError if the time is over."""
        left = hold.left_s()
        if left == 0:
            raise TimeoutError
        pause = 0.0 if self._between is None else self._between.pause_s
        return pause if left is None else min(pause, left)

    def release(self, hold: Hold) -> None:
        """Give a lock, or a place in the queue, to the next. In a forked process: do nothing."""
        _held.set(tuple(held for held in _held.get() if held is not hold))
        if self._pid != os.getpid():
            return
        with self._guard:
            taken, hold.given_back = hold.taken and not hold.given_back, True
        if taken and self._between is not None and not self._closed:
            self._between.give_back(hold.name)
        if hold.ticket is not None:
            hold.ticket.leave()

    def check(self, *holds: Hold) -> None:
        """Make sure that locks are held still; without any, those that the calling run has.

        Raises:
            StorageUnavailable: One was lost with its connection.
        """
        held = holds or _held.get()
        if not held or self._between is None:
            return
        self._between.check()
        for hold in held:
            if hold.taken and hold.owner is self and hold.session != self._between.session:
                raise StorageUnavailable(
                    f"the lock on {hold.name!r} was lost with its connection, and another run may "
                    "have it now: end this run, and begin it again under a new lock"
                )

    def close(self) -> None:
        """Release all between processes; those that wait are refused when their turn has come."""
        with self._guard:
            self._closed = True
        if self._between is not None and self._pid == os.getpid():  # a fork has the parent's
            self._between.close()


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
        self._hold: Hold | None = None

    def __enter__(self) -> Self:
        self._hold = self._locks().acquire(*self._wanted)
        return self

    async def __aenter__(self) -> Self:
        await self._aconnect()
        self._hold = await self._locks().aacquire(*self._wanted)
        return self

    def check(self) -> None:
        """Make sure that it is held still; for who holds it in another run's context.

        Raises:
            StorageUnavailable: It was lost with its connection.
        """
        if self._hold is not None:
            self._hold.owner.check(self._hold)

    def __exit__(self, *exc: object) -> None:
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold.owner.release(hold)

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__()

"""Named queues, and named locks that work across OS threads, event loops and processes.

Each lock is held by a *run*: the context (`contextvars`) in which the lock was acquired, and all
tasks and `to_thread` calls that inherit this context. Within a process, runs acquire a lock in the
order in which they requested it. If several processes wait for the same lock, they acquire it in no
particular order. A waiting process tries to acquire the lock at short intervals.

When a process dies, its locks are released. `FileLocks` are operating system locks on single bytes
of a file next to the database. The offset of the byte is computed from a hash of the lock's name.
In Postgres, a named lock is an advisory lock, which belongs to the connection that acquired it.

On POSIX systems, a process loses all its locks on a file when it closes any descriptor of that file
(https://pubs.opengroup.org/onlinepubs/9799919799/functions/fcntl.html). To avoid losing locks, a
process opens a database's lock file once, and closes it with the database. The file locks are
advisory, and work only on file systems that support `fcntl` locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from operator import is_not
from typing import Final, Protocol, Self

from perdure.errors import AlreadyLocked, ConfigurationError, StorageError, StorageUnavailable
from perdure.storage.private_files import (
    open_file_of_database,
    open_file_with_mode,
    read_mode_of_database,
)

if sys.platform == "win32":
    import msvcrt

    _OFFSET_COUNT: Final = 1 << 31  # `msvcrt.locking` accepts only signed 32-bit file positions.

    def _lock_byte(fd: int, offset: int) -> None:
        os.lseek(fd, offset, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

    def _unlock_byte(fd: int, offset: int) -> None:
        os.lseek(fd, offset, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

    def _lock_file(fd: int) -> None:
        _lock_byte(fd, 0)

    def _unlock_file(fd: int) -> None:
        _unlock_byte(fd, 0)
else:
    import fcntl

    _OFFSET_COUNT: Final = 1 << 62

    def _lock_byte(fd: int, offset: int) -> None:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)

    def _unlock_byte(fd: int, offset: int) -> None:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, offset)

    def _lock_file(fd: int) -> None:
        # A `flock` lock belongs to the file descriptor and not to the process, so it also excludes
        # other threads of this process.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock_file(fd: int) -> None:
        # Release the lock explicitly with `LOCK_UN`. If child processes were forked while the lock
        # was held, closing only this process's descriptor would not release the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)


# Seconds between two attempts to acquire a lock
_PAUSE_S: Final = 0.01
# Descriptors of the lock files that `file_lock` currently has open
_locked_file_descriptors: Final = set[int]()


@contextlib.contextmanager
def file_lock(path: str, timeout_s: float, database: str) -> Iterator[None]:
    """Hold an exclusive lock on a file, which excludes other threads and other processes.

    Args:
        path: The file. If it does not exist, it is created.
        timeout_s: The maximum number of seconds to wait for the lock.
        database: The path of the database whose permissions a new file gets.

    Raises:
        TimeoutError: Another thread or process held the lock for `timeout_s` seconds.
        OSError: The file cannot be opened, or its file system has no locks.
    """
    deadline = time.monotonic() + timeout_s
    fd = open_file_of_database(path, database)
    _locked_file_descriptors.add(fd)
    try:
        while True:
            try:
                _lock_file(fd)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{path!r} was locked for {timeout_s} s") from None
                time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            if fd in _locked_file_descriptors:
                # Ignore OSError, because the file system may have been unmounted while
                # the lock was held.
                with contextlib.suppress(OSError):
                    _unlock_file(fd)
    finally:
        if fd in _locked_file_descriptors:
            _locked_file_descriptors.remove(fd)
            os.close(fd)


def _close_locked_files_in_child() -> None:
    """Close the lock-file descriptors that this forked process inherited from its parent.

    A forked process must close inherited descriptors, or it may hold locks that its parent has
    released.
    """
    while _locked_file_descriptors:
        os.close(_locked_file_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locked_files_in_child)


def compute_lock_byte_offset(lock_name: str) -> int:
    """Return the offset, in the lock file, of the byte that represents a lock name.

    Two names can have the same offset. While one process holds a lock, no other process can acquire
    a lock with the same offset.
    """
    digest = hashlib.blake2b(lock_name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _OFFSET_COUNT


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

        The coroutine that waited for an abandoned ticket no longer exists, so it cannot remove the
        ticket from its queues.
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
        # This lock protects `_queues`. The lock is reentrant, so that methods which hold it can
        # call `leave`, which acquires it again.
        self._lock = threading.RLock()
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
                    self.leave(queue[0])
                    queue = self._queues.setdefault(name, deque())
                queue.append(ticket)
            self._notify_if_first(ticket)
        return ticket

    def first_ticket(self, name: str) -> Ticket | None:
        """Return the first ticket in the queue for a name, or None if no ticket is queued."""
        with self._lock:
            queue = self._queues.get(name)
            return queue[0] if queue else None

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket from its queues, and wake the callers whose turn has come.

        The caller that waits for a ticket is woken only when the ticket is first in all of its
        queues. A second call for the same ticket does nothing.
        """
        with self._lock:
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
        """Wake the OS thread or coroutine that waits for a ticket, if the ticket's turn has come.

        A ticket's turn comes when it is first in all of its queues. If the task that created the
        ticket has abandoned it, the ticket is removed from its queues when its turn comes.
        """
        if ticket.turn.done():
            return
        for name in ticket.names:
            if self._queues[name][0] is not ticket:
                return
        if ticket.is_abandoned:
            self.leave(ticket)
        elif ticket.turn.set_running_or_notify_cancel():
            ticket.turn.set_result(None)


class LockHold:
    """A lock that a run holds or waits for.

    Attributes:
        ticket: The place in the queue of this process. The first in the queue may take the lock
            that excludes other processes.
        is_taken: Whether the lock that excludes other processes was taken.
        session: The session of `ProcessLocks` in which the lock was taken.
        is_released: Whether the run has released the lock or has stopped waiting for it.
    """

    def __init__(self, owner: Locks, name: str, timeout_s: float | None) -> None:
        self.owner, self.name, self.timeout_s = owner, name, timeout_s
        self.ticket: Ticket | None = None
        self.is_taken, self.session = False, 0
        self.is_released = False
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        """Return the remaining wait time in seconds, or None if there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


_holds_of_run: ContextVar[tuple[LockHold, ...]] = ContextVar("perdure_locks", default=())


class ProcessLocks(Protocol):
    """Named inter-process locks. A process must not acquire a lock that it already holds.

    Attributes:
        pause_s: The seconds between two attempts to take a lock.
        session: A number that changes when all locks that were taken have been lost.
        is_prompt: Whether taking a lock is only a call of the operating system, which does not
            block.
    """

    pause_s: float
    session: int
    is_prompt: bool

    def try_take(self, name: str) -> bool:
        """Try to acquire a lock without waiting, and return whether it was acquired."""

    def release(self, name: str) -> None:
        """Release a lock."""

    def change_session_number_if_connection_was_lost(self) -> None:
        """Increment the attribute `session` if the connection that held the locks was lost.

        When a lock holder sees that `session` has changed, the holder knows that its lock is lost.
        """

    def close(self) -> None:
        """Release all locks."""


class FileLocks(ProcessLocks):
    """Named inter-process locks, each of which is a lock on a single byte of a shared file.

    Args:
        database: The path of the database. The file has the suffix `.locks`. It is created when it
            is first needed, and is never removed.
        offset: A function that returns the offset of the byte for a name.
    """

    pause_s = _PAUSE_S
    session = 0
    is_prompt = True

    def __init__(
        self, database: str, offset: Callable[[str], int] = compute_lock_byte_offset
    ) -> None:
        self._path, self._offset = f"{database}.locks", offset
        # Read here, because `_open_file` may be called in an event loop, which must not wait for
        # the disk.
        self._mode = read_mode_of_database(database)
        self._lock = threading.Lock()
        # Maps a byte offset in the lock file to the number of locks that this process holds there.
        # Two lock names can have the same offset.
        self._name_counts: Counter[int] = Counter()
        self._fd: int | None = None

    def try_take(self, name: str) -> bool:
        """See `ProcessLocks.try_take`.

        Raises:
            StorageError: The file cannot be opened, or its file system has no locks.
        """
        offset = self._offset(name)
        with self._lock:
            fd = self._open_file()
            if not self._name_counts[offset]:
                try:
                    _lock_byte(fd, offset)
                except (BlockingIOError, PermissionError):
                    return False
                except OSError as exc:
                    raise StorageError(
                        f"the file system of {self._path!r} does not support locks ({exc}); put "
                        "the database on a local disk"
                    ) from exc
            self._name_counts[offset] += 1
        return True

    def _open_file(self) -> int:
        """Return the lock file's descriptor, opening the file on the first call."""
        if self._fd is None:
            try:
                self._fd = open_file_with_mode(self._path, self._mode)
            except OSError as exc:
                raise StorageError(
                    f"the lock file {self._path!r} cannot be opened ({exc.strerror}); "
                    "check the permissions of its folder"
                ) from exc
        return self._fd

    def release(self, name: str) -> None:
        """See `ProcessLocks.release`."""
        offset = self._offset(name)
        with self._lock:
            self._name_counts[offset] -= 1
            if self._fd is not None and not self._name_counts[offset]:
                # Ignore OSError, because the file system may have been unmounted while
                # the lock was held.
                with contextlib.suppress(OSError):
                    _unlock_byte(self._fd, offset)

    def change_session_number_if_connection_was_lost(self) -> None:
        """Do nothing, because a file lock does not depend on a database connection."""

    def close(self) -> None:
        """See `ProcessLocks.close`."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class Locks:
    """Manages the locks that this process holds or waits for in one database.

    Args:
        process_locks: The locks that exclude other processes, or None if no other process can open
            the database.
    """

    def __init__(self, process_locks: ProcessLocks | None) -> None:
        self._process_locks = process_locks
        self._pid = os.getpid()
        self._queues = Queues()
        # `_lock` guards the attributes `is_taken` and `is_released` of all `LockHold` objects.
        self._lock = threading.Lock()
        self._closed = False

    def acquire(self, name: str, timeout_s: float | None) -> LockHold:
        """Wait for a lock and take it. `release` releases it.

        Raises:
            AlreadyLocked: This run already holds the lock.
            StorageUnavailable: The lock was not free in time, or the database is closed.
            StorageError: The file system does not support locks.
        """
        hold = LockHold(self, name, timeout_s)
        with self._join_lock_queue_during_block(hold, None) as ticket:
            if not ticket.turn.done():
                ticket.turn.result(hold.remaining_s())
            while not self._try_take(hold):
                time.sleep(self._compute_pause_before_next_lock_attempt_s(hold))
        return hold

    async def aacquire(self, name: str, timeout_s: float | None) -> LockHold:
        """Acquire a lock, waiting for it without blocking the event loop; see `acquire`.

        If the task is cancelled while it waits, the lock is not acquired.
        """
        hold = LockHold(self, name, timeout_s)
        with self._join_lock_queue_during_block(hold, asyncio.get_running_loop()) as ticket:
            if not ticket.turn.done():
                async with asyncio.timeout(hold.remaining_s()):
                    await asyncio.wrap_future(ticket.turn)
            # Try to acquire the lock repeatedly, because there is no notification when another
            # process releases it.
            while not await self._try_take_async(hold):  # noqa: ASYNC110
                await asyncio.sleep(self._compute_pause_before_next_lock_attempt_s(hold))
        return hold

    async def _try_take_async(self, hold: LockHold) -> bool:
        """Call `_try_take`, in a worker thread if acquiring the lock could block."""
        if self._process_locks is None or self._process_locks.is_prompt:
            return self._try_take(hold)
        return await asyncio.to_thread(self._try_take, hold)

    @contextlib.contextmanager
    def _join_lock_queue_during_block(
        self, hold: LockHold, loop: asyncio.AbstractEventLoop | None
    ) -> Iterator[Ticket]:
        """Join the queue for a lock, and leave it if the `with` block raises an exception.

        The caller acquires the lock inside the `with` block. If the block ends without an
        exception, the lock stays acquired and is added to the list of locks that the calling run
        holds. `loop` is the event loop in which the caller waits, or None if the caller blocks its
        OS thread.
        """
        holds_of_run = _holds_of_run.get()
        first_ticket = self._queues.first_ticket(hold.name) if holds_of_run else None
        if first_ticket is not None and any(
            hold_of_run.ticket is first_ticket for hold_of_run in holds_of_run
        ):
            raise AlreadyLocked(
                f"{hold.name!r} is already locked by this run, so acquiring the lock again would "
                "wait forever; acquire it once, around all code that needs it"
            )
        ticket = hold.ticket = self._queues.append_ticket_to_queues(hold.name, loop=loop)
        try:
            yield ticket
        except BaseException as exc:
            self.release(hold)
            if isinstance(exc, TimeoutError):
                raise StorageUnavailable(
                    f"the lock {hold.name!r} could not be acquired within {hold.timeout_s} s, "
                    "because another run holds it; try again, or pass a larger timeout_s"
                ) from exc
            raise
        _holds_of_run.set((*_holds_of_run.get(), hold))

    def _try_take(self, hold: LockHold) -> bool:
        """Try to acquire the inter-process lock for the run at the front of the queue.

        Returns:
            Whether the lock was taken. False if another process holds it, or if the run has
            stopped waiting.

        Raises:
            StorageUnavailable: The database is closed.
        """
        if self._process_locks is None:
            return True
        if self._closed:
            raise StorageUnavailable("the database is closed")
        if not self._process_locks.try_take(hold.name):
            return False
        with self._lock:
            hold.is_taken = not hold.is_released
            hold.session = self._process_locks.session
        if not hold.is_taken:
            self._process_locks.release(hold.name)
        return hold.is_taken

    def _compute_pause_before_next_lock_attempt_s(self, hold: LockHold) -> float:
        """Return how many seconds to wait before the next attempt to acquire a lock.

        Raises:
            TimeoutError: The timeout of the lock has expired.
        """
        remaining = hold.remaining_s()
        if remaining == 0:
            raise TimeoutError
        pause = 0.0 if self._process_locks is None else self._process_locks.pause_s
        return pause if remaining is None else min(pause, remaining)

    def release(self, hold: LockHold) -> None:
        """Release a lock, or stop waiting for it. In a forked process, release nothing."""
        _holds_of_run.set(tuple(filter(partial(is_not, hold), _holds_of_run.get())))
        if self._pid != os.getpid():
            return
        with self._lock:
            was_taken, hold.is_released = hold.is_taken and not hold.is_released, True
        if was_taken and self._process_locks is not None and not self._closed:
            self._process_locks.release(hold.name)
        if hold.ticket is not None:
            self._queues.leave(hold.ticket)

    def check_still_held(self, *holds: LockHold) -> None:
        """Check that locks are still held.

        Args:
            *holds: The locks to check. Without any, all locks are checked that the calling run
                holds in this database.

        Raises:
            StorageUnavailable: A lock was lost with its connection.
        """
        checked_holds = holds or _holds_of_run.get()
        if not checked_holds or self._process_locks is None:
            return
        self._process_locks.change_session_number_if_connection_was_lost()
        for hold in checked_holds:
            if hold.is_taken and hold.owner is self and hold.session != self._process_locks.session:
                raise StorageUnavailable(
                    f"the connection that held the lock {hold.name!r} was lost, so another run "
                    "might hold the lock now; stop this run, and start it again with a new lock"
                )

    def close(self) -> None:
        """Release all inter-process locks.

        After `close`, each waiting run gets a `StorageUnavailable` error when it becomes first in
        the lock's queue.
        """
        with self._lock:
            self._closed = True
        # A forked process must not release its parent's locks.
        if self._process_locks is not None and self._pid == os.getpid():
            self._process_locks.close()


class NamedLock:
    """A lock that is held within a `with` or `async with` block; see `Database.lock`.

    Args:
        locks: A function that opens the database if necessary, and returns its locks.
        aconnect: An asynchronous function that opens the database.
        name: The name that is locked.
        timeout_s: The seconds to wait for the lock, or None to wait without limit.

    Raises:
        ConfigurationError: The name is not text, or `timeout_s` is not a number, zero or more.
    """

    def __init__(
        self,
        locks: Callable[[], Locks],
        aconnect: Callable[[], Awaitable[None]],
        name: str,
        timeout_s: float | None,
    ) -> None:
        if not isinstance(name, str):
            raise ConfigurationError(f"the lock name is {name!r}; expected a string")
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (is_number and 0 <= timeout_s <= threading.TIMEOUT_MAX):
            raise ConfigurationError(
                f"the argument 'timeout_s' is {timeout_s!r}; expected None or a non-negative "
                "number of seconds"
            )
        self._locks, self._aconnect = locks, aconnect
        self._arguments = name, timeout_s
        self._hold: LockHold | None = None

    def __enter__(self) -> Self:
        self._hold = self._locks().acquire(*self._arguments)
        return self

    async def __aenter__(self) -> Self:
        await self._aconnect()
        self._hold = await self._locks().aacquire(*self._arguments)
        return self

    def raise_if_lost(self) -> None:
        """Check that the lock is still held.

        This method may be called from any task or OS thread, even one that is not part of the run
        that holds the lock.

        Raises:
            StorageUnavailable: The lock was lost with its connection.
        """
        if self._hold is not None:
            self._hold.owner.check_still_held(self._hold)

    def __exit__(self, *exc: object) -> None:
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold.owner.release(hold)

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__()

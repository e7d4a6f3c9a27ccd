"""One SQLite file: one writer thread that commits in groups, readers beside it.

Usable from asyncio and from threads alike: work is handed to the writer as flows. Each process has
one writing connection per file; why, and how the file is kept small, says `housekeeping`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from perdure.errors import ConfigurationError, StorageError, StorageUnavailable
from perdure.storage.committing import Committer
from perdure.storage.connecting import MEMORY, Connector, Synchronous
from perdure.storage.flow import Flow, Statement, rows_of
from perdure.storage.glancing import Declined, Glancer
from perdure.storage.housekeeping import Housekeeper
from perdure.storage.migrations import Migration
from perdure.storage.readers import Readers
from perdure.storage.sqlite_errors import check_path, mapped
from perdure.storage.workers import Job, Promise, Workers

T = TypeVar("T")


class Database:
    """An open SQLite database, shared by all who open the same path in this process.

    Args:
        path: A file, or `":memory:"` (never shared, gone when closed).
        migration: The schema to bring up to date first.
        synchronous: `"full"` waits for the disk at each commit, so that a power cut loses nothing
            that was acknowledged; `"normal"` may lose the newest commits to a power cut, never to a
            crash of the process, and never corrupts (https://sqlite.org/pragma.html#pragma_synchronous).
        read_only: Open for reading; nothing is migrated or written (SQLite itself keeps a `-shm`
            and an empty `-wal` file beside a database that is read).
        timeout_s: How long to wait for another process that is writing.
        factory: The connection class; tests put one here that fails on demand.
    """

    _open: dict[str, Database] = {}  # noqa: RUF012 - the registry is the class's one shared state
    _registry_lock = threading.Lock()

    def __init__(
        self,
        path: str,
        migration: Migration,
        *,
        synchronous: Synchronous = "full",
        read_only: bool = False,
        timeout_s: float = 30.0,
        factory: type[sqlite3.Connection] = sqlite3.Connection,
    ) -> None:
        if synchronous not in ("full", "normal"):
            raise ConfigurationError(f"synchronous is {synchronous!r}; expected 'full' or 'normal'")
        self.path = path
        self.synchronous = synchronous
        self.read_only = read_only
        self._connector = Connector(path, synchronous, read_only, timeout_s, factory)
        self._users = 1
        self._pid = os.getpid()
        self._closed = False
        self._pending: SimpleQueue[Job[Any] | None] = SimpleQueue()  # None: no more will come
        self._gate = threading.Lock()  # between handing work in and closing
        self._readers = Readers(self._connector.reader, path)
        self._glancer = Glancer(self._connector.reader)
        self._workers = Workers(4, "perdure-read")
        self._write_lock = threading.Lock()  # held while the writing connection is in use
        self._housekeeper = Housekeeper(path, self._connector.file_lock, timeout_s)
        self._writer: Committer | None = None
        self._thread: threading.Thread | None = None
        check_path(path, read_only)
        with mapped(path):
            if read_only:
                self._connector.check_readable(migration)
            else:
                first = self._connector.first_writer(migration)
                self._writer = Committer(self._connector, path, first)
                self._thread = threading.Thread(
                    target=self._write_loop, name="perdure-write", daemon=True
                )
                self._thread.start()
        if self._writer is not None:
            with contextlib.suppress(StorageError):  # the next to open it tries again
                self.scrub()

    @classmethod
    def open(cls, path: str | os.PathLike[str], migration: Migration, **options: Any) -> Database:
        """The database at `path`: the one this process has open already, or a new one."""
        text = os.fsdecode(path)
        if text not in (MEMORY, ""):
            text = os.path.abspath(text)  # the working directory may change
        if text == MEMORY or options.get("read_only"):
            return cls(text, migration, **options)
        key = os.path.realpath(text)
        with cls._registry_lock:
            shared = cls._open.get(key)
            if shared is not None and shared._pid == os.getpid():
                wanted = options.get("synchronous", "full")
                if wanted != shared.synchronous:
                    raise ConfigurationError(
                        f"{text!r} is open in this process with synchronous="
                        f"{shared.synchronous!r}; open it with the same, not {wanted!r}"
                    )
                with shared._write_lock, mapped(text):
                    shared._connector.migrate(shared._writer_or_raise().connection, migration)
                shared._users += 1
                return shared
            database = cls(text, migration, **options)
            cls._open[key] = database
            return database

    # -- writing

    def write(
        self,
        flow: Flow[T],
        committed: Callable[[T], None] | None = None,
        undone: Callable[[], None] | None = None,
    ) -> T:
        """Have the writer run a flow, and wait until its transaction is committed.

        Flows that wait at the same moment share a transaction; each is a savepoint of it, so one
        that fails undoes only itself.

        Args:
            flow: The work.
            committed: Called in the writer thread with the result, after the commit.
            undone: Called there instead when the flow, or the commit, failed.

        Raises:
            StorageUnavailable: The database is closed.
            StorageError: It was opened read-only, or refuses.
        """
        future = self._submit(flow, committed, undone, awaited=False).future
        assert isinstance(future, Future)
        return future.result()

    def awrite(
        self,
        flow: Flow[T],
        committed: Callable[[T], None] | None = None,
        undone: Callable[[], None] | None = None,
    ) -> asyncio.Future[T]:
        """See `write`."""
        future = self._submit(flow, committed, undone, awaited=True).future
        assert isinstance(future, asyncio.Future)
        return future

    def post(self, flow: Flow[Any]) -> None:
        """Have the writer run a flow that nobody waits for; if it fails, nobody is told."""
        with contextlib.suppress(StorageUnavailable):
            self._submit(flow, None, None, awaited=False)

    def _submit(
        self,
        flow: Flow[T],
        committed: Callable[[T], None] | None,
        undone: Callable[[], None] | None,
        *,
        awaited: bool,
    ) -> Promise[T]:
        promise: Promise[T] = Promise(awaited=awaited)
        self._open_or_raise()  # a forked process may have inherited the gate closed
        with self._gate:
            self._writer_or_raise()
            self._pending.put(Job(flow, committed, undone, promise))
        return promise

    def _open_or_raise(self) -> None:
        if self._closed or self._pid != os.getpid():
            raise StorageUnavailable(
                f"the database {self.path!r} is closed"
                + ("" if self._closed else " in this forked process: open it again here")
            )

    def _writer_or_raise(self) -> Committer:
        self._open_or_raise()
        if self._writer is None:
            raise StorageError(f"{self.path!r} was opened read-only; open it without read_only")
        return self._writer

    def _write_loop(self) -> None:
        job = self._pending.get()
        while job is not None:
            batch = [job]
            with contextlib.suppress(Empty):
                while (job := self._pending.get_nowait()) is not None:
                    batch.append(job)
            ready = [j for j in batch if j.promise.claim()]
            if ready:
                with self._write_lock:
                    assert self._writer is not None
                    self._writer.commit(ready)
                    self._housekeeper.after_commit(self._writer.connection)
            if job is not None:
                job = self._pending.get()

    def shrink(self) -> None:
        """Give the space of deleted rows back to the file system, in small steps."""
        self._housekeeper.vacuuming = True
        while self._housekeeper.vacuuming:
            self.write(rows_of("SELECT 1"))
        with self._write_lock, mapped(self.path):
            if self._writer is not None:
                self._housekeeper.checkpoint(self._writer.connection, wait_s=1.0)

    def scrub(self) -> bool:
        """Overwrite what was deleted with `scrub_wanted`; writers wait meanwhile.

        Takes as much time and, for a moment, disk space as writing the whole file again. If nobody
        asked since the last time, nothing is done.

        Returns:
            Whether the bytes of file and WAL are free of it. They are not while another process
            still reads the former state: call it again later, or let the next `open` do it.

        Raises:
            StorageError: The file could not be rewritten; it is as it was.
        """
        with self._write_lock, mapped(self.path):
            writer = self._writer_or_raise()
            try:
                return self._housekeeper.scrub(writer.sound())
            except BaseException:
                writer.undo()
                raise

    # -- reading

    def read(self, flow: Flow[T], *, snapshot: bool = True) -> T:
        """Run a flow that only reads, on one snapshot of the database, in the calling thread.

        Args:
            flow: The work.
            snapshot: Whether it needs one; a flow of a single statement does not.

        Raises:
            StorageUnavailable: The database is closed.
        """
        if not self._connector.on_disk:
            return self.write(flow)
        self._open_or_raise()
        with mapped(self.path):
            return self._readers.run(flow, snapshot=snapshot)

    def glance(self, flow: Flow[T], *, snapshot: bool = True) -> T:
        """Run a flow that reads little at once, in the calling thread, be it an event loop's.

        Raises:
            Declined: It reads more than a little, or nobody knows; `read` does it.
            StorageUnavailable: The database is closed.
        """
        if not self._connector.on_disk:
            raise Declined
        self._open_or_raise()
        return self._glancer.run(flow, snapshot=snapshot)

    def in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run blocking work in one of this database's reading threads.

        Raises:
            StorageUnavailable: The database is closed.
        """
        self._open_or_raise()  # see `_submit`
        with self._gate:
            self._open_or_raise()
            future = self._workers.submit(work, awaited=True).future
        assert isinstance(future, asyncio.Future)
        return future

    # -- closing and looking

    def close(self) -> None:
        """Let go of the database; the last of those who share it closes the file."""
        with Database._registry_lock:
            self._users -= 1
            if self._users > 0 or self._closed:
                return
            key = os.path.realpath(self.path)
            if Database._open.get(key) is self:
                del Database._open[key]
        if self._pid != os.getpid():
            self._closed = True
            return  # a forked process must not touch what it inherited
        with self._gate:
            self._closed = True
            self._pending.put(None)
        self._workers.close()
        if self._thread is not None:
            self._thread.join()
        self._readers.close()
        self._glancer.close()
        if self._writer is not None:
            # closing the last connection checkpoints too, hence under the lock
            with contextlib.suppress(StorageUnavailable), self._connector.between_processes():
                self._writer.connection.close()
                self._writer = None

    def stats(self) -> dict[str, Any]:
        """The file as it is: SQLite's version, sizes in bytes, free space."""

        def pragmas() -> Flow[dict[str, int]]:
            out: dict[str, int] = {}
            for name in ("page_size", "page_count", "freelist_count"):
                rows = yield Statement(f"PRAGMA {name}")
                out[name] = rows[0][0]
            return out

        found = self.read(pragmas())
        wal = self.path + "-wal"
        return {
            "path": self.path,
            "sqlite_version": sqlite3.sqlite_version,
            "wal_reset_bug": sqlite3.sqlite_version_info < (3, 51, 3),
            "synchronous": self.synchronous,
            "size_bytes": found["page_size"] * found["page_count"],
            "free_bytes": found["page_size"] * found["freelist_count"],
            "wal_bytes": os.path.getsize(wal)
            if self._connector.on_disk and os.path.exists(wal)
            else 0,
        }


@atexit.register
def _close_all() -> None:
    for database in list(Database._open.values()):
        if database._pid == os.getpid():
            database._users = 1
            database.close()


def _before_fork() -> None:
    """No transaction is open while a process forks: the child would inherit its locks."""
    Database._registry_lock.acquire()
    for database in Database._open.values():
        database._write_lock.acquire()


def _after_fork() -> None:
    for database in Database._open.values():
        database._write_lock.release()
    Database._registry_lock.release()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )

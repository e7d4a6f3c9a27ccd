"""One SQLite file: one writer thread that commits in groups, readers beside it.

Usable from asyncio and from threads alike: work is handed to the writer as flows. SQLite before
3.51.3 can damage a WAL file when several connections write and checkpoint at once
(https://sqlite.org/wal.html#walresetbug), so each process has one writing connection per file,
automatic checkpoints are off, and the writer checkpoints under a lock between processes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, TypeVar

from filelock import FileLock, Timeout

from perdure.errors import ConfigurationError, StorageError, StorageUnavailable
from perdure.storage.flow import Flow, Row, Statement, run
from perdure.storage.migrations import Migration, check_identity, migrate, version
from perdure.storage.sqlite_errors import check_path, mapped
from perdure.storage.workers import Promise, Workers, settle

T = TypeVar("T")
Synchronous = Literal["full", "normal"]

WAL_LIMIT_BYTES = 4 << 20  # checkpoint when the WAL has grown by this much
WAL_LOOK_EVERY = 32  # commits between two looks at its size
VACUUM_PAGES = 512  # pages given back per step, so that a vacuum never holds up writers for long
MEMORY = ":memory:"


class _Job(Generic[T]):
    """A flow waiting for the writer, and who is told how it ended."""

    __slots__ = ("committed", "flow", "promise", "result")

    def __init__(
        self, flow: Flow[T], committed: Callable[[T], None] | None, promise: Promise[T]
    ) -> None:
        self.flow = flow
        self.committed = committed
        self.promise = promise
        self.result: T

    def succeed(self) -> None:
        if self.committed is not None:
            self.committed(self.result)
        self.promise.keep(self.result)


class Database:
    """An open SQLite database, shared by all who open the same path in this process.

    Args:
        path: A file, or `":memory:"` (never shared, gone when closed).
        migration: The schema to bring up to date first.
        synchronous: `"full"` waits for the disk at each commit, so that a power cut loses nothing
            that was acknowledged; `"normal"` may lose the newest commits to a power cut, never to a
            crash of the process, and never corrupts (https://sqlite.org/pragma.html#pragma_synchronous).
        read_only: Open for reading; nothing is created or migrated.
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
        self._timeout_s = timeout_s
        self._factory = factory
        self._users = 1
        self._pid = os.getpid()
        self._closed = False
        self._pending: SimpleQueue[_Job[Any] | None] = SimpleQueue()  # None: no more will come
        self._gate = threading.Lock()  # between handing work in and closing
        self._readers: list[sqlite3.Connection] = []
        self._all_readers: list[sqlite3.Connection] = []
        self._workers = Workers(4, "perdure-read")
        self._wal_mark = 0
        self._commits = 0
        self._vacuum_wanted = False
        self._write_lock = threading.Lock()  # held while the writing connection is in use
        self._file_lock = FileLock(path + ".lock", thread_local=False) if self._on_disk else None
        self._writer: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        check_path(path, read_only)
        with mapped(path):
            if read_only:
                self._check_readable(migration)
            else:
                self._writer = self._open_writer(migration)
                self._thread = threading.Thread(
                    target=self._write_loop, name="perdure-write", daemon=True
                )
                self._thread.start()

    @classmethod
    def open(cls, path: str | os.PathLike[str], migration: Migration, **options: Any) -> Database:
        """The database at `path`: the one this process has open already, or a new one."""
        text = os.fspath(path)
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
                    shared._migrate(shared._writer_or_raise(), migration)
                shared._users += 1
                return shared
            database = cls(text, migration, **options)
            cls._open[key] = database
            return database

    @property
    def _on_disk(self) -> bool:
        return self.path != MEMORY

    # -- opening

    def _connect(self, uri_mode: str | None = None) -> sqlite3.Connection:
        target = f"{Path(self.path).absolute().as_uri()}?{uri_mode}" if uri_mode else self.path
        conn = sqlite3.connect(
            target,
            timeout=self._timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=self._factory,
            cached_statements=256,
            uri=bool(uri_mode),
        )
        try:
            conn.execute("PRAGMA mmap_size = 0")
            if self._on_disk:
                conn.execute("PRAGMA wal_autocheckpoint = 0")
        except BaseException:
            conn.close()
            raise
        return conn

    def _open_writer(self, migration: Migration) -> sqlite3.Connection:
        with self._between_processes():
            conn = self._connect()
            try:
                if not check_identity(conn, self.path):
                    # must come before the first page is written
                    conn.execute("PRAGMA auto_vacuum = INCREMENTAL")
                if self._on_disk:
                    conn.execute("PRAGMA journal_mode = WAL")
                conn.execute(f"PRAGMA synchronous = {self.synchronous}")
                conn.execute("PRAGMA secure_delete = ON")
                migrate(conn, migration, self.path)
            except BaseException:
                conn.close()
                raise
        return conn

    def _migrate(self, conn: sqlite3.Connection, migration: Migration) -> None:
        with self._between_processes():
            migrate(conn, migration, self.path)

    def _check_readable(self, migration: Migration) -> None:
        conn = self._new_reader()
        if not check_identity(conn, self.path) or version(conn, migration, self.path) == 0:
            raise StorageError(
                f"{self.path!r} holds no {migration.component} data yet; open it once for writing"
            )
        self._readers.append(conn)

    @contextlib.contextmanager
    def _between_processes(self) -> Iterator[None]:
        if self._file_lock is None:
            yield
            return
        try:
            with self._file_lock.acquire(timeout=self._timeout_s):
                yield
        except Timeout as exc:
            raise StorageUnavailable(
                f"another process has held {self.path + '.lock'!r} for {self._timeout_s} s; "
                "try again"
            ) from exc

    # -- writing

    def write(self, flow: Flow[T], committed: Callable[[T], None] | None = None) -> T:
        """Have the writer run a flow, and wait until its transaction is committed.

        Flows that wait at the same moment share a transaction; each is a savepoint of it, so one
        that fails undoes only itself.

        Args:
            flow: The work.
            committed: Called in the writer thread with the result, after the commit.

        Raises:
            StorageUnavailable: The database is closed.
            StorageError: It was opened read-only, or refuses.
        """
        future = self._submit(flow, committed, awaited=False).future
        assert isinstance(future, Future)
        return future.result()

    def awrite(
        self, flow: Flow[T], committed: Callable[[T], None] | None = None
    ) -> asyncio.Future[T]:
        """See `write`."""
        future = self._submit(flow, committed, awaited=True).future
        assert isinstance(future, asyncio.Future)
        return future

    def _submit(
        self, flow: Flow[T], committed: Callable[[T], None] | None, *, awaited: bool
    ) -> Promise[T]:
        promise: Promise[T] = Promise(awaited=awaited)
        with self._gate:
            self._writer_or_raise()
            self._pending.put(_Job(flow, committed, promise))
        return promise

    def _writer_or_raise(self) -> sqlite3.Connection:
        if self._closed or self._pid != os.getpid():
            raise StorageUnavailable(
                f"the database {self.path!r} is closed"
                + ("" if self._closed else " in this forked process: open it again here")
            )
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
                    self._commit(ready)
                    self._housekeep()
            if job is not None:
                job = self._pending.get()

    def _commit(self, batch: list[_Job[Any]]) -> None:
        conn = self._writer
        assert conn is not None
        done: list[_Job[Any]] = []
        failed: list[tuple[_Job[Any], BaseException]] = []
        try:
            with mapped(self.path):
                conn.execute("BEGIN IMMEDIATE")
                step = self._within_savepoint if len(batch) > 1 else self._alone
                for job in batch:
                    try:
                        job.result = step(conn, job)
                        done.append(job)
                    except BaseException as exc:
                        failed.append((job, exc))
                        if not conn.in_transaction and len(batch) > 1:
                            raise  # a full disk, say, undoes all of it at once
                if conn.in_transaction:
                    conn.execute("COMMIT")
        except BaseException as exc:
            with contextlib.suppress(sqlite3.Error):
                if conn.in_transaction:
                    conn.execute("ROLLBACK")
            told = {id(job) for job, _ in failed}
            failed += [(job, exc) for job in batch if id(job) not in told]
            done = []
        for job, error in failed:
            job.promise.fail(error)
        for job in done:
            job.succeed()
        settle(job.promise for job in batch)

    def _alone(self, conn: sqlite3.Connection, job: _Job[T]) -> T:
        """A job that has the transaction to itself: if it fails, all of it is undone."""
        try:
            with mapped(self.path):
                return run(job.flow, lambda statement: _execute(conn, statement))
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            raise

    def _within_savepoint(self, conn: sqlite3.Connection, job: _Job[T]) -> T:
        conn.execute("SAVEPOINT job")
        try:
            with mapped(self.path):
                result = run(job.flow, lambda statement: _execute(conn, statement))
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK TO job")
                conn.execute("RELEASE job")
            raise
        conn.execute("RELEASE job")
        return result

    # -- the file: checkpoints and giving space back

    def _housekeep(self) -> None:
        """After a commit and before the next: keep the WAL short, the file small. Never fails."""
        with contextlib.suppress(sqlite3.Error, OSError):
            if self._vacuum_wanted and self._pending.empty():
                self._vacuum_wanted = self._vacuum_step()
            self._commits += 1
            if self._on_disk and self._commits % WAL_LOOK_EVERY == 0:
                size = os.path.getsize(self.path + "-wal")
                if size - self._wal_mark > WAL_LIMIT_BYTES:
                    self._wal_mark = self._checkpoint(wait_s=0.05)

    def _vacuum_step(self) -> bool:
        """Give some free pages back. Returns whether there are more."""
        conn = self._writer
        assert conn is not None
        conn.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        (free,) = conn.execute("PRAGMA freelist_count").fetchone()
        return bool(free)

    def _checkpoint(self, wait_s: float) -> int:
        """Move the WAL into the database file. Returns the bytes left in the WAL."""
        conn = self._writer
        assert conn is not None
        assert self._file_lock is not None
        wal = self.path + "-wal"
        try:
            with self._file_lock.acquire(timeout=wait_s):
                conn.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")
                conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except Timeout:
            pass  # another process is at it; the next commit asks again
        finally:
            conn.execute(f"PRAGMA busy_timeout = {int(self._timeout_s * 1000)}")
        return os.path.getsize(wal) if os.path.exists(wal) else 0

    def shrink(self) -> None:
        """Ask for the space of deleted rows to be given back to the file system, in small steps."""

        def nothing() -> Flow[None]:
            yield Statement("SELECT 1")

        self._vacuum_wanted = True
        while self._vacuum_wanted:
            self.write(nothing())
        with self._write_lock, mapped(self.path):
            if self._on_disk and self._writer is not None:
                self._wal_mark = self._checkpoint(wait_s=1.0)

    # -- reading

    def read(self, flow: Flow[T]) -> T:
        """Run a flow that only reads, on one snapshot of the database, in the calling thread.

        Raises:
            StorageUnavailable: The database is closed.
        """
        if not self._on_disk:
            return self.write(flow)
        with self._reader() as conn, mapped(self.path):
            conn.execute("BEGIN")
            try:
                return run(flow, lambda statement: _execute(conn, statement))
            finally:
                conn.execute("COMMIT")

    def in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run blocking work in one of this database's reading threads.

        Raises:
            StorageUnavailable: The database is closed.
        """
        if self._closed:
            raise StorageUnavailable(f"the database {self.path!r} is closed")
        future = self._workers.submit(work, awaited=True).future
        assert isinstance(future, asyncio.Future)
        return future

    def _new_reader(self) -> sqlite3.Connection:
        try:
            conn = self._connect("mode=ro")
            conn.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            if not self.read_only or os.path.exists(self.path + "-wal"):
                raise
            conn = self._connect("immutable=1")  # a folder without write permission and no WAL
        self._all_readers.append(conn)
        return conn

    @contextlib.contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        if self._closed or self._pid != os.getpid():
            raise StorageUnavailable(f"the database {self.path!r} is closed")
        try:
            conn = self._readers.pop()
        except IndexError:
            with mapped(self.path):
                conn = self._new_reader()
        try:
            yield conn
        finally:
            self._readers.append(conn)

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
        with self._gate:
            self._closed = True
            self._pending.put(None)
        self._workers.close()
        if self._thread is not None:
            self._thread.join()
        self._close_connections()

    def _close_connections(self) -> None:
        with contextlib.suppress(StorageUnavailable), self._between_processes():
            for conn in self._all_readers:
                conn.close()
            if self._writer is not None:
                # closing the last connection checkpoints too, hence under the same lock
                self._writer.close()
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
            "wal_bytes": os.path.getsize(wal) if self._on_disk and os.path.exists(wal) else 0,
        }


def _execute(conn: sqlite3.Connection, statement: Statement) -> list[Row]:
    if statement.many:
        conn.executemany(statement.sql, statement.params)
        return []
    return conn.execute(statement.sql, statement.params).fetchall()


@atexit.register
def _close_all() -> None:
    for database in list(Database._open.values()):
        if database._pid == os.getpid():
            database._users = 1
            database.close()

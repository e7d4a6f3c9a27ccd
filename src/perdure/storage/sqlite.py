"""`SQLiteDatabase`: a `Database` in one SQLite file, or in memory.

All who open one path in one process share an `SQLiteFile`: one writing connection, whose thread
commits in groups, and connections that read beside it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, get_args

import aiosqlite

from perdure.errors import ConfigurationError, StorageError, StorageUnavailable
from perdure.settings import TIMEOUT_S
from perdure.storage.database import Job, QueueLocation, Schema, Watch
from perdure.storage.flow import Flow, Request, Statement, T, arun_flow, fetch_rows, run_flow
from perdure.storage.locks import FileLocks, Locks, NamedLock
from perdure.storage.shared import LazyDatabase, SharedResource, inherited_resources
from perdure.storage.sqlite_connection import (
    DURABLE,
    REUSES_WAL,
    Connector,
    Synchronous,
    check_name,
    check_path,
    execute,
    map_errors,
    own_tables,
)
from perdure.storage.sqlite_writer import SCRUB_WANTED, SQLiteWriter
from perdure.storage.threads import Promise, ThreadPool, deliver_promises
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES

_READING_THREADS: Final = 4
_AT_ONCE: Final = 4  # coroutines that read at a moment: each has a thread
_FORK_WAIT_S: Final = 2.0  # seconds that a fork waits for reads to end
_PAUSE_S: Final = 0.001  # seconds between two checks whether a fork is still waiting
_CHUNK: Final = 64  # rows; not used, as whole pages are fetched
_SIZES = (
    "SELECT page_size, page_count, freelist_count "
    "FROM pragma_page_size, pragma_page_count, pragma_freelist_count"
)


class SQLiteFile(SharedResource):
    """An open file."""

    def __init__(self, connector: Connector, schema: Schema | None) -> None:
        self.path = path = connector.path
        _close_inherited(path)
        super().__init__(
            repr(path), ThreadPool(_READING_THREADS, "perdure-read", is_permanent=True)
        )
        self.connector = connector
        self.readers = Readers(connector)
        self.locks = Locks(FileLocks(path + ".locks") if connector.on_disk else None)
        self.async_readers = AsyncReaders(connector)
        self._writer: SQLiteWriter | None = None
        check_path(path, connector.read_only)
        with map_errors(path):
            if schema is None:
                connector.reader().close()
            elif connector.read_only:
                connector.check_readable(schema)
            else:
                self._writer = SQLiteWriter(connector, schema)
                self.write_lock = self._writer.lock
                with suppress(StorageError):  # the next to open it tries again
                    self._writer.scrub()

    @property
    def writer(self) -> SQLiteWriter:
        """The writer, unless the database is closed or was opened read-only."""
        if self.refusal:
            self.check_usable()
        if self._writer is None:
            raise StorageError(f"{self.path!r} was opened read-only; open it without read_only")
        return self._writer

    def submit(self, job: Job[T]) -> Any:
        """Hand a job to the writer. Returns the future of its outcome."""
        writer = self._writer
        if writer is None or self.refusal:  # before the gate: a forked process may have it closed
            writer = self.writer
        with self.submit_lock:
            if self.refusal:
                self.check_usable()
            writer.put(job)
        return job.future

    def read(self, flow: Flow[T], *, snapshot: bool) -> T:
        """See `Database.read`."""
        self.check_usable()
        # a database in memory has one connection only
        lent = self.readers.lent if self.connector.on_disk else self.writer.between_commits
        with map_errors(self.path), lent() as conn:
            if self.connector.guard is not None:
                with self.connector.reading(conn):
                    return run_flow(flow, partial(execute, conn))
            if not snapshot:
                return run_flow(flow, partial(execute, conn))
            conn.execute("BEGIN")
            result = run_flow(flow, partial(execute, conn))
            conn.execute("COMMIT")
            return result

    async def aread(self, flow: Flow[T], *, snapshot: bool) -> T:
        """See `Database.aread`. A database in memory and an untrusted file are read in a thread."""
        self.check_usable()
        if not self.connector.on_disk or self.connector.guard is not None:
            return await self.run_in_thread(lambda: self.read(flow, snapshot=snapshot))
        with self.submit_lock:
            self.check_usable()
            reading = self.async_readers.submit(flow, snapshot=snapshot)
        return await reading

    def pause_for_fork(self) -> None:
        """See `Shared.pause_for_fork`. It also waits for reads, up to `_FORK_WAIT_S` seconds."""
        super().pause_for_fork()
        quiet = [readers.pause() for readers in (self.readers, self.async_readers)]
        self.was_idle = all(quiet)

    def resume_after_fork(self) -> None:
        """See `Shared.resume_after_fork`."""
        for readers in (self.readers, self.async_readers):
            readers.resume()
        super().resume_after_fork()

    def close_inherited(self) -> None:
        """Close, in a forked process, the connections to a file that its parent had opened.

        Closing them changes no file. It does not affect the parent, whose locks on the file belong
        to the process of the parent.
        """
        writers = [] if self._writer is None else [self._writer.connection]
        for conn in (*writers, *self.readers.connections, *self.async_readers.connections):
            with suppress(sqlite3.Error):
                conn.close()

    def shut_down(self) -> None:
        """See `Shared.end`."""
        with self.submit_lock:
            if self.refusal:
                return
            self.refusal = "is closed"
        self.threads.close()
        writer = self._writer
        if writer is not None:
            writer.shut_down()
        self.readers.close()
        self.async_readers.close()
        self.locks.close()
        if writer is not None:
            with suppress(StorageError):  # its folder may be gone
                writer.close()


def _close_inherited(path: str) -> None:
    """Close the connections that a forked process has inherited, before it opens a file itself.

    SQLite assumes that a process holds the locks of all its connections to a file. In a forked
    process the inherited connections hold no locks. New connections would then take no locks
    either, and other processes could remove the WAL while it is in use.
    https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_file_across_a_fork_

    Raises:
        StorageUnavailable: A thread of the parent was using a connection to this file when the
            process was forked, so that this connection cannot be closed.
    """
    for file in inherited_resources[:]:
        if not isinstance(file, SQLiteFile):
            continue
        if file.was_idle:
            file.close_inherited()
            inherited_resources.remove(file)
        elif os.path.realpath(file.path) == os.path.realpath(path):
            raise StorageUnavailable(
                f"{path!r} was being read while this process was forked, and cannot be opened in "
                "it: fork again when no thread reads, or start the process with spawn"
            )


class SQLiteDatabase(LazyDatabase[SQLiteFile]):
    """One component's `Database` in an SQLite file; its methods are those of `Database`.

    Args:
        path: A file, or `":memory:"` (never shared, gone when closed).
        schema: The component's tables; None: the file is another application's, only read.
        begin: Makes the flow that the component runs whenever it opens the file.
        synchronous: `"full"` waits for the disk at each commit, so that a power cut loses nothing
            that was acknowledged; `"normal"` may lose the newest commits to a power cut, never to a
            crash of the process, and never corrupts (https://sqlite.org/pragma.html#pragma_synchronous).
        read_only: Open for reading; nothing is made or written (SQLite itself keeps a `-shm`
            and an empty `-wal` file beside a database that is read).
        timeout_s: How long to wait for another process that is writing.
        factory: The connection class; tests put one here that fails on demand.
        untrusted: Whether the file comes from elsewhere. It is only read, and only after its tables
            were checked; see `untrusted_sqlite.py`. Without a schema this is always done.
        tables: If there is no schema, the names of the tables that are read.
        max_value_bytes: The size of the largest value that is read from an untrusted file.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    _resource_class = SQLiteFile

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: Schema | None,
        *,
        begin: Callable[[], Flow[object]] | None = None,
        synchronous: Synchronous = DURABLE,
        read_only: bool = False,
        timeout_s: float = TIMEOUT_S,
        factory: type[sqlite3.Connection] = sqlite3.Connection,
        untrusted: bool = False,
        tables: Sequence[str] = (),
        max_value_bytes: int = IMPORT_VALUE_BYTES,
    ) -> None:
        read_only = True if untrusted else read_only
        if synchronous not in get_args(Synchronous):
            raise ConfigurationError(f"synchronous is {synchronous!r}; expected 'full' or 'normal'")
        text = check_name(path, read_only)
        connector = Connector(text, synchronous, read_only, timeout_s, factory)
        if schema is None:
            connector = connector.with_guard(dict.fromkeys(tables), max_value_bytes)
        elif untrusted:
            check_version = partial(connector.has_component, schema=schema)
            own = own_tables(schema.script)
            connector = connector.with_guard(own, max_value_bytes, check_version)
        self._connector = connector
        self._schema = schema
        self._component = "" if schema is None else schema.component
        self._begin = begin

    @property
    def path(self) -> str:
        """The file, absolute once it is connected, or `":memory:"`."""
        return self._connector.path

    @property
    def _name(self) -> str:
        return repr(self.path)

    @property
    def queue_location(self) -> QueueLocation | None:
        """See `Database.queue_location`."""
        return QueueLocation(f"{self.path}.jobs", "") if self._connector.on_disk else None

    @property
    def location(self) -> Hashable:
        """See `Database.location`."""
        return self.path if self._connector.on_disk else None

    @property
    def tenant(self) -> None:
        """See `Database.tenant`. A file has no tenants."""

    @property
    def read_only(self) -> bool:
        """Whether writes are refused."""
        return self._connector.read_only

    def _open_resource(self) -> SQLiteFile:
        key = None
        if self._connector.on_disk:  # the working directory may change
            self._connector = replace(self._connector, path=os.path.abspath(self.path))
            key = None if self.read_only else os.path.realpath(self.path)
        file = self._join_or_create(key, lambda: SQLiteFile(self._connector, self._schema))
        try:
            if file.user_count > 1:
                self._join(file)
            if self._begin is not None and self.read_only:
                file.read(self._begin(), snapshot=True)
            elif self._begin is not None:
                # without it no rows could be deleted
                file.submit(Job(self._begin, deletes_rows=True, is_async=False)).result()
        except BaseException:
            file.remove_user()
            raise
        return file

    def _join(self, file: SQLiteFile) -> None:
        """Make the tables in a file that this process has open already."""
        own, others = self._connector.synchronous, file.connector.synchronous
        if own != others:
            raise ConfigurationError(
                f"{self.path!r} is open in this process with synchronous={others!r}; open it with "
                f"the same, not {own!r}"
            )
        if self._schema is not None:
            file.writer.add(self._schema)

    # -- writing and reading

    def write(
        self,
        make_flow: Callable[[], Flow[T]],
        on_commit: Callable[[T], None] | None = None,
        on_rollback: Callable[[], None] | None = None,
        exclusive_names: Sequence[str] | None = None,
        watch: Watch | None = None,
        may_wait: bool = False,
        urgent: bool = False,
        deletes_rows: bool = False,
    ) -> T:
        """See `Database.write`. SQLite has one writer at a time."""
        job = Job(
            make_flow,
            on_commit,
            on_rollback,
            self._component,
            watch,
            may_wait,
            deletes_rows,
            is_async=False,
        )
        file = self._connect_once()
        if not urgent or file.refusal or not file.writer.commit_in_calling_thread(job):
            file.submit(job)
        return job.future.result()

    def awrite(
        self,
        make_flow: Callable[[], Flow[T]],
        on_commit: Callable[[T], None] | None = None,
        on_rollback: Callable[[], None] | None = None,
        exclusive_names: Sequence[str] | None = None,
        watch: Watch | None = None,
        may_wait: bool = False,
        urgent: bool = False,
        deletes_rows: bool = False,
    ) -> Awaitable[T]:
        """See `Database.write`."""
        job = Job(
            make_flow,
            on_commit,
            on_rollback,
            self._component,
            watch,
            may_wait,
            deletes_rows,
            is_async=True,
        )
        if self._resource is None:
            return self._call_after_connecting(lambda file: file.submit(job))
        return self._resource.submit(job)  # type: ignore[no-any-return]

    def write_later(self, make_flow: Callable[[], Flow[object]]) -> None:
        """See `Database.post`."""
        with suppress(StorageUnavailable):
            self._connect_once().submit(Job(make_flow, component=self._component, is_async=False))

    def read(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """See `Database.read`."""
        return self._connect_once().read(make_flow(), snapshot=snapshot)

    async def aread(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """See `Database.aread`."""
        await self.aconnect()
        return await self._connect_once().aread(make_flow(), snapshot=snapshot)

    def epoch(self, watch: Watch) -> object | None:
        """See `Database.epoch`."""
        file = self._resource
        if file is None or self.read_only:
            return None
        return file.writer.epoch(self._component, watch)

    async def wait_for_epoch(self, watch: Watch) -> object | None:
        """See `Database.epoch_soon`."""
        file = self._resource
        if file is None or self.read_only:
            return None
        return await file.writer.wait_for_epoch(self._component, watch)

    # -- maintenance

    def request_scrub(self) -> Flow[None]:
        """See `Database.scrub_wanted`."""
        yield Statement(SCRUB_WANTED)

    def scrub(self) -> bool:
        """See `Database.scrub`. Takes the time, and for a moment the space, of writing the file."""
        return self._connect_once().writer.scrub()

    def shrink(self) -> None:
        """See `Database.shrink`."""
        self._connect_once().writer.shrink(lambda: self.write(lambda: fetch_rows("SELECT 1")))

    def stats(self) -> dict[str, Any]:
        """See `Database.stats`; also free space, and whether SQLite has the WAL-reset bug."""
        ((size, pages, free),) = self.read(lambda: fetch_rows(_SIZES))
        return {
            "path": self.path,
            "sqlite_version": sqlite3.sqlite_version,
            "wal_reset_bug": not REUSES_WAL,
            "synchronous": self._connector.synchronous,
            "size_bytes": size * pages,
            "free_bytes": size * free,
            "wal_bytes": self._connector.wal_bytes(),
        }

    def lock(self, name: str, *, timeout_s: float | None = None) -> NamedLock:
        """See `Database.lock`."""
        return NamedLock(self._locks, self.aconnect, name, timeout_s)

    def _locks(self) -> Locks:
        file = self._connect_once()
        _ = file.writer  # one that only reads could not make the file of locks
        return file.locks


# -- reading: a connection for each thread, or coroutine, that reads


class _Pausable:
    """A counter of the reads in progress, which a fork uses to wait until all reads have ended."""

    def __init__(self) -> None:
        self._lent = 0  # number of reads in progress
        self._is_pausing = False
        self._changed = threading.Condition()

    def pause(self) -> bool:
        """Let no read begin until `resume`, and return whether all reads have ended."""
        self._changed.acquire()
        self._is_pausing = True
        was_idle = self._changed.wait_for(lambda: self._lent == 0, _FORK_WAIT_S)
        self._is_pausing = False
        return was_idle

    def resume(self) -> None:
        """Let reads begin again."""
        self._changed.notify_all()
        self._changed.release()


class Readers(_Pausable):
    """Connections for threads."""

    def __init__(self, connector: Connector) -> None:
        super().__init__()
        self._connector = connector
        self._idle: list[sqlite3.Connection] = []
        self._closed = False

    @property
    def connections(self) -> list[sqlite3.Connection]:
        """The connections that are not in use."""
        return self._idle

    @contextmanager
    def lent(self) -> Iterator[sqlite3.Connection]:
        """One of them, for a read."""
        with self._changed:
            while self._is_pausing:
                self._changed.wait()
            if self._closed:
                raise StorageUnavailable(f"the database {self._connector.path!r} is closed")
            self._lent += 1
            conn = self._idle.pop() if self._idle else None
        try:
            conn = conn or self._connector.reader()
            yield conn
        finally:
            usable = conn is not None and _usable(conn)
            with self._changed:
                if conn is not None and usable:
                    self._idle.append(conn)
                self._lent -= 1
                if self._closed or self._is_pausing:
                    self._changed.notify_all()

    def close(self) -> None:
        """Close them, once the threads that read have finished; later ones are refused."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._lent == 0)
            while self._idle:
                self._idle.pop().close()


def _usable(conn: sqlite3.Connection) -> bool:
    """Whether a connection is out of its transaction; if it cannot be brought out, it is closed."""
    with suppress(sqlite3.Error):
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        return True
    conn.close()
    return False


class _AsyncConnection(NamedTuple):
    """A connection of aiosqlite, and the connection of sqlite3 that it uses."""

    conn: aiosqlite.Connection
    of_sqlite: sqlite3.Connection


class AsyncReaders(_Pausable):
    """Connections of aiosqlite, for tasks of any event loop, and an event loop of their own.

    A connection's thread answers to the event loop that awaits a statement, and dies if that is
    closed by then, as that of a cancelled task may be. So nothing is cancelled here, and `close`
    waits. All threads are daemons: a process can end that forgets to close its database.
    """

    def __init__(self, connector: Connector) -> None:
        super().__init__()
        self._connector = connector
        self._idle: list[_AsyncConnection] = []
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread

    def submit(self, flow: Flow[T], *, snapshot: bool) -> Awaitable[T]:
        """Have a flow read, for a coroutine. Returns its future."""
        promise: Promise[T] = Promise(is_async=True)
        if self._loop is None:
            loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._serve, args=(loop,), name="perdure-aread", daemon=True
            )
            self._thread.start()
            self._loop = loop
        asyncio.run_coroutine_threadsafe(self._do(promise, flow, snapshot), self._loop)
        return promise.future  # type: ignore[return-value]

    async def _do(self, promise: Promise[T], flow: Flow[T], snapshot: bool) -> None:
        async with self._turns:
            if not promise.try_start():
                return
            try:
                async with self._count_read():
                    with map_errors(self._connector.path):
                        promise.result = await self._read(flow, snapshot)
            except BaseException as exc:
                promise.error = exc
        deliver_promises([promise])

    @asynccontextmanager
    async def _count_read(self) -> AsyncIterator[None]:
        """Wait until no fork is waiting, then count a read as running until the context exits.

        The wait does not block the event loop, because other reads have to end on it.
        """
        while not self._try_to_begin_read():  # noqa: ASYNC110 - across threads
            await asyncio.sleep(_PAUSE_S)
        try:
            yield
        finally:
            with self._changed:
                self._lent -= 1
                if self._is_pausing:
                    self._changed.notify_all()

    def _try_to_begin_read(self) -> bool:
        """Register a read unless a fork is waiting; return whether it was registered."""
        with self._changed:
            self._lent += not self._is_pausing
            return not self._is_pausing

    async def _read(self, flow: Flow[T], snapshot: bool) -> T:
        lent = self._idle.pop() if self._idle else await self._open_connection()
        conn = lent.conn
        try:
            if snapshot:
                await conn.execute_fetchall("BEGIN")
            return await arun_flow(flow, partial(_execute, conn))
        finally:
            try:
                await conn.rollback()
                self._idle.append(lent)
            except sqlite3.Error:
                await conn.close()

    async def _open_connection(self) -> _AsyncConnection:
        opened: list[sqlite3.Connection] = []

        def connect() -> sqlite3.Connection:
            opened.append(self._connector.reader())
            return opened[0]

        conn = await aiosqlite.Connection(connect, _CHUNK)
        return _AsyncConnection(conn, opened[0])

    @property
    def connections(self) -> list[sqlite3.Connection]:
        """The connections that are not in use."""
        return [each.of_sqlite for each in self._idle]

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.run_until_complete(self._finish())
        loop.close()

    async def _finish(self) -> None:
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        async with self._count_read():
            for each in self._idle:
                await each.conn.close()

    def close(self) -> None:
        """Close them, once what was handed in is read."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


async def _execute(conn: aiosqlite.Connection, request: Request) -> Any:
    if isinstance(request, list):
        return [await _execute(conn, statement) for statement in request]
    return list(await conn.execute_fetchall(request.sql, request.params))

"""`SQLiteDatabase`: a `Database` in one SQLite file, or in memory.

Within a process, all databases with the same path share one `SQLiteFile`, except read-only and
in-memory databases, which have one each. A `SQLiteFile` has one writing connection and several
read-only connections. For a read-only database, there is no writing connection. For an in-memory
database, there is only the writing connection. The OS thread that commits queued writes can commit
several of them in one transaction.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, get_args

import aiosqlite

from perdure.errors import ConfigurationError, StorageError, StorageUnavailable
from perdure.settings import TIMEOUT_S
from perdure.storage.database import QueueLocation, Schema
from perdure.storage.flow import (
    Flow,
    Job,
    NamedSQL,
    OwnWrites,
    Promise,
    Request,
    Statement,
    T,
    WriteCounts,
    arun_flow,
    fetch_rows,
    load_sql,
    resolve_futures_in_their_threads,
    run_flow,
)
from perdure.storage.locks import FileLocks, Locks, NamedLock
from perdure.storage.shared_resources import LazyDatabase, SharedResource, inherited_resources
from perdure.storage.sqlite_connection import (
    DURABLE,
    REUSES_WAL,
    Connector,
    Synchronous,
    check_database_path_and_convert_to_text,
    check_path_can_be_database,
    execute_flow_request,
    parse_component_and_common_tables,
)
from perdure.storage.sqlite_errors import convert_sqlite_errors
from perdure.storage.sqlite_writer import REQUEST_SCRUB_SQL, SQLiteWriter
from perdure.storage.thread_pools import ThreadPool
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES

# Maximum number of OS threads that read one file on behalf of coroutines
_READING_THREADS: Final = 4
# Maximum number of concurrent reads of one file through aiosqlite. Each read occupies one OS
# thread.
_MAX_ASYNC_READS: Final = 4
# Maximum number of seconds that a fork waits for reads to end
_FORK_WAIT_S: Final = 2.0
# Polling interval, in seconds, of a read that waits until a fork of the process has finished
_PAUSE_S: Final = 0.001
# Number of rows that aiosqlite fetches at a time. The value has no effect, because perdure always
# fetches all rows at once.
_CHUNK_ROWS: Final = 64
_SIZES = (
    "SELECT page_size, page_count, freelist_count "
    "FROM pragma_page_size, pragma_page_count, pragma_freelist_count"
)


class SQLiteFile(SharedResource):
    """An open SQLite file or in-memory database, with its connections and locks.

    All databases in this process that write to the same path share one `SQLiteFile`.

    Args:
        connector: Opens the connections.
        schema: The tables of the component that opens the file first, or None for a file of another
            application.
    """

    def __init__(self, connector: Connector, schema: Schema | None) -> None:
        self.path = path = connector.path
        _close_inherited_connections(path)
        super().__init__(
            repr(path), ThreadPool(_READING_THREADS, "perdure-read", is_permanent=True)
        )
        self.connector = connector
        self.readers = Readers(connector)
        self.locks = Locks(FileLocks(path) if connector.is_on_disk else None)
        self.async_readers = AsyncReaders(connector)
        self._writer: SQLiteWriter | None = None
        check_path_can_be_database(path, connector.read_only)
        with convert_sqlite_errors(path):
            if schema is None:
                connector.open_reader().close()
            elif connector.read_only:
                connector.check_has_tables_of_component(schema)
            else:
                self._writer = SQLiteWriter(connector, schema)
                self.write_lock = self._writer.lock
                # Ignore scrub errors, because the next process that opens the file calls
                # `scrub_deleted_rows` again.
                with suppress(StorageError):
                    self._writer.scrub_deleted_rows()

    @property
    def writer(self) -> SQLiteWriter:
        """The writer of the file.

        Reading this property raises an error if the file is closed or was opened read-only.
        """
        if self.refusal:
            self.check_usable()
        if self._writer is None:
            raise StorageError(f"{self.path!r} was opened read-only; open it without read_only")
        return self._writer

    def submit_write_and_get_future(self, job: Job[T]) -> Any:
        """Submit a job to the writer, and return a future for its result."""
        writer = self._writer
        # Check `refusal` before acquiring the lock, because `refusal` is set in a forked process.
        # The forked process may have inherited the lock in the locked state, and would wait for the
        # lock forever.
        if writer is None or self.refusal:
            writer = self.writer
        with self.submit_lock:
            if self.refusal:
                self.check_usable()
            writer.submit(job)
        return job.future

    def read(self, flow: Flow[T], *, snapshot: bool) -> T:
        """See `Database.read`."""
        self.check_usable()
        # An in-memory database has only one connection, so its reads use the writing connection.
        borrow_connection = (
            self.readers.borrow_connection
            if self.connector.is_on_disk
            else self.writer.lend_connection
        )
        with convert_sqlite_errors(self.path), borrow_connection() as conn:
            if self.connector.guard is not None:
                with self.connector.check_file_and_limit_reads_during_block(conn):
                    return run_flow(flow, partial(execute_flow_request, conn))
            if not snapshot:
                return run_flow(flow, partial(execute_flow_request, conn))
            conn.execute("BEGIN")
            result = run_flow(flow, partial(execute_flow_request, conn))
            conn.execute("COMMIT")
            return result

    async def aread(self, flow: Flow[T], *, snapshot: bool) -> T:
        """See `Database.aread`.

        If the database is in memory or the file is untrusted, `aread` calls the blocking method
        `read` in a worker thread.
        """
        self.check_usable()
        if not self.connector.is_on_disk or self.connector.guard is not None:
            return await self.run_in_thread(lambda: self.read(flow, snapshot=snapshot))
        with self.submit_lock:
            self.check_usable()
            reading = self.async_readers.submit(flow, snapshot=snapshot)
        return await reading

    def pause_for_fork(self) -> None:
        """See `SharedResource.pause_for_fork`.

        Before the process forks, this method waits until the reads in progress have ended. The fork
        is delayed by at most `_FORK_WAIT_S` seconds for blocking reads, and then by at most
        `_FORK_WAIT_S` seconds for reads by coroutines.
        """
        super().pause_for_fork()
        all_idle = [
            readers.block_new_reads_and_check_if_idle()
            for readers in (self.readers, self.async_readers)
        ]
        self.was_idle = all(all_idle)

    def resume_after_fork(self) -> None:
        """See `SharedResource.resume_after_fork`."""
        for readers in (self.readers, self.async_readers):
            readers.resume()
        super().resume_after_fork()

    def close_connections_inherited_by_fork(self) -> None:
        """Close the connections to this file that a forked process inherited from its parent.

        Closing the inherited connections neither writes to the file nor releases the parent's file
        locks, because locks are not inherited across a fork.
        """
        writers = [] if self._writer is None else [self._writer.connection]
        for conn in (*writers, *self.readers.connections, *self.async_readers.connections):
            with suppress(sqlite3.Error):
                conn.close()

    def shut_down(self) -> None:
        """See `SharedResource.shut_down`."""
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
            # Ignore storage errors, because the folder of the database file may have been deleted.
            with suppress(StorageError):
                writer.close()


def _close_inherited_connections(path: str) -> None:
    """Close the connections that a forked process inherited from its parent process.

    A forked process calls this function before it opens a database file. As long as a connection is
    open, SQLite assumes that the process still holds the connection's file locks. A forked process
    inherits its parent's open SQLite connections, but not the file locks of these connections. If
    the inherited connections stayed open, SQLite would not take locks for new connections, and
    other processes could delete the WAL while the forked process was still using it. See
    https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_file_across_a_fork_

    Raises:
        StorageUnavailable: A thread of the parent was using a connection to this file when the
            process was forked, so that this connection cannot be closed.
    """
    for file in inherited_resources[:]:
        if not isinstance(file, SQLiteFile):
            continue
        if file.was_idle:
            file.close_connections_inherited_by_fork()
            inherited_resources.remove(file)
        elif os.path.realpath(file.path) == os.path.realpath(path):
            raise StorageUnavailable(
                f"{path!r} cannot be opened in this process, because another OS thread was reading "
                "it during the fork; fork when no thread is reading, or use the start method "
                "'spawn'"
            )


class SQLiteDatabase(LazyDatabase[SQLiteFile]):
    """A `Database` for one component, stored in an SQLite file.

    Args:
        path: The path of a file, or `":memory:"` for a database that is not shared, and is lost
            when it is closed.
        schema: The component's tables. None means that the file belongs to another application and
            is only read.
        begin: A function that builds the flow that runs whenever the component opens the file.
        synchronous: `"full"` waits for the disk at each commit, so that a power cut loses no
            acknowledged commit. With `"normal"`, a power cut may lose the newest commits, but a
            crash of the process loses nothing, and neither of them corrupts the file
            (https://sqlite.org/pragma.html#pragma_synchronous).
        read_only: Whether nothing may be created or written. SQLite itself keeps a `-shm` and an
            empty `-wal` file next to a database that is read.
        timeout_s: The seconds to wait for another process that is writing.
        factory: The class of the connections. Tests pass a class that fails on demand.
        untrusted: Whether the file was written by others. Such a file is only read, and only after
            its tables were checked; see `untrusted_sqlite.py`. Tables are also checked if there is
            no schema.
        tables: The names of the tables that are read, if there is no schema.
        further_scripts: The scripts of further components. If an untrusted file has their tables,
            these tables are checked as well.
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
        further_scripts: Sequence[str] = (),
        max_value_bytes: int = IMPORT_VALUE_BYTES,
    ) -> None:
        read_only = True if untrusted else read_only
        if synchronous not in get_args(Synchronous):
            raise ConfigurationError(
                f"the argument 'synchronous' is {synchronous!r}; expected 'full' or 'normal'"
            )
        text = check_database_path_and_convert_to_text(path, read_only)
        connector = Connector(text, synchronous, read_only, timeout_s, factory)
        if schema is None:
            connector = connector.with_untrusted_file_guard(dict.fromkeys(tables), max_value_bytes)
        elif untrusted:
            check_version = partial(connector.has_tables_of_component, schema=schema)
            table_sql = parse_component_and_common_tables(
                ";\n".join([schema.script, *further_scripts])
            )
            connector = connector.with_untrusted_file_guard(
                table_sql, max_value_bytes, check_version
            )
        self._connector = connector
        self._schema = schema
        self._component = "" if schema is None else schema.component
        self._begin = begin
        super().__init__()

    @property
    def path(self) -> str:
        """The path, or `":memory:"`. Opening the database makes the path absolute."""
        return self._connector.path

    @property
    def _error_name(self) -> str:
        return repr(self.path)

    @property
    def job_queue_location(self) -> QueueLocation | None:
        """See `Database.job_queue_location`."""
        return QueueLocation(f"{self.path}.jobs", "") if self._connector.is_on_disk else None

    @property
    def location_key(self) -> Hashable:
        """See `Database.location_key`."""
        return self.path if self._connector.is_on_disk else None

    @property
    def tenant(self) -> None:
        """See `Database.tenant`. A file has no tenants."""

    @property
    def read_only(self) -> bool:
        """Whether writes are refused."""
        return self._connector.read_only

    def _open_file_or_server(self) -> SQLiteFile:
        """See `LazyDatabase._open_file_or_server`."""
        key = None
        if self._connector.is_on_disk:
            # Make the path absolute, because the working directory may change later.
            self._connector = replace(self._connector, path=os.path.abspath(self.path))
            key = None if self.read_only else os.path.realpath(self.path)
        file = self._share_or_create_resource(
            key, lambda: SQLiteFile(self._connector, self._schema)
        )
        try:
            if file.user_count > 1:
                self._create_tables_in_open_file(file)
            if self._begin is not None and self.read_only:
                file.read(self._begin(), snapshot=True)
            elif self._begin is not None:
                # Set `deletes_rows`, so that the job may use the disk space that the reserve file
                # occupies (see `DiskReserve`). Without this space, a database on a full disk could
                # not be opened, and a user could not delete rows to free space.
                file.submit_write_and_get_future(
                    Job(Future(), self._begin, deletes_rows=True)
                ).result()
        except BaseException:
            file.decrement_user_count_and_shut_down_if_unused()
            raise
        return file

    def _create_tables_in_open_file(self, file: SQLiteFile) -> None:
        """Create the component's tables in a file that this process already has open.

        Raises:
            ConfigurationError: The file is open with another `synchronous`.
        """
        synchronous, file_synchronous = self._connector.synchronous, file.connector.synchronous
        if synchronous != file_synchronous:
            raise ConfigurationError(
                f"{self.path!r} is already open in this process with "
                f"synchronous={file_synchronous!r}, not {synchronous!r}; open it with the same "
                "value"
            )
        if self._schema is not None:
            file.writer.add_component(self._schema)

    def load_sql(self, package: str) -> NamedSQL:
        """See `Database.load_sql`."""
        return load_sql(package, "sqlite.sql")

    def create_tables(self, schema: Schema) -> None:
        """See `Database.create_tables`."""
        self._connect_once().writer.add_component(schema)
        self._add_known_component(schema)

    # -- writing and reading

    def write(
        self,
        make_flow: Callable[[], Flow[T]],
        on_commit: Callable[[T], None] | None = None,
        on_rollback: Callable[[], None] | None = None,
        exclusive_names: Sequence[str] | None = None,
        own_writes: OwnWrites | None = None,
        may_wait: bool = False,
        urgent: bool = False,
        deletes_rows: bool = False,
    ) -> T:
        """See `Database.write`.

        `exclusive_names` has no effect, because SQLite has only one writer at a time.
        """
        job = Job(
            Future(),
            make_flow,
            on_commit,
            on_rollback,
            self._component,
            own_writes,
            may_wait,
            deletes_rows,
        )
        file = self._resource or self._connect_once()
        is_executed = (
            urgent and not file.refusal and file.writer.try_to_commit_in_calling_thread(job)
        )
        if not is_executed:
            file.submit_write_and_get_future(job)
        return job.future.result()

    def awrite(
        self,
        make_flow: Callable[[], Flow[T]],
        on_commit: Callable[[T], None] | None = None,
        on_rollback: Callable[[], None] | None = None,
        exclusive_names: Sequence[str] | None = None,
        own_writes: OwnWrites | None = None,
        may_wait: bool = False,
        urgent: bool = False,
        deletes_rows: bool = False,
    ) -> Awaitable[T]:
        """See `Database.awrite`. In SQLite, `exclusive_names` and `urgent` have no effect."""
        job = Job(
            asyncio.get_running_loop().create_future(),
            make_flow,
            on_commit,
            on_rollback,
            self._component,
            own_writes,
            may_wait,
            deletes_rows,
        )
        if self._resource is None:
            return self._call_after_connecting(lambda file: file.submit_write_and_get_future(job))
        return self._resource.submit_write_and_get_future(job)  # type: ignore[no-any-return]

    def write_later(self, make_flow: Callable[[], Flow[object]]) -> None:
        """See `Database.write_later`."""
        with suppress(StorageUnavailable):
            self._connect_once().submit_write_and_get_future(
                Job(Future(), make_flow, component=self._component)
            )

    def read(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """See `Database.read`."""
        return self._connect_once().read(make_flow(), snapshot=snapshot)

    async def aread(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """See `Database.aread`."""
        await self.aconnect()
        return await self._connect_once().aread(make_flow(), snapshot=snapshot)

    def count_writes_except_own(self, own_writes: OwnWrites) -> WriteCounts | None:
        """See `Database.count_writes_except_own`."""
        file = self._resource
        if file is None or self.read_only:
            return None
        return file.writer.count_writes_except_own(self._component, own_writes)

    async def wait_and_count_writes_except_own(self, own_writes: OwnWrites) -> WriteCounts | None:
        """See `Database.wait_and_count_writes_except_own`."""
        file = self._resource
        if file is None or self.read_only:
            return None
        return await file.writer.wait_and_count_writes_except_own(self._component, own_writes)

    # -- maintenance

    def request_scrub_of_deleted_rows(self) -> Flow[None]:
        """See `Database.request_scrub_of_deleted_rows`."""
        yield Statement(REQUEST_SCRUB_SQL)

    def scrub_deleted_rows(self) -> bool:
        """See `Database.scrub_deleted_rows`.

        VACUUM rewrites the whole SQLite file. Scrubbing deleted rows needs enough free disk space
        for a second copy of the file.
        """
        return self._connect_once().writer.scrub_deleted_rows()

    def release_unused_disk_space(self) -> None:
        """See `Database.release_unused_disk_space`."""
        self._connect_once().writer.release_unused_disk_space(
            lambda: self.write(lambda: fetch_rows("SELECT 1"))
        )

    def stats(self) -> dict[str, Any]:
        """See `Database.stats`.

        The result includes the amount of free space in the file, and whether this SQLite version
        has the WAL-reset bug.
        """
        ((page_size, pages, free_pages),) = self.read(lambda: fetch_rows(_SIZES))
        return {
            "path": self.path,
            "sqlite_version": sqlite3.sqlite_version,
            "wal_reset_bug": not REUSES_WAL,
            "synchronous": self._connector.synchronous,
            "size_bytes": page_size * pages,
            "free_bytes": page_size * free_pages,
            "wal_bytes": self._connector.measure_wal_bytes(),
        }

    def lock(self, name: str, *, timeout_s: float | None = None) -> NamedLock:
        """See `Database.lock`."""
        return NamedLock(self._get_locks, self.aconnect, name, timeout_s)

    def _get_locks(self) -> Locks:
        """Return the object that manages the database's named locks.

        Open the database if necessary.
        """
        file = self._connect_once()
        # Access the property `writer` here only to raise an error if the database was opened
        # read-only. Named locks need a lock file, which may not exist for a read-only database.
        _ = file.writer
        return file.locks


# -- reading, with one connection for each thread or coroutine that reads


class _PausableReads:
    """Counts the reads in progress, so that a fork can wait until all of them have ended."""

    def __init__(self) -> None:
        self._active_reads = 0  # Number of reads in progress
        self._is_pausing = False
        self._changed = threading.Condition()

    def block_new_reads_and_check_if_idle(self) -> bool:
        """Block new reads until `resume` is called, and wait for the current reads to end.

        Return False if reads are still in progress after `_FORK_WAIT_S` seconds.
        """
        # A new read must acquire the lock of the condition `_changed`, so holding this lock blocks
        # new reads. `wait_for` releases the lock while it waits. During this wait, the flag
        # `_is_pausing` blocks new reads.
        self._changed.acquire()
        self._is_pausing = True
        was_idle = self._changed.wait_for(lambda: self._active_reads == 0, _FORK_WAIT_S)
        self._is_pausing = False
        return was_idle

    def resume(self) -> None:
        """Allow reads again."""
        self._changed.notify_all()
        self._changed.release()


class Readers(_PausableReads):
    """Manages the connections for blocking reads, which run in the caller's OS thread."""

    def __init__(self, connector: Connector) -> None:
        super().__init__()
        self._connector = connector
        self._idle_connections: list[sqlite3.Connection] = []
        self._closed = False

    @property
    def connections(self) -> list[sqlite3.Connection]:
        """The connections that are not in use."""
        return self._idle_connections

    @contextmanager
    def borrow_connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection for one read."""
        with self._changed:
            while self._is_pausing:
                self._changed.wait()
            if self._closed:
                raise StorageUnavailable(f"the database {self._connector.path!r} is closed")
            self._active_reads += 1
            conn = self._idle_connections.pop() if self._idle_connections else None
        try:
            conn = conn or self._connector.open_reader()
            yield conn
        finally:
            is_usable = conn is not None and _try_to_roll_back_else_close(conn)
            with self._changed:
                if conn is not None and is_usable:
                    self._idle_connections.append(conn)
                self._active_reads -= 1
                if self._closed or self._is_pausing:
                    self._changed.notify_all()

    def close(self) -> None:
        """Wait for reads in progress to finish, then close the connections.

        Later reads are refused.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._active_reads == 0)
            while self._idle_connections:
                self._idle_connections.pop().close()


def _try_to_roll_back_else_close(conn: sqlite3.Connection) -> bool:
    """Roll back the transaction of a connection, or close the connection if that fails.

    Returns:
        Whether the connection can be used again.
    """
    with suppress(sqlite3.Error):
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        return True
    conn.close()
    return False


class _AsyncConnection(NamedTuple):
    """An aiosqlite connection.

    Attributes:
        conn: The connection.
        raw: The underlying sqlite3 connection.
    """

    conn: aiosqlite.Connection
    raw: sqlite3.Connection


class AsyncReaders(_PausableReads):
    """Reads the database for coroutines, using aiosqlite connections in a separate event loop.

    Each aiosqlite connection has its own OS thread, which delivers results to the event loop that
    awaits the statement. A connection's OS thread terminates with an error if it tries to deliver a
    result to a closed event loop. When a result is ready, the event loop of the coroutine that
    requested the read may already be closed, for example after a task was cancelled. Delivering a
    result to a closed event loop would raise an exception and terminate the connection's OS thread.
    All statements are therefore awaited in a separate event loop, and are never cancelled. `close`
    waits until all reads are finished. All threads are daemon threads, so that a process can exit
    without closing its database.
    """

    def __init__(self, connector: Connector) -> None:
        super().__init__()
        self._connector = connector
        self._idle_connections: list[_AsyncConnection] = []
        self._read_slots = asyncio.Semaphore(_MAX_ASYNC_READS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread

    def submit(self, flow: Flow[T], *, snapshot: bool) -> Awaitable[T]:
        """Run a flow on behalf of a coroutine, and return a future for its result."""
        promise: Promise[T] = Promise(asyncio.get_running_loop().create_future())
        if self._loop is None:
            loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run_event_loop, args=(loop,), name="perdure-aread", daemon=True
            )
            self._thread.start()
            self._loop = loop
        asyncio.run_coroutine_threadsafe(self._run_read(promise, flow, snapshot), self._loop)
        return promise.future  # type: ignore[return-value]

    async def _run_read(self, promise: Promise[T], flow: Flow[T], snapshot: bool) -> None:
        """Run a read-only flow as soon as fewer than `_MAX_ASYNC_READS` reads are in progress.

        The result or the error is delivered to the coroutine that awaits `promise.future`.
        """
        async with self._read_slots:
            if not promise.start_unless_cancelled():
                return
            try:
                async with self._register_read_during_block():
                    with convert_sqlite_errors(self._connector.path):
                        promise.result = await self._run_flow_on_idle_connection(flow, snapshot)
            except BaseException as exc:
                promise.error = exc
        resolve_futures_in_their_threads([promise])

    @asynccontextmanager
    async def _register_read_during_block(self) -> AsyncIterator[None]:
        """Increase the number of active reads by 1 until the end of the `with` block.

        If the process is about to fork, the read is registered only after the fork.

        Waiting for a fork must not block the event loop, because reads in progress need the same
        event loop in order to finish.
        """
        while not self._try_to_begin_read():  # noqa: ASYNC110 - across threads
            await asyncio.sleep(_PAUSE_S)
        try:
            yield
        finally:
            with self._changed:
                self._active_reads -= 1
                if self._is_pausing:
                    self._changed.notify_all()

    def _try_to_begin_read(self) -> bool:
        """Register a new read and return True, or return False if the process is about to fork."""
        with self._changed:
            self._active_reads += not self._is_pausing
            return not self._is_pausing

    async def _run_flow_on_idle_connection(self, flow: Flow[T], snapshot: bool) -> T:
        """Run a flow on an idle connection, or on a new connection if none is idle."""
        connection = (
            self._idle_connections.pop()
            if self._idle_connections
            else await self._open_connection()
        )
        conn = connection.conn
        try:
            if snapshot:
                await conn.execute_fetchall("BEGIN")
            return await arun_flow(flow, partial(_execute_flow_request_async, conn))
        finally:
            try:
                await conn.rollback()
                self._idle_connections.append(connection)
            except sqlite3.Error:
                await conn.close()

    async def _open_connection(self) -> _AsyncConnection:
        """Open an aiosqlite connection."""
        raw_connections: list[sqlite3.Connection] = []

        def connect() -> sqlite3.Connection:
            raw_connections.append(self._connector.open_reader())
            return raw_connections[0]

        conn = await aiosqlite.Connection(connect, _CHUNK_ROWS)
        return _AsyncConnection(conn, raw_connections[0])

    @property
    def connections(self) -> list[sqlite3.Connection]:
        """The connections that are not in use."""
        return [connection.raw for connection in self._idle_connections]

    def _run_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the event loop in its own thread until `close` stops it."""
        loop.run_forever()
        loop.run_until_complete(self._wait_for_reads_and_close_connections())
        loop.close()

    async def _wait_for_reads_and_close_connections(self) -> None:
        """Wait for all reads to finish, then close the connections."""
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        async with self._register_read_during_block():
            for connection in self._idle_connections:
                await connection.conn.close()

    def close(self) -> None:
        """Finish all submitted reads, then close the connections."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


async def _execute_flow_request_async(conn: aiosqlite.Connection, request: Request) -> Any:
    """Execute a request yielded by a flow, and return its rows; see `flow.Request`."""
    if isinstance(request, list):
        return [await _execute_flow_request_async(conn, statement) for statement in request]
    return list(await conn.execute_fetchall(request.sql, request.params))

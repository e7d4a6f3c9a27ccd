"""The protocol `Database`, through which checkpointers and stores access SQLite or Postgres.

`storage/sqlite.py` and `storage/postgres.py` implement the protocol `Database`. Callers pass a
function that builds a flow (`storage/flow.py`) and not the flow itself, because a flow may have to
run twice. A flow is a generator that yields SQL statements. If the database connection is lost, the
function that builds the flow is called again, and the new flow is run from the start. Writes that
are queued at the same time share a transaction. If a write in a shared transaction fails, the
transaction is rolled back, and each write is retried in its own transaction.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import wraps
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
)

from perdure import settings
from perdure.errors import SchemaMismatch
from perdure.storage.flow import (
    Flow,
    NamedSQL,
    OwnWrites,
    Row,
    Statement,
    WriteCounts,
    is_in_event_loop,
)

# Version of every component's table definitions. No release of perdure used version 1.
SCHEMA_VERSION: Final = 2
SELECT_COMPONENT_SQL: Final = "SELECT version, script_hash FROM schemas WHERE component = ?"
"""Selects the version and the script hash of one component; see `Schema`."""
# Maximum time in seconds that a write with `may_wait=True` waits for other writes that could share
# its transaction
GROUP_WAIT_S: Final = 0.002
P = ParamSpec("P")
T = TypeVar("T")


class Schema(NamedTuple):
    """The table definitions of a component, such as the checkpointer or the store.

    Opening a database fails if a different SQL script created this component's tables.

    Attributes:
        component: The name of the component in the table `schemas`.
        script: The SQL that creates the tables.
    """

    component: str
    script: str

    @property
    def script_hash(self) -> str:
        """The SHA-256 hash of the SQL script that creates the component's tables, in hexadecimal.

        Line breaks and indentation in the SQL script do not affect the hash.
        """
        return hashlib.sha256(" ".join(self.script.split()).encode()).hexdigest()

    def has_tables_of_this_version(self, schema_rows: Sequence[Row], database_name: str) -> bool:
        """Return whether a database contains the component's tables.

        Args:
            schema_rows: The rows `(version, script_hash)` of the component in the table `schemas`.
            database_name: The name of the database, for error messages.

        Raises:
            SchemaMismatch: The tables have another version, or were created by another script.
        """
        if not schema_rows:
            return False
        version, script_hash = schema_rows[0]
        if version < SCHEMA_VERSION or (
            version == SCHEMA_VERSION and script_hash != self.script_hash
        ):
            raise build_error_for_prerelease_database(database_name)
        if version > SCHEMA_VERSION:
            raise SchemaMismatch(
                f"the database {database_name!r} has version {version} of the "
                f"{self.component} schema, but this version of perdure supports "
                f"only {SCHEMA_VERSION}; upgrade perdure"
            )
        return True


def build_error_for_prerelease_database(database_name: str) -> SchemaMismatch:
    """Build the error that reports a database written by a pre-release version of perdure."""
    return SchemaMismatch(
        f"{database_name!r} was written by a build of perdure from before the first release; to "
        "move its threads, run with that build: perdure export --all --db FILE > threads.jsonl, "
        "and with this one: perdure import threads.jsonl (items: store.export(), "
        "store.import_lines())"
    )


def split_script(script: str) -> list[Statement]:
    """Split an SQL script into its statements. No statement may contain a semicolon."""
    return [Statement(sql) for sql in script.split(";") if sql.strip()]


class Lock(AbstractContextManager[Any], AbstractAsyncContextManager[Any], Protocol):
    """A lock that is held within a `with` or `async with` block; see `Database.lock`."""

    def raise_if_lost(self) -> None:
        """Raise `StorageUnavailable` if the connection that held the lock was lost."""


class QueueLocation(NamedTuple):
    """The location of a queue of jobs.

    Attributes:
        database: The path of an SQLite file, or a Postgres URL. Empty if there is no fixed DSN.
        schema: The Postgres schema of the queue. Empty for an SQLite file.
    """

    database: str
    schema: str


class Database(Protocol):
    """The interface that all database classes implement.

    A database is opened on its first use. To open the database before its first use, call
    `connect`.

    Each component, which is a checkpointer or a store, has its own `Database`. Databases with the
    same path share connections and OS threads. All methods can be called from any thread or event
    loop. Methods that return an awaitable do no I/O in the event loop's thread. Synchronous
    methods, which do not return an awaitable, block the calling thread unless documented otherwise.
    After `close`, or in a process that was forked after the database was opened, all methods that
    access the database raise `StorageUnavailable`.
    """

    @property
    def path(self) -> str:
        """The path of the SQLite file, `":memory:"`, or the name of the Postgres database."""

    @property
    def tenant(self) -> str | None:
        """The tenant whose rows are visible, or None if the database has no tenants."""

    @property
    def read_only(self) -> bool:
        """Whether writes are refused."""

    @property
    def job_queue_location(self) -> QueueLocation | None:
        """The default job queue location, or None for an in-memory database."""

    @property
    def location_key(self) -> Hashable:
        """A key that identifies the database, or None for an in-memory database.

        If two components have the same `location_key`, they use the same database. The property can
        only be read after the database has been opened.
        """

    def connect(self) -> None:
        """Open the database, and create the component's tables if they do not exist.

        Raises:
            ConfigurationError: The path or the DSN cannot be a database.
            StorageError: The database cannot be opened.
        """

    async def aconnect(self) -> None:
        """Open the database without blocking the event loop; see `connect`."""

    def load_sql(self, package: str) -> NamedSQL:
        """Load the named statements of a package in the SQL dialect of this database."""

    def create_tables(self, schema: Schema) -> None:
        """Create the tables of a further component in this database, if they do not exist.

        Raises:
            SchemaMismatch: The tables have another version, or were created by another script.
            StorageError: The database is read-only, or the tables cannot be created.
        """

    def has_tables(self, schema: Schema) -> Flow[bool]:
        """Return whether the database has the tables of the component that `schema` describes.

        Raises:
            SchemaMismatch: The tables have another version, or were created by another script.
        """

    def read(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """Run a read-only flow in the calling thread, and return its result.

        Args:
            make_flow: A function that builds the flow. It is called again if the connection was
                lost.
            snapshot: Whether all statements must see the same state of the database. A flow of a
                single statement does not need a snapshot.
        """

    async def aread(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """Run a read-only flow without blocking the event loop; see `read`.

        If decoding the rows needs much CPU time, use `run_in_thread` to call `read` in a worker
        thread, instead of awaiting `aread`.
        """

    def run_in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run a blocking function in a worker thread, for example to read and decode rows."""

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
        """Run a flow in a transaction, wait for the commit, and return the flow's result.

        Args:
            make_flow: A function that builds the flow. It may be called twice.
            on_commit: A function that is called with the result after the commit, in the OS thread
                that commits.
            on_rollback: A function that is called once if the flow, the commit or `on_commit`
                failed, in the OS thread that commits.
            exclusive_names: The names of the objects that the flow writes, such as thread ids.
                Other flows with one of these names wait until this flow is committed. None means
                that all writers of the component wait.
            own_writes: Counts the writes by the owner of the cache that will hold the rows that
                this transaction writes.
            may_wait: Whether the write may wait 2 ms for another write, to share its transaction.
            urgent: Whether the calling thread itself commits the write if no other write is in
                progress. This saves the time that it takes to wake the writing thread.
            deletes_rows: Whether the flow deletes rows. On a full disk, such a flow may use the
                disk space that an SQLite database reserves for deletions.

        Raises:
            StorageError: The database is read-only, or refused the write. Nothing was written.
        """

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
        """Queue a write without blocking, and return an awaitable for its result; see `write`.

        The write is queued when `awrite` is called, not when the awaitable is first awaited.
        """

    def write_later(self, make_flow: Callable[[], Flow[object]]) -> None:
        """Queue a write and return immediately. If the queued write fails, its error is ignored."""

    def count_writes_except_own(self, own_writes: OwnWrites) -> WriteCounts | None:
        """Return counters that change when a writer other than the caller changes the rows.

        A cache compares the returned counters with earlier ones to find out whether its rows may be
        outdated. The returned counters do not include the caller's own writes, which the caller
        counts in `own_writes`. The method does no I/O and can be called in an event loop. If the
        writes cannot be counted without waiting, for example because a transaction is in progress,
        the result is None.
        """

    async def wait_and_count_writes_except_own(self, own_writes: OwnWrites) -> WriteCounts | None:
        """Count the writes by other writers. First wait briefly if a write is in progress.

        See `count_writes_except_own`. If the transaction in progress does not end within the
        waiting time, return None.
        """

    def request_scrub_of_deleted_rows(self) -> Flow[None]:
        """Record in the database that the disk space of deleted rows has to be overwritten.

        The returned flow is a generator that yields SQL statements. Run the flow in the transaction
        that deletes the rows. Call `scrub_deleted_rows` after the commit. If the process is killed
        before it can call `scrub_deleted_rows`, the next process that opens the SQLite file calls
        it.
        """

    def scrub_deleted_rows(self) -> bool:
        """Overwrite the bytes of deleted rows, if this was requested.

        To request that the bytes of deleted rows are overwritten, run the flow that
        `request_scrub_of_deleted_rows` returns. While `scrub_deleted_rows` runs, all other writers
        wait.

        Returns:
            Whether no deleted byte is left. The result is False while another process still reads
            the earlier state, or while the disk has no room for a copy of the database. Call the
            method again later. In SQLite, the next process that opens the file also calls it.
            Postgres overwrites no bytes, so the result is False if a scrub was requested.
        """

    def release_unused_disk_space(self) -> None:
        """Free the disk space that deleted rows still occupy, in small steps."""

    def stats(self) -> dict[str, Any]:
        """Return database information, such as sizes in bytes and the database version, as a dict.

        The keys of the dict are names such as `"size_bytes"`. The version is the version of SQLite
        or Postgres.
        """

    def lock(self, name: str, *, timeout_s: float | None = None) -> Lock:
        """Return a lock on a name.

        While the lock is held, other threads, event loops and processes that request a lock on the
        same name wait; see `storage/locks.py`.

        Args:
            name: The name.
            timeout_s: The number of seconds to wait for the lock, or None to wait without limit.
        """

    def close(self) -> None:
        """Finish all queued writes, then close the database. A second call does nothing."""


# -- blocking and asynchronous methods


def make_async_twin(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Build an asynchronous method that calls a blocking method in a worker thread.

    The asynchronous method has the same name as the blocking method, with the prefix `a`.
    """

    @wraps(method)
    async def twin(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        # Look up the blocking method on `self` by its name, so that a subclass can override the
        # blocking method.
        blocking_method: Callable[P, T] = getattr(self, method.__name__)
        return await asyncio.to_thread(blocking_method, *args, **kwargs)

    twin.__name__, twin.__doc__ = f"a{method.__name__}", f"See `{method.__name__}`."
    return twin  # type: ignore[return-value] # `wraps` names the argument `self`


class LazyAwaitable(Generic[T]):
    """An awaitable that calls a coroutine function each time it is awaited.

    Python warns about a coroutine that is never awaited. Python does not warn about a
    `LazyAwaitable` that is never awaited. `DatabaseOwner.setup` returns a `LazyAwaitable`, because
    callers of LangGraph's synchronous classes call `setup()`, whereas callers of its asynchronous
    classes call `await setup()`.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._run = run

    def __await__(self) -> Generator[Any, Any, T]:
        return self._run().__await__()


class DatabaseOwner:
    """The base class of checkpointers and stores. Each instance owns a `Database`.

    `close`, or the end of a `with` or `async with` block, closes the database.
    """

    database: Database

    @classmethod
    def open(cls, db: str | os.PathLike[str] = settings.CHOSEN, **options: Any) -> Self:
        """Open a database immediately, or on first use if an event loop is running.

        A database that does not exist is created.

        Args:
            db: The path of a file, or a Postgres DSN, depending on the class. Without it, the
                database and the key of the settings are used; `perdure config` shows them.
            **options: The other arguments of the class.

        Raises:
            ConfigurationError: An argument is wrong, or the folder does not exist.
            NotADatabase: The path is a folder, or a file of another application.
            SchemaMismatch: The database was written by a newer perdure, or by one from before the
                first release.
            WrongKey: The key is wrong or missing, or the database was created without a key.
            StorageError: The database cannot be opened.
        """
        if db is settings.CHOSEN:
            chosen_settings = settings.load()
            db, options = chosen_settings.db, {"key": chosen_settings.key, **options}
        owner_class: Callable[..., Self] = cls
        owner = owner_class(db, **options)
        owner.setup()
        return owner

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """Open a database as `open` does.

        The name `from_conn_string` is the same as in LangGraph's savers and stores, for
        compatibility.
        """
        return cls.open(conn_string, **options)

    def setup(self) -> LazyAwaitable[None]:
        """Open the database before its first use. The returned object may be awaited.

        If an event loop is running, `setup` does not open the database, because opening it would
        block the event loop. In an event loop, the database is opened when the returned object is
        awaited.
        """
        if not is_in_event_loop():
            self.database.connect()
        return LazyAwaitable(self.database.aconnect)

    def close(self) -> None:
        """Finish all queued writes, then close the database."""
        self.database.close()

    aclose = make_async_twin(close)

    def __enter__(self) -> Self:
        self.database.connect()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self.database.aconnect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

"""`Database`: the only interface between perdure's components and a database.

Checkpointers and stores see this protocol and SQL by name; `storage/sqlite.py` implements it.
Work is handed over as functions that make a flow (`storage/flow.py`), because it may be run again:
when a connection is lost, and because writes that wait at the same moment share a transaction: if
one of them fails, it is rolled back and each is run in a transaction of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, Protocol, Self, TypeVar

from perdure import settings
from perdure.errors import SchemaMismatch
from perdure.storage.flow import Flow, Row, Statement
from perdure.storage.threads import Promise

_log = logging.getLogger("perdure")
SCHEMA_VERSION: Final = (
    2  # the schema version of every component; 1 is a build before the first release
)
GROUP_WAIT_S: Final = 0.002  # how long a patient write waits for another
P = ParamSpec("P")
T = TypeVar("T")


class Schema(NamedTuple):
    """The tables of one component, in the only version that this code can read and write.

    Attributes:
        component: The name of the component in the table `schemas`.
        script: The SQL that creates the tables.
    """

    component: str
    script: str

    @property
    def script_hash(self) -> str:
        """The SHA-256 of the script in hexadecimal. Line breaks and indentation do not count."""
        return hashlib.sha256(" ".join(self.script.split()).encode()).hexdigest()

    def has_tables(self, rows: Sequence[Row], path: str) -> bool:
        """Return whether a database has the tables of the component.

        Args:
            rows: The rows `(version, script_hash)` of the component in the table `schemas`.
            path: The name of the database, for error messages.

        Raises:
            SchemaMismatch: The tables have another version, or were created by another script.
        """
        if not rows:
            return False
        version, script_hash = rows[0]
        if version < SCHEMA_VERSION or (
            version == SCHEMA_VERSION and script_hash != self.script_hash
        ):
            raise earlier_build_error(path)
        if version > SCHEMA_VERSION:
            raise SchemaMismatch(
                f"{path!r} has version {version} of the {self.component} schema, but "
                f"this version of perdure supports only {SCHEMA_VERSION}: upgrade perdure"
            )
        return True


def earlier_build_error(path: str) -> SchemaMismatch:
    """Build the error for a database that a build from before the first release wrote."""
    return SchemaMismatch(
        f"{path!r} was written by a build of perdure from before the first release; to move its "
        "threads, run with that build: perdure export --all --db FILE > threads.jsonl, and "
        "with this one: perdure import threads.jsonl (items: store.export(), store.import_lines())"
    )


@dataclass(slots=True)
class Watch:
    """Tells one who keeps rows in memory whether anybody else has written since.

    Attributes:
        own: How many transactions it made itself; `epoch`: as of the last of them.
    """

    own_commits: int = 0
    epoch: object = None


class Job(Promise[T]):
    """A transaction to be made: see `Database.write`."""

    __slots__ = (
        "component",
        "deletes_rows",
        "make_flow",
        "may_wait",
        "on_commit",
        "on_rollback",
        "watch",
    )

    def __init__(
        self,
        make_flow: Callable[[], Flow[T]],
        on_commit: Callable[[T], None] | None = None,
        on_rollback: Callable[[], None] | None = None,
        component: str = "",
        watch: Watch | None = None,
        may_wait: bool = False,
        deletes_rows: bool = False,
        *,
        is_async: bool,
    ) -> None:
        super().__init__(is_async=is_async)
        self.make_flow, self.on_commit, self.on_rollback = make_flow, on_commit, on_rollback
        self.component, self.watch = component, watch
        self.may_wait, self.deletes_rows = may_wait, deletes_rows

    def succeed(self) -> None:
        """Its transaction is committed."""
        try:
            if self.on_commit is not None:
                self.on_commit(self.result)
        except Exception:
            _log.exception("committed() failed; the write is stored, undone() is called")
            self._undo()

    def fail(self, error: BaseException) -> None:
        """Its flow, or the commit, failed."""
        self.error = error
        self._undo()

    def _undo(self) -> None:
        try:
            if self.on_rollback is not None:
                self.on_rollback()
        except Exception:
            _log.exception("undone() failed")


def split_script(script: str) -> list[Statement]:
    """The statements of a script; none of them contains a semicolon."""
    return [Statement(sql) for sql in script.split(";") if sql.strip()]


class Lock(AbstractContextManager[Any], AbstractAsyncContextManager[Any], Protocol):
    """A lock for `with` and for `async with`; see `Database.lock`."""

    def check(self) -> None:
        """Make sure that it is held still; StorageUnavailable: it was lost with its connection."""


class QueueLocation(NamedTuple):
    """The location of a queue of jobs.

    Attributes:
        database: A path of an SQLite file, or a Postgres URL; `""` if there is no fixed DSN.
        schema: The Postgres schema of the queue; `""` for an SQLite file.
    """

    database: str
    schema: str


class Database(Protocol):
    """An open database, or one that is opened by the first call, or by `connect`.

    Each component has a `Database` of its own; those of one path share connections and threads.
    All methods may be called from any thread and event loop. Those that are awaited do no I/O in
    the event loop's thread; the others block. After `close`, or in a forked process, all of them
    raise `StorageUnavailable`.
    """

    @property
    def path(self) -> str:
        """The file, or `":memory:"`."""

    @property
    def tenant(self) -> str | None:
        """The tenant whose rows the database contains; None if it has no tenants."""

    @property
    def read_only(self) -> bool:
        """Whether writes are refused."""

    @property
    def queue_location(self) -> QueueLocation | None:
        """The default location of a queue of jobs; None if the database is in memory."""

    @property
    def location(self) -> Hashable:
        """A key that is equal for components in the same database; None if it is in memory.

        The database must be connected before this is read.
        """

    def connect(self) -> None:
        """Open the database and make the component's tables, unless they are there.

        Raises:
            ConfigurationError: The path cannot be a database.
            StorageError: The database cannot be opened.
        """

    async def aconnect(self) -> None:
        """See `connect`."""

    def read(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """Run a flow that only reads, in the calling thread.

        Args:
            make_flow: Makes the flow; is called again if the connection was lost.
            snapshot: Whether all its statements must see one state of the database; a flow of a
                single statement does not need it.
        """

    async def aread(self, make_flow: Callable[[], Flow[T]], *, snapshot: bool = True) -> T:
        """Run a flow that only reads, each statement awaited; for pages of rows.

        Nothing is held when it returns. What takes long to decode is better read by `in_thread`.
        """

    def run_in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run blocking work, such as `read` and decoding, in one of the reading threads."""

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
        """Run a flow in a transaction, and wait until it is committed.

        Args:
            make_flow: Makes the flow; may be called twice.
            on_commit: Called in the writing thread with the result, after the commit.
            on_rollback: Called there instead, once, when the flow or the commit failed.
            exclusive_names: Names of what is written, such as a thread: a flow that is about one of
                them waits until this one is committed. None: all writers of the component wait.
            watch: Of who keeps in memory what this transaction leaves behind.
            may_wait: Whether it may wait 2 ms for another write, to share its transaction.
            urgent: Whether the calling thread itself commits the write if no other write is in
                progress. This saves the time that it takes to wake the writing thread.
            deletes_rows: Whether it deletes rows. On a full disk it may use the room that SQLite's
                database reserves for that.

        Raises:
            StorageError: The database was opened read-only, or refuses. Nothing was written.
        """

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
        """See `write`. The work is handed over by the call, not by the first `await`."""

    def post(self, make_flow: Callable[[], Flow[object]]) -> None:
        """Write what nobody waits for; if it fails, nobody is told."""

    def epoch(self, watch: Watch) -> object | None:
        """Changes when another than who has the `watch` has written rows of the component.

        None: it cannot be told at once. It does no I/O, and may be called in an event loop.
        """

    async def wait_for_epoch(self, watch: Watch) -> object | None:
        """The `epoch`; if a transaction is in the way, once it is committed, if that is soon."""

    def request_scrub(self) -> Flow[None]:
        """Record, in the transaction that deletes, that its bytes are to be overwritten.

        Call `scrub` after it. If the process is killed in between, the next to connect does.
        """

    def scrub(self) -> bool:
        """Overwrite the bytes of what was deleted with `scrub_wanted`; writers wait meanwhile.

        Returns:
            Whether they are gone. They are not while another process reads the earlier state, or
            while the disk has no room for it: call it again later, or let the next `connect` do it.
        """

    def shrink(self) -> None:
        """Give the space of deleted rows back to the file system, in small steps."""

    def stats(self) -> dict[str, Any]:
        """The driver's version, and sizes in bytes."""

    def lock(self, name: str, *, timeout_s: float | None = None) -> Lock:
        """A lock on a name, across threads, event loops and processes; see `storage/locks.py`."""

    def close(self) -> None:
        """Close the database once everything handed to it is written. Twice is no error."""


# -- blocking and awaited


def is_in_event_loop() -> bool:
    """Whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def make_async_twin(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method that is awaited, and does in a thread what a blocking one does."""

    @wraps(method)
    async def twin(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        blocking: Callable[P, T] = getattr(self, method.__name__)  # a subclass may have another
        return await asyncio.to_thread(blocking, *args, **kwargs)

    twin.__name__, twin.__doc__ = f"a{method.__name__}", f"See `{method.__name__}`."
    return twin  # type: ignore[return-value] # `wraps` names the argument `self`


class LazyAwaitable(Generic[T]):
    """Runs a coroutine function each time it is awaited, and warns of nothing if it never is.

    What a method returns that one class of langgraph's blocks in and the other awaits.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._run = run

    def __await__(self) -> Generator[Any, Any, T]:
        return self._run().__await__()


class DatabaseOwner:
    """An owner of a `Database`, closed by hand or at the end of a `with` or `async with`."""

    database: Database

    @classmethod
    def open(cls, db: str | os.PathLike[str] = settings.CHOSEN, **options: Any) -> Self:
        """Open a database now, creating it if need be; in a running event loop, at the first use.

        Args:
            db: A file, or a DSN of Postgres, as the class takes it; without one, the database of
                the settings, with their key: see `perdure config`.
            **options: See the class.

        Raises:
            ConfigurationError: An argument is wrong, or the folder does not exist.
            NotADatabase: The path is a folder or another application's file.
            SchemaMismatch: A newer perdure wrote the database, or one before the first release.
            WrongKey: The key does not open it, it needs one, or it was made without.
            StorageError: The database cannot be opened.
        """
        if db is settings.CHOSEN:
            chosen = settings.load()
            db, options = chosen.db, {"key": chosen.key, **options}
        make: Callable[..., Self] = cls
        owner = make(db, **options)
        owner.setup()
        return owner

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """Open by the name that langgraph's savers and stores use; see `open`."""
        return cls.open(conn_string, **options)

    def setup(self) -> LazyAwaitable[None]:
        """Open the database, which the first use does otherwise. May be awaited or not.

        In an event loop nothing is done before it is awaited, as opening blocks.
        """
        if not is_in_event_loop():
            self.database.connect()
        return LazyAwaitable(self.database.aconnect)

    def close(self) -> None:
        """Close the database, once everything handed to it is written."""
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

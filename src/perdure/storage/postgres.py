"""`PostgresDatabase`: a `Database` in a schema of a Postgres database.

A transaction is one pipeline: what a flow asks for is sent in one go, and so is the last of it
with the COMMIT (https://www.postgresql.org/docs/current/libpq-pipeline-mode.html). No session state
is used, so that a pooler may give each transaction another connection.

Writers exclude each other by advisory locks of their transactions, as far as `Database.write` says.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from perdure.errors import (
    ConfigurationError,
    MissingDependency,
    SchemaMismatch,
    StorageError,
    StorageUnavailable,
)
from perdure.storage.database import Migration, statements
from perdure.storage.flow import Flow, Hope, Request, Row, Statement, rows_of, run
from perdure.storage.locks import Locks, NamedLock
from perdure.storage.threads import Turn, Turns

try:
    import psycopg
    from psycopg import RawCursor, errors

    from perdure.storage.postgres_connection import (
        AdvisoryLocks,
        Server,
        Translator,
        checked_dsn,
        is_lost,
        leave,
        lock_key,
        mapped,
        registry,
        registry_lock,
        shown,
        tables_of,
        translated,
    )
except ImportError as exc:
    raise MissingDependency(
        "Postgres needs psycopg and its pool: pip install 'perdure[postgres]'"
    ) from exc

T = TypeVar("T")
_log = logging.getLogger("perdure")
_MANY_NAMES: Final = 64  # more are excluded as one: the server's table of locks is small
_TRIES: Final = 10
_SETTLED_S: Final = 30.0  # how long a transaction whose connection was lost may take to end
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS migrations (
    component text NOT NULL, version bigint NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (component, version)
);
CREATE TABLE IF NOT EXISTS settings (name text PRIMARY KEY, value bytea NOT NULL)
"""
_SCRUB_WANTED: Final = (
    "INSERT INTO settings (name, value) VALUES ('scrub', ?) "
    "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)
_SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_SIZES: Final = """
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0) FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = ? AND c.relkind = 'r'
"""


@dataclass(slots=True)
class _Attempt:
    """What is known of a transaction, should its connection be lost."""

    xid: str | None = None
    hoped: bool = False  # all of it was sent in one request


class PostgresDatabase:
    """One component's `Database` in a schema of a Postgres database.

    Args:
        dsn: A connection string or URI of libpq.
        migration: The component's schema.
        begin: Makes the flow that the component runs whenever it opens the database.
        schema: The schema that holds the tables, made if it is not there.
        pooled: Whether the DSN leads to a pooler that gives each transaction another connection,
            such as PgBouncer with `pool_mode = transaction`: nothing is prepared then.
        direct: The DSN of the server itself, for locks; None: `dsn`, unless that is `pooled`.
        read_only: Nothing is made or written.
        pool_size: How many connections this process may have.
        timeout_s: How long to wait for a connection.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        dsn: str,
        migration: Migration,
        *,
        begin: Callable[[], Flow[object]] | None = None,
        schema: str = "perdure",
        pooled: bool = False,
        direct: str | None = None,
        read_only: bool = False,
        pool_size: int = 10,
        timeout_s: float = 30.0,
    ) -> None:
        self._dsn = checked_dsn(dsn)
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema):
            raise ConfigurationError(
                f"schema is {schema!r}; expected a name of small letters, digits and underscores"
            )
        self._migration, self._begin, self._schema = migration, begin, schema
        self._read_only = read_only
        self._options = {"pooled": pooled, "size": pool_size, "timeout_s": timeout_s}
        tables = tables_of("".join((_TABLES, *migration.steps)))
        self._sent = Translator(schema, tables)
        self._tables = sorted(tables)
        between = checked_dsn(direct) if direct is not None else None if pooled else self._dsn
        self._lockable = between is not None
        self._locks = Locks(AdvisoryLocks(between, schema) if between is not None else None)
        self._turns = Turns()  # what was handed in first is written first: a run that was left
        self._server: Server | None = None  # does not overtake the one that came after it
        self._closed = False

    @property
    def path(self) -> str:
        """See `Database.path`: the DSN without its password."""
        return shown(self._dsn)

    @property
    def read_only(self) -> bool:
        """See `Database.read_only`."""
        return self._read_only

    # -- connecting and closing

    def connect(self) -> None:
        """See `Database.connect`."""
        self._connected()

    async def aconnect(self) -> None:
        """See `Database.aconnect`."""
        if self._server is None:
            await asyncio.to_thread(self.connect)

    def _connected(self) -> Server:
        server = self._server
        if server is None:
            self._check_open()  # who closes it waits, with the lock, for what was handed in
            with registry_lock:
                server = self._server
                if server is None:
                    server = self._server = self._opened()
        server.check()
        return server

    def _check_open(self) -> None:
        if self._closed:
            raise StorageUnavailable(f"the database {self.path} is closed")

    def _opened(self) -> Server:
        self._check_open()
        key = self._dsn, bool(self._options["pooled"])
        server = registry.get(key)
        if server is None or server.refused:
            server = registry[key] = Server(self._dsn, **self._options)  # type: ignore[arg-type]
        else:
            server.users += 1
        try:
            with mapped(server.name):
                self._migrate(server)
            if self._begin is not None:
                if self._read_only:
                    self._read(server, self._begin(), snapshot=True)
                else:
                    self._transact(server, self._begin, None)
        except BaseException:
            leave(server)
            raise
        return server

    def _migrate(self, server: Server) -> None:
        """Bring the component's schema up to date: of many processes, one after another."""
        wanted = len(self._migration.steps)
        with server.connection() as conn:
            if self._version(conn) == wanted:
                return
            if self._read_only:
                raise SchemaMismatch(
                    f"{self.path} does not have version {wanted} of the "
                    f"{self._migration.component} schema: open it once without read_only"
                )
            with conn.transaction():
                conn.execute(
                    "SELECT pg_advisory_xact_lock(%s)", (lock_key(self._schema, "migrations"),)
                )
                conn.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
                conn.execute(f"SET LOCAL search_path TO {self._schema}")
                for statement in statements(_TABLES):
                    conn.execute(statement.sql)
                current = self._version(conn)
                with conn.pipeline():
                    for number, script in enumerate(self._migration.steps[current:], current + 1):
                        for statement in statements(script):
                            conn.execute(statement.sql)
                        conn.execute(
                            "INSERT INTO migrations (component, version) VALUES (%s, %s)",
                            (self._migration.component, number),
                        )

    def _version(self, conn: psycopg.Connection[Row]) -> int:
        of = f"{self._schema}.migrations"
        if conn.execute("SELECT to_regclass(%s)", (of,)).fetchall() == [(None,)]:
            return 0
        ((found,),) = conn.execute(
            f"SELECT coalesce(max(version), 0) FROM {of} WHERE component = %s",
            (self._migration.component,),
        ).fetchall()
        if found > len(self._migration.steps):
            raise SchemaMismatch(
                f"{self.path} has version {found} of the {self._migration.component} schema, this "
                f"perdure knows {len(self._migration.steps)}: upgrade perdure"
            )
        return int(found)

    def close(self) -> None:
        """See `Database.close`. The last of those who share a server's connections closes them."""
        with registry_lock:
            self._closed = True
            server, self._server = self._server, None
            if server is not None:
                self._locks.close()
                leave(server)

    # -- writing

    def write(
        self,
        make: Callable[[], Flow[T]],
        committed: Callable[[T], None] | None = None,
        undone: Callable[[], None] | None = None,
        exclusive: Sequence[str] | None = None,
    ) -> T:
        """See `Database.write`."""
        server, turn = self._writable(), self._turns.ask(exclusive or ())
        return self._write(server, turn, make, committed, undone, exclusive)

    def _write(
        self,
        server: Server,
        turn: Turn,
        make: Callable[[], Flow[T]],
        committed: Callable[[T], None] | None,
        undone: Callable[[], None] | None,
        exclusive: Sequence[str] | None,
    ) -> T:
        with turn:
            try:
                result = self._transact(server, make, exclusive)
            except BaseException:
                if undone is not None:
                    undone()
                raise
            try:
                if committed is not None:
                    committed(result)
            except Exception:
                _log.exception("committed() failed; the write is stored, undone() is called")
                if undone is not None:
                    undone()
            return result

    def awrite(
        self,
        make: Callable[[], Flow[T]],
        committed: Callable[[T], None] | None = None,
        undone: Callable[[], None] | None = None,
        exclusive: Sequence[str] | None = None,
    ) -> Awaitable[T]:
        """See `Database.awrite`."""
        if self._server is None:
            self._locks.check()  # here: the threads of a pool are nobody's run
            return self._later(lambda: self.write(make, committed, undone, exclusive))
        server, turn = self._writable(), self._turns.ask(exclusive or ())
        work = partial(self._write, server, turn, make, committed, undone, exclusive)
        try:
            return server.threads.submit(work, awaited=True, given_up=turn.leave)  # type: ignore[no-any-return]
        except BaseException:
            turn.leave()
            raise

    def post(self, make: Callable[[], Flow[object]]) -> None:
        """See `Database.post`: by another thread, as a flow that reads may hold a connection."""
        with suppress(StorageError):
            server, turn = self._writable(), self._turns.ask(())
            work = partial(self._write, server, turn, make, None, None, None)
            server.threads.submit(work, awaited=False)

    def _writable(self) -> Server:
        if self._read_only:
            raise StorageError(f"{self.path} was opened read-only; open it without read_only")
        self._locks.check()
        return self._connected()

    def _transact(
        self, server: Server, make: Callable[[], Flow[T]], exclusive: Sequence[str] | None
    ) -> T:
        begin = [Statement("BEGIN"), self._excluding(exclusive)]
        for again in range(_TRIES):
            attempt = _Attempt()
            outcome: list[T] = []
            try:
                with server.connection() as conn:
                    self._run(conn, make(), begin, attempt, outcome)
                return outcome[0]
            except (errors.SerializationFailure, errors.DeadlockDetected) as exc:
                error: BaseException = exc
            except (errors.DivisionByZero, errors.UniqueViolation) as exc:
                if not attempt.hoped:
                    raise translated(exc, server.name) from exc
                continue  # it was not as hoped: the flow is made anew
            except psycopg.Error as exc:
                if not is_lost(exc):
                    raise translated(exc, server.name) from exc
                if outcome and attempt.xid and self._was_committed(server, attempt.xid):
                    return outcome[0]
                error = exc
            _pause(again)
        raise translated(error, server.name) from error

    def _run(
        self,
        conn: psycopg.Connection[Row],
        flow: Flow[T],
        begin: list[Statement],
        attempt: _Attempt,
        outcome: list[T],
    ) -> None:
        """Run a flow in one transaction, and keep what it returns."""
        before = list(begin)

        def execute(request: Request) -> Any:
            asked = request if isinstance(request, list) else [request]
            if isinstance(request, Hope):
                attempt.hoped = True
                return self._asked(conn, [*before, *asked], fetched=False)
            rows = self._asked(conn, [*before, *asked])
            if before:
                attempt.xid = rows[1][0][0] if rows[1] else None
                del rows[:2], before[:]
            return rows if isinstance(request, list) else rows[0]

        try:
            with conn.pipeline():
                outcome.append(run(flow, execute))
                conn.execute("COMMIT")
        except BaseException:
            with suppress(psycopg.Error):
                conn.rollback()
            raise

    def _asked(
        self, conn: psycopg.Connection[Row], statements: list[Statement], *, fetched: bool = True
    ) -> list[list[Row]]:
        """Send statements in one go. Returns their rows; none are waited for unless `fetched`."""
        cursors: list[RawCursor[Row] | None] = []
        for statement in statements:
            sent, last = self._sent[statement.sql], None
            for params in statement.params if statement.many else (statement.params,):
                last = RawCursor(conn)
                last.execute(sent, params, binary=True)
            cursors.append(None if statement.many else last)
        if not fetched:
            return [[] for _ in statements]
        return [[] if cursor is None else _rows(cursor) for cursor in reversed(cursors)][::-1]

    def _excluding(self, names: Sequence[str] | None) -> Statement:
        """Keep others from writing what this transaction is about, and ask for its number."""
        of = self._schema, self._migration.component
        all_of_it = lock_key(*of)
        if names is None or len(names) > _MANY_NAMES:
            sql = "SELECT pg_current_xact_id()::text, pg_advisory_xact_lock(?)"
            return Statement(sql, (all_of_it,))
        keys = sorted(lock_key(*of, name) for name in names)  # in one order: no deadlock
        sql = (
            "SELECT pg_current_xact_id()::text, pg_advisory_xact_lock_shared(?), "
            "(SELECT count(pg_advisory_xact_lock(key)) FROM unnest(?::bigint[]) AS key)"
        )
        return Statement(sql, (all_of_it, keys))

    def _was_committed(self, server: Server, xid: str) -> bool:
        """Whether a transaction whose connection was lost has been committed."""
        deadline = time.monotonic() + _SETTLED_S
        while time.monotonic() < deadline:
            with suppress(StorageUnavailable):
                asked = rows_of("SELECT pg_xact_status(?::xid8)", xid)
                ((status,),) = self._read(server, asked, snapshot=False)
                if status != "in progress":
                    return bool(status == "committed")
            time.sleep(0.1)
        raise StorageUnavailable(
            f"{server.name}: the connection was lost at a commit, and for {_SETTLED_S:.0f} s the "
            "server could not be asked whether it was made: read before you write it again"
        )

    # -- reading

    def read(self, flow: Flow[T], *, snapshot: bool = True) -> T:
        """See `Database.read`."""
        return self._read(self._connected(), flow, snapshot=snapshot)

    async def aread(self, flow: Flow[T], *, snapshot: bool = True) -> T:
        """See `Database.aread`."""
        return await self.in_thread(lambda: self.read(flow, snapshot=snapshot))

    def in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        """See `Database.in_thread`."""
        if self._server is None:
            return self._later(work)
        self._server.check()
        return self._server.threads.submit(work, awaited=True)  # type: ignore[no-any-return]

    def _later(self, work: Callable[[], T]) -> Awaitable[T]:
        async def after_connecting() -> T:
            await self.aconnect()
            return await self._connected().threads.submit(work, awaited=True)  # type: ignore[no-any-return]

        self._check_open()
        return asyncio.ensure_future(after_connecting())

    def _read(self, server: Server, flow: Flow[T], *, snapshot: bool) -> T:
        with mapped(server.name), ExitStack() as stack:
            conn: psycopg.Connection[Row] | None = None

            def execute(request: Request) -> Any:
                nonlocal conn
                asked = request if isinstance(request, list) else [request]
                if conn is not None:
                    rows = self._asked(conn, asked)
                elif snapshot:
                    conn, rows = self._again(lambda: self._begun(server, asked, stack))
                else:
                    rows = self._again(lambda: self._asked_alone(server, asked))
                return rows if isinstance(request, list) else rows[0]

            try:
                return run(flow, execute)
            finally:
                if conn is not None and not conn.broken:
                    conn.execute("ROLLBACK")  # it only read

    def _begun(
        self, server: Server, asked: list[Statement], stack: ExitStack
    ) -> tuple[psycopg.Connection[Row], list[list[Row]]]:
        """Begin a transaction that sees one state of the database, with its first request."""
        with ExitStack() as begun:
            conn = begun.enter_context(server.connection())
            begun.enter_context(conn.pipeline())
            rows = self._asked(conn, [Statement(_SNAPSHOT), *asked])
            stack.push(begun.pop_all())
            return conn, rows[1:]

    def _asked_alone(self, server: Server, asked: list[Statement]) -> list[list[Row]]:
        with server.connection() as conn, conn.pipeline():
            return self._asked(conn, asked)

    def _again(self, attempt: Callable[[], T]) -> T:
        """Do what changes nothing, once more if the connection turns out to be lost."""
        for again in range(_TRIES):
            try:
                return attempt()
            except psycopg.Error as exc:
                if not is_lost(exc) or again == _TRIES - 1:
                    raise
                _pause(again)
        raise AssertionError

    # -- locking

    def lock(self, name: str, *, timeout_s: float | None = None) -> NamedLock:
        """See `Database.lock`: an advisory lock, held by one connection of this process.

        Raises:
            ConfigurationError: There is only a DSN of a pooler.
        """
        if not self._lockable:
            raise ConfigurationError(
                f"{self.path} is pooled, and a lock needs a connection that stays: give "
                "direct=, the DSN of the server itself"
            )
        return NamedLock(lambda: self._locks, self.aconnect, name, timeout_s)

    # -- upkeep

    def scrub_wanted(self) -> Flow[None]:
        """See `Database.scrub_wanted`."""
        yield Statement(_SCRUB_WANTED, (secrets.token_bytes(8),))

    def scrub(self) -> bool:
        """See `Database.scrub`: tables are vacuumed, but Postgres overwrites no bytes of a page."""
        asked = self.read(rows_of("SELECT value FROM settings WHERE name = 'scrub'"))
        if asked:
            self.shrink()
            drop = "DELETE FROM settings WHERE name = 'scrub' AND value = ?"
            self.write(lambda: rows_of(drop, *asked[0]))
        return not asked

    def shrink(self) -> None:
        """See `Database.shrink`: free space at the ends of tables is given back."""
        server = self._writable()
        with mapped(server.name), server.connection() as conn:
            for table in self._tables:
                conn.execute(f"VACUUM {self._schema}.{table}")

    def stats(self) -> dict[str, Any]:
        """See `Database.stats`; the size is that of the schema's tables with their indexes."""
        (((version,),), ((size,),)) = self.read(_both(self._schema))
        return {"path": self.path, "postgres_version": version, "size_bytes": int(size)}


def _both(schema: str) -> Flow[list[list[Row]]]:
    version = Statement("SELECT current_setting('server_version')")
    return (yield [version, Statement(_SIZES, (schema,))])  # type: ignore[no-any-return]


def _rows(cursor: RawCursor[Row]) -> list[Row]:
    try:
        return cursor.fetchall()
    except psycopg.ProgrammingError as exc:
        if exc.sqlstate is None:  # the statement returns no rows
            return []
        raise


def _pause(again: int) -> None:
    time.sleep(random.uniform(0, min(1.0, 0.01 * 2**again)))

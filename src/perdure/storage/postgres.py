"""`PostgresDatabase`: a `Database` in a schema of a Postgres database.

A transaction is one pipeline: what a flow asks for is sent in one go, and so is the last of it
with the COMMIT (https://www.postgresql.org/docs/current/libpq-pipeline-mode.html). No session state
is used, so that a pooler may give each transaction another connection.

Writers exclude each other by advisory locks of their transactions, as far as `Database.write` says.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
import random
import re
import secrets
import select
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakSet

from perdure.errors import (
    ConfigurationError,
    MissingDependency,
    SchemaMismatch,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from perdure.storage.database import Migration, statements
from perdure.storage.flow import AnyText, Flow, Hope, Request, Row, Statement, rows_of, run
from perdure.storage.locks import Between, Locks, NamedLock
from perdure.storage.threads import Threads

try:
    import psycopg
    from psycopg import RawCursor, errors
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.types.numeric import Int8BinaryDumper, NumericBinaryLoader
    from psycopg.types.string import BytesBinaryDumper
    from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout
except ImportError as exc:
    raise MissingDependency(
        "Postgres needs psycopg and its pool: pip install 'perdure[postgres]'"
    ) from exc

T = TypeVar("T")
_THREADS: Final = 8  # that do the work of coroutines
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


# -- SQL: what is written for both databases, as Postgres takes it

_DIALECT: Final = (
    ("CROSS JOIN", "JOIN"),  # with a condition; the order of joins is the planner's
    ("json_each($1)", "(SELECT e::bigint AS value FROM json_array_elements_text($1::json) AS e)"),
    ("json_each($2)", "(SELECT e::bigint AS value FROM json_array_elements_text($2::json) AS e)"),
)
_PARAMETER = re.compile(r"\?(\d*)")
_TABLE = re.compile(r"\b(FROM|JOIN|INTO|UPDATE)\s+(\w+)")


class _Translator(dict[str, bytes]):
    """Statements as they are sent, by their SQL: parameters numbered, tables with their schema."""

    def __init__(self, schema: str, tables: frozenset[str]) -> None:
        self._schema, self._tables = schema, tables

    def __missing__(self, text: str) -> bytes:
        count = 0

        def parameter(found: re.Match[str]) -> str:
            nonlocal count
            count += 1
            return f"${found[1] or count}"

        def table(found: re.Match[str]) -> str:
            name = found[2]
            return f"{found[1]} {self._schema}.{name}" if name in self._tables else found[0]

        sent = _TABLE.sub(table, _PARAMETER.sub(parameter, text))
        sent = sent.replace("{schema}", self._schema)
        for ours, theirs in _DIALECT:
            sent = sent.replace(ours, theirs)
        made = self[text] = sent.encode()
        return made


def _tables_of(script: str) -> frozenset[str]:
    return frozenset(re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", script))


class _Whole(NumericBinaryLoader):
    """Sums of whole numbers, which Postgres makes of type numeric."""

    def load(self, data: Any) -> Any:
        return int(super().load(data))


class _AnyText(BytesBinaryDumper):
    """Text in a column of text or bytes."""

    def dump(self, obj: Any) -> Any:
        return super().dump(obj.as_bytes())


def _lock_key(*of: str) -> int:
    digest = hashlib.blake2b("\0".join(of).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


# -- a server, for all who open one DSN in this process


class Server:
    """The connections to one database, and the threads that use them for coroutines."""

    def __init__(self, dsn: str, *, pooled: bool, size: int, timeout_s: float) -> None:
        self.dsn, self.pooled, self.timeout_s = dsn, pooled, timeout_s
        self.name = _shown(dsn)
        self.users = 1
        self.refused = ""  # why there is no more to do, if so
        self.threads = Threads(_THREADS, "perdure-postgres", lasting=True)
        self._pool = ConnectionPool(
            dsn,
            kwargs={"autocommit": True, "prepare_threshold": None if pooled else 2},
            configure=_configured,
            min_size=0,
            max_size=size,
            timeout=timeout_s,
            open=False,
        )
        with mapped(self.name), psycopg.connect(dsn, connect_timeout=max(2, int(timeout_s))):
            pass  # the pool would only say that it waited in vain
        self._pool.open()
        _servers.add(self)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Row]]:
        """A connection of the pool, in no transaction."""
        self.check()
        try:
            conn = self._pool.getconn()
        except PoolTimeout as exc:
            raise StorageUnavailable(
                f"{self.name}: no connection within {self.timeout_s} s ({exc}): check the server, "
                "or give a larger pool_size"
            ) from exc
        except PoolClosed as exc:
            raise StorageUnavailable(f"the database {self.name} is closed") from exc
        try:
            yield conn
        finally:
            self._pool.putconn(conn)

    def check(self) -> None:
        """Refuse work once the database is closed, and in a forked process."""
        if self.refused:
            raise StorageUnavailable(f"the database {self.name} {self.refused}")

    def end(self) -> None:
        """Finish what was handed in, and close all connections."""
        if not self.refused:
            self.refused = "is closed"
            self.threads.close()
            self._pool.close()


def _configured(conn: psycopg.Connection[Any]) -> None:
    # one type for all whole numbers: a statement is prepared once, not for each width
    conn.adapters.register_dumper(int, Int8BinaryDumper)
    conn.adapters.register_dumper(AnyText, _AnyText)
    conn.adapters.register_loader("numeric", _Whole)


_registry: dict[tuple[str, bool], Server] = {}
_servers: WeakSet[Server] = WeakSet()
_registry_lock = threading.Lock()


class AdvisoryLocks(Between):
    """Locks of a connection of its own, which holds all of a process.

    Args:
        dsn: Of the server itself: a pooler would give them to whoever is next.
        of: Goes into each key.
    """

    pause_s = 0.05

    def __init__(self, dsn: str, *of: str) -> None:
        self._dsn, self._of = dsn, of
        self.session = 0
        self._guard = threading.Lock()
        self._conn: psycopg.Connection[Row] | None = None

    def take(self, name: str) -> bool:
        """See `Between.take`.

        Raises:
            StorageUnavailable: The server cannot be reached.
        """
        with self._guard, mapped(_shown(self._dsn)):
            try:
                return self._call("pg_try_advisory_lock", name)
            except psycopg.OperationalError:  # it lay idle, and was closed
                self._lose()
                return self._call("pg_try_advisory_lock", name)

    def give_back(self, name: str) -> None:
        """See `Between.give_back`."""
        with self._guard, suppress(psycopg.Error):
            if self._conn is not None:
                self._call("pg_advisory_unlock", name)

    def _call(self, function: str, name: str) -> bool:
        if self._conn is None:
            self._conn = psycopg.connect(self._dsn, autocommit=True)
        key = _lock_key(*self._of, "lock", name)
        ((done,),) = self._conn.execute(f"SELECT {function}(%s::bigint)", (key,)).fetchall()
        return bool(done)

    def check(self) -> None:
        """See `Between.check`: a connection that was closed can be read, and has nothing."""
        with self._guard:
            conn = self._conn
            if conn is not None and (conn.closed or select.select([conn], [], [], 0)[0]):
                try:
                    conn.execute("SELECT 1")
                except psycopg.Error:
                    self._lose()

    def _lose(self) -> None:
        self.session += 1
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def close(self) -> None:
        """See `Between.close`."""
        with self._guard:
            self._lose()


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
        self._dsn = _checked_dsn(dsn)
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema):
            raise ConfigurationError(
                f"schema is {schema!r}; expected a name of small letters, digits and underscores"
            )
        self._migration, self._begin, self._schema = migration, begin, schema
        self._read_only = read_only
        self._options = {"pooled": pooled, "size": pool_size, "timeout_s": timeout_s}
        tables = _tables_of("".join((_TABLES, *migration.steps)))
        self._sent = _Translator(schema, tables)
        self._tables = sorted(tables)
        between = _checked_dsn(direct) if direct is not None else None if pooled else self._dsn
        self._lockable = between is not None
        self._locks = Locks(AdvisoryLocks(between, schema) if between is not None else None)
        self._server: Server | None = None
        self._closed = False

    @property
    def path(self) -> str:
        """See `Database.path`: the DSN without its password."""
        return _shown(self._dsn)

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
            with _registry_lock:
                server = self._server
                if server is None:
                    server = self._server = self._opened()
        server.check()
        return server

    def _opened(self) -> Server:
        if self._closed:
            raise StorageUnavailable(f"the database {self.path} is closed")
        key = self._dsn, bool(self._options["pooled"])
        server = _registry.get(key)
        if server is None or server.refused:
            server = _registry[key] = Server(self._dsn, **self._options)  # type: ignore[arg-type]
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
            _left(server)
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
                    "SELECT pg_advisory_xact_lock(%s)", (_lock_key(self._schema, "migrations"),)
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
        with _registry_lock:
            self._closed = True
            server, self._server = self._server, None
            if server is not None:
                self._locks.close()
                _left(server)

    # -- writing

    def write(
        self,
        make: Callable[[], Flow[T]],
        committed: Callable[[T], None] | None = None,
        undone: Callable[[], None] | None = None,
        exclusive: Sequence[str] | None = None,
    ) -> T:
        """See `Database.write`."""
        try:
            result = self._transact(self._writable(), make, exclusive)
            if committed is not None:
                committed(result)
        except BaseException:
            if undone is not None:
                undone()
            raise
        return result

    def awrite(
        self,
        make: Callable[[], Flow[T]],
        committed: Callable[[T], None] | None = None,
        undone: Callable[[], None] | None = None,
        exclusive: Sequence[str] | None = None,
    ) -> Awaitable[T]:
        """See `Database.awrite`."""
        if not self._read_only:
            self._locks.check()  # here: the threads of a pool are nobody's run
        return self.in_thread(lambda: self.write(make, committed, undone, exclusive))

    def post(self, make: Callable[[], Flow[object]]) -> None:
        """See `Database.post`."""
        with suppress(StorageError):
            self.write(make)

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
                if not _is_lost(exc):
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
        all_of_it = _lock_key(*of)
        if names is None or len(names) > _MANY_NAMES:
            sql = "SELECT pg_current_xact_id()::text, pg_advisory_xact_lock(?)"
            return Statement(sql, (all_of_it,))
        keys = sorted(_lock_key(*of, name) for name in names)  # in one order: no deadlock
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

        if self._closed:
            raise StorageUnavailable(f"the database {self.path} is closed")
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
                if not _is_lost(exc) or again == _TRIES - 1:
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


def _left(server: Server) -> None:
    """Count one user less; the last ends the server's connections."""
    server.users -= 1
    if not server.users:
        for key, shared in list(_registry.items()):
            if shared is server:
                del _registry[key]
        server.end()


# -- DSNs and errors


def _checked_dsn(dsn: object) -> str:
    if not isinstance(dsn, str) or not dsn:
        raise ConfigurationError(
            f"the DSN is {dsn!r:.80}; expected one like postgresql://user@host/database"
        )
    try:
        return make_conninfo(dsn, application_name="perdure", keepalives_idle=30)
    except psycopg.ProgrammingError as exc:
        raise ConfigurationError(f"the DSN is not one of Postgres ({exc})") from exc


def _shown(dsn: str) -> str:
    """A DSN without what is nobody else's business."""
    parts = conninfo_to_dict(dsn)
    user, host, port = parts.get("user"), parts.get("host", ""), parts.get("port")
    at = f"{user}@" if user else ""
    to = f":{port}" if port else ""
    return f"postgresql://{at}{host}{to}/{parts.get('dbname', '')}"


def _is_lost(exc: psycopg.Error) -> bool:
    """Whether the connection is gone: that says nothing of the work."""
    if isinstance(exc, psycopg.InterfaceError):
        return True
    if not isinstance(exc, psycopg.OperationalError):
        return False
    return exc.sqlstate is None or (exc.sqlstate[:2] in ("08", "57") and exc.sqlstate != "57014")


@contextmanager
def mapped(name: str) -> Iterator[None]:
    """Turn psycopg's errors into perdure's."""
    try:
        yield
    except psycopg.Error as exc:
        raise translated(exc, name) from exc


def translated(exc: BaseException, name: str) -> StorageError:
    """The `StorageError` that an error of psycopg becomes."""
    if isinstance(exc, errors.DiskFull):
        return StorageFull(f"{name}: {exc}; free space on the server, then write again")
    if isinstance(exc, psycopg.Error) and _is_lost(exc):
        return StorageUnavailable(f"{name}: {exc}; check that the server runs and can be reached")
    if isinstance(exc, psycopg.DataError) and "NUL" in str(exc):
        return StorageError(f"{name}: Postgres has no text with NUL, in ids and keys: {exc}")
    if isinstance(exc, errors.LockNotAvailable | errors.QueryCanceled):
        return StorageUnavailable(f"{name}: {exc}; try again")
    return StorageError(f"{name}: {exc}")


@atexit.register
def _end_all() -> None:
    for server in list(_servers):
        server.end()


def _after_fork_in_child() -> None:
    _registry_lock.release()
    for server in _servers:
        server.refused = "is closed in this forked process: open it again here"
    _servers.clear()
    _registry.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_registry_lock.acquire,
        after_in_parent=_registry_lock.release,
        after_in_child=_after_fork_in_child,
    )

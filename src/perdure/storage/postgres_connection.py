"""Connections to a Postgres server: requests, the pool of a process, locks, DSNs, errors.

A request is what libpq's pipeline mode sends at once. A cursor of psycopg costs several times what
its statement does (docs/decisions/0018), so that statements go to libpq itself (`psycopg.pq`);
psycopg adapts the values. https://www.postgresql.org/docs/current/libpq-pipeline-mode.html
"""

from __future__ import annotations

import hashlib
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import count
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import psycopg
from psycopg import errors, pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.array import ListBinaryDumper
from psycopg.types.numeric import Int8BinaryDumper, NumericBinaryLoader
from psycopg.types.string import BytesBinaryDumper
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from perdure.errors import (
    ConfigurationError,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from perdure.storage.flow import AnyText, Row, Statement
from perdure.storage.locks import Between
from perdure.storage.shared import Shared
from perdure.storage.threads import ThreadPool

C = TypeVar("C", bound=psycopg.Connection[Any])
_PREPARED: Final = 256  # statements of a connection; the server keeps a plan of each
_BINARY: Final = pq.Format.BINARY

_Kind = tuple[bytes, tuple[int, ...]]  # SQL, and the types of its parameters
_Run = tuple[_Kind, Sequence[Any], Sequence[pq.Format]]
_THREADS: Final = 8  # that do the work of coroutines
_DEFAULTS: Final[dict[str, Any]] = {  # a host that is gone is noticed within a minute
    "application_name": "perdure",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_OLDEST: Final = 13  # version of the server
_ENCODING: Final = "UTF8"
# a role may have others; PgBouncer keeps these for its client, whichever connection that gets
_SESSION: Final = """
SELECT set_config('DateStyle', 'ISO', false), set_config('TimeZone', 'UTC', false),
set_config('standard_conforming_strings', 'on', false)
"""
_STAYS: Final = """
SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'
"""
_SOON_S: Final = 1.0  # a connection takes less, unless all are used or there is something wrong
_REFUSALS: Final = (
    "authentication failed",
    "no password supplied",
    "does not exist",
    "pg_hba.conf",
    "not permitted to log in",
)
RUN: Final = "SELECT stats_reset FROM pg_stat_bgwriter"
"""What tells a server from the one that it was before a crash, and from its standby."""


# -- requests


@lru_cache(4096)
def numbered(sql: str) -> bytes:
    """SQL as Postgres takes it: `?2` is `$2`, and a bare `?` has the number of its place.

    SQLite takes `$2` only by name, so that one form for both does not exist; no literal of the
    statements has a question mark.
    """
    head, *rest = sql.split("?")
    parts = (part if part[:1].isdigit() else f"{at}{part}" for at, part in enumerate(rest, 1))
    return "$".join((head, *parts)).encode()


class _Whole(NumericBinaryLoader):
    """Sums of whole numbers, which Postgres makes of type numeric."""

    def load(self, data: Any) -> Any:
        return int(super().load(data))


class _AnyText(BytesBinaryDumper):
    """Text in a column of text or bytes."""

    def dump(self, obj: Any) -> Any:
        return super().dump(obj.as_bytes())


class Pipelined(psycopg.Connection[Row]):
    """A connection that takes many statements at a time.

    Attributes:
        run: Which run of the server it leads to.
        stays: Whether its session stays with us, so that it knows our schema, and prepares
            statements; psycopg itself prepares none, as it would also deallocate ours.
        brackets: Whether a request needs BEGIN and COMMIT to be a transaction as ours are.
    """

    run: Any = None
    stays = True
    brackets = False

    def __init__(self, pgconn: pq.abc.PGconn, *args: Any) -> None:
        super().__init__(pgconn, *args)
        # one type for all whole numbers: a statement is prepared once, not for each width
        self.adapters.register_dumper(int, Int8BinaryDumper)
        self.adapters.register_dumper(AnyText, _AnyText)
        self.adapters.register_dumper(list, ListBinaryDumper)  # as text, ints are of any width
        self.adapters.register_loader("numeric", _Whole)
        self._values = Transformer.from_context(self)
        self._names: dict[_Kind, bytes] = {}  # of prepared statements
        self._numbers = count()

    def ask(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """Run statements up to the first that fails: one transaction, unless they begin one.

        Returns the rows of each, of the last time that it is run.

        Raises:
            psycopg.Error: A statement failed, or the connection is lost.
        """
        runs = [
            (at, self._dumped(numbered(sql), row))
            for at, (sql, params, many) in enumerate(statements)
            for row in (params if many else (params,))
        ]
        try:
            self.pgconn.enter_pipeline_mode()
            due = [result for at, run in runs for result in self._send(at, *run)]
            self.pgconn.pipeline_sync()
            results = self._results()
            self.pgconn.exit_pipeline_mode()
        except BaseException:
            if not self.broken:
                self.close()  # nobody knows what it is about
            raise
        out: list[list[Row]] = [[] for _ in statements]
        failed = None
        for place, result in zip(due, results, strict=True):
            if result.status == pq.ExecStatus.TUPLES_OK:
                self._values.set_pgresult(result, format=_BINARY)
                out[place] = self._values.load_rows(0, result.ntuples, tuple)  # type: ignore[index]
            elif result.status != pq.ExecStatus.COMMAND_OK:
                failed = failed or result
                if not isinstance(place, int):
                    del self._names[place]
        if failed is not None:
            raise errors.error_from_result(failed, self.info.encoding)
        return out

    def _dumped(self, sql: bytes, row: Sequence[Any]) -> _Run:
        if not row:
            return (sql, ()), (), ()
        values = self._values
        params = values.dump_sequence(row, [PyFormat.AUTO] * len(row))
        return (sql, values.types or ()), params, values.formats or ()

    def _send(
        self, at: int, kind: _Kind, params: Sequence[Any], formats: Sequence[pq.Format]
    ) -> Iterator[int | _Kind]:
        """Send one statement. Of each result that is due, yields whose it is: a prepared one's."""
        pgconn = self.pgconn
        name = self._names.get(kind)
        if name is None and self.stays and len(self._names) < _PREPARED:
            name = self._names[kind] = b"perdure_%d" % next(self._numbers)
            pgconn.send_prepare(name, *kind)
            yield kind
        if name is None:
            pgconn.send_query_params(kind[0], params, kind[1], formats, _BINARY)
        else:
            pgconn.send_query_prepared(name, params, formats, _BINARY)
        yield at

    def _results(self) -> list[pq.abc.PGresult]:
        """The results up to the end of a request."""
        pgconn, results = self.pgconn, list[pq.abc.PGresult]()
        unsent = pgconn.flush()
        while True:
            _wait(pgconn.socket, writing=bool(unsent))
            pgconn.consume_input()
            unsent = unsent and pgconn.flush()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    if pgconn.status == pq.ConnStatus.BAD:
                        raise psycopg.OperationalError(pgconn.get_error_message())
                elif result.status == pq.ExecStatus.PIPELINE_SYNC:
                    return results
                else:
                    results.append(result)


if sys.platform == "win32":

    def _wait(socket: int, *, writing: bool) -> None:
        select.select([socket], [socket] if writing else [], [])

else:

    def _wait(socket: int, *, writing: bool) -> None:
        poll = select.poll()  # select() takes no numbers above 1,023
        poll.register(socket, select.POLLIN | select.POLLOUT if writing else select.POLLIN)
        poll.poll()


def lock_key(*of: str) -> int:
    """The key of an advisory lock."""
    digest = hashlib.blake2b("\0".join(of).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


# -- a server, for all who open one schema in this process


def set_session(conn: psycopg.Connection[Any]) -> None:
    """Give a session the settings that our code relies on; its role may have others."""
    conn.execute(_SESSION, prepare=False)


def connected(
    dsn: str, kind: type[C], configure: Callable[[C], None] = set_session, **options: Any
) -> C:
    """A connection in autocommit, configured.

    Raises:
        ConfigurationError: The server refuses the login or the database, or an option is wrong.
        StorageUnavailable: It cannot be reached.
    """
    name = shown(dsn)
    try:
        conn = kind.connect(dsn, autocommit=True, prepare_threshold=None, **options)
    except psycopg.OperationalError as exc:
        if any(reason in str(exc) for reason in _REFUSALS):
            raise ConfigurationError(f"{name}: {exc}; check user, password and database") from exc
        raise translated(exc, name) from exc
    except psycopg.ProgrammingError as exc:
        raise ConfigurationError(f"{name}: {exc}; mend that option of the DSN") from exc
    try:
        with mapped(name):
            configure(conn)
    except BaseException:
        conn.close()
        raise
    return conn


def _configure(conn: Pipelined, *, pooled: bool, schema: str) -> None:
    set_session(conn)
    conn.stays = not pooled and not is_pooled(conn)
    if conn.stays:
        conn.execute("SELECT set_config('search_path', %s, false)", (schema,), prepare=False)
    ((conn.run, isolation),) = conn.execute(
        f"SELECT ({RUN}), current_setting('default_transaction_isolation')", prepare=False
    )
    conn.brackets = isolation != "read committed"


def is_pooled(conn: psycopg.Connection[Any]) -> bool:
    """Whether a pooler is between: it tells its clients another number of their backend."""
    ((pid,),) = conn.execute("SELECT pg_backend_pid()", prepare=False)
    return bool(pid != conn.info.backend_pid)


class Server(Shared):
    """The connections for one schema."""

    def __init__(self, dsn: str, schema: str, *, pooled: bool, size: int, timeout_s: float) -> None:
        super().__init__(shown(dsn), ThreadPool(_THREADS, "perdure-postgres", lasting=True))
        self.dsn, self.timeout_s = dsn, timeout_s
        self._configure = partial(_configure, pooled=pooled, schema=schema)
        self._size, self._lent = size, set[Pipelined]()
        self._pool = ConnectionPool(
            dsn,
            connection_class=Pipelined,
            kwargs={"autocommit": True, "prepare_threshold": None},
            configure=self._configure,
            min_size=0,
            max_size=size,
            timeout=timeout_s,
            reconnect_timeout=timeout_s,
            open=False,
        )
        self._check_server(timeout_s)
        self._pool.open()

    @contextmanager
    def connection(self) -> Iterator[Pipelined]:
        """A connection of the pool, in no transaction."""
        self.check()
        try:
            conn = self._taken()
        except PoolClosed as exc:
            raise StorageUnavailable(f"the database {self.name} is closed") from exc
        self._lent.add(conn)
        try:
            yield conn
        finally:
            self._lent.discard(conn)
            broken = conn.broken
            self._pool.putconn(conn)
            if broken:
                self._pool.drain()  # those that lie idle were lost with it

    def _taken(self) -> Pipelined:
        """A connection of the pool, which would not say why it cannot connect."""
        deadline = time.monotonic() + self.timeout_s
        if len(self._lent) < self._size:
            with suppress(PoolTimeout):
                return self._pool.getconn(min(_SOON_S, self.timeout_s))
            with suppress(StorageUnavailable):  # it may be about to start
                self._check_server(_SOON_S)
        try:
            return self._pool.getconn(deadline - time.monotonic())
        except PoolTimeout as exc:
            if len(self._lent) < self._size:
                self._check_server(_SOON_S)
            raise StorageUnavailable(
                f"{self.name}: no connection within {self.timeout_s} s, as all {self._size} are in "
                "use: give a larger pool_size"
            ) from exc

    def connect(self, within_s: float) -> Pipelined:
        """A connection beside the pool; see `connected`."""
        options = {"connect_timeout": max(2, int(within_s))}
        return connected(self.dsn, Pipelined, self._configure, **options)

    def _check_server(self, within_s: float) -> None:
        """Connect once as the pool does.

        Raises:
            ConfigurationError: The server refuses the login or the database, or is too old.
            StorageUnavailable: It cannot be reached.
        """
        with self.connect(within_s) as conn:
            version = conn.info.server_version // 10_000
            encoding = conn.info.parameter_status("server_encoding")
        if version < _OLDEST:
            raise ConfigurationError(
                f"{self.name} is PostgreSQL {version}; expected {_OLDEST} or newer"
            )
        if encoding != _ENCODING:
            raise ConfigurationError(
                f"{self.name} has server_encoding={encoding}; expected {_ENCODING}"
            )

    def end(self) -> None:
        """See `Shared.end`."""
        if not self.refused:
            self.threads.close()
            self.refused = "is closed"
            self._pool.close()


class AdvisoryLocks(Between):
    """Locks of a connection of its own: each checkpointer has one for all its locks.

    Args:
        dsn: Of the server itself: a pooler would give them to whoever is next.
        of: Goes into each key.
        is_direct: Whether the user says that the DSN is direct; else a pooler is refused.
    """

    pause_s = 0.05
    is_prompt = False

    def __init__(self, dsn: str, *of: str, is_direct: bool) -> None:
        self._dsn, self._of, self._is_direct = dsn, of, is_direct
        self.session = 0
        self._guard = threading.Lock()
        self._conn: psycopg.Connection[Row] | None = None

    def take(self, name: str) -> bool:
        """See `Between.take`.

        Raises:
            ConfigurationError: The DSN leads to a pooler.
            StorageUnavailable: The server cannot be reached.
        """
        with self._guard, mapped(shown(self._dsn)):
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
            self._conn = connected(self._dsn, psycopg.Connection)
            self._conn.execute(_STAYS)
            if not self._is_direct and is_pooled(self._conn):
                self._lose()
                raise ConfigurationError(pooled_locks(shown(self._dsn)))
        key = lock_key(*self._of, "lock", name)
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


def pooled_locks(name: str) -> str:
    """What is said to who wants a lock through a pooler."""
    return (
        f"{name} is pooled, and a lock needs a connection that stays: give direct=, the DSN of the "
        "server itself"
    )


# -- DSNs and errors


def checked_dsn(dsn: object) -> str:
    """A DSN with our own defaults; ConfigurationError if it is none."""
    if not isinstance(dsn, str) or not dsn:
        raise ConfigurationError(
            f"the DSN is {dsn!r:.80}; expected one like postgresql://user@host/database"
        )
    if "=" not in dsn and "://" not in dsn:
        raise ConfigurationError(
            f"{dsn!r:.80} is no DSN; for a file use SQLiteCheckpointer or SQLiteStore"
        )
    with suppress(psycopg.ProgrammingError):
        parts = conninfo_to_dict(dsn)
        if not any("@" in str(parts.get(name, "")) for name in ("host", "dbname")):
            return make_conninfo(dsn, **{**_DEFAULTS, **parts, "client_encoding": "UTF8"})
    raise ConfigurationError(  # it is not shown, as it may hold a password
        "the DSN is not one of Postgres; expected postgresql://user:password@host/database. In a "
        "password write %40 for @, %2F for / and %25 for %"
    )


def shown(dsn: str) -> str:
    """A DSN without what is nobody else's business."""
    parts = conninfo_to_dict(dsn)
    user, host, port = parts.get("user"), parts.get("host", ""), parts.get("port")
    at = f"{user}@" if user else ""
    to = f":{port}" if port else ""
    return f"postgresql://{at}{host}{to}/{parts.get('dbname', '')}"


def uri(dsn: str) -> str:
    """A DSN as a URI, whichever form it has."""
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    user, password, name = (
        quote(parts.pop(k, ""), safe="") for k in ("user", "password", "dbname")
    )
    login = f"{user}:{password}@" if password else f"{user}@" if user else ""
    return f"postgresql://{login}/{name}?{urlencode(parts)}"


def is_lost(exc: psycopg.Error) -> bool:
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


_TOO_LONG: Final = "Postgres takes ids, keys and namespaces of up to about 2,600 bytes: {}"
_LOCKED: Final = (
    "another transaction holds a lock for longer than timeout_s ({}): see pg_locks and "
    "pg_blocking_pids() there, or try again"
)
_POOLED: Final = "{}; a pooler is between: open it with pooled=True"
_STANDBY: Final = (
    "{}; it is a standby, or has default_transaction_read_only=on: name all hosts in the DSN, with "
    "target_session_attrs=read-write"
)
_NO_RIGHT: Final = "{}; grant it to the role, or open it once as a role that may"
_CANCELED: Final = "{}; try again, or give the role a larger statement_timeout"
_ADVICE: Final[Sequence[tuple[type[psycopg.Error], type[StorageError], str]]] = (
    (errors.DiskFull, StorageFull, "{}; free space on the server, then write again"),
    (errors.ProgramLimitExceeded, StorageError, _TOO_LONG),
    (errors.LockNotAvailable, StorageUnavailable, _LOCKED),
    (errors.InvalidSqlStatementName, StorageError, _POOLED),
    (errors.DuplicatePreparedStatement, StorageError, _POOLED),
    (errors.ReadOnlySqlTransaction, StorageUnavailable, _STANDBY),
    (errors.InsufficientPrivilege, StorageError, _NO_RIGHT),
    (errors.QueryCanceled, StorageUnavailable, _CANCELED),
    (psycopg.Error, StorageError, "{}"),
)


def translated(exc: psycopg.Error, name: str) -> StorageError:
    """The `StorageError` that an error of psycopg becomes."""
    if is_lost(exc):
        reason = " ".join(str(exc).split())  # libpq's has several lines
        return StorageUnavailable(
            f"{name}: {reason}; check that the server runs and can be reached"
        )
    if isinstance(exc, psycopg.DataError) and "NUL" in str(exc):
        return StorageError(f"{name}: Postgres has no text with NUL, in ids and keys: {exc}")
    _, becomes, advice = next(row for row in _ADVICE if isinstance(exc, row[0]))
    return becomes(f"{name}: {advice.format(exc)}")

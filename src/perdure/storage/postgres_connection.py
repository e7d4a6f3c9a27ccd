"""Connections to a Postgres server: opening one, the pool of a process or of the user, locks."""

from __future__ import annotations

import hashlib
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import abc, pq
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from perdure.errors import ConfigurationError, StorageUnavailable
from perdure.storage.flow import Row, Statement
from perdure.storage.locks import Between
from perdure.storage.postgres_dsn import DsnSource, redact_dsn
from perdure.storage.postgres_errors import mapped, translated
from perdure.storage.postgres_requests import Borrowed, Pipelined, Requests, build_transformer
from perdure.storage.shared import Shared
from perdure.storage.threads import ThreadPool

C = TypeVar("C", bound=psycopg.Connection[Any])
_THREADS: Final = 8  # that do the work of coroutines
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
_WRONG_LOGIN: Final = ("authentication failed", "no password supplied")
_REFUSALS: Final = (
    *_WRONG_LOGIN,
    "does not exist",
    "pg_hba.conf",
    "not permitted to log in",
)
RUN: Final = "SELECT stats_reset FROM pg_stat_bgwriter"
"""What tells a server from the one that it was before a crash, and from its standby."""


def lock_key(*of: str) -> int:
    """Return the key of an advisory lock for a name in several parts."""
    digest = hashlib.blake2b("\0".join(of).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


# -- opening one


def set_session(conn: psycopg.Connection[Any]) -> None:
    """Give a session the settings that our code relies on; its role may have others."""
    conn.execute(_SESSION, prepare=False)


def open_connection(
    source: DsnSource,
    kind: type[C],
    configure: Callable[[C], None] = set_session,
    *,
    within_s: float,
    **options: Any,
) -> C:
    """Return a new connection in autocommit mode, configured.

    Args:
        source: Where the DSN comes from.
        kind: The class of the connection.
        configure: Called with the connection.
        within_s: How long to wait for the DSN.
        **options: Further parameters of the connection.

    Raises:
        ConfigurationError: The server refuses the login or the database, or an option is wrong.
        StorageUnavailable: There is no DSN, the server cannot be reached, or it refuses the
            password of a function, which may return the right one next time.
    """
    dsn = source.resolve_dsn(within_s)
    name = redact_dsn(dsn)
    try:
        conn = kind.connect(dsn, autocommit=True, prepare_threshold=None, **options)
    except psycopg.OperationalError as exc:
        if not source.is_fixed and any(reason in str(exc) for reason in _WRONG_LOGIN):
            raise StorageUnavailable(
                f"{name}: {exc}; the password that the DSN function returned is wrong or expired"
            ) from exc
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


def is_pooled(conn: psycopg.Connection[Any]) -> bool:
    """Return whether a pooler is between: it reports another backend process than the server."""
    ((pid,),) = conn.execute("SELECT pg_backend_pid()", prepare=False)
    return bool(pid != conn.info.backend_pid)


def _check_server(pgconn: pq.abc.PGconn, name: str) -> None:
    """Refuse a server that is too old, or whose database is not in UTF-8."""
    version = pgconn.server_version // 10_000
    encoding = (pgconn.parameter_status(b"server_encoding") or b"").decode()
    if version < _OLDEST:
        raise ConfigurationError(f"{name} is PostgreSQL {version}; expected {_OLDEST} or newer")
    if encoding != _ENCODING:
        raise ConfigurationError(f"{name} has server_encoding={encoding}; expected {_ENCODING}")


# -- pools


class Connections(Protocol):
    """The connections of a `Server`. All methods may be called from any thread."""

    @property
    def name(self) -> str:
        """The database in messages, without a password."""

    def connection(self) -> AbstractContextManager[Requests]:
        """Lend a connection that is in no transaction.

        Raises:
            StorageUnavailable: There is none within `timeout_s` seconds, or the pool is closed.
        """

    def lend_replacement(self, lost: Requests, within_s: float) -> AbstractContextManager[Requests]:
        """Lend a connection in place of one that was lost.

        A pool that has lent all of its connections takes the lost one back first.

        Raises:
            StorageUnavailable: There is none within about `within_s` seconds.
        """

    def close(self) -> None:
        """Close the connections that perdure has made."""


def _configure(conn: Pipelined, *, pooled: bool, schema: str) -> None:
    set_session(conn)
    conn.stays = not pooled and not is_pooled(conn)
    if conn.stays:
        conn.execute("SELECT set_config('search_path', %s, false)", (schema,), prepare=False)
    ((conn.run, isolation),) = conn.execute(
        f"SELECT ({RUN}), current_setting('default_transaction_isolation')", prepare=False
    )
    conn.brackets = isolation != "read committed"


class OwnPool(Connections):
    """A pool that perdure makes; see the arguments of `PostgresDatabase`.

    Raises:
        ConfigurationError: The server refuses the login or the database, or is too old.
        StorageUnavailable: It cannot be reached.
    """

    def __init__(
        self, source: DsnSource, schema: str, *, pooled: bool, size: int, timeout_s: float
    ) -> None:
        self._source, self._timeout_s = source, timeout_s
        self._configure = partial(_configure, pooled=pooled, schema=schema)
        self._size, self._lent = size, set[Pipelined]()
        self._pool = ConnectionPool(
            partial(source.resolve_dsn, timeout_s),
            connection_class=Pipelined,
            kwargs={"autocommit": True, "prepare_threshold": None},
            configure=self._configure,
            min_size=0,
            max_size=size,
            timeout=timeout_s,
            reconnect_timeout=timeout_s,
            open=False,
        )
        self._try_connecting(timeout_s)
        self._pool.open()

    @property
    def name(self) -> str:
        """See `Connections.name`."""
        return self._source.name

    @contextmanager
    def connection(self) -> Iterator[Pipelined]:
        """See `Connections.connection`."""
        try:
            conn = self._take_connection()
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

    def _take_connection(self) -> Pipelined:
        """Take a connection from the pool. If it has none in time, find out why."""
        deadline, reason = time.monotonic() + self._timeout_s, None
        if len(self._lent) < self._size:
            with suppress(PoolTimeout):
                return self._pool.getconn(min(_SOON_S, self._timeout_s))
            left_s = deadline - time.monotonic()
            try:
                if left_s > 0 or self._source.is_fixed:
                    self._try_connecting(_SOON_S if self._source.is_fixed else min(_SOON_S, left_s))
            except StorageUnavailable as exc:  # it may be about to start
                reason = exc
        try:
            return self._pool.getconn(deadline - time.monotonic())
        except PoolTimeout as exc:
            if reason is None and len(self._lent) < self._size:
                self._source.check_last_call(self._timeout_s / 2)
                self._try_connecting(_SOON_S)
            raise reason or StorageUnavailable(
                f"{self.name}: no connection within {self._timeout_s} s, as all {self._size} are "
                "in use: give a larger pool_size"
            ) from exc

    @contextmanager
    def lend_replacement(self, lost: Requests, within_s: float) -> Iterator[Pipelined]:
        """See `Connections.lend_replacement`: a connection outside the pool."""
        with self._open_connection(within_s) as conn:
            yield conn

    def _open_connection(self, within_s: float) -> Pipelined:
        options = {"connect_timeout": max(2, int(within_s))}
        return open_connection(
            self._source, Pipelined, self._configure, within_s=within_s, **options
        )

    def _try_connecting(self, within_s: float) -> None:
        """Connect once as the pool does, for the reason why it cannot."""
        with self._open_connection(within_s) as conn:
            _check_server(conn.pgconn, self.name)

    def close(self) -> None:
        """See `Connections.close`."""
        self._source.close()
        self._pool.close()


class _Session(NamedTuple):
    """What is remembered of a connection of the user's pool, from one loan to the next."""

    run: Any
    values: abc.Transformer


class UserPool(Connections):
    """A pool of `psycopg_pool` that the user owns, and that is never closed here.

    Args:
        pool: The pool.
        timeout_s: How long to wait for a connection.

    Raises:
        ConfigurationError: The server is too old.
        StorageUnavailable: The pool gives no connection.
    """

    def __init__(self, pool: ConnectionPool[Any], timeout_s: float) -> None:
        self._pool, self._timeout_s = pool, timeout_s
        self._guard = threading.Lock()  # of what follows
        self._sessions: WeakKeyDictionary[psycopg.Connection[Any], _Session] = WeakKeyDictionary()
        with mapped(self.name), self.connection():
            pass

    @property
    def name(self) -> str:
        """See `Connections.name`."""
        return name_pool(self._pool)

    @contextmanager
    def connection(self) -> Iterator[Borrowed]:
        """See `Connections.connection`."""
        lent = self._borrow_connection(self._timeout_s)
        try:
            yield lent
        finally:
            self._give_back(lent)

    @contextmanager
    def lend_replacement(self, lost: Requests, within_s: float) -> Iterator[Borrowed]:
        """See `Connections.lend_replacement`."""
        if isinstance(lost, Borrowed):
            self._give_back(lost)
        lent = self._borrow_connection(within_s)
        try:
            yield lent
        finally:
            self._give_back(lent)

    def _borrow_connection(self, within_s: float) -> Borrowed:
        conn = self._take_connection(within_s)
        with self._guard:
            session = self._sessions.get(conn)
        lent = Borrowed(conn, build_transformer() if session is None else session.values)
        try:
            lent.end_transaction()  # a `check` of the pool may have begun one
            if session is None:
                _check_server(conn.pgconn, self.name)
                *_, ((run,),) = lent.ask([*lent.settings, Statement(RUN)])
                session = _Session(run, lent.values)
                with self._guard:
                    self._sessions[conn] = session
        except BaseException:
            self._give_back(lent)
            raise
        lent.run = session.run
        return lent

    def _take_connection(self, within_s: float) -> psycopg.Connection[Any]:
        """Take a connection from the pool.

        Errors of the user's functions, which the pool calls, are named by their class only.
        """
        try:
            conn: psycopg.Connection[Any] = self._pool.getconn(within_s)
            return conn
        except PoolClosed as exc:
            problem = f"{exc}: it has to be open as long as perdure uses it"
        except TooManyRequests as exc:
            problem = f"{exc}: give it a larger max_size or max_waiting"
        except PoolTimeout:
            problem = (
                f"the {self.name} gave no connection within {within_s:g} s: either all of its "
                f"{self._pool.max_size} are in use, or it cannot connect, see the log psycopg.pool"
            )
        except psycopg.OperationalError as exc:
            raise translated(exc, self.name) from exc
        except Exception as exc:
            problem = f"the {self.name} cannot make a connection: it raised {type(exc).__name__}"
        raise StorageUnavailable(problem)

    def _give_back(self, lent: Borrowed) -> None:
        """Return a connection to the pool as it came. Twice is no error."""
        conn, lent.conn = lent.conn, None
        if conn is None:
            return
        try:
            lent.end_transaction()
        finally:
            is_lost = lent.closed
            self._pool.putconn(conn)
            if is_lost and not self._pool.closed:
                with suppress(Exception):  # those that lie idle were perhaps lost with it
                    self._pool.check()

    def close(self) -> None:
        """See `Connections.close`. The pool belongs to the user."""


def name_pool(pool: ConnectionPool[Any]) -> str:
    """Return how messages name a pool of the user."""
    return f"pool {pool.name!r}"


class Server(Shared):
    """The connections to one schema, for all who open it in this process.

    Args:
        connections: Makes or lends them.
    """

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections.name, ThreadPool(_THREADS, "perdure-postgres", lasting=True))
        self._connections = connections
        self.lend_replacement = connections.lend_replacement

    def connection(self) -> AbstractContextManager[Requests]:
        """Lend a connection as `Connections.connection` does."""
        self.check()
        return self._connections.connection()

    def end(self) -> None:
        """See `Shared.end`."""
        if not self.refused:
            self.threads.close()
            self.refused = "is closed"
            self._connections.close()


# -- locks


class AdvisoryLocks(Between):
    """Locks of a connection of its own: each checkpointer has one for all its locks.

    Args:
        source: The DSN of the server itself: a pooler would give the locks to whoever is next.
        of: Goes into each key.
        is_direct: Whether the user says that the DSN is direct; else a pooler is refused.
        timeout_s: How long to wait for a DSN.
    """

    pause_s = 0.05
    is_prompt = False

    def __init__(self, source: DsnSource, *of: str, is_direct: bool, timeout_s: float) -> None:
        self._source, self._of, self._is_direct = source, of, is_direct
        self._timeout_s = timeout_s
        self.session = 0
        self._guard = threading.Lock()
        self._conn: psycopg.Connection[Row] | None = None

    def take(self, name: str) -> bool:
        """See `Between.take`.

        Raises:
            ConfigurationError: The DSN leads to a pooler.
            StorageUnavailable: The server cannot be reached.
        """
        with self._guard, mapped(self._source.name):
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
            self._conn = open_connection(self._source, psycopg.Connection, within_s=self._timeout_s)
            self._conn.execute(_STAYS)
            if not self._is_direct and is_pooled(self._conn):
                self._lose()
                raise ConfigurationError(refuse_pooled_locks(self._source.name))
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


def refuse_pooled_locks(name: str) -> str:
    """Return the message for who wants a lock through a pooler."""
    return (
        f"{name} is pooled, and a lock needs a connection that stays: give direct=, the DSN of the "
        "server itself"
    )

"""Open Postgres connections, manage connection pools, and hold advisory locks."""

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
from perdure.storage.locks import ProcessLocks
from perdure.storage.postgres_dsn import DsnSource, redact_dsn
from perdure.storage.postgres_errors import convert_psycopg_errors, translate_error
from perdure.storage.postgres_requests import (
    BorrowedConnection,
    OwnConnection,
    PipelineConnection,
    build_transformer,
)
from perdure.storage.shared_resources import SharedResource
from perdure.storage.thread_pools import ThreadPool

C = TypeVar("C", bound=psycopg.Connection[Any])
# Maximum number of OS threads in which one `Server` runs blocking work for coroutines
_THREAD_COUNT: Final = 8
_MIN_SERVER_VERSION: Final = 13  # Oldest supported version of PostgreSQL
_ENCODING: Final = "UTF8"
# perdure sets `DateStyle`, `TimeZone` and `standard_conforming_strings` explicitly, because their
# defaults can differ between roles. PgBouncer tracks these three settings for each client, and
# restores them whenever it assigns another server connection to the client.
_SET_SESSION_SQL: Final = """
SELECT set_config('DateStyle', 'ISO', false), set_config('TimeZone', 'UTC', false),
set_config('standard_conforming_strings', 'on', false)
"""
_DISABLE_IDLE_TIMEOUT_SQL: Final = """
SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'
"""
# Number of seconds to wait for a connection before the pool is assumed to be exhausted or broken
_EXPECTED_WAIT_S: Final = 1.0
_WRONG_PASSWORD_TEXTS: Final = ("authentication failed", "no password supplied")
_REFUSAL_TEXTS: Final = (
    *_WRONG_PASSWORD_TEXTS,
    "does not exist",
    "pg_hba.conf",
    "not permitted to log in",
)
SERVER_RUN_SQL: Final = "SELECT stats_reset FROM pg_stat_bgwriter"
"""A query whose result changes after a crash of the server, and differs on its standby."""


def compute_lock_key(*parts: str) -> int:
    """Return the advisory lock key for a name that consists of several parts."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


# -- opening a connection


def set_session(conn: psycopg.Connection[Any]) -> None:
    """Set the session settings that perdure relies on, because a role can override the defaults."""
    conn.execute(_SET_SESSION_SQL, prepare=False)


def open_connection(
    source: DsnSource,
    kind: type[C],
    configure: Callable[[C], None] = set_session,
    *,
    within_s: float,
    **options: Any,
) -> C:
    """Open a connection in autocommit mode and configure it.

    Args:
        source: The source of the DSN.
        kind: The class of the connection.
        configure: A function that is called with the new connection.
        within_s: The number of seconds to wait for the DSN.
        **options: Further parameters of the connection.

    Raises:
        ConfigurationError: The server refuses the login or the database, or an option is wrong.
        StorageUnavailable: The source gives no DSN, the server cannot be reached, or the server
            refuses the password in the DSN of a function. The function may return the right
            password at its next call.
    """
    dsn = source.resolve_dsn(within_s)
    name = redact_dsn(dsn)
    try:
        conn = kind.connect(dsn, autocommit=True, prepare_threshold=None, **options)
    except psycopg.OperationalError as exc:
        if not source.is_fixed and any(reason in str(exc) for reason in _WRONG_PASSWORD_TEXTS):
            raise StorageUnavailable(
                f"cannot connect to {name}: {exc}; the DSN function returned a DSN whose password "
                "is wrong or expired"
            ) from exc
        if any(reason in str(exc) for reason in _REFUSAL_TEXTS):
            raise ConfigurationError(
                f"cannot connect to {name}: {exc}; check the user, password and database name"
            ) from exc
        raise translate_error(exc, name) from exc
    except psycopg.ProgrammingError as exc:
        raise ConfigurationError(
            f"cannot connect to {name}: {exc}; correct the invalid option in the DSN"
        ) from exc
    try:
        with convert_psycopg_errors(name):
            configure(conn)
    except BaseException:
        conn.close()
        raise
    return conn


def uses_connection_pooler(conn: psycopg.Connection[Any]) -> bool:
    """Return whether the connection goes through a pooler rather than directly to the server.

    With a pooler, the backend process ID announced at login differs from the result of
    `pg_backend_pid()`.
    """
    ((pid,),) = conn.execute("SELECT pg_backend_pid()", prepare=False)
    return bool(pid != conn.info.backend_pid)


def _check_server_version_and_encoding(pgconn: pq.abc.PGconn, name: str) -> None:
    """Raise ConfigurationError if the server is too old or its database is not in UTF-8."""
    version = pgconn.server_version // 10_000
    encoding = (pgconn.parameter_status(b"server_encoding") or b"").decode()
    if version < _MIN_SERVER_VERSION:
        raise ConfigurationError(
            f"{name} is PostgreSQL {version}; expected {_MIN_SERVER_VERSION} or newer"
        )
    if encoding != _ENCODING:
        raise ConfigurationError(f"the encoding of {name} is {encoding}; expected {_ENCODING}")


# -- pools


class Connections(Protocol):
    """The interface from which a `Server` obtains its Postgres connections.

    All methods can be called from any OS thread.
    """

    @property
    def name(self) -> str:
        """The database's name, as shown in error messages. It contains no password."""

    def connection(self) -> AbstractContextManager[PipelineConnection]:
        """Provide a connection with no open transaction for the duration of the `with` block.

        Raises:
            StorageUnavailable: No connection is free within `timeout_s` seconds, or the pool is
                closed.
        """

    def lend_replacement_connection(
        self, lost: PipelineConnection, within_s: float
    ) -> AbstractContextManager[PipelineConnection]:
        """Provide another connection in place of a lost one for the duration of the `with` block.

        If a connection from a user's pool breaks, the connection is returned to that pool before a
        replacement is requested from the pool. Returning the lost connection lets the pool replace
        it even if all other connections are in use.

        Raises:
            StorageUnavailable: No connection is free within about `within_s` seconds.
        """

    def close(self) -> None:
        """Close the connections that perdure opened itself."""


def _configure_connection(conn: OwnConnection, *, pooled: bool, schema: str) -> None:
    """Configure a new connection's session, and read the server settings that perdure needs."""
    set_session(conn)
    conn.keeps_session = not pooled and not uses_connection_pooler(conn)
    if conn.keeps_session:
        conn.execute("SELECT set_config('search_path', %s, false)", (schema,), prepare=False)
    ((conn.server_run, isolation),) = conn.execute(
        f"SELECT ({SERVER_RUN_SQL}), current_setting('default_transaction_isolation')",
        prepare=False,
    )
    conn.needs_transaction = isolation != "read committed"


class OwnPool(Connections):
    """A connection pool that perdure creates and owns. See `PostgresDatabase` for the arguments.

    Raises:
        ConfigurationError: The server refuses the login or the database, or is too old.
        StorageUnavailable: The server cannot be reached.
    """

    def __init__(
        self, source: DsnSource, schema: str, *, pooled: bool, size: int, timeout_s: float
    ) -> None:
        self._source, self._timeout_s = source, timeout_s
        self._configure = partial(_configure_connection, pooled=pooled, schema=schema)
        self._size, self._lent = size, set[OwnConnection]()
        self._pool = ConnectionPool(
            partial(source.resolve_dsn, timeout_s),
            connection_class=OwnConnection,
            kwargs={"autocommit": True, "prepare_threshold": None},
            configure=self._configure,
            min_size=0,
            max_size=size,
            timeout=timeout_s,
            reconnect_timeout=timeout_s,
            open=False,
        )
        self._check_connection_can_be_opened(timeout_s)
        self._pool.open()

    @property
    def name(self) -> str:
        """See `Connections.name`."""
        return self._source.name

    @contextmanager
    def connection(self) -> Iterator[OwnConnection]:
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
                # If one connection is broken, the pool's idle connections are probably broken too,
                # so replace all of them.
                self._pool.drain()

    def _take_connection(self) -> OwnConnection:
        """Take a connection from the pool, or raise an error that says why none is available."""
        deadline, reason = time.monotonic() + self._timeout_s, None
        # Unless all connections are in use, the pool should be able to provide one within a second.
        # If it cannot, open a connection outside the pool to find out the reason.
        if len(self._lent) < self._size:
            with suppress(PoolTimeout):
                return self._pool.getconn(min(_EXPECTED_WAIT_S, self._timeout_s))
            left_s = deadline - time.monotonic()
            try:
                if left_s > 0 or self._source.is_fixed:
                    self._check_connection_can_be_opened(
                        _EXPECTED_WAIT_S if self._source.is_fixed else min(_EXPECTED_WAIT_S, left_s)
                    )
            except StorageUnavailable as exc:
                # Keep waiting for a connection until the deadline, because the server may still be
                # starting.
                reason = exc
        try:
            return self._pool.getconn(deadline - time.monotonic())
        except PoolTimeout as exc:
            if reason is None and len(self._lent) < self._size:
                self._source.raise_if_last_dsn_call_failed_or_hangs(self._timeout_s / 2)
                self._check_connection_can_be_opened(_EXPECTED_WAIT_S)
            raise reason or StorageUnavailable(
                f"{self.name}: no connection was free within {self._timeout_s} s, because all "
                f"{self._size} are in use; pass a larger pool_size"
            ) from exc

    def lend_replacement_connection(
        self, lost: PipelineConnection, within_s: float
    ) -> AbstractContextManager[OwnConnection]:
        """See `Connections.lend_replacement_connection`.

        The replacement connection is opened outside the pool.
        """
        return self._open_connection(within_s)

    def _open_connection(self, within_s: float) -> OwnConnection:
        return open_connection(
            self._source,
            OwnConnection,
            self._configure,
            within_s=within_s,
            connect_timeout=max(2, int(within_s)),
        )

    def _check_connection_can_be_opened(self, within_s: float) -> None:
        """Check that a connection can be opened, by opening and closing one outside the pool.

        If the connection cannot be opened, the error is raised directly to the caller. The pool
        itself does not report why it cannot open a connection.
        """
        with self._open_connection(within_s) as conn:
            _check_server_version_and_encoding(conn.pgconn, self.name)

    def close(self) -> None:
        """See `Connections.close`."""
        self._source.close()
        self._pool.close()


class _Session(NamedTuple):
    """The values that perdure caches for each connection of a user's pool.

    Attributes:
        server_run: The result of the query `SERVER_RUN_SQL`, which reveals a crash of the server.
        transformer: The psycopg transformer that adapts values for this connection.
    """

    server_run: Any
    transformer: abc.Transformer


class UserPool(Connections):
    """A `psycopg_pool` pool that the user owns. perdure never closes it.

    Args:
        pool: The pool.
        timeout_s: The number of seconds to wait for a connection.

    Raises:
        ConfigurationError: The server is too old.
        StorageUnavailable: The pool gives no connection.
    """

    def __init__(self, pool: ConnectionPool[Any], timeout_s: float) -> None:
        self._pool, self._timeout_s = pool, timeout_s
        self._guard = threading.Lock()  # This lock protects `_sessions`.
        self._sessions: WeakKeyDictionary[psycopg.Connection[Any], _Session] = WeakKeyDictionary()
        with convert_psycopg_errors(self.name), self.connection():
            pass

    @property
    def name(self) -> str:
        """See `Connections.name`."""
        return describe_pool(self._pool)

    def connection(self) -> AbstractContextManager[BorrowedConnection]:
        """See `Connections.connection`."""
        return self._lend_connection(self._timeout_s)

    def lend_replacement_connection(
        self, lost: PipelineConnection, within_s: float
    ) -> AbstractContextManager[BorrowedConnection]:
        """See `Connections.lend_replacement_connection`."""
        if isinstance(lost, BorrowedConnection):
            self._return_connection(lost)
        return self._lend_connection(within_s)

    @contextmanager
    def _lend_connection(self, within_s: float) -> Iterator[BorrowedConnection]:
        """Provide a connection of the pool for the duration of the `with` block."""
        lent = self._borrow_connection(within_s)
        try:
            yield lent
        finally:
            self._return_connection(lent)

    def _borrow_connection(self, within_s: float) -> BorrowedConnection:
        """Borrow a connection from the pool, and prepare it for requests."""
        conn = self._take_connection(within_s)
        with self._guard:
            session = self._sessions.get(conn)
        lent = BorrowedConnection(
            conn, build_transformer() if session is None else session.transformer
        )
        try:
            # End a transaction that the pool's `check` callback may have left open on the
            # connection.
            lent.end_transaction()
            if session is None:
                _check_server_version_and_encoding(conn.pgconn, self.name)
                *_, ((server_run,),) = lent.send_request(
                    [*lent.settings, Statement(SERVER_RUN_SQL)]
                )
                session = _Session(server_run, lent.transformer)
                with self._guard:
                    self._sessions[conn] = session
        except BaseException:
            self._return_connection(lent)
            raise
        lent.server_run = session.server_run
        return lent

    def _take_connection(self, within_s: float) -> psycopg.Connection[Any]:
        """Take a connection from the pool.

        The pool calls functions of the user. If a user-supplied function raises an error, the
        message of `StorageUnavailable` contains only the class of this error, because the error's
        text may contain a password.
        """
        try:
            conn: psycopg.Connection[Any] = self._pool.getconn(within_s)
            return conn
        except PoolClosed as exc:
            problem = f"{exc}; keep the pool open for as long as perdure uses it"
        except TooManyRequests as exc:
            problem = f"{exc}; create the pool with a larger max_size or max_waiting"
        except PoolTimeout:
            problem = (
                f"the {self.name} provided no connection within {within_s:g} s; either all of its "
                f"{self._pool.max_size} connections are in use, or it cannot connect to the "
                "server; see the log messages of the logger psycopg.pool"
            )
        except psycopg.OperationalError as exc:
            raise translate_error(exc, self.name) from exc
        except Exception as exc:
            problem = f"the {self.name} cannot open a connection: it raised {type(exc).__name__}"
        raise StorageUnavailable(problem)

    def _return_connection(self, lent: BorrowedConnection) -> None:
        """Roll back any open transaction, and return the connection to the pool.

        The session settings of the connection stay unchanged. If the connection has already been
        returned to the pool, do nothing.
        """
        conn, lent.conn = lent.conn, None
        if conn is None:
            return
        try:
            lent.end_transaction()
        finally:
            is_lost = lent.closed
            self._pool.putconn(conn)
            if is_lost and not self._pool.closed:
                # If this connection is lost, let the pool check its idle connections, because they
                # may be broken too.
                with suppress(Exception):
                    self._pool.check()

    def close(self) -> None:
        """Do nothing, because the user owns the pool and closes its connections."""


def describe_pool(pool: ConnectionPool[Any]) -> str:
    """Return the name that error messages use for a pool that the user passed."""
    return f"pool {pool.name!r}"


class Server(SharedResource):
    """A set of connections to one schema, shared by `Database` objects in this process.

    `Database` objects share the connections of a `Server` if they have the same schema and the same
    DSN or pool.

    Args:
        connections: The source of the connections.
    """

    def __init__(self, connections: Connections) -> None:
        super().__init__(
            connections.name, ThreadPool(_THREAD_COUNT, "perdure-postgres", is_permanent=True)
        )
        self._connections = connections
        self.lend_replacement_connection = connections.lend_replacement_connection

    def connection(self) -> AbstractContextManager[PipelineConnection]:
        """Provide a connection during the `with` block; see `Connections.connection`."""
        self.check_usable()
        return self._connections.connection()

    def shut_down(self) -> None:
        """See `SharedResource.shut_down`."""
        if not self.refusal:
            self.threads.close()
            self.refusal = "is closed"
            self._connections.close()


# -- locks


class AdvisoryLocks(ProcessLocks):
    """Holds one component's advisory locks on a dedicated connection.

    Args:
        source: The source of the DSN of the server itself. A pooler would give the session, and
            with it the locks, to another client.
        *namespace: Texts that become part of the key of each lock.
        is_direct: Whether the user has stated that the DSN leads to the server itself. Otherwise
            each new connection is checked, and a pooler is refused.
        timeout_s: The number of seconds to wait for a DSN.
    """

    pause_s = 0.05
    is_prompt = False

    def __init__(
        self, source: DsnSource, *namespace: str, is_direct: bool, timeout_s: float
    ) -> None:
        self._source, self._namespace, self._is_direct = source, namespace, is_direct
        self._timeout_s = timeout_s
        self.session = 0
        self._guard = threading.Lock()
        self._conn: psycopg.Connection[Row] | None = None

    def try_take(self, name: str) -> bool:
        """See `ProcessLocks.try_take`.

        Raises:
            ConfigurationError: The DSN leads to a pooler.
            StorageUnavailable: The server cannot be reached.
        """
        with self._guard, convert_psycopg_errors(self._source.name):
            try:
                return self._call_lock_function_and_check_success("pg_try_advisory_lock", name)
            # Reconnect, because the server may have closed the connection while it was idle.
            except psycopg.OperationalError:
                self._drop_connection()
                return self._call_lock_function_and_check_success("pg_try_advisory_lock", name)

    def release(self, name: str) -> None:
        """See `ProcessLocks.release`."""
        with self._guard, suppress(psycopg.Error):
            if self._conn is not None:
                self._call_lock_function_and_check_success("pg_advisory_unlock", name)

    def _call_lock_function_and_check_success(self, sql_function: str, lock_name: str) -> bool:
        """Call a Postgres advisory lock function for a lock, and return whether it succeeded."""
        if self._conn is None:
            self._conn = open_connection(self._source, psycopg.Connection, within_s=self._timeout_s)
            self._conn.execute(_DISABLE_IDLE_TIMEOUT_SQL)
            if not self._is_direct and uses_connection_pooler(self._conn):
                self._drop_connection()
                raise ConfigurationError(build_lock_needs_direct_dsn_message(self._source.name))
        key = compute_lock_key(*self._namespace, "lock", lock_name)
        ((is_done,),) = self._conn.execute(f"SELECT {sql_function}(%s::bigint)", (key,)).fetchall()
        return bool(is_done)

    def change_session_number_if_connection_was_lost(self) -> None:
        """See `ProcessLocks.change_session_number_if_connection_was_lost`.

        A lost connection is detected by its socket: if the server has closed the connection, the
        socket becomes readable but yields no data.
        """
        with self._guard:
            conn = self._conn
            if conn is not None and (conn.closed or select.select([conn], [], [], 0)[0]):
                try:
                    conn.execute("SELECT 1")
                except psycopg.Error:
                    self._drop_connection()

    def _drop_connection(self) -> None:
        """Close the connection, and increment `session`.

        A lock belongs to one database connection. The new number in `session` tells lock holders
        that the locks of the closed connection are lost.
        """
        self.session += 1
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def close(self) -> None:
        """See `ProcessLocks.close`."""
        with self._guard:
            self._drop_connection()


def build_lock_needs_direct_dsn_message(name: str) -> str:
    """Return the error message for a lock that is requested through a connection pooler."""
    return (
        f"a lock requires a direct connection to the server, but {name} leads to a connection "
        "pooler; pass the server's own DSN as 'direct'"
    )

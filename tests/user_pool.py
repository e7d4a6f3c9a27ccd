"""A psycopg_pool that a user owns, which checks that its connections come back unchanged."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

SESSION_SETTINGS = {  # each of these differs from what perdure needs
    "DateStyle": "German, DMY",
    "TimeZone": "Asia/Tokyo",
    "client_encoding": "LATIN1",
    "standard_conforming_strings": "off",
    "search_path": "pg_catalog",
    "default_transaction_isolation": "serializable",
    "lock_timeout": "17s",
    "statement_timeout": "61s",
    "row_security": "off",
    "application_name": "the user",
    "perdure.tenant": "the user's own",
}
_STATE = (
    b"SELECT string_agg(name || '=' || setting, '; ' ORDER BY name) FROM pg_settings "
    b"WHERE source = 'session' OR name LIKE 'perdure%' UNION ALL "
    b"SELECT count(*)::text FROM pg_prepared_statements UNION ALL "
    b"SELECT current_setting('perdure.tenant') UNION ALL SELECT current_user::text UNION ALL "
    b"SELECT count(*)::text FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' "
    b"UNION ALL SELECT count(*)::text FROM pg_listening_channels()"
)


class WatchedPool(ConnectionPool[Any]):
    """A pool whose connections differ in all settings from those that perdure makes.

    `putconn` fails if the settings, prepared statements, locks, transaction or attributes of a
    connection have changed since it was lent. `changes` has all differences so far.
    """

    def __init__(self, dsn: str, **options: Any) -> None:
        self.changes: list[Any] = []
        self.lent = self.most_lent = 0
        self._states: WeakKeyDictionary[psycopg.Connection[Any], Any] = WeakKeyDictionary()
        pool_options = {"kwargs": {"row_factory": dict_row, "prepare_threshold": 0}, "min_size": 0}
        pool_options |= {"close_returns": True, "configure": self._prepare, "open": True}
        super().__init__(make_conninfo(dsn, connect_timeout=5), **{**pool_options, **options})

    def _prepare(self, conn: psycopg.Connection[Any]) -> None:
        for name, value in SESSION_SETTINGS.items():
            conn.execute("SELECT set_config(%s, %s, false)", (name, value), prepare=False)
        conn.execute("SELECT %s::int", (1,))  # psycopg prepares it
        conn.commit()
        conn.adapters.register_loader("text", psycopg.types.string.TextBinaryLoader)
        self._states[conn] = read_connection_state(conn)

    def getconn(self, timeout: float | None = None) -> Any:
        """Lend a connection, and count it."""
        conn = super().getconn(timeout)
        self.lent += 1
        self.most_lent = max(self.most_lent, self.lent)
        return conn

    def putconn(self, conn: Any) -> None:
        """Take a connection back, and check that it is unchanged."""
        self.lent -= 1
        try:
            changes = find_state_changes(self._states[conn], read_connection_state(conn))
        except psycopg.OperationalError:  # it is lost
            changes = []
        finally:
            super().putconn(conn)
        self.changes += changes
        assert changes == []


def read_connection_state(conn: psycopg.Connection[Any]) -> list[Any]:
    """Return all that a connection must have again when it comes back to its pool."""
    pgconn = conn.pgconn
    if conn.closed:
        raise psycopg.OperationalError
    status = pgconn.transaction_status, pgconn.pipeline_status
    assert status == (pq.TransactionStatus.IDLE, pq.PipelineStatus.OFF), status
    result = pgconn.exec_(_STATE)
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise psycopg.OperationalError(result.error_message)
    return [
        *(result.get_value(row, 0) for row in range(result.ntuples)),
        conn.autocommit,
        conn.row_factory,
        conn.prepare_threshold,
        conn.isolation_level,
        conn.read_only,
        [*conn._notice_handlers],
        conn.adapters,
        vars(conn).keys() - {"_created_at", "_expire_at"},  # the pool's
    ]


def find_state_changes(before: list[Any], after: list[Any]) -> list[Any]:
    """Return the pairs of parts of two states that differ."""
    return [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]


@cache
def shared_pool(dsn: str) -> WatchedPool:
    """Return a pool of one connection, which all tests of this process share."""
    pool = WatchedPool(dsn, max_size=1, name="shared")
    atexit.register(pool.close)
    return pool


@contextmanager
def watched_pool(dsn: str, **options: Any) -> Iterator[WatchedPool]:
    """Yield a pool, close it, and check that each connection came back unchanged."""
    with WatchedPool(dsn, **options) as pool:
        yield pool
        assert pool.lent == 0
    assert pool.changes == []

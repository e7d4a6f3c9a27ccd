"""Connections to a Postgres server: the dialect, the pool of a process, locks, DSNs, errors."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from weakref import WeakSet

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import Int8BinaryDumper, NumericBinaryLoader
from psycopg.types.string import BytesBinaryDumper
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from perdure.errors import (
    ConfigurationError,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from perdure.storage.flow import AnyText, Row
from perdure.storage.locks import Between
from perdure.storage.threads import Threads

_THREADS: Final = 8  # that do the work of coroutines


# -- SQL: what is written for both databases, as Postgres takes it

_DIALECT: Final = (
    ("CROSS JOIN", "JOIN"),  # with a condition; the order of joins is the planner's
    ("json_each($1)", "(SELECT e::bigint AS value FROM json_array_elements_text($1::json) AS e)"),
    ("json_each($2)", "(SELECT e::bigint AS value FROM json_array_elements_text($2::json) AS e)"),
)
_PARAMETER = re.compile(r"\?(\d*)")
_TABLE = re.compile(r"\b(FROM|JOIN|INTO|UPDATE)\s+(\w+)")


class Translator(dict[str, bytes]):
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


def tables_of(script: str) -> frozenset[str]:
    """The names of the tables that a script makes."""
    return frozenset(re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", script))


class _Whole(NumericBinaryLoader):
    """Sums of whole numbers, which Postgres makes of type numeric."""

    def load(self, data: Any) -> Any:
        return int(super().load(data))


class _AnyText(BytesBinaryDumper):
    """Text in a column of text or bytes."""

    def dump(self, obj: Any) -> Any:
        return super().dump(obj.as_bytes())


def lock_key(*of: str) -> int:
    """The key of an advisory lock."""
    digest = hashlib.blake2b("\0".join(of).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


# -- a server, for all who open one DSN in this process


class Server:
    """The connections to one database, and the threads that use them for coroutines."""

    def __init__(self, dsn: str, *, pooled: bool, size: int, timeout_s: float) -> None:
        self.dsn, self.pooled, self.timeout_s = dsn, pooled, timeout_s
        self.name = shown(dsn)
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
            self.threads.close()
            self.refused = "is closed"
            self._pool.close()


def _configured(conn: psycopg.Connection[Any]) -> None:
    # one type for all whole numbers: a statement is prepared once, not for each width
    conn.adapters.register_dumper(int, Int8BinaryDumper)
    conn.adapters.register_dumper(AnyText, _AnyText)
    conn.adapters.register_loader("numeric", _Whole)


registry: dict[tuple[str, bool], Server] = {}
_servers: WeakSet[Server] = WeakSet()
registry_lock = threading.Lock()


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
            self._conn = psycopg.connect(self._dsn, autocommit=True)
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


def leave(server: Server) -> None:
    """Count one user less; the last ends the server's connections."""
    server.users -= 1
    if not server.users:
        for key, shared in list(registry.items()):
            if shared is server:
                del registry[key]
        server.end()


@atexit.register
def _end_all() -> None:
    for server in list(_servers):
        server.end()


def _after_fork_in_child() -> None:
    registry_lock.release()
    for server in _servers:
        server.refused = "is closed in this forked process: open it again here"
    _servers.clear()
    registry.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=registry_lock.acquire,
        after_in_parent=registry_lock.release,
        after_in_child=_after_fork_in_child,
    )


# -- DSNs and errors


def checked_dsn(dsn: object) -> str:
    """A DSN with our own defaults; ConfigurationError if it is none."""
    if not isinstance(dsn, str) or not dsn:
        raise ConfigurationError(
            f"the DSN is {dsn!r:.80}; expected one like postgresql://user@host/database"
        )
    try:
        return make_conninfo(dsn, application_name="perdure", keepalives_idle=30)
    except psycopg.ProgrammingError as exc:
        raise ConfigurationError(f"the DSN is not one of Postgres ({exc})") from exc


def shown(dsn: str) -> str:
    """A DSN without what is nobody else's business."""
    parts = conninfo_to_dict(dsn)
    user, host, port = parts.get("user"), parts.get("host", ""), parts.get("port")
    at = f"{user}@" if user else ""
    to = f":{port}" if port else ""
    return f"postgresql://{at}{host}{to}/{parts.get('dbname', '')}"


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


def translated(exc: BaseException, name: str) -> StorageError:
    """The `StorageError` that an error of psycopg becomes."""
    if isinstance(exc, errors.DiskFull):
        return StorageFull(f"{name}: {exc}; free space on the server, then write again")
    if isinstance(exc, psycopg.Error) and is_lost(exc):
        return StorageUnavailable(f"{name}: {exc}; check that the server runs and can be reached")
    if isinstance(exc, psycopg.DataError) and "NUL" in str(exc):
        return StorageError(f"{name}: Postgres has no text with NUL, in ids and keys: {exc}")
    if isinstance(exc, errors.LockNotAvailable | errors.QueryCanceled):
        return StorageUnavailable(f"{name}: {exc}; try again")
    return StorageError(f"{name}: {exc}")

"""Translate psycopg errors into perdure errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import psycopg
from psycopg import errors

from perdure.errors import StorageError, StorageFull, StorageUnavailable

_TOO_LONG: Final = "Postgres accepts ids, keys and namespaces of up to about 2,600 bytes: {}"
_LOCKED: Final = (
    "another transaction has held a lock for longer than timeout_s ({}); find the transaction "
    "with pg_locks and pg_blocking_pids(), or try again"
)
_POOLED: Final = "{}; the DSN leads to a pooler; open the database with pooled=True"
_STANDBY: Final = (
    "{}; the server is a standby, or has default_transaction_read_only=on; list all hosts in the "
    "DSN, with target_session_attrs=read-write"
)
_NO_RIGHT: Final = (
    "{}; grant the privilege to the role, or open the database once as a role that has the "
    "privilege"
)
_CANCELED: Final = "{}; try again, or increase the role's statement_timeout"
# Each row maps a psycopg error class to a perdure error class and a message template. The first row
# whose psycopg class matches the error applies.
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


def is_connection_lost(exc: psycopg.Error) -> bool:
    """Return whether the error means that the connection was lost.

    After a connection is lost, it is unknown whether the server executed the last statement.
    """
    if isinstance(exc, psycopg.InterfaceError):
        return True
    if not isinstance(exc, psycopg.OperationalError):
        return False
    # SQLSTATE class 08 contains connection errors. Errors of class 57 occur when the server shuts
    # down or starts up, except 57014, which means that a statement was cancelled.
    return exc.sqlstate is None or (exc.sqlstate[:2] in ("08", "57") and exc.sqlstate != "57014")


@contextmanager
def convert_psycopg_errors(database_name: str) -> Iterator[None]:
    """Convert psycopg errors to `StorageError`, with the name of the database in the message."""
    try:
        yield
    except psycopg.Error as exc:
        raise translate_error(exc, database_name) from exc


def translate_error(exc: psycopg.Error, name: str) -> StorageError:
    """Build the `StorageError` for a psycopg error.

    Args:
        exc: The error of psycopg.
        name: The name of the database, for the message.
    """
    if is_connection_lost(exc):
        # A libpq error message can have several lines.
        reason = " ".join(str(exc).split())
        return StorageUnavailable(
            f"{name}: {reason}; check that the server runs and can be reached"
        )
    if isinstance(exc, psycopg.DataError) and "NUL" in str(exc):
        return StorageError(
            f"{name}: Postgres cannot store NUL in text, such as ids and keys: {exc}"
        )
    _, error_class, message = next(row for row in _ADVICE if isinstance(exc, row[0]))
    return error_class(f"{name}: {message.format(exc)}")

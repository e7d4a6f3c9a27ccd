"""Translate errors of SQLite and of the operating system into errors of perdure."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from perdure.errors import (
    CorruptRecord,
    NotADatabase,
    StorageError,
    StorageFull,
    StorageUnavailable,
)

_ERRORS_BY_PREFIX: dict[str, tuple[type[StorageError], str]] = {
    "SQLITE_BUSY": (StorageUnavailable, "another process is writing to the database; try again"),
    "SQLITE_LOCKED": (StorageUnavailable, "the database is locked within this process; try again"),
    "SQLITE_FULL": (
        StorageFull,
        "the disk is full, so nothing was written; free disk space and retry",
    ),
    "SQLITE_IOERR_SHMSIZE": (StorageFull, "the disk is full; free disk space and retry"),
    "SQLITE_CORRUPT": (CorruptRecord, "the file is damaged; restore it from a backup"),
    "SQLITE_NOTADB": (NotADatabase, "the file is not an SQLite database, or is truncated"),
    "SQLITE_READONLY": (
        StorageError,
        "the file or its folder is not writable; check the permissions",
    ),
    "SQLITE_CANTOPEN": (StorageError, "the file cannot be opened; check the folder and the file"),
    "SQLITE_IOERR": (StorageError, "the disk failed, or the file is truncated; check the disk"),
}


def convert_os_error_to_storage_error(exc: OSError, path: str) -> StorageError:
    """Return the error to raise if the operating system refuses access to a database file."""
    return StorageError(
        f"{path!r} cannot be used ({exc.strerror}); check the path, and the permissions of the "
        "file and its folder"
    )


@contextlib.contextmanager
def convert_sqlite_errors(database_path: str) -> Iterator[None]:
    """Convert sqlite3 errors to `StorageError`, with the path in the message."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as exc:
        error = translate_error(exc, database_path)
        if error is exc:
            raise
        raise error from exc


def translate_error(exc: BaseException, path: str) -> BaseException:
    """Convert an sqlite3 error to a `StorageError`. Other errors are returned unchanged."""
    if isinstance(exc, sqlite3.ProgrammingError) and "closed" in str(exc):
        error: StorageError = StorageUnavailable(f"the database {path!r} is closed")
    elif isinstance(exc, sqlite3.Error) and not isinstance(exc, sqlite3.ProgrammingError):
        error = _build_storage_error(exc, path)
    # sqlite3 raises UnicodeDecodeError if it cannot decode SQLite's error message, which happens if
    # a damaged database contains invalid text.
    elif isinstance(exc, UnicodeDecodeError):
        error = CorruptRecord(f"database {path!r}: {exc}; {_ERRORS_BY_PREFIX['SQLITE_CORRUPT'][1]}")
    else:
        return exc
    error.__cause__ = exc
    return error


def is_disk_full(exc: sqlite3.Error) -> bool:
    """Return whether a statement failed because the disk is full."""
    return isinstance(_build_storage_error(exc, ""), StorageFull)


def _build_storage_error(exc: sqlite3.Error, path: str) -> StorageError:
    name = getattr(exc, "sqlite_errorname", "") or ""
    for prefix, (kind, advice) in _ERRORS_BY_PREFIX.items():
        if name.startswith(prefix):
            return kind(f"database {path!r}: {exc} ({name}); {advice}")
    return StorageError(f"database {path!r}: {exc} {name}".rstrip())

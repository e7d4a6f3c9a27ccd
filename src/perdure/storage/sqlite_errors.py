"""The one edge at which sqlite3's errors, and unusable paths, become perdure's."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator

from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    NotADatabase,
    StorageError,
    StorageFull,
    StorageUnavailable,
)

_KINDS: dict[str, tuple[type[StorageError], str]] = {
    "SQLITE_BUSY": (StorageUnavailable, "another process is writing to it; try again"),
    "SQLITE_LOCKED": (StorageUnavailable, "it is locked within this process; try again"),
    "SQLITE_FULL": (StorageFull, "the disk is full; nothing was half written: free space, retry"),
    "SQLITE_CORRUPT": (CorruptRecord, "the file is damaged; restore it from a backup"),
    "SQLITE_NOTADB": (NotADatabase, "the file is not an SQLite database, or it is truncated"),
    "SQLITE_READONLY": (
        StorageError,
        "the file or its folder cannot be written: check permissions",
    ),
    "SQLITE_CANTOPEN": (
        StorageError,
        "it cannot be opened: check that folder and file may be used",
    ),
    "SQLITE_IOERR": (StorageError, "the disk failed or the file is truncated"),
}


def check_path(path: str, read_only: bool) -> None:
    """Refuse a path that cannot be a database, before SQLite touches it.

    Raises:
        ConfigurationError: It is empty, or its folder does not exist.
        NotADatabase: It is a folder.
        StorageError: Its folder cannot be written.
    """
    if path == ":memory:":
        if read_only:
            raise ConfigurationError("':memory:' cannot be opened read-only: it would be empty")
        return
    if not path:
        raise ConfigurationError("the database path is empty; give a file name, or ':memory:'")
    if os.path.isdir(path):
        raise NotADatabase(f"{path!r} is a folder; give the path of a file in it")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigurationError(f"the folder {folder!r} of {path!r} does not exist; create it")
    if read_only:
        if not os.path.exists(path):
            raise ConfigurationError(f"{path!r} does not exist; nothing is made by reading")
        return
    _check_header(path)
    try:
        open(path + ".lock", "ab").close()
    except OSError as exc:
        raise StorageError(
            f"the folder {folder!r} cannot be written ({exc.strerror}): check its permissions, or "
            "open an existing database with read_only=True"
        ) from exc


def _check_header(path: str) -> None:
    """Refuse a file that is no database before anything is put beside it.

    Source: https://sqlite.org/fileformat.html#magic_header_string
    """
    with contextlib.suppress(FileNotFoundError), mapped(path), open(path, "rb") as file:
        begins = file.read(16)
        if begins and begins != b"SQLite format 3\0":
            raise NotADatabase(f"{path!r} is not an SQLite database: it begins with {begins!r}")


@contextlib.contextmanager
def mapped(path: str) -> Iterator[None]:
    """Turn sqlite3's errors into perdure's, keeping the cause.

    Raises:
        StorageError: Or one of its kinds.
    """
    try:
        yield
    except sqlite3.ProgrammingError as exc:
        if "closed" in str(exc):
            raise StorageUnavailable(f"the database {path!r} is closed") from exc
        raise
    except sqlite3.Error as exc:
        name = getattr(exc, "sqlite_errorname", "") or ""
        for prefix, (kind, advice) in _KINDS.items():
            if name.startswith(prefix):
                raise kind(f"database {path!r}: {exc} ({name}); {advice}") from exc
        raise StorageError(f"database {path!r}: {exc} {name}".rstrip()) from exc
    except PermissionError as exc:
        raise StorageError(f"{path!r}: {exc}; check permissions of the file and folder") from exc

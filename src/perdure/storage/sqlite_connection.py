"""Connections to one SQLite file: pragmas, errors, the lock between processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, Literal

from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    NotADatabase,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from perdure.settings import is_dsn
from perdure.storage.database import SCHEMA_VERSION, Schema, earlier_build_error, split_script
from perdure.storage.flow import GuardedRequest, GuardFailed, Request, T
from perdure.storage.locks import file_lock
from perdure.storage.untrusted_sqlite import (
    Guard,
    TableSQL,
    UntrustedConnection,
    find_impostors,
    read_tables,
)

Synchronous = Literal["full", "normal"]
DURABLE: Final[Synchronous] = "full"  # the default, see docs/decisions/0004
MEMORY: Final = ":memory:"
_APPLICATION_ID: Final = 0x70657264  # "perd"; https://sqlite.org/pragma.html#pragma_application_id
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS schemas (
    component TEXT PRIMARY KEY, version INTEGER NOT NULL, script_hash TEXT NOT NULL,
    applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB NOT NULL)
STRICT, WITHOUT ROWID;
"""
# builds before the first release recorded no hashes, and the first of them had another table
_HAS_HASHES: Final = "SELECT 1 FROM pragma_table_info('schemas') WHERE name = 'script_hash'"
WAL_LIMIT_BYTES: Final = 1 << 20  # checkpoint when the WAL has grown by this much
_PAGE_BYTES: Final = 4096
RESERVE_BYTES: Final = 4 * WAL_LIMIT_BYTES  # see `Reserve`
_SHORT_BYTES: Final = 32 * RESERVE_BYTES  # the disk is nearly full with less
REUSES_WAL = sqlite3.sqlite_version_info >= (3, 51, 3)
"""Whether SQLite may overwrite the WAL in place, which costs a third of what emptying it does.

Before, that can damage the file: https://sqlite.org/wal.html#walresetbug
"""
_INCREMENTAL = 2  # https://sqlite.org/pragma.html#pragma_auto_vacuum
_KINDS: dict[str, tuple[type[StorageError], str]] = {
    "SQLITE_BUSY": (StorageUnavailable, "another process is writing to it; try again"),
    "SQLITE_LOCKED": (StorageUnavailable, "it is locked within this process; try again"),
    "SQLITE_FULL": (StorageFull, "the disk is full; nothing was half written: free space, retry"),
    "SQLITE_IOERR_SHMSIZE": (StorageFull, "the disk is full: free space, retry"),
    "SQLITE_CORRUPT": (CorruptRecord, "the file is damaged; restore it from a backup"),
    "SQLITE_NOTADB": (NotADatabase, "the file is not an SQLite database, or it is truncated"),
    "SQLITE_READONLY": (StorageError, "file or folder cannot be written: check permissions"),
    "SQLITE_CANTOPEN": (StorageError, "it cannot be opened: check folder and file"),
    "SQLITE_IOERR": (StorageError, "the disk failed or the file is truncated"),
}


class Reserve:
    """Room for removals: a file beside the database while its disk is nearly full.

    A removal writes before the file can shrink: changed pages to the WAL, then those that the WAL
    holds into the file. On a disk without any room nothing could ever be deleted.
    """

    def __init__(self, database: str) -> None:
        self._path = "" if database == MEMORY else database + "-reserve"

    def look(self) -> None:
        """Make it, or as much of it as there is room for; remove it if there is ample space.

        Never fails: the next look tries again.
        """
        if not self._path:
            return
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(os.path.dirname(self._path)).free
            if free < _SHORT_BYTES:
                self._fill()
            elif free > 2 * _SHORT_BYTES:
                self._give_up()

    def _fill(self) -> None:
        with open(self._path, "ab", buffering=0) as file:
            while (lacking := RESERVE_BYTES - os.path.getsize(self._path)) > 0:
                file.write(os.urandom(lacking))  # a file system may compress zeros to nothing
                os.fsync(file.fileno())

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):  # it is not there
            os.unlink(self._path)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have its room for what leaves more room than there was."""
        self._give_up()
        try:
            yield
        finally:
            self.look()

    def lent(self, work: Callable[[], T]) -> T:
        """What work returns, which on a full disk is done again with this room."""
        try:
            return work()
        except sqlite3.OperationalError as exc:
            if not is_full(exc):
                raise
        with self.used():
            return work()


@dataclass(frozen=True)
class Connector:
    """Opens connections; see the arguments of `SQLiteDatabase`."""

    path: str
    synchronous: Synchronous
    read_only: bool
    timeout_s: float
    factory: type[sqlite3.Connection]
    guard: Guard | None = None  # None unless the file is untrusted

    def with_guard(
        self,
        tables: Mapping[str, TableSQL | None],
        max_value_bytes: int,
        check_version: Callable[[sqlite3.Connection], object] | None = None,
    ) -> Connector:
        """Return a connector for an untrusted file; see `Guard`."""
        return replace(self, guard=Guard(self.path, tables, max_value_bytes, check_version))

    @property
    def on_disk(self) -> bool:
        """Whether other processes can open it."""
        return self.path != MEMORY

    def wal_bytes(self) -> int:
        """The size of its write-ahead log, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.getsize(self.path + "-wal") if self.on_disk else 0
        return 0

    def identity(self) -> tuple[int, int] | None:
        """Which file is at the path: device and inode; None: none, or the database is in memory."""
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self.path) if self.on_disk else None
            return found and (found.st_dev, found.st_ino)
        return None

    @property
    def reserve(self) -> Reserve:
        """Room for removals on a full disk."""
        return Reserve(self.path)

    def _connect(self, uri_mode: str | None = None) -> sqlite3.Connection:
        target = f"{Path(self.path).absolute().as_uri()}?{uri_mode}" if uri_mode else self.path
        if self.guard is not None:
            self.guard.check_file()
        conn = sqlite3.connect(
            target,
            timeout=self.timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=self.factory if self.guard is None else UntrustedConnection,
            cached_statements=256,
            uri=bool(uri_mode),
        )
        try:
            if self.guard is not None and isinstance(conn, UntrustedConnection):
                self.guard.prepare(conn)
            conn.execute("PRAGMA mmap_size = 0")
            # a damaged page is more often noticed: https://sqlite.org/pragma.html#pragma_cell_size_check
            conn.execute("PRAGMA cell_size_check = ON")
            if self.on_disk:
                conn.execute("PRAGMA wal_autocheckpoint = 0")
        except BaseException:
            conn.close()
            raise
        return conn

    def first_writer(self, schema: Schema) -> sqlite3.Connection:
        """The connection that writes, the tables of a component in place.

        On a full disk too: without it no rows could be deleted.
        """
        conn = self.reserve.lent(partial(self._first_writer, schema))
        self.reserve.look()
        return conn

    def _first_writer(self, schema: Schema) -> sqlite3.Connection:
        with self.between_processes():
            conn = self._connect()
            try:
                is_new = not self._is_perdures(conn)
                is_there = not is_new and self._has(conn, schema)
                if is_new:  # must come before the first page is written
                    conn.execute("PRAGMA auto_vacuum = INCREMENTAL")
                    if conn.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):
                        conn.execute("VACUUM")  # an empty file that another tool began
                if self.on_disk:
                    conn.execute("PRAGMA journal_mode = WAL")
                self._configured(conn)
                if not is_there:
                    self._make(conn, schema)
            except BaseException:
                conn.close()
                raise
        return conn

    def another_writer(self) -> sqlite3.Connection:
        """One in the place of a connection that had to be given up."""
        return self._configured(self._connect())

    def _configured(self, conn: sqlite3.Connection) -> sqlite3.Connection:
        conn.execute(f"PRAGMA synchronous = {self.synchronous}")
        conn.execute("PRAGMA secure_delete = ON")
        if self.on_disk and REUSES_WAL:
            conn.execute(f"PRAGMA wal_autocheckpoint = {WAL_LIMIT_BYTES // _PAGE_BYTES}")
            conn.execute(f"PRAGMA journal_size_limit = {2 * WAL_LIMIT_BYTES}")
        return conn

    def add(self, conn: sqlite3.Connection, schema: Schema) -> None:
        """Make the tables of one more component, unless they are there."""
        with self.between_processes():
            if not self._has(conn, schema):
                self.reserve.lent(partial(self._make, conn, schema))

    def _make(self, conn: sqlite3.Connection, schema: Schema) -> None:
        conn.execute("BEGIN IMMEDIATE")
        try:
            conn.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            execute(conn, split_script(_TABLES + schema.script))
            sql = "INSERT INTO schemas (component, version, script_hash) VALUES (?, ?, ?)"
            conn.execute(sql, (schema.component, SCHEMA_VERSION, schema.script_hash))
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:  # on a full disk SQLite has rolled back
                conn.execute("ROLLBACK")
            raise

    def check_readable(self, schema: Schema) -> None:
        """Raise StorageError if there is nothing of the component yet, or in another form."""
        with contextlib.closing(self.reader()) as conn, self.reading(conn):
            if self.has_component(conn, schema):
                return
        raise StorageError(
            f"{self.path!r} has no tables of {schema.component}; open it once without read_only"
        )

    def has_component(self, conn: sqlite3.Connection, schema: Schema) -> bool:
        """Return whether a database has the tables of a component, or raise like `_is_perdures`."""
        return self._is_perdures(conn) and self._has(conn, schema)

    def _has(self, conn: sqlite3.Connection, schema: Schema) -> bool:
        for name in find_impostors(conn, own_tables(schema.script)):
            raise NotADatabase(
                f"{self.path!r} has a view or a virtual table in the place of the table {name!r}; "
                "expected a file as perdure made it"
            )
        sql = "SELECT version, script_hash FROM schemas WHERE component = ?"
        return schema.has_tables(conn.execute(sql, (schema.component,)).fetchall(), self.path)

    def _is_perdures(self, conn: sqlite3.Connection) -> bool:
        """False when it is empty and may become perdure's; an error when it is another's."""
        (found,) = conn.execute("PRAGMA application_id").fetchone()
        if found == _APPLICATION_ID:
            if not conn.execute(_HAS_HASHES).fetchall():
                raise earlier_build_error(self.path)
            return True
        tables = {name for (name,) in conn.execute("SELECT name FROM sqlite_master")}
        if not tables and found == 0:
            return False
        hint = (
            "langgraph-checkpoint-sqlite wrote it: open a new file and call import_from() on it"
            if {"checkpoints", "writes"} <= tables
            else "give a new path, or one that perdure wrote"
        )
        raise NotADatabase(f"{self.path!r} is an SQLite database of another application; {hint}")

    @contextlib.contextmanager
    def between_processes(self, wait_s: float | None = None) -> Iterator[None]:
        """Alone among the processes that have the file open: to open it, to empty its WAL.

        Raises:
            StorageUnavailable: Another was not done within `wait_s`, or else `timeout_s`, seconds.
        """
        if not self.on_disk:
            yield
            return
        path, wait_s = self.path + ".lock", self.timeout_s if wait_s is None else wait_s
        try:
            with file_lock(path, wait_s):
                yield
        except TimeoutError as exc:
            raise StorageUnavailable(
                f"another process has held {path!r} for {wait_s} s: try again"
            ) from exc
        except OSError as exc:
            raise _unusable(exc, path) from exc

    @contextlib.contextmanager
    def reading(self, conn: sqlite3.Connection) -> Iterator[None]:
        """Read an untrusted file within its limits. For other files, check nothing."""
        if not isinstance(conn, UntrustedConnection) or self.guard is None:
            yield
            return
        with self.guard.reading(conn):
            yield

    def reader(self) -> sqlite3.Connection:
        """A connection that only reads."""
        try:
            return self._try_reader("mode=ro")
        except sqlite3.OperationalError:
            if not self.read_only or os.path.exists(self.path + "-wal"):
                raise
            return self._try_reader("immutable=1")  # a folder without write permission and no WAL

    def _try_reader(self, uri_mode: str) -> sqlite3.Connection:
        conn = self._connect(uri_mode)
        try:
            with self.reading(conn):
                conn.execute("SELECT 1 FROM sqlite_master").fetchone()
        except BaseException:
            conn.close()
            raise
        return conn


@lru_cache(maxsize=16)
def own_tables(script: str) -> dict[str, TableSQL]:
    """Return the SQL of the tables of a component and of those that every database has."""
    return read_tables(_TABLES + script)


def execute(conn: sqlite3.Connection, request: Request) -> Any:
    """Run what a flow yielded on a connection; see `flow.Request`."""
    if isinstance(request, GuardedRequest):
        return _guarded(conn, request)
    if isinstance(request, list):
        return list(map(partial(execute, conn), request))
    sql, params, many = request
    if many:
        conn.executemany(sql, params)
        return []
    return conn.execute(sql, params).fetchall()


def _guarded(conn: sqlite3.Connection, statements: GuardedRequest) -> list[Any]:
    first, *others = statements
    try:
        cursor = conn.execute(first.sql, first.params)
        rows = cursor.fetchall()
    except sqlite3.IntegrityError as exc:  # the key is there
        raise GuardFailed from exc
    if not rows and cursor.rowcount < 1:  # a statement without RETURNING has only the count
        raise GuardFailed
    for sql, params, many in others:
        (conn.executemany if many else conn.execute)(sql, params)
    return rows


def check_name(path: Any, read_only: bool) -> str:
    """A path as text; ConfigurationError if no file can have it. The disk is not looked at."""
    if isinstance(path, str) and is_dsn(path):
        raise ConfigurationError(
            "the database is a DSN of Postgres: open it with PostgresCheckpointer or PostgresStore"
        )
    try:
        text = os.fsdecode(path)
        usable = text and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        usable = False
    if not usable:
        raise ConfigurationError(
            f"the database path is {path!r}; expected a file name without NUL and lone surrogates, "
            "or ':memory:'"
        )
    if text == MEMORY and read_only:
        raise ConfigurationError("':memory:' cannot be opened read-only: it would be empty")
    return text


def check_path(path: str, read_only: bool) -> None:
    """Refuse a path that cannot be a database, before SQLite touches it.

    Raises:
        ConfigurationError: Its folder, or with `read_only` the file, does not exist.
        NotADatabase: It is a folder, or a file of another kind.
        StorageError: The file or its folder cannot be used.
    """
    if path == MEMORY:
        return
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
    """Refuse a file that is no database (https://sqlite.org/fileformat.html#magic_header_string)."""
    try:
        with open(path, "rb") as file:
            begins = file.read(16)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise _unusable(exc, path) from exc
    if begins and begins != b"SQLite format 3\0":
        raise NotADatabase(f"{path!r} is not an SQLite database: it begins with {begins!r}")


def _unusable(exc: OSError, path: str) -> StorageError:
    return StorageError(
        f"{path!r} cannot be used ({exc.strerror}): check the path, and the permissions of the "
        "file and its folder"
    )


@contextlib.contextmanager
def map_errors(path: str) -> Iterator[None]:
    """Turn sqlite3's errors into perdure's."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as exc:
        error = translate_error(exc, path)
        if error is exc:
            raise
        raise error from exc


def translate_error(exc: BaseException, path: str) -> BaseException:
    """The `StorageError` that an error of sqlite3 becomes; any other error is returned as it is."""
    if isinstance(exc, sqlite3.ProgrammingError) and "closed" in str(exc):
        found: StorageError = StorageUnavailable(f"the database {path!r} is closed")
    elif isinstance(exc, sqlite3.Error) and not isinstance(exc, sqlite3.ProgrammingError):
        found = _storage_error(exc, path)
    elif isinstance(exc, UnicodeDecodeError):  # sqlite3 cannot even decode what SQLite complains of
        found = CorruptRecord(f"database {path!r}: {exc}; {_KINDS['SQLITE_CORRUPT'][1]}")
    else:
        return exc
    found.__cause__ = exc
    return found


def is_full(exc: sqlite3.Error) -> bool:
    """Whether a statement failed because the disk has no room."""
    return isinstance(_storage_error(exc, ""), StorageFull)


def _storage_error(exc: sqlite3.Error, path: str) -> StorageError:
    name = getattr(exc, "sqlite_errorname", "") or ""
    for prefix, (kind, advice) in _KINDS.items():
        if name.startswith(prefix):
            return kind(f"database {path!r}: {exc} ({name}); {advice}")
    return StorageError(f"database {path!r}: {exc} {name}".rstrip())

"""Open connections to an SQLite file, provide its inter-process lock, and translate errors."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Final, Literal

from perdure.errors import (
    ConfigurationError,
    NotADatabase,
    StorageError,
    StorageUnavailable,
)
from perdure.settings import is_dsn
from perdure.storage.database import (
    SCHEMA_VERSION,
    SELECT_COMPONENT_SQL,
    Schema,
    build_error_for_prerelease_database,
    split_script,
)
from perdure.storage.flow import GuardedRequest, GuardFailed, Request, T
from perdure.storage.locks import file_lock
from perdure.storage.private_files import create_private_file, open_file_of_database
from perdure.storage.sqlite_errors import convert_os_error_to_storage_error, is_disk_full
from perdure.storage.untrusted_sqlite import (
    TableSQL,
    UntrustedConnection,
    UntrustedFileGuard,
    list_views_and_virtual_tables,
    read_tables,
)

Synchronous = Literal["full", "normal"]
# Default value of the `synchronous` argument. With this value, committed writes survive a power
# failure; see docs/decisions/0004
DURABLE: Final[Synchronous] = "full"
MEMORY: Final = ":memory:"
# Value of SQLite's pragma `application_id`, the text "perd" in ASCII; see
# https://sqlite.org/pragma.html#pragma_application_id
_APPLICATION_ID: Final = 0x70657264
_COMMON_TABLES: Final = """
CREATE TABLE IF NOT EXISTS schemas (
    component TEXT PRIMARY KEY, version INTEGER NOT NULL, script_hash TEXT NOT NULL,
    applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB NOT NULL)
STRICT, WITHOUT ROWID;
"""
# This query returns no row if the database was created by a development version from before the
# first release. Such versions did not store a hash of the script that created the tables. The
# earliest development versions recorded the schema version in another table.
_HAS_HASHES: Final = "SELECT 1 FROM pragma_table_info('schemas') WHERE name = 'script_hash'"
# WAL size in bytes above which the WAL is checkpointed, that is, moved into the database file
WAL_LIMIT_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 4096  # Size in bytes of a page of the database
RESERVE_BYTES: Final = 4 * WAL_LIMIT_BYTES  # Size in bytes of the reserve file; see `DiskReserve`
# Number of free bytes below which the disk is considered nearly full
_LOW_SPACE_BYTES: Final = 32 * RESERVE_BYTES
MIN_SQLITE_VERSION: Final = (3, 37, 0)
"""The oldest supported version of SQLite. Older versions have no STRICT tables."""
REUSES_WAL = sqlite3.sqlite_version_info >= (3, 51, 3)
"""Whether SQLite may overwrite the WAL in place, which costs a third of emptying the WAL.

In earlier versions of SQLite, overwriting the WAL in place can damage the file; see
https://sqlite.org/wal.html#walresetbug
"""
# Value of SQLite's pragma `auto_vacuum` that allows incremental vacuuming; see
# https://sqlite.org/pragma.html#pragma_auto_vacuum
_INCREMENTAL = 2


class DiskReserve:
    """A file that reserves disk space, so that rows can still be deleted when the disk is full.

    Deleting rows requires disk space before the database can shrink, because SQLite first writes
    the changed pages to the WAL, and only later moves them into the file. Without the reserve file,
    nothing could be deleted once the disk is full.

    Args:
        database: The path of the database. The reserve file is created in the same folder.
    """

    def __init__(self, database: str) -> None:
        self._database = database
        self._path = "" if database == MEMORY else database + "-reserve"
        self._lock = threading.Lock()
        self._release_count = 0

    def create_or_remove_as_needed(self) -> None:
        """Create or remove the reserve file, depending on the free disk space.

        The reserve file occupies disk space that can be released when the disk is full. If the disk
        is nearly full, create the reserve file, which perdure can remove later to free disk space.
        Remove it if there is ample space.

        If the full-size reserve file does not fit on the disk, it is made as large as possible.
        File system errors are ignored, because the next call of `create_or_remove_as_needed` tries
        again. Nothing happens while the reserved disk space is released.
        """
        if not self._path or self._release_count:
            return
        with contextlib.suppress(OSError):
            free_bytes = shutil.disk_usage(os.path.dirname(self._path)).free
            if free_bytes < _LOW_SPACE_BYTES:
                self._fill_reserve_file()
            elif free_bytes > 2 * _LOW_SPACE_BYTES:
                self._remove_reserve_file()

    def _fill_reserve_file(self) -> None:
        """Extend the reserve file to its full size."""
        descriptor = open_file_of_database(self._path, self._database, os.O_APPEND)
        with open(descriptor, "ab", buffering=0) as file:
            while (missing_bytes := RESERVE_BYTES - os.path.getsize(self._path)) > 0:
                # Write random bytes, because some file systems compress zeros and would reserve no
                # disk space.
                file.write(os.urandom(missing_bytes))
                os.fsync(file.fileno())

    def _remove_reserve_file(self) -> None:
        """Remove the reserve file, if it exists."""
        # The reserve file may not exist.
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    @contextlib.contextmanager
    def release_during_block(self) -> Iterator[None]:
        """Release the reserved disk space during the `with` block, then reserve it again.

        Blocks may be nested, and several OS threads may enter blocks at the same time. The disk
        space is reserved again at the end of the last block.
        """
        with self._lock:
            self._release_count += 1
        self._remove_reserve_file()
        try:
            yield
        finally:
            with self._lock:
                self._release_count -= 1
            self.create_or_remove_as_needed()

    def retry_with_reserve_if_disk_is_full(self, work: Callable[[], T]) -> T:
        """Call `work`, and return its result.

        If `work` fails because the disk is full, delete the reserve file and call `work` again.
        """
        try:
            return work()
        except sqlite3.OperationalError as exc:
            if not is_disk_full(exc):
                raise
        with self.release_during_block():
            return work()


@dataclass(frozen=True)
class Connector:
    """Opens connections to one SQLite file. See `SQLiteDatabase` for the attributes."""

    path: str
    synchronous: Synchronous
    read_only: bool
    timeout_s: float
    factory: type[sqlite3.Connection]
    # Guard that checks an untrusted file and limits reads from it, or None if the file is trusted
    guard: UntrustedFileGuard | None = None

    def __post_init__(self) -> None:
        """Raise StorageError if Python uses an SQLite version that is too old."""
        if sqlite3.sqlite_version_info < MIN_SQLITE_VERSION:
            raise StorageError(
                f"Python's sqlite3 module uses SQLite {sqlite3.sqlite_version}, but perdure needs "
                f"SQLite {'.'.join(map(str, MIN_SQLITE_VERSION))} or newer; use a Python that is "
                "linked to a newer SQLite, or store the data in Postgres"
            )

    def with_untrusted_file_guard(
        self,
        tables: Mapping[str, TableSQL | None],
        max_value_bytes: int,
        check_version: Callable[[sqlite3.Connection], object] | None = None,
    ) -> Connector:
        """Return a copy of this connector that treats the file as untrusted.

        See `UntrustedFileGuard`.
        """
        return replace(
            self, guard=UntrustedFileGuard(self.path, tables, max_value_bytes, check_version)
        )

    @cached_property
    def is_on_disk(self) -> bool:
        """Whether the database is a file, which other processes can also open."""
        return self.path != MEMORY

    def measure_wal_bytes(self) -> int:
        """Return the size of the write-ahead log in bytes, or 0 if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.getsize(self.path + "-wal") if self.is_on_disk else 0
        return 0

    def read_file_identity(self) -> tuple[int, int] | None:
        """Return the device and inode of the file, or None if there is no file."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self.path) if self.is_on_disk else None
            return status and (status.st_dev, status.st_ino)
        return None

    @cached_property
    def reserve(self) -> DiskReserve:
        """The disk space that is reserved for deletions."""
        return DiskReserve(self.path)

    def _open_connection(self, uri_mode: str | None = None) -> sqlite3.Connection:
        """Open a connection.

        Args:
            uri_mode: The query string of the file's URI, for example `"mode=ro"`, or None.
        """
        target = f"{Path(self.path).absolute().as_uri()}?{uri_mode}" if uri_mode else self.path
        if self.guard is not None:
            self.guard.check_regular_and_unchanged_file()
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
                self.guard.set_connection_limits(conn)
            conn.execute("PRAGMA mmap_size = 0")
            # The pragma `cell_size_check` makes SQLite more likely to detect damaged pages; see
            # https://sqlite.org/pragma.html#pragma_cell_size_check
            conn.execute("PRAGMA cell_size_check = ON")
            if self.is_on_disk:
                conn.execute("PRAGMA wal_autocheckpoint = 0")
        except BaseException:
            conn.close()
            raise
        return conn

    def open_first_writer(self, schema: Schema) -> sqlite3.Connection:
        """Open the writing connection, and create the tables of a component.

        If the disk is full, the disk space reserved by the reserve file is used to open the
        database. If the disk were full and there were no reserve file to delete, the database could
        not be opened. Users must be able to open the database on a full disk, because they may want
        to free disk space by deleting rows.
        """
        conn = self.reserve.retry_with_reserve_if_disk_is_full(
            partial(self._open_first_writer, schema)
        )
        self.reserve.create_or_remove_as_needed()
        return conn

    def _open_first_writer(self, schema: Schema) -> sqlite3.Connection:
        """Open and configure the writing connection, and create missing tables."""
        with self.hold_lock_between_processes():
            if self.is_on_disk:
                with contextlib.suppress(OSError):  # SQLite reports a path that cannot be opened
                    create_private_file(self.path)
            conn = self._open_connection()
            try:
                is_new = not self._is_perdure_database(conn)
                has_tables_of_this_version = not is_new and self._has_tables(conn, schema)
                if is_new:
                    # `auto_vacuum` can only be set before the first page of the database is
                    # written.
                    conn.execute("PRAGMA auto_vacuum = INCREMENTAL")
                    if conn.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):
                        # SQLite ignored the setting of `auto_vacuum` because another program had
                        # already written the first page of the empty database. VACUUM rewrites the
                        # database with the new value of `auto_vacuum`.
                        conn.execute("VACUUM")
                if self.is_on_disk:
                    conn.execute("PRAGMA journal_mode = WAL")
                self._set_writer_pragmas(conn)
                if not has_tables_of_this_version:
                    self._create_tables(conn, schema)
            except BaseException:
                conn.close()
                raise
        return conn

    def reopen_writer(self) -> sqlite3.Connection:
        """Open a new writing connection to replace a broken one."""
        return self._set_writer_pragmas(self._open_connection())

    def _set_writer_pragmas(self, conn: sqlite3.Connection) -> sqlite3.Connection:
        """Set the pragmas of a writing connection, and return the connection."""
        conn.execute(f"PRAGMA synchronous = {self.synchronous}")
        if self.synchronous != "normal":
            # On macOS, `fsync` leaves data in the drive's cache, which a power failure empties.
            # With these pragmas, SQLite uses F_FULLFSYNC there; see
            # https://sqlite.org/pragma.html#pragma_fullfsync
            conn.execute("PRAGMA fullfsync = ON")
            conn.execute("PRAGMA checkpoint_fullfsync = ON")
        conn.execute("PRAGMA secure_delete = ON")
        if self.is_on_disk and REUSES_WAL:
            conn.execute(f"PRAGMA wal_autocheckpoint = {WAL_LIMIT_BYTES // _PAGE_BYTES}")
            conn.execute(f"PRAGMA journal_size_limit = {2 * WAL_LIMIT_BYTES}")
        return conn

    def add_component(self, conn: sqlite3.Connection, schema: Schema) -> None:
        """Create the tables of another component in an open database, if they do not exist yet."""
        with self.hold_lock_between_processes():
            if not self._has_tables(conn, schema):
                self.reserve.retry_with_reserve_if_disk_is_full(
                    partial(self._create_tables, conn, schema)
                )

    def _create_tables(self, conn: sqlite3.Connection, schema: Schema) -> None:
        """Create the tables of a component in one transaction."""
        conn.execute("BEGIN IMMEDIATE")
        try:
            conn.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            execute_flow_request(conn, split_script(_COMMON_TABLES + schema.script))
            sql = "INSERT INTO schemas (component, version, script_hash) VALUES (?, ?, ?)"
            conn.execute(sql, (schema.component, SCHEMA_VERSION, schema.script_hash))
            conn.execute("COMMIT")
        except BaseException:
            # Roll back only if the transaction is still open. If the disk is full, SQLite has
            # already rolled it back.
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            raise

    def check_has_tables_of_component(self, schema: Schema) -> None:
        """Raise `StorageError` if a component's tables are missing or have the wrong version."""
        with (
            contextlib.closing(self.open_reader()) as conn,
            self.check_file_and_limit_reads_during_block(conn),
        ):
            if self.has_tables_of_component(conn, schema):
                return
        raise StorageError(
            f"{self.path!r} has no perdure tables for {schema.component} yet; to create the "
            "tables, open the database once without read_only"
        )

    def has_tables_of_component(self, conn: sqlite3.Connection, schema: Schema) -> bool:
        """Return whether a database has the tables of a component.

        Raises:
            NotADatabase: The file belongs to another application.
            SchemaMismatch: Another version or build of perdure created the tables.
        """
        return self._is_perdure_database(conn) and self._has_tables(conn, schema)

    def _has_tables(self, conn: sqlite3.Connection, schema: Schema) -> bool:
        """Return whether a perdure database has the tables of a component."""
        # Most files have no views and no virtual tables. Parsing the script takes more time than
        # the rest of this method, so it is parsed only if there is a name to compare.
        if names := list_views_and_virtual_tables(conn):
            for name in sorted(names & {*parse_component_and_common_tables(schema.script)}):
                raise NotADatabase(
                    f"{name!r} in {self.path!r} is a view or a virtual table, not a regular table; "
                    "expected a file that perdure created"
                )
        rows = conn.execute(SELECT_COMPONENT_SQL, (schema.component,)).fetchall()
        return schema.has_tables_of_this_version(rows, self.path)

    def _is_perdure_database(self, conn: sqlite3.Connection) -> bool:
        """Return True for a perdure database, or False for an empty database without tables.

        Raises:
            NotADatabase: The database belongs to another application.
            SchemaMismatch: A build from before the first release created the database.
        """
        (application_id,) = conn.execute("PRAGMA application_id").fetchone()
        if application_id == _APPLICATION_ID:
            if not conn.execute(_HAS_HASHES).fetchall():
                raise build_error_for_prerelease_database(self.path)
            return True
        tables = {name for (name,) in conn.execute("SELECT name FROM sqlite_master")}
        if not tables and application_id == 0:
            return False
        hint = (
            "langgraph-checkpoint-sqlite wrote it; open a new file and call its import_from()"
            if {"checkpoints", "writes"} <= tables
            else "pass a new path, or the path of a file that perdure created"
        )
        raise NotADatabase(f"{self.path!r} is an SQLite database of another application; {hint}")

    @contextlib.contextmanager
    def hold_lock_between_processes(self, wait_s: float | None = None) -> Iterator[None]:
        """Hold an exclusive inter-process lock while creating tables or truncating the WAL.

        Args:
            wait_s: The seconds to wait for the lock. None means `timeout_s`.

        Raises:
            StorageUnavailable: Another process held the lock for the whole time.
        """
        if not self.is_on_disk:
            yield
            return
        path, wait_s = self.path + ".lock", self.timeout_s if wait_s is None else wait_s
        try:
            with file_lock(path, wait_s, self.path):
                yield
        except TimeoutError as exc:
            raise StorageUnavailable(
                f"another process has held a lock on {path!r} for {wait_s} s; try again"
            ) from exc
        except OSError as exc:
            raise convert_os_error_to_storage_error(exc, path) from exc

    @contextlib.contextmanager
    def check_file_and_limit_reads_during_block(self, conn: sqlite3.Connection) -> Iterator[None]:
        """Check that an untrusted file is safe to read, and limit the CPU work for reading it.

        The limit applies to all reads in the `with` block together.

        The check covers the SQL definitions (the schema) of the file's tables, and the database
        pages that the tables use. The limit is a maximum number of SQLite virtual machine steps.

        A trusted file is not checked, and reads from it are not limited.
        """
        if not isinstance(conn, UntrustedConnection) or self.guard is None:
            yield
            return
        with self.guard.check_file_and_limit_reads_during_block(conn):
            yield

    def open_reader(self) -> sqlite3.Connection:
        """Open a connection that only reads."""
        try:
            return self._open_reader_with_mode("mode=ro")
        except sqlite3.OperationalError:
            if not self.read_only or os.path.exists(self.path + "-wal"):
                raise
            # If a database cannot be opened for reading, the usual reason is that its folder is not
            # writable, so that SQLite cannot create the `-shm` file. If the database has no WAL, it
            # can be opened with the option `immutable` instead.
            return self._open_reader_with_mode("immutable=1")

    def _open_reader_with_mode(self, uri_mode: str) -> sqlite3.Connection:
        """Open a connection for reading, and check that it can read the schema."""
        conn = self._open_connection(uri_mode)
        try:
            with self.check_file_and_limit_reads_during_block(conn):
                conn.execute("SELECT 1 FROM sqlite_master").fetchone()
        except BaseException:
            conn.close()
            raise
        return conn


@lru_cache(maxsize=16)
def parse_component_and_common_tables(component_script: str) -> dict[str, TableSQL]:
    """Return a dict that maps each table name of a component to the table's SQL.

    The returned dict contains the component's own tables and the tables shared by all components.
    """
    return read_tables(_COMMON_TABLES + component_script)


def execute_flow_request(conn: sqlite3.Connection, request: Request) -> Any:
    """Execute a request yielded by a flow, and return its rows; see `flow.Request`."""
    if isinstance(request, GuardedRequest):
        return _execute_statements_if_guard_succeeds(conn, request)
    if isinstance(request, list):
        return list(map(partial(execute_flow_request, conn), request))
    sql, params, execute_many = request
    if execute_many:
        conn.executemany(sql, params)
        return []
    return conn.execute(sql, params).fetchall()


def _execute_statements_if_guard_succeeds(
    conn: sqlite3.Connection, statements: GuardedRequest
) -> list[Any]:
    """Execute a `GuardedRequest`, and return the rows that its first statement returned.

    Raises:
        GuardFailed: The first statement, the guard, returned and changed no row, or violated a
            constraint.
    """
    guard, *other_statements = statements
    try:
        cursor = conn.execute(guard.sql, guard.params)
        rows = cursor.fetchall()
    # Raise `GuardFailed` if the guard statement violates a constraint. Usually, the guard statement
    # has tried to insert a row whose key already exists.
    except sqlite3.IntegrityError as exc:
        raise GuardFailed from exc
    # A statement without a RETURNING clause returns no rows, only the number of rows that it
    # changed.
    if not rows and cursor.rowcount < 1:
        raise GuardFailed
    for sql, params, execute_many in other_statements:
        (conn.executemany if execute_many else conn.execute)(sql, params)
    return rows


def check_database_path_and_convert_to_text(path: Any, read_only: bool) -> str:
    """Check that a database path is valid, and return it as a string, without accessing the disk.

    Raises:
        ConfigurationError: The path is not a possible path of a file.
    """
    if isinstance(path, str) and is_dsn(path):
        raise ConfigurationError(
            "the database is a Postgres DSN; open it with PostgresCheckpointer or PostgresStore"
        )
    try:
        text = os.fsdecode(path)
        is_usable = text and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        is_usable = False
    if not is_usable:
        raise ConfigurationError(
            f"the database path is {path!r}; expected a file name without NUL characters or "
            "lone surrogates, or ':memory:'"
        )
    if text == MEMORY and read_only:
        raise ConfigurationError(
            "':memory:' cannot be opened with read_only, because the database would always be "
            "empty; pass the path of a file"
        )
    return text


def check_path_can_be_database(path: str, read_only: bool) -> None:
    """Raise an error if a path cannot be used as a database.

    This function must be called before SQLite opens the file. Unless `read_only` is set, the
    function creates the lock file next to the database, to check that the folder is writable.

    Raises:
        ConfigurationError: The folder does not exist, or with `read_only` the file does not exist.
        NotADatabase: The path is a folder, or a file that is not an SQLite database.
        StorageError: The file cannot be read, or its folder cannot be written.
    """
    if path == MEMORY:
        return
    if os.path.isdir(path):
        raise NotADatabase(f"{path!r} is a folder; pass the path of a file in it")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigurationError(
            f"the folder {folder!r} for the database {path!r} does not exist; create it"
        )
    if read_only:
        if not os.path.exists(path):
            raise ConfigurationError(
                f"{path!r} does not exist; open it without read_only to create it"
            )
        return
    _check_sqlite_header(path)
    try:
        os.close(open_file_of_database(path + ".lock", path))
    except OSError as exc:
        raise StorageError(
            f"the folder {folder!r} is not writable ({exc.strerror}); check its permissions, or "
            "open an existing database with read_only=True"
        ) from exc


def _check_sqlite_header(path: str) -> None:
    """Raise `NotADatabase` if a file does not begin with the SQLite header.

    https://sqlite.org/fileformat.html#magic_header_string
    """
    try:
        with open(path, "rb") as file:
            header = file.read(16)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise convert_os_error_to_storage_error(exc, path) from exc
    if header and header != b"SQLite format 3\0":
        raise NotADatabase(
            f"{path!r} begins with {header!r}, so it is not an SQLite database; pass another path"
        )

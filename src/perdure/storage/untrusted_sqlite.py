"""Check untrusted SQLite files, such as imported ones, and limit the resources used to read them.

The author of an untrusted SQLite file controls whether a name refers to a table or to a view, and
how the file's pages are linked. If the file defines a view with the same name as a table that
perdure reads, reading the view may never end. If the pages of a table form a cycle, reading the
table may never end. To prevent a read that never ends, perdure first checks the SQL definitions of
the file's tables, and the links between the pages of each table. perdure also limits the size of
each imported value, and the number of virtual machine instructions that SQLite may execute in a
read.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from perdure.errors import CorruptRecord, NotADatabase, StorageError
from perdure.storage.database import build_error_for_prerelease_database

# Default maximum size, in bytes, of a value that an import reads
IMPORT_VALUE_BYTES: Final = 256 << 20
_MB: Final = 1 << 20
# Number of SQLite virtual machine steps between two checks of a read's step limit
_STEP_INTERVAL: Final = 100_000
# Maximum number of SQLite virtual machine steps for reading the schema, enough for 20,000 schema
# objects
_SCHEMA_STEPS: Final = 2 * _STEP_INTERVAL
# Base step limit of a read, in SQLite virtual machine steps. `_STEPS_PER_BYTE` is added to it for
# each byte of the file and its WAL. SQLite executes about 50 million steps per second.
_BASE_STEPS: Final = 50_000_000
# Number of additional virtual machine steps that a read may take per byte of the file and its WAL;
# see `_BASE_STEPS`
_STEPS_PER_BYTE: Final = 32
# Name of the table that stores the schema versions. It is checked before all other tables.
_VERSION_TABLE: Final = "schemas"
# Names of the tables that store search indexes. The sizes of the values in these tables are not
# checked, because an import does not copy the tables. Searches in the importing database build new
# search indexes.
_INDEX_TABLES: Final = {"store_search_indexes", "transcript_search_indexes"}
# Suffixes of the additional files that SQLite opens together with a database file
_COMPANION_SUFFIXES: Final = ("-wal", "-shm", "-journal")

_TOKEN: Final = re.compile(
    r"""
    (?P<skipped> \s+ | --[^\n]* | /\*.*?(?:\*/|$) )
    | (?P<text> '(?:[^']|'')*' )
    | (?P<quoted> "(?:[^"]|"")*" | `(?:[^`]|``)*` | \[[^\]]*\] )
    | (?P<word> \w+ )
    | (?P<mark> . )
    """,
    re.VERBOSE | re.DOTALL,
)
# SQL keywords that are rejected in the definition of another application's table, because they may
# make SQLite evaluate expressions or call functions
_EVALUATED_KEYWORDS: Final = {"check", "collate", "generated", "as", "references"}


class TableSQL(NamedTuple):
    """A normalized table definition, used to compare CREATE TABLE statements.

    Attributes:
        definitions: The columns and constraints. Their order is not compared, because `ALTER TABLE`
            adds a column at the end of the SQL.
        options: The words after the columns, such as `STRICT`.
    """

    definitions: frozenset[str]
    options: frozenset[str]


def split_tokens(sql: str) -> list[str]:
    """Split SQL into tokens. SQL names and keywords are converted to lowercase.

    Whitespace and comments are dropped. Quotation marks around plain names are removed, so that
    equal definitions have equal tokens. SQLite adds quotation marks to a table's name when the
    table is renamed.
    """
    tokens = []
    for match in _TOKEN.finditer(sql):
        text = match.group()
        if match["quoted"] and re.fullmatch(r"\w+", text[1:-1]):
            text = text[1:-1]
        if not match["skipped"]:
            tokens.append(text if match["text"] else text.lower())
    return tokens


def parse_create_table_tokens(tokens: list[str]) -> tuple[str, TableSQL] | None:
    """Return a table's name and definition, or None if the statement is not CREATE TABLE."""
    if tokens[:2] != ["create", "table"]:
        return None
    remaining_tokens = tokens[5:] if tokens[2:5] == ["if", "not", "exists"] else tokens[2:]
    if remaining_tokens[1:2] != ["("]:
        return None
    definitions, depth, end = [list[str]()], 1, len(remaining_tokens)
    for index, token in enumerate(remaining_tokens[2:], 2):
        depth += (token == "(") - (token == ")")
        if not depth:
            end = index
            break
        if token == "," and depth == 1:
            definitions.append([])
        else:
            definitions[-1].append(token)
    options = " ".join(remaining_tokens[end + 1 :]).split(" , ")
    return remaining_tokens[0], TableSQL(
        frozenset(map(" ".join, definitions)), frozenset(filter(None, options))
    )


def read_tables(script: str) -> dict[str, TableSQL]:
    """Return the definitions of the tables that a script creates, keyed by table name."""
    tables = (parse_create_table_tokens(split_tokens(sql)) for sql in script.split(";"))
    return dict(table for table in tables if table is not None)


# SQL of the `schemas` table as created by pre-release versions of perdure
_TABLE_WITHOUT_HASHES: Final = read_tables(
    """
    CREATE TABLE schemas (
        component TEXT PRIMARY KEY, version INTEGER NOT NULL,
        applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
    ) STRICT, WITHOUT ROWID
    """
)[_VERSION_TABLE]


def list_views_and_virtual_tables(conn: sqlite3.Connection) -> set[str]:
    """Return the names of a database's views and virtual tables, in lowercase."""
    sql = "SELECT lower(name) FROM sqlite_master WHERE type = 'view' OR sql LIKE 'CREATE VIRTUAL%'"
    return {name for (name,) in conn.execute(sql)}


def _check_table_has_expected_sql(
    path: str, name: str, kind: str, sql: Any, expected: TableSQL | None
) -> None:
    """Check that a table or view in the file has the definition expected for its name.

    Raises:
        NotADatabase: The file has a view, a virtual table, or another table under this name. If
            `expected` is None, any table is accepted whose definition evaluates no expressions.
        SchemaMismatch: The table `schemas` is from a build from before the first release.
    """
    tokens = split_tokens(sql) if isinstance(sql, str) else []
    created = parse_create_table_tokens(tokens)
    if kind != "table" or created is None or created[0] != name:
        kind = "malformed table" if kind == "table" else kind
        kind = "virtual table" if tokens[1:2] == ["virtual"] else kind
        raise NotADatabase(
            f"{path!r} was not read, because it has a {kind} named {name!r} instead of a regular "
            "table; expected a file that perdure or langgraph created"
        )
    if expected is None:
        evaluated_keywords = sorted(_EVALUATED_KEYWORDS.intersection(tokens))
        if evaluated_keywords:
            raise NotADatabase(
                f"the table {name!r} in {path!r} was not read, because its definition contains "
                f"{evaluated_keywords[0].upper()}; expected a table that langgraph created"
            )
    elif name == _VERSION_TABLE and created[1] == _TABLE_WITHOUT_HASHES:
        raise build_error_for_prerelease_database(path)
    elif created[1] != expected:
        difference = (
            created[1].definitions ^ expected.definitions or created[1].options ^ expected.options
        )
        raise NotADatabase(
            f"the table {name!r} in {path!r} was not read, because its definition differs from the "
            f"one that this version of perdure creates; one difference is {min(difference)!r:.200}"
        )


class UntrustedConnection(sqlite3.Connection):
    """An SQLite connection that aborts a read if it takes too many virtual machine steps.

    Attributes:
        steps: The number of steps that the current read has taken.
        limit: The maximum number of steps of the current read.
        checked_schema_version: The file's schema version when this connection last checked the
            tables, or None before the first check.
    """

    steps = 0
    limit = _SCHEMA_STEPS
    checked_schema_version: int | None = None

    def count_steps_and_check_limit(self) -> bool:
        """Count SQLite virtual machine steps, and return whether the limit has been exceeded."""
        self.steps += _STEP_INTERVAL
        return self.steps > self.limit


class UntrustedFileGuard:
    """Checks an untrusted file, and limits the resources that are used to read it.

    Args:
        path: The file.
        tables: The tables that are read, by name in lower case. The value is the definition of
            perdure's table, or None for a table of another application.
        max_value_bytes: The size of the largest value that may be read.
        check_version: Reads the table `schemas`, and raises an error if another version of perdure
            made the file. It is called before the other tables are checked.
    """

    def __init__(
        self,
        path: str,
        tables: Mapping[str, TableSQL | None],
        max_value_bytes: int,
        check_version: Callable[[sqlite3.Connection], object] | None = None,
    ) -> None:
        self._path, self._tables, self._max_bytes = path, tables, max_value_bytes
        self._check_version = check_version
        self._lock = threading.Lock()
        self._identity: tuple[int, int] | None = None
        # Whether the database pages and the value sizes in the tables have already been checked
        self._are_pages_checked = False

    def check_regular_and_unchanged_file(self) -> None:
        """Check that the path is a regular file that has not been replaced.

        The file counts as replaced if its device and inode numbers differ from those at the first
        call of `check_regular_and_unchanged_file`.

        Raises:
            NotADatabase: The file, or a file that SQLite opens with it, is not a regular file.
            StorageError: The file was replaced.
        """
        real_path = os.path.realpath(self._path)
        status = os.stat(real_path)
        if not stat.S_ISREG(status.st_mode):
            raise NotADatabase(f"{self._path!r} is not a regular file; expected an SQLite database")
        for suffix in _COMPANION_SUFFIXES:
            companion = real_path + suffix
            if os.path.lexists(companion) and not stat.S_ISREG(os.lstat(companion).st_mode):
                raise NotADatabase(
                    f"{self._path!r} was not read, because its journal or WAL file {companion!r} "
                    f"is not a regular file; remove {companion!r}"
                )
        with self._lock:
            self._identity = self._identity or (status.st_dev, status.st_ino)
            if self._identity != (status.st_dev, status.st_ino):
                raise StorageError(
                    f"{self._path!r} was replaced by another file while it was being read; try "
                    "again"
                )

    def set_connection_limits(self, conn: UntrustedConnection) -> None:
        """Set a new connection's resource limits and make it read-only, before reading the schema.

        `PRAGMA trusted_schema = OFF` is not set, because SQLite would then reject indexes on JSON
        paths, which call `json_extract`. Reading is safe without `PRAGMA trusted_schema = OFF`.
        perdure checks the definition of each table before reading the table, so the read evaluates
        no expressions from the schema. perdure also registers no SQL functions on the connection.
        """
        conn.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._max_bytes)
        conn.execute("PRAGMA query_only = ON")
        conn.set_progress_handler(conn.count_steps_and_check_limit, _STEP_INTERVAL)

    @contextmanager
    def check_file_and_limit_reads_during_block(self, conn: UntrustedConnection) -> Iterator[None]:
        """Check that an untrusted file is safe to read, then run the `with` block in a transaction.

        The transaction is aborted if it exceeds its limit of SQLite virtual machine steps.

        Raises:
            NotADatabase: A table does not have the expected definition; see
                `_check_table_has_expected_sql`.
            CorruptRecord: The pages of a table are damaged, or a read takes more steps than a file
                of this size can need.
            StorageError: A value is too large.
        """
        conn.steps, conn.limit = 0, _SCHEMA_STEPS
        try:
            conn.execute("BEGIN")
            self._check_tables_if_schema_changed(conn)
            yield
            conn.execute("COMMIT")
        except sqlite3.OperationalError as exc:
            if getattr(exc, "sqlite_errorname", "") != "SQLITE_INTERRUPT":
                raise
            # If the read was interrupted without exceeding its step limit, the cause is a signal
            # handler. The handler raised an exception, such as KeyboardInterrupt, and sqlite3
            # discarded it.
            if conn.steps <= conn.limit:
                raise KeyboardInterrupt from exc
            raise CorruptRecord(
                f"reading {self._path!r} was stopped, because it took too long for a file of "
                "this size; the file is damaged or malicious"
            ) from exc
        except sqlite3.DataError as exc:
            if getattr(exc, "sqlite_errorname", "") != "SQLITE_TOOBIG":
                raise
            raise self._build_size_error(repr(self._path)) from exc

    def _measure_file_and_wal_bytes(self) -> int:
        """Return the combined size of the file and its WAL, in bytes."""
        total = 0
        for path in (self._path, self._path + "-wal"):
            with suppress(FileNotFoundError):
                total += os.path.getsize(path)
        return total

    def _check_tables_if_schema_changed(self, conn: UntrustedConnection) -> None:
        """Check that the tables are safe to read.

        The check is skipped if the connection `conn` was already used to check the current schema
        version.

        Also limit the number of SQLite virtual machine steps of the read, based on the file size.
        """
        ((version,),) = conn.execute("PRAGMA schema_version").fetchall()
        tables = list[tuple[str, str, Any]]()
        if conn.checked_schema_version != version:
            tables = [
                (name, kind, sql)
                for kind, name, sql in conn.execute(
                    "SELECT type, lower(name), sql FROM sqlite_master"
                )
                if kind in ("table", "view") and name in self._tables
            ]
        conn.limit = _BASE_STEPS + _STEPS_PER_BYTE * self._measure_file_and_wal_bytes()
        if conn.checked_schema_version != version:
            with self._lock:
                self._check_table_definitions_and_pages(
                    conn, [table for table in tables if table[0] == _VERSION_TABLE]
                )
                if self._check_version is not None:
                    self._check_version(conn)
                self._check_table_definitions_and_pages(
                    conn, [table for table in tables if table[0] != _VERSION_TABLE]
                )
                self._are_pages_checked = True
            conn.checked_schema_version = version

    def _check_table_definitions_and_pages(
        self, conn: UntrustedConnection, tables: Sequence[tuple[str, str, Any]]
    ) -> None:
        """Check that each table has the expected SQL definition.

        Each element of `tables` is a tuple `(name, type, sql)`. For the first connection to the
        file, check each table's pages and value sizes in addition to its definition.
        """
        for name, kind, sql in tables:
            _check_table_has_expected_sql(self._path, name, kind, sql, self._tables[name])
            if not self._are_pages_checked:
                self._check_table_pages(conn, name)
                if name not in _INDEX_TABLES:
                    self._check_value_sizes_in_table(conn, name)

    def _check_table_pages(self, conn: UntrustedConnection, table_name: str) -> None:
        """Check that the pages of a table are undamaged and form no cycle.

        If the table's database pages are linked in a cycle, reading the table may never end.
        """
        for (problem,) in conn.execute(f"PRAGMA quick_check({table_name})"):
            if problem != "ok":
                lines = str(problem).splitlines()
                raise CorruptRecord(
                    f"{self._path!r} was not read, because its table {table_name!r} is damaged: "
                    f"{(lines[1:] or lines)[0]:.200}; restore the file from a backup"
                )

    def _check_value_sizes_in_table(self, conn: UntrustedConnection, table_name: str) -> None:
        """Check that a table's values are within the size limit, before reading any of them."""
        columns = [row[1] for row in conn.execute(f"PRAGMA table_info({table_name})")]
        larger = " OR ".join(f'length("{column}") > ?1' for column in columns if '"' not in column)
        if conn.execute(
            f"SELECT 1 FROM {table_name} WHERE {larger} LIMIT 1", (self._max_bytes,)
        ).fetchall():
            raise self._build_size_error(f"the table {table_name!r} in {self._path!r}")

    def _build_size_error(self, location: str) -> StorageError:
        """Build the error for a value that is too large."""
        return StorageError(
            f"{location} has a value of more than {self._max_bytes / _MB:,.0f} MB, "
            "which is the limit for untrusted files; if you trust the file, raise the limit "
            "with max_value_bytes=, or 'perdure import --max-value-mb'"
        )

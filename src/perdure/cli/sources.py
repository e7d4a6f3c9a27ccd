"""Open the source databases of `perdure import` and `perdure copy`, which may be untrusted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.import_langgraph import SAVER_TABLES
from perdure.checkpointers.sqlite import SQLiteCheckpointer
from perdure.cli.app import check_database_exists, open_database
from perdure.settings import is_dsn, load
from perdure.storage.flow import fetch_rows
from perdure.storage.sqlite import SQLiteDatabase
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES
from perdure.stores.import_sources import STORE_TABLES
from perdure.stores.sqlite import SQLiteStore
from perdure.stores.whole_store import WholeStore

# Names of tables that exist only in databases created by perdure, not in langgraph databases.
_PERDURE_TABLES: Final = {"schemas", "namespaces", "store_items"}
_SELECT_TABLE_NAMES: Final = "SELECT lower(name) FROM sqlite_master"
# Maximum size in bytes of a value that SQLite can store.
_MAX_SQLITE_VALUE_BYTES: Final = (1 << 31) - 1


@dataclass(frozen=True)
class Source:
    """The source database of an import or a copy, opened read-only.

    Attributes:
        path: The file, or the DSN.
        max_value_bytes: The size of the largest value that is read from a file.
        saver: The checkpointer of a database of perdure. None if the database has no threads, or if
            langgraph wrote it.
        store: The store of a database of perdure. None if the database has no items, or if
            langgraph wrote it.
    """

    path: str
    max_value_bytes: int = IMPORT_VALUE_BYTES
    saver: Checkpointer | None = None
    store: WholeStore | None = None

    @property
    def is_perdure_database(self) -> bool:
        """Return whether perdure, and not langgraph, wrote the database."""
        return self.saver is not None or self.store is not None


@contextmanager
def open_database_to_import(path: str, max_value_bytes: int) -> Iterator[Source]:
    """Validate and open a perdure or LangGraph database to import from.

    Raises:
        NotADatabase: A table does not have the form in which perdure or langgraph creates it.
        StorageError: The file is damaged, or has a value that is too large.
    """
    # An import from Postgres always reads a langgraph database, never a perdure database.
    if is_dsn(path):
        yield Source(path)
        return
    if not _read_table_names(path) & _PERDURE_TABLES:
        # Connecting checks these tables.
        tables = *SAVER_TABLES, *STORE_TABLES
        with closing(
            SQLiteDatabase(
                path, None, read_only=True, tables=tables, max_value_bytes=max_value_bytes
            )
        ) as database:
            database.connect()
        yield Source(path, max_value_bytes)
        return
    with _open_sqlite_source(path, load(db=path).key, max_value_bytes) as source:
        yield source


@contextmanager
def open_database_to_copy(db: str, key: str | None) -> Iterator[Source]:
    """Open a database for a copy.

    The argument `key` overrides the configured encryption key.

    When a database is copied, the size of the values read from it is not limited, because `perdure
    copy` is meant for the user's own databases.
    """
    if is_dsn(db):
        with open_database(db, allow_read_only=True, key=key) as file:
            yield Source(db, saver=file.saver, store=file.store)
        return
    settings = load(db=db, key=key)
    check_database_exists(settings.db)
    with _open_sqlite_source(settings.db, settings.key, _MAX_SQLITE_VALUE_BYTES) as source:
        yield source


def _read_table_names(path: str) -> set[str]:
    """Return the names of the tables and indexes in a SQLite file."""
    with closing(SQLiteDatabase(path, None, read_only=True)) as file:
        return {name for (name,) in file.read(lambda: fetch_rows(_SELECT_TABLE_NAMES))}


@contextmanager
def _open_sqlite_source(path: str, key: str | None, max_value_bytes: int) -> Iterator[Source]:
    """Open the threads and the store items in a SQLite file that perdure wrote."""
    names = _read_table_names(path)
    saver: SQLiteCheckpointer | None = None
    store: SQLiteStore | None = None
    with ExitStack() as stack:
        if "namespaces" in names or "store_items" not in names:
            saver = stack.enter_context(
                SQLiteCheckpointer.open(
                    path, key=key, untrusted=True, max_value_bytes=max_value_bytes
                )
            )
        if "store_items" in names:
            store = stack.enter_context(
                SQLiteStore.open(
                    path, key=key, index=None, untrusted=True, max_value_bytes=max_value_bytes
                )
            )
        yield Source(path, max_value_bytes, saver, store)

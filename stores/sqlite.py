"""`SQLiteStore`: namespaced JSON documents with versions and search, in one SQLite file."""

from __future__ import annotations

import os
import sqlite3
from typing import Any, Final, Literal

from langgraph.store.base import IndexConfig, TTLConfig

from perdure.settings import TIMEOUT_S
from perdure.storage.database import Schema
from perdure.storage.flow import load_sql
from perdure.storage.sqlite import SQLiteDatabase
from perdure.storage.sqlite_connection import DURABLE, Synchronous
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES
from perdure.stores.filter_sql import JSONLocation
from perdure.stores.options import TextIndex
from perdure.stores.search.vectors import Kind
from perdure.stores.store_parts import add_transcript_tables_to_schema
from perdure.stores.values import MAX_BYTES
from perdure.stores.whole_store import WholeStore

# Read the SQL files at import time, because a later read could block an event loop.
_SQL: Final = load_sql("perdure.stores", "sqlite.sql", "sqlite_schema.sql")
SCHEMA: Final = Schema("stores", add_transcript_tables_to_schema(_SQL["schema"]))


class SQLiteStore(WholeStore):
    """A langgraph store in one SQLite file, for use from asyncio and from OS threads.

    The store and a `SQLiteCheckpointer` can share a file. Use the store with `with` or `async
    with`, or call `close`. The first use opens the file.

    Args:
        path: The path of the file, or `":memory:"`.
        index: The embedder, and the texts that are embedded. `"offline"` is the embedder in the
            package, a table of English word vectors, and embeds all text of a value. A dict is
            langgraph's `IndexConfig` (`embed`, `dims`, `fields`). With None, searches use words
            only. `fields`, or `text_fields` as langgraph's SQLite store calls it, also selects the
            text that is searched by words. If neither is given, the paths recorded in the file are
            used.
        ttl: langgraph's `TTLConfig`, in minutes.
        key: The encryption key of 16, 24 or 32 bytes, as bytes or in hexadecimal. Values,
            provenance, words and vectors are encrypted with AES-GCM. Namespaces, the keys of items
            and times are not encrypted. The default is the environment variable `PERDURE_KEY`, if
            it is set.
        text_index: With a key, how words are stored in the search indexes, which are encrypted in
            both cases. `"sealed"` stores the words, and search works in full. `"keyed"` stores
            keyed hashes of the words. Typing errors are then not corrected, and synonyms are not
            found.
        vectors: The number type in which vectors are stored. None uses the type of the file, or
            `"int8"` in a new file, which takes a quarter of the space of `"float32"`.
        approximate_above: The number of vectors in a namespace above which search is approximate.
        index_bytes: The memory for the search indexes of namespaces, in bytes. If it is exceeded,
            the least recently searched indexes are dropped, and loaded again when needed. The index
            that was searched last is never dropped.
        max_value_bytes: The maximum size of a value as JSON.
        synchronous: With `"full"`, the default, a put that has returned survives a power cut. With
            `"normal"`, it survives a crash of the process only.
        read_only: Whether to open for reading only. Nothing is created, and reads do not restart
            times to live.
        timeout_s: The time in seconds to wait for another process that is writing.
        untrusted: Whether the file comes from elsewhere and its items are to be imported. The file
            is only read. It is refused if its tables are not those of perdure, if it is damaged, or
            if it has too large a value. The limit of a value is then 256 MB, unless
            `max_value_bytes` is set; see docs/threads.md.

    Attributes:
        index_config: langgraph's `IndexConfig` as it was passed. With `"offline"`, it is that of
            the package's embedder. None means that nothing is embedded.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    # class that is used for database connections; tests override it
    _connection_class = sqlite3.Connection

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        index: IndexConfig | dict[str, Any] | Literal["offline"] | None = "offline",
        ttl: TTLConfig | None = None,
        key: bytes | str | None = None,
        text_index: TextIndex = "sealed",
        vectors: Kind | None = None,
        approximate_above: int = 200_000,
        index_bytes: int = 256 << 20,
        max_value_bytes: int = MAX_BYTES,
        synchronous: Synchronous = DURABLE,
        read_only: bool = False,
        timeout_s: float = TIMEOUT_S,
        untrusted: bool = False,
    ) -> None:
        read_only = True if untrusted else read_only
        has_own_limit = max_value_bytes != MAX_BYTES
        super().__init__(
            _SQL,
            JSONLocation("i.value"),
            lambda begin: SQLiteDatabase(
                path,
                SCHEMA,
                begin=begin,
                synchronous=synchronous,
                read_only=read_only,
                timeout_s=timeout_s,
                factory=self._connection_class,
                untrusted=untrusted,
                max_value_bytes=max_value_bytes if has_own_limit else IMPORT_VALUE_BYTES,
            ),
            index=index,
            ttl=ttl,
            key=key,
            text_index=text_index,
            vectors=vectors,
            approximate_above=approximate_above,
            index_bytes=index_bytes,
            max_value_bytes=max_value_bytes,
            read_only=read_only,
            timeout_s=timeout_s,
        )

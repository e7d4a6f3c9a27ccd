"""`SQLiteStore`: namespaced JSON with versions and search, in one SQLite file."""

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
from perdure.stores.parts import TextIndex, with_transcript_tables
from perdure.stores.values import MAX_BYTES
from perdure.stores.vectors import Kind
from perdure.stores.whole_store import WholeStore

# read here, as no event loop may wait for a file
_SQL: Final = load_sql("perdure.stores", "sqlite.sql", "sqlite_schema.sql")
SCHEMA: Final = Schema("stores", with_transcript_tables(_SQL["schema"]))


class SQLiteStore(WholeStore):
    """A langgraph store in one SQLite file, for asyncio and for threads alike.

    It may share its file with a `SQLiteCheckpointer`. Use it with `with` or `async with`, or call
    `close`; the first use opens the file.

    Args:
        path: A file, or `":memory:"`.
        index: The embedder: `"offline"`, the English table within the package over all text of a
            value; langgraph's `IndexConfig` (`embed`, `dims`, `fields`); None: nothing, search goes
            by words. `fields`, or `text_fields` as langgraph's SQLite store calls it, also says
            what text search reads; without it, what the file was last opened with.
        ttl: Langgraph's `TTLConfig`, in minutes.
        key: Encrypts values, provenance, words and vectors with AES-GCM; namespaces, keys and
            times are not. 16, 24 or 32 bytes, or as many in hexadecimal; by default the
            environment's `PERDURE_KEY`, if set.
        text_index: With a key, whether the words of an item are encrypted too (`"sealed"`), or kept
            as keyed hashes (`"keyed"`): faster to load, without typing errors, and it reveals which
            items share words.
        vectors: How the numbers of a vector are stored; None: as in the file, `"int8"` in a new
            one, which takes a quarter of `"float32"`.
        approximate_above: The number of vectors of a namespace above which search is approximate.
        index_bytes: Memory for the search indexes of namespaces. The least recently searched are
            dropped, and loaded again when needed; the one searched last stays.
        max_value_bytes: The largest value, as JSON.
        synchronous: `"full"`, the default: an acknowledged write survives a power cut.
            `"normal"`: it survives a crash of the process.
        read_only: Open for reading; nothing is created, and reading refreshes no time to live.
        timeout_s: How long to wait for another process that is writing.
        untrusted: Open a file from elsewhere, whose items are to be imported. It is only read, and
            refused if its tables are not perdure's own, or damaged, or have a value of more than
            256 MB, or of more than `max_value_bytes` if that is given; see docs/threads.md.

    Attributes:
        index_config: Langgraph's `IndexConfig` as it was given; with `"offline"`, that of the
            package's embedder; None: nothing is embedded.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    _connection_class = sqlite3.Connection  # tests put another here

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
        is_given = max_value_bytes != MAX_BYTES
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
                max_value_bytes=max_value_bytes if is_given else IMPORT_VALUE_BYTES,
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

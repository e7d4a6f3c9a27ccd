"""`SQLiteStore`: namespaced JSON with versions and search, in one SQLite file."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, Self

from langgraph.store.base import IndexConfig, TTLConfig

from perdure.errors import ConfigurationError
from perdure.storage.encryption import Clear, agree_on_key, seal_for
from perdure.storage.flow import Flow, load
from perdure.storage.sqlite import SQLiteDatabase
from perdure.storage.sqlite_connection import Synchronous
from perdure.stores.core import Parts, forget_filters, system_clock
from perdure.stores.embedding import CheckedEmbedder, embedder_from
from perdure.stores.models import Model
from perdure.stores.offline import DIMS, StaticEmbedder
from perdure.stores.options import TextIndex, check_names, check_options
from perdure.stores.preparing import Preparer
from perdure.stores.reading import Reader
from perdure.stores.records import Records
from perdure.stores.resident import Resident
from perdure.stores.schema import SQLITE
from perdure.stores.searching import Searcher
from perdure.stores.steps import Driver
from perdure.stores.store import Store
from perdure.stores.values import MAX_BYTES
from perdure.stores.vectors import Kind
from perdure.stores.words import agreed_fields
from perdure.stores.writing import Writer

Offline = Literal["offline"]
_SQL: Final = load("perdure.stores", "sqlite.sql")  # here, as no event loop may wait for a file
_INDEX: Final = ("embed", "dims", "fields", "name")
_APPROXIMATE_ABOVE: Final = 200_000  # vectors; 384 dimensions of float32 are 300 MB then


class SQLiteStore(Store):
    """A langgraph store in one SQLite file, for asyncio and for threads alike.

    It may share its file with a `SQLiteCheckpointer`, and then shares its writer. It is for `with`
    or `async with`; without either the file is opened by the first use.

    Args:
        path: A file, or `":memory:"`.
        index: What search embeds with: `"offline"`, the English table within the package over
            all text of a value; langgraph's `IndexConfig` (`embed`, `dims`, `fields`); None:
            nothing, search goes by words. `fields` also says what text search reads; without
            it, what the file was last opened with.
        ttl: Langgraph's `TTLConfig`, in minutes.
        key: Encrypts values, provenance, words and vectors with AES-GCM; namespaces, keys and
            times are not. 16, 24 or 32 bytes, or as many in hexadecimal; by default the
            environment's `PERDURE_KEY`, if set.
        text_index: With a key, whether the words of an item are encrypted too (`"sealed"`), or
            kept as keyed hashes (`"keyed"`): quicker to load, blind to misspellings, and it
            shows which items share words.
        vectors: How the numbers of a vector are stored; `"int8"` takes a quarter.
        approximate_above: Vectors under a prefix from which a search may miss some of the
            nearest.
        max_value_bytes: Of a value's JSON.
        synchronous: `"full"`: an acknowledged write survives a power cut. `"normal"`: it
            survives a crash of the process.
        read_only: Open for reading; nothing is created, and reading refreshes no time to live.
        timeout_s: How long to wait for another process that is writing.
        clock: Seconds since 1970.
        factory: The class of SQLite connections.

    Attributes:
        index_config: Langgraph's `IndexConfig` as it was given; with `"offline"`, that of the
            package's embedder; None: nothing is embedded.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        index: IndexConfig | Mapping[str, Any] | Offline | None = "offline",
        ttl: TTLConfig | None = None,
        key: bytes | str | None = None,
        text_index: TextIndex = "sealed",
        vectors: Kind = "float32",
        approximate_above: int = _APPROXIMATE_ABOVE,
        max_value_bytes: int = MAX_BYTES,
        synchronous: Synchronous = "full",
        read_only: bool = False,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = system_clock,
        factory: type[sqlite3.Connection] = sqlite3.Connection,
    ) -> None:
        check_options(
            path=path,
            ttl=ttl,
            key=key,
            text_index=text_index,
            vectors=vectors,
            approximate_above=approximate_above,
            max_value_bytes=max_value_bytes,
            read_only=read_only,
            timeout_s=timeout_s,
            clock=clock,
            factory=factory,
        )
        self.index_config: IndexConfig | None = _index_config(index)
        embedder, model, given, in_process = _embedding(self.index_config, vectors)
        seal = seal_for(key)
        kept = "clear" if isinstance(seal, Clear) else text_index
        fields: list[str] = []

        def begin() -> Flow[None]:
            yield from agree_on_key(seal, os.fsdecode(path), read_only=read_only)
            fields[:] = yield from agreed_fields(_SQL, given, kept, read_only=read_only)

        database = SQLiteDatabase(
            path,
            SQLITE,
            begin=begin,
            synchronous=synchronous,
            read_only=read_only,
            timeout_s=timeout_s,
            factory=factory,
        )
        records = Records(seal)
        masked = _mask(seal.hash_key) if kept == "keyed" else None
        writer = Writer(_SQL, records, open_index=masked is not None)
        preparer = Preparer(fields, max_value_bytes, model, masked)
        resident = Resident(
            _SQL,
            records,
            sealed_tokens=kept == "sealed",
            approximate_above=approximate_above,
            analyse=preparer.analysed,
            keep=_ignored
            if read_only
            else lambda made: database.post(partial(writer.keep_tokens, made)),
            erased=lambda: _clear_caches(embedder),
        )
        reader = Reader(_SQL, records)
        self._bind(
            Parts(
                database,
                _SQL,
                reader,
                writer,
                preparer,
                Searcher(_SQL, reader, resident, model, masked, _micros(clock)),
                Driver(database, writer, embedder, in_process),
                ttl,
                clock,
            )
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Open a database now, creating it if need be; in a running event loop, at the first use.

        Args:
            path: See the class.
            **options: See the class.

        Raises:
            ConfigurationError: An argument is wrong, or the folder does not exist.
            NotADatabase: The path is a folder or another application's file.
            SchemaMismatch: A newer perdure wrote the file.
            WrongKey: The key does not open it, or it needs one.
            StorageError: The file cannot be opened.
        """
        store = cls(path, **options)
        store.setup()
        return store

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """Open by the name that langgraph's stores use; see `open`."""
        return cls.open(conn_string, **options)


def _micros(clock: Callable[[], float]) -> Callable[[], int]:
    return lambda: int(clock() * 1_000_000)


def _ignored(_: object) -> None:
    """What reads only keeps nothing."""


def _clear_caches(embedder: CheckedEmbedder | None) -> None:
    """A vector tells of its text, and a filter may hold what it looks for."""
    forget_filters()
    if embedder is not None:
        embedder.clear_cache()


def _index_config(index: Any) -> Any:
    if index == "offline":
        return {"embed": StaticEmbedder(), "dims": DIMS}
    if index is not None and (not isinstance(index, Mapping) or index.get("embed") is None):
        raise ConfigurationError(
            f"index is {index!r}; expected 'offline', None, or a dict with 'embed', 'dims' and "
            "perhaps 'fields'"
        )
    return index


def _embedding(
    config: Mapping[str, Any] | None, kind: Kind
) -> tuple[CheckedEmbedder | None, Model | None, list[str] | None, bool]:
    """What embeds, what it is recorded as, the paths it reads, and whether it computes here."""
    if config is None:
        return None, None, None, False
    check_names("index", config, _INDEX)
    embedder = embedder_from(config["embed"], config.get("dims"), config.get("name"))
    fields = config.get("fields")
    listed = isinstance(fields, list | tuple) or fields is None
    if not listed or not all(isinstance(path, str) and path for path in fields or ()):
        raise ConfigurationError(
            f"index fields are {fields!r}; expected a list of paths like ['text'], or None"
        )
    in_process = getattr(config["embed"], "in_process", False) is True
    return embedder, Model(embedder.name, embedder.dims or 0, kind), fields or None, in_process


def _mask(key: bytes) -> Callable[[str], str]:
    """Keyed hashes of words: equal for equal words, and nothing else without the key."""

    def mask(word: str) -> str:
        return hashlib.blake2b(word.encode(), digest_size=9, key=key).hexdigest()

    return mask

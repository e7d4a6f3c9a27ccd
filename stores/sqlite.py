"""`SQLiteStore`: namespaced JSON with versions and search, in one SQLite file."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, Self

from langgraph.store.base import IndexConfig, TTLConfig

from perdure import settings
from perdure.errors import ConfigurationError, CorruptRecord
from perdure.storage.encryption import Clear, agree_on_key, seal_for
from perdure.storage.flow import Flow, load
from perdure.storage.sqlite import SQLiteDatabase
from perdure.storage.sqlite_connection import Synchronous
from perdure.stores.embedders import embedder_from
from perdure.stores.index_cache import Indexes
from perdure.stores.models import Embeddings, Model
from perdure.stores.offline import DIMS, StaticEmbedder
from perdure.stores.options import TextIndex, check_names, check_options
from perdure.stores.parts import Parts, clear_filters
from perdure.stores.puts import Preparer
from perdure.stores.reading import Reader, Records
from perdure.stores.runner import Runner
from perdure.stores.schema import SQLITE
from perdure.stores.searching import Searcher
from perdure.stores.settings import agreed_fields
from perdure.stores.values import MAX_BYTES
from perdure.stores.vectors import Kind
from perdure.stores.whole_store import WholeStore
from perdure.stores.writer import Writer

Offline = Literal["offline"]
_SQL: Final = load("perdure.stores", "sqlite.sql")  # here, as no event loop may wait for a file
_INDEX: Final = ("embed", "dims", "fields", "name", "text_fields", "distance_type")
_INDEX_BYTES: Final = 256 << 20
_APPROXIMATE_ABOVE: Final = 200_000  # vectors; 384 dimensions of float32 are 300 MB then


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
        synchronous: `"full"`: an acknowledged write survives a power cut. `"normal"`: it
            survives a crash of the process.
        read_only: Open for reading; nothing is created, and reading refreshes no time to live.
        timeout_s: How long to wait for another process that is writing.

    Attributes:
        index_config: Langgraph's `IndexConfig` as it was given; with `"offline"`, that of the
            package's embedder; None: nothing is embedded.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    # tests put others here
    _clock: Callable[[], float] = staticmethod(time.time)
    _connection_class = sqlite3.Connection

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        index: IndexConfig | Mapping[str, Any] | Offline | None = "offline",
        ttl: TTLConfig | None = None,
        key: bytes | str | None = None,
        text_index: TextIndex = "sealed",
        vectors: Kind | None = None,
        approximate_above: int = _APPROXIMATE_ABOVE,
        index_bytes: int = _INDEX_BYTES,
        max_value_bytes: int = MAX_BYTES,
        synchronous: Synchronous = "full",
        read_only: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        check_options(
            path=path,
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
        self.index_config: IndexConfig | None = _index_config(index)
        embeddings, given = _embeddings(self.index_config, vectors)
        seal = seal_for(key)
        kept = "clear" if isinstance(seal, Clear) else text_index
        fields: list[str] = []

        def begin() -> Flow[None]:
            yield from agree_on_key(seal, os.fsdecode(path), read_only=read_only)
            fields[:] = yield from agreed_fields(_SQL, given, kept, read_only=read_only)
            recorded = yield _SQL("get_setting", "model")
            with suppress(CorruptRecord):  # what needs the model says so
                for (model,) in recorded:
                    embeddings.adopt(Model.parsed(model))

        database = SQLiteDatabase(
            path,
            SQLITE,
            begin=begin,
            synchronous=synchronous,
            read_only=read_only,
            timeout_s=timeout_s,
            factory=self._connection_class,
        )
        records = Records(seal)
        masked = _mask(seal.hash_key) if kept == "keyed" else None
        writer = Writer(_SQL, records)
        preparer = Preparer(fields, max_value_bytes, embeddings, masked)
        indexes = Indexes(
            _SQL,
            records,
            budget=index_bytes,
            approximate_above=approximate_above,
            analyse=preparer.analysed,
            derive=preparer.derived,
            made=preparer.made,
            post=None if read_only else database.post,
            erased=lambda: _clear_caches(preparer),
        )
        reader = Reader(_SQL, records)
        clock = self._clock
        super().__init__(
            Parts(
                database,
                _SQL,
                reader,
                writer,
                preparer,
                Searcher(_SQL, reader, indexes, embeddings, masked, _micros(clock)),
                Runner(database, writer, embeddings),
                ttl,
                clock,
            )
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str] = settings.CHOSEN, **options: Any) -> Self:
        """Open a database now, creating it if need be; in a running event loop, at the first use.

        Args:
            path: See the class; without one, the database of the settings, with their key: of
                `PERDURE_DB`, else `perdure.toml`, else the user's data folder.
            **options: See the class.

        Raises:
            ConfigurationError: An argument is wrong, or the folder does not exist.
            NotADatabase: The path is a folder or another application's file.
            SchemaMismatch: A newer perdure wrote the file.
            WrongKey: The key does not open it, or it needs one.
            StorageError: The file cannot be opened.
        """
        if path is settings.CHOSEN:
            chosen = settings.load()
            path, options = chosen.db, {"key": chosen.key, **options}
        store = cls(path, **options)
        store.setup()
        return store

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """Open by the name that langgraph's stores use; see `open`."""
        return cls.open(conn_string, **options)


def _micros(clock: Callable[[], float]) -> Callable[[], int]:
    return lambda: int(clock() * 1_000_000)


def _clear_caches(preparer: Preparer) -> None:
    """A vector tells of its text, and a filter may hold what it looks for."""
    clear_filters()
    preparer.clear_caches()


def _index_config(index: Any) -> Any:
    if index == "offline":
        return {"embed": StaticEmbedder(), "dims": DIMS}
    if index is not None and (not isinstance(index, Mapping) or index.get("embed") is None):
        raise ConfigurationError(
            f"index is {index!r}; expected 'offline', None, or a dict with 'embed', 'dims' and "
            "perhaps 'fields'"
        )
    return index


def _embeddings(
    config: Mapping[str, Any] | None, kind: Kind | None
) -> tuple[Embeddings, list[str] | None]:
    """The embedder, and the paths that it reads."""
    if config is None:
        return Embeddings(), None
    check_names("index", config, _INDEX)
    if config.get("distance_type", "cosine") != "cosine":
        raise ConfigurationError(
            f"index distance_type is {config['distance_type']!r}; expected 'cosine', by which "
            "vectors are always compared here"
        )
    embedder = embedder_from(config["embed"], config.get("dims"), config.get("name"))
    embed = config["embed"]
    embeddings = Embeddings(
        embedder,
        Model(embedder.name, embedder.dims or 0, kind or "int8"),
        in_process=getattr(embed, "in_process", False) is True,
        quick=embed.embed if getattr(embed, "quick", False) is True else None,
        any_kind=kind is None,
    )
    return embeddings, _fields(config)


def _fields(config: Mapping[str, Any]) -> list[str] | None:
    """The paths that are searched, by either of langgraph's names for them."""
    name = "text_fields" if config.get("fields") is None else "fields"
    fields = config.get(name)
    listed = isinstance(fields, list | tuple) or fields is None
    if not listed or not all(isinstance(path, str) and path for path in fields or ()):
        raise ConfigurationError(
            f"index {name} are {fields!r}; expected a list of paths like ['text'], or None"
        )
    return fields or None


def _mask(key: bytes) -> Callable[[str], str]:
    """Keyed hashes of words: equal for equal words, and nothing else without the key."""

    def mask(word: str) -> str:
        return hashlib.blake2b(word.encode(), digest_size=9, key=key).hexdigest()

    return mask

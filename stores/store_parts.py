"""Build the components of a store or scope: its codecs, readers, writers and search indexes.

The components of a scope interpret each namespace relative to the namespace prefix of the scope.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Self

import orjson
from langgraph.store.base import TTLConfig

from perdure.errors import CorruptRecord
from perdure.storage.database import Database
from perdure.storage.encryption import (
    ChecksumSeal,
    Seal,
    build_encryption_or_checksum_seal,
    check_key_and_bind_seal,
)
from perdure.storage.flow import Flow, NamedSQL
from perdure.stores.base import PROVENANCE, FoundItem, StoredItem
from perdure.stores.filter_sql import JSONLocation
from perdure.stores.filters import Filter, parse_filter
from perdure.stores.item_reader import ItemReader, RecordCodec, Selection, to_microseconds
from perdure.stores.item_writer import ItemWriter, Limit, PutPreparer
from perdure.stores.namespaces import check_namespace_prefix_and_build_path
from perdure.stores.operation_runner import OperationRunner
from perdure.stores.options import IndexOptions, Options, resolve_and_record_searched_json_paths
from perdure.stores.search.embedders import StoreEmbedder, embedder_from
from perdure.stores.search.index_cache import Indexes
from perdure.stores.search.vectors import Kind, Model
from perdure.stores.values import check_number, describe_part_that_is_not_json

TRANSCRIPT_PREFIX: Final = "transcript_"
"""Prefix of the names of tables with transcripts of threads, in place of `store_`."""


def add_transcript_tables_to_schema(schema_sql: str) -> str:
    """Return a schema script that creates a store's tables and the transcript tables.

    The transcript tables have the same columns as the store's tables, but searches of the store do
    not cover them.
    """
    return f"{schema_sql};\n{schema_sql.replace('store_', TRANSCRIPT_PREFIX)}"


@dataclass(frozen=True, slots=True)
class StoreParts:
    """The components of an open store or scope.

    A scope is a store that is restricted to a namespace prefix.
    """

    database: Database
    sql: NamedSQL
    reader: ItemReader
    writer: ItemWriter
    preparer: PutPreparer
    indexes: Indexes
    runner: OperationRunner
    ttl: TTLConfig | None
    clock: Callable[[], float]  # returns the current time in seconds
    # Encoded namespace prefix of the scope. The store can access only namespaces that begin with
    # this prefix.
    root: bytes = b""

    @classmethod
    def build(
        cls,
        sql: NamedSQL,
        options: Options,
        clock: Callable[[], float],
        open_database: Callable[[Callable[[], Flow[None]]], Database],
        values: JSONLocation,
    ) -> Self:
        """Build the parts of a store.

        Args:
            sql: The statements of the store.
            options: The checked options.
            clock: Returns the current time in seconds.
            open_database: A function that returns the database. It receives a function that builds
                a flow, which the database must run each time it is opened.
            values: The location of the items' JSON values, for use in SQL conditions.
        """
        seal = build_encryption_or_checksum_seal(options.key)
        word_storage = "clear" if isinstance(seal, ChecksumSeal) else options.text_index
        mask = _build_keyed_word_hasher(seal.hash_key) if word_storage == "keyed" else None
        embeddings = _build_store_embedder(options.index, options.vectors)
        index: Any = options.index or {}
        fields = index.get("fields") or index.get("text_fields")
        ttl: Any = options.ttl
        preparer = PutPreparer(
            [],
            options.max_value_bytes,
            embeddings,
            mask,
            ttl_config=ttl or {},
        )

        def prepare_database() -> Flow[None]:
            """Check the store's options against the settings recorded in the database."""
            read_only = options.read_only
            yield from check_key_and_bind_seal(
                seal, database.path, database.tenant, read_only=read_only
            )
            preparer.fields[:] = yield from resolve_and_record_searched_json_paths(
                sql, fields, word_storage, read_only=read_only
            )
            rows = yield sql("get_setting", "model")
            # A damaged model setting is ignored here, so that operations that do not need the model
            # still work. Operations that need the model raise an error.
            with suppress(CorruptRecord):
                for (model,) in rows:
                    embeddings.adopt_vector_encoding_of_file(Model.from_setting(model))

        def clear_caches() -> None:
            """Drop the cached vectors and filters after an erasure.

            They may reveal erased texts.
            """
            _parse_json_filter.cache_clear()
            if embeddings.embedder is not None:
                embeddings.embedder.clear_cache()

        database = open_database(prepare_database)
        records = RecordCodec(seal)
        reader, writer = ItemReader(sql, records, values), ItemWriter(sql, records)
        indexes = Indexes(
            reader,
            preparer,
            options.index_bytes,
            options.approximate_above,
            write_in_background=None if options.read_only else database.write_later,
            on_erasure=clear_caches,
        )
        runner = OperationRunner(database, writer)
        return cls(database, sql, reader, writer, preparer, indexes, runner, ttl, clock)

    def build_parts_limited_to_prefix(
        self, prefix: bytes, max_items: int | None, max_bytes: int | None
    ) -> Self:
        """Return the internal objects from which a scope is built.

        A scope is a store for the namespaces under one path.

        The scope cannot access namespaces outside its path. Error messages show namespaces relative
        to the scope.

        Args:
            prefix: The path of the scope.
            max_items: The maximum number of items in the scope, or None.
            max_bytes: The maximum total size of the items' JSON in bytes, or None.

        Raises:
            ConfigurationError: A limit is not an integer, 0 or more.
        """
        for name, limit in (("max_items", max_items), ("max_bytes", max_bytes)):
            if limit is not None:
                check_number(name, limit, "an integer, or None", integer=True)
        limits = self.preparer.limits
        if (max_items, max_bytes) != (None, None):
            limits += (Limit(prefix, max_items, max_bytes),)
        records = replace(self.records, root=len(prefix))
        writer = replace(self.writer, records=records)
        return replace(
            self,
            reader=replace(self.reader, records=records),
            writer=writer,
            runner=OperationRunner(self.database, writer),
            preparer=replace(self.preparer, root=prefix, limits=limits),
            root=prefix,
        )

    def build_parts_for_table_prefix(
        self, table_prefix: str, database: Database, seal: Seal
    ) -> Self:
        """Return the components of a store whose table names begin with `table_prefix`.

        The tables with the given prefix must have the same columns as the `store_` tables. Items in
        the tables with the given prefix have no embeddings, so only keyword search finds them.

        Args:
            table_prefix: The prefix of the table names that replaces `store_`.
            database: The database with these tables. It may belong to another component.
            seal: Encrypts the values that are stored in these tables.
        """
        sql = NamedSQL(
            {name: text.replace("store_", table_prefix) for name, text in self.sql.items()}
        )
        records = RecordCodec(seal)
        reader, writer = ItemReader(sql, records, self.reader.values), ItemWriter(sql, records)
        preparer = PutPreparer(["text"], self.preparer.max_bytes, StoreEmbedder())
        indexes = Indexes(
            reader,
            preparer,
            self.indexes.budget,
            self.indexes.approximate_above,
            write_in_background=None if database.read_only else database.write_later,
            # This store has no embedder, so its index is the only cache that contains parts of
            # texts. No other cache needs to be cleared after an erasure.
            on_erasure=lambda: None,
        )
        return type(self)(
            database,
            sql,
            reader,
            writer,
            preparer,
            indexes,
            OperationRunner(database, writer),
            None,
            self.clock,
        )

    def now(self) -> int:
        """Return the current time in microseconds."""
        return int(self.clock() * 1_000_000)

    @property
    def records(self) -> RecordCodec:
        """The codec of rows."""
        return self.reader.records

    def resolve_prefix(self, prefix: Any) -> bytes:
        """Return the full path of a namespace prefix that is given relative to the scope."""
        return self.root + check_namespace_prefix_and_build_path(prefix)

    def build_item_selection(
        self,
        prefix: Any,
        filter: Any = None,
        provenance: Any = None,
        as_of: Any = None,
        newest_first: bool = False,
    ) -> Selection:
        """Build the selection criteria for a read or a search.

        Args:
            prefix: The namespace prefix.
            filter: A filter on values.
            provenance: A filter on provenance.
            as_of: A past time, or None for the current time.
            newest_first: Whether items are ordered newest first within a namespace.
        """
        return Selection(
            self.resolve_prefix(prefix),
            self.now(),
            None if filter is None else _parse_filter_cached(filter),
            None if provenance is None else _parse_filter_cached(provenance, PROVENANCE),
            None if as_of is None else to_microseconds(as_of),
            newest_first,
        )

    def restart_ttls_of_read_items(
        self, items: Iterable[StoredItem | FoundItem], refresh_ttl: bool | None
    ) -> None:
        """Restart the TTLs of items that were read, unless this is disabled.

        In a read-only store, reading an item does not restart its TTL. The `refresh_ttl` argument
        takes precedence over the store's option `refresh_on_read`. By default, reading an item
        restarts its TTL, as in langgraph's stores.
        """
        if refresh_ttl is None:
            refresh_ttl = (self.ttl or {}).get("refresh_on_read", True)
        if not refresh_ttl:
            return
        keys = [
            (self.resolve_prefix(item.namespace), item.key) for item in items if item.expires_at
        ]
        if keys and not self.database.read_only:
            self.database.write(lambda: self.writer.restart_ttls(keys, self.now))


def _parse_filter_cached(filter: Any, fields: tuple[str, ...] | None = None) -> Filter | None:
    """Parse a caller's filter, or return None if the filter is an empty dict.

    If the filter can be encoded as JSON, cache the parsed filter. `fields` are the fields to which
    the filter can refer, or None for any.
    """
    if filter == {}:
        return None
    try:
        text = None if describe_part_that_is_not_json(filter) else orjson.dumps(filter)
    # `orjson` raises TypeError if the filter contains lone surrogates or an integer that needs more
    # than 64 bits.
    except TypeError:
        text = None
    return parse_filter(filter, fields) if text is None else _parse_json_filter(text, fields)


@lru_cache(maxsize=256)
def _parse_json_filter(text: bytes, fields: tuple[str, ...] | None) -> Filter:
    """Parse a filter from its JSON.

    Parsed filters are cached, because an agent usually reuses the same few filters.
    """
    return parse_filter(orjson.loads(text), fields)


def _build_store_embedder(
    index_options: IndexOptions | None, vector_kind: Kind | None
) -> StoreEmbedder:
    """Create a store's embedder from the store's options."""
    if index_options is None:
        return StoreEmbedder()
    embed = index_options["embed"]
    embedder = embedder_from(embed, index_options.get("dims"), index_options.get("name"))
    return StoreEmbedder(
        embedder,
        Model(embedder.name, embedder.dims or 0, vector_kind or "int8"),
        in_process=getattr(embed, "in_process", False) is True,
        embed_quickly=embed.embed if getattr(embed, "quick", False) is True else None,
        accepts_any_kind=vector_kind is None,
    )


def _build_keyed_word_hasher(secret_key: bytes) -> Callable[[str], str]:
    """Return a function that computes the keyed hash of a word.

    Equal words have equal hashes. Without the key, hashes reveal only which words are equal.
    """

    def mask_word(word: str) -> str:
        return hashlib.blake2b(word.encode(), digest_size=9, key=secret_key).hexdigest()

    return mask_word

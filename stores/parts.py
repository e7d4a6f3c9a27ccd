"""Build a store's components, and run store operations for both blocking and async callers.

The options of a store are checked before its database is opened. When the database is opened, the
options are compared with the settings recorded in it.

A put is implemented as a coroutine that awaits effects (see `perdure.effects`). An effect is a step
that blocking and async callers perform in different ways. The coroutine awaits a separate effect
for each read, write and embedder call. A database snapshot is held open only while reading, never
while waiting for the embedder. Store reads are blocking calls. A coroutine runs a store read in a
thread of the reading pool.

Requests that coroutines make in the same event loop iteration are executed as one batch. Batching
saves time, because switching to another thread and back costs more than a small read, and a
transaction costs more than a small write.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import call
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, Required, Self, TypeVar
from weakref import WeakKeyDictionary

import orjson
from langgraph.store.base import NotProvided, PutOp, TTLConfig
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, with_config
from typing_extensions import TypedDict

from perdure.effects import Effect, Operation, arun_operation, run_operation
from perdure.errors import ConfigurationError, CorruptRecord, PerdureError
from perdure.storage.database import Database
from perdure.storage.encryption import (
    ChecksumSeal,
    Seal,
    build_encryption_or_checksum_seal,
    check_key_and_bind_seal,
)
from perdure.storage.flow import Flow, NamedSQL
from perdure.storage.threads import Promise, resolve_futures_in_this_thread
from perdure.stores.base import PROVENANCE, TTL, FoundItem, Provenance, PutItem, StoredItem
from perdure.stores.embedders import StoreEmbedder, embedder_from
from perdure.stores.filter_sql import JSONLocation
from perdure.stores.filters import Filter, parse_filter
from perdure.stores.indexes import Indexes
from perdure.stores.namespaces import check_namespace_prefix_and_build_path
from perdure.stores.puts import IndexOption, ItemWriter, Limit, Put, PutPreparer
from perdure.stores.reading import ItemReader, RecordCodec, Selection, to_microseconds
from perdure.stores.text import ANALYZER
from perdure.stores.values import (
    WHOLE,
    build_unknown_name_hint,
    check_number,
    describe_part_that_is_not_json,
    parse_stored_setting,
)
from perdure.stores.vectors import Kind, Model

T = TypeVar("T")
# maximum number of requests in a batch; the results of a batch are delivered together, so a larger
# batch would delay the result of its first request
_MAX_BATCH = 16
# a request submitted by a coroutine, and the `Promise` that receives its result
_Request = tuple[Any, Promise[Any]]
# How an encrypted store protects the words in its stored search indexes: by encrypting the indexes
# only, or by also replacing each word with a keyed hash.
TextIndex = Literal["sealed", "keyed"]
TRANSCRIPT_PREFIX: Final = "transcript_"
"""Prefix of the names of tables with transcripts of threads, in place of `store_`."""
# name of the setting that records how words are stored ("clear", "sealed" or "keyed")
_WORDS_SETTING: Final = "words"
_WORD_STORAGE: Final = ("clear", "sealed", "keyed")

# Number type for pydantic models. Plain `float` is not used, because pydantic would also accept
# Fraction and Decimal objects for it.
_Number = int | InstanceOf[float]
_Minutes = Annotated[_Number, Field(gt=0, lt=math.inf)]
_Natural = Annotated[int, Field(ge=0)]
_Path = Annotated[str, Field(min_length=1)]
_Paths = list[_Path] | tuple[_Path, ...]
_STRICT: Final = ConfigDict(strict=True, extra="forbid")
_MINUTES: Final = "minutes, more than zero, or None"
_PATHS: Final = "a list of paths like ['text'], or None"
_BOOLEAN: Final = "True or False"
_EXPECTED: Final = {
    "index": "'offline', None, or a dict with 'embed'",
    "key": "16, 24 or 32 bytes, as bytes or as hexadecimal text, or None",
    "ttl": "a dict like {'default_ttl': 60}, in minutes, or None",
    "default_ttl": _MINUTES,
    "sweep_interval_minutes": _MINUTES,
    "refresh_on_read": _BOOLEAN,
    "omit_expired": _BOOLEAN,
    "read_only": _BOOLEAN,
    "fields": _PATHS,
    "text_fields": _PATHS,
    "vectors": "'float32', 'float16', 'int8' or None",
    "approximate_above": "a number of vectors, 0 or more",
    "index_bytes": "a number of bytes, 0 or more",
    "max_value_bytes": "a number of bytes, 1 or more",
    "timeout_s": "seconds, 0 to 2,000,000",
}


@with_config(_STRICT)
class TTLOptions(TypedDict, total=False):
    """TTL options, as in langgraph's `TTLConfig`."""

    default_ttl: _Minutes | None
    refresh_on_read: bool
    # accepted for compatibility but ignored, because perdure never returns expired items
    omit_expired: bool
    sweep_interval_minutes: _Minutes | None


@with_config(_STRICT)
class IndexOptions(TypedDict, total=False):
    """The options of the search index.

    The options are those of langgraph's `IndexConfig` and the arguments of `embedder_from`.
    """

    embed: Required[Any]
    dims: Any
    fields: _Paths | None
    name: Any
    text_fields: _Paths | None
    distance_type: Literal["cosine"]


class Options(BaseModel):
    """The validated options of a store, including those of its database."""

    model_config = _STRICT

    index: IndexOptions | None
    ttl: TTLOptions | None
    key: bytes | str | None
    text_index: TextIndex
    vectors: Kind | None
    approximate_above: _Natural
    index_bytes: _Natural
    max_value_bytes: Annotated[int, Field(ge=1)]
    read_only: bool
    # SQLite stores the timeout in milliseconds as a 32-bit integer
    timeout_s: Annotated[_Number, Field(ge=0, le=2_000_000)]


def check_store_options(**options: Any) -> Options:
    """Check the options of a store.

    Raises:
        ConfigurationError: An option has a wrong value.
    """
    options = {name: dict(v) if isinstance(v, Mapping) else v for name, v in options.items()}
    try:
        return Options(**options)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
    option, *subkeys = error["loc"]
    name, value = str(option), options[str(option)]
    if error["type"] in ("extra_forbidden", "invalid_key"):
        allowed = {"ttl": TTLOptions, "index": IndexOptions}[name].__annotations__
        raise ConfigurationError(
            f"the argument {name!r} has the unknown setting {subkeys[0]!r}; "
            f"{build_unknown_name_hint(subkeys[0], allowed)}"
        )
    setting = name
    if name in ("index", "ttl") and subkeys and subkeys[0] in value:
        setting = str(subkeys[0])
        name, value = f"{name} {setting}", value[setting]
    description = f"of type {type(value).__name__}" if name == "key" else f"{value!r:.80}"
    expected = _EXPECTED.get(setting, error["msg"].removeprefix("Input should be "))
    raise ConfigurationError(f"the option {name!r} is {description}; expected {expected}")


# -- recorded settings


def resolve_and_record_searched_json_paths(
    sql: NamedSQL, chosen_paths: Sequence[str] | None, word_storage: str, *, read_only: bool
) -> Flow[list[str]]:
    """Return the JSON paths whose text is searched, and record them in the database.

    JSON paths passed by the caller override the paths recorded in the database. If the stored
    indexes were built with other paths or another analyzer, they are dropped, and the next search
    builds them again.

    Args:
        sql: The statements of the store.
        chosen_paths: The paths passed by the caller, or None.
        word_storage: How words are stored: "clear", "sealed" or "keyed".
        read_only: Whether the database is read-only, so that nothing is recorded.

    Raises:
        ConfigurationError: The file stores words in another way.
    """
    rows = yield sql("get_setting", _WORDS_SETTING)
    recorded_words = (
        parse_stored_setting(_WORDS_SETTING, rows[0][0], _is_valid_word_storage_setting)
        if rows
        else None
    )
    if recorded_words is not None and recorded_words["kept"] != word_storage:
        raise ConfigurationError(
            f"this file was created with text_index={recorded_words['kept']!r}, but was opened "
            f"with text_index={word_storage!r}; open it with text_index={recorded_words['kept']!r}"
        )
    fields = list(chosen_paths or (recorded_words["fields"] if recorded_words else (WHOLE,)))
    wanted_words = {"analyzer": ANALYZER, "fields": fields, "kept": word_storage}
    if recorded_words != wanted_words and not read_only:
        yield sql("set_setting", _WORDS_SETTING, json.dumps(wanted_words))
        if recorded_words is not None:
            yield sql("drop_search_indexes")
            yield sql("increment_setting", "erasures")
    return fields


def _is_valid_word_storage_setting(setting: dict[str, Any]) -> bool:
    """Return whether the recorded setting that specifies how words are stored is valid."""
    fields = setting.get("fields")
    return (
        setting.get("kept") in _WORD_STORAGE
        and isinstance(fields, list)
        and bool(fields)
        and all(isinstance(path, str) and path for path in fields)
    )


# -- the parts


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
    # function that returns the current time in microseconds
    now: Callable[[], int]
    # Encoded namespace prefix of the scope. The store can access only namespaces that begin with
    # this prefix.
    root: bytes = b""

    @classmethod
    def build(
        cls,
        sql: NamedSQL,
        options: Options,
        now: Callable[[], int],
        open_database: Callable[[Callable[[], Flow[None]]], Database],
        values: JSONLocation,
    ) -> Self:
        """Build the parts of a store.

        Args:
            sql: The statements of the store.
            options: The checked options.
            now: Returns the current time in microseconds.
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
        preparer = PutPreparer([], options.max_value_bytes, embeddings, mask)

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
                    embeddings.adopt_encoding(Model.from_setting(model))

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
        ttl: Any = options.ttl
        return cls(database, sql, reader, writer, preparer, indexes, runner, ttl, now)

    def build_parts_limited_to_prefix(
        self, prefix: bytes, max_items: int | None, max_bytes: int | None
    ) -> Self:
        """Return the components of a scope that is restricted to the namespaces under a path.

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

        The tables must have the same columns as this store's own tables, whose names begin with
        `store_`. Items in these tables have no embeddings, so they can be searched only by keyword.

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
        runner = OperationRunner(database, writer)
        return type(self)(database, sql, reader, writer, preparer, indexes, runner, None, self.now)

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
            _parse_filter_cached(filter, of_provenance=False),
            _parse_filter_cached(provenance, of_provenance=True),
            None if as_of is None else to_microseconds(as_of),
            newest_first,
        )

    def prepare_put(
        self,
        row_key: tuple[bytes, str],
        value: Any,
        index: IndexOption,
        ttl: TTL,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> Put:
        """Validate and encode a put (or a delete, if the value is None).

        See `PutPreparer.prepare_put`.
        """
        if isinstance(ttl, NotProvided):
            ttl = (self.ttl or {}).get("default_ttl")
        return self.preparer.prepare_put(row_key, value, index, ttl, if_version, provenance)

    def prepare_puts(self, ops: Iterable[PutOp | PutItem]) -> list[Put]:
        """Validate and encode puts and deletes.

        If several operations have the same key, only the last one is applied.
        """
        last_op = {self.preparer.check_row_key(op.namespace, op.key): op for op in ops}
        return [
            self.prepare_put(
                row_key,
                op.value,
                op.index,
                op.ttl,
                *((op.if_version, op.provenance) if isinstance(op, PutItem) else ()),
            )
            for row_key, op in last_op.items()
        ]

    def restart_ttls_of_read_items(
        self, items: Iterable[StoredItem | FoundItem], refresh_ttl: bool | None
    ) -> None:
        """Restart the TTLs of items that were read, unless this is disabled.

        If the store is read-only, nothing is restarted. The `refresh_ttl` argument takes precedence
        over the store's option `refresh_on_read`. By default, reading an item restarts its TTL, as
        in langgraph's stores.
        """
        if refresh_ttl is None:
            refresh_ttl = (self.ttl or {}).get("refresh_on_read", True)
        if not refresh_ttl or self.database.read_only:
            return
        keys = [
            (self.resolve_prefix(item.namespace), item.key) for item in items if item.expires_at
        ]
        if keys:
            self.database.write(lambda: self.writer.restart_ttls(keys, self.now))


def _parse_filter_cached(filter: Any, *, of_provenance: bool) -> Filter | None:
    """Parse a caller's filter. If the filter can be encoded as JSON, cache the parsed filter."""
    if filter is None or filter == {}:
        return None
    try:
        text = None if describe_part_that_is_not_json(filter) else orjson.dumps(filter)
    # `orjson` raises TypeError if the filter contains lone surrogates or an integer that needs more
    # than 64 bits.
    except TypeError:
        text = None
    fields = PROVENANCE if of_provenance else None
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


# -- running operations


class ReadingThreadCaller(Protocol):
    """The interface of a function that runs a call in a thread of the reading pool."""

    def __call__(self, make: Callable[[], T], /) -> asyncio.Future[T]:
        """Start the call, and return a future for its result."""


class _WriteRequest(NamedTuple):
    """Puts and deletes from a single caller, which are written atomically."""

    puts: Sequence[Put]
    now: int
    model: Model | None


class OperationRunner:
    """Runs store operations, which are implemented as coroutines that await effects.

    An effect is a step, such as a database write, that blocking and async callers perform in
    different ways. The methods `run_read_flow`, `run_write_flow` and `write_puts` return effects.
    """

    def __init__(self, database: Database, writer: ItemWriter) -> None:
        self.database, self.writer = database, writer
        self.call_reader: ReadingThreadCaller = CallBatcher(
            database.run_in_thread, _run_batched_calls_and_resolve_promises
        ).submit
        self._puts = CallBatcher(call, self._write_requests_in_one_transaction)

    def run(self, operation: Operation[T]) -> T:
        """Run an operation in the calling thread."""
        with closing(operation):
            # Open the database before running the operation. Opening it loads the searched JSON
            # paths, which are needed to prepare a put.
            self.database.connect()
            return run_operation(operation)

    async def arun(self, operation: Operation[T], *, computes_in_thread: bool = False) -> T:
        """Run an operation from a coroutine.

        Args:
            operation: The operation.
            computes_in_thread: Whether the code between effects runs in a thread of the reading
                pool.
        """
        try:
            await self.database.aconnect()
        except BaseException:
            operation.close()
            raise
        return await arun_operation(operation, self.call_reader if computes_in_thread else None)

    def call_in_thread(self, call: Callable[[], T]) -> Effect[T]:
        """Return the effect of a slow call.

        In blocking code, `call` is called directly. In a coroutine, `call` runs in a thread of the
        reading pool.
        """
        return Effect(call, lambda: self.call_reader(call))

    def run_read_flow(self, make_flow: Callable[[], Flow[T]]) -> Effect[T]:
        """Return an effect that runs a flow's SELECT statements on a single database snapshot."""
        return self.call_in_thread(lambda: self.database.read(make_flow))

    def run_write_flow(self, make_flow: Callable[[], Flow[T]]) -> Effect[T]:
        """Return an effect that runs all statements of an SQL flow in a single transaction."""
        return Effect(
            lambda: self.database.write(make_flow), lambda: self.database.awrite(make_flow)
        )

    def write_puts(self, puts: Sequence[Put], now: int, model: Model | None) -> Effect[None]:
        """Return an effect that stores puts and deletes in a single transaction.

        Args:
            puts: The puts and deletes.
            now: The current time in microseconds.
            model: The embedding model to record in the database, or None if there are no vectors.
        """
        request = _WriteRequest(puts, now, model)
        # Puts with conditions can fail, so they do not share a transaction with other callers.
        is_separate = not all(put.is_unconditional for put in puts)
        return Effect(
            lambda: self._write_puts_serialized_by_namespace(self.database.write, request),
            lambda: (
                self._write_puts_serialized_by_namespace(self.database.awrite, request)
                if is_separate
                else self._puts.submit(request)
            ),
        )

    def _write_puts_serialized_by_namespace(
        self, database_write: Callable[..., Any], request: _WriteRequest
    ) -> Any:
        """Write a request's puts with `Database.write` or `Database.awrite`.

        Writes to the same namespace, or to scopes that share a limit, are serialized.
        """
        puts = request.puts
        paths = {put.path for put in puts} | {limit.prefix for put in puts for limit in put.limits}
        return database_write(
            partial(self.writer.write_puts, *request),
            exclusive_names=[path.hex() for path in paths],
            deletes_rows=all(put.text is None for put in puts),
        )

    async def _write_requests_in_one_transaction(self, requests: list[_Request]) -> None:
        """Write the requests of several callers in a single transaction.

        All puts are unconditional (they have no required version and no limits), so only a database
        error can make them fail. If the transaction fails, or if two puts have the same key, each
        request runs in its own transaction, so that one caller's request cannot make another
        caller's request fail.
        """
        batch: list[_WriteRequest] = [puts for puts, _ in requests]
        puts = [put for request in batch for put in request.puts]
        model = next((request.model for request in batch if request.model is not None), None)
        write, errors = (
            partial(self._write_puts_serialized_by_namespace, self.database.awrite),
            [None] * len(batch),
        )
        is_one_transaction = len({(put.path, put.key) for put in puts}) == len(puts)
        if is_one_transaction:
            try:
                await write(_WriteRequest(puts, max(request.now for request in batch), model))
            except Exception:
                if len(batch) == 1:
                    raise
                is_one_transaction = False
        if not is_one_transaction:
            errors = await asyncio.gather(*map(write, batch), return_exceptions=True)
        for (_, promise), error in zip(requests, errors, strict=True):
            promise.result, promise.error = None, error


class CallBatcher:
    """Batches the requests that coroutines submit in the same event loop iteration.

    Args:
        start: Starts a call and returns an awaitable.
        run: Runs a batch and sets the results of its promises.
    """

    def __init__(
        self,
        start: Callable[[Callable[[], Any]], Awaitable[None]],
        run: Callable[[list[_Request]], Any],
    ) -> None:
        self._start, self._run = start, run
        self._open_batches: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Request]] = (
            WeakKeyDictionary()
        )

    def submit(self, request: Any) -> asyncio.Future[Any]:
        """Add a request to the current batch, and return a future for its result."""
        loop = asyncio.get_running_loop()
        batch = self._open_batches.get(loop)
        if batch is None or len(batch) == _MAX_BATCH:
            batch = self._open_batches[loop] = []
            loop.call_soon(self._run_batch, loop, batch)
        promise: Promise[Any] = Promise(is_async=True)
        batch.append((request, promise))
        return promise.future  # type: ignore[return-value]

    def _run_batch(self, loop: asyncio.AbstractEventLoop, batch: list[_Request]) -> None:
        """Run the requests collected in one iteration of the event loop.

        Cancelled requests are left out.
        """
        if self._open_batches.get(loop) is batch:
            del self._open_batches[loop]
        batch = [request for request in batch if request[1].start_unless_cancelled()]
        if not batch:
            return
        future: asyncio.Future[None]
        try:
            future = asyncio.ensure_future(self._start(partial(self._run, batch)))
        except PerdureError as exc:
            future = loop.create_future()
            future.set_exception(exc)
        future.add_done_callback(partial(_resolve_futures_of_finished_batch, batch))


def _resolve_futures_of_finished_batch(
    batch: list[_Request], batch_future: asyncio.Future[None]
) -> None:
    """Set the results and errors of a finished or failed batch on its futures."""
    error = asyncio.CancelledError() if batch_future.cancelled() else batch_future.exception()
    for _, promise in batch:
        promise.error = error or promise.error
    resolve_futures_in_this_thread([promise for _, promise in batch])


def _run_batched_calls_and_resolve_promises(batch: list[_Request]) -> None:
    """Run the calls of a batch one after another, and store each result in the call's `Promise`.

    Cancelled calls are left out.
    """
    for make, promise in batch:
        try:
            promise.result = make() if promise.start_unless_cancelled() else None
        except BaseException as exc:
            promise.error = exc

"""The options of a store, the parts that are made of them, and what these wait for.

Options are checked before any file is opened, and agreed upon with the file.

A put is an operation of `perdure.effects`: it reads, writes and embeds by effects, so it holds no
snapshot while a model is waited for. What only reads is a call, made in a reading thread if a
coroutine asks.

What coroutines ask for in one turn of an event loop is done together: a hop to a thread and back
costs more than a small read, and a transaction more than a small write.
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

from perdure.effects import Effect, Operation, arun, run
from perdure.errors import ConfigurationError, CorruptRecord, PerdureError
from perdure.storage.database import Database
from perdure.storage.encryption import ChecksumSeal, Seal, bind_seal, build_seal
from perdure.storage.flow import Flow, NamedSQL
from perdure.storage.threads import Promise, set_outcomes
from perdure.stores.base import PROVENANCE, TTL, FoundItem, PutItem, StoredItem
from perdure.stores.embedders import StoreEmbedder, embedder_from
from perdure.stores.filter_sql import JSONPlace
from perdure.stores.filters import Filter, parse
from perdure.stores.indexes import Indexes
from perdure.stores.namespaces import check_prefix
from perdure.stores.puts import Index, ItemWriter, Limit, Preparer, Put
from perdure.stores.reading import ItemReader, Records, Selection, micros
from perdure.stores.text import ANALYZER
from perdure.stores.values import (
    WHOLE,
    check_number,
    describe_invalid_part,
    parse_setting,
    suggest_name,
)
from perdure.stores.vectors import Kind, Model

T = TypeVar("T")
_TOGETHER = 16  # calls in one hop: the first waits for the last
_Ask = tuple[Any, Promise[Any]]  # what a coroutine asks for, and its answer
TextIndex = Literal["sealed", "keyed"]
TRANSCRIPT_PREFIX: Final = "transcript_"
"""What the names of tables begin with that hold what was said in threads, instead of `store_`."""
_WORDS: Final = "words"  # the setting that says how words are kept
_KEPT: Final = ("clear", "sealed", "keyed")

_Number = int | InstanceOf[float]  # `float` alone takes fractions and decimals too
_Minutes = Annotated[_Number, Field(gt=0, lt=math.inf)]
_Natural = Annotated[int, Field(ge=0)]
_Path = Annotated[str, Field(min_length=1)]
_Paths = list[_Path] | tuple[_Path, ...]
_STRICT: Final = ConfigDict(strict=True, extra="forbid")
_MINUTES: Final = "minutes, more than zero, or None"
_PATHS: Final = "a list of paths like ['text'], or None"
_TRUTH: Final = "True or False"
_EXPECTED: Final = {
    "index": "'offline', None, or a dict with 'embed'",
    "key": "16, 24 or 32 bytes, as many in hexadecimal, or None",
    "ttl": "a dict like {'default_ttl': 60}, in minutes, or None",
    "default_ttl": _MINUTES,
    "sweep_interval_minutes": _MINUTES,
    "refresh_on_read": _TRUTH,
    "omit_expired": _TRUTH,
    "read_only": _TRUTH,
    "fields": _PATHS,
    "text_fields": _PATHS,
    "vectors": "'float32', 'float16', 'int8' or None",
    "approximate_above": "a whole number of vectors, zero or more",
    "index_bytes": "a whole number of bytes, zero or more",
    "max_value_bytes": "a whole number of bytes, 1 or more",
    "timeout_s": "seconds, 0 to 2,000,000",
}


@with_config(_STRICT)
class TTLOptions(TypedDict, total=False):
    """Langgraph's `TTLConfig`."""

    default_ttl: _Minutes | None
    refresh_on_read: bool
    omit_expired: bool  # what has expired is never returned here
    sweep_interval_minutes: _Minutes | None


@with_config(_STRICT)
class IndexOptions(TypedDict, total=False):
    """Langgraph's `IndexConfig`, with what its SQLite store and `embedder_from` take."""

    embed: Required[Any]
    dims: Any
    fields: _Paths | None
    name: Any
    text_fields: _Paths | None
    distance_type: Literal["cosine"]


class Options(BaseModel):
    """The options of a store, and those of its database that it needs to know."""

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
    timeout_s: Annotated[_Number, Field(ge=0, le=2_000_000)]  # SQLite: milliseconds in 32 bits


def options_of(**given: Any) -> Options:
    """The options, checked.

    Raises:
        ConfigurationError: One of them is wrong.
    """
    given = {name: dict(v) if isinstance(v, Mapping) else v for name, v in given.items()}
    try:
        return Options(**given)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
    option, *within = error["loc"]
    name, value = str(option), given[str(option)]
    if error["type"] in ("extra_forbidden", "invalid_key"):
        known = {"ttl": TTLOptions, "index": IndexOptions}[name].__annotations__
        raise ConfigurationError(
            f"{name} has the unknown setting {within[0]!r}; {suggest_name(within[0], known)}"
        )
    setting = name
    if name in ("index", "ttl") and within and within[0] in value:
        setting = str(within[0])
        name, value = f"{name} {setting}", value[setting]
    shown = f"of type {type(value).__name__}" if name == "key" else f"{value!r:.80}"
    expected = _EXPECTED.get(setting, error["msg"].removeprefix("Input should be "))
    raise ConfigurationError(f"{name} is {shown}; expected {expected}")


# -- what a file records


def agreed_fields(
    sql: NamedSQL, chosen: Sequence[str] | None, kept: str, *, read_only: bool
) -> Flow[list[str]]:
    """The paths that items of a file are searched by, unless a put names others.

    Those given count, else those recorded. If words were made in another way they are dropped, and
    the next search makes them anew.
    """
    rows = yield sql("get_setting", _WORDS)
    recorded_words = parse_setting(_WORDS, rows[0][0], _says_how_words_are_kept) if rows else None
    if recorded_words is not None and recorded_words["kept"] != kept:
        raise ConfigurationError(
            f"this file keeps words {recorded_words['kept']!r}, not {kept!r}: open it with "
            f"text_index={recorded_words['kept']!r}"
        )
    fields = list(chosen or (recorded_words["fields"] if recorded_words else (WHOLE,)))
    words = {"analyzer": ANALYZER, "fields": fields, "kept": kept}
    if recorded_words != words and not read_only:
        yield sql("set_setting", _WORDS, json.dumps(words))
        if recorded_words is not None:
            yield sql("drop_indexes")
            yield sql("bump_setting", "erasures")
    return fields


def _says_how_words_are_kept(words: dict[str, Any]) -> bool:
    fields = words.get("fields")
    return (
        words.get("kept") in _KEPT
        and isinstance(fields, list)
        and bool(fields)
        and all(isinstance(path, str) and path for path in fields)
    )


# -- the parts


def with_said(script: str) -> str:
    """The tables of a store, and those of what was said, which no search of the store sees."""
    return f"{script};\n{script.replace('store_', TRANSCRIPT_PREFIX)}"


@dataclass(frozen=True, slots=True)
class StoreParts:
    """The parts of an open store, or of the part of it under a prefix."""

    database: Database
    sql: NamedSQL
    reader: ItemReader
    writer: ItemWriter
    preparer: Preparer
    indexes: Indexes
    runner: Runner
    ttl: TTLConfig | None
    now: Callable[[], int]  # in microseconds
    root: bytes = b""  # the path that all namespaces are under

    @classmethod
    def build(
        cls,
        sql: NamedSQL,
        options: Options,
        now: Callable[[], int],
        database_of: Callable[[Callable[[], Flow[None]]], Database],
        values: JSONPlace,
    ) -> Self:
        """Make the parts; `database_of` is given what to run whenever the database is opened."""
        seal = build_seal(options.key)
        kept = "clear" if isinstance(seal, ChecksumSeal) else options.text_index
        masked = _mask(seal.hash_key) if kept == "keyed" else None
        embeddings = _embeddings(options.index, options.vectors)
        index: Any = options.index or {}
        chosen = index.get("fields") or index.get("text_fields")
        preparer = Preparer([], options.max_value_bytes, embeddings, masked)

        def begin() -> Flow[None]:
            read_only = options.read_only
            yield from bind_seal(seal, database.path, database.tenant, read_only=read_only)
            preparer.fields[:] = yield from agreed_fields(sql, chosen, kept, read_only=read_only)
            rows = yield sql("get_setting", "model")
            with suppress(CorruptRecord):  # what needs the model says so
                for (model,) in rows:
                    embeddings.adopt(Model.from_setting(model))

        def erased() -> None:  # a vector tells of its text, a filter may hold what it looks for
            _parsed.cache_clear()
            if embeddings.embedder is not None:
                embeddings.embedder.clear_cache()

        database = database_of(begin)
        records = Records(seal)
        reader, writer = ItemReader(sql, records, values), ItemWriter(sql, records)
        indexes = Indexes(
            reader,
            preparer,
            options.index_bytes,
            options.approximate_above,
            post=None if options.read_only else database.write_later,
            erased=erased,
        )
        runner = Runner(database, writer)
        ttl: Any = options.ttl
        return cls(database, sql, reader, writer, preparer, indexes, runner, ttl, now)

    def scope_to(self, prefix: bytes, max_items: int | None, max_bytes: int | None) -> Self:
        """The same under a path: nothing outside it can be named, and messages leave it out."""
        for name, most in (("max_items", max_items), ("max_bytes", max_bytes)):
            if most is not None:
                check_number(name, most, "a whole number, or None", whole=True)
        limits = self.preparer.limits
        if (max_items, max_bytes) != (None, None):
            limits += (Limit(prefix, max_items, max_bytes),)
        records = replace(self.records, root=len(prefix))
        writer = replace(self.writer, records=records)
        return replace(
            self,
            reader=replace(self.reader, records=records),
            writer=writer,
            runner=Runner(self.database, writer),
            preparer=replace(self.preparer, root=prefix, limits=limits),
            root=prefix,
        )

    def for_other_tables(self, tables: str, database: Database, seal: Seal) -> Self:
        """Those of other tables, whose names begin with `tables`: of what is found by its words.

        Args:
            tables: In place of `store_`.
            database: That of these tables, or another component's in the same place.
            seal: Seals what is put.
        """
        sql = NamedSQL({name: text.replace("store_", tables) for name, text in self.sql.items()})
        records = Records(seal)
        reader, writer = ItemReader(sql, records, self.reader.values), ItemWriter(sql, records)
        preparer = Preparer(["text"], self.preparer.max_bytes, StoreEmbedder())
        indexes = Indexes(
            reader,
            preparer,
            self.indexes.budget,
            self.indexes.approximate_above,
            post=None if database.read_only else database.write_later,
            erased=lambda: None,  # nothing else keeps parts of a text
        )
        runner = Runner(database, writer)
        return type(self)(database, sql, reader, writer, preparer, indexes, runner, None, self.now)

    @property
    def records(self) -> Records:
        """The reader of rows."""
        return self.reader.records

    def resolve_prefix(self, prefix: Any) -> bytes:
        """The path of a prefix that a caller names."""
        return self.root + check_prefix(prefix)

    def build_selection(
        self,
        prefix: Any,
        filter: Any = None,
        provenance: Any = None,
        as_of: Any = None,
        newest_first: bool = False,
    ) -> Selection:
        """The items that a call selects."""
        return Selection(
            self.resolve_prefix(prefix),
            self.now(),
            _filter(filter, of_provenance=False),
            _filter(provenance, of_provenance=True),
            None if as_of is None else micros(as_of),
            newest_first,
        )

    def prepare_put(
        self, place: tuple[bytes, str], value: Any, index: Index, ttl: TTL, *extra: Any
    ) -> Put:
        """A put or, with a value of None, a delete; see `Preparer.put`."""
        if isinstance(ttl, NotProvided):
            ttl = (self.ttl or {}).get("default_ttl")
        return self.preparer.put(place, value, index, ttl, *extra)

    def prepare_batch(self, ops: Iterable[PutOp | PutItem]) -> list[Put]:
        """Puts and deletes, checked; of one key, the last counts."""
        last = {self.preparer.place(op.namespace, op.key): op for op in ops}
        return [
            self.prepare_put(
                place,
                op.value,
                op.index,
                op.ttl,
                *((op.if_version, op.provenance) if isinstance(op, PutItem) else ()),
            )
            for place, op in last.items()
        ]

    def restart_ttl(
        self, items: Iterable[StoredItem | FoundItem], refresh_ttl: bool | None
    ) -> None:
        """Restart the time to live of items that were read, unless that is turned off.

        The argument of the call decides, otherwise the configuration. The default is on, as in
        langgraph's stores.
        """
        if refresh_ttl is None:
            refresh_ttl = (self.ttl or {}).get("refresh_on_read", True)
        if not refresh_ttl or self.database.read_only:
            return
        keys = [
            (self.resolve_prefix(item.namespace), item.key) for item in items if item.expires_at
        ]
        if keys:
            self.database.write(lambda: self.writer.touch(keys, self.now))


def _filter(filter: Any, *, of_provenance: bool) -> Filter | None:
    if filter is None or filter == {}:
        return None
    try:
        form = None if describe_invalid_part(filter) else orjson.dumps(filter)
    except TypeError:  # no Unicode text, or a wide integer
        form = None
    fields = PROVENANCE if of_provenance else None
    return parse(filter, fields) if form is None else _parsed(form, fields)


@lru_cache(maxsize=256)
def _parsed(form: bytes, fields: tuple[str, ...] | None) -> Filter:
    """A filter of a form in JSON: agents ask with few forms."""
    return parse(orjson.loads(form), fields)


def _embeddings(index: IndexOptions | None, kind: Kind | None) -> StoreEmbedder:
    if index is None:
        return StoreEmbedder()
    embed = index["embed"]
    embedder = embedder_from(embed, index.get("dims"), index.get("name"))
    return StoreEmbedder(
        embedder,
        Model(embedder.name, embedder.dims or 0, kind or "int8"),
        in_process=getattr(embed, "in_process", False) is True,
        quick=embed.embed if getattr(embed, "quick", False) is True else None,
        any_kind=kind is None,
    )


def _mask(key: bytes) -> Callable[[str], str]:
    """Keyed hashes of words: equal for equal words, and nothing else without the key."""

    def mask(word: str) -> str:
        return hashlib.blake2b(word.encode(), digest_size=9, key=key).hexdigest()

    return mask


# -- what is waited for


class Reads(Protocol):
    """Makes a call in a reading thread."""

    def __call__(self, make: Callable[[], T], /) -> asyncio.Future[T]:
        """What the call returns."""


class _Puts(NamedTuple):
    """Puts and deletes, all or none."""

    puts: Sequence[Put]
    now: int
    model: Model | None


class Runner:
    """Runs a store's operations, and makes their effects."""

    def __init__(self, database: Database, writer: ItemWriter) -> None:
        self.database, self.writer = database, writer
        self.reads: Reads = Together(database.run_in_thread, _called).ask
        self._puts = Together(call, self._put_together)

    def run(self, operation: Operation[T]) -> T:
        """Run an operation in the calling thread."""
        with closing(operation):
            self.database.connect()  # what is put depends on the fields that the file records
            return run(operation)

    async def arun(self, operation: Operation[T], *, hops: bool = False) -> T:
        """Run one from a coroutine; with `hops`, what it computes is computed in a thread."""
        try:
            await self.database.aconnect()
        except BaseException:
            operation.close()
            raise
        return await arun(operation, self.reads if hops else None)

    def called(self, make: Callable[[], T]) -> Effect[T]:
        """What a call returns, which reads, or computes for long."""
        return Effect(make, lambda: self.reads(make))

    def read(self, make_flow: Callable[[], Flow[T]]) -> Effect[T]:
        """The read of a flow, on one snapshot."""
        return self.called(lambda: self.database.read(make_flow))

    def write(self, make_flow: Callable[[], Flow[T]]) -> Effect[T]:
        """The write of a flow, in one transaction."""
        return Effect(
            lambda: self.database.write(make_flow), lambda: self.database.awrite(make_flow)
        )

    def put(self, puts: Sequence[Put], now: int, model: Model | None) -> Effect[None]:
        """Puts and deletes, all or none."""
        request = _Puts(puts, now, model)
        alone = not all(put.unconditional for put in puts)
        return Effect(
            lambda: self._written(self.database.write, request),
            lambda: (
                self._written(self.database.awrite, request) if alone else self._puts.ask(request)
            ),
        )

    def _written(self, write: Callable[..., Any], request: _Puts) -> Any:
        """What a method that writes returns; no other may write to the same, or to their limits."""
        puts = request.puts
        paths = {put.path for put in puts} | {limit.prefix for put in puts for limit in put.limits}
        return write(
            partial(self.writer.write, *request),
            exclusive_names=[path.hex() for path in paths],
            deletes_rows=all(put.text is None for put in puts),
        )

    async def _put_together(self, asks: list[_Ask]) -> None:
        """Write puts that nothing but the database can refuse, in one transaction.

        Each by itself, in order, if that fails, for nobody fails for another, or two have one key.
        """
        batch: list[_Puts] = [puts for puts, _ in asks]
        puts = [put for request in batch for put in request.puts]
        model = next((request.model for request in batch if request.model is not None), None)
        write, errors = partial(self._written, self.database.awrite), [None] * len(batch)
        together = len({(put.path, put.key) for put in puts}) == len(puts)
        if together:
            try:
                await write(_Puts(puts, max(request.now for request in batch), model))
            except Exception:
                if len(batch) == 1:
                    raise
                together = False
        if not together:
            errors = await asyncio.gather(*map(write, batch), return_exceptions=True)
        for (_, promise), error in zip(asks, errors, strict=True):
            promise.result, promise.error = None, error


class Together:
    """What coroutines ask for in one turn of an event loop, done together at its end."""

    def __init__(
        self,
        begin: Callable[[Callable[[], Any]], Awaitable[None]],
        do: Callable[[list[_Ask]], Any],
    ) -> None:
        self._begin, self._do = begin, do  # what calls the other, which keeps its promises
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Ask]] = WeakKeyDictionary()

    def ask(self, what: Any) -> asyncio.Future[Any]:
        """Ask for something."""
        loop = asyncio.get_running_loop()
        asks = self._open.get(loop)
        if asks is None or len(asks) == _TOGETHER:
            asks = self._open[loop] = []
            loop.call_soon(self._end, loop, asks)
        promise: Promise[Any] = Promise(is_async=True)
        asks.append((what, promise))
        return promise.future  # type: ignore[return-value]

    def _end(self, loop: asyncio.AbstractEventLoop, asks: list[_Ask]) -> None:
        if self._open.get(loop) is asks:
            del self._open[loop]
        asks = [ask for ask in asks if ask[1].try_start()]
        if not asks:
            return
        done: asyncio.Future[None]
        try:
            done = asyncio.ensure_future(self._begin(partial(self._do, asks)))
        except PerdureError as exc:
            done = loop.create_future()
            done.set_exception(exc)
        done.add_done_callback(partial(_settle, asks))


def _settle(asks: list[_Ask], done: asyncio.Future[None]) -> None:
    error = asyncio.CancelledError() if done.cancelled() else done.exception()
    for _, promise in asks:
        promise.error = error or promise.error
    set_outcomes([promise for _, promise in asks])


def _called(asks: list[_Ask]) -> None:
    """Make calls; a cancelled one is not made."""
    for make, promise in asks:
        try:
            promise.result = make() if promise.try_start() else None
        except BaseException as exc:
            promise.error = exc

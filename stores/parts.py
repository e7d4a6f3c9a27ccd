"""The parts of an open store, or of the part of it under a prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import orjson
from langgraph.store.base import TTLConfig

from perdure.errors import CorruptRecord
from perdure.storage.database import Database
from perdure.storage.encryption import Clear, agree_on_key, seal_for
from perdure.storage.flow import Flow, NamedSQL
from perdure.stores.base import PROVENANCE
from perdure.stores.embedders import embedder_from
from perdure.stores.filter_sql import JSONPlace
from perdure.stores.filters import Filter, parse
from perdure.stores.indexes import Indexes
from perdure.stores.models import Embeddings, Model
from perdure.stores.namespaces import check_prefix
from perdure.stores.options import IndexOptions, Options, agreed_fields, check_number
from perdure.stores.puts import Limit, Preparer
from perdure.stores.reading import ItemReader, Records, Wanted, micros
from perdure.stores.runner import Runner
from perdure.stores.searching import Searcher
from perdure.stores.values import fault
from perdure.stores.vectors import Kind
from perdure.stores.writer import ItemWriter


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an open store, or of the part of it under a prefix."""

    database: Database
    sql: NamedSQL
    reader: ItemReader
    writer: ItemWriter
    preparer: Preparer
    searcher: Searcher
    runner: Runner
    ttl: TTLConfig | None
    now: Callable[[], int]  # in microseconds
    root: bytes = b""  # the path that all namespaces are under

    @classmethod
    def of(
        cls,
        sql: NamedSQL,
        options: Options,
        now: Callable[[], int],
        database_of: Callable[[Callable[[], Flow[None]]], Database],
        values: JSONPlace,
    ) -> Self:
        """Make the parts; `database_of` is given what to run whenever the database is opened."""
        seal = seal_for(options.key)
        kept = "clear" if isinstance(seal, Clear) else options.text_index
        masked = _mask(seal.hash_key) if kept == "keyed" else None
        embeddings = _embeddings(options.index, options.vectors)
        given: Any = options.index and (
            options.index.get("fields") or options.index.get("text_fields")
        )
        preparer = Preparer([], options.max_value_bytes, embeddings, masked)

        def begin() -> Flow[None]:
            read_only = options.read_only
            yield from agree_on_key(seal, database.path, read_only=read_only)
            preparer.fields[:] = yield from agreed_fields(sql, given, kept, read_only=read_only)
            recorded = yield sql("get_setting", "model")
            with suppress(CorruptRecord):  # what needs the model says so
                for (model,) in recorded:
                    embeddings.adopt(Model.parsed(model))

        def erased() -> None:  # a vector tells of its text, a filter may hold what it looks for
            _parsed.cache_clear()
            if embeddings.embedder is not None:
                embeddings.embedder.clear_cache()

        database = database_of(begin)
        records = Records(seal)
        reader, writer = ItemReader(sql, records, values), ItemWriter(sql, records)
        indexes = Indexes(
            sql,
            records,
            preparer,
            options.index_bytes,
            options.approximate_above,
            post=None if options.read_only else database.post,
            erased=erased,
        )
        runner = Runner(database, writer, embeddings)
        searcher = Searcher(sql, reader, indexes, embeddings, runner, masked)
        ttl: Any = options.ttl
        return cls(database, sql, reader, writer, preparer, searcher, runner, ttl, now)

    def under(self, prefix: bytes, max_items: int | None, max_bytes: int | None) -> Self:
        """The same under a path: nothing outside it can be named, and messages leave it out."""
        for name, most in (("max_items", max_items), ("max_bytes", max_bytes)):
            if most is not None:
                check_number(name, most, "a whole number, or None", whole=True)
        limits = self.preparer.limits
        if (max_items, max_bytes) != (None, None):
            limits += (Limit(prefix, max_items, max_bytes),)
        records = replace(self.records, root=len(prefix))
        reader = replace(self.reader, records=records)
        writer = replace(self.writer, records=records)
        runner = Runner(self.database, writer, self.runner.embeddings)
        return replace(
            self,
            reader=reader,
            writer=writer,
            runner=runner,
            searcher=replace(self.searcher, reader=reader, runner=runner),
            preparer=replace(self.preparer, root=prefix, limits=limits),
            root=prefix,
        )

    @property
    def records(self) -> Records:
        """The reader of rows."""
        return self.reader.records

    def path(self, prefix: Any) -> bytes:
        """The path of a prefix that a caller names."""
        return self.root + check_prefix(prefix)

    def wanted(
        self,
        prefix: Any,
        filter: Any = None,
        provenance: Any = None,
        as_of: Any = None,
        newest_first: bool = False,
    ) -> Wanted:
        """The items that a call selects."""
        return Wanted(
            self.path(prefix),
            self.now(),
            _filter(filter, of_provenance=False),
            _filter(provenance, of_provenance=True),
            None if as_of is None else micros(as_of),
            newest_first,
        )

    def refreshes(self, refresh_ttl: bool | None) -> bool:
        """The value of the call, else of the configuration; else no, as in langgraph's stores."""
        if refresh_ttl is None:
            return (self.ttl or {}).get("refresh_on_read", False)
        return refresh_ttl


def _filter(given: Any, *, of_provenance: bool) -> Filter | None:
    if given is None or given == {}:
        return None
    try:
        form = None if fault(given) else orjson.dumps(given)
    except TypeError:  # no Unicode text, or a wide integer
        form = None
    fields = PROVENANCE if of_provenance else None
    return parse(given, fields) if form is None else _parsed(form, fields)


@lru_cache(maxsize=256)
def _parsed(form: bytes, fields: tuple[str, ...] | None) -> Filter:
    """A filter of a form in JSON: agents ask with few forms."""
    return parse(orjson.loads(form), fields)


def _embeddings(index: IndexOptions | None, kind: Kind | None) -> Embeddings:
    if index is None:
        return Embeddings()
    embed = index["embed"]
    embedder = embedder_from(embed, index.get("dims"), index.get("name"))
    return Embeddings(
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

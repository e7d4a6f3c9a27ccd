"""What the doors of a store share: its parts, and each operation as steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from langgraph.store.base import (
    BaseStore,
    GetOp,
    ListNamespacesOp,
    Op,
    PutOp,
    Result,
    SearchOp,
    TTLConfig,
)

from perdure.errors import ConfigurationError
from perdure.storage.flow import Flow, Row
from perdure.storage.sqlite import Database
from perdure.stores.base import FoundItem, Provenance, StoredItem
from perdure.stores.filters import Filter, parse
from perdure.stores.namespaces import check_condition, check_key, check_prefix
from perdure.stores.preparing import Index, Preparer, Request
from perdure.stores.reading import Reader, Wanted
from perdure.stores.records import micros
from perdure.stores.searching import MODES, Query, Searcher
from perdure.stores.steps import Driver, Read, Steps, Write, WritePuts
from perdure.stores.values import is_plain
from perdure.stores.weighting import Weights
from perdure.stores.writing import Limit, Put, Writer


@dataclass(frozen=True, slots=True)
class Parts:
    """What an open store is made of.

    Attributes:
        database: The file.
        sql: The statements, by name.
        reader, writer, preparer, searcher, driver: See their modules.
        ttl: How long items live.
        clock: Seconds since 1970.
        root: The path that all namespaces are under.
        limits: What may be held.
    """

    database: Database
    sql: dict[str, str]
    reader: Reader
    writer: Writer
    preparer: Preparer
    searcher: Searcher
    driver: Driver
    ttl: TTLConfig | None
    clock: Callable[[], float]
    root: bytes = b""
    limits: tuple[Limit, ...] = ()


_FILTERS: dict[bytes, Filter] = {}
_MOST_FILTERS: Final = 256
_MOST: Final = 1 << 60  # rows: SQLite counts in 64 bits


class Core(BaseStore):
    """The parts of an open store, and its operations as steps."""

    supports_ttl = True
    _lacking = False  # this store object put something whose vectors could not be made

    def _bind(self, parts: Parts) -> None:
        """Make this a store of these parts."""
        self._parts = parts
        self.database = parts.database
        self.ttl_config = parts.ttl
        self._sql = parts.sql
        self._clock = parts.clock
        self._records = parts.reader.records
        self._reader = parts.reader
        self._writer = parts.writer
        self._preparer = parts.preparer
        self._searcher = parts.searcher
        self._driver = parts.driver
        self._root = parts.root
        self._limits = parts.limits

    def _limited(
        self,
        namespace: Any,
        key: Any,
        value: Any,
        index: Index = None,
        ttl: float | None = None,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> Request:
        return Request(namespace, key, value, index, ttl, if_version, provenance, self._limits)

    def _now(self) -> int:
        return int(self._clock() * 1_000_000)

    # -- many operations

    def _batch(self, ops: Iterable[Op]) -> Steps[list[Result]]:
        """Answers in order; what is read is read before anything is written, as in langgraph's."""
        ops = list(ops)
        puts: dict[tuple[bytes, str], Request] = {}
        reads: list[tuple[int, Steps[Any]]] = []
        for number, op in enumerate(ops):
            if isinstance(op, PutOp):
                request = self._limited(op.namespace, op.key, op.value, op.index, op.ttl)
                puts[self._path(op.namespace), check_key(op.key)] = request  # the last counts
            else:
                reads.append((number, self._read_op(op)))
        prepared = [self._preparer.put(request) for request in puts.values()]
        results: list[Result] = [None] * len(ops)
        for number, steps in reads:
            results[number] = yield from steps
        if prepared:
            yield from self._write(prepared)
        return results

    def _read_op(self, op: Op) -> Steps[Any]:
        match op:
            case GetOp():
                return self._get(op.namespace, op.key, refresh=op.refresh_ttl)
            case SearchOp():
                wanted = self._wanted(op.namespace_prefix, op.filter)
                query = self._query(op.query, "hybrid", True, False)
                page = self._page(op.limit, op.offset)
                return self._search(wanted, query, *page, refresh=op.refresh_ttl)
            case ListNamespacesOp():
                return self._list(op, None)
            case _:
                raise ConfigurationError(
                    f"a store has no operation {op!r}; expected GetOp, PutOp, SearchOp or "
                    "ListNamespacesOp"
                )

    # -- one operation

    def _put(self, request: Request) -> Steps[None]:
        return self._write([self._preparer.put(request)])

    def _write(self, prepared: Sequence[tuple[Put, list[str]]]) -> Steps[None]:
        puts, model = yield from self._preparer.embedded(prepared)
        yield WritePuts(puts, self._now(), model)
        if model is None:
            self._lacking = self._lacking or any(put.lacking is not None for put in puts)
        elif self._lacking:
            self._lacking = False
            yield from self._embed_some(len(puts) + 16)

    def _embed_some(self, limit: int) -> Steps[None]:
        raise NotImplementedError

    def _get(
        self, namespace: Any, key: Any, *, refresh: bool, as_of: Any = None
    ) -> Steps[StoredItem | None]:
        path, text = self._path(namespace), check_key(key)
        when = None if as_of is None else micros(as_of)
        return self._got(path, text, refresh, when)

    def _got(
        self, path: bytes, key: str, refresh: bool, as_of: int | None
    ) -> Steps[StoredItem | None]:
        row = yield Read(self._reader.get(path, key, self._now(), as_of), snapshot=False)
        if row is None:
            return None
        if refresh and as_of is None:
            yield from self._touch([row])
        return self._records.item(row)

    def _touch(self, rows: Sequence[Row]) -> Steps[None]:
        """Let items that expire live on, now that they were read."""
        mortal = [row[0] for row in rows if row[7] is not None]
        if mortal and not self.database.read_only:
            yield Write(self._writer.touch(mortal, self._now))

    def _search(
        self, wanted: Wanted, query: Query | None, limit: int, offset: int, *, refresh: bool
    ) -> Steps[list[FoundItem]]:
        if query is None:
            pairs = yield Read(self._reader.search(wanted, limit, offset))
            found = [FoundItem(item) for _, item in pairs]
        else:
            found = yield from self._searcher.search(wanted, query, limit, offset)
        if refresh and wanted.as_of is None and any(item.expires_at for item in found):
            keys = [(self._path(item.namespace), item.key) for item in found if item.expires_at]
            yield from self._touch((yield Read(self._rows(keys))))
        return found

    def _rows(self, keys: Sequence[tuple[bytes, str]]) -> Flow[list[Row]]:
        out = []
        for path, key in keys:
            row = yield from self._reader.get(path, key, self._now(), None)
            if row is not None:
                out.append(row)
        return out

    def _list(self, op: ListNamespacesOp, as_of: Any) -> Steps[list[tuple[str, ...]]]:
        conditions = tuple(op.match_conditions or ())
        for condition in conditions:
            check_condition(condition)
        depth = op.max_depth
        if depth is not None and (type(depth) is not int or depth < 1):
            raise ConfigurationError(f"max_depth is {depth!r}; expected 1 or more, or None")
        limit, offset = self._page(op.limit, op.offset)
        when = None if as_of is None else micros(as_of)
        flow = self._reader.namespaces(
            self._root, conditions, op.max_depth, limit, offset, self._now(), when
        )
        return _one(flow)

    # -- arguments

    def _path(self, namespace: Any) -> bytes:
        return self._root + check_prefix(namespace)

    def _wanted(
        self, prefix: Any, filter: Any = None, provenance: Any = None, as_of: Any = None
    ) -> Wanted:
        return Wanted(
            self._path(prefix),
            self._now(),
            None if filter is None or filter == {} else _parsed(filter),
            None if provenance is None or provenance == {} else _parsed(provenance),
            None if as_of is None else micros(as_of),
        )

    @staticmethod
    def _query(
        text: Any, mode: Any, context: bool, explain: bool, weights: Weights | None = None
    ) -> Query | None:
        if mode not in MODES:
            raise ConfigurationError(f"mode is {mode!r}; expected one of {MODES}")
        if text is None or text == "":
            return None
        if not isinstance(text, str):
            raise ConfigurationError(f"query is {text!r}; expected text")
        words = text.encode("utf-8", "replace").decode()
        return Query(words, mode, context, explain, weights or Weights())

    @staticmethod
    def _page(limit: Any, offset: Any) -> tuple[int, int]:
        for name, number in (("limit", limit), ("offset", offset)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigurationError(
                    f"{name} is {number!r}; expected a whole number, zero or more"
                )
        return min(limit, _MOST), min(offset, _MOST)


def _one(flow: Flow[Any]) -> Steps[Any]:
    return (yield Read(flow))


def _parsed(filter: Any) -> Filter:
    """A filter, the same object for one of the same form: agents ask with few forms."""
    try:
        form = orjson.dumps(filter) if is_plain(filter) else None
    except TypeError:  # no Unicode text
        form = None
    if form is None:
        return parse(filter)
    found = _FILTERS.get(form)
    if found is None:
        found = parse(filter)
        if len(_FILTERS) >= _MOST_FILTERS:
            _FILTERS.clear()
        _FILTERS[form] = found
    return found


def forget_filters() -> None:
    """Let go of the filters that are kept."""
    _FILTERS.clear()


def system_clock() -> float:
    """Seconds since 1970."""
    return time.time()

"""Putting, getting, searching and listing items, as effects."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from langgraph.store.base import (
    GetOp,
    ListNamespacesOp,
    MatchCondition,
    NotProvided,
    Op,
    PutOp,
    Result,
    SearchOp,
)

from perdure.errors import ConfigurationError, InvalidValue
from perdure.stores.base import (
    TTL,
    FoundItem,
    Namespace,
    Provenance,
    PutItem,
    Span,
    StoredItem,
    WhyNot,
)
from perdure.stores.missing import MissingEmbeddings
from perdure.stores.namespaces import check_condition, check_key
from perdure.stores.options import check_number
from perdure.stores.parts import Parts
from perdure.stores.puts import Index, Put
from perdure.stores.ranking import Weights
from perdure.stores.reading import Wanted, micros
from perdure.stores.searching import MODES, Query

_MOST: Final = 1 << 60  # rows: SQLite counts in 64 bits
_HUGE: Final = sys.float_info.max


class Items:
    """The items of a store."""

    def __init__(self, parts: Parts, missing: MissingEmbeddings) -> None:
        self._parts = parts
        self._missing = missing

    # -- many operations

    async def batch(self, ops: Sequence[Op | PutItem]) -> list[Result]:
        """Answers in order; what is read is read before anything is written, as in langgraph's."""
        puts: dict[tuple[bytes, str], PutOp | PutItem] = {}
        for op in ops:
            if isinstance(op, PutOp | PutItem):  # of one key, the last counts
                puts[self._parts.preparer.place(op.namespace, op.key)] = op
        prepared = []
        for place, op in puts.items():
            extra = (op.if_version, op.provenance) if isinstance(op, PutItem) else ()
            prepared.append(self._put(place, op.value, op.index, op.ttl, *extra))
        results: list[Result] = [
            None if isinstance(op, PutOp | PutItem) else await self._read(op) for op in ops
        ]
        if prepared:
            await self._write(prepared)
        return results

    async def _read(self, op: Op) -> Any:
        if isinstance(op, ListNamespacesOp):
            return await self._namespaces(op)
        if not isinstance(op, GetOp | SearchOp):
            raise ConfigurationError(
                f"a store has no operation {op!r}; expected GetOp, PutOp, PutItem, SearchOp or "
                "ListNamespacesOp"
            )
        # true is also what an operation says by default
        refresh = bool(op.refresh_ttl) and self._parts.refreshes(None)
        if isinstance(op, GetOp):
            return await self.get(op.namespace, op.key, refresh)
        wanted = self._parts.wanted(op.namespace_prefix, op.filter)
        return await self.search(wanted, query_of(op.query), op.limit, op.offset, refresh)

    # -- writing

    async def put(
        self,
        namespace: Any,
        key: Any,
        value: Any,
        index: Index = None,
        ttl: TTL = None,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        """Put an item."""
        if value is None:  # in langgraph's own form of a put that is a delete; here it is a slip
            raise InvalidValue("the value is None; expected a dict: to remove an item, delete it")
        place = self._parts.preparer.place(namespace, key)
        await self._write([self._put(place, value, index, ttl, if_version, provenance)])

    async def delete(self, namespace: Any, key: Any, if_version: int | None) -> None:
        """Close the present version of a key."""
        place = self._parts.preparer.place(namespace, key)
        await self._write([self._put(place, None, None, None, if_version)])

    def _put(self, place: tuple[bytes, str], value: Any, index: Any, ttl: TTL, *extra: Any) -> Put:
        minutes = (
            (self._parts.ttl or {}).get("default_ttl") if isinstance(ttl, NotProvided) else ttl
        )
        return self._parts.preparer.put(place, value, index, minutes, *extra)

    async def _write(self, puts: Sequence[Put]) -> None:
        model = await self._missing.make(puts)
        await self._parts.runner.put(puts, self._parts.now(), model)
        if model is not None:
            await self._missing.make_some(len(puts))

    # -- reading

    async def get(
        self, namespace: Any, key: Any, refresh_ttl: bool | None, as_of: Any = None
    ) -> StoredItem | None:
        """An item, at present or at a moment."""
        parts = self._parts
        path, text = parts.path(namespace), check_key(key)
        when = None if as_of is None else micros(as_of)
        row = await parts.runner.read(
            lambda: parts.reader.get(path, text, parts.now(), when), snapshot=False
        )
        if row is None:
            return None
        item = parts.records.item(row)
        if when is None and parts.refreshes(refresh_ttl):
            await self._touch([item])
        return item

    async def search(
        self, wanted: Wanted, asked: Query | None, limit: int, offset: int, refresh_ttl: bool | None
    ) -> list[FoundItem]:
        """The best answers to a query, or a page of the selected items."""
        page = _page(limit, offset)
        found: list[FoundItem]
        if asked is None:
            reader = self._parts.reader  # which reads all of it by one statement, or by an index
            by_index = wanted.filter is not None and reader.values.takes_indexes
            pairs = await self._parts.runner.read(
                lambda: reader.search(wanted, *page), snapshot=by_index
            )
            found = [FoundItem(item) for _, item in pairs]
        else:
            found = await self._parts.searcher.search(wanted, asked, *page)
        if wanted.as_of is None and self._parts.refreshes(refresh_ttl):
            await self._touch(found)
        return found

    async def _touch(self, found: Sequence[StoredItem | FoundItem]) -> None:
        """Let items that expire live on, now that they were read."""
        parts = self._parts
        keys = [(parts.path(item.namespace), item.key) for item in found if item.expires_at]
        if keys and not parts.database.read_only:
            await parts.runner.write(partial(parts.writer.touch, keys, parts.now))

    async def list_namespaces(
        self,
        prefix: Any,
        suffix: Any,
        max_depth: Any,
        limit: Any,
        offset: Any,
        as_of: Any,
    ) -> list[Namespace]:
        """Namespaces that hold something, of those that begin and end so."""
        both = (MatchCondition("prefix", prefix or ()), MatchCondition("suffix", suffix or ()))
        conditions = tuple(condition for condition in both if condition.path)
        op = ListNamespacesOp(conditions, max_depth, limit, offset)
        return await self._namespaces(op, as_of)

    async def _namespaces(self, op: ListNamespacesOp, as_of: Any = None) -> list[Namespace]:
        conditions = tuple(op.match_conditions or ())
        for condition in conditions:
            check_condition(condition)
        depth = op.max_depth
        if depth is not None:
            check_number("max_depth", depth, "1 or more, or None", least=1, whole=True)
        page = _page(op.limit, op.offset)
        when = None if as_of is None else micros(as_of)
        parts = self._parts
        of = parts.root, conditions, depth, *page, parts.now(), when
        return await parts.runner.read(lambda: parts.reader.namespaces(*of))

    async def history(self, namespace: Any, key: Any) -> list[StoredItem]:
        """Every version of a key."""
        parts = self._parts
        of = parts.path(namespace), check_key(key), parts.now()
        return await parts.runner.read(lambda: parts.reader.history(*of), snapshot=False)

    async def why_not(
        self, namespace: Any, key: Any, wanted: Wanted, asked: Query | None
    ) -> WhyNot:
        """The place of an item in the answers to a query."""
        path, text = self._parts.path(namespace), check_key(key)
        if asked is None:
            raise ConfigurationError("why_not needs a query")
        if not path.startswith(wanted.prefix):
            return WhyNot("it is not under the prefix")
        row = await self._parts.runner.read(
            lambda: self._parts.reader.get(path, text, wanted.now, wanted.as_of)
        )
        return await self._parts.searcher.why_not(wanted, asked, row)


def query_of(
    text: Any,
    mode: Any = "hybrid",
    context: bool = True,
    explain: bool = False,
    weights: Weights | None = None,
    during: Span | None = None,
    min_score: float | None = None,
) -> Query | None:
    """The query of a search; None: there are filters only."""
    if mode not in MODES:
        raise ConfigurationError(f"mode is {mode!r}; expected one of {MODES}")
    span = None if during is None else _span(during)
    if min_score is not None:
        check_number("min_score", min_score, "a number, or None", least=-_HUGE, most=_HUGE)
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        raise ConfigurationError(f"query is {text!r}; expected text")
    words = text.encode("utf-8", "replace").decode()
    return Query(words, mode, context, explain, weights or Weights(), span, min_score)


def _page(limit: Any, offset: Any) -> tuple[int, int]:
    for name, number in (("limit", limit), ("offset", offset)):
        check_number(name, number, "a whole number, zero or more", whole=True)
    return min(limit, _MOST), min(offset, _MOST)


def _span(during: Any) -> tuple[float, float]:
    """A span in seconds since 1970."""
    if not isinstance(during, tuple | list) or len(during) != 2:
        raise ConfigurationError(
            f"during is {during!r:.80}; expected two datetimes, from when and up to when"
        )
    start, end = map(micros, during)
    if start >= end:
        raise ConfigurationError(
            f"during ends at {during[1]}, not after it starts at {during[0]}; expected the earlier "
            "moment first"
        )
    return start / 1e6, end / 1e6

"""Reads: get, list, and search without a query."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langgraph.store.base import MatchCondition

from perdure.storage.flow import Flow, NamedSQL, Row, Statement
from perdure.stores.base import Namespace, QueryPlan, StoredItem
from perdure.stores.filter_sql import condition_of
from perdure.stores.filters import Filter
from perdure.stores.namespaces import (
    is_head,
    joined,
    labels,
    literal_head,
    matches,
    span,
)
from perdure.stores.records import Records
from perdure.stores.values import decode

_PAGE = 256  # namespaces read at a time
_SELECTIVE = 2_000  # an index that finds more rows than this loses to reading in order
_INDEX = "store_path:"  # what names of path indexes begin with


@dataclass(frozen=True, slots=True)
class Wanted:
    """The items that a search selects."""

    prefix: bytes  # a path
    now: int  # they must be alive then
    filter: Filter | None = None
    provenance: Filter | None = None
    as_of: int | None = None  # look at that moment of the past instead


@dataclass(slots=True)
class Reader:
    """The flows that read."""

    sql: NamedSQL
    records: Records

    # -- one key

    def get(self, path: bytes, key: str, now: int, as_of: int | None) -> Flow[Row | None]:
        """The row of a key, at present or at a moment."""
        if as_of is None:
            rows = yield self.sql("get", path, key)
        else:
            rows = yield self.sql("get_as_of", path, key, as_of)
        return next((row for row in rows if alive(row, now if as_of is None else as_of)), None)

    def history(self, path: bytes, key: str, now: int) -> Flow[list[StoredItem]]:
        """Every version of a key, oldest first."""
        rows = yield self.sql("history", path, key)
        return [self.records.item(ended(row, now)) for row in rows]

    # -- many

    def search(self, wanted: Wanted, limit: int, offset: int) -> Flow[list[tuple[Row, StoredItem]]]:
        """A page of the items under a prefix: by namespace, in each in the order of creation."""
        unchecked = wanted.filter is None and wanted.provenance is None
        reach = offset + limit
        if wanted.as_of is not None:
            page = (limit, offset) if unchecked else (-1, 0)
            bound = (*span(wanted.prefix), wanted.as_of, *page)
            rows = yield self.sql("under_as_of", *bound)
            chosen = [found for row in rows if (found := self.checked(row, wanted)) is not None]
            return chosen if unchecked else chosen[offset:reach]
        condition, params, indexed = yield from self._condition(wanted)
        sql = self.sql["under"].format(condition=condition, indexed=indexed)
        bound = (*span(wanted.prefix), wanted.now, *params) * 2  # for either list that is merged
        if unchecked:
            rows = yield Statement(sql, (*bound, limit, offset))
            return [(row, self.records.item(row)) for row in rows]
        most = reach
        while True:
            rows = yield Statement(sql, (*bound, most, 0))
            chosen = []
            for row in rows:
                found = self.checked(row, wanted)
                if found is not None:
                    chosen.append(found)
                    if len(chosen) == reach:
                        break
            if len(chosen) == reach or len(rows) < most:
                return chosen[offset:]
            most *= 8

    def checked(self, row: Row, wanted: Wanted) -> tuple[Row, StoredItem] | None:
        """The row's item, if it is what is wanted."""
        value = None
        if wanted.filter is not None:
            value = self.records.value(row)
            if not wanted.filter.matches(value):
                return None
        if wanted.provenance is not None:
            _, path, key, version = row[:4]
            fields = self.records.provenance(row[9], path, key, version)
            if not wanted.provenance.matches(fields):
                return None
        return row, self.records.item(row, value)

    def rows(self, wanted: Wanted) -> Flow[list[tuple[Row, StoredItem]]]:
        """All items that are wanted."""
        return (yield from self.search(wanted, 1 << 62, 0))

    def ids(self, wanted: Wanted) -> Flow[list[int]]:
        """The ids of all present items that meet the filters."""
        if wanted.provenance is not None or wanted.filter is None:
            return [row[0] for row, _ in (yield from self.rows(wanted))]
        condition, params, indexed = yield from self._condition(wanted)
        if self.records.sealed:
            return [row[0] for row, _ in (yield from self.rows(wanted))]
        form = {"columns": "i.id, i.value", "condition": condition, "indexed": indexed}
        sql = self.sql["matching"].format(**form)
        rows = yield Statement(sql, (*span(wanted.prefix), wanted.now, *params, -1))
        check = wanted.filter.matches
        return [row for row, value in rows if check(decode(value))]

    # -- conditions and indexes

    def indexes(self) -> Flow[list[str]]:
        """The paths that have an index."""
        rows = yield self.sql("path_indexes")
        return sorted(name.removeprefix(_INDEX).replace("^", "") for (name,) in rows)

    def _condition(self, wanted: Wanted) -> Flow[tuple[str, Sequence[Any], str]]:
        """The part of a filter that SQL can decide, its parameters, and the index to use."""
        if wanted.filter is None or self.records.sealed:
            return "1", (), ""
        condition = condition_of(wanted.filter, "i.value", (yield from self.indexes()))
        for path in condition.paths:
            hint = f'INDEXED BY "{index_name(path)}"'
            form = {"columns": "1", "condition": condition.text, "indexed": hint}
            probe = self.sql["matching"].format(**form)
            bound = (*span(wanted.prefix), wanted.now, *condition.params, _SELECTIVE)
            if len((yield Statement(probe, bound))) < _SELECTIVE:
                return condition.text, condition.params, hint
        return condition.text, condition.params, ""

    def explain(self, wanted: Wanted) -> Flow[QueryPlan]:
        """The plan of a search without a query."""
        condition, params, indexed = yield from self._condition(wanted)
        sql = self.sql["under"].format(condition=condition, indexed=indexed)
        bound = (*((*span(wanted.prefix), wanted.now, *params) * 2), 10, 0)
        steps = tuple(
            row[3] for row in (yield Statement(self.sql["explain"].format(query=sql), bound))
        )
        used = tuple(
            path
            for path in (yield from self.indexes())
            if any(f"{index_name(path)} " in step for step in steps)
        )
        return QueryPlan(used, steps)

    # -- namespaces

    def namespaces(
        self,
        root: bytes,
        conditions: Sequence[MatchCondition],
        max_depth: int | None,
        limit: int,
        offset: int,
        now: int,
        as_of: int | None,
    ) -> Flow[list[Namespace]]:
        """Namespaces under a root that hold something, in order, cut to a depth, each once."""
        head = literal_head(conditions)
        low, high = span(root + head)
        conditions = [c for c in conditions if not is_head(c, head)]
        suffix = _literal_tail(conditions)
        sql = self.sql["paths" if as_of is None else "paths_as_of"]
        when = now if as_of is None else as_of
        out: list[Namespace] = []
        done = b""  # all that begins with it is answered
        while len(out) < offset + limit:
            rows = yield Statement(sql, (low, high, suffix, when, _PAGE))
            for (path,) in rows:
                if done and path.startswith(done):
                    continue
                namespace = labels(path[len(root) :])
                if conditions and not matches(conditions, namespace):
                    continue
                if max_depth is not None and len(namespace) > max_depth:
                    namespace = namespace[:max_depth]
                    done = root + joined(namespace)
                elif len(namespace) == max_depth:
                    done = path
                if not out or out[-1] != namespace:
                    out.append(namespace)
                if len(out) == offset + limit:
                    break
            if len(rows) < _PAGE:
                break
            last = rows[-1][0]
            low = span(done)[1] if done and last.startswith(done) else last + b"\0"
        return out[offset:]


def index_name(path: str) -> str:
    """The name of the index on a path; SQLite takes names that differ in case for the same.

    >>> index_name("user.firstName")
    'store_path:user.first^Name'
    """
    return _INDEX + re.sub("([A-Z])", r"^\1", path)


def alive(row: Row, now: int) -> bool:
    """Whether a row's version had not expired."""
    return row[7] is None or row[7] > now


def ended(row: Row, now: int) -> Row:
    """A row whose version ended by expiring, if it has, though nobody swept it yet."""
    return row if alive(row, now) else (*row[:6], row[7], *row[7:])


def _literal_tail(conditions: Sequence[MatchCondition]) -> bytes:
    """Bytes that every path meeting the conditions ends with."""
    best = b"\0"
    for condition in conditions:
        if condition.match_type == "suffix" and "*" not in condition.path:
            best = max(best, joined(condition.path), key=len)
    return best

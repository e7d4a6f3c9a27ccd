"""Reads: get, list, and search without a query."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from langgraph.store.base import MatchCondition

from perdure.storage.flow import Flow, NamedSQL, Row, Statement
from perdure.stores.base import Namespace, QueryPlan, StoredItem
from perdure.stores.filter_sql import Condition, condition_of
from perdure.stores.filters import Filter
from perdure.stores.namespaces import joined, labels, literal_head, matches, span
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
        name, when = ("get", now) if as_of is None else ("get_as_of", as_of)
        rows = yield self.sql(name, path, key, when)
        return rows[0] if rows else None

    def history(self, path: bytes, key: str, now: int) -> Flow[list[StoredItem]]:
        """Every version of a key, oldest first."""
        rows = yield self.sql("history", path, key)
        return [self.records.item(ended(row, now)) for row in rows]

    # -- many

    def search(self, wanted: Wanted, limit: int, offset: int) -> Flow[list[tuple[Row, StoredItem]]]:
        """A page of the items under a prefix: by namespace, in each in the order of creation."""
        if wanted.as_of is None:
            sql, bound = yield from self._under(wanted)
        else:
            sql, bound = self.sql["under_as_of"], (*span(wanted.prefix), wanted.as_of)
        unchecked = wanted.filter is None and wanted.provenance is None
        skipped = offset if unchecked else 0
        reach = offset + limit - skipped
        most = reach
        while True:
            rows = yield Statement(sql, (*bound, most, skipped))
            checked = (self.checked(row, wanted) for row in rows)
            chosen = list(islice((found for found in checked if found is not None), reach))
            if len(chosen) == reach or len(rows) < most:
                return chosen[offset - skipped :]
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
        if wanted.filter is None or wanted.provenance is not None or self.records.sealed:
            return [row[0] for row, _ in (yield from self.rows(wanted))]
        condition, indexed = yield from self._condition(wanted)
        rows = yield self._matching(wanted, condition, indexed, "i.id, i.value", -1)
        matches = wanted.filter.matches
        return [row for row, value in rows if matches(decode(value))]

    # -- conditions and indexes

    def indexes(self) -> Flow[list[str]]:
        """The paths that have an index."""
        rows = yield self.sql("path_indexes")
        return sorted(name.removeprefix(_INDEX).replace("^", "") for (name,) in rows)

    def _condition(self, wanted: Wanted) -> Flow[tuple[Condition, str]]:
        """The part of a filter that SQL can decide, and the index to use."""
        if wanted.filter is None or self.records.sealed:
            return Condition("TRUE"), ""
        condition = condition_of(wanted.filter, "i.value", (yield from self.indexes()))
        for path in condition.paths:
            indexed = f'INDEXED BY "{index_name(path)}"'
            found = yield self._matching(wanted, condition, indexed, "1", _SELECTIVE)
            if len(found) < _SELECTIVE:
                return condition, indexed
        return condition, ""

    def _matching(
        self, wanted: Wanted, condition: Condition, indexed: str, columns: str, limit: int
    ) -> Statement:
        sql = self.sql["matching"].format(
            columns=columns, condition=condition.text, indexed=indexed
        )
        return Statement(sql, (*span(wanted.prefix), wanted.now, *condition.params, limit))

    def _under(self, wanted: Wanted) -> Flow[tuple[str, tuple[Any, ...]]]:
        """The statement of a search at present, and its parameters but for the page."""
        condition, indexed = yield from self._condition(wanted)
        sql = self.sql["under"].format(condition=condition.text, indexed=indexed)
        # for either list that is merged
        return sql, (*span(wanted.prefix), wanted.now, *condition.params) * 2

    def explain(self, wanted: Wanted) -> Flow[QueryPlan]:
        """The plan of a search without a query."""
        sql, bound = yield from self._under(wanted)
        account = yield Statement(self.sql["explain"].format(query=sql), (*bound, 10, 0))
        steps = tuple(row[3] for row in account)
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
        low, high = span(root + literal_head(conditions))
        out: list[Namespace] = []
        done = b""  # all that begins with it is answered
        while len(out) < offset + limit:
            rows = yield self.sql("paths", low, high, now, as_of, _PAGE)
            for (path,) in rows:
                if done and path.startswith(done):
                    continue
                namespace = labels(path[len(root) :])
                if not matches(conditions, namespace):
                    continue
                if max_depth is not None and len(namespace) >= max_depth:
                    namespace = namespace[:max_depth]
                    done = root + joined(namespace)
                out.append(namespace)
            if len(rows) < _PAGE:
                break
            last = rows[-1][0]
            low = span(done)[1] if done and last.startswith(done) else last + b"\0"
        return out[offset : offset + limit]


def index_name(path: str) -> str:
    """The name of the index on a path; SQLite takes names that differ in case for the same.

    >>> index_name("user.firstName")
    'store_path:user.first^Name'
    """
    return _INDEX + re.sub("([A-Z])", r"^\1", path)


def ended(row: Row, now: int) -> Row:
    """A row whose version ended by expiring, if it has, though nobody swept it yet."""
    is_alive = row[7] is None or row[7] > now
    return row if is_alive else (*row[:6], row[7], *row[7:])

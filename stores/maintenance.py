"""Looking after a store: expired items, old versions, indexes on paths, counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.errors import ConfigurationError
from perdure.storage.flow import Flow, Statement, rows_of
from perdure.stores.base import Namespace, QueryPlan, StoreStats, VersionRetention
from perdure.stores.filter_sql import index_expression, index_path
from perdure.stores.namespaces import span
from perdure.stores.parts import Parts
from perdure.stores.reading import index_name

_SWEEP = 500  # items closed, or versions dropped, in one transaction
_FAR = 1_000_000  # days or versions: enough to keep all


class Maintenance:
    """Looks after a store.

    Args:
        parts: Of the store.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sql, self._reader = parts.sql, parts.reader
        self._read, self._write = parts.database.read, parts.database.write

    def sweep(self) -> int:
        """Close the items whose time is over. Returns how many."""
        parts, total = self._parts, 0
        while found := self._write(lambda: parts.writer.sweep(parts.now(), _SWEEP)):
            total += found
        return total

    def retain(self, rule: VersionRetention, prefix: Namespace) -> int:
        """Drop closed versions that a rule does not keep. Returns how many.

        Raises:
            ConfigurationError: The rule keeps nothing in particular, or has a negative number.
        """
        _check_rule(rule)
        path = self._parts.path(prefix)
        since = None if rule.days is None else self._parts.now() - int(rule.days * 86_400_000_000)
        total = 0
        while found := self._write(lambda: self._drop_versions(path, rule.last, since)):
            total += found
        if total:
            self._write(lambda: self._drop_empty(path))
            self._parts.database.shrink()
        return total

    def _drop_versions(self, prefix: bytes, last: int | None, since: int | None) -> Flow[int]:
        far = 1 << 62  # as the statement knows it
        bound = (*span(prefix), far if since is None else since, far if last is None else last)
        rows = yield Statement(self._sql["old_versions"], (*bound, _SWEEP))
        if rows:
            for statement in ("drop_index_with", "drop_version", "drop_index"):
                yield Statement(self._sql[statement], rows, many=True)
            yield Statement(self._sql["bump_setting"], ("erasures",))
        return len(rows)

    def _drop_empty(self, prefix: bytes) -> Flow[None]:
        yield Statement(self._sql["drop_empty_namespaces"], span(prefix))
        yield Statement(self._sql["drop_index_left"])
        yield Statement(self._sql["bump_setting"], ("erasures",))

    def create_index(self, path: str) -> None:
        """Make an index on a path.

        Raises:
            ConfigurationError: The path is no names joined by dots, or values are encrypted.
        """
        checked = index_path(path)
        if self._parts.records.sealed:
            raise ConfigurationError(
                "values in this store are encrypted, so a path cannot have an index"
            )
        on = index_expression(checked, "value")
        sql = f'CREATE INDEX IF NOT EXISTS "{index_name(checked)}" ON store_items (ns, {on})'
        self._write(lambda: rows_of(sql))

    def drop_index(self, path: str) -> None:
        """Remove an index, if it is there."""
        sql = f'DROP INDEX IF EXISTS "{index_name(index_path(path))}"'
        self._write(lambda: rows_of(sql))

    def indexes(self) -> list[str]:
        """The paths that have an index."""
        return self._read(self._reader.indexes())

    def explain(self, prefix: Namespace, filter: Mapping[str, Any] | None) -> QueryPlan:
        """How a search would be answered."""
        return self._read(self._reader.explain(self._parts.wanted(prefix, filter)))

    def stats(self, missing: Flow[int]) -> StoreStats:
        """Counts and sizes, given the flow that counts missing vectors."""
        namespaces, items, size, versions = self._read(rows_of(self._sql["counts"]))[0]
        sizes = self._parts.database.stats()
        return StoreStats(
            namespaces, items, versions, self._read(missing), size, tuple(self.indexes()), sizes
        )


def _check_rule(rule: VersionRetention) -> None:
    if rule.last is None and rule.days is None:
        raise ConfigurationError("the retention rule is empty; give last= or days=")
    for name, number, kind in (("last", rule.last, int), ("days", rule.days, int | float)):
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, kind) or not 0 <= number < _FAR:
            raise ConfigurationError(
                f"retention {name}={number!r}; expected a number, zero or more"
            )

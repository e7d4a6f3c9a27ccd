"""The parts of an open store, with its clock, paths and parsed filters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import orjson
from langgraph.store.base import TTLConfig

from perdure.storage.database import Database
from perdure.storage.flow import NamedSQL
from perdure.stores.base import PROVENANCE
from perdure.stores.filters import Filter, parse
from perdure.stores.namespaces import check_prefix
from perdure.stores.puts import Limit, Preparer
from perdure.stores.reading import Reader, Records, Wanted, micros
from perdure.stores.runner import Runner
from perdure.stores.searching import Searcher
from perdure.stores.values import is_plain
from perdure.stores.writer import Writer

_FILTERS: dict[tuple[bytes, bool], Filter] = {}
_MOST_FILTERS: Final = 256


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an open store, or of the part of it under a prefix."""

    database: Database
    sql: NamedSQL
    reader: Reader
    writer: Writer
    preparer: Preparer
    searcher: Searcher
    runner: Runner
    ttl: TTLConfig | None
    clock: Callable[[], float]
    root: bytes = b""  # the path that all namespaces are under

    def under(self, prefix: bytes, limits: tuple[Limit, ...]) -> Self:
        """The same under a path: nothing outside it can be named, and messages leave it out."""
        records = replace(self.records, root=len(prefix))
        reader = replace(self.reader, records=records)
        writer = replace(self.writer, records=records)
        return replace(
            self,
            reader=reader,
            writer=writer,
            runner=Runner(self.database, writer, self.runner.embeddings),
            searcher=replace(self.searcher, reader=reader),
            preparer=self.preparer.under(prefix, limits),
            root=prefix,
        )

    @property
    def records(self) -> Records:
        """The reader of rows."""
        return self.reader.records

    def now(self) -> int:
        """The time, in microseconds."""
        return int(self.clock() * 1_000_000)

    def path(self, prefix: Any) -> bytes:
        """The path of a prefix that a caller names."""
        return self.root + check_prefix(prefix)

    def wanted(
        self, prefix: Any, filter: Any = None, provenance: Any = None, as_of: Any = None
    ) -> Wanted:
        """The items that a call selects."""
        return Wanted(
            self.path(prefix),
            self.now(),
            None if filter is None or filter == {} else _parsed(filter),
            None
            if provenance is None or provenance == {}
            else _parsed(provenance, of_provenance=True),
            None if as_of is None else micros(as_of),
        )

    def refreshes(self, refresh_ttl: bool | None) -> bool:
        """The value of the call, else of the configuration; else no, as in langgraph's stores."""
        if refresh_ttl is None:
            return (self.ttl or {}).get("refresh_on_read", False)
        return refresh_ttl


def _parsed(filter: Any, *, of_provenance: bool = False) -> Filter:
    """A filter, the same object for one of the same form: agents ask with few forms."""
    fields = PROVENANCE if of_provenance else None
    try:
        form = (orjson.dumps(filter), of_provenance) if is_plain(filter) else None
    except TypeError:  # no Unicode text
        form = None
    if form is None:
        return parse(filter, fields)
    found = _FILTERS.get(form)
    if found is None:
        found = parse(filter, fields)
        if len(_FILTERS) >= _MOST_FILTERS:
            _FILTERS.clear()
        _FILTERS[form] = found
    return found


def clear_filters() -> None:
    """Drop the filters that are kept: one may hold what it looks for."""
    _FILTERS.clear()

"""What all of a store shares: its parts, and the reading of arguments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson
from langgraph.store.base import (
    BaseStore,
    NotProvided,
    TTLConfig,
)

from perdure.errors import ConfigurationError
from perdure.storage.database import Database
from perdure.stores.base import PROVENANCE, TTL, Provenance
from perdure.stores.filters import Filter, parse
from perdure.stores.namespaces import check_prefix
from perdure.stores.preparing import Index, Preparer, Request
from perdure.stores.reading import Reader, Wanted
from perdure.stores.records import micros
from perdure.stores.searching import MODES, Query, Searcher
from perdure.stores.steps import Driver
from perdure.stores.values import is_plain
from perdure.stores.weighting import Weights
from perdure.stores.writing import Limit, Writer


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


_FILTERS: dict[tuple[bytes, bool], Filter] = {}
_MOST_FILTERS: Final = 256
_MOST: Final = 1 << 60  # rows: SQLite counts in 64 bits


class Core(BaseStore):
    """The parts of an open store."""

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
        ttl: TTL = None,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> Request:
        if isinstance(ttl, NotProvided):
            ttl = (self.ttl_config or {}).get("default_ttl")
        return Request(namespace, key, value, index, ttl, if_version, provenance, self._limits)

    def _now(self) -> int:
        return int(self._clock() * 1_000_000)

    # -- arguments

    def _refreshes(self, refresh_ttl: bool | None) -> bool:
        """What a call says, else the configuration; without one, as in langgraph's stores, no."""
        if refresh_ttl is None:
            return (self.ttl_config or {}).get("refresh_on_read", False)
        return refresh_ttl

    def _path(self, namespace: Any) -> bytes:
        return self._root + check_prefix(namespace)

    def _wanted(
        self, prefix: Any, filter: Any = None, provenance: Any = None, as_of: Any = None
    ) -> Wanted:
        return Wanted(
            self._path(prefix),
            self._now(),
            None if filter is None or filter == {} else _parsed(filter),
            None
            if provenance is None or provenance == {}
            else _parsed(provenance, of_provenance=True),
            None if as_of is None else micros(as_of),
        )

    @staticmethod
    def _query(
        text: Any,
        mode: Any,
        context: bool,
        explain: bool,
        weights: Weights | None = None,
        during: Any = None,
        min_score: Any = None,
    ) -> Query | None:
        if mode not in MODES:
            raise ConfigurationError(f"mode is {mode!r}; expected one of {MODES}")
        span = None if during is None else _span(during)
        least = None if min_score is None else _least(min_score)
        if text is None or text == "":
            return None
        if not isinstance(text, str):
            raise ConfigurationError(f"query is {text!r}; expected text")
        words = text.encode("utf-8", "replace").decode()
        return Query(words, mode, context, explain, weights or Weights(), span, least)

    @staticmethod
    def _page(limit: Any, offset: Any) -> tuple[int, int]:
        for name, number in (("limit", limit), ("offset", offset)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigurationError(
                    f"{name} is {number!r}; expected a whole number, zero or more"
                )
        return min(limit, _MOST), min(offset, _MOST)


def _least(score: Any) -> float:
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise ConfigurationError(f"min_score is {score!r:.80}; expected a number, or None")
    return float(score)


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


def forget_filters() -> None:
    """Let go of the filters that are kept."""
    _FILTERS.clear()


def system_clock() -> float:
    """Seconds since 1970."""
    return time.time()

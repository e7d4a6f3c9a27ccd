r"""SQL conditions that narrow a scan for a filter: true for every row that the filter matches.

They let through more than the filter does, never less; what comes through is checked by
`Filter.matches`. What keeps them on the safe side of SQLite's own reading of JSON:

- SQLite 3.40 cuts a string at `\u0000`, so `$gt` is asked as `>=`;
- integers beyond 64 bits become reals, and decimal reals may be off in the last digits
  (https://sqlite.org/floatingpoint.html), so numbers are compared with some slack;
- `true` is extracted as 1 and an array as its text: both are let through.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from perdure.stores.filter_nodes import Compare, Elements, Every, Field, Node, Not, Object, Some
from perdure.stores.filter_operands import TRUTHS, bounds_of, sorted_operands
from perdure.stores.filter_paths import index_expression, index_path, json_paths, storable

_LONGEST = 10_000  # characters of SQL: keeps expressions under SQLite's depth limit of 1,000
_MOST_PLACES = 8


@dataclass(frozen=True, slots=True)
class Condition:
    """A boolean SQL expression and its parameters, in order.

    Attributes:
        text: What goes after WHERE; it may be joined by AND as it is.
        params: A value for each `?`.
        exact: No row comes through that the filter does not match.
    """

    text: str
    params: tuple[str | int | float, ...] = ()
    exact: bool = False


class _Place(NamedTuple):
    """Where a value lies: under one of the paths, anywhere if there are none."""

    paths: tuple[str, ...]
    expression: str = ""  # the indexed expression that stands for them


_ROOT = _Place(("$",))


def condition_of(node: Node, column: str, indexed: Collection[str]) -> Condition:
    """The tightest condition that can be kept safely; see `Filter.sql`."""
    paths = frozenset(index_path(path) for path in indexed)
    return _Writer(column, paths).condition(node, _ROOT) or Condition("TRUE")


class _Writer:
    """Writes conditions on one column."""

    def __init__(self, column: str, indexed: frozenset[str]) -> None:
        self._column = column
        self._indexed = indexed

    def condition(self, node: Node, place: _Place) -> Condition | None:
        """The condition for a value at a place; None when nothing can be said of it."""
        match node:
            case Compare(name, operand):
                return self._compare(name, operand, place)
            case Field(key, inner):
                return self.condition(inner, self._below(place, key))
            case Every(parts):
                ranges = [part for part in parts if isinstance(part, Compare) and part.is_range]
                others = [part for part in parts if part not in ranges]
                found = [self.condition(part, place) for part in others]
                return _all(found + self._ranges(ranges, place))
            case Some(parts):
                return _any([self.condition(part, place) for part in parts])
            case Object(fields):
                typed = self._typed(place, "= 'object'", exact=True)
                return _all([typed, *(self.condition(field, place) for field in fields)])
            case Elements(parts):
                return self._elements(parts, place)
            case Not():
                return None

    def _below(self, place: _Place, key: str) -> _Place:
        paths = tuple(path + end for path in place.paths for end in json_paths(key))
        if len(paths) > _MOST_PLACES:
            return _Place(())
        if place is _ROOT and key in self._indexed:
            return _Place(paths, index_expression(key, self._column))
        return _Place(paths)

    def _elements(self, parts: Sequence[Node], place: _Place) -> Condition | None:
        found = [self._typed(place, "= 'array'", exact=True)]
        for path in place.paths[:1] if len(place.paths) == 1 else ():
            length = f"json_array_length({self._column}, ?) = {len(parts)}"
            found.append(Condition(length, (path,), exact=True))
        for number, part in enumerate(parts):
            inside = _Place(tuple(f"{path}[{number}]" for path in place.paths))
            found.append(self.condition(part, inside))
        return _all(found)

    def _compare(self, name: str, operand: Any, place: _Place) -> Condition | None:
        match name:
            case "$eq":
                if isinstance(operand, str) and not place.paths:
                    return self._written(operand, quoted=True)
                return self._among([operand], place)
            case "$in":
                return self._among(operand, place)
            case "$exists":
                return self._typed(place, "IS NOT NULL" if operand else "IS NULL", exact=True)
            case "$contains":
                if not isinstance(operand, str):
                    return self._typed(place, "= 'array'")
                typed = self._typed(place, "IN ('array', 'text')")
                return _all([self._written(operand, quoted=False), typed])
            case _:
                return _all(self._ranges([Compare(name, operand)], place))

    def _among(self, operands: Sequence[Any], place: _Place) -> Condition | None:
        if not operands:
            return Condition("FALSE", exact=True)
        keys, numbers, types = sorted_operands(operands)
        parts: list[Condition | None] = []
        if len(keys) == 1:
            parts.append(self._value(place, "= ?", keys[0]))
        elif keys:
            parts.append(
                self._value(place, "IN (SELECT value FROM json_each(?))", json.dumps(keys))
            )
        if numbers:
            low, high = min(low for low, _ in numbers), max(high for _, high in numbers)
            parts.append(self._value(place, "BETWEEN ? AND ?", low, high))
        if types:
            parts.append(self._of_types(types, place))
        return _any(parts)

    def _of_types(self, types: Sequence[str], place: _Place) -> Condition | None:
        named = ", ".join(f"'{name}'" for name in types)
        sure = set(types) <= TRUTHS | {"null"}
        found = self._typed(place, f"IN ({named})", exact=sure)
        if place.expression and set(types) <= TRUTHS:
            return _all([self._value(place, "IN (0, 1)"), found])
        return found

    def _ranges(self, parts: Sequence[Compare], place: _Place) -> list[Condition | None]:
        """Range operators on one value, as one BETWEEN: an index is searched by both its ends."""
        found: list[Condition | None] = []
        texts = [part for part in parts if isinstance(part.operand, str)]
        numbers = [part for part in parts if not isinstance(part.operand, str)]
        if texts and all(storable(part.operand) for part in texts):
            first = max((part.operand for part in texts if part.is_lower), default="")
            lasts = [part.operand for part in texts if not part.is_lower]
            asked = ("BETWEEN ? AND ?", first, min(lasts)) if lasts else (">= ?", first)
            found.append(self._value(place, *asked))
        elif texts:
            found.append(self._typed(place, "= 'text'"))
        if numbers:
            spans = [(part.is_lower, bounds_of(part.operand)) for part in numbers]
            lows = [span[0] for lower, span in spans if lower and span]
            highs = [span[1] for lower, span in spans if not lower and span]
            # up to infinity, since to SQLite every text is above every number
            low, high = max(lows, default=-inf), min(highs, default=inf)
            found.append(self._value(place, "BETWEEN ? AND ?", low, high))
        return found

    def _value(self, place: _Place, asked: str, *params: str | int | float) -> Condition | None:
        if place.expression:
            return Condition(f"{place.expression} {asked}", params)
        text = f"json_extract({self._column}, ?) {asked}"
        return _any([Condition(text, (path, *params)) for path in place.paths])

    def _typed(self, place: _Place, asked: str, *, exact: bool = False) -> Condition | None:
        text = f"json_type({self._column}, ?) {asked}"
        sure = exact and len(place.paths) == 1  # of several places, only one is the filter's
        return _any([Condition(text, (path,), sure) for path in place.paths])

    def _written(self, text: str, *, quoted: bool) -> Condition | None:
        """The column's JSON has the text somewhere, in either way that `json.dumps` writes it."""
        if not storable(text):
            return None
        forms = dict.fromkeys(json.dumps(text, ensure_ascii=ascii) for ascii in (False, True))
        asked = f"instr({self._column}, ?) > 0"
        return _any([Condition(asked, (form if quoted else form[1:-1],)) for form in forms])


def _all(parts: Iterable[Condition | None]) -> Condition | None:
    """Parts joined by AND. One that is unknown, or too long, is left out."""
    given = list(parts)
    found: list[Condition] = []
    length = 0
    for part in given:
        if part is not None and length + len(part.text) <= _LONGEST:
            found.append(part)
            length += len(part.text)
    exact = len(found) == len(given) and all(part.exact for part in found)
    if not found:
        return Condition("TRUE", exact=True) if not given else None
    return _joined(" AND ", found, exact)


def _any(parts: Iterable[Condition | None]) -> Condition | None:
    """Parts joined by OR; unknown if there are none, one is unknown, or they are too long."""
    given = list(parts)
    found = [part for part in given if part is not None]
    length = sum(len(part.text) for part in found)
    if not found or len(found) < len(given) or length > _LONGEST:
        return None
    return _joined(" OR ", found, all(part.exact for part in found))


def _joined(word: str, parts: Sequence[Condition], exact: bool) -> Condition:
    text = word.join(part.text for part in parts)
    params = tuple(value for part in parts for value in part.params)
    return Condition(f"({text})" if len(parts) > 1 else text, params, exact)

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
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, TypeGuard

from perdure.errors import ConfigurationError
from perdure.stores.filters import (
    MAX_STEPS,
    ORDER,
    Compare,
    Every,
    Field,
    Filter,
    Node,
    Not,
    Some,
    Step,
    steps_of,
)

_LONGEST = 10_000  # characters of SQL: keeps expressions under SQLite's depth limit of 1,000
_MOST_PLACES = 8
_LOWER = ("$gt", "$gte")  # ends of a range
_TRUTHS = frozenset(("true", "false"))
_EQUAL, _BETWEEN, _NEVER = range(3)
_UNSURE = re.compile(r'["\\\x00-\x1f\x7f]')  # as labels of a JSON path
_IDENTIFIERS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True, slots=True)
class Condition:
    """A boolean SQL expression and its parameters, in order."""

    text: str
    params: tuple[str | int | float, ...] = ()


_ANY = Condition("TRUE")  # what is said of a value of which SQL can say nothing


def condition_of(filter: Filter, column: str, indexed: Collection[str] = ()) -> Condition:
    """A condition for SQLite that holds for every row that a filter matches, and for few others."""
    form = column, frozenset(indexed).intersection(indexable(filter))
    if form not in filter.cache:
        paths = frozenset(index_path(path) for path in indexed)
        filter.cache[form] = _Writer(column, paths).condition(filter.node, _ROOT)
    condition: Condition = filter.cache[form]
    return condition


def indexable(filter: Filter) -> list[str]:
    """The paths an index could serve a filter by, equalities before ranges."""
    if "indexable" not in filter.cache:
        ranked: dict[str, int] = {}
        for part in _conjuncts(filter.node):
            if isinstance(part, Field) and _may_be_indexed(part.key):
                rank = min(map(_rank, _conjuncts(part.condition)))
                ranked[part.key] = min(rank, ranked.get(part.key, _NEVER))
        served = [key for key in ranked if ranked[key] < _NEVER]
        filter.cache["indexable"] = sorted(served, key=ranked.__getitem__)
    return list(filter.cache["indexable"])


def index_path(path: object) -> str:
    """Check a path that an index is made on.

    Raises:
        ConfigurationError: It is anything else.
    """
    if not _may_be_indexed(path):
        raise ConfigurationError(
            f"cannot index the path {path!r}; expected labels of letters, digits and underscores"
            " joined by dots, like 'kind' or 'author.name'"
        )
    return path


def index_expression(path: str, column: str) -> str:
    """The SQL expression to index so that filters on `path` can use it, the literal key first."""
    extracted = f"json_extract({column}, '$.{index_path(path)}')"
    if "." not in path:
        return extracted
    return f"coalesce(json_extract({column}, '$.\"{path}\"'), {extracted})"


class _Place(NamedTuple):
    """The place of a value: under one of the paths; anywhere without paths."""

    paths: tuple[str, ...]
    expression: str = ""  # the indexed expression that stands for them


_ROOT = _Place(("$",))


class _Writer:
    """Writes conditions on one column."""

    def __init__(self, column: str, indexed: frozenset[str]) -> None:
        self._column = column
        self._indexed = indexed

    def condition(self, node: Node, place: _Place) -> Condition:
        """The condition for a value at a place."""
        match node:
            case Compare(name, operand):
                return self._compare(name, operand, place)
            case Field(key, inner):
                return self.condition(inner, self._below(place, key))
            case Every(parts):
                ranges = [
                    part for part in parts if isinstance(part, Compare) and part.operator in ORDER
                ]
                others = [part for part in parts if part not in ranges]
                found = [self.condition(part, place) for part in others]
                return _all(found + self._ranges(ranges, place))
            case Some(parts):
                return _any([self.condition(part, place) for part in parts])
            case Not():
                return _ANY

    def _below(self, place: _Place, key: str | int) -> _Place:
        ends = [f"[{key}]"] if isinstance(key, int) else _json_paths(key)
        paths = tuple(path + end for path in place.paths for end in ends)
        if len(paths) > _MOST_PLACES:
            return _Place(())
        if place is _ROOT and key in self._indexed:
            return _Place(paths, index_expression(str(key), self._column))
        return _Place(paths)

    def _compare(self, name: str, operand: Any, place: _Place) -> Condition:
        match name:
            case "object":
                return self._typed(place, "= 'object'")
            case "array":
                typed = self._typed(place, "= 'array'")
                if len(place.paths) != 1:
                    return typed
                length = f"json_array_length({self._column}, ?) = {operand}"
                return _all([typed, Condition(length, place.paths)])
            case "$eq":
                if isinstance(operand, str) and not place.paths:
                    return self._written(operand, quoted=True)
                return self._among([operand], place)
            case "$in":
                return self._among(operand, place)
            case "$exists":
                return self._typed(place, "IS NOT NULL" if operand else "IS NULL")
            case "$contains":
                if not isinstance(operand, str):
                    return self._typed(place, "= 'array'")
                typed = self._typed(place, "IN ('array', 'text')")
                return _all([self._written(operand, quoted=False), typed])
            case _:
                return _all(self._ranges([Compare(name, operand)], place))

    def _among(self, operands: Sequence[Any], place: _Place) -> Condition:
        if not operands:
            return Condition("FALSE")
        keys, numbers, types = _sorted(operands)
        parts: list[Condition] = []
        if len(keys) == 1:
            parts.append(self._value(place, "= ?", keys[0]))
        elif keys:
            asked = "IN (SELECT value FROM json_each(?))"
            parts.append(self._value(place, asked, json.dumps(keys)))
        if numbers:
            low, high = min(low for low, _ in numbers), max(high for _, high in numbers)
            parts.append(self._value(place, "BETWEEN ? AND ?", low, high))
        if types:
            named = ", ".join(f"'{name}'" for name in types)
            typed = self._typed(place, f"IN ({named})")
            if place.expression and _TRUTHS.issuperset(types):  # which an index has as numbers
                typed = _all([self._value(place, "IN (0, 1)"), typed])
            parts.append(typed)
        return _any(parts)

    def _ranges(self, parts: Sequence[Compare], place: _Place) -> list[Condition]:
        """Range operators on one value, as one BETWEEN: an index is searched by both its ends."""
        found: list[Condition] = []
        texts = [part for part in parts if isinstance(part.operand, str)]
        numbers = [part for part in parts if not isinstance(part.operand, str)]
        if texts and all(_storable(part.operand) for part in texts):
            first = max((part.operand for part in texts if part.operator in _LOWER), default="")
            lasts = [part.operand for part in texts if part.operator not in _LOWER]
            asked = ("BETWEEN ? AND ?", first, min(lasts)) if lasts else (">= ?", first)
            found.append(self._value(place, *asked))
        elif texts:
            found.append(self._typed(place, "= 'text'"))
        if numbers:
            spans = [(part.operator in _LOWER, _bounds(part.operand)) for part in numbers]
            lows = [span[0] for lower, span in spans if lower and span]
            highs = [span[1] for lower, span in spans if not lower and span]
            # up to infinity, since to SQLite every text is above every number
            low, high = max(lows, default=-inf), min(highs, default=inf)
            found.append(self._value(place, "BETWEEN ? AND ?", low, high))
        return found

    def _value(self, place: _Place, asked: str, *params: str | int | float) -> Condition:
        if place.expression:
            return Condition(f"{place.expression} {asked}", params)
        text = f"json_extract({self._column}, ?) {asked}"
        return _any([Condition(text, (path, *params)) for path in place.paths])

    def _typed(self, place: _Place, asked: str) -> Condition:
        text = f"json_type({self._column}, ?) {asked}"
        return _any([Condition(text, (path,)) for path in place.paths])

    def _written(self, text: str, *, quoted: bool) -> Condition:
        """The column's JSON has the text somewhere, in either way that `json.dumps` writes it."""
        if not _storable(text):
            return _ANY
        forms = dict.fromkeys(json.dumps(text, ensure_ascii=ascii) for ascii in (False, True))
        asked = f"instr({self._column}, ?) > 0"
        return _any([Condition(asked, (form if quoted else form[1:-1],)) for form in forms])


def _sorted(
    operands: Iterable[Any],
) -> tuple[list[str | int], list[tuple[float, float]], list[str]]:
    """JSON values as those that are compared exactly, as ranges, and as types alone."""
    keys: list[str | int] = []
    numbers: list[tuple[float, float]] = []
    types: list[str] = []
    for value in operands:
        if isinstance(value, bool) or value is None:
            types.append(json.dumps(value))
        elif isinstance(value, (list, dict)):
            types.append("object" if isinstance(value, dict) else "array")
        elif isinstance(value, str):
            keys.append(value) if _storable(value) else types.append("text")
        elif abs(value) <= 2**53 and value == int(value):
            keys.append(int(value))  # as 1 and as 1.0, SQLite reads these without error
        elif (bounds := _bounds(value)) is not None:
            numbers.append(bounds)
        else:
            types += ("integer", "real")
    return keys, numbers, list(dict.fromkeys(types))


def _bounds(number: int | float) -> tuple[float, float] | None:
    """Between which reals SQLite reads the number; None if it may read an infinity, and for NaN."""
    try:
        value = float(number)
    except OverflowError:
        return None
    if not math.isfinite(value):
        return None
    slack = abs(value) * 1e-12 + 1e-300  # 15 digits are promised; the smallest reals have fewer
    return value - slack, value + slack


def _storable(text: str) -> bool:
    """Whether SQLite takes and returns a text whole: no NUL, no half of a surrogate pair."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _json_paths(key: str) -> tuple[str, ...]:
    """The ends of SQLite JSON paths under which the value that `key` reaches can lie.

    The literal key and the path, each as the two ways in which `json.dumps` writes a label that is
    not ASCII: SQLite 3.40 compares labels as they are written, escapes and all. Empty when there is
    no such path: for `[*]`, and for labels with quotes, backslashes or control characters.
    """
    found: list[str] = []
    for way in dict.fromkeys(((key,), steps_of(key))):
        for ascii_only in (False,) if key.isascii() else (False, True):
            ends = [_json_step(step, ascii_only) for step in way]
            if None in ends:
                return ()
            found.append("".join(map(str, ends)))
    return tuple(dict.fromkeys(found))


def _json_step(step: Step, ascii_only: bool) -> str | None:
    if isinstance(step, int):
        return f"[{step}]" if step >= 0 else f"[#{step}]"
    if not isinstance(step, str) or _UNSURE.search(step) or not _storable(step):
        return None
    return f".{json.dumps(step, ensure_ascii=ascii_only)}"


def _may_be_indexed(path: object) -> TypeGuard[str]:
    if not isinstance(path, str) or path.count(".") >= MAX_STEPS:
        return False
    return bool(_IDENTIFIERS.fullmatch(path))


def _conjuncts(node: Node) -> Iterator[Node]:
    """The parts that all have to hold."""
    if isinstance(node, Every):
        for part in node.parts:
            yield from _conjuncts(part)
    else:
        yield node


def _rank(node: Node) -> int:
    """How well an index serves a condition: `_EQUAL` before `_BETWEEN`, or `_NEVER`."""
    if not isinstance(node, Compare):
        return _NEVER
    if node.operator in ("$eq", "$in"):
        operands = [node.operand] if node.operator == "$eq" else node.operand
        return _EQUAL if operands and _TRUTHS.issuperset(_sorted(operands)[2]) else _NEVER
    if node.operator not in ORDER:
        return _NEVER
    operand = node.operand
    served = _storable(operand) if isinstance(operand, str) else _bounds(operand) is not None
    return _BETWEEN if served else _NEVER


def _all(parts: Sequence[Condition]) -> Condition:
    """Parts joined by AND; those that make it too long are left out."""
    found: list[Condition] = []
    length = 0
    for part in parts:
        if part is not _ANY and length + len(part.text) <= _LONGEST:
            found.append(part)
            length += len(part.text)
    return _joined(" AND ", found)


def _any(parts: Sequence[Condition]) -> Condition:
    """Parts joined by OR, if all say something and are not too long."""
    if _ANY in parts or sum(len(part.text) for part in parts) > _LONGEST:
        return _ANY
    return _joined(" OR ", parts)


def _joined(word: str, parts: Sequence[Condition]) -> Condition:
    if len(parts) < 2:
        return parts[0] if parts else _ANY
    params = tuple(value for part in parts for value in part.params)
    return Condition(f"({word.join(part.text for part in parts)})", params)

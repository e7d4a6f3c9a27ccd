"""SQL conditions that narrow a scan for a filter: true for every row that the filter matches.

They let through more than the filter does, never less; what comes through is checked by
`Filter.matches`. Texts, finite numbers and truths narrow, as operands of `$eq`, `$in` and an order;
of everything else SQL says nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Self, TypeGuard

from perdure.errors import ConfigurationError
from perdure.stores.filters import (
    EACH,
    MAX_STEPS,
    ORDER,
    Compare,
    Every,
    Field,
    Filter,
    Node,
    Some,
    Step,
    steps_of,
)

_LONGEST = 10_000  # characters of SQL: keeps expressions under SQLite's depth limit of 1,000
_MOST_PATHS = 8
_EXACT = 2**53  # whole numbers up to it are read without error, be they written 1 or 1.0
_LARGEST = 1e300
CUT = re.compile(r"[\x00\ud800-\udfff]")  # what SQL does not return whole: NUL, half of a pair
_UNSURE = re.compile(r'["\\\x00-\x1f\x7f\ud800-\udfff]')  # as labels of a JSON path
_IDENTIFIERS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


class Condition(NamedTuple):
    """A boolean SQL expression with its parameters, and the indexed paths that may serve it."""

    text: str
    params: tuple[Any, ...] = ()
    paths: tuple[str, ...] = ()

    def numbered(self, first: int) -> str:
        """The expression, in a statement where it may stand twice."""
        numbers = count(first)
        return re.sub(r"\?", lambda _: f"?{next(numbers)}", self.text)


_ANY = Condition("TRUE")  # what is said of a value of which SQL can say nothing


def condition_of(filter: Filter, place: JSONPlace, indexed: Collection[str] = ()) -> Condition:
    """A condition that holds for every row that a filter matches, and for few others.

    `place` is the column of the documents.
    """
    form = place, tuple(indexed)
    if form not in filter.conditions:
        made = _condition(filter.node, place, set(map(index_path, indexed)))
        made = made if made is _ANY else place.whole(made)
        served = tuple(path for path in indexable(filter) if path in indexed)
        filter.conditions[form] = made._replace(paths=served)
    found: Condition = filter.conditions[form]
    return found


def indexable(filter: Filter) -> list[str]:
    """The paths an index could serve a filter by, equalities before ranges."""
    found = [
        (part.operator in ORDER, field.key)
        for field in _conjuncts(filter.node)
        if isinstance(field, Field) and _may_be_indexed(field.key)
        for part in _conjuncts(field.condition)
        if isinstance(part, Compare)
        and _compared(part.operator, part.operand, JSONPlace("", (), "index")) is not _ANY
    ]
    return list(dict.fromkeys(key for _, key in sorted(found, key=lambda pair: pair[0])))


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


# -- from a filter to SQL


def _condition(node: Node, place: JSONPlace, indexed: Collection[str] = ()) -> Condition:
    match node:
        case Compare(name, operand):
            return _compared(name, operand, place)
        case Field(key, inner):
            return _condition(inner, place.below(key, key in indexed))
        case Every(parts):
            return _all([_condition(part, place, indexed) for part in parts])
        case Some(parts):
            return any_of([_condition(part, place, indexed) for part in parts])
        case _:
            return _ANY


def _compared(name: str, operand: Any, place: JSONPlace) -> Condition:
    match name:
        case "$eq":
            return _equal(operand, place)
        case "$in":
            exact = [key for value in operand if (key := _exact(value)) is not None]
            rest = [_equal(value, place) for value in operand if _exact(value) is None]
            return any_of([place.among(exact), *rest])
        case "$gt" | "$gte" if bounds := _bounds(operand):  # a NUL cuts a string in SQL
            return place.within(bounds[0], None)
        case "$lt" | "$lte" if bounds := _bounds(operand):
            return place.within(None, bounds[1])
    return _ANY


def _equal(value: Any, place: JSONPlace) -> Condition:
    if (key := _exact(value)) is not None:
        return place.among([key])
    bounds = _bounds(value)
    return _ANY if bounds is None else place.within(*bounds)


def _exact(value: Any) -> str | int | None:
    """What SQL reads of a JSON value without error; None: it may err, or cannot read it."""
    if isinstance(value, str):
        return None if CUT.search(value) else value
    if isinstance(value, int | float) and abs(value) <= _EXACT and value == int(value):
        return int(value)
    return None


def _bounds(value: Any) -> tuple[Any, Any] | None:
    """Between which SQL values a JSON value is read; None: nobody knows."""
    if isinstance(value, str):
        return None if CUT.search(value) else (value, value)
    if not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        return None
    # 15 digits are promised (https://sqlite.org/floatingpoint.html); the smallest have fewer
    slack = abs(value) * 1e-12 + 1e-300
    return value - slack, value + slack


def _all(parts: Sequence[Condition]) -> Condition:
    """Parts joined by AND; those that make it too long are left out."""
    found: list[Condition] = []
    length = 0
    for part in parts:
        if part is not _ANY and length + len(part.text) <= _LONGEST:
            found.append(part)
            length += len(part.text)
    return _joined(" AND ", found)


def any_of(parts: Sequence[Condition]) -> Condition:
    """Parts joined by OR, if all say something and are not too long."""
    if _ANY in parts or sum(len(part.text) for part in parts) > _LONGEST:
        return _ANY
    return _joined(" OR ", parts)


def _joined(word: str, parts: Sequence[Condition]) -> Condition:
    if len(parts) < 2:
        return parts[0] if parts else _ANY
    params = tuple(value for part in parts for value in part.params)
    return Condition(f"({word.join(part.text for part in parts)})", params)


# -- SQLite's JSON: another dialect has a `JSONPlace` of its own


def index_expression(path: str, column: str) -> str:
    """The SQL expression to index so that filters on `path` can use it, the literal key first."""
    extracted = f"json_extract({column}, '$.{index_path(path)}')"
    if "." not in path:
        return extracted
    return f"coalesce(json_extract({column}, '$.\"{path}\"'), {extracted})"


class JSONPlace(NamedTuple):
    """The place of a value in a column: under one of the paths; without paths it is not known."""

    column: str
    paths: tuple[Any, ...] = ("$",)
    expression: str = ""  # the indexed expression that reads it

    @property
    def takes_indexes(self) -> bool:
        """Whether paths of the column may have indexes."""
        return True

    def whole(self, condition: Condition) -> Condition:
        """The condition on a row, from that on its document."""
        return condition

    def below(self, key: str | int, is_indexed: bool) -> Self:
        """The place of what a key reaches here."""
        paths = tuple(path + end for path in self.paths for end in self.ends(key))
        expression = index_expression(str(key), self.column) if is_indexed else ""
        return self._replace(
            paths=paths if len(paths) <= _MOST_PATHS else (), expression=expression
        )

    def ends(self, key: str | int) -> Sequence[Any]:
        """What a key adds to a path."""
        return [f"[{key}]"] if isinstance(key, int) else _json_paths(key)

    def among(self, keys: Sequence[str | int]) -> Condition:
        """The value is one of some; 1 stands for true, too."""
        if len(keys) == 1:
            return self._read("= ?", keys[0])
        return self._read("IN (SELECT value FROM json_each(?))", json.dumps(keys))

    def within(self, low: str | float | None, high: str | float | None) -> Condition:
        """The value lies between bounds of one kind, of which one may be missing."""
        if low is None or high is None:
            return self._read("<= ?" if low is None else ">= ?", high if low is None else low)
        return self._read("BETWEEN ? AND ?", low, high)

    def _read(self, asked: str, *params: str | float | None) -> Condition:
        # SQLite extracts `true` as 1, and arrays as their text
        if self.expression:
            return Condition(f"{self.expression} {asked}", params)
        text = f"json_extract({self.column}, ?) {asked}"
        return any_of([Condition(text, (path, *params)) for path in self.paths])


def _json_paths(key: str) -> tuple[str, ...]:
    """The ends of SQLite JSON paths under which the value that `key` reaches can lie.

    The literal key and the path, each as the two ways in which `json.dumps` writes a label that is
    not ASCII: SQLite 3.40 compares labels as they are written, escapes and all. Empty when there is
    no such path: for `[*]`, and for labels with quotes, backslashes or control characters.
    """
    ways = dict.fromkeys(((key,), steps_of(key)))
    if any(step is EACH or _UNSURE.search(str(step)) for way in ways for step in way):
        return ()
    found = ("".join(_json_step(step, a) for step in way) for way in ways for a in (False, True))
    return tuple(dict.fromkeys(found))


def _json_step(step: Step, ascii_only: bool) -> str:
    if isinstance(step, int):
        return f"[{step}]" if step >= 0 else f"[#{step}]"
    return f".{json.dumps(step, ensure_ascii=ascii_only)}"

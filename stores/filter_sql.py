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
    ANY_ELEMENT,
    MAX_STEPS,
    ORDER_OPERATORS,
    AllOf,
    AnyOf,
    Comparison,
    FieldCondition,
    Filter,
    Node,
    Step,
    parse_path,
)

_MAX_SQL_LENGTH = 10_000  # characters of SQL: keeps expressions under SQLite's depth limit of 1,000
_MAX_PATHS = 8
_MAX_EXACT_INTEGER = (
    2**53
)  # whole numbers up to it are read without error, be they written 1 or 1.0
_MAX_NUMBER = 1e300
TRUNCATING = re.compile(
    r"[\x00\ud800-\udfff]"
)  # what SQL does not return whole: NUL, half of a pair
_UNSAFE_LABEL = re.compile(r'["\\\x00-\x1f\x7f\ud800-\udfff]')  # as labels of a JSON path
_IDENTIFIER_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


class Condition(NamedTuple):
    """A boolean SQL expression with its parameters, and the indexed paths that may serve it."""

    text: str
    params: tuple[Any, ...] = ()
    paths: tuple[str, ...] = ()

    def with_numbered_parameters(self, first: int) -> str:
        """The expression, in a statement where it may stand twice."""
        numbers = count(first)
        return re.sub(r"\?", lambda _: f"?{next(numbers)}", self.text)


_UNKNOWN = Condition("TRUE")  # what is said of a value of which SQL can say nothing


def build_condition(
    filter: Filter, location: JSONLocation, indexed: Collection[str] = ()
) -> Condition:
    """A condition that holds for every row that a filter matches, and for few others.

    `place` is the column of the documents.
    """
    cache_key = location, tuple(indexed)
    if cache_key not in filter.conditions:
        condition = _build_node_condition(
            filter.node, location, set(map(check_index_path, indexed))
        )
        condition = condition if condition is _UNKNOWN else location.condition_on_row(condition)
        index_paths = tuple(path for path in indexable_paths(filter) if path in indexed)
        filter.conditions[cache_key] = condition._replace(paths=index_paths)
    cached: Condition = filter.conditions[cache_key]
    return cached


def indexable_paths(filter: Filter) -> list[str]:
    """The paths an index could serve a filter by, equalities before ranges."""
    candidates = [
        (part.operator in ORDER_OPERATORS, field.key)
        for field in _iter_conjuncts(filter.node)
        if isinstance(field, FieldCondition) and _is_indexable(field.key)
        for part in _iter_conjuncts(field.condition)
        if isinstance(part, Comparison)
        and _build_comparison(part.operator, part.operand, JSONLocation("", (), "index"))
        is not _UNKNOWN
    ]
    return list(dict.fromkeys(key for _, key in sorted(candidates, key=lambda pair: pair[0])))


def check_index_path(path: object) -> str:
    """Check a path that an index is made on.

    Raises:
        ConfigurationError: It is anything else.
    """
    if not _is_indexable(path):
        raise ConfigurationError(
            f"cannot index the path {path!r}; expected labels of letters, digits and underscores"
            " joined by dots, like 'kind' or 'author.name'"
        )
    return path


def _is_indexable(path: object) -> TypeGuard[str]:
    if not isinstance(path, str) or path.count(".") >= MAX_STEPS:
        return False
    return bool(_IDENTIFIER_PATH.fullmatch(path))


def _iter_conjuncts(node: Node) -> Iterator[Node]:
    """The parts that all have to hold."""
    if isinstance(node, AllOf):
        for part in node.parts:
            yield from _iter_conjuncts(part)
    else:
        yield node


# -- from a filter to SQL


def _build_node_condition(
    node: Node, location: JSONLocation, indexed: Collection[str] = ()
) -> Condition:
    match node:
        case Comparison(name, operand):
            return _build_comparison(name, operand, location)
        case FieldCondition(key, condition):
            return _build_node_condition(condition, location.child_location(key, key in indexed))
        case AllOf(parts):
            return _join_with_and(
                [_build_node_condition(part, location, indexed) for part in parts]
            )
        case AnyOf(parts):
            return join_with_or([_build_node_condition(part, location, indexed) for part in parts])
        case _:
            return _UNKNOWN


def _build_comparison(name: str, operand: Any, location: JSONLocation) -> Condition:
    match name:
        case "$eq":
            return _build_equality(operand, location)
        case "$in":
            exact = [key for value in operand if (key := _find_exact_sql_value(value)) is not None]
            others = [
                _build_equality(value, location)
                for value in operand
                if _find_exact_sql_value(value) is None
            ]
            return join_with_or([location.membership_condition(exact), *others])
        case "$gt" | "$gte" if bounds := _compute_bounds(operand):  # a NUL cuts a string in SQL
            return location.range_condition(bounds[0], None)
        case "$lt" | "$lte" if bounds := _compute_bounds(operand):
            return location.range_condition(None, bounds[1])
    return _UNKNOWN


def _build_equality(value: Any, location: JSONLocation) -> Condition:
    if (key := _find_exact_sql_value(value)) is not None:
        return location.membership_condition([key])
    bounds = _compute_bounds(value)
    return _UNKNOWN if bounds is None else location.range_condition(*bounds)


def _find_exact_sql_value(value: Any) -> str | int | None:
    """What SQL reads of a JSON value without error; None: it may err, or cannot read it."""
    if isinstance(value, str):
        return None if TRUNCATING.search(value) else value
    if isinstance(value, int | float) and abs(value) <= _MAX_EXACT_INTEGER and value == int(value):
        return int(value)
    return None


def _compute_bounds(value: Any) -> tuple[Any, Any] | None:
    """Between which SQL values a JSON value is read; None: nobody knows."""
    if isinstance(value, str):
        return None if TRUNCATING.search(value) else (value, value)
    if not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        return None
    # 15 digits are promised (https://sqlite.org/floatingpoint.html); the smallest have fewer
    slack = abs(value) * 1e-12 + 1e-300
    return value - slack, value + slack


def _join_with_and(parts: Sequence[Condition]) -> Condition:
    """Parts joined by AND; those that make it too long are left out."""
    chosen: list[Condition] = []
    length = 0
    for part in parts:
        if part is not _UNKNOWN and length + len(part.text) <= _MAX_SQL_LENGTH:
            chosen.append(part)
            length += len(part.text)
    return _join_conditions(" AND ", chosen)


def join_with_or(parts: Sequence[Condition]) -> Condition:
    """Parts joined by OR, if all say something and are not too long."""
    if _UNKNOWN in parts or sum(len(part.text) for part in parts) > _MAX_SQL_LENGTH:
        return _UNKNOWN
    return _join_conditions(" OR ", parts)


def _join_conditions(word: str, parts: Sequence[Condition]) -> Condition:
    if len(parts) < 2:
        return parts[0] if parts else _UNKNOWN
    params = tuple(value for part in parts for value in part.params)
    return Condition(f"({word.join(part.text for part in parts)})", params)


# -- SQLite's JSON: another dialect has a `JSONPlace` of its own


def build_index_expression(path: str, column: str) -> str:
    """The SQL expression to index so that filters on `path` can use it, the literal key first."""
    extracted = f"json_extract({column}, '$.{check_index_path(path)}')"
    if "." not in path:
        return extracted
    return f"coalesce(json_extract({column}, '$.\"{path}\"'), {extracted})"


class JSONLocation(NamedTuple):
    """The place of a value in a column: under one of the paths; without paths it is not known."""

    column: str
    paths: tuple[Any, ...] = ("$",)
    expression: str = ""  # the indexed expression that reads it

    @property
    def supports_indexes(self) -> bool:
        """Whether paths of the column may have indexes."""
        return True

    def condition_on_row(self, condition: Condition) -> Condition:
        """The condition on a row, from that on its document."""
        return condition

    def child_location(self, key: str | int, is_indexed: bool) -> Self:
        """The place of what a key reaches here."""
        paths = tuple(path + end for path in self.paths for end in self.path_suffixes(key))
        expression = build_index_expression(str(key), self.column) if is_indexed else ""
        return self._replace(paths=paths if len(paths) <= _MAX_PATHS else (), expression=expression)

    def path_suffixes(self, key: str | int) -> Sequence[Any]:
        """What a key adds to a path."""
        return [f"[{key}]"] if isinstance(key, int) else _build_path_suffixes(key)

    def membership_condition(self, keys: Sequence[str | int]) -> Condition:
        """The value is one of some; 1 stands for true, too."""
        if len(keys) == 1:
            return self._extract_condition("= ?", keys[0])
        return self._extract_condition("IN (SELECT value FROM json_each(?))", json.dumps(keys))

    def range_condition(self, low: str | float | None, high: str | float | None) -> Condition:
        """The value lies between bounds of one kind, of which one may be missing."""
        if low is None or high is None:
            return self._extract_condition(
                "<= ?" if low is None else ">= ?", high if low is None else low
            )
        return self._extract_condition("BETWEEN ? AND ?", low, high)

    def _extract_condition(self, asked: str, *params: str | float | None) -> Condition:
        # SQLite extracts `true` as 1, and arrays as their text
        if self.expression:
            return Condition(f"{self.expression} {asked}", params)
        text = f"json_extract({self.column}, ?) {asked}"
        return join_with_or([Condition(text, (path, *params)) for path in self.paths])


def _build_path_suffixes(key: str) -> tuple[str, ...]:
    """The ends of SQLite JSON paths under which the value that `key` reaches can lie.

    The literal key and the path, each as the two ways in which `json.dumps` writes a label that is
    not ASCII: SQLite 3.40 compares labels as they are written, escapes and all. Empty when there is
    no such path: for `[*]`, and for labels with quotes, backslashes or control characters.
    """
    step_lists = dict.fromkeys(((key,), parse_path(key)))
    if any(
        step is ANY_ELEMENT or _UNSAFE_LABEL.search(str(step))
        for steps in step_lists
        for step in steps
    ):
        return ()
    suffixes = (
        "".join(_format_step(step, ascii_only) for step in steps)
        for steps in step_lists
        for ascii_only in (False, True)
    )
    return tuple(dict.fromkeys(suffixes))


def _format_step(step: Step, ascii_only: bool) -> str:
    if isinstance(step, int):
        return f"[{step}]" if step >= 0 else f"[#{step}]"
    return f".{json.dumps(step, ensure_ascii=ascii_only)}"

"""Build SQL conditions that preselect the rows that could match a filter.

The SQL condition for a filter may select too many rows, but never misses a row that the filter
matches. After the SQL query, `Filter.matches` checks each row that the SQL condition has selected.
A comparison is tested in SQL only if its operator is `$eq`, `$in`, `$gt`, `$gte`, `$lt` or `$lte`.
The operand must be text, a number or a boolean. For `$in`, the operand must be a list of strings,
numbers or booleans. Comparisons with another operator or another type of operand are replaced with
the SQL condition TRUE, which selects all rows. A negated condition is translated to the SQL
condition TRUE, which selects all rows. `Filter.matches` evaluates the negation after the SQL query.
The SQL may then select too many rows, but misses no row that the filter matches. Comparisons that
SQLite cannot evaluate reliably are replaced with the SQL condition TRUE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, count
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
    parse_filter_path,
)

# maximum length of an SQL condition in characters, which keeps expressions within SQLite's depth
# limit
_MAX_SQL_LENGTH = 10_000
# Maximum number of JSON paths to which one filter field can expand. A condition on a field with
# more paths is not tested in SQL, but replaced with TRUE, which selects all rows.
_MAX_PATHS = 8
# Largest n for which SQLite reads every integer from -n to n in JSON without rounding. SQLite reads
# these integers exactly whether they are written as 1 or as 1.0.
_MAX_EXACT_INTEGER = 2**53
# maximum absolute value of a number in an SQL condition; comparisons with larger numbers are not
# tested in SQL
_MAX_NUMBER = 1e300
# matches the characters at which SQLite truncates a string: NUL and lone surrogates
TRUNCATING = re.compile(r"[\x00\ud800-\udfff]")
# characters that cannot appear in labels of SQLite JSON paths
_UNSAFE_LABEL = re.compile(r'["\\\x00-\x1f\x7f\ud800-\udfff]')
_IDENTIFIER_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


class Condition(NamedTuple):
    """An SQL condition: its text, its parameters, and the JSON paths whose indexes it can use."""

    text: str
    params: tuple[Any, ...] = ()
    paths: tuple[str, ...] = ()

    def build_sql_with_numbered_parameters(self, first_number: int) -> str:
        """Return the SQL text of the condition with numbered parameters such as `?1`.

        With numbered parameters, a statement that contains the condition twice needs to pass each
        value only once.
        """
        numbers = count(first_number)
        return re.sub(r"\?", lambda _: f"?{next(numbers)}", self.text)


# SQL condition that is always true, used for filter conditions that SQL cannot test
_TRUE_CONDITION = Condition("TRUE")


def build_filter_condition(
    filter: Filter, location: JSONLocation, indexed_paths: Collection[str] = ()
) -> Condition:
    """Build an SQL condition that is true for every row that a filter matches.

    The condition may also be true for rows that the filter does not match.

    Args:
        filter: The parsed filter, which caches the condition.
        location: The location of the documents.
        indexed_paths: The paths that have an index.
    """
    cache_key = location, tuple(indexed_paths)
    if cache_key not in filter.conditions:
        condition = _build_node_condition(
            filter.node, location, set(map(check_index_path, indexed_paths))
        )
        condition = (
            condition
            if condition is _TRUE_CONDITION
            else location.convert_json_condition_to_row_condition(condition)
        )
        index_paths = tuple(path for path in find_indexable_paths(filter) if path in indexed_paths)
        filter.conditions[cache_key] = condition._replace(paths=index_paths)
    cached: Condition = filter.conditions[cache_key]
    return cached


def find_indexable_paths(filter: Filter) -> list[str]:
    """Return the paths whose indexes could speed up a filter.

    An index helps only if its path is used in a comparison that every matching item must satisfy.
    In the result, paths that the filter uses in equality tests come before paths used in range
    tests.
    """
    # To find out whether a comparison can be translated to SQL, call `_build_comparison_condition`
    # with a dummy location. If the result is `_TRUE_CONDITION`, the comparison cannot be
    # translated.
    candidates = [
        (part.operator in ORDER_OPERATORS, field.key)
        for field in _iter_parts_of_conjunction(filter.node)
        if isinstance(field, FieldCondition) and _is_dotted_identifier_path(field.key)
        for part in _iter_parts_of_conjunction(field.condition)
        if isinstance(part, Comparison)
        and _build_comparison_condition(part.operator, part.operand, JSONLocation("", (), "index"))
        is not _TRUE_CONDITION
    ]
    return list(dict.fromkeys(key for _, key in sorted(candidates, key=lambda pair: pair[0])))


def check_index_path(path: object) -> str:
    """Check that an index can be created for a JSON path, and return the path.

    Raises:
        ConfigurationError: The path is not a sequence of identifiers joined by dots.
    """
    if not _is_dotted_identifier_path(path):
        raise ConfigurationError(
            f"cannot index the path {path!r}; expected labels separated by dots, each made of "
            "letters, digits and underscores, like 'kind' or 'author.name'"
        )
    return path


def _is_dotted_identifier_path(path: object) -> TypeGuard[str]:
    """Return whether a path consists of dot-separated identifiers."""
    if not isinstance(path, str) or path.count(".") >= MAX_STEPS:
        return False
    return bool(_IDENTIFIER_PATH.fullmatch(path))


def _iter_parts_of_conjunction(node: Node) -> Iterator[Node]:
    """Yield the parts of a conjunction, flattening nested conjunctions.

    If `node` is not a conjunction (an `AllOf`), yield only `node` itself.
    """
    if isinstance(node, AllOf):
        for part in node.parts:
            yield from _iter_parts_of_conjunction(part)
    else:
        yield node


# -- from a filter to SQL


def _build_node_condition(
    node: Node, location: JSONLocation, indexed_paths: Collection[str] = ()
) -> Condition:
    """Build the SQL condition for a node of a parsed filter."""
    match node:
        case Comparison(name, operand):
            return _build_comparison_condition(name, operand, location)
        case FieldCondition(key, condition):
            return _build_node_condition(
                condition, location.build_child_location(key, key in indexed_paths)
            )
        case AllOf(parts):
            return _join_conditions_with_and(
                [_build_node_condition(part, location, indexed_paths) for part in parts]
            )
        case AnyOf(parts):
            return join_conditions_with_or(
                [_build_node_condition(part, location, indexed_paths) for part in parts]
            )
        case _:
            return _TRUE_CONDITION


def _build_comparison_condition(operator: str, operand: Any, location: JSONLocation) -> Condition:
    """Build the SQL condition for a comparison operator and its operand."""
    match operator:
        case "$eq":
            return _build_equality_condition(operand, location)
        case "$in":
            exact = [
                key
                for value in operand
                if (key := _convert_to_sql_value_if_exact(value)) is not None
            ]
            others = [
                _build_equality_condition(value, location)
                for value in operand
                if _convert_to_sql_value_if_exact(value) is None
            ]
            return join_conditions_with_or([location.build_equals_any_condition(exact), *others])
        # All bounds in SQL conditions are inclusive, even for `$gt` and `$lt`, because SQLite
        # truncates strings at a NUL character. SQLite compares "a\0b" as "a", so an exclusive bound
        # "a" would wrongly exclude "a\0b".
        case "$gt" | "$gte" if bounds := _compute_bounds_of_json_extract_result(operand):
            return location.build_range_condition(bounds[0], None)
        case "$lt" | "$lte" if bounds := _compute_bounds_of_json_extract_result(operand):
            return location.build_range_condition(None, bounds[1])
    return _TRUE_CONDITION


def _build_equality_condition(value: Any, location: JSONLocation) -> Condition:
    """Build the SQL condition that tests whether a value equals an operand."""
    if (key := _convert_to_sql_value_if_exact(value)) is not None:
        return location.build_equals_any_condition([key])
    bounds = _compute_bounds_of_json_extract_result(value)
    return _TRUE_CONDITION if bounds is None else location.build_range_condition(*bounds)


def _convert_to_sql_value_if_exact(value: Any) -> str | int | None:
    """Return SQLite's `json_extract` result for a JSON value, or None if it cannot be predicted.

    For a boolean, the result is 0 or 1.
    """
    if isinstance(value, str):
        return None if TRUNCATING.search(value) else value
    if isinstance(value, int | float) and abs(value) <= _MAX_EXACT_INTEGER and value == int(value):
        return int(value)
    return None


def _compute_bounds_of_json_extract_result(value: Any) -> tuple[Any, Any] | None:
    """Return a lower and an upper bound for SQLite's `json_extract` result, which may be rounded.

    The bounds of a number are slightly below and above the number, because SQLite may round
    numbers. Return None if the two bounds cannot be computed, for example because `value` is a JSON
    object or a very large number.
    """
    if isinstance(value, str):
        return None if TRUNCATING.search(value) else (value, value)
    if not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
        return None
    # SQLite keeps 15 significant digits of a number (https://sqlite.org/floatingpoint.html).
    # Numbers close to 0 may keep fewer digits.
    slack = abs(value) * 1e-12 + 1e-300
    return value - slack, value + slack


def _join_conditions_with_and(parts: Sequence[Condition]) -> Condition:
    """Join conditions with AND.

    If the SQL expression would become too long, some of the conditions are omitted. The query may
    then select rows that do not satisfy the omitted conditions.
    """
    chosen: list[Condition] = []
    length = 0
    for part in parts:
        if part is not _TRUE_CONDITION and length + len(part.text) <= _MAX_SQL_LENGTH:
            chosen.append(part)
            length += len(part.text)
    return _join_conditions(" AND ", chosen)


def join_conditions_with_or(parts: Sequence[Condition]) -> Condition:
    """Join conditions with OR.

    The result is the condition TRUE, which selects all rows, if one of `parts` is TRUE or if the
    joined SQL expression would be too long.
    """
    if _TRUE_CONDITION in parts or sum(len(part.text) for part in parts) > _MAX_SQL_LENGTH:
        return _TRUE_CONDITION
    return _join_conditions(" OR ", parts)


def _join_conditions(sql_operator: str, parts: Sequence[Condition]) -> Condition:
    """Join SQL conditions with an operator such as " AND ". Without conditions, return TRUE."""
    if len(parts) < 2:
        return parts[0] if parts else _TRUE_CONDITION
    params = tuple(value for part in parts for value in part.params)
    return Condition(f"({sql_operator.join(part.text for part in parts)})", params)


# -- SQLite's JSON functions; another dialect has its own subclass of `JSONLocation`


def build_index_expression(path: str, column: str) -> str:
    """Build the SQL expression to index so that filters on `path` can use the index.

    The expression reads the field whose name is exactly `path`, even if the name contains dots. If
    no field has exactly this name, or if the field's value is null, the expression follows `path`
    into nested objects.
    """
    extracted = f"json_extract({column}, '$.{check_index_path(path)}')"
    if "." not in path:
        return extracted
    return f"coalesce(json_extract({column}, '$.\"{path}\"'), {extracted})"


class JSONLocation(NamedTuple):
    """The location of a JSON value: a database column, and one or more JSON paths in its documents.

    The key `a.b` has two JSON paths, because it can mean a field named `a.b`, or the field `b` of
    the object `a`. A key with non-ASCII characters has two forms of each JSON path, because stored
    JSON may contain the key with or without JSON escapes.

    If `paths` is empty, SQL cannot read the value, and every condition on the value is replaced
    with TRUE, which selects all rows.
    """

    column: str
    paths: tuple[Any, ...] = ("$",)
    # the indexed SQL expression that extracts the value, or "" if no index covers it
    expression: str = ""

    @property
    def supports_indexes(self) -> bool:
        """Whether JSON paths in the column can be indexed."""
        return True

    def convert_json_condition_to_row_condition(self, json_condition: Condition) -> Condition:
        """Convert a condition on a column's JSON document into an SQL condition on the row.

        In SQLite, the two are the same.
        """
        return json_condition

    def build_child_location(self, key: str | int, is_indexed: bool) -> Self:
        """Extend this JSON location by a field name or array index, and return the new location.

        A string `key` is a field name or a path. An int `key` is a position in an array.
        `is_indexed` specifies whether the database has an index on the path `key`.
        """
        paths = tuple(
            path + end for path in self.paths for end in self.list_possible_relative_json_paths(key)
        )
        expression = build_index_expression(str(key), self.column) if is_indexed else ""
        return self._replace(paths=paths if len(paths) <= _MAX_PATHS else (), expression=expression)

    def list_possible_relative_json_paths(self, key: str | int) -> Sequence[Any]:
        """Return the JSON path suffixes that address the member `key` of an object or array."""
        return [f"[{key}]"] if isinstance(key, int) else _list_possible_relative_json_paths(key)

    def build_equals_any_condition(self, keys: Sequence[str | int]) -> Condition:
        """Return an SQL condition that is true if the value at this location is one of `keys`.

        If `keys` contains 1, the condition is also true for the JSON value `true`, because SQLite's
        `json_extract` returns 1 for `true`.
        """
        if len(keys) == 1:
            return self._build_sql_comparison("= ?", keys[0])
        return self._build_sql_comparison("IN (SELECT value FROM json_each(?))", json.dumps(keys))

    def build_range_condition(self, low: str | float | None, high: str | float | None) -> Condition:
        """Return an SQL condition that tests whether a value lies between two inclusive bounds.

        If `low` is None, the range has no lower bound. If `high` is None, the range has no upper
        bound.
        """
        if low is None or high is None:
            return self._build_sql_comparison(
                "<= ?" if low is None else ">= ?", high if low is None else low
            )
        return self._build_sql_comparison("BETWEEN ? AND ?", low, high)

    def _build_sql_comparison(self, sql_comparison: str, *params: str | float | None) -> Condition:
        """Return an SQL condition that compares the JSON value at this location with `params`."""
        # SQLite's `json_extract` returns 1 for the JSON value `true`, and returns arrays as JSON
        # text. The condition may therefore select rows that the filter does not match.
        if self.expression:
            return Condition(f"{self.expression} {sql_comparison}", params)
        text = f"json_extract({self.column}, ?) {sql_comparison}"
        return join_conditions_with_or([Condition(text, (path, *params)) for path in self.paths])


def _list_possible_relative_json_paths(key: str) -> tuple[str, ...]:
    """Return the SQLite JSON path suffixes that address the value of `key` in an object.

    In the first returned path suffix, the whole `key` is the name of a single field, even if `key`
    contains dots. If `key` is a path such as `a.b`, a suffix that selects the field `b` inside the
    object `a` is also returned. If `key` contains non-ASCII characters, each suffix is returned
    twice: once with the characters as plain text and once with JSON escapes. Stored JSON may
    contain non-ASCII characters as plain text or as escapes. SQLite 3.40 does not decode JSON
    escapes in field names, so a path that contains `é` does not match a field name in which `é` is
    escaped. The result is empty if `key` cannot be expressed as an SQLite JSON path, that is, if it
    contains a `[*]` step, a quotation mark, a backslash, a control character or a surrogate.
    """
    suffixes = (
        "".join(_format_path_step(step, ascii_only) for step in steps)
        for steps in list_possible_paths(key, _UNSAFE_LABEL)
        for ascii_only in (False, True)
    )
    return tuple(dict.fromkeys(suffixes))


def list_possible_paths(key: str | int, unsafe: re.Pattern[str]) -> Sequence[tuple[Step, ...]]:
    """Return the paths that a filter key can mean.

    In the first path, the whole key is a single step. In the second path, the key is split into
    steps at its dots and brackets. If both paths are equal, only one path is returned.

    The result is empty if a path contains a `[*]` step or a label that matches `unsafe`.
    """
    paths = dict.fromkeys(((key,), (key,) if isinstance(key, int) else parse_filter_path(key)))
    steps = chain.from_iterable(paths)
    is_unsafe = any(step is ANY_ELEMENT or unsafe.search(str(step)) for step in steps)
    return () if is_unsafe else tuple(paths)


def _format_path_step(step: Step, ascii_only: bool) -> str:
    """Format one step of a path in SQLite's JSON path syntax."""
    if isinstance(step, int):
        return f"[{step}]" if step >= 0 else f"[#{step}]"
    return f".{json.dumps(step, ensure_ascii=ascii_only)}"

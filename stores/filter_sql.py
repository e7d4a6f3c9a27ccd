"""Build SQL conditions that preselect the rows that could match a filter.

The SQL condition for a filter may select too many rows, but never misses a row that the filter
matches. `Filter.matches` then checks each row that the SQL condition has selected. A comparison is
tested in SQL only if its operator is `$eq`, `$in`, `$gt`, `$gte`, `$lt` or `$lte`. Its operand must
be text, a number or a boolean, or a list of these for `$in`. All other comparisons, and all
negations, are replaced with the SQL condition TRUE, which selects all rows. Comparisons with text
or numbers that SQLite cannot compare reliably are also replaced with TRUE.
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
    parse_filter_path,
)

# maximum length of an SQL condition in characters, which keeps expressions within SQLite's depth
# limit
_MAX_SQL_LENGTH = 10_000
# Maximum number of JSON paths to which one filter field can expand. Fields with more paths are not
# tested in SQL; their SQL condition is TRUE.
_MAX_PATHS = 8
# largest integer that SQLite reads exactly from JSON, whether the integer is written as 1 or as 1.0
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
    """A boolean SQL expression, its parameters, and the paths whose indexes it can use."""

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


# SQL condition that selects all rows; it replaces a part of a filter that cannot be tested in SQL
_TRUE_CONDITION = Condition("TRUE")


def build_filter_condition(
    filter: Filter, location: JSONLocation, indexed_paths: Collection[str] = ()
) -> Condition:
    """Build an SQL condition that is true for every row that a filter matches.

    The condition may also be true for other rows.

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
    Paths used in equality tests come before paths used in range tests.
    """
    # `JSONLocation("", (), "index")` is a placeholder for the location of an indexed path. With
    # this placeholder, `_build_comparison_condition` shows whether SQL can test the comparison.
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
            f"cannot index the path {path!r}; expected labels of letters, digits and underscores"
            " joined by dots, like 'kind' or 'author.name'"
        )
    return path


def _is_dotted_identifier_path(path: object) -> TypeGuard[str]:
    """Return whether a path consists of dot-separated identifiers."""
    if not isinstance(path, str) or path.count(".") >= MAX_STEPS:
        return False
    return bool(_IDENTIFIER_PATH.fullmatch(path))


def _iter_parts_of_conjunction(node: Node) -> Iterator[Node]:
    """Yield the parts of a conjunction, flattening nested conjunctions.

    If the filter node is not a conjunction, only the node itself is yielded.
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
        # All bounds are inclusive, even for `$gt` and `$lt`, because SQLite truncates a string at a
        # NUL character. SQLite compares the string "a\0b" as "a", which is equal to the operand "a"
        # and not greater.
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
    """Return the result of SQLite's `json_extract` for a JSON value, or None if it is uncertain.

    For a boolean, the result is 0 or 1.
    """
    if isinstance(value, str):
        return None if TRUNCATING.search(value) else value
    if isinstance(value, int | float) and abs(value) <= _MAX_EXACT_INTEGER and value == int(value):
        return int(value)
    return None


def _compute_bounds_of_json_extract_result(value: Any) -> tuple[Any, Any] | None:
    """Return a lower and an upper bound for what SQLite's `json_extract` returns for a JSON value.

    The two bounds differ for numbers, because SQLite may round them. The result is None if no
    bounds can be given, for example because the JSON value is an object or too large a number.
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

    Conditions that would make the SQL expression too long are omitted.
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

    The result is the condition TRUE if one of `parts` is TRUE or if the joined SQL expression would
    be too long.
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
    this field is missing or null, the expression follows the path into nested objects.
    """
    extracted = f"json_extract({column}, '$.{check_index_path(path)}')"
    if "." not in path:
        return extracted
    return f"coalesce(json_extract({column}, '$.\"{path}\"'), {extracted})"


class JSONLocation(NamedTuple):
    """The location of a JSON value in a column, given by one or more JSON paths.

    There may be several paths, because a key that contains a dot can be either a field name or a
    path to a nested field, and because stored JSON may contain a non-ASCII key with or without
    escapes.

    If `paths` is empty, the value cannot be read in SQL, and every condition on the value is TRUE.
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
        """Return the location of the value under a key of the object or array at this location.

        A string `key` is the name of a field or a path. An int `key` is a position in an array.
        `is_indexed` specifies whether the database has an index on the path `key`.
        """
        paths = tuple(
            path + end for path in self.paths for end in self.list_possible_relative_json_paths(key)
        )
        expression = build_index_expression(str(key), self.column) if is_indexed else ""
        return self._replace(paths=paths if len(paths) <= _MAX_PATHS else (), expression=expression)

    def list_possible_relative_json_paths(self, key: str | int) -> Sequence[Any]:
        """Return the JSON path suffixes that address the member `key` of an object or array."""
        return [f"[{key}]"] if isinstance(key, int) else _build_json_path_suffixes(key)

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
        """Return an SQL condition that compares the value with the given parameters."""
        # SQLite's `json_extract` returns 1 for the JSON value `true`, and returns arrays as JSON
        # text. The condition may therefore select rows that the filter does not match.
        if self.expression:
            return Condition(f"{self.expression} {sql_comparison}", params)
        text = f"json_extract({self.column}, ?) {sql_comparison}"
        return join_conditions_with_or([Condition(text, (path, *params)) for path in self.paths])


def _build_json_path_suffixes(key: str) -> tuple[str, ...]:
    """Return the SQLite JSON path suffixes that address the value of `key` in an object.

    One suffix addresses the field whose name is exactly `key`. If `key` is a path with several
    steps, another suffix addresses the nested field at that path. If `key` contains non-ASCII
    characters, each suffix is returned twice: once with the characters as plain text and once with
    JSON escapes. Both suffixes are needed, because stored JSON can contain either form and SQLite
    3.40 compares labels without decoding escapes. The result is empty if `key` cannot be expressed
    as an SQLite JSON path, that is, if it contains a `[*]` step, a quotation mark, a backslash, a
    control character or a surrogate.
    """
    step_lists = dict.fromkeys(((key,), parse_filter_path(key)))
    if any(
        step is ANY_ELEMENT or _UNSAFE_LABEL.search(str(step))
        for steps in step_lists
        for step in steps
    ):
        return ()
    suffixes = (
        "".join(_format_path_step(step, ascii_only) for step in steps)
        for steps in step_lists
        for ascii_only in (False, True)
    )
    return tuple(dict.fromkeys(suffixes))


def _format_path_step(step: Step, ascii_only: bool) -> str:
    """Format one step of a path in SQLite's JSON path syntax."""
    if isinstance(step, int):
        return f"[{step}]" if step >= 0 else f"[#{step}]"
    return f".{json.dumps(step, ensure_ascii=ascii_only)}"

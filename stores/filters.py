"""Filters over JSON documents. A parsed filter has the same meaning on every backend.

A filter is a mapping. All its entries must hold:

    {"kind": "note"}                          the value is equal
    {"author": {"name": "Ann"}}               an object that has at least these entries
    {"author.name": "Ann"}                    the same by path; also `tags[0]`, `tags[-1]`
    {"items[*].name": "pen"}                  holds for at least one element
    {"price": {"$gte": 1, "$lt": 5}}          operators, all of which must hold
    {"$or": [{"a": 1}, {"b": 1}]}             `$and`, `$or`, `$not`, also in place of an operator

These rules apply wherever a filter is used.

Values are compared as strict JSON: `True` is not 1, 1 equals 1.0, 2**53 + 1 differs from 2.0**53,
and `"1"` is not 1.

`{"a": None}` holds if the field `a` exists and is null. A missing field is never equal to an
operand. Use `$exists` to test whether a field is missing.

`$ne` negates `$eq`, and `$nin` negates `$in`. `$not` takes a filter as its operand and negates it.
A condition with `$ne`, `$nin` or `$not` also holds for a missing field. For example, `{"a": {"$ne":
1}}` holds if the field `a` is missing, because `{"a": {"$eq": 1}}` does not hold.

A comparison with `$gt`, `$gte`, `$lt` or `$lte` is true only if the field's value has the same type
as the operand. Numbers are compared by value and strings by code point, so ISO 8601 dates in the
same format are ordered chronologically. Infinities compare with numbers. A comparison with NaN
never holds.

`$contains` holds if an array has an element that equals the operand, or if a string contains the
operand.

`$eq`, `$ne`, `$in`, `$nin` and `$contains` treat two objects as equal only if all their entries are
equal. If the condition on a field is a mapping without operators, such as `{"name": "Ann"}`, the
condition holds for every object that has at least these entries. If the condition on a field is a
list, the field must be an array of the same length, and each element of the list is a condition on
the array element at the same position.

In a filter, a key that starts with `$` is an operator. To refer to a field whose name starts with
`$`, write a path to the field, such as `author.$ref`.

A key with a dot, such as `author.name`, can be either a field name or a path to a nested field. If
the document has a field named exactly `author.name`, the condition applies to this field. If the
document has no field with this exact name, the key is interpreted as a path to a nested field. A
path with the step `[*]` refers to the elements of an array. A condition on a path with `[*]` holds
if one array element satisfies all parts of the condition. If the array is empty, or if the value is
not an array, a condition on a path with `[*]` is evaluated as if the field were missing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, TypeAlias

from perdure.errors import InvalidFilter
from perdure.stores.values import build_unknown_name_hint

MAX_DEPTH = 32
"""Maximum levels of nesting in a filter."""
MAX_OPERANDS = 10_000
"""Maximum number of values in a filter, including the elements of lists."""
MAX_STEPS = 64
"""Maximum number of steps in a path. Matching recurses once for each `[*]`."""

_LOGICAL_OPERATORS = ("$and", "$or", "$not")
ORDER_OPERATORS = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
OPERATORS = (
    "$eq",
    "$ne",
    *ORDER_OPERATORS,
    "$in",
    "$nin",
    "$exists",
    "$contains",
    *_LOGICAL_OPERATORS,
)
"""The names of all operators."""

_CONTAINERS = (Mapping, list, tuple)
# Booleans, dicts and lists are compared with each operand in turn instead of being looked up in a
# set of operands, because True would equal 1 in a set, and dicts and lists cannot be hashed.
_UNHASHABLE_OR_BOOL = (
    bool,
    dict,
    list,
)
_LABEL_PATTERN = r"[^.\[\]]+"
# Array positions have at most 9 digits, because SQLite stores them in 32 bits.
_INDEX_PATTERN = r"\[(?:-?[0-9]{1,9}|\*)\]"
_PATH_PATTERN = re.compile(
    rf"{_LABEL_PATTERN}(?:{_INDEX_PATTERN})*(?:\.{_LABEL_PATTERN}(?:{_INDEX_PATTERN})*)*"
)
_STEP_PATTERN = re.compile(rf"({_LABEL_PATTERN})|\[(-?[0-9]+|\*)\]")


class Mark(Enum):
    """Sentinels for a missing value and for the `[*]` step, which selects all elements of an array.

    The sentinels differ from every JSON value and from every field name in a path.
    """

    MISSING = "missing"
    ANY_ELEMENT = "*"


_MISSING: Final = Mark.MISSING
ANY_ELEMENT: Final = Mark.ANY_ELEMENT

# one step of a path: an object key, an array index, or ANY_ELEMENT
Step: TypeAlias = str | int | Mark
# predicate that tests a JSON value or _MISSING, and never raises an error
_Predicate: TypeAlias = Callable[[Any], bool]
# position of a part within a filter, for error messages
_FilterPath: TypeAlias = tuple[str | int, ...]


# -- nodes of a parsed filter


class Comparison(NamedTuple):
    """Compares the value with an operand.

    `operator` is one of the filter operators that test a value. `$ne`, `$nin` and `$not` are parsed
    into `Negation`, `$and` into `AllOf`, and `$or` into `AnyOf`. The operators `object` and `array`
    are used only internally. The operator `object` is true if the value is a JSON object. The
    operator `array` is true if the value is an array whose length is `operand`.
    """

    operator: str
    operand: Any


class FieldCondition(NamedTuple):
    """A filter condition on the value of a key in an object, or on one element of an array."""

    # object field (a name or a path), or array index
    key: str | int
    condition: Node


class AllOf(NamedTuple):
    """A filter condition that holds if all of its parts hold (a conjunction).

    The parts are tested in order. An `AllOf` condition without parts always holds.
    """

    parts: tuple[Node, ...]


class AnyOf(NamedTuple):
    """A filter condition that holds if at least one of its parts holds (a disjunction)."""

    parts: tuple[Node, ...]


class Negation(NamedTuple):
    """A filter condition that holds if the condition `part` does not hold."""

    part: Node


Node: TypeAlias = Comparison | FieldCondition | AllOf | AnyOf | Negation


class Filter(NamedTuple):
    """A parsed filter.

    Attributes:
        node: The root of the parsed filter.
        matches: Returns whether a document meets the filter.
        conditions: A cache of the SQL conditions that were built for the filter.
    """

    node: Node
    matches: _Predicate
    conditions: dict[Any, Any]


# -- parsing


def parse_filter(filter: Mapping[str, Any] | None, fields: Sequence[str] | None = None) -> Filter:
    """Check a filter and parse it.

    Args:
        filter: The filter, which is copied. None and `{}` hold for every document.
        fields: The fields that a document can have at its top level. None allows any field.

    Raises:
        InvalidFilter: An operator is unknown or has an operand of a wrong type, a field is not in
            `fields`, a part is not JSON, or the filter is too deep or too large. The message names
            the part.
    """
    if filter is not None and not isinstance(filter, Mapping):
        raise _build_filter_error((), "expected a dict that maps fields to conditions", filter)
    node = _parse_filter_document(_copy_as_plain_json(filter or {}, (), count()), (), fields)
    return Filter(node, _compile_filter_node(node), {})


def _copy_as_plain_json(value: Any, path: _FilterPath, value_counter: Iterator[int]) -> Any:
    """Copy a part of a filter as plain JSON.

    Instances of subclasses of str, int and float, such as members of a `StrEnum`, are converted to
    plain str, int and float values.

    Args:
        value: The part.
        path: The path of the part in the filter, for error messages.
        value_counter: Counts the values of the whole filter.
    """
    is_container = isinstance(value, _CONTAINERS)
    if is_container and len(path) > MAX_DEPTH:
        raise InvalidFilter(
            f"filter: the conditions are nested more than {MAX_DEPTH} levels deep; use fewer levels"
        )
    if (not is_container or not value) and next(value_counter) == MAX_OPERANDS:
        raise InvalidFilter(
            f"{_format_filter_path(path)}: the filter contains more than {MAX_OPERANDS} values; "
            "split the search into several searches with smaller filters"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _build_filter_error(path, "expected strings as keys", key)
        entries = [(str.__str__(key), part) for key, part in value.items()]
        return {
            key: _copy_as_plain_json(part, (*path, key), value_counter) for key, part in entries
        }
    if is_container:
        return [
            _copy_as_plain_json(part, (*path, number), value_counter)
            for number, part in enumerate(value)
        ]
    return _convert_to_plain_scalar(value, path)


def _convert_to_plain_scalar(value: Any, path: _FilterPath) -> str | int | float | None:
    """Return a scalar as plain JSON; see `_copy_as_plain_json`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise _build_filter_error(path, "expected a JSON value (dates as ISO strings)", value)


def _parse_filter_document(
    filter: dict[str, Any], path: _FilterPath, fields: Sequence[str] | None = None
) -> Node:
    """Parse a filter that maps fields and logical operators to conditions."""
    parts: list[Node] = []
    for key, value in filter.items():
        key_path = (*path, key)
        if key in _LOGICAL_OPERATORS:
            parts.append(
                _parse_logical_operator(
                    key, value, key_path, partial(_parse_filter_document, fields=fields)
                )
            )
        elif key in OPERATORS:
            raise _build_filter_error(
                key_path,
                "expected a field name, $and, $or or $not",
                key,
                f'put {key} into the condition of a field: {{"field": {{"{key}": …}}}}',
            )
        elif key.startswith("$"):
            raise _build_unknown_name_error(path, "operator", key, OPERATORS)
        elif fields is not None and parse_filter_path(key)[0] not in fields:
            raise _build_unknown_name_error(path, "field", key, fields)
        else:
            parts.append(_parse_field(key, value, path))
    return _combine_all(parts)


def _parse_value_condition(value: Any, path: _FilterPath) -> Node:
    """Parse the condition on one value.

    The condition is a mapping of operators to operands, a mapping of field names to conditions, a
    list of conditions on the elements of an array, or a plain value that the field must equal.
    """
    if isinstance(value, list):
        elements = [
            FieldCondition(i, _parse_value_condition(part, (*path, i)))
            for i, part in enumerate(value)
        ]
        return AllOf((Comparison("array", len(value)), *elements))
    if not isinstance(value, dict):
        return Comparison("$eq", value)
    operators = [key for key in value if key.startswith("$")]
    if not operators:
        return AllOf(
            (
                Comparison("object", None),
                *[_parse_field(key, part, path) for key, part in value.items()],
            )
        )
    if len(operators) < len(value):
        name = next(key for key in value if not key.startswith("$"))
        advice = f"to combine {operators[0]} with the field {name!r}, put both under $and"
        raise _build_filter_error(
            path, "expected a dict of operators or a dict of field names, not a mix", value, advice
        )
    return _combine_all([_parse_operator(key, operand, path) for key, operand in value.items()])


def _parse_field(key: str, value: Any, path: _FilterPath) -> FieldCondition:
    """Parse a field name and its condition."""
    key_path = (*path, key)
    steps = len(parse_filter_path(key))
    if steps > MAX_STEPS:
        raise _build_filter_error(
            key_path,
            f"expected a path of at most {MAX_STEPS} segments (field names and list indexes)",
            steps,
        )
    return FieldCondition(key, _parse_value_condition(value, key_path))


def _parse_operator(operator: str, operand: Any, path: _FilterPath) -> Node:
    """Parse a field's filter operator and its operand."""
    operator_path = (*path, operator)
    if operator in _LOGICAL_OPERATORS:
        return _parse_logical_operator(operator, operand, operator_path, _parse_value_condition)
    if operator not in OPERATORS:
        raise _build_unknown_name_error(path, "operator", operator, OPERATORS)
    if operator in ("$in", "$nin") and not isinstance(operand, list):
        raise _build_filter_error(operator_path, "expected a list of values", operand)
    if operator == "$exists" and not isinstance(operand, bool):
        raise _build_filter_error(operator_path, "expected True or False", operand)
    if operator in ORDER_OPERATORS and (
        isinstance(operand, bool) or not isinstance(operand, int | float | str)
    ):
        raise _build_filter_error(operator_path, "expected a number or a string", operand)
    if operator in ("$ne", "$nin"):
        return Negation(Comparison("$eq" if operator == "$ne" else "$in", operand))
    return Comparison(operator, operand)


def _parse_logical_operator(
    operator: str,
    operand: Any,
    path: _FilterPath,
    parse_part: Callable[[dict[str, Any], _FilterPath], Node],
) -> Node:
    """Parse `$and`, `$or` or `$not`. `parse_part` parses each operand."""
    if operator == "$not":
        if not isinstance(operand, dict):
            raise _build_filter_error(path, "expected a filter", operand)
        return Negation(parse_part(operand, path))
    if not isinstance(operand, list) or not operand:
        raise _build_filter_error(path, "expected a non-empty list of filters", operand)
    parts = []
    for number, part in enumerate(operand):
        if not isinstance(part, dict):
            raise _build_filter_error((*path, number), "expected a filter", part)
        parts.append(parse_part(part, (*path, number)))
    return AllOf(tuple(parts)) if operator == "$and" else AnyOf(tuple(parts))


def _combine_all(parts: Sequence[Node]) -> Node:
    """Return a filter node that holds if all of `parts` hold."""
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))


def _build_filter_error(
    path: _FilterPath, expectation: str, value: object, advice: str = ""
) -> InvalidFilter:
    """Build an error that names the part of the filter, the expected value and the actual value."""
    suffix = f"; {advice}" if advice else ""
    return InvalidFilter(
        f"{_format_filter_path(path)}: {expectation}, got {_format_short_repr(value)}{suffix}"
    )


def _build_unknown_name_error(
    path: _FilterPath, kind: str, name: str, allowed: Sequence[str]
) -> InvalidFilter:
    """Build an error for an unknown operator or field.

    The error message suggests the known name that is most similar to the unknown name.
    """
    return InvalidFilter(
        f"{_format_filter_path(path)}: unknown {kind} {_format_short_repr(name)}; "
        f"{build_unknown_name_hint(name, allowed)}"
    )


def _format_filter_path(path: _FilterPath) -> str:
    """Format the position of a part of a filter for error messages, such as `filter["$or"][0]`."""
    return "filter" + "".join(f"[{_format_short_repr(step)}]" for step in path)


def _format_short_repr(value: object) -> str:
    """Return the `repr` of a value, truncated to 80 characters."""
    try:
        text = repr(value)
    # `repr` fails for integers with too many digits and for deeply nested values.
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- matching


def _compile_filter_node(node: Node) -> _Predicate:
    """Return the predicate that tests whether a value matches a filter node."""
    match node:
        case Comparison(name, operand):
            return _compile_comparison(name, operand)
        case FieldCondition(key, condition):
            return _compile_field_predicate(key, _compile_filter_node(condition))
        case AllOf(parts):
            return _combine_predicates_with_and([_compile_filter_node(part) for part in parts])
        case AnyOf(parts):
            tests = [_compile_filter_node(part) for part in parts]
            return lambda value: any(test(value) for test in tests)
        case Negation(part):
            test_part = _compile_filter_node(part)
            return lambda value: not test_part(value)


def _combine_predicates_with_and(tests: Sequence[_Predicate]) -> _Predicate:
    """Return a predicate that holds if all of `tests` hold."""

    def test_all(value: Any) -> bool:
        for test in tests:  # noqa: SIM110 - half the time of all() over a generator
            if not test(value):
                return False
        return True

    return test_all


def parse_filter_path(key: str) -> tuple[Step, ...]:
    """Split a key into the steps of its path.

    A key that is not a well-formed path is treated as a single step.

    >>> parse_filter_path("items[*].name")
    ('items', <Mark.ANY_ELEMENT: '*'>, 'name')
    >>> parse_filter_path("a..b")
    ('a..b',)
    """
    if not _PATH_PATTERN.fullmatch(key):
        return (key,)
    matches = _STEP_PATTERN.findall(key)
    return tuple(label or (ANY_ELEMENT if index == "*" else int(index)) for label, index in matches)


def _compile_field_predicate(key: str | int, test: _Predicate) -> _Predicate:
    """Return a predicate that applies `test` to the value under `key` in an object or array.

    If an object has a field whose name is exactly `key`, including any dots, `test` is applied to
    this field. If the object has no field with the exact name `key`, `key` is interpreted as a
    path. An int `key` is a position in an array. The returned predicate may be called only with an
    object, or with an array that has an element at position `key`.
    """
    if isinstance(key, int):
        return lambda array: test(array[key])
    test_path = _compile_path_predicate(parse_filter_path(key), test)
    return lambda document: test(document[key]) if key in document else test_path(document)


def _compile_path_predicate(steps: tuple[Step, ...], test: _Predicate) -> _Predicate:
    """Return a predicate that applies `test` to the value at a path."""
    if ANY_ELEMENT in steps:
        index = steps.index(ANY_ELEMENT)
        test_element = _compile_path_predicate(steps[index + 1 :], test)
        steps = steps[:index]

        # Replace `test` with a predicate that is true if any element of the array passes the
        # original test.
        def test(value: Any) -> bool:
            elements = value if isinstance(value, list) and value else (_MISSING,)
            return any(map(test_element, elements))

    def test_steps(value: Any) -> bool:
        for step in steps:
            if isinstance(step, str):
                value = value.get(step, _MISSING) if isinstance(value, dict) else _MISSING
            elif isinstance(step, int):
                is_in_range = isinstance(value, list) and -len(value) <= step < len(value)
                value = value[step] if is_in_range else _MISSING
        return test(value)

    return test_steps


def _compile_comparison(operator: str, operand: Any) -> _Predicate:
    """Return a predicate that applies a filter operator to a value and an operand."""
    match operator:
        case "object":
            return lambda value: isinstance(value, dict)
        case "array":
            return lambda value: isinstance(value, list) and len(value) == operand
        case "$eq":
            return lambda value: _is_equal_json(value, operand)
        case "$in":
            return _compile_membership_predicate(operand)
        case "$exists":
            return lambda value: (value is not _MISSING) is operand
        case "$contains":
            return lambda value: (
                isinstance(operand, str) and operand in value
                if isinstance(value, str)
                else isinstance(value, list) and any(_is_equal_json(one, operand) for one in value)
            )
    compare = ORDER_OPERATORS[operator]
    if isinstance(operand, str):
        return lambda value: isinstance(value, str) and compare(value, operand)
    return lambda value: (
        isinstance(value, (int, float)) and not isinstance(value, bool) and compare(value, operand)
    )


def _is_equal_json(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal.

    Two objects are equal only if they have the same keys. Two arrays are equal only if they have
    the same number of elements.
    """
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(right, dict):
        return (
            isinstance(left, dict)
            and left.keys() == right.keys()
            and all(_is_equal_json(left[key], value) for key, value in right.items())
        )
    if isinstance(right, list):
        return (
            isinstance(left, list)
            and len(left) == len(right)
            and all(map(_is_equal_json, left, right))
        )
    return bool(left == right)


def _compile_membership_predicate(operands: Sequence[Any]) -> _Predicate:
    """Return a predicate that tests whether a value equals any of the operands."""
    unhashable = [value for value in operands if isinstance(value, _UNHASHABLE_OR_BOOL)]
    members = frozenset(value for value in operands if not isinstance(value, _UNHASHABLE_OR_BOOL))

    # 1 equals 1.0, so a frozenset treats both as the same element.
    def is_member(value: Any) -> bool:
        if isinstance(value, _UNHASHABLE_OR_BOOL):
            return any(_is_equal_json(value, one) for one in unhashable)
        return value in members

    return is_member

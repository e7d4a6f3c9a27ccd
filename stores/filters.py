"""Filters over JSON documents: checked and parsed once, with one meaning on every backend.

A filter is a mapping. All of its entries must hold:

    {"kind": "note"}                          equal
    {"author": {"name": "Ann"}}               an object with at least these entries
    {"author.name": "Ann"}                    the same by path; also `tags[0]`, `tags[-1]`
    {"items[*].name": "pen"}                  some element's
    {"price": {"$gte": 1, "$lt": 5}}          operators, all of which must hold
    {"$or": [{"a": 1}, {"b": 1}]}             `$and`, `$or`, `$not`, here or in place of an operator

The rules, wherever a filter is used:

- Values are strict JSON: `True` is not 1, 1 is 1.0, 2**53 + 1 is not 2.0**53, `"1"` is not 1.
- `{"a": None}` holds for a null that is there; nothing equals what is missing (`$exists`).
- `$ne`, `$nin` and `$not` say no to `$eq`, `$in` and their operand: they hold for missing values.
- `$gt $gte $lt $lte` hold only for a value of the operand's kind, numbers by size, strings by code
  point: ISO dates of one form compare as dates. Infinities compare with numbers; NaN never holds.
- `$contains`: an array has an equal element, or a string has the operand within it.
- `$eq`, `$ne`, `$in`, `$nin` and `$contains` compare whole objects; a plain mapping asks for some
  of their entries. A plain list has to be matched element by element, each as a condition.
- A key that starts with `$` is an operator. A document's own is reached by a path, `author.$ref`.
- A key is a path unless the document has a key of that very spelling. `[*]` asks for one element
  that meets the whole condition; without elements, the condition is asked of a missing value.
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
from perdure.stores.values import suggest_name

MAX_DEPTH = 32
"""The most levels of nesting in a filter."""
MAX_OPERANDS = 10_000
"""The most values in a filter, elements of lists counted."""
MAX_STEPS = 64
"""The most steps of one path: a filter is walked by recursion at each `[*]`."""

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
"""All operators."""

_CONTAINERS = (Mapping, list, tuple)
_UNHASHABLE_OR_BOOL = (bool, dict, list)  # True is no 1 here, and sets cannot hold the others
_LABEL_PATTERN = r"[^.\[\]]+"
_INDEX_PATTERN = r"\[(?:-?[0-9]{1,9}|\*)\]"  # SQLite counts positions in 32 bits
_PATH_PATTERN = re.compile(
    rf"{_LABEL_PATTERN}(?:{_INDEX_PATTERN})*(?:\.{_LABEL_PATTERN}(?:{_INDEX_PATTERN})*)*"
)
_STEP_PATTERN = re.compile(rf"({_LABEL_PATTERN})|\[(-?[0-9]+|\*)\]")


class Mark(Enum):
    """Marks that are no JSON value and no label: a missing value, and every element."""

    MISSING = "missing"
    ANY_ELEMENT = "*"


_MISSING: Final = Mark.MISSING
ANY_ELEMENT: Final = Mark.ANY_ELEMENT

Step: TypeAlias = str | int | Mark  # a label, a position in an array, or EACH
_Predicate: TypeAlias = Callable[[Any], bool]  # of a JSON value, or of _MISSING; it never raises
_FilterPath: TypeAlias = tuple[str | int, ...]


# -- what a filter is made of


class Comparison(NamedTuple):
    """A value against an operand.

    Besides the operators that `Not` leaves: `object`, whether it is one, and `array`, whether it is
    one of so many elements.
    """

    operator: str
    operand: Any


class FieldCondition(NamedTuple):
    """What a key reaches in an object, or a position in an array, meets a condition."""

    key: str | int
    condition: Node


class AllOf(NamedTuple):
    """All parts hold, asked in order; with no parts, always."""

    parts: tuple[Node, ...]


class AnyOf(NamedTuple):
    """At least one part holds."""

    parts: tuple[Node, ...]


class Negation(NamedTuple):
    """The part does not hold."""

    part: Node


Node: TypeAlias = Comparison | FieldCondition | AllOf | AnyOf | Negation


class Filter(NamedTuple):
    """A parsed filter, its test of a document, and its conditions in SQL, once these are made."""

    node: Node
    matches: _Predicate
    conditions: dict[Any, Any]


# -- parsing


def parse_filter(filter: Mapping[str, Any] | None, fields: Sequence[str] | None = None) -> Filter:
    """Check a filter and make it ready to be used.

    Args:
        filter: The filter; None and `{}` hold for every document. It is copied.
        fields: All that a document may have at its top; None: anything.

    Raises:
        InvalidFilter: An operator is unknown or has an operand of a wrong type, a field is none of
            `fields`, a part is no JSON, or the filter is too deep or too large. The message names
            the part.
    """
    if filter is not None and not isinstance(filter, Mapping):
        raise _build_error((), "a mapping of fields to conditions", filter)
    node = _parse_document(_copy_plain(filter or {}, (), count()), (), fields)
    return Filter(node, _compile_node(node), {})


def _copy_plain(value: Any, path: _FilterPath, counter: Iterator[int]) -> Any:
    """A part of a filter as plain JSON: of an enumeration's member, what it stands for."""
    is_container = isinstance(value, _CONTAINERS)
    if is_container and len(path) > MAX_DEPTH:
        raise InvalidFilter(f"filter: more than {MAX_DEPTH} levels of nesting; flatten it")
    if (not is_container or not value) and next(counter) == MAX_OPERANDS:
        raise InvalidFilter(
            f"{_format_filter_path(path)}: more than {MAX_OPERANDS} values in one filter; split the search"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _build_error(path, "keys that are strings", key)
        entries = [(str.__str__(key), part) for key, part in value.items()]
        return {key: _copy_plain(part, (*path, key), counter) for key, part in entries}
    if is_container:
        return [_copy_plain(part, (*path, number), counter) for number, part in enumerate(value)]
    return _copy_scalar(value, path)


def _copy_scalar(value: Any, path: _FilterPath) -> str | int | float | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise _build_error(path, "JSON (dates as ISO strings)", value)


def _parse_document(
    filter: dict[str, Any], path: _FilterPath, fields: Sequence[str] | None = None
) -> Node:
    """A mapping of fields, and of logical operators beside them."""
    parts: list[Node] = []
    for key, value in filter.items():
        key_path = (*path, key)
        if key in _LOGICAL_OPERATORS:
            parts.append(
                _parse_logical(key, value, key_path, partial(_parse_document, fields=fields))
            )
        elif key in OPERATORS:
            advice = f'{key} compares a field: {{"field": {{"{key}": …}}}}'
            raise _build_error(key_path, "a field, $and, $or or $not", key, advice)
        elif key.startswith("$"):
            raise _build_unknown_name_error(path, "operator", key, OPERATORS)
        elif fields is not None and parse_path(key)[0] not in fields:
            raise _build_unknown_name_error(path, "field", key, fields)
        else:
            parts.append(_parse_field(key, value, path))
    return _combine_all(parts)


def _parse_condition(value: Any, path: _FilterPath) -> Node:
    """The condition on one value: operators, entries of an object, elements, or equality."""
    if isinstance(value, list):
        elements = [
            FieldCondition(i, _parse_condition(part, (*path, i))) for i, part in enumerate(value)
        ]
        return AllOf((Comparison("array", len(value)), *elements))
    if not isinstance(value, dict):
        return Comparison("$eq", value)
    operators = [key for key in value if key.startswith("$")]
    if not operators:
        fields = [_parse_field(key, part, path) for key, part in value.items()]
        return AllOf((Comparison("object", None), *fields))
    if len(operators) < len(value):
        name = next(key for key in value if not key.startswith("$"))
        advice = f"beside {operators[0]}, field {name!r} needs a filter of its own under $and"
        raise _build_error(path, "operators only or fields only", value, advice)
    return _combine_all([_parse_operator(key, operand, path) for key, operand in value.items()])


def _parse_field(key: str, value: Any, path: _FilterPath) -> FieldCondition:
    key_path = (*path, key)
    steps = len(parse_path(key))
    if steps > MAX_STEPS:
        raise _build_error(key_path, f"a path of at most {MAX_STEPS} steps", steps)
    return FieldCondition(key, _parse_condition(value, key_path))


def _parse_operator(name: str, operand: Any, path: _FilterPath) -> Node:
    operator_path = (*path, name)
    if name in _LOGICAL_OPERATORS:
        return _parse_logical(name, operand, operator_path, _parse_condition)
    if name not in OPERATORS:
        raise _build_unknown_name_error(path, "operator", name, OPERATORS)
    if name in ("$in", "$nin") and not isinstance(operand, list):
        raise _build_error(operator_path, "a list of values", operand)
    if name == "$exists" and not isinstance(operand, bool):
        raise _build_error(operator_path, "True or False", operand)
    if name in ORDER_OPERATORS and (
        isinstance(operand, bool) or not isinstance(operand, int | float | str)
    ):
        raise _build_error(operator_path, "a number or a string", operand)
    if name in ("$ne", "$nin"):
        return Negation(Comparison("$eq" if name == "$ne" else "$in", operand))
    return Comparison(name, operand)


def _parse_logical(
    name: str,
    operand: Any,
    path: _FilterPath,
    parse_part: Callable[[dict[str, Any], _FilterPath], Node],
) -> Node:
    if name == "$not":
        if not isinstance(operand, dict):
            raise _build_error(path, "a filter", operand)
        return Negation(parse_part(operand, path))
    if not isinstance(operand, list) or not operand:
        raise _build_error(path, "a non-empty list of filters", operand)
    parts = []
    for number, part in enumerate(operand):
        if not isinstance(part, dict):
            raise _build_error((*path, number), "a filter", part)
        parts.append(parse_part(part, (*path, number)))
    return AllOf(tuple(parts)) if name == "$and" else AnyOf(tuple(parts))


def _combine_all(parts: Sequence[Node]) -> Node:
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))


def _build_error(
    path: _FilterPath, expected: str, value: object, advice: str = ""
) -> InvalidFilter:
    """An error that names the part, what was expected and what came."""
    suffix = f"; {advice}" if advice else ""
    return InvalidFilter(
        f"{_format_filter_path(path)}: expected {expected}, got {_format_value(value)}{suffix}"
    )


def _build_unknown_name_error(
    path: _FilterPath, kind: str, name: str, allowed: Sequence[str]
) -> InvalidFilter:
    return InvalidFilter(
        f"{_format_filter_path(path)}: unknown {kind} {_format_value(name)}; {suggest_name(name, allowed)}"
    )


def _format_filter_path(path: _FilterPath) -> str:
    return "filter" + "".join(f"[{_format_value(step)}]" for step in path)


def _format_value(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, too many brackets
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- matching


def _compile_node(node: Node) -> _Predicate:
    """The test that a node stands for."""
    match node:
        case Comparison(name, operand):
            return _compile_comparison(name, operand)
        case FieldCondition(key, condition):
            return _compile_field(key, _compile_node(condition))
        case AllOf(parts):
            return _match_all([_compile_node(part) for part in parts])
        case AnyOf(parts):
            tests = [_compile_node(part) for part in parts]
            return lambda value: any(test(value) for test in tests)
        case Negation(part):
            test_part = _compile_node(part)
            return lambda value: not test_part(value)


def _match_all(tests: Sequence[_Predicate]) -> _Predicate:
    def test_all(value: Any) -> bool:
        for test in tests:  # noqa: SIM110 - half the time of all() over a generator
            if not test(value):
                return False
        return True

    return test_all


def parse_path(key: str) -> tuple[Step, ...]:
    """The steps a key stands for; a key that is no well-formed path is one label.

    >>> steps_of("items[*].name")
    ('items', <Mark.ANY_ELEMENT: '*'>, 'name')
    >>> steps_of("a..b")
    ('a..b',)
    """
    if not _PATH_PATTERN.fullmatch(key):
        return (key,)
    matches = _STEP_PATTERN.findall(key)
    return tuple(label or (ANY_ELEMENT if index == "*" else int(index)) for label, index in matches)


def _compile_field(key: str | int, test: _Predicate) -> _Predicate:
    """A test of an object, or of an array that is long enough, from a test of what `key` reaches.

    An object that has the very key, dots and all, is asked for it; otherwise the key is a path.
    """
    if isinstance(key, int):
        return lambda array: test(array[key])
    test_path = _compile_steps(parse_path(key), test)
    return lambda document: test(document[key]) if key in document else test_path(document)


def _compile_steps(steps: tuple[Step, ...], test: _Predicate) -> _Predicate:
    """A test of a value, from a test of what steps reach from it."""
    if ANY_ELEMENT in steps:
        index = steps.index(ANY_ELEMENT)
        test_element = _compile_steps(steps[index + 1 :], test)
        steps = steps[:index]

        def test(value: Any) -> bool:
            found = value if isinstance(value, list) and value else (_MISSING,)
            return any(map(test_element, found))

    def test_steps(value: Any) -> bool:
        for step in steps:
            if isinstance(step, str):
                value = value.get(step, _MISSING) if isinstance(value, dict) else _MISSING
            elif isinstance(step, int):
                inside = isinstance(value, list) and -len(value) <= step < len(value)
                value = value[step] if inside else _MISSING
        return test(value)

    return test_steps


def _compile_comparison(name: str, operand: Any) -> _Predicate:
    match name:
        case "object":
            return lambda value: isinstance(value, dict)
        case "array":
            return lambda value: isinstance(value, list) and len(value) == operand
        case "$eq":
            return lambda value: _is_equal(value, operand)
        case "$in":
            return _compile_membership(operand)
        case "$exists":
            return lambda value: (value is not _MISSING) is operand
        case "$contains":
            return lambda value: (
                isinstance(operand, str) and operand in value
                if isinstance(value, str)
                else isinstance(value, list) and any(_is_equal(one, operand) for one in value)
            )
    compare = ORDER_OPERATORS[name]
    if isinstance(operand, str):
        return lambda value: isinstance(value, str) and compare(value, operand)
    return lambda value: (
        isinstance(value, (int, float)) and not isinstance(value, bool) and compare(value, operand)
    )


def _is_equal(left: Any, right: Any) -> bool:
    """Whether two JSON values are one: objects with the same keys, arrays element by element."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(right, dict):
        return (
            isinstance(left, dict)
            and left.keys() == right.keys()
            and all(_is_equal(left[key], value) for key, value in right.items())
        )
    if isinstance(right, list):
        return (
            isinstance(left, list) and len(left) == len(right) and all(map(_is_equal, left, right))
        )
    return bool(left == right)


def _compile_membership(operands: Sequence[Any]) -> _Predicate:
    unhashable = [value for value in operands if isinstance(value, _UNHASHABLE_OR_BOOL)]
    members = frozenset(value for value in operands if not isinstance(value, _UNHASHABLE_OR_BOOL))

    def is_member(value: Any) -> bool:  # 1 and 1.0 are one member: Python hashes by exact value
        if isinstance(value, _UNHASHABLE_OR_BOOL):
            return any(_is_equal(value, one) for one in unhashable)
        return value in members

    return is_member

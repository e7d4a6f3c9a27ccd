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

_LOGICAL = ("$and", "$or", "$not")
ORDER = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
OPERATORS = ("$eq", "$ne", *ORDER, "$in", "$nin", "$exists", "$contains", *_LOGICAL)
"""All operators."""

_NESTED = (Mapping, list, tuple)
_NO_MEMBERS = (bool, dict, list)  # True is no 1 here, and sets cannot hold the others
_LABEL = r"[^.\[\]]+"
_INDEX = r"\[(?:-?[0-9]{1,9}|\*)\]"  # SQLite counts positions in 32 bits
_PATH = re.compile(rf"{_LABEL}(?:{_INDEX})*(?:\.{_LABEL}(?:{_INDEX})*)*")
_STEP = re.compile(rf"({_LABEL})|\[(-?[0-9]+|\*)\]")


class Mark(Enum):
    """Marks that are no JSON value and no label: a missing value, and every element."""

    MISSING = "missing"
    EACH = "*"


_MISSING: Final = Mark.MISSING
EACH: Final = Mark.EACH

Step: TypeAlias = str | int | Mark  # a label, a position in an array, or EACH
_Test: TypeAlias = Callable[[Any], bool]  # of a JSON value, or of _MISSING; it never raises
_Where: TypeAlias = tuple[str | int, ...]


# -- what a filter is made of


class Compare(NamedTuple):
    """A value against an operand.

    Besides the operators that `Not` leaves: `object`, whether it is one, and `array`, whether it is
    one of so many elements.
    """

    operator: str
    operand: Any


class Field(NamedTuple):
    """What a key reaches in an object, or a position in an array, meets a condition."""

    key: str | int
    condition: Node


class Every(NamedTuple):
    """All parts hold, asked in order; with no parts, always."""

    parts: tuple[Node, ...]


class Some(NamedTuple):
    """At least one part holds."""

    parts: tuple[Node, ...]


class Not(NamedTuple):
    """The part does not hold."""

    part: Node


Node: TypeAlias = Compare | Field | Every | Some | Not


class Filter(NamedTuple):
    """A parsed filter, its test of a document, and its conditions in SQL, once these are made."""

    node: Node
    matches: _Test
    conditions: dict[Any, Any]


# -- parsing


def parse(filter: Mapping[str, Any] | None, fields: Sequence[str] | None = None) -> Filter:
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
        raise _wrong((), "a mapping of fields to conditions", filter)
    node = _document(_copied(filter or {}, (), count()), (), fields)
    return Filter(node, _compiled(node), {})


def _copied(value: Any, where: _Where, counter: Iterator[int]) -> Any:
    """A part of a filter as plain JSON: of an enumeration's member, what it stands for."""
    nested = isinstance(value, _NESTED)
    if nested and len(where) > MAX_DEPTH:
        raise InvalidFilter(f"filter: more than {MAX_DEPTH} levels of nesting; flatten it")
    if (not nested or not value) and next(counter) == MAX_OPERANDS:
        raise InvalidFilter(
            f"{_named(where)}: more than {MAX_OPERANDS} values in one filter; split the search"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _wrong(where, "keys that are strings", key)
        entries = [(str.__str__(key), part) for key, part in value.items()]
        return {key: _copied(part, (*where, key), counter) for key, part in entries}
    if nested:
        return [_copied(part, (*where, number), counter) for number, part in enumerate(value)]
    return _scalar(value, where)


def _scalar(value: Any, where: _Where) -> str | int | float | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise _wrong(where, "JSON (dates as ISO strings)", value)


def _document(filter: dict[str, Any], where: _Where, fields: Sequence[str] | None = None) -> Node:
    """A mapping of fields, and of logical operators beside them."""
    parts: list[Node] = []
    for key, value in filter.items():
        inside = (*where, key)
        if key in _LOGICAL:
            parts.append(_logical(key, value, inside, partial(_document, fields=fields)))
        elif key in OPERATORS:
            advice = f'{key} compares a field: {{"field": {{"{key}": …}}}}'
            raise _wrong(inside, "a field, $and, $or or $not", key, advice)
        elif key.startswith("$"):
            raise _unknown(where, "operator", key, OPERATORS)
        elif fields is not None and steps_of(key)[0] not in fields:
            raise _unknown(where, "field", key, fields)
        else:
            parts.append(_field(key, value, where))
    return _every(parts)


def _condition(value: Any, where: _Where) -> Node:
    """The condition on one value: operators, entries of an object, elements, or equality."""
    if isinstance(value, list):
        elements = [Field(i, _condition(part, (*where, i))) for i, part in enumerate(value)]
        return Every((Compare("array", len(value)), *elements))
    if not isinstance(value, dict):
        return Compare("$eq", value)
    operators = [key for key in value if key.startswith("$")]
    if not operators:
        fields = [_field(key, part, where) for key, part in value.items()]
        return Every((Compare("object", None), *fields))
    if len(operators) < len(value):
        name = next(key for key in value if not key.startswith("$"))
        advice = f"beside {operators[0]}, field {name!r} needs a filter of its own under $and"
        raise _wrong(where, "operators only or fields only", value, advice)
    return _every([_operator(key, operand, where) for key, operand in value.items()])


def _field(key: str, value: Any, where: _Where) -> Field:
    inside = (*where, key)
    steps = len(steps_of(key))
    if steps > MAX_STEPS:
        raise _wrong(inside, f"a path of at most {MAX_STEPS} steps", steps)
    return Field(key, _condition(value, inside))


def _operator(name: str, operand: Any, where: _Where) -> Node:
    inside = (*where, name)
    if name in _LOGICAL:
        return _logical(name, operand, inside, _condition)
    if name not in OPERATORS:
        raise _unknown(where, "operator", name, OPERATORS)
    if name in ("$in", "$nin") and not isinstance(operand, list):
        raise _wrong(inside, "a list of values", operand)
    if name == "$exists" and not isinstance(operand, bool):
        raise _wrong(inside, "True or False", operand)
    if name in ORDER and (isinstance(operand, bool) or not isinstance(operand, int | float | str)):
        raise _wrong(inside, "a number or a string", operand)
    if name in ("$ne", "$nin"):
        return Not(Compare("$eq" if name == "$ne" else "$in", operand))
    return Compare(name, operand)


def _logical(
    name: str, operand: Any, where: _Where, inner: Callable[[dict[str, Any], _Where], Node]
) -> Node:
    if name == "$not":
        if not isinstance(operand, dict):
            raise _wrong(where, "a filter", operand)
        return Not(inner(operand, where))
    if not isinstance(operand, list) or not operand:
        raise _wrong(where, "a non-empty list of filters", operand)
    parts = []
    for number, part in enumerate(operand):
        if not isinstance(part, dict):
            raise _wrong((*where, number), "a filter", part)
        parts.append(inner(part, (*where, number)))
    return Every(tuple(parts)) if name == "$and" else Some(tuple(parts))


def _every(parts: Sequence[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Every(tuple(parts))


def _wrong(where: _Where, expected: str, got: object, advice: str = "") -> InvalidFilter:
    """An error that names the part, what was expected and what came."""
    told = f"; {advice}" if advice else ""
    return InvalidFilter(f"{_named(where)}: expected {expected}, got {_shown(got)}{told}")


def _unknown(where: _Where, what: str, name: str, known: Sequence[str]) -> InvalidFilter:
    return InvalidFilter(
        f"{_named(where)}: unknown {what} {_shown(name)}; {suggest_name(name, known)}"
    )


def _named(where: _Where) -> str:
    return "filter" + "".join(f"[{_shown(step)}]" for step in where)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, too many brackets
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- matching


def _compiled(node: Node) -> _Test:
    """The test that a node stands for."""
    match node:
        case Compare(name, operand):
            return _comparison(name, operand)
        case Field(key, condition):
            return _at(key, _compiled(condition))
        case Every(parts):
            return _all([_compiled(part) for part in parts])
        case Some(parts):
            tests = [_compiled(part) for part in parts]
            return lambda value: any(test(value) for test in tests)
        case Not(part):
            refused = _compiled(part)
            return lambda value: not refused(value)


def _all(tests: Sequence[_Test]) -> _Test:
    def every(value: Any) -> bool:
        for test in tests:  # noqa: SIM110 - half the time of all() over a generator
            if not test(value):
                return False
        return True

    return every


def steps_of(key: str) -> tuple[Step, ...]:
    """The steps a key stands for; a key that is no well-formed path is one label.

    >>> steps_of("items[*].name")
    ('items', <Mark.EACH: '*'>, 'name')
    >>> steps_of("a..b")
    ('a..b',)
    """
    if not _PATH.fullmatch(key):
        return (key,)
    found = _STEP.findall(key)
    return tuple(label or (EACH if index == "*" else int(index)) for label, index in found)


def _at(key: str | int, test: _Test) -> _Test:
    """A test of an object, or of an array that is long enough, from a test of what `key` reaches.

    An object that has the very key, dots and all, is asked for it; otherwise the key is a path.
    """
    if isinstance(key, int):
        return lambda array: test(array[key])
    walk = _walk(steps_of(key), test)
    return lambda document: test(document[key]) if key in document else walk(document)


def _walk(steps: tuple[Step, ...], test: _Test) -> _Test:
    """A test of a value, from a test of what steps reach from it."""
    if EACH in steps:
        at = steps.index(EACH)
        inner = _walk(steps[at + 1 :], test)
        steps = steps[:at]

        def test(value: Any) -> bool:
            found = value if isinstance(value, list) and value else (_MISSING,)
            return any(map(inner, found))

    def walked(value: Any) -> bool:
        for step in steps:
            if isinstance(step, str):
                value = value.get(step, _MISSING) if isinstance(value, dict) else _MISSING
            elif isinstance(step, int):
                inside = isinstance(value, list) and -len(value) <= step < len(value)
                value = value[step] if inside else _MISSING
        return test(value)

    return walked


def _comparison(name: str, operand: Any) -> _Test:
    match name:
        case "object":
            return lambda value: isinstance(value, dict)
        case "array":
            return lambda value: isinstance(value, list) and len(value) == operand
        case "$eq":
            return lambda value: _same(value, operand)
        case "$in":
            return _among(operand)
        case "$exists":
            return lambda value: (value is not _MISSING) is operand
        case "$contains":
            return lambda value: (
                isinstance(operand, str) and operand in value
                if isinstance(value, str)
                else isinstance(value, list) and any(_same(one, operand) for one in value)
            )
    holds = ORDER[name]
    if isinstance(operand, str):
        return lambda value: isinstance(value, str) and holds(value, operand)
    return lambda value: (
        isinstance(value, (int, float)) and not isinstance(value, bool) and holds(value, operand)
    )


def _same(left: Any, right: Any) -> bool:
    """Whether two JSON values are one: objects with the same keys, arrays element by element."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(right, dict):
        return (
            isinstance(left, dict)
            and left.keys() == right.keys()
            and all(_same(left[key], value) for key, value in right.items())
        )
    if isinstance(right, list):
        return isinstance(left, list) and len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def _among(operands: Sequence[Any]) -> _Test:
    special = [value for value in operands if isinstance(value, _NO_MEMBERS)]
    plain = frozenset(value for value in operands if not isinstance(value, _NO_MEMBERS))

    def among(value: Any) -> bool:  # 1 and 1.0 are one member: Python hashes by exact value
        if isinstance(value, _NO_MEMBERS):
            return any(_same(value, one) for one in special)
        return value in plain

    return among

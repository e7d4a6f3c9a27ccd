"""What the parts of a parsed filter mean: each becomes a test of a JSON value.

Values are JSON's, strictly: booleans are no numbers, numbers compare by exact value whatever their
size and notation, strings by code point, and null equals null alone, never what is missing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from perdure.stores.filter_paths import ARRAYS, MISSING, Test, at_key


@dataclass(frozen=True, slots=True)
class Compare:
    """A value against an operand; `operator` is one of `$eq $in $gt $gte $lt $lte $exists …`."""

    operator: str
    operand: Any

    @property
    def is_range(self) -> bool:
        """Whether it asks for order."""
        return self.operator in _ORDER

    @property
    def is_lower(self) -> bool:
        """Whether the operand is the lower end of a range."""
        return self.operator in ("$gt", "$gte")


@dataclass(frozen=True, slots=True)
class Field:
    """What a key reaches in an object meets a condition."""

    key: str
    condition: Node


@dataclass(frozen=True, slots=True)
class Every:
    """All parts hold; with no parts, always."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """At least one part holds."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The part does not hold."""

    part: Node


@dataclass(frozen=True, slots=True)
class Object:
    """The value is an object in which all fields hold, whatever else it has."""

    fields: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Elements:
    """The value is an array of as many elements as there are parts, each meeting its own."""

    parts: tuple[Node, ...]


Node: TypeAlias = Compare | Field | Every | Some | Not | Object | Elements

_ORDER = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}


def compiled(node: Node) -> Test:
    """The test that a node stands for. It never raises, whatever JSON value it is given."""
    match node:
        case Compare(name, operand):
            return _comparison(name, operand)
        case Field(key, condition):
            return at_key(key, compiled(condition))
        case Every(parts):
            return _every([compiled(part) for part in parts])
        case Some(parts):
            return _some([compiled(part) for part in parts])
        case Not(part):
            refused = compiled(part)
            return lambda value: not refused(value)
        case Object(fields):
            held = _every([compiled(field) for field in fields])
            return lambda value: isinstance(value, dict) and held(value)
        case Elements(parts):
            return _elements([compiled(part) for part in parts])


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are one: objects with the same keys, arrays element by element."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(right, dict):
        return (
            isinstance(left, dict)
            and left.keys() == right.keys()
            and all(same(left[key], value) for key, value in right.items())
        )
    if isinstance(right, ARRAYS):
        return isinstance(left, ARRAYS) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def _every(tests: Sequence[Test]) -> Test:
    if len(tests) == 1:
        return tests[0]

    def every(value: Any) -> bool:
        for test in tests:  # noqa: SIM110 - half the time of all() over a generator
            if not test(value):
                return False
        return True

    return every


def _some(tests: Sequence[Test]) -> Test:
    return lambda value: any(test(value) for test in tests)


def _elements(tests: Sequence[Test]) -> Test:
    def elements(value: Any) -> bool:
        return (
            isinstance(value, ARRAYS)
            and len(value) == len(tests)
            and all(test(part) for test, part in zip(tests, value, strict=True))
        )

    return elements


def _comparison(name: str, operand: Any) -> Test:
    match name:
        case "$eq":
            return _equal(operand)
        case "$in":
            return _among(operand)
        case "$exists":
            return lambda value: (value is not MISSING) is operand
        case "$contains":
            return _containing(operand)
        case _:
            return _ordered(name, operand)


def _equal(operand: Any) -> Test:
    if operand is None or isinstance(operand, bool):
        return lambda value: value is operand
    if isinstance(operand, (dict, *ARRAYS)):
        return lambda value: same(value, operand)
    if operand in (0, 1):  # the two numbers that Python takes for booleans
        return lambda value: value == operand and not isinstance(value, bool)
    return lambda value: bool(value == operand)


def _among(operands: Sequence[Any]) -> Test:
    truths = [value for value in operands if isinstance(value, bool)]
    nested = [value for value in operands if isinstance(value, (dict, *ARRAYS))]
    plain = frozenset(
        value for value in operands if not isinstance(value, (bool, dict, *ARRAYS))
    )  # 1 and 1.0 are one member: Python hashes and compares numbers by exact value

    def among(value: Any) -> bool:
        if isinstance(value, bool):
            return value in truths
        if isinstance(value, (dict, *ARRAYS)):
            return any(same(value, one) for one in nested)
        return value in plain

    return among


def _ordered(name: str, operand: Any) -> Test:
    holds = _ORDER[name]
    if isinstance(operand, str):
        return lambda value: isinstance(value, str) and holds(value, operand)
    return lambda value: (
        isinstance(value, (int, float)) and not isinstance(value, bool) and holds(value, operand)
    )


def _containing(operand: Any) -> Test:
    equal = _equal(operand)

    def containing(value: Any) -> bool:
        if isinstance(value, str):
            return isinstance(operand, str) and operand in value
        return isinstance(value, ARRAYS) and any(map(equal, value))

    return containing

"""What of a filter SQLite can be asked exactly, and what an index could serve."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from perdure.stores.filter_nodes import Compare, Every, Field, Node
from perdure.stores.filter_paths import may_be_indexed, storable

TRUTHS = frozenset(("true", "false"))

_EQUAL, _BETWEEN, _NEVER = range(3)


class Operands(NamedTuple):
    """Values to be equal to, by how SQLite can be asked for them."""

    keys: list[str | int]  # compared exactly
    numbers: list[tuple[float, float]]  # from, to
    types: list[str]  # only the type is known


def driving_paths(node: Node) -> list[str]:
    """The paths on which an index could narrow the search; see `Filter.indexable`."""
    ranked: dict[str, int] = {}
    for part in _conjuncts(node):
        if isinstance(part, Field) and may_be_indexed(part.key):
            rank = min(map(_rank, _conjuncts(part.condition)))
            ranked[part.key] = min(rank, ranked.get(part.key, _NEVER))
    return sorted((key for key in ranked if ranked[key] < _NEVER), key=ranked.__getitem__)


def sorted_operands(operands: Iterable[Any]) -> Operands:
    """Sort JSON values by how SQLite can be asked for them."""
    found = Operands([], [], [])
    for value in operands:
        if isinstance(value, bool) or value is None:
            found.types.append(json.dumps(value))
        elif isinstance(value, str):
            if storable(value):
                found.keys.append(value)
            else:
                found.types.append("text")
        elif isinstance(value, (list, dict)):
            found.types.append("object" if isinstance(value, dict) else "array")
        elif abs(value) <= 2**53 and value == int(value):
            found.keys.append(int(value))  # as 1 and as 1.0, SQLite reads these without error
        elif (bounds := bounds_of(value)) is not None:
            found.numbers.append(bounds)
        else:
            found.types.extend(("integer", "real"))
    return found._replace(types=list(dict.fromkeys(found.types)))


def bounds_of(number: int | float) -> tuple[float, float] | None:
    """Between which reals SQLite reads the number; None if it may read an infinity, and for NaN."""
    try:
        value = float(number)
    except OverflowError:
        return None
    if not math.isfinite(value):
        return None
    slack = abs(value) * 1e-12 + 1e-300  # 15 digits are promised; the smallest reals have fewer
    return value - slack, value + slack


def _conjuncts(node: Node) -> Iterator[Node]:
    """The parts that all have to hold."""
    if isinstance(node, Every):
        for part in node.parts:
            yield from _conjuncts(part)
    else:
        yield node


def _rank(node: Node) -> int:
    """How well an index serves a condition: `_EQUAL` before `_BETWEEN`, or `_NEVER`."""
    match node:
        case Compare("$eq", operand):
            served = not set(sorted_operands([operand]).types) - TRUTHS
            return _EQUAL if served else _NEVER
        case Compare("$in", operands):
            served = bool(operands) and not set(sorted_operands(operands).types) - TRUTHS
            return _EQUAL if served else _NEVER
        case Compare("$gt" | "$gte" | "$lt" | "$lte", operand):
            served = (
                storable(operand) if isinstance(operand, str) else bounds_of(operand) is not None
            )
            return _BETWEEN if served else _NEVER
    return _NEVER

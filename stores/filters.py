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

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from perdure.errors import InvalidFilter
from perdure.stores.filter_nodes import (
    Compare,
    Elements,
    Every,
    Field,
    Node,
    Not,
    Object,
    Some,
    compiled,
)
from perdure.stores.filter_operands import driving_paths
from perdure.stores.filter_paths import ARRAYS, MAX_STEPS, steps_of
from perdure.stores.filter_sql import Condition, condition_of
from perdure.stores.unknown import meant

MAX_DEPTH = 32
"""The most levels of nesting in a filter."""
MAX_OPERANDS = 10_000
"""The most values in a filter, elements of lists counted."""

_LOGICAL = ("$and", "$or", "$not")
_ORDER = ("$gt", "$gte", "$lt", "$lte")
OPERATORS = ("$eq", "$ne", *_ORDER, "$in", "$nin", "$exists", "$contains", *_LOGICAL)
"""All operators."""

_Where = tuple[str | int, ...]
_Inner = Callable[[Any, _Where], Node]


class Filter:
    """A parsed filter. `parse` makes it; it does not change and may be shared by threads."""

    __slots__ = ("_driving", "_node", "_sql", "_test")

    def __init__(self, node: Node) -> None:
        self._node = node
        self._test = compiled(node)
        self._driving = driving_paths(node)
        self._sql: dict[tuple[str, frozenset[str]], Condition] = {}

    def matches(self, value: Mapping[str, Any]) -> bool:
        """Whether a document meets the filter. Raises for no JSON object."""
        return self._test(value)

    def sql(self, column: str, indexed: Collection[str] = ()) -> Condition:
        """A condition for SQLite that is true for every row that `matches`, and for few others.

        Args:
            column: The column, as SQL; it holds JSON text as `json.dumps` writes it.
            indexed: Paths with an index on `index_expression(path, column)`.

        Returns:
            What goes after WHERE, in brackets as needed, with its parameters.

        Raises:
            ConfigurationError: An indexed path is none that `index_path` allows.
        """
        form = column, frozenset(path for path in indexed if path in self._driving)
        if form not in self._sql:
            self._sql[form] = condition_of(self._node, column, indexed)
        return self._sql[form]

    def indexable(self) -> list[str]:
        """The paths an index could serve this filter by, equalities before ranges."""
        return list(self._driving)


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
    parser = _Parser(fields)
    if filter is None:
        return Filter(Every(()))
    if not isinstance(filter, Mapping):
        raise parser.error((), "a mapping of fields to conditions", filter)
    return Filter(parser.document(filter, ()))


class _Parser:
    """One parse: it counts the operands on the way."""

    def __init__(self, fields: Sequence[str] | None) -> None:
        self._fields = fields
        self._operands = 0

    def document(self, filter: Any, where: _Where) -> Node:
        """A mapping of fields, and of logical operators beside them."""
        parts: list[Node] = []
        for key, value in self._entries(filter, where):
            inside = (*where, key)
            if key in _LOGICAL:
                parts.append(self._logical(key, value, inside, self.document))
            elif key in OPERATORS:
                advice = f'{key} compares a field: {{"field": {{"{key}": …}}}}'
                raise self.error(inside, "a field, $and, $or or $not", key, advice)
            elif key.startswith("$"):
                raise self._unknown(key, where)
            else:
                if self._fields is not None and steps_of(key)[0] not in self._fields:
                    raise InvalidFilter(
                        f"{_named(where)}: unknown field {_shown(key)}; {meant(key, self._fields)}"
                    )
                parts.append(self._field(key, value, where))
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def condition(self, value: Any, where: _Where) -> Node:
        """What is asked of one value: operators, entries of an object, elements, or equality."""
        if isinstance(value, ARRAYS):
            self._descend(value, where)
            return Elements(tuple(self.condition(v, (*where, i)) for i, v in enumerate(value)))
        if not isinstance(value, Mapping):
            return Compare("$eq", self._scalar(value, where))
        entries = self._entries(value, where)
        operators = [key for key, _ in entries if key.startswith("$")]
        if not operators:
            return Object(tuple(self._field(key, part, where) for key, part in entries))
        if len(operators) < len(entries):
            name = next(key for key, _ in entries if not key.startswith("$"))
            advice = f"beside {operators[0]}, field {name!r} needs a filter of its own under $and"
            raise self.error(where, "operators only or fields only", value, advice)
        parts = tuple(self._operator(key, operand, where) for key, operand in entries)
        return parts[0] if len(parts) == 1 else Every(parts)

    def _field(self, key: str, value: Any, where: _Where) -> Field:
        inside = (*where, key)
        steps = len(steps_of(key))
        if steps > MAX_STEPS:
            raise self.error(inside, f"a path of at most {MAX_STEPS} steps", steps)
        return Field(key, self.condition(value, inside))

    def _operator(self, name: str, operand: Any, where: _Where) -> Node:
        inside = (*where, name)
        if name in _LOGICAL:
            return self._logical(name, operand, inside, self.condition)
        if name in ("$in", "$nin"):
            if not isinstance(operand, ARRAYS):
                raise self.error(inside, "a list of values", operand)
            among = Compare("$in", self._json(operand, inside))
            return among if name == "$in" else Not(among)
        if name in _ORDER:
            if isinstance(operand, bool) or not isinstance(operand, int | float | str):
                raise self.error(inside, "a number or a string", operand)
            return Compare(name, self._scalar(operand, inside))
        if name == "$exists":
            if not isinstance(operand, bool):
                raise self.error(inside, "True or False", operand)
            return Compare(name, operand)
        if name not in OPERATORS:
            raise self._unknown(name, where)
        value = self._json(operand, inside)
        return Not(Compare("$eq", value)) if name == "$ne" else Compare(name, value)

    def _logical(self, name: str, operand: Any, where: _Where, inner: _Inner) -> Node:
        if name == "$not":
            if not isinstance(operand, Mapping):
                raise self.error(where, "a filter", operand)
            return Not(inner(operand, where))
        if not isinstance(operand, ARRAYS) or not operand:
            raise self.error(where, "a non-empty list of filters", operand)
        for number, part in enumerate(operand):
            if not isinstance(part, Mapping):
                raise self.error((*where, number), "a filter", part)
        parts = tuple(inner(part, (*where, number)) for number, part in enumerate(operand))
        return Every(parts) if name == "$and" else Some(parts)

    # -- values

    def _entries(self, mapping: Mapping[Any, Any], where: _Where) -> list[tuple[str, Any]]:
        self._descend(mapping, where)
        entries = []
        for key, value in mapping.items():
            if not isinstance(key, str):
                raise self.error(where, "keys that are strings", key)
            entries.append((str.__str__(key), value))
        return entries

    def _json(self, value: Any, where: _Where) -> Any:
        if isinstance(value, ARRAYS):
            self._descend(value, where)
            return [self._json(part, (*where, number)) for number, part in enumerate(value)]
        if isinstance(value, Mapping):
            entries = self._entries(value, where)
            return {key: self._json(part, (*where, key)) for key, part in entries}
        return self._scalar(value, where)

    def _scalar(self, value: Any, where: _Where) -> str | int | float | None:
        """The value in JSON's own type: of an enumeration's member, what it stands for."""
        self._count(where)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        raise self.error(where, "JSON (dates as ISO strings)", value)

    def _descend(self, value: Collection[Any], where: _Where) -> None:
        if len(where) > MAX_DEPTH:
            raise InvalidFilter(f"filter: more than {MAX_DEPTH} levels of nesting; flatten it")
        if not value:
            self._count(where)

    def _count(self, where: _Where) -> None:
        self._operands += 1
        if self._operands > MAX_OPERANDS:
            raise InvalidFilter(
                f"{_named(where)}: more than {MAX_OPERANDS} values in one filter; split the search"
            )

    # -- what is wrong

    def error(self, where: _Where, expected: str, got: object, advice: str = "") -> InvalidFilter:
        """An error that names the part, what was expected and what came."""
        told = f"; {advice}" if advice else ""
        return InvalidFilter(f"{_named(where)}: expected {expected}, got {_shown(got)}{told}")

    def _unknown(self, name: str, where: _Where) -> InvalidFilter:
        told = meant(name, OPERATORS)
        return InvalidFilter(f"{_named(where)}: unknown operator {_shown(name)}; {told}")


def _named(where: _Where) -> str:
    return "filter" + "".join(f"[{_shown(step)}]" for step in where)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, too many brackets
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."

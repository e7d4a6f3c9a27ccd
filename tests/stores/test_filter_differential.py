"""Filters are compared with an oracle, with both databases, and with langgraph's own store."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from langgraph.store.memory import InMemoryStore

from perdure.stores.filters import parse_filter
from tests.stores.filter_oracle import matches_filter
from tests.stores.filter_rows import postgres_matching_ids, sqlite_matching_ids

KEYS = [
    "a",
    "b",
    "a.b",
    "tags",
    "tags[0]",
    "é",
    "",
    'q"q',
    "b\\",
    "x y",
    "a..b",
    "[*]",
    "\x7f",
    "9",
]
SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1),
    *(10**400, -(10**400), 0.1, 1.0, -0.0, 1e16, 2.0**53, 2.0**63, 5e-324, 1.7976931348623157e308),
    *("", "x", "xy", "X", "é", "e\u0301", "😀", "\uffff", "x\0y", "\0", "1", "true", "null", 'a"b'),
    *("2024-01-01", "2024-01-02T00:00:00", "[1]", '{"a":1}', "%", "\ud800", "\n", "a\\b", "\x7f"),
]
OPERATORS = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin", "$contains", "$exists")

scalars = st.one_of(st.sampled_from(SCALARS), st.integers(), st.floats(allow_nan=False), st.text())
scalars = scalars.filter(lambda value: value not in (float("inf"), float("-inf")))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=6,
)
documents = st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=5)


def iter_paths(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every path into a document with the value at that path."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, part in value.items():
            yield from iter_paths(part, f"{path}.{key}" if path else key)
    if isinstance(value, list) and path:
        for number, part in enumerate(value):
            for index in (number, number - len(value), "*"):
                yield from iter_paths(part, f"{path}[{index}]")


@st.composite
def conditions(draw: st.DrawFn, near: Any, depth: int = 2) -> Any:
    """Draw a condition on a field, often related to its value `near`."""
    value = draw(st.sampled_from([near, near, draw(values)]))
    kinds = ["plain", "operators", "operators", *(["logical"] if depth else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "plain":
        plain = draw(st.just(value) | st.builds(take_first_entries, st.just(value)))
        assume(plain != {} or value == {})
        return plain
    if kind == "logical":
        inner = conditions(near, depth - 1).filter(lambda part: isinstance(part, dict))
        name = draw(st.sampled_from(["$and", "$or", "$not"]))
        return {name: draw(inner if name == "$not" else st.lists(inner, min_size=1, max_size=3))}
    names = draw(st.lists(st.sampled_from(OPERATORS), min_size=1, max_size=2, unique=True))
    return {name: draw(operands(name, value)) for name in names}


def take_first_entries(value: Any) -> Any:
    """Return an object with only its first entry, recursively."""
    if isinstance(value, dict):
        return {key: take_first_entries(part) for key, part in list(value.items())[:1]}
    return value


@st.composite
def operands(draw: st.DrawFn, name: str, value: Any) -> Any:
    """Draw an operand of a valid type that is related to a value."""
    if name == "$exists":
        return draw(st.booleans())
    if name in ("$in", "$nin"):
        return draw(st.permutations([value, *draw(st.lists(scalars, max_size=3))]))
    if name == "$contains":
        inside = value if isinstance(value, list) and value else [value]
        element = draw(st.sampled_from(inside))
        return element[:1] if isinstance(element, str) and draw(st.booleans()) else element
    if name in ("$eq", "$ne"):
        return value
    ordered = isinstance(value, int | float | str) and not isinstance(value, bool)
    if ordered and not isinstance(value, str) and draw(st.booleans()):
        return draw(st.sampled_from([value, math.inf, -math.inf, math.nan]))
    return value if ordered else draw(st.integers() | st.sampled_from(["", "m"]))


@st.composite
def filters(draw: st.DrawFn, pool: list[dict[str, Any]], depth: int = 2) -> dict[str, Any]:
    """Draw a filter that may match some of the documents."""
    filter: dict[str, Any] = {}
    paths = [place for document in pool for place in iter_paths(document)]
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from(["field"] * 4 + (["$and", "$or", "$not"] if depth else [])))
        if kind == "field":
            path, near = draw(st.sampled_from([*paths, ("a.b", 1), ("none", None)]))
            filter[path] = draw(conditions(near))
        elif kind == "$not":
            filter[kind] = draw(filters(pool, depth - 1))
        else:
            filter[kind] = draw(st.lists(filters(pool, depth - 1), min_size=1, max_size=3))
    return filter


@st.composite
def documents_with_filter(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Draw documents, as they are read back from JSON, and a filter."""
    pool = draw(st.lists(documents, min_size=2, max_size=6))
    pool = [json.loads(json.dumps(document)) for document in pool]
    filter = draw(filters(pool))
    assume(not any(key.startswith("$") for key in filter if key not in ("$and", "$or", "$not")))
    return pool, filter


@given(documents_with_filter())
def test_filter_matches_same_documents_as_oracle(question: tuple[Any, Any]) -> None:
    """The evaluator agrees with the slow implementation of the rules on every document."""
    pool, filter = question
    parsed = parse_filter(filter)

    assert [matches_filter(filter, document) for document in pool] == [
        parsed.matches(document) for document in pool
    ]


@given(documents_with_filter(), st.booleans(), st.sets(st.sampled_from(["a", "b", "a.b", "tags"])))
def test_sqlite_condition_selects_all_matching_rows(
    question: tuple[Any, Any], ascii_only: bool, indexed: set[str]
) -> None:
    """No matching row is left out, with and without indexes, with and without ASCII escapes."""
    pool, filter = question
    parsed = parse_filter(filter)
    matching = {number for number, document in enumerate(pool) if parsed.matches(document)}

    assert set() == matching - sqlite_matching_ids(
        pool, parsed, ascii_only=ascii_only, indexed=indexed
    )


@given(documents_with_filter(), st.booleans())
def test_postgres_condition_selects_all_matching_rows(
    question: tuple[Any, Any], ascii_only: bool
) -> None:
    """No matching row is left out in Postgres either."""
    pool, filter = question
    parsed = parse_filter(filter)
    matching = {number for number, document in enumerate(pool) if parsed.matches(document)}

    assert set() == matching - postgres_matching_ids(pool, parsed, ascii_only=ascii_only)


NAMES = ["a", "b", "c"]
numbers = st.integers(-9, 9) | st.sampled_from([0.5, -2.5, 3.0])
plain = st.recursive(
    numbers | st.sampled_from(["x", "y", "xy"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def documents_with_simple_filter(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Draw documents and a filter that InMemoryStore supports, without nulls and booleans."""
    full = st.fixed_dictionaries({"n": numbers}, optional=dict.fromkeys(NAMES, plain))
    pool = draw(st.lists(full, min_size=1, max_size=6))
    filter: dict[str, Any] = {}
    for _ in range(draw(st.integers(1, 3))):
        key, near = draw(
            st.sampled_from([place for document in pool for place in document.items()])
        )
        name = draw(st.sampled_from(["plain", "$eq", "$ne", "$gt", "$gte", "$lt", "$lte"]))
        if name == "plain":
            filter[key] = draw(st.sampled_from([near, take_first_entries(near)]))
        elif name in ("$eq", "$ne"):
            filter[key] = {name: near}
        else:
            filter["n"] = {name: draw(numbers)}
    return pool, filter


@given(documents_with_simple_filter())
def test_filter_finds_same_documents_as_in_memory_store(question: tuple[Any, Any]) -> None:
    """A filter that langgraph's InMemoryStore supports finds the same documents in both stores."""
    pool, filter = question
    store = InMemoryStore()
    for number, document in enumerate(pool):
        store.put(("n",), str(number), document)

    found_ids = {int(item.key) for item in store.search(("n",), filter=filter, limit=100)}
    parsed = parse_filter(filter)

    assert found_ids == {number for number, one in enumerate(pool) if parsed.matches(one)}

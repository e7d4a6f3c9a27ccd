"""SQL conditions of filters: narrow, complete, safe against injection, and served by indexes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure.errors import ConfigurationError
from perdure.stores.filter_sql import (
    JSONLocation,
    build_filter_condition,
    build_index_expression,
    check_index_path,
    find_indexable_paths,
)
from perdure.stores.filters import MAX_OPERANDS, parse_filter
from tests.stores.filter_rows import EvaluateFilter, make_items_table, matching_ids

DOCUMENT: dict[str, Any] = {
    "n": 5,
    "one": 1,
    "half": 0.5,
    "day": "2024-03-01",
    "tags": ["x", "y", 1, None],
    "author": {"name": "Ann", "age": 30},
    "键": "cjk",
}


@pytest.mark.parametrize(
    "filter",
    [
        {"n": 6},
        {"day": {"$gt": "2025"}},
        {"n": {"$in": [1, "5", 0.25, 10**30]}},
        {"half": {"$lt": 0.25}},
        {"author": {"name": "Bob"}},
        {"author.name": "Bob"},
        {"tags": ["y"]},
        {"tags[1]": "x"},
        {"missing": True},
        {"n": True},
        {"键": "字"},
        {"$or": [{"n": 6}, {"one": 2}]},
        {"n": {"$in": []}},
    ],
    ids=repr,
)
def test_sql_condition_rejects_document_that_does_not_match(
    filter: dict[str, Any], evaluate_filter: EvaluateFilter
) -> None:
    """The condition filters rows in the database wherever SQL can express the filter."""
    assert {False} == evaluate_filter(parse_filter(filter), DOCUMENT)


@pytest.mark.parametrize(
    "filter",
    [
        {"a": {"$in": [*range(MAX_OPERANDS)]}},
        {"a": {"$in": [number + 0.25 for number in range(MAX_OPERANDS)]}},
        {"$or": [{"a": number} for number in range(MAX_OPERANDS)]},
        {"$and": [{"a": {"$lt": number + 10}} for number in range(MAX_OPERANDS)]},
        {"a": [*range(MAX_OPERANDS)]},
        {"[*]".join("x" * 30): 1},
    ],
    ids=["in", "floats", "or", "and", "list", "wild"],
)
def test_largest_allowed_filters_run_as_sql(
    filter: dict[str, Any], evaluate_filter: EvaluateFilter
) -> None:
    """A filter within our limits is also within the limits of SQL, with the same meaning."""
    parsed = parse_filter(filter)

    for document in ({"a": 7}, {"a": 7.25}, {"a": [*range(MAX_OPERANDS)]}):
        assert not parsed.matches(document) or {True} == evaluate_filter(parsed, document)


HOSTILE = [
    *("'", '"', "' OR 1=1 --", "'; DROP TABLE items; --", '") OR 1=1 --', "\\", '\\"', "a'b\"c"),
    *("$", "$.a", '$."a"', "$[0]", "a[", "a]", "[", "[]", "[#-1]", "a[#]", "a[1", "a[x]", "a[*]b"),
    *(".", "..", "a.", ".a", "a..b", " ", "\t", "\n", "\0", "a\0b", "?", ":x", "@x", "%", "_", "*"),
    *("{a,b}", "\ud800", "\udfff\ud800", "\U0001f4a9", "\u2028", "é", "e\u0301", "\x7f", "\x1f"),
    *("a[999999999]", "a[-999999999]", "a[99999999999999999999]", "a[-0]", "a[٣]", "/", "\\u0061"),
    *("null", "true", "1", "--", "/*", "json(", "MATCH", "rowid", "a" * 10_000, f"a[{'9' * 5000}]"),
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:30])
def test_hostile_text_is_never_interpreted_as_syntax(
    text: str, evaluate_filter: EvaluateFilter
) -> None:
    """Any text works as a key and as an operand, and the filter's result is correct."""
    key = (
        f".{text}" if text.startswith("$") else text
    )  # a key that begins with $ is an operator or an error
    document = json.loads(json.dumps({key: text, "k": {key: [text, 1]}, "s": f"<{text}>"}))
    filters: list[dict[str, Any]] = [
        {key: text},
        {key: {"$gte": text, "$lte": text}},
        {"k": {key: {"$contains": text}}},
        {"k": {key: [text, 1]}},
        {"s": {"$contains": text}},
        {key: {"$in": [text, "other"]}},
        {key: {"$exists": True}},
    ]
    for filter in filters:
        parsed = parse_filter(filter)
        condition = build_filter_condition(parsed, JSONLocation("value"))

        assert parsed.matches(document)
        assert not parsed.matches({"other": "x", "s": "", "k": {}})
        assert text not in condition.text or len(text) < 8
        assert {True} == evaluate_filter(parsed, document)


@pytest.mark.parametrize(
    ("filter", "path"),
    [
        ({"kind": "k7"}, "kind"),
        ({"kind": {"$in": ["k7", "k8"]}}, "kind"),
        ({"n": {"$gte": 7, "$lt": 9}}, "n"),
        ({"n": 7.25}, "n"),
        ({"author.name": "k7"}, "author.name"),
        ({"author.name": {"$gt": "k7"}}, "author.name"),
        ({"done": True}, "done"),
        ({"$and": [{"kind": "k7"}, {"$not": {"n": 1}}]}, "kind"),
    ],
    ids=repr,
)
def test_sqlite_uses_path_index_for_filter(filter: dict[str, Any], path: str) -> None:
    """SQLite uses the index for each filter for which `find_indexable_paths` returns its path."""
    pool: list[dict[str, Any]] = [
        {"kind": f"k{number}", "n": number, "author": {"name": f"k{number}"}, "done": number == 7}
        for number in range(200)
    ]
    pool.append(
        {"author.name": "k7", "author": {"name": "other"}}
    )  # a literal key with a dot has precedence over the path
    connection = make_items_table(pool)
    connection.execute(f"CREATE INDEX by_path ON items ({build_index_expression(path, 'value')})")
    parsed = parse_filter(filter)
    condition = build_filter_condition(parsed, JSONLocation("i.value"), [path])
    query = f"EXPLAIN QUERY PLAN SELECT * FROM items AS i WHERE {condition.text}"
    plan = [row[3] for row in connection.execute(query, condition.params)]
    found_ids = matching_ids(connection, parsed, [path])
    connection.close()

    assert path in find_indexable_paths(parsed)
    assert "SEARCH i USING INDEX by_path" in plan[0]
    assert {number for number, document in enumerate(pool) if parsed.matches(document)} <= found_ids
    assert len(found_ids) < len(pool)


def test_indexable_paths_list_equalities_before_ranges() -> None:
    """Negated conditions, alternatives and paths that are not plain are left out."""
    filter = {
        "late": {"$gt": 1},
        "kind": "x",
        "a.b": {"$in": [1, "x"]},
        **{
            "no": {"$ne": 1},
            "null": None,
            "list": [1],
            "é": 1,
            "x[0]": 1,
            "has": {"$exists": True},
        },
        "$or": [{"c": 1}, {"d": 1}],
        "$and": [{"e": {"$gt": 1, "$ne": 2}}],
    }

    paths = find_indexable_paths(parse_filter(filter))

    assert paths == ["kind", "a.b", "late", "e"]


@pytest.mark.parametrize("path", ["", "a b", "a.", "a'b", "1a", "a[0]", "é", "a-b", None, "a\n", 3])
def test_index_on_path_that_is_not_plain_is_refused(path: Any) -> None:
    """A path becomes part of the SQL text, so it may contain only letters, digits, `_` and dots."""
    with pytest.raises(ConfigurationError, match="cannot index"):
        check_index_path(path)
    with pytest.raises(ConfigurationError):
        build_filter_condition(parse_filter({"a": 1}), JSONLocation("value"), [path])

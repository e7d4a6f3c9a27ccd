"""Examples of filters: what each rule matches, and what is refused."""

from __future__ import annotations

import copy
import math
from enum import IntEnum, StrEnum
from typing import Any

import pytest

from perdure.errors import InvalidFilter
from perdure.stores.filter_sql import JSONLocation, build_filter_condition
from perdure.stores.filters import MAX_OPERANDS, OPERATORS, parse_filter
from tests.stores.filter_oracle import matches_filter
from tests.stores.filter_rows import EvaluateFilter

DOCUMENT: dict[str, Any] = {
    "n": 5,
    "one": 1,
    "yes": True,
    "null": None,
    "big": 2**53 + 1,
    "huge": 2**63 + 1,
    "half": 0.5,
    "text": "naïve 📦",
    "day": "2024-03-01",
    "tags": ["x", "y", 1, None],
    "none": [],
    "author": {"name": "Ann", "age": 30, "$ref": "r"},
    "items": [{"name": "pen", "price": 2}, {"name": "ink", "price": 9}, {"price": 1}],
    "a.b": "literal",
    "a": {"b": "path", "c": 1},
    "": "empty key",
    'q"q': "quote",
    "it's": "apostrophe",
    "键": "cjk",
    "c[0]": "brackets",
    "cut": "x\0y",
    "flags": [True, {"on": False}],
}

MATCHES: list[Any] = [
    {},
    {"n": 5},
    {"n": 5.0},
    {"n": {"$gt": 4, "$lt": 6}},
    {"n": {"$gte": 5, "$lte": 5}},
    {"n": {"$not": {"$gt": 5}}},
    {"n": {"$or": [{"$lt": 1}, {"$gt": 4}]}},
    {"n": {"$and": [{"$gt": 1}, {"$ne": 6}]}},
    {"n": {"$in": [1, 5]}, "big": 2**53 + 1},
    {"big": {"$gt": 2**53}},
    {"huge": {"$gt": 2.0**63}},
    {"huge": {"$lt": 10**400}},
    {"null": None},
    {"null": {"$exists": True}},
    {"missing": {"$exists": False}},
    {"missing": {"$ne": None}},
    {"missing": {"$ne": 1}, "n": {"$nin": []}},
    {"missing": {"$nin": [None, 1]}},
    {"yes": {"$ne": 1}},
    {"yes": {"$in": [0, True]}},
    {"day": {"$gte": "2024-03-01", "$lt": "2024-03-01T00:00:00"}},
    {"cut": "x\0y"},
    {"cut": {"$gt": "x"}},
    {"flags": {"$eq": [True, {"on": False}]}},
    {"cut": {"$contains": "\0y"}},
    {"text": {"$contains": "ïve 📦"}},
    {"text": {"$contains": ""}},
    {"tags": {"$contains": None}},
    {"tags": {"$contains": 1.0}},
    {"tags": ["x", "y", 1, None]},
    {"tags": ["x", {"$gt": "a"}, {"$in": [1]}, None]},
    {"tags[0]": "x"},
    {"tags[-1]": None},
    {"tags[4]": {"$exists": False}},
    {"tags[*]": "y"},
    {"tags[4294967296]": {"$exists": False}},
    {"none[*]": {"$exists": False}},
    {"none": []},
    {"items[*].name": "ink"},
    {"items[*].name": {"$exists": False}},
    {"items[*]": {"name": "ink", "price": {"$gt": 5}}},
    {"items[0].name": "pen"},
    {"items": {"$contains": {"price": 1}}},
    {"author": {"name": "Ann"}},
    {"author": {"age": {"$gt": 18}, "nick": {"$exists": False}}},
    {"author": {}},
    {"author": {"$ne": {"name": "Ann"}}},
    {"author": {"$eq": {"$ref": "r", "age": 30.0, "name": "Ann"}}},
    {"author.$ref": "r"},
    {"author.name": {"$contains": "nn"}},
    {"a.b": "literal"},
    {"a": {"b": "path"}},
    {"c[0]": "brackets"},
    {"": "empty key", 'q"q': "quote", "it's": "apostrophe", "键": "cjk"},
    {"$or": [{"n": 1}, {"half": 0.5}], "one": 1},
    {"$not": {"n": 1}},
    {"$and": [{"n": 5}, {"$or": [{"x": 1}, {"$not": {"y": 1}}]}]},
]
MISSES: list[Any] = [
    {"n": "5"},
    {"n": {"$gt": "4"}},
    {"n": {"$contains": 5}},
    {"one": True},
    {"yes": 1},
    {"yes": {"$gte": 0}},
    {"yes": {"$in": [1, 1.0]}},
    {"big": 2**53},
    {"big": 2.0**53},
    {"missing": None},
    {"missing": {"$in": [None]}},
    {"missing": {"$lt": 1}},
    {"missing": {"$not": {"$ne": 1}}},
    {"null": {"$exists": False}},
    {"null": {"$lte": 0}},
    {"null": False},
    {"tags": "x"},
    {"tags": ["x", "y", 1]},
    {"tags": {"$in": ["x"]}},
    {"tags": {"$contains": True}},
    {"tags": {"$contains": ["x"]}},
    {"flags": {"$eq": [1, {"on": False}]}},
    {"flags": {"$in": [[True, {"on": 0}]]}},
    {"flags": [1, {"on": False}]},
    {"tags[*]": {"$gt": "y"}},
    {"none[*]": None},
    {"items[*]": {"name": "pen", "price": {"$gt": 5}}},
    {"items.name": "pen"},
    {"author": {"name": None}},
    {"author": {"nick": None}},
    {"author": {"$eq": {"name": "Ann"}}},
    {"author": {"$contains": "name"}},
    {"missing": {}},
    {"missing": {"x": {"$exists": False}}},
    {"a.b": "path"},
    {"a": {"b": "literal"}},
    {"text": {"$contains": "NAÏVE"}},
    {"text": "nai\u0308ve 📦"},
    {"cut": "x"},
    {"cut": {"$lte": "x"}},
    {"$not": {}},
    {"n": {"$in": []}},
]


@pytest.mark.parametrize("filter", MATCHES, ids=repr)
def test_filter_matches_document(filter: dict[str, Any], evaluate_filter: EvaluateFilter) -> None:
    """Python, the oracle and the SQL condition all find the document."""
    parsed = parse_filter(filter)

    assert matches_filter(filter, DOCUMENT)
    assert parsed.matches(DOCUMENT)
    assert {True} == evaluate_filter(parsed, DOCUMENT)


@pytest.mark.parametrize("filter", MISSES, ids=repr)
def test_filter_does_not_match_document(filter: dict[str, Any]) -> None:
    """Neither Python nor the oracle finds the document."""
    assert not matches_filter(filter, DOCUMENT)
    assert not parse_filter(filter).matches(DOCUMENT)


@pytest.mark.parametrize(
    ("filter", "expected_path", "expected_message"),
    [
        ({"a": {"$gte_": 1}}, "filter['a']", "did you mean '$gte'"),
        ({"a": {"$zzz": 1}}, "filter['a']", "expected one of $eq"),
        ({"$regex": "x"}, "filter", "unknown operator '$regex'; expected one of $eq, $ne, "),
        ({"$gt": 3}, "filter['$gt']", '{"field": {"$gt": …}}'),
        ({"a": {"$in": "x"}}, "filter['a']['$in']", "expected a list of values, got 'x'"),
        ({"a": {"$nin": {"b": 1}}}, "filter['a']['$nin']", "a list of values"),
        ({"a": {"$in": [1, {2}]}}, "filter['a']['$in'][1]", "expected a JSON value"),
        ({"$and": []}, "filter['$and']", "a non-empty list of filters, got []"),
        ({"$or": {"a": 1}}, "filter['$or']", "a non-empty list of filters"),
        ({"$or": [{"a": 1}, 2]}, "filter['$or'][1]", "expected a filter, got 2"),
        ({"$not": [{"a": 1}]}, "filter['$not']", "expected a filter"),
        ({"a": {"$not": 3}}, "filter['a']['$not']", "expected a filter, got 3"),
        ({"a": {"$exists": 1}}, "filter['a']['$exists']", "expected True or False, got 1"),
        ({"a": {"$gt": None}}, "filter['a']['$gt']", "a number or a string, got None"),
        ({"a": {"$lt": True}}, "filter['a']['$lt']", "a number or a string, got True"),
        ({"a": {"$lte": [1]}}, "filter['a']['$lte']", "a number or a string, got [1]"),
        ({"a": b"x"}, "filter['a']", "expected a JSON value (dates as ISO strings)"),
        ({1: 2}, "filter", "strings as keys, got 1"),
        ({"a": {"b": {None: 1}}}, "filter['a']['b']", "strings as keys, got None"),
        ({"a": {"$eq": {1: 2}}}, "filter['a']['$eq']", "strings as keys"),
        ({"a": {"$gt": 1, "b": 2}}, "filter['a']", "to combine $gt with the field 'b', put both"),
        ([("a", 1)], "filter", "a dict that maps fields to conditions"),
        (
            {"a": {"$gt": object}},
            "filter['a']['$gt']",
            "expected a JSON value (dates as ISO strings)",
        ),
        ({"a": {"$in": [10**5000] * 10_001}}, "filter['a']['$in'][10000]", "more than 10000"),
    ],
)
def test_invalid_filter_is_refused_with_path_and_expectation(
    filter: Any, expected_path: str, expected_message: str
) -> None:
    """The error names the path to the bad part, the expected and the actual value."""
    with pytest.raises(InvalidFilter) as caught:
        parse_filter(filter)

    assert expected_path == str(caught.value).split(":")[0]
    assert expected_message in str(caught.value)


def test_too_deep_too_long_or_circular_filter_is_refused() -> None:
    """The filter is refused before anything recurses into it."""
    circle: list[Any] = []
    circle += [circle, circle]
    logical: dict[str, Any] = {"a": 1}
    nested: Any = 1
    for _ in range(5000):
        logical, nested = {"$not": logical}, {"b": nested}
    for filter in (logical, {"a": nested}, {"a": {"$in": circle}}, {"a": circle}):
        with pytest.raises(InvalidFilter, match="levels deep"):
            parse_filter(filter)
    with pytest.raises(InvalidFilter, match=r"segments \(field names and list indexes\)"):
        parse_filter({".".join("a" * 65): 1})
    with pytest.raises(InvalidFilter, match="more than 10000 values"):
        parse_filter({"$or": [{"a": 1}] * (MAX_OPERANDS + 1)})


def test_parsed_filter_is_a_copy_with_plain_json_types() -> None:
    """Later changes of the mapping have no effect, and enum members are stored by their values."""

    class Kind(StrEnum):
        NOTE = "note"

    class Rank(IntEnum):
        HIGH = 2

    filter: dict[str, Any] = {"k": Kind.NOTE, "r": {"$in": (Rank.HIGH,)}, "l": {"$eq": [1]}}
    parsed = parse_filter(copy.copy(filter))
    filter["l"]["$eq"].append(2)
    condition = build_filter_condition(
        parse_filter({"k": Kind.NOTE, "r": Rank.HIGH}), JSONLocation("value")
    )

    assert parsed.matches({"k": "note", "r": 2, "l": [1]})
    assert [str, str, str, int] == [type(value) for value in condition.params]


def test_every_operator_occurs_in_match_examples() -> None:
    missing = {name for name in OPERATORS if f"'{name}'" not in repr(MATCHES)}

    assert missing == set()


BIG = 10**400  # larger than the largest float


@pytest.mark.parametrize(
    ("condition", "matching_values"),
    [
        ({"$lt": math.inf}, [-1, 0.5, BIG]),
        ({"$gte": -math.inf}, [-1, 0.5, BIG]),
        ({"$gt": math.inf}, []),
        ({"$lte": math.nan}, []),
        ({"$eq": math.nan}, []),
        ({"$ne": math.nan}, [-1, 0.5, BIG, "x", None, [0.5]]),
        ({"$in": [math.inf, 0.5, math.nan]}, [0.5]),
        ({"$contains": -math.inf}, []),
        (math.inf, []),
        ([math.nan], []),
    ],
)
def test_infinity_and_nan_in_filters_compare_as_documented(
    condition: Any, matching_values: list[Any], evaluate_filter: EvaluateFilter
) -> None:
    """Infinities compare with numbers, and NaN equals nothing, in Python and in SQL."""
    values: list[Any] = [-1, 0.5, BIG, "x", None, [0.5]]
    parsed = parse_filter({"a": condition})

    assert matching_values == [value for value in values if parsed.matches({"a": value})]
    assert all({True} == evaluate_filter(parsed, {"a": value}) for value in matching_values)

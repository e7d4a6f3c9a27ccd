"""Text of users is text: no query, filter, key, label or value is ever syntax."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import ConfigurationError, PerdureError
from perdure.stores import Provenance, SQLiteStore
from tests.store_backends import FEWER, keys

CORPUS = [
    # SQL
    *("' OR '1'='1", "'; DROP TABLE store_items; --", '" OR ""="', "1) OR (1=1", "/* x */", "--"),
    *(
        "x' UNION SELECT value FROM store_items --",
        "?",
        "?1",
        ":key",
        "@key",
        "$key",
        "{condition}",
    ),
    *("{indexed}", "%s", "%(key)s", "\\'", "char(0)", "NULL", "`x`", "[x]", "store_items"),
    # FTS
    *("tea OR coffee", "tea AND NOT coffee", '"tea', 'tea"', "tea*", "te*", "^tea", "text:tea"),
    *("NEAR(tea milk)", "(tea", "tea)", "-tea", "+tea", "tea NOT", "{text}: tea", "* : tea", '""'),
    *("OR", "AND", "NOT", "NEAR", "rowid:1", "tea^2", "~tea", "tea~"),
    # JSON paths
    *(
        "$",
        "$.a",
        "$[0]",
        "$.*",
        "a.b",
        "a[*]",
        '$."a"',
        "a\\.b",
        '"',
        "#",
        "$[#-1]",
        "a['b']",
        ".",
    ),
    *("..", "a..b", "[", "]", "[]", "a[", "*", "@", "a[999999999999]", "a[-1]", "a" * 300),
    # characters
    *("%", "_", "\\", "\n\t", "\u202e", "\ufeff", "\u200b", "🦊", "e\u0301\u0301", "ﷺ", "\x01\x02"),
    *("\ud83e", "nul\x00nul", "ß", "İ", "%00", "\\u0000", "&lt;", "<script>", "../../etc", "~"),
]
STORABLE = [text for text in CORPUS if text not in ("\ud83e", "nul\x00nul")]
PLAIN = ("plain",)


@pytest.fixture
def filled(store: SQLiteStore) -> SQLiteStore:
    """A store with an item that nobody should reach by tricks."""
    store.put(PLAIN, "secret", {"text": "zebra", "a": {"b": 9}})
    return store


@FEWER
def test_as_query(filled: SQLiteStore) -> None:
    """Any text may be asked; it finds nothing that has none of its words. A blank one lists."""
    for text in CORPUS:
        for mode in ("hybrid", "text", "semantic"):
            filled.search(PLAIN, query=text, mode=mode)
        if text.strip():
            assert filled.search(PLAIN, query=text, mode="text") == []
            filled.why_not(PLAIN, "secret", query=text)
        else:
            assert keys(filled.search(PLAIN, query=text, mode="text")) == ["secret"]
            with pytest.raises(ConfigurationError, match="needs a query"):
                filled.why_not(PLAIN, "secret", query=text)


@FEWER
def test_as_key_and_value(filled: SQLiteStore) -> None:
    """Any key and value comes back as it was, and is found by nothing but itself."""
    for number, text in enumerate(STORABLE):
        filled.put(("keys",), text, {"text": text, text: number})

    for number, text in enumerate(STORABLE):
        item = filled.get(("keys",), text)
        assert item is not None
        assert {"text": text, text: number} == item.value
        assert keys(filled.search((), filter={"text": text}, limit=200)) == [text]
        assert [number] == [i.value[text] for i in filled.search((), filter={"text": text})]
    assert keys(filled.search(PLAIN)) == ["secret"]
    assert len(filled.search(("keys",), limit=1000)) == len(STORABLE)


@FEWER
def test_as_namespace(filled: SQLiteStore) -> None:
    """Any label leads to its own namespace."""
    for text in STORABLE:
        filled.put((text, text), "k", {"text": text})

    for text in STORABLE:
        assert [text] == [item.value["text"] for item in filled.search((text,))]
        if text != "*":
            assert [(text, text)] == filled.list_namespaces(prefix=(text,))
            assert [(text, text)] == filled.list_namespaces(suffix=(text,))


@FEWER
def test_as_field_of_a_filter(filled: SQLiteStore) -> None:
    """Any field may be filtered by: it is there, or the filter is refused as one."""
    for number, text in enumerate(STORABLE):
        filled.put(("fields",), f"k{number}", {text: number})

    for number, text in enumerate(STORABLE):
        if text.startswith("$") or text == "a[*]":
            continue  # operators and paths, not names
        found = filled.search(("fields",), filter={text: number}, limit=200)
        assert f"k{number}" in keys(found), text
    for text in CORPUS:
        for filter in (
            {text: 1},
            {"text": {text: 1}},
            {"a": {"b": {text: [1]}}},
            {text: {text: text}},
        ):
            try:
                assert filled.search(PLAIN, filter=filter) == []
            except PerdureError:
                continue


@FEWER
def test_as_operand(filled: SQLiteStore) -> None:
    """Any operand is compared, never run."""
    for text in CORPUS:
        for operator in ("$eq", "$gt", "$lte", "$contains"):
            found = filled.search(PLAIN, filter={"a": {operator: text}})
            assert found == []
        assert filled.search(PLAIN, filter={"text": {"$in": [text]}}) == []
        assert filled.search(PLAIN, provenance={"actor": text}) == []


@FEWER
def test_as_provenance(filled: SQLiteStore) -> None:
    """Any provenance comes back as it was, and is found by itself."""
    for number, text in enumerate(STORABLE):
        provenance = Provenance(text, text, (text,), text, text)
        filled.put(("said",), f"k{number}", {"text": "tea"}, provenance=provenance)

    for number, text in enumerate(STORABLE):
        found = filled.search(("said",), provenance={"actor": text}, limit=200)
        assert [f"k{number}"] == keys(found)
        assert [Provenance(text, text, (text,), text, text)] == [i.provenance for i in found]
    assert len(filled.search(("said",), query="tea", limit=1000)) == len(STORABLE)


def test_as_path_of_an_index(file_store: SQLiteStore) -> None:
    """A path index is made of names joined by dots, anything else is refused."""
    file_store.put(PLAIN, "secret", {"text": "zebra", "a": {"b": 1}})
    refused = 0
    for text in CORPUS:
        try:
            file_store.create_index(text)
        except ConfigurationError:
            refused += 1
    made = file_store.indexes()

    assert sorted(made) == sorted(
        {"NULL", "a.b", "_", "store_items", "OR", "AND", "NOT", "NEAR", "a" * 300}
    )
    assert refused == len(CORPUS) - len(made)
    for path in made:
        assert file_store.search(PLAIN, filter={path: "nothing"}) == []
        assert path in file_store.explain_query(PLAIN, filter={path: "nothing"}).indexes
        file_store.drop_index(path)
    assert file_store.indexes() == []
    assert keys(file_store.search(PLAIN, filter={"a.b": 1})) == ["secret"]


@FEWER
def test_as_path_of_what_is_searched(filled: SQLiteStore) -> None:
    """Any path may be named as what to search by; what it does not reach is not searched."""
    value: Any = {"text": "zebra", "a": {"b": "lion"}, "list": ["cat"]}
    for number, text in enumerate(CORPUS):
        filled.put(("paths",), f"k{number}", value, index=[text])

    assert len(filled.search(("paths",), limit=1000)) == len(CORPUS)
    filled.search(("paths",), query="lion")

"""User text is never interpreted as syntax: queries, filters, keys, labels and values."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import ConfigurationError, PerdureError
from perdure.stores import Provenance, SQLiteStore
from tests.store_backends import ONE_CALL_MODE_PER_BACKEND, list_item_keys

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
def store_with_secret(store: SQLiteStore) -> SQLiteStore:
    """Put an item that no crafted text should reach, and return the store."""
    store.put(PLAIN, "secret", {"text": "zebra", "a": {"b": 9}})
    return store


@ONE_CALL_MODE_PER_BACKEND
def test_hostile_query_finds_nothing(store_with_secret: SQLiteStore) -> None:
    """Any text is a valid query and finds only items with its words.

    A blank query lists all items.
    """
    for text in CORPUS:
        for mode in ("hybrid", "text", "semantic"):
            store_with_secret.search(PLAIN, query=text, mode=mode)
        if text.strip():
            assert store_with_secret.search(PLAIN, query=text, mode="text") == []
            store_with_secret.why_not(PLAIN, "secret", query=text)
        else:
            assert list_item_keys(store_with_secret.search(PLAIN, query=text, mode="text")) == [
                "secret"
            ]
            with pytest.raises(ConfigurationError, match="requires a query"):
                store_with_secret.why_not(PLAIN, "secret", query=text)


@ONE_CALL_MODE_PER_BACKEND
def test_hostile_key_and_value_come_back_unchanged(store_with_secret: SQLiteStore) -> None:
    """Any key and value is returned unchanged, and only a filter for that text finds it."""
    for number, text in enumerate(STORABLE):
        store_with_secret.put(("keys",), text, {"text": text, text: number})

    for number, text in enumerate(STORABLE):
        item = store_with_secret.get(("keys",), text)
        assert item is not None
        assert {"text": text, text: number} == item.value
        assert list_item_keys(store_with_secret.search((), filter={"text": text}, limit=200)) == [
            text
        ]
        assert [number] == [
            i.value[text] for i in store_with_secret.search((), filter={"text": text})
        ]
    assert list_item_keys(store_with_secret.search(PLAIN)) == ["secret"]
    assert len(store_with_secret.search(("keys",), limit=1000)) == len(STORABLE)


@ONE_CALL_MODE_PER_BACKEND
def test_hostile_label_leads_to_its_own_namespace(store_with_secret: SQLiteStore) -> None:
    for text in STORABLE:
        store_with_secret.put((text, text), "k", {"text": text})

    for text in STORABLE:
        assert [text] == [item.value["text"] for item in store_with_secret.search((text,))]
        if text != "*":
            assert [(text, text)] == store_with_secret.list_namespaces(prefix=(text,))
            assert [(text, text)] == store_with_secret.list_namespaces(suffix=(text,))


@ONE_CALL_MODE_PER_BACKEND
def test_hostile_filter_field_matches_only_that_field(store_with_secret: SQLiteStore) -> None:
    """Any text works as a filter field, or the filter is refused with an error."""
    for number, text in enumerate(STORABLE):
        store_with_secret.put(("fields",), f"k{number}", {text: number})

    for number, text in enumerate(STORABLE):
        if text.startswith("$") or text == "a[*]":
            continue  # these texts are operators and paths, not names
        results = store_with_secret.search(("fields",), filter={text: number}, limit=200)
        assert f"k{number}" in list_item_keys(results), text
    for text in CORPUS:
        for filter in (
            {text: 1},
            {"text": {text: 1}},
            {"a": {"b": {text: [1]}}},
            {text: {text: text}},
        ):
            try:
                assert store_with_secret.search(PLAIN, filter=filter) == []
            except PerdureError:
                continue


@ONE_CALL_MODE_PER_BACKEND
def test_hostile_filter_operand_is_only_compared(store_with_secret: SQLiteStore) -> None:
    for text in CORPUS:
        for operator in ("$eq", "$gt", "$lte", "$contains"):
            results = store_with_secret.search(PLAIN, filter={"a": {operator: text}})
            assert results == []
        assert store_with_secret.search(PLAIN, filter={"text": {"$in": [text]}}) == []
        assert store_with_secret.search(PLAIN, provenance={"actor": text}) == []


@ONE_CALL_MODE_PER_BACKEND
def test_hostile_provenance_comes_back_unchanged(store_with_secret: SQLiteStore) -> None:
    """Any provenance is returned unchanged, and a filter for it finds the item."""
    for number, text in enumerate(STORABLE):
        provenance = Provenance(text, text, (text,), text, text)
        store_with_secret.put(("said",), f"k{number}", {"text": "tea"}, provenance=provenance)

    for number, text in enumerate(STORABLE):
        results = store_with_secret.search(("said",), provenance={"actor": text}, limit=200)
        assert [f"k{number}"] == list_item_keys(results)
        assert [Provenance(text, text, (text,), text, text)] == [i.provenance for i in results]
    assert len(store_with_secret.search(("said",), query="tea", limit=1000)) == len(STORABLE)


def test_create_index_refuses_hostile_path(file_store: SQLiteStore) -> None:
    """A path consists of names joined by dots; any other path is refused."""
    file_store.put(PLAIN, "secret", {"text": "zebra", "a": {"b": 1}})
    refused_count = 0
    for text in CORPUS:
        try:
            file_store.create_index(text)
        except ConfigurationError:
            refused_count += 1
    created_paths = file_store.indexes()

    assert sorted(created_paths) == sorted(
        {"NULL", "a.b", "_", "store_items", "OR", "AND", "NOT", "NEAR", "a" * 300}
    )
    assert refused_count == len(CORPUS) - len(created_paths)
    for path in created_paths:
        assert file_store.search(PLAIN, filter={path: "nothing"}) == []
        assert path in file_store.explain_query(PLAIN, filter={path: "nothing"}).indexes
        file_store.drop_index(path)
    assert file_store.indexes() == []
    assert list_item_keys(file_store.search(PLAIN, filter={"a.b": 1})) == ["secret"]


@ONE_CALL_MODE_PER_BACKEND
def test_put_accepts_hostile_index_path(store_with_secret: SQLiteStore) -> None:
    """Any path may be passed as `index` of a put.

    Text that the path does not reach is not indexed.
    """
    value: Any = {"text": "zebra", "a": {"b": "lion"}, "list": ["cat"]}
    for number, text in enumerate(CORPUS):
        store_with_secret.put(("paths",), f"k{number}", value, index=[text])

    assert len(store_with_secret.search(("paths",), limit=1000)) == len(CORPUS)
    store_with_secret.search(("paths",), query="lion")

"""Defaults shared with langgraph's stores: blank queries, puts of None, and listings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from langgraph.store.base import ListNamespacesOp, MatchCondition, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from perdure.errors import VersionConflict
from perdure.stores import SQLiteStore
from tests.store_backends import BACKENDS, list_item_keys

A = ("a",)
BLANKS = [None, "", " ", "   ", "\t\n", "\u00a0", "\u3000"]
NOTES: list[tuple[str, ...]] = [
    ("perdure", kind, "memories", "ann") for kind in ("buried", "changed", "formed", "quarantine")
]
SPACES = [("memories", "ann"), ("memories", "bob"), ("perdure",), ("perdure", "mine"), ("z",)]


@pytest.fixture(params=["file", "sealed", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SQLiteStore]:
    with BACKENDS[request.param](tmp_path) as opened:
        yield opened


def test_search_with_blank_query_lists_items(store: SQLiteStore) -> None:
    """The result has the order, filter and pages of a listing."""
    for number in range(4):
        store.put(A, f"k{number}", {"text": f"tea {number}", "odd": number % 2})

    for query in BLANKS:
        assert list_item_keys(store.search(A, query=query)) == ["k0", "k1", "k2", "k3"], query
        assert list_item_keys(store.search(A, query=query, filter={"odd": 1})) == ["k1", "k3"]
        assert list_item_keys(store.search(A, query=query, limit=2, offset=1)) == ["k1", "k2"]
        [batched] = store.batch([SearchOp(A, query=query)])
        assert list_item_keys(cast(Any, batched)) == ["k0", "k1", "k2", "k3"]
        assert list_item_keys(
            asyncio.run(store.asearch(A, query=query, mode="semantic", limit=1))
        ) == ["k0"]


def test_put_of_none_deletes_item_and_keeps_history(store: SQLiteStore) -> None:
    puts: list[Any] = [
        lambda: store.put(A, "k", None),
        lambda: asyncio.run(store.aput(A, "k", None)),
        lambda: store.batch([PutOp(A, "k", None)]),
        lambda: store.put(A, "k", None, ttl=5, index=["text"]),
        lambda: store.put(A, "k", None, if_version=5),
    ]
    for number, put in enumerate(puts, 1):
        store.put(A, "k", {"text": "tea"})
        put()

        assert store.get(A, "k") is None
        assert store.search(A, query="tea") == []
        assert len(store.history(A, "k")) == number
    store.put(A, "missing", None)


def test_put_of_none_checks_if_version(store: SQLiteStore) -> None:
    store.put(A, "k", {"text": "tea"})

    with pytest.raises(VersionConflict):
        store.put(A, "k", None, if_version=7)
    assert store.get(A, "k") is not None


def test_namespace_listing_omits_notes_unless_prefix_names_them(store: SQLiteStore) -> None:
    """A user's own namespaces that begin with the label perdure are listed."""
    store.batch([PutOp(place, "k", {}) for place in (*SPACES, *NOTES)])
    listings: list[tuple[dict[str, Any], list[tuple[str, ...]]]] = [
        ({}, SPACES),
        ({"prefix": ()}, SPACES),
        ({"limit": 2, "offset": 3}, SPACES[3:]),
        ({"max_depth": 1}, [("memories",), ("perdure",), ("z",)]),
        ({"suffix": ("ann",)}, [("memories", "ann")]),
        ({"prefix": ("*",)}, SPACES),
        ({"prefix": ("*", "buried")}, []),
        ({"prefix": ("perdure",)}, sorted([*SPACES[2:4], *NOTES])),
        ({"prefix": ("perdure", "buried")}, NOTES[:1]),
        ({"prefix": ("perdure", "*"), "suffix": ("ann",)}, NOTES),
        (
            {"prefix": ("perdure",), "max_depth": 2, "limit": 3},
            [*SPACES[2:3], *[n[:2] for n in NOTES[:2]]],
        ),
    ]

    for options, expected in listings:
        assert store.list_namespaces(**options) == expected, options
        assert asyncio.run(store.alist_namespaces(**options)) == expected, options
    assert store.batch([ListNamespacesOp()]) == [SPACES]
    named = ListNamespacesOp((MatchCondition("prefix", ("perdure", "formed")),))
    assert store.batch([named]) == [[NOTES[2]]]


def test_past_and_scoped_namespace_listings_omit_notes(store: SQLiteStore) -> None:
    scope = store.scoped(("tenant",))
    scope.batch([PutOp(place, "k", {}) for place in (SPACES[0], *NOTES)])
    moment = store.get(("tenant", *SPACES[0]), "k").valid_from  # type: ignore[union-attr]
    scope.delete(SPACES[0], "k")

    assert scope.list_namespaces() == []
    assert scope.list_namespaces(as_of=moment) == [SPACES[0]]
    assert scope.list_namespaces(prefix=("perdure",)) == NOTES
    assert store.list_namespaces() == [
        ("tenant", *place) for place in NOTES
    ]  # they are not notes on memories of this store


def test_pages_of_namespace_listing_are_full_despite_many_notes(store: SQLiteStore) -> None:
    """Each page has as many namespaces as requested, although hundreds of notes are left out."""
    users = [f"u{number:04}" for number in range(400)]
    store.batch([PutOp(("memories", user), "k", {}) for user in users])
    store.batch([PutOp(("perdure", "changed", "memories", user), "k", {}) for user in users])
    store.put(("z",), "k", {})
    expected = [*(("memories", user) for user in users), ("z",)]

    pages = [store.list_namespaces(limit=150, offset=offset) for offset in (0, 150, 300, 450)]

    assert [len(page) for page in pages] == [150, 150, 101, 0]
    assert [place for page in pages for place in page] == expected


def test_import_from_other_store_includes_notes(store: SQLiteStore, tmp_path: Path) -> None:
    """Imports from a scope and from langgraph's in-memory store include the namespaces of notes."""
    memory: Any = InMemoryStore()
    with BACKENDS["file"](tmp_path) as other:
        scope = other.scoped(("tenant",))
        for source in (memory, scope):
            for place in (*SPACES, *NOTES):
                source.put(place, "k", {"of": list(place)})

        for source in (memory, scope):
            report = store.import_from(source)
            assert store.list_namespaces(prefix=("perdure",)) == sorted([*SPACES[2:4], *NOTES])
            assert report.items in (len(SPACES) + len(NOTES), 0)

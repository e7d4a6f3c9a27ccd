"""Namespaces: any labels are distinct; prefixes, suffixes and wildcards work as in langgraph."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.base import GetOp, ListNamespacesOp, MatchCondition, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from perdure.errors import InvalidNamespace
from perdure.stores import SQLiteStore
from tests.store_backends import ONE_CALL_MODE_PER_BACKEND, list_item_keys

LABELS = [
    *(
        "a",
        "A",
        "ab",
        "a.b",
        "a b",
        "a%",
        "a_",
        "%",
        "_",
        "*a",
        "..",
        ".",
        "a\x01",
        "a\x7f",
        "\x01",
    ),
    *("é", "e\u0301", "ß", "ss", "İ", "i̇", "I", "聊天", "聊", "🦊", "🦊🦊", "\uffff", "\U0010ffff"),
    *("' OR 1=1 --", '"', "\\", "$.a", "[0]", "a/b", "\n", " ", "langgraph2", "NULL", "0", "00"),
]


def test_similar_labels_are_different_namespaces(store: SQLiteStore) -> None:
    """Every label is its own namespace, and a prefix contains only its own namespaces."""
    store.batch([PutOp((label,), "k", {"label": label, "text": "tea"}) for label in LABELS])
    store.batch(
        [PutOp((label, "under"), "k2", {"label": label, "text": "tea"}) for label in LABELS]
    )

    for label in LABELS:
        item = store.get((label,), "k")
        assert item is not None
        assert label == item.value["label"]
        assert [("k", (label,)), ("k2", (label, "under"))] == [
            (result.key, result.namespace) for result in store.search((label,))
        ]
        assert [(label,), (label, "under")] == store.list_namespaces(prefix=(label,))
        assert {label} == {i.value["label"] for i in store.search((label,), query="tea")}
    assert sorted([(x,) for x in LABELS] + [(x, "under") for x in LABELS]) == (
        store.list_namespaces(limit=1000)
    )


class GraphState(TypedDict, total=False):
    label: str
    found: list[str]


def use_store_in_node(state: GraphState, runtime: Runtime[None]) -> GraphState:
    """Put, get, search and list in a node, with single methods and with a batch."""
    store, namespace = runtime.store, ("users", state["label"])
    assert store is not None
    store.put(namespace, "by put", {"text": "tea"})
    store.batch([PutOp(namespace, "by batch", {"text": "tea"})])
    answers: list[Any] = store.batch(
        [GetOp(namespace, "by put"), SearchOp(namespace), ListNamespacesOp()]
    )
    got, results, spaces = answers
    assert got == store.get(namespace, "by put")
    assert spaces == store.list_namespaces(prefix=namespace) == [namespace]
    return {"found": [item.key for item in [*store.search(namespace, query="tea"), *results]]}


async def ause_store_in_node(state: GraphState, runtime: Runtime[None]) -> GraphState:
    """Do the same as `use_store_in_node` with the async methods."""
    store, namespace = runtime.store, ("users", state["label"])
    assert store is not None
    await store.aput(namespace, "by put", {"text": "tea"})
    await store.abatch([PutOp(namespace, "by batch", {"text": "tea"})])
    answers: list[Any] = await store.abatch(
        [GetOp(namespace, "by put"), SearchOp(namespace), ListNamespacesOp()]
    )
    got, results, spaces = answers
    assert got == await store.aget(namespace, "by put")
    assert spaces == await store.alist_namespaces(prefix=namespace) == [namespace]
    return {
        "found": [item.key for item in [*await store.asearch(namespace, query="tea"), *results]]
    }


@pytest.mark.parametrize("label", ["ann@example.com", "a.b", ".", "*", "%", "a b", "é", "🦊", '"'])
def test_label_that_langgraph_refuses_works_in_a_graph(label: str) -> None:
    """A node can use labels that langgraph's own stores refuse."""
    with SQLiteStore.open(":memory:") as store:
        graph = StateGraph(GraphState).add_node("node", use_store_in_node).add_edge(START, "node")
        blocking = graph.compile(store=store).invoke({"label": label})
    with SQLiteStore.open(":memory:") as store:
        graph = StateGraph(GraphState).add_node("node", ause_store_in_node).add_edge(START, "node")
        awaited = asyncio.run(graph.compile(store=store).ainvoke({"label": label}))

    assert sorted(blocking["found"]) == ["by batch", "by batch", "by put", "by put"]
    assert sorted(awaited["found"]) == ["by batch", "by batch", "by put", "by put"]


def test_search_prefix_matches_whole_labels_only(any_store: SQLiteStore) -> None:
    """A search under "a" finds nothing of "ab"."""
    for namespace in [("a",), ("ab",), ("a", "b"), ("ab", "c"), ("b", "a")]:
        any_store.put(namespace, "k", {"text": "/".join(namespace)})

    assert {("a",), ("a", "b")} == {item.namespace for item in any_store.search(("a",))}
    assert {("a",), ("a", "b")} == {i.namespace for i in any_store.search(("a",), query="a b ab")}
    assert {("ab",), ("ab", "c")} == {item.namespace for item in any_store.search(("ab",))}
    assert any_store.search(("a", "bc")) == []
    assert len(any_store.search(())) == 5


def test_emptied_namespace_is_not_listed(store: SQLiteStore) -> None:
    """A namespace is listed only while it contains an item (langgraph lists it forever)."""
    store.put(("a",), "k", {})
    store.put(("b",), "k", {})
    store.delete(("a",), "k")

    assert store.list_namespaces() == [("b",)]
    store.put(("a",), "k", {})
    assert store.list_namespaces() == [("a",), ("b",)]


def test_wildcard_in_prefix_or_suffix_matches_one_label(any_store: SQLiteStore) -> None:
    spaces = [("u", "1", "x"), ("u", "2", "x"), ("u", "2", "y"), ("u",), ("v", "1", "x", "x")]
    for namespace in spaces:
        any_store.put(namespace, "k", {"text": "t"})

    def list_namespaces(**options: Any) -> list[tuple[str, ...]]:
        return any_store.list_namespaces(**options)

    assert list_namespaces(prefix=("u", "*", "x")) == [("u", "1", "x"), ("u", "2", "x")]
    assert list_namespaces(prefix=("*", "1")) == [("u", "1", "x"), ("v", "1", "x", "x")]
    assert list_namespaces(suffix=("*", "x")) == [
        ("u", "1", "x"),
        ("u", "2", "x"),
        ("v", "1", "x", "x"),
    ]
    assert list_namespaces(prefix=("u",), suffix=("x",)) == [("u", "1", "x"), ("u", "2", "x")]
    assert list_namespaces(prefix=("*",), max_depth=1) == [("u",), ("v",)]
    assert list_namespaces(suffix=("u",)) == [("u",)]
    assert list_namespaces(prefix=("u", "*", "*", "*")) == []


labels = st.sampled_from(["a", "b", "ab", "aa", "a.b", "é", "*b", "\x01"])
paths = st.lists(labels, min_size=1, max_size=4).map(tuple)
conditions = st.builds(
    MatchCondition,
    match_type=st.sampled_from(["prefix", "suffix"]),
    path=st.lists(labels | st.just("*"), min_size=0, max_size=4).map(tuple),
)


@given(
    spaces=st.lists(paths, max_size=30),
    wanted=st.lists(conditions, max_size=3),
    max_depth=st.none() | st.integers(1, 5),
    limit=st.integers(0, 8),
    offset=st.integers(0, 8),
)
def test_namespace_listing_equals_that_of_in_memory_store(
    spaces: list[Any],
    wanted: list[Any],
    max_depth: int | None,
    limit: int,
    offset: int,
) -> None:
    """Any namespaces, conditions, depth and page give the same list in both stores."""
    in_memory = InMemoryStore()
    with SQLiteStore.open(":memory:", index=None) as store:
        for target in (store, in_memory):
            target.batch([PutOp(namespace, "k", {}) for namespace in spaces])
        op = ListNamespacesOp(tuple(wanted) or None, max_depth, limit, offset)

        assert in_memory.batch([op]) == store.batch([op])


def test_pages_of_namespace_listing_contain_each_namespace_once(store: SQLiteStore) -> None:
    """With max_depth, hundreds of namespaces become one entry, and the pages stay correct."""
    spaces = [("u", f"{n:03}", part) for n in range(150) for part in "abcd"]
    store.batch([PutOp(namespace, "k", {}) for namespace in spaces])

    def list_all_pages(size: int, **options: Any) -> list[tuple[str, ...]]:
        out: list[tuple[str, ...]] = []
        while page := store.list_namespaces(limit=size, offset=len(out), **options):
            out += page
        return out

    assert spaces == list_all_pages(97)
    assert sorted({space[:2] for space in spaces}) == list_all_pages(31, max_depth=2)
    assert list_all_pages(7, max_depth=1) == [("u",)]
    assert [space for space in spaces if space[2] == "c"] == list_all_pages(40, suffix=("c",))
    assert [("u", "007", part) for part in "abcd"] == list_all_pages(3, prefix=("*", "007"))


def test_pages_of_namespaces_skip_internal_notes(store: SQLiteStore) -> None:
    """Without a prefix, pages contain no internal notes. With the prefix `perdure`, they do."""
    visible = [("a",), ("perdure",), ("perdure", "bur"), ("perdure", "burieds"), ("zz", "buried")]
    notes: list[tuple[str, ...]] = [
        ("perdure", kind) for kind in ("buried", "changed", "formed", "templates")
    ]
    notes += [("perdure", "quarantine", "memories", "ann")]
    for namespace in [*visible, *notes]:
        store.put(namespace, "k", {"text": "t"})
    store.put(("b",), "k", {"text": "t"})
    store.delete(("b",), "k")

    for limit, offset in product((1, 2, 9), range(8)):
        page: dict[str, Any] = {"limit": limit, "offset": offset}
        assert store.list_namespaces(**page) == visible[offset:][:limit]
        of_perdure = sorted(space for space in [*visible, *notes] if space[0] == "perdure")
        expected = of_perdure[offset:][:limit]
        assert store.list_namespaces(prefix=("perdure",), **page) == expected
    assert store.list_namespaces(prefix=("perdure", "buried")) == [("perdure", "buried")]


def test_pages_of_search_contain_each_item_once(store: SQLiteStore) -> None:
    """The search is repeated with and without a query and a filter."""
    store.batch(
        [
            PutOp((f"n{n % 7}",), f"k{n}", {"text": f"tea {n % 3}", "odd": n % 2, "n": n})
            for n in range(90)
        ]
    )
    all_keys = {f"k{n}" for n in range(90)}

    def search_all_pages(size: int, **options: Any) -> list[str]:
        out: list[str] = []
        while page := store.search((), limit=size, offset=len(out), **options):
            out += list_item_keys(page)
        return out

    for options in ({}, {"query": "tea 1"}, {"query": "tea", "mode": "semantic"}):
        found_keys = search_all_pages(13, **options)
        assert len(all_keys) == len(found_keys)
        assert all_keys == set(found_keys)
    odd = search_all_pages(7, filter={"odd": 1})
    assert {f"k{n}" for n in range(1, 90, 2)} == set(odd)
    assert len(odd) == len(set(odd))
    assert set(odd) == set(search_all_pages(7, filter={"odd": 1}, query="tea"))
    assert search_all_pages(8, filter={"odd": 2}) == []
    assert store.search((), limit=0) == []
    assert store.search((), offset=1000) == []
    assert len(store.search((), limit=10**30)) == 90


INVALID_NAMESPACES: list[Any] = [
    *("", "a", b"a", None, 7, {"a"}, {"a": 1}),
    *(("",), ("a", ""), (None,), (1,), (("a",),), ("a\0b",), ("\ud800",), ("x" * 5000,)),
]


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize(
    "namespace", [*INVALID_NAMESPACES, (), ("langgraph",), ("langgraph", "x")], ids=repr
)
def test_put_and_delete_refuse_invalid_namespace(namespace: Any, store: SQLiteStore) -> None:
    """A put or delete under an invalid namespace is refused, and nothing is written."""
    with pytest.raises(InvalidNamespace):
        store.put(namespace, "k", {})
    with pytest.raises(InvalidNamespace):
        store.delete(namespace, "k")

    assert store.list_namespaces() == []


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize("namespace", INVALID_NAMESPACES, ids=repr)
def test_reads_refuse_invalid_namespace(namespace: Any, store: SQLiteStore) -> None:
    """An invalid namespace is never mistaken for another one."""
    with pytest.raises(InvalidNamespace):
        store.get(namespace, "k")
    with pytest.raises(InvalidNamespace):
        store.search(namespace)
    with pytest.raises(InvalidNamespace):
        store.search(namespace, query="x")
    with pytest.raises(InvalidNamespace):
        store.history(namespace, "k")


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize("condition", [("",), (1,), "a", ("\0",)], ids=repr)
def test_list_namespaces_refuses_invalid_prefix_or_suffix(
    condition: Any, store: SQLiteStore
) -> None:
    for side in ("prefix", "suffix"):
        with pytest.raises(InvalidNamespace):
            store.list_namespaces(**{side: condition})


INVALID_KEYS: list[Any] = [None, "", b"k", True, ("k",), ["k"], {}, 1.5, object(), "\0", "\ud800"]


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize("key", [*INVALID_KEYS, "x" * 5000], ids=lambda key: repr(key)[:20])
def test_every_method_refuses_invalid_key(key: Any, store: SQLiteStore) -> None:
    """A key is invalid if it is not text or cannot be stored."""
    for call in (
        lambda: store.put(("a",), key, {}),
        lambda: store.get(("a",), key),
        lambda: store.delete(("a",), key),
        lambda: store.history(("a",), key),
    ):
        with pytest.raises(InvalidNamespace):
            call()

    assert store.search(()) == []


def test_namespace_sizes_count_namespaces_items_and_bytes(store: SQLiteStore) -> None:
    """Each size covers all namespaces under a prefix."""
    puts = {("a", "x"): 2, ("a", "y"): 1, ("ab",): 1}
    for namespace, count in puts.items():
        for number in range(count):
            store.put(namespace, str(number), {"text": "tea" * count})
    store.put(("gone",), "k", {})
    store.delete(("gone",), "k")

    sizes = store.namespace_sizes([("a",), ("ab",), (), ("gone",)])

    assert [(s.namespace, s.namespaces, s.items) for s in sizes] == [
        (("a",), 2, 3),
        (("ab",), 1, 1),
        ((), 3, 4),
        (("gone",), 0, 0),
    ]
    assert sizes[2].value_bytes == sizes[0].value_bytes + sizes[1].value_bytes > 0
    within = store.scoped(("a",)).namespace_sizes([(), ("x",)])
    assert [(s.namespace, s.items) for s in within] == [((), 3), (("x",), 2)]


def test_usage_lists_largest_namespaces_and_items_by_month(store: SQLiteStore) -> None:
    """The largest namespaces come first. An item counts in the month in which it was created."""
    store.put(("small",), "k", {"text": "tea"})
    store.put(("large",), "k", {"text": "tea" * 100})
    item = store.get(("small",), "k")
    assert item is not None

    usage = store.usage(limit=1)

    assert [size.namespace for size in usage.largest] == [("large",)]
    assert usage.by_month == {f"{item.created_at:%Y-%m}": 2}

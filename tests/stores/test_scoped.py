"""A scope neither shows nor names anything outside it, and behaves like a store within."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.store.base import GetOp, ListNamespacesOp, MatchCondition, Op, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from perdure.errors import InvalidNamespace, LimitExceeded, VersionConflict
from perdure.stores import ScopedStore, SQLiteStore
from tests.rounds import rounds
from tests.store_backends import BACKENDS, ONE_CALL_MODE_PER_BACKEND, Clock, make_options

LABELS = ["a", "ab", "b", "*", ".", "a.b", "%", "_", "A", "é", "e\u0301", "ab\U0001f600", "\uffff"]
labels = st.sampled_from(LABELS)
spaces = st.lists(labels, min_size=1, max_size=3).map(tuple)
roots = st.lists(labels, min_size=1, max_size=2).map(tuple)
Space = tuple[str, ...]
MODES: list[Any] = ["hybrid", "text", "semantic"]


@contextmanager
def open_memory_store(**options: Any) -> Iterator[SQLiteStore]:
    with SQLiteStore.open(":memory:", **make_options(index=None, **options)) as store:
        yield store


def put_item_in_each_namespace(store: Any, namespaces: list[Space]) -> None:
    """Put in each namespace an item that contains the namespace."""
    store.batch([PutOp(space, "k", {"text": "tea", "space": list(space)}) for space in namespaces])


def visible_namespaces(scope: ScopedStore, namespaces: list[Space], root: Space) -> set[Space]:
    """Return the full namespaces of all items that any read method of the scope returns."""
    names = {tuple(namespaces[0]), *namespaces, (), root}
    names |= {space[len(root) :] for space in namespaces}
    items: list[Any] = [*scope.search((), limit=999), *scope.search((), query="tea", limit=999)]
    items += [item for name in names for item in scope.search(name, filter={"text": "tea"})]
    items += [item for name in names for item in [scope.get(name, "k")] if item]
    items += [item for name in names for item in scope.history(name, "k")]
    items += [item for name in names for item in scope.batch([GetOp(name, "k")]) if item]
    for item in items:
        assert (*root, *item.namespace) == tuple(item.value["space"])
    for name in names:
        explanation = scope.why_not(name, "k", query="tea")
        assert (explanation.rank is not None) is ((*root, *name) in namespaces)
    return {tuple(item.value["space"]) for item in items} | {
        (*root, *space) for space in scope.list_namespaces(limit=999)
    }


@settings(max_examples=rounds(40), deadline=None)
@given(namespaces=st.lists(spaces, min_size=1, max_size=12, unique=True), root=roots)
def test_scope_reads_nothing_outside_its_prefix(namespaces: list[Space], root: Space) -> None:
    """No method of a scope returns anything outside its prefix, whatever the labels are."""
    with open_memory_store() as store:
        put_item_in_each_namespace(store, namespaces)
        scope = store.scoped(root)
        nested = store.scoped(root[:1]).scoped(root[1:]) if len(root) > 1 else scope.scoped(())
        expected = {space for space in namespaces if space[: len(root)] == root}

        assert expected == visible_namespaces(scope, namespaces, root)
        assert expected == visible_namespaces(nested, namespaces, root)


@settings(max_examples=rounds(40), deadline=None)
@given(namespaces=st.lists(spaces, min_size=1, max_size=8, unique=True), root=roots)
def test_scope_writes_nothing_outside_its_prefix(namespaces: list[Space], root: Space) -> None:
    """Puts, deletes, batches and `forget` leave everything else unchanged."""
    with open_memory_store() as store:
        put_item_in_each_namespace(store, namespaces)
        scope = store.scoped(root)
        outside = [space for space in namespaces if space[: len(root)] != root]

        def export_outside() -> list[Any]:
            return [line for line in store.export() if line["namespace"][: len(root)] != list(root)]

        before = export_outside()
        for space in namespaces:
            scope.put(space, "k", {"text": "mine"})
            scope.batch([PutOp(space, "j", {"n": 1}), PutOp(space, "k", None)])
            scope.delete(space, "k")
        fresh = set(store.list_namespaces(limit=999))
        scope.forget(())

        assert before == export_outside()
        assert fresh >= {(*root, *space) for space in namespaces}
        assert sorted(outside) == sorted(
            space for space in store.list_namespaces(limit=999) if space in namespaces
        )
        assert scope.list_namespaces() == []


conditions = st.none() | st.lists(labels, min_size=1, max_size=2).map(tuple)


@settings(max_examples=rounds(80), deadline=None)
@given(
    namespaces=st.lists(spaces, min_size=1, max_size=12, unique=True),
    root=roots,
    prefix=conditions,
    suffix=conditions,
    max_depth=st.none() | st.integers(1, 3),
    page=st.sampled_from([(100, 0), (2, 0), (2, 1), (1, 3)]),
)
def test_scoped_namespace_listing_equals_that_of_separate_store(
    namespaces: list[Space],
    root: Space,
    prefix: Space | None,
    suffix: Space | None,
    max_depth: int | None,
    page: tuple[int, int],
) -> None:
    """The separate store contains only the items of the scope."""
    alone = InMemoryStore()
    with open_memory_store() as store:
        for space in namespaces:
            store.put((*root, *space), "k", {"text": "tea"})
            alone.batch([PutOp(space, "k", {"text": "tea"})])
        put_item_in_each_namespace(
            store, [(*root[:-1], root[-1] + "x", *space) for space in namespaces]
        )
        put_item_in_each_namespace(store, [("zz", *space) for space in namespaces])
        given_conditions: list[tuple[Any, Any]] = [("prefix", prefix), ("suffix", suffix)]
        match_conditions = tuple(
            MatchCondition(kind, path) for kind, path in given_conditions if path
        )
        ops: list[Op] = [ListNamespacesOp(match_conditions, max_depth, *page)]

        assert alone.batch(ops) == store.scoped(root).batch(ops)


@ONE_CALL_MODE_PER_BACKEND
def test_scope_methods_behave_like_those_of_a_store(store: SQLiteStore, clock: Clock) -> None:
    """Each method returns what a store with only the scope's items would return."""
    for root in (("*",), ("u", "alice")):
        scope = store.scoped(root)
        scope.put((), "top", {"text": "at the root"})
        scope.put(("m",), "k", {"text": "my car", "n": 1}, ttl=5, if_version=0)
        past = clock.at()
        clock.forward()
        scope.put(("m",), "k", {"text": "my boat", "n": 2}, if_version=1)
        scope.put(("m", "deep"), "j", {"text": "tea"})
        clock.forward()
        store.put((*root[:-1], "other"), "k", {"text": "automobile boat", "n": 2})
        histories = scope.history(("m",), "k"), store.history((*root, "m"), "k")
        past_item = scope.get(("m",), "k", as_of=past)

        assert scope.list_namespaces() == [(), ("m",), ("m", "deep")]
        assert scope.list_namespaces(max_depth=1) == [(), ("m",)]
        assert scope.list_namespaces(as_of=past) == [(), ("m",)]
        assert scope.list_namespaces(prefix=("*",)) == [("m",), ("m", "deep")]
        assert past_item is not None
        assert (past_item.value, past_item.namespace) == ({"text": "my car", "n": 1}, ("m",))
        for mine, whole in zip(*histories, strict=True):
            assert ((*root, *mine.namespace), mine.value) == (whole.namespace, whole.value)
        for mode, filter in product(MODES, (None, {"n": 2})):
            results = scope.search((), query="boat", mode=mode, filter=filter)
            assert (results[0].namespace, results[0].key) == (("m",), "k")
            assert {(), ("m",), ("m", "deep")} >= {item.namespace for item in results}
        listed: Any = scope.batch([ListNamespacesOp(), SearchOp((), query="tea")])
        assert (listed[0], listed[1][0].namespace) == ([(), ("m",), ("m", "deep")], ("m", "deep"))
        assert scope.pending_embeddings() == []
        assert scope.embed_pending() == 0


def test_pending_embeddings_of_scope_are_its_own(tmp_path: Path) -> None:
    """A scope lists and embeds only its own pending items, with namespaces relative to it."""
    options = make_options()
    with BACKENDS["file"](tmp_path, **options) as store:
        options["index"]["embed"].failing = True
        for root in ("a", "ab", "*"):
            store.put((root, "m"), root, {"text": "tea"})
        scope = store.scoped(("a",))
        waiting = [(item.namespace, item.key) for item in scope.pending_embeddings()]
        options["index"]["embed"].failing = False
        done = scope.embed_pending()
        remaining = {item.namespace for item in store.pending_embeddings()}

    assert waiting == [(("m",), "a")]
    assert (1, {("ab", "m"), ("*", "m")}) == (done, remaining)


def test_scoped_refuses_invalid_prefix(file_store: SQLiteStore) -> None:
    """A put under langgraph's reserved root label is refused through a scope, too."""
    for prefix in ((), "alice", None, 5, ("",), ("a", 1), ("a\0b",), ("\ud800",)):
        with pytest.raises(InvalidNamespace):
            file_store.scoped(prefix)  # type: ignore[arg-type]  # what is tested
    for prefix in ("m", None, ("",), ("\ud800",)):
        with pytest.raises(InvalidNamespace):
            file_store.scoped(("a",)).scoped(prefix)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(InvalidNamespace, match="langgraph"):
        file_store.scoped(("langgraph",)).put((), "k", {})
    file_store.scoped(("a",)).put(("langgraph",), "k", {"text": "tea"})

    assert file_store.list_namespaces() == [("a", "langgraph")]


@ONE_CALL_MODE_PER_BACKEND
def test_scope_errors_do_not_reveal_prefix_or_other_items(store: SQLiteStore) -> None:
    """An error names namespaces relative to the scope."""
    store.scoped(("secret", "other")).put((), "k", {"text": "theirs"})
    outer = store.scoped(("secret",), max_items=3)
    scope = outer.scoped(("tenant",), max_bytes=50)
    scope.put(("m",), "k", {"n": 1})
    messages = []
    for namespace, key, size, if_version in (
        (("m",), "k", 1, 7),
        ((), "k", 1, 7),
        (("m",), "large", 90, None),
    ):
        with pytest.raises((VersionConflict, LimitExceeded)) as caught:
            scope.put(namespace, key, {"t": "x" * size}, if_version=if_version)
        messages.append(str(caught.value))
    scope.put((), "third", {})
    with pytest.raises(LimitExceeded) as caught:
        scope.batch([PutOp((), "fourth", {})])
    messages.append(str(caught.value))

    assert not [text for text in messages if "secret" in text or "tenant" in text]
    assert messages[0].startswith("the item 'k' in ('m',) is at version 1")
    assert messages[1].startswith("the item 'k' in () does not exist")
    assert "the scope would contain 2 items" in messages[2]
    assert re.search(r"\d", messages[3]) is None  # the size of other scopes is not revealed


def test_scope_has_no_methods_of_the_whole_file() -> None:
    whole_file_methods = {
        "stats",
        "retain",
        "export",
        "import_lines",
        "import_from",
        "reembed",
        "close",
    }
    whole_file_methods |= {
        "create_index",
        "drop_index",
        "indexes",
        "explain_query",
        "sweep_ttl",
        "model",
    }

    assert set() == {name for name in whole_file_methods if hasattr(ScopedStore, name)}

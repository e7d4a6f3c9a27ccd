"""Limits of a scope: never passed, whoever writes at once, and never in the way of deleting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.store.base import PutOp

from perdure.errors import ConfigurationError, LimitExceeded
from perdure.stores import ScopedStore, SQLiteStore
from tests.rounds import rounds
from tests.store_backends import FEWER, Clock, keys, of_words

A = ("a",)
M = ("m",)


def sized(size: int) -> dict[str, Any]:
    """A value whose JSON takes so many bytes, at least 9."""
    return {"t": "x" * (size - 8)}


def held(store: Any, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    return {item.key: item.value for item in store.search(prefix, limit=999, refresh_ttl=False)}


def refused(scope: ScopedStore, key: str, value: dict[str, Any]) -> None:
    """A put that passes a limit changes nothing, not even by a version."""
    before, history = held(scope), len(scope.history(M, key))
    with pytest.raises(LimitExceeded):
        scope.put(M, key, value)
    assert (before, history) == (held(scope), len(scope.history(M, key)))


@FEWER
def test_items(store: SQLiteStore) -> None:
    """As many items as allowed; replacing and deleting go on, and make room."""
    scope = store.scoped(A, max_items=2)
    scope.put(M, "k0", sized(10))
    scope.put((), "k1", sized(10))
    refused(scope, "k2", sized(10))
    scope.put(M, "k0", sized(500))
    scope.delete((), "k1")
    scope.put(M, "k2", sized(10))
    refused(scope, "k1", sized(10))
    store.put(("ab",), "other", sized(10))
    store.put(A, "past the scope", sized(10))
    scope.delete(M, "k2")
    scope.delete(M, "never there")

    assert {"k0", "past the scope"} == set(held(scope))
    with pytest.raises(LimitExceeded, match=r"the scope would contain 3 items .* 2 items"):
        scope.put(M, "k4", {})


@FEWER
def test_bytes(store: SQLiteStore) -> None:
    """The JSON of the present versions counts, in UTF-8; what is replaced counts no more."""
    scope = store.scoped(A, max_bytes=100)
    scope.put(M, "k0", sized(60))
    scope.put(M, "k1", sized(40))
    refused(scope, "k2", {})
    refused(scope, "k1", sized(41))
    scope.put(M, "k1", sized(30))
    scope.put(M, "k0", sized(70))
    refused(scope, "k1", {"t": "é" * 12})
    scope.put(M, "k1", {"t": "é" * 11})
    scope.delete(M, "k0")
    scope.put(M, "k2", sized(70))

    assert {"k1": {"t": "é" * 11}, "k2": sized(70)} == held(scope)


def test_over_a_limit(file_store: SQLiteStore) -> None:
    """Who holds too much already may delete, and replace by what is no larger, but not grow."""
    whole = file_store.scoped(A)
    for n in range(4):
        whole.put(M, f"k{n}", sized(50))
    for scope in (file_store.scoped(A, max_items=2), file_store.scoped(A, max_bytes=100)):
        refused(scope, "new", {})
        scope.put(M, "k0", sized(50))
        scope.put(M, "k0", sized(49))
        scope.batch([PutOp(M, "k1", None), PutOp(M, "swapped", sized(50))])
        scope.batch([PutOp(M, "swapped", None), PutOp(M, "k1", sized(50))])
        scope.delete(M, "k3")
        whole.put(M, "k3", sized(50))
        whole.put(M, "k0", sized(50))
    for limits in ({"max_items": 0}, {"max_bytes": 0}, {"max_items": 0, "max_bytes": 0}):
        none = file_store.scoped(A, **limits)
        refused(none, "new", {})
        none.put(M, "k0", sized(20))
        whole.put(M, "k0", sized(50))

    assert [f"k{n}" for n in range(4)] == sorted(held(whole))


@FEWER
def test_expired_items_make_room(store: SQLiteStore, clock: Clock) -> None:
    """What has expired counts no more, swept or not."""
    scope = store.scoped(A, max_items=2, max_bytes=200)
    scope.put(M, "mortal", sized(150), ttl=1)
    scope.put(M, "stays", sized(50))
    refused(scope, "new", sized(50))
    clock.forward(61)
    scope.put(M, "new", sized(150))
    refused(scope, "third", {})
    scope.put(M, "new", sized(100))
    store.sweep_ttl()
    refused(scope, "third", {})

    assert {"new", "stays"} == set(held(scope))


@pytest.mark.parametrize("limit", [{"max_items": 2}, {"max_bytes": 25}], ids=str)
def test_a_key_that_expired_counts_anew(
    limit: dict[str, int], file_store: SQLiteStore, clock: Clock
) -> None:
    """Its room may have been given to another."""
    scope = file_store.scoped(A, **limit)
    scope.put(M, "k0", sized(10), ttl=1)
    scope.put(M, "k1", sized(10))
    clock.forward(61)
    scope.put(M, "k2", sized(10))

    refused(scope, "k0", sized(10))
    assert held(scope).keys() == {"k1", "k2"}


def test_nested_scopes(file_store: SQLiteStore) -> None:
    """The limits of every scope around hold, each over all that is under it."""
    outer = file_store.scoped(A, max_items=3, max_bytes=300)
    inner, other = outer.scoped(("i",), max_items=2), outer.scoped(("o",), max_bytes=100)
    inner.put(M, "k0", sized(20))
    inner.put(M, "k1", sized(20))
    refused(inner, "k2", sized(20))
    refused(other, "big", sized(101))
    other.put(M, "k0", sized(100))
    refused(other, "k1", sized(20))
    refused(outer, "k9", sized(20))
    inner.put(M, "k1", sized(180))
    refused(inner, "k1", sized(181))
    outer.delete(("i", "m"), "k0")
    outer.put(M, "k9", sized(20))

    assert {"k0", "k1", "k9"} == set(held(outer))


def test_a_batch_that_passes_a_limit(file_store: SQLiteStore) -> None:
    """It is refused whole, the deletes and the puts that would fit too."""
    scope = file_store.scoped(A, max_items=2)
    scope.put(M, "k0", {"n": 0})
    scope.batch([PutOp(M, "k0", None), PutOp(M, "k1", {"n": 1}), PutOp(M, "k2", {"n": 2})])
    before = held(scope)
    with pytest.raises(LimitExceeded):
        scope.batch([PutOp(M, "k1", None), PutOp(M, "k3", {}), PutOp(M, "k4", {})])

    assert {"k1": {"n": 1}, "k2": {"n": 2}} == before == held(scope)


@pytest.mark.parametrize("kind", ["items", "bytes", "nested"])
@pytest.mark.parametrize("backend", ["memory", "file"])
def test_writers_at_once(kind: str, backend: str, tmp_path: Any) -> None:
    """Of twenty at once as many succeed as fit, and a refusal fails none of the others."""
    path = ":memory:" if backend == "memory" else tmp_path / "x.db"
    with SQLiteStore.open(path, **of_words()) as store:

        def scope() -> ScopedStore:
            if kind == "nested":
                return store.scoped(A, max_items=5).scoped(M, max_items=9)
            limits = {"items": {"max_items": 5}, "bytes": {"max_bytes": 259}}[kind]
            return store.scoped((*A, *M), **limits)

        shared = scope()

        async def run() -> list[Any]:
            calls: list[Awaitable[None]] = []
            for n in range(20):
                one = shared if n % 2 else scope()
                calls.append(one.aput((), f"k{n}", sized(50)))
                calls.append(store.aput(("free",), f"k{n}", sized(50)))
            return await asyncio.gather(*calls, return_exceptions=True)

        results = asyncio.run(run())
        mine, free = held(store, A), held(store, ("free",))

    assert results[1::2] == [None] * 20
    assert 5 == results[0::2].count(None) == len(mine)
    assert {LimitExceeded} == {type(result) for result in results[0::2] if result is not None}
    assert {f"k{n}" for n in range(20)} == set(free)
    assert {f"k{n}" for n, result in enumerate(results[0::2]) if result is None} == set(mine)


@pytest.mark.parametrize("limit", [-1, 1.5, "5", True, float("nan")])
@pytest.mark.parametrize("name", ["max_items", "max_bytes"])
def test_no_limit(file_store: SQLiteStore, name: str, limit: Any) -> None:
    """A limit is a whole number, zero or more."""
    for store in (file_store, file_store.scoped(A)):
        with pytest.raises(ConfigurationError, match=name):
            store.scoped(M, **{name: limit})


steps = st.lists(
    st.tuples(st.sampled_from(["k0", "k1", "k2", "k3"]), st.none() | st.integers(9, 60)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=rounds(40), deadline=None)
@given(steps, st.none() | st.integers(0, 3), st.none() | st.integers(0, 120))
def test_any_course(
    course: list[tuple[str, int | None]], max_items: int | None, max_bytes: int | None
) -> None:
    """A put is refused exactly when more items or bytes are held after it than are allowed."""
    sizes: dict[str, int] = {}
    with SQLiteStore.open(":memory:", index=None) as store:
        scope = store.scoped(A, max_items=max_items, max_bytes=max_bytes)
        for key, size in course:
            after = {k: s for k, s in {**sizes, key: size}.items() if s is not None}
            fits = (max_items is None or len(after) <= max_items) and (
                max_bytes is None or sum(after.values()) <= max_bytes
            )
            grows = len(after) > len(sizes) or sum(after.values()) > sum(sizes.values())
            try:
                if size is None:
                    scope.delete(M, key)
                else:
                    scope.put(M, key, sized(size))
            except LimitExceeded:
                assert grows
                assert not fits
                continue
            assert fits or not grows
            sizes = after

        assert sorted(sizes) == sorted(keys(scope.search((), limit=99)))

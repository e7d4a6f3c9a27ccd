"""Limits of a scope are never exceeded by concurrent writes and never prevent a deletion."""

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
from tests.store_backends import ONE_CALL_MODE_PER_BACKEND, Clock, list_item_keys, make_options

A = ("a",)
M = ("m",)


def value_of_size(size: int) -> dict[str, Any]:
    """Return a value whose JSON has `size` bytes, at least 9."""
    return {"t": "x" * (size - 8)}


def read_values(store: Any, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    return {item.key: item.value for item in store.search(prefix, limit=999, refresh_ttl=False)}


def check_put_is_refused(scope: ScopedStore, key: str, value: dict[str, Any]) -> None:
    """Check that a put over a limit raises and changes neither values nor history."""
    before, history = read_values(scope), len(scope.history(M, key))
    with pytest.raises(LimitExceeded):
        scope.put(M, key, value)
    assert (before, history) == (read_values(scope), len(scope.history(M, key)))


@ONE_CALL_MODE_PER_BACKEND
def test_scope_refuses_put_over_max_items(store: SQLiteStore) -> None:
    """Replacing and deleting still work, and a deletion makes room."""
    scope = store.scoped(A, max_items=2)
    scope.put(M, "k0", value_of_size(10))
    scope.put((), "k1", value_of_size(10))
    check_put_is_refused(scope, "k2", value_of_size(10))
    scope.put(M, "k0", value_of_size(500))
    scope.delete((), "k1")
    scope.put(M, "k2", value_of_size(10))
    check_put_is_refused(scope, "k1", value_of_size(10))
    store.put(("ab",), "other", value_of_size(10))
    store.put(A, "past the scope", value_of_size(10))
    scope.delete(M, "k2")
    scope.delete(M, "never there")

    assert {"k0", "past the scope"} == set(read_values(scope))
    with pytest.raises(LimitExceeded, match=r"the scope would contain 3 items .* 2 items"):
        scope.put(M, "k4", {})


@ONE_CALL_MODE_PER_BACKEND
def test_scope_refuses_put_over_max_bytes(store: SQLiteStore) -> None:
    """The UTF-8 JSON of present versions counts; replaced versions do not count."""
    scope = store.scoped(A, max_bytes=100)
    scope.put(M, "k0", value_of_size(60))
    scope.put(M, "k1", value_of_size(40))
    check_put_is_refused(scope, "k2", {})
    check_put_is_refused(scope, "k1", value_of_size(41))
    scope.put(M, "k1", value_of_size(30))
    scope.put(M, "k0", value_of_size(70))
    check_put_is_refused(scope, "k1", {"t": "é" * 12})
    scope.put(M, "k1", {"t": "é" * 11})
    scope.delete(M, "k0")
    scope.put(M, "k2", value_of_size(70))

    assert {"k1": {"t": "é" * 11}, "k2": value_of_size(70)} == read_values(scope)


def test_scope_over_its_limit_allows_deletes_and_smaller_values(file_store: SQLiteStore) -> None:
    """A scope that already exceeds its limit must not grow."""
    whole = file_store.scoped(A)
    for n in range(4):
        whole.put(M, f"k{n}", value_of_size(50))
    for scope in (file_store.scoped(A, max_items=2), file_store.scoped(A, max_bytes=100)):
        check_put_is_refused(scope, "new", {})
        scope.put(M, "k0", value_of_size(50))
        scope.put(M, "k0", value_of_size(49))
        scope.batch([PutOp(M, "k1", None), PutOp(M, "swapped", value_of_size(50))])
        scope.batch([PutOp(M, "swapped", None), PutOp(M, "k1", value_of_size(50))])
        scope.delete(M, "k3")
        whole.put(M, "k3", value_of_size(50))
        whole.put(M, "k0", value_of_size(50))
    for limits in ({"max_items": 0}, {"max_bytes": 0}, {"max_items": 0, "max_bytes": 0}):
        none = file_store.scoped(A, **limits)
        check_put_is_refused(none, "new", {})
        none.put(M, "k0", value_of_size(20))
        whole.put(M, "k0", value_of_size(50))

    assert [f"k{n}" for n in range(4)] == sorted(read_values(whole))


@ONE_CALL_MODE_PER_BACKEND
def test_expired_items_do_not_count_towards_limits(store: SQLiteStore, clock: Clock) -> None:
    """An expired item makes room before and after a sweep."""
    scope = store.scoped(A, max_items=2, max_bytes=200)
    scope.put(M, "mortal", value_of_size(150), ttl=1)
    scope.put(M, "stays", value_of_size(50))
    check_put_is_refused(scope, "new", value_of_size(50))
    clock.forward(61)
    scope.put(M, "new", value_of_size(150))
    check_put_is_refused(scope, "third", {})
    scope.put(M, "new", value_of_size(100))
    store.sweep_ttl()
    check_put_is_refused(scope, "third", {})

    assert {"new", "stays"} == set(read_values(scope))


@pytest.mark.parametrize("limit", [{"max_items": 2}, {"max_bytes": 25}], ids=str)
def test_put_of_expired_key_counts_as_new_item(
    limit: dict[str, int], file_store: SQLiteStore, clock: Clock
) -> None:
    """The room of the expired item may have been used by another one."""
    scope = file_store.scoped(A, **limit)
    scope.put(M, "k0", value_of_size(10), ttl=1)
    scope.put(M, "k1", value_of_size(10))
    clock.forward(61)
    scope.put(M, "k2", value_of_size(10))

    check_put_is_refused(scope, "k0", value_of_size(10))
    assert read_values(scope).keys() == {"k1", "k2"}


def test_limits_of_all_enclosing_scopes_apply(file_store: SQLiteStore) -> None:
    """Each limit covers everything under its scope."""
    outer = file_store.scoped(A, max_items=3, max_bytes=300)
    inner, other = outer.scoped(("i",), max_items=2), outer.scoped(("o",), max_bytes=100)
    inner.put(M, "k0", value_of_size(20))
    inner.put(M, "k1", value_of_size(20))
    check_put_is_refused(inner, "k2", value_of_size(20))
    check_put_is_refused(other, "big", value_of_size(101))
    other.put(M, "k0", value_of_size(100))
    check_put_is_refused(other, "k1", value_of_size(20))
    check_put_is_refused(outer, "k9", value_of_size(20))
    inner.put(M, "k1", value_of_size(180))
    check_put_is_refused(inner, "k1", value_of_size(181))
    outer.delete(("i", "m"), "k0")
    outer.put(M, "k9", value_of_size(20))

    assert {"k0", "k1", "k9"} == set(read_values(outer))


def test_batch_over_a_limit_is_refused_as_a_whole(file_store: SQLiteStore) -> None:
    """Deletes and puts of the batch that would fit are refused as well."""
    scope = file_store.scoped(A, max_items=2)
    scope.put(M, "k0", {"n": 0})
    scope.batch([PutOp(M, "k0", None), PutOp(M, "k1", {"n": 1}), PutOp(M, "k2", {"n": 2})])
    before = read_values(scope)
    with pytest.raises(LimitExceeded):
        scope.batch([PutOp(M, "k1", None), PutOp(M, "k3", {}), PutOp(M, "k4", {})])

    assert {"k1": {"n": 1}, "k2": {"n": 2}} == before == read_values(scope)


@pytest.mark.parametrize("kind", ["items", "bytes", "nested"])
@pytest.mark.parametrize("backend", ["memory", "file"])
def test_concurrent_puts_succeed_up_to_the_limit(kind: str, backend: str, tmp_path: Any) -> None:
    """Of twenty puts as many succeed as fit, and a refusal does not affect other puts."""
    path = ":memory:" if backend == "memory" else tmp_path / "x.db"
    with SQLiteStore.open(path, **make_options()) as store:

        def make_scope() -> ScopedStore:
            if kind == "nested":
                return store.scoped(A, max_items=5).scoped(M, max_items=9)
            limits = {"items": {"max_items": 5}, "bytes": {"max_bytes": 259}}[kind]
            return store.scoped((*A, *M), **limits)

        shared = make_scope()

        async def put_concurrently() -> list[Any]:
            calls: list[Awaitable[None]] = []
            for n in range(20):
                one = shared if n % 2 else make_scope()
                calls.append(one.aput((), f"k{n}", value_of_size(50)))
                calls.append(store.aput(("free",), f"k{n}", value_of_size(50)))
            return await asyncio.gather(*calls, return_exceptions=True)

        results = asyncio.run(put_concurrently())
        mine, free = read_values(store, A), read_values(store, ("free",))

    assert results[1::2] == [None] * 20
    assert 5 == results[0::2].count(None) == len(mine)
    assert {LimitExceeded} == {type(result) for result in results[0::2] if result is not None}
    assert {f"k{n}" for n in range(20)} == set(free)
    assert {f"k{n}" for n, result in enumerate(results[0::2]) if result is None} == set(mine)


@pytest.mark.parametrize("limit", [-1, 1.5, "5", True, float("nan")])
@pytest.mark.parametrize("name", ["max_items", "max_bytes"])
def test_scoped_refuses_invalid_limit(file_store: SQLiteStore, name: str, limit: Any) -> None:
    """A limit must be an integer, zero or more."""
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
def test_random_puts_are_refused_exactly_when_over_a_limit(
    operations: list[tuple[str, int | None]], max_items: int | None, max_bytes: int | None
) -> None:
    """A put or delete is refused if and only if it would leave more items or bytes than allowed."""
    sizes: dict[str, int] = {}
    with SQLiteStore.open(":memory:", index=None) as store:
        scope = store.scoped(A, max_items=max_items, max_bytes=max_bytes)
        for key, size in operations:
            after = {k: s for k, s in {**sizes, key: size}.items() if s is not None}
            fits = (max_items is None or len(after) <= max_items) and (
                max_bytes is None or sum(after.values()) <= max_bytes
            )
            grows = len(after) > len(sizes) or sum(after.values()) > sum(sizes.values())
            try:
                if size is None:
                    scope.delete(M, key)
                else:
                    scope.put(M, key, value_of_size(size))
            except LimitExceeded:
                assert grows
                assert not fits
                continue
            assert fits or not grows
            sizes = after

        assert sorted(sizes) == sorted(list_item_keys(scope.search((), limit=99)))

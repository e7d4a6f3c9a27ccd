"""Items with a time to live: never returned after expiry, swept, and refreshed by reads."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import GetOp, PutOp, SearchOp

from perdure.errors import ConfigurationError
from perdure.stores import SQLiteStore
from tests.store_backends import (
    BACKENDS,
    CALL_MODES,
    ONE_CALL_MODE_PER_BACKEND,
    AwaitedStore,
    Clock,
    list_item_keys,
    with_call_mode,
)

A = ("a",)
MINUTE = 60.0


def list_successful_reads(store: SQLiteStore, clock: Clock, key: str) -> set[str]:
    """Return the names of the read methods that still return an item."""
    results: dict[str, Any] = {
        "get": store.get(A, key, refresh_ttl=False),
        "as_of": store.get(A, key, as_of=clock.at()),
        "search": store.search(A, refresh_ttl=False),
        "filtered": store.search(A, filter={"text": {"$exists": True}}, refresh_ttl=False),
        "query": store.search(A, query="tea", refresh_ttl=False),
        "semantic": store.search(A, query="tea", mode="semantic", refresh_ttl=False),
        "search as_of": store.search(A, as_of=clock.at()),
        "query as_of": store.search(A, query="tea", as_of=clock.at()),
        "list": store.list_namespaces(),
        "list as_of": store.list_namespaces(as_of=clock.at()),
        "batch": [result for result in store.batch([GetOp(A, key, False)]) if result],
        "batch search": store.batch([SearchOp(A, refresh_ttl=False)])[0],
    }
    return {name for name, result in results.items() if result}


def test_expired_item_is_not_returned_by_any_read(store: SQLiteStore, clock: Clock) -> None:
    """Every read returns the item before it expires; none does afterwards, swept or not."""
    store.put(A, "k", {"text": "tea"}, ttl=1)
    clock.forward(MINUTE - 0.001)
    before = list_successful_reads(store, clock, "k")
    clock.forward(0.001)
    after = list_successful_reads(store, clock, "k")
    swept = store.sweep_ttl()

    assert len(before) == 12
    assert after == set()
    assert swept == 1
    assert list_successful_reads(store, clock, "k") == set()
    assert store.sweep_ttl() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ttl", [None, {}, {"default_ttl": 1}, {"refresh_on_read": True}], ids=str)
def test_get_and_search_refresh_ttl_by_default(
    backend: str, ttl: Any, tmp_path: Path, clock: Clock
) -> None:
    """langgraph's stores have the same default.

    A read with `refresh_ttl=False` does not refresh.
    """
    with BACKENDS[backend](tmp_path, clock=clock, ttl=ttl) as store:
        for key in ("got", "told", "found", "asked", "batched", "left", "last"):
            store.put(A, key, {"text": key}, ttl=1)
        clock.forward(MINUTE / 2)
        store.get(A, "got")
        store.get(A, "told", refresh_ttl=True)
        store.search(A, filter={"text": "found"})
        store.search(A, query="asked", mode="text")
        store.batch([GetOp(A, "batched"), SearchOp(A, {"text": "found"})])
        store.get(A, "left", refresh_ttl=False)
        store.search(A, query="left", refresh_ttl=False)
        store.batch([GetOp(A, "last", False), SearchOp(A, refresh_ttl=False)])
        clock.forward(MINUTE / 2)

        alive = set(list_item_keys(store.search(A, refresh_ttl=False)))
        clock.forward(MINUTE / 2)
        later = store.search(A)

    assert alive == {"got", "told", "found", "asked", "batched"}
    assert later == []


def test_without_refresh_returns_store_whose_reads_do_not_refresh(
    store: SQLiteStore, clock: Clock
) -> None:
    """The returned object is a view of the same store.

    A read with `refresh_ttl=True` still refreshes.
    """
    store.put(A, "k", {"text": "tea"}, ttl=1)
    store.put(A, "told", {"text": "milk"}, ttl=1)
    clock.forward(MINUTE / 2)
    unrefreshing = store.without_refresh()
    unrefreshing.get(A, "k")
    unrefreshing.search(A, query="tea")
    unrefreshing.batch([GetOp(A, "k"), SearchOp(A)])
    unrefreshing.scoped(A).search(())
    unrefreshing.get(A, "told", refresh_ttl=True)
    clock.forward(MINUTE / 2)

    assert list_item_keys(store.search(A)) == ["told"]


@pytest.mark.parametrize("door", CALL_MODES)
def test_refresh_on_read_refreshes_ttl_in_every_read(
    door: str, tmp_path: Path, clock: Clock
) -> None:
    """A read with `refresh_ttl=False` is the exception."""
    reads: dict[str, Any] = {
        "get": lambda store: store.get(A, "get"),
        "search": lambda store: store.search(A, filter={"text": "search"}),
        "query": lambda store: store.search(A, query="query", mode="text"),
        "batch": lambda store: store.batch([GetOp(A, "batch")]),
        "told": lambda store: store.get(A, "told", refresh_ttl=False),
        "told batch": lambda store: store.batch([GetOp(A, "told batch", refresh_ttl=False)]),
    }
    with BACKENDS["file"](tmp_path, clock=clock, ttl={"refresh_on_read": True}) as opened:
        store = with_call_mode(door, opened)
        store.batch([PutOp(A, key, {"text": key}, ttl=1) for key in reads])
        clock.forward(MINUTE / 2)
        for read in reads.values():
            read(store)
        clock.forward(MINUTE / 2)

        assert {"get", "search", "query", "batch"} == set(list_item_keys(store.search(A)))
        if isinstance(store, AwaitedStore):
            store.end()


def test_read_of_the_past_does_not_refresh_ttl(store: SQLiteStore, clock: Clock) -> None:
    store.put(A, "k", {"text": "tea"}, ttl=1)
    clock.forward(MINUTE / 2)
    store.get(A, "k", as_of=clock.at(), refresh_ttl=True)
    store.search(A, query="tea", as_of=clock.at(), refresh_ttl=True)
    clock.forward(MINUTE / 2)

    assert store.get(A, "k") is None


def test_search_of_the_future_does_not_hide_refreshed_item(
    store: SQLiteStore, clock: Clock
) -> None:
    """An item that had expired at the future moment is found after a read has refreshed it."""
    store.put(A, "k", {"text": "tea"}, ttl=1)
    future = store.search(A, query="tea", as_of=clock.at(-2 * MINUTE))
    clock.forward(MINUTE / 2)
    store.get(A, "k", refresh_ttl=True)
    clock.forward(MINUTE / 2)

    assert future == []
    assert list_item_keys(store.search(A, query="tea", refresh_ttl=False)) == ["k"]
    clock.forward(MINUTE / 2)
    assert store.search(A, query="tea") == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_ttl_configuration_sets_default_ttl_and_refresh(
    backend: str, tmp_path: Path, clock: Clock
) -> None:
    """`default_ttl` applies to puts without a ttl, and `refresh_on_read` to reads."""
    ttl: Any = {"default_ttl": 1, "refresh_on_read": False}
    with BACKENDS[backend](tmp_path, clock=clock, ttl=ttl) as store:
        store.put(A, "default", {})
        store.put(A, "none", {}, ttl=None)
        store.put(A, "two", {}, ttl=2)
        store.batch([PutOp(A, "batch", {}, ttl=3)])
        clock.forward(MINUTE / 2)
        store.search(A)
        store.get(A, "two", refresh_ttl=True)
        clock.forward(MINUTE / 2)
        first = set(list_item_keys(store.search(A)))
        clock.forward(MINUTE)
        second = set(list_item_keys(store.search(A)))
        clock.forward(MINUTE)
        third = set(list_item_keys(store.search(A)))

    assert first == {"none", "two", "batch"}
    assert second == {"none", "two", "batch"}
    assert third == {"none"}


def test_change_of_ttl_config_affects_later_puts(tmp_path: Path, clock: Clock) -> None:
    ttl: Any = {"default_ttl": 1}
    with BACKENDS["file"](tmp_path, clock=clock, ttl=ttl) as store:
        store.put(A, "before", {})
        assert store.ttl_config is not None
        store.ttl_config["default_ttl"] = None
        store.put(A, "after", {})
        clock.forward(MINUTE * 2)
        keys = list_item_keys(store.search(A))

    assert keys == ["after"]


def test_new_put_replaces_ttl_of_item(store: SQLiteStore, clock: Clock) -> None:
    """A put without a TTL removes it, and a put with a TTL sets it."""
    store.put(A, "stays", {}, ttl=1)
    store.put(A, "stays", {})
    store.put(A, "goes", {})
    clock.forward()
    store.put(A, "goes", {}, ttl=1)
    clock.forward(MINUTE)

    assert list_item_keys(store.search(A)) == ["stays"]


def test_put_after_expiry_creates_item_anew(store: SQLiteStore, clock: Clock) -> None:
    """An expired item does not exist: if_version must be 0, and created_at is new."""
    store.put(A, "k", {"n": 1}, ttl=1)
    clock.forward(2 * MINUTE)
    store.put(A, "k", {"n": 2}, if_version=0)
    item = store.get(A, "k")
    history = store.history(A, "k")

    assert item is not None
    assert clock.at() == item.created_at
    assert item.version == 2
    assert [clock.at(MINUTE), None] == [version.valid_to for version in history]


@pytest.mark.parametrize("sweep", [True, False])
def test_expired_item_is_returned_for_moments_before_expiry(
    sweep: bool, store: SQLiteStore, clock: Clock
) -> None:
    """Its history says when it expired."""
    store.put(A, "k", {"text": "tea"}, ttl=1)
    during = clock.forward(MINUTE / 2)
    clock.forward(MINUTE)
    if sweep:
        store.sweep_ttl()
    ended = clock.at(MINUTE / 2)
    history = store.history(A, "k")

    assert store.get(A, "k", as_of=during) is not None
    assert list_item_keys(store.search(A, query="tea", as_of=during)) == ["k"]
    assert store.list_namespaces(as_of=during) == [A]
    assert [ended] == [version.valid_to for version in history]
    assert store.get(A, "k", as_of=ended) is None


def test_sweep_closes_all_expired_items_and_no_others(store: SQLiteStore, clock: Clock) -> None:
    store.batch([PutOp(A, f"k{n}", {"n": n}, ttl=1 + n % 2) for n in range(1200)])
    clock.forward(MINUTE)
    swept, again = store.sweep_ttl(), store.sweep_ttl()

    assert (swept, again) == (600, 0)
    assert len(store.search(A, limit=2000)) == 600
    assert store.stats().items == 600


def test_ttl_sweeper_sweeps_until_stopped(file_store: SQLiteStore, clock: Clock) -> None:
    """Starting the sweeper twice starts one thread."""
    file_store.put(A, "k", {}, ttl=1)
    clock.forward(MINUTE)
    thread = file_store.start_ttl_sweeper(0.0005)
    again = file_store.start_ttl_sweeper(0.0005)
    for _ in range(1000):
        if file_store.stats().items == 0:
            break
        time.sleep(0.01)
    remaining, stopped = file_store.stats().items, file_store.stop_ttl_sweeper(10)

    assert remaining == 0
    assert thread is again
    assert stopped
    assert not thread.is_alive()


def test_sweep_and_stop_of_sweeper_can_be_awaited(tmp_path: Path, clock: Clock) -> None:
    """Sweeping and stopping the sweeper can be awaited. Closing the store stops the sweeper."""

    async def course() -> tuple[Any, ...]:
        async with BACKENDS["file"](tmp_path, clock=clock) as store:
            await store.setup()
            store.setup()
            await store.aput(A, "k", {}, ttl=1)
            clock.forward(MINUTE)
            swept = await store.asweep_ttl()
            first = store.start_ttl_sweeper(60)
            stopped = await store.astop_ttl_sweeper()
            store.start_ttl_sweeper(60)
            await store.astop_ttl_sweeper()
            last = store.start_ttl_sweeper(60)
        return swept, first.is_alive(), stopped, last.is_alive()

    assert asyncio.run(course()) == (1, False, True, False)


def test_start_after_stop_starts_another_sweeper(file_store: SQLiteStore) -> None:
    """Another sweeper is started even while the thread of the first one still runs."""
    first = file_store.start_ttl_sweeper(60)
    file_store.stop_ttl_sweeper(0)
    second = file_store.start_ttl_sweeper(60)

    assert first is not second
    assert second.is_alive()


def test_start_replaces_sweeper_that_died(
    file_store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error or a fork ends the thread; the next start starts another one."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(file_store, "sweep_ttl", lambda: 1 / 0)
    first = file_store.start_ttl_sweeper(0.0001)
    first.join(10)
    second = file_store.start_ttl_sweeper(60)

    assert not first.is_alive()
    assert second.is_alive()


def test_close_stops_the_sweeper_thread(tmp_path: Path) -> None:
    with BACKENDS["file"](tmp_path) as store:
        thread = store.start_ttl_sweeper(60)

    assert not thread.is_alive()


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), "1", True, [1]], ids=repr)
def test_put_refuses_invalid_ttl(ttl: Any, store: SQLiteStore) -> None:
    """A TTL that is not a positive number is refused, and nothing is written."""
    with pytest.raises(ConfigurationError, match="ttl"):
        store.put(A, "k", {}, ttl=ttl)

    assert store.get(A, "k") is None


@pytest.mark.parametrize("ttl", [1e-12, 1e9, 1e300])
def test_very_short_and_very_long_ttl_are_accepted(
    ttl: float, store: SQLiteStore, clock: Clock
) -> None:
    """The item can be read, and its expires_at is a date."""
    store.put(A, "k", {}, ttl=ttl)
    item = store.get(A, "k", refresh_ttl=False)

    assert item is not None
    assert item.expires_at is not None
    assert item.expires_at > clock.at()


@pytest.mark.parametrize("minutes", [-1, "1", True])
def test_start_ttl_sweeper_refuses_invalid_interval(minutes: Any, file_store: SQLiteStore) -> None:
    """The interval must be a positive number of minutes."""
    with pytest.raises(ConfigurationError, match="interval"):
        file_store.start_ttl_sweeper(minutes)

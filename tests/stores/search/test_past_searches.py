"""A search with `as_of` returns what a search at that moment returned, with the same scores."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from random import Random
from typing import Any

import pytest

from perdure.storage.flow import Flow
from perdure.stores import Provenance, PutItem, SQLiteStore
from perdure.stores.search.index_cache import Indexes
from tests.store_backends import ONE_CALL_MODE_PER_BACKEND, Clock, list_item_keys

WORDS = ["tea", "car", "rain", "mountain", "dog", "garden", "piano", "winter", "bridge", "letter"]
SPACES = (("a",), ("a", "b"), ("c",))
QUERIES = ("what did ann say about tea", "mountian", "automobile")
SEARCHES: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "text"},
    {"mode": "semantic"},
    {"filter": {"n": {"$lt": 5}}},
    {"provenance": {"actor": "ann"}},
)


def change_some_items(store: SQLiteStore, random: Random, clock: Clock) -> None:
    """Put or delete a few items, with and without threads."""
    puts = []
    for _ in range(random.randint(1, 6)):
        value = {"text": " ".join(random.choices(WORDS, k=5)), "n": random.randint(0, 9)}
        thread, place = f"t{random.randint(0, 2)}", random.randint(0, 20)
        provenance = Provenance(
            thread_id=thread, position=place, actor=random.choice(["ann", "bob"]), at=clock.at()
        )
        puts.append(
            PutItem(
                random.choice(SPACES),
                f"k{random.randint(0, 12)}",
                random.choice([value, value, value, None]),
                random.choice([None, None, None, False]),
                ttl=random.choice([None, None, 2]),
                provenance=random.choice([None, provenance, provenance]),
            )
        )
    store.batch(puts)


def run_searches(store: SQLiteStore, **options: Any) -> list[tuple[Any, ...]]:
    """Return the results of each search with their scores."""
    return [
        (prefix, query, number, item.namespace, item.key, item.value, pytest.approx(item.score))
        for prefix, query, (number, search) in product(((), ("a",)), QUERIES, enumerate(SEARCHES))
        for item in store.search(prefix, query=query, limit=50, **search, **options)
    ]


@ONE_CALL_MODE_PER_BACKEND
def test_past_search_returns_items_order_and_scores_of_that_moment(
    store: SQLiteStore, clock: Clock
) -> None:
    """Searches of the past do not change the results of present searches."""
    random, moments = Random(17), []
    for step in range(24):
        change_some_items(store, random, clock)
        if step % 6 == 0:
            moments.append((clock.at(), run_searches(store)))
        clock.forward(20)
        if step % 7 == 0:
            store.sweep_ttl()
    moments.append((clock.at(), run_searches(store)))

    for moment, expected in moments[::-1]:
        assert expected
        assert run_searches(store, as_of=moment) == expected
    run_searches(store, as_of=clock.at() + timedelta(days=9))
    assert run_searches(store) == moments[-1][1]


@ONE_CALL_MODE_PER_BACKEND
def test_past_search_does_not_find_forgotten_versions(store: SQLiteStore, clock: Clock) -> None:
    """Closed versions that a past search has loaded are dropped when they are erased."""
    for space, text in product(SPACES, ("my car", "my dog")):
        store.put(space, "k", {"text": text})
        clock.forward()
    past = clock.at(5)
    assert [item.namespace for item in store.search((), query="car", as_of=past)] == [SPACES[0]]
    store.forget(SPACES[0])
    assert store.search((), query="car", as_of=past) == []


@ONE_CALL_MODE_PER_BACKEND
def test_past_search_loads_unsearchable_versions_only_once(
    store: SQLiteStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed versions with `index=False` are never found, and are not read by each past search."""
    loaded_ids: list[list[int]] = []
    load_versions = Indexes._load_indexed_items

    def record_and_load(self: Indexes, ids: Sequence[int], state: Any) -> Flow[Any]:
        loaded_ids.append(list(ids))
        return (yield from load_versions(self, ids, state))

    monkeypatch.setattr(Indexes, "_load_indexed_items", record_and_load)
    store.put(("a",), "searched", {"text": "my car"})
    store.put(("a",), "not", {"text": "my car"}, index=False)
    past = clock.at()
    clock.forward()
    store.delete(("a",), "searched")
    store.delete(("a",), "not")
    run_searches = [list_item_keys(store.search((), query="car", as_of=past)) for _ in range(2)]

    assert run_searches == [["searched"], ["searched"]]
    assert [len(ids) for ids in loaded_ids] == [2]

"""Searches of the past find what a search at that moment found, with the same scores."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from random import Random
from typing import Any

import pytest

from perdure.storage.flow import Flow
from perdure.stores import Provenance, PutItem, SQLiteStore
from perdure.stores.indexes import Indexes
from tests.store_backends import FEWER, Clock, keys

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


def change(store: SQLiteStore, random: Random, clock: Clock) -> None:
    """Put or delete a few items, in threads and out of them."""
    puts = []
    for _ in range(random.randint(1, 6)):
        value = {"text": " ".join(random.choices(WORDS, k=5)), "n": random.randint(0, 9)}
        thread, place = f"t{random.randint(0, 2)}", random.randint(0, 20)
        said = Provenance(
            thread_id=thread, position=place, actor=random.choice(["ann", "bob"]), at=clock.at()
        )
        puts.append(
            PutItem(
                random.choice(SPACES),
                f"k{random.randint(0, 12)}",
                random.choice([value, value, value, None]),
                random.choice([None, None, None, False]),
                ttl=random.choice([None, None, 2]),
                provenance=random.choice([None, said, said]),
            )
        )
    store.batch(puts)


def found(store: SQLiteStore, **options: Any) -> list[tuple[Any, ...]]:
    """What each search finds, with its score."""
    return [
        (prefix, query, number, item.namespace, item.key, item.value, pytest.approx(item.score))
        for prefix, query, (number, search) in product(((), ("a",)), QUERIES, enumerate(SEARCHES))
        for item in store.search(prefix, query=query, limit=50, **search, **options)
    ]


@FEWER
def test_the_past_is_found_as_it_was(store: SQLiteStore, clock: Clock) -> None:
    """Items, order and scores of each moment are those of then; those of the present stay."""
    random, moments = Random(17), []
    for step in range(24):
        change(store, random, clock)
        if step % 6 == 0:
            moments.append((clock.at(), found(store)))
        clock.forward(20)
        if step % 7 == 0:
            store.sweep_ttl()
    moments.append((clock.at(), found(store)))

    for at, then in moments[::-1]:
        assert then
        assert found(store, as_of=at) == then
    found(store, as_of=clock.at() + timedelta(days=9))
    assert found(store) == moments[-1][1]


@FEWER
def test_what_was_forgotten_is_not_found(store: SQLiteStore, clock: Clock) -> None:
    """Closed versions that a search of the past has read are gone from it when erased."""
    for space, text in product(SPACES, ("my car", "my dog")):
        store.put(space, "k", {"text": text})
        clock.forward()
    past = clock.at(5)
    assert [each.namespace for each in store.search((), query="car", as_of=past)] == [SPACES[0]]
    store.forget(SPACES[0])
    assert store.search((), query="car", as_of=past) == []


@FEWER
def test_what_is_not_searched_is_asked_for_once(
    store: SQLiteStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed versions with `index=False` are never found, and not read in each past search."""
    asked: list[list[int]] = []
    versions = Indexes._load_versions

    def counted(self: Indexes, ids: Sequence[int], state: Any) -> Flow[Any]:
        asked.append(list(ids))
        return (yield from versions(self, ids, state))

    monkeypatch.setattr(Indexes, "_load_versions", counted)
    store.put(("a",), "searched", {"text": "my car"})
    store.put(("a",), "not", {"text": "my car"}, index=False)
    past = clock.at()
    clock.forward()
    store.delete(("a",), "searched")
    store.delete(("a",), "not")
    found = [keys(store.search((), query="car", as_of=past)) for _ in range(2)]

    assert found == [["searched"], ["searched"]]
    assert [len(ids) for ids in asked] == [2]

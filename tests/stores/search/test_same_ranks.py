"""SQLite and Postgres return the same items, in the same order, with the same scores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import PutOp

from perdure.stores import Provenance, PutItem
from tests.store_backends import BACKENDS, Clock

SUBJECTS = ("bicycle", "kitchen", "garden", "invoice", "holiday", "guitar", "doctor", "harbour")
VERBS = ("repaired", "bought", "painted", "forgot", "sold", "described", "borrowed")
ENDS = ("in spring", "with Tom", "for the office", "again", "at the lake", "last week", "?")
PEOPLE = ("Ann", "Tom", "Maria", "assistant")
QUERIES = ("who repaired the bicycle with Tom", "gardn physician", "the")


def fill_store(store: Any, clock: Clock) -> None:
    """Put conversations of several people, later changes and deletions, and many notes."""
    draw = random.Random(1)
    items: list[PutOp | PutItem] = []
    for number in range(240):
        text = f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} the {draw.choice(SUBJECTS)}"
        value = {"text": f"{text} {draw.choice(ENDS)}", "n": number, "kind": f"k{number % 7}"}
        provenance = Provenance(
            thread_id=f"t{number % 5}",
            actor=draw.choice(PEOPLE),
            position=number // 5,
            at=clock.at(ago_s=86_400 * (240 - number)),
        )
        items.append(PutItem(("talks",), f"m{number}", value, provenance=provenance))
        items.append(PutOp(("notes", str(number % 3)), f"n{number}", {"text": text, "n": number}))
    for begin in range(0, len(items), 60):
        store.batch(items[begin : begin + 60])
        clock.forward()
    for number in range(0, 240, 9):
        store.put(("talks",), f"m{number}", {"text": "the harbour again", "n": number})
    for number in range(0, 240, 11):
        store.delete(("talks",), f"m{number}")


def iter_search_results(store: Any, clock: Clock) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Run many searches, and yield a description and the results of each."""
    searches: dict[str, dict[str, Any]] = {
        "plain": {},
        "text": {"mode": "text"},
        "semantic": {"mode": "semantic"},
        "alone": {"context": False},
        "filter": {"filter": {"n": {"$gte": 100}, "kind": {"$in": ["k1", "k2", "k3"]}}},
        "who": {"provenance": {"actor": "Ann"}},
        "during": {"during": (clock.at(86_400 * 90), clock.at(86_400 * 30))},
        "past": {"as_of": clock.at(ago_s=3)},
    }
    for prefix in ((), ("talks",)):
        for name, options in searches.items():
            for query in QUERIES:
                items = store.search(prefix, query=query, limit=20, **options)
                results = [(item.namespace, item.key, item.value, item.score) for item in items]
                yield f"{prefix} {name} {query}", results
        items = store.search(prefix, filter={"n": {"$lt": 100}}, limit=30, offset=5)
        yield f"{prefix} listed", [(item.namespace, item.key, item.value) for item in items]


@pytest.mark.postgres
def test_sqlite_and_postgres_return_same_ranks_and_scores(tmp_path: Path) -> None:
    """So does a store that is opened later and loads the saved index."""
    results = []
    for number, backend in enumerate(("file", "postgres", "postgres")):
        clock = Clock()
        with BACKENDS[backend](tmp_path, clock=clock, index="offline") as store:
            if number < 2:
                fill_store(store, clock)
            clock.now = Clock().now + 10
            results.append(list(iter_search_results(store, clock)))

    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert one == other
    assert sum(len(items) > 0 for _, items in results[0]) > 40

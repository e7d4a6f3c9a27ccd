"""Listings: in the order of creation, and page by page exact while others write."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from langgraph.store.base import PutOp

from perdure.stores import SQLiteStore
from tests.store_backends import Clock, keys

A = ("users", "alice")


def test_items_come_in_the_order_of_creation(any_store: SQLiteStore, clock: Clock) -> None:
    """A batch in its own order; a new version stays in its place; what is made anew comes last."""
    any_store.batch([PutOp(A, key, {"n": 1, "key": key}) for key in "dcba"])
    clock.forward()
    any_store.put(A, "0", {"n": 1})
    clock.forward()
    any_store.put(A, "c", {"n": 2})
    any_store.batch([PutOp(A, key, {"n": 2, "key": key}) for key in "bd"])
    clock.forward()
    any_store.delete(A, "a")
    any_store.put(A, "a", {"n": 3})
    pages = [keys(any_store.search(A, limit=2, offset=offset)) for offset in (0, 2, 4, 6)]

    assert keys(any_store.search(A)) == ["d", "c", "b", "0", "a"]
    assert pages == [["d", "c"], ["b", "0"], ["a"], []]
    assert keys(any_store.search(A, filter={"n": 2})) == ["d", "c", "b"]


def test_the_newest_come_first(store: SQLiteStore, clock: Clock) -> None:
    """Page by page, of a filter and of a moment."""
    for key in "abcd":
        store.put(A, key, {"n": key in "bd", "key": key})
    before = clock.forward()
    clock.forward()
    store.put(A, "b", {"n": 2})
    store.delete(A, "d")

    assert keys(store.search(A, newest_first=True)) == ["c", "b", "a"]
    assert keys(store.search(A, newest_first=True, limit=2, offset=1)) == ["b", "a"]
    assert keys(store.search(A, newest_first=True, filter={"n": False})) == ["c", "a"]
    past = store.search(A, newest_first=True, as_of=before, limit=2)
    assert [(item.key, item.version) for item in past] == [("d", 1), ("c", 1)]


def test_a_filter_finds_values_of_any_bytes(store: SQLiteStore) -> None:
    """Of each length, with NUL, and with what only looks like it; with and without a query."""
    texts = ["x" * n for n in range(20)] + ["\0x", "x\0", r"\u0000", "é\0", "😀"]
    store.batch([PutOp(A, f"k{n}", {"a": text}) for n, text in enumerate(texts)])
    store.batch([PutOp(("b",), f"k{n}", {"a": text, "n": n}) for n, text in enumerate(texts)])

    for n, text in enumerate(texts):
        assert keys(store.search(A, filter={"a": text})) == [f"k{n}"]
        assert keys(store.search(("b",), filter={"a": text, "n": n})) == [f"k{n}"]
    assert len(store.search(A, filter={"a": {"$gte": ""}}, limit=50)) == len(texts)
    assert keys(store.search(("b",), query="x", filter={"n": 20})) == ["k20"]
    assert store.search(A, filter={"a": "y"}) == []


def test_a_listing_of_the_past_is_in_the_same_order(store: SQLiteStore, clock: Clock) -> None:
    """What was replaced or deleted since is where it was."""
    store.batch([PutOp(A, key, {"n": 1}) for key in "cba"])
    then = clock.forward()
    clock.forward()
    store.put(A, "c", {"n": 2})
    store.delete(A, "b")
    store.put(A, "d", {"n": 1})
    pages = [keys(store.search(A, limit=2, offset=offset, as_of=then)) for offset in (0, 2, 4)]

    assert pages == [["c", "b"], ["a"], []]
    assert keys(store.search(A, filter={"n": 1}, as_of=then)) == ["c", "b", "a"]


@contextmanager
def written_meanwhile(path: Path, present: list[str], *, deleting: bool) -> Iterator[None]:
    """Two other stores on the same file that replace items, add and maybe delete some."""
    done = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with SQLiteStore.open(path, index=None) as other:
            number = 0
            while not done.is_set():
                number += 1
                other.put(A, chance.choice(present), {"n": number})
                other.batch([PutOp(A, f"{chance.random()}", {"n": 0}) for _ in range(3)])
                if deleting:
                    other.delete(A, chance.choice(present))

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_what_is_imported_keeps_its_place(store: SQLiteStore) -> None:
    """A newer version from elsewhere is where the old one was; what is new comes last."""
    store.batch([PutOp(A, key, {"n": 0}) for key in "bc"])
    store.import_lines(json.dumps({"namespace": A, "key": key, "value": {"n": 1}}) for key in "acb")

    assert [(item.key, item.value["n"]) for item in store.search(A)] == [
        ("b", 1),
        ("c", 1),
        ("a", 1),
    ]


def listed(store: SQLiteStore, **asked: Any) -> list[str]:
    """The keys of all pages, a few items each."""
    found: list[str] = []
    while page := store.search(A, limit=7, offset=len(found), **asked):
        found += keys(page)
    return found


def test_pages_are_exact_while_others_put(tmp_path: Path) -> None:
    """Each item that is there from the start is on one page, and nothing is on two."""
    path, present = tmp_path / "x.db", [f"{number:03}" for number in range(100)]
    with SQLiteStore.open(path, index=None) as store:
        store.batch([PutOp(A, key, {"n": 0}) for key in present])
        with written_meanwhile(path, present, deleting=False):
            for _ in range(5):
                found = listed(store)

                assert found[: len(present)] == present
                assert len(set(found)) == len(found)


def test_pages_of_one_moment_are_exact_whatever_others_do(tmp_path: Path) -> None:
    """With `as_of` the pages together are what one search of that moment finds."""
    path, present = tmp_path / "x.db", [f"{number:03}" for number in range(100)]
    with SQLiteStore.open(path, index=None) as store:
        store.batch([PutOp(A, key, {"n": 0}) for key in present])
        then = datetime.now(UTC)
        with written_meanwhile(path, present, deleting=True):
            for _ in range(5):
                assert listed(store, as_of=then) == present
                assert listed(store, as_of=then, filter={"n": 0}) == present

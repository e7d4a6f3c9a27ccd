"""Listings are in the order of creation, and their pages stay exact while others write."""

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
from tests.store_backends import Clock, list_item_keys

A = ("users", "alice")


def test_search_lists_items_in_order_of_creation(any_store: SQLiteStore, clock: Clock) -> None:
    """A new version keeps the item's place. A key that was deleted and put again comes last."""
    any_store.batch([PutOp(A, key, {"n": 1, "key": key}) for key in "dcba"])
    clock.forward()
    any_store.put(A, "0", {"n": 1})
    clock.forward()
    any_store.put(A, "c", {"n": 2})
    any_store.batch([PutOp(A, key, {"n": 2, "key": key}) for key in "bd"])
    clock.forward()
    any_store.delete(A, "a")
    any_store.put(A, "a", {"n": 3})
    pages = [list_item_keys(any_store.search(A, limit=2, offset=offset)) for offset in (0, 2, 4, 6)]

    assert list_item_keys(any_store.search(A)) == ["d", "c", "b", "0", "a"]
    assert pages == [["d", "c"], ["b", "0"], ["a"], []]
    assert list_item_keys(any_store.search(A, filter={"n": 2})) == ["d", "c", "b"]


def test_newest_first_lists_newest_versions_first(store: SQLiteStore, clock: Clock) -> None:
    """The option works with pages, with a filter and for a moment in the past."""
    for key in "abcd":
        store.put(A, key, {"n": key in "bd", "key": key})
    before = clock.forward()
    clock.forward()
    store.put(A, "b", {"n": 2})
    store.delete(A, "d")

    assert list_item_keys(store.search(A, newest_first=True)) == ["c", "b", "a"]
    assert list_item_keys(store.search(A, newest_first=True, limit=2, offset=1)) == ["b", "a"]
    assert list_item_keys(store.search(A, newest_first=True, filter={"n": False})) == ["c", "a"]
    past = store.search(A, newest_first=True, as_of=before, limit=2)
    assert [(item.key, item.version) for item in past] == [("d", 1), ("c", 1)]


def test_filter_finds_strings_of_any_length_and_characters(store: SQLiteStore) -> None:
    """Strings with NUL, or with an escaped NUL, are found with and without a query."""
    texts = ["x" * n for n in range(20)] + ["\0x", "x\0", r"\u0000", "é\0", "😀"]
    store.batch([PutOp(A, f"k{n}", {"a": text}) for n, text in enumerate(texts)])
    store.batch([PutOp(("b",), f"k{n}", {"a": text, "n": n}) for n, text in enumerate(texts)])

    for n, text in enumerate(texts):
        assert list_item_keys(store.search(A, filter={"a": text})) == [f"k{n}"]
        assert list_item_keys(store.search(("b",), filter={"a": text, "n": n})) == [f"k{n}"]
    assert len(store.search(A, filter={"a": {"$gte": ""}}, limit=50)) == len(texts)
    assert list_item_keys(store.search(("b",), query="x", filter={"n": 20})) == ["k20"]
    assert store.search(A, filter={"a": "y"}) == []


def test_past_listing_keeps_order_of_creation(store: SQLiteStore, clock: Clock) -> None:
    """Items that were replaced or deleted since are listed at their former place."""
    store.batch([PutOp(A, key, {"n": 1}) for key in "cba"])
    moment = clock.forward()
    clock.forward()
    store.put(A, "c", {"n": 2})
    store.delete(A, "b")
    store.put(A, "d", {"n": 1})
    pages = [
        list_item_keys(store.search(A, limit=2, offset=offset, as_of=moment))
        for offset in (0, 2, 4)
    ]

    assert pages == [["c", "b"], ["a"], []]
    assert list_item_keys(store.search(A, filter={"n": 1}, as_of=moment)) == ["c", "b", "a"]


@contextmanager
def concurrent_writers(path: Path, present: list[str], *, deleting: bool) -> Iterator[None]:
    """Run two threads with stores of their own that replace, add and optionally delete items."""
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


def test_imported_version_keeps_place_of_item_in_listing(store: SQLiteStore) -> None:
    """A new version from an import keeps the item's place, and a new item comes last."""
    store.batch([PutOp(A, key, {"n": 0}) for key in "bc"])
    store.import_lines(json.dumps({"namespace": A, "key": key, "value": {"n": 1}}) for key in "acb")

    assert [(item.key, item.value["n"]) for item in store.search(A)] == [
        ("b", 1),
        ("c", 1),
        ("a", 1),
    ]


def list_all_pages(store: SQLiteStore, **options: Any) -> list[str]:
    """Return the keys of all pages of seven items each."""
    keys_so_far: list[str] = []
    while page := store.search(A, limit=7, offset=len(keys_so_far), **options):
        keys_so_far += list_item_keys(page)
    return keys_so_far


def test_pages_contain_each_item_once_during_concurrent_puts(tmp_path: Path) -> None:
    """Each item that exists from the start is on exactly one page."""
    path, present = tmp_path / "x.db", [f"{number:03}" for number in range(100)]
    with SQLiteStore.open(path, index=None) as store:
        store.batch([PutOp(A, key, {"n": 0}) for key in present])
        with concurrent_writers(path, present, deleting=False):
            for _ in range(5):
                found_keys = list_all_pages(store)

                assert found_keys[: len(present)] == present
                assert len(set(found_keys)) == len(found_keys)


def test_pages_as_of_a_moment_are_exact_during_concurrent_writes(tmp_path: Path) -> None:
    """With `as_of`, the pages together are the result of one search of that moment."""
    path, present = tmp_path / "x.db", [f"{number:03}" for number in range(100)]
    with SQLiteStore.open(path, index=None) as store:
        store.batch([PutOp(A, key, {"n": 0}) for key in present])
        moment = datetime.now(UTC)
        with concurrent_writers(path, present, deleting=True):
            for _ in range(5):
                assert list_all_pages(store, as_of=moment) == present
                assert list_all_pages(store, as_of=moment, filter={"n": 0}) == present

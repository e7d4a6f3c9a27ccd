"""`PutItem`: items with provenance and conditions, written as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from langgraph.store.base import PutOp

from perdure.errors import InvalidValue, LimitExceeded, VersionConflict
from perdure.stores import Provenance, PutItem, SQLiteStore
from tests.store_backends import Clock, keys, open_store

A = ("users", "ann")
SOURCE = Provenance(thread_id="t", message_ids=("m1",), trust="user", position=3)


def test_items_have_all_that_a_put_takes(store: SQLiteStore) -> None:
    """Provenance, index and conditions hold as they do for `put`."""
    store.batch(
        [
            PutItem(A, "1", {"text": "tea", "note": "oolong"}, ["text"], provenance=SOURCE),
            PutItem(A, "2", {"text": "milk"}, if_version=0),
        ]
    )
    first = store.get(A, "1")

    assert first is not None
    assert first.provenance == SOURCE
    assert [item.key for item in store.search(A, query="milk", limit=1)] == ["2"]
    assert store.why_not(A, "1", query="oolong", mode="text").rank is None


def test_one_that_does_not_hold_stops_all(store: SQLiteStore) -> None:
    """If one item is at another version, none of the batch is written."""
    store.put(A, "1", {"text": "tea"})
    with pytest.raises(VersionConflict):
        store.batch([PutItem(A, "2", {"text": "milk"}), PutItem(A, "1", None, if_version=2)])

    assert keys(store.search(A)) == ["1"]


def test_one_that_is_wrong_stops_all(store: SQLiteStore) -> None:
    """If a value is no JSON object, none of the batch is written."""
    with pytest.raises(InvalidValue):
        store.batch([PutItem(A, "1", {"text": "tea"}), PutItem(A, "2", {"text": {1}})])

    assert store.search(A) == []


def test_they_go_with_other_operations(store: SQLiteStore) -> None:
    """langgraph's own puts and ours are one batch, and the last of a key counts."""
    store.batch([PutOp(A, "1", {"n": 1}), PutItem(A, "1", {"n": 2}), PutOp(A, "2", {"n": 3})])
    store.batch([PutItem(A, "2", None)])

    assert {item.key: item.value for item in store.search(A)} == {"1": {"n": 2}}


def test_they_expire_as_puts_do(tmp_path: Path) -> None:
    """Without a time to live an item has the store's, and with None it has none."""
    clock = Clock()
    with open_store(tmp_path / "a.db", ttl={"default_ttl": 1}, clock=clock) as store:
        store.batch([PutItem(A, "1", {"n": 1}), PutItem(A, "2", {"n": 2}, ttl=None)])
        clock.now += 61

        assert keys(store.search(A)) == ["2"]


def test_they_count_in_a_scope(file_store: SQLiteStore) -> None:
    """A scope's limits hold for them, and its namespaces begin at its prefix."""
    scope = file_store.scoped(A, max_items=1)
    scope.batch([PutItem(("x",), "1", {"n": 1})])
    with pytest.raises(LimitExceeded):
        scope.batch([PutItem(("x",), "2", {"n": 2})])

    assert [(*A, "x")] == file_store.list_namespaces()

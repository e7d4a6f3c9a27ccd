"""`PutItem`: items with provenance and conditions that are written in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from langgraph.store.base import PutOp

from perdure.errors import InvalidValue, LimitExceeded, VersionConflict
from perdure.stores import Provenance, PutItem, SQLiteStore
from tests.store_backends import Clock, list_item_keys, open_store

A = ("users", "ann")
SOURCE = Provenance(thread_id="t", message_ids=("m1",), trust="user", position=3)


def test_batch_of_put_items_applies_provenance_index_and_condition(store: SQLiteStore) -> None:
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


def test_version_conflict_of_one_item_stops_the_batch(store: SQLiteStore) -> None:
    """If one item is at another version, nothing of the batch is written."""
    store.put(A, "1", {"text": "tea"})
    with pytest.raises(VersionConflict):
        store.batch([PutItem(A, "2", {"text": "milk"}), PutItem(A, "1", None, if_version=2)])

    assert list_item_keys(store.search(A)) == ["1"]


def test_invalid_value_of_one_item_stops_the_batch(store: SQLiteStore) -> None:
    """If a value is not a JSON object, nothing of the batch is written."""
    with pytest.raises(InvalidValue):
        store.batch([PutItem(A, "1", {"text": "tea"}), PutItem(A, "2", {"text": {1}})])

    assert store.search(A) == []


def test_put_items_and_langgraph_puts_share_a_batch(store: SQLiteStore) -> None:
    """The last operation of a key counts."""
    store.batch([PutOp(A, "1", {"n": 1}), PutItem(A, "1", {"n": 2}), PutOp(A, "2", {"n": 3})])
    store.batch([PutItem(A, "2", None)])

    assert {item.key: item.value for item in store.search(A)} == {"1": {"n": 2}}


def test_put_item_uses_default_ttl_unless_given(tmp_path: Path) -> None:
    """An item without `ttl` gets the store's default; with None it never expires."""
    clock = Clock()
    with open_store(tmp_path / "a.db", ttl={"default_ttl": 1}, clock=clock) as store:
        store.batch([PutItem(A, "1", {"n": 1}), PutItem(A, "2", {"n": 2}, ttl=None)])
        clock.now += 61

        assert list_item_keys(store.search(A)) == ["2"]


def test_put_items_count_towards_limits_of_scope(file_store: SQLiteStore) -> None:
    """The namespaces of the items begin at the scope's prefix."""
    scope = file_store.scoped(A, max_items=1)
    scope.batch([PutItem(("x",), "1", {"n": 1})])
    with pytest.raises(LimitExceeded):
        scope.batch([PutItem(("x",), "2", {"n": 2})])

    assert [(*A, "x")] == file_store.list_namespaces()

"""A put does not write data that a search can derive."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import PutOp

from perdure.errors import EmbedderMismatch
from perdure.stores import SQLiteStore
from tests.backends import KEY
from tests.store_backends import list_item_keys, make_options

A, B = ("a",), ("b",)
CAR, TEA, HIDDEN = {"text": "my car"}, {"text": "green tea"}, {"text": "a hidden car"}


def open_offline_store(path: Path, **options: Any) -> SQLiteStore:
    return SQLiteStore.open(path, synchronous="normal", **options)


def fill_store(store: SQLiteStore) -> None:
    store.batch([PutOp(A, "car", CAR), PutOp(A, "tea", TEA), PutOp(B, "car", CAR)])
    store.put(A, "hidden", HIDDEN, index=False)


def read_search_data(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT id, vectors IS NULL, fields FROM store_search_data").fetchall()


@pytest.mark.parametrize("key", [None, KEY])
def test_put_writes_no_search_row_unless_index_paths_are_given(
    key: bytes | None, tmp_path: Path
) -> None:
    """Neither the offline embedder nor word search needs a row; a put with index paths does."""
    with open_offline_store(tmp_path / "x.db", key=key) as store:
        fill_store(store)
        store.put(A, "own", {"title": "an automobile", "text": "tea"}, index=["title"])
        found_keys = list_item_keys(store.search(A, query="automobile", mode="semantic"))
    with open_offline_store(tmp_path / "words.db", index=None, key=key) as store:
        fill_store(store)
        by_words = list_item_keys(store.search(A, query="car"))

    assert read_search_data(tmp_path / "x.db") == [(5, 1, '["title"]')]
    assert read_search_data(tmp_path / "words.db") == []
    assert set(found_keys[:2]) == {"own", "car"}
    assert "hidden" not in found_keys
    assert by_words == ["car"]


def test_index_without_vectors_is_rebuilt_when_embedder_is_added(tmp_path: Path) -> None:
    """A store with an embedder rebuilds an index that was saved without vectors."""
    with open_offline_store(tmp_path / "x.db") as store:
        store.batch([PutOp(A, f"k{n}", {"text": f"my car {n}"}) for n in range(40)])
    for index, count in (
        (None, 0),
        ("offline", 40),
        (None, 0),
        ("offline", 40),
    ):
        with open_offline_store(tmp_path / "x.db", index=index) as store:
            results = store.search(A, query="automobile", limit=50)
            assert len(results) == count


def test_search_of_the_past_embeds_closed_versions(tmp_path: Path) -> None:
    """Closed versions are embedded on demand, except those that were put with index=False."""
    with open_offline_store(tmp_path / "x.db") as store:
        fill_store(store)
        last_put = store.get(A, "hidden")
        assert last_put is not None
        for key in ("car", "hidden"):
            store.put(A, key, TEA)
        now = list_item_keys(store.search(A, query="automobile", mode="semantic", limit=1))
        past = store.search(
            A, query="automobile", mode="semantic", as_of=last_put.valid_from, limit=9
        )

    assert now != []
    assert list_item_keys(past) == ["car", "tea"]


def test_reembed_switches_to_another_model_and_back(tmp_path: Path) -> None:
    """Vectors of two models are never mixed.

    After reembed() all items have vectors of the new model.
    """
    path = tmp_path / "x.db"
    with open_offline_store(path) as store:
        fill_store(store)
    with SQLiteStore.open(path, **make_options()) as store:
        with pytest.raises(EmbedderMismatch):
            store.put(A, "more", CAR)
        assert store.reembed() == 3
        assert store.stats().pending == 0
        assert list_item_keys(store.search(A, query="automobile", mode="semantic", limit=1)) == [
            "car"
        ]
    assert [bare for _, bare, _ in read_search_data(path)] == [0, 0, 0]
    with open_offline_store(path) as store:
        with pytest.raises(EmbedderMismatch):
            store.search(A, query="car")
        assert store.reembed() == 3
        assert store.stats().pending == 0
        assert list_item_keys(store.search(A, query="automobile", mode="semantic", limit=1)) == [
            "car"
        ]
        assert "hidden" not in list_item_keys(store.search(A, query="hidden car"))
    assert [bare for _, bare, _ in read_search_data(path)] == [1, 1, 1]


def test_item_put_without_embedder_is_pending_after_model_change(tmp_path: Path) -> None:
    """The file's model was replaced before, so the item has no vectors of the new model."""
    path = tmp_path / "x.db"
    with open_offline_store(path) as store:
        fill_store(store)
    with SQLiteStore.open(path, **make_options()) as store:
        store.reembed()
    with open_offline_store(path, index=None) as store:
        store.put(A, "late", CAR)
        store.put(A, "unsearched", CAR, index=False)
    with SQLiteStore.open(path, **make_options()) as store:
        assert store.stats().pending == 1
        assert store.reembed() == 1
        assert store.stats().pending == 0


def test_put_continues_versions_of_existing_and_deleted_keys(tmp_path: Path) -> None:
    """New keys are inserted without a lookup; existing and deleted keys continue their versions."""
    with open_offline_store(tmp_path / "x.db", index=None) as store:
        store.put(A, "deleted", {"n": 1})
        store.delete(A, "deleted")
        store.put(A, "there", {"n": 1})
        store.batch(
            [PutOp(A, key, {"n": 2}) for key in ("new", "there", "deleted")]
            + [PutOp(B, "new", {"n": 2}), PutOp(A, "absent", None)]
        )
        versions = {item.key: item.version for item in store.search(A)}
        stats = store.stats()
        lengths = [len(store.history(A, key)) for key in ("new", "there", "deleted")]

    assert versions == {"new": 1, "there": 2, "deleted": 2}
    assert (stats.items, stats.versions, stats.value_bytes) == (4, 2, 4 * len('{"n":2}'))
    assert lengths == [1, 2, 2]


def test_refused_batch_leaves_item_count_unchanged(tmp_path: Path) -> None:
    """A batch over max_items is refused and does not change the counts."""
    with open_offline_store(tmp_path / "x.db", index=None) as store:
        scope = store.scoped(A, max_items=2)
        scope.put(("x",), "one", {})
        with pytest.raises(Exception, match="would contain 3 items"):
            scope.batch([PutOp(("x",), key, {}) for key in ("one", "two", "three")])
        scope.batch([PutOp(("x",), key, {}) for key in ("one", "two")])

        assert store.stats().items == 2

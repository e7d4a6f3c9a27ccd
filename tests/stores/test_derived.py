"""What a put does not write because a search can find it out."""

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
from tests.store_backends import keys, of_words

A, B = ("a",), ("b",)
CAR, TEA, HIDDEN = {"text": "my car"}, {"text": "green tea"}, {"text": "a hidden car"}


def offline(path: Path, **options: Any) -> SQLiteStore:
    return SQLiteStore.open(path, synchronous="normal", **options)


def filled(store: SQLiteStore) -> None:
    store.batch([PutOp(A, "car", CAR), PutOp(A, "tea", TEA), PutOp(B, "car", CAR)])
    store.put(A, "hidden", HIDDEN, index=False)


def rows(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT id, vectors IS NULL, fields FROM store_search_data").fetchall()


@pytest.mark.parametrize("key", [None, KEY])
def test_a_put_writes_no_row_for_search(key: bytes | None, tmp_path: Path) -> None:
    """Neither with the offline table nor by words alone; an own path is recorded."""
    with offline(tmp_path / "x.db", key=key) as store:
        filled(store)
        store.put(A, "own", {"title": "an automobile", "text": "tea"}, index=["title"])
        found = keys(store.search(A, query="automobile", mode="semantic"))
    with offline(tmp_path / "words.db", index=None, key=key) as store:
        filled(store)
        by_words = keys(store.search(A, query="car"))

    assert rows(tmp_path / "x.db") == [(5, 1, '["title"]')]
    assert rows(tmp_path / "words.db") == []
    assert set(found[:2]) == {"own", "car"}
    assert "hidden" not in found
    assert by_words == ["car"]


def test_vectors_after_words_alone(tmp_path: Path) -> None:
    """An index that was kept without vectors is made anew by a store that makes them."""
    with offline(tmp_path / "x.db") as store:
        store.batch([PutOp(A, f"k{n}", {"text": f"my car {n}"}) for n in range(40)])
    for index, count in ((None, 0), ("offline", 40), (None, 0), ("offline", 40)):
        with offline(tmp_path / "x.db", index=index) as store:
            found = store.search(A, query="automobile", limit=50)
            assert len(found) == count


def test_the_past_is_searched(tmp_path: Path) -> None:
    """Closed versions have their vectors made too; those that were not searched are not."""
    with offline(tmp_path / "x.db") as store:
        filled(store)
        at = store.get(A, "hidden")
        assert at is not None
        for key in ("car", "hidden"):
            store.put(A, key, TEA)
        now = keys(store.search(A, query="automobile", mode="semantic", limit=1))
        past = store.search(A, query="automobile", mode="semantic", as_of=at.valid_from, limit=9)

    assert now != []
    assert keys(past) == ["car", "tea"]


def test_to_another_model_and_back(tmp_path: Path) -> None:
    """Until reembed() no vectors are mixed; after it all items have those of the new model."""
    path = tmp_path / "x.db"
    with offline(path) as store:
        filled(store)
    with SQLiteStore.open(path, **of_words()) as store:
        with pytest.raises(EmbedderMismatch):
            store.put(A, "more", CAR)
        assert store.reembed() == 3
        assert store.stats().pending == 0
        assert keys(store.search(A, query="automobile", mode="semantic", limit=1)) == ["car"]
    assert [bare for _, bare, _ in rows(path)] == [0, 0, 0]
    with offline(path) as store:
        with pytest.raises(EmbedderMismatch):
            store.search(A, query="car")
        assert store.reembed() == 3
        assert store.stats().pending == 0
        assert keys(store.search(A, query="automobile", mode="semantic", limit=1)) == ["car"]
        assert "hidden" not in keys(store.search(A, query="hidden car"))
    assert [bare for _, bare, _ in rows(path)] == [1, 1, 1]


def test_what_no_model_has_seen_is_pending(tmp_path: Path) -> None:
    """What was put by words alone into a file whose model was replaced has no vectors of it."""
    path = tmp_path / "x.db"
    with offline(path) as store:
        filled(store)
    with SQLiteStore.open(path, **of_words()) as store:
        store.reembed()
    with offline(path, index=None) as store:
        store.put(A, "late", CAR)
        store.put(A, "unsearched", CAR, index=False)
    with SQLiteStore.open(path, **of_words()) as store:
        assert store.stats().pending == 1
        assert store.reembed() == 1
        assert store.stats().pending == 0


def test_keys_that_were_there(tmp_path: Path) -> None:
    """New keys are added without looking; those that are there, or were, go on from there."""
    with offline(tmp_path / "x.db", index=None) as store:
        store.put(A, "deleted", {"n": 1})
        store.delete(A, "deleted")
        store.put(A, "there", {"n": 1})
        store.batch(
            [PutOp(A, key, {"n": 2}) for key in ("new", "there", "deleted")]
            + [PutOp(B, "new", {"n": 2}), PutOp(A, "absent", None)]
        )
        versions = {item.key: item.version for item in store.search(A)}
        held = store.stats()
        lengths = [len(store.history(A, key)) for key in ("new", "there", "deleted")]

    assert versions == {"new": 1, "there": 2, "deleted": 2}
    assert (held.items, held.versions, held.value_bytes) == (4, 2, 4 * len('{"n":2}'))
    assert lengths == [1, 2, 2]


def test_limits_count_what_is_added(tmp_path: Path) -> None:
    """A batch that is refused leaves the counts as they were."""
    with offline(tmp_path / "x.db", index=None) as store:
        scope = store.scoped(A, max_items=2)
        scope.put(("x",), "one", {})
        with pytest.raises(Exception, match="would contain 3 items"):
            scope.batch([PutOp(("x",), key, {}) for key in ("one", "two", "three")])
        scope.batch([PutOp(("x",), key, {}) for key in ("one", "two")])

        assert store.stats().items == 2

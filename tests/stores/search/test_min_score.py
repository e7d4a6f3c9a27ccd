"""`min_score`: items with too little relation to a query are not found."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import ConfigurationError
from perdure.settings import MIN_SCORE
from perdure.stores import Provenance, SQLiteStore
from tests.store_backends import ONE_CALL_MODE_PER_BACKEND, list_item_keys

A = ("a",)
BANANAS = {
    "breakfast": "I eat a banana every morning",
    "colour": "Bananas are yellow",
    "farm": "She grows bananas in Ecuador",
    "bread": "The banana bread was burnt",
}


def put_banana_texts(store: SQLiteStore, thread: str | None = None) -> None:
    for position, (key, text) in enumerate(BANANAS.items()):
        store.put(
            A, key, {"text": text}, provenance=Provenance(thread_id=thread, position=position)
        )


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize("thread", [None, "one"])
@pytest.mark.parametrize("mode", ["hybrid", "text", "semantic"])
def test_min_score_drops_unrelated_items_and_keeps_exact_match(
    mode: Any, thread: str | None, store: SQLiteStore
) -> None:
    """Unrelated items are dropped, even the nearest one.

    An item with the query's words is found.
    """
    put_banana_texts(store, thread)
    min_score = 0.2 if mode == "semantic" else MIN_SCORE
    physics = store.search(A, query="quantum chromodynamics", mode=mode, min_score=min_score)
    exact = store.search(A, query="Bananas are yellow", mode=mode, min_score=0.9)

    assert list_item_keys(physics) == []
    assert list_item_keys(exact)[:1] == ["colour"]


@ONE_CALL_MODE_PER_BACKEND
def test_min_score_applies_to_returned_scores(store: SQLiteStore) -> None:
    """The bound applies to the scores that a search returns, also on later pages."""
    put_banana_texts(store)

    def search_keys(**options: Any) -> list[str]:
        return list_item_keys(store.search(A, query="yellow bananas", mode="text", **options))

    best, second = (f.score for f in store.search(A, query="yellow bananas", mode="text", limit=2))
    assert best is not None
    assert second is not None
    assert best > second
    assert search_keys(min_score=second + 1e-6) == ["colour"]
    assert search_keys(min_score=second)[:2] == search_keys()[:2]
    assert search_keys(min_score=second, offset=1)[:1] == search_keys()[1:2]
    assert search_keys(min_score=0) == search_keys()
    assert search_keys(min_score=1) == []


def test_min_score_without_query_is_ignored(file_store: SQLiteStore) -> None:
    put_banana_texts(file_store)

    assert len(file_store.search(A, min_score=0.9)) == len(BANANAS)


@pytest.mark.parametrize(
    "min_score", ["0.5", True, float("nan"), float("inf"), pytest.param(10**400, id="large")]
)
def test_min_score_that_is_not_a_number_is_refused(min_score: Any, file_store: SQLiteStore) -> None:
    with pytest.raises(ConfigurationError, match=r"min_score is .*; expected a number"):
        file_store.search(A, query="tea", min_score=min_score)

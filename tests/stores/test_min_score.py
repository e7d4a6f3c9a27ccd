"""`min_score`: what has too little to do with a query is not found."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import ConfigurationError
from perdure.settings import MIN_SCORE
from perdure.stores import Provenance, SQLiteStore
from tests.store_backends import FEWER, keys

A = ("a",)
BANANAS = {
    "breakfast": "I eat a banana every morning",
    "colour": "Bananas are yellow",
    "farm": "She grows bananas in Ecuador",
    "bread": "The banana bread was burnt",
}


def fill(store: SQLiteStore, thread: str | None = None) -> None:
    for position, (key, text) in enumerate(BANANAS.items()):
        store.put(
            A, key, {"text": text}, provenance=Provenance(thread_id=thread, position=position)
        )


@FEWER
@pytest.mark.parametrize("thread", [None, "one"])
@pytest.mark.parametrize("mode", ["hybrid", "text", "semantic"])
def test_nothing_about_physics_among_bananas(
    mode: Any, thread: str | None, store: SQLiteStore
) -> None:
    """What only is the nearest there is found no more; what has the words of the query is."""
    fill(store, thread)
    least = 0.2 if mode == "semantic" else MIN_SCORE
    physics = store.search(A, query="quantum chromodynamics", mode=mode, min_score=least)
    exact = store.search(A, query="Bananas are yellow", mode=mode, min_score=0.9)

    assert keys(physics) == []
    assert keys(exact)[:1] == ["colour"]


@FEWER
def test_it_is_a_bound_of_the_score(store: SQLiteStore) -> None:
    """The scores that a search shows, of its first page and the next, are those it bounds."""
    fill(store)

    def found(**options: Any) -> list[str]:
        return keys(store.search(A, query="yellow bananas", mode="text", **options))

    best, second = (f.score for f in store.search(A, query="yellow bananas", mode="text", limit=2))
    assert best is not None
    assert second is not None
    assert best > second
    assert found(min_score=second + 1e-6) == ["colour"]
    assert found(min_score=second)[:2] == found()[:2]
    assert found(min_score=second, offset=1)[:1] == found()[1:2]
    assert found(min_score=0) == found()
    assert found(min_score=1) == []


def test_without_a_query_there_is_no_score(file_store: SQLiteStore) -> None:
    """Then all are listed."""
    fill(file_store)

    assert len(file_store.search(A, min_score=0.9)) == len(BANANAS)


@pytest.mark.parametrize(
    "wrong", ["0.5", True, float("nan"), float("inf"), pytest.param(10**400, id="large")]
)
def test_what_is_no_number_is_refused(wrong: Any, file_store: SQLiteStore) -> None:
    """With what was given."""
    with pytest.raises(ConfigurationError, match=r"min_score is .*; expected a number"):
        file_store.search(A, query="tea", min_score=wrong)

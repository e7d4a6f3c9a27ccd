"""The `during` option of a search ranks items from a time span first and changes nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.errors import ConfigurationError
from perdure.stores import Provenance, SQLiteStore, Weights
from tests.store_backends import ONE_CALL_MODE_PER_BACKEND, list_item_keys

A = ("a",)
START = datetime(2024, 5, 6, tzinfo=UTC)
WEEK = (START, START + timedelta(days=7))
MOMENTS = {
    "before": START - timedelta(seconds=1),
    "first": START,
    "last": WEEK[1] - timedelta(seconds=1),
    "after": WEEK[1],
}


def put_items_at_each_moment(store: SQLiteStore) -> None:
    """Put one item with the same text at each moment, and one without a time."""
    for key, moment in MOMENTS.items():
        store.put(A, key, {"text": "tea"}, provenance=Provenance(at=moment))
    store.put(A, "unknown", {"text": "tea"})


def test_search_ranks_items_from_the_span_first(store: SQLiteStore) -> None:
    """The span includes its start and excludes its end. Items from other times are still found."""
    put_items_at_each_moment(store)
    modes: list[Any] = ["hybrid", "text", "semantic"]
    for mode in modes:
        found_keys = list_item_keys(store.search(A, query="tea", mode=mode, during=WEEK))

        assert found_keys[:2] == ["last", "first"]
        assert found_keys[2:] == ["unknown", "after", "before"]


@ONE_CALL_MODE_PER_BACKEND
def test_span_contributes_date_part_of_score(store: SQLiteStore) -> None:
    """With a span, `date` weighs the span, and a date in the query's text is ignored."""
    put_items_at_each_moment(store)
    parts = {
        result.key: result.parts and result.parts["date"]
        for result in store.search(A, query="tea on 13 May 2024", during=WEEK, explain=True)
    }
    why = store.why_not(A, "before", query="tea", during=WEEK)

    assert {"first", "last"} == {key for key, part in parts.items() if part}
    assert why.rank == 3
    assert why.parts["date"] == 0
    of_words = store.why_not(A, "first", query="tea", during=WEEK).parts
    weights = Weights()

    assert of_words["date"] / weights.date == pytest.approx(of_words["text"] / (1 - weights.vector))


@ONE_CALL_MODE_PER_BACKEND
def test_span_has_no_effect_without_context_or_query(store: SQLiteStore) -> None:
    """Without context each item is ranked by itself; without a query there is no ranking."""
    put_items_at_each_moment(store)
    plain = store.search(A, query="tea", context=False, explain=True)
    results = store.search(A, query="tea", context=False, during=WEEK, explain=True)

    assert [(result.key, result.parts) for result in plain] == [
        (result.key, result.parts) for result in results
    ]
    assert list_item_keys(store.search(A)) == list_item_keys(store.search(A, during=WEEK))


WRONG: list[tuple[Any, str]] = [
    (START, "expected two datetimes"),
    ((START,), "expected two datetimes"),
    ((START, START), "pass the earlier datetime first"),
    (WEEK[::-1], "pass the earlier datetime first"),
    ((START, WEEK[1].replace(tzinfo=None)), "with a time zone"),
    (("2024-05-06", "2024-05-13"), "with a time zone"),
]


@pytest.mark.parametrize(("during", "expected_message"), WRONG, ids=repr)
def test_search_refuses_invalid_span(
    during: Any, expected_message: str, file_store: SQLiteStore
) -> None:
    """The error says which value was passed and what was expected."""
    with pytest.raises(ConfigurationError, match=expected_message):
        file_store.search(A, query="tea", during=during)
    with pytest.raises(ConfigurationError, match=expected_message):
        file_store.why_not(A, "first", query="tea", during=during)

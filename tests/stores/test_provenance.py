"""Provenance: stored, returned, used in filters, and used to rank search results."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from perdure.errors import ConfigurationError, InvalidFilter
from perdure.stores import Provenance, SQLiteStore
from tests.store_backends import Clock, list_item_keys

A = ("a",)
SAID = datetime(2024, 5, 1, 12, 30, 15, 123456, tzinfo=UTC)
WHOLE = Provenance(
    thread_id="t1",
    checkpoint_id="c1",
    message_ids=("m1", "m2"),
    actor="Caroline",
    trust="user",
    position=3,
    at=SAID,
)


def test_provenance_is_returned_with_each_version(store: SQLiteStore, clock: Clock) -> None:
    """Get, search, history and past reads return it, and each version has its own."""
    store.put(A, "k", {"text": "tea"}, provenance=WHOLE)
    past = clock.at()
    clock.forward()
    store.put(A, "k", {"text": "tea"}, provenance=Provenance(actor="Bob"))
    store.put(A, "none", {"text": "tea"})
    now, then = store.get(A, "k"), store.get(A, "k", as_of=past)
    none = store.get(A, "none")

    assert now is not None
    assert then is not None
    assert none is not None
    assert (WHOLE, Provenance(actor="Bob")) == (then.provenance, now.provenance)
    assert [WHOLE, Provenance(actor="Bob")] == [i.provenance for i in store.history(A, "k")]
    assert {Provenance(actor="Bob"), None} == {i.provenance for i in store.search(A, query="tea")}
    assert none.provenance is None


def test_search_filters_by_any_provenance_field(store: SQLiteStore, clock: Clock) -> None:
    """Provenance filters work with and without a query, for the present and for the past."""
    store.put(A, "whole", {"text": "tea"}, provenance=WHOLE)
    store.put(A, "other", {"text": "tea"}, provenance=Provenance(actor="Bob", position=7))
    store.put(A, "none", {"text": "tea"})
    filters: list[tuple[dict[str, Any], set[str]]] = [
        ({"thread_id": "t1"}, {"whole"}),
        ({"message_ids": {"$contains": "m2"}}, {"whole"}),
        ({"actor": {"$in": ["Bob", "Caroline"]}}, {"whole", "other"}),
        ({"position": {"$gt": 3}}, {"other"}),
        ({"at": {"$gte": "2024-05-01", "$lt": "2024-05-02"}}, {"whole"}),
        ({"thread_id": {"$exists": False}}, {"other", "none"}),
        ({"$or": [{"trust": "user"}, {"actor": "Bob"}]}, {"whole", "other"}),
        ({"actor": "' OR 1=1"}, set()),
    ]
    for provenance, expected in filters:
        for options in ({}, {"query": "tea"}, {"as_of": clock.at()}, {"filter": {"text": "tea"}}):
            results = store.search(A, provenance=provenance, **options)
            assert expected == set(list_item_keys(results)), (provenance, options)


@pytest.mark.parametrize(
    ("provenance", "expected_message"),
    [
        (
            {"thread": {"$ne": "keep"}},
            "unknown field 'thread'; did you mean 'thread_id'\\? Expected one of thread_id, ",
        ),
        ({"actr": "Ann"}, "unknown field 'actr'; did you mean 'actor'?"),
        (
            {"said": "x"},
            "unknown field 'said'; expected one of thread_id, .*, position, at, author$",
        ),
        ({"message.ids": "x"}, "unknown field 'message.ids'; "),
        ({"$or": [{"actor": "Ann"}, {"$not": {"who": "Bob"}}]}, r"filter\['\$or'\]\[1\].*'who'; "),
    ],
    ids=repr,
)
@pytest.mark.parametrize("cached", [False, True])
def test_provenance_filter_with_unknown_field_is_refused(
    provenance: dict[str, Any], expected_message: str, cached: bool, store: SQLiteStore
) -> None:
    """Every method that accepts such a filter refuses the field, and nothing is changed."""
    store.put(A, "k", {"text": "tea", "thread": "t"}, provenance=Provenance(thread_id="keep"))
    calls: list[Callable[[], object]] = [
        lambda: store.search(A, provenance=provenance),
        lambda: store.search(A, query="tea", provenance=provenance),
        lambda: store.why_not(A, "k", query="tea", provenance=provenance),
        lambda: store.forget(A, provenance=provenance),
        lambda: store.scoped(A).forget(provenance=provenance, dry_run=True),
    ]
    if cached:
        store.search(A, filter=provenance)  # a filter on values may contain any field name
    for call in calls:
        with pytest.raises(InvalidFilter, match=expected_message):
            call()

    assert list_item_keys(store.search(A)) == ["k"]


@pytest.mark.parametrize(
    "provenance",
    [{"message_ids[0]": "m"}, {"message_ids[*]": {"$in": ["m"]}}, {"at": {"$exists": False}}],
    ids=repr,
)
def test_provenance_filter_accepts_paths_into_fields(
    provenance: dict[str, Any], store: SQLiteStore
) -> None:
    store.put(A, "k", {}, provenance=Provenance("t", message_ids=("m",)))

    assert list_item_keys(store.search(A, provenance=provenance)) == ["k"]


def test_provenance_time_in_any_zone_is_the_same_moment(store: SQLiteStore) -> None:
    """Filters compare the time in UTC."""
    zone = timezone(timedelta(hours=5, minutes=30))
    store.put(A, "k", {}, provenance=Provenance(at=SAID.astimezone(zone)))
    item = store.get(A, "k")

    assert item is not None
    assert item.provenance is not None
    assert item.provenance.at == SAID
    assert list_item_keys(store.search(A, provenance={"at": SAID.isoformat()})) == ["k"]


def put_conversation(store: SQLiteStore) -> None:
    """Put a thread in which the answer shares no word with the question."""
    messages = [
        ("Bob", "Have you been to the mountains lately?"),
        ("Caroline", "Yes, we went up on Saturday"),
        ("Bob", "Let us talk about taxes"),
        ("Caroline", "I would rather not"),
    ]
    for position, (actor, text) in enumerate(messages):
        provenance = Provenance(thread_id="t", actor=actor, position=position, at=SAID)
        store.put(A, f"m{position}", {"text": text}, provenance=provenance)


def test_reply_is_found_by_words_of_its_neighbour_in_context(store: SQLiteStore) -> None:
    """With context=False only the message with the words is found."""
    put_conversation(store)
    options: dict[str, Any] = {"query": "mountains", "mode": "text"}

    assert list_item_keys(store.search(A, context=False, **options)) == ["m0"]
    assert {"m0", "m1"} <= set(list_item_keys(store.search(A, **options)))
    may = (datetime(2024, 5, 1, tzinfo=UTC), datetime(2024, 6, 1, tzinfo=UTC))
    for item in store.search(A, query="Did Caroline talk in May?", during=may, explain=True):
        assert item.parts is not None
        assert item.score == pytest.approx(sum(item.parts.values()), abs=1e-5)
        assert {"actor", "date", "neighbours", "thread"} <= set(item.parts)


def test_same_thread_id_in_other_namespace_is_another_thread(store: SQLiteStore) -> None:
    """Items of two namespaces are not neighbours, even if they have the same thread id."""
    store.put(("x",), "a", {"text": "mountains"}, provenance=Provenance("t", position=0))
    store.put(("y",), "b", {"text": "something"}, provenance=Provenance("t", position=1))

    assert list_item_keys(store.search((), query="mountains", mode="text")) == ["a"]


@pytest.mark.parametrize("at", [datetime.max, datetime.min], ids=str)
def test_search_during_span_works_with_extreme_times(at: datetime, store: SQLiteStore) -> None:
    """The earliest and the latest datetime do not break a search with `during`."""
    put_conversation(store)
    store.put(A, "far", {"text": "mountains"}, provenance=Provenance(at=at.replace(tzinfo=UTC)))
    first, last = (moment.replace(tzinfo=UTC) for moment in (datetime.min, datetime.max))
    for during in ((first, last), (first, SAID), (SAID, last)):
        assert "far" in list_item_keys(store.search(A, query="mountains", during=during))


INVALID_PROVENANCE: list[Any] = [
    {"thread_id": "t"},
    "t",
    Provenance(thread_id=["t"]),  # type: ignore[arg-type]
    Provenance(thread_id=7),  # type: ignore[arg-type]
    Provenance(actor="\ud800"),
    Provenance(message_ids="m1"),  # type: ignore[arg-type]
    Provenance(message_ids=("m1", 2)),  # type: ignore[arg-type]
    Provenance(message_ids=None),  # type: ignore[arg-type]
    Provenance(position="first"),  # type: ignore[arg-type]
    Provenance(position=True),
    Provenance(position=1.5),  # type: ignore[arg-type]
    Provenance(position=10**400),
    Provenance(at="2024-05-01"),  # type: ignore[arg-type]
    Provenance(at=SAID.replace(tzinfo=None)),
]


@pytest.mark.parametrize("provenance", INVALID_PROVENANCE, ids=lambda p: repr(p)[:60])
def test_put_refuses_invalid_provenance(provenance: Any, store: SQLiteStore) -> None:
    """A field of a wrong type is refused, nothing is written, and later searches work."""
    with pytest.raises(ConfigurationError):
        store.put(A, "k", {"text": "tea"}, provenance=provenance)

    assert store.search(A, query="tea") == []

"""Versions of items: history, reads of the past, compare-and-set, and retention."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.store.base import PutOp

from perdure.errors import ConfigurationError, VersionConflict
from perdure.stores import SQLiteStore, VersionRetention
from tests.store_backends import ONE_CALL_MODE_PER_BACKEND, Clock, list_item_keys

A = ("a",)
DAY = 86_400.0


def list_versions(store: SQLiteStore, key: str = "k") -> list[tuple[int, Any]]:
    return [(item.version, item.value.get("n")) for item in store.history(A, key)]


def test_history_contains_every_version_with_its_times(store: SQLiteStore, clock: Clock) -> None:
    """`created_at` is the same in all versions of an item."""
    times = [clock.at()]
    for n in range(1, 4):
        store.put(A, "k", {"n": n})
        times.append(clock.forward())
    history = store.history(A, "k")
    item = store.get(A, "k")

    assert [each.version for each in history] == [1, 2, 3]
    assert times[:3] == [each.valid_from for each in history]
    assert [*times[1:3], None] == [each.valid_to for each in history]
    assert [{"n": n} for n in (1, 2, 3)] == [each.value for each in history]
    assert item is not None
    assert (times[0], times[2], 3) == (item.created_at, item.updated_at, item.version)


def test_reads_as_of_a_moment_show_state_of_that_moment(store: SQLiteStore, clock: Clock) -> None:
    """Get, search, queries and listings return the state of that moment."""
    before = clock.at(1)
    store.put(A, "k", {"n": 1, "text": "green tea"})
    first = clock.at()
    clock.forward()
    store.put(A, "k", {"n": 2, "text": "black coffee"})
    store.put(("b",), "other", {"n": 9, "text": "tea too"})
    second = clock.at()
    clock.forward()
    store.delete(A, "k")
    third = clock.at()

    def read_state(when: Any) -> Any:
        item = store.get(A, "k", as_of=when)
        return (
            item.value["n"] if item else None,
            [(i.key, i.value["n"]) for i in store.search((), as_of=when)],
            list_item_keys(store.search((), query="tea", mode="text", as_of=when)),
            [i.value["n"] for i in store.search((), filter={"n": {"$lt": 3}}, as_of=when)],
            store.list_namespaces(as_of=when),
        )

    assert read_state(before) == (None, [], [], [], [])
    assert read_state(first) == (1, [("k", 1)], ["k"], [1], [A])
    assert read_state(second) == (2, [("k", 2), ("other", 9)], ["other"], [2], [A, ("b",)])
    assert read_state(third) == (None, [("other", 9)], ["other"], [], [("b",)])
    assert read_state(second) == (2, [("k", 2), ("other", 9)], ["other"], [2], [A, ("b",)])


def test_semantic_search_of_the_past_uses_vectors_of_closed_versions(
    store: SQLiteStore, clock: Clock
) -> None:
    store.put(A, "k", {"text": "my car"})
    store.put(A, "z", {"text": "some rain"})
    past = clock.at()
    clock.forward()
    store.put(A, "k", {"text": "my dog"})

    then = store.search(A, query="automobile", mode="semantic", as_of=past)
    now = store.search(A, query="automobile", mode="semantic")

    assert then[0].value == {"text": "my car"}
    assert then[0].score is not None
    assert then[0].score > 0
    assert not any(item.score for item in now)


def test_version_numbers_continue_after_delete(store: SQLiteStore, clock: Clock) -> None:
    """`created_at` is that of the new item, and reads between delete and put return None."""
    store.put(A, "k", {"n": 1})
    clock.forward()
    store.delete(A, "k")
    gone = clock.at()
    clock.forward()
    store.put(A, "k", {"n": 2})
    item = store.get(A, "k")

    assert list_versions(store) == [(1, 1), (2, 2)]
    assert item is not None
    assert clock.at() == item.created_at
    assert store.get(A, "k", as_of=gone) is None


def test_versions_keep_put_order_when_clock_steps_back(store: SQLiteStore, clock: Clock) -> None:
    store.put(A, "k", {"n": 1})
    clock.forward(-3600)
    store.put(A, "k", {"n": 2})
    store.put(A, "k", {"n": 3})
    history = store.history(A, "k")
    item = store.get(A, "k")

    assert item is not None
    assert item.value == {"n": 3}
    assert [each.version for each in history] == [1, 2, 3]
    assert all(each.valid_to is None or each.valid_from < each.valid_to for each in history)
    assert [each.valid_to for each in history[:-1]] == [each.valid_from for each in history[1:]]
    store.delete(A, "k")
    assert store.get(A, "k") is None
    store.put(A, "k", {"n": 4})
    assert list_versions(store) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_versions_put_at_same_moment_have_distinct_times(store: SQLiteStore) -> None:
    for n in range(5):
        store.put(A, "k", {"n": n})
    times = [each.valid_from for each in store.history(A, "k")]

    assert sorted(set(times)) == times
    assert len(times) == 5


# -- compare-and-set


def test_if_version_allows_put_and_delete_only_at_that_version(store: SQLiteStore) -> None:
    """The version 0 means that the item must not exist."""
    store.put(A, "k", {"n": 1}, if_version=0)
    store.put(A, "k", {"n": 2}, if_version=1)
    with pytest.raises(
        VersionConflict, match=r"item 'k' in \('a',\) is at version 2, but if_version is 1"
    ):
        store.put(A, "k", {"n": 3}, if_version=1)
    with pytest.raises(VersionConflict, match="at version 2"):
        store.put(A, "k", {"n": 3}, if_version=0)
    with pytest.raises(VersionConflict):
        store.delete(A, "k", if_version=1)
    with pytest.raises(VersionConflict, match="does not exist"):
        store.delete(A, "other", if_version=1)
    with pytest.raises(VersionConflict, match="does not exist"):
        store.put(("new",), "k", {}, if_version=5)

    assert list_versions(store) == [(1, 1), (2, 2)]
    assert store.list_namespaces() == [A]
    store.delete(A, "k", if_version=2)
    store.delete(A, "k", if_version=0)
    store.put(A, "k", {"n": 3}, if_version=0)
    assert list_versions(store) == [(1, 1), (2, 2), (3, 3)]


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize("version", [-1, "1", 1.0, True, [1]], ids=repr)
def test_put_and_delete_refuse_invalid_if_version(version: Any, store: SQLiteStore) -> None:
    """An if_version that is not an integer from 0 is refused, and nothing is written."""
    with pytest.raises(ConfigurationError, match="if_version"):
        store.put(A, "k", {}, if_version=version)
    with pytest.raises(ConfigurationError, match="if_version"):
        store.delete(A, "k", if_version=version)

    assert store.get(A, "k") is None


# -- retention


def fill_store(store: SQLiteStore, clock: Clock) -> None:
    """Put five daily versions of two keys, and delete one of the keys at the end."""
    for n in range(5):
        store.batch([PutOp(A, key, {"n": n, "text": f"tea {n}"}) for key in ("k", "gone")])
        clock.forward(DAY)
    store.delete(A, "gone")


@pytest.mark.parametrize(
    ("rule", "expected", "expected_of_deleted_key"),
    [
        (VersionRetention(last=0), [4], []),
        (VersionRetention(last=2), [2, 3, 4], [3, 4]),
        (VersionRetention(days=2.5), [2, 3, 4], [2, 3, 4]),
        (VersionRetention(last=1, days=2.5), [2, 3, 4], [2, 3, 4]),
        (VersionRetention(last=3, days=0), [1, 2, 3, 4], [2, 3, 4]),
        (VersionRetention(days=100), [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_retain_drops_closed_versions_that_no_rule_keeps(
    rule: VersionRetention,
    expected: list[int],
    expected_of_deleted_key: list[int],
    store: SQLiteStore,
    clock: Clock,
) -> None:
    """The present version always stays."""
    fill_store(store, clock)
    dropped = store.retain(rule)
    found_keys = list_item_keys(store.search(A, query="tea"))

    assert expected == [n for _, n in list_versions(store)]
    assert expected_of_deleted_key == [n for _, n in list_versions(store, "gone")]
    assert 10 - len(expected) - len(expected_of_deleted_key) == dropped
    assert found_keys == ["k"]
    assert store.retain(rule) == 0


def test_retain_with_prefix_affects_only_that_prefix(store: SQLiteStore) -> None:
    for namespace in (("a",), ("ab",), ("a", "b")):
        store.put(namespace, "k", {"n": 1})
        store.put(namespace, "k", {"n": 2})
    dropped = store.retain(VersionRetention(last=0), prefix=("a",))

    assert dropped == 2
    assert len(store.history(("ab",), "k")) == 2


def test_search_ignores_version_dropped_by_retain_since_last_search(store: SQLiteStore) -> None:
    """A version that was closed and dropped between two searches neither scores nor counts."""
    store.put(A, "k", {"text": "tea"})
    store.put(A, "z", {"text": "milk"})
    assert len(store.search(A, query="tea", mode="semantic")) == 2
    store.put(A, "k", {"text": "coffee"})
    store.retain(VersionRetention(last=0))
    why = store.why_not(A, "z", query="milk", mode="text")

    assert store.search(A, query="tea", mode="text") == []
    assert why.reason == "0 of 2 items score higher"


@pytest.mark.parametrize(
    "rule",
    [
        VersionRetention(),
        VersionRetention(last=-1),
        VersionRetention(days=-1),
        VersionRetention(days=float("nan")),
        VersionRetention(last="1"),  # type: ignore[arg-type]
        VersionRetention(last=True),
    ],
    ids=str,
)
def test_retain_refuses_invalid_rule(rule: VersionRetention, store: SQLiteStore) -> None:
    """A rule without a criterion, or with an invalid number, is refused."""
    store.put(A, "k", {"n": 1})
    store.put(A, "k", {"n": 2})
    with pytest.raises(ConfigurationError, match="retention"):
        store.retain(rule)

    assert len(store.history(A, "k")) == 2


@ONE_CALL_MODE_PER_BACKEND
@pytest.mark.parametrize("when", ["2026-01-01", 0, 1.5, True], ids=repr)
def test_reads_refuse_as_of_that_is_not_an_aware_datetime(
    when: Any, store: SQLiteStore, clock: Clock
) -> None:
    for moment in (when, clock.at().replace(tzinfo=None)):
        for call in (
            lambda moment=moment: store.get(A, "k", as_of=moment),
            lambda moment=moment: store.search(A, as_of=moment),
            lambda moment=moment: store.search(A, query="x", as_of=moment),
            lambda moment=moment: store.list_namespaces(as_of=moment),
        ):
            with pytest.raises(ConfigurationError, match="time"):
                call()

"""Versions: each put keeps the former one, `as_of` looks back, compare-and-swap, retention."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.store.base import PutOp

from perdure.errors import ConfigurationError, VersionConflict
from perdure.stores import SQLiteStore, VersionRetention
from tests.store_backends import FEWER, Clock, keys

A = ("a",)
DAY = 86_400.0


def versions(store: SQLiteStore, key: str = "k") -> list[tuple[int, Any]]:
    return [(item.version, item.value.get("n")) for item in store.history(A, key)]


def test_every_version_is_kept(store: SQLiteStore, clock: Clock) -> None:
    """History has each version with the time it was valid; created_at survives updates."""
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


def test_a_look_at_the_past(store: SQLiteStore, clock: Clock) -> None:
    """Get, search, query and list show any moment as it was, deleted items included."""
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

    def seen(when: Any) -> Any:
        item = store.get(A, "k", as_of=when)
        return (
            item.value["n"] if item else None,
            [(i.key, i.value["n"]) for i in store.search((), as_of=when)],
            keys(store.search((), query="tea", mode="text", as_of=when)),
            [i.value["n"] for i in store.search((), filter={"n": {"$lt": 3}}, as_of=when)],
            store.list_namespaces(as_of=when),
        )

    assert seen(before) == (None, [], [], [], [])
    assert seen(first) == (1, [("k", 1)], ["k"], [1], [A])
    assert seen(second) == (2, [("k", 2), ("other", 9)], ["other"], [2], [A, ("b",)])
    assert seen(third) == (None, [("other", 9)], ["other"], [], [("b",)])
    assert seen(second) == (2, [("k", 2), ("other", 9)], ["other"], [2], [A, ("b",)])


def test_a_semantic_look_at_the_past(store: SQLiteStore, clock: Clock) -> None:
    """Vectors of closed versions are searched as of their time."""
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


def test_delete_and_put_again(store: SQLiteStore, clock: Clock) -> None:
    """Versions count on over a deletion, with a gap in time; created_at is that of the new life."""
    store.put(A, "k", {"n": 1})
    clock.forward()
    store.delete(A, "k")
    gone = clock.at()
    clock.forward()
    store.put(A, "k", {"n": 2})
    item = store.get(A, "k")

    assert versions(store) == [(1, 1), (2, 2)]
    assert item is not None
    assert clock.at() == item.created_at
    assert store.get(A, "k", as_of=gone) is None


def test_a_clock_that_steps_back(store: SQLiteStore, clock: Clock) -> None:
    """Versions keep the order in which they were put; the present one is the last put."""
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
    assert versions(store) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_times_within_one_tick(store: SQLiteStore) -> None:
    """Puts at the very same moment are versions with distinct times."""
    for n in range(5):
        store.put(A, "k", {"n": n})
    times = [each.valid_from for each in store.history(A, "k")]

    assert sorted(set(times)) == times
    assert len(times) == 5


# -- compare and swap


def test_compare_and_swap(store: SQLiteStore) -> None:
    """A put or delete with if_version is done at that version only; 0 means: not there."""
    store.put(A, "k", {"n": 1}, if_version=0)
    store.put(A, "k", {"n": 2}, if_version=1)
    with pytest.raises(VersionConflict, match=r"'k' in \('a',\) is at version 2, not at 1"):
        store.put(A, "k", {"n": 3}, if_version=1)
    with pytest.raises(VersionConflict, match="at version 2"):
        store.put(A, "k", {"n": 3}, if_version=0)
    with pytest.raises(VersionConflict):
        store.delete(A, "k", if_version=1)
    with pytest.raises(VersionConflict, match="not there"):
        store.delete(A, "other", if_version=1)
    with pytest.raises(VersionConflict, match="not there"):
        store.put(("new",), "k", {}, if_version=5)

    assert versions(store) == [(1, 1), (2, 2)]
    assert store.list_namespaces() == [A]
    store.delete(A, "k", if_version=2)
    store.delete(A, "k", if_version=0)
    store.put(A, "k", {"n": 3}, if_version=0)
    assert versions(store) == [(1, 1), (2, 2), (3, 3)]


@FEWER
@pytest.mark.parametrize("version", [-1, "1", 1.0, True, [1]], ids=repr)
def test_versions_that_make_no_sense(version: Any, store: SQLiteStore) -> None:
    """An if_version that is no whole number is refused, and nothing is written."""
    with pytest.raises(ConfigurationError, match="if_version"):
        store.put(A, "k", {}, if_version=version)
    with pytest.raises(ConfigurationError, match="if_version"):
        store.delete(A, "k", if_version=version)

    assert store.get(A, "k") is None


# -- retention


def filled(store: SQLiteStore, clock: Clock) -> None:
    """Keys with five versions, a day each, one of them deleted at the end."""
    for n in range(5):
        store.batch([PutOp(A, key, {"n": n, "text": f"tea {n}"}) for key in ("k", "gone")])
        clock.forward(DAY)
    store.delete(A, "gone")


@pytest.mark.parametrize(
    ("rule", "kept", "kept_of_gone"),
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
def test_retention(
    rule: VersionRetention,
    kept: list[int],
    kept_of_gone: list[int],
    store: SQLiteStore,
    clock: Clock,
) -> None:
    """Closed versions that no rule keeps are dropped; the present one always stays."""
    filled(store, clock)
    dropped = store.retain(rule)
    found = keys(store.search(A, query="tea"))

    assert kept == [n for _, n in versions(store)]
    assert kept_of_gone == [n for _, n in versions(store, "gone")]
    assert 10 - len(kept) - len(kept_of_gone) == dropped
    assert found == ["k"]
    assert store.retain(rule) == 0


def test_retention_under_a_prefix(store: SQLiteStore) -> None:
    """Only what is under the prefix is touched."""
    for namespace in (("a",), ("ab",), ("a", "b")):
        store.put(namespace, "k", {"n": 1})
        store.put(namespace, "k", {"n": 2})
    dropped = store.retain(VersionRetention(last=0), prefix=("a",))

    assert dropped == 2
    assert len(store.history(("ab",), "k")) == 2


def test_retention_forgets_what_search_remembered(store: SQLiteStore) -> None:
    """A version that was closed and dropped between two searches scores nothing, nor counts."""
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
def test_retention_that_makes_no_sense(rule: VersionRetention, store: SQLiteStore) -> None:
    """A rule that keeps nothing in particular, or has a wrong number, is refused."""
    store.put(A, "k", {"n": 1})
    store.put(A, "k", {"n": 2})
    with pytest.raises(ConfigurationError, match="retention"):
        store.retain(rule)

    assert len(store.history(A, "k")) == 2


@FEWER
@pytest.mark.parametrize("when", ["2026-01-01", 0, 1.5, True], ids=repr)
def test_moments_that_make_no_sense(when: Any, store: SQLiteStore, clock: Clock) -> None:
    """A moment that is no datetime, or has no time zone, is refused."""
    for moment in (when, clock.at().replace(tzinfo=None)):
        for call in (
            lambda moment=moment: store.get(A, "k", as_of=moment),
            lambda moment=moment: store.search(A, as_of=moment),
            lambda moment=moment: store.search(A, query="x", as_of=moment),
            lambda moment=moment: store.list_namespaces(as_of=moment),
        ):
            with pytest.raises(ConfigurationError, match="time"):
                call()

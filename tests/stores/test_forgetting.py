"""`forget`: which keys are erased, what the receipt contains, and that no read finds them later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.errors import ConfigurationError, InvalidFilter, InvalidNamespace
from perdure.stores import SQLiteStore
from perdure.stores.store_parts import _parse_json_filter
from tests.store_backends import ONE_CALL_MODE_PER_BACKEND, Clock, list_item_keys
from tests.stores.erasing import (
    ALICE,
    BOB,
    DEEP,
    NEAR,
    SECRETS,
    Dense,
    fill_store,
    hash_values,
    open_dense_store,
)

KEYS_OF_ALICE = [
    (ALICE, key) for key in ("deleted", "expired", "pending", "unsearched", "versions")
]
EVERYTHING = sorted(
    [*KEYS_OF_ALICE, (DEEP, "deep"), (NEAR, "near")]
    + [(BOB, key) for key in ("other", "plain", "versions")]
)
# the arguments, the erased keys, and the counts of present versions, closed versions and messages
CHOICES: dict[str, tuple[dict[str, Any], list[Any], tuple[int, int, int]]] = {
    "prefix": ({"prefix": ALICE}, [*KEYS_OF_ALICE, (DEEP, "deep")], (5, 3, 5)),
    "deep prefix": ({"prefix": DEEP}, [(DEEP, "deep")], (1, 0, 0)),
    "all": ({"prefix": ()}, EVERYTHING, (9, 5, 6)),
    "nowhere": ({"prefix": ("u", "ali")}, [], (0, 0, 0)),
    "filter": (
        {"filter": {"n": 1}},
        [(ALICE, "versions"), (NEAR, "near"), (BOB, "other"), (BOB, "versions")],
        (4, 4, 4),
    ),
    "filter of a deleted one": ({"filter": {"n": {"$gt": 6}}}, [(ALICE, "deleted")], (0, 1, 2)),
    "provenance": (
        {"provenance": {"actor": "Eve"}},
        [(DEEP, "deep"), (BOB, "other")],
        (2, 0, 0),
    ),
    "message": (
        {"provenance": {"message_ids": {"$contains": "m0"}}},
        [(ALICE, "deleted"), (ALICE, "versions")],
        (1, 3, 4),
    ),
    "query": (
        {"query": "Horse, RUNNING!"},
        [(ALICE, "versions"), (DEEP, "deep"), (NEAR, "near")],
        (3, 2, 3),
    ),
    "query of what is unsearched": (
        {"query": SECRETS[5]},
        [(ALICE, "unsearched")],
        (1, 0, 0),
    ),
    "query of an old version": ({"query": SECRETS[0]}, [(ALICE, "versions")], (1, 2, 3)),
    "query that half fits": ({"query": f"horse {SECRETS[5]}"}, [], (0, 0, 0)),
    "key": ({"prefix": ALICE, "key": "versions"}, [(ALICE, "versions")], (1, 2, 3)),
    "key of a deleted one": (
        {"prefix": ALICE, "key": "deleted"},
        [(ALICE, "deleted")],
        (0, 1, 2),
    ),
    "key that is deeper": ({"prefix": ALICE, "key": "deep"}, [], (0, 0, 0)),
    "key of no prefix": ({"prefix": (), "key": "versions"}, [], (0, 0, 0)),
    "key and query": (
        {"prefix": ALICE, "key": "versions", "query": "tea"},
        [],
        (0, 0, 0),
    ),
    "prefix and query": ({"prefix": NEAR, "query": "horses"}, [(NEAR, "near")], (1, 0, 0)),
    "prefix and filter": ({"prefix": BOB, "filter": {"n": 0}}, [(BOB, "versions")], (1, 2, 1)),
    "filter and provenance": (
        {"filter": {"n": 1}, "provenance": {"thread_id": "t"}},
        [(ALICE, "versions"), (BOB, "other")],
        (2, 2, 3),
    ),
    "all four": (
        {
            "prefix": ("u",),
            "filter": {"n": 2},
            "provenance": {"thread_id": "b"},
            "query": "tea",
        },
        [(BOB, "versions")],
        (1, 2, 1),
    ),
}


def read_remaining_state(store: SQLiteStore, gone: list[Any]) -> Any:
    """Return everything that can be read about the keys that are not in `gone`."""
    lines = [line for line in store.export() if (tuple(line["namespace"]), line["key"]) not in gone]
    versions = {
        place: [(v.version, v.value, v.valid_from, v.valid_to) for v in store.history(*place)]
        for place in EVERYTHING
        if place not in gone
    }
    return lines, versions


@pytest.mark.parametrize("choice", CHOICES)
def test_forget_erases_matching_keys_and_keeps_others(
    choice: str, tmp_path: Path, clock: Clock
) -> None:
    """A key is erased whole if one version matches.

    A dry run counts the same and erases nothing.
    """
    arguments, gone, counts = CHOICES[choice]
    embedder = Dense()
    with open_dense_store("file", tmp_path, clock, embedder) as store:
        fill_store(store, clock, embedder)
        before = read_remaining_state(store, gone)
        dry_run_receipt = store.forget(**arguments, dry_run=True)
        after_dry_run = read_remaining_state(store, gone)
        receipt = store.forget(**arguments)
        after = read_remaining_state(store, gone)
        remaining_keys = sorted(
            {(tuple(line["namespace"]), line["key"]) for line in store.export()}
        )
        second_receipt = store.forget(**arguments)

    assert (sorted(gone), counts[:2]) == (
        list(receipt.keys),
        (receipt.items, receipt.versions),
    )
    assert (
        dry_run_receipt.items,
        dry_run_receipt.versions,
        dry_run_receipt.keys,
        dry_run_receipt.hashes,
    ) == (
        receipt.items,
        receipt.versions,
        receipt.keys,
        receipt.hashes,
    )
    assert counts[2] == dry_run_receipt.messages
    assert (dry_run_receipt.clean, receipt.clean) == (False, True)
    assert before == after_dry_run == after
    assert [place for place in EVERYTHING if place not in gone] == remaining_keys
    assert (
        second_receipt.items,
        second_receipt.versions,
        second_receipt.keys,
        second_receipt.hashes,
    ) == (0, 0, (), ())


@ONE_CALL_MODE_PER_BACKEND
def test_forget_receipt_lists_keys_threads_time_and_hashes(
    store: SQLiteStore, clock: Clock
) -> None:
    """The receipt contains a hash for every erased version."""
    fill_store(store, clock)
    receipt = store.forget(ALICE, query="horses")

    values = [{"text": f"{SECRETS[n]} horses were running", "n": n} for n in range(3)]
    assert hash_values(*values, {"text": "a horse runs"}) == receipt.hashes
    assert receipt.keys == ((ALICE, "versions"), (DEEP, "deep"))
    assert (("t",), clock.at(), True) == (receipt.threads, receipt.at, receipt.clean)


def test_no_read_finds_forgotten_items(store: SQLiteStore, clock: Clock) -> None:
    """No search, past search, history or listing returns an erased item.

    Other items keep their scores.
    """
    moments = [clock.at()]
    fill_store(store, clock)
    moments += [clock.at(seconds) for seconds in (0, 60, 121, 122, 123)]
    modes: list[Any] = ["hybrid", "text", "semantic"]

    def search_bob() -> Any:
        return [
            [(i.key, i.score) for i in store.search(BOB, query="tea horses", mode=mode, limit=99)]
            for mode in modes
        ]

    before = search_bob()
    store.search((), query=" ".join(SECRETS))
    store.forget(ALICE)
    results = [
        item
        for mode in modes
        for query in (*SECRETS, "horse", None)
        for item in store.search((), query=query, mode=mode, limit=99)
    ]
    past = [
        item
        for when in moments
        for query in (None, *SECRETS)
        for item in store.search((), query=query, as_of=when, limit=99)
    ]

    assert {BOB, NEAR} == {item.namespace for item in results}
    assert {BOB} == {item.namespace for item in past} - {NEAR}
    assert before == search_bob()
    assert [v for place in KEYS_OF_ALICE for v in store.history(*place)] == []
    assert [store.get(*place) for place in KEYS_OF_ALICE] == [None] * 5
    assert list({store.get(*place, as_of=t) for place in KEYS_OF_ALICE for t in moments}) == [None]
    assert store.list_namespaces() == [NEAR, BOB]
    assert store.list_namespaces(as_of=moments[4]) == [BOB]
    assert store.pending_embeddings() == []
    assert store.why_not(ALICE, "versions", query="horse").rank is None
    stats = store.stats()
    assert (stats.namespaces, stats.items, stats.versions, stats.pending) == (2, 4, 2, 0)


@ONE_CALL_MODE_PER_BACKEND
def test_forgotten_key_starts_again_at_version_one(store: SQLiteStore, clock: Clock) -> None:
    """A key that is put again has version 1, is found, and has no past."""
    fill_store(store, clock)
    before = clock.at()
    store.forget(ALICE)
    clock.forward()
    store.put(ALICE, "versions", {"text": "an otter"}, if_version=0)
    results = store.search(ALICE, query="otter")

    assert [("versions", 1, clock.at())] == [(i.key, i.version, i.created_at) for i in results]
    assert store.get(ALICE, "versions", as_of=before) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"filter": {}},
        {"query": ""},
        {"query": "!!! --"},
        {"query": 5},
        {"query": b"tea"},
        {"prefix": (), "query": "!!!"},
        {"prefix": (), "query": ""},
        {"prefix": (), "query": 0},
        {"prefix": (), "query": []},
        {"key": "k"},
        {"key": "k", "query": "tea"},
        {"threads": ["t"]},
        {"prefix": (), "threads": ["t"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_forget_refuses_missing_criteria_and_query_without_words(
    file_store: SQLiteStore, arguments: dict[str, Any], dry_run: bool
) -> None:
    """A call without criteria, or with a query without words, is refused and erases nothing."""
    file_store.put(ALICE, "k", {"text": "tea"})
    with pytest.raises(ConfigurationError):
        file_store.forget(**arguments, dry_run=dry_run)

    assert list_item_keys(file_store.search(())) == ["k"]


@pytest.mark.parametrize(
    ("arguments", "expected_error"),
    [
        ({"filter": {"n": {"$near": 1}}}, InvalidFilter),
        ({"filter": 5}, InvalidFilter),
        ({"provenance": {"actor": {"$gt": None}}}, InvalidFilter),
        ({"prefix": "alice"}, InvalidNamespace),
        ({"prefix": ("",)}, InvalidNamespace),
        ({"prefix": 0}, InvalidNamespace),
        ({"prefix": ""}, InvalidNamespace),
        ({"prefix": ALICE, "key": ""}, InvalidNamespace),
        ({"prefix": ALICE, "key": b"k"}, InvalidNamespace),
    ],
    ids=str,
)
def test_forget_refuses_invalid_filter_prefix_or_key(
    file_store: SQLiteStore, arguments: dict[str, Any], expected_error: type[Exception]
) -> None:
    """A wrong filter, prefix or key is refused, and nothing is erased."""
    file_store.put(ALICE, "k", {"text": "tea"})
    with pytest.raises(expected_error):
        file_store.forget(**arguments)

    assert list_item_keys(file_store.search(())) == ["k"]


def test_forget_clears_cached_query_vectors(tmp_path: Path, clock: Clock) -> None:
    """After `forget`, the vector of a query is computed again, because the cache was cleared."""
    embedder = Dense()
    with open_dense_store("file", tmp_path, clock, embedder) as store:
        store.put(BOB, "k", {"text": "tea"})
        store.put(ALICE, "k", {"text": "zorbaxing"})
        store.search((), query="zorbaxing")
        first_count = embedder.calls.count("zorbaxing")
        store.search((), query="zorbaxing")
        second_count = embedder.calls.count("zorbaxing")
        store.forget(ALICE)
        store.search((), query="zorbaxing")

    assert (first_count, first_count + 1) == (second_count, embedder.calls.count("zorbaxing"))


def test_dry_run_of_forget_does_not_cache_the_filter(file_store: SQLiteStore) -> None:
    """The filter may contain the very data that has to be erased."""
    before = _parse_json_filter.cache_info().currsize
    file_store.forget((), filter={"name": "Ann 7f3a"}, provenance={"actor": "u7"}, dry_run=True)

    assert before == _parse_json_filter.cache_info().currsize


def test_forget_in_scope_erases_only_items_of_the_scope(
    file_store: SQLiteStore, clock: Clock
) -> None:
    """The receipt contains namespaces relative to the scope and no threads."""
    fill_store(file_store, clock)
    scope = file_store.scoped(ALICE)
    key_receipt = scope.forget(("deep",), key="versions")
    receipt = scope.forget((), query="horse")
    rest_receipt = scope.forget(())

    assert key_receipt.keys == ()
    assert receipt.keys == (((), "versions"), (("deep",), "deep"))
    assert file_store.list_namespaces() == [NEAR, BOB]
    assert (rest_receipt.items, rest_receipt.versions) == (3, 1)

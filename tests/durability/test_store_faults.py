"""The N-th database call of every method of a store fails, for every N: all or nothing."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import GetOp, Op, PutOp, SearchOp

from perdure.stores import Provenance, SQLiteStore, VersionRetention
from tests.durability.test_faults import FAULTS, catch_error
from tests.store_backends import Clock, WordEmbedder, make_options, open_store

A = ("a",)
NOW = 1_700_000_000.0


def open_store_at(path: Path, now: float = NOW, **options: Any) -> SQLiteStore:
    return open_store(path, clock=Clock(now), **make_options(**options))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a file with items, versions, expired items, an index and an item without vectors."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    options = make_options()
    with open_store(path, clock=Clock(NOW - 3600), **options) as store:
        for n in range(4):
            for key in ("k0", "k1", "k2"):
                store.put(A, key, {"text": f"tea {n}", "n": n}, provenance=Provenance(actor="Bob"))
        for n in range(3):
            store.put(("mortal",), f"m{n}", {"text": "milk", "n": n}, ttl=10)
        store.create_index("n")
        options["index"]["embed"].failing = True
        store.put(A, "waits", {"text": "my car"})
        store.put(A, "unsearched", {"text": "tea"}, index=False)
    return path


def make_other_embedder() -> WordEmbedder:
    words = WordEmbedder()
    words.name = "other"
    return words


BATCH: list[Op] = [
    PutOp(A, "k0", {"text": "coffee"}),
    PutOp(A, "k1", None),
    PutOp(("new",), "k", {"text": "new"}),
    GetOp(A, "k2"),
    SearchOp(A, query="tea"),
]
METHODS: dict[str, Callable[[SQLiteStore], object]] = {
    "put": lambda store: store.put(A, "new", {"text": "tea"}, ttl=5),
    "put-replacing": lambda store: store.put(A, "k0", {"text": "coffee"}, if_version=4),
    "put-in-new-namespace": lambda store: store.put(("b", "c"), "k", {"text": "tea"}),
    "put-over-expired": lambda store: store.put(("mortal",), "m0", {"text": "x"}),
    "delete": lambda store: store.delete(A, "k1"),
    "batch": lambda store: store.batch(BATCH),
    "sweep": lambda store: store.sweep_ttl(),
    "retain": lambda store: store.retain(VersionRetention(last=1)),
    "create_index": lambda store: store.create_index("text"),
    "drop_index": lambda store: store.drop_index("n"),
    "embed_pending": lambda store: store.embed_pending(),
    "aput": lambda store: asyncio.run(store.aput(A, "k0", {"text": "coffee"})),
    "adelete": lambda store: asyncio.run(store.adelete(A, "k1")),
    "abatch": lambda store: asyncio.run(store.abatch(BATCH)),
}


def read_contents(path: Path) -> Any:
    """Return everything that the public methods read from a file."""
    with open_store_at(path, read_only=True) as store:
        spaces = store.list_namespaces(limit=1000)
        items = store.search((), limit=1000)
        places = {(item.namespace, item.key) for item in items}
        places |= {(A, f"k{n}") for n in range(4)} | {(("mortal",), f"m{n}") for n in range(3)}
        history = {
            place: [(v.version, v.value, v.valid_from, v.valid_to) for v in store.history(*place)]
            for place in sorted(places)
        }
        results = [
            [(item.namespace, item.key, item.score) for item in store.search((), query="tea car")]
            for _ in range(2)
        ]
        stats = store.stats()
        counts = (stats.items, stats.versions, stats.pending, stats.value_bytes, stats.indexes)
        return spaces, history, results, counts, store.pending_embeddings()


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("method", METHODS)
def test_failed_call_leaves_store_as_before_or_after_and_can_be_repeated(
    method: str, kind: str, template: Path, tmp_path: Path
) -> None:
    """The error is one of perdure's, and a second attempt succeeds."""
    make, expected, stride = FAULTS[kind]
    path = tmp_path / "x.db"
    shutil.copy(template, path)
    before = read_contents(path)
    with open_store_at(path) as store:
        METHODS[method](store)
    after = read_contents(path)
    assert before != after

    fault = make()
    for call in itertools.count(1, stride):
        path = tmp_path / f"{call}.db"
        shutil.copy(template, path)
        with open_store_at(path, connections=fault.connection_class()) as store:
            fault.arm(call)
            error = catch_error(lambda: METHODS[method](store))
            fault.disarm()
            if error is not None:
                assert isinstance(error, expected)
                assert error.__cause__ is fault.error
                state = read_contents(path)
                assert state in (before, after)
                if state == before:
                    METHODS[method](store)
        assert after == read_contents(path)
        if not fault.fired:
            break


READS: dict[str, Callable[[SQLiteStore], Any]] = {
    "get": lambda store: store.get(A, "k0"),
    "search": lambda store: store.search(A, filter={"n": 3}),
    "query": lambda store: store.search((), query="tea", filter={"n": {"$lt": 9}}),
    "past": lambda store: store.search(A, query="tea", as_of=Clock(NOW - 3599).at()),
    "list_namespaces": lambda store: store.list_namespaces(),
    "history": lambda store: store.history(A, "k0"),
    "why_not": lambda store: store.why_not(A, "k0", query="tea"),
}


def open_unread_store(backend: str, template: Path, folder: Path, **options: Any) -> SQLiteStore:
    """Open a filled store from which nothing was read yet."""
    if backend == "file":
        shutil.copy(template, folder / "read.db")
        return open_store_at(folder / "read.db", **options)
    store = open_store_at(Path(":memory:"), **options)
    store.batch([PutOp(A, f"k{n}", {"text": "tea", "n": n}) for n in range(9)])
    store.put(A, "unsearched", {"text": "tea"}, index=False)
    return store


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("backend", ["file", "memory"])
def test_read_after_a_failed_read_returns_correct_result(
    read: str, backend: str, template: Path, tmp_path: Path
) -> None:
    """Any database call of the failed read may raise."""
    with open_unread_store(backend, template, tmp_path) as store:
        expected = READS[read](store)
    fault = FAULTS["io"][0]()
    failed = 0
    for call in itertools.count(1):
        with open_unread_store(
            backend, template, tmp_path, connections=fault.connection_class()
        ) as store:
            fault.arm(call)
            error = catch_error(lambda: READS[read](store))
            fault.disarm()
            second_result, results = READS[read](store), store.search((), query="tea", limit=100)

        failed += error is not None
        assert expected == second_result
        assert len(results) == len({(item.namespace, item.key) for item in results})
        if not fault.fired:
            break

    assert failed

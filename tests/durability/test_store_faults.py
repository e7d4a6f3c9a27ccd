"""The database fails at its N-th call, for every N of every method of a store: all or nothing."""

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
from tests.durability.test_faults import FAULTS, attempt
from tests.store_backends import Clock, Words, of_words, open_store

A = ("a",)
NOW = 1_700_000_000.0


def opened(path: Path, now: float = NOW, **options: Any) -> SQLiteStore:
    return open_store(path, clock=Clock(now), **of_words(**options))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with items, versions, expired ones, an index, and one that waits for its vectors."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    options = of_words()
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


def renamed() -> Words:
    words = Words()
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


def dump(path: Path) -> Any:
    """All that a file holds, as the public methods tell it."""
    with opened(path, read_only=True) as store:
        spaces = store.list_namespaces(limit=1000)
        items = store.search((), limit=1000)
        places = {(item.namespace, item.key) for item in items}
        places |= {(A, f"k{n}") for n in range(4)} | {(("mortal",), f"m{n}") for n in range(3)}
        history = {
            place: [(v.version, v.value, v.valid_from, v.valid_to) for v in store.history(*place)]
            for place in sorted(places)
        }
        found = [
            [(item.namespace, item.key, item.score) for item in store.search((), query="tea car")]
            for _ in range(2)
        ]
        stats = store.stats()
        counts = (stats.items, stats.versions, stats.pending, stats.value_bytes, stats.indexes)
        return spaces, history, found, counts, store.pending_embeddings()


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("method", METHODS)
def test_failure_at_every_call(method: str, kind: str, template: Path, tmp_path: Path) -> None:
    """The file is as before or as after, the error is perdure's, and a second attempt succeeds."""
    make, expected, stride = FAULTS[kind]
    path = tmp_path / "x.db"
    shutil.copy(template, path)
    before = dump(path)
    with opened(path) as store:
        METHODS[method](store)
    after = dump(path)
    assert before != after

    fault = make()
    for call in itertools.count(1, stride):
        path = tmp_path / f"{call}.db"
        shutil.copy(template, path)
        with opened(path, connections=fault.factory()) as store:
            fault.arm(call)
            error = attempt(lambda: METHODS[method](store))
            fault.disarm()
            if error is not None:
                assert isinstance(error, expected)
                assert error.__cause__ is fault.error
                state = dump(path)
                assert state in (before, after)
                if state == before:
                    METHODS[method](store)
        assert after == dump(path)
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


def filled(backend: str, template: Path, folder: Path, **options: Any) -> SQLiteStore:
    """A store that was not yet read from."""
    if backend == "file":
        shutil.copy(template, folder / "read.db")
        return opened(folder / "read.db", **options)
    store = opened(Path(":memory:"), **options)
    store.batch([PutOp(A, f"k{n}", {"text": "tea", "n": n}) for n in range(9)])
    store.put(A, "unsearched", {"text": "tea"}, index=False)
    return store


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("backend", ["file", "memory"])
def test_a_failed_read_leaves_no_trace(
    read: str, backend: str, template: Path, tmp_path: Path
) -> None:
    """Whichever call of a read fails, the same store answers the next one as a sound one does."""
    with filled(backend, template, tmp_path) as store:
        expected = READS[read](store)
    fault = FAULTS["io"][0]()
    failed = 0
    for call in itertools.count(1):
        with filled(backend, template, tmp_path, connections=fault.factory()) as store:
            fault.arm(call)
            error = attempt(lambda: READS[read](store))
            fault.disarm()
            again, found = READS[read](store), store.search((), query="tea", limit=100)

        failed += error is not None
        assert expected == again
        assert len(found) == len({(item.namespace, item.key) for item in found})
        if not fault.fired:
            break

    assert failed

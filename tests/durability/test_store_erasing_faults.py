"""Erasing, importing and embedding that fail or are killed are completed when called again."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import perdure.stores.search.embeddings_backfill
from perdure.stores import SQLiteStore, transfer
from tests.durability.test_faults import FAULTS, catch_error
from tests.durability.test_kill_erasing import KillingConnection
from tests.durability.test_store_faults import make_other_embedder
from tests.store_backends import DIMS, Clock, WordEmbedder, make_options, open_store

A, B, WAITING = ("a",), ("b",), ("w",)
NOW = 1_700_000_000.0
SECRET = "zorbaxing"
PAGE = 2  # lines, or items, in one transaction
LINES = [
    json.dumps({"namespace": ["new"], "key": f"k{n}", "value": {"text": f"tea {n}"}})
    for n in range(5)
]


@dataclass(frozen=True)
class Work:
    """An operation that takes several transactions.

    Attributes:
        run: Runs the operation.
        done: SQL that counts how much is done.
        steps: The counts between the transactions.
        embedder: Creates the embedder of the store.
    """

    run: Callable[[SQLiteStore], object]
    done: str
    steps: tuple[int, ...]
    embedder: Callable[[], WordEmbedder] = WordEmbedder


_ERASED_COUNT_SQL = (
    "SELECT 7 - (SELECT count(*) FROM store_items JOIN store_namespaces USING (namespace_key) "
    "WHERE path = x'6100') - (SELECT count(*) FROM store_versions)"
)
WORKS = {
    "forget": Work(lambda store: store.forget(A), _ERASED_COUNT_SQL, (0, 7)),
    "forget-query": Work(lambda store: store.forget(query=SECRET), _ERASED_COUNT_SQL, (0, 7)),
    "aforget": Work(lambda store: asyncio.run(store.aforget(A)), _ERASED_COUNT_SQL, (0, 7)),
    "import_lines": Work(
        lambda store: store.import_lines(LINES),
        "SELECT count(*) FROM store_items JOIN store_namespaces USING (namespace_key) "
        "WHERE path = x'6e657700'",
        (0, 2, 4, 5),
    ),
    "embed_pending": Work(
        lambda store: store.embed_pending(),
        "SELECT 5 - count(*) FROM store_pending_embeddings",
        (0, 2, 4, 5),
    ),
    "reembed": Work(
        lambda store: store.reembed(),
        "SELECT count(*) FROM store_search_data JOIN store_items USING (id) WHERE model_number = 2",
        (0, 2, 4, 6, 8, 9),
        make_other_embedder,
    ),
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process few items in one transaction."""
    monkeypatch.setattr(transfer, "PAGE", PAGE)
    monkeypatch.setattr(perdure.stores.search.embeddings_backfill, "BATCH_SIZE", PAGE)


def open_store_with_embedder(path: Path, embedder: WordEmbedder, **options: Any) -> SQLiteStore:
    index = {"embed": embedder, "dims": DIMS}
    return open_store(path, clock=Clock(NOW), **make_options(index=index, **options))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a file with three keys to erase, one key to keep, and five items without vectors."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    words = WordEmbedder()
    with open_store_with_embedder(path, words) as store:
        for n in range(2):
            for key in ("k0", "k1", "k2"):
                store.put(A, key, {"text": f"{SECRET} {n}"})
        store.put(A, "deleted", {"text": SECRET})
        store.delete(A, "deleted")
        store.put(B, "keep", {"text": "milk and tea"})
        words.failing = True
        for n in range(5):
            store.put(WAITING, f"k{n}", {"text": f"my car {n}"})
    return path


def read_progress(path: Path, work: Work) -> int:
    """Return how much of an operation is done."""
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute(work.done).fetchone()[0])


def read_contents(path: Path, work: Work) -> Any:
    """Return everything in a file, and the results of some searches."""
    with open_store_with_embedder(path, work.embedder(), read_only=True) as store:
        modes: list[Any] = ["text", "semantic"]
        results = [
            [(i.namespace, i.key, i.score) for i in store.search((), query=query, mode=mode)]
            for mode in modes
            for query in (SECRET, "automobile", "tea")
        ]
        stats = store.stats()
        counts = stats.items, stats.versions, stats.pending, stats.value_bytes, stats.namespaces
        return list(store.export()), results, counts


def is_secret_erased(path: Path) -> bool:
    """Return whether no byte of the secret is left in a file or beside it."""
    files = b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
    return SECRET.encode() not in files


def run_without_fault(template: Path, folder: Path, work: Work) -> Any:
    """Run an operation without a fault, and return the resulting state."""
    path = folder / "sound.db"
    shutil.copy(template, path)
    with open_store_with_embedder(path, work.embedder()) as store:
        work.run(store)
    assert work.steps[-1] == read_progress(path, work)
    return read_contents(path, work)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", WORKS)
def test_failed_operation_stops_between_transactions_and_can_be_completed(
    name: str, kind: str, template: Path, tmp_path: Path
) -> None:
    """Each database call fails in turn, and the error is one of perdure's."""
    work, (make, expected, stride) = WORKS[name], FAULTS[kind]
    after = run_without_fault(template, tmp_path, work)
    fault = make()
    progress_values = set()
    for call in itertools.count(1, stride):
        path = tmp_path / f"{call}.db"
        shutil.copy(template, path)
        with open_store_with_embedder(
            path, work.embedder(), connections=fault.connection_class()
        ) as store:
            fault.arm(call)
            error = catch_error(lambda: work.run(store))
            fault.disarm()
            progress = read_progress(path, work)
            assert progress in work.steps
            if error is None:
                assert work.steps[-1] == progress
            else:
                assert isinstance(error, expected)
                assert error.__cause__ is fault.error
                progress_values.add(progress)
            work.run(store)
            assert ("forget" in name) <= is_secret_erased(path)
        assert after == read_contents(path, work)
        if not fault.fired:
            break

    assert progress_values >= set(work.steps[:-1] if kind == "io" else work.steps[:1])


def work_until_killed(path: Path, name: str, statement: int) -> None:
    """Run an operation until the process is killed."""
    transfer.PAGE = PAGE
    work = WORKS[name]
    with open_store_with_embedder(path, work.embedder(), connections=KillingConnection) as store:
        KillingConnection.statements_left = statement
        work.run(store)
        KillingConnection.statements_left = 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
@pytest.mark.parametrize(("name", "stride"), [("forget", 4), ("import_lines", 7)])
def test_killed_operation_can_be_completed_after_reopening(
    name: str, stride: int, template: Path, tmp_path: Path
) -> None:
    """The file is intact after kill -9, and opening it overwrites erased data."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["pytest", "perdure.stores", "tests.store_backends"])
    work = WORKS[name]
    after = run_without_fault(template, tmp_path, work)
    codes = []
    for statement in itertools.count(1, stride):
        path = tmp_path / f"{statement}.db"
        shutil.copy(template, path)
        process = context.Process(
            target=work_until_killed, args=(path, name, statement), daemon=True
        )
        process.start()
        process.join()
        codes.append(process.exitcode)
        process.close()
        progress = read_progress(path, work)
        assert progress in work.steps
        with open_store_with_embedder(path, work.embedder()) as store:
            assert is_secret_erased(path) is (name == "forget" and progress == work.steps[-1])
            work.run(store)
            assert is_secret_erased(path) is (name == "forget")
        assert after == read_contents(path, work)
        if codes[-1] == 0:
            break

    assert [-signal.SIGKILL] * (len(codes) - 1) + [0] == codes
    assert len(codes) > 3

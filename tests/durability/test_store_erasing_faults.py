"""Forgetting, importing, embedding that fail or are killed anywhere: called again, complete."""

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

import perdure.stores.missing
from perdure.stores import SQLiteStore, transfer
from tests.durability.test_faults import FAULTS, attempt
from tests.durability.test_kill_erasing import Doomed
from tests.durability.test_store_faults import renamed
from tests.store_backends import DIMS, Clock, Words, of_words, open_store

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
    """Something that takes several transactions.

    Attributes:
        run: Does it.
        done: SQL that counts how far it is.
        steps: The counts between its transactions.
        embedder: Of the store that does it.
    """

    run: Callable[[SQLiteStore], object]
    done: str
    steps: tuple[int, ...]
    embedder: Callable[[], Words] = Words


_LEFT = (
    "SELECT 7 - (SELECT count(*) FROM store_items JOIN store_namespaces USING (namespace_key) "
    "WHERE path = x'6100') - (SELECT count(*) FROM store_versions)"
)
WORKS = {
    "forget": Work(lambda store: store.forget(A), _LEFT, (0, 7)),
    "forget-query": Work(lambda store: store.forget(query=SECRET), _LEFT, (0, 7)),
    "aforget": Work(lambda store: asyncio.run(store.aforget(A)), _LEFT, (0, 7)),
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
        renamed,
    ),
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few items in one transaction."""
    monkeypatch.setattr(transfer, "PAGE", PAGE)
    monkeypatch.setattr(perdure.stores.missing, "BATCH_SIZE", PAGE)


def opened(path: Path, embedder: Words, **options: Any) -> SQLiteStore:
    index = {"embed": embedder, "dims": DIMS}
    return open_store(path, clock=Clock(NOW), **of_words(index=index, **options))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three keys to forget with versions of theirs, one to keep, five that wait for vectors."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    words = Words()
    with opened(path, words) as store:
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


def far(path: Path, work: Work) -> int:
    """How far a piece of work is."""
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute(work.done).fetchone()[0])


def dump(path: Path, work: Work) -> Any:
    """All that a file holds, and what is found in it."""
    with opened(path, work.embedder(), read_only=True) as store:
        modes: list[Any] = ["text", "semantic"]
        found = [
            [(i.namespace, i.key, i.score) for i in store.search((), query=query, mode=mode)]
            for mode in modes
            for query in (SECRET, "automobile", "tea")
        ]
        stats = store.stats()
        counts = stats.items, stats.versions, stats.pending, stats.value_bytes, stats.namespaces
        return list(store.export()), found, counts


def clean(path: Path) -> bool:
    """Whether no byte of the secret is in a file or beside it."""
    files = b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
    return SECRET.encode() not in files


def finished(template: Path, folder: Path, work: Work) -> Any:
    """What is there when nothing failed."""
    path = folder / "sound.db"
    shutil.copy(template, path)
    with opened(path, work.embedder()) as store:
        work.run(store)
    assert work.steps[-1] == far(path, work)
    return dump(path, work)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", WORKS)
def test_failure_at_every_call(name: str, kind: str, template: Path, tmp_path: Path) -> None:
    """It stops between two of its transactions with perdure's error; called again, it completes."""
    work, (make, expected, stride) = WORKS[name], FAULTS[kind]
    after = finished(template, tmp_path, work)
    fault = make()
    seen = set()
    for call in itertools.count(1, stride):
        path = tmp_path / f"{call}.db"
        shutil.copy(template, path)
        with opened(path, work.embedder(), connections=fault.factory()) as store:
            fault.arm(call)
            error = attempt(lambda: work.run(store))
            fault.disarm()
            reached = far(path, work)
            assert reached in work.steps
            if error is None:
                assert work.steps[-1] == reached
            else:
                assert isinstance(error, expected)
                assert error.__cause__ is fault.error
                seen.add(reached)
            work.run(store)
            assert ("forget" in name) <= clean(path)
        assert after == dump(path, work)
        if not fault.fired:
            break

    assert seen >= set(work.steps[:-1] if kind == "io" else work.steps[:1])


def victim(path: Path, name: str, statement: int) -> None:
    """Work until killed."""
    transfer.PAGE = PAGE
    work = WORKS[name]
    with opened(path, work.embedder(), connections=Doomed) as store:
        Doomed.left = statement
        work.run(store)
        Doomed.left = 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
@pytest.mark.parametrize(("name", "stride"), [("forget", 4), ("import_lines", 7)])
def test_killed(name: str, stride: int, template: Path, tmp_path: Path) -> None:
    """kill -9 within it: the file is whole, opening it scrubs what was erased, again completes."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["pytest", "perdure.stores", "tests.store_backends"])
    work = WORKS[name]
    after = finished(template, tmp_path, work)
    codes = []
    for statement in itertools.count(1, stride):
        path = tmp_path / f"{statement}.db"
        shutil.copy(template, path)
        process = context.Process(target=victim, args=(path, name, statement), daemon=True)
        process.start()
        process.join()
        codes.append(process.exitcode)
        process.close()
        reached = far(path, work)
        assert reached in work.steps
        with opened(path, work.embedder()) as store:
            assert clean(path) is (name == "forget" and reached == work.steps[-1])
            work.run(store)
            assert clean(path) is (name == "forget")
        assert after == dump(path, work)
        if codes[-1] == 0:
            break

    assert [-signal.SIGKILL] * (len(codes) - 1) + [0] == codes
    assert len(codes) > 3

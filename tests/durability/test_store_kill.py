"""kill -9 of a process that puts and deletes: acknowledged items are stored and searchable."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import PutOp

from perdure.stores import SQLiteStore
from tests.durability.processes import run_and_kill, run_integrity_check
from tests.rounds import rounds
from tests.store_backends import make_options

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

A = ("a",)
KEYS = 12
FILES, KILLS = rounds(4), 7


def open_store(path: Path) -> SQLiteStore:
    return SQLiteStore.open(path, **make_options(synchronous="full"))


def iter_random_batches(begin: int, chance: random.Random) -> Iterator[list[PutOp]]:
    """Yield batches of one put or delete, or of five."""
    for number in count(begin):
        size = chance.choice((1, 1, 1, 5))
        yield [
            PutOp(
                A,
                f"k{chance.randrange(KEYS)}",
                {"text": f"word{number}", "n": number} if chance.random() < 0.8 else None,
            )
            for _ in range(size)
        ]


def write_until_killed(path: Path, acks: Connection, door: str, begin: int) -> None:
    """Write batches until killed, and report the begin and the end of each batch."""
    acks.send("ready")
    chance = random.Random(begin)
    with open_store(path) as store, asyncio.Runner() as runner:
        for ops in iter_random_batches(begin, chance):
            acks.send(("begun", [(op.key, op.value) for op in ops]))
            if door == "async":
                runner.run(store.abatch(ops))
            else:
                store.batch(ops)
            acks.send(("done",))


def apply_batch(state: dict[str, Any], ops: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the state after a batch. Of several operations on a key the last counts."""
    after = {**state, **dict(ops)}
    return {key: value for key, value in after.items() if value is not None}


@pytest.mark.repeats
@pytest.mark.parametrize("door", ["sync", "async"])
def test_kill_loses_no_acknowledged_put_or_delete(door: str, tmp_path: Path) -> None:
    """The state is that after the last acknowledged batch, or that after the batch in progress."""
    chance = random.Random(door)
    acknowledged_count = 0
    for file in range(FILES):
        path = tmp_path / f"{file}.db"
        state: dict[str, Any] = {}
        for kill in range(KILLS):
            reports = run_and_kill(
                write_until_killed, (path, door, 1000 * kill), chance, early_share=0.3, max_acks=40
            )
            batches = [report[1] for report in reports if report[0] == "begun"]
            done_count = sum(report[0] == "done" for report in reports)
            for ops in batches[:done_count]:
                state = apply_batch(state, ops)
            allowed = [state, *(apply_batch(state, ops) for ops in batches[done_count:])]
            with open_store(path) as store:
                stored_values = {item.key: item.value for item in store.search(A, limit=100)}
                assert stored_values in allowed
                state = stored_values
                check_store(store, state)
            acknowledged_count += done_count

    assert acknowledged_count > 0


def check_store(store: SQLiteStore, state: dict[str, Any]) -> None:
    """Check that every item can be read and found by word and vector, and that versions are
    complete.
    """
    assert store.database.read(run_integrity_check) == [("ok",)]
    stats = store.stats()
    assert (len(state), 0) == (stats.items, stats.pending)
    assert store.list_namespaces() == ([A] if state else [])
    for key, value in state.items():
        item = store.get(A, key)
        assert item is not None
        assert value == item.value
        for mode in ("text", "semantic"):
            word = value["text"]
            hits = store.search(A, query=word, mode=mode, limit=100)
            assert key in {hit.key for hit in hits if hit.value["text"] == word and hit.score}
    for number in range(KEYS):
        history = store.history(A, f"k{number}")
        assert list(range(1, len(history) + 1)) == [item.version for item in history]
        assert all(item.valid_to is not None for item in history[:-1])

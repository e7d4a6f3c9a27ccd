"""kill -9 of a process that puts and deletes: what was acknowledged is there, and searchable."""

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
from tests.durability.processes import integrity, killed
from tests.rounds import rounds
from tests.store_backends import of_words

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

A = ("a",)
KEYS = 12
FILES, KILLS = rounds(4), 7


def opened(path: Path) -> SQLiteStore:
    return SQLiteStore.open(path, **of_words(synchronous="full"))


def operations(begin: int, chance: random.Random) -> Iterator[list[PutOp]]:
    """One after another: a put or a delete, or several that belong together."""
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


def victim(path: Path, acks: Connection, door: str, begin: int) -> None:
    """Work until killed, telling before and after each operation."""
    acks.send("ready")
    chance = random.Random(begin)
    with opened(path) as store, asyncio.Runner() as runner:
        for ops in operations(begin, chance):
            acks.send(("begun", [(op.key, op.value) for op in ops]))
            if door == "async":
                runner.run(store.abatch(ops))
            else:
                store.batch(ops)
            acks.send(("done",))


def applied(state: dict[str, Any], ops: list[tuple[str, Any]]) -> dict[str, Any]:
    """The state after a batch; of several operations on a key the last counts."""
    after = {**state, **dict(ops)}
    return {key: value for key, value in after.items() if value is not None}


@pytest.mark.repeats
@pytest.mark.parametrize("door", ["sync", "async"])
def test_kill_loses_nothing_acknowledged(door: str, tmp_path: Path) -> None:
    """The state is that after the last acknowledged batch, or that after the one begun."""
    chance = random.Random(door)
    told_of = 0
    for file in range(FILES):
        path = tmp_path / f"{file}.db"
        state: dict[str, Any] = {}
        for kill in range(KILLS):
            told = killed(victim, (path, door, 1000 * kill), chance, early=0.3, most=40)
            begun = [each[1] for each in told if each[0] == "begun"]
            done = sum(each[0] == "done" for each in told)
            for ops in begun[:done]:
                state = applied(state, ops)
            allowed = [state, *(applied(state, ops) for ops in begun[done:])]
            with opened(path) as store:
                found = {item.key: item.value for item in store.search(A, limit=100)}
                assert found in allowed
                state = found
                check(store, state)
            told_of += done

    assert told_of > 0


def check(store: SQLiteStore, state: dict[str, Any]) -> None:
    """What is there is whole: got, found by its word and its vector, its versions in a row."""
    assert store.database.read(integrity) == [("ok",)]
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

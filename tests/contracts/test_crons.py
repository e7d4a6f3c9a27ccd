"""Crons of the server as rows: which are due, and what reaches the words in them."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from perdure.checkpointers.crons import CronTable
from perdure.checkpointers.records import CronRow, Due, LiveRun, RunRow
from perdure.checkpointers.runs import RunTable
from perdure.storage.flow import rows_of
from tests.backends import BACKENDS
from tests.contracts.erased import SECRET, doomed, human, raw
from tests.contracts.test_runs import asked, of, put

Saver = Any  # a checkpointer of any kind


def made(
    saver: Saver, thread_id: str | None = "t", text: str = "hi", at: float | None = 5.0, **of: Any
) -> CronRow:
    content = {"payload": asked(text, **of)["request"], "metadata": {"owner": "ann"}}
    cron = CronRow(str(uuid4()), thread_id, at, time.time(), time.time(), content)
    assert asyncio.run(CronTable(saver).create(cron))
    return asyncio.run(CronTable(saver).get(cron.cron_id)) or cron


def crons(saver: Saver) -> list[CronRow]:
    return asyncio.run(CronTable(saver).all())


def begin(saver: Saver, due: Due) -> LiveRun | None:
    live = LiveRun("t", 0, 0, str(uuid4()), "pending", "me", "chat", 1, None)
    row = RunRow(live, 1.0, 1.0, {"metadata": {}}, request=asked("hi"))
    accepting = RunTable(saver).accept(row, rejects=False, cancels=None, due=due)
    return asyncio.run(accepting)[0]


@pytest.fixture
def talked(saver: Saver) -> Saver:
    """A thread with two messages."""
    put(saver, "t", [doomed, human("b")])
    return saver


def test_those_are_due_whose_time_has_come(talked: Saver) -> None:
    second, first = made(talked, at=6.0), made(talked, at=5.0)
    made(talked, at=None)
    made(talked, at=time.time() + 3600)

    assert asyncio.run(CronTable(talked).due()) == [first.cron_id, second.cron_id]


def test_a_run_is_begun_once_for_each_time(talked: Saver) -> None:
    """Of two processes that have read the same cron, one stores the run."""
    cron = made(talked)
    runs = [begin(talked, Due(cron, 1e12)) for _ in range(2)]

    assert [run is not None for run in runs] == [True, False]
    assert len(of(talked)) == 1
    assert [each.next_at for each in crons(talked)] == [1e12]


def test_a_cron_is_changed_with_its_time_or_without(talked: Saver) -> None:
    table, cron = CronTable(talked), made(talked)
    asyncio.run(table.advance(cron, 7.0))
    asyncio.run(table.advance(cron, 8.0))  # it is not due any more at that time
    changed = cron._replace(content={"payload": 1}, next_at=9.0)
    kept = asyncio.run(table.change(changed, timed=False))
    timed = asyncio.run(table.change(changed, timed=True))
    asyncio.run(table.delete(cron))

    assert kept is not None
    assert timed is not None
    assert (kept.next_at, kept.content, timed.next_at) == (7.0, {"payload": 1}, 9.0)
    assert asyncio.run(table.change(changed, timed=True)) is None
    assert crons(talked) == []


def test_a_cron_has_a_thread_that_is_there(talked: Saver) -> None:
    cron = CronRow("c", "nobody's", 5.0, 1.0, 1.0, {})

    assert not asyncio.run(CronTable(talked).create(cron))
    assert crons(talked) == []


@pytest.mark.parametrize("of", [{}, {"id": "a"}], ids=["text", "id"])
def test_a_cron_that_quotes_what_is_erased_is_deleted(talked: Saver, of: Any) -> None:
    made(talked, "t", SECRET, **of)
    other = made(talked)
    report = talked.erase("t", ["a"])

    assert report.crons == 1
    assert crons(talked) == [other]
    assert SECRET.encode() not in raw(talked)


@pytest.mark.parametrize("way", ["erase", "delete_thread"])
def test_crons_go_with_their_thread(talked: Saver, way: str) -> None:
    made(talked, "t", SECRET)
    made(talked, None, "for all")
    report = getattr(talked, way)("t")

    assert [cron.thread_id for cron in crons(talked)] == [None]
    if way == "erase":
        assert report.crons == 1
        assert SECRET.encode() not in raw(talked)


def test_a_thread_with_a_cron_is_not_idle(talked: Saver) -> None:
    now, cron = datetime.now(UTC), made(talked)
    kept = talked.delete_idle(now)
    asyncio.run(CronTable(talked).advance(cron, None))

    assert kept == []
    assert [info.thread_id for info in talked.delete_idle(now)] == ["t"]


@pytest.mark.parametrize("kind", ["sealed", "langgraph-encrypted", "postgres-sealed"])
def test_words_are_sealed(kind: str, tmp_path: Path) -> None:
    with BACKENDS[kind](tmp_path) as saver:
        cron = made(saver, None, SECRET)
        stored = str(saver.database.read(lambda: rows_of("SELECT * FROM crons")))

        assert cron.cron_id in stored
        assert SECRET not in stored
        assert SECRET in str(crons(saver))

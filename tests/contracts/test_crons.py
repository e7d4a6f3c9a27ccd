"""Crons and webhooks of the server as rows: which are due, and what reaches the words in them."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from perdure.checkpointers.crons import CronTable
from perdure.checkpointers.records import CronRow, DueCron, LiveRun, RunRow
from perdure.checkpointers.runs import RunTable
from perdure.checkpointers.webhooks import WebhookTable
from perdure.storage.flow import fetch_rows
from tests.backends import BACKENDS
from tests.contracts.erased import SECRET, doomed, human, raw
from tests.contracts.test_runs import accepted, asked, of, put

Saver = Any  # a checkpointer of any kind


def made(
    saver: Saver, thread_id: str | None = "t", text: str = "hi", at: float | None = 5.0, **of: Any
) -> CronRow:
    content = {"payload": asked(text, **of)["request"], "metadata": {"owner": "ann"}}
    cron = CronRow(str(uuid4()), thread_id, at, time.time(), time.time(), content)
    assert asyncio.run(CronTable(saver).create(cron))
    return asyncio.run(CronTable(saver).get(cron.cron_id)) or cron


def crons(saver: Saver) -> list[CronRow]:
    return asyncio.run(CronTable(saver).list_crons())


def begin(saver: Saver, due: DueCron) -> LiveRun | None:
    live = LiveRun("t", 0, 0, str(uuid4()), "pending", "me", "chat", 1, None)
    row = RunRow(live, 1.0, 1.0, {"metadata": {}}, request=asked("hi"))
    accepting = RunTable(saver).accept_run(
        row, reject_if_busy=False, cancel_action=None, due_cron=due
    )
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

    assert asyncio.run(CronTable(talked).list_due_ids()) == [first.cron_id, second.cron_id]


def test_a_run_is_begun_once_for_each_time(talked: Saver) -> None:
    """Of two processes that have read the same cron, one stores the run."""
    cron = made(talked)
    runs = [begin(talked, DueCron(cron, 1e12)) for _ in range(2)]

    assert [run is not None for run in runs] == [True, False]
    assert len(of(talked)) == 1
    assert [each.next_at for each in crons(talked)] == [1e12]


def test_a_cron_is_changed_with_its_time_or_without(talked: Saver) -> None:
    table, cron = CronTable(talked), made(talked)
    asyncio.run(table.advance_next_time(cron, 7.0))
    asyncio.run(table.advance_next_time(cron, 8.0))  # it is not due any more at that time
    changed = cron._replace(content={"payload": 1}, next_at=9.0)
    kept = asyncio.run(table.update(changed, sets_next_time=False))
    timed = asyncio.run(table.update(changed, sets_next_time=True))
    asyncio.run(table.delete(cron))

    assert kept is not None
    assert timed is not None
    assert (kept.next_at, kept.content, timed.next_at) == (7.0, {"payload": 1}, 9.0)
    assert asyncio.run(table.update(changed, sets_next_time=True)) is None
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


def told(saver: Saver, text: str, *, keeps_thread: bool = True) -> LiveRun:
    run = accepted(saver)
    content = {"url": "https://a.b/", "run": {"values": asked(text)["request"]["input"]}}
    asyncio.run(WebhookTable(saver).add(run, content, {}, keeps_thread=keeps_thread))
    asyncio.run(RunTable(saver).end_run(run, "success"))
    return run


def test_a_webhook_is_of_a_run_that_this_process_ends(talked: Saver) -> None:
    """It is tried once at a time, and due again after each pause."""
    table, run = WebhookTable(talked), told(talked, "hi")
    asyncio.run(table.add(run, {"late": True}, {}, keeps_thread=True))
    due = asyncio.run(table.list_due_run_ids(9))
    first = asyncio.run(table.claim_content_and_attempt_count(run.run_id, [0.0, 3600.0]))
    second = asyncio.run(table.claim_content_and_attempt_count(run.run_id, [0.0, 3600.0]))
    third = asyncio.run(table.claim_content_and_attempt_count(run.run_id, [0.0, 3600.0]))

    assert due == [run.run_id]
    assert first is not None
    assert second is not None
    assert (first[0]["url"], first[1], second[1], third) == ("https://a.b/", 0, 1, None)
    asyncio.run(table.delete(run.run_id))
    assert asyncio.run(table.list_due_run_ids(9)) == []


@pytest.mark.parametrize("way", [["t", ["a"]], ["t"]], ids=["a message", "its thread"])
def test_webhooks_that_quote_what_is_erased_are_not_sent(talked: Saver, way: list[Any]) -> None:
    told(talked, SECRET)
    kept = told(talked, "hi")
    talked.erase(*way)
    left = [] if way == ["t"] else [kept.run_id]

    assert asyncio.run(WebhookTable(talked).list_due_run_ids(9)) == left
    assert SECRET.encode() not in raw(talked)


def test_a_webhook_tells_nothing_of_a_thread_that_was_erased_from(talked: Saver) -> None:
    """A run that began before an erasure may hold what was erased."""
    run = accepted(talked)
    talked.erase("t", ["a"])
    table, bare = WebhookTable(talked), {"url": "https://a.b/", "run": {"values": None}}
    content = {**bare, "run": {"values": SECRET}}
    asyncio.run(table.add(run, content, bare, keeps_thread=True))
    told = asyncio.run(table.claim_content_and_attempt_count(run.run_id, [0.0]))

    assert told is not None
    assert told[0] == bare
    assert SECRET.encode() not in raw(talked)


def test_a_thread_with_a_cron_is_not_idle(talked: Saver) -> None:
    now, cron = datetime.now(UTC), made(talked)
    kept = talked.delete_idle(now)
    asyncio.run(CronTable(talked).advance_next_time(cron, None))

    assert kept == []
    assert [info.thread_id for info in talked.delete_idle(now)] == ["t"]


@pytest.mark.parametrize("kind", ["sealed", "langgraph-encrypted", "postgres-sealed"])
def test_words_are_sealed(kind: str, tmp_path: Path) -> None:
    with BACKENDS[kind](tmp_path) as saver:
        cron = made(saver, None, SECRET)
        put(saver, "t", [human("b")])
        run = told(saver, SECRET, keeps_thread=False)
        tables = []
        for sql in ("SELECT * FROM crons", "SELECT * FROM webhooks"):
            tables.append(str(saver.database.read(partial(fetch_rows, sql))))

        assert cron.cron_id in tables[0]
        assert run.run_id in tables[1]
        assert SECRET not in "".join(tables)
        assert SECRET in str(crons(saver))

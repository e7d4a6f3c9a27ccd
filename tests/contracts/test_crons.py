"""Crons and webhooks of the server in the database: which are due, and how erasing affects them."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from perdure.run_tables.crons import CronTable
from perdure.run_tables.records import CronRow, DueCron, LiveRun, RunRow
from perdure.run_tables.runs import RunTable
from perdure.run_tables.webhooks import WebhookTable
from perdure.storage.flow import fetch_rows
from tests.backends import BACKENDS
from tests.contracts.erased import SECRET, doomed_message, human_message, read_raw_bytes
from tests.contracts.test_runs import accept_run, list_run_rows, make_request, put_messages
from tests.server_tables import open_table

Saver = Any  # a checkpointer of any kind


def create_cron(
    saver: Saver,
    thread_id: str | None = "t",
    text: str = "hi",
    next_at: float | None = 5.0,
    **options: Any,
) -> CronRow:
    content = {"payload": make_request(text, **options)["request"], "metadata": {"owner": "ann"}}
    cron = CronRow(str(uuid4()), thread_id, next_at, time.time(), time.time(), content)
    assert asyncio.run(open_table(CronTable, saver).create(cron))
    return asyncio.run(open_table(CronTable, saver).get(cron.cron_id)) or cron


def list_crons(saver: Saver) -> list[CronRow]:
    return asyncio.run(open_table(CronTable, saver).list_crons())


def accept_due_run(saver: Saver, due: DueCron) -> LiveRun | None:
    live = LiveRun("t", 0, 0, str(uuid4()), "pending", "me", "chat", 1, None)
    row = RunRow(live, 1.0, 1.0, {"metadata": {}}, request=make_request("hi"))
    accepting = open_table(RunTable, saver).accept_run_and_list_live_run_ids(
        row, reject_if_busy=False, cancel_action=None, due_cron=due
    )
    return asyncio.run(accepting)[0]


@pytest.fixture
def filled_saver(saver: Saver) -> Saver:
    """A checkpointer with a thread of two messages."""
    put_messages(saver, "t", [doomed_message, human_message("b")])
    return saver


def test_list_due_ids_returns_crons_whose_time_has_come_earliest_first(filled_saver: Saver) -> None:
    second, first = create_cron(filled_saver, next_at=6.0), create_cron(filled_saver, next_at=5.0)
    create_cron(filled_saver, next_at=None)
    create_cron(filled_saver, next_at=time.time() + 3600)

    assert asyncio.run(open_table(CronTable, filled_saver).list_due_ids()) == [
        first.cron_id,
        second.cron_id,
    ]


def test_due_cron_starts_one_run_for_each_time(filled_saver: Saver) -> None:
    """Of two processes that have read the same cron, one stores the run."""
    cron = create_cron(filled_saver)
    runs = [accept_due_run(filled_saver, DueCron(cron, 1e12)) for _ in range(2)]

    assert [run is not None for run in runs] == [True, False]
    assert len(list_run_rows(filled_saver)) == 1
    assert [listed.next_at for listed in list_crons(filled_saver)] == [1e12]


def test_update_of_cron_sets_next_time_only_on_request(filled_saver: Saver) -> None:
    table, cron = open_table(CronTable, filled_saver), create_cron(filled_saver)
    asyncio.run(table.advance_next_time(cron, 7.0))
    # ignored, because the cron is no longer due at that time
    asyncio.run(table.advance_next_time(cron, 8.0))
    changed = cron._replace(content={"payload": 1}, next_at=9.0)
    update_without_time = asyncio.run(table.update(changed, sets_next_time=False))
    update_with_time = asyncio.run(table.update(changed, sets_next_time=True))
    asyncio.run(table.delete(cron))

    assert update_without_time is not None
    assert update_with_time is not None
    assert (update_without_time.next_at, update_without_time.content, update_with_time.next_at) == (
        7.0,
        {"payload": 1},
        9.0,
    )
    assert asyncio.run(table.update(changed, sets_next_time=True)) is None
    assert list_crons(filled_saver) == []


def test_cron_of_unknown_thread_is_not_created(filled_saver: Saver) -> None:
    cron = CronRow("c", "nobody's", 5.0, 1.0, 1.0, {})

    assert not asyncio.run(open_table(CronTable, filled_saver).create(cron))
    assert list_crons(filled_saver) == []


@pytest.mark.parametrize("options", [{}, {"id": "a"}], ids=["text", "id"])
def test_erase_deletes_crons_that_quote_erased_message(filled_saver: Saver, options: Any) -> None:
    create_cron(filled_saver, "t", SECRET, **options)
    other = create_cron(filled_saver)
    report = filled_saver.erase("t", ["a"])

    assert report.crons == 1
    assert list_crons(filled_saver) == [other]
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


@pytest.mark.parametrize("method", ["erase", "delete_thread"])
def test_crons_are_deleted_with_their_thread(filled_saver: Saver, method: str) -> None:
    create_cron(filled_saver, "t", SECRET)
    create_cron(filled_saver, None, "for all")
    report = getattr(filled_saver, method)("t")

    assert [cron.thread_id for cron in list_crons(filled_saver)] == [None]
    if method == "erase":
        assert report.crons == 1
        assert SECRET.encode() not in read_raw_bytes(filled_saver)


def end_run_with_webhook(saver: Saver, text: str, *, keeps_thread: bool = True) -> LiveRun:
    run = accept_run(saver)
    content = {"url": "https://a.b/", "run": {"values": make_request(text)["request"]["input"]}}
    asyncio.run(
        open_table(WebhookTable, saver).add_webhook(run, content, {}, keeps_thread=keeps_thread)
    )
    asyncio.run(open_table(RunTable, saver).end_run(run, "success"))
    return run


def test_webhook_is_added_once_and_retried_after_pauses(filled_saver: Saver) -> None:
    """A webhook cannot be added after its run has ended. Only one attempt is claimed at a time."""
    table, run = open_table(WebhookTable, filled_saver), end_run_with_webhook(filled_saver, "hi")
    asyncio.run(table.add_webhook(run, {"late": True}, {}, keeps_thread=True))
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


@pytest.mark.parametrize("arguments", [["t", ["a"]], ["t"]], ids=["a message", "its thread"])
def test_erase_deletes_webhooks_that_quote_erased_message(
    filled_saver: Saver, arguments: list[Any]
) -> None:
    end_run_with_webhook(filled_saver, SECRET)
    unrelated = end_run_with_webhook(filled_saver, "hi")
    filled_saver.erase(*arguments)
    expected = [] if arguments == ["t"] else [unrelated.run_id]

    assert asyncio.run(open_table(WebhookTable, filled_saver).list_due_run_ids(9)) == expected
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_webhook_omits_values_of_run_that_began_before_erasure(filled_saver: Saver) -> None:
    """The values of such a run may contain the erased message."""
    run = accept_run(filled_saver)
    filled_saver.erase("t", ["a"])
    table, content_without_values = (
        open_table(WebhookTable, filled_saver),
        {"url": "https://a.b/", "run": {"values": None}},
    )
    content = {**content_without_values, "run": {"values": SECRET}}
    asyncio.run(table.add_webhook(run, content, content_without_values, keeps_thread=True))
    attempt = asyncio.run(table.claim_content_and_attempt_count(run.run_id, [0.0]))

    assert attempt is not None
    assert attempt[0] == content_without_values
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_delete_idle_keeps_threads_with_scheduled_cron(filled_saver: Saver) -> None:
    now, cron = datetime.now(UTC), create_cron(filled_saver)
    deleted_with_cron = filled_saver.delete_idle(now)
    asyncio.run(open_table(CronTable, filled_saver).advance_next_time(cron, None))

    assert deleted_with_cron == []
    assert [info.thread_id for info in filled_saver.delete_idle(now)] == ["t"]


@pytest.mark.parametrize("kind", ["sealed", "langgraph-encrypted", "postgres-sealed"])
def test_crons_and_webhooks_are_stored_encrypted(kind: str, tmp_path: Path) -> None:
    with BACKENDS[kind](tmp_path) as saver:
        cron = create_cron(saver, None, SECRET)
        put_messages(saver, "t", [human_message("b")])
        run = end_run_with_webhook(saver, SECRET, keeps_thread=False)
        tables = []
        for sql in ("SELECT * FROM crons", "SELECT * FROM webhooks"):
            tables.append(str(saver.database.read(partial(fetch_rows, sql))))

        assert cron.cron_id in tables[0]
        assert run.run_id in tables[1]
        assert SECRET not in "".join(tables)
        assert SECRET in str(list_crons(saver))

"""Threads expire after a time without activity, on every backend."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.records import ClientMetadata
from perdure.run_tables.records import LiveRun, RunRow
from perdure.run_tables.runs import RunTable
from perdure.run_tables.thread_list import ThreadList, TimeToLive
from tests.contracts.puts import config_at, put
from tests.server_tables import open_table

DELETING_TTL, PRUNING_TTL = TimeToLive(10, False), TimeToLive(10, True)


@pytest.fixture
def threads(saver: SQLiteCheckpointer) -> ThreadList:
    return ThreadList(saver)


def advance_clock(monkeypatch: pytest.MonkeyPatch, minutes: float) -> None:
    now = time.time() + 60 * minutes
    monkeypatch.setattr(time, "time", lambda: now)


def put_steps(saver: SQLiteCheckpointer, thread_id: str, count: int) -> None:
    config: Any = None
    for number in range(count):
        config = put(saver, {"n": number}, config, thread=thread_id)


def accept_run(saver: SQLiteCheckpointer, thread_id: str, **options: Any) -> LiveRun:
    live = LiveRun(thread_id, 0, 0, "r", "pending", "me", "graph", 1, None)
    row = RunRow(live, 1.0, 1.0, {"metadata": {}}, request={}, **options)
    accepting = open_table(RunTable, saver).accept_run_and_list_live_run_ids(
        row, reject_if_busy=False, cancel_action=None
    )
    accepted, _ = asyncio.run(accepting)
    assert accepted is not None
    return accepted


def test_thread_is_deleted_after_its_ttl(
    saver: SQLiteCheckpointer, threads: ThreadList, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_steps(saver, "t", 2)
    put_steps(saver, "stays", 1)
    threads.create_thread_if_absent("empty", ClientMetadata({}))
    for thread_id in ("t", "empty"):
        threads.set_ttl(thread_id, DELETING_TTL)
    advance_clock(monkeypatch, 9)
    assert threads.list_expired_thread_ids(10) == []
    assert threads.delete_if_expired("t") is False

    advance_clock(monkeypatch, 11)
    assert sorted(threads.list_expired_thread_ids(10)) == ["empty", "t"]
    assert len(threads.list_expired_thread_ids(1)) == 1
    assert threads.delete_if_expired("t") is True
    assert threads.delete_if_expired("t") is False
    assert threads.get("t") is None
    assert threads.get("stays") is not None
    assert threads.list_expired_thread_ids(10) == ["empty"]


def test_ttl_begins_when_it_is_set(
    saver: SQLiteCheckpointer, threads: ThreadList, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_steps(saver, "t", 1)
    advance_clock(monkeypatch, 100)
    now = time.time()
    threads.set_ttl("t", DELETING_TTL)
    listed = threads.get("t")
    assert listed is not None
    assert listed.ttl == DELETING_TTL
    assert listed.expires_at is not None
    assert listed.expires_at.timestamp() == pytest.approx(now + 600, abs=1e-3)
    assert threads.delete_if_expired("t") is False


def test_pruning_ttl_keeps_newest_state_and_prunes_once(
    saver: SQLiteCheckpointer, threads: ThreadList, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_steps(saver, "t", 3)
    threads.set_ttl("t", PRUNING_TTL)
    advance_clock(monkeypatch, 11)

    assert threads.delete_if_expired("t") is True

    assert [stored.checkpoint["channel_values"] for stored in saver.list(config_at("t"))] == [
        {"n": 2}
    ]
    advance_clock(monkeypatch, 100)
    assert threads.list_expired_thread_ids(10) == []
    listed = threads.get("t")
    assert listed is not None
    assert listed.ttl == PRUNING_TTL


@pytest.mark.parametrize("not_before", [None, 2e10])
def test_thread_with_pending_run_does_not_expire(
    saver: SQLiteCheckpointer,
    threads: ThreadList,
    monkeypatch: pytest.MonkeyPatch,
    not_before: float | None,
) -> None:
    threads.create_thread_if_absent("t", ClientMetadata({}))
    threads.set_ttl("t", DELETING_TTL)
    accept_run(saver, "t", **({"not_before": not_before} if not_before else {}))
    advance_clock(monkeypatch, 11)

    assert threads.list_expired_thread_ids(10) == []
    assert threads.delete_if_expired("t") is False
    assert threads.get("t") is not None

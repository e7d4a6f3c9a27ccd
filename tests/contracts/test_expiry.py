"""Threads that stay for a time without activity, on every backend."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.records import ClientMetadata, LiveRun, RunRow
from perdure.checkpointers.runs import RunTable
from perdure.checkpointers.thread_list import ThreadList, TimeToLive
from tests.contracts.puts import config_at, put

DELETES, KEEPS = TimeToLive(10, False), TimeToLive(10, True)


@pytest.fixture
def threads(saver: SQLiteCheckpointer) -> ThreadList:
    return ThreadList(saver)


def later(monkeypatch: pytest.MonkeyPatch, minutes: float) -> None:
    now = time.time() + 60 * minutes
    monkeypatch.setattr(time, "time", lambda: now)


def steps(saver: SQLiteCheckpointer, thread_id: str, many: int) -> None:
    config: Any = None
    for number in range(many):
        config = put(saver, {"n": number}, config, thread=thread_id)


def accept(saver: SQLiteCheckpointer, thread_id: str, **more: Any) -> LiveRun:
    live = LiveRun(thread_id, 0, 0, "r", "pending", "me", "graph", 1, None)
    row = RunRow(live, 1.0, 1.0, {"metadata": {}}, request={}, **more)
    accepting = RunTable(saver).accept_run_and_list_live_run_ids(
        row, reject_if_busy=False, cancel_action=None
    )
    accepted, _ = asyncio.run(accepting)
    assert accepted is not None
    return accepted


def test_a_thread_goes_once_its_time_is_over(
    saver: SQLiteCheckpointer, threads: ThreadList, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(saver, "t", 2)
    steps(saver, "stays", 1)
    threads.create("empty", ClientMetadata({}))
    for thread_id in ("t", "empty"):
        threads.set_ttl(thread_id, DELETES)
    later(monkeypatch, 9)
    assert threads.list_expired(10) == []
    assert threads.delete_if_expired("t") is False

    later(monkeypatch, 11)
    assert sorted(threads.list_expired(10)) == ["empty", "t"]
    assert len(threads.list_expired(1)) == 1
    assert threads.delete_if_expired("t") is True
    assert threads.delete_if_expired("t") is False
    assert threads.get("t") is None
    assert threads.get("stays") is not None
    assert threads.list_expired(10) == ["empty"]


def test_time_begins_when_it_is_set_and_with_each_activity(
    saver: SQLiteCheckpointer, threads: ThreadList, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(saver, "t", 1)
    later(monkeypatch, 100)
    now = time.time()
    threads.set_ttl("t", DELETES)
    listed = threads.get("t")
    assert listed is not None
    assert listed.ttl == DELETES
    assert listed.expires_at is not None
    assert listed.expires_at.timestamp() == pytest.approx(now + 600, abs=1e-3)
    assert threads.delete_if_expired("t") is False


def test_the_newest_state_may_stay_and_is_pruned_once(
    saver: SQLiteCheckpointer, threads: ThreadList, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(saver, "t", 3)
    threads.set_ttl("t", KEEPS)
    later(monkeypatch, 11)

    assert threads.delete_if_expired("t") is True

    assert [each.checkpoint["channel_values"] for each in saver.list(config_at("t"))] == [{"n": 2}]
    later(monkeypatch, 100)
    assert threads.list_expired(10) == []
    listed = threads.get("t")
    assert listed is not None
    assert listed.ttl == KEEPS


@pytest.mark.parametrize("not_before", [None, 2e10])
def test_a_thread_with_a_run_stays(
    saver: SQLiteCheckpointer,
    threads: ThreadList,
    monkeypatch: pytest.MonkeyPatch,
    not_before: float | None,
) -> None:
    threads.create("t", ClientMetadata({}))
    threads.set_ttl("t", DELETES)
    accept(saver, "t", **({"not_before": not_before} if not_before else {}))
    later(monkeypatch, 11)

    assert threads.list_expired(10) == []
    assert threads.delete_if_expired("t") is False
    assert threads.get("t") is not None

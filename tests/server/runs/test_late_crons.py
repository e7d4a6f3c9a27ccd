"""Due times of crons that a wrong clock has computed, and clocks that differ a little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from benchmarks.server_faults import database
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.checkpointers import open_checkpointer
from perdure.run_tables.crons import CronTable
from perdure.run_tables.records import CronRow
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests import postgres_server
from tests.server.running import run_server, wait_until
from tests.server.talking import build_identity_graph, build_input
from tests.server_tables import open_table

DAY_S = 86_400


@pytest.fixture(params=["file", "postgres"])
def db(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Settings]:
    """Return the settings of a server on a file or on Postgres."""
    if request.param == "file":
        yield settings
        return
    with database(postgres_server.dsn()) as dsn:
        yield replace(settings, db=dsn)


@pytest.fixture
def sdk(db: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncLangGraphClient]:
    """Return the client of a server that checks due times in every sweep."""
    monkeypatch.setattr("perdure.server.runs.schedule.DUE_CHECK_S", 0)
    with (
        run_server(create_app(db, graphs=Graphs({"who": build_identity_graph()}))) as url,
        get_sync_client(url=url) as client,
    ):
        client.threads.create(thread_id="t")
        yield client


def create_cron(sdk: SyncLangGraphClient, schedule: str, **options: Any) -> str:
    cron: Any = sdk.crons.create_for_thread(
        "t", "who", schedule=schedule, input=build_input("wake"), **options
    )
    return str(cron["cron_id"])


def read_cron(db: Settings, cron_id: str) -> CronRow:
    with open_checkpointer(db.db) as saver:
        cron = asyncio.run(open_table(CronTable, saver).get(cron_id))
    assert cron is not None
    return cron


def set_due(db: Settings, cron_id: str, at: float | None) -> None:
    with open_checkpointer(db.db) as saver:
        table = open_table(CronTable, saver)
        cron = asyncio.run(table.get(cron_id))
        assert cron is not None
        asyncio.run(table.advance_next_time(cron, at))


def schedule_in(minutes: int, zone: Any = UTC) -> tuple[str, float]:
    """Return a daily schedule whose next time is in some minutes, and that time."""
    at = (datetime.now(zone) + timedelta(minutes=minutes)).replace(second=0, microsecond=0)
    return f"{at.minute} {at.hour} * * *", at.timestamp()


@pytest.mark.parametrize("late_s", [3600, 30 * DAY_S, 10 * 365 * DAY_S])
def test_due_time_that_is_too_late_is_corrected(
    sdk: SyncLangGraphClient, db: Settings, late_s: int
) -> None:
    schedule, at = schedule_in(30)
    cron_id = create_cron(sdk, schedule)
    set_due(db, cron_id, at + late_s)

    wait_until(lambda: read_cron(db, cron_id).next_at == at)


def test_cron_ended_by_fast_clock_is_due_again(sdk: SyncLangGraphClient, db: Settings) -> None:
    schedule, at = schedule_in(30)
    cron_id = create_cron(sdk, schedule, end_time=datetime.now(UTC) + timedelta(days=3))
    set_due(db, cron_id, None)

    wait_until(lambda: read_cron(db, cron_id).next_at == at)


def test_cron_run_early_by_fast_clock_does_not_run_again(
    sdk: SyncLangGraphClient, db: Settings
) -> None:
    """A server whose clock is three minutes ahead has begun the run of today."""
    schedule, at = schedule_in(3)
    cron_id = create_cron(sdk, schedule)
    set_due(db, cron_id, at + DAY_S)
    time.sleep(1.7)  # at least two sweeps

    assert read_cron(db, cron_id).next_at == at + DAY_S


def test_damaged_cron_does_not_stop_other_crons(sdk: SyncLangGraphClient, db: Settings) -> None:
    """The check of due times and the runs of other crons continue."""
    damaged, late, due = (create_cron(sdk, "0 0 1 1 *") for _ in range(3))
    with open_checkpointer(db.db) as saver:
        table = open_table(CronTable, saver)
        asyncio.run(table._write_cron(read_cron(db, damaged), "drop_cron", damaged))
        broken = read_cron(db, late)._replace(cron_id=damaged)
        broken.content["payload"]["timezone"] = "Mars/Olympus"
        asyncio.run(table.create(broken))
    right = read_cron(db, late).next_at
    assert right is not None
    set_due(db, late, right + 5 * 365 * DAY_S)
    set_due(db, due, time.time() - 1)

    wait_until(lambda: read_cron(db, late).next_at == right)
    wait_until(lambda: len(sdk.runs.list("t")) == 1)


@pytest.mark.parametrize("change", ["disable", "delete", "begin"])
def test_due_time_of_cron_changed_meanwhile_is_not_reset(db: Settings, change: str) -> None:
    now = time.time()
    content = {"payload": {"schedule": "@daily"}}
    cron = CronRow("c", None, None, now, now, content)
    with open_checkpointer(db.db) as saver:
        table = open_table(CronTable, saver)
        assert asyncio.run(table.create(cron))
        if change == "disable":
            asyncio.run(table.update(cron, sets_next_time=True))
        elif change == "delete":
            asyncio.run(table.delete(cron))
        else:
            assert asyncio.run(table.reset_next_time(cron, now + 60))
        before = asyncio.run(table.get("c"))

        assert not asyncio.run(table.reset_next_time(cron, now + 5))
        assert asyncio.run(table.get("c")) == before

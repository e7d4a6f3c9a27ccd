"""Rows of the server follow the threads of their database, also in a process without a server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from perdure import people
from perdure.checkpointers import (
    PostgresCheckpointer,
    Retention,
    SQLiteCheckpointer,
    open_checkpointer,
)
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.run_tables.assistants import AssistantTable
from perdure.run_tables.crons import CronTable
from perdure.run_tables.records import CronRow, LiveRun, RunRow
from perdure.run_tables.runs import EventBatch, RunTable
from perdure.run_tables.webhooks import WebhookTable
from perdure.stores import SQLiteStore
from tests import postgres_server
from tests.cli.commands import run as run_command
from tests.contracts import puts
from tests.contracts.erased import (
    SECRET,
    doomed_message,
    human_message,
    read_raw_bytes,
    render_thread,
)
from tests.people import accept_run, empty_database
from tests.server_tables import open_table

THREAD = "t"
OTHER = "other"
KEPT = "the lighthouse keeper's lamp burns at seven"


class ServerRows(NamedTuple):
    """What the server's tables contain, for comparison.

    Attributes:
        runs: The statuses of the runs of each thread, oldest first.
        events: The number of stored events of each thread.
        crons: The thread ids of all crons, None for a cron without a thread.
        webhooks: The number of webhooks that are due.
        assistants: The ids of all assistants.
    """

    runs: dict[str, list[str]]
    events: dict[str, int]
    crons: list[str | None]
    webhooks: int
    assistants: list[str]


@pytest.fixture(params=["file", "postgres", pytest.param("tenant", marks=pytest.mark.postgres)])
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Checkpointer]:
    """Yield a checkpointer whose database has rows in each table of the server.

    Another tenant has the same rows. These must be unchanged after the test.
    """
    if request.param != "tenant":
        with (
            empty_database(request.param, tmp_path, "server") as db,
            open_checkpointer(db) as opened,
        ):
            fill(opened)
            yield opened
        return
    dsn, schema = postgres_server.dsn_of_role("an_owner"), postgres_server.schema_name(tmp_path)
    other: Any
    with (
        PostgresCheckpointer.open(dsn, schema=schema, tenant="globex") as other,
        PostgresCheckpointer.open(dsn, schema=schema, tenant="acme") as opened,
    ):
        fill(other)
        fill(opened)
        yield opened
        assert read_rows(other) == FILLED
        assert SECRET in render_thread(other, THREAD)


def fill(saver: Any) -> None:
    """Store two threads with a run, events, a webhook and a cron each, and further rows.

    The rows of the thread `THREAD` quote a message that can be erased.
    """
    for thread_id, user, message in (
        (THREAD, "wilhelmina", doomed_message),
        (OTHER, "kim", human_message("b", KEPT)),
    ):
        metadata = {"user_id": user}
        puts.put(saver, {"messages": [message]}, thread=thread_id, metadata=metadata)
        run = accept_run(saver, user, thread_id)
        table = open_table(RunTable, saver)
        text = str(message.content)
        events = EventBatch(0, 1, [(None, text.encode())])
        asyncio.run(table.add_events([(run, events)]))
        accept_quoting_run(saver, user, thread_id, text)
        webhook = {"url": "https://example.com", "run": {"values": text}}
        asyncio.run(
            open_table(WebhookTable, saver).add_webhook(run, webhook, webhook, keeps_thread=True)
        )
        asyncio.run(open_table(CronTable, saver).create(build_cron(user, thread_id, text)))
    asyncio.run(open_table(CronTable, saver).create(build_cron("kim", None, KEPT)))
    content = {"graph_id": "echo", "config": {}, "context": {}, "metadata": {"note": KEPT}}
    asyncio.run(open_table(AssistantTable, saver).create("helper", content))


def accept_quoting_run(saver: Any, user: str, thread_id: str, text: str) -> None:
    """Store a delayed run whose input is a text."""
    live = LiveRun(thread_id, 0, 0, str(uuid4()), "pending", "gone", "echo", 1, None)
    details = {"metadata": {}, "multitask_strategy": "enqueue", "user": user}
    request = {"request": {"input": {"messages": [{"role": "user", "content": text}]}}}
    now = time.time()
    row = RunRow(live, now, now, details, request=request, not_before=now + 3600)
    asyncio.run(
        open_table(RunTable, saver).accept_run_and_list_live_run_ids(
            row, reject_if_busy=False, cancel_action=None, stores_events=False
        )
    )


def build_cron(user: str, thread_id: str | None, text: str) -> CronRow:
    """Return a cron that sends a text in an hour."""
    now = time.time()
    payload = {"input": {"messages": [["user", text]]}, "schedule": "0 9 * * *"}
    content = {"payload": payload, "metadata": {}, "user": user, "graph": "echo", "login": None}
    return CronRow(str(uuid4()), thread_id, now + 3600, now, now, content)


def read_rows(saver: Any) -> ServerRows:
    """Return what the server's tables contain."""
    table, runs, events = open_table(RunTable, saver), dict[str, list[str]](), dict[str, int]()
    for thread_id in (THREAD, OTHER):
        rows = asyncio.run(table.list_runs(thread_id))[::-1]
        runs[thread_id] = [row.live.status for row in rows]
        batches = [
            batch
            for row in rows
            for batch in asyncio.run(table.read_events(row.live.thread_key, (0, 1 << 40), 0))
        ]
        events[thread_id] = sum(len(batch.events) for batch in batches)
    crons = asyncio.run(open_table(CronTable, saver).list_crons())
    return ServerRows(
        runs,
        events,
        sorted((cron.thread_id for cron in crons), key=str),
        len(asyncio.run(open_table(WebhookTable, saver).list_due_run_ids(9))),
        [
            row.assistant_id
            for row in asyncio.run(open_table(AssistantTable, saver).list_assistants())
        ],
    )


FILLED = ServerRows(
    runs={THREAD: ["running", "delayed"], OTHER: ["running", "delayed"]},
    events={THREAD: 2, OTHER: 2},
    crons=[None, OTHER, THREAD],
    webhooks=2,
    assistants=["helper"],
)


def test_erased_message_is_removed_from_rows_of_its_thread(saver: Any) -> None:
    """The quoting run ends, and its events, webhook and cron are deleted. Others stay."""
    filled = read_rows(saver)
    report = saver.erase(THREAD, ["a"])

    assert filled == FILLED
    assert (report.runs, report.events, report.crons) == (1, 1, 1)
    assert read_rows(saver) == FILLED._replace(
        runs={THREAD: ["running", "interrupted"], OTHER: ["running", "delayed"]},
        events={THREAD: 0, OTHER: 2},
        crons=[None, OTHER],
        webhooks=1,
    )
    assert (SECRET.encode() in read_raw_bytes(saver), KEPT.encode() in read_raw_bytes(saver)) == (
        False,
        True,
    )


def test_deleted_thread_takes_its_rows_with_it(saver: Any) -> None:
    saver.delete_thread(THREAD)

    assert read_rows(saver) == FILLED._replace(
        runs={THREAD: [], OTHER: ["running", "delayed"]},
        events={THREAD: 0, OTHER: 2},
        crons=[None, OTHER],
        webhooks=1,
    )
    assert SECRET.encode() not in read_raw_bytes(saver)


def test_forgotten_person_leaves_no_rows(saver: Any) -> None:
    """The rows of the other person stay, and also the cron without a thread, which is hers."""
    with SQLiteStore.open(":memory:") as store:
        people.forget("wilhelmina", saver, store)

    assert read_rows(saver) == FILLED._replace(
        runs={THREAD: [], OTHER: ["running", "delayed"]},
        events={THREAD: 0, OTHER: 2},
        crons=[None, OTHER],
        webhooks=1,
    )
    rows = read_raw_bytes(saver)
    assert (SECRET.encode() in rows, b"wilhelmina" in rows, KEPT.encode() in rows) == (
        False,
        False,
        True,
    )


def test_copied_thread_has_no_rows_of_the_original(saver: Any) -> None:
    saver.copy_thread(THREAD, "copy")

    assert asyncio.run(open_table(RunTable, saver).list_runs("copy")) == []
    assert read_rows(saver) == FILLED


def test_pruned_and_trimmed_threads_keep_their_rows(saver: Any) -> None:
    saver.retain(Retention(last=0, history=False))
    saver.prune([THREAD, OTHER])

    assert read_rows(saver) == FILLED


def test_thread_with_unfinished_run_or_cron_is_not_deleted_as_idle(saver: Any) -> None:
    """The thread with ended runs and a cron in the future is kept, too."""
    future = datetime.now(UTC) + timedelta(days=1)
    puts.put(saver, {"messages": [human_message("c")]}, thread="idle")
    for row in asyncio.run(open_table(RunTable, saver).list_runs(THREAD)):
        asyncio.run(open_table(RunTable, saver).end_run(row.live, "success"))

    assert [thread.thread_id for thread in saver.delete_idle(future)] == ["idle"]
    assert read_rows(saver).crons == [None, OTHER, THREAD]


def test_merged_thread_keeps_its_runs(saver: Any, tmp_path: Path) -> None:
    """The thread went on elsewhere, so the merge replaces it under a new key."""
    with SQLiteCheckpointer.open(tmp_path / "elsewhere.db") as elsewhere:
        elsewhere.import_from(saver)
        head = elsewhere.get_tuple(puts.config_at(THREAD))
        assert head is not None
        messages = [doomed_message, human_message("d")]
        puts.put(elsewhere, {"messages": messages}, head.config, thread=THREAD)
        report = saver.import_from(elsewhere)

    assert report.checkpoints == 1
    assert (
        len(saver.get_tuple(puts.config_at(THREAD)).checkpoint["channel_values"]["messages"]) == 2
    )
    assert read_rows(saver) == FILLED
    saver.erase(THREAD, ["a"])
    assert SECRET.encode() not in read_raw_bytes(saver)


def test_erasure_reaches_rows_without_the_packages_of_the_server(tmp_path: Path) -> None:
    """Only `perdure serve` needs the extra `server`."""
    path = tmp_path / "server.db"
    with SQLiteCheckpointer.open(path) as saver:
        fill(saver)
    blocked = ["croniter", "fastapi", "mcp", "starlette", "uvicorn", "perdure.server"]
    program = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
from perdure.checkpointers import SQLiteCheckpointer
with SQLiteCheckpointer.open({str(path)!r}) as saver:
    saver.erase({THREAD!r}, ["a"])
    saver.delete_thread({OTHER!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True)

    with SQLiteCheckpointer.open(path) as saver:
        assert read_rows(saver) == FILLED._replace(
            runs={THREAD: ["running", "interrupted"], OTHER: []},
            events={THREAD: 0, OTHER: 0},
            crons=[None],
            webhooks=0,
        )
        assert SECRET.encode() not in read_raw_bytes(saver)


@pytest.mark.parametrize("backend", ["file", "postgres"])
def test_copied_database_has_runs_crons_and_assistants(backend: str, tmp_path: Path) -> None:
    """Events and webhooks are work of the server of the original database, and are not copied."""
    path = tmp_path / "copied.db"
    with empty_database(backend, tmp_path, "server") as database:
        with open_checkpointer(database) as saver:
            fill(saver)
        run_command("copy", "--from", database, "--to", str(path))
    with SQLiteCheckpointer.open(path) as copied:
        assert read_rows(copied) == FILLED._replace(events={THREAD: 0, OTHER: 0}, webhooks=0)
        copied.erase(THREAD, ["a"])
        assert SECRET.encode() not in read_raw_bytes(copied)

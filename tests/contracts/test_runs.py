"""Rows of server runs: their order, and the erasure, encryption and deletion of their content."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.run_tables.records import LiveRun, RunRow
from perdure.run_tables.runs import (
    ALL_RUNS,
    EVENT_NUMBER_BITS,
    MAX_ENDED_RUNS,
    EventBatch,
    RunState,
    RunTable,
)
from perdure.run_tables.thread_list import ThreadQuery
from perdure.run_tables.webhooks import WebhookTable
from perdure.server.http.limits import Limits
from perdure.server.runs.event_log import EventLog
from perdure.server.runs.event_memory import EventMemory
from perdure.server.runs.run_events import StoredEvents
from tests.backends import BACKENDS
from tests.contracts import puts
from tests.contracts.erased import SECRET, doomed_message, human_message, read_raw_bytes
from tests.server_tables import open_table

Saver = Any  # a checkpointer of any kind


def put_messages(saver: Saver, thread: str, messages: list[Any]) -> None:
    parent = puts.config_at(thread)
    record = saver.get_tuple(parent)
    puts.put(saver, {"messages": messages}, record.config if record else None, thread=thread)


def make_request(content: str, **message: Any) -> dict[str, Any]:
    return {"request": {"input": {"messages": [{"role": "user", "content": content, **message}]}}}


def request_run(
    saver: Saver,
    thread_id: str = "t",
    request: Any = None,
    *,
    rejects: bool = False,
    cancels: str | None = None,
    owner: str = "me",
    events: bool = False,
    not_before: float | None = None,
) -> tuple[LiveRun | None, list[str]]:
    live = LiveRun(thread_id, 0, 0, str(uuid4()), "pending", owner, "chat", 1, None)
    details = {"metadata": {}, "multitask_strategy": "enqueue", "user": "ann"}
    now = time.time()
    row = RunRow(
        live, now, now, details, request=request or make_request("hi"), not_before=not_before
    )
    return asyncio.run(
        open_table(RunTable, saver).accept_run_and_list_live_run_ids(
            row, reject_if_busy=rejects, cancel_action=cancels, stores_events=events
        )
    )


def accept_run(saver: Saver, thread_id: str = "t", request: Any = None, **options: Any) -> LiveRun:
    run, _ = request_run(saver, thread_id, request, **options)
    assert run is not None
    return run


def list_run_rows(saver: Saver, thread_id: str = "t") -> list[RunRow]:
    return asyncio.run(open_table(RunTable, saver).list_runs(thread_id))[::-1]


def list_statuses(saver: Saver, thread_id: str = "t") -> list[str]:
    return [row.live.status for row in list_run_rows(saver, thread_id)]


@pytest.fixture
def filled_saver(saver: Saver) -> Saver:
    """A checkpointer that contains one thread with two messages."""
    put_messages(saver, "t", [doomed_message, human_message("b")])
    return saver


# -- their order


def test_runs_of_a_thread_are_executed_one_after_the_other(filled_saver: Saver) -> None:
    table = open_table(RunTable, filled_saver)
    first, second, third = (accept_run(filled_saver) for _ in range(3))
    statuses_before = list_statuses(filled_saver)
    claimed = asyncio.run(table.end_run(first, "success"))
    second_end = asyncio.run(table.end_run(first, "error"))

    assert statuses_before == ["running", "pending", "pending"]
    assert claimed == [second.run_id]
    assert second_end is None
    assert list_statuses(filled_saver) == ["success", "running", "pending"]
    assert third.seq > second.seq


def test_run_that_may_not_wait_is_rejected_if_thread_is_busy(filled_saver: Saver) -> None:
    first = accept_run(filled_saver)

    assert request_run(filled_saver, rejects=True) == (None, [first.run_id])
    assert request_run(filled_saver, "nobody's") == (None, [])
    assert len(list_run_rows(filled_saver)) == 1


def test_new_run_interrupts_earlier_runs_of_its_thread(filled_saver: Saver) -> None:
    first, _ = accept_run(filled_saver), accept_run(filled_saver)
    third, live = request_run(filled_saver, cancels="interrupt")

    assert third is not None
    assert live == [first.run_id, third.run_id]
    assert list_statuses(filled_saver) == ["running", "interrupted", "pending"]
    assert [row.live.cancel_action for row in list_run_rows(filled_saver)] == [
        "interrupt",
        "interrupt",
        None,
    ]
    assert list_run_rows(filled_saver)[1].request is None


def test_rolled_back_runs_are_deleted(filled_saver: Saver) -> None:
    first, _ = accept_run(filled_saver), accept_run(filled_saver)
    third, live = request_run(filled_saver, cancels="rollback")
    table = open_table(RunTable, filled_saver)
    statuses_and_actions = [
        (row.live.status, row.live.cancel_action) for row in list_run_rows(filled_saver)
    ]
    claimed = asyncio.run(table.end_run(first, "rolled back"))

    assert third is not None
    assert live == [first.run_id, third.run_id]
    assert statuses_and_actions == [("running", "rollback"), ("pending", None)]
    assert claimed == [third.run_id]
    assert list_statuses(filled_saver) == ["running"]


@pytest.mark.parametrize("cause", ["strategy", "cancel"])
def test_number_of_a_rolled_back_run_is_not_used_again(filled_saver: Saver, cause: str) -> None:
    """Servers identify runs and their events by these numbers."""
    first, second, third = (accept_run(filled_saver) for _ in range(3))
    if cause == "cancel":
        asyncio.run(
            open_table(RunTable, filled_saver).cancel_runs_and_list_their_ids(
                "t", third.run_id, "rollback"
            )
        )
        asyncio.run(
            open_table(RunTable, filled_saver).cancel_runs_and_list_their_ids(
                "t", second.run_id, "rollback"
            )
        )
    last = accept_run(filled_saver, cancels="rollback" if cause == "strategy" else None)

    assert [first.seq, second.seq, third.seq, last.seq] == [1, 2, 3, 4]
    assert [row.live.run_id for row in list_run_rows(filled_saver)] == [
        first.run_id,
        last.run_id,
    ]


def test_delayed_run_does_not_block_other_runs(filled_saver: Saver) -> None:
    """When the delayed run is due, it is queued after the runs that are live then."""
    table, start_time = open_table(RunTable, filled_saver), time.time() + 3600
    delayed = accept_run(filled_saver, owner="", not_before=start_time)
    first = accept_run(filled_saver)
    live_runs = asyncio.run(table.list_live_runs())
    busy_statuses = [row.live.status for row in list_run_rows(filled_saver)]
    asyncio.run(table.end_run(first, "success"))
    second, third = accept_run(filled_saver), accept_run(filled_saver)
    for _ in range(2):  # another server may be first
        asyncio.run(table.queue_delayed_run_that_is_due(delayed, "me", None))
    waiting_statuses = list_statuses(filled_saver)
    asyncio.run(table.end_run(second, "success"))
    asyncio.run(table.end_run(third, "success"))

    assert [run.run_id for run in live_runs] == [first.run_id]
    assert busy_statuses == ["delayed", "running"]
    assert waiting_statuses == ["success", "running", "pending", "pending"]
    assert list_run_rows(filled_saver)[-1].live.run_id == delayed.run_id
    assert list_statuses(filled_saver) == ["success", "success", "success", "running"]


def test_due_delayed_run_may_cancel_earlier_runs(filled_saver: Saver) -> None:
    table = open_table(RunTable, filled_saver)
    later, due = (
        accept_run(filled_saver, owner="", not_before=time.time() + after) for after in (3600, -1)
    )
    accept_run(filled_saver), accept_run(filled_saver)
    live_runs = asyncio.run(table.list_live_runs())
    asyncio.run(table.queue_delayed_run_that_is_due(due, "me", "interrupt"))

    assert (live_runs[0].run_id, live_runs[0].status) == (due.run_id, "delayed")
    assert later.run_id not in [run.run_id for run in live_runs]
    assert list_statuses(filled_saver) == ["delayed", "running", "interrupted", "pending"]
    assert list_run_rows(filled_saver)[1].live.cancel_action == "interrupt"


def test_due_run_of_an_idle_thread_starts_at_once(filled_saver: Saver) -> None:
    due = accept_run(filled_saver, owner="", not_before=time.time() - 1)
    asyncio.run(open_table(RunTable, filled_saver).queue_delayed_run_that_is_due(due, "me", None))

    assert [(row.live.status, row.live.owner) for row in list_run_rows(filled_saver)] == [
        ("running", "me")
    ]


@pytest.mark.parametrize(
    ("action", "expected_statuses"), [("interrupt", ["interrupted"] * 2), ("rollback", [])]
)
def test_delayed_runs_can_be_cancelled(
    filled_saver: Saver, action: str, expected_statuses: list[str]
) -> None:
    table, start_time = open_table(RunTable, filled_saver), time.time() + 3600
    first, _ = (accept_run(filled_saver, owner="", not_before=start_time) for _ in range(2))
    asyncio.run(table.cancel_runs_and_list_their_ids("t", first.run_id, action))
    statuses_after_first = list_statuses(filled_saver)
    asyncio.run(table.cancel_runs_and_list_their_ids("t", "", action))

    assert statuses_after_first == [*expected_statuses[:1], "delayed"]
    assert list_statuses(filled_saver) == expected_statuses


def test_runs_of_a_dead_server_are_claimed_in_order(filled_saver: Saver) -> None:
    """The run that was active is first, and the death of its server counts as an attempt."""
    table = open_table(RunTable, filled_saver)
    for _ in range(2):
        accept_run(filled_saver, owner="gone")
    accept_run(filled_saver)
    asyncio.run(table.claim_runs("me", asyncio.run(table.list_live_runs())[:2]))

    first, second, third = list_run_rows(filled_saver)
    assert list_statuses(filled_saver) == ["running", "pending", "pending"]
    assert [row.live.owner for row in (first, second, third)] == ["me"] * 3
    assert [row.live.attempt for row in (first, second, third)] == [2, 1, 1]


def test_released_runs_have_no_owner_and_count_no_attempt(filled_saver: Saver) -> None:
    table = open_table(RunTable, filled_saver)
    for _ in range(2):
        accept_run(filled_saver)
    asyncio.run(table.release_runs("me"))
    released_runs = [row.live for row in list_run_rows(filled_saver)]
    asyncio.run(table.claim_runs("other", asyncio.run(table.list_live_runs())))

    assert [(live_run.status, live_run.owner) for live_run in released_runs] == [
        ("running", ""),
        ("pending", ""),
    ]
    assert [(row.live.status, row.live.attempt) for row in list_run_rows(filled_saver)] == [
        ("running", 1),
        ("pending", 1),
    ]


def test_started_run_is_rolled_back_by_the_server_that_claims_it(filled_saver: Saver) -> None:
    """A released or orphaned run does not end when it is cancelled, because it may have stored
    checkpoints.
    """
    table = open_table(RunTable, filled_saver)
    for owner, expected_owner in (("me", ""), ("gone", "gone")):
        run = accept_run(filled_saver, owner=owner)
        asyncio.run(table.release_runs("me"))
        asyncio.run(table.cancel_runs_and_list_their_ids("t", run.run_id, "rollback"))
        [cancelled] = asyncio.run(table.list_live_runs())
        asyncio.run(table.claim_runs("other", [cancelled]))
        [claimed] = asyncio.run(table.list_live_runs())

        assert (cancelled.status, cancelled.owner, cancelled.cancel_action) == (
            "running",
            expected_owner,
            "rollback",
        )
        assert (claimed.status, claimed.owner, claimed.cancel_action) == (
            "running",
            "other",
            "rollback",
        )
        assert asyncio.run(table.end_run(claimed, "success")) is None  # the rollback would be lost
        asyncio.run(table.end_run(claimed, "rolled back"))


def test_run_does_not_end_before_its_server_knows_the_cancellation(
    filled_saver: Saver,
) -> None:
    """Until then, neither its last events nor its webhook are stored."""
    table, run = open_table(RunTable, filled_saver), accept_run(filled_saver, events=True)
    webhooks = open_table(WebhookTable, filled_saver)

    def end_run(status: RunState, known_cancel: str | None) -> list[str] | None:
        options: Any = {"keeps_thread": True, "known_cancel": known_cancel}
        webhook = webhooks.build_webhook_insert(run, {"url": status}, {}, **options)
        end_options: Any = {
            "unstored_events": make_batch(0, status),
            "known_cancel": known_cancel,
            "webhook": webhook,
        }
        return asyncio.run(table.end_run(run, status, **end_options))

    asyncio.run(table.cancel_runs_and_list_their_ids("t", run.run_id, "interrupt"))
    result_before = end_run("success", None)
    before = (
        list_statuses(filled_saver),
        read_events(filled_saver, run),
        asyncio.run(webhooks.list_due_run_ids(9)),
    )
    claimed = end_run("interrupted", "interrupt")
    webhook_content = asyncio.run(webhooks.claim_content_and_attempt_count(run.run_id, [0.0]))

    assert result_before is None
    assert before == (["running"], [], [])
    assert claimed == []
    assert list_statuses(filled_saver) == ["interrupted"]
    assert read_events(filled_saver, run) == [make_batch(0, "interrupted")]
    assert webhook_content == ({"url": "interrupted"}, 0)


def test_oldest_ended_runs_of_a_thread_are_deleted(
    filled_saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.run_tables.runs.MAX_ENDED_RUNS", 2)
    table, runs = open_table(RunTable, filled_saver), []
    for _ in range(4):
        runs.append(accept_run(filled_saver))
        asyncio.run(table.end_run(runs[-1], "success"))

    assert [row.live.run_id for row in list_run_rows(filled_saver)] == [
        live_run.run_id for live_run in runs[2:]
    ]
    assert MAX_ENDED_RUNS == 100


def test_runs_of_threads_are_listed_newest_first(filled_saver: Saver) -> None:
    table = open_table(RunTable, filled_saver)
    put_messages(filled_saver, "u", [human_message("c")])
    first, other, last = (accept_run(filled_saver, thread) for thread in ("t", "u", "t"))
    asyncio.run(table.end_run(first, "error"))
    all_threads = ThreadQuery(is_exact=True)

    def search_runs(query: ThreadQuery, status: str | None, *page: int) -> list[tuple[str, bool]]:
        rows = asyncio.run(table.search_runs_and_whether_last_of_thread(query, status, *page))
        return [(row.live.run_id, is_last) for row, is_last in rows]

    assert search_runs(all_threads, None, 9, 0) == [
        (last.run_id, True),
        (other.run_id, True),
        (first.run_id, False),
    ]
    assert search_runs(all_threads, None, 1, 1) == [(other.run_id, True)]
    assert search_runs(all_threads, "error", 9, 0) == [(first.run_id, False)]
    assert search_runs(ThreadQuery(ids=["u"]), None, 9, 0) == [(other.run_id, True)]


# -- their content


@pytest.mark.parametrize(
    "request_", [make_request(SECRET), make_request(SECRET, id="a")], ids=["text", "id"]
)
def test_erase_cancels_pending_run_that_quotes_the_message(
    filled_saver: Saver, request_: Any
) -> None:
    accept_run(filled_saver)
    accept_run(filled_saver, request=request_)
    third = accept_run(filled_saver)
    report = filled_saver.erase("t", ["a"])

    assert report.runs == 1
    assert list_statuses(filled_saver) == ["running", "interrupted", "pending"]
    assert SECRET not in str(list_run_rows(filled_saver))
    assert list_run_rows(filled_saver)[2].live == third
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_erase_removes_message_that_only_a_run_request_contains(filled_saver: Saver) -> None:
    accept_run(filled_saver)
    accept_run(filled_saver, request=make_request("nothing but a plan for tomorrow", id="planned"))
    report = filled_saver.erase("t", ["planned"])

    assert (report.runs, len(report.hashes)) == (1, 1)
    assert list_statuses(filled_saver) == ["running", "interrupted"]
    assert b"nothing but a plan" not in read_raw_bytes(filled_saver)


def test_erase_cancels_delayed_run_that_quotes_the_message(filled_saver: Saver) -> None:
    accept_run(filled_saver, request=make_request(SECRET), owner="", not_before=time.time() + 3600)
    report = filled_saver.erase("t", ["a"])

    assert report.runs == 1
    assert list_statuses(filled_saver) == ["interrupted"]
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_erase_interrupts_active_run_that_quotes_the_message(filled_saver: Saver) -> None:
    run = accept_run(filled_saver, request=make_request(SECRET))
    filled_saver.erase("t", ["a"])
    asyncio.run(
        open_table(RunTable, filled_saver).end_run(
            run, "error", {"message": f"cannot read {SECRET}"}
        )
    )

    assert (
        list_run_rows(filled_saver)[0].live.cancel_action,
        list_run_rows(filled_saver)[0].error,
    ) == ("interrupt", None)
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_active_run_stores_no_error_or_request_after_an_erasure(filled_saver: Saver) -> None:
    """The error may quote the erased message, although no stored field of the run does."""
    run = accept_run(filled_saver)
    filled_saver.erase("t", ["a"])
    error, request = {"message": f"cannot read {SECRET}"}, make_request(SECRET)
    asyncio.run(open_table(RunTable, filled_saver).end_run(run, "error", error, request))

    assert list_statuses(filled_saver) == ["error"]
    assert (
        list_run_rows(filled_saver)[0].error,
        list_run_rows(filled_saver)[0].request,
    ) == (None, None)
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_error_of_run_accepted_after_an_erasure_is_stored(filled_saver: Saver) -> None:
    """Only runs that were accepted before the erasure lose their errors."""
    filled_saver.erase("t", ["a"])
    run = accept_run(filled_saver)
    asyncio.run(open_table(RunTable, filled_saver).end_run(run, "error", {"message": "no"}))

    assert list_run_rows(filled_saver)[0].error == {"message": "no"}


def test_erase_removes_run_error_that_quotes_the_message(filled_saver: Saver) -> None:
    run = accept_run(filled_saver)
    asyncio.run(
        open_table(RunTable, filled_saver).end_run(
            run, "error", {"message": f"cannot read {SECRET}"}
        )
    )
    before = list_run_rows(filled_saver)[0].error
    report = filled_saver.erase("t", ["a"])

    assert before == {"message": f"cannot read {SECRET}"}
    assert report.runs == 1
    assert SECRET not in str(list_run_rows(filled_saver))
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_erase_removes_stored_request_of_a_failed_run(filled_saver: Saver) -> None:
    """The request is not kept if the run was cancelled, or if something was erased from it."""
    table, request = open_table(RunTable, filled_saver), make_request(SECRET)
    for cancels in (None, "interrupt"):
        run = accept_run(filled_saver)
        if cancels:
            asyncio.run(table.cancel_runs_and_list_their_ids("t", run.run_id, cancels))
        asyncio.run(table.end_run(run, "error", {"message": "no"}, request, known_cancel=cancels))
    before = [row.request for row in list_run_rows(filled_saver)]
    report = filled_saver.erase("t", ["a"])

    assert before == [request, None]
    assert report.runs == 1
    assert [row.request for row in list_run_rows(filled_saver)] == [None, None]
    assert list_statuses(filled_saver) == ["error", "error"]
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_erasing_a_thread_deletes_its_runs(filled_saver: Saver) -> None:
    for _ in range(2):
        accept_run(filled_saver, request=make_request(SECRET))
    report = filled_saver.erase("t")
    put_messages(filled_saver, "t", [human_message("c")])

    assert report.runs == 2
    assert list_run_rows(filled_saver) == []
    assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_delete_idle_keeps_thread_with_an_active_run(filled_saver: Saver) -> None:
    run = accept_run(filled_saver)
    now = datetime.now(UTC)

    assert filled_saver.delete_idle(now) == []
    asyncio.run(open_table(RunTable, filled_saver).end_run(run, "success"))
    assert [info.thread_id for info in filled_saver.delete_idle(now)] == ["t"]
    assert list_run_rows(filled_saver) == []


def test_copied_thread_has_no_runs(filled_saver: Saver) -> None:
    accept_run(filled_saver)
    filled_saver.copy_thread("t", "copy")

    assert list_run_rows(filled_saver, "copy") == []
    assert list_statuses(filled_saver) == ["running"]


@pytest.mark.parametrize("kind", ["sealed", "langgraph-encrypted", "postgres-sealed"])
def test_requests_and_errors_of_runs_are_encrypted(kind: str, tmp_path: Path) -> None:
    with BACKENDS[kind](tmp_path) as saver:
        put_messages(saver, "t", [human_message("b")])
        run = accept_run(saver, request=make_request(SECRET))
        columns = "details, request, error"
        flow = f"SELECT {columns} FROM runs"
        rows_before = str(saver.database.read(lambda: _fetch_rows(flow)))
        asyncio.run(
            open_table(RunTable, saver).end_run(
                run, "error", {"message": SECRET}, make_request(SECRET)
            )
        )
        rows_after = str(saver.database.read(lambda: _fetch_rows(flow)))

        assert SECRET not in rows_before + rows_after
        assert list_run_rows(saver)[0].error == {"message": SECRET}


def _fetch_rows(sql: str) -> Any:
    from perdure.storage.flow import fetch_rows

    return fetch_rows(sql)


def test_import_keeps_the_runs_of_an_existing_thread(tmp_path: Path) -> None:
    messages = [HumanMessage("one", id="1")]
    with (
        SQLiteCheckpointer.open(tmp_path / "a.db") as target,
        SQLiteCheckpointer.open(tmp_path / "b.db") as source,
    ):
        put_messages(target, "t", messages)
        source.import_from(target)
        run = accept_run(target)
        put_messages(source, "t", [*messages, human_message("2")])
        target.import_from(source)

        assert target.thread("t").checkpoints == source.thread("t").checkpoints
        assert [row.live.run_id for row in list_run_rows(target)] == [run.run_id]


# -- their events


def make_batch(since: int, *texts: str, dropped: int = 0) -> EventBatch:
    events = [("values", text.encode()) for text in texts]
    return EventBatch(since, since + len(texts), events, dropped)


def store_events(saver: Saver, run: LiveRun, *batches: EventBatch) -> None:
    asyncio.run(
        open_table(RunTable, saver).add_events([(run, event_batch) for event_batch in batches])
    )


def read_events(saver: Saver, run: LiveRun, after: int = 0) -> list[EventBatch]:
    return asyncio.run(
        open_table(RunTable, saver).read_events(run.thread_key, (run.seq, run.seq), after)
    )


def test_reader_of_emptied_event_log_continues_from_the_database(filled_saver: Saver) -> None:
    """Another process takes the run over while a client is reading its events."""
    run = accept_run(filled_saver, events=True)
    store_events(filled_saver, run, make_batch(0, "one", "two"), make_batch(2, "three"))
    log, events = EventLog(), StoredEvents(open_table(RunTable, filled_saver))
    account = EventMemory(Limits()).get_account(None, "ann")

    async def do_nothing() -> None:
        pass

    async def read_frames() -> list[bytes]:
        frames: list[bytes] = []

        async def collect_frames() -> None:
            arguments = log, 1, do_nothing, run.thread_key, (run.seq, run.seq), account
            async for events_batch in events.iter_events_after(*arguments):
                frames.extend(event.sse_frame for event in events_batch)

        task = asyncio.create_task(collect_frames())
        while not log.has_readers:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        await events.empty_outdated_log_and_find_newest_event(
            log, run.thread_key, (run.seq, run.seq)
        )
        log.close()
        await task
        return frames

    assert asyncio.run(read_frames()) == [b"two", b"three"]


def test_events_are_read_in_order_from_any_position(filled_saver: Saver) -> None:
    run = accept_run(filled_saver, events=True)
    store_events(filled_saver, run, make_batch(0, "one", "two"), make_batch(2, "three"))
    store_events(filled_saver, run, make_batch(2, "again"))  # whose commit was in doubt
    asyncio.run(
        open_table(RunTable, filled_saver).end_run(
            run, "success", unstored_events=make_batch(3, "four")
        )
    )

    assert read_events(filled_saver, run) == [
        make_batch(0, "one", "two"),
        make_batch(2, "three"),
        make_batch(3, "four"),
    ]
    assert read_events(filled_saver, run, 1) == read_events(filled_saver, run)
    assert read_events(filled_saver, run, 2) == read_events(filled_saver, run)[1:]
    newest = asyncio.run(
        open_table(RunTable, filled_saver).find_newest_event(run.thread_key, ALL_RUNS, 0)
    )
    assert newest == (run.seq, 4, "success")
    assert (
        asyncio.run(
            open_table(RunTable, filled_saver).find_newest_event(run.thread_key, ALL_RUNS, 4)
        )
        is None
    )


def test_oldest_events_of_a_run_are_dropped(filled_saver: Saver) -> None:
    run = accept_run(filled_saver, events=True)
    store_events(
        filled_saver,
        run,
        make_batch(0, "one"),
        make_batch(1, "two"),
        make_batch(2, "three", dropped=2),
    )

    assert read_events(filled_saver, run) == [make_batch(2, "three")]


def test_only_the_owner_of_a_run_stores_its_events(filled_saver: Saver) -> None:
    run, table = (
        accept_run(filled_saver, owner="gone", events=True),
        open_table(RunTable, filled_saver),
    )
    store_events(filled_saver, run, make_batch(0, "one"))
    asyncio.run(table.claim_runs("me", asyncio.run(table.list_live_runs())))
    store_events(filled_saver, run, make_batch(1, "of who is gone"))
    claimed = list_run_rows(filled_saver)[0].live
    first_numbers = asyncio.run(table.reserve_event_numbers_after_takeover(claimed, 0))
    second_numbers = asyncio.run(table.reserve_event_numbers_after_takeover(claimed, 0))
    store_events(filled_saver, claimed, make_batch(2 << EVENT_NUMBER_BITS, "two"))

    assert asyncio.run(table.reserve_event_numbers_after_takeover(run, 0)) is None
    assert (first_numbers, second_numbers) == (
        (1, 1 << EVENT_NUMBER_BITS),
        (1 << EVENT_NUMBER_BITS, 2 << EVENT_NUMBER_BITS),
    )
    assert [event_batch.events for event_batch in read_events(filled_saver, run)] == [
        [("values", b"one")],
        [],
        [],
        [("values", b"two")],
    ]


def test_run_that_cannot_be_joined_stores_no_events(filled_saver: Saver) -> None:
    run = accept_run(filled_saver)
    store_events(filled_saver, run, make_batch(0, "one"))

    assert read_events(filled_saver, run) == []


@pytest.mark.parametrize("cause", ["erase", "delete", "roll back", "drop", "age", "many"])
def test_events_are_deleted_with_their_run_message_or_thread(
    filled_saver: Saver, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.run_tables.runs.MAX_ENDED_RUNS", 1)
    run, table = accept_run(filled_saver, events=True), open_table(RunTable, filled_saver)
    store_events(filled_saver, run, make_batch(0, SECRET))
    asyncio.run(table.end_run(run, "rolled back" if cause == "roll back" else "success"))
    match cause:
        case "erase":
            assert filled_saver.erase("t", ["a"]).events == 1
        case "delete":
            assert filled_saver.erase("t").events == 1
        case "drop":
            asyncio.run(table.delete_ended_run(run))
        case "age":
            asyncio.run(table.delete_old_events())
            assert read_events(filled_saver, run) != []
            monkeypatch.setattr("perdure.run_tables.runs.EVENT_RETENTION_S", -1)
            asyncio.run(table.delete_old_events())
        case "many":
            for _ in range(2):
                asyncio.run(table.end_run(accept_run(filled_saver), "success"))
    if cause != "delete":
        assert accept_run(filled_saver).seq > run.seq  # which tells events of a thread apart

    rows = filled_saver.database.read(
        lambda: _fetch_rows("SELECT 1 FROM run_events WHERE body IS NOT NULL")
    )
    assert rows == []
    if cause == "erase":
        assert SECRET.encode() not in read_raw_bytes(filled_saver)


def test_active_run_stores_no_events_after_an_erasure(filled_saver: Saver) -> None:
    run = accept_run(filled_saver, events=True)
    filled_saver.erase("t", ["nobody's"])
    store_events(filled_saver, run, make_batch(0, "told later"))
    asyncio.run(
        open_table(RunTable, filled_saver).end_run(
            run, "success", unstored_events=make_batch(0, "told later")
        )
    )

    assert read_events(filled_saver, run) == []
    assert b"told later" not in read_raw_bytes(filled_saver)


@pytest.mark.parametrize("kind", ["sealed", "langgraph-encrypted", "postgres-sealed"])
def test_events_of_runs_are_encrypted(kind: str, tmp_path: Path) -> None:
    with BACKENDS[kind](tmp_path) as saver:
        put_messages(saver, "t", [human_message("b")])
        run = accept_run(saver, events=True)
        store_events(saver, run, make_batch(0, SECRET))
        stored = saver.database.read(lambda: _fetch_rows("SELECT body FROM run_events"))

        assert SECRET not in str(stored)
        assert read_events(saver, run) == [make_batch(0, SECRET)]


def test_import_keeps_the_run_events_of_an_existing_thread(tmp_path: Path) -> None:
    messages = [HumanMessage("one", id="1")]
    with (
        SQLiteCheckpointer.open(tmp_path / "a.db") as target,
        SQLiteCheckpointer.open(tmp_path / "b.db") as source,
    ):
        put_messages(target, "t", messages)
        source.import_from(target)
        run = accept_run(target, events=True)
        store_events(target, run, make_batch(0, "one"))
        put_messages(source, "t", [*messages, human_message("2")])
        target.import_from(source)

        assert read_events(target, list_run_rows(target)[0].live) == [
            make_batch(0, "one")
        ]  # the thread has another key

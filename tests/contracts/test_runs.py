"""Runs of the server as rows: their order, and what reaches the words in them."""

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
from perdure.checkpointers.records import LiveRun, RunRow
from perdure.checkpointers.runs import (
    ALL_RUNS,
    EVENT_NUMBER_BITS,
    MAX_ENDED_RUNS,
    EventBatch,
    RunState,
    RunTable,
)
from perdure.checkpointers.thread_list import ThreadQuery
from perdure.checkpointers.webhooks import WebhookTable
from perdure.server.event_memory import EventMemory
from perdure.server.limits import Limits
from perdure.server.run_events import StoredEvents
from perdure.server.run_log import EventLog
from tests.backends import BACKENDS
from tests.contracts import puts
from tests.contracts.erased import SECRET, doomed_message, human_message, read_raw_bytes

Saver = Any  # a checkpointer of any kind


def put(saver: Saver, thread: str, messages: list[Any]) -> None:
    parent = puts.config_at(thread)
    found = saver.get_tuple(parent)
    puts.put(saver, {"messages": messages}, found.config if found else None, thread=thread)


def asked(content: str, **message: Any) -> dict[str, Any]:
    return {"request": {"input": {"messages": [{"role": "user", "content": content, **message}]}}}


def accept(
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
    about = {"metadata": {}, "multitask_strategy": "enqueue", "user": "ann"}
    now = time.time()
    row = RunRow(live, now, now, about, request=request or asked("hi"), not_before=not_before)
    return asyncio.run(
        RunTable(saver).accept_run_and_list_live_run_ids(
            row, reject_if_busy=rejects, cancel_action=cancels, stores_events=events
        )
    )


def accepted(saver: Saver, thread_id: str = "t", request: Any = None, **options: Any) -> LiveRun:
    run, _ = accept(saver, thread_id, request, **options)
    assert run is not None
    return run


def of(saver: Saver, thread_id: str = "t") -> list[RunRow]:
    return asyncio.run(RunTable(saver).list_runs(thread_id))[::-1]


def statuses(saver: Saver, thread_id: str = "t") -> list[str]:
    return [row.live.status for row in of(saver, thread_id)]


@pytest.fixture
def talked(saver: Saver) -> Saver:
    """A thread with two messages."""
    put(saver, "t", [doomed_message, human_message("b")])
    return saver


# -- their order


def test_runs_of_a_thread_run_one_after_the_other(talked: Saver) -> None:
    table = RunTable(talked)
    first, second, third = (accepted(talked) for _ in range(3))
    began = statuses(talked)
    claimed = asyncio.run(table.end_run(first, "success"))
    again = asyncio.run(table.end_run(first, "error"))

    assert began == ["running", "pending", "pending"]
    assert claimed == [second.run_id]
    assert again is None
    assert statuses(talked) == ["success", "running", "pending"]
    assert third.seq > second.seq


def test_a_run_that_may_not_wait_is_none(talked: Saver) -> None:
    first = accepted(talked)

    assert accept(talked, rejects=True) == (None, [first.run_id])
    assert accept(talked, "nobody's") == (None, [])
    assert len(of(talked)) == 1


def test_a_run_cancels_those_before_it(talked: Saver) -> None:
    first, _ = accepted(talked), accepted(talked)
    third, live = accept(talked, cancels="interrupt")

    assert third is not None
    assert live == [first.run_id, third.run_id]
    assert statuses(talked) == ["running", "interrupted", "pending"]
    assert [row.live.cancel_action for row in of(talked)] == ["interrupt", "interrupt", None]
    assert of(talked)[1].request is None


def test_nothing_is_left_of_runs_that_are_rolled_back(talked: Saver) -> None:
    first, _ = accepted(talked), accepted(talked)
    third, live = accept(talked, cancels="rollback")
    table = RunTable(talked)
    cancelled = [(row.live.status, row.live.cancel_action) for row in of(talked)]
    claimed = asyncio.run(table.end_run(first, "rolled back"))

    assert third is not None
    assert live == [first.run_id, third.run_id]
    assert cancelled == [("running", "rollback"), ("pending", None)]
    assert claimed == [third.run_id]
    assert statuses(talked) == ["running"]


@pytest.mark.parametrize("how", ["strategy", "cancel"])
def test_no_run_takes_the_number_of_one_that_was_rolled_back(talked: Saver, how: str) -> None:
    """Servers know runs and their events by these numbers."""
    first, second, third = (accepted(talked) for _ in range(3))
    if how == "cancel":
        asyncio.run(RunTable(talked).cancel_runs("t", third.run_id, "rollback"))
        asyncio.run(RunTable(talked).cancel_runs("t", second.run_id, "rollback"))
    last = accepted(talked, cancels="rollback" if how == "strategy" else None)

    assert [first.seq, second.seq, third.seq, last.seq] == [1, 2, 3, 4]
    assert [row.live.run_id for row in of(talked)] == [first.run_id, last.run_id]


def test_a_delayed_run_holds_up_no_other(talked: Saver) -> None:
    """When it is due it comes after those that are live then, whoever made it."""
    table, soon = RunTable(talked), time.time() + 3600
    delayed = accepted(talked, owner="", not_before=soon)
    first = accepted(talked)
    early = asyncio.run(table.list_live_runs())
    busy = [row.live.status for row in of(talked)]
    asyncio.run(table.end_run(first, "success"))
    second, third = accepted(talked), accepted(talked)
    for _ in range(2):  # another server may be first
        asyncio.run(table.start_delayed_run(delayed, "me", None))
    waiting = statuses(talked)
    asyncio.run(table.end_run(second, "success"))
    asyncio.run(table.end_run(third, "success"))

    assert [run.run_id for run in early] == [first.run_id]
    assert busy == ["delayed", "running"]
    assert waiting == ["success", "running", "pending", "pending"]
    assert of(talked)[-1].live.run_id == delayed.run_id
    assert statuses(talked) == ["success", "success", "success", "running"]


def test_a_delayed_run_that_is_due_may_cancel_those_before_it(talked: Saver) -> None:
    table = RunTable(talked)
    later, due = (
        accepted(talked, owner="", not_before=time.time() + after) for after in (3600, -1)
    )
    accepted(talked), accepted(talked)
    seen = asyncio.run(table.list_live_runs())
    asyncio.run(table.start_delayed_run(due, "me", "interrupt"))

    assert (seen[0].run_id, seen[0].status) == (due.run_id, "delayed")
    assert later.run_id not in [run.run_id for run in seen]
    assert statuses(talked) == ["delayed", "running", "interrupted", "pending"]
    assert of(talked)[1].live.cancel_action == "interrupt"


def test_the_only_run_that_is_due_runs_at_once(talked: Saver) -> None:
    due = accepted(talked, owner="", not_before=time.time() - 1)
    asyncio.run(RunTable(talked).start_delayed_run(due, "me", None))

    assert [(row.live.status, row.live.owner) for row in of(talked)] == [("running", "me")]


@pytest.mark.parametrize(("action", "left"), [("interrupt", ["interrupted"] * 2), ("rollback", [])])
def test_delayed_runs_are_cancelled(talked: Saver, action: str, left: list[str]) -> None:
    table, soon = RunTable(talked), time.time() + 3600
    first, _ = (accepted(talked, owner="", not_before=soon) for _ in range(2))
    asyncio.run(table.cancel_runs("t", first.run_id, action))
    one = statuses(talked)
    asyncio.run(table.cancel_runs("t", "", action))

    assert one == [*left[:1], "delayed"]
    assert statuses(talked) == left


def test_runs_of_who_is_gone_go_on_in_their_order(talked: Saver) -> None:
    """The one that was under way first; its death counts as an attempt."""
    table = RunTable(talked)
    for _ in range(2):
        accepted(talked, owner="gone")
    accepted(talked)
    asyncio.run(table.claim_runs("me", asyncio.run(table.list_live_runs())[:2]))

    first, second, third = of(talked)
    assert statuses(talked) == ["running", "pending", "pending"]
    assert [row.live.owner for row in (first, second, third)] == ["me"] * 3
    assert [row.live.attempt for row in (first, second, third)] == [2, 1, 1]


def test_what_is_handed_over_is_nobodys_and_no_attempt(talked: Saver) -> None:
    table = RunTable(talked)
    for _ in range(2):
        accepted(talked)
    asyncio.run(table.release_runs("me"))
    handed = [row.live for row in of(talked)]
    asyncio.run(table.claim_runs("other", asyncio.run(table.list_live_runs())))

    assert [(each.status, each.owner) for each in handed] == [("running", ""), ("pending", "")]
    assert [(row.live.status, row.live.attempt) for row in of(talked)] == [
        ("running", 1),
        ("pending", 1),
    ]


def test_a_run_that_began_is_rolled_back_by_who_takes_it_over(talked: Saver) -> None:
    """Handed over, or left by the dead, it does not end when it is cancelled: it has stored."""
    table = RunTable(talked)
    for owner, left_by in (("me", ""), ("gone", "gone")):
        run = accepted(talked, owner=owner)
        asyncio.run(table.release_runs("me"))
        asyncio.run(table.cancel_runs("t", run.run_id, "rollback"))
        [cancelled] = asyncio.run(table.list_live_runs())
        asyncio.run(table.claim_runs("other", [cancelled]))
        [taken] = asyncio.run(table.list_live_runs())

        assert (cancelled.status, cancelled.owner, cancelled.cancel_action) == (
            "running",
            left_by,
            "rollback",
        )
        assert (taken.status, taken.owner, taken.cancel_action) == ("running", "other", "rollback")
        assert asyncio.run(table.end_run(taken, "success")) is None  # the rollback would be lost
        asyncio.run(table.end_run(taken, "rolled back"))


def test_a_run_does_not_end_before_its_cancellation_is_known(talked: Saver) -> None:
    """Neither its last events nor its webhook are stored by then."""
    table, run = RunTable(talked), accepted(talked, events=True)
    webhooks = WebhookTable(talked)

    def end(status: RunState, known: str | None) -> list[str] | None:
        options: Any = {"keeps_thread": True, "known_cancel": known}
        webhook = webhooks.build_webhook_insert(run, {"url": status}, {}, **options)
        last: Any = {"unstored_events": batch(0, status), "known_cancel": known, "webhook": webhook}
        return asyncio.run(table.end_run(run, status, **last))

    asyncio.run(table.cancel_runs("t", run.run_id, "interrupt"))
    refused = end("success", None)
    before = statuses(talked), told(talked, run), asyncio.run(webhooks.list_due_run_ids(9))
    claimed = end("interrupted", "interrupt")
    taken = asyncio.run(webhooks.claim_content_and_attempt_count(run.run_id, [0.0]))

    assert refused is None
    assert before == (["running"], [], [])
    assert claimed == []
    assert statuses(talked) == ["interrupted"]
    assert told(talked, run) == [batch(0, "interrupted")]
    assert taken == ({"url": "interrupted"}, 0)


def test_the_oldest_runs_of_a_thread_are_dropped(
    talked: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.checkpointers.runs.MAX_ENDED_RUNS", 2)
    table, made = RunTable(talked), []
    for _ in range(4):
        made.append(accepted(talked))
        asyncio.run(table.end_run(made[-1], "success"))

    assert [row.live.run_id for row in of(talked)] == [each.run_id for each in made[2:]]
    assert MAX_ENDED_RUNS == 100


def test_runs_of_threads_are_listed_newest_first(talked: Saver) -> None:
    table = RunTable(talked)
    put(talked, "u", [human_message("c")])
    first, other, last = (accepted(talked, thread) for thread in ("t", "u", "t"))
    asyncio.run(table.end_run(first, "error"))
    everything = ThreadQuery(is_exact=True)

    def newest(query: ThreadQuery, status: str | None, *page: int) -> list[tuple[str, bool]]:
        listed = asyncio.run(table.search_runs_with_is_last_flags(query, status, *page))
        return [(row.live.run_id, is_last) for row, is_last in listed]

    assert newest(everything, None, 9, 0) == [
        (last.run_id, True),
        (other.run_id, True),
        (first.run_id, False),
    ]
    assert newest(everything, None, 1, 1) == [(other.run_id, True)]
    assert newest(everything, "error", 9, 0) == [(first.run_id, False)]
    assert newest(ThreadQuery(ids=["u"]), None, 9, 0) == [(other.run_id, True)]


# -- the words in them


@pytest.mark.parametrize("request_", [asked(SECRET), asked(SECRET, id="a")], ids=["text", "id"])
def test_a_run_that_quotes_what_is_erased_is_cancelled(talked: Saver, request_: Any) -> None:
    accepted(talked)
    accepted(talked, request=request_)
    third = accepted(talked)
    report = talked.erase("t", ["a"])

    assert report.runs == 1
    assert statuses(talked) == ["running", "interrupted", "pending"]
    assert SECRET not in str(of(talked))
    assert of(talked)[2].live == third
    assert SECRET.encode() not in read_raw_bytes(talked)


def test_a_message_that_only_a_run_has_is_erased(talked: Saver) -> None:
    accepted(talked)
    accepted(talked, request=asked("nothing but a plan for tomorrow", id="planned"))
    report = talked.erase("t", ["planned"])

    assert (report.runs, len(report.hashes)) == (1, 1)
    assert statuses(talked) == ["running", "interrupted"]
    assert b"nothing but a plan" not in read_raw_bytes(talked)


def test_a_delayed_run_that_quotes_what_is_erased_is_cancelled(talked: Saver) -> None:
    accepted(talked, request=asked(SECRET), owner="", not_before=time.time() + 3600)
    report = talked.erase("t", ["a"])

    assert report.runs == 1
    assert statuses(talked) == ["interrupted"]
    assert SECRET.encode() not in read_raw_bytes(talked)


def test_a_run_under_way_that_quotes_what_is_erased_is_told_to_stop(talked: Saver) -> None:
    run = accepted(talked, request=asked(SECRET))
    talked.erase("t", ["a"])
    asyncio.run(RunTable(talked).end_run(run, "error", {"message": f"cannot read {SECRET}"}))

    assert (of(talked)[0].live.cancel_action, of(talked)[0].error) == ("interrupt", None)
    assert SECRET.encode() not in read_raw_bytes(talked)


def test_a_run_under_way_stores_nothing_that_it_holds(talked: Saver) -> None:
    """Its error may quote what was erased, although nothing that was stored of it does."""
    run = accepted(talked)
    talked.erase("t", ["a"])
    error, request = {"message": f"cannot read {SECRET}"}, asked(SECRET)
    asyncio.run(RunTable(talked).end_run(run, "error", error, request))

    assert statuses(talked) == ["error"]
    assert (of(talked)[0].error, of(talked)[0].request) == (None, None)
    assert SECRET.encode() not in read_raw_bytes(talked)


def test_the_error_of_a_run(talked: Saver) -> None:
    """The error of a run is stored if the run began after the erasure."""
    talked.erase("t", ["a"])
    run = accepted(talked)
    asyncio.run(RunTable(talked).end_run(run, "error", {"message": "no"}))

    assert of(talked)[0].error == {"message": "no"}


def test_the_error_of_a_run_is_erased(talked: Saver) -> None:
    run = accepted(talked)
    asyncio.run(RunTable(talked).end_run(run, "error", {"message": f"cannot read {SECRET}"}))
    before = of(talked)[0].error
    report = talked.erase("t", ["a"])

    assert before == {"message": f"cannot read {SECRET}"}
    assert report.runs == 1
    assert SECRET not in str(of(talked))
    assert SECRET.encode() not in read_raw_bytes(talked)


def test_a_run_that_may_be_asked_again_is_erased(talked: Saver) -> None:
    """What it was asked is not kept if it was stopped, or something was erased from it."""
    table, kept = RunTable(talked), asked(SECRET)
    for cancels in (None, "interrupt"):
        run = accepted(talked)
        if cancels:
            asyncio.run(table.cancel_runs("t", run.run_id, cancels))
        asyncio.run(table.end_run(run, "error", {"message": "no"}, kept, known_cancel=cancels))
    before = [row.request for row in of(talked)]
    report = talked.erase("t", ["a"])

    assert before == [kept, None]
    assert report.runs == 1
    assert [row.request for row in of(talked)] == [None, None]
    assert statuses(talked) == ["error", "error"]
    assert SECRET.encode() not in read_raw_bytes(talked)


def test_runs_go_with_their_thread(talked: Saver) -> None:
    for _ in range(2):
        accepted(talked, request=asked(SECRET))
    report = talked.erase("t")
    put(talked, "t", [human_message("c")])

    assert report.runs == 2
    assert of(talked) == []
    assert SECRET.encode() not in read_raw_bytes(talked)


def test_a_thread_on_which_a_run_waits_is_not_idle(talked: Saver) -> None:
    run = accepted(talked)
    now = datetime.now(UTC)

    assert talked.delete_idle(now) == []
    asyncio.run(RunTable(talked).end_run(run, "success"))
    assert [info.thread_id for info in talked.delete_idle(now)] == ["t"]
    assert of(talked) == []


def test_a_copy_has_no_runs(talked: Saver) -> None:
    accepted(talked)
    talked.copy_thread("t", "copy")

    assert of(talked, "copy") == []
    assert statuses(talked) == ["running"]


@pytest.mark.parametrize("kind", ["sealed", "langgraph-encrypted", "postgres-sealed"])
def test_words_are_sealed(kind: str, tmp_path: Path) -> None:
    with BACKENDS[kind](tmp_path) as saver:
        put(saver, "t", [human_message("b")])
        run = accepted(saver, request=asked(SECRET))
        columns = "details, request, error"
        flow = f"SELECT {columns} FROM runs"
        stored = str(saver.database.read(lambda: _rows(flow)))
        asyncio.run(RunTable(saver).end_run(run, "error", {"message": SECRET}, asked(SECRET)))
        ended = str(saver.database.read(lambda: _rows(flow)))

        assert SECRET not in stored + ended
        assert of(saver)[0].error == {"message": SECRET}


def _rows(sql: str) -> Any:
    from perdure.storage.flow import fetch_rows

    return fetch_rows(sql)


def test_a_merge_leaves_the_runs_of_a_thread(tmp_path: Path) -> None:
    said = [HumanMessage("one", id="1")]
    with (
        SQLiteCheckpointer.open(tmp_path / "a.db") as here,
        SQLiteCheckpointer.open(tmp_path / "b.db") as there,
    ):
        put(here, "t", said)
        there.import_from(here)
        run = accepted(here)
        put(there, "t", [*said, human_message("2")])
        here.import_from(there)

        assert here.thread("t").checkpoints == there.thread("t").checkpoints
        assert [row.live.run_id for row in of(here)] == [run.run_id]


# -- what they tell


def batch(since: int, *texts: str, dropped: int = 0) -> EventBatch:
    events = [("values", text.encode()) for text in texts]
    return EventBatch(since, since + len(texts), events, dropped)


def tell(saver: Saver, run: LiveRun, *batches: EventBatch) -> None:
    asyncio.run(RunTable(saver).add_events([(run, each) for each in batches]))


def told(saver: Saver, run: LiveRun, after: int = 0) -> list[EventBatch]:
    return asyncio.run(RunTable(saver).read_events(run.thread_key, (run.seq, run.seq), after))


def test_a_reader_whose_log_is_left_to_the_database_reads_on_there(talked: Saver) -> None:
    """As of a run that another process takes over while somebody asks for it again."""
    run = accepted(talked, events=True)
    tell(talked, run, batch(0, "one", "two"), batch(2, "three"))
    log, events = EventLog(), StoredEvents(RunTable(talked))
    account = EventMemory(Limits()).get_account(None, "ann")

    async def look() -> None:
        pass

    async def read() -> list[bytes]:
        heard: list[bytes] = []

        async def reading() -> None:
            reading = log, 1, look, run.thread_key, (run.seq, run.seq), account
            async for found in events.read_after(*reading):
                heard.extend(each.sse_frame for each in found)

        task = asyncio.create_task(reading())
        while not log.has_readers:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        await events.empty_outdated_log_and_find_newest_event(
            log, run.thread_key, (run.seq, run.seq)
        )
        log.close()
        await task
        return heard

    assert asyncio.run(read()) == [b"two", b"three"]


def test_events_are_read_in_order_after_any_of_them(talked: Saver) -> None:
    run = accepted(talked, events=True)
    tell(talked, run, batch(0, "one", "two"), batch(2, "three"))
    tell(talked, run, batch(2, "again"))  # whose commit was in doubt
    asyncio.run(RunTable(talked).end_run(run, "success", unstored_events=batch(3, "four")))

    assert told(talked, run) == [batch(0, "one", "two"), batch(2, "three"), batch(3, "four")]
    assert told(talked, run, 1) == told(talked, run)
    assert told(talked, run, 2) == told(talked, run)[1:]
    newest = asyncio.run(
        RunTable(talked).find_newest_event_numbers_and_run_state(run.thread_key, ALL_RUNS, 0)
    )
    assert newest == (run.seq, 4, "success")
    assert (
        asyncio.run(
            RunTable(talked).find_newest_event_numbers_and_run_state(run.thread_key, ALL_RUNS, 4)
        )
        is None
    )


def test_the_oldest_events_of_a_run_are_dropped(talked: Saver) -> None:
    run = accepted(talked, events=True)
    tell(talked, run, batch(0, "one"), batch(1, "two"), batch(2, "three", dropped=2))

    assert told(talked, run) == [batch(2, "three")]


def test_only_who_has_a_run_tells_of_it(talked: Saver) -> None:
    run, table = accepted(talked, owner="gone", events=True), RunTable(talked)
    tell(talked, run, batch(0, "one"))
    asyncio.run(table.claim_runs("me", asyncio.run(table.list_live_runs())))
    tell(talked, run, batch(1, "of who is gone"))
    here = of(talked)[0].live
    begun = asyncio.run(table.reserve_event_numbers(here, 0))
    again = asyncio.run(table.reserve_event_numbers(here, 0))
    tell(talked, here, batch(2 << EVENT_NUMBER_BITS, "two"))

    assert asyncio.run(table.reserve_event_numbers(run, 0)) is None
    assert (begun, again) == (
        (1, 1 << EVENT_NUMBER_BITS),
        (1 << EVENT_NUMBER_BITS, 2 << EVENT_NUMBER_BITS),
    )
    assert [each.events for each in told(talked, run)] == [
        [("values", b"one")],
        [],
        [],
        [("values", b"two")],
    ]


def test_a_run_that_nobody_may_join_again_stores_none(talked: Saver) -> None:
    run = accepted(talked)
    tell(talked, run, batch(0, "one"))

    assert told(talked, run) == []


@pytest.mark.parametrize("how", ["erase", "delete", "roll back", "drop", "age", "many"])
def test_events_go_with_what_they_quote(
    talked: Saver, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.checkpointers.runs.MAX_ENDED_RUNS", 1)
    run, table = accepted(talked, events=True), RunTable(talked)
    tell(talked, run, batch(0, SECRET))
    asyncio.run(table.end_run(run, "rolled back" if how == "roll back" else "success"))
    match how:
        case "erase":
            assert talked.erase("t", ["a"]).events == 1
        case "delete":
            assert talked.erase("t").events == 1
        case "drop":
            asyncio.run(table.delete_ended_run(run))
        case "age":
            asyncio.run(table.delete_old_events())
            assert told(talked, run) != []
            monkeypatch.setattr("perdure.checkpointers.runs.EVENT_RETENTION_S", -1)
            asyncio.run(table.delete_old_events())
        case "many":
            for _ in range(2):
                asyncio.run(table.end_run(accepted(talked), "success"))
    if how != "delete":
        assert accepted(talked).seq > run.seq  # which tells events of a thread apart

    rows = talked.database.read(lambda: _rows("SELECT 1 FROM run_events WHERE body IS NOT NULL"))
    assert rows == []
    if how == "erase":
        assert SECRET.encode() not in read_raw_bytes(talked)


def test_a_run_under_way_tells_no_more_after_an_erasure(talked: Saver) -> None:
    run = accepted(talked, events=True)
    talked.erase("t", ["nobody's"])
    tell(talked, run, batch(0, "told later"))
    asyncio.run(RunTable(talked).end_run(run, "success", unstored_events=batch(0, "told later")))

    assert told(talked, run) == []
    assert b"told later" not in read_raw_bytes(talked)


@pytest.mark.parametrize("kind", ["sealed", "langgraph-encrypted", "postgres-sealed"])
def test_events_are_sealed(kind: str, tmp_path: Path) -> None:
    with BACKENDS[kind](tmp_path) as saver:
        put(saver, "t", [human_message("b")])
        run = accepted(saver, events=True)
        tell(saver, run, batch(0, SECRET))
        stored = saver.database.read(lambda: _rows("SELECT body FROM run_events"))

        assert SECRET not in str(stored)
        assert told(saver, run) == [batch(0, SECRET)]


def test_a_merge_leaves_the_events_of_a_thread(tmp_path: Path) -> None:
    said = [HumanMessage("one", id="1")]
    with (
        SQLiteCheckpointer.open(tmp_path / "a.db") as here,
        SQLiteCheckpointer.open(tmp_path / "b.db") as there,
    ):
        put(here, "t", said)
        there.import_from(here)
        run = accepted(here, events=True)
        tell(here, run, batch(0, "one"))
        put(there, "t", [*said, human_message("2")])
        here.import_from(there)

        assert told(here, of(here)[0].live) == [batch(0, "one")]  # the thread has another key

"""Which threads are due for extraction: a query over threads and watermarks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver

from perdure.effects import build_effect_that_calls_function_in_thread
from perdure.errors import ConfigurationError, UnknownThread
from perdure.memory.long_term import extraction
from perdure.memory.long_term.extraction import (
    DueThreads,
    Extraction,
    Pace,
    UnreadHead,
    compute_job_state_and_due_time,
)
from perdure.memory.thread_messages import Watermark, read_watermarks
from perdure.stores import SQLiteStore
from tests.memory.background_runs import BackgroundRuns, thread_config

START = datetime(2026, 1, 1, tzinfo=UTC)


def time_after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def build_head(at: float, uid: str = "c1") -> UnreadHead:
    return UnreadHead("t", uid, time_after(at))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[BackgroundRuns]:
    runs = BackgroundRuns(tmp_path)
    yield runs
    runs.close()


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(0, 50), st.integers(0, 200)
)
def test_thread_is_due_after_the_delay_or_the_maximum_wait(
    pauses: list[int], delay_s: int, max_wait_s: int
) -> None:
    """The earlier of the two times counts."""
    last = sum(pauses)
    pace = Pace(delay_s, max_wait_s)
    _, at = compute_job_state_and_due_time(pace, build_head(last), Watermark(), START, START)

    assert at == min(time_after(last + delay_s), time_after(max_wait_s))


def test_failed_job_is_retried_with_growing_pauses_and_then_dead() -> None:
    """The pause doubles. After the last attempt, only a new message makes the thread due again."""
    pace, mark = Pace(30, 600, retries=2, backoff_s=2), Watermark()
    for attempt, pause in ((1, 2), (2, 4)):
        mark = mark.with_failure("no", time_after(40), "c1")
        assert ("retrying", time_after(40 + pause)) == compute_job_state_and_due_time(
            pace, build_head(0), mark, START, time_after(41)
        )
        assert (
            compute_job_state_and_due_time(pace, build_head(0), mark, START, time_after(60))[0]
            == "due"
        ), attempt
    mark = mark.with_failure("no", time_after(40), "c1")

    assert compute_job_state_and_due_time(pace, build_head(0), mark, START, time_after(10_000)) == (
        "dead",
        None,
    )
    assert ("due", time_after(30)) == compute_job_state_and_due_time(
        pace, build_head(0, "c2"), mark, START, time_after(31)
    )


def test_threads_of_all_users_are_due_until_they_are_extracted(runs: BackgroundRuns) -> None:
    """The metadata of the head names the user. A new message makes a thread due again."""
    threads = DueThreads(runs.extraction, Pace(0))
    for user in ("ann", "bo"):
        config = thread_config(f"of {user}")
        config["configurable"]["user_id"] = user
        runs.graph.invoke({"messages": [HumanMessage("My cat is called Tom.")]}, config)
    jobs = {job.thread_id: job for job in threads.list_jobs()}

    assert {name: job.namespace for name, job in jobs.items()} == {
        "of ann": ("memories", "ann"),
        "of bo": ("memories", "bo"),
    }
    for job in jobs.values():
        runs.extraction.extract(job.thread_id, job.config)
    assert [] == threads.list_jobs() == DueThreads(runs.extraction, Pace(0)).list_jobs()
    runs.send_message("of ann")
    assert [job.thread_id for job in threads.list_jobs()] == ["of ann"]


def test_threads_without_a_user_are_listed_apart_after_a_while(runs: BackgroundRuns) -> None:
    """An integer is a valid user ID, and a value of another type is none."""
    for thread, user in (("t", {}), ("truth", {"user_id": True}), ("number", {"user_id": 7})):
        config: Any = {"configurable": {"thread_id": thread, **user}}
        runs.graph.invoke({"messages": [HumanMessage("Hi Tom.")]}, config)
    threads = DueThreads(runs.extraction, Pace(0))

    assert {job.thread_id: job.namespace for job in threads.list_jobs()} == {
        "number": ("memories", "7")
    }
    assert (sorted(threads.list_threads_without_user()), threads.list_threads_without_user(60)) == (
        ["t", "truth"],
        [],
    )


def test_thread_read_by_one_extraction_is_still_due_for_another(runs: BackgroundRuns) -> None:
    other_extraction = Extraction(runs.saver, runs.store, namespace=("notes", "{user_id}"))
    runs.send_message("g")
    runs.extraction.extract("g", thread_config("g"))

    assert DueThreads(runs.extraction, Pace(0)).list_jobs() == []
    assert [job.namespace for job in DueThreads(other_extraction, Pace(0)).list_jobs()] == [
        ("notes", "ann")
    ]


def test_job_of_one_thread_has_the_namespace_of_the_head(runs: BackgroundRuns) -> None:
    """A branch that is newer than the head, and belongs to another user, has no effect."""
    runs.send_message("t")
    head = runs.saver.head("t")
    assert head is not None
    assert head.checkpoint_id is not None
    config: Any = {"configurable": {"thread_id": "t", "user_id": "bo"}}
    runs.graph.invoke({"messages": [HumanMessage("Hi Tom.")]}, config)
    runs.saver.rewind("t", head.checkpoint_id)
    threads = DueThreads(runs.extraction, Pace(0))

    listed = [job.namespace for job in threads.list_jobs()]
    assert [threads.build_job("t", None).namespace] == listed == [("memories", "ann")]


def test_thread_without_a_head_has_no_job(runs: BackgroundRuns) -> None:
    missing: Any = {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": str(uuid6())}
    runs.saver.put_writes({"configurable": missing}, [("messages", 1)], "task")

    with pytest.raises(UnknownThread, match="'t'"):
        DueThreads(runs.extraction, Pace(0)).build_job("t", None)


def test_concurrent_list_jobs_calls_run_one_after_the_other(
    runs: BackgroundRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extractions that run meanwhile make no difference."""
    names = [f"t{number}" for number in range(8)]
    for name in names:
        runs.send_message(name)
    threads = DueThreads(runs.extraction, Pace(0))
    inside, max_inside = 0, 0

    async def read_and_count(*args: Any) -> Any:
        nonlocal inside, max_inside
        inside += 1
        max_inside = max(max_inside, inside)
        await build_effect_that_calls_function_in_thread(lambda: time.sleep(0.01))
        watermarks = await read_watermarks(*args)
        inside -= 1
        return watermarks

    monkeypatch.setattr(extraction, "read_watermarks", read_and_count)
    with ThreadPoolExecutor(4) as pool:
        futures = []
        for name in names:
            futures += [pool.submit(threads.list_jobs) for _ in range(3)]
            runs.extraction.extract(name, thread_config(name))
        listed = [{job.thread_id for job in future.result()} for future in futures]

    assert max_inside == 1
    assert all(thread_ids <= {*names} for thread_ids in listed)
    assert threads.list_jobs() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay_s": -1}, "delay_s is -1"),
        ({"max_wait_s": "long"}, "max_wait_s is 'long'"),
        ({"retries": -1}, "retries is -1"),
        ({"backoff_s": None}, "backoff_s is None"),
        ({"limit_s": 0}, "limit_s is 0"),
    ],
)
def test_invalid_pace_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Pace(**options)


def test_due_threads_refuses_a_saver_that_cannot_list_threads(tmp_path: Path) -> None:
    """The savers of langgraph cannot list threads."""
    with SQLiteStore.open(tmp_path / "m.db") as store:
        extraction = Extraction(InMemorySaver(), store)
        with pytest.raises(ConfigurationError, match=r"SQLiteCheckpointer\.open"):
            DueThreads(extraction, Pace())


def test_thread_with_an_invalid_user_id_does_not_block_the_others(
    runs: BackgroundRuns,
) -> None:
    """The user ID is longer than a label may be. A log record says so."""
    config = thread_config("long")
    config["configurable"]["user_id"] = "u" * 5_000
    runs.graph.invoke({"messages": [HumanMessage("Hi Tom.")]}, config)
    runs.send_message("good")

    assert [job.thread_id for job in DueThreads(runs.extraction, Pace(0)).list_jobs()] == ["good"]

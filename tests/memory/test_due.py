"""What is due is a query over threads and watermarks."""

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
from langgraph.checkpoint.memory import InMemorySaver

from perdure.checkpointers import ThreadHead, ThreadStatus
from perdure.effects import run_computation
from perdure.errors import ConfigurationError
from perdure.memory import extraction
from perdure.memory.extraction import DueThreads, Extraction, Pace, compute_job_state
from perdure.memory.thread_messages import Watermark, read_watermarks
from perdure.stores import SQLiteStore
from tests.memory.background_runs import BackgroundRuns, thread_config

START = datetime(2026, 1, 1, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def head(at: float, uid: str = "c1") -> ThreadHead:
    return ThreadHead("t", uid, {}, after(at), after(at), ThreadStatus())


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[BackgroundRuns]:
    runs = BackgroundRuns(tmp_path)
    yield runs
    runs.close()


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(0, 50), st.integers(0, 200)
)
def test_the_wait_is_bounded(pauses: list[int], delay_s: int, max_wait_s: int) -> None:
    """Whatever is said when: it is due at the nearer of two bounds, and never before the first."""
    last = sum(pauses)
    pace = Pace(delay_s, max_wait_s)
    _, at = compute_job_state(pace, head(last), Watermark(), START, START)

    assert at == min(after(last + delay_s), after(max_wait_s))


def test_failures_are_repeated_ever_later_and_then_no_more() -> None:
    """The pause doubles; the last attempt is followed by none, until something new is said."""
    pace, mark = Pace(30, 600, retries=2, backoff_s=2), Watermark()
    for attempt, pause in ((1, 2), (2, 4)):
        mark = mark.with_failure("no", after(40), "c1")
        assert ("retrying", after(40 + pause)) == compute_job_state(
            pace, head(0), mark, START, after(41)
        )
        assert compute_job_state(pace, head(0), mark, START, after(60))[0] == "due", attempt
    mark = mark.with_failure("no", after(40), "c1")

    assert compute_job_state(pace, head(0), mark, START, after(10_000)) == ("dead", None)
    assert ("due", after(30)) == compute_job_state(pace, head(0, "c2"), mark, START, after(31))


def test_threads_of_all_users_are_found_until_they_are_extracted(runs: BackgroundRuns) -> None:
    """Whose they are stands in the metadata of the head; a new message makes a thread due again."""
    threads = DueThreads(runs.extraction, Pace(0))
    for user in ("ann", "bo"):
        config = thread_config(f"of {user}")
        config["configurable"]["user_id"] = user
        runs.graph.invoke({"messages": [HumanMessage("My cat is called Tom.")]}, config)
    found = {job.thread_id: job for job in threads.list_jobs()}

    assert {name: job.namespace for name, job in found.items()} == {
        "of ann": ("memories", "ann"),
        "of bo": ("memories", "bo"),
    }
    for job in found.values():
        runs.extraction.extract(job.thread_id, job.config)
    assert [] == threads.list_jobs() == DueThreads(runs.extraction, Pace(0)).list_jobs()
    runs.send_message("of ann")
    assert [job.thread_id for job in threads.list_jobs()] == ["of ann"]


def test_threads_that_name_no_user(runs: BackgroundRuns) -> None:
    """They are nobody's, and are listed once nothing was said in them for a while.

    A whole number is a user's name, and a value of another kind is none.
    """
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


def test_another_extractions_threads_are_left_alone(runs: BackgroundRuns) -> None:
    """What one extraction has read is due for another all the same."""
    other = Extraction(runs.saver, runs.store, namespace=("notes", "{user_id}"))
    runs.send_message("g")
    runs.extraction.extract("g", thread_config("g"))

    assert DueThreads(runs.extraction, Pace(0)).list_jobs() == []
    assert [job.namespace for job in DueThreads(other, Pace(0)).list_jobs()] == [("notes", "ann")]


def test_two_threads_may_ask_at_once(runs: BackgroundRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for the other, also if threads are extracted meanwhile."""
    names = [f"t{number}" for number in range(8)]
    for name in names:
        runs.send_message(name)
    threads = DueThreads(runs.extraction, Pace(0))
    inside, most = 0, 0

    async def watched(*args: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await run_computation(lambda: time.sleep(0.01))
        found = await read_watermarks(*args)
        inside -= 1
        return found

    monkeypatch.setattr(extraction, "read_watermarks", watched)
    with ThreadPoolExecutor(4) as pool:
        asked = []
        for name in names:
            asked += [pool.submit(threads.list_jobs) for _ in range(3)]
            runs.extraction.extract(name, thread_config(name))
        left = [{job.thread_id for job in each.result()} for each in asked]

    assert most == 1
    assert all(each <= {*names} for each in left)
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
def test_a_wrong_pace(options: dict[str, Any], message: str) -> None:
    """It is named when it is made."""
    with pytest.raises(ConfigurationError, match=message):
        Pace(**options)


def test_a_checkpointer_that_lists_no_threads(tmp_path: Path) -> None:
    """langgraph's own savers cannot be asked what is due."""
    with SQLiteStore.open(tmp_path / "m.db") as store:
        extraction = Extraction(InMemorySaver(), store)
        with pytest.raises(ConfigurationError, match=r"SQLiteCheckpointer\.open"):
            DueThreads(extraction, Pace())


def test_a_thread_that_no_store_could_keep_does_not_hold_up_the_others(
    runs: BackgroundRuns,
) -> None:
    """Its user's name is longer than a label may be; the log says so, and the rest is due."""
    config = thread_config("long")
    config["configurable"]["user_id"] = "u" * 5_000
    runs.graph.invoke({"messages": [HumanMessage("Hi Tom.")]}, config)
    runs.send_message("good")

    assert [job.thread_id for job in DueThreads(runs.extraction, Pace(0)).list_jobs()] == ["good"]

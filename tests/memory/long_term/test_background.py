"""Background extraction: each waiting thread is extracted once, and every failure is reported."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.long_term.background import Background
from tests.memory.background_runs import PATIENCE_S, BackgroundRuns, read_job_state, wait_until


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundRuns]:
    runs = BackgroundRuns(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def background(runs: BackgroundRuns) -> Iterator[Background]:
    """A background extraction that works and retries once."""
    with runs.make_background(retries=1) as background:
        yield background


def test_idle_thread_is_extracted_and_the_job_reports_counts(
    runs: BackgroundRuns, background: Background
) -> None:
    runs.send_message("a")
    wait_until(lambda: read_job_state(background, "a") == "done")
    (job,) = [job for job in background.jobs("done") if job.thread_id == "a"]

    assert (runs.read_memory_texts("a")) == [
        "assistant: I will remember that.",
        "user: My sister lives in Ghent.",
    ]
    assert (job.namespace, job.attempts, job.error) == (("memories", "ann"), 0, "")
    assert job.report is not None
    assert (job.report["messages"], job.report["added"]) == (2, 2)
    assert str(job).startswith("a in memories/ann: done, 2 added")


def test_each_message_is_extracted_once_however_often_its_thread_is(
    runs: BackgroundRuns, background: Background
) -> None:
    for turn in range(3):
        runs.send_message("b", f"Number {turn} is a number that I like.")
        background.extract_now("b")
        if turn == 1:
            wait_until(lambda: read_job_state(background, "b") == "done")
    assert background.flush() == []

    assert len(runs.read_memory_texts("b")) == 6


def test_failed_extraction_is_retried(runs: BackgroundRuns, background: Background) -> None:
    runs.extractor.failures["c"] = [RuntimeError("the model is tired")]
    runs.send_message("c")
    wait_until(lambda: read_job_state(background, "c") == "done")
    states = [
        (job.state, job.attempts, job.error) for job in runs.reported_jobs if job.thread_id == "c"
    ]

    assert len(runs.read_memory_texts("c")) == 2
    assert states == [("retrying", 1, "RuntimeError: the model is tired"), ("done", 0, "")]


def test_job_that_keeps_failing_is_dead_logged_and_can_be_rerun(
    runs: BackgroundRuns, background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    runs.extractor.failures["d"] = [RuntimeError("first"), RuntimeError("second")]
    with caplog.at_level(logging.INFO, "perdure.background"):
        runs.send_message("d")
        (dead,) = wait_until(lambda: background.jobs("dead"))
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]

    assert (dead.thread_id, dead.attempts, dead.error) == ("d", 2, "RuntimeError: second")
    assert "d in memories/ann: dead, attempt 2, RuntimeError: second" in errors[0].getMessage()
    assert [dead] == background.flush(), "what was given up is not tried unasked"

    background.extract_now(dead.thread_id)
    wait_until(lambda: read_job_state(background, "d") == "done")

    assert len(runs.read_memory_texts("d")) == 2


def test_configuration_error_is_not_retried_until_the_next_message(
    runs: BackgroundRuns, background: Background
) -> None:
    runs.extractor.failures["e"] = [ConfigurationError("no such model")]
    runs.send_message("e")
    (dead,) = wait_until(lambda: background.jobs("dead"))
    runs.send_message("e")
    wait_until(lambda: read_job_state(background, "e") == "done")

    assert (dead.attempts, dead.error) == (1, "ConfigurationError: no such model")


def test_message_sent_during_an_extraction_is_extracted_by_the_next(
    runs: BackgroundRuns, background: Background
) -> None:
    runs.extractor.started.clear()
    runs.extractor.may_finish.clear()
    runs.send_message("f")
    runs.extractor.started.wait(PATIENCE_S)
    wait_until(lambda: read_job_state(background, "f") == "running")
    runs.send_message("f", "My brother lives in Bruges.")
    runs.extractor.may_finish.set()

    wait_until(lambda: len(runs.read_memory_texts("f")) == 4)
    wait_until(lambda: read_job_state(background, "f") == "done")


def test_second_worker_in_a_process_is_refused_but_may_list_and_enqueue(
    runs: BackgroundRuns, background: Background
) -> None:
    """DBOS runs once per process.

    A second `Background` with `work=False` can still use the queue.
    """
    with pytest.raises(ConfigurationError, match="DBOS is already running"):
        runs.make_background().start()
    with runs.make_background(work=False) as idle_background:
        runs.send_message("h")
        idle_background.extract_now("h")
        wait_until(lambda: read_job_state(idle_background, "h") == "done")

    assert len(runs.read_memory_texts("h")) == 2


def test_extract_now_refuses_a_config_without_the_namespace_fields(background: Background) -> None:
    with pytest.raises(InvalidConfig, match="user_id"):
        background.extract_now("x", {"configurable": {"thread_id": "x"}})

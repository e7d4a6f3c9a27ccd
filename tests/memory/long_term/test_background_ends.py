"""Background extraction: how workers start and stop, and which options and errors are refused."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from dbos import DBOS

from perdure.errors import ConfigurationError, StorageUnavailable
from perdure.memory.long_term.background import Background, JobQueue, run_worker
from perdure.memory.long_term.extraction import ExtractionJob
from tests.memory.background_runs import PATIENCE_S, BackgroundRuns, read_job_state, wait_until

NEVER_S = 3600.0


@pytest.fixture
def background_runs(tmp_path: Path) -> Iterator[BackgroundRuns]:
    """Threads, memories and an extraction that no other test uses."""
    runs = BackgroundRuns(tmp_path)
    yield runs
    runs.close()


def test_stop_leaves_no_thread_or_handler_and_restart_extracts_the_rest(
    background_runs: BackgroundRuns,
) -> None:
    threads_before, logger = set(threading.enumerate()), logging.getLogger("dbos")
    handlers, level = list(logger.handlers), logger.level
    background_runs.send_message("a")
    background = background_runs.make_background(delay_s=NEVER_S)
    with background:
        assert read_job_state(background, "a") == "waiting"
    new_threads = set(threading.enumerate()) - threads_before

    assert [thread.name for thread in new_threads if thread.name != "perdure-write"] == []
    assert (handlers, level, []) == (logger.handlers, logger.level, logger.filters)
    assert background_runs.read_memory_texts("a") == []

    async def main() -> list[ExtractionJob]:
        async with background:
            return await asyncio.to_thread(background.flush)

    assert asyncio.run(main()) == []
    assert len(background_runs.read_memory_texts("a")) == 2


def test_stop_finishes_the_extraction_that_is_running(background_runs: BackgroundRuns) -> None:
    background_runs.send_message("a")
    background_runs.extractor.may_finish.clear()
    background = background_runs.make_background().start()
    background_runs.extractor.started.wait(PATIENCE_S)
    threading.Timer(0.2, background_runs.extractor.may_finish.set).start()
    background.stop()

    assert len(background_runs.read_memory_texts("a")) == 2
    assert [job.state for job in background.jobs()] == ["done"]
    background.stop()


def test_hanging_extractor_times_out_and_stop_does_not_wait_for_it(
    background_runs: BackgroundRuns,
) -> None:
    background_runs.extractor.may_finish.clear()
    background_runs.send_message("a")
    with background_runs.make_background(limit_s=0.2, retries=0) as background:
        [job] = wait_until(lambda: background.jobs("dead"))
    assert job.error == "TimeoutError: the extraction took more than 0.2 s"

    background_runs.send_message("a")
    background_runs.extractor.started.clear()
    background = background_runs.make_background().start()
    background_runs.extractor.started.wait(PATIENCE_S)
    stopped = threading.Thread(target=background.stop, args=(0.1,))
    stopped.start()
    stopped.join(PATIENCE_S / 2)
    hung = stopped.is_alive()
    background_runs.extractor.may_finish.set()

    assert not hung
    with background:
        wait_until(lambda: len(background_runs.read_memory_texts("a")) == 4)


def test_cron_schedule_extracts_all_waiting_threads(background_runs: BackgroundRuns) -> None:
    """Without a delay, nothing is extracted before the scheduled time."""
    for thread_id in ("a", "b"):
        background_runs.send_message(thread_id)
    with background_runs.make_background(delay_s=None) as background:
        assert [job.at for job in background.jobs("waiting")] == [None, None]
        background.every("* * * * * *")
        wait_until(lambda: len(background.jobs("done")) == 2)
        background.every(None)
        with pytest.raises(ConfigurationError, match="not a valid schedule: Invalid cron"):
            background.every("at noon")
        with pytest.raises(ConfigurationError, match="Invalid timezone"):
            background.every("0 3 * * *", "Utopia/Nowhere")

    assert (
        len(background_runs.read_memory_texts("a")),
        len(background_runs.read_memory_texts("b")),
    ) == (2, 2)


def test_flush_without_a_worker_returns_the_waiting_jobs(background_runs: BackgroundRuns) -> None:
    """`flush` does not wait forever. Any worker extracts the jobs later."""
    background_runs.send_message("a")
    with background_runs.make_background(work=False) as idle_background:
        waiting_jobs = idle_background.flush(timeout_s=0.1)
        assert [job.thread_id for job in waiting_jobs] == ["a"]
        with background_runs.make_background():
            wait_until(lambda: idle_background.flush() == [])

    assert len(background_runs.read_memory_texts("a")) == 2


def test_start_is_refused_when_the_application_runs_dbos_itself(
    background_runs: BackgroundRuns, tmp_path: Path
) -> None:
    """The application's own DBOS is not touched."""
    url = f"sqlite:///{tmp_path / 'own.sqlite'}"
    DBOS(config={"name": "own", "system_database_url": url, "log_level": "ERROR"})
    try:
        with pytest.raises(ConfigurationError, match="DBOS is already running"):
            background_runs.make_background().start()
        DBOS.launch()
        assert DBOS.list_workflows() == []
    finally:
        DBOS.destroy(destroy_registry=True)


def test_run_worker_ends_on_sigterm_and_restores_signal_handlers(
    background_runs: BackgroundRuns,
) -> None:
    handler_before = signal.getsignal(signal.SIGTERM)
    background_runs.send_message("a")
    run_worker(
        background_runs.make_background(on_job=lambda job: os.kill(os.getpid(), signal.SIGTERM))
    )

    assert handler_before == signal.getsignal(signal.SIGTERM)
    assert len(background_runs.read_memory_texts("a")) == 2
    with pytest.raises(ConfigurationError, match="work"):
        run_worker(background_runs.make_background(work=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"database": "mysql://host/db"}, "'database' is 'mysql://host/db'"),
        ({"database": 7}, "'database' is 7"),
    ],
)
def test_invalid_options_of_background_are_refused(
    background_runs: BackgroundRuns, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        background_runs.make_background(**options)
    with pytest.raises(ConfigurationError, match="expected Extraction"):
        Background(background_runs.saver)  # type: ignore[arg-type]


def test_unopenable_queue_database_raises_storage_unavailable(
    background_runs: BackgroundRuns, tmp_path: Path
) -> None:
    background = background_runs.make_background(database=tmp_path / "no" / "folder" / "jobs")
    with pytest.raises(StorageUnavailable, match="cannot open the queue's database"):
        background.jobs()


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_any_exception_of_an_extractor_makes_a_dead_job_and_a_log_record(
    failure: BaseException, background_runs: BackgroundRuns, caplog: pytest.LogCaptureFixture
) -> None:
    background_runs.extractor.failures["a"] = [failure]
    background_runs.send_message("a")
    with background_runs.make_background(retries=0) as background:
        [job] = wait_until(lambda: background.jobs("dead"))

    assert type(failure).__name__ in job.error
    levels = [record.levelno for record in caplog.records if record.name == "perdure.background"]
    assert levels == [logging.ERROR]


def test_queue_path_with_percent_sign_is_not_unescaped(tmp_path: Path) -> None:
    folder = tmp_path / "50%20off #1"
    folder.mkdir()
    runs = BackgroundRuns(folder)
    runs.send_message("a")
    with runs.make_background() as background:
        wait_until(lambda: background.jobs("done"))
    runs.close()

    assert [path.name for path in tmp_path.iterdir()] == ["50%20off #1"]
    assert [path.name for path in folder.glob("*.jobs")]


def test_jobs_without_a_worker_leave_out_deleted_threads(background_runs: BackgroundRuns) -> None:
    """No worker of this process tries the thread, so the list itself checks that it exists."""
    for thread_id in ("a", "b"):
        background_runs.send_message(thread_id)
    with background_runs.make_background(work=False) as background:
        assert {job.thread_id for job in background.jobs()} == {"a", "b"}
        background_runs.saver.delete_thread("a")
        assert [job.thread_id for job in background.jobs()] == ["b"]


def test_job_left_running_by_a_dead_worker_counts_as_failed(
    background_runs: BackgroundRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that kills its workers is given up in the end.

    A deleted thread does not delay a start.
    """
    left_jobs = [
        ExtractionJob(thread_id, ("memories", "ann"), "running") for thread_id in ("a", "gone")
    ]
    monkeypatch.setattr(
        JobQueue, "run_worker_and_yield_lost_jobs", lambda *args: nullcontext(left_jobs)
    )
    background_runs.send_message("a")
    for attempt, state in ((1, "retrying"), (2, "dead")):
        with background_runs.make_background(retries=1, backoff_s=NEVER_S) as background:
            [job] = background.jobs()
            assert (job.thread_id, job.state, job.attempts) == ("a", state, attempt)
    assert "the worker ended" in background_runs.reported_jobs[-1].error


def test_job_of_a_deleted_thread_disappears(background_runs: BackgroundRuns) -> None:
    with background_runs.make_background(delay_s=0.3) as background:
        background_runs.send_message("a")
        assert read_job_state(background, "a") == "waiting"
        background_runs.saver.delete_thread("a")
        wait_until(lambda: background.jobs() == [])

        assert background.flush() == []

"""Background extraction: how it begins and ends, and what it refuses."""

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
from perdure.memory.background import Background, JobQueue, run_worker
from perdure.memory.extraction import ExtractionJob
from tests.memory.background_runs import PATIENCE_S, BackgroundRuns, read_job_state, wait_until

NEVER_S = 3600.0


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[BackgroundRuns]:
    runs = BackgroundRuns(tmp_path)
    yield runs
    runs.close()


def test_stop_leaves_nothing_and_start_goes_on(alone: BackgroundRuns) -> None:
    """No thread, handler or lock is left; what waited is extracted after the next start."""
    before, logger = set(threading.enumerate()), logging.getLogger("dbos")
    handlers, level = list(logger.handlers), logger.level
    alone.send_message("a")
    background = alone.make_background(delay_s=NEVER_S)
    with background:
        assert read_job_state(background, "a") == "waiting"
    left = set(threading.enumerate()) - before

    assert [thread.name for thread in left if thread.name != "perdure-write"] == []
    assert (handlers, level, []) == (logger.handlers, logger.level, logger.filters)
    assert alone.read_memory_texts("a") == []

    async def main() -> list[ExtractionJob]:
        async with background:
            return await asyncio.to_thread(background.flush)

    assert asyncio.run(main()) == []
    assert len(alone.read_memory_texts("a")) == 2


def test_stop_finishes_what_was_begun(alone: BackgroundRuns) -> None:
    """A thread that is being extracted is extracted when `stop` returns; its job is done."""
    alone.send_message("a")
    alone.extractor.may_finish.clear()
    background = alone.make_background().start()
    alone.extractor.started.wait(PATIENCE_S)
    threading.Timer(0.2, alone.extractor.may_finish.set).start()
    background.stop()

    assert len(alone.read_memory_texts("a")) == 2
    assert [job.state for job in background.jobs()] == ["done"]
    background.stop()


def test_an_extractor_that_hangs_is_left(alone: BackgroundRuns) -> None:
    """It fails at its limit; and `stop` waits for as long as it is told, and no longer."""
    alone.extractor.may_finish.clear()
    alone.send_message("a")
    with alone.make_background(limit_s=0.2, retries=0) as background:
        [job] = wait_until(lambda: background.jobs("dead"))
    assert job.error == "TimeoutError: the extraction took more than 0.2 s"

    alone.send_message("a")
    alone.extractor.started.clear()
    background = alone.make_background().start()
    alone.extractor.started.wait(PATIENCE_S)
    stopped = threading.Thread(target=background.stop, args=(0.1,))
    stopped.start()
    stopped.join(PATIENCE_S / 2)
    hung = stopped.is_alive()
    alone.extractor.may_finish.set()

    assert not hung
    with background:
        wait_until(lambda: len(alone.read_memory_texts("a")) == 4)


def test_cron_extracts_all(alone: BackgroundRuns) -> None:
    """Without a delay nothing is extracted until the clock says so; then all is."""
    for thread_id in ("a", "b"):
        alone.send_message(thread_id)
    with alone.make_background(delay_s=None) as background:
        assert [job.at for job in background.jobs("waiting")] == [None, None]
        background.every("* * * * * *")
        wait_until(lambda: len(background.jobs("done")) == 2)
        background.every(None)
        with pytest.raises(ConfigurationError, match="not a schedule: Invalid cron"):
            background.every("at noon")
        with pytest.raises(ConfigurationError, match="Invalid timezone"):
            background.every("0 3 * * *", "Utopia/Nowhere")

    assert (len(alone.read_memory_texts("a")), len(alone.read_memory_texts("b"))) == (2, 2)


def test_flush_without_a_worker(alone: BackgroundRuns) -> None:
    """It does not wait for ever, and returns what is left; any worker extracts that later."""
    alone.send_message("a")
    with alone.make_background(work=False) as other:
        left = other.flush(timeout_s=0.1)
        assert [job.thread_id for job in left] == ["a"]
        with alone.make_background():
            wait_until(lambda: other.flush() == [])

    assert len(alone.read_memory_texts("a")) == 2


def test_an_application_that_runs_dbos_itself(alone: BackgroundRuns, tmp_path: Path) -> None:
    """It is told so, and its own DBOS is not touched."""
    url = f"sqlite:///{tmp_path / 'own.sqlite'}"
    DBOS(config={"name": "own", "system_database_url": url, "log_level": "ERROR"})
    try:
        with pytest.raises(ConfigurationError, match="runs DBOS already"):
            alone.make_background().start()
        DBOS.launch()
        assert DBOS.list_workflows() == []
    finally:
        DBOS.destroy(destroy_registry=True)


def test_a_worker_ends_when_told(alone: BackgroundRuns) -> None:
    """`run_worker` extracts until SIGTERM, and gives the signals back."""
    before = signal.getsignal(signal.SIGTERM)
    alone.send_message("a")
    run_worker(alone.make_background(on_job=lambda job: os.kill(os.getpid(), signal.SIGTERM)))

    assert before == signal.getsignal(signal.SIGTERM)
    assert len(alone.read_memory_texts("a")) == 2
    with pytest.raises(ConfigurationError, match="work"):
        run_worker(alone.make_background(work=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"database": "mysql://host/db"}, "database is 'mysql://host/db'"),
        ({"database": 7}, "database is 7"),
    ],
)
def test_wrong_options(alone: BackgroundRuns, options: dict[str, Any], message: str) -> None:
    """They are named when it is made."""
    with pytest.raises(ConfigurationError, match=message):
        alone.make_background(**options)
    with pytest.raises(ConfigurationError, match="expected Extraction"):
        Background(alone.saver)  # type: ignore[arg-type]


def test_a_database_that_is_not_there(alone: BackgroundRuns, tmp_path: Path) -> None:
    """It is perdure's error, with the reason."""
    background = alone.make_background(database=tmp_path / "no" / "folder" / "jobs")
    with pytest.raises(StorageUnavailable, match="the queue's database cannot be opened"):
        background.jobs()


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_no_failure_is_silent(
    failure: BaseException, alone: BackgroundRuns, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever an extractor raises, the job is dead and the log says so."""
    alone.extractor.failures["a"] = [failure]
    alone.send_message("a")
    with alone.make_background(retries=0) as background:
        [job] = wait_until(lambda: background.jobs("dead"))

    assert type(failure).__name__ in job.error
    levels = [each.levelno for each in caplog.records if each.name == "perdure.background"]
    assert levels == [logging.ERROR]


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    """A folder with a percent sign is none with an escape in its name."""
    folder = tmp_path / "50%20off #1"
    folder.mkdir()
    runs = BackgroundRuns(folder)
    runs.send_message("a")
    with runs.make_background() as background:
        wait_until(lambda: background.jobs("done"))
    runs.close()

    assert [path.name for path in tmp_path.iterdir()] == ["50%20off #1"]
    assert [path.name for path in folder.glob("*.jobs")]


def test_a_process_that_only_looks_lists_no_deleted_thread(alone: BackgroundRuns) -> None:
    """Nobody tries it there, so the list itself asks whether the thread is there."""
    for thread_id in ("a", "b"):
        alone.send_message(thread_id)
    with alone.make_background(work=False) as background:
        assert {job.thread_id for job in background.jobs()} == {"a", "b"}
        alone.saver.delete_thread("a")
        assert [job.thread_id for job in background.jobs()] == ["b"]


def test_a_job_that_an_ended_worker_left_has_failed(
    alone: BackgroundRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that kills its workers is given up in the end; a deleted one holds up no start."""
    left = [ExtractionJob(thread_id, ("memories", "ann"), "running") for thread_id in ("a", "gone")]
    monkeypatch.setattr(JobQueue, "run_jobs_in_context", lambda *args: nullcontext(left))
    alone.send_message("a")
    for attempt, state in ((1, "retrying"), (2, "dead")):
        with alone.make_background(retries=1, backoff_s=NEVER_S) as background:
            [job] = background.jobs()
            assert (job.thread_id, job.state, job.attempts) == ("a", state, attempt)
    assert "the worker ended" in alone.reported_jobs[-1].error


def test_a_thread_that_was_deleted_is_due_no_longer(alone: BackgroundRuns) -> None:
    """Its extraction finds nothing, and nobody is told of it again."""
    with alone.make_background(delay_s=0.3) as background:
        alone.send_message("a")
        assert read_job_state(background, "a") == "waiting"
        alone.saver.delete_thread("a")
        wait_until(lambda: background.jobs() == [])

        assert background.flush() == []

"""Background extraction: what is due is extracted once, and nothing fails in silence."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.background import Background
from tests.memory.background_runs import PATIENCE_S, Runs, state_of, until


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def background(runs: Runs) -> Iterator[Background]:
    """One that works, and tries twice."""
    with runs.background(retries=1) as background:
        yield background


def test_a_thread_that_was_quiet_is_extracted(runs: Runs, background: Background) -> None:
    """What was said becomes memories, and the job tells how many."""
    runs.say("a")
    until(lambda: state_of(background, "a") == "done")
    (job,) = [job for job in background.jobs("done") if job.thread_id == "a"]

    assert (runs.memories("a")) == [
        "assistant: I will remember that.",
        "user: My sister lives in Ghent.",
    ]
    assert (job.namespace, job.attempts, job.error) == (("memories", "ann"), 0, "")
    assert job.report is not None
    assert (job.report["messages"], job.report["added"]) == (2, 2)
    assert str(job).startswith("a in memories/ann: done, 2 added")


def test_each_message_is_extracted_once(runs: Runs, background: Background) -> None:
    """However often its thread is extracted."""
    for turn in range(3):
        runs.say("b", f"Number {turn} is a number that I like.")
        background.extract_now("b")
        if turn == 1:
            until(lambda: state_of(background, "b") == "done")
    assert background.flush() == []

    assert len(runs.memories("b")) == 6


def test_a_failure_is_tried_again(runs: Runs, background: Background) -> None:
    """A thread that failed is extracted by the next attempt."""
    runs.extractor.failures["c"] = [RuntimeError("the model is tired")]
    runs.say("c")
    until(lambda: state_of(background, "c") == "done")
    states = [(job.state, job.attempts, job.error) for job in runs.told if job.thread_id == "c"]

    assert len(runs.memories("c")) == 2
    assert states == [("retrying", 1, "RuntimeError: the model is tired"), ("done", 0, "")]


def test_what_keeps_failing_is_given_up_visibly(
    runs: Runs, background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the list of the dead with its error, it is logged, and by hand it is extracted."""
    runs.extractor.failures["d"] = [RuntimeError("first"), RuntimeError("second")]
    with caplog.at_level(logging.INFO, "perdure.background"):
        runs.say("d")
        (dead,) = until(lambda: background.jobs("dead"))
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]

    assert (dead.thread_id, dead.attempts, dead.error) == ("d", 2, "RuntimeError: second")
    assert "d in memories/ann: dead, attempt 2, RuntimeError: second" in errors[0].getMessage()
    assert [dead] == background.flush(), "what was given up is not tried unasked"

    background.extract_now(dead.thread_id)
    until(lambda: state_of(background, "d") == "done")

    assert len(runs.memories("d")) == 2


def test_an_error_that_stays_is_not_tried_again(runs: Runs, background: Background) -> None:
    """A wrong configuration is given up at once; what is said next is a new beginning."""
    runs.extractor.failures["e"] = [ConfigurationError("no such model")]
    runs.say("e")
    (dead,) = until(lambda: background.jobs("dead"))
    runs.say("e")
    until(lambda: state_of(background, "e") == "done")

    assert (dead.attempts, dead.error) == (1, "ConfigurationError: no such model")


def test_what_is_said_meanwhile_is_extracted_too(runs: Runs, background: Background) -> None:
    """A message that comes too late for one attempt is what the next is for."""
    runs.extractor.began.clear()
    runs.extractor.hold.clear()
    runs.say("f")
    runs.extractor.began.wait(PATIENCE_S)
    until(lambda: state_of(background, "f") == "running")
    runs.say("f", "My brother lives in Bruges.")
    runs.extractor.hold.set()

    until(lambda: len(runs.memories("f")) == 4)
    until(lambda: state_of(background, "f") == "done")


def test_a_second_one_is_refused(runs: Runs, background: Background) -> None:
    """DBOS is one of a process: the second to work is told so, and may still look and ask."""
    with pytest.raises(ConfigurationError, match="runs DBOS already"):
        runs.background().start()
    with runs.background(work=False) as other:
        runs.say("h")
        other.extract_now("h")
        until(lambda: state_of(other, "h") == "done")

    assert len(runs.memories("h")) == 2


def test_a_config_that_does_not_fill_the_namespace(background: Background) -> None:
    """It is refused where it is given."""
    with pytest.raises(InvalidConfig, match="user_id"):
        background.extract_now("x", {"configurable": {"thread_id": "x"}})

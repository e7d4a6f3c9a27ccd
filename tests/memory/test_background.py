"""Background extraction: what is scheduled is formed later, once, and nothing fails in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from perdure.errors import ConfigurationError, InvalidConfig, UnknownThread
from perdure.memory.background.background import Background
from perdure.memory.extraction import Extraction
from tests.memory.houses import PATIENCE_S, House, config_of, state_of, until


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    yield house
    house.close()


@pytest.fixture(scope="module")
def background(house: House) -> Iterator[Background]:
    """One that works, and tries twice."""
    with house.background(retries=1) as background:
        yield background


def test_a_scheduled_thread_is_formed(house: House, background: Background) -> None:
    """What was said becomes memories, and the job tells how many."""
    house.say("a")
    background.schedule("a", config_of("a"))
    until(lambda: state_of(background, "a") == "done")
    (job,) = [job for job in background.jobs("done") if job.thread_id == "a"]

    assert (house.memories("a")) == [
        "assistant: I will remember that.",
        "user: My sister lives in Ghent.",
    ]
    assert (job.namespace, job.attempts, job.error) == (("memories", "ann"), 1, None)
    assert job.report is not None
    assert (job.report["messages"], job.report["added"]) == (2, 2)
    assert str(job).startswith("a in memories/ann: done, 2 added")
    assert job in house.told


def test_scheduling_twice_forms_once(house: House, background: Background) -> None:
    """Every message has one memory, however often its thread is scheduled and formed."""
    for turn in range(3):
        house.say("b", f"Number {turn} is a number that I like.")
        background.schedule("b", config_of("b"))
        background.schedule("b", config_of("b"))
        if turn == 1:
            until(lambda: state_of(background, "b") == "done")
    until(lambda: state_of(background, "b") == "done")

    assert len(house.memories("b")) == 6
    assert house.extraction.pending() == []


def test_a_failure_is_tried_again(house: House, background: Background) -> None:
    """A thread that failed is formed by the next attempt."""
    house.say("c")
    house.former.failures["c"] = [RuntimeError("the model is tired")]
    background.schedule("c", config_of("c"))
    until(lambda: state_of(background, "c") == "done")
    states = [(job.state, job.attempts, job.error) for job in house.told if job.thread_id == "c"]

    assert len(house.memories("c")) == 2
    assert states == [("retrying", 1, "RuntimeError: the model is tired"), ("done", 2, None)]


def test_what_keeps_failing_is_given_up_visibly(
    house: House, background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the list of the dead with its error, it is logged, and `retry` forms it."""
    house.say("d")
    house.former.failures["d"] = [RuntimeError("first"), RuntimeError("second")]
    with caplog.at_level(logging.INFO, "perdure.forming"):
        background.schedule("d", config_of("d"))
        (dead,) = until(lambda: background.jobs("dead"))
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]

    assert (dead.thread_id, dead.attempts, dead.error) == ("d", 2, "RuntimeError: second")
    assert [record.name for record in errors] == ["perdure.forming"]
    assert "d in memories/ann: dead, attempt 2, RuntimeError: second" in errors[0].getMessage()
    assert [dead] == background.flush(), "what was given up is not tried unasked"

    background.retry(dead)
    until(lambda: state_of(background, "d") == "done")

    assert len(house.memories("d")) == 2
    with pytest.raises(UnknownThread, match="does not wait"):
        background.retry(dead)


def test_an_error_that_stays_is_not_tried_again(house: House, background: Background) -> None:
    """A wrong configuration is given up at once; what is said next is a new beginning."""
    house.say("e")
    house.former.failures["e"] = [ConfigurationError("no such model")]
    background.schedule("e", config_of("e"))
    (dead,) = until(lambda: background.jobs("dead"))
    background.schedule("e", config_of("e"))
    until(lambda: state_of(background, "e") == "done")

    assert (dead.attempts, dead.error) == (1, "ConfigurationError: no such model")


def test_a_thread_that_is_not_there_is_given_up(
    house: House, background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried as often as any other; then the log has an error, and it waits no longer."""
    with caplog.at_level(logging.INFO, "perdure.forming"):
        background.form_now("nowhere", config_of("nowhere"))
        until(lambda: "nowhere" in [job.thread_id for job in house.told if job.state == "dead"])
    ends = [(job.state, job.attempts) for job in house.told if job.thread_id == "nowhere"]
    [told] = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]

    assert ends == [("retrying", 1), ("dead", 2)]
    assert "UnknownThread: there is no thread 'nowhere'" in told
    assert "waits no longer" in told
    assert background.extraction.pending() == []
    assert background.jobs("dead") == []


def test_a_thread_is_formed_anew(house: House, background: Background) -> None:
    """What was formed by then is formed once more, and is the same memories."""
    house.say("j")
    background.form_now("j", config_of("j"))
    until(lambda: state_of(background, "j") == "done")
    background.form_now("j", config_of("j"), anew=True)
    until(lambda: len([job for job in house.told if job.thread_id == "j"]) > 1)
    reports = [job.report or {} for job in house.told if job.thread_id == "j"]

    assert [(each["messages"], each["added"], each["unchanged"]) for each in reports] == [
        (2, 2, 0),
        (2, 0, 2),
    ]
    assert len(house.memories("j")) == 2
    with pytest.raises(UnknownThread, match="nobody"):
        background.form_now("nobody", config_of("nobody"), anew=True)


def test_what_is_said_while_a_thread_is_formed_is_formed_too(
    house: House, background: Background
) -> None:
    """A message that comes too late for one attempt is what the next is for."""
    house.say("f")
    house.former.began.clear()
    house.former.hold.clear()
    background.schedule("f", config_of("f"))
    house.former.began.wait(PATIENCE_S)
    house.say("f", "My brother lives in Bruges.")
    background.schedule("f", config_of("f"))
    house.former.hold.set()
    until(lambda: len(house.memories("f")) == 4)

    until(lambda: state_of(background, "f") == "done")


def test_another_formations_threads_are_left_alone(house: House, background: Background) -> None:
    """Threads that wait for a extraction with other namespaces are not this one's."""
    other = Extraction(house.saver, house.store, namespace=("notes", "{user_id}"))
    house.say("g")
    other.note("g", config_of("g"))
    background.flush()

    assert None is state_of(background, "g")
    assert [note.thread_id for note in other.pending(("notes",))] == ["g"]
    other.extract("g", config_of("g"))


def test_a_second_one_is_refused(house: House, background: Background) -> None:
    """DBOS is one of a process: the second to work is told so, and may still schedule and look."""
    second = house.background()
    with pytest.raises(ConfigurationError, match="another Background works in this process"):
        second.start()
    with house.background(work=False) as scheduler:
        house.say("h")
        scheduler.form_now("h", config_of("h"))
        until(lambda: state_of(scheduler, "h") == "done")

    assert len(house.memories("h")) == 2


def test_async(house: House, background: Background) -> None:
    """A coroutine schedules without blocking its loop."""

    async def main() -> None:
        await background.aschedule("i", config_of("i"))

    house.say("i")
    asyncio.run(main())
    until(lambda: state_of(background, "i") == "done")


def test_a_config_that_does_not_fill_the_namespace(background: Background) -> None:
    """It is refused where it is made, and nothing waits."""
    with pytest.raises(InvalidConfig, match="user_id"):
        background.schedule("x", {"configurable": {"thread_id": "x"}})
    with pytest.raises(InvalidConfig, match="user_id"):
        background.form_now("x")

    assert background.extraction.pending() == []

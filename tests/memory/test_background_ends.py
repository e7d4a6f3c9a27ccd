"""Background extraction: how it begins and ends, what it asks for, and what it refuses."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dbos import DBOS
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore

from perdure.errors import ConfigurationError, MissingDependency, StorageUnavailable
from perdure.memory.background.background import Background
from perdure.memory.background.jobs import Job
from perdure.memory.background.worker import work
from perdure.memory.extraction import Extraction
from tests.memory.houses import PATIENCE_S, House, config_of, state_of, until

NEVER_S = 3600.0


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


def test_stop_leaves_nothing_and_start_goes_on(alone: House) -> None:
    """No thread, handler or lock is left; what waited is formed after the next start."""
    before, logger = set(threading.enumerate()), logging.getLogger("dbos")
    handlers, level = list(logger.handlers), logger.level
    alone.say("a")
    background = alone.background(delay_s=NEVER_S)
    with background:
        background.schedule("a", config_of("a"))
        assert state_of(background, "a") == "waiting"
    left = set(threading.enumerate()) - before

    assert [thread.name for thread in left if thread.name != "perdure-write"] == []
    assert (handlers, level, []) == (logger.handlers, logger.level, logger.filters)
    assert alone.memories("a") == []

    async def main() -> list[Job]:
        async with background:
            return await asyncio.to_thread(background.flush)

    assert asyncio.run(main()) == []
    assert len(alone.memories("a")) == 2
    assert list(Path(alone.store.database.path).parent.glob("*.jobs.*.lock")) == []


def test_stop_finishes_what_was_begun(alone: House) -> None:
    """A thread that is being formed is formed when `stop` returns; its job is done."""
    alone.say("a")
    alone.former.hold.clear()
    background = alone.background().start()
    background.schedule("a", config_of("a"))
    alone.former.began.wait(PATIENCE_S)
    threading.Timer(0.2, alone.former.hold.set).start()
    background.stop()

    assert len(alone.memories("a")) == 2
    assert [job.state for job in background.jobs()] == ["done"]
    background.stop()


def test_cron_forms_what_waits(alone: House) -> None:
    """Without a delay nothing is formed until the clock says so; then all is."""
    for thread_id in ("a", "b"):
        alone.say(thread_id)
    with alone.background(delay_s=None, cron="* * * * * *") as background:
        background.schedule("a", config_of("a"))
        background.schedule("b", config_of("b"))
        assert [job.due_at for job in background.jobs("waiting")] == [None, None]
        until(lambda: len(background.jobs("done")) == 2)
        background.every(None)
        with pytest.raises(ConfigurationError, match="no schedule: Invalid cron"):
            background.every("at noon")

    assert (len(alone.memories("a")), len(alone.memories("b"))) == (2, 2)


def test_flush_without_a_worker(alone: House) -> None:
    """It does not wait for ever, and returns what is left; any worker forms that later."""
    alone.say("a")
    with alone.background(work=False) as scheduler:
        scheduler.schedule("a", config_of("a"))
        left = scheduler.flush(timeout_s=0.1)

        assert [(job.thread_id, job.state) for job in left] == [("a", "due")]
        with alone.background():
            until(lambda: scheduler.flush() == [])

    assert len(alone.memories("a")) == 2


def test_a_bad_cron_stops_the_start(alone: House) -> None:
    """A malformed expression is an error of `start`, which leaves nothing behind."""
    background = alone.background(cron="0 3 * * *", timezone="Utopia/Nowhere")
    with pytest.raises(ConfigurationError, match="Invalid timezone"):
        background.start()
    assert not any(each.name == "perdure-forming" for each in threading.enumerate())


def test_other_stores() -> None:
    """On langgraph's stores it works as well; with one in memory attempts are in a passing file."""
    saver, store = InMemorySaver(), InMemoryStore()
    builder = StateGraph(MessagesState)
    builder.add_node("reply", lambda state: {"messages": [AIMessage("I will remember that.")]})
    builder.add_edge(START, "reply")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"messages": [HumanMessage("My cat is called Tom.")]}, config_of("a"))
    with Background(Extraction(saver, store), delay_s=None) as background:
        background.schedule("a", config_of("a"))
        left = background.flush()

    assert left == []
    assert len(store.search(("memories", "ann"))) == 2


def test_an_application_that_runs_dbos_itself(alone: House, tmp_path: Path) -> None:
    """It is told so, and its own DBOS is not touched."""
    url = f"sqlite:///{tmp_path / 'own.sqlite'}"
    DBOS(config={"name": "own", "system_database_url": url, "log_level": "ERROR"})
    try:
        with pytest.raises(ConfigurationError, match="runs DBOS for something else"):
            alone.background().start()
        DBOS.launch()
        assert DBOS.list_workflows() == []
    finally:
        DBOS.destroy(destroy_registry=True)


def test_a_worker_ends_when_told(alone: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """`work` forms until SIGTERM, and gives the signals back."""
    before = signal.getsignal(signal.SIGTERM)
    alone.say("a")
    background = alone.background(told=lambda job: os.kill(os.getpid(), signal.SIGTERM))
    background.schedule("a", config_of("a"))
    work(background)

    assert before == signal.getsignal(signal.SIGTERM)
    assert len(alone.memories("a")) == 2
    with pytest.raises(ConfigurationError, match="work=False"):
        work(alone.background(work=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay_s": -1}, "delay_s is -1"),
        ({"max_wait_s": "long"}, "max_wait_s is 'long'"),
        ({"retries": -1}, "retries is -1"),
        ({"backoff_s": None}, "backoff_s is None"),
        ({"workers": 0}, "workers is 0"),
        ({"name": "My App"}, "name is 'My App'"),
        ({"database": "mysql://host/db"}, "database is 'mysql://host/db'"),
        ({"database": 7}, "database is 7"),
    ],
)
def test_wrong_options(alone: House, options: dict[str, Any], message: str) -> None:
    """They are named when it is made."""
    with pytest.raises(ConfigurationError, match=message):
        alone.background(**options)


def test_no_store(alone: House) -> None:
    """A extraction without a store of its own has nowhere to note what waits."""
    with pytest.raises(ConfigurationError, match="with a store"):
        Background(Extraction(alone.saver))
    with pytest.raises(ConfigurationError, match="expected Extraction"):
        Background(alone.saver)  # type: ignore[arg-type]


def test_without_dbos(alone: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"perdure\[background\]"):
        alone.background()


def test_a_database_that_is_not_there(alone: House, tmp_path: Path) -> None:
    """It is perdure's error, with the reason; scheduling goes on."""
    background = alone.background(database=tmp_path / "no" / "folder" / "jobs")
    with pytest.raises(StorageUnavailable, match="the jobs' database cannot be opened"):
        background.jobs()


class Mute(Exception):
    """An error whose message cannot be had."""

    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt(), Mute()], ids=repr)
def test_no_failure_is_silent(
    failure: BaseException, alone: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a former raises, even what ends processes, the job is dead and the log says so."""
    alone.say("a")
    alone.former.failures["a"] = [failure]
    with alone.background(retries=0) as background:
        background.schedule("a", config_of("a"))
        [job] = until(lambda: background.jobs("dead"))

    assert type(failure).__name__ in str(job.error)
    assert [record.levelno for record in caplog.records if record.name == "perdure.forming"] == [
        logging.ERROR
    ]


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    """A folder with a percent sign is none with an escape in its name."""
    folder = tmp_path / "50%20off #1"
    folder.mkdir()
    house = House(folder)
    house.say("a")
    with house.background() as background:
        background.schedule("a", config_of("a"))
        until(lambda: background.jobs("done"))
    house.close()

    assert [path.name for path in tmp_path.iterdir()] == ["50%20off #1"]
    assert [path.name for path in folder.glob("*.jobs")]

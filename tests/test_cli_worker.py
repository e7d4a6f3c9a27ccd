"""`perdure worker` and `jobs`: memories formed in the background, and what could not be formed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, UnknownThread
from tests.memory.test_forming_facts import facts
from tests.memory_commands import attempt, read, rows, run, talks, texts
from tests.openai_server import PATIENCE, Failure, OpenAIServer, Reply
from tests.test_cli_chat import COMMAND, environment, use

NUTS = {"action": "insert", "text": "The user is allergic to nuts.", "messages": [1]}


@pytest.fixture(autouse=True)
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The database that commands work on."""
    path = tmp_path / "x.db"
    monkeypatch.setenv("PERDURE_DB", str(path))
    return path


@pytest.fixture
def trip(tmp_path: Path) -> str:
    """A thread that waits."""
    run("import", "--later", talks(tmp_path, trip=["I am allergic to nuts", "I will not forget"]))
    return "trip"


def scripted(monkeypatch: pytest.MonkeyPatch, *replies: Reply) -> Iterator[OpenAIServer]:
    with OpenAIServer(replies) as server:
        use(monkeypatch, server)
        yield server


def test_what_waits_is_formed_and_told(trip: str, tmp_path: Path) -> None:
    """--once forms the threads of all users, a line each, and ends; the list has the results."""
    run("import", "--later", "--user", "ann", talks(tmp_path, home=["I live in Ghent"]))
    before = rows(run("jobs"))
    printed = run("worker", "--once")
    after = read("jobs")
    nothing = run("worker", "--once")

    assert before[0] == ["thread", "memories", "state", "at", "attempts", "what came of it"]
    assert sorted(row[:3] for row in before[1:]) == [
        ["home", "memories/ann", "waiting"],
        ["trip", "memories/me", "waiting"],
    ]
    assert sorted(printed.splitlines()) == [
        "home in memories/ann: done, 1 added",
        "trip in memories/me: done, 2 added",
    ]
    assert {job["thread_id"]: job["state"] for job in after} == {"home": "done", "trip": "done"}
    assert "2 added" in run("jobs")
    assert len(texts()) == 2
    assert nothing == ""


def test_facts_are_asked_of_the_model(trip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--facts forms them beside the turns, at the cost of a call."""
    for server in scripted(monkeypatch, facts(NUTS)):
        (job,) = map(json.loads, run("worker", "--once", "--facts", "--json").splitlines())

        assert len(server.requests) == 1
    assert job["report"]["added"] == 3
    assert texts("--kind", "fact") == ["The user is allergic to nuts."]


def test_without_a_model_there_are_no_facts(trip: str) -> None:
    """--facts without a model is refused before anything is formed; else no model is asked."""
    result = attempt("worker", "--once", "--facts")

    assert isinstance(result.exception, ConfigurationError)
    assert "PERDURE_MODEL" in str(result.exception)
    assert [job["state"] for job in read("jobs")] == ["waiting"]


def test_what_was_given_up_is_listed_and_tried_again(
    trip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that trying again does not mend is in the list with its error, until --retry."""
    for _ in scripted(monkeypatch, Failure(401, "no such key"), facts(NUTS)):
        failed = attempt("worker", "--once", "--facts")
        dead = read("jobs", "--facts", "--dead")
        unknown = attempt("jobs", "--facts", "--retry", "nope")
        retried = attempt("jobs", "--facts", "--retry", trip)
        run("worker", "--once", "--facts")

    assert failed.exit_code == 1
    assert "not extracted: trip in memories/me: dead" in failed.stderr
    assert [job["thread_id"] for job in dead] == [trip]
    assert "no such key" in dead[0]["error"]
    assert isinstance(unknown.exception, UnknownThread)
    assert retried.stderr == "1 thread will be tried again\n"
    for _ in scripted(monkeypatch):
        assert attempt("jobs", "--facts", "--dead").stderr == "nothing was given up\n"
    assert texts("--kind", "fact") == ["The user is allergic to nuts."]


def test_a_worker_works_until_it_is_stopped(db: Path, trip: str) -> None:
    """It forms what waits once nothing was said for --delay, says so at once, and ends cleanly."""
    with subprocess.Popen(
        [*COMMAND, "worker", "--delay", "0.1"],
        env=environment(db),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as worker:
        assert worker.stdout is not None
        told = worker.stdout.readline()
        worker.send_signal(signal.SIGTERM)
        _, errors = worker.communicate(timeout=PATIENCE)

    assert told == "trip in memories/me: done, 2 added\n"
    assert (worker.returncode, errors) == (0, "")
    assert len(texts()) == 2


def test_without_jobs_no_file_of_jobs_is_begun(db: Path, trip: str) -> None:
    """Looking at what waits needs no worker, and nothing to retry is said."""
    retried = attempt("jobs", "--retry-all")

    assert retried.stderr.startswith("0 threads will be tried again\n")
    assert rows(run("jobs"))[1][:3] == [trip, "memories/me", "waiting"]
    assert sorted(path.name for path in db.parent.glob("x.db*")) == ["x.db", "x.db.lock"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--timezone", "Europe/Berlin"), "--timezone"),
        (("--once", "--cron", "now and then"), "now and then"),
        (("--delay", "-1"), "delay"),
        (("--database", "mysql://x"), "mysql://x"),
    ],
)
def test_a_wrong_use_is_named(options: tuple[str, ...], said: str, trip: str) -> None:
    """What was typed is refused before anything is formed."""
    result = attempt("worker", *options)

    assert isinstance(result.exception, ConfigurationError)
    assert said in str(result.exception)
    assert texts() == []

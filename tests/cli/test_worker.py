"""`perdure worker`: memories extracted and old data removed in the background."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.stores import SQLiteStore
from tests.cli.commands import invoke, run
from tests.memory.test_model_extractor import build_facts_answer
from tests.openai_server import PATIENCE, Failure, OpenAIServer
from tests.talks import talk

NUTS = {"action": "insert", "text": "The user is allergic to nuts.", "messages": [1]}
SAID = ("I am allergic to nuts", "I will not forget")


@pytest.fixture(autouse=True)
def trip(db: Path) -> str:
    """A thread that waits."""
    with SQLiteCheckpointer.open(db) as saver:
        talk(saver, "trip", said=SAID, user_id="me")
    return "trip"


def texts(db: Path, kind: str, user: str = "me") -> list[str]:
    with SQLiteStore.open(db) as store:
        found = store.search(("memories", user), filter={"kind": kind})
    return sorted(item.value["text"] for item in found)


def use(monkeypatch: pytest.MonkeyPatch, server: OpenAIServer) -> None:
    monkeypatch.setenv("PERDURE_MODEL", "scripted")
    monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)


def test_what_waits_is_extracted_and_told(db: Path) -> None:
    """--once extracts the threads of all users, a line each, and ends."""
    with SQLiteCheckpointer.open(db) as saver:
        talk(saver, "home", said=["I live in Ghent"], user_id="ann")
    printed = run("worker", "--once")

    assert sorted(printed.splitlines()) == [
        "home in memories/ann: done, 1 added",
        "trip in memories/me: done, 2 added",
    ]
    assert (len(texts(db, "turn")), len(texts(db, "turn", "ann"))) == (2, 1)
    assert run("worker", "--once") == ""


def test_facts_are_asked_of_the_model(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """[worker] facts, or --facts, extracts them beside the turns, at the cost of a call."""
    (db.parent / "perdure.toml").write_text("[worker]\nfacts = true\n")
    with OpenAIServer([build_facts_answer(NUTS)]) as server:
        use(monkeypatch, server)
        (job,) = map(json.loads, run("worker", "--once", "--json").splitlines())
        assert len(server.requests) == 1
    assert job["report"]["added"] == 3
    assert texts(db, "fact") == ["The user is allergic to nuts."]


def test_what_was_given_up_is_told(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that trying again does not mend, with the model and its address: exit code 1."""
    with OpenAIServer([Failure(401, "no such key")]) as server:
        use(monkeypatch, server)
        failed = invoke("worker", "--once", "--facts")
    assert failed.exit_code == 1
    assert "not extracted: trip in memories/me: dead" in failed.stderr
    assert f"the model 'scripted' at {server.base_url}/chat/completions raised" in failed.stderr


def test_rules_of_retention_are_applied(db: Path) -> None:
    """But not to threads that wait to be extracted: those are extracted first."""
    (db.parent / "perdure.toml").write_text("[retention]\nidle_days = 30\n")
    with SQLiteCheckpointer.open(db) as saver:
        talk(saver, "old", 40, said=["I was in Namur"], user_id="me")
    printed = run("worker", "--once").splitlines()
    again = run("worker", "--once", "--json").splitlines()

    assert "old in memories/me: done, 1 added" in printed
    assert printed[-1].startswith("removed 1 idle threads; about ")
    with SQLiteCheckpointer.open(db) as saver:
        assert [info.thread_id for info in saver.threads()] == ["trip"]
    assert "I was in Namur" in " ".join(texts(db, "turn"))
    (report,) = map(json.loads, again)
    assert report["retention"]["removals"][0]["count"] == 0


def test_a_worker_works_until_it_is_stopped(db: Path) -> None:
    """It extracts what waits after [worker] delay_s, applies retention, and ends cleanly."""
    (db.parent / "perdure.toml").write_text(
        "[worker]\ndelay_s = 0.1\n[retention]\nversions_last = 0\n"
    )
    with SQLiteStore.open(db) as store:
        for number in range(3):
            store.put(("notes",), "n", {"text": str(number)})
    command = [sys.executable, "-c", "from perdure.cli import main; main()", "worker"]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as worker:
        assert worker.stdout is not None
        told = {worker.stdout.readline().partition("; about")[0] for _ in range(2)}
        worker.send_signal(signal.SIGTERM)
        _, errors = worker.communicate(timeout=PATIENCE)

    assert {line.strip() for line in told} == {
        "trip in memories/me: done, 2 added",
        "removed 2 old versions",
    }
    assert (worker.returncode, errors) == (0, "")
    assert len(texts(db, "turn")) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--facts",), "PERDURE_MODEL"),
        (("--once", "--cron", "now and then"), "now and then"),
        (("--database", "mysql://x"), "mysql://x"),
    ],
)
def test_a_wrong_use_is_named(options: tuple[str, ...], said: str, db: Path) -> None:
    """What was typed is refused before anything is extracted."""
    result = invoke("worker", *options)
    assert isinstance(result.exception, ConfigurationError)
    assert said in str(result.exception)
    assert texts(db, "turn") == []


def test_without_a_database_there_is_nothing_to_work_on(db: Path) -> None:
    db.unlink()
    assert "there is no database" in str(invoke("worker").exception)

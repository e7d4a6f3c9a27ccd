"""`perdure worker` extracts memories and removes old data in the background."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.stores import SQLiteStore
from tests.cli.commands import invoke, run
from tests.memory.long_term.test_model_extractor import build_facts_answer
from tests.openai_server import PATIENCE, Failure, OpenAIServer, Reply
from tests.stores.erasing import read_all_bytes
from tests.talks import store_conversation

NUTS = {"action": "insert", "text": "The user is allergic to nuts.", "messages": [1]}
SAID = ("I am allergic to nuts", "I will not forget")


@pytest.fixture(autouse=True)
def waiting_thread(db: Path) -> str:
    """Write a thread that waits for an extraction, and return its id."""
    with SQLiteCheckpointer.open(db) as saver:
        store_conversation(saver, "trip", texts=SAID, user_id="me")
    return "trip"


def read_memory_texts(db: Path, kind: str, user: str = "me") -> list[str]:
    with SQLiteStore.open(db) as store:
        items = store.search(("memories", user), filter={"kind": kind})
    return sorted(item.value["text"] for item in items)


def configure_model(monkeypatch: pytest.MonkeyPatch, server: OpenAIServer) -> None:
    monkeypatch.setenv("PERDURE_MODEL", "scripted")
    monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)


def test_worker_once_extracts_waiting_threads_of_all_users(db: Path) -> None:
    """Each thread is printed on a line of its own."""
    with SQLiteCheckpointer.open(db) as saver:
        store_conversation(saver, "home", texts=["I live in Ghent"], user_id="ann")
    printed = run("worker", "--once")

    assert sorted(printed.splitlines()) == [
        "home in memories/ann: done, 1 added",
        "trip in memories/me: done, 2 added",
    ]
    assert (len(read_memory_texts(db, "turn")), len(read_memory_texts(db, "turn", "ann"))) == (2, 1)
    assert run("worker", "--once") == ""


def test_worker_extracts_facts_with_the_model(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """[worker] facts, or --facts, extracts facts in addition to turns, with a call of the model."""
    (db.parent / "perdure.toml").write_text("[worker]\nfacts = true\n")
    with OpenAIServer([build_facts_answer(NUTS)]) as server:
        configure_model(monkeypatch, server)
        (job,) = map(json.loads, run("worker", "--once", "--json").splitlines())
        assert len(server.requests) == 1
    assert job["report"]["added"] == 3
    assert read_memory_texts(db, "fact") == ["The user is allergic to nuts."]


def test_queue_of_worker_has_no_text_of_a_forgotten_person(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DBOS stores the finished jobs in a file of its own, beside the database."""
    texts = ("I planted zqquinceqz", "zqmedlarqz is next")
    fact = {"action": "insert", "text": "The user planted zqloquatqz.", "messages": [1]}
    with SQLiteCheckpointer.open(db) as saver:
        store_conversation(saver, "garden", texts=texts, user_id="ann")

    def answer(body: dict[str, Any]) -> Reply:
        # The two threads of the database are extracted in any order.
        return build_facts_answer(*([fact] if texts[0] in json.dumps(body) else []))

    with OpenAIServer(answer) as server:
        configure_model(monkeypatch, server)
        printed = run("worker", "--once", "--facts")
    stored_texts = " ".join(
        [*read_memory_texts(db, "turn", "ann"), *read_memory_texts(db, "fact", "ann")]
    )
    run("forget", "--user", "ann", "--yes")
    queue_bytes = b"".join(path.read_bytes() for path in db.parent.glob("x.db.jobs*"))
    file_bytes = read_all_bytes(db.parent)

    assert "garden in memories/ann: done, 3 added" in printed
    assert b"garden" in queue_bytes
    for word in ("zqquinceqz", "zqmedlarqz", "zqloquatqz"):
        assert word in stored_texts
        assert word.encode() not in file_bytes


def test_worker_exits_with_1_after_a_permanent_failure(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the thread, the model and its address."""
    with OpenAIServer([Failure(401, "no such key")]) as server:
        configure_model(monkeypatch, server)
        failed = invoke("worker", "--once", "--facts")
    assert failed.exit_code == 1
    assert "not extracted: trip in memories/me: dead" in failed.stderr
    assert f"the model 'scripted' at {server.base_url}/chat/completions raised" in failed.stderr


def test_worker_applies_retention_after_extraction(db: Path) -> None:
    """A thread that waits for an extraction is removed only after it is extracted."""
    (db.parent / "perdure.toml").write_text("[retention]\nidle_days = 30\n")
    with SQLiteCheckpointer.open(db) as saver:
        store_conversation(saver, "old", 40, texts=["I was in Namur"], user_id="me")
    printed = run("worker", "--once").splitlines()
    again = run("worker", "--once", "--json").splitlines()

    assert "old in memories/me: done, 1 added" in printed
    assert printed[-1].startswith("removed 1 idle threads; about ")
    with SQLiteCheckpointer.open(db) as saver:
        assert [info.thread_id for info in saver.threads()] == ["trip"]
    assert "I was in Namur" in " ".join(read_memory_texts(db, "turn"))
    (report,) = map(json.loads, again)
    assert report["retention"]["removals"][0]["count"] == 0


def test_worker_runs_until_sigterm_and_ends_cleanly(db: Path) -> None:
    """The worker extracts threads after [worker] delay_s, and applies retention."""
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
        printed = {worker.stdout.readline().partition("; about")[0] for _ in range(2)}
        worker.send_signal(signal.SIGTERM)
        _, errors = worker.communicate(timeout=PATIENCE)

    assert {line.strip() for line in printed} == {
        "trip in memories/me: done, 2 added",
        "removed 2 old versions",
    }
    assert (worker.returncode, errors) == (0, "")
    assert len(read_memory_texts(db, "turn")) == 2


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        (("--facts",), "PERDURE_MODEL"),
        (("--once", "--cron", "now and then"), "now and then"),
        (("--database", "mysql://x"), "mysql://x"),
    ],
)
def test_worker_with_invalid_option_is_refused(
    options: tuple[str, ...], expected_message: str, db: Path
) -> None:
    """The option is refused before anything is extracted."""
    result = invoke("worker", *options)
    assert isinstance(result.exception, ConfigurationError)
    assert expected_message in str(result.exception)
    assert read_memory_texts(db, "turn") == []


def test_worker_without_database_is_refused(db: Path) -> None:
    db.unlink()
    assert "there is no database" in str(invoke("worker").exception)

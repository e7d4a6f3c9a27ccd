"""The quarantine and the jobs of `perdure memories`."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from perdure.cli.app import open_database
from perdure.errors import ConfigurationError
from perdure.memory import Background
from perdure.server import create_app
from perdure.settings import Settings
from tests.cli.commands import invoke, run, run_json, split_rows
from tests.cli.memory import CARD, list_memory_texts, store_conversation
from tests.cli.test_memories import read_database_bytes
from tests.memory.long_term.test_model_extractor import build_facts_answer
from tests.openai_server import PATIENCE, Failure, OpenAIServer
from tests.server.running import run_server

# -- quarantine


@pytest.fixture
def quarantined_key() -> str:
    """Return the key of a fact in quarantine."""
    invoke("memories", "add", CARD)
    (entry,) = run_json("memories", "quarantine")
    return str(entry["key"])


def test_quarantine_list_masks_the_secret(quarantined_key: str) -> None:
    """The reason is shown and the number is not, also in JSON."""
    (_, listed) = split_rows(run("memories", "quarantine"))

    assert listed[1:] == [
        quarantined_key,
        "My card is [card]",
        "the text contains the number of a payment card",
    ]
    assert "4111" not in run("memories", "quarantine", "--json")


def test_quarantine_prints_whole_text_of_a_key(quarantined_key: str) -> None:
    """The text is printed to stdout; a prefix of the key is enough."""
    result = invoke("memories", "quarantine", quarantined_key[:6])

    assert result.stdout == f"{CARD}\n"
    assert "quarantined on" in result.stderr
    assert run_json("memories", "quarantine", quarantined_key)["text"] == CARD


def test_released_candidate_becomes_a_memory(quarantined_key: str) -> None:
    """The text is stored unchanged, and leaves the quarantine."""
    printed = run("memories", "quarantine", quarantined_key, "--release")
    again = invoke("memories", "quarantine", quarantined_key, "--release")

    assert printed.startswith("added ")
    assert list_memory_texts() == [CARD]
    assert invoke("memories", "quarantine").stderr == "the quarantine is empty\n"
    assert isinstance(again.exception, ConfigurationError)


def test_discarded_candidate_is_erased_from_file(quarantined_key: str, db: Path) -> None:
    """The command asks first, and the question does not print the secret."""
    declined = invoke("memories", "quarantine", quarantined_key, "--discard", stdin="n\n")
    waiting = run_json("memories", "quarantine")
    run("memories", "quarantine", quarantined_key, "--discard", "--yes")

    assert declined.exit_code == 1
    assert "My card is [card]" in declined.stderr
    assert "4111" not in declined.output
    assert len(waiting) == 1
    assert run_json("memories", "quarantine") == []
    assert b"4111" not in read_database_bytes(db)


@pytest.mark.parametrize(
    "arguments", [("nope",), ("nope", "--release"), ("", "--discard"), ("--release",)]
)
def test_quarantine_action_without_valid_key_is_refused(
    arguments: tuple[str, ...], quarantined_key: str
) -> None:
    """An unknown key releases nothing, and an empty key does not select every candidate."""
    assert isinstance(invoke("memories", "quarantine", *arguments).exception, ConfigurationError)
    assert len(run_json("memories", "quarantine")) == 1


# -- jobs


def test_jobs_list_threads_that_wait_for_extraction(db: Path) -> None:
    """Without a worker these are the threads with unread messages; no job file is created."""
    store_conversation("trip", "I like figs", extract=False)
    store_conversation("other", "I play the violin")
    (job,) = run_json("memories", "jobs")

    assert (job["thread_id"], job["state"]) == ("trip", "waiting")
    assert split_rows(run("memories", "jobs"))[1][:3] == ["trip", "me", "waiting"]
    assert run_json("memories", "jobs", "--retry") == [job]
    assert {path.name for path in db.parent.glob("x.db*")} == {"x.db", "x.db.lock"}


def test_threads_of_a_chat_are_not_listed_as_due(db: Path) -> None:
    """A chat extracts its turns itself; the command and the page list none of its threads."""
    for thread in ("one", "two"):
        run("chat", "-t", thread, "-m", "I like figs")
        run("chat", "-t", thread, "-m", "and plums")
    listed = run("memories", "list")
    with run_server(create_app(Settings(db=str(db)))) as url:
        page = httpx.get(f"{url}/ui/jobs.json", timeout=30).json()

    assert invoke("memories", "jobs").stderr == "no thread is waiting for memory extraction\n"
    assert [job for job in page["jobs"] if job["state"] != "done"] == []
    assert "I like figs" in listed


def extract_facts() -> None:
    """Extract facts from all threads, as a worker does."""
    with (
        open_database(None) as file,
        Background(file.build_memory_extraction(extracts_facts=True)) as background,
    ):
        background.flush(PATIENCE)


def test_job_that_failed_is_listed_and_retried_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permanent failure is listed with its error until --retry."""
    nuts = {"action": "insert", "text": "The user is allergic to nuts.", "messages": [1]}
    store_conversation("trip", "I am allergic to nuts", extract=False)
    with OpenAIServer([Failure(401, "no such key \x1b[2J"), build_facts_answer(nuts)]) as server:
        monkeypatch.setenv("PERDURE_MODEL", "scripted")
        monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)
        extract_facts()
        (failed_job,) = run_json("memories", "jobs", "--facts")
        output = run("memories", "jobs", "--facts")
        jobs_after_retry = run_json("memories", "jobs", "--facts", "--retry")

    assert (failed_job["thread_id"], failed_job["state"], jobs_after_retry) == ("trip", "dead", [])
    assert "no such key" in failed_job["error"]
    assert "1 attempt: " in output
    assert "\x1b" not in output
    assert list_memory_texts("--kind", "fact") == ["The user is allergic to nuts."]


def test_fact_jobs_without_model_name_the_setting() -> None:
    store_conversation("trip", "I like figs")

    assert "PERDURE_MODEL" in str(invoke("memories", "jobs", "--facts").exception)

"""What waits for review: quarantine and jobs."""

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
from tests.cli.test_memories import raw
from tests.memory.test_model_extractor import build_facts_answer as facts_of
from tests.openai_server import PATIENCE, Failure, OpenAIServer
from tests.server.running import running

# -- quarantine


@pytest.fixture
def held() -> str:
    """The key of a fact in quarantine."""
    invoke("memories", "add", CARD)
    (entry,) = run_json("memories", "quarantine")
    return str(entry["key"])


def test_the_list_hides_what_was_said(held: str) -> None:
    """The reason is there, the number is not, for programs neither."""
    (_, listed) = split_rows(run("memories", "quarantine"))

    assert listed[1:] == [
        held,
        "My card is [card]",
        "the text contains the number of a payment card",
    ]
    assert "4111" not in run("memories", "quarantine", "--json")


def test_a_key_shows_all_of_it(held: str) -> None:
    """It goes to stdout as it was said; the beginning of the key is enough."""
    result = invoke("memories", "quarantine", held[:6])

    assert result.stdout == f"{CARD}\n"
    assert "quarantined on" in result.stderr
    assert run_json("memories", "quarantine", held)["text"] == CARD


def test_what_is_released_is_a_memory(held: str) -> None:
    """It is remembered as it was said, and waits no more."""
    printed = run("memories", "quarantine", held, "--release")
    again = invoke("memories", "quarantine", held, "--release")

    assert printed.startswith("added ")
    assert list_memory_texts() == [CARD]
    assert invoke("memories", "quarantine").stderr == "the quarantine is empty\n"
    assert isinstance(again.exception, ConfigurationError)


def test_what_is_discarded_is_gone(held: str, db: Path) -> None:
    """It asks, showing no secret; then nothing of it is in the file."""
    refused = invoke("memories", "quarantine", held, "--discard", stdin="n\n")
    waiting = run_json("memories", "quarantine")
    run("memories", "quarantine", held, "--discard", "--yes")

    assert refused.exit_code == 1
    assert "My card is [card]" in refused.stderr
    assert "4111" not in refused.output
    assert len(waiting) == 1
    assert run_json("memories", "quarantine") == []
    assert b"4111" not in raw(db)


@pytest.mark.parametrize(
    "given", [("nope",), ("nope", "--release"), ("", "--discard"), ("--release",)]
)
def test_an_entry_must_be_named(given: tuple[str, ...], held: str) -> None:
    """What is not there is not released, and no key is not every key."""
    assert isinstance(invoke("memories", "quarantine", *given).exception, ConfigurationError)
    assert len(run_json("memories", "quarantine")) == 1


# -- jobs


def test_threads_that_wait_are_listed(db: Path) -> None:
    """Without a worker ever, those with unread messages are all there is; no file is begun."""
    store_conversation("trip", "I like figs", extract=False)
    store_conversation("other", "I play the violin")
    (job,) = run_json("memories", "jobs")

    assert (job["thread_id"], job["state"]) == ("trip", "waiting")
    assert split_rows(run("memories", "jobs"))[1][:3] == ["trip", "me", "waiting"]
    assert run_json("memories", "jobs", "--retry") == [job]
    assert {path.name for path in db.parent.glob("x.db*")} == {"x.db", "x.db.lock"}


def test_threads_of_a_chat_do_not_wait(db: Path) -> None:
    """A chat remembers its turns; neither the command nor the page lists them as due."""
    for thread in ("one", "two"):
        run("chat", "-t", thread, "-m", "I like figs")
        run("chat", "-t", thread, "-m", "and plums")
    listed = run("memories", "list")
    with running(create_app(Settings(db=str(db)))) as url:
        page = httpx.get(f"{url}/ui/jobs.json", timeout=30).json()

    assert invoke("memories", "jobs").stderr == "no thread waits for an extraction\n"
    assert [job for job in page["jobs"] if job["state"] != "done"] == []
    assert "I like figs" in listed


def work() -> None:
    """Extract all facts there are, as a worker does."""
    with open_database(None) as file, Background(file.build_extraction(facts=True)) as background:
        background.flush(PATIENCE)


def test_what_was_given_up_is_listed_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that trying again does not mend is listed with its error, until --retry."""
    nuts = {"action": "insert", "text": "The user is allergic to nuts.", "messages": [1]}
    store_conversation("trip", "I am allergic to nuts", extract=False)
    with OpenAIServer([Failure(401, "no such key \x1b[2J"), facts_of(nuts)]) as server:
        monkeypatch.setenv("PERDURE_MODEL", "scripted")
        monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)
        work()
        (dead,) = run_json("memories", "jobs", "--facts")
        listed = run("memories", "jobs", "--facts")
        mended = run_json("memories", "jobs", "--facts", "--retry")

    assert (dead["thread_id"], dead["state"], mended) == ("trip", "dead", [])
    assert "no such key" in dead["error"]
    assert "1 attempt: " in listed
    assert "\x1b" not in listed
    assert list_memory_texts("--kind", "fact") == ["The user is allergic to nuts."]


def test_facts_need_a_model() -> None:
    """The error names the setting."""
    store_conversation("trip", "I like figs")

    assert "PERDURE_MODEL" in str(invoke("memories", "jobs", "--facts").exception)

"""What waits for review: quarantine and jobs; and whether questions recall what they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.app import opened
from perdure.errors import ConfigurationError
from perdure.graphs.configured import configured_model
from perdure.memory import Background, ModelExtractor
from tests.cli.commands import attempt, read, rows, run
from tests.cli.memory import CARD, talk, texts
from tests.cli.test_memories import raw
from tests.memory.test_model_extractor import facts as facts_of
from tests.openai_server import PATIENCE, Failure, OpenAIServer


def line_of(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


RIGHT = line_of(question="Where does Ann live?", expected="lives in Ghent")
KEYED = line_of(question="What does Ann like?", expected={"key": "likes"})
WRONG = line_of(question="Who is Bob?", expected=["a brother", {"key": "bob"}])


# -- quarantine


@pytest.fixture
def held() -> str:
    """The key of a fact in quarantine."""
    attempt("memories", "add", CARD)
    (entry,) = read("memories", "quarantine")
    return str(entry["key"])


def test_the_list_hides_what_was_said(held: str) -> None:
    """The reason is there, the number is not, for programs neither."""
    (_, listed) = rows(run("memories", "quarantine"))

    assert listed[1:] == [held, "My card is [card]", "it holds the number of a payment card"]
    assert "4111" not in run("memories", "quarantine", "--json")


def test_a_key_shows_all_of_it(held: str) -> None:
    """It goes to stdout as it was said; the beginning of the key is enough."""
    result = attempt("memories", "quarantine", held[:6])

    assert result.stdout == f"{CARD}\n"
    assert "held back on" in result.stderr
    assert read("memories", "quarantine", held)["text"] == CARD


def test_what_is_released_is_a_memory(held: str) -> None:
    """It is remembered as it was said, and waits no more."""
    printed = run("memories", "quarantine", held, "--release")
    again = attempt("memories", "quarantine", held, "--release")

    assert printed.startswith("added ")
    assert texts() == [CARD]
    assert attempt("memories", "quarantine").stderr == "nothing is in quarantine\n"
    assert isinstance(again.exception, ConfigurationError)


def test_what_is_discarded_is_gone(held: str, db: Path) -> None:
    """It asks, showing no secret; then nothing of it is in the file."""
    refused = attempt("memories", "quarantine", held, "--discard", typed="n\n")
    waiting = read("memories", "quarantine")
    run("memories", "quarantine", held, "--discard", "--yes")

    assert refused.exit_code == 1
    assert "My card is [card]" in refused.stderr
    assert "4111" not in refused.output
    assert len(waiting) == 1
    assert read("memories", "quarantine") == []
    assert b"4111" not in raw(db)


@pytest.mark.parametrize(
    "given", [("nope",), ("nope", "--release"), ("", "--discard"), ("--release",)]
)
def test_an_entry_must_be_named(given: tuple[str, ...], held: str) -> None:
    """What is not there is not released, and no key is not every key."""
    assert isinstance(attempt("memories", "quarantine", *given).exception, ConfigurationError)
    assert len(read("memories", "quarantine")) == 1


# -- jobs


def test_threads_that_wait_are_listed(db: Path) -> None:
    """Without a worker ever, those with unread messages are all there is; no file is begun."""
    talk("trip", "I like figs", extract=False)
    talk("other", "I play the violin")
    (job,) = read("memories", "jobs")

    assert (job["thread_id"], job["state"]) == ("trip", "waiting")
    assert rows(run("memories", "jobs"))[1][:3] == ["trip", "me", "waiting"]
    retried = attempt("memories", "jobs", "--retry-all")
    assert retried.stderr == "0 threads will be tried again\n"
    assert {path.name for path in db.parent.glob("x.db*")} == {"x.db", "x.db.lock"}
    assert attempt("memories", "jobs", "--dead").stderr == "nothing was given up\n"
    assert "no thread given up 'trip'" in str(
        attempt("memories", "jobs", "--retry", "trip").exception
    )


def work() -> None:
    """Extract all facts there are, as a worker does."""
    with opened(None) as file:
        model = configured_model(file.settings)
        assert model is not None
        extraction = file.extraction(ModelExtractor(model))
        with Background(extraction, defaults=file.config["configurable"]) as background:
            background.flush(PATIENCE)


def test_what_was_given_up_is_listed_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that trying again does not mend is listed with its error, until --retry."""
    nuts = {"action": "insert", "text": "The user is allergic to nuts.", "messages": [1]}
    talk("trip", "I am allergic to nuts", extract=False)
    with OpenAIServer([Failure(401, "no such key \x1b[2J"), facts_of(nuts)]) as server:
        monkeypatch.setenv("PERDURE_MODEL", "scripted")
        monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)
        work()
        (dead,) = read("memories", "jobs", "--facts", "--dead")
        listed = run("memories", "jobs", "--facts")
        unknown = attempt("memories", "jobs", "--facts", "--retry", "nope")
        retried = attempt("memories", "jobs", "--facts", "--retry", "tri")
        work()
        mended = attempt("memories", "jobs", "--facts", "--dead")

    assert dead["thread_id"] == "trip"
    assert "no such key" in dead["error"]
    assert "1 attempt: " in listed
    assert "\x1b" not in listed
    assert isinstance(unknown.exception, ConfigurationError)
    assert retried.stderr == "1 thread will be tried again\n"
    assert mended.stderr == "nothing was given up\n"
    assert texts("--kind", "fact") == ["The user is allergic to nuts."]


def test_facts_need_a_model() -> None:
    """The error names the setting."""
    talk("trip", "I like figs")

    assert "PERDURE_MODEL" in str(attempt("memories", "jobs", "--facts").exception)


# -- check


@pytest.fixture
def facts() -> None:
    """A few memories."""
    run("memories", "add", "Ann lives in Ghent", "Ann teaches physics at a school")
    run("memories", "add", "--key", "likes", "Ann likes figs")


def asked(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines), encoding="latin-1")
    return str(path)


def test_what_is_recalled_passes(tmp_path: Path, facts: None) -> None:
    """A text and a key are looked for; the table has their ranks."""
    *table, total = run(
        "memories", "check", asked(tmp_path, RIGHT, KEYED), "--limit", "3"
    ).splitlines()

    assert [row[:2] for row in rows("\n".join(table))] == [
        ["rank", "question"],
        ["1", "Where does Ann live?"],
        ["1", "What does Ann like?"],
    ]
    assert total == "recall@3 1.000, MRR 1.000: 2 of 2 questions recall what they should"
    assert json.loads(run("memories", "check", "-", "--json", typed=RIGHT))["recall"] == 1.0


def test_less_than_the_minimum_fails(tmp_path: Path, facts: None) -> None:
    """Exit code 1 fails a build; a lower minimum lets it pass, and programs get the figures."""
    file = asked(tmp_path, RIGHT, WRONG)
    failed = attempt("memories", "check", file)
    figures = read("memories", "check", file, "--minimum", "0.5")

    assert failed.exit_code == 1
    assert "-, -" in failed.stdout
    assert (figures["recall"], figures["passed"], figures["minimum"]) == (0.5, True, 0.5)
    assert [each["recall"] for each in figures["asked"]] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "has no questions"),
        ("{", "is {; expected"),
        ("[]", "is []; expected"),
        (line_of(question=" ", expected="x"), "line 2 of "),
        (line_of(question="q"), 'is {"question": "q"}; expected an object like {"question"'),
        (line_of(question="q", expected=[]), "line 2 of "),
        (line_of(question="q", expected=["x", 7]), "line 2 of "),
        (line_of(question="q", expected={"any": ["x"]}), "line 2 of "),
        ("\xff", "line 2 of "),
    ],
)
def test_a_malformed_file_is_named(line: str, said: str, tmp_path: Path) -> None:
    """The line, what stands there, and what was expected."""
    result = attempt("memories", "check", asked(tmp_path, "", line))

    assert isinstance(result.exception, ConfigurationError)
    assert said in str(result.exception)
    assert "questions.jsonl" in str(result.exception)


def test_wrong_options_and_files_are_named(tmp_path: Path, facts: None) -> None:
    """A share is between 0 and 1, something must count, and the file must be there."""
    for options in (("--minimum", "2"), ("--limit", "0")):
        assert attempt("memories", "check", asked(tmp_path, RIGHT), *options).exit_code == 2
    missing = attempt("memories", "check", str(tmp_path / "nope.jsonl"))
    assert missing.exit_code == 2
    assert "nope.jsonl" in missing.stderr

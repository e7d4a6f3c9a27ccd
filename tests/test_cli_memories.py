"""`perdure remember`, `recall` and `memories`: what is kept, found again, and looked back at."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from langchain_core.runnables import RunnableConfig
from pydantic import BaseModel

from perdure.errors import ConfigurationError, PerdureError, UnknownMemory
from perdure.memory import Instructions
from perdure.memory.profile import Profile
from perdure.stores import SQLiteStore
from tests.memory_commands import attempt, keys, read, recalled, rows, run, talks, texts

CARD = "My card is 4111 1111 1111 1111"
ME: RunnableConfig = {"configurable": {"user_id": "me"}}


@pytest.fixture(autouse=True)
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The database that commands work on."""
    path = tmp_path / "x.db"
    monkeypatch.setenv("PERDURE_DB", str(path))
    return path


class Person(BaseModel):
    """What is known of a user."""

    city: str = ""


# -- remember


def test_a_fact_is_kept_once() -> None:
    """The second time it is told, the outcome names the memory that there is, and why."""
    (first,) = read("remember", "Ann is allergic to nuts")
    (again,) = read("remember", "Ann is allergic to nuts.")
    printed = run("remember", "Ann is allergic to nuts")

    assert (first["change"], again["change"]) == ("added", "unchanged")
    assert keys() == {"Ann is allergic to nuts": first["key"]}
    assert again["key"] == first["key"]
    assert printed.startswith(f"unchanged {first['key']}: ")


def test_facts_may_be_piped_in() -> None:
    """Each line of stdin that is not blank is a fact, beside those that are arguments."""
    run("remember", "Ann lives in Ghent", "-", typed="Ann likes figs\n\n  Ann teaches physics \n")

    assert sorted(texts()) == ["Ann likes figs", "Ann lives in Ghent", "Ann teaches physics"]


def test_what_is_held_back_is_said_and_fails() -> None:
    """Exit code 1 tells a script; the fact beside it is kept."""
    result = attempt("remember", CARD, "Ann likes figs")
    held, kept = result.stdout.splitlines()

    assert result.exit_code == 1
    assert held.startswith("quarantined ")
    assert held.endswith(": it holds the number of a payment card")
    assert kept.startswith("added ")
    assert texts() == ["Ann likes figs"]


def test_an_empty_fact_keeps_none(db: Path) -> None:
    """All facts are looked at before one is kept."""
    result = attempt("remember", "Ann likes figs", " ")

    assert isinstance(result.exception, ConfigurationError)
    assert not db.exists()


def test_a_key_that_is_told_something_new_has_a_past() -> None:
    """What was true under the key until now is in its history, and no longer recalled."""
    run("remember", "--key", "home", "Ann lives in Ghent")
    run("remember", "--key", "home", "Ann lives in Bruges")
    same = run("remember", "--key", "home", "Ann lives in Bruges")
    past = read("memories", "--history", "home")
    table = rows(run("memories", "--history", "home"))

    assert keys() == {"Ann lives in Bruges": "home"}
    assert [version["text"] for version in past] == ["Ann lives in Ghent", "Ann lives in Bruges"]
    assert past[0]["valid_to"] == past[1]["valid_from"]
    assert past[1]["previous"][0]["text"] == "Ann lives in Ghent"
    assert same.startswith("unchanged home")
    assert table[0] == ["version", "from", "to", "text", "thread"]
    assert isinstance(attempt("remember", "--key", "k", "a b", "c d").exception, PerdureError)


# -- recall


def test_recall_says_who_said_it_where_and_when(tmp_path: Path) -> None:
    """The best answer comes first, with its speaker, thread and day, and without its speaker
    in the text."""
    run("import", talks(tmp_path, trip=["I am allergic to nuts", "I will keep that in mind"]))
    heading, first, *_ = rows(run("recall", "What am I allergic to?"))

    assert heading == ["text", "by", "thread", "when", "key"]
    assert first[:4] == ["I am allergic to nuts", "user", "trip", "2023-11-14"]
    assert first[4] == keys()["user: I am allergic to nuts"]


def test_recall_within_limits() -> None:
    """--limit counts memories, --max-tokens tokens; what does not fit is counted on stderr."""
    run("remember", *(f"Ann has {n} red bicycles and a garage for them" for n in range(2, 8)))
    tight = attempt("recall", "bicycles", "--max-tokens", "90")

    assert len(recalled("bicycles", "--limit", "4")) == 4
    assert 1 <= len(tight.stdout.splitlines()) - 1 < 6
    assert "do not fit" in tight.stderr


def test_recall_of_the_past() -> None:
    """--as-of answers with what was remembered then."""
    run("remember", "--key", "home", "Ann lives in Ghent")
    then = datetime.now(UTC).isoformat()
    run("remember", "--key", "home", "Ann lives in Bruges")

    assert recalled("Where does Ann live?", "--as-of", then) == ["Ann lives in Ghent"]
    assert recalled("Where does Ann live?") == ["Ann lives in Bruges"]
    assert texts("--as-of", then) == ["Ann lives in Ghent"]


def test_recall_that_finds_nothing_says_so() -> None:
    """The table is left out, and JSON is an empty list."""
    run("remember", "Ann likes figs", "--user", "ann")
    result = attempt("recall", "figs")

    assert (result.stdout, result.stderr) == ("", "'me' has no memory that speaks of that\n")
    assert read("recall", "figs") == []


# -- whose memories


def test_each_user_has_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """--user goes before PERDURE_USER, and nobody sees what is another's."""
    run("remember", "I like figs")
    run("remember", "I like dates", "--user", "bob")
    monkeypatch.setenv("PERDURE_USER", "bob")

    assert texts() == recalled("what do I like?") == ["I like dates"]
    assert texts("--user", "me") == ["I like figs"]
    assert isinstance(
        attempt("forget", keys("--user", "me")["I like figs"]).exception, UnknownMemory
    )


# -- memories


def test_memories_of_every_kind_are_listed(db: Path, tmp_path: Path) -> None:
    """Profile, instructions, facts and turns stand in one list, what changed last first."""
    run("import", talks(tmp_path, trip=["I am allergic to nuts"]))
    run("remember", "Ann likes figs")
    with SQLiteStore.open(db) as store:
        Profile(Person, store).set({"city": "Ghent"}, ME)
        Profile(Person, store).set({"city": "Bruges"}, {"configurable": {"user_id": "bob"}})
        Instructions(store).set("Answer in Dutch.")
    found = rows(run("memories"))

    assert [row[1] for row in found[1:]] == ["instructions", "profile", "fact", "turn"]
    assert found[0] == ["when", "kind", "by", "text", "thread", "key"]
    assert found[4][2:5] == ["user", "I am allergic to nuts", "trip"]
    assert texts("--kind", "profile") == ["city: Ghent"]
    assert texts("--kind", "instructions") == ["Answer in Dutch."]
    assert texts("--kind", "fact") == ["Ann likes figs"]
    assert texts("--limit", "2") == ["Answer in Dutch.", "city: Ghent"]
    assert read("memories", "--history", "profile")[0]["kind"] == "profile"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kind", "episode"), "'me' has no memories of that kind\n"),
        (("--user", "bob"), "nothing is remembered of 'bob'; --user names another"),
    ],
)
def test_nothing_to_list_is_said(options: tuple[str, ...], said: str) -> None:
    """What is not there is told apart from what was not asked for."""
    run("remember", "Ann likes figs")
    result = attempt("memories", *options)

    assert (result.stdout, result.exit_code) == ("", 0)
    assert result.stderr.startswith(said)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("memories --history nope", "'nope'"),
        ("memories --limit 0", "--limit is 0"),
        ("memories --history a --kind fact", "--kind"),
        ("memories --as-of yesterday", "'yesterday'"),
        ("recall figs --limit 0", "limit is 0"),
        ("recall figs --max-tokens 0", "max_tokens is 0"),
    ],
)
def test_a_wrong_use_is_named(command: str, named: str) -> None:
    """One line says what was wrong."""
    run("remember", "Ann likes figs")
    result = attempt(*command.split())

    assert isinstance(result.exception, PerdureError)
    assert named in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("command", ["recall figs", "memories", "forget k", "jobs", "worker"])
def test_without_a_database_none_is_begun(command: str, db: Path) -> None:
    """Only what keeps something begins a database."""
    result = attempt(*command.split())

    assert isinstance(result.exception, ConfigurationError)
    assert "'perdure remember'" in str(result.exception)
    assert not db.exists()

"""`perdure forget`: erased with all that it ever said, and never formed again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from perdure.errors import ConfigurationError, PerdureError, UnknownMemory
from perdure.memory.profile import Profile
from perdure.stores import SQLiteStore
from tests.memory_commands import attempt, keys, read, run, talks, texts
from tests.store_commands import raw

SAID = ["I am allergic to nuts", "I will keep nuts in mind", "I like figs", "So do I"]


@pytest.fixture(autouse=True)
def db(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The database that commands work on."""
    path = tmp_path / "x.db"
    monkeypatch.setenv("PERDURE_DB", str(path))
    return path


class Person(BaseModel):
    """What is known of a user."""

    city: str = ""


def test_a_memory_goes_with_its_past(db: Path) -> None:
    """No version of it is left, in the list or in the bytes of the file."""
    run("remember", "--key", "home", "Ann lives in Ghent")
    run("remember", "--key", "home", "Ann lives in Bruges")
    run("remember", "Ann likes figs")
    printed = run("forget", "home", "--yes")

    assert printed == "forgot 1 memory\n"
    assert texts() == ["Ann likes figs"]
    assert isinstance(attempt("memories", "--history", "home").exception, UnknownMemory)
    assert b"Ghent" not in raw(db)
    assert b"Bruges" not in raw(db)


def test_it_shows_what_is_to_go_and_asks() -> None:
    """A no leaves all; what is shown names each memory."""
    run("remember", "Ann likes figs", "Ann likes dates", "Bob likes plums")
    refused = attempt("forget", "--query", "Ann likes", typed="n\n")
    untouched = texts()
    granted = attempt("forget", "--query", "Ann likes", typed="y\n")

    assert refused.exit_code == 1
    assert f"{keys()['Bob likes plums']}: " not in refused.stderr
    assert "Ann likes figs" in refused.stderr
    assert "Forget 2 memories for good?" in refused.stderr
    assert len(untouched) == 3
    assert granted.stdout.endswith("forgot 2 memories\n")
    assert texts() == ["Bob likes plums"]


def test_what_comes_from_a_thread_goes_and_stays_gone(tmp_path: Path) -> None:
    """What was said stays on the thread, and no later import forms memories of it again."""
    file = talks(tmp_path, trip=SAID, other=["I play the violin"])
    run("import", file)
    receipt = read("forget", "--thread", "trip", "--yes")
    run("import", file)

    assert receipt["items"] == 4
    assert texts() == ["user: I play the violin"]
    assert [message["content"] for message in read("history", "trip")] == SAID


def test_a_thread_that_is_deleted_leaves_its_memories(tmp_path: Path) -> None:
    """A note says so, and how they are erased; without any, nothing is said."""
    run("import", talks(tmp_path, trip=SAID))
    run("import", "--no-memories", talks(tmp_path, home=["I live in Ghent"]))
    remembered = attempt("delete", "trip", "--yes")
    forgotten = attempt("delete", "home", "--yes")
    run("forget", "--thread", "trip", "--yes")

    assert "'perdure forget --thread' erases them" in remembered.stderr
    assert (forgotten.stdout, forgotten.stderr) == ("1 deleted\n", "")
    assert texts() == []


def test_what_waits_is_forgotten_as_well(tmp_path: Path) -> None:
    """A thread whose turns nobody has extracted yet does not bring them back afterwards."""
    file = talks(tmp_path, trip=SAID)
    run("import", "--later", file)
    run("forget", "--query", "allergic", "--yes")
    run("forget", "--query", "figs", "--yes")
    run("import", file)

    assert sorted(texts()) == ["assistant: I will keep nuts in mind", "assistant: So do I"]


def test_what_is_in_quarantine_is_forgotten_with_its_thread(tmp_path: Path, db: Path) -> None:
    """It is not shown when it is asked, and nothing of it is left."""
    file = talks(tmp_path, trip=["My card is 4111 1111 1111 1111", "I like figs"])
    run("import", file)
    run("remember", "Ann likes plums")
    result = attempt("forget", "--thread", "trip", typed="y\n")

    assert "4111" not in result.output
    assert texts() == ["Ann likes plums"]
    assert read("quarantine", "list") == []


def test_the_profile_is_forgotten_by_its_key(db: Path) -> None:
    """Its versions go, and it is nothing that a query or a thread would take along."""
    with SQLiteStore.open(db) as store:
        for city in ("Ghent", "Bruges"):
            Profile(Person, store).set({"city": city}, {"configurable": {"user_id": "me"}})
    none = run("forget", "--query", "Bruges", "--yes")
    run("forget", "profile", "--yes")

    assert none == "forgot 0 memories\n"
    assert texts() == []
    assert b"Bruges" not in raw(db)


@pytest.mark.parametrize(
    "given", [(), ("k", "--query", "x"), ("--query", "x", "--thread", "t"), ("--query", "")]
)
def test_it_must_be_said_what(given: tuple[str, ...]) -> None:
    """Nothing, and two ways at once, are refused."""
    run("remember", "Ann likes figs")
    result = attempt("forget", *given, "--yes")

    assert isinstance(result.exception, ConfigurationError)
    assert texts() == ["Ann likes figs"]


def test_all_keys_are_looked_for_before_one_is_forgotten() -> None:
    """An unknown key leaves the others where they are."""
    run("remember", "--key", "home", "Ann lives in Ghent")
    result = attempt("forget", "home", "nope", "--yes")

    assert isinstance(result.exception, PerdureError)
    assert "'nope'" in str(result.exception)
    assert keys() == {"Ann lives in Ghent": "home"}


def test_the_receipt_for_programs() -> None:
    """--json has the keys and whether the bytes are gone."""
    run("remember", "--key", "home", "Ann lives in Ghent")
    receipt = json.loads(run("forget", "home", "--yes", "--json"))

    assert receipt["keys"] == [[["memories", "me"], "home"]]
    assert receipt["clean"]


def test_all_that_is_known_of_a_user_goes(db: Path) -> None:
    """Facts, what waits in quarantine and the notes; another user's memories stay."""
    run("remember", "Ann likes figs")
    attempt("remember", "Ann's password is hunter2xyzzy9")
    run("remember", "--user", "bo", "Bo likes plums")
    refused = attempt("forget", "--all", typed="n\n")
    printed = run("forget", "--all", "--yes")

    assert refused.exit_code == 1
    assert printed == "forgot 1 memory\n"
    assert texts() == []
    assert b"hunter2xyzzy9" not in raw(db)
    with SQLiteStore.open(db) as store:
        assert {namespace[-1] for namespace in store.list_namespaces()} == {"bo"}
    assert isinstance(attempt("forget", "--all", "--query", "figs").exception, ConfigurationError)

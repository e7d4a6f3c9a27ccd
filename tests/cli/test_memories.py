"""`perdure memories`: what is remembered is listed, found, looked back at and forgotten."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import BaseModel

from perdure.cli.app import open_database
from perdure.errors import ConfigurationError, PerdureError
from perdure.memory import Instructions
from perdure.memory.profile import Profile
from perdure.settings import MIN_SCORE
from perdure.stores import SQLiteStore
from tests.cli.commands import invoke, run, run_json, split_rows
from tests.cli.memory import (
    CARD,
    ME,
    list_memory_keys,
    list_memory_texts,
    search_memory_texts,
    store_conversation,
)

SAID = ("I am allergic to nuts", "I will keep nuts in mind", "I like figs", "So do I")


class Person(BaseModel):
    """What is known of a user."""

    city: str = ""


def add(*arguments: str) -> str:
    return run("memories", "add", *arguments)


def raw(db: Path) -> bytes:
    """All bytes of a database and what is beside it."""
    return b"".join(path.read_bytes() for path in db.parent.glob(f"{db.name}*"))


# -- add


def test_a_fact_is_kept_once() -> None:
    """The second time, the outcome names the memory that there is, and why."""
    (first,) = run_json("memories", "add", "Ann is allergic to nuts")
    (again,) = run_json("memories", "add", "Ann is allergic to nuts.")

    assert (first["change"], again["change"]) == ("added", "unchanged")
    assert list_memory_keys() == {"Ann is allergic to nuts": first["key"]}
    assert again["key"] == first["key"]
    assert add("Ann is allergic to nuts").startswith(f"unchanged {first['key']}: ")


def test_facts_may_be_piped_in() -> None:
    """Each line of stdin that is not blank is a fact, beside those that are arguments."""
    piped = "Ann likes figs\n\n  Ann teaches physics \n"
    run("memories", "add", "Ann lives in Ghent", "-", stdin=piped)

    assert sorted(list_memory_texts()) == [
        "Ann likes figs",
        "Ann lives in Ghent",
        "Ann teaches physics",
    ]


def test_what_is_held_back_is_said_and_fails(db: Path) -> None:
    """Exit code 1 tells a script; the fact beside it is kept; an empty one keeps none."""
    empty = invoke("memories", "add", "Ann likes figs", " ")
    began = db.exists()
    result = invoke("memories", "add", CARD, "Ann likes figs")
    held, kept = result.stdout.splitlines()

    assert isinstance(empty.exception, ConfigurationError)
    assert not began
    assert result.exit_code == 1
    assert held.startswith("quarantined ")
    assert held.endswith(": the text contains the number of a payment card")
    assert kept.startswith("added ")
    assert list_memory_texts() == ["Ann likes figs"]


def test_a_key_that_is_told_something_new_has_a_history() -> None:
    """What was true until now is in its history; a beginning of the key is enough."""
    add("--key", "home", "Ann lives in Ghent")
    add("--key", "home", "Ann lives in Bruges")
    same = add("--key", "home", "Ann lives in Bruges")
    past = run_json("memories", "history", "ho")
    table = split_rows(run("memories", "history", "home"))

    assert list_memory_keys() == {"Ann lives in Bruges": "home"}
    assert [version["text"] for version in past] == ["Ann lives in Ghent", "Ann lives in Bruges"]
    assert past[0]["valid_to"] == past[1]["valid_from"]
    assert past[1]["previous"][0]["text"] == "Ann lives in Ghent"
    assert same.startswith("unchanged home")
    assert table[0] == ["version", "from", "to", "text"]
    assert isinstance(invoke("memories", "add", "--key", "k", "a b", "c d").exception, PerdureError)


# -- search and list


def test_the_best_answer_comes_first() -> None:
    """With its day, kind, key and thread, which is in its history too."""
    store_conversation("trip", "I am allergic to nuts", "I will keep that in mind")
    heading, first, *_ = split_rows(run("memories", "search", "What am I allergic to?", "--ids"))
    history = invoke("memories", "history", first[2])

    assert heading == ["day", "kind", "key", "thread", "text"]
    assert first == ["2023-11-14", "turn", first[2], "trip", "user: I am allergic to nuts"]
    assert history.stderr == "from the thread 'trip'\n"


def test_a_search_within_limits() -> None:
    """--limit counts memories, and what is only the nearest there is is left out."""
    add(*(f"Ann has {n} red bicycles and a garage for them" for n in range(2, 8)))
    (first, *_) = run_json("memories", "search", "bicycles")

    assert len(search_memory_texts("bicycles")) == 6
    assert len(search_memory_texts("bicycles", "--limit", "4")) == 4
    assert first["parts"]["text"] > 0
    assert invoke("memories", "search", "quantum chromodynamics").exit_code == 1
    assert len(search_memory_texts("quantum chromodynamics", "--min-score", "-1")) == 6
    assert len(search_memory_texts("quantum chromodynamics", "--min-score", "0")) == 6


def test_a_search_says_what_was_below_the_floor() -> None:
    """In words where there is no answer; with --explain each with its score."""
    add(*(f"Ann has {n} red bicycles and a garage for them" for n in range(2, 8)))
    floor = f"{MIN_SCORE:.2f}"
    nothing = invoke("memories", "search", "quantum chromodynamics", "--limit", "4")
    why = invoke("memories", "search", "quantum chromodynamics", "--explain")
    whole = invoke("memories", "search", "quantum chromodynamics", "--explain", "--json")

    assert (
        f"the nearest 4 memories are below the minimum score {floor}, and --min-score 0 shows all"
        in (nothing.stderr)
    )
    assert why.exit_code == 1
    assert why.stdout.startswith(
        f"nothing was recalled (minimum score {floor})\nbelow the minimum score"
    )
    assert why.stdout.count("red bicycles") == 6
    assert [len(json.loads(whole.stdout)[name]) for name in ("memories", "below_min_score")] == [
        0,
        6,
    ]
    assert run("memories", "search", "bicycles", "--explain").startswith("recalled, best first")


def test_the_past_is_searched_and_listed() -> None:
    """--as-of answers with what was remembered then."""
    add("--key", "home", "Ann lives in Ghent")
    then = datetime.now(UTC).isoformat()
    add("--key", "home", "Ann lives in Bruges")

    assert search_memory_texts("Where does Ann live?", "--as-of", then) == ["Ann lives in Ghent"]
    assert search_memory_texts("Where does Ann live?") == ["Ann lives in Bruges"]
    assert list_memory_texts("--as-of", then) == ["Ann lives in Ghent"]
    assert invoke("memories", "list", "--as-of", "yesterday").exit_code == 2


def test_a_search_is_quick_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads neither graphs nor tracers, and reads an index that was made when items came."""
    store_conversation("trip", *(f"I have {n} figs in the garden" for n in range(2, 40)))
    with open_database(None) as file:
        file.index_memories([file.user])
    code = """if True:
        import sys
        import perdure.cli
        from perdure.cli.app import app
        from perdure.stores.offline import StaticEmbedder

        embed, asked = StaticEmbedder.embed, []
        StaticEmbedder.embed = lambda self, texts: asked.extend(texts) or embed(self, texts)
        app(["memories", "search", "figs", "--json"], standalone_mode=False)
        slow = ("langgraph.graph", "langgraph.runtime", "langchain_core.tracers", "langsmith")
        print(asked, [name for name in slow if name in sys.modules], file=sys.stderr)
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")

    assert ran.stderr == "['figs'] []\n"
    assert "figs in the garden" in ran.stdout


def test_each_user_has_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """--user goes before PERDURE_USER, and nobody sees what is another's."""
    add("I like figs")
    add("I like dates", "--user", "bob")
    nothing = invoke("memories", "search", "figs", "--user", "eve")
    monkeypatch.setenv("PERDURE_USER", "bob")

    assert list_memory_texts() == search_memory_texts("what do I like?") == ["I like dates"]
    assert list_memory_texts("--user", "me") == ["I like figs"]
    assert (nothing.stdout, nothing.exit_code) == ("", 1)
    assert nothing.stderr == "'eve' has no memory that answers the question\n"
    assert "'nope'" in str(invoke("memories", "forget", "nope").exception)
    foreign = invoke("memories", "forget", list_memory_keys("--user", "me")["I like figs"], "--yes")
    assert isinstance(foreign.exception, ConfigurationError)


def test_memories_of_every_kind_are_listed(db: Path) -> None:
    """Profile, instructions, facts and turns are in one list, what changed last first."""
    store_conversation("trip", "I am allergic to nuts")
    add("Ann likes figs")
    with SQLiteStore.open(db) as store:
        Profile(Person, store).set({"city": "Ghent"}, ME)
        Profile(Person, store).set({"city": "Bruges"}, {"configurable": {"user_id": "bob"}})
        Instructions(store).set("Answer in Dutch.")

    assert [row[1] for row in split_rows(run("memories", "list"))[1:]] == [
        *("instructions", "profile", "fact", "turn")
    ]
    assert list_memory_texts("--kind", "profile") == ["city: Ghent"]
    assert list_memory_texts("--kind", "fact") == ["Ann likes figs"]
    assert list_memory_texts("--limit", "2") == ["Answer in Dutch.", "city: Ghent"]
    assert run_json("memories", "history", "profile")[0]["kind"] == "profile"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kind", "episode"), "'me' has no memories of the kind 'episode'\n"),
        (("--user", "bob"), "'bob' has no memories; "),
    ],
)
def test_nothing_to_list_is_said(options: tuple[str, ...], said: str) -> None:
    """What is not there is told apart from what was not asked for."""
    add("Ann likes figs")
    result = invoke("memories", "list", *options)

    assert (result.stdout, result.exit_code) == ("", 0)
    assert result.stderr.startswith(said)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("history nope", "there is no key 'nope'; 'perdure memories list --ids' lists them"),
        ("forget Ann-", "several ids of keys begin with 'Ann-' (Ann-1, Ann-2)"),
        ("forget", "--query"),
        ("forget k --query x", "--query"),
        ("forget --query x --thread t", "--query"),
        ("forget --all --query figs", "--query"),
    ],
)
def test_a_wrong_use_is_named(command: str, named: str) -> None:
    """One line says what was wrong, and nothing is forgotten."""
    add("--key", "Ann-1", "Ann likes figs")
    add("--key", "Ann-2", "Ann likes dates")
    result = invoke("memories", *command.split())

    assert isinstance(result.exception, PerdureError)
    assert named in str(result.exception)
    assert "\n" not in str(result.exception)
    assert len(list_memory_texts()) == 2


@pytest.mark.parametrize(
    "command", ["search figs", "list", "forget k", "jobs", "quarantine", "history k"]
)
def test_without_a_database_none_is_begun(command: str, db: Path) -> None:
    """Only what keeps something begins a database."""
    assert isinstance(invoke("memories", *command.split()).exception, ConfigurationError)
    assert not db.exists()


# -- forget


def test_a_memory_goes_with_its_past(db: Path) -> None:
    """No version of it is left, in the list or in the bytes of the file."""
    add("--key", "home", "Ann lives in Ghent")
    add("--key", "home", "Ann lives in Bruges")
    add("--key", "taste", "Ann likes figs")
    unknown = invoke("memories", "forget", "home", "nope", "--yes")
    receipt = run_json("memories", "forget", "ho", "--yes")

    assert "'nope'" in str(unknown.exception)
    assert receipt["keys"] == [[["memories", "me"], "home"]]
    assert receipt["clean"]
    assert list_memory_texts() == ["Ann likes figs"]
    assert invoke("memories", "history", "home").exception
    assert b"Ghent" not in raw(db)
    assert b"Bruges" not in raw(db)


def test_it_shows_what_is_to_go_and_asks() -> None:
    """A no leaves all; what is shown names each memory."""
    add("Ann likes figs", "Ann likes dates", "Bob likes plums")
    refused = invoke("memories", "forget", "--query", "Ann likes", stdin="n\n")
    untouched = list_memory_texts()
    granted = invoke("memories", "forget", "--query", "Ann likes", stdin="y\n")

    assert refused.exit_code == 1
    assert f"{list_memory_keys()['Bob likes plums']}: " not in refused.stderr
    assert "Ann likes figs" in refused.stderr
    assert "Forget 2 memories permanently?" in refused.stderr
    assert len(untouched) == 3
    assert granted.stdout.endswith(
        "forgot 2 memories\nthe deleted bytes have been removed from the file\n"
    )
    assert list_memory_texts() == ["Bob likes plums"]


def test_what_comes_from_a_thread_goes_and_stays_gone() -> None:
    """What was said stays on the thread, and is not extracted again."""
    store_conversation("trip", *SAID)
    store_conversation("other", "I play the violin")
    receipt = run_json("memories", "forget", "--thread", "tri", "--yes")
    store_conversation("trip", *SAID)

    assert receipt["items"] == 4
    assert list_memory_texts() == ["user: I play the violin"]


def test_what_waits_is_forgotten_as_well() -> None:
    """A thread whose turns nobody has extracted yet does not bring them back afterwards."""
    store_conversation("trip", *SAID, extract=False)
    run("memories", "forget", "--query", "allergic", "--yes")
    run("memories", "forget", "--query", "figs", "--yes")
    store_conversation("trip", *SAID)

    assert sorted(list_memory_texts()) == [
        "assistant: I will keep nuts in mind",
        "assistant: So do I",
    ]


def test_what_is_in_quarantine_is_forgotten_with_its_thread() -> None:
    """It is not shown when it is asked, and nothing of it is left."""
    store_conversation("trip", CARD, "Noted", "I like figs")
    add("Ann likes plums")
    result = invoke("memories", "forget", "--thread", "trip", stdin="y\n")

    assert "4111" not in result.output
    assert list_memory_texts() == ["Ann likes plums"]
    assert run_json("memories", "quarantine") == []


def test_the_profile_is_forgotten_by_its_key(db: Path) -> None:
    """Its versions go; a query does not take it along."""
    with SQLiteStore.open(db) as store:
        for city in ("Ghent", "Bruges"):
            Profile(Person, store).set({"city": city}, ME)
    none = invoke("memories", "forget", "--query", "Bruges", "--yes")
    run("memories", "forget", "profile", "--yes")

    assert (none.stdout, none.exit_code) == ("forgot 0 memories\n", 1)
    assert list_memory_texts() == []
    assert b"Bruges" not in raw(db)


def test_all_that_is_known_of_a_user_goes(db: Path) -> None:
    """Facts, also of namespaces below, quarantine and notes; another user's memories stay."""
    add("Ann likes figs")
    invoke("memories", "add", "Ann's password is hunter2xyzzy9")
    add("--user", "bo", "Bo likes plums")
    with SQLiteStore.open(db) as store:
        store.put(("memories", "me", "work"), "k", {"text": "Ann paints", "kind": "fact"})
    refused = invoke("memories", "forget", "--all", stdin="n\n")
    shown = [line.partition(": ")[2] for line in refused.stderr.splitlines()]
    printed = run("memories", "forget", "--all", "--yes")

    assert refused.exit_code == 1
    assert shown[:3] == ["in quarantine", "Ann likes figs", "Ann paints"]
    assert printed.startswith("forgot 2 memories\n")
    assert list_memory_texts() == []
    assert b"hunter2xyzzy9" not in raw(db)
    with SQLiteStore.open(db) as store:
        assert {namespace[-1] for namespace in store.list_namespaces()} == {"bo"}

"""`perdure memories` lists, finds and forgets memories, and shows their history."""

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
from perdure.memory.long_term.profile import Profile
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


class PersonProfile(BaseModel):
    """A profile of a user."""

    city: str = ""


def add_memory(*arguments: str) -> str:
    """Run `perdure memories add`, and return its output."""
    return run("memories", "add", *arguments)


def read_database_bytes(db: Path) -> bytes:
    """Return the bytes of a database and of the files next to it."""
    return b"".join(path.read_bytes() for path in db.parent.glob(f"{db.name}*"))


# -- add


def test_add_keeps_equal_fact_once() -> None:
    """The second time, the output names the existing memory and the reason."""
    (first,) = run_json("memories", "add", "Ann is allergic to nuts")
    (again,) = run_json("memories", "add", "Ann is allergic to nuts.")

    assert (first["change"], again["change"]) == ("added", "unchanged")
    assert list_memory_keys() == {"Ann is allergic to nuts": first["key"]}
    assert again["key"] == first["key"]
    assert add_memory("Ann is allergic to nuts").startswith(f"unchanged {first['key']}: ")


def test_add_reads_facts_from_stdin_and_arguments() -> None:
    """Each line of stdin that is not blank is a fact."""
    piped = "Ann likes figs\n\n  Ann teaches physics \n"
    run("memories", "add", "Ann lives in Ghent", "-", stdin=piped)

    assert sorted(list_memory_texts()) == [
        "Ann likes figs",
        "Ann lives in Ghent",
        "Ann teaches physics",
    ]


def test_add_exits_with_1_if_fact_is_quarantined(db: Path) -> None:
    """The other fact is kept; an empty fact is refused together with all others."""
    empty = invoke("memories", "add", "Ann likes figs", " ")
    was_created = db.exists()
    result = invoke("memories", "add", CARD, "Ann likes figs")
    quarantined_line, added_line = result.stdout.splitlines()

    assert isinstance(empty.exception, ConfigurationError)
    assert not was_created
    assert result.exit_code == 1
    assert quarantined_line.startswith("quarantined ")
    assert quarantined_line.endswith(": the text contains the number of a payment card")
    assert added_line.startswith("added ")
    assert list_memory_texts() == ["Ann likes figs"]


def test_history_shows_earlier_texts_of_a_key() -> None:
    """A prefix of the key is enough."""
    add_memory("--key", "home", "Ann lives in Ghent")
    add_memory("--key", "home", "Ann lives in Bruges")
    same = add_memory("--key", "home", "Ann lives in Bruges")
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


def test_search_prints_best_memory_first_with_its_thread() -> None:
    """The row has day, kind, key, thread and text, and `history` prints the thread as well."""
    store_conversation("trip", "I am allergic to nuts", "I will keep that in mind")
    heading, first, *_ = split_rows(run("memories", "search", "What am I allergic to?", "--ids"))
    history = invoke("memories", "history", first[2])

    assert heading == ["day", "kind", "key", "thread", "text"]
    assert first == ["2023-11-14", "turn", first[2], "trip", "user: I am allergic to nuts"]
    assert history.stderr == "from the thread 'trip'\n"


def test_search_obeys_limit_and_minimum_score() -> None:
    """--limit counts memories, and memories that are only the nearest ones are left out."""
    add_memory(*(f"Ann has {n} red bicycles and a garage for them" for n in range(2, 8)))
    (first, *_) = run_json("memories", "search", "bicycles")

    assert len(search_memory_texts("bicycles")) == 6
    assert len(search_memory_texts("bicycles", "--limit", "4")) == 4
    assert first["parts"]["text"] > 0
    assert invoke("memories", "search", "quantum chromodynamics").exit_code == 1
    assert len(search_memory_texts("quantum chromodynamics", "--min-score", "-1")) == 6
    assert len(search_memory_texts("quantum chromodynamics", "--min-score", "0")) == 6


def test_search_reports_memories_below_minimum_score() -> None:
    """Without a result, a note has their number; --explain lists each with its score."""
    add_memory(*(f"Ann has {n} red bicycles and a garage for them" for n in range(2, 8)))
    minimum = f"{MIN_SCORE:.2f}"
    nothing = invoke("memories", "search", "quantum chromodynamics", "--limit", "4")
    explained = invoke("memories", "search", "quantum chromodynamics", "--explain")
    explained_json = invoke("memories", "search", "quantum chromodynamics", "--explain", "--json")

    assert (
        f"the nearest 4 memories are below the minimum score {minimum}, and --min-score 0 shows all"
        in (nothing.stderr)
    )
    assert explained.exit_code == 1
    assert explained.stdout.startswith(
        f"nothing was recalled (minimum score {minimum})\nbelow the minimum score"
    )
    assert explained.stdout.count("red bicycles") == 6
    assert [
        len(json.loads(explained_json.stdout)[name]) for name in ("memories", "below_min_score")
    ] == [
        0,
        6,
    ]
    assert run("memories", "search", "bicycles", "--explain").startswith("recalled, best first")


def test_as_of_searches_and_lists_memories_of_the_past() -> None:
    """--as-of uses the memories that existed at that time."""
    add_memory("--key", "home", "Ann lives in Ghent")
    then = datetime.now(UTC).isoformat()
    add_memory("--key", "home", "Ann lives in Bruges")

    assert search_memory_texts("Where does Ann live?", "--as-of", then) == ["Ann lives in Ghent"]
    assert search_memory_texts("Where does Ann live?") == ["Ann lives in Bruges"]
    assert list_memory_texts("--as-of", then) == ["Ann lives in Ghent"]
    assert invoke("memories", "list", "--as-of", "yesterday").exit_code == 2


def test_search_imports_no_graphs_and_uses_stored_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command imports neither graphs nor tracers, and embeds only the query."""
    store_conversation("trip", *(f"I have {n} figs in the garden" for n in range(2, 40)))
    with open_database(None) as file:
        file.index_memories([file.user])
    code = """if True:
        import sys
        import perdure.cli
        from perdure.cli.app import app
        from perdure.stores.search.static_embedder import StaticEmbedder

        embed, asked = StaticEmbedder.embed, []
        StaticEmbedder.embed = lambda self, texts: asked.extend(texts) or embed(self, texts)
        app(["memories", "search", "figs", "--json"], standalone_mode=False)
        slow = ("langgraph.graph", "langgraph.runtime", "langchain_core.tracers", "langsmith")
        print(asked, [name for name in slow if name in sys.modules], file=sys.stderr)
    """
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")

    assert process.stderr == "['figs'] []\n"
    assert "figs in the garden" in process.stdout


def test_memories_of_other_users_are_neither_shown_nor_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--user takes precedence over PERDURE_USER."""
    add_memory("I like figs")
    add_memory("I like dates", "--user", "bob")
    nothing = invoke("memories", "search", "figs", "--user", "eve")
    monkeypatch.setenv("PERDURE_USER", "bob")

    assert list_memory_texts() == search_memory_texts("what do I like?") == ["I like dates"]
    assert list_memory_texts("--user", "me") == ["I like figs"]
    assert (nothing.stdout, nothing.exit_code) == ("", 1)
    assert nothing.stderr == "'eve' has no memory that answers the question\n"
    assert "'nope'" in str(invoke("memories", "forget", "nope").exception)
    foreign = invoke("memories", "forget", list_memory_keys("--user", "me")["I like figs"], "--yes")
    assert isinstance(foreign.exception, ConfigurationError)


def test_list_shows_memories_of_every_kind_newest_first(db: Path) -> None:
    """The list has the profile, instructions, facts and turns."""
    store_conversation("trip", "I am allergic to nuts")
    add_memory("Ann likes figs")
    with SQLiteStore.open(db) as store:
        Profile(PersonProfile, store).set({"city": "Ghent"}, ME)
        Profile(PersonProfile, store).set({"city": "Bruges"}, {"configurable": {"user_id": "bob"}})
        Instructions(store).set("Answer in Dutch.")

    assert [row[1] for row in split_rows(run("memories", "list"))[1:]] == [
        *("instructions", "profile", "fact", "turn")
    ]
    assert list_memory_texts("--kind", "profile") == ["city: Ghent"]
    assert list_memory_texts("--kind", "fact") == ["Ann likes figs"]
    assert list_memory_texts("--limit", "2") == ["Answer in Dutch.", "city: Ghent"]
    assert run_json("memories", "history", "profile")[0]["kind"] == "profile"


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        (("--kind", "episode"), "'me' has no memories of the kind 'episode'\n"),
        (("--user", "bob"), "'bob' has no memories; "),
    ],
)
def test_empty_list_says_which_memories_do_not_exist(
    options: tuple[str, ...], expected_message: str
) -> None:
    """A kind without memories and a user without memories have different notes."""
    add_memory("Ann likes figs")
    result = invoke("memories", "list", *options)

    assert (result.stdout, result.exit_code) == ("", 0)
    assert result.stderr.startswith(expected_message)


@pytest.mark.parametrize(
    ("command", "expected_error"),
    [
        ("history nope", "there is no key 'nope'; run 'perdure memories list --ids' for a list"),
        ("forget Ann-", "the key prefix 'Ann-' is ambiguous: it matches Ann-1, Ann-2"),
        ("forget", "--query"),
        ("forget k --query x", "--query"),
        ("forget --query x --thread t", "--query"),
        ("forget --all --query figs", "--query"),
    ],
)
def test_invalid_memories_command_is_a_one_line_error(command: str, expected_error: str) -> None:
    """The error names the wrong key or option, and nothing is forgotten."""
    add_memory("--key", "Ann-1", "Ann likes figs")
    add_memory("--key", "Ann-2", "Ann likes dates")
    result = invoke("memories", *command.split())

    assert isinstance(result.exception, PerdureError)
    assert expected_error in str(result.exception)
    assert "\n" not in str(result.exception)
    assert len(list_memory_texts()) == 2


@pytest.mark.parametrize(
    "command", ["search figs", "list", "forget k", "jobs", "quarantine", "history k"]
)
def test_command_that_only_reads_creates_no_database(command: str, db: Path) -> None:
    """Only a command that stores something creates a database."""
    assert isinstance(invoke("memories", *command.split()).exception, ConfigurationError)
    assert not db.exists()


# -- forget


def test_forget_erases_all_versions_of_a_memory(db: Path) -> None:
    """No version is left, in the list or in the bytes of the file."""
    add_memory("--key", "home", "Ann lives in Ghent")
    add_memory("--key", "home", "Ann lives in Bruges")
    add_memory("--key", "taste", "Ann likes figs")
    unknown = invoke("memories", "forget", "home", "nope", "--yes")
    receipt = run_json("memories", "forget", "ho", "--yes")

    assert "'nope'" in str(unknown.exception)
    assert receipt["keys"] == [[["memories", "me"], "home"]]
    assert receipt["clean"]
    assert list_memory_texts() == ["Ann likes figs"]
    assert invoke("memories", "history", "home").exception
    assert b"Ghent" not in read_database_bytes(db)
    assert b"Bruges" not in read_database_bytes(db)


def test_forget_shows_memories_and_asks_for_confirmation() -> None:
    """Without a yes all memories stay."""
    add_memory("Ann likes figs", "Ann likes dates", "Bob likes plums")
    declined = invoke("memories", "forget", "--query", "Ann likes", stdin="n\n")
    untouched = list_memory_texts()
    confirmed = invoke("memories", "forget", "--query", "Ann likes", stdin="y\n")

    assert declined.exit_code == 1
    assert f"{list_memory_keys()['Bob likes plums']}: " not in declined.stderr
    assert "Ann likes figs" in declined.stderr
    assert "Forget 2 memories permanently?" in declined.stderr
    assert len(untouched) == 3
    assert confirmed.stdout.endswith(
        "forgot 2 memories\nthe deleted bytes have been removed from the file\n"
    )
    assert list_memory_texts() == ["Bob likes plums"]


def test_forget_by_thread_prevents_a_second_extraction() -> None:
    """The messages stay on the thread, and are not extracted again."""
    store_conversation("trip", *SAID)
    store_conversation("other", "I play the violin")
    receipt = run_json("memories", "forget", "--thread", "tri", "--yes")
    store_conversation("trip", *SAID)

    assert receipt["items"] == 4
    assert list_memory_texts() == ["user: I play the violin"]


def test_forget_applies_to_turns_that_are_extracted_later() -> None:
    """A thread that waits for an extraction does not restore the forgotten texts."""
    store_conversation("trip", *SAID, extract=False)
    run("memories", "forget", "--query", "allergic", "--yes")
    run("memories", "forget", "--query", "figs", "--yes")
    store_conversation("trip", *SAID)

    assert sorted(list_memory_texts()) == [
        "assistant: I will keep nuts in mind",
        "assistant: So do I",
    ]


def test_forget_by_thread_erases_its_quarantined_texts() -> None:
    """The question for confirmation does not print the secret."""
    store_conversation("trip", CARD, "Noted", "I like figs")
    add_memory("Ann likes plums")
    result = invoke("memories", "forget", "--thread", "trip", stdin="y\n")

    assert "4111" not in result.output
    assert list_memory_texts() == ["Ann likes plums"]
    assert run_json("memories", "quarantine") == []


def test_profile_is_forgotten_by_its_key_and_not_by_a_query(db: Path) -> None:
    """All versions of the profile are erased from the file."""
    with SQLiteStore.open(db) as store:
        for city in ("Ghent", "Bruges"):
            Profile(PersonProfile, store).set({"city": city}, ME)
    none = invoke("memories", "forget", "--query", "Bruges", "--yes")
    run("memories", "forget", "profile", "--yes")

    assert (none.stdout, none.exit_code) == ("forgot 0 memories\n", 1)
    assert list_memory_texts() == []
    assert b"Bruges" not in read_database_bytes(db)


def test_forget_all_erases_every_memory_of_the_user(db: Path) -> None:
    """Facts of lower namespaces, quarantine and notes are erased; another user's memories stay."""
    add_memory("Ann likes figs")
    invoke("memories", "add", "Ann's password is hunter2xyzzy9")
    add_memory("--user", "bo", "Bo likes plums")
    with SQLiteStore.open(db) as store:
        store.put(("memories", "me", "work"), "k", {"text": "Ann paints", "kind": "fact"})
    declined = invoke("memories", "forget", "--all", stdin="n\n")
    shown = [line.partition(": ")[2] for line in declined.stderr.splitlines()]
    printed = run("memories", "forget", "--all", "--yes")

    assert declined.exit_code == 1
    assert shown[:3] == ["in quarantine", "Ann likes figs", "Ann paints"]
    assert printed.startswith("forgot 2 memories\n")
    assert list_memory_texts() == []
    assert b"hunter2xyzzy9" not in read_database_bytes(db)
    with SQLiteStore.open(db) as store:
        assert {namespace[-1] for namespace in store.list_namespaces()} == {"bo"}

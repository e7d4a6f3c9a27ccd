"""Forgetting and exporting the memories that a person wrote for teams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.server_faults import database
from langgraph.store.memory import InMemoryStore

from perdure import people
from perdure.checkpointers import open_checkpointer
from perdure.errors import ConfigurationError, UnknownPerson
from perdure.memory import Collection, forget, remember
from perdure.memory.long_term.records import QUARANTINE, build_namespace_of_notes_about_memories
from perdure.stores import Provenance, open_store
from tests import postgres_server
from tests.memory.long_term.test_teams import TEAM, make_config
from tests.stores.erasing import read_all_bytes


@pytest.fixture(params=["sqlite", "postgres"])
def database_location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The path or the DSN of a database."""
    if request.param == "sqlite":
        yield str(tmp_path / "s.db")
        return
    with database(postgres_server.dsn()) as dsn:
        yield dsn


@pytest.fixture
def store(database_location: str) -> Iterator[Any]:
    """A perdure store."""
    with open_store(database_location) as opened:
        yield opened


def store_team_memories(store: Any) -> None:
    """Store memories of a team by Ann and Bob, who also change each other's memories."""
    shared = Collection(store, TEAM)
    ann, bob = make_config("ann", team="red"), make_config("bob", team="red")
    shared.insert("The kettle is Kayak", key="of-ann", config=ann)
    shared.insert("The teapot is Canoe", key="of-bob", config=bob)
    shared.insert("The spoon is Heron", key="ann-bob", config=ann)
    shared.supersede("ann-bob", "The spoon is Toad", config=bob)
    shared.insert("The cup is Otter", key="bob-ann", config=bob)
    shared.supersede("bob-ann", "The cup is Stoat", config=ann)
    remember("Ann drinks Assam", store=store, config=ann)
    other = Collection(store, ("teams", "{team}", "plans"))
    other.insert("A plan of Newt", key="plan", config=make_config("ann", team="ann"))
    quarantine_namespace = build_namespace_of_notes_about_memories(QUARANTINE, ("teams", "red"))
    store.put(
        quarantine_namespace, "q", {"text": "held Walrus"}, provenance=Provenance(author="ann")
    )


def export_as_text(store: Any, *prefix: str) -> str:
    """Return all versions of all items under a prefix as text."""
    return json.dumps([*store.export(prefix)])


WORDS = ("Kayak", "Canoe", "Heron", "Toad", "Otter", "Stoat", "Newt", "Walrus", "Assam")


def find_words(text: str) -> list[str]:
    """Return the words of WORDS that the text contains."""
    return [word for word in WORDS if word in text]


def test_forgetting_user_erases_only_team_texts_by_that_user(
    store: Any, database_location: str
) -> None:
    """Texts by others stay, also in a memory that both changed."""
    store_team_memories(store)
    plan = forget(everything=True, store=store, config=make_config("ann"), dry_run=True)
    assert find_words(export_as_text(store)) == [*WORDS]

    receipt = forget(everything=True, store=store, config=make_config("ann"))

    assert find_words(export_as_text(store)) == ["Canoe", "Toad", "Otter"]
    assert '"ann"' not in export_as_text(store, "teams").replace('"teams", "ann"', "")
    keys = {key for namespace, key in receipt.keys if namespace[0] == "teams"}
    assert keys == {"of-ann", "ann-bob", "bob-ann", "plan"}
    assert {*plan.keys} == {*receipt.keys}
    assert (plan.items, plan.versions) == (receipt.items, receipt.versions)
    shared = Collection(store, TEAM)
    assert {memory.key for memory in shared.list(config=make_config("bob", team="red"))} == {
        "of-bob",
        "ann-bob",
    }
    memory = shared.get("ann-bob", config=make_config("bob", team="red"))
    assert memory is not None
    assert memory.previous == ()
    [first] = shared.history("bob-ann", config=make_config("bob", team="red"))
    assert first.text == "The cup is Otter"
    if "postgres" not in database_location:
        assert receipt.clean
        assert find_words(
            read_all_bytes(Path(database_location).parent).decode(errors="replace")
        ) == [
            "Canoe",
            "Toad",
            "Otter",
        ]
    assert forget(everything=True, store=store, config=make_config("ann")).items == 0


def test_hand_over_keeps_team_texts_without_author(store: Any, database_location: str) -> None:
    store_team_memories(store)
    receipt = forget(everything=True, store=store, config=make_config("ann"), hand_over=True)
    assert find_words(export_as_text(store)) == [word for word in WORDS if word != "Assam"]
    assert receipt.handed_over == 5
    assert not any(namespace[0] == "teams" for namespace, _ in receipt.keys)
    exported = export_as_text(store).replace('"teams", "ann"', "")
    assert '"ann"' not in exported
    shared = Collection(store, TEAM)
    memory = shared.get("of-ann", config=make_config("bob", team="red"))
    assert memory is not None
    assert memory.provenance is not None
    assert (memory.provenance.author, memory.provenance.trust) == (None, "user")
    memories_found = shared.search("Where is the kettle?", config=make_config("bob", team="red"))
    assert "Kayak" in memories_found[0].text


def test_search_in_open_store_finds_no_forgotten_team_texts(store: Any) -> None:
    """The index of the process forgets the texts too."""
    store_team_memories(store)
    shared, bob = Collection(store, TEAM), make_config("bob", team="red")
    assert any("Kayak" in each.text for each in shared.search("kettle Kayak", config=bob))
    forget(everything=True, store=store, config=make_config("ann"))
    assert not any("Kayak" in each.text for each in shared.search("kettle Kayak", config=bob))
    assert any("Canoe" in each.text for each in shared.search("teapot Canoe", config=bob))
    sizes = store.namespace_sizes([("teams",)])[0]
    assert sizes.items == 2
    assert sizes.value_bytes == sum(
        len(json.dumps(item.value, ensure_ascii=False, separators=(",", ":")).encode())
        for item in store.search(("teams",))
    )


def test_people_forget_and_export_include_team_memories(database_location: str) -> None:
    """A person who wrote only for a team is known as a person."""
    with open_checkpointer(database_location) as saver, open_store(database_location) as store:
        shared = Collection(store, TEAM)
        shared.insert("The kettle is Kayak", key="k", config=make_config("cleo", team="red"))
        shared.insert("The teapot is Canoe", key="t", config=make_config("bob", team="red"))
        shared.supersede("t", "The teapot is Toad", config=make_config("cleo", team="red"))

        lines = [*people.export("cleo", saver, store)]

        items = [line for line in lines if "key" in line]
        assert [(line["key"], line["version"]) for line in items] == [("k", 1), ("t", 2)]
        assert find_words(json.dumps(items)) == ["Kayak", "Toad"]
        assert all(line["provenance"]["author"] == "cleo" for line in items)
        with open_store(":memory:") as other:
            report = other.import_lines(map(json.dumps, items))
            assert report.items == 2
            assert find_words(export_as_text(other)) == ["Kayak", "Toad"]

        hand_over_plan = people.plan("cleo", saver, store, hand_over=True)
        assert [(part.what, part.count) for part in hand_over_plan.kept] == [
            ("items of teams without the name", 2)
        ]
        assert people.plan("cleo", saver, store).count("items") == 2
        forget_report = people.forget("cleo", saver, store)
        assert forget_report.count("items") == 2
        assert find_words(export_as_text(store)) == ["Canoe"]
        with pytest.raises(UnknownPerson):
            people.plan("cleo", saver, store)


def test_encrypted_store_forgets_author_with_and_without_hand_over(tmp_path: Path) -> None:
    """Values and provenance are bound to their rows, so they are encrypted again."""
    with open_store(str(tmp_path / "s.db"), key=b"k" * 32) as store:
        store_team_memories(store)
        forget(everything=True, store=store, config=make_config("ann"), hand_over=True)
        assert find_words(export_as_text(store)) == [word for word in WORDS if word != "Assam"]
        forget(everything=True, store=store, config=make_config("bob"))
        assert find_words(export_as_text(store)) == ["Kayak", "Heron", "Stoat", "Newt", "Walrus"]


def test_scoped_store_forgets_author_only_within_its_scope(store: Any) -> None:
    first_scope, second_scope = store.scoped(("one",)), store.scoped(("two",))
    for part in (first_scope, second_scope):
        Collection(part, TEAM).insert("The kettle is Kayak", config=make_config("ann", team="red"))
    forget(everything=True, store=first_scope, config=make_config("ann"))
    assert [len(part.search(("teams",))) for part in (first_scope, second_scope)] == [0, 1]


@pytest.mark.parametrize("hand_over", [False, True])
def test_langgraph_store_forgets_author_without_clean_receipt(hand_over: bool) -> None:
    """Such a store keeps no versions."""
    store = InMemoryStore()
    shared = Collection(store, TEAM)
    shared.insert("The kettle is Kayak", config=make_config("ann", team="red"))
    shared.insert("The teapot is Canoe", config=make_config("bob", team="red"))
    receipt = forget(everything=True, store=store, config=make_config("ann"), hand_over=hand_over)
    remaining = shared.list(config=make_config("bob", team="red"))
    authors = {m.text: m.provenance and m.provenance.author for m in remaining}
    expected = {"The teapot is Canoe": "bob"}
    assert authors == (expected | {"The kettle is Kayak": None} if hand_over else expected)
    assert (receipt.items, receipt.handed_over, receipt.clean) == (1 - hand_over, hand_over, False)


def test_forget_author_refuses_blank_author(store: Any) -> None:
    """A blank author is an error, and does not mean items without an author."""
    with pytest.raises(ConfigurationError, match="'author' is"):
        store.forget_author(("teams",), " ")
    with pytest.raises(ConfigurationError, match="hand_over"):
        forget("k", hand_over=True, store=store, config=make_config())

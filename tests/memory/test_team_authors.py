"""Forgetting and exporting what a person wrote into the memories of teams."""

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
from perdure.memory.records import QUARANTINE, build_notes_namespace
from perdure.stores import Provenance, open_store
from tests import postgres_server
from tests.memory.test_teams import TEAM, of
from tests.stores.erasing import read_all_bytes


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The path or the DSN of a database."""
    if request.param == "sqlite":
        yield str(tmp_path / "s.db")
        return
    with database(postgres_server.dsn()) as dsn:
        yield dsn


@pytest.fixture
def store(where: str) -> Iterator[Any]:
    """A store of perdure's."""
    with open_store(where) as opened:
        yield opened


def fill(store: Any) -> None:
    """Ann and Bob write into a team's memory, and change what the other wrote."""
    shared = Collection(store, TEAM)
    ann, bob = of("ann", team="red"), of("bob", team="red")
    shared.insert("The kettle is Kayak", key="of-ann", config=ann)
    shared.insert("The teapot is Canoe", key="of-bob", config=bob)
    shared.insert("The spoon is Heron", key="ann-bob", config=ann)
    shared.supersede("ann-bob", "The spoon is Toad", config=bob)
    shared.insert("The cup is Otter", key="bob-ann", config=bob)
    shared.supersede("bob-ann", "The cup is Stoat", config=ann)
    remember("Ann drinks Assam", store=store, config=ann)
    other = Collection(store, ("teams", "{team}", "plans"))
    other.insert("A plan of Newt", key="plan", config=of("ann", team="ann"))
    held = build_notes_namespace(QUARANTINE, ("teams", "red"))
    store.put(held, "q", {"text": "held Walrus"}, provenance=Provenance(author="ann"))


def texts(store: Any, *prefix: str) -> str:
    """All that is stored under a prefix, with all versions."""
    return json.dumps([*store.export(prefix)])


WORDS = ("Kayak", "Canoe", "Heron", "Toad", "Otter", "Stoat", "Newt", "Walrus", "Assam")


def words(text: str) -> list[str]:
    """The words that a text has."""
    return [word for word in WORDS if word in text]


def test_forgetting_a_person_erases_what_she_wrote_into_teams(store: Any, where: str) -> None:
    """What others wrote stays, also where they changed what she wrote, and the other way round."""
    fill(store)
    plan = forget(everything=True, store=store, config=of("ann"), dry_run=True)
    assert words(texts(store)) == [*WORDS]

    receipt = forget(everything=True, store=store, config=of("ann"))

    assert words(texts(store)) == ["Canoe", "Toad", "Otter"]
    assert '"ann"' not in texts(store, "teams").replace('"teams", "ann"', "")
    keys = {key for namespace, key in receipt.keys if namespace[0] == "teams"}
    assert keys == {"of-ann", "ann-bob", "bob-ann", "plan"}
    assert {*plan.keys} == {*receipt.keys}
    assert (plan.items, plan.versions) == (receipt.items, receipt.versions)
    shared = Collection(store, TEAM)
    assert {memory.key for memory in shared.list(config=of("bob", team="red"))} == {
        "of-bob",
        "ann-bob",
    }
    memory = shared.get("ann-bob", config=of("bob", team="red"))
    assert memory is not None
    assert memory.previous == ()
    [first] = shared.history("bob-ann", config=of("bob", team="red"))
    assert first.text == "The cup is Otter"
    if "postgres" not in where:
        assert receipt.clean
        assert words(read_all_bytes(Path(where).parent).decode(errors="replace")) == [
            "Canoe",
            "Toad",
            "Otter",
        ]
    assert forget(everything=True, store=store, config=of("ann")).items == 0


def test_what_a_person_wrote_can_be_handed_over(store: Any, where: str) -> None:
    """The texts stay without her name."""
    fill(store)
    receipt = forget(everything=True, store=store, config=of("ann"), hand_over=True)
    assert words(texts(store)) == [word for word in WORDS if word != "Assam"]
    assert receipt.handed_over == 5
    assert not any(namespace[0] == "teams" for namespace, _ in receipt.keys)
    kept = texts(store).replace('"teams", "ann"', "")
    assert '"ann"' not in kept
    shared = Collection(store, TEAM)
    memory = shared.get("of-ann", config=of("bob", team="red"))
    assert memory is not None
    assert memory.provenance is not None
    assert (memory.provenance.author, memory.provenance.trust) == (None, "user")
    found = shared.search("Where is the kettle?", config=of("bob", team="red"))
    assert "Kayak" in found[0].text


def test_search_finds_nothing_of_it_in_an_open_store(store: Any) -> None:
    """The index of the process forgets it too."""
    fill(store)
    shared, bob = Collection(store, TEAM), of("bob", team="red")
    assert any("Kayak" in each.text for each in shared.search("kettle Kayak", config=bob))
    forget(everything=True, store=store, config=of("ann"))
    assert not any("Kayak" in each.text for each in shared.search("kettle Kayak", config=bob))
    assert any("Canoe" in each.text for each in shared.search("teapot Canoe", config=bob))
    sizes = store.namespace_sizes([("teams",)])[0]
    assert sizes.items == 2
    assert sizes.value_bytes == sum(
        len(json.dumps(item.value, ensure_ascii=False, separators=(",", ":")).encode())
        for item in store.search(("teams",))
    )


def test_people_forget_and_export_cover_teams(where: str) -> None:
    """A person who wrote into a team only is known by that."""
    with open_checkpointer(where) as saver, open_store(where) as store:
        shared = Collection(store, TEAM)
        shared.insert("The kettle is Kayak", key="k", config=of("cleo", team="red"))
        shared.insert("The teapot is Canoe", key="t", config=of("bob", team="red"))
        shared.supersede("t", "The teapot is Toad", config=of("cleo", team="red"))

        lines = [*people.export("cleo", saver, store)]

        items = [line for line in lines if "key" in line]
        assert [(line["key"], line["version"]) for line in items] == [("k", 1), ("t", 2)]
        assert words(json.dumps(items)) == ["Kayak", "Toad"]
        assert all(line["provenance"]["author"] == "cleo" for line in items)
        with open_store(":memory:") as other:
            report = other.import_lines(map(json.dumps, items))
            assert report.items == 2
            assert words(texts(other)) == ["Kayak", "Toad"]

        handed = people.plan("cleo", saver, store, hand_over=True)
        assert [(part.what, part.count) for part in handed.kept] == [
            ("items of teams without the name", 2)
        ]
        assert people.plan("cleo", saver, store).count("items") == 2
        report_of = people.forget("cleo", saver, store)
        assert report_of.count("items") == 2
        assert words(texts(store)) == ["Canoe"]
        with pytest.raises(UnknownPerson):
            people.plan("cleo", saver, store)


def test_an_encrypted_store_is_rewritten_too(tmp_path: Path) -> None:
    """Values and provenance are bound to their rows."""
    with open_store(str(tmp_path / "s.db"), key=b"k" * 32) as store:
        fill(store)
        forget(everything=True, store=store, config=of("ann"), hand_over=True)
        assert words(texts(store)) == [word for word in WORDS if word != "Assam"]
        forget(everything=True, store=store, config=of("bob"))
        assert words(texts(store)) == ["Kayak", "Heron", "Stoat", "Newt", "Walrus"]


def test_a_scoped_store_forgets_within_its_scope(store: Any) -> None:
    """The same user of another scope keeps what she wrote."""
    one, two = store.scoped(("one",)), store.scoped(("two",))
    for part in (one, two):
        Collection(part, TEAM).insert("The kettle is Kayak", config=of("ann", team="red"))
    forget(everything=True, store=one, config=of("ann"))
    assert [len(part.search(("teams",))) for part in (one, two)] == [0, 1]


@pytest.mark.parametrize("hand_over", [False, True])
def test_another_store_forgets_what_it_can(hand_over: bool) -> None:
    """It keeps no versions, and its receipt is not clean."""
    store = InMemoryStore()
    shared = Collection(store, TEAM)
    shared.insert("The kettle is Kayak", config=of("ann", team="red"))
    shared.insert("The teapot is Canoe", config=of("bob", team="red"))
    receipt = forget(everything=True, store=store, config=of("ann"), hand_over=hand_over)
    left = shared.list(config=of("bob", team="red"))
    authors = {m.text: m.provenance and m.provenance.author for m in left}
    expected = {"The teapot is Canoe": "bob"}
    assert authors == (expected | {"The kettle is Kayak": None} if hand_over else expected)
    assert (receipt.items, receipt.handed_over, receipt.clean) == (1 - hand_over, hand_over, False)


def test_an_author_is_named(store: Any) -> None:
    """A blank author is an error, and not what nobody wrote."""
    with pytest.raises(ConfigurationError, match="author is"):
        store.forget_author(("teams",), " ")
    with pytest.raises(ConfigurationError, match="hand_over"):
        forget("k", hand_over=True, store=store, config=of())

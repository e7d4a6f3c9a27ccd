"""A collection: what is added and changed, and what is left of it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pytest
from langgraph.store.memory import InMemoryStore
from pydantic import BaseModel, Field

from perdure.errors import (
    ConfigurationError,
    InvalidValue,
    VersionConflict,
)
from perdure.memory.collection import Collection
from perdure.memory.extractors import build_turn_key
from perdure.stores import Provenance, SQLiteStore
from tests.memory.kept import ANN, BO, COFFEE, GHENT, TEA, call_method, list_memory_texts


class Taste(BaseModel):
    """What somebody likes."""

    text: str
    what: str
    strength: Annotated[int, Field(ge=1, le=5)] = 3


# -- adding


def test_what_is_added_is_there(store: Any, call_mode: str) -> None:
    """With an id that can be copied, its kind, and the run it comes from; found by its words."""
    collection = Collection(store)
    outcome = call_method(call_mode, collection, "insert", TEA, config=ANN)
    memory = call_method(call_mode, collection, "get", outcome.key, config=ANN)

    assert outcome.change == "added"
    assert len(outcome.key) <= 10
    assert outcome.key.isalnum()
    assert outcome.key == outcome.key.lower()
    assert (memory.text, memory.kind, memory.previous) == (TEA, "fact", ())
    assert (memory.provenance.thread_id, memory.provenance.trust) == ("t1", "user")
    assert memory.provenance.at is not None
    assert call_method(call_mode, collection, "search", "tea", config=ANN)[0].key == outcome.key
    assert [found.key for found in call_method(call_mode, collection, "list", config=ANN)] == [
        outcome.key
    ]


def test_provenance_that_is_given_is_kept(store: Any) -> None:
    """It is the caller's; without a class of trust, the words are the user's."""
    collection = Collection(store)
    source = Provenance(thread_id="old", message_ids=("m1",), position=4)
    key = collection.insert(TEA, config=ANN, provenance=source).key or ""
    collection.insert(GHENT, config=ANN, provenance=replace(source, trust="web"), key="home")
    found = [collection.get(each, config=ANN) for each in (key, "home")]

    assert [memory and memory.provenance for memory in found] == [
        replace(source, trust="user"),
        replace(source, trust="web"),
    ]


@pytest.mark.parametrize("again", [TEA, "  ann drinks TEA. "])
def test_adding_the_same_twice(store: Any, call_mode: str, again: str) -> None:
    """It is there once, and what is returned is the key of the one that is there."""
    collection = Collection(store)
    first = call_method(call_mode, collection, "insert", TEA, config=ANN)
    second = call_method(call_mode, collection, "insert", again, config=ANN)

    assert (second.change, second.key) == ("unchanged", first.key)
    assert second.reason
    assert list_memory_texts(collection) == [TEA]


def test_the_same_told_at_once(tmp_path: Path) -> None:
    """However many tell it at the same moment, it is kept once."""
    with SQLiteStore.open(tmp_path / "m.db", index=None, synchronous="normal") as store:
        collection = Collection(store)
        with ThreadPoolExecutor(6) as pool:
            outcomes = list(pool.map(lambda _: collection.insert(TEA, config=ANN), range(6)))

        async def together() -> list[Any]:
            calls = (collection.ainsert(TEA, config=BO) for _ in range(6))
            return list(await asyncio.gather(*calls))

        outcomes += asyncio.run(together())
        kept = [len(collection.list(config=config)) for config in (ANN, BO)]

    assert sorted(outcome.change for outcome in outcomes) == ["added"] * 2 + ["unchanged"] * 10
    assert kept == [1, 1]


def test_a_key_of_ones_own(store: Any) -> None:
    """Taken again with the same text it changes nothing; with another it is refused."""
    collection = Collection(store)
    outcomes = [collection.insert(TEA, config=ANN, key="drink").change for _ in range(2)]
    with pytest.raises(ConfigurationError, match="'drink' is that of another memory"):
        collection.insert(GHENT, config=ANN, key="drink")

    assert outcomes == ["added", "unchanged"]
    assert list_memory_texts(collection) == [TEA]


@pytest.mark.parametrize("given", ["", "  ", {"what": "tea"}, {"text": 5}, 5, None, "\ud800"])
def test_what_says_nothing_is_no_memory(store: Any, given: Any) -> None:
    """Without a text it is refused, and nothing is written."""
    collection = Collection(store)
    with pytest.raises(InvalidValue):
        collection.insert(given, config=ANN)

    assert list_memory_texts(collection) == []


@pytest.mark.parametrize("name", ["kind", "formerly", "provenance"])
def test_fields_that_are_not_given(store: Any, name: str) -> None:
    """What every memory has cannot be given, in a dict or by a schema."""
    with pytest.raises(InvalidValue, match=name):
        Collection(store).insert({"text": TEA, name: []}, config=ANN)

    schema: Any = type("Odd", (BaseModel,), {"__annotations__": {"text": str, name: str}})
    with pytest.raises(ConfigurationError, match=name):
        Collection(store, schema=schema)


# -- a schema


@pytest.mark.parametrize(
    "given", [Taste(text=TEA, what="tea"), {"text": TEA, "what": "tea"}], ids=["model", "dict"]
)
def test_a_schema(store: Any, given: Any) -> None:
    """Its fields are kept beside the text, defaults too, and a change leaves the others."""
    collection = Collection(store, schema=Taste)
    key = collection.insert(given, config=ANN).key or ""
    added = collection.get(key, config=ANN)
    collection.update(key, {"strength": 5}, config=ANN)
    collection.update(key, Taste(text=f"{TEA} every day", what="tea"), config=ANN)
    memory = collection.get(key, config=ANN)

    assert added is not None
    assert memory is not None
    assert added.value == {"text": TEA, "kind": "fact", "what": "tea", "strength": 3}
    assert (memory.text, memory.value["strength"]) == (f"{TEA} every day", 5)


@pytest.mark.parametrize(
    "given",
    [
        TEA,
        {"text": TEA},
        {"text": TEA, "what": "tea", "strength": 9},
        {"what": "tea"},
        {"text": TEA, "what": object()},
    ],
)
def test_what_does_not_fit_a_schema(store: Any, given: Any) -> None:
    """It is refused when it is added, and when it changes something; nothing is written."""
    collection = Collection(store, schema=Taste)
    with pytest.raises(InvalidValue):
        collection.insert(given, config=ANN)
    key = collection.insert(Taste(text=GHENT, what="home"), config=ANN).key or ""
    with pytest.raises(InvalidValue):
        collection.update(key, {"strength": 9}, config=ANN)

    assert list_memory_texts(collection) == [GHENT]


class Wordless(BaseModel):
    """A schema without a text."""

    what: str


@pytest.mark.parametrize(
    "options",
    [
        {"schema": Wordless},
        {"schema": dict},
        {"schema": "Taste"},
        {"gate": "open"},
        {"kind": ""},
        {"namespace": ()},
        {"namespace": "memories"},
        {"store": {}},
    ],
    ids=str,
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    """What no collection can be made of is refused when it is made."""
    with pytest.raises(ConfigurationError):
        Collection(**{"store": InMemoryStore(), **options})


# -- changing


@pytest.mark.parametrize(("method", "change"), [("update", "updated"), ("supersede", "superseded")])
def test_what_it_said_before_stays(store: Any, call_mode: str, method: str, change: str) -> None:
    """A change is a new version of the same memory, which knows the former ones."""
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    outcome = call_method(call_mode, collection, method, key, COFFEE, config=ANN)
    call_method(call_mode, collection, method, key, "Ann drinks water", config=ANN)
    memory = collection.get(key, config=ANN)

    assert memory is not None
    assert (outcome.change, outcome.key) == (change, key)
    assert memory.text == "Ann drinks water"
    assert [(f.text, f.change) for f in memory.previous] == [(COFFEE, change), (TEA, change)]
    assert memory.previous[0].until >= memory.previous[1].until
    assert list_memory_texts(collection) == ["Ann drinks water"]


def test_time_travel(perdure_store: SQLiteStore, call_mode: str) -> None:
    """Of perdure's store every version is left, and each moment of the past."""
    collection = Collection(perdure_store)
    key = collection.insert(TEA, config=ANN).key or ""
    collection.supersede(key, COFFEE, config=ANN)
    versions = call_method(call_mode, collection, "history", key, config=ANN)
    when = versions[0].valid_from
    then = call_method(call_mode, collection, "get", key, config=ANN, as_of=when)
    found = call_method(call_mode, collection, "search", "drinks", config=ANN, as_of=when)
    collection.delete(key, config=ANN)

    assert [version.text for version in versions] == [TEA, COFFEE]
    assert then.text == TEA
    assert [memory.text for memory in found] == [TEA]
    assert collection.get(key, config=ANN) is None
    assert [version.text for version in collection.history(key, config=ANN)] == [TEA, COFFEE]


def test_until_when_it_was_true(store: Any) -> None:
    """A supersession says until when the former held; that needs a time zone."""
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    march = datetime(2026, 3, 1, tzinfo=UTC)
    with pytest.raises(ConfigurationError, match="time zone"):
        collection.supersede(key, COFFEE, at=datetime(2026, 3, 1), config=ANN)
    collection.supersede(key, COFFEE, at=march, config=ANN)
    memory = collection.get(key, config=ANN)

    assert memory is not None
    assert memory.previous[0].until == march


def test_its_past_is_bounded(store: Any) -> None:
    """Ten former texts are noted, the newest first."""
    collection = Collection(store)
    key = collection.insert("Ann has run 0 marathons", config=ANN).key or ""
    for count in range(1, 13):
        collection.supersede(key, f"Ann has run {count} marathons", config=ANN)
    memory = collection.get(key, config=ANN)

    assert memory is not None
    assert [former.text for former in memory.previous] == [
        f"Ann has run {count} marathons" for count in range(11, 1, -1)
    ]


@pytest.mark.parametrize("method", ["update", "supersede"])
def test_a_change_to_what_it_says_already(store: Any, method: str) -> None:
    """Nothing is written."""
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    outcome = getattr(collection, method)(key, f" {TEA} ", config=ANN)

    assert (outcome.change, outcome.key) == ("unchanged", key)
    assert len(collection.history(key, config=ANN)) == 1


@pytest.mark.parametrize("method", ["update", "supersede"])
def test_a_change_to_what_another_says(store: Any, method: str) -> None:
    """Nothing is written or lost, and the other is named."""
    collection = Collection(store)
    drink = collection.insert(TEA, config=ANN).key or ""
    home = collection.insert(GHENT, config=ANN).key or ""
    outcome = getattr(collection, method)(home, TEA, config=ANN)

    assert (outcome.change, outcome.key) == ("unchanged", drink)
    assert outcome.reason
    assert list_memory_texts(collection) == [TEA, GHENT]


def test_a_slight_correction_is_made(store: Any) -> None:
    """That a memory is like what it is to say is no reason to leave it."""
    collection = Collection(store)
    key = collection.insert("Ann moved to Ghent in 2021", config=ANN).key or ""
    outcomes = [
        collection.update(key, text, config=ANN).change
        for text in ("Ann moved to Ghent in 2022", "Ann moved to Ghent in 2022.")
    ]

    assert outcomes == ["updated", "updated"]
    assert list_memory_texts(collection) == ["Ann moved to Ghent in 2022."]


def test_changes_at_once(tmp_path: Path) -> None:
    """Of changes at the same moment none is lost: each is in the past of the next."""
    with SQLiteStore.open(tmp_path / "m.db", index=None, synchronous="normal") as store:
        collection = Collection(store)
        key = collection.insert("Ann has run 0 marathons", config=ANN).key or ""
        said = [f"Ann has run {count} marathons" for count in range(1, 7)]
        with ThreadPoolExecutor(6) as pool:
            outcomes = list(pool.map(lambda t: collection.supersede(key, t, config=ANN), said))
        memory = collection.get(key, config=ANN)

    assert memory is not None
    assert {outcome.change for outcome in outcomes} == {"superseded"}
    assert len(memory.previous) == 6
    assert {memory.text, *(former.text for former in memory.previous)} == {
        "Ann has run 0 marathons",
        *said,
    }


@pytest.mark.parametrize("method", ["update", "supersede"])
def test_a_change_of_another_version_is_refused(
    perdure_store: SQLiteStore, call_mode: str, method: str
) -> None:
    """Of two changes to what was read, the second one is a conflict and writes nothing."""
    collection = Collection(perdure_store)
    key = collection.insert(TEA, config=ANN).key
    call_method(call_mode, collection, method, key, COFFEE, if_version=1, config=ANN)

    with pytest.raises(VersionConflict, match="at version 2, not 1"):
        call_method(
            call_mode, collection, method, key, "Ann drinks water", if_version=1, config=ANN
        )
    memory = collection.get(str(key), config=ANN)
    assert memory is not None
    assert (memory.text, memory.version) == (COFFEE, 2)


def test_what_superseded_texts_rest_on_is_past(store: Any, call_mode: str) -> None:
    """After Ghent, Bruges and Lille, only the turn of Lille holds; each text knows its messages."""
    space = ("memories", "ann")
    for message, town in (("m1", "Ghent"), ("m2", "Bruges"), ("m3", "Lille"), ("m4", "tea")):
        value = {"text": f"user: It is {town}", "kind": "turn"}
        store.put(space, build_turn_key("t1", message, 0), value)
    collection = Collection(store)

    def source(*messages: str) -> Provenance:
        return Provenance("t1", message_ids=messages, trust="user")

    insert = {"provenance": source("m1"), "config": ANN}
    key = call_method(call_mode, collection, "insert", GHENT, **insert).key
    for text, messages in (("Ann lives in Bruges", ("m2",)), ("Ann lives in Lille", ("m2", "m3"))):
        call_method(
            call_mode, collection, "supersede", key, text, provenance=source(*messages), config=ANN
        )
    memory = collection.get(key, config=ANN)
    until = {
        message: store.get(space, build_turn_key("t1", message, 0)).value.get("until")
        for message in ("m1", "m2", "m3", "m4")
    }

    assert memory is not None
    assert [each.message_ids for each in memory.previous] == [("m2",), ("m1",)]
    assert until == {
        "m1": memory.previous[1].until.isoformat(),
        "m2": None,  # the present text rests on it as well
        "m3": None,
        "m4": None,
    }

"""A collection: adding and changing memories, schemas, and what is kept of earlier texts."""

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
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.extractors import build_turn_key
from perdure.stores import Provenance, SQLiteStore
from tests.memory.collection_helpers import (
    ANN,
    BO,
    COFFEE,
    GHENT,
    TEA,
    call_method,
    list_memory_texts,
)


class Taste(BaseModel):
    """A taste of somebody."""

    text: str
    what: str
    strength: Annotated[int, Field(ge=1, le=5)] = 3


# -- adding


def test_inserted_memory_can_be_read_listed_and_searched(store: Any, call_mode: str) -> None:
    """The memory has an ID that can be copied, its kind, and the run from which it comes."""
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
    assert [listed.key for listed in call_method(call_mode, collection, "list", config=ANN)] == [
        outcome.key
    ]


def test_insert_keeps_the_given_provenance(store: Any) -> None:
    """Without a trust class, the words are the user's."""
    collection = Collection(store)
    source = Provenance(thread_id="old", message_ids=("m1",), position=4)
    key = collection.insert(TEA, config=ANN, provenance=source).key or ""
    collection.insert(GHENT, config=ANN, provenance=replace(source, trust="web"), key="home")
    memories = [collection.get(memory_key, config=ANN) for memory_key in (key, "home")]

    assert [memory and memory.provenance for memory in memories] == [
        replace(source, trust="user"),
        replace(source, trust="web"),
    ]


@pytest.mark.parametrize("equal_text", [TEA, "  ann drinks TEA. "])
def test_inserting_an_equal_text_again_returns_the_existing_key(
    store: Any, call_mode: str, equal_text: str
) -> None:
    collection = Collection(store)
    first = call_method(call_mode, collection, "insert", TEA, config=ANN)
    second = call_method(call_mode, collection, "insert", equal_text, config=ANN)

    assert (second.change, second.key) == ("unchanged", first.key)
    assert second.reason
    assert list_memory_texts(collection) == [TEA]


def test_concurrent_inserts_of_one_text_store_it_once(tmp_path: Path) -> None:
    with SQLiteStore.open(tmp_path / "m.db", index=None, synchronous="normal") as store:
        collection = Collection(store)
        with ThreadPoolExecutor(6) as pool:
            outcomes = list(pool.map(lambda _: collection.insert(TEA, config=ANN), range(6)))

        async def insert_concurrently() -> list[Any]:
            calls = (collection.ainsert(TEA, config=BO) for _ in range(6))
            return list(await asyncio.gather(*calls))

        outcomes += asyncio.run(insert_concurrently())
        counts = [len(collection.list(config=config)) for config in (ANN, BO)]

    assert sorted(outcome.change for outcome in outcomes) == ["added"] * 2 + ["unchanged"] * 10
    assert counts == [1, 1]


def test_insert_with_a_taken_key_is_refused_unless_the_text_is_equal(store: Any) -> None:
    collection = Collection(store)
    outcomes = [collection.insert(TEA, config=ANN, key="drink").change for _ in range(2)]
    with pytest.raises(ConfigurationError, match="'drink' is already used by another memory"):
        collection.insert(GHENT, config=ANN, key="drink")

    assert outcomes == ["added", "unchanged"]
    assert list_memory_texts(collection) == [TEA]


@pytest.mark.parametrize("value", ["", "  ", {"what": "tea"}, {"text": 5}, 5, None, "\ud800"])
def test_insert_without_a_text_is_refused(store: Any, value: Any) -> None:
    """Nothing is written."""
    collection = Collection(store)
    with pytest.raises(InvalidValue):
        collection.insert(value, config=ANN)

    assert list_memory_texts(collection) == []


@pytest.mark.parametrize("name", ["kind", "formerly", "provenance"])
def test_reserved_fields_are_refused_in_values_and_schemas(store: Any, name: str) -> None:
    with pytest.raises(InvalidValue, match=name):
        Collection(store).insert({"text": TEA, name: []}, config=ANN)

    schema: Any = type("Odd", (BaseModel,), {"__annotations__": {"text": str, name: str}})
    with pytest.raises(ConfigurationError, match=name):
        Collection(store, schema=schema)


# -- a schema


@pytest.mark.parametrize(
    "value", [Taste(text=TEA, what="tea"), {"text": TEA, "what": "tea"}], ids=["model", "dict"]
)
def test_schema_fields_are_stored_with_defaults_and_kept_by_updates(store: Any, value: Any) -> None:
    collection = Collection(store, schema=Taste)
    key = collection.insert(value, config=ANN).key or ""
    added = collection.get(key, config=ANN)
    collection.update(key, {"strength": 5}, config=ANN)
    collection.update(key, Taste(text=f"{TEA} every day", what="tea"), config=ANN)
    memory = collection.get(key, config=ANN)

    assert added is not None
    assert memory is not None
    assert added.value == {"text": TEA, "kind": "fact", "what": "tea", "strength": 3}
    assert (memory.text, memory.value["strength"]) == (f"{TEA} every day", 5)


@pytest.mark.parametrize(
    "value",
    [
        TEA,
        {"text": TEA},
        {"text": TEA, "what": "tea", "strength": 9},
        {"what": "tea"},
        {"text": TEA, "what": object()},
    ],
)
def test_values_that_do_not_fit_the_schema_are_refused(store: Any, value: Any) -> None:
    """Insert and update write nothing."""
    collection = Collection(store, schema=Taste)
    with pytest.raises(InvalidValue):
        collection.insert(value, config=ANN)
    key = collection.insert(Taste(text=GHENT, what="home"), config=ANN).key or ""
    with pytest.raises(InvalidValue):
        collection.update(key, {"strength": 9}, config=ANN)

    assert list_memory_texts(collection) == [GHENT]


class Wordless(BaseModel):
    """A schema without a text field."""

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
def test_invalid_options_of_a_collection_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Collection(**{"store": InMemoryStore(), **options})


# -- changing


@pytest.mark.parametrize(("method", "change"), [("update", "updated"), ("supersede", "superseded")])
def test_change_adds_a_version_and_keeps_the_former_texts(
    store: Any, call_mode: str, method: str, change: str
) -> None:
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


def test_versions_and_past_states_can_be_read_from_perdure_store(
    perdure_store: SQLiteStore, call_mode: str
) -> None:
    collection = Collection(perdure_store)
    key = collection.insert(TEA, config=ANN).key or ""
    collection.supersede(key, COFFEE, config=ANN)
    versions = call_method(call_mode, collection, "history", key, config=ANN)
    first_time = versions[0].valid_from
    past_memory = call_method(call_mode, collection, "get", key, config=ANN, as_of=first_time)
    past_matches = call_method(
        call_mode, collection, "search", "drinks", config=ANN, as_of=first_time
    )
    collection.delete(key, config=ANN)

    assert [version.text for version in versions] == [TEA, COFFEE]
    assert past_memory.text == TEA
    assert [memory.text for memory in past_matches] == [TEA]
    assert collection.get(key, config=ANN) is None
    assert [version.text for version in collection.history(key, config=ANN)] == [TEA, COFFEE]


def test_supersede_records_until_when_the_former_text_held(store: Any) -> None:
    """The given time needs a time zone."""
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    march = datetime(2026, 3, 1, tzinfo=UTC)
    with pytest.raises(ConfigurationError, match="time zone"):
        collection.supersede(key, COFFEE, at=datetime(2026, 3, 1), config=ANN)
    collection.supersede(key, COFFEE, at=march, config=ANN)
    memory = collection.get(key, config=ANN)

    assert memory is not None
    assert memory.previous[0].until == march


def test_memory_keeps_its_ten_newest_former_texts(store: Any) -> None:
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
def test_change_to_the_same_text_writes_nothing(store: Any, method: str) -> None:
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    outcome = getattr(collection, method)(key, f" {TEA} ", config=ANN)

    assert (outcome.change, outcome.key) == ("unchanged", key)
    assert len(collection.history(key, config=ANN)) == 1


@pytest.mark.parametrize("method", ["update", "supersede"])
def test_change_to_the_text_of_another_memory_writes_nothing_and_names_it(
    store: Any, method: str
) -> None:
    collection = Collection(store)
    drink = collection.insert(TEA, config=ANN).key or ""
    home = collection.insert(GHENT, config=ANN).key or ""
    outcome = getattr(collection, method)(home, TEA, config=ANN)

    assert (outcome.change, outcome.key) == ("unchanged", drink)
    assert outcome.reason
    assert list_memory_texts(collection) == [TEA, GHENT]


def test_small_correction_of_a_memory_is_written(store: Any) -> None:
    """The similarity of a text to its own former version is no reason to refuse the change."""
    collection = Collection(store)
    key = collection.insert("Ann moved to Ghent in 2021", config=ANN).key or ""
    outcomes = [
        collection.update(key, text, config=ANN).change
        for text in ("Ann moved to Ghent in 2022", "Ann moved to Ghent in 2022.")
    ]

    assert outcomes == ["updated", "updated"]
    assert list_memory_texts(collection) == ["Ann moved to Ghent in 2022."]


def test_concurrent_changes_of_one_memory_are_all_kept(tmp_path: Path) -> None:
    """Each text is a former text of the next one."""
    with SQLiteStore.open(tmp_path / "m.db", index=None, synchronous="normal") as store:
        collection = Collection(store)
        key = collection.insert("Ann has run 0 marathons", config=ANN).key or ""
        texts = [f"Ann has run {count} marathons" for count in range(1, 7)]
        with ThreadPoolExecutor(6) as pool:
            outcomes = list(pool.map(lambda t: collection.supersede(key, t, config=ANN), texts))
        memory = collection.get(key, config=ANN)

    assert memory is not None
    assert {outcome.change for outcome in outcomes} == {"superseded"}
    assert len(memory.previous) == 6
    assert {memory.text, *(former.text for former in memory.previous)} == {
        "Ann has run 0 marathons",
        *texts,
    }


@pytest.mark.parametrize("method", ["update", "supersede"])
def test_change_with_an_outdated_if_version_is_refused(
    perdure_store: SQLiteStore, call_mode: str, method: str
) -> None:
    """The second of two changes to the same version is a conflict and writes nothing."""
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


def test_turns_of_superseded_texts_end_with_them(store: Any, call_mode: str) -> None:
    """Of Ghent, Bruges and Lille, only the turn of Lille still holds.

    Each text knows its messages.
    """
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
    assert [former.message_ids for former in memory.previous] == [("m2",), ("m1",)]
    assert until == {
        "m1": memory.previous[1].until.isoformat(),
        "m2": None,  # the present text rests on it as well
        "m3": None,
        "m4": None,
    }

"""A collection: what is added, put right, superseded, deleted and forgotten, and what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.store.memory import InMemoryStore
from pydantic import BaseModel, Field

from perdure import memory as memory_package
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidNamespace,
    InvalidValue,
    UnknownMemory,
)
from perdure.memory.collection import Collection
from perdure.memory.effects import run
from perdure.memory.gate import Gate
from perdure.memory.records import Candidate, Verdict
from perdure.memory.reducers import ChatState
from perdure.memory.store_adapter import StoreAdapter
from perdure.memory.turns import turn_key
from perdure.stores import Provenance, SQLiteStore
from tests.stores.erasing import raw

ANN: Any = {"configurable": {"user_id": "ann", "thread_id": "t1"}}
BO: Any = {"configurable": {"user_id": "bo", "thread_id": "t2"}}
TEA, COFFEE, GHENT = "Ann drinks tea", "Ann drinks coffee", "Ann lives in Ghent"


class Taste(BaseModel):
    """What somebody likes."""

    text: str
    what: str
    strength: Annotated[int, Field(ge=1, le=5)] = 3


STORES = ["perdure", "langgraph"]


def opened(name: str) -> Any:
    return SQLiteStore.open(":memory:", index=None) if name == "perdure" else InMemoryStore()


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = opened(request.param)
    yield found
    if isinstance(found, SQLiteStore):
        found.close()


@pytest.fixture
def ours() -> Iterator[SQLiteStore]:
    with SQLiteStore.open(":memory:", index=None) as opened:
        yield opened


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def done(colour: str, collection: Collection, name: str, *args: Any, **named: Any) -> Any:
    """What a method gives, in either colour."""
    if colour == "sync":
        return getattr(collection, name)(*args, **named)
    return asyncio.run(getattr(collection, f"a{name}")(*args, **named))


def texts(collection: Collection, config: Any = ANN) -> list[str]:
    return sorted(memory.text for memory in collection.list(config=config))


# -- adding


def test_what_is_added_is_there(store: Any, colour: str) -> None:
    """With an id that can be copied, its kind, and the run it comes from; found by its words."""
    collection = Collection(store)
    outcome = done(colour, collection, "insert", TEA, config=ANN)
    memory = done(colour, collection, "get", outcome.key, config=ANN)

    assert outcome.change == "added"
    assert len(outcome.key) <= 10
    assert outcome.key.isalnum()
    assert outcome.key == outcome.key.lower()
    assert (memory.text, memory.kind, memory.previous) == (TEA, "fact", ())
    assert (memory.provenance.thread_id, memory.provenance.trust) == ("t1", "user")
    assert memory.provenance.at is not None
    assert done(colour, collection, "search", "tea", config=ANN)[0].key == outcome.key
    assert [found.key for found in done(colour, collection, "list", config=ANN)] == [outcome.key]


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
def test_adding_the_same_twice(store: Any, colour: str, again: str) -> None:
    """It is there once, and what is returned is the key of the one that is there."""
    collection = Collection(store)
    first = done(colour, collection, "insert", TEA, config=ANN)
    second = done(colour, collection, "insert", again, config=ANN)

    assert (second.change, second.key) == ("unchanged", first.key)
    assert second.reason
    assert texts(collection) == [TEA]


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
    assert texts(collection) == [TEA]


@pytest.mark.parametrize("given", ["", "  ", {"what": "tea"}, {"text": 5}, 5, None, "\ud800"])
def test_what_says_nothing_is_no_memory(store: Any, given: Any) -> None:
    """Without a text it is refused, and nothing is written."""
    collection = Collection(store)
    with pytest.raises(InvalidValue):
        collection.insert(given, config=ANN)

    assert texts(collection) == []


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

    assert texts(collection) == [GHENT]


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
def test_what_it_said_before_stays(store: Any, colour: str, method: str, change: str) -> None:
    """A change is a new version of the same memory, which knows the former ones."""
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    outcome = done(colour, collection, method, key, COFFEE, config=ANN)
    done(colour, collection, method, key, "Ann drinks water", config=ANN)
    memory = collection.get(key, config=ANN)

    assert memory is not None
    assert (outcome.change, outcome.key) == (change, key)
    assert memory.text == "Ann drinks water"
    assert [(f.text, f.change) for f in memory.previous] == [(COFFEE, change), (TEA, change)]
    assert memory.previous[0].until >= memory.previous[1].until
    assert texts(collection) == ["Ann drinks water"]


def test_time_travel(ours: SQLiteStore, colour: str) -> None:
    """Of perdure's store every version is left, and each moment of the past."""
    collection = Collection(ours)
    key = collection.insert(TEA, config=ANN).key or ""
    collection.supersede(key, COFFEE, config=ANN)
    versions = done(colour, collection, "history", key, config=ANN)
    when = versions[0].valid_from
    then = done(colour, collection, "get", key, config=ANN, as_of=when)
    found = done(colour, collection, "search", "drinks", config=ANN, as_of=when)
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
    assert texts(collection) == [TEA, GHENT]


def test_a_slight_correction_is_made(store: Any) -> None:
    """That a memory is like what it is to say is no reason to leave it."""
    collection = Collection(store)
    key = collection.insert("Ann moved to Ghent in 2021", config=ANN).key or ""
    outcomes = [
        collection.update(key, text, config=ANN).change
        for text in ("Ann moved to Ghent in 2022", "Ann moved to Ghent in 2022.")
    ]

    assert outcomes == ["updated", "updated"]
    assert texts(collection) == ["Ann moved to Ghent in 2022."]


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


def test_what_superseded_texts_rest_on_is_past(store: Any, colour: str) -> None:
    """After Ghent, Bruges and Lille, only the turn of Lille holds; each text knows its messages."""
    space = ("memories", "ann")
    for message, town in (("m1", "Ghent"), ("m2", "Bruges"), ("m3", "Lille"), ("m4", "tea")):
        value = {"text": f"user: It is {town}", "kind": "turn"}
        store.put(space, turn_key("t1", message, 0), value)
    collection = Collection(store)

    def source(*messages: str) -> Provenance:
        return Provenance("t1", message_ids=messages, trust="user")

    insert = {"provenance": source("m1"), "config": ANN}
    key = done(colour, collection, "insert", GHENT, **insert).key
    for text, messages in (("Ann lives in Bruges", ("m2",)), ("Ann lives in Lille", ("m2", "m3"))):
        done(colour, collection, "supersede", key, text, provenance=source(*messages), config=ANN)
    memory = collection.get(key, config=ANN)
    until = {
        message: store.get(space, turn_key("t1", message, 0)).value.get("until")
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


def test_previous_texts_of_the_first_version(store: Any) -> None:
    """They are read as they are, and stay when the memory changes."""
    former = {"text": GHENT, "until": "2026-03-01T00:00:00+00:00", "change": "superseded"}
    value = {"text": "Ann lives in Bruges", "kind": "fact", "formerly": [former]}
    store.put(("memories", "ann"), "home", value)
    collection = Collection(store)
    collection.update("home", "Ann lives in Brugge", config=ANN)
    memory = collection.get("home", config=ANN)

    assert memory is not None
    assert [(each.text, each.message_ids) for each in memory.previous] == [
        ("Ann lives in Bruges", ()),
        (GHENT, ()),
    ]
    assert memory.value["formerly"][1] == former


# -- deleting and forgetting


def test_a_delete(store: Any, colour: str) -> None:
    """It is no longer found; what is gone cannot be changed or deleted."""
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    outcome = done(colour, collection, "delete", key, config=ANN)

    assert (outcome.change, outcome.key) == ("deleted", key)
    assert texts(collection) == []
    assert collection.search("tea", config=ANN) == []
    for method, arguments in (("delete", ()), ("update", (TEA,)), ("supersede", (TEA,))):
        with pytest.raises(UnknownMemory, match=key):
            done(colour, collection, method, key, *arguments, config=ANN)


def test_told_again_after_a_delete(store: Any) -> None:
    """What somebody asks to be kept is kept, as another memory; the deleted one stays deleted."""
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    collection.delete(key, config=ANN)
    outcome = collection.insert(TEA, config=ANN)

    assert outcome.change == "added"
    assert outcome.key != key
    assert collection.get(key, config=ANN) is None


def test_forgetting(tmp_path: Path, colour: str) -> None:
    """Nothing is left of what it ever said, in the file neither; others are as they were."""
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        collection = Collection(store)
        key = collection.insert("Ann calls him zorbax", config=ANN).key or ""
        collection.supersede(key, "Ann calls him quimbo", config=ANN)
        Collection(store, ("memories", "{user_id}", "deep")).insert(TEA, config=ANN, key=key)
        collection.insert(GHENT, config=ANN)
        receipt = done(colour, collection, "forget", key, config=ANN)
        past = collection.history(key, config=ANN)
        left = texts(collection)
        with pytest.raises(UnknownMemory, match=key):
            done(colour, collection, "forget", key, config=ANN)
        deeper = store.get(("memories", "ann", "deep"), key)

    assert receipt.keys == ((("memories", "ann"), key),)
    assert (receipt.items, receipt.versions, receipt.clean) == (1, 1, True)
    assert past == []
    assert left == [GHENT]
    assert deeper is not None
    for secret in (b"zorbax", b"quimbo"):
        assert secret not in raw(tmp_path)


def test_forgetting_what_was_deleted(ours: SQLiteStore) -> None:
    """The past of a deleted memory goes as well."""
    collection = Collection(ours)
    key = collection.insert(TEA, config=ANN).key or ""
    collection.delete(key, config=ANN)
    receipt = collection.forget(key, config=ANN)

    assert (receipt.items, receipt.versions) == (0, 1)
    assert collection.history(key, config=ANN) == []


@pytest.mark.parametrize("method", ["delete", "forget"])
def test_a_store_without_room(ours: SQLiteStore, method: str) -> None:
    """It is deleted or forgotten all the same; of a delete it is told what could not be noted."""
    scope = ours.scoped(("tenant",), max_items=3)
    collection = Collection(scope)
    key = collection.insert("Ann has run 0 marathons", config=ANN).key or ""
    for count in range(1, 5):
        collection.supersede(key, f"Ann has run {count} marathons", config=ANN)
    outcome = getattr(collection, method)(key, config=ANN)

    assert texts(collection) == []
    assert len(collection.history(key, config=ANN)) == (5 if method == "delete" else 0)
    if method == "delete":
        assert "no room" in outcome.reason


def test_forgetting_in_another_store(colour: str) -> None:
    """It is deleted as that store does it, and the receipt does not claim more."""
    collection = Collection(InMemoryStore())
    key = collection.insert(TEA, config=ANN).key or ""
    receipt = done(colour, collection, "forget", key, config=ANN)

    assert (receipt.items, receipt.clean) == (1, False)
    assert texts(collection) == []


# -- the gate

KEY = "sk-proj-Zq8dJ2mN4pXv7Lw1RtYbKc3H"
SECRET = f"Ann's key is {KEY}"


def waiting(store: Any, *space: str) -> list[str]:
    """What is in quarantine for a namespace, or further down."""
    return [item.value["text"] for item in store.search(("perdure", "quarantine", *space))]


def test_what_has_to_be_reviewed(store: Any, colour: str) -> None:
    """It waits in quarantine, once however often it is told, and changes nothing meanwhile."""
    collection = Collection(store)
    key = collection.insert(GHENT, config=ANN).key or ""
    added = [done(colour, collection, "insert", SECRET, config=ANN) for _ in range(2)]
    changed = done(colour, collection, "supersede", key, f"{SECRET}, really", config=ANN)

    assert [outcome.change for outcome in (*added, changed)] == ["quarantined"] * 3
    assert added[0].key == added[1].key
    assert all(outcome.reason and outcome.check for outcome in (*added, changed))
    assert sorted(waiting(store, "memories", "ann")) == [SECRET, f"{SECRET}, really"]
    assert texts(collection) == [GHENT]
    assert len(collection.history(key, config=ANN)) == 1


def test_forgetting_what_waits_for_review(store: Any) -> None:
    """What would change the memory goes with it, and what says the same; others' stays."""
    collection, deeper = Collection(store), Collection(store, ("memories", "{user_id}", "deep"))
    for each in (collection, deeper):
        each.insert(GHENT, config=ANN, key="k")
        each.update("k", SECRET, config=ANN)
    trusting = Collection(store, gate=Gate(secrets="keep"))
    trusting.insert(SECRET, config=ANN, key="s")
    collection.insert(f"{SECRET}.", config=ANN, key="t")
    first = collection.forget("k", config=ANN)
    left = waiting(store, "memories", "ann")
    collection.insert(SECRET, config=ANN, key="u")
    collection.forget("s", config=ANN)

    assert len(first.keys) == 2
    assert sorted(left) == [SECRET, f"{SECRET}."]
    assert sorted(waiting(store, "memories", "ann")) == [SECRET, f"{SECRET}."]


@pytest.mark.parametrize("method", ["update", "supersede"])
def test_what_is_blotted_out(store: Any, method: str) -> None:
    """It is so in what is added and in what is changed; the mark goes with the reason for it."""
    collection = Collection(store, gate=Gate(secrets="redact"))
    outcome = collection.insert({"text": SECRET, "note": f"it is {KEY}"}, config=ANN)
    key = outcome.key or ""
    again = getattr(collection, method)(key, {"text": SECRET}, config=ANN)
    changed = getattr(collection, method)(key, f"{SECRET}, and it is new", config=ANN)
    blotted = collection.get(key, config=ANN)
    getattr(collection, method)(key, {"text": TEA, "note": ""}, config=ANN)
    plain = collection.get(key, config=ANN)

    assert blotted is not None
    assert plain is not None
    assert "redacted" in outcome.reason
    assert again.change == "unchanged"
    assert "redacted" in changed.reason
    assert KEY not in repr([memory.value for memory in collection.history(key, config=ANN)])
    assert "redacted" in blotted.value
    assert plain.value.keys() == {"text", "note", "kind", "formerly"}


def test_a_check_is_asked_about_fields_alone(store: Any) -> None:
    """Also where the text stays, and with the memory's own words it is not too alike."""

    def no_wine(candidate: Candidate) -> Verdict | None:
        refused = Verdict("refuse", "no wine", "wine")
        return refused if candidate.fields.get("drink") == "wine" else None

    collection = Collection(store, gate=Gate([no_wine]))
    key = collection.insert({"text": TEA, "drink": "tea"}, config=ANN).key or ""
    outcomes = [
        collection.update(key, {"drink": drink}, config=ANN).change for drink in ("wine", "milk")
    ]
    memory = collection.get(key, config=ANN)

    assert outcomes == ["refused", "updated"]
    assert memory is not None
    assert (memory.text, memory.value["drink"], memory.previous) == (TEA, "milk", ())


def test_too_much(store: Any) -> None:
    """A megabyte is refused."""
    outcome = Collection(store).insert("tea " * 250_000, config=ANN)

    assert (outcome.change, outcome.check) == ("refused", "size")


def test_what_your_code_keeps_is_no_flood(store: Any) -> None:
    """A hundred facts within a minute are kept."""
    collection = Collection(store)
    outcomes = {collection.insert(f"Ann has cat{n}", config=ANN).change for n in range(100)}

    assert outcomes == {"added"}


# -- namespaces


def test_namespaces_are_apart(store: Any) -> None:
    """Nobody lists, finds, changes or forgets what is another's, or further down."""
    spaces = [("memories", "a"), ("memories", "a", "b"), ("memories", "ab"), ("memories",)]
    if isinstance(store, SQLiteStore):  # langgraph's own refuse dots
        spaces.append(("memories", "a.b"))
    collections = [Collection(store, space) for space in spaces]
    keys = [collection.insert(f"Fact {n}").key or "" for n, collection in enumerate(collections)]
    for n, collection in enumerate(collections):
        assert [memory.key for memory in collection.list()] == [keys[n]]
        assert [memory.key for memory in collection.search("fact")] == [keys[n]]
        for other in {*keys} - {keys[n]}:
            assert collection.get(other) is None
            assert collection.history(other) == []
            for method in ("delete", "forget"):
                with pytest.raises(UnknownMemory):
                    getattr(collection, method)(other)
            with pytest.raises(UnknownMemory):
                collection.update(other, TEA)


def test_listing_by_pages(store: Any) -> None:
    """All are listed once, whatever lies further down, and of one kind if that is asked."""
    collection, deeper = Collection(store, ("m",)), Collection(store, ("m", "a"), kind="note")
    for number in range(45):
        deeper.insert(f"Deep fact {number}", key=f"d{number}")
    keys = [collection.insert(f"Number {n} is its own fact").key for n in range(5)]
    listed = [m.key for offset in (0, 2, 4, 6) for m in collection.list(limit=2, offset=offset)]

    assert sorted(map(str, listed)) == sorted(map(str, keys))
    assert collection.list(kind="note") == []
    assert len(deeper.list(kind="note")) == 45
    assert len(collection.search("fact", limit=5)) == 5


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"configurable": {}}, InvalidConfig),
        ({"configurable": {"user_id": 5}}, InvalidConfig),
        ({"configurable": {"user_id": ""}}, InvalidConfig),
        (None, InvalidConfig),
    ],
)
def test_a_config_that_does_not_say_whose(store: Any, config: Any, error: Any) -> None:
    """It is refused, and nobody's memories are read or written."""
    collection = Collection(store)
    for method, arguments in (
        ("insert", (TEA,)),
        ("update", ("k", TEA)),
        ("delete", ("k",)),
        ("forget", ("k",)),
        ("get", ("k",)),
        ("history", ("k",)),
        ("search", ("tea",)),
        ("list", ()),
    ):
        with pytest.raises(error):
            getattr(collection, method)(*arguments, config=config)


def test_a_user_cannot_name_where_perdure_keeps_its_notes(store: Any) -> None:
    """An id that would lead there is refused."""
    with pytest.raises(InvalidNamespace):
        Collection(store, ("{user_id}",)).list(config={"configurable": {"user_id": "perdure"}})


@pytest.mark.parametrize("key", ["", None, "a\0b", "\ud800", 1.5])
def test_keys_that_are_none(store: Any, key: Any) -> None:
    """What no memory can be called is refused on every store."""
    with pytest.raises(InvalidNamespace):
        Collection(store).get(key, config=ANN)


def test_what_is_no_memory_is_left_alone(store: Any) -> None:
    """A document without a text, say instructions, is not changed or deleted through it."""
    store.put(("memories", "ann"), "agent", {"instructions": "Be brief."})
    collection = Collection(store)
    for method, arguments in (("update", (TEA,)), ("supersede", (TEA,)), ("delete", ())):
        with pytest.raises(UnknownMemory):
            getattr(collection, method)("agent", *arguments, config=ANN)

    assert collection.get("agent", config=ANN) is not None


def test_within_a_graph(store: Any, colour: str) -> None:
    """A node needs to name neither the store nor the config."""
    collection = Collection()

    def keep(state: Any) -> dict[str, Any]:
        collection.insert(TEA)
        return {}

    async def akeep(state: Any) -> dict[str, Any]:
        await collection.ainsert(TEA)
        return {}

    node: Any = keep if colour == "sync" else akeep
    builder = StateGraph(ChatState).add_node("keep", node).add_edge(START, "keep")
    graph: Any = builder.compile(store=store)
    if colour == "sync":
        graph.invoke({"messages": []}, ANN)
    else:
        asyncio.run(graph.ainvoke({"messages": []}, ANN))

    assert texts(Collection(store)) == [TEA]
    with pytest.raises(ConfigurationError, match="no store"):
        collection.list(config=ANN)


# -- the verbs


def called(colour: str, name: str, *args: Any, **named: Any) -> Any:
    """What a function of `perdure.memory` gives, in either colour."""
    if colour == "sync":
        return getattr(memory_package, name)(*args, **named)
    return asyncio.run(getattr(memory_package, f"a{name}")(*args, **named))


def test_remember_memories_forget(store: Any, colour: str) -> None:
    """Without a collection; a key that is taken is superseded, and everything can be forgotten."""
    place: dict[str, Any] = {"store": store, "config": ANN}
    outcomes = [
        called(colour, "remember", GHENT, key="home", **place),
        called(colour, "remember", "Ann lives in Bruges", key="home", **place),
        called(colour, "remember", {"text": TEA, "cups": 3}, kind="taste", **place),
        called(colour, "remember", TEA.upper(), **place),
    ]
    listed = called(colour, "memories", limit=5, **place)
    tastes = called(colour, "memories", kind="taste", **place)
    with pytest.raises(ConfigurationError, match="everything=True"):
        called(colour, "forget", **place)
    with pytest.raises(ConfigurationError, match="everything=True"):
        called(colour, "forget", "home", everything=True, **place)
    forgotten = called(colour, "forget", "home", **place)
    rest = called(colour, "forget", everything=True, **place)

    assert [outcome.change for outcome in outcomes] == [
        "added", "superseded", "added", "unchanged",
    ]  # fmt: skip
    assert sorted(memory.text for memory in listed) == [TEA, "Ann lives in Bruges"]
    assert [(memory.kind, memory.value["cups"]) for memory in tastes] == [("taste", 3)]
    assert (forgotten.keys[0], rest.items >= 1) == ((("memories", "ann"), "home"), True)
    assert called(colour, "memories", **place) == []


def test_nothing_that_a_deleted_memory_ever_said_comes_back() -> None:
    """However often it changed: unasked, not even its first text is kept again."""
    with SQLiteStore.open(":memory:") as store:
        facts, gate = Collection(store, ("memories",)), Gate()
        key = str(facts.insert("Ann lives in Ghent").key)
        for number in range(15):
            facts.supersede(key, f"Ann lives in town {number}")
        facts.delete(key)
        texts = ["Ann lives in Ghent", "Ann lives in town 0", "Ann lives in town 14"]
        asked = [Candidate(text) for text in texts]
        verdicts = run(gate.judge(asked, StoreAdapter(store), ("memories",)))

    assert [verdict.check for verdict in verdicts] == ["tombstone"] * 3

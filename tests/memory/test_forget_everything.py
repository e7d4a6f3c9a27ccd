"""`forget(everything=True)`: everything that a store keeps about a person, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure import memory
from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.memory import Collection, Extraction, Instructions, recall
from perdure.memory.examples import ExampleSelector
from perdure.memory.records import RESERVED_LABEL
from perdure.stores import SQLiteStore
from tests.backends import Place
from tests.backends import places as places_in
from tests.stores.erasing import read_all_bytes
from tests.talks import talk

ANN: Any = {"configurable": {"user_id": "ann"}}
BOB: Any = {"configurable": {"user_id": "bob", "thread_id": "bobs"}}
EVERY = ["memories", "profiles", "instructions", "examples", "chat_memory", "notes"]


@pytest.fixture(params=["file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place of a database."""
    return places_in(tmp_path)[request.param]()


@pytest.fixture
def kept(place: Place) -> Iterator[SQLiteStore]:
    """A store of perdure's at the place."""
    with place.store(index=None) as store:
        yield store


def fill(store: Any) -> None:
    """Keep something of each kind about Bob, and one memory of Ann."""
    memory.remember("Bob likes zorbax", store=store, config=BOB)
    memory.remember("Ann likes figs", store=store, config=ANN)
    ExampleSelector(store).add("a zorbax case", "solved", config=BOB)
    Collection(store, ("notes", "{user_id}", "deep")).insert("zorbax note", config=BOB)
    Collection(store, ("notes", "{user_id}", "deep")).insert("Ann's note", config=ANN)
    for label in ("profiles", "instructions", "chat_memory", "cities"):
        store.put((label, "bob"), "k", {"text": f"zorbax in {label}"})
        store.put((label, "ann"), "k", {"text": f"Ann's {label}"})


def forget(call_mode: str, **options: Any) -> Any:
    """Forget in either form of the function."""
    if call_mode == "sync":
        return memory.forget(everything=True, **options)
    return asyncio.run(memory.aforget(everything=True, **options))


def test_everything_about_a_person_is_erased(kept: SQLiteStore, call_mode: str) -> None:
    """All kinds and recorded templates go with their notes; other namespaces are listed."""
    fill(kept)
    planned = forget(call_mode, store=kept, config=BOB, dry_run=True)
    before = kept.find_namespaces("bob")
    receipt = forget(call_mode, store=kept, config=BOB)

    assert {namespace[0] for namespace in receipt.namespaces} == {*EVERY, RESERVED_LABEL}
    assert receipt.others == (("cities", "bob"),)
    assert (planned.keys, planned.others) == (receipt.keys, receipt.others)
    assert len(before) > len(EVERY)
    assert kept.find_namespaces("bob") == [("cities", "bob")]
    assert [each.text for each in memory.memories(store=kept, config=ANN)] == ["Ann likes figs"]
    assert kept.get(("notes", "ann", "deep"), "k") is None
    assert len(kept.search(("notes", "ann"))) == 1
    assert kept.get(("profiles", "ann"), "k") is not None


def test_the_bytes_of_the_file_have_none_of_it(tmp_path: Path) -> None:
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        fill(store)
        store.delete(("cities", "bob"), "k")
        store.forget(("cities", "bob"))
        receipt = memory.forget(everything=True, store=store, config=BOB)
    left = read_all_bytes(tmp_path)

    assert receipt.clean
    assert (b"zorbax" in left, b"bob" in left, b"figs" in left) == (False, False, True)


def test_a_store_of_langgraphs(call_mode: str) -> None:
    store = InMemoryStore()
    fill(store)
    receipt = forget(call_mode, store=store, config=BOB)

    assert receipt.others == (("cities", "bob"),)
    assert not receipt.clean
    left = {item.namespace for item in store.search((), limit=100)}
    assert {namespace for namespace in left if "bob" in namespace} == {("cities", "bob")}


def test_a_template_is_recorded_once_at_its_first_use(place: Place) -> None:
    """A later process knows it; what it was used for adds no further write."""
    with place.store(index=None) as store:
        recall("figs", store=store, namespace=("diary", "{user_id}"), config=BOB)
        recall("figs", store=store, namespace=("diary", "{user_id}"), config=ANN)
        for _ in range(2):
            Collection(store, ("notes", "{user_id}")).insert("one", config=ANN)
        Instructions(store, ("style", "{user_id}")).set("Be brief.", BOB)
        store.put(("diary", "bob"), "k", {"text": "mine"})
        recorded = store.search((RESERVED_LABEL, "templates"), limit=10)
    with place.store(index=None) as later:
        receipt = memory.forget(everything=True, store=later, config=BOB)

    assert sorted(each.value["labels"] for each in recorded) == [
        ["diary", "{user_id}"], ["notes", "{user_id}"], ["style", "{user_id}"],
    ]  # fmt: skip
    assert {each.version for each in recorded} == {1}
    assert receipt.namespaces == (("diary", "bob"), ("style", "bob"))


def test_templates_that_the_caller_names(kept: SQLiteStore) -> None:
    kept.put(("cities", "bob"), "k", {"text": "Ghent"})
    kept.put(("towns", "bob"), "k", {"text": "Aalst"})
    wrong = "expected a list of templates with the label '{user_id}'"
    with pytest.raises(ConfigurationError, match=wrong):
        memory.forget(everything=True, store=kept, config=BOB, namespaces=[("cities",)])
    receipt = memory.forget(
        everything=True, store=kept, config=BOB, namespaces=[("cities", "{user_id}")]
    )

    assert (receipt.namespaces, receipt.others) == ((("cities", "bob"),), (("towns", "bob"),))


def test_a_template_of_placeholders_alone_covers_no_other_namespace(kept: SQLiteStore) -> None:
    """Nothing says that a namespace with the name is one of it; the receipt lists it."""
    options: Any = {"configurable": {"team": "red", "user_id": "bob"}}
    Collection(kept, ("{team}", "{user_id}")).insert("one", config=options)
    Collection(kept, ("{user_id}",)).insert("two", config=BOB)
    named: Any = {"configurable": {"user_id": "memories"}}
    memory.remember("Ann likes figs", store=kept, config=ANN)
    first = memory.forget(everything=True, store=kept, config=named)
    second = memory.forget(everything=True, store=kept, config=BOB)

    assert first.namespaces == ()
    assert [each.text for each in memory.memories(store=kept, config=ANN)] == ["Ann likes figs"]
    assert ("red", "bob") in second.others
    assert ("bob",) in second.namespaces


@pytest.mark.parametrize("user", ["memories", "chat_memory", RESERVED_LABEL, "buried"])
def test_a_kind_of_namespace_is_no_name(kept: SQLiteStore, user: str) -> None:
    """The receipt of a person who has the name of a kind lists nobody else's namespaces."""
    fill(kept)
    memory.forget(
        key=memory.remember("Ann rows", store=kept, config=ANN).key, store=kept, config=ANN
    )
    named: Any = {"configurable": {"user_id": user}}
    memory.remember("likes oars", store=kept, config=named)
    kept.put(("cities", user), "k", {"text": "Ghent"})
    receipt = memory.forget(everything=True, store=kept, config=named)

    assert receipt.others == (("cities", user),)
    assert ("memories", user) in receipt.namespaces
    assert [each.text for each in memory.memories(store=kept, config=ANN)] == ["Ann likes figs"]


def test_a_scope_forgets_its_own_person_only(kept: SQLiteStore) -> None:
    """The person of the same name in another scope, or outside, stays."""
    for store in (kept, kept.scoped(("acme",)), kept.scoped(("umbrella",))):
        fill(store)
    receipt = memory.forget(everything=True, store=kept.scoped(("acme",)), config=BOB)

    assert receipt.others == (("cities", "bob"),)
    assert kept.scoped(("acme",)).find_namespaces("bob") == [("cities", "bob")]
    assert len(kept.scoped(("umbrella",)).find_namespaces("bob")) > len(EVERY)
    assert memory.memories(store=kept, config=BOB) != []


def test_chat_memory_of_the_conversations(place: Place) -> None:
    """Conversations are the person's by the threads that were extracted, or as they are named."""
    with place.saver() as saver, place.store(index=None) as store:
        talk(saver, "bobs")
        Extraction(saver, store).extract("bobs", BOB)
        for conversation in ("bobs", "anns", "bob", "named"):
            store.put(("chat_memory", conversation), "k", {"text": "said"})
        receipt = memory.forget(
            everything=True, store=store, config=BOB, conversations=["named", "unknown"]
        )
        left = store.find_namespaces("chat_memory")

    assert {each for each in receipt.namespaces if each[0] == "chat_memory"} == {
        ("chat_memory", "bobs"), ("chat_memory", "bob"), ("chat_memory", "named"),
    }  # fmt: skip
    assert left == [("chat_memory", "anns")]


def test_a_conversation_with_the_name_of_another_person_is_theirs(kept: SQLiteStore) -> None:
    """Anybody may begin a thread of any id, so that id gives no right to the chat memory."""
    fill(kept)
    named: Any = {"configurable": {"user_id": "dora"}}
    memory.remember("Dora likes oars", store=kept, config=named)
    kept.put(("chat_memory", "doras"), "k", {"text": "hello"})
    receipt = memory.forget(
        everything=True, store=kept, config=named, conversations=["bob", "doras"]
    )

    assert ("chat_memory", "doras") in receipt.namespaces
    assert receipt.others == (("chat_memory", "bob"),)
    assert kept.get(("chat_memory", "bob"), "k") is not None


def test_another_namespace_is_the_only_one_that_is_erased(kept: SQLiteStore) -> None:
    fill(kept)
    memory.forget(everything=True, store=kept, config=BOB, namespace=("notes", "{user_id}", "deep"))

    assert kept.search(("notes", "bob")) == []
    assert memory.memories(store=kept, config=BOB) != []


def test_options_of_everything_are_refused_with_a_key(kept: SQLiteStore) -> None:
    fill(kept)
    with pytest.raises(ConfigurationError, match="remove the key"):
        memory.forget("home", store=kept, config=BOB, dry_run=True)


def test_a_store_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    """A recall records no template in a store that is opened for reading."""
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        store.put(("diary", "bob"), "k", {"text": "figs"})
    with SQLiteStore.open(tmp_path / "m.db", read_only=True) as store:
        found = recall("figs", store=store, namespace=("diary", "{user_id}"), config=BOB)
    assert [each.text for each in found.memories] == ["figs"]
    with SQLiteCheckpointer.open(tmp_path / "m.db"):
        pass

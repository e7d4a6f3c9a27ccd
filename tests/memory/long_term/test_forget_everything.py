"""`forget(everything=True)`: a store forgets all that it keeps about a person, and nothing else."""

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
from perdure.memory.long_term.examples import ExampleSelector
from perdure.memory.long_term.records import RESERVED_LABEL
from perdure.stores import SQLiteStore
from tests.backends import Place
from tests.backends import places as places_in
from tests.stores.erasing import read_all_bytes
from tests.talks import store_conversation

ANN: Any = {"configurable": {"user_id": "ann"}}
BOB: Any = {"configurable": {"user_id": "bob", "thread_id": "bobs"}}
FORGOTTEN_KINDS = ["memories", "profiles", "instructions", "examples", "chat_memory", "notes"]


@pytest.fixture(params=["file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place of a database."""
    return places_in(tmp_path)[request.param]()


@pytest.fixture
def perdure_store(place: Place) -> Iterator[SQLiteStore]:
    """A store of perdure at the place."""
    with place.store(index=None) as store:
        yield store


def fill_store(store: Any) -> None:
    """Store items of each kind about Bob, and some about Ann."""
    memory.remember("Bob likes zorbax", store=store, config=BOB)
    memory.remember("Ann likes figs", store=store, config=ANN)
    ExampleSelector(store).add("a zorbax case", "solved", config=BOB)
    Collection(store, ("notes", "{user_id}", "deep")).insert("zorbax note", config=BOB)
    Collection(store, ("notes", "{user_id}", "deep")).insert("Ann's note", config=ANN)
    for label in ("profiles", "instructions", "chat_memory", "cities"):
        store.put((label, "bob"), "k", {"text": f"zorbax in {label}"})
        store.put((label, "ann"), "k", {"text": f"Ann's {label}"})


def forget_everything(call_mode: str, **options: Any) -> Any:
    """Call `forget(everything=True)` in its synchronous or asynchronous form."""
    if call_mode == "sync":
        return memory.forget(everything=True, **options)
    return asyncio.run(memory.aforget(everything=True, **options))


def test_everything_about_a_person_is_erased_and_other_namespaces_are_listed(
    perdure_store: SQLiteStore, call_mode: str
) -> None:
    """All kinds and recorded templates are erased with their notes."""
    fill_store(perdure_store)
    planned = forget_everything(call_mode, store=perdure_store, config=BOB, dry_run=True)
    namespaces_before = perdure_store.find_namespaces("bob")
    receipt = forget_everything(call_mode, store=perdure_store, config=BOB)

    assert {namespace[0] for namespace in receipt.namespaces} == {*FORGOTTEN_KINDS, RESERVED_LABEL}
    assert receipt.others == (("cities", "bob"),)
    assert (planned.keys, planned.others) == (receipt.keys, receipt.others)
    assert len(namespaces_before) > len(FORGOTTEN_KINDS)
    assert perdure_store.find_namespaces("bob") == [("cities", "bob")]
    assert [item.text for item in memory.memories(store=perdure_store, config=ANN)] == [
        "Ann likes figs"
    ]
    assert perdure_store.get(("notes", "ann", "deep"), "k") is None
    assert len(perdure_store.search(("notes", "ann"))) == 1
    assert perdure_store.get(("profiles", "ann"), "k") is not None


def test_file_has_no_bytes_of_a_forgotten_person(tmp_path: Path) -> None:
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        fill_store(store)
        store.delete(("cities", "bob"), "k")
        store.forget(("cities", "bob"))
        receipt = memory.forget(everything=True, store=store, config=BOB)
    file_bytes = read_all_bytes(tmp_path)

    assert receipt.clean
    assert (b"zorbax" in file_bytes, b"bob" in file_bytes, b"figs" in file_bytes) == (
        False,
        False,
        True,
    )


def test_forget_everything_works_in_a_langgraph_store(call_mode: str) -> None:
    store = InMemoryStore()
    fill_store(store)
    receipt = forget_everything(call_mode, store=store, config=BOB)

    assert receipt.others == (("cities", "bob"),)
    assert not receipt.clean
    namespaces = {item.namespace for item in store.search((), limit=100)}
    assert {namespace for namespace in namespaces if "bob" in namespace} == {("cities", "bob")}


def test_template_is_recorded_once_at_its_first_use(place: Place) -> None:
    """A later process knows the template."""
    with place.store(index=None) as store:
        recall("figs", store=store, namespace=("diary", "{user_id}"), config=BOB)
        recall("figs", store=store, namespace=("diary", "{user_id}"), config=ANN)
        for _ in range(2):
            Collection(store, ("notes", "{user_id}")).insert("one", config=ANN)
        Instructions(store, ("style", "{user_id}")).set("Be brief.", BOB)
        store.put(("diary", "bob"), "k", {"text": "mine"})
        recorded = store.search((RESERVED_LABEL, "templates"), limit=10)
    with place.store(index=None) as reopened:
        receipt = memory.forget(everything=True, store=reopened, config=BOB)

    assert sorted(item.value["labels"] for item in recorded) == [
        ["diary", "{user_id}"], ["notes", "{user_id}"], ["style", "{user_id}"],
    ]  # fmt: skip
    assert {item.version for item in recorded} == {1}
    assert receipt.namespaces == (("diary", "bob"), ("style", "bob"))


def test_given_templates_are_forgotten_and_invalid_ones_refused(perdure_store: SQLiteStore) -> None:
    perdure_store.put(("cities", "bob"), "k", {"text": "Ghent"})
    perdure_store.put(("towns", "bob"), "k", {"text": "Aalst"})
    expected_message = "expected a list of templates with the label '{user_id}'"
    with pytest.raises(ConfigurationError, match=expected_message):
        memory.forget(everything=True, store=perdure_store, config=BOB, namespaces=[("cities",)])
    receipt = memory.forget(
        everything=True, store=perdure_store, config=BOB, namespaces=[("cities", "{user_id}")]
    )

    assert (receipt.namespaces, receipt.others) == ((("cities", "bob"),), (("towns", "bob"),))


def test_template_that_begins_with_a_placeholder_covers_no_memory_of_a_team(
    perdure_store: SQLiteStore,
) -> None:
    """A team and a person have one name. perdure's own first labels never match a placeholder."""
    options: Any = {"configurable": {"org": "acme", "user_id": "bob"}}
    Collection(perdure_store, ("{org}", "{user_id}", "notes")).insert("one", config=options)
    perdure_store.put(("teams", "bob", "notes"), "k", {"text": "of the team"})
    receipt = memory.forget(everything=True, store=perdure_store, config=BOB)

    assert ("acme", "bob", "notes") in receipt.namespaces
    assert ("teams", "bob", "notes") not in receipt.namespaces
    assert perdure_store.get(("teams", "bob", "notes"), "k") is not None


def test_template_of_placeholders_only_covers_no_other_namespace(
    perdure_store: SQLiteStore,
) -> None:
    """Such a namespace may belong to somebody else, so the receipt lists it."""
    options: Any = {"configurable": {"team": "red", "user_id": "bob"}}
    Collection(perdure_store, ("{team}", "{user_id}")).insert("one", config=options)
    Collection(perdure_store, ("{user_id}",)).insert("two", config=BOB)
    config: Any = {"configurable": {"user_id": "memories"}}
    memory.remember("Ann likes figs", store=perdure_store, config=ANN)
    first = memory.forget(everything=True, store=perdure_store, config=config)
    second = memory.forget(everything=True, store=perdure_store, config=BOB)

    assert first.namespaces == ()
    assert [item.text for item in memory.memories(store=perdure_store, config=ANN)] == [
        "Ann likes figs"
    ]
    assert ("red", "bob") in second.others
    assert ("bob",) in second.namespaces


@pytest.mark.parametrize("user", ["memories", "chat_memory", RESERVED_LABEL, "buried"])
def test_user_named_like_a_kind_of_namespace_forgets_only_their_own(
    perdure_store: SQLiteStore, user: str
) -> None:
    """The receipt does not list namespaces of others."""
    fill_store(perdure_store)
    memory.forget(
        key=memory.remember("Ann rows", store=perdure_store, config=ANN).key,
        store=perdure_store,
        config=ANN,
    )
    config: Any = {"configurable": {"user_id": user}}
    memory.remember("likes oars", store=perdure_store, config=config)
    perdure_store.put(("cities", user), "k", {"text": "Ghent"})
    receipt = memory.forget(everything=True, store=perdure_store, config=config)

    assert receipt.others == (("cities", user),)
    assert ("memories", user) in receipt.namespaces
    assert [item.text for item in memory.memories(store=perdure_store, config=ANN)] == [
        "Ann likes figs"
    ]


def test_scope_forgets_its_own_person_only(perdure_store: SQLiteStore) -> None:
    """The person of the same name in another scope, or outside, stays."""
    for store in (
        perdure_store,
        perdure_store.scoped(("acme",)),
        perdure_store.scoped(("umbrella",)),
    ):
        fill_store(store)
    receipt = memory.forget(everything=True, store=perdure_store.scoped(("acme",)), config=BOB)

    assert receipt.others == (("cities", "bob"),)
    assert perdure_store.scoped(("acme",)).find_namespaces("bob") == [("cities", "bob")]
    assert len(perdure_store.scoped(("umbrella",)).find_namespaces("bob")) > len(FORGOTTEN_KINDS)
    assert memory.memories(store=perdure_store, config=BOB) != []


def test_chat_memory_of_extracted_and_named_conversations_is_forgotten(place: Place) -> None:
    with place.saver() as saver, place.store(index=None) as store:
        store_conversation(saver, "bobs")
        Extraction(saver, store).extract("bobs", BOB)
        for conversation in ("bobs", "anns", "bob", "named"):
            store.put(("chat_memory", conversation), "k", {"text": "said"})
        receipt = memory.forget(
            everything=True, store=store, config=BOB, conversations=["named", "unknown"]
        )
        remaining_namespaces = store.find_namespaces("chat_memory")

    assert {namespace for namespace in receipt.namespaces if namespace[0] == "chat_memory"} == {
        ("chat_memory", "bobs"), ("chat_memory", "bob"), ("chat_memory", "named"),
    }  # fmt: skip
    assert remaining_namespaces == [("chat_memory", "anns")]


def test_conversation_named_like_another_person_is_not_forgotten(
    perdure_store: SQLiteStore,
) -> None:
    """Anybody may start a thread with any ID, so an ID gives no right to the chat memory."""
    fill_store(perdure_store)
    config: Any = {"configurable": {"user_id": "dora"}}
    memory.remember("Dora likes oars", store=perdure_store, config=config)
    perdure_store.put(("chat_memory", "doras"), "k", {"text": "hello"})
    receipt = memory.forget(
        everything=True, store=perdure_store, config=config, conversations=["bob", "doras"]
    )

    assert ("chat_memory", "doras") in receipt.namespaces
    assert receipt.others == (("chat_memory", "bob"),)
    assert perdure_store.get(("chat_memory", "bob"), "k") is not None


def test_forget_everything_with_a_namespace_erases_only_this_namespace(
    perdure_store: SQLiteStore,
) -> None:
    fill_store(perdure_store)
    memory.forget(
        everything=True, store=perdure_store, config=BOB, namespace=("notes", "{user_id}", "deep")
    )

    assert perdure_store.search(("notes", "bob")) == []
    assert memory.memories(store=perdure_store, config=BOB) != []


def test_forget_with_a_key_refuses_options_of_everything(perdure_store: SQLiteStore) -> None:
    fill_store(perdure_store)
    with pytest.raises(ConfigurationError, match="pass everything=True and no key"):
        memory.forget("home", store=perdure_store, config=BOB, dry_run=True)


def test_recall_from_a_read_only_store_records_no_template(tmp_path: Path) -> None:
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        store.put(("diary", "bob"), "k", {"text": "figs"})
    with SQLiteStore.open(tmp_path / "m.db", read_only=True) as store:
        result = recall("figs", store=store, namespace=("diary", "{user_id}"), config=BOB)
    assert [item.text for item in result.memories] == ["figs"]
    with SQLiteCheckpointer.open(tmp_path / "m.db"):
        pass

"""A collection: what is deleted and forgotten, and what the gate makes of what is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.errors import (
    UnknownMemory,
)
from perdure.memory.collection import Collection
from perdure.memory.gate import Gate
from perdure.memory.records import Candidate, Verdict
from perdure.stores import SQLiteStore
from tests.memory.kept import ANN, GHENT, TEA, call_method, list_memory_texts
from tests.stores.erasing import read_all_bytes

# -- deleting and forgetting


def test_a_delete(store: Any, call_mode: str) -> None:
    """It is no longer found; what is gone cannot be changed or deleted."""
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    outcome = call_method(call_mode, collection, "delete", key, config=ANN)

    assert (outcome.change, outcome.key) == ("deleted", key)
    assert list_memory_texts(collection) == []
    assert collection.search("tea", config=ANN) == []
    for method, arguments in (("delete", ()), ("update", (TEA,)), ("supersede", (TEA,))):
        with pytest.raises(UnknownMemory, match=key):
            call_method(call_mode, collection, method, key, *arguments, config=ANN)


def test_told_again_after_a_delete(store: Any) -> None:
    """What somebody asks to be kept is kept, as another memory; the deleted one stays deleted."""
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    collection.delete(key, config=ANN)
    outcome = collection.insert(TEA, config=ANN)

    assert outcome.change == "added"
    assert outcome.key != key
    assert collection.get(key, config=ANN) is None


def test_forgetting(tmp_path: Path, call_mode: str) -> None:
    """Nothing is left of what it ever said, in the file neither; others are as they were."""
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        collection = Collection(store)
        key = collection.insert("Ann calls him zorbax", config=ANN).key or ""
        collection.supersede(key, "Ann calls him quimbo", config=ANN)
        Collection(store, ("memories", "{user_id}", "deep")).insert(TEA, config=ANN, key=key)
        collection.insert(GHENT, config=ANN)
        receipt = call_method(call_mode, collection, "forget", key, config=ANN)
        past = collection.history(key, config=ANN)
        left = list_memory_texts(collection)
        with pytest.raises(UnknownMemory, match=key):
            call_method(call_mode, collection, "forget", key, config=ANN)
        deeper = store.get(("memories", "ann", "deep"), key)

    assert receipt.keys == ((("memories", "ann"), key),)
    assert (receipt.items, receipt.versions, receipt.clean) == (1, 1, True)
    assert past == []
    assert left == [GHENT]
    assert deeper is not None
    for secret in (b"zorbax", b"quimbo"):
        assert secret not in read_all_bytes(tmp_path)


def test_forgetting_what_was_deleted(perdure_store: SQLiteStore) -> None:
    """The past of a deleted memory goes as well."""
    collection = Collection(perdure_store)
    key = collection.insert(TEA, config=ANN).key or ""
    collection.delete(key, config=ANN)
    receipt = collection.forget(key, config=ANN)

    assert (receipt.items, receipt.versions) == (0, 1)
    assert collection.history(key, config=ANN) == []


@pytest.mark.parametrize("method", ["delete", "forget"])
def test_a_store_without_room(perdure_store: SQLiteStore, method: str) -> None:
    """It is deleted or forgotten all the same; of a delete it is told what could not be noted."""
    scope = perdure_store.scoped(("tenant",), max_items=3)
    collection = Collection(scope)
    key = collection.insert("Ann has run 0 marathons", config=ANN).key or ""
    for count in range(1, 5):
        collection.supersede(key, f"Ann has run {count} marathons", config=ANN)
    outcome = getattr(collection, method)(key, config=ANN)

    assert list_memory_texts(collection) == []
    assert len(collection.history(key, config=ANN)) == (5 if method == "delete" else 0)
    if method == "delete":
        assert "no room" in outcome.reason


def test_forgetting_in_another_store(call_mode: str) -> None:
    """It is deleted as that store does it, and the receipt does not claim more."""
    collection = Collection(InMemoryStore())
    key = collection.insert(TEA, config=ANN).key or ""
    receipt = call_method(call_mode, collection, "forget", key, config=ANN)

    assert (receipt.items, receipt.clean) == (1, False)
    assert list_memory_texts(collection) == []


# -- the gate

KEY = "sk-proj-Zq8dJ2mN4pXv7Lw1RtYbKc3H"
SECRET = f"Ann's key is {KEY}"


def waiting(store: Any, *space: str) -> list[str]:
    """What is in quarantine for a namespace, or further down."""
    return [item.value["text"] for item in store.search(("perdure", "quarantine", *space))]


def test_what_has_to_be_reviewed(store: Any, call_mode: str) -> None:
    """It waits in quarantine, once however often it is told, and changes nothing meanwhile."""
    collection = Collection(store)
    key = collection.insert(GHENT, config=ANN).key or ""
    added = [call_method(call_mode, collection, "insert", SECRET, config=ANN) for _ in range(2)]
    changed = call_method(call_mode, collection, "supersede", key, f"{SECRET}, really", config=ANN)

    assert [outcome.change for outcome in (*added, changed)] == ["quarantined"] * 3
    assert added[0].key == added[1].key
    assert all(outcome.reason and outcome.check for outcome in (*added, changed))
    assert sorted(waiting(store, "memories", "ann")) == [SECRET, f"{SECRET}, really"]
    assert list_memory_texts(collection) == [GHENT]
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

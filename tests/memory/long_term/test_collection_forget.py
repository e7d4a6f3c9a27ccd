"""A collection: deleting and forgetting, and the decisions of the gate about changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.errors import (
    UnknownMemory,
)
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.records import Candidate, Verdict
from perdure.stores import SQLiteStore
from tests.memory.collection_helpers import ANN, GHENT, TEA, call_method, list_memory_texts
from tests.stores.erasing import read_all_bytes

# -- deleting and forgetting


def test_deleted_memory_is_not_found_and_cannot_be_changed(store: Any, call_mode: str) -> None:
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    outcome = call_method(call_mode, collection, "delete", key, config=ANN)

    assert (outcome.change, outcome.key) == ("deleted", key)
    assert list_memory_texts(collection) == []
    assert collection.search("tea", config=ANN) == []
    for method, arguments in (("delete", ()), ("update", (TEA,)), ("supersede", (TEA,))):
        with pytest.raises(UnknownMemory, match=key):
            call_method(call_mode, collection, method, key, *arguments, config=ANN)


def test_text_of_a_deleted_memory_can_be_inserted_as_another_memory(store: Any) -> None:
    collection = Collection(store)
    key = collection.insert(TEA, config=ANN).key or ""
    collection.delete(key, config=ANN)
    outcome = collection.insert(TEA, config=ANN)

    assert outcome.change == "added"
    assert outcome.key != key
    assert collection.get(key, config=ANN) is None


def test_forget_removes_all_versions_from_the_file_and_keeps_others(
    tmp_path: Path, call_mode: str
) -> None:
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        collection = Collection(store)
        key = collection.insert("Ann calls him zorbax", config=ANN).key or ""
        collection.supersede(key, "Ann calls him quimbo", config=ANN)
        Collection(store, ("memories", "{user_id}", "deep")).insert(TEA, config=ANN, key=key)
        collection.insert(GHENT, config=ANN)
        receipt = call_method(call_mode, collection, "forget", key, config=ANN)
        past = collection.history(key, config=ANN)
        remaining_texts = list_memory_texts(collection)
        with pytest.raises(UnknownMemory, match=key):
            call_method(call_mode, collection, "forget", key, config=ANN)
        deeper = store.get(("memories", "ann", "deep"), key)

    assert receipt.keys == ((("memories", "ann"), key),)
    assert (receipt.items, receipt.versions, receipt.clean) == (1, 1, True)
    assert past == []
    assert remaining_texts == [GHENT]
    assert deeper is not None
    for secret in (b"zorbax", b"quimbo"):
        assert secret not in read_all_bytes(tmp_path)


def test_forget_removes_the_past_of_a_deleted_memory(perdure_store: SQLiteStore) -> None:
    collection = Collection(perdure_store)
    key = collection.insert(TEA, config=ANN).key or ""
    collection.delete(key, config=ANN)
    receipt = collection.forget(key, config=ANN)

    assert (receipt.items, receipt.versions) == (0, 1)
    assert collection.history(key, config=ANN) == []


@pytest.mark.parametrize("method", ["delete", "forget"])
def test_delete_and_forget_work_in_a_full_store(perdure_store: SQLiteStore, method: str) -> None:
    """A delete reports what it had no room to record."""
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


def test_forget_in_a_langgraph_store_does_not_claim_a_clean_file(call_mode: str) -> None:
    collection = Collection(InMemoryStore())
    key = collection.insert(TEA, config=ANN).key or ""
    receipt = call_method(call_mode, collection, "forget", key, config=ANN)

    assert (receipt.items, receipt.clean) == (1, False)
    assert list_memory_texts(collection) == []


# -- the gate

KEY = "sk-proj-Zq8dJ2mN4pXv7Lw1RtYbKc3H"
SECRET = f"Ann's key is {KEY}"


def list_quarantined_texts(store: Any, *space: str) -> list[str]:
    """Return the texts in quarantine for a namespace and its descendants."""
    return [item.value["text"] for item in store.search(("perdure", "quarantine", *space))]


def test_secret_waits_in_quarantine_once_and_changes_nothing(store: Any, call_mode: str) -> None:
    collection = Collection(store)
    key = collection.insert(GHENT, config=ANN).key or ""
    insert_outcomes = [
        call_method(call_mode, collection, "insert", SECRET, config=ANN) for _ in range(2)
    ]
    change_outcome = call_method(
        call_mode, collection, "supersede", key, f"{SECRET}, really", config=ANN
    )

    assert [outcome.change for outcome in (*insert_outcomes, change_outcome)] == ["quarantined"] * 3
    assert insert_outcomes[0].key == insert_outcomes[1].key
    assert all(outcome.reason and outcome.check for outcome in (*insert_outcomes, change_outcome))
    assert sorted(list_quarantined_texts(store, "memories", "ann")) == [SECRET, f"{SECRET}, really"]
    assert list_memory_texts(collection) == [GHENT]
    assert len(collection.history(key, config=ANN)) == 1


def test_forget_removes_quarantined_changes_of_the_memory_only(store: Any) -> None:
    """Entries with the same text go as well. Entries of other memories stay."""
    collection, deeper = Collection(store), Collection(store, ("memories", "{user_id}", "deep"))
    for target in (collection, deeper):
        target.insert(GHENT, config=ANN, key="k")
        target.update("k", SECRET, config=ANN)
    trusting = Collection(store, gate=Gate(secrets="keep"))
    trusting.insert(SECRET, config=ANN, key="s")
    collection.insert(f"{SECRET}.", config=ANN, key="t")
    first = collection.forget("k", config=ANN)
    quarantined = list_quarantined_texts(store, "memories", "ann")
    collection.insert(SECRET, config=ANN, key="u")
    collection.forget("s", config=ANN)

    assert len(first.keys) == 2
    assert sorted(quarantined) == [SECRET, f"{SECRET}."]
    assert sorted(list_quarantined_texts(store, "memories", "ann")) == [SECRET, f"{SECRET}."]


@pytest.mark.parametrize("method", ["update", "supersede"])
def test_gate_redacts_secrets_in_inserts_and_changes(store: Any, method: str) -> None:
    """The mark of a redaction goes away when the text is replaced."""
    collection = Collection(store, gate=Gate(secrets="redact"))
    outcome = collection.insert({"text": SECRET, "note": f"it is {KEY}"}, config=ANN)
    key = outcome.key or ""
    unchanged_outcome = getattr(collection, method)(key, {"text": SECRET}, config=ANN)
    change_outcome = getattr(collection, method)(key, f"{SECRET}, and it is new", config=ANN)
    redacted_memory = collection.get(key, config=ANN)
    getattr(collection, method)(key, {"text": TEA, "note": ""}, config=ANN)
    plain_memory = collection.get(key, config=ANN)

    assert redacted_memory is not None
    assert plain_memory is not None
    assert "redacted" in outcome.reason
    assert unchanged_outcome.change == "unchanged"
    assert "redacted" in change_outcome.reason
    assert KEY not in repr([memory.value for memory in collection.history(key, config=ANN)])
    assert "redacted" in redacted_memory.value
    assert plain_memory.value.keys() == {"text", "note", "kind", "formerly"}


def test_gate_checks_a_change_of_fields_alone(store: Any) -> None:
    """The memory is not refused for the similarity to its own text."""

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


def test_insert_of_a_megabyte_is_refused(store: Any) -> None:
    outcome = Collection(store).insert("tea " * 250_000, config=ANN)

    assert (outcome.change, outcome.check) == ("refused", "size")


def test_hundred_inserts_by_code_within_a_minute_are_stored(store: Any) -> None:
    collection = Collection(store)
    outcomes = {collection.insert(f"Ann has cat{n}", config=ANN).change for n in range(100)}

    assert outcomes == {"added"}

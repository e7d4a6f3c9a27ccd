"""Forgetting a whole user: nothing is left, neither in notes nor in quarantine."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import InvalidConfig
from perdure.graphs import chat_graph
from perdure.memory.long_term.collection import Collection, Quarantine
from perdure.memory.long_term.extraction import Extraction
from perdure.memory.long_term.records import NOTE_KINDS
from perdure.stores import Receipt, SQLiteStore
from tests.stores.erasing import read_all_bytes

ANN: Any = {"configurable": {"user_id": "ann", "thread_id": "t1"}}
BO: Any = {"configurable": {"user_id": "bo", "thread_id": "t2"}}
SECRET = "The password is swordfish99"


def fill_for_user(store: Any, saver: SQLiteCheckpointer, config: Any, name: str) -> None:
    """Store memories of every state: present, past, deleted, extracted, and quarantined."""
    collection = Collection(store)
    key = collection.insert(f"{name} lives in Ghent", config=config).key or ""
    collection.supersede(key, f"{name} lives in Bruges", config=config)
    deleted_key = collection.insert(f"{name} sings", config=config).key or ""
    collection.delete(deleted_key, config=config)
    collection.insert(f"{SECRET} of {name}", config=config)
    extraction = Extraction(saver, store)
    thread = config["configurable"]["thread_id"]
    chat_graph(checkpointer=saver).invoke({"messages": [("human", f"{name} rows a canoe")]}, config)
    extraction.extract(thread, config)


def list_namespaces(store: Any) -> set[tuple[str, ...]]:
    return {item.namespace for item in store.search((), limit=1_000)}


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_forget_all_removes_everything_of_one_user_from_the_file(
    tmp_path: Path, call_mode: str
) -> None:
    """Other users keep their memories, and a new extraction works."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
            for config, name in ((ANN, "Zorbax"), (BO, "Bo")):
                fill_for_user(store, saver, config, name)
            collection = Collection(store)
            namespaces = {
                namespace for namespace in list_namespaces(store) if namespace[-1] == "ann"
            }
            if call_mode == "sync":
                receipt = collection.forget_all(config=ANN)
            else:
                receipt = asyncio.run(collection.aforget_all(config=ANN))
            second_receipt = collection.forget_all(config=ANN)
            remaining_namespaces = list_namespaces(store)
        file_bytes = read_all_bytes(tmp_path)
        with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
            report = Extraction(saver, store).extract("t1", ANN)

    assert {namespace[1] for namespace in namespaces if namespace[0] == "perdure"} == set(
        NOTE_KINDS
    )
    assert {namespace[-1] for namespace in remaining_namespaces} == {"bo"}
    assert (receipt.clean, second_receipt.clean, second_receipt.keys) == (True, True, ())
    assert {namespace_of_key for namespace_of_key, _ in receipt.keys} == namespaces
    for word in (b"Zorbax", b"zorbax"):
        assert word not in file_bytes
    assert "added" in str(report)


def test_forget_all_keeps_descendant_namespaces(tmp_path: Path) -> None:
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        below, above = Collection(store), Collection(store, ("memories",))
        for collection in (below, above):
            collection.insert(SECRET, config=ANN)
            collection.insert("Ann sings", config=ANN)
        receipt = above.forget_all(config=ANN)
        memory_texts = [memory.text for memory in below.list(config=ANN)]
        quarantined_texts = [entry.text for entry in Quarantine(store).list(ANN)]

    assert receipt.clean
    assert {where[-1] for where, _ in receipt.keys} == {"memories"}
    assert (memory_texts, quarantined_texts) == (["Ann sings"], [SECRET])


def test_forget_all_in_a_langgraph_store_does_not_claim_a_clean_file() -> None:
    store = InMemoryStore()
    with SQLiteCheckpointer.open(":memory:") as saver:
        fill_for_user(store, saver, ANN, "Ann")
        fill_for_user(store, saver, BO, "Bo")
        receipt = Collection(store).forget_all(config=ANN)

    assert {place[-1] for place in list_namespaces(store)} == {"bo"}
    assert not receipt.clean
    assert receipt.items == len(receipt.keys) > 4


def test_forget_all_without_a_user_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        Collection(store).insert("Ann sings", config=ANN)
        with pytest.raises(InvalidConfig):
            Collection(store).forget_all()

        assert list_namespaces(store) >= {("memories", "ann")}


def test_sum_of_receipts_adds_counts_and_merges_keys_and_hashes() -> None:
    """The sum is clean only if all receipts are."""
    early, late = (datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2))
    first = Receipt(1, 2, 3, ((("a",), "k"),), ("y",), ("t",), late, clean=False)
    second = Receipt(10, 20, 30, ((("b",), "k"),), ("x", "y"), ("t", "u"), early, clean=True)
    keys = ((("a",), "k"), (("b",), "k"))

    assert first + second == Receipt(11, 22, 33, keys, ("x", "y"), ("t", "u"), late, clean=False)
    assert not (second + first).clean

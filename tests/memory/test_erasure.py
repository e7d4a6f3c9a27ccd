"""Forgetting everything of a user: nothing is left, in notes and in quarantine neither."""

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
from perdure.memory.collection import Collection, Quarantine
from perdure.memory.extraction import Extraction
from perdure.memory.records import NOTE_KINDS
from perdure.stores import Receipt, SQLiteStore
from tests.stores.erasing import read_all_bytes

ANN: Any = {"configurable": {"user_id": "ann", "thread_id": "t1"}}
BO: Any = {"configurable": {"user_id": "bo", "thread_id": "t2"}}
SECRET = "The password is swordfish99"


def filled(store: Any, saver: SQLiteCheckpointer, config: Any, name: str) -> None:
    """All that there can be of a user: present, past, deleted, extracted, in quarantine."""
    collection = Collection(store)
    key = collection.insert(f"{name} lives in Ghent", config=config).key or ""
    collection.supersede(key, f"{name} lives in Bruges", config=config)
    gone = collection.insert(f"{name} sings", config=config).key or ""
    collection.delete(gone, config=config)
    collection.insert(f"{SECRET} of {name}", config=config)
    extraction = Extraction(saver, store)
    thread = config["configurable"]["thread_id"]
    chat_graph(checkpointer=saver).invoke({"messages": [("human", f"{name} rows a canoe")]}, config)
    extraction.extract(thread, config)


def left(store: Any) -> set[tuple[str, ...]]:
    return {item.namespace for item in store.search((), limit=1_000)}


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_everything_of_a_user(tmp_path: Path, call_mode: str) -> None:
    """Nothing of them is in the store or the file; another's is untouched, and begins anew."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
            for config, name in ((ANN, "Zorbax"), (BO, "Bo")):
                filled(store, saver, config, name)
            collection = Collection(store)
            places = {place for place in left(store) if place[-1] == "ann"}
            if call_mode == "sync":
                receipt = collection.forget_all(config=ANN)
            else:
                receipt = asyncio.run(collection.aforget_all(config=ANN))
            again = collection.forget_all(config=ANN)
            rest = left(store)
        found = read_all_bytes(tmp_path)
        with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
            formed = Extraction(saver, store).extract("t1", ANN)

    assert {place[1] for place in places if place[0] == "perdure"} == set(NOTE_KINDS)
    assert {place[-1] for place in rest} == {"bo"}
    assert (receipt.clean, again.clean, again.keys) == (True, True, ())
    assert {where for where, _ in receipt.keys} == places
    for word in (b"Zorbax", b"zorbax"):
        assert word not in found
    assert "added" in str(formed)


def test_what_lies_below_stays(tmp_path: Path) -> None:
    """A namespace is forgotten, and not those whose labels begin as its do."""
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        below, above = Collection(store), Collection(store, ("memories",))
        for collection in (below, above):
            collection.insert(SECRET, config=ANN)
            collection.insert("Ann sings", config=ANN)
        receipt = above.forget_all(config=ANN)
        rest = [memory.text for memory in below.list(config=ANN)]
        held = [entry.text for entry in Quarantine(store).list(ANN)]

    assert receipt.clean
    assert {where[-1] for where, _ in receipt.keys} == {"memories"}
    assert (rest, held) == (["Ann sings"], [SECRET])


def test_in_another_store() -> None:
    """All is deleted as that store does it, and the receipt claims no more."""
    store = InMemoryStore()
    with SQLiteCheckpointer.open(":memory:") as saver:
        filled(store, saver, ANN, "Ann")
        filled(store, saver, BO, "Bo")
        receipt = Collection(store).forget_all(config=ANN)

    assert {place[-1] for place in left(store)} == {"bo"}
    assert not receipt.clean
    assert receipt.items == len(receipt.keys) > 4


def test_nobody_is_forgotten_by_mistake(tmp_path: Path) -> None:
    """Without saying whose, nothing is."""
    with SQLiteStore.open(tmp_path / "m.db", index=None) as store:
        Collection(store).insert("Ann sings", config=ANN)
        with pytest.raises(InvalidConfig):
            Collection(store).forget_all()

        assert left(store) >= {("memories", "ann")}


def test_receipts_are_added_up() -> None:
    """Each key and thread in order, hashes once; clean is what all are."""
    early, late = (datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2))
    one = Receipt(1, 2, 3, ((("a",), "k"),), ("y",), ("t",), late, clean=False)
    other = Receipt(10, 20, 30, ((("b",), "k"),), ("x", "y"), ("t", "u"), early, clean=True)
    keys = ((("a",), "k"), (("b",), "k"))

    assert one + other == Receipt(11, 22, 33, keys, ("x", "y"), ("t", "u"), late, clean=False)
    assert not (other + one).clean

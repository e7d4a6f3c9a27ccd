"""Memories of threads are erased with the threads, for all users."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.errors import ConfigurationError
from perdure.memory import Extraction, memories, remember
from perdure.memory.long_term.thread_memories import aforget_thread_memories, forget_thread_memories
from tests.backends import places as places_in
from tests.talks import store_conversation

ANN: Any = {"configurable": {"user_id": "ann"}}
BOB: Any = {"configurable": {"user_id": "bob"}}


@pytest.mark.parametrize("backend", ["file", "postgres"])
def test_forgetting_thread_removes_its_memories_and_watermarks(
    tmp_path: Path, backend: str, call_mode: str
) -> None:
    """A thread with the same id is extracted from its beginning again. Other memories stay."""
    place = places_in(tmp_path)[backend]()
    with place.saver() as saver, place.store(index=None) as store:
        store_conversation(saver, "t")
        store_conversation(saver, "other")
        extraction = Extraction(saver, store)
        for thread, config in (("t", ANN), ("t", BOB), ("other", ANN)):
            extraction.extract(thread, config)
        remember("by hand", store=store, config=ANN)
        planned = forget_thread_memories(store, ["t"], dry_run=True)
        own = forget_thread_memories(store, ["t"], places=[("memories", "bob")], dry_run=True)
        if call_mode == "sync":
            receipt = forget_thread_memories(store, ["t"])
        else:
            receipt = asyncio.run(aforget_thread_memories(store, ["t"]))
        remaining_texts = [memory.text for memory in memories(store=store, config=ANN, limit=50)]
        again = extraction.extract("t", BOB)

    assert (planned.items, own.items, receipt.items) == (8, 4, 8)
    assert planned.keys == receipt.keys
    assert sorted(remaining_texts) == ["by hand", *(f"user: other {number}" for number in range(4))]
    assert again.added == 4


def test_forgetting_thread_memories_refuses_langgraph_store() -> None:
    with pytest.raises(ConfigurationError, match="expected a perdure store"):
        forget_thread_memories(InMemoryStore(), ["t"])

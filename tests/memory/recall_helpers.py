"""Memories for the tests of recall: turns and facts, stored as the extraction stores them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from langchain_core.runnables import RunnableConfig

from perdure.memory.long_term.records import FACT, TURN, Memory, build_put
from perdure.stores import Provenance, PutItem, SQLiteStore

ANN = ("memories", "ann")
AS_ANN: RunnableConfig = {"configurable": {"user_id": "ann"}}


def build_fact_put(key: str, text: str, kind: str = FACT, **source: Any) -> PutItem:
    """Return the operation that stores one of Ann's facts."""
    provenance = Provenance(**source) if source else None
    return build_put(ANN, key, {"text": text, "kind": kind}, provenance=provenance)


def iter_turn_puts(thread_id: str, at: datetime, *texts: str) -> Iterator[PutItem]:
    """Yield the operations that store the messages of a thread, one memory for each."""
    for position, text in enumerate(texts):
        key = f"{thread_id}-{position}"
        source = Provenance(thread_id, None, (key,), "user", "user", position, at)
        yield build_put(ANN, key, {"text": text, "kind": TURN}, provenance=source)


def open_filled_store(*puts: PutItem, **options: Any) -> SQLiteStore:
    """Return a store in memory that holds `puts`, without an embedder unless `options` sets one."""
    store = SQLiteStore.open(":memory:", **{"index": None, **options})
    store.batch(puts)
    return store


def list_keys(memories: Sequence[Memory]) -> list[str]:
    return [memory.key for memory in memories]

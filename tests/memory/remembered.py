"""What is remembered in the tests of recall: turns and facts put by hand, as forming puts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from langchain_core.runnables import RunnableConfig

from perdure.memory.records import FACT, TURN, Memory, build_put
from perdure.stores import Provenance, PutItem, SQLiteStore

ANN = ("memories", "ann")
AS_ANN: RunnableConfig = {"configurable": {"user_id": "ann"}}


def fact(key: str, text: str, kind: str = FACT, **source: Any) -> PutItem:
    """The operation that keeps a fact of Ann's."""
    provenance = Provenance(**source) if source else None
    return build_put(ANN, key, {"text": text, "kind": kind}, provenance=provenance)


def turns(thread_id: str, at: datetime, *texts: str) -> Iterator[PutItem]:
    """The operations that keep what was said on a thread, a memory for each message."""
    for position, text in enumerate(texts):
        key = f"{thread_id}-{position}"
        source = Provenance(thread_id, None, (key,), "user", "user", position, at)
        yield build_put(ANN, key, {"text": text, "kind": TURN}, provenance=source)


def filled(*puts: PutItem, **options: Any) -> SQLiteStore:
    """A store in memory with some memories; without an embedder, if nothing else is said."""
    store = SQLiteStore.open(":memory:", **{"index": None, **options})
    store.batch(puts)
    return store


def keys(memories: Sequence[Memory]) -> list[str]:
    return [memory.key for memory in memories]

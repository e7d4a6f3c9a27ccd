"""Erasure of the memories that were made of threads, for those who delete a thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from langgraph.store.base import BaseStore

from perdure.effects import awaiting, blocking
from perdure.memory.options import check_instance
from perdure.memory.records import QUARANTINE, WATERMARKS, StoreAdapter, build_notes_namespace
from perdure.memory.run_config import Versioned
from perdure.stores.base import Namespace, Receipt

PLACES: Final[tuple[Namespace, ...]] = (("memories",), ("examples",))
"""Prefixes of the namespaces in which memories of threads are kept."""


async def _forget_thread_memories(
    store: BaseStore,
    thread_ids: Collection[str],
    *,
    places: Sequence[Namespace] = PLACES,
    dry_run: bool = False,
) -> Receipt:
    """Erase the memories and examples that come from threads, with their entries in quarantine.

    The progress of the extraction is erased as well. A thread with one of these ids that is
    imported again is therefore extracted from its beginning.

    Args:
        store: A store of perdure.
        thread_ids: The threads. They need not exist any more.
        places: Prefixes of the namespaces that are searched. The default covers all users.
        dry_run: Whether to return the receipt without erasing.
    """
    check_instance("store", store, Versioned, "one of perdure's, which erases what matches")
    adapter, ids = StoreAdapter(store), [*thread_ids]
    receipt = Receipt(0, 0, 0, (), (), (), datetime.now(UTC), clean=not dry_run)
    if not ids:
        return receipt
    if not dry_run:
        read = {"thread_id": {"$in": ids}}
        for place in places:
            await adapter.call("forget", build_notes_namespace(WATERMARKS, place), filter=read)
    what: dict[str, Any] = {"provenance": {"thread_id": {"$in": ids}}, "dry_run": dry_run}
    for place in (*places, *(build_notes_namespace(QUARANTINE, place) for place in places)):
        receipt += await adapter.call("forget", place, **what)
    return receipt


forget_thread_memories = blocking(_forget_thread_memories)
aforget_thread_memories = awaiting(_forget_thread_memories)

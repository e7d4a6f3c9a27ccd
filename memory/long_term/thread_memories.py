"""Erase memories that were extracted from threads, for example because a thread was deleted.

The caller specifies the ids of the threads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from langgraph.store.base import BaseStore

from perdure.effects import build_async_function, build_blocking_function
from perdure.memory.long_term.records import (
    QUARANTINE,
    WATERMARKS,
    StoreAdapter,
    build_namespace_of_notes_about_memories,
)
from perdure.memory.options import check_instance
from perdure.memory.run_config import Versioned
from perdure.stores.base import Namespace, Receipt

PLACES: Final[tuple[Namespace, ...]] = (("memories",), ("examples",))
"""The default prefixes of the namespaces that contain memories of threads."""


async def _forget_thread_memories(
    store: BaseStore,
    thread_ids: Collection[str],
    *,
    places: Sequence[Namespace] = PLACES,
    dry_run: bool = False,
) -> Receipt:
    """Erase the memories and examples derived from threads, including quarantined candidates.

    The threads' watermarks, which record extraction progress, are erased too. If a thread is
    imported again without its watermark, memories are extracted from all of its messages. The
    counts in the returned receipt do not include erased watermarks.

    Args:
        store: A perdure store.
        thread_ids: The ids of the threads, which may be deleted already.
        places: Prefixes of the namespaces that are searched. The default covers all users.
        dry_run: Whether to return the receipt without erasing.
    """
    check_instance(
        "store", store, Versioned, "a perdure store, which can erase items by their origin"
    )
    adapter, ids = StoreAdapter(store), [*thread_ids]
    receipt = Receipt(0, 0, 0, (), (), (), datetime.now(UTC), clean=not dry_run)
    if not ids:
        return receipt
    if not dry_run:
        thread_filter = {"thread_id": {"$in": ids}}
        for prefix in places:
            await adapter.call(
                "forget",
                build_namespace_of_notes_about_memories(WATERMARKS, prefix),
                filter=thread_filter,
            )
    options: dict[str, Any] = {"provenance": {"thread_id": {"$in": ids}}, "dry_run": dry_run}
    for prefix in (
        *places,
        *(build_namespace_of_notes_about_memories(QUARANTINE, prefix) for prefix in places),
    ):
        receipt += await adapter.call("forget", prefix, **options)
    return receipt


forget_thread_memories = build_blocking_function(_forget_thread_memories)
aforget_thread_memories = build_async_function(_forget_thread_memories)

"""Forgetting many memories at once: those that come from a thread, or that hold certain words.

The file is rewritten once a namespace, and not once a memory, as it is by `Collection.forget`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, Final

from perdure.errors import ConfigurationError
from perdure.memory.collection.forgetting import Forgets
from perdure.memory.effects import Effect, Effects, arun, run
from perdure.memory.store_adapter import RESERVED, StoreAdapter, quarantine_of
from perdure.memory.tombstones import tombstones_of
from perdure.stores.base import Namespace, PutItem, Receipt

_AT_ONCE: Final = 1_000  # notes in a transaction


def forget_many(
    store: Any,
    namespaces: Sequence[Namespace],
    *,
    thread_id: str | None = None,
    query: str | None = None,
    dry_run: bool = False,
) -> Receipt:
    """Erase the memories that meet all that is given, with their past, and those in quarantine.

    What is under a namespace counts to it. Before anything is erased, hashes note that it is not to
    be formed again: if this is cut off, call it again.

    Args:
        store: One of perdure's.
        namespaces: Where the memories are.
        thread_id: The thread that one version at least comes from.
        query: Words that one version must hold, all of them, in any form.
        dry_run: Only count.

    Raises:
        ConfigurationError: Nothing says which memories, a query has no words, or the store is not
            one of perdure's.
    """
    return run(_forgetting(store, namespaces, thread_id, query, dry_run))


async def aforget_many(
    store: Any,
    namespaces: Sequence[Namespace],
    *,
    thread_id: str | None = None,
    query: str | None = None,
    dry_run: bool = False,
) -> Receipt:
    """See `forget_many`."""
    return await arun(_forgetting(store, namespaces, thread_id, query, dry_run))


def _forgetting(
    store: Any,
    namespaces: Sequence[Namespace],
    thread_id: str | None,
    query: str | None,
    dry_run: bool,
) -> Effects[Receipt]:
    if not isinstance(store, Forgets):
        raise ConfigurationError(
            f"the store is a {type(store).__name__}, which cannot erase what meets a condition; "
            "use perdure.stores.SQLiteStore, or forget memories one by one"
        )
    if not namespaces or (thread_id is None and query is None):
        raise ConfigurationError("nothing says which memories to forget; give thread_id= or query=")
    meant: dict[str, Any] = {"query": query}
    if thread_id is not None:
        meant["provenance"] = {"thread_id": thread_id}
    places = [each for own in namespaces for each in (own, quarantine_of(own))]
    plans = yield from _forgotten(store, places, {**meant, "dry_run": True})
    if dry_run:
        return reduce(add, plans)
    yield from _buried(StoreAdapter(store), [key for plan in plans for key in plan.keys])
    return reduce(add, (yield from _forgotten(store, places, meant)))


def _forgotten(
    store: Forgets, places: Sequence[Namespace], meant: dict[str, Any]
) -> Effects[list[Receipt]]:
    receipts: list[Receipt] = []
    for place in places:
        ask = _asking(store, place, meant)
        receipts.append((yield ask))
    return receipts


def _asking(store: Forgets, place: Namespace, meant: dict[str, Any]) -> Effect:
    return Effect(lambda: store.forget(place, **meant), lambda: store.aforget(place, **meant))


def _buried(adapter: StoreAdapter, keys: Sequence[tuple[Namespace, str]]) -> Effects[None]:
    """Note that memories are not to be formed again; what waits in quarantine is none yet."""
    notes: dict[tuple[Namespace, str], PutItem] = {}
    for place, key in keys:
        if place[0] != RESERVED:
            for version in (yield from adapter.versions(place, key)):
                notes |= {
                    (put.namespace, put.key): put for put in tombstones_of(version, "forgotten")
                }
    puts = list(notes.values())
    for start in range(0, len(puts), _AT_ONCE):
        yield from adapter.written(puts[start : start + _AT_ONCE])

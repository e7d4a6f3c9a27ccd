"""Erasure: a memory with all its versions, those that match, or all of a namespace with its notes.

Tombstones are written first: an erasure that is cut off can be called again. A store that is not
perdure's deletes, which leaves bytes: the receipt is then not `clean`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from perdure.errors import LimitExceeded
from perdure.memory import store_adapter
from perdure.memory.changes import NO_TOMBSTONE, unknown
from perdure.memory.gate import tombstones_of
from perdure.memory.options import instance, text
from perdure.memory.records import Memory
from perdure.memory.run_config import Versioned
from perdure.memory.store_adapter import QUARANTINE, StoreAdapter, notes_of
from perdure.stores.base import Namespace, PutItem, Receipt

_LOG = logging.getLogger("perdure")


async def forgotten(adapter: StoreAdapter, namespace: Namespace, key: str) -> Receipt:
    """Erase a memory, and the entries in quarantine for it or with its text."""
    versions = await adapter.versions(namespace, key)
    if not versions:
        raise unknown(namespace, key)
    tombstones = _tombstones(versions)
    written = await _written(adapter, tombstones)
    receipt = await erased(adapter, namespace, key)
    texts = {version.text for version in versions}
    texts.update(previous.text for version in versions for previous in version.previous)
    receipt += await _unquarantined(adapter, notes_of(QUARANTINE, namespace), key, texts)
    if not written and not (await _written(adapter, tombstones)):
        _LOG.warning("%r in %r is forgotten; %s", key, namespace, NO_TOMBSTONE)
    return receipt


async def forgotten_all(adapter: StoreAdapter, namespace: Namespace) -> Receipt:
    """Erase the notes on a namespace, then its memories; namespaces below it stay."""
    receipt = _nothing(clean=True)
    for place in (*(notes_of(kind, namespace) for kind in store_adapter.NOTES), namespace):
        receipt += await _emptied(adapter, place)
    return receipt


async def forgotten_matching(
    adapter: StoreAdapter,
    namespace: Namespace,
    *,
    thread_id: str | None = None,
    query: str | None = None,
    dry_run: bool = False,
) -> Receipt:
    """Erase, or only count, memories of which a version is from the thread and has the words."""
    text("thread_id or query", query if thread_id is None else thread_id)  # else it were all
    instance("store", adapter.store, Versioned, "one of perdure's, which erases what matches")
    source = None if thread_id is None else {"thread_id": thread_id}
    what: dict[str, Any] = {"query": query, "provenance": source}
    places = (namespace, notes_of(QUARANTINE, namespace))
    found = _nothing(clean=False)
    for place in places:
        found += await adapter.call("forget", place, **what, dry_run=True)
    if dry_run:
        return found
    versions: list[Memory] = []
    for namespace, key in found.keys:
        if namespace[0] != store_adapter.RESERVED:  # an entry in quarantine is no memory yet
            versions += await adapter.versions(namespace, key)
    await adapter.written(_tombstones(versions))
    receipt = _nothing(clean=True)
    for place in places:
        receipt += await adapter.call("forget", place, **what)
    return receipt


async def erased(adapter: StoreAdapter, namespace: Namespace, *keys: str) -> Receipt:
    """Erase items with their versions."""
    if not adapter.versioned:
        await adapter.written([store_adapter.removal_of(namespace, key) for key in keys])
        deleted = tuple((namespace, key) for key in keys)
        return replace(_nothing(clean=False), items=len(keys), keys=deleted)
    receipt = _nothing(clean=True)
    for key in keys:
        receipt += await adapter.call("forget", namespace, key=key)
    return receipt


async def _emptied(adapter: StoreAdapter, place: Namespace) -> Receipt:
    if not adapter.versioned:
        found = await adapter.every(place)
        return await erased(adapter, place, *(each.key for each in found))
    plan: Receipt = await adapter.call("forget", place, dry_run=True)
    own = [key for where, key in plan.keys if where == place]
    if own and len(own) == len(plan.keys):
        receipt: Receipt = await adapter.call("forget", place)
        return receipt
    return await erased(adapter, place, *own)  # namespaces below this one stay


async def _unquarantined(
    adapter: StoreAdapter, place: Namespace, key: str, texts: set[str]
) -> Receipt:
    if adapter.versioned:
        meant = {"$or": [{"key": key}, {"text": {"$in": sorted(texts)}}]}
        plan: Receipt = await adapter.call("forget", place, filter=meant, dry_run=True)
        own = [entry for where, entry in plan.keys if where == place]
    else:
        entries = await adapter.every(place)
        own = [e.key for e in entries if e.value.get("key") == key or e.text in texts]
    return await erased(adapter, place, *own)


def _tombstones(versions: Iterable[Memory]) -> list[PutItem]:
    puts = [put for version in versions for put in tombstones_of(version, "forgotten")]
    return list({(put.namespace, put.key): put for put in puts}.values())


async def _written(adapter: StoreAdapter, tombstones: list[PutItem]) -> bool:
    try:
        await adapter.written(tombstones)
    except LimitExceeded:
        return False
    return True


def _nothing(*, clean: bool) -> Receipt:
    return Receipt(0, 0, 0, (), (), (), datetime.now(UTC), clean)

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
from perdure.memory.effects import Effects
from perdure.memory.options import instance, text
from perdure.memory.records import Memory
from perdure.memory.run_config import Versioned
from perdure.memory.store_adapter import (
    NOTES,
    QUARANTINE,
    RESERVED,
    StoreAdapter,
    notes_of,
    removal_of,
)
from perdure.memory.tombstones import tombstones_of
from perdure.memory.writer import NO_TOMBSTONE, unknown
from perdure.stores.base import Namespace, PutItem, Receipt

_LOG = logging.getLogger("perdure")


def forgotten(adapter: StoreAdapter, namespace: Namespace, key: str) -> Effects[Receipt]:
    """Erase a memory, and the entries in quarantine for it or with its text."""
    versions = yield from adapter.versions(namespace, key)
    if not versions:
        raise unknown(namespace, key)
    tombstones = _tombstones(versions)
    written = yield from _written(adapter, tombstones)
    receipt = yield from erased(adapter, namespace, key)
    texts = {version.text for version in versions}
    texts.update(previous.text for version in versions for previous in version.previous)
    receipt += yield from _unquarantined(adapter, notes_of(QUARANTINE, namespace), key, texts)
    if not written and not (yield from _written(adapter, tombstones)):
        _LOG.warning("%r in %r is forgotten; %s", key, namespace, NO_TOMBSTONE)
    return receipt


def forgotten_all(adapter: StoreAdapter, namespace: Namespace) -> Effects[Receipt]:
    """Erase the notes on a namespace, then its memories; namespaces below it stay."""
    receipt = _nothing(clean=True)
    for place in (*(notes_of(kind, namespace) for kind in NOTES), namespace):
        receipt += yield from _emptied(adapter, place)
    return receipt


def forgotten_matching(
    adapter: StoreAdapter,
    namespace: Namespace,
    *,
    thread_id: str | None = None,
    query: str | None = None,
    dry_run: bool = False,
) -> Effects[Receipt]:
    """Erase, or only count, memories of which a version is from the thread and has the words."""
    text("thread_id or query", query if thread_id is None else thread_id)  # else it were all
    instance("store", adapter.store, Versioned, "one of perdure's, which erases what matches")
    source = None if thread_id is None else {"thread_id": thread_id}
    what: dict[str, Any] = {"query": query, "provenance": source}
    places = (namespace, notes_of(QUARANTINE, namespace))
    found = _nothing(clean=False)
    for place in places:
        found += yield adapter.call("forget", place, **what, dry_run=True)
    if dry_run:
        return found
    versions: list[Memory] = []
    for namespace, key in found.keys:
        if namespace[0] != RESERVED:  # an entry in quarantine is no memory yet
            versions += yield from adapter.versions(namespace, key)
    yield from adapter.written(_tombstones(versions))
    receipt = _nothing(clean=True)
    for place in places:
        receipt += yield adapter.call("forget", place, **what)
    return receipt


def erased(adapter: StoreAdapter, namespace: Namespace, *keys: str) -> Effects[Receipt]:
    """Erase items with their versions."""
    if not adapter.versioned:
        yield from adapter.written([removal_of(namespace, key) for key in keys])
        deleted = tuple((namespace, key) for key in keys)
        return replace(_nothing(clean=False), items=len(keys), keys=deleted)
    receipt = _nothing(clean=True)
    for key in keys:
        receipt += yield adapter.call("forget", namespace, key=key)
    return receipt


def _emptied(adapter: StoreAdapter, place: Namespace) -> Effects[Receipt]:
    if not adapter.versioned:
        found = yield from adapter.every(place)
        return (yield from erased(adapter, place, *(each.key for each in found)))
    plan: Receipt = yield adapter.call("forget", place, dry_run=True)
    own = [key for where, key in plan.keys if where == place]
    if own and len(own) == len(plan.keys):
        receipt: Receipt = yield adapter.call("forget", place)
        return receipt
    return (yield from erased(adapter, place, *own))  # namespaces below this one stay


def _unquarantined(
    adapter: StoreAdapter, place: Namespace, key: str, texts: set[str]
) -> Effects[Receipt]:
    """Erase entries that are, or were, in quarantine for a memory or with its text."""
    if adapter.versioned:
        meant = {"$or": [{"key": key}, {"text": {"$in": sorted(texts)}}]}
        plan: Receipt = yield adapter.call("forget", place, filter=meant, dry_run=True)
        own = [entry for where, entry in plan.keys if where == place]
    else:
        entries = yield from adapter.every(place)
        own = [e.key for e in entries if e.value.get("key") == key or e.text in texts]
    return (yield from erased(adapter, place, *own))


def _tombstones(versions: Iterable[Memory]) -> list[PutItem]:
    puts = [put for version in versions for put in tombstones_of(version, "forgotten")]
    return list({(put.namespace, put.key): put for put in puts}.values())


def _written(adapter: StoreAdapter, tombstones: list[PutItem]) -> Effects[bool]:
    try:
        yield from adapter.written(tombstones)
    except LimitExceeded:
        return False
    return True


def _nothing(*, clean: bool) -> Receipt:
    return Receipt(0, 0, 0, (), (), (), datetime.now(UTC), clean)

"""Forgetting one memory with all that it ever said, or all of a namespace with all notes on it."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol, runtime_checkable

from perdure.errors import LimitExceeded, UnknownMemory
from perdure.memory.effects import Effect, Effects
from perdure.memory.store_adapter import (
    NOTES,
    StoreAdapter,
    notes_of,
    quarantine_of,
    removal_of,
)
from perdure.memory.tombstones import tombstones_of
from perdure.stores.base import Namespace, PutItem, Receipt

UNNOTED: Final = "there is no room to note that it is not to be formed again"
_LOG = logging.getLogger("perdure")


@runtime_checkable
class Forgets(Protocol):
    """A store that can erase items with their past, as perdure's do."""

    def forget(self, prefix: Namespace, **what: Any) -> Receipt:
        """Erase the items that are meant."""

    async def aforget(self, prefix: Namespace, **what: Any) -> Receipt:
        """See `forget`."""


def forgetting(adapter: StoreAdapter, namespace: Namespace, key: str) -> Effects[Receipt]:
    """Erase a memory, present or deleted, and what waits in quarantine for it or in its words.

    First it is noted, as a hash, that it is not to be formed again: if this is cut off in between,
    the memory is still there and can be forgotten again.

    Raises:
        UnknownMemory: There is and was none by that id.
    """
    versions = yield from adapter.versions(namespace, key)
    if not versions:
        raise unknown(namespace, key)
    notes = [put for version in versions for put in tombstones_of(version, "forgotten")]
    notes = list({(put.namespace, put.key): put for put in notes}.values())
    noted = yield from _noted(adapter, notes)
    receipt = yield from _erased(adapter, namespace, key)
    place = quarantine_of(namespace)
    texts = {version.text for version in versions}
    texts.update(each.text for version in versions for each in version.previous)
    for entry in (yield from _entries(adapter, place, key, texts)):
        receipt += yield from _erased(adapter, place, entry)
    if not noted and not (yield from _noted(adapter, notes)):
        _LOG.warning("%r in %r is forgotten; %s", key, namespace, UNNOTED)
    return receipt


def emptying(adapter: StoreAdapter, namespace: Namespace) -> Effects[Receipt]:
    """Erase the memories of a namespace, and the notes on them; see `Collection.forget_all`.

    The memories last: if this is cut off, they are still there and can be forgotten again.
    """
    receipt = _nothing(clean=isinstance(adapter.store, Forgets))
    for place in (*(notes_of(kind, namespace) for kind in NOTES), namespace):
        receipt += yield from _emptied(adapter, place)
    return receipt


def _emptied(adapter: StoreAdapter, place: Namespace) -> Effects[Receipt]:
    store: Any = adapter.store
    if not isinstance(store, Forgets):
        found = yield from adapter.every(place)
        own = [each.key for each in found if each.namespace == place]
        yield from adapter.written([removal_of(place, key) for key in own])
        return replace(_nothing(clean=False), items=len(own), keys=tuple((place, k) for k in own))
    plan: Receipt = yield Effect(
        lambda: store.forget(place, dry_run=True), lambda: store.aforget(place, dry_run=True)
    )
    if not plan.keys:  # the file need not be rewritten
        return _nothing(clean=True)
    if all(where == place for where, _ in plan.keys):
        receipt: Receipt = yield Effect(lambda: store.forget(place), lambda: store.aforget(place))
        return receipt
    receipt = _nothing(clean=True)  # what is further down stays
    for key in [key for where, key in plan.keys if where == place]:
        receipt += yield from _erased(adapter, place, key)
    return receipt


def _noted(adapter: StoreAdapter, notes: list[PutItem]) -> Effects[bool]:
    """Write notes, if the store has room for them: to forget needs none."""
    try:
        yield from adapter.written(notes)
    except LimitExceeded:
        return False
    return True


def _entries(
    adapter: StoreAdapter, place: Namespace, key: str, texts: set[str]
) -> Effects[list[str]]:
    """What is, or was, in quarantine for a memory or in its words."""
    store: Any = adapter.store
    if isinstance(store, Forgets):
        meant = {"$or": [{"key": key}, {"text": {"$in": sorted(texts)}}]}
        plan: Receipt = yield Effect(
            lambda: store.forget(place, filter=meant, dry_run=True),
            lambda: store.aforget(place, filter=meant, dry_run=True),
        )
        return [entry for where, entry in plan.keys if where == place]
    waiting = yield from adapter.every(place)
    return [
        each.key
        for each in waiting
        if each.namespace == place and (each.value.get("key") == key or each.text in texts)
    ]


def _erased(adapter: StoreAdapter, namespace: Namespace, key: str) -> Effects[Receipt]:
    store: Any = adapter.store
    if isinstance(store, Forgets):
        receipt: Receipt = yield Effect(
            lambda: store.forget(namespace, key=key), lambda: store.aforget(namespace, key=key)
        )
        return receipt
    yield from adapter.written([removal_of(namespace, key)])
    return replace(_nothing(clean=False), items=1, keys=((namespace, key),))


def _nothing(*, clean: bool) -> Receipt:
    return Receipt(0, 0, 0, (), (), (), datetime.now(UTC), clean)


def unknown(namespace: Namespace, key: str) -> UnknownMemory:
    """The error that says where there is no such memory, and where ids come from."""
    return UnknownMemory(
        f"no memory {key!r} in {namespace!r}; search() and list() tell the ids that there are"
    )

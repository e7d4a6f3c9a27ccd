"""Forgetting one memory: all that it ever said, and what waits for review in its words."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol, runtime_checkable

from perdure.errors import LimitExceeded, UnknownMemory
from perdure.memory.collection.keeping import QUARANTINE
from perdure.memory.drivers import Step, Steps
from perdure.memory.longterm.backing import RESERVED, Backing, removal_of
from perdure.memory.longterm.memories import Memory
from perdure.memory.longterm.reading import listing
from perdure.memory.longterm.tombstones import burials
from perdure.stores.base import Namespace, PutItem, Receipt

UNNOTED: Final = "there is no room to note that it is not to be formed again"
_LOG = logging.getLogger("perdure")
_PAGE: Final = 1_000  # entries of the quarantine read at once


@runtime_checkable
class Forgets(Protocol):
    """A store that can erase items with their past, as perdure's do."""

    def forget(self, prefix: Namespace, **what: Any) -> Receipt:
        """Erase the items that are meant."""

    async def aforget(self, prefix: Namespace, **what: Any) -> Receipt:
        """See `forget`."""


def forgetting(backing: Backing, namespace: Namespace, key: str) -> Steps[Receipt]:
    """Erase a memory, present or deleted, and what waits in quarantine for it or in its words.

    First it is noted, as a hash, that it is not to be formed again: if this is cut off in between,
    the memory is still there and can be forgotten again.

    Raises:
        UnknownMemory: There is and was none by that id.
    """
    versions = yield from backing.versions(namespace, key)
    if not versions:
        raise unknown(namespace, key)
    notes = [put for version in versions for put in burials(version, "forgotten")]
    notes = list({(put.namespace, put.key): put for put in notes}.values())
    noted = yield from _noted(backing, notes)
    receipt = yield from _erased(backing, namespace, key)
    place = (RESERVED, QUARANTINE, *namespace)
    texts = {version.text for version in versions}
    texts.update(former.text for version in versions for former in version.formerly)
    for entry in (yield from _entries(backing, place, key, texts)):
        receipt = _added(receipt, (yield from _erased(backing, place, entry)))
    if not noted and not (yield from _noted(backing, notes)):
        _LOG.warning("%r in %r is forgotten; %s", key, namespace, UNNOTED)
    return receipt


def _noted(backing: Backing, notes: list[PutItem]) -> Steps[bool]:
    """Write notes, if the store has room for them: to forget needs none."""
    try:
        yield from backing.written(notes)
    except LimitExceeded:
        return False
    return True


def _entries(backing: Backing, place: Namespace, key: str, texts: set[str]) -> Steps[list[str]]:
    """What is, or was, in quarantine for a memory or in its words."""
    store: Any = backing.store
    if isinstance(store, Forgets):
        meant = {"$or": [{"key": key}, {"text": {"$in": sorted(texts)}}]}
        plan: Receipt = yield Step(
            lambda: store.forget(place, filter=meant, dry_run=True),
            lambda: store.aforget(place, filter=meant, dry_run=True),
        )
        return [entry for where, entry in plan.keys if where == place]
    waiting: list[Memory] = []
    while page := (yield from listing(backing, place, _PAGE, len(waiting), {})):
        waiting += page
    return [each.key for each in waiting if each.value.get("key") == key or each.text in texts]


def _erased(backing: Backing, namespace: Namespace, key: str) -> Steps[Receipt]:
    store: Any = backing.store
    if isinstance(store, Forgets):
        receipt: Receipt = yield Step(
            lambda: store.forget(namespace, key=key), lambda: store.aforget(namespace, key=key)
        )
        return receipt
    yield from backing.written([removal_of(namespace, key)])
    return Receipt(1, 0, 0, ((namespace, key),), (), (), datetime.now(UTC), clean=False)


def _added(one: Receipt, other: Receipt) -> Receipt:
    return replace(
        one,
        items=one.items + other.items,
        versions=one.versions + other.versions,
        keys=(*one.keys, *other.keys),
        hashes=tuple(sorted({*one.hashes, *other.hashes})),
        clean=one.clean and other.clean,
    )


def unknown(namespace: Namespace, key: str) -> UnknownMemory:
    """The error that says where there is no such memory, and where ids come from."""
    return UnknownMemory(
        f"no memory {key!r} in {namespace!r}; search() and list() tell the ids that there are"
    )

"""Tombstones: notes that a text was deleted or forgotten, so that it is not extracted again.

A tombstone is kept under a hash of the text. For a turn, which is still in its thread, the message
is noted as well.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Final, Literal

from langgraph.store.base import GetOp

from perdure.memory.effects import Effects
from perdure.memory.records import TURN, Memory
from perdure.memory.sameness import digest
from perdure.memory.store_adapter import TOMBSTONES, StoreAdapter, note_of, notes_of
from perdure.stores.base import Namespace, Provenance, PutItem

How = Literal["deleted", "forgotten"]
"""`"deleted"` if the memory's past is kept, else `"forgotten"`."""
_PAGE: Final = 1_000  # notes read at once; fewer are read whole


def tombstones_of(memory: Memory, how: How) -> list[PutItem]:
    """Tombstones of a memory's text, of its previous texts and, for a turn, of its message.

    Call this with each version whose text is not among `previous`.
    """
    source = memory.provenance
    keys = [digest(text) for text in (memory.text, *(each.text for each in memory.previous))]
    keys += sources(source) if memory.kind == TURN else []
    ids = source.message_ids if source else ()
    return [note_on(memory.namespace, key, how, ids) for key in dict.fromkeys(keys)]


def sources(provenance: Provenance | None) -> list[str]:
    """The keys of the tombstones of the messages that something comes from."""
    if provenance is None:
        return []
    names = [f"{provenance.thread_id or ''}\0{each}" for each in provenance.message_ids]
    marks = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16) for name in names]
    return [f"source:{mark.hexdigest()}" for mark in marks]


def entombed(
    adapter: StoreAdapter, namespace: Namespace, digests: Collection[str]
) -> Effects[set[str]]:
    """Which keys of texts and messages have a tombstone, in one or two reads of the store."""
    place = notes_of(TOMBSTONES, namespace)
    if not digests:
        return set()
    notes = yield from adapter.found(place, limit=_PAGE)
    if len(notes) == _PAGE:
        items = yield adapter.call("batch", [GetOp(place, key) for key in dict.fromkeys(digests)])
        return {item.key for item in items if item is not None}
    return {note.key for note in notes if note.namespace == place}.intersection(digests)


def note_on(namespace: Namespace, key: str, how: How, message_ids: Collection[str] = ()) -> PutItem:
    """The tombstone under a key: the digest of a text, or one of `sources`."""
    at = datetime.now(UTC).isoformat()
    value = {"change": how, "at": at, "message_ids": list(message_ids)}
    return note_of(notes_of(TOMBSTONES, namespace), key, value)

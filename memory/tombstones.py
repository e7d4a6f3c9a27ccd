"""Tombstones: notes that a text was deleted or forgotten, so that it is not extracted again.

A tombstone is kept under a hash of the text and holds no word of it. For a turn the message is
noted as well, since it is still in its thread.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Final, Literal

from langgraph.store.base import GetOp

from perdure.memory.effects import Effect, Effects
from perdure.memory.records import TURN, Memory
from perdure.memory.sameness import digest
from perdure.memory.store_adapter import BURIED, StoreAdapter, note_of, notes_of
from perdure.stores.base import Namespace, Provenance, PutItem

How = Literal["deleted", "forgotten"]
_PAGE: Final = 1_000  # notes read at once; fewer are read whole


def tombstones_of(memory: Memory, how: How, *, at: datetime | None = None) -> list[PutItem]:
    """Tombstones of a memory's text, of its previous texts and, for a turn, of its message.

    Call this with each version whose text is not among `previous`. `how` is `"deleted"` if the
    memory's past is kept, else `"forgotten"`; `at` is None for now.
    """
    source = memory.provenance
    keys = [digest(text) for text in (memory.text, *(each.text for each in memory.previous))]
    keys += sources(source) if memory.kind == TURN else []
    ids = list(source.message_ids) if source else []
    return [_note(memory.namespace, key, how, ids, at) for key in dict.fromkeys(keys)]


def tombstone(namespace: Namespace, text: str, how: How) -> PutItem:
    """The tombstone of a text that was no memory yet."""
    return _note(namespace, digest(text), how, [], None)


def sources(provenance: Provenance | None) -> list[str]:
    """The keys of the tombstones of the messages that something comes from."""
    if provenance is None:
        return []
    thread = provenance.thread_id or ""
    names = [f"{thread}\0{each}" for each in provenance.message_ids]
    marks = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16) for name in names]
    return [f"source:{mark.hexdigest()}" for mark in marks]


def entombed(
    adapter: StoreAdapter, namespace: Namespace, digests: Collection[str]
) -> Effects[set[str]]:
    """Which keys of texts and messages have a tombstone, in one or two reads of the store."""
    place = notes_of(BURIED, namespace)
    wanted = list(dict.fromkeys(digests))
    if not wanted:
        return set()
    page = yield from adapter.found(place, limit=_PAGE)
    if len(page) < _PAGE:
        return {note.key for note in page if note.namespace == place}.intersection(wanted)
    ops, store = [GetOp(place, key) for key in wanted], adapter.store
    notes = yield Effect(lambda: store.batch(ops), lambda: store.abatch(ops))
    return {note.key for note in notes if note is not None}


def _note(namespace: Namespace, key: str, how: How, ids: list[str], at: datetime | None) -> PutItem:
    value = {"change": how, "at": (at or datetime.now(UTC)).isoformat(), "message_ids": ids}
    return note_of(notes_of(BURIED, namespace), key, value)

"""Tombstones: notes that something was deleted or forgotten, so that it is not formed again.

A note is kept under a hash of the text and holds no word of it. Of a turn, the message is noted as
well: it is still in its thread, from which it would be formed once more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, Literal

from langgraph.store.base import GetOp

from perdure.memory.effects import Effect, Effects
from perdure.memory.likeness import digest
from perdure.memory.records import TURN, Memory
from perdure.memory.store_adapter import BURIED, StoreAdapter, note_of, notes_of
from perdure.stores.base import Namespace, Provenance, PutItem

How = Literal["deleted", "forgotten"]
_PAGE: Final = 1_000  # notes read at once; who has fewer is read whole


def tombstones_of(memory: Memory, how: How, *, at: datetime | None = None) -> list[PutItem]:
    """Notes that a memory is gone: of what it says, what it said before and, of a turn, its source.

    Args:
        memory: As it was. Versions of it that its `previous` does not tell have notes of their own,
            if this is called with each of them.
        how: Whether its past is kept.
        at: When (UTC); None: now.
    """
    source = memory.provenance
    ids = list(source.message_ids) if source else []
    when = (at or datetime.now(UTC)).isoformat()
    texts = [memory.text, *(former.text for former in memory.previous)]
    keys = dict.fromkeys(digest(text) for text in texts)
    if memory.kind == TURN:
        keys.update(dict.fromkeys(sources(source)))
    value = {"change": how, "at": when, "message_ids": ids}
    return [_note(memory.namespace, key, value) for key in keys]


def tombstone(namespace: Namespace, text: str, how: How) -> PutItem:
    """The note that a text is gone which was no memory yet."""
    value = {"change": how, "at": datetime.now(UTC).isoformat(), "message_ids": []}
    return _note(namespace, digest(text), value)


def sources(provenance: Provenance | None) -> list[str]:
    """The keys under which the messages that something comes from are buried."""
    if provenance is None:
        return []
    return [_source(provenance.thread_id, each) for each in provenance.message_ids]


def newest_tombstone(adapter: StoreAdapter, namespace: Namespace) -> Effects[Any]:
    """What changes whenever something is buried; it equals nothing where nobody can tell."""
    if not adapter.versioned:
        return object()
    page = yield from adapter.found(notes_of(BURIED, namespace), limit=_PAGE)
    return [(note.key, note.valid_from) for note in page] if len(page) < _PAGE else object()


def entombed(
    adapter: StoreAdapter, namespace: Namespace, digests: Collection[str]
) -> Effects[set[str]]:
    """Which of these texts and sources are buried, each given by the key of its note.

    However many are asked for, the store is read once or twice.
    """
    place = notes_of(BURIED, namespace)
    wanted = list(dict.fromkeys(digests))
    if not wanted:
        return set()
    page = yield from adapter.found(place, limit=_PAGE)
    if len(page) < _PAGE:
        there = {note.key for note in page if note.namespace == place}
        return there.intersection(wanted)
    ops = [GetOp(place, key) for key in wanted]
    store: Any = adapter.store
    notes: Sequence[Any] = yield Effect(lambda: store.batch(ops), lambda: store.abatch(ops))
    return {note.key for note in notes if note is not None}


def _note(namespace: Namespace, key: str, value: dict[str, Any]) -> PutItem:
    return note_of(notes_of(BURIED, namespace), key, value)


def _source(thread_id: str | None, message_id: str) -> str:
    said = f"{thread_id or ''}\0{message_id}".encode("utf-8", "surrogatepass")
    return f"source:{blake2b(said, digest_size=16).hexdigest()}"

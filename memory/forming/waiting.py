"""Threads that wait for memories to be formed of them: noted in the store, so that none is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from perdure.memory.effects import Effects
from perdure.memory.records import Memory
from perdure.memory.store_adapter import WAITING, StoreAdapter, note_of, notes_of
from perdure.stores.base import Namespace, PutItem

_PAGE: Final = 200


@dataclass(frozen=True, slots=True)
class Waiting:
    """A thread that waits.

    Attributes:
        namespace: Where its memories will be kept.
        thread_id: The thread.
        configurable: What of its run's config fills in the namespace.
        since: Since when it waits (UTC).
        at: When something was said on it last (UTC).
        version: Of the note; None: the store has no versions.
    """

    namespace: Namespace
    thread_id: str
    configurable: Mapping[str, str]
    since: datetime
    at: datetime
    version: int | None = None

    @property
    def stamp(self) -> tuple[int | None, datetime]:
        """What changes whenever the note is touched."""
        return self.version, self.at


def place_of(namespace: Namespace) -> Namespace:
    """Where the notes on the waiting threads of a namespace are."""
    return notes_of(WAITING, namespace)


def noting(
    adapter: StoreAdapter,
    namespace: Namespace,
    thread_id: str,
    configurable: Mapping[str, str],
    beside: Sequence[PutItem] = (),
) -> Effects[Waiting]:
    """Note that a thread waits; since when, is kept of a note that is there.

    Args:
        adapter: The store.
        namespace: Of the thread's memories.
        thread_id: The thread.
        configurable: What fills in the namespace.
        beside: What is written with it.

    Raises:
        VersionConflict: What is written with it is overtaken; nothing is written.
    """
    now = datetime.now(UTC)
    former = yield from waiting_of(adapter, namespace, thread_id)
    since = now if former is None else former.since
    value = {
        "configurable": dict(configurable),
        "since": since.isoformat(),
        "at": now.isoformat(),
    }
    yield from adapter.written([note_of(place_of(namespace), thread_id, value), *beside])
    return Waiting(namespace, thread_id, dict(configurable), since, now)


def waiting_of(
    adapter: StoreAdapter, namespace: Namespace, thread_id: str
) -> Effects[Waiting | None]:
    """The note on a thread; None: it does not wait."""
    note = yield from adapter.got(place_of(namespace), thread_id)
    return None if note is None else _read(note)


def waiting_under(adapter: StoreAdapter, prefix: Namespace = ()) -> Effects[list[Waiting]]:
    """All threads that wait whose memories belong under a prefix, the longest wait first."""
    found: dict[tuple[Namespace, str], Waiting] = {}
    offset = 0
    while True:
        notes = yield from adapter.found(place_of(prefix), limit=_PAGE, offset=offset)
        for note in notes:  # one that was touched meanwhile may come twice
            found[note.namespace, note.key] = _read(note)
        if len(notes) < _PAGE:
            return sorted(found.values(), key=lambda each: each.since)
        offset += _PAGE


def _read(note: Memory) -> Waiting:
    value: Mapping[str, Any] = note.value
    return Waiting(
        note.namespace[2:],
        note.key,
        value["configurable"],
        datetime.fromisoformat(value["since"]),
        datetime.fromisoformat(value["at"]),
        note.version,
    )

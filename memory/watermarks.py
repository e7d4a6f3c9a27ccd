"""Watermarks: up to which message an extractor has read a thread, as notes in the store.

They name the newest messages by id, so they hold for trimmed, edited and forked threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from langgraph.store.base import GetOp, Item

from perdure.memory.store_adapter import WATERMARKS, StoreAdapter, note_of, notes_of
from perdure.memory.thread_messages import ThreadHistory, ThreadMessage
from perdure.stores.base import Namespace, PutItem

TURNS: Final = "turns"
"""The extractor whose watermarks have the id of their thread as key; see `_key`."""
_KNOWN: Final = 50  # messages that a watermark names
_PLACE: Final = ("known", "count", "next", "checkpoint_id")
_FAILURE: Final = ("attempts", "failed_head", "error", "final")


class Known(NamedTuple):
    """A message that was read: its id, its place in the thread, and a digest of its text."""

    id: str
    position: int
    digest: str


@dataclass(frozen=True, slots=True)
class Watermark:
    """Up to which message an extractor has read a thread, and how often it failed since."""

    extractor: str = TURNS
    known: tuple[Known, ...] = ()  # the newest messages that were read, by position
    count: int = 0  # messages that were read in all
    next: int = 0  # the position of the next message
    checkpoint_id: str | None = None  # the head when all was read; with another, the thread is due
    version: int | None = None  # of the note; 0: there is none; None: the store has no versions
    attempts: int = 0  # extractions that failed in a row
    failed_at: datetime | None = None  # when the last of them failed (UTC)
    failed_head: str | None = None  # the head of the thread then
    error: str = ""
    final: bool = False  # whether trying again cannot help

    @property
    def ids(self) -> frozenset[str]:
        """The ids of the known messages."""
        return frozenset(each.id for each in self.known)

    def beyond(self, history: ThreadHistory) -> list[ThreadMessage]:
        """The messages that are not yet read, or were edited since, with their positions.

        If more were read than are known, only messages after the oldest known one count as unread;
        if no known message is left, as after a fork far back, all do.
        """
        known = {each.id: each for each in self.known}
        messages = self.placed(history.messages)
        first = next((i for i, each in enumerate(messages) if each.id in known), None)
        if first is None or self.count == len(self.known):
            first = 0
        return [each for each in messages[first:] if _is_new(each, known.get(each.id))]

    def placed(self, messages: Sequence[ThreadMessage]) -> list[ThreadMessage]:
        """Messages with positions, which go up after the known messages, and down before them.

        One between two known ones has the position of the one before: the store orders by age then.
        """
        known = {each.id: each.position for each in self.known}
        there = [i for i, each in enumerate(messages) if each.id in known]
        first, last = (there[0], there[-1]) if there else (0, -1)
        placed: list[ThreadMessage] = []
        before, following = known[messages[first].id] - first - 1 if there else 0, self.next
        for number, each in enumerate(messages):
            if each.id in known:
                before = known[each.id]
            elif number < first:
                before += 1
            elif number > last:
                before, following = following, following + 1
            placed.append(replace(each, position=before))
        return placed

    def advanced(self, messages: Sequence[ThreadMessage], checkpoint_id: str | None) -> Watermark:
        """The watermark after these messages, which have positions, were read."""
        known = {each.id: each for each in self.known}
        fresh = {each.id: Known(each.id, each.position or 0, each.digest) for each in messages}
        newest = sorted({**known, **fresh}.values(), key=lambda each: each.position)[-_KNOWN:]
        count = self.count + len(fresh.keys() - known.keys())
        following = max([self.next, *(each.position + 1 for each in fresh.values())])
        place = (tuple(newest), count, following, checkpoint_id)
        return Watermark(self.extractor, *place, self.version)

    def with_failure(
        self, error: str, at: datetime, head: str | None, *, final: bool = False
    ) -> Watermark:
        """The watermark after an extraction failed, with the head of the thread at that moment."""
        attempts = self.attempts + 1 if self.failed_head == head else 1
        failed = replace(self, attempts=attempts, failed_at=at, failed_head=head)
        return replace(failed, error=error, final=final)

    def set_back(self) -> Watermark:
        """The watermark of a thread that is to be read again; positions continue."""
        return replace(self, known=(), count=0, checkpoint_id=None)

    def same_as(self, other: Watermark) -> bool:
        """Whether the same messages were read, whatever the version of the note."""
        return (self.count, self.known) == (other.count, other.known)

    def put(self, namespace: Namespace, thread_id: str) -> PutItem:
        """The operation that writes it, if the note is as it was read."""
        names = [*_PLACE, *(_FAILURE if self.attempts else ())]
        value: dict[str, Any] = {"extractor": self.extractor, "thread_id": thread_id}
        value |= {name: getattr(self, name) for name in names}
        value["known"] = [list(each) for each in self.known]
        if self.attempts and self.failed_at:
            value["failed_at"] = self.failed_at.isoformat()
        if not self.final:
            value.pop("final", None)
        place, key = notes_of(WATERMARKS, namespace), _key(self.extractor, thread_id)
        return note_of(place, key, value, if_version=self.version)


async def watermark(
    adapter: StoreAdapter, namespace: Namespace, thread_id: str, extractor: str = TURNS
) -> Watermark:
    """Read the watermark of a thread; an empty one if the extractor has read nothing of it."""
    [mark] = await watermarks(adapter, [(namespace, thread_id)], extractor)
    return mark


async def watermarks(
    adapter: StoreAdapter, places: Sequence[tuple[Namespace, str]], extractor: str = TURNS
) -> list[Watermark]:
    """Read the watermarks of threads, given with the namespaces of their memories."""
    if not places:
        return []
    ops = [GetOp(notes_of(WATERMARKS, space), _key(extractor, thread)) for space, thread in places]
    empty = Watermark(extractor, version=0 if adapter.versioned else None)
    return [_read(empty, note) for note in (await adapter.call("batch", ops))]


def settled(note: Item) -> PutItem:
    """The operation that takes a failure off a note: nothing is due until the thread goes on.

    The messages that were not read are read then.
    """
    failure = (*_FAILURE, "failed_at")
    value = {name: part for name, part in note.value.items() if name not in failure}
    value["checkpoint_id"] = note.value.get("failed_head")
    namespace, version = tuple(note.namespace), getattr(note, "version", None)
    return note_of(namespace, note.key, value, if_version=version)


def _read(empty: Watermark, note: Item | None) -> Watermark:
    if note is None:
        return empty
    value, names = note.value, [*_PLACE, *_FAILURE]
    fields: dict[str, Any] = {name: value[name] for name in names if name in value}
    fields["known"] = tuple(Known(*each) for each in value["known"])
    if value.get("failed_at"):
        fields["failed_at"] = datetime.fromisoformat(value["failed_at"])
    return replace(empty, **fields, version=getattr(note, "version", None))


def _key(extractor: str, thread_id: str) -> str:
    if extractor == TURNS:
        return thread_id
    named = f"{extractor}\0{thread_id}".encode("utf-8", "surrogatepass")
    return f"extractor-{blake2b(named, digest_size=16).hexdigest()}"


def _is_new(message: ThreadMessage, known: Known | None) -> bool:
    # a message that a node shortened to save room is not new
    return known is None or (known.digest != message.digest and not message.shortened)

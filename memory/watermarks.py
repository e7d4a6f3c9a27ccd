"""Watermarks: up to where memories were formed of a thread, and what came of it last.

A watermark is a note in the store beside the memories, written in the transaction that writes
them. It names the newest messages by id, so that it holds for what was trimmed, edited or forked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from langgraph.store.base import GetOp, Item

from perdure.memory.effects import Effect, Effects
from perdure.memory.records import Outcome
from perdure.memory.store_adapter import FORMED, StoreAdapter, note_of, notes_of
from perdure.memory.thread_messages import ThreadHistory, ThreadMessage
from perdure.stores.base import Namespace, PutItem

_KNOWN: Final = 50  # messages it names
_REFUSALS: Final = 20  # it keeps, the newest


class Known(NamedTuple):
    """A message that was formed from: its id, its place, and a digest of what it said."""

    id: str
    position: int
    digest: str


@dataclass(frozen=True, slots=True)
class Watermark:
    """Up to where memories were formed of a thread.

    Attributes:
        known: The newest messages that were formed from, by position.
        count: How many there were in all.
        next: The position that the next message has, where the checkpointer counts none.
        checkpoint_id: The checkpoint at which the last was read.
        version: Of the note, to swap it by; 0: there is none; None: the store has no versions.
        report: The last report.
        refusals: What was refused lately, newest last, without what it said.
    """

    known: tuple[Known, ...] = ()
    count: int = 0
    next: int = 0
    checkpoint_id: str | None = None
    version: int | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    refusals: tuple[Mapping[str, str], ...] = ()
    attempts: int = 0
    failed_at: datetime | None = None
    failed_head: str | None = None
    error: str = ""

    def with_failure(self, error: str, at: datetime, head: str | None) -> Watermark:
        """TEMP."""
        return replace(
            self, attempts=self.attempts + 1, error=error, failed_at=at, failed_head=head
        )

    @property
    def ids(self) -> frozenset[str]:
        """The ids of the known messages."""
        return frozenset(each.id for each in self.known)

    def beyond(self, said: ThreadHistory) -> list[ThreadMessage] | None:
        """The messages that memories are to be formed of, with their positions.

        They are those after the oldest known one that are not known, and those that were edited
        since. None: none is known, though some were formed from; then the memories tell.
        """
        known = {each.id: each for each in self.known}
        first = next((i for i, each in enumerate(said.messages) if each.id in known), None)
        if first is None:
            return None if self.count else self.placed(said.messages)
        return self.placed([s for s in said.messages[first:] if _is_new(s, known.get(s.id))])

    def placed(self, messages: Sequence[ThreadMessage]) -> list[ThreadMessage]:
        """Messages with positions: the checkpointer's, or those known, or the next ones."""
        known = {each.id: each.position for each in self.known}
        placed, position = [], self.next
        for each in messages:
            own = known.get(each.id) if each.position is None else each.position
            if own is None:
                own, position = position, position + 1
            placed.append(replace(each, position=own))
        return placed

    def advanced(
        self,
        messages: Sequence[ThreadMessage],
        checkpoint_id: str | None,
        outcomes: Sequence[Outcome],
    ) -> Watermark:
        """The watermark once memories are formed of these messages, placed as they are."""
        former = {each.id: each for each in self.known}
        fresh = {s.id: Known(s.id, s.position or 0, s.digest) for s in messages}
        known = sorted({**former, **fresh}.values(), key=lambda each: each.position)
        noted = [noted_of(each) for each in outcomes if each.change == "refused"]
        return replace(
            self,
            known=tuple(known[-_KNOWN:]),
            count=self.count + len(fresh.keys() - former.keys()),
            next=max([self.next, *(each.position + 1 for each in fresh.values())]),
            checkpoint_id=checkpoint_id,
            refusals=(*self.refusals, *noted)[-_REFUSALS:],
        )

    def set_back(self, formed: int) -> Watermark:
        """The watermark of a thread of which everything is to be formed again.

        Args:
            formed: How many of its messages were formed from, of those that can still be read.
        """
        return replace(self, known=(), count=0, next=max(0, self.next - formed))

    def same_as(self, other: Watermark) -> bool:
        """Whether the same messages were formed from, whatever the version of the note."""
        return (self.count, self.known) == (other.count, other.known)

    def put(self, namespace: Namespace, thread_id: str) -> PutItem:
        """The operation that writes it, in the place of what it was made of and of no other."""
        value = {
            "known": [list(each) for each in self.known],
            "count": self.count,
            "next": self.next,
            "checkpoint_id": self.checkpoint_id,
            "report": self.report,
            "refusals": list(self.refusals),
            "attempts": self.attempts,
            "failed_at": self.failed_at.isoformat() if self.failed_at else None,
            "failed_head": self.failed_head,
            "error": self.error,
        }
        place = notes_of(FORMED, namespace)
        return note_of(place, thread_id, value, if_version=self.version)


def watermark(
    adapter: StoreAdapter, namespace: Namespace, thread_id: str, name: str = ""
) -> Effects[Watermark]:
    """Read the watermark of a thread; an empty one if nothing was formed of it yet."""
    [mark] = yield from watermarks(adapter, [(namespace, thread_id)])
    return mark


def watermarks(
    adapter: StoreAdapter, places: Sequence[tuple[Namespace, str]], name: str = ""
) -> Effects[list[Watermark]]:
    """Read the watermarks of threads, given with the namespaces of their memories."""
    ops = [GetOp(notes_of(FORMED, namespace), thread_id) for namespace, thread_id in places]
    store = adapter.store
    notes = (yield Effect(lambda: store.batch(ops), lambda: store.abatch(ops))) if ops else []
    nothing = Watermark(version=0 if adapter.versioned else None)
    return [nothing if note is None else _read(note) for note in notes]


def _read(note: Item) -> Watermark:
    value = note.value
    return Watermark(
        tuple(Known(*each) for each in value["known"]),
        value["count"],
        value["next"],
        value["checkpoint_id"],
        getattr(note, "version", None),
        value["report"],
        tuple(value["refusals"]),
        value.get("attempts", 0),
        datetime.fromisoformat(value["failed_at"]) if value.get("failed_at") else None,
        value.get("failed_head"),
        value.get("error", ""),
    )


def noted_of(outcome: Outcome) -> dict[str, str]:
    """What is noted of a refusal: never what was to be kept, which may be a secret."""
    noted = {"key": outcome.key or "", "reason": outcome.reason, "check": outcome.check}
    return {name: text for name, text in noted.items() if text}


def _is_new(spoken: ThreadMessage, known: Known | None) -> bool:
    # what a node shortened to save room says nothing new
    return known is None or (known.digest != spoken.digest and not spoken.shortened)

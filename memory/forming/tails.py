"""The ends of threads of which no memories were formed yet, as the memories they will be.

So what was just said on another thread can be recalled while it waits. Only what is not yet formed
is read, the newest of it, and what was made of a thread is kept until the thread changes.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.errors import ConfigurationError, UnknownThread
from perdure.memory import thread_reader as reading
from perdure.memory.admission import admit
from perdure.memory.effects import Effects, in_thread
from perdure.memory.extraction import Extraction
from perdure.memory.forming.planning import FLOOD
from perdure.memory.forming.waiting import Waiting, waiting_under
from perdure.memory.options import whole
from perdure.memory.proposals import Addition, Batch, Scope
from perdure.memory.records import Memory
from perdure.memory.store_adapter import BURIED, StoreAdapter, notes_of
from perdure.memory.thread_messages import ThreadMessage
from perdure.memory.turns import TurnExtractor
from perdure.memory.watermarks import Watermark, watermarks
from perdure.stores.base import Namespace

_LOG = logging.getLogger("perdure")
_THREADS: Final = 8
_MESSAGES: Final = 200
_PIECES: Final = 3  # of a long message, its first: the rest is found once it is formed
_REMEMBERED: Final = 5_000  # verdicts, about
_FAULTS: Final = 1_000  # threads of which it is remembered why they cannot be read

_Place = tuple[Namespace, str]
_Name = tuple[str, str, tuple[str, ...]]
_Values = Mapping[_Name, Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class _Thread:
    """A thread that waits, and what changes whenever its end does."""

    note: Waiting
    mark: Watermark
    state: Any
    grave: Any

    @property
    def place(self) -> _Place:
        return self.note.namespace, self.note.thread_id

    @property
    def stamp(self) -> Any:
        """None: nobody can tell."""
        if self.state is None:
            return None
        mark = self.mark
        return self.state, self.note.at, self.grave, mark.version, mark.count, mark.known


@dataclass(frozen=True, slots=True)
class _Tail:
    """What was made of a thread.

    Attributes:
        memories: Oldest first.
        stamp: Of the thread as it was then; None: it is to be made again.
        room: How many there might have been.
        whole: Whether there are no more.
        values: What the gate made of each turn, where that stays so; None: nothing.
        grave: What was deleted last by then.
    """

    memories: Sequence[Memory] = ()
    stamp: Any = None
    room: int = 0
    whole: bool = False
    values: _Values = field(default_factory=dict)
    grave: Any = None

    def holds(self, thread: _Thread, room: int) -> bool:
        """Whether it is still what would be made."""
        current = self.stamp is not None and self.stamp == thread.stamp
        return current and (self.whole or self.room >= room)


class Tails:
    """What was said on threads that wait for memories to be formed of them.

    A thread that cannot be read gives nothing, and the log says so, once.

    Args:
        extraction: What will form them.
        threads: How many threads are looked at, those where something was said last.
        messages: How many messages of them together, the newest; of a long one its beginning.

    Raises:
        ConfigurationError: A number is none that it can be.
    """

    def __init__(
        self, extraction: Extraction, *, threads: int = _THREADS, messages: int = _MESSAGES
    ) -> None:
        self.extraction, self._turns = extraction, TurnExtractor(max_pieces=_PIECES)
        self.threads, self.messages = whole("threads", threads, 1), whole("messages", messages, 1)
        self._made = _Made()

    def waiting(
        self, namespaces: Sequence[Namespace], config: RunnableConfig | None = None
    ) -> Effects[list[Memory]]:
        """Memories of turns that are in no store yet, oldest first.

        Args:
            namespaces: Prefixes of those that they will belong to.
            config: Of the run, whose own thread is left out: it is shown anyway.

        Raises:
            ConfigurationError: The extraction cannot form as it is set up.
            StorageError: The store cannot be read.
        """
        memories: list[Memory] = []
        for thread in (yield from self._threads(namespaces, config)):
            room = self.messages - len(memories)
            if room > 0:
                tail = yield from self._tail(thread, config, room)
                memories = [*tail.memories[-room:], *memories]
        return memories

    def _threads(
        self, namespaces: Sequence[Namespace], config: RunnableConfig | None
    ) -> Effects[list[_Thread]]:
        """The threads that are looked at, the newest first."""
        adapter = self.extraction.adapter()
        own = ensure_config(config)["configurable"].get("thread_id")
        found: dict[_Place, Waiting] = {}
        for prefix in namespaces:
            notes = yield from waiting_under(adapter, prefix)
            found |= {(n.namespace, n.thread_id): n for n in notes if n.thread_id != str(own)}
        newest = sorted(found.values(), key=lambda note: note.at, reverse=True)[: self.threads]
        marks = yield from watermarks(adapter, [(n.namespace, n.thread_id) for n in newest])
        # before the threads are read: what is said after that makes them others
        ids = [note.thread_id for note in newest]
        states = yield from reading.states(self.extraction.saver, ids)
        graves = {}
        for place in {
            note.namespace for note in newest
        }:  # what is deleted meanwhile must not come back
            graves[place] = yield from newest_tombstone(adapter, place)
        return [
            _Thread(note, mark, state, graves[note.namespace])
            for note, mark, state in zip(newest, marks, states, strict=True)
        ]

    def _tail(self, thread: _Thread, config: RunnableConfig | None, room: int) -> Effects[_Tail]:
        former = self._made.of(thread.place)
        if former.holds(thread, room):
            return former
        around = Scope(self.extraction.adapter(), thread.note.namespace, config)
        known = former.values if former.grave == thread.grave else {}
        try:
            tail = yield from in_thread(self._making(thread, around, room, known))
        except ConfigurationError:  # it would fail of any thread
            raise
        except UnknownThread:  # it was deleted while it waited
            return _Tail()
        except Exception as exc:
            if self._made.fails(thread.place, f"{type(exc).__name__}: {exc}"):
                _LOG.warning(
                    "nothing is recalled of thread %r, which waits for its memories to be formed: "
                    "%s: %s",
                    thread.note.thread_id,
                    type(exc).__name__,
                    exc,
                )
            return _Tail()
        self._made.keep(thread.place, tail)
        return tail

    def _making(self, thread: _Thread, around: Scope, room: int, known: _Values) -> Effects[_Tail]:
        note = thread.note
        glimpse = yield from reading.glancing(
            self.extraction.saver, note.thread_id, self.extraction.messages_key, room
        )
        new = yield from self._unformed(thread, glimpse, around)
        # when exactly each was said would take a look at all checkpoints since
        timed = [s if s.at is not None else replace(s, at=note.at) for s in new[-room:]]
        batch = Batch(note.thread_id, glimpse.said.checkpoint_id, timed, shown=glimpse.shown)
        additions = self._turns.formed(batch).additions
        whole = glimpse.whole and len(new) <= room and len(additions) <= room
        additions = additions[-room:]
        values = yield from self._judged(additions, around, known)
        memories = [
            _unkept(around.namespace, each, value)
            for each in additions
            if (value := values.get(_name(each))) is not None
        ]
        settled = all(_name(each) in values for each in additions)
        stamp = thread.stamp if settled else None
        return _Tail(memories, stamp, room, whole, values, thread.grave)

    def _unformed(
        self, thread: _Thread, glimpse: reading.Glimpse, around: Scope
    ) -> Effects[list[ThreadMessage]]:
        extraction, mark, said = self.extraction, thread.mark, glimpse.said
        if not glimpse.whole and mark.count and mark.beyond(said) is None:
            last = max(each.position for each in mark.known)
            if any((each.position or 0) <= last for each in said.messages):
                # the thread was forked far back: where, only all of it tells
                said = yield from reading.reading(
                    extraction.saver, said.thread_id, extraction.messages_key, None
                )
            else:
                mark = replace(mark, count=0)
        return (yield from extraction.unformed(mark, said, around))

    def _judged(
        self, additions: Sequence[Addition], around: Scope, known: _Values
    ) -> Effects[_Values]:
        """What the gate will keep of each, as it will be kept; but for what it has no room for."""
        values = {name: known[name] for each in additions if (name := _name(each)) in known}
        fresh = [each for each in additions if _name(each) not in values]
        if not fresh:
            return values
        kept = yield from admit(
            self.extraction.gate,
            around.adapter,
            around.namespace,
            [each.candidate for each in fresh],
            [each.key for each in fresh],
        )
        own = {put.key: put.value for put in kept.puts if put.namespace == around.namespace}
        return values | {
            _name(each): own.get(each.key)
            for each, outcome in zip(fresh, kept.outcomes, strict=True)
            if outcome.check != FLOOD
        }


def newest_tombstone(adapter: StoreAdapter, namespace: Namespace) -> Effects[Any]:
    """What changes whenever something is deleted; it equals nothing where nobody can tell."""
    page = yield from adapter.found(notes_of(BURIED, namespace), limit=1_000)
    whole = adapter.versioned and len(page) < 1_000
    return [(note.key, note.valid_from) for note in page] if whole else object()


class _Made:
    """What was made of threads lately, and which cannot be read; for any number of callers."""

    def __init__(self) -> None:
        self._tails: OrderedDict[_Place, _Tail] = OrderedDict()
        self._faults: OrderedDict[_Place, str] = OrderedDict()
        self._verdicts = 0
        self._lock = threading.Lock()

    def of(self, place: _Place) -> _Tail:
        """What was made of a thread last."""
        with self._lock:
            return self._tails.get(place, _Tail())

    def keep(self, place: _Place, tail: _Tail) -> None:
        """Keep what was made of a thread, and let go of the oldest."""
        with self._lock:
            self._faults.pop(place, None)
            former = self._tails.pop(place, None)
            self._verdicts -= len(former.values) if former is not None else 0
            self._tails[place] = tail
            self._verdicts += len(tail.values)
            while self._verdicts > _REMEMBERED and len(self._tails) > 1:
                _, oldest = self._tails.popitem(last=False)
                self._verdicts -= len(oldest.values)

    def fails(self, place: _Place, fault: str) -> bool:
        """Note why a thread cannot be read. Returns whether that is news."""
        with self._lock:
            known = self._faults.pop(place, None)
            self._faults[place] = fault
            if len(self._faults) > _FAULTS:
                self._faults.popitem(last=False)
            return known != fault


def _name(addition: Addition) -> _Name:
    """What the gate's verdict on a turn depends on."""
    return addition.key, addition.candidate.text, addition.candidate.shown


def _unkept(namespace: Namespace, addition: Addition, value: Mapping[str, Any]) -> Memory:
    source = addition.candidate.provenance
    at = source.at if source is not None else None
    text, kind = value["text"], value["kind"]
    return Memory(namespace, addition.key, text, kind, dict(value), source, valid_from=at)

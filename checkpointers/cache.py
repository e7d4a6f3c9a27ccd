"""The cache of a process: items and heads of threads, within a budget.

Never the source of truth. An item at a position never changes, so what is kept of it stays right
whoever writes; only a deletion makes it stale, and each deletion raises the thread's `generation`,
which every read compares. What is planned upon a kept head is stored only if the thread still has
the `stamp` that it had then: each transaction that changes a thread gives it another one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, starmap
from typing import Any, Final, NamedTuple

from perdure.checkpointers.manifest import ALIASES, DELTA, Ranges, count
from perdure.storage.flow import Row

_WEIGH_EVERY: Final = 64  # requests between two looks at how much is kept
_THREAD_OVERHEAD: Final = 10_000  # bytes of a thread with nothing in it and its heads
_RECENT: Final = 16  # namespaces whose heads, and checkpoints whose writes are kept, per thread
_MAX_OVERLAPPED: Final = 1024  # thread ids that are remembered because their overlap was logged
_PLACE: Final = 0xFFFFFFFF  # of a checkpoint's key: where in put order it is
_ITEM_OVERHEAD: Final = 300  # bytes that an item takes beside its own, about

UNREAD_STEP: Final = -1 << 31
Write = list[Any]  # [index, channel, reference]
Pending = tuple[str, list[Write], bytes]  # what a task wrote: path, writes, the row's body


class Title(NamedTuple):
    """What lists call a thread.

    Attributes:
        text: What the metadata says, else the first message of a human, cut to 80 characters.
        message: That message's id, perhaps `""`; None: it is from the metadata.
    """

    text: str
    message: str | None


NO_TITLE: Final = Title("", None)


class ChannelLog:
    """The part of a channel's log that is at hand.

    Attributes:
        items: By position, aliases apart.
        origins: The position that an alias repeats, by the alias's.
        ids: The ids of messages of a `DeltaChannel`, by position. Only ids that were needed before
            are present.
        times: The time at which items were first stored, by position. Only times that were needed
            before are present.
        next, next_alias: The positions of the next item and the next alias.
        planned: How many items are planned, and not committed yet.
    """

    __slots__ = (
        *("_index", "_indexed", "ids", "items", "key", "name", "next", "next_alias", "origins"),
        *("planned", "times"),
    )

    def __init__(self, key: int, name: str, kept: ChannelLog | None = None) -> None:
        """A log with the items that are at hand of the same one, `kept`."""
        self.key = key
        self.name = name
        self.planned = 0
        self._index: dict[bytes, int] = {}
        self._indexed = 0
        if kept is not None and not kept.planned:  # copy it first: another thread may add items
            self._indexed, self._index = kept._indexed, kept._index.copy()
        self.items: dict[int, bytes] = {} if kept is None else kept.items.copy()
        self.origins: dict[int, int] = {} if kept is None else kept.origins.copy()
        self.ids: dict[int, str | None] = {} if kept is None else kept.ids.copy()
        self.times: dict[int, datetime] = {} if kept is None else kept.times.copy()
        self.next, self.next_alias = 0, ALIASES

    @property
    def whole(self) -> bool:
        """Whether every item of the log is here, or is planned."""
        return len(self.items) + self.planned == self.next

    def has(self, start: int, stop: int) -> bool:
        """Whether every item of a range is here."""
        if start >= ALIASES:
            origins = [*map(self.origins.get, range(start, stop))]
            return all(map(self.items.__contains__, origins))
        return all(map(self.items.__contains__, range(start, stop)))

    def holds(self, start: int, stop: int, items: list[bytes]) -> bool:
        """Whether these are the items of a range."""
        at = self.items.get if start < ALIASES else self.get
        return list(map(at, range(start, stop))) == items

    def get(self, position: int) -> bytes | None:
        """The item at a position, if it is here."""
        return self.items.get(self.origin(position))

    def full(self, ranges: Ranges) -> list[bytes]:
        """The items of ranges that are all here."""
        places: Iterable[int] = chain.from_iterable(starmap(range, ranges))
        if any(start >= ALIASES for start, _ in ranges):
            places = map(self.origin, places)
        return list(map(self.items.__getitem__, places))

    def repeats_none(self, ranges: Ranges) -> bool:
        """Return whether no item occurs twice in the ranges, whose aliases must be cached."""
        first: set[int] = set()
        for start, stop in ranges:
            places = range(start, stop)
            first.update(map(self.origins.__getitem__, places) if start >= ALIASES else places)
        return len(first) == count(ranges)

    def find(self, item: bytes) -> int | None:
        """The position of an item, if it is here, or is planned."""
        if self._indexed != len(self.items):
            for position in list(self.items)[self._indexed :]:
                self._index.setdefault(self.items[position], position)
            self._indexed = len(self.items)
        return self._index.get(item)

    def add(self, position: int, item: bytes) -> int:
        """Have an item at hand. Returns how many bytes more that takes."""
        if position in self.items:
            return 0
        if self._indexed == len(self.items):  # else `find` does it
            self._index.setdefault(item, position)
            self._indexed += 1
        self.items[position] = item
        return len(item) + _ITEM_OVERHEAD

    def find_stored(self, item: bytes) -> int | None:
        """See `find`; what is only planned does not count."""
        position = self.find(item)
        if position is None or self.items.get(position) != item:
            return None
        return position

    def plan(self, item: bytes) -> int:
        """The position of an item to come; `find` has it from now on."""
        position = self.next
        self.next += 1
        self.planned += 1
        self._index.setdefault(item, position)
        return position

    def origin(self, position: int) -> int:
        """The first position of the item at a position."""
        return self.origins.get(position, position) if position >= ALIASES else position


@dataclass(slots=True)
class Snapshot:
    """A checkpoint's row, unpacked, with the ranges of its lists and dicts at hand.

    Attributes:
        uid, parent: Its id and its parent's; `key` is the row's.
        began: The place, in put order, of the checkpoint that began what this one continues.
        fields: As stored: what of the checkpoint has no attribute here, and the metadata.
        versions: Of the channels; `seen`: the versions seen, by node.
        refs: A reference for each channel that has a value.
        ranges: For channels split into a log: its key and ranges.
        said: The same, for what was said on the way here.
        step, labels: The step and the labels in the metadata, once they are read; see
            `labels.labels_in`.
        has_stopped: Whether a task of it is known to wait for an answer, or to have failed.
        run_began: When the run began that has put it, in seconds since 1970; None if no run has put
            it in this database. See `run_starts`.
    """

    uid: str
    key: int
    parent: str | None
    began: int
    fields: list[Any]
    versions: dict[str, Any]
    seen: dict[str, dict[str, Any]]
    refs: dict[str, Any] = field(default_factory=dict)
    ranges: dict[str, tuple[int, Ranges]] = field(default_factory=dict)
    said: dict[str, tuple[int, Ranges]] = field(default_factory=dict)
    step: int | None = UNREAD_STEP
    labels: dict[str, Any] | None = None
    has_stopped: bool = False
    run_began: float | None = None

    def holds(self, channel: str, version: Any) -> bool:
        """Whether it has a value of a channel, in this version."""
        return channel in self.refs and self.versions.get(channel) == version

    def stored_channels(self) -> frozenset[str]:
        """Return the channels whose values are stored and not replayed from writes."""
        return frozenset(channel for channel, ref in self.refs.items() if ref[0] != DELTA)

    def take(self, channel: str, parent: Snapshot) -> None:
        """Have a channel as the parent has it."""
        self.refs[channel] = parent.refs[channel]
        if channel in parent.ranges:
            self.ranges[channel] = parent.ranges[channel]


@dataclass(slots=True)
class Head:
    """The head of a namespace.

    Attributes:
        namespace: The key of its row; `pinned`: the place of the head, 0: the newest.
        snapshot: The checkpoint; None: there is none.
        writes: The rows `(uid, task, path, body)` of pending writes, by task, if they are known.
        epoch: As long as the database has this one, nobody else has changed any of it.
        flying: Whether it is planned, and not committed yet.
    """

    namespace: int
    pinned: int
    snapshot: Snapshot | None
    writes: dict[str, Row] | None = None
    epoch: object = None
    flying: bool = False


class Thread:
    """The cached data of one thread, valid as long as `key` and `generation` are.

    Attributes:
        removals: The number of the newest removal record of the thread, or 0 if it has none.
        stamp: What the thread's row has, if a write may rest on what follows; None: on nothing.
        seq: The counter of puts; `updated_at`: when it was last written to.
        logs, named: The logs, by key and by channel.
        heads: By namespace.
        last_namespace: The last namespace that was read, and the key of its row; 0 if none was.
        pending: What tasks wrote, until the next checkpoint is put, by checkpoint and task.
        size: About how many bytes it takes.
        title: What lists call it, and the id of the message that says so; see `Title`.
        told: What lists tell of its metadata, and that as it is stored.
        newest: The key and the id of the last checkpoint that was put or read. If the database has
            not got it, a crash or a restore took commits back, and nothing of the rest is good.
        lock: Held while a write is planned: what is planned changes all of the above at once.
    """

    __slots__ = (
        *("generation", "heads", "key", "lock", "logs", "named", "last_namespace", "newest"),
        *("pending", "removals", "seq", "size", "stamp", "title", "told", "updated_at"),
    )

    def __init__(self, key: int, generation: int, removals: int = 0) -> None:
        self.key = key
        self.generation = generation
        self.removals = removals
        self.stamp: int | None = None
        self.seq = 0
        self.updated_at = 0.0
        self.logs: dict[int, ChannelLog] = {}
        self.named: dict[str, ChannelLog] = {}
        self.heads: dict[str, Head] = {}
        self.last_namespace = "", 0
        self.pending: dict[tuple[str, str], dict[str, Pending]] = {}
        self.size = _THREAD_OVERHEAD
        self.title: Title | None = None
        self.told: tuple[dict[str, Any], bytes] | None = None
        self.newest: tuple[int, str] | None = None
        self.lock = threading.Lock()

    def saw(self, snapshot: Snapshot) -> None:
        """Note that a checkpoint is in the database."""
        if self.newest is None or snapshot.key & _PLACE >= self.newest[0] & _PLACE:
            self.newest = snapshot.key, snapshot.uid

    def log(self, key: int, name: str, kept: Thread | None = None) -> ChannelLog:
        """The log with a key; a new one has the items that are `kept` of it."""
        log = self.logs.get(key)
        if log is None:
            before = kept.logs.get(key) if kept is not None else None
            log = self.logs.setdefault(key, ChannelLog(key, name, before))
            self.named[name] = log
        return log

    def add_items(self, log: ChannelLog, items: Iterable[tuple[int, bytes]]) -> None:
        """Keep items at their positions."""
        self.size += sum(log.add(position, item) for position, item in items)

    def committed_heads(self, stamp: int) -> dict[str, Head]:
        """Return the committed heads by namespace, or nothing if the stamp has changed.

        They can be the parents of new checkpoints. They contain no pending writes.
        """
        if not self.lock.acquire(blocking=False):  # another thread is planning a write
            return {}
        try:
            heads = self.heads.copy().items() if self.stamp == stamp else ()
            return {
                ns: Head(head.namespace, head.pinned, head.snapshot)
                for ns, head in heads
                if not head.flying
            }
        finally:
            self.lock.release()

    def snapshot(self, ns: str, uid: str) -> Snapshot | None:
        """A checkpoint, if it is the head that is kept of a namespace, and is committed."""
        head = self.heads.get(ns)
        snapshot = head.snapshot if head is not None and not head.flying else None
        return snapshot if snapshot is not None and snapshot.uid == uid else None


def keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value among the recent ones of a thread."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _RECENT:
        for oldest in [*kept][:-_RECENT]:  # a copy: another thread may be at it too
            kept.pop(oldest, None)


class KeyBlock:
    """Keys of threads, namespaces and logs, of which the database gives out many at once.

    So a put can make rows that refer to each other. None is given twice, and later ones are higher;
    those that are left in the end are lost.
    """

    def __init__(self) -> None:
        self._left: list[int] = []
        self._lock = threading.Lock()

    def take(self, many: int) -> list[int] | None:
        """So many keys, the highest first, if there are."""
        with self._lock:
            at = len(self._left) - many
            if at < 0:
                return None
            taken = self._left[at:]
            del self._left[at:]
            return taken

    def drop(self) -> None:
        """Give none of them: a copy may have brought rows that have them."""
        with self._lock:
            self._left = []

    def renew(self, keys: list[int]) -> None:
        """Have others, the highest first."""
        with self._lock:
            if keys > self._left:
                self._left = keys


class Cache:
    """The threads that are kept, the least recently used dropped first.

    Args:
        limit_bytes: About how much memory to use.
        overlapped: The ids of threads for which overlapping runs were logged. The object may be
            shared with other caches.
    """

    def __init__(self, limit_bytes: int, overlapped: OrderedDict[str, None]) -> None:
        self._limit = limit_bytes
        self._threads: OrderedDict[str, Thread] = OrderedDict()
        self._lock = threading.Lock()
        self._asked = 0
        self._overlapped = overlapped
        self.keys = KeyBlock()
        self.peek = self._threads.get
        """The cached thread, if any; it may be stale."""

    def thread(self, thread_id: str, key: int, generation: int, removals: int) -> Thread:
        """Return the cached thread, or an empty one if the cached data is from an earlier state."""
        with self._lock:
            kept = self._threads.get(thread_id)
            if kept is None or kept.key != key or kept.generation < generation:
                kept = self._threads[thread_id] = Thread(key, generation, removals)
            elif kept.generation > generation:
                return Thread(key, generation, removals)  # a reader on an older snapshot
            self._used(thread_id)
            return kept

    def replace(self, thread_id: str, thread: Thread) -> None:
        """Keep what a transaction left behind, in the place of what was kept before."""
        with self._lock:
            self._threads[thread_id] = thread
            self._used(thread_id)

    def note_overlap(self, thread_id: str) -> bool:
        """Record that runs of a thread overlap; return whether that was not recorded before."""
        with self._lock:
            is_first = thread_id not in self._overlapped
            self._overlapped[thread_id] = None
            if len(self._overlapped) > _MAX_OVERLAPPED:
                self._overlapped.popitem(last=False)
        return is_first

    def used(self, thread_id: str) -> None:
        """Note that a thread is in use, if it is kept."""
        with self._lock:
            if thread_id in self._threads:
                self._used(thread_id)

    def _used(self, thread_id: str) -> None:
        self._threads.move_to_end(thread_id)
        self._asked += 1
        if self._asked % _WEIGH_EVERY == 0:
            self._shed()

    def _shed(self) -> None:
        total = sum(thread.size for thread in self._threads.values())
        while total > self._limit and len(self._threads) > 1:
            total -= self._threads.popitem(last=False)[1].size

    def distrust(self, thread_id: str) -> None:
        """Have nothing planned upon what is kept of a thread; its items are what they are."""
        thread = self._threads.get(thread_id)
        if thread is not None:
            thread.stamp = None
            thread.heads.clear()

    def forget(self, thread_id: str) -> None:
        """Drop what is kept of a thread."""
        with self._lock:
            self._threads.pop(thread_id, None)

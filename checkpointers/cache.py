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

from perdure.checkpointers.manifest import ALIASES, DELTA, Ranges, count_positions
from perdure.storage.flow import Row

_WEIGH_EVERY: Final = 64  # requests between two looks at how much is kept
_THREAD_OVERHEAD: Final = 10_000  # bytes of a thread with nothing in it and its heads
_RECENT: Final = 16  # namespaces whose heads, and checkpoints whose writes are kept, per thread
_MAX_OVERLAPPED: Final = 1024  # thread ids that are remembered because their overlap was logged
_PLACE: Final = 0xFFFFFFFF  # of a checkpoint's key: where in put order it is
_ITEM_OVERHEAD: Final = 300  # bytes that an item takes beside its own, about

UNREAD_STEP: Final = -1 << 31
Write = list[Any]  # [index, channel, reference]
PendingTask = tuple[str, list[Write], bytes]  # what a task wrote: path, writes, the row's body


class Title(NamedTuple):
    """What lists call a thread.

    Attributes:
        text: What the metadata says, else the first message of a human, cut to 80 characters.
        message: That message's id, perhaps `""`; None: it is from the metadata.
    """

    text: str
    message_id: str | None


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
        *("_index", "_indexed", "items", "key", "message_ids", "name", "next_alias"),
        *("next_position", "origins", "planned_count", "stored_times"),
    )

    def __init__(self, key: int, name: str, kept: ChannelLog | None = None) -> None:
        """A log with the items that are at hand of the same one, `kept`."""
        self.key = key
        self.name = name
        self.planned_count = 0
        self._index: dict[bytes, int] = {}
        self._indexed = 0
        if (
            kept is not None and not kept.planned_count
        ):  # copy it first: another thread may add items
            self._indexed, self._index = kept._indexed, kept._index.copy()
        self.items: dict[int, bytes] = {} if kept is None else kept.items.copy()
        self.origins: dict[int, int] = {} if kept is None else kept.origins.copy()
        self.message_ids: dict[int, str | None] = {} if kept is None else kept.message_ids.copy()
        self.stored_times: dict[int, datetime] = {} if kept is None else kept.stored_times.copy()
        self.next_position, self.next_alias = 0, ALIASES

    @property
    def is_complete(self) -> bool:
        """Whether every item of the log is here, or is planned."""
        return len(self.items) + self.planned_count == self.next_position

    def has_range(self, start: int, stop: int) -> bool:
        """Whether every item of a range is here."""
        if start >= ALIASES:
            origins = [*map(self.origins.get, range(start, stop))]
            return all(map(self.items.__contains__, origins))
        return all(map(self.items.__contains__, range(start, stop)))

    def has_items(self, start: int, stop: int, items: list[bytes]) -> bool:
        """Whether these are the items of a range."""
        at = self.items.get if start < ALIASES else self.get
        return list(map(at, range(start, stop))) == items

    def get(self, position: int) -> bytes | None:
        """The item at a position, if it is here."""
        return self.items.get(self.origin_position(position))

    def items_in(self, ranges: Ranges) -> list[bytes]:
        """The items of ranges that are all here."""
        places: Iterable[int] = chain.from_iterable(starmap(range, ranges))
        if any(start >= ALIASES for start, _ in ranges):
            places = map(self.origin_position, places)
        return list(map(self.items.__getitem__, places))

    def is_free_of_repeats(self, ranges: Ranges) -> bool:
        """Return whether no item occurs twice in the ranges, whose aliases must be cached."""
        first: set[int] = set()
        for start, stop in ranges:
            places = range(start, stop)
            first.update(map(self.origins.__getitem__, places) if start >= ALIASES else places)
        return len(first) == count_positions(ranges)

    def find_position(self, item: bytes) -> int | None:
        """The position of an item, if it is here, or is planned."""
        if self._indexed != len(self.items):
            for position in list(self.items)[self._indexed :]:
                self._index.setdefault(self.items[position], position)
            self._indexed = len(self.items)
        return self._index.get(item)

    def add_item(self, position: int, item: bytes) -> int:
        """Have an item at hand. Returns how many bytes more that takes."""
        if position in self.items:
            return 0
        if self._indexed == len(self.items):  # else `find` does it
            self._index.setdefault(item, position)
            self._indexed += 1
        self.items[position] = item
        return len(item) + _ITEM_OVERHEAD

    def find_stored_position(self, item: bytes) -> int | None:
        """See `find`; what is only planned does not count."""
        position = self.find_position(item)
        if position is None or self.items.get(position) != item:
            return None
        return position

    def plan_item(self, item: bytes) -> int:
        """The position of an item to come; `find` has it from now on."""
        position = self.next_position
        self.next_position += 1
        self.planned_count += 1
        self._index.setdefault(item, position)
        return position

    def origin_position(self, position: int) -> int:
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
        has_stopped_task: Whether a task of it is known to wait for an answer, or to have failed.
        run_started_at: When the run began that has put it, in seconds since 1970; None if no run
            has put it in this database. See `run_starts`.
    """

    checkpoint_id: str
    key: int
    parent_id: str | None
    run_start: int
    encoded_fields: list[Any]
    channel_versions: dict[str, Any]
    versions_seen: dict[str, dict[str, Any]]
    references: dict[str, Any] = field(default_factory=dict)
    ranges: dict[str, tuple[int, Ranges]] = field(default_factory=dict)
    transcript: dict[str, tuple[int, Ranges]] = field(default_factory=dict)
    step: int | None = UNREAD_STEP
    labels: dict[str, Any] | None = None
    has_stopped_task: bool = False
    run_started_at: float | None = None

    def has_version(self, channel: str, version: Any) -> bool:
        """Whether it has a value of a channel, in this version."""
        return channel in self.references and self.channel_versions.get(channel) == version

    def stored_channels(self) -> frozenset[str]:
        """Return the channels whose values are stored and not replayed from writes."""
        return frozenset(channel for channel, ref in self.references.items() if ref[0] != DELTA)

    def inherit_channel(self, channel: str, parent: Snapshot) -> None:
        """Have a channel as the parent has it."""
        self.references[channel] = parent.references[channel]
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

    namespace_key: int
    explicit_head: int
    snapshot: Snapshot | None
    write_rows: dict[str, Row] | None = None
    epoch: object = None
    is_uncommitted: bool = False


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
        *("generation", "heads", "key", "last_namespace", "last_seq", "listed_metadata", "lock"),
        *("logs", "logs_by_channel", "newest_checkpoint", "newest_removal", "pending_writes"),
        *("size_bytes", "title", "updated_at", "version_token"),
    )

    def __init__(self, key: int, generation: int, newest_removal: int = 0) -> None:
        self.key = key
        self.generation = generation
        self.newest_removal = newest_removal
        self.version_token: int | None = None
        self.last_seq = 0
        self.updated_at = 0.0
        self.logs: dict[int, ChannelLog] = {}
        self.logs_by_channel: dict[str, ChannelLog] = {}
        self.heads: dict[str, Head] = {}
        self.last_namespace = "", 0
        self.pending_writes: dict[tuple[str, str], dict[str, PendingTask]] = {}
        self.size_bytes = _THREAD_OVERHEAD
        self.title: Title | None = None
        self.listed_metadata: tuple[dict[str, Any], bytes] | None = None
        self.newest_checkpoint: tuple[int, str] | None = None
        self.lock = threading.Lock()

    def note_newest_checkpoint(self, snapshot: Snapshot) -> None:
        """Note that a checkpoint is in the database."""
        if (
            self.newest_checkpoint is None
            or snapshot.key & _PLACE >= self.newest_checkpoint[0] & _PLACE
        ):
            self.newest_checkpoint = snapshot.key, snapshot.checkpoint_id

    def get_or_add_log(self, key: int, name: str, kept: Thread | None = None) -> ChannelLog:
        """The log with a key; a new one has the items that are `kept` of it."""
        log = self.logs.get(key)
        if log is None:
            before = kept.logs.get(key) if kept is not None else None
            log = self.logs.setdefault(key, ChannelLog(key, name, before))
            self.logs_by_channel[name] = log
        return log

    def add_items(self, log: ChannelLog, items: Iterable[tuple[int, bytes]]) -> None:
        """Keep items at their positions."""
        self.size_bytes += sum(log.add_item(position, item) for position, item in items)

    def committed_heads(self, version_token: int) -> dict[str, Head]:
        """Return the committed heads by namespace, or nothing if the stamp has changed.

        They can be the parents of new checkpoints. They contain no pending writes.
        """
        if not self.lock.acquire(blocking=False):  # another thread is planning a write
            return {}
        try:
            heads = self.heads.copy().items() if self.version_token == version_token else ()
            return {
                ns: Head(head.namespace_key, head.explicit_head, head.snapshot)
                for ns, head in heads
                if not head.is_uncommitted
            }
        finally:
            self.lock.release()

    def committed_snapshot(self, ns: str, uid: str) -> Snapshot | None:
        """A checkpoint, if it is the head that is kept of a namespace, and is committed."""
        head = self.heads.get(ns)
        snapshot = head.snapshot if head is not None and not head.is_uncommitted else None
        return snapshot if snapshot is not None and snapshot.checkpoint_id == uid else None


def keep_recent(kept: dict[Any, Any], key: Any, value: Any) -> None:
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

    def take_keys(self, many: int) -> list[int] | None:
        """So many keys, the highest first, if there are."""
        with self._lock:
            at = len(self._left) - many
            if at < 0:
                return None
            taken = self._left[at:]
            del self._left[at:]
            return taken

    def discard_keys(self) -> None:
        """Give none of them: a copy may have brought rows that have them."""
        with self._lock:
            self._left = []

    def refill(self, keys: list[int]) -> None:
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
        self._request_count = 0
        self._overlapped = overlapped
        self.keys = KeyBlock()
        self.get_thread = self._threads.get
        """The cached thread, if any; it may be stale."""

    def get_or_add_thread(self, thread_id: str, key: int, generation: int, removals: int) -> Thread:
        """Return the cached thread, or an empty one if the cached data is from an earlier state."""
        with self._lock:
            kept = self._threads.get(thread_id)
            if kept is None or kept.key != key or kept.generation < generation:
                kept = self._threads[thread_id] = Thread(key, generation, removals)
            elif kept.generation > generation:
                return Thread(key, generation, removals)  # a reader on an older snapshot
            self._mark_used(thread_id)
            return kept

    def replace_thread(self, thread_id: str, thread: Thread) -> None:
        """Keep what a transaction left behind, in the place of what was kept before."""
        with self._lock:
            self._threads[thread_id] = thread
            self._mark_used(thread_id)

    def note_overlap(self, thread_id: str) -> bool:
        """Record that runs of a thread overlap; return whether that was not recorded before."""
        with self._lock:
            is_first = thread_id not in self._overlapped
            self._overlapped[thread_id] = None
            if len(self._overlapped) > _MAX_OVERLAPPED:
                self._overlapped.popitem(last=False)
        return is_first

    def mark_used(self, thread_id: str) -> None:
        """Note that a thread is in use, if it is kept."""
        with self._lock:
            if thread_id in self._threads:
                self._mark_used(thread_id)

    def _mark_used(self, thread_id: str) -> None:
        self._threads.move_to_end(thread_id)
        self._request_count += 1
        if self._request_count % _WEIGH_EVERY == 0:
            self._evict_threads()

    def _evict_threads(self) -> None:
        total = sum(thread.size_bytes for thread in self._threads.values())
        while total > self._limit and len(self._threads) > 1:
            total -= self._threads.popitem(last=False)[1].size_bytes

    def invalidate_heads(self, thread_id: str) -> None:
        """Have nothing planned upon what is kept of a thread; its items are what they are."""
        thread = self._threads.get(thread_id)
        if thread is not None:
            thread.version_token = None
            thread.heads.clear()

    def drop_thread(self, thread_id: str) -> None:
        """Drop what is kept of a thread."""
        with self._lock:
            self._threads.pop(thread_id, None)

"""Cache the items and heads of threads in one process, within a memory budget.

The cache is never the source of truth. An item at a log position never changes, so a cached item
stays valid when other processes write to the database. A cached item becomes stale only when items
are deleted from its thread. Every time data is deleted from a thread, the thread's `generation` is
incremented. Cached items are used only if the cached `generation` equals the one in the database,
or if nobody else has written to the database since this process stored the head.

Before perdure stores a new checkpoint, perdure makes a plan of the rows to write. The plan is based
on the cached head, so that the head need not be read from the database. The head is the checkpoint
from which the thread's next run continues. The planned rows are committed only if the thread's
version token in the database still equals the version token that was cached with the head. Every
transaction that changes the checkpoints of a thread also changes its version token.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, starmap
from typing import Any, Final, NamedTuple

from perdure.checkpointers.manifest import ALIASES, DELTA, Ranges, count_positions
from perdure.storage.flow import Row, WriteCounts

# Number of requests after which the cache adds the growth of its threads to its total size, and
# evicts threads if it is too large.
_REQUESTS_BETWEEN_EVICTIONS: Final = 64
# Estimated size in bytes of a cached thread, excluding the items of its logs.
_THREAD_OVERHEAD: Final = 10_000
# Maximum number of heads cached per thread. It is also the maximum number of checkpoints per thread
# whose pending writes are cached.
_MAX_RECENT_ENTRIES: Final = 16
# Maximum number of conversation threads with overlapping runs that the cache remembers. For a
# remembered thread, an overlap is not logged again.
_MAX_OVERLAPPED: Final = 1024
# Bit mask that extracts a checkpoint's sequence number from its row key.
_SEQ_MASK: Final = 0xFFFFFFFF
# Estimated memory overhead of a cached item, in bytes, not counting its content.
_ITEM_OVERHEAD: Final = 300

UNREAD_STEP: Final = -1 << 31
"""The value of `Snapshot.step` until the step is read from the metadata."""
Write = list[Any]
"""One write of a task as it is stored: `[index, channel, reference]`."""
PendingTask = tuple[str, list[Write], bytes]
"""The pending writes of a task: its path, its writes, and the encrypted body of their row."""


class Title(NamedTuple):
    """The title of a thread in lists.

    Attributes:
        text: The title from the metadata, or else the first message of a human. It is cut to 80
            characters.
        message_id: The id of the message from which the title is taken, or `""` if the message has
            no id. None if the title is from the metadata.
    """

    text: str
    message_id: str | None


NO_TITLE: Final = Title("", None)
"""The title of a thread without a human message and without a title in its metadata."""


class ChannelLog:
    """The cached part of a channel's log.

    An alias is a log entry that refers to an earlier item of the same log.

    Attributes:
        items: The cached items by position, without aliases.
        origins: The position of the item that an alias repeats, by the position of the alias.
        message_ids: The ids of messages of a `DeltaChannel`, by position. Only ids that were needed
            before are present.
        stored_times: The time at which items were first stored, by position. Only times that were
            needed before are present.
        next_position, next_alias: The positions of the next new item and the next new alias.
        planned_count: The number of new items that are planned and not committed yet.
    """

    __slots__ = (
        *("_index", "_indexed", "items", "key", "message_ids", "name", "next_alias"),
        *("next_position", "origins", "planned_count", "stored_times"),
    )

    def __init__(self, key: int, name: str, cached: ChannelLog | None = None) -> None:
        """Create the cached part of a log.

        If `cached` is not None, it is an older copy of the same log, whose items are copied into
        the new `ChannelLog`.
        """
        self.key = key
        self.name = name
        self.planned_count = 0
        self._index: dict[bytes, int] = {}
        self._indexed = 0
        # `_index` maps the content of items to log positions. Copy `_index` before `items`, so that
        # the copied index never refers to an item that another OS thread adds after `items` has
        # been copied. Do not copy an index that contains planned items, because their positions are
        # not stored yet.
        if cached is not None and not cached.planned_count:
            self._indexed, self._index = cached._indexed, cached._index.copy()
        self.items: dict[int, bytes] = {} if cached is None else cached.items.copy()
        self.origins: dict[int, int] = {} if cached is None else cached.origins.copy()
        self.message_ids: dict[int, str | None] = (
            {} if cached is None else cached.message_ids.copy()
        )
        self.stored_times: dict[int, datetime] = (
            {} if cached is None else cached.stored_times.copy()
        )
        self.next_position, self.next_alias = 0, ALIASES

    def has_cached_range(self, start: int, stop: int) -> bool:
        """Return whether every item of a range is cached."""
        if start >= ALIASES:
            origins = [*map(self.origins.get, range(start, stop))]
            return all(map(self.items.__contains__, origins))
        return all(map(self.items.__contains__, range(start, stop)))

    def get(self, position: int) -> bytes | None:
        """Return the item at a log position, or None if the item is not cached.

        If the log entry at this position is an alias, the item to which the alias refers is
        returned.
        """
        return self.items.get(self.resolve_alias_to_item_position(position))

    def get_items(self, ranges: Ranges) -> list[bytes]:
        """Return the items of ranges in order. All items must be cached."""
        item_positions: Iterable[int] = chain.from_iterable(starmap(range, ranges))
        if any(start >= ALIASES for start, _ in ranges):
            item_positions = map(self.resolve_alias_to_item_position, item_positions)
        return list(map(self.items.__getitem__, item_positions))

    def has_no_repeated_items(self, ranges: Ranges) -> bool:
        """Return whether log ranges contain each item at most once, after resolving aliases.

        All aliases in `ranges` must be cached.
        """
        originals: set[int] = set()
        for start, stop in ranges:
            range_positions = range(start, stop)
            originals.update(
                map(self.origins.__getitem__, range_positions)
                if start >= ALIASES
                else range_positions
            )
        return len(originals) == count_positions(ranges)

    def find_item_position(self, item: bytes) -> int | None:
        """Return the log position of an item that equals `item`, or None.

        Both cached items and new items that are planned but not yet committed are searched.
        """
        if self._indexed != len(self.items):
            for position in list(self.items)[self._indexed :]:
                self._index.setdefault(self.items[position], position)
            self._indexed = len(self.items)
        return self._index.get(item)

    def add_item_and_count_bytes(self, position: int, item: bytes) -> int:
        """Cache an item, and return the number of bytes added to the cache."""
        if position in self.items:
            return 0
        # If the index from item contents to log positions is out of date, the next call to
        # `find_item_position` adds the missing items to the index.
        if self._indexed == len(self.items):
            self._index.setdefault(item, position)
            self._indexed += 1
        self.items[position] = item
        return len(item) + _ITEM_OVERHEAD

    def find_committed_item_position(self, item: bytes) -> int | None:
        """Return the log position of a cached item that equals `item`, or None.

        An item that is planned but not yet committed is never returned.
        """
        position = self.find_item_position(item)
        if position is None or self.items.get(position) != item:
            return None
        return position

    def assign_next_position(self, item: bytes) -> int:
        """Assign the next log position to a new item, and index it for `find_item_position`."""
        position = self.next_position
        self.next_position += 1
        self.planned_count += 1
        self._index.setdefault(item, position)
        return position

    def resolve_alias_to_item_position(self, item_or_alias_position: int) -> int:
        """Return the position of the item to which an alias refers.

        Positions of items and of uncached aliases are returned unchanged.
        """
        return (
            self.origins.get(item_or_alias_position, item_or_alias_position)
            if item_or_alias_position >= ALIASES
            else item_or_alias_position
        )


@dataclass(slots=True)
class Snapshot:
    """A decrypted checkpoint, including the log ranges of its list and dict values.

    Attributes:
        checkpoint_id: The id of the checkpoint.
        key: The key of its row.
        parent_id: The id of its parent, or None.
        run_start: The sequence number of the put with which the run that stored this checkpoint
            began.
        encoded_fields: Two encoded values: the fields of the checkpoint that have no attribute
            here, and its metadata.
        channel_versions: The version of each channel.
        versions_seen: The channel versions that each node has seen, by node.
        references: A reference for each channel that has a value; see `manifest`.
        ranges: The log key and the ranges of each value that is stored as log items, by channel.
        transcript: The log key and the ranges of everything that was stored on the way to this
            checkpoint, each item once, by channel.
        step: The superstep from the metadata, once it was read; see `UNREAD_STEP`.
        is_update: Whether a state update stored the checkpoint, or None if that was not read from
            the metadata yet.
        labels: The labels from the metadata (see `labels.select_labels_for_child_checkpoint`), or
            None if they were not read yet.
        has_stopped_task: Whether it is known that one of its tasks was interrupted or has failed.
        run_started_at: The time at which the run that stored this checkpoint started, in seconds
            since 1970. None if the time is unknown, for example after a state update or an import;
            see `run_starts`.
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
    is_update: bool | None = None
    labels: dict[str, Any] | None = None
    has_stopped_task: bool = False
    run_started_at: float | None = None

    def stored_channels(self) -> frozenset[str]:
        """Return the channels whose values are stored with the checkpoint.

        The result does not contain channels whose values must be computed by replaying task writes.
        """
        return frozenset(channel for channel, ref in self.references.items() if ref[0] != DELTA)

    def inherit_channel(self, channel: str, parent: Snapshot) -> None:
        """Copy the reference and the log ranges of a channel's value from the parent checkpoint."""
        self.references[channel] = parent.references[channel]
        if channel in parent.ranges:
            self.ranges[channel] = parent.ranges[channel]


@dataclass(slots=True)
class Head:
    """The head of a namespace: the checkpoint from which the next run starts.

    Attributes:
        namespace_key: The key of the namespace's row.
        explicit_head: The sequence number of the head, or 0 if the head is the newest checkpoint.
        snapshot: The checkpoint, or None if the namespace has no checkpoint.
        write_rows: The rows `(checkpoint_id, task_id, task_path, body)` of its pending writes, by
            task id. None if they are not cached.
        write_counts_except_own: The counts of writes by others, read when this process stored the
            head. While the counts remain the same, nobody else has changed the head. None if the
            head was not stored by this process.
        is_uncommitted: Whether the head is planned and not committed yet.
    """

    namespace_key: int
    explicit_head: int
    snapshot: Snapshot | None
    write_rows: dict[str, Row] | None = None
    write_counts_except_own: WriteCounts | None = None
    is_uncommitted: bool = False


class Thread:
    """The cached data of one thread.

    The cached data is valid as long as `key` and `generation` match the thread's row in the
    database.

    Attributes:
        key: The key of the thread's row, or 0 for a new thread.
        generation: The generation of the thread when the data was read. The module docstring
            explains it.
        newest_removal: The number of the newest removal record of the thread, or 0 if it has none.
        version_token: The version token in the thread's row. None if no new checkpoint may be
            planned from the cached heads.
        last_seq: The sequence number of the newest checkpoint, or 0 if the thread has none.
        updated_at: The time of the last activity, in seconds since 1970.
        logs, logs_by_channel: The logs by key and by channel.
        heads: The heads by namespace.
        last_namespace: The namespace of the checkpoint that was read last, and the key of its row.
            The key is 0 if no checkpoint was read.
        pending_writes: The pending writes of recent checkpoints, by namespace and id of the
            checkpoint, and by task id. They are dropped when the next checkpoint is put.
        size_bytes: The estimated memory of the cached data.
        counted_bytes: The part of `size_bytes` that the total size of the cache contains.
        title: The title in lists. None if no title was determined yet; see `NO_TITLE`.
        listed_metadata: The part of the head's metadata that lists show, decoded and encoded.
        newest_checkpoint: The row key and the id of the newest checkpoint that was put or read. If
            the database does not have it, a crash or a restore has undone commits, and none of the
            cached data is valid.
        lock: Held while the put of a checkpoint is planned from the cache, because the plan
            changes most of these attributes.
    """

    __slots__ = (
        *("counted_bytes", "generation", "heads", "key", "last_namespace", "last_seq"),
        *("listed_metadata", "lock", "logs", "logs_by_channel", "newest_checkpoint"),
        *("newest_removal", "pending_writes", "size_bytes", "title", "updated_at"),
        "version_token",
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
        self.size_bytes, self.counted_bytes = _THREAD_OVERHEAD, 0
        self.title: Title | None = None
        self.listed_metadata: tuple[dict[str, Any], bytes] | None = None
        self.newest_checkpoint: tuple[int, str] | None = None
        self.lock = threading.Lock()

    def record_checkpoint_if_newest(self, snapshot: Snapshot) -> None:
        """Set `newest_checkpoint` to `snapshot` if `snapshot` is the newest known checkpoint."""
        if (
            self.newest_checkpoint is None
            or snapshot.key & _SEQ_MASK >= self.newest_checkpoint[0] & _SEQ_MASK
        ):
            self.newest_checkpoint = snapshot.key, snapshot.checkpoint_id

    def get_or_add_log(
        self, log_key: int, channel: str, cached_thread: Thread | None = None
    ) -> ChannelLog:
        """Return the thread's log with the key `log_key`.

        If the log is not cached yet, the method first adds the log to this cached copy of the
        thread.

        If the method adds a log, the log's cached items are taken over from `cached_thread`, an
        older cached copy of the same thread.
        """
        log = self.logs.get(log_key)
        if log is None:
            cached_log = cached_thread.logs.get(log_key) if cached_thread is not None else None
            log = self.logs.setdefault(log_key, ChannelLog(log_key, channel, cached_log))
            self.logs_by_channel[channel] = log
        return log

    def add_items(self, log: ChannelLog, items: Iterable[tuple[int, bytes]]) -> None:
        """Cache items at their log positions."""
        self.size_bytes += sum(
            log.add_item_and_count_bytes(position, item) for position, item in items
        )

    def get_committed_heads_by_namespace_unless_stale(
        self, expected_version_token: int
    ) -> dict[str, Head]:
        """Return cached, committed heads keyed by namespace, or an empty dict if they may be stale.

        The cached heads may be stale if the conversation thread's cached version token differs from
        `expected_version_token`. While another OS thread holds this conversation thread's lock to
        plan a put, an empty dict is returned. The returned heads have no pending writes, because
        callers use the heads only as parents of new checkpoints.
        """
        if not self.lock.acquire(blocking=False):
            return {}
        try:
            heads = (
                self.heads.copy().items() if self.version_token == expected_version_token else ()
            )
            return {
                checkpoint_ns: Head(head.namespace_key, head.explicit_head, head.snapshot)
                for checkpoint_ns, head in heads
                if not head.is_uncommitted
            }
        finally:
            self.lock.release()

    def committed_snapshot(self, checkpoint_ns: str, checkpoint_id: str) -> Snapshot | None:
        """Return the cached head of a namespace if its id is `checkpoint_id`, otherwise None.

        If the transaction that stores the head is not committed yet, the result is None.
        """
        head = self.heads.get(checkpoint_ns)
        snapshot = head.snapshot if head is not None and not head.is_uncommitted else None
        return (
            snapshot if snapshot is not None and snapshot.checkpoint_id == checkpoint_id else None
        )


def add_entry_and_evict_oldest(recent_entries: dict[Any, Any], key: Any, value: Any) -> None:
    """Add a dict entry as the newest one, and evict the oldest entries if the limit is exceeded.

    The limit is `_MAX_RECENT_ENTRIES`.
    """
    recent_entries.pop(key, None)
    if len(recent_entries) >= _MAX_RECENT_ENTRIES:
        drop_oldest_entries(recent_entries, _MAX_RECENT_ENTRIES)
    recent_entries[key] = value


def drop_oldest_entries(entries: dict[Any, Any], limit: int) -> None:
    """Evict the oldest entries of a dict until fewer than `limit` entries remain.

    Another OS thread may add entries to `entries` while this function runs.
    """
    while len(entries) >= limit:
        # `next` raises RuntimeError or StopIteration if another OS thread modifies `entries`
        # concurrently.
        with suppress(RuntimeError, StopIteration):
            entries.pop(next(iter(entries)), None)


class KeyBlock:
    """A block of row keys that the database has reserved for new threads, namespaces and logs.

    The database reserves many keys at once, so the rows of a new checkpoint can refer to each other
    before any row is stored. No key is used twice. Each reservation of row keys returns higher keys
    than all earlier reservations. Reserved row keys that are still unused when the process exits
    are never assigned to a row.
    """

    def __init__(self) -> None:
        self._left: list[int] = []
        self._lock = threading.Lock()

    def take_reserved_row_keys(self, count: int) -> list[int] | None:
        """Take `count` reserved row keys, highest first, or return None if too few are left."""
        with self._lock:
            start = len(self._left) - count
            if start < 0:
                return None
            keys = self._left[start:]
            del self._left[start:]
            return keys

    def discard_keys(self) -> None:
        """Discard all reserved row keys, because rows in the database may already use them."""
        with self._lock:
            self._left = []

    def replace_reserved_row_keys(self, new_row_keys: list[int]) -> None:
        """Store newly reserved row keys, unless a later reservation has already been stored."""
        # Each list of row keys is in descending order, so Python's list comparison first compares
        # the highest keys. A later reservation has higher keys, so its list of keys is greater than
        # the list of keys from an earlier reservation.
        with self._lock:
            if new_row_keys > self._left:
                self._left = new_row_keys


class Cache:
    """The cached threads of a process.

    If the cached threads exceed the memory limit, the least recently used threads are evicted.

    Args:
        limit_bytes: The approximate maximum memory of the cached data, in bytes.
        overlapped: The ids of threads for which overlapping runs were logged. The object may be
            shared with other caches.
    """

    def __init__(self, limit_bytes: int, overlapped: OrderedDict[str, None]) -> None:
        self._limit = limit_bytes
        self._threads: OrderedDict[str, Thread] = OrderedDict()
        self._lock = threading.Lock()
        self._request_count = 0
        # The sum of the attribute `counted_bytes` of all cached threads.
        self._total_bytes = 0
        # The ids of the threads that were used since the last eviction, and of those that were used
        # between the last two evictions. Only these threads may have grown since they were counted.
        # A thread also grows after it was marked as used, while its items are being read.
        self._used_ids, self._previously_used_ids = set[str](), set[str]()
        self._overlapped = overlapped
        self.keys = KeyBlock()
        self.get_thread = self._threads.get
        """The cached thread, if any; it may be stale."""

    def get_or_add_thread(
        self, thread_id: str, key: int, generation: int, newest_removal: int
    ) -> Thread:
        """Return the cached thread if it is up to date, or a new, empty `Thread` otherwise.

        A cached thread is up to date if its key and generation equal the arguments `key` and
        `generation`.
        """
        with self._lock:
            thread = self._threads.get(thread_id)
            if thread is None or thread.key != key or thread.generation < generation:
                thread = Thread(key, generation, newest_removal)
                self._set_thread_while_locked(thread_id, thread)
            elif thread.generation > generation:
                # The caller's database snapshot is older than the cached data, so return a new,
                # empty `Thread` and keep the cached one.
                return Thread(key, generation, newest_removal)
        self.mark_thread_used(thread_id)
        return thread

    def replace_thread(self, thread_id: str, thread: Thread) -> None:
        """Replace the cached copy of a thread with the thread's state after a transaction."""
        with self._lock:
            self._set_thread_while_locked(thread_id, thread)
        self.mark_thread_used(thread_id)

    def _set_thread_while_locked(self, thread_id: str, thread: Thread) -> None:
        """Store a thread in the cache in place of the cached copy, if there is one."""
        cached = self._threads.get(thread_id)
        if cached is not thread:
            if cached is not None:
                self._total_bytes -= cached.counted_bytes
            self._threads[thread_id] = thread
            thread.counted_bytes = 0

    def record_run_overlap_and_check_if_first_of_thread(self, thread_id: str) -> bool:
        """Record in the cache that runs of a thread overlap; return False if already recorded."""
        with self._lock:
            is_first = thread_id not in self._overlapped
            self._overlapped[thread_id] = None
            if len(self._overlapped) > _MAX_OVERLAPPED:
                self._overlapped.popitem(last=False)
        return is_first

    def mark_thread_used(self, thread_id: str) -> None:
        """Mark a thread as the most recently used one, if it is cached.

        After `_REQUESTS_BETWEEN_EVICTIONS` calls, evict threads if the memory limit is exceeded.
        """
        with self._lock:
            if thread_id in self._threads:
                self._threads.move_to_end(thread_id)
                self._used_ids.add(thread_id)
                self._request_count += 1
                if self._request_count % _REQUESTS_BETWEEN_EVICTIONS == 0:
                    self._evict_threads_while_locked()

    def _evict_threads_while_locked(self) -> None:
        """Evict the least recently used threads until the memory limit is met.

        The most recently used thread stays in the cache, even if it exceeds the memory limit alone.
        """
        for thread_id in self._used_ids | self._previously_used_ids:
            thread = self._threads.get(thread_id)
            if thread is not None:
                size_bytes = thread.size_bytes
                self._total_bytes += size_bytes - thread.counted_bytes
                thread.counted_bytes = size_bytes
        self._previously_used_ids, self._used_ids = self._used_ids, set()
        while self._total_bytes > self._limit and len(self._threads) > 1:
            self._total_bytes -= self._threads.popitem(last=False)[1].counted_bytes

    def invalidate_heads(self, thread_id: str) -> None:
        """Drop the cached heads of a thread.

        Without cached heads, the next request to store a checkpoint of the thread reads the heads
        from the database.
        """
        thread = self._threads.get(thread_id)
        if thread is not None:
            thread.version_token = None
            thread.heads.clear()

    def drop_thread(self, thread_id: str) -> None:
        """Drop a thread from the cache."""
        with self._lock:
            thread = self._threads.pop(thread_id, None)
            if thread is not None:
                self._total_bytes -= thread.counted_bytes

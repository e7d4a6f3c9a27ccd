"""Append items to the channel logs of a thread, and update the cache after the commit."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from perdure.checkpointers.cache import (
    Cache,
    ChannelLog,
    Head,
    Snapshot,
    Thread,
    Write,
    add_entry_and_evict_oldest,
)
from perdure.checkpointers.codec import MESSAGE
from perdure.checkpointers.delta import ChannelUpdate
from perdure.checkpointers.manifest import (
    ALIASES,
    DELTA,
    DICT,
    DICT_HERE,
    ITEM,
    LIST,
    LIST_HERE,
    MIN_RANGE_LIMIT,
    SNAPSHOT,
    Range,
    Ranges,
    ValueReference,
    compute_max_log_range_count,
    count_positions,
    drop_repeated_positions,
    flatten_ranges,
    group_short_log_ranges_for_merging,
    iter_positions,
    join_adjacent_ranges,
    merge_ranges,
    subtract_ranges,
)
from perdure.checkpointers.merge import Merge
from perdure.checkpointers.put import SplitValue, TaskWrites, ValueToStore
from perdure.checkpointers.records import (
    build_item_associated_data,
    build_row_key,
    compute_item_hash,
)
from perdure.checkpointers.values import pack
from perdure.storage.database import OwnWrites
from perdure.storage.encryption import Seal
from perdure.storage.flow import NamedSQL, Row, Statement

LOG_KIND_BY_INLINE_KIND: Final = {LIST_HERE: LIST, DICT_HERE: DICT}
"""Maps the kind of an inline list or dict to the kind of the reference that replaces it.

The reference replaces the inline list or dict when its elements are stored in the log.
"""
_log = logging.getLogger("perdure")


@dataclass(slots=True)
class Additions:
    """The items and aliases that one transaction appends to the logs of a thread.

    Args:
        sql: The statements, by name.
        seal: Encrypts the items.
        thread_id: The thread.
        thread: The cached thread, with a log for each channel to which items are added.
        stored_at: The time recorded as the first storage of the items, in seconds since 1970.
        item_times: The storage times that differ from `stored_at`, by channel and item content.

    Attributes:
        positions_by_item: The log positions of items, by channel and content.
            `append_new_items_to_log` reuses the position of an item that is in this dict. The dict
            contains the appended items. It also contains items that were already in the log when
            tasks wrote them to a `DeltaChannel` once more. In an erasure, it contains all stored
            items of the thread.
        items: The appended items, each as a tuple of log, position and content.
        aliases: The appended aliases, each as a tuple of the log, the position of the alias and the
            position of the original item.
    """

    sql: NamedSQL
    seal: Seal
    thread_id: str
    thread: Thread
    stored_at: float
    item_times: dict[tuple[str, bytes], float] = field(default_factory=dict)
    positions_by_item: dict[tuple[str, bytes], int] = field(default_factory=dict)
    items: list[tuple[ChannelLog, int, bytes]] = field(default_factory=list)
    aliases: list[tuple[ChannelLog, int, int]] = field(default_factory=list)
    _rows: list[Row] = field(default_factory=list)

    def set_channel_references(
        self,
        snapshot: Snapshot,
        values_to_store: dict[str, ValueToStore | None],
        parent: Snapshot | None,
        merge: Merge | None,
    ) -> None:
        """Set the checkpoint's channel references, and append the channels' new items to the logs.

        Args:
            snapshot: The checkpoint, without references.
            values_to_store: The values of the channels; None means the value of the parent.
            parent: The parent of the checkpoint, or None.
            merge: Describes which channels are copied from the head, or None.
        """
        if parent is not None:
            snapshot.transcript.update(parent.transcript)
        for channel, value_to_store in values_to_store.items():
            if isinstance(value_to_store, SplitValue):
                snapshot.references[channel] = self.append_value_to_log(
                    channel, value_to_store, snapshot, parent
                )
            elif value_to_store is not None:
                snapshot.references[channel] = value_to_store
            elif parent is not None:
                snapshot.inherit_channel(channel, parent)
        if parent is not None:
            for channel, version in snapshot.channel_versions.items():
                # If the graph does not define a channel, langgraph keeps the channel's version in
                # the checkpoint but drops its value, so take the value from the parent checkpoint.
                if channel not in snapshot.references and parent.has_version(channel, version):
                    snapshot.inherit_channel(channel, parent)
        if merge is not None:
            merge.copy_head_channels_into(snapshot)

    def append_value_to_log(
        self, channel: str, split_value: SplitValue, snapshot: Snapshot, parent: Snapshot | None
    ) -> ValueReference:
        """Append the new items of a channel's value to the channel's log.

        Return the reference that the checkpoint stores for the value. In `snapshot`, also update
        the log ranges of the value and the transcript of the channel.
        """
        if split_value.update is not None:
            ref = self._append_delta_update_to_log(channel, split_value.update, snapshot, parent)
            if split_value.undivided is None:
                return ref
            snapshot.ranges.pop(channel, None)
            if isinstance(split_value.undivided, bytes):
                return split_value.undivided
            return self.append_value_to_log(channel, split_value.undivided, snapshot, parent)
        log = self.thread.logs_by_channel[channel]
        first_new_position = log.next_position
        kept_ranges, other_ranges = (
            split_value.kept_ranges,
            self._append_parts_to_log(log, split_value.parts) if split_value.parts else [],
        )
        ranges = (
            join_adjacent_ranges([*kept_ranges, *other_ranges]) if other_ranges else kept_ranges
        )
        if split_value.kind == ITEM:
            item = [ITEM, log.key, ranges[0][0]]
            return [SNAPSHOT, item] if split_value.is_snapshot else item
        parent_transcript = parent.transcript.get(channel) if parent is not None else None
        if parent_transcript is None or parent_transcript[0] != log.key:
            transcript = drop_repeated_positions(ranges)
        elif split_value.repeated_items:
            repeated_positions = [
                position
                for item in split_value.repeated_items
                if (position := log.find_item_position(item)) is not None
            ]
            new_ranges = subtract_ranges(
                other_ranges,
                merge_ranges((position, position + 1) for position in repeated_positions),
            )
            transcript = _join_transcript_and_new_value_ranges(
                log, parent_transcript[1], new_ranges, first_new_position
            )
        # If the value consists of the parent's whole transcript followed by new items, the new
        # transcript is the same as the value.
        elif parent_transcript[1] == kept_ranges and other_ranges in (
            [],
            [(first_new_position, log.next_position)],
        ):
            transcript = ranges
        else:
            transcript = _join_transcript_and_new_value_ranges(
                log, parent_transcript[1], other_ranges, first_new_position
            )
        value_ranges = self._merge_short_ranges_if_too_many(log, ranges)
        snapshot.ranges[channel] = (log.key, value_ranges)
        snapshot.transcript[channel] = (
            log.key,
            value_ranges
            if transcript == ranges
            else self._merge_short_ranges_if_too_many(log, transcript),
        )
        ref = [split_value.kind, log.key, flatten_ranges(value_ranges)]
        return [SNAPSHOT, ref] if split_value.is_snapshot else ref

    def _append_delta_update_to_log(
        self, channel: str, update: ChannelUpdate, snapshot: Snapshot, parent: Snapshot | None
    ) -> ValueReference:
        """Append the items that tasks wrote to a `DeltaChannel` to the channel's log.

        Return the reference that the checkpoint stores for the channel's value. In `snapshot`, also
        set the channel's transcript and, if the ranges of the parent's value are known, the ranges
        of the new value.
        """
        log, change_positions = self.thread.logs_by_channel[channel], list[int | None]()
        first_new_position = log.next_position
        for change in update.changes:
            item, position = change.item, None
            if item is not None:
                position = None if change.is_new else log.find_item_position(item)
                if position is None:
                    position = log.assign_next_position(item)
                    self._add_row(log, position, compute_item_hash(self.seal, log.key, item), item)
                    self.items.append((log, position, item))
                self.positions_by_item[channel, item] = position
            change_positions.append(position)
        transcript_positions = [
            change_position
            for change, change_position in zip(update.changes, change_positions, strict=True)
            if change_position is not None and change.item not in update.repeated
        ]
        new_ranges = join_adjacent_ranges(
            (change_position, change_position + 1) for change_position in transcript_positions
        )
        # Leave out the items of the parent's value, because the transcript already contains their
        # messages. If the transcript contains them in an earlier encoding, they are different items
        # there, and `_join_transcript_and_new_value_ranges` would add the messages a second time.
        if update.parent_ranges:
            new_ranges = subtract_ranges(
                new_ranges,
                merge_ranges(_replace_alias_positions_by_item_positions(log, update.parent_ranges)),
            )
        parent_transcript = parent.transcript.get(channel) if parent is not None else None
        transcript = _join_transcript_and_new_value_ranges(
            log, parent_transcript[1] if parent_transcript else [], new_ranges, first_new_position
        )
        snapshot.transcript[channel] = (
            log.key,
            self._merge_short_ranges_if_too_many(log, transcript),
        )
        if update.parent_ranges is None:
            return [DELTA, update.kind]
        value_ranges = update.compute_log_ranges_of_updated_value(change_positions)
        stored_ranges = (
            snapshot.transcript[channel][1]
            if value_ranges == transcript
            else self._merge_short_ranges_if_too_many(log, value_ranges)
        )
        snapshot.ranges[channel] = (log.key, stored_ranges)
        return [DELTA, [LIST, log.key, flatten_ranges(stored_ranges)]]

    def replace_write_by_reference(self, snapshot: Snapshot, write: Write) -> Write:
        """Replace the value of a pending write with a log reference if possible.

        A value is replaced if `positions_by_item` contains its position in the log. A list or dict
        is replaced if each of its elements is a log range or has a position in `positions_by_item`.
        Otherwise, the write is returned unchanged.

        Args:
            snapshot: The checkpoint that contains the result of the write.
            write: The write.
        """
        index, channel, ref = write
        log_ranges = snapshot.ranges.get(channel) or snapshot.transcript.get(channel)
        if log_ranges is None:
            return write
        if isinstance(ref, bytes):
            position = self.positions_by_item.get((channel, ref))
            return write if position is None else [index, channel, [ITEM, log_ranges[0], position]]
        if ref[0] not in LOG_KIND_BY_INLINE_KIND:
            return write
        ranges = []
        for element in ref[1]:
            if not isinstance(element, bytes):
                ranges.append((element[1], element[1] + element[2]))
                continue
            position = self.positions_by_item.get((channel, element))
            if position is None:
                return write
            ranges.append((position, position + 1))
        return [
            index,
            channel,
            [
                LOG_KIND_BY_INLINE_KIND[ref[0]],
                log_ranges[0],
                flatten_ranges(join_adjacent_ranges(ranges)),
            ],
        ]

    def append_new_items_to_log(self, channel: str, parts: list[bytes | Range]) -> Ranges:
        """Append new items to a channel's log, and return the log ranges of all items in `parts`.

        Each element of `parts` is either the content of a new item or a range of existing log
        positions. If the result would exceed the limit set by `compute_max_log_range_count`,
        each sequence of short ranges is replaced with a single range of aliases. An alias is a log
        entry that refers to an earlier item of the log.
        """
        log = self.thread.logs_by_channel[channel]
        return self._merge_short_ranges_if_too_many(log, self._append_parts_to_log(log, parts))

    def _append_parts_to_log(self, log: ChannelLog, parts: Iterable[bytes | Range]) -> Ranges:
        """Append the new items to a log, and return the log ranges of all `parts`, in order."""
        ranges = []
        for part in parts:
            if isinstance(part, bytes):
                position = self.positions_by_item.get((log.name, part))
                if position is None:
                    position = self.positions_by_item[log.name, part] = log.assign_next_position(
                        part
                    )
                    self._add_row(log, position, compute_item_hash(self.seal, log.key, part), part)
                    self.items.append((log, position, part))
                part = position, position + 1
            ranges.append(part)
        return join_adjacent_ranges(ranges)

    def _add_row(self, log: ChannelLog, position: int, content_hash: int, data: bytes) -> None:
        """Encrypt an item or an alias, and add its row to the rows to insert.

        The content hash of an alias is 0.
        """
        body = self.seal.seal(data, build_item_associated_data(self.thread_id, log.name, position))
        stored_at = self.item_times.get((log.name, data), self.stored_at)
        self._rows.append((build_row_key(log.key, position), content_hash, stored_at, body))

    def _merge_short_ranges_if_too_many(self, log: ChannelLog, ranges: Ranges) -> Ranges:
        """Reduce the number of log ranges to the allowed maximum, keeping the items they refer to.

        The maximum number of ranges is computed by `compute_max_log_range_count`. To reduce the
        number of ranges, each sequence of short ranges is replaced with a single range of aliases.
        An alias is a log entry that refers to an earlier item of the log.
        """
        if len(ranges) <= MIN_RANGE_LIMIT or len(ranges) <= compute_max_log_range_count(
            count_positions(ranges)
        ):
            return ranges
        limited: Ranges = []
        for group in group_short_log_ranges_for_merging(ranges):
            if len(group) == 1:
                limited += group
                continue
            start = log.next_alias
            for origin in iter_positions(_replace_alias_positions_by_item_positions(log, group)):
                self._add_row(log, log.next_alias, 0, pack(origin))
                self.aliases.append((log, log.next_alias, origin))
                log.next_alias += 1
            limited.append((start, log.next_alias))
        return join_adjacent_ranges(limited)

    def build_statements(self) -> list[Statement]:
        """Build the statements that insert the new log items and aliases."""
        return (
            [Statement(self.sql["add_item"], self._rows, execute_many=True)] if self._rows else []
        )

    def cache_committed_items(self) -> None:
        """After a commit, add the new items and aliases to the cached logs."""
        for log, position, item in self.items:
            self.thread.size_bytes += log.add_item_and_count_bytes(position, item)
            log.planned_count -= 1
        for log, position, origin in self.aliases:
            log.origins[position] = origin


@dataclass(slots=True)
class PlannedTransaction:
    """A planned transaction and the cache changes to apply after it commits.

    Attributes:
        cache: The cache of threads.
        own_writes: The number of transactions that the checkpointer has committed, and the counts
            of writes by others after the last of them.
        thread_id: The thread.
        thread: The cached thread, as it is after the commit.
        statements: The statements that are still to be executed. In a plan from the cache, the
            first one fails if the thread has changed since it was cached.
        additions: The items that are appended to the logs.
        snapshot: The new checkpoint, or None.
        head: The head of the namespace after the checkpoint was stored. It may be a checkpoint
            other than `snapshot`. None if the transaction stores the writes of a task.
        reveals_overlap: Whether the stored checkpoint reveals that two runs of the thread overlap.
        written_row: A tuple of the checkpoint's namespace, the checkpoint's id, the task id, and
            the row that the transaction stores for the writes of this task. None if the transaction
            stores a checkpoint.
        is_thread_read: Whether `thread` was built from the database in this transaction. It then
            replaces the cached thread.
        replaces_checkpoint: Whether the content of a stored checkpoint has changed. The thread is
            then dropped from the cache.
        remaining_keys: The row keys that the transaction has reserved and not used.
    """

    cache: Cache
    own_writes: OwnWrites
    thread_id: str
    thread: Thread
    statements: list[Statement]
    additions: Additions | None = None
    snapshot: Snapshot | None = None
    head: Head | None = None
    reveals_overlap: bool = False
    written_row: tuple[str, str, str, Row] | None = None
    is_thread_read: bool = False
    replaces_checkpoint: bool = False
    remaining_keys: list[int] = field(default_factory=list)

    def record_whether_head_has_writes(self, rows: list[Row]) -> None:
        """Record in the `Head` object whether the new head has pending writes.

        If the stored checkpoint is not the new head, nothing is recorded. A new head can already
        have pending writes, because writes can be stored before the checkpoint to which they
        belong. If it has no pending writes, this fact is cached. If it has pending writes, they are
        read from the database when needed.

        Args:
            rows: The rows returned by the first statement of the transaction. The last column of
                the first row is true if the stored checkpoint has pending writes.
        """
        if self.head is not None and self.head.snapshot is self.snapshot:
            self.head.write_rows = None if rows[0][-1] else {}

    def update_cache_after_commit(self) -> None:
        """Record in the cache what the committed transaction has stored.

        Also log a warning if the transaction was the first to reveal that runs of the thread
        overlap.
        """
        cache = self.cache
        if self.additions is not None:
            self.additions.cache_committed_items()
        if self.snapshot is not None:
            self.thread.record_checkpoint_if_newest(self.snapshot)
        if self.head is not None:
            self.head.writes_by_others, self.head.is_uncommitted = (
                self.own_writes.writes_by_others,
                False,
            )
            cache.mark_thread_used(self.thread_id)
        if self.written_row is not None:
            self._cache_row_of_pending_writes(*self.written_row)
        if self.remaining_keys:
            cache.keys.replace_reserved_row_keys(self.remaining_keys)
        if self.replaces_checkpoint:
            cache.drop_thread(self.thread_id)
        elif self.is_thread_read:
            cache.replace_thread(self.thread_id, self.thread)
        if (
            self.reveals_overlap
            and self.snapshot is not None
            and cache.record_run_overlap_and_check_if_first_of_thread(self.thread_id)
        ):
            _log.warning(
                "thread %r: two runs overlapped, as checkpoint %s shows; one of them is now a "
                "branch, which the next turn does not see. To run one turn after the other, hold "
                "saver.lock(thread_id). This is logged once per thread",
                *(self.thread_id, self.snapshot.checkpoint_id),
            )

    def _cache_row_of_pending_writes(
        self, checkpoint_ns: str, checkpoint_id: str, task_id: str, row: Row
    ) -> None:
        """Cache a row of pending writes if the writes belong to the cached head."""
        thread = self.cache.get_thread(self.thread_id)
        head = thread.heads.get(checkpoint_ns) if thread is not None else None
        if head is None or head.snapshot is None or head.snapshot.checkpoint_id != checkpoint_id:
            return
        if head.write_rows is not None:
            head.write_rows[task_id] = row


def _join_transcript_and_new_value_ranges(
    log: ChannelLog,
    transcript_ranges: Ranges,
    new_value_ranges: Ranges,
    first_appended_position: int,
) -> Ranges:
    """Return a transcript's log ranges, extended with the new items of a channel's value.

    Args:
        log: The log. `log.origins` must contain each alias that occurs in the ranges.
        transcript_ranges: The ranges of the transcript of the parent.
        new_value_ranges: The ranges of the value's items that may be missing from the parent's
            transcript. Items that the transcript contains are skipped.
        first_appended_position: The log position of the first item that this transaction appends.
    """
    if any(start < first_appended_position or start >= ALIASES for start, _ in new_value_ranges):
        new_value_ranges = subtract_ranges(
            _replace_alias_positions_by_item_positions(log, new_value_ranges),
            merge_ranges(_replace_alias_positions_by_item_positions(log, transcript_ranges)),
        )
    return join_adjacent_ranges([*transcript_ranges, *drop_repeated_positions(new_value_ranges)])


def _replace_alias_positions_by_item_positions(log: ChannelLog, log_ranges: Ranges) -> Ranges:
    """Replace aliases in log ranges with the positions of their original items."""
    originals: Ranges = []
    for start, stop in log_ranges:
        if start < ALIASES:
            originals.append((start, stop))
        else:
            # Use `__getitem__` rather than `get`, so that an alias that is not cached raises
            # KeyError instead of being mistaken for an item.
            originals += ((o, o + 1) for o in map(log.origins.__getitem__, range(start, stop)))
    return join_adjacent_ranges(originals)


def cache_pending_writes(
    thread: Thread, request: TaskWrites, writes: list[Write], body: bytes
) -> None:
    """Cache the pending writes of a task if the next checkpoint may need them.

    The writes are cached if at least one of their values is a message, a list or a dict. The next
    checkpoint may store the message, or the elements of the list or dict, in a log.
    """
    if any(map(_may_be_stored_in_log, writes)):
        checkpoint = request.address.checkpoint_ns, request.address.checkpoint_id or ""
        tasks = thread.pending_writes.get(checkpoint, {})
        add_entry_and_evict_oldest(
            thread.pending_writes,
            checkpoint,
            {**tasks, request.task_id: (request.task_path, writes, body)},
        )


def _may_be_stored_in_log(write: Write) -> bool:
    """Return whether a log may store the value of a pending write, or the elements of the value."""
    ref = write[2]
    return ref[:1] == MESSAGE if isinstance(ref, bytes) else ref[0] in LOG_KIND_BY_INLINE_KIND

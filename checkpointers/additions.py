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
)
from perdure.checkpointers.delta import ChannelUpdate
from perdure.checkpointers.head_merge import Merge
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
    encode_ranges,
    group_short_log_ranges_for_merging,
    iter_positions,
    join_adjacent_ranges,
    merge_ranges,
    subtract_ranges,
)
from perdure.checkpointers.put import SplitValue, ValueToStore
from perdure.checkpointers.records import build_item_row
from perdure.checkpointers.values import pack
from perdure.storage.encryption import Seal
from perdure.storage.flow import OwnWrites, Row, Statement

LOG_KIND_BY_INLINE_KIND: Final = {LIST_HERE: LIST, DICT_HERE: DICT}
"""Maps the kind of an inline list or dict to the kind of the reference that replaces it.

An inline list or dict is replaced by a reference once all of its elements are in the log; see
`Additions.replace_write_by_reference`.
"""
_log = logging.getLogger("perdure")


@dataclass(slots=True)
class Additions:
    """The items and aliases that one transaction appends to the logs of a thread.

    Args:
        seal: Encrypts the items.
        thread_id: The thread.
        thread: The cached thread, with a log for each channel to which items are added.
        stored_at: The time, in seconds since 1970, that is recorded as the time at which the items
            were first stored.
        item_times: The times that are recorded instead of `stored_at`, by channel and item content.
            For example, an imported message has the time at which it was created.

    Attributes:
        positions_by_item: The log positions of items, by channel and content. `append_value_to_log`
            and `append_new_items_to_log` do not append an item that is in this dict, but use its
            position. The dict contains the appended items. If a task writes an item to a
            `DeltaChannel` and the log already contains the item, the dict contains that item too.
            In an erasure, it contains all stored items of the thread.
        items: The appended items, each as a tuple of log, position and content.
        aliases: The appended aliases, each as a tuple of the log, the position of the alias and the
            position of the original item.
        rows: The rows of the appended items and aliases, for the statement `add_item`.
    """

    seal: Seal
    thread_id: str
    thread: Thread
    stored_at: float
    item_times: dict[tuple[str, bytes], float] = field(default_factory=dict)
    positions_by_item: dict[tuple[str, bytes], int] = field(default_factory=dict)
    items: list[tuple[ChannelLog, int, bytes]] = field(default_factory=list)
    aliases: list[tuple[ChannelLog, int, int]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def set_channel_references(
        self,
        snapshot: Snapshot,
        values_to_store: dict[str, ValueToStore | None],
        parent: Snapshot | None,
        merge: Merge | None,
    ) -> None:
        """Set the checkpoint's channel references, and append the channels' new items to the logs.

        Args:
            snapshot: The new checkpoint, whose channel references this method sets.
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
                # If the graph does not define a channel, langgraph drops the channel's value but
                # keeps its version. Copy the dropped value from the parent checkpoint.
                if (
                    channel not in snapshot.references
                    and channel in parent.references
                    and parent.channel_versions.get(channel) == version
                ):
                    snapshot.inherit_channel(channel, parent)
        if merge is not None:
            merge.copy_head_channels_into(snapshot)

    def append_value_to_log(
        self, channel: str, split_value: SplitValue, snapshot: Snapshot, parent: Snapshot | None
    ) -> ValueReference:
        """Append the new items of a channel's value to the channel's log.

        For a list or dict, set two lists of log ranges in `snapshot`. One is for the channel's
        value, and one is for the channel's transcript, which also covers items that are no longer
        in the value. A value that is stored as a single item has no ranges in `snapshot`.

        Return the reference that the checkpoint stores for the value.
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
        kept_ranges = split_value.kept_ranges
        other_ranges = (
            self._append_parts_to_log(log, split_value.parts) if split_value.parts else []
        )
        ranges = kept_ranges or other_ranges
        if kept_ranges and other_ranges:
            ranges = join_adjacent_ranges([*kept_ranges, *other_ranges])
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
        # A channel's value can consist of the parent checkpoint's whole transcript followed by new
        # items. Such a value is equal to the new checkpoint's transcript, so the value and the
        # transcript get the same log ranges.
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
        ref = [split_value.kind, log.key, encode_ranges(value_ranges)]
        return [SNAPSHOT, ref] if split_value.is_snapshot else ref

    def _append_delta_update_to_log(
        self, channel: str, update: ChannelUpdate, snapshot: Snapshot, parent: Snapshot | None
    ) -> ValueReference:
        """Append the items of a `DeltaChannel` update to the channel's log.

        The update contains the items that tasks wrote to the channel.

        Set the channel's transcript in `snapshot`. If the channel's log ranges in the parent
        checkpoint are known, compute the new value's log ranges and set them in `snapshot`. Return
        the reference that the checkpoint stores for the channel's value.
        """
        log, change_positions = self.thread.logs_by_channel[channel], list[int | None]()
        first_new_position = log.next_position
        for change in update.changes:
            item, position = change.item, None
            if item is not None:
                position = None if change.is_new else log.find_item_position(item)
                if position is None:
                    position = self._append_item(log, item)
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
        # Do not add the items of the parent's value to the transcript. The parent's transcript
        # already contains their messages, but possibly in an earlier encoding, which is a different
        # item. Without this step, `_join_transcript_and_new_value_ranges`, which compares items,
        # would add such a message a second time.
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
        return [DELTA, [LIST, log.key, encode_ranges(stored_ranges)]]

    def replace_write_by_reference(self, snapshot: Snapshot, write: Write) -> Write:
        """Replace a pending write's value with a log reference, if possible.

        A value that is encoded as one item is replaced with a reference to the log item if
        `positions_by_item` contains the item. A list or dict is replaced with a reference to log
        ranges if the log position of every element is known. The log position of an element is
        known if the write refers to the element by a log range, or if `positions_by_item` contains
        the element. If the value cannot be replaced with a reference, or if `snapshot` has no log
        ranges for the channel, the write is returned unchanged.

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
                encode_ranges(join_adjacent_ranges(ranges)),
            ],
        ]

    def append_new_items_to_log(self, channel: str, parts: list[bytes | Range]) -> Ranges:
        """Append the new items in `parts` to a channel's log, and return the log ranges of `parts`.

        Each element of `parts` is either the content of an item or a range of existing log
        positions. An item that is in `positions_by_item` is not appended again.

        If the result would have more ranges than `compute_max_log_range_count` allows, short ranges
        are merged; see `_merge_short_ranges_if_too_many`.
        """
        log = self.thread.logs_by_channel[channel]
        return self._merge_short_ranges_if_too_many(log, self._append_parts_to_log(log, parts))

    def _append_parts_to_log(self, log: ChannelLog, parts: Iterable[bytes | Range]) -> Ranges:
        """Append the new items in `parts` to a log.

        Return the ranges of log positions at which the items in `parts` are stored. The ranges
        cover both the newly appended items and the items that were already in the log.

        Each element of `parts` is either the bytes of an item or a range of existing log positions.
        An item that is in `positions_by_item` is not appended again.
        """
        ranges = []
        for part in parts:
            if isinstance(part, bytes):
                position = self.positions_by_item.get((log.name, part))
                if position is None:
                    position = self._append_item(log, part)
                    self.positions_by_item[log.name, part] = position
                part = position, position + 1
            ranges.append(part)
        return join_adjacent_ranges(ranges)

    def _append_item(self, log: ChannelLog, item: bytes) -> int:
        """Append a new item to a log, and return the item's log position."""
        position = log.assign_next_position(item)
        self.rows.append(
            build_item_row(
                self.seal,
                self.thread_id,
                log.key,
                log.name,
                position,
                item,
                self.item_times.get((log.name, item), self.stored_at),
            )
        )
        self.items.append((log, position, item))
        return position

    def _merge_short_ranges_if_too_many(self, log: ChannelLog, ranges: Ranges) -> Ranges:
        """Merge short ranges if there are more log ranges than a value may have.

        An alias is a log entry that refers to an earlier item of the same log. If there are too
        many ranges, each group of at least two consecutive short ranges is replaced by one range of
        aliases. To do so, one alias for each item in the group is appended to the log, at
        consecutive positions. All other ranges are kept; see `group_short_log_ranges_for_merging`.

        Return the remaining ranges, which refer to the same items as `ranges`, in the same order.
        The function `compute_max_log_range_count` returns the maximum number of ranges.
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
            start, log_parts = log.next_alias, (self.seal, self.thread_id, log.key, log.name)
            for origin in iter_positions(_replace_alias_positions_by_item_positions(log, group)):
                self.rows.append(
                    build_item_row(*log_parts, log.next_alias, pack(origin), self.stored_at)
                )
                self.aliases.append((log, log.next_alias, origin))
                log.next_alias += 1
            limited.append((start, log.next_alias))
        return join_adjacent_ranges(limited)


@dataclass(slots=True)
class PlannedTransaction:
    """A planned transaction and the cache changes to apply after it commits.

    Attributes:
        cache: The cache of threads.
        own_writes: Counts the checkpointer's own transactions, to detect transactions that other
            writers have committed; see `OwnWrites`.
        thread_id: The thread.
        thread: The cached thread, or the thread that replaces it in the cache.
            `update_cache_after_commit` adds the new items, aliases and checkpoint to it.
        statements: The statements that are still to be executed. If the transaction was planned
            from the cached thread, the first statement fails if the stored thread has changed since
            it was cached.
        additions: The items that are appended to the logs.
        snapshot: The new checkpoint, or None.
        head: The head of the namespace after the checkpoint was stored. It may be a checkpoint
            other than `snapshot`. None if the transaction stores the writes of a task.
        reveals_overlap: Whether the stored checkpoint reveals that two runs of the thread overlap.
        written_row: A tuple of the checkpoint's namespace, the checkpoint's id, the task id, and
            the row that the transaction stores for the writes of this task. None if the transaction
            stores a checkpoint.
        is_thread_read: Whether `thread` was built from the database in this transaction. If so,
            `thread` replaces the cached thread after the commit.
        replaces_checkpoint: Whether the thread must be dropped from the cache after the commit.
            True if the transaction has rewritten a stored checkpoint or has made an earlier
            checkpoint the head again. Also True if the head contains merged values that the run may
            not have read yet.
        remaining_keys: The row keys that the transaction has reserved and not used.
        first_row: The first row that the first statement returned. If the transaction adds a
            checkpoint, the last column is true if the checkpoint already has pending writes.
            Pending writes can be stored before the checkpoint to which they belong.
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
    first_row: Row = ()

    def update_cache_after_commit(self) -> None:
        """Record in the cache what the committed transaction has stored.

        If this transaction was the first to reveal that runs of the thread overlap, log a warning.
        """
        cache = self.cache
        if self.additions is not None and self.snapshot is not None and self.head is not None:
            for log, position, item in self.additions.items:
                self.thread.size_bytes += log.add_item_and_count_bytes(position, item)
                log.planned_count -= 1
            for log, position, origin in self.additions.aliases:
                log.origins[position] = origin
            self.thread.record_checkpoint_if_newest(self.snapshot)
            # If the new head already has pending writes, they are read from the database when they
            # are needed.
            if self.head.snapshot is self.snapshot:
                self.head.write_rows = None if self.first_row[-1] else {}
            self.head.write_counts_except_own, self.head.is_uncommitted = (
                self.own_writes.write_counts_except_own,
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
    """Return a transcript's log ranges, followed by the ranges of new items in a channel's value.

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
    """Resolve the aliases in log ranges.

    An alias is a log entry that refers to an earlier item of the same log. Each alias's log
    position is replaced with the log position of the item that the alias refers to.
    """
    originals: Ranges = []
    for start, stop in log_ranges:
        if start < ALIASES:
            originals.append((start, stop))
        else:
            # Use `__getitem__`, which raises KeyError if an alias is not cached. With
            # `get(position, position)`, the alias position would be mistaken for the position of an
            # item.
            originals += ((o, o + 1) for o in map(log.origins.__getitem__, range(start, stop)))
    return join_adjacent_ranges(originals)

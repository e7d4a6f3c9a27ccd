"""What a write adds to the logs of its thread, and what is kept of that once it is committed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from perdure.checkpointers.cache import (
    Cache,
    ChannelLog,
    Head,
    Snapshot,
    Thread,
    Write,
    keep_recent,
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
    count_positions,
    drop_repeats,
    flatten_ranges,
    group_ranges,
    iter_positions,
    join_ranges,
    max_ranges,
    merge_ranges,
    subtract_ranges,
)
from perdure.checkpointers.merge import Merge
from perdure.checkpointers.put import Node, SplitValue, TaskWrites
from perdure.checkpointers.records import content_hash, item_associated_data, row_key
from perdure.checkpointers.values import pack
from perdure.storage.database import Watch
from perdure.storage.encryption import Seal
from perdure.storage.flow import NamedSQL, Row, Statement

LOG_KIND_BY_INLINE_KIND: Final = {LIST_HERE: LIST, DICT_HERE: DICT}
"""Kinds of references that have their parts in them, and of those that point into a log."""
_log = logging.getLogger("perdure")


@dataclass(slots=True)
class Additions:
    """The items and aliases that one transaction appends to the logs of a thread.

    Args:
        sql: The statements, by name.
        seal: Encrypts what is written.
        thread_id: Whose logs they are.
        thread: What is kept of it, with a log for each channel of which something is added.
        stored_at: The time of first storage of the items, in seconds since 1970.
        times: The times of items that differ from `stored_at`, by channel and content.

    Attributes:
        placed: Where the items stand that were new to the plan, by channel and content.
        items, aliases: What is appended: log, position, and item or origin.
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

    def fill_snapshot(
        self,
        snapshot: Snapshot,
        nodes: dict[str, Node | None],
        parent: Snapshot | None,
        merge: Merge | None,
    ) -> None:
        """Give a checkpoint its channels: what is new, is as in the parent, or is taken over."""
        if parent is not None:
            snapshot.transcript.update(parent.transcript)
        for channel, node in nodes.items():
            if isinstance(node, SplitValue):
                snapshot.references[channel] = self.add_value(channel, node, snapshot, parent)
            elif node is not None:
                snapshot.references[channel] = node
            elif parent is not None:
                snapshot.inherit_channel(channel, parent)
        if parent is not None:
            for channel, version in snapshot.channel_versions.items():
                # a graph that does not know a channel carries its version on, not its value
                if channel not in snapshot.references and parent.has_version(channel, version):
                    snapshot.inherit_channel(channel, parent)
        if merge is not None:
            merge.apply(snapshot)

    def add_value(
        self, channel: str, node: SplitValue, snapshot: Snapshot, parent: Snapshot | None
    ) -> Any:
        """The reference of a channel's value; what is new in it is added to the log."""
        if node.update is not None:
            ref = self._add_update(channel, node.update, snapshot, parent)
            if node.undivided is None:
                return ref
            snapshot.ranges.pop(channel, None)
            if isinstance(node.undivided, bytes):
                return node.undivided
            return self.add_value(channel, node.undivided, snapshot, parent)
        log = self.thread.logs_by_channel[channel]
        first = log.next_position
        kept, rest = node.kept_ranges, self._place_parts(log, node.parts) if node.parts else []
        ranges = join_ranges([*kept, *rest]) if rest else kept
        if node.kind == ITEM:
            item = [ITEM, log.key, ranges[0][0]]
            return [SNAPSHOT, item] if node.is_snapshot else item
        before = parent.transcript.get(channel) if parent is not None else None
        if before is None or before[0] != log.key:
            said = drop_repeats(ranges)
        elif node.repeated_items:
            repeated = [
                place
                for item in node.repeated_items
                if (place := log.find_position(item)) is not None
            ]
            new = subtract_ranges(rest, merge_ranges((place, place + 1) for place in repeated))
            said = _extend_transcript(log, before[1], new, first)
        elif before[1] == kept and rest in ([], [(first, log.next_position)]):  # it only grew
            said = ranges
        else:
            said = _extend_transcript(log, before[1], rest, first)
        few = self._limit_ranges(log, ranges)
        snapshot.ranges[channel] = (log.key, few)
        snapshot.transcript[channel] = (
            log.key,
            few if said == ranges else self._limit_ranges(log, said),
        )
        ref = [node.kind, log.key, flatten_ranges(few)]
        return [SNAPSHOT, ref] if node.is_snapshot else ref

    def _add_update(
        self, channel: str, update: ChannelUpdate, snapshot: Snapshot, parent: Snapshot | None
    ) -> Any:
        """Add the writes to a `DeltaChannel` to its log, and return the channel's reference."""
        log, places = self.thread.logs_by_channel[channel], list[int | None]()
        first = log.next_position
        for entry in update.entries:
            item, position = entry.item, None
            if item is not None:
                position = None if entry.is_new else log.find_position(item)
                if position is None:
                    position = log.plan_item(item)
                    self._add_row(log, position, content_hash(self.seal, log.key, item), item)
                    self.items.append((log, position, item))
                self.positions_by_item[channel, item] = position
            places.append(position)
        transcript_places = [
            place
            for entry, place in zip(update.entries, places, strict=True)
            if place is not None and entry.item not in update.repeated
        ]
        rest = join_ranges((place, place + 1) for place in transcript_places)
        if update.base:  # the transcript already has these items, perhaps in another form
            rest = subtract_ranges(rest, merge_ranges(_origin_ranges(log, update.base)))
        before = parent.transcript.get(channel) if parent is not None else None
        said = _extend_transcript(log, before[1] if before else [], rest, first)
        snapshot.transcript[channel] = (log.key, self._limit_ranges(log, said))
        if update.base is None:
            return [DELTA, update.kind]
        held = update.value_ranges(places)
        few = snapshot.transcript[channel][1] if held == said else self._limit_ranges(log, held)
        snapshot.ranges[channel] = (log.key, few)
        return [DELTA, [LIST, log.key, flatten_ranges(few)]]

    def replace_by_reference(self, snapshot: Snapshot, write: Write) -> Write:
        """A write that led to a checkpoint, pointing into the log where that holds all of it."""
        index, channel, ref = write
        held = snapshot.ranges.get(channel) or snapshot.transcript.get(channel)
        if held is None:
            return write
        if isinstance(ref, bytes):
            position = self.positions_by_item.get((channel, ref))
            return write if position is None else [index, channel, [ITEM, held[0], position]]
        ranges = []
        for element in ref[1] if ref[0] in LOG_KIND_BY_INLINE_KIND else [b""]:
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
            [LOG_KIND_BY_INLINE_KIND[ref[0]], held[0], flatten_ranges(join_ranges(ranges))],
        ]

    def append_parts(self, channel: str, parts: list[bytes | Range]) -> Ranges:
        """The positions of parts after the new ones are appended, in few ranges."""
        log = self.thread.logs_by_channel[channel]
        return self._limit_ranges(log, self._place_parts(log, parts))

    def _place_parts(self, log: ChannelLog, parts: Iterable[bytes | Range]) -> Ranges:
        """The positions of parts after the new ones are appended, in order."""
        out = []
        for part in parts:
            if isinstance(part, bytes):
                position = self.positions_by_item.get((log.name, part))
                if position is None:
                    position = self.positions_by_item[log.name, part] = log.plan_item(part)
                    self._add_row(log, position, content_hash(self.seal, log.key, part), part)
                    self.items.append((log, position, part))
                part = position, position + 1
            out.append(part)
        return join_ranges(out)

    def _add_row(self, log: ChannelLog, position: int, hashed: int, data: bytes) -> None:
        body = self.seal.seal(data, item_associated_data(self.thread_id, log.name, position))
        stored_at = self.item_times.get((log.name, data), self.stored_at)
        self._rows.append((row_key(log.key, position), hashed, stored_at, body))

    def _limit_ranges(self, log: ChannelLog, ranges: Ranges) -> Ranges:
        """The same items in no more ranges than `limit` allows, scattered ones as aliases."""
        if len(ranges) <= MIN_RANGE_LIMIT or len(ranges) <= max_ranges(count_positions(ranges)):
            return ranges
        out: Ranges = []
        for group in group_ranges(ranges):
            if len(group) == 1:
                out += group
                continue
            start = log.next_alias
            for origin in iter_positions(_origin_ranges(log, group)):
                self._add_row(log, log.next_alias, 0, pack(origin))
                self.aliases.append((log, log.next_alias, origin))
                log.next_alias += 1
            out.append((start, log.next_alias))
        return join_ranges(out)

    def build_statements(self) -> list[Statement]:
        """The statements that write all of it."""
        return (
            [Statement(self.sql["add_item"], self._rows, execute_many=True)] if self._rows else []
        )

    def cache_items(self) -> None:
        """Have at hand what is written now."""
        for log, position, item in self.items:
            self.thread.size_bytes += log.add_item(position, item)
            log.planned_count -= 1
        for log, position, origin in self.aliases:
            log.origins[position] = origin


@dataclass(slots=True)
class Commit:
    """A transaction: what it writes, and what is kept of the thread after it.

    Attributes:
        statements: The first finds out whether the thread is as it was kept.
        snapshot: The checkpoint that is put, if one is.
        head: The head of its namespace after it, which is that checkpoint, or stays another.
        overlaps: Whether the put reveals that two runs of the thread overlap.
        written: What a task wrote: namespace and id of the checkpoint, task, row.
        fresh: Whether `thread` was read in this transaction: it is kept after it.
        replaced: Whether a checkpoint of it has other content now: nothing is kept.
        keys: What is left of those that this transaction asked for.
    """

    cache: Cache
    watch: Watch
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

    def set_write_rows(self, rows: list[Row]) -> None:
        """See in the first statement's row whether tasks wrote before the checkpoint was put."""
        if self.head is not None and self.head.snapshot is self.snapshot:
            self.head.write_rows = None if rows[0][-1] else {}

    def update_cache(self) -> None:
        """Have at hand what is stored now."""
        cache = self.cache
        if self.additions is not None:
            self.additions.cache_items()
        if self.snapshot is not None:
            self.thread.note_newest_checkpoint(self.snapshot)
        if self.head is not None:
            self.head.epoch, self.head.is_uncommitted = self.watch.epoch, False
            cache.mark_used(self.thread_id)
        if self.written_row is not None:
            self._cache_written_row(*self.written_row)
        if self.remaining_keys:
            cache.keys.refill(self.remaining_keys)
        if self.replaces_checkpoint:
            cache.drop_thread(self.thread_id)
        elif self.is_thread_read:
            cache.replace_thread(self.thread_id, self.thread)
        if (
            self.reveals_overlap
            and self.snapshot is not None
            and cache.note_overlap(self.thread_id)
        ):
            _log.warning(
                "thread %r: two runs overlapped, as checkpoint %s shows; one of them is now a "
                "branch, which the next turn does not see. To run one turn after the other, hold "
                "saver.lock(thread_id). This is logged once per thread",
                *(self.thread_id, self.snapshot.checkpoint_id),
            )

    def _cache_written_row(self, ns: str, uid: str, task: str, row: Row) -> None:
        """Have a pending write at hand, if it is one of what is the head by now."""
        thread = self.cache.get_thread(self.thread_id)
        head = thread.heads.get(ns) if thread is not None else None
        if head is None or head.snapshot is None or head.snapshot.checkpoint_id != uid:
            return
        if head.write_rows is not None:
            head.write_rows[task] = row


def _extend_transcript(log: ChannelLog, before: Ranges, rest: Ranges, first: int) -> Ranges:
    """What was said before, then what is new in the rest of a value, in order.

    Positions from `first` on are those of items appended just now.
    """
    if any(start < first or start >= ALIASES for start, _ in rest):
        rest = subtract_ranges(_origin_ranges(log, rest), merge_ranges(_origin_ranges(log, before)))
    return join_ranges([*before, *drop_repeats(rest)])


def _origin_ranges(log: ChannelLog, ranges: Ranges) -> Ranges:
    """The first positions of the items of ranges."""
    out: Ranges = []
    for start, stop in ranges:
        if start < ALIASES:
            out.append((start, stop))
        else:
            # one that is not known must not be taken for an item: see `CheckpointReader.resolve`
            out += ((o, o + 1) for o in map(log.origins.__getitem__, range(start, stop)))
    return join_ranges(out)


def cache_pending_writes(
    thread: Thread, request: TaskWrites, writes: list[Write], body: bytes
) -> None:
    """Cache the writes of a task if the next checkpoint may store some of them in a log."""
    if any(map(_may_enter_log, writes)):
        at = request.address.checkpoint_ns, request.address.checkpoint_id or ""
        tasks = thread.pending_writes.get(at, {})
        keep_recent(
            thread.pending_writes, at, {**tasks, request.task_id: (request.task_path, writes, body)}
        )


def _may_enter_log(write: Write) -> bool:
    """Return whether the next checkpoint may store items of a write in a log."""
    ref = write[2]
    return ref[:1] == MESSAGE if isinstance(ref, bytes) else ref[0] in LOG_KIND_BY_INLINE_KIND

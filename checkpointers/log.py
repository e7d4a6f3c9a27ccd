"""The log: each item is appended once, and manifests refer to its position."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from perdure.checkpointers.cache import End, Snapshot, Thread, log_at_hand
from perdure.checkpointers.manifest import (
    ALIASES,
    ITEM,
    Range,
    Ranges,
    count,
    covered,
    flat,
    joined,
    limit,
    missing,
    once,
    positions,
    regrouped,
)
from perdure.checkpointers.planner import New, Node, Split
from perdure.checkpointers.records import content_hash, item_place, log_spans, place
from perdure.checkpointers.values import pack
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Statement


@dataclass(slots=True)
class Appender:
    """The additions of one put to the logs of a thread: collected, then written together.

    Args:
        sql: The statements, by name.
        seal: Encrypts what is written.
        thread_id: Whose logs they are; `thread` is the thread's key.
        seq: The thread's counter of puts, as read in this transaction.
        known: What is kept of the thread, if it is true still.

    Attributes:
        ends: Where the thread's logs go on, by channel.
        placed: Where the items stand that were new to the plan, by channel and stored form.
        added: The items appended: channel, position, full form.
        aliases: The aliases appended: channel, position, origin.
    """

    sql: dict[str, str]
    seal: Seal
    thread_id: str
    thread: int
    seq: int
    known: Thread | None
    ends: dict[str, End] = field(default_factory=dict)
    placed: dict[tuple[str, bytes], int] = field(default_factory=dict)
    added: list[tuple[str, int, bytes]] = field(default_factory=list)
    aliases: list[tuple[str, int, int]] = field(default_factory=list)
    _hashes: dict[tuple[str, bytes], int] = field(default_factory=dict)
    _rows: list[tuple[int, int, bytes]] = field(default_factory=list)

    def prepare(self, nodes: dict[str, Node | None]) -> Flow[None]:
        """Learn what the additions depend on: the ends of the logs, and what they hold already."""
        split = {c: node.parts for c, node in nodes.items() if isinstance(node, Split)}
        if not split:
            return
        yield from self.find_ends(split)
        asked = [hashed for c, parts in split.items() for hashed in self._unknown(c, parts)]
        if not asked:
            return
        names = {end.key: channel for channel, end in self.ends.items()}
        for key, body in (yield Statement(self.sql["same_hashes"], (json.dumps(asked),))):
            channel, position = names.get(key >> 32), key & 0xFFFFFFFF
            if channel is not None and position < ALIASES:
                stored = self.seal.open(body, item_place(self.thread_id, channel, position))
                if (channel, stored) in self._hashes:
                    self.placed.setdefault((channel, stored), position)

    def _unknown(self, channel: str, parts: list[New | Range]) -> Iterator[int]:
        """The hashes of items that the database may have."""
        end, log = self.ends[channel], log_at_hand(self.known, channel)
        for part in parts:
            if not isinstance(part, New):
                continue
            at = channel, part.stored
            known = log.find(part.full)
            if known is not None:  # read since it was planned
                self.placed[at] = known
            elif at not in self._hashes:
                self._hashes[at] = content_hash(self.seal, end.key, part.stored)
                if len(log.items) != end.next:  # else all is at hand
                    yield self._hashes[at]

    def find_ends(self, channels: Iterable[str]) -> Flow[None]:
        """Learn where logs go on; a channel's first item makes its log."""
        if self.known is not None and self.known.seq == self.seq:
            self.ends = {log.name: replace(log.end) for log in self.known.named.values()}
        else:
            rows = yield Statement(self.sql["thread_logs"], (self.thread,))
            self.ends = {
                name: End(key, *(stop for _, stop in log_spans(*last))) for key, name, *last in rows
            }
        for channel in channels:
            if channel not in self.ends:
                rows = yield Statement(self.sql["new_log"], (self.thread, channel))
                self.ends[channel] = End(rows[0][0])

    # -- what the plan's nodes become

    def resolve(self, channel: str, node: Node, snapshot: Snapshot, parent: Snapshot | None) -> Any:
        """The reference of a channel's value; what is new in it is added to the log."""
        if not isinstance(node, Split):
            return node
        end = self.ends[channel]
        first = end.next
        kept = self._place(channel, node.parts[: node.kept])
        rest = self._place(channel, node.parts[node.kept :])
        ranges = joined([*kept, *rest])
        if node.kind == ITEM:
            return [ITEM, end.key, ranges[0][0]]
        before = parent.said.get(channel) if parent is not None else None
        if before is None or before[0] != end.key:
            said = once(ranges)
        else:
            said = self._said(channel, before[1], rest, first)
        few = self._few(channel, ranges)
        snapshot.ranges[channel] = (end.key, few)
        snapshot.said[channel] = (end.key, few if said == ranges else self._few(channel, said))
        return [node.kind, end.key, flat(few)]

    def append(self, channel: str, parts: list[New | Range]) -> Ranges:
        """The positions of parts after the new ones are appended, in few ranges."""
        return self._few(channel, self._place(channel, parts))

    def _place(self, channel: str, parts: Iterable[New | Range]) -> Ranges:
        """The positions of parts after the new ones are appended, in order."""
        return joined(
            self._position(channel, part) if isinstance(part, New) else part for part in parts
        )

    def _position(self, channel: str, part: New) -> Range:
        at = channel, part.stored
        position = self.placed.get(at)
        if position is None:
            end = self.ends[channel]
            position = self.placed[at] = end.next
            end.next += 1
            hashed = self._hashes.get(at)
            if hashed is None:
                hashed = content_hash(self.seal, end.key, part.stored)
            self._add(channel, position, hashed, part.stored)
            self.added.append((channel, position, part.full))
        return position, position + 1

    def _add(self, channel: str, position: int, hashed: int, stored: bytes) -> None:
        body = self.seal.seal(stored, item_place(self.thread_id, channel, position))
        self._rows.append((place(self.ends[channel].key, position), hashed, body))

    def _said(self, channel: str, before: Ranges, rest: Ranges, first: int) -> Ranges:
        """What was said before, then what is new in the rest of a value, in order.

        Positions from `first` on are those of items appended just now.
        """
        if any(start < first or start >= ALIASES for start, _ in rest):
            have = covered(self._origins(channel, before))
            rest = missing(self._origins(channel, rest), have)
        return joined([*before, *once(rest)])

    def _origins(self, channel: str, ranges: Ranges) -> Ranges:
        """The first positions of the items of ranges."""
        log = log_at_hand(self.known, channel)
        out: Ranges = []
        for start, stop in ranges:
            if start < ALIASES:
                out.append((start, stop))
            else:
                out += ((o, o + 1) for o in map(log.origin, range(start, stop)))
        return joined(out)

    def _few(self, channel: str, ranges: Ranges) -> Ranges:
        """The same items in no more ranges than `limit` allows, scattered ones as aliases."""
        if len(ranges) <= limit(count(ranges)):
            return ranges
        end = self.ends[channel]
        out: Ranges = []
        for group in regrouped(ranges):
            if len(group) == 1:
                out += group
                continue
            start = end.next_alias
            for origin in positions(self._origins(channel, group)):
                self._add(channel, end.next_alias, 0, pack(origin))
                self.aliases.append((channel, end.next_alias, origin))
                end.next_alias += 1
            out.append((start, end.next_alias))
        return joined(out)

    def statements(self) -> list[Statement]:
        """The statements that write all of it."""
        return [Statement(self.sql["add_item"], self._rows, many=True)] if self._rows else []

    def take_over(self, thread: Thread, seq: int) -> None:
        """Keep what was written, once it is committed."""
        for channel, end in self.ends.items():
            thread.log(end.key, channel).end = end
        for channel, position, full in self.added:
            thread.add_items(thread.named[channel], [(position, full)])
        for channel, position, origin in self.aliases:
            thread.named[channel].origins[position] = origin
        if self.ends or thread.seq == self.seq:
            thread.seq = seq

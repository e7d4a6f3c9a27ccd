"""The log: each item is appended once, and manifests refer to its position."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from perdure.checkpointers.cache import ChannelLog, Snapshot, Thread
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
from perdure.checkpointers.planner import Many, New, Node, One
from perdure.checkpointers.records import content_hash, item_place, log_spans, place
from perdure.checkpointers.values import pack
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Statement


@dataclass(slots=True)
class End:
    """The end of a log: its key, the positions of the next item and the next alias."""

    key: int
    next: int
    next_alias: int


@dataclass(slots=True)
class Appender:
    """The additions of one put to the logs of a thread: collected, then written together.

    Args:
        sql: The statements, by name.
        seal: Encrypts what is written.
        thread_id: Whose logs they are.
        thread: The thread's key.
        seq: Its counter of puts, as read in this transaction.
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
        new: dict[str, list[New]] = {}
        for channel, node in nodes.items():
            if isinstance(node, Many):
                new[channel] = [part for part in node.parts if isinstance(part, New)]
            elif isinstance(node, One):
                new[channel] = [node.item] if isinstance(node.item, New) else []
        if not new:
            return
        yield from self.find_ends(new)
        unknown: list[int] = []
        for channel, parts in new.items():
            unknown += self._unknown(channel, parts)
        if unknown:
            yield from self._find(unknown)

    def _unknown(self, channel: str, parts: list[New]) -> Iterator[int]:
        """The hashes of items that the database may have."""
        end, log = self.ends[channel], self._log(channel)
        for part in parts:
            at = channel, part.stored
            known = log.find(part.full) if log is not None else None
            if known is not None:  # read since it was planned
                self.placed[at] = known
            elif at not in self._hashes:
                self._hashes[at] = content_hash(self.seal, end.key, part.stored)
                if end.next and (log is None or not _complete(log, end)):
                    yield self._hashes[at]

    def find_ends(self, channels: Iterable[str]) -> Flow[None]:
        """Learn where logs go on; a channel's first item makes its log."""
        if self.known is not None and self.known.seq == self.seq:
            logs = self.known.named.values()
            self.ends = {log.name: End(log.key, log.next, log.next_alias) for log in logs}
        else:
            rows = yield Statement(self.sql["thread_logs"], (self.thread,))
            self.ends = {
                name: End(key, *(stop for _, stop in log_spans(*last))) for key, name, *last in rows
            }
        for channel in channels:
            if channel not in self.ends:
                rows = yield Statement(self.sql["new_log"], (self.thread, channel))
                self.ends[channel] = End(rows[0][0], 0, ALIASES)

    def _log(self, channel: str) -> ChannelLog | None:
        return self.known.named.get(channel) if self.known is not None else None

    def _find(self, hashes: list[int]) -> Flow[None]:
        """The new items that the database has already, with their positions."""
        names = {end.key: channel for channel, end in self.ends.items()}
        for key, body in (yield Statement(self.sql["same_hashes"], (json.dumps(hashes),))):
            channel, position = names.get(key >> 32), key & 0xFFFFFFFF
            if channel is None or position >= ALIASES:
                continue
            at = channel, self.seal.open(body, item_place(self.thread_id, channel, position))
            if at in self._hashes and at not in self.placed:
                self.placed[at] = position

    # -- what the plan's nodes become

    def resolve(self, channel: str, node: Node, snapshot: Snapshot, parent: Snapshot | None) -> Any:
        """The reference of a channel's value; what is new in it is added to the log."""
        if isinstance(node, One):
            return [ITEM, self.ends[channel].key, self._stand(channel, [node.item])[0][0]]
        if not isinstance(node, Many):
            return node
        end = self.ends[channel]
        first = end.next
        kept = self._stand(channel, node.parts[: node.kept])
        rest = self._stand(channel, node.parts[node.kept :])
        ranges = joined([*kept, *rest])
        before = parent.said.get(channel) if parent is not None else None
        if before is None or before[0] != end.key:
            said = once(ranges)
        else:
            said = self._said(channel, before[1], rest, first)
        few = self._few(channel, ranges)
        snapshot.ranges[channel] = (end.key, few)
        snapshot.said[channel] = (end.key, few if said == ranges else self._few(channel, said))
        return [node.kind, end.key, flat(few)]

    def _stand(self, channel: str, parts: Iterable[New | Range]) -> Ranges:
        """The positions of parts after the new ones are appended, in order."""
        return joined(
            part if not isinstance(part, New) else self._range(channel, part) for part in parts
        )

    def _range(self, channel: str, part: New) -> Range:
        at = channel, part.stored
        position = self.placed.get(at)
        if position is None:
            end = self.ends[channel]
            position = self.placed[at] = end.next
            end.next += 1
            self._add(channel, position, self._hashes.get(at), part.stored)
            self.added.append((channel, position, part.full))
        return position, position + 1

    def _add(self, channel: str, position: int, hashed: int | None, stored: bytes) -> None:
        end = self.ends[channel]
        body = self.seal.seal(stored, item_place(self.thread_id, channel, position))
        if hashed is None:
            hashed = content_hash(self.seal, end.key, stored)
        self._rows.append((place(end.key, position), hashed, body))

    def _said(self, channel: str, before: Ranges, rest: Ranges, first: int) -> Ranges:
        """What was said before, then what is new in the rest of a value, in order.

        Positions from `first` on are those of items appended just now.
        """
        if any(start < first or start >= ALIASES for start, _ in rest):
            have = covered(self._origins(channel, before))
            rest = missing(self._origins(channel, rest), have)
        return joined([*before, *once(rest)])

    def _origin(self, channel: str, position: int) -> int:
        log = self._log(channel)
        return log.origin(position) if log is not None else position

    def _origins(self, channel: str, ranges: Ranges) -> Ranges:
        """The first positions of the items of ranges."""
        out: Ranges = []
        for each in ranges:
            if each[0] < ALIASES:
                out.append(each)
            else:
                out += ((o, o + 1) for o in (self._origin(channel, p) for p in range(*each)))
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
            for position in positions(group):
                origin = self._origin(channel, position)
                self._add(channel, end.next_alias, 0, pack(origin))
                self.aliases.append((channel, end.next_alias, origin))
                end.next_alias += 1
            out.append((start, end.next_alias))
        return joined(out)

    def append(self, channel: str, parts: list[New | Range]) -> Ranges:
        """The positions of parts after the new ones are appended, in few ranges."""
        return self._few(channel, self._stand(channel, parts))

    def statements(self) -> list[Statement]:
        """The statements that write all of it."""
        return [Statement(self.sql["add_item"], self._rows, many=True)] if self._rows else []

    def take_over(self, thread: Thread, seq: int) -> None:
        """Keep what was written, once it is committed."""
        for channel, end in self.ends.items():
            log = thread.log(end.key, channel)
            log.next, log.next_alias = end.next, end.next_alias
        for channel, position, full in self.added:
            thread.add_items(thread.named[channel], [(position, full)])
        for channel, position, origin in self.aliases:
            thread.named[channel].origins[position] = origin
        if self.ends or thread.seq == self.seq:
            thread.seq = seq


def _complete(log: ChannelLog, end: End) -> bool:
    """Whether everything in a log is at hand."""
    return len(log.items) == end.next

"""The log: items are appended to it, each once, and manifests refer to where they stand."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from perdure.checkpointers.manifest import (
    ITEM,
    MAP,
    Range,
    Ranges,
    cut_blocks,
    flat,
    joined,
    positions,
)
from perdure.checkpointers.memo import Memo, Snapshot, Thread
from perdure.checkpointers.packing import pack
from perdure.checkpointers.plan import Inline, Many, Map, New, Node, One
from perdure.checkpointers.reading import BLOCKS
from perdure.checkpointers.records import content_hash, item_place, written
from perdure.checkpointers.schema import place
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Statement

_log = logging.getLogger("perdure")


@dataclass(slots=True)
class Written:
    """What a flow wrote, for the memo to take over once it is committed."""

    thread_id: str
    ns: str
    key: int
    swept: int
    line: int
    head: int
    pinned: bool
    seq: int
    known: Thread | None = None
    forked: str | None = None
    snapshot: Snapshot | None = None
    lanes: dict[str, int] = field(default_factory=dict)
    items: list[tuple[str, int, bytes]] = field(default_factory=list)
    added: int = 0
    size: int = 0

    def take_over(self, memo: Memo) -> None:
        """Remember what was written, and say if it is a branch nobody asked for."""
        if self.forked is not None:
            _log.warning(
                "thread %r: another run moved on while this one was at work; its checkpoint %s is "
                "a branch (on_conflict='wait' lets runs wait for each other)",
                self.thread_id,
                self.forked,
            )
        thread = memo.thread(self.thread_id, self.key, self.swept)
        thread.lines[self.ns] = self.line
        for name, key in self.lanes.items():
            thread.lane(key, name)
        for name, position, stored in self.items:
            thread.add_items(thread.lane(self.lanes[name], name), [(position, stored)])
        if self.snapshot is not None:
            thread.remember(self.ns, self.snapshot)


@dataclass(slots=True)
class Log:
    """The flows that append.

    Args:
        sql: The statements, by name.
        seal: Encrypts what is written.
    """

    sql: dict[str, str]
    seal: Seal

    def resolve(
        self, out: Written, node: Node, snapshot: Snapshot | None, channel: str
    ) -> Flow[Any]:
        """A plan's reference, once its new items are in the log."""
        match node:
            case Inline(stored):
                return stored
            case Map(entries):
                refs = {}
                for key, inner in entries.items():
                    refs[key] = yield from self.resolve(out, inner, None, key)
                return [MAP, refs]
            case One(lane, item):
                ranges = yield from self.append(out, lane, [item])
                return [ITEM, out.lanes[lane], ranges[0][0]]
            case Many(kind, lane, parts):
                ranges = yield from self.append(out, lane, parts)
                if snapshot is not None:
                    snapshot.ranges[channel] = (out.lanes[lane], ranges)
                return [kind, out.lanes[lane], (yield from self.written_ranges(out, ranges))]

    def written_ranges(self, out: Written, ranges: Ranges) -> Flow[list[Any]]:
        """Ranges as a manifest holds them; many of them as blocks, each an item of its own."""
        blocks, rest = cut_blocks(ranges)
        if not blocks:
            return written(rest, [])
        items = [New(pack(flat(block))) for block in blocks]
        found = yield from self.append(out, BLOCKS, list(items))
        return written(rest, [out.lanes[BLOCKS], *positions(found)])

    def append(self, out: Written, name: str, parts: list[New | Range]) -> Flow[Ranges]:
        """Where the parts of a lane stand, in order, after the new ones have been appended."""
        lane = yield from self._lane(out, name)
        new = {part.stored for part in parts if isinstance(part, New)}
        if not new:
            return joined(part for part in parts if not isinstance(part, New))
        found = yield from self._find(out, lane, name, new)
        fresh = list(
            dict.fromkeys(p.stored for p in parts if isinstance(p, New) and p.stored not in found)
        )
        if fresh:
            rows = yield Statement(self.sql["take_positions"], (len(fresh), lane))
            first = rows[0][0] - len(fresh)
            found |= {stored: first + i for i, stored in enumerate(fresh)}
            yield from self._insert(out, lane, name, first, fresh)
        return joined(
            part if not isinstance(part, New) else (found[part.stored], found[part.stored] + 1)
            for part in parts
        )

    def _lane(self, out: Written, name: str) -> Flow[int]:
        key = out.lanes.get(name)
        if key is None:
            rows = yield Statement(self.sql["find_lane"], (out.key, name))
            if not rows:
                rows = yield Statement(self.sql["new_lane"], (out.key, name))
            key = out.lanes[name] = rows[0][0]
        return key

    def _find(
        self, out: Written, lane: int, name: str, wanted: set[bytes]
    ) -> Flow[dict[bytes, int]]:
        """Which of these contents the lane has, and where."""
        found: dict[bytes, int] = {}
        known = out.known.lanes.get(lane) if out.known else None
        unknown: dict[int, list[bytes]] = {}
        for stored in wanted:
            position = known.find(stored) if known else None
            if position is None:
                unknown.setdefault(content_hash(self.seal, lane, stored), []).append(stored)
            else:
                found[stored] = position
        if not unknown:
            return found
        if len(unknown) == 1:
            rows = yield Statement(self.sql["same_hash"], tuple(unknown))
        else:
            rows = yield Statement(self.sql["same_hashes"], (json.dumps(list(unknown)),))
        for key, hashed, body in rows:
            position = key & 0xFFFFFFFF
            if key >> 32 == lane:
                stored = self.seal.open(body, item_place(out.thread_id, name, position))
                if stored in unknown[hashed]:
                    found[stored] = position
                    out.items.append((name, position, stored))
        return found

    def _insert(
        self, out: Written, lane: int, name: str, first: int, fresh: list[bytes]
    ) -> Flow[None]:
        rows = []
        for position, stored in enumerate(fresh, first):
            body = self.seal.seal(stored, item_place(out.thread_id, name, position))
            rows.append((place(lane, position), content_hash(self.seal, lane, stored), body))
            out.size += len(body)
            out.added += 1
            out.items.append((name, position, stored))
        yield Statement(self.sql["add_item"], rows, many=True)

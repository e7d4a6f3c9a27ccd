"""Deleting: threads, runs, checkpoints, and the items nothing refers to any more.

Garbage is reachability: an item goes when no checkpoint, pending write or history of its thread
refers to it. All of it runs in the writer's transactions, so no put can come between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.checkpointers.base import PruneReport, Retention
from perdure.checkpointers.manifest import (
    Ranges,
    covered,
    missing,
    references,
    unflat,
)
from perdure.checkpointers.reading import Reader
from perdure.checkpointers.records import (
    checkpoint_place,
    pack_snapshot,
    tags_of,
    unpack_id,
    unpack_writes,
    writes_place,
)
from perdure.checkpointers.schema import place, span
from perdure.errors import CorruptRecord
from perdure.storage.flow import Flow, Row, Statement

Keep = Callable[[list["Kept"]], set[int]]


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint of a line, as retention rules look at it."""

    key: int
    parent_key: int | None
    put_at: float
    metadata: Mapping[str, Any]
    channels: frozenset[str]
    is_head: bool


@dataclass(slots=True)
class Pruner:
    """The flows that delete.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
    """

    sql: dict[str, str]
    reader: Reader

    # -- whole threads

    def delete_thread(self, thread_id: str) -> Flow[PruneReport]:
        """Remove a thread and all that belongs to it. An unknown one is no error."""
        rows = yield Statement(self.sql["one_thread"], (thread_id,))
        if not rows:
            return PruneReport()
        thread, _, checkpoints, items, *_ = rows[0]
        lines = yield Statement(self.sql["thread_lines"], (thread,))
        for line, ns, _ in lines:
            for row in (yield Statement(self.sql["line_bodies"], span(line))):
                yield from self._untag(thread_id, ns, row)
            yield Statement(self.sql["drop_line_checkpoints"], span(line))
            yield Statement(self.sql["drop_line_writes"], (line,))
        for lane, _, _ in (yield Statement(self.sql["thread_lanes"], (thread,))):
            yield Statement(self.sql["drop_items"], span(lane))
        for table in ("drop_lines", "drop_lanes", "drop_thread"):
            yield Statement(self.sql[table], (thread,))
        return PruneReport(checkpoints, items, 1)

    def _untag(self, thread_id: str, ns: str, row: Row) -> Flow[None]:
        try:
            metadata = self.reader.metadata(self.reader.open_row(thread_id, ns, row))
        except CorruptRecord:
            return  # what cannot be read can still be deleted
        for number in tags_of(self.reader.seal, metadata):
            yield Statement(self.sql["drop_tag"], (number, row[0]))

    # -- some checkpoints of a thread

    def prune(self, thread_id: str, keep: Keep, *, history: bool, limit: int) -> Flow[PruneReport]:
        """Delete the checkpoints of each line that `keep` does not name, then what nothing needs.

        Args:
            thread_id: Whose.
            keep: Given a line's checkpoints, newest first, the keys of those that stay.
            history: Whether everything said stays readable.
            limit: How many checkpoints to delete at most; call again until none are.
        """
        rows = yield Statement(self.sql["find_thread"], (thread_id,))
        if not rows:
            return PruneReport()
        thread = rows[0][0]
        dropped = size = 0
        for line, ns, head in (yield Statement(self.sql["thread_lines"], (thread,))):
            kept = yield from self._line(thread_id, ns, line, head)
            stay = _with_ancestors(kept, keep(kept))
            doomed = [c.key for c in reversed(kept) if c.key not in stay][: limit - dropped]
            size += yield from self._drop(thread_id, ns, line, doomed)
            dropped += len(doomed)
            if place(line, head) in doomed:
                yield Statement(self.sql["pin"], (0, line))
            if not history:
                size += yield from self._forget_said(thread_id, ns, line)
        if not dropped and history:
            return PruneReport()
        items, freed = yield from self.sweep(thread_id, thread)
        yield Statement(self.sql["swept"], (dropped, items, size + freed, thread))
        return PruneReport(dropped, items)

    def _line(self, thread_id: str, ns: str, line: int, head: int) -> Flow[list[Kept]]:
        keys = yield Statement(self.sql["line_keys"], span(line))
        by_uid = {uid: key for key, uid, _, _ in keys}
        put_at = {key: at for key, _, _, at in keys}
        out = []
        for row in (yield Statement(self.sql["line_bodies"], span(line))):
            snapshot = self.reader.open_row(thread_id, ns, row)
            out.append(
                Kept(
                    row[0],
                    by_uid.get(row[2]),
                    put_at[row[0]],
                    self.reader.metadata(snapshot),
                    frozenset(snapshot.refs),
                    row[0] == place(line, head),
                )
            )
        return out

    def _drop(self, thread_id: str, ns: str, line: int, doomed: list[int]) -> Flow[int]:
        size = 0
        for key in doomed:
            row = (yield Statement(self.sql["checkpoint_at"], (key,)))[0]
            yield from self._untag(thread_id, ns, row)
            size += len(row[3])
            for _, _, body in (yield Statement(self.sql["writes_of"], (line, row[1]))):
                size += len(body)
            yield Statement(self.sql["drop_writes"], (line, row[1]))
            yield Statement(self.sql["drop_checkpoint"], (key,))
        return size

    def _forget_said(self, thread_id: str, ns: str, line: int) -> Flow[int]:
        """Let kept checkpoints remember only what they hold. Returns the bytes that saves."""
        saved = 0
        for row in (yield Statement(self.sql["line_bodies"], span(line))):
            snapshot = self.reader.open_row(thread_id, ns, row)
            if snapshot.said:
                bound = checkpoint_place(thread_id, ns, snapshot.uid, snapshot.parent, row[0])
                body = self.reader.seal.seal(pack_snapshot(snapshot, {}), bound)
                yield Statement(self.sql["rewrite_checkpoint"], (body, row[0]))
                saved += len(row[3]) - len(body)
        return saved

    # -- items

    def sweep(self, thread_id: str, thread: int) -> Flow[tuple[int, int]]:
        """Delete the items of a thread that nothing refers to: how many, and their bytes."""
        live: dict[int, Ranges] = defaultdict(list)
        for line, ns, _ in (yield Statement(self.sql["thread_lines"], (thread,))):
            yield from self._mark(thread_id, ns, line, live)
        items = size = 0
        for lane, _, end in (yield Statement(self.sql["thread_lanes"], (thread,))):
            for start, stop in missing([(0, end)], covered(live[lane])):
                rows = yield Statement(self.sql["item_keys"], span(lane, start, stop))
                items += len(rows)
                size += sum(length for _, length in rows)
                if rows:
                    yield Statement(self.sql["drop_items"], span(lane, start, stop))
        return items, size

    def _mark(self, thread_id: str, ns: str, line: int, live: dict[int, Ranges]) -> Flow[None]:
        seen: set[tuple[int, int]] = set()
        for row in (yield Statement(self.sql["line_bodies"], span(line))):
            snapshot = self.reader.open_row(thread_id, ns, row)
            for ref in snapshot.refs.values():
                yield from self._mark_ref(ref, live, seen)
            for lane, numbers in snapshot.said.values():
                yield from self._mark_ranges(lane, numbers, live, seen)
        for uid, task, path, body in (yield Statement(self.sql["line_writes"], (line,))):
            ids = unpack_id(uid) or "", unpack_id(task) or ""
            bound = writes_place(thread_id, ns, *ids, path)
            for _, _, ref in unpack_writes(self.reader.seal.open(body, bound)):
                yield from self._mark_ref(ref, live, seen)

    def _mark_ref(
        self, ref: Any, live: dict[int, Ranges], seen: set[tuple[int, int]]
    ) -> Flow[None]:
        for lane, numbers in references(ref):
            yield from self._mark_ranges(lane, numbers, live, seen)

    def _mark_ranges(
        self, lane: int, numbers: Any, live: dict[int, Ranges], seen: set[tuple[int, int]]
    ) -> Flow[None]:
        if numbers and not isinstance(numbers[0], int):
            (blocks, *places), *numbers = numbers
            for position in places:
                if (lane, position) not in seen:
                    seen.add((lane, position))
                    live[blocks].append((position, position + 1))
                    live[lane] += yield from self.reader.block(blocks, position)
        live[lane] += unflat(numbers)
        if len(live[lane]) > 4096:
            live[lane] = covered(live[lane])


def _with_ancestors(kept: list[Kept], stay: set[int]) -> set[int]:
    """Add the ancestors whose writes a kept checkpoint's DeltaChannel is rebuilt from."""
    by_key = {c.key: c for c in kept}
    out = set(stay)
    for checkpoint in kept:
        if checkpoint.key not in stay:
            continue
        counters = checkpoint.metadata.get("counters_since_delta_snapshot") or {}
        lacking = set(counters) - checkpoint.channels
        at = by_key.get(checkpoint.parent_key or 0)
        while lacking and at is not None:
            out.add(at.key)
            lacking -= at.channels
            at = by_key.get(at.parent_key or 0)
    return out


def keep_rule(rule: Retention, now: float) -> Keep:
    """A retention rule as a choice among the checkpoints of a line."""

    def keep(line: list[Kept]) -> set[int]:
        stay = {c.key for c in line if c.is_head}
        if rule.last is not None:
            stay |= {c.key for c in line[: rule.last]}
        if rule.days is not None:
            stay |= {c.key for c in line if c.put_at >= now - rule.days * 86400}
        if rule.turns:
            inside = {c.parent_key for c in line if c.metadata.get("source") == "loop"}
            stay |= {c.key for c in line if c.key not in inside}
        return stay

    return keep


def keep_heads(line: list[Kept]) -> set[int]:
    """Only the checkpoint from which the next run starts."""
    return {c.key for c in line if c.is_head}


def keep_but(doomed: set[int]) -> Keep:
    """All but some."""
    return lambda line: {c.key for c in line} - doomed

"""Deleting and copying: threads, runs, checkpoints, and the items nothing refers to any more.

Garbage is reachability: an item goes when no checkpoint, pending write or history of its thread
refers to it. All of it runs in the writer's transactions, so no put can come between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.checkpointers.base import PruneReport, Retention
from perdure.checkpointers.manifest import (
    ITEM,
    MAP,
    Ranges,
    covered,
    missing,
    references,
    unflat,
)
from perdure.checkpointers.reading import Reader
from perdure.checkpointers.records import (
    checkpoint_place,
    content_hash,
    item_place,
    pack_id,
    pack_snapshot,
    pack_writes,
    tags_of,
    unpack_id,
    unpack_writes,
    writes_place,
)
from perdure.checkpointers.schema import place, span
from perdure.errors import CorruptRecord, InvalidConfig, UnknownCheckpoint, UnknownThread
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
    """The flows that delete and copy.

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
            if doomed:
                yield from self._mend_head(line, head, doomed)
            if not history:
                yield from self._forget_said(thread_id, ns, line)
        if not dropped and history:
            return PruneReport()
        items, freed = yield from self._sweep(thread_id, thread)
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

    def _mend_head(self, line: int, head: int, doomed: Iterable[int]) -> Flow[None]:
        if place(line, head) in set(doomed):
            newest = (yield Statement(self.sql["newest_of"], span(line)))[0][0]
            yield Statement(self.sql["set_head"], ((newest or 0) & 0xFFFFFFFF, line))

    def _forget_said(self, thread_id: str, ns: str, line: int) -> Flow[None]:
        """Let kept checkpoints remember only what they hold."""
        for row in (yield Statement(self.sql["line_bodies"], span(line))):
            snapshot = self.reader.open_row(thread_id, ns, row)
            if snapshot.said:
                bound = checkpoint_place(thread_id, ns, snapshot.uid, snapshot.parent, row[0])
                body = self.reader.seal.seal(pack_snapshot(snapshot, {}), bound)
                yield Statement(self.sql["rewrite_checkpoint"], (body, row[0]))

    # -- items

    def _sweep(self, thread_id: str, thread: int) -> Flow[tuple[int, int]]:
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
        for uid, task, _, body in (yield Statement(self.sql["line_writes"], (line,))):
            bound = writes_place(thread_id, ns, unpack_id(uid) or "", unpack_id(task) or "")
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

    # -- copies

    def copy_thread(self, source: str, target: str, checkpoint_id: str | None) -> Flow[None]:
        """Copy a thread; with a checkpoint, only the way to it.

        Raises:
            UnknownThread: There is no source.
            UnknownCheckpoint: It has no such checkpoint in its root namespace.
            InvalidConfig: The target exists.
        """
        rows = yield Statement(self.sql["one_thread"], (source,))
        if not rows:
            raise UnknownThread(f"there is no thread {source!r} to copy")
        if (yield Statement(self.sql["one_thread"], (target,))):
            raise InvalidConfig(f"thread {target!r} exists already; copy to a new thread_id")
        thread, _, _, items, size, created_at, _ = rows[0]
        now = time.time()
        new = (yield Statement(self.sql["new_thread"], (target, created_at, now)))[0][0]
        seq = (yield Statement(self.sql["find_thread"], (source,)))[0][1]
        lanes = yield from self._copy_lanes(source, target, thread, new)
        last = yield from self._last_place(source, thread, checkpoint_id)
        copied = 0
        for line, ns, head in (yield Statement(self.sql["thread_lines"], (thread,))):
            to = _Copied(source, target, ns, line, lanes)
            copied += yield from self._copy_line(to, new, head, last if ns == "" else None, last)
        counts = (seq, copied, items, size, new)
        yield Statement(self.sql["set_counts"], counts)
        if checkpoint_id is not None:
            dead, freed = yield from self._sweep(target, new)
            yield Statement(self.sql["swept"], (0, dead, freed, new))

    def _last_place(self, source: str, thread: int, checkpoint_id: str | None) -> Flow[int | None]:
        if checkpoint_id is None:
            return None
        for line, ns, _ in (yield Statement(self.sql["thread_lines"], (thread,))):
            if ns == "":
                params = (line, pack_id(checkpoint_id))
                rows = yield Statement(self.sql["find_checkpoint"], params)
                if rows:
                    return int(rows[0][0]) & 0xFFFFFFFF
        raise UnknownCheckpoint(f"thread {source!r} has no checkpoint {checkpoint_id!r}")

    def _copy_lanes(self, source: str, target: str, thread: int, new: int) -> Flow[dict[int, int]]:
        seal = self.reader.seal
        out = {}
        for lane, name, end in (yield Statement(self.sql["thread_lanes"], (thread,))):
            key = (yield Statement(self.sql["new_lane"], (new, name)))[0][0]
            yield Statement(self.sql["take_positions"], (end, key))
            out[lane] = key
            for start in range(0, end, 1024):
                rows = []
                between = span(lane, start, min(end, start + 1024))
                for item, body in (yield Statement(self.sql["items_between"], between)):
                    at = item & 0xFFFFFFFF
                    stored = seal.open(body, item_place(source, name, at))
                    sealed = seal.seal(stored, item_place(target, name, at))
                    rows.append((place(key, at), content_hash(seal, key, stored), sealed))
                yield Statement(self.sql["add_item"], rows, many=True)
        return out

    def _copy_line(
        self, to: _Copied, thread: int, head: int, path_to: int | None, last: int | None
    ) -> Flow[int]:
        rows = yield Statement(self.sql["line_bodies"], span(to.line))
        rows = [row for row in rows if last is None or row[0] & 0xFFFFFFFF <= last]
        if path_to is not None:
            rows, head = _path(rows, place(to.line, path_to)), path_to
        elif last is not None:
            head = max((row[0] & 0xFFFFFFFF for row in rows), default=0)
        if not rows:
            return 0
        line = (yield Statement(self.sql["new_line"], (thread, to.ns)))[0][0]
        yield Statement(self.sql["set_head"], (head, line))
        put_at = {k: at for k, _, _, at in (yield Statement(self.sql["line_keys"], span(to.line)))}
        for row in rows:
            yield from self._copy_checkpoint(to, line, row, put_at[row[0]])
        uids = {row[1] for row in rows}
        for uid, task, path, body in (yield Statement(self.sql["line_writes"], (to.line,))):
            if uid in uids:
                body = self._copied_writes(to, unpack_id(uid) or "", unpack_id(task) or "", body)
                yield Statement(self.sql["put_writes"], (line, uid, task, path, body))
        return len(rows)

    def _copy_checkpoint(self, to: _Copied, line: int, row: Row, put_at: float) -> Flow[None]:
        snapshot = self.reader.open_row(to.source, to.ns, row)
        snapshot.refs = {c: _moved(ref, to.lanes) for c, ref in snapshot.refs.items()}
        said = {
            c: [to.lanes[lane], _moved_ranges(numbers, to.lanes)]
            for c, (lane, numbers) in snapshot.said.items()
        }
        key = place(line, row[0] & 0xFFFFFFFF)
        bound = checkpoint_place(to.target, to.ns, snapshot.uid, snapshot.parent, key)
        body = self.reader.seal.seal(pack_snapshot(snapshot, said), bound)
        yield Statement(self.sql["add_checkpoint"], (key, line, row[1], row[2], put_at, body))
        for number in tags_of(self.reader.seal, self.reader.metadata(snapshot)):
            yield Statement(self.sql["add_tag"], (number, key))

    def _copied_writes(self, to: _Copied, uid: str, task: str, body: bytes) -> bytes:
        seal = self.reader.seal
        writes = unpack_writes(seal.open(body, writes_place(to.source, to.ns, uid, task)))
        moved = [[i, channel, _moved(ref, to.lanes)] for i, channel, ref in writes]
        return seal.seal(pack_writes(moved), writes_place(to.target, to.ns, uid, task))


@dataclass(frozen=True, slots=True)
class _Copied:
    """One line on its way from a thread to another."""

    source: str
    target: str
    ns: str
    line: int
    lanes: dict[int, int]


def _moved(ref: Any, lanes: dict[int, int]) -> Any:
    """A reference, in the lanes of another thread."""
    if isinstance(ref, bytes):
        return ref
    if ref[0] == MAP:
        return [MAP, {key: _moved(inner, lanes) for key, inner in ref[1].items()}]
    if ref[0] == ITEM:
        return [ITEM, lanes[ref[1]], ref[2]]
    return [ref[0], lanes[ref[1]], _moved_ranges(ref[2], lanes)]


def _moved_ranges(numbers: Any, lanes: dict[int, int]) -> Any:
    if numbers and not isinstance(numbers[0], int):
        (blocks, *places), *rest = numbers
        return [[lanes[blocks], *places], *rest]
    return numbers


def _path(rows: list[Row], key: int) -> list[Row]:
    """The rows on the way to a checkpoint."""
    by_uid = {row[1]: row for row in rows}
    at: Row | None = next(row for row in rows if row[0] == key)
    out = []
    while at is not None:
        out.append(at)
        at = by_uid.get(at[2])
    return out


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

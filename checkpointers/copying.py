"""Copying threads: into new ones that share nothing with their source."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from perdure.checkpointers.manifest import ITEM, MAP
from perdure.checkpointers.pruning import Pruner
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
from perdure.errors import InvalidConfig, UnknownCheckpoint, UnknownThread
from perdure.storage.flow import Flow, Row, Statement


@dataclass(slots=True)
class Copier:
    """The flows that copy.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
        pruner: Sweeps up what a part of a thread does not need.
    """

    sql: dict[str, str]
    reader: Reader
    pruner: Pruner

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
        thread, _, _, items, _, created_at, _ = rows[0]
        now = time.time()
        new = (yield Statement(self.sql["new_thread"], (target, created_at, now)))[0][0]
        seq = (yield Statement(self.sql["find_thread"], (source,)))[0][1]
        lanes, size = yield from self._copy_lanes(source, target, thread, new)
        last = yield from self._last_place(source, thread, checkpoint_id)
        copied = 0
        for line, ns, head in (yield Statement(self.sql["thread_lines"], (thread,))):
            to = _Copied(source, target, ns, line, lanes)
            found = yield from self._copy_line(to, new, head, last if ns == "" else None, last)
            copied += found[0]
            size += found[1]
        counts = (seq, copied, items, size, new)
        yield Statement(self.sql["set_counts"], counts)
        if checkpoint_id is not None:
            dead, freed = yield from self.pruner.sweep(target, new)
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

    def _copy_lanes(
        self, source: str, target: str, thread: int, new: int
    ) -> Flow[tuple[dict[int, int], int]]:
        """Which lane became which, and the bytes of their items."""
        seal = self.reader.seal
        out = {}
        size = 0
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
                    size += len(sealed)
                yield Statement(self.sql["add_item"], rows, many=True)
        return out, size

    def _copy_line(
        self, to: _Copied, thread: int, head: int, path_to: int | None, last: int | None
    ) -> Flow[tuple[int, int]]:
        """How many checkpoints, and the bytes of them and their writes."""
        rows = yield Statement(self.sql["line_bodies"], span(to.line))
        rows = [row for row in rows if last is None or row[0] & 0xFFFFFFFF <= last]
        if path_to is not None:
            rows, head = _path(rows, place(to.line, path_to)), path_to
        elif last is not None:
            head = max((row[0] & 0xFFFFFFFF for row in rows), default=0)
        if not rows:
            return 0, 0
        size = 0
        line = (yield Statement(self.sql["new_line"], (thread, to.ns)))[0][0]
        yield Statement(self.sql["pin"], (head, line))
        put_at = {k: at for k, _, _, at in (yield Statement(self.sql["line_keys"], span(to.line)))}
        for row in rows:
            size += yield from self._copy_checkpoint(to, line, row, put_at[row[0]])
        uids = {row[1] for row in rows}
        for uid, task, path, body in (yield Statement(self.sql["line_writes"], (to.line,))):
            if uid in uids:
                ids = unpack_id(uid) or "", unpack_id(task) or ""
                body = self._copied_writes(to, (*ids, path), body)
                yield Statement(self.sql["put_writes"], (line, uid, task, path, body))
                size += len(body)
        return len(rows), size

    def _copy_checkpoint(self, to: _Copied, line: int, row: Row, put_at: float) -> Flow[int]:
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
        return len(body)

    def _copied_writes(self, to: _Copied, row: tuple[str, str, str], body: bytes) -> bytes:
        seal = self.reader.seal
        writes = unpack_writes(seal.open(body, writes_place(to.source, to.ns, *row)))
        moved = [[i, channel, _moved(ref, to.lanes)] for i, channel, ref in writes]
        return seal.seal(pack_writes(moved), writes_place(to.target, to.ns, *row))


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

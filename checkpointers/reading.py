"""Reading checkpoints back: flows that run on one snapshot of the database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from langgraph.checkpoint.base import (
    CheckpointMetadata,
    CheckpointTuple,
    writes_sort_key,
)

from perdure.checkpointers.base import Address
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.manifest import DICT, ITEM, MAP, Ranges, ends, once, unflat
from perdure.checkpointers.memo import Lane, Memo, Snapshot, Thread
from perdure.checkpointers.packing import unpack
from perdure.checkpointers.records import (
    checkpoint_place,
    item_place,
    pack_id,
    split_channels,
    unpack_id,
    unpack_snapshot,
    unpack_writes,
    writes_place,
)
from perdure.checkpointers.schema import place, span
from perdure.errors import CorruptRecord
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Row, Statement

BLOCKS = "#blocks"  # the lane that holds the blocks of long manifests


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint and the keys that lead to it."""

    thread: Thread
    line: int
    snapshot: Snapshot


@dataclass(slots=True)
class Reader:
    """The flows that read.

    Args:
        sql: The statements, by name.
        seal: Decrypts what is read.
        memo: What is remembered of threads.
        codec: Decodes items.
    """

    sql: dict[str, str]
    seal: Seal
    memo: Memo
    codec: Codec

    # -- checkpoints

    def find(self, at: Address) -> Flow[Found | None]:
        """The checkpoint of an address: the one named, or the head."""
        if at.checkpoint_id is None:
            rows = yield Statement(self.sql["head_of"], (at.thread_id, at.checkpoint_ns))
        else:
            params = (pack_id(at.checkpoint_id), at.thread_id, at.checkpoint_ns)
            rows = yield Statement(self.sql["checkpoint_of"], params)
        if not rows:
            return None
        key, swept, line, *row = rows[0]
        thread = self.memo.thread(at.thread_id, key, swept)
        thread.lines[at.checkpoint_ns] = line
        uid = unpack_id(row[1])
        known = thread.recent.get((at.checkpoint_ns, uid or ""))
        if known is None or known.key != row[0]:
            known = self.open_row(at.thread_id, at.checkpoint_ns, tuple(row))
            yield from self._resolve(thread, known)
        thread.remember(at.checkpoint_ns, known)
        return Found(thread, line, known)

    def get(self, at: Address) -> Flow[CheckpointTuple | None]:
        """The checkpoint of an address, with all its values."""
        found = yield from self.find(at)
        return None if found is None else (yield from self.checkpoint_tuple(at, found))

    def snapshot(self, thread_id: str, ns: str, line: int, uid: str) -> Flow[Snapshot | None]:
        """One checkpoint of a line."""
        rows = yield Statement(self.sql["find_checkpoint"], (line, pack_id(uid)))
        return (yield from self.info(thread_id, ns, rows[0])) if rows else None

    def info(self, thread_id: str, ns: str, row: Row) -> Flow[Snapshot]:
        """A row as a snapshot, its ranges at hand."""
        snapshot = self.open_row(thread_id, ns, row)
        found = yield Statement(self.sql["find_thread"], (thread_id,))
        yield from self._resolve(self.memo.thread(thread_id, found[0][0], found[0][2]), snapshot)
        return snapshot

    def open_row(self, thread_id: str, ns: str, row: Row) -> Snapshot:
        """A row `(id, uid, parent, body)`, decrypted and unpacked, its ranges as written.

        Raises:
            CorruptRecord: It was damaged or tampered with.
        """
        key, uid, parent = row[0], unpack_id(row[1]) or "", unpack_id(row[2])
        bound = checkpoint_place(thread_id, ns, uid, parent, key)
        return unpack_snapshot(uid, key, parent, self.seal.open(row[3], bound))

    def metadata(self, snapshot: Snapshot) -> dict[str, Any]:
        """A checkpoint's metadata, new at each call."""
        metadata: dict[str, Any] = self.codec.decode(snapshot.fields[1])
        return metadata

    def _resolve(self, thread: Thread, snapshot: Snapshot) -> Flow[None]:
        """Put the ranges of split channels at hand."""
        said: dict[str, tuple[int, Ranges]] = {}
        for channel, lane, numbers in split_channels(snapshot.refs):
            ranges = yield from self.ranges(thread, numbers)
            snapshot.ranges[channel] = (lane, ranges)
            if not channel.startswith("__"):
                said[channel] = (lane, once(ranges))
        for channel, (lane, numbers) in snapshot.said.items():
            said[channel] = (lane, (yield from self.ranges(thread, numbers)))
        snapshot.said = said

    def ranges(self, thread: Thread, numbers: list[Any]) -> Flow[Ranges]:
        """Ranges from the form in which they are written."""
        if not numbers or isinstance(numbers[0], int):
            return unflat(numbers)
        (key, *places), *rest = numbers
        lane = yield from self._load(thread, key, [(p, p + 1) for p in places])
        out: Ranges = []
        for position in places:
            out += unflat(unpack(lane.items[position]))
        return out + unflat(rest)

    def block(self, key: int, position: int) -> Flow[Ranges]:
        """The ranges of one block of a long manifest."""
        rows = yield Statement(self.sql["block_at"], (place(key, position),))
        if not rows:
            raise CorruptRecord(f"block {position} of log {key} is missing")
        thread_id, name, body = rows[0]
        stored = self.seal.open(body, item_place(thread_id, name, position))
        return unflat(unpack(stored))

    # -- values

    def checkpoint_tuple(self, at: Address, found: Found) -> Flow[CheckpointTuple]:
        """A checkpoint with all its values and pending writes, shared with nobody."""
        snapshot = found.snapshot
        values = {}
        for channel, ref in snapshot.refs.items():
            if channel in snapshot.ranges:
                lane, ranges = snapshot.ranges[channel]
                values[channel] = yield from self._split(found.thread, ref[0], lane, ranges)
            else:
                values[channel] = yield from self.value(found.thread, ref)
        writes = yield from self.writes(found, at.checkpoint_ns)
        checkpoint = {
            **self.codec.decode(snapshot.fields[0]),
            "id": snapshot.uid,
            "channel_values": values,
            "channel_versions": dict(snapshot.versions),
            "versions_seen": {node: dict(seen) for node, seen in snapshot.seen.items()},
        }
        return CheckpointTuple(
            at.config(snapshot.uid),
            checkpoint,  # type: ignore[arg-type]
            cast(CheckpointMetadata, self.metadata(snapshot)),
            at.config(snapshot.parent) if snapshot.parent else None,
            [(task, channel, value) for _, task, channel, value in writes],
        )

    def writes(
        self, found: Found, ns: str, channels: frozenset[str] | None = None
    ) -> Flow[list[tuple[tuple[str, str, int], str, str, Any]]]:
        """Pending writes in the order in which their tasks are applied."""
        uid = found.snapshot.uid
        rows = yield Statement(self.sql["writes_of"], (found.line, pack_id(uid)))
        out = []
        for packed, path, body in rows:
            task = unpack_id(packed) or ""
            bound = writes_place(found.thread.thread_id, ns, uid, task, path)
            for index, channel, ref in unpack_writes(self.seal.open(body, bound)):
                if channels is None or channel in channels:
                    value = yield from self.value(found.thread, ref)
                    out.append((writes_sort_key(path, task, index), task, channel, value))
        out.sort(key=lambda write: write[0])
        return out

    def value(self, thread: Thread, ref: Any) -> Flow[Any]:
        """The value a reference stands for."""
        if isinstance(ref, bytes):
            return self.codec.decode(ref)
        kind = ref[0]
        if kind == MAP:
            out = {}
            for key, inner in ref[1].items():
                out[key] = yield from self.value(thread, inner)
            return out
        if kind == ITEM:
            lane = yield from self._load(thread, ref[1], [(ref[2], ref[2] + 1)])
            return lane.fresh([(ref[2], ref[2] + 1)], self.codec)[0]
        ranges = yield from self.ranges(thread, ref[2])
        return (yield from self._split(thread, kind, ref[1], ranges))

    def _split(self, thread: Thread, kind: int, key: int, ranges: Ranges) -> Flow[Any]:
        lane = yield from self._load(thread, key, ranges)
        values = lane.fresh(ranges, self.codec)
        return dict(values) if kind == DICT else values

    def _load(self, thread: Thread, key: int, ranges: Ranges) -> Flow[Lane]:
        """Make sure that the items of ranges are remembered."""
        lane = thread.lanes.get(key)
        if lane is None:
            rows = yield Statement(self.sql["lane_name"], (key,))
            if not rows:
                raise CorruptRecord(f"thread {thread.thread_id!r}: log {key} is missing")
            lane = thread.lane(key, rows[0][0])
        for start, stop in ranges:
            if not lane.has(start, stop):
                rows = yield Statement(self.sql["items_between"], span(key, start, stop))
                if [row[0] & 0xFFFFFFFF for row in rows] != list(range(start, stop)):
                    raise CorruptRecord(
                        f"thread {thread.thread_id!r}: not all items from {start} to {stop} of "
                        f"channel {lane.name!r} are in the log; restore it from a backup"
                    )
                bodies = [body for _, body in rows]
                opened = self.seal.open_run(bodies, ("item", thread.thread_id, lane.name), start)
                thread.add_items(lane, enumerate(opened, start))
        return lane

    def said(
        self, at: Address, channel: str, part: tuple[int, int] | None = None
    ) -> Flow[tuple[list[Any], Ranges, Ranges] | None]:
        """What a channel held on the way to a checkpoint: the values, where, and what is left.

        Args:
            at: The checkpoint.
            channel: The channel.
            part: Only so many from the beginning, and from the end.
        """
        found = yield from self.find(at)
        if found is None:
            return None
        key, ranges = found.snapshot.said.get(channel, (0, []))
        if not ranges:
            return [], [], []
        if part is not None:
            ranges = ends(ranges, *part)
        lane = yield from self._load(found.thread, key, ranges)
        values = lane.fresh(ranges, self.codec)
        ref = found.snapshot.refs.get(channel)
        if isinstance(ref, list) and ref[0] == DICT:
            values = [tuple(v) if type(v) is list and len(v) == 2 else v for v in values]
        return values, ranges, found.snapshot.ranges.get(channel, (key, []))[1]

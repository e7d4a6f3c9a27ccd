"""What perdure shows of threads beyond langgraph's contract: threads, trees, history, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from operator import index
from typing import Any, Final

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import ChannelLog, Snapshot
from perdure.checkpointers.listing import Pages
from perdure.checkpointers.manifest import (
    ALIASES,
    DICT,
    Range,
    Ranges,
    contains,
    count,
    covered,
    positions,
)
from perdure.checkpointers.reader import Reader, damaged_index
from perdure.checkpointers.records import place, span
from perdure.checkpointers.reports import CheckpointInfo, HistoryItem, ThreadInfo
from perdure.errors import ConfigurationError, CorruptRecord, UnknownCheckpoint, UnknownThread
from perdure.storage.flow import Flow, Row, Statement

_SOON: Final = float("inf")
_PAGE: Final = 512  # items


@dataclass(slots=True)
class Threads:
    """The flows that look at threads.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
    """

    sql: dict[str, str]
    reader: Reader

    # -- what was said

    def history(self, at: Address, channel: str, part: tuple[int, int] | None) -> Pages:
        """Everything said on the way to a checkpoint; see `Checkpointer.history`.

        Yields flows, and between them functions that decode a page of items, to be called where
        that may take its time: each returns a list of `HistoryItem`.
        """
        if part is not None:
            part = _pair(part)
        found = yield self.reader.find(at)
        if found is None:
            if at.checkpoint_id is not None:
                raise UnknownCheckpoint(
                    f"thread {at.thread_id!r} has no checkpoint {at.checkpoint_id!r}"
                )
            raise no_thread(at.thread_id, at.checkpoint_ns)
        snapshot = found.snapshot
        key, ranges = snapshot.said.get(channel, (0, []))
        branches: Ranges = []
        if at.checkpoint_id is None:
            branches = yield self._on_branches(at, found.namespace, snapshot, channel)
        runs = _interleaved(ranges, branches)
        if part is not None:
            runs = _ends(runs, *part)
        if not runs:
            return
        key = key or (yield self._log_of(found.namespace, channel))
        seen = yield self._seen(at.thread_id, found.thread, snapshot, channel)
        ref = snapshot.refs.get(channel)
        if isinstance(ref, bytes):
            pairs = type(self.reader.items.codec.decode(ref)) is dict  # an empty one
        else:
            pairs = ref is not None and ref[0] == DICT
        for (start, stop), branch in runs:
            for first in range(start, stop, _PAGE):
                page = [(first, min(stop, first + _PAGE))]
                log = yield self.reader.load(at.thread_id, found.thread, key, page)
                yield _Page(self.reader, log, page, seen, pairs, branch)

    def _seen(self, thread_id: str, thread: Any, snapshot: Snapshot, channel: str) -> Flow[Ranges]:
        """Where what a channel holds was first said, as a set."""
        key, ranges = snapshot.ranges.get(channel, (0, []))
        if not ranges:
            return []
        log = yield from self.reader.load(thread_id, thread, key, ranges)
        return covered((p, p + 1) for p in map(log.origin, positions(ranges)))

    def _log_of(self, namespace: int, channel: str) -> Flow[int]:
        rows = yield Statement(self.sql["log_of"], (namespace, channel))
        return int(rows[0][0])

    def _on_branches(
        self, at: Address, namespace: int, head: Snapshot, channel: str
    ) -> Flow[Ranges]:
        """What was said only on branches: on the way to no checkpoint that leads to the head."""
        rows = yield Statement(self.sql["checkpoint_keys"], span(namespace))
        parents = {uid: parent for _, uid, parent in rows}
        trunk, uid = set(), next((uid for key, uid, _ in rows if key == head.key), None)
        while uid is not None and uid not in trunk:
            trunk.add(uid)
            uid = parents.get(uid)
        inner = set(parents.values())
        tips = [key for key, uid, _ in rows if uid not in trunk and uid not in inner]
        if not tips:
            return []
        key, said = head.said.get(channel, (0, []))
        thread = self.reader.cache.thread(at.thread_id, *(yield from self._state(at.thread_id)))
        have: set[int] = set()
        out: list[int] = []
        if said:
            log = yield from self.reader.load(at.thread_id, thread, key, said)
            have.update(map(log.origin, positions(said)))
        for tip_key in reversed(tips):
            (row,) = yield Statement(self.sql["checkpoint_at"], (tip_key,))
            tip = yield from self.reader.info(at.thread_id, at.checkpoint_ns, row)
            if channel not in tip.said:
                continue
            key, ranges = tip.said[channel]
            log = yield from self.reader.load(at.thread_id, thread, key, ranges)
            for position in map(log.origin, positions(ranges)):
                if position not in have:
                    have.add(position)
                    out.append(position)
        return covered((position, position + 1) for position in out)

    def _state(self, thread_id: str) -> Flow[tuple[int, int]]:
        ((key, _, generation),) = yield Statement(self.sql["find_thread"], (thread_id,))
        return key, generation

    # -- threads

    def page(self, limit: int, after: str | None, prefix: str) -> Flow[list[ThreadInfo]]:
        """A page of threads; see `Checkpointer.threads`."""
        if limit <= 0:
            raise ConfigurationError(f"limit is {limit!r}; expected at least 1")
        last = (_SOON, 0)
        if after is not None:
            rows = yield Statement(self.sql["one_thread"], (after,))
            if not rows:
                raise (yield from self._no_thread(after))
            last = (rows[0][3], rows[0][0])
        rows = yield Statement(self.sql["list_threads"], (*last, prefix.encode(), limit))
        out = []
        for row in rows:
            out.append((yield from self._info(row)))
        return out

    def one(self, thread_id: str) -> Flow[ThreadInfo]:
        """One thread; see `Checkpointer.thread`."""
        rows = yield Statement(self.sql["one_thread"], (thread_id,))
        if not rows:
            raise (yield from self._no_thread(thread_id))
        return (yield from self._info(rows[0]))

    def _no_thread(self, thread_id: str) -> Flow[UnknownThread]:
        """The error for a thread that was not found and is not there."""
        yield from self.reader.check_missing(Address(thread_id, "", None))
        return no_thread(thread_id)

    def _info(self, row: Row) -> Flow[ThreadInfo]:
        thread, thread_id, created_at, updated_at, indexed = row
        if indexed != thread:
            raise damaged_index(f"thread {thread}")
        namespaces = yield Statement(self.sql["thread_namespaces"], (thread,))
        checkpoints, items, size = yield from sizes(self.sql, thread)
        return ThreadInfo(
            thread_id,
            checkpoints,
            items,
            size,
            _time(thread_id, created_at),
            _time(thread_id, updated_at),
            tuple(ns for _, ns, _ in namespaces),
        )

    # -- checkpoints

    def checkpoints(
        self, thread_id: str, checkpoint_ns: str | None, limit: int | None
    ) -> Flow[list[CheckpointInfo]]:
        """Checkpoints without their values; see `Checkpointer.checkpoints`."""
        rows = yield Statement(self.sql["find_thread"], (thread_id,))
        if not rows:
            raise (yield from self._no_thread(thread_id))
        out: list[CheckpointInfo] = []
        for namespace, ns, head in (yield Statement(self.sql["thread_namespaces"], (rows[0][0],))):
            if checkpoint_ns is None or ns == checkpoint_ns:
                keys = yield Statement(self.sql["checkpoint_keys"], span(namespace))
                yield from self.reader.check_complete(len(keys), *span(namespace))
                trunk = _trunk(keys, place(namespace, head))
                page = (*span(namespace), -1 if limit is None else limit)
                for row in (yield Statement(self.sql["checkpoints_page"], page)):
                    info = yield from self._checkpoint(thread_id, ns, row, trunk, head)
                    out.append(info)
        return sorted(out, key=lambda info: -info.order)

    def _checkpoint(
        self, thread_id: str, ns: str, row: Row, trunk: set[int], head: int
    ) -> Flow[CheckpointInfo]:
        snapshot = yield from self.reader.info(thread_id, ns, row)
        fields: dict[str, Any] = self.reader.items.codec.decode(snapshot.fields[0])
        order = row[0] & 0xFFFFFFFF
        return CheckpointInfo(
            snapshot.uid,
            snapshot.parent,
            ns,
            order,
            order == head,
            row[0] not in trunk,
            self.reader.metadata(snapshot),
            str(fields.get("ts", "")),
            {channel: count(ranges) for channel, (_, ranges) in snapshot.ranges.items()},
        )


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of history, read and not yet decoded."""

    reader: Reader
    log: ChannelLog
    ranges: Ranges
    seen: Ranges
    pairs: bool
    branch: bool

    def __call__(self) -> list[HistoryItem]:
        """Decode it."""
        values = self.reader.items.values(self.log.full(self.ranges))
        if self.pairs:
            values = [tuple(v) if type(v) is list and len(v) == 2 else v for v in values]
        return [
            HistoryItem(value, not self.branch and contains(self.seen, origin), origin, self.branch)
            for value, origin in zip(
                values, map(self.log.origin, positions(self.ranges)), strict=True
            )
        ]


def _trunk(keys: list[Row], head: int) -> set[int]:
    """The keys of the checkpoints that lead to the head, and of itself."""
    by_uid = {uid: (key, parent) for key, uid, parent in keys}
    uid = next((uid for key, uid, _ in keys if key == head), None)
    out: set[int] = set()
    while uid in by_uid and by_uid[uid][0] not in out:
        key, uid = by_uid[uid]
        out.add(key)
    return out


def _interleaved(said: Ranges, branches: Ranges) -> list[tuple[Range, bool]]:
    """What was said on the way and what was said on branches, in the order in which it was."""
    out: list[tuple[Range, bool]] = []
    left = list(reversed(branches))
    for each in said:
        while left and left[-1] < each and each[0] < ALIASES:
            out.append((left.pop(), True))
        out.append((each, False))
    return out + [(each, True) for each in reversed(left)]


def _ends(runs: list[tuple[Range, bool]], first: int, last: int) -> list[tuple[Range, bool]]:
    """Only so many items from the beginning, and from the end."""
    total, passed = count([each for each, _ in runs]), 0
    if first + last >= total:
        return runs
    out = []
    for (start, stop), branch in runs:
        for part in ((start, start + first - passed), (start + total - last - passed, stop)):
            part = max(part[0], start), min(part[1], stop)
            if part[0] < part[1]:
                out.append((part, branch))
        passed += stop - start
    return out


def _time(thread_id: str, at: float) -> datetime:
    try:
        return datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError) as exc:
        raise CorruptRecord(f"the thread {thread_id!r} has {at!r} for a time") from exc


def _pair(part: Any) -> tuple[int, int]:
    try:
        first, last = map(index, part)
    except (TypeError, ValueError):
        first = last = -1
    if first < 0 or last < 0:
        raise ConfigurationError(
            f"ends is {part!r:.80}; expected how many items from the beginning and how many from "
            "the end, like (0, 50)"
        )
    return first, last


def sizes(sql: dict[str, str], thread: int) -> Flow[tuple[int, int, int]]:
    """How many checkpoints and items a thread has, and the bytes of those and its writes."""
    names = ("checkpoints_size", "items_size", "writes_size")
    checkpoints, items, writes = yield [Statement(sql[name], (thread,)) for name in names]
    size = checkpoints[0][1] + items[0][1] + writes[0][1]
    return checkpoints[0][0], items[0][0], size


def no_thread(thread_id: str, ns: str = "") -> UnknownThread:
    """The error for a thread that is not there."""
    within = f" with the namespace {ns!r}" if ns else ""
    return UnknownThread(f"there is no thread {thread_id!r}{within}; threads() lists them")

"""Threads, their trees, history and sizes, beyond langgraph's contract."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from operator import index
from typing import Any, Final

from perdure.checkpointers.address import Address, check_text, check_thread_id, optional_text
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
from perdure.checkpointers.reader import Found, Reader, damaged_index
from perdure.checkpointers.records import leading_to, place, span
from perdure.checkpointers.reports import CheckpointInfo, HistoryItem, ThreadHead, ThreadInfo
from perdure.errors import ConfigurationError, CorruptRecord, UnknownCheckpoint, UnknownThread
from perdure.storage.flow import Flow, Row, rows_of

_SOON: Final = float("inf")
_PAGE: Final = 512  # items


class Threads:
    """The flows that look at threads."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.sql = reader, reader.sql

    # -- what was said

    def history(self, at: Address, channel: str, part: tuple[int, int] | None) -> Pages:
        """Everything said on the way to a checkpoint; see `Checkpointer.history`.

        Yields flows, and between them functions that decode a page of items, to be called where
        that may take its time: each returns a list of `HistoryItem`.
        """
        channel, part = check_text("channel", channel), None if part is None else _pair(part)
        found: Found | None = yield self.reader.find(at)
        if found is None:
            if at.checkpoint_id is None:
                raise no_thread(at.thread_id, at.checkpoint_ns)
            raise UnknownCheckpoint(
                f"thread {at.thread_id!r} has no checkpoint {at.checkpoint_id!r}"
            )
        snapshot = found.snapshot
        key, ranges = snapshot.said.get(channel, (0, []))
        branches: Ranges = []
        if at.checkpoint_id is None:
            branches = yield self._on_branches(at, found, channel)
        runs = _interleaved(ranges, branches)
        if part is not None:
            runs = _ends(runs, *part)
        if not runs:
            return
        if not key:
            ((key,),) = yield rows_of(self.sql["log_of"], found.namespace, channel)
        held = snapshot.ranges.get(channel, (0, []))
        seen = covered((p, p + 1) for p in (yield self._origins(at, found, *held)))
        ref = snapshot.refs.get(channel)
        if isinstance(ref, bytes):
            pairs = type(self.reader.codec.decode(ref)) is dict  # an empty one
        else:
            pairs = ref is not None and ref[0] == DICT
        for (start, stop), branch in runs:
            for first in range(start, stop, _PAGE):
                page = [(first, min(stop, first + _PAGE))]
                log = yield self.reader.load(at.thread_id, found.thread, key, page)
                yield partial(self._history_page, log, page, None if branch else seen, pairs)

    def _history_page(
        self, log: ChannelLog, page: Ranges, seen: Ranges | None, pairs: bool
    ) -> list[HistoryItem]:
        """Decode items. `seen` is what the channel holds; None: they were said on a branch."""
        values = self.reader.codec.values(log.full(page))
        if pairs:
            values = [tuple(v) if type(v) is list and len(v) == 2 else v for v in values]
        return [
            HistoryItem(value, contains(seen or [], origin), origin, seen is None)
            for value, origin in zip(values, map(log.origin, positions(page)), strict=True)
        ]

    def _origins(self, at: Address, found: Found, key: int, ranges: Ranges) -> Flow[list[int]]:
        """The first positions of the items of ranges."""
        if not ranges:
            return []
        log = yield from self.reader.load(at.thread_id, found.thread, key, ranges)
        return [*map(log.origin, positions(ranges))]

    def _on_branches(self, at: Address, found: Found, channel: str) -> Flow[Ranges]:
        """The items that are on branches only."""
        rows = yield self.sql("checkpoint_keys", *span(found.namespace))
        trunk = {key for key, *_ in leading_to(rows, found.snapshot.key)}
        inner = {parent for _, _, parent in rows}
        tips = [key for key, uid, _ in rows if key not in trunk and uid not in inner]
        out: set[int] = set()
        for tip in tips:
            (row,) = yield self.sql("checkpoint_at", tip)
            snapshot = yield from self.reader.info(at.thread_id, at.checkpoint_ns, row)
            out.update((yield from self._said(at, found, snapshot, channel)))
        if out:
            out.difference_update((yield from self._said(at, found, found.snapshot, channel)))
        return covered((position, position + 1) for position in out)

    def _said(self, at: Address, found: Found, snapshot: Snapshot, channel: str) -> Flow[list[int]]:
        return (yield from self._origins(at, found, *snapshot.said.get(channel, (0, []))))

    # -- threads

    def page(
        self, limit: int, after: str | None, prefix: str, active_since: datetime | None
    ) -> Flow[list[ThreadInfo]]:
        """A page of threads; see `Checkpointer.threads`."""
        out = []
        for row in (yield from self._rows(limit, after, prefix, active_since)):
            out.append((yield from self._info(row)))
        return out

    def heads(
        self, limit: int, after: str | None, prefix: str, active_since: datetime | None
    ) -> Flow[list[ThreadHead]]:
        """The heads of a page of threads; see `Checkpointer.heads`."""
        out = []
        for thread, thread_id, _, updated_at, _ in (
            yield from self._rows(limit, after, prefix, active_since)
        ):
            heads = yield self.sql("thread_namespaces", thread)
            keys = [place(namespace, head) for namespace, ns, head in heads if ns == ""]
            row = (yield self.sql("checkpoint_at", keys[0])) if keys else []
            uid, metadata = None, {}
            if row:
                found = self.reader.open_row(thread_id, "", row[0])
                uid, metadata = found.uid, self.reader.metadata(found)
            out.append(ThreadHead(thread_id, uid, metadata, _time(thread_id, updated_at)))
        return out

    def _rows(
        self, limit: int, after: str | None, prefix: str, active_since: datetime | None
    ) -> Flow[list[Row]]:
        if limit <= 0:
            raise ConfigurationError(f"limit is {limit!r}; expected at least 1")
        if active_since is not None and active_since.tzinfo is None:
            raise ConfigurationError(
                f"active_since is {active_since!r}; expected a datetime with a time zone"
            )
        prefix, last = check_text("prefix", prefix), (_SOON, 0)
        if after is not None:
            thread, _, _, updated_at, _ = yield from self._row(after)
            last = (updated_at, thread)
        since = -_SOON if active_since is None else active_since.timestamp() - 1e-6
        rows = yield self.sql("list_threads", *last, prefix.encode(), limit, since)
        return list(rows)

    def one(self, thread_id: str) -> Flow[ThreadInfo]:
        """One thread; see `Checkpointer.thread`."""
        return (yield from self._info((yield from self._row(thread_id))))

    def _row(self, thread_id: str) -> Flow[Row]:
        """The row of a thread.

        Raises:
            UnknownThread: There is none.
        """
        thread_id = check_thread_id(thread_id)
        rows = yield self.sql("one_thread", thread_id)
        if not rows:
            yield from self.reader.check_missing(Address(thread_id, "", None))
            raise no_thread(thread_id)
        return rows[0]  # type: ignore[no-any-return]

    def _info(self, row: Row) -> Flow[ThreadInfo]:
        thread, thread_id, created_at, updated_at, indexed = row
        if indexed != thread:
            raise damaged_index(f"thread {thread}")
        namespaces = yield self.sql("thread_namespaces", thread)
        active_at = updated_at
        for key in [place(namespace, head) for namespace, ns, head in namespaces if ns == ""]:
            for row in (yield self.sql("checkpoint_at", key)):
                head = self.reader.open_row(thread_id, "", row)
                active_at = self.reader.active_at(head, updated_at)
        ((checkpoints, items, size),) = yield self.sql("sizes", thread)
        return ThreadInfo(
            thread_id,
            checkpoints,
            items,
            size,
            _time(thread_id, created_at),
            _time(thread_id, updated_at),
            tuple(ns for _, ns, _ in namespaces),
            _time(thread_id, active_at),
        )

    def idle(self, thread_id: str, before: datetime) -> Flow[ThreadInfo | None]:
        """A thread whose conversation did not go on since a moment; None: it did, or is unknown."""
        rows = yield self.sql("one_thread", check_thread_id(thread_id))
        info = (yield from self._info(rows[0])) if rows else None
        return info if info is not None and info.active_at < before else None

    # -- checkpoints

    def checkpoints(
        self, thread_id: str, checkpoint_ns: str | None, limit: int | None
    ) -> Flow[list[CheckpointInfo]]:
        """Checkpoints without their values; see `Checkpointer.checkpoints`."""
        checkpoint_ns = optional_text("checkpoint_ns", checkpoint_ns)
        thread, thread_id, *_ = yield from self._row(thread_id)
        out: list[CheckpointInfo] = []
        for namespace, ns, head in (yield self.sql("thread_namespaces", thread)):
            if checkpoint_ns is not None and ns != checkpoint_ns:
                continue
            keys = yield self.sql("checkpoint_keys", *span(namespace))
            yield from self.reader.check_complete(len(keys), *span(namespace))
            trunk = {key for key, *_ in leading_to(keys, place(namespace, head))}
            most = -1 if limit is None else limit
            for row in (yield self.sql("checkpoints_page", *span(namespace), most)):
                out.append((yield from self._checkpoint(thread_id, ns, row, trunk, head)))
        return sorted(out, key=lambda info: -info.order)

    def _checkpoint(
        self, thread_id: str, ns: str, row: Row, trunk: set[int], head: int
    ) -> Flow[CheckpointInfo]:
        snapshot = yield from self.reader.info(thread_id, ns, row)
        fields: dict[str, Any] = self.reader.codec.decode(snapshot.fields[0])
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


def _interleaved(said: Ranges, branches: Ranges) -> list[tuple[Range, bool]]:
    """The items up to the head and those on branches, in order."""
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


def no_thread(thread_id: str, ns: str = "") -> UnknownThread:
    """The error for a thread that is not there."""
    within = f" with the namespace {ns!r}" if ns else ""
    return UnknownThread(f"there is no thread {thread_id!r}{within}; threads() lists them")

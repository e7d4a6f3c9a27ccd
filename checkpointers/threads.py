"""Threads, their trees, history and sizes, beyond langgraph's contract."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from operator import index
from os.path import commonprefix
from typing import Any, Final

from perdure.checkpointers.address import (
    Address,
    check_datetime,
    check_optional_text,
    check_text,
    check_thread_id,
)
from perdure.checkpointers.cache import NO_TITLE, ChannelLog, Snapshot, Title
from perdure.checkpointers.delta import Transcript
from perdure.checkpointers.listing import Where, matches, number_of
from perdure.checkpointers.manifest import (
    ALIASES,
    DELTA,
    DICT,
    ITEM,
    SNAPSHOT,
    count_positions,
    iter_positions,
    join_ranges,
    value_reference,
)
from perdure.checkpointers.put import TITLE_CANDIDATES, build_title
from perdure.checkpointers.reader import CheckpointReader, StoredCheckpoint, damaged_index_error
from perdure.checkpointers.records import (
    decrypt_list_entry,
    encrypt_list_entry,
    key_range,
    row_key,
    select_lineage,
    select_listed_metadata,
)
from perdure.checkpointers.reports import (
    CheckpointInfo,
    HistoryItem,
    ThreadHead,
    ThreadInfo,
    ThreadStatus,
)
from perdure.checkpointers.status import IDLE
from perdure.checkpointers.values import DeltaSnapshot
from perdure.errors import ConfigurationError, CorruptRecord, UnknownCheckpoint, UnknownThread
from perdure.storage.flow import NO_LIMIT, Flow, Row

_SOON: Final = float("inf")


class ThreadReader:
    """The flows that look at threads."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader, self.sql = reader, reader.sql

    # -- what was said

    def history(
        self,
        at: Address,
        channel: str,
        ends: tuple[int, int] | None,
        before: int | None = None,
        *,
        missing_ok: bool = False,
    ) -> Flow[Callable[[], list[HistoryItem]]]:
        """Read the items up to a checkpoint; see `Checkpointer.history`.

        Returns:
            A function that decodes the items. Decoding may take long, so call the function outside
            of an event loop.
        """
        channel, ends = check_text("channel", channel), None if ends is None else _pair(ends)
        checkpoint = yield from self.reader.find_checkpoint(at)
        if checkpoint is None:
            known = yield self.sql("find_thread", at.thread_id)
            if missing_ok and (at.checkpoint_id is None or not known):
                return list
            raise missing(at)
        snapshot = checkpoint.snapshot
        key, said = snapshot.transcript.get(channel, (0, []))
        branches: list[int] = []
        if at.checkpoint_id is None:
            branches = yield from self._on_branches(at, checkpoint, channel)
        places = _interleaved(iter_positions(said), branches)
        if before is not None:
            ranges = [(place, place + 1) for place, _ in places]
            first = yield from self.reader.read_origins(
                at.thread_id, checkpoint.thread, key, ranges
            )
            places = places[: first.index(before)] if before in first else []
        if ends is not None and sum(ends) < len(places):
            places = places[: ends[0]] + places[len(places) - ends[1] :]
        if not places:
            return list
        if not key:
            ((key,),) = yield self.sql("find_log", checkpoint.namespace_key, channel)
        held = snapshot.ranges.get(channel, (0, []))
        seen = {*(yield from self.reader.read_origins(at.thread_id, checkpoint.thread, *held))}
        ranges = join_ranges((place, place + 1) for place, _ in places)
        log = yield from self.reader.load_items(at.thread_id, checkpoint.thread, key, ranges)
        full = log.items_in(ranges)
        is_dict, is_known = self._classify_value(snapshot.references.get(channel))
        found_at = [(log.origin_position(place), branch) for place, branch in places]
        seen |= yield from self._find_duplicate_positions(at, checkpoint, channel, seen)
        yield from self._load_times(at.thread_id, log, {place for place, _ in found_at})
        times = log.stored_times

        def decoded() -> list[HistoryItem]:
            values = self.reader.codec.decode_all(full)
            if is_dict:
                values = [tuple(v) if type(v) is list and len(v) == 2 else v for v in values]
            return [
                HistoryItem(
                    value,
                    not branch and (origin in seen if is_known else None),
                    origin,
                    branch,
                    times[origin],
                )
                for value, (origin, branch) in zip(values, found_at, strict=True)
            ]

        return decoded

    def _load_times(self, thread_id: str, log: ChannelLog, places: set[int]) -> Flow[None]:
        """Load the times of first storage of the items at some positions, unless cached."""
        lacking = join_ranges(
            (place, place + 1) for place in sorted(places.difference(log.stored_times))
        )
        for position, stored_at in (
            yield from self.reader.read_item_times(log.key, lacking)
        ).items():
            log.stored_times[position] = _time(thread_id, stored_at)

    def _classify_value(self, ref: Any) -> tuple[bool, bool]:
        """Return whether a reference belongs to a dict, and whether its items are known.

        The items of a `DeltaChannel` are unknown if its value is unknown, or if its snapshot is
        neither a list nor a dict.
        """
        if ref is not None and ref[0] == DELTA and isinstance(ref[1], int):
            return ref[1] == DICT, False
        is_delta, ref = isinstance(ref, list) and ref[0] == SNAPSHOT, value_reference(ref)
        if not isinstance(ref, bytes):
            return ref is not None and ref[0] == DICT, not is_delta or ref[0] != ITEM
        value = self.reader.codec.decode(ref)  # an empty value
        if type(value) is DeltaSnapshot:
            return type(value.value) is dict, type(value.value) in (list, dict)
        return type(value) is dict, True

    def _find_duplicate_positions(
        self, at: Address, checkpoint: StoredCheckpoint, channel: str, held: set[int]
    ) -> Flow[set[int]]:
        """Find transcript items that the value of a `DeltaChannel` contains in another form.

        Returns:
            The positions of these items in the log.
        """
        key, said = checkpoint.snapshot.transcript.get(channel, (0, []))
        ref = checkpoint.snapshot.references.get(channel)
        if not isinstance(ref, list) or ref[0] not in (SNAPSHOT, DELTA):
            return set()
        origins = yield from self.reader.read_origins(at.thread_id, checkpoint.thread, key, said)
        others = sorted(held.difference(origins))
        if not others:
            return set()
        removed, parts = [place for place in origins if place not in held], []
        for places in (removed, others):
            ranges = join_ranges((place, place + 1) for place in places)
            log = yield from self.reader.load_items(at.thread_id, checkpoint.thread, key, ranges)
            parts.append(self.reader.codec.decode_all(log.items_in(ranges)))
        transcript = Transcript(parts[0])
        numbers = map(transcript.take_match, parts[1])
        return {removed[number] for number in numbers if number is not None}

    def delta_values(self, at: Address) -> Flow[dict[str, Any]]:
        """Read the values of `DeltaChannel`s; see `Checkpointer.delta_values`."""
        checkpoint = yield from self.reader.find_checkpoint(at)
        if checkpoint is None:
            raise missing(at)
        values: dict[str, Any] = {}
        for channel, ref in checkpoint.snapshot.references.items():
            if isinstance(ref, list) and ref[0] in (SNAPSHOT, DELTA):
                inner, values[channel] = value_reference(ref), None
                if inner is not None:
                    value = self.reader.read_value(at.thread_id, checkpoint.thread, inner)
                    values[channel] = yield from value
            elif isinstance(ref, bytes):
                value = self.reader.codec.decode(ref)
                if type(value) is DeltaSnapshot:
                    values[channel] = value.value
        return values

    def _on_branches(
        self, at: Address, checkpoint: StoredCheckpoint, channel: str
    ) -> Flow[list[int]]:
        """The items that are on branches only."""
        rows = yield self.sql("checkpoint_keys", *key_range(checkpoint.namespace_key))
        trunk = {key for key, *_ in select_lineage(rows, checkpoint.snapshot.key)}
        inner = {parent for _, _, parent in rows}
        tips = [key for key, uid, _ in rows if key not in trunk and uid not in inner]
        out: set[int] = set()
        for tip in tips:
            (row,) = yield self.sql("checkpoint_row", tip)
            snapshot = yield from self.reader.resolve_row(at.thread_id, at.checkpoint_ns, row)
            said = snapshot.transcript.get(channel, (0, []))
            out.update(
                (yield from self.reader.read_origins(at.thread_id, checkpoint.thread, *said))
            )
        if out:
            said = checkpoint.snapshot.transcript.get(channel, (0, []))
            out.difference_update(
                (yield from self.reader.read_origins(at.thread_id, checkpoint.thread, *said))
            )
        return sorted(out)

    # -- threads

    def page(
        self, limit: int, after: str | None, prefix: str, active_since: datetime | None
    ) -> Flow[list[ThreadInfo]]:
        """A page of threads; see `Checkpointer.threads`."""
        out = []
        for row in (yield from self._rows(limit, after, prefix, active_since)):
            out.append((yield from self._info(row)))
        return out

    def largest(self, limit: int) -> Flow[list[ThreadInfo]]:
        """The threads with the most bytes; see `Checkpointer.usage`."""
        rows, out = (yield self.sql("largest_threads", limit)), []
        for row in rows:
            out.append((yield from self._info(row)))
        return out

    def heads(
        self,
        limit: int,
        after: str | None,
        prefix: str,
        active_since: datetime | None,
        where: Where,
        waiting: bool,
    ) -> Flow[list[ThreadHead]]:
        """The heads of a page of threads; see `Checkpointer.heads`."""
        number, out = number_of(self.reader.seal, where), list[ThreadHead]()
        narrow = ("list_threads",) if number is None else ("tagged_threads", number)
        narrow = ("waiting_threads",) if waiting else narrow
        while True:
            rows = yield from self._rows(limit, after, prefix, active_since, *narrow)
            for head in (yield from self.heads_of(rows)):
                fits = not waiting or head.status.state == "waiting"
                if fits and (not where or matches(head.metadata, where)):
                    out.append(head)
            if len(out) >= limit or len(rows) < limit:
                return out[:limit]
            after = rows[-1][1]

    def head(self, thread_id: str) -> Flow[ThreadHead | None]:
        """Read the head of one thread; see `Checkpointer.head`."""
        try:
            row = yield from self._row(thread_id)
        except UnknownThread:
            return None
        (head,) = yield from self.heads_of([row])
        return head

    def heads_of(self, rows: list[Row]) -> Flow[list[ThreadHead]]:
        """The heads of the threads of rows, in two requests for all of them."""
        keys = json.dumps([row[0] for row in rows])
        heads, writes = yield [self.sql("root_heads", keys), self.sql("root_writes", keys)]
        checkpoints = {thread: row for thread, *row in heads}
        written: dict[int, list[Row]] = {}
        for thread, *row in writes:
            written.setdefault(thread, []).append(tuple(row))
        out = []
        for thread, thread_id, created_at, updated_at, _, title in rows:
            uid, metadata, status, head = None, dict[str, Any](), IDLE, None
            if thread in checkpoints:
                head = self.reader.decrypt_row(thread_id, "", tuple(checkpoints[thread]))
                uid, metadata = head.checkpoint_id, self.reader.decode_metadata(head)
                status = yield from self.reader.status(thread_id, "", head, written.get(thread, []))
            called, _ = decrypt_list_entry(self.reader.seal, thread_id, title)
            if called is None and head is not None:
                called = yield from self._title(thread_id, head, metadata)
            times = _time(thread_id, updated_at), _time(thread_id, created_at)
            text = called.text if called is not None else ""
            out.append(ThreadHead(thread_id, uid, metadata, *times, status, text))
        return out

    def tell_anew(self, row: Row) -> Flow[None]:
        """Have lists tell of the thread of a row what its head has, its title too."""
        title, told = None, dict[str, Any]()
        for _, *checkpoint in (yield self.sql("root_heads", json.dumps([row[0]]))):
            head = self.reader.decrypt_row(row[1], "", tuple(checkpoint))
            metadata = self.reader.decode_metadata(head)
            title = yield from self._title(row[1], head, metadata)
            told = select_listed_metadata(metadata)
        stored = told, self.reader.codec.encode(told, lambda: "metadata", exact=True)
        listed = encrypt_list_entry(self.reader.seal, row[1], title or NO_TITLE, stored)
        yield self.sql("set_list_entry", *listed, row[0])

    def _title(
        self, thread_id: str, head: Snapshot, metadata: Mapping[str, Any]
    ) -> Flow[Title | None]:
        """The title of a thread whose row has none, as it was erased or pruned."""
        checkpoint = yield from self.reader.find_checkpoint(
            Address(thread_id, "", head.checkpoint_id), head.key
        )
        key, said = (
            checkpoint.snapshot.transcript.get("messages", (0, [])) if checkpoint else (0, [])
        )
        first = [
            (position, position + 1) for position in islice(iter_positions(said), TITLE_CANDIDATES)
        ]
        messages: list[Any] = []
        if checkpoint is not None and first:
            log = yield from self.reader.load_items(thread_id, checkpoint.thread, key, first)
            messages = self.reader.codec.decode_all(log.items_in(first))
        return build_title(metadata, messages)

    def status(self, at: Address) -> Flow[ThreadStatus]:
        """Where a thread stands; see `Checkpointer.status`."""
        status = yield from self.reader.status_at(at)
        if status is None:
            raise missing(at)
        return status

    def _rows(
        self,
        limit: int,
        after: str | None,
        prefix: str,
        active_since: datetime | None,
        narrow: str = "list_threads",
        *which: int,
    ) -> Flow[list[Row]]:
        """A page of threads by one of the statements that list them."""
        if limit <= 0:
            raise ConfigurationError(f"limit is {limit!r}; expected at least 1")
        since = -_SOON
        if active_since is not None:
            since = check_datetime("active_since", active_since).timestamp() - 1e-6
        prefix, last = check_text("prefix", prefix), (_SOON, 0)
        if after is not None:
            thread, _, _, updated_at, *_ = yield from self._row(after)
            last = (updated_at, thread)
        return list((yield self.sql(narrow, *last, prefix.encode(), limit, since, *which)))

    def one(self, thread_id: str) -> Flow[ThreadInfo]:
        """One thread; see `Checkpointer.thread`."""
        return (yield from self._info((yield from self._row(thread_id))))

    def beginning(self, thread_id: str, least: int) -> Flow[str]:
        """What no other id begins with; see `Checkpointer.beginning`."""
        thread_id = check_thread_id(thread_id)
        [others] = yield self.sql("neighbouring_thread_ids", thread_id)
        # the ids that begin most like it are beside it in order; of characters, not of paths
        shared = max(len(commonprefix([thread_id, other or ""])) for other in others)  # noqa: RUF071
        return thread_id[: max(least, shared + 1)]

    def _row(self, thread_id: str) -> Flow[Row]:
        """The row of a thread.

        Raises:
            UnknownThread: There is none.
        """
        thread_id = check_thread_id(thread_id)
        rows = yield self.sql("one_thread", thread_id)
        if not rows:
            yield from self.reader.check_missing(Address(thread_id, "", None))
            raise missing(Address(thread_id, "", None))
        return rows[0]  # type: ignore[no-any-return]

    def _info(self, row: Row) -> Flow[ThreadInfo]:
        thread, thread_id, created_at, updated_at, indexed, _ = row
        if indexed != thread:
            raise damaged_index_error(f"thread {thread}")
        namespaces = yield self.sql("thread_namespaces", thread)
        names = tuple(ns for _, ns, _ in namespaces)
        ((checkpoints, items, size),) = yield self.sql("thread_sizes", thread)
        head = (
            (yield from self.reader.find_checkpoint(Address(thread_id, "", None)))
            if "" in names
            else None
        )
        said, active_at = 0, updated_at
        if head is not None:
            said = count_positions(head.snapshot.transcript.get("messages", (0, []))[1])
            active_at = self.reader.activity_time(head.snapshot, updated_at)
        created, updated, active = (
            _time(thread_id, at) for at in (created_at, updated_at, active_at)
        )
        return ThreadInfo(
            thread_id, checkpoints, items, size, created, updated, names, active, said
        )

    def idle(self, thread_id: str, before: datetime) -> Flow[ThreadInfo | None]:
        """A thread whose conversation did not go on since a moment; None: it did, or is unknown.

        It goes on if a run of the server waits, or a cron.
        """
        rows = yield self.sql("one_thread", check_thread_id(thread_id))
        waits = yield self.sql("has_planned_runs", thread_id)
        info = (yield from self._info(rows[0])) if rows and not waits else None
        return info if info is not None and info.active_at < before else None

    # -- checkpoints

    def checkpoints(
        self,
        thread_id: str,
        checkpoint_ns: str | None,
        limit: int | None,
        before: int | None = None,
    ) -> Flow[list[CheckpointInfo]]:
        """Checkpoints without their values; see `Checkpointer.checkpoints`."""
        checkpoint_ns = check_optional_text("checkpoint_ns", checkpoint_ns)
        thread, thread_id, *_ = yield from self._row(thread_id)
        out: list[CheckpointInfo] = []
        for namespace, ns, head in (yield self.sql("thread_namespaces", thread)):
            if checkpoint_ns is not None and ns != checkpoint_ns:
                continue
            keys = yield self.sql("checkpoint_keys", *key_range(namespace))
            yield from self.reader.check_complete(len(keys), *key_range(namespace))
            trunk = {key for key, *_ in select_lineage(keys, row_key(namespace, head))}
            most = NO_LIMIT if limit is None else limit
            part = key_range(namespace) if before is None else key_range(namespace, 0, before)
            for row in (yield self.sql("checkpoints_page", *part, most)):
                out.append((yield from self._checkpoint(thread_id, ns, row, trunk, head)))
        return sorted(out, key=lambda info: -info.order)

    def _checkpoint(
        self, thread_id: str, ns: str, row: Row, trunk: set[int], head: int
    ) -> Flow[CheckpointInfo]:
        snapshot = yield from self.reader.resolve_row(thread_id, ns, row)
        fields: dict[str, Any] = self.reader.codec.decode(snapshot.encoded_fields[0])
        status = yield from self.reader.status(thread_id, ns, snapshot, [])
        order = row[0] & 0xFFFFFFFF
        return CheckpointInfo(
            snapshot.checkpoint_id,
            snapshot.parent_id,
            ns,
            order,
            order == head,
            row[0] not in trunk,
            self.reader.decode_metadata(snapshot),
            str(fields.get("ts", "")),
            {channel: count_positions(ranges) for channel, (_, ranges) in snapshot.ranges.items()},
            status.next,
        )


def _interleaved(said: Iterable[int], branches: list[int]) -> list[tuple[int, bool]]:
    """The items up to the head and, marked, those on branches, in order."""
    out: list[tuple[int, bool]] = []
    left = branches[::-1]
    for position in said:
        while left and left[-1] < position < ALIASES:
            out.append((left.pop(), True))
        out.append((position, False))
    return out + [(position, True) for position in reversed(left)]


def _time(thread_id: str, at: float) -> datetime:
    try:
        return datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError) as exc:
        raise CorruptRecord(f"the thread {thread_id!r} has {at!r} for a time") from exc


def _pair(ends: Any) -> tuple[int, int]:
    with suppress(TypeError, ValueError):
        first, last = map(index, ends)
        if first >= 0 and last >= 0:
            return first, last
    raise ConfigurationError(
        f"ends is {ends!r:.80}; expected how many items from the beginning and how many from "
        "the end, like (0, 50)"
    )


def missing(at: Address) -> UnknownThread | UnknownCheckpoint:
    """The error for a thread, a namespace or a checkpoint that is not there."""
    within = f" with the namespace {at.checkpoint_ns!r}" if at.checkpoint_ns else ""
    if at.checkpoint_id is None:
        return UnknownThread(f"there is no thread {at.thread_id!r}{within}; threads() lists them")
    return UnknownCheckpoint(
        f"thread {at.thread_id!r}{within} has no checkpoint {at.checkpoint_id!r}; checkpoints() "
        "lists them"
    )

"""Read checkpoints, pending writes and log items, as flows on one snapshot of the database."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, cast

from langgraph.checkpoint.base import (
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
    writes_sort_key,
)
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import UNREAD_STEP, Cache, ChannelLog, Snapshot, Thread
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.labels import labels_in
from perdure.checkpointers.manifest import (
    ALIASES,
    DELTA,
    DICT,
    DICT_HERE,
    ITEM,
    LIST,
    LIST_HERE,
    MAP,
    SNAPSHOT,
    Range,
    Ranges,
    count_positions,
    drop_repeats,
    iter_positions,
    join_ranges,
    merge_ranges,
    subtract_ranges,
    unflatten_ranges,
)
from perdure.checkpointers.records import (
    decrypt_checkpoint,
    decrypt_item,
    decrypt_list_entry,
    decrypt_writes,
    encrypt_list_entry,
    key_range,
    pack_id,
    select_listed_metadata,
    unpack_id,
)
from perdure.checkpointers.removal_records import RemovalRecords
from perdure.checkpointers.reports import ThreadStatus
from perdure.checkpointers.status import TaskWrite, build_thread_status, needs_value
from perdure.checkpointers.values import DeltaSnapshot, unpack
from perdure.errors import CorruptRecord
from perdure.storage.encryption import Seal
from perdure.storage.flow import NO_LIMIT, Flow, LastRequest, NamedSQL, Row, Statement

ITEMS_PAGE_SIZE: Final = 1024  # maximum items that one statement reads
_KEY_BLOCK_SIZE: Final = 256  # keys that a process reserves in addition to those it needs now


class StoredCheckpoint(NamedTuple):
    """A stored checkpoint with its cached thread and the key of its namespace."""

    thread: Thread
    namespace_key: int
    snapshot: Snapshot


@dataclass(slots=True)
class CheckpointReader:
    """Read the checkpointer's tables, and cache the items that were read.

    Attributes:
        sql: The statements by name.
        seal: Decrypts rows.
        cache: The cache of threads.
        codec: Decodes values.
        removals: The removal records.
    """

    sql: NamedSQL
    seal: Seal
    cache: Cache
    codec: Codec
    removals: RemovalRecords

    # -- checkpoints

    def find_checkpoint(
        self, at: Address, key: int | None = None, *, alone: bool = False
    ) -> Flow[StoredCheckpoint | None]:
        """Read the checkpoint of an address, or the head, without its values.

        Args:
            at: The address.
            key: The row key of the checkpoint, if it is known. The index of ids is used only if no
                row has this key.
            alone: Whether the statement is sent as a request of its own. Later statements then may
                see another state of the database.

        Returns:
            The checkpoint, or None if it does not exist.

        Raises:
            CorruptRecord: The row or an index is damaged.
        """
        rows, holds = list[Row](), True
        if key is not None or at.checkpoint_id is None:
            statement = self.sql("head_with_keys", at.thread_id, at.checkpoint_ns)
            if key is not None:
                statement = self.sql("checkpoint_row_with_keys", at.thread_id, key)
            if alone:
                [rows] = yield LastRequest([statement])
            else:
                rows, holds = yield from self.read_with_cache_check(at.thread_id, statement)
        if not rows and at.checkpoint_id is not None:
            packed = pack_id(at.checkpoint_id)
            statement = self.sql("checkpoint_with_keys", packed, at.thread_id, at.checkpoint_ns)
            rows, holds = yield from self.read_with_cache_check(at.thread_id, statement)
        if not rows:
            yield from self.check_missing(at)
            return None
        thread_key, generation, removals, namespace, *row = rows[0]
        uid = unpack_id(row[1])
        if thread_key is None or at.checkpoint_id not in (None, uid):
            raise damaged_index_error(f"checkpoint {at.checkpoint_id!r} of thread {at.thread_id!r}")
        thread = self._cached_thread(at.thread_id, (thread_key, generation, removals), holds)
        snapshot = thread.committed_snapshot(at.checkpoint_ns, uid or "")
        if snapshot is None or snapshot.key != row[0]:
            snapshot = self.decrypt_row(at.thread_id, at.checkpoint_ns, tuple(row))
            yield from self.resolve_ranges(at.thread_id, thread, snapshot)
            thread.note_newest_checkpoint(snapshot)
            thread.last_namespace = at.checkpoint_ns, namespace
        return StoredCheckpoint(thread, namespace, snapshot)

    def read_with_cache_check(
        self, thread_id: str, statement: Statement
    ) -> Flow[tuple[list[Row], bool]]:
        """Read the rows of a statement, and check whether the cached thread is valid.

        The cached thread is not valid if the database does not have its newest checkpoint, for
        example after a failover that has lost commits.

        Returns:
            The rows, and whether the cached data may be used.
        """
        kept = self.cache.get_thread(thread_id)
        if kept is None or kept.newest_checkpoint is None:
            return (yield statement), True
        key, uid = kept.newest_checkpoint
        rows, newest = yield [statement, self.sql("find_checkpoint_id", key)]
        return rows, bool(newest) and unpack_id(newest[0][0]) == uid

    def _cached_thread(self, thread_id: str, state: tuple[int, int, int], holds: bool) -> Thread:
        """Return the cached thread of a state, or an empty thread if the cache is stale."""
        return self.cache.get_or_add_thread(thread_id, *state) if holds else Thread(*state)

    def check_missing(self, at: Address) -> Flow[None]:
        """Check that a checkpoint that was not found does not exist.

        Raises:
            CorruptRecord: An index is damaged, so the search may have missed the checkpoint.
        """
        if self.sql["damaged_index_entries"]:
            params = at.thread_id, at.checkpoint_ns, pack_id(at.checkpoint_id)
            for (what,) in (yield self.sql("damaged_index_entries", *params)):
                raise damaged_index_error(what)

    def check_complete(self, rows: int, start: int, stop: int) -> Flow[None]:
        """Check that a range of keys of one namespace has as many rows as the index of ids.

        Raises:
            CorruptRecord: The index is damaged.
        """
        ((indexed,),) = yield self.sql("indexed_checkpoints", start >> 32, start, stop)
        if indexed != rows:
            raise damaged_index_error(f"namespace {start >> 32}")

    def read_tuple(self, at: Address, key: int | None = None) -> Flow[CheckpointTuple | None]:
        """Read the checkpoint of an address with all its values.

        The caller may change the values, because they are new objects.

        Args:
            at: The address.
            key: The row key of the checkpoint, if it is known; see `find_checkpoint`.
        """
        kept = self._cached_head(at) if key is None else None
        if kept is not None:
            # If the head is unchanged after the pending writes were read, the writes belong to it.
            rows, heads = yield LastRequest(
                [
                    self._writes_statement(kept),
                    self.sql("head_with_keys", at.thread_id, at.checkpoint_ns),
                ]
            )
            of = kept.thread
            state = of.key, of.generation, of.newest_removal, kept.namespace_key, kept.snapshot.key
            if heads and (*heads[0][:5], unpack_id(heads[0][5])) == (
                *state,
                kept.snapshot.checkpoint_id,
            ):
                with suppress(
                    CorruptRecord
                ):  # items of a pending write may be deleted between requests
                    return (yield from self._build_tuple(at, kept, rows))
        if key is None and at.checkpoint_id is None and self.cache.get_thread(at.thread_id) is None:
            with suppress(CorruptRecord):  # the thread may be deleted before the next request
                return (
                    yield from self._read_tuple_of(
                        at, (yield from self.find_checkpoint(at, alone=True))
                    )
                )
        return (yield from self._read_tuple_of(at, (yield from self.find_checkpoint(at, key))))

    def _read_tuple_of(
        self, at: Address, checkpoint: StoredCheckpoint | None
    ) -> Flow[CheckpointTuple | None]:
        if checkpoint is None:
            return None
        return (
            yield from self._build_tuple(at, checkpoint, (yield self._writes_statement(checkpoint)))
        )

    def cached_tuple(self, at: Address, epoch: object) -> CheckpointTuple | None:
        """Return the head from the cache, or None if it must be read.

        The cache is used only if this process has put the head, nobody has written since, and all
        items are cached.

        Args:
            at: The address.
            epoch: The present epoch of the database.
        """
        kept = self._cached_head(at)
        if kept is None:
            return None
        head = kept.thread.heads.get(at.checkpoint_ns)
        if head is None or head.snapshot is not kept.snapshot or head.epoch != epoch:
            return None
        if head.write_rows is None:
            return None
        flow = self._build_tuple(
            at, kept, [(None, None, *row) for row in head.write_rows.copy().values()]
        )
        try:
            flow.send(None)
        except StopIteration as done:
            self.cache.mark_used(at.thread_id)
            return cast(CheckpointTuple, done.value)
        flow.close()  # an item of a pending write is not cached
        return None

    def is_head_cached(self, at: Address, max_items: int = sys.maxsize) -> bool:
        """Return whether an address is that of a cached head with at most `max_items` items."""
        thread = self.cache.get_thread(at.thread_id) if at.checkpoint_id is None else None
        head = thread.heads.get(at.checkpoint_ns) if thread is not None else None
        if head is None or head.snapshot is None:
            return False
        return (
            sum([count_positions(ranges) for _, ranges in head.snapshot.ranges.values()])
            <= max_items
        )

    def _cached_head(self, at: Address) -> StoredCheckpoint | None:
        """Return the head that this process has put, if all its items are cached, or None."""
        thread = self.cache.get_thread(at.thread_id)
        head = thread.heads.get(at.checkpoint_ns) if thread is not None else None
        if thread is None or head is None or at.checkpoint_id is not None:
            return None
        snapshot = head.snapshot
        if snapshot is None or head.is_uncommitted:
            return None
        for channel, ref in snapshot.references.items():
            if isinstance(ref, bytes) or ref[0] == DELTA:
                continue
            if ref[0] == SNAPSHOT:
                ref = ref[1]
            log = thread.logs.get(ref[1]) if ref[0] in (ITEM, LIST, DICT) else None
            if log is None:
                return None
            ranges = [(ref[2], ref[2] + 1)] if ref[0] == ITEM else snapshot.ranges[channel][1]
            if not all(log.has_range(*pair) for pair in ranges):
                return None
        return StoredCheckpoint(thread, head.namespace_key, snapshot)

    def read_write_rows(self, checkpoint: StoredCheckpoint) -> Flow[list[Row]]:
        """Read the rows `(checkpoint_id, task_id, task_path, body)` of a checkpoint's writes."""
        return [*self._select_own_rows((yield self._writes_statement(checkpoint)))]

    def _writes_statement(self, checkpoint: StoredCheckpoint) -> Statement:
        return self.sql(
            "checkpoint_writes",
            checkpoint.namespace_key,
            pack_id(checkpoint.snapshot.checkpoint_id),
        )

    def _build_tuple(
        self, at: Address, stored: StoredCheckpoint, rows: Sequence[Row]
    ) -> Flow[CheckpointTuple]:
        snapshot, values = stored.snapshot, {}
        for channel, ref in snapshot.references.items():
            if ref[0] != DELTA:
                values[channel] = yield from self.read_value(at.thread_id, stored.thread, ref)
        writes = yield from self.read_writes(at, stored, rows)
        checkpoint = {
            **self.codec.decode(snapshot.encoded_fields[0]),
            "id": snapshot.checkpoint_id,
            "channel_values": values,
            "channel_versions": dict(snapshot.channel_versions),
            "versions_seen": {node: dict(seen) for node, seen in snapshot.versions_seen.items()},
        }
        return CheckpointTuple(
            at.config(snapshot.checkpoint_id, stored.thread.newest_removal),
            checkpoint,  # type: ignore[arg-type]
            cast(CheckpointMetadata, self.decode_metadata(snapshot)),
            at.config(snapshot.parent_id) if snapshot.parent_id else None,
            writes,
        )

    def status_at(self, at: Address) -> Flow[ThreadStatus | None]:
        """The status of a thread at a checkpoint; see `find`."""
        checkpoint = yield from self.find_checkpoint(at)
        if checkpoint is None:
            return None
        rows = yield from self.read_write_rows(checkpoint)
        return (yield from self.status(*at[:2], checkpoint.snapshot, rows))

    def status(
        self, thread_id: str, ns: str, snapshot: Snapshot, rows: Sequence[Row]
    ) -> Flow[ThreadStatus]:
        """Read the values that determine the status at a checkpoint, and return the status.

        Args:
            thread_id: The thread.
            ns: The namespace.
            snapshot: The checkpoint.
            rows: The rows `(checkpoint_id, task_id, task_path, body)` of its pending writes.
        """
        values: dict[str, Any] = {
            c: None for c, ref in snapshot.references.items() if ref[0] != DELTA
        }
        for channel in filter(needs_value, values):
            values[channel] = yield from self.read_value_of_thread(
                thread_id, snapshot.references[channel]
            )
        writes = []
        for uid, task, path, body in rows:
            stored = decrypt_writes(self.seal, thread_id, ns, (uid, task, path, body))
            for _, channel, ref in stored:
                write = TaskWrite(unpack_id(task) or "", path, channel)
                if channel in (INTERRUPT, ERROR):
                    write = write._replace(
                        value=(yield from self.read_value_of_thread(thread_id, ref))
                    )
                writes.append(write)
        return build_thread_status(
            values, snapshot.channel_versions, snapshot.versions_seen, writes
        )

    def read_value_of_thread(self, thread_id: str, ref: Any) -> Flow[Any]:
        """Read the value of a reference, and look up the cached thread if the value needs a log."""
        if isinstance(ref, bytes):
            return self.codec.decode(ref)
        statement = self.sql("find_thread", thread_id)
        ((key, _, *state),), holds = yield from self.read_with_cache_check(thread_id, statement)
        thread = self._cached_thread(thread_id, (key, *state), holds)
        return (yield from self.read_value(thread_id, thread, ref))

    def is_head(self, at: Address) -> Flow[bool]:
        """Return whether the checkpoint of an address is the head of its namespace."""
        uid = pack_id(at.checkpoint_id)
        rows = yield self.sql("read_write_state", uid, at.checkpoint_ns, at.thread_id)
        return bool(rows) and rows[0][7] == rows[0][9]

    def read_snapshot(
        self, thread_id: str, ns: str, namespace: int, uid: str
    ) -> Flow[Snapshot | None]:
        """Read one checkpoint of a namespace, with its ranges, or None if it does not exist."""
        rows = yield self.sql("find_checkpoint", namespace, pack_id(uid))
        if rows and unpack_id(rows[0][1]) != uid:
            raise damaged_index_error(f"checkpoint {uid!r} of thread {thread_id!r}")
        return (yield from self.resolve_row(thread_id, ns, rows[0])) if rows else None

    def resolve_row(self, thread_id: str, ns: str, row: Row) -> Flow[Snapshot]:
        """Return the snapshot of a row, with its ranges."""
        snapshot = self.decrypt_row(thread_id, ns, row)
        statement = self.sql("find_thread", thread_id)
        ((key, _, *state),), holds = yield from self.read_with_cache_check(thread_id, statement)
        thread = self._cached_thread(thread_id, (key, *state), holds)
        yield from self.resolve_ranges(thread_id, thread, snapshot)
        return snapshot

    def decrypt_row(self, thread_id: str, ns: str, row: Row) -> Snapshot:
        """Decrypt a row `(row_key, checkpoint_id, parent_id, run_start, put_at, body)`.

        The ranges of the snapshot have the stored form; `resolve_ranges` converts them.
        """
        return decrypt_checkpoint(self.seal, thread_id, ns, row)

    def read_all_rows(
        self, thread_id: str, ns: str, namespace: int
    ) -> Flow[Iterator[tuple[Row, Snapshot]]]:
        """Read all checkpoints of a namespace, newest first, with ranges in the stored form."""
        rows = yield self.sql("checkpoints_page", *key_range(namespace), NO_LIMIT)
        yield from self.check_complete(len(rows), *key_range(namespace))
        return ((row, self.decrypt_row(thread_id, ns, row)) for row in rows)

    def decode_metadata(self, snapshot: Snapshot) -> dict[str, Any]:
        """Decode the metadata of a checkpoint; each call returns a new dict."""
        metadata: dict[str, Any] = self.codec.decode(snapshot.encoded_fields[1])
        return metadata

    def rewrite_list_entry(self, thread_id: str, head: Row | None) -> Flow[None]:
        """Store the metadata of a thread's head in its list entry, and keep its title.

        Args:
            thread_id: The thread.
            head: The row `(row_key, checkpoint_id, parent_id, run_start, put_at, body)` of the
                head, or None if the thread has no head.
        """
        for thread, *_, listed in (yield self.sql("one_thread", thread_id)):
            title, _ = decrypt_list_entry(self.seal, thread_id, listed)
            metadata = self.decode_metadata(self.decrypt_row(thread_id, "", head)) if head else {}
            told = select_listed_metadata(metadata)
            stored = told, self.codec.encode(told, lambda: "metadata", exact=True)
            yield self.sql(
                "set_list_entry", *encrypt_list_entry(self.seal, thread_id, title, stored), thread
            )

    def activity_time(self, snapshot: Snapshot, put_at: float) -> float:
        """Return the time in a checkpoint's `ts`, or the time of its put if that is earlier.

        Both are in seconds since 1970.
        """
        ts = self.codec.decode(snapshot.encoded_fields[0]).get("ts")
        try:
            at = datetime.fromisoformat(ts)
            return min(put_at, at.replace(tzinfo=at.tzinfo or UTC).timestamp())
        except (TypeError, ValueError, OverflowError):
            return put_at

    def step_of(self, snapshot: Snapshot) -> int | None:
        """Return the superstep in a checkpoint's metadata, or None."""
        if snapshot.step == UNREAD_STEP:
            step = self.decode_metadata(snapshot).get("step")
            snapshot.step = step if type(step) is int else None
        return snapshot.step

    def labels_of(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the metadata values that the children of a checkpoint inherit."""
        if snapshot.labels is None:
            snapshot.labels = labels_in(self.decode_metadata(snapshot))
        return snapshot.labels

    def resolve_ranges(self, thread_id: str, thread: Thread, snapshot: Snapshot) -> Flow[None]:
        """Convert the stored ranges of a snapshot, and complete its transcript.

        The snapshot must come from `decrypt_row`. Aliases are loaded if the transcript contains
        some, because it has each item only once.
        """
        written: Any = snapshot.transcript
        snapshot.transcript = {}
        for channel, (key, numbers) in written.items():
            snapshot.transcript[channel] = (key, unflatten_ranges(numbers))
        for channel, ref in snapshot.references.items():
            if ref[0] in (SNAPSHOT, DELTA) and isinstance(ref, list):
                ref = ref[1]
            if isinstance(ref, list) and ref[0] in (LIST, DICT):
                held = snapshot.ranges[channel] = (ref[1], unflatten_ranges(ref[2]))
                if not channel.startswith("__"):
                    snapshot.transcript.setdefault(channel, held)
        for channel, (key, ranges) in snapshot.transcript.items():
            origin = None
            aliases = [pair for pair in ranges if pair[0] >= ALIASES]
            if aliases:
                log = yield from self.load_items(thread_id, thread, key, aliases)
                if log.is_free_of_repeats(ranges):  # the case of nearly all values
                    continue
                origin = log.origin_position
            if channel not in written:
                snapshot.transcript[channel] = (key, drop_repeats(ranges, origin))

    def allocate_keys(self, count: int) -> Flow[list[int]]:
        """Return `count` or more new keys for threads, namespaces and logs, highest first.

        If the reserved keys of this process do not suffice, the database reserves more than needed.
        After the commit, `KeyBlock.refill` takes those that are left. A transaction calls this
        before it writes anything else, so that two transactions cannot deadlock.
        """
        keys = self.cache.keys.take_keys(count)
        if keys is None:
            ((last,),) = yield self.sql("allocate_keys", count + _KEY_BLOCK_SIZE)
            keys = [*range(last, last - count - _KEY_BLOCK_SIZE, -1)]
        return keys

    # -- values

    def read_writes(
        self,
        at: Address,
        checkpoint: StoredCheckpoint,
        rows: Sequence[Row],
        channels: Collection[str] | None = None,
    ) -> Flow[list[PendingWrite]]:
        """Decode pending writes, in the order in which langgraph applies their tasks.

        Args:
            at: The address of the checkpoint.
            checkpoint: The checkpoint.
            rows: Rows of the statement `checkpoint_writes`.
            channels: Only writes to these channels are read; None means all.
        """
        out = []
        for row in self._select_own_rows(rows):
            task = unpack_id(row[1]) or ""
            for index, channel, ref in decrypt_writes(self.seal, *at[:2], row):
                if channels is None or channel in channels:
                    value = yield from self.read_value(at.thread_id, checkpoint.thread, ref)
                    out.append((writes_sort_key(row[2], task, index), (task, channel, value)))
        out.sort(key=lambda entry: entry[0])
        return [write for _, write in out]

    def _select_own_rows(self, rows: Sequence[Row]) -> Iterator[Row]:
        """Yield the rows of a checkpoint's own writes from those of `checkpoint_writes`.

        The statement also returns the neighbouring rows of other checkpoints. They are decrypted
        too, because a row with a damaged key may be one of this checkpoint.
        """
        for owner, ns, *row in rows:
            if owner is None:
                yield tuple(row)
            else:  # raises CorruptRecord if its key is damaged
                decrypt_writes(self.seal, owner, ns, tuple(row))

    def read_value(self, thread_id: str, thread: Thread, ref: Any) -> Flow[Any]:
        """Read the value of a reference; see `manifest` for the kinds of references."""
        if isinstance(ref, bytes):
            return self.codec.decode(ref)
        kind = ref[0]
        if kind == SNAPSHOT:
            return DeltaSnapshot((yield from self.read_value(thread_id, thread, ref[1])))
        if kind == MAP:
            out = {}
            for key, inner in ref[1].items():
                out[key] = yield from self.read_value(thread_id, thread, inner)
            return out
        if kind in (LIST_HERE, DICT_HERE):
            elements = ref[1]
        else:
            elements = [[ref[1], *([ref[2], 1] if kind == ITEM else ref[2])]]
        items: list[bytes] = []
        for element in elements:
            if isinstance(element, bytes):
                items.append(element)
            else:
                ranges = unflatten_ranges(element[1:])
                log = yield from self.load_items(thread_id, thread, element[0], ranges)
                items += log.items_in(ranges)
        parts = self.codec.decode_all(items)
        if kind == ITEM:
            return parts[0]
        return dict(parts) if kind in (DICT, DICT_HERE) else parts

    def read_items_page(
        self, thread_id: str, channel: str, log: int, start: int, stop: int
    ) -> Flow[list[tuple[int, bytes]]]:
        """Read the positions and contents of the first items, or aliases, in a range of a log.

        At most `ITEMS_PAGE_SIZE` items are read.
        """
        rows = yield self.sql("items_page", *key_range(log, start, stop), ITEMS_PAGE_SIZE)
        return [decrypt_item(self.seal, thread_id, channel, *row) for row in rows]

    def read_item_times(self, log: int, ranges: Ranges) -> Flow[dict[int, float]]:
        """Return the time at which each item of a log was first stored.

        The times are in seconds since 1970, by position.
        """
        statements = [self.sql("item_times", *key_range(log, *pair)) for pair in ranges]
        answers = (yield statements) if statements else []
        return {key & 0xFFFFFFFF: stored_at for rows in answers for key, stored_at in rows}

    def load_items(
        self, thread_id: str, thread: Thread, key: int, ranges: Ranges
    ) -> Flow[ChannelLog]:
        """Load the items of ranges into the cached log, and return the log."""
        log = thread.logs.get(key)
        if log is None:
            rows = yield self.sql("find_log_channel", key)
            if not rows:
                raise CorruptRecord(f"thread {thread_id!r}: log {key} is missing")
            log = thread.get_or_add_log(key, rows[0][0])
        lacking = [pair for pair in ranges if not log.has_range(*pair)]
        aliases = [pair for pair in lacking if pair[0] >= ALIASES]
        if aliases:
            bodies = yield from self._read_bodies(thread_id, log, aliases)
            origins = dict(zip(iter_positions(aliases), map(unpack, bodies), strict=True))
            originals = join_ranges(
                (origin, origin + 1) for origin in sorted(set(origins.values()))
            )
            lacking = [pair for pair in lacking if pair[0] < ALIASES]
            lacking += [
                pair
                for pair in subtract_ranges(originals, merge_ranges(lacking))
                if not log.has_range(*pair)
            ]
        if lacking:
            stored = yield from self._read_bodies(thread_id, log, lacking)
            thread.add_items(log, zip(iter_positions(lacking), stored, strict=True))
        if aliases:
            log.origins.update(origins)
        return log

    def read_origins(
        self, thread_id: str, thread: Thread, key: int, ranges: Ranges
    ) -> Flow[list[int]]:
        """Return the positions of the items of ranges, with aliases replaced by their originals."""
        aliases = [pair for pair in ranges if pair[0] >= ALIASES]
        if not aliases:
            return [*iter_positions(ranges)]
        log = yield from self.load_items(thread_id, thread, key, aliases)
        return [*map(log.origin_position, iter_positions(ranges))]

    def load_items_by_hash(
        self, thread_id: str, thread: Thread, hashes: Sequence[int]
    ) -> Flow[None]:
        """Load the stored items of a thread that have one of these hashes into its cached logs."""
        if not hashes:
            return
        for key, body in (yield self.sql("items_with_hashes", json.dumps(hashes))):
            log, position = thread.logs.get(key >> 32), key & 0xFFFFFFFF
            if log is not None and position < ALIASES:
                item = decrypt_item(self.seal, thread_id, log.name, key, body)
                thread.add_items(log, [item])

    def _read_bodies(
        self, thread_id: str, log: ChannelLog, ranges: list[Range]
    ) -> Flow[list[bytes]]:
        """Read the contents of all items, or aliases, of ranges in order."""
        statements = [self.sql("items_between", *key_range(log.key, *pair)) for pair in ranges]
        answers = yield statements
        out: list[bytes] = []
        for (start, stop), rows in zip(ranges, answers, strict=True):
            are_all = (
                len(rows) == stop - start
            )  # a damaged range may be huge, so compare the length first
            if not are_all or [row[0] & 0xFFFFFFFF for row in rows] != [*range(start, stop)]:
                raise CorruptRecord(
                    f"thread {thread_id!r}: not all items from {start} to {stop} of channel "
                    f"{log.name!r} are in the log; restore it from a backup"
                )
            bodies = [body for _, body in rows]
            out += self.seal.unseal_rows(bodies, ("item", thread_id, log.name), start)
        return out

    # -- values of langgraph's `DeltaChannel`s

    def read_delta_history(
        self, at: Address, channels: Sequence[str]
    ) -> Flow[dict[str, DeltaChannelHistory]]:
        """Read the writes to each channel since its last stored value, and this value.

        The ancestors of the checkpoint are read one after the other, until each channel has a
        stored value. Contract: `BaseCheckpointSaver.get_delta_channel_history`.
        """
        out: dict[str, DeltaChannelHistory] = {channel: {"writes": []} for channel in channels}
        remaining = set(channels)
        here = (yield from self.find_checkpoint(at)) if channels else None
        while here is not None and here.snapshot.parent_id and remaining:
            uid = here.snapshot.parent_id
            snapshot = yield from self.read_snapshot(
                at.thread_id, at.checkpoint_ns, here.namespace_key, uid
            )
            if snapshot is None:
                break
            here = here._replace(snapshot=snapshot)
            rows = yield self._writes_statement(here)
            writes = yield from self.read_writes(at, here, rows, remaining)
            for channel in remaining:
                out[channel]["writes"][:0] = [write for write in writes if write[1] == channel]
            stored = snapshot.stored_channels()
            for channel in remaining & stored:
                ref = snapshot.references[channel]
                out[channel]["seed"] = yield from self.read_value(at.thread_id, here.thread, ref)
            remaining -= stored
        return out


def damaged_index_error(what: str) -> CorruptRecord:
    """Return the error for an index whose entry does not match its row.

    Args:
        what: The entry, such as "checkpoint 'c1' of thread 't1'".
    """
    return CorruptRecord(f"an index is damaged at {what}; restore the file from a backup")

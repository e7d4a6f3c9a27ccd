"""Read checkpoints, pending writes and log items.

A flow is a generator that yields SQL statements and is sent the resulting rows. All statements of a
flow read the same database snapshot until the flow yields a `LastRequest`, which commits the
transaction.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from perdure.checkpointers.cache import UNREAD_STEP, Cache, ChannelLog, Snapshot, Thread, Title
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.labels import select_labels_for_child_checkpoint
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
    decode_ranges,
    drop_repeated_positions,
    iter_positions,
    join_adjacent_ranges,
    merge_ranges,
    subtract_ranges,
)
from perdure.checkpointers.records import (
    ThreadRow,
    build_list_entry_update,
    build_row_key_range,
    decode_stored_id,
    decrypt_checkpoint,
    decrypt_listed_title_and_encoded_metadata,
    decrypt_position_and_item,
    decrypt_writes,
    encode_id_for_storage,
    select_metadata_shown_in_thread_lists,
)
from perdure.checkpointers.removal_records import RemovalRecords
from perdure.checkpointers.reports import ThreadStatus
from perdure.checkpointers.status import TaskWrite, build_thread_status, needs_channel_value
from perdure.checkpointers.values import DeltaSnapshot, unpack
from perdure.errors import CorruptRecord
from perdure.storage.encryption import Seal
from perdure.storage.flow import (
    NO_LIMIT,
    Flow,
    LastRequest,
    NamedSQL,
    Row,
    Statement,
    WriteCounts,
    get_result_if_no_request_is_needed,
)

# Maximum number of log items that a single SQL statement reads.
ITEMS_PAGE_SIZE: Final = 1024
# Number of row keys that a process reserves in addition to those that it needs now, so that later
# allocations of row keys rarely need to access the database.
_KEY_BLOCK_SIZE: Final = 256


class StoredCheckpoint(NamedTuple):
    """A stored checkpoint, together with its cached thread and its namespace key."""

    thread: Thread
    namespace_key: int
    snapshot: Snapshot


@dataclass(slots=True)
class CheckpointReader:
    """Reads checkpoints, pending writes and log items, and caches the log items.

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
        self, address: Address, row_key: int | None = None, *, separate_request: bool = False
    ) -> Flow[StoredCheckpoint | None]:
        """Find the checkpoint that an address refers to, without reading its values.

        Args:
            address: The address.
            row_key: The row key of the checkpoint, if it is known. The checkpoint is searched by
                its id only if no row has this key.
            separate_request: Whether to send the statement that reads the head as a `LastRequest`.
                Later statements might then see a newer state of the database.

        Returns:
            The checkpoint, or None if it does not exist.

        Raises:
            CorruptRecord: The row or an index is damaged.
        """
        rows, is_cache_valid = list[Row](), True
        if row_key is not None or address.checkpoint_id is None:
            statement = self.sql("head_with_keys", address.thread_id, address.checkpoint_ns)
            if row_key is not None:
                statement = self.sql("checkpoint_row_with_keys", address.thread_id, row_key)
            if separate_request:
                [rows] = yield LastRequest([statement])
            else:
                rows, is_cache_valid = yield from self.read_rows_and_whether_cache_is_valid(
                    address.thread_id, statement
                )
        if not rows and address.checkpoint_id is not None:
            statement = self.sql(
                "checkpoint_with_keys",
                encode_id_for_storage(address.checkpoint_id),
                address.thread_id,
                address.checkpoint_ns,
            )
            rows, is_cache_valid = yield from self.read_rows_and_whether_cache_is_valid(
                address.thread_id, statement
            )
        if not rows:
            yield from self.verify_checkpoint_missing(address)
            return None
        thread_key, generation, newest_removal, namespace_key, *row = rows[0]
        checkpoint_id = decode_stored_id(row[1])
        if thread_key is None or address.checkpoint_id not in (None, checkpoint_id):
            raise build_damaged_index_error(
                "a database index does not match the row of the checkpoint "
                f"{address.checkpoint_id!r} in thread {address.thread_id!r}"
            )
        thread = self._get_cached_or_new_thread(
            address.thread_id, (thread_key, generation, newest_removal), is_cache_valid
        )
        snapshot = thread.committed_snapshot(address.checkpoint_ns, checkpoint_id or "")
        if snapshot is None or snapshot.key != row[0]:
            snapshot = self.decrypt_checkpoint_row(
                address.thread_id, address.checkpoint_ns, tuple(row)
            )
            yield from self.unflatten_ranges_in_snapshot(address.thread_id, thread, snapshot)
            thread.record_checkpoint_if_newest(snapshot)
            thread.last_namespace = address.checkpoint_ns, namespace_key
        return StoredCheckpoint(thread, namespace_key, snapshot)

    def read_rows_and_whether_cache_is_valid(
        self, thread_id: str, statement: Statement
    ) -> Flow[tuple[list[Row], bool]]:
        """Execute a statement; check in the same request whether the thread's cached data is valid.

        The cached data is invalid if the latest cached checkpoint is missing from the database, for
        example because a failover lost commits.

        Returns:
            The rows, and whether the cached data may be used.
        """
        cached = self.cache.get_thread(thread_id)
        if cached is None or cached.newest_checkpoint is None:
            return (yield statement), True
        key, checkpoint_id = cached.newest_checkpoint
        rows, found_ids = yield [statement, self.sql("find_checkpoint_id", key)]
        return rows, bool(found_ids) and decode_stored_id(found_ids[0][0]) == checkpoint_id

    def _get_cached_or_new_thread(
        self, thread_id: str, key_generation_and_removal: tuple[int, int, int], is_cache_valid: bool
    ) -> Thread:
        """Return the cached thread if it is valid, otherwise a new `Thread` without data.

        The tuple `key_generation_and_removal` contains the thread's key, the thread's generation
        and the sequence number of its latest removal record. The cached thread is valid if
        `is_cache_valid` is True and its key and generation equal those in
        `key_generation_and_removal`. If the cached thread is not valid, a new `Thread` is created
        with the given key, generation and removal number.
        """
        return (
            self.cache.get_or_add_thread(thread_id, *key_generation_and_removal)
            if is_cache_valid
            else Thread(*key_generation_and_removal)
        )

    def verify_checkpoint_missing(self, address: Address) -> Flow[None]:
        """Check for index damage that could explain why no checkpoint with this address was found.

        Raises:
            CorruptRecord: An index is damaged, so the search may have missed the checkpoint.
        """
        if self.sql["damaged_index_entries"]:
            params = (
                address.thread_id,
                address.checkpoint_ns,
                encode_id_for_storage(address.checkpoint_id),
            )
            for (entry,) in (yield self.sql("damaged_index_entries", *params)):
                raise build_damaged_index_error(f"a database index does not match {entry}")

    def check_id_index_matches_table_row_count(
        self, table_row_count: int, start_key: int, stop_key: int
    ) -> Flow[None]:
        """Check that the checkpoint table and its id index have the same row count in a key range.

        Raises:
            CorruptRecord: The index is damaged.
        """
        ((indexed_count,),) = yield self.sql(
            "indexed_checkpoints", start_key >> 32, start_key, stop_key
        )
        if indexed_count != table_row_count:
            raise build_damaged_index_error(
                "an index of the table 'checkpoints' does not match the rows with namespace_key = "
                f"{start_key >> 32}"
            )

    def read_tuple(
        self, address: Address, row_key: int | None = None
    ) -> Flow[CheckpointTuple | None]:
        """Read the checkpoint at an address, with all its values and pending writes.

        The returned values are new objects, which the caller can modify freely.

        Args:
            address: The address.
            row_key: The row key of the checkpoint, if it is known; see `find_checkpoint`.
        """
        cached = self._find_cached_head(address) if row_key is None else None
        if cached is not None:
            # In one request, first read the pending writes of the cached head, and then read the
            # current head from the database. If both heads are the same checkpoint, the cached head
            # was not outdated when its pending writes were read.
            rows, heads = yield LastRequest(
                [
                    self._build_writes_statement(cached),
                    self.sql("head_with_keys", address.thread_id, address.checkpoint_ns),
                ]
            )
            cached_thread = cached.thread
            state = (
                cached_thread.key,
                cached_thread.generation,
                cached_thread.newest_removal,
                cached.namespace_key,
                cached.snapshot.key,
            )
            if heads and (*heads[0][:5], decode_stored_id(heads[0][5])) == (
                *state,
                cached.snapshot.checkpoint_id,
            ):
                # `_build_tuple` raises CorruptRecord if another process has deleted items of a
                # pending write since the previous request. Ignore CorruptRecord, because the code
                # below reads the checkpoint and its writes again.
                with suppress(CorruptRecord):
                    return (yield from self._build_tuple(address, cached, rows))
        if (
            row_key is None
            and address.checkpoint_id is None
            and self.cache.get_thread(address.thread_id) is None
        ):
            # Ignore CorruptRecord and read the checkpoint again below in a single request, because
            # another process may have deleted the thread between two requests.
            with suppress(CorruptRecord):
                return (
                    yield from self._read_tuple_of_checkpoint(
                        address, (yield from self.find_checkpoint(address, separate_request=True))
                    )
                )
        return (
            yield from self._read_tuple_of_checkpoint(
                address, (yield from self.find_checkpoint(address, row_key))
            )
        )

    def _read_tuple_of_checkpoint(
        self, address: Address, checkpoint: StoredCheckpoint | None
    ) -> Flow[CheckpointTuple | None]:
        """Read the channel values and pending writes of a checkpoint.

        Return None if the checkpoint is None.
        """
        if checkpoint is None:
            return None
        return (
            yield from self._build_tuple(
                address, checkpoint, (yield self._build_writes_statement(checkpoint))
            )
        )

    def build_tuple_from_cache(
        self, address: Address, write_counts_except_own: WriteCounts
    ) -> CheckpointTuple | None:
        """Return the head's `CheckpointTuple` from the cache, or None if the database must be read.

        The head is returned only if this process stored it, no other writer has changed the
        database since then, and the head's pending writes and all of its items are cached.

        Args:
            address: The address.
            write_counts_except_own: The current counts of writes by others.
        """
        stored_checkpoint = self._find_cached_head(address)
        if stored_checkpoint is None:
            return None
        head = stored_checkpoint.thread.heads.get(address.checkpoint_ns)
        if (
            head is None
            or head.snapshot is not stored_checkpoint.snapshot
            or head.write_counts_except_own != write_counts_except_own
            or head.write_rows is None
        ):
            return None
        # The result is None if the cache lacks an item of a pending write. In this case, the caller
        # reads the database.
        cached_tuple = get_result_if_no_request_is_needed(
            self._build_tuple(
                address,
                stored_checkpoint,
                [(None, None, *row) for row in head.write_rows.copy().values()],
            )
        )
        if cached_tuple is not None:
            self.cache.mark_thread_used(address.thread_id)
        return cached_tuple

    def is_head_cached(self, address: Address, max_items: int = sys.maxsize) -> bool:
        """Return whether a namespace's head is cached and contains at most `max_items` items.

        The elements of lists and dicts in the head's channel values are counted as items. Other
        values are not counted. The result is False if `address` contains a checkpoint id.
        """
        thread = self.cache.get_thread(address.thread_id) if address.checkpoint_id is None else None
        head = thread.heads.get(address.checkpoint_ns) if thread is not None else None
        if head is None or head.snapshot is None:
            return False
        return (
            sum([count_positions(ranges) for _, ranges in head.snapshot.ranges.values()])
            <= max_items
        )

    def _find_cached_head(self, address: Address) -> StoredCheckpoint | None:
        """Return a namespace's committed head from the cache.

        Return None if `address` has a checkpoint id, or if the head or some of its items are not
        cached.
        """
        thread = self.cache.get_thread(address.thread_id)
        head = thread.heads.get(address.checkpoint_ns) if thread is not None else None
        if thread is None or head is None or address.checkpoint_id is not None:
            return None
        snapshot = head.snapshot
        if snapshot is None or head.is_uncommitted:
            return None
        for channel, ref in snapshot.references.items():
            if isinstance(ref, bytes) or ref[0] == DELTA:
                continue
            if ref[0] == SNAPSHOT:
                ref = ref[1]
            # Do not use the cached head if a channel value is a MAP, LIST_HERE or DICT_HERE
            # reference, which can contain items from several logs.
            log = thread.logs.get(ref[1]) if ref[0] in (ITEM, LIST, DICT) else None
            if log is None:
                return None
            ranges = [(ref[2], ref[2] + 1)] if ref[0] == ITEM else snapshot.ranges[channel][1]
            if not all(log.has_cached_range(*pair) for pair in ranges):
                return None
        return StoredCheckpoint(thread, head.namespace_key, snapshot)

    def read_rows_of_writes(self, checkpoint: StoredCheckpoint) -> Flow[list[Row]]:
        """Read a checkpoint's writes, as rows `(checkpoint_id, task_id, task_path, body)`."""
        return [
            *self._iter_own_write_rows_and_check_neighbouring_rows(
                (yield self._build_writes_statement(checkpoint))
            )
        ]

    def _build_writes_statement(self, checkpoint: StoredCheckpoint) -> Statement:
        return self.sql(
            "checkpoint_writes",
            checkpoint.namespace_key,
            encode_id_for_storage(checkpoint.snapshot.checkpoint_id),
        )

    def _build_tuple(
        self, address: Address, stored_checkpoint: StoredCheckpoint, rows: Sequence[Row]
    ) -> Flow[CheckpointTuple]:
        """Read a checkpoint's values, and build LangGraph's `CheckpointTuple` from them."""
        snapshot, values = stored_checkpoint.snapshot, {}
        for channel, ref in snapshot.references.items():
            if ref[0] != DELTA:
                values[channel] = yield from self.read_value(
                    address.thread_id, stored_checkpoint.thread, ref
                )
        writes = yield from self.read_writes(address, stored_checkpoint, rows)
        checkpoint = {
            **self.codec.decode(snapshot.encoded_fields[0]),
            "id": snapshot.checkpoint_id,
            "channel_values": values,
            "channel_versions": dict(snapshot.channel_versions),
            "versions_seen": {node: dict(seen) for node, seen in snapshot.versions_seen.items()},
        }
        return CheckpointTuple(
            address.build_config(snapshot.checkpoint_id, stored_checkpoint.thread.newest_removal),
            checkpoint,  # type: ignore[arg-type]
            cast(CheckpointMetadata, self.decode_metadata(snapshot)),
            address.build_config(snapshot.parent_id) if snapshot.parent_id else None,
            writes,
        )

    def find_thread_status(self, address: Address) -> Flow[ThreadStatus | None]:
        """Return the thread's status at a checkpoint, or None if the checkpoint does not exist."""
        checkpoint = yield from self.find_checkpoint(address)
        if checkpoint is None:
            return None
        rows = yield from self.read_rows_of_writes(checkpoint)
        return (yield from self.read_status(*address[:2], checkpoint.snapshot, rows))

    def read_status(
        self, thread_id: str, checkpoint_ns: str, snapshot: Snapshot, rows: Sequence[Row]
    ) -> Flow[ThreadStatus]:
        """Read the values needed to determine a thread's status, and return the status.

        Args:
            thread_id: The thread.
            checkpoint_ns: The namespace.
            snapshot: The checkpoint.
            rows: The rows `(checkpoint_id, task_id, task_path, body)` of its pending writes.
        """
        values: dict[str, Any] = {
            c: None for c, ref in snapshot.references.items() if ref[0] != DELTA
        }
        for channel in filter(needs_channel_value, values):
            values[channel] = yield from self.read_referenced_value(
                thread_id, snapshot.references[channel]
            )
        writes = []
        for checkpoint_id, task_id, task_path, body in rows:
            stored = decrypt_writes(
                self.seal, thread_id, checkpoint_ns, (checkpoint_id, task_id, task_path, body)
            )
            for _, channel, ref in stored:
                write = TaskWrite(decode_stored_id(task_id) or "", task_path, channel)
                if channel in (INTERRUPT, ERROR):
                    write = write._replace(
                        value=(yield from self.read_referenced_value(thread_id, ref))
                    )
                writes.append(write)
        return build_thread_status(
            values, snapshot.channel_versions, snapshot.versions_seen, writes
        )

    def read_referenced_value(self, thread_id: str, ref: Any) -> Flow[Any]:
        """Read the value that a stored reference points to, without a `Thread` object.

        Log items that are already cached are not read from the database again.
        """
        if isinstance(ref, bytes):
            return self.codec.decode(ref)
        ((key, _, *state),), is_cache_valid = yield from self.read_rows_and_whether_cache_is_valid(
            thread_id, self.sql("find_thread", thread_id)
        )
        thread = self._get_cached_or_new_thread(thread_id, (key, *state), is_cache_valid)
        return (yield from self.read_value(thread_id, thread, ref))

    def is_head(self, address: Address) -> Flow[bool]:
        """Return whether a checkpoint is the head of its namespace.

        `address` must contain a checkpoint id.
        """
        rows = yield self.sql(
            "read_write_state",
            encode_id_for_storage(address.checkpoint_id),
            address.checkpoint_ns,
            address.thread_id,
        )
        # In the row that `read_write_state` returns, column 7 is the row key of the head, and
        # column 10 the row key of the given checkpoint.
        return bool(rows) and rows[0][7] == rows[0][10]

    def read_snapshot(
        self,
        thread_id: str,
        checkpoint_ns: str,
        namespace_key: int,
        checkpoint_id: str,
        thread: Thread | None = None,
    ) -> Flow[Snapshot | None]:
        """Read one checkpoint and its log ranges. Return None if the checkpoint does not exist.

        See `decrypt_checkpoint_row_and_unflatten_ranges` for the argument `thread`.
        """
        rows = yield self.sql(
            "find_checkpoint", namespace_key, encode_id_for_storage(checkpoint_id)
        )
        if rows and decode_stored_id(rows[0][1]) != checkpoint_id:
            raise build_damaged_index_error(
                "a database index does not match the row of the checkpoint "
                f"{checkpoint_id!r} in thread {thread_id!r}"
            )
        return (
            (
                yield from self.decrypt_checkpoint_row_and_unflatten_ranges(
                    thread_id, checkpoint_ns, rows[0], thread
                )
            )
            if rows
            else None
        )

    def decrypt_checkpoint_row_and_unflatten_ranges(
        self, thread_id: str, checkpoint_ns: str, row: Row, thread: Thread | None = None
    ) -> Flow[Snapshot]:
        """Decrypt a checkpoint's row and decode the log ranges of its values.

        `thread` is the thread as the transaction has read it. If `thread` is None, the thread is
        taken from the cache if the cache is valid.
        """
        snapshot = self.decrypt_checkpoint_row(thread_id, checkpoint_ns, row)
        if thread is None:
            (
                ((key, _, *state),),
                is_cache_valid,
            ) = yield from self.read_rows_and_whether_cache_is_valid(
                thread_id, self.sql("find_thread", thread_id)
            )
            thread = self._get_cached_or_new_thread(thread_id, (key, *state), is_cache_valid)
        yield from self.unflatten_ranges_in_snapshot(thread_id, thread, snapshot)
        return snapshot

    def decrypt_first_row_and_unflatten_ranges(
        self, address: Address, thread: Thread, rows: Sequence[Row]
    ) -> Flow[Snapshot | None]:
        """Decrypt the first checkpoint row, and decode its log ranges. Return None without rows.

        Only the thread id and the namespace of `address` are used.
        """
        if not rows:
            return None
        snapshot = self.decrypt_checkpoint_row(*address[:2], rows[0])
        yield from self.unflatten_ranges_in_snapshot(address.thread_id, thread, snapshot)
        return snapshot

    def decrypt_checkpoint_row(self, thread_id: str, checkpoint_ns: str, row: Row) -> Snapshot:
        """Decrypt a row `(row_key, checkpoint_id, parent_id, run_start, put_at, body)`.

        The log ranges in the returned snapshot still have their stored form, a flat list of
        numbers. The method `unflatten_ranges_in_snapshot` converts the flat lists in a snapshot to
        lists of `(start, stop)` pairs.
        """
        return decrypt_checkpoint(self.seal, thread_id, checkpoint_ns, row)

    def read_namespace_checkpoints(
        self, thread_id: str, checkpoint_ns: str, namespace_key: int
    ) -> Flow[Iterator[tuple[Row, Snapshot]]]:
        """Read all checkpoints of a namespace, newest first, and return each with its row.

        The log ranges in the returned snapshots still have their stored form, a flat list of
        numbers.
        """
        rows = yield self.sql("checkpoints_page", *build_row_key_range(namespace_key), NO_LIMIT)
        yield from self.check_id_index_matches_table_row_count(
            len(rows), *build_row_key_range(namespace_key)
        )
        return ((row, self.decrypt_checkpoint_row(thread_id, checkpoint_ns, row)) for row in rows)

    def decode_metadata(self, snapshot: Snapshot) -> dict[str, Any]:
        """Decode the metadata of a checkpoint. Each call returns a new dict."""
        metadata: dict[str, Any] = self.codec.decode(snapshot.encoded_fields[1])
        return metadata

    def update_thread_list_entry_from_head(
        self, thread_id: str, head_row: Row | None
    ) -> Flow[None]:
        """Copy metadata from a thread's head to the thread's entry in thread lists.

        The list entry keeps its title.

        Args:
            thread_id: The thread.
            head_row: The row `(row_key, checkpoint_id, parent_id, run_start, put_at, body)` of the
                head, or None if the thread has no head.
        """
        row = yield from self.find_thread_row(thread_id)
        if row is not None:
            title, _ = decrypt_listed_title_and_encoded_metadata(
                self.seal, thread_id, row.list_entry
            )
            metadata = (
                self.decode_metadata(self.decrypt_checkpoint_row(thread_id, "", head_row))
                if head_row
                else {}
            )
            yield from self.store_thread_list_entry(row, title, metadata)

    def find_thread_row(self, thread_id: str) -> Flow[ThreadRow | None]:
        """Read the row of a thread, or return None if no checkpoint or write was stored in it.

        A client of the server can create a thread before the first checkpoint is stored.
        """
        rows = yield self.sql("one_thread", thread_id)
        return ThreadRow(*rows[0]) if rows else None

    def store_thread_list_entry(
        self, row: ThreadRow, title: Title | None, metadata: Mapping[str, Any]
    ) -> Flow[None]:
        """Store the title and the metadata of a thread's list entry in the thread's row.

        The stored metadata contains only the keys of the head's metadata that are displayed in
        thread lists.
        """
        listed_metadata = self.select_and_encode_listed_metadata(metadata)
        yield build_list_entry_update(
            self.sql, self.seal, row.key, row.thread_id, title, listed_metadata
        )

    def select_and_encode_listed_metadata(
        self, metadata: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bytes]:
        """Return the part of a checkpoint's metadata that lists show, decoded and encoded."""
        listed_metadata = select_metadata_shown_in_thread_lists(metadata)
        return listed_metadata, self.codec.encode(listed_metadata, lambda: "metadata", exact=True)

    def decode_checkpoint_unix_time(self, snapshot: Snapshot, put_at: float) -> float:
        """Return the time of a checkpoint's creation as a Unix timestamp in seconds.

        The earlier of two times is returned: the `ts` of the checkpoint, or the time at which the
        checkpoint was stored.
        """
        ts = self.codec.decode(snapshot.encoded_fields[0]).get("ts")
        try:
            time = datetime.fromisoformat(ts)
            return min(put_at, time.replace(tzinfo=time.tzinfo or UTC).timestamp())
        except (TypeError, ValueError, OverflowError):
            return put_at

    def decode_superstep_number(self, snapshot: Snapshot) -> int | None:
        """Return the superstep number in a checkpoint's metadata, or None."""
        if snapshot.step == UNREAD_STEP:
            step = self.decode_metadata(snapshot).get("step")
            snapshot.step = step if type(step) is int else None
        return snapshot.step

    def decode_labels_for_child_checkpoints(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the metadata values that child checkpoints inherit, such as `user_id`."""
        if snapshot.labels is None:
            snapshot.labels = select_labels_for_child_checkpoint(self.decode_metadata(snapshot))
        return snapshot.labels

    def unflatten_ranges_in_snapshot(
        self, thread_id: str, thread: Thread, snapshot: Snapshot
    ) -> Flow[None]:
        """Decode a snapshot's log ranges, and set the transcript of each channel.

        The snapshot is modified in place.

        The snapshot must have been returned by `decrypt_checkpoint_row`. A transcript contains each
        item only once. If a value contains aliases (log entries that refer to earlier items), the
        aliases are loaded, so that repeated items can be detected.
        """
        stored_transcript: Any = snapshot.transcript
        snapshot.transcript = {}
        for channel, (key, numbers) in stored_transcript.items():
            snapshot.transcript[channel] = (key, decode_ranges(numbers))
        for channel, ref in snapshot.references.items():
            if ref[0] in (SNAPSHOT, DELTA) and isinstance(ref, list):
                ref = ref[1]
            if isinstance(ref, list) and ref[0] in (LIST, DICT):
                value_ranges = snapshot.ranges[channel] = (ref[1], decode_ranges(ref[2]))
                if not channel.startswith("__"):
                    snapshot.transcript.setdefault(channel, value_ranges)
        for channel, (key, ranges) in snapshot.transcript.items():
            origin = None
            aliases = [pair for pair in ranges if pair[0] >= ALIASES]
            if aliases:
                log = yield from self.load_log_items_into_cache(thread_id, thread, key, aliases)
                if log.has_no_repeated_items(ranges):
                    continue
                origin = log.resolve_alias_to_item_position
            # A transcript that was copied from the channel's value must contain each item only
            # once, so repeated positions are dropped.
            if channel not in stored_transcript:
                snapshot.transcript[channel] = (key, drop_repeated_positions(ranges, origin))

    def allocate_row_keys(self, count: int) -> Flow[list[int]]:
        """Allocate at least `count` keys for threads, namespaces and logs.

        The allocated row keys are returned in descending order. If this process has fewer than
        `count` reserved row keys left, it reserves another block of row keys in the database. Each
        reserved block contains more than `count` row keys, so most calls need no database access.
        The returned list is sorted in descending order, and the caller pops the lowest row keys
        from the end of the list. After committing its transaction, the caller must pass the
        remaining keys to `KeyBlock.replace_reserved_row_keys`. To prevent deadlocks between
        transactions, each transaction must allocate its row keys before it writes anything else.
        """
        keys = self.cache.keys.take_reserved_row_keys(count)
        if keys is None:
            ((last_key,),) = yield self.sql("allocate_keys", count + _KEY_BLOCK_SIZE)
            keys = [*range(last_key, last_key - count - _KEY_BLOCK_SIZE, -1)]
        return keys

    # -- values

    def read_writes(
        self,
        address: Address,
        checkpoint: StoredCheckpoint,
        rows: Sequence[Row],
        channels: Collection[str] | None = None,
    ) -> Flow[list[PendingWrite]]:
        """Decode pending writes, and return them in the order in which LangGraph applies them.

        Args:
            address: The address of the checkpoint.
            checkpoint: The checkpoint.
            rows: Rows of the statement `checkpoint_writes`.
            channels: Only writes to these channels are read; None means all.
        """
        writes = []
        for row in self._iter_own_write_rows_and_check_neighbouring_rows(rows):
            task_id = decode_stored_id(row[1]) or ""
            for index, channel, ref in decrypt_writes(self.seal, *address[:2], row):
                if channels is None or channel in channels:
                    value = yield from self.read_value(address.thread_id, checkpoint.thread, ref)
                    writes.append(
                        (writes_sort_key(row[2], task_id, index), (task_id, channel, value))
                    )
        writes.sort(key=lambda entry: entry[0])
        return [write for _, write in writes]

    def _iter_own_write_rows_and_check_neighbouring_rows(
        self, rows: Sequence[Row]
    ) -> Iterator[Row]:
        """Yield the rows of the `checkpoint_writes` statement that belong to the checkpoint.

        On SQLite, `checkpoint_writes` also returns the rows directly before and after the
        checkpoint's own rows in the index. The method also decrypts the rows directly before and
        after the checkpoint's rows in the index. Such a neighbouring row may belong to the
        checkpoint and have a damaged index key. The decryption of such a row fails. The first
        column is None in rows that were found by the checkpoint's index key. In a neighbouring row,
        the first column contains a thread id. A neighbouring row directly precedes or follows the
        checkpoint's own rows in the index.
        """
        for owner_id, checkpoint_ns, *row in rows:
            if owner_id is None:
                yield tuple(row)
            else:
                # Decryption raises CorruptRecord if the row's index key is damaged.
                decrypt_writes(self.seal, owner_id, checkpoint_ns, tuple(row))

    def read_value(self, thread_id: str, thread: Thread, ref: Any) -> Flow[Any]:
        """Read the value that a value reference points to.

        All kinds of value references are described in the module `manifest`.
        """
        if isinstance(ref, bytes):
            return self.codec.decode(ref)
        kind = ref[0]
        if kind == SNAPSHOT:
            return DeltaSnapshot((yield from self.read_value(thread_id, thread, ref[1])))
        if kind == MAP:
            entries = {}
            for key, inner_ref in ref[1].items():
                entries[key] = yield from self.read_value(thread_id, thread, inner_ref)
            return entries
        if kind in (LIST_HERE, DICT_HERE):
            elements = ref[1]
        else:
            elements = [[ref[1], *([ref[2], 1] if kind == ITEM else ref[2])]]
        items: list[bytes] = []
        for element in elements:
            if isinstance(element, bytes):
                items.append(element)
            else:
                ranges = decode_ranges(element[1:])
                log = yield from self.load_log_items_into_cache(
                    thread_id, thread, element[0], ranges
                )
                items += log.get_items(ranges)
        parts = self.codec.decode_all(items)
        if kind == ITEM:
            return parts[0]
        return dict(parts) if kind in (DICT, DICT_HERE) else parts

    def read_items_page(
        self, thread_id: str, channel: str, log_key: int, start: int, stop: int
    ) -> Flow[list[tuple[int, bytes]]]:
        """Read one page of a log range, and return it as `(position, content)` pairs.

        A page contains at most `ITEMS_PAGE_SIZE` log entries. Each log entry is either an item or
        an alias, which refers to an earlier item.
        """
        rows = yield self.sql(
            "items_page", *build_row_key_range(log_key, start, stop), ITEMS_PAGE_SIZE
        )
        return [decrypt_position_and_item(self.seal, thread_id, channel, *row) for row in rows]

    def read_items_and_storage_times(
        self, thread_id: str, channel: str, log_key: int, ranges: Ranges
    ) -> Flow[tuple[dict[int, bytes], dict[int, float]]]:
        """Read all items and aliases in the given log ranges, one page at a time.

        Returns:
            The contents of the entries, and the time at which each entry was first stored, in
            seconds since 1970. Both dicts are keyed by log position, in ascending order.
        """
        items = dict[int, bytes]()
        for start, stop in ranges:
            while start < stop and (
                page := (yield from self.read_items_page(thread_id, channel, log_key, start, stop))
            ):
                items |= page
                start = page[-1][0] + 1
        return items, (yield from self.read_item_storage_times(log_key, ranges))

    def read_item_storage_times(self, log_key: int, ranges: Ranges) -> Flow[dict[int, float]]:
        """Return the time at which each item in the given log ranges was first stored.

        The returned dict maps each item's log position to the item's time, in seconds since 1970.
        """
        statements = [
            self.sql("item_times", *build_row_key_range(log_key, *pair)) for pair in ranges
        ]
        answers = (yield statements) if statements else []
        return {key & 0xFFFFFFFF: stored_at for rows in answers for key, stored_at in rows}

    def load_log_items_into_cache(
        self, thread_id: str, thread: Thread, log_key: int, ranges: Ranges
    ) -> Flow[ChannelLog]:
        """Load the log items in `ranges` into the thread's cached log, and return the log.

        If `ranges` contains aliases, the items that they refer to are loaded.
        """
        log = thread.logs.get(log_key)
        if log is None:
            rows = yield self.sql("find_log_channel", log_key)
            if not rows:
                raise CorruptRecord(
                    f"the database is damaged: the table 'logs' has no row with log_key = "
                    f"{log_key}, which thread {thread_id!r} refers to; restore it from a backup"
                )
            log = thread.get_or_add_log(log_key, rows[0][0])
        missing_ranges = [pair for pair in ranges if not log.has_cached_range(*pair)]
        aliases = [pair for pair in missing_ranges if pair[0] >= ALIASES]
        if aliases:
            bodies = yield from self._read_item_bodies(thread_id, log, aliases)
            origins = dict(zip(iter_positions(aliases), map(unpack, bodies), strict=True))
            originals = join_adjacent_ranges(
                (origin, origin + 1) for origin in sorted(set(origins.values()))
            )
            missing_ranges = [pair for pair in missing_ranges if pair[0] < ALIASES]
            missing_ranges += [
                pair
                for pair in subtract_ranges(originals, merge_ranges(missing_ranges))
                if not log.has_cached_range(*pair)
            ]
        if missing_ranges:
            bodies_of_items = yield from self._read_item_bodies(thread_id, log, missing_ranges)
            thread.add_items(log, zip(iter_positions(missing_ranges), bodies_of_items, strict=True))
        if aliases:
            log.origins.update(origins)
        return log

    def read_and_decode_items(
        self, thread_id: str, thread: Thread, log_key: int, ranges: Ranges
    ) -> Flow[list[Any]]:
        """Return the decoded values of the log items in `ranges`, in order."""
        if not ranges:
            return []
        log = yield from self.load_log_items_into_cache(thread_id, thread, log_key, ranges)
        return self.codec.decode_all(log.get_items(ranges))

    def read_transcript_positions(
        self, thread_id: str, thread: Thread, snapshot: Snapshot, channel: str
    ) -> Flow[set[int]]:
        """Return the log position of each item in a channel's transcript, with aliases resolved."""
        log_key_and_ranges = snapshot.transcript.get(channel, (0, []))
        return {
            *(
                yield from self.read_positions_with_aliases_resolved(
                    thread_id, thread, *log_key_and_ranges
                )
            )
        }

    def read_positions_with_aliases_resolved(
        self, thread_id: str, thread: Thread, log_key: int, ranges: Ranges
    ) -> Flow[list[int]]:
        """Return the log position of each item in `ranges`, resolving aliases.

        An alias is a log entry that refers to an earlier item of the same log. If there is an alias
        at a position in `ranges`, the position of the item to which the alias refers is returned
        instead.
        """
        aliases = [pair for pair in ranges if pair[0] >= ALIASES]
        if not aliases:
            return [*iter_positions(ranges)]
        log = yield from self.load_log_items_into_cache(thread_id, thread, log_key, aliases)
        return [*map(log.resolve_alias_to_item_position, iter_positions(ranges))]

    def load_items_with_hashes_into_cache(
        self, thread_id: str, thread: Thread, item_hashes: Sequence[int]
    ) -> Flow[None]:
        """Find items by their content hashes, and load them into the thread's cached logs."""
        if not item_hashes:
            return
        for key, body in (yield self.sql("items_with_hashes", json.dumps(item_hashes))):
            log, position = thread.logs.get(key >> 32), key & 0xFFFFFFFF
            if log is not None and position < ALIASES:
                thread.add_items(
                    log, [decrypt_position_and_item(self.seal, thread_id, log.name, key, body)]
                )

    def _read_item_bodies(
        self, thread_id: str, log: ChannelLog, ranges: list[Range]
    ) -> Flow[list[bytes]]:
        """Read the log entries at all positions in `ranges`, in order.

        Each log entry is either an item or an alias for an earlier item.
        """
        statements = [
            self.sql("items_between", *build_row_key_range(log.key, *pair)) for pair in ranges
        ]
        answers = yield statements
        contents: list[bytes] = []
        for (start, stop), rows in zip(ranges, answers, strict=True):
            # First compare the number of rows with the length of the stored log range. A damaged
            # range can be so long that a list of its positions does not fit in memory.
            are_all = len(rows) == stop - start
            if not are_all or [row[0] & 0xFFFFFFFF for row in rows] != [*range(start, stop)]:
                raise CorruptRecord(
                    f"the database is damaged: some of the items {start} to {stop - 1} of channel "
                    f"{log.name!r} in thread {thread_id!r} are missing; restore it from a backup"
                )
            contents += self.seal.unseal_rows(
                [body for _, body in rows], ("item", thread_id, log.name), start
            )
        return contents

    # -- values of langgraph's `DeltaChannel`s

    def read_delta_channel_history(
        self, address: Address, channels: Sequence[str]
    ) -> Flow[dict[str, DeltaChannelHistory]]:
        """Read the last snapshot of each `DeltaChannel` and all writes since that snapshot.

        The ancestors of the checkpoint at `address` are read one at a time, newest first, until a
        snapshot of each `DeltaChannel` in `channels` has been found. The returned dict has the form
        that LangGraph defines for `BaseCheckpointSaver.get_delta_channel_history`.
        """
        histories: dict[str, DeltaChannelHistory] = {
            channel: {"writes": []} for channel in channels
        }
        remaining = set(channels)
        checkpoint = (yield from self.find_checkpoint(address)) if channels else None
        while checkpoint is not None and checkpoint.snapshot.parent_id and remaining:
            snapshot = yield from self.read_snapshot(
                address.thread_id,
                address.checkpoint_ns,
                checkpoint.namespace_key,
                checkpoint.snapshot.parent_id,
            )
            if snapshot is None:
                break
            checkpoint = checkpoint._replace(snapshot=snapshot)
            rows = yield self._build_writes_statement(checkpoint)
            writes = yield from self.read_writes(address, checkpoint, rows, remaining)
            for channel in remaining:
                histories[channel]["writes"][:0] = [
                    write for write in writes if write[1] == channel
                ]
            stored_channels = snapshot.stored_channels()
            for channel in remaining & stored_channels:
                ref = snapshot.references[channel]
                histories[channel]["seed"] = yield from self.read_value(
                    address.thread_id, checkpoint.thread, ref
                )
            remaining -= stored_channels
        return histories


def build_damaged_index_error(problem: str) -> CorruptRecord:
    """Build the exception to raise if an index entry and the row it points to do not match.

    Args:
        problem: A clause such as "a database index does not match the row of the checkpoint 'c1'".
    """
    return CorruptRecord(f"the database is damaged: {problem}; restore it from a backup")

"""Read the lists, heads, transcripts, checkpoints and sizes of threads for perdure's own API."""

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
    check_has_time_zone,
    check_optional_text,
    check_storable_text,
    check_thread_id,
)
from perdure.checkpointers.cache import NO_TITLE, ChannelLog, Snapshot, Title
from perdure.checkpointers.delta import TranscriptMessageIndex
from perdure.checkpointers.listing import (
    MetadataFilter,
    compute_tag_of_first_indexed_filter_value,
    metadata_matches,
)
from perdure.checkpointers.manifest import (
    ALIASES,
    DELTA,
    DICT,
    ITEM,
    SNAPSHOT,
    ValueReference,
    count_positions,
    extract_value_reference_from_delta_channel_reference,
    iter_positions,
    join_adjacent_ranges,
)
from perdure.checkpointers.put import TITLE_CANDIDATES, build_title
from perdure.checkpointers.reader import (
    CheckpointReader,
    StoredCheckpoint,
    build_damaged_index_error,
)
from perdure.checkpointers.records import (
    build_row_key,
    build_row_key_range,
    decrypt_listed_title_and_encoded_metadata,
    encrypt_thread_list_entry_and_build_search_keys,
    select_lineage,
    select_metadata_shown_in_thread_lists,
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

_INFINITY: Final = float("inf")


class ThreadReader:
    """Reads threads, heads, transcripts and checkpoints with flows of SQL statements."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader, self.sql = reader, reader.sql

    # -- transcripts

    def read_history_for_later_decoding(
        self,
        address: Address,
        channel: str,
        first_and_last_count: tuple[int, int] | None,
        before: int | None = None,
        *,
        missing_ok: bool = False,
    ) -> Flow[Callable[[], list[HistoryItem]]]:
        """Read the items of a channel up to a checkpoint; see `Checkpointer.history`.

        Args:
            address: The address of the checkpoint, or of the head.
            channel: The channel.
            first_and_last_count: The number of items to return from the start and from the end, or
                None for all.
            before: The position before which the items end, or None.
            missing_ok: Whether an unknown thread or namespace has an empty history. If False, an
                error is raised.

        Returns:
            A function that decodes the items. Decoding may take long, so call the function outside
            of an event loop.
        """
        channel = check_storable_text("channel", channel)
        first_and_last_count = (
            None
            if first_and_last_count is None
            else _parse_first_and_last_item_counts(first_and_last_count)
        )
        checkpoint = yield from self.reader.find_checkpoint(address)
        if checkpoint is None:
            thread_rows = yield self.sql("find_thread", address.thread_id)
            if missing_ok and (address.checkpoint_id is None or not thread_rows):
                return list
            raise build_not_found_error(address)
        snapshot = checkpoint.snapshot
        key, transcript = snapshot.transcript.get(channel, (0, []))
        branches: list[int] = []
        if address.checkpoint_id is None:
            branches = yield from self._find_log_positions_of_items_only_on_branches(
                address, checkpoint, channel
            )
        entries = _merge_positions_with_branch_flags(iter_positions(transcript), branches)
        if before is not None:
            ranges = [(position, position + 1) for position, _ in entries]
            entry_origins = yield from self.reader.read_positions_with_aliases_resolved(
                address.thread_id, checkpoint.thread, key, ranges
            )
            entries = entries[: entry_origins.index(before)] if before in entry_origins else []
        if first_and_last_count is not None and sum(first_and_last_count) < len(entries):
            entries = (
                entries[: first_and_last_count[0]]
                + entries[len(entries) - first_and_last_count[1] :]
            )
        if not entries:
            return list
        if not key:
            ((key,),) = yield self.sql("find_log", checkpoint.namespace_key, channel)
        value_ranges = snapshot.ranges.get(channel, (0, []))
        value_origins = yield from self.reader.read_positions_with_aliases_resolved(
            address.thread_id, checkpoint.thread, *value_ranges
        )
        value_positions = {*value_origins}
        ranges = join_adjacent_ranges((position, position + 1) for position, _ in entries)
        log = yield from self.reader.load_log_items_into_cache(
            address.thread_id, checkpoint.thread, key, ranges
        )
        bodies = log.get_items(ranges)
        is_dict, is_known = self._check_if_value_is_dict_and_if_its_items_are_known(
            snapshot.references.get(channel)
        )
        origins = [
            (log.resolve_alias_to_item_position(position), is_branch)
            for position, is_branch in entries
        ]
        value_positions |= yield from self._find_positions_of_items_reencoded_in_value(
            address, checkpoint, channel, value_positions
        )
        yield from self._load_item_storage_times_into_log(
            address.thread_id, log, {position for position, _ in origins}
        )
        times = log.stored_times

        def decode_items() -> list[HistoryItem]:
            values = self.reader.codec.decode_all(bodies)
            if is_dict:
                values = [
                    tuple(value) if type(value) is list and len(value) == 2 else value
                    for value in values
                ]
            return [
                HistoryItem(
                    value,
                    not is_branch and (origin in value_positions if is_known else None),
                    origin,
                    is_branch,
                    times[origin],
                )
                for value, (origin, is_branch) in zip(values, origins, strict=True)
            ]

        return decode_items

    def _load_item_storage_times_into_log(
        self, thread_id: str, log: ChannelLog, positions: set[int]
    ) -> Flow[None]:
        """Read and cache the time at which each item at `positions` was first stored."""
        missing_ranges = join_adjacent_ranges(
            (position, position + 1) for position in sorted(positions.difference(log.stored_times))
        )
        times = yield from self.reader.read_item_storage_times(log.key, missing_ranges)
        for position, stored_at in times.items():
            log.stored_times[position] = _convert_stored_seconds_to_datetime(thread_id, stored_at)

    def _check_if_value_is_dict_and_if_its_items_are_known(
        self, value_ref: ValueReference | None
    ) -> tuple[bool, bool]:
        """Return two bools: whether a value is a dict, and whether its items are known.

        The items of a `DeltaChannel` are considered unknown if the channel's value is unknown, or
        if its snapshot is neither a list nor a dict.
        """
        if value_ref is not None and value_ref[0] == DELTA and isinstance(value_ref[1], int):
            return value_ref[1] == DICT, False
        is_delta, value_ref = (
            isinstance(value_ref, list) and value_ref[0] == SNAPSHOT,
            extract_value_reference_from_delta_channel_reference(value_ref),
        )
        if not isinstance(value_ref, bytes):
            return value_ref is not None and value_ref[0] == DICT, not is_delta or value_ref[
                0
            ] != ITEM
        # An empty list or dict is stored inline as encoded bytes, because it has no items in a log.
        value = self.reader.codec.decode(value_ref)
        if type(value) is DeltaSnapshot:
            return type(value.value) is dict, type(value.value) in (list, dict)
        return type(value) is dict, True

    def _find_positions_of_items_reencoded_in_value(
        self,
        address: Address,
        checkpoint: StoredCheckpoint,
        channel: str,
        value_positions: set[int],
    ) -> Flow[set[int]]:
        """Find transcript items that a `DeltaChannel`'s value contains in a different encoding.

        Returns:
            The positions of the found items in the log.
        """
        key, transcript_ranges = checkpoint.snapshot.transcript.get(channel, (0, []))
        ref = checkpoint.snapshot.references.get(channel)
        if not isinstance(ref, list) or ref[0] not in (SNAPSHOT, DELTA):
            return set()
        origins = yield from self.reader.read_positions_with_aliases_resolved(
            address.thread_id, checkpoint.thread, key, transcript_ranges
        )
        other_positions = sorted(value_positions.difference(origins))
        if not other_positions:
            return set()
        removed_positions, parts = (
            [position for position in origins if position not in value_positions],
            [],
        )
        for missing in (removed_positions, other_positions):
            ranges = join_adjacent_ranges((position, position + 1) for position in missing)
            log = yield from self.reader.load_log_items_into_cache(
                address.thread_id, checkpoint.thread, key, ranges
            )
            parts.append(self.reader.codec.decode_all(log.get_items(ranges)))
        transcript = TranscriptMessageIndex(parts[0])
        numbers = map(transcript.pop_index_of_matching_message, parts[1])
        return {removed_positions[number] for number in numbers if number is not None}

    def read_delta_channel_values(self, address: Address) -> Flow[dict[str, Any]]:
        """Read the values of `DeltaChannel`s; see `Checkpointer.delta_values`."""
        checkpoint = yield from self.reader.find_checkpoint(address)
        if checkpoint is None:
            raise build_not_found_error(address)
        values: dict[str, Any] = {}
        for channel, ref in checkpoint.snapshot.references.items():
            if isinstance(ref, list) and ref[0] in (SNAPSHOT, DELTA):
                inner, values[channel] = (
                    extract_value_reference_from_delta_channel_reference(ref),
                    None,
                )
                if inner is not None:
                    value = self.reader.read_value(address.thread_id, checkpoint.thread, inner)
                    values[channel] = yield from value
            elif isinstance(ref, bytes):
                value = self.reader.codec.decode(ref)
                if type(value) is DeltaSnapshot:
                    values[channel] = value.value
        return values

    def _find_log_positions_of_items_only_on_branches(
        self, address: Address, checkpoint: StoredCheckpoint, channel: str
    ) -> Flow[list[int]]:
        """Return the sorted log positions of the items that occur only on a thread's branches."""
        rows = yield self.sql("checkpoint_keys", *build_row_key_range(checkpoint.namespace_key))
        head_lineage = {key for key, *_ in select_lineage(rows, checkpoint.snapshot.key)}
        parents = {parent for _, _, parent in rows}
        tips = [
            key
            for key, checkpoint_id, _ in rows
            if key not in head_lineage and checkpoint_id not in parents
        ]
        branch_positions: set[int] = set()
        for tip in tips:
            (row,) = yield self.sql("checkpoint_row", tip)
            snapshot = yield from self.reader.decrypt_checkpoint_row_and_unflatten_ranges(
                address.thread_id, address.checkpoint_ns, row
            )
            ranges = snapshot.transcript.get(channel, (0, []))
            branch_positions.update(
                (
                    yield from self.reader.read_positions_with_aliases_resolved(
                        address.thread_id, checkpoint.thread, *ranges
                    )
                )
            )
        if branch_positions:
            ranges = checkpoint.snapshot.transcript.get(channel, (0, []))
            branch_positions.difference_update(
                (
                    yield from self.reader.read_positions_with_aliases_resolved(
                        address.thread_id, checkpoint.thread, *ranges
                    )
                )
            )
        return sorted(branch_positions)

    # -- threads

    def list_threads(
        self, limit: int, after: str | None, prefix: str, active_since: datetime | None
    ) -> Flow[list[ThreadInfo]]:
        """Return one page of threads; see `Checkpointer.threads`."""
        threads = []
        for row in (yield from self._read_thread_rows(limit, after, prefix, active_since)):
            threads.append((yield from self._build_thread_info(row)))
        return threads

    def list_largest_threads(self, limit: int) -> Flow[list[ThreadInfo]]:
        """Return the threads that use the most bytes, largest first; see `Checkpointer.usage`."""
        rows, threads = (yield self.sql("largest_threads", limit)), []
        for row in rows:
            threads.append((yield from self._build_thread_info(row)))
        return threads

    def list_heads(
        self,
        limit: int,
        after: str | None,
        prefix: str,
        active_since: datetime | None,
        where: MetadataFilter,
        only_waiting: bool,
    ) -> Flow[list[ThreadHead]]:
        """Return the heads of one page of threads; see `Checkpointer.heads`."""
        tag, heads = (
            compute_tag_of_first_indexed_filter_value(self.reader.seal, where),
            list[ThreadHead](),
        )
        statement_args = ("list_threads",) if tag is None else ("tagged_threads", tag)
        statement_args = ("waiting_threads",) if only_waiting else statement_args
        while True:
            rows = yield from self._read_thread_rows(
                limit, after, prefix, active_since, *statement_args
            )
            for head in (yield from self.read_heads(rows)):
                is_match = not only_waiting or head.status.state == "waiting"
                if is_match and (not where or metadata_matches(head.metadata, where)):
                    heads.append(head)
            if len(heads) >= limit or len(rows) < limit:
                return heads[:limit]
            after = rows[-1][1]

    def read_head(self, thread_id: str) -> Flow[ThreadHead | None]:
        """Return the head of one thread, or None if it does not exist; see `Checkpointer.head`."""
        try:
            row = yield from self._read_thread_row(thread_id)
        except UnknownThread:
            return None
        (head,) = yield from self.read_heads([row])
        return head

    def read_heads(self, rows: list[Row]) -> Flow[list[ThreadHead]]:
        """Read the heads of the threads in `rows`.

        The data of all threads is read with two SQL statements. Additional statements are needed
        for each thread that has no stored title.
        """
        keys = json.dumps([row[0] for row in rows])
        head_rows, write_rows = yield [self.sql("root_heads", keys), self.sql("root_writes", keys)]
        checkpoints = {thread_key: row for thread_key, *row in head_rows}
        writes_by_thread: dict[int, list[Row]] = {}
        for thread_key, *row in write_rows:
            writes_by_thread.setdefault(thread_key, []).append(tuple(row))
        heads = []
        for thread_key, thread_id, created_at, updated_at, _, title in rows:
            checkpoint_id, metadata, status, head = None, dict[str, Any](), IDLE, None
            if thread_key in checkpoints:
                head = self.reader.decrypt_checkpoint_row(
                    thread_id, "", tuple(checkpoints[thread_key])
                )
                checkpoint_id, metadata = head.checkpoint_id, self.reader.decode_metadata(head)
                status = yield from self.reader.read_status(
                    thread_id, "", head, writes_by_thread.get(thread_key, [])
                )
            stored_title, _ = decrypt_listed_title_and_encoded_metadata(
                self.reader.seal, thread_id, title
            )
            if stored_title is None and head is not None:
                stored_title = yield from self._rebuild_title_from_messages(
                    thread_id, head, metadata
                )
            times = (
                _convert_stored_seconds_to_datetime(thread_id, updated_at),
                _convert_stored_seconds_to_datetime(thread_id, created_at),
            )
            text = stored_title.text if stored_title is not None else ""
            heads.append(ThreadHead(thread_id, checkpoint_id, metadata, *times, status, text))
        return heads

    def recompute_thread_list_entry(self, row: Row) -> Flow[None]:
        """Recompute the title and metadata in a thread's row from the head checkpoint."""
        title, listed_metadata = None, dict[str, Any]()
        for _, *checkpoint in (yield self.sql("root_heads", json.dumps([row[0]]))):
            head = self.reader.decrypt_checkpoint_row(row[1], "", tuple(checkpoint))
            metadata = self.reader.decode_metadata(head)
            title = yield from self._rebuild_title_from_messages(row[1], head, metadata)
            listed_metadata = select_metadata_shown_in_thread_lists(metadata)
        encoded = (
            listed_metadata,
            self.reader.codec.encode(listed_metadata, lambda: "metadata", exact=True),
        )
        list_entry = encrypt_thread_list_entry_and_build_search_keys(
            self.reader.seal, row[1], title or NO_TITLE, encoded
        )
        yield self.sql("set_list_entry", *list_entry, row[0])

    def _rebuild_title_from_messages(
        self, thread_id: str, head: Snapshot, metadata: Mapping[str, Any]
    ) -> Flow[Title | None]:
        """Build the title of a thread from the metadata of its head or from its first messages.

        This is needed if an erasure or a prune has removed the title from the thread's row.
        """
        checkpoint = yield from self.reader.find_checkpoint(
            Address(thread_id, "", head.checkpoint_id), head.key
        )
        key, ranges = (
            checkpoint.snapshot.transcript.get("messages", (0, [])) if checkpoint else (0, [])
        )
        first_ranges = [
            (position, position + 1)
            for position in islice(iter_positions(ranges), TITLE_CANDIDATES)
        ]
        messages: list[Any] = []
        if checkpoint is not None and first_ranges:
            log = yield from self.reader.load_log_items_into_cache(
                thread_id, checkpoint.thread, key, first_ranges
            )
            messages = self.reader.codec.decode_all(log.get_items(first_ranges))
        return build_title(metadata, messages)

    def read_status(self, address: Address) -> Flow[ThreadStatus]:
        """Return the status of a thread at a checkpoint; see `Checkpointer.status`."""
        status = yield from self.reader.find_thread_status(address)
        if status is None:
            raise build_not_found_error(address)
        return status

    def _read_thread_rows(
        self,
        limit: int,
        after: str | None,
        prefix: str,
        active_since: datetime | None,
        statement_name: str = "list_threads",
        *params: int,
    ) -> Flow[list[Row]]:
        """Read one page of rows of threads.

        Args:
            limit: The maximum number of rows.
            after: The id of the last thread of the page before, or None for the first page.
            prefix: Only threads whose ids begin with this text.
            active_since: Only threads whose last activity was at this time or later, or None.
            statement_name: The name of the statement that lists the rows.
            params: Further parameters of the statement.

        Raises:
            ConfigurationError: `limit` is not positive.
            UnknownThread: The thread `after` does not exist.
        """
        if limit <= 0:
            raise ConfigurationError(f"the argument 'limit' is {limit!r}; expected at least 1")
        since = -_INFINITY
        if active_since is not None:
            # Subtract one microsecond to allow for rounding when stored times are converted to
            # datetimes.
            since = check_has_time_zone("active_since", active_since).timestamp() - 1e-6
        prefix, last_key = check_storable_text("prefix", prefix), (_INFINITY, 0)
        if after is not None:
            thread_key, _, _, updated_at, *_ = yield from self._read_thread_row(after)
            last_key = (updated_at, thread_key)
        return list(
            (yield self.sql(statement_name, *last_key, prefix.encode(), limit, since, *params))
        )

    def read_info(self, thread_id: str) -> Flow[ThreadInfo]:
        """Return the size and timestamps of one thread; see `Checkpointer.thread`."""
        return (yield from self._build_thread_info((yield from self._read_thread_row(thread_id))))

    def shortest_unique_prefix(self, thread_id: str, min_length: int) -> Flow[str]:
        """Return the shortest unique prefix of an id; see `Checkpointer.unique_prefix`.

        Args:
            thread_id: The id.
            min_length: The minimum length of the prefix.
        """
        thread_id = check_thread_id(thread_id)
        [others] = yield self.sql("neighbouring_thread_ids", thread_id)
        # In a sorted list of ids, the id that shares the longest prefix with a given id is adjacent
        # to the given id.
        shared = max(len(commonprefix([thread_id, other or ""])) for other in others)  # noqa: RUF071
        return thread_id[: max(min_length, shared + 1)]

    def _read_thread_row(self, thread_id: str) -> Flow[Row]:
        """Return the row of a thread.

        Raises:
            UnknownThread: The thread does not exist.
        """
        thread_id = check_thread_id(thread_id)
        rows = yield self.sql("one_thread", thread_id)
        if not rows:
            yield from self.reader.verify_checkpoint_missing(Address(thread_id, "", None))
            raise build_not_found_error(Address(thread_id, "", None))
        return rows[0]  # type: ignore[no-any-return]

    def _build_thread_info(self, row: Row) -> Flow[ThreadInfo]:
        """Read the sizes and the head of a thread, and build its `ThreadInfo`."""
        thread_key, thread_id, created_at, updated_at, indexed, _ = row
        if indexed != thread_key:
            raise build_damaged_index_error(
                f"the index entry of the thread with the key {thread_key} is damaged"
            )
        namespaces = yield self.sql("thread_namespaces", thread_key)
        names = tuple(ns for _, ns, _ in namespaces)
        ((checkpoints, items, size),) = yield self.sql("thread_sizes", thread_key)
        head = (
            (yield from self.reader.find_checkpoint(Address(thread_id, "", None)))
            if "" in names
            else None
        )
        message_count, active_at = 0, updated_at
        if head is not None:
            message_count = count_positions(head.snapshot.transcript.get("messages", (0, []))[1])
            active_at = self.reader.decode_checkpoint_unix_time(head.snapshot, updated_at)
        created, updated, active = (
            _convert_stored_seconds_to_datetime(thread_id, seconds)
            for seconds in (created_at, updated_at, active_at)
        )
        return ThreadInfo(
            thread_id, checkpoints, items, size, created, updated, names, active, message_count
        )

    def find_thread_if_idle_since(
        self, thread_id: str, before: datetime
    ) -> Flow[ThreadInfo | None]:
        """Return a thread if its last activity was before the given time, otherwise None.

        None is also returned if a run of the server in the thread has not ended, or if the thread
        has a cron that will run again.
        """
        rows = yield self.sql("one_thread", check_thread_id(thread_id))
        planned_runs = yield self.sql("has_planned_runs", thread_id)
        info = (yield from self._build_thread_info(rows[0])) if rows and not planned_runs else None
        return info if info is not None and info.active_at < before else None

    # -- checkpoints

    def list_checkpoints(
        self,
        thread_id: str,
        checkpoint_ns: str | None,
        limit: int | None,
        before: int | None = None,
    ) -> Flow[list[CheckpointInfo]]:
        """Return checkpoints without their values; see `Checkpointer.checkpoints`."""
        checkpoint_ns = check_optional_text("checkpoint_ns", checkpoint_ns)
        thread_key, thread_id, *_ = yield from self._read_thread_row(thread_id)
        checkpoints: list[CheckpointInfo] = []
        for namespace, ns, head in (yield self.sql("thread_namespaces", thread_key)):
            if checkpoint_ns is not None and ns != checkpoint_ns:
                continue
            keys = yield self.sql("checkpoint_keys", *build_row_key_range(namespace))
            yield from self.reader.check_id_index_matches_table_row_count(
                len(keys), *build_row_key_range(namespace)
            )
            head_lineage = {key for key, *_ in select_lineage(keys, build_row_key(namespace, head))}
            max_rows = NO_LIMIT if limit is None else limit
            keys_range = (
                build_row_key_range(namespace)
                if before is None
                else build_row_key_range(namespace, 0, before)
            )
            for row in (yield self.sql("checkpoints_page", *keys_range, max_rows)):
                checkpoints.append(
                    (yield from self._build_checkpoint_info(thread_id, ns, row, head_lineage, head))
                )
        return sorted(checkpoints, key=lambda info: -info.order)

    def _build_checkpoint_info(
        self, thread_id: str, checkpoint_ns: str, row: Row, head_lineage: set[int], head_seq: int
    ) -> Flow[CheckpointInfo]:
        """Decrypt the row of a checkpoint, and build its `CheckpointInfo`.

        Args:
            thread_id: The thread.
            checkpoint_ns: The namespace.
            row: The row of the checkpoint.
            head_lineage: The row keys of the head and its ancestors.
            head_seq: The sequence number of the head.
        """
        snapshot = yield from self.reader.decrypt_checkpoint_row_and_unflatten_ranges(
            thread_id, checkpoint_ns, row
        )
        fields: dict[str, Any] = self.reader.codec.decode(snapshot.encoded_fields[0])
        status = yield from self.reader.read_status(thread_id, checkpoint_ns, snapshot, [])
        order = row[0] & 0xFFFFFFFF
        return CheckpointInfo(
            snapshot.checkpoint_id,
            snapshot.parent_id,
            checkpoint_ns,
            order,
            order == head_seq,
            row[0] not in head_lineage,
            self.reader.decode_metadata(snapshot),
            str(fields.get("ts", "")),
            {channel: count_positions(ranges) for channel, (_, ranges) in snapshot.ranges.items()},
            status.next,
        )


def _merge_positions_with_branch_flags(
    head_positions: Iterable[int], branch_positions: list[int]
) -> list[tuple[int, bool]]:
    """Merge the positions of head items and branch items into one list, in transcript order.

    Args:
        head_positions: The positions up to the head, in the order of the transcript.
        branch_positions: The sorted positions of items that are only on branches.

    Returns:
        Pairs of a position and a bool. The bool says whether the position is only on a branch.
    """
    entries: list[tuple[int, bool]] = []
    remaining = branch_positions[::-1]
    for position in head_positions:
        # The position of an alias does not indicate when the aliased item was stored.
        while remaining and remaining[-1] < position < ALIASES:
            entries.append((remaining.pop(), True))
        entries.append((position, False))
    return entries + [(position, True) for position in reversed(remaining)]


def _convert_stored_seconds_to_datetime(thread_id: str, seconds: float) -> datetime:
    """Convert a Unix timestamp in seconds to a UTC datetime.

    Raises:
        CorruptRecord: The number is not a valid time.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as exc:
        raise CorruptRecord(
            f"the database is damaged, because the row of thread {thread_id!r} has the time "
            f"{seconds!r}, which is not a valid number of seconds since 1970"
        ) from exc


def _parse_first_and_last_item_counts(ends: Any) -> tuple[int, int]:
    """Validate `ends`, and return the number of items to read from the start and from the end.

    Raises:
        ConfigurationError: The argument is not a pair of numbers that are zero or more.
    """
    with suppress(TypeError, ValueError):
        first, last = map(index, ends)
        if first >= 0 and last >= 0:
            return first, last
    raise ConfigurationError(
        f"the argument 'ends' is {ends!r:.80}; expected two item counts, one for the start and one "
        "for the end, such as (0, 50)"
    )


def build_not_found_error(address: Address) -> UnknownThread | UnknownCheckpoint:
    """Build the error for a thread, namespace or checkpoint that does not exist.

    If `address` has a checkpoint id, the error reports a missing checkpoint, otherwise a missing
    thread.
    """
    suffix = f" with the namespace {address.checkpoint_ns!r}" if address.checkpoint_ns else ""
    if address.checkpoint_id is None:
        return UnknownThread(
            f"there is no thread {address.thread_id!r}{suffix}; threads() lists all threads"
        )
    return UnknownCheckpoint(
        f"thread {address.thread_id!r}{suffix} has no checkpoint {address.checkpoint_id!r}; "
        "checkpoints() lists all checkpoints of the thread"
    )

"""Run read-only queries on threads for perdure's own API.

A query returns a list of threads, or it returns the heads, the transcript, the checkpoints or the
size of one thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from operator import index
from os.path import commonprefix
from typing import Any, Final, TypeAlias

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
    Ranges,
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
    ThreadRow,
    build_row_key,
    build_row_key_range,
    compute_metadata_index_tag,
    decrypt_listed_title_and_encoded_metadata,
    select_lineage,
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
from perdure.storage.flow import NO_LIMIT, Flow, Row, Statement

_INFINITY: Final = float("inf")
_USER_CONDITIONS: Final = (("user_id", "has_user_tag"), ("owner", "has_owner_tag"))
"""The metadata keys that identify a user, and the SQL condition on the index tag of each."""
_MAX_SORTED_THREADS: Final = 1_000
"""The maximum number of threads whose keys a list reads before it sorts the threads by activity."""
_ListCondition: TypeAlias = "tuple[str] | tuple[str, int | str]"
"""The name of the SQL condition of a list of threads, and its parameter if it has one."""


class ThreadReader:
    """Reads threads, heads, transcripts and checkpoints from the database.

    Each read method returns a flow, which is a generator that yields SQL statements and receives
    the resulting rows.
    """

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
            else _parse_counts_of_first_and_last_items(first_and_last_count)
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
        """Return two flags that describe a channel's value.

        The first flag is True if the value is a dict. The second flag is True if the items in the
        channel's value can be determined from the stored checkpoint.

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
        """Find messages that the transcript and a channel's value store as different bytes.

        The bytes of such an item in the transcript differ from the bytes of the same item in the
        channel's value.

        If the channel is not a `DeltaChannel`, return an empty set.

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
            parts.append(
                (
                    yield from self.reader.read_and_decode_items(
                        address.thread_id, checkpoint.thread, key, ranges
                    )
                )
            )
        transcript = TranscriptMessageIndex(parts[0])
        numbers = map(transcript.pop_index_of_matching_message, parts[1])
        return {removed_positions[number] for number in numbers if number is not None}

    def read_delta_channel_values(self, address: Address) -> Flow[dict[str, Any]]:
        """Read the values of `DeltaChannel`s; see `Checkpointer.delta_values`."""
        checkpoint = yield from find_checkpoint_or_raise(self.reader, address)
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
        """Return the sorted log positions of items that are on branches but not in the head."""
        read_positions = partial(
            self.reader.read_positions_with_aliases_resolved, address.thread_id, checkpoint.thread
        )
        positions: set[int] = set()
        for transcript in (
            yield from read_transcripts_of_branches(self.reader, address, checkpoint, channel)
        ):
            positions.update((yield from read_positions(*transcript)))
        if positions:
            transcript = checkpoint.snapshot.transcript.get(channel, (0, []))
            positions.difference_update((yield from read_positions(*transcript)))
        return sorted(positions)

    # -- threads

    def list_threads(
        self, limit: int, after: str | None, prefix: str, active_since: datetime | None
    ) -> Flow[list[ThreadInfo]]:
        """Return one page of threads; see `Checkpointer.threads`."""
        condition = yield from self._choose_list_condition(prefix, {})
        rows = yield from self._read_thread_rows(limit, after, prefix, active_since, *condition)
        return (yield from self._read_thread_infos(rows))

    def list_largest_threads(self, limit: int) -> Flow[list[ThreadInfo]]:
        """Return the threads that use the most bytes, largest first; see `Checkpointer.usage`."""
        rows = yield self.sql("largest_threads", limit)
        return (yield from self._read_thread_infos([ThreadRow(*row) for row in rows]))

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
        condition: _ListCondition = ("may_wait",)
        if not only_waiting:
            condition = yield from self._choose_list_condition(prefix, where)
        heads = list[ThreadHead]()
        while True:
            rows = yield from self._read_thread_rows(limit, after, prefix, active_since, *condition)
            for head in (yield from self.read_heads(rows)):
                is_match = not only_waiting or head.status.state == "waiting"
                if is_match and (not where or metadata_matches(head.metadata, where)):
                    heads.append(head)
            if len(heads) >= limit or len(rows) < limit:
                return heads[:limit]
            after = rows[-1].thread_id

    def read_head(self, thread_id: str) -> Flow[ThreadHead | None]:
        """Return the head of one thread, or None if it does not exist; see `Checkpointer.head`."""
        try:
            row = yield from self._read_thread_row(thread_id)
        except UnknownThread:
            return None
        (head,) = yield from self.read_heads([row])
        return head

    def read_heads(self, rows: Sequence[ThreadRow]) -> Flow[list[ThreadHead]]:
        """Read the heads of the threads in `rows`.

        The heads of all threads are read with two SQL statements. For each thread that has no
        stored title, additional SQL statements are executed to build the title.
        """
        keys = json.dumps([row.key for row in rows])
        head_rows, write_rows = yield [self.sql("root_heads", keys), self.sql("root_writes", keys)]
        checkpoints = {thread_key: row for thread_key, *row in head_rows}
        writes_by_thread: dict[int, list[Row]] = {}
        for thread_key, *row in write_rows:
            writes_by_thread.setdefault(thread_key, []).append(tuple(row))
        heads = []
        for row in rows:
            thread_id = row.thread_id
            checkpoint_id, metadata, status, head = None, dict[str, Any](), IDLE, None
            if row.key in checkpoints:
                head = self.reader.decrypt_checkpoint_row(
                    thread_id, "", tuple(checkpoints[row.key])
                )
                checkpoint_id, metadata = head.checkpoint_id, self.reader.decode_metadata(head)
                status = yield from self.reader.read_status(
                    thread_id, "", head, writes_by_thread.get(row.key, [])
                )
            stored_title, _ = decrypt_listed_title_and_encoded_metadata(
                self.reader.seal, thread_id, row.list_entry
            )
            if stored_title is None and head is not None:
                stored_title = yield from self._rebuild_title_from_messages(
                    thread_id, head, metadata
                )
            times = (
                _convert_stored_seconds_to_datetime(thread_id, row.updated_at),
                _convert_stored_seconds_to_datetime(thread_id, row.created_at),
            )
            heads.append(
                ThreadHead(
                    thread_id,
                    checkpoint_id,
                    metadata,
                    *times,
                    status,
                    stored_title.text if stored_title is not None else "",
                )
            )
        return heads

    def recompute_thread_list_entry(self, row: ThreadRow) -> Flow[None]:
        """Recompute the title and metadata in a thread's row from the head checkpoint."""
        title, metadata = None, dict[str, Any]()
        for _, *checkpoint in (yield self.sql("root_heads", json.dumps([row.key]))):
            head = self.reader.decrypt_checkpoint_row(row.thread_id, "", tuple(checkpoint))
            metadata = self.reader.decode_metadata(head)
            title = yield from self._rebuild_title_from_messages(row.thread_id, head, metadata)
        yield from self.reader.store_thread_list_entry(row, title or NO_TITLE, metadata)

    def _rebuild_title_from_messages(
        self, thread_id: str, head: Snapshot, metadata: Mapping[str, Any]
    ) -> Flow[Title | None]:
        """Build the title of a thread from the metadata of its head or from its first messages.

        The title must be rebuilt if an erasure or a prune has removed it from the thread's row.
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
        if checkpoint is not None:
            messages = yield from self.reader.read_and_decode_items(
                thread_id, checkpoint.thread, key, first_ranges
            )
        return build_title(metadata, messages)

    def read_status(self, address: Address) -> Flow[ThreadStatus]:
        """Return the status of a thread at a checkpoint; see `Checkpointer.status`."""
        status = yield from self.reader.find_thread_status(address)
        if status is None:
            raise build_not_found_error(address)
        return status

    def _choose_list_condition(self, prefix: str, where: MetadataFilter) -> Flow[_ListCondition]:
        """Choose the SQL condition by which a list finds the threads that may match.

        A filter for a user uses an index of the threads by user and activity. If few threads can
        match another filter or the prefix, their keys are read first, so that only these threads
        are sorted by activity. Otherwise, the list reads the threads in the order of activity, and
        skips those that do not match.

        Args:
            prefix: Only threads whose ids begin with this text.
            where: The values that the metadata of the head must have.
        """
        seal = self.reader.seal
        for name, condition_name in _USER_CONDITIONS:
            if name in where:
                tag = compute_metadata_index_tag(seal, name, where[name])
                if tag is not None:
                    return condition_name, tag
        tag = compute_tag_of_first_indexed_filter_value(seal, where)
        if tag is not None:
            rows = yield self.sql("keys_of_tagged_threads", tag, _MAX_SORTED_THREADS + 1)
            condition: _ListCondition = ("has_tag", tag)
        elif prefix:
            prefix = check_storable_text("prefix", prefix)
            stop = _compute_end_of_prefix_range(prefix)
            if stop is None:
                return ("is_started",)
            rows = yield self.sql(
                "keys_of_threads_in_id_range", prefix, stop, _MAX_SORTED_THREADS + 1
            )
            condition = ("is_started",)
        else:
            return ("is_started",)
        if len(rows) > _MAX_SORTED_THREADS:
            return condition
        return "has_key", json.dumps(sorted({key for (key,) in rows if key is not None}))

    def _read_thread_rows(
        self,
        limit: int,
        after: str | None,
        prefix: str,
        active_since: datetime | None,
        condition_name: str,
        *params: int | str,
    ) -> Flow[list[ThreadRow]]:
        """Read one page of thread rows, sorted by the time of the last activity, newest first.

        Args:
            limit: The maximum number of rows.
            after: The id of the last thread of the page before, or None for the first page.
            prefix: Only threads whose ids begin with this text.
            active_since: Only threads whose last activity was at this time or later, or None.
            condition_name: The name of the SQL condition that the threads must fulfil.
            params: The parameters of the condition.

        Raises:
            ConfigurationError: `limit` is not positive.
            UnknownThread: The thread `after` does not exist.
        """
        if limit <= 0:
            raise ConfigurationError(f"the argument 'limit' is {limit!r}; expected at least 1")
        since = -_INFINITY
        if active_since is not None:
            # Subtract one microsecond from `active_since`, because stored times are rounded when
            # they are converted to datetimes.
            since = check_has_time_zone("active_since", active_since).timestamp() - 1e-6
        prefix, last_key = check_storable_text("prefix", prefix), (_INFINITY, 0)
        if after is not None:
            last_row = yield from self._read_thread_row(after)
            last_key = (last_row.updated_at, last_row.key)
        condition, activity = self.sql[condition_name], "t.updated_at"
        if condition_name == "has_key":
            # Without the index of activity, the database reads the threads by their keys.
            condition, activity = f"{condition} AND {self.sql['is_started']}", "(t.updated_at + 0)"
        sql = self.sql["list_threads"]
        sql = sql.replace("{condition}", condition).replace("{activity}", activity)
        rows = yield Statement(sql, (*last_key, prefix.encode(), limit, since, *params))
        return [ThreadRow(*row) for row in rows]

    def read_info(self, thread_id: str) -> Flow[ThreadInfo]:
        """Return the size and timestamps of one thread; see `Checkpointer.thread`."""
        return (yield from self._read_thread_info((yield from self._read_thread_row(thread_id))))

    def shortest_unique_prefix(self, thread_id: str, min_length: int) -> Flow[str]:
        """Return the shortest unique prefix of an id; see `Checkpointer.unique_prefix`.

        Args:
            thread_id: The id.
            min_length: The minimum length of the prefix.
        """
        thread_id = check_thread_id(thread_id)
        [others] = yield self.sql("neighbouring_thread_ids", thread_id)
        # The id with the longest common prefix is directly before or after the given id in sort
        # order.
        shared = max(len(commonprefix([thread_id, other or ""])) for other in others)  # noqa: RUF071
        return thread_id[: max(min_length, shared + 1)]

    def _read_thread_row(self, thread_id: str) -> Flow[ThreadRow]:
        """Return the row of a thread.

        Raises:
            UnknownThread: The thread does not exist.
        """
        thread_id = check_thread_id(thread_id)
        row = yield from self.reader.find_thread_row(thread_id)
        if row is None:
            yield from self.reader.verify_checkpoint_missing(Address(thread_id, "", None))
            raise build_not_found_error(Address(thread_id, "", None))
        return row

    def _read_thread_infos(self, rows: Sequence[ThreadRow]) -> Flow[list[ThreadInfo]]:
        """Read the sizes and the heads of the threads in `rows`."""
        infos = []
        for row in rows:
            infos.append((yield from self._read_thread_info(row)))
        return infos

    def _read_thread_info(self, row: ThreadRow) -> Flow[ThreadInfo]:
        """Build a `ThreadInfo` from a thread's head and its checkpoint, item and byte counts."""
        thread_id = row.thread_id
        if row.indexed_key != row.key:
            raise build_damaged_index_error(
                "an index of the table 'threads' does not match the row with thread_key = "
                f"{row.key}"
            )
        namespaces = yield self.sql("thread_namespaces", row.key)
        names = tuple(ns for _, ns, _ in namespaces)
        ((checkpoints, items, size),) = yield self.sql("thread_sizes", row.key)
        head = (
            (yield from self.reader.find_checkpoint(Address(thread_id, "", None)))
            if "" in names
            else None
        )
        message_count, active_at = 0, row.updated_at
        if head is not None:
            message_count = count_positions(head.snapshot.transcript.get("messages", (0, []))[1])
            active_at = self.reader.decode_checkpoint_unix_time(head.snapshot, row.updated_at)
        created, updated, active = (
            _convert_stored_seconds_to_datetime(thread_id, seconds)
            for seconds in (row.created_at, row.updated_at, active_at)
        )
        return ThreadInfo(
            thread_id, checkpoints, items, size, created, updated, names, active, message_count
        )

    def find_thread_if_idle_since(
        self, thread_id: str, before: datetime
    ) -> Flow[ThreadInfo | None]:
        """Return a thread if its last activity was before the given time, otherwise None."""
        row = yield from self.reader.find_thread_row(check_thread_id(thread_id))
        if row is None:
            return None
        info = yield from self._read_thread_info(row)
        return info if info.active_at < before else None

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
        thread = yield from self._read_thread_row(thread_id)
        checkpoints: list[CheckpointInfo] = []
        for namespace, ns, head in (yield self.sql("thread_namespaces", thread.key)):
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
                info = yield from self._build_checkpoint_info(
                    thread.thread_id, ns, row, head_lineage, head
                )
                checkpoints.append(info)
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


def read_transcripts_of_branches(
    reader: CheckpointReader, address: Address, head: StoredCheckpoint, channel: str
) -> Flow[list[tuple[int, Ranges]]]:
    """Read a channel's transcript at the last checkpoint of each branch in a namespace.

    Returns:
        The log key and the log ranges of each transcript, oldest branch first. The head and its
        ancestors are not branches.
    """
    rows = yield reader.sql("checkpoint_keys", *build_row_key_range(head.namespace_key))
    head_lineage = {key for key, *_ in select_lineage(rows, head.snapshot.key)}
    parents, transcripts = {parent for _, _, parent in rows}, list[tuple[int, Ranges]]()
    for key, checkpoint_id, _ in reversed(rows):
        if key not in head_lineage and checkpoint_id not in parents:
            (row,) = yield reader.sql("checkpoint_row", key)
            snapshot = yield from reader.decrypt_checkpoint_row_and_unflatten_ranges(
                address.thread_id, address.checkpoint_ns, row, head.thread
            )
            transcripts.append(snapshot.transcript.get(channel, (0, [])))
    return transcripts


def _merge_positions_with_branch_flags(
    head_positions: Iterable[int], branch_positions: list[int]
) -> list[tuple[int, bool]]:
    """Merge the positions of log items on the head's branch and on other branches into one list.

    The merged list follows the order of the thread's transcript.

    Args:
        head_positions: The positions up to the head, in the order of the transcript.
        branch_positions: The sorted positions of items that are only on branches.

    Returns:
        Pairs of a position and a bool. The bool says whether the position is only on a branch.
    """
    entries: list[tuple[int, bool]] = []
    remaining = branch_positions[::-1]
    for position in head_positions:
        # Skip aliases (references to log items): an alias's position does not show when the log
        # item was stored.
        while remaining and remaining[-1] < position < ALIASES:
            entries.append((remaining.pop(), True))
        entries.append((position, False))
    return entries + [(position, True) for position in reversed(remaining)]


def _compute_end_of_prefix_range(prefix: str) -> str | None:
    """Return the lowest text that is greater than all texts that begin with a prefix.

    Texts are compared by their code points. The result is None if no text is greater, or if the
    prefix contains a null character, which Postgres cannot compare.

    >>> _compute_end_of_prefix_range("user1-")
    'user1.'
    """
    stripped = prefix.rstrip(chr(sys.maxunicode))
    if not stripped or "\0" in stripped:
        return None
    # The code points from U+D800 to U+DFFF are surrogates, which cannot be stored.
    following = ord(stripped[-1]) + 1
    return stripped[:-1] + chr(0xE000 if following == 0xD800 else following)


def _convert_stored_seconds_to_datetime(thread_id: str, seconds: float) -> datetime:
    """Convert a Unix timestamp in seconds to a UTC datetime.

    Raises:
        CorruptRecord: The number is not a valid time.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as exc:
        raise CorruptRecord(
            f"the database is damaged: the row of thread {thread_id!r} has the invalid Unix "
            f"timestamp {seconds!r}; restore the database from a backup"
        ) from exc


def _parse_counts_of_first_and_last_items(ends: Any) -> tuple[int, int]:
    """Validate `ends`, and return how many items to read from the history's start and end.

    Raises:
        ConfigurationError: The argument is not a pair of numbers that are zero or more.
    """
    with suppress(TypeError, ValueError):
        first, last = map(index, ends)
        if first >= 0 and last >= 0:
            return first, last
    raise ConfigurationError(
        f"the argument 'ends' is {ends!r:.80}; expected the numbers of items to read from the "
        "start and from the end, such as (0, 50)"
    )


def find_checkpoint_or_raise(reader: CheckpointReader, address: Address) -> Flow[StoredCheckpoint]:
    """Read a checkpoint, or the head if `address` has no checkpoint id.

    Raises:
        UnknownThread: The thread or namespace does not exist, or has no head.
        UnknownCheckpoint: The checkpoint does not exist.
    """
    checkpoint = yield from reader.find_checkpoint(address)
    if checkpoint is None:
        raise build_not_found_error(address)
    return checkpoint


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

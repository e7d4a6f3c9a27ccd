"""Read all records of a thread, so that the thread can be copied to any database."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Snapshot, Title, Write
from perdure.checkpointers.reader import ITEMS_PAGE_SIZE, CheckpointReader
from perdure.checkpointers.records import (
    ClientMetadata,
    build_row_key,
    build_row_key_range,
    compute_item_and_alias_position_ranges,
    decode_ids_of_writes_row,
    decrypt_client_metadata,
    decrypt_listed_title_and_encoded_metadata,
    decrypt_writes,
    select_lineage,
)
from perdure.checkpointers.thread_reader import build_not_found_error, find_checkpoint_or_raise
from perdure.storage.flow import NO_LIMIT, Flow, Row

_SEQ_MASK: Final = 0xFFFFFFFF


class NamespaceRecords(NamedTuple):
    """The decrypted checkpoints and pending writes of one checkpoint namespace.

    Attributes:
        ns: The namespace.
        head: The sequence number of the head. If the records were read only up to a
            `checkpoint_id`, it is the sequence number of the newest checkpoint that was read, or 0
            if none was read.
        checkpoints: The sequence number, the time of the put in seconds since 1970, and the content
            of each checkpoint.
        writes: The checkpoint id, the task id, the path and the pending writes of each task.
    """

    ns: str
    head: int
    checkpoints: list[tuple[int, float, Snapshot]]
    writes: list[tuple[str, str, str, list[Write]]]


@dataclass
class ThreadRecords:
    """The decrypted records of a thread, used to write a copy of the thread.

    `read_thread_records` does not load the thread's log items. They can be loaded all at once with
    `load_all_log_items_into_records`, or page by page with `read_items_page`.

    Attributes:
        seq: The highest sequence number in the thread. Each new checkpoint gets the next number.
        listed_metadata: The encoded metadata that lists of threads show, or None if the thread has
            no head.
        may_wait: Whether the thread may be waiting for an answer to an interrupt. Always True if
            `read_thread_records` was called with a `checkpoint_id`.
        ttl: The thread's columns `ttl_minutes`, `ttl_since` and `ttl_keeps_latest`, or None if the
            thread does not expire; see the statement `set_columns_of_copied_thread`.
        items: The bytes of the items and aliases, by log key and position. The bytes of an alias
            are the packed position of its original item. None until
            `load_all_log_items_into_records` is called; `read_items_page` then reads the database.
        sorted_positions: The sorted positions of `items`, by log key.
        times: The time at which each item was first stored, by log and position.
    """

    thread_id: str
    seq: int
    created_at: float
    updated_at: float
    title: Title | None
    listed_metadata: bytes | None
    status: str
    client: ClientMetadata | None
    may_wait: bool
    logs: list[Row]
    namespaces: list[NamespaceRecords]
    ttl: Row | None = None
    items: dict[int, dict[int, bytes]] | None = None
    sorted_positions: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, dict[int, float]] = field(default_factory=dict)

    @property
    def key_count(self) -> int:
        """The number of row keys needed to copy the thread, its namespaces and its logs."""
        return 1 + len(self.logs) + len(self.namespaces)

    def read_items_page(
        self, reader: CheckpointReader, channel: str, log_key: int, start: int, stop: int
    ) -> Flow[list[tuple[int, bytes]]]:
        """Return one page of the items in a log range, as `(position, bytes)` pairs.

        Positions without an item are skipped.
        """
        if self.items is None:
            return (
                yield from reader.read_items_page(self.thread_id, channel, log_key, start, stop)
            )
        log_items, order = self.items[log_key], self.sorted_positions[log_key]
        first = bisect_left(order, start)
        return [
            (position, log_items[position])
            for position in order[first : first + ITEMS_PAGE_SIZE]
            if position < stop
        ]

    def read_item_storage_times(
        self, reader: CheckpointReader, log_key: int, start: int, stop: int
    ) -> Flow[dict[int, float]]:
        """Return the time at which each item in a log range was first stored, keyed by position.

        If the whole thread is loaded, the returned dict also contains times of items outside the
        range from `start` to `stop`.
        """
        if self.items is None:
            return (yield from reader.read_item_storage_times(log_key, [(start, stop)]))
        return self.times[log_key]


def read_thread_records(
    reader: CheckpointReader, thread_id: str, checkpoint_id: str | None = None
) -> Flow[ThreadRecords]:
    """Read the records of a thread, except its log items.

    To add the log items to the records, call `load_all_log_items_into_records`.

    Args:
        reader: The reader of the database.
        thread_id: The thread.
        checkpoint_id: The last checkpoint to read, or None for all. In the root namespace, this
            checkpoint and its ancestors are read. In the other namespaces, all checkpoints that
            were put before it are read.

    Raises:
        UnknownThread: The thread does not exist.
        UnknownCheckpoint: The root namespace of the thread has no checkpoint with the id
            `checkpoint_id`.
    """
    row = yield from reader.find_thread_row(thread_id)
    if row is None:
        raise build_not_found_error(Address(thread_id, "", None))
    title, listed_metadata = decrypt_listed_title_and_encoded_metadata(
        reader.seal, thread_id, row.list_entry
    )
    last_seq = _SEQ_MASK
    if checkpoint_id is not None:
        checkpoint = yield from find_checkpoint_or_raise(
            reader, Address(thread_id, "", checkpoint_id)
        )
        last_seq = checkpoint.snapshot.key & _SEQ_MASK
        # the stored title and metadata may come from a later checkpoint
        title = listed_metadata = None
    if listed_metadata is None:
        head = yield from reader.find_checkpoint(Address(thread_id, "", checkpoint_id))
        if head is not None:
            metadata = reader.decode_metadata(head.snapshot)
            _, listed_metadata = reader.select_and_encode_listed_metadata(metadata)
    ((status, seq, sealed_client, may_wait),) = yield reader.sql("find_client_metadata", thread_id)
    client = decrypt_client_metadata(reader.seal, thread_id, sealed_client)
    logs = yield reader.sql("thread_logs", row.key)
    namespaces = []
    for namespace_key, checkpoint_ns, head_seq in (yield reader.sql("thread_namespaces", row.key)):
        namespace_records = yield from _read_namespace(
            reader, thread_id, namespace_key, checkpoint_ns, head_seq, last_seq
        )
        if namespace_records.checkpoints or (namespace_records.writes and last_seq == _SEQ_MASK):
            namespaces.append(namespace_records)
    ttl_rows = yield reader.sql("find_ttl", thread_id)
    return ThreadRecords(
        thread_id,
        seq,
        row.created_at,
        row.updated_at,
        title,
        listed_metadata,
        status,
        client,
        checkpoint_id is not None or bool(may_wait),
        logs,
        namespaces,
        ttl_rows[0] if ttl_rows else None,
    )


def _read_namespace(
    reader: CheckpointReader,
    thread_id: str,
    namespace_key: int,
    checkpoint_ns: str,
    head_seq: int,
    last_seq: int,
) -> Flow[NamespaceRecords]:
    """Read the checkpoints of a namespace up to the sequence number `last_seq`, and their writes.

    In the root namespace, only checkpoint `last_seq` and its ancestors are read. If `last_seq` is
    the maximum, `_SEQ_MASK`, all checkpoints of the namespace are read.
    """
    rows = yield reader.sql("checkpoints_page", *build_row_key_range(namespace_key), NO_LIMIT)
    yield from reader.check_id_index_matches_table_row_count(
        len(rows), *build_row_key_range(namespace_key)
    )
    if last_seq != _SEQ_MASK:
        rows = [row for row in rows if row[0] & _SEQ_MASK <= last_seq]
        rows = (
            rows if checkpoint_ns else select_lineage(rows, build_row_key(namespace_key, last_seq))
        )
        head_seq = max((row[0] & _SEQ_MASK for row in rows), default=0)
    checkpoints = [
        (row[0] & _SEQ_MASK, row[4], reader.decrypt_checkpoint_row(thread_id, checkpoint_ns, row))
        for row in rows
    ]
    ids = {snapshot.checkpoint_id for _, _, snapshot in checkpoints}
    rows_of_writes = yield reader.sql("namespace_writes", namespace_key)
    writes = [
        (*row_ids, decrypt_writes(reader.seal, thread_id, checkpoint_ns, row))
        for row in rows_of_writes
        if (row_ids := decode_ids_of_writes_row(row))[0] in ids or last_seq == _SEQ_MASK
    ]
    return NamespaceRecords(checkpoint_ns, head_seq, checkpoints, writes)


def load_all_log_items_into_records(reader: CheckpointReader, records: ThreadRecords) -> Flow[None]:
    """Read all log items of a thread, and store them in the thread's `ThreadRecords`."""
    items = {}
    for log, name, *last_keys in records.logs:
        position_ranges = compute_item_and_alias_position_ranges(*last_keys)
        items[log], records.times[log] = yield from reader.read_items_and_storage_times(
            records.thread_id, name, log, position_ranges
        )
        records.sorted_positions[log] = [*items[log]]
    records.items = items

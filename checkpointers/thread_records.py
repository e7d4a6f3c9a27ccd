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
    decode_stored_id,
    decrypt_client_metadata,
    decrypt_listed_title_and_encoded_metadata,
    decrypt_writes,
    select_lineage,
)
from perdure.checkpointers.threads import build_not_found_error
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

    The items are included only after a call of `load_all_log_items_into_records`.

    Attributes:
        seq: The counter of puts.
        listed_metadata: The encoded metadata that lists of threads show, or None.
        may_wait: False if it is known that the thread is not waiting for an answer to an interrupt.
            Always True if `read_thread_records` was called with a `checkpoint_id`.
        ttl: The thread's columns `ttl_minutes`, `ttl_since` and `ttl_keeps_latest`, or None if the
            thread does not expire; see the statement `set_ttl`.
        items: The bytes of the items and aliases, by log key and position. The bytes of an alias
            are the packed position of its original item. If None, items are read from the database
            page by page.
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

        If all items of the thread are already loaded, the result also contains the times of items
        outside the range.
        """
        if self.items is None:
            return (yield from reader.read_item_storage_times(log_key, [(start, stop)]))
        return self.times[log_key]


def read_thread_records(
    reader: CheckpointReader, thread_id: str, checkpoint_id: str | None = None
) -> Flow[ThreadRecords]:
    """Read the records of a thread, except its items.

    The items can be read separately with `load_all_log_items_into_records`.

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
    rows = yield reader.sql("one_thread", thread_id)
    if not rows:
        raise build_not_found_error(Address(thread_id, "", None))
    last_seq = _SEQ_MASK
    if checkpoint_id is not None:
        address = Address(thread_id, "", checkpoint_id)
        checkpoint = yield from reader.find_checkpoint(address)
        if checkpoint is None:
            raise build_not_found_error(address)
        last_seq = checkpoint.snapshot.key & _SEQ_MASK
    thread_key, _, created_at, updated_at, _, stored = rows[0]
    ((status, seq, sealed_client, may_wait),) = yield reader.sql("find_client_metadata", thread_id)
    title, listed_metadata = decrypt_listed_title_and_encoded_metadata(
        reader.seal, thread_id, stored
    )
    # the stored title and metadata may come from a checkpoint that is later than `checkpoint_id`
    if checkpoint_id is not None:
        title = listed_metadata = None
    client = decrypt_client_metadata(reader.seal, thread_id, sealed_client)
    logs = yield reader.sql("thread_logs", thread_key)
    namespaces = []
    for namespace_key, checkpoint_ns, head_seq in (
        yield reader.sql("thread_namespaces", thread_key)
    ):
        namespace_records = yield from _read_namespace(
            reader, thread_id, namespace_key, checkpoint_ns, head_seq, last_seq
        )
        if namespace_records.checkpoints or (namespace_records.writes and last_seq == _SEQ_MASK):
            namespaces.append(namespace_records)
    ttl = yield reader.sql("find_ttl", thread_id)
    details = title, listed_metadata, status, client, checkpoint_id is not None or bool(may_wait)
    records = ThreadRecords(thread_id, seq, created_at, updated_at, *details, logs, namespaces)
    records.ttl = ttl[0] if ttl else None
    return records


def _read_namespace(
    reader: CheckpointReader,
    thread_id: str,
    namespace_key: int,
    checkpoint_ns: str,
    head_seq: int,
    last_seq: int,
) -> Flow[NamespaceRecords]:
    """Read the records of a namespace up to the sequence number `last_seq`.

    If `last_seq` is less than the maximum sequence number, only the checkpoint with the number
    `last_seq` and its ancestors are read from the root namespace.
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
    writes = []
    for row in (yield reader.sql("namespace_writes", namespace_key)):
        checkpoint_id, task, path = (
            decode_stored_id(row[0]) or "",
            decode_stored_id(row[1]) or "",
            row[2],
        )
        if checkpoint_id in ids or last_seq == _SEQ_MASK:
            writes.append(
                (
                    checkpoint_id,
                    task,
                    path,
                    decrypt_writes(reader.seal, thread_id, checkpoint_ns, row),
                )
            )
    return NamespaceRecords(checkpoint_ns, head_seq, checkpoints, writes)


def load_all_log_items_into_records(reader: CheckpointReader, records: ThreadRecords) -> Flow[None]:
    """Read all log items of a thread, and store them in the thread's `ThreadRecords`."""
    items = {}
    for log, name, *last_keys in records.logs:
        items[log] = log_items = dict[int, bytes]()
        for first, stop in compute_item_and_alias_position_ranges(*last_keys):
            start = first
            while page := (
                yield from reader.read_items_page(records.thread_id, name, log, start, stop)
            ):
                log_items |= dict(page)
                start = page[-1][0] + 1
        records.sorted_positions[log] = [*log_items]
        spans = compute_item_and_alias_position_ranges(*last_keys)
        records.times[log] = yield from reader.read_item_storage_times(log, spans)
    records.items = items

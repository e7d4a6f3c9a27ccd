"""The records of threads, which are read from a database and written into it or into another."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Snapshot, Title, Write
from perdure.checkpointers.reader import ITEMS_PAGE_SIZE, CheckpointReader
from perdure.checkpointers.records import (
    ClientMetadata,
    decrypt_client_metadata,
    decrypt_list_entry,
    decrypt_writes,
    key_range,
    row_key,
    select_lineage,
    unpack_id,
    used_log_ranges,
)
from perdure.checkpointers.threads import build_not_found_error
from perdure.storage.flow import NO_LIMIT, Flow, Row

_SEQ_MASK: Final = 0xFFFFFFFF


class NamespaceRecords(NamedTuple):
    """A namespace of a thread.

    `head` is the place of its head. Each element of `checkpoints` has a place, the time of
    the put, and the content. Each element of `writes` has a checkpoint, a task, a path and the
    content of the pending writes.
    """

    ns: str
    head: int
    checkpoints: list[tuple[int, float, Snapshot]]
    writes: list[tuple[str, str, str, list[Write]]]


@dataclass
class ThreadRecords:
    """The records of a thread. If `items` is None, they are read from the database page by page."""

    thread_id: str
    seq: int
    created_at: float
    updated_at: float
    title: Title | None
    told: bytes | None  # the part of its metadata that lists of threads show
    status: str
    client: ClientMetadata | None
    may_wait: bool  # whether its row says that it may wait for an answer
    logs: list[Row]
    namespaces: list[NamespaceRecords]
    ttl: Row | None = None  # minutes, their start, and what is kept; see `set_ttl`
    items: dict[int, dict[int, bytes]] | None = None  # by log and position
    order: dict[int, list[int]] = field(default_factory=dict)  # positions of `items`, by log
    times: dict[int, dict[int, float]] = field(
        default_factory=dict
    )  # time of first storage, by log and position

    @property
    def keys(self) -> int:
        """The number of keys that are needed to store the thread."""
        return 1 + len(self.logs) + len(self.namespaces)

    def page(
        self, reader: CheckpointReader, name: str, log: int, start: int, stop: int
    ) -> Flow[list[tuple[int, bytes]]]:
        """Return position and content of the first items in a range of a log; gaps are allowed."""
        if self.items is None:
            return (yield from reader.read_items_page(self.thread_id, name, log, start, stop))
        held, order = self.items[log], self.order[log]
        first = bisect_left(order, start)
        return [(at, held[at]) for at in order[first : first + ITEMS_PAGE_SIZE] if at < stop]

    def read_page_times(
        self, reader: CheckpointReader, log: int, start: int, stop: int
    ) -> Flow[dict[int, float]]:
        """Return the time of first storage of each item in a range of a log, by position."""
        if self.items is None:
            return (yield from reader.read_item_times(log, [(start, stop)]))
        return self.times[log]


def read_thread_records(
    reader: CheckpointReader, thread_id: str, checkpoint_id: str | None = None
) -> Flow[ThreadRecords]:
    """Read the records of a thread without its items.

    With a checkpoint, only the records that lead to that checkpoint are read.

    Raises:
        UnknownThread: There is no such thread.
        UnknownCheckpoint: It has no such checkpoint in its root namespace.
    """
    rows = yield reader.sql("one_thread", thread_id)
    if not rows:
        raise build_not_found_error(Address(thread_id, "", None))
    last = _SEQ_MASK
    if checkpoint_id is not None:
        at = Address(thread_id, "", checkpoint_id)
        end = yield from reader.find_checkpoint(at)
        if end is None:
            raise build_not_found_error(at)
        last = end.snapshot.key & _SEQ_MASK
    thread, _, created_at, updated_at, _, stored = rows[0]
    ((status, seq, kept, waiting),) = yield reader.sql("find_client_metadata", thread_id)
    title, told = decrypt_list_entry(reader.seal, thread_id, stored)
    if checkpoint_id is not None:  # they may come from a later checkpoint
        title = told = None
    client = decrypt_client_metadata(reader.seal, thread_id, kept)
    logs = yield reader.sql("thread_logs", thread)
    namespaces = []
    for namespace, ns, head in (yield reader.sql("thread_namespaces", thread)):
        read = yield from _read_namespace(reader, thread_id, namespace, ns, head, last)
        if read.checkpoints or (read.writes and last == _SEQ_MASK):
            namespaces.append(read)
    ttl = yield reader.sql("find_ttl", thread_id)
    about = title, told, status, client, checkpoint_id is not None or bool(waiting)
    records = ThreadRecords(thread_id, seq, created_at, updated_at, *about, logs, namespaces)
    records.ttl = ttl[0] if ttl else None
    return records


def _read_namespace(
    reader: CheckpointReader, thread_id: str, namespace: int, ns: str, head: int, last: int
) -> Flow[NamespaceRecords]:
    """Read the records of a namespace up to a place; in the root, only those that lead there."""
    rows = yield reader.sql("checkpoints_page", *key_range(namespace), NO_LIMIT)
    yield from reader.check_complete(len(rows), *key_range(namespace))
    if last != _SEQ_MASK:
        rows = [row for row in rows if row[0] & _SEQ_MASK <= last]
        rows = rows if ns else select_lineage(rows, row_key(namespace, last))
        head = max((row[0] & _SEQ_MASK for row in rows), default=0)
    checkpoints = [
        (row[0] & _SEQ_MASK, row[4], reader.decrypt_row(thread_id, ns, row)) for row in rows
    ]
    ids = {snapshot.checkpoint_id for _, _, snapshot in checkpoints}
    writes = []
    for row in (yield reader.sql("namespace_writes", namespace)):
        uid, task, path = unpack_id(row[0]) or "", unpack_id(row[1]) or "", row[2]
        if uid in ids or last == _SEQ_MASK:
            writes.append((uid, task, path, decrypt_writes(reader.seal, thread_id, ns, row)))
    return NamespaceRecords(ns, head, checkpoints, writes)


def read_items(reader: CheckpointReader, records: ThreadRecords) -> Flow[None]:
    """Read the items of a thread into its records, so that it can be copied or compared."""
    items = {}
    for log, name, *ends in records.logs:
        items[log] = held = dict[int, bytes]()
        for first, stop in used_log_ranges(*ends):
            start = first
            while page := (
                yield from reader.read_items_page(records.thread_id, name, log, start, stop)
            ):
                held |= dict(page)
                start = page[-1][0] + 1
        records.order[log] = [*held]
        spans = used_log_ranges(*ends)
        records.times[log] = yield from reader.read_item_times(log, spans)
    records.items = items

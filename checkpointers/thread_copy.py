"""Threads copied within a database, and merged with those of another.

Items, checkpoints and pending writes travel as stored bytes, opened with the key of the source and
sealed with that of the target. Only metadata is decoded, of which checkpoints are found by tags.

In a merge a thread in both is left if it is the same or went on here, replaced by what it became if
it went on there, and refused if it went on in both. Each thread is written in one transaction.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Snapshot
from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.manifest import (
    ALIASES,
    DELTA,
    DICT_HERE,
    LIST,
    LIST_HERE,
    MAP,
    SNAPSHOT,
    iter_positions,
    join_ranges,
    value_reference,
)
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.record_checks import MALFORMED, check_records
from perdure.checkpointers.records import (
    ClientMetadata,
    content_hash,
    decrypt_client_metadata,
    encrypt_checkpoint,
    encrypt_client_metadata,
    encrypt_list_entry,
    encrypt_writes,
    item_associated_data,
    key_range,
    metadata_tags,
    pack_id,
    row_key,
    select_lineage,
    used_log_ranges,
)
from perdure.checkpointers.reports import ImportReport
from perdure.checkpointers.thread_records import (
    NamespaceRecords,
    ThreadRecords,
    read_items,
    read_thread_records,
)
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    ImportFailed,
    InvalidConfig,
    PerdureError,
    UnknownThread,
)
from perdure.storage.flow import NO_LIMIT, Flow, Statement

_SEQ_MASK: Final = 0xFFFFFFFF
_MAX_NAMED_THREADS: Final = 20  # refused threads


class TranscriptTree(NamedTuple):
    """What was said on a thread: on the way to its head, and to the end of each branch.

    Attributes:
        values: The items, by position.
        times: When each item was first stored, in seconds since 1970, by position.
        ways: The positions of the items that lead to the head, then, for each branch, of those that
            lead to its end.
        is_known: Whether the items of the newest state are known; see `HistoryItem.seen`.
        is_lost: Whether neither the value nor the items of the channel are stored, although the
            newest state has the channel.
    """

    values: dict[int, Any]
    times: dict[int, float]
    lineages: list[list[int]]
    is_known: bool = True
    is_lost: bool = False


def read_transcript_tree(
    reader: CheckpointReader, thread_id: str, channel: str = "messages"
) -> Flow[TranscriptTree | None]:
    """Read the transcripts of all branches of a thread; return None if it has no head."""
    head = yield from reader.find_checkpoint(Address(thread_id, "", None))
    if head is None:
        return None
    rows = yield reader.sql("checkpoints_page", *key_range(head.namespace_key), NO_LIMIT)
    trunk = {row[0] for row in select_lineage(rows, head.snapshot.key)}
    inner, log, ways = {row[2] for row in rows}, 0, list[list[int]]()
    for row in reversed(rows):
        is_head = row[0] == head.snapshot.key
        if is_head or (row[0] not in trunk and row[1] not in inner):
            snapshot = reader.decrypt_row(thread_id, "", row)
            yield from reader.resolve_ranges(thread_id, head.thread, snapshot)
            key, ranges = snapshot.transcript.get(channel, (0, []))
            log = key or log
            way = yield from reader.read_origins(thread_id, head.thread, log, ranges)
            ways.insert(0 if is_head else len(ways), way)
    ranges = join_ranges((at, at + 1) for at in sorted({*chain(*ways)}))
    ref = head.snapshot.references.get(channel)
    is_known = ref is None or value_reference(ref) is not None
    if not ranges:
        return TranscriptTree(
            {}, {}, ways, is_known, channel in head.snapshot.channel_versions and ref is None
        )
    times = yield from reader.read_item_times(log, ranges)
    stored = (yield from reader.load_items(thread_id, head.thread, log, ranges)).items_in(ranges)
    values = reader.codec.decode_all(stored)
    return TranscriptTree(
        dict(zip(iter_positions(ranges), values, strict=True)), times, ways, is_known
    )


def write_thread(
    reader: CheckpointReader, records: ThreadRecords, target: str, keys: list[int], now: float
) -> Flow[int]:
    """Write a thread that is not there, as last written to at `now`; returns its key.

    It takes `records.keys` of the keys, the last ones.
    """
    new = keys.pop()
    stamp = random.getrandbits(62)
    removals = yield from reader.removals.read_newest_number(target)
    row = new, target, records.seq, stamp, records.created_at, now, removals
    yield reader.sql("new_thread", *row, reader.removals.hash_thread(target))
    if records.title is not None or records.told is not None:
        told = None if records.told is None else (reader.codec.decode(records.told), records.told)
        yield reader.sql(
            "set_list_entry", *encrypt_list_entry(reader.seal, target, records.title, told), new
        )
    if records.client is not None:
        yield reader.sql(
            "set_client_metadata",
            *encrypt_client_metadata(reader.seal, target, records.client),
            new,
        )
    if records.status != "idle":
        yield reader.sql("set_status", records.status, new)
    if records.may_wait:
        yield reader.sql("mark_may_wait", new)
    if records.ttl is not None:
        yield reader.sql("set_ttl", *records.ttl, target)
    writer = _ThreadWriter(reader, records, target, new, keys)
    yield from writer.write_logs()
    for namespace in records.namespaces:
        yield from writer.write_namespace(namespace)
    return new


class _ThreadWriter:
    """The flows that write the parts of a thread under the key `new`."""

    def __init__(
        self,
        reader: CheckpointReader,
        records: ThreadRecords,
        target: str,
        new: int,
        keys: list[int],
    ) -> None:
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal
        self.records, self.target, self.new = records, target, new
        self.keys = keys  # of its logs and namespaces
        self.logs: dict[int, int] = {}  # which became which

    def write_logs(self) -> Flow[None]:
        for log, name, *ends in self.records.logs:
            key = self.logs[log] = self.keys.pop()
            yield self.sql("new_log", key, self.new, name)
            for first, stop in used_log_ranges(*ends):
                start = first
                while page := (yield from self.records.page(self.reader, name, log, start, stop)):
                    rows, end = [], page[-1][0] + 1
                    read_times = self.records.read_page_times
                    times = yield from read_times(self.reader, log, start, end)
                    start = end
                    for at, stored in page:
                        hashed = content_hash(self.seal, key, stored) if at < ALIASES else 0
                        body = self.seal.seal(stored, item_associated_data(self.target, name, at))
                        rows.append((row_key(key, at), hashed, times[at], body))
                    yield Statement(self.sql["add_item"], rows, execute_many=True)

    def write_namespace(self, records: NamespaceRecords) -> Flow[None]:
        ns, head, checkpoints, writes = records
        namespace = self.keys.pop()
        yield self.sql("new_namespace", namespace, self.new, ns)
        yield self.sql("set_explicit_head", head, namespace)
        for within, put_at, snapshot in checkpoints:
            yield from self._write_checkpoint(ns, row_key(namespace, within), put_at, snapshot)
        for uid, task, path, written in writes:
            moved = [[i, channel, _map_logs(ref, self.logs)] for i, channel, ref in written]
            body = encrypt_writes(self.seal, (self.target, ns, uid, task, path), moved)
            yield self.sql("put_writes", namespace, pack_id(uid), pack_id(task), path, body)

    def _write_checkpoint(self, ns: str, key: int, put_at: float, snapshot: Snapshot) -> Flow[None]:
        refs, said = _map_value_logs(snapshot, self.logs)
        # no run of this thread has put it
        moved = replace(snapshot, references=refs, run_started_at=None)
        row = (
            key,
            pack_id(snapshot.checkpoint_id),
            pack_id(snapshot.parent_id),
            snapshot.run_start,
            put_at,
        )
        body = encrypt_checkpoint(self.seal, self.target, ns, row, moved, said)
        yield self.sql("add_checkpoint", key, key >> 32, *row[1:], body)
        for number in metadata_tags(self.seal, self.reader.decode_metadata(snapshot)):
            yield self.sql("add_tag", number, key)


def _map_logs(ref: Any, logs: Mapping[int, Any]) -> Any:
    """A reference with other logs, given by those that it has."""
    if isinstance(ref, bytes):
        return ref
    kind, *rest = ref
    if kind in (SNAPSHOT, DELTA):
        return [kind, rest[0] if isinstance(rest[0], int) else _map_logs(rest[0], logs)]
    if kind == MAP:
        return [MAP, {key: _map_logs(inner, logs) for key, inner in rest[0].items()}]
    if kind in (LIST_HERE, DICT_HERE):
        return [kind, [e if isinstance(e, bytes) else [logs[e[0]], *e[1:]] for e in rest[0]]]
    log, numbers = rest
    return [kind, logs[log], numbers]


def _map_value_logs(
    snapshot: Snapshot, logs: Mapping[int, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the channels of a checkpoint hold, and what was said, with other logs."""
    refs = {channel: _map_logs(ref, logs) for channel, ref in snapshot.references.items()}
    said = {c: _map_logs([LIST, *written], logs)[1:] for c, written in snapshot.transcript.items()}
    return refs, said


def copy_thread(
    maintenance: Maintenance,
    source: str,
    target: str,
    checkpoint_id: str | None,
    client: ClientMetadata | None = None,
    status: str = "idle",
) -> None:
    """Copy a thread into a new one, with what the server keeps of it."""
    reader = maintenance.reader

    def flow() -> Flow[list[int]]:
        records = yield from read_thread_records(reader, source, checkpoint_id)
        records.client, records.status = client, status
        if records.ttl is not None:
            minutes, _, keeps = records.ttl
            records.ttl = minutes, time.time(), min(keeps, 1)  # the time starts with the copy
        if (yield reader.sql("find_thread", target)):
            raise InvalidConfig(f"thread {target!r} exists already; copy to a new thread_id")
        keys = yield from reader.allocate_keys(records.keys)
        new = yield from write_thread(reader, records, target, keys, time.time())
        if checkpoint_id is not None:
            yield from maintenance.delete_unreferenced_items(target, new)
            yield reader.sql("mark_rows_removed", new)
        return keys

    maintenance.database.write(flow, reader.cache.keys.refill, exclusive_names=(source, target))


# -- merging


@dataclass
class ThreadContents:
    """What a thread holds, whatever the keys of its logs; references name these."""

    checkpoints: list[tuple[Any, ...]]  # in put order
    heads: dict[str, str]
    writes: dict[tuple[str, str, str, str, int], tuple[str, Any]]
    items: dict[tuple[str, int], bytes] = field(compare=False)

    def continues(self, other: ThreadContents) -> bool:
        """Whether this is what the other one was or became."""
        return (
            self.checkpoints[: len(other.checkpoints)] == other.checkpoints
            and all(self.items.get(at, item) == item for at, item in other.items.items())
            and all(
                at in self.writes and (self.writes[at] == write or at[-1] < 0)  # resumed once more
                for at, write in other.writes.items()
            )
            and self._has_later_heads(other)
        )

    def _has_later_heads(self, other: ThreadContents) -> bool:
        """Whether each namespace has the head of the other one, or one that was put after it.

        One that was rewound, so that its head is not the newest, goes on from there only.
        """
        known = len(other.checkpoints)
        newest = {ns: uid for ns, uid, *_ in other.checkpoints}
        next_parents = {ns: parent for ns, _, parent, *_ in reversed(self.checkpoints[known:])}
        return all(
            self.heads.get(ns) == head
            or (ns in next_parents and head in (newest[ns], next_parents[ns]))
            for ns, head in other.heads.items()
        )


def build_contents(records: ThreadRecords) -> ThreadContents:
    """The contents of a thread whose items were read."""
    names = {log: name for log, name, *_ in records.logs}
    checkpoints, heads, writes = [], {}, {}
    for ns, head, stored, written in records.namespaces:
        for within, _, snapshot in stored:
            of = (
                snapshot.encoded_fields,
                snapshot.channel_versions,
                snapshot.versions_seen,
                _map_value_logs(snapshot, names),
            )
            checkpoints.append((within, ns, snapshot.checkpoint_id, snapshot.parent_id, *of))
            if within == head:
                heads[ns] = snapshot.checkpoint_id
        for uid, task, path, task_writes in written:
            for number, channel, ref in task_writes:
                writes[ns, uid, task, path, number] = channel, _map_logs(ref, names)
    items = {
        (names[log], at): item
        for log, held in (records.items or {}).items()
        for at, item in held.items()
    }
    in_order = [checkpoint[1:] for checkpoint in sorted(checkpoints, key=itemgetter(0))]
    return ThreadContents(in_order, heads, writes, items)


def _format_thread_ids(thread_ids: list[str]) -> str:
    more = (
        f" and {len(thread_ids) - _MAX_NAMED_THREADS} more"
        if len(thread_ids) > _MAX_NAMED_THREADS
        else ""
    )
    return f"{', '.join(map(repr, thread_ids[:_MAX_NAMED_THREADS]))}{more}"


class DatabaseMerge:
    """Takes over the threads of another database; `names` are new ids of some of them.

    Once `stopped` is set, no further thread is taken over.
    """

    def __init__(self, source: Maintenance, target: Maintenance, names: Mapping[str, str]) -> None:
        self.source, self.target, self.names = source, target, names
        self.stopped = threading.Event()
        self._is_new = False  # whether the last written thread is new in the target
        self._rolled_back: list[str] = []  # refused threads with a run that was rolled back here

    def run(self) -> ImportReport:
        """Take over all threads but those that went on in both, which are named in the end."""
        threads = [*self.source.listing.iter_thread_ids()]
        path = self.source.database.path
        if unknown := self.names.keys() - {*threads}:
            raise ConfigurationError(f"{path} has no thread {sorted(unknown)[0]!r} to rename")
        given = Counter(self.names.get(thread_id, thread_id) for thread_id in threads)
        if self.names and len(given) < len(threads):
            ((new, _),) = given.most_common(1)
            raise ConfigurationError(f"two threads of {path} would be {new!r}; give other ids")
        report, refused = ImportReport(), list[str]()
        for thread_id in threads:
            if self.stopped.is_set():
                raise ImportFailed(f"the import of {path!r} was cancelled")
            try:
                done = self._import_thread(thread_id, self.names.get(thread_id, thread_id))
            except UnknownThread:  # it was deleted just now
                continue
            report += done or ImportReport()
            if done is None:
                refused.append(thread_id)
        if refused:
            others = [each for each in refused if each not in self._rolled_back]
            why = []
            if others:
                why.append(
                    f"these threads are others here than in {path!r}, and neither continues the "
                    f"other: {_format_thread_ids(others)}"
                )
            if self._rolled_back:
                why.append(
                    f"these threads of {path!r} contain a run that was rolled back here: "
                    f"{_format_thread_ids(self._rolled_back)}"
                )
            raise ImportFailed(
                f"{'. '.join(why)}. {report.threads} others are imported. Give new ids to take "
                "both: names={'ID': 'NEW'}, or 'perdure import --as ID=NEW'"
            )
        return report

    def _import_thread(self, thread_id: str, target: str) -> ImportReport | None:
        """Copy a thread from the source to the target, or return None if the thread is refused.

        If something is erased from the source between the read and the write, a thread that is new
        in the target is deleted from the target and read again.

        Raises:
            ImportFailed: Something was erased from the source meanwhile, and the target already had
                the thread, so that it may now contain the erased data.
        """
        last = partial(self.source.reader.removals.read_newest_number, thread_id)
        while True:
            number = self.source.database.read(last)
            records = self.source.database.read(partial(self._read_records, thread_id))
            done = self._write_new_records(records, target)
            if done is None or not done.checkpoints or self.source.database.read(last) == number:
                return done
            if not self._is_new:
                raise ImportFailed(
                    f"something was erased from thread {thread_id!r} of "
                    f"{self.source.database.path!r} while the thread was imported; erase it from "
                    f"thread {target!r} of this database as well"
                )
            delete = partial(self.target.delete_thread, target, recorded=False)
            self.target.write(target, delete)

    def _read_records(self, thread_id: str) -> Flow[ThreadRecords]:
        """Read a thread with its items, and check it as far as the target relies upon it."""
        try:
            records = yield from read_thread_records(self.source.reader, thread_id)
            yield from read_items(self.source.reader, records)
            check_records(self.source.reader, records)
        except PerdureError:
            raise
        except MALFORMED as exc:
            raise CorruptRecord(
                f"thread {thread_id!r} of {self.source.database.path!r} is not imported, because "
                f"its records are not as perdure writes them ({exc!r:.200}): it was damaged or "
                "tampered with"
            ) from exc
        return records

    def _compare_with_target(
        self, records: ThreadRecords, target: str, there: ThreadContents
    ) -> Flow[ThreadContents | ImportReport | None]:
        """Compare a thread of the source with the thread of the target.

        Returns:
            The contents of the thread of the target, which the thread of the source continues; or a
            report if nothing is to be written; or None if the thread is refused.
        """
        reader = self.target.reader
        if not (yield reader.sql("one_thread", target)):
            return ThreadContents([], {}, {}, {})
        stored = yield from read_thread_records(reader, target)
        yield from read_items(reader, stored)
        here = build_contents(stored)
        onward, back = there.continues(here), here.continues(there)
        if (here == there and onward) or (back and not onward):
            return ImportReport(1, 1, skipped=len(there.checkpoints))
        if back or not onward:
            return None
        new_ids = {uid for _, uid, *_ in there.checkpoints[len(here.checkpoints) :]}
        if (yield from reader.removals.find_rolled_back(target, new_ids)):
            self._rolled_back.append(records.thread_id)
            return None
        return here

    def _write_new_records(self, records: ThreadRecords, target: str) -> ImportReport | None:
        """Write a thread as far as it is not here; None: it is refused."""
        reader, keys = self.target.reader, list[int]()
        there = build_contents(records)

        def flow() -> Flow[ImportReport | None]:
            here = yield from self._compare_with_target(records, target, there)
            if not isinstance(here, ThreadContents):
                return here
            keys[:] = yield from reader.allocate_keys(records.keys)
            for _, status, _, kept in (yield reader.sql("lock_client_metadata", target)):
                if kept is not None:
                    records.client = decrypt_client_metadata(reader.seal, target, kept)
                    records.status = status
            for ttl in (yield reader.sql("find_ttl", target)):
                records.ttl = ttl
            before = yield reader.sql("find_thread", target)
            self._is_new = not before
            yield from self.target.delete_thread(target, runs=False, recorded=False)
            new = yield from write_thread(reader, records, target, keys, records.updated_at)
            of_runs = "move_runs", "move_events"
            yield [reader.sql(move, new, thread) for thread, *_ in before for move in of_runs]
            known = len(here.checkpoints)
            more = len(there.writes) - len(here.writes)
            return ImportReport(1, 0, len(there.checkpoints) - known, more, known)

        def committed(_: object) -> None:
            if keys:
                reader.cache.keys.refill(keys)
            reader.cache.drop_thread(target)

        return self.target.database.write(flow, committed, exclusive_names=(target,))

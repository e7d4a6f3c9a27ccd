"""Copy threads within one database, and merge threads from one database into another database.

The encoded bytes of log items, checkpoints and pending writes are copied without decoding them. If
the databases are encrypted, the copied bytes are decrypted with the source's key and re-encrypted
with the target's key. Only the metadata of the copied data is decoded, because it is needed to
compute the target's metadata index.

If a thread exists in both databases, a merge first compares the two copies. The merge leaves the
target's copy of the thread unchanged if both copies are equal, or if only the target's copy has new
checkpoints. If only the source has new checkpoints, the merge replaces the target's copy of the
thread with the source's copy. A thread is rejected if both databases have new checkpoints of the
thread. A thread is also rejected if the source contains checkpoints of a run that was rolled back
in the target. Rejected threads are not imported. Each thread is written in a single transaction.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Snapshot
from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.manifest import (
    DELTA,
    DICT_HERE,
    LIST,
    LIST_HERE,
    MAP,
    SNAPSHOT,
    extract_value_reference_from_delta_channel_reference,
    iter_positions,
    join_adjacent_ranges,
)
from perdure.checkpointers.owner_record import add_organisations_mark, read_organisations_mark
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.record_checks import MALFORMED, check_thread_records_well_formed
from perdure.checkpointers.records import (
    ClientMetadata,
    build_client_metadata_update,
    build_item_row,
    build_list_entry_update,
    build_put_writes_statement,
    build_row_key,
    compute_item_and_alias_position_ranges,
    compute_metadata_index_tags,
    decrypt_client_metadata,
    encode_id_for_storage,
    encrypt_checkpoint,
)
from perdure.checkpointers.reports import ImportReport
from perdure.checkpointers.thread_reader import read_transcripts_of_branches
from perdure.checkpointers.thread_records import (
    NamespaceRecords,
    ThreadRecords,
    load_all_log_items_into_records,
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
from perdure.storage.flow import Flow, Statement

_MAX_NAMED_THREADS: Final = 20  # maximum number of rejected threads listed in an error message


class TranscriptTree(NamedTuple):
    """A thread's transcript up to its head, and one transcript for each branch of the thread.

    Attributes:
        values: The items, by position.
        times: The time at which each item was first stored, in seconds since 1970, by position.
        lineages: The positions of the items up to the head, followed by the positions of the items
            up to the end of each branch.
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
    """Read the transcripts of all branches of a thread. Return None if the thread has no head."""
    address = Address(thread_id, "", None)
    head = yield from reader.find_checkpoint(address)
    if head is None:
        return None
    transcripts = [
        head.snapshot.transcript.get(channel, (0, [])),
        *(yield from read_transcripts_of_branches(reader, address, head, channel)),
    ]
    lineages, log = list[list[int]](), max(key for key, _ in transcripts)
    for transcript in transcripts:
        lineage = yield from reader.read_positions_with_aliases_resolved(
            thread_id, head.thread, *transcript
        )
        lineages.append(lineage)
    ranges = join_adjacent_ranges(
        (position, position + 1) for position in sorted({*chain(*lineages)})
    )
    ref = head.snapshot.references.get(channel)
    is_known = ref is None or extract_value_reference_from_delta_channel_reference(ref) is not None
    if not ranges:
        return TranscriptTree(
            {}, {}, lineages, is_known, channel in head.snapshot.channel_versions and ref is None
        )
    times = yield from reader.read_item_storage_times(log, ranges)
    values = yield from reader.read_and_decode_items(thread_id, head.thread, log, ranges)
    return TranscriptTree(
        dict(zip(iter_positions(ranges), values, strict=True)), times, lineages, is_known
    )


def write_thread_and_get_key(
    reader: CheckpointReader,
    records: ThreadRecords,
    target_id: str,
    allocated_keys: list[int],
    updated_at: float,
) -> Flow[int]:
    """Write a new thread from records.

    Args:
        reader: The reader of the target database.
        records: The records of the thread.
        target_id: The id of the new thread.
        allocated_keys: Allocated keys. `records.key_count` of them are taken from the end of the
            list.
        updated_at: The time of the last write to the thread, in seconds since 1970.

    Returns:
        The key of the new thread.
    """
    thread_key = allocated_keys.pop()
    newest_removal = yield from reader.removals.read_newest_record_number(target_id)
    yield reader.sql(
        "new_thread",
        thread_key,
        target_id,
        records.seq,
        random.getrandbits(62),  # version token
        records.created_at,
        updated_at,
        newest_removal,
        reader.removals.hash_thread_id(target_id),
    )
    if records.listed_metadata is not None:
        yield build_list_entry_update(
            reader.sql,
            reader.seal,
            thread_key,
            target_id,
            records.title,
            (reader.codec.decode(records.listed_metadata), records.listed_metadata),
        )
    yield reader.sql(
        "set_columns_of_copied_thread",
        records.status,
        int(records.may_wait),
        *(records.ttl or (None, 0.0, 0)),
        thread_key,
    )
    if records.client is not None:
        yield build_client_metadata_update(
            reader.sql, reader.seal, thread_key, target_id, records.client
        )
    writer = _ThreadWriter(reader, records, target_id, thread_key, allocated_keys)
    yield from writer.write_logs_and_items()
    for namespace in records.namespaces:
        yield from writer.write_namespace(namespace)
    return thread_key


class _ThreadWriter:
    """Writes a thread's records to a database as a new thread with new row keys.

    Args:
        reader: The reader of the target database.
        records: The records of the thread.
        target_id: The id of the new thread.
        thread_key: The key of the new thread.
        keys: Allocated keys for the logs and namespaces.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        records: ThreadRecords,
        target_id: str,
        thread_key: int,
        keys: list[int],
    ) -> None:
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal
        self.records, self.target_id, self.thread_key = records, target_id, thread_key
        self.keys = keys
        # Maps each log's key in `records` to the key of its copy.
        self.logs: dict[int, int] = {}

    def write_logs_and_items(self) -> Flow[None]:
        """Write each log and its items to the target, one page of items at a time."""
        for log, name, *last_keys in self.records.logs:
            key = self.logs[log] = self.keys.pop()
            yield self.sql("new_log", key, self.thread_key, name)
            for start, stop in compute_item_and_alias_position_ranges(*last_keys):
                while start < stop and (
                    page := (
                        yield from self.records.read_items_page(self.reader, name, log, start, stop)
                    )
                ):
                    end = page[-1][0] + 1
                    times = yield from self.records.read_item_storage_times(
                        self.reader, log, start, end
                    )
                    rows = [
                        build_item_row(
                            self.seal, self.target_id, key, name, position, stored, times[position]
                        )
                        for position, stored in page
                    ]
                    yield Statement(self.sql["add_item"], rows, execute_many=True)
                    start = end

    def write_namespace(self, records: NamespaceRecords) -> Flow[None]:
        """Write a namespace to the target, including its checkpoints and pending writes."""
        ns, head, checkpoints, writes = records
        namespace = self.keys.pop()
        yield self.sql("new_namespace", namespace, self.thread_key, ns)
        yield self.sql("set_explicit_head", head, namespace)
        for seq, put_at, snapshot in checkpoints:
            yield from self._write_checkpoint(ns, build_row_key(namespace, seq), put_at, snapshot)
        for checkpoint_id, task, path, task_writes in writes:
            mapped = [
                [i, channel, _replace_log_keys_in_reference(ref, self.logs)]
                for i, channel, ref in task_writes
            ]
            yield build_put_writes_statement(
                self.sql,
                self.seal,
                namespace,
                (self.target_id, ns, checkpoint_id, task, path),
                mapped,
            )

    def _write_checkpoint(
        self, checkpoint_ns: str, checkpoint_key: int, put_at: float, snapshot: Snapshot
    ) -> Flow[None]:
        """Write a checkpoint and its tags.

        In the written checkpoint, each reference to a log of the source thread contains the key of
        that log's copy.
        """
        refs, transcripts = _copy_references_and_transcripts_with_new_log_keys(snapshot, self.logs)
        # A copied checkpoint has no run start time, because no run of the new thread stored it.
        mapped = replace(snapshot, references=refs, run_started_at=None)
        row = (
            checkpoint_key,
            encode_id_for_storage(snapshot.checkpoint_id),
            encode_id_for_storage(snapshot.parent_id),
            snapshot.run_start,
            put_at,
        )
        yield self.sql(
            "add_checkpoint",
            checkpoint_key,
            checkpoint_key >> 32,
            *row[1:],
            encrypt_checkpoint(self.seal, self.target_id, checkpoint_ns, row, mapped, transcripts),
        )
        for number in compute_metadata_index_tags(self.seal, self.reader.decode_metadata(snapshot)):
            yield self.sql("add_tag", number, checkpoint_key)


def _replace_log_keys_in_reference(reference: Any, new_key_by_old_key: Mapping[int, Any]) -> Any:
    """Return a copy of a reference, with its log keys mapped through `new_key_by_old_key`.

    Log keys can be replaced with channel names, so that references from different databases can be
    compared.
    """
    if isinstance(reference, bytes):
        return reference
    kind, *rest = reference
    if kind in (SNAPSHOT, DELTA):
        return [
            kind,
            rest[0]
            if isinstance(rest[0], int)
            else _replace_log_keys_in_reference(rest[0], new_key_by_old_key),
        ]
    if kind == MAP:
        return [
            MAP,
            {
                key: _replace_log_keys_in_reference(inner, new_key_by_old_key)
                for key, inner in rest[0].items()
            },
        ]
    if kind in (LIST_HERE, DICT_HERE):
        return [
            kind,
            [e if isinstance(e, bytes) else [new_key_by_old_key[e[0]], *e[1:]] for e in rest[0]],
        ]
    log, numbers = rest
    return [kind, new_key_by_old_key[log], numbers]


def _copy_references_and_transcripts_with_new_log_keys(
    snapshot: Snapshot, new_log_key_by_old_key: Mapping[int, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return copies of a checkpoint's references and transcripts with new log keys.

    Each log key is replaced with the key to which `new_log_key_by_old_key` maps it.

    Returns:
        The references by channel, and the stored transcripts by channel.
    """
    refs = {
        channel: _replace_log_keys_in_reference(ref, new_log_key_by_old_key)
        for channel, ref in snapshot.references.items()
    }
    transcripts = {
        c: _replace_log_keys_in_reference([LIST, *written], new_log_key_by_old_key)[1:]
        for c, written in snapshot.transcript.items()
    }
    return refs, transcripts


def _build_client_metadata_of_copy(
    source: ClientMetadata | None, own: ClientMetadata | None
) -> ClientMetadata | None:
    """Build the client metadata for the copy of a thread.

    Args:
        source: The client metadata of the original thread.
        own: The client metadata for the copy, or None.
    """
    if source is None or source.changes_by_other_users == "none":
        return own
    return (own or ClientMetadata({}))._replace(changes_by_other_users="since_last_message")


def copy_thread(
    maintenance: Maintenance,
    source: str,
    target: str,
    checkpoint_id: str | None,
    client: ClientMetadata | None = None,
    status: str = "idle",
) -> None:
    """Copy a thread into a new one.

    Args:
        maintenance: The maintenance of the database.
        source: The id of the thread.
        target: The id of the new thread.
        checkpoint_id: The checkpoint up to which to copy, or None for the whole thread.
        client: The clients' metadata of the new thread, or None.
        status: The status of the last run on the server.

    Raises:
        UnknownThread: The thread does not exist.
        UnknownCheckpoint: The thread has no checkpoint with the id `checkpoint_id`.
        InvalidConfig: The new thread exists already.
    """
    reader = maintenance.reader

    def flow() -> Flow[list[int]]:
        records = yield from read_thread_records(reader, source, checkpoint_id)
        records.client = _build_client_metadata_of_copy(records.client, client)
        records.status = status
        if records.ttl is not None:
            # The copy's TTL period starts now.
            minutes, _, keeps = records.ttl
            records.ttl = minutes, time.time(), min(keeps, 1)
        if (yield reader.sql("find_thread", target)):
            raise InvalidConfig(
                f"thread {target!r} already exists; pass a thread_id that is not in use"
            )
        keys = yield from reader.allocate_row_keys(records.key_count)
        thread_key = yield from write_thread_and_get_key(reader, records, target, keys, time.time())
        if checkpoint_id is not None:
            yield from maintenance.delete_unreferenced_items(target, thread_key)
            yield reader.sql("mark_rows_removed", thread_key)
        return keys

    maintenance.database.write(
        flow, reader.cache.keys.replace_reserved_row_keys, exclusive_names=(source, target)
    )


# -- merging


@dataclass
class ThreadContents:
    """Holds the contents of a thread in a form that can be compared across databases.

    Row keys are not part of the contents, because the row keys of equal threads differ between
    databases.

    Attributes:
        checkpoints: The checkpoints, in put order.
        heads: The id of the head, by namespace.
        writes: The channel and reference of each write, by namespace, checkpoint, task, path and
            index.
        items: The bytes of the items, by channel and position. Only `is_continuation_of` compares
            the items; the operator `==` ignores the items.
    """

    checkpoints: list[tuple[Any, ...]]
    heads: dict[str, str]
    writes: dict[tuple[str, str, str, str, int], tuple[str, Any]]
    items: dict[tuple[str, int], bytes] = field(compare=False)

    def is_continuation_of(self, other: ThreadContents) -> bool:
        """Return whether the thread equals `other` or extends it with later checkpoints."""
        return (
            self.checkpoints[: len(other.checkpoints)] == other.checkpoints
            and all(self.items.get(key, item) == item for key, item in other.items.items())
            # Pending writes with a negative index, such as answers to interrupts, can be
            # overwritten. Two copies of a thread can therefore hold different values for the same
            # pending write.
            and all(
                key in self.writes and (self.writes[key] == write or key[-1] < 0)
                for key, write in other.writes.items()
            )
            and self._has_later_heads(other)
        )

    def _has_later_heads(self, other: ThreadContents) -> bool:
        """Return whether all heads are at least as new as their counterparts in the thread `other`.

        The counterpart of a head in this thread is the head of the same namespace in `other`.

        The head of a namespace in `other` is not always the latest checkpoint of the namespace.
        Suppose that the two threads have different heads in a namespace. Suppose also that the
        thread `other` has checkpoints in this namespace that are newer than the head in `other`.
        Some of the namespace's checkpoints must then exist only in this thread. The parent of the
        first of these checkpoints must be the head in `other`.
        """
        common = len(other.checkpoints)
        newest = {ns: checkpoint_id for ns, checkpoint_id, *_ in other.checkpoints}
        next_parents = {ns: parent for ns, _, parent, *_ in reversed(self.checkpoints[common:])}
        return all(
            self.heads.get(ns) == head
            or (ns in next_parents and head in (newest[ns], next_parents[ns]))
            for ns, head in other.heads.items()
        )


def build_thread_contents(records: ThreadRecords) -> ThreadContents:
    """Build the `ThreadContents` of a thread, for comparing two copies of the thread.

    Call this function only after the thread's items have been read into `records`.
    """
    names = {log: name for log, name, *_ in records.logs}
    checkpoints, heads, writes = [], {}, {}
    for ns, head, stored, write_records in records.namespaces:
        for seq, _, snapshot in stored:
            ids = ns, snapshot.checkpoint_id, snapshot.parent_id
            versions = snapshot.channel_versions, snapshot.versions_seen
            values = _copy_references_and_transcripts_with_new_log_keys(snapshot, names)
            checkpoints.append((seq, *ids, snapshot.encoded_fields, *versions, values))
            if seq == head:
                heads[ns] = snapshot.checkpoint_id
        for checkpoint_id, task, path, task_writes in write_records:
            for number, channel, ref in task_writes:
                writes[ns, checkpoint_id, task, path, number] = (
                    channel,
                    _replace_log_keys_in_reference(ref, names),
                )
    items = {
        (names[log], position): item
        for log, log_items in (records.items or {}).items()
        for position, item in log_items.items()
    }
    in_order = [checkpoint[1:] for checkpoint in sorted(checkpoints, key=itemgetter(0))]
    return ThreadContents(in_order, heads, writes, items)


def _format_thread_ids(thread_ids: list[str]) -> str:
    """Format a list of thread ids for an error message.

    If there are more than `_MAX_NAMED_THREADS` ids, only the first `_MAX_NAMED_THREADS` ids are
    listed, followed by the number of the other ids.
    """
    names = ", ".join(map(repr, thread_ids[:_MAX_NAMED_THREADS]))
    unnamed_count = len(thread_ids) - _MAX_NAMED_THREADS
    return f"{names} and {unnamed_count} more" if unnamed_count > 0 else names


class _Rejection(Enum):
    """The reasons for rejecting threads during an import.

    The text of each reason completes a sentence of an error message that begins with "some
    threads".

    An error message lists the reasons in this order.
    """

    DIVERGED = "differ between the two databases, and neither version continues the other"
    ROLLED_BACK = "contain a run that was rolled back in this database"


class DatabaseImport:
    """Merges the threads of a source database into a target database.

    If another OS thread sets the `stopped` event, `run` raises ImportFailed before importing the
    next conversation thread.

    Args:
        source: The maintenance of the source database.
        target: The maintenance of the target database.
        new_ids: New ids for some threads, by their ids in the source.
    """

    def __init__(
        self, source: Maintenance, target: Maintenance, new_ids: Mapping[str, str]
    ) -> None:
        self.source, self.target, self.new_ids = source, target, new_ids
        self.stopped = threading.Event()
        # True if the last written thread did not exist in the target before the import. In this
        # case, the target's copy of the thread can safely be deleted.
        self._is_new = False

    def run(self) -> ImportReport:
        """Merge all threads.

        A thread is rejected if its copies in the source and in the target have diverged. A thread
        has diverged if each of the two databases contains checkpoints of the thread that are
        missing from the other database. A thread is also rejected if the source contains
        checkpoints of a run that was rolled back in the target. Rejected threads are not imported.

        Returns:
            The numbers of imported and skipped objects.

        Raises:
            ConfigurationError: `new_ids` names a thread that does not exist, or two threads would
                have the same id.
            ImportFailed: Threads were rejected and are named in the message, or the merge was
                cancelled.
            SchemaMismatch: One of the databases has tables of an unknown component.
        """
        for maintenance in (self.source, self.target):
            maintenance.database.read(maintenance.extensions.load)
        threads = [*self.source.listing.iter_thread_ids()]
        path = self.source.database.path
        if unknown := self.new_ids.keys() - {*threads}:
            raise ConfigurationError(
                f"{path} has no thread {sorted(unknown)[0]!r}, so the thread cannot be renamed; "
                "use an id that 'perdure threads' lists for this database"
            )
        target_ids = Counter(self.new_ids.get(thread_id, thread_id) for thread_id in threads)
        if self.new_ids and len(target_ids) < len(threads):
            ((new_id, _),) = target_ids.most_common(1)
            raise ConfigurationError(
                f"two threads of {path} would both get the id {new_id!r}; choose different new ids"
            )
        # Before the first thread is copied, copy the marker row that says that organisations can
        # own threads. Without the marker row, the target would treat organisations as people if the
        # import was interrupted after the first thread.
        if self.source.database.read(read_organisations_mark):
            self.target.database.write(add_organisations_mark)
        report, rejected = ImportReport(), dict[_Rejection, list[str]]()
        for thread_id in threads:
            if self.stopped.is_set():
                raise ImportFailed(
                    f"the import of {path!r} was cancelled; run the import again to continue"
                )
            try:
                result = self._import_thread(thread_id, self.new_ids.get(thread_id, thread_id))
            except UnknownThread:
                # The thread was deleted after its id was listed.
                continue
            if isinstance(result, ImportReport):
                report += result
            else:
                rejected.setdefault(result, []).append(thread_id)
        if rejected:
            count = sum(map(len, rejected.values()))
            reasons = (
                f"some threads {reason.value}: {_format_thread_ids(rejected[reason])}"
                for reason in _Rejection
                if reason in rejected
            )
            raise ImportFailed(
                f"{count} of {count + report.threads} threads from {path!r} were not imported: "
                f"{'; '.join(reasons)}. To keep both versions of a thread, import the thread under "
                "a new id with names={'ID': 'NEW'} or 'perdure import --as ID=NEW'"
            )
        return report

    def _import_thread(self, thread_id: str, target: str) -> ImportReport | _Rejection:
        """Copy a thread from the source database to the target database, or reject the thread.

        If data is erased from the source thread after it was read but before the copy was written,
        the copy is deleted and the thread is imported again. A thread that existed in the target
        before the import is not deleted.

        Raises:
            ImportFailed: Something was erased from the source thread while it was copied, and the
                target already had the thread, so the target may now contain the erased data.
        """
        read_number = partial(self.source.reader.removals.read_newest_record_number, thread_id)
        while True:
            number = self.source.database.read(read_number)
            records = self.source.database.read(partial(self._read_records, thread_id))
            report = self._write_thread_unless_rejected(records, target)
            if (
                not isinstance(report, ImportReport)
                or not report.checkpoints
                or self.source.database.read(read_number) == number
            ):
                return report
            if not self._is_new:
                raise ImportFailed(
                    f"data was erased from {self.source.database.path!r} during the import; erase "
                    f"the same data from the imported thread {target!r}"
                )
            self.target.delete_and_drop_cached_thread(
                target, partial(self.target.delete_thread, target, add_removal_record=False)
            )

    def _read_records(self, thread_id: str) -> Flow[ThreadRecords]:
        """Read all records and items of a thread, and check that they are well-formed.

        Raises:
            CorruptRecord: A record has a form that perdure does not write.
        """
        try:
            records = yield from read_thread_records(self.source.reader, thread_id)
            yield from load_all_log_items_into_records(self.source.reader, records)
            check_thread_records_well_formed(self.source.reader, records)
        except PerdureError:
            raise
        except MALFORMED as exc:
            raise CorruptRecord(
                f"thread {thread_id!r} of {self.source.database.path!r} was not imported, because "
                f"its records do not have the format that perdure writes ({exc!r:.200}); the "
                "source database is damaged, or was modified by another program"
            ) from exc
        return records

    def _read_target_contents_or_report_if_nothing_to_write(
        self, records: ThreadRecords, target_thread_id: str, source_contents: ThreadContents
    ) -> Flow[ThreadContents | ImportReport | _Rejection]:
        """Compare a source thread with the thread `target_thread_id` in the target database.

        Returns:
            The contents of the target's thread, which the source thread continues. They are empty
            if the target has no such thread. A report if there is nothing to write. The reason if
            the thread is rejected.
        """
        reader = self.target.reader
        if (yield from reader.find_thread_row(target_thread_id)) is None:
            return ThreadContents([], {}, {}, {})
        stored = yield from read_thread_records(reader, target_thread_id)
        yield from load_all_log_items_into_records(reader, stored)
        target_contents = build_thread_contents(stored)
        continues_target = source_contents.is_continuation_of(target_contents)
        continues_source = target_contents.is_continuation_of(source_contents)
        is_equal = target_contents == source_contents and continues_target
        if is_equal or (continues_source and not continues_target):
            return ImportReport(1, 1, skipped=len(source_contents.checkpoints))
        if continues_source or not continues_target:
            return _Rejection.DIVERGED
        new_ids = {
            checkpoint_id
            for _, checkpoint_id, *_ in source_contents.checkpoints[
                len(target_contents.checkpoints) :
            ]
        }
        if (
            yield from reader.removals.find_ids_of_rolled_back_checkpoints(
                target_thread_id, new_ids
            )
        ):
            return _Rejection.ROLLED_BACK
        return target_contents

    def _write_thread_unless_rejected(
        self, records: ThreadRecords, target: str
    ) -> ImportReport | _Rejection:
        """Write a thread to the target, unless the target already has all of the thread's records.

        Return the reason if the thread is rejected.
        """
        reader, keys = self.target.reader, list[int]()
        source_contents = build_thread_contents(records)

        def flow() -> Flow[ImportReport | _Rejection]:
            target_contents = yield from self._read_target_contents_or_report_if_nothing_to_write(
                records, target, source_contents
            )
            if not isinstance(target_contents, ThreadContents):
                return target_contents
            keys[:] = yield from reader.allocate_row_keys(records.key_count)
            for _, status, _, sealed_client in (yield reader.sql("lock_client_metadata", target)):
                if sealed_client is not None:
                    own = decrypt_client_metadata(reader.seal, target, sealed_client)
                    records.client = _build_client_metadata_of_copy(
                        records.client, own and own.treat_changes_by_other_users_as_recent()
                    )
                    records.status = status
            for ttl in (yield reader.sql("find_ttl", target)):
                records.ttl = ttl
            old_rows = yield reader.sql("find_thread", target)
            self._is_new = not old_rows
            yield from self.target.delete_thread(
                target, with_extensions=False, add_removal_record=False
            )
            thread_key = yield from write_thread_and_get_key(
                reader, records, target, keys, records.updated_at
            )
            for old_thread_key, *_ in old_rows:
                yield from self.target.extensions.move_rows_to_thread(old_thread_key, thread_key)
            common = len(target_contents.checkpoints)
            new_writes = len(source_contents.writes) - len(target_contents.writes)
            return ImportReport(1, 0, len(source_contents.checkpoints) - common, new_writes, common)

        def update_cache(_: object) -> None:
            if keys:
                reader.cache.keys.replace_reserved_row_keys(keys)
            reader.cache.drop_thread(target)

        return self.target.database.write(flow, update_cache, exclusive_names=(target,))

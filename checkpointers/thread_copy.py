"""Copy threads within one database, and merge threads from one database into another database.

Items, checkpoints and pending writes are copied in encoded form. The copied bytes are decrypted
with the source's key and re-encrypted with the target's key. Only the metadata of the copied data
is decoded, because it is needed to compute the target's metadata index.

If a thread exists in both databases, a merge first compares the two copies. If the two copies are
equal, or if only the target copy has new checkpoints, nothing is changed. If only the source copy
has new checkpoints, it replaces the target copy. The thread is rejected and not imported if both
copies have new checkpoints, or if the source copy contains checkpoints of a run that was rolled
back in the target. Each thread is written in a single transaction.
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
    extract_value_reference_from_delta_channel_reference,
    iter_positions,
    join_adjacent_ranges,
)
from perdure.checkpointers.owner_record import add_organisations_mark, read_organisations_mark
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.record_checks import MALFORMED, check_thread_records_well_formed
from perdure.checkpointers.records import (
    ClientMetadata,
    build_item_associated_data,
    build_row_key,
    build_row_key_range,
    compute_item_and_alias_position_ranges,
    compute_item_hash,
    compute_metadata_index_tags,
    decrypt_client_metadata,
    encode_id_for_storage,
    encrypt_checkpoint,
    encrypt_client_metadata_and_search_keys,
    encrypt_thread_list_entry_and_build_search_keys,
    encrypt_writes,
    select_lineage,
)
from perdure.checkpointers.reports import ImportReport
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
from perdure.storage.flow import NO_LIMIT, Flow, Statement

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
    head = yield from reader.find_checkpoint(Address(thread_id, "", None))
    if head is None:
        return None
    rows = yield reader.sql("checkpoints_page", *build_row_key_range(head.namespace_key), NO_LIMIT)
    head_lineage = {row[0] for row in select_lineage(rows, head.snapshot.key)}
    parents, log, lineages = {row[2] for row in rows}, 0, list[list[int]]()
    for row in reversed(rows):
        is_head = row[0] == head.snapshot.key
        if is_head or (row[0] not in head_lineage and row[1] not in parents):
            snapshot = reader.decrypt_checkpoint_row(thread_id, "", row)
            yield from reader.unflatten_ranges_in_snapshot(thread_id, head.thread, snapshot)
            key, ranges = snapshot.transcript.get(channel, (0, []))
            log = key or log
            lineage = yield from reader.read_positions_with_aliases_resolved(
                thread_id, head.thread, log, ranges
            )
            lineages.insert(0 if is_head else len(lineages), lineage)
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
    stored = (
        yield from reader.load_log_items_into_cache(thread_id, head.thread, log, ranges)
    ).get_items(ranges)
    values = reader.codec.decode_all(stored)
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
    version_token = random.getrandbits(62)
    newest_removal = yield from reader.removals.read_newest_number(target_id)
    row = (
        thread_key,
        target_id,
        records.seq,
        version_token,
        records.created_at,
        updated_at,
        newest_removal,
    )
    yield reader.sql("new_thread", *row, reader.removals.hash_thread_id(target_id))
    if records.title is not None or records.listed_metadata is not None:
        listed_metadata = (
            None
            if records.listed_metadata is None
            else (reader.codec.decode(records.listed_metadata), records.listed_metadata)
        )
        yield reader.sql(
            "set_list_entry",
            *encrypt_thread_list_entry_and_build_search_keys(
                reader.seal, target_id, records.title, listed_metadata
            ),
            thread_key,
        )
    if records.client is not None:
        yield reader.sql(
            "set_client_metadata",
            *encrypt_client_metadata_and_search_keys(reader.seal, target_id, records.client),
            thread_key,
        )
    if records.status != "idle":
        yield reader.sql("set_status", records.status, thread_key)
    if records.may_wait:
        yield reader.sql("mark_may_wait", thread_key)
    if records.ttl is not None:
        yield reader.sql("set_ttl", *records.ttl, target_id)
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
        """Write each log with its items, one page of items at a time."""
        for log, name, *last_keys in self.records.logs:
            key = self.logs[log] = self.keys.pop()
            yield self.sql("new_log", key, self.thread_key, name)
            for first, stop in compute_item_and_alias_position_ranges(*last_keys):
                start = first
                while page := (
                    yield from self.records.read_items_page(self.reader, name, log, start, stop)
                ):
                    rows, end = [], page[-1][0] + 1
                    read_times = self.records.read_item_storage_times
                    times = yield from read_times(self.reader, log, start, end)
                    start = end
                    for position, stored in page:
                        item_hash = (
                            compute_item_hash(self.seal, key, stored) if position < ALIASES else 0
                        )
                        body = self.seal.seal(
                            stored, build_item_associated_data(self.target_id, name, position)
                        )
                        rows.append(
                            (build_row_key(key, position), item_hash, times[position], body)
                        )
                    yield Statement(self.sql["add_item"], rows, execute_many=True)

    def write_namespace(self, records: NamespaceRecords) -> Flow[None]:
        """Write a namespace, including its checkpoints and pending writes."""
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
            body = encrypt_writes(
                self.seal, (self.target_id, ns, checkpoint_id, task, path), mapped
            )
            yield self.sql(
                "put_writes",
                namespace,
                encode_id_for_storage(checkpoint_id),
                encode_id_for_storage(task),
                path,
                body,
            )

    def _write_checkpoint(
        self, checkpoint_ns: str, checkpoint_key: int, put_at: float, snapshot: Snapshot
    ) -> Flow[None]:
        """Write a checkpoint and its tags.

        In each reference to a log, the log's key is replaced with the key of the copied log.
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
        body = encrypt_checkpoint(
            self.seal, self.target_id, checkpoint_ns, row, mapped, transcripts
        )
        yield self.sql("add_checkpoint", checkpoint_key, checkpoint_key >> 32, *row[1:], body)
        for number in compute_metadata_index_tags(self.seal, self.reader.decode_metadata(snapshot)):
            yield self.sql("add_tag", number, checkpoint_key)


def _replace_log_keys_in_reference(reference: Any, new_key_by_old_key: Mapping[int, Any]) -> Any:
    """Return a copy of a reference, with its log keys mapped through `new_key_by_old_key`.

    To compare references from two databases, the new keys can also be channel names instead of log
    keys.
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
    """Replace the log keys in a checkpoint's references and stored transcripts.

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
        records.client, records.status = client, status
        if records.ttl is not None:
            # The copy's TTL period starts now.
            minutes, _, keeps = records.ttl
            records.ttl = minutes, time.time(), min(keeps, 1)
        if (yield reader.sql("find_thread", target)):
            raise InvalidConfig(f"thread {target!r} exists already; copy to a new thread_id")
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

    Row keys are omitted, because they differ between databases even if the threads are equal.

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
            # Pending writes with a negative index, such as answers to interrupts, may have been
            # overwritten, so their values may differ.
            and all(
                key in self.writes and (self.writes[key] == write or key[-1] < 0)
                for key, write in other.writes.items()
            )
            and self._has_later_heads(other)
        )

    def _has_later_heads(self, other: ThreadContents) -> bool:
        """Return whether each namespace's head is the same as in `other` or a later checkpoint.

        If the head of a namespace in `other` is not the namespace's latest checkpoint, the first
        checkpoint that this thread adds to the namespace must be a child of that head.
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

    If there are more than `_MAX_NAMED_THREADS` ids, the text ends with the number of omitted ids.
    """
    names = ", ".join(map(repr, thread_ids[:_MAX_NAMED_THREADS]))
    unnamed_count = len(thread_ids) - _MAX_NAMED_THREADS
    return f"{names} and {unnamed_count} more" if unnamed_count > 0 else names


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
        # True if the target had no copy of the most recently written thread before the import, so
        # that the newly written copy can safely be deleted.
        self._is_new = False
        # Ids of threads that were rejected because the source contains checkpoints of a run that
        # was rolled back in the target database.
        self._rolled_back: list[str] = []

    def run(self) -> ImportReport:
        """Merge all threads.

        A thread is rejected if each database has new checkpoints that the other lacks, or if the
        source contains checkpoints of a run that was rolled back in the target.

        Returns:
            The numbers of imported and skipped objects.

        Raises:
            ConfigurationError: `new_ids` names a thread that does not exist, or two threads would
                have the same id.
            ImportFailed: Threads were rejected and are named in the message, or the merge was
                cancelled.
        """
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
        self._copy_mark_that_owners_may_be_organisations()
        report, refused = ImportReport(), list[str]()
        for thread_id in threads:
            if self.stopped.is_set():
                raise ImportFailed(
                    f"the import of {path!r} was cancelled; run the import again to continue"
                )
            try:
                thread_report = self._import_thread(
                    thread_id, self.new_ids.get(thread_id, thread_id)
                )
            except UnknownThread:
                # The thread was deleted after its id was listed.
                continue
            report += thread_report or ImportReport()
            if thread_report is None:
                refused.append(thread_id)
        if refused:
            forked = [thread_id for thread_id in refused if thread_id not in self._rolled_back]
            reasons = []
            if forked:
                reasons.append(
                    f"these threads differ between this database and {path!r}, and neither version "
                    f"continues the other: {_format_thread_ids(forked)}"
                )
            if self._rolled_back:
                reasons.append(
                    f"these threads of {path!r} contain a run that was rolled back in this "
                    f"database: {_format_thread_ids(self._rolled_back)}"
                )
            raise ImportFailed(
                f"{'. '.join(reasons)}. Number of other threads that were imported: "
                f"{report.threads}. To keep both versions of a thread, import it under a new id "
                f"with names={{'ID': 'NEW'}} or 'perdure import --as ID=NEW'"
            )
        return report

    def _copy_mark_that_owners_may_be_organisations(self) -> None:
        """If the source's threads can belong to organisations, record this in the target.

        Call this method before the first thread is copied. Otherwise, if the import is interrupted,
        the target treats organisations as people.
        """
        if self.source.database.read(read_organisations_mark):
            self.target.database.write(add_organisations_mark)

    def _import_thread(self, thread_id: str, target: str) -> ImportReport | None:
        """Copy a thread from the source database to the target database.

        Return None if the thread is rejected. If data is erased from the source thread after it was
        read but before the copy was written, the copy is deleted and the thread is imported again.
        If the target already had the thread before the import, the copy is not deleted, and
        ImportFailed is raised.

        Raises:
            ImportFailed: Something was erased from the source thread while it was copied, and the
                target already had the thread, so the target may now contain the erased data.
        """
        read_number = partial(self.source.reader.removals.read_newest_number, thread_id)
        while True:
            number = self.source.database.read(read_number)
            records = self.source.database.read(partial(self._read_records, thread_id))
            report = self._write_thread_unless_rejected(records, target)
            if (
                report is None
                or not report.checkpoints
                or self.source.database.read(read_number) == number
            ):
                return report
            if not self._is_new:
                raise ImportFailed(
                    f"data was erased from {self.source.database.path!r} while its thread "
                    f"{thread_id!r} was being imported; the copy in this database, the thread "
                    f"{target!r}, can still contain the erased data; erase this data from the copy "
                    "too"
                )
            delete = partial(self.target.delete_thread, target, add_removal_record=False)
            self.target.delete_and_drop_cached_thread(target, delete)

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
    ) -> Flow[ThreadContents | ImportReport | None]:
        """Compare a source thread with the thread `target_thread_id` in the target database.

        Returns:
            The contents of the target's thread, which the source thread continues. They are empty
            if the target has no such thread. A report if there is nothing to write. None if the
            thread is rejected.
        """
        reader = self.target.reader
        if not (yield reader.sql("one_thread", target_thread_id)):
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
            return None
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
            self._rolled_back.append(records.thread_id)
            return None
        return target_contents

    def _write_thread_unless_rejected(
        self, records: ThreadRecords, target: str
    ) -> ImportReport | None:
        """Write a thread to the target, unless the target already has all of the thread's records.

        Return None if the thread is rejected.
        """
        reader, keys = self.target.reader, list[int]()
        source_contents = build_thread_contents(records)

        def flow() -> Flow[ImportReport | None]:
            target_contents = yield from self._read_target_contents_or_report_if_nothing_to_write(
                records, target, source_contents
            )
            if not isinstance(target_contents, ThreadContents):
                return target_contents
            keys[:] = yield from reader.allocate_row_keys(records.key_count)
            for _, status, _, sealed_client in (yield reader.sql("lock_client_metadata", target)):
                if sealed_client is not None:
                    records.client = decrypt_client_metadata(reader.seal, target, sealed_client)
                    records.status = status
            for ttl in (yield reader.sql("find_ttl", target)):
                records.ttl = ttl
            old_rows = yield reader.sql("find_thread", target)
            self._is_new = not old_rows
            yield from self.target.delete_thread(target, with_runs=False, add_removal_record=False)
            thread_key = yield from write_thread_and_get_key(
                reader, records, target, keys, records.updated_at
            )
            move_statements = "move_runs", "move_events"
            yield [
                reader.sql(move, thread_key, thread)
                for thread, *_ in old_rows
                for move in move_statements
            ]
            common = len(target_contents.checkpoints)
            new_writes = len(source_contents.writes) - len(target_contents.writes)
            return ImportReport(1, 0, len(source_contents.checkpoints) - common, new_writes, common)

        def update_cache(_: object) -> None:
            if keys:
                reader.cache.keys.replace_reserved_row_keys(keys)
            reader.cache.drop_thread(target)

        return self.target.database.write(flow, update_cache, exclusive_names=(target,))

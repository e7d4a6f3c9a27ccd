"""Delete threads, the checkpoints of given runs, old checkpoints, and unreferenced log items.

A log item is deleted when no checkpoint, pending write or transcript of its thread refers to it. If
a retention rule discards the history, a log item is deleted even if a transcript refers to the
item. Unreferenced items are found and deleted in a single write transaction, so that no checkpoint
that refers to such an item can be stored in between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import check_thread_ids
from perdure.checkpointers.cache import Snapshot
from perdure.checkpointers.extensions import ExtensionCounts, ThreadExtensions
from perdure.checkpointers.head_records import find_ids_of_possibly_idle_threads
from perdure.checkpointers.labels import (
    MAX_UPDATED_IDS,
    UPDATED,
    list_ids_of_checkpoints_changed_by_state_updates,
)
from perdure.checkpointers.listing import Listing
from perdure.checkpointers.manifest import (
    ALIASES,
    Ranges,
    decode_ranges,
    encode_ranges,
    extract_value_reference_from_delta_channel_reference,
    iter_referenced_log_keys_and_ranges,
    merge_ranges,
    subtract_ranges,
)
from perdure.checkpointers.reader import ITEMS_PAGE_SIZE, CheckpointReader
from perdure.checkpointers.records import (
    build_row_key,
    build_row_key_range,
    compute_item_and_alias_position_ranges,
    compute_metadata_index_tags,
    decode_stored_id,
    decrypt_listed_title_and_encoded_metadata,
    decrypt_writes,
    encode_id_for_storage,
    encrypt_checkpoint,
)
from perdure.checkpointers.reports import PruneReport, Retention, ThreadInfo
from perdure.checkpointers.thread_reader import ThreadReader
from perdure.checkpointers.transcript_index import drop_transcript_index_of_thread
from perdure.checkpointers.values import unpack
from perdure.errors import ConfigurationError, CorruptRecord
from perdure.storage.database import Database
from perdure.storage.flow import NO_LIMIT, Flow, Row, Statement

T = TypeVar("T")

# Maximum number of checkpoints to delete in one transaction.
PRUNE_BATCH: Final = 500
RUN_DAYS: Final = 1
"""The number of days after a state update for which retention keeps the updated checkpoint.

A run that loaded this checkpoint before the update may still continue from it.
"""
KeepRule = Callable[[list["RetentionCandidate"]], set[str]]
"""A function that returns the ids of the checkpoints to keep, given all checkpoints of a namespace,
newest first."""


class RetentionCandidate(NamedTuple):
    """The fields of a checkpoint that a retention rule needs to decide whether to keep it.

    Attributes:
        key: The key of the checkpoint's row.
        checkpoint_id: The id of the checkpoint.
        parent_id: The id of the parent, or None.
        active_at: The `ts` of the checkpoint or the time at which it was stored, whichever is
            earlier, in seconds since 1970.
        metadata: The metadata of the checkpoint.
        channels: The channels with a stored value; see `Snapshot.stored_channels`.
        is_head: Whether the checkpoint is the head of its namespace.
        size: The size of the body of the checkpoint's row, in bytes.
    """

    key: int
    checkpoint_id: str
    parent_id: str | None
    active_at: float
    metadata: Mapping[str, Any]
    channels: frozenset[str]
    is_head: bool
    size: int


class DeletedItems(NamedTuple):
    """The number of deleted log items and their total size in bytes."""

    item_count: int
    freed_bytes: int


class Maintenance:
    """Deletes and prunes threads of a checkpointer.

    Each thread is deleted in its own transaction, and old checkpoints are deleted in batches, so
    that other writers are not blocked for long.
    """

    def __init__(self, reader: CheckpointReader, listing: Listing, database: Database) -> None:
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal
        self.listing, self.database, self.threads = listing, database, ThreadReader(reader)
        self.extensions = ThreadExtensions(reader, database)

    def delete_threads(self, thread_ids: Sequence[str], *, add_removal_record: bool = True) -> None:
        """Delete threads and free their disk space; see `delete_thread`."""
        for thread_id in check_thread_ids(thread_ids):
            self.delete_and_drop_cached_thread(
                thread_id,
                partial(self.delete_thread, thread_id, add_removal_record=add_removal_record),
            )
        self.database.release_unused_disk_space()

    def delete_checkpoints_of_runs(
        self, run_ids: Iterable[str], thread_id: str | None = None
    ) -> None:
        """Delete the checkpoints of runs; see `Checkpointer.delete_for_runs`."""
        keys_by_thread: dict[str, set[int]] = defaultdict(set)
        for run_id in run_ids:
            tagged = self.database.read(
                partial(
                    self.listing.find_thread_ids_and_checkpoint_keys_by_metadata_index,
                    {"run_id": run_id},
                )
            )
            if tagged is None:
                # The metadata index has no entry for the run, so search the checkpoint rows
                # instead.
                config: RunnableConfig | None = (
                    None if thread_id is None else {"configurable": {"thread_id": thread_id}}
                )
                where = {"run_id": run_id}
                tagged = [
                    (address.thread_id, key)
                    for address, key in self.listing.iter_addresses_and_row_keys(
                        config, where, None
                    )
                ]
            for owner_id, key in tagged:
                if thread_id in (None, owner_id):
                    keys_by_thread[owner_id].add(key)
        for owner_id, keys in keys_by_thread.items():
            self.delete_and_drop_cached_thread(
                owner_id, partial(self._add_rollback_record, owner_id, keys)
            )
            self._prune_in_batches(owner_id, partial(_keep_all_except, keys))
            self.delete_and_drop_cached_thread(
                owner_id,
                partial(
                    self.rebuild_outdated_list_entry_of_thread,
                    owner_id,
                    may_metadata_be_deleted=True,
                ),
            )
        if keys_by_thread:
            self.database.release_unused_disk_space()

    def _add_rollback_record(self, thread_id: str, checkpoint_keys: Iterable[int]) -> Flow[None]:
        """Add a removal record for the checkpoints of a run before they are deleted."""
        ids = []
        for key in checkpoint_keys:
            rows = yield self.sql("checkpoint_row", key)
            ids += [decode_stored_id(row[1]) or "" for row in rows]
        yield from self.reader.removals.add_rollback_record(thread_id, ids)

    def prune(self, thread_ids: Sequence[str], strategy: str) -> None:
        """Delete threads, or only their old checkpoints; see `Checkpointer.prune`."""
        if strategy in ("delete", "delete_all"):
            self.delete_threads(thread_ids)
        elif strategy == "keep_latest":
            self.retain(Retention(last=0), check_thread_ids(thread_ids))
        else:
            raise ConfigurationError(
                f"the argument 'strategy' is {strategy!r}; expected 'keep_latest' or 'delete'"
            )

    def retain(self, rule: Retention, thread_ids: object, *, dry_run: bool = False) -> PruneReport:
        """Apply a retention rule; see `Checkpointer.retain`."""
        _check_retention_rule(rule)
        keep, total = _build_keep_rule(rule, time.time()), PruneReport()
        for thread_id in self._resolve_thread_ids(thread_ids):
            if dry_run:
                pruned = partial(
                    self.delete_checkpoint_batch,
                    thread_id,
                    keep,
                    rule.history,
                    spares_runs=True,
                    dry_run=True,
                )
                report = self.database.read(pruned)
            else:
                report = self._prune_in_batches(thread_id, keep, rule.history, spares_runs=True)
            total += replace(report, threads=int(report.checkpoints > 0))
        if not dry_run:
            self.database.release_unused_disk_space()
        return total

    def delete_idle(
        self, before: datetime, thread_ids: object, *, dry_run: bool
    ) -> list[ThreadInfo]:
        """Delete inactive threads; see `Checkpointer.delete_idle`."""

        def find_idle(thread_id: str, delete: bool) -> Flow[ThreadInfo | None]:
            info = yield from self.threads.find_thread_if_idle_since(thread_id, before)
            if info is not None and (yield from self.extensions.is_thread_in_use(thread_id)):
                return None
            if info is not None and delete:
                yield from self.delete_thread(thread_id)
            return info

        deleted = []
        for thread_id in (
            find_ids_of_possibly_idle_threads(self.database, self.reader, before)
            if thread_ids is None
            else check_thread_ids(thread_ids)
        ):
            info = self.database.read(partial(find_idle, thread_id, False))
            if info is not None and not dry_run:
                info = self.delete_and_drop_cached_thread(
                    thread_id, partial(find_idle, thread_id, True)
                )
            if info is not None:
                deleted.append(info)
        if deleted and not dry_run:
            self.database.release_unused_disk_space()
        return deleted

    def _resolve_thread_ids(self, thread_ids: object) -> Iterable[str]:
        """Check and return thread ids. If `thread_ids` is None, return the ids of all threads."""
        return (
            self.listing.iter_thread_ids() if thread_ids is None else check_thread_ids(thread_ids)
        )

    def _prune_in_batches(
        self,
        thread_id: str,
        keep: KeepRule,
        keeps_history: bool = True,
        *,
        spares_runs: bool = False,
    ) -> PruneReport:
        """Delete checkpoints of a thread in batches, each in its own transaction.

        The arguments are described under `delete_checkpoint_batch`.
        """
        total = PruneReport()
        while True:
            report = self.delete_and_drop_cached_thread(
                thread_id,
                partial(
                    self.delete_checkpoint_batch,
                    thread_id,
                    keep,
                    keeps_history,
                    spares_runs=spares_runs,
                ),
            )
            total += report
            if report.checkpoints < PRUNE_BATCH:
                return total

    def delete_and_drop_cached_thread(
        self, thread_id: str, make_deletion_flow: Callable[[], Flow[T]]
    ) -> T:
        """Delete a thread or a part of its data, and evict the thread from the cache.

        `make_deletion_flow` returns a flow, which is a generator that yields SQL statements.
        """
        forget = self.reader.cache.drop_thread
        return self.database.write(
            make_deletion_flow,
            lambda _: forget(thread_id),
            exclusive_names=(thread_id,),
            deletes_rows=True,
        )

    def rebuild_outdated_list_entry_of_thread(
        self, thread_id: str, *, may_metadata_be_deleted: bool = False
    ) -> Flow[None]:
        """Rebuild the title and metadata of a thread's list entry if they may be outdated.

        A list entry is outdated if its title or metadata was copied from checkpoint data that has
        been deleted.

        Args:
            thread_id: The thread.
            may_metadata_be_deleted: Whether metadata may have been deleted, and not only messages.
        """
        row = yield from self.reader.find_thread_row(thread_id)
        if row is not None:
            title, _ = decrypt_listed_title_and_encoded_metadata(
                self.seal, thread_id, row.list_entry
            )
            # If a title has no message id, it was taken from the metadata.
            if title is None or title.message_id is not None or may_metadata_be_deleted:
                yield from self.threads.recompute_thread_list_entry(row)

    def delete_thread(
        self, thread_id: str, *, with_extensions: bool = True, add_removal_record: bool = True
    ) -> Flow[PruneReport]:
        """Delete a thread and all of its data. An unknown id is ignored.

        Args:
            thread_id: The thread.
            with_extensions: Whether the rows that other components keep for the thread are deleted
                as well, such as the runs of the server.
            add_removal_record: Whether to add a removal record, so that runs in progress can store
                nothing in the thread any more.

        Returns:
            The number of deleted objects.
        """
        rows = yield self.sql("find_thread", thread_id)
        if not rows:
            return PruneReport()
        thread_key = rows[0][0]
        # If a component is unknown, `delete_rows_of_thread` raises SchemaMismatch before anything
        # is deleted.
        counts = (
            (yield from self.extensions.delete_rows_of_thread(thread_id, thread_key))
            if with_extensions
            else ExtensionCounts()
        )
        ((checkpoints, items, size),) = yield self.sql("thread_sizes", thread_key)
        if add_removal_record:
            ids = yield from self._load_checkpoint_ids(thread_key)
            yield from self.reader.removals.add_removal_record_and_get_number(thread_id, {}, ids)
        for namespace, ns, _ in (yield self.sql("thread_namespaces", thread_key)):
            yield from self.delete_checkpoints_of_namespace(thread_id, ns, namespace)
        for log, *_ in (yield self.sql("thread_logs", thread_key)):
            yield self.sql("drop_items", *build_row_key_range(log))
        for table in ("drop_namespaces", "drop_logs", "drop_thread"):
            yield self.sql(table, thread_key)
        yield from drop_transcript_index_of_thread(self.sql, thread_key)
        return PruneReport(checkpoints, items, 1, size, *counts)

    def _load_checkpoint_ids(self, thread_key: int) -> Flow[set[str]]:
        """Return the ids of all checkpoints of a thread.

        The result includes the ids of checkpoints for which only pending writes are stored.
        """
        packed_ids = set[Any]()
        for namespace, *_ in (yield self.sql("thread_namespaces", thread_key)):
            packed_ids |= {
                uid
                for _, uid, _ in (
                    yield self.sql("checkpoint_keys", *build_row_key_range(namespace))
                )
            }
            packed_ids |= {row[0] for row in (yield self.sql("namespace_writes", namespace))}
        return {decode_stored_id(uid) or "" for uid in packed_ids}

    def delete_checkpoints_of_namespace(
        self, thread_id: str, checkpoint_ns: str, namespace_key: int
    ) -> Flow[int]:
        """Delete the checkpoints of a namespace and their pending writes.

        Returns:
            The number of deleted checkpoints.
        """
        rows = yield self.sql("checkpoints_page", *build_row_key_range(namespace_key), NO_LIMIT)
        for row in rows:
            try:
                metadata = self.reader.decode_metadata(
                    self.reader.decrypt_checkpoint_row(thread_id, checkpoint_ns, row)
                )
            except CorruptRecord:
                # The metadata cannot be read, so the checkpoint's index tags are unknown. Delete
                # its index entries by searching the entire metadata index.
                yield self.sql("drop_tags", row[0])
            else:
                yield self._build_metadata_index_deletes(row[0], metadata)
        yield self.sql("drop_namespace_checkpoints", *build_row_key_range(namespace_key))
        yield self.sql("drop_namespace_writes", namespace_key)
        return len(rows)

    def _build_metadata_index_deletes(
        self, checkpoint_key: int, metadata: Mapping[str, Any]
    ) -> list[Statement]:
        """Build the statements that delete a checkpoint's entries from the metadata index."""
        return [
            self.sql("drop_tag", number, checkpoint_key)
            for number in compute_metadata_index_tags(self.seal, metadata)
        ]

    # -- deleting checkpoints of a thread

    def delete_checkpoint_batch(
        self,
        thread_id: str,
        keep: KeepRule,
        keeps_history: bool,
        *,
        spares_runs: bool = False,
        dry_run: bool = False,
    ) -> Flow[PruneReport]:
        """Delete one batch of the checkpoints that the rule `keep` does not select.

        Then delete the thread's log items that are no longer referenced.

        Args:
            thread_id: The thread.
            keep: The rule, which returns the ids of the checkpoints to keep.
            keeps_history: Whether the transcript up to each kept checkpoint stays readable.
            spares_runs: Whether to keep the checkpoints that show the progress of runs of a server
                that have not ended. Without them, the server that continues such a run would apply
                its input again.
            dry_run: Whether to delete nothing, and to count the checkpoints of all batches.

        Returns:
            The number of deleted objects.
        """
        rows, live_run_ids = (yield self.sql("find_thread", thread_id)), set[str]()
        if spares_runs and rows:
            live_run_ids = yield from self.extensions.list_ids_of_live_runs(thread_id)
        candidates = []
        if rows:
            candidates = yield from self._select_checkpoints_to_delete(
                thread_id, rows[0][0], keep, live_run_ids, dry_run
            )
        if not rows or (keeps_history and not candidates):
            return PruneReport()
        thread_key, size, deleted = rows[0][0], 0, set[Any]()
        candidates = candidates if dry_run else candidates[:PRUNE_BATCH]
        for namespace, checkpoint in candidates:
            write_key = namespace, encode_id_for_storage(checkpoint.checkpoint_id)
            ((write_bytes,),) = yield self.sql("size_of_writes", *write_key)
            size += checkpoint.size + write_bytes
            deleted |= {checkpoint.key, write_key}
            if not dry_run:
                yield [
                    *self._build_metadata_index_deletes(checkpoint.key, checkpoint.metadata),
                    self.sql("drop_writes", *write_key),
                    self.sql("drop_checkpoint", checkpoint.key),
                    *([self.sql("set_explicit_head", 0, namespace)] if checkpoint.is_head else []),
                ]
        items, item_bytes = yield from self.delete_unreferenced_items(
            thread_id, thread_key, excluded=deleted, keeps_history=keeps_history, dry_run=dry_run
        )
        if not dry_run:
            yield self.sql("mark_rows_removed", thread_key)
        if items and not dry_run:
            yield from drop_transcript_index_of_thread(self.sql, thread_key)
        if not dry_run and any(checkpoint.is_head for _, checkpoint in candidates):
            yield from self.rebuild_outdated_list_entry_of_thread(
                thread_id, may_metadata_be_deleted=True
            )
        elif items and not dry_run:
            yield from self.rebuild_outdated_list_entry_of_thread(thread_id)
        return PruneReport(len(candidates), items, size_bytes=size + item_bytes)

    def _select_checkpoints_to_delete(
        self, thread_id: str, thread_key: int, keep: KeepRule, live_run_ids: set[str], dry_run: bool
    ) -> Flow[list[tuple[int, RetentionCandidate]]]:
        """Return the checkpoints to delete, each with the key of its namespace.

        The rule `keep` selects the checkpoints to keep. The method returns the checkpoints that
        `keep` does not select. Checkpoints that a server needs to continue a run in `live_run_ids`
        are not returned. Rebuilding a kept checkpoint's `DeltaChannel` values may require the
        pending writes of an ancestor. The required ancestors are not returned, so that they are not
        deleted. The checkpoints of each namespace are sorted by storage time, oldest first.

        If `dry_run` is False, the method may also update the metadata of a kept head whose parent
        checkpoint is about to be deleted. See `_store_ids_of_checkpoints_before_state_updates`.
        """
        to_delete: list[tuple[int, RetentionCandidate]] = []
        for namespace, ns, head in (yield self.sql("thread_namespaces", thread_key)):
            candidates = list[RetentionCandidate]()
            for row, snapshot in (
                yield from self.reader.read_namespace_checkpoints(thread_id, ns, namespace)
            ):
                metadata = self.reader.decode_metadata(snapshot)
                is_head = row[0] == build_row_key(namespace, head)
                active_at = self.reader.decode_checkpoint_unix_time(snapshot, row[4])
                candidates.append(
                    RetentionCandidate(
                        row[0],
                        snapshot.checkpoint_id,
                        snapshot.parent_id,
                        active_at,
                        metadata,
                        snapshot.stored_channels(),
                        is_head,
                        len(row[5]),
                    )
                )
            kept_ids = keep(candidates)
            if live_run_ids and not ns:
                kept_ids |= yield from self._find_checkpoint_ids_needed_by_live_runs(
                    namespace, candidates, live_run_ids
                )
            kept_ids = _add_ancestors_needed_for_deltas(candidates, kept_ids)
            if not dry_run:
                yield from self._store_ids_of_checkpoints_before_state_updates(
                    thread_id, ns, candidates, kept_ids
                )
            to_delete += [
                (namespace, checkpoint)
                for checkpoint in reversed(candidates)
                if checkpoint.checkpoint_id not in kept_ids
            ]
        return to_delete

    def _find_checkpoint_ids_needed_by_live_runs(
        self, namespace: int, candidates: list[RetentionCandidate], live_run_ids: set[str]
    ) -> Flow[set[str]]:
        """Return the ids of the checkpoints that the server needs to continue live runs.

        A live run is one that has not ended. The server needs the latest checkpoint of each live
        run. The server can store pending writes of a live run at a checkpoint, for example at the
        checkpoint from which the run starts. The server also needs this checkpoint to continue the
        run.
        """
        newest = dict[Any, str]()
        for checkpoint in candidates:
            newest.setdefault(checkpoint.metadata.get("run_id"), checkpoint.checkpoint_id)
        kept_ids = {uid for run_id, uid in newest.items() if run_id in live_run_ids}
        tasks = {encode_id_for_storage(run_id) for run_id in live_run_ids}
        for uid, task, *_ in (yield self.sql("namespace_writes", namespace)):
            if task in tasks:
                kept_ids.add(decode_stored_id(uid) or "")
        return kept_ids

    def _store_ids_of_checkpoints_before_state_updates(
        self, thread_id: str, ns: str, candidates: list[RetentionCandidate], kept_ids: set[str]
    ) -> Flow[None]:
        """Record in the head's metadata the ids of the checkpoints that preceded the state updates.

        Several state updates can follow each other. The checkpoint of the last update can have the
        metadata key `UPDATED`, which lists the checkpoints to which these state updates were
        applied. The method sets the metadata key `UPDATED` of the head only if two conditions are
        met: several consecutive state updates led to the head, and the head's parent checkpoint is
        about to be deleted. The deletion of the head's parent checkpoint breaks the chain of parent
        ids. A run that started from one of the deleted checkpoints can still be active. The head's
        metadata must therefore contain the ids of these checkpoints.
        """
        for head in candidates:
            if not head.is_head:
                continue
            updated = _list_ids_of_checkpoints_before_state_updates(candidates, head)
            if updated == list_ids_of_checkpoints_changed_by_state_updates(
                head.parent_id, head.metadata
            ):
                continue
            if head.checkpoint_id in kept_ids and head.parent_id not in kept_ids:
                (row,) = yield self.sql("checkpoint_row", head.key)
                snapshot = self.reader.decrypt_checkpoint_row(thread_id, ns, row)
                snapshot.encoded_fields[1] = self.reader.codec.encode(
                    {**head.metadata, UPDATED: updated}, lambda: "metadata", exact=True
                )
                yield self.sql(
                    "rewrite_checkpoint",
                    encrypt_checkpoint(
                        self.seal, thread_id, ns, row, snapshot, snapshot.transcript
                    ),
                    head.key,
                )

    # -- items

    def delete_unreferenced_items(
        self,
        thread_id: str,
        thread_key: int,
        *,
        excluded: Container[Any] = (),
        keeps_history: bool = True,
        dry_run: bool = False,
    ) -> Flow[DeletedItems]:
        """Delete the log items of a thread that no checkpoint or pending write refers to.

        Args:
            thread_id: The thread.
            thread_key: The key of the thread.
            excluded: Checkpoints and writes whose references do not count: the row keys of
                checkpoints, and pairs of namespace key and stored checkpoint id for writes.
            keeps_history: Whether items of transcripts are kept. If not, the stored transcripts are
                removed from the checkpoints, so that each transcript consists of the channel's
                value. The transcript of a `DeltaChannel` with an unknown value keeps the items that
                are still referenced, or all of its items if it contains aliases.
            dry_run: Whether only to count the items.

        Returns:
            The number of deleted items, and their size in bytes.
        """
        live_ranges: dict[int, Ranges] = defaultdict(list)
        to_rewrite: list[tuple[str, Row, Snapshot, dict[str, Any]]] = []
        for namespace, ns, _ in (yield self.sql("thread_namespaces", thread_key)):
            for row, snapshot in (
                yield from self.reader.read_namespace_checkpoints(thread_id, ns, namespace)
            ):
                if row[0] in excluded:
                    continue
                _add_referenced_log_positions_to_live_ranges(
                    snapshot.references.values(), live_ranges
                )
                if keeps_history:
                    _add_flat_ranges_to_live_ranges(snapshot.transcript.values(), live_ranges)
                elif snapshot.transcript:
                    unknown = _get_transcripts_of_delta_channels_without_stored_value(snapshot)
                    to_rewrite.append((ns, row, snapshot, unknown))
                    _add_flat_ranges_to_live_ranges(
                        (transcript for transcript in unknown.values() if _has_aliases(transcript)),
                        live_ranges,
                    )
            for row in (yield self.sql("namespace_writes", namespace)):
                if (namespace, row[0]) not in excluded:
                    _add_referenced_log_positions_to_live_ranges(
                        (ref for _, _, ref in decrypt_writes(self.seal, thread_id, ns, row)),
                        live_ranges,
                    )
        for ns, row, snapshot, unknown in to_rewrite if not dry_run else ():
            transcript = {
                channel: stored_transcript
                if _has_aliases(stored_transcript)
                else _drop_unreferenced_positions(stored_transcript, live_ranges)
                for channel, stored_transcript in unknown.items()
            }
            yield self.sql(
                "rewrite_checkpoint",
                encrypt_checkpoint(self.seal, thread_id, ns, row, snapshot, transcript),
                row[0],
            )
        return (
            yield from self._delete_items_outside_ranges(
                thread_id, thread_key, live_ranges, dry_run
            )
        )

    def _delete_items_outside_ranges(
        self, thread_id: str, thread_key: int, live_ranges: dict[int, Ranges], dry_run: bool
    ) -> Flow[DeletedItems]:
        """Delete all log items of a thread except the items in `live_ranges`.

        `live_ranges` maps each log's key to the log positions that are still referenced.
        """
        items = freed_bytes = 0
        for log, name, *last_keys in (yield self.sql("thread_logs", thread_key)):
            yield from self._add_items_of_live_aliases_to_live_ranges(
                thread_id, name, log, live_ranges[log]
            )
            for start, stop in subtract_ranges(
                compute_item_and_alias_position_ranges(*last_keys),
                merge_ranges(live_ranges[log]),
            ):
                keys = build_row_key_range(log, start, stop)
                ((item_count, size),) = yield self.sql("count_items", *keys)
                items += item_count if start < ALIASES else 0
                freed_bytes += size
                if not dry_run:
                    yield self.sql("drop_items", *keys)
        return DeletedItems(items, freed_bytes)

    def _add_items_of_live_aliases_to_live_ranges(
        self, thread_id: str, channel: str, log_key: int, live_ranges: Ranges
    ) -> Flow[None]:
        """Resolve the live aliases, and add the positions of their items to `live_ranges`.

        An alias is a log entry that refers to an earlier item of the same log. The live ranges of a
        log contain the log positions that are still referenced.
        """
        origin_ranges: Ranges = []
        for start, stop in merge_ranges(live_ranges):
            # Read the aliases in pages, because a long range can contain more aliases than one page
            # holds.
            for first in range(max(start, ALIASES), stop, ITEMS_PAGE_SIZE):
                aliases = self.reader.read_items_page(
                    thread_id, channel, log_key, first, min(first + ITEMS_PAGE_SIZE, stop)
                )
                origins = [unpack(body) for _, body in (yield from aliases)]
                origin_ranges += [(origin, origin + 1) for origin in origins]
        live_ranges += origin_ranges


def _get_transcripts_of_delta_channels_without_stored_value(snapshot: Snapshot) -> dict[str, Any]:
    """Return the stored transcripts of `DeltaChannel`s for which a checkpoint stores no value."""
    return {
        channel: stored_transcript
        for channel, stored_transcript in snapshot.transcript.items()
        if channel in snapshot.references
        and extract_value_reference_from_delta_channel_reference(snapshot.references[channel])
        is None
    }


def _has_aliases(stored_transcript: Any) -> bool:
    """Return whether a stored transcript contains aliases, which refer to earlier log items."""
    return any(start >= ALIASES for start, _ in decode_ranges(stored_transcript[1]))


def _drop_unreferenced_positions(
    stored_transcript: Any, live_ranges_by_log: Mapping[int, Ranges]
) -> list[Any]:
    """Remove unreferenced items from a stored transcript.

    `live_ranges_by_log` contains the log positions that are still referenced.
    """
    log, numbers = stored_transcript
    ranges = decode_ranges(numbers)
    return [
        log,
        encode_ranges(
            subtract_ranges(
                ranges,
                merge_ranges(
                    subtract_ranges(ranges, merge_ranges(live_ranges_by_log.get(log, [])))
                ),
            )
        ),
    ]


def _add_referenced_log_positions_to_live_ranges(
    refs: Iterable[Any], live_ranges_by_log: dict[int, Ranges]
) -> None:
    """Collect the log positions to which `refs` point, and add them to `live_ranges_by_log`.

    Each element of `refs` is a reference to a channel value.

    The live ranges contain the log positions that are still referenced.
    """
    _add_flat_ranges_to_live_ranges(
        chain.from_iterable(map(iter_referenced_log_keys_and_ranges, refs)), live_ranges_by_log
    )


def _add_flat_ranges_to_live_ranges(
    log_keys_and_flat_ranges: Iterable[tuple[int, Sequence[Any]]],
    live_ranges_by_log: dict[int, Ranges],
) -> None:
    """Decode log ranges from flat lists of integers, and add the ranges to `live_ranges_by_log`.

    A flat list has the form `[start, length, start, length, ...]`.

    The live ranges contain the log positions that are still referenced.
    """
    for log, numbers in log_keys_and_flat_ranges:
        live_ranges_by_log[log] += decode_ranges(numbers)
        # To limit memory use, join the live ranges of a log as soon as there are more than 4,096.
        if len(live_ranges_by_log[log]) > 4096:
            live_ranges_by_log[log] = merge_ranges(live_ranges_by_log[log])


def _add_ancestors_needed_for_deltas(
    candidates: list[RetentionCandidate], kept_ids: set[str]
) -> set[str]:
    """Return the ids of the kept checkpoints and of the ancestors needed to rebuild their values.

    A checkpoint depends on an ancestor if the ancestor's pending writes are needed to rebuild the
    value of a `DeltaChannel`.
    """
    by_id: dict[str | None, RetentionCandidate] = {c.checkpoint_id: c for c in candidates}
    all_kept_ids = set(kept_ids)
    for checkpoint in candidates:
        counters = checkpoint.metadata.get("counters_since_delta_snapshot") or {}
        missing_channels = set(counters) - checkpoint.channels
        ancestor = by_id.get(checkpoint.parent_id) if checkpoint.checkpoint_id in kept_ids else None
        while missing_channels and ancestor is not None:
            all_kept_ids.add(ancestor.checkpoint_id)
            missing_channels -= ancestor.channels
            ancestor = by_id.get(ancestor.parent_id)
    return all_kept_ids


def _list_ids_of_checkpoints_before_state_updates(
    candidates: list[RetentionCandidate], head: RetentionCandidate
) -> list[str]:
    """List the checkpoints to which the consecutive state updates before the head were applied.

    The search starts at the head. At each checkpoint that a state update created, the search
    continues with the checkpoint to which the update was applied (see
    `list_ids_of_checkpoints_changed_by_state_updates`).

    Returns:
        The ids of the checkpoints, from the last update to the first. The list is empty if the head
        was not stored by a state update.
    """
    by_id = {checkpoint.checkpoint_id: checkpoint for checkpoint in candidates}
    updated_ids, checkpoint = list[str](), by_id.get(head.checkpoint_id)
    while checkpoint is not None and (
        previous_ids := list_ids_of_checkpoints_changed_by_state_updates(
            checkpoint.parent_id, checkpoint.metadata
        )
    ):
        updated_ids += previous_ids
        checkpoint = by_id.get(previous_ids[-1])
    if len(updated_ids) > MAX_UPDATED_IDS:
        updated_ids[MAX_UPDATED_IDS - 1 : -1] = []
    return updated_ids


def _keep_all_except(keys: Container[int], candidates: list[RetentionCandidate]) -> set[str]:
    """Return the ids of those `candidates` whose row keys are not in `keys`."""
    return {c.checkpoint_id for c in candidates if c.key not in keys}


def _build_keep_rule(rule: Retention, now: float) -> KeepRule:
    """Build the function that returns the ids of the checkpoints that a retention rule keeps."""

    def keep(candidates: list[RetentionCandidate]) -> set[str]:
        selected = [c for c in candidates if c.is_head]
        recent = [head for head in selected if head.active_at >= now - RUN_DAYS * 86400]
        updated_ids = {
            uid
            for head in recent
            for uid in _list_ids_of_checkpoints_before_state_updates(candidates, head)[-1:]
        }
        selected += [c for c in candidates if c.checkpoint_id in updated_ids]
        if rule.last is not None:
            selected += candidates[: rule.last]
        if rule.days is not None:
            selected += [c for c in candidates if c.active_at >= now - rule.days * 86400]
        # A checkpoint ends a turn only if no later superstep of a run continues from it.
        if rule.turns:
            inner_parents = {c.parent_id for c in candidates if c.metadata.get("source") == "loop"}
            selected += [c for c in candidates if c.checkpoint_id not in inner_parents]
        return {c.checkpoint_id for c in selected}

    return keep


def _check_retention_rule(rule: Retention) -> None:
    """Check that a retention rule is not empty and has no negative values.

    Raises:
        ConfigurationError: The rule is not valid.
    """
    if rule.last is None and rule.days is None and not rule.turns:
        raise ConfigurationError("the retention rule is empty; pass last=, days= or turns=True")
    for name, value in (("last", rule.last), ("days", rule.days)):
        if value is not None and value < 0:
            raise ConfigurationError(
                f"the retention rule's {name!r} is {value!r}; expected a number of 0 or more"
            )

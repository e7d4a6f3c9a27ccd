"""Build the write plans for checkpoints and pending writes, and execute them.

Before storing a checkpoint, the writer plans the SQL statements and the thread's new head, based on
the checkpoint and the thread's cached head. The planned statements are executed in one transaction,
provided that the stored thread has not changed since it was cached. If the thread has changed, the
same transaction reads the thread, builds a new plan, and executes the new plan. If the thread is
not cached and the checkpoint has no parent, the plan assumes that the thread is new. See
docs/decisions/0022.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.checkpointers.additions import Additions, PlannedTransaction, cache_pending_writes
from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Head, Snapshot, Thread, add_entry_and_evict_oldest
from perdure.checkpointers.delta_writes import (
    find_cached_delta_channel_writes,
    read_delta_channel_writes,
)
from perdure.checkpointers.heads import (
    choose_head_and_detect_run_overlap,
    find_seq_of_first_checkpoint_of_run,
)
from perdure.checkpointers.labels import (
    LABELS,
    MERGED,
    STATE_FROM_OTHERS,
    USER_LABELS,
    build_labels_of_new_checkpoint,
)
from perdure.checkpointers.merge_planner import (
    MergePlanner,
    avoid_task_id_clash_and_get_new_task_id_and_path,
    try_making_run_checkpoint_head_again,
)
from perdure.checkpointers.put import (
    CheckpointPut,
    SplitValue,
    TaskWrites,
    ValueToStore,
    choose_title,
)
from perdure.checkpointers.reader import CheckpointReader, StoredCheckpoint
from perdure.checkpointers.records import (
    UNLISTED_NAMES,
    UNLISTED_PREFIXES,
    VIEWS_NAMESPACE,
    build_row_key,
    collect_transcript_ranges_to_store,
    compute_item_and_alias_position_ranges,
    compute_item_hash,
    compute_metadata_index_tags,
    decrypt_listed_title_and_encoded_metadata,
    decrypt_writes,
    encode_id_for_storage,
    encrypt_checkpoint,
    encrypt_thread_list_entry_and_build_search_keys,
    encrypt_writes,
)
from perdure.checkpointers.status import NULL_TASK, is_update_path
from perdure.storage.database import OwnWrites
from perdure.storage.flow import Flow, GuardedRequest, GuardFailed, Row, Statement

if TYPE_CHECKING:
    from perdure.checkpointers.stale_puts import StalePut

# minimum interval in seconds between two updates of a thread's last-activity time; limits the
# number of writes
ACTIVITY_PRECISION_S: Final = 0.1
# bit mask that extracts the sequence number from a checkpoint's row key
_SEQ_MASK: Final = 0xFFFFFFFF
_log = logging.getLogger("perdure")


class DatabaseWrite(NamedTuple):
    """The arguments of a call to `Database.write`.

    Attributes:
        make_flow: A function that builds the flow of statements.
        on_commit: Called with the result of the flow after the commit.
        on_rollback: Called if the transaction failed.
        exclusive_names: The name of the lock that the transaction takes, which is the thread id.
        own_writes: Counts the writes of the checkpointer.
        may_wait: Whether the commit may be delayed to share it with the next write. This is not the
            column `may_wait` of a thread.
        urgent: Whether other code waits for the write, so that the write should be committed at
            once.
    """

    make_flow: Callable[[], Flow[PlannedTransaction]]
    on_commit: Callable[[PlannedTransaction], None]
    on_rollback: Callable[[], None]
    exclusive_names: tuple[str]
    own_writes: OwnWrites
    may_wait: bool
    urgent: bool


class _UncachedRequirements(NamedTuple):
    """The data and rows that a put of a checkpoint needs and that are not in the cache.

    Attributes:
        key_count: The number of new keys for the thread, the namespace and the logs.
        logs: The channels for which the put must create a log.
        hashes: The hashes of new items that the database may already have.
    """

    key_count: int
    logs: list[str]
    hashes: list[int]


class CheckpointWriter:
    """Plans the SQL statements that store checkpoints and pending writes."""

    def __init__(self, reader: CheckpointReader, own_writes: OwnWrites) -> None:
        self.own_writes = own_writes
        self.reader, self.cache, self.codec = reader, reader.cache, reader.codec
        self.sql, self.seal, self.removals = reader.sql, reader.seal, reader.removals

    def plan_database_write(self, request: CheckpointPut | TaskWrites) -> DatabaseWrite:
        """Build the `Database.write` arguments for storing a checkpoint or pending writes.

        If the cache contains enough data about the thread, the SQL statements are planned without
        reading the database. If the thread turns out to have changed since it was cached, the
        thread is read and the statements are planned again, in the same transaction. A request that
        is planned twice is therefore not overtaken by a later request.

        Raises:
            Unstorable: A value cannot be stored.
        """
        commit, thread_id = self.plan_write_from_cache(request), request.address.thread_id
        if commit is None and isinstance(request, CheckpointPut):
            request.encode_unchanged_channels(self.codec)

        def store_request() -> Flow[PlannedTransaction]:
            """Execute the SQL statements that were planned from cached data.

            If there is no plan, or the statements fail because the thread has changed, read the
            thread and plan the request in this transaction.
            """
            if commit is not None:
                try:
                    commit.record_whether_head_has_writes((yield GuardedRequest(commit.statements)))
                except GuardFailed:
                    # The cached head is stale, so do not base later puts on it.
                    if isinstance(request, CheckpointPut):
                        self.cache.invalidate_heads(thread_id)
                        if commit.statements[0].sql == self.sql["new_thread"]:
                            # Another thread may already use the key that was reserved for the new
                            # thread.
                            self.cache.keys.discard_keys()
                else:
                    return commit
            if isinstance(request, TaskWrites):
                return (yield from self._read_thread_and_store_task_writes(request))
            return (yield from self._read_thread_and_store_checkpoint(request))

        on_failure = partial(
            self._drop_cached_heads_and_keys, None if isinstance(request, TaskWrites) else thread_id
        )
        # A task's writes can be committed later, together with the next checkpoint. The answer to
        # an interrupt is committed immediately, because the nodes that use the answer start at once
        # (docs/decisions/0029).
        task = request.task_id if isinstance(request, TaskWrites) else None
        urgency = task not in (None, NULL_TASK), task == NULL_TASK
        return DatabaseWrite(
            store_request,
            PlannedTransaction.update_cache_after_commit,
            on_failure,
            (thread_id,),
            self.own_writes,
            *urgency,
        )

    def _drop_cached_heads_and_keys(self, thread_id: str | None) -> None:
        """Drop cached data that a failed transaction may have made invalid.

        If the failed transaction would have stored a checkpoint, drop the thread's cached heads.
        Also discard the row keys that this process has reserved. The transaction may have failed
        because one of these keys is already in use.
        """
        if thread_id is not None:
            self.cache.invalidate_heads(thread_id)
        self.cache.keys.discard_keys()

    def plan_write_from_cache(
        self, request: CheckpointPut | TaskWrites
    ) -> PlannedTransaction | None:
        """Plan a request from cached data.

        Return None if the request must be planned from the database. This is the case if the
        cached thread lacks data, is outdated or is in use by another OS thread, if the parent is
        not the committed head, or if data was removed after the request's state was loaded.

        Raises:
            Unstorable: A value cannot be stored.
        """
        (thread_id, checkpoint_ns, parent_id), thread = (
            request.address,
            self.cache.get_thread(request.address.thread_id),
        )
        request.encode_values_in_place(self.codec, thread)
        if self.codec.replaced_path:
            self.codec.warn_once_about_replaced_unicode_surrogate(thread_id)
        if thread is None:
            return self._plan_first_checkpoint_of_new_thread(request)
        if thread.newest_removal and self.removals.is_stale(request, thread.newest_removal):
            return None
        if isinstance(request, TaskWrites):
            return self._plan_task_writes(request, thread)
        # Do not block on the cached thread's lock, because the caller may be running on an event
        # loop.
        if not thread.lock.acquire(blocking=False):
            return None
        try:
            head = thread.heads.get(checkpoint_ns) or Head(0, 0, None)
            parent = (
                None if parent_id is None and checkpoint_ns == VIEWS_NAMESPACE else head.snapshot
            )
            if (
                thread.version_token is None
                or head.is_uncommitted
                or (parent and parent.checkpoint_id) != parent_id
            ):
                return None
            if parent is not None and (request.delta_channels or request.snapshot_channels):
                request.replayed = find_cached_delta_channel_writes(
                    self.reader, request, thread, head, parent
                )
                if request.replayed is None:
                    return None
            result = self._plan_checkpoint(request, thread, head, parent)
            return result if isinstance(result, PlannedTransaction) else None
        except BaseException:
            # After an error, the cached thread may be only partly updated, so mark it as stale.
            thread.version_token = None
            raise
        finally:
            thread.lock.release()

    def _plan_first_checkpoint_of_new_thread(
        self, request: CheckpointPut | TaskWrites
    ) -> PlannedTransaction | None:
        """Build the write plan for an uncached thread, assuming that the thread is new."""
        if isinstance(request, TaskWrites) or request.address.checkpoint_id is not None:
            return None
        if self.removals.key is None:  # the database is not open yet
            return None
        result = self._plan_checkpoint(request, Thread(0, 0), Head(0, 0, None), None)
        if isinstance(result, PlannedTransaction):
            self.cache.replace_thread(request.address.thread_id, result.thread)
        return result if isinstance(result, PlannedTransaction) else None

    # -- a checkpoint

    def _plan_checkpoint(
        self,
        put: CheckpointPut,
        thread: Thread,
        head: Head,
        parent: Snapshot | None,
        replaced: Snapshot | None = None,
        allocated_keys: list[int] | None = None,
    ) -> PlannedTransaction | _UncachedRequirements:
        """Build the write plan for a checkpoint, including the new head of its namespace.

        Args:
            put: The checkpoint to store.
            thread: The thread. The key of the thread is 0 if the thread must be created.
            head: The head of the namespace. The `namespace_key` of the head is 0 if the namespace
                must be created.
            parent: The parent of the checkpoint, or None.
            replaced: The stored checkpoint with the same id, which is replaced, or None.
            allocated_keys: The keys of the rows to create, if the transaction has allocated them.
                In this case, the caller must also have loaded the stored items that have the hashes
                of new items. If `allocated_keys` is None, the reserved keys of this process are
                used.

        Returns:
            The transaction, or the data that must be read first.
        """
        (thread_id, checkpoint_ns, _), snapshot = put.address, put.build_snapshot(parent)
        values_to_store = put.build_channel_values_to_store(
            self.codec, thread.logs_by_channel, parent
        )
        missing_parts = self._list_row_keys_and_log_items_missing_in_cache(
            thread, head, values_to_store
        )
        if allocated_keys is None and not missing_parts.hashes:
            allocated_keys = self.cache.keys.take_reserved_row_keys(missing_parts.key_count)
        if allocated_keys is None:
            return missing_parts
        version_token, now = random.getrandbits(62), time.time()
        if replaced is None:
            statements = [
                self._build_statement_that_fails_if_cache_is_stale(
                    put, thread, head, allocated_keys, version_token, now
                )
            ]
            thread.last_seq += 1
        else:
            statements = self._build_last_activity_update_if_due(thread)
        if not head.namespace_key:
            head.namespace_key = allocated_keys.pop()
            statements.append(
                self.sql("new_namespace", head.namespace_key, thread.key, checkpoint_ns)
            )
        for channel in missing_parts.logs:
            log = thread.get_or_add_log(allocated_keys.pop(), channel)
            statements.append(self.sql("new_log", log.key, thread.key, channel))

        stored_at = min(now, put.created_at)
        additions = Additions(self.sql, self.seal, thread_id, thread, stored_at, put.item_times)
        metadata, new_head, reveals_overlap = (
            self._add_inherited_labels_to_metadata(put, snapshot, parent),
            head,
            False,
        )
        additions.set_channel_references(snapshot, values_to_store, parent, put.merge)
        if replaced is None:
            snapshot.key = build_row_key(head.namespace_key, thread.last_seq)
            steps = (
                None if parent is None else self.reader.decode_superstep_number(parent),
                snapshot.step,
            )
            snapshot.run_start = find_seq_of_first_checkpoint_of_run(
                put, head, parent, steps, thread.last_seq
            )
            new_head, reveals_overlap = choose_head_and_detect_run_overlap(
                put, head, snapshot, thread.last_seq
            )
            row = self._build_checkpoint_row(put.address, snapshot, now)
            statements.append(self.sql("add_checkpoint", row[0], head.namespace_key, *row[1:]))
            if new_head.explicit_head != head.explicit_head:
                statements.append(
                    self.sql("set_explicit_head", new_head.explicit_head, head.namespace_key)
                )
        else:
            statements += self._build_checkpoint_replacement(
                put.address, thread, snapshot, replaced, now
            )
        statements += self._build_list_entry_statements(
            put, thread, values_to_store, metadata, new_head, snapshot
        )
        statements += additions.build_statements()
        tags = [
            (tag_number, snapshot.key)
            for tag_number in compute_metadata_index_tags(self.seal, metadata)
        ]
        if tags:
            statements.append(Statement(self.sql["add_tag"], tags, execute_many=True))
        if thread.pending_writes or put.replayed is not None:
            statements += self._build_pending_write_reference_updates(
                put, head.namespace_key, thread, snapshot, additions
            )

        thread.version_token, new_head.is_uncommitted = version_token, True
        add_entry_and_evict_oldest(thread.heads, checkpoint_ns, new_head)
        commit_parts = self.cache, self.own_writes, thread_id, thread, statements
        return PlannedTransaction(*commit_parts, additions, snapshot, new_head, reveals_overlap)

    def _list_row_keys_and_log_items_missing_in_cache(
        self, thread: Thread, head: Head, values_to_store: dict[str, ValueToStore | None]
    ) -> _UncachedRequirements:
        """Return the data and rows that a put needs and that are not in the cache.

        The result contains the number of row keys, the channels for which a log must be created,
        and the hashes of new items that the database may already contain.
        """
        logs, hashes = [], list[int]()
        for channel, value in values_to_store.items():
            if not isinstance(value, SplitValue):
                continue
            log = thread.logs_by_channel.get(channel)
            if log is None:
                logs.append(channel)
            elif not value.is_log_complete:
                new_items = (part for part in value.parts if isinstance(part, bytes))
                hashes += [compute_item_hash(self.seal, log.key, item) for item in new_items]
        return _UncachedRequirements(
            (not thread.key) + (not head.namespace_key) + len(logs), logs, hashes
        )

    def _build_statement_that_fails_if_cache_is_stale(
        self,
        put: CheckpointPut,
        thread: Thread,
        head: Head,
        allocated_keys: list[int],
        version_token: int,
        now: float,
    ) -> Statement:
        """Build the first statement of a put; the statement fails if the cached thread is stale.

        The statement also fails if the checkpoint is already stored, or if the thread or the
        namespace that the put would create already exists.
        """
        (thread_id, checkpoint_ns, _), seq = put.address, thread.last_seq + 1
        if not thread.key:
            thread.key, thread.updated_at = allocated_keys.pop(), now
            row = thread.key, thread_id, seq, version_token, now, now, thread.newest_removal
            return self.sql("new_thread", *row, self.removals.hash_thread_id(thread_id))
        expected, checkpoint_id = (
            (thread.key, thread.version_token),
            encode_id_for_storage(put.checkpoint["id"]),
        )
        if (
            put.replayed is not None
            and put.replayed.size_bytes is not None
            and head.write_rows is not None
        ):
            thread.updated_at = now
            parent_state = encode_id_for_storage(put.address.checkpoint_id), put.replayed.size_bytes
            new_state = (
                seq,
                version_token,
                *expected,
                head.namespace_key,
                checkpoint_id,
                len(checkpoint_ns),
                now,
            )
            return self.sql("advance_replayed_thread", *new_state, *parent_state)
        if head.namespace_key and now - thread.updated_at <= ACTIVITY_PRECISION_S:
            return self.sql(
                "advance_thread",
                seq,
                version_token,
                *expected,
                head.namespace_key,
                checkpoint_id,
                len(checkpoint_ns),
            )
        thread.updated_at = now
        if head.namespace_key:
            return self.sql(
                "advance_active_thread",
                seq,
                version_token,
                *expected,
                head.namespace_key,
                checkpoint_id,
                len(checkpoint_ns),
                now,
            )
        return self.sql("advance_into_namespace", seq, version_token, *expected, checkpoint_ns, now)

    def _add_inherited_labels_to_metadata(
        self, put: CheckpointPut, snapshot: Snapshot, parent: Snapshot | None
    ) -> dict[str, Any]:
        """Add the parent's labels to a checkpoint's metadata, and return the complete metadata.

        If the checkpoint's encoded metadata already contains all inherited labels, the metadata is
        not encoded again.
        """
        metadata, labels = put.metadata, dict[str, Any]()
        inherited, needs_encoding = dict[str, Any](), LABELS in metadata or MERGED in metadata
        if put.merge is not None:
            parent = put.merge.head
        if parent is not None and put.config is not None:
            inherited = self.reader.decode_labels_for_child_checkpoints(parent)
        for name in inherited:
            needs_encoding = needs_encoding or name not in metadata or name not in USER_LABELS
        if needs_encoding and put.config is not None:
            labels = build_labels_of_new_checkpoint(metadata, inherited, put.config)
            metadata = self.codec.decode(put.encoded_fields[1]) | labels
            label_names = sorted(labels.keys() - {*USER_LABELS, MERGED, STATE_FROM_OTHERS})
            metadata |= {LABELS: label_names} if label_names else {}
            snapshot.encoded_fields[1] = self.codec.encode(metadata, lambda: "metadata", exact=True)
        else:
            for name in (*USER_LABELS, STATE_FROM_OTHERS):
                if name in metadata:
                    labels[name] = metadata[name]
        snapshot.labels = labels
        return metadata

    def _build_list_entry_statements(
        self,
        put: CheckpointPut,
        thread: Thread,
        values_to_store: dict[str, ValueToStore | None],
        metadata: dict[str, Any],
        head: Head,
        snapshot: Snapshot,
    ) -> list[Statement]:
        """Build the statements that update the title and metadata in a thread's row.

        A thread's row contains a copy of the metadata from the head checkpoint of the root
        namespace. If the new checkpoint does not become the head, the copied metadata is not
        changed. In this case, the mark `may_wait` of the thread is set again. The first statement
        of the put may have cleared the mark, although the head may still be waiting for the answer
        to an interrupt.
        """
        if put.address.checkpoint_ns:
            return []
        title, listed = thread.title, thread.listed_metadata
        is_head = head.snapshot is not None and head.snapshot.key == snapshot.key
        if title is None or put.title not in (None, title):
            title = choose_title(put, thread, values_to_store)
        if is_head:
            # The following code is inlined for speed, because it runs for every stored checkpoint.
            new_listed, is_new = dict[str, Any](), False
            for name, value in metadata.items():
                if name not in UNLISTED_NAMES and not (
                    type(name) is str and name.startswith(UNLISTED_PREFIXES)
                ):
                    new_listed[name] = value
                    # Compare values other than strings by their encodings, because Python treats
                    # some values of different types as equal, such as True and 1.
                    is_new = is_new or type(value) is not str
            try:
                is_new = is_new or listed is None or new_listed != listed[0]
            except Exception:  # == does not work for some metadata values, such as arrays
                is_new = True
            listed = (
                self._build_decoded_and_encoded_metadata(new_listed, listed) if is_new else listed
            )
        statements = [] if is_head else [self.sql("mark_may_wait", thread.key)]
        if title != thread.title or listed is not thread.listed_metadata:
            thread.title, thread.listed_metadata = title, listed
            encrypted_entry = encrypt_thread_list_entry_and_build_search_keys(
                self.seal, put.address.thread_id, title, listed
            )
            statements.append(self.sql("set_list_entry", *encrypted_entry, thread.key))
        return statements

    def _build_decoded_and_encoded_metadata(
        self, metadata: dict[str, Any], previous_decoded_and_encoded: tuple[Any, bytes] | None
    ) -> tuple[Any, bytes]:
        """Encode metadata, and return both a decoded copy and the encoded bytes.

        If the encoding is unchanged, return `previous_decoded_and_encoded`.
        """
        stored = self.codec.encode(metadata, lambda: "metadata", exact=True)
        if previous_decoded_and_encoded is not None and stored == previous_decoded_and_encoded[1]:
            return previous_decoded_and_encoded
        return self.codec.decode(stored), stored

    def _build_checkpoint_replacement(
        self, address: Address, thread: Thread, snapshot: Snapshot, replaced: Snapshot, now: float
    ) -> list[Statement]:
        """Build the statements that replace a stored checkpoint with a new snapshot."""
        snapshot.key, snapshot.run_start = replaced.key, replaced.run_start
        checkpoint_key, _, parent, *_, body = self._build_checkpoint_row(address, snapshot, now)
        old_tags = compute_metadata_index_tags(self.seal, self.reader.decode_metadata(replaced))
        statements = [self.sql("drop_tag", tag_number, checkpoint_key) for tag_number in old_tags]
        statements.append(self.sql("replace_checkpoint", parent, now, body, checkpoint_key))
        statements.append(self.sql("mark_rows_removed", thread.key))
        return statements

    def _build_checkpoint_row(self, address: Address, snapshot: Snapshot, now: float) -> Row:
        """Build the row tuple `(row_key, checkpoint_id, parent_id, run_start, put_at, body)`."""
        row = (
            snapshot.key,
            encode_id_for_storage(snapshot.checkpoint_id),
            encode_id_for_storage(snapshot.parent_id),
            snapshot.run_start,
            now,
        )
        return *row, encrypt_checkpoint(
            self.seal, *address[:2], row, snapshot, collect_transcript_ranges_to_store(snapshot)
        )

    def _build_pending_write_reference_updates(
        self,
        put: CheckpointPut,
        namespace_key: int,
        thread: Thread,
        snapshot: Snapshot,
        additions: Additions,
    ) -> list[Statement]:
        """Build statements that replace values in pending writes with references to log items.

        The pending writes belong to the tasks whose results are included in the new checkpoint.
        """
        statements, address = [], put.address
        tasks = thread.pending_writes.pop((address.checkpoint_ns, address.checkpoint_id or ""), {})
        if put.replayed is not None:
            tasks |= put.replayed.pending_writes
        for task_id, (task_path, writes, body) in tasks.items():
            references = [additions.replace_write_by_reference(snapshot, write) for write in writes]
            if references != writes:
                key = (
                    namespace_key,
                    encode_id_for_storage(address.checkpoint_id),
                    encode_id_for_storage(task_id),
                )
                encrypted = encrypt_writes(self.seal, (*address, task_id, task_path), references)
                statements.append(self.sql("replace_unchanged_writes", encrypted, *key, body))
        return statements

    # -- in a transaction that reads the thread

    def _read_thread_and_store_checkpoint(self, put: CheckpointPut) -> Flow[PlannedTransaction]:
        """Read the current state of a thread and store a checkpoint, in one transaction."""
        thread_id, _, parent_id = put.address
        (
            thread,
            head,
            existing_key,
            is_cache_valid,
        ) = yield from self._read_thread_head_key_and_cache_validity(
            put.address, put.checkpoint["id"]
        )
        if (
            stale := (
                yield from self._build_stale_put_if_removals_are_newer(put, thread.newest_removal)
            )
        ) is not None:
            # An erasure deletes all views of a thread. Discard a put to the views namespace if its
            # data was loaded before the erasure.
            if put.address.checkpoint_ns == VIEWS_NAMESPACE:
                return PlannedTransaction(self.cache, self.own_writes, thread_id, thread, [])
            put = stale.copy_checkpoint_put_without_erased_messages(put)
            yield from self.removals.add_texts_to_newest_record(
                thread_id, stale.collect_unhashed_erased_texts_by_kind()
            )
        put.replace_cache_references_and_messages_by_copies(
            *self._get_thread_key_and_generation_if_cache_is_valid(
                put, (thread.key, thread.generation), is_cache_valid
            )
        )
        put.replayed = None
        parent = replaced = None
        if parent_id is not None and head.namespace_key:
            parent = thread.committed_snapshot(put.address.checkpoint_ns, parent_id)
            if parent is None:
                rows = yield self.sql(
                    "find_checkpoint", head.namespace_key, encode_id_for_storage(parent_id)
                )
                parent = yield from self._decrypt_snapshot_of_first_row(put.address, thread, rows)
        if parent is not None and (put.delta_channels or put.snapshot_channels):
            stored_parent = StoredCheckpoint(thread, head.namespace_key, parent)
            rows = (
                (yield from self.reader.read_rows_of_writes(stored_parent))
                if put.delta_channels
                else []
            )
            put.replayed = yield from read_delta_channel_writes(
                self.reader, put, thread, head, parent, rows
            )
        if existing_key is not None:
            rows = yield self.sql("checkpoint_row", existing_key)
            replaced = yield from self._decrypt_snapshot_of_first_row(put.address, thread, rows)
        planner = MergePlanner(self.reader, thread_id, put.address.checkpoint_ns, thread, head)
        put.merge = (yield from planner.plan_merge(put, parent)) if replaced is None else None
        commit = self._plan_checkpoint(put, thread, head, parent, replaced)
        if isinstance(commit, _UncachedRequirements):
            keys = yield from self.reader.allocate_row_keys(commit.key_count)
            yield from self.reader.load_items_with_hashes_into_cache(
                thread_id, thread, commit.hashes
            )
            commit = self._plan_checkpoint(put, thread, head, parent, replaced, keys)
            assert isinstance(commit, PlannedTransaction)
            commit.remaining_keys = keys
        commit.is_thread_read = True
        commit.replaces_checkpoint = (
            replaced is not None or planner.has_merged_channels_unread_by_run(commit.head)
        )
        commit.record_whether_head_has_writes((yield commit.statements)[0])
        if put.merge is not None and commit.head is not None:
            has_changed = yield from planner.finish_merge_and_check_if_checkpoint_changed(
                put.merge, commit.head
            )
            commit.replaces_checkpoint |= has_changed
        return commit

    def _build_stale_put_if_removals_are_newer(
        self, request: CheckpointPut | TaskWrites, newest_removal: int
    ) -> Flow[StalePut | None]:
        """Return a `StalePut` if data was removed since the request's state was loaded.

        Return None if no data has been removed since the request's state was loaded.
        """
        if not newest_removal or not self.removals.is_stale(request, newest_removal):
            return None
        from perdure.checkpointers.stale_puts import StalePut  # langgraph.types is slow to import

        return (yield from StalePut.build_from_newer_removals(self.reader, request))

    def _find_cached_thread(self, thread_id: str, key: int, generation: int) -> Thread | None:
        """Return the cached thread, or None if its key or generation does not match."""
        thread = self.cache.get_thread(thread_id)
        return thread if thread and (thread.key, thread.generation) == (key, generation) else None

    def _get_thread_key_and_generation_if_cache_is_valid(
        self,
        request: CheckpointPut | TaskWrites,
        key_and_generation: tuple[int, int],
        is_cache_valid: bool,
    ) -> tuple[int, int]:
        """Return a thread's key and generation, or `(0, -1)` if its cached data is not valid.

        The caller replaces the request's references to log items by the items themselves, unless
        the references were created for the returned key and generation.

        Returns:
            The argument `key_and_generation` if the cached data of the thread is valid. If the
            cached data is not valid, the pair `(0, -1)`, which matches no thread, so that all
            references are replaced.
        """
        is_valid = is_cache_valid and request.cached_thread is self.cache.get_thread(
            request.address.thread_id
        )
        return key_and_generation if is_valid else (0, -1)

    def _read_thread_head_key_and_cache_validity(
        self, address: Address, checkpoint_id: str
    ) -> Flow[tuple[Thread, Head, int | None, bool]]:
        """Read the current state of a thread before a put.

        Returns:
            A tuple of four elements: the thread with its logs, the head of the namespace, the row
            key of the checkpoint, and whether the cached data of the thread is valid. If the thread
            or the namespace does not exist, its key is 0. If the checkpoint is not stored, its row
            key is None.
        """
        thread_id, checkpoint_ns, _ = address
        state = self.sql(
            "read_write_state", encode_id_for_storage(checkpoint_id), checkpoint_ns, thread_id
        )
        rows, is_cache_valid = yield from self.reader.read_rows_and_whether_cache_is_valid(
            thread_id, state
        )
        if not rows:
            thread = Thread(0, 0, (yield from self.removals.read_newest_number(thread_id)))
            return thread, Head(0, 0, None), None, is_cache_valid
        (
            key,
            seq,
            generation,
            version_token,
            updated_at,
            namespace_key,
            explicit_head,
            head_key,
            *other_columns,
        ) = rows[0]
        list_entry, newest_removal, existing_key = other_columns
        cached_thread = (
            self._find_cached_thread(thread_id, key, generation) if is_cache_valid else None
        )
        thread = Thread(key, generation, newest_removal)
        thread.last_seq, thread.version_token, thread.updated_at = seq, version_token, updated_at
        thread.title, encoded_metadata = decrypt_listed_title_and_encoded_metadata(
            self.seal, thread_id, list_entry
        )
        if encoded_metadata is not None:
            thread.listed_metadata = self.codec.decode(encoded_metadata), encoded_metadata
        if cached_thread is not None:
            thread.pending_writes, thread.size_bytes = (
                cached_thread.pending_writes.copy(),
                cached_thread.size_bytes,
            )
            thread.heads = cached_thread.get_committed_heads_by_namespace_unless_stale(
                version_token
            )
        for log_key, channel, *last_keys in (yield self.sql("thread_logs", key)):
            log = thread.get_or_add_log(log_key, channel, cached_thread)
            log.next_position, log.next_alias = (
                stop for _, stop in compute_item_and_alias_position_ranges(*last_keys)
            )
        if namespace_key is None:
            return thread, Head(0, 0, None), None, is_cache_valid
        snapshot = None
        if head_key is not None:
            rows = yield self.sql("checkpoint_row", head_key)
            snapshot = yield from self._decrypt_snapshot_of_first_row(address, thread, rows)
        head = Head(namespace_key, explicit_head, snapshot)
        add_entry_and_evict_oldest(thread.heads, checkpoint_ns, head)
        return thread, head, existing_key, is_cache_valid

    def _decrypt_snapshot_of_first_row(
        self, address: Address, thread: Thread, rows: list[Row]
    ) -> Flow[Snapshot | None]:
        """Decrypt the snapshot in the first row. Return None if there is no row."""
        if not rows:
            return None
        snapshot = self.reader.decrypt_checkpoint_row(*address[:2], rows[0])
        yield from self.reader.unflatten_ranges_in_snapshot(address.thread_id, thread, snapshot)
        return snapshot

    def make_checkpoint_head_if_exists(self, address: Address) -> Flow[bool]:
        """Make a checkpoint the head. Return whether the checkpoint exists."""
        packed_id = encode_id_for_storage(address.checkpoint_id)
        rows = yield self.sql(
            "checkpoint_with_keys", packed_id, address.thread_id, address.checkpoint_ns
        )
        for thread_key, _, _, namespace_key, *row in rows:
            yield self.sql("set_explicit_head", row[0] & _SEQ_MASK, namespace_key)
            yield self.sql("mark_head_changed", thread_key)
            if not address.checkpoint_ns:
                yield from self.reader.update_thread_list_entry_from_head(
                    address.thread_id, tuple(row)
                )
        return bool(rows)

    # -- pending writes

    def _plan_task_writes(self, request: TaskWrites, thread: Thread) -> PlannedTransaction | None:
        """Build the write plan for a task's pending writes from cached data.

        Return None if the request must be planned from the database. The plan does not require the
        row of the checkpoint, because pending writes may be stored before their checkpoint.
        """
        thread_id, checkpoint_ns, checkpoint_id = request.address
        head, last_namespace = thread.heads.get(checkpoint_ns), thread.last_namespace
        namespace_key = (
            head.namespace_key
            if head is not None
            else last_namespace[1]
            if last_namespace[0] == checkpoint_ns
            else 0
        )
        if not namespace_key:
            return None
        row_start = (
            encode_id_for_storage(checkpoint_id),
            encode_id_for_storage(request.task_id),
            request.task_path,
        )
        body = encrypt_writes(
            self.seal, (*request.address, request.task_id, request.task_path), request.encoded
        )
        key, newest_id = thread.newest_checkpoint or (0, "")
        expected = thread.key, thread.generation, key, encode_id_for_storage(newest_id)
        insert = self.sql("new_writes", namespace_key, *row_start, body, *expected)
        snapshot = None if head is None else head.snapshot
        if snapshot is None or snapshot.checkpoint_id != checkpoint_id:
            request.may_fold = request.is_stopped or (
                snapshot is not None and self._is_update(snapshot)
            )
            # A state update may have replaced the checkpoint as the head. Only the path that reads
            # the thread can make the checkpoint the head again.
            if request.may_fold:
                return None
        elif (request.is_stopped or snapshot.has_stopped_task) and request.task_id != NULL_TASK:
            snapshot.has_stopped_task = True
            insert = self.sql("new_writes_at_head", *insert.params, snapshot.key)
        statements = [insert]
        # To save time, storing the answer to an interrupt does not update the thread's
        # last-activity time.
        if request.task_id != NULL_TASK:
            statements += self._build_last_activity_update_if_due(thread)
        statements += [self.sql("mark_may_wait", thread.key)] if request.has_interrupt else []
        cache_pending_writes(thread, request, request.encoded, body)
        written_row = checkpoint_ns, checkpoint_id or "", request.task_id, (*row_start, body)
        return PlannedTransaction(
            self.cache, self.own_writes, thread_id, thread, statements, written_row=written_row
        )

    def _is_update(self, snapshot: Snapshot) -> bool:
        return bool(self.reader.decode_metadata(snapshot).get("source") == "update")

    def _build_last_activity_update_if_due(self, thread: Thread) -> list[Statement]:
        """Build the statement that updates a thread's last-activity time, if it needs an update.

        The last-activity time is updated only if it is more than `ACTIVITY_PRECISION_S` seconds
        old, because updating the index on last-activity times is expensive.
        """
        now = time.time()
        if now - thread.updated_at <= ACTIVITY_PRECISION_S:
            return []
        thread.updated_at = now
        return [self.sql("touch_thread", now, thread.key)]

    def _read_thread_and_store_task_writes(self, request: TaskWrites) -> Flow[PlannedTransaction]:
        """Read a thread and store the writes of a task, in one transaction.

        Writes that are already stored for the task are kept, and a new write with the same index is
        ignored. However, a new write with a negative index, such as an error or an interrupt,
        replaces the stored write with the same index.
        """
        thread_id, checkpoint_ns, checkpoint_id = request.address
        state, keys = self.sql("read_write_state", None, checkpoint_ns, thread_id), list[int]()
        rows, is_cache_valid = yield from self.reader.read_rows_and_whether_cache_is_valid(
            thread_id, state
        )
        newest_removal = (
            rows[0][9] if rows else (yield from self.removals.read_newest_number(thread_id))
        )
        stale, has_interrupt = (
            (yield from self._build_stale_put_if_removals_are_newer(request, newest_removal)),
            request.has_interrupt,
        )
        # Allocate row keys before writing any row; see `allocate_row_keys`.
        if not rows or rows[0][5] is None:
            keys = yield from self.reader.allocate_row_keys(1 if rows else 2)
        if rows:
            key, _, generation, _, updated_at, namespace_key, *_ = rows[0]
        else:
            key, generation, updated_at, namespace_key = keys.pop(), 0, time.time(), None
            row = key, thread_id, 0, random.getrandbits(62), updated_at, updated_at, newest_removal
            yield self.sql("new_thread", *row, self.removals.hash_thread_id(thread_id))
        # When a namespace is created, mark the thread as changed. A concurrent put that would
        # create the same namespace then fails, and is planned again.
        if namespace_key is None:
            namespace_key = keys.pop()
            yield [
                self.sql("new_namespace", namespace_key, key, checkpoint_ns),
                self.sql("mark_head_changed", key),
            ]
        cached_thread = (
            self._find_cached_thread(thread_id, key, generation) if is_cache_valid else None
        )
        thread = cached_thread or Thread(key, generation, newest_removal)
        # Reset the cached thread's last-activity time to the stored value, because planning a
        # transaction that later failed may have changed the cached value.
        thread.updated_at = updated_at
        writes = request.get_writes_without_outdated_references(
            *self._get_thread_key_and_generation_if_cache_is_valid(
                request, (key, generation), is_cache_valid
            )
        )
        if stale is not None:
            writes, has_interrupt = (
                stale.remove_erased_messages_from_writes_and_check_if_task_waits(request)
            )
            yield from self.removals.add_texts_to_newest_record(
                thread_id, stale.collect_unhashed_erased_texts_by_kind()
            )
        task_id, task_path = request.task_id, request.task_path
        earlier_rows = yield self.sql(
            "find_writes",
            namespace_key,
            encode_id_for_storage(checkpoint_id),
            encode_id_for_storage(task_id),
        )
        if earlier_rows and is_update_path(earlier_rows[0][0]) != is_update_path(task_path):
            task_id, task_path = yield from avoid_task_id_clash_and_get_new_task_id_and_path(
                self.reader, request, namespace_key, earlier_rows[0]
            )
            earlier_rows = []
        row_start = encode_id_for_storage(checkpoint_id), encode_id_for_storage(task_id), task_path
        if earlier_rows:
            earlier_row = (*row_start[:2], *earlier_rows[0])
            merged = {
                write[0]: write
                for write in decrypt_writes(self.seal, thread_id, checkpoint_ns, earlier_row)
            }
            for write in writes:
                if write[0] < 0 or write[0] not in merged:  # special writes have a negative index
                    merged[write[0]] = write
            writes = [merged[index] for index in sorted(merged)]
        body = encrypt_writes(self.seal, (*request.address, task_id, task_path), writes)
        mark_waiting = [self.sql("mark_may_wait", key)] if has_interrupt else []
        yield [
            self.sql("put_writes", namespace_key, *row_start, body),
            *self._build_last_activity_update_if_due(thread),
            *mark_waiting,
        ]
        cache_pending_writes(thread, request, writes, body)
        written_row = checkpoint_ns, checkpoint_id or "", task_id, (*row_start, body)
        commit = PlannedTransaction(
            self.cache,
            self.own_writes,
            thread_id,
            thread,
            [],
            written_row=written_row,
            remaining_keys=keys,
        )
        if request.may_fold and rows and rows[0][7] is not None:
            commit.replaces_checkpoint = yield from try_making_run_checkpoint_head_again(
                self.reader, request, thread, rows[0][5:8]
            )
        return commit

"""Build the write plans for checkpoints and pending writes, which `Database.write` executes.

Before storing a checkpoint, the writer plans the SQL statements and the thread's new head, based on
the checkpoint and the thread's cached head. The planned statements are executed in one transaction,
provided that the stored thread has not changed since it was cached. If the stored thread has
changed, the writer reads the thread from the database and builds a new plan of SQL statements, in
the same transaction. If a thread is not cached and the checkpoint to be stored has no parent, the
first plan is built on the assumption that the thread is new. See docs/decisions/0022.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple

from perdure.checkpointers.additions import Additions, PlannedTransaction
from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import (
    UNREAD_STEP,
    Head,
    Snapshot,
    Thread,
    add_entry_and_evict_oldest,
)
from perdure.checkpointers.delta_writes import (
    find_cached_delta_channel_writes,
    read_delta_channel_writes,
)
from perdure.checkpointers.labels import (
    LABELS,
    MERGED,
    STATE_FROM_OTHERS,
    USER_LABELS,
    build_labels_of_new_checkpoint,
)
from perdure.checkpointers.merge_planner import MergePlanner
from perdure.checkpointers.put import (
    START_SOURCES,
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
    build_list_entry_update,
    compute_item_hash,
    compute_metadata_index_tags,
    encode_id_for_storage,
    encrypt_checkpoint,
)
from perdure.checkpointers.status import NULL_TASK
from perdure.checkpointers.stored_state import (
    build_stale_put_if_removals_are_newer,
    get_thread_key_and_generation_if_cache_is_valid,
    read_thread_head_key_and_cache_validity,
)
from perdure.checkpointers.task_writes import (
    ACTIVITY_PRECISION_S,
    build_last_activity_update_if_due,
    build_updates_of_task_writes_to_references,
    plan_task_writes,
    read_thread_and_store_task_writes,
)
from perdure.storage.flow import Flow, GuardedRequest, GuardFailed, OwnWrites, Statement

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


class _NewRows(NamedTuple):
    """The rows that must be created to store a checkpoint.

    Attributes:
        key_count: The number of new keys for the thread, the namespace and the logs.
        new_log_channels: The channels for which the put must create a log.
        unknown_item_hashes: The hashes of new items that the database may already have.
    """

    key_count: int
    new_log_channels: list[str]
    unknown_item_hashes: list[int]


class CheckpointWriter:
    """Plans the SQL statements that store checkpoints and pending writes."""

    def __init__(self, reader: CheckpointReader, own_writes: OwnWrites) -> None:
        self.own_writes = own_writes
        self.reader, self.cache, self.codec = reader, reader.cache, reader.codec
        self.sql, self.seal, self.removals = reader.sql, reader.seal, reader.removals

    def plan_database_write(self, request: CheckpointPut | TaskWrites) -> DatabaseWrite:
        """Build the `Database.write` arguments for storing a checkpoint or pending writes.

        If the cache contains enough data about the thread, the SQL statements are planned without
        reading the database. If a request has to be planned again, the new plan is built and
        executed within the same transaction. The requests are therefore always executed in their
        original order.

        Raises:
            Unstorable: A value cannot be stored.
        """
        thread_id = request.address.thread_id
        plan = self.plan_write_from_cache(request)
        if plan is None and isinstance(request, CheckpointPut):
            request.encode_unchanged_channels(self.codec)

        def store_request() -> Flow[PlannedTransaction]:
            """Execute the SQL statements that were planned from cached data.

            If no write plan could be built from cached data, or if that plan failed, read the
            thread from the database and build a new plan. Execute the new plan in the transaction
            that is already open.
            """
            if plan is not None:
                try:
                    rows = yield GuardedRequest(plan.statements)
                except GuardFailed:
                    # The cached head is stale, so do not base later puts on it.
                    if isinstance(request, CheckpointPut):
                        self.cache.invalidate_heads(thread_id)
                        if plan.statements[0].sql == self.sql["new_thread"]:
                            # The insert into `threads` may have failed because the reserved row key
                            # is already used. Discard all reserved keys.
                            self.cache.keys.discard_keys()
                else:
                    plan.first_row = rows[0] if rows else ()
                    return plan
            if isinstance(request, TaskWrites):
                return (
                    yield from read_thread_and_store_task_writes(
                        self.reader, self.own_writes, request
                    )
                )
            return (yield from self._read_thread_and_store_checkpoint(request))

        on_failure = partial(
            self._drop_cached_heads_and_keys, None if isinstance(request, TaskWrites) else thread_id
        )
        # A task's writes can be committed later, together with the next checkpoint. The answer to
        # an interrupt is committed immediately, because the nodes that use the answer start at once
        # (docs/decisions/0029).
        task = request.task_id if isinstance(request, TaskWrites) else None
        return DatabaseWrite(
            store_request,
            PlannedTransaction.update_cache_after_commit,
            on_failure,
            (thread_id,),
            self.own_writes,
            may_wait=task not in (None, NULL_TASK),
            urgent=task == NULL_TASK,
        )

    def _drop_cached_heads_and_keys(self, thread_id: str | None) -> None:
        """Drop cached data that a failed transaction may have made invalid.

        If the failed transaction would have stored a checkpoint, drop the thread's cached heads.
        After any failed transaction, discard the row keys that this process has reserved, because
        the database may already contain a row with one of these keys.
        """
        if thread_id is not None:
            self.cache.invalidate_heads(thread_id)
        self.cache.keys.discard_keys()

    def plan_write_from_cache(
        self, request: CheckpointPut | TaskWrites
    ) -> PlannedTransaction | None:
        """Plan a request from cached data.

        Return None if the request must be planned from the database, which is the case if the
        cached thread lacks data, is outdated or is in use by another OS thread, if the parent is
        not the committed head, or if data was removed after the request's state was loaded.

        Raises:
            Unstorable: A value cannot be stored.
        """
        thread_id, checkpoint_ns, parent_id = request.address
        thread = self.cache.get_thread(thread_id)
        request.encode_values(self.codec, thread)
        if self.codec.replaced_path:
            self.codec.warn_once_about_replaced_unicode_surrogate(thread_id)
        if thread is None:
            return self._plan_first_checkpoint_of_new_thread(request)
        if thread.newest_removal and self.removals.is_stale(request, thread.newest_removal):
            return None
        if isinstance(request, TaskWrites):
            return plan_task_writes(self.reader, self.own_writes, request, thread)
        # Do not block on the cached thread's lock, because the caller may be running on an event
        # loop.
        if not thread.lock.acquire(blocking=False):
            return None
        try:
            head = thread.heads.get(checkpoint_ns) or Head(0, 0, None)
            # Recorded model inputs have no parent, although their namespace already has a head.
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
        # A new thread's row contains a hash of the thread id. The key of the hash is loaded when
        # the database is opened.
        if self.removals.key is None:
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
    ) -> PlannedTransaction | _NewRows:
        """Build the write plan for a checkpoint, including the new head of its namespace.

        The steps are:

        1. Compare the values with the logs, and list the rows that must be created. If the database
           must be read before the plan can be built, return the list of new rows instead of a plan.
        2. Update the thread's row, or create the row if the thread is new. Create the namespace and
           the channel logs that do not exist yet.
        3. Append the new items to the logs, and store references to log items in the snapshot.
        4. Choose the head of the namespace.
        5. Build the statements for the checkpoint and its items, tags and pending writes.

        The thread, its logs and its head are updated to the state after the commit. If the
        transaction fails, `_drop_cached_heads_and_keys` marks the cached thread as outdated.

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
            The transaction, or the new rows if the database must be read first.
        """
        thread_id, checkpoint_ns, _ = put.address
        snapshot = put.build_snapshot(parent)
        values_to_store = put.build_channel_values_to_store(
            self.codec, thread.logs_by_channel, parent
        )
        new_rows, row_keys = self._list_new_rows_and_take_row_keys(
            thread, head, values_to_store, allocated_keys
        )
        if row_keys is None:
            return new_rows

        version_token, now = random.getrandbits(62), time.time()
        if replaced is None:
            thread.last_seq += 1
            statements = [
                self._build_statement_that_fails_if_cache_is_stale(
                    put, thread, head, row_keys, version_token, now
                )
            ]
        else:
            statements = build_last_activity_update_if_due(self.sql, thread)
        if not head.namespace_key:
            head.namespace_key = row_keys.pop()
            statements.append(
                self.sql("new_namespace", head.namespace_key, thread.key, checkpoint_ns)
            )
        for channel in new_rows.new_log_channels:
            log = thread.get_or_add_log(row_keys.pop(), channel)
            statements.append(self.sql("new_log", log.key, thread.key, channel))

        stored_at = min(now, put.created_at)
        additions = Additions(self.seal, thread_id, thread, stored_at, put.item_times)
        metadata = self._add_inherited_labels_to_metadata(put, snapshot, parent)
        additions.set_channel_references(snapshot, values_to_store, parent, put.merge)

        if replaced is None:
            snapshot.key = head.namespace_key << 32 | thread.last_seq
            if parent is not None and parent.step == UNREAD_STEP:
                self.reader.decode_superstep_number(parent)
            snapshot.run_start = find_seq_of_first_checkpoint_of_run(
                put, head, parent, snapshot.step, thread.last_seq
            )
            new_head, reveals_overlap = choose_head_and_detect_run_overlap(
                put, head, snapshot, thread.last_seq
            )
        else:
            snapshot.key, snapshot.run_start = replaced.key, replaced.run_start
            new_head, reveals_overlap = head, False

        statements += self._build_checkpoint_statements(
            put.address, thread, head, new_head, snapshot, replaced, now
        )
        statements += self._build_thread_list_entry_statements(
            put, thread, values_to_store, metadata, new_head, snapshot
        )
        if additions.rows:
            statements.append(Statement(self.sql["add_item"], additions.rows, execute_many=True))
        tags = [*zip(compute_metadata_index_tags(self.seal, metadata), repeat(snapshot.key))]
        if tags:
            statements.append(Statement(self.sql["add_tag"], tags, execute_many=True))
        if thread.pending_writes or put.replayed is not None:
            statements += build_updates_of_task_writes_to_references(
                self.sql, self.seal, put, head.namespace_key, thread, snapshot, additions
            )

        thread.version_token, new_head.is_uncommitted = version_token, True
        add_entry_and_evict_oldest(thread.heads, checkpoint_ns, new_head)
        commit_parts = self.cache, self.own_writes, thread_id, thread, statements
        return PlannedTransaction(*commit_parts, additions, snapshot, new_head, reveals_overlap)

    def _list_new_rows_and_take_row_keys(
        self,
        thread: Thread,
        head: Head,
        values_to_store: dict[str, ValueToStore | None],
        allocated_keys: list[int] | None,
    ) -> tuple[_NewRows, list[int] | None]:
        """List the rows that a new checkpoint creates, and take the keys of these rows.

        Returns:
            The new rows, and their keys. The keys are `allocated_keys`, or reserved keys of this
            process if `allocated_keys` is None. The keys are None if the database must be read
            first.
        """
        channels, hashes = list[str](), list[int]()
        for channel, value in values_to_store.items():
            if not isinstance(value, SplitValue):
                continue
            log = thread.logs_by_channel.get(channel)
            if log is None:
                channels.append(channel)
            elif not value.is_log_complete:
                new_items = (part for part in value.parts if isinstance(part, bytes))
                hashes += [compute_item_hash(self.seal, log.key, item) for item in new_items]
        key_count = (not thread.key) + (not head.namespace_key) + len(channels)
        if allocated_keys is None and not hashes:
            allocated_keys = self.cache.keys.take_reserved_row_keys(key_count) if key_count else []
        return _NewRows(key_count, channels, hashes), allocated_keys

    def _build_statement_that_fails_if_cache_is_stale(
        self,
        put: CheckpointPut,
        thread: Thread,
        head: Head,
        row_keys: list[int],
        version_token: int,
        now: float,
    ) -> Statement:
        """Build the first statement of a put; the statement fails if the cached thread is stale.

        The SQL statement also fails if another process has already stored the checkpoint or created
        the thread or the namespace.

        Args:
            put: The checkpoint to store.
            thread: The thread, with the sequence number of the new checkpoint. The key of the
                thread is 0 if the statement must create the thread.
            head: The head of the namespace.
            row_keys: The keys of the rows to create. The last key is taken for a new thread.
            version_token: The new version token of the thread.
            now: The current time, in seconds since the epoch.
        """
        thread_id, checkpoint_ns, _ = put.address
        seq = thread.last_seq
        if not thread.key:
            thread.key, thread.updated_at = row_keys.pop(), now
            row = thread.key, thread_id, seq, version_token, now, now, thread.newest_removal
            return self.sql("new_thread", *row, self.removals.hash_thread_id(thread_id))
        expected = thread.key, thread.version_token
        new_state = (
            seq,
            version_token,
            *expected,
            head.namespace_key,
            encode_id_for_storage(put.checkpoint["id"]),
            len(checkpoint_ns),  # 0 for the root namespace, which alone changes `may_wait`
        )
        if (
            put.replayed is not None
            and put.replayed.size_bytes is not None
            and head.write_rows is not None
        ):
            thread.updated_at = now
            parent_state = encode_id_for_storage(put.address.checkpoint_id), put.replayed.size_bytes
            return self.sql("advance_replayed_thread", *new_state, now, *parent_state)
        if head.namespace_key and now - thread.updated_at <= ACTIVITY_PRECISION_S:
            return Statement(self.sql["advance_thread"], new_state)
        thread.updated_at = now
        if head.namespace_key:
            return Statement(self.sql["advance_active_thread"], (*new_state, now))
        return self.sql("advance_into_namespace", seq, version_token, *expected, checkpoint_ns, now)

    def _add_inherited_labels_to_metadata(
        self, put: CheckpointPut, snapshot: Snapshot, parent: Snapshot | None
    ) -> dict[str, Any]:
        """Add inherited labels to the metadata of a checkpoint, and return the metadata.

        The checkpoint inherits labels from its parent or, in a merge, from the head.

        If the checkpoint's encoded metadata already contains all inherited labels, the metadata is
        not encoded again.
        """
        metadata, labels = put.metadata, dict[str, Any]()
        inherited, needs_encoding = dict[str, Any](), LABELS in metadata or MERGED in metadata
        if put.merge is not None:
            parent = put.merge.head
        if parent is not None and put.config is not None:
            inherited = (
                parent.labels
                if parent.labels is not None
                else self.reader.decode_labels_for_child_checkpoints(parent)
            )
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

    def _build_thread_list_entry_statements(
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
        namespace. If the new checkpoint does not become the head, the metadata in the thread's row
        is not changed. If the new checkpoint does not become the head, set the thread's `may_wait`
        flag. The thread may still be waiting at its current head for an answer to an interrupt.
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
            statements.append(
                build_list_entry_update(
                    self.sql, self.seal, thread.key, put.address.thread_id, title, listed
                )
            )
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

    def _build_checkpoint_statements(
        self,
        address: Address,
        thread: Thread,
        head: Head,
        new_head: Head,
        snapshot: Snapshot,
        replaced: Snapshot | None,
        now: float,
    ) -> list[Statement]:
        """Build the statements that insert a checkpoint's row, or replace a stored checkpoint.

        Args:
            address: The address of the parent checkpoint.
            thread: The thread.
            head: The head of the namespace before the checkpoint is stored.
            new_head: The head of the namespace after the checkpoint is stored.
            snapshot: The checkpoint, with its row key and its run start.
            replaced: The stored checkpoint that is replaced, or None to insert a row.
            now: The current time, in seconds since the epoch.
        """
        row = (
            snapshot.key,
            encode_id_for_storage(snapshot.checkpoint_id),
            encode_id_for_storage(snapshot.parent_id),
            snapshot.run_start,
            now,
        )
        body = encrypt_checkpoint(self.seal, *address[:2], row, snapshot)
        if replaced is None:
            columns = snapshot.key, head.namespace_key, *row[1:], body
            statements = [Statement(self.sql["add_checkpoint"], columns)]
            if new_head.explicit_head != head.explicit_head:
                statements.append(
                    self.sql("set_explicit_head", new_head.explicit_head, head.namespace_key)
                )
            return statements
        old_tags = compute_metadata_index_tags(self.seal, self.reader.decode_metadata(replaced))
        return [
            *(self.sql("drop_tag", tag_number, snapshot.key) for tag_number in old_tags),
            self.sql("replace_checkpoint", row[2], now, body, snapshot.key),
            self.sql("mark_rows_removed", thread.key),
        ]

    # -- in a transaction that reads the thread

    def _read_thread_and_store_checkpoint(self, put: CheckpointPut) -> Flow[PlannedTransaction]:
        """Read the current state of a thread and store a checkpoint, in one transaction."""
        thread_id, _, parent_id = put.address
        (
            thread,
            head,
            existing_key,
            is_cache_valid,
        ) = yield from read_thread_head_key_and_cache_validity(
            self.reader, put.address, put.checkpoint["id"]
        )
        if (
            stale := (
                yield from build_stale_put_if_removals_are_newer(
                    self.reader, put, thread.newest_removal
                )
            )
        ) is not None:
            # An erasure deletes all checkpoints in the thread's `VIEWS_NAMESPACE`. Discard a put to
            # `VIEWS_NAMESPACE` if its data was loaded before the erasure.
            if put.address.checkpoint_ns == VIEWS_NAMESPACE:
                return PlannedTransaction(self.cache, self.own_writes, thread_id, thread, [])
            put = stale.copy_checkpoint_put_without_erased_messages(put)
            yield from self.removals.add_texts_to_newest_record(
                thread_id, stale.collect_unhashed_erased_texts_by_kind()
            )
        put.replace_cache_references_and_messages_by_copies(
            *get_thread_key_and_generation_if_cache_is_valid(
                self.cache, put, (thread.key, thread.generation), is_cache_valid
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
                parent = yield from self.reader.decrypt_first_row_and_unflatten_ranges(
                    put.address, thread, rows
                )
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
            replaced = yield from self.reader.decrypt_first_row_and_unflatten_ranges(
                put.address, thread, rows
            )
        planner = MergePlanner(self.reader, thread_id, put.address.checkpoint_ns, thread, head)
        put.merge = (yield from planner.plan_merge(put, parent)) if replaced is None else None
        plan = self._plan_checkpoint(put, thread, head, parent, replaced)
        if isinstance(plan, _NewRows):
            keys = yield from self.reader.allocate_row_keys(plan.key_count)
            yield from self.reader.load_items_with_hashes_into_cache(
                thread_id, thread, plan.unknown_item_hashes
            )
            plan = self._plan_checkpoint(put, thread, head, parent, replaced, keys)
            assert isinstance(plan, PlannedTransaction)
            plan.remaining_keys = keys
        plan.is_thread_read = True
        plan.replaces_checkpoint = (
            replaced is not None or planner.has_merged_channels_unread_by_run(plan.head)
        )
        rows = (yield plan.statements)[0]
        # If the statement that advances the thread had changed no row, `rows[0]` would raise an
        # error, and nothing would be stored.
        plan.first_row = rows[0] if replaced is None else ()
        if put.merge is not None and plan.head is not None:
            has_changed = yield from planner.finish_merge_and_check_if_checkpoint_changed(
                put.merge, plan.head
            )
            plan.replaces_checkpoint |= has_changed
        return plan


# -- the head of a namespace


def find_seq_of_first_checkpoint_of_run(
    put: CheckpointPut,
    head: Head,
    parent: Snapshot | None,
    step: int | None,
    put_seq: int,
) -> int:
    """Find the first checkpoint of the new checkpoint's run, and return its sequence number.

    This number is called the run start. A new checkpoint usually belongs to the same run as its
    parent. The new checkpoint and its parent then have the same run start, which is the sequence
    number of the run's first checkpoint. The function returns `put_seq`, the new checkpoint's own
    sequence number, if the new checkpoint starts a run. It starts a run if one of these conditions
    is met:

    - The checkpoint's source is in `START_SOURCES`.
    - The checkpoint has no parent, or its parent was pruned.
    - The caller chose the parent by id, and the parent is not the head.
    - The checkpoint's superstep number is not one more than the parent's. Superstep numbers have
      gaps if a run uses the durability mode `exit`, because langgraph then stores only the run's
      last checkpoint.

    If the parent was pruned and `put.merge` is set, the function returns 0 as the sequence number
    at which the run started. The new checkpoint's run then counts as the oldest run of the thread.
    If the metadata key `source` of the new checkpoint is in `START_SOURCES`, the function always
    returns `put_seq`, even if the parent was pruned.

    Args:
        put: The request to store the new checkpoint.
        head: The head before the new checkpoint is stored.
        parent: The parent of the new checkpoint, whose `step` has been read from its metadata.
        step: The superstep number of the new checkpoint, or None if its metadata has no number.
        put_seq: The sequence number of the new checkpoint.
    """
    if put.metadata.get("source") in START_SOURCES:
        return put_seq
    if parent is None:
        return 0 if put.address.checkpoint_id is not None and put.merge is not None else put_seq
    if put.continues_chosen_checkpoint and (
        head.snapshot is None or head.snapshot.key != parent.key
    ):
        return put_seq
    is_new_run = step is not None and parent.step is not None and step != parent.step + 1
    return put_seq if is_new_run else parent.run_start


def choose_head_and_detect_run_overlap(
    put: CheckpointPut, head: Head, snapshot: Snapshot, put_seq: int
) -> tuple[Head, bool]:
    """Choose a namespace's head after a checkpoint is stored, and detect overlapping runs.

    Return the head, and a flag that is True if the new checkpoint shows that two runs overlap.

    If the new checkpoint does not become the head, the function reports that two runs of the thread
    overlap. This rule does not apply after a rewind or a rollback has set the head. In the root
    namespace, the function also reports that two runs overlap if a new run receives input and
    starts from a checkpoint that is not the head. A run that deliberately continues from an earlier
    checkpoint does not count as overlapping.

    Args:
        put: The request to store the new checkpoint.
        head: The head before the new checkpoint is stored.
        snapshot: The new checkpoint.
        put_seq: The sequence number of the new checkpoint.
    """
    former, new_head = head.snapshot, Head(head.namespace_key, 0, snapshot)
    if put.merge is not None and put.merge.keeps_head is not None:
        kept_head = put.merge.keeps_head
        return Head(head.namespace_key, kept_head.key & _SEQ_MASK, kept_head), True
    if former is None or snapshot.parent_id == former.checkpoint_id:
        return new_head, False
    if snapshot.run_start == put_seq:
        is_root_input = put.metadata.get("source") == "input" and not put.address.checkpoint_ns
        return new_head, is_root_input and not put.continues_chosen_checkpoint
    if (snapshot.run_start, snapshot.checkpoint_id) > (former.run_start, former.checkpoint_id):
        return new_head, False
    return Head(
        head.namespace_key, head.explicit_head or former.key & _SEQ_MASK, former
    ), not head.explicit_head

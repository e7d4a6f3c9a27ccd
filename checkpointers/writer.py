"""Plan and store checkpoints and pending writes.

A put is planned from the cached head of its thread and the new checkpoint. The plan is a list of
statements and the new head. One transaction executes the statements if the thread has not changed
since it was cached. If it has changed, or if it was not cached, the transaction reads the thread
first and then plans the put again. See docs/decisions/0022.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from perdure.checkpointers.additions import Additions, Commit, cache_pending_writes
from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Head, Snapshot, Thread, keep_recent
from perdure.checkpointers.delta_writes import delta_writes_from_cache, read_deltas
from perdure.checkpointers.heads import head_after, run_start
from perdure.checkpointers.labels import LABELS, MERGED, USER_LABELS, inherit_labels
from perdure.checkpointers.merge_planner import MergePlanner, fold_update, set_writes_apart
from perdure.checkpointers.put import CheckpointPut, Node, SplitValue, TaskWrites, choose_title
from perdure.checkpointers.reader import CheckpointReader, StoredCheckpoint
from perdure.checkpointers.records import (
    UNLISTED_NAMES,
    UNLISTED_PREFIXES,
    VIEWS_NAMESPACE,
    content_hash,
    decrypt_list_entry,
    decrypt_writes,
    encrypt_checkpoint,
    encrypt_list_entry,
    encrypt_writes,
    metadata_tags,
    pack_id,
    row_key,
    transcript_to_store,
    used_log_ranges,
)
from perdure.checkpointers.status import NULL_TASK, is_by_update
from perdure.storage.database import Watch
from perdure.storage.flow import Flow, GuardedRequest, GuardFailed, Row, Statement

ACTIVITY_PRECISION_S: Final = 0.1  # seconds; earlier activity is not stored again, to save writes
_SEQ_MASK: Final = 0xFFFFFFFF  # bits of a checkpoint's row key that are its sequence number
_log = logging.getLogger("perdure")


class DatabaseWrite(NamedTuple):
    """The arguments of one call of `Database.write`.

    Attributes:
        make: Makes the flow of statements.
        committed: Called with the result of the flow after the commit.
        undone: Called if the transaction failed.
        exclusive: The name of the lock that the transaction holds: the thread id.
        watch: The watch of the checkpointer's tables.
        patient: Whether the write may wait for the next write, to share its commit.
        urgent: Whether the caller continues only after the write, so that it must not wait.
    """

    make: Callable[[], Flow[Commit]]
    committed: Callable[[Commit], None]
    undone: Callable[[], None]
    exclusive: tuple[str]
    watch: Watch
    patient: bool
    urgent: bool


class _MissingParts(NamedTuple):
    """The data that a put needs and that is not cached.

    Attributes:
        key_count: The number of new keys for the thread, the namespace and the logs.
        logs: The channels for which a log must be created.
        hashes: The hashes of new items that the database may already have.
    """

    key_count: int
    logs: list[str]
    hashes: list[int]


class CheckpointWriter:
    """Plan writes from cached data, or in a transaction that reads the thread first."""

    def __init__(self, reader: CheckpointReader, watch: Watch) -> None:
        self.watch = watch
        self.reader, self.cache, self.codec = reader, reader.cache, reader.codec
        self.sql, self.seal, self.removals = reader.sql, reader.seal, reader.removals

    def plan_database_write(self, request: CheckpointPut | TaskWrites) -> DatabaseWrite:
        """Plan a request from cached data if possible, and return the arguments for the database.

        If the thread has changed since it was cached, the same transaction reads it and plans the
        request again. So requests are stored in the order in which they were made.

        Raises:
            Unstorable: A value cannot be stored.
        """
        planned, thread_id = self.plan_from_cache(request), request.address.thread_id
        if planned is None and isinstance(request, CheckpointPut):
            request.encode_rest(self.codec)

        def flow() -> Flow[Commit]:
            if planned is not None:
                try:
                    planned.set_write_rows((yield GuardedRequest(planned.statements)))
                except GuardFailed:
                    if isinstance(
                        request, CheckpointPut
                    ):  # later puts must not be planned from this head
                        self.cache.invalidate_heads(thread_id)
                        if planned.statements[0].sql == self.sql["new_thread"]:
                            self.cache.keys.discard_keys()  # another thread may have its key
                else:
                    return planned
            if isinstance(request, TaskWrites):
                return (yield from self._read_and_store_writes(request))
            return (yield from self._read_and_put(request))

        undone = partial(
            self._invalidate_after_failure, None if isinstance(request, TaskWrites) else thread_id
        )
        # The writes of a task may wait for the put that follows. An answer to an interrupt must not
        # wait, because the code that acts on the answer runs at once (docs/decisions/0029).
        task = request.task_id if isinstance(request, TaskWrites) else None
        pace = task not in (None, NULL_TASK), task == NULL_TASK
        return DatabaseWrite(flow, Commit.update_cache, undone, (thread_id,), self.watch, *pace)

    def _invalidate_after_failure(self, thread_id: str | None) -> None:
        """Drop the cached heads of a thread and the reserved keys after a failed transaction.

        The keys may be the cause of the failure.
        """
        if thread_id is not None:
            self.cache.invalidate_heads(thread_id)
        self.cache.keys.discard_keys()

    def plan_from_cache(self, request: CheckpointPut | TaskWrites) -> Commit | None:
        """Plan a request from cached data; return None if the thread must be read first.

        Raises:
            Unstorable: A value cannot be stored.
        """
        (thread_id, ns, uid), thread = (
            request.address,
            self.cache.get_thread(request.address.thread_id),
        )
        request.encode_values(self.codec, thread)
        if self.codec.replaced_path:
            self.codec.log_replacement(thread_id)
        if thread is None:
            return self._plan_new_thread(request)
        if thread.newest_removal and self.removals.is_stale(request, thread.newest_removal):
            return None
        if isinstance(request, TaskWrites):
            return self._plan_task_writes(request, thread)
        if not thread.lock.acquire(
            blocking=False
        ):  # the caller may be an event loop, which must not wait
            return None
        try:
            head = thread.heads.get(ns) or Head(0, 0, None)
            parent = None if uid is None and ns == VIEWS_NAMESPACE else head.snapshot
            if (
                thread.version_token is None
                or head.is_uncommitted
                or (parent and parent.checkpoint_id) != uid
            ):
                return None
            if parent is not None and (request.delta_channels or request.snapshot_channels):
                request.replayed = delta_writes_from_cache(
                    self.reader, request, thread, head, parent
                )
                if request.replayed is None:
                    return None
            made = self._plan_checkpoint(request, thread, head, parent)
            return made if isinstance(made, Commit) else None
        except BaseException:  # the cached thread is planned only in part
            thread.version_token = None
            raise
        finally:
            thread.lock.release()

    def _plan_new_thread(self, request: CheckpointPut | TaskWrites) -> Commit | None:
        """Plan the first checkpoint of a thread that is not cached, as if it were a new thread."""
        if isinstance(request, TaskWrites) or request.address.checkpoint_id is not None:
            return None
        if self.removals.key is None:  # the database is not open yet
            return None
        made = self._plan_checkpoint(request, Thread(0, 0), Head(0, 0, None), None)
        if isinstance(made, Commit):
            self.cache.replace_thread(request.address.thread_id, made.thread)
        return made if isinstance(made, Commit) else None

    # -- a checkpoint

    def _plan_checkpoint(
        self,
        put: CheckpointPut,
        thread: Thread,
        head: Head,
        parent: Snapshot | None,
        before: Snapshot | None = None,
        keys: list[int] | None = None,
    ) -> Commit | _MissingParts:
        """Plan the rows of a checkpoint and the new head of its namespace.

        Args:
            put: The checkpoint to store.
            thread: The thread. Its key is 0 if the thread must be created.
            head: The head of the namespace. Its key is 0 if the namespace must be created.
            parent: The parent of the checkpoint, or None.
            before: The stored checkpoint with the same id, which is replaced, or None.
            keys: Keys for the rows that are created, if they were read from the database. The items
                with the hashes of the new items must have been loaded then. None means that the
                reserved keys of this process are used.

        Returns:
            The transaction, or the data that must be read first.
        """
        (thread_id, ns, _), snapshot = put.address, put.build_snapshot(parent)
        nodes = put.build_nodes(self.codec, thread.logs_by_channel, parent)
        lacking = self._find_missing_parts(thread, head, nodes)
        if keys is None and not lacking.hashes:
            keys = self.cache.keys.take_keys(lacking.key_count)
        if keys is None:
            return lacking
        stamp, now = random.getrandbits(62), time.time()
        if before is None:
            statements = [self._build_guard(put, thread, head, keys, stamp, now)]
            thread.last_seq += 1
        else:
            statements = self._build_touch(thread)
        if not head.namespace_key:
            head.namespace_key = keys.pop()
            statements.append(self.sql("new_namespace", head.namespace_key, thread.key, ns))
        for channel in lacking.logs:
            log = thread.get_or_add_log(keys.pop(), channel)
            statements.append(self.sql("new_log", log.key, thread.key, channel))

        made_at = min(now, put.created_at)
        additions = Additions(self.sql, self.seal, thread_id, thread, made_at, put.item_times)
        metadata, moved, overlaps = self._inherit_labels(put, snapshot, parent), head, False
        additions.fill_snapshot(snapshot, nodes, parent, put.merge)
        if before is None:
            snapshot.key = row_key(head.namespace_key, thread.last_seq)
            steps = None if parent is None else self.reader.step_of(parent), snapshot.step
            snapshot.run_start = run_start(put, head, parent, steps, thread.last_seq)
            moved, overlaps = head_after(put, head, snapshot, thread.last_seq)
            row = self._build_row(put.address, snapshot, now)
            statements.append(self.sql("add_checkpoint", row[0], head.namespace_key, *row[1:]))
            if moved.explicit_head != head.explicit_head:
                statements.append(
                    self.sql("set_explicit_head", moved.explicit_head, head.namespace_key)
                )
        else:
            statements += self._build_replacement(put.address, thread, snapshot, before, now)
        statements += self._build_list_entry_statements(
            put, thread, nodes, metadata, moved, snapshot
        )
        statements += additions.build_statements()
        tags = [(number, snapshot.key) for number in metadata_tags(self.seal, metadata)]
        if tags:
            statements.append(Statement(self.sql["add_tag"], tags, execute_many=True))
        if thread.pending_writes or put.replayed is not None:
            statements += self._build_reference_statements(
                put, head.namespace_key, thread, snapshot, additions
            )

        thread.version_token, moved.is_uncommitted = stamp, True
        keep_recent(thread.heads, ns, moved)
        parts = self.cache, self.watch, thread_id, thread, statements
        return Commit(*parts, additions, snapshot, moved, overlaps)

    def _find_missing_parts(
        self, thread: Thread, head: Head, nodes: dict[str, Node | None]
    ) -> _MissingParts:
        """Return the keys and stored items that a put needs and that are not cached."""
        logs, hashes = [], list[int]()
        for channel, node in nodes.items():
            if not isinstance(node, SplitValue):
                continue
            log = thread.logs_by_channel.get(channel)
            if log is None:
                logs.append(channel)
            elif not node.is_log_complete:
                new = (part for part in node.parts if isinstance(part, bytes))
                hashes += [content_hash(self.seal, log.key, item) for item in new]
        return _MissingParts((not thread.key) + (not head.namespace_key) + len(logs), logs, hashes)

    def _build_guard(
        self,
        put: CheckpointPut,
        thread: Thread,
        head: Head,
        keys: list[int],
        stamp: int,
        now: float,
    ) -> Statement:
        """Build the first statement of a put, which fails if the thread has changed since the plan.

        It also fails if a row that the put creates already exists.
        """
        (thread_id, ns, _), seq = put.address, thread.last_seq + 1
        if not thread.key:
            thread.key, thread.updated_at = keys.pop(), now
            row = thread.key, thread_id, seq, stamp, now, now, thread.newest_removal
            return self.sql("new_thread", *row, self.removals.hash_thread(thread_id))
        state, uid = (thread.key, thread.version_token), pack_id(put.checkpoint["id"])
        if (
            put.replayed is not None
            and put.replayed.size_bytes is not None
            and head.write_rows is not None
        ):
            thread.updated_at = now
            upon = pack_id(put.address.checkpoint_id), put.replayed.size_bytes
            changed = seq, stamp, *state, head.namespace_key, uid, len(ns), now
            return self.sql("advance_replayed_thread", *changed, *upon)
        if head.namespace_key and now - thread.updated_at <= ACTIVITY_PRECISION_S:
            return self.sql("advance_thread", seq, stamp, *state, head.namespace_key, uid, len(ns))
        thread.updated_at = now
        if head.namespace_key:
            return self.sql(
                "advance_active_thread", seq, stamp, *state, head.namespace_key, uid, len(ns), now
            )
        return self.sql("advance_into_namespace", seq, stamp, *state, ns, now)

    def _inherit_labels(
        self, put: CheckpointPut, snapshot: Snapshot, parent: Snapshot | None
    ) -> dict[str, Any]:
        """Add the labels of the parent to a checkpoint, and return its complete metadata.

        The metadata is encoded again only if a label is missing from it.
        """
        metadata, labels = put.metadata, dict[str, Any]()
        inherited, lacks = dict[str, Any](), LABELS in metadata or MERGED in metadata
        if put.merge is not None:
            parent = put.merge.head
        if parent is not None and put.config is not None:
            inherited = self.reader.labels_of(parent)
        for name in inherited:
            lacks = lacks or name not in metadata or name not in USER_LABELS
        if lacks and put.config is not None:
            labels = inherit_labels(metadata, inherited, put.config)
            metadata = self.codec.decode(put.encoded_fields[1]) | labels
            listed = sorted(labels.keys() - {*USER_LABELS, MERGED})
            metadata |= {LABELS: listed} if listed else {}
            snapshot.encoded_fields[1] = self.codec.encode(metadata, lambda: "metadata", exact=True)
        else:
            for name in USER_LABELS:
                if name in metadata:
                    labels[name] = metadata[name]
        snapshot.labels = labels
        return metadata

    def _build_list_entry_statements(
        self,
        put: CheckpointPut,
        thread: Thread,
        nodes: dict[str, Node | None],
        metadata: dict[str, Any],
        head: Head,
        snapshot: Snapshot,
    ) -> list[Statement]:
        """Build the statements that update the list entry of a thread: its title and metadata.

        The metadata is that of the head of the root namespace. A put that becomes a branch leaves
        it unchanged. Such a put marks the thread as one that may wait for an answer, because the
        head may still wait.
        """
        if put.address.checkpoint_ns:
            return []
        title, told = thread.title, thread.listed_metadata
        leads = head.snapshot is not None and head.snapshot.key == snapshot.key
        if title is None or put.title not in (None, title):
            title = choose_title(put, thread, nodes)
        if leads:
            tells, is_new = dict[str, Any](), False  # inlined, because every put runs this
            for name, value in metadata.items():
                if name not in UNLISTED_NAMES and not (
                    type(name) is str and name.startswith(UNLISTED_PREFIXES)
                ):
                    tells[name] = value
                    is_new = is_new or type(value) is not str  # True == 1, so compare the encodings
            try:
                is_new = is_new or told is None or tells != told[0]
            except Exception:  # some values, such as arrays, cannot be compared by ==
                is_new = True
            told = self._encode_listed_metadata(tells, told) if is_new else told
        changes = [] if leads else [self.sql("mark_may_wait", thread.key)]
        if title != thread.title or told is not thread.listed_metadata:
            thread.title, thread.listed_metadata = title, told
            sealed = encrypt_list_entry(self.seal, put.address.thread_id, title, told)
            changes.append(self.sql("set_list_entry", *sealed, thread.key))
        return changes

    def _encode_listed_metadata(
        self, tells: dict[str, Any], before: tuple[Any, bytes] | None
    ) -> tuple[Any, bytes]:
        """Return listed metadata, decoded and encoded; the former pair if it is unchanged."""
        stored = self.codec.encode(tells, lambda: "metadata", exact=True)
        if before is not None and stored == before[1]:
            return before
        return self.codec.decode(stored), stored

    def _build_replacement(
        self, at: Address, thread: Thread, snapshot: Snapshot, before: Snapshot, now: float
    ) -> list[Statement]:
        """Build the statements that replace the content of a stored checkpoint."""
        snapshot.key, snapshot.run_start = before.key, before.run_start
        key, _, parent, *_, body = self._build_row(at, snapshot, now)
        old = metadata_tags(self.seal, self.reader.decode_metadata(before))
        statements = [self.sql("drop_tag", number, key) for number in old]
        statements.append(self.sql("replace_checkpoint", parent, now, body, key))
        statements.append(self.sql("mark_rows_removed", thread.key))
        return statements

    def _build_row(self, at: Address, snapshot: Snapshot, now: float) -> Row:
        """Return the row `(row_key, checkpoint_id, parent_id, run_start, put_at, body)`."""
        row = (
            snapshot.key,
            pack_id(snapshot.checkpoint_id),
            pack_id(snapshot.parent_id),
            snapshot.run_start,
            now,
        )
        return *row, encrypt_checkpoint(
            self.seal, *at[:2], row, snapshot, transcript_to_store(snapshot)
        )

    def _build_reference_statements(
        self,
        put: CheckpointPut,
        namespace: int,
        thread: Thread,
        snapshot: Snapshot,
        additions: Additions,
    ) -> list[Statement]:
        """Build statements that replace values in pending writes by references to the logs.

        The writes are those of the tasks that led to the checkpoint.
        """
        out, at = [], put.address
        pending = thread.pending_writes.pop((at.checkpoint_ns, at.checkpoint_id or ""), {})
        if put.replayed is not None:
            pending |= put.replayed.pending_writes
        for task, (path, writes, body) in pending.items():
            referring = [additions.replace_by_reference(snapshot, write) for write in writes]
            if referring != writes:
                key = namespace, pack_id(at.checkpoint_id), pack_id(task)
                sealed = encrypt_writes(self.seal, (*at, task, path), referring)
                out.append(self.sql("replace_unchanged_writes", sealed, *key, body))
        return out

    # -- in a transaction that reads the thread

    def _read_and_put(self, put: CheckpointPut) -> Flow[Commit]:
        thread_id, _, uid = put.address
        thread, head, existing, holds = yield from self._read_thread_state(
            put.address, put.checkpoint["id"]
        )
        if (stale := (yield from self._read_stale_put(put, thread.newest_removal))) is not None:
            if (
                put.address.checkpoint_ns == VIEWS_NAMESPACE
            ):  # an erasure removes all views of a thread
                return Commit(self.cache, self.watch, thread_id, thread, [])
            put = stale.filter_checkpoint(put)
            yield from self.removals.extend_record(thread_id, stale.learned_texts())
        put.detach_from_cache(
            *self._state_for_references(put, (thread.key, thread.generation), holds)
        )
        put.replayed = None
        parent = before = None
        if uid is not None and head.namespace_key:
            parent = thread.committed_snapshot(put.address.checkpoint_ns, uid)
            if parent is None:
                rows = yield self.sql("find_checkpoint", head.namespace_key, pack_id(uid))
                parent = yield from self._resolve_first_row(put.address, thread, rows)
        if parent is not None and (put.delta_channels or put.snapshot_channels):
            stored = StoredCheckpoint(thread, head.namespace_key, parent)
            rows = (yield from self.reader.read_write_rows(stored)) if put.delta_channels else []
            put.replayed = yield from read_deltas(self.reader, put, thread, head, parent, rows)
        if existing is not None:
            rows = yield self.sql("checkpoint_row", existing)
            before = yield from self._resolve_first_row(put.address, thread, rows)
        planner = MergePlanner(self.reader, thread_id, put.address.checkpoint_ns, thread, head)
        put.merge = (yield from planner.plan(put, parent)) if before is None else None
        made = self._plan_checkpoint(put, thread, head, parent, before)
        if isinstance(made, _MissingParts):
            keys = yield from self.reader.allocate_keys(made.key_count)
            yield from self.reader.load_items_by_hash(thread_id, thread, made.hashes)
            made = self._plan_checkpoint(put, thread, head, parent, before, keys)
            assert isinstance(made, Commit)
            made.remaining_keys = keys
        made.is_thread_read = True
        made.replaces_checkpoint = before is not None or planner.is_merged(made.head)
        made.set_write_rows((yield made.statements)[0])
        if put.merge is not None and made.head is not None:
            made.replaces_checkpoint |= yield from planner.finish(put.merge, made.head)
        return made

    def _read_stale_put(self, request: CheckpointPut | TaskWrites, removals: int) -> Flow[Any]:
        """Return the `StalePut` of a request if its state is older than a removal, else None."""
        if not removals or not self.removals.is_stale(request, removals):
            return None
        from perdure.checkpointers.stale_puts import StalePut  # langgraph.types is slow to import

        return (yield from StalePut.read_removals(self.reader, request))

    def _cached_thread(self, thread_id: str, key: int, generation: int) -> Thread | None:
        """Return the cached thread if it has this key and generation, or None."""
        kept = self.cache.get_thread(thread_id)
        return kept if kept and (kept.key, kept.generation) == (key, generation) else None

    def _state_for_references(
        self, request: CheckpointPut | TaskWrites, state: tuple[int, int], holds: bool
    ) -> tuple[int, int]:
        """Return the key and generation of the thread to whose logs a request may refer.

        Returns:
            The state of the thread if its cached data is valid, otherwise that of no thread.
        """
        is_kept = holds and request.cached_thread is self.cache.get_thread(
            request.address.thread_id
        )
        return state if is_kept else (0, -1)

    def _read_thread_state(
        self, at: Address, uid: str
    ) -> Flow[tuple[Thread, Head, int | None, bool]]:
        """Read the present state of a thread before a put.

        Returns:
            The thread with its logs, with the key 0 if it does not exist; the head of the
            namespace, with the key 0 likewise; the row key of the checkpoint `uid` if it is stored;
            and whether the cached data of the thread is valid.
        """
        thread_id, ns, _ = at
        state = self.sql("read_write_state", pack_id(uid), ns, thread_id)
        rows, holds = yield from self.reader.read_with_cache_check(thread_id, state)
        if not rows:
            thread = Thread(0, 0, (yield from self.removals.read_newest_number(thread_id)))
            return thread, Head(0, 0, None), None, holds
        key, seq, generation, stamp, updated_at, namespace, pinned, newest, *rest = rows[0]
        listed, removals, existing = rest
        kept = self._cached_thread(thread_id, key, generation) if holds else None
        thread = Thread(key, generation, removals)
        thread.last_seq, thread.version_token, thread.updated_at = seq, stamp, updated_at
        thread.title, told = decrypt_list_entry(self.seal, thread_id, listed)
        if told is not None:
            thread.listed_metadata = self.codec.decode(told), told
        if kept is not None:
            thread.pending_writes, thread.size_bytes = kept.pending_writes.copy(), kept.size_bytes
            thread.heads = kept.committed_heads(stamp)
        for log, name, *last in (yield self.sql("thread_logs", key)):
            made = thread.get_or_add_log(log, name, kept)
            made.next_position, made.next_alias = (stop for _, stop in used_log_ranges(*last))
        if namespace is None:
            return thread, Head(0, 0, None), None, holds
        snapshot = None
        if newest is not None:
            rows = yield self.sql("checkpoint_row", newest)
            snapshot = yield from self._resolve_first_row(at, thread, rows)
        head = Head(namespace, pinned, snapshot)
        keep_recent(thread.heads, ns, head)
        return thread, head, existing, holds

    def _resolve_first_row(
        self, at: Address, thread: Thread, rows: list[Row]
    ) -> Flow[Snapshot | None]:
        if not rows:
            return None
        snapshot = self.reader.decrypt_row(*at[:2], rows[0])
        yield from self.reader.resolve_ranges(at.thread_id, thread, snapshot)
        return snapshot

    def set_explicit_head(self, at: Address) -> Flow[bool]:
        """Make a checkpoint the head, and return whether there is such a checkpoint."""
        uid = pack_id(at.checkpoint_id)
        rows = yield self.sql("checkpoint_with_keys", uid, at.thread_id, at.checkpoint_ns)
        for thread, _, _, namespace, *row in rows:
            yield self.sql("set_explicit_head", row[0] & _SEQ_MASK, namespace)
            yield self.sql("mark_head_changed", thread)
            if not at.checkpoint_ns:
                yield from self.reader.rewrite_list_entry(at.thread_id, tuple(row))
        return bool(rows)

    # -- pending writes

    def _plan_task_writes(self, request: TaskWrites, thread: Thread) -> Commit | None:
        """Plan the writes of a task from cached data; return None if the thread must be read first.

        The checkpoint of the writes may not be stored yet.
        """
        thread_id, ns, uid = request.address
        head, read = thread.heads.get(ns), thread.last_namespace
        namespace = head.namespace_key if head is not None else read[1] if read[0] == ns else 0
        if not namespace:
            return None
        row = pack_id(uid), pack_id(request.task_id), request.task_path
        body = encrypt_writes(
            self.seal, (*request.address, request.task_id, request.task_path), request.encoded
        )
        key, newest = thread.newest_checkpoint or (0, "")
        state = thread.key, thread.generation, key, pack_id(newest)
        added = self.sql("new_writes", namespace, *row, body, *state)
        snapshot = None if head is None else head.snapshot
        if snapshot is None or snapshot.checkpoint_id != uid:
            request.may_fold = request.is_stopped or (
                snapshot is not None and self._is_update(snapshot)
            )
            if request.may_fold:
                return None
        elif (request.is_stopped or snapshot.has_stopped_task) and request.task_id != NULL_TASK:
            snapshot.has_stopped_task = True
            added = self.sql("new_writes_at_head", *added.params, snapshot.key)
        statements = [added]
        if request.task_id != NULL_TASK:  # an answer is stored by a single statement, for speed
            statements += self._build_touch(thread)
        statements += [self.sql("mark_may_wait", thread.key)] if request.has_interrupt else []
        cache_pending_writes(thread, request, request.encoded, body)
        written = ns, uid or "", request.task_id, (*row, body)
        return Commit(self.cache, self.watch, thread_id, thread, statements, written_row=written)

    def _is_update(self, snapshot: Snapshot) -> bool:
        return bool(self.reader.decode_metadata(snapshot).get("source") == "update")

    def _build_touch(self, thread: Thread) -> list[Statement]:
        """Build the statement that stores the time of the last activity, if it has changed enough.

        A difference of up to `ACTIVITY_PRECISION_S` is not stored, because the index of this time
        is expensive to write.
        """
        now = time.time()
        if now - thread.updated_at <= ACTIVITY_PRECISION_S:
            return []
        thread.updated_at = now
        return [self.sql("touch_thread", now, thread.key)]

    def _read_and_store_writes(self, request: TaskWrites) -> Flow[Commit]:
        """Read a thread and store the writes of a task, in one transaction.

        If the task has stored writes before, they are kept. Errors, interrupts and similar special
        writes are replaced.
        """
        thread_id, ns, uid = request.address
        state, keys = self.sql("read_write_state", None, ns, thread_id), list[int]()
        rows, holds = yield from self.reader.read_with_cache_check(thread_id, state)
        removals = rows[0][9] if rows else (yield from self.removals.read_newest_number(thread_id))
        stale, asks = (yield from self._read_stale_put(request, removals)), request.has_interrupt
        if not rows or rows[0][5] is None:  # before all other rows, see `allocate_keys`
            keys = yield from self.reader.allocate_keys(1 if rows else 2)
        if rows:
            key, _, generation, _, updated_at, namespace, *_ = rows[0]
        else:
            key, generation, updated_at, namespace = keys.pop(), 0, time.time(), None
            row = key, thread_id, 0, random.getrandbits(62), updated_at, updated_at, removals
            yield self.sql("new_thread", *row, self.removals.hash_thread(thread_id))
        if namespace is None:  # a put that was planned to create it must fail
            namespace = keys.pop()
            yield [
                self.sql("new_namespace", namespace, key, ns),
                self.sql("mark_head_changed", key),
            ]
        kept = self._cached_thread(thread_id, key, generation) if holds else None
        thread = kept or Thread(key, generation, removals)
        thread.updated_at = updated_at  # a failed plan may have changed it
        writes = request.references_for_state(
            *self._state_for_references(request, (key, generation), holds)
        )
        if stale is not None:
            writes, asks = stale.filter_writes(request)
            yield from self.removals.extend_record(thread_id, stale.learned_texts())
        task, path = request.task_id, request.task_path
        before = yield self.sql("find_writes", namespace, pack_id(uid), pack_id(task))
        if before and is_by_update(before[0][0]) != is_by_update(path):
            task, path = yield from set_writes_apart(self.reader, request, namespace, before[0])
            before = []
        at = pack_id(uid), pack_id(task), path
        if before:
            stored = (*at[:2], *before[0])
            merged = {write[0]: write for write in decrypt_writes(self.seal, thread_id, ns, stored)}
            for write in writes:
                if write[0] < 0 or write[0] not in merged:  # special writes have a negative index
                    merged[write[0]] = write
            writes = [merged[index] for index in sorted(merged)]
        body = encrypt_writes(self.seal, (*request.address, task, path), writes)
        waits = [self.sql("mark_may_wait", key)] if asks else []
        yield [self.sql("put_writes", namespace, *at, body), *self._build_touch(thread), *waits]
        cache_pending_writes(thread, request, writes, body)
        written = ns, uid or "", task, (*at, body)
        made = Commit(
            self.cache, self.watch, thread_id, thread, [], written_row=written, remaining_keys=keys
        )
        if request.may_fold and rows and rows[0][7] is not None:
            made.replaces_checkpoint = yield from fold_update(
                self.reader, request, thread, rows[0][5:8]
            )
        return made

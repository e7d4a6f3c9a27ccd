"""Build the SQL statements that store the pending writes of a task.

The statements are built from the cached thread if possible. Otherwise, the transaction that stores
the writes reads the thread first. When the next checkpoint is stored, values in the writes are
replaced with references to log items.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Final

from perdure.checkpointers.additions import LOG_KIND_BY_INLINE_KIND, Additions, PlannedTransaction
from perdure.checkpointers.cache import Snapshot, Thread, Write, add_entry_and_evict_oldest
from perdure.checkpointers.codec import MESSAGE
from perdure.checkpointers.merge_planner import (
    avoid_task_id_clash_and_get_new_task_id_and_path,
    try_making_run_checkpoint_head_again,
)
from perdure.checkpointers.put import CheckpointPut, TaskWrites
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import decrypt_writes, encode_id_for_storage, encrypt_writes
from perdure.checkpointers.status import NULL_TASK, is_update_path
from perdure.checkpointers.stored_state import (
    build_stale_put_if_removals_are_newer,
    find_cached_thread,
    get_thread_key_and_generation_if_cache_is_valid,
)
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, NamedSQL, OwnWrites, Statement

# minimum interval in seconds between two updates of a thread's last-activity time; limits the
# number of writes
ACTIVITY_PRECISION_S: Final = 0.1


def plan_task_writes(
    reader: CheckpointReader, own_writes: OwnWrites, request: TaskWrites, thread: Thread
) -> PlannedTransaction | None:
    """Build the write plan for a task's pending writes from cached data.

    Return None if the write plan cannot be built without reading the database. The write plan
    can be executed even if the checkpoint to which the pending writes belong is not stored yet,
    because pending writes may be stored before their checkpoint.
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
        reader.seal, (*request.address, request.task_id, request.task_path), request.encoded
    )
    key, newest_id = thread.newest_checkpoint or (0, "")
    expected = thread.key, thread.generation, key, encode_id_for_storage(newest_id)
    insert = reader.sql("new_writes", namespace_key, *row_start, body, *expected)
    snapshot = None if head is None else head.snapshot
    if snapshot is None or snapshot.checkpoint_id != checkpoint_id:
        if snapshot is not None and snapshot.is_update is None:
            metadata = reader.decode_metadata(snapshot)
            snapshot.is_update = metadata.get("source") == "update"
        request.may_fold = request.is_stopped or (
            snapshot is not None and snapshot.is_update is True
        )
        # A state update may have made another checkpoint the head of the thread. Return None,
        # so that the caller reads the database and can make the run's checkpoint the head
        # again.
        if request.may_fold:
            return None
    elif (request.is_stopped or snapshot.has_stopped_task) and request.task_id != NULL_TASK:
        snapshot.has_stopped_task = True
        insert = reader.sql("new_writes_at_head", *insert.params, snapshot.key)
    statements = [insert]
    # To save time, storing the answer to an interrupt does not update the thread's
    # last-activity time.
    if request.task_id != NULL_TASK:
        statements += build_last_activity_update_if_due(reader.sql, thread)
    statements += [reader.sql("mark_may_wait", thread.key)] if request.has_interrupt else []
    _cache_pending_writes(thread, request, request.encoded, body)
    written_row = checkpoint_ns, checkpoint_id or "", request.task_id, (*row_start, body)
    return PlannedTransaction(
        reader.cache, own_writes, thread_id, thread, statements, written_row=written_row
    )


def build_last_activity_update_if_due(sql: NamedSQL, thread: Thread) -> list[Statement]:
    """Build the statement that updates a thread's last-activity time, if it needs an update.

    The last-activity time is updated only if it is more than `ACTIVITY_PRECISION_S` seconds
    old, because updating the index on last-activity times is expensive.
    """
    now = time.time()
    if now - thread.updated_at <= ACTIVITY_PRECISION_S:
        return []
    thread.updated_at = now
    return [sql("touch_thread", now, thread.key)]


def read_thread_and_store_task_writes(
    reader: CheckpointReader, own_writes: OwnWrites, request: TaskWrites
) -> Flow[PlannedTransaction]:
    """Read a thread and store the writes of a task, in one transaction.

    Writes that are already stored for the task are kept, and a new write with the same index is
    ignored. If a write has a negative index, for example the index of an interrupt, the write
    replaces the task's earlier write with the same index.
    """
    thread_id, checkpoint_ns, checkpoint_id = request.address
    state, keys = reader.sql("read_write_state", None, checkpoint_ns, thread_id), list[int]()
    rows, is_cache_valid = yield from reader.read_rows_and_whether_cache_is_valid(thread_id, state)
    newest_removal = (
        rows[0][9] if rows else (yield from reader.removals.read_newest_record_number(thread_id))
    )
    stale, has_interrupt = (
        (yield from build_stale_put_if_removals_are_newer(reader, request, newest_removal)),
        request.has_interrupt,
    )
    # Allocate row keys before writing any row; see `allocate_row_keys`.
    if not rows or rows[0][5] is None:
        keys = yield from reader.allocate_row_keys(1 if rows else 2)
    if rows:
        key, _, generation, _, updated_at, namespace_key, *_ = rows[0]
    else:
        key, generation, updated_at, namespace_key = keys.pop(), 0, time.time(), None
        row = key, thread_id, 0, random.getrandbits(62), updated_at, updated_at, newest_removal
        yield reader.sql("new_thread", *row, reader.removals.hash_thread_id(thread_id))
    # When a namespace is created, mark the thread as changed. A concurrent put that would
    # create the same namespace then fails, and is planned again.
    if namespace_key is None:
        namespace_key = keys.pop()
        yield [
            reader.sql("new_namespace", namespace_key, key, checkpoint_ns),
            reader.sql("mark_head_changed", key),
        ]
    cached_thread = (
        find_cached_thread(reader.cache, thread_id, key, generation) if is_cache_valid else None
    )
    thread = cached_thread or Thread(key, generation, newest_removal)
    # Reset the cached thread's last-activity time to the stored value, because planning a
    # transaction that later failed may have changed the cached value.
    thread.updated_at = updated_at
    writes = request.get_writes_without_outdated_references(
        *get_thread_key_and_generation_if_cache_is_valid(
            reader.cache, request, (key, generation), is_cache_valid
        )
    )
    if stale is not None:
        writes, has_interrupt = stale.remove_erased_messages_from_writes_and_check_if_task_waits(
            request
        )
        yield from reader.removals.add_texts_to_newest_record(
            thread_id, stale.collect_unhashed_erased_texts_by_kind()
        )
    task_id, task_path = request.task_id, request.task_path
    earlier_rows = yield reader.sql(
        "find_writes",
        namespace_key,
        encode_id_for_storage(checkpoint_id),
        encode_id_for_storage(task_id),
    )
    if earlier_rows and is_update_path(earlier_rows[0][0]) != is_update_path(task_path):
        task_id, task_path = yield from avoid_task_id_clash_and_get_new_task_id_and_path(
            reader, request, namespace_key, earlier_rows[0]
        )
        earlier_rows = []
    row_start = encode_id_for_storage(checkpoint_id), encode_id_for_storage(task_id), task_path
    if earlier_rows:
        earlier_row = (*row_start[:2], *earlier_rows[0])
        merged = {
            write[0]: write
            for write in decrypt_writes(reader.seal, thread_id, checkpoint_ns, earlier_row)
        }
        for write in writes:
            if write[0] < 0 or write[0] not in merged:  # special writes have a negative index
                merged[write[0]] = write
        writes = [merged[index] for index in sorted(merged)]
    body = encrypt_writes(reader.seal, (*request.address, task_id, task_path), writes)
    mark_waiting = [reader.sql("mark_may_wait", key)] if has_interrupt else []
    yield [
        reader.sql("put_writes", namespace_key, *row_start, body),
        *build_last_activity_update_if_due(reader.sql, thread),
        *mark_waiting,
    ]
    _cache_pending_writes(thread, request, writes, body)
    written_row = checkpoint_ns, checkpoint_id or "", task_id, (*row_start, body)
    plan = PlannedTransaction(
        reader.cache,
        own_writes,
        thread_id,
        thread,
        [],
        written_row=written_row,
        remaining_keys=keys,
    )
    if request.may_fold and rows and rows[0][7] is not None:
        plan.replaces_checkpoint = yield from try_making_run_checkpoint_head_again(
            reader, request, thread, rows[0][5:8]
        )
    return plan


def build_updates_of_task_writes_to_references(
    sql: NamedSQL,
    seal: Seal,
    put: CheckpointPut,
    namespace_key: int,
    thread: Thread,
    snapshot: Snapshot,
    additions: Additions,
) -> list[Statement]:
    """Build statements that replace values in pending writes with references to log items.

    Only the pending writes of the tasks whose results are included in the new checkpoint are
    updated.
    """
    statements, address = [], put.address
    tasks = thread.pending_writes.pop((address.checkpoint_ns, address.checkpoint_id or ""), {})
    if put.replayed is not None:
        tasks |= put.replayed.pending_writes
    for task_id, (task_path, writes, body) in tasks.items():
        references = [*map(partial(additions.replace_write_by_reference, snapshot), writes)]
        if references != writes:
            key = (
                namespace_key,
                encode_id_for_storage(address.checkpoint_id),
                encode_id_for_storage(task_id),
            )
            encrypted = encrypt_writes(seal, (*address, task_id, task_path), references)
            statements.append(sql("replace_unchanged_writes", encrypted, *key, body))
    return statements


def _cache_pending_writes(
    thread: Thread, request: TaskWrites, writes: list[Write], body: bytes
) -> None:
    """Cache the pending writes of a task if the next checkpoint may need them.

    The pending writes are cached if a written value is a message, a list or a dict. The next
    checkpoint may store each message, list element or dict entry as a log item.
    """
    for _, _, ref in writes:
        may_be_stored_in_log = (
            ref[:1] == MESSAGE if isinstance(ref, bytes) else ref[0] in LOG_KIND_BY_INLINE_KIND
        )
        if may_be_stored_in_log:
            checkpoint = request.address.checkpoint_ns, request.address.checkpoint_id or ""
            tasks = thread.pending_writes.get(checkpoint, {})
            add_entry_and_evict_oldest(
                thread.pending_writes,
                checkpoint,
                {**tasks, request.task_id: (request.task_path, writes, body)},
            )
            return

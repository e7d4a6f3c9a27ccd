"""Read the stored state of a thread, in the transaction of a write that needs it.

A write is planned from the cached thread if possible. If the cached thread is missing or stale, the
write reads the state of the thread first. The functions of this module also decide which cached
data the write may still use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Cache, Head, Thread, add_entry_and_evict_oldest
from perdure.checkpointers.put import CheckpointPut, TaskWrites
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    compute_item_and_alias_position_ranges,
    decrypt_listed_title_and_encoded_metadata,
    encode_id_for_storage,
)
from perdure.storage.flow import Flow

if TYPE_CHECKING:
    from perdure.checkpointers.stale_puts import StalePut


def build_stale_put_if_removals_are_newer(
    reader: CheckpointReader, request: CheckpointPut | TaskWrites, newest_removal: int
) -> Flow[StalePut | None]:
    """Return a `StalePut` if data was removed since the request's state was loaded.

    Return None if no data has been removed since the request's state was loaded.
    """
    if not newest_removal or not reader.removals.is_stale(request, newest_removal):
        return None
    from perdure.checkpointers.stale_puts import StalePut  # langgraph.types is slow to import

    return (yield from StalePut.build_from_newer_removals(reader, request))


def find_cached_thread(cache: Cache, thread_id: str, key: int, generation: int) -> Thread | None:
    """Return the cached thread, or None if its key or generation does not match."""
    thread = cache.get_thread(thread_id)
    return thread if thread and (thread.key, thread.generation) == (key, generation) else None


def get_thread_key_and_generation_if_cache_is_valid(
    cache: Cache,
    request: CheckpointPut | TaskWrites,
    key_and_generation: tuple[int, int],
    is_cache_valid: bool,
) -> tuple[int, int]:
    """Return a thread's key and generation, or `(0, -1)` if its cached data is not valid.

    The caller compares the returned pair with the thread key and generation of each log
    reference. If the two pairs differ, the caller replaces the reference with the log item
    itself.

    Returns:
        The argument `key_and_generation` if the cached data of the thread is valid. If the
        cached data is not valid, the pair `(0, -1)`, which matches no thread, so that all
        references are replaced.
    """
    is_valid = is_cache_valid and request.cached_thread is cache.get_thread(
        request.address.thread_id
    )
    return key_and_generation if is_valid else (0, -1)


def read_thread_head_key_and_cache_validity(
    reader: CheckpointReader, address: Address, checkpoint_id: str
) -> Flow[tuple[Thread, Head, int | None, bool]]:
    """Read the current state of a thread before a put.

    Returns:
        A tuple of four elements: the thread with its logs, the head of the namespace, the row
        key of the checkpoint, and whether the cached data of the thread is valid. If the thread
        or the namespace does not exist, its key is 0. If the checkpoint is not stored, its row
        key is None.
    """
    thread_id, checkpoint_ns, _ = address
    state = reader.sql(
        "read_write_state", encode_id_for_storage(checkpoint_id), checkpoint_ns, thread_id
    )
    rows, is_cache_valid = yield from reader.read_rows_and_whether_cache_is_valid(thread_id, state)
    if not rows:
        thread = Thread(0, 0, (yield from reader.removals.read_newest_record_number(thread_id)))
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
        find_cached_thread(reader.cache, thread_id, key, generation) if is_cache_valid else None
    )
    thread = Thread(key, generation, newest_removal)
    thread.last_seq, thread.version_token, thread.updated_at = seq, version_token, updated_at
    thread.title, encoded_metadata = decrypt_listed_title_and_encoded_metadata(
        reader.seal, thread_id, list_entry
    )
    if encoded_metadata is not None:
        thread.listed_metadata = reader.codec.decode(encoded_metadata), encoded_metadata
    if cached_thread is not None:
        thread.pending_writes, thread.size_bytes = (
            cached_thread.pending_writes.copy(),
            cached_thread.size_bytes,
        )
        thread.heads = cached_thread.get_committed_heads_by_namespace_unless_stale(version_token)
    for log_key, channel, *last_keys in (yield reader.sql("thread_logs", key)):
        log = thread.get_or_add_log(log_key, channel, cached_thread)
        log.next_position, log.next_alias = (
            stop for _, stop in compute_item_and_alias_position_ranges(*last_keys)
        )
    if namespace_key is None:
        return thread, Head(0, 0, None), None, is_cache_valid
    snapshot = None
    if head_key is not None:
        rows = yield reader.sql("checkpoint_row", head_key)
        snapshot = yield from reader.decrypt_first_row_and_unflatten_ranges(address, thread, rows)
    head = Head(namespace_key, explicit_head, snapshot)
    add_entry_and_evict_oldest(thread.heads, checkpoint_ns, head)
    return thread, head, existing_key, is_cache_valid

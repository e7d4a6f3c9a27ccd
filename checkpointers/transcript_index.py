"""Track the progress of the transcript index, which makes messages searchable.

A thread's indexing progress is the position up to which its messages have been indexed. The
transcript index is stored in the store's tables, in the same database as the threads. A transaction
that removes items from a thread also removes all messages of the thread from the transcript index.
After items were removed from a thread, the next search reindexes the messages that remain in the
thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any, Final, NamedTuple

from perdure.checkpointers.address import Address
from perdure.checkpointers.manifest import (
    ALIASES,
    decode_ranges,
    iter_referenced_log_keys_and_ranges,
)
from perdure.checkpointers.records import build_row_key_range
from perdure.checkpointers.reports import HistoryItem
from perdure.checkpointers.thread_reader import ThreadReader
from perdure.storage.flow import Flow, NamedSQL, Statement

# Number of transcript items to read per page, starting from the end of the transcript.
_PAGE: Final = 64
_CHECKPOINTS_PER_MESSAGE: Final = (
    # Number of checkpoints to read per new message. A run stores several checkpoints for each
    # message.
    4
)


class IndexProgress(NamedTuple):
    """A thread, and the progress of indexing its messages.

    Attributes:
        thread_key: The key of the thread.
        version_token: The version token of the thread's row when the progress was read. Each put of
            a checkpoint replaces the token.
        generation: A number that each removal from the thread raises.
        position: The position in the log before which all messages are indexed. None if the thread
            has not been indexed.
        path: The path of the index namespace that contains the messages, or None.
    """

    thread_key: int
    version_token: int
    generation: int
    position: int | None
    path: bytes | None

    def get_indexed_position(self, index_path: bytes) -> int:
        """Return the position up to which the thread is indexed in a namespace.

        Return 0 if the thread has not been indexed in this namespace.
        """
        return (self.position or 0) if self.path == index_path else 0


def build_message_key(thread_key: int, position: int) -> str:
    """Return the key under which the transcript index stores a message."""
    return f"{thread_key:x}.{position:08x}"


def read_index_progress(sql: NamedSQL, thread_id: str) -> Flow[IndexProgress | None]:
    """Return how far a thread has been indexed, or None if the thread does not exist."""
    rows = yield sql("transcript_progress_of", thread_id)
    return IndexProgress(*rows[0]) if rows else None


def read_index_progress_and_unindexed_items_with_times(
    threads: ThreadReader, thread_id: str, index_path: bytes, channel: str = "messages"
) -> Flow[tuple[IndexProgress, list[tuple[HistoryItem, float]]] | None]:
    """Read a thread's items, such as messages, that have not been indexed yet.

    Unindexed items that exist only on branches, and unindexed items that are no longer in the
    thread's current state, are returned as well.

    Args:
        threads: The reader of threads.
        thread_id: The thread.
        index_path: The path of the index namespace.
        channel: The channel.

    Returns:
        The progress of the thread, and the items in order of position. Each item is paired with the
        time, in seconds since 1970, of the first of the most recent checkpoints that contains it.
        None if the thread does not exist.
    """
    progress = yield from read_index_progress(threads.sql, thread_id)
    if progress is None:
        return None
    position, address = progress.get_indexed_position(index_path), Address(thread_id, "", None)
    items: list[HistoryItem] = []
    # Read backwards from the end of the transcript, so that the cost does not grow with the length
    # of the thread. A page with fewer than `_PAGE` items is the last one.
    while len(items) % _PAGE == 0:
        earliest = items[0].position if items else None
        page = (
            yield from threads.read_history_for_later_decoding(
                address, channel, (0, _PAGE), earliest
            )
        )()
        items = page + items
        if not any(item.position >= position for item in page):
            break
    new_items = {item.position: item for item in items if item.position >= position}
    moments: list[tuple[int, float]] = []
    if new_items:
        moments = yield from _read_log_length_and_time_at_newest_checkpoints(
            threads, thread_id, progress.thread_key, channel, len(new_items)
        )
    stops = [stop for stop, _ in moments[:-1]]
    return progress, [
        (new_items[item_position], moments[bisect_right(stops, item_position)][1])
        for item_position in sorted(new_items)
    ]


def _read_log_length_and_time_at_newest_checkpoints(
    threads: ThreadReader, thread_id: str, thread_key: int, channel: str, checkpoint_count: int
) -> Flow[list[tuple[int, float]]]:
    """Read the length that a channel's log had at each recent checkpoint of the root namespace.

    Include a checkpoint only if the log has grown since the previous checkpoint. Always include the
    oldest checkpoint that was read.

    Returns:
        The length of the log and the time of the checkpoint in seconds since 1970, oldest first.
    """
    lengths: list[tuple[int, float]] = []
    for namespace, ns, _ in (yield threads.sql("thread_namespaces", thread_key)):
        if ns:
            continue
        rows = yield threads.sql(
            "checkpoints_page",
            *build_row_key_range(namespace),
            _CHECKPOINTS_PER_MESSAGE * (checkpoint_count + 1),
        )
        for row in reversed(rows):
            snapshot = threads.reader.decrypt_checkpoint_row(thread_id, "", row)
            value_ranges = chain(
                *(
                    decode_ranges(part)
                    for _, part in iter_referenced_log_keys_and_ranges(
                        snapshot.references.get(channel, b"")
                    )
                )
            )
            transcript: Any = snapshot.transcript.get(channel, (0, []))
            ranges = chain(value_ranges, decode_ranges(transcript[1]))
            stop = max([0, *(stop for _, stop in ranges if stop <= ALIASES)])
            if not lengths or stop > lengths[-1][0]:
                lengths.append((stop, threads.reader.decode_checkpoint_unix_time(snapshot, row[4])))
    return lengths


def save_index_progress(
    sql: NamedSQL, ids_with_old_and_new_progress: Sequence[tuple[str, IndexProgress, IndexProgress]]
) -> Flow[list[bool]]:
    """Store the new progress of some threads.

    Args:
        sql: The SQL statements.
        ids_with_old_and_new_progress: For each thread its id, the progress before, and the new
            progress.

    Returns:
        For each thread, whether the progress was stored. The progress is not stored if another
        process has stored its progress first, or if something was removed from the thread since the
        progress was read.
    """
    rows = yield [
        sql("transcript_progress_of", thread_id) for thread_id, *_ in ids_with_old_and_new_progress
    ]
    # Do not compare `version_token`. A changed token means only that the thread has new messages,
    # which a later call indexes.
    is_saved = [
        bool(states)
        and IndexProgress(*states[0])._replace(version_token=before.version_token) == before
        for states, (_, before, _) in zip(rows, ids_with_old_and_new_progress, strict=True)
    ]
    for _, before, after in compress(ids_with_old_and_new_progress, is_saved):
        # If the thread was reassigned to another user, its messages are now indexed in another
        # namespace, so remove the messages from the index of the former namespace.
        if before.path not in (None, after.path):
            yield from drop_transcript_index_of_thread(sql, before.thread_key)
    new_rows = [
        (progress.thread_key, progress.version_token, progress.position, progress.path)
        for _, _, progress in compress(ids_with_old_and_new_progress, is_saved)
    ]
    if new_rows:
        yield Statement(sql["set_transcript_progress"], new_rows, execute_many=True)
    return is_saved


def drop_and_count_transcript_indexes(sql: NamedSQL, max_threads: int) -> Flow[int]:
    """Remove up to `max_threads` threads from the transcript index, and return the count."""
    rows = yield sql("some_indexed_threads", max_threads)
    for (thread_key,) in rows:
        yield from drop_transcript_index_of_thread(sql, thread_key)
    return len(rows)


def drop_transcript_index_of_thread(sql: NamedSQL, thread_key: int) -> Flow[None]:
    """Remove a thread from the transcript index.

    The caller must have updated the thread's row in the `threads` table in the same transaction.
    The update locks the thread's row, so that no other process can add messages of the thread to
    the transcript index during the transaction.
    """
    for (path,) in (yield sql("drop_transcript_progress", thread_key)):
        keys = f"{thread_key:x}.", f"{thread_key:x}/"
        sizes = [size for (size,) in (yield sql("drop_transcript_items", path, *keys))]
        yield [
            sql("reduce_transcript_counts", len(sizes), sum(sizes), path),
            sql("drop_transcript_index", path),
            sql("drop_transcript_namespace", path),
            sql("count_transcript_erasure"),
        ]

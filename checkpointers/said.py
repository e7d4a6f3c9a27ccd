"""What the search of what was said keeps of threads: how far it has read each, and where.

The messages are in tables of the store, in the database of the threads: what removes items from a
thread removes them in the same transaction, and the next search reads the thread again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any, Final, NamedTuple

from perdure.checkpointers.address import Address
from perdure.checkpointers.manifest import ALIASES, iter_log_references, unflatten_ranges
from perdure.checkpointers.records import key_range
from perdure.checkpointers.reports import HistoryItem
from perdure.checkpointers.threads import ThreadReader
from perdure.storage.flow import Flow, NamedSQL, Statement

_PAGE: Final = 64  # items that are read at once
_STEPS: Final = 4  # checkpoints that are read for each message: a run writes a few


class ReadThread(NamedTuple):
    """A thread, and how far it was read: up to `position` of its log, into a namespace's `path`."""

    thread: int
    stamp: int  # another after each change of the thread
    generation: int  # another after each removal
    position: int | None
    path: bytes | None

    def position_in(self, path: bytes) -> int:
        """How far it was read into a namespace."""
        return (self.position or 0) if self.path == path else 0


def key_of(thread: int, position: int) -> str:
    """The key of a message of a thread."""
    return f"{thread:x}.{position:08x}"


def read_thread(sql: NamedSQL, thread_id: str) -> Flow[ReadThread | None]:
    """How far a thread was read; None: there is none."""
    rows = yield sql("transcript_progress_of", thread_id)
    return ReadThread(*rows[0]) if rows else None


def unread(
    threads: ThreadReader, thread_id: str, path: bytes, channel: str = "messages"
) -> Flow[tuple[ReadThread, list[tuple[HistoryItem, float]]] | None]:
    """How far a thread was read into a namespace, and the items that follow, each with its time.

    Also items that were changed or removed since, and those on branches only, in order of their
    positions. None: there is no such thread.
    """
    state = yield from read_thread(threads.sql, thread_id)
    if state is None:
        return None
    position, at = state.position_in(path), Address(thread_id, "", None)
    items: list[HistoryItem] = []
    while len(items) % _PAGE == 0:  # from the end: a turn must not cost what the thread is long
        before = items[0].position if items else None
        page = (yield from threads.history(at, channel, (0, _PAGE), before))()
        items = page + items
        if not any(item.position >= position for item in page):
            break
    new = {item.position: item for item in items if item.position >= position}
    moments: list[tuple[int, float]] = []
    if new:
        moments = yield from _moments(threads, thread_id, state.thread, channel, len(new))
    stops = [stop for stop, _ in moments[:-1]]
    return state, [(new[place], moments[bisect_right(stops, place)][1]) for place in sorted(new)]


def _moments(
    threads: ThreadReader, thread_id: str, thread: int, channel: str, count: int
) -> Flow[list[tuple[int, float]]]:
    """Up to which position the log of a channel went at the newest checkpoints, and when."""
    moments: list[tuple[int, float]] = []
    for namespace, ns, _ in (yield threads.sql("thread_namespaces", thread)):
        if ns:
            continue
        rows = yield threads.sql("checkpoints_page", *key_range(namespace), _STEPS * (count + 1))
        for row in reversed(rows):
            snapshot = threads.reader.decrypt_row(thread_id, "", row)
            held = chain(
                *(
                    unflatten_ranges(part)
                    for _, part in iter_log_references(snapshot.references.get(channel, b""))
                )
            )
            written: Any = snapshot.transcript.get(channel, (0, []))
            ranges = chain(held, unflatten_ranges(written[1]))
            stop = max([0, *(stop for _, stop in ranges if stop <= ALIASES)])
            if not moments or stop > moments[-1][0]:
                moments.append((stop, threads.reader.activity_time(snapshot, row[4])))
    return moments


def advance(sql: NamedSQL, steps: Sequence[tuple[str, ReadThread, ReadThread]]) -> Flow[list[bool]]:
    """Note that threads were read further, each given by its id, from where and up to where.

    Returns, for each, whether nobody was quicker, and nothing was removed from it since.
    """
    rows = yield [sql("transcript_progress_of", thread_id) for thread_id, *_ in steps]
    # another stamp: it went on since, and is read again
    done = [
        bool(states) and ReadThread(*states[0])._replace(stamp=before.stamp) == before
        for states, (_, before, _) in zip(rows, steps, strict=True)
    ]
    for _, before, after in compress(steps, done):
        if before.path not in (None, after.path):  # it is another's now
            yield from unsay(sql, before.thread)
    kept = [(to.thread, to.stamp, to.position, to.path) for _, _, to in compress(steps, done)]
    if kept:
        yield Statement(sql["set_transcript_progress"], kept, execute_many=True)
    return done


def unsay_some(sql: NamedSQL, most: int) -> Flow[int]:
    """Remove what is kept of some threads; returns of how many."""
    threads = yield sql("some_indexed_threads", most)
    for (thread,) in threads:
        yield from unsay(sql, thread)
    return len(threads)


def unsay(sql: NamedSQL, thread: int) -> Flow[None]:
    """Remove what is kept of a thread.

    The thread's own row was changed before: who adds messages waits for that, or comes first.
    """
    for (path,) in (yield sql("drop_transcript_progress", thread)):
        keys = f"{thread:x}.", f"{thread:x}/"
        sizes = [size for (size,) in (yield sql("drop_transcript_items", path, *keys))]
        yield [
            sql("reduce_transcript_counts", len(sizes), sum(sizes), path),
            sql("drop_transcript_index", path),
            sql("drop_transcript_namespace", path),
            sql("count_transcript_erasure"),
        ]

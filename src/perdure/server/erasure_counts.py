"""Count message erasures in threads whose events are being streamed to clients.

Events in memory can contain messages that have since been erased. Therefore, an event stream checks
whether messages have been erased from its thread before it sends events. This check is made at most
twice a second. A change of the thread's erasure count shows that messages have been erased. The
erasure count is the sequence number of the newest removal from the thread, so each erasure
increases it. A single query reads the erasure counts of all threads that have an event stream,
because one query per stream would use more CPU time than sending the events.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class RemovalTable(Protocol):
    """A database table that counts the message erasures in each thread."""

    async def count_removals_by_thread_key(self, threads: Sequence[int]) -> dict[int, int]:
        """Return a dict that maps each thread's integer key to the thread's erasure count.

        Threads that do not exist are omitted from the returned dict.
        """


class ErasureCounts:
    """Caches the message erasure counts of the threads in one database.

    Args:
        table: The table from which the counts are read.

    Attributes:
        read_at: When the newest query started, by `time.monotonic`.
    """

    def __init__(self, table: RemovalTable) -> None:
        self._table = table
        # Maps each thread key to its number of active readers.
        self._readers = Counter[int]()
        self._counts = dict[int, int | None]()
        self._query_lock = asyncio.Lock()
        self.read_at = 0.0

    @contextmanager
    def cache_erasure_count_during_block(self, thread_key: int) -> Iterator[None]:
        """Include a thread in every erasure count query until the `with` block ends."""
        self._readers[thread_key] += 1
        try:
            yield
        finally:
            self._readers[thread_key] -= 1
            if not self._readers[thread_key]:
                del self._readers[thread_key]
                self._counts.pop(thread_key, None)

    async def read_erasure_count(self, thread_key: int, earliest_query_time: float) -> int | None:
        """Return the erasure count of a thread.

        Call this method only inside a `cache_erasure_count_during_block` block for the same
        thread.

        Args:
            thread_key: The key of the thread.
            earliest_query_time: The earliest time, by `time.monotonic`, at which the query may have
                started.

        Returns:
            The count, or None if there is no such thread.
        """
        if not self._is_recent(thread_key, earliest_query_time):
            async with self._query_lock:
                if not self._is_recent(thread_key, earliest_query_time):
                    # Check again after acquiring the lock, because another reader may have loaded
                    # the count while this one waited for the lock.
                    await self._refresh_cached_erasure_counts()
        return self._counts[thread_key]

    def _is_recent(self, thread_key: int, not_before: float) -> bool:
        """Return whether a thread's erasure count was cached at the time `not_before` or later."""
        return thread_key in self._counts and self.read_at >= not_before

    async def _refresh_cached_erasure_counts(self) -> None:
        """Read the erasure counts of all threads that currently have readers."""
        thread_keys, started_at = [*self._readers], time.monotonic()
        counts = await self._table.count_removals_by_thread_key(thread_keys)
        self._counts = {
            thread_key: counts.get(thread_key)
            for thread_key in thread_keys
            if thread_key in self._readers
        }
        self.read_at = started_at

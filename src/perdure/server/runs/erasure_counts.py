"""Count message erasures in threads whose events are being streamed to clients.

Events in memory can contain messages that have since been erased from the database, and such events
must not be sent. Before an event stream sends events, it checks whether messages have been erased
from its thread. Each event stream checks at most twice a second whether messages have been erased.
If the thread's erasure count has changed, messages have been erased. The erasures in a thread have
ascending sequence numbers. The sequence number of the latest erasure in a thread is called the
thread's erasure count. Each erasure increases the erasure count. A single query reads the erasure
counts of all threads that have an event stream, because one query per stream would use more CPU
time than sending the events.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from perdure.run_tables.runs import RunTable


class ErasureCounts:
    """Caches the message erasure counts of the threads in one database.

    Args:
        table: The table from which the counts are read.

    Attributes:
        read_at: When the newest query started, by `time.monotonic`.
    """

    def __init__(self, table: RunTable) -> None:
        self._table = table
        # Maps the key of each thread to the number of event streams that are currently reading the
        # thread's events.
        self._readers = Counter[int]()
        self._counts = dict[int, int | None]()
        self._query_lock = asyncio.Lock()
        self.read_at = 0.0

    @contextmanager
    def cache_erasure_count_during_block(self, thread_key: int) -> Iterator[None]:
        """Cache the erasure count of a thread until the `with` block ends.

        A thread's erasure count increases whenever messages are erased from the thread.

        During the `with` block, a query that reads another thread's erasure count also updates the
        cached erasure count of the thread `thread_key`.
        """
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
                    # the erasure count while this reader waited for the lock.
                    await self._refresh_cached_erasure_counts()
        return self._counts[thread_key]

    def _is_recent(self, thread_key: int, not_before: float) -> bool:
        """Return whether a thread's erasure count was cached at or after the time `not_before`."""
        return thread_key in self._counts and self.read_at >= not_before

    async def _refresh_cached_erasure_counts(self) -> None:
        """Read the erasure count of each thread whose events are being read."""
        thread_keys, started_at = [*self._readers], time.monotonic()
        counts = await self._table.read_newest_removal_numbers_by_thread_key(thread_keys)
        self._counts = {
            thread_key: counts.get(thread_key)
            for thread_key in thread_keys
            if thread_key in self._readers
        }
        self.read_at = started_at

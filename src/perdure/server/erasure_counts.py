"""The numbers of erasures from threads whose events are read.

Readers of events look twice a second whether messages were erased from the thread. One query reads
the numbers of all threads that have readers, since a query for each reader would take more CPU time
than sending the events.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class RemovalTable(Protocol):
    """A table that knows how often messages were erased from threads."""

    async def count_removals(self, threads: Sequence[int]) -> dict[int, int]:
        """Return the number of erasures from each of some threads, without those that are gone."""


class ErasureCounts:
    """The numbers of erasures from the threads of one database.

    Attributes:
        read_at: When the newest query began, by `time.monotonic`.

    Args:
        table: The table that the numbers are read from.
    """

    def __init__(self, table: RemovalTable) -> None:
        self._table = table
        self._readers = Counter[int]()  # for each key of a thread
        self._counts = dict[int, int | None]()
        self._querying = asyncio.Lock()
        self.read_at = 0.0

    @contextmanager
    def reading(self, thread: int) -> Iterator[None]:
        """Let queries include a thread until the block ends."""
        self._readers[thread] += 1
        try:
            yield
        finally:
            self._readers[thread] -= 1
            if not self._readers[thread]:
                del self._readers[thread]
                self._counts.pop(thread, None)

    async def count(self, thread: int, since: float) -> int | None:
        """Return the number of erasures from a thread that has a reader; see `reading`.

        Args:
            thread: The key of the thread.
            since: The earliest time, by `time.monotonic`, at which the query may have begun.

        Returns:
            The number, or None if there is no such thread.
        """
        if not self._is_known(thread, since):
            async with self._querying:
                if not self._is_known(thread, since):  # else another reader has just queried it
                    await self._query()
        return self._counts[thread]

    def _is_known(self, thread: int, since: float) -> bool:
        return thread in self._counts and self.read_at >= since

    async def _query(self) -> None:
        threads, began_at = [*self._readers], time.monotonic()
        counts = await self._table.count_removals(threads)
        self._counts = {each: counts.get(each) for each in threads if each in self._readers}
        self.read_at = began_at

"""One query reads the numbers of erasures for the readers of all streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from perdure.errors import StorageUnavailable
from perdure.run_tables.runs import RunTable
from perdure.server.runs.erasure_counts import ErasureCounts


class RecordingTable(RunTable):
    """A table of erasure counts that records the queries; each query waits for `is_open`."""

    def __init__(self) -> None:
        self.numbers = {1: 0, 2: 5}
        self.queries: list[list[int]] = []
        self.failure: Exception | None = None
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def read_newest_removal_numbers_by_thread_key(
        self, threads: Sequence[int]
    ) -> dict[int, int]:
        self.queries.append([*threads])
        found = {each: self.numbers[each] for each in threads if each in self.numbers}
        await self.is_open.wait()
        if self.failure is not None:
            raise self.failure
        return found


def test_readers_of_several_threads_share_one_query() -> None:
    async def read_counts() -> None:
        table = RecordingTable()
        counts, since = ErasureCounts(table), time.monotonic()
        with (
            counts.cache_erasure_count_during_block(1),
            counts.cache_erasure_count_during_block(2),
            counts.cache_erasure_count_during_block(2),
            counts.cache_erasure_count_during_block(3),
        ):
            reads = [counts.read_erasure_count(thread, since) for thread in (1, 2, 2, 3)]
            assert await asyncio.gather(*reads) == [0, 5, 5, None]
            assert table.queries == [[1, 2, 3]]
            assert counts.read_at >= since

    asyncio.run(read_counts())


def test_erasure_count_is_queried_again_if_it_may_be_outdated() -> None:
    async def read_counts() -> None:
        table = RecordingTable()
        counts = ErasureCounts(table)
        with counts.cache_erasure_count_during_block(1):
            before = time.monotonic()
            assert await counts.read_erasure_count(1, before) == 0
            table.numbers[1] = 1
            assert await counts.read_erasure_count(1, before) == 0
            assert await counts.read_erasure_count(1, counts.read_at + 1e-9) == 1

    asyncio.run(read_counts())


def test_query_started_before_request_does_not_answer_request() -> None:
    async def read_counts() -> None:
        table = RecordingTable()
        counts = ErasureCounts(table)
        table.is_open.clear()
        with counts.cache_erasure_count_during_block(1):
            early = asyncio.create_task(counts.read_erasure_count(1, time.monotonic()))
            await asyncio.sleep(0.01)
            table.numbers[1] = 1  # erased after the query has read the number
            with counts.cache_erasure_count_during_block(2):
                requests = [
                    counts.read_erasure_count(thread, time.monotonic()) for thread in (1, 2)
                ]
                late = [asyncio.create_task(request) for request in requests]
                await asyncio.sleep(0)
                table.is_open.set()
                assert await early == 0
                assert await asyncio.gather(*late) == [1, 5]
        assert table.queries == [[1], [1, 2]]

    asyncio.run(read_counts())


def test_next_reader_repeats_cancelled_or_failed_query() -> None:
    async def read_counts() -> None:
        table = RecordingTable()
        counts, since = ErasureCounts(table), time.monotonic()
        table.is_open.clear()
        with counts.cache_erasure_count_during_block(1):
            first, second = (
                asyncio.create_task(counts.read_erasure_count(1, since)) for _ in range(2)
            )
            await asyncio.sleep(0)
            first.cancel()
            table.is_open.set()
            assert await second == 0
            table.failure = StorageUnavailable("the database is gone")
            with pytest.raises(StorageUnavailable):
                await counts.read_erasure_count(1, time.monotonic())
            table.failure = None
            assert await counts.read_erasure_count(1, time.monotonic()) == 0

    asyncio.run(read_counts())


def test_threads_without_readers_are_not_queried() -> None:
    async def read_counts() -> None:
        table = RecordingTable()
        counts, since = ErasureCounts(table), time.monotonic()
        with counts.cache_erasure_count_during_block(1):
            with counts.cache_erasure_count_during_block(2):
                await counts.read_erasure_count(2, since)
            await counts.read_erasure_count(1, time.monotonic())
        assert table.queries == [[1, 2], [1]]

    asyncio.run(read_counts())

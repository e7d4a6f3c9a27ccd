"""The cache counts the memory of its threads without visiting all of them at each eviction."""

from __future__ import annotations

import random
from collections import OrderedDict

from perdure.checkpointers.cache import Cache, Thread

REQUESTS = 64  # requests between two evictions


def count_bytes(cache: Cache) -> int:
    return sum(thread.size_bytes for thread in cache._threads.values())


def evict_after_growth_is_counted(cache: Cache) -> None:
    """Make requests for one thread until two evictions have taken place."""
    for _ in range(2 * REQUESTS):
        cache.get_or_add_thread("last", 1, 0, 0)


def test_total_size_equals_the_sum_of_all_threads_after_any_changes() -> None:
    """Threads are added, grow, become stale, and are replaced and dropped."""
    rng, cache = random.Random(1), Cache(1 << 40, OrderedDict())
    for _ in range(5_000):
        thread_id, generation = f"t{rng.randrange(50)}", rng.randrange(3)
        match rng.randrange(5):
            case 0:
                cache.drop_thread(thread_id)
            case 1:
                thread = cache.get_thread(thread_id) if rng.randrange(2) else None
                cache.replace_thread(thread_id, thread or Thread(1, generation))
            case _:
                thread = cache.get_or_add_thread(thread_id, 1, generation, 0)
                thread.size_bytes += rng.randrange(10_000)
    evict_after_growth_is_counted(cache)

    assert count_bytes(cache) == cache._total_bytes


def test_growth_after_the_last_use_is_counted() -> None:
    """A thread grows while its items are read, which is after it was marked as used."""
    cache = Cache(1_000_000, OrderedDict())
    for number in range(REQUESTS):
        cache.get_or_add_thread(f"t{number}", 1, 0, 0).size_bytes += 100_000
    evict_after_growth_is_counted(cache)

    assert count_bytes(cache) <= 1_000_000
    assert cache.get_thread("last") is not None


def test_least_recently_used_threads_are_evicted_first() -> None:
    cache = Cache(1_000_000, OrderedDict())
    for _ in range(4):
        for number in range(REQUESTS):
            cache.get_or_add_thread(f"t{number}", 1, 0, 0).size_bytes = 50_000

    assert [f"t{number}" for number in range(REQUESTS - 20, REQUESTS)] == [*cache._threads]


def test_one_thread_that_exceeds_the_limit_stays_cached() -> None:
    cache = Cache(1_000, OrderedDict())
    thread = cache.get_or_add_thread("last", 1, 0, 0)
    evict_after_growth_is_counted(cache)

    assert cache.get_thread("last") is thread

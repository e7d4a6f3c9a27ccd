"""Stores on one file, used by processes, threads and tasks at once, and cancelled calls."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import PutOp

from perdure.errors import VersionConflict
from perdure.stores import SQLiteStore, VersionRetention
from tests.backends import Place
from tests.durability.processes import (
    PATIENCE_S,
    forkserver_context,
    run_in_processes,
    run_integrity_check,
)
from tests.rounds import rounds
from tests.store_backends import BACKENDS, Clock, WordEmbedder, list_item_keys, open_store_at

A = ("a",)
PROCESSES, TURNS = 8, 12
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def increment_counter(store: SQLiteStore) -> None:
    """Add one to a counter by compare-and-set, and retry until it succeeds."""
    while True:
        item = store.get(A, "counter")
        try:
            store.put(
                A,
                "counter",
                {"n": item.value["n"] + 1 if item else 1},
                if_version=item.version if item else 0,
            )
            return
        except VersionConflict:
            continue


def use_store_in_process(place: Place, pipe: Connection, number: int) -> None:
    """Put, delete and search in one process, and increment a counter that all processes share."""
    pipe.send("ready")
    pipe.recv()
    with open_store_at(place) as store:
        for turn in range(TURNS):
            own = f"own{number}x{turn}"
            store.put((f"p{number}",), f"k{turn}", {"text": f"{own} tea"})
            store.put((f"p{number}",), "gone", {"text": "gone"})
            store.delete((f"p{number}",), "gone")
            increment_counter(store)
            assert list_item_keys(store.search((), query=own, mode="text")) == [f"k{turn}"]
            if turn == 6 and number == 0:
                store.retain(VersionRetention(last=0), prefix=("p0",))
                if not place.dsn:
                    store.create_index("n")
    pipe.send("done")


@needs_fork
def test_concurrent_processes_on_one_store_lose_nothing(place: Place) -> None:
    """Eight processes use a new database, and each finds the item that it has just put."""
    run_in_processes(PROCESSES, use_store_in_process, place)
    with open_store_at(place) as store:
        counter = store.get(A, "counter")
        counts = {space: len(store.search(space, limit=100)) for space in store.list_namespaces()}
        by_words = len(store.search((), query="tea", mode="text", limit=1000))
        sound = place.dsn or store.database.read(run_integrity_check)

    assert counter is not None
    assert (counter.value["n"], counter.version) == (PROCESSES * TURNS,) * 2
    assert {A: 1, **{(f"p{n}",): TURNS for n in range(PROCESSES)}} == counts
    assert by_words == PROCESSES * TURNS
    assert sound in (place.dsn, [("ok",)])


def run_orders(place: Place, pipe: Connection) -> None:
    """Call methods of a store in another process, as ordered through the pipe."""
    with open_store_at(place) as store:
        for order, *args in iter(pipe.recv, ("end",)):
            getattr(store, order)(*args)
            pipe.send("done")


@needs_fork
def test_search_sees_all_changes_of_another_process(place: Place) -> None:
    """The changes are puts, replacements, deletions and dropped versions."""
    context = forkserver_context()
    ours, theirs = context.Pipe()
    with open_store_at(place) as store:
        child = context.Process(target=run_orders, args=(place, theirs), daemon=True)
        child.start()

        def order_and_wait(*order: Any) -> None:
            ours.send(order)
            assert ours.poll(PATIENCE_S)
            ours.recv()

        def search_keys(query: str) -> list[list[str]]:
            modes: list[Any] = ["text", "semantic"]
            return [
                [i.key for i in store.search(A, query=query, mode=mode) if i.score]
                for mode in modes
            ]

        store.put(A, "mine", {"text": "otter"})
        store.put(A, "far", {"text": "elsewhere"})
        assert search_keys("otter") == [["mine"], ["mine"]]
        order_and_wait("put", A, "theirs", {"text": "zebra"})
        assert search_keys("zebra") == [["theirs"], ["theirs"]]
        order_and_wait("put", A, "theirs", {"text": "quokka"})
        assert search_keys("zebra") == [[], []]
        assert search_keys("quokka") == [["theirs"], ["theirs"]]
        order_and_wait("delete", A, "mine")
        order_and_wait("retain", VersionRetention(last=0))
        assert search_keys("otter") == [[], []]
        assert "of 2 items" in store.why_not(A, "far", query="otter elsewhere").reason
        ours.send(("end",))
        child.join(PATIENCE_S)


@pytest.mark.repeats
def test_concurrent_searches_find_each_item_once_beside_a_writer(place: Place) -> None:
    """Some threads search with a filter and some without."""
    with open_store_at(place) as store:
        store.batch([PutOp(A, f"k{n}", {"text": "tea", "n": n}) for n in range(50)])
        stop = threading.Event()

        def write_until_stopped() -> int:
            turn = 0
            while not stop.is_set():
                turn += 1
                store.put(A, f"k{turn % 50}", {"text": "tea", "n": turn})
            return turn

        def search_repeatedly(number: int) -> bool:
            for _ in range(rounds(60)):
                filter = {"n": {"$gte": 0}} if number % 2 else None
                found_keys = list_item_keys(store.search(A, query="tea", filter=filter, limit=100))
                if len(found_keys) != len(set(found_keys)):
                    return False
            return True

        with ThreadPoolExecutor(7) as pool:
            writer = pool.submit(write_until_stopped)
            sound = list(pool.map(search_repeatedly, range(6)))
            stop.set()
            turns = writer.result(PATIENCE_S)
        found_keys = list_item_keys(store.search(A, query="tea", limit=100))

    assert sound == [True] * 6
    assert turns > 0
    assert sorted(f"k{n}" for n in range(50)) == sorted(found_keys)


@pytest.mark.repeats
@pytest.mark.parametrize("backend", ["memory", "file", "sealed", "postgres"])
def test_many_cancelled_calls_leave_no_task_thread_or_partial_write(
    backend: str, tmp_path: Path
) -> None:
    """Calls are cancelled at random times, and none of them hangs."""
    chance = random.Random(backend)
    count = rounds(10_000 if backend == "file" else 1_000)

    def make_call(store: SQLiteStore, n: int) -> Any:
        calls: list[Callable[[], Any]] = [
            lambda: store.aput(A, f"k{n % 20}", {"text": f"tea {n}", "n": n}, ttl=5),
            lambda: store.aget(A, f"k{n % 20}"),
            lambda: store.asearch(A, query="tea", limit=3),
            lambda: store.asearch(A, filter={"n": {"$gt": 3}}, limit=3),
            lambda: store.adelete(A, f"k{n % 20}"),
            lambda: store.abatch([PutOp(A, f"x{n}", {"n": n}), PutOp(A, f"y{n}", {"n": n})]),
            lambda: store.alist_namespaces(),
        ]
        return calls[n % 7]()

    async def call_and_cancel(store: SQLiteStore, n: int) -> None:
        task = asyncio.ensure_future(make_call(store, n))
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.done()
        assert task.cancelled() or task.exception() is None

    async def cancel_many_calls(store: SQLiteStore) -> tuple[int, list[Any]]:
        for begin in range(0, count, 250):
            await asyncio.gather(*(call_and_cancel(store, n) for n in range(begin, begin + 250)))
        await store.aput(A, "last", {"text": "zebra"})
        results = await asyncio.wait_for(store.asearch(A, query="zebra", limit=1), PATIENCE_S)
        return len(asyncio.all_tasks()), results

    with BACKENDS[backend](tmp_path, clock=Clock()) as store:
        store.search(A, query="tea")
        threads = threading.active_count()
        tasks, results = asyncio.run(cancel_many_calls(store))
        threads_after = threading.active_count()
        pairs = [
            {item.key[1:] for item in store.search(A, limit=100_000) if item.key[0] == letter}
            for letter in "xy"
        ]

    assert tasks == 1
    assert list_item_keys(results) == ["last"]
    assert threads_after <= threads + 8  # threads for reads are started by the first call
    assert pairs[0] == pairs[1]


class GatedWords(WordEmbedder):
    """An embedder that waits until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.released = threading.Event(), threading.Event()

    def embed(self, texts: Sequence[str]) -> Any:
        self.started.set()
        assert self.released.wait(PATIENCE_S)
        return super().embed(texts)


def test_cancelled_search_does_not_call_the_embedder(tmp_path: Path) -> None:
    """A cancelled search that already waits in a thread does not call the embedder either."""
    words = GatedWords()

    async def search_and_cancel(store: SQLiteStore) -> None:
        tasks = [asyncio.create_task(store.asearch(A, query=f"tea {n}")) for n in range(9)]
        await asyncio.to_thread(words.started.wait, PATIENCE_S)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        words.released.set()

    with BACKENDS["file"](tmp_path, index={"embed": words}) as store:
        store.put(A, "k", {"text": "tea"}, index=False)
        asyncio.run(search_and_cancel(store))

    assert len(words.calls) == 1


def test_get_does_not_wait_while_a_put_is_embedding(tmp_path: Path) -> None:
    """An embedder that works in this process runs in its own thread, too."""
    words = GatedWords()

    async def put_and_get(store: SQLiteStore) -> Any:
        put = asyncio.create_task(store.aput(A, "k", {"text": "tea"}))
        items = await asyncio.wait_for(asyncio.gather(store.aget(A, "k")), PATIENCE_S / 2)
        words.released.set()
        await put
        return items

    with BACKENDS["file"](tmp_path, index={"embed": words}) as store:
        assert asyncio.run(put_and_get(store)) == [None]
        assert store.get(A, "k") is not None


@pytest.mark.postgres
def test_blocking_calls_of_store_return_on_an_event_loop(tmp_path: Path) -> None:
    """Blocking methods may be called in the loop's own thread while tasks are running."""

    async def call_blocking_methods(store: SQLiteStore) -> Any:
        others = [asyncio.create_task(store.aput(A, f"k{n}", {"text": "tea"})) for n in range(8)]
        await asyncio.sleep(0)
        store.put(A, "k", {"text": "zebra"})
        results = store.search(A, query="zebra", limit=1)
        await asyncio.gather(*others)
        return list_item_keys(results)

    for backend in ("memory", "file", "postgres"):
        with BACKENDS[backend](tmp_path) as store:
            assert asyncio.run(call_blocking_methods(store)) == ["k"]

"""Stores that meet on one file, in processes, threads and tasks; and calls that are cancelled."""

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
from tests.durability.processes import PATIENCE_S, in_processes, integrity, warm
from tests.rounds import rounds
from tests.store_backends import BACKENDS, Clock, Words, keys, store_at

A = ("a",)
PROCESSES, TURNS = 8, 12
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def count_up(store: SQLiteStore) -> None:
    """Add one by compare-and-swap, until it succeeds."""
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


def work(place: Place, pipe: Connection, number: int) -> None:
    """One process: puts, deletes, searches of its own, and a counter that all share."""
    pipe.send("ready")
    pipe.recv()
    with store_at(place) as store:
        for turn in range(TURNS):
            own = f"own{number}x{turn}"
            store.put((f"p{number}",), f"k{turn}", {"text": f"{own} tea"})
            store.put((f"p{number}",), "gone", {"text": "gone"})
            store.delete((f"p{number}",), "gone")
            count_up(store)
            assert keys(store.search((), query=own, mode="text")) == [f"k{turn}"]
            if turn == 6 and number == 0:
                store.retain(VersionRetention(last=0), prefix=("p0",))
                if not place.dsn:
                    store.create_index("n")
    pipe.send("done")


@needs_fork
def test_processes_share_a_database(place: Place) -> None:
    """Eight processes on a new one: no error, nothing lost, each finds what it just put."""
    in_processes(PROCESSES, work, place)
    with store_at(place) as store:
        counter = store.get(A, "counter")
        found = {space: len(store.search(space, limit=100)) for space in store.list_namespaces()}
        by_words = len(store.search((), query="tea", mode="text", limit=1000))
        sound = place.dsn or store.database.read(integrity)

    assert counter is not None
    assert (counter.value["n"], counter.version) == (PROCESSES * TURNS,) * 2
    assert {A: 1, **{(f"p{n}",): TURNS for n in range(PROCESSES)}} == found
    assert by_words == PROCESSES * TURNS
    assert sound in (place.dsn, [("ok",)])


def other(place: Place, pipe: Connection) -> None:
    """Another process that does as it is told."""
    with store_at(place) as store:
        for order, *args in iter(pipe.recv, ("end",)):
            getattr(store, order)(*args)
            pipe.send("done")


@needs_fork
def test_what_another_process_writes_is_seen(place: Place) -> None:
    """Puts, updates, deletes, dropped versions of another process are seen by the next search."""
    context = warm()
    ours, theirs = context.Pipe()
    with store_at(place) as store:
        child = context.Process(target=other, args=(place, theirs), daemon=True)
        child.start()

        def tell(*order: Any) -> None:
            ours.send(order)
            assert ours.poll(PATIENCE_S)
            ours.recv()

        def found(query: str) -> list[list[str]]:
            modes: list[Any] = ["text", "semantic"]
            return [
                [i.key for i in store.search(A, query=query, mode=mode) if i.score]
                for mode in modes
            ]

        store.put(A, "mine", {"text": "otter"})
        store.put(A, "far", {"text": "elsewhere"})
        assert found("otter") == [["mine"], ["mine"]]
        tell("put", A, "theirs", {"text": "zebra"})
        assert found("zebra") == [["theirs"], ["theirs"]]
        tell("put", A, "theirs", {"text": "quokka"})
        assert found("zebra") == [[], []]
        assert found("quokka") == [["theirs"], ["theirs"]]
        tell("delete", A, "mine")
        tell("retain", VersionRetention(last=0))
        assert found("otter") == [[], []]
        assert "of 2 items" in store.why_not(A, "far", query="otter elsewhere").reason
        ours.send(("end",))
        child.join(PATIENCE_S)


@pytest.mark.repeats
def test_readers_overtake_each_other(place: Place) -> None:
    """Filtered and plain searches in threads beside a writer: no item twice, none missing."""
    with store_at(place) as store:
        store.batch([PutOp(A, f"k{n}", {"text": "tea", "n": n}) for n in range(50)])
        stop = threading.Event()

        def write() -> int:
            turn = 0
            while not stop.is_set():
                turn += 1
                store.put(A, f"k{turn % 50}", {"text": "tea", "n": turn})
            return turn

        def read(number: int) -> bool:
            for _ in range(rounds(60)):
                filter = {"n": {"$gte": 0}} if number % 2 else None
                every = keys(store.search(A, query="tea", filter=filter, limit=100))
                if len(every) != len(set(every)):
                    return False
            return True

        with ThreadPoolExecutor(7) as pool:
            writer = pool.submit(write)
            sound = list(pool.map(read, range(6)))
            stop.set()
            turns = writer.result(PATIENCE_S)
        found = keys(store.search(A, query="tea", limit=100))

    assert sound == [True] * 6
    assert turns > 0
    assert sorted(f"k{n}" for n in range(50)) == sorted(found)


@pytest.mark.repeats
@pytest.mark.parametrize("backend", ["memory", "file", "sealed", "postgres"])
def test_a_storm_of_cancelled_calls(backend: str, tmp_path: Path) -> None:
    """Of calls cancelled at any moment none hangs, leaks a task or a thread, or is half."""
    chance = random.Random(backend)
    count = rounds(10_000 if backend == "file" else 1_000)

    def call(store: SQLiteStore, n: int) -> Any:
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

    async def cancelled(store: SQLiteStore, n: int) -> None:
        task = asyncio.ensure_future(call(store, n))
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.done()
        assert task.cancelled() or task.exception() is None

    async def storm(store: SQLiteStore) -> tuple[int, list[Any]]:
        for begin in range(0, count, 250):
            await asyncio.gather(*(cancelled(store, n) for n in range(begin, begin + 250)))
        await store.aput(A, "last", {"text": "zebra"})
        found = await asyncio.wait_for(store.asearch(A, query="zebra", limit=1), PATIENCE_S)
        return len(asyncio.all_tasks()), found

    with BACKENDS[backend](tmp_path, clock=Clock()) as store:
        store.search(A, query="tea")
        threads = threading.active_count()
        tasks, found = asyncio.run(storm(store))
        left = threading.active_count()
        pairs = [
            {item.key[1:] for item in store.search(A, limit=100_000) if item.key[0] == letter}
            for letter in "xy"
        ]

    assert tasks == 1
    assert keys(found) == ["last"]
    assert left <= threads + 8  # the reading threads, started with the first call
    assert pairs[0] == pairs[1]


class Gated(Words):
    """Embeds in this process, once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may = threading.Event(), threading.Event()

    def embed(self, texts: Sequence[str]) -> Any:
        self.begun.set()
        assert self.may.wait(PATIENCE_S)
        return super().embed(texts)


def test_a_call_that_was_cancelled_is_not_made(tmp_path: Path) -> None:
    """Also if it was handed to a thread already, and waits there for others."""
    words = Gated()

    async def search(store: SQLiteStore) -> None:
        tasks = [asyncio.create_task(store.asearch(A, query=f"tea {n}")) for n in range(9)]
        await asyncio.to_thread(words.begun.wait, PATIENCE_S)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        words.may.set()

    with BACKENDS["file"](tmp_path, index={"embed": words}) as store:
        store.put(A, "k", {"text": "tea"}, index=False)
        asyncio.run(search(store))

    assert len(words.calls) == 1


def test_reads_do_not_wait_for_texts_that_are_embedded(tmp_path: Path) -> None:
    """What is put beside a read is embedded in a thread of its own, also in this process."""
    words = Gated()

    async def both(store: SQLiteStore) -> Any:
        put = asyncio.create_task(store.aput(A, "k", {"text": "tea"}))
        got = await asyncio.wait_for(asyncio.gather(store.aget(A, "k")), PATIENCE_S / 2)
        words.may.set()
        await put
        return got

    with BACKENDS["file"](tmp_path, index={"embed": words}) as store:
        assert asyncio.run(both(store)) == [None]
        assert store.get(A, "k") is not None


@pytest.mark.postgres
def test_blocking_calls_on_an_event_loop(tmp_path: Path) -> None:
    """Blocking methods called on the loop's own thread return, also while tasks are at work."""

    async def both(store: SQLiteStore) -> Any:
        others = [asyncio.create_task(store.aput(A, f"k{n}", {"text": "tea"})) for n in range(8)]
        await asyncio.sleep(0)
        store.put(A, "k", {"text": "zebra"})
        found = store.search(A, query="zebra", limit=1)
        await asyncio.gather(*others)
        return keys(found)

    for backend in ("memory", "file", "postgres"):
        with BACKENDS[backend](tmp_path) as store:
            assert asyncio.run(both(store)) == ["k"]

"""Concurrent changes of one namespace: none fails or is made twice, and none waits forever."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.memory import InMemoryStore

from perdure.errors import VersionConflict
from perdure.memory.long_term import memory_changes
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.examples import ExampleSelector
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.records import Candidate
from perdure.stores import SQLiteStore

ANN: Any = {"configurable": {"user_id": "ann"}}
NOTE = ("perdure", "changed", "memories", "ann")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore.open(tmp_path / "m.db", index=None, synchronous="normal") as opened:
        yield opened


@pytest.fixture
def endless_lock_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is ever overtaken, so a change that waits for nothing waits forever."""
    monkeypatch.setattr(memory_changes, "_LOCK_WAIT_S", 10_000.0)


def build_fact(number: int) -> str:
    """Return a fact. Two numbers share each fact, in different letters."""
    text = f"Ann keeps item{number // 2} in room{number // 2}"
    return text.upper() if number % 2 else text


def list_texts(store: Any) -> list[str]:
    memories = Collection(store).list(limit=1_000, config=ANN)
    return sorted(memory.text.lower() for memory in memories)


def expected_texts(count: int) -> list[str]:
    return sorted({build_fact(number).lower() for number in range(count)})


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_concurrent_inserts_by_tasks_store_each_fact_once(store: SQLiteStore, kind: str) -> None:
    """A store without versions behaves in the same way."""
    target_store: Any = store if kind == "perdure" else InMemoryStore()
    collection = Collection(target_store)

    async def insert_concurrently() -> list[Any]:
        calls = (collection.ainsert(build_fact(number), config=ANN) for number in range(200))
        return list(await asyncio.gather(*calls))

    outcomes = [outcome.change for outcome in asyncio.run(insert_concurrently())]

    assert [outcomes.count("added"), outcomes.count("unchanged")] == [100, 100]
    assert list_texts(target_store) == expected_texts(200)


def test_concurrent_inserts_by_threads_store_each_fact_once(store: SQLiteStore) -> None:
    """Each thread has a collection of its own."""

    def work(thread: int) -> list[str]:
        collection = Collection(store)
        numbers = range(thread * 15, thread * 15 + 15)
        return [str(collection.insert(build_fact(n), config=ANN).change) for n in numbers]

    with ThreadPoolExecutor(16) as pool:
        outcomes = [change for changes in pool.map(work, range(16)) for change in changes]

    assert [outcomes.count("added"), outcomes.count("unchanged")] == [120, 120]
    assert list_texts(store) == expected_texts(240)


def test_concurrent_inserts_by_two_loops_and_a_thread_store_each_fact_once(
    store: SQLiteStore,
) -> None:
    """The two loops use two stores over one file."""
    with SQLiteStore.open(store.database.path, index=None, synchronous="normal") as second_store:

        async def insert_concurrently(target_store: Any) -> None:
            collection = Collection(target_store)
            await asyncio.gather(
                *(collection.ainsert(build_fact(n), config=ANN) for n in range(40))
            )

        def insert_one_by_one() -> None:
            for number in range(40):
                Collection(store).insert(build_fact(number), config=ANN)

        with ThreadPoolExecutor(3) as pool:
            works = [
                pool.submit(asyncio.run, insert_concurrently(target_store))
                for target_store in (store, second_store)
            ]
            works.append(pool.submit(insert_one_by_one))
            for work in works:
                work.result()

    assert list_texts(store) == expected_texts(40)


class BlockingCheck:
    """A check that blocks a change until it is released."""

    def __init__(self) -> None:
        self.started, self.may_finish = threading.Event(), threading.Event()

    def __call__(self, candidate: Candidate) -> None:
        if candidate.text == "slow":
            self.started.set()
            self.may_finish.wait()


@pytest.mark.usefixtures("endless_lock_wait")
def test_cancelled_changes_do_not_block_the_others(store: SQLiteStore) -> None:
    """A change may be cancelled while it runs, while it waits, or when it is called."""
    slow = BlockingCheck()
    collection = Collection(store, gate=Gate([slow]))

    async def cancel_some() -> list[Any]:
        first = asyncio.create_task(collection.ainsert("slow", config=ANN))
        await asyncio.to_thread(slow.started.wait)
        tasks = [
            asyncio.create_task(collection.ainsert(build_fact(n), config=ANN)) for n in range(40)
        ]
        await asyncio.sleep(0)
        for task in (first, *tasks[::3]):
            task.cancel()
        ended = await asyncio.gather(first, *tasks, return_exceptions=True)
        slow.may_finish.set()  # the thread of the check still waits
        return ended

    ended = asyncio.run(cancel_some())
    collection.insert("Ann sings", config=ANN)

    assert [type(result) is asyncio.CancelledError for result in ended[1:]] == [
        number % 3 == 0 for number in range(40)
    ]
    assert list_texts(store) == sorted(
        {"ann sings", *(build_fact(number).lower() for number in range(40) if number % 3)}
    )


@pytest.mark.usefixtures("endless_lock_wait")
def test_change_left_in_a_closed_event_loop_does_not_block_the_others(store: SQLiteStore) -> None:
    slow = BlockingCheck()
    collection = Collection(store, gate=Gate([slow]))
    with ThreadPoolExecutor(1) as pool:
        front = pool.submit(collection.insert, "slow", config=ANN)
        slow.started.wait()
        loop = asyncio.new_event_loop()
        lost_task = loop.create_task(collection.ainsert("Ann sings", config=ANN))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.set_exception_handler(lambda *_: None)  # the warning about the lost task is expected
        loop.close()
        slow.may_finish.set()
        front.result()
    collection.insert("Ann swims", config=ANN)

    assert not lost_task.done()
    assert list_texts(store) == ["ann swims", "slow"]


def test_hanging_change_is_overtaken_and_judged_again(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_changes, "_LOCK_WAIT_S", 0.02)
    slow = BlockingCheck()
    collection = Collection(store, gate=Gate([slow]))
    with ThreadPoolExecutor(1) as pool:
        front = pool.submit(collection.insert, "slow", config=ANN)
        slow.started.wait()
        asyncio.run(collection.ainsert("Ann sings", config=ANN))
        collection.insert("Ann swims", config=ANN)
        slow.may_finish.set()
        outcome = front.result()

    assert outcome.change == "added"
    assert list_texts(store) == ["ann sings", "ann swims", "slow"]


@pytest.mark.usefixtures("endless_lock_wait")
def test_change_within_a_check_or_a_blocked_loop_does_not_deadlock(store: SQLiteStore) -> None:
    plain = Collection(store)

    def log_insert(candidate: Candidate) -> None:
        plain.insert("Something was kept", config=ANN)

    Collection(store, gate=Gate([log_insert])).insert("Ann sings", config=ANN)

    async def insert_in_blocked_loop() -> None:
        slow = BlockingCheck()
        task = asyncio.create_task(Collection(store, gate=Gate([slow])).ainsert("slow", config=ANN))
        await asyncio.to_thread(slow.started.wait)
        plain.insert("Ann swims", config=ANN)
        slow.may_finish.set()
        await task

    asyncio.run(insert_in_blocked_loop())

    assert list_texts(store) == ["ann sings", "ann swims", "slow", "something was kept"]


_INSERT_SCRIPT = """
import sys
from perdure.memory.long_term.collection import Collection
from perdure.stores import SQLiteStore
with SQLiteStore.open(sys.argv[1], index=None, synchronous="normal") as store:
    facts = Collection(store, ("memories", "ann"))
    for number in range(30):
        facts.insert(f"Ann keeps item{number} in room{number}")
        facts.supersede("home", f"Ann lives in town {sys.argv[2]} {number}")
"""


@pytest.mark.slow
def test_concurrent_changes_by_two_processes_are_all_kept(store: SQLiteStore) -> None:
    """Equal facts are stored once, and the memory's history has each change of both processes."""
    facts = Collection(store, ("memories", "ann"))
    facts.insert("Ann lives in Ghent", key="home")
    path = str(store.database.path)
    commands = [[sys.executable, "-c", _INSERT_SCRIPT, path, name] for name in ("north", "south")]
    running = [subprocess.Popen(command) for command in commands]

    assert [process.wait() for process in running] == [0, 0]
    assert len(facts.list()) == 31
    assert sorted(version.text for version in facts.history("home")) == sorted(
        ["Ann lives in Ghent"]
        + [f"Ann lives in town {name} {n}" for name in ("north", "south") for n in range(30)]
    )


def build_interfering_check(store: SQLiteStore, count: int) -> Any:
    """Return a check that simulates a change by another process at each of its first calls."""
    numbers = iter(range(count))

    def check(candidate: Candidate) -> None:
        number = next(numbers, None)
        if number is not None:
            store.put(NOTE, "memories", {"number": 1_000 + number})

    return check


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_change_overtaken_by_another_process_is_judged_again(
    store: SQLiteStore, call_mode: str
) -> None:
    collection = Collection(store, gate=Gate([build_interfering_check(store, 4)]))
    if call_mode == "sync":
        outcome = collection.insert("Ann sings", config=ANN)
    else:
        outcome = asyncio.run(collection.ainsert("Ann sings", config=ANN))

    assert outcome.change == "added"
    assert list_texts(store) == ["ann sings"]


def test_change_that_is_always_overtaken_raises_a_version_conflict(store: SQLiteStore) -> None:
    """The next change does not have to wait."""
    collection = Collection(store, gate=Gate([build_interfering_check(store, 51)]))
    with pytest.raises(VersionConflict):
        collection.insert("Ann sings", config=ANN)

    assert collection.insert("Ann swims", config=ANN).change == "added"
    assert list_texts(store) == ["ann swims"]


def test_concurrent_examples_of_one_input_become_one_episode(store: SQLiteStore) -> None:
    """The first call adds it, the others update it."""
    examples = ExampleSelector(store, ("memories", "{user_id}"))

    async def add_concurrently() -> list[Any]:
        calls = (examples.aadd("Late", "Took a bus", why=f"{n}", config=ANN) for n in range(9))
        return list(await asyncio.gather(*calls))

    outcomes = [outcome.change for outcome in asyncio.run(add_concurrently())]

    assert outcomes == ["added", *["updated"] * 8]
    assert list_texts(store) == ["late"]

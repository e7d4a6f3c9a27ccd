"""Changes of one namespace at the same moment: none fails or is made twice, none waits forever."""

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
from perdure.memory import changes
from perdure.memory.collection import Collection
from perdure.memory.examples import ExampleSelector
from perdure.memory.gate import Gate
from perdure.memory.records import Candidate
from perdure.stores import SQLiteStore

ANN: Any = {"configurable": {"user_id": "ann"}}
NOTE = ("perdure", "changed", "memories", "ann")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore.open(tmp_path / "m.db", index=None, synchronous="normal") as opened:
        yield opened


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is ever overtaken, so who waits for nothing waits forever."""
    monkeypatch.setattr(changes, "_LOCK_WAIT_S", 10_000.0)


def fact(number: int) -> str:
    """Half of them are told twice, in other letters."""
    said = f"Ann keeps item{number // 2} in room{number // 2}"
    return said.upper() if number % 2 else said


def kept(store: Any) -> list[str]:
    found = Collection(store).list(limit=1_000, config=ANN)
    return sorted(memory.text.lower() for memory in found)


def expected(count: int) -> list[str]:
    return sorted({fact(number).lower() for number in range(count)})


@pytest.mark.parametrize("kind", ["perdure", "langgraph"])
def test_many_tasks_at_once(store: SQLiteStore, kind: str) -> None:
    """All are done, and what two tell is kept once; also in a store without versions."""
    chosen: Any = store if kind == "perdure" else InMemoryStore()
    collection = Collection(chosen)

    async def together() -> list[Any]:
        calls = (collection.ainsert(fact(number), config=ANN) for number in range(200))
        return list(await asyncio.gather(*calls))

    outcomes = [outcome.change for outcome in asyncio.run(together())]

    assert [outcomes.count("added"), outcomes.count("unchanged")] == [100, 100]
    assert kept(chosen) == expected(200)


def test_many_threads_at_once(store: SQLiteStore) -> None:
    """So it is with threads, each with a collection of its own."""

    def work(thread: int) -> list[str]:
        collection = Collection(store)
        numbers = range(thread * 15, thread * 15 + 15)
        return [str(collection.insert(fact(n), config=ANN).change) for n in numbers]

    with ThreadPoolExecutor(16) as pool:
        outcomes = [change for changes in pool.map(work, range(16)) for change in changes]

    assert [outcomes.count("added"), outcomes.count("unchanged")] == [120, 120]
    assert kept(store) == expected(240)


def test_two_loops_and_a_thread(store: SQLiteStore) -> None:
    """All three tell the same at the same moment, on two stores over one file."""
    with SQLiteStore.open(store.database.path, index=None, synchronous="normal") as other:

        async def together(which: Any) -> None:
            collection = Collection(which)
            await asyncio.gather(*(collection.ainsert(fact(n), config=ANN) for n in range(40)))

        def one_by_one() -> None:
            for number in range(40):
                Collection(store).insert(fact(number), config=ANN)

        with ThreadPoolExecutor(3) as pool:
            works = [pool.submit(asyncio.run, together(which)) for which in (store, other)]
            works.append(pool.submit(one_by_one))
            for work in works:
                work.result()

    assert kept(store) == expected(40)


class Slow:
    """A check that keeps a change in front until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, candidate: Candidate) -> None:
        if candidate.text == "slow":
            self.begun.set()
            self.go_on.wait()


@pytest.mark.usefixtures("patient")
def test_who_is_cancelled_keeps_nobody_waiting(store: SQLiteStore) -> None:
    """In front, waiting, or at the moment of being called: the others are done."""
    slow = Slow()
    collection = Collection(store, gate=Gate([slow]))

    async def cancelling() -> list[Any]:
        first = asyncio.create_task(collection.ainsert("slow", config=ANN))
        await asyncio.to_thread(slow.begun.wait)
        tasks = [asyncio.create_task(collection.ainsert(fact(n), config=ANN)) for n in range(40)]
        await asyncio.sleep(0)
        for task in (first, *tasks[::3]):
            task.cancel()
        ended = await asyncio.gather(first, *tasks, return_exceptions=True)
        slow.go_on.set()  # its thread is still there
        return ended

    ended = asyncio.run(cancelling())
    collection.insert("Ann sings", config=ANN)

    assert [type(each) is asyncio.CancelledError for each in ended[1:]] == [
        number % 3 == 0 for number in range(40)
    ]
    assert kept(store) == sorted(
        {"ann sings", *(fact(number).lower() for number in range(40) if number % 3)}
    )


@pytest.mark.usefixtures("patient")
def test_a_loop_that_is_closed_keeps_nobody_waiting(store: SQLiteStore) -> None:
    """Who waited in it is passed over."""
    slow = Slow()
    collection = Collection(store, gate=Gate([slow]))
    with ThreadPoolExecutor(1) as pool:
        front = pool.submit(collection.insert, "slow", config=ANN)
        slow.begun.wait()
        loop = asyncio.new_event_loop()
        left = loop.create_task(collection.ainsert("Ann sings", config=ANN))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.set_exception_handler(lambda *_: None)  # that the task is lost is known
        loop.close()
        slow.go_on.set()
        front.result()
    collection.insert("Ann swims", config=ANN)

    assert not left.done()
    assert kept(store) == ["ann swims", "slow"]


def test_who_stands_still_is_overtaken(store: SQLiteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for a check that hangs, whose change is judged again afterwards."""
    monkeypatch.setattr(changes, "_LOCK_WAIT_S", 0.02)
    slow = Slow()
    collection = Collection(store, gate=Gate([slow]))
    with ThreadPoolExecutor(1) as pool:
        front = pool.submit(collection.insert, "slow", config=ANN)
        slow.begun.wait()
        asyncio.run(collection.ainsert("Ann sings", config=ANN))
        collection.insert("Ann swims", config=ANN)
        slow.go_on.set()
        outcome = front.result()

    assert outcome.change == "added"
    assert kept(store) == ["ann sings", "ann swims", "slow"]


@pytest.mark.usefixtures("patient")
def test_who_would_wait_for_itself_goes_at_once(store: SQLiteStore) -> None:
    """A check that keeps something itself, and a call that blocks the loop of who is in front."""
    plain = Collection(store)

    def logs(candidate: Candidate) -> None:
        plain.insert("Something was kept", config=ANN)

    Collection(store, gate=Gate([logs])).insert("Ann sings", config=ANN)

    async def blocking() -> None:
        slow = Slow()
        task = asyncio.create_task(Collection(store, gate=Gate([slow])).ainsert("slow", config=ANN))
        await asyncio.to_thread(slow.begun.wait)
        plain.insert("Ann swims", config=ANN)
        slow.go_on.set()
        await task

    asyncio.run(blocking())

    assert kept(store) == ["ann sings", "ann swims", "slow", "something was kept"]


_TELLS = """
import sys
from perdure.memory.collection import Collection
from perdure.stores import SQLiteStore
with SQLiteStore.open(sys.argv[1], index=None, synchronous="normal") as store:
    facts = Collection(store, ("memories", "ann"))
    for number in range(30):
        facts.insert(f"Ann keeps item{number} in room{number}")
        facts.supersede("home", f"Ann lives in town {sys.argv[2]} {number}")
"""


def test_two_processes(store: SQLiteStore) -> None:
    """What both tell is kept once, and each correction of both is in the history of the memory."""
    facts = Collection(store, ("memories", "ann"))
    facts.insert("Ann lives in Ghent", key="home")
    path = str(store.database.path)
    tells = [[sys.executable, "-c", _TELLS, path, name] for name in ("north", "south")]
    running = [subprocess.Popen(command) for command in tells]

    assert [process.wait() for process in running] == [0, 0]
    assert len(facts.list()) == 31
    assert sorted(version.text for version in facts.history("home")) == sorted(
        ["Ann lives in Ghent"]
        + [f"Ann lives in town {name} {n}" for name in ("north", "south") for n in range(30)]
    )


def other_process(store: SQLiteStore, times: int) -> Any:
    """A check at whose every call, so many times, another process has changed something."""
    left = iter(range(times))

    def check(candidate: Candidate) -> None:
        number = next(left, None)
        if number is not None:
            store.put(NOTE, "memories", {"number": 1_000 + number})

    return check


@pytest.mark.parametrize("call_mode", ["sync", "async"])
def test_a_change_of_another_process(store: SQLiteStore, call_mode: str) -> None:
    """What comes too late is judged again."""
    collection = Collection(store, gate=Gate([other_process(store, 4)]))
    if call_mode == "sync":
        outcome = collection.insert("Ann sings", config=ANN)
    else:
        outcome = asyncio.run(collection.ainsert("Ann sings", config=ANN))

    assert outcome.change == "added"
    assert kept(store) == ["ann sings"]


def test_who_is_always_too_late(store: SQLiteStore) -> None:
    """It is told so in the end, and the next is not kept waiting."""
    collection = Collection(store, gate=Gate([other_process(store, 51)]))
    with pytest.raises(VersionConflict):
        collection.insert("Ann sings", config=ANN)

    assert collection.insert("Ann swims", config=ANN).change == "added"
    assert kept(store) == ["ann swims"]


def test_one_episode_told_differently_at_once(store: SQLiteStore) -> None:
    """It is one: the first adds it, the others put it right."""
    examples = ExampleSelector(store, ("memories", "{user_id}"))

    async def together() -> list[Any]:
        told = (examples.aadd("Late", "Took a bus", why=f"{n}", config=ANN) for n in range(9))
        return list(await asyncio.gather(*told))

    outcomes = [outcome.change for outcome in asyncio.run(together())]

    assert outcomes == ["added", *["updated"] * 8]
    assert kept(store) == ["late"]

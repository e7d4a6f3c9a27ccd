"""Runs that meet on one thread, in threads, tasks and processes: no message is lost."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from tests.backends import BACKENDS, Place
from tests.durability.processes import in_processes, integrity

RUNS = 8
PATIENCE_S = 30.0  # a deadlock fails the test instead of stopping it
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def config_of(thread: str = "t", checkpoint_id: str | None = None) -> RunnableConfig:
    at = {"thread_id": thread, "checkpoint_ns": ""}
    return {"configurable": {**at, "checkpoint_id": checkpoint_id} if checkpoint_id else at}


def answer(state: MessagesState) -> dict[str, Any]:
    asked = state["messages"][-1]
    return {"messages": [AIMessage(f"answer to {asked.content}", id=f"answer-{asked.id}")]}


def built(saver: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    return graph.compile(checkpointer=saver)


def message(number: int) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"message {number}", id=f"m{number}")]}


def in_threads(saver: SQLiteCheckpointer, *, locked: bool) -> None:
    """Run the graph for each message in threads that begin together."""
    gate, graph = threading.Barrier(RUNS), built(saver)

    def run(number: int) -> None:
        gate.wait(PATIENCE_S)
        with saver.lock("t", timeout_s=PATIENCE_S) if locked else nullcontext():
            graph.invoke(message(number), config_of())

    with ThreadPoolExecutor(RUNS) as pool:
        list(pool.map(run, range(RUNS)))


def in_tasks(saver: SQLiteCheckpointer, *, locked: bool) -> None:
    """The same in tasks of one event loop."""
    graph = built(saver)

    async def run(number: int) -> None:
        async with saver.lock("t", timeout_s=PATIENCE_S) if locked else nullcontext():
            await graph.ainvoke(message(number), config_of())

    async def all_at_once() -> None:
        runs = asyncio.gather(*(run(number) for number in range(RUNS)))
        await asyncio.wait_for(runs, PATIENCE_S)

    asyncio.run(all_at_once())


def kept(saver: SQLiteCheckpointer, thread: str = "t") -> set[str]:
    """The ids of the human messages in the thread's head."""
    found = saver.get_tuple(config_of(thread))
    assert found is not None
    return humans(found.checkpoint)


def humans(checkpoint: Checkpoint) -> set[str]:
    messages = checkpoint["channel_values"].get("messages", [])
    return {str(m.id) for m in messages if isinstance(m, HumanMessage)}


def reachable(saver: SQLiteCheckpointer, thread: str = "t") -> set[str]:
    """The ids of the human messages in any checkpoint of the thread."""
    return set().union(*(humans(t.checkpoint) for t in saver.list(config_of(thread))))


def heads(saver: SQLiteCheckpointer, thread: str = "t") -> int:
    return sum(info.is_head for info in saver.checkpoints(thread))


EVERY = {f"m{number}" for number in range(RUNS)}


@pytest.mark.parametrize("run", [in_threads, in_tasks])
def test_runs_under_the_lock(run: Callable[..., None], place: Place) -> None:
    """Eight runs at once on one thread, one after the other: all stays, nothing branches."""
    with place.saver() as saver:
        run(saver, locked=True)
        final, branches = kept(saver), [c for c in saver.checkpoints("t") if c.is_branch]

    assert final == EVERY
    assert branches == []


@pytest.mark.parametrize("run", [in_threads, in_tasks])
def test_runs_at_once(run: Callable[..., None], place: Place) -> None:
    """Eight runs at once without it: one head, and what it lacks is in history, marked."""
    with place.saver() as saver:
        run(saver, locked=False)
        found, count = reachable(saver), heads(saver)
        told = {i.value.id: i.branch for i in saver.history("t") if i.value.type == "human"}
        final = kept(saver)

    assert found == EVERY
    assert count == 1
    assert told.keys() == EVERY
    assert {uid for uid, branch in told.items() if not branch} == final


def talk(place: Place, go: Connection, number: int) -> None:
    """One process: four turns on a thread of its own, and four on one that all share."""
    go.send("ready")
    go.recv()
    with place.saver() as saver:
        graph = built(saver)
        for turn in range(4):
            graph.invoke(message(turn), config_of(f"own {number}"))
            graph.invoke(message(100 * number + turn), config_of("shared"))
    go.send("done")


def first_words(place: Place, go: Connection, number: int) -> None:
    """One process: open the file, which may not be there yet, and put one checkpoint."""
    go.send("ready")
    go.recv()
    with place.saver() as saver:
        saver.put(config_of(f"t{number}"), empty_checkpoint(), {"source": "input"}, {})
    go.send("done")


@needs_fork
def test_processes_share_a_database(place: Place) -> None:
    """Eight processes on it, each on its own thread and all on one: nothing is lost."""
    in_processes(RUNS, talk, place)
    with place.saver() as saver:
        own = [kept(saver, f"own {number}") for number in range(RUNS)]
        shared, count = reachable(saver, "shared"), heads(saver, "shared")
        sound = place.dsn or saver.database.read(integrity)

    assert [{f"m{turn}" for turn in range(4)}] * RUNS == own
    assert {f"m{100 * number + turn}" for number in range(RUNS) for turn in range(4)} == shared
    assert count == 1
    assert sound in (place.dsn, [("ok",)])


@needs_fork
def test_many_processes_create_one_database(place: Place) -> None:
    """Processes that open it at once, where there is nothing yet, all succeed."""
    count = 12 if place.dsn else 40  # each has connections, of which a server has a hundred
    in_processes(count, first_words, place)
    with place.saver() as saver:
        threads = {info.thread_id for info in saver.threads()}

    assert {f"t{number}" for number in range(count)} == threads


def five(saver: SQLiteCheckpointer) -> list[RunnableConfig]:
    """A thread of five checkpoints, the newest first."""
    config, out = config_of(), []
    for step in range(5):
        config = saver.put(config, numbered(), {"source": "loop", "step": step}, {})
        out.append(config)
    return out[::-1]


def numbered() -> Checkpoint:
    return {**empty_checkpoint(), "id": str(uuid6())}


@pytest.mark.parametrize("backend", ["memory", "file", "postgres"])
def test_any_call_within_a_list(backend: str, tmp_path: Path) -> None:
    """While a list is read, the same saver can be read from and written to."""
    with BACKENDS[backend](tmp_path) as saver:
        expected, seen = five(saver), []
        for found in saver.list(config_of()):
            assert found == saver.get_tuple(found.config)
            saver.put(found.config, numbered(), {"source": "fork"}, {})
            saver.put_writes(found.config, [("x", 1)], "task")
            seen.append(found.config)

    assert expected == seen


@pytest.mark.parametrize("backend", ["memory", "file", "postgres"])
def test_any_call_within_an_alist(backend: str, tmp_path: Path) -> None:
    """Within `alist`, also of several at once, the saver can be awaited without a deadlock."""

    async def look(saver: SQLiteCheckpointer) -> list[RunnableConfig]:
        seen = []
        async for found in saver.alist(config_of(), filter={"source": "loop"}):
            again = await saver.aget_tuple(found.config)
            assert again is not None
            assert found.checkpoint == again.checkpoint
            await saver.aput(found.config, numbered(), {"source": "fork"}, {})
            await saver.aput_writes(found.config, [("x", 1)], "task")
            seen.append(found.config)
        return seen

    async def several(saver: SQLiteCheckpointer) -> list[list[RunnableConfig]]:
        looks = asyncio.gather(*(look(saver) for _ in range(RUNS)))
        return await asyncio.wait_for(looks, PATIENCE_S)

    with BACKENDS[backend](tmp_path) as saver:
        expected = five(saver)
        seen = asyncio.run(several(saver))

    assert [expected] * RUNS == seen


@pytest.mark.parametrize("backend", ["memory", "file", "postgres"])
def test_blocking_calls_on_an_event_loop(backend: str, tmp_path: Path) -> None:
    """Blocking methods called on the loop's own thread return, also while tasks are at work."""

    async def blocking(saver: SQLiteCheckpointer) -> Any:
        others = [asyncio.create_task(saver.aget_tuple(config_of())) for _ in range(RUNS)]
        await asyncio.sleep(0)
        stored = saver.put(config_of(), numbered(), {"source": "loop"}, {})
        saver.put_writes(stored, [("x", 1)], "task")
        found = saver.get_tuple(stored)
        await asyncio.gather(*others)
        assert found is not None
        return found.config, found.pending_writes, stored

    with BACKENDS[backend](tmp_path) as saver:
        actual, writes, expected = asyncio.run(blocking(saver))

    assert expected == actual
    assert writes == [("task", "x", 1)]


def test_a_cancelled_put_leaves_the_saver_usable(place: Place) -> None:
    """A cancelled aput is stored or not, whole either way; the next calls work."""

    async def cancel(saver: SQLiteCheckpointer, turns: int) -> None:
        checkpoint = {**numbered(), "channel_values": {"text": "x" * 1000}}
        put = saver.aput(config_of(), checkpoint, {"source": "loop"}, {"text": turns})  # type: ignore[arg-type]
        task = asyncio.create_task(put)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)

    async def cancel_some(saver: SQLiteCheckpointer) -> RunnableConfig:
        await asyncio.gather(*(cancel(saver, n % 4) for n in range(40)))
        return await saver.aput(config_of(), numbered(), {"source": "loop"}, {})

    with place.saver() as saver:
        expected = asyncio.run(cancel_some(saver))
        head = saver.get_tuple(config_of())
        values = [t.checkpoint["channel_values"] for t in saver.list(config_of())]

    assert head is not None
    assert expected == head.config
    assert [{"text": "x" * 1000}] * (len(values) - 1) == values[1:]

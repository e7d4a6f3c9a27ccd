"""Runs that overlap on one thread, in OS threads, tasks and processes, lose no message."""

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
from tests.durability.processes import run_in_processes, run_integrity_check

RUNS = 8
PATIENCE_S = 30.0  # a deadlock fails the test instead of stopping it
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def make_config(thread: str = "t", checkpoint_id: str | None = None) -> RunnableConfig:
    address = {"thread_id": thread, "checkpoint_ns": ""}
    return {
        "configurable": {**address, "checkpoint_id": checkpoint_id} if checkpoint_id else address
    }


def answer_last_message(state: MessagesState) -> dict[str, Any]:
    question = state["messages"][-1]
    return {"messages": [AIMessage(f"answer to {question.content}", id=f"answer-{question.id}")]}


def build_graph(saver: Any) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer_last_message)
    graph.add_edge(START, "answer")
    return graph.compile(checkpointer=saver)


def human_input(number: int) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"message {number}", id=f"m{number}")]}


def run_in_threads(saver: SQLiteCheckpointer, *, locked: bool) -> None:
    """Run the graph for each message in OS threads that start together."""
    gate, graph = threading.Barrier(RUNS), build_graph(saver)

    def run(number: int) -> None:
        gate.wait(PATIENCE_S)
        with saver.lock("t", timeout_s=PATIENCE_S) if locked else nullcontext():
            graph.invoke(human_input(number), make_config())

    with ThreadPoolExecutor(RUNS) as pool:
        list(pool.map(run, range(RUNS)))


def run_in_tasks(saver: SQLiteCheckpointer, *, locked: bool) -> None:
    """Run the graph for each message in tasks of one event loop."""
    graph = build_graph(saver)

    async def run(number: int) -> None:
        async with saver.lock("t", timeout_s=PATIENCE_S) if locked else nullcontext():
            await graph.ainvoke(human_input(number), make_config())

    async def all_at_once() -> None:
        runs = asyncio.gather(*(run(number) for number in range(RUNS)))
        await asyncio.wait_for(runs, PATIENCE_S)

    asyncio.run(all_at_once())


def read_head_ids(saver: SQLiteCheckpointer, thread: str = "t") -> set[str]:
    """Return the ids of the human messages in the thread's head."""
    stored = saver.get_tuple(make_config(thread))
    assert stored is not None
    return human_ids(stored.checkpoint)


def human_ids(checkpoint: Checkpoint) -> set[str]:
    messages = checkpoint["channel_values"].get("messages", [])
    return {str(m.id) for m in messages if isinstance(m, HumanMessage)}


def read_all_ids(saver: SQLiteCheckpointer, thread: str = "t") -> set[str]:
    """Return the ids of the human messages in any checkpoint of the thread."""
    return set().union(*(human_ids(t.checkpoint) for t in saver.list(make_config(thread))))


def count_heads(saver: SQLiteCheckpointer, thread: str = "t") -> int:
    return sum(info.is_head for info in saver.checkpoints(thread))


ALL_IDS = {f"m{number}" for number in range(RUNS)}


@pytest.mark.parametrize("run", [run_in_threads, run_in_tasks])
def test_concurrent_runs_under_the_lock_keep_all_messages_without_branches(
    run: Callable[..., None], place: Place
) -> None:
    """Eight runs on one thread are executed one after the other."""
    with place.saver() as saver:
        run(saver, locked=True)
        final, branches = read_head_ids(saver), [c for c in saver.checkpoints("t") if c.is_branch]

    assert final == ALL_IDS
    assert branches == []


@pytest.mark.parametrize("run", [run_in_threads, run_in_tasks])
def test_concurrent_runs_without_the_lock_keep_one_head_and_mark_branches(
    run: Callable[..., None], place: Place
) -> None:
    """Messages that the head lacks are in the history and marked as a branch."""
    with place.saver() as saver:
        run(saver, locked=False)
        all_ids, count = read_all_ids(saver), count_heads(saver)
        branch_by_id = {i.value.id: i.branch for i in saver.history("t") if i.value.type == "human"}
        final = read_head_ids(saver)

    assert all_ids == ALL_IDS
    assert count == 1
    assert branch_by_id.keys() == ALL_IDS
    assert {uid for uid, branch in branch_by_id.items() if not branch} == final


def run_turns(place: Place, go: Connection, number: int) -> None:
    """Run four turns on a thread of this process, and four on a thread that all processes share."""
    go.send("ready")
    go.recv()
    with place.saver() as saver:
        graph = build_graph(saver)
        for turn in range(4):
            graph.invoke(human_input(turn), make_config(f"own {number}"))
            graph.invoke(human_input(100 * number + turn), make_config("shared"))
    go.send("done")


def put_first_checkpoint(place: Place, go: Connection, number: int) -> None:
    """Open the database, which may not exist yet, and put one checkpoint."""
    go.send("ready")
    go.recv()
    with place.saver() as saver:
        saver.put(make_config(f"t{number}"), empty_checkpoint(), {"source": "input"}, {})
    go.send("done")


@needs_fork
def test_concurrent_processes_on_one_database_lose_no_message(place: Place) -> None:
    """Each of eight processes uses its own thread and one that all share."""
    run_in_processes(RUNS, run_turns, place)
    with place.saver() as saver:
        own = [read_head_ids(saver, f"own {number}") for number in range(RUNS)]
        shared, count = read_all_ids(saver, "shared"), count_heads(saver, "shared")
        sound = place.dsn or saver.database.read(run_integrity_check)

    assert [{f"m{turn}" for turn in range(4)}] * RUNS == own
    assert {f"m{100 * number + turn}" for number in range(RUNS) for turn in range(4)} == shared
    assert count == 1
    assert sound in (place.dsn, [("ok",)])


@needs_fork
def test_many_processes_can_create_one_database_at_once(place: Place) -> None:
    """All processes succeed in opening a database that does not exist yet."""
    count = 12 if place.dsn else 40  # each process has connections, and a server allows a hundred
    run_in_processes(count, put_first_checkpoint, place)
    with place.saver() as saver:
        threads = {info.thread_id for info in saver.threads()}

    assert {f"t{number}" for number in range(count)} == threads


def put_five_checkpoints(saver: SQLiteCheckpointer) -> list[RunnableConfig]:
    """Put a thread of five checkpoints, and return their configs, newest first."""
    config, out = make_config(), []
    for step in range(5):
        config = saver.put(config, make_checkpoint(), {"source": "loop", "step": step}, {})
        out.append(config)
    return out[::-1]


def make_checkpoint() -> Checkpoint:
    return {**empty_checkpoint(), "id": str(uuid6())}


@pytest.mark.parametrize("backend", ["memory", "file", "postgres"])
def test_saver_can_read_and_write_while_iterating_list(backend: str, tmp_path: Path) -> None:
    with BACKENDS[backend](tmp_path) as saver:
        expected, configs = put_five_checkpoints(saver), []
        for checkpoint_tuple in saver.list(make_config()):
            assert checkpoint_tuple == saver.get_tuple(checkpoint_tuple.config)
            saver.put(checkpoint_tuple.config, make_checkpoint(), {"source": "fork"}, {})
            saver.put_writes(checkpoint_tuple.config, [("x", 1)], "task")
            configs.append(checkpoint_tuple.config)

    assert expected == configs


@pytest.mark.parametrize("backend", ["memory", "file", "postgres"])
def test_saver_can_be_awaited_while_iterating_alist(backend: str, tmp_path: Path) -> None:
    """Several iterations at once do not cause a deadlock."""

    async def iterate_and_write(saver: SQLiteCheckpointer) -> list[RunnableConfig]:
        configs = []
        async for checkpoint_tuple in saver.alist(make_config(), filter={"source": "loop"}):
            read_tuple = await saver.aget_tuple(checkpoint_tuple.config)
            assert read_tuple is not None
            assert checkpoint_tuple.checkpoint == read_tuple.checkpoint
            await saver.aput(checkpoint_tuple.config, make_checkpoint(), {"source": "fork"}, {})
            await saver.aput_writes(checkpoint_tuple.config, [("x", 1)], "task")
            configs.append(checkpoint_tuple.config)
        return configs

    async def iterate_concurrently(saver: SQLiteCheckpointer) -> list[list[RunnableConfig]]:
        looks = asyncio.gather(*(iterate_and_write(saver) for _ in range(RUNS)))
        return await asyncio.wait_for(looks, PATIENCE_S)

    with BACKENDS[backend](tmp_path) as saver:
        expected = put_five_checkpoints(saver)
        configs = asyncio.run(iterate_concurrently(saver))

    assert [expected] * RUNS == configs


@pytest.mark.parametrize("backend", ["memory", "file", "postgres"])
def test_blocking_calls_of_saver_return_on_an_event_loop(backend: str, tmp_path: Path) -> None:
    """Blocking methods may be called in the loop's own thread while tasks are running."""

    async def call_blocking_methods(saver: SQLiteCheckpointer) -> Any:
        others = [asyncio.create_task(saver.aget_tuple(make_config())) for _ in range(RUNS)]
        await asyncio.sleep(0)
        stored = saver.put(make_config(), make_checkpoint(), {"source": "loop"}, {})
        saver.put_writes(stored, [("x", 1)], "task")
        read_tuple = saver.get_tuple(stored)
        await asyncio.gather(*others)
        assert read_tuple is not None
        return read_tuple.config, read_tuple.pending_writes, stored

    with BACKENDS[backend](tmp_path) as saver:
        actual, writes, expected = asyncio.run(call_blocking_methods(saver))

    assert expected == actual
    assert writes == [("task", "x", 1)]


def test_saver_stays_usable_after_cancelled_puts(place: Place) -> None:
    """A cancelled aput is stored completely or not at all."""

    async def put_and_cancel(saver: SQLiteCheckpointer, turns: int) -> None:
        checkpoint = {**make_checkpoint(), "channel_values": {"text": "x" * 1000}}
        put = saver.aput(make_config(), checkpoint, {"source": "loop"}, {"text": turns})  # type: ignore[arg-type]
        task = asyncio.create_task(put)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)

    async def cancel_some(saver: SQLiteCheckpointer) -> RunnableConfig:
        await asyncio.gather(*(put_and_cancel(saver, n % 4) for n in range(40)))
        return await saver.aput(make_config(), make_checkpoint(), {"source": "loop"}, {})

    with place.saver() as saver:
        expected = asyncio.run(cancel_some(saver))
        head = saver.get_tuple(make_config())
        values = [t.checkpoint["channel_values"] for t in saver.list(make_config())]

    assert head is not None
    assert expected == head.config
    assert [{"text": "x" * 1000}] * (len(values) - 1) == values[1:]

"""`on_conflict="wait"`: however a run ends, the next one on its thread goes on."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import BlockingCallInLoop, ConcurrentUpdate

THREAD: Any = {"configurable": {"thread_id": "t"}}
PATIENCE_S = 30.0


def answer(state: MessagesState) -> dict[str, Any]:
    asked = state["messages"][-1].text
    if asked == "raise":
        raise RuntimeError("the node failed")
    if asked == "interrupt":
        return {"messages": [("ai", interrupt("which?"))]}
    return {"messages": [("ai", f"answer to {asked}")]}


def built(saver: SQLiteCheckpointer) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    return graph.compile(checkpointer=saver)


def says(text: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(text)]}


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Any]:
    with SQLiteCheckpointer.open(tmp_path / "x.db", on_conflict="wait") as saver:
        yield built(saver)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is left in cycles stays there: nothing may depend on the garbage collector's mood."""
    gc.disable()
    yield
    gc.enable()


async def soon(run: Any) -> Any:
    return await asyncio.wait_for(run, PATIENCE_S)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("ends", ["raise", "interrupt", "normally"])
def test_a_run_that_ended_lets_the_next_go_on(ends: str, graph: Any) -> None:
    """Also when its exception is kept, in another task, and with the collector off."""

    async def scenario() -> list[str]:
        kept = await asyncio.gather(
            asyncio.create_task(graph.ainvoke(says(ends), THREAD)), return_exceptions=True
        )
        state = await soon(asyncio.create_task(graph.ainvoke(says("next"), THREAD)))
        assert kept
        return [m.text for m in state["messages"]]

    assert asyncio.run(scenario())[-2:] == ["next", "answer to next"]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("ends", ["raise", "interrupt"])
def test_the_same_for_threads(ends: str, graph: Any) -> None:
    """A run in another thread goes on after one that failed or was interrupted."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        first = one.submit(graph.invoke, says(ends), THREAD)
        kept = first.exception(PATIENCE_S)
        state = other.submit(graph.invoke, says("next"), THREAD).result(PATIENCE_S)

    assert (kept is None) is (ends == "interrupt")
    assert state["messages"][-1].text == "answer to next"


def test_an_interrupt_is_answered(graph: Any) -> None:
    """Human in the loop: the run that resumes is not kept waiting by the one it resumes."""

    async def scenario() -> str:
        await asyncio.create_task(graph.ainvoke(says("interrupt"), THREAD))
        resume = graph.ainvoke(Command(resume="this one"), THREAD)
        state = await soon(asyncio.create_task(resume))
        return str(state["messages"][-1].text)

    assert asyncio.run(scenario()) == "this one"


def test_runs_that_were_cancelled_or_went_on_too_long(graph: Any) -> None:
    """Neither stores an error; their task is done all the same."""

    async def scenario() -> str:
        cancelled = asyncio.create_task(graph.ainvoke(says("one"), THREAD))
        await asyncio.sleep(0)
        cancelled.cancel()
        limited = {**THREAD, "recursion_limit": 0}
        for run in (cancelled, asyncio.create_task(graph.ainvoke(says("two"), limited))):
            with pytest.raises((asyncio.CancelledError, GraphRecursionError, ValueError)):
                await soon(run)
        state = await soon(asyncio.create_task(graph.ainvoke(says("next"), THREAD)))
        return str(state["messages"][-1].text)

    assert asyncio.run(scenario()) == "answer to next"


def test_an_iterator_that_is_left_open_is_waited_for_in_vain(tmp_path: Path) -> None:
    """It is a run that goes on; after `wait_s` the error says so. The same task may go on."""

    async def scenario(graph: Any) -> str:
        left_open = graph.astream(says("one"), THREAD)
        await anext(left_open)
        with pytest.raises(ConcurrentUpdate, match="left open"):
            await asyncio.create_task(graph.ainvoke(says("two"), THREAD))
        state = await graph.ainvoke(says("three"), THREAD)
        await left_open.aclose()
        return str(state["messages"][-1].text)

    with SQLiteCheckpointer.open(tmp_path / "x.db", on_conflict="wait", wait_s=0.2) as saver:
        assert asyncio.run(scenario(built(saver))) == "answer to three"


def test_waiting_would_stop_the_event_loop(tmp_path: Path) -> None:
    """A blocking run on the loop is refused instead of waiting for what it keeps from going on."""

    async def scenario(graph: Any) -> None:
        left_open = graph.astream(says("one"), THREAD)
        await anext(left_open)

        async def blocking() -> None:
            graph.invoke(says("two"), THREAD)

        with pytest.raises(BlockingCallInLoop, match="ainvoke"):
            await asyncio.create_task(blocking())
        await left_open.aclose()

    with SQLiteCheckpointer.open(tmp_path / "x.db", on_conflict="wait") as saver:
        asyncio.run(scenario(built(saver)))


def test_a_branch_nobody_asked_for_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With "fork" the run that lost says so in the log; a fork that was asked for does not."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(state: MessagesState) -> dict[str, Any]:
        if state["messages"][-1].text == "slow":
            begun.set()
            go_on.wait(PATIENCE_S)
        return {"messages": [("ai", "ok")]}

    builder = StateGraph(MessagesState).add_node("slow", slow).add_edge(START, "slow")
    with (
        SQLiteCheckpointer.open(tmp_path / "x.db") as saver,
        ThreadPoolExecutor(1) as pool,
        caplog.at_level(logging.WARNING, "perdure"),
    ):
        graph: Any = builder.compile(checkpointer=saver)
        graph.invoke(says("first"), THREAD)
        old = graph.get_state(THREAD).config
        run = pool.submit(graph.invoke, says("slow"), THREAD, durability="sync")
        begun.wait(PATIENCE_S)
        asked = graph.update_state(old, {"messages": [("human", "x")]}, as_node="slow")
        go_on.set()
        run.result(PATIENCE_S)

    assert "thread 't': another run moved on" in caplog.text
    assert asked["configurable"]["checkpoint_id"] not in caplog.text

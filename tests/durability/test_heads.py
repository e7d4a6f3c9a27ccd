"""A run that lost the head of its thread is told so, whatever drives it or looks around."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConcurrentUpdate

THREAD: Any = {"configurable": {"thread_id": "t"}}
Step = Callable[[Any], Awaitable[Any]]


def built(saver: SQLiteCheckpointer) -> Any:
    """Three steps; each answers the last human message."""

    def answer(state: MessagesState) -> dict[str, Any]:
        asked = [m.text for m in state["messages"] if m.type == "human"][-1]
        return {"messages": [("ai", f"answer to {asked}")]}

    builder = StateGraph(MessagesState)
    for before, step in ((START, "a"), ("a", "b"), ("b", "c")):
        builder.add_node(step, answer).add_edge(before, step)
    return builder.compile(checkpointer=saver)


def says(text: str) -> Any:
    return {"messages": [("human", text)]}


def texts(graph: Any) -> list[str]:
    return [m.text for m in graph.get_state(THREAD).values["messages"]]


def elsewhere(work: Any, *args: Any, **named: Any) -> Any:
    """Work done in a thread and context of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args, **named).result()


async def in_threads(stream: Any) -> Any:
    """Each step in a thread, with a copy of the context, as web frameworks do."""
    return await asyncio.to_thread(next, stream, None)


async def in_tasks(stream: Any) -> Any:
    """Each step in a task of its own, as `asyncio.wait_for` of Python 3.11 does."""
    return await asyncio.create_task(anext(stream, None))


WON = ["two", *["answer to two"] * 3]


@pytest.mark.parametrize("step", [in_threads, in_tasks])
@pytest.mark.parametrize("on_conflict", ["fork", "error"])
def test_a_stream_driven_from_many_contexts(on_conflict: Any, step: Step, tmp_path: Path) -> None:
    """Whoever calls for its next step, a run that lost the head does not take it back."""

    async def scenario(graph: Any) -> None:
        stream = graph.stream if step is in_threads else graph.astream
        first = stream(says("one"), THREAD, durability="sync")
        await step(first)
        await step(first)
        await asyncio.create_task(graph.ainvoke(says("two"), THREAD))
        while await step(first):
            pass

    with SQLiteCheckpointer.open(tmp_path / "x.db", on_conflict=on_conflict) as saver:
        graph = built(saver)
        if on_conflict == "error":
            with pytest.raises(ConcurrentUpdate):
                asyncio.run(scenario(graph))
        else:
            asyncio.run(scenario(graph))

        assert texts(graph) == ["one", *["answer to one"] * 2, *WON]


def look_at_history(graph: Any) -> None:
    list(graph.get_state_history(THREAD))


def look_at_many(graph: Any) -> None:
    for number in range(100):
        graph.get_state({"configurable": {"thread_id": str(number)}})


def look_at_the_past(graph: Any) -> None:
    for found in list(graph.get_state_history(THREAD)):
        graph.get_state(found.config)


@pytest.mark.parametrize("look", [look_at_history, look_at_many, look_at_the_past])
def test_a_caller_that_looks_around_does_not_turn_the_check_off(
    look: Callable[[Any], None], tmp_path: Path
) -> None:
    """What the loop over a stream reads is not what the run set out from."""

    def drive(graph: Any) -> None:
        stream = graph.stream(says("one"), THREAD, durability="sync")
        next(stream)
        look(graph)
        elsewhere(graph.invoke, says("two"), THREAD)
        list(stream)

    with SQLiteCheckpointer.open(tmp_path / "x.db", on_conflict="error") as saver:
        graph = built(saver)
        graph.invoke(says("zero"), THREAD)
        with pytest.raises(ConcurrentUpdate):
            drive(graph)

        assert texts(graph)[-4:] == WON


@pytest.mark.parametrize("look", [look_at_history, look_at_many, look_at_the_past])
def test_a_node_that_looks_around_does_not_either(
    look: Callable[[Any], None], tmp_path: Path
) -> None:
    """The same for what a node reads, with the config of the run it is part of."""

    def nosy(state: MessagesState) -> dict[str, Any]:
        look(graph)
        elsewhere(other.invoke, says("two"), THREAD)
        return {"messages": [("ai", "lost")]}

    with SQLiteCheckpointer.open(tmp_path / "x.db", on_conflict="error") as saver:
        builder = StateGraph(MessagesState).add_node("nosy", nosy).add_edge(START, "nosy")
        graph: Any = builder.compile(checkpointer=saver)
        other = built(saver)
        other.invoke(says("zero"), THREAD)
        with pytest.raises(ConcurrentUpdate):
            graph.invoke(says("one"), THREAD, durability="sync")

        assert texts(other)[-4:] == WON


def test_a_run_that_was_not_seen_reading_contests(tmp_path: Path) -> None:
    """A put upon what is no longer the head conflicts, even if nobody saw the run begin."""

    def writer(chunk: Any) -> None: ...

    with SQLiteCheckpointer.open(tmp_path / "x.db", on_conflict="error") as saver:
        old = saver.put(THREAD, empty_checkpoint(), {"source": "loop"}, {})
        saver.put(old, empty_checkpoint(), {"source": "loop"}, {})
        runtime: Any = Runtime(stream_writer=writer)
        running: Any = {"configurable": {**old["configurable"], "runtime": runtime}}
        with pytest.raises(ConcurrentUpdate):
            saver.put(running, empty_checkpoint(), {"source": "loop"}, {})

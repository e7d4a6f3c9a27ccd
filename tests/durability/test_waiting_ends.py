"""`on_conflict="wait"`: a run is over when it is over, not before, and everybody hears of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import operator
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.callbacks import CallbackManager
from langchain_core.runnables import RunnableConfig, RunnablePassthrough
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, interrupt

from perdure.checkpointers import SQLiteCheckpointer, waiting
from perdure.errors import ConcurrentUpdate, StorageUnavailable

THREAD: Any = {"configurable": {"thread_id": "t"}}
PATIENCE_S = 30.0
kept: list[Any] = []


class Steps:
    """A graph of steps that a test holds up, and that answer the last human message."""

    def __init__(self, saver: Any, count: int = 1, **options: Any) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        builder = StateGraph(MessagesState)
        for number in range(count):
            builder.add_node(str(number), self.step)
        builder.add_edge(START, "0")
        for number in range(1, count):
            builder.add_edge(str(number - 1), str(number))
        self.graph: Any = builder.compile(checkpointer=saver, **options)

    def step(self, state: MessagesState, runtime: Runtime[Any]) -> dict[str, Any]:
        asked = [m.text for m in state["messages"] if m.type == "human"][-1]
        if asked == "slow":
            self.begun.set()
            self.go_on.wait(PATIENCE_S)
        if asked == "keep":
            kept.append(runtime)
        return {"messages": [("ai", object() if asked == "unstorable" else f"to {asked}")]}


def says(text: str) -> Any:
    return {"messages": [("human", text)]}


def texts(graph: Any) -> list[str]:
    return [m.text for m in graph.get_state(THREAD).values["messages"]]


def opened(tmp_path: Path, wait_s: float = PATIENCE_S) -> SQLiteCheckpointer:
    return SQLiteCheckpointer.open(tmp_path / "x.db", on_conflict="wait", wait_s=wait_s)


def submit(work: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
    """Work in a thread of its own, which ends with it."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work(*args, **named))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


ENDS = {
    "keeps its runtime": ("keep", {}),
    "is out of steps": ("x", {"recursion_limit": 1}),
    "writes what cannot be stored": ("unstorable", {}),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_end_without_a_trace(is_async: bool, end: str, tmp_path: Path) -> None:
    """Nothing is stored, exception and runtime are kept, task or thread live on: it is over."""
    said, options = ENDS[end]

    async def in_one_task(graph: Any) -> list[str]:
        await asyncio.gather(graph.ainvoke(says(said), THREAD | options), return_exceptions=True)
        state = await asyncio.create_task(graph.ainvoke(says("next"), THREAD))
        return [m.text for m in state["messages"]]

    with opened(tmp_path) as saver, ThreadPoolExecutor(1) as pool:
        graph = Steps(saver, count=2).graph
        if is_async:
            found = asyncio.run(asyncio.wait_for(in_one_task(graph), PATIENCE_S))
        else:
            first = pool.submit(graph.invoke, says(said), THREAD | options)
            first.exception(PATIENCE_S)
            submit(graph.invoke, says("next"), THREAD).result(PATIENCE_S)
            found = texts(graph)

    assert found[-2:] == ["to next", "to next"]


def test_one_who_gave_up_does_not_become_the_holder(tmp_path: Path) -> None:
    """A waiter that timed out, with its exception kept, is out of the queue."""
    with opened(tmp_path, wait_s=0.1) as saver:
        steps = Steps(saver)
        first = submit(steps.graph.invoke, says("slow"), THREAD)
        steps.begun.wait(PATIENCE_S)
        second = submit(steps.graph.invoke, says("two"), THREAD)
        error = second.exception(PATIENCE_S)
        steps.go_on.set()
        first.result(PATIENCE_S)
        submit(steps.graph.invoke, says("three"), THREAD).result(PATIENCE_S)

        assert isinstance(error, ConcurrentUpdate)
        assert texts(steps.graph) == ["slow", "to slow", "three", "to three"]


def test_one_who_was_interrupted_does_not_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for one whom an exception from outside (Ctrl-C, a signal) took out of its wait."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path) as saver:
        steps = Steps(saver)
        first = submit(steps.graph.invoke, says("slow"), THREAD)
        steps.begun.wait(PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(waiting, "wait_for", interrupted)
            error = submit(steps.graph.invoke, says("two"), THREAD).exception(PATIENCE_S)
        steps.go_on.set()
        first.result(PATIENCE_S)
        submit(steps.graph.invoke, says("three"), THREAD).result(PATIENCE_S)

        assert isinstance(error, KeyboardInterrupt)
        assert texts(steps.graph) == ["slow", "to slow", "three", "to three"]


@pytest.mark.parametrize("is_async", [False, True])
def test_closing_wakes_those_who_wait(is_async: bool, tmp_path: Path) -> None:
    """A closed checkpointer says so to runs that wait, at once."""
    saver = opened(tmp_path, wait_s=600.0)
    steps = Steps(saver)
    first = submit(steps.graph.invoke, says("slow"), THREAD)
    steps.begun.wait(PATIENCE_S)
    if is_async:
        second = submit(asyncio.run, steps.graph.ainvoke(says("two"), THREAD))
    else:
        second = submit(steps.graph.invoke, says("two"), THREAD)
    assert saver._queue is not None
    while not saver._queue._waiting:
        threading.Event().wait(0.01)
    saver.close()
    steps.go_on.set()

    assert isinstance(second.exception(PATIENCE_S), StorageUnavailable)
    assert isinstance(first.exception(PATIENCE_S), StorageUnavailable)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_was_closed_under_a_run(tmp_path: Path) -> None:
    """A run whose event loop is closed will never go on; the next does not wait for it."""
    with opened(tmp_path) as saver:
        steps = Steps(saver)
        loop = asyncio.new_event_loop()
        stuck = loop.create_task(steps.graph.ainvoke(says("slow"), THREAD))
        while not steps.begun.is_set():
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        submit(steps.graph.invoke, says("next"), THREAD).result(PATIENCE_S)
        steps.go_on.set()

        assert not stuck.done()
        assert texts(steps.graph)[-2:] == ["next", "to next"]
    del stuck
    gc.collect()  # it complains while the warnings are looked away from


def test_a_stream_within_a_chain_is_waited_for(tmp_path: Path) -> None:
    """langchain drives a chain's stream from a new task at each step; the run is one."""

    async def scenario(graph: Any) -> None:
        stream = (RunnablePassthrough() | graph).astream(says("one"), THREAD)
        await anext(stream)
        other = asyncio.create_task(graph.ainvoke(says("two"), THREAD))
        async for _ in stream:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(other, PATIENCE_S)

    with opened(tmp_path) as saver:
        graph = Steps(saver, count=2).graph
        asyncio.run(scenario(graph))

        assert texts(graph) == ["one", "to one", "to one", "two", "to two", "to two"]


def test_two_streams_that_one_thread_drives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cannot wait for the first, which the same thread would drive: they overlap."""
    monkeypatch.setattr(waiting, "LOOK_S", 0.1)
    with opened(tmp_path) as saver, caplog.at_level(logging.WARNING, "perdure"):
        graph = Steps(saver, count=2).graph
        one = graph.stream(says("one"), THREAD)
        next(one)
        graph.invoke(says("two"), THREAD)
        list(one)
        found = {
            m.text
            for t in saver.list(THREAD)
            for m in t.checkpoint["channel_values"].get("messages", [])
        }

        assert texts(graph)[-3:] == ["two", "to two", "to two"]
        assert found == {"one", "to one", "two", "to two"}
    assert "another run moved on" in caplog.text


def test_a_node_that_failed_and_was_handled(tmp_path: Path) -> None:
    """A run stores the error of a node that has an error handler, and goes on."""
    handling, go_on = threading.Event(), threading.Event()

    def fails(state: MessagesState) -> dict[str, Any]:
        if state["messages"][-1].text == "one":
            raise RuntimeError("the node failed")
        return {"messages": [("ai", "to two")]}

    def handles(state: MessagesState) -> dict[str, Any]:
        handling.set()
        go_on.wait(PATIENCE_S)
        return {"messages": [("ai", "handled")]}

    with opened(tmp_path) as saver:
        builder = StateGraph(MessagesState).add_node("fails", fails, error_handler=handles)
        graph: Any = builder.add_edge(START, "fails").compile(checkpointer=saver)
        first = submit(graph.invoke, says("one"), THREAD)
        handling.wait(PATIENCE_S)
        second = submit(graph.invoke, says("two"), THREAD)
        go_on.set()
        for run in (first, second):
            run.result(PATIENCE_S)

        assert texts(graph) == ["one", "handled", "two", "to two"]


class Values(TypedDict, total=False):
    values: Annotated[list[str], operator.add]


def test_an_interrupt_beside_a_node_at_work(tmp_path: Path) -> None:
    """One node asks, the other works on: the run that answers waits, and runs nothing twice."""
    asked, go_on = threading.Event(), threading.Event()
    worked: list[str] = []

    def ask(state: Values) -> Values:
        asked.set()
        return {"values": [interrupt("which?")]}

    def work(state: Values) -> Values:
        worked.append("begun")
        go_on.wait(PATIENCE_S)
        return {"values": ["worked"]}

    with opened(tmp_path) as saver:
        builder = StateGraph(Values).add_node("ask", ask).add_node("work", work)
        graph: Any = builder.add_edge(START, "ask").add_edge(START, "work").compile(saver)
        first = submit(graph.invoke, {"values": []}, THREAD, durability="sync")
        asked.wait(PATIENCE_S)
        second = submit(graph.invoke, Command(resume="this"), THREAD)
        go_on.set()
        first.result(PATIENCE_S)

        assert second.result(PATIENCE_S) == {"values": ["this", "worked"]}
        assert worked == ["begun"]


def test_a_run_inside_another_does_not_wait_for_it(tmp_path: Path) -> None:
    """A node that runs a graph on the thread it is on goes on at once: a branch."""

    def outer(state: MessagesState) -> dict[str, Any]:
        inner.invoke(says("inner"), {"configurable": {"thread_id": "t", "checkpoint_ns": ""}})
        return {"messages": [("ai", "outer")]}

    with opened(tmp_path, wait_s=600.0) as saver:
        inner = Steps(saver).graph
        builder = StateGraph(MessagesState).add_node("outer", outer).add_edge(START, "outer")
        graph: Any = builder.compile(checkpointer=saver)
        run = submit(graph.invoke, says("one"), THREAD)

        assert run.result(PATIENCE_S)["messages"][-1].text == "outer"


def test_looking_at_another_thread_takes_no_hold_of_it(tmp_path: Path) -> None:
    """Two runs whose nodes read each other's thread do not wait for each other."""
    both = threading.Barrier(2)

    def look(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        both.wait(PATIENCE_S)
        other = {"a": "b", "b": "a"}[config["configurable"]["thread_id"]]
        graph.get_state({"configurable": {"thread_id": other, "checkpoint_ns": ""}})
        return {"messages": [("ai", "looked")]}

    with opened(tmp_path, wait_s=600.0) as saver:
        builder = StateGraph(MessagesState).add_node("look", look).add_edge(START, "look")
        graph: Any = builder.compile(checkpointer=saver)
        runs = [submit(graph.invoke, says("x"), {"configurable": {"thread_id": i}}) for i in "ab"]

        assert [r.result(PATIENCE_S)["messages"][-1].text for r in runs] == ["looked"] * 2


def test_callbacks_that_were_built_by_hand(tmp_path: Path) -> None:
    """No callback tells the end of such a run; it holds its thread while it shows life."""
    silent: Any = {**THREAD, "callbacks": CallbackManager([]), "recursion_limit": 1}
    with opened(tmp_path) as saver, ThreadPoolExecutor(1) as pool:
        graph = Steps(saver, count=2).graph
        first = pool.submit(graph.invoke, says("one"), silent)
        error = first.exception(PATIENCE_S)
        submit(graph.invoke, says("next"), THREAD).result(PATIENCE_S)

        assert error is not None
        assert texts(graph)[-2:] == ["to next", "to next"]


def test_an_update_does_not_wait(tmp_path: Path) -> None:
    """`update_state` is no run: what it changes during one makes that run a branch."""
    with opened(tmp_path, wait_s=600.0) as saver:
        steps = Steps(saver)
        steps.graph.invoke(says("zero"), THREAD)
        run = submit(steps.graph.invoke, says("slow"), THREAD, durability="sync")
        steps.begun.wait(PATIENCE_S)
        steps.graph.update_state(THREAD, says("note"), as_node="0")
        steps.go_on.set()

        assert run.result(PATIENCE_S)["messages"][-1].text == "to slow"
        assert texts(steps.graph) == ["zero", "to zero", "slow", "note"]


def test_nothing_is_kept_of_runs_that_are_over(tmp_path: Path) -> None:
    """However many threads there were, no holder and no queue is left."""

    def asks(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("ai", interrupt("which?"))]}

    with opened(tmp_path) as saver:
        builder = StateGraph(MessagesState).add_node("asks", asks).add_edge(START, "asks")
        graph: Any = builder.compile(checkpointer=saver)
        for number in range(20):
            graph.invoke(says("x"), {"configurable": {"thread_id": str(number)}})
        gc.collect()
        queue = saver._queue

    assert queue is not None
    assert (queue._holders, queue._waiting, list(queue._ended)) == ({}, {}, [])

"""Abandoned, cancelled and overtaken runs, and clocks that jump, lose no acknowledged turn."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from tests.backends import Place
from tests.durability.processes import run_in_processes
from tests.rounds import rounds

TURNS = rounds(12)
PATIENCE_S = 60.0  # a deadlock fails the test instead of stopping it
DAY_NS = 86_400_000_000_000
THREAD: Any = {"configurable": {"thread_id": "t"}}
Build = Callable[[SQLiteCheckpointer], Any]
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


# -- graphs


class ScriptedModel(BaseChatModel):
    """A model that answers a person with two tool calls, and tool results with words."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> ScriptedModel:
        return self

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        read_human_texts = messages[-1].type == "human"
        call = {"name": "look_up", "args": {"word": messages[-1].text}, "type": "tool_call"}
        calls = (
            [{**call, "id": f"{len(messages)}-{n}"} for n in range(2)] if read_human_texts else []
        )
        message = AIMessage("" if read_human_texts else "found", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool
async def look_up(word: str) -> str:
    """Look a word up."""
    await asyncio.sleep(0)
    return f"of {word}"


def agent(saver: SQLiteCheckpointer) -> Any:
    """Build an agent with a tool, as langchain does."""
    return create_agent(ScriptedModel(), [look_up], checkpointer=saver)


async def answer_last_message(state: MessagesState) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"messages": [("ai", f"answer to {state['messages'][-1].text}")]}


def two_nodes(saver: SQLiteCheckpointer) -> Any:
    """Build a graph of two nodes, one after the other, each with an answer."""
    builder = StateGraph(MessagesState)
    builder.add_node("a", answer_last_message).add_node("b", answer_last_message)
    builder.add_edge(START, "a").add_edge("a", "b")
    return builder.compile(checkpointer=saver)


def human_input(text: str) -> Any:
    return {"messages": [("human", text)]}


async def read_human_texts(graph: Any) -> list[str]:
    """Return the texts of human messages in the state of the thread."""
    state = await graph.aget_state(THREAD)
    return [m.text for m in state.values["messages"] if m.type == "human"]


# -- ways to abandon a run


async def by_break(graph: Any, durability: str, chance: random.Random) -> None:
    """Leave the loop over a stream early. The event loop closes the generator some time later."""
    steps = chance.randrange(3)
    async for _ in graph.astream(human_input("left"), THREAD, durability=durability):
        if not steps:
            break
        steps -= 1


async def by_del(graph: Any, durability: str, chance: random.Random) -> None:
    """Drop the generator after a step."""
    stream = graph.astream(human_input("left"), THREAD, durability=durability, stream_mode="values")
    for _ in range(1 + chance.randrange(3)):
        await anext(stream)
    del stream


async def by_aclose(graph: Any, durability: str, chance: random.Random) -> None:
    """Close the generator of a response, as a web framework does when the client is gone."""

    async def response() -> AsyncIterator[Any]:
        async for part in graph.astream(human_input("left"), THREAD, durability=durability):
            yield part

    body: Any = response()
    for _ in range(chance.randrange(1, 3)):
        await anext(body)
    await body.aclose()


async def by_cancel(graph: Any, durability: str, chance: random.Random) -> None:
    """Cancel the task at a random time, without waiting for its end."""
    task = asyncio.create_task(graph.ainvoke(human_input("left"), THREAD, durability=durability))
    await run_some_loop_rounds(chance)
    task.cancel()


async def by_awaited_cancel(graph: Any, durability: str, chance: random.Random) -> None:
    """Cancel the task at a random time, and wait for its end."""
    task = asyncio.create_task(graph.ainvoke(human_input("left"), THREAD, durability=durability))
    await run_some_loop_rounds(chance)
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE_S)


async def run_some_loop_rounds(chance: random.Random) -> None:
    """Let the event loop run for some rounds. In some of them results of threads arrive."""
    for _ in range(chance.randrange(60)):
        await asyncio.sleep(chance.choice([0, 0, 0, 0.0005]))


LEAVE_FUNCTIONS = [by_break, by_del, by_aclose, by_cancel, by_awaited_cancel]
LeaveFunction = Callable[[Any, str, random.Random], Awaitable[None]]


@pytest.mark.repeats
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("leave", LEAVE_FUNCTIONS)
@pytest.mark.parametrize("build", [two_nodes, agent])
def test_turn_after_an_abandoned_run_stays_in_the_thread(
    build: Build, leave: LeaveFunction, durability: str, place: Place
) -> None:
    """Every answered turn is in the thread, however the run before it was abandoned."""
    chance = random.Random(f"{build.__name__} {leave.__name__} {durability}")
    count = min(5, TURNS) if place.dsn else TURNS

    async def scenario(saver: SQLiteCheckpointer) -> list[list[str]]:
        graph, texts_per_turn = build(saver), []
        for turn in range(count):
            await leave(graph, durability, chance)
            await graph.ainvoke(human_input(f"turn {turn}"), THREAD, durability=durability)
            texts_per_turn.append(
                [text for text in await read_human_texts(graph) if text != "left"]
            )
        await asyncio.sleep(0.02)  # let the abandoned runs end
        texts_per_turn.append([text for text in await read_human_texts(graph) if text != "left"])
        return texts_per_turn

    with place.saver() as saver:
        texts_per_turn = asyncio.run(asyncio.wait_for(scenario(saver), PATIENCE_S))
        heads = sum(info.is_head for info in saver.checkpoints("t", checkpoint_ns=""))
    with place.saver() as reopened_saver:
        reopened = [
            text for text in asyncio.run(read_human_texts(build(reopened_saver))) if text != "left"
        ]

    turns = [f"turn {turn}" for turn in range(count)]
    assert [turns[: n + 1] for n in range(count)] + [turns] == texts_per_turn
    assert turns == reopened
    assert heads == 1


# -- runs that end after later work


class GatedGraph:
    """A graph of two nodes. The first waits for a gate if the last message is "slow"."""

    def __init__(self, saver: SQLiteCheckpointer) -> None:
        self.inside, self.gate = asyncio.Event(), asyncio.Event()

        async def first(state: MessagesState) -> dict[str, Any]:
            if state["messages"][-1].text == "slow":
                self.inside.set()
                await self.gate.wait()
            return await answer_last_message(state)

        builder = StateGraph(MessagesState)
        builder.add_node("a", first).add_node("b", answer_last_message)
        builder.add_edge(START, "a").add_edge("a", "b")
        self.graph: Any = builder.compile(checkpointer=saver)

    async def run_beside(self, newer: Awaitable[Any], durability: str, *, cancel: bool) -> None:
        """Begin a run, do the newer work, and then let the run end or cancel it."""
        run = self.graph.ainvoke(human_input("slow"), THREAD, durability=durability)
        older = asyncio.create_task(run)
        await self.inside.wait()
        await newer
        if cancel:
            older.cancel()
        self.gate.set()
        await asyncio.wait([older], timeout=PATIENCE_S)


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("durability", ["sync", "async"])
@pytest.mark.parametrize("before", [0, 1])
def test_newer_turn_keeps_the_head_when_older_run_ends_later(
    before: int, durability: str, cancel: bool, place: Place
) -> None:
    """The older run becomes a branch, and its messages are in the file."""

    async def scenario(saver: SQLiteCheckpointer) -> tuple[list[str], list[str]]:
        gated = GatedGraph(saver)
        for turn in range(before):
            await gated.graph.ainvoke(human_input(f"before {turn}"), THREAD)
        newer = gated.graph.ainvoke(human_input("newer"), THREAD, durability=durability)
        await gated.run_beside(newer, durability, cancel=cancel)
        after = await read_human_texts(gated.graph)
        await gated.graph.ainvoke(human_input("next"), THREAD, durability=durability)
        return after, await read_human_texts(gated.graph)

    with place.saver() as saver:
        after, at_last = asyncio.run(asyncio.wait_for(scenario(saver), PATIENCE_S))
        tuples = list(saver.list({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}))
    all_texts = {
        m.text
        for checkpoint_tuple in tuples
        for m in checkpoint_tuple.checkpoint["channel_values"].get("messages", [])
    }

    assert after[-1] == "newer"
    assert at_last[-2:] == ["newer", "next"]
    assert cancel or "answer to answer to slow" in all_texts


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("durability", ["sync", "async"])
def test_update_state_keeps_the_head_when_a_run_ends_later(
    durability: str, cancel: bool, place: Place
) -> None:
    """The update is still in the thread after the run has ended."""

    async def scenario(saver: SQLiteCheckpointer) -> tuple[list[str], list[str]]:
        gated = GatedGraph(saver)
        await gated.graph.ainvoke(human_input("before"), THREAD)
        edit = gated.graph.aupdate_state(THREAD, human_input("edit"), as_node="b")
        await gated.run_beside(edit, durability, cancel=cancel)
        after = await read_human_texts(gated.graph)
        await gated.graph.ainvoke(human_input("next"), THREAD, durability=durability)
        return after, await read_human_texts(gated.graph)

    with place.saver() as saver:
        after, at_last = asyncio.run(asyncio.wait_for(scenario(saver), PATIENCE_S))

    assert after[-1] == "edit"
    assert at_last[-2:] == ["edit", "next"]


# -- clocks


@pytest.mark.repeats
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_order_of_thread_is_that_of_its_puts_when_clock_jumps(
    durability: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the clock differs by up to a day."""
    chance, true_ns = random.Random(durability), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: true_ns() + chance.randint(-DAY_NS, DAY_NS))

    async def scenario(saver: SQLiteCheckpointer) -> tuple[list[str], list[int]]:
        graph = two_nodes(saver)
        for turn in range(TURNS):
            await graph.ainvoke(human_input(f"turn {turn}"), THREAD, durability=durability)
        sizes = [len(s.values["messages"]) async for s in graph.aget_state_history(THREAD)]
        return await read_human_texts(graph), sizes

    with place.saver() as saver:
        texts, sizes = asyncio.run(scenario(saver))

    assert [f"turn {turn}" for turn in range(TURNS)] == texts
    assert sorted(sizes, reverse=True) == sizes


def run_with_clock_offset(offset_ns: int, place: Place, go: Connection) -> None:
    """Run a turn and abandon a run, in a process whose clock is off by `offset_ns`."""
    go.send("ready")
    go.recv()
    true_ns = time.time_ns
    time.time_ns = lambda: true_ns() + offset_ns  # langgraph's ids are made of it

    async def turn(saver: SQLiteCheckpointer) -> None:
        graph = two_nodes(saver)
        await by_break(graph, "sync", random.Random(offset_ns))
        await graph.ainvoke(human_input(f"turn at {offset_ns}"), THREAD)

    with place.saver() as saver:
        asyncio.run(turn(saver))
    go.send("done")


def run_a_day_ahead(place: Place, go: Connection, _: int) -> None:
    run_with_clock_offset(DAY_NS, place, go)


def run_on_time(place: Place, go: Connection, _: int) -> None:
    run_with_clock_offset(0, place, go)


def run_a_day_behind(place: Place, go: Connection, _: int) -> None:
    run_with_clock_offset(-DAY_NS, place, go)


@needs_fork
def test_turns_of_processes_with_different_clocks_all_stay(place: Place) -> None:
    """The processes run one after another, with clocks that are days apart."""
    for work in (run_on_time, run_a_day_ahead, run_a_day_behind, run_on_time):
        run_in_processes(1, work, place)
    with place.saver() as saver:
        texts = [text for text in asyncio.run(read_human_texts(two_nodes(saver))) if text != "left"]

    assert [f"turn at {offset}" for offset in (0, DAY_NS, -DAY_NS, 0)] == texts


# -- the lock of a thread


async def run_turns_under_lock(saver: Any, name: str, turns: int) -> None:
    """Run turns of a graph, each under the lock of its thread."""
    graph = two_nodes(saver)
    for turn in range(turns):
        async with saver.lock("t", timeout_s=PATIENCE_S):
            await graph.ainvoke(human_input(f"{name}.{turn}"), THREAD)


def is_one_turn_after_another(messages: list[BaseMessage]) -> bool:
    """Return whether each question is followed by its two answers."""
    texts = [m.text for m in messages]
    turns = [texts[n : n + 3] for n in range(0, len(texts), 3)]
    return all(
        turn == [turn[0], f"answer to {turn[0]}", f"answer to answer to {turn[0]}"]
        for turn in turns
    )


def test_tasks_under_the_lock_take_turns_one_after_another(place: Place) -> None:
    """Sixteen tasks share one thread."""

    async def scenario(saver: SQLiteCheckpointer) -> list[BaseMessage]:
        await asyncio.gather(*(run_turns_under_lock(saver, str(number), 1) for number in range(16)))
        state = await two_nodes(saver).aget_state(THREAD)
        messages: list[BaseMessage] = state.values["messages"]
        return messages

    with place.saver() as saver:
        messages = asyncio.run(asyncio.wait_for(scenario(saver), PATIENCE_S))

    assert {f"{n}.0" for n in range(16)} == {m.text for m in messages if m.type == "human"}
    assert is_one_turn_after_another(messages)


def run_turns_in_process(place: Place, go: Connection, number: int) -> None:
    """Run four turns on a thread that all processes share."""
    go.send("ready")
    go.recv()
    with place.saver() as saver:
        asyncio.run(run_turns_under_lock(saver, str(number), 4))
    go.send("done")


@needs_fork
def test_processes_under_the_lock_take_turns_one_after_another(place: Place) -> None:
    """Eight processes share one thread."""
    run_in_processes(8, run_turns_in_process, place)
    with place.saver() as saver:
        messages = two_nodes(saver).get_state(THREAD).values["messages"]

    expected = {f"{number}.{turn}" for number in range(8) for turn in range(4)}
    assert expected == {m.text for m in messages if m.type == "human"}
    assert is_one_turn_after_another(messages)

"""Runs that are left, cancelled or outlived, and clocks that jump: no acknowledged turn is lost."""

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
from tests.durability.processes import in_processes
from tests.rounds import rounds

TURNS = rounds(12)
PATIENCE_S = 60.0  # a deadlock fails the test instead of stopping it
DAY_NS = 86_400_000_000_000
THREAD: Any = {"configurable": {"thread_id": "t"}}
Build = Callable[[SQLiteCheckpointer], Any]
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


# -- graphs


class Scripted(BaseChatModel):
    """Calls a tool twice in answer to a person, and answers in words once it has the results."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Scripted:
        return self

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        asked = messages[-1].type == "human"
        call = {"name": "look_up", "args": {"word": messages[-1].text}, "type": "tool_call"}
        calls = [{**call, "id": f"{len(messages)}-{n}"} for n in range(2)] if asked else []
        message = AIMessage("" if asked else "found", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool
async def look_up(word: str) -> str:
    """Look a word up."""
    await asyncio.sleep(0)
    return f"of {word}"


def agent(saver: SQLiteCheckpointer) -> Any:
    """An agent with a tool, as langchain makes it."""
    return create_agent(Scripted(), [look_up], checkpointer=saver)


async def answer(state: MessagesState) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"messages": [("ai", f"answer to {state['messages'][-1].text}")]}


def two_nodes(saver: SQLiteCheckpointer) -> Any:
    """Two nodes, one after the other, each with an answer."""
    builder = StateGraph(MessagesState)
    builder.add_node("a", answer).add_node("b", answer)
    builder.add_edge(START, "a").add_edge("a", "b")
    return builder.compile(checkpointer=saver)


def says(text: str) -> Any:
    return {"messages": [("human", text)]}


async def asked(graph: Any) -> list[str]:
    """What people said, in the state of the thread."""
    state = await graph.aget_state(THREAD)
    return [m.text for m in state.values["messages"] if m.type == "human"]


# -- ways to leave a run


async def by_break(graph: Any, durability: str, chance: random.Random) -> None:
    """The loop over the stream ends early; the event loop closes the generator some time later."""
    steps = chance.randrange(3)
    async for _ in graph.astream(says("left"), THREAD, durability=durability):
        if not steps:
            break
        steps -= 1


async def by_del(graph: Any, durability: str, chance: random.Random) -> None:
    """The generator is dropped after a step."""
    stream = graph.astream(says("left"), THREAD, durability=durability, stream_mode="values")
    for _ in range(1 + chance.randrange(3)):
        await anext(stream)
    del stream


async def by_aclose(graph: Any, durability: str, chance: random.Random) -> None:
    """The client is gone: a web framework closes the response's generator."""

    async def response() -> AsyncIterator[Any]:
        async for part in graph.astream(says("left"), THREAD, durability=durability):
            yield part

    body: Any = response()
    for _ in range(chance.randrange(1, 3)):
        await anext(body)
    await body.aclose()


async def by_cancel(graph: Any, durability: str, chance: random.Random) -> None:
    """The task is cancelled anywhere, and nobody waits for its end."""
    task = asyncio.create_task(graph.ainvoke(says("left"), THREAD, durability=durability))
    await passes(chance)
    task.cancel()


async def by_awaited_cancel(graph: Any, durability: str, chance: random.Random) -> None:
    """The task is cancelled anywhere, and its end is waited for."""
    task = asyncio.create_task(graph.ainvoke(says("left"), THREAD, durability=durability))
    await passes(chance)
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE_S)


async def passes(chance: random.Random) -> None:
    """Some rounds of the event loop, among them rounds in which threads come back."""
    for _ in range(chance.randrange(60)):
        await asyncio.sleep(chance.choice([0, 0, 0, 0.0005]))


WAYS = [by_break, by_del, by_aclose, by_cancel, by_awaited_cancel]
Leave = Callable[[Any, str, random.Random], Awaitable[None]]


@pytest.mark.repeats
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("build", [two_nodes, agent])
def test_a_turn_after_a_left_run_stays(
    build: Build, leave: Leave, durability: str, place: Place
) -> None:
    """Every turn that was answered is in the thread, however the run before it was left."""
    chance = random.Random(f"{build.__name__} {leave.__name__} {durability}")
    count = min(5, TURNS) if place.dsn else TURNS

    async def scenario(saver: SQLiteCheckpointer) -> list[list[str]]:
        graph, found = build(saver), []
        for turn in range(count):
            await leave(graph, durability, chance)
            await graph.ainvoke(says(f"turn {turn}"), THREAD, durability=durability)
            found.append([text for text in await asked(graph) if text != "left"])
        await asyncio.sleep(0.02)  # what is left of the runs comes to its end
        found.append([text for text in await asked(graph) if text != "left"])
        return found

    with place.saver() as saver:
        found = asyncio.run(asyncio.wait_for(scenario(saver), PATIENCE_S))
        heads = sum(info.is_head for info in saver.checkpoints("t", checkpoint_ns=""))
    with place.saver() as again:
        reopened = [text for text in asyncio.run(asked(build(again))) if text != "left"]

    turns = [f"turn {turn}" for turn in range(count)]
    assert [turns[: n + 1] for n in range(count)] + [turns] == found
    assert turns == reopened
    assert heads == 1


# -- runs that outlive what came after them


class Gated:
    """A graph of two nodes; the first waits for a gate if it is asked to be slow."""

    def __init__(self, saver: SQLiteCheckpointer) -> None:
        self.inside, self.gate = asyncio.Event(), asyncio.Event()

        async def first(state: MessagesState) -> dict[str, Any]:
            if state["messages"][-1].text == "slow":
                self.inside.set()
                await self.gate.wait()
            return await answer(state)

        builder = StateGraph(MessagesState)
        builder.add_node("a", first).add_node("b", answer)
        builder.add_edge(START, "a").add_edge("a", "b")
        self.graph: Any = builder.compile(checkpointer=saver)

    async def outlives(self, newer: Awaitable[Any], durability: str, *, cancel: bool) -> None:
        """A run begins, the newer work comes and ends, then the run goes on to its end."""
        run = self.graph.ainvoke(says("slow"), THREAD, durability=durability)
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
def test_a_newer_turn_keeps_the_head(
    before: int, durability: str, cancel: bool, place: Place
) -> None:
    """A run that goes on after a newer turn is a branch; what it did is in the file."""

    async def scenario(saver: SQLiteCheckpointer) -> tuple[list[str], list[str]]:
        gated = Gated(saver)
        for turn in range(before):
            await gated.graph.ainvoke(says(f"before {turn}"), THREAD)
        newer = gated.graph.ainvoke(says("newer"), THREAD, durability=durability)
        await gated.outlives(newer, durability, cancel=cancel)
        after = await asked(gated.graph)
        await gated.graph.ainvoke(says("next"), THREAD, durability=durability)
        return after, await asked(gated.graph)

    with place.saver() as saver:
        after, at_last = asyncio.run(asyncio.wait_for(scenario(saver), PATIENCE_S))
        tuples = list(saver.list({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}))
    said = {
        m.text for found in tuples for m in found.checkpoint["channel_values"].get("messages", [])
    }

    assert after[-1] == "newer"
    assert at_last[-2:] == ["newer", "next"]
    assert cancel or "answer to answer to slow" in said


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_persons_edit_keeps_the_head(durability: str, cancel: bool, place: Place) -> None:
    """What `update_state` wrote while a run went on is in the thread when the run has ended."""

    async def scenario(saver: SQLiteCheckpointer) -> tuple[list[str], list[str]]:
        gated = Gated(saver)
        await gated.graph.ainvoke(says("before"), THREAD)
        edit = gated.graph.aupdate_state(THREAD, says("edit"), as_node="b")
        await gated.outlives(edit, durability, cancel=cancel)
        after = await asked(gated.graph)
        await gated.graph.ainvoke(says("next"), THREAD, durability=durability)
        return after, await asked(gated.graph)

    with place.saver() as saver:
        after, at_last = asyncio.run(asyncio.wait_for(scenario(saver), PATIENCE_S))

    assert after[-1] == "edit"
    assert at_last[-2:] == ["edit", "next"]


# -- clocks


@pytest.mark.repeats
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_clock_that_jumps_within_a_run(
    durability: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a thread is that of its puts, also when each look at the clock differs."""
    chance, true_ns = random.Random(durability), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: true_ns() + chance.randint(-DAY_NS, DAY_NS))

    async def scenario(saver: SQLiteCheckpointer) -> tuple[list[str], list[int]]:
        graph = two_nodes(saver)
        for turn in range(TURNS):
            await graph.ainvoke(says(f"turn {turn}"), THREAD, durability=durability)
        sizes = [len(s.values["messages"]) async for s in graph.aget_state_history(THREAD)]
        return await asked(graph), sizes

    with place.saver() as saver:
        said, sizes = asyncio.run(scenario(saver))

    assert [f"turn {turn}" for turn in range(TURNS)] == said
    assert sorted(sizes, reverse=True) == sizes


def at_another_time(offset_ns: int, place: Place, go: Connection) -> None:
    """A process whose clock is off takes a turn and leaves a run."""
    go.send("ready")
    go.recv()
    true_ns = time.time_ns
    time.time_ns = lambda: true_ns() + offset_ns  # langgraph's ids are made of it

    async def turn(saver: SQLiteCheckpointer) -> None:
        graph = two_nodes(saver)
        await by_break(graph, "sync", random.Random(offset_ns))
        await graph.ainvoke(says(f"turn at {offset_ns}"), THREAD)

    with place.saver() as saver:
        asyncio.run(turn(saver))
    go.send("done")


def a_day_ahead(place: Place, go: Connection, _: int) -> None:
    at_another_time(DAY_NS, place, go)


def on_time(place: Place, go: Connection, _: int) -> None:
    at_another_time(0, place, go)


def a_day_behind(place: Place, go: Connection, _: int) -> None:
    at_another_time(-DAY_NS, place, go)


@needs_fork
def test_clocks_that_differ_between_processes(place: Place) -> None:
    """Turns taken one after another, by processes whose clocks are days apart, all stay."""
    for work in (on_time, a_day_ahead, a_day_behind, on_time):
        in_processes(1, work, place)
    with place.saver() as saver:
        said = [text for text in asyncio.run(asked(two_nodes(saver))) if text != "left"]

    assert [f"turn at {offset}" for offset in (0, DAY_NS, -DAY_NS, 0)] == said


# -- the lock of a thread


async def locked_turns(saver: Any, name: str, turns: int) -> None:
    """Turns of a graph, each under the lock of its thread."""
    graph = two_nodes(saver)
    for turn in range(turns):
        async with saver.lock("t", timeout_s=PATIENCE_S):
            await graph.ainvoke(says(f"{name}.{turn}"), THREAD)


def one_after_another(messages: list[BaseMessage]) -> bool:
    """Whether each question is followed by its two answers."""
    texts = [m.text for m in messages]
    turns = [texts[n : n + 3] for n in range(0, len(texts), 3)]
    return all(
        turn == [turn[0], f"answer to {turn[0]}", f"answer to answer to {turn[0]}"]
        for turn in turns
    )


def test_tasks_under_the_lock(place: Place) -> None:
    """Sixteen tasks on one thread, under its lock, take their turns one after another."""

    async def scenario(saver: SQLiteCheckpointer) -> list[BaseMessage]:
        await asyncio.gather(*(locked_turns(saver, str(number), 1) for number in range(16)))
        state = await two_nodes(saver).aget_state(THREAD)
        messages: list[BaseMessage] = state.values["messages"]
        return messages

    with place.saver() as saver:
        messages = asyncio.run(asyncio.wait_for(scenario(saver), PATIENCE_S))

    assert {f"{n}.0" for n in range(16)} == {m.text for m in messages if m.type == "human"}
    assert one_after_another(messages)


def talks_under_the_lock(place: Place, go: Connection, number: int) -> None:
    """One process: four turns on a thread that all share."""
    go.send("ready")
    go.recv()
    with place.saver() as saver:
        asyncio.run(locked_turns(saver, str(number), 4))
    go.send("done")


@needs_fork
def test_processes_under_the_lock(place: Place) -> None:
    """Eight processes on one thread, under its lock, take their turns one after another."""
    in_processes(8, talks_under_the_lock, place)
    with place.saver() as saver:
        messages = two_nodes(saver).get_state(THREAD).values["messages"]

    expected = {f"{number}.{turn}" for number in range(8) for turn in range(4)}
    assert expected == {m.text for m in messages if m.type == "human"}
    assert one_after_another(messages)

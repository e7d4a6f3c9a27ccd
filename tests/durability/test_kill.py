"""kill -9 at any moment loses nothing that was acknowledged, and the graph resumes.

A forkserver that has imported everything forks the victims: a fresh interpreter for each of 200
kills would cost a second of imports apiece. It opens no database, so it stays single-threaded.
"""

from __future__ import annotations

import asyncio
import operator
import random
import sys
import threading
from collections.abc import Sequence
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph, add_messages

from perdure.checkpointers import SQLiteCheckpointer
from tests.durability.processes import integrity, killed
from tests.rounds import rounds

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}
FILES_PER_SEED = rounds(5)
KILLS_PER_FILE = 5


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    steps: Annotated[list[str], operator.add]


def said(name: str, state: State) -> State:
    """One message, with an id that depends on the state alone, so that a rerun says the same."""
    place = len(state["messages"])
    return {
        "messages": [AIMessage(f"{name} answers {place} " * 9, id=f"{name}-{place}")],
        "steps": [name],
    }


def built(saver: Any) -> Any:
    """Three supersteps a turn, the middle one of two parallel nodes."""
    graph = StateGraph(State)
    graph.add_node("think", lambda state: said("think", state))
    graph.add_node("left", lambda state: said("left", state))
    graph.add_node("right", lambda state: said("right", state))
    graph.add_node("join", lambda state: said("join", state))
    graph.add_edge(START, "think")
    graph.add_edge("think", "left")
    graph.add_edge("think", "right")
    graph.add_edge(["left", "right"], "join")
    graph.add_edge("join", END)
    return graph.compile(checkpointer=saver)


def question(turn: int) -> State:
    return {"messages": [HumanMessage(f"turn {turn}", id=f"turn-{turn}")]}


def turns_in(state: Any) -> int:
    return sum(isinstance(message, HumanMessage) for message in state.values.get("messages", []))


class Acks:
    """The pipe to the test, for the several threads in which langgraph runs tasks and puts."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def send(self, ack: Any) -> None:
        with self._sending:
            self._pipe.send(ack)


class Acknowledging(SQLiteCheckpointer):
    """Tells a pipe of everything that was put, after it was."""

    acks: Acks

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        stored = super().put(config, checkpoint, metadata, new_versions)
        self.acks.send(("put", stored, checkpoint, metadata))
        return stored

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        stored = await super().aput(config, checkpoint, metadata, new_versions)
        self.acks.send(("put", stored, checkpoint, metadata))
        return stored

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        super().put_writes(config, writes, task_id, task_path)
        self.acks.send(("writes", config["configurable"]["checkpoint_id"], task_id, list(writes)))

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        await super().aput_writes(config, writes, task_id, task_path)
        self.acks.send(("writes", config["configurable"]["checkpoint_id"], task_id, list(writes)))


def talk(path: Path, acks: Acks) -> None:
    """Resume what is pending, then turn after turn, until killed.

    A step whose tasks have all written, killed before its checkpoint, has `tasks` but no `next`.
    """
    with Acknowledging.open(path) as saver:
        saver.acks = acks
        graph = built(saver)
        state = graph.get_state(CONFIG)
        if state.tasks:
            graph.invoke(None, CONFIG, durability="sync")
        for turn in count(turns_in(graph.get_state(CONFIG))):
            graph.invoke(question(turn), CONFIG, durability="sync")
            acks.send(("turn", turn))


async def atalk(path: Path, acks: Acks) -> None:
    """See `talk`."""
    async with Acknowledging.open(path) as saver:
        saver.acks = acks
        graph = built(saver)
        state = await graph.aget_state(CONFIG)
        if state.tasks:
            await graph.ainvoke(None, CONFIG, durability="sync")
        for turn in count(turns_in(await graph.aget_state(CONFIG))):
            await graph.ainvoke(question(turn), CONFIG, durability="sync")
            acks.send(("turn", turn))


def victim(path: Path, pipe: Connection, door: str) -> None:
    acks = Acks(pipe)
    acks.send("ready")
    if door == "async":
        asyncio.run(atalk(path, acks))
    else:
        talk(path, acks)


def check(saver: SQLiteCheckpointer, acks: list[Any]) -> None:
    """Everything acknowledged is there and equal."""
    for kind, *ack in acks:
        if kind == "put":
            config, checkpoint, metadata = ack
            found = saver.get_tuple(config)
            assert found is not None
            assert checkpoint == found.checkpoint
            assert metadata == {name: dict(found.metadata)[name] for name in metadata}
        elif kind == "writes":
            checkpoint_id, task_id, writes = ack
            at: RunnableConfig = {
                "configurable": {"thread_id": "t", "checkpoint_id": checkpoint_id}
            }
            found = saver.get_tuple(at)
            assert found is not None
            pending = found.pending_writes or []
            assert writes == [(channel, v) for task, channel, v in pending if task == task_id]


@pytest.fixture(scope="module")
def uncrashed() -> list[dict[str, Any]]:
    """The state after each turn of a run that nobody kills."""
    graph = built(InMemorySaver())
    return [graph.invoke(question(turn), CONFIG) for turn in range(40)]


@pytest.mark.repeats
@pytest.mark.parametrize("door", ["sync", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_kill_loses_nothing_acknowledged(
    seed: int, door: str, tmp_path: Path, uncrashed: list[dict[str, Any]]
) -> None:
    """All that was acknowledged is there, and the resumed state is that of an uncrashed run."""
    chance = random.Random(f"{seed} {door}")
    for file in range(FILES_PER_SEED):
        path = tmp_path / f"{file}.db"
        everything: list[Any] = []
        for _ in range(KILLS_PER_FILE):
            acks = killed(victim, (path, door), chance, early=0.4, most=25)
            everything += acks
            with SQLiteCheckpointer.open(path) as saver:
                check(saver, acks)
                assert saver.database.read(integrity) == [("ok",)]
        with SQLiteCheckpointer.open(path) as saver:
            check(saver, everything)
            graph = built(saver)
            if graph.get_state(CONFIG).tasks:
                graph.invoke(None, CONFIG, durability="sync")
            turns = turns_in(graph.get_state(CONFIG))
            acknowledged = [ack[1] for ack in everything if ack[0] == "turn"]
            graph.invoke(question(turns), CONFIG, durability="sync")
            final = graph.get_state(CONFIG)

        assert all(turn < turns for turn in acknowledged)
        assert uncrashed[turns] == final.values
        assert final.tasks == ()

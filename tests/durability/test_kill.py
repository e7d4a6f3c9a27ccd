"""kill -9 at any moment loses no acknowledged write, and the graph resumes.

A fork server that has imported everything forks the killed processes, because a fresh interpreter
for each of 200 kills would import for a second. The server opens no database, so it has one thread.
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
from tests.durability.processes import run_and_kill, run_integrity_check
from tests.rounds import rounds

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}
FILES_PER_SEED = rounds(5)
KILLS_PER_FILE = 5


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    steps: Annotated[list[str], operator.add]


def add_message(name: str, state: State) -> State:
    """Return one message whose id depends only on the state, so that a rerun returns the same."""
    place = len(state["messages"])
    return {
        "messages": [AIMessage(f"{name} answers {place} " * 9, id=f"{name}-{place}")],
        "steps": [name],
    }


def build_graph(saver: Any) -> Any:
    """Build a graph with three supersteps per turn, the second of which has two parallel nodes."""
    graph = StateGraph(State)
    graph.add_node("think", lambda state: add_message("think", state))
    graph.add_node("left", lambda state: add_message("left", state))
    graph.add_node("right", lambda state: add_message("right", state))
    graph.add_node("join", lambda state: add_message("join", state))
    graph.add_edge(START, "think")
    graph.add_edge("think", "left")
    graph.add_edge("think", "right")
    graph.add_edge(["left", "right"], "join")
    graph.add_edge("join", END)
    return graph.compile(checkpointer=saver)


def human_input(turn: int) -> State:
    return {"messages": [HumanMessage(f"turn {turn}", id=f"turn-{turn}")]}


def count_turns(state: Any) -> int:
    return sum(isinstance(message, HumanMessage) for message in state.values.get("messages", []))


class AckPipe:
    """A pipe to the test that the several threads of langgraph can share."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def send(self, ack: Any) -> None:
        with self._sending:
            self._pipe.send(ack)


class AcknowledgingCheckpointer(SQLiteCheckpointer):
    """A checkpointer that sends everything to a pipe after it was stored."""

    acks: AckPipe

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


def run_turns(path: Path, acks: AckPipe) -> None:
    """Resume a pending run, then run turn after turn, until the process is killed.

    A step that was killed after all writes of its tasks, and before its checkpoint, has `tasks` but
    no `next`.
    """
    with AcknowledgingCheckpointer.open(path) as saver:
        saver.acks = acks
        graph = build_graph(saver)
        state = graph.get_state(CONFIG)
        if state.tasks:
            graph.invoke(None, CONFIG, durability="sync")
        for turn in count(count_turns(graph.get_state(CONFIG))):
            graph.invoke(human_input(turn), CONFIG, durability="sync")
            acks.send(("turn", turn))


async def arun_turns(path: Path, acks: AckPipe) -> None:
    """Do the same as `run_turns` with the async methods."""
    async with AcknowledgingCheckpointer.open(path) as saver:
        saver.acks = acks
        graph = build_graph(saver)
        state = await graph.aget_state(CONFIG)
        if state.tasks:
            await graph.ainvoke(None, CONFIG, durability="sync")
        for turn in count(count_turns(await graph.aget_state(CONFIG))):
            await graph.ainvoke(human_input(turn), CONFIG, durability="sync")
            acks.send(("turn", turn))


def run_turns_until_killed(path: Path, pipe: Connection, door: str) -> None:
    acks = AckPipe(pipe)
    acks.send("ready")
    if door == "async":
        asyncio.run(arun_turns(path, acks))
    else:
        run_turns(path, acks)


def check_acknowledged(saver: SQLiteCheckpointer, acks: list[Any]) -> None:
    """Check that everything acknowledged is stored and equal."""
    for kind, *ack in acks:
        if kind == "put":
            config, checkpoint, metadata = ack
            stored = saver.get_tuple(config)
            assert stored is not None
            assert checkpoint == stored.checkpoint
            assert metadata == {name: dict(stored.metadata)[name] for name in metadata}
        elif kind == "writes":
            checkpoint_id, task_id, writes = ack
            checkpoint_config: RunnableConfig = {
                "configurable": {"thread_id": "t", "checkpoint_id": checkpoint_id}
            }
            stored = saver.get_tuple(checkpoint_config)
            assert stored is not None
            pending = stored.pending_writes or []
            assert writes == [(channel, v) for task, channel, v in pending if task == task_id]


@pytest.fixture(scope="module")
def uninterrupted_states() -> list[dict[str, Any]]:
    """Return the state after each turn of a run that is not killed."""
    graph = build_graph(InMemorySaver())
    return [graph.invoke(human_input(turn), CONFIG) for turn in range(40)]


@pytest.mark.repeats
@pytest.mark.parametrize("door", ["sync", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_kill_loses_no_acknowledged_checkpoint_or_write(
    seed: int, door: str, tmp_path: Path, uninterrupted_states: list[dict[str, Any]]
) -> None:
    """The resumed state equals that of a run that was not killed."""
    chance = random.Random(f"{seed} {door}")
    for file in range(FILES_PER_SEED):
        path = tmp_path / f"{file}.db"
        everything: list[Any] = []
        for _ in range(KILLS_PER_FILE):
            acks = run_and_kill(
                run_turns_until_killed, (path, door), chance, early_share=0.4, max_acks=25
            )
            everything += acks
            with SQLiteCheckpointer.open(path) as saver:
                check_acknowledged(saver, acks)
                assert saver.database.read(run_integrity_check) == [("ok",)]
        with SQLiteCheckpointer.open(path) as saver:
            check_acknowledged(saver, everything)
            graph = build_graph(saver)
            if graph.get_state(CONFIG).tasks:
                graph.invoke(None, CONFIG, durability="sync")
            turns = count_turns(graph.get_state(CONFIG))
            acknowledged = [ack[1] for ack in everything if ack[0] == "turn"]
            graph.invoke(human_input(turns), CONFIG, durability="sync")
            final = graph.get_state(CONFIG)

        assert all(turn < turns for turn in acknowledged)
        assert uninterrupted_states[turns] == final.values
        assert final.tasks == ()

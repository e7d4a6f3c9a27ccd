"""A run that is rolled back leaves nothing in its thread, not even its answer to a question."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from benchmarks.random_faults import read_rows
from langgraph.checkpoint.serde.types import INTERRUPT
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests.server.running import run_server, wait_until
from tests.server.talking import Gate, State, build_input

SECRET = "the harbour safe opens at nine"


def build_asking_graph(gate: Gate) -> StateGraph[State]:
    """Return a graph with two asking nodes; one asks twice, the other stops at the gate."""

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [interrupt("one?"), interrupt("two?")]}

    async def wait(state: State) -> dict[str, Any]:
        if interrupt("wait?") == "yes":
            await gate.pass_through()
        return {"heard": ["waited"]}

    builder = StateGraph(State).add_node("hear", hear).add_node("wait", wait)
    return builder.add_edge(START, "hear").add_edge(START, "wait")


def build_nested_asking_graph(gate: Gate) -> StateGraph[State]:
    """Return the asking graph as a subgraph of a subgraph."""
    builder = build_asking_graph(gate)
    for name in ("middle", "outer"):
        inner = builder.compile()
        builder = StateGraph(State).add_node(name, inner).add_edge(START, name)
    return builder


def build_gated_graph(gate: Gate) -> StateGraph[State]:
    """Return a graph that asks in one node, and stops at the gate if the answer is yes."""

    async def hear(state: State) -> dict[str, Any]:
        answer = interrupt("one?")
        if answer == "yes":
            await gate.pass_through()
        return {"heard": [answer]}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def build_quoting_graph(gate: Gate) -> StateGraph[State]:
    """Return a graph that asks about the last message, and then stops at the gate."""

    async def hear(state: State) -> dict[str, Any]:
        interrupt(f"Is it true that {state['messages'][-1].text}?")
        await gate.pass_through()
        return {}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def build_counting_graph(gate: Gate) -> StateGraph[State]:
    """Return a graph of a fast node that counts its runs, and a node that stops at the gate."""
    attempts = count(1)

    def fast(state: State) -> dict[str, Any]:
        return {"heard": [f"attempt {next(attempts)}"]}

    async def slow(state: State) -> dict[str, Any]:
        await gate.pass_through()
        return {"heard": ["slow"]}

    builder = StateGraph(State).add_node("fast", fast).add_node("slow", slow)
    return builder.add_edge(START, "fast").add_edge(START, "slow")


@contextmanager
def serve_graphs(settings: Settings, gate: Gate) -> Iterator[SyncLangGraphClient]:
    makers = {
        "asks": build_asking_graph,
        "inside": build_nested_asking_graph,
        "gated": build_gated_graph,
    }
    makers |= {"counts": build_counting_graph, "quotes": build_quoting_graph}
    graphs = {name: make(gate) for name, make in makers.items()}
    app = create_app(settings, graphs=Graphs(graphs))
    with run_server(app) as url, get_sync_client(url=url) as client:
        yield client


def build_answers_command(thread: Any, answer: str) -> Any:
    """Return a command that gives the same answer to each question of a thread."""
    asked = [each for of_task in thread["interrupts"].values() for each in of_task]
    return {"resume": {each["id"]: answer for each in asked}}


def is_question_stored(saver: Checkpointer, question: str) -> bool:
    """Check whether a question is stored, in the graph or in a subgraph."""
    stored = saver.list({"configurable": {"thread_id": "t"}})
    writes = [write for each in stored for write in each.pending_writes or ()]
    return any(name == INTERRUPT and value[0].value == question for _, name, value in writes)


@pytest.mark.parametrize("rollback_method", ["cancel", "strategy", "restart"])
@pytest.mark.parametrize("graph", ["asks", "inside"])
def test_answer_of_rolled_back_run_is_not_used(
    db: Settings, gate: Gate, graph: str, rollback_method: str
) -> None:
    values: Any
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", graph, input={"heard": []})
        before = client.threads.get("t")
        yes, no = build_answers_command(before, "yes"), build_answers_command(before, "no")
        run = client.runs.create("t", graph, command=yes)["run_id"]
        assert gate.reached.wait(60)
        with open_checkpointer(db.db) as saver:
            wait_until(lambda: is_question_stored(saver, "two?"))
        if rollback_method == "strategy":
            values = client.runs.wait("t", graph, command=no, multitask_strategy="rollback")
        elif rollback_method == "cancel":
            client.runs.cancel("t", run, action="rollback", wait=True)
    with serve_graphs(db, gate) as client:
        if rollback_method == "restart":
            client.runs.cancel("t", run, action="rollback", wait=True)
        gate.open.set()
        if rollback_method != "strategy":
            wait_until(lambda: len(client.runs.list("t")) == 1)
            assert client.threads.get("t")["interrupts"] == before["interrupts"]
            values = client.runs.wait("t", graph, input=None)
            assert {each["value"] for each in values["__interrupt__"]} == {"one?", "wait?"}
            values = client.runs.wait("t", graph, command=no)
        assert [each["value"] for each in values["__interrupt__"]] == ["two?"]
        values = client.runs.wait("t", graph, command={"resume": "yes"})

    assert values["heard"] == ["no", "yes", "waited"]


def test_rollback_removes_answer_and_update_of_command(db: Settings, gate: Gate) -> None:
    """Both are stored without a task before the graph runs."""
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "gated", input={"heard": []})
        both: Any = {"resume": "yes", "update": {"heard": ["update"]}}
        run = client.runs.create("t", "gated", command=both)["run_id"]
        assert gate.reached.wait(60)
        client.runs.cancel("t", run, action="rollback", wait=True)
        wait_until(lambda: len(client.runs.list("t")) == 1)
        gate.open.set()
        asked: Any = client.runs.wait("t", "gated", input=None)
        values: Any = client.runs.wait("t", "gated", command={"resume": "no"})

    assert [each["value"] for each in asked["__interrupt__"]] == ["one?"]
    assert values["heard"] == ["no"]


def test_rollback_removes_results_of_run_that_continued_thread(db: Settings, gate: Gate) -> None:
    """The run had no input, so its nodes ran at a checkpoint of the previous run."""
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "counts", input={"heard": []}, interrupt_before="*")
        run = client.runs.create("t", "counts", input=None)["run_id"]
        assert gate.reached.wait(60)
        with open_checkpointer(db.db) as saver:
            config: Any = {"configurable": {"thread_id": "t"}}
            wait_until(lambda: has_pending_write(saver.get_tuple(config), "heard"))
        client.runs.cancel("t", run, action="rollback", wait=True)
        wait_until(lambda: len(client.runs.list("t")) == 1)
        gate.open.set()
        values: Any = client.runs.wait("t", "counts", input=None)

    assert values["heard"] == ["attempt 2", "slow"]


def has_pending_write(stored: Any, channel: str) -> bool:
    return any(name == channel for _, name, _ in stored.pending_writes)


def test_erased_question_is_not_kept_for_rollback(db: Settings, gate: Gate) -> None:
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "quotes", input=build_input(SECRET))
        client.runs.create("t", "quotes", command={"resume": "yes"})
        assert gate.reached.wait(60)
        before = SECRET.encode() in read_rows(db.db)
        with open_checkpointer(db.db) as saver:
            saver.erase("t", [str(each.value.id) for each in saver.history("t")])
        after = SECRET.encode() in read_rows(db.db)

    assert before
    assert not after

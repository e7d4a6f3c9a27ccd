"""A run that is rolled back leaves nothing in its thread, also not the answer that it gave."""

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


def asks(gate: Gate) -> StateGraph[State]:
    """Asks in two nodes; after an answer one asks again, and the other stops at the gate."""

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [interrupt("one?"), interrupt("two?")]}

    async def wait(state: State) -> dict[str, Any]:
        if interrupt("wait?") == "yes":
            await gate.pass_through()
        return {"heard": ["waited"]}

    builder = StateGraph(State).add_node("hear", hear).add_node("wait", wait)
    return builder.add_edge(START, "hear").add_edge(START, "wait")


def asks_inside(gate: Gate) -> StateGraph[State]:
    """Does the same in a subgraph of a subgraph."""
    builder = asks(gate)
    for name in ("middle", "outer"):
        inner = builder.compile()
        builder = StateGraph(State).add_node(name, inner).add_edge(START, name)
    return builder


def gated(gate: Gate) -> StateGraph[State]:
    """Asks in one node, and stops at the gate if the answer is yes."""

    async def hear(state: State) -> dict[str, Any]:
        answer = interrupt("one?")
        if answer == "yes":
            await gate.pass_through()
        return {"heard": [answer]}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def quotes(gate: Gate) -> StateGraph[State]:
    """Asks about the last message, and stops at the gate after the answer."""

    async def hear(state: State) -> dict[str, Any]:
        interrupt(f"Is it true that {state['messages'][-1].text}?")
        await gate.pass_through()
        return {}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def counts(gate: Gate) -> StateGraph[State]:
    """Runs a fast node, which tells how often it ran, beside one that stops at the gate."""
    attempts = count(1)

    def fast(state: State) -> dict[str, Any]:
        return {"heard": [f"attempt {next(attempts)}"]}

    async def slow(state: State) -> dict[str, Any]:
        await gate.pass_through()
        return {"heard": ["slow"]}

    builder = StateGraph(State).add_node("fast", fast).add_node("slow", slow)
    return builder.add_edge(START, "fast").add_edge(START, "slow")


@contextmanager
def served(settings: Settings, gate: Gate) -> Iterator[SyncLangGraphClient]:
    makers = {"asks": asks, "inside": asks_inside, "gated": gated}
    makers |= {"counts": counts, "quotes": quotes}
    graphs = {name: make(gate) for name, make in makers.items()}
    app = create_app(settings, graphs=Graphs(graphs))
    with run_server(app) as url, get_sync_client(url=url) as client:
        yield client


def answers(thread: Any, answer: str) -> Any:
    """A command that gives the same answer to each question of a thread."""
    asked = [each for of_task in thread["interrupts"].values() for each in of_task]
    return {"resume": {each["id"]: answer for each in asked}}


def has_asked(saver: Checkpointer, question: str) -> bool:
    """Whether a question is stored, in the graph or in a subgraph."""
    stored = saver.list({"configurable": {"thread_id": "t"}})
    writes = [write for each in stored for write in each.pending_writes or ()]
    return any(name == INTERRUPT and value[0].value == question for _, name, value in writes)


@pytest.mark.parametrize("how", ["cancel", "strategy", "restart"])
@pytest.mark.parametrize("graph", ["asks", "inside"])
def test_the_answer_of_a_run_that_was_rolled_back_is_not_heard(
    db: Settings, gate: Gate, graph: str, how: str
) -> None:
    values: Any
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", graph, input={"heard": []})
        before = client.threads.get("t")
        yes, no = answers(before, "yes"), answers(before, "no")
        run = client.runs.create("t", graph, command=yes)["run_id"]
        assert gate.reached.wait(60)
        with open_checkpointer(db.db) as saver:
            wait_until(lambda: has_asked(saver, "two?"))
        if how == "strategy":
            values = client.runs.wait("t", graph, command=no, multitask_strategy="rollback")
        elif how == "cancel":
            client.runs.cancel("t", run, action="rollback", wait=True)
    with served(db, gate) as client:
        if how == "restart":
            client.runs.cancel("t", run, action="rollback", wait=True)
        gate.open.set()
        if how != "strategy":
            wait_until(lambda: len(client.runs.list("t")) == 1)
            assert client.threads.get("t")["interrupts"] == before["interrupts"]
            values = client.runs.wait("t", graph, input=None)
            assert {each["value"] for each in values["__interrupt__"]} == {"one?", "wait?"}
            values = client.runs.wait("t", graph, command=no)
        assert [each["value"] for each in values["__interrupt__"]] == ["two?"]
        values = client.runs.wait("t", graph, command={"resume": "yes"})

    assert values["heard"] == ["no", "yes", "waited"]


def test_a_plain_answer_and_its_update_are_rolled_back(db: Settings, gate: Gate) -> None:
    """They are stored in the name of no task before the graph runs."""
    with served(db, gate) as client:
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


def test_results_of_a_run_that_went_on_are_rolled_back(db: Settings, gate: Gate) -> None:
    """It had no input, so its nodes ran at a checkpoint of the run before."""
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "counts", input={"heard": []}, interrupt_before="*")
        run = client.runs.create("t", "counts", input=None)["run_id"]
        assert gate.reached.wait(60)
        with open_checkpointer(db.db) as saver:
            config: Any = {"configurable": {"thread_id": "t"}}
            wait_until(lambda: has_written(saver.get_tuple(config), "heard"))
        client.runs.cancel("t", run, action="rollback", wait=True)
        wait_until(lambda: len(client.runs.list("t")) == 1)
        gate.open.set()
        values: Any = client.runs.wait("t", "counts", input=None)

    assert values["heard"] == ["attempt 2", "slow"]


def has_written(stored: Any, channel: str) -> bool:
    return any(name == channel for _, name, _ in stored.pending_writes)


def test_an_erased_question_is_not_kept_for_a_rollback(db: Settings, gate: Gate) -> None:
    with served(db, gate) as client:
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

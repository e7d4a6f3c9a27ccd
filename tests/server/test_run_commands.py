"""Runs with an input and a command: clients of langgraph's server send the one beside the other."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from langgraph_sdk.client import SyncLangGraphClient

from perdure.server.graphs import Graphs
from tests.server.talking import Gate, State, build_input, build_talk_graph
from tests.server.test_runs import texts

QUESTION = "Send it?"
EMPTY: list[Any] = [
    None,
    {},
    {"resume": None},
    {"goto": []},
    {"goto": None},
    {"update": None},
    {"update": {}},
    {"update": None, "resume": None, "goto": None},
    {"unknown": 1},
]
BESIDE: list[Any] = [None, {}, build_input("the transcript"), [], "text"]


def review() -> Any:
    """Return a graph that asks, and whose second node has run if the answer came."""
    graph: Any = StateGraph(State)
    graph.add_node("ask", lambda state: {"heard": [interrupt(QUESTION)]})
    graph.add_node("after", lambda state: {"heard": ["after"]})
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "after")
    return graph.compile()


@pytest.fixture
def graphs(gate: Gate) -> Graphs:
    gate.open.set()
    return Graphs({"talk": build_talk_graph(gate), "review": review()})


def run(client: httpx.Client, graph: str, thread_id: str = "t", **body: Any) -> Any:
    """Run a graph on a thread and return its values."""
    asked = {"assistant_id": graph, "if_not_exists": "create", **body}
    reply = client.post(f"/threads/{thread_id}/runs/wait", json=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_an_empty_command_is_none(sdk: SyncLangGraphClient, client: httpx.Client) -> None:
    """The input beside it is run."""
    for number, command in enumerate(EMPTY):
        values = run(client, "talk", f"t{number}", input=build_input("hello"), command=command)

        assert values["heard"] == ["hello"], command
        assert texts(sdk, f"t{number}") == ["hello", "heard 1"], command


@pytest.mark.parametrize("answer", ["yes", False, 0, "", [], [{"type": "approve"}], {"a": None}])
def test_a_command_wins_over_the_input_beside_it(
    sdk: SyncLangGraphClient, client: httpx.Client, answer: Any
) -> None:
    """The question is answered, and the input is not applied a second time."""
    for number, beside in enumerate(BESIDE):
        thread_id = f"t{number}"
        run(client, "review", thread_id, input=build_input("send"))

        values = run(client, "review", thread_id, input=beside, command={"resume": answer})

        assert values["heard"] == [answer, "after"]
        assert texts(sdk, thread_id) == ["send"]
        assert sdk.threads.get(thread_id)["status"] == "idle"


def test_an_update_and_an_answer_stand_in_one_command(client: httpx.Client) -> None:
    run(client, "review", input={})

    command = {"update": {"heard": ["noted"]}, "resume": "yes", "goto": None}
    values = run(client, "review", input=build_input("x"), command=command)

    assert values["heard"] == ["noted", "yes", "after"]


@pytest.mark.parametrize("goto", ["__end__", ["__end__"], {"node": "__end__", "input": None}])
def test_going_to_the_end_leaves_the_question(
    sdk: SyncLangGraphClient, client: httpx.Client, goto: Any
) -> None:
    """As on langgraph's server: the task that waits is not taken back by `goto`."""
    run(client, "review", input={})

    values = run(client, "review", input=build_input("x"), command={"goto": goto})

    assert [each["value"] for each in values["__interrupt__"]] == [QUESTION]
    assert values.get("heard", []) == []
    assert sdk.threads.get("t")["status"] == "interrupted"


@pytest.mark.parametrize("path", ["/threads/t/runs/stream", "/threads/t/runs", "/runs/batch"])
def test_every_way_to_begin_a_run_takes_both(
    sdk: SyncLangGraphClient, client: httpx.Client, path: str
) -> None:
    run(client, "review", input={})
    body: Any = {"assistant_id": "review", "input": build_input("x"), "command": {"resume": "yes"}}

    asked = [{**body, "thread_id": "t"}] if path == "/runs/batch" else body
    assert client.post(path, json=asked).status_code == 200

    sdk.runs.join("t", sdk.runs.list("t")[0]["run_id"])
    assert sdk.threads.get_state("t")["values"]["heard"] == ["yes", "after"]  # type: ignore[call-overload]


def test_a_superstep_with_an_empty_command_has_its_values(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    update = {"values": {"heard": ["made"]}, "command": {}, "as_node": "ask"}
    made = {"thread_id": "u", "metadata": {"graph_id": "review"}}
    steps = [{"updates": [update]}]

    assert client.post("/threads", json={**made, "supersteps": steps}).status_code == 200

    assert sdk.threads.get_state("u")["values"]["heard"] == ["made"]  # type: ignore[call-overload]

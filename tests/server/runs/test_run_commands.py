"""Runs with both an input and a command, as clients of LangGraph's server send them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from langgraph_sdk.client import SyncLangGraphClient

from perdure.server.graphs import Graphs
from tests.server.runs.test_runs import read_message_texts
from tests.server.talking import Gate, State, build_input, build_talk_graph

QUESTION = "Send it?"
EMPTY_COMMANDS: list[Any] = [
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
INPUTS: list[Any] = [None, {}, build_input("the transcript"), [], "text"]


def build_review_graph() -> Any:
    """Return a graph that asks in one node, and runs a second node after the answer."""
    graph: Any = StateGraph(State)
    graph.add_node("ask", lambda state: {"heard": [interrupt(QUESTION)]})
    graph.add_node("after", lambda state: {"heard": ["after"]})
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "after")
    return graph.compile()


@pytest.fixture
def graphs(gate: Gate) -> Graphs:
    gate.open.set()
    return Graphs({"talk": build_talk_graph(gate), "review": build_review_graph()})


def run_and_wait(client: httpx.Client, graph: str, thread_id: str = "t", **body: Any) -> Any:
    """Run a graph on a thread and return its values."""
    asked = {"assistant_id": graph, "if_not_exists": "create", **body}
    reply = client.post(f"/threads/{thread_id}/runs/wait", json=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_empty_command_is_ignored_and_input_is_run(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    """The graph runs with the input of the same request."""
    for number, command in enumerate(EMPTY_COMMANDS):
        values = run_and_wait(
            client, "talk", f"t{number}", input=build_input("hello"), command=command
        )

        assert values["heard"] == ["hello"], command
        assert read_message_texts(sdk, f"t{number}") == ["hello", "heard 1"], command


@pytest.mark.parametrize("answer", ["yes", False, 0, "", [], [{"type": "approve"}], {"a": None}])
def test_command_takes_precedence_over_input_of_same_request(
    sdk: SyncLangGraphClient, client: httpx.Client, answer: Any
) -> None:
    """The question is answered, and the input is not applied a second time."""
    for number, input in enumerate(INPUTS):
        thread_id = f"t{number}"
        run_and_wait(client, "review", thread_id, input=build_input("send"))

        values = run_and_wait(client, "review", thread_id, input=input, command={"resume": answer})

        assert values["heard"] == [answer, "after"]
        assert read_message_texts(sdk, thread_id) == ["send"]
        assert sdk.threads.get(thread_id)["status"] == "idle"


def test_one_command_can_hold_update_and_answer(client: httpx.Client) -> None:
    run_and_wait(client, "review", input={})

    command = {"update": {"heard": ["noted"]}, "resume": "yes", "goto": None}
    values = run_and_wait(client, "review", input=build_input("x"), command=command)

    assert values["heard"] == ["noted", "yes", "after"]


@pytest.mark.parametrize("goto", ["__end__", ["__end__"], {"node": "__end__", "input": None}])
def test_goto_end_leaves_question_open(
    sdk: SyncLangGraphClient, client: httpx.Client, goto: Any
) -> None:
    """As on LangGraph's server, `goto` does not withdraw the task that waits."""
    run_and_wait(client, "review", input={})

    values = run_and_wait(client, "review", input=build_input("x"), command={"goto": goto})

    assert [each["value"] for each in values["__interrupt__"]] == [QUESTION]
    assert values.get("heard", []) == []
    assert sdk.threads.get("t")["status"] == "interrupted"


@pytest.mark.parametrize("path", ["/threads/t/runs/stream", "/threads/t/runs", "/runs/batch"])
def test_every_run_endpoint_accepts_input_with_command(
    sdk: SyncLangGraphClient, client: httpx.Client, path: str
) -> None:
    run_and_wait(client, "review", input={})
    body: Any = {"assistant_id": "review", "input": build_input("x"), "command": {"resume": "yes"}}

    asked = [{**body, "thread_id": "t"}] if path == "/runs/batch" else body
    assert client.post(path, json=asked).status_code == 200

    sdk.runs.join("t", sdk.runs.list("t")[0]["run_id"])
    assert sdk.threads.get_state("t")["values"]["heard"] == ["yes", "after"]  # type: ignore[call-overload]


def test_superstep_with_empty_command_applies_its_values(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    update = {"values": {"heard": ["made"]}, "command": {}, "as_node": "ask"}
    made = {"thread_id": "u", "metadata": {"graph_id": "review"}}
    steps = [{"updates": [update]}]

    assert client.post("/threads", json={**made, "supersteps": steps}).status_code == 200

    assert sdk.threads.get_state("u")["values"]["heard"] == ["made"]  # type: ignore[call-overload]

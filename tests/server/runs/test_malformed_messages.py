"""Malformed messages in an input or a command are refused, and the thread stays as it was."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

import httpx
import pytest
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.graph import StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt

from perdure.memory.short_term.reducers import messages
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests.server.running import run_server

BAD: list[Any] = [
    [{"role": "nobody", "content": "x"}],
    [{"content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": {"a": 1}}],
    [{"role": "tool", "content": "x"}],
    [{"type": "keep", "from": "x"}],
    [["nobody", "hi"]],
    [5],
    [None],
    5,
    {"role": "x"},
]
RESEMBLING = 6
"""The number of leading values of `BAD` that are lists of objects that resemble messages."""
GOOD: list[Any] = [
    "text",
    ["text"],
    [["user", "hi"]],
    [],
    {"role": "user", "content": "hi"},
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    [{"type": "human", "content": [{"type": "text", "text": "hi"}]}],
    [{"type": "keep", "from": -1, "to": None}],
    [{"role": "remove", "id": "first", "content": ""}],
    [AIMessage("hi").to_json()],
]
HI: Any = {"messages": [{"role": "user", "content": "hi", "id": "first"}]}
CRON = {"schedule": "0 0 1 1 *"}


class Chat(TypedDict, total=False):
    """Two channels with message reducers, a list channel, and a channel of any value."""

    messages: Annotated[list[AnyMessage], messages]
    others: Annotated[list[AnyMessage], add_messages]
    forms: Annotated[list[Any], operator.add]
    last: Any


def build_graph() -> Any:
    """Build a graph that adds nothing."""
    builder = StateGraph(Chat)
    builder.add_node("node", lambda state: {"forms": []})
    builder.set_entry_point("node")
    return builder.compile()


def build_asking_graph() -> Any:
    """Build a graph that interrupts with a question and adds the answer."""
    builder = StateGraph(Chat)
    builder.add_node("ask", lambda state: {"forms": [interrupt("What?")]})
    builder.set_entry_point("ask")
    return builder.compile()


@pytest.fixture
def client(db: Settings) -> Any:
    """A client of a server, on a file and on Postgres."""
    app = create_app(db, graphs=Graphs({"chat": build_graph(), "ask": build_asking_graph()}))
    with run_server(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def create_thread_with_turn(client: httpx.Client) -> str:
    """Create a thread, run a turn on it, and return its id."""
    thread_id: str = client.post("/threads", json={}).json()["thread_id"]
    body = {"assistant_id": "chat", "input": HI | {"others": HI["messages"]}}
    client.post(f"/threads/{thread_id}/runs/wait", json=body).raise_for_status()
    return thread_id


def build_requests(thread_id: str, channel: str, value: Any) -> list[tuple[str, Any]]:
    """Build the paths and bodies of all requests that send a value to a channel of a thread."""
    bodies: list[dict[str, Any]] = [
        {"assistant_id": "chat", "command": {"update": {channel: value}}},
        {"assistant_id": "chat", "command": {"update": [[channel, value]]}},
        {"assistant_id": "chat", "input": {channel: value}},
    ]
    of_thread = f"/threads/{thread_id}"
    return [
        *((f"{of_thread}/runs/wait", body) for body in bodies),
        *((f"{of_thread}/runs/stream", body) for body in bodies[:1]),
        *((f"{of_thread}/runs/crons", body | CRON) for body in bodies[:1]),
        ("/runs/wait", bodies[2]),
        ("/runs/batch", [bodies[0] | {"thread_id": thread_id}]),
        (f"{of_thread}/commands", {"id": 1, "method": "run.start", "params": bodies[2]}),
        (f"{of_thread}/state", {"values": {channel: value}}),
    ]


def test_malformed_messages_are_refused_before_anything_is_written(client: httpx.Client) -> None:
    """All requests that start a run answer 422, and the thread stays readable and usable."""
    thread_id = create_thread_with_turn(client)
    paths = [f"/threads/{thread_id}/{each}" for each in ("state", "history", "runs")]
    before = [client.get(path).json() for path in paths]
    sent = [each for value in BAD for each in build_requests(thread_id, "messages", value)]
    sent += [
        each for value in BAD[:RESEMBLING] for each in build_requests(thread_id, "others", value)
    ]
    sent += [build_requests(thread_id, "others", value)[0] for value in BAD[RESEMBLING:]]
    for path, body in sent:
        reply = client.post(path, json=body)
        assert reply.status_code == 422, (path, body, reply.text)
        assert "detail" in reply.json()

    assert [client.get(path).json() for path in paths] == before
    assert client.post("/runs/crons/count", json={}).json() == 0
    assert client.post("/threads/count", json={}).json() == 1
    begin = {"assistant_id": "chat", "input": HI}
    ended = client.post(f"/threads/{thread_id}/runs/wait", json=begin).json()
    assert [each["content"] for each in ended["messages"]] == ["hi"]


def test_refusal_of_malformed_messages_names_value_and_expectation(client: httpx.Client) -> None:
    path, body = build_requests(create_thread_with_turn(client), "messages", BAD[0])[0]
    sentence = client.post(path, json=body).json()["detail"]

    assert "the value of the channel 'messages' is [{'role': 'nobody', 'content': 'x'}]" in sentence
    assert 'expected messages, such as [{"role": "user", "content": "hello"}]' in sentence
    assert "Unexpected message type: 'nobody'" in sentence


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_all_valid_forms_of_messages_are_accepted(client: httpx.Client, number: int) -> None:
    """Valid forms include removals and keeps, which depend on the state."""
    thread_id = create_thread_with_turn(client)
    for path, body in build_requests(thread_id, "messages", GOOD[number])[:1]:
        reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert "__error__" not in reply.json()
    assert client.get(f"/threads/{thread_id}/state").status_code == 200


def test_channels_without_message_reducer_accept_malformed_messages(client: httpx.Client) -> None:
    """Only a channel with a message reducer contains messages."""
    thread_id = create_thread_with_turn(client)
    values = {"forms": [{"role": "nobody"}], "last": [{"type": 5}], "none": [{"role": 1}]}
    for body in ({"input": values}, {"command": {"update": values}}):
        path, sent = f"/threads/{thread_id}/runs/wait", {"assistant_id": "chat", **body}
        reply = client.post(path, json=sent)
        assert reply.status_code == 200, reply.text
        assert reply.json()["last"] == [{"type": 5}]


UNAPPLICABLE: list[dict[str, Any]] = [
    {"input": {"forms": 5}},
    {"command": {"update": {"forms": 5}}},
    {"command": {"update": [["last", 1], ["forms", 5]], "resume": "yes"}},
]


@pytest.mark.parametrize("request_body", UNAPPLICABLE)
def test_thread_stays_usable_after_update_that_reducer_refuses(
    client: httpx.Client, request_body: dict[str, Any]
) -> None:
    """The run fails with the error of `operator.add`, which only accepts lists here."""
    thread_id = create_thread_with_turn(client)
    path = f"/threads/{thread_id}/runs/wait"
    client.post(path, json={"assistant_id": "ask", "input": {"forms": [1]}}).raise_for_status()
    added = {"assistant_id": "ask", "command": {"update": {"forms": [2]}}}
    client.post(path, json=added).raise_for_status()

    failed = client.post(path, json={"assistant_id": "ask", **request_body}).json()

    assert failed["__error__"]["error"] == "TypeError"
    state = client.get(f"/threads/{thread_id}/state")
    history = client.get(f"/threads/{thread_id}/history")
    assert (state.status_code, history.status_code) == (200, 200), state.text + history.text
    if "command" in request_body:
        assert state.json()["values"]["forms"] == [1, 2]
        answer = {"assistant_id": "ask", "command": {"resume": "yes"}}
        assert client.post(path, json=answer).json()["forms"] == [1, 2, "yes"]
    more = client.post(path, json={"assistant_id": "chat", "input": {"forms": [3]}}).json()
    assert more["forms"][-1] == 3

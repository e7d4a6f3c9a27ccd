"""Stream modes as clients send them, and the events of each mode, as on LangGraph's server.

The expected events were compared with `langgraph dev` (langgraph-cli 0.4.40, langgraph-api 0.16.7).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from langgraph.graph import START, StateGraph
from langgraph_sdk.client import SyncLangGraphClient

from perdure.server.graphs import Graphs
from tests.server.talking import (
    Gate,
    State,
    build_asking_graph,
    build_input,
    build_model_graph,
    build_talk_graph,
)


@pytest.fixture
def graphs(gate: Gate) -> Graphs:
    gate.open.set()
    graph = StateGraph(State).add_node("say", lambda state: {"heard": ["said"]})
    graph.add_edge(START, "say")
    made = {
        "model": build_model_graph(),
        "ask": build_asking_graph(),
        "named": graph.compile(name="Named"),
    }
    return Graphs(
        {"talk": build_talk_graph(gate), "plain": graph, "compiled": graph.compile(), **made}
    )


def stream_run(client: httpx.Client, graph: str, **body: Any) -> list[tuple[str, Any]]:
    """Return the events of a run on a new thread, without the namespaces of subgraphs."""
    thread_id = client.post("/threads", json={}).json()["thread_id"]
    asked = {"assistant_id": graph, "input": build_input("go"), **body}
    reply = client.post(f"/threads/{thread_id}/runs/stream", json=asked)
    assert reply.status_code == 200, reply.text
    return parse_events(reply.text.splitlines())


def parse_events(lines: Iterable[str]) -> list[tuple[str, Any]]:
    events, name = list[tuple[str, Any]](), ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ").partition("|")[0]
        elif line.startswith("data: "):
            events.append((name, json.loads(line.removeprefix("data: "))))
    return events


def count_events_by_name(events: list[tuple[str, Any]]) -> dict[str, int]:
    return dict(Counter(name for name, _ in events))


def test_values_are_streamed_once_for_every_form_of_mode(client: httpx.Client) -> None:
    forms: list[Any] = [None, [], "values", ["values"], ["values", "values"]]

    for body in ({}, *({"stream_mode": form} for form in forms)):
        assert count_events_by_name(stream_run(client, "plain", **body)) == {
            "metadata": 1,
            "values": 2,
        }, body


def test_token_is_streamed_once_with_both_message_modes(client: httpx.Client) -> None:
    """With both message modes, a token is streamed as a tuple."""
    both: Any = [["messages", "messages-tuple"], ["messages-tuple", "messages", "messages"]]

    def told(modes: Any) -> dict[str, int]:
        return count_events_by_name(
            stream_run(client, "model", stream_mode=modes, stream_subgraphs=True)
        )

    alone, tuples = told("messages"), told(["messages-tuple"])

    assert alone.keys() == {"metadata", "messages/metadata", "messages/partial"}
    assert tuples == {"metadata": 1, "messages": alone["messages/partial"]}
    assert [told(modes) for modes in both] == [tuples, tuples]


def test_complete_message_is_preceded_by_its_metadata(client: httpx.Client) -> None:
    events = stream_run(client, "talk", stream_mode="messages")
    names = [name for name, _ in events]

    assert names == ["metadata", "messages/metadata", "messages/complete"]
    assert [*events[1][1]] == [events[2][1][0]["id"]]


@pytest.mark.parametrize("graph", ["talk", "model", "ask"])
@pytest.mark.parametrize("more", [[], ["values", "updates", "messages-tuple", "custom", "debug"]])
def test_events_mode_does_not_repeat_chunks_of_other_modes(
    client: httpx.Client, graph: str, more: Any
) -> None:
    """Chunks of the root graph are streamed by the other modes only, not as events."""
    events = stream_run(client, graph, stream_mode=["events", *more], stream_subgraphs=True)
    root = [data["event"] for name, data in events if name == "events" and not data["parent_ids"]]

    assert root == ["on_chain_start", "on_chain_end"]
    told = count_events_by_name(
        stream_run(client, graph, stream_mode=more or ["values"], stream_subgraphs=True)
    )
    expected = told if more else {"metadata": 1}
    assert {
        name: n for name, n in count_events_by_name(events).items() if name != "events"
    } == expected


@pytest.mark.parametrize(
    ("graph", "expected_name"), [("plain", "plain"), ("compiled", "compiled"), ("named", "Named")]
)
def test_events_name_graph_without_name_by_its_id(
    client: httpx.Client, graph: str, expected_name: str
) -> None:
    events = stream_run(client, graph, stream_mode="events")

    assert {
        data["name"] for kind, data in events if kind == "events" and not data["parent_ids"]
    } == {expected_name}


@pytest.mark.parametrize("graph", ["plain", None])
def test_state_of_thread_without_runs_has_no_checkpoint(
    client: httpx.Client, graph: str | None
) -> None:
    thread = client.post("/threads", json={"metadata": {"graph_id": graph} if graph else {}}).json()
    path = f"/threads/{thread['thread_id']}/state"

    for state in (client.get(path), client.post(f"{path}/checkpoint", json={"checkpoint": {}})):
        assert state.json()["checkpoint"] is None
        assert state.json()["parent_checkpoint"] is None
        assert state.json()["checkpoint_id"] is None


def test_join_accepts_stream_modes_in_every_form(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    """Some versions of the JavaScript SDK repeat the parameter, others send a JSON array."""
    modes: Any = ["values", "updates", "messages-tuple"]
    run_id = sdk.runs.create("t", "talk", input=build_input("go"), stream_mode=modes)["run_id"]
    sdk.runs.join("t", run_id)
    forms: list[tuple[Any, set[str]]] = [
        ("", {"values", "updates", "messages"}),
        ("[]", {"values", "updates", "messages"}),
        ("values", {"values"}),
        (["values", "updates"], {"values", "updates"}),
        ('["values","updates"]', {"values", "updates"}),
        ("messages", {"messages"}),
        ("messages-tuple", {"messages"}),
        ("custom", set()),
    ]

    for form, expected in forms:
        path = f"/threads/t/runs/{run_id}/stream"
        reply = client.get(path, params={"stream_mode": form})
        assert {name for name, _ in parse_events(reply.text.splitlines())} - {
            "metadata"
        } == expected, form


def test_unknown_stream_mode_is_refused(sdk: SyncLangGraphClient, client: httpx.Client) -> None:
    run_id = sdk.runs.create("t", "talk", input=build_input("go"))["run_id"]

    for path in (f"/threads/t/runs/{run_id}/stream", "/threads/t/stream"):
        for mode in ("nope", '["nope"]', "[", '"values"', "[[1]]"):
            assert client.get(path, params={"stream_mode": mode}).status_code == 422, mode


def test_select_accepts_field_names_in_every_form(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    sdk.runs.wait("t", "plain", input=build_input("go"))

    for select in (["run_id", "status"], '["run_id","status"]'):
        [run] = client.get("/threads/t/runs", params={"select": select}).json()
        assert {*run} == {"run_id", "status"}
    for select in (["next", "values"], '["next","values"]'):
        assert {*client.get("/threads/t/state", params={"select": select}).json()} == {
            "next",
            "values",
        }

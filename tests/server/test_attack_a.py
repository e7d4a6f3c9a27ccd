"""Defects that hostile or unlucky clients of threads and runs have found; each is one test."""

from __future__ import annotations

import asyncio
import concurrent.futures
import operator
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import httpx
import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel.remote import RemoteGraph
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests.server.running import running
from tests.server.talking import Gate, ask, fail, says, talk


class Log(TypedDict, total=False):
    """What happened."""

    log: Annotated[list[str], operator.add]


def stubborn(first: Gate, second: Gate, told: threading.Event) -> StateGraph[Log]:
    """Cancelled, it goes on until its gate is open, as one that tidies up does; `told` is set."""

    async def go(state: Log) -> dict[str, Any]:
        gate = second if first.reached.is_set() else first
        gate.reached.set()
        while not gate.open.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                told.set()
        return {"log": ["went on"]}

    return StateGraph(Log).add_node(go).add_edge(START, "go")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def second() -> Gate:
    return Gate()


@pytest.fixture
def told() -> threading.Event:
    return threading.Event()


@pytest.fixture
def graphs(gate: Gate, second: Gate, told: threading.Event) -> Graphs:
    made = {"stubborn": stubborn(gate, second, told)}
    asking = {"ask": ask(), "fail": fail()}
    return Graphs({"talk": talk(gate), **made, **asking})


@pytest.fixture
def url(settings: Settings, graphs: Graphs) -> Iterator[str]:
    with running(create_app(settings, graphs=graphs)) as address:
        yield address


@pytest.fixture
def sdk(url: str) -> Iterator[SyncLangGraphClient]:
    with get_sync_client(url=url) as client:
        client.threads.create(thread_id="t")
        yield client


def body(text: str = "hello", **options: Any) -> dict[str, Any]:
    return {"assistant_id": "talk", "input": says(text), **options}


def values(sdk: SyncLangGraphClient, thread_id: str = "t") -> dict[str, Any]:
    found: Any = sdk.threads.get_state(thread_id)["values"]
    return dict(found)


def until(truth: Any, patience_s: float = 60) -> None:
    deadline = time.monotonic() + patience_s
    while not truth():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- what is lost


@pytest.mark.xfail(strict=True, reason="a run at an unknown checkpoint begins with an empty state")
@pytest.mark.parametrize(
    "place",
    [
        {"checkpoint_id": "1f1e71fc-53de-6a0e-8005-e771d5265d49"},
        {"config": {"configurable": {"checkpoint_id": "1f1e71fc-53de-6a0e-8005-e771d5265d49"}}},
    ],
    ids=["checkpoint_id", "configurable"],
)
def test_a_run_at_an_unknown_checkpoint_is_refused(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate, place: dict[str, Any]
) -> None:
    gate.open.set()
    sdk.runs.wait("t", "talk", input=says("one"))

    answer = client.post("/threads/t/runs/wait", json=body("two", **place))

    assert values(sdk)["heard"] == ["one"]  # now ["two"]: as if the thread were empty
    assert answer.status_code == 404


def test_a_thread_that_is_pruned_in_a_run_stays_deleted(client: httpx.Client, gate: Gate) -> None:
    client.post("/threads", json={"thread_id": "t"})
    with client.stream("POST", "/threads/t/runs/stream", json=body("one")) as events:
        assert gate.reached.wait(60)
        pruned = client.post("/threads/prune", json={"thread_ids": ["t"]})
        gate.open.set()
        events.read()  # to the end of the run

    assert pruned.status_code == 409 or client.get("/threads/t").status_code == 404


def test_a_thread_that_another_server_runs_is_not_deleted_under_it(
    client: httpx.Client, settings: Settings, graphs: Graphs, gate: Gate
) -> None:
    client.post("/threads", json={"thread_id": "t"})
    with (
        client.stream("POST", "/threads/t/runs/stream", json=body("one")) as events,
        running(create_app(settings, graphs=graphs)) as other,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        assert gate.reached.wait(60)
        deletion = pool.submit(httpx.delete, f"{other}/threads/t", timeout=60)
        concurrent.futures.wait([deletion], 1)  # it is done at once, or waits for the run's end
        gate.open.set()
        events.read()
        status = deletion.result().status_code

    assert status == 409 or client.get("/threads/t").status_code == 404


def test_a_run_that_is_sent_during_a_deletion_does_not_bring_the_thread_back(
    client: httpx.Client, url: str, gate: Gate, second: Gate, told: threading.Event
) -> None:
    client.post("/threads", json={"thread_id": "t"})
    asked = {"assistant_id": "stubborn", "input": {"log": ["in"]}}
    client.post("/threads/t/runs", json=asked)
    assert gate.reached.wait(60)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        deletion = pool.submit(httpx.delete, f"{url}/threads/t", timeout=60)
        until(lambda: deletion.done() or told.is_set())  # it waits for the first run
        with client.stream("POST", "/threads/t/runs/stream", json=asked) as events:
            gate.open.set()
            until(lambda: deletion.done() or second.reached.is_set())
            concurrent.futures.wait([deletion], 1)
            second.open.set()
            events.read()
        status = deletion.result().status_code

    assert status == 409 or client.get("/threads/t").status_code == 404


# -- what is not told


@pytest.mark.xfail(strict=True, reason="an update of the state does not change the status")
def test_a_thread_whose_question_an_update_answers_is_idle(sdk: SyncLangGraphClient) -> None:
    sdk.runs.wait("t", "ask", input={})
    sdk.threads.update_state("t", {"heard": ["yes"]}, as_node="hear")

    assert sdk.threads.get_state("t")["next"] == []
    assert sdk.threads.get("t")["status"] == "idle"


# -- what is written though it is refused


@pytest.mark.xfail(strict=True, reason="the thread is created before the graph is looked up")
@pytest.mark.parametrize("path", ["/runs/wait", "/threads/new/runs/wait"])
def test_a_run_of_an_unknown_graph_writes_nothing(client: httpx.Client, path: str) -> None:
    asked = body(assistant_id="nope") | ({"if_not_exists": "create"} if "new" in path else {})

    answer = client.post(path, json=asked)

    assert answer.status_code == 404
    assert client.post("/threads/count", json={}).json() == 0


@pytest.mark.parametrize(("graph", "nodes"), [("nope", ["hear"]), ("talk", ["hear", "nope"])])
def test_a_thread_whose_supersteps_are_refused_is_not_created(
    client: httpx.Client, graph: str, nodes: list[str]
) -> None:
    steps = [{"updates": [{"values": {"heard": ["x"]}, "as_node": node}]} for node in nodes]

    asked = {"thread_id": "new", "metadata": {"graph_id": graph}, "supersteps": steps}
    answer = client.post("/threads", json=asked)

    assert answer.status_code == 422
    assert client.get("/threads/new").status_code == 404


@pytest.mark.xfail(strict=True, reason="ids are checked one by one, after threads are deleted")
def test_a_prune_that_is_refused_deletes_nothing(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    answer = client.post("/threads/prune", json={"thread_ids": ["t", ""]})

    assert answer.status_code == 422
    assert client.get("/threads/t").status_code == 200


# -- what fails


@pytest.mark.xfail(strict=True, reason="a record that the store's endpoint changed is not checked")
def test_a_spoilt_record_of_a_thread_breaks_no_list(
    sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    place = {"namespace": ["perdure.server", "threads"], "key": "t"}
    put = client.put("/store/items", json={**place, "value": {"metadata": 5}})

    assert client.post("/threads/search", json={}).status_code == 200
    assert client.patch("/threads/t", json={"metadata": {"n": 1}}).status_code == 200
    assert put.status_code in (204, 403, 422)


@pytest.mark.xfail(strict=True, reason="langgraph's metadata of the outer graph is refused")
def test_a_served_graph_is_a_node_of_another(sdk: SyncLangGraphClient, gate: Gate) -> None:
    gate.open.set()
    remote = RemoteGraph("talk", sync_client=sdk)
    outer = StateGraph(MessagesState).add_node("remote", remote).add_edge(START, "remote").compile()

    given: Any = says("hello")
    found = outer.invoke(given)

    assert [message.text for message in found["messages"]][-1] == "heard 1"


@pytest.mark.xfail(strict=True, reason="the places in config.configurable are not checked")
def test_a_place_in_the_config_is_checked(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate
) -> None:
    gate.open.set()

    answer = client.post(
        "/threads/t/runs/wait", json=body(config={"configurable": {"checkpoint_id": 5}})
    )

    assert answer.status_code == 422
    assert sdk.threads.get("t")["status"] == "idle"


@pytest.mark.xfail(strict=True, reason="an unknown mode or status is taken, and nothing matches")
def test_an_unknown_choice_in_a_query_is_refused(
    sdk: SyncLangGraphClient, client: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    run = sdk.runs.create("t", "talk", input=says("one"))

    path = f"/threads/t/runs/{run['run_id']}/stream"
    assert client.get(path, params={"stream_mode": "nope"}).status_code == 422
    assert client.get("/threads/t/runs", params={"status": "nope"}).status_code == 422

"""Final states of ended runs: how long, and in how much memory, a server keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from perdure.checkpointers import open_checkpointer
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.keys import KeysFileAccess
from perdure.server.http.limits import Limits
from perdure.server.runs import event_memory, run_queue
from perdure.server.runs.run import Run
from perdure.settings import Settings
from tests.server.http.test_keys import ANN, BOB, render_key_entry
from tests.server.running import run_server, wait_until
from tests.server.talking import Gate, State, build_input

USER_BYTES, ALL_BYTES = 1_000_000, 1_500_000
SIZE = 300_000  # of a state


def build_long_text_graph() -> StateGraph[State]:
    """Return a graph that writes a long text."""

    def hear(state: State) -> dict[str, Any]:
        return {"heard": [state["messages"][-1].text.ljust(SIZE, "x")]}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def build_gated_graph(gate: Gate) -> StateGraph[State]:
    """Return a graph that writes a long text once the gate is open."""

    async def hear(state: State) -> dict[str, Any]:
        await gate.pass_through()
        return {"heard": [state["messages"][-1].text.ljust(SIZE, "x")]}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


def build_asking_graph() -> StateGraph[State]:
    """Return a graph that asks two questions at once."""

    def first(state: State) -> dict[str, Any]:
        return {"heard": [interrupt("first?")]}

    def second(state: State) -> dict[str, Any]:
        return {"heard": [interrupt("second?")]}

    made = StateGraph(State).add_node(first).add_node(second)
    return made.add_edge(START, "first").add_edge(START, "second")


@pytest.fixture
def app(settings: Settings, gate: Gate, tmp_path: Path) -> Any:
    """An application of two users with small limits."""
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    keys.chmod(0o600)
    graphs = {
        "report": build_long_text_graph(),
        "gated": build_gated_graph(gate),
        "asking": build_asking_graph(),
    }
    limits = Limits(user_event_bytes=USER_BYTES, all_event_bytes=ALL_BYTES)
    return create_app(settings, access=KeysFileAccess(keys), graphs=Graphs(graphs), limits=limits)


@pytest.fixture
def url(app: Any) -> Iterator[str]:
    with run_server(app) as address:
        yield address


@pytest.fixture
def ann(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"x-api-key": ANN}, timeout=60) as client:
        yield client


def build_run_body(text: str = "hello", graph: str = "report", **more: Any) -> dict[str, Any]:
    return {"assistant_id": graph, "input": build_input(text), **more}


def wait_for_ended_runs(app: Any) -> list[Run]:
    """Return the runs that the server keeps after their end, once all have ended."""
    wait_until(lambda: not app.state.runs.shared_state.players_by_run)
    return [run for runs in app.state.runs._by_tenant.values() for run in runs._ended_runs]


def start_run_on_new_thread(client: httpx.Client, **more: Any) -> str:
    """Begin a run on a new thread, and return its path."""
    thread = client.post("/threads", json={}).json()["thread_id"]
    reply = client.post(f"/threads/{thread}/runs", json=build_run_body(**more)).raise_for_status()
    return f"/threads/{thread}/runs/{reply.json()['run_id']}"


def wait_for_end(client: httpx.Client, path: str) -> None:
    """Wait until a run has ended, without asking for its values."""
    wait_until(lambda: client.get(path).json()["status"] not in ("pending", "running"))


def prevent_reading_values(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server fail if it reads the values of a run from the database."""

    async def refuse(self: Any, run: Run) -> Any:
        raise AssertionError(f"the values of {run.run_id} were read")

    monkeypatch.setattr(run_queue.RunQueue, "read_output", refuse)


@pytest.mark.parametrize("path", ["/runs", "/runs/wait", "/runs/stream"])
def test_states_of_runs_without_thread_are_not_kept(app: Any, ann: httpx.Client, path: str) -> None:
    for number in range(6):
        reply = ann.post(path, json=build_run_body(f"{number}", stream_mode=["updates"]))
        assert reply.is_success
        if path == "/runs/wait":
            assert reply.json()["heard"] == [f"{number}".ljust(SIZE, "x")]

    runs = wait_for_ended_runs(app)
    assert [run.temporary for run in runs] == [True] * 6
    assert [run.output for run in runs] == [None] * 6
    assert app.state.runs.shared_state.memory.size <= USER_BYTES


def test_join_after_end_of_run_without_thread_is_answered_with_404(
    app: Any, ann: httpx.Client
) -> None:
    run = ann.post("/runs", json=build_run_body()).json()
    wait_for_ended_runs(app)
    late = ann.get(f"/threads/{run['thread_id']}/runs/{run['run_id']}/join")

    assert late.status_code == 404
    assert run["thread_id"] in late.json()["detail"]


def test_all_clients_that_wait_for_run_without_thread_receive_its_state(
    app: Any, ann: httpx.Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are so small that no ended run and no event is kept."""
    monkeypatch.setattr(run_queue, "RETAINED_ENDED_RUNS", 0)
    monkeypatch.setattr(event_memory, "MAX_ENDED_BYTES", 0)
    with ThreadPoolExecutor(12) as clients:
        waits = [
            clients.submit(ann.post, "/runs/wait", json=build_run_body(f"{n}", "gated"))
            for n in range(6)
        ]
        run = ann.post("/runs", json=build_run_body("joined", "gated")).json()
        path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/join"
        joins = [clients.submit(ann.get, path) for _ in range(4)]
        live = app.state.runs.shared_state.players_by_run
        wait_until(lambda: len(live) == 7)
        wait_until(lambda: sum(run._output_requests for run in live) == 10)
        gate.open.set()
        replies = [each.result().json()["heard"] for each in waits]
        joined = [each.result().json()["heard"] for each in joins]

    assert replies == [[f"{number}".ljust(SIZE, "x")] for number in range(6)]
    assert joined == [["joined".ljust(SIZE, "x")]] * 4
    assert wait_for_ended_runs(app) == []


def test_state_is_freed_after_waiting_client_disconnects(
    app: Any, ann: httpx.Client, gate: Gate
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        ann.post("/runs/wait", json=build_run_body(graph="gated"), timeout=0.5)
    assert gate.reached.wait(60)
    [run] = app.state.runs.shared_state.players_by_run
    wait_until(lambda: run._output_requests == 0)
    gate.open.set()

    assert [each.output for each in wait_for_ended_runs(app)] == [None]


def test_states_count_towards_event_limit_and_oldest_are_dropped_first(
    app: Any, ann: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [start_run_on_new_thread(ann, text=f"{number}") for number in range(8)]
    for path in paths:
        wait_for_end(ann, path)
    runs = wait_for_ended_runs(app)

    assert [run.output for run in runs] == [None] * 8
    assert 0 < app.state.runs.shared_state.memory.size <= USER_BYTES
    states = [ann.get(f"{path}/join").json()["heard"] for path in paths]
    assert states == [[f"{number}".ljust(SIZE, "x")] for number in range(8)]
    prevent_reading_values(app, monkeypatch)
    last = runs[-1].thread_id
    [path] = [each for each in paths if last in each]
    assert ann.get(f"{path}/join").is_success
    [path] = [each for each in paths if runs[0].thread_id in each]
    with pytest.raises(httpx.HTTPError):
        ann.get(f"{path}/join").raise_for_status()


def test_states_of_all_users_stay_within_limit_of_process(
    app: Any, url: str, ann: httpx.Client
) -> None:
    with httpx.Client(base_url=url, headers={"x-api-key": BOB}, timeout=60) as bob:
        for client in (ann, bob) * 4:
            path = start_run_on_new_thread(client)
            wait_for_end(client, path)
            assert client.get(f"{path}/join").json()["heard"] == ["hello".ljust(SIZE, "x")]

    assert [run.output for run in wait_for_ended_runs(app)] == [None] * 8
    assert 0 < app.state.runs.shared_state.memory.size <= ALL_BYTES


@pytest.mark.parametrize("modes", [["values"], ["updates", "values", "custom"], ["messages"]])
@pytest.mark.parametrize("graph", ["report", "asking"])
def test_state_is_same_at_end_from_memory_and_from_database(
    app: Any, ann: httpx.Client, graph: str, modes: list[str]
) -> None:
    thread = ann.post("/threads", json={}).json()["thread_id"]
    body = build_run_body(graph=graph, stream_mode=modes)
    now = ann.post(f"/threads/{thread}/runs/wait", json=body).json()
    [run] = wait_for_ended_runs(app)
    path = f"/threads/{thread}/runs/{run.run_id}/join"
    late = ann.get(path).json()
    run.drop_events_and_unused_output()
    later = ann.get(path).json()

    def ordered(state: dict[str, Any]) -> Any:
        asks = [(each["value"], each["id"]) for each in state.pop("__interrupt__", [])]
        return state, sorted(asks)

    assert run.output is None
    assert len(now.get("__interrupt__", ())) == (2 if graph == "asking" else 0)
    assert ordered(now) == ordered(late) == ordered(later)


def test_state_of_ended_run_is_dropped_after_erasure(
    app: Any, ann: httpx.Client, settings: Settings
) -> None:
    path = start_run_on_new_thread(ann, text="the harbour safe opens at nine")
    wait_for_end(ann, path)
    assert "harbour" in ann.get(f"{path}/join").text
    thread = path.split("/")[2]
    message = ann.get(f"/threads/{thread}/state").json()["values"]["messages"][0]["id"]
    with open_checkpointer(settings.db) as saver:
        saver.erase(thread, [message])

    assert "harbour" not in str(ann.get(f"{path}/join").json()["messages"])
    [run] = wait_for_ended_runs(app)
    assert (run.output, run.output_event) == (None, None)

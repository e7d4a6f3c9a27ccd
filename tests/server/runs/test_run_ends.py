"""The end of a run: when it is visible, and cancellations that arrive while it is stored."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from weakref import ReferenceType, ref

import httpx
import pytest
from langgraph.graph import START, StateGraph

from perdure.checkpointers import open_checkpointer
from perdure.errors import StorageUnavailable
from perdure.run_tables.runs import RunTable
from perdure.server import create_app, threads
from perdure.server.graphs import Graphs
from perdure.server.runs import run as server_run
from perdure.settings import Settings
from tests.server.running import run_server, wait_until
from tests.server.talking import Gate, State, build_failing_graph, build_input, build_talk_graph

SECRET = "the harbour safe opens at nine"
Servers = tuple[httpx.Client, httpx.Client]


class BigState:
    """A value that only a node of a graph has."""


def hold_end_of_first_run(
    monkeypatch: pytest.MonkeyPatch, gate: Gate, when: Literal["before", "after"] = "before"
) -> None:
    """Make the first run stop at the gate before or after its end is stored."""
    end = RunTable.end_run

    async def held(self: RunTable, *args: Any, **options: Any) -> Any:
        if gate.reached.is_set():
            return await end(self, *args, **options)
        if when == "before":
            await gate.pass_through()
            return await end(self, *args, **options)
        stored = await end(self, *args, **options)
        await gate.pass_through()
        return stored

    monkeypatch.setattr(RunTable, "end_run", held)


@contextmanager
def serve_on_two_servers(db: Settings) -> Iterator[Servers]:
    """Serve graphs that do not wait on two servers with one database."""
    free = Gate()
    free.open.set()
    with ExitStack() as stack:
        clients = []
        for _ in range(2):
            app = create_app(
                db, graphs=Graphs({"talk": build_talk_graph(free), "fail": build_failing_graph()})
            )
            url = stack.enter_context(run_server(app))
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=60)))
        clients[0].post("/threads", json={"thread_id": "t"}).raise_for_status()
        yield clients[0], clients[1]


def start_run(client: httpx.Client, text: str, graph: str = "talk") -> str:
    body = {"assistant_id": graph, "input": build_input(text)}
    reply = client.post("/threads/t/runs", json=body).raise_for_status()
    return str(reply.json()["run_id"])


def read_run_status(client: httpx.Client, run: str) -> str:
    return str(client.get(f"/threads/t/runs/{run}").json()["status"])


def cancel_run(client: httpx.Client, run: str, action: str) -> int:
    return client.post(f"/threads/t/runs/{run}/cancel", params={"action": action}).status_code


def message_texts(values: Any) -> list[str]:
    return [message["content"] for message in values.get("messages", [])]


@pytest.mark.parametrize("server_index", [0, 1], ids=["its server", "another server"])
def test_program_does_not_continue_from_run_that_is_rolled_back(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch, server_index: int
) -> None:
    """The rollback is accepted just before the end of the run is stored."""
    hold_end_of_first_run(monkeypatch, gate)
    heard: list[str] = []
    has_lock = threading.Event()

    def take_turn() -> None:
        free = Gate()
        free.open.set()

        async def turn() -> None:
            with open_checkpointer(db.db) as saver:
                graph = build_talk_graph(free).compile(checkpointer=saver)
                async with saver.lock("t", timeout_s=60):
                    has_lock.set()
                    config: Any = {"configurable": {"thread_id": "t"}}
                    given: Any = build_input("program")
                    values = await graph.ainvoke(given, config)
                    heard.extend(message.text for message in values["messages"])

        asyncio.run(turn())

    with serve_on_two_servers(db) as servers:
        run = start_run(servers[0], SECRET)
        assert gate.reached.wait(60)
        answer = cancel_run(servers[server_index], run, "rollback")
        program = threading.Thread(target=take_turn)
        program.start()
        has_lock.wait(1)  # it gets the lock at once if the run has released it
        gate.open.set()
        program.join(60)
        wait_until(lambda: servers[0].get("/threads/t/runs").json() == [])
        values = servers[0].get("/threads/t/state").json()["values"]

    assert answer == 202
    assert heard == ["program", "heard 1"]
    assert message_texts(values) == ["program", "heard 1"]


def test_thread_lock_is_held_until_rollback_is_stored(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoints of the run are removed before the lock is released."""
    hold_end_of_first_run(monkeypatch, gate)
    blocked = Gate()
    app = create_app(db, graphs=Graphs({"talk": build_talk_graph(blocked)}))
    with run_server(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.post("/threads", json={"thread_id": "t"}).raise_for_status()
        run = start_run(client, SECRET)
        assert blocked.reached.wait(60)
        answer = cancel_run(client, run, "rollback")
        assert gate.reached.wait(60)
        with open_checkpointer(db.db) as saver:
            remaining_checkpoints = [*saver.list({"configurable": {"thread_id": "t"}})]
            with pytest.raises(StorageUnavailable), saver.lock("t", timeout_s=0):
                pass
        gate.open.set()
        wait_until(lambda: client.get("/threads/t/runs").json() == [])

    assert answer == 202
    assert remaining_checkpoints == []


@pytest.mark.parametrize("server_index", [0, 1], ids=["its server", "another server"])
@pytest.mark.parametrize("graph", ["talk", "fail"])
def test_run_is_interrupted_if_cancellation_precedes_its_stored_end(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch, graph: str, server_index: int
) -> None:
    """The cancellation is accepted after the last step of the run, before its end is stored."""
    hold_end_of_first_run(monkeypatch, gate)
    with serve_on_two_servers(db) as servers:
        run = start_run(servers[0], "one", graph)
        assert gate.reached.wait(60)
        answer = cancel_run(servers[server_index], run, "interrupt")
        gate.open.set()
        joined = servers[0].get(f"/threads/t/runs/{run}/join").json()
        statuses = [read_run_status(client, run) for client in servers]
        thread = servers[0].get("/threads/t").json()

    assert answer == 202
    assert statuses == ["interrupted", "interrupted"]
    assert "one" in message_texts(joined)
    assert thread["status"] == ("idle" if graph == "talk" else "interrupted")


@pytest.mark.parametrize("action", ["interrupt", "rollback"])
@pytest.mark.parametrize("server_index", [0, 1], ids=["its server", "another server"])
def test_run_cannot_be_cancelled_after_its_end_is_stored(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch, action: str, server_index: int
) -> None:
    """This holds even before the server has announced the end."""
    hold_end_of_first_run(monkeypatch, gate, "after")
    with serve_on_two_servers(db) as servers:
        run = start_run(servers[0], "one")
        assert gate.reached.wait(60)
        answer = cancel_run(servers[server_index], run, action)
        gate.open.set()
        joined = servers[0].get(f"/threads/t/runs/{run}/join").json()
        statuses = [read_run_status(client, run) for client in servers]

    assert answer == 404
    assert statuses == ["success", "success"]
    assert message_texts(joined) == ["one", "heard 1"]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_last_event_reports_late_cancellation(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored events do not contain the end that was planned before."""
    hold_end_of_first_run(monkeypatch, gate)
    events_text = ""
    with serve_on_two_servers(db) as servers:
        params = {"assistant_id": "talk", "input": build_input("one")}
        command = {"id": 1, "method": "run.start", "params": params}
        reply = servers[0].post("/threads/t/commands", json=command).raise_for_status()
        run = reply.json()["result"]["run_id"]
        assert gate.reached.wait(60)
        answer = cancel_run(servers[1], run, "interrupt")
        gate.open.set()
        wait_until(lambda: read_run_status(servers[1], run) == "interrupted")
        body = {"channels": ["lifecycle"], "since": 0}
        try:
            with servers[1].stream(
                "POST", "/threads/t/stream/events", json=body, timeout=3
            ) as events:
                for part in events.iter_text():
                    events_text += part
        except httpx.ReadTimeout:
            pass  # the feed stays open for the next run

    assert answer == 202
    assert "the run was cancelled" in events_text
    assert '"completed"' not in events_text


def test_thread_can_be_updated_once_its_run_is_seen_as_ended(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server sees the end a moment before the lock of the thread is released."""
    hold_end_of_first_run(monkeypatch, gate, "after")
    monkeypatch.setattr(threads, "LOCK_RELEASE_S", 60)
    codes: list[int] = []
    with serve_on_two_servers(db) as servers:
        run = start_run(servers[0], "one")
        assert gate.reached.wait(60)
        seen = read_run_status(servers[1], run)

        def change() -> None:
            body = {"values": {"heard": ["told"]}}
            codes.append(servers[1].post("/threads/t/state", json=body).status_code)

        changing = threading.Thread(target=change)
        changing.start()
        changing.join(0.3)  # it is refused within this time if it does not wait
        gate.open.set()
        changing.join(60)

    assert seen == "success"
    assert codes == [200]


def test_failed_run_does_not_keep_graph_state_in_memory(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps the error of the run, and drops the frames in which it was raised."""
    states = list[ReferenceType[BigState]]()

    def stumble(state: State) -> dict[str, Any]:
        big = BigState()
        states.append(ref(big))
        try:
            raise KeyError(str(type(big)))
        except KeyError as exc:
            raise ExceptionGroup("several", [ValueError("inner")]) from exc

    # pytest keeps the records of the log, and their tracebacks
    monkeypatch.setattr(server_run, "_LOGGER", logging.Logger("quiet", logging.CRITICAL))
    builder = StateGraph(State).add_node("stumble", stumble).add_edge(START, "stumble")
    app = create_app(settings, graphs=Graphs({"talk": builder}))
    with run_server(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.post("/threads", json={"thread_id": "t"}).raise_for_status()
        run_id = start_run(client, "one")
        joined = client.get(f"/threads/t/runs/{run_id}/join").json()

        def is_freed() -> bool:
            gc.collect()
            return states[0]() is None

        wait_until(is_freed, timeout_s=10)

    assert joined["__error__"]["error"] == "ExceptionGroup"


def test_queued_run_that_was_rolled_back_does_not_start(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run ends before its server learns that the second one is gone."""
    hold_end_of_first_run(monkeypatch, gate)
    accept = RunTable.accept_run_and_list_live_run_ids

    async def accept_late(self: RunTable, row: Any, **options: Any) -> Any:
        accepted = await accept(self, row, **options)
        if options["cancel_action"]:
            gate.open.set()
            while len(await self.list_runs("t")) > 1:  # noqa: ASYNC110 - the first run ends elsewhere
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
        return accepted

    monkeypatch.setattr(RunTable, "accept_run_and_list_live_run_ids", accept_late)
    with serve_on_two_servers(db) as (client, _):
        start_run(client, "first")
        assert gate.reached.wait(60)
        start_run(client, SECRET)
        body = {
            "assistant_id": "talk",
            "input": build_input("third"),
            "multitask_strategy": "rollback",
        }
        values = client.post("/threads/t/runs/wait", json=body).raise_for_status().json()

    assert values["heard"] == ["third"]
    assert message_texts(values) == ["third", "heard 1"]

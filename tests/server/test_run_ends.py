"""The end of a run: who sees it when, and cancellations that come while it is stored."""

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
from perdure.checkpointers.runs import RunTable
from perdure.errors import StorageUnavailable
from perdure.server import create_app, threads
from perdure.server import run as server_run
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests.server.running import run_server, wait_until
from tests.server.talking import Gate, State, build_failing_graph, build_input, build_talk_graph

SECRET = "the harbour safe opens at nine"
Servers = tuple[httpx.Client, httpx.Client]


class BigState:
    """A value that only a node of a graph has."""


def hold_end(
    monkeypatch: pytest.MonkeyPatch, gate: Gate, when: Literal["before", "after"] = "before"
) -> None:
    """Stop at the gate before, or after, the end of the first run is stored."""
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
def served(db: Settings) -> Iterator[Servers]:
    """Two servers on one database; the graphs of both do not wait."""
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


def started(client: httpx.Client, text: str, graph: str = "talk") -> str:
    body = {"assistant_id": graph, "input": build_input(text)}
    reply = client.post("/threads/t/runs", json=body).raise_for_status()
    return str(reply.json()["run_id"])


def status_of(client: httpx.Client, run: str) -> str:
    return str(client.get(f"/threads/t/runs/{run}").json()["status"])


def cancelled(client: httpx.Client, run: str, action: str) -> int:
    return client.post(f"/threads/t/runs/{run}/cancel", params={"action": action}).status_code


def texts_of(values: Any) -> list[str]:
    return [message["content"] for message in values.get("messages", [])]


@pytest.mark.parametrize("asked", [0, 1], ids=["its server", "another server"])
def test_a_program_does_not_go_on_from_a_run_that_is_rolled_back(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    """The rollback is accepted just before the end of the run is stored."""
    hold_end(monkeypatch, gate)
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

    with served(db) as servers:
        run = started(servers[0], SECRET)
        assert gate.reached.wait(60)
        answer = cancelled(servers[asked], run, "rollback")
        program = threading.Thread(target=take_turn)
        program.start()
        has_lock.wait(1)  # it gets the lock at once if the run has released it
        gate.open.set()
        program.join(60)
        wait_until(lambda: servers[0].get("/threads/t/runs").json() == [])
        values = servers[0].get("/threads/t/state").json()["values"]

    assert answer == 202
    assert heard == ["program", "heard 1"]
    assert texts_of(values) == ["program", "heard 1"]


def test_the_lock_of_a_thread_is_held_until_the_rollback_is_stored(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the thread is cleaned up."""
    hold_end(monkeypatch, gate)
    blocked = Gate()
    app = create_app(db, graphs=Graphs({"talk": build_talk_graph(blocked)}))
    with run_server(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.post("/threads", json={"thread_id": "t"}).raise_for_status()
        run = started(client, SECRET)
        assert blocked.reached.wait(60)
        answer = cancelled(client, run, "rollback")
        assert gate.reached.wait(60)
        with open_checkpointer(db.db) as saver:
            left = [*saver.list({"configurable": {"thread_id": "t"}})]
            with pytest.raises(StorageUnavailable), saver.lock("t", timeout_s=0):
                pass
        gate.open.set()
        wait_until(lambda: client.get("/threads/t/runs").json() == [])

    assert answer == 202
    assert left == []


@pytest.mark.parametrize("asked", [0, 1], ids=["its server", "another server"])
@pytest.mark.parametrize("graph", ["talk", "fail"])
def test_a_run_whose_interrupt_was_accepted_is_interrupted(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch, graph: str, asked: int
) -> None:
    """It is accepted after the last step of the run, and before its end is stored."""
    hold_end(monkeypatch, gate)
    with served(db) as servers:
        run = started(servers[0], "one", graph)
        assert gate.reached.wait(60)
        answer = cancelled(servers[asked], run, "interrupt")
        gate.open.set()
        joined = servers[0].get(f"/threads/t/runs/{run}/join").json()
        stands = [status_of(client, run) for client in servers]
        thread = servers[0].get("/threads/t").json()

    assert answer == 202
    assert stands == ["interrupted", "interrupted"]
    assert "one" in texts_of(joined)
    assert thread["status"] == ("idle" if graph == "talk" else "interrupted")


@pytest.mark.parametrize("action", ["interrupt", "rollback"])
@pytest.mark.parametrize("asked", [0, 1], ids=["its server", "another server"])
def test_a_run_whose_end_is_stored_cannot_be_cancelled(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch, action: str, asked: int
) -> None:
    """Also if nobody here was told of its end yet."""
    hold_end(monkeypatch, gate, "after")
    with served(db) as servers:
        run = started(servers[0], "one")
        assert gate.reached.wait(60)
        answer = cancelled(servers[asked], run, action)
        gate.open.set()
        joined = servers[0].get(f"/threads/t/runs/{run}/join").json()
        stands = [status_of(client, run) for client in servers]

    assert answer == 404
    assert stands == ["success", "success"]
    assert texts_of(joined) == ["one", "heard 1"]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_the_last_event_tells_of_a_late_cancellation(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored events do not have the end that was planned before."""
    hold_end(monkeypatch, gate)
    told = ""
    with served(db) as servers:
        params = {"assistant_id": "talk", "input": build_input("one")}
        command = {"id": 1, "method": "run.start", "params": params}
        reply = servers[0].post("/threads/t/commands", json=command).raise_for_status()
        run = reply.json()["result"]["run_id"]
        assert gate.reached.wait(60)
        answer = cancelled(servers[1], run, "interrupt")
        gate.open.set()
        wait_until(lambda: status_of(servers[1], run) == "interrupted")
        body = {"channels": ["lifecycle"], "since": 0}
        try:
            with servers[1].stream(
                "POST", "/threads/t/stream/events", json=body, timeout=3
            ) as events:
                for part in events.iter_text():
                    told += part
        except httpx.ReadTimeout:
            pass  # the feed stays open for the next run

    assert answer == 202
    assert "the run was cancelled" in told
    assert '"completed"' not in told


def test_a_thread_can_be_changed_once_its_run_is_seen_as_ended(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server sees the end a moment before the lock of the thread is released."""
    hold_end(monkeypatch, gate, "after")
    monkeypatch.setattr(threads, "LOCK_RELEASE_S", 60)
    codes: list[int] = []
    with served(db) as servers:
        run = started(servers[0], "one")
        assert gate.reached.wait(60)
        seen = status_of(servers[1], run)

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


def test_a_failed_run_does_not_keep_the_state_of_its_graph(
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
        run_id = started(client, "one")
        joined = client.get(f"/threads/t/runs/{run_id}/join").json()

        def is_freed() -> bool:
            gc.collect()
            return states[0]() is None

        wait_until(is_freed, timeout_s=10)

    assert joined["__error__"]["error"] == "ExceptionGroup"


def test_a_run_that_was_rolled_back_while_it_waited_does_not_begin(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run ends before its server learns that the second one is gone."""
    hold_end(monkeypatch, gate)
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
    with served(db) as (client, _):
        started(client, "first")
        assert gate.reached.wait(60)
        started(client, SECRET)
        body = {
            "assistant_id": "talk",
            "input": build_input("third"),
            "multitask_strategy": "rollback",
        }
        values = client.post("/threads/t/runs/wait", json=body).raise_for_status().json()

    assert values["heard"] == ["third"]
    assert texts_of(values) == ["third", "heard 1"]

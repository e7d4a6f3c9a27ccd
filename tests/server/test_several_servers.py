"""Several servers on one database, at once or one after the other, and their runs."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx
import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import ConflictError

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import ConfigurationError, CorruptRecord
from perdure.run_tables.component import load_server_sql
from perdure.run_tables.records import LiveRun, RunRow
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.runs.run import Run
from perdure.server.runs.run_request import RunRequest
from perdure.settings import Settings
from perdure.storage.flow import Statement, fetch_rows
from tests.server.running import run_server, wait_until
from tests.server.runs.test_runs import read_message_texts
from tests.server.talking import Gate, State, build_input, build_talk_graph


def build_asking_graph(gate: Gate) -> StateGraph[State]:
    """Return a graph that asks twice in one node, and waits at the gate in between."""

    async def hear(state: State) -> dict[str, Any]:
        first = interrupt("one?")
        await gate.pass_through()
        return {"heard": [first, interrupt("two?")]}

    return StateGraph(State).add_node(hear).add_edge(START, "hear")


@contextmanager
def serve_graphs(settings: Settings, gate: Gate) -> Iterator[SyncLangGraphClient]:
    app = create_app(
        settings, graphs=Graphs({"talk": build_talk_graph(gate), "asks": build_asking_graph(gate)})
    )
    with run_server(app) as url, get_sync_client(url=url) as client:
        yield client


@pytest.fixture
def two_clients(settings: Settings, gate: Gate) -> Iterator[list[SyncLangGraphClient]]:
    """Clients of two servers."""
    with ExitStack() as stack:
        clients = [stack.enter_context(serve_graphs(settings, gate)) for _ in range(2)]
        clients[0].threads.create(thread_id="t")
        yield clients


def execute_statement(saver: Checkpointer, statement: Statement) -> None:
    saver.database.write(lambda: fetch_rows(statement.sql, *statement.params))


def list_run_statuses(client: SyncLangGraphClient) -> Any:
    return [run["status"] for run in client.runs.list("t")][::-1]


def test_run_is_visible_on_both_servers(two_clients: list[SyncLangGraphClient], gate: Gate) -> None:
    here, there = two_clients
    first = here.runs.create("t", "talk", input=build_input("one"))
    second = there.runs.create("t", "talk", input=build_input("two"))
    assert gate.reached.wait(60)
    with pytest.raises(ConflictError, match=f"run '{second['run_id']}' is still active"):
        there.runs.create("t", "talk", input=build_input("no"), multitask_strategy="reject")
    current_statuses = (
        [client.threads.get("t")["status"] for client in two_clients],
        list_run_statuses(there),
    )
    gate.open.set()
    values: list[Any] = [client.runs.join("t", second["run_id"]) for client in two_clients]

    assert current_statuses == (["busy", "busy"], ["running", "pending"])
    assert values[0]["heard"] == values[1]["heard"] == ["one", "two"]
    assert there.runs.get("t", first["run_id"])["status"] == "success"
    assert there.runs.join("t", first["run_id"])["heard"] == ["one"]


@pytest.mark.parametrize(
    ("strategy", "expected_texts"),
    [("interrupt", ["one", "two", "heard 2"]), ("rollback", ["two", "heard 1"])],
)
def test_multitask_strategy_stops_run_of_other_server(
    two_clients: list[SyncLangGraphClient], gate: Gate, strategy: Any, expected_texts: list[str]
) -> None:
    here, there = two_clients
    here.runs.create("t", "talk", input=build_input("one"))
    assert gate.reached.wait(60)
    second = there.runs.create("t", "talk", input=build_input("two"), multitask_strategy=strategy)
    kept = ["interrupted"] if strategy == "interrupt" else []
    wait_until(lambda: list_run_statuses(there) == [*kept, "running"])
    gate.open.set()
    there.runs.join("t", second["run_id"])

    assert read_message_texts(here) == expected_texts


def test_run_of_other_server_can_be_cancelled(
    two_clients: list[SyncLangGraphClient], gate: Gate
) -> None:
    here, there = two_clients
    runs = [
        here.runs.create("t", "talk", input=build_input(text))["run_id"] for text in ("one", "two")
    ]
    assert gate.reached.wait(60)
    for run in reversed(runs):
        there.runs.cancel("t", run, wait=True)

    assert list_run_statuses(here) == ["interrupted"] * 2
    assert here.threads.get("t")["status"] == "interrupted"


def test_run_of_other_server_is_cancelled_when_its_reader_leaves(
    two_clients: list[SyncLangGraphClient], gate: Gate
) -> None:
    here, there = two_clients
    run = here.runs.create("t", "talk", input=build_input("one"))["run_id"]
    assert gate.reached.wait(60)
    path, leaving = f"/threads/t/runs/{run}/stream", {"cancel_on_disconnect": True}
    with there.http.client.stream("GET", path, params=leaving) as stream:
        next(stream.iter_lines())
    wait_until(lambda: list_run_statuses(here) == ["interrupted"])

    assert here.threads.get("t")["status"] == "interrupted"


def test_thread_with_run_on_other_server_can_be_deleted(
    two_clients: list[SyncLangGraphClient], gate: Gate
) -> None:
    here, there = two_clients
    here.runs.create("t", "talk", input=build_input("one"))
    assert gate.reached.wait(60)
    there.threads.delete("t")
    gate.open.set()

    assert here.threads.search() == there.threads.search() == []


def test_runs_continue_in_order_on_next_server(settings: Settings, gate: Gate) -> None:
    with serve_graphs(settings, gate) as client:
        client.threads.create(thread_id="t")
        runs = [client.runs.create("t", "talk", input=build_input(text)) for text in ("one", "two")]
        assert gate.reached.wait(60)
    gate.open.set()
    with serve_graphs(settings, gate) as client:
        client.runs.join("t", runs[1]["run_id"])

        assert read_message_texts(client) == ["one", "heard 1", "two", "heard 2"]
        assert list_run_statuses(client) == ["success"] * 2


def test_run_with_on_disconnect_cancel_survives_stop_of_server(
    settings: Settings, gate: Gate
) -> None:
    """The server ends the connection, not the reader."""
    body = {"assistant_id": "talk", "input": build_input("one"), "if_not_exists": "create"}
    kinds, replies = ("wait", "stream"), list[httpx.Response]()

    async def end() -> None:
        app = create_app(settings, graphs=Graphs({"talk": build_talk_graph(gate)}))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
            ) as client,
        ):
            asked = [
                asyncio.create_task(
                    client.post(
                        f"/threads/{kind}/runs/{kind}", json=body | {"on_disconnect": "cancel"}
                    )
                )
                for kind in kinds
            ]
            while len(app.state.runs.shared_state.players_by_run) < len(kinds):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await app.state.runs.stop_runs_after_grace_period(0)
            replies.extend(await asyncio.gather(*asked))

    asyncio.run(end())
    waited, streamed = replies
    gate.open.set()
    with serve_graphs(settings, gate) as client:
        runs = [client.runs.list(kind)[0] for kind in kinds]
        for kind, run in zip(kinds, runs, strict=True):
            assert client.runs.join(kind, run["run_id"])["heard"] == ["one"]
        ended = [client.runs.list(kind)[0]["status"] for kind in kinds]

    assert ended == ["success"] * 2
    assert (waited.status_code, waited.headers["retry-after"]) == (503, "1")
    assert "StreamLost" in streamed.text


def test_rollback_is_carried_out_after_restart(settings: Settings, gate: Gate) -> None:
    with serve_graphs(settings, gate) as client:
        client.threads.create(thread_id="t")
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        assert gate.reached.wait(60)
    with SQLiteCheckpointer.open(settings.db) as saver:
        execute_statement(
            saver, load_server_sql(saver.database)("cancel_runs", "t", run, 0, "rollback", 0.0)
        )
        assert saver.history("t") != []
    gate.open.set()
    with serve_graphs(settings, gate) as client:
        wait_until(
            lambda: (
                "pending" not in list_run_statuses(client)
                and "running" not in list_run_statuses(client)
            )
        )

        assert client.threads.get_state("t")["values"] == {}
        assert client.threads.get("t")["status"] == "idle"


def test_answer_is_not_used_for_next_question_after_restart(settings: Settings, gate: Gate) -> None:
    """The server stops while the node that received the answer runs; the node then asks again."""
    with serve_graphs(settings, gate) as client:
        client.threads.create(thread_id="t")
        client.runs.wait("t", "asks", input={"heard": []})
        run = client.runs.create("t", "asks", command={"resume": "yes"})["run_id"]
        assert gate.reached.wait(60)
    gate.open.set()
    with serve_graphs(settings, gate) as client:
        values: Any = client.runs.join("t", run)

        assert [each["value"] for each in values["__interrupt__"]] == ["two?"]
        assert client.runs.get("t", run)["status"] == "interrupted"
        last: Any = client.runs.wait("t", "asks", command={"resume": "no"})
        assert last["heard"] == ["yes", "no"]


def test_update_of_command_is_applied_once_despite_restart(settings: Settings, gate: Gate) -> None:
    order: Any = {"update": {"heard": ["told"], "messages": []}, "goto": "answer"}
    with serve_graphs(settings, gate) as client:
        client.threads.create(thread_id="t")
        gate.open.set()
        client.runs.wait("t", "talk", input=build_input("one"))
        gate.open.clear()
        gate.reached.clear()
        run = client.runs.create("t", "talk", command=order)["run_id"]
        assert gate.reached.wait(60)
    gate.open.set()
    with serve_graphs(settings, gate) as client:
        values: Any = client.runs.join("t", run)

        assert values["heard"] == ["one", "told"]
        assert client.runs.get("t", run)["status"] == "success"


def test_run_fails_after_its_servers_died_repeatedly(settings: Settings, gate: Gate) -> None:
    with serve_graphs(settings, gate) as client:
        client.threads.create(thread_id="t")
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        assert gate.reached.wait(60)
    with SQLiteCheckpointer.open(settings.db) as saver:
        died = "UPDATE runs SET status = 'running', owner = 'dead', attempt = 3"
        execute_statement(saver, Statement(died))
    with serve_graphs(settings, gate) as client:
        values: Any = client.runs.join("t", run)
        assert values["__error__"]["error"] == "RunAbandoned"
        assert client.threads.get("t")["status"] != "busy"


def test_run_is_not_repeated_if_its_end_cannot_be_stored(settings: Settings) -> None:
    """The disk is full, and a model that was called has been paid for."""
    calls = []

    async def fail(state: State) -> dict[str, Any]:
        calls.append(1)
        raise ZeroDivisionError

    graph = StateGraph(State).add_node(fail).add_edge(START, "fail")
    full = "BEFORE UPDATE OF status ON runs BEGIN SELECT RAISE(FAIL, 'no room'); END"
    app = create_app(settings, graphs=Graphs({"fail": graph}))
    with run_server(app) as url, get_sync_client(url=url) as client:
        client.threads.create(thread_id="t")
        with closing(sqlite3.connect(settings.db, isolation_level=None)) as conn:
            conn.execute(f"CREATE TRIGGER full {full}")
            run = client.runs.create("t", "fail", input={"heard": []})["run_id"]
            time.sleep(1.5)  # three sweeps
            conn.execute("DROP TRIGGER full")
        values: Any = client.runs.join("t", run)

    assert values["__error__"]["error"] == "ZeroDivisionError"
    assert len(calls) == 1


def test_unreadable_run_row_does_not_stop_other_runs(settings: Settings, gate: Gate) -> None:
    with serve_graphs(settings, gate) as client:
        runs = []
        for thread in ("t", "u"):
            client.threads.create(thread_id=thread)
            runs += [client.runs.create(thread, "talk", input=build_input("one")) for _ in range(2)]
        assert gate.reached.wait(60)
    gate.open.set()
    with closing(sqlite3.connect(settings.db, isolation_level=None)) as conn:
        damaged = [runs[0]["run_id"], runs[1]["run_id"]]
        conn.execute("UPDATE runs SET request = x'00' WHERE run_id IN (?, ?)", damaged)
    with serve_graphs(settings, gate) as client:
        client.runs.join("u", runs[3]["run_id"])
        message_texts = read_message_texts(client, "u")
        wait_until(lambda: client.threads.get("t")["status"] != "busy")
    with closing(sqlite3.connect(settings.db, isolation_level=None)) as conn:
        stored = conn.execute("SELECT status FROM runs WHERE run_id IN (?, ?)", damaged).fetchall()

    assert message_texts == ["one", "heard 1", "one", "heard 2"]
    assert stored == [("error",), ("error",)]


def test_run_ends_with_error_if_its_thread_cannot_be_rolled_back(
    settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run reports the error and is not repeated."""

    async def refused(*_: Any, **__: Any) -> None:
        raise CorruptRecord("a row is damaged")

    with serve_graphs(settings, gate) as client:
        client.threads.create(thread_id="t")
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        assert gate.reached.wait(60)
        monkeypatch.setattr(SQLiteCheckpointer, "adelete_for_runs", refused)
        client.runs.cancel("t", run, action="rollback")
        values: Any = client.runs.join("t", run)

        assert values["__error__"] == {"error": "CorruptRecord", "message": "a row is damaged"}
        assert list_run_statuses(client) == ["error"]


def test_run_of_graph_that_is_no_longer_served_can_be_cancelled(
    settings: Settings, gate: Gate
) -> None:
    with serve_graphs(settings, gate) as client:
        client.threads.create(thread_id="t")
        run = client.runs.create("t", "talk", input=build_input("one"))["run_id"]
        assert gate.reached.wait(60)
    with SQLiteCheckpointer.open(settings.db) as saver:
        execute_statement(saver, Statement("UPDATE runs SET status = 'running', owner = 'dead'"))
    app = create_app(settings, graphs=Graphs({"asks": build_asking_graph(gate)}))
    with run_server(app) as url, get_sync_client(url=url) as client:
        before = client.threads.get("t")["status"]
        client.runs.cancel("t", run)
        wait_until(lambda: list_run_statuses(client) == ["interrupted"])
        client.threads.delete("t")

        assert before == "busy"
        assert client.threads.search() == []


def test_stopping_server_refuses_new_runs(settings: Settings, gate: Gate) -> None:
    app = create_app(settings, graphs=Graphs({"talk": build_talk_graph(gate)}))
    with run_server(app) as url, httpx.Client(base_url=url) as client:
        client.post("/threads", json={"thread_id": "t"})
        app.state.runs.shared_state.is_draining = True
        reply = client.post(
            "/threads/t/runs", json={"assistant_id": "talk", "input": build_input("a")}
        )

        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert client.get("/threads/t/runs").json() == []


def test_server_does_not_start_on_database_without_locks(
    settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a connection pooler no lock can be held, so live servers could not be recognized."""

    def refused(*_: Any, **__: Any) -> Any:
        raise ConfigurationError("the DSN is pooled: give direct=")

    monkeypatch.setattr("perdure.storage.sqlite.SQLiteDatabase.lock", refused)
    app = create_app(settings, graphs=Graphs({"talk": build_talk_graph(gate)}))

    async def start() -> None:
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")

    with pytest.raises(ConfigurationError, match="direct="):
        asyncio.run(start())


def test_run_that_lost_ownership_ends_without_cancelling_its_task() -> None:
    """The run can lose ownership while it takes the lock; the new owner continues the run."""

    async def follow(run: Run) -> None:
        with (
            run.mark_executing_during_block(),
            run.allow_task_cancellation_and_record_run_outcome(),
        ):
            run.lose_ownership()
        await asyncio.sleep(0)

    async def lost() -> bool:
        live = LiveRun("t", 1, 1, "a run", "running", "me", "talk", 1, None)
        run = Run(RunRow(live, 0.0, 0.0, {}), None, "ann", RunRequest(assistant_id="talk"))
        run.task = asyncio.create_task(follow(run))
        await run.wait_until_ended()
        return run.ownership_lost and not run.task.cancelled()

    assert asyncio.run(lost())

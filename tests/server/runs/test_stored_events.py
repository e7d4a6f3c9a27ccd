"""Stored events of runs: on another server, after a restart, and until they are erased."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import APIStatusError

from perdure.checkpointers import open_checkpointer
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.runs import event_log, run_events, run_queue
from perdure.settings import Settings
from perdure.storage.flow import fetch_rows
from tests.server.running import run_server, wait_until
from tests.server.talking import (
    Gate,
    State,
    build_asking_graph,
    build_failing_graph,
    build_input,
    build_talk_graph,
)

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
SECRET = "SECRET of ann"


def build_counting_graph(gate: Gate) -> StateGraph[State]:
    """Return a graph that streams numbers before and after a gate."""

    async def tell(state: State) -> dict[str, Any]:
        for number in range(3):
            get_stream_writer()(number)
        await gate.pass_through()
        for number in range(3, 6):
            get_stream_writer()(number)
        return {"heard": ["counted"]}

    return StateGraph(State).add_node(tell).add_edge(START, "tell")


@contextmanager
def serve_graphs(settings: Settings, gate: Gate) -> Iterator[SyncLangGraphClient]:
    graphs = {
        "talk": build_talk_graph(gate),
        "counts": build_counting_graph(gate),
        "fail": build_failing_graph(),
        "ask": build_asking_graph(),
    }
    with (
        run_server(create_app(settings, graphs=Graphs(graphs))) as url,
        get_sync_client(url=url) as client,
    ):
        yield client


@pytest.fixture
def two_clients(db: Settings, gate: Gate) -> Iterator[list[SyncLangGraphClient]]:
    """Clients of two servers."""
    with ExitStack() as stack:
        clients = [stack.enter_context(serve_graphs(db, gate)) for _ in range(2)]
        clients[0].threads.create(thread_id="t")
        yield clients


def start_run(client: SyncLangGraphClient, graph: str = "counts", **options: Any) -> str:
    asked = {"input": build_input("hello"), "stream_mode": ["custom", "values"], **options}
    return client.runs.create("t", graph, **asked)["run_id"]


def read_events(client: SyncLangGraphClient, run: str, **options: Any) -> list[tuple[Any, ...]]:
    return [
        (part.id, part.event, part.data) for part in client.runs.join_stream("t", run, **options)
    ]


def count_event_batches(settings: Settings) -> int:
    """Return the number of stored batches of events."""
    with open_checkpointer(settings.db) as saver:
        [(count,)] = saver.database.read(lambda: fetch_rows("SELECT count(body) FROM run_events"))
    return int(count)


# -- on another server


def test_events_of_run_are_read_on_other_server_while_it_runs(
    two_clients: list[SyncLangGraphClient], gate: Gate
) -> None:
    here, there = two_clients
    run = start_run(here)
    assert gate.reached.wait(60)
    early: list[Any] = []
    reached = threading.Event()

    def read() -> None:
        for part in there.runs.join_stream("t", run):
            early.append((part.id, part.event, part.data))
            if part.id == "4":
                reached.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert reached.wait(60)  # the gate is not open
    gate.open.set()
    reader.join(60)

    assert [data for _, event, data in early if event == "custom"] == [*range(6)]
    assert early == read_events(here, run) == read_events(there, run)
    for place in (2, 4):
        after = early[place][0]
        assert read_events(there, run, last_event_id=after) == early[place + 1 :]
    assert [event for _, event, _ in read_events(there, run, stream_mode="values")][1:] == [
        "values"
    ] * 2


def test_failure_of_run_is_read_on_other_server(two_clients: list[SyncLangGraphClient]) -> None:
    here, there = two_clients
    run = start_run(here, "fail")
    here.runs.join("t", run)

    assert read_events(there, run)[-1][1:] == read_events(here, run)[-1][1:]
    assert read_events(there, run)[-1][1] == "error"


def test_events_of_thread_are_same_on_other_server(
    two_clients: list[SyncLangGraphClient], gate: Gate
) -> None:
    here, there = two_clients
    gate.open.set()
    wanted = {"channels": ["custom", "lifecycle", "values"], "namespaces": [[]], "depth": 0}
    with ExitStack() as stack:
        lines = [
            stack.enter_context(
                client.http.client.stream("POST", "/threads/t/stream/events", json=wanted)
            ).iter_lines()
            for client in two_clients
        ]
        heard: list[list[Any]] = [[], []]
        for number, client in enumerate((here, there, here)):
            asked = {"assistant_id": "counts", "input": build_input("hello")}
            order = {"id": 1, "method": "run.start", "params": asked}
            reply = client.http.client.post("/threads/t/commands", json=order).json()
            for events, of in zip(heard, lines, strict=True):
                while sum("completed" in str(event) for event in events) <= number:
                    line = next(of)
                    if line.startswith("data: "):
                        events.append(json.loads(line[6:]))
            first = reply["meta"]["applied_through_seq"]
            assert min(each["seq"] for each in events if each["seq"] > first) == first + 1

    assert heard[0] == heard[1]
    numbers = [event["seq"] for event in heard[0]]
    assert numbers == sorted({*numbers})
    middle = heard[0][len(heard[0]) // 2]["seq"]
    for client in two_clients:
        again: list[Any] = []
        body = {**wanted, "since": middle}
        with client.http.client.stream("POST", "/threads/t/stream/events", json=body) as stream:
            of = stream.iter_lines()
            while not again or again[-1] != heard[0][-1]:
                line = next(of)
                if line.startswith("data: "):
                    again.append(json.loads(line[6:]))
        assert again == [event for event in heard[0] if event["seq"] > middle]


def test_question_is_streamed_on_other_server(two_clients: list[SyncLangGraphClient]) -> None:
    here, there = two_clients
    wanted = {"channels": ["input", "lifecycle"]}
    with there.http.client.stream("POST", "/threads/t/stream/events", json=wanted) as stream:
        asked = {"assistant_id": "ask", "input": build_input("hello")}
        order = {"id": 1, "method": "run.start", "params": asked}
        here.http.client.post("/threads/t/commands", json=order)
        events = []
        for line in stream.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
            if "interrupted" in line:
                break

    assert [each["method"] for each in events][-2:] == ["input.requested", "lifecycle"]
    assert events[-2]["params"]["data"]["value"] == "Are you sure?"


# -- after a restart


def test_events_of_ended_run_are_read_after_restart(db: Settings, gate: Gate) -> None:
    gate.open.set()
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        run = start_run(client)
        client.runs.join("t", run)
        before = read_events(client, run)
        kept = [
            *client.runs.stream("t", "counts", input=build_input("kept"), stream_resumable=True)
        ]
        plain = [*client.runs.stream("t", "counts", input=build_input("not kept"))]
    with serve_graphs(db, gate) as client:
        assert read_events(client, run) == before
        assert read_events(client, run, last_event_id=before[3][0]) == before[4:]
        again = read_events(client, kept[0].data["run_id"])
        assert again == [(part.id, part.event, part.data) for part in kept]
        with pytest.raises(APIStatusError, match="no longer available"):
            read_events(client, plain[0].data["run_id"])


def test_run_continued_after_restart_appends_events_once(db: Settings, gate: Gate) -> None:
    """The stored events of the first attempt come first, then those of the second, each once."""
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        run = start_run(client)
        assert gate.reached.wait(60)
        first = []
        for part in client.runs.join_stream("t", run):
            first.append((part.id, part.event, part.data))
            if part.id == "4":
                break
    gate.open.set()
    with serve_graphs(db, gate) as client:
        client.runs.join("t", run)
        all_of_it = read_events(client, run)
        rest = read_events(client, run, last_event_id=first[-1][0])
        middle = read_events(client, run, last_event_id=first[2][0])

    assert all_of_it[: len(first)] == first
    assert rest == all_of_it[len(first) :]
    assert middle == all_of_it[3:]
    assert [data for _, event, data in rest if event == "custom"] == [*range(6)]
    assert rest[0][1:] == ("metadata", {"run_id": run, "attempt": 1})  # nobody died
    assert [int(id) for id, *_ in all_of_it[1:]] == sorted({int(id) for id, *_ in all_of_it[1:]})


# -- retention and erasure


def test_events_are_removed_some_time_after_end_of_run(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "STORE_INTERVAL_S", 30)  # the run stores one batch, at its end
    gate.open.set()
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        run = start_run(client)
        client.runs.join("t", run)
        assert count_event_batches(db) == 1
        monkeypatch.setattr("perdure.run_tables.runs.EVENT_RETENTION_S", -1)
        monkeypatch.setattr(run_queue, "CLEANUP_INTERVAL_S", 0)
        wait_until(lambda: count_event_batches(db) == 0)
    expected = "no longer available"
    with serve_graphs(db, gate) as client, pytest.raises(APIStatusError, match=expected):
        read_events(client, run)


@pytest.mark.parametrize("removal", ["erase", "delete", "roll back"])
def test_events_are_removed_with_messages_that_they_quote(
    db: Settings, gate: Gate, removal: str
) -> None:
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        run = start_run(client, "talk", input=build_input(SECRET))
        assert gate.reached.wait(60)
        wait_until(lambda: count_event_batches(db) > 0)
        if removal == "roll back":
            client.runs.cancel("t", run, wait=True, action="rollback")
        else:
            gate.open.set()
            client.runs.join("t", run)
        messages = client.threads.get_state("t")["values"].get("messages", [])  # type: ignore[union-attr]
    with open_checkpointer(db.db) as saver:
        if removal == "erase":
            receipt = saver.erase("t", [messages[0]["id"]])
            assert receipt.events > 0
        elif removal == "delete":
            assert saver.erase("t").events > 0

    assert count_event_batches(db) == 0


def test_events_of_live_run_are_not_stored_after_erasure(db: Settings, gate: Gate) -> None:
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        run = start_run(client)
        assert gate.reached.wait(60)
        wait_until(lambda: count_event_batches(db) > 0)
        with open_checkpointer(db.db) as saver:
            saver.erase("t", ["of nobody"])
        gate.open.set()
        client.runs.join("t", run)

        assert [event for _, event, _ in read_events(client, run)] == ["metadata", "error"]
    assert count_event_batches(db) == 0


def test_reader_of_deleted_thread_does_not_see_new_thread_with_same_id(
    two_clients: list[SyncLangGraphClient], gate: Gate
) -> None:
    here, there = two_clients
    gate.open.set()
    path, wanted = "/threads/t/stream/events", {"channels": ["values", "lifecycle"], "since": 0}
    events: list[str] = []
    begin = {"id": 1, "method": "run.start"}
    with here.http.client.stream("POST", path, json=wanted) as stream:
        reader = threading.Thread(target=lambda: events.extend(stream.iter_lines()))
        reader.start()
        there.threads.delete("t")
        there.threads.create(thread_id="t")
        params = {"assistant_id": "talk", "input": build_input(SECRET)}
        there.http.client.post("/threads/t/commands", json={**begin, "params": params})
        with here.http.client.stream("POST", path, json=wanted) as later:
            heard = next(each for each in later.iter_lines() if SECRET in each)
        reader.join(60)

    assert "values" in heard
    assert not reader.is_alive()
    assert not any(SECRET in each for each in events)


# -- limits and failures


def test_only_newest_events_are_stored_beyond_size_limit(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "RETAINED_BYTES", 2_000)
    big = [{"role": "user", "content": "x" * 700} for _ in range(2)]
    with serve_graphs(db, gate) as client:
        client.threads.create(thread_id="t")
        run = start_run(client, "talk", input={"messages": big})
        assert gate.reached.wait(60)
        wait_until(lambda: count_event_batches(db) > 0)
        gate.open.set()
        client.runs.join("t", run)
    with serve_graphs(db, gate) as client:
        kept = read_events(client, run)

        assert [part[1] for part in kept] == ["metadata", "values"]
        [lost] = read_events(client, run, last_event_id="1")
        assert lost[2]["error"] == "StreamLost"


def test_run_continues_if_its_events_cannot_be_stored(settings: Settings, gate: Gate) -> None:
    full = "BEFORE INSERT ON run_events BEGIN SELECT RAISE(FAIL, 'no room'); END"
    with serve_graphs(settings, gate) as client:
        client.threads.create(thread_id="t")
        with closing(sqlite3.connect(settings.db, isolation_level=None)) as conn:
            conn.execute(f"CREATE TRIGGER full {full}")
            run = start_run(client)
            assert gate.reached.wait(60)
            heard = next(part for part in client.runs.join_stream("t", run) if part.id == "4")
            conn.execute("DROP TRIGGER full")
        gate.open.set()
        client.runs.join("t", run)
        before = read_events(client, run)
    with serve_graphs(settings, gate) as client:
        assert heard.event == "custom"
        assert read_events(client, run) == before

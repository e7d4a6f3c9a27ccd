"""Events of runs that are stored: on another server, after a restart, and until they are erased."""

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
from perdure.server import create_app, run_events, run_log, run_queue
from perdure.server.graphs import Graphs
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


def counts(gate: Gate) -> StateGraph[State]:
    """Tells numbers, before and behind a gate."""

    async def tell(state: State) -> dict[str, Any]:
        for number in range(3):
            get_stream_writer()(number)
        await gate.pass_through()
        for number in range(3, 6):
            get_stream_writer()(number)
        return {"heard": ["counted"]}

    return StateGraph(State).add_node(tell).add_edge(START, "tell")


@contextmanager
def served(settings: Settings, gate: Gate) -> Iterator[SyncLangGraphClient]:
    graphs = {
        "talk": build_talk_graph(gate),
        "counts": counts(gate),
        "fail": build_failing_graph(),
        "ask": build_asking_graph(),
    }
    with (
        run_server(create_app(settings, graphs=Graphs(graphs))) as url,
        get_sync_client(url=url) as client,
    ):
        yield client


@pytest.fixture
def both(db: Settings, gate: Gate) -> Iterator[list[SyncLangGraphClient]]:
    """Clients of two servers."""
    with ExitStack() as stack:
        clients = [stack.enter_context(served(db, gate)) for _ in range(2)]
        clients[0].threads.create(thread_id="t")
        yield clients


def begun(client: SyncLangGraphClient, graph: str = "counts", **options: Any) -> str:
    asked = {"input": build_input("hello"), "stream_mode": ["custom", "values"], **options}
    return client.runs.create("t", graph, **asked)["run_id"]


def told(client: SyncLangGraphClient, run: str, **options: Any) -> list[tuple[Any, ...]]:
    return [
        (part.id, part.event, part.data) for part in client.runs.join_stream("t", run, **options)
    ]


def stored(settings: Settings) -> int:
    """How many batches there are."""
    with open_checkpointer(settings.db) as saver:
        [(count,)] = saver.database.read(lambda: fetch_rows("SELECT count(body) FROM run_events"))
    return int(count)


# -- on another server


def test_a_run_of_another_server_is_read_while_it_runs(
    both: list[SyncLangGraphClient], gate: Gate
) -> None:
    here, there = both
    run = begun(here)
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
    assert early == told(here, run) == told(there, run)
    for place in (2, 4):
        after = early[place][0]
        assert told(there, run, last_event_id=after) == early[place + 1 :]
    assert [event for _, event, _ in told(there, run, stream_mode="values")][1:] == ["values"] * 2


def test_a_failure_is_read_on_another_server(both: list[SyncLangGraphClient]) -> None:
    here, there = both
    run = begun(here, "fail")
    here.runs.join("t", run)

    assert told(there, run)[-1][1:] == told(here, run)[-1][1:]
    assert told(there, run)[-1][1] == "error"


def test_the_events_of_a_thread_are_read_on_another_server(
    both: list[SyncLangGraphClient], gate: Gate
) -> None:
    here, there = both
    gate.open.set()
    wanted = {"channels": ["custom", "lifecycle", "values"], "namespaces": [[]], "depth": 0}
    with ExitStack() as stack:
        lines = [
            stack.enter_context(
                client.http.client.stream("POST", "/threads/t/stream/events", json=wanted)
            ).iter_lines()
            for client in both
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
    for client in both:
        again: list[Any] = []
        body = {**wanted, "since": middle}
        with client.http.client.stream("POST", "/threads/t/stream/events", json=body) as stream:
            of = stream.iter_lines()
            while not again or again[-1] != heard[0][-1]:
                line = next(of)
                if line.startswith("data: "):
                    again.append(json.loads(line[6:]))
        assert again == [event for event in heard[0] if event["seq"] > middle]


def test_a_question_is_heard_on_another_server(both: list[SyncLangGraphClient]) -> None:
    here, there = both
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


def test_a_run_that_ended_is_read_after_a_restart(db: Settings, gate: Gate) -> None:
    gate.open.set()
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        run = begun(client)
        client.runs.join("t", run)
        before = told(client, run)
        kept = [
            *client.runs.stream("t", "counts", input=build_input("kept"), stream_resumable=True)
        ]
        plain = [*client.runs.stream("t", "counts", input=build_input("not kept"))]
    with served(db, gate) as client:
        assert told(client, run) == before
        assert told(client, run, last_event_id=before[3][0]) == before[4:]
        again = told(client, kept[0].data["run_id"])
        assert again == [(part.id, part.event, part.data) for part in kept]
        with pytest.raises(APIStatusError, match="no longer kept"):
            told(client, plain[0].data["run_id"])


def test_a_run_that_goes_on_elsewhere_tells_more(db: Settings, gate: Gate) -> None:
    """Each event once: what was stored of the first time, then those of the second."""
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        run = begun(client)
        assert gate.reached.wait(60)
        first = []
        for part in client.runs.join_stream("t", run):
            first.append((part.id, part.event, part.data))
            if part.id == "4":
                break
    gate.open.set()
    with served(db, gate) as client:
        client.runs.join("t", run)
        all_of_it = told(client, run)
        rest = told(client, run, last_event_id=first[-1][0])
        middle = told(client, run, last_event_id=first[2][0])

    assert all_of_it[: len(first)] == first
    assert rest == all_of_it[len(first) :]
    assert middle == all_of_it[3:]
    assert [data for _, event, data in rest if event == "custom"] == [*range(6)]
    assert rest[0][1:] == ("metadata", {"run_id": run, "attempt": 1})  # nobody died
    assert [int(id) for id, *_ in all_of_it[1:]] == sorted({int(id) for id, *_ in all_of_it[1:]})


# -- for how long, and whose


def test_events_are_removed_some_time_after_the_end(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "STORE_INTERVAL_S", 30)  # the run stores one batch, at its end
    gate.open.set()
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        run = begun(client)
        client.runs.join("t", run)
        assert stored(db) == 1
        monkeypatch.setattr("perdure.checkpointers.runs.EVENT_RETENTION_S", -1)
        monkeypatch.setattr(run_queue, "CLEANUP_INTERVAL_S", 0)
        wait_until(lambda: stored(db) == 0)
    with served(db, gate) as client, pytest.raises(APIStatusError, match="no longer kept"):
        told(client, run)


@pytest.mark.parametrize("how", ["erase", "delete", "roll back"])
def test_events_go_with_what_they_quote(db: Settings, gate: Gate, how: str) -> None:
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        run = begun(client, "talk", input=build_input(SECRET))
        assert gate.reached.wait(60)
        wait_until(lambda: stored(db) > 0)
        if how == "roll back":
            client.runs.cancel("t", run, wait=True, action="rollback")
        else:
            gate.open.set()
            client.runs.join("t", run)
        messages = client.threads.get_state("t")["values"].get("messages", [])  # type: ignore[union-attr]
    with open_checkpointer(db.db) as saver:
        if how == "erase":
            receipt = saver.erase("t", [messages[0]["id"]])
            assert receipt.events > 0
        elif how == "delete":
            assert saver.erase("t").events > 0

    assert stored(db) == 0


def test_a_run_under_way_is_not_stored_after_an_erasure(db: Settings, gate: Gate) -> None:
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        run = begun(client)
        assert gate.reached.wait(60)
        wait_until(lambda: stored(db) > 0)
        with open_checkpointer(db.db) as saver:
            saver.erase("t", ["of nobody"])
        gate.open.set()
        client.runs.join("t", run)

        assert [event for _, event, _ in told(client, run)] == ["metadata", "error"]
    assert stored(db) == 0


def test_who_reads_a_thread_reads_no_other_that_has_its_id_later(
    both: list[SyncLangGraphClient], gate: Gate
) -> None:
    here, there = both
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


# -- much, slow, full


def test_of_much_the_newest_is_stored(
    db: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "RETAINED_BYTES", 2_000)
    big = [{"role": "user", "content": "x" * 700} for _ in range(2)]
    with served(db, gate) as client:
        client.threads.create(thread_id="t")
        run = begun(client, "talk", input={"messages": big})
        assert gate.reached.wait(60)
        wait_until(lambda: stored(db) > 0)
        gate.open.set()
        client.runs.join("t", run)
    with served(db, gate) as client:
        kept = told(client, run)

        assert [part[1] for part in kept] == ["metadata", "values"]
        [lost] = told(client, run, last_event_id="1")
        assert lost[2]["error"] == "StreamLost"


def test_a_database_that_stores_no_events_stops_no_run(settings: Settings, gate: Gate) -> None:
    full = "BEFORE INSERT ON run_events BEGIN SELECT RAISE(FAIL, 'no room'); END"
    with served(settings, gate) as client:
        client.threads.create(thread_id="t")
        with closing(sqlite3.connect(settings.db, isolation_level=None)) as conn:
            conn.execute(f"CREATE TRIGGER full {full}")
            run = begun(client)
            assert gate.reached.wait(60)
            heard = next(part for part in client.runs.join_stream("t", run) if part.id == "4")
            conn.execute("DROP TRIGGER full")
        gate.open.set()
        client.runs.join("t", run)
        before = told(client, run)
    with served(settings, gate) as client:
        assert heard.event == "custom"
        assert told(client, run) == before

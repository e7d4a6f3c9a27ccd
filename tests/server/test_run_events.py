"""What is told of runs, to whom, and for how long."""

from __future__ import annotations

import asyncio
import json
import logging
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import pytest
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from pydantic import BaseModel
from starlette.requests import HTTPConnection

from perdure.checkpointers import open_checkpointer
from perdure.server import create_app, run_events, run_log
from perdure.server import keys as keys_module
from perdure.server.access import Identity, LocalAccess
from perdure.server.databases import Databases
from perdure.server.graphs import Graphs
from perdure.server.keys import KeysFileAccess
from perdure.server.limits import Limits
from perdure.server.run_log import EventLog
from perdure.server.runs import RETAINED_FEEDS, Runs
from perdure.settings import Settings
from tests.server.running import run_server, wait_until
from tests.server.talking import (
    Gate,
    build_asking_graph,
    build_failing_graph,
    build_input,
    build_talk_graph,
)
from tests.server.test_keys import ANN, BOB, render_key_entry

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
SECRET = "SECRET of ann"
AT_ONCE = 3
VALUES = {"channels": ["values"]}


class State(TypedDict, total=False):
    """What happened; and something large."""

    log: Annotated[list[str], operator.add]
    blob: str


class Record(BaseModel):
    """A state that is an object."""

    log: Annotated[list[str], operator.add] = []


def questions(state: type[Any]) -> StateGraph[Any]:
    """Two nodes ask at once; another is not done yet then."""

    async def late(state: Any) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"log": ["late"]}

    made = StateGraph(state).add_node(late).add_edge(START, "late")
    for name in ("one", "two"):
        made.add_node(name, lambda _, name=name: {"log": [interrupt(name)]})
        made.add_edge(START, name)
    return made


def large() -> StateGraph[State]:
    """Its state is some 4 MB, as that of a conversation with images."""

    def grow(state: State) -> dict[str, Any]:
        return {"blob": "x" * 4_100_000}

    def end(state: State) -> dict[str, Any]:
        return {"log": ["end"]}

    made = StateGraph(State).add_node(grow).add_node(end)
    return made.add_edge(START, "grow").add_edge("grow", "end")


class Nameless:
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError(SECRET)


def odd() -> StateGraph[State]:
    """Writes to the stream what JSON has no form for, and goes on."""

    def tell(state: State) -> dict[str, Any]:
        cycle: list[Any] = []
        cycle.append(cycle)
        deep: list[Any] = []
        for _ in range(3000):
            deep = [deep]
        for each in (cycle, deep, Nameless()):
            get_stream_writer()(each)
        return {"log": ["told"]}

    def end(state: State) -> dict[str, Any]:
        return {"log": ["end"]}

    made = StateGraph(State).add_node(tell).add_node(end)
    return made.add_edge(START, "tell").add_edge("tell", "end")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    return file


@pytest.fixture
def url(settings: Settings, keys: Path, gate: Gate) -> Iterator[str]:
    asking = {
        "ask": build_asking_graph(),
        "questions": questions(State),
        "objects": questions(Record),
    }
    graphs = Graphs(
        {
            "talk": build_talk_graph(gate),
            "fail": build_failing_graph(),
            "large": large(),
            "odd": odd(),
            **asking,
        }
    )
    limits = Limits(max_concurrent_requests=AT_ONCE)
    with run_server(
        create_app(settings, access=KeysFileAccess(keys), graphs=graphs, limits=limits)
    ) as address:
        yield address


@pytest.fixture
def sdk(url: str) -> Iterator[SyncLangGraphClient]:
    with get_sync_client(url=url, api_key=ANN) as client:
        client.threads.create(thread_id="t")
        yield client


@pytest.fixture
def ann(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"x-api-key": ANN}, timeout=30) as client:
        yield client


@pytest.fixture
def bob(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"x-api-key": BOB}, timeout=30) as client:
        yield client


def ok(reply: httpx.Response) -> Any:
    assert reply.status_code < 300, reply.text
    return reply.json() if reply.content else None


def body(text: str = SECRET) -> dict[str, Any]:
    return {"assistant_id": "talk", "input": build_input(text)}


def start(text: str = SECRET) -> dict[str, Any]:
    return {"id": 1, "method": "run.start", "params": body(text)}


# -- what is told


@pytest.mark.parametrize("graph", ["questions", "objects"])
def test_all_questions_that_are_asked_at_once_are_returned(
    sdk: SyncLangGraphClient, graph: str
) -> None:
    found: Any = sdk.runs.wait("t", graph, input={"log": []})

    assert sorted(each["value"] for each in found["__interrupt__"]) == ["one", "two"]
    assert found["log"] == ["late"]
    assert sdk.threads.get("t")["status"] == "interrupted"


def test_a_large_state_is_streamed(sdk: SyncLangGraphClient) -> None:
    parts = list(
        sdk.runs.stream(
            "t",
            "large",
            input={"log": []},
            stream_mode=["values", "updates"],
            on_disconnect="cancel",
        )
    )

    told = ["values", "updates", "values", "updates", "values"]
    assert [part.event for part in parts] == ["metadata", *told]


def test_events_are_kept_for_whoever_is_about_to_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_log, "RETAINED_BYTES", 100)
    monkeypatch.setattr(run_log, "BACKLOG_BYTES", 1000)

    async def look() -> None:
        raise AssertionError("it is not yet time")

    async def read() -> None:
        log = EventLog()
        reader = log.read_after(0, look)
        for size, numbers in ((10, [1]), (200, [2]), (300, [3])):
            log.add("values", "x" * size)
            assert [each.number for each in await anext(reader)] == numbers
        log.add("values", "x" * 300)
        log.add("values", "x" * 300)
        assert [each.number for each in await anext(reader)] == [4, 5]
        log.add("values", "x" * 600)
        assert log.last_dropped == 4  # a reader receives events by asking for the next ones
        log.add("values", "x" * 600)
        assert (log.last_dropped, log.last) == (6, 7)
        with pytest.raises(LookupError, match="up to 6"):
            await anext(reader)

    asyncio.run(read())


def test_a_reader_that_falls_behind_does_not_cancel_the_run(
    sdk: SyncLangGraphClient, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "RETAINED_BYTES", 0)
    monkeypatch.setattr(run_log, "BACKLOG_BYTES", 0)
    monkeypatch.setattr(run_events, "STORE_INTERVAL_S", 60)  # none is stored meanwhile
    run = sdk.runs.create("t", "talk", input=build_input("hello"))["run_id"]
    assert gate.reached.wait(60)

    [lost] = sdk.runs.join_stream("t", run, last_event_id="0", cancel_on_disconnect=True)
    gate.open.set()
    sdk.runs.join("t", run)

    assert lost.data["error"] == "StreamLost"
    assert sdk.runs.get("t", run)["status"] == "success"


def test_an_event_that_cannot_be_encoded_does_not_end_the_run(sdk: SyncLangGraphClient) -> None:
    parts = list(sdk.runs.stream("t", "odd", input={"log": []}, stream_mode=["custom", "values"]))

    notes = [part.data for part in parts if part.event == "custom"]
    assert [each["error"] for each in notes] == ["NotSerializable"] * 3
    assert SECRET not in str(notes)
    assert sdk.runs.get("t", parts[0].data["run_id"])["status"] == "success"
    assert parts[-1].data["log"] == ["told", "end"]


def test_events_of_a_thread_that_cannot_be_encoded_are_notes(ann: httpx.Client) -> None:
    order = {**start(), "params": {"assistant_id": "odd", "input": {"log": []}}}
    run = ok(ann.post("/threads/new/commands", json=order))["result"]["run_id"]
    assert ok(ann.get(f"/threads/new/runs/{run}/join"))["log"] == ["told", "end"]

    wanted = {"channels": ["custom", "lifecycle"], "since": 0}
    with ann.stream("POST", "/threads/new/stream/events", json=wanted) as events:
        lines = events.iter_lines()
        told = [next(line for line in lines if "NotSerializable" in line) for _ in range(3)]

    assert '"seq":' in told[0]


@pytest.mark.parametrize("before", ["idle", "interrupted"])
def test_a_thread_stands_after_a_rollback_as_before(
    sdk: SyncLangGraphClient, gate: Gate, before: str
) -> None:
    if before == "interrupted":
        sdk.runs.wait("t", "ask", input={})
    run = sdk.runs.create("t", "talk", input=build_input("one"))["run_id"]
    assert gate.reached.wait(60)
    sdk.runs.cancel("t", run, action="rollback", wait=True)

    assert sdk.threads.get_state("t")["values"].get("heard", []) == []  # type: ignore[union-attr]
    assert sdk.threads.get("t")["status"] == before


def test_a_last_event_id_of_many_digits_is_no_place(
    sdk: SyncLangGraphClient, ann: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    run = sdk.runs.create("t", "talk", input=build_input("one"))["run_id"]

    for digits in ("9" * 19, "9" * 5000):
        reply = ann.get(f"/threads/t/runs/{run}/stream", headers={"Last-Event-ID": digits})
        assert reply.text.startswith("event: metadata")


def test_the_log_has_nothing_of_what_a_graph_raised(
    ann: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"assistant_id": "fail", "input": build_input("hello")}
    ok(ann.post("/threads/new/runs/wait", json={**asked, "if_not_exists": "create"}))

    [record] = [each for each in caplog.records if each.name == "perdure.server.runs"]
    logged = logging.Formatter().format(record)
    assert "ZeroDivisionError" in logged
    assert "in stumble" in logged
    assert "one by none" not in logged.replace('("one by none")', "")  # the line of the source


def test_a_run_that_never_began_does_not_end_the_events_of_another(
    ann: httpx.Client, gate: Gate
) -> None:
    ok(ann.post("/threads", json={"thread_id": "t"}))
    ok(ann.post("/threads/t/commands", json=start("one")))
    assert gate.reached.wait(60)
    second = ok(ann.post("/threads/t/commands", json=start("two")))["result"]["run_id"]
    ok(ann.post(f"/threads/t/runs/{second}/cancel", params={"wait": True}))
    gate.open.set()

    told = []
    wanted = {"channels": ["lifecycle"], "namespaces": [[]], "depth": 0, "since": 0}
    with ann.stream("POST", "/threads/t/stream/events", json=wanted) as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                told.append(json.loads(line[6:])["params"]["data"]["event"])
            if "completed" in told:
                break
    assert "failed" not in told


def test_events_of_a_thread_are_kept_however_often_another_is_read(settings: Settings) -> None:
    runs = Runs(Graphs({}), Limits(), Databases(settings), {})
    runs.get_feed("a", "t", 1).add("values", SECRET)
    for _ in range(RETAINED_FEEDS + 1):
        runs.get_feed("b", "t", 1)
    assert runs.get_feed("a", "t", 1).last == 1
    for number in range(RETAINED_FEEDS):
        runs.get_feed("b", str(number), 1)
    assert runs.get_feed("a", "t", 1).last == 0


# -- to whom


def test_a_stream_without_events_has_comments(
    ann: httpx.Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "PING_S", 0.05)
    asked = {**body(), "if_not_exists": "create"}
    with ann.stream("POST", "/threads/new/runs/stream", json=asked) as events:
        lines = events.iter_lines()
        heard = [line for line in (next(lines) for _ in range(12)) if line.startswith(":")]
        gate.open.set()
        rest = [line for line in lines if line.startswith("event: ")]

    assert ": ping" in heard
    assert rest[-1] == "event: values"


def test_a_client_that_does_not_read_is_not_waited_for(
    sdk: SyncLangGraphClient, ann: httpx.Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run is cancelled, if it is to end with its reader."""
    monkeypatch.setattr(run_log, "SEND_TIMEOUT_S", 0.2)
    asked = {**body("x" * 8_000_000), "on_disconnect": "cancel"}
    with ann.stream("POST", "/threads/t/runs/stream", json=asked) as events:
        assert events.status_code == 200
        assert gate.reached.wait(60)
        wait_until(lambda: sdk.runs.list("t")[0]["status"] == "interrupted")


class Flaky(LocalAccess):
    """Cannot tell who asks while it is down."""

    is_down = False

    async def identify(self, connection: HTTPConnection) -> Identity:
        if self.is_down:
            raise ConnectionError(SECRET)
        return await super().identify(connection)


def test_a_run_goes_on_when_nobody_can_tell_who_reads_it(
    settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "ACCESS_CHECK_S", 0.05)
    access, asked = Flaky("ann"), {**body(), "on_disconnect": "cancel"}
    with (
        run_server(
            create_app(settings, access=access, graphs=Graphs({"talk": build_talk_graph(gate)}))
        ) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        ok(client.post("/threads", json={"thread_id": "t"}))
        with client.stream("POST", "/threads/t/runs/stream", json=asked) as events:
            assert gate.reached.wait(60)
            access.is_down = True
            heard = events.read().decode()  # to its end: the gate is not open
        access.is_down = False
        gate.open.set()
        [run] = ok(client.get("/threads/t/runs"))
        ok(client.get(f"/threads/t/runs/{run['run_id']}/join"))

        assert "Unauthenticated" in heard
        assert ok(client.get(f"/threads/t/runs/{run['run_id']}"))["status"] == "success"


def test_runs_of_a_deleted_thread_are_not_of_the_next_one(
    ann: httpx.Client, bob: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    ok(ann.post("/threads", json={"thread_id": "daily"}))
    run = ok(ann.post("/threads/daily/runs", json=body()))["run_id"]
    ok(ann.get(f"/threads/daily/runs/{run}/join"))
    ok(ann.delete("/threads/daily"))
    ok(bob.post("/threads", json={"thread_id": "daily"}))

    listed = bob.get("/threads/daily/runs")
    joined = bob.get(f"/threads/daily/runs/{run}/join")
    streamed = bob.get(f"/threads/daily/runs/{run}/stream")

    assert listed.json() == []
    assert (joined.status_code, streamed.status_code) == (404, 404)


def test_events_of_a_deleted_thread_are_not_of_the_next_one(
    ann: httpx.Client, bob: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    run = ok(ann.post("/threads/daily/commands", json=start()))["result"]["run_id"]
    ok(ann.get(f"/threads/daily/runs/{run}/join"))
    ok(ann.delete("/threads/daily"))
    ok(bob.post("/threads", json={"thread_id": "daily"}))

    with bob.stream("POST", "/threads/daily/stream/events", json={**VALUES, "since": 0}) as events:
        ok(bob.post("/threads/daily/commands", json=start("of bob")))
        first = next(line for line in events.iter_lines() if line.startswith("data: "))

    assert SECRET not in first


@pytest.mark.parametrize("by", ["the server", "another program"])
def test_whoever_deletes_a_thread_does_not_hear_the_next_one(
    ann: httpx.Client, bob: httpx.Client, gate: Gate, settings: Settings, by: str
) -> None:
    gate.open.set()
    ok(bob.post("/threads", json={"thread_id": "daily"}))
    with bob.stream("POST", "/threads/daily/stream/events", json=VALUES) as events:
        if by == "the server":
            ok(bob.delete("/threads/daily"))
        else:
            with open_checkpointer(settings.db) as saver:
                saver.delete_thread("daily")
        ok(ann.post("/threads", json={"thread_id": "daily"}))
        ok(ann.post("/threads/daily/commands", json=start()))
        heard = events.read()  # to its end

    assert SECRET.encode() not in heard


@pytest.mark.parametrize("path", ["/threads/t/stream/events", "/threads/t/runs/stream"])
def test_a_revoked_key_ends_its_streams(
    ann: httpx.Client, keys: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(keys_module, "_RELOAD_INTERVAL_S", -1.0)
    monkeypatch.setattr(run_log, "ACCESS_CHECK_S", 0.05)
    ok(ann.post("/threads", json={"thread_id": "t"}))
    asked = VALUES if path.endswith("events") else body("hello")
    with ann.stream("POST", path, json=asked) as events:
        keys.write_text(render_key_entry("another-key", "ann"))
        heard = events.read()  # to its end: the gate is not open
    gate.open.set()

    assert ann.get("/threads/t").status_code == 401
    assert b"heard 1" not in heard


# -- how many


def test_runs_in_the_background_are_limited(
    ann: httpx.Client, bob: httpx.Client, gate: Gate
) -> None:
    ok(ann.post("/threads", json={"thread_id": "t"}))
    for _ in range(AT_ONCE):
        ok(ann.post("/threads/t/runs", json=body()))

    refused = ann.post("/threads/t/runs", json=body())
    new = ann.post("/threads/new/runs", json={**body(), "if_not_exists": "create"})
    ok(bob.post("/threads/of-bob/runs", json={**body(), "if_not_exists": "create"}))
    gate.open.set()

    assert (refused.status_code, new.status_code) == (429, 429)
    assert "at most 3 runs under way" in refused.text
    assert ann.get("/threads/new").status_code == 404
    wait_until(lambda: {each["status"] for each in ok(ann.get("/threads/t/runs"))} == {"success"})
    ok(ann.post("/threads/t/runs/wait", json=body()))

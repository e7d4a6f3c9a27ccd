"""Events of runs: their content, their readers, and how long they are kept."""

from __future__ import annotations

import asyncio
import json
import logging
import operator
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
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
from perdure.server import create_app
from perdure.server.databases import Databases
from perdure.server.graphs import Graphs
from perdure.server.http import keys as keys_module
from perdure.server.http.access import Identity, LocalAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.server.http.limits import Limits
from perdure.server.runs import event_log, run_events
from perdure.server.runs.event_log import EventLog
from perdure.server.runs.shared_run_state import RETAINED_EVENT_LOGS, SharedRunState
from perdure.settings import Settings
from tests.server.http.test_keys import ANN, BOB, render_key_entry
from tests.server.running import run_server, wait_until
from tests.server.talking import (
    Gate,
    build_asking_graph,
    build_failing_graph,
    build_input,
    build_talk_graph,
)

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
SECRET = "SECRET of ann"
MAX_CONCURRENT_RUNS = 3
VALUES_CHANNEL = {"channels": ["values"]}


class State(TypedDict, total=False):
    """A log of what happened, and a large text."""

    log: Annotated[list[str], operator.add]
    blob: str


class Record(BaseModel):
    """A state that is an object."""

    log: Annotated[list[str], operator.add] = []


def build_questions_graph(state: type[Any]) -> StateGraph[Any]:
    """Return a graph in which two nodes ask at once, before a third node has ended."""

    async def late(state: Any) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"log": ["late"]}

    made = StateGraph(state).add_node(late).add_edge(START, "late")
    for name in ("one", "two"):
        made.add_node(name, lambda _, name=name: {"log": [interrupt(name)]})
        made.add_edge(START, name)
    return made


def build_large_state_graph() -> StateGraph[State]:
    """Return a graph whose state has about 4 MB, like a conversation with images."""

    def grow(state: State) -> dict[str, Any]:
        return {"blob": "x" * 4_100_000}

    def end(state: State) -> dict[str, Any]:
        return {"log": ["end"]}

    made = StateGraph(State).add_node(grow).add_node(end)
    return made.add_edge(START, "grow").add_edge("grow", "end")


class WithoutText:
    """An object whose conversion to text fails."""

    def __str__(self) -> str:
        raise ValueError(SECRET)


def build_unserializable_events_graph() -> StateGraph[State]:
    """Return a graph that streams values that JSON cannot represent, and then continues."""

    def tell(state: State) -> dict[str, Any]:
        cycle: list[Any] = []
        cycle.append(cycle)
        deep: list[Any] = []
        for _ in range(3000):
            deep = [deep]
        for each in (cycle, deep, WithoutText()):
            get_stream_writer()(each)
        return {"log": ["told"]}

    def end(state: State) -> dict[str, Any]:
        return {"log": ["end"]}

    made = StateGraph(State).add_node(tell).add_node(end)
    return made.add_edge(START, "tell").add_edge("tell", "end")


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    return file


@pytest.fixture
def url(settings: Settings, keys_file: Path, gate: Gate) -> Iterator[str]:
    asking = {
        "ask": build_asking_graph(),
        "questions": build_questions_graph(State),
        "objects": build_questions_graph(Record),
    }
    graphs = Graphs(
        {
            "talk": build_talk_graph(gate),
            "fail": build_failing_graph(),
            "large": build_large_state_graph(),
            "odd": build_unserializable_events_graph(),
            **asking,
        }
    )
    limits = Limits(max_concurrent_requests=MAX_CONCURRENT_RUNS)
    with run_server(
        create_app(settings, access=KeysFileAccess(keys_file), graphs=graphs, limits=limits)
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


def read_successful_reply(reply: httpx.Response) -> Any:
    assert reply.status_code < 300, reply.text
    return reply.json() if reply.content else None


def build_run_body(text: str = SECRET) -> dict[str, Any]:
    return {"assistant_id": "talk", "input": build_input(text)}


def build_start_command(text: str = SECRET) -> dict[str, Any]:
    return {"id": 1, "method": "run.start", "params": build_run_body(text)}


# -- content of events


@pytest.mark.parametrize("graph", ["questions", "objects"])
def test_wait_returns_all_questions_that_are_asked_at_once(
    sdk: SyncLangGraphClient, graph: str
) -> None:
    found: Any = sdk.runs.wait("t", graph, input={"log": []})

    assert sorted(each["value"] for each in found["__interrupt__"]) == ["one", "two"]
    assert found["log"] == ["late"]
    assert sdk.threads.get("t")["status"] == "interrupted"


def test_stream_of_large_state_has_all_events(sdk: SyncLangGraphClient) -> None:
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


def test_event_log_keeps_events_for_readers_up_to_backlog_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_log, "RETAINED_BYTES", 100)
    monkeypatch.setattr(event_log, "BACKLOG_BYTES", 1000)

    async def look() -> None:
        raise AssertionError("it is not yet time")

    async def read() -> None:
        log = EventLog()
        reader = log.iter_events_after(0, look)
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


def test_reader_that_falls_behind_does_not_cancel_run(
    sdk: SyncLangGraphClient, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "RETAINED_BYTES", 0)
    monkeypatch.setattr(event_log, "BACKLOG_BYTES", 0)
    monkeypatch.setattr(run_events, "STORE_INTERVAL_S", 60)  # none is stored meanwhile
    run = sdk.runs.create("t", "talk", input=build_input("hello"))["run_id"]
    assert gate.reached.wait(60)

    [lost] = sdk.runs.join_stream("t", run, last_event_id="0", cancel_on_disconnect=True)
    gate.open.set()
    sdk.runs.join("t", run)

    assert lost.data["error"] == "StreamLost"
    assert sdk.runs.get("t", run)["status"] == "success"


def test_event_that_cannot_be_encoded_does_not_end_run(sdk: SyncLangGraphClient) -> None:
    parts = list(sdk.runs.stream("t", "odd", input={"log": []}, stream_mode=["custom", "values"]))

    notes = [part.data for part in parts if part.event == "custom"]
    assert [each["error"] for each in notes] == ["NotSerializable"] * 3
    assert SECRET not in str(notes)
    assert sdk.runs.get("t", parts[0].data["run_id"])["status"] == "success"
    assert parts[-1].data["log"] == ["told", "end"]


def test_thread_events_that_cannot_be_encoded_are_replaced_by_errors(ann: httpx.Client) -> None:
    order = {**build_start_command(), "params": {"assistant_id": "odd", "input": {"log": []}}}
    run = read_successful_reply(ann.post("/threads/new/commands", json=order))["result"]["run_id"]
    assert read_successful_reply(ann.get(f"/threads/new/runs/{run}/join"))["log"] == ["told", "end"]

    wanted = {"channels": ["custom", "lifecycle"], "since": 0}
    with ann.stream("POST", "/threads/new/stream/events", json=wanted) as events:
        lines = events.iter_lines()
        told = [next(line for line in lines if "NotSerializable" in line) for _ in range(3)]

    assert '"seq":' in told[0]


@pytest.mark.parametrize("before", ["idle", "interrupted"])
def test_rollback_restores_previous_status_of_thread(
    sdk: SyncLangGraphClient, gate: Gate, before: str
) -> None:
    if before == "interrupted":
        sdk.runs.wait("t", "ask", input={})
    run = sdk.runs.create("t", "talk", input=build_input("one"))["run_id"]
    assert gate.reached.wait(60)
    sdk.runs.cancel("t", run, action="rollback", wait=True)

    assert sdk.threads.get_state("t")["values"].get("heard", []) == []  # type: ignore[union-attr]
    assert sdk.threads.get("t")["status"] == before


def test_last_event_id_with_too_many_digits_is_ignored(
    sdk: SyncLangGraphClient, ann: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    run = sdk.runs.create("t", "talk", input=build_input("one"))["run_id"]

    for digits in ("9" * 19, "9" * 5000):
        reply = ann.get(f"/threads/t/runs/{run}/stream", headers={"Last-Event-ID": digits})
        assert reply.text.startswith("event: metadata")


def test_log_omits_message_of_exception_raised_by_graph(
    ann: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"assistant_id": "fail", "input": build_input("hello")}
    read_successful_reply(
        ann.post("/threads/new/runs/wait", json={**asked, "if_not_exists": "create"})
    )

    [record] = [each for each in caplog.records if each.name == "perdure.server.runs"]
    logged = logging.Formatter().format(record)
    assert "ZeroDivisionError" in logged
    assert "in stumble" in logged
    assert "one by none" not in logged.replace('("one by none")', "")  # the line of the source


def test_cancelled_queued_run_does_not_end_events_of_other_run(
    ann: httpx.Client, gate: Gate
) -> None:
    read_successful_reply(ann.post("/threads", json={"thread_id": "t"}))
    read_successful_reply(ann.post("/threads/t/commands", json=build_start_command("one")))
    assert gate.reached.wait(60)
    second = read_successful_reply(
        ann.post("/threads/t/commands", json=build_start_command("two"))
    )["result"]["run_id"]
    read_successful_reply(ann.post(f"/threads/t/runs/{second}/cancel", params={"wait": True}))
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


def test_events_of_thread_are_kept_when_another_is_read_often(settings: Settings) -> None:
    shared_state = SharedRunState(Graphs({}), Limits(), Databases(settings), {})
    shared_state.get_or_create_event_log("a", "t", 1).add("values", SECRET)
    for _ in range(RETAINED_EVENT_LOGS + 1):
        shared_state.get_or_create_event_log("b", "t", 1)
    assert shared_state.get_or_create_event_log("a", "t", 1).last == 1
    for number in range(RETAINED_EVENT_LOGS):
        shared_state.get_or_create_event_log("b", str(number), 1)
    assert shared_state.get_or_create_event_log("a", "t", 1).last == 0


# -- readers of events


def test_stream_without_events_sends_ping_comments(
    ann: httpx.Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "PING_S", 0.05)
    asked = {**build_run_body(), "if_not_exists": "create"}
    with ann.stream("POST", "/threads/new/runs/stream", json=asked) as events:
        lines = events.iter_lines()
        comments = [line for line in (next(lines) for _ in range(12)) if line.startswith(":")]
        gate.open.set()
        rest = [line for line in lines if line.startswith("event: ")]

    assert ": ping" in comments
    assert rest[-1] == "event: values"


def test_run_is_cancelled_if_its_client_stops_reading(
    sdk: SyncLangGraphClient, ann: httpx.Client, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has `on_disconnect` set to `cancel`."""
    monkeypatch.setattr(event_log, "SEND_TIMEOUT_S", 0.2)
    asked = {**build_run_body("x" * 8_000_000), "on_disconnect": "cancel"}
    with ann.stream("POST", "/threads/t/runs/stream", json=asked) as events:
        assert events.status_code == 200
        assert gate.reached.wait(60)
        wait_until(lambda: sdk.runs.list("t")[0]["status"] == "interrupted")


async def wait_forever(*args: Any) -> Any:
    await asyncio.Event().wait()


async def report_disconnect() -> Any:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("receive", "send"),
    [(report_disconnect, wait_forever), (wait_forever, wait_forever)],
    ids=["disconnected", "not reading"],
)
def test_run_is_cancelled_if_its_client_leaves_before_the_first_event(
    receive: Any, send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has disconnected, or it stops reading, before the headers are sent."""
    monkeypatch.setattr(event_log, "SEND_TIMEOUT_S", 0.05)
    cancellations: list[str] = []

    async def iter_frames() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    async def respond() -> None:
        response = event_log.build_event_stream(
            iter_frames(), on_disconnect=lambda: cancellations.append("cancelled")
        )
        with suppress(TimeoutError, ExceptionGroup):
            await response({"type": "http"}, receive, send)

    asyncio.run(asyncio.wait_for(respond(), 60))

    assert cancellations == ["cancelled"]


class FlakyAccess(LocalAccess):
    """Access that cannot identify a caller while it is down."""

    is_down = False

    async def identify(self, connection: HTTPConnection) -> Identity:
        if self.is_down:
            raise ConnectionError(SECRET)
        return await super().identify(connection)


def test_run_continues_when_reader_can_no_longer_be_identified(
    settings: Settings, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "ACCESS_CHECK_S", 0.05)
    access, asked = FlakyAccess("ann"), {**build_run_body(), "on_disconnect": "cancel"}
    with (
        run_server(
            create_app(settings, access=access, graphs=Graphs({"talk": build_talk_graph(gate)}))
        ) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        read_successful_reply(client.post("/threads", json={"thread_id": "t"}))
        with client.stream("POST", "/threads/t/runs/stream", json=asked) as events:
            assert gate.reached.wait(60)
            access.is_down = True
            events_text = events.read().decode()  # to its end: the gate is not open
        access.is_down = False
        gate.open.set()
        [run] = read_successful_reply(client.get("/threads/t/runs"))
        read_successful_reply(client.get(f"/threads/t/runs/{run['run_id']}/join"))

        assert "Unauthenticated" in events_text
        assert (
            read_successful_reply(client.get(f"/threads/t/runs/{run['run_id']}"))["status"]
            == "success"
        )


def test_runs_of_deleted_thread_are_hidden_from_new_thread_with_same_id(
    ann: httpx.Client, bob: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    read_successful_reply(ann.post("/threads", json={"thread_id": "daily"}))
    run = read_successful_reply(ann.post("/threads/daily/runs", json=build_run_body()))["run_id"]
    read_successful_reply(ann.get(f"/threads/daily/runs/{run}/join"))
    read_successful_reply(ann.delete("/threads/daily"))
    read_successful_reply(bob.post("/threads", json={"thread_id": "daily"}))

    listed = bob.get("/threads/daily/runs")
    joined = bob.get(f"/threads/daily/runs/{run}/join")
    streamed = bob.get(f"/threads/daily/runs/{run}/stream")

    assert listed.json() == []
    assert (joined.status_code, streamed.status_code) == (404, 404)


def test_events_of_deleted_thread_are_hidden_from_new_thread_with_same_id(
    ann: httpx.Client, bob: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    run = read_successful_reply(ann.post("/threads/daily/commands", json=build_start_command()))[
        "result"
    ]["run_id"]
    read_successful_reply(ann.get(f"/threads/daily/runs/{run}/join"))
    read_successful_reply(ann.delete("/threads/daily"))
    read_successful_reply(bob.post("/threads", json={"thread_id": "daily"}))

    with bob.stream(
        "POST", "/threads/daily/stream/events", json={**VALUES_CHANNEL, "since": 0}
    ) as events:
        read_successful_reply(
            bob.post("/threads/daily/commands", json=build_start_command("of bob"))
        )
        first = next(line for line in events.iter_lines() if line.startswith("data: "))

    assert SECRET not in first


@pytest.mark.parametrize("deleted_by", ["the server", "another program"])
def test_event_stream_of_deleted_thread_omits_events_of_new_thread(
    ann: httpx.Client, bob: httpx.Client, gate: Gate, settings: Settings, deleted_by: str
) -> None:
    gate.open.set()
    read_successful_reply(bob.post("/threads", json={"thread_id": "daily"}))
    with bob.stream("POST", "/threads/daily/stream/events", json=VALUES_CHANNEL) as events:
        if deleted_by == "the server":
            read_successful_reply(bob.delete("/threads/daily"))
        else:
            with open_checkpointer(settings.db) as saver:
                saver.delete_thread("daily")
        read_successful_reply(ann.post("/threads", json={"thread_id": "daily"}))
        read_successful_reply(ann.post("/threads/daily/commands", json=build_start_command()))
        received = events.read()  # to its end

    assert SECRET.encode() not in received


@pytest.mark.parametrize("path", ["/threads/t/stream/events", "/threads/t/runs/stream"])
def test_revoked_key_ends_its_streams(
    ann: httpx.Client, keys_file: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(keys_module, "_RELOAD_INTERVAL_S", -1.0)
    monkeypatch.setattr(event_log, "ACCESS_CHECK_S", 0.05)
    read_successful_reply(ann.post("/threads", json={"thread_id": "t"}))
    asked = VALUES_CHANNEL if path.endswith("events") else build_run_body("hello")
    with ann.stream("POST", path, json=asked) as events:
        keys_file.write_text(render_key_entry("another-key", "ann"))
        received = events.read()  # to its end: the gate is not open
    gate.open.set()

    assert ann.get("/threads/t").status_code == 401
    assert b"heard 1" not in received


# -- number of runs


def test_background_runs_of_user_are_limited(
    ann: httpx.Client, bob: httpx.Client, gate: Gate
) -> None:
    read_successful_reply(ann.post("/threads", json={"thread_id": "t"}))
    for _ in range(MAX_CONCURRENT_RUNS):
        read_successful_reply(ann.post("/threads/t/runs", json=build_run_body()))

    refused = ann.post("/threads/t/runs", json=build_run_body())
    new = ann.post("/threads/new/runs", json={**build_run_body(), "if_not_exists": "create"})
    read_successful_reply(
        bob.post("/threads/of-bob/runs", json={**build_run_body(), "if_not_exists": "create"})
    )
    gate.open.set()

    assert (refused.status_code, new.status_code) == (429, 429)
    assert "at most 3 unfinished runs" in refused.text
    assert ann.get("/threads/new").status_code == 404
    wait_until(
        lambda: (
            {each["status"] for each in read_successful_reply(ann.get("/threads/t/runs"))}
            == {"success"}
        )
    )
    read_successful_reply(ann.post("/threads/t/runs/wait", json=build_run_body()))

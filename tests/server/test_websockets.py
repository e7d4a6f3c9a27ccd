"""Commands and events of a thread over a websocket, and connections that are refused."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, WebSocket
from langgraph_sdk import get_client, get_sync_client
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from perdure.server import api_store, create_app, event_streams
from perdure.server.graphs import Graphs
from perdure.server.http import keys as keys_module
from perdure.server.http.keys import KeysFileAccess
from perdure.server.http.limits import Limits
from perdure.server.runs import event_log
from perdure.settings import Settings
from tests.server.http.test_keys import ANN, BOB, render_key_entry
from tests.server.running import run_server, wait_until
from tests.server.talking import Gate, build_asking_graph, build_input, build_talk_graph

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
ALL_CHANNELS = ["values", "updates", "messages", "lifecycle", "input", "checkpoints", "custom"]
MAX_BODY_BYTES = 100_000


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    return file


@pytest.fixture
def app(settings: Settings, keys_file: Path, gate: Gate) -> Any:
    graphs = Graphs({"talk": build_talk_graph(gate), "ask": build_asking_graph()})
    limits = Limits(body_bytes=MAX_BODY_BYTES, max_concurrent_requests=3)
    return create_app(settings, access=KeysFileAccess(keys_file), graphs=graphs, limits=limits)


@pytest.fixture
def url(app: Any) -> Iterator[str]:
    with run_server(app) as address:
        with get_sync_client(url=address, api_key=ANN) as client:
            client.threads.create(thread_id="t")
        yield address


@pytest.fixture
def ann(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"x-api-key": ANN}, timeout=30) as client:
        yield client


def connect_to_thread(
    url: str, thread_id: str = "t", key: str | None = ANN, **more: Any
) -> ClientConnection:
    headers = {**({"x-api-key": key} if key else {}), **more.pop("headers", {})}
    address = f"{url.replace('http', 'ws', 1)}/threads/{thread_id}/stream/events"
    made: ClientConnection = connect(address, additional_headers=headers, **more)
    return made


def build_command(method: str, id: int = 1, **params: Any) -> str:
    return json.dumps({"id": id, "method": method, "params": params})


def build_subscribe_command(*channels: str, id: int = 1, **more: Any) -> str:
    return build_command("subscription.subscribe", id, channels=channels or ALL_CHANNELS, **more)


def receive_json(sock: ClientConnection) -> Any:
    return json.loads(sock.recv(60))


def read_http_status(refused: pytest.ExceptionInfo[InvalidStatus]) -> int:
    return int(refused.value.response.status_code)


def read_until_closed(sock: ClientConnection) -> tuple[int, Any]:
    """Return the code with which the server closes, and its last message before that."""
    said: list[Any] = []
    with suppress(ConnectionClosed):
        while True:
            said.append(receive_json(sock))
    return sock.close_code or 0, said[-1] if said else None


def test_websocket_delivers_same_events_as_sse(url: str, ann: httpx.Client, gate: Gate) -> None:
    gate.open.set()
    with connect_to_thread(url) as sock:
        sock.send(build_subscribe_command(since=0))
        told = receive_json(sock)
        assert (told["type"], told["id"], [*told["result"]]) == ("success", 1, ["subscription_id"])
        sock.send(build_command("run.start", 2, assistant_id="talk", input=build_input("hello")))
        first, events = list[Any](), list[Any]()
        while not events or events[-1]["params"]["data"].get("event") != "completed":
            each = receive_json(sock)
            (events if each["type"] == "event" else first).append(each)
    [begun] = first

    assert (begun["id"], [*begun["result"]]) == (2, ["run_id"])
    wanted, same = {"channels": ALL_CHANNELS, "since": 0}, []
    with ann.stream("POST", "/threads/t/stream/events", json=wanted) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: "):
                same.append(json.loads(line.removeprefix("data: ")))
            if len(same) == len(events):
                break
    assert events == same
    assert {"values", "updates", "lifecycle", "checkpoints", "custom"} <= {
        each["method"] for each in events
    }


def test_question_can_be_answered_over_websocket(url: str, ann: httpx.Client) -> None:
    with connect_to_thread(url) as sock:
        sock.send(build_subscribe_command("input", since=0))
        receive_json(sock)
        sock.send(build_command("run.start", 2, assistant_id="ask", input=build_input("hello")))
        receive_json(sock)
        asked = receive_json(sock)["params"]["data"]
        sock.send(build_subscribe_command("lifecycle", id=3))
        sock.send(
            build_command("input.respond", 4, interrupt_id=asked["interrupt_id"], response="yes")
        )
        events = []
        while "completed" not in events:
            events.append((receive_json(sock).get("params") or {}).get("data", {}).get("event"))

    assert ann.get("/threads/t/state").json()["values"]["heard"] == ["yes"]


def test_langgraph_client_can_stream_over_websocket(url: str, gate: Gate) -> None:
    gate.open.set()

    async def go() -> Any:
        async with get_client(url=url, api_key=ANN) as client:
            own = {"x-api-key": ANN}  # which it sends by HTTP only
            stream = client.threads.stream(
                "t", assistant_id="talk", headers=own, transport="websocket"
            )
            async with stream as thread:
                await thread.run.start(input=build_input("hello"))
                values = [each async for each in thread.values]
                return values, await thread.output

    values, output = asyncio.run(go())
    assert output["heard"] == ["hello"]
    assert values[-1]["heard"] == ["hello"]


def test_invalid_commands_are_refused_and_connection_stays_open(url: str) -> None:
    with connect_to_thread(url) as sock:
        replies = []
        for sent in (
            "no JSON",
            "[]",
            b'{"id": 3, "method": "state.get"}',
            build_command("run.start", 4, assistant_id="nobody"),
            build_command("run.start", 5, assistant_id="talk", input={}, webhook="http://x"),
            build_command("subscription.subscribe", 6),
            build_command("subscription.unsubscribe", 7, subscription_id="unknown"),
        ):
            sock.send(sent)
            replies.append(receive_json(sock))

    assert [(each["id"], each.get("error")) for each in replies] == [
        (None, "invalid_argument"),
        (None, "invalid_argument"),
        (3, "not_supported"),
        (4, "invalid_argument"),
        (5, "invalid_argument"),
        (6, "invalid_argument"),
        (7, None),
    ]
    assert "nobody" in replies[3]["message"]


def test_subscriptions_are_limited_and_can_be_ended(
    url: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "MAX_SUBSCRIPTIONS", 1)
    gate.open.set()
    with connect_to_thread(url) as sock:
        sock.send(build_subscribe_command("lifecycle"))
        first = receive_json(sock)["result"]["subscription_id"]
        sock.send(build_subscribe_command("values", id=2))
        refused = receive_json(sock)
        sock.send(build_command("subscription.unsubscribe", 3, subscription_id=first))
        assert receive_json(sock)["type"] == "success"
        sock.send(build_subscribe_command("custom", id=4))
        assert receive_json(sock)["type"] == "success"
        sock.send(build_command("run.start", 5, assistant_id="talk", input=build_input("hello")))
        methods = {receive_json(sock).get("method") for _ in range(2)}

    assert (refused["id"], refused["error"]) == (2, "invalid_argument")
    assert methods == {None, "custom"}


@pytest.mark.parametrize("key", [None, "wrong", BOB])
def test_connection_without_access_is_refused(url: str, key: str | None) -> None:
    with pytest.raises(InvalidStatus) as refused, connect_to_thread(url, key=key):
        pass

    assert read_http_status(refused) == (404 if key == BOB else 401)  # as if there were no thread
    assert "detail" in json.loads(refused.value.response.body or b"")


@pytest.mark.parametrize(
    ("path", "expected_status"),
    [
        ("/threads/t/stream/events", 404),
        ("/threads/none/stream/events", 404),
        ("/threads/t/stream", 403),
        ("/no/such/path", 403),
    ],
)
def test_refused_connection_leaves_no_error_in_log(
    settings: Settings,
    keys_file: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    path: str,
    expected_status: int,
) -> None:
    with (
        caplog.at_level(logging.INFO, "perdure.requests"),
        run_server(create_app(settings, access=KeysFileAccess(keys_file))) as address,
    ):
        uvicorn = logging.getLogger("uvicorn.error")  # it does not propagate
        uvicorn.addHandler(caplog.handler)
        request.addfinalizer(lambda: uvicorn.removeHandler(caplog.handler))
        made = httpx.post(f"{address}/threads", json={"thread_id": "t"}, headers={"x-api-key": ANN})
        assert made.status_code == 200
        socket = f"{address.replace('http', 'ws', 1)}{path}"
        with (
            pytest.raises(InvalidStatus) as refused,
            connect(socket, additional_headers={"x-api-key": BOB}),
        ):
            pass
    # the server has ended, so that it has written all of its log

    assert refused.value.response.status_code == expected_status
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    requests = [each for each in caplog.records if each.name == "perdure.requests"]
    assert [each.__dict__["fields"]["status"] for each in requests] == [200, expected_status]


def test_connection_to_unknown_thread_is_refused(url: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect_to_thread(url, "none"):
        pass

    assert read_http_status(refused) == 404


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "SELF"}, 403),
        ({"Origin": "SELF"}, 101),
    ],
)
def test_connection_from_page_of_other_site_is_refused(
    url: str, headers: dict[str, str], expected: int
) -> None:
    sent = {name: url if value == "SELF" else value for name, value in headers.items()}
    if expected == 101:
        with connect_to_thread(url, headers=sent):
            return
    with pytest.raises(InvalidStatus) as refused, connect_to_thread(url, headers=sent):
        pass

    assert read_http_status(refused) == expected


def test_connection_with_other_host_name_is_refused(url: str) -> None:
    own = httpx.URL(url)
    reached = socket.create_connection((own.host, own.port or 0))
    with (
        pytest.raises(InvalidStatus) as refused,
        connect_to_thread("http://evil.example", sock=reached),
    ):
        pass

    assert read_http_status(refused) == 421


def test_session_cookie_is_accepted_only_from_pages_of_this_server(url: str) -> None:
    with httpx.Client(base_url=url) as browser:
        same = {"sec-fetch-site": "same-origin"}
        assert browser.post("/ui/login", data={"key": ANN}, headers=same).status_code == 303
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())

    with connect_to_thread(url, key=None, headers={"Cookie": cookie, "Origin": url}):
        pass
    for others in ({}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        headers = {"Cookie": cookie, **others}
        with (
            pytest.raises(InvalidStatus) as refused,
            connect_to_thread(url, key=None, headers=headers),
        ):
            pass
        assert read_http_status(refused) == 403


def test_revoked_key_ends_connection(
    url: str, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "_RELOAD_INTERVAL_S", -1.0)
    monkeypatch.setattr(event_log, "ACCESS_CHECK_S", 0.05)
    with connect_to_thread(url) as reads, connect_to_thread(url) as commands:
        reads.send(build_subscribe_command())
        receive_json(reads)
        keys_file.write_text(render_key_entry(BOB, "bob"))
        commands.send(build_command("run.start", assistant_id="talk", input=build_input("hello")))
        ends = [read_until_closed(reads), read_until_closed(commands)]

    for code, said in ends:
        assert code == 4401
        assert (said["type"], said["id"], said["error"]) == ("error", None, "permission_denied")


def test_size_and_rate_of_messages_are_limited(url: str, app: Any) -> None:
    with connect_to_thread(url) as sock:
        sock.send("x" * (MAX_BODY_BYTES + 1))
        assert read_until_closed(sock)[0] == 4413
    with connect_to_thread(url) as sock:
        app.state.clients._burst_s = -1.0  # one is too many
        sock.send(build_command("state.get"))
        assert read_until_closed(sock)[0] == 4429


def test_number_of_open_connections_is_limited(url: str) -> None:
    with (
        connect_to_thread(url),
        connect_to_thread(url),
        connect_to_thread(url),
        pytest.raises(InvalidStatus) as refused,
    ):
        connect_to_thread(url)

    assert read_http_status(refused) == 429


def test_connection_does_not_reach_new_thread_with_same_id(
    url: str, ann: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    with connect_to_thread(url) as sock, get_sync_client(url=url, api_key=BOB) as bob:
        assert ann.delete("/threads/t").status_code == 204
        bob.threads.create(thread_id="t")
        begin = {"assistant_id": "talk", "input": build_input("a secret of bob")}
        bob.http.post("/threads/t/commands", json={"id": 1, "method": "run.start", "params": begin})
        for sent in (
            build_subscribe_command(since=0),
            build_command("subscription.unsubscribe", 2),
        ):
            sock.send(sent)
            assert "there is no thread 't'" in receive_json(sock)["message"]


def test_connection_ends_when_its_thread_is_deleted(url: str, ann: httpx.Client) -> None:
    with connect_to_thread(url) as sock:
        sock.send(build_subscribe_command())
        receive_json(sock)
        assert ann.delete("/threads/t").status_code == 204
        assert read_until_closed(sock)[0] == 1000


def test_connection_of_client_that_does_not_read_is_closed(
    url: str, app: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "SEND_TIMEOUT_S", 0.2)
    with connect_to_thread(url, max_queue=1, compression=None, close_timeout=0.1) as sock:
        sock.send(build_subscribe_command("custom"))
        receive_json(sock)
        under_way = app.state.clients._open_requests
        assert sum(under_way.values()) == 1
        feed = app.state.runs.shared_state.get_or_create_event_log(None, "t", 1)
        kind = {"method": "custom", "params": {"namespace": [], "data": {"name": None}}}
        # until all buffers between are full
        wait_until(lambda: feed.add("custom", "x" * 1_000_000, kind) or not sum(under_way.values()))


def test_connection_ends_when_server_stops(app: Any) -> None:
    with ExitStack() as stack:
        with run_server(app) as url:
            with get_sync_client(url=url, api_key=ANN) as client:
                client.threads.create(thread_id="t")
            opened_one = stack.enter_context(connect_to_thread(url))
            opened_one.send(build_subscribe_command())
            receive_json(opened_one)
        assert read_until_closed(opened_one)[0] == 1012


def test_app_with_websocket_route_without_action_is_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = APIRouter()

    @routes.websocket("/anybody")
    async def anybody(websocket: WebSocket) -> None: ...

    monkeypatch.setattr(api_store, "routes", routes)
    with pytest.raises(TypeError, match="/anybody declares no required action"):
        create_app(settings)

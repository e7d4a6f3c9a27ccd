"""Commands and events of a thread by a websocket, and who gets none."""

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

from perdure.server import api_store, create_app, event_streams, run_log
from perdure.server import keys as keys_module
from perdure.server.graphs import Graphs
from perdure.server.keys import KeysFileAccess
from perdure.server.limits import Limits
from perdure.settings import Settings
from tests.server.running import run_server, wait_until
from tests.server.talking import Gate, build_asking_graph, build_input, build_talk_graph
from tests.server.test_keys import ANN, BOB, render_key_entry

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
ALL = ["values", "updates", "messages", "lifecycle", "input", "checkpoints", "custom"]
BODY = 100_000


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    return file


@pytest.fixture
def app(settings: Settings, keys: Path, gate: Gate) -> Any:
    graphs = Graphs({"talk": build_talk_graph(gate), "ask": build_asking_graph()})
    limits = Limits(body_bytes=BODY, max_concurrent_requests=3)
    return create_app(settings, access=KeysFileAccess(keys), graphs=graphs, limits=limits)


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


def opened(url: str, thread_id: str = "t", key: str | None = ANN, **more: Any) -> ClientConnection:
    headers = {**({"x-api-key": key} if key else {}), **more.pop("headers", {})}
    address = f"{url.replace('http', 'ws', 1)}/threads/{thread_id}/stream/events"
    made: ClientConnection = connect(address, additional_headers=headers, **more)
    return made


def command(method: str, id: int = 1, **params: Any) -> str:
    return json.dumps({"id": id, "method": method, "params": params})


def subscribe(*channels: str, id: int = 1, **more: Any) -> str:
    return command("subscription.subscribe", id, channels=channels or ALL, **more)


def received(sock: ClientConnection) -> Any:
    return json.loads(sock.recv(60))


def status(refused: pytest.ExceptionInfo[InvalidStatus]) -> int:
    return int(refused.value.response.status_code)


def closed(sock: ClientConnection) -> tuple[int, Any]:
    """The code with which the server closes, and what it said before."""
    said: list[Any] = []
    with suppress(ConnectionClosed):
        while True:
            said.append(received(sock))
    return sock.close_code or 0, said[-1] if said else None


def test_it_has_the_events_that_sse_has(url: str, ann: httpx.Client, gate: Gate) -> None:
    gate.open.set()
    with opened(url) as sock:
        sock.send(subscribe(since=0))
        told = received(sock)
        assert (told["type"], told["id"], [*told["result"]]) == ("success", 1, ["subscription_id"])
        sock.send(command("run.start", 2, assistant_id="talk", input=build_input("hello")))
        first, events = list[Any](), list[Any]()
        while not events or events[-1]["params"]["data"].get("event") != "completed":
            each = received(sock)
            (events if each["type"] == "event" else first).append(each)
    [begun] = first

    assert (begun["id"], [*begun["result"]]) == (2, ["run_id"])
    wanted, same = {"channels": ALL, "since": 0}, []
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


def test_a_question_is_answered_over_it(url: str, ann: httpx.Client) -> None:
    with opened(url) as sock:
        sock.send(subscribe("input", since=0))
        received(sock)
        sock.send(command("run.start", 2, assistant_id="ask", input=build_input("hello")))
        received(sock)
        asked = received(sock)["params"]["data"]
        sock.send(subscribe("lifecycle", id=3))
        sock.send(command("input.respond", 4, interrupt_id=asked["interrupt_id"], response="yes"))
        events = []
        while "completed" not in events:
            events.append((received(sock).get("params") or {}).get("data", {}).get("event"))

    assert ann.get("/threads/t/state").json()["values"]["heard"] == ["yes"]


def test_the_client_of_langgraph_streams_by_it(url: str, gate: Gate) -> None:
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


def test_what_is_no_command_is_told_and_the_next_one_is_done(url: str) -> None:
    with opened(url) as sock:
        replies = []
        for sent in (
            "no JSON",
            "[]",
            b'{"id": 3, "method": "state.get"}',
            command("run.start", 4, assistant_id="nobody"),
            command("run.start", 5, assistant_id="talk", input={}, webhook="http://x"),
            command("subscription.subscribe", 6),
            command("subscription.unsubscribe", 7, subscription_id="unknown"),
        ):
            sock.send(sent)
            replies.append(received(sock))

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


def test_a_subscription_ends_and_there_are_not_too_many(
    url: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "MAX_SUBSCRIPTIONS", 1)
    gate.open.set()
    with opened(url) as sock:
        sock.send(subscribe("lifecycle"))
        first = received(sock)["result"]["subscription_id"]
        sock.send(subscribe("values", id=2))
        refused = received(sock)
        sock.send(command("subscription.unsubscribe", 3, subscription_id=first))
        assert received(sock)["type"] == "success"
        sock.send(subscribe("custom", id=4))
        assert received(sock)["type"] == "success"
        sock.send(command("run.start", 5, assistant_id="talk", input=build_input("hello")))
        methods = {received(sock).get("method") for _ in range(2)}

    assert (refused["id"], refused["error"]) == (2, "invalid_argument")
    assert methods == {None, "custom"}


@pytest.mark.parametrize("key", [None, "wrong", BOB])
def test_strangers_get_no_connection(url: str, key: str | None) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(url, key=key):
        pass

    assert status(refused) == (404 if key == BOB else 401)  # as if there were no thread
    assert "detail" in json.loads(refused.value.response.body or b"")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/threads/t/stream/events", 404),
        ("/threads/none/stream/events", 404),
        ("/threads/t/stream", 403),
        ("/no/such/path", 403),
    ],
)
def test_a_refused_one_leaves_no_error_in_the_log(
    settings: Settings,
    keys: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    path: str,
    status: int,
) -> None:
    with (
        caplog.at_level(logging.INFO, "perdure.requests"),
        run_server(create_app(settings, access=KeysFileAccess(keys))) as address,
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

    assert refused.value.response.status_code == status
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    requests = [each for each in caplog.records if each.name == "perdure.requests"]
    assert [each.__dict__["fields"]["status"] for each in requests] == [200, status]


def test_nobody_reads_a_thread_that_is_not_there(url: str) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(url, "none"):
        pass

    assert status(refused) == 404


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
def test_pages_of_other_sites_get_no_connection(
    url: str, headers: dict[str, str], expected: int
) -> None:
    sent = {name: url if value == "SELF" else value for name, value in headers.items()}
    if expected == 101:
        with opened(url, headers=sent):
            return
    with pytest.raises(InvalidStatus) as refused, opened(url, headers=sent):
        pass

    assert status(refused) == expected


def test_another_name_of_the_server_gets_no_connection(url: str) -> None:
    own = httpx.URL(url)
    reached = socket.create_connection((own.host, own.port or 0))
    with pytest.raises(InvalidStatus) as refused, opened("http://evil.example", sock=reached):
        pass

    assert status(refused) == 421


def test_a_session_is_used_by_pages_of_this_server_only(url: str) -> None:
    with httpx.Client(base_url=url) as browser:
        same = {"sec-fetch-site": "same-origin"}
        assert browser.post("/ui/login", data={"key": ANN}, headers=same).status_code == 303
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())

    with opened(url, key=None, headers={"Cookie": cookie, "Origin": url}):
        pass
    for others in ({}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        headers = {"Cookie": cookie, **others}
        with pytest.raises(InvalidStatus) as refused, opened(url, key=None, headers=headers):
            pass
        assert status(refused) == 403


def test_a_key_that_is_revoked_ends_it(
    url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "_RELOAD_INTERVAL_S", -1.0)
    monkeypatch.setattr(run_log, "ACCESS_CHECK_S", 0.05)
    with opened(url) as reads, opened(url) as commands:
        reads.send(subscribe())
        received(reads)
        keys.write_text(render_key_entry(BOB, "bob"))
        commands.send(command("run.start", assistant_id="talk", input=build_input("hello")))
        ends = [closed(reads), closed(commands)]

    for code, said in ends:
        assert code == 4401
        assert (said["type"], said["id"], said["error"]) == ("error", None, "permission_denied")


def test_a_message_has_a_size_and_messages_a_rate(url: str, app: Any) -> None:
    with opened(url) as sock:
        sock.send("x" * (BODY + 1))
        assert closed(sock)[0] == 4413
    with opened(url) as sock:
        app.state.clients._burst_s = -1.0  # one is too many
        sock.send(command("state.get"))
        assert closed(sock)[0] == 4429


def test_as_many_are_open_as_requests_may_be(url: str) -> None:
    with opened(url), opened(url), opened(url), pytest.raises(InvalidStatus) as refused:
        opened(url)

    assert status(refused) == 429


def test_nobody_reads_another_thread_that_has_its_id_later(
    url: str, ann: httpx.Client, gate: Gate
) -> None:
    gate.open.set()
    with opened(url) as sock, get_sync_client(url=url, api_key=BOB) as bob:
        assert ann.delete("/threads/t").status_code == 204
        bob.threads.create(thread_id="t")
        begin = {"assistant_id": "talk", "input": build_input("a secret of bob")}
        bob.http.post("/threads/t/commands", json={"id": 1, "method": "run.start", "params": begin})
        for sent in (subscribe(since=0), command("subscription.unsubscribe", 2)):
            sock.send(sent)
            assert "there is no thread 't'" in received(sock)["message"]


def test_it_ends_with_its_thread(url: str, ann: httpx.Client) -> None:
    with opened(url) as sock:
        sock.send(subscribe())
        received(sock)
        assert ann.delete("/threads/t").status_code == 204
        assert closed(sock)[0] == 1000


def test_who_does_not_read_is_left(
    url: str, app: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "SEND_TIMEOUT_S", 0.2)
    with opened(url, max_queue=1, compression=None, close_timeout=0.1) as sock:
        sock.send(subscribe("custom"))
        received(sock)
        under_way = app.state.clients._open_requests
        assert sum(under_way.values()) == 1
        feed = app.state.runs.get_feed(None, "t", 1)
        kind = {"method": "custom", "params": {"namespace": [], "data": {"name": None}}}
        # until all buffers between are full
        wait_until(lambda: feed.add("custom", "x" * 1_000_000, kind) or not sum(under_way.values()))


def test_it_ends_with_the_server(app: Any) -> None:
    with ExitStack() as stack:
        with run_server(app) as url:
            with get_sync_client(url=url, api_key=ANN) as client:
                client.threads.create(thread_id="t")
            opened_one = stack.enter_context(opened(url))
            opened_one.send(subscribe())
            received(opened_one)
        assert closed(opened_one)[0] == 1012


def test_no_server_starts_with_a_socket_that_names_no_action(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = APIRouter()

    @routes.websocket("/anybody")
    async def anybody(websocket: WebSocket) -> None: ...

    monkeypatch.setattr(api_store, "routes", routes)
    with pytest.raises(TypeError, match="/anybody names no action"):
        create_app(settings)

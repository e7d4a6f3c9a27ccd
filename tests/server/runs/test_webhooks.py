"""Webhooks: signed requests at the end of a run, and the hosts that may be called."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import UnprocessableEntityError

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.runs import webhooks
from perdure.server.runs.run_queue import SWEEP_S
from perdure.server.runs.webhooks import Webhooks
from perdure.settings import Settings
from perdure.storage.flow import fetch_rows
from tests.server.running import run_server, wait_until
from tests.server.runs.test_run_ends import hold_end_of_first_run
from tests.server.talking import Gate, build_failing_graph, build_input, build_talk_graph

SECRET = "a long random text"


class Listener(HTTPServer):
    """A server that receives webhooks, and answers each with the code `status`."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, bytes]] = []
        self.status = 200
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.requests.append((self.headers, body))
                self.send_response(listener.status)
                if listener.status == 307:
                    self.send_header("Location", f"{listener.url}/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def gate() -> Gate:
    made = Gate()
    made.open.set()
    return made


@contextmanager
def serve_graphs(settings: Settings, gate: Gate, *hosts: str) -> Iterator[SyncLangGraphClient]:
    settings = Settings(db=settings.db, user="ann", webhook_secret=SECRET)
    graphs = Graphs({"talk": build_talk_graph(gate), "fail": build_failing_graph()})
    app = create_app(settings, graphs=graphs, webhook_hosts=hosts)
    with run_server(app) as url, get_sync_client(url=url) as client:
        client.threads.create(thread_id="t", if_exists="do_nothing")
        yield client


def list_pending_webhooks(settings: Settings) -> list[Any]:
    with SQLiteCheckpointer.open(settings.db) as saver:
        return saver.database.read(lambda: fetch_rows("SELECT run_id, attempts FROM webhooks"))


def test_webhook_is_sent_once_and_signed_at_end_of_run(
    settings: Settings, gate: Gate, listener: Listener
) -> None:
    with serve_graphs(settings, gate, listener.url) as sdk:
        sdk.runs.wait("t", "talk", input=build_input("hi"), webhook=f"{listener.url}/hook?a=b")
        wait_until(lambda: not list_pending_webhooks(settings) and listener.requests)
        run = sdk.runs.list("t")[0]
    [(headers, body)] = listener.requests
    told = json.loads(body)
    signed = f"{headers['X-Perdure-Timestamp']}.".encode() + body
    expected = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()

    assert headers["X-Perdure-Signature"] == f"sha256={expected}"
    assert told["run_id"] == run["run_id"]
    assert (told["status"], told["error"]) == ("success", None)
    assert told["values"]["heard"] == ["hi"]


def test_webhook_is_sent_for_failed_run_and_run_without_thread(
    settings: Settings, gate: Gate, listener: Listener
) -> None:
    with serve_graphs(settings, gate, listener.url) as sdk:
        sdk.runs.wait("t", "fail", input=build_input("hi"), webhook=listener.url, raise_error=False)
        sdk.runs.wait(None, "talk", input=build_input("hi"), webhook=listener.url)
        wait_until(lambda: len(listener.requests) == 2)
    told = [json.loads(body) for _, body in listener.requests]

    assert sorted(each["status"] for each in told) == ["error", "success"]
    assert [each["error"]["error"] for each in told if each["error"]] == ["ZeroDivisionError"]


@pytest.mark.parametrize("action", ["interrupt", "rollback"])
def test_webhook_reports_late_cancellation(
    settings: Settings,
    gate: Gate,
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
    action: Any,
) -> None:
    """The run is cancelled after its last step; its webhook is not sent before its end."""
    ending = Gate()
    hold_end_of_first_run(monkeypatch, ending)
    with serve_graphs(settings, gate, listener.url) as sdk:
        body: Any = {"webhook": listener.url}
        run = sdk.runs.create("t", "talk", input=build_input("one"), **body)["run_id"]
        assert ending.reached.wait(60)
        time.sleep(2 * SWEEP_S)  # a webhook that is stored by now is sent
        sdk.runs.cancel("t", run, action=action)
        ending.open.set()
        after = sdk.runs.create("t", "talk", input=build_input("two"), **body)["run_id"]
        wait_until(lambda: [each["status"] for each in sdk.runs.list("t")][:1] == ["success"])
        wait_until(lambda: not list_pending_webhooks(settings))
    told = {each["run_id"]: each["status"] for each in map(json.loads, request_bodies(listener))}

    first = {run: "interrupted"} if action == "interrupt" else {}
    assert told == {**first, after: "success"}


def request_bodies(listener: Listener) -> list[bytes]:
    return [body for _, body in listener.requests]


def test_webhook_is_retried_by_next_server(
    settings: Settings, gate: Gate, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener.status = 500
    monkeypatch.setattr(webhooks, "RETRY_DELAYS_S", (0.2,) * 100)
    with serve_graphs(settings, gate, listener.url) as sdk:
        sdk.runs.wait("t", "talk", input=build_input("hi"), webhook=listener.url)
        wait_until(lambda: listener.requests)
    kept, before = list_pending_webhooks(settings), len(listener.requests)
    listener.status = 204
    with serve_graphs(settings, gate, listener.url):
        wait_until(lambda: not list_pending_webhooks(settings))

    assert len(kept) == 1
    assert len(listener.requests) > before


def test_webhook_is_given_up_after_last_retry(
    settings: Settings, gate: Gate, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reply is a redirect, and redirects are not followed."""
    listener.status = 307
    monkeypatch.setattr(webhooks, "RETRY_DELAYS_S", (0.0,) * 3)
    with serve_graphs(settings, gate, listener.url) as sdk:
        sdk.runs.wait("t", "talk", input=build_input("hi"), webhook=listener.url)
        wait_until(lambda: not list_pending_webhooks(settings) and listener.requests)

    assert len(listener.requests) == 4


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example.com/",
        "https://hooks.example.com:8443/",
        "https://hooks.example.com./",
        "http://hooks.example.com/",
        "https://hooks.example.com@127.0.0.1/",
        "https://ann@hooks.example.com/",
        "http://127.0.0.1:1/",
        "file:///etc/passwd",
        "no address",
        "https:///",
        "https://hooks.example.com/\ud800",
    ],
)
def test_url_of_unlisted_host_is_refused(url: str) -> None:
    named = Webhooks(["hooks.example.com", "http://127.0.0.1:9000"], SECRET)
    named.check_url("https://hooks.example.com/a?b=c")
    named.check_url("https://HOOKS.example.com:443/")
    named.check_url("http://127.0.0.1:9000/")

    with pytest.raises(ConfigurationError):
        named.check_url(url)


def test_run_and_cron_with_webhook_to_unlisted_host_are_refused(
    settings: Settings, gate: Gate
) -> None:
    with serve_graphs(settings, gate) as sdk:
        with pytest.raises(UnprocessableEntityError, match="sends webhooks to no host"):
            sdk.runs.create(
                "t", "talk", input=build_input("hi"), webhook="https://hooks.example.com/"
            )
        with pytest.raises(UnprocessableEntityError, match="sends webhooks to no host"):
            sdk.crons.create("talk", schedule="@daily", webhook="https://hooks.example.com/")

        assert sdk.runs.list("t") == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.7",
        "169.254.169.254",
        "::1",
        "fe80::1%1",
        "::ffff:10.0.0.7",
        "64:ff9b::10.0.0.7",
        "::127.0.0.1",
        "fec0::1",
        "224.0.0.1",
    ],
)
def test_host_with_private_address_is_not_called(
    monkeypatch: pytest.MonkeyPatch, address: str, listener: Listener
) -> None:
    """No connection is opened if one of several addresses of the host is private."""
    asked = []

    def resolved(*of: Any, **_: Any) -> list[Any]:
        asked.append(of[0])
        return [(0, 0, 0, "", (each, 0)) for each in ("93.184.216.34", address)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    place = f"http://hooks.example.com:{listener.server_port}"

    with pytest.raises(ConfigurationError, match="resolves to the non-public address"):
        asyncio.run(Webhooks([place], SECRET).post_run_to_webhook(f"{place}/", {}))
    assert asked == ["hooks.example.com"]
    assert listener.requests == []


def test_unanswered_dns_lookups_do_not_block_other_os_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests also use OS threads, to read files and to check keys."""
    answered = threading.Event()
    asked: Callable[[], object]

    def resolved(*_: Any, **__: Any) -> list[Any]:
        asked()
        answered.wait(120)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    hooks = Webhooks(["hooks.example.com"], SECRET)

    async def call() -> list[Any]:
        nonlocal asked
        hangs, loop = asyncio.Event(), asyncio.get_running_loop()
        asked = partial(loop.call_soon_threadsafe, hangs.set)
        told = [
            asyncio.create_task(hooks.post_run_to_webhook("https://hooks.example.com/", {}))
            for _ in range(60)
        ]
        try:
            async with asyncio.timeout(30):
                await hangs.wait()
                assert await asyncio.to_thread(lambda: "done") == "done"
        finally:
            answered.set()
        return await asyncio.gather(*told, return_exceptions=True)

    assert {type(each) for each in asyncio.run(call())} <= {OSError, TimeoutError}


def test_webhooks_without_secret_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="PERDURE_WEBHOOK_SECRET"):
        create_app(Settings(db=":memory:"), webhook_hosts=["hooks.example.com"])


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("faß.example", "xn--fa-hia.example"),
        ("βόλος.example", "xn--nxasmm1c.example"),
        ("نامه‌ای.example", "xn--mgba3gch31f060k.example"),
        ("ශ්‍රී.example", "xn--10cl1a0b660p.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
    ],
)
def test_host_name_is_encoded_by_idna_2008(
    monkeypatch: pytest.MonkeyPatch, name: str, host: str
) -> None:
    """The encoding is used in the host list, for DNS and TLS; Python's codec is of 2003."""
    asked, sent = list[Any](), list[httpx.Request]()

    def resolved(*of: Any, **_: Any) -> list[Any]:
        asked.append(of[0])
        return [(0, 0, 0, "", ("93.184.216.34", 0))]

    async def send(self: Any, request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", send)
    webhooks = Webhooks([name], SECRET)
    for url in (f"https://{name}/", f"https://{host}/"):
        asyncio.run(webhooks.post_run_to_webhook(url, {}))

    assert asked == [host, host]
    assert [each.headers["host"] for each in sent] == [host, host]
    assert [each.extensions["sni_hostname"] for each in sent] == [host, host]
    with pytest.raises(ConfigurationError, match="this server sends"):
        webhooks.check_url("https://fass.example/")

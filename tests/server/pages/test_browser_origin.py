"""Scripts on a page of another site, in a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from playwright.sync_api import Error as ScriptError

from perdure.server import create_app
from perdure.settings import Settings
from tests.server.running import run_server

CALLS = """async (url) => {
  const json = (method, path, body) => fetch(url + path, {
    method, body: JSON.stringify(body), headers: {"content-type": "application/json"}});
  const made = await (await json("POST", "/threads", {})).json();
  await json("PATCH", `/threads/${made.thread_id}`, {metadata: {topic: "boats"}});
  const stream = await json("POST", `/threads/${made.thread_id}/runs/stream`, {
    assistant_id: "chat", input: {messages: [{role: "user", content: "hi"}]}});
  const events = await stream.text();
  const thread = await (await fetch(`${url}/threads/${made.thread_id}`)).json();
  const gone = await json("POST", "/threads/none/runs/wait", {assistant_id: "chat"});
  return {
    thread: made.thread_id,
    topic: thread.metadata.topic,
    streamed: events.includes("event: values"),
    at: stream.headers.get("content-location"),
    gone: [gone.status, (await gone.json()).detail],
  };
}"""


OPENS = """([url, thread]) => new Promise((done) => {
  const socket = new WebSocket(`${url.replace("http", "ws")}/threads/${thread}/stream/events`);
  socket.onopen = () => { socket.close(); done(true); };
  socket.onerror = () => done(false);
})"""


class _Empty(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def sites() -> Iterator[list[str]]:
    """The addresses of two sites with empty pages."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _Empty) for _ in range(2)]
    for each in servers:
        threading.Thread(target=each.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{each.server_address[1]}" for each in servers]
    for each in servers:
        each.shutdown()
        each.server_close()


def test_scripts_of_allowed_origin_can_call_server(
    browser: Browser, sites: list[str], tmp_path: Path
) -> None:
    """Scripts use threads, streams, websockets and headers. Other sites can do nothing."""
    settings = Settings(db=str(tmp_path / "memory.db"))
    with run_server(create_app(settings, origins=sites[:1])) as url:
        page = browser.new_page()
        page.goto(sites[0])
        told = page.evaluate(CALLS, url)
        opens = [page.evaluate(OPENS, [url, told["thread"]])]
        page.goto(sites[1])
        opens += [page.evaluate(OPENS, [url, told["thread"]])]
        with pytest.raises(ScriptError, match="Failed to fetch"):
            page.evaluate(CALLS, url)
        with pytest.raises(ScriptError, match="Failed to fetch"):
            page.evaluate("url => fetch(`${url}/ok`)", url)
        page.close()

    assert (told["topic"], told["streamed"]) == ("boats", True)
    assert opens == [True, False]
    assert told["at"].startswith("/threads/")
    assert told["gone"] == [404, "there is no thread 'none'"]

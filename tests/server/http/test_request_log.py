"""The request log: a line for each request, with no content and no ids in it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from perdure.server import create_app
from perdure.server.http.access import public
from perdure.server.http.logs import Audit, log_to_stderr
from perdure.settings import Settings
from tests.server.running import run_server

CANARY = "canary-of-content"


def build_app_with_stream_route(settings: Settings) -> FastAPI:
    app = create_app(settings)

    @app.get("/things/{thing}")
    @public
    async def thing(thing: str) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            yield "data: 1\n\n"
            yield "data: 2\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def test_log_line_has_route_and_no_ids_or_content(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "perdure.requests")
    with (
        run_server(build_app_with_stream_route(settings)) as url,
        httpx.Client(base_url=url) as client,
    ):
        streamed = client.get(f"/things/{CANARY}?q={CANARY}", headers={"x-request-id": "abc.1"})
        assert streamed.text == "data: 1\n\ndata: 2\n\n"
        assert streamed.headers["x-request-id"] == "abc.1"
        generated_headers = client.get(
            f"/nonsense?q={CANARY}", headers={"x-request-id": "a b;"}
        ).headers
        client.get("/assets/style.css")
        client.request(CANARY.upper(), "/ok")
    log_fields = [record.fields for record in caplog.records if record.name == "perdure.requests"]  # type: ignore[attr-defined]
    assert CANARY not in caplog.text.lower()
    order = ("/things/{thing}", "-", "/assets", "/ok")  # a line may come after the next request's
    log_fields.sort(key=lambda each: order.index(each["route"]))
    assert [(each["method"], each["route"], each["status"]) for each in log_fields] == [
        ("GET", "/things/{thing}", 200),
        ("GET", "-", 404),
        ("GET", "/assets", 200),
        ("other", "/ok", 405),
    ]
    assert log_fields[0]["bytes"] == 18
    assert log_fields[0]["stream"]
    assert not log_fields[1]["stream"]
    assert log_fields[0]["request_id"] == "abc.1"
    assert log_fields[0]["ms"] > 0
    assert log_fields[1]["request_id"] == generated_headers["x-request-id"] != "a b;"


@pytest.mark.parametrize(
    ("sent_path", "expected_path"),
    [
        ("/nonsense?key=hunter2", "/nonsense"),
        ("/assets/none.css", "/assets/none.css"),
        ("/api/v1/%0aINFO%20forged%1b[2J/%C3%BC", "/api/v1/%0aINFO%20forged%1b%5B2J/%C3%BC"),
        ("/wp-admin/9f1c44aa-3a54-4d6c-8f0b-7d1f0c2e5a11", "/wp-admin/…"),
        ("/hooks/123456/x", "/hooks/…/x"),
        ("/" + "long/" * 1_000, "/" + "long/" * 39 + "long"),
        ("/" + "long/" * 37 + "k7" * 20, "/" + "long/" * 37 + "…"),
    ],
)
def test_log_line_of_404_shows_path_without_queries_and_ids(
    sent_path: str, expected_path: str, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """The path stays percent-encoded, so that no line can be forged."""
    caplog.set_level(logging.INFO, "perdure.requests")
    with run_server(create_app(settings)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = f"GET {sent_path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            client.sendall(head.encode())
            while client.recv(4096):
                pass
    (line,) = [record.message for record in caplog.records if record.name == "perdure.requests"]

    assert line.rpartition(" 404 ")[0] == f"GET {expected_path}"


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.slow
def test_serve_command_logs_startup_to_stderr(
    settings: Settings, tmp_path: Path, style: str
) -> None:
    command = "from perdure.cli import main; main()"
    options = ["--db", settings.db, "--port", "0", "--log", style, "--audit", str(tmp_path / "a")]
    with subprocess.Popen(
        [sys.executable, "-c", command, "serve", *options], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        first = [server.stderr.readline() for _ in range(4)]
        server.terminate()
        rest = server.stderr.read()
    assert [line.partition(":")[0] for line in first] == ["database", "user", "graphs", "http"]
    assert first[-1].startswith("http://127.0.0.1")
    assert "Traceback" not in rest


def test_json_formatter_writes_message_level_fields_and_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from perdure.server.http.logs import JSONLines

    record = logging.LogRecord("perdure.x", logging.WARNING, "", 1, "two\n%s", ("lines",), None)
    line = json.loads(JSONLines().format(record))
    assert line["message"] == "two\nlines"
    assert line["level"] == "WARNING"
    record.fields = {"status": 200}
    assert json.loads(JSONLines().format(record))["status"] == 200
    try:
        raise ValueError("wrong")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: wrong" in json.loads(JSONLines().format(record))["error"]


@pytest.mark.parametrize("style", ["text", "json"])
def test_logged_text_cannot_forge_another_log_line(
    style: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, stderr = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(sys, "stderr", stderr)
    log_to_stderr(style)
    forged = '2026-01-01 00:00:00,000 INFO perdure.audit: {"user":"root"}'
    ends = "".join(f"{end}{forged}" for end in ("\n", "\r", "\x0b", "\x85", "\u2028", "\u2029"))
    try:
        raise ValueError(f"x{ends}\x1b[2J\x9b2J\u202e\udc80")
    except ValueError:
        logging.getLogger("perdure.x").exception("it is %s", f"y{ends}\x1b[2J")
    logged = stderr.getvalue()

    assert not [line for line in logged.splitlines() if line.startswith(forged)]
    assert all(each.isprintable() for each in logged.split("\n"))
    assert [line for line in logged.splitlines() if not line.startswith(" ")] == [
        logged.splitlines()[0]
    ]


def test_audit_record_is_one_printable_line(tmp_path: Path) -> None:
    audit, path = Audit(tmp_path / "audit"), {"thread_id": "a\x85b\u2028c\u2029d\x9b2J"}
    asyncio.run(audit.record(None, "threads:delete", 200, "r", path))
    audit.close()
    [line] = (tmp_path / "audit").read_text().splitlines()

    assert json.loads(line)["about"] == [path]
    assert line.isprintable()

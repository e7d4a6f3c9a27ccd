"""The request log: one line for each request, without content and without ids.

What surrounds a request is here: its id, its line, its record in the audit log, its measurement.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.server.audit import Audit
from perdure.server.reply import encoded
from perdure.server.telemetry import Telemetry

Style = Literal["text", "json"]
_LOG: Final = logging.getLogger("perdure.requests")
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


@dataclass(slots=True)
class Seen:
    """What is known of a request once it was answered; the route is a template, not the path."""

    method: str
    request_id: str
    route: str = "-"  # of a path that no route has
    status: int = 500
    bytes: int = 0
    ms: float = 0.0
    stream: bool = False


class RequestLog:
    """The outermost middleware. It passes messages on as they come, so streams stay streams."""

    def __init__(self, app: ASGIApp, audit: Audit, telemetry: Telemetry | None) -> None:
        self._app, self._audit, self._telemetry = app, audit, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, begun, method = Headers(scope=scope), time.perf_counter(), scope["method"]
        given = headers.get("x-request-id", "")
        seen = Seen(
            method if method in _METHODS else "other",
            given if _ID.fullmatch(given) else uuid4().hex,
        )
        scope.setdefault("state", {})["request_id"] = seen.request_id
        answered = False

        async def told(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                reply = MutableHeaders(scope=message)
                reply["X-Request-ID"] = seen.request_id
                await self._audit.request(scope, seen.status)
                answered = True
                seen.stream = reply.get("content-type", "").startswith("text/event-stream")
                if self._telemetry and seen.stream:
                    self._telemetry.stream_opened()
            elif message["type"] == "http.response.body":
                seen.bytes += len(message.get("body", b""))
            await send(message)

        watched = self._telemetry.request(headers, seen) if self._telemetry else nullcontext()
        with watched:
            try:
                await self._app(scope, receive, told)
            finally:
                if not answered:
                    seen.status = 500
                    await self._audit.request(scope, seen.status)
                seen.route = getattr(scope.get("route"), "path", None) or scope["root_path"] or "-"
                seen.ms = round(1000 * (time.perf_counter() - begun), 3)
                if _LOG.isEnabledFor(logging.INFO):
                    line = f"{seen.method} {seen.route} {seen.status} {seen.ms:.0f} ms"
                    _LOG.info(line, extra={"fields": asdict(seen)})


class JSONLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields = {**fields, "error": self.formatException(record.exc_info)}
        at = datetime.fromtimestamp(record.created, UTC).isoformat()
        line = {"time": at, "level": record.levelname, "logger": record.name, **fields}
        return encoded(line).decode()


def log_to_stderr(style: Style = "text") -> None:
    """Send all logs of the process to stderr, those of perdure from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONLines() if style == "json" else text)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("perdure").setLevel(logging.INFO)

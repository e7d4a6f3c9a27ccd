"""What surrounds each request: its id, its line in the log, its record in the audit log.

The audit log says who changed or erased what, and whether it was allowed. A record is written for
every request and every tool whose action changes something, here and not by endpoints. What it is
about is what `Call.permit` was asked; an endpoint adds the hashes of a receipt by `Call.record`.
Neither log has content in it, and the request log no ids.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.errors import ConfigurationError
from perdure.server.access import Action
from perdure.server.call import IDS, Call
from perdure.server.reply import encoded
from perdure.server.telemetry import Telemetry

_LOG: Final = logging.getLogger("perdure.requests")
_AUDIT: Final = logging.getLogger("perdure.audit")
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_METHODS: Final = (*_SAFE, "POST", "PUT", "PATCH", "DELETE")
# a run is a turn, which the thread's own history records
_READS: Final = ("read", "search", "get", "list_namespaces", "create_run")


def is_change(action: Action | None, method: str = "POST") -> bool:
    """Whether an action is one that is recorded."""
    return action is not None and action.split(":")[-1] not in _READS and method not in _SAFE


class Audit:
    """Writes records to a file of JSON lines, or to the logger `perdure.audit`.

    A line is on the disk before the reply is sent, and an edit that cannot be recorded is answered
    with an error. Several processes may write to one file; lines are only ever added to it.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._file = None
        if path is not None:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.fsync(self._file)  # what is no file has no disk
            except OSError as exc:
                raise ConfigurationError(
                    f"the audit log {str(path)!r} cannot be written: {exc}; give a file"
                ) from exc

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def record(
        self,
        call: Call | None,
        action: Action | None,
        status: int,
        request_id: str | None,
        path: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a call for an action, of nobody if it is None; `path` has the ids of a path."""
        about = [each for each in call.recorded if each] if call else []
        if path and not any(path.items() <= each.items() for each in about):
            about = [dict(path), *about]
        record = {
            "at": datetime.now(UTC).isoformat(),
            "user": call and call.identity.user,
            "tenant": call and call.identity.tenant,
            "action": action,
            "outcome": "ok" if status < 400 else "denied" if status in (401, 403) else "failed",
            "status": status,
            "request_id": request_id,
            "about": about or None,
        }
        line = encoded({name: each for name, each in record.items() if each is not None})
        await asyncio.shield(asyncio.to_thread(self._write, line + b"\n"))

    def _write(self, line: bytes) -> None:
        if self._file is None:
            _AUDIT.info(line.decode().rstrip())
            return
        if os.write(self._file, line) < len(line):
            raise OSError("the audit log has a part of a record only: is the disk full?")
        os.fsync(self._file)


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
        self._app, self._audit = app, audit
        self._measured = telemetry.request if telemetry else lambda *_: nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, begun = Headers(scope=scope), time.perf_counter()
        method = scope["method"] if scope["method"] in _METHODS else "other"
        given = headers.get("x-request-id", "")
        seen = Seen(method, given if _ID.fullmatch(given) else uuid4().hex)
        scope.setdefault("state", {})["request_id"] = seen.request_id
        answered = False

        async def sending(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                reply = MutableHeaders(scope=message)
                reply["X-Request-ID"] = seen.request_id
                await self._record(scope, seen.status)
                answered = True
                seen.stream = reply.get("content-type", "").startswith("text/event-stream")
            elif message["type"] == "http.response.body":
                seen.bytes += len(message.get("body", b""))
            await send(message)

        with self._measured(headers, seen):
            try:
                await self._app(scope, receive, sending)
            finally:
                if not answered:
                    seen.status = 500
                    await self._record(scope, seen.status)
                seen.route = getattr(scope.get("route"), "path", None) or scope["root_path"] or "-"
                seen.ms = round(1000 * (time.perf_counter() - begun), 3)
                line = f"{seen.method} {seen.route} {seen.status} {seen.ms:.0f} ms"
                _LOG.info(line, extra={"fields": asdict(seen)})

    async def _record(self, scope: Scope, status: int) -> None:
        """Record a request if it changes something, or was to."""
        action = getattr(getattr(scope.get("route"), "endpoint", None), "action", None)
        if is_change(action, scope["method"]):
            state, given = scope["state"], scope.get("path_params", {})
            path = {name: given[name] for name in IDS if name in given}
            await self._audit.record(state.get("call"), action, status, state["request_id"], path)


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


def log_to_stderr(style: Literal["text", "json"] = "text") -> None:
    """Send all logs of the process to stderr, those of perdure from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONLines() if style == "json" else text)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("perdure").setLevel(logging.INFO)

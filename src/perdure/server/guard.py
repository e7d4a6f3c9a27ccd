"""What surrounds each request: whose site it comes from, how much it is, what is recorded of it.

The line of a request in the log has no content and no ids.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import quote, unquote, urlunsplit
from uuid import uuid4

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.errors import ConfigurationError, PerdureError
from perdure.server.access import Forbidden, Refused, Unauthenticated
from perdure.server.acting import identify
from perdure.server.call import AUDITED_NAMES
from perdure.server.logs import SAFE_METHODS, Audit, is_change
from perdure.server.pages import error_page
from perdure.server.reply import JSONReply, http_status, split_url, wants_json

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
"""The names of a server that only its own machine reaches."""
_LOG: Final = logging.getLogger("perdure.requests")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
METHODS: Final = (*SAFE_METHODS, "POST", "PUT", "PATCH", "DELETE")
"""What is allowed at all."""
EXPOSED_HEADERS: Final = (
    "Content-Location",
    "Location",
    "Retry-After",
    "X-Pagination-Next",
    "X-Request-ID",
)
"""Headers of replies that scripts of other sites may read."""
_ORIGIN: Final = re.compile(r"https?://[a-z0-9.:\[\]-]+")
_PAGES_PREFIX: Final = "/ui/"
_MAX_LOGGED_PATH: Final = 200  # characters of a path that no route has, in the log
_SECRET_PART: Final = re.compile(r"[0-9]{6}|.{25}")
_DEFAULT_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of replies that have no others."""


@dataclass(slots=True)
class RequestSummary:
    """What is known of a request once it was answered; the route is a template, not the path.

    Attributes:
        path: Of one that no route has, without what may be a key or an id.
    """

    method: str
    request_id: str
    route: str = "-"  # of a path that no route has
    status: int = 500
    bytes: int = 0
    ms: float = 0.0
    stream: bool = False
    path: str = ""


class Guard:
    """Refuses requests for another host's name, of other sites, of a form that claims to be JSON.

    It passes messages on as they come, so that streams stay streams. What it needs to know is in
    the state of the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        is_socket = scope["type"] == "websocket"
        scope = {**scope, "method": "GET"} if is_socket else scope
        state, headers, begun = scope["app"].state, Headers(scope=scope), time.perf_counter()
        method = scope["method"] if scope["method"] in METHODS else "other"
        given = headers.get("x-request-id", "")
        seen = RequestSummary(method, given if _REQUEST_ID.fullmatch(given) else uuid4().hex)
        is_head = scope["method"] == "HEAD"
        scope = {**scope, "method": "GET"} if is_head else scope
        scope.setdefault("state", {}).update(request_id=seen.request_id, head=is_head)
        answered = False

        async def sending(message: Message) -> None:
            nonlocal answered
            kind = message["type"].removeprefix("websocket.")
            if kind in ("http.response.start", "accept"):
                seen.status = message.get("status", 101)
                reply = MutableHeaders(scope=message)
                _add_headers(reply, seen.request_id)
                await _record_request(scope, seen.status)
                answered = True
                content = "" if is_socket else reply.get("content-type", "")
                seen.stream = seen.status == 101 or content.startswith("text/event-stream")
                if is_head:  # its end, also of a stream
                    await send(message)
                    message = {"type": "http.response.body"}
            elif is_head:
                return
            elif kind == "close" and not answered:  # the application refuses a websocket
                seen.status, answered = 403, True
            elif kind in ("http.response.body", "send"):
                seen.bytes += len(message.get("body") or message.get("text") or b"")
            await send(message)

        measured = state.telemetry.request(headers, seen) if state.telemetry else nullcontext()
        with measured:
            try:
                app = _check_request(scope, headers) or self._app
                body = _wrap_receive(scope, receive, state.limits.body_wait_s)
                await app(scope, receive if is_socket else body, sending)
            finally:
                try:
                    if not answered:
                        failure = Refused("the server failed; its log says why", 500)
                        await build_error_reply(_as_http_request(scope), failure)(
                            scope, receive, sending
                        )
                finally:
                    route = getattr(scope.get("route"), "path", None)
                    seen.route = route or scope["root_path"] or "-"
                    seen.path = _redact_path(scope) if route is None and seen.status == 404 else ""
                    seen.ms = round(1000 * (time.perf_counter() - begun), 3)
                    where = seen.path or seen.route
                    line = f"{seen.method} {where} {seen.status} {seen.ms:.0f} ms"
                    _LOG.info(line, extra={"fields": asdict(seen)})


def _add_headers(reply: MutableHeaders, request_id: str) -> None:
    """Add the id of the request, and the headers that the reply does not set itself."""
    reply["X-Request-ID"] = request_id
    for name, value in _DEFAULT_HEADERS.items():
        reply.setdefault(name, value)
    if "etag" not in reply:  # which assets have
        reply.setdefault("Cache-Control", "no-store")


def _redact_path(scope: Scope) -> str:
    """The path of a request as it was sent, without what may be a key or an id, and the query."""
    sent = quote(scope.get("raw_path") or b"", safe="/%:@!$&'()*+,;=~")
    parts = ("…" if _SECRET_PART.search(part) else part for part in sent.split("/"))
    return "/".join(parts)[
        :_MAX_LOGGED_PATH
    ]  # a key is left out before it can be cut to less than one


async def _record_request(scope: Scope, status: int) -> None:
    """Record a request in the audit log if it changes something, or was to."""
    action = getattr(getattr(scope.get("route"), "endpoint", None), "action", None)
    if is_change(action, scope["method"]):
        state, given = scope["state"], scope.get("path_params", {})
        path = {name: given[name].replace("\0", "/") for name in AUDITED_NAMES if name in given}
        audit: Audit = scope["app"].state.audit
        try:
            await audit.record(state.get("call"), action, status, state["request_id"], path)
        except OSError:
            if status < 500:
                raise  # the reply is an error then, for which it is tried again
            _LOG.exception("a change could not be recorded")


def _check_request(scope: Scope, headers: Headers) -> ASGIApp | None:
    """The reply to a request that is refused; None: it is not."""
    state = scope["app"].state
    try:
        _check_host(headers.get("host", ""), state.hosts)
        state.clients.take((scope.get("client") or ("",))[0])
        has_session = state.sessions.apply(scope)
        if has_session:
            scope["state"]["session"] = True
        if scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS:
            if has_session or headers.get("origin") not in state.origins:
                _check_site(headers, has_session)
            if _is_perdure_path(scope["path"], state):
                _check_content_type(scope["path"], headers)
    except Refused as exc:
        return build_refusal(scope, exc)
    return None


def build_refusal(scope: Scope, error: PerdureError) -> Response:
    """Return the reply that refuses a request or a websocket."""
    return build_error_reply(_as_http_request(scope), error)


def _as_http_request(scope: Scope) -> Request:
    """A request, also one for a websocket."""
    return Request({**scope, "type": "http"})


def _check_host(host: str, hosts: Collection[str] | None) -> None:
    """Refuse another name: a site whose name leads here is of the same origin (DNS rebinding)."""
    if hosts is not None and split_url(f"//{host}").hostname not in hosts:
        raise Refused(f"{host!r} is not served here; --allowed-host names what is", 421)


def _wrap_receive(scope: Scope, receive: Receive, wait_s: float) -> Receive:
    """The body as it comes in, of whoever is known, or not at all."""
    begun = whole = False

    async def receiving() -> Message:
        nonlocal begun, whole
        if whole:
            return await receive()
        if not begun:
            begun = True
            await _identify_sender(scope)
        try:
            async with asyncio.timeout(wait_s):
                message = await receive()
        except TimeoutError as exc:
            raise HTTPException(408, "the body did not arrive in time") from exc
        whole = not message.get("more_body", False)
        return message

    return receiving


async def _identify_sender(scope: Scope) -> None:
    """Tell who sends a body before it is read: strangers can make the server hold none."""
    access = scope["app"].state.access
    action = getattr(getattr(scope.get("route"), "endpoint", None), "action", None)
    if action is None or getattr(access, "reads_body", False):
        return
    try:
        scope.setdefault("state", {})["identity"] = await identify(HTTPConnection(scope))
    except Refused as exc:
        raise HTTPException(exc.status, str(exc), exc.headers) from exc


def _check_site(headers: Headers, has_session: bool) -> None:
    """Refuse what a page of another site makes a browser send.

    Source: CrossOriginProtection of Go's net/http; the OWASP cheat sheet on cross-site request
    forgery, "Fetch Metadata headers". A request without both headers is of no browser; with a
    cookie it is refused, for that a browser has.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        same = site in ("same-origin", "none")
    elif origin is not None:
        same = split_url(origin).netloc == headers.get("host", "") != ""
    else:
        same = not has_session
    if not same:
        raise Forbidden("the request comes from a page of another site")


def validate_origins(origins: Collection[str]) -> list[str]:
    """Origins, in the form that browsers send.

    Raises:
        ConfigurationError: One is none. `*` is not: any site that a user visits could read and
            change all that this server lets the user's browser reach.
    """
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigurationError(
                f"the origin is {origin!r}; expected that of one site, as its pages have it in "
                "location.origin: http://localhost:3000"
            )
    return [*origins]


def _is_perdure_path(path: str, state: Any) -> bool:
    """Return whether a path may be perdure's own, and not only of the custom application."""
    return state.first_segments is None or path.lstrip("/").split("/")[0] in state.first_segments


def _check_content_type(path: str, headers: Headers) -> None:
    """Refuse a body that a form of another site can send, where JSON is expected."""
    length = headers.get("content-length", "0")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    empty = length == "0" and "transfer-encoding" not in headers
    if not empty and not path.startswith(_PAGES_PREFIX) and kind != "application/json":
        raise Refused(f"the content type is {kind!r}; expected application/json", 415)


# -- replies to requests that failed


def build_error_reply(request: Request, error: PerdureError) -> Response:
    """The reply to a request that failed; to a browser without a session, the page to log in."""
    headers = error.headers if isinstance(error, Refused) else {}
    if isinstance(error, Unauthenticated) and request.url.path.startswith("/ui/"):
        part = "hx-request" in request.headers  # of the page that is shown
        here = split_url(request.headers.get("hx-current-url", "") if part else str(request.url))
        back = urlunsplit(("", "", here.path, here.query, "")) if request.method == "GET" else ""
        login = f"/ui/login?next={quote(back, safe='')}"
        if part:
            return Response(status_code=401, headers={"HX-Redirect": login})
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(login, 303)
    return _build_error_content(request, http_status(error), str(error), headers)


def add_error_replies(app: FastAPI) -> None:
    """Reply to an error of perdure with its status and its sentence."""

    @app.exception_handler(PerdureError)
    async def _(request: Request, error: Exception) -> Response:
        assert isinstance(error, PerdureError)
        return build_error_reply(request, error)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _build_error_content(request, error.status_code, error.detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _build_error_content(
            request, 422, "; ".join(map(_describe_invalid_field, error.errors()))
        )


def _build_error_content(
    request: Request, status: int, sentence: str, headers: Mapping[str, str] | None = None
) -> Response:
    if request.url.path.startswith("/ui/") and not wants_json(request):
        return error_page(request, status, sentence, headers)
    return JSONReply({"detail": sentence}, status, dict(headers or {}))


def _describe_invalid_field(error: Mapping[str, Any]) -> str:
    """What of a request is wrong: where, the value, and what was expected."""
    if error["type"] == "json_invalid":
        return f"the body is no JSON: {error['ctx']['error']}"
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":  # its input is what it is missing in
        return f"{where} is missing"
    if error["type"] == "value_error":  # a sentence of ours, which names the value
        sentence = str(error["ctx"]["error"])
        return sentence if where == "body" else f"{where}: {sentence}"
    return f"{where} is {error.get('input')!r:.80}: {error['msg']}"


# -- ids in paths


class EncodedSlashes:
    """Hands encoded slashes on as NUL, which no id has; `call.Id` turns them back.

    Servers decode `%2F` before routes are matched (the ASGI specification, on `path`).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        raw = scope.get("raw_path") or b""
        if b"%2f" in raw.lower() or b"%00" in raw:
            parts = (
                unquote(part).replace("\0", "\ufffd") for part in raw.decode("latin-1").split("/")
            )
            scope["path"] = "/".join(part.replace("/", "\0") for part in parts)  # for Guard too
        await self._app(scope, receive, send)

"""Check requests, enforce limits, and write the request log and the audit log.

The request log contains neither the content of requests nor the ids in their paths.
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
from perdure.server.http.access import Forbidden, Identity, Refused, Unauthenticated
from perdure.server.http.acting_for import identify_caller
from perdure.server.http.call import AUDITED_NAMES
from perdure.server.http.headers import add_default_headers
from perdure.server.http.health import HEALTH_PATH
from perdure.server.http.logs import SAFE_METHODS, Audit, is_audited_change, is_refused_while_acting
from perdure.server.http.reply import JSONReply, http_status, split_url, wants_json
from perdure.server.pages.rendering import render_error_page

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
"""The host names and addresses of a server that can be reached only from its own machine."""
_LOG: Final = logging.getLogger("perdure.requests")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
METHODS: Final = (*SAFE_METHODS, "POST", "PUT", "PATCH", "DELETE")
"""The HTTP methods that are allowed."""
_ORIGIN: Final = re.compile(r"https?://[a-z0-9.:\[\]-]+")
_PAGES_PREFIX: Final = "/ui/"
# Maximum length of a logged path, in characters. Only paths that match no route are logged.
_MAX_LOGGED_PATH: Final = 200
# Matches a URL path segment that may be an API key or an id.
_SECRET_PART: Final = re.compile(r"[0-9]{6}|.{25}")


@dataclass(slots=True)
class RequestSummary:
    """The fields of the log record that is written for each request.

    Attributes:
        method: The HTTP method, or `other`.
        request_id: The id of the request, from the client or new.
        route: The template of the route, the prefix of a mounted application, or `-` if no route
            has the path.
        status: The HTTP status of the reply.
        bytes: The size of the reply's body.
        ms: The duration in milliseconds.
        stream: Whether the reply is a stream or a websocket.
        path: The path, if no route has it and the status is 404; otherwise empty. Segments that may
            be a key or an id are replaced by `…`.
    """

    method: str
    request_id: str
    route: str = "-"
    status: int = 500
    bytes: int = 0
    ms: float = 0.0
    stream: bool = False
    path: str = ""


class Guard:
    """ASGI middleware that checks requests and enforces limits before the application is called.

    The guard rejects requests for unknown host names, cross-site requests, and HTML forms that
    imitate JSON requests. The guard forwards each part of a response immediately, so that event
    streams are not delayed. A `Guard` object reads its settings from the `state` of the FastAPI
    application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the application or reject it, and log the request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        is_socket = scope["type"] == "websocket"
        scope = {**scope, "method": "GET"} if is_socket else scope
        state, headers, started_at = scope["app"].state, Headers(scope=scope), time.perf_counter()
        method = scope["method"] if scope["method"] in METHODS else "other"
        client_id = headers.get("x-request-id", "")
        summary = RequestSummary(
            method, client_id if _REQUEST_ID.fullmatch(client_id) else uuid4().hex
        )
        is_head = scope["method"] == "HEAD"
        scope = {**scope, "method": "GET"} if is_head else scope
        scope.setdefault("state", {}).update(request_id=summary.request_id, head=is_head)
        answered = False

        async def send_reply(message: Message) -> None:
            """Forward a response message, and record the response's status and size for the log."""
            nonlocal answered
            kind = message["type"].removeprefix("websocket.")
            if kind in ("http.response.start", "accept"):
                summary.status = message.get("status", 101)
                reply = MutableHeaders(scope=message)
                add_default_headers(reply, summary.request_id)
                await _record_request_in_audit_log_if_change(scope, summary.status)
                answered = True
                content = "" if is_socket else reply.get("content-type", "")
                summary.stream = summary.status == 101 or content.startswith("text/event-stream")
                if is_head:
                    # End the response to a HEAD request after its headers, even if a GET request
                    # would return a stream.
                    await send(message)
                    message = {"type": "http.response.body"}
            elif is_head:
                return
            # If the application closes a websocket without accepting it, status 403 is logged.
            elif kind == "close" and not answered:
                summary.status, answered = 403, True
            elif kind in ("http.response.body", "send"):
                summary.bytes += len(message.get("body") or message.get("text") or b"")
            await send(message)

        measurement = (
            state.telemetry.measure_request(headers, summary) if state.telemetry else nullcontext()
        )
        with measurement:
            try:
                app = _build_refusal_response_or_none(scope, headers) or self._app
                body = _wrap_receive_with_identification_and_timeout(
                    scope, receive, state.limits.body_wait_s
                )
                await app(scope, receive if is_socket else body, send_reply)
            finally:
                try:
                    if not answered:
                        failure = Refused("the server failed; see its log for the error", 500)
                        await build_refusal(scope, failure)(scope, receive, send_reply)
                finally:
                    route = getattr(scope.get("route"), "path", None)
                    summary.route = route or scope["root_path"] or "-"
                    summary.path = (
                        _redact_request_path(scope)
                        if route is None and summary.status == 404
                        else ""
                    )
                    summary.ms = round(1000 * (time.perf_counter() - started_at), 3)
                    path = summary.path or summary.route
                    line = f"{summary.method} {path} {summary.status} {summary.ms:.0f} ms"
                    _LOG.info(line, extra={"fields": asdict(summary)})


def _redact_request_path(scope: Scope) -> str:
    """Return the path of a request in a form that is safe to log.

    The query is removed. Path segments that may be API keys or ids are replaced by `…`.
    """
    path = quote(scope.get("raw_path") or b"", safe="/%:@!$&'()*+,;=~")
    parts = ("…" if _SECRET_PART.search(part) else part for part in path.split("/"))
    # API keys are replaced before the path is truncated, because a truncated API key might not be
    # recognised and would then be logged.
    return "/".join(parts)[:_MAX_LOGGED_PATH]


async def _record_request_in_audit_log_if_change(scope: Scope, http_status: int) -> None:
    """Record a request in the audit log if its action must be audited.

    Refused requests are recorded, too. If a request on behalf of another person is refused with
    status 403, the request is always recorded. This rule also applies to actions that are otherwise
    not recorded, and to callers who may not act for others.
    """
    action = getattr(getattr(scope.get("route"), "endpoint", None), "action", None)
    state, path_params = scope["state"], scope.get("path_params", {})
    call, refused_identity = state.get("call"), state.get("refused_identity")
    identity: Identity | None = call.audited_identity if call else refused_identity
    if is_audited_change(action, scope["method"]) or is_refused_while_acting(identity, http_status):
        path = {
            name: path_params[name].replace("\0", "/")
            for name in AUDITED_NAMES
            if name in path_params
        }
        audit: Audit = scope["app"].state.audit
        try:
            await audit.record(
                *(call, action, http_status, state["request_id"], path), identity=identity
            )
        except OSError:
            # Re-raise the exception, so that the client receives a 500 error instead of the
            # application's reply. This function is called again for the 500 reply, and then only
            # logs the exception.
            if http_status < 500:
                raise
            _LOG.exception("a change could not be recorded in the audit log")


def _build_refusal_response_or_none(scope: Scope, headers: Headers) -> ASGIApp | None:
    """Return the response that rejects a request, or None if the request is accepted.

    Count the request towards the rate limit of the client's network address. If the request belongs
    to a browser session and has no credentials, add the session's credentials to it.
    """
    state = scope["app"].state
    try:
        # A container platform sends health checks to the address of the container. The reply to a
        # health check reveals nothing, so the host name need not be checked.
        if scope["path"] != HEALTH_PATH or scope["method"] not in SAFE_METHODS:
            _refuse_unknown_host(headers.get("host", ""), state.hosts)
        state.clients.count_request((scope.get("client") or ("",))[0])
        has_session = state.sessions.try_to_add_session_credentials(scope)
        if has_session:
            scope["state"]["session"] = True
        if scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS:
            if has_session or headers.get("origin") not in state.origins:
                _refuse_cross_site_request(headers, has_session)
            if _is_perdure_path(scope["path"], state):
                _refuse_body_that_is_not_json(scope["path"], headers)
    except Refused as exc:
        return build_refusal(scope, exc)
    return None


def build_refusal(scope: Scope, error: PerdureError) -> Response:
    """Build the error response to an HTTP request or websocket connection that is rejected."""
    return build_error_reply(_as_http_request(scope), error)


def _as_http_request(scope: Scope) -> Request:
    """Return a request object for an HTTP or websocket scope."""
    return Request({**scope, "type": "http"})


def _refuse_unknown_host(host: str, allowed_hosts: Collection[str] | None) -> None:
    """Refuse a request whose Host header contains a host name that is not allowed.

    Checking the host name prevents DNS rebinding. In DNS rebinding, the host name of an attacker's
    site resolves to this server's address, so that browsers treat this server as part of the
    attacker's site.
    """
    if allowed_hosts is not None and split_url(f"//{host}").hostname not in allowed_hosts:
        raise Refused(
            f"this server does not accept requests for the host {host!r}; to allow this host, "
            "start the server with --allowed-host",
            421,
        )


def _wrap_receive_with_identification_and_timeout(
    scope: Scope, receive: Receive, timeout_s: float
) -> Receive:
    """Wrap `receive` so that the user is identified before the request body is read.

    If the client sends no further part of the request body for `timeout_s` seconds, the request
    fails with status 408.
    """
    has_started = is_complete = False

    async def receive_body() -> Message:
        """Receive a message of the body. Identify the user before reading the first message."""
        nonlocal has_started, is_complete
        if is_complete:
            return await receive()
        if not has_started:
            has_started = True
            await _store_identity_in_scope(scope)
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError as exc:
            raise HTTPException(
                408, f"the request body did not arrive within {timeout_s} s; send the request again"
            ) from exc
        is_complete = not message.get("more_body", False)
        return message

    return receive_body


async def _store_identity_in_scope(scope: Scope) -> None:
    """Identify the user before the request body is read into memory.

    Identifying the user first prevents clients without valid credentials from exhausting memory
    with large request bodies. An authentication handler that reads the request body itself can run
    only after the body has been received. If the authentication handler reads the request body, the
    user is identified in `open_call` instead.
    """
    access = scope["app"].state.access
    action = getattr(getattr(scope.get("route"), "endpoint", None), "action", None)
    if action is None or getattr(access, "reads_body", False):
        return
    try:
        scope.setdefault("state", {})["identity"] = await identify_caller(HTTPConnection(scope))
    except Refused as exc:
        raise HTTPException(exc.status, str(exc), exc.headers) from exc


def _refuse_cross_site_request(headers: Headers, has_session: bool) -> None:
    """Refuse cross-site request forgery.

    A request is refused if the browser sent it on behalf of a page from another site. A request
    that has neither a Sec-Fetch-Site nor an Origin header is refused if it has a session cookie,
    because it is assumed to come from a browser. If Sec-Fetch-Site, Origin and session cookie are
    all missing, the request is accepted as a non-browser request.

    These rules follow `http.CrossOriginProtection` in Go's standard library, and the section "Fetch
    Metadata headers" of the OWASP cheat sheet on cross-site request forgery.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        is_same_site = site in ("same-origin", "none")
    elif origin is not None:
        is_same_site = split_url(origin).netloc == headers.get("host", "") != ""
    else:
        is_same_site = not has_session
    if not is_same_site:
        raise Forbidden(
            "cross-origin requests are not allowed; send the request from a page of this server"
        )


def validate_origins(origins: Collection[str]) -> list[str]:
    """Check that each allowed CORS origin is written the way browsers send it.

    Raises:
        ConfigurationError: An origin is invalid. `*` is not allowed, because any site that a user
            visits could then read and change everything that the user's browser can reach on this
            server.
    """
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigurationError(
                f"the origin is {origin!r}; expected a single origin in the form that "
                "location.origin returns, such as http://localhost:3000"
            )
    return [*origins]


def _is_perdure_path(path: str, state: Any) -> bool:
    """Return whether a path might belong to perdure rather than to the custom application."""
    return state.first_segments is None or path.lstrip("/").split("/")[0] in state.first_segments


def _refuse_body_that_is_not_json(path: str, headers: Headers) -> None:
    """Refuse an API request that has a body with a content type other than JSON.

    An HTML form on another site can send other content types, but not `application/json`. Requests
    to the HTML pages under `/ui/` may have any content type.
    """
    length = headers.get("content-length", "0")
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_empty = length == "0" and "transfer-encoding" not in headers
    if not is_empty and not path.startswith(_PAGES_PREFIX) and content_type != "application/json":
        raise Refused(f"the content type is {content_type!r}; expected application/json", 415)


# -- replies to requests that failed


def build_error_reply(request: Request, error: PerdureError) -> Response:
    """Build the response to a request that failed.

    A browser without a session that requests a page under `/ui/` is redirected to the login page.
    """
    headers = error.headers if isinstance(error, Refused) else {}
    if isinstance(error, Unauthenticated) and request.url.path.startswith("/ui/"):
        # htmx follows redirects, and would insert the login page into a part of the current page.
        # The response to an htmx request therefore has the header `HX-Redirect`, which makes htmx
        # load the login page as a whole page.
        is_partial = "hx-request" in request.headers
        page_url = split_url(
            request.headers.get("hx-current-url", "") if is_partial else str(request.url)
        )
        return_path = (
            urlunsplit(("", "", page_url.path, page_url.query, ""))
            if request.method == "GET"
            else ""
        )
        login = f"/ui/login?next={quote(return_path, safe='')}"
        if is_partial:
            return Response(status_code=401, headers={"HX-Redirect": login})
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(login, 303)
    return _build_error_content(request, http_status(error), str(error), headers)


def register_error_handlers(app: FastAPI) -> None:
    """Register exception handlers that reply with an HTTP status and an error message."""

    @app.exception_handler(PerdureError)
    async def reply_to_perdure_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, PerdureError)
        return build_error_reply(request, error)

    @app.exception_handler(HTTPException)
    async def reply_to_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _build_error_content(request, error.status_code, error.detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def reply_to_invalid_request(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _build_error_content(
            request, 422, "; ".join(map(_describe_invalid_field, error.errors()))
        )


def _build_error_content(
    request: Request, status: int, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as an HTML page if a web page was requested, and as JSON otherwise."""
    if request.url.path.startswith("/ui/") and not wants_json(request):
        return render_error_page(request, status, message, headers)
    return JSONReply({"detail": message}, status, dict(headers or {}))


def _describe_invalid_field(error: Mapping[str, Any]) -> str:
    """Describe an invalid field in an error message: its name, its value and what was expected."""
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error['ctx']['error']}"
    location = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        # For a `missing` error, `input` is the entire object that lacks the field, so the message
        # does not quote it.
        return f"{location} is missing"
    if error["type"] == "value_error":
        # Errors of the type `value_error` come from perdure's own validators, whose messages
        # already name the invalid value.
        message = str(error["ctx"]["error"])
        return message if location == "body" else f"{location}: {message}"
    return f"{location} is {error.get('input')!r:.80}: {error['msg']}"


# -- ids in paths


class EncodedSlashes:
    """Replaces encoded slashes in a request path with NUL characters, which never occur in ids.

    `call.PathId` converts the NUL characters in an id back to slashes. If encoded slashes were not
    replaced, the router would split an id at its slashes, because servers decode `%2F` to a slash
    before routing (see `path` in the ASGI specification).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replace encoded slashes in the path with NUL characters, and forward the request."""
        raw = scope.get("raw_path") or b""
        if b"%2f" in raw.lower() or b"%00" in raw:
            parts = (
                unquote(part).replace("\0", "\ufffd") for part in raw.decode("latin-1").split("/")
            )
            # Replace the path in `scope`, so that the router and `Guard` see NUL characters instead
            # of encoded slashes.
            scope["path"] = "/".join(part.replace("/", "\0") for part in parts)
        await self._app(scope, receive, send)

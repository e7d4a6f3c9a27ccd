"""What each request passes before it reaches a route: whose site it comes from, how much it is."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.server.access import Forbidden, Refused
from perdure.server.limits import Clients, Limits
from perdure.server.reply import refusal
from perdure.server.sessions import Sessions

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
"""The names of a server that only its own machine reaches."""
_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_PAGES: Final = "/ui/"
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of replies that have no others."""


class Guard:
    """Refuses requests for another host's name, of other sites, of a form that claims to be JSON.

    Args:
        app: What is guarded.
        hosts: The names of this server; None: it may be called by any.
        sessions: Of browsers.
        limits: How much a client may ask for.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None, sessions: Sessions, limits: Limits
    ) -> None:
        self._app, self._sessions, self._limits = app, sessions, limits
        self._hosts = None if hosts is None else {each.lower() for each in hosts}
        self._clients = Clients(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope)
        except Refused as exc:
            await refusal(Request(scope), exc)(scope, receive, sending)
        else:
            await self._app(scope, _received(scope, receive, self._limits.body_wait_s), sending)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        self._clients.take((scope.get("client") or ("",))[0])
        has_session = self._sessions.apply(scope)
        if has_session:
            scope.setdefault("state", {})["session"] = True
        if scope["method"] not in _SAFE:
            _check_site(headers, has_session)
            _check_kind(scope["path"], headers)

    def _check_host(self, host: str) -> None:
        """Else a site whose name leads here would be of the same origin (DNS rebinding)."""
        if self._hosts is not None and _split(f"//{host}").hostname not in self._hosts:
            raise Refused(f"{host!r} is not served here; --allowed-host names what is", 421)


def _received(scope: Scope, receive: Receive, wait_s: float) -> Receive:
    """The body as it comes in, of whoever is known, or not at all."""
    begun = whole = False

    async def receiving() -> Message:
        nonlocal begun, whole
        if whole:
            return await receive()
        if not begun:
            begun = True
            await _identify(scope)
        try:
            async with asyncio.timeout(wait_s):
                message = await receive()
        except TimeoutError as exc:
            raise HTTPException(408, "the body did not arrive in time") from exc
        whole = not message.get("more_body", False)
        return message

    return receiving


async def _identify(scope: Scope) -> None:
    """Tell who sends a body before it is read: strangers can make the server hold none."""
    access = scope["app"].state.access
    action = getattr(getattr(scope.get("route"), "endpoint", None), "action", None)
    if action is None or getattr(access, "reads_body", False):
        return
    try:
        scope.setdefault("state", {})["identity"] = await access.identify(HTTPConnection(scope))
    except Refused as exc:
        raise HTTPException(exc.status, str(exc), exc.headers) from exc


def _split(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:  # brackets that are no address
        return urlsplit("")


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
        same = _split(origin).netloc == headers.get("host", "") != ""
    else:
        same = not has_session
    if not same:
        raise Forbidden("the request comes from a page of another site")


def _check_kind(path: str, headers: Headers) -> None:
    """Refuse a body that a form of another site can send, where JSON is expected."""
    length = headers.get("content-length", "0")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    empty = length == "0" and "transfer-encoding" not in headers
    if not empty and not path.startswith(_PAGES) and kind != "application/json":
        raise Refused(f"the content type is {kind!r}; expected application/json", 415)

"""Sessions of browsers: a cookie names the key or token with which its user logged in."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from time import monotonic
from typing import Annotated, Any, Final

from fastapi import APIRouter, Form
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from perdure.server.access import Local, Unauthenticated, public
from perdure.server.limits import Clients, Limits
from perdure.server.pages import page

routes = APIRouter(include_in_schema=False)
_COOKIE: Final = "perdure_session"
_LASTS_S: Final = 12 * 3600
_MOST: Final = 10_000
_FIRST: Final = "/ui/threads"
_LONGEST: Final = 16_000  # characters of a token


class Sessions:
    """The sessions of a server, in memory: of this process, or of one that several ask.

    Only the key or token is kept: each request is identified by it anew, so that a key that was
    revoked ends its sessions.
    """

    def __init__(self, keys: MutableMapping[str, tuple[str, float]] | None = None) -> None:
        self._keys = {} if keys is None else keys
        self.logins = Clients(Limits(per_s=1 / 10, burst=5))

    def begin(self, key: str) -> str:
        """Begin a session; returns its id."""
        now = monotonic()
        known = [*self._keys.items()]
        live = [each for each, (_, until) in known if until > now]
        for each in {each for each, _ in known} - {*live[1 - _MOST :]}:
            self._keys.pop(each, None)
        made = secrets.token_urlsafe(32)
        self._keys[made] = key, now + _LASTS_S
        return made

    def end(self, connection: HTTPConnection) -> None:
        """End the session of a request."""
        self._keys.pop(connection.cookies.get(_COOKIE, ""), None)

    def apply(self, scope: Any) -> bool:
        """Add the key of its session to a request that has no key; returns whether it was added."""
        connection = HTTPConnection(scope)
        if "authorization" in connection.headers or "x-api-key" in connection.headers:
            return False
        made = connection.cookies.get(_COOKIE)
        if made is None:  # another process may have to be asked
            return False
        key, until = self._keys.get(made, ("", 0.0))
        if until <= monotonic():
            return False
        scope["headers"] = [*scope["headers"], *_headers(key)]
        return True


@routes.get("/ui/login")
@public
async def login_page(request: Request, next: str = _FIRST) -> Response:
    """The page to log in."""
    return _page(request, next)


@routes.post("/ui/login")
@public
async def login(
    request: Request, key: Annotated[str, Form()] = "", next: Annotated[str, Form()] = _FIRST
) -> Response:
    """Begin a session, if the key or token is one of a user."""
    sessions, key = request.app.state.sessions, key.strip()
    sessions.logins.take(request.client and request.client.host)
    sent_by = (b"authorization", b"x-api-key", b"cookie")
    kept = [each for each in request.scope["headers"] if each[0] not in sent_by]
    try:
        if not (key and key.isascii() and key.isprintable() and len(key) <= _LONGEST):
            raise Unauthenticated("that is no key")
        asked = HTTPConnection({**request.scope, "headers": [*kept, *_headers(key)]})
        await request.app.state.access.identify(asked)
    except Unauthenticated as exc:
        shown = _page(request, next, str(exc))
        shown.status_code = 401
        return shown
    sessions.end(request)
    reply = RedirectResponse(_inside(next), 303)
    reply.set_cookie(
        _COOKIE,
        sessions.begin(key),
        max_age=_LASTS_S,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return reply


@routes.post("/ui/logout")
@public
async def logout(request: Request) -> Response:
    """End the session."""
    request.app.state.sessions.end(request)
    reply = RedirectResponse("/ui/login", 303)
    reply.delete_cookie(_COOKIE)
    return reply


def _page(request: Request, next: str, wrong: str = "") -> Response:
    if isinstance(request.app.state.access, Local):
        return RedirectResponse(_FIRST, 303)
    return page(request, "login.html", next=_inside(next), wrong=wrong)


def _inside(address: str) -> str:
    """An address if it is one of this server's pages, else the first page."""
    return address if address.startswith("/ui/") and address.isprintable() else _FIRST


def _headers(key: str) -> list[tuple[bytes, bytes]]:
    """A key or token in both headers that a client may send: handlers read one of them."""
    authorization = key if " " in key else f"Bearer {key}"
    return [(b"authorization", authorization.encode()), (b"x-api-key", key.encode())]

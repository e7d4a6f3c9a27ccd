"""Log users in to the server's HTML pages, using browser sessions.

After the login, a session cookie replaces the API key or token.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from time import monotonic
from typing import Annotated, Any, Final

from fastapi import APIRouter, Form
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from perdure.server.http.access import LocalAccess, Unauthenticated, public
from perdure.server.http.limits import Limits, RequestLimiter
from perdure.server.http.reply import JSONReply
from perdure.server.pages.rendering import render_page

routes = APIRouter(include_in_schema=False, default_response_class=JSONReply)
_COOKIE: Final = "perdure_session"
_SESSION_S: Final = 12 * 3600  # Seconds after which a session ends
# Maximum number of sessions. When it is exceeded, the oldest sessions are ended.
_MAX_SESSIONS: Final = 10_000
_FIRST_PAGE: Final = "/ui/threads"
_MAX_KEY_CHARS: Final = 16_000  # Maximum number of characters in a key or token


class Sessions:
    """The browser sessions of a server.

    A session stores only the user's API key or token, and the time at which the session expires.
    Each request in a session is authenticated again with the stored key or token, so a session ends
    when its key is revoked.

    Args:
        keys: The mapping from session ids to the key and the expiry time of each session. It may be
            shared by several processes. None means a mapping in the memory of this process.

    Attributes:
        login_limiter: Limits the attempts to log in from an address.
    """

    def __init__(self, keys: MutableMapping[str, tuple[str, float]] | None = None) -> None:
        self._keys_by_session_id = {} if keys is None else keys
        self.login_limiter = RequestLimiter(Limits(requests_per_s=1 / 10, burst=5))

    def start_session(self, key_or_token: str) -> str:
        """Start a session with a key or token, and return the session's id."""
        now = monotonic()
        sessions = [*self._keys_by_session_id.items()]
        live_ids = [id for id, (_, expires_at) in sessions if expires_at > now]
        # Keep only the newest `_MAX_SESSIONS - 1` live sessions, to make room for the new session.
        retained_ids = {*live_ids[1 - _MAX_SESSIONS :]}
        for ended_id in {id for id, _ in sessions} - retained_ids:
            self._keys_by_session_id.pop(ended_id, None)
        session_id = secrets.token_urlsafe(32)
        self._keys_by_session_id[session_id] = key_or_token, now + _SESSION_S
        return session_id

    def end_session(self, connection: HTTPConnection) -> None:
        """End the session of a request."""
        self._keys_by_session_id.pop(connection.cookies.get(_COOKIE, ""), None)

    def try_to_add_session_credentials(self, scope: Any) -> bool:
        """Add the session's key or token to the headers of a request that has no credentials.

        Return whether a key was added.
        """
        connection = HTTPConnection(scope)
        if "authorization" in connection.headers or "x-api-key" in connection.headers:
            return False
        session_id = connection.cookies.get(_COOKIE)
        if session_id is None:
            # A request without a cookie has no session, so skip the lookup, which may have to call
            # another process.
            return False
        key, expires_at = self._keys_by_session_id.get(session_id, ("", 0.0))
        if expires_at <= monotonic():
            return False
        scope["headers"] = [*scope["headers"], *_build_credential_headers(key)]
        return True


@routes.get("/ui/login")
@public
async def show_login_page(request: Request, next: str = _FIRST_PAGE) -> Response:
    """Show the login page."""
    return _render_login_page(request, next)


@routes.post("/ui/login")
@public
async def log_in(
    request: Request, key: Annotated[str, Form()] = "", next: Annotated[str, Form()] = _FIRST_PAGE
) -> Response:
    """Start a session if the key or token belongs to a user. If not, show the login page again."""
    sessions, key = request.app.state.sessions, key.strip()
    sessions.login_limiter.count_request(request.client and request.client.host)
    credential_headers = (b"authorization", b"x-api-key", b"cookie")
    other_headers = [
        header for header in request.scope["headers"] if header[0] not in credential_headers
    ]
    try:
        if not (key and key.isascii() and key.isprintable() and len(key) <= _MAX_KEY_CHARS):
            raise Unauthenticated(
                "the API key is empty, too long, or has invalid characters; enter a valid API key"
            )
        login_request = HTTPConnection(
            {**request.scope, "headers": [*other_headers, *_build_credential_headers(key)]}
        )
        await request.app.state.access.identify(login_request)
    except Unauthenticated as exc:
        login_page_reply = _render_login_page(request, next, str(exc))
        login_page_reply.status_code = 401
        return login_page_reply
    sessions.end_session(request)
    reply = RedirectResponse(_restrict_to_pages(next), 303)
    reply.set_cookie(
        _COOKIE,
        sessions.start_session(key),
        max_age=_SESSION_S,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return reply


@routes.post("/ui/logout")
@public
async def log_out(request: Request) -> Response:
    """End the session and redirect to the login page."""
    request.app.state.sessions.end_session(request)
    reply = RedirectResponse("/ui/login", 303)
    reply.delete_cookie(_COOKIE)
    return reply


def _render_login_page(request: Request, next: str, error: str = "") -> Response:
    """Return the login page, or a redirect to the start page if no login is needed."""
    if isinstance(request.app.state.access, LocalAccess):
        return RedirectResponse(_FIRST_PAGE, 303)
    return render_page(request, "login.html", next=_restrict_to_pages(next), error=error)


def _restrict_to_pages(path: str) -> str:
    """Return `path` if it is the path of an HTML page, otherwise the path of the start page."""
    return path if path.startswith("/ui/") and path.isprintable() else _FIRST_PAGE


def _build_credential_headers(key_or_token: str) -> list[tuple[bytes, bytes]]:
    """Return both HTTP headers that can carry an API key or token, set to `key_or_token`.

    An authentication handler may read either `Authorization` or `X-API-Key`, so both headers are
    needed.
    """
    authorization = key_or_token if " " in key_or_token else f"Bearer {key_or_token}"
    return [(b"authorization", authorization.encode()), (b"x-api-key", key_or_token.encode())]

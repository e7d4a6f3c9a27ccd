"""Replies to requests that failed: an error as its status and its sentence, a page to a browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlunsplit

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.errors import PerdureError
from perdure.server.access import Refused, Unauthenticated
from perdure.server.pages import error_page
from perdure.server.reply import JSON, split, status_of, wants_json


def refusal(request: Request, error: PerdureError) -> Response:
    """The reply to a request that failed; to a browser without a session, the page to log in."""
    headers = error.headers if isinstance(error, Refused) else {}
    if isinstance(error, Unauthenticated) and request.url.path.startswith("/ui/"):
        part = "hx-request" in request.headers  # of the page that is shown
        here = split(request.headers.get("hx-current-url", "") if part else str(request.url))
        back = urlunsplit(("", "", here.path, here.query, "")) if request.method == "GET" else ""
        login = f"/ui/login?next={quote(back, safe='')}"
        if part:
            return Response(status_code=401, headers={"HX-Redirect": login})
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(login, 303)
    return _error(request, status_of(error), str(error), headers)


def add_error_replies(app: FastAPI) -> None:
    """Reply to an error of perdure with its status and its sentence."""

    @app.exception_handler(PerdureError)
    async def _(request: Request, error: Exception) -> Response:
        assert isinstance(error, PerdureError)
        return refusal(request, error)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(request, error.status_code, error.detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _error(request, 422, "; ".join(map(_sentence, error.errors())))


def _error(
    request: Request, status: int, sentence: str, headers: Mapping[str, str] | None = None
) -> Response:
    if request.url.path.startswith("/ui/") and not wants_json(request):
        return error_page(request, status, sentence, headers)
    return JSON({"detail": sentence}, status, dict(headers or {}))


def _sentence(error: Mapping[str, Any]) -> str:
    """What of a request is wrong: where, the value, and what was expected."""
    if error["type"] == "json_invalid":
        return f"the body is no JSON: {error['ctx']['error']}"
    where = ".".join(map(str, error["loc"]))
    return f"{where} is {error.get('input')!r:.80}: {error['msg']}"

"""Ids in paths: a slash in one, percent-encoded as langgraph's SDK sends it, ends no part of it."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator
from starlette.types import ASGIApp, Receive, Scope, Send

Id = Annotated[str, AfterValidator(lambda text: text.replace("\0", "/"))]
"""An argument of an endpoint that is a part of its path, and may be any text."""


class EncodedSlashes:
    """Hands encoded slashes on as NUL, which no id has; `Id` turns them back.

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

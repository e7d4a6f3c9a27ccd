"""Serve the custom application that `http.app` in a `langgraph.json` specifies.

If a request's path does not belong to perdure, the server identifies the user and passes the
request on to the custom application. Before the server passes on a request to the custom
application, it checks the request's host name, origin and body size, and the rate of requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.authentication import SimpleUser
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from perdure.errors import ConfigurationError
from perdure.server.http.access import Identity, Refused
from perdure.server.http.acting_for import identify_caller
from perdure.server.http.guard import build_refusal


class AppUser(SimpleUser):
    """The user who sent a request, available to the custom application as `request.user`.

    The custom application is the ASGI application that a deployment adds to the server.

    Attributes:
        permissions: The permissions of the user, sorted.
        acting_for: The person for whom the user acts, or None.
    """

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity.user)
        self.permissions, self.acting_for = sorted(identity.permissions), identity.acting_for

    @property
    def identity(self) -> str:
        """Return the id of the user."""
        return self.username


class CustomApp:
    """An ASGI application that identifies the user and calls a custom application.

    Args:
        app: A Starlette or FastAPI application.

    Raises:
        ConfigurationError: The object is not a Starlette or FastAPI application.
    """

    def __init__(self, app: Any) -> None:
        if not isinstance(app, Starlette):
            raise ConfigurationError(
                f"'http.app' in the langgraph.json file is {app!r:.80}; expected a Starlette or "
                "FastAPI application"
            )
        self._app = app
        self._state: dict[str, Any] = {}

    @asynccontextmanager
    async def run_lifespan(self) -> AsyncIterator[None]:
        """Run the startup and shutdown code of the custom application.

        For each request to the custom application, the values in the state that the lifespan
        yields are copied to `request.state`.
        """
        async with self._app.router.lifespan_context(self._app) as state:
            self._state = dict(state or {})
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the user and pass the request to the custom application."""
        state = scope["app"].state
        try:
            identity = await identify_caller(HTTPConnection(scope))
            with state.clients.track_request((identity.tenant, identity.user)):
                app_scope = {**scope, "user": AppUser(identity), "state": dict(self._state)}
                await self._app(app_scope, receive, send)
        except Refused as exc:
            await build_refusal(scope, exc)(scope, receive, send)

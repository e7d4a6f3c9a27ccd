"""Serve the custom application that `http.app` in a `langgraph.json` specifies.

If a request's path does not belong to perdure, the server identifies the user and passes the
request on to the custom application. Before passing on a request, the server checks its host name,
origin, rate and body size.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.applications import Starlette
from starlette.authentication import BaseUser
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from perdure.errors import ConfigurationError
from perdure.server.access import Identity, Refused
from perdure.server.acting import identify_caller
from perdure.server.guard import build_refusal


class AppUser(BaseUser):
    """The user who sent a request, available to the custom application as `request.user`.

    The custom application is the ASGI application that a deployment adds to the server.

    Attributes:
        permissions: The permissions of the user, sorted.
        acting_for: The person for whom the user acts, or None.
    """

    def __init__(self, identity: Identity) -> None:
        self._user, self.permissions = identity.user, sorted(identity.permissions)
        self.acting_for = identity.acting_for

    @property
    def is_authenticated(self) -> bool:
        """Return True, because requests from unknown users have already been refused."""
        return True

    @property
    def display_name(self) -> str:
        """Return the id of the user."""
        return self._user

    @property
    def identity(self) -> str:
        """Return the id of the user."""
        return self._user


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
                f"http.app in the langgraph.json is {app!r:.80}; expected a Starlette or FastAPI "
                "application"
            )
        self._app = app
        self._state: dict[str, Any] = {}

    def run_lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Return a context manager that runs the custom application's startup and shutdown code."""
        return self._app.router.lifespan_context(self._app)

    def set_lifespan_state(self, state: dict[str, Any] | None) -> None:
        """Save the state that the custom application's lifespan context manager yielded.

        The values in `state` are copied to each request's `request.state`.
        """
        self._state = dict(state or {})

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

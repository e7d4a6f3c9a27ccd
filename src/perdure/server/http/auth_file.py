"""Authenticate and authorize requests with the handlers that an Auth file defines.

An Auth file is a Python file that defines a `langgraph_sdk.Auth` object. LangGraph's own server
uses the same kind of file. An action is denied unless a handler allows it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

from langgraph_sdk import Auth
from pydantic import Field, TypeAdapter, ValidationError
from starlette.requests import HTTPConnection, Request

from perdure.errors import ConfigurationError
from perdure.graphs.langgraph_json import import_object
from perdure.server.http.access import Action, Filter, Forbidden, Identity, Refused, Unauthenticated
from perdure.server.teams import extract_teams_of_user
from perdure.settings import is_valid_user_or_team_name

_LOG: Final = logging.getLogger("perdure.server")
_HANDLER_PARAMETERS: Final = (
    "request", "body", "path", "method", "path_params", "query_params", "headers", "authorization"
)  # fmt: skip
"""The parameters that an authentication handler may have."""
Handler = Callable[..., Any]
_Scalar: TypeAlias = str | bool | int | float
_FILTER_ADAPTER: Final = TypeAdapter[Filter](
    dict[
        str,
        _Scalar
        | Annotated[dict[Literal["$eq"], _Scalar], Field(min_length=1)]
        | Annotated[
            dict[Literal["$contains"], _Scalar | list[_Scalar] | tuple[_Scalar, ...]],
            Field(min_length=1),
        ],
    ]
)


class HandlerUser(dict[str, Any]):
    """A user object that is built from the dict or user id that an authentication handler returned.

    The items of the dict are also available as attributes.
    """

    def __getattr__(self, name: str) -> Any:
        """Return the value of a field, so that `user.name` is equivalent to `user["name"]`."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the user has no {name!r}") from None


class _ActingUser:
    """Wraps the user object that an authentication handler returned, and adds `acting_for`.

    `acting_for` is the person on whose behalf the user sends the request. `_ActingUser` is used for
    user objects that are not mappings.
    """

    def __init__(self, user: Any, acting_for: str) -> None:
        self._user, self.acting_for = user, acting_for

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user."""
        return getattr(self._user, name)

    def __getitem__(self, name: str) -> Any:
        """Return `user[name]`, or `user.name` if the user object does not support indexing."""
        if name == "acting_for":
            return self.acting_for
        return self._user[name] if hasattr(self._user, "__getitem__") else getattr(self, name)

    def __contains__(self, name: str) -> bool:
        """Return whether the user object has an attribute with the given name."""
        return name == "acting_for" or hasattr(self._user, name)


def _build_user_object_for_handlers(identity: Identity) -> Any:
    """Return the user object that is passed to authorization handlers.

    The returned object is the authentication handler's user object with an additional field,
    `acting_for`. The field `acting_for` identifies the person on whose behalf the user sends the
    request. If the user sends the request on their own behalf, the result depends on the type of
    the user object. A mapping is copied with the additional item `acting_for=None`. Any other user
    object is returned unchanged.
    """
    raw, person = identity.raw_user, identity.acting_for
    if isinstance(raw, Mapping):
        return HandlerUser({**raw, "acting_for": person})
    return raw if person is None else _ActingUser(raw, person)


class AuthFileAccess:
    """Authenticates and authorizes requests with the handlers that an Auth file defines.

    Perdure extends LangGraph's `Auth` interface with two permissions, `perdure:admin` and
    `perdure:act`, and with three fields: a user's `tenant` and `teams`, and `ctx.user.acting_for`.

    Args:
        path: The file and the name of its `Auth`, such as `"./auth.py:auth"`.

    Attributes:
        reads_body: Whether the authentication handler has the parameter `body`.

    Raises:
        ConfigurationError: The file does not exist, or has no usable `Auth`.
    """

    # A handler can make an organisation the owner of a thread.
    owners_are_people: Final = False

    def __init__(self, path: str) -> None:
        if (folder := str(Path(path).resolve().parent)) not in sys.path:
            sys.path.append(folder)  # The Auth file may import modules from its own folder.
        self._authenticate, self._handlers = _find_authentication_and_authorization_handlers(
            import_object(path, Path(), "the file of authentication handlers"), path
        )
        parameters = inspect.signature(self._authenticate).parameters.values()
        self._parameter_names = [
            parameter.name for parameter in parameters if parameter.name in _HANDLER_PARAMETERS
        ]
        self.reads_body = "body" in self._parameter_names
        for parameter in parameters:
            if parameter.name not in _HANDLER_PARAMETERS and parameter.default is parameter.empty:
                raise ConfigurationError(
                    f"the authentication handler in {path!r} has the parameter {parameter.name!r}, "
                    "which is not supported; remove it, or use one of the supported parameters: "
                    f"{', '.join(_HANDLER_PARAMETERS)}"
                )

    async def identify(self, connection: HTTPConnection) -> Identity:
        """Call the authentication handler to identify the user who sent a request.

        Raises:
            Unauthenticated: The handler refuses the request with the HTTP status 401, or returns no
                valid user.
            Refused: The handler raises an HTTPException with another status.
        """
        arguments = {
            "request": connection,
            "body": await _read_json_body(connection) if self.reads_body else None,
            "path": connection.url.path,
            "method": connection.scope["method"],
            "path_params": dict(connection.path_params),
            "query_params": dict(connection.query_params),
            "headers": dict(connection.scope["headers"]),
            "authorization": connection.headers.get("authorization"),
        }
        handler = self._authenticate
        handler_arguments = {name: arguments[name] for name in self._parameter_names}
        user = await _await_handler_and_convert_http_exception(
            handler(**handler_arguments)
            if inspect.iscoroutinefunction(handler)
            else asyncio.to_thread(handler, **handler_arguments)
        )
        if isinstance(user, str):
            user = {"identity": user}
        if isinstance(user, Mapping):
            user = HandlerUser(
                {"is_authenticated": True, "permissions": [], "display_name": "", **user}
            )
        identity = getattr(user, "identity", None)
        if not is_valid_user_or_team_name(identity):
            raise Unauthenticated(
                "the authentication handler returned a user without a valid identity"
            )
        if not getattr(user, "is_authenticated", True):
            raise Unauthenticated("the user is not authenticated")
        tenant = getattr(user, "tenant", None)
        permissions = frozenset(getattr(user, "permissions", None) or ())
        tenant, teams = None if tenant is None else str(tenant), extract_teams_of_user(user)
        return Identity(identity, tenant, permissions, user, teams=teams)

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        """Call the most specific handler for an action; see `Access.authorize_and_build_filter`."""
        resource, _, verb = action.partition(":")
        candidates = ((resource, verb), (resource, "*"), ("*", verb), ("*", "*"))
        handler = next(
            (self._handlers[pair] for pair in candidates if pair in self._handlers), None
        )
        if handler is None:
            raise Forbidden(
                f"the action {action} is not allowed, because no handler is registered for it; "
                "register a handler with @auth.on"
            )
        context = Auth.types.AuthContext(
            permissions=sorted(identity.permissions),
            user=_build_user_object_for_handlers(identity),
            resource=cast(Any, resource),
            action=cast(Any, verb),
        )
        # If the metadata is None, replace it with an empty dict, because handlers may add keys to
        # it.
        if "metadata" in value and value["metadata"] is None:
            value["metadata"] = {}
        try:
            result = await _await_handler_and_convert_http_exception(
                handler(ctx=context, value=value)
            )
        except AssertionError as exc:
            # As langgraph's guide suggests, a handler may refuse a request with an `assert`
            # statement.
            raise Forbidden(str(exc) or f"{action} is not allowed") from exc
        if result is False:
            raise Forbidden(
                f"the user {identity.user!r} is not allowed to perform the action {action}; the "
                "action's handler denied it"
            )
        if result is None or result is True or result == {}:
            return {}
        with suppress(ValidationError):
            if resource in ("threads", "assistants", "crons"):
                return _FILTER_ADAPTER.validate_python(result, strict=True)
        _LOG.error(
            "%s was denied, because its handler returned %r; expected None, a bool or a filter",
            action,
            result,
        )
        raise Forbidden(
            f"the handler for the action {action} returned an invalid filter; see the server's log"
        )


async def _await_handler_and_convert_http_exception(handler_result: Awaitable[Any]) -> Any:
    """Await a handler's result. If the handler raises an HTTPException, convert it to `Refused`."""
    try:
        return await handler_result
    except Auth.exceptions.HTTPException as exc:
        error_class = {401: Unauthenticated, 403: Forbidden}.get(exc.status_code, Refused)
        status = exc.status_code if 400 <= exc.status_code < 600 else 403
        raise error_class(exc.detail, status, exc.headers) from exc


async def _read_json_body(connection: HTTPConnection) -> Any:
    """Return the decoded JSON body of a request, or None if the request has no valid JSON."""
    if isinstance(connection, Request) and "json" in connection.headers.get("content-type", ""):
        with suppress(ValueError):
            # Ignore invalid JSON here, because the endpoint reports it later.
            return await connection.json()
    return None


def _find_authentication_and_authorization_handlers(
    auth: Any, path: str
) -> tuple[Handler, Mapping[tuple[str, str], Handler]]:
    """Return the handlers of an `Auth`.

    `Auth` has no public method that returns its handlers, so this function reads its private
    attributes.

    According to a comment in langgraph_sdk/auth/__init__.py, langgraph's API server also reads the
    private attributes of `Auth`.

    Args:
        auth: The object that the Auth file defines.
        path: The path of the file, for error messages.

    Returns:
        The authentication handler, and the authorization handlers by resource and action. If
        several handlers are registered for an action, the last handler is returned.

    Raises:
        ConfigurationError: The object is not an `Auth`, or has no authentication handler.
    """
    if not isinstance(auth, Auth):
        raise ConfigurationError(
            f"{path!r} is of type {type(auth).__name__}; expected an instance of langgraph_sdk.Auth"
        )
    try:
        authenticate = auth._authenticate_handler
        handlers = {**auth._handlers, ("*", "*"): auth._global_handlers}
    except AttributeError as exc:
        raise ConfigurationError(
            f"langgraph-sdk {version('langgraph-sdk')} is not supported, because its Auth object "
            f"lacks the expected handlers ({exc}); install another version"
        ) from exc
    if authenticate is None:
        raise ConfigurationError(
            f"{path!r} has no authentication handler; decorate a function with @auth.authenticate"
        )
    return authenticate, {
        pair: registered[-1] for pair, registered in handlers.items() if registered
    }

"""Serve the MCP tools for a user's memories and threads over stdio and HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TextIO

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure import __version__, memory
from perdure.errors import InvalidValue, PerdureError
from perdure.server.databases import DatabaseOptions, Databases
from perdure.server.http.access import Identity, LocalAccess, public
from perdure.server.http.call import Call, CurrentCall
from perdure.server.http.logs import Audit, is_audited_change, is_refused_while_acting
from perdure.server.http.reply import JSONReply, http_status
from perdure.server.mcp_schema import INSTRUCTIONS, SERVER_NAME
from perdure.server.mcp_schema import TOOLS as SCHEMAS
from perdure.server.mcp_startup import REPLAYED_ID
from perdure.server.mcp_tools import TOOLS, Tool
from perdure.settings import Settings

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.lowlevel import Server
    from mcp.shared._stream_protocols import WriteStream
    from mcp.shared.message import SessionMessage
    from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult

_LOG: Final = logging.getLogger("perdure.mcp")
_TOOLS_BY_NAME: Final = {
    schema.name: (schema, tool) for schema, tool in zip(SCHEMAS, TOOLS, strict=True)
}


class ToolRequest(NamedTuple):
    """A request to call a tool.

    Attributes:
        call: The user and the permissions of the request.
        audit: The log that records changes.
        request_id: The id of the HTTP request for the audit log, or None over stdio.
    """

    call: Call
    audit: Audit
    request_id: str | None = None


def build_mcp_server(
    get_request: Callable[[ServerRequestContext[Any]], ToolRequest],
) -> Server[Any]:
    """Build an MCP server with all tools.

    Args:
        get_request: Returns the request that belongs to a context of the MCP SDK.
    """
    from mcp.server.lowlevel import Server
    from mcp.types import ListToolsResult

    tool_list = ListToolsResult.model_validate(
        {"tools": [schema.build_tools_list_entry() for schema in SCHEMAS]}
    )
    schemas = {schema.name: schema.build_input_schema() for schema in SCHEMAS}

    async def list_tools(context: ServerRequestContext[Any], params: Any) -> ListToolsResult:
        return tool_list

    async def call_tool(
        context: ServerRequestContext[Any], params: CallToolRequestParams
    ) -> CallToolResult:
        return await _call_tool_and_wrap_result(
            params.name, params.arguments or {}, get_request(context)
        )

    return Server(
        SERVER_NAME,
        version=__version__,
        instructions=INSTRUCTIONS,
        get_tool_input_schema=schemas.get,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def _call_tool_and_wrap_result(
    name: str, arguments: dict[str, Any], request: ToolRequest
) -> CallToolResult:
    """Call a tool, and wrap its result text or error message in the MCP SDK's `CallToolResult`."""
    from mcp.types import CallToolResult, TextContent

    try:
        if name not in _TOOLS_BY_NAME:
            raise InvalidValue(
                f"there is no tool {name!r:.60}; expected one of {', '.join(_TOOLS_BY_NAME)}"
            )
        schema, tool = _TOOLS_BY_NAME[name]
        text = await _run_tool_and_audit_change(
            tool, schema.validate_and_convert_arguments(arguments), request
        )
        return CallToolResult(content=[TextContent(text=text)], is_error=False)
    except PerdureError as exc:
        failure = str(exc)
    except Exception:
        _LOG.exception("the tool %r failed", name)
        failure = f"the tool {name} failed; see the server's log for the error"
    return CallToolResult(content=[TextContent(text=failure)], is_error=True)


async def _run_tool_and_audit_change(
    tool: Tool, arguments: dict[str, Any], request: ToolRequest
) -> str:
    """Run a tool, and record the call in the audit log if the tool's action changes data."""
    status, action = 500, tool.action  # type: ignore[attr-defined]
    call = request.call.with_action(action)
    try:
        await request.audit.check_free_space(action)
        answer, status = await tool(call, **arguments), 200
        return answer
    except PerdureError as exc:
        status = http_status(exc)
        raise
    finally:
        if is_audited_change(action) or is_refused_while_acting(call.audited_identity, status):
            await request.audit.record(call, action, status, request.request_id)


# -- over stdio


def _load_store_options_from_langgraph_json(path: str | None) -> dict[str, Any]:
    """Return the store options from a langgraph.json, or an empty dict if the path is None."""
    if path is None:
        return {}
    from perdure.graphs.langgraph_json import LanggraphFile

    return LanggraphFile.read(path).import_store_options()


async def serve_stdio(
    settings: Settings, audit: Audit, lines: Iterable[str], stdin: TextIO
) -> None:
    """Serve the MCP tools on stdin and stdout until stdin is closed.

    Args:
        settings: The settings, which name the database and the user.
        audit: The log that records changes.
        lines: Lines that were already read from stdin and must be processed first.
        stdin: The rest of the input.
    """
    import anyio
    from mcp.server.stdio import stdio_server

    configured = DatabaseOptions(_load_store_options_from_langgraph_json(settings.graphs))
    user, databases = settings.user, Databases(settings, options=configured, creates_tables=False)
    request = ToolRequest(Call(Identity(user), "store:search", LocalAccess(user), databases), audit)
    server = build_mcp_server(lambda context: request)
    input_file: Any = _PrefixedInput(iter(lines), stdin)
    try:
        async with stdio_server(stdin=anyio.wrap_file(input_file)) as (read, write):
            await server.run(read, _ReplyStream(write), server.create_initialization_options())
    finally:
        await databases.aclose()
        audit.close()


class _PrefixedInput:
    """An input stream that returns lines from an iterator, then lines from another stream."""

    def __init__(self, lines: Iterator[str], stream: TextIO) -> None:
        self._lines, self._stream = lines, stream

    def readline(self) -> str:
        """Return the next line, or an empty string at the end of the input."""
        return next(self._lines, None) or self._stream.readline()


class _ReplyStream:
    """Forwards replies from the MCP SDK to the client, except the reply to `initialize`.

    The reply to `initialize` is dropped because `StartupResponder` has already answered that
    request.
    """

    def __init__(self, stream: WriteStream[SessionMessage]) -> None:
        self._stream = stream

    async def send(self, message: SessionMessage) -> None:
        """Send a message to the client."""
        if getattr(message.message, "id", None) != REPLAYED_ID:
            await self._stream.send(message)

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        """Return this stream."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close the stream."""
        await self.aclose()


# -- over HTTP

routes = APIRouter(default_response_class=JSONReply)


@routes.post("/mcp", include_in_schema=False)
@public
async def handle_mcp_request(call: CurrentCall) -> Response:
    """Handle an MCP request that was received over the streamable HTTP transport.

    There are no MCP sessions, so GET and DELETE are not supported. The user has already been
    authenticated when this function is called. Each tool checks that the user is permitted to
    perform the tool's action.
    """
    # Build the server in another OS thread, because importing the MCP SDK takes about a second and
    # would block the event loop.
    return _SdkResponse(await asyncio.to_thread(_get_or_build_mcp_http_server))


@cache
def _get_or_build_mcp_http_server() -> Server[Any]:
    """Return the MCP server object that handles MCP requests over HTTP.

    The server object is built when this function is first called.
    """

    def get_request(context: ServerRequestContext[Any]) -> ToolRequest:
        http: Any = context.request
        return ToolRequest(http.state.call, http.app.state.audit, http.state.request_id)

    # Access the lazily imported functions `arecall`, `aremember` and `quote_memories` now, so that
    # they are imported before the first tool call. Otherwise, the first tool call would block the
    # event loop during the imports.
    _ = (memory.arecall, memory.aremember, memory.quote_memories)
    return build_mcp_server(get_request)


class _SdkResponse(Response):
    """A response that the MCP SDK writes."""

    def __init__(self, server: Server[Any]) -> None:
        super().__init__()
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the HTTP request on to the MCP SDK, which sends the response."""
        from mcp.server.transport_security import TransportSecuritySettings

        # The Host and Origin headers have already been checked by `perdure.server.http.guard`.
        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        # Create a session manager for each request, because a session manager can run only once.
        self._server.streamable_http_app(
            stateless_http=True, json_response=True, transport_security=security
        )
        manager = self._server.session_manager
        async with manager.run():
            await manager.handle_request(scope, receive, send)

"""Build the HTTP server for `perdure serve`, with web pages, LangGraph's REST API and MCP.

`create_app` builds the server's ASGI application. It is imported only on first use, because
`perdure mcp` does not need it. The server calls only functions that any user of perdure can call.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.server.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Import `create_app` lazily, on first access."""
    if name == "create_app":
        from perdure.server.app import create_app

        return create_app
    raise AttributeError(f"module 'perdure.server' has no attribute {name!r}")

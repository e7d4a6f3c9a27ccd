"""Build the HTTP server for `perdure serve`, with web pages, LangGraph's REST API and MCP.

`create_app` builds the server's ASGI application. `create_app` is imported lazily, because the
command `perdure mcp` imports this package but does not need the HTTP server. The server uses the
same checkpointers, stores and memory functions as other programs that import perdure.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.server.http.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Import `create_app` lazily, on first access."""
    if name == "create_app":
        from perdure.server.http.app import create_app

        return create_app
    raise AttributeError(f"module 'perdure.server' has no attribute {name!r}")

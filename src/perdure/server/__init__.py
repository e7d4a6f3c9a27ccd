"""Build the server of `perdure serve`, which offers pages, langgraph's REST API and MCP.

The function `create_app` builds the ASGI application of the server. `create_app` is imported only
when it is first used, because `perdure mcp` does not need this function. The server calls only
functions that any user of perdure can call.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.server.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Import `create_app` when it is first used."""
    if name == "create_app":
        from perdure.server.app import create_app

        return create_app
    raise AttributeError(f"module 'perdure.server' has no attribute {name!r}")

"""The server of `perdure serve`: pages, langgraph's REST paths and MCP over one database.

It calls what every user of perdure can call. `create_app` makes an ASGI application; it is imported
when it is first used, since `perdure mcp` does not need it.
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

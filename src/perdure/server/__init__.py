"""The server of `perdure serve`: pages, langgraph's REST paths and MCP over one database.

It calls what every user of perdure can call. `create_app` makes an ASGI application.
"""

from perdure.server.app import create_app

__all__ = ["create_app"]

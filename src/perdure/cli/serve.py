"""`perdure serve`: pages for a browser, langgraph's REST paths and MCP, over one database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.app import DB, User, app, opened
from perdure.cli.output import note
from perdure.errors import MissingDependency


@app.command()
def serve(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port.")] = 2024,
    graphs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A langgraph.json whose graphs are run."),
    ] = None,
    user: User = None,
    db: DB = None,
) -> None:
    """Show threads and memories in a browser, and serve them by HTTP.

    Without authentication it listens on a loopback address only.
    """
    try:
        import uvicorn

        from perdure.server import create_app
        from perdure.server.graphs import Graphs
    except ImportError as exc:
        raise MissingDependency('the server needs packages: pip install "perdure[server]"') from exc
    with opened(db, user, create=True) as file:
        note(f"http://{host}:{port}/", "dim")
        served = None if graphs is None else Graphs.load(graphs)
        made = create_app(file.settings, graphs=served)
        uvicorn.run(made, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)

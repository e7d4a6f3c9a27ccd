"""`perdure serve`: pages for a browser, langgraph's REST paths and MCP, over one database."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from perdure.cli.app import DB, User, app, opened
from perdure.cli.mcp import AuditFile
from perdure.cli.output import note
from perdure.errors import MissingDependency


@app.command()
def serve(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port.")] = 2024,
    log: Annotated[
        Literal["text", "json"],
        typer.Option(metavar="FORM", help="The form of lines on stderr: text or json."),
    ] = "text",
    audit: AuditFile = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Count for Prometheus, at /metrics.")
    ] = False,
    user: User = None,
    db: DB = None,
) -> None:
    """Show threads and memories in a browser, and serve them by HTTP.

    Without authentication it listens on a loopback address only.
    """
    try:
        import uvicorn

        from perdure.server import create_app
        from perdure.server.audit import Audit
        from perdure.server.request_log import log_to_stderr
        from perdure.server.telemetry import Telemetry
    except ImportError as exc:
        raise MissingDependency('the server needs packages: pip install "perdure[server]"') from exc
    with opened(db, user, create=True) as file:
        note(f"http://{host}:{port}/", "dim")
        log_to_stderr(log)
        made = create_app(
            file.settings, audit=Audit(audit), telemetry=Telemetry.configured(metrics=metrics)
        )
        uvicorn.run(made, host=host, port=port, log_config=None, access_log=False)

"""`perdure mcp`: memories and threads for programs that speak MCP, on stdin and stdout."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.app import DB, User, app, opened
from perdure.errors import MissingDependency

AuditFile = Annotated[
    Path | None,
    typer.Option("--audit", metavar="FILE", help="Record edits and erasures, without content."),
]


@app.command()
def mcp(audit: AuditFile = None, user: User = None, db: DB = None) -> None:
    """Offer memories and threads to a program as MCP tools.

    The program starts it and speaks with it on stdin and stdout. It sees the memories and
    conversations of one user.
    """
    try:
        import mcp as _  # noqa: F401 - the server imports it when it starts

        from perdure.server.logs import Audit, log_to_stderr
        from perdure.server.mcp import serve_stdio
    except ImportError as exc:
        raise MissingDependency('MCP needs: pip install ".[server]" in a checkout') from exc
    with opened(db, user, create=True) as file:
        log_to_stderr()
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # else it waits for a line on stdin
        try:
            asyncio.run(serve_stdio(file.settings, Audit(audit)))
        finally:
            signal.signal(signal.SIGINT, before)

"""`perdure export`: conversations as JSONL."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from perdure.cli.app import DB, Threads, app, opened, thread_id
from perdure.cli.output import as_json
from perdure.cli.progress import progress_bar
from perdure.errors import ConfigurationError


@app.command()
def export(
    thread: Threads = None,
    every: Annotated[bool, typer.Option("--all", help="Export all threads.")] = False,
    db: DB = None,
) -> None:
    """Write threads as JSONL, a line each, with their branches.

    'perdure import' reads it.
    """
    from perdure.cli.jsonl import exported

    if bool(thread) == every:
        raise ConfigurationError("name threads, or give --all")
    with opened(db, reads=True) as file:
        ids = [thread_id(file, each) for each in thread or ()]
        # all there are now: paging would miss those that are written to meanwhile
        ids = ids or [each.thread_id for each in file.saver.threads(limit=sys.maxsize)]
        with progress_bar("exporting", "thread") as show:
            for number, each in enumerate(ids, 1):
                as_json(exported(file.saver, each), indent=None)
                show(number / len(ids), number)

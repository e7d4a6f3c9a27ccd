"""The command line: thin commands over the calls that users make from Python.

A module is a command, or a group of them, and has its name.
"""

from perdure.cli import (  # noqa: F401 - each adds its commands
    chat,
    config,
    delete,
    export,
    fork,
    history,
    import_,
    memories,
    memories_review,
    retain,
    show,
    stats,
    store,
    store_files,
    threads,
    worker,
)
from perdure.cli.app import finish, main

_ORDER = (
    *("chat", "import", "threads", "history", "show", "export", "fork", "rewind", "delete"),
    *("retain", "worker", "config", "stats"),
)
finish(_ORDER)

__all__ = ["main"]

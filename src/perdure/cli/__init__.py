"""The command line: thin commands over the calls that users make from Python.

A module is a command, a group of them, or commands about the same thing.
"""

from perdure.cli import (  # noqa: F401 - each adds its commands
    answer,
    chat,
    copy,
    database,
    history,
    import_,
    keys,
    memories,
    people,
    runs,
    serve,
    store,
    threads,
    worker,
)
from perdure.cli.app import Command, app, main

_ORDER = (
    *("chat", "answer", "import_", "threads", "history", "show", "export", "fork", "rewind"),
    *("delete", "forget", "serve", "runs", "crons", "mcp", "retain", "worker"),
    *("config", "stats", "copy"),
)
app.registered_commands.sort(key=lambda each: _ORDER.index(getattr(each.callback, "__name__", "")))
for _group in (app, memories.memories, store.store, keys.keys):
    for _each in _group.registered_commands:
        _each.cls = Command

__all__ = ["main"]

"""The command line of perdure.

Each module that is imported below contains one command, one command group, or a few related
commands. The other modules of the package `perdure.cli`, such as `output`, define no commands. They
contain helper functions that the commands call.
"""

from perdure.cli import (  # noqa: F401 - importing a module adds its commands
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

# The names of the command functions, in the order in which `perdure --help` lists the commands.
_ORDER = (
    *("chat", "answer", "import_", "threads", "history", "show", "export", "fork", "rewind"),
    *("delete", "forget", "serve", "runs", "crons", "mcp", "retain", "worker"),
    *("config", "stats", "copy"),
)
app.registered_commands.sort(
    key=lambda command: _ORDER.index(getattr(command.callback, "__name__", ""))
)
for _group in (app, memories.memories, store.store, keys.keys):
    for _command in _group.registered_commands:
        _command.cls = Command

__all__ = ["main"]

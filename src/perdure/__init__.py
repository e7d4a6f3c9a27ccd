"""Memory for LangGraph agents: resumable threads and long-term memory in SQLite or Postgres."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from perdure.errors import PerdureError

if TYPE_CHECKING:
    from perdure.checkpointers import PostgresCheckpointer, SQLiteCheckpointer
    from perdure.stores import PostgresStore, SQLiteStore

    __version__: str

__all__ = [
    "PerdureError",
    "PostgresCheckpointer",
    "PostgresStore",
    "SQLiteCheckpointer",
    "SQLiteStore",
    "__version__",
]
# Remove the names of classes that need psycopg from `__all__` if psycopg is not installed, so that
# `from perdure import *` works without psycopg.
if find_spec("psycopg") is None:
    __all__[:] = [name for name in __all__ if not name.startswith("Postgres")]

# Maps the name of each public class to the module that contains it.
_MODULE_NAMES = {
    "PostgresCheckpointer": "perdure.checkpointers",
    "PostgresStore": "perdure.stores",
    "SQLiteCheckpointer": "perdure.checkpointers",
    "SQLiteStore": "perdure.stores",
}


def __getattr__(name: str) -> Any:
    """Import a public class on first use, or return the package's version."""
    if name in _MODULE_NAMES:
        return getattr(import_module(_MODULE_NAMES[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("perdure")
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")

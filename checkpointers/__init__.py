"""Provide checkpointers, which store LangGraph threads in a database.

Pass a checkpointer to langgraph as `graph.compile(checkpointer=...)`.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.import_metadata import (
    aread_import_metadata,
    atitle,
    read_import_metadata,
    title,
)
from perdure.checkpointers.reports import (
    ChannelDifference,
    CheckpointInfo,
    ErasureReport,
    HistoryItem,
    ImportReport,
    PruneReport,
    Retention,
    StateDifference,
    ThreadHead,
    ThreadInfo,
    ThreadStatus,
    ThreadTask,
    ThreadUsage,
)
from perdure.checkpointers.sqlite import SQLiteCheckpointer
from perdure.checkpointers.stored_types import StoredType
from perdure.settings import is_dsn

if TYPE_CHECKING:
    from perdure.checkpointers.postgres import PostgresCheckpointer

__all__ = [
    "ChannelDifference",
    "CheckpointInfo",
    "ErasureReport",
    "HistoryItem",
    "ImportReport",
    "PostgresCheckpointer",
    "PruneReport",
    "Retention",
    "SQLiteCheckpointer",
    "StateDifference",
    "StoredType",
    "ThreadHead",
    "ThreadInfo",
    "ThreadStatus",
    "ThreadTask",
    "ThreadUsage",
    "aread_import_metadata",
    "atitle",
    "open_checkpointer",
    "read_import_metadata",
    "title",
]
# Remove the Postgres names from `__all__` if psycopg is not installed, so that `import *` works
# without the `postgres` extra.
if find_spec("psycopg") is None:
    __all__[:] = [name for name in __all__ if not name.startswith("Postgres")]


def __getattr__(name: str) -> Any:
    """Import `PostgresCheckpointer` on first use, because it needs the extra `postgres`."""
    if name == "PostgresCheckpointer":
        from perdure.checkpointers.postgres import PostgresCheckpointer

        return PostgresCheckpointer
    raise AttributeError(f"module 'perdure.checkpointers' has no attribute {name!r}")


def open_checkpointer(db: Any, **options: Any) -> Checkpointer:
    """Open a checkpointer that stores its data in a SQLite file or a Postgres database.

    Args:
        db: The path of a file; or a Postgres DSN, a function that returns a DSN, or a connection
            pool.
        **options: The options of `SQLiteCheckpointer` or `PostgresCheckpointer`.
    """
    if callable(db) or hasattr(db, "getconn") or (isinstance(db, str) and is_dsn(db)):
        from perdure.checkpointers.postgres import PostgresCheckpointer

        return PostgresCheckpointer.open(db, **options)
    return SQLiteCheckpointer.open(db, **options)

"""Thread state: checkpointers for `graph.compile(checkpointer=...)`."""

from perdure.checkpointers.base import (
    CheckpointInfo,
    HistoryItem,
    ImportReport,
    PruneReport,
    Retention,
    ThreadInfo,
)
from perdure.checkpointers.sqlite import SQLiteCheckpointer

__all__ = [
    "CheckpointInfo",
    "HistoryItem",
    "ImportReport",
    "PruneReport",
    "Retention",
    "SQLiteCheckpointer",
    "ThreadInfo",
]

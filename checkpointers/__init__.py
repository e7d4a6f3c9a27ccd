"""Thread state: checkpointers for `graph.compile(checkpointer=...)`."""

from perdure.checkpointers.reports import (
    CheckpointInfo,
    ErasureReport,
    HistoryItem,
    ImportReport,
    PruneReport,
    Retention,
    ThreadHead,
    ThreadInfo,
)
from perdure.checkpointers.sqlite import SQLiteCheckpointer

__all__ = [
    "CheckpointInfo",
    "ErasureReport",
    "HistoryItem",
    "ImportReport",
    "PruneReport",
    "Retention",
    "SQLiteCheckpointer",
    "ThreadHead",
    "ThreadInfo",
]

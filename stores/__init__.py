"""Long-term state: namespaced JSON documents with versions, filters and search."""

from perdure.stores.base import (
    FoundItem,
    Pending,
    Provenance,
    QueryPlan,
    Receipt,
    StoredItem,
    StoreStats,
    TransferReport,
    VersionRetention,
    WhyNot,
)
from perdure.stores.scoped import ScopedStore
from perdure.stores.sqlite import SQLiteStore

__all__ = [
    "FoundItem",
    "Pending",
    "Provenance",
    "QueryPlan",
    "Receipt",
    "SQLiteStore",
    "ScopedStore",
    "StoreStats",
    "StoredItem",
    "TransferReport",
    "VersionRetention",
    "WhyNot",
]

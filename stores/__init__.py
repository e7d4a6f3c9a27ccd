"""Long-term state: namespaced JSON documents with versions, filters and search."""

from perdure.stores.base import (
    FoundItem,
    Pending,
    Provenance,
    PutItem,
    QueryPlan,
    Receipt,
    Removable,
    StoredItem,
    StoreStats,
    TransferReport,
    VersionRetention,
    WhyNot,
)
from perdure.stores.embedders import Embedder, embedder_from
from perdure.stores.models import Model
from perdure.stores.ranking import Weights
from perdure.stores.sqlite import SQLiteStore
from perdure.stores.store import ScopedStore

__all__ = [
    "Embedder",
    "FoundItem",
    "Model",
    "Pending",
    "Provenance",
    "PutItem",
    "QueryPlan",
    "Receipt",
    "Removable",
    "SQLiteStore",
    "ScopedStore",
    "StoreStats",
    "StoredItem",
    "TransferReport",
    "VersionRetention",
    "Weights",
    "WhyNot",
    "embedder_from",
]

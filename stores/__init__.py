"""Long-term memory: namespaced JSON documents with versions, filters and search."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from perdure.settings import is_dsn
from perdure.stores.base import (
    FoundItem,
    NamespaceSize,
    PendingEmbedding,
    Provenance,
    PutItem,
    QueryPlan,
    RankExplanation,
    Receipt,
    RemovableVersions,
    StoredItem,
    StoreStats,
    StoreUsage,
    TransferReport,
    VersionRetention,
)
from perdure.stores.search.embedders import Embedder, embedder_from
from perdure.stores.search.ranking import Weights
from perdure.stores.search.vectors import Model
from perdure.stores.sqlite import SQLiteStore
from perdure.stores.store import ScopedStore
from perdure.stores.whole_store import WholeStore

if TYPE_CHECKING:
    from perdure.stores.postgres import PostgresStore

__all__ = [
    "Embedder",
    "FoundItem",
    "Model",
    "NamespaceSize",
    "PendingEmbedding",
    "PostgresStore",
    "Provenance",
    "PutItem",
    "QueryPlan",
    "RankExplanation",
    "Receipt",
    "RemovableVersions",
    "SQLiteStore",
    "ScopedStore",
    "StoreStats",
    "StoreUsage",
    "StoredItem",
    "TransferReport",
    "VersionRetention",
    "Weights",
    "embedder_from",
    "open_store",
]
# `import *` must also work if psycopg is not installed.
if find_spec("psycopg") is None:
    __all__[:] = [name for name in __all__ if not name.startswith("Postgres")]


def __getattr__(name: str) -> Any:
    """Import `PostgresStore` on first access, because this class needs the extra `postgres`."""
    if name == "PostgresStore":
        from perdure.stores.postgres import PostgresStore

        return PostgresStore
    raise AttributeError(f"module 'perdure.stores' has no attribute {name!r}")


def open_store(db: Any, **options: Any) -> WholeStore:
    """Open the store in an SQLite file or in a Postgres database.

    For an SQLite file, `db` is the path of the file. For a Postgres database, `db` is a DSN, a
    function that returns a DSN, or a connection pool. See `SQLiteStore` and `PostgresStore` for the
    options.
    """
    if callable(db) or hasattr(db, "getconn") or (isinstance(db, str) and is_dsn(db)):
        from perdure.stores.postgres import PostgresStore

        return PostgresStore.open(db, **options)
    return SQLiteStore.open(db, **options)

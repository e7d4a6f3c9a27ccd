"""A pytest plugin for other packages' tests: perdure's classes under the names of langgraph's.

`run.py` loads it by `-p plugin` with this folder on the path, because langgraph's tests are a
package named `tests` too. Two environment variables set it up: `OUTSIDE_CLASSES` is `perdure` or
`langgraph`; `OUTSIDE_ONLY_SQLITE` keeps only the cases that run on an SQLite checkpointer.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Self

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.store.base import IndexConfig

from perdure.checkpointers import SQLiteCheckpointer
from perdure.stores import SQLiteStore

SQLITE = {("sync_checkpointer", "sqlite"), ("async_checkpointer", "sqlite_aio")}


class Checkpointer(SQLiteCheckpointer):
    """With the serializer of langgraph's savers: the tests store types of their own."""

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Self:
        """Open as langgraph's savers are opened."""
        return cls.open(conn_string, serde=JsonPlusSerializer(), **options)


class MemoryStore(SQLiteStore):
    """Made as langgraph's `InMemoryStore` is."""

    def __init__(self, *, index: IndexConfig | None = None) -> None:
        super().__init__(":memory:", index=index)


PLACES: dict[str, tuple[type, list[str]]] = {  # by whose name, which, in which modules
    "SqliteSaver": (Checkpointer, ["langgraph.checkpoint.sqlite"]),
    "AsyncSqliteSaver": (Checkpointer, ["langgraph.checkpoint.sqlite.aio"]),
    "SqliteStore": (SQLiteStore, ["langgraph.store.sqlite", "langgraph.store.sqlite.base"]),
    "AsyncSqliteStore": (SQLiteStore, ["langgraph.store.sqlite", "langgraph.store.sqlite.aio"]),
    "InMemoryStore": (MemoryStore, ["langgraph.store.memory"]),
}


def pytest_load_initial_conftests() -> None:
    """Put perdure's classes where langgraph's conftest and tests will import langgraph's."""
    if os.environ["OUTSIDE_CLASSES"] == "perdure":
        for name, (ours, modules) in PLACES.items():
            for module in modules:
                setattr(import_module(module), name, ours)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases whose checkpointer is the one for SQLite."""
    if os.environ.get("OUTSIDE_ONLY_SQLITE"):
        others = [item for item in items if not SQLITE & _parameters(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if SQLITE & _parameters(item)]


def _parameters(item: pytest.Item) -> set[tuple[str, Any]]:
    call: Any = getattr(item, "callspec", None)
    found = dict(call.params) if call else {}
    return {(name, value) for name, value in found.items() if isinstance(value, str)}

"""A pytest plugin for other packages' tests: perdure's classes under the names of langgraph's.

`run.py` loads it by `-p plugin` with this folder on the path, because langgraph's tests are a
package named `tests` too. Two environment variables set it up: `OUTSIDE_CLASSES` is `perdure` or
`langgraph`; `OUTSIDE_BACKEND`, `sqlite` or `postgres`, keeps only the cases whose checkpointer or
store is of that backend.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Self

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.store.base import IndexConfig

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.postgres import PostgresCheckpointer
from perdure.storage.database import LazyAwaitable, is_in_event_loop
from perdure.stores import SQLiteStore
from perdure.stores.postgres import PostgresStore

CASES = {
    "sqlite": {("sync_checkpointer", "sqlite"), ("async_checkpointer", "sqlite_aio")},
    "postgres": {
        *(("sync_checkpointer", "postgres"), ("async_checkpointer", "postgres_aio")),
        *(("sync_store", "postgres"), ("async_store", "postgres_aio")),
    },
}


class LikeLangGraph:
    """With the serializer of langgraph's savers: the tests store types of their own."""

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Any:
        """Open as langgraph's savers are opened."""
        opened: Any = cls
        return opened.open(conn_string, serde=JsonPlusSerializer(), **options)


class Checkpointer(LikeLangGraph, SQLiteCheckpointer):
    """In a file."""


class InPostgres(LikeLangGraph, PostgresCheckpointer):
    """In Postgres; where langgraph's savers take a connection or a pool, in its database."""

    MIGRATIONS = ("",)

    def __init__(self, place: Any, pipe: Any = None, **options: Any) -> None:
        dsn = place.conninfo if hasattr(place, "conninfo") else place
        dsn = dsn.info.dsn if hasattr(dsn, "info") else dsn
        super().__init__(dsn, **{"serde": JsonPlusSerializer(), **options})


class NoCursor:
    """Takes what fixtures do to langgraph's tables, and does nothing, awaited or not."""

    def execute(self, sql: str, *args: Any) -> LazyAwaitable[None]:
        if args:
            pytest.fail("of langgraph's tables")
        return LazyAwaitable(partial(asyncio.sleep, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


class StoreInPostgres(PostgresStore):
    """Leaves aside what langgraph's store is told of its connections and tables."""

    MIGRATIONS = ("",)
    _cursor = NoCursor

    @classmethod
    def from_conn_string(
        cls, conn_string: str, *, index: Any = None, ttl: Any = None, **_: Any
    ) -> Self:
        """Open as langgraph's stores are opened."""
        theirs = ("ann_index_config", "distance_type")
        index = index and {name: value for name, value in index.items() if name not in theirs}
        return cls.open(conn_string, index=index, ttl=ttl)


def awaited_sweeper(store: type[SQLiteStore | PostgresStore]) -> type:
    """A store whose sweeper is awaited by langgraph's names, as docs/store.md says they differ."""

    def either(blocking: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return asyncio.to_thread(blocking, *args) if is_in_event_loop() else blocking(*args)

        return call

    names = ("sweep_ttl", "start_ttl_sweeper", "stop_ttl_sweeper")
    return type(f"Async{store.__name__}", (store,), {n: either(getattr(store, n)) for n in names})


class MemoryStore(SQLiteStore):
    """Made as langgraph's `InMemoryStore` is."""

    def __init__(self, *, index: IndexConfig | None = None) -> None:
        super().__init__(":memory:", index=index)


PLACES: dict[str, tuple[type, list[str]]] = {  # by whose name, which, in which modules
    "SqliteSaver": (Checkpointer, ["langgraph.checkpoint.sqlite"]),
    "AsyncSqliteSaver": (Checkpointer, ["langgraph.checkpoint.sqlite.aio"]),
    "SqliteStore": (SQLiteStore, ["langgraph.store.sqlite", "langgraph.store.sqlite.base"]),
    "AsyncSqliteStore": (
        awaited_sweeper(SQLiteStore),
        ["langgraph.store.sqlite", "langgraph.store.sqlite.aio"],
    ),
    "InMemoryStore": (MemoryStore, ["langgraph.store.memory"]),
    "PostgresSaver": (InPostgres, ["langgraph.checkpoint.postgres"]),
    "AsyncPostgresSaver": (InPostgres, ["langgraph.checkpoint.postgres.aio"]),
    "PostgresStore": (StoreInPostgres, ["langgraph.store.postgres"]),
    "AsyncPostgresStore": (awaited_sweeper(StoreInPostgres), ["langgraph.store.postgres"]),
}


def pytest_load_initial_conftests() -> None:
    """Put perdure's classes where langgraph's conftest and tests will import langgraph's."""
    if os.environ["OUTSIDE_CLASSES"] == "perdure":
        for name, (ours, modules) in PLACES.items():
            for module in modules:
                setattr(import_module(module), name, ours)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases whose checkpointer or store is of the backend."""
    if wanted := CASES.get(os.environ["OUTSIDE_BACKEND"]):
        kept = [item for item in items if _chosen(item, wanted)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def _chosen(item: pytest.Item, wanted: set[tuple[str, str]]) -> bool:
    call: Any = getattr(item, "callspec", None)
    found = dict(call.params) if call else {}
    ours = {(name, value) for name, value in found.items() if isinstance(value, str)}
    if ours & {("cache", "redis")}:  # no such server
        return False
    given = {name for name, _ in wanted} & found.keys()
    return bool(given) and all((name, found[name]) in wanted for name in given)

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
from perdure.storage.database import LazyAwaitable
from perdure.storage.flow import is_in_event_loop
from perdure.stores import SQLiteStore
from perdure.stores.postgres import PostgresStore

CASES_BY_BACKEND = {
    "sqlite": {("sync_checkpointer", "sqlite"), ("async_checkpointer", "sqlite_aio")},
    "postgres": {
        *(("sync_checkpointer", "postgres"), ("async_checkpointer", "postgres_aio")),
        *(("sync_store", "postgres"), ("async_store", "postgres_aio")),
    },
}


class LangGraphConstructor:
    """A constructor like that of langgraph's savers.

    It uses their serializer, because the tests store their own types.
    """

    @classmethod
    def from_conn_string(cls, conn_string: str, **options: Any) -> Any:
        """Open the checkpointer as langgraph's savers are opened."""
        opened: Any = cls
        return opened.open(conn_string, serde=JsonPlusSerializer(), **options)


class FileCheckpointer(LangGraphConstructor, SQLiteCheckpointer):
    """A checkpointer in a file."""


class CheckpointerInPostgres(LangGraphConstructor, PostgresCheckpointer):
    """A checkpointer in Postgres.

    Like langgraph's savers, it accepts a connection or a pool, and uses the database of that.
    """

    MIGRATIONS = ("",)

    def __init__(self, place: Any, pipe: Any = None, **options: Any) -> None:
        dsn = place.conninfo if hasattr(place, "conninfo") else place
        dsn = dsn.info.dsn if hasattr(dsn, "info") else dsn
        super().__init__(dsn, **{"serde": JsonPlusSerializer(), **options})


class IgnoringCursor:
    """A cursor that ignores the statements of fixtures on langgraph's tables, sync or async."""

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
    """A store in Postgres that ignores langgraph's options for connections and tables."""

    MIGRATIONS = ("",)
    _cursor = IgnoringCursor

    @classmethod
    def from_conn_string(
        cls, conn_string: str, *, index: Any = None, ttl: Any = None, **_: Any
    ) -> Self:
        """Open as langgraph's stores are opened."""
        theirs = ("ann_index_config", "distance_type")
        index = index and {name: value for name, value in index.items() if name not in theirs}
        return cls.open(conn_string, index=index, ttl=ttl)


def with_async_sweeper(store: type[SQLiteStore | PostgresStore]) -> type:
    """Return a store class whose sweeper methods are awaitable under langgraph's names.

    docs/store.md describes this difference.
    """

    def call_sync_or_async(blocking: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return asyncio.to_thread(blocking, *args) if is_in_event_loop() else blocking(*args)

        return call

    names = ("sweep_ttl", "start_ttl_sweeper", "stop_ttl_sweeper")
    return type(
        f"Async{store.__name__}",
        (store,),
        {n: call_sync_or_async(getattr(store, n)) for n in names},
    )


class MemoryStore(SQLiteStore):
    """A store with the constructor of langgraph's `InMemoryStore`."""

    def __init__(self, *, index: IndexConfig | None = None) -> None:
        super().__init__(":memory:", index=index)


# name of langgraph's class: perdure's class, and the modules in which it replaces langgraph's
REPLACEMENTS: dict[str, tuple[type, list[str]]] = {
    "SqliteSaver": (FileCheckpointer, ["langgraph.checkpoint.sqlite"]),
    "AsyncSqliteSaver": (FileCheckpointer, ["langgraph.checkpoint.sqlite.aio"]),
    "SqliteStore": (SQLiteStore, ["langgraph.store.sqlite", "langgraph.store.sqlite.base"]),
    "AsyncSqliteStore": (
        with_async_sweeper(SQLiteStore),
        ["langgraph.store.sqlite", "langgraph.store.sqlite.aio"],
    ),
    "InMemoryStore": (MemoryStore, ["langgraph.store.memory"]),
    "PostgresSaver": (CheckpointerInPostgres, ["langgraph.checkpoint.postgres"]),
    "AsyncPostgresSaver": (CheckpointerInPostgres, ["langgraph.checkpoint.postgres.aio"]),
    "PostgresStore": (StoreInPostgres, ["langgraph.store.postgres"]),
    "AsyncPostgresStore": (with_async_sweeper(StoreInPostgres), ["langgraph.store.postgres"]),
}


def pytest_load_initial_conftests() -> None:
    """Replace langgraph's classes by perdure's in the modules from which the tests import them."""
    if os.environ["OUTSIDE_CLASSES"] == "perdure":
        for name, (ours, modules) in REPLACEMENTS.items():
            for module in modules:
                setattr(import_module(module), name, ours)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases whose checkpointer or store is of the chosen backend."""
    if wanted := CASES_BY_BACKEND.get(os.environ["OUTSIDE_BACKEND"]):
        kept = [item for item in items if _is_chosen(item, wanted)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def _is_chosen(item: pytest.Item, wanted: set[tuple[str, str]]) -> bool:
    call: Any = getattr(item, "callspec", None)
    params = dict(call.params) if call else {}
    ours = {(name, value) for name, value in params.items() if isinstance(value, str)}
    if ours & {("cache", "redis")}:  # no such server
        return False
    selected_names = {name for name, _ in wanted} & params.keys()
    return bool(selected_names) and all((name, params[name]) in wanted for name in selected_names)

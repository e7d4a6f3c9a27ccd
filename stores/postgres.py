"""`PostgresStore`: namespaced JSON with versions and search, in a Postgres database."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Literal

from langgraph.store.base import IndexConfig, TTLConfig

from perdure.storage.database import Migration
from perdure.storage.flow import NamedSQL, load
from perdure.storage.postgres import PostgresDatabase
from perdure.stores.offline import DIMS, StaticEmbedder
from perdure.stores.options import TextIndex, options_of
from perdure.stores.parts import Parts
from perdure.stores.values import MAX_BYTES
from perdure.stores.vectors import Kind
from perdure.stores.whole_store import WholeStore

_SQL: Final = NamedSQL(
    load("perdure.stores", "sqlite.sql") | load("perdure.stores", "postgres.sql")
)
SCHEMA: Final = Migration("stores", (_SQL["postgres_1"],))


class PostgresStore(WholeStore):
    """A langgraph store in Postgres, for asyncio and for threads alike.

    Any number of processes and machines may use one database, and a `PostgresCheckpointer` the
    same. Use it with `with` or `async with`, or call `close`; the first use opens the database.

    Args:
        dsn: A connection string or URI of libpq.
        index: See `SQLiteStore`; so are `ttl`, `key`, `text_index`, `vectors`,
            `approximate_above`, `index_bytes`, `max_value_bytes` and `read_only`.
        schema: The schema that holds the tables; made if it is not there.
        tenant: Whose rows these are, in tables that tenants share: no other's can be seen or
            changed, by row-level security. None: the tables have no tenants.
        pooled: Whether the DSN leads to a pooler that gives each transaction another connection,
            such as PgBouncer with `pool_mode = transaction`.
        pool_size: How many connections this process may have.
        timeout_s: How long to wait for a connection.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    _clock: Callable[[], float] = staticmethod(time.time)  # tests put another here

    def __init__(
        self,
        dsn: str,
        *,
        index: IndexConfig | dict[str, Any] | Literal["offline"] | None = "offline",
        ttl: TTLConfig | None = None,
        key: bytes | str | None = None,
        text_index: TextIndex = "sealed",
        vectors: Kind | None = None,
        approximate_above: int = 200_000,
        index_bytes: int = 256 << 20,
        max_value_bytes: int = MAX_BYTES,
        read_only: bool = False,
        schema: str = "perdure",
        tenant: str | None = None,
        pooled: bool = False,
        pool_size: int = 10,
        timeout_s: float = 30.0,
    ) -> None:
        config: Any = {"embed": StaticEmbedder(), "dims": DIMS} if index == "offline" else index
        options = options_of(
            index=config,
            ttl=ttl,
            key=key,
            text_index=text_index,
            vectors=vectors,
            approximate_above=approximate_above,
            index_bytes=index_bytes,
            max_value_bytes=max_value_bytes,
            read_only=read_only,
            timeout_s=timeout_s,
        )
        self.index_config: IndexConfig | None = config
        clock = self._clock
        parts = Parts.of(
            _SQL,
            options,
            lambda: int(clock() * 1_000_000),
            lambda begin: PostgresDatabase(
                dsn,
                SCHEMA,
                begin=begin,
                schema=schema,
                tenant=tenant,
                pooled=pooled,
                read_only=read_only,
                pool_size=pool_size,
                timeout_s=timeout_s,
            ),
            narrows=False,
        )
        super().__init__(parts)

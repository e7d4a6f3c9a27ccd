"""Define `PostgresCheckpointer`, which stores threads in a shared Postgres database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.saver import choose_serializer
from perdure.checkpointers.stored_types import Aliases, StoredType
from perdure.settings import TIMEOUT_S
from perdure.storage.database import Schema
from perdure.storage.flow import load_sql
from perdure.storage.postgres import PostgresDatabase, PostgresOwner
from perdure.storage.postgres_dsn import Dsn

_SQL: Final = {
    tenants: load_sql("perdure.checkpointers", "sqlite.sql", "postgres.sql", with_tenants=tenants)
    for tenants in (False, True)
}


class PostgresCheckpointer(PostgresOwner, Checkpointer):
    """Stores LangGraph threads in a Postgres database, for blocking and asynchronous code.

    Any number of processes and machines can share a database. Use the checkpointer in a `with` or
    `async with` statement, or call `close` after use. The first use opens the database.

    Args:
        dsn: A libpq connection string or URI; a function without arguments that returns such a
            string and is called for each new connection; or a `psycopg_pool.ConnectionPool`, which
            perdure uses but never closes. See docs/postgres.md.
        key: See `SQLiteCheckpointer`, also for `serde`, `allow`, `strict`, `types`, `aliases`,
            `read_only` and `cache_bytes`.
        schema: The schema that contains the tables. It is created if it does not exist.
        tenant: The tenant whose rows the checkpointer reads and writes, in tables that several
            tenants share. Row-level security hides the rows of all other tenants. None means tables
            without tenants.
        pooled: Whether the DSN leads to a pooler that gives each transaction another connection,
            such as PgBouncer with `pool_mode = transaction`.
        direct: The DSN of the server itself, or a function that returns this DSN. It is used for
            locks, which need a separate connection. None means `dsn`, or the parameters of the
            pool. If `pooled` is set and `direct` is None, `lock` raises ConfigurationError.
        pool_size: The maximum number of connections of this process. It has no effect on a pool of
            the caller, which has its own size.
        timeout_s: How long to wait for a connection, in seconds.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        dsn: Dsn,
        *,
        key: bytes | str | None = None,
        serde: SerializerProtocol | None = None,
        allow: Sequence[type | tuple[str, str]] = (),
        strict: bool = False,
        types: Sequence[StoredType[Any]] = (),
        aliases: Aliases = (),
        read_only: bool = False,
        cache_bytes: int = 128 << 20,
        schema: str = "perdure",
        tenant: str | None = None,
        pooled: bool = False,
        direct: str | Callable[[], str] | None = None,
        pool_size: int = 10,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        serde, seal, stored_types = choose_serializer(key, serde, allow, strict, types, aliases)
        sql = _SQL[tenant is not None]
        database = PostgresDatabase(
            dsn,
            Schema("checkpointers", sql["schema"]),
            begin=self._check_encryption_key_and_load_removal_key,
            schema=schema,
            tenant=tenant,
            pooled=pooled,
            direct=direct,
            read_only=read_only,
            pool_size=pool_size,
            timeout_s=timeout_s,
        )
        super().__init__(database, sql, serde, seal, cache_bytes, stored_types)

"""Open the database that is configured in a server's settings.

On a multi-tenant server, each tenant gets its own checkpointer and store, which can access only
that tenant's rows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.owner_record import record_that_owners_may_be_organisations
from perdure.errors import ConfigurationError
from perdure.run_tables.component import create_server_tables
from perdure.run_tables.thread_list import TimeToLive
from perdure.settings import Settings, is_dsn
from perdure.stores import SQLiteStore
from perdure.stores.whole_store import WholeStore

# Number of open tenants above which the checkpointers and stores of idle tenants are closed.
_MAX_OPEN_TENANTS: Final = 32
# Memory limits per tenant, in bytes, for caches and for search indexes. All tenants share the same
# database connections.
_CACHE_BYTES, _INDEX_BYTES = 16 << 20, 32 << 20


class OpenDatabase(NamedTuple):
    """The checkpointer and the store of a database, or of one tenant in a multi-tenant database."""

    saver: Checkpointer
    store: WholeStore


@dataclass(frozen=True)
class DatabaseOptions:
    """Database options for a server, read from a `langgraph.json`.

    Attributes:
        store: The options `index` and `ttl` with which stores are opened.
        thread_ttl: The time to live of new threads, or None if they stay until they are deleted.
    """

    store: Mapping[str, Any] = field(default_factory=dict)
    thread_ttl: TimeToLive | None = None


class Databases:
    """Opens the checkpointer and the store of a server.

    On a multi-tenant server, each tenant has its own checkpointer and store. The checkpointer and
    the store of a tenant are opened when they are first used. If too many tenants are open, the
    least recently used idle tenants are closed.

    Args:
        instrument: Returns a subclass of a checkpointer or store class whose methods are measured.
            None means that no methods are measured.
        saver_options: The options `types` and `aliases` of the checkpointers.
        creates_tables: Whether to create the server's tables in each database that is opened. MCP
            over standard input and output does not need them.

    Attributes:
        settings: The settings, which name the database.
        options: The options of the stores and of new threads.
        has_organisations: Whether the `owner` of a thread may be an organisation. If True, a mark
            for `perdure.people` is stored in each database that is opened.
    """

    def __init__(
        self,
        settings: Settings,
        instrument: Callable[[Any], Any] | None = None,
        saver_options: Mapping[str, Any] | None = None,
        options: DatabaseOptions | None = None,
        *,
        has_organisations: bool = False,
        creates_tables: bool = True,
    ) -> None:
        self.has_organisations, self._creates_tables = has_organisations, creates_tables
        self.settings, self._instrument = settings, instrument or (lambda plain: plain)
        self.options = options or DatabaseOptions()
        self._saver_options = dict(saver_options or {})
        # Maps each tenant to its open database, in order of last use, with the most recently used
        # tenant last.
        self._open_databases: dict[str | None, OpenDatabase] = {}
        self._uses = Counter[str | None]()

    async def get_or_open_database(self, tenant: str | None) -> OpenDatabase:
        """Return the database of a tenant. Open the database if it is not open.

        Raises:
            EmbedderMismatch: The vectors of the store come from another embedder than the
                configured one.
        """
        database = self._open_databases.pop(tenant, None)
        if database is None:
            new_database = await self._open_database(tenant)
            # Check again, because another request may have opened the tenant's database while this
            # request waited.
            database = self._open_databases.pop(tenant, None)
            if database is None:
                database = new_database
            else:
                await asyncio.gather(new_database.saver.aclose(), new_database.store.aclose())
        idle_tenants = [
            open_tenant for open_tenant in self._open_databases if not self._uses[open_tenant]
        ]
        self._open_databases[tenant] = database
        await self._close_tenants(
            *idle_tenants[: max(0, len(self._open_databases) - _MAX_OPEN_TENANTS)]
        )
        return database

    def is_open(self, tenant: str | None, database: OpenDatabase) -> bool:
        """Return whether the given database object is the tenant's currently open database."""
        return self._open_databases.get(tenant) is database

    @contextmanager
    def keep_open(self, tenant: str | None) -> Iterator[None]:
        """Prevent a tenant's database from being closed for inactivity until the `with` block ends.

        The database need not be open yet.
        """
        self._uses[tenant] += 1
        try:
            yield
        finally:
            self._uses[tenant] -= 1

    async def aclose(self) -> None:
        """Close the databases of all tenants."""
        await self._close_tenants(*self._open_databases)

    async def _open_database(self, tenant: str | None) -> OpenDatabase:
        """Open a tenant's database, and create the server's tables if they do not exist.

        Also check that the embeddings of the store come from the configured embedder.
        """
        database = self._create_saver_and_store(tenant)
        try:
            if self._creates_tables:
                await asyncio.to_thread(create_server_tables, database.saver)
            if "index" in self.options.store:
                await database.store.acheck_embedder()
            if self.has_organisations:
                await asyncio.to_thread(
                    record_that_owners_may_be_organisations, database.saver.database
                )
        except BaseException:
            await asyncio.gather(database.saver.aclose(), database.store.aclose())
            raise
        if self.options.store.get("ttl", {}).get("default_ttl"):
            database.store.start_ttl_sweeper()
        return database

    def _create_saver_and_store(self, tenant: str | None) -> OpenDatabase:
        """Create the checkpointer and the store of a tenant.

        Raises:
            ConfigurationError: There is a tenant, and the database is a file.
        """
        db, shared = self.settings.db, {"key": self.settings.key}
        saver_args, store_args = (
            {**shared, **self._saver_options},
            {**shared, **self.options.store},
        )
        if is_dsn(db):
            saver_args["direct"] = self.settings.direct
        if tenant is not None:
            saver_args |= {"tenant": tenant, "cache_bytes": _CACHE_BYTES}
            store_args |= {"tenant": tenant, "index_bytes": _INDEX_BYTES}
            if not is_dsn(db):
                raise ConfigurationError(
                    f"the user's identity has the tenant {tenant!r}, but the database {db!r} is a "
                    "file; tenants require a Postgres database"
                )
        saver_class, store_class = map(self._instrument, _choose_checkpointer_and_store_classes(db))
        return OpenDatabase(saver_class.open(db, **saver_args), store_class.open(db, **store_args))

    async def _close_tenants(self, *tenants: str | None) -> None:
        """Close the tenants' checkpointers and stores."""
        for part in chain(*map(self._open_databases.pop, tenants)):
            await part.aclose()


def _choose_checkpointer_and_store_classes(path_or_dsn: str) -> tuple[type[Any], type[Any]]:
    """Return the checkpointer class and the store class for a database."""
    if is_dsn(path_or_dsn):
        from perdure.checkpointers.postgres import PostgresCheckpointer
        from perdure.stores.postgres import PostgresStore

        return PostgresCheckpointer, PostgresStore
    return SQLiteCheckpointer, SQLiteStore

"""The databases of a server: that of the settings, and of tenants each its own."""

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
from perdure.checkpointers.owner_record import record_organisations
from perdure.checkpointers.thread_list import TimeToLive
from perdure.errors import ConfigurationError
from perdure.settings import Settings, is_dsn
from perdure.stores import SQLiteStore
from perdure.stores.whole_store import WholeStore

_MAX_OPEN_TENANTS: Final = 32  # tenants that are open
_CACHE_BYTES, _INDEX_BYTES = 16 << 20, 32 << 20  # of each tenant; connections they share


class OpenDatabase(NamedTuple):
    """The threads and the items of a database, or of a tenant of it."""

    saver: Checkpointer
    store: WholeStore


@dataclass(frozen=True)
class DatabaseOptions:
    """Options for the databases of a server, from the sections of a `langgraph.json`.

    Attributes:
        store: The options `index` and `ttl` with which stores are opened.
        thread_ttl: The time to live of new threads, or None if they stay until they are deleted.
    """

    store: Mapping[str, Any] = field(default_factory=dict)
    thread_ttl: TimeToLive | None = None


class Databases:
    """The database of the settings, opened when it is first used; of tenants, each its own.

    Of many tenants, those that were not asked for in the longest time are closed.

    Args:
        settings: Name the database.
        measured: Makes a subclass of a class of threads or items, whose methods are measured.
        saver_options: The options `types` and `aliases` of the checkpointers.
        options: The options of the stores and of new threads.
        has_organisations: Whether the `owner` of a thread may be an organisation. Each database
            that is opened then records this for `perdure.people`.
    """

    def __init__(
        self,
        settings: Settings,
        instrument: Callable[[Any], Any] = lambda plain: plain,
        saver_options: Mapping[str, Any] | None = None,
        options: DatabaseOptions | None = None,
        *,
        has_organisations: bool = False,
    ) -> None:
        self._has_organisations = has_organisations
        self._settings, self._instrument = settings, instrument
        self._options = options or DatabaseOptions()
        self._saver_options = dict(saver_options or {})
        self._parts: dict[str | None, OpenDatabase] = {}  # last is who asked last
        self._uses = Counter[str | None]()

    @property
    def search_threads(self) -> bool:
        """Whether what was said in threads is searched."""
        return self._settings.search_threads

    @property
    def thread_ttl(self) -> TimeToLive | None:
        """The time to live of new threads, or None."""
        return self._options.thread_ttl

    async def get_or_open(self, tenant: str | None) -> OpenDatabase:
        """Return the database of a tenant, which is opened if it is not open.

        Raises:
            EmbedderMismatch: The vectors of the store come from another embedder than the
                configured one.
        """
        parts = self._parts.pop(tenant, None)
        if parts is None:
            opened = await self._open_database(tenant)
            parts = self._parts.pop(tenant, None)  # another request may have opened it meanwhile
            if parts is None:
                parts = opened
            else:
                await asyncio.gather(opened.saver.aclose(), opened.store.aclose())
        idle = [each for each in self._parts if not self._uses[each]]
        self._parts[tenant] = parts
        await self._close_tenants(*idle[: max(0, len(self._parts) - _MAX_OPEN_TENANTS)])
        return parts

    def is_open(self, tenant: str | None, parts: OpenDatabase) -> bool:
        """Whether this is open."""
        return self._parts.get(tenant) is parts

    @contextmanager
    def keep_open(self, tenant: str | None) -> Iterator[None]:
        """While it lasts, what belongs to a tenant is not closed."""
        self._uses[tenant] += 1
        try:
            yield
        finally:
            self._uses[tenant] -= 1

    async def aclose(self) -> None:
        """Close all of it."""
        await self._close_tenants(*self._parts)

    async def _open_database(self, tenant: str | None) -> OpenDatabase:
        parts = self._create_parts(tenant)
        try:
            if "index" in self._options.store:
                await parts.store.acheck_embedder()
            if self._has_organisations:
                await asyncio.to_thread(record_organisations, parts.saver)
        except BaseException:
            await asyncio.gather(parts.saver.aclose(), parts.store.aclose())
            raise
        if self._options.store.get("ttl", {}).get("default_ttl"):
            parts.store.start_ttl_sweeper()
        return parts

    def _create_parts(self, tenant: str | None) -> OpenDatabase:
        db, options = self._settings.db, {"key": self._settings.key}
        of_saver, of_store = {**options, **self._saver_options}, {**options, **self._options.store}
        if is_dsn(db):
            of_saver["direct"] = self._settings.direct
        if tenant is not None:
            of_saver |= {"tenant": tenant, "cache_bytes": _CACHE_BYTES}
            of_store |= {"tenant": tenant, "index_bytes": _INDEX_BYTES}
            if not is_dsn(db):
                raise ConfigurationError(
                    f"the identity has the tenant {tenant!r}, and {db!r} is a file; tenants share "
                    "a database on Postgres only"
                )
        savers, stores = map(self._instrument, _choose_classes(db))
        return OpenDatabase(savers.open(db, **of_saver), stores.open(db, **of_store))

    async def _close_tenants(self, *tenants: str | None) -> None:
        for part in chain(*map(self._parts.pop, tenants)):
            await part.aclose()


def _choose_classes(db: str) -> tuple[Any, Any]:
    """The classes that open a database."""
    if is_dsn(db):
        from perdure.checkpointers.postgres import PostgresCheckpointer
        from perdure.stores.postgres import PostgresStore

        return PostgresCheckpointer, PostgresStore
    return SQLiteCheckpointer, SQLiteStore

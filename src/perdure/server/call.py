"""A request: who asks, and, once it is permitted, what of the database it may reach."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any, NamedTuple

from fastapi import Depends
from starlette.requests import HTTPConnection

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import ConfigurationError
from perdure.memory.recall import NAMESPACE
from perdure.server.access import Access, Action, Filter, Forbidden, Identity
from perdure.server.threads import Threads
from perdure.settings import Settings, is_dsn
from perdure.stores import open_store
from perdure.stores.whole_store import WholeStore


class Parts(NamedTuple):
    """The threads and the items of a database, or of a tenant of it."""

    saver: Checkpointer
    store: WholeStore


class Databases:
    """The database of the settings, opened when it is first asked for; of tenants, each its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._opened: dict[str | None, Parts] = {}
        self._stack, self._opening = AsyncExitStack(), asyncio.Lock()

    async def of(self, tenant: str | None) -> Parts:
        """What belongs to a tenant."""
        async with self._opening:
            if tenant not in self._opened:
                self._opened[tenant] = await self._open(tenant)
        return self._opened[tenant]

    async def aclose(self) -> None:
        """Close all of it."""
        await self._stack.aclose()

    async def _open(self, tenant: str | None) -> Parts:
        db, options = self._settings.db, {"key": self._settings.key}
        if tenant is not None:
            if not is_dsn(db):
                raise ConfigurationError(
                    f"the identity has the tenant {tenant!r}, and {db!r} is a file; tenants share "
                    "a database on Postgres only"
                )
            options["tenant"] = tenant
        saver = await self._stack.enter_async_context(open_checkpointer(db, **options))
        return Parts(saver, await self._stack.enter_async_context(open_store(db, **options)))


class Call:
    """A request for an action. The database is out of reach until `permit` was awaited."""

    def __init__(
        self, identity: Identity, action: Action, access: Access, databases: Databases
    ) -> None:
        self.identity, self.action = identity, action
        self._access, self._databases = access, databases
        self._parts: Parts | None = None
        self._filter: Filter = {}

    async def permit(self, value: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask whether the action is allowed; returns its value as a handler left it.

        Raises:
            Forbidden: It is not.
        """
        asked = dict(value or {})
        if self.action == "admin" and not self.identity.is_admin:
            raise Forbidden(f"{self.identity.user!r} may not see or change the whole database")
        if self.action != "admin":
            self._filter = await self._access.permit(self.identity, self.action, asked)
        self._parts = await self._databases.of(self.identity.tenant)
        return asked

    def another(self, action: Action) -> Call:
        """The same request for what it needs to be permitted as well, such as to read a source."""
        return Call(self.identity, action, self._access, self._databases)

    @property
    def saver(self) -> Checkpointer:
        """The checkpointer; which threads may be seen, `threads` tells."""
        return self._permitted().saver

    @property
    def store(self) -> WholeStore:
        """The store."""
        return self._permitted().store

    @property
    def threads(self) -> Threads:
        """The threads that may be reached."""
        return Threads(*self._permitted(), self._filter)

    @property
    def memories(self) -> tuple[str, ...]:
        """The namespace of the user's memories."""
        return (NAMESPACE[0], self.identity.user)

    def _permitted(self) -> Parts:
        if self._parts is None:
            raise RuntimeError(f"{self.action} reaches for the database before it is permitted")
        return self._parts


async def called(connection: HTTPConnection) -> Call:
    """The call that a request is."""
    state, access = connection.app.state, connection.app.state.access
    identity = await access.identify(connection)
    connection.state.user = identity.user
    endpoint = connection.scope["route"].endpoint
    return Call(identity, endpoint.action, access, state.databases)


Caller = Annotated[Call, Depends(called)]
"""An endpoint's argument."""

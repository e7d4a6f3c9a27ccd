"""A request: who asks, and, once it is permitted, what of the database it may reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from fastapi import Depends
from langchain_core.runnables import RunnableConfig
from starlette.requests import HTTPConnection

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import ConfigurationError
from perdure.memory.recall import NAMESPACE
from perdure.server.access import Access, Action, Filter, Forbidden, Identity
from perdure.server.threads import RESERVED, Threads
from perdure.settings import Settings, is_dsn
from perdure.stores import open_store
from perdure.stores.base import Namespace
from perdure.stores.whole_store import WholeStore

if TYPE_CHECKING:
    from perdure.server.runs import Runs
    from perdure.server.telemetry import Telemetry

IDS: Final = ("thread_id", "checkpoint_id", "run_id", "namespace", "key")
"""What an action is about, as the values of `permit` name it; the audit log keeps it."""
_OWN: Final = ("perdure", RESERVED)  # the first labels of perdure's own namespaces
_PAGE: Final = 1_000  # read at once, where such are left out
_MOST: Final = 32  # tenants that are open
_CACHE_BYTES, _INDEX_BYTES = 16 << 20, 32 << 20  # of each tenant; connections they share


class Parts(NamedTuple):
    """The threads and the items of a database, or of a tenant of it."""

    saver: Checkpointer
    store: WholeStore


class Databases:
    """The database of the settings, opened when it is first used; of tenants, each its own.

    Of many tenants, those that were not asked for in the longest time are closed.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry | None = None) -> None:
        self._settings, self._telemetry = settings, telemetry
        self.runs: Runs | None = None
        self._parts: dict[str | None, Parts] = {}  # last is who asked last
        self._uses = Counter[str | None]()

    async def of(self, tenant: str | None) -> Parts:
        """What belongs to a tenant."""
        parts = self._parts.pop(tenant, None) or self._opened(tenant)
        idle = [each for each in self._parts if not self._uses[each]]
        self._parts[tenant] = parts
        await self._close(*idle[: max(0, len(self._parts) - _MOST)])
        return parts

    @contextmanager
    def used(self, tenant: str | None) -> Iterator[None]:
        """While it lasts, what belongs to a tenant is not closed."""
        self._uses[tenant] += 1
        try:
            yield
        finally:
            self._uses[tenant] -= 1

    async def aclose(self) -> None:
        """Close all of it."""
        await self._close(*self._parts)

    def _opened(self, tenant: str | None) -> Parts:
        db, options = self._settings.db, {"key": self._settings.key}
        if tenant is None:
            parts = Parts(open_checkpointer(db, **options), open_store(db, **options))
        elif is_dsn(db):
            options["tenant"] = tenant
            saver = open_checkpointer(db, cache_bytes=_CACHE_BYTES, **options)
            parts = Parts(saver, open_store(db, index_bytes=_INDEX_BYTES, **options))
        else:
            raise ConfigurationError(
                f"the identity has the tenant {tenant!r}, and {db!r} is a file; tenants share "
                "a database on Postgres only"
            )
        if self._telemetry is not None:
            self._telemetry.watch(parts)
        return parts

    async def _close(self, *tenants: str | None) -> None:
        for part in chain(*map(self._parts.pop, tenants)):
            await part.aclose()


class Call:
    """A request for an action. The database is out of reach until `permit` was awaited."""

    def __init__(
        self, identity: Identity, action: Action, access: Access, databases: Databases
    ) -> None:
        self.identity, self.action = identity, action
        self._access, self._databases = access, databases
        self._parts: Parts | None = None
        self._filter: Filter = {}
        self.recorded: list[dict[str, Any]] = []  # for each `permit`

    def record(self, **ids: Any) -> None:
        """Add to the record of the audit log: ids, or `hashes` of a receipt; never content."""
        self.recorded[-1:] = [{**each, **ids} for each in self.recorded[-1:] or [{}]]

    async def permit(self, value: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask whether the action is allowed; returns its value as a handler left it.

        Raises:
            Forbidden: It is not.
        """
        asked = dict(value or {})
        self.recorded.append({name: asked[name] for name in IDS if asked.get(name) is not None})
        if self.action == "admin" and not self.identity.is_admin:
            raise Forbidden(f"{self.identity.user!r} may not see or change the whole database")
        if self.action != "admin":
            self._filter = await self._access.permit(self.identity, self.action, asked)
        writes = self.action in ("store:put", "store:delete")
        if is_own(asked.get("namespace") or ()) and (writes or not self.identity.is_admin):
            raise Forbidden(f"{asked['namespace']!r} is one of perdure's own namespaces")
        self._parts = await self._databases.of(self.identity.tenant)
        return asked

    def used(self) -> AbstractContextManager[None]:
        """While it lasts, the database stays open; for what goes on after the reply."""
        return self._databases.used(self.identity.tenant)

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
        runs, tenant, parts = self._databases.runs, self.identity.tenant, self._permitted()
        if runs is None:
            return Threads(*parts, self._filter)
        about = partial(runs.active, tenant), partial(runs.forget, tenant)
        return Threads(*parts, self._filter, *about)

    async def listed(
        self, read: Callable[..., Awaitable[list[Any]]], *given: Any, **options: Any
    ) -> list[Any]:
        """What a list or a search of the store returns; perdure's own only to an admin."""
        prefix = given[0] if given else options["prefix"]
        if self.identity.is_admin or (prefix or "*")[0] != "*":
            return await read(*given, **options)
        found: list[Any] = []
        start, at = options.pop("offset"), 0
        if start > 10 * _PAGE:  # to leave out perdure's own, all that is before it is read
            raise ConfigurationError(f"offset is {start}; expected at most 10,000, or a prefix")
        end = start + options.pop("limit")
        size = min(end, _PAGE)
        while len(found) < end:
            page = await read(*given, **options, limit=size, offset=at)
            found += [each for each in page if not is_own(getattr(each, "namespace", each))]
            if len(page) < size:
                break
            at, size = at + size, _PAGE
        return found[start:end]

    @property
    def memories(self) -> tuple[str, ...]:
        """The namespace of the user's memories."""
        return (NAMESPACE[0], self.identity.user)

    def _permitted(self) -> Parts:
        if self._parts is None:
            raise RuntimeError(f"{self.action} reaches for the database before it is permitted")
        return self._parts


def is_own(namespace: Sequence[str]) -> bool:
    """Whether a namespace is one of perdure's own, which nobody writes to by hand."""
    return bool(namespace) and namespace[0] in _OWN


def verbatim(namespace: Namespace) -> tuple[Namespace, RunnableConfig]:
    """A template that is filled in to be a namespace, whatever its labels hold; what fills it."""
    labels = {f"label_{number}": label for number, label in enumerate(namespace)}
    return tuple(f"{{{name}}}" for name in labels), {"configurable": labels}


async def called(connection: HTTPConnection) -> AsyncIterator[Call]:
    """The call that a request is, until its reply was sent."""
    state, access = connection.app.state, connection.app.state.access
    known = getattr(connection.state, "identity", None)
    identity: Identity = known or await access.identify(connection)
    connection.state.user = identity.user
    endpoint = connection.scope["route"].endpoint
    call = Call(identity, endpoint.action, access, state.databases)
    connection.state.call = call
    await state.audit.check(endpoint.action, connection.scope["method"])
    with state.clients.one((identity.tenant, identity.user)), call.used():
        yield call


Caller = Annotated[Call, Depends(called)]
"""An endpoint's argument."""

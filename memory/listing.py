"""Memories of one namespace, read: by id, by query, one after another, version by version."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.memory.effects import Effects, arun, run
from perdure.memory.options import whole
from perdure.memory.records import Memory
from perdure.memory.store_adapter import StoreAdapter, adapter_of, namespace_of
from perdure.memory.templates import Template
from perdure.stores.base import Namespace
from perdure.stores.namespaces import check_key

Memories = list[Memory]
_PAGE: Final = 32  # memories read at least, where some may be of a namespace further down


class Readable:
    """The part of a collection that reads.

    Args:
        store: Any; None: within a graph, the store it was compiled with.
        namespace: Labels; see `Template`.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(self, store: BaseStore | None, namespace: tuple[str, ...]) -> None:
        self.store: BaseStore | None = None if store is None else StoreAdapter(store).store
        self.namespace = Template(namespace)

    def get(
        self, key: str, *, config: RunnableConfig | None = None, as_of: datetime | None = None
    ) -> Memory | None:
        """A memory, now or at a moment of the past; None: there is none.

        Raises:
            ConfigurationError: There is no store, it keeps no past, or the config does not fill the
                namespace.
        """
        adapter, namespace = self._place(config)
        return run(adapter.got(namespace, check_key(key), as_of))

    async def aget(
        self, key: str, *, config: RunnableConfig | None = None, as_of: datetime | None = None
    ) -> Memory | None:
        """See `get`."""
        adapter, namespace = self._place(config)
        return await arun(adapter.got(namespace, check_key(key), as_of))

    def search(
        self,
        query: str,
        *,
        limit: int = 10,
        filter: Mapping[str, Any] | None = None,
        as_of: datetime | None = None,
        explain: bool = False,
        config: RunnableConfig | None = None,
    ) -> Memories:
        """The memories that answer a query, best first.

        Args:
            query: Words of the user.
            limit: How many at most.
            filter: What values must meet.
            as_of: At that moment of the past.
            explain: Say what each score is the sum of; see `Memory.parts`.
            config: Of the run.

        Raises:
            ConfigurationError: An argument is wrong; see also `get`.
            InvalidFilter: The store does not take the filter.
        """
        asked = {"filter": filter, "as_of": as_of, "explain": explain}
        return run(self.searching(query, limit=limit, config=config, **asked))

    async def asearch(
        self,
        query: str,
        *,
        limit: int = 10,
        filter: Mapping[str, Any] | None = None,
        as_of: datetime | None = None,
        explain: bool = False,
        config: RunnableConfig | None = None,
    ) -> Memories:
        """See `search`."""
        asked = {"filter": filter, "as_of": as_of, "explain": explain}
        return await arun(self.searching(query, limit=limit, config=config, **asked))

    def history(self, key: str, *, config: RunnableConfig | None = None) -> Memories:
        """All versions of a memory, oldest first, also of one that is deleted.

        A store without versions has the present one; what that said before is in its `previous`.
        """
        adapter, namespace = self._place(config)
        return run(adapter.versions(namespace, check_key(key)))

    async def ahistory(self, key: str, *, config: RunnableConfig | None = None) -> Memories:
        """See `history`."""
        adapter, namespace = self._place(config)
        return await arun(adapter.versions(namespace, check_key(key)))

    def list(
        self,
        *,
        limit: int = 100,
        offset: int = 0,
        kind: str | None = None,
        config: RunnableConfig | None = None,
    ) -> Memories:
        """The memories there are, in the store's order; perdure's: as they were made, oldest first.

        Args:
            limit: How many at most.
            offset: How many to leave out.
            kind: Only those of this kind.
            config: Of the run.

        Raises:
            ConfigurationError: An argument is wrong; see also `get`.
        """
        return run(self._listing(config, limit, offset, _of_kind(kind)))

    async def alist(
        self,
        *,
        limit: int = 100,
        offset: int = 0,
        kind: str | None = None,
        config: RunnableConfig | None = None,
    ) -> Memories:
        """See `list`."""
        return await arun(self._listing(config, limit, offset, _of_kind(kind)))

    # -- steps, which tools take too

    def searching(
        self, query: str, *, limit: int, config: RunnableConfig | None, **asked: Any
    ) -> Effects[Memories]:
        """See `search`."""
        return self._listing(config, limit, 0, {"query": query, **asked})

    def _place(self, config: RunnableConfig | None) -> tuple[StoreAdapter, Namespace]:
        return adapter_of(self.store), namespace_of(self.namespace, config)

    def _listing(
        self, config: RunnableConfig | None, limit: int, offset: int, asked: Mapping[str, Any]
    ) -> Effects[Memories]:
        whole("limit", limit, 1)
        whole("offset", offset, 0)
        adapter, namespace = self._place(config)
        return listing(adapter, namespace, limit, offset, asked)


def listing(
    adapter: StoreAdapter, namespace: Namespace, limit: int, offset: int, asked: Mapping[str, Any]
) -> Effects[Memories]:
    """Memories of a namespace itself, where a store's search takes those under it as well."""
    if adapter.versioned and asked.get("query") is None:  # by namespace, the outermost first
        page = yield from adapter.found(namespace, limit=limit, offset=offset, **asked)
        return [memory for memory in page if memory.namespace == namespace]
    found: Memories = []
    seen, size = 0, max(offset + limit, _PAGE)
    while len(found) < offset + limit:
        page = yield from adapter.found(namespace, limit=size, offset=seen, **asked)
        found += [memory for memory in page if memory.namespace == namespace]
        if len(page) < size:
            break
        seen, size = seen + size, 2 * size
    return found[offset : offset + limit]


def _of_kind(kind: str | None) -> dict[str, Any]:
    return {} if kind is None else {"filter": {"kind": kind}}

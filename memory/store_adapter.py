"""A store as memories need it: perdure's with versions and provenance, others as far as they go.

Another store keeps provenance in a field of the value, has no past, and writes without conditions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore, InvalidNamespaceError

from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.memory.effects import Effect, Effects
from perdure.memory.records import Memory
from perdure.memory.run_config import Versioned, store_of_graph
from perdure.memory.store_items import FORMERLY, memory_of, plain
from perdure.memory.templates import Template
from perdure.stores.base import Namespace, Provenance, PutItem

RESERVED: Final = "perdure"
"""The first label of what perdure keeps beside memories: its notes on threads, the quarantine."""
QUARANTINE: Final = "quarantine"
BURIED: Final = "buried"
CHANGED: Final = "changed"
FORMED: Final = "formed"
WAITING: Final = "waiting"
NOTES: Final = (QUARANTINE, BURIED, CHANGED, FORMED, WAITING)
"""The second labels: what waits for review, what is gone, that something was changed, up to where
threads are formed, which wait to be."""
_FORMER: Final = 10  # texts that a memory notes of its past
SEARCHED: Final = ["text"]
"""What of a memory is searched, and no label or date beside it."""
_PAGE: Final = 1_000  # memories read at once


class StoreAdapter:
    """A store, for memories.

    Its methods are steps, which `drivers.run` and `drivers.arun` take.

    Args:
        store: Any; what needs versions or provenance goes better on perdure's.

    Raises:
        ConfigurationError: It is no store.
    """

    def __init__(self, store: Any) -> None:
        if not isinstance(store, BaseStore):
            raise ConfigurationError(
                f"the store is {store!r:.80}; expected a BaseStore, like "
                "perdure.stores.SQLiteStore.open(path)"
            )
        self.store: Any = store
        self.versioned = isinstance(store, Versioned)

    # -- reading

    def got(
        self, namespace: Namespace, key: str, as_of: datetime | None = None
    ) -> Effects[Memory | None]:
        """A memory; None if there is none.

        Raises:
            ConfigurationError: `as_of` is asked of a store without a past.
        """
        options = self._past(as_of)
        item = yield from _asked(
            lambda: self.store.get(namespace, key, **options),
            lambda: self.store.aget(namespace, key, **options),
        )
        return None if item is None else memory_of(item)

    def found(
        self,
        prefix: Namespace,
        *,
        query: str | None = None,
        filter: Mapping[str, Any] | None = None,
        limit: int = 10,
        offset: int = 0,
        as_of: datetime | None = None,
        **options: Any,
    ) -> Effects[list[Memory]]:
        """Memories under a prefix; those that answer a query, best first.

        Args:
            prefix: Labels.
            query: Words of the user.
            filter: Of values.
            limit: How many at most.
            offset: How many to leave out.
            as_of: At that moment.
            options: Of perdure's `search`; another store is not told of them.

        Raises:
            ConfigurationError: `as_of` is asked of a store without a past.
        """
        given: dict[str, Any] = {
            "query": query,
            "filter": filter,
            "limit": limit,
            "offset": offset,
            **self._past(as_of),
            **(options if self.versioned else {}),
        }
        items = yield from _asked(
            lambda: self.store.search(prefix, **given),
            lambda: self.store.asearch(prefix, **given),
        )
        return [memory_of(item) for item in items]

    def every(
        self, prefix: Namespace, *, most: int | None = None, **asked: Any
    ) -> Effects[list[Memory]]:
        """All memories under a prefix, read page by page.

        Args:
            prefix: Labels.
            most: How many at most; None: however many there are.
            asked: See `found`.
        """
        memories: list[Memory] = []
        while most is None or len(memories) < most:
            size = _PAGE if most is None else min(_PAGE, most - len(memories))
            page = yield from self.found(prefix, limit=size, offset=len(memories), **asked)
            memories += page
            if len(page) < size:
                break
        return memories

    def versions(self, namespace: Namespace, key: str) -> Effects[list[Memory]]:
        """All versions of a memory, oldest first; of a store without any, the present one."""
        if not self.versioned:
            present = yield from self.got(namespace, key)
            return [] if present is None else [present]
        items = yield Effect(
            lambda: self.store.history(namespace, key),
            lambda: self.store.ahistory(namespace, key),
        )
        return [memory_of(item) for item in items]

    # -- writing

    def written(self, puts: Sequence[PutItem]) -> Effects[None]:
        """Write as one: all of it or, in a store with versions, nothing.

        Raises:
            VersionConflict: An item is not at the version that was expected; nothing is written.
            PerdureError: See `Store.put`.
        """
        if not puts:
            return
        ops: list[Any] = list(puts) if self.versioned else [plain(put) for put in puts]
        yield from _asked(lambda: self.store.batch(ops), lambda: self.store.abatch(ops))

    def _past(self, as_of: datetime | None) -> dict[str, Any]:
        if as_of is None:
            return {}
        if not self.versioned:
            raise ConfigurationError(
                f"as_of={as_of.isoformat()} is asked of a {type(self.store).__name__}, which keeps "
                "no past; use perdure.stores.SQLiteStore"
            )
        return {"as_of": as_of}


def adapter_of(store: BaseStore | None) -> StoreAdapter:
    """The adapter of a store; None: within a graph, of the one it was compiled with.

    Raises:
        ConfigurationError: There is none.
    """
    return StoreAdapter(store_of_graph("the memories") if store is None else store)


def namespace_of(template: Template, config: RunnableConfig | None) -> Namespace:
    """The namespace of a run's memories.

    Raises:
        InvalidConfig: The config does not fill the template.
        InvalidNamespace: It would be where perdure keeps its own notes.
    """
    namespace = template.filled(config)
    if namespace[0] == RESERVED:
        raise InvalidNamespace(
            f"the namespace {namespace!r} begins with {RESERVED!r}, where perdure keeps its own "
            "notes; expected another first label, like 'memories'"
        )
    return namespace


def put_of(
    namespace: Namespace,
    key: str,
    value: Mapping[str, Any],
    *,
    provenance: Provenance | None = None,
    if_version: int | None = None,
    searched: bool = True,
) -> PutItem:
    """The operation that writes a memory, or with `searched=False` a note that no query finds."""
    return PutItem(
        namespace,
        key,
        value,
        SEARCHED if searched else False,
        if_version=if_version,
        provenance=provenance,
    )


def note_of(
    namespace: Namespace, key: str, value: Mapping[str, Any], *, if_version: int | None = None
) -> PutItem:
    """The operation that writes a note of perdure's own.

    No query finds it, and it does not expire, whatever the store's default.
    """
    put = put_of(namespace, key, value, if_version=if_version, searched=False)
    return replace(put, ttl=None)


def notes_of(kind: str, namespace: Namespace) -> Namespace:
    """Where notes on the memories of a namespace are kept.

    Args:
        kind: One of `NOTES`.
        namespace: Of the memories.
    """
    return (RESERVED, kind, *namespace)


def quarantine_of(namespace: Namespace) -> Namespace:
    """Where what would be a memory of a namespace waits for review."""
    return notes_of(QUARANTINE, namespace)


def removal_of(namespace: Namespace, key: str, if_version: int | None = None) -> PutItem:
    """The operation that deletes a memory; a store with versions keeps them."""
    return PutItem(namespace, key, None, if_version=if_version)


def succeeding(
    former: Memory, value: Mapping[str, Any], change: str, until: datetime | None = None
) -> dict[str, Any]:
    """The value of a memory's next version: what the former one said is noted, if it differs.

    Args:
        former: The memory as it is.
        value: The next one's text, kind and fields.
        change: `"superseded"` or `"updated"`; see `Previous`.
        until: Until when the former one held; None: until now.
    """
    past = list(former.value.get(FORMERLY, ()))
    if value["text"] != former.text:
        when = until or datetime.now(UTC)
        entry = {"text": former.text, "until": when.isoformat(), "change": change}
        past = [entry, *past][:_FORMER]
    return {**value, FORMERLY: past} if past else dict(value)


def _asked(blocking: Callable[[], Any], awaiting: Callable[[], Awaitable[Any]]) -> Effects[Any]:
    try:
        return (yield Effect(blocking, awaiting))
    except InvalidNamespaceError as exc:  # langgraph's own stores take no dots, say
        raise InvalidNamespace(
            f"the store refuses the namespace ({exc}); use perdure.stores.SQLiteStore, which takes "
            "any labels, or labels without periods"
        ) from exc

"""The quarantine: what the gate held back, to be looked at, and released or discarded."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import UnknownMemory
from perdure.memory.collection.forgetting import Forgets
from perdure.memory.effects import Effect, Effects, arun, run
from perdure.memory.gate.detectors import DETECTORS, redacted, spans_of
from perdure.memory.records import Memory, Outcome, Role
from perdure.memory.store_adapter import (
    StoreAdapter,
    adapter_of,
    namespace_of,
    put_of,
    quarantine_of,
    removal_of,
    succeeding,
)
from perdure.memory.templates import Template
from perdure.memory.tombstones import tombstone
from perdure.stores.base import Namespace, Provenance


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that waits in quarantine.

    Attributes:
        key: Its id here.
        shown: What it says, with secrets and contacts blotted out.
        reason: Why it is here.
        check: The gate's check that put it here.
        kind: The kind of memory it would be.
        role: Whose words it rests on.
        at: Since when it is here (UTC).
        memory_key: The key it would have as a memory.
        provenance: Where it comes from.
        text: What it says, as it was said.
        fields: What would be kept with it.
    """

    key: str
    shown: str
    reason: str
    check: str
    kind: str
    role: Role
    at: datetime
    memory_key: str
    provenance: Provenance | None
    text: str = field(repr=False)
    fields: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.key}: {self.shown} ({self.reason})"


Entries = list[Entry]


class Quarantine:
    """What the gate held back in a namespace.

    Methods that begin with `a` are the async forms. `config` is that of the run; None: within a
    node, the run it belongs to. Texts are kept here as they were said, secrets too: on an encrypted
    store, encrypted. `store.forget(namespace)` leaves them here; `Collection.forget_all` does not.

    Args:
        store: That of the memories. None: within a graph, the store it was compiled with.
        namespace: That of the memories; see `Template`.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("memories", "{user_id}"),
    ) -> None:
        self.store: BaseStore | None = None if store is None else StoreAdapter(store).store
        self.namespace = Template(namespace)

    def list(self, config: RunnableConfig | None = None) -> Entries:
        """What waits, longest first.

        Raises:
            ConfigurationError: There is no store, or the config does not fill the namespace.
        """
        return run(_listing(*self._place(config)))

    async def alist(self, config: RunnableConfig | None = None) -> Entries:
        """See `list`."""
        return await arun(_listing(*self._place(config)))

    def release(self, key: str, config: RunnableConfig | None = None) -> Outcome:
        """Make an entry the memory it would have been, as it was said, without judging it again.

        A memory that has its key by now is updated, and notes what it said before.

        Raises:
            UnknownMemory: There is no such entry.
            ConfigurationError: See `list`.
            VersionConflict: Another has changed that memory, or this entry; nothing is written.
        """
        return run(_releasing(*self._place(config), key))

    async def arelease(self, key: str, config: RunnableConfig | None = None) -> Outcome:
        """See `release`."""
        return await arun(_releasing(*self._place(config), key))

    def discard(self, key: str, config: RunnableConfig | None = None) -> Outcome:
        """Let an entry go for good, and note by a hash that it is not to be formed again.

        On perdure's stores nothing of it is left in the file.

        Raises:
            UnknownMemory: There is no such entry.
            ConfigurationError: See `list`.
        """
        return run(_discarding(*self._place(config), key))

    async def adiscard(self, key: str, config: RunnableConfig | None = None) -> Outcome:
        """See `discard`."""
        return await arun(_discarding(*self._place(config), key))

    def _place(self, config: RunnableConfig | None) -> tuple[StoreAdapter, Namespace]:
        return adapter_of(self.store), namespace_of(self.namespace, config)


def _listing(adapter: StoreAdapter, namespace: Namespace) -> Effects[Entries]:
    place = quarantine_of(namespace)
    found = yield from adapter.every(place)
    entries = [_entry(each) for each in found if each.namespace == place]
    return sorted(entries, key=lambda entry: entry.at)


def _releasing(adapter: StoreAdapter, namespace: Namespace, key: str) -> Effects[Outcome]:
    found = yield from _found(adapter, namespace, key)
    entry = _entry(found)
    value: dict[str, Any] = {**entry.fields, "text": entry.text, "kind": entry.kind}
    former = yield from adapter.got(namespace, entry.memory_key)
    if former is not None:
        value = succeeding(former, value, "updated")
    version = 0 if former is None else former.version
    put = put_of(
        namespace, entry.memory_key, value, provenance=entry.provenance, if_version=version
    )
    yield from adapter.written([put, removal_of(quarantine_of(namespace), key, found.version)])
    yield from _erasing(adapter, namespace, key)  # or what the memory says were still kept here
    return Outcome("added" if former is None else "updated", entry.memory_key)


def _discarding(adapter: StoreAdapter, namespace: Namespace, key: str) -> Effects[Outcome]:
    found = yield from _found(adapter, namespace, key)
    puts = [tombstone(namespace, found.text, "forgotten")]
    if not isinstance(adapter.store, Forgets):
        puts.append(removal_of(quarantine_of(namespace), key))
    yield from adapter.written(puts)
    yield from _erasing(adapter, namespace, key)
    return Outcome("deleted", key)


def _erasing(adapter: StoreAdapter, namespace: Namespace, key: str) -> Effects[None]:
    store: Any = adapter.store
    if isinstance(store, Forgets):
        place = quarantine_of(namespace)
        yield Effect(lambda: store.forget(place, key=key), lambda: store.aforget(place, key=key))


def _found(adapter: StoreAdapter, namespace: Namespace, key: str) -> Effects[Memory]:
    found = yield from adapter.got(quarantine_of(namespace), key)
    if found is None:
        raise UnknownMemory(
            f"no entry {key!r:.80} waits in the quarantine of {namespace!r}; list() tells those "
            "that do"
        )
    return found


def _entry(found: Memory) -> Entry:
    value = found.value
    return Entry(
        key=found.key,
        shown=redacted(found.text, spans_of(found.text, DETECTORS)),
        reason=value["reason"],
        check=value["check"],
        kind=value["kind"],
        role=value["role"],
        at=datetime.fromisoformat(value["at"]),
        memory_key=value["key"],
        provenance=found.provenance,
        text=found.text,
        fields=value["fields"],
    )

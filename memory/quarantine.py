"""The quarantine: entries that the gate held back, to be released or discarded after review."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.effects import awaiting, blocking
from perdure.errors import UnknownMemory
from perdure.memory import store_adapter
from perdure.memory.erasure import erased
from perdure.memory.gate import note_on
from perdure.memory.records import Memory, Outcome, Role
from perdure.memory.run_config import Template
from perdure.memory.sameness import digest
from perdure.memory.store_adapter import QUARANTINE, StoreAdapter, adapter_of, notes_of
from perdure.stores.base import Namespace, Provenance


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """A candidate in quarantine since `at` (UTC), by a `check` of the gate and for a `reason`.

    `key` is its id here, `memory_key` the key that the memory would have. `shown` is its text,
    redacted; `text` and `fields` are as they came. `role` says whose words it rests on.
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


Entries = list[QuarantineEntry]  # within the class `list` is a method


class Quarantine:
    """The entries that the gate held back from a namespace; for the arguments see `Collection`.

    Methods that begin with `a` are async. Texts are kept as they came, secrets too, and encrypted
    in an encrypted store. `store.forget(namespace)` leaves them; `Collection.forget_all` does not.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("memories", "{user_id}"),
    ) -> None:
        self.store: BaseStore | None = None if store is None else StoreAdapter(store).store
        self.namespace = Template(namespace)

    async def _list(self, config: RunnableConfig | None = None) -> Entries:
        """The entries, oldest first."""
        adapter, _, place = self._places(config)
        found = await adapter.every(place)
        return sorted(map(_entry, found), key=lambda entry: entry.at)

    async def _release(self, key: str, config: RunnableConfig | None = None) -> Outcome:
        """Make an entry the memory that it would have been, without judging it again.

        A memory of that key is updated. If it, or the entry, was changed meanwhile, this is a
        `VersionConflict`, and nothing is written.
        """
        adapter, namespace, place = self._places(config)
        found = await _found(adapter, place, key)
        entry = _entry(found)
        value: dict[str, Any] = {**entry.fields, "text": entry.text, "kind": entry.kind}
        before = await adapter.got(namespace, entry.memory_key)
        if before is not None:
            value = store_adapter.succeeding(before, value, "updated")
        put = store_adapter.put_of(namespace, entry.memory_key, value, provenance=entry.provenance)
        put = replace(put, if_version=0 if before is None else before.version)
        await adapter.written([put, store_adapter.removal_of(place, key, found.version)])
        await erased(adapter, place, key)  # the versions of the entry have the text too
        return Outcome("added" if before is None else "updated", entry.memory_key)

    async def _discard(self, key: str, config: RunnableConfig | None = None) -> Outcome:
        """Erase an entry; a tombstone keeps it from being extracted again."""
        adapter, namespace, place = self._places(config)
        found = await _found(adapter, place, key)
        await adapter.written([note_on(namespace, digest(found.text), "forgotten")])
        await erased(adapter, place, key)
        return Outcome("deleted", key)

    list, alist = blocking(_list), awaiting(_list)
    release, arelease = blocking(_release), awaiting(_release)
    discard, adiscard = blocking(_discard), awaiting(_discard)

    def _places(self, config: RunnableConfig | None) -> tuple[StoreAdapter, Namespace, Namespace]:
        namespace = store_adapter.namespace_of(self.namespace, config)
        return adapter_of(self.store), namespace, notes_of(QUARANTINE, namespace)


async def _found(adapter: StoreAdapter, place: Namespace, key: str) -> Memory:
    found = await adapter.got(place, key)
    if found is None:
        raise UnknownMemory(f"there is no entry {key!r:.80} in {place!r}; list() shows all")
    return found


def _entry(found: Memory) -> QuarantineEntry:
    value = found.value
    return QuarantineEntry(
        key=found.key,
        at=datetime.fromisoformat(value["at"]),
        memory_key=value["key"],
        provenance=found.provenance,
        text=found.text,
        **{name: value[name] for name in ("shown", "reason", "check", "kind", "role", "fields")},
    )

"""Changes to memories: one is added, put right, superseded or deleted; what it said before stays.

A change is read, judged and written as one: if another comes between, it is read and judged again.
So the same fact, told twice at once, is kept once, and no correction is lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal

from perdure.errors import ConfigurationError, LimitExceeded
from perdure.memory.admission import Admitted, admit
from perdure.memory.collection.forgetting import UNNOTED, unknown
from perdure.memory.collection.shaping import OWN, TEXT, Given, MemoryShape
from perdure.memory.conflicts import persevering, taking_turns
from perdure.memory.effects import Effects
from perdure.memory.gate import Gate
from perdure.memory.listing import listing
from perdure.memory.records import Candidate, Memory, Outcome, Role
from perdure.memory.store_adapter import StoreAdapter, quarantine_of, removal_of, succeeding
from perdure.memory.tombstones import tombstones_of
from perdure.stores.base import Namespace, Provenance

Replacement = Literal["updated", "superseded"]
_KEY: Final = 9  # characters of an id, which a model can still copy
_LETTERS: Final = "23456789abcdefghjkmnpqrstuvwxyz"  # none of them is taken for another
_SAYS_SO: Final = "it says so already"


@dataclass(frozen=True, slots=True)
class Telling:
    """What is to be kept, and who told it.

    Attributes:
        given: The memory.
        provenance: Where it comes from.
        role: Whose words it rests on.
        by_model: Whether a model asks for it, by a tool.
    """

    given: Given
    provenance: Provenance
    role: Role = "user"
    by_model: bool = False


@dataclass(frozen=True, slots=True)
class Changing:
    """The changes to memories of a namespace, as steps.

    Attributes:
        adapter: Their store.
        namespace: Their namespace.
        gate: What decides on what is kept.
        shape: What they look like.
        kind: The kind of those that are added.
    """

    adapter: StoreAdapter
    namespace: Namespace
    gate: Gate
    shape: MemoryShape
    kind: str

    def inserting(self, telling: Telling, key: str | None = None) -> Effects[Outcome]:
        """Add a memory, unless it is there already; see `Collection.insert`."""
        value = self.shape.value(telling.given)
        return persevering(
            self.adapter, self.namespace, lambda: self._inserted(value, telling, key)
        )

    def putting(self, telling: Telling, key: str) -> Effects[Outcome]:
        """Add a memory under a key, or put the one right that has it."""
        value = self.shape.value(telling.given)

        def put() -> Effects[Outcome]:
            if (yield from self.adapter.got(self.namespace, key)) is None:
                return (yield from self._inserted(value, telling, key))
            return (yield from self._replaced(key, telling, "updated", None))

        return persevering(self.adapter, self.namespace, put)

    def replacing(
        self, key: str, telling: Telling, change: Replacement, at: datetime | None = None
    ) -> Effects[Outcome]:
        """Let a memory say something else; see `Collection.update` and `supersede`."""
        return persevering(
            self.adapter, self.namespace, lambda: self._replaced(key, telling, change, at)
        )

    def deleting(self, key: str) -> Effects[Outcome]:
        """Close a memory; see `Collection.delete`."""
        return persevering(self.adapter, self.namespace, lambda: self._deleted(key))

    # -- one attempt

    def _inserted(
        self, value: dict[str, Any], telling: Telling, key: str | None
    ) -> Effects[Outcome]:
        turn = yield from taking_turns(self.adapter, self.namespace)
        there = None if key is None else (yield from self.adapter.got(self.namespace, key))
        if there is not None:
            if given_of(there) == value:
                return Outcome("unchanged", there.key, _SAYS_SO)
            raise ConfigurationError(
                f"the key {key!r} is that of another memory in {self.namespace!r}; update or "
                "supersede that one, or leave key= out for a new one"
            )
        candidate = self._candidate(value, self.kind, telling)
        wanted = key or (yield from self._new_key())
        kept = yield from self._judged(candidate, wanted, self.adapter)
        [outcome] = kept.outcomes
        if outcome.change == "quarantined" and key is None:
            known = yield from self._waiting(candidate)
            if known is not None:  # from an earlier attempt, which had another id
                return replace(outcome, key=known.key)
        puts = kept.puts
        if outcome.change == "added":
            puts = [*(replace(put, if_version=0) for put in puts), *turn]
        yield from self.adapter.written(puts)
        return outcome

    def _replaced(
        self, key: str, telling: Telling, change: Replacement, at: datetime | None
    ) -> Effects[Outcome]:
        turn = yield from taking_turns(self.adapter, self.namespace)
        former = yield from self._present(key)
        value = self.shape.value(telling.given, former.value)
        if value == given_of(former):
            return Outcome("unchanged", key, _SAYS_SO)
        candidate = self._candidate(value, former.kind, telling)
        kept = yield from self._judged(candidate, key, _Without(self.adapter, former))
        [outcome], puts = kept.outcomes, kept.puts
        if outcome.change == "added":
            [judged] = puts
            if _given(judged.value or {}) == given_of(former):  # but for what is blotted out
                return Outcome("unchanged", key, _SAYS_SO)
            value = succeeding(former, judged.value or {}, change, at)
            puts = [replace(judged, value=value, if_version=former.version), *turn]
            outcome = replace(outcome, change=change)
        yield from self.adapter.written(puts)
        return outcome

    def _deleted(self, key: str) -> Effects[Outcome]:
        memory = yield from self._present(key)
        removal = removal_of(self.namespace, key, memory.version)
        said = yield from self.adapter.versions(self.namespace, key)
        notes = [note for version in (*said, memory) for note in tombstones_of(version, "deleted")]
        try:
            yield from self.adapter.written([removal, *notes])
        except LimitExceeded:  # who has no room left may still delete
            yield from self.adapter.written([removal])
            return Outcome("deleted", key, UNNOTED)
        return Outcome("deleted", key)

    # -- parts of one

    def _present(self, key: str) -> Effects[Memory]:
        """The memory as it is.

        Raises:
            UnknownMemory: There is none, or it is something else, say instructions.
        """
        memory = yield from self.adapter.got(self.namespace, key)
        if memory is None or not isinstance(memory.value.get(TEXT), str):
            raise unknown(self.namespace, key)
        return memory

    def _candidate(self, value: Mapping[str, Any], kind: str, telling: Telling) -> Candidate:
        fields = {name: part for name, part in value.items() if name != TEXT}
        return Candidate(
            value[TEXT],
            kind,
            fields,
            telling.provenance,
            telling.role,
            explicit=True,
            by_model=telling.by_model,
        )

    def _judged(self, candidate: Candidate, key: str, adapter: StoreAdapter) -> Effects[Admitted]:
        return admit(self.gate, adapter, self.namespace, [candidate], [key])

    def _waiting(self, candidate: Candidate) -> Effects[Memory | None]:
        """What waits for review in the same words."""
        same = {"filter": {TEXT: candidate.text, "kind": candidate.kind}}
        found = yield from listing(self.adapter, quarantine_of(self.namespace), 1, 0, same)
        return found[0] if found else None

    def _new_key(self) -> Effects[str]:
        while True:
            key = "".join(secrets.choice(_LETTERS) for _ in range(_KEY))
            if (yield from self.adapter.got(self.namespace, key)) is None:
                return key


class _Without(StoreAdapter):
    """A store in which one memory says nothing: what takes its place is judged beside others."""

    def __init__(self, adapter: StoreAdapter, memory: Memory) -> None:
        super().__init__(adapter.store)
        self._place = memory.namespace, memory.key

    def found(self, prefix: Namespace, **asked: Any) -> Effects[list[Memory]]:
        memories = yield from super().found(prefix, **asked)
        return [
            replace(memory, text="") if (memory.namespace, memory.key) == self._place else memory
            for memory in memories
        ]


def given_of(memory: Memory) -> dict[str, Any]:
    """What a memory was given: its text and its fields."""
    return _given(memory.value)


def _given(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in value.items() if name not in OWN}

"""Changes of memories: insert, update, supersede, delete, each in one transaction.

A change is read, judged and written as one; if another comes in between, it is judged again. So a
fact that is told twice at once is kept once, and no correction is lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args

from langchain_core.runnables import RunnableConfig
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from perdure.errors import ConfigurationError, InvalidValue, LimitExceeded, UnknownMemory
from perdure.memory.admission import REDACTED, Admitted, admit
from perdure.memory.conflicts import change_note, one_by_one
from perdure.memory.effects import Effects
from perdure.memory.gate.gate import Gate
from perdure.memory.records import TURN, Candidate, Memory, Outcome, Role
from perdure.memory.run_config import source
from perdure.memory.store_adapter import (
    PREVIOUS,
    SOURCE,
    StoreAdapter,
    quarantine_of,
    removal_of,
    succeeding,
)
from perdure.memory.tombstones import tombstones_of
from perdure.memory.turns import superseded_turns
from perdure.stores.base import Namespace, Provenance, PutItem

Given = str | Mapping[str, Any] | BaseModel
"""A memory's text; or its text and fields, as a dict or as an instance of the schema."""
Replacement = Literal["updated", "superseded"]
TEXT: Final = "text"
OWN: Final = ("kind", PREVIOUS, SOURCE, REDACTED)
"""Fields of a value that perdure sets."""
NO_TOMBSTONE: Final = "there is no room to note that it is not to be extracted again"
_KEY: Final = 9  # characters of a key, which a model has to copy
_LETTERS: Final = "23456789abcdefghjkmnpqrstuvwxyz"  # none looks like another
_SAME: Final = "it says so already"
_FAULTS: Final = 5


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of memories of one namespace, as effects.

    Attributes:
        adapter: Their store.
        namespace: Their namespace.
        gate: Decides what is kept.
        schema: A pydantic model that memories fit; None: any fields.
        kind: The kind of new memories.
        by_model: Whether a model asks for the changes.
    """

    adapter: StoreAdapter
    namespace: Namespace
    gate: Gate
    schema: type[BaseModel] | None
    kind: str
    by_model: bool = False

    def insert(
        self, given: Given, provenance: Provenance, key: str | None = None
    ) -> Effects[Outcome]:
        """Add a memory, unless it is there already; see `Collection.insert`."""
        value = self.value(given)
        return self._one_by_one(lambda: self._inserted(value, provenance, key))

    def put(
        self, given: Given, provenance: Provenance, key: str, change: Replacement
    ) -> Effects[Outcome]:
        """Add a memory under a key, or change the one that has it."""
        value = self.value(given)

        def put() -> Effects[Outcome]:
            if (yield from self.adapter.got(self.namespace, key)) is None:
                return (yield from self._inserted(value, provenance, key))
            return (yield from self._replaced(key, given, provenance, change, None))

        return self._one_by_one(put)

    def replace(
        self,
        key: str,
        given: Given,
        provenance: Provenance,
        change: Replacement,
        at: datetime | None = None,
    ) -> Effects[Outcome]:
        """Give a memory another text; see `Collection.update` and `supersede`."""
        return self._one_by_one(lambda: self._replaced(key, given, provenance, change, at))

    def delete(self, key: str) -> Effects[Outcome]:
        """Close a memory; see `Collection.delete`."""
        return self._one_by_one(lambda: self._deleted(key))

    def value(self, given: Given, previous: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The text and fields of a memory, as JSON.

        Args:
            given: What to change. Fields that it does not name stay.
            previous: The value of the memory as it is.

        Raises:
            InvalidValue: It has no text, or does not fit the schema.
        """
        kept = own_fields(previous or {})
        fields = _fields(given)
        value = {**kept, **(fields if self.schema is None else _fitted(self.schema, kept, fields))}
        text = value.get(TEXT)
        if not isinstance(text, str) or not text.strip():
            raise InvalidValue(f"text is {text!r:.80}; expected a sentence that can stand alone")
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidValue(
                f"the text {text!r:.80} is no Unicode text ({exc.reason}); remove the lone "
                "surrogate"
            ) from exc
        return {**value, TEXT: text.strip()}

    # -- one attempt

    def _one_by_one(self, attempt: Callable[[], Effects[Outcome]]) -> Effects[Outcome]:
        return one_by_one(self.adapter, self.namespace, attempt)

    def _inserted(
        self, value: dict[str, Any], provenance: Provenance, key: str | None
    ) -> Effects[Outcome]:
        note = yield from change_note(self.adapter, self.namespace)
        there = None if key is None else (yield from self.adapter.got(self.namespace, key))
        if there is not None:
            if own_fields(there.value) == value:
                return Outcome("unchanged", there.key, _SAME)
            raise ConfigurationError(
                f"the key {key!r} is that of another memory in {self.namespace!r}; update or "
                "supersede that one, or leave key= out for a new one"
            )
        wanted = key or (yield from self._new_key())
        candidate = self._candidate(value, self.kind, provenance)
        admitted = yield from self._admitted(candidate, wanted, self.adapter)
        [outcome], puts = admitted.outcomes, admitted.puts
        if outcome.change == "quarantined" and key is None:
            # an earlier attempt had another key
            waiting = quarantine_of(self.namespace), outcome.key or ""
            if (yield from self.adapter.got(*waiting)) is not None:
                return outcome
        if outcome.change == "added":
            puts = [*(replace(put, if_version=0) for put in puts), *note]
        yield from self.adapter.written(puts)
        return outcome

    def _replaced(
        self,
        key: str,
        given: Given,
        provenance: Provenance,
        change: Replacement,
        at: datetime | None,
    ) -> Effects[Outcome]:
        note = yield from change_note(self.adapter, self.namespace)
        previous = yield from self._present(key)
        value = self.value(given, previous.value)
        before = own_fields(previous.value)
        if value == before:
            return Outcome("unchanged", key, _SAME)
        candidate = self._candidate(value, previous.kind, provenance)
        others = _Without(self.adapter, previous)
        admitted = yield from self._admitted(candidate, key, others)
        [outcome], puts = admitted.outcomes, admitted.puts
        if outcome.change == "added":
            [put] = puts
            if own_fields(put.value or {}) == before:  # once it is redacted
                return Outcome("unchanged", key, _SAME)
            value = succeeding(previous, put.value or {}, change, at)
            puts = [replace(put, value=value, if_version=previous.version), *note]
            if change == "superseded":
                puts += yield from self._past_turns(previous, provenance, at or datetime.now(UTC))
            outcome = replace(outcome, change=change)
        yield from self.adapter.written(puts)
        return outcome

    def _deleted(self, key: str) -> Effects[Outcome]:
        memory = yield from self._present(key)
        removal = removal_of(self.namespace, key, memory.version)
        past = yield from self.adapter.versions(self.namespace, key)
        tombstones = [put for each in (*past, memory) for put in tombstones_of(each, "deleted")]
        try:
            yield from self.adapter.written([removal, *tombstones])
        except LimitExceeded:  # without room for tombstones it is deleted all the same
            yield from self.adapter.written([removal])
            return Outcome("deleted", key, NO_TOMBSTONE)
        return Outcome("deleted", key)

    # -- parts of an attempt

    def _present(self, key: str) -> Effects[Memory]:
        """The memory as it is.

        Raises:
            UnknownMemory: There is none, or it is another document, for example instructions.
        """
        memory = yield from self.adapter.got(self.namespace, key)
        if memory is None or not isinstance(memory.value.get(TEXT), str):
            raise unknown(self.namespace, key)
        return memory

    def _candidate(self, value: Mapping[str, Any], kind: str, provenance: Provenance) -> Candidate:
        fields = {name: part for name, part in value.items() if name != TEXT}
        role: Any = provenance.trust if provenance.trust in get_args(Role) else "user"
        return Candidate(
            value[TEXT], kind, fields, provenance, role, explicit=True, by_model=self.by_model
        )

    def _admitted(self, candidate: Candidate, key: str, adapter: StoreAdapter) -> Effects[Admitted]:
        return admit(self.gate, adapter, self.namespace, [candidate], [key])

    def _past_turns(
        self, previous: Memory, provenance: Provenance, until: datetime
    ) -> Effects[list[PutItem]]:
        """Puts that mark the turns as past on which the previous text rests, and not the new one.

        So that recall does not show them as present.
        """
        rests_on = previous.provenance
        if rests_on is None or previous.kind == TURN:
            return []
        if rests_on.thread_id == provenance.thread_id:
            ids = tuple(each for each in rests_on.message_ids if each not in provenance.message_ids)
            previous = replace(previous, provenance=replace(rests_on, message_ids=ids))
        return (yield from superseded_turns(self.adapter, previous, until))

    def _new_key(self) -> Effects[str]:
        while True:
            key = "".join(secrets.choice(_LETTERS) for _ in range(_KEY))
            if (yield from self.adapter.got(self.namespace, key)) is None:
                return key


class _Without(StoreAdapter):
    """A store without the text of one memory: what replaces it is compared with the others."""

    def __init__(self, adapter: StoreAdapter, memory: Memory) -> None:
        super().__init__(adapter.store)
        self._place = memory.namespace, memory.key

    def found(self, prefix: Namespace, **asked: Any) -> Effects[list[Memory]]:
        return [
            replace(memory, text="") if (memory.namespace, memory.key) == self._place else memory
            for memory in (yield from super().found(prefix, **asked))
        ]


def own_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """The text and the fields in a memory's value, without those that perdure sets."""
    return {name: part for name, part in value.items() if name not in OWN}


def provenance_of(
    config: RunnableConfig | None, given: Provenance | None = None, trust: str = "user"
) -> Provenance:
    """Where a memory comes from: as given, else from the run, now."""
    if given is None:
        given = Provenance(*source(config), actor=trust, at=datetime.now(UTC))
    return given if given.trust is not None else replace(given, trust=trust)


def unknown(namespace: Namespace, key: str) -> UnknownMemory:
    """The error for a key that no memory has."""
    return UnknownMemory(
        f"no memory {key!r} in {namespace!r}; search() and list() tell the ids that there are"
    )


# -- schemas


def check_schema(schema: Any) -> None:
    """Check that memories can have a schema.

    Raises:
        ConfigurationError: It is no model with a text, or has fields that perdure sets.
    """
    fields = getattr(schema, "model_fields", {})
    taken = [name for name in OWN if name in fields]
    if taken or TEXT not in fields or fields[TEXT].annotation is not str:
        raise ConfigurationError(
            f"schema is {schema!r:.80}{f', with a field {taken[0]!r}' if taken else ''}; expected "
            "a pydantic model's class with a field 'text: str', the sentence that is searched, and "
            f"no field {', '.join(map(repr, OWN))}, which every memory has"
        )


def faults_of(exc: ValidationError) -> str:
    """What is wrong, by field, without the values: one may be a megabyte, or a secret."""
    found = exc.errors(include_url=False, include_context=False, include_input=False)
    faults = [
        ".".join(str(part)[:60] for part in each["loc"]) + f": {each['msg'][:200]}"
        for each in found[:_FAULTS]
    ]
    return "; ".join(faults) + ("; …" if len(found) > _FAULTS else "")


def _fields(given: Given) -> dict[str, Any]:
    if isinstance(given, str):
        return {TEXT: given}
    if isinstance(given, BaseModel):
        return given.model_dump(mode="json", exclude_unset=True)
    if not isinstance(given, Mapping):
        raise InvalidValue(
            f"the memory is {given!r:.80}; expected text, a dict with 'text', or a model"
        )
    for name in OWN:
        if name in given:
            raise InvalidValue(
                f"the memory has a field {name!r}, which perdure sets: leave it out, or name it "
                "otherwise"
            )
    return dict(given)


def _fitted(
    schema: type[BaseModel], kept: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields that a schema accepts, by their names, as JSON: so they are read back."""
    given = list(fields)
    known = {
        name: part
        for name, part in kept.items()
        if name in schema.model_fields and schema.model_fields[name].validation_alias not in given
    }
    try:
        document = to_json({**known, **fields})
        memory = schema.model_validate_json(document, by_alias=True, by_name=True)
    except ValidationError as exc:
        raise InvalidValue(
            f"the memory does not fit the schema {schema.__name__}: {faults_of(exc)}"
        ) from exc
    except ValueError as exc:
        raise InvalidValue(f"the memory is no JSON: {exc}") from exc
    return memory.model_dump(mode="json")

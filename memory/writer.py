"""The writer of memories: it inserts, updates, supersedes and deletes, each in one transaction."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any, Final, Literal, ParamSpec, get_args

from langchain_core.runnables import RunnableConfig
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from perdure.errors import (
    ConfigurationError,
    InvalidValue,
    LimitExceeded,
    UnknownMemory,
    VersionConflict,
)
from perdure.memory.effects import Effects
from perdure.memory.gate import Gate
from perdure.memory.model_call import faults_of
from perdure.memory.plan import OWN, SAME, Change, change_note, judged, one_by_one, own_fields
from perdure.memory.proposals import Addition, Revision, Scope
from perdure.memory.records import Candidate, Memory, Outcome, Role
from perdure.memory.run_config import source
from perdure.memory.store_adapter import StoreAdapter, removal_of
from perdure.memory.tombstones import tombstones_of
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.namespaces import check_key

Given = str | Mapping[str, Any] | BaseModel
"""A memory's text; or its text and fields, as a dict or as an instance of the schema."""
Replacement = Literal["updated", "superseded"]
TEXT: Final = "text"
NO_TOMBSTONE: Final = "there is no room to note that it is not to be extracted again"
_KEY: Final = 9  # characters of a key, which a model has to copy
_LETTERS: Final = "23456789abcdefghjkmnpqrstuvwxyz"  # none looks like another
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
P = ParamSpec("P")


def _alone(
    method: Callable[P, Effects[Outcome | VersionConflict]],
) -> Callable[P, Effects[Outcome]]:
    @wraps(method)
    def attempted(*args: P.args, **options: P.kwargs) -> Effects[Outcome]:
        writer: Any = args[0]
        attempt = partial(method, *args, **options)
        outcome = yield from one_by_one(writer.adapter, writer.namespace, attempt)
        if isinstance(outcome, VersionConflict):
            raise outcome
        return outcome

    return attempted


@dataclass(frozen=True, slots=True)
class MemoryWriter:
    """Writes the memories of one namespace, for `Collection` and tools."""

    adapter: StoreAdapter
    namespace: Namespace
    gate: Gate
    schema: type[BaseModel] | None
    kind: str
    by_model: bool = False

    def _insert(
        self,
        given: Given,
        provenance: Provenance,
        key: str | None = None,
        instead: Replacement | None = None,
    ) -> Effects[Outcome | VersionConflict]:
        """Add a memory; a different one with the key is changed `instead`, or is an error."""
        value = self.value(given)
        note = yield from change_note(self.adapter, self.namespace)
        made = "".join(secrets.choice(_LETTERS) for _ in range(_KEY))
        wanted = made if key is None else check_key(key)
        there = yield from self.adapter.got(self.namespace, wanted)
        if there is not None:
            if own_fields(there.value) == value:
                return Outcome("unchanged", wanted, SAME)
            if instead is not None:
                return (yield from self._replace(wanted, given, provenance, instead))
            raise ConfigurationError(
                f"the key {key!r} is that of another memory in {self.namespace!r}; supersede that"
            )
        candidate = self._candidate(value, self.kind, provenance)
        return (yield from self._written(Addition(wanted, candidate), None, note))

    def _delete(self, key: str) -> Effects[Outcome]:
        """Delete a memory, with tombstones of all its texts."""
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

    def value(self, given: Given, previous: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The text and fields of a memory, as JSON; those of the previous value stay."""
        kept, fields = own_fields(previous or {}), _fields(given)
        value = {**kept, **(fields if self.schema is None else _fitted(self.schema, kept, fields))}
        text = value.get(TEXT)
        if not isinstance(text, str) or not text.strip() or _SURROGATE.search(text):
            raise InvalidValue(
                f"text is {text!r:.80}; expected a sentence that can stand alone, in Unicode"
            )
        return {**value, TEXT: text.strip()}

    def _replace(
        self,
        key: str,
        given: Given,
        provenance: Provenance,
        change: Replacement,
        at: datetime | None = None,
        if_version: int | None = None,
    ) -> Effects[Outcome | VersionConflict]:
        """Update or supersede a memory; a conflict with `if_version` is returned: no try helps."""
        note = yield from change_note(self.adapter, self.namespace)
        previous = yield from self._present(key)
        if if_version not in (None, previous.version):
            return VersionConflict(
                f"the memory {key!r} is at version {previous.version}, not {if_version!r}; read it "
                "again before you change it"
            )
        value = self.value(given, previous.value)
        if value == own_fields(previous.value):
            return Outcome("unchanged", key, SAME)
        revision = Revision(key, change, self._candidate(value, previous.kind, provenance), at)
        return (yield from self._written(revision, previous, note))

    def _written(
        self, change: Change, previous: Memory | None, note: Sequence[PutItem]
    ) -> Effects[Outcome]:
        scope = Scope(self.adapter, self.namespace)
        present = {} if previous is None else {change.key: previous}
        plan = yield from judged([change], present, {}, self.gate, scope)
        yield from self.adapter.written([*plan.puts, *note] if plan.puts else [])
        return plan.outcomes[0]

    insert, replace, delete = _alone(_insert), _alone(_replace), _alone(_delete)

    def _present(self, key: str) -> Effects[Memory]:
        memory = yield from self.adapter.got(self.namespace, check_key(key))
        if memory is None or not isinstance(memory.value.get(TEXT), str):
            raise unknown(self.namespace, key)
        return memory

    def _candidate(self, value: Mapping[str, Any], kind: str, provenance: Provenance) -> Candidate:
        fields = {name: part for name, part in value.items() if name != TEXT}
        role: Any = provenance.trust if provenance.trust in get_args(Role) else "user"
        return Candidate(value[TEXT], kind, fields, provenance, role, True, self.by_model)


def provenance_of(config: RunnableConfig | None, given: Provenance | None = None) -> Provenance:
    """Where a memory comes from: as given, else from the user, in the run, now."""
    if given is None:
        given = Provenance(*source(config), actor="user", at=datetime.now(UTC))
    return given if given.trust is not None else replace(given, trust="user")


def unknown(namespace: Namespace, key: str) -> UnknownMemory:
    """The error for a key that no memory has."""
    return UnknownMemory(
        f"no memory {key!r} in {namespace!r}; search() and list() tell the ids that there are"
    )


def check_schema(schema: Any) -> None:
    """Refuse a schema that is no model with a text, or has fields that perdure sets."""
    fields = getattr(schema, "model_fields", {})
    taken = [name for name in OWN if name in fields]
    if taken or TEXT not in fields or fields[TEXT].annotation is not str:
        raise ConfigurationError(
            f"schema is {schema!r:.80}; expected the class of a pydantic model with a field "
            f"'text: str', which is searched, and no field {', '.join(OWN)}, which perdure sets"
        )


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
            raise InvalidValue(f"the memory has a field {name!r}, which perdure sets; rename it")
    return dict(given)


def _fitted(
    schema: type[BaseModel], kept: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields that a schema accepts, by their names, as JSON: so they are read back."""
    others = {name: part for name, part in kept.items() if name in schema.model_fields}
    try:
        document = to_json({**others, **fields})
        memory = schema.model_validate_json(document, by_alias=True, by_name=True)
    except ValidationError as exc:
        raise InvalidValue(
            f"the memory does not fit the schema {schema.__name__}: {faults_of(exc)}"
        ) from exc
    except ValueError as exc:
        raise InvalidValue(f"the memory is no JSON: {exc}") from exc
    return memory.model_dump(mode="json")

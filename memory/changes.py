"""Changes of memories: proposed, judged by the gate, and written, whoever asks for them.

A change is planned against what is stored, and its write is compared and swapped: in a store with
versions each put names the version that was read, and each change counts up a note of its
namespace. Of two changes at once the second is planned again. `planned` plans what an extractor
proposes, `MemoryWriter` what a person, a tool or an application asks for.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Final, Literal, get_args

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import GetOp
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from perdure.effects import Effect, Operation
from perdure.errors import (
    AlreadyLocked,
    ConfigurationError,
    InvalidValue,
    LimitExceeded,
    StorageUnavailable,
    UnknownMemory,
    VersionConflict,
)
from perdure.memory.detectors import REDACTED_FIELD
from perdure.memory.extractors import (
    UNTIL_FIELD,
    Addition,
    Alteration,
    Proposal,
    Revision,
    Scope,
    build_superseded_turn_puts,
    find_dropped_messages,
    find_end_dates,
)
from perdure.memory.gate import (
    Gate,
    add_former_ids,
    build_tombstones,
    hash_source_messages,
    plan_admission,
)
from perdure.memory.model_call import describe_validation_errors
from perdure.memory.records import (
    CHANGE_COUNTERS,
    EPISODE,
    PREVIOUS,
    SOURCE,
    TURN,
    Candidate,
    ChangePlan,
    Memory,
    Outcome,
    Role,
    StoreAdapter,
    build_next_value,
    build_note_put,
    build_notes_namespace,
    build_removal,
    memory_from_item,
)
from perdure.memory.run_config import read_run_source
from perdure.storage.database import is_in_event_loop
from perdure.storage.locks import Locks
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.namespaces import check_key

PERDURE_FIELDS: Final = (
    "kind",
    PREVIOUS,
    SOURCE,
    REDACTED_FIELD,
)  # fields of a value that perdure sets
UNCHANGED_REASON: Final = "it says so already"
_CHANGE_COUNTER_KEY: Final = "memories"
_LOCK_WAIT_S: Final = 10.0  # for a change that takes longer, others do not wait: its write tells
MAX_TRIES: Final = 50  # each that fails is one in which another change succeeded
_TRUST_RANKS: Final[Mapping[str, int]] = {"user": 3, "system": 2, "assistant": 1, "tool": 0}
MemoryInput = str | Mapping[str, Any] | BaseModel
"""A memory's text; or its text and fields, as a dict or as an instance of the schema."""
Replacement = Literal["updated", "superseded"]
TEXT: Final = "text"
NO_TOMBSTONE_REASON: Final = "there is no room to note that it is not to be extracted again"
_KEY_LENGTH: Final = 9  # characters of a key, which a model has to copy
_KEY_LETTERS: Final = "23456789abcdefghjkmnpqrstuvwxyz"  # none looks like another
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
Change = Addition | Revision
CurrentMemories = Mapping[str, Memory]  # the stored memories, by key


async def build_change_counter_puts(adapter: StoreAdapter, namespace: Namespace) -> list[PutItem]:
    """The puts with which a write is a `VersionConflict` if another came after this call."""
    if not adapter.versioned:
        return []
    place = build_notes_namespace(CHANGE_COUNTERS, namespace)
    note = await adapter.get(place, _CHANGE_COUNTER_KEY)
    number, version = (0, 0) if note is None else (note.value["number"], note.version)
    return [build_note_put(place, _CHANGE_COUNTER_KEY, {"number": number + 1}, if_version=version)]


async def plan_and_write(
    adapter: StoreAdapter, plan: Callable[[], Operation[ChangePlan]], tries: int = MAX_TRIES
) -> ChangePlan:
    """Plan a change and write it; it is planned again if another was written meanwhile."""
    while True:
        made = await plan()
        tries -= 1
        try:
            await adapter.write(made.puts)
        except VersionConflict:
            if not tries:
                raise
        else:
            return made


async def plan_and_write_exclusively(
    adapter: StoreAdapter, namespace: Namespace, plan: Callable[[], Operation[ChangePlan]]
) -> ChangePlan:
    """See `written`; this process plans the changes of a namespace one after another.

    Of many at once each would be judged again for every other; and a store without versions has
    no conflicts.
    """
    # stores on one file share its database; a forked process has locks of its own
    name = f"{id(getattr(adapter.store, 'database', adapter.store))} {namespace!r}"
    locks, turn = _get_locks(os.getpid()), None
    with suppress(AlreadyLocked, StorageUnavailable):  # not free in time, or held by the caller
        turn = await Effect(
            lambda: locks.acquire(name, 0.0 if is_in_event_loop() else _LOCK_WAIT_S),
            lambda: locks.aacquire(name, _LOCK_WAIT_S),
        )
    try:
        return await plan_and_write(adapter, plan)
    finally:
        if turn is not None:
            locks.release(turn)


@cache
def _get_locks(process: int) -> Locks:
    return Locks(None)


async def plan_proposal(proposal: Proposal, gate: Gate, scope: Scope) -> ChangePlan:
    """The puts and outcomes of a proposal."""
    additions, unchanged = await _separate_known_episodes(proposal.additions, scope)
    changes: list[Change] = [*additions, *proposal.revisions]
    note = (await build_change_counter_puts(scope.adapter, scope.namespace)) if changes else []
    present = (await _read_current_memories(scope, changes)) if changes else {}
    deleted = _plan_deletions(proposal.revisions, present)
    written = [
        change
        for change in changes
        if not isinstance(change, Revision) or _is_permitted_replacement(change, present)
    ]
    has_facts = not note or bool(note[0].if_version)  # a store without versions has no note
    ends = (await _find_end_dates(written, present, scope)) if has_facts else {}
    if deleted.puts:
        deleted = deleted._replace(puts=await add_former_ids(scope.adapter, deleted.puts))
    kept = await plan_admitted_changes(written, present, ends, gate, scope)
    parts = [ChangePlan(outcomes=proposal.outcomes), unchanged, deleted, kept]
    for plan in proposal.plan_functions:
        parts.append(await plan(gate))
    events = {TURN, EPISODE}.issuperset(change.candidate.kind for change in additions)
    if (deleted.puts or kept.puts) and not (events and not proposal.revisions):
        parts.append(ChangePlan(note))  # new turns and episodes conflict with no fact
    puts: dict[tuple[Namespace, str], PutItem] = {}
    for put in (put for part in parts for put in part.puts):
        puts.setdefault((put.namespace, put.key), put)  # two facts may mark one turn as past
    return ChangePlan(list(puts.values()), [outcome for part in parts for outcome in part.outcomes])


async def _separate_known_episodes(
    additions: Sequence[Addition], scope: Scope
) -> tuple[Sequence[Addition], ChangePlan]:
    if not any(addition.candidate.kind == EPISODE for addition in additions):
        return additions, ChangePlan()
    by_source: dict[str, str] = {}
    for memory in await scope.adapter.list_memories(scope.namespace, filter={"kind": EPISODE}):
        by_source |= dict.fromkeys(hash_source_messages(memory.provenance), memory.key)
    new: list[Addition] = []
    outcomes: list[Outcome] = []
    for addition in additions:
        keys_known = [
            by_source[mark]
            for mark in hash_source_messages(addition.candidate.provenance)
            if mark in by_source
        ]
        if keys_known and addition.candidate.kind == EPISODE:
            outcomes.append(Outcome("unchanged", keys_known[-1]))
        else:
            new.append(addition)
    return new, ChangePlan(outcomes=outcomes)


async def _read_current_memories(scope: Scope, changes: Sequence[Change]) -> dict[str, Memory]:
    keys = dict.fromkeys(change.key for change in changes)
    ops = [GetOp(scope.namespace, key, refresh_ttl=False) for key in keys]
    items = await scope.adapter.call("batch", ops)
    return {item.key: memory_from_item(item) for item in items if item is not None}


def _find_refusal_reason(revision: Revision, memory: Memory | None) -> str:
    """Why a memory may not be changed; "": it may."""
    if memory is None:
        return "the memory does not exist any more"
    whose = (memory.provenance.trust if memory.provenance else None) or "user"
    role = revision.candidate.role
    if _TRUST_RANKS.get(whose, 3) <= _TRUST_RANKS[role]:
        return ""
    return f"it rests on the words of the {whose}, the change only on those of the {role}"


def _is_permitted_replacement(revision: Revision, present: CurrentMemories) -> bool:
    return revision.change != "deleted" and not _find_refusal_reason(
        revision, present.get(revision.key)
    )


def _plan_deletions(revisions: Sequence[Revision], present: CurrentMemories) -> ChangePlan:
    puts: list[PutItem] = []
    outcomes: list[Outcome] = []
    for revision in revisions:
        memory = present.get(revision.key)
        why = _find_refusal_reason(revision, memory)
        if memory is None or why:
            check = "model" if memory is None else "role"
            outcomes.append(Outcome("refused", revision.key, why, check))
        elif revision.change == "deleted":
            puts.append(build_removal(memory.namespace, memory.key, memory.version))
            if memory.kind != TURN:  # an edited message may get its previous text again
                puts += build_tombstones(memory, "deleted")
            outcomes.append(Outcome("deleted", memory.key))
    return ChangePlan(puts, outcomes)


async def _find_end_dates(
    changes: Sequence[Change], present: CurrentMemories, scope: Scope
) -> dict[str, str]:
    """The dates at which facts were superseded that rest on messages whose turns are new."""
    new = [change.candidate for change in changes if change.key not in present]
    turns = [change.provenance for change in new if change.kind == TURN and change.provenance]
    ids = [id for source in turns for id in source.message_ids]
    return (await find_end_dates(scope, turns[0].thread_id, ids)) if turns else {}


async def plan_admitted_changes(
    changes: Sequence[Change],
    present: CurrentMemories,
    ends: dict[str, str],
    gate: Gate,
    scope: Scope,
) -> ChangePlan:
    """What the gate admits; each replaces the memory under its key, if there is one."""
    candidates = [_build_candidate(proposed, present) for proposed in changes]
    keys = [proposed.key for proposed in changes]
    made = [each.key for each in changes if each.candidate.explicit and each.key not in present]
    admitted = await plan_admission(
        gate, scope.adapter, scope.namespace, candidates, keys, made, scope.thread
    )
    own = {put.key: put for put in admitted.puts if put.namespace == scope.namespace}
    puts = [put for put in admitted.puts if put.namespace != scope.namespace]  # quarantine
    past: list[PutItem] = []
    outcomes: list[Outcome] = []
    for proposed, outcome in zip(changes, admitted.outcomes, strict=True):
        memory = present.get(proposed.key)
        extracted = isinstance(proposed, Revision) and not proposed.candidate.explicit
        if outcome.change == "added" and memory is None:
            new = 0 if scope.adapter.versioned else None
            puts.append(replace(own[proposed.key], if_version=new))
        elif outcome.change == "added" and memory is not None:
            until = _choose_end_date(proposed, memory)
            changed, outcome = _plan_replacement(
                proposed, own[proposed.key], memory, until, outcome
            )
            puts += changed
            if outcome.change == "superseded":
                source = proposed.candidate.provenance
                past += await build_superseded_turn_puts(scope.adapter, memory, until, source)
                if source and memory.provenance and memory.provenance.thread_id == source.thread_id:
                    ended = find_dropped_messages(
                        memory.provenance, source
                    )  # their turns may be new too
                    ends |= dict.fromkeys(ended, until.isoformat())
        elif extracted and outcome.change == "unchanged" and memory and outcome.key != proposed.key:
            puts.append(build_removal(memory.namespace, memory.key, memory.version))
            outcome = Outcome("deleted", proposed.key, "another memory says the same")
        outcomes.append(outcome)
    return ChangePlan([*(_add_end_date(put, present, ends) for put in puts), *past], outcomes)


def _build_candidate(proposed: Change, present: CurrentMemories) -> Candidate:
    if isinstance(proposed, Addition):
        return proposed.candidate
    return replace(proposed.candidate, kind=present[proposed.key].kind)


def _plan_replacement(
    proposed: Change, put: PutItem, memory: Memory, until: datetime, admitted: Outcome
) -> tuple[list[PutItem], Outcome]:
    """The put of an admitted memory, if the stored one is still the version that was read."""
    value = put.value or {}
    # what was made before may have been changed since
    stays = isinstance(proposed, Addition) and (memory.kind != TURN or memory.text == value["text"])
    if stays or get_content_fields(value) == get_content_fields(memory.value):
        return [], Outcome("unchanged", proposed.key, UNCHANGED_REASON)
    change: Alteration = proposed.change if isinstance(proposed, Revision) else "updated"
    kept = {
        name: part
        for name, part in memory.value.items()
        if name not in (REDACTED_FIELD, UNTIL_FIELD)
    }
    ended = until if change == "superseded" else None
    value = build_next_value(memory, {**kept, **value}, change, ended)
    put = replace(put, value=value, if_version=memory.version)
    return [put], replace(admitted, change=change)


def _add_end_date(put: PutItem, present: CurrentMemories, ends: Mapping[str, str]) -> PutItem:
    value, ids = put.value or {}, put.provenance.message_ids if put.provenance else ()
    if value.get("kind") != TURN or put.key in present or ends.keys().isdisjoint(ids):
        return put
    return replace(put, value={**value, UNTIL_FIELD: ends[ids[0]]})


def _choose_end_date(proposed: Change, memory: Memory) -> datetime:
    """When a memory stopped being true: at the time of the new text, if that is known and later."""
    if isinstance(proposed, Revision) and proposed.until:
        return proposed.until
    at = proposed.candidate.provenance.at if proposed.candidate.provenance else None
    since = memory.provenance.at if memory.provenance else None
    return at if at and (since is None or since < at) else datetime.now(UTC)


def get_content_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """The text and the fields in a memory's value, without those that perdure sets."""
    return {name: part for name, part in value.items() if name not in PERDURE_FIELDS}


@dataclass(frozen=True, slots=True)
class MemoryWriter:
    """Writes the memories of one namespace, for `Collection` and tools."""

    adapter: StoreAdapter
    namespace: Namespace
    gate: Gate
    schema: type[BaseModel] | None
    kind: str
    by_model: bool = False
    author: str | None = None  # the user who writes, if the namespace is that of a team

    async def insert(
        self,
        memory: MemoryInput,
        provenance: Provenance,
        key: str | None = None,
        on_conflict: Replacement | None = None,
    ) -> Outcome:
        """Add a memory; a different one with the key is changed `instead`, or is an error."""
        value = self.build_value(memory)
        made = "".join(secrets.choice(_KEY_LETTERS) for _ in range(_KEY_LENGTH))
        place = made if key is None else check_key(key)

        async def plan() -> ChangePlan:
            note = await build_change_counter_puts(self.adapter, self.namespace)
            there = await self.adapter.get(self.namespace, place)
            if there is None:
                addition = Addition(place, self._build_candidate(value, self.kind, provenance))
                return await self._plan_change(addition, None, note)
            if get_content_fields(there.value) == value:
                return ChangePlan(outcomes=[Outcome("unchanged", place, UNCHANGED_REASON)])
            if on_conflict is None:
                raise ConfigurationError(
                    f"the key {key!r} is that of another memory in {self.namespace!r}; supersede "
                    "that"
                )
            return await self._plan_revision(there, memory, provenance, on_conflict, None, note)

        return await self._write_change(plan)

    async def replace(
        self,
        key: str,
        memory: MemoryInput,
        provenance: Provenance,
        change: Replacement,
        at: datetime | None = None,
        if_version: int | None = None,
    ) -> Outcome:
        """Update or supersede a memory."""

        async def plan() -> ChangePlan:
            note = await build_change_counter_puts(self.adapter, self.namespace)
            previous = await self._get_existing(key)
            if if_version not in (None, previous.version):
                raise VersionConflict(
                    f"the memory {key!r} is at version {previous.version}, not {if_version!r}; "
                    "read it again before you change it"
                )
            return await self._plan_revision(previous, memory, provenance, change, at, note)

        return await self._write_change(plan)

    async def delete(self, key: str) -> Outcome:
        """Delete a memory, with tombstones of all its texts."""

        async def plan(*, marked: bool = True) -> ChangePlan:
            memory = await self._get_existing(key)
            puts = [build_removal(self.namespace, key, memory.version)]
            if not marked:
                return ChangePlan(puts, [Outcome("deleted", key, NO_TOMBSTONE_REASON)])
            past = await self.adapter.list_versions(self.namespace, key)
            puts += [
                put for version in (*past, memory) for put in build_tombstones(version, "deleted")
            ]
            puts = await add_former_ids(self.adapter, puts)
            return ChangePlan(puts, [Outcome("deleted", key)])

        try:
            return await self._write_change(plan)
        except LimitExceeded:  # without room for tombstones it is deleted all the same
            return await self._write_change(partial(plan, marked=False))

    def build_value(
        self, memory: MemoryInput, previous: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The text and fields of a memory, as JSON; those of the previous value stay."""
        kept, fields = get_content_fields(previous or {}), _read_fields(memory)
        value = {
            **kept,
            **(fields if self.schema is None else _validate_fields(self.schema, kept, fields)),
        }
        text = value.get(TEXT)
        if not isinstance(text, str) or not text.strip() or _SURROGATE.search(text):
            raise InvalidValue(
                f"text is {text!r:.80}; expected a sentence that can stand alone, in Unicode"
            )
        return {**value, TEXT: text.strip()}

    async def _plan_revision(
        self,
        previous: Memory,
        memory: MemoryInput,
        provenance: Provenance,
        change: Replacement,
        at: datetime | None,
        note: Sequence[PutItem],
    ) -> ChangePlan:
        value = self.build_value(memory, previous.value)
        if value == get_content_fields(previous.value):
            return ChangePlan(outcomes=[Outcome("unchanged", previous.key, UNCHANGED_REASON)])
        candidate = self._build_candidate(value, previous.kind, provenance)
        return await self._plan_change(
            Revision(previous.key, change, candidate, at), previous, note
        )

    async def _plan_change(
        self, change: Change, previous: Memory | None, note: Sequence[PutItem]
    ) -> ChangePlan:
        scope = Scope(self.adapter, self.namespace)
        present = {} if previous is None else {change.key: previous}
        plan = await plan_admitted_changes([change], present, {}, self.gate, scope)
        return plan._replace(puts=[*plan.puts, *note]) if plan.puts else plan

    async def _write_change(self, plan: Callable[[], Operation[ChangePlan]]) -> Outcome:
        return (await plan_and_write_exclusively(self.adapter, self.namespace, plan)).outcomes[0]

    async def _get_existing(self, key: str) -> Memory:
        memory = await self.adapter.get(self.namespace, check_key(key))
        if memory is None or not isinstance(memory.value.get(TEXT), str):
            raise build_unknown_memory_error(self.namespace, key)
        return memory

    def _build_candidate(
        self, value: Mapping[str, Any], kind: str, provenance: Provenance
    ) -> Candidate:
        fields = {name: part for name, part in value.items() if name != TEXT}
        if self.author is not None:
            provenance = replace(provenance, author=self.author)
        role: Any = provenance.trust if provenance.trust in get_args(Role) else "user"
        return Candidate(value[TEXT], kind, fields, provenance, role, True, self.by_model)


def complete_provenance(
    config: RunnableConfig | None, provenance: Provenance | None = None
) -> Provenance:
    """Where a memory comes from: as given, else from the user, in the run, now."""
    if provenance is None:
        provenance = Provenance(*read_run_source(config), actor="user", at=datetime.now(UTC))
    return provenance if provenance.trust is not None else replace(provenance, trust="user")


def build_unknown_memory_error(namespace: Namespace, key: str) -> UnknownMemory:
    """The error for a key that no memory has."""
    return UnknownMemory(
        f"no memory {key!r} in {namespace!r}; search() and list() tell the ids that there are"
    )


def check_schema(schema: Any) -> None:
    """Refuse a schema that is no model with a text, or has fields that perdure sets."""
    fields = getattr(schema, "model_fields", {})
    taken = [name for name in PERDURE_FIELDS if name in fields]
    if taken or TEXT not in fields or fields[TEXT].annotation is not str:
        raise ConfigurationError(
            f"schema is {schema!r:.80}; expected the class of a pydantic model with a field "
            f"'text: str', which is searched, and no field {', '.join(PERDURE_FIELDS)}, which "
            "perdure sets"
        )


def _read_fields(memory: MemoryInput) -> dict[str, Any]:
    if isinstance(memory, str):
        return {TEXT: memory}
    if isinstance(memory, BaseModel):
        return memory.model_dump(mode="json", exclude_unset=True)
    if not isinstance(memory, Mapping):
        raise InvalidValue(
            f"the memory is {memory!r:.80}; expected text, a dict with 'text', or a model"
        )
    for name in PERDURE_FIELDS:
        if name in memory:
            raise InvalidValue(f"the memory has a field {name!r}, which perdure sets; rename it")
    return dict(memory)


def _validate_fields(
    schema: type[BaseModel], kept: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields that a schema accepts, by their names, as JSON: so they are read back."""
    others = {name: part for name, part in kept.items() if name in schema.model_fields}
    try:
        document = to_json({**others, **fields})
        memory = schema.model_validate_json(document, by_alias=True, by_name=True)
    except ValidationError as exc:
        raise InvalidValue(
            f"the memory does not fit the schema {schema.__name__}: "
            f"{describe_validation_errors(exc)}"
        ) from exc
    except ValueError as exc:
        raise InvalidValue(f"the memory is no JSON: {exc}") from exc
    return memory.model_dump(mode="json")

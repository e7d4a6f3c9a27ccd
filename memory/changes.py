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
    notes_namespace = build_notes_namespace(CHANGE_COUNTERS, namespace)
    counter = await adapter.get(notes_namespace, _CHANGE_COUNTER_KEY)
    number, version = (0, 0) if counter is None else (counter.value["number"], counter.version)
    return [
        build_note_put(
            notes_namespace, _CHANGE_COUNTER_KEY, {"number": number + 1}, if_version=version
        )
    ]


async def plan_and_write(
    adapter: StoreAdapter, plan: Callable[[], Operation[ChangePlan]], tries: int = MAX_TRIES
) -> ChangePlan:
    """Plan a change and write it; it is planned again if another was written meanwhile."""
    while True:
        change_plan = await plan()
        tries -= 1
        try:
            await adapter.write(change_plan.puts)
        except VersionConflict:
            if not tries:
                raise
        else:
            return change_plan


async def plan_and_write_exclusively(
    adapter: StoreAdapter, namespace: Namespace, plan: Callable[[], Operation[ChangePlan]]
) -> ChangePlan:
    """See `written`; this process plans the changes of a namespace one after another.

    Of many at once each would be judged again for every other; and a store without versions has
    no conflicts.
    """
    # stores on one file share its database; a forked process has locks of its own
    name = f"{id(getattr(adapter.store, 'database', adapter.store))} {namespace!r}"
    locks, lock = _get_locks(os.getpid()), None
    with suppress(AlreadyLocked, StorageUnavailable):  # not free in time, or held by the caller
        lock = await Effect(
            lambda: locks.acquire(name, 0.0 if is_in_event_loop() else _LOCK_WAIT_S),
            lambda: locks.aacquire(name, _LOCK_WAIT_S),
        )
    try:
        return await plan_and_write(adapter, plan)
    finally:
        if lock is not None:
            locks.release(lock)


@cache
def _get_locks(process: int) -> Locks:
    return Locks(None)


async def plan_proposal(proposal: Proposal, gate: Gate, scope: Scope) -> ChangePlan:
    """The puts and outcomes of a proposal."""
    additions, unchanged = await _separate_known_episodes(proposal.additions, scope)
    changes: list[Change] = [*additions, *proposal.revisions]
    counter_puts = (
        (await build_change_counter_puts(scope.adapter, scope.namespace)) if changes else []
    )
    current = (await _read_current_memories(scope, changes)) if changes else {}
    deletions = _plan_deletions(proposal.revisions, current)
    permitted = [
        change
        for change in changes
        if not isinstance(change, Revision) or _is_permitted_replacement(change, current)
    ]
    has_facts = not counter_puts or bool(
        counter_puts[0].if_version
    )  # a store without versions has no note
    end_dates = (await _find_end_dates(permitted, current, scope)) if has_facts else {}
    if deletions.puts:
        deletions = deletions._replace(puts=await add_former_ids(scope.adapter, deletions.puts))
    admitted = await plan_admitted_changes(permitted, current, end_dates, gate, scope)
    parts = [ChangePlan(outcomes=proposal.outcomes), unchanged, deletions, admitted]
    for plan in proposal.plan_functions:
        parts.append(await plan(gate))
    adds_events = {TURN, EPISODE}.issuperset(change.candidate.kind for change in additions)
    if (deletions.puts or admitted.puts) and not (adds_events and not proposal.revisions):
        parts.append(ChangePlan(counter_puts))  # new turns and episodes conflict with no fact
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
            by_source[source]
            for source in hash_source_messages(addition.candidate.provenance)
            if source in by_source
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
    trust = (memory.provenance.trust if memory.provenance else None) or "user"
    role = revision.candidate.role
    if _TRUST_RANKS.get(trust, 3) <= _TRUST_RANKS[role]:
        return ""
    return f"it rests on the words of the {trust}, the change only on those of the {role}"


def _is_permitted_replacement(revision: Revision, current: CurrentMemories) -> bool:
    return revision.change != "deleted" and not _find_refusal_reason(
        revision, current.get(revision.key)
    )


def _plan_deletions(revisions: Sequence[Revision], current: CurrentMemories) -> ChangePlan:
    puts: list[PutItem] = []
    outcomes: list[Outcome] = []
    for revision in revisions:
        memory = current.get(revision.key)
        reason = _find_refusal_reason(revision, memory)
        if memory is None or reason:
            check = "model" if memory is None else "role"
            outcomes.append(Outcome("refused", revision.key, reason, check))
        elif revision.change == "deleted":
            puts.append(build_removal(memory.namespace, memory.key, memory.version))
            if memory.kind != TURN:  # an edited message may get its previous text again
                puts += build_tombstones(memory, "deleted")
            outcomes.append(Outcome("deleted", memory.key))
    return ChangePlan(puts, outcomes)


async def _find_end_dates(
    changes: Sequence[Change], current: CurrentMemories, scope: Scope
) -> dict[str, str]:
    """The dates at which facts were superseded that rest on messages whose turns are new."""
    new = [change.candidate for change in changes if change.key not in current]
    turns = [change.provenance for change in new if change.kind == TURN and change.provenance]
    ids = [id for source in turns for id in source.message_ids]
    return (await find_end_dates(scope, turns[0].thread_id, ids)) if turns else {}


async def plan_admitted_changes(
    changes: Sequence[Change],
    current: CurrentMemories,
    end_dates: dict[str, str],
    gate: Gate,
    scope: Scope,
) -> ChangePlan:
    """What the gate admits; each replaces the memory under its key, if there is one."""
    candidates = [_build_candidate(proposed, current) for proposed in changes]
    keys = [proposed.key for proposed in changes]
    generated_keys = [
        change.key for change in changes if change.candidate.explicit and change.key not in current
    ]
    admitted = await plan_admission(
        gate, scope.adapter, scope.namespace, candidates, keys, generated_keys, scope.thread
    )
    memory_puts = {put.key: put for put in admitted.puts if put.namespace == scope.namespace}
    puts = [put for put in admitted.puts if put.namespace != scope.namespace]  # quarantine
    turn_puts: list[PutItem] = []
    outcomes: list[Outcome] = []
    for proposed, outcome in zip(changes, admitted.outcomes, strict=True):
        memory = current.get(proposed.key)
        is_extracted = isinstance(proposed, Revision) and not proposed.candidate.explicit
        if outcome.change == "added" and memory is None:
            new_version = 0 if scope.adapter.versioned else None
            puts.append(replace(memory_puts[proposed.key], if_version=new_version))
        elif outcome.change == "added" and memory is not None:
            until = _choose_end_date(proposed, memory)
            replacement, outcome = _plan_replacement(
                proposed, memory_puts[proposed.key], memory, until, outcome
            )
            puts += replacement
            if outcome.change == "superseded":
                source = proposed.candidate.provenance
                turn_puts += await build_superseded_turn_puts(scope.adapter, memory, until, source)
                if source and memory.provenance and memory.provenance.thread_id == source.thread_id:
                    dropped_ids = find_dropped_messages(
                        memory.provenance, source
                    )  # their turns may be new too
                    end_dates |= dict.fromkeys(dropped_ids, until.isoformat())
        elif (
            is_extracted
            and outcome.change == "unchanged"
            and memory
            and outcome.key != proposed.key
        ):
            puts.append(build_removal(memory.namespace, memory.key, memory.version))
            outcome = Outcome("deleted", proposed.key, "another memory says the same")
        outcomes.append(outcome)
    return ChangePlan(
        [*(_add_end_date(put, current, end_dates) for put in puts), *turn_puts], outcomes
    )


def _build_candidate(proposed: Change, current: CurrentMemories) -> Candidate:
    if isinstance(proposed, Addition):
        return proposed.candidate
    return replace(proposed.candidate, kind=current[proposed.key].kind)


def _plan_replacement(
    proposed: Change, put: PutItem, memory: Memory, until: datetime, admitted: Outcome
) -> tuple[list[PutItem], Outcome]:
    """The put of an admitted memory, if the stored one is still the version that was read."""
    value = put.value or {}
    # what was made before may have been changed since
    is_unchanged = isinstance(proposed, Addition) and (
        memory.kind != TURN or memory.text == value["text"]
    )
    if is_unchanged or get_content_fields(value) == get_content_fields(memory.value):
        return [], Outcome("unchanged", proposed.key, UNCHANGED_REASON)
    change: Alteration = proposed.change if isinstance(proposed, Revision) else "updated"
    remaining_fields = {
        name: part
        for name, part in memory.value.items()
        if name not in (REDACTED_FIELD, UNTIL_FIELD)
    }
    ended_at = until if change == "superseded" else None
    value = build_next_value(memory, {**remaining_fields, **value}, change, ended_at)
    put = replace(put, value=value, if_version=memory.version)
    return [put], replace(admitted, change=change)


def _add_end_date(put: PutItem, current: CurrentMemories, end_dates: Mapping[str, str]) -> PutItem:
    value, ids = put.value or {}, put.provenance.message_ids if put.provenance else ()
    if value.get("kind") != TURN or put.key in current or end_dates.keys().isdisjoint(ids):
        return put
    return replace(put, value={**value, UNTIL_FIELD: end_dates[ids[0]]})


def _choose_end_date(proposed: Change, memory: Memory) -> datetime:
    """When a memory stopped being true: at the time of the new text, if that is known and later."""
    if isinstance(proposed, Revision) and proposed.until:
        return proposed.until
    said_at = proposed.candidate.provenance.at if proposed.candidate.provenance else None
    previous_said_at = memory.provenance.at if memory.provenance else None
    return (
        said_at
        if said_at and (previous_said_at is None or previous_said_at < said_at)
        else datetime.now(UTC)
    )


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
        generated_key = "".join(secrets.choice(_KEY_LETTERS) for _ in range(_KEY_LENGTH))
        memory_key = generated_key if key is None else check_key(key)

        async def plan() -> ChangePlan:
            counter_puts = await build_change_counter_puts(self.adapter, self.namespace)
            existing = await self.adapter.get(self.namespace, memory_key)
            if existing is None:
                addition = Addition(memory_key, self._build_candidate(value, self.kind, provenance))
                return await self._plan_change(addition, None, counter_puts)
            if get_content_fields(existing.value) == value:
                return ChangePlan(outcomes=[Outcome("unchanged", memory_key, UNCHANGED_REASON)])
            if on_conflict is None:
                raise ConfigurationError(
                    f"the key {key!r} is that of another memory in {self.namespace!r}; supersede "
                    "that"
                )
            return await self._plan_revision(
                existing, memory, provenance, on_conflict, None, counter_puts
            )

        return await self._write_change(plan)

    async def replace(
        self,
        key: str,
        memory: MemoryInput,
        provenance: Provenance,
        change: Replacement,
        ended_at: datetime | None = None,
        if_version: int | None = None,
    ) -> Outcome:
        """Update or supersede a memory."""

        async def plan() -> ChangePlan:
            counter_puts = await build_change_counter_puts(self.adapter, self.namespace)
            previous = await self._get_existing(key)
            if if_version not in (None, previous.version):
                raise VersionConflict(
                    f"the memory {key!r} is at version {previous.version}, not {if_version!r}; "
                    "read it again before you change it"
                )
            return await self._plan_revision(
                previous, memory, provenance, change, ended_at, counter_puts
            )

        return await self._write_change(plan)

    async def delete(self, key: str) -> Outcome:
        """Delete a memory, with tombstones of all its texts."""

        async def plan(*, with_tombstones: bool = True) -> ChangePlan:
            memory = await self._get_existing(key)
            puts = [build_removal(self.namespace, key, memory.version)]
            if not with_tombstones:
                return ChangePlan(puts, [Outcome("deleted", key, NO_TOMBSTONE_REASON)])
            versions = await self.adapter.list_versions(self.namespace, key)
            puts += [
                put
                for version in (*versions, memory)
                for put in build_tombstones(version, "deleted")
            ]
            puts = await add_former_ids(self.adapter, puts)
            return ChangePlan(puts, [Outcome("deleted", key)])

        try:
            return await self._write_change(plan)
        except LimitExceeded:  # without room for tombstones it is deleted all the same
            return await self._write_change(partial(plan, with_tombstones=False))

    def build_value(
        self, memory: MemoryInput, previous: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The text and fields of a memory, as JSON; those of the previous value stay."""
        previous_fields, fields = get_content_fields(previous or {}), _read_fields(memory)
        value = {
            **previous_fields,
            **(
                fields
                if self.schema is None
                else _validate_fields(self.schema, previous_fields, fields)
            ),
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
        ended_at: datetime | None,
        counter_puts: Sequence[PutItem],
    ) -> ChangePlan:
        value = self.build_value(memory, previous.value)
        if value == get_content_fields(previous.value):
            return ChangePlan(outcomes=[Outcome("unchanged", previous.key, UNCHANGED_REASON)])
        candidate = self._build_candidate(value, previous.kind, provenance)
        return await self._plan_change(
            Revision(previous.key, change, candidate, ended_at), previous, counter_puts
        )

    async def _plan_change(
        self, change: Change, previous: Memory | None, counter_puts: Sequence[PutItem]
    ) -> ChangePlan:
        scope = Scope(self.adapter, self.namespace)
        current = {} if previous is None else {change.key: previous}
        plan = await plan_admitted_changes([change], current, {}, self.gate, scope)
        return plan._replace(puts=[*plan.puts, *counter_puts]) if plan.puts else plan

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
    reserved = [name for name in PERDURE_FIELDS if name in fields]
    if reserved or TEXT not in fields or fields[TEXT].annotation is not str:
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
    schema: type[BaseModel], previous_fields: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields that a schema accepts, by their names, as JSON: so they are read back."""
    others = {name: part for name, part in previous_fields.items() if name in schema.model_fields}
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

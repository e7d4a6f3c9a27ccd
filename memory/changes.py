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
from perdure.memory.detectors import REDACTED
from perdure.memory.extractors import (
    UNTIL,
    Addition,
    Alteration,
    Proposal,
    Revision,
    Scope,
    ends_of,
    left_behind,
    superseded_turns,
)
from perdure.memory.gate import Gate, add_former_ids, admit, sources, tombstones_of
from perdure.memory.model_call import describe_validation_errors
from perdure.memory.records import (
    CHANGED,
    EPISODE,
    PREVIOUS,
    SOURCE,
    TURN,
    Candidate,
    Memory,
    Outcome,
    Planned,
    Role,
    StoreAdapter,
    memory_of,
    note_of,
    notes_of,
    removal_of,
    succeeding,
)
from perdure.memory.run_config import read_run_source
from perdure.storage.database import is_in_event_loop
from perdure.storage.locks import Locks
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.namespaces import check_key

OWN: Final = ("kind", PREVIOUS, SOURCE, REDACTED)  # fields of a value that perdure sets
SAME: Final = "it says so already"
_NOTE: Final = "memories"
_WAIT_S: Final = 10.0  # for a change that takes longer, others do not wait: its write tells
TRIES: Final = 50  # each that fails is one in which another change succeeded
_RANKS: Final[Mapping[str, int]] = {"user": 3, "system": 2, "assistant": 1, "tool": 0}
Given = str | Mapping[str, Any] | BaseModel
"""A memory's text; or its text and fields, as a dict or as an instance of the schema."""
Replacement = Literal["updated", "superseded"]
TEXT: Final = "text"
NO_TOMBSTONE: Final = "there is no room to note that it is not to be extracted again"
_KEY: Final = 9  # characters of a key, which a model has to copy
_LETTERS: Final = "23456789abcdefghjkmnpqrstuvwxyz"  # none looks like another
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
Change = Addition | Revision
Present = Mapping[str, Memory]  # the stored memories, by key


async def change_note(adapter: StoreAdapter, namespace: Namespace) -> list[PutItem]:
    """The puts with which a write is a `VersionConflict` if another came after this call."""
    if not adapter.versioned:
        return []
    place = notes_of(CHANGED, namespace)
    note = await adapter.got(place, _NOTE)
    number, version = (0, 0) if note is None else (note.value["number"], note.version)
    return [note_of(place, _NOTE, {"number": number + 1}, if_version=version)]


async def written(
    adapter: StoreAdapter, plan: Callable[[], Operation[Planned]], tries: int = TRIES
) -> Planned:
    """Plan a change and write it; it is planned again if another was written meanwhile."""
    while True:
        made = await plan()
        tries -= 1
        try:
            await adapter.written(made.puts)
        except VersionConflict:
            if not tries:
                raise
        else:
            return made


async def written_in_turn(
    adapter: StoreAdapter, namespace: Namespace, plan: Callable[[], Operation[Planned]]
) -> Planned:
    """See `written`; this process plans the changes of a namespace one after another.

    Of many at once each would be judged again for every other; and a store without versions has
    no conflicts.
    """
    # stores on one file share its database; a forked process has locks of its own
    name = f"{id(getattr(adapter.store, 'database', adapter.store))} {namespace!r}"
    locks, turn = _locks(os.getpid()), None
    with suppress(AlreadyLocked, StorageUnavailable):  # not free in time, or held by the caller
        turn = await Effect(
            lambda: locks.acquire(name, 0.0 if is_in_event_loop() else _WAIT_S),
            lambda: locks.aacquire(name, _WAIT_S),
        )
    try:
        return await written(adapter, plan)
    finally:
        if turn is not None:
            locks.release(turn)


@cache
def _locks(process: int) -> Locks:
    return Locks(None)


async def planned(proposal: Proposal, gate: Gate, scope: Scope) -> Planned:
    """The puts and outcomes of a proposal."""
    additions, unchanged = await _without_known_episodes(proposal.additions, scope)
    changes: list[Change] = [*additions, *proposal.revisions]
    note = (await change_note(scope.adapter, scope.namespace)) if changes else []
    present = (await _present(scope, changes)) if changes else {}
    deleted = _deleted(proposal.revisions, present)
    written = [
        change for change in changes if not isinstance(change, Revision) or _is_due(change, present)
    ]
    has_facts = not note or bool(note[0].if_version)  # a store without versions has no note
    ends = (await _ends(written, present, scope)) if has_facts else {}
    if deleted.puts:
        deleted = deleted._replace(puts=await add_former_ids(scope.adapter, deleted.puts))
    kept = await judged(written, present, ends, gate, scope)
    parts = [Planned(outcomes=proposal.outcomes), unchanged, deleted, kept]
    for plan in proposal.plans:
        parts.append(await plan(gate))
    events = {TURN, EPISODE}.issuperset(change.candidate.kind for change in additions)
    if (deleted.puts or kept.puts) and not (events and not proposal.revisions):
        parts.append(Planned(note))  # new turns and episodes conflict with no fact
    puts: dict[tuple[Namespace, str], PutItem] = {}
    for put in (put for part in parts for put in part.puts):
        puts.setdefault((put.namespace, put.key), put)  # two facts may mark one turn as past
    return Planned(list(puts.values()), [outcome for part in parts for outcome in part.outcomes])


async def _without_known_episodes(
    additions: Sequence[Addition], scope: Scope
) -> tuple[Sequence[Addition], Planned]:
    if not any(addition.candidate.kind == EPISODE for addition in additions):
        return additions, Planned()
    by_source: dict[str, str] = {}
    for memory in await scope.adapter.every(scope.namespace, filter={"kind": EPISODE}):
        by_source |= dict.fromkeys(sources(memory.provenance), memory.key)
    new: list[Addition] = []
    outcomes: list[Outcome] = []
    for addition in additions:
        keys_known = [
            by_source[mark] for mark in sources(addition.candidate.provenance) if mark in by_source
        ]
        if keys_known and addition.candidate.kind == EPISODE:
            outcomes.append(Outcome("unchanged", keys_known[-1]))
        else:
            new.append(addition)
    return new, Planned(outcomes=outcomes)


async def _present(scope: Scope, changes: Sequence[Change]) -> dict[str, Memory]:
    keys = dict.fromkeys(change.key for change in changes)
    ops = [GetOp(scope.namespace, key, refresh_ttl=False) for key in keys]
    items = await scope.adapter.call("batch", ops)
    return {item.key: memory_of(item) for item in items if item is not None}


def _refusal(revision: Revision, memory: Memory | None) -> str:
    """Why a memory may not be changed; "": it may."""
    if memory is None:
        return "the memory does not exist any more"
    whose = (memory.provenance.trust if memory.provenance else None) or "user"
    role = revision.candidate.role
    if _RANKS.get(whose, 3) <= _RANKS[role]:
        return ""
    return f"it rests on the words of the {whose}, the change only on those of the {role}"


def _is_due(revision: Revision, present: Present) -> bool:
    return revision.change != "deleted" and not _refusal(revision, present.get(revision.key))


def _deleted(revisions: Sequence[Revision], present: Present) -> Planned:
    puts: list[PutItem] = []
    outcomes: list[Outcome] = []
    for revision in revisions:
        memory = present.get(revision.key)
        why = _refusal(revision, memory)
        if memory is None or why:
            check = "model" if memory is None else "role"
            outcomes.append(Outcome("refused", revision.key, why, check))
        elif revision.change == "deleted":
            puts.append(removal_of(memory.namespace, memory.key, memory.version))
            if memory.kind != TURN:  # an edited message may get its previous text again
                puts += tombstones_of(memory, "deleted")
            outcomes.append(Outcome("deleted", memory.key))
    return Planned(puts, outcomes)


async def _ends(changes: Sequence[Change], present: Present, scope: Scope) -> dict[str, str]:
    """The dates at which facts were superseded that rest on messages whose turns are new."""
    new = [change.candidate for change in changes if change.key not in present]
    turns = [change.provenance for change in new if change.kind == TURN and change.provenance]
    ids = [id for source in turns for id in source.message_ids]
    return (await ends_of(scope, turns[0].thread_id, ids)) if turns else {}


async def judged(
    changes: Sequence[Change], present: Present, ends: dict[str, str], gate: Gate, scope: Scope
) -> Planned:
    """What the gate admits; each replaces the memory under its key, if there is one."""
    candidates = [_of_its_kind(proposed, present) for proposed in changes]
    keys = [proposed.key for proposed in changes]
    made = [each.key for each in changes if each.candidate.explicit and each.key not in present]
    admitted = await admit(
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
            until = _until(proposed, memory)
            changed, outcome = _replaced(proposed, own[proposed.key], memory, until, outcome)
            puts += changed
            if outcome.change == "superseded":
                source = proposed.candidate.provenance
                past += await superseded_turns(scope.adapter, memory, until, source)
                if source and memory.provenance and memory.provenance.thread_id == source.thread_id:
                    ended = left_behind(memory.provenance, source)  # their turns may be new too
                    ends |= dict.fromkeys(ended, until.isoformat())
        elif extracted and outcome.change == "unchanged" and memory and outcome.key != proposed.key:
            puts.append(removal_of(memory.namespace, memory.key, memory.version))
            outcome = Outcome("deleted", proposed.key, "another memory says the same")
        outcomes.append(outcome)
    return Planned([*(_ended(put, present, ends) for put in puts), *past], outcomes)


def _of_its_kind(proposed: Change, present: Present) -> Candidate:
    if isinstance(proposed, Addition):
        return proposed.candidate
    return replace(proposed.candidate, kind=present[proposed.key].kind)


def _replaced(
    proposed: Change, put: PutItem, memory: Memory, until: datetime, admitted: Outcome
) -> tuple[list[PutItem], Outcome]:
    """The put of an admitted memory, if the stored one is still the version that was read."""
    value = put.value or {}
    # what was made before may have been changed since
    stays = isinstance(proposed, Addition) and (memory.kind != TURN or memory.text == value["text"])
    if stays or own_fields(value) == own_fields(memory.value):
        return [], Outcome("unchanged", proposed.key, SAME)
    change: Alteration = proposed.change if isinstance(proposed, Revision) else "updated"
    kept = {name: part for name, part in memory.value.items() if name not in (REDACTED, UNTIL)}
    ended = until if change == "superseded" else None
    value = succeeding(memory, {**kept, **value}, change, ended)
    put = replace(put, value=value, if_version=memory.version)
    return [put], replace(admitted, change=change)


def _ended(put: PutItem, present: Present, ends: Mapping[str, str]) -> PutItem:
    value, ids = put.value or {}, put.provenance.message_ids if put.provenance else ()
    if value.get("kind") != TURN or put.key in present or ends.keys().isdisjoint(ids):
        return put
    return replace(put, value={**value, UNTIL: ends[ids[0]]})


def _until(proposed: Change, memory: Memory) -> datetime:
    """When a memory stopped being true: at the time of the new text, if that is known and later."""
    if isinstance(proposed, Revision) and proposed.until:
        return proposed.until
    at = proposed.candidate.provenance.at if proposed.candidate.provenance else None
    since = memory.provenance.at if memory.provenance else None
    return at if at and (since is None or since < at) else datetime.now(UTC)


def own_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """The text and the fields in a memory's value, without those that perdure sets."""
    return {name: part for name, part in value.items() if name not in OWN}


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
        memory: Given,
        provenance: Provenance,
        key: str | None = None,
        instead: Replacement | None = None,
    ) -> Outcome:
        """Add a memory; a different one with the key is changed `instead`, or is an error."""
        value = self.value(memory)
        made = "".join(secrets.choice(_LETTERS) for _ in range(_KEY))
        place = made if key is None else check_key(key)

        async def plan() -> Planned:
            note = await change_note(self.adapter, self.namespace)
            there = await self.adapter.got(self.namespace, place)
            if there is None:
                addition = Addition(place, self._candidate(value, self.kind, provenance))
                return await self._judged(addition, None, note)
            if own_fields(there.value) == value:
                return Planned(outcomes=[Outcome("unchanged", place, SAME)])
            if instead is None:
                raise ConfigurationError(
                    f"the key {key!r} is that of another memory in {self.namespace!r}; supersede "
                    "that"
                )
            return await self._revised(there, memory, provenance, instead, None, note)

        return await self._outcome(plan)

    async def replace(
        self,
        key: str,
        memory: Given,
        provenance: Provenance,
        change: Replacement,
        at: datetime | None = None,
        if_version: int | None = None,
    ) -> Outcome:
        """Update or supersede a memory."""

        async def plan() -> Planned:
            note = await change_note(self.adapter, self.namespace)
            previous = await self._present(key)
            if if_version not in (None, previous.version):
                raise VersionConflict(
                    f"the memory {key!r} is at version {previous.version}, not {if_version!r}; "
                    "read it again before you change it"
                )
            return await self._revised(previous, memory, provenance, change, at, note)

        return await self._outcome(plan)

    async def delete(self, key: str) -> Outcome:
        """Delete a memory, with tombstones of all its texts."""

        async def plan(*, marked: bool = True) -> Planned:
            memory = await self._present(key)
            puts = [removal_of(self.namespace, key, memory.version)]
            if not marked:
                return Planned(puts, [Outcome("deleted", key, NO_TOMBSTONE)])
            past = await self.adapter.versions(self.namespace, key)
            puts += [
                put for version in (*past, memory) for put in tombstones_of(version, "deleted")
            ]
            puts = await add_former_ids(self.adapter, puts)
            return Planned(puts, [Outcome("deleted", key)])

        try:
            return await self._outcome(plan)
        except LimitExceeded:  # without room for tombstones it is deleted all the same
            return await self._outcome(partial(plan, marked=False))

    def value(self, memory: Given, previous: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The text and fields of a memory, as JSON; those of the previous value stay."""
        kept, fields = own_fields(previous or {}), _fields(memory)
        value = {**kept, **(fields if self.schema is None else _fitted(self.schema, kept, fields))}
        text = value.get(TEXT)
        if not isinstance(text, str) or not text.strip() or _SURROGATE.search(text):
            raise InvalidValue(
                f"text is {text!r:.80}; expected a sentence that can stand alone, in Unicode"
            )
        return {**value, TEXT: text.strip()}

    async def _revised(
        self,
        previous: Memory,
        memory: Given,
        provenance: Provenance,
        change: Replacement,
        at: datetime | None,
        note: Sequence[PutItem],
    ) -> Planned:
        value = self.value(memory, previous.value)
        if value == own_fields(previous.value):
            return Planned(outcomes=[Outcome("unchanged", previous.key, SAME)])
        candidate = self._candidate(value, previous.kind, provenance)
        return await self._judged(Revision(previous.key, change, candidate, at), previous, note)

    async def _judged(
        self, change: Change, previous: Memory | None, note: Sequence[PutItem]
    ) -> Planned:
        scope = Scope(self.adapter, self.namespace)
        present = {} if previous is None else {change.key: previous}
        plan = await judged([change], present, {}, self.gate, scope)
        return plan._replace(puts=[*plan.puts, *note]) if plan.puts else plan

    async def _outcome(self, plan: Callable[[], Operation[Planned]]) -> Outcome:
        return (await written_in_turn(self.adapter, self.namespace, plan)).outcomes[0]

    async def _present(self, key: str) -> Memory:
        memory = await self.adapter.got(self.namespace, check_key(key))
        if memory is None or not isinstance(memory.value.get(TEXT), str):
            raise unknown(self.namespace, key)
        return memory

    def _candidate(self, value: Mapping[str, Any], kind: str, provenance: Provenance) -> Candidate:
        fields = {name: part for name, part in value.items() if name != TEXT}
        if self.author is not None:
            provenance = replace(provenance, author=self.author)
        role: Any = provenance.trust if provenance.trust in get_args(Role) else "user"
        return Candidate(value[TEXT], kind, fields, provenance, role, True, self.by_model)


def provenance_of(
    config: RunnableConfig | None, provenance: Provenance | None = None
) -> Provenance:
    """Where a memory comes from: as given, else from the user, in the run, now."""
    if provenance is None:
        provenance = Provenance(*read_run_source(config), actor="user", at=datetime.now(UTC))
    return provenance if provenance.trust is not None else replace(provenance, trust="user")


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


def _fields(memory: Given) -> dict[str, Any]:
    if isinstance(memory, str):
        return {TEXT: memory}
    if isinstance(memory, BaseModel):
        return memory.model_dump(mode="json", exclude_unset=True)
    if not isinstance(memory, Mapping):
        raise InvalidValue(
            f"the memory is {memory!r:.80}; expected text, a dict with 'text', or a model"
        )
    for name in OWN:
        if name in memory:
            raise InvalidValue(f"the memory has a field {name!r}, which perdure sets; rename it")
    return dict(memory)


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
            f"the memory does not fit the schema {schema.__name__}: "
            f"{describe_validation_errors(exc)}"
        ) from exc
    except ValueError as exc:
        raise InvalidValue(f"the memory is no JSON: {exc}") from exc
    return memory.model_dump(mode="json")

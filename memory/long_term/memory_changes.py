"""Plan changes to memories, check them with the gate, and write them with compare-and-set.

A write plan lists the puts that carry out a change. A plan is based on the memories that were
stored when it was built. In a versioned store, each put in a write plan specifies the version that
the memory had when the plan was built. The put fails if the memory has changed since then. A change
that depends on other memories of the namespace also increments the namespace's change counter. For
example, the addition of a fact depends on all other memories, because a fact is added only if no
stored memory states it already. If a concurrent change was written first, the write fails, and the
change is planned again from the current memories.

`plan_proposed_changes` builds the write plan for the changes that an extractor proposes.
`MemoryWriter` builds the plan for a change that a person, a tool or an application requests.
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
from perdure.memory.long_term.detectors import REDACTED_FIELD
from perdure.memory.long_term.extractors import (
    UNTIL_FIELD,
    Addition,
    Alteration,
    Proposal,
    Revision,
    Scope,
    build_puts_that_add_end_date_to_source_turns,
    find_dates_when_facts_from_messages_were_superseded,
    list_source_message_ids_missing_in_successor,
)
from perdure.memory.long_term.gate import (
    Gate,
    add_message_ids_of_replaced_tombstones,
    build_tombstone_keys_of_source_messages,
    build_tombstones,
    judge_candidates_and_plan_puts,
)
from perdure.memory.long_term.records import (
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
    build_memory_value_with_previous_texts,
    build_namespace_of_notes_about_memories,
    build_removal,
    build_unsearched_permanent_note_put,
    convert_item_to_memory,
)
from perdure.memory.model_call import describe_validation_errors
from perdure.memory.run_config import read_thread_and_checkpoint_id_of_run
from perdure.storage.flow import is_in_event_loop
from perdure.storage.locks import Locks
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.namespaces import check_item_key

PERDURE_FIELDS: Final = ("kind", PREVIOUS, SOURCE, REDACTED_FIELD)
"""Fields of a memory's value that perdure sets.

The schema of an application's memories must not have fields with these names.
"""
UNCHANGED_REASON: Final = "the memory already states this"
_CHANGE_COUNTER_KEY: Final = "memories"
_LOCK_WAIT_S: Final = 10.0
"""Maximum seconds that a change waits for other changes of this process in the same namespace.

After that, the change is planned without the lock. A versioned store detects a conflict when the
change is written.
"""
# Maximum number of attempts to plan and write a change. An attempt fails if another change to the
# namespace is written between planning and writing.
MAX_TRIES: Final = 50
_TRUST_RANKS: Final[Mapping[str, int]] = {"user": 3, "system": 2, "assistant": 1, "tool": 0}
"""The rank of each trust class.

An extractor can change or delete a memory only on the words of a speaker whose trust class has the
same rank as the memory's trust class, or a higher rank.
"""
MemoryInput = str | Mapping[str, Any] | BaseModel
"""A memory's text, or its text and fields as a dict or as an instance of the schema."""
ReplacementKind = Literal["updated", "superseded"]
TEXT: Final = "text"
NO_TOMBSTONE_REASON: Final = (
    "the store has no room for a tombstone, so the memory might be extracted again"
)
# length of a generated key, in characters; keys are short because models have to copy them
_KEY_LENGTH: Final = 9
# alphabet for generated keys, without letters and digits that look alike
_KEY_LETTERS: Final = "23456789abcdefghjkmnpqrstuvwxyz"
_RANDOM: Final = secrets.SystemRandom()
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
ProposedChange = Addition | Revision
CurrentMemories = Mapping[str, Memory]
"""The stored memories that a plan concerns, by key."""


async def build_puts_that_increment_change_counter(
    adapter: StoreAdapter, namespace: Namespace
) -> list[PutItem]:
    """Return a list with the put operation that increments a namespace's change counter.

    Executing the returned put operation raises `VersionConflict` if a concurrent change was written
    first. An empty list is returned if the store keeps no versions, because such a store has no
    change counters.
    """
    if not adapter.versioned:
        return []
    notes_namespace = build_namespace_of_notes_about_memories(CHANGE_COUNTERS, namespace)
    # Read the change counter as a raw store item. The functions that read memories expect an item
    # with a text, and a change counter has no text.
    counter = await adapter.call("get", notes_namespace, _CHANGE_COUNTER_KEY, refresh_ttl=False)
    number, version = (0, 0) if counter is None else (counter.value["number"], counter.version)
    return [
        build_unsearched_permanent_note_put(
            notes_namespace, _CHANGE_COUNTER_KEY, {"number": number + 1}, if_version=version
        )
    ]


async def plan_and_write_with_retries(
    adapter: StoreAdapter, plan: Callable[[], Operation[ChangePlan]], max_tries: int = MAX_TRIES
) -> ChangePlan:
    """Plan and write a change, starting over if a concurrent change is written first.

    Args:
        adapter: The adapter of the store that contains the item.
        plan: Plans the change against the stored memories.
        max_tries: The maximum number of times that the change is planned.

    Returns:
        The plan that was written.

    Raises:
        VersionConflict: During each try, another change was written.
    """
    remaining_tries = max_tries
    while True:
        change_plan = await plan()
        remaining_tries -= 1
        try:
            await adapter.write(change_plan.puts)
        except VersionConflict:
            if not remaining_tries:
                raise
        else:
            return change_plan


async def plan_and_write_with_namespace_lock(
    adapter: StoreAdapter, namespace: Namespace, plan: Callable[[], Operation[ChangePlan]]
) -> ChangePlan:
    """Plan and write a change while holding this process's lock for the namespace.

    Without the lock, concurrent changes would often conflict and have to be planned again. A store
    without versions cannot detect conflicts, so only the lock prevents concurrent changes from
    overwriting each other.

    Args:
        adapter: The adapter of the store that contains the item.
        namespace: The namespace of the memories.
        plan: Plans the change against the stored memories.

    Returns:
        The plan that was written.
    """
    # Stores opened on the same file share one database object, and therefore one lock per
    # namespace. A forked process gets its own locks.
    name = f"{id(getattr(adapter.store, 'database', adapter.store))} {namespace!r}"
    locks, lock = _get_namespace_locks_of_process(os.getpid()), None
    # Write the change without the namespace's lock if waiting for the lock timed out, or if the
    # caller already holds the lock.
    with suppress(AlreadyLocked, StorageUnavailable):
        # If the calling OS thread runs an event loop, the blocking call tries to acquire the lock
        # without waiting, because waiting would block the event loop.
        wait_s = 0.0 if is_in_event_loop() else _LOCK_WAIT_S
        lock = await Effect(
            partial(locks.acquire, name, wait_s), partial(locks.aacquire, name, _LOCK_WAIT_S)
        )
    try:
        return await plan_and_write_with_retries(adapter, plan)
    finally:
        if lock is not None:
            locks.release(lock)


@cache
def _get_namespace_locks_of_process(process_id: int) -> Locks:
    """Return the locks of the process with the given process id.

    A forked child process gets its own locks instead of inheriting those of its parent.
    """
    return Locks(None)


async def plan_proposed_changes(proposal: Proposal, gate: Gate, scope: Scope) -> ChangePlan:
    """Build the write plan for the changes that an extractor proposes.

    Args:
        proposal: The proposed changes.
        gate: Judges the new and the changed memories.
        scope: The namespace of the memories, and the run.

    Returns:
        The puts, and an outcome for each proposed change.
    """
    additions, unchanged = await _filter_out_stored_episodes_and_plan_outcomes(
        proposal.additions, scope
    )
    changes: list[ProposedChange] = [*additions, *proposal.revisions]
    puts_of_change_counter = (
        (await build_puts_that_increment_change_counter(scope.adapter, scope.namespace))
        if changes
        else []
    )
    current = (await _read_memories_that_changes_refer_to(scope, changes)) if changes else {}
    deletions = _plan_deletions(proposal.revisions, current)
    permitted = [
        change
        for change in changes
        if not isinstance(change, Revision) or _is_permitted_replacement(change, current)
    ]
    # In a versioned store, a namespace without a change counter contains no facts. Other stores
    # have no change counters, so assume that the namespace contains facts.
    has_facts = not puts_of_change_counter or bool(puts_of_change_counter[0].if_version)
    end_dates = (
        (await _map_message_ids_to_end_dates_of_turns(permitted, current, scope))
        if has_facts
        else {}
    )
    if deletions.puts:
        deletions = deletions._replace(
            puts=await add_message_ids_of_replaced_tombstones(scope.adapter, deletions.puts)
        )
    admitted = await plan_changes_that_gate_admits(permitted, current, end_dates, gate, scope)
    parts = [ChangePlan(outcomes=proposal.outcomes), unchanged, deletions, admitted]
    for plan in proposal.plan_functions:
        parts.append(await plan(gate))
    adds_no_facts = {TURN, EPISODE}.issuperset(change.candidate.kind for change in additions)
    if (deletions.puts or admitted.puts) and not (adds_no_facts and not proposal.revisions):
        # A proposal that only adds turns and episodes does not increment the change counter,
        # because new turns and episodes cannot conflict with other changes.
        parts.append(ChangePlan(puts_of_change_counter))
    puts: dict[tuple[Namespace, str], PutItem] = {}
    for put in (put for part in parts for put in part.puts):
        # For each key, keep only the first put. Several parts of the plan can contain a put
        # operation for the same key, for example if one message stated two facts that are now
        # superseded. In this example, both put operations set an end date in the same memory, which
        # contains the text of the message.
        puts.setdefault((put.namespace, put.key), put)
    return ChangePlan(list(puts.values()), [outcome for part in parts for outcome in part.outcomes])


async def _filter_out_stored_episodes_and_plan_outcomes(
    additions: Sequence[Addition], scope: Scope
) -> tuple[Sequence[Addition], ChangePlan]:
    """Filter out new episodes that share a source message with a stored episode.

    Returns:
        The remaining additions, and a plan with the outcomes of the filtered-out episodes.
    """
    if not any(addition.candidate.kind == EPISODE for addition in additions):
        return additions, ChangePlan()
    key_by_source: dict[str, str] = {}
    for memory in await scope.adapter.list_memories(scope.namespace, filter={"kind": EPISODE}):
        key_by_source |= dict.fromkeys(
            build_tombstone_keys_of_source_messages(memory.provenance), memory.key
        )
    new: list[Addition] = []
    outcomes: list[Outcome] = []
    for addition in additions:
        stored_keys = [
            key_by_source[source]
            for source in build_tombstone_keys_of_source_messages(addition.candidate.provenance)
            if source in key_by_source
        ]
        if stored_keys and addition.candidate.kind == EPISODE:
            outcomes.append(Outcome("unchanged", stored_keys[-1]))
        else:
            new.append(addition)
    return new, ChangePlan(outcomes=outcomes)


async def _read_memories_that_changes_refer_to(
    scope: Scope, changes: Sequence[ProposedChange]
) -> dict[str, Memory]:
    """Return the stored memories that have the keys of `changes`, as a dict by memory key."""
    keys = dict.fromkeys(change.key for change in changes)
    ops = [GetOp(scope.namespace, key, refresh_ttl=False) for key in keys]
    items = await scope.adapter.call("batch", ops)
    return {item.key: convert_item_to_memory(item) for item in items if item is not None}


def _find_refusal_reason(revision: Revision, memory: Memory | None) -> str:
    """Return the reason why a revision of a memory is not permitted, or "" if it is permitted.

    A revision is permitted if the memory exists and is not more trusted than the revision's source.
    """
    if memory is None:
        return "the memory no longer exists"
    trust = (memory.provenance.trust if memory.provenance else None) or "user"
    role = revision.candidate.role
    if _TRUST_RANKS.get(trust, 3) <= _TRUST_RANKS[role]:
        return ""
    return (
        f"the memory comes from a message with the role {trust!r}, but the change comes only from "
        f"a message with the role {role!r}"
    )


def _is_permitted_replacement(revision: Revision, current: CurrentMemories) -> bool:
    """Return whether a revision is permitted and does not delete the memory."""
    return revision.change != "deleted" and not _find_refusal_reason(
        revision, current.get(revision.key)
    )


def _plan_deletions(revisions: Sequence[Revision], current: CurrentMemories) -> ChangePlan:
    """Build the write plan for the deletions in `revisions`, with an outcome for each revision."""
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
            # A deleted turn gets no tombstone, because its text may be stored again. A user can
            # shorten a message, which deletes turns, and restore the old text later.
            if memory.kind != TURN:
                puts += build_tombstones(memory, "deleted")
            outcomes.append(Outcome("deleted", memory.key))
    return ChangePlan(puts, outcomes)


async def _map_message_ids_to_end_dates_of_turns(
    changes: Sequence[ProposedChange], current: CurrentMemories, scope: Scope
) -> dict[str, str]:
    """Return, for each new turn with a superseded fact, the date when the fact ceased to be true.

    Here, a turn is a memory of the kind `TURN`, which contains the text of one message. The keys of
    the returned dict are message ids.

    A turn is stored with an end date if a fact that was extracted from it has been superseded. If a
    fact from a turn was superseded, the turn's end date is the time at which the fact ceased to be
    true.
    """
    new_candidates = [change.candidate for change in changes if change.key not in current]
    turns = [
        change.provenance for change in new_candidates if change.kind == TURN and change.provenance
    ]
    ids = [id for source in turns for id in source.message_ids]
    return (
        (await find_dates_when_facts_from_messages_were_superseded(scope, turns[0].thread_id, ids))
        if turns
        else {}
    )


async def plan_changes_that_gate_admits(
    changes: Sequence[ProposedChange],
    current: CurrentMemories,
    turn_end_dates_by_message_id: dict[str, str],
    gate: Gate,
    scope: Scope,
) -> ChangePlan:
    """Judge proposed memory changes with a gate, and plan the store writes that follow.

    A gate decides whether each change is admitted, quarantined or refused.

    Args:
        changes: The changes to judge.
        current: The stored memories under the keys of the changes. An admitted change replaces the
            memory under its key.
        turn_end_dates_by_message_id: Dates (ISO 8601) until which the turns of messages were true,
            by message id. The function adds to this dict the end dates of the facts that the
            changes supersede.
        gate: The gate.
        scope: The namespace of the memories, and the run.

    Returns:
        The puts, and an outcome for each change in order.
    """
    candidates = [
        proposed.candidate
        if isinstance(proposed, Addition)
        else replace(proposed.candidate, kind=current[proposed.key].kind)
        for proposed in changes
    ]
    keys = [proposed.key for proposed in changes]
    generated_keys = [
        change.key for change in changes if change.candidate.explicit and change.key not in current
    ]
    admitted = await judge_candidates_and_plan_puts(
        gate, scope.adapter, scope.namespace, candidates, keys, generated_keys, scope.thread
    )
    memory_puts: dict[str, PutItem] = {}
    puts: list[PutItem] = []
    turn_puts: list[PutItem] = []
    for put in admitted.puts:
        if put.namespace == scope.namespace:
            memory_puts[put.key] = put
        else:
            puts.append(put)  # a quarantine entry
    outcomes: list[Outcome] = []
    for proposed, outcome in zip(changes, admitted.outcomes, strict=True):
        memory = current.get(proposed.key)
        is_extracted_revision = isinstance(proposed, Revision) and not proposed.candidate.explicit
        if outcome.change == "added" and memory is None:
            new_version = 0 if scope.adapter.versioned else None
            puts.append(replace(memory_puts[proposed.key], if_version=new_version))
        elif outcome.change == "added" and memory is not None:
            until = _choose_end_date(proposed, memory)
            replacement, outcome = _plan_replacement_put_and_outcome(
                proposed, memory_puts[proposed.key], memory, until, outcome
            )
            puts += replacement
            if outcome.change == "superseded":
                source = proposed.candidate.provenance
                turn_puts += await build_puts_that_add_end_date_to_source_turns(
                    scope.adapter, memory, until, source
                )
                if source and memory.provenance and memory.provenance.thread_id == source.thread_id:
                    # A message can be a source of a superseded text but not of the text that
                    # replaces it. If a new turn is stored for such a message, the turn gets the
                    # superseded text's end date. A turn is a memory that contains the text of one
                    # message.
                    dropped_ids = list_source_message_ids_missing_in_successor(
                        memory.provenance, source
                    )
                    turn_end_dates_by_message_id |= dict.fromkeys(dropped_ids, until.isoformat())
        elif (
            is_extracted_revision
            and outcome.change == "unchanged"
            and memory
            and outcome.key != proposed.key
        ):
            # Delete the memory instead of revising it, because the revised text would duplicate
            # another memory.
            puts.append(build_removal(memory.namespace, memory.key, memory.version))
            outcome = Outcome("deleted", proposed.key, "another memory already states this")
        outcomes.append(outcome)
    if turn_end_dates_by_message_id:
        puts = [
            _add_end_date_to_put_of_new_turn(put, current, turn_end_dates_by_message_id)
            for put in puts
        ]
    return ChangePlan([*puts, *turn_puts], outcomes)


def _plan_replacement_put_and_outcome(
    proposed: ProposedChange,
    put: PutItem,
    memory: Memory,
    end_date: datetime,
    admitted_outcome: Outcome,
) -> tuple[list[PutItem], Outcome]:
    """Build the put operation that replaces a stored memory with its new version.

    The gate, which decides whether a candidate memory may be stored, has already admitted the new
    version.

    Returns:
        The put in a list, and the outcome. The list is empty if the memory stays as it is.
    """
    value = put.value or {}
    # Extracting a message again must not undo later changes to the extracted memory.
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
    ended_at = end_date if change == "superseded" else None
    value = build_memory_value_with_previous_texts(
        memory, {**remaining_fields, **value}, change, ended_at
    )
    put = replace(put, value=value, if_version=memory.version)
    return [put], replace(admitted_outcome, change=change)


def _add_end_date_to_put_of_new_turn(
    put: PutItem, current: CurrentMemories, end_dates: Mapping[str, str]
) -> PutItem:
    """Add the end date of a new turn's source message to the put operation that stores the turn.

    The end date is the time at which a text that was extracted from the message ceased to be true.

    `end_dates` maps message ids to end dates. If `end_dates` contains none of the turn's source
    messages, `put` is returned unchanged.
    """
    value, ids = put.value or {}, put.provenance.message_ids if put.provenance else ()
    if value.get("kind") != TURN or put.key in current or end_dates.keys().isdisjoint(ids):
        return put
    end_date = next(end_dates[message_id] for message_id in ids if message_id in end_dates)
    return replace(put, value={**value, UNTIL_FIELD: end_date})


def _choose_end_date(proposed_change: ProposedChange, superseded_memory: Memory) -> datetime:
    """Return the time at which a superseded memory ceased to be true.

    If `proposed_change` is a revision with an end date, return that end date. If `proposed_change`
    has no end date, return the time of the last message from which the new memory was extracted. As
    an exception, return the current time if this message's time is unknown, or if this message is
    not newer than the last message from which the superseded memory was extracted.
    """
    if isinstance(proposed_change, Revision) and proposed_change.until:
        return proposed_change.until
    said_at = (
        proposed_change.candidate.provenance.at if proposed_change.candidate.provenance else None
    )
    previous_said_at = superseded_memory.provenance.at if superseded_memory.provenance else None
    return (
        said_at
        if said_at and (previous_said_at is None or previous_said_at < said_at)
        else datetime.now(UTC)
    )


def get_content_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text and fields of a memory's value, excluding the fields that perdure sets."""
    return {name: part for name, part in value.items() if name not in PERDURE_FIELDS}


@dataclass(frozen=True, slots=True)
class MemoryWriter:
    """Adds, replaces and deletes memories in one namespace, for `Collection` and for tools.

    Attributes:
        adapter: The adapter of the store that contains the item.
        namespace: The namespace of the memories.
        gate: The gate that judges each change.
        schema: The schema of the memories, or None.
        kind: The kind of added memories.
        by_model: Whether a model requests the changes.
        author: The user who writes, if the namespace is that of a team.
    """

    adapter: StoreAdapter
    namespace: Namespace
    gate: Gate
    schema: type[BaseModel] | None
    kind: str
    by_model: bool = False
    author: str | None = None

    async def insert(
        self,
        memory: MemoryInput,
        provenance: Provenance,
        key: str | None = None,
        on_conflict: ReplacementKind | None = None,
    ) -> Outcome:
        """Add a memory.

        Args:
            memory: The text, or the text and fields.
            provenance: Where the memory comes from.
            key: The key, or None for a generated key.
            on_conflict: How to change the stored memory if the key belongs to a memory with another
                text or other fields, or None to raise an error in this case.

        Raises:
            ConfigurationError: A memory with another text or other fields has the key, and
                `on_conflict` is None.
            InvalidValue: The memory has no text or does not fit the schema.
        """
        value = self.build_memory_value(memory)
        given_key = None if key is None else check_item_key(key)

        async def plan() -> ChangePlan:
            """Return the plan for adding the memory.

            There is a conflict if the key already belongs to a memory with a different text or
            different fields. The plan resolves the conflict by changing the stored memory as
            `on_conflict` specifies. If `on_conflict` is None, a conflict with the stored memory
            raises an error.
            """
            puts_of_change_counter = await build_puts_that_increment_change_counter(
                self.adapter, self.namespace
            )
            memory_key = given_key or "".join(_RANDOM.choices(_KEY_LETTERS, k=_KEY_LENGTH))
            existing = None
            # A store that keeps versions rejects the put of a new memory if the memory's generated
            # key is already in use. The put is then planned again with another key. Other stores
            # would overwrite the existing memory, so check first whether the key is in use.
            if given_key is not None or not self.adapter.versioned:
                existing = await self.adapter.get(self.namespace, memory_key)
            if existing is None:
                addition = Addition(
                    memory_key, self._build_explicit_candidate(value, self.kind, provenance)
                )
                return await self._plan_change(addition, None, puts_of_change_counter)
            if get_content_fields(existing.value) == value:
                return ChangePlan(outcomes=[Outcome("unchanged", memory_key, UNCHANGED_REASON)])
            if on_conflict is None:
                raise ConfigurationError(
                    f"the key {key!r} is already used by another memory in {self.namespace!r}; "
                    "use a different key, or supersede that memory"
                )
            return await self._plan_revision(
                existing, memory, provenance, on_conflict, None, puts_of_change_counter
            )

        return await self._write_change(plan)

    async def replace(
        self,
        key: str,
        memory: MemoryInput,
        provenance: Provenance,
        replacement_kind: ReplacementKind,
        ended_at: datetime | None = None,
        if_version: int | None = None,
    ) -> Outcome:
        """Update or supersede a memory.

        Args:
            key: The key of the memory.
            memory: The new text, or text and fields. Fields that are missing keep their values.
            provenance: Where the new text comes from.
            replacement_kind: Whether the previous text was wrong (`"updated"`) or true until now
                (`"superseded"`).
            ended_at: Until when the previous text was true, or None if that is not known.
            if_version: The version that the memory must have, or None for any version.

        Raises:
            UnknownMemory: The namespace has no memory with the key.
            VersionConflict: The memory is at another version.
            InvalidValue: The memory has no text or does not fit the schema.
        """

        async def plan() -> ChangePlan:
            """Check the memory's version, then build the write plan that replaces the memory."""
            puts_of_change_counter = await build_puts_that_increment_change_counter(
                self.adapter, self.namespace
            )
            previous = await self._get_existing_memory(key)
            if if_version not in (None, previous.version):
                raise VersionConflict(
                    f"the memory {key!r} is at version {previous.version}, not {if_version!r}; "
                    "read it again before you change it"
                )
            return await self._plan_revision(
                previous, memory, provenance, replacement_kind, ended_at, puts_of_change_counter
            )

        return await self._write_change(plan)

    async def delete(self, key: str) -> Outcome:
        """Delete a memory, and write tombstones for all of its texts.

        Tombstones are records of deleted texts. If writing the tombstones would exceed the store's
        size limit, the memory is deleted without tombstones. In this case, the `reason` of the
        returned outcome is `NO_TOMBSTONE_REASON`.

        Raises:
            UnknownMemory: The namespace has no memory with the key.
        """

        async def plan(*, with_tombstones: bool = True) -> ChangePlan:
            """Build the plan that deletes the memory and adds tombstones for its versions."""
            memory = await self._get_existing_memory(key)
            puts = [build_removal(self.namespace, key, memory.version)]
            if not with_tombstones:
                return ChangePlan(puts, [Outcome("deleted", key, NO_TOMBSTONE_REASON)])
            versions = await self.adapter.list_versions(self.namespace, key)
            puts += [
                put
                for version in (*versions, memory)
                for put in build_tombstones(version, "deleted")
            ]
            puts = await add_message_ids_of_replaced_tombstones(self.adapter, puts)
            return ChangePlan(puts, [Outcome("deleted", key)])

        try:
            return await self._write_change(plan)
        except LimitExceeded:
            # If the store is full, delete the memory without writing tombstones, which are records
            # of removed texts. A full store has no space for tombstones.
            return await self._write_change(partial(plan, with_tombstones=False))

    def build_memory_value(
        self, memory: MemoryInput, previous_value: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the value to store for a memory: its text and fields, as JSON-ready data.

        Args:
            memory: The text, or the text and fields.
            previous_value: The value of the previous version. Fields that `memory` does not have
                are kept from it.

        Raises:
            InvalidValue: The memory has no text or does not fit the schema.
        """
        fields = _convert_memory_to_fields(memory)
        previous_fields = get_content_fields(previous_value) if previous_value else {}
        value = {
            **previous_fields,
            **(
                fields
                if self.schema is None
                else _merge_fields_and_validate_against_schema(self.schema, previous_fields, fields)
            ),
        }
        text = value.get(TEXT)
        if not isinstance(text, str) or not text.strip() or _SURROGATE.search(text):
            raise InvalidValue(
                f"the text of the memory is {text!r:.80}; expected valid Unicode text that is not "
                "blank"
            )
        return {**value, TEXT: text.strip()}

    async def _plan_revision(
        self,
        previous: Memory,
        memory: MemoryInput,
        provenance: Provenance,
        replacement_kind: ReplacementKind,
        ended_at: datetime | None,
        puts_of_change_counter: Sequence[PutItem],
    ) -> ChangePlan:
        """Build the plan for replacing a memory's text and fields.

        If neither the text nor the fields change, the plan contains no puts.
        """
        value = self.build_memory_value(memory, previous.value)
        if value == get_content_fields(previous.value):
            return ChangePlan(outcomes=[Outcome("unchanged", previous.key, UNCHANGED_REASON)])
        candidate = self._build_explicit_candidate(value, previous.kind, provenance)
        return await self._plan_change(
            Revision(previous.key, replacement_kind, candidate, ended_at),
            previous,
            puts_of_change_counter,
        )

    async def _plan_change(
        self,
        change: ProposedChange,
        previous: Memory | None,
        puts_of_change_counter: Sequence[PutItem],
    ) -> ChangePlan:
        """Submit a memory change to the gate, and build the write plan from the gate's decision.

        The gate decides whether a changed memory is stored, quarantined or refused.

        If the plan writes anything, it also includes `puts_of_change_counter`, the put operations
        that increment the namespace's change counter.
        """
        scope = Scope(self.adapter, self.namespace)
        current = {} if previous is None else {change.key: previous}
        plan = await plan_changes_that_gate_admits([change], current, {}, self.gate, scope)
        return plan._replace(puts=[*plan.puts, *puts_of_change_counter]) if plan.puts else plan

    async def _write_change(self, plan: Callable[[], Operation[ChangePlan]]) -> Outcome:
        """Call `plan`, write the planned changes to the store, and return the outcome."""
        return (
            await plan_and_write_with_namespace_lock(self.adapter, self.namespace, plan)
        ).outcomes[0]

    async def _get_existing_memory(self, key: str) -> Memory:
        """Return the memory under a key.

        Raises:
            UnknownMemory: The namespace has no memory with the key.
        """
        memory = await self.adapter.get(self.namespace, check_item_key(key))
        if memory is None or not isinstance(memory.value.get(TEXT), str):
            raise build_unknown_memory_error(self.namespace, key)
        return memory

    def _build_explicit_candidate(
        self, memory_value: Mapping[str, Any], kind: str, provenance: Provenance
    ) -> Candidate:
        """Build the candidate for a memory change that was explicitly requested.

        The gate (the check of memory changes) examines the candidate before the change is written.
        """
        fields = dict(memory_value)
        text = fields.pop(TEXT)
        if self.author is not None:
            provenance = replace(provenance, author=self.author)
        role: Any = provenance.trust if provenance.trust in get_args(Role) else "user"
        return Candidate(text, kind, fields, provenance, role, True, self.by_model)


def fill_provenance_defaults(
    config: RunnableConfig | None, provenance: Provenance | None = None
) -> Provenance:
    """Return the provenance of a memory, with defaults for missing values.

    If `provenance` is None, return a provenance with the run's thread and checkpoint, the actor
    `"user"` and the current time. If the provenance has no trust class, the trust class defaults to
    `"user"`.
    """
    if provenance is None:
        provenance = Provenance(
            *read_thread_and_checkpoint_id_of_run(config), actor="user", at=datetime.now(UTC)
        )
    return provenance if provenance.trust is not None else replace(provenance, trust="user")


def build_unknown_memory_error(namespace: Namespace, key: str) -> UnknownMemory:
    """Build the error to raise if no memory is stored under the given key."""
    return UnknownMemory(
        f"there is no memory {key!r} in {namespace!r}; search() and list() return memories with "
        "their keys"
    )


def check_memory_schema(schema: Any) -> None:
    """Check that a schema is a pydantic model with a `text` field and no field reserved by perdure.

    Raises:
        ConfigurationError: The schema is something else.
    """
    fields = getattr(schema, "model_fields", {})
    reserved = [name for name in PERDURE_FIELDS if name in fields]
    if reserved or TEXT not in fields or fields[TEXT].annotation is not str:
        raise ConfigurationError(
            f"the schema is {schema!r:.80}; expected a pydantic model class with the field "
            f"'text: str'. The field names {', '.join(PERDURE_FIELDS)} are reserved"
        )


def _convert_memory_to_fields(memory: MemoryInput) -> dict[str, Any]:
    """Convert a memory in any of the accepted forms to a dict of its text and fields.

    Raises:
        InvalidValue: The memory has another type, or a field that perdure sets.
    """
    if isinstance(memory, str):
        return {TEXT: memory}
    if isinstance(memory, BaseModel):
        return memory.model_dump(mode="json", exclude_unset=True)
    if not isinstance(memory, Mapping):
        raise InvalidValue(
            f"the memory is {memory!r:.80}; expected a string, a dict with 'text', or an instance "
            "of the schema"
        )
    for name in PERDURE_FIELDS:
        if name in memory:
            raise InvalidValue(
                f"the memory has a field {name!r}, but this name is reserved for a field that "
                "perdure sets; rename your field"
            )
    return dict(memory)


def _merge_fields_and_validate_against_schema(
    schema: type[BaseModel], previous_fields: Mapping[str, Any], new_fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Validate fields against a schema, and return them in a JSON-ready form.

    Args:
        schema: The schema.
        previous_fields: The fields of the previous version, which are kept if they are not
            replaced.
        new_fields: The new fields, by their names or aliases.

    Raises:
        InvalidValue: The fields do not fit the schema.
    """
    kept_fields = {
        name: part for name, part in previous_fields.items() if name in schema.model_fields
    }
    try:
        document = to_json({**kept_fields, **new_fields})
        memory = schema.model_validate_json(document, by_alias=True, by_name=True)
    except ValidationError as exc:
        raise InvalidValue(
            f"the memory does not fit the schema {schema.__name__}: "
            f"{describe_validation_errors(exc)}"
        ) from exc
    except ValueError as exc:
        raise InvalidValue(f"the memory cannot be stored as JSON: {exc}") from exc
    return memory.model_dump(mode="json")

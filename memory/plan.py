"""Planning: the puts of a change, judged by the gate, against what is stored now.

Of two changes of a namespace that are judged at once, the second is judged again. Within a process
changes run one after another. Between processes, in a store with versions, each change counts up a
note of the namespace, on condition that nobody has since it was judged.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Final

from langgraph.store.base import GetOp

from perdure.errors import AlreadyLocked, StorageUnavailable, VersionConflict
from perdure.memory import store_adapter
from perdure.memory.detectors import REDACTED
from perdure.memory.effects import Effect, Effects, T
from perdure.memory.gate import Gate, admit
from perdure.memory.proposals import Addition, Alteration, Planned, Proposal, Revision, Scope
from perdure.memory.records import EPISODE, TURN, Memory, Outcome
from perdure.memory.store_adapter import PREVIOUS, SOURCE, StoreAdapter, memory_of, notes_of
from perdure.memory.tombstones import sources, tombstones_of
from perdure.memory.turns import UNTIL, ends_of, left_behind, superseded_turns
from perdure.storage.locks import Locks
from perdure.stores.base import Namespace, PutItem

OWN: Final = ("kind", PREVIOUS, SOURCE, REDACTED)  # fields of a value that perdure sets
SAME: Final = "it says so already"
_NOTE: Final = "memories"
_WAIT_S: Final = 10.0  # for a change that takes longer, others do not wait: its write tells
_TRIES: Final = 50  # each that fails is one in which another change succeeded
_SHORTEST_S, _LONGEST_S = 0.002, 0.2  # pauses between tries
_RANKS: Final[Mapping[str, int]] = {"user": 3, "system": 2, "assistant": 1, "tool": 0}
Change = Addition | Revision
Present = Mapping[str, Memory]  # the stored memories, by key


def change_note(adapter: StoreAdapter, namespace: Namespace) -> Effects[list[PutItem]]:
    """The puts with which a write is a `VersionConflict` if another came after this call."""
    if not adapter.versioned:
        return []
    place = notes_of(store_adapter.CHANGED, namespace)
    note = yield from adapter.got(place, _NOTE)
    number, version = (0, 0) if note is None else (note.value["number"], note.version)
    return [store_adapter.note_of(place, _NOTE, {"number": number + 1}, if_version=version)]


def one_by_one(
    adapter: StoreAdapter, namespace: Namespace, attempt: Callable[[], Effects[T]]
) -> Effects[T]:
    """Attempt a change, while this process attempts no other here, until it meets no conflict."""
    # stores on one file share its database; a forked process has locks of its own
    name = f"{id(getattr(adapter.store, 'database', adapter.store))} {namespace!r}"
    locks, turn = _locks(os.getpid()), None
    with suppress(AlreadyLocked, StorageUnavailable):  # not free in time, or held by the caller
        turn = yield Effect(
            lambda: locks.acquire(name, 0.0 if _in_loop() else _WAIT_S),
            lambda: locks.aacquire(name, _WAIT_S),
        )
    try:
        for number in range(_TRIES):
            try:
                return (yield from attempt())
            except VersionConflict:
                pause = random.uniform(0, min(_LONGEST_S, _SHORTEST_S * 2**number))
                yield Effect(partial(time.sleep, pause), partial(asyncio.sleep, pause))
        return (yield from attempt())
    finally:
        if turn is not None:
            locks.release(turn)


@cache
def _locks(process: int) -> Locks:
    return Locks(None)


def _in_loop() -> bool:
    """Whether an event loop runs in this thread: who holds the lock may need it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def planned(proposal: Proposal, gate: Gate, scope: Scope) -> Effects[Planned]:
    """The puts and outcomes of a proposal."""
    additions, known = yield from _without_known_episodes(proposal.additions, scope)
    changes: list[Change] = [*additions, *proposal.revisions]
    note = (yield from change_note(scope.adapter, scope.namespace)) if changes else []
    present = (yield from _present(scope, changes)) if changes else {}
    deleted = _deleted(proposal.revisions, present)
    written = [each for each in changes if not isinstance(each, Revision) or _is_due(each, present)]
    has_facts = not note or bool(note[0].if_version)  # a store without versions has no note
    ends = (yield from _ends(written, present, scope)) if has_facts else {}
    kept = yield from judged(written, present, ends, gate, scope)
    parts = [Planned(outcomes=proposal.outcomes), known, deleted, kept]
    for plan in proposal.plans:
        parts.append((yield from plan(gate)))
    events = {TURN, EPISODE}.issuperset(each.candidate.kind for each in additions)
    if (deleted.puts or kept.puts) and not (events and not proposal.revisions):
        parts.append(Planned(note))  # new turns and episodes conflict with no fact
    puts: dict[tuple[Namespace, str], PutItem] = {}
    for put in (put for part in parts for put in part.puts):
        puts.setdefault((put.namespace, put.key), put)  # two facts may mark one turn as past
    return Planned(list(puts.values()), [each for part in parts for each in part.outcomes])


def _without_known_episodes(
    additions: Sequence[Addition], scope: Scope
) -> Effects[tuple[Sequence[Addition], Planned]]:
    if not any(each.candidate.kind == EPISODE for each in additions):
        return additions, Planned()
    known: dict[str, str] = {}
    for memory in (yield from scope.adapter.every(scope.namespace, filter={"kind": EPISODE})):
        known |= dict.fromkeys(sources(memory.provenance), memory.key)
    new: list[Addition] = []
    outcomes: list[Outcome] = []
    for each in additions:
        found = [known[mark] for mark in sources(each.candidate.provenance) if mark in known]
        if found and each.candidate.kind == EPISODE:
            outcomes.append(Outcome("unchanged", found[-1]))
        else:
            new.append(each)
    return new, Planned(outcomes=outcomes)


def _present(scope: Scope, changes: Sequence[Change]) -> Effects[dict[str, Memory]]:
    ops = [GetOp(scope.namespace, key) for key in dict.fromkeys(each.key for each in changes)]
    items = yield scope.adapter.call("batch", ops)
    return {item.key: memory_of(item) for item in items if item is not None}


def _refusal(revision: Revision, memory: Memory | None) -> str:
    """Why a memory may not be changed; "": it may."""
    if memory is None:
        return "the memory does not exist any more"
    whose = (memory.provenance.trust if memory.provenance else None) or "user"
    given = revision.candidate.role
    if _RANKS.get(whose, 3) <= _RANKS[given]:
        return ""
    return f"it rests on the words of the {whose}, the change only on those of the {given}"


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
            puts.append(store_adapter.removal_of(memory.namespace, memory.key, memory.version))
            if memory.kind != TURN:  # an edited message may get its previous text again
                puts += tombstones_of(memory, "deleted")
            outcomes.append(Outcome("deleted", memory.key))
    return Planned(puts, outcomes)


def _ends(changes: Sequence[Change], present: Present, scope: Scope) -> Effects[dict[str, str]]:
    """The dates at which facts were superseded that rest on messages whose turns are new."""
    new = [each.candidate for each in changes if each.key not in present]
    turns = [each.provenance for each in new if each.kind == TURN and each.provenance]
    ids = [id for source in turns for id in source.message_ids]
    return (yield from ends_of(scope, turns[0].thread_id, ids)) if turns else {}


def judged(
    changes: Sequence[Change], present: Present, ends: dict[str, str], gate: Gate, scope: Scope
) -> Effects[Planned]:
    """What the gate admits; each replaces the memory under its key, if there is one."""
    candidates = [
        replace(each.candidate, kind=present[each.key].kind)
        if isinstance(each, Revision)
        else each.candidate
        for each in changes
    ]
    keys = [each.key for each in changes]
    made = [each.key for each in changes if each.candidate.explicit and each.key not in present]
    admitted = yield from admit(gate, scope.adapter, scope.namespace, candidates, keys, made)
    own = {put.key: put for put in admitted.puts if put.namespace == scope.namespace}
    puts = [put for put in admitted.puts if put.namespace != scope.namespace]  # quarantine
    past: list[PutItem] = []
    outcomes: list[Outcome] = []
    for each, outcome in zip(changes, admitted.outcomes, strict=True):
        memory = present.get(each.key)
        extracted = isinstance(each, Revision) and not each.candidate.explicit
        if outcome.change == "added" and memory is None:
            new = 0 if scope.adapter.versioned else None
            puts.append(replace(own[each.key], if_version=new))
        elif outcome.change == "added" and memory is not None:
            until = _until(each, memory)
            put, change = _replaced(each, own[each.key], memory, until)
            if put is None:
                outcome = Outcome("unchanged", each.key, SAME)
            else:
                puts.append(put)
                outcome = replace(outcome, change=change)
            if outcome.change == "superseded":
                source = each.candidate.provenance
                past += yield from superseded_turns(scope.adapter, memory, until, source)
                if source and memory.provenance and memory.provenance.thread_id == source.thread_id:
                    ended = left_behind(memory.provenance, source)  # their turns may be new too
                    ends |= dict.fromkeys(ended, until.isoformat())
        elif extracted and outcome.change == "unchanged" and memory and outcome.key != each.key:
            puts.append(store_adapter.removal_of(memory.namespace, memory.key, memory.version))
            outcome = Outcome("deleted", each.key, "another memory says the same")
        outcomes.append(outcome)
    return Planned([*(_ended(put, present, ends) for put in puts), *past], outcomes)


def _replaced(
    each: Change, put: PutItem, memory: Memory, until: datetime
) -> tuple[PutItem | None, Alteration]:
    """The put of an admitted memory, if the stored one is still the version that was read."""
    value = put.value or {}
    if isinstance(each, Addition) and (memory.kind != TURN or memory.text == value["text"]):
        return None, "updated"  # it was made before, and may have been changed since
    change: Alteration = each.change if isinstance(each, Revision) else "updated"
    if own_fields(value) == own_fields(memory.value):
        return None, "updated"
    kept = {name: part for name, part in memory.value.items() if name not in (REDACTED, UNTIL)}
    ended = until if change == "superseded" else None
    value = store_adapter.succeeding(memory, {**kept, **value}, change, ended)
    return replace(put, value=value, if_version=memory.version), change


def _ended(put: PutItem, present: Present, ends: Mapping[str, str]) -> PutItem:
    value, ids = put.value or {}, put.provenance.message_ids if put.provenance else ()
    if value.get("kind") != TURN or put.key in present or ends.keys().isdisjoint(ids):
        return put
    return replace(put, value={**value, UNTIL: ends[ids[0]]})


def _until(each: Change, memory: Memory) -> datetime:
    """When a memory stopped being true: at the time of the new text, if that is known and later."""
    if isinstance(each, Revision) and each.until:
        return each.until
    at = each.candidate.provenance.at if each.candidate.provenance else None
    since = memory.provenance.at if memory.provenance else None
    return at if at and (since is None or since < at) else datetime.now(UTC)


def own_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """The text and the fields in a memory's value, without those that perdure sets."""
    return {name: part for name, part in value.items() if name not in OWN}

"""Planning: the puts of a proposal, judged by the gate, against what is stored now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from langgraph.store.base import GetOp

from perdure.memory.conflicts import change_note
from perdure.memory.detectors import REDACTED
from perdure.memory.effects import Effect, Effects
from perdure.memory.gate import Gate, admit
from perdure.memory.proposals import Addition, Alteration, Planned, Proposal, Revision, Scope
from perdure.memory.records import EPISODE, TURN, Memory, Outcome
from perdure.memory.store_adapter import memory_of, removal_of, succeeding
from perdure.memory.tombstones import sources, tombstones_of
from perdure.memory.turns import UNTIL, superseded_turns
from perdure.stores.base import Namespace, PutItem

_RANKS: Final[Mapping[str, int]] = {"user": 3, "system": 2, "assistant": 1, "tool": 0}


def planned(proposal: Proposal, gate: Gate, scope: Scope) -> Effects[Planned]:
    """The puts and outcomes of a proposal."""
    proposal = yield from _without_known_episodes(proposal, scope)
    judged: list[Addition | Revision] = [*proposal.additions, *proposal.revisions]
    note = (yield from _note(proposal, scope)) if judged else []
    present = (yield from _present(scope, [each.key for each in judged])) if judged else {}
    deleted = _deleted(proposal.revisions, present)
    kept = yield from _judged(
        [each for each in judged if not isinstance(each, Revision) or _rewrites(each, present)],
        present,
        gate,
        scope,
    )
    parts = [Planned(outcomes=proposal.outcomes), deleted, kept]
    for plan in proposal.plans:
        parts.append((yield from plan(gate)))
    if deleted.puts or kept.puts:
        parts.append(Planned(note))
    puts: dict[tuple[Namespace, str], PutItem] = {}
    for put in (put for part in parts for put in part.puts):
        puts.setdefault((put.namespace, put.key), put)  # two facts may mark one turn as past
    return Planned(list(puts.values()), [each for part in parts for each in part.outcomes])


def _without_known_episodes(proposal: Proposal, scope: Scope) -> Effects[Proposal]:
    """A proposal without episodes of messages that have an episode already."""
    episodes = [each for each in proposal.additions if each.candidate.kind == EPISODE]
    if not episodes:
        return proposal
    known: dict[str, str] = {}
    for memory in (yield from scope.adapter.every(scope.namespace, filter={"kind": EPISODE})):
        if memory.namespace == scope.namespace:
            known |= dict.fromkeys(sources(memory.provenance), memory.key)
    again = {
        each.key: known[source]
        for each in episodes
        for source in sources(each.candidate.provenance)
        if source in known
    }
    return replace(
        proposal,
        additions=[each for each in proposal.additions if each.key not in again],
        outcomes=[*proposal.outcomes, *(Outcome("unchanged", key) for key in again.values())],
    )


def _note(proposal: Proposal, scope: Scope) -> Effects[list[PutItem]]:
    """The note that detects concurrent changes of facts; new turns and episodes need none."""
    kinds = {addition.candidate.kind for addition in proposal.additions}
    if not proposal.revisions and kinds <= {TURN, EPISODE}:
        return []
    return (yield from change_note(scope.adapter, scope.namespace))


def _present(scope: Scope, keys: Sequence[str]) -> Effects[dict[str, Memory]]:
    """The stored memories under these keys."""
    ops = [GetOp(scope.namespace, key) for key in dict.fromkeys(keys)]
    store = scope.adapter.store
    items = yield Effect(lambda: store.batch(ops), lambda: store.abatch(ops))
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


def _rewrites(revision: Revision, present: Mapping[str, Memory]) -> bool:
    return revision.change != "deleted" and not _refusal(revision, present.get(revision.key))


def _deleted(revisions: Sequence[Revision], present: Mapping[str, Memory]) -> Planned:
    """The deletions, and the changes that are refused."""
    puts: list[PutItem] = []
    outcomes: list[Outcome] = []
    for revision in revisions:
        memory = present.get(revision.key)
        why = _refusal(revision, memory)
        if memory is None or why:
            check = "model" if memory is None else "role"
            outcomes.append(Outcome("refused", revision.key, why, check))
        elif revision.change == "deleted":
            puts.append(_removal(memory))
            if memory.kind != TURN:  # an edited message may get its previous text again
                puts += tombstones_of(memory, "deleted")
            outcomes.append(Outcome("deleted", memory.key))
    return Planned(puts, outcomes)


def _judged(
    judged: Sequence[Addition | Revision],
    present: Mapping[str, Memory],
    gate: Gate,
    scope: Scope,
) -> Effects[Planned]:
    """What the gate admits; each replaces the memory under its key, if there is one."""
    candidates = [
        replace(each.candidate, kind=present[each.key].kind)
        if isinstance(each, Revision)
        else each.candidate
        for each in judged
    ]
    keys = [each.key for each in judged]
    admitted = yield from admit(gate, scope.adapter, scope.namespace, candidates, keys)
    own = {put.key: put for put in admitted.puts if put.namespace == scope.namespace}
    puts = [put for put in admitted.puts if put.namespace != scope.namespace]  # quarantine
    past: list[PutItem] = []
    outcomes: list[Outcome] = []
    for each, outcome in zip(judged, admitted.outcomes, strict=True):
        memory = present.get(each.key)
        if outcome.change == "added":
            written, outcome = _replaced(each, own[each.key], memory, outcome, scope)
            puts += written
            if outcome.change == "superseded" and memory is not None:
                past += yield from _past_turns(each, memory, scope)
        elif isinstance(each, Revision) and memory and _is_elsewhere(each, outcome):
            puts.append(_removal(memory))
            outcome = Outcome("deleted", each.key, "another memory says the same")
        outcomes.append(outcome)
    return Planned([*puts, *past], outcomes)


def _replaced(
    each: Addition | Revision, put: PutItem, memory: Memory | None, outcome: Outcome, scope: Scope
) -> tuple[list[PutItem], Outcome]:
    """The put of an admitted memory, if the stored one is still the version that was read."""
    if memory is None:
        return [replace(put, if_version=0 if scope.adapter.versioned else None)], outcome
    value = put.value or {}
    if isinstance(each, Addition) and (memory.kind != TURN or memory.text == value["text"]):
        # the memory was made before, and may have been changed since
        return [], Outcome("unchanged", each.key)
    change: Alteration = each.change if isinstance(each, Revision) else "updated"
    kept = {name: part for name, part in memory.value.items() if name not in (REDACTED, UNTIL)}
    until = _until(each, memory) if change == "superseded" else None
    value = succeeding(memory, {**kept, **value}, change, until)
    return [replace(put, value=value, if_version=memory.version)], replace(outcome, change=change)


def _past_turns(each: Addition | Revision, memory: Memory, scope: Scope) -> Effects[list[PutItem]]:
    """Marks on the turns of a superseded memory, except turns that the new text rests on."""
    rests = set(sources(each.candidate.provenance))
    past = yield from superseded_turns(scope.adapter, memory, _until(each, memory))
    return [put for put in past if not rests.intersection(sources(put.provenance))]


def _until(each: Addition | Revision, memory: Memory) -> datetime:
    """When a memory stopped being true: at the time of the new text, if that is known and later."""
    at = each.candidate.provenance.at if each.candidate.provenance else None
    since = memory.provenance.at if memory.provenance else None
    return at if at and (since is None or since < at) else datetime.now(UTC)


def _is_elsewhere(revision: Revision, outcome: Outcome) -> bool:
    return outcome.change == "unchanged" and outcome.key not in (None, revision.key)


def _removal(memory: Memory) -> PutItem:
    return removal_of(memory.namespace, memory.key, memory.version)

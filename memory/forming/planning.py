"""Planning what is written of a proposal: judged by the gate, against what is stored now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from langgraph.store.base import GetOp

from perdure.errors import LimitExceeded
from perdure.memory.admission import REDACTED, admit
from perdure.memory.conflicts import taking_turns
from perdure.memory.effects import Effect, Effects
from perdure.memory.gate import Gate
from perdure.memory.proposals import (
    Addition,
    Alteration,
    Planned,
    Proposal,
    Revision,
    Scope,
)
from perdure.memory.records import EPISODE, TURN, Memory, Outcome
from perdure.memory.sameness import EVENTS
from perdure.memory.store_adapter import memory_of, removal_of, succeeding
from perdure.memory.tombstones import tombstones_of
from perdure.stores.base import Provenance, PutItem

FLOOD: Final = "flood"
"""The gate's check that refuses what there is no room for."""
_RANKS: Final[Mapping[str, int]] = {"user": 3, "system": 2, "assistant": 1, "tool": 0}


def planned(proposal: Proposal, gate: Gate, around: Scope) -> Effects[Planned]:
    """What is to be written of a proposal, and what becomes of each part of it.

    Raises:
        LimitExceeded: There is no room for all of it: that is no verdict on what it says.
    """
    proposal = yield from _once(proposal, around)
    keys = [addition.key for addition in proposal.additions]
    keys += [revision.key for revision in proposal.revisions]
    turn = (yield from _turn(proposal, around)) if keys else []
    present = (yield from _present(around, keys)) if keys else {}
    puts: list[PutItem] = []
    outcomes = list(proposal.outcomes)
    judged: list[Addition | Revision] = list(proposal.additions)
    for revision in proposal.revisions:
        memory = present.get(revision.key)
        refusal = _refusal(revision, memory)
        if refusal is not None or memory is None:
            outcomes += [refusal] if refusal else []
        elif revision.change == "deleted":
            # what a message said before it was edited may be said again
            puts += [
                _removal(memory),
                *([] if memory.kind == TURN else tombstones_of(memory, "deleted")),
            ]
            outcomes.append(Outcome("deleted", memory.key))
        else:
            candidate = replace(revision.candidate, kind=memory.kind)
            judged.append(replace(revision, candidate=candidate))
    kept = yield from _judged(judged, present, gate, around)
    puts += turn if puts or kept.puts else []
    parts = [kept]
    for plan in proposal.plans:
        parts.append((yield from plan(gate)))
    for part in parts:
        puts += part.puts
        outcomes += part.outcomes
    full = next((each for each in outcomes if each.check == FLOOD), None)
    if full is not None:
        raise LimitExceeded(
            f"there is no room in {around.namespace!r} for all that would be kept: {full.reason}; "
            "nothing was written of these messages. Forget memories, or let the gate allow more "
            "(max_items), and form the thread again"
        )
    return Planned(puts, outcomes)


def _once(proposal: Proposal, around: Scope) -> Effects[Proposal]:
    """A proposal without episodes that were formed of the same messages already, in any words."""
    told = [each for each in proposal.additions if each.candidate.kind == EPISODE]
    if not told:
        return proposal
    known: dict[tuple[str | None, str], str] = {}
    for memory in (yield from around.adapter.every(around.namespace, filter={"kind": EPISODE})):
        if memory.namespace == around.namespace:
            known |= dict.fromkeys(_sources(memory.provenance), memory.key)
    again = {
        each.key: known[source]
        for each in told
        for source in _sources(each.candidate.provenance)
        if source in known
    }
    return replace(
        proposal,
        additions=[each for each in proposal.additions if each.key not in again],
        outcomes=[*proposal.outcomes, *(Outcome("unchanged", key) for key in again.values())],
    )


def _sources(provenance: Provenance | None) -> list[tuple[str | None, str]]:
    """The messages that something rests on, each with its thread."""
    if provenance is None:
        return []
    return [(provenance.thread_id, each) for each in provenance.message_ids]


def _turn(proposal: Proposal, around: Scope) -> Effects[list[PutItem]]:
    """What keeps others from changing facts meanwhile; what was said is what it is."""
    kinds = {addition.candidate.kind for addition in proposal.additions}
    if not proposal.revisions and kinds.issubset(EVENTS):
        return []
    return (yield from taking_turns(around.adapter, around.namespace))


def _judged(
    judged: Sequence[Addition | Revision],
    present: Mapping[str, Memory],
    gate: Gate,
    around: Scope,
) -> Effects[Planned]:
    """What the gate lets through, each upon what is there under its key."""
    candidates, keys = [each.candidate for each in judged], [each.key for each in judged]
    kept = yield from admit(gate, around.adapter, around.namespace, candidates, keys)
    own = {put.key: put for put in kept.puts if put.namespace == around.namespace}
    puts = [put for put in kept.puts if put.namespace != around.namespace]  # into quarantine
    outcomes: list[Outcome] = []
    for each, outcome in zip(judged, kept.outcomes, strict=True):
        memory = present.get(each.key)
        if outcome.change == "added":
            settled = _settled(each, own[each.key], memory, outcome, around)
        elif isinstance(each, Revision) and memory is not None and _is_elsewhere(each, outcome):
            settled = _removal(memory), Outcome("deleted", each.key, "another memory says it now")
        else:
            settled = None, outcome
        puts += [settled[0]] if settled[0] is not None else []
        outcomes.append(settled[1])
    return Planned(puts, outcomes)


def _settled(
    each: Addition | Revision,
    put: PutItem,
    memory: Memory | None,
    outcome: Outcome,
    around: Scope,
) -> tuple[PutItem | None, Outcome]:
    """What is written of what the gate lets through, in the place of what and of nothing else."""
    if memory is None:
        version = 0 if around.adapter.versioned else None
        return replace(put, if_version=version), outcome
    value = put.value or {}
    if isinstance(each, Addition) and (memory.kind != TURN or memory.text == value["text"]):
        # it was formed before; that it was changed since is no reason to take it back
        return None, Outcome("unchanged", each.key)
    change: Alteration = each.change if isinstance(each, Revision) else "updated"
    return _replacing(memory, put, change), replace(outcome, change=change)


def _replacing(memory: Memory, put: PutItem, change: Alteration) -> PutItem:
    """A new version of a memory, which notes what it said before."""
    former = {name: part for name, part in memory.value.items() if name != REDACTED}
    value = succeeding(memory, {**former, **(put.value or {})}, change)
    return replace(put, value=value, if_version=memory.version)


def _present(around: Scope, keys: Sequence[str]) -> Effects[dict[str, Memory]]:
    """The memories that are there under these keys."""
    ops = [GetOp(around.namespace, key) for key in dict.fromkeys(keys)]
    store = around.adapter.store
    items = yield Effect(lambda: store.batch(ops), lambda: store.abatch(ops))
    return {item.key: memory_of(item) for item in items if item is not None}


def _refusal(revision: Revision, memory: Memory | None) -> Outcome | None:
    """Why a memory is not to be changed; None: it may be."""
    if memory is None:
        return Outcome("refused", revision.key, "the memory is there no more", "model")
    whose = (memory.provenance.trust if memory.provenance else None) or "user"
    said = revision.candidate.role
    if _RANKS.get(whose, 3) > _RANKS[said]:
        reason = f"it rests on what the {whose} said, the change only on what the {said} did"
        return Outcome("refused", revision.key, reason, "role")
    return None


def _is_elsewhere(revision: Revision, outcome: Outcome) -> bool:
    """Whether another memory says already what this one was to say."""
    return outcome.change == "unchanged" and outcome.key not in (None, revision.key)


def _removal(memory: Memory) -> PutItem:
    return removal_of(memory.namespace, memory.key, memory.version)

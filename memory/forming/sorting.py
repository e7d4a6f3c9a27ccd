"""Sorting a model's answer: what can be done of it, and what is refused, operation by operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

from perdure.memory.forming.answers import Answer, Episode, FactChange
from perdure.memory.proposals import (
    Addition,
    Alteration,
    Batch,
    Proposal,
    Revision,
)
from perdure.memory.records import EPISODE, FACT, Candidate, Memory, Outcome
from perdure.memory.thread_messages import ThreadMessage, storable

_ALTERATIONS: Final[Mapping[str, Alteration]] = {
    "update": "updated",
    "supersede": "superseded",
    "delete": "deleted",
}
CHECK: Final = "model"
"""The check that an outcome names when what the model asked for makes no sense."""


def sorted_out(answer: Answer, batch: Batch, memories: Mapping[str, Memory]) -> Proposal:
    """What an answer proposes of facts and episodes.

    Args:
        answer: The model's.
        batch: What it was shown.
        memories: The memories it was shown, by the names it was to call them by.
    """
    additions: dict[str, Addition] = {}
    revisions: dict[str, Revision] = {}
    outcomes: list[Outcome] = []
    for fact in answer.facts:
        found = _fact(fact, batch, memories, revisions)
        if isinstance(found, Addition):
            additions[found.key] = found
        elif isinstance(found, Revision):
            revisions[found.key] = found
        else:
            outcomes.append(found)
    for episode in answer.episodes:
        added = _episode(episode, batch)
        if isinstance(added, Addition):
            additions[added.key] = added
        else:
            outcomes.append(added)
    return Proposal(list(additions.values()), list(revisions.values()), outcomes=outcomes)


def numbered(numbers: Iterable[int], batch: Batch) -> list[ThreadMessage]:
    """The messages with these numbers, in their order; a number that none has is passed over."""
    wanted = set(numbers)
    return [each for number, each in enumerate(batch.messages, 1) if number in wanted]


def _fact(
    fact: FactChange,
    batch: Batch,
    memories: Mapping[str, Memory],
    changed: Mapping[str, Revision],
) -> Addition | Revision | Outcome:
    spoken = numbered(fact.messages, batch)
    text = storable(fact.text or "")
    if not spoken:
        return refused("names no message that it rests on")
    if not text and fact.action != "delete":
        return refused(f"is to {fact.action} a memory and has no text")
    named = {"about": fact.about, "when": fact.when}
    fields = {name: storable(part) for name, part in named.items() if part and part.strip()}
    candidate = batch.candidate(spoken, text, FACT, **fields)
    if fact.action == "insert":
        return Addition(_key(FACT, candidate), candidate)
    memory = memories.get(fact.memory or "")
    if memory is None:
        return refused(f"names the memory {fact.memory!r:.40}, which it was not shown")
    if memory.key in changed:
        return refused("changes a memory that was changed already", memory.key)
    return Revision(memory.key, _ALTERATIONS[fact.action], candidate)


def _episode(episode: Episode, batch: Batch) -> Addition | Outcome:
    spoken = numbered(episode.messages, batch)
    texts = {name: storable(getattr(episode, name)) for name in ("input", "outcome", "why")}
    if not spoken:
        return refused("names no message that it rests on")
    if not texts["input"] or not texts["outcome"]:
        return refused("is an episode without its beginning or its end")
    candidate = batch.candidate(spoken, texts["input"], EPISODE, **texts)
    return Addition(_key(EPISODE, candidate), candidate)


def refused(reason: str, key: str | None = None) -> Outcome:
    """The outcome of what makes no sense."""
    return Outcome("refused", key, f"the operation {reason}", CHECK)


def _key(kind: str, candidate: Candidate) -> str:
    """The same for the same words on the same messages, so that they are one memory."""
    source = candidate.provenance
    assert source is not None  # what rests on messages has one
    parts: Sequence[str] = (source.thread_id or "", *source.message_ids, candidate.text)
    digest = blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=10)
    return f"{kind}-{digest.hexdigest()}"

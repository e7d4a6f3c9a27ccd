"""Turns as memories: each message is one, or one for each chunk of a long message; no model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from hashlib import blake2b
from typing import Final

from langgraph.store.base import GetOp

from perdure.memory.options import whole
from perdure.memory.proposals import Addition, Batch, Proposal, Revision, Scope
from perdure.memory.records import FACT, TURN, Memory, Outcome
from perdure.memory.store_adapter import PREVIOUS, StoreAdapter, memory_of, put_of
from perdure.memory.thread_messages import ThreadMessage
from perdure.memory.watermarks import TURNS
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.chunking import chunks

UNTIL: Final = "until"
"""The field of a turn's value with the date until which it held (ISO 8601, UTC)."""
_CHUNKS: Final = 40  # of a message that are kept


class TurnExtractor:
    """Makes a memory `speaker: text` of each message of a user or an assistant, without a model.

    A message of more than `max_words` is cut into chunks, of which the first 40 are kept.
    """

    name = TURNS

    def __init__(self, *, max_words: int = 250) -> None:
        self.max_words = whole("max_words", max_words, 1)

    def taking(self, messages: Sequence[ThreadMessage]) -> int:
        """All of them."""
        return len(messages)

    async def proposing(self, batch: Batch, scope: Scope) -> Proposal:
        """A memory for each chunk of each message; an edit may delete chunks."""
        additions, revisions, outcomes = dict[str, Addition](), list[Revision](), list[Outcome]()
        for message in batch.messages:
            is_kept = message.role in ("user", "assistant")
            texts = chunks(message.text, self.max_words, 0) if is_kept else []
            left_out, texts = len(texts[_CHUNKS:]), texts[:_CHUNKS]
            for number, text in enumerate(texts):
                key = turn_key(batch.thread_id, message.id, number)
                candidate = batch.candidate([message], f"{message.actor}: {text}", TURN)
                additions[key] = Addition(key, candidate)
            if left_out:
                reason = f"the message is long: {left_out:,} chunks of its end are left out"
                key = turn_key(batch.thread_id, message.id, _CHUNKS)
                outcomes.append(Outcome("refused", key, reason, "length"))
            if message.id in batch.edited:
                source = batch.source([message])
                stored = await _turns(scope.adapter, scope.namespace, source)
                empty = batch.candidate([message], "", TURN)
                revisions += [Revision(old.key, "deleted", empty) for old in stored[len(texts) :]]
        return Proposal(list(additions.values()), revisions, outcomes=outcomes)


def turn_key(thread_id: str, message_id: str, chunk: int) -> str:
    """The key of the memory of a chunk of a message: the same each time."""
    parts = "\0".join((thread_id, message_id, str(chunk)))
    digest = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=10)
    return f"turn-{digest.hexdigest()}"


async def superseded_turns(
    adapter: StoreAdapter, memory: Memory, until: datetime, successor: Provenance | None = None
) -> list[PutItem]:
    """The puts that give turns the date until which they held.

    These are the turns of messages that a superseded memory leaves behind.
    """
    if memory.kind == TURN or memory.provenance is None:
        return []
    source = replace(memory.provenance, message_ids=left_behind(memory.provenance, successor))
    found = await _turns(adapter, memory.namespace, source)
    ended = {UNTIL: until.isoformat()}
    return [
        put_of(
            *(turn.namespace, turn.key, {**turn.value, **ended}),
            provenance=turn.provenance,
            if_version=turn.version,
        )
        for turn in found
        if UNTIL not in turn.value
    ]


async def ends_of(
    scope: Scope, thread_id: str | None, message_ids: Collection[str]
) -> dict[str, str]:
    """The dates (ISO 8601) at which facts were superseded that rest on messages of a thread.

    Turns of these messages that are made only now held until then. Of stores without versions the
    thread of the present text is taken.
    """
    any_kind = {PREVIOUS: {"$exists": True}}  # which other stores do not know
    asked = any_kind if scope.adapter.versioned else {"kind": FACT}
    ends: dict[str, str] = {}
    for memory in await scope.adapter.every(scope.namespace, filter=asked):
        past = [each for each in memory.previous if each.change == "superseded"]
        if memory.kind == TURN or not any({*each.message_ids} & {*message_ids} for each in past):
            continue
        versions = await scope.adapter.versions(memory.namespace, memory.key)
        threads = {each.text: (each.provenance or Provenance()).thread_id for each in versions}
        present = memory.provenance or Provenance()
        for each in past:  # newest first: the first end counts
            thread = threads.get(each.text, present.thread_id)
            source = Provenance(thread_id=thread, message_ids=each.message_ids)
            if thread == thread_id:
                ends |= dict.fromkeys(left_behind(source, present), each.until.isoformat())
    return ends


def left_behind(source: Provenance, successor: Provenance | None) -> tuple[str, ...]:
    """The messages on which a memory rested, and on which the one that supersedes it does not."""
    if successor is None or successor.thread_id != source.thread_id:
        return source.message_ids
    return tuple(each for each in source.message_ids if each not in successor.message_ids)


async def _turns(adapter: StoreAdapter, place: Namespace, source: Provenance) -> list[Memory]:
    turns, number = list[Memory](), 0
    thread_id, left = source.thread_id, list(source.message_ids)
    while left and thread_id is not None:
        ops = [GetOp(place, turn_key(thread_id, each, number)) for each in left]
        items = await adapter.call("batch", ops)
        there = {id: item for id, item in zip(left, items, strict=True) if item is not None}
        turns += map(memory_of, there.values())
        left, number = list(there), number + 1
    return turns

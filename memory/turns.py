"""Turns as memories: each message is one, or one for each chunk of a long message; no model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from hashlib import blake2b
from typing import Final

from langgraph.store.base import GetOp

from perdure.memory.effects import Effect, Effects
from perdure.memory.options import whole
from perdure.memory.proposals import Addition, Batch, Proposal, Revision, Scope
from perdure.memory.records import TURN, Memory, Outcome
from perdure.memory.store_adapter import StoreAdapter, memory_of, put_of
from perdure.memory.thread_messages import ThreadMessage
from perdure.memory.watermarks import TURNS
from perdure.stores.base import Namespace, PutItem
from perdure.stores.chunking import chunks

UNTIL: Final = "until"
"""The field of a turn's value with the date until which it held (ISO 8601, UTC)."""
_CHUNKS: Final = 40  # of a message that are kept


class TurnExtractor:
    """Makes a memory of each message of a user or an assistant, without a model.

    A memory's text is `speaker: text`; the speaker is the message's name, else its role.
    Search reads each such memory together with its neighbours in the thread.

    Args:
        max_words: A longer message is cut into chunks of at most so many words, of which the first
            40 are kept.
    """

    name = TURNS

    def __init__(self, *, max_words: int = 250) -> None:
        self.max_words = whole("max_words", max_words, 1)

    def taking(self, messages: Sequence[ThreadMessage]) -> int:
        """All of them."""
        return len(messages)

    def proposing(self, batch: Batch, scope: Scope) -> Effects[Proposal]:
        """A memory for each chunk of each message; an edit may delete chunks."""
        additions: dict[str, Addition] = {}
        revisions: list[Revision] = []
        outcomes: list[Outcome] = []
        for message in batch.messages:
            texts = chunks(message.text, self.max_words, 0) if self._is_kept(message) else []
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
                empty = batch.candidate([message], "", TURN)
                stored = yield from _turns(
                    scope.adapter, scope.namespace, batch.thread_id, [message.id]
                )
                revisions += [Revision(old.key, "deleted", empty) for old in stored[len(texts) :]]
        return Proposal(list(additions.values()), revisions, outcomes=outcomes)

    def _is_kept(self, message: ThreadMessage) -> bool:
        return bool(message.text) and message.role in ("user", "assistant")


def turn_key(thread_id: str, message_id: str, chunk: int) -> str:
    """The key of the memory of a chunk of a message: the same each time."""
    parts = "\0".join((thread_id, message_id, str(chunk)))
    digest = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=10)
    return f"turn-{digest.hexdigest()}"


def superseded_turns(
    adapter: StoreAdapter, memory: Memory, until: datetime
) -> Effects[list[PutItem]]:
    """The puts that mark the turns as past on whose messages a superseded memory rests.

    Recall then shows these turns with the date until which they held.
    """
    source = memory.provenance
    if source is None or source.thread_id is None or memory.kind == TURN:
        return []
    found = yield from _turns(adapter, memory.namespace, source.thread_id, source.message_ids)
    return [
        put_of(
            turn.namespace,
            turn.key,
            {**turn.value, UNTIL: until.isoformat()},
            provenance=turn.provenance,
            if_version=turn.version,
        )
        for turn in found
        if UNTIL not in turn.value
    ]


def _turns(
    adapter: StoreAdapter, namespace: Namespace, thread_id: str, message_ids: Sequence[str]
) -> Effects[list[Memory]]:
    """The turns of messages, chunk by chunk."""
    store, turns, number = adapter.store, list[Memory](), 0
    while message_ids:
        ops = [GetOp(namespace, turn_key(thread_id, each, number)) for each in message_ids]
        items = yield Effect(partial(store.batch, ops), partial(store.abatch, ops))
        there = {id: item for id, item in zip(message_ids, items, strict=True) if item is not None}
        turns += map(memory_of, there.values())
        message_ids, number = list(there), number + 1
    return turns

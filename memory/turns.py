"""Turns as memories: each message is one, or one for each chunk of a long message; no model."""

from __future__ import annotations

import re
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

UNTIL: Final = "until"
"""The field of a turn's value that says since when it does not hold any more (ISO 8601, UTC)."""
_BREAKS: Final = (
    re.compile(r"\n\s*\n"),
    re.compile(r"\n|[.!?\u2026][\"'\u201d\u2019)\]]*\s|[\u3002\uff01\uff1f][\u300d\u300f\u201d]*"),
    re.compile(r"\s"),
)


class TurnExtractor:
    """Makes a memory of each message, with its speaker, its time and its place in the thread.

    A memory's text is `speaker: text`; the speaker is the message's name, else its role.
    Search reads each such memory together with its neighbours in the thread.

    Args:
        max_chars: A longer message is cut into chunks of at most so many characters.
        max_chunks: How many chunks of a message are kept; the rest is reported as refused.
        tools: Whether results of tools are remembered too.

    Raises:
        ConfigurationError: A number is no whole number from 1 on.
    """

    name = TURNS

    def __init__(
        self, *, max_chars: int = 1_500, max_chunks: int = 40, tools: bool = False
    ) -> None:
        self.max_chars = whole("max_chars", max_chars, 1)
        self.max_chunks = whole("max_chunks", max_chunks, 1)
        self._roles = ("user", "assistant", "tool") if tools else ("user", "assistant")

    def taking(self, messages: Sequence[ThreadMessage]) -> int:
        """All of them."""
        return len(messages)

    def proposing(self, batch: Batch, scope: Scope) -> Effects[Proposal]:
        """A memory for each chunk of each message; chunks that an edit left over are deleted."""
        additions: dict[str, Addition] = {}
        revisions: list[Revision] = []
        outcomes: list[Outcome] = []
        for message in batch.messages:
            texts, left_out = chunks(message.text, self.max_chars, self.max_chunks)
            if not self._is_kept(message):
                texts, left_out = [], 0
            for number, text in enumerate(texts):
                key = turn_key(batch.thread_id, message.id, number)
                candidate = batch.candidate([message], f"{message.actor}: {text}", TURN)
                additions[key] = Addition(key, candidate)
            if left_out:
                reason = f"the message is long: {left_out:,} characters of its end are left out"
                key = turn_key(batch.thread_id, message.id, self.max_chunks)
                outcomes.append(Outcome("refused", key, reason, "length"))
            if message.id in batch.edited:
                gone = batch.candidate([message], "", TURN)
                there = yield from _turns(
                    scope.adapter, scope.namespace, batch.thread_id, [message.id]
                )
                revisions += [Revision(each.key, "deleted", gone) for each in there[len(texts) :]]
        return Proposal(list(additions.values()), revisions, outcomes=outcomes)

    def key(self, thread_id: str, message: ThreadMessage) -> str | None:
        """The key of the message's memory; None: it becomes none."""
        return turn_key(thread_id, message.id, 0) if self._is_kept(message) else None

    def _is_kept(self, message: ThreadMessage) -> bool:
        return bool(message.text) and message.role in self._roles


def turn_key(thread_id: str, message_id: str, piece: int) -> str:
    """The key of the memory of a chunk of a message: the same each time."""
    parts = "\0".join((thread_id, message_id, str(piece)))
    digest = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=10)
    return f"turn-{digest.hexdigest()}"


def superseded_turns(
    adapter: StoreAdapter, memory: Memory, until: datetime
) -> Effects[list[PutItem]]:
    """The operations that mark turns as past, on whose messages a superseded memory rests.

    Recall then shows these turns with the date until which they held.

    Args:
        adapter: The store.
        memory: The memory as it is before it is superseded.
        until: Until when it held (UTC).
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


def chunks(text: str, limit: int, most: int) -> tuple[list[str], int]:
    """A text in chunks that end where a paragraph, a sentence or a word does.

    Args:
        text: The text.
        limit: Characters of a chunk.
        most: How many chunks.

    Returns:
        The chunks, and how many characters of the text's end are in none of them.

    >>> chunks("One thing. Another thing.", 12, 9)
    (['One thing.', 'Another', 'thing.'], 0)
    >>> chunks("One thing. Another thing.", 12, 1)
    (['One thing.'], 14)
    """
    found: list[str] = []
    rest = text.strip()
    while rest and len(found) < most:
        cut = _cut(rest[: limit + 1], limit)
        found.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return found, len(rest)


def _cut(window: str, limit: int) -> int:
    if len(window) <= limit:
        return len(window)
    for each in _BREAKS:
        ends = [match.end() for match in each.finditer(window)]
        fitting = [end for end in ends if len(window[:end].rstrip()) <= limit]
        if fitting and fitting[-1] >= limit / 2:  # an earlier end makes chunks of a few words
            return fitting[-1]
    return limit

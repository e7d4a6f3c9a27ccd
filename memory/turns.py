"""Forming without a model: what was said is what is remembered, a memory for each message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from hashlib import blake2b
from typing import Final

from perdure.memory.effects import Effects
from perdure.memory.forming.pieces import pieces
from perdure.memory.options import whole
from perdure.memory.proposals import Addition, Batch, Proposal, Revision, Scope
from perdure.memory.records import TURN, Memory, Outcome
from perdure.memory.store_adapter import StoreAdapter, put_of
from perdure.memory.thread_messages import ThreadMessage
from perdure.stores.base import PutItem

_SPOKEN: Final = ("user", "assistant")


class TurnExtractor:
    """Makes episodic memories of turns: what each message says, with its speaker, time and place.

    A memory's text is `speaker: what was said`, the speaker a message's name or else its role.
    Search then reads each together with its neighbours in the thread.

    Args:
        max_chars: A longer message is cut into pieces of so many characters at most, each a memory.
        max_pieces: How many of them are kept; the rest, say of a file that was pasted, is reported
            as refused.
        tools: Whether what tools answer is remembered too.

    Raises:
        ConfigurationError: A number is none that it can be.
    """

    def __init__(
        self, *, max_chars: int = 1_500, max_pieces: int = 40, tools: bool = False
    ) -> None:
        self.max_chars = whole("max_chars", max_chars, 1)
        self.max_pieces = whole("max_pieces", max_pieces, 1)
        self.tools = bool(tools)

    def taking(self, messages: Sequence[ThreadMessage]) -> int:
        """All of them."""
        return len(messages)

    def proposing(self, batch: Batch, around: Scope) -> Effects[Proposal]:
        """A memory for each message, or piece of one; and what an edit left over goes."""
        proposal = self.formed(batch)
        given = {addition.key for addition in proposal.additions}
        revisions: list[Revision] = []
        for spoken in (each for each in batch.messages if each.id in batch.edited):
            gone = batch.candidate([spoken], "", TURN)
            for key in self._keys(batch.thread_id, spoken.id):
                if (yield from around.adapter.got(around.namespace, key)) is None:
                    break
                revisions += [] if key in given else [Revision(key, "deleted", gone)]
        return replace(proposal, revisions=revisions)

    def formed(self, batch: Batch) -> Proposal:
        """The memories of a batch."""
        additions: list[Addition] = []
        outcomes: list[Outcome] = []
        for spoken in filter(self._counts, batch.messages):
            found, left_out = pieces(spoken.text, self.max_chars, self.max_pieces)
            if left_out:
                reason = f"the message is long: {left_out:,} characters of its end are left out"
                key = turn_key(batch.thread_id, spoken.id, self.max_pieces)
                outcomes.append(Outcome("refused", key, reason, "length"))
            additions += self._additions(batch, spoken, found)
        return Proposal(additions, outcomes=outcomes)

    def key(self, thread_id: str, spoken: ThreadMessage) -> str | None:
        """The key of the message's memory; None: it becomes none."""
        return turn_key(thread_id, spoken.id, 0) if self._counts(spoken) else None

    def _counts(self, spoken: ThreadMessage) -> bool:
        return bool(spoken.text) and (
            spoken.role in _SPOKEN or (self.tools and spoken.role == "tool")
        )

    def _keys(self, thread_id: str, message_id: str) -> Iterator[str]:
        return (turn_key(thread_id, message_id, piece) for piece in range(self.max_pieces))

    def _additions(
        self, batch: Batch, spoken: ThreadMessage, found: list[str]
    ) -> Iterator[Addition]:
        for number, piece in enumerate(found):
            candidate = batch.candidate([spoken], f"{spoken.actor}: {piece}", TURN)
            yield Addition(turn_key(batch.thread_id, spoken.id, number), candidate)


def turn_key(thread_id: str, message_id: str, piece: int) -> str:
    """The key of the memory of a piece of a message: the same whenever it is formed."""
    parts = "\0".join((thread_id, message_id, str(piece)))
    digest = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=10)
    return f"turn-{digest.hexdigest()}"


def superseded_turns(
    adapter: StoreAdapter, memory: Memory, until: datetime
) -> Effects[list[PutItem]]:
    """The operations that mark turns as past, on whose messages a superseded memory rests."""
    source = memory.provenance
    puts: list[PutItem] = []
    if source is None or source.thread_id is None or memory.kind == TURN:
        return puts
    for message_id in source.message_ids:
        for piece in range(40):
            key = turn_key(source.thread_id, message_id, piece)
            turn = yield from adapter.got(memory.namespace, key)
            if turn is None:
                break
            if "until" not in turn.value:
                value = {**turn.value, "until": until.isoformat()}
                version = turn.version
                given = turn.provenance
                puts.append(
                    put_of(turn.namespace, key, value, provenance=given, if_version=version)
                )
    return puts

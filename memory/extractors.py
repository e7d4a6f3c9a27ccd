"""Extractors: what one is given and proposes; turns as memories, which takes no model.

A turn is a memory for each message, or for each chunk of a long message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime
from hashlib import blake2b
from operator import add
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import GetOp

from perdure.effects import Operation
from perdure.memory.gate import Gate
from perdure.memory.options import check_whole_number
from perdure.memory.records import (
    FACT,
    PREVIOUS,
    TURN,
    Candidate,
    ChangePlan,
    Memory,
    Outcome,
    Role,
    StoreAdapter,
    build_put,
    memory_from_item,
)
from perdure.memory.thread_messages import TURN_EXTRACTOR, ThreadMessage
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.text import split_into_chunks

if TYPE_CHECKING:
    from perdure.memory.loaded_thread import LoadedThread

Alteration = Literal["updated", "superseded", "deleted"]
UNTIL_FIELD: Final = "until"
"""The field of a turn's value with the date until which it held (ISO 8601, UTC)."""
_MAX_CHUNKS: Final = 40  # of a message that are kept


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls of a model, and the tokens that it reported for them."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that an extractor reads together."""

    thread_id: str  # "": there is none
    checkpoint_id: str | None  # at which the thread was read
    messages: Sequence[ThreadMessage]  # in order, each with its position
    before: Sequence[ThreadMessage] = ()  # those just before, as context
    edited: frozenset[str] = frozenset()  # ids of messages that were read before, and edited since

    def build_candidate(
        self, messages: Sequence[ThreadMessage], text: str, kind: str, **fields: str
    ) -> Candidate:
        """A candidate that rests on these messages, at least one."""
        return Candidate(
            text, kind, fields, self.build_provenance(messages), _choose_role(messages)
        )

    def build_provenance(self, messages: Sequence[ThreadMessage]) -> Provenance:
        """The provenance of what rests on these messages."""
        last = messages[-1]
        return Provenance(
            thread_id=self.thread_id or None,  # a node may run without a thread
            checkpoint_id=self.checkpoint_id,
            message_ids=tuple(message.id for message in messages),
            actor=next(
                (message.actor for message in messages if message.role == "user"), last.actor
            ),
            trust=_choose_role(messages),
            position=last.position,
            at=last.at,
        )


class Addition(NamedTuple):
    """A memory to be added, under a key that is the same each time for the same messages."""

    key: str
    candidate: Candidate


class Revision(NamedTuple):
    """A change to a memory; the candidate of a deletion has no text."""

    key: str
    change: Alteration
    candidate: Candidate
    until: datetime | None = None  # when the previous text stopped being true, if that is given


PlanFunction = Callable[[Gate], Operation[ChangePlan]]
"""Plans against what is stored now; called again if that changed before the write."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The changes that an extractor proposes."""

    additions: Sequence[Addition] = ()
    revisions: Sequence[Revision] = ()
    plan_functions: Sequence[PlanFunction] = ()  # of other items: a profile, instructions
    outcomes: Sequence[Outcome] = ()  # what the extractor refused itself
    usage: Usage = field(default_factory=Usage)


class Scope(NamedTuple):
    """The place where memories are written, and the config of the run.

    `thread` is the thread whose messages are read, or None if perdure does not store it.
    """

    adapter: StoreAdapter
    namespace: Namespace
    config: RunnableConfig | None = None
    thread: LoadedThread | None = None


@runtime_checkable
class Extractor(Protocol):
    """Proposes memories of messages, and writes nothing."""

    name: str
    """Part of the key of its watermarks: two extractors of one name share them."""

    def count_batch_messages(self, messages: Sequence[ThreadMessage]) -> int:
        """How many of these messages, from the first on, make one batch; 1 or more."""

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        """The memories of a batch; the same messages may be read again, as with `anew`."""


def _choose_role(messages: Sequence[ThreadMessage]) -> Role:
    """The user's role if any message is a user's, else the least trustworthy one."""
    ranked: Sequence[Role] = ("user", "tool", "assistant", "system")
    roles = {message.role for message in messages}
    return next(role for role in ranked if role in roles)


class TurnExtractor:
    """Makes a memory `speaker: text` of each message of a user or an assistant, without a model.

    A message of more than `max_words` is cut into chunks, of which the first 40 are kept.
    """

    name = TURN_EXTRACTOR

    def __init__(self, *, max_words: int = 250) -> None:
        self.max_words = check_whole_number("max_words", max_words, 1)

    def count_batch_messages(self, messages: Sequence[ThreadMessage]) -> int:
        """All of them."""
        return len(messages)

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        """A memory for each chunk of each message; an edit may delete chunks."""
        additions, revisions, outcomes = dict[str, Addition](), list[Revision](), list[Outcome]()
        for message in batch.messages:
            is_kept = message.role in ("user", "assistant")
            texts = split_into_chunks(message.text, self.max_words, 0) if is_kept else []
            left_out, texts = len(texts[_MAX_CHUNKS:]), texts[:_MAX_CHUNKS]
            for number, text in enumerate(texts):
                key = build_turn_key(batch.thread_id, message.id, number)
                candidate = batch.build_candidate([message], f"{message.actor}: {text}", TURN)
                additions[key] = Addition(key, candidate)
            if left_out:
                reason = f"the message is long: {left_out:,} chunks of its end are left out"
                key = build_turn_key(batch.thread_id, message.id, _MAX_CHUNKS)
                outcomes.append(Outcome("refused", key, reason, "length"))
            if message.id in batch.edited:
                source = batch.build_provenance([message])
                stored = await _read_turns(scope.adapter, scope.namespace, source)
                empty = batch.build_candidate([message], "", TURN)
                revisions += [Revision(turn.key, "deleted", empty) for turn in stored[len(texts) :]]
        return Proposal(list(additions.values()), revisions, outcomes=outcomes)


def build_turn_key(thread_id: str, message_id: str, chunk: int) -> str:
    """The key of the memory of a chunk of a message: the same each time."""
    parts = "\0".join((thread_id, message_id, str(chunk)))
    digest = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=10)
    return f"turn-{digest.hexdigest()}"


async def build_superseded_turn_puts(
    adapter: StoreAdapter, memory: Memory, until: datetime, successor: Provenance | None = None
) -> list[PutItem]:
    """The puts that give turns the date until which they held.

    These are the turns of messages that a superseded memory leaves behind.
    """
    if memory.kind == TURN or memory.provenance is None:
        return []
    source = replace(
        memory.provenance, message_ids=find_dropped_messages(memory.provenance, successor)
    )
    turns = await _read_turns(adapter, memory.namespace, source)
    end_date = {UNTIL_FIELD: until.isoformat()}
    return [
        build_put(
            *(turn.namespace, turn.key, {**turn.value, **end_date}),
            provenance=turn.provenance,
            if_version=turn.version,
        )
        for turn in turns
        if UNTIL_FIELD not in turn.value
    ]


async def find_end_dates(
    scope: Scope, thread_id: str | None, message_ids: Collection[str]
) -> dict[str, str]:
    """The dates (ISO 8601) at which facts were superseded that rest on messages of a thread.

    Turns of these messages that are made only now held until then. Of stores without versions the
    thread of the present text is taken.
    """
    any_kind = {PREVIOUS: {"$exists": True}}  # which other stores do not know
    memory_filter = any_kind if scope.adapter.versioned else {"kind": FACT}
    end_dates: dict[str, str] = {}
    for memory in await scope.adapter.list_memories(scope.namespace, filter=memory_filter):
        superseded_texts = [text for text in memory.previous if text.change == "superseded"]
        if memory.kind == TURN or not any(
            {*text.message_ids} & {*message_ids} for text in superseded_texts
        ):
            continue
        versions = await scope.adapter.list_versions(memory.namespace, memory.key)
        threads = {
            version.text: (version.provenance or Provenance()).thread_id for version in versions
        }
        present = memory.provenance or Provenance()
        for text in superseded_texts:  # newest first: the first end counts
            source_thread = threads.get(text.text, present.thread_id)
            source = Provenance(thread_id=source_thread, message_ids=text.message_ids)
            if source_thread == thread_id:
                end_dates |= dict.fromkeys(
                    find_dropped_messages(source, present), text.until.isoformat()
                )
    return end_dates


def find_dropped_messages(source: Provenance, successor: Provenance | None) -> tuple[str, ...]:
    """The messages on which a memory rested, and on which the one that supersedes it does not."""
    if successor is None or successor.thread_id != source.thread_id:
        return source.message_ids
    return tuple(id for id in source.message_ids if id not in successor.message_ids)


async def _read_turns(
    adapter: StoreAdapter, namespace: Namespace, source: Provenance
) -> list[Memory]:
    turns, chunk = list[Memory](), 0
    thread_id, remaining_ids = source.thread_id, list(source.message_ids)
    while remaining_ids and thread_id is not None:
        keys = [build_turn_key(thread_id, id_, chunk) for id_ in remaining_ids]
        ops = [GetOp(namespace, key, refresh_ttl=False) for key in keys]
        items = await adapter.call("batch", ops)
        stored = {
            id: item for id, item in zip(remaining_ids, items, strict=True) if item is not None
        }
        turns += map(memory_from_item, stored.values())
        remaining_ids, chunk = list(stored), chunk + 1
    return turns

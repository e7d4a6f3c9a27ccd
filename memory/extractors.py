"""Define the `Extractor` interface for proposing memories, and the built-in `TurnExtractor`.

`TurnExtractor` needs no model. It creates one memory for each message, or for each chunk of a long
message.
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
    convert_item_to_memory,
)
from perdure.memory.thread_messages import TURN_EXTRACTOR, ThreadMessage
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.text import split_into_chunks

if TYPE_CHECKING:
    from perdure.memory.loaded_thread import LoadedThread

Alteration = Literal["updated", "superseded", "deleted"]
UNTIL_FIELD: Final = "until"
"""The field of a turn's value that holds the turn's end date (ISO 8601, UTC).

From the end date on, the fact that the turn states is no longer true.
"""
# maximum number of chunks of a message that are stored as memories; any further chunks are dropped
_MAX_CHUNKS: Final = 40


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts model calls and the tokens that the model reported for them."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of messages that an extractor processes together.

    Attributes:
        thread_id: The thread, or "" if there is none.
        checkpoint_id: The checkpoint at which the thread was read.
        messages: The messages, in order, each with its position.
        before: The messages just before the batch, as context.
        edited: Ids of messages that an extractor has read before and that were edited since.
    """

    thread_id: str
    checkpoint_id: str | None
    messages: Sequence[ThreadMessage]
    before: Sequence[ThreadMessage] = ()
    edited: frozenset[str] = frozenset()

    def build_candidate(
        self, messages: Sequence[ThreadMessage], text: str, kind: str, **fields: str
    ) -> Candidate:
        """Build a candidate memory with messages from the batch as its sources.

        Args:
            messages: The messages, at least one.
            text: The text of the memory.
            kind: The kind of the memory.
            fields: Further fields of the memory's value.
        """
        return Candidate(
            text,
            kind,
            fields,
            self.build_provenance(messages),
            _choose_user_or_least_trusted_role(messages),
        )

    def build_provenance(self, messages: Sequence[ThreadMessage]) -> Provenance:
        """Build the provenance of a memory that was extracted from `messages`.

        `messages` are the memory's source messages, all of which belong to the batch.
        """
        last = messages[-1]
        return Provenance(
            thread_id=self.thread_id or None,  # A node can run without a thread.
            checkpoint_id=self.checkpoint_id,
            message_ids=tuple(message.id for message in messages),
            actor=next(
                (message.actor for message in messages if message.role == "user"), last.actor
            ),
            trust=_choose_user_or_least_trusted_role(messages),
            position=last.position,
            at=last.at,
        )


class Addition(NamedTuple):
    """A memory to be added.

    An extractor derives the key from the source messages, and a model extractor also from the
    memory's text. Extracting the same memory again therefore yields the same key.
    """

    key: str
    candidate: Candidate


class Revision(NamedTuple):
    """A change to a stored memory. For a deletion, the candidate's text is empty.

    Attributes:
        key: The key of the memory.
        change: What is done with the memory.
        candidate: The new text and fields.
        until: When the previous text ceased to be true, or None if that is not known.
    """

    key: str
    change: Alteration
    candidate: Candidate
    until: datetime | None = None


PlanFunction = Callable[[Gate], Operation[ChangePlan]]
"""A function that plans a change to stored items.

If the items change before the plan is written, the function is called again.
"""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The changes that an extractor proposes.

    Attributes:
        additions: Memories to be added.
        revisions: Changes to memories.
        plan_functions: Functions that plan changes of other items, such as a profile.
        outcomes: Outcomes of changes that the extractor itself refused.
        usage: The number of model calls, and their token counts.
    """

    additions: Sequence[Addition] = ()
    revisions: Sequence[Revision] = ()
    plan_functions: Sequence[PlanFunction] = ()
    outcomes: Sequence[Outcome] = ()
    usage: Usage = field(default_factory=Usage)


class Scope(NamedTuple):
    """The store and namespace that memories are written to, and the source of the memories.

    Attributes:
        adapter: The store.
        namespace: The namespace of the memories.
        config: The config of the run, or None if the memories are not written by a run.
        thread: The thread whose messages are read, or None if perdure does not store the thread.
    """

    adapter: StoreAdapter
    namespace: Namespace
    config: RunnableConfig | None = None
    thread: LoadedThread | None = None


@runtime_checkable
class Extractor(Protocol):
    """Proposes memories for messages. An extractor only returns proposals and writes nothing."""

    name: str
    """Part of the key of the watermarks. Extractors with the same name share their watermarks."""

    def count_leading_messages_that_fit_in_one_call(self, messages: Sequence[ThreadMessage]) -> int:
        """Return how many leading messages of the list form the next batch, at least 1."""

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        """Propose memories for the messages of a batch.

        Implementations must accept the same messages again in a later call, for example after an
        extraction that failed.
        """


def _choose_user_or_least_trusted_role(messages: Sequence[ThreadMessage]) -> Role:
    """Choose the role of a memory that was extracted from several messages.

    The role is "user" if any of the messages is from a user, because the memory is then based on
    more than the output of a tool or a model. Otherwise, the role is the least trusted role.
    """
    ranked: Sequence[Role] = ("user", "tool", "assistant", "system")
    roles = {message.role for message in messages}
    return next(role for role in ranked if role in roles)


class TurnExtractor:
    """Converts each user or assistant message to a memory, without calling a model.

    The memory's text has the form `speaker: text`.

    A message longer than `max_words` words is split into chunks, of which the first 40 are stored
    as memories.

    Args:
        max_words: The maximum number of words of a memory.
    """

    name = TURN_EXTRACTOR

    def __init__(self, *, max_words: int = 250) -> None:
        self.max_words = check_whole_number("max_words", max_words, 1)

    def count_leading_messages_that_fit_in_one_call(self, messages: Sequence[ThreadMessage]) -> int:
        """Return the number of all messages, because no model call limits the size of a batch."""
        return len(messages)

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        """Propose a memory for each chunk of a message.

        If an edited message has fewer chunks than before, the memories of the chunks that no longer
        exist are deleted.
        """
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
                reason = f"the message is too long; its last {left_out:,} chunks are left out"
                key = build_turn_key(batch.thread_id, message.id, _MAX_CHUNKS)
                outcomes.append(Outcome("refused", key, reason, "length"))
            if message.id in batch.edited:
                source = batch.build_provenance([message])
                stored = await _read_stored_turns(scope.adapter, scope.namespace, source)
                empty = batch.build_candidate([message], "", TURN)
                revisions += [Revision(turn.key, "deleted", empty) for turn in stored[len(texts) :]]
        return Proposal(list(additions.values()), revisions, outcomes=outcomes)


def build_turn_key(thread_id: str, message_id: str, chunk_number: int) -> str:
    """Return the key of the memory that stores one chunk of a message.

    The same arguments always produce the same key.

    Args:
        thread_id: The thread.
        message_id: The message.
        chunk_number: The number of the chunk in the message, from 0.
    """
    parts = "\0".join((thread_id, message_id, str(chunk_number)))
    digest = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=10)
    return f"turn-{digest.hexdigest()}"


async def build_puts_that_add_end_date_to_source_turns(
    adapter: StoreAdapter,
    superseded_memory: Memory,
    ended_at: datetime,
    successor_provenance: Provenance | None = None,
) -> list[PutItem]:
    """Build puts that set the end date of the turns from which a superseded memory was extracted.

    A turn gets no end date if it already has one, or if the superseding memory was extracted from
    the same turn.

    Args:
        adapter: The store.
        superseded_memory: The superseded memory.
        ended_at: When the superseded memory ceased to be true.
        successor_provenance: The provenance of the memory that supersedes the old memory.
    """
    if superseded_memory.kind == TURN or superseded_memory.provenance is None:
        return []
    source = replace(
        superseded_memory.provenance,
        message_ids=list_source_message_ids_missing_in_successor(
            superseded_memory.provenance, successor_provenance
        ),
    )
    turns = await _read_stored_turns(adapter, superseded_memory.namespace, source)
    end_date = {UNTIL_FIELD: ended_at.isoformat()}
    return [
        build_put(
            *(turn.namespace, turn.key, {**turn.value, **end_date}),
            provenance=turn.provenance,
            if_version=turn.version,
        )
        for turn in turns
        if UNTIL_FIELD not in turn.value
    ]


async def find_dates_when_facts_from_messages_were_superseded(
    scope: Scope, thread_id: str | None, message_ids: Collection[str]
) -> dict[str, str]:
    """Return the dates on which facts extracted from a thread's messages were superseded.

    By the time a source message is stored as a turn, a fact extracted from the message may already
    have been superseded. The turn's end date is then the date on which the fact was superseded.

    Args:
        scope: The namespace of the memories.
        thread_id: The thread.
        message_ids: The messages.

    Returns:
        The dates (ISO 8601), by message id.
    """
    # Stores without versions do not support `$exists`, so read all facts from them.
    has_previous_text = {PREVIOUS: {"$exists": True}}
    memory_filter = has_previous_text if scope.adapter.versioned else {"kind": FACT}
    end_dates: dict[str, str] = {}
    for memory in await scope.adapter.list_memories(scope.namespace, filter=memory_filter):
        superseded = [entry for entry in memory.previous if entry.change == "superseded"]
        if memory.kind == TURN or not any(
            {*entry.message_ids} & {*message_ids} for entry in superseded
        ):
            continue
        versions = await scope.adapter.list_versions(memory.namespace, memory.key)
        threads = {
            version.text: (version.provenance or Provenance()).thread_id for version in versions
        }
        current_provenance = memory.provenance or Provenance()
        # If several superseded texts come from the same message, the message gets the earliest of
        # their end dates. The texts are sorted newest first, so earlier end dates overwrite later
        # ones.
        for entry in superseded:
            # The thread that a previous text came from is known only if the store keeps versions.
            # If it is unknown, assume that it is the thread of the current text.
            source_thread = threads.get(entry.text, current_provenance.thread_id)
            source = Provenance(thread_id=source_thread, message_ids=entry.message_ids)
            if source_thread == thread_id:
                end_dates |= dict.fromkeys(
                    list_source_message_ids_missing_in_successor(source, current_provenance),
                    entry.until.isoformat(),
                )
    return end_dates


def list_source_message_ids_missing_in_successor(
    source: Provenance, successor: Provenance | None
) -> tuple[str, ...]:
    """Return the ids of the source messages that a memory does not share with its successor."""
    if successor is None or successor.thread_id != source.thread_id:
        return source.message_ids
    return tuple(id for id in source.message_ids if id not in successor.message_ids)


async def _read_stored_turns(
    adapter: StoreAdapter, namespace: Namespace, source: Provenance
) -> list[Memory]:
    """Return the stored turns that were created from the messages listed in `source`.

    The turns are sorted by chunk number. The chunks of each message are read in order, up to the
    first chunk that is not stored.
    """
    turns, chunk = list[Memory](), 0
    thread_id, remaining_ids = source.thread_id, list(source.message_ids)
    while remaining_ids and thread_id is not None:
        keys = [build_turn_key(thread_id, id_, chunk) for id_ in remaining_ids]
        ops = [GetOp(namespace, key, refresh_ttl=False) for key in keys]
        items = await adapter.call("batch", ops)
        stored = {
            id: item for id, item in zip(remaining_ids, items, strict=True) if item is not None
        }
        turns += map(convert_item_to_memory, stored.values())
        remaining_ids, chunk = list(stored), chunk + 1
    return turns

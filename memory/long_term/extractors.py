"""Define the `Extractor` interface for proposing memories, and the built-in `TurnExtractor`.

`TurnExtractor` needs no model. `TurnExtractor` creates one memory for each message, or one for each
chunk of a long message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime
from operator import add
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import GetOp

from perdure.effects import Operation
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.records import (
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
from perdure.memory.options import check_whole_number
from perdure.memory.thread_messages import TURN_EXTRACTOR, ThreadMessage, build_hashed_key
from perdure.stores.base import Namespace, Provenance, PutItem
from perdure.stores.search.text import split_into_chunks

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
        """Build a candidate memory whose sources are messages from the batch.

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

        `messages` are the messages of this batch from which the memory was extracted.
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

    An extractor derives a memory's key from the memory's source messages. An extractor that calls a
    model derives the key from the source messages and the memory's text. Because the key is not
    random, extracting the same memory again yields the same key.
    """

    key: str
    candidate: Candidate


class Revision(NamedTuple):
    """A change to a stored memory. If the change is a deletion, the text of `candidate` is empty.

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
    """The store and namespace to write memories to, and the run and thread that they come from.

    Attributes:
        adapter: The adapter of the store that contains the item.
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
        """Return how many messages from the start of the list form the next batch (at least 1)."""

    async def propose_changes(self, batch: Batch, scope: Scope) -> Proposal:
        """Propose memories for the messages of a batch.

        An extractor must accept the same messages again in a later call, for example after an
        extraction that failed.
        """


def _choose_user_or_least_trusted_role(messages: Sequence[ThreadMessage]) -> Role:
    """Choose the message role to record for a memory that was extracted from `messages`.

    If any of the messages is from a user, the memory's role is "user", because the memory is based
    on more than the output of a tool or a model. If no message is from a user, the memory gets the
    least trusted of the messages' roles.
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
        """Return the number of `messages`. No token limit applies, because no model is called."""
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
                additions[key] = Addition(
                    key, batch.build_candidate([message], f"{message.actor}: {text}", TURN)
                )
            if left_out:
                reason = f"the message is too long; its last {left_out:,} chunks are left out"
                key = build_turn_key(batch.thread_id, message.id, _MAX_CHUNKS)
                outcomes.append(Outcome("refused", key, reason, "length"))
            if message.id in batch.edited:
                stored = await _read_stored_turns(
                    scope.adapter, scope.namespace, batch.build_provenance([message])
                )
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
    return build_hashed_key("turn", thread_id, message_id, str(chunk_number))


async def build_puts_that_add_end_date_to_source_turns(
    adapter: StoreAdapter,
    superseded_memory: Memory,
    ended_at: datetime,
    successor_provenance: Provenance | None = None,
) -> list[PutItem]:
    """Build put operations that set an end date on the source turns of a superseded memory.

    A turn that already has an end date keeps this date. A turn gets no end date if the new memory,
    which supersedes the old memory, was extracted from the same turn.

    Args:
        adapter: The adapter of the store that contains the item.
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

    The caller later stores each message as a turn, and uses the returned dates as the end dates of
    these turns. Here, a turn is a memory of the kind `TURN`, which contains the text of one
    message. If a fact from a message has been superseded, the turn that stores the message gets an
    end date. The end date is the date on which the fact was superseded.

    Args:
        scope: The namespace of the memories.
        thread_id: The thread.
        message_ids: The messages.

    Returns:
        The dates (ISO 8601), by message id.
    """
    # Only versioned stores support the `$exists` filter. From other stores, read all memories of
    # the kind `FACT`, and filter them in the loop below.
    memory_filter = {PREVIOUS: {"$exists": True}} if scope.adapter.versioned else {"kind": FACT}
    end_dates: dict[str, str] = {}
    for memory in await scope.adapter.list_memories(scope.namespace, filter=memory_filter):
        superseded = [entry for entry in memory.previous if entry.change == "superseded"]
        if memory.kind == TURN or not any(
            {*entry.message_ids} & {*message_ids} for entry in superseded
        ):
            continue
        threads = {
            version.text: (version.provenance or Provenance()).thread_id
            for version in await scope.adapter.list_versions(memory.namespace, memory.key)
        }
        current_provenance = memory.provenance or Provenance()
        # `superseded` is sorted newest first, so the loop reaches the earliest date of each message
        # last. The earliest date therefore overwrites the later dates of the same message.
        for entry in superseded:
            # A store that keeps versions records a source thread for each earlier text of a memory.
            # In other stores, assume that an earlier text was extracted from the same thread as the
            # current text.
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
    """Return the ids of a memory's source messages that are not sources of its successor."""
    if successor is None or successor.thread_id != source.thread_id:
        return source.message_ids
    return tuple(id for id in source.message_ids if id not in successor.message_ids)


async def _read_stored_turns(
    adapter: StoreAdapter, namespace: Namespace, source: Provenance
) -> list[Memory]:
    """Return the stored turns that were created from the messages listed in `source`.

    The turns are sorted by chunk number. The chunks of each message are read in order until one is
    missing from the store.
    """
    turns, chunk = list[Memory](), 0
    thread_id, remaining_ids = source.thread_id, list(source.message_ids)
    while remaining_ids and thread_id is not None:
        ops = [
            GetOp(namespace, build_turn_key(thread_id, id_, chunk), refresh_ttl=False)
            for id_ in remaining_ids
        ]
        stored = {
            id: item
            for id, item in zip(remaining_ids, await adapter.call("batch", ops), strict=True)
            if item is not None
        }
        turns += map(convert_item_to_memory, stored.values())
        remaining_ids, chunk = list(stored), chunk + 1
    return turns

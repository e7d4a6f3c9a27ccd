"""Proposals: what an extractor makes of a batch of messages, before the gate judges it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig

from perdure.memory.effects import Effects
from perdure.memory.gate import Gate
from perdure.memory.records import Candidate, Outcome
from perdure.memory.store_adapter import StoreAdapter
from perdure.memory.thread_messages import ThreadMessage
from perdure.stores.base import Namespace, Provenance, PutItem

Alteration = Literal["updated", "superseded", "deleted"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a model was asked.

    Attributes:
        calls: How many calls.
        input_tokens: As the model reported them; 0 if it does not.
        output_tokens: As the model reported them.
    """

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.calls + other.calls,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that an extractor reads together.

    Attributes:
        thread_id: Their thread.
        checkpoint_id: The checkpoint at which the thread was read.
        messages: The messages, in order, each with its position.
        before: The messages just before, to understand these by.
        edited: Ids of messages that were read before and say something else now.
    """

    thread_id: str
    checkpoint_id: str | None
    messages: Sequence[ThreadMessage]
    before: Sequence[ThreadMessage] = ()
    edited: frozenset[str] = frozenset()

    def source(self, messages: Sequence[ThreadMessage]) -> Provenance:
        """The provenance of what rests on some of these messages; at least one."""
        last = messages[-1]
        return Provenance(
            thread_id=self.thread_id,
            checkpoint_id=self.checkpoint_id,
            message_ids=tuple(each.id for each in messages),
            actor=next((each.actor for each in messages if each.role == "user"), last.actor),
            trust=_role(messages),
            position=last.position,
            at=last.at,
        )

    def candidate(
        self, messages: Sequence[ThreadMessage], text: str, kind: str, **fields: str
    ) -> Candidate:
        """What would be kept of some of these messages; a user's words make it a user's."""
        return Candidate(text, kind, fields, self.source(messages), _role(messages))


@dataclass(frozen=True, slots=True)
class Addition:
    """A memory to be added, under a key that the same messages always give."""

    key: str
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Revision:
    """A change to a memory.

    Attributes:
        key: The memory's key.
        change: The change.
        candidate: The new text; of a deletion, the messages that it rests on.
    """

    key: str
    change: Alteration
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Planned:
    """What is written of a proposal, and the outcome of each part of it."""

    puts: Sequence[PutItem] = ()
    outcomes: Sequence[Outcome] = ()


Plan = Callable[[Gate], Effects[Planned]]
"""Plans against what is stored now; called again if that changed before it was written."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What an extractor would keep of a batch.

    Attributes:
        additions: Memories to be added.
        revisions: Changes to memories.
        plans: What else is written with them: a profile, instructions.
        outcomes: What the extractor refused already.
        usage: What a model was asked for it.
    """

    additions: Sequence[Addition] = ()
    revisions: Sequence[Revision] = ()
    plans: Sequence[Plan] = ()
    outcomes: Sequence[Outcome] = ()
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Scope:
    """Where memories are written."""

    adapter: StoreAdapter
    namespace: Namespace
    config: RunnableConfig | None = None


@runtime_checkable
class Extractor(Protocol):
    """Makes memories of messages: it proposes what to keep of them, and writes nothing."""

    name: str
    """Part of the key of its watermarks: two extractors of one name share what was read."""

    def taking(self, messages: Sequence[ThreadMessage]) -> int:
        """How many of these messages, from the first on, make one batch; 1 or more."""

    def proposing(self, batch: Batch, scope: Scope) -> Effects[Proposal]:
        """What to keep of a batch."""

    def key(self, thread_id: str, message: ThreadMessage) -> str | None:
        """The key that a memory of the message is sure to have once it is read, if there is one."""


def _role(messages: Sequence[ThreadMessage]) -> Literal["user", "assistant", "tool", "system"]:
    """Whose words these are: a user's if any are, else those of the least trustworthy role."""
    roles = {each.role for each in messages}
    for role in ("user", "tool", "assistant"):
        if role in roles:
            return role
    return "system"

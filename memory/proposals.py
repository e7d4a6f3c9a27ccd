"""What is formed from: a batch of a thread's messages; and what is proposed to be kept of it."""

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
    """What a model was asked, and what it took.

    Attributes:
        calls: How often it was asked.
        input_tokens: As it reported them; 0 if it does not.
        output_tokens: As it reported them.
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
    """Messages that are formed from together.

    Attributes:
        thread_id: Their thread.
        checkpoint_id: The checkpoint it is read at.
        messages: They, in order, each with its position.
        before: What was said just before, to understand them by.
        shown: The system messages of the thread.
        edited: Ids of those that were formed before and say something else now.
    """

    thread_id: str
    checkpoint_id: str | None
    messages: Sequence[ThreadMessage]
    before: Sequence[ThreadMessage] = ()
    shown: tuple[str, ...] = ()
    edited: frozenset[str] = frozenset()

    def source(self, spoken: Sequence[ThreadMessage]) -> Provenance:
        """Where something comes from that rests on some of these messages; at least one."""
        last = spoken[-1]
        return Provenance(
            thread_id=self.thread_id,
            checkpoint_id=self.checkpoint_id,
            message_ids=tuple(each.id for each in spoken),
            actor=next((each.actor for each in spoken if each.role == "user"), last.actor),
            trust=_role(spoken),
            position=last.position,
            at=last.at,
        )

    def candidate(
        self, spoken: Sequence[ThreadMessage], text: str, kind: str, **fields: str
    ) -> Candidate:
        """What would be kept of some of these messages; a user's words make it a user's."""
        role = _role(spoken)
        # a user is not shown the system messages, so who says the same has thought of it
        shown = () if role == "user" else self.shown
        return Candidate(text, kind, fields, self.source(spoken), role, shown=shown)


@dataclass(frozen=True, slots=True)
class Addition:
    """A memory to be added, under a key that the same words of the same thread always get."""

    key: str
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Revision:
    """A change to a memory that is there.

    Attributes:
        key: Its key.
        change: What is to become of it.
        candidate: What it is to say, or for a deletion, on whose words it is to go.
    """

    key: str
    change: Alteration
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Planned:
    """What is to be written, and what becomes of what was proposed by it."""

    puts: Sequence[PutItem] = ()
    outcomes: Sequence[Outcome] = ()


Plan = Callable[[Gate], Effects[Planned]]
"""Plans against what is stored now; planned anew if that has changed before it was written."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is to be kept of a batch.

    Attributes:
        additions: Memories to be added.
        revisions: Changes to memories that are there.
        plans: What else is to be written: a profile, instructions.
        outcomes: What was refused already.
        usage: What it took.
    """

    additions: Sequence[Addition] = ()
    revisions: Sequence[Revision] = ()
    plans: Sequence[Plan] = ()
    outcomes: Sequence[Outcome] = ()
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Scope:
    """Where memories are formed."""

    adapter: StoreAdapter
    namespace: Namespace
    config: RunnableConfig | None = None


@runtime_checkable
class Proposer(Protocol):
    """Forms memories from messages: proposes what to keep of them, and writes nothing."""

    def taking(self, messages: Sequence[ThreadMessage]) -> int:
        """How many of these messages, from the first on, make one batch; 1 or more."""

    def proposing(self, batch: Batch, around: Scope) -> Effects[Proposal]:
        """What to keep of a batch."""

    def key(self, thread_id: str, spoken: ThreadMessage) -> str | None:
        """The key that something of a message has for certain once it is formed, if any has."""


def _role(spoken: Sequence[ThreadMessage]) -> Literal["user", "assistant", "tool", "system"]:
    """Whose words something rests on: a user's if any are, else the least trustworthy."""
    roles = {each.role for each in spoken}
    for role in ("user", "tool", "assistant"):
        if role in roles:
            return role
    return "system"

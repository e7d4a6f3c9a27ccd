"""Proposals of an extractor for a batch of messages, before the gate judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from datetime import datetime
from operator import add
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig

from perdure.effects import Operation
from perdure.memory.gate import Gate
from perdure.memory.records import Candidate, Outcome, Role
from perdure.memory.store_adapter import StoreAdapter
from perdure.memory.thread_messages import ThreadMessage
from perdure.stores.base import Namespace, Provenance, PutItem

Alteration = Literal["updated", "superseded", "deleted"]


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

    def candidate(
        self, messages: Sequence[ThreadMessage], text: str, kind: str, **fields: str
    ) -> Candidate:
        """A candidate that rests on these messages, at least one."""
        return Candidate(text, kind, fields, self.source(messages), _role(messages))

    def source(self, messages: Sequence[ThreadMessage]) -> Provenance:
        """The provenance of what rests on these messages."""
        last = messages[-1]
        return Provenance(
            thread_id=self.thread_id or None,  # a node may run without a thread
            checkpoint_id=self.checkpoint_id,
            message_ids=tuple(each.id for each in messages),
            actor=next((each.actor for each in messages if each.role == "user"), last.actor),
            trust=_role(messages),
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


class Planned(NamedTuple):
    """The puts of a proposal, and the outcome of each part of it."""

    puts: Sequence[PutItem] = ()
    outcomes: Sequence[Outcome] = ()


Plan = Callable[[Gate], Operation[Planned]]
"""Plans against what is stored now; called again if that changed before the write."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The changes that an extractor proposes."""

    additions: Sequence[Addition] = ()
    revisions: Sequence[Revision] = ()
    plans: Sequence[Plan] = ()  # of other items: a profile, instructions
    outcomes: Sequence[Outcome] = ()  # what the extractor refused itself
    usage: Usage = field(default_factory=Usage)


class Scope(NamedTuple):
    """The place where memories are written, and the config of the run."""

    adapter: StoreAdapter
    namespace: Namespace
    config: RunnableConfig | None = None


@runtime_checkable
class Extractor(Protocol):
    """Proposes memories of messages, and writes nothing."""

    name: str
    """Part of the key of its watermarks: two extractors of one name share them."""

    def taking(self, messages: Sequence[ThreadMessage]) -> int:
        """How many of these messages, from the first on, make one batch; 1 or more."""

    async def proposing(self, batch: Batch, scope: Scope) -> Proposal:
        """The memories of a batch; the same messages may be read again, as with `anew`."""


def _role(messages: Sequence[ThreadMessage]) -> Role:
    """The user's role if any message is a user's, else the least trustworthy one."""
    ranked: Sequence[Role] = ("user", "tool", "assistant", "system")
    roles = {each.role for each in messages}
    return next(role for role in ranked if role in roles)

"""What long-term memory is made of: memories, candidates for one, and what became of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from perdure.stores.base import Namespace, Provenance

FACT: Final = "fact"
TURN: Final = "turn"
EPISODE: Final = "episode"
Role = Literal["user", "assistant", "tool", "system"]
Action = Literal["keep", "quarantine", "refuse"]
Change = Literal["added", "updated", "superseded", "deleted", "unchanged", "quarantined", "refused"]


@dataclass(frozen=True, slots=True)
class Previous:
    """What a memory said before.

    Attributes:
        text: What it said.
        until: When it ceased to hold (UTC): when it was superseded or corrected.
        change: `"superseded"`: it was true until then; `"updated"`: it was put better.
    """

    text: str
    until: datetime
    change: str


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory, as it is kept in a store and recalled from it.

    Attributes:
        namespace: Where it is kept.
        key: Its id within the namespace.
        text: What it says.
        kind: `"fact"`, `"turn"`, `"episode"`, or one of your own.
        value: The whole document: `text`, `kind`, and what else was kept with it.
        provenance: Where it comes from; `provenance.trust` is whose words it rests on.
        version: Counts its changes, from 1; None: the store keeps no versions.
        valid_from: Since when it says this (UTC).
        valid_to: Until when; None: it is present.
        formerly: What it said before, newest first.
        score: How well it answers a query; scores of two queries cannot be compared.
        parts: What the score is the sum of, if that was asked for.
    """

    namespace: Namespace
    key: str
    text: str
    kind: str
    value: Mapping[str, Any] = field(repr=False)
    provenance: Provenance | None = None
    version: int | None = None
    valid_from: datetime | None = None
    valid_to: datetime | None = None
    formerly: tuple[Previous, ...] = ()
    score: float | None = None
    parts: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may become a memory, once the gate has judged it.

    Attributes:
        text: What it would say.
        kind: As of a memory.
        fields: What else is to be kept with it, beside `text` and `kind`.
        provenance: Where it comes from.
        role: Whose words it rests on.
        explicit: Whether somebody asked for it to be kept, by a tool or by hand; what is formed
            from a conversation unasked is judged more strictly.
        shown: What the speaker had been shown when it was said: the system prompt, recalled
            memories. Who only repeats that says nothing new.
        by_model: Whether it was a model that asked, by a tool. Such requests are counted, and what
            does not rest on the user's words is looked at for orders.
    """

    text: str
    kind: str = FACT
    fields: Mapping[str, Any] = field(default_factory=dict)
    provenance: Provenance | None = None
    role: Role = "user"
    explicit: bool = False
    shown: tuple[str, ...] = ()
    by_model: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says of a candidate.

    Attributes:
        action: `"keep"` it, put it into `"quarantine"` to be reviewed, or `"refuse"` it.
        reason: Why, in words; "" for what is kept as it is.
        check: The check that decided.
        text: What to keep instead of the candidate's text, say with numbers blotted out.
        same_as: The key of the memory that says the same already, if that is why it is refused.
    """

    action: Action
    reason: str = ""
    check: str = ""
    text: str | None = None
    same_as: str | None = None


KEEP: Final = Verdict("keep")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a candidate, or of a change to a memory.

    Attributes:
        change: What was done; `"unchanged"`: it was there already.
        key: The memory's; of what is in quarantine, its key there; None: there is none.
        reason: Why, where it is not as asked.
        check: The gate's check that decided, if one did.
    """

    change: Change
    key: str | None = None
    reason: str = ""
    check: str = ""

    def __str__(self) -> str:
        about = f" {self.key}" if self.key else ""
        return f"{self.change}{about}" + (f": {self.reason}" if self.reason else "")

"""The records of long-term memory: memories, candidates, verdicts and outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from perdure.stores.base import Namespace, Provenance

FACT: Final = "fact"
TURN: Final = "turn"
EPISODE: Final = "episode"
EVENTS: Final = (TURN, EPISODE)
"""Kinds that record what happened: the same text again is another event."""
Role = Literal["user", "assistant", "tool", "system"]
Action = Literal["keep", "quarantine", "refuse"]
Change = Literal["added", "updated", "superseded", "deleted", "unchanged", "quarantined", "refused"]


@dataclass(frozen=True, slots=True)
class Previous:
    """An earlier text of a memory, which it had until `until` (UTC).

    `change` is `"superseded"`, it was true, or `"updated"`, it was wrong or badly put;
    `message_ids` are the messages that it rested on, if known.
    """

    text: str
    until: datetime
    change: str
    message_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory as it is kept in a store.

    Attributes:
        kind: `"fact"`, `"turn"`, `"episode"`, or a kind of your own.
        value: The whole document: `text`, `kind` and all other fields.
        provenance: Where it comes from; `provenance.trust` says whose words it rests on.
        version: Counts its changes, from 1; None: the store keeps no versions.
        valid_from, valid_to: When it has this text (UTC); `valid_to` is None while it is present.
        previous: Its earlier texts, newest first.
        score: How well it answers a query; scores of two queries cannot be compared.
        parts: The parts of the score, if they were asked for.
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
    previous: tuple[Previous, ...] = ()
    score: float | None = None
    parts: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A text that may become a memory, if the gate lets it pass.

    Attributes:
        text, kind, fields, provenance: Those of the memory.
        role: Whose words it rests on.
        explicit: Whether somebody asked for it, by a tool or by hand.
        by_model: Whether a model asked for it, by a tool.
    """

    text: str
    kind: str = FACT
    fields: Mapping[str, Any] = field(default_factory=dict)
    provenance: Provenance | None = None
    role: Role = "user"
    explicit: bool = False
    by_model: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's decision on a candidate: to keep it, to put it into quarantine, or to refuse it.

    Attributes:
        reason: Why; "" for a candidate that is kept as it is.
        check: The check that decided.
        text: The text to keep instead of the candidate's, for example a redacted one.
        same_as: The key of the memory that says the same, if it is refused for that.
        fields: The fields to keep instead of the candidate's.
    """

    action: Action
    reason: str = ""
    check: str = ""
    text: str | None = None
    same_as: str | None = None
    fields: Mapping[str, Any] | None = None


KEEP: Final = Verdict("keep")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a change to memories; `"unchanged"`: the memory was there already.

    `key` is that of the memory, or of the entry in quarantine. `reason` says why it was not done as
    asked, and `check` which check of the gate decided.
    """

    change: Change
    key: str | None = None
    reason: str = ""
    check: str = ""

    def __str__(self) -> str:
        about = f" {self.key}" if self.key else ""
        return f"{self.change}{about}" + (f": {self.reason}" if self.reason else "")

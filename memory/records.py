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
        version: Counts its changes, from 1; None: the store keeps no versions.
        valid_from, valid_to: When it has this text (UTC); `valid_to` is None while it is present.
        previous: Its earlier texts, newest first.
        score, parts: How well it answers a query; scores of two queries cannot be compared.
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
    """A text that may become a memory, if the gate lets it pass."""

    text: str
    kind: str = FACT
    fields: Mapping[str, Any] = field(default_factory=dict)
    provenance: Provenance | None = None
    role: Role = "user"  # whose words it rests on
    explicit: bool = False  # whether somebody asked for it, by a tool or by hand
    by_model: bool = False  # whether a model asked for it, by a tool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's decision on a candidate: keep it, put it into quarantine, or refuse it."""

    action: Action
    reason: str = ""  # "": it is kept as it is
    check: str = ""  # the one that decided
    text: str | None = None  # to keep instead of the candidate's
    same_as: str | None = None  # the key of the memory that says the same
    fields: Mapping[str, Any] | None = None  # to keep instead of the candidate's


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

"""What came of forming memories of a thread: how many of what, and what was refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from perdure.memory.proposals import Usage
from perdure.memory.records import Outcome


@dataclass(frozen=True, slots=True)
class ExtractionReport:
    """What came of forming memories of a thread.

    Attributes:
        thread_id: The thread.
        messages: How many messages were read that had not been before.
        added: How many memories are new.
        updated: How many say it better now.
        superseded: How many say what is true now.
        deleted: How many were closed.
        unchanged: How many were there already.
        quarantined: How many wait to be reviewed.
        refused: How many were not kept, by the check that refused them, or the reason.
        usage: What a model was asked for it.
        batches: In how many transactions it was written.
    """

    thread_id: str
    messages: int = 0
    added: int = 0
    updated: int = 0
    superseded: int = 0
    deleted: int = 0
    unchanged: int = 0
    quarantined: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    batches: int = 0

    def __str__(self) -> str:
        parts = [f"{self.thread_id}: {self.messages} messages read"]
        parts += [f"{count} {name}" for name, count in self.changes.items() if count]
        if self.refused:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.items())
            parts.append(f"{sum(self.refused.values())} refused ({reasons})")
        if self.usage.calls:
            tokens = f"{self.usage.input_tokens} + {self.usage.output_tokens} tokens"
            times = "once" if self.usage.calls == 1 else f"{self.usage.calls} times"
            parts.append(f"model asked {times}, {tokens}")
        return " ".join(", ".join(parts).split())

    @property
    def changes(self) -> Mapping[str, int]:
        """How many memories were changed in which way, or could have been."""
        return {
            "added": self.added,
            "updated": self.updated,
            "superseded": self.superseded,
            "deleted": self.deleted,
            "unchanged": self.unchanged,
            "quarantined": self.quarantined,
        }

    def counting(
        self, messages: int, outcomes: Sequence[Outcome], usage: Usage
    ) -> ExtractionReport:
        """The report with another batch."""
        counts = Counter(each.change for each in outcomes)
        refusals = Counter(
            each.check or each.reason for each in outcomes if each.change == "refused"
        )
        changes: dict[str, Any] = {
            name: count + counts[name]  # type: ignore[index]  # its names are changes
            for name, count in self.changes.items()
        }
        return replace(
            self,
            messages=self.messages + messages,
            refused=dict(Counter(self.refused) + refusals),
            usage=self.usage + usage,
            batches=self.batches + 1,
            **changes,
        )

    def noted(self) -> dict[str, Any]:
        """What a note keeps of it."""
        return asdict(self)

"""Packing a context into a budget, by priority.

The order of priority is fixed, so the same input always gives the same context: what may not be
left out (instructions, tools, the newest turn's beginning and end), then profile, summary, recalled
memories and examples, each within its share, then as much of the conversation as still fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from langchain_core.messages import SystemMessage

from perdure.errors import BudgetExceeded
from perdure.memory.conversation import Turn
from perdure.memory.quoting import quoted
from perdure.memory.rendering import memory_line, section
from perdure.memory.shown import Shown
from perdure.memory.summary import summary_of
from perdure.memory.tokens import TokenCounter
from perdure.memory.window import choose

SHARES: Final[Mapping[str, float]] = {
    "profile": 0.15,
    "summary": 0.25,
    "memories": 0.25,
    "examples": 0.2,
}
"""What share of the budget a part may take at most; the conversation may take all that is left."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """What became of one part.

    Attributes:
        name: The part.
        tokens: What it takes.
        taken: How many of its entries (messages, memories, …) are in.
        left_out: How many are not.
    """

    name: str
    tokens: int
    taken: int
    left_out: int


@dataclass(slots=True)
class _Packing:
    """A system message in the making, and what else is in the request for certain."""

    counter: TokenCounter
    budget: int
    said: str
    certain: int
    sections: dict[str, list[str]] = field(default_factory=dict)
    offered: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, entries: Sequence[str], share: float) -> None:
        """Add as many entries of a part as its share and the budget allow, best first."""
        self.offered[name] = len(entries)
        most = min(int(self.budget * share), self.budget - self.certain - self.system())
        taken: list[str] = []
        tokens = self.counter.text(section(name, []))
        for entry in entries:
            more = self.counter.text("\n" + entry)
            if tokens + more <= most:
                taken.append(entry)
                tokens += more
        if taken:
            self.sections[name] = taken
        while self.sections.get(name) and self.certain + self.system() > self.budget:
            self.sections[name].pop()  # the parts of a text may count less than the whole
            if not self.sections[name]:
                del self.sections[name]

    def text(self) -> str:
        """The system message's text."""
        parts = [section(name, entries) for name, entries in self.sections.items()]
        return "\n\n".join([self.said, *parts] if self.said else parts)

    def system(self) -> int:
        """Tokens of the system message as it is now."""
        text = self.text()
        return self.counter.message(SystemMessage(text)) if text else 0

    def reports(self) -> Iterator[PartReport]:
        """What became of the parts."""
        for name, offered in self.offered.items():
            taken = self.sections.get(name, [])
            tokens = self.counter.text(section(name, taken)) if taken else 0
            yield PartReport(name, tokens, len(taken), offered - len(taken))


@dataclass(frozen=True, slots=True)
class Given:
    """What a model could be told besides the conversation; see `assemble`."""

    instructions: str | None = None
    profile: Mapping[str, Any] | str | None = None
    summary: Mapping[str, Any] | str | None = None
    memories: Sequence[Any] = ()
    examples: Sequence[Any] = ()

    def entries(self) -> Iterator[tuple[str, list[str]]]:
        """The parts in order of priority, their entries rendered."""
        summary = summary_of(self.summary)
        yield "profile", [quoted(self.profile)] if self.profile else []
        yield "summary", [quoted(summary["text"])] if summary and summary["text"] else []
        yield "memories", [memory_line(memory) for memory in self.memories]
        yield "examples", [memory_line(example) for example in self.examples]


class Packed(NamedTuple):
    """What was packed: what is shown, what became of each part, and what all of it takes."""

    system: SystemMessage | None
    turns: list[Turn]
    parts: tuple[PartReport, ...]
    tokens: int

    def shown(self) -> Shown:
        """As the next part of a view takes it."""
        return Shown(self.system, iter(self.turns))


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs contexts into a budget; the options of `assemble`."""

    budget: int
    tools: Sequence[Any]
    counter: TokenCounter
    shares: Mapping[str, float]

    def packed(self, shown: Shown, given: Given) -> Packed:
        """Pack a context.

        Raises:
            BudgetExceeded: What may not be left out takes more than the budget.
        """
        packed = self._packed(shown, given, self.counter)
        counter = self.counter.fitted(packed.shown().messages())
        if counter is self.counter:
            return packed
        # by what its own answers took; never less, so it is a part of what fitted at first
        return self._packed(Shown(shown.system, iter(packed.turns)), given, counter)

    def _packed(self, shown: Shown, given: Given, counts: TokenCounter) -> Packed:
        said = given.instructions
        if said is None:
            said = "" if shown.system is None else shown.system.text
        schemas = counts.tools(self.tools) if self.tools else 0
        fixed = counts.request + schemas
        system = counts.message(SystemMessage(said)) if said else 0
        newest = list(islice(shown.turns, 1))
        window = choose(Shown(None, iter(newest)), self.budget - fixed - system, counts.message)
        must = sum(counts.message(message) for unit in window.needed for message in unit.messages)
        if window.over > 0:
            raise BudgetExceeded(
                f"what may not be left out takes {self.budget + window.over} tokens, "
                f"{self.budget} are allowed (instructions {system}, tools {schemas}, the newest "
                f"messages {must}): allow more, bind fewer tools, or shorten the instructions"
            )
        packing = _Packing(counts, self.budget, said, fixed + must)
        for name, entries in given.entries():
            if entries:
                packing.add(name, entries, self.shares[name])
        rest = self.budget - fixed - packing.system()
        turns = choose(Shown(None, chain(newest, shown.turns)), rest, counts.message).turns
        chosen = Shown(None, iter(turns)).messages()
        took = sum(map(counts.message, chosen))
        text = packing.text()
        return Packed(
            SystemMessage(text) if text else None,
            turns,
            (
                PartReport("instructions", system, int(bool(said)), 0),
                PartReport("tools", schemas, len(self.tools), 0),
                *packing.reports(),
                PartReport("messages", took, len(chosen), 0),
            ),
            fixed + packing.system() + took,
        )

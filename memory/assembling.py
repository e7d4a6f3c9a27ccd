"""Context assembly: all that a model could be told, packed into a budget of tokens by priority.

The order of priority is fixed, so the same input always gives the same context: what may not be
left out (instructions, tools, the newest turn's beginning and end), then profile, summary, recalled
memories and examples, each within its share, then as much of the conversation as still fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from langchain_core.messages import BaseMessage, SystemMessage

from perdure.errors import BudgetExceeded, ConfigurationError
from perdure.memory.conversation import Messages, system_index
from perdure.memory.counting import Countable, token_counter
from perdure.memory.nodes import checked
from perdure.memory.rendering import memory_line, quoted, section
from perdure.memory.shown import Shown
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


@dataclass(frozen=True, slots=True)
class Assembly:
    """An assembled context.

    Attributes:
        messages: What to send: one system message, then the conversation.
        parts: What became of each part, in order of priority.
        tokens: What all of it takes, tools and request included.
        budget: What it was allowed to take.
    """

    messages: list[BaseMessage]
    parts: tuple[PartReport, ...]
    tokens: int
    budget: int

    def __str__(self) -> str:
        lines = [
            f"{part.name:<13}{part.tokens:>7}  {part.taken} in"
            + (f", {part.left_out} left out" if part.left_out else "")
            for part in self.parts
        ]
        return "\n".join([*lines, f"{'all':<13}{self.tokens:>7}  of {self.budget}"])


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


def assemble(
    messages: Messages,
    *,
    budget: int,
    instructions: str | None = None,
    profile: Mapping[str, Any] | str | None = None,
    summary: str | None = None,
    memories: Sequence[Any] = (),
    examples: Sequence[Any] = (),
    tools: Sequence[Any] = (),
    counter: Countable | None = None,
    shares: Mapping[str, float] | None = None,
) -> Assembly:
    """Pack a context.

    Memories, profile and examples are quoted: each entry is JSON within a named section that says
    that it is data, so that a memory which reads like an instruction stays a memory.

    Args:
        messages: The conversation; a system message in it gives the instructions, if none are
            given.
        budget: Tokens that the request may take.
        instructions: The system message's text.
        profile: What is known of the user.
        summary: What the summary of what went before says.
        memories: Recalled memories, best first: items of a store, texts or JSON objects.
        examples: Few-shot examples, best first: items of a store, texts or JSON objects.
        tools: The tools bound to the model; their schemas take tokens.
        counter: What counts tokens; see `token_counter`.
        shares: Other shares than `SHARES`, each from 0 to 1.

    Raises:
        ConfigurationError: The budget or a share is wrong.
        InvalidMessages: The messages are not messages.
        BudgetExceeded: What may not be left out takes more than the budget.
    """
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ConfigurationError(f"budget is {budget!r}; expected tokens, from 1 on")
    wanted = _shares(shares)
    messages = checked(messages, "the messages")
    counts = token_counter(counter).fitted(messages)
    said = _instructions(instructions, messages)
    talk = [message for message in messages if not isinstance(message, SystemMessage)]
    schemas = counts.tools(tools) if tools else 0
    fixed = counts.request + schemas
    system = counts.message(SystemMessage(said)) if said else 0
    window = choose(Shown.of(talk), budget - fixed - system, counts.message)
    must = sum(counts.message(message) for unit in window.needed for message in unit.messages)
    if window.over > 0:
        raise BudgetExceeded(
            f"what may not be left out takes {budget + window.over} tokens, {budget} are allowed "
            f"(instructions {system}, tools {schemas}, the newest messages {must}): allow more, "
            "bind fewer tools, or shorten the instructions"
        )
    packing = _Packing(counts, budget, said, fixed + must)
    for name, entries in _entries(profile, summary, memories, examples):
        if entries:
            packing.add(name, entries, wanted[name])
    rest = budget - fixed - packing.system()
    turns = choose(Shown.of(talk), rest, counts.message).turns
    shown = Shown(None, iter(turns)).messages()
    took = sum(map(counts.message, shown))
    text = packing.text()
    return Assembly(
        [SystemMessage(text), *shown] if text else shown,
        (
            PartReport("instructions", system, int(bool(said)), 0),
            PartReport("tools", schemas, len(tools), 0),
            *packing.reports(),
            PartReport("messages", took, len(shown), len(talk) - len(shown)),
        ),
        fixed + packing.system() + took,
        budget,
    )


def _entries(
    profile: Mapping[str, Any] | str | None,
    summary: str | None,
    memories: Sequence[Any],
    examples: Sequence[Any],
) -> Iterator[tuple[str, list[str]]]:
    """The parts in order of priority, their entries rendered."""
    yield "profile", [] if not profile else [quoted(profile)]
    yield "summary", [] if not summary else [quoted(summary)]
    yield "memories", [memory_line(memory) for memory in memories]
    yield "examples", [memory_line(example) for example in examples]


def _instructions(given: str | None, messages: Messages) -> str:
    if given is not None:
        return given
    index = system_index(messages)
    return "" if index is None else messages[index].text


def _shares(given: Mapping[str, float] | None) -> Mapping[str, float]:
    for name, share in (given or {}).items():
        if name not in SHARES:
            raise ConfigurationError(f"shares has {name!r}; expected some of {list(SHARES)}")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigurationError(f"the share of {name} is {share!r}; expected 0 to 1")
    return {**SHARES, **(given or {})}

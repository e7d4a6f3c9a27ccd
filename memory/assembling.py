"""Context assembly: all that a model could be told, in a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError
from perdure.memory.conversation import Messages
from perdure.memory.counting import Countable, token_counter
from perdure.memory.nodes import MessagesNode, channel, checked
from perdure.memory.packing import SHARES, Given, Packer, PartReport
from perdure.memory.shown import Shown


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


def assemble(
    messages: Messages,
    *,
    budget: int,
    instructions: str | None = None,
    profile: Mapping[str, Any] | str | None = None,
    summary: Mapping[str, Any] | str | None = None,
    memories: Sequence[Any] = (),
    examples: Sequence[Any] = (),
    tools: Sequence[Any] = (),
    counter: Countable | None = None,
    shares: Mapping[str, float] | None = None,
) -> Assembly:
    """Pack a context. `assembled` is the same as a node of a graph.

    Memories, profile and examples are quoted: each entry is JSON within a named section that says
    that it is data, so that a memory which reads like an instruction stays a memory.

    Args:
        messages: The conversation; a system message in it gives the instructions, if none are
            given.
        budget: Tokens that the request may take.
        instructions: The system message's text.
        profile: What is known of the user.
        summary: The summary of what went before: its text, or what `summarize` wrote.
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
    packer = _packer(budget, tools, counter, shares)
    talk = checked(messages, "the messages")
    given = Given(instructions, profile, summary, memories, examples)
    packed = packer.packed(Shown.of(talk), given)
    *parts, last = packed.parts
    said = sum(not isinstance(message, SystemMessage) for message in talk)
    parts.append(replace(last, left_out=said - last.taken))
    return Assembly(packed.shown().messages(), tuple(parts), packed.tokens, budget)


Source = str | Callable[[Any, RunnableConfig | None], Any]
"""Where a part comes from: a channel of the state, or a function of the state and the config."""


def assembled(
    *,
    budget: int,
    instructions: Source | None = None,
    profile: Source | None = None,
    summary: Source | None = "summary",
    memories: Source | None = None,
    examples: Source | None = None,
    tools: Sequence[Any] = (),
    counter: Countable | None = None,
    shares: Mapping[str, float] | None = None,
    messages_key: str = "messages",
) -> Assembled:
    """A node that packs the context of a state: `assemble`, its parts from channels or functions.

    It cuts, so in a view it comes last.

    Args:
        budget: Tokens that the request may take.
        instructions: A channel's name, or a function that is given the state and the run's config;
            as for all parts. What is missing is left out.
        profile: What is known of the user.
        summary: What went before.
        memories: Recalled memories.
        examples: Few-shot examples.
        tools: The tools bound to the model.
        counter: What counts tokens; see `token_counter`.
        shares: Other shares than `SHARES`.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: An option is wrong.
    """
    sources = {
        "instructions": instructions,
        "profile": profile,
        "summary": summary,
        "memories": memories,
        "examples": examples,
    }
    for name, source in sources.items():
        if source is not None and not isinstance(source, str) and not callable(source):
            raise ConfigurationError(
                f"{name} is {source!r:.80}; expected a channel's name, or a function of state and "
                "config"
            )
    return Assembled(_packer(budget, tools, counter, shares), sources, messages_key)


class Assembled(MessagesNode):
    """See `assembled`, which makes it."""

    def __init__(
        self, packer: Packer, sources: Mapping[str, Source | None], messages_key: str
    ) -> None:
        super().__init__(messages_key)
        self._packer, self._sources = packer, sources

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """The context, as much of the conversation in it as fits."""
        found = {
            name: channel(state, source) if isinstance(source, str) else source(state, config)
            for name, source in self._sources.items()
            if source is not None and state is not None
        }
        given = Given(**{name: value for name, value in found.items() if value is not None})
        return self._packer.packed(shown, given).shown()


def _packer(
    budget: int,
    tools: Sequence[Any],
    counter: Countable | None,
    shares: Mapping[str, float] | None,
) -> Packer:
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ConfigurationError(f"budget is {budget!r}; expected tokens, from 1 on")
    for name, share in (shares or {}).items():
        if name not in SHARES:
            raise ConfigurationError(f"shares has {name!r}; expected some of {list(SHARES)}")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigurationError(f"the share of {name} is {share!r}; expected 0 to 1")
    return Packer(budget, tools, token_counter(counter), {**SHARES, **(shares or {})})

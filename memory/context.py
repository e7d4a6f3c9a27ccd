"""Context: all that a model could be told, packed into a budget of tokens by priority."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from typing import Any, Final, Self, cast

from langchain_core.messages import SystemMessage
from langchain_core.runnables import RunnableConfig
from pydantic import BaseModel

from perdure.memory.conversation import Turn
from perdure.memory.nodes import MessagesNode, Shown, channel
from perdure.memory.options import instance, whole
from perdure.memory.quotation import fitting, memory_line, quoted, section
from perdure.memory.summary import summary_of
from perdure.memory.tokens import Countable, TokenCounter
from perdure.memory.tokens import token_counter as counter_of
from perdure.memory.trim import choose, too_long

SHARES: Final[Mapping[str, float]] = {
    "profile": 0.15,
    "summary": 0.25,
    "memories": 0.25,
    "examples": 0.2,
}
"""The share of the budget that a part may take; the conversation may take all that is left."""

Given = Callable[[Any, RunnableConfig | None], Any]
"""A function that gives a part: of the state (None for plain messages) and the run's config."""


class Assemble(MessagesNode):
    """A node that packs a context: `assemble(4_000, memories=…)(messages)`.

    Each part is a value, or a function of the state and the run's config. Memories, profile and
    examples are quoted as data, each entry as JSON. The node cuts: in a view it comes last.

    Args:
        max_tokens: Tokens of the request.
        profile: What is known of the user.
        token_counter: See `perdure.memory.token_counter`.
        instructions: The system message's text; None: that of the system message there is.
        summary: A summary of earlier messages; None: what `summarize` wrote into the state.
        memories: Recalled memories, best first: items of a store, texts or JSON objects.
        examples: Examples of earlier cases, best first: as memories.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        instructions: str | Given | None = None,
        profile: Mapping[str, Any] | str | Given | None = None,
        summary: Mapping[str, Any] | str | Given | None = None,
        memories: Sequence[Any] | Given = (),
        examples: Sequence[Any] | Given = (),
        token_counter: Countable | None = None,
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        parts = {"profile": profile, "summary": summary, "memories": memories, "examples": examples}
        self.parts = {"instructions": instructions, **parts}
        self.counter, self.tools = counter_of(token_counter), cast("Sequence[Any]", ())
        self.max_tokens = whole("max_tokens", max_tokens, 1)

    def with_tools(self, tools: Sequence[Any]) -> Self:
        """The same for a request with these tools."""
        made = copy(self)
        made.tools = tools
        return made

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """The context, as much of the conversation in it as fits."""
        parts = self.parts.items()
        given = {name: part(state, config) if callable(part) else part for name, part in parts}
        if given["summary"] is None and state is not None:
            given["summary"] = channel(state, "summary")
        system, turns = self._packed(shown, given, self.counter)
        counter = self.counter.fitted(Shown(system, iter(turns)).messages())
        if counter is not self.counter:
            # by what its own answers took; never less, so it is a part of what fitted at first
            system, turns = self._packed(Shown(shown.system, iter(turns)), given, counter)
        return Shown(system, iter(turns))

    def _packed(
        self, shown: Shown, given: Mapping[str, Any], counter: TokenCounter
    ) -> tuple[SystemMessage | None, list[Turn]]:
        text = given["instructions"]
        if text is None:
            text = "" if shown.system is None else shown.system.text
        tools, system = counter.tools(self.tools), _system(text, counter)
        newest = list(islice(shown.turns, 1))
        left = self.max_tokens - counter.request - tools
        window = choose(Shown(None, iter(newest)), left - system, counter.message)
        must = sum(counter.message(message) for unit in window.needed for message in unit)
        if window.over > 0:
            named = [("instructions", system), ("tools", tools), ("the newest messages", must)]
            named.append(("the request itself", counter.request))
            raise too_long(self.max_tokens, named, "shorten the instructions")
        for name, entries in _entries(given):
            text = self._with_section(text, name, entries, left - must, counter)
        left -= _system(text, counter)
        turns = choose(Shown(None, chain(newest, shown.turns)), left, counter.message).turns
        return SystemMessage(text) if text else None, turns

    def _with_section(
        self, text: str, name: str, entries: list[str], left: int, counter: TokenCounter
    ) -> str:
        share = min(int(self.max_tokens * SHARES[name]), left - _system(text, counter))
        taken = [entries[number] for number in fitting(name, entries, share, counter)[0]]
        while taken:
            added = section(name, taken)
            joined = f"{text}\n\n{added}" if text else added
            if _system(joined, counter) <= left:
                return joined
            taken.pop()  # the parts of a text may count less than the whole
        return text


assemble = Assemble


def _entries(given: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    summary = summary_of(given["summary"])
    profile: Any = given["profile"]
    if isinstance(profile, BaseModel):
        profile = profile.model_dump(mode="json")
    expected = (
        "a pydantic model, a dict or text: for a Profile, lambda state, config: p.get(config)"
    )
    instance("profile", profile or {}, (Mapping, str), expected)
    texts = {
        "profile": [quoted(profile)] if profile else [],
        "summary": [quoted(summary["text"])] if summary and summary["text"] else [],
        "memories": [memory_line(memory) for memory in given["memories"] or ()],
        "examples": [memory_line(example) for example in given["examples"] or ()],
    }
    return ((name, entries) for name, entries in texts.items() if entries)


def _system(text: str, counter: TokenCounter) -> int:
    return counter.message(SystemMessage(text)) if text else 0

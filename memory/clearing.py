"""Clearing old results of tools: what was bulky becomes a line, the original stays in history."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Final

from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError
from perdure.memory.conversation import Messages, Turn, backwards
from perdure.memory.counting import Countable, token_counter
from perdure.memory.nodes import MODES, MessagesNode, Mode
from perdure.memory.options import choice as check_choice
from perdure.memory.shortening import SHORTENED
from perdure.memory.shown import Shown

MARKER: Final = "[The result of {name} was cleared ({tokens} tokens). Call it again if need be.]"


def clear_tool_outputs(
    *,
    keep: int = 3,
    at_least: int = 200,
    above: int | None = None,
    exclude: Collection[str] = (),
    marker: str = MARKER,
    counter: Countable | None = None,
    mode: Mode = "view",
    messages_key: str = "messages",
) -> ClearToolOutputs:
    """A node that replaces old, bulky results of tools by a short marker.

    The call and its (now short) result stay a pair, so the sequence is as valid as before. The
    results that the model goes on from are never cleared, however many: it has not read them yet.

    Args:
        keep: How many of the newest results stay as they are, those just named included.
        at_least: Tokens from which a result is worth clearing.
        above: Clear only when the messages together take more tokens than this.
        exclude: Names of tools whose results stay.
        marker: What stands in place of a result; `{name}` is the tool, `{tokens}` what it took.
        counter: What counts tokens; see `token_counter`.
        mode: `"view"`: only what the model is shown changes. `"state"`: the message of the state
            is replaced; a perdure checkpointer's history still has the original.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: An option is wrong, or the marker itself is not shorter than `at_least`.
        InvalidMessages: When it runs in the mode `"state"`: a result to clear has no id.
    """
    for name, number in (("keep", keep), ("at_least", at_least), ("above", above)):
        if number is None and name == "above":
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigurationError(f"{name} is {number!r}; expected a whole number, 0 or more")
    if isinstance(exclude, str):
        raise ConfigurationError(f"exclude is {exclude!r}; expected the names of tools, in a list")
    check_choice("mode", mode, MODES)
    return ClearToolOutputs(
        keep,
        at_least,
        above,
        frozenset(exclude),
        marker,
        token_counter(counter),
        mode,
        messages_key,
    )


class ClearToolOutputs(MessagesNode):
    """See `clear_tool_outputs`, which makes it."""

    def __init__(
        self,
        keep: int,
        at_least: int,
        above: int | None,
        exclude: frozenset[str],
        marker: str,
        counter: Any,
        mode: Mode,
        messages_key: str,
    ) -> None:
        super().__init__(messages_key)
        self._keep, self._at_least, self._above = keep, at_least, above
        self._exclude, self._marker, self._counter, self.mode = exclude, marker, counter, mode
        try:
            example = self._text("tool", 1_000_000)
        except (LookupError, ValueError) as exc:
            raise ConfigurationError(
                f"marker is {marker!r}; expected text with {{name}} and {{tokens}} at most"
            ) from exc
        if counter.text(example) >= at_least:
            raise ConfigurationError(
                f"the marker takes {counter.text(example)} tokens, at_least is {at_least}: what is "
                "cleared has to become shorter"
            )

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """The turns, with old bulky results replaced."""
        turns = shown.turns
        if self._above is not None:
            every = list(turns)
            turns = iter(every)
            said = [m for turn in every for unit in turn.units for m in unit.messages]
            if self._total([*shown.fixed(), *said]) <= self._above:
                return replace(shown, turns=turns)
        return replace(shown, turns=self._cleared_turns(turns))

    def _cleared_turns(self, turns: Iterator[Turn]) -> Iterator[Turn]:
        newest = list(islice(turns, 1))
        old = self._older(newest)
        for turn in chain(newest, turns):
            units = list(turn.units)
            for number in range(len(units) - 1, -1, -1):
                unit = units[number]
                if unit.kind == "exchange":
                    made = [old(message) for message in reversed(unit.messages)]
                    units[number] = unit._replace(messages=tuple(reversed(made)))
            yield turn._replace(units=units)

    def update(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """What the model is shown, or the replaced messages, as the mode has it."""
        if self.mode == "view":
            return super().update(state, config)
        messages = self.messages_in(state)
        if self._above is not None and self._total(messages) <= self._above:
            return {}
        old = self._older(list(islice(backwards(messages, to_answer=False), 1)))
        made = [(message, old(message)) for message in reversed(messages)]
        cleared = [new for message, new in made if new is not message]
        for message in cleared:
            self.id_of(message)
        return {self.messages_key: cleared[::-1]} if cleared else {}

    def _older(self, newest: list[Turn]) -> Callable[[BaseMessage], BaseMessage]:
        """Replaces a bulky result, unless it is among the first it is given, or not read yet."""
        seen = 0
        unread = {id(message) for turn in newest for message in turn.units[-1].messages}

        def old(message: BaseMessage) -> BaseMessage:
            nonlocal seen
            if not isinstance(message, ToolMessage):
                return message
            seen += 1
            if seen <= self._keep or message.name in self._exclude or id(message) in unread:
                return message
            if message.additional_kwargs.get(SHORTENED) == "cleared":
                return message
            tokens = self._counter.message(message)
            return message if tokens < self._at_least else self._short(message, tokens)

        return old

    def _total(self, messages: Messages) -> int:
        counter = self._counter.fitted(messages)
        return sum(map(counter.message, messages))

    def _short(self, message: ToolMessage, tokens: int) -> ToolMessage:
        return message.model_copy(
            update={
                "content": self._text(message.name or "the tool", tokens),
                "artifact": None,
                "additional_kwargs": {**message.additional_kwargs, SHORTENED: "cleared"},
            }
        )

    def _text(self, name: str, tokens: int) -> str:
        return self._marker.format(name=name, tokens=tokens)

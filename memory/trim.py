"""Trimming: the part of a conversation that fits, as a valid sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final, Literal, Self

from langchain_core.messages import BaseMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig

from perdure.errors import BudgetExceeded, ConfigurationError, InvalidMessages
from perdure.memory.conversation import Messages, Turn, role
from perdure.memory.nodes import MODES, MessagesNode, Mode, Shown
from perdure.memory.options import choice, whole
from perdure.memory.shortening import shortened
from perdure.memory.tokens import Countable, TokenCounter, context_window
from perdure.memory.tokens import token_counter as counter_of
from perdure.memory.window import Measure, Strategy, Window, choose, one

End = Literal["human", "ai", "tool"]
_ENDS: Final = ("human", "ai", "tool")


def trim(
    *,
    max_tokens: float | None = None,
    max_messages: int | None = None,
    token_counter: Countable | None = None,
    strategy: Strategy = "last",
    end_on: End | Sequence[End] | None = None,
    allow_partial: bool = False,
    mode: Mode = "view",
    messages_key: str = "messages",
) -> Trim:
    """A node that keeps what fits: `trim(max_tokens=4_000)`, `trim(max_messages=20)`.

    The words are those of langchain's `trim_messages`. The result is always a valid sequence: the
    system message first (the newest, if there are several), then a human message (`include_system`
    and `start_on="human"` there); a tool call with all its results or neither. A turn stays whole,
    but for the newest, which may lose exchanges from its middle. The newest human message stays,
    and so does the last of what follows it.

    Args:
        max_tokens: Tokens of the request; from above 0 to 1.0, a share of the model's window.
        max_messages: Messages that may stay, the system message included.
        token_counter: A chat model, also with tools bound, the name of an OpenAI model, or a
            function over messages; None: an estimate. See `perdure.memory.token_counter`.
        strategy: `"last"` keeps the newest turns; `"first"` the oldest, and the newest human
            message with what follows it.
        end_on: Leave out what follows the last message of this type, or of one of these.
        allow_partial: Shorten in the middle what is too long and may not be left out; else that
            raises `BudgetExceeded`.
        mode: `"view"`: the state keeps all, the model is shown the window (`llm_input_messages`).
            `"state"`: what does not fit is removed from the state; a perdure checkpointer's
            history still has it.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: The options contradict each other.
        UnknownModel: The model's tokens or window are not known.
        BudgetExceeded: The tools alone take all the tokens; or, when it runs, what may not be left
            out takes more than is allowed.
    """
    if (max_tokens is None) == (max_messages is None):
        raise ConfigurationError(
            f"max_tokens is {max_tokens!r}, max_messages is {max_messages!r}; expected one of them"
        )
    ends = (end_on,) if isinstance(end_on, str) else tuple(end_on or ())
    for end in ends:
        choice("end_on", end, _ENDS)
    if ends and mode == "state":
        raise ConfigurationError(
            f"end_on is {end_on!r} in the mode 'state', where it would remove the newest answer; "
            "expected None, or the mode 'view'"
        )
    choice("strategy", strategy, ("last", "first"))
    choice("mode", mode, MODES)
    size: Any = max_messages if max_tokens is None else max_tokens
    if isinstance(size, float) and 0 < size <= 1:
        size = int(size * context_window(token_counter))  # type: ignore[arg-type]
    whole("max_messages" if max_tokens is None else "max_tokens", size, 1)
    counter = None if max_tokens is None else counter_of(token_counter)
    return Trim(size, counter, strategy, ends, allow_partial, mode, messages_key)


class Trim(MessagesNode):
    """See `trim`, which makes it."""

    def __init__(
        self,
        size: int,
        counter: TokenCounter | None,
        strategy: Strategy,
        ends: tuple[End, ...],
        allow_partial: bool,
        mode: Mode,
        messages_key: str,
    ) -> None:
        super().__init__(messages_key)
        self._size, self._counter, self._strategy, self._ends = size, counter, strategy, ends
        self._partial, self.mode = allow_partial, mode
        self._fixed = self._fixed_with(())

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are limited, and not messages."""
        return self._counter is not None

    def with_tools(self, tools: Sequence[Any]) -> Self:
        """The same for a request with these tools.

        Raises:
            BudgetExceeded: They alone take all the tokens.
        """
        made = copy(self)
        made._fixed = self._fixed_with(tools)
        return made

    def _fixed_with(self, tools: Sequence[Any]) -> int:
        if self._counter is None:
            return 0
        fixed = self._counter.request + self._counter.tools(tools)
        if fixed >= self._size:
            raise BudgetExceeded(
                f"the request itself takes {fixed} tokens, its tools included, {self._size} are "
                "allowed: allow more, or bind fewer tools"
            )
        return fixed

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """What fits."""
        if self._ends:
            shown = replace(shown, turns=_ending(shown.turns, self._ends))
        if self._counter is None:
            return self._within(shown, one)
        fits = self._within(shown, self._counter.message)
        turns = list(fits.turns)
        fits = replace(fits, turns=iter(turns))
        counter = self._counter.fitted([*fits.fixed(), *_messages(turns)])
        # by what its own answers took; never less, so it is a part of what fitted at first
        return fits if counter is self._counter else self._within(fits, counter.message)

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`; in a thread, since counting long messages takes long."""
        return await asyncio.to_thread(self.through, shown, state, config)

    async def aupdate(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """See `update`."""
        return await asyncio.to_thread(self.update, state, config)

    def update(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """What the model is shown, or the removals from the state, as the mode has it."""
        if self.mode == "view":
            return super().update(state, config)
        messages = self.messages_in(state)
        kept = self.through(Shown.of(messages, to_answer=False), state, config).messages()
        if not any(role(message) == "human" for message in kept):
            return {}  # nobody has asked anything yet
        return removals(messages, kept, self.messages_key)

    def _within(self, shown: Shown, measure: Measure) -> Shown:
        window = choose(shown, self._size - self._fixed, measure, self._strategy)
        if window.over <= 0:
            return replace(shown, turns=iter(window.turns))
        needed = [message for unit in window.needed for message in unit.messages]
        left = sum(map(measure, needed)) - window.over
        cut = _level(needed, left, measure) if self._partial and self.counts_tokens else None
        if cut is None:
            raise self._too_long([*shown.fixed(), *needed], window, measure)
        cuts = iter(cut)
        units = [
            unit._replace(messages=tuple(next(cuts) for _ in unit.messages))
            for unit in window.needed
        ]
        return replace(shown, turns=iter([window.turns[0]._replace(units=units)]))

    def _too_long(
        self, messages: list[BaseMessage], window: Window, measure: Measure
    ) -> BudgetExceeded:
        unit, advice = "messages", "allow more messages"
        listed = ", ".join(f"{message.type} message {measure(message)}" for message in messages)
        if self.counts_tokens:
            unit, advice = (
                "tokens",
                "allow more, clear old tool outputs, or pass allow_partial=True",
            )
            listed += f", the request itself {self._fixed}"
        return BudgetExceeded(
            f"what may not be left out takes {self._size + window.over} {unit}, {self._size} are "
            f"allowed ({listed}): {advice}"
        )


def removals(messages: Messages, kept: list[BaseMessage], key: str) -> dict[str, Any]:
    """The update that leaves in the state what is kept of its messages, or stands for one of them.

    Removals are by id, so what other nodes add at the same time stays. The order is the state's.

    Raises:
        InvalidMessages: Messages have no ids, or share one.
    """
    places = {id(message): place for place, message in enumerate(messages)}
    by_id = {message.id: place for place, message in enumerate(messages)}
    stays = {places.get(id(message), by_id.get(message.id, -1)) for message in kept}
    changed = [message for message in kept if id(message) not in places]
    gone = [message for place, message in enumerate(messages) if place not in stays]
    if not gone and not changed:
        return {}
    if None in by_id or len(by_id) < len(messages):
        raise InvalidMessages(
            f"the channel {key!r} has messages without ids of their own; give it a reducer that "
            "assigns them: perdure.memory.messages, or add_messages"
        )
    return {key: [*(RemoveMessage(id=str(message.id)) for message in gone), *changed]}


def _messages(turns: list[Turn]) -> Iterator[BaseMessage]:
    return (message for turn in turns for unit in turn.units for message in unit.messages)


def _ending(turns: Iterator[Turn], ends: tuple[End, ...]) -> Iterator[Turn]:
    """The turns, newest first, without what follows the last message of one of these types."""
    for turn in turns:
        units = list(turn.units)
        while units and role(units[-1].messages[-1]) not in ends:
            units.pop()
        if units:
            yield turn._replace(units=units)
            yield from turns


def _level(messages: list[BaseMessage], left: int, measure: Measure) -> list[BaseMessage] | None:
    """Messages that take `left` together at most: those above a common height are cut to it."""
    made = list(messages)
    stiff: set[int] = set()  # what has no text to lose
    while True:
        costs = [measure(message) for message in made]
        over = sum(costs) - left
        if over <= 0:
            return made
        soft = sorted((cost for i, cost in enumerate(costs) if i not in stiff), reverse=True)
        if not soft:
            return None
        height = _height(soft, over)
        for place, cost in enumerate(costs):
            if place not in stiff and cost > height:
                shorter = shortened(messages[place], height, measure)
                if shorter is None or measure(shorter) >= cost:
                    stiff.add(place)
                else:
                    made[place] = shorter


def _height(costs: list[int], over: int) -> int:
    """Down to which the largest costs, given first, have to go for `over` to be saved."""
    total = 0
    for count, cost in enumerate(costs, 1):
        total += cost
        height = (total - over) // count
        if count == len(costs) or height >= costs[count]:
            return max(height, 0)
    return 0

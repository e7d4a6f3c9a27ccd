"""Trimming: the part of a conversation that fits, as a valid sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any, Final, Self

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig

from perdure.errors import BudgetExceeded, ConfigurationError, InvalidMessages
from perdure.memory.conversation import Messages, Turn, role
from perdure.memory.counting import Countable, context_window, token_counter
from perdure.memory.nodes import MODES, MessagesNode, Mode
from perdure.memory.options import choice as check_choice
from perdure.memory.shortening import shortened
from perdure.memory.shown import Shown
from perdure.memory.window import Measure, Strategy, Window, choose, one

_STRATEGIES: Final = ("last", "first")


def trim(
    *,
    tokens: int | None = None,
    messages: int | None = None,
    turns: int | None = None,
    fraction: float | None = None,
    model: BaseChatModel | str | int | None = None,
    counter: Countable | None = None,
    tools: Sequence[Any] = (),
    strategy: Strategy = "last",
    mode: Mode = "view",
    truncate: bool = False,
    messages_key: str = "messages",
) -> Trim:
    """A node that keeps what fits: `trim(tokens=4_000)`.

    What it gives is always a valid sequence: the system message first (the newest, if there are
    several), then a human message; a tool call with all its results or neither; never without the
    newest human message. In the form of a view, what comes last is that human message or the
    results of tools.

    Args:
        tokens: What the request may take, its tools included.
        messages: How many messages may stay, the system message included.
        turns: How many turns stay, however long.
        fraction: What the request may take of the model's window, above 0 and up to 1.
        model: Whose window and tokens those are: a chat model, a model's name, or for a fraction
            the window's size in tokens.
        counter: What counts tokens, if not what fits the model; see `token_counter`.
        tools: The tools that are bound to the model; their schemas take tokens too.
        strategy: `"last"` keeps the newest turns; `"first"` the oldest, and the newest human
            message.
        mode: `"view"`: the state keeps all, the model is shown the window (`llm_input_messages`).
            `"state"`: what does not fit is removed from the state; a perdure checkpointer's
            history still has it. The order of the state stays: a system message that is not first
            comes first only when it is shown.
        truncate: Shorten the newest human message, or the newest results of tools, if these alone
            are too long; else that is an error.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: The options contradict each other.
        UnknownModel: The model's tokens or window are not known.
        BudgetExceeded: The tools alone take all the tokens; or, when it runs, what may not be left
            out takes more than is allowed.
    """
    given = {"tokens": tokens, "messages": messages, "turns": turns, "fraction": fraction}
    [(name, size)] = _only(given)
    if name == "fraction":
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size <= 1:
            raise ConfigurationError(f"fraction is {size!r}; expected above 0 and up to 1")
        if model is None:
            raise ConfigurationError(
                f"fraction is {size!r} of nothing: pass model=, a chat model or a window's size"
            )
        size = int(size * context_window(model))
    elif isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigurationError(f"{name} is {size!r}; expected a whole number from 1 on")
    if truncate and name in ("messages", "turns"):
        raise ConfigurationError(f"truncate=True shortens to tokens; it cannot serve {name}=")
    if strategy == "first" and name == "turns":
        raise ConfigurationError("strategy='first' cannot serve turns=; use messages= or tokens=")
    check_choice("strategy", strategy, _STRATEGIES)
    check_choice("mode", mode, MODES)
    if counter is None and not isinstance(model, int):
        counter = model
    return Trim(
        name if name in ("messages", "turns") else "tokens",
        size,
        counter=counter,
        tools=tools,
        strategy=strategy,
        mode=mode,
        truncate=truncate,
        messages_key=messages_key,
    )


def _only(given: dict[str, Any]) -> list[tuple[str, Any]]:
    chosen = [(name, size) for name, size in given.items() if size is not None]
    if len(chosen) != 1:
        named = ", ".join(f"{name}={size!r}" for name, size in chosen) or "none"
        raise ConfigurationError(
            f"one of tokens, messages, turns or fraction says how much stays; given: {named}"
        )
    return chosen


class Trim(MessagesNode):
    """See `trim`, which makes it."""

    def __init__(
        self,
        unit: str,
        size: int,
        *,
        counter: Countable | None,
        tools: Sequence[Any],
        strategy: Strategy,
        mode: Mode,
        truncate: bool,
        messages_key: str,
    ) -> None:
        super().__init__(messages_key)
        self._unit, self._size = unit, size
        self._counter = token_counter(counter)
        self._strategy, self.mode, self._truncate = strategy, mode, truncate
        self._fixed = self._fixed_with(tools)

    @property
    def counts_tokens(self) -> bool:
        """Whether what is limited are tokens, and not messages or turns."""
        return self._unit == "tokens"

    def with_tools(self, tools: Sequence[Any]) -> Self:
        """The same for a request with these tools, whatever tools it was told of before.

        Raises:
            BudgetExceeded: They alone take all the tokens.
        """
        if self._unit != "tokens":
            return self
        made = copy(self)
        made._fixed = self._fixed_with(tools)
        return made

    def _fixed_with(self, tools: Sequence[Any]) -> int:
        fixed = self._counter.request + (self._counter.tools(tools) if tools else 0)
        if self._unit == "tokens" and fixed >= self._size:
            raise BudgetExceeded(
                f"the request itself takes {fixed} tokens ({len(tools)} tools), {self._size} are "
                "allowed: allow more, or bind fewer tools"
            )
        return fixed

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """What fits."""
        if self._unit == "turns":
            return replace(shown, turns=islice(shown.turns, self._size))
        if self._unit == "messages":
            return self._within(shown, self._size, one)
        limit = self._size - self._fixed
        fits = self._within(shown, limit, self._counter.message)
        turns = list(fits.turns)
        fits = replace(fits, turns=iter(turns))
        counter = self._counter.fitted([*fits.fixed(), *_said(turns)])
        if counter is self._counter:
            return fits
        # by what its own answers took; never less, so it is a part of what fitted at first
        return self._within(fits, limit, counter.message)

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`; in a thread, for what was never counted may be long."""
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

    def _within(self, shown: Shown, limit: int, measure: Measure) -> Shown:
        window = choose(shown, limit, measure, self._strategy)
        if window.over <= 0:
            return replace(shown, turns=iter(window.turns))
        if not self._truncate:
            raise self._too_long(shown, window, measure)
        return self._shortened(shown, window, measure)

    def _shortened(self, shown: Shown, window: Window, measure: Measure) -> Shown:
        """What is needed, its longest messages cut to one length, so that all of it fits."""
        needed = [message for unit in window.needed for message in unit.messages]
        left = sum(map(measure, needed)) - window.over
        made = _level(needed, left, measure)
        if made is None:
            raise self._too_long(shown, window, measure)
        cut = {id(message): new for message, new in zip(needed, made, strict=True)}
        units = [
            unit._replace(messages=tuple(cut[id(message)] for message in unit.messages))
            for unit in window.needed
        ]
        return replace(shown, turns=iter([window.turns[0]._replace(units=units)]))

    def _too_long(self, shown: Shown, window: Window, measure: Measure) -> BudgetExceeded:
        parts = [*shown.fixed(), *(m for unit in window.needed for m in unit.messages)]
        listed = ", ".join(f"{message.type} message {measure(message)}" for message in parts)
        if self._unit == "tokens":
            listed += f", the request itself {self._fixed}"
        advice = (
            "allow more messages"
            if self._unit == "messages"
            else "allow more, clear old tool outputs, or pass truncate=True"
        )
        return BudgetExceeded(
            f"what may not be left out takes {self._size + window.over} {self._unit}, "
            f"{self._size} are allowed ({listed}): {advice}"
        )


def _said(turns: list[Turn]) -> Iterator[BaseMessage]:
    return (message for turn in turns for unit in turn.units for message in unit.messages)


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


def removals(messages: Messages, kept: list[BaseMessage], key: str) -> dict[str, Any]:
    """The update that leaves in the state what is kept of its messages, or stands for one of them.

    By id, so that what other nodes add at the same time stays. The order is that of the state.

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

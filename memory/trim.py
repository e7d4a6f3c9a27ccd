"""Trimming: the part of a conversation that fits, as a valid sequence.

A turn is in or out as a whole. Of the newest, if it alone is too long, exchanges from its middle
are left out; its human message and its last unit may not be.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Self

from langchain_core.messages import BaseMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig

from perdure.errors import BudgetExceeded, ConfigurationError
from perdure.memory.conversation import Messages, Turn, Unit, role
from perdure.memory.effects import Effect, Effects
from perdure.memory.nodes import MODES, MessagesNode, Mode, Shown, ids_of
from perdure.memory.options import choice, whole
from perdure.memory.shortening import Measure, shortened
from perdure.memory.tokens import Countable, TokenCounter, context_window
from perdure.memory.tokens import token_counter as counter_of

Strategy = Literal["last", "first"]
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
        token_counter: See `perdure.memory.token_counter`.
        strategy: `"last"` keeps the newest turns; `"first"` the oldest, and the newest human
            message with what follows it.
        end_on: Leave out what follows the last message of this type, or of one of these.
        allow_partial: Shorten in the middle what is too long and may not be left out; else that
            raises `BudgetExceeded`.
        mode: `"view"`: the state keeps all, the model is shown the window (`llm_input_messages`).
            `"state"`: what does not fit is removed from the state, and stays in history.
        messages_key: The channel of the messages.

    Raises:
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


@dataclass(eq=False, repr=False)
class Trim(MessagesNode):
    """See `trim`, which makes it."""

    size: int
    counter: TokenCounter | None
    strategy: Strategy
    ends: tuple[End, ...]
    allow_partial: bool
    mode: Mode
    messages_key: str
    tools: Sequence[Any] = ()

    def __post_init__(self) -> None:
        super().__init__(self.messages_key)
        counter = self.counter
        self._fixed = 0 if counter is None else counter.request + counter.tools(self.tools)
        if counter is not None and self._fixed >= self.size:
            raise BudgetExceeded(
                f"the request itself takes {self._fixed} tokens, its tools included, {self.size} "
                "are allowed: allow more, or bind fewer tools"
            )

    def with_tools(self, tools: Sequence[Any]) -> Self:
        """The same for a request with these tools; BudgetExceeded if they alone take all of it."""
        return replace(self, tools=tools)

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """What fits."""
        if self.ends:
            shown = replace(shown, turns=_ending(shown.turns, self.ends))
        if self.counter is None:
            return self._within(shown, one)
        fits = self._within(shown, self.counter.message)
        turns = list(fits.turns)
        counter = self.counter.fitted(replace(fits, turns=iter(turns)).messages())
        fits = replace(fits, turns=iter(turns))
        # by what its own answers took; never less, so it is a part of what fitted at first
        return fits if counter is self.counter else self._within(fits, counter.message)

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`; in a thread, since counting long messages takes long."""
        return await asyncio.to_thread(self.through, shown, state, config)

    def _update(self, state: Any, config: RunnableConfig | None) -> Effects[dict[str, Any]]:
        if self.mode == "view":
            return (yield from super()._update(state, config))
        removed = partial(self._removed, state, config)
        return (yield Effect(removed, lambda: asyncio.to_thread(removed)))  # type: ignore[no-any-return]

    def _removed(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """The removals from the state of what does not fit."""
        messages = self.messages_in(state)
        kept = self.through(Shown.of(messages, to_answer=False), state, config).messages()
        if not any(role(message) == "human" for message in kept):
            return {}  # nobody has asked anything yet
        return removals(messages, kept, self.messages_key)

    def _within(self, shown: Shown, measure: Measure) -> Shown:
        window = choose(shown, self.size - self._fixed, measure, self.strategy)
        if window.over <= 0:
            return replace(shown, turns=iter(window.turns))
        needed = [message for unit in window.needed for message in unit.messages]
        left = sum(map(measure, needed)) - window.over
        tokens = self.counter is not None
        cut = _level(needed, left, measure) if self.allow_partial and tokens else None
        if cut is None:
            what = "tokens" if tokens else "messages"
            before = [] if shown.system is None else [shown.system]
            listed = [f"{each.type} message {measure(each)}" for each in (*before, *needed)]
            raise BudgetExceeded(
                f"what may not be left out takes {self.size + window.over} {what}, {self.size} are "
                f"allowed ({', '.join(listed)}, the request itself {self._fixed}): allow more, "
                "clear old tool outputs, or count tokens with allow_partial=True"
            )
        cuts = iter(cut)
        units = [
            unit._replace(messages=tuple(next(cuts) for _ in unit.messages))
            for unit in window.needed
        ]
        return replace(shown, turns=iter([window.turns[0]._replace(units=units)]))


def removals(messages: Messages, kept: list[BaseMessage], key: str) -> dict[str, Any]:
    """The update that leaves in the state what is kept of its messages, or stands for one of them.

    Removals are by id, so what other nodes add at the same time stays; see `ids_of` for errors.
    """
    places = {id(message): place for place, message in enumerate(messages)}
    by_id = {message.id: place for place, message in enumerate(messages)}
    stays = {places.get(id(message), by_id.get(message.id, -1)) for message in kept}
    changed = [message for message in kept if id(message) not in places]
    if not changed and len(stays) == len(messages):
        return {}
    ids = ids_of(messages, key)
    removed = [RemoveMessage(id=uid) for place, uid in enumerate(ids) if place not in stays]
    return {key: [*removed, *changed]}


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
        if sum(costs) <= left:
            return made

        def total(height: int) -> int:
            return sum(c if i in stiff else min(c, height) for i, c in enumerate(costs))  # noqa: B023

        height = bisect_right(range(left + 1), left, key=total) - 1
        if height < 0:
            return None
        for place, cost in enumerate(costs):
            if place not in stiff and cost > height:
                shorter = shortened(messages[place], height, measure)
                if shorter is None or measure(shorter) >= cost:
                    stiff.add(place)
                else:
                    made[place] = shorter


# -- what fits


def one(message: BaseMessage) -> int:
    """What a message takes, when messages are counted."""
    return 1


class Window(NamedTuple):
    """A choice among the turns of a conversation."""

    turns: list[Turn]  # that fit, newest first
    needed: list[Unit]  # that may not be left out: the newest human message, and the last unit
    over: int  # by how much these and the messages before the turns pass the limit


def choose(shown: Shown, limit: int, measure: Measure, strategy: Strategy = "last") -> Window:
    """As much as fits of the newest turns (`"last"`), or of the oldest beside the newest."""
    left = limit - (0 if shown.system is None else measure(shown.system))
    newest = next(shown.turns, None)
    if newest is None:
        return Window([], [], max(0, -left))
    first, *middle = newest.units
    needed = [first, middle.pop()] if middle else [first]
    left -= _cost(needed, measure)
    if left < 0:
        return Window([Turn(needed, newest.messages)], needed, -left)
    parts = [Turn([unit], ()) for unit in middle]
    if strategy == "last":
        kept, left = _taken(reversed(parts), left, measure)
        older, left = _taken(shown.turns, left, measure)
        kept.reverse()
    else:
        older, left = _taken(reversed([*shown.turns]), left, measure)
        kept, left = _taken(parts, left, measure)
        older.reverse()
    units = [first, *(part.units[0] for part in kept), *needed[1:]]
    return Window([Turn(units, newest.messages), *older], needed, 0)


def _taken(turns: Iterable[Turn], left: int, measure: Measure) -> tuple[list[Turn], int]:
    """The first turns that fit, and what is left then: less than nothing if one did not fit."""
    taken: list[Turn] = []
    for turn in turns if left >= 0 else ():
        left -= _cost(turn.units, measure)
        if left < 0:
            break
        taken.append(turn)
    return taken, left


def _cost(units: list[Unit], measure: Measure) -> int:
    if measure is one:
        return sum(len(unit.messages) for unit in units)
    total = 0
    for unit in units:
        for message in unit.messages:
            total += measure(message)
    return total

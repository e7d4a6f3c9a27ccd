"""Trimming: the part of a conversation that fits, as a valid sequence."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate, islice
from math import ceil
from typing import Any, Final, Literal, NamedTuple, Self

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import RunnableConfig

from perdure.effects import computed
from perdure.errors import BudgetExceeded, ConfigurationError
from perdure.memory.conversation import SHORTENED, Messages, Turn, Unit, role
from perdure.memory.counting_functions import find_largest
from perdure.memory.left_out import state_left_out
from perdure.memory.message_updates import merge_duplicates, update_to
from perdure.memory.nodes import MessagesNode, Shown, messages_in
from perdure.memory.options import choice, whole
from perdure.memory.quotation import middle_out
from perdure.memory.tokens import Countable, TokenCounter, context_window
from perdure.memory.tokens import token_counter as counter_of
from perdure.memory.tool_calls import requires_result_block

Strategy = Literal["last", "first"]
Start = Literal["human"] | None
MessageType = Literal["human", "ai", "tool"] | type[BaseMessage]
Measure = Callable[[BaseMessage], float]
_CLASSES: Final = {
    "human": HumanMessage,
    "ai": AIMessage,
    "tool": ToolMessage,
    "system": SystemMessage,
}
_PARTIAL: Final = "set allow_partial=True"
_SHORTENED: Final = (
    "send smaller files, tool calls or system messages; texts have been shortened already"
)
_STARTS: Final = "one of 'human', None, or the class HumanMessage"
_ENDS: Final = "'human', 'ai', 'tool', a class of messages, or a list of them"


class Trim(MessagesNode):
    """A node that keeps what fits: `trim(4_000)`.

    The parameters are those of langchain's `trim_messages`. In a graph, what does not fit leaves
    the state and stays in history; in a `view` it is not shown. The rest is a valid sequence. The
    newest human message and the last after it stay, and so do all system messages.

    Args:
        max_tokens: Tokens of the request; from above 0 to 1.0, a share of the model's window.
        token_counter: See `perdure.memory.token_counter`; `len` counts messages.
        strategy: `"last"` keeps the newest turns; `"first"` the oldest, and the newest.
        start_on: With `"human"`, or `HumanMessage`, turns stay whole. With None, or if AI messages
            are among the types, the oldest turn that is kept may lose its beginning.
        include_system: Whether the system messages are shown.
        end_on: Show nothing after the last message of these types; the state keeps it.
        allow_partial: Shorten what is too long and has to stay; else that is a `BudgetExceeded`.
    """

    def __init__(
        self,
        max_tokens: float,
        *,
        token_counter: Countable | None = None,
        strategy: Strategy = "last",
        start_on: MessageType | Sequence[MessageType] | None = "human",
        end_on: MessageType | Sequence[MessageType] | None = None,
        include_system: bool = True,
        allow_partial: bool = False,
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        choice("strategy", strategy, ("last", "first"))
        starts = _types_of("start_on", start_on, _STARTS)
        if starts and "human" not in starts:
            raise ConfigurationError(f"start_on is {start_on!r:.80}; expected {_STARTS}")
        ends = _types_of("end_on", end_on, _ENDS)
        if end_on == "system":
            raise ConfigurationError(f"end_on is 'system'; expected {_ENDS}")
        size: Any = max_tokens
        if isinstance(size, float) and 0 < size <= 1:
            size = int(size * context_window(token_counter))  # type: ignore[arg-type]
        whole("max_tokens", size, 1)
        self.size: int = size
        self.counter = counter_of(token_counter)
        self._states_left_out = True
        self._tools = self._prompt = 0  # tokens of what a request has besides messages
        self.strategy, self.ends = strategy, ends
        self.start_on: Start = "human" if starts in ({"human"}, {"human", "system"}) else None
        self.include_system, self.allow_partial = include_system, allow_partial

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return the same node for requests with these tools and this system prompt."""
        made, counter = copy(self), self.counter
        made._tools, made._prompt = counter.tools(tools), counter.prompt(system_prompt)
        return made

    def for_model(self, model: str | None) -> Self:
        """Return the same node for requests to this model."""
        if self.counter.model is not None or model is None:
            return self
        made = copy(self)
        made.counter = self.counter.for_model(model)
        return made

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """What fits."""
        return self._fit(replace(shown, turns=_ending(shown.turns, self.ends)))

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`; in a thread, since counting long messages takes long."""
        return await asyncio.to_thread(self.through, shown, state, config)

    async def _update(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        messages = messages_in(state, self.messages_key)

        def build_update() -> dict[str, Any]:
            node = copy(self)
            node._states_left_out = False  # what was said stays as it is in the state
            fits = node._fit(Shown.of(messages, purpose="state"))
            kept = [each for turn in fits.turns for unit in turn.units for each in unit]
            if self.include_system:
                kept += [message for message in messages if role(message) == "system"]
            update = update_to(_in_state_order(kept, messages), messages, self.messages_key)
            return {self.messages_key: update} if update else {}

        return await computed(build_update)

    def _fit(self, shown: Shown) -> Shown:
        if not self.include_system:
            shown = replace(shown, system=None)
        return self._fit_scaled(shown) if self.counter.adds_up else self._fit_whole(shown)

    def _fit_scaled(self, shown: Shown) -> Shown:
        """Return what fits, by the counter as it is scaled to the answers that are shown."""
        counter = self.counter
        fits = self._within(shown, counter)
        while True:
            turns = list(fits.turns)
            fits = replace(fits, turns=iter(turns))
            fitted = self.counter.fitted(replace(fits, turns=iter(turns)).messages())
            if fitted.scale <= counter.scale:
                return fits
            # by what its own answers took: a larger scale, so it is a part of what fitted before
            counter = fitted
            fits = self._within(fits, counter)

    def _fit_whole(self, shown: Shown) -> Shown:
        """Return what fits, by a function that counts whole requests."""
        turns = list(shown.turns)
        given = (message for turn in turns for unit in turn.units for message in unit)
        costs: dict[int, float | None] = dict.fromkeys(map(id, given))

        def measure(message: BaseMessage) -> float:
            cost = costs.get(id(message))
            if cost is None:
                cost = self.counter.measure(message)
                if id(message) in costs:
                    costs[id(message)] = cost
            return cost

        def pack(reserve: float) -> tuple[Shown, list[Turn]]:
            whole = replace(shown, turns=iter(turns))
            fits = self._within(whole, self.counter, reserve, measure)
            return fits, list(fits.turns)

        def excess(packed: tuple[Shown, list[Turn]]) -> float:
            messages = replace(packed[0], turns=iter(packed[1])).messages()
            return self.counter.total(messages, self._tools) + self._prompt - self.size

        if excess((shown, turns)) <= 0:
            return replace(shown, turns=iter(turns))
        fits, kept = find_largest(pack, excess, self.counter.fixed_part, self.size)
        return replace(fits, turns=iter(kept))

    def _within(
        self,
        shown: Shown,
        counter: TokenCounter,
        reserve: float = 0,
        measure: Measure | None = None,
    ) -> Shown:
        measure = measure or counter.measure
        fixed = (counter.request_with(self._tools) + self._prompt) * counter.scale + reserve
        options = self.strategy, self.start_on, self._states_left_out
        window = choose(shown, self.size - fixed, measure, *options)
        shortens_for_line = self.allow_partial and self._states_left_out and window.left_out > 0
        if window.over <= 0 and not shortens_for_line:
            return replace(shown, turns=iter(window.turns))
        needed = [message for unit in window.needed for message in unit]
        left = sum(map(measure, needed)) - max(0, window.over)
        cut = None
        if shortens_for_line:
            line = measure(state_left_out(needed[0], window.left_out)) - measure(needed[0])
            cut = _levelled(needed, left - line, measure)
            cut = cut and [state_left_out(cut[0], window.left_out), *cut[1:]]
        if cut is None and window.over <= 0:
            return replace(shown, turns=iter(window.turns))
        if cut is None and self.allow_partial:
            cut = _levelled(needed, left, measure)
        if cut is None:
            parts = [*system_costs(shown, measure)]
            parts += [(f"{each.type} message", measure(each)) for each in needed]
            parts.append(("the request itself, its tools included,", fixed))
            raise too_long(self.size, parts, _SHORTENED if self.allow_partial else _PARTIAL)
        cuts = iter(cut)
        units = [tuple(islice(cuts, len(unit))) for unit in window.needed]
        newest, *older = window.turns
        return replace(shown, turns=iter([newest._replace(units=units), *older]))


trim = Trim


def too_long(size: int, parts: Sequence[tuple[str, float]], remedy: str) -> BudgetExceeded:
    """Return the error for parts that may not be left out and take so many tokens each."""
    listed = ", ".join(f"{name} {ceil(tokens)}" for name, tokens in parts)
    return BudgetExceeded(
        f"what may not be left out takes {ceil(sum(tokens for _, tokens in parts))}, max_tokens is "
        f"{size} ({listed}): allow more, bind fewer tools, or {remedy}"
    )


def _types_of(name: str, value: Any, expected: str) -> frozenset[str]:
    """Return the types of messages that an option names, by type or by class, alone or in a list.

    The base class of all messages means every type. Chunks of a stream have the type of the whole.
    """
    several = isinstance(value, list | tuple | set | frozenset)
    types = [_types_named(each) for each in (value if several else [value] if value else [])]
    if not all(types):
        raise ConfigurationError(f"{name} is {value!r:.80}; expected {expected}")
    return frozenset().union(*types)


def _types_named(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value.removesuffix("MessageChunk").lower()}.intersection(_CLASSES)
    if value is BaseMessage:
        return set(_CLASSES)
    kinds = _CLASSES.items() if isinstance(value, type) else ()
    return {kind for kind, base in kinds if issubclass(value, base)}


def system_costs(shown: Shown, measure: Measure) -> Iterator[tuple[str, float]]:
    """Yield a name and the number of tokens for each system message."""
    if shown.system is None:
        return
    total = measure(shown.system)
    if len(shown.system_parts) < 2:
        yield "system message", total
        return
    for part in shown.system_parts:
        cost = min(total, measure(part))
        total -= cost
        begin = " ".join(part.text.split())[:60]
        yield f'system message "{begin}"', cost
    if total:
        yield "additions to the system messages", total


def _in_state_order(kept: list[BaseMessage], messages: Messages) -> list[BaseMessage]:
    """Return the kept messages in the order of the state; copies take the place of originals."""
    present, stays = set(map(id, messages)), set(map(id, kept))
    copies = {message.id: message for message in kept if id(message) not in present}
    placed = (m if id(m) in stays else copies.get(m.id) for m in merge_duplicates(messages))
    return [message for message in placed if message is not None]


def _ending(turns: Iterator[Turn], ends: frozenset[str]) -> Iterator[Turn]:
    """The turns, newest first, without what follows the last message of one of these types."""
    for turn in turns if ends else ():
        units = list(turn.units)
        while units and role(units[-1][-1]) not in ends:
            units.pop()
        if units:
            yield turn._replace(units=units)
            break
    yield from turns


class Window(NamedTuple):
    """A choice among the turns of a conversation."""

    turns: list[Turn]  # that fit, newest first
    needed: list[Unit]  # that may not be left out: the newest human message, and the last unit
    over: float  # by how much these and the messages before the turns pass the limit
    left_out: int = 0  # how many steps of the newest turn are left out without a line that says so


def choose(
    shown: Shown,
    limit: float,
    measure: Measure,
    strategy: Strategy = "last",
    start_on: Start = "human",
    states_left_out: bool = True,
) -> Window:
    """Choose as much as fits of the newest turns (`"last"`), or of the oldest beside the newest.

    If steps of the newest turn are left out, a line in its question says so (`states_left_out`).
    """
    left = limit - (0 if shown.system is None else measure(shown.system))
    newest = next(shown.turns, None)
    if newest is None:
        return Window([], [], max(0, -left))
    begin, middle = newest.units[:1], newest.units[1:]
    if middle and len(begin[0]) > 1 and role(begin[0][0]) != "human":
        begin, middle = [], newest.units[:]  # an exchange is not what was asked
    needed = [*begin, middle.pop()] if middle else begin
    left -= _cost(needed, measure)
    if left < 0:
        left_out = len(middle) if _has_question(begin) else 0
        return Window([Turn(needed, newest.messages)], needed, -left, left_out)
    parts, older, room = [Turn([unit], ()) for unit in middle], list[Turn](), left
    if strategy == "first":
        older, left = _taken(reversed([*shown.turns]), left, measure)
        room -= sum(_cost(turn.units, measure) for turn in older)
    kept, left = _taken(parts if strategy == "first" else reversed(parts), left, measure)
    stated, left_out = begin, len(parts) - len(kept)
    if states_left_out and left_out:
        stated, kept = _state_left_out(begin, kept, len(parts), room, measure)
        left_out = left_out if stated is begin and _has_question(begin) else 0
    if strategy == "first":
        older.reverse()
    else:
        older, left = _taken(shown.turns, left, measure, start_on)
        kept.reverse()
    units = [*stated, *(part.units[0] for part in kept), *needed[len(begin) :]]
    return Window([Turn(units, newest.messages), *older], needed, 0, left_out)


def _state_left_out(
    begin: list[Unit], kept: list[Turn], count: int, room: float, measure: Measure
) -> tuple[list[Unit], list[Turn]]:
    """Return the beginning of a turn with the line, and the kept steps that fit beside it.

    `kept` are those of `count` steps that fit into `room` without the line, in the order in which
    they were chosen. If there is no room for the line, the beginning is returned as it is.
    """
    question = begin[0][0] if _has_question(begin) else None
    before = 0 if question is None else measure(question)
    for length in range(len(kept), -1, -1):
        spare = room - sum(_cost(part.units, measure) for part in kept[:length])
        line = state_left_out(question, count - length)
        if measure(line) - before <= spare:
            rest = begin if question is None else begin[1:]
            return [(line,), *rest], kept[:length]
    return begin, kept


def _has_question(units: list[Unit]) -> bool:
    return bool(units) and role(units[0][0]) == "human"


def _taken(
    turns: Iterable[Turn], left: float, measure: Measure, start_on: Start = "human"
) -> tuple[list[Turn], float]:
    """The first turns that fit, and what is left then: less than nothing if one did not fit."""
    taken: list[Turn] = []
    for turn in turns if left >= 0 else ():
        cost = _cost(turn.units, measure)
        if cost > left:
            if start_on is None:
                costs = accumulate(_cost([unit], measure) for unit in reversed(turn.units))
                end = bisect_right(list(costs), left)
                taken += [turn._replace(units=turn.units[-end:])] if end else []
            return taken, -1
        left -= cost
        taken.append(turn)
    return taken, left


def _cost(units: list[Unit], measure: Measure) -> float:
    return sum(measure(message) for unit in units for message in unit)


def _levelled(
    messages: list[BaseMessage], left: float, measure: Measure, stiff: frozenset[int] = frozenset()
) -> list[BaseMessage] | None:
    """Messages that take `left` together: each that takes more than its share is cut if it can."""
    made, room = list(messages), left
    places = sorted(range(len(made)), key=lambda place: (place not in stiff, measure(made[place])))
    for done, place in enumerate(places):
        share = room // (len(places) - done)
        if measure(made[place]) > share and place not in stiff:
            shorter = _shortened(made[place], share, measure)
            if shorter is None:
                return _levelled(messages, left, measure, stiff | {place})
            made[place] = shorter
        room -= measure(made[place])
    return made if room >= 0 else None


def _shortened(message: BaseMessage, limit: float, measure: Measure) -> BaseMessage | None:
    """A copy without the middle of its longest text; None if no text is long enough."""
    if requires_result_block(message):
        return None
    content: Any = message.content
    blocks: list[Any] = [content] if isinstance(content, str) else list(content)
    longest = max(range(len(blocks)), key=lambda place: len(_text(blocks[place])), default=0)
    text = _text(blocks[longest]) if blocks else ""
    kwargs = {**message.additional_kwargs, SHORTENED: "cut"}

    def cut(keep: int) -> BaseMessage:
        made: Any = middle_out(text, keep)
        if not isinstance(content, str):
            block = made if isinstance(blocks[longest], str) else {**blocks[longest], "text": made}
            made = [*blocks[:longest], block, *blocks[longest + 1 :]]
        return message.model_copy(update={"content": made, "additional_kwargs": kwargs})

    keep = bisect_right(range(len(text)), limit, key=lambda keep: measure(cut(keep))) - 1
    return cut(keep) if keep >= 0 else None


def _text(block: Any) -> str:
    text = block if isinstance(block, str) else block.get("text")
    return text if isinstance(text, str) else ""

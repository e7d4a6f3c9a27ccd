"""Trim a conversation to a budget, so that a valid sequence of messages remains."""

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
from perdure.memory.left_out import add_left_out_line
from perdure.memory.message_updates import build_messages_update, merge_duplicates
from perdure.memory.nodes import MessagesNode, ModelInput, read_messages
from perdure.memory.options import check_choice, check_whole_number
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
# advice at the end of a BudgetExceeded, without and with allow_partial
_ALLOW_PARTIAL: Final = "set allow_partial=True"
_SEND_LESS: Final = (
    "send smaller files, tool calls or system messages; texts have been shortened already"
)
# values that start_on and end_on accept, as their error messages list them
_EXPECTED_STARTS: Final = "one of 'human', None, or the class HumanMessage"
_EXPECTED_ENDS: Final = "'human', 'ai', 'tool', a class of messages, or a list of them"


class Trim(MessagesNode):
    """A node that keeps what fits: `trim(4_000)`.

    The parameters are those of langchain's `trim_messages`. In a graph, what does not fit leaves
    the state and stays in history; in a `view` it is not shown. The rest is a valid sequence. The
    newest human message and the last after it stay, and so do all system messages.

    Args:
        max_tokens: The maximum number of tokens of the request. A float above 0 and up to 1.0 is a
            share of the model's window.
        token_counter: The counter of tokens, see `perdure.memory.token_counter`. `len` counts
            messages.
        strategy: The turns to keep. `"last"` keeps the newest turns. `"first"` keeps the oldest
            turns and the newest turn.
        start_on: The type of the first message. With `"human"` or `HumanMessage`, turns are kept or
            removed as a whole. With None, or if AI messages are among the types, the oldest turn
            that is kept may lose its beginning.
        include_system: Whether the system messages are shown.
        end_on: The types of the last message to show. Later messages are not shown, and a state
            keeps them.
        allow_partial: Whether to shorten messages that must be included and are too long. Otherwise
            `BudgetExceeded` is raised.
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
        check_choice("strategy", strategy, ("last", "first"))
        starts = _read_types("start_on", start_on, _EXPECTED_STARTS)
        if starts and "human" not in starts:
            raise ConfigurationError(f"start_on is {start_on!r:.80}; expected {_EXPECTED_STARTS}")
        ends = _read_types("end_on", end_on, _EXPECTED_ENDS)
        if end_on == "system":
            raise ConfigurationError(f"end_on is 'system'; expected {_EXPECTED_ENDS}")
        size: Any = max_tokens
        if isinstance(size, float) and 0 < size <= 1:
            size = int(size * context_window(token_counter))  # type: ignore[arg-type]
        check_whole_number("max_tokens", size, 1)
        self.size: int = size
        self.counter = counter_of(token_counter)
        self._adds_left_out_line = True
        self._tools = self._prompt = 0  # tokens of the tools, and of the separate system prompt
        self.strategy, self.ends = strategy, ends
        self.start_on: Start = "human" if starts in ({"human"}, {"human", "system"}) else None
        self.include_system, self.allow_partial = include_system, allow_partial

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return a copy of this node for requests with these tools and this system prompt."""
        made, counter = copy(self), self.counter
        made._tools, made._prompt = (
            counter.count_tools(tools),
            counter.count_system_prompt(system_prompt),
        )
        return made

    def for_model(self, model: str | None) -> Self:
        """Return this node, or a copy of it, for requests to this model."""
        if self.counter.model is not None or model is None:
            return self
        made = copy(self)
        made.counter = self.counter.for_model(model)
        return made

    def transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Return the part of `model_input` that fits into the budget."""
        return self._fit(replace(model_input, turns=_cut_end(model_input.turns, self.ends)))

    async def atransform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Run `through` in an OS thread, because counting long messages takes long."""
        return await asyncio.to_thread(self.transform_input, model_input, state, config)

    async def _build_update(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        messages = read_messages(state, self.messages_key)

        def build_update() -> dict[str, Any]:
            node = copy(self)
            node._adds_left_out_line = False  # the messages in the state are not changed
            fits = node._fit(ModelInput.from_messages(messages, purpose="state"))
            kept = [each for turn in fits.turns for unit in turn.units for each in unit]
            if self.include_system:
                kept += [message for message in messages if role(message) == "system"]
            update = build_messages_update(
                _sort_as_in_state(kept, messages), messages, self.messages_key
            )
            return {self.messages_key: update} if update else {}

        return await computed(build_update)

    def _fit(self, model_input: ModelInput) -> ModelInput:
        if not self.include_system:
            model_input = replace(model_input, system=None)
        return (
            self._fit_scaled(model_input)
            if self.counter.is_additive
            else self._fit_whole(model_input)
        )

    def _fit_scaled(self, model_input: ModelInput) -> ModelInput:
        """Return the part that fits if estimates are scaled by the usage of the shown answers."""
        counter = self.counter
        fits = self._trim_to_budget(model_input, counter)
        while True:
            turns = list(fits.turns)
            fits = replace(fits, turns=iter(turns))
            fitted = self.counter.scale_to_usage(replace(fits, turns=iter(turns)).to_messages())
            if fitted.scale <= counter.scale:
                return fits
            # a larger scale follows from the remaining answers, so only part of the result fits
            counter = fitted
            fits = self._trim_to_budget(fits, counter)

    def _fit_whole(self, model_input: ModelInput) -> ModelInput:
        """Return the part that fits, with a function that counts whole requests."""
        turns = list(model_input.turns)
        messages_of_turns = (message for turn in turns for unit in turn.units for message in unit)
        costs: dict[int, float | None] = dict.fromkeys(map(id, messages_of_turns))

        def measure(message: BaseMessage) -> float:
            cost = costs.get(id(message))
            if cost is None:
                cost = self.counter.message_counter(message)
                if id(message) in costs:
                    costs[id(message)] = cost
            return cost

        def pack(reserve: float) -> tuple[ModelInput, list[Turn]]:
            whole = replace(model_input, turns=iter(turns))
            fits = self._trim_to_budget(whole, self.counter, reserve, measure)
            return fits, list(fits.turns)

        def excess(packed: tuple[ModelInput, list[Turn]]) -> float:
            messages = replace(packed[0], turns=iter(packed[1])).to_messages()
            return self.counter.count_request(messages, self._tools) + self._prompt - self.size

        if excess((model_input, turns)) <= 0:
            return replace(model_input, turns=iter(turns))
        fits, kept = find_largest(pack, excess, self.counter.fixed_tokens, self.size)
        return replace(fits, turns=iter(kept))

    def _trim_to_budget(
        self,
        model_input: ModelInput,
        counter: TokenCounter,
        reserve: float = 0,
        measure: Measure | None = None,
    ) -> ModelInput:
        """Return the part that fits if `reserve` tokens of the budget are not used.

        `measure` returns the tokens of a message, and is `counter.measure` by default.
        """
        measure = measure or counter.message_counter
        fixed = (counter.count_fixed_tokens(self._tools) + self._prompt) * counter.scale + reserve
        options = self.strategy, self.start_on, self._adds_left_out_line
        window = select_turns(model_input, self.size - fixed, measure, *options)
        shortens_for_line = self.allow_partial and self._adds_left_out_line and window.left_out > 0
        if window.over <= 0 and not shortens_for_line:
            return replace(model_input, turns=iter(window.turns))
        needed = [message for unit in window.needed for message in unit]
        left = sum(map(measure, needed)) - max(0, window.over)
        cut = None
        if shortens_for_line:
            line = measure(add_left_out_line(needed[0], window.left_out)) - measure(needed[0])
            cut = _shorten_to_fit(needed, left - line, measure)
            cut = cut and [add_left_out_line(cut[0], window.left_out), *cut[1:]]
        if cut is None and window.over <= 0:
            return replace(model_input, turns=iter(window.turns))
        if cut is None and self.allow_partial:
            cut = _shorten_to_fit(needed, left, measure)
        if cut is None:
            parts = [*iter_system_costs(model_input, measure)]
            parts += [(f"{each.type} message", measure(each)) for each in needed]
            parts.append(("the request itself, its tools included,", fixed))
            raise build_budget_error(
                self.size, parts, _SEND_LESS if self.allow_partial else _ALLOW_PARTIAL
            )
        cuts = iter(cut)
        units = [tuple(islice(cuts, len(unit))) for unit in window.needed]
        newest, *older = window.turns
        return replace(model_input, turns=iter([newest._replace(units=units), *older]))


trim = Trim


def build_budget_error(
    size: int, parts: Sequence[tuple[str, float]], remedy: str
) -> BudgetExceeded:
    """Return the error for parts that must be included and exceed the budget `size`.

    `parts` has a name and a number of tokens for each part. `remedy` is advice to the user.
    """
    listed = ", ".join(f"{name} {ceil(tokens)}" for name, tokens in parts)
    total = ceil(sum(tokens for _, tokens in parts))
    return BudgetExceeded(
        f"the parts that may not be left out take {total}, but max_tokens is {size} ({listed}); "
        f"raise max_tokens, bind fewer tools, or {remedy}"
    )


def _read_types(name: str, value: Any, expected: str) -> frozenset[str]:
    """Return the message types in the value of an option.

    The value is a type, a message class, or a list of them. `BaseMessage` means all types. A chunk
    class has the type of its message class.
    """
    several = isinstance(value, list | tuple | set | frozenset)
    types = [_read_type(each) for each in (value if several else [value] if value else [])]
    if not all(types):
        raise ConfigurationError(f"{name} is {value!r:.80}; expected {expected}")
    return frozenset().union(*types)


def _read_type(value: Any) -> set[str]:
    """Return the message types that one name or class means, or an empty set if it means none."""
    if isinstance(value, str):
        return {value.removesuffix("MessageChunk").lower()}.intersection(_CLASSES)
    if value is BaseMessage:
        return set(_CLASSES)
    kinds = _CLASSES.items() if isinstance(value, type) else ()
    return {kind for kind, base in kinds if issubclass(value, base)}


def iter_system_costs(model_input: ModelInput, measure: Measure) -> Iterator[tuple[str, float]]:
    """Yield a name and the number of tokens for each system message."""
    if model_input.system is None:
        return
    total = measure(model_input.system)
    if len(model_input.system_parts) < 2:
        yield "system message", total
        return
    for part in model_input.system_parts:
        cost = min(total, measure(part))
        total -= cost
        begin = " ".join(part.text.split())[:60]
        yield f'system message "{begin}"', cost
    if total:
        yield "additions to the system messages", total


def _sort_as_in_state(kept: list[BaseMessage], messages: Messages) -> list[BaseMessage]:
    """Return the kept messages in the order of the state.

    A changed copy has the position of its original.
    """
    present, kept_ids = set(map(id, messages)), set(map(id, kept))
    copies = {message.id: message for message in kept if id(message) not in present}
    placed = (m if id(m) in kept_ids else copies.get(m.id) for m in merge_duplicates(messages))
    return [message for message in placed if message is not None]


def _cut_end(turns: Iterator[Turn], ends: frozenset[str]) -> Iterator[Turn]:
    """Yield the turns, newest first, without the messages after the last message of these types.

    If no types are given, all turns are yielded unchanged.
    """
    for turn in turns if ends else ():
        units = list(turn.units)
        while units and role(units[-1][-1]) not in ends:
            units.pop()
        if units:
            yield turn._replace(units=units)
            break
    yield from turns


class Window(NamedTuple):
    """A selection of the turns of a conversation.

    Attributes:
        turns: The turns that fit, newest first.
        needed: The units that must be included, which are the newest human message and the last
            unit after it.
        over: The number of tokens by which these units and the system message exceed the limit.
        left_out: The number of steps of the newest turn that are left out without a line that says
            so.
    """

    turns: list[Turn]
    needed: list[Unit]
    over: float
    left_out: int = 0


def select_turns(
    model_input: ModelInput,
    limit: float,
    measure: Measure,
    strategy: Strategy = "last",
    start_on: Start = "human",
    adds_left_out_line: bool = True,
) -> Window:
    """Return a selection of turns that fits into `limit`.

    With the strategy `"last"`, the newest turns are selected. With `"first"`, the newest turn and
    the oldest turns are selected. With `adds_left_out_line`, a line in the question of the newest
    turn says how many steps of the turn are left out, if any are.
    """
    left = limit - (0 if model_input.system is None else measure(model_input.system))
    newest = next(model_input.turns, None)
    if newest is None:
        return Window([], [], max(0, -left))
    begin, middle = newest.units[:1], newest.units[1:]
    if middle and len(begin[0]) > 1 and role(begin[0][0]) != "human":
        begin, middle = [], newest.units[:]  # the turn begins with an exchange, not a question
    needed = [*begin, middle.pop()] if middle else begin
    left -= _cost(needed, measure)
    if left < 0:
        left_out = len(middle) if _has_question(begin) else 0
        return Window([Turn(needed, newest.messages)], needed, -left, left_out)
    parts, older, room = [Turn([unit], ()) for unit in middle], list[Turn](), left
    if strategy == "first":
        older, left = _take_fitting(reversed([*model_input.turns]), left, measure)
        room -= sum(_cost(turn.units, measure) for turn in older)
    kept, left = _take_fitting(parts if strategy == "first" else reversed(parts), left, measure)
    stated, left_out = begin, len(parts) - len(kept)
    if adds_left_out_line and left_out:
        stated, kept = _fit_left_out_line(begin, kept, len(parts), room, measure)
        left_out = left_out if stated is begin and _has_question(begin) else 0
    if strategy == "first":
        older.reverse()
    else:
        older, left = _take_fitting(model_input.turns, left, measure, start_on)
        kept.reverse()
    units = [*stated, *(part.units[0] for part in kept), *needed[len(begin) :]]
    return Window([Turn(units, newest.messages), *older], needed, 0, left_out)


def _fit_left_out_line(
    begin: list[Unit], kept: list[Turn], count: int, room: float, measure: Measure
) -> tuple[list[Unit], list[Turn]]:
    """Return the beginning of a turn with the line about left-out steps, and the steps to keep.

    Args:
        begin: The units at the beginning of the turn, which contain the question if there is one.
        kept: The steps that fit without the line, in the order of their selection.
        count: The number of all steps in the middle of the turn.
        room: The number of tokens for the line and the kept steps.
        measure: Returns the number of tokens of a message.

    If there is no room for the line, `begin` and `kept` are returned unchanged.
    """
    question = begin[0][0] if _has_question(begin) else None
    before = 0 if question is None else measure(question)
    for length in range(len(kept), -1, -1):
        spare = room - sum(_cost(part.units, measure) for part in kept[:length])
        line = add_left_out_line(question, count - length)
        if measure(line) - before <= spare:
            rest = begin if question is None else begin[1:]
            return [(line,), *rest], kept[:length]
    return begin, kept


def _has_question(units: list[Unit]) -> bool:
    return bool(units) and role(units[0][0]) == "human"


def _take_fitting(
    turns: Iterable[Turn], left: float, measure: Measure, start_on: Start = "human"
) -> tuple[list[Turn], float]:
    """Return the first turns that fit into `left` tokens, and the number of unused tokens.

    The number is negative if a turn did not fit.
    """
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


def _shorten_to_fit(
    messages: list[BaseMessage], left: float, measure: Measure, stiff: frozenset[int] = frozenset()
) -> list[BaseMessage] | None:
    """Return the messages, shortened to `left` tokens in total, or None if that is impossible.

    Each message that takes more than an equal share is shortened. `stiff` are the positions of
    messages that cannot be shortened.
    """
    made, room = list(messages), left
    places = sorted(range(len(made)), key=lambda place: (place not in stiff, measure(made[place])))
    for done, place in enumerate(places):
        share = room // (len(places) - done)
        if measure(made[place]) > share and place not in stiff:
            shorter = _shorten_message(made[place], share, measure)
            if shorter is None:
                return _shorten_to_fit(messages, left, measure, stiff | {place})
            made[place] = shorter
        room -= measure(made[place])
    return made if room >= 0 else None


def _shorten_message(message: BaseMessage, limit: float, measure: Measure) -> BaseMessage | None:
    """Return a copy of a message without the middle of its longest text.

    None is returned if the message cannot be shortened to `limit` tokens.
    """
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

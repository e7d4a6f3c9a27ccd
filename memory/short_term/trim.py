"""Trim a conversation to a token budget.

A trimmed conversation is still a valid sequence of messages for model providers.
"""

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

from perdure.effects import build_effect_that_calls_function_in_thread
from perdure.errors import BudgetExceeded, ConfigurationError
from perdure.memory.conversation import SHORTENED, Messages, Turn, Unit, get_role
from perdure.memory.nodes import MessagesNode, ModelInput, read_messages
from perdure.memory.options import check_choice, check_whole_number
from perdure.memory.quotation import cut_middle
from perdure.memory.short_term.counting_functions import (
    find_largest_message_selection_within_budget,
)
from perdure.memory.short_term.message_updates import (
    build_update_from_current_to_target_messages,
    merge_duplicate_messages,
)
from perdure.memory.short_term.omitted_steps import add_omitted_steps_line
from perdure.memory.short_term.tokens import Countable, TokenCounter, context_window
from perdure.memory.short_term.tokens import token_counter as counter_of
from perdure.memory.tool_calls import is_tool_result_not_allowed_as_plain_text

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
# Advice appended to the message of a BudgetExceeded error. `_ALLOW_PARTIAL` is used if the option
# `allow_partial` is False, and `_SEND_LESS` if it is True.
_ALLOW_PARTIAL: Final = "set allow_partial=True"
_SEND_LESS: Final = (
    "send smaller files, tool calls or system messages; texts have been shortened already"
)
# Descriptions of the values that `start_on` and `end_on` accept, for use in error messages.
_EXPECTED_STARTS: Final = "one of 'human', None, or the class HumanMessage"
_EXPECTED_ENDS: Final = "'human', 'ai', 'tool', a message class, or a list of these"


class BudgetNode(MessagesNode):
    """Base class of the nodes that fit a model request into a token budget.

    Attributes:
        counter: The token counter.
    """

    counter: TokenCounter

    def with_calibration_for_model(self, model: str | None) -> Self:
        """Return a copy of the node whose token estimates are calibrated for `model`.

        Return this node unchanged if `model` is None, or if the node's token counter is already
        calibrated for a model.
        """
        if self.counter.model is not None or model is None:
            return self
        node = copy(self)
        node.counter = self.counter.with_calibration_for_model(model)
        return node

    def _fit_request_by_scaled_token_estimates(
        self, model_input: ModelInput, select: Callable[[ModelInput, TokenCounter], ModelInput]
    ) -> ModelInput:
        """Reduce the input to the turns that fit into the budget, using scaled token estimates.

        The token estimates are multiplied by a scale factor. The scale factor is computed from the
        token usage that is reported in the selected model responses.

        Args:
            model_input: The whole input.
            select: The function that selects the turns of an input that fit into the budget,
                according to the given token counter.
        """
        counter = self.counter
        while True:
            selected = select(model_input, counter)
            turns = list(selected.turns)
            scaled = self.counter.scale_to_reported_usage(
                replace(selected, turns=iter(turns)).to_messages()
            )
            if scaled.scale <= counter.scale:
                return replace(selected, turns=iter(turns))
            # The token usage that the selected model responses report is higher than the token
            # estimates. Repeat the selection with a larger scale factor. The repeated selection
            # chooses only among the turns that are already selected.
            counter, model_input = scaled, replace(model_input, turns=iter(turns))

    def _fit_request_by_counting_whole_requests(
        self,
        select_with_unused_tokens: Callable[[float], ModelInput],
        max_tokens: int,
        tool_tokens: int,
        prompt_tokens: int,
    ) -> ModelInput:
        """Return the largest input for which the complete model request fits into the token budget.

        Each candidate input is tested by counting the tokens of the complete request. Counting
        whole requests is necessary if the user's token-counting function is not additive, that is,
        if the count for a request is not the sum of the counts for its messages. The largest input
        that fits into the token budget is found by binary search.

        Args:
            select_with_unused_tokens: See `find_largest_message_selection_within_budget`.
            max_tokens: The budget.
            tool_tokens: The token count of the tools.
            prompt_tokens: The token count of the agent's system prompt.
        """

        def select_turns_as_list(unused_tokens: float) -> tuple[ModelInput, list[Turn]]:
            selected = select_with_unused_tokens(unused_tokens)
            return selected, list(selected.turns)

        selected, turns = find_largest_message_selection_within_budget(
            select_turns_as_list,
            lambda pair: (
                self._count_request_tokens(*pair, tool_tokens) + prompt_tokens - max_tokens
            ),
            self.counter.request_overhead_tokens,
            max_tokens,
        )
        return replace(selected, turns=iter(turns))

    def _count_request_tokens(
        self, model_input: ModelInput, turns: Sequence[Turn], tool_tokens: int
    ) -> float:
        """Return the token count of a request with the given turns instead of the input's turns."""
        messages = replace(model_input, turns=iter(turns)).to_messages()
        return self.counter.count_request_tokens(messages, tool_tokens)


class Trim(BudgetNode):
    """A node that removes old messages to fit a conversation into a token budget: `trim(4_000)`.

    The parameters are the same as those of langchain's `trim_messages`. In a graph, the node
    removes old messages from the state, but the thread's history keeps them. In a `view`, the state
    is not changed. The messages that the node does not remove always form a sequence that model
    providers accept. When the node removes messages to fit the budget, the node always keeps the
    newest human message and the last step that follows this message. A step is a single message, or
    a tool call together with its results. System messages are removed only if `include_system` is
    False.

    Args:
        max_tokens: The maximum number of tokens of the request. A float above 0 and up to 1.0 is a
            share of the model's context window.
        token_counter: The token counter, see `perdure.memory.token_counter`. `len` counts messages
            instead of tokens.
        strategy: The turns to keep. `"last"` keeps the newest turns. `"first"` keeps the oldest
            turns and the newest turn.
        start_on: The type of the first message. With `"human"` or `HumanMessage`, turns are kept or
            removed as a whole. With None, or if `"ai"` or `"tool"` is given in addition to
            `"human"`, the oldest turn that is kept may lose its beginning.
        include_system: Whether the system messages are included.
        end_on: The types that the last message of a request may have. The messages after the newest
            message of such a type are not sent to the model, and are not removed from the state.
        allow_partial: Whether to shorten messages that must be included and are too long. With
            False, `BudgetExceeded` is raised.
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
        starts = _parse_message_types("start_on", start_on, _EXPECTED_STARTS)
        if starts and "human" not in starts:
            raise ConfigurationError(
                f"the argument 'start_on' is {start_on!r:.80}; expected {_EXPECTED_STARTS}"
            )
        ends = _parse_message_types("end_on", end_on, _EXPECTED_ENDS)
        if end_on == "system":
            raise ConfigurationError(
                f"the argument 'end_on' is 'system'; expected {_EXPECTED_ENDS}"
            )
        size: Any = max_tokens
        if isinstance(size, float) and 0 < size <= 1:
            size = int(size * context_window(token_counter))  # type: ignore[arg-type]
        check_whole_number("max_tokens", size, 1)
        self.size: int = size
        self.counter = counter_of(token_counter)
        self._adds_omitted_steps_line = True
        # Token counts of the tool schemas, and of the agent's system prompt, which is not among the
        # messages in the state.
        self._tool_tokens = self._prompt_tokens = 0
        self.strategy, self.ends = strategy, ends
        self.start_on: Start = "human" if starts in ({"human"}, {"human", "system"}) else None
        self.include_system, self.allow_partial = include_system, allow_partial

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return a copy of the node whose budget accounts for the given tools and system prompt."""
        node, counter = copy(self), self.counter
        node._tool_tokens = counter.count_tools(tools)
        node._prompt_tokens = counter.count_system_prompt(system_prompt)
        return node

    def transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Return `model_input`, trimmed to fit into the token budget."""
        return self._trim_to_budget(
            replace(
                model_input, turns=_remove_messages_after_last_of_type(model_input.turns, self.ends)
            )
        )

    async def atransform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Run `transform_input` in another OS thread, and return its result.

        Counting the tokens of long messages in the event loop's own OS thread would block the loop.
        """
        return await asyncio.to_thread(self.transform_input, model_input, state, config)

    async def _build_state_update(
        self, state: Any, config: RunnableConfig | None
    ) -> dict[str, Any]:
        """Return the state update that removes the messages that do not fit into the budget."""
        messages = read_messages(state, self.messages_key)

        def build_update() -> dict[str, Any]:
            node = copy(self)
            # Do not add a line about omitted steps, because the line would be stored in the state.
            node._adds_omitted_steps_line = False
            fits = node._trim_to_budget(ModelInput.from_messages(messages, purpose="state"))
            kept_messages = [m for turn in fits.turns for unit in turn.units for m in unit]
            if self.include_system:
                kept_messages += [message for message in messages if get_role(message) == "system"]
            update = build_update_from_current_to_target_messages(
                _sort_by_order_in_state(kept_messages, messages), messages, self.messages_key
            )
            return {self.messages_key: update} if update else {}

        return await build_effect_that_calls_function_in_thread(build_update)

    def _trim_to_budget(self, model_input: ModelInput) -> ModelInput:
        """Return `model_input`, trimmed to fit into the token budget."""
        if not self.include_system:
            model_input = replace(model_input, system=None)
        if self.counter.is_additive:
            return self._fit_request_by_scaled_token_estimates(
                model_input, self._trim_to_budget_in_one_pass
            )
        turns = list(model_input.turns)
        request_tokens = self._count_request_tokens(model_input, turns, self._tool_tokens)
        if request_tokens + self._prompt_tokens <= self.size:
            return replace(model_input, turns=iter(turns))
        messages_of_turns = (message for turn in turns for unit in turn.units for message in unit)
        # Cached token counts. The key is the `id()` of a message object, and the value is None
        # until the message's tokens have been counted. Token counts of shortened copies of messages
        # are not cached, because after a copy is deleted, Python can give its `id()` to another
        # object.
        costs: dict[int, float | None] = dict.fromkeys(map(id, messages_of_turns))

        def measure_cached(message: BaseMessage) -> float:
            cost = costs.get(id(message))
            if cost is None:
                cost = self.counter.message_counter(message)
                if id(message) in costs:
                    costs[id(message)] = cost
            return cost

        return self._fit_request_by_counting_whole_requests(
            lambda reserve: self._trim_to_budget_in_one_pass(
                replace(model_input, turns=iter(turns)), self.counter, reserve, measure_cached
            ),
            self.size,
            self._tool_tokens,
            self._prompt_tokens,
        )

    def _trim_to_budget_in_one_pass(
        self,
        model_input: ModelInput,
        counter: TokenCounter,
        reserved_tokens: float = 0,
        count_message_tokens: Measure | None = None,
    ) -> ModelInput:
        """Trim `model_input` to the budget, leaving `reserved_tokens` tokens unused.

        The function `count_message_tokens` returns the token count of a message. The default
        function is `counter.message_counter`.
        """
        count_message_tokens = count_message_tokens or counter.message_counter
        # Scale the token counts of the request's tools and system prompt here, because the counter
        # scales only messages and the model's bound tools.
        fixed = (
            counter.count_request_tokens_excluding_messages(self._tool_tokens * counter.scale)
            + self._prompt_tokens * counter.scale
            + reserved_tokens
        )
        selection = select_turns(
            model_input,
            self.size - fixed,
            count_message_tokens,
            self.strategy,
            self.start_on,
            self._adds_omitted_steps_line,
        )
        # If the line about omitted steps does not fit, shorten the required messages to make room
        # for it.
        shortens_for_line = (
            self.allow_partial and self._adds_omitted_steps_line and selection.left_out > 0
        )
        if selection.excess <= 0 and not shortens_for_line:
            return replace(model_input, turns=iter(selection.turns))
        required = [message for unit in selection.required_units for message in unit]
        room = sum(map(count_message_tokens, required)) - max(0, selection.excess)
        shortened = None
        if shortens_for_line:
            line_tokens = count_message_tokens(
                add_omitted_steps_line(required[0], selection.left_out)
            ) - count_message_tokens(required[0])
            shortened = _shorten_messages_to_fit(required, room - line_tokens, count_message_tokens)
            shortened = shortened and [
                add_omitted_steps_line(shortened[0], selection.left_out),
                *shortened[1:],
            ]
        if shortened is None and selection.excess <= 0:
            return replace(model_input, turns=iter(selection.turns))
        if shortened is None and self.allow_partial:
            shortened = _shorten_messages_to_fit(required, room, count_message_tokens)
        if shortened is None:
            parts = [
                *iter_system_message_names_with_token_counts(model_input, count_message_tokens),
                *(
                    (f"{message.type} message", count_message_tokens(message))
                    for message in required
                ),
                ("fixed part of the request with its tools", fixed),
            ]
            raise build_budget_error(
                self.size, parts, _SEND_LESS if self.allow_partial else _ALLOW_PARTIAL
            )
        replacements = iter(shortened)
        units = [tuple(islice(replacements, len(unit))) for unit in selection.required_units]
        newest, *older = selection.turns
        return replace(model_input, turns=iter([newest._replace(units=units), *older]))


trim = Trim


def build_budget_error(
    max_tokens: int, parts: Sequence[tuple[str, float]], remedy: str
) -> BudgetExceeded:
    """Build the error that reports that the required parts alone exceed the `max_tokens` budget.

    `parts` contains a (name, token count) pair for each required part. `remedy` is advice to the
    user.
    """
    part_sizes = ", ".join(f"{name} {ceil(tokens)}" for name, tokens in parts)
    total = ceil(sum(tokens for _, tokens in parts))
    return BudgetExceeded(
        f"the required parts take {total} tokens, but max_tokens is {max_tokens} ({part_sizes}); "
        f"raise max_tokens, bind fewer tools, or {remedy}"
    )


def _parse_message_types(option_name: str, value: Any, expected: str) -> frozenset[str]:
    """Parse the value of an option as a set of message types.

    The value can be the name of a message type, a message class, or a list of these. `BaseMessage`
    selects all types. If the option contains a message chunk class, the message type of the chunk's
    base class is selected. For example, `AIMessageChunk` and its base class `AIMessage` both select
    AI messages.
    """
    is_several = isinstance(value, list | tuple | set | frozenset)
    types = [
        _list_message_types_of_name_or_class(item)
        for item in (value if is_several else [value] if value else [])
    ]
    if not all(types):
        raise ConfigurationError(
            f"the argument {option_name!r} is {value!r:.80}; expected {expected}"
        )
    return frozenset().union(*types)


def _list_message_types_of_name_or_class(value: Any) -> set[str]:
    """Return the set of message types selected by a type name or a message class.

    The set is empty for an unknown name.
    """
    if isinstance(value, str):
        return {value.removesuffix("MessageChunk").lower()}.intersection(_CLASSES)
    if value is BaseMessage:
        return set(_CLASSES)
    kinds = _CLASSES.items() if isinstance(value, type) else ()
    return {kind for kind, base in kinds if issubclass(value, base)}


def iter_system_message_names_with_token_counts(
    model_input: ModelInput, measure: Measure
) -> Iterator[tuple[str, float]]:
    """Yield a (name, token count) tuple for each system message.

    If there are several system messages, the text that perdure has added to them is counted
    separately. One more tuple at the end contains the token count of the added text.
    """
    if model_input.system is None:
        return
    total = measure(model_input.system)
    if len(model_input.system_parts) < 2:
        yield "system message", total
        return
    for part in model_input.system_parts:
        cost = min(total, measure(part))
        total -= cost
        beginning = " ".join(part.text.split())[:60]
        yield f'system message "{beginning}"', cost
    if total:
        yield "additions to the system messages", total


def _sort_by_order_in_state(
    selected_messages: list[BaseMessage], state_messages: Messages
) -> list[BaseMessage]:
    """Sort `selected_messages` into the order in which the messages occur in the state.

    A modified copy of a message takes the position of the original, which has the same id.
    """
    present, selected_ids = set(map(id, state_messages)), set(map(id, selected_messages))
    copies = {message.id: message for message in selected_messages if id(message) not in present}
    ordered = (
        m if id(m) in selected_ids else copies.get(m.id)
        for m in merge_duplicate_messages(state_messages)
    )
    return [message for message in ordered if message is not None]


def _remove_messages_after_last_of_type(
    turns: Iterator[Turn], last_message_types: frozenset[str]
) -> Iterator[Turn]:
    """Yield the turns of a conversation up to its last message of an allowed type.

    The turns are yielded newest first. `last_message_types` contains the types that the last
    message may have. If `last_message_types` is empty, all turns are yielded unchanged.
    """
    for turn in turns if last_message_types else ():
        units = list(turn.units)
        while units and get_role(units[-1][-1]) not in last_message_types:
            units.pop()
        if units:
            yield turn._replace(units=units)
            break
    yield from turns


class TurnSelection(NamedTuple):
    """The turns of a conversation that were selected to fit into a token limit.

    If `excess` is 0, the selected turns and the system message fit into the token limit.

    Attributes:
        turns: The turns that fit, newest first. The newest turn may lack some of its steps.
        required_units: The units that must be included, which are the newest human message and the
            last unit after it.
        excess: The number of tokens by which the required units and the system message exceed the
            limit, or 0 if they do not exceed it.
        left_out: The number of omitted steps of the newest turn. With `adds_omitted_steps_line`,
            the value is 0 if a message in `turns` contains a line with this number, or if the turn
            has no human message.
    """

    turns: list[Turn]
    required_units: list[Unit]
    excess: float
    left_out: int = 0


def select_turns(
    model_input: ModelInput,
    max_tokens: float,
    measure: Measure,
    strategy: Strategy = "last",
    start_on: Start = "human",
    adds_omitted_steps_line: bool = True,
) -> TurnSelection:
    """Select the turns of a conversation that fit into `max_tokens` tokens.

    The strategy `"last"` selects the newest turns that fit. The strategy `"first"` selects the
    oldest turns that fit, plus the newest turn, which is always required. If the newest turn is too
    long, some of the steps between its human message and its last step are omitted. A step (also
    called unit) is a group of messages that must be kept or removed together, such as a tool call
    with its results. With `adds_omitted_steps_line=True`, a line with the number of omitted steps
    is added to the human message. If the turn has no human message, the number of omitted steps is
    added in a new message at the start of the turn. The line about omitted steps is added only if
    it fits into `max_tokens`.
    """
    remaining = max_tokens - (0 if model_input.system is None else measure(model_input.system))
    newest = next(model_input.turns, None)
    if newest is None:
        return TurnSelection([], [], max(0, -remaining))
    opening, later_units = newest.units[:1], newest.units[1:]
    if later_units and len(opening[0]) > 1 and get_role(opening[0][0]) != "human":
        # If the newest turn starts with a tool call instead of a human message, this tool call may
        # be omitted.
        opening, later_units = [], newest.units[:]
    required = [*opening, later_units.pop()] if later_units else opening
    remaining -= _count_unit_tokens(required, measure)
    if remaining < 0:
        left_out = len(later_units) if _has_question(opening) else 0
        return TurnSelection([Turn(required, newest.messages)], required, -remaining, left_out)
    middle_steps, older, room = [Turn([unit], ()) for unit in later_units], list[Turn](), remaining
    if strategy == "first":
        older, remaining = _take_fitting_turns_and_get_unused_tokens(
            reversed([*model_input.turns]), remaining, measure
        )
        room -= sum(_count_unit_tokens(turn.units, measure) for turn in older)
    steps, remaining = _take_fitting_turns_and_get_unused_tokens(
        middle_steps if strategy == "first" else reversed(middle_steps), remaining, measure
    )
    first_units, left_out = opening, len(middle_steps) - len(steps)
    if adds_omitted_steps_line and left_out:
        first_units, steps = _prepend_omitted_steps_line_and_select_fitting_steps(
            opening, steps, len(middle_steps), room, measure
        )
        left_out = left_out if first_units is opening and _has_question(opening) else 0
    if strategy == "first":
        older.reverse()
    else:
        older, remaining = _take_fitting_turns_and_get_unused_tokens(
            model_input.turns, remaining, measure, start_on
        )
        steps.reverse()
    units = [*first_units, *(part.units[0] for part in steps), *required[len(opening) :]]
    return TurnSelection([Turn(units, newest.messages), *older], required, 0, left_out)


def _prepend_omitted_steps_line_and_select_fitting_steps(
    opening_units: list[Unit],
    steps: list[Turn],
    step_count: int,
    max_tokens: float,
    measure: Measure,
) -> tuple[list[Unit], list[Turn]]:
    """Add a line to a turn to tell the model how many of the turn's steps were omitted.

    The first returned list contains `opening_units` with the added line about omitted steps. The
    second returned list is the longest prefix of `steps` that, together with the added line, fits
    into `max_tokens` tokens. If the line about omitted steps is longer than `max_tokens` tokens,
    `opening_units` and `steps` are returned unchanged.

    Args:
        opening_units: The units at the beginning of the turn, with the question if there is one.
        steps: The steps that fit without the line, in the order of their selection.
        step_count: The number of all steps between `opening_units` and the last unit of the turn.
        max_tokens: The number of tokens for the line and the steps.
        measure: The function that returns the number of tokens of a message.
    """
    question = opening_units[0][0] if _has_question(opening_units) else None
    question_tokens = 0 if question is None else measure(question)
    for length in range(len(steps), -1, -1):
        spare = max_tokens - sum(_count_unit_tokens(part.units, measure) for part in steps[:length])
        line = add_omitted_steps_line(question, step_count - length)
        if measure(line) - question_tokens <= spare:
            rest = opening_units if question is None else opening_units[1:]
            return [(line,), *rest], steps[:length]
    return opening_units, steps


def _has_question(units: list[Unit]) -> bool:
    """Return whether a turn begins with a human message."""
    return bool(units) and get_role(units[0][0]) == "human"


def _take_fitting_turns_and_get_unused_tokens(
    turns: Iterable[Turn], remaining_tokens: float, measure: Measure, start_on: Start = "human"
) -> tuple[list[Turn], float]:
    """Return the leading turns that fit into `remaining_tokens`, and the number of unused tokens.

    If a turn does not fit, the returned number of unused tokens is -1. A call with
    `remaining_tokens=-1` selects no turns. With `start_on=None`, only the last messages of a turn
    are returned if the whole turn does not fit.
    """
    selected: list[Turn] = []
    for turn in turns if remaining_tokens >= 0 else ():
        cost = _count_unit_tokens(turn.units, measure)
        if cost > remaining_tokens:
            if start_on is None:
                costs = accumulate(
                    _count_unit_tokens([unit], measure) for unit in reversed(turn.units)
                )
                end = bisect_right(list(costs), remaining_tokens)
                selected += [turn._replace(units=turn.units[-end:])] if end else []
            return selected, -1
        remaining_tokens -= cost
        selected.append(turn)
    return selected, remaining_tokens


def _count_unit_tokens(units: list[Unit], measure: Measure) -> float:
    """Return the total token count of the messages in a list of units.

    A unit consists of messages that must be kept or removed together.
    """
    return sum(measure(message) for unit in units for message in unit)


def _shorten_messages_to_fit(
    messages: list[BaseMessage],
    max_tokens: float,
    measure: Measure,
    fixed_positions: frozenset[int] = frozenset(),
) -> list[BaseMessage] | None:
    """Shorten messages to `max_tokens` tokens in total.

    Return None if the messages have more than `max_tokens` tokens even after they were shortened.

    `max_tokens` is divided equally among the messages, and a message with more tokens than its
    share is shortened. If a short message has fewer tokens than its share, the unused tokens are
    divided among the longer messages. `fixed_positions` contains the indices of messages that must
    not be shortened.
    """
    result, room = list(messages), max_tokens
    # First, subtract the tokens of the messages at `fixed_positions`, which are not shortened. Then
    # divide the remaining tokens among the other messages, starting with the shortest message, so
    # that longer messages can use the tokens that shorter messages leave unused.
    order = sorted(range(len(result)), key=lambda i: (i not in fixed_positions, measure(result[i])))
    for finished, position in enumerate(order):
        share = room // (len(order) - finished)
        if measure(result[position]) > share and position not in fixed_positions:
            shorter = _shorten_message(result[position], share, measure)
            if shorter is None:
                return _shorten_messages_to_fit(
                    messages, max_tokens, measure, fixed_positions | {position}
                )
            result[position] = shorter
        room -= measure(result[position])
    return result if room >= 0 else None


def _shorten_message(
    message: BaseMessage, max_tokens: float, measure: Measure
) -> BaseMessage | None:
    """Shorten a message to `max_tokens` tokens by removing the middle of its longest text.

    Return None if the message would exceed `max_tokens` tokens even with its longest text removed,
    or if the message is a tool result that OpenAI does not accept as plain text.
    """
    if is_tool_result_not_allowed_as_plain_text(message):
        return None
    content: Any = message.content
    blocks: list[Any] = [content] if isinstance(content, str) else list(content)
    longest = max(range(len(blocks)), key=lambda i: len(_get_block_text(blocks[i])), default=0)
    text = _get_block_text(blocks[longest]) if blocks else ""
    kwargs = {**message.additional_kwargs, SHORTENED: "cut"}

    def keep_chars(count: int) -> BaseMessage:
        """Return a copy of the message with its longest text shortened to `count` characters."""
        short: Any = cut_middle(text, count)
        changed = short
        if not isinstance(content, str):
            block = (
                short if isinstance(blocks[longest], str) else {**blocks[longest], "text": short}
            )
            changed = [*blocks[:longest], block, *blocks[longest + 1 :]]
        return message.model_copy(update={"content": changed, "additional_kwargs": kwargs})

    count = (
        bisect_right(range(len(text)), max_tokens, key=lambda count: measure(keep_chars(count))) - 1
    )
    return keep_chars(count) if count >= 0 else None


def _get_block_text(block: Any) -> str:
    """Return the text of a content block, or "" for a block without text."""
    text = block if isinstance(block, str) else block.get("text")
    return text if isinstance(text, str) else ""

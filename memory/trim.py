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
from perdure.memory.counting_functions import find_largest_message_selection_within_budget
from perdure.memory.left_out import add_omitted_steps_line
from perdure.memory.message_updates import (
    build_update_from_current_to_target_messages,
    merge_duplicate_messages,
)
from perdure.memory.nodes import MessagesNode, ModelInput, read_messages
from perdure.memory.options import check_choice, check_whole_number
from perdure.memory.quotation import cut_middle
from perdure.memory.tokens import Countable, TokenCounter, context_window
from perdure.memory.tokens import token_counter as counter_of
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


class Trim(MessagesNode):
    """A node that removes old messages to fit a conversation into a token budget: `trim(4_000)`.

    The parameters are the same as those of langchain's `trim_messages`. In a graph, the node
    removes old messages from the state, but the thread's history keeps them. In a `view`, the state
    is not changed. The remaining messages always form a sequence that model providers accept. The
    newest human message and the last message after it are always included, and so are all system
    messages, unless `include_system` is False.

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
            # Do not add the line that states how many steps were omitted, because it would change a
            # message that remains in the state.
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
        fit = (
            self._trim_to_budget_by_scaled_token_estimates
            if self.counter.is_additive
            else self._trim_to_budget_by_counting_whole_requests
        )
        return fit(model_input)

    def _trim_to_budget_by_scaled_token_estimates(self, model_input: ModelInput) -> ModelInput:
        """Trim `model_input` to the budget, using token estimates scaled to the reported usage.

        The scale factor is computed from the token usage reported in the model responses that are
        kept.
        """
        counter = self.counter
        fitting = self._trim_to_budget_in_one_pass(model_input, counter)
        while True:
            turns = list(fitting.turns)
            fitting = replace(fitting, turns=iter(turns))
            scaled = self.counter.scale_to_reported_usage(
                replace(fitting, turns=iter(turns)).to_messages()
            )
            if scaled.scale <= counter.scale:
                return fitting
            # The token usage reported in the selected responses shows that the estimates were too
            # low. Trim the selected messages again, with a larger scale factor.
            counter = scaled
            fitting = self._trim_to_budget_in_one_pass(fitting, counter)

    def _trim_to_budget_by_counting_whole_requests(self, model_input: ModelInput) -> ModelInput:
        """Trim `model_input` to the budget, counting the tokens of whole requests.

        This method is used if the user's token-counting function is not additive, that is, if the
        count for a request is not the sum of the counts for its messages.
        """
        turns = list(model_input.turns)
        messages_of_turns = (message for turn in turns for unit in turn.units for message in unit)
        # Maps the `id()` of each message to its token count, or to None until the message has been
        # counted. Shortened copies of messages are not cached, because the `id()` of a copy that no
        # longer exists can be reused.
        costs: dict[int, float | None] = dict.fromkeys(map(id, messages_of_turns))

        def measure_cached(message: BaseMessage) -> float:
            cost = costs.get(id(message))
            if cost is None:
                cost = self.counter.message_counter(message)
                if id(message) in costs:
                    costs[id(message)] = cost
            return cost

        def pack_turns(reserve: float) -> tuple[ModelInput, list[Turn]]:
            everything = replace(model_input, turns=iter(turns))
            fitting = self._trim_to_budget_in_one_pass(
                everything, self.counter, reserve, measure_cached
            )
            return fitting, list(fitting.turns)

        def count_excess(selection: tuple[ModelInput, list[Turn]]) -> float:
            messages = replace(selection[0], turns=iter(selection[1])).to_messages()
            return (
                self.counter.count_request_tokens(messages, self._tool_tokens)
                + self._prompt_tokens
                - self.size
            )

        if count_excess((model_input, turns)) <= 0:
            return replace(model_input, turns=iter(turns))
        fixed = self.counter.request_overhead_tokens
        fitting, selected_turns = find_largest_message_selection_within_budget(
            pack_turns, count_excess, fixed, self.size
        )
        return replace(fitting, turns=iter(selected_turns))

    def _trim_to_budget_in_one_pass(
        self,
        model_input: ModelInput,
        counter: TokenCounter,
        reserved_tokens: float = 0,
        count_message_tokens: Measure | None = None,
    ) -> ModelInput:
        """Trim `model_input` to the budget, leaving `reserved_tokens` tokens unused.

        The function `count_message_tokens` returns the token count of a message. The default is
        `counter.message_counter`.
        """
        count_message_tokens = count_message_tokens or counter.message_counter
        fixed = (
            counter.count_tokens_excluding_messages(self._tool_tokens) + self._prompt_tokens
        ) * counter.scale + reserved_tokens
        options = self.strategy, self.start_on, self._adds_omitted_steps_line
        selection = select_turns(model_input, self.size - fixed, count_message_tokens, *options)
        # If steps are omitted, but the line that says how many does not fit, shorten the required
        # messages to make room for it.
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
                *iter_system_message_names_with_token_counts(model_input, count_message_tokens)
            ]
            parts += [
                (f"{message.type} message", count_message_tokens(message)) for message in required
            ]
            parts.append(("fixed part of the request with its tools", fixed))
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

    The option accepts the name of a message type, a message class, or a list of these.
    `BaseMessage` selects all types. The class of a streamed message chunk selects the same type as
    its base class. For example, `AIMessageChunk` selects the same type as `AIMessage`.
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

    If there are several system messages, the text that perdure added to them is counted in one
    further tuple.
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
    """Sort selected messages into the order that they have in the state.

    A modified copy of a message is placed at the position of the original.
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
    """Yield the turns without any messages that follow the last message of an allowed type.

    The turns are yielded newest first. `last_message_types` contains the allowed message types. If
    `last_message_types` is empty, all turns are yielded unchanged.
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
    """The turns that were selected to fit into a token limit. They fit if `excess` is 0.

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

    With the strategy `"last"`, the newest turns are selected. With the strategy `"first"`, the
    oldest turns are selected in addition to the newest turn, which is always required. If the
    newest turn is too long, some of its steps are omitted. A turn's steps are all its units (groups
    of messages that must be kept or removed together) between the human message and the last unit.
    With `adds_omitted_steps_line=True`, a line stating how many steps were omitted is added to the
    turn's human message, or at its beginning if it has no human message. The line is not added if
    there is no room for it.
    """
    remaining = max_tokens - (0 if model_input.system is None else measure(model_input.system))
    newest = next(model_input.turns, None)
    if newest is None:
        return TurnSelection([], [], max(0, -remaining))
    opening, later_units = newest.units[:1], newest.units[1:]
    if later_units and len(opening[0]) > 1 and get_role(opening[0][0]) != "human":
        # If the newest turn begins with a tool call and its results instead of a human message, its
        # first unit can be dropped like any other unit.
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

    The first element of the returned pair contains the units at the beginning of the turn,
    including the added line. The second element contains those of the given steps that fit into
    `max_tokens` together with the line. If there is no room for the line, `opening_units` and
    `steps` are returned unchanged.

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
    """Return whether the first unit of a turn begins with a human message."""
    return bool(units) and get_role(units[0][0]) == "human"


def _take_fitting_turns_and_get_unused_tokens(
    turns: Iterable[Turn], remaining_tokens: float, measure: Measure, start_on: Start = "human"
) -> tuple[list[Turn], float]:
    """Return the leading turns that fit into `remaining_tokens`, and the number of unused tokens.

    If a turn does not fit, the number of unused tokens is returned as -1, so that a further call
    selects nothing. With `start_on=None`, the selection also includes as many units as fit from the
    end of the turn that does not fit.
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

    Return None if the shortened messages still have too many tokens.

    Each message gets an equal share of `max_tokens`, and is shortened if it exceeds its share.
    Tokens left unused by short messages are shared among the longer ones. `fixed_positions`
    contains the indices of messages that must not be shortened.
    """
    result, room = list(messages), max_tokens
    # Allot tokens to the messages at `fixed_positions` first, then to the other messages from
    # shortest to longest, so that longer messages can use the tokens that shorter ones leave
    # unused.
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

    Return None if the message must not be shortened, or if it would exceed `max_tokens` tokens even
    with its longest text removed.
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

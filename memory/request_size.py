"""Measure the size of the next request.

A conversation is summarised when the size of the next request reaches a trigger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import compress, islice
from math import ceil
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage

from perdure.memory.conversation import Messages, role
from perdure.memory.summary_state import Summary
from perdure.memory.tokens import TokenCounter
from perdure.memory.usage import is_same_model, read_model_name, read_request_tokens

# The value of `RequestParts.agent` if the token usage in the answers of every agent is used.
_ANY_AGENT: Final = object()
# At least this share of a trigger in tokens is available for messages, however many tokens the
# tools and the system prompt have.
_MIN_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The sizes of the request's parts that are not in the state, and a filter for token usage.

    Token usage is read only from the answers that match the attributes `model` and `agent`.

    Attributes:
        tools: The number of tokens of the schemas of the tools.
        system: The number of tokens of the system prompt that is not among the messages.
        other: The number of tokens of the tools and the system message in the last request, without
            the summary. The value is 0 if this number is unknown.
        model: The name of the model whose reported usage is used, or None for any model.
        agent: The name of the agent whose answers are used. langchain stores the agent's name in
            the field `name` of an answer.
    """

    tools: int = 0
    system: int = 0
    other: int = 0
    model: str | None = None
    agent: Any = _ANY_AGENT

    def count_tokens(self, system_message_tokens: int, fixed_tokens: float) -> int:
        """Return the number of tokens of the request's tools, system prompt and system messages.

        `fixed_tokens` is the number of tokens that a counting function adds to each request. A
        counting function that adds a fixed number of tokens is assumed to count the tools as part
        of the fixed number, so the larger one of `fixed_tokens` and `self.tools` is used.
        """
        tools = max(self.tools, ceil(fixed_tokens))
        return max(tools + self.system + system_message_tokens, self.other)

    def is_answer_of_agent(self, message: BaseMessage) -> bool:
        """Return whether a message is an answer from the agent `agent` and the model `model`."""
        if not isinstance(message, AIMessage):
            return False
        by_agent = self.agent is _ANY_AGENT or message.name == self.agent
        return by_agent and is_same_model(read_model_name(message), self.model)


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The size of the next request of a conversation, in tokens.

    Attributes:
        total: The size of the whole request, as the larger of the estimate and the size that
            follows from the usage of the last answer.
        messages: The estimated size of the messages, except system messages.
        other: The estimated size of the tools, the system messages and the summary.
        summary: The estimated size of the summary.
        recent: The number of tokens by which requests have grown since the summary.
        has_summary: Whether the request contains a summary.
        scale: The factor by which estimates are multiplied, according to reported usage.
    """

    total: int
    messages: int
    other: int = 0
    summary: int = 0
    recent: int = 0
    has_summary: bool = False
    scale: float = 1.0

    def reaches_trigger(self, trigger_tokens: float) -> bool:
        """Return whether a request reaches a trigger, and a summary would make the request smaller.

        If the request already contains a summary, the messages after that summary must have at
        least a quarter as many tokens as the trigger. If no new messages were required after a
        summary, each call would write a new summary as soon as the tools and the system prompt
        alone were as large as the trigger.
        """
        grown = not self.has_summary or self.recent >= _MIN_SHARE * trigger_tokens
        return self.total >= trigger_tokens and grown

    def max_message_tokens_below_trigger(self, trigger_tokens: float) -> float:
        """Return how many tokens the messages may have so that the request stays below a trigger.

        The returned number is a number of estimated tokens. The model may have reported more tokens
        for the last request than were estimated. The tokens that were reported but not estimated
        may belong to the messages or to the other parts of the request. One maximum is computed as
        if all unestimated tokens belonged to the messages, and another maximum as if all
        unestimated tokens belonged to the rest of the request. The smaller maximum is returned. The
        tokens of the present summary are not counted as part of the request, because the next
        summary will have another length.
        """
        messages, other = self.scale * self.messages, self.scale * (self.other - self.summary)
        unexplained = max(0.0, self.total - self.scale * (self.messages + self.other))
        minimum = _MIN_SHARE * trigger_tokens
        in_messages = (
            max(trigger_tokens - other, minimum) * messages / (messages + unexplained or 1)
        )
        in_rest = max(trigger_tokens - other - unexplained, minimum)
        return (min(in_messages, in_rest) if unexplained else in_rest) / self.scale

    def with_message_tokens(self, message_tokens: int) -> RequestSize:
        """Return the size of the request if its messages had `message_tokens` tokens."""
        share = message_tokens / self.messages if self.messages else 0.0
        total = self.other + ceil(share * (self.total - self.other))
        return replace(self, total=total, messages=message_tokens, recent=ceil(share * self.recent))


def measure_request(
    messages: Messages,
    counter: TokenCounter,
    parts: RequestParts,
    summary: Summary | None = None,
    summary_section: str = "",
) -> RequestSize:
    """Return the size of the next request, which contains `messages` and the summary.

    `summary_section` is the text of the section that contains the summary in the request, or "".
    """
    is_system = [role(message) == "system" for message in messages]
    costs = list(map(counter.count_message, messages))
    system = sum(compress(costs, is_system))
    estimated = sum(costs) - system
    if counter.counts_messages:
        return RequestSize(estimated, estimated)
    summary_tokens = counter.count_text(summary_section) if summary_section else 0
    other = parts.count_tokens(system, counter.fixed_tokens) + summary_tokens
    scale = counter.scale_to_usage(messages).scale
    total, recent = ceil(scale * (estimated + other)), ceil(scale * estimated)
    start = _find_first_after_summary(messages, summary)
    newest = _find_position_of_answer_with_usage(
        messages, range(len(messages) - 1, start - 1, -1), parts
    )
    if newest is not None:
        later = islice(zip(costs, is_system, strict=True), newest + 1, None)
        later_tokens = sum(cost for cost, is_ignored in later if not is_ignored)
        reported = read_request_tokens(messages[newest]) + ceil(scale * later_tokens)
        total = max(total, reported)
        if summary:
            first = _find_position_of_answer_with_usage(messages, range(start, newest + 1), parts)
            first = newest if first is None else first
            recent = max(recent, reported - read_request_tokens(messages[first]))
    return RequestSize(total, estimated, other, summary_tokens, recent, bool(summary), scale)


def _find_position_of_answer_with_usage(
    messages: Messages, positions: Iterable[int], parts: RequestParts
) -> int | None:
    """Return the first of `positions` at which an answer reports token usage, or None."""
    for position in positions:
        message = messages[position]
        if parts.is_answer_of_agent(message) and read_request_tokens(message):
            return position
    return None


def _find_first_after_summary(messages: Messages, summary: Summary | None) -> int:
    """Return the position after the newest answer whose request did not contain the summary.

    An answer to a request without the summary reports a token usage that includes the summarised
    messages.
    """
    answered = summary.get("answered") if summary else None
    if answered is None:
        return 0
    if not answered:
        return len(messages)
    positions = range(len(messages) - 1, -1, -1)
    return next((index + 1 for index in positions if messages[index].id == answered), 0)

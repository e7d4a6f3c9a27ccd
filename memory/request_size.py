"""Measure the size of the next request.

A conversation is summarised when the size of its next request reaches a configured trigger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import compress, islice
from math import ceil
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage

from perdure.memory.conversation import Messages, get_role
from perdure.memory.summary_state import Summary
from perdure.memory.tokens import TokenCounter
from perdure.memory.usage import is_same_model, read_model_name, read_reported_total_tokens

# Value of `RequestParts.agent` that matches the model responses of every agent.
_ANY_AGENT: Final = object()
# Minimum share of a summary trigger's token count that is reserved for messages, even if the tools
# and the system prompt use more than the remaining share. Also the share of the trigger by which a
# request must have grown since its summary before the next summary is written.
_MIN_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class RequestParts:
    """Token counts of the request parts that are not in the state, such as the tool schemas.

    Token usage is read only from model responses that match `model` and `agent`.

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

    def count_tool_and_system_tokens(
        self, system_message_tokens: int, request_overhead_tokens: float
    ) -> int:
        """Return the token count of the request's tools, system prompt and system messages.

        `request_overhead_tokens` is the constant overhead, in tokens, that a counting function adds
        to each request. The overhead is assumed to include the tools, so the larger of
        `request_overhead_tokens` and `self.tools` is used instead of their sum.
        """
        tools = max(self.tools, ceil(request_overhead_tokens))
        return max(tools + self.system + system_message_tokens, self.other)

    def is_response_of_agent_and_model(self, message: BaseMessage) -> bool:
        """Return whether a message is a response from the agent `agent` and the model `model`."""
        if not isinstance(message, AIMessage):
            return False
        by_agent = self.agent is _ANY_AGENT or message.name == self.agent
        return by_agent and is_same_model(read_model_name(message), self.model)


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The estimated size, in tokens, of a conversation's next request to the model.

    Attributes:
        total: The size of the whole request. It is the larger of the estimate and the size computed
            from the usage that the last response reported.
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
        """Return whether the request is large enough for the conversation to be summarised.

        The request's size must be at least `trigger_tokens`. If the request already contains a
        summary, the request must also have grown by at least a quarter of `trigger_tokens` since
        that summary. If no growth were required, every call would write a new summary once the
        tools and the system prompt alone reached the trigger.
        """
        grown = not self.has_summary or self.recent >= _MIN_SHARE * trigger_tokens
        return self.total >= trigger_tokens and grown

    def max_message_tokens_below_trigger(self, trigger_tokens: float) -> float:
        """Return how many message tokens fit into a request before it reaches the trigger.

        The result is measured in estimated tokens. The token usage that the model reported for the
        last request can exceed the estimate. It is unknown whether the messages or the other parts
        of the request cause the excess, so this method computes the result for both cases and
        returns the smaller one. The current summary is not counted as part of the request, because
        the next summary will have a different length.
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
        """Return the size that the request would have with `message_tokens` message tokens."""
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
    """Return the size of the next request, including `messages` and the summary.

    `summary_section` is the text of the request's summary section, or "" if there is none. If
    `counter` counts messages instead of tokens, the size is the number of messages, without system
    messages.
    """
    is_system = [get_role(message) == "system" for message in messages]
    costs = list(map(counter.count_message_tokens, messages))
    system = sum(compress(costs, is_system))
    estimated = sum(costs) - system
    if counter.counts_messages:
        return RequestSize(estimated, estimated)
    summary_tokens = counter.count_text(summary_section) if summary_section else 0
    other = (
        parts.count_tool_and_system_tokens(system, counter.request_overhead_tokens) + summary_tokens
    )
    scale = counter.scale_to_reported_usage(messages).scale
    total, recent = ceil(scale * (estimated + other)), ceil(scale * estimated)
    start = _find_first_position_after_summary(messages, summary)
    newest = _find_position_of_answer_with_usage(
        messages, range(len(messages) - 1, start - 1, -1), parts
    )
    if newest is not None:
        later = islice(zip(costs, is_system, strict=True), newest + 1, None)
        later_tokens = sum(cost for cost, is_ignored in later if not is_ignored)
        reported = read_reported_total_tokens(messages[newest]) + ceil(scale * later_tokens)
        total = max(total, reported)
        if summary:
            first = _find_position_of_answer_with_usage(messages, range(start, newest + 1), parts)
            first = newest if first is None else first
            recent = max(recent, reported - read_reported_total_tokens(messages[first]))
    return RequestSize(total, estimated, other, summary_tokens, recent, bool(summary), scale)


def _find_position_of_answer_with_usage(
    messages: Messages, positions: Iterable[int], parts: RequestParts
) -> int | None:
    """Return the first position at which there is a response with reported token usage, or None.

    Check only `positions`, in the given order, and only responses that match `parts`.
    """
    for position in positions:
        message = messages[position]
        if parts.is_response_of_agent_and_model(message) and read_reported_total_tokens(message):
            return position
    return None


def _find_first_position_after_summary(messages: Messages, summary: Summary | None) -> int:
    """Return the index of the message after the last model response that predates the summary.

    The token usage of requests that were sent before the summary existed still includes the
    messages that have since been summarised, so it is ignored. If the last model response before
    the summary has no id, it cannot be found among the messages, so the token usage of all messages
    is ignored. If no model response predates the summary, or if the last one that does is no longer
    among the messages, no token usage is ignored.
    """
    answered = summary.get("answered") if summary else None
    if answered is None:
        return 0
    if not answered:
        return len(messages)
    positions = range(len(messages) - 1, -1, -1)
    return next((index + 1 for index in positions if messages[index].id == answered), 0)

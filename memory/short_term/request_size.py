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
from perdure.memory.short_term.summary_state import Summary
from perdure.memory.short_term.tokens import TokenCounter
from perdure.memory.usage import is_same_model, read_model_name, read_reported_total_tokens

# Value of `RequestParts.agent` that matches model responses from any agent.
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
        to each request. The larger of `request_overhead_tokens` and `self.tools` is counted, not
        their sum, because the overhead is assumed to include the tools.
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

        A conversation is summarised if its request has at least `trigger_tokens` tokens. After a
        summary, the request must grow by at least a quarter of `trigger_tokens` before the next
        summary. Without the growth check, large tools and system prompts would trigger a new
        summary on every call.
        """
        grown = not self.has_summary or self.recent >= _MIN_SHARE * trigger_tokens
        return self.total >= trigger_tokens and grown

    def max_message_tokens_below_trigger(self, trigger_tokens: float) -> float:
        """Return a token budget for the messages of a request.

        With this budget, the whole request, including tools and system messages, should stay below
        `trigger_tokens` tokens.

        The result is an estimated token count. The token usage that the model reported for the last
        request can exceed the estimate. The excess tokens can be in the messages or in the rest of
        the request, such as tools. Two token limits are computed for the messages. For the first
        token limit, all tokens in excess of the estimate are assumed to be in the messages, and the
        estimate for the rest of the request is assumed to be correct. The second token limit
        assumes that the estimated size of the messages is correct. The reported tokens that exceed
        the estimate then belong to the rest of the request, such as the tools. The smaller limit is
        returned. The tokens of the current summary are left out of the computation, because the
        next summary replaces the current one and will have a different length.
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
        """Return this size, recalculated for messages with `message_tokens` tokens in total.

        The rest of the request, such as the tools, keeps its size.
        """
        share = message_tokens / self.messages if self.messages else 0.0
        return replace(
            self,
            total=self.other + ceil(share * (self.total - self.other)),
            messages=message_tokens,
            recent=ceil(share * self.recent),
        )


def measure_request(
    messages: Messages,
    counter: TokenCounter,
    parts: RequestParts,
    summary: Summary | None = None,
    summary_section: str = "",
) -> RequestSize:
    """Return the size of the next request, including `messages` and the summary.

    `summary_section` is the text of the request's summary section, or "" if there is none. If
    `counter` counts messages instead of tokens, the returned size is the number of messages,
    excluding system messages.
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
    newest = _find_position_of_response_with_token_usage(
        messages, range(len(messages) - 1, start - 1, -1), parts
    )
    if newest is not None:
        later = islice(zip(costs, is_system, strict=True), newest + 1, None)
        later_tokens = sum(cost for cost, is_ignored in later if not is_ignored)
        reported = read_reported_total_tokens(messages[newest]) + ceil(scale * later_tokens)
        total = max(total, reported)
        if summary:
            first = _find_position_of_response_with_token_usage(
                messages, range(start, newest + 1), parts
            )
            first = newest if first is None else first
            recent = max(recent, reported - read_reported_total_tokens(messages[first]))
    return RequestSize(total, estimated, other, summary_tokens, recent, bool(summary), scale)


def _find_position_of_response_with_token_usage(
    messages: Messages, positions: Iterable[int], parts: RequestParts
) -> int | None:
    """Return the position of the first response that reports token usage, or None.

    The messages at `positions` are searched in the given order, and all other messages are ignored.
    Responses from an agent or a model other than those named in `parts` are skipped.
    """
    for position in positions:
        message = messages[position]
        if parts.is_response_of_agent_and_model(message) and read_reported_total_tokens(message):
            return position
    return None


def _find_first_position_after_summary(messages: Messages, summary: Summary | None) -> int:
    """Find the last model response before the summary, and return the index of the next message.

    The caller ignores the token usage of model responses before the returned index, because these
    responses are older than the summary. Return `len(messages)` if the last response before the
    summary has no id and therefore cannot be found. The caller then ignores the token usage that
    the responses in `messages` report. Return 0 if there is no summary, or if all responses in
    `messages` that report token usage are newer than the summary. If the returned index is 0, the
    caller uses the token usage that all responses in `messages` report.
    """
    answered = summary.get("answered") if summary else None
    if answered is None:
        return 0
    if not answered:
        return len(messages)
    return next(
        (count for count in range(len(messages), 0, -1) if messages[count - 1].id == answered), 0
    )

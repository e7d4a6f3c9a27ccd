"""The size of the next request of a conversation, which decides when it is summarised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import compress, islice
from math import ceil
from typing import Any, Final, Self

from langchain_core.messages import AIMessage, BaseMessage

from perdure.memory.conversation import Messages, role
from perdure.memory.summary_state import Summary
from perdure.memory.tokens import TokenCounter
from perdure.memory.usage import is_same_model, model_of, request_tokens

_ANYONE: Final = object()
_LEAST_SHARE: Final = 0.25  # of a trigger, which the messages may always take


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The parts of a request that are not in the state, and whose answers report its size.

    Attributes:
        tools: Tokens of the schemas of the tools.
        system: Tokens of the system prompt that is not among the messages.
        other: Tokens of the tools and the system message in the last request, if that is known,
            without a summary.
        model: The model whose reported usage counts; None means any model.
        agent: The name of the agent whose answers count, which langchain writes into them.
    """

    tools: int = 0
    system: int = 0
    other: int = 0
    model: str | None = None
    agent: Any = _ANYONE

    def total(self, system_messages: int, fixed_part: float) -> int:
        """Return the tokens of these parts together with the system messages of the state.

        The fixed part that a function counts for each request is taken for that of the tools.
        """
        tools = max(self.tools, ceil(fixed_part))
        return max(tools + self.system + system_messages, self.other)

    def of_agent(self, agent: str | None) -> Self:
        """Return the same parts for the requests of an agent with this name."""
        return replace(self, agent=agent)

    def has_answered(self, message: BaseMessage) -> bool:
        """Return whether a message is an answer to a request with these parts."""
        if not isinstance(message, AIMessage):
            return False
        by_agent = self.agent is _ANYONE or message.name == self.agent
        return by_agent and is_same_model(model_of(message), self.model)


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens of the next request of a conversation.

    Attributes:
        total: Of the whole request: the estimate, or what the last answer reported if that is more.
        messages: Of the messages, as the counter estimates them.
        other: Of tools, system messages and summary, as the counter estimates them.
        summary: Of the summary.
        recent: By which requests have grown since the summary.
        has_summary: Whether there is a summary.
        scale: Of the estimates, by what the model reported for its answers.
    """

    total: int
    messages: int
    other: int = 0
    summary: int = 0
    recent: int = 0
    has_summary: bool = False
    scale: float = 1.0

    def reaches(self, trigger: float) -> bool:
        """Return whether the request is as large as a trigger, and a summary would make it smaller.

        If tools and system prompt alone are that large, a summary is followed by another one only
        when the messages have grown again. Otherwise each call would need a new summary.
        """
        grown = not self.has_summary or self.recent >= _LEAST_SHARE * trigger
        return self.total >= trigger and grown

    def room(self, trigger: float) -> float:
        """Return how many tokens of messages leave the request below a trigger.

        The tokens are estimated ones. Tokens that were reported beyond the calibrated estimate may
        be of the messages or of the rest of the request, so the smaller room counts. The summary
        does not count, since the next one has another length.
        """
        messages, other = self.scale * self.messages, self.scale * (self.other - self.summary)
        unexplained = max(0.0, self.total - self.scale * (self.messages + self.other))
        least = _LEAST_SHARE * trigger
        in_messages = max(trigger - other, least) * messages / (messages + unexplained or 1)
        beside = max(trigger - other - unexplained, least)
        return (min(in_messages, beside) if unexplained else beside) / self.scale

    def with_messages(self, messages: int) -> RequestSize:
        """Return the size of the request with fewer messages, whose tokens are estimated."""
        share = messages / self.messages if self.messages else 0.0
        total = self.other + ceil(share * (self.total - self.other))
        return replace(self, total=total, messages=messages, recent=ceil(share * self.recent))


def measure_request(
    messages: Messages,
    counter: TokenCounter,
    parts: RequestParts,
    summary: Summary | None = None,
    section: str = "",
) -> RequestSize:
    """Return the size of the next request, which shows these messages and the summary.

    `section` is the text of the summary in the request.
    """
    is_system = [role(message) == "system" for message in messages]
    costs = list(map(counter.message, messages))
    system = sum(compress(costs, is_system))
    estimated = sum(costs) - system
    if counter.counts_messages:
        return RequestSize(estimated, estimated)
    summary_tokens = counter.text(section) if section else 0
    other = parts.total(system, counter.fixed_part) + summary_tokens
    scale = counter.fitted(messages).scale
    total, recent = ceil(scale * (estimated + other)), ceil(scale * estimated)
    start = _fresh_from(messages, summary)
    newest = _find_report(messages, range(len(messages) - 1, start - 1, -1), parts)
    if newest is not None:
        later = islice(zip(costs, is_system, strict=True), newest + 1, None)
        after = sum(cost for cost, ignored in later if not ignored)
        reported = request_tokens(messages[newest]) + ceil(scale * after)
        total = max(total, reported)
        if summary:
            first = _find_report(messages, range(start, newest + 1), parts)
            first = newest if first is None else first
            recent = max(recent, reported - request_tokens(messages[first]))
    return RequestSize(total, estimated, other, summary_tokens, recent, bool(summary), scale)


def _find_report(messages: Messages, places: Iterable[int], parts: RequestParts) -> int | None:
    """Return the first of these places whose message reports the size of a request."""
    for place in places:
        message = messages[place]
        if parts.has_answered(message) and request_tokens(message):
            return place
    return None


def _fresh_from(messages: Messages, summary: Summary | None) -> int:
    """Return the place from which answers are to requests with the summary.

    What an earlier answer reported includes the messages that the summary has replaced.
    """
    answered = summary.get("answered") if summary else None
    if answered is None:
        return 0
    if not answered:
        return len(messages)
    places = range(len(messages) - 1, -1, -1)
    return next((place + 1 for place in places if messages[place].id == answered), 0)

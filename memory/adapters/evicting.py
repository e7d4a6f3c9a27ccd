"""What a sliding window evicts: the oldest, exchanges whole, the system message never.

The rules are LangChain4j's (https://docs.langchain4j.dev/tutorials/chat-memory). One is stricter:
what was said last is never evicted. LangChain4j would show the model a list without the question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage

from perdure.errors import BudgetExceeded
from perdure.memory.conversation import call_ids

Messages = Sequence[BaseMessage]


def admit(messages: Messages, new: BaseMessage, *, first: bool = False) -> list[BaseMessage] | None:
    """Messages with one more; None: it changes nothing.

    There is one system message: an equal one is ignored, a different one takes its place.

    Args:
        messages: Oldest first.
        new: Added at the end.
        first: Whether a system message is put first instead.
    """
    if not isinstance(new, SystemMessage):
        return [*messages, new]
    held = next((i for i, m in enumerate(messages) if isinstance(m, SystemMessage)), None)
    if held is not None and messages[held].content == new.content:
        return None
    others = [message for i, message in enumerate(messages) if i != held]
    return [new, *others] if first else [*others, new]


def evict(
    messages: Messages,
    limit: int,
    cost: Callable[[BaseMessage], int],
    unit: str,
    fixed: int = 0,
) -> list[BaseMessage]:
    """The newest messages within a limit, and the system message; a call goes with its results.

    Args:
        messages: Oldest first.
        limit: What they may cost together.
        cost: What one costs.
        unit: What is counted, for the error.
        fixed: What is paid besides.

    Raises:
        BudgetExceeded: What was said last, with the system message and, for a tool's result, its
            call, costs more.
    """
    costs = [cost(message) for message in messages]
    total = fixed + sum(costs)
    system = next((i for i, m in enumerate(messages) if isinstance(m, SystemMessage)), None)
    start = 0
    while total > limit:
        stop = start + 1 if start == system else _after(messages, start)
        if stop >= len(messages):
            raise BudgetExceeded(
                f"the newest message, with what may not be parted from it, takes {total} {unit}; "
                f"{limit} are allowed: allow more, or say less (what was said before is evicted)"
            )
        if start != system:
            total -= sum(costs[start:stop])
        start = stop
    kept = [] if system is None or system >= start else [messages[system]]
    return [*kept, *messages[start:]]


def without_orphans(messages: Messages) -> list[BaseMessage]:
    """Messages without tool results that lack their call, and calls that lack a result.

    The calls of the last message, of which some results may still come, stay.
    """
    kept: list[BaseMessage] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        wanted = set(call_ids(message)) if isinstance(message, AIMessage) else set()
        index += 1
        if wanted:
            systems, results, index = _answers(messages, index, wanted)
            pending = index == len(messages)
            kept += [*systems, message, *results] if pending or not wanted else systems
        elif not isinstance(message, ToolMessage):
            kept.append(message)
    return kept


def _after(messages: Messages, start: int) -> int:
    """Where what is evicted together with a message ends."""
    message = messages[start]
    stop = start + 1
    if isinstance(message, AIMessage) and call_ids(message):
        while stop < len(messages) and isinstance(messages[stop], ToolMessage):
            stop += 1
    return stop


def _answers(
    messages: Messages, index: int, wanted: set[str | None]
) -> tuple[list[BaseMessage], list[BaseMessage], int]:
    """System messages and results that follow a call, and where others begin; empties `wanted`."""
    systems: list[BaseMessage] = []
    results: list[BaseMessage] = []
    while index < len(messages):
        message = messages[index]
        if isinstance(message, SystemMessage):
            systems.append(message)
        elif not isinstance(message, ToolMessage):
            break
        elif message.tool_call_id in wanted:
            wanted.discard(message.tool_call_id)
            results.append(message)
        index += 1
    return systems, results, index

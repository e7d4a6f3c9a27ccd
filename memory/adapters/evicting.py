"""What a sliding window evicts: the oldest, exchanges whole, the system message never.

The rules are LangChain4j's (https://docs.langchain4j.dev/tutorials/chat-memory). One is stricter:
what was said last is never evicted. LangChain4j would show the model a list without the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from perdure.errors import BudgetExceeded
from perdure.memory.conversation import Messages, backwards, call_ids, says_something

_EVICTED: Final = HumanMessage("evicted")


def admit(messages: Messages, new: BaseMessage, *, first: bool = False) -> list[BaseMessage] | None:
    """Messages with one more; None: it changes nothing.

    There is one system message: a different one takes its place; an equal one is ignored, and one
    that says nothing, which cannot be meant to take the place of instructions.

    Args:
        messages: Oldest first.
        new: Added at the end.
        first: Whether a system message is put first instead.
    """
    if not isinstance(new, SystemMessage):
        return [*messages, new]
    held = next((i for i, m in enumerate(messages) if isinstance(m, SystemMessage)), None)
    if not says_something(new) or (held is not None and messages[held].content == new.content):
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


def showable(messages: Messages) -> list[BaseMessage]:
    """What of a window a provider takes, by `conversation`'s rules, and the system messages.

    Calls at the end, of which some results may still come, stay. A system message stays where it
    stands, or goes before the calls and results that it stands between.
    """
    # a window may begin with an AI message: it is part of a turn whose beginning was evicted
    turns = reversed([*backwards([_EVICTED, *messages], to_answer=False)])
    left = iter(messages)
    kept: list[BaseMessage] = []
    for unit in (unit for turn in turns for unit in turn.units):
        if unit.messages[0] is _EVICTED:
            continue
        ends = [*unit.messages, None] if unit.kind == "pending" else unit.messages
        for end in ends:
            kept += _systems_before(end, left)
        kept += unit.messages
    return [*kept, *_systems_before(None, left)]


def _systems_before(end: BaseMessage | None, left: Iterator[BaseMessage]) -> Iterator[BaseMessage]:
    for message in left:
        if message is end:
            return
        if isinstance(message, SystemMessage) and says_something(message):
            yield message


def _after(messages: Messages, start: int) -> int:
    """Where what is evicted together with a message ends."""
    message = messages[start]
    stop = start + 1
    if isinstance(message, AIMessage) and call_ids(message):
        while stop < len(messages) and isinstance(messages[stop], ToolMessage):
            stop += 1
    return stop

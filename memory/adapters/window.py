"""The sliding window of chat memories, by LangChain4j's rules."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from perdure.errors import InvalidMessages
from perdure.memory.conversation import Messages, backwards, call_ids, says_something
from perdure.memory.nodes import checked

Change = Callable[[list[BaseMessage]], Sequence[BaseMessage]]

_EVICTED: Final = HumanMessage("evicted")
_log: Final = logging.getLogger(__name__)


def checked_messages(messages: Messages, what: str = "the messages") -> list[BaseMessage]:
    """A list of the messages; one that is no message, or a `RemoveMessage`, raises."""
    found = list(checked(messages, what))
    if any(isinstance(message, RemoveMessage) for message in found):
        raise InvalidMessages(f"{what}: one is a RemoveMessage; expected messages to keep")
    return found


def windowed(
    messages: Messages,
    new: Messages,
    fits: Callable[[list[BaseMessage]], bool],
    first: bool = False,
) -> list[BaseMessage]:
    """The messages with new ones at the end, as far as they fit.

    A new system message replaces the one before, at the end or, with `first`, at the front; an
    equal or a blank one is ignored. The system message is never evicted, else the oldest goes
    first, a tool call with its results. A message that alone does not fit is evicted with all
    before it.
    """
    found = list(messages)
    for message in new:
        if isinstance(message, SystemMessage):
            held = [other.content for other in found if isinstance(other, SystemMessage)]
            if not says_something(message) or message.content in held:
                continue
            found = [other for other in found if not isinstance(other, SystemMessage)]
        found.insert(0 if first and isinstance(message, SystemMessage) else len(found), message)

    def after(cut: int) -> list[BaseMessage]:
        return [*(m for m in found[:cut] if isinstance(m, SystemMessage)), *found[cut:]]

    # no cut between a call and its results
    inner = (i for i, m in enumerate(found) if i and not isinstance(m, ToolMessage))
    cuts = [0, *inner, len(found)]
    cut = cuts[bisect_left(cuts[:-1], True, key=lambda at: fits(after(at)))]
    if found and cut == len(found) and not isinstance(found[-1], SystemMessage):
        _log.warning("the newest message does not fit into the window of a chat memory: evicted")
    return after(cut)


def presentable(messages: Messages) -> list[BaseMessage]:
    """The messages of a window without blank messages and tool calls or results alone.

    Calls at the end stay. A system message between a call and its results goes before the call.
    """
    # a window may begin in the middle of a turn
    turns = reversed([*backwards([_EVICTED, *messages], to_answer=False)])
    left = iter(messages)
    kept: list[BaseMessage] = []
    for unit in [unit for turn in turns for unit in turn.units][1:]:
        waits = isinstance(unit[0], AIMessage) and len(call_ids(unit[0])) >= len(unit)
        for end in [*unit, None] if waits else unit:
            kept += _systems_before(end, left)
        kept += unit
    return [*kept, *_systems_before(None, left)]


def _systems_before(end: BaseMessage | None, left: Iterator[BaseMessage]) -> Iterator[BaseMessage]:
    for message in left:
        if message is end:
            return
        if isinstance(message, SystemMessage) and says_something(message):
            yield message

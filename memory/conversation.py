"""The structure of a conversation: turns, and within them the units that stay or go together.

A *turn* is a human message and all that follows it up to the next. An *exchange* is an AI message
that calls tools, with the result of each call. Providers refuse results without their call, calls
without all of their results, and empty AI messages: these are never shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final, Literal, NamedTuple

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

Messages = Sequence[BaseMessage]
Unit = tuple[BaseMessage, ...]
"""Messages that stay or go together: one, or a message that calls tools and its results."""
Role = Literal["human", "ai", "tool", "system", "chat", "other"]

_BASES: Final[Sequence[tuple[type[BaseMessage], Role]]] = (
    (HumanMessage, "human"),
    (AIMessage, "ai"),
    (ToolMessage, "tool"),
    (SystemMessage, "system"),
    (ChatMessage, "chat"),
)
THOUGHT_BLOCKS: Final = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning_content"}
)
CALL_BLOCKS: Final = frozenset({"tool_use", "tool_call", "function_call"})
"""Types of the blocks of content that are calls of tools; `THOUGHT_BLOCKS`: that are thoughts."""
SHORTENED: Final = "perdure_shortened"
"""In additional_kwargs, which no provider is sent: what became of a message, whose original is
longer. `"cut"`: its middle is left out, `"cleared"`: a marker is in its place."""


class Turn(NamedTuple):
    """A human message and what follows it."""

    units: list[Unit]  # what a provider takes of it, the human message first
    messages: Messages  # all of it


def role(message: BaseMessage) -> Role:
    """The role of a message."""
    kind = _role_of(type(message))
    human = kind == "chat" and getattr(message, "role", None) in ("user", "human")
    return "human" if human else kind


@cache  # takes a sixth of the time of asking `isinstance`
def _role_of(kind: type) -> Role:
    return next((role for base, role in _BASES if issubclass(kind, base)), "other")


def system_index(messages: Messages) -> int | None:
    """Where the system message is that counts: the newest that is not blank.

    The rule is LangChain4j's (https://docs.langchain4j.dev/tutorials/chat-memory).
    """
    # most conversations have none: told by their few classes, not by their many messages
    kinds = {kind for kind in set(map(type, messages)) if issubclass(kind, SystemMessage)}
    for index in range(len(messages) - 1, -1, -1) if kinds else ():
        if type(messages[index]) in kinds and says_something(messages[index]):
            return index
    return None


def turns(messages: Messages) -> Iterator[range]:
    """Where the turns stand, newest first. What precedes the first human message is in none.

    A human message without content begins a turn only if it is the newest.
    """
    stop, newest = len(messages), True
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if role(message) == "human" and (newest or says_something(message)):
            yield range(index, stop)
            stop, newest = index, False


def backwards(messages: Messages, *, to_answer: bool) -> Iterator[Turn]:
    """The turns, newest first, without what no provider takes.

    Unless a model is `to_answer` now, a call may wait for its results at the end.
    """
    for turn in turns(messages):
        own = messages[turn.start : turn.stop]
        yield Turn(_units(own, last=turn.stop == len(messages) and not to_answer), own)


def _units(turn: Messages, *, last: bool) -> list[Unit]:
    """What a provider takes of a turn; of the last also a call that waits for its results."""
    units: list[Unit] = [(turn[0],)]
    for index in range(1, len(turn)):
        message = turn[index]
        if role(message) not in ("ai", "chat"):
            continue
        calls = call_ids(message) if isinstance(message, AIMessage) else []
        if calls:
            exchange = _exchange(turn, index, calls, last)
            units += [exchange] if exchange else []
        # calls in the content that `tool_calls` does not have: nothing answers them
        elif says_something(message) and not has_block(message, CALL_BLOCKS):
            units.append((message,))
    return units


def _exchange(turn: Messages, index: int, calls: Sequence[str | None], last: bool) -> Unit | None:
    unanswered = set(calls)
    if None in unanswered or "" in unanswered or len(unanswered) < len(calls):
        return None  # a result could not name its call
    together = [turn[index]]
    directly = True  # nothing but results and system messages since the call
    for message in turn[index + 1 :]:
        if isinstance(message, ToolMessage):
            if message.tool_call_id in unanswered:
                unanswered.discard(message.tool_call_id)
                together.append(message)
        elif role(message) != "system":
            directly = False
            break
    return tuple(together) if not unanswered or (last and directly) else None


def call_ids(message: AIMessage) -> list[str | None]:
    """The ids of the tool calls in a message, those that could not be parsed too: they are sent."""
    return [call["id"] for call in (*message.tool_calls, *message.invalid_tool_calls)]


def has_block(message: BaseMessage, types: frozenset[str]) -> bool:
    """Whether the content of a message has a block of one of these types."""
    content = message.content
    return not isinstance(content, str) and any(
        isinstance(block, dict) and block.get("type") in types for block in content
    )


def says_something(message: BaseMessage) -> bool:
    """Whether there is content: text that is not blank, or a block that is no text or thought."""
    content = message.content
    if isinstance(content, str):
        return bool(content) and not content.isspace()
    return any(map(_has_content, content))


def _has_content(block: str | dict[str, object]) -> bool:
    if isinstance(block, str):
        return bool(block.strip())
    if block.get("type") in THOUGHT_BLOCKS:
        return False
    return block.get("type") != "text" or bool(str(block.get("text") or "").strip())

"""The structure of a conversation: turns, and within them the units that stay or go together.

A *turn* is a human message and all that follows it up to the next. Messages that no human message
precedes are a turn, too. An *exchange* is an AI message that calls tools, with the result of each
call. Providers refuse results without their call, calls without all of their results, and empty AI
messages: a request has none of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

from perdure.memory.tool_calls import CALL_BLOCKS as CALL_BLOCKS
from perdure.memory.tool_calls import find_result_ids, iter_blocks, unwrap_block

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
"""Types of the content blocks that are thoughts."""
_SILENT_BLOCKS: Final = THOUGHT_BLOCKS | CALL_BLOCKS | {"function_call_signature"}
_SILENT_KEYS: Final = frozenset({"id", "index"})  # the keys that streaming leaves in empty blocks
_SPOKEN: Final = ("audio", "refusal")  # keys of additional_kwargs in which OpenAI answers
SHORTENED: Final = "perdure_shortened"
"""In additional_kwargs, which no provider is sent: what became of a message, whose original is
longer. `"cut"`: its middle is left out, `"cleared"`: a marker is in its place."""


class Turn(NamedTuple):
    """A human message and what follows it; or the messages that no human message precedes."""

    units: list[Unit]  # what a provider takes of it, a human message first if there is one
    messages: Messages  # all of it


def role(message: BaseMessage) -> Role:
    """Return the role of a message."""
    kind = _role_of(type(message))
    human = kind == "chat" and getattr(message, "role", None) in ("user", "human")
    return "human" if human else kind


@cache  # takes a sixth of the time of asking `isinstance`
def _role_of(kind: type) -> Role:
    return next((role for base, role in _BASES if issubclass(kind, base)), "other")


def turns(messages: Messages) -> Iterator[range]:
    """Yield the positions of each turn, newest first.

    A human message without content begins a turn only if it is the newest. A human message that
    brings results of tools does not begin a turn. Messages before the first turn are in none,
    unless there is no human message: then all messages are one turn.
    """
    stop, newest = len(messages), True
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if role(message) != "human" or not (newest or says_something(message)):
            continue
        if isinstance(message.content, str) or not find_result_ids(message):
            yield range(index, stop)
            stop, newest = index, False
    if newest and messages:
        yield range(len(messages))


def says_something(message: BaseMessage) -> bool:
    """Return whether a message has content that is not blank, apart from thoughts and calls.

    A sound, a refusal and a provider's own block are content.
    """
    content = message.content
    if isinstance(content, str):
        if content and not content.isspace():
            return True
    elif any(map(_has_content, content)):
        return True
    kwargs = message.additional_kwargs
    if not kwargs or not isinstance(message, AIMessage):
        return False
    return any(map(kwargs.get, _SPOKEN)) or any(map(_has_content, iter_blocks(message)))


def has_block(message: BaseMessage, types: frozenset[str]) -> bool:
    """Return whether the content of a message has a block of one of these types."""
    content = message.content
    return not isinstance(content, str) and any(
        isinstance(block, dict) and block.get("type") in types for block in content
    )


def _has_content(block: object) -> bool:
    if not isinstance(block, Mapping):
        return bool(str(block).strip())
    block = unwrap_block(block)
    kind = block.get("type")
    if kind in _SILENT_BLOCKS or block.keys() <= _SILENT_KEYS:
        return False
    if kind in ("text", "refusal"):
        return bool(str(block.get(kind) or "").strip())
    return True

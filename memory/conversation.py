"""The structure of a conversation: turns, and the units of messages within them.

A *turn* is a human message and all messages after it up to the next human message. Messages that no
human message precedes are a turn, too. A *unit* is one or more messages that are kept or removed
together. An *exchange* is a unit of an AI message that calls tools and the result of each call.
Providers refuse results without their call, calls without all of their results, and empty AI
messages, so a request contains none of these.
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
"""Messages that are kept or removed together: one message, or a message with calls and results."""
Role = Literal["human", "ai", "tool", "system", "chat", "other"]

_BASES: Final[Sequence[tuple[type[BaseMessage], Role]]] = (
    (HumanMessage, "human"),
    (AIMessage, "ai"),
    (ToolMessage, "tool"),
    (SystemMessage, "system"),
    (ChatMessage, "chat"),
)
REASONING_BLOCKS: Final = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning_content"}
)
"""Types of the content blocks with reasoning."""
# types of content blocks that show the user nothing
_SILENT_BLOCKS: Final = REASONING_BLOCKS | CALL_BLOCKS | {"function_call_signature"}
_SILENT_KEYS: Final = frozenset({"id", "index"})  # keys of the empty blocks that streaming leaves
_ANSWER_KEYS: Final = ("audio", "refusal")  # keys of additional_kwargs with an answer of OpenAI's
SHORTENED: Final = "perdure_shortened"
"""Key in the additional_kwargs of a message that is shorter than its original in the history.

The value is `"cut"` if the middle of the text was removed, and `"cleared"` if the content was
replaced by a placeholder. The key is not sent to providers.
"""


class Turn(NamedTuple):
    """A human message and the messages after it, or messages that no human message precedes.

    Attributes:
        units: The units that a provider accepts. A human message is first, if the turn has one.
        messages: All messages of the turn.
    """

    units: list[Unit]
    messages: Messages


def role(message: BaseMessage) -> Role:
    """Return the role of a message."""
    kind = _find_role(type(message))
    human = kind == "chat" and getattr(message, "role", None) in ("user", "human")
    return "human" if human else kind


@cache  # six times as fast as `isinstance` for each base class
def _find_role(kind: type) -> Role:
    return next((role for base, role in _BASES if issubclass(kind, base)), "other")


def iter_turn_ranges(messages: Messages) -> Iterator[range]:
    """Yield the positions of each turn, newest first.

    A human message without content begins a turn only if it is the newest human message. A human
    message that contains tool results does not begin a turn. Messages before the first human
    message are in no turn. If there is no human message, all messages are one turn.
    """
    stop, newest = len(messages), True
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if role(message) != "human" or not (newest or has_visible_content(message)):
            continue
        if isinstance(message.content, str) or not find_result_ids(message):
            yield range(index, stop)
            stop, newest = index, False
    if newest and messages:
        yield range(len(messages))


def has_visible_content(message: BaseMessage) -> bool:
    """Return whether a message has content other than blank text, reasoning and calls.

    Audio, refusals and provider-specific blocks are content.
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
    return any(map(kwargs.get, _ANSWER_KEYS)) or any(map(_has_content, iter_blocks(message)))


def has_block(message: BaseMessage, types: frozenset[str]) -> bool:
    """Return whether the content of a message has a block of one of these types."""
    content = message.content
    return not isinstance(content, str) and any(
        isinstance(block, dict) and block.get("type") in types for block in content
    )


def _has_content(block: object) -> bool:
    """Return whether a content block is not blank text, reasoning, a call or an empty block."""
    if not isinstance(block, Mapping):
        return bool(str(block).strip())
    block = unwrap_block(block)
    kind = block.get("type")
    if kind in _SILENT_BLOCKS or block.keys() <= _SILENT_KEYS:
        return False
    if kind in ("text", "refusal"):
        return bool(str(block.get(kind) or "").strip())
    return True

"""Split a conversation into turns, and each turn into units of messages that belong together.

A *turn* is a human message and all messages after it up to the next human message. Messages that
precede the first human message also form a turn. A *unit* is one or more messages that are kept or
removed together. An *exchange* is a unit that consists of an AI message with tool calls and the
results of these calls. Model providers reject requests that contain a tool result without its call,
a call without all of its results, or an empty AI message. In every request that perdure builds,
each tool result has its call, each call has all its results, and no AI message is empty.
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
from perdure.memory.tool_calls import (
    iter_content_blocks,
    list_call_ids_of_results,
    unwrap_non_standard_block,
)

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
"""The types of content blocks that contain reasoning."""
# types of content blocks that are not visible to the user
_SILENT_BLOCKS: Final = REASONING_BLOCKS | CALL_BLOCKS | {"function_call_signature"}
# Keys of a content block that hold no content, namely the block's id and index. A content block
# with no other keys counts as empty. Streaming a model's answer can leave such empty blocks in a
# message.
_SILENT_KEYS: Final = frozenset({"id", "index"})
# keys of `additional_kwargs` in which OpenAI responses can store content
_ANSWER_KEYS: Final = ("audio", "refusal")
SHORTENED: Final = "perdure_shortened"
"""Key in the additional_kwargs of a message that is shorter than its original in the history.

The value is `"cut"` if the middle of the text was removed, and `"cleared"` if the content was
replaced by a placeholder. The key is not sent to providers.
"""


class Turn(NamedTuple):
    """A turn of a conversation.

    A turn consists of a human message and all messages up to the next human message. Messages that
    precede the first human message form a turn of their own.

    Attributes:
        units: The units to send to a provider. If the turn has a human message, that message is the
            first unit.
        messages: All messages of the turn.
    """

    units: list[Unit]
    messages: Messages


def get_role(message: BaseMessage) -> Role:
    """Return the role of a message.

    A `ChatMessage` with the role "user" or "human" counts as a human message.
    """
    kind = _find_role(type(message))
    human = kind == "chat" and getattr(message, "role", None) in ("user", "human")
    return "human" if human else kind


# The role of each message class is cached, because a cache lookup is six times as fast as an
# `isinstance` check for each base class.
@cache
def _find_role(kind: type) -> Role:
    return next((role for base, role in _BASES if issubclass(kind, base)), "other")


def iter_turn_ranges(messages: Messages) -> Iterator[range]:
    """Yield the range of message indices for each turn, latest turn first.

    A turn begins with a human message that contains no tool results. The latest human message that
    contains no tool results begins a turn, even if the content of this message is blank. A human
    message before the start of the latest turn begins an earlier turn only if the message has
    visible content and contains no tool results. The ranges do not include the messages before the
    first human message. The function `tool_call_matching.iter_turns` yields these messages as a
    separate turn. If there is no human message, yield a single range that covers all messages.
    """
    stop, newest = len(messages), True
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if get_role(message) != "human" or not (newest or has_visible_content(message)):
            continue
        if isinstance(message.content, str) or not list_call_ids_of_results(message):
            yield range(index, stop)
            stop, newest = index, False
    if newest and messages:
        yield range(len(messages))


def has_visible_content(message: BaseMessage) -> bool:
    """Return whether a message has content that a user can see.

    Audio, refusals and provider-specific blocks count as visible content. Blank text, reasoning and
    tool calls do not count as visible content.
    """
    content = message.content
    if isinstance(content, str):
        if content and not content.isspace():
            return True
    elif any(map(_is_visible_block, content)):
        return True
    kwargs = message.additional_kwargs
    if not kwargs or not isinstance(message, AIMessage):
        return False
    return any(map(kwargs.get, _ANSWER_KEYS)) or any(
        map(_is_visible_block, iter_content_blocks(message))
    )


def has_block_of_type(message: BaseMessage, types: frozenset[str]) -> bool:
    """Return whether a message contains a content block of one of the given types."""
    content = message.content
    return not isinstance(content, str) and any(
        isinstance(block, dict) and block.get("type") in types for block in content
    )


def _is_visible_block(block: object) -> bool:
    """Return whether a content block contains anything that is visible to the user.

    Blank text, reasoning, tool calls and empty blocks do not count as visible content.
    """
    if not isinstance(block, Mapping):
        return bool(str(block).strip())
    block = unwrap_non_standard_block(block)
    kind = block.get("type")
    if kind in _SILENT_BLOCKS or block.keys() <= _SILENT_KEYS:
        return False
    if kind in ("text", "refusal"):
        return bool(str(block.get(kind) or "").strip())
    return True

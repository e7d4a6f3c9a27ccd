"""What a message costs, given what its texts cost: OpenAI's published rule, and a memo of counts.

The rule is exact for roles, names and texts. For the rest OpenAI publishes none: tool calls follow
langchain-openai's, and files are bounded by their size.

Source: https://cookbook.openai.com/examples/how_to_count_tokens_with_tiktoken (part 6)
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage

from perdure.errors import InvalidMessages
from perdure.memory.conversation import role
from perdure.memory.image_tokens import FILES, IMAGES, Size, file_tokens, is_low, pixels
from perdure.memory.tool_tokens import tool_tokens

T = TypeVar("T")

REPLY = 3
"""Every reply is primed with the start of a message."""

MESSAGE = 4
"""A message's frame, three tokens, and its role, which is one."""

_NAME, _CALL, _CALL_ID = 1, 3, 3
_REMEMBERED = 1 << 15
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)  # made once: three times as fast
_CALLS: Final = frozenset(
    {"tool_use", "tool_call", "tool_call_chunk", "function_call", "input_json_delta"}
)
_TEXTS: Final = ("text", "reasoning", "thinking", "refusal")


class Memo(Generic[T]):
    """Remembers counts by the hash of what was counted, never by its identity, and holds no text.

    A checkpointer gives fresh copies each turn, so only content tells what is new. Two generations
    make it a least-recently-used cache whose hit is one lookup. Threads may share it: what a race
    between them loses is counted again.

    Args:
        count: Counts what has not been seen.
        size: Counts of one generation; at most twice as many are held, some 100 bytes each.
    """

    def __init__(self, count: Callable[[T], int], size: int = _REMEMBERED) -> None:
        self._count = count
        self._size = size
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __call__(self, what: T, content: Hashable) -> int:
        """The count of what has this content, remembered or new."""
        key = hash(content)
        count = self._young.get(key)
        return self._missed(what, key) if count is None else count

    def _missed(self, what: T, key: int) -> int:
        count = self._old.get(key)
        if count is None:
            count = self._count(what)
        if len(self._young) >= self._size:
            self._old, self._young = self._young, {}
        self._young[key] = count
        return count


class CountsByText(ABC):
    """A `TokenCounter` of which only the counting of texts, and of images, is missing.

    Attributes:
        request: Tokens of a request besides its messages and tools.
        function: Tokens that the schema of a function begins with.
    """

    request = REPLY
    function = 7

    @abstractmethod
    def text(self, text: str) -> int:
        """Tokens of a text by itself."""

    @abstractmethod
    def image(self, size: Size | None, low: bool) -> int:
        """Tokens of an image, of which the size may be unknown."""

    def message(self, message: BaseMessage) -> int:
        """Tokens of a message: frame, role and name, content, tool calls.

        Raises:
            InvalidMessages: It is no message.
        """
        try:
            content, name = message.content, message.name
        except AttributeError as exc:
            raise InvalidMessages(
                f"{message!r:.80} is a {type(message).__name__}; expected a langchain message"
            ) from exc
        total = MESSAGE + (self.text(content) if type(content) is str else self._blocks(message))
        if name:
            total += _NAME + self.text(name)
        kind = role(message)
        if kind == "human" or kind == "system":
            return total
        return total + self._beyond_content(message, kind)

    def tools(self, tools: Sequence[Any]) -> int:
        """Tokens of the schemas of tools, in any form that `bind_tools` takes.

        Raises:
            ConfigurationError: One of them is no tool.
        """
        return tool_tokens(tools, self.text, self.function)

    def _beyond_content(self, message: BaseMessage, kind: str) -> int:
        if kind == "tool":
            return _CALL_ID
        if kind == "ai":
            assert isinstance(message, AIMessage)
            if message.tool_calls or message.invalid_tool_calls:
                calls = [*message.tool_calls, *message.invalid_tool_calls]
                return sum(self._call(call["name"], call["args"]) for call in calls)
            legacy = message.additional_kwargs.get("function_call")
            return self._call(legacy.get("name"), legacy.get("arguments")) if legacy else 0
        if isinstance(message, ChatMessage):
            return self.text(message.role) - 1  # MESSAGE has one token for a role
        return 0

    def _call(self, name: str | None, arguments: Any) -> int:
        return _CALL + self.text(name or "") + self.text(as_json(arguments))

    def _blocks(self, message: BaseMessage) -> int:
        """Tokens of content in blocks, without the tool calls that the message lists itself."""
        listed = isinstance(message, AIMessage) and (
            message.tool_calls or message.invalid_tool_calls
        )
        return sum(
            self._block(block)
            for block in message.content
            if not (listed and isinstance(block, dict) and block.get("type") in _CALLS)
        )

    def _block(self, block: Any) -> int:
        if not isinstance(block, Mapping):
            return self.text(str(block))
        kind = block.get("type")
        if kind in IMAGES:
            return self.image(pixels(block), is_low(block))
        text = _text_in(block)
        if text is not None:
            return self.text(text)
        if kind in FILES:
            return file_tokens(block)
        if isinstance(block.get("content"), list):  # a tool's result, as Anthropic writes it
            return _CALL_ID + sum(map(self._block, block["content"]))
        return self.text(as_json(block))


def as_json(value: Any) -> str:
    """A value as a model is shown it; a text is JSON already."""
    if isinstance(value, str):
        return value
    return _JSON.encode(value)


def _text_in(block: Mapping[str, Any]) -> str | None:
    """The text that a block is for; None if it is for something else."""
    for key in _TEXTS:
        text = block.get(key)
        if isinstance(text, str) and (text or block.get("type") == key):
            return text
    source = block.get("source")  # a document of Anthropic's that is plain text
    if isinstance(source, Mapping) and source.get("type") == "text":
        return str(source.get("data", ""))
    return None

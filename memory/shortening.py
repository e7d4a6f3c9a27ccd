"""Shortening one message to a number of tokens: its longest text loses its middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from langchain_core.messages import BaseMessage

Measure = Callable[[BaseMessage], int]
_HEAD: Final = 0.7  # of what stays; questions come first, what they are about after it


def shortened(message: BaseMessage, limit: int, measure: Measure) -> BaseMessage | None:
    """A copy that takes at most `limit`; None if no text of it is long enough to lose that much."""
    text = _longest(message)
    low, high = 0, len(text)  # as many characters as stay
    best = None
    while low < high:
        middle = (low + high) // 2
        tried = _with_text(message, _cut(text, middle))
        if measure(tried) <= limit:
            best, low = tried, middle + 1
        else:
            high = middle
    return best


def _cut(text: str, keep: int) -> str:
    head = int(keep * _HEAD)
    tail = keep - head
    mark = f"[… {len(text) - keep:,} characters left out …]"
    parts = (text[:head].rstrip(), mark, text[len(text) - tail :].lstrip())
    return "\n".join(part for part in parts if part)


def _longest(message: BaseMessage) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    return max((_text(block) for block in content), key=len, default="")


def _text(block: Any) -> str:
    found = block if isinstance(block, str) else block.get("text")
    return found if isinstance(found, str) else ""


def _with_text(message: BaseMessage, text: str) -> BaseMessage:
    content = message.content
    if isinstance(content, str):
        return message.model_copy(update={"content": text})
    longest = max(range(len(content)), key=lambda i: len(_text(content[i])))
    block = content[longest]
    blocks = list(content)
    blocks[longest] = text if isinstance(block, str) else {**block, "text": text}
    return message.model_copy(update={"content": blocks})

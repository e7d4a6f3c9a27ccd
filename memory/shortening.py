"""Shortening: a text loses its middle, a message the middle of its longest text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from langchain_core.messages import BaseMessage

Measure = Callable[[BaseMessage], int]
SHORTENED: Final = "perdure_shortened"
"""In additional_kwargs, which no provider is sent: what became of a message, whose original is
longer. `"cut"`: its middle is left out, `"cleared"`: a marker is in its place."""

_HEAD: Final = 0.7  # of what stays; questions come first, what they are about after it


def shortened(message: BaseMessage, limit: int, measure: Measure) -> BaseMessage | None:
    """A copy that takes at most `limit`, marked `SHORTENED`; None if no text is long enough."""
    text = _longest(message)
    low, high = 0, len(text)  # as many characters as stay
    best = None
    while low < high:
        middle = (low + high) // 2
        tried = _with_text(message, middle_out(text, middle))
        if measure(tried) <= limit:
            best, low = tried, middle + 1
        else:
            high = middle
    return best


def middle_out(text: str, keep: int) -> str:
    """The beginning and the end of a text, `keep` characters together, and what is left out."""
    if len(text) <= keep:
        return text
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
        return _marked(message, text)
    longest = max(range(len(content)), key=lambda i: len(_text(content[i])))
    block = content[longest]
    blocks = list(content)
    blocks[longest] = text if isinstance(block, str) else {**block, "text": text}
    return _marked(message, blocks)


def _marked(message: BaseMessage, content: Any) -> BaseMessage:
    kwargs = {**message.additional_kwargs, SHORTENED: "cut"}
    return message.model_copy(update={"content": content, "additional_kwargs": kwargs})

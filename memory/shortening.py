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
    content: Any = message.content
    blocks: list[Any] = [content] if isinstance(content, str) else list(content)
    longest = max(range(len(blocks)), key=lambda place: len(_text(blocks[place])), default=0)
    text = _text(blocks[longest]) if blocks else ""
    kwargs = {**message.additional_kwargs, SHORTENED: "cut"}

    def cut(keep: int) -> BaseMessage:
        made: Any = middle_out(text, keep)
        if not isinstance(content, str):
            block = made if isinstance(blocks[longest], str) else {**blocks[longest], "text": made}
            made = [*blocks[:longest], block, *blocks[longest + 1 :]]
        return message.model_copy(update={"content": made, "additional_kwargs": kwargs})

    low, high = 0, len(text)  # as many characters as stay
    best = None
    while low < high:
        middle = (low + high) // 2
        tried = cut(middle)
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


def _text(block: Any) -> str:
    found = block if isinstance(block, str) else block.get("text")
    return found if isinstance(found, str) else ""

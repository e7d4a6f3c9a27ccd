"""Messages, and other values of a state, in the form in which pages show them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from perdure.server.reply import encoded

LONG: Final = 4_000  # characters of a text that a page shows; a link leads to the whole
SHORT: Final = 160  # of a value in a list of changes
_CALLS: Final = frozenset({"tool_use", "tool_call", "function_call", "server_tool_call"})
_DATA: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.-]+)*;base64,[A-Za-z0-9+/=]{64,}")


def shown(value: Any, long: int = LONG) -> dict[str, Any]:
    """A message, or another element of a channel, by its blocks and calls."""
    if not isinstance(value, BaseMessage):
        text, more = cut(as_text(value), long)
        none = dict.fromkeys(("id", "name", "at", "model", "failed"))
        blocks = [{"kind": "text", "text": text}]
        return {"type": type(value).__name__, **none, "blocks": blocks, "calls": [], "more": more}
    known = value.response_metadata
    blocks, more = [], 0
    for kind, text in _blocks(value):
        text, rest = cut(text, long)
        blocks.append({"kind": kind, "text": text})
        more += rest
    calls = []
    for call in (
        [*value.tool_calls, *value.invalid_tool_calls] if isinstance(value, AIMessage) else []
    ):
        text, rest = cut(as_text(call["args"]), long)
        calls.append({"id": call["id"], "name": call["name"], "args": text})
        more += rest
    return {
        "type": value.type,
        "id": value.id,
        "name": value.name,
        "at": _moment(known.get("create_time")),
        "model": known.get("model_name") or known.get("model"),
        "failed": isinstance(value, ToolMessage) and value.status == "error",
        "blocks": blocks,
        "calls": calls,
        "more": more,
    }


def short(value: Any) -> str:
    """The beginning of a value, in one line."""
    text = value.text if isinstance(value, BaseMessage) else as_text(value)
    if isinstance(value, AIMessage) and not text:
        text = ", ".join(f"{call['name']}(…)" for call in value.tool_calls)
    return cut(" ".join(text[: 4 * SHORT].split()), SHORT)[0]


def as_text(value: Any) -> str:
    """A text as it is, another value as JSON."""
    return value if isinstance(value, str) else encoded(value).decode()


def cut(text: str, long: int) -> tuple[str, int]:
    """The beginning of a text, and how many characters are left out."""
    return (text, 0) if len(text) <= long else (text[:long], len(text) - long)


def _blocks(message: BaseMessage) -> Iterator[tuple[str, str]]:
    content = message.content
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str) or not isinstance(block, Mapping):
            yield "text", _DATA.sub(r"[\1]", as_text(block))
            continue
        kind = str(block.get("type") or "")
        if kind in _CALLS and isinstance(message, AIMessage) and message.tool_calls:
            continue
        text = block.get("text") or block.get("reasoning") or block.get("thinking")
        if not isinstance(text, str) or not kind:
            yield "other", f"[{kind}]" if kind else _DATA.sub(r"[\1]", as_text(block))
        else:
            yield "text" if kind == "text" else "reasoning", text


def _moment(seconds: Any) -> datetime | None:
    with suppress(TypeError, ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(seconds, UTC)
    return None

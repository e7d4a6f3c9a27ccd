"""A conversation as text for another model to read: data between delimiters, not instructions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from perdure.memory.conversation import CALL_BLOCKS, THOUGHT_BLOCKS
from perdure.memory.quotation import middle_out, undelimited

TOOL_CHARS: Final = 2_000
"""How much of a tool's result, or of the arguments of a call, is shown; the middle is left out."""

_OMITTED: Final = "[earlier messages are left out]"
_ROLES: Final = {"human": "user", "ai": "assistant"}
_UNSHOWN: Final = THOUGHT_BLOCKS | CALL_BLOCKS | {"tool_call_chunk", "invalid_tool_call"}
_NAMES: Final = {"image_url": "image", "input_image": "image", "input_audio": "audio"}


def rendered(message: BaseMessage) -> str:
    r"""A message as `role (name): text`, further lines indented; "" if it has no text or calls.

    >>> from langchain_core.messages import HumanMessage
    >>> rendered(HumanMessage("Hi,\nit's me", name="Ann"))
    "user (Ann): Hi,\n    it's me"
    """
    if isinstance(message, RemoveMessage | SystemMessage):
        return ""
    content = message.content
    blocks = [content] if isinstance(content, str) else content
    text = "\n".join(filter(None, map(_block, blocks)))
    if isinstance(message, ToolMessage):
        text = middle_out(text, TOOL_CHARS)
    parts = [part for part in (text, *_calls(message)) if part]
    if not parts:
        return ""
    indented = "\n".join(parts).replace("\n", "\n    ")  # so that no line looks like a role's
    return f"{_role(message)}: {undelimited(indented)}"


def units_of(messages: Sequence[BaseMessage]) -> list[list[str]]:
    """The messages rendered, the results of tools together with what precedes them."""
    units: list[list[str]] = []
    for message in messages:
        text = rendered(message)
        if not text:
            continue
        if units and isinstance(message, ToolMessage):
            units[-1].append(text)
        else:
            units.append([text])
    return units


def newest(units: Sequence[str], room: int) -> str:
    """As many of the newest units as fit into `room` characters; of the newest its end."""
    kept: list[str] = []
    for unit in reversed(units):
        room -= len(unit) + 1
        if room < 0:
            if not kept:
                kept.append(unit[-room:])
            kept.append(_OMITTED)
            break
        kept.append(unit)
    return "\n".join(reversed(kept))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ToolMessage):
        role = f"tool {message.name}" if message.name else "tool"
        role += " (error)" if message.status == "error" else ""
    elif isinstance(message, ChatMessage):
        role = message.role
    else:
        role = _ROLES.get(message.type, message.type)
        role += f" ({message.name})" if message.name else ""
    return undelimited(" ".join(role.split()))


def _block(block: Any) -> str:
    """A block's text; of a block without text, its kind."""
    if isinstance(block, str):
        return block.strip()
    kind = str(block.get("type") or "something")
    if isinstance(block.get("text"), str):
        return str(block["text"]).strip()
    if kind in _UNSHOWN:
        return ""
    nested = block.get("file")
    named = nested if isinstance(nested, dict) else block
    name = named.get("filename") or named.get("name") or named.get("title")
    kind = _NAMES.get(kind, kind)
    return f"[{kind} {name}]" if isinstance(name, str) else f"[{kind}]"


def _calls(message: BaseMessage) -> list[str]:
    if not isinstance(message, AIMessage):
        return []
    calls = [
        (call["name"], json.dumps(call["args"], ensure_ascii=False, default=str))
        for call in message.tool_calls
    ]
    calls += [(call["name"] or "?", call["args"] or "") for call in message.invalid_tool_calls]
    return [f"calls {name}({middle_out(arguments, TOOL_CHARS)})" for name, arguments in calls]

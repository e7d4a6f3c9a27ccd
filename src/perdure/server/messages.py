"""Messages, other values of a state, and changes of state, as pages show them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from perdure.checkpointers import StateDifference
from perdure.memory.quotation import block_name
from perdure.server.reply import encoded

LONG: Final = 4_000  # characters of a text that a page shows; a link leads to the whole
SHORT: Final = 160  # of a value in a list of changes
_CALLS: Final = frozenset({"tool_use", "tool_call", "function_call", "server_tool_call"})
_ID: Final = re.compile(
    r"(?:\w+-{1,2})?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:-\d+)?|[0-9a-f]{32}"
    r"|(?:call|chatcmpl|msg|resp|run|toolu)[_-][\w-]{12,}"
)
"""An id that a program made, of a message, a tool call or a run."""
_DATA: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.-]+)*;base64,[A-Za-z0-9+/=]{64,}")


def shown(value: Any, long: int = LONG) -> dict[str, Any]:
    """A message, or another element of a channel: what it is, its blocks and its tool calls."""
    message = value if isinstance(value, BaseMessage) else None
    known = message.response_metadata if message else {}
    calls = [*value.tool_calls, *value.invalid_tool_calls] if isinstance(value, AIMessage) else []
    row: dict[str, Any] = {
        "type": message.type if message else type(value).__name__,
        "id": message and message.id,
        "name": message and message.name,
        "at": _moment(known.get("create_time")),
        "model": known.get("model_name") or known.get("model"),
        "failed": isinstance(value, ToolMessage) and value.status == "error",
        "blocks": [
            {"kind": kind, "text": text}
            for kind, text in (_blocks(message) if message else [("text", as_text(value))])
        ],
        "calls": [
            {n: call[n] for n in ("id", "name")} | {"text": as_text(call["args"])} for call in calls
        ],
        "more": 0,
    }
    for part in (*row["blocks"], *row["calls"]):
        part["text"], more = cut(part["text"], long)
        row["more"] += more
    return row


def short(value: Any) -> str:
    """The beginning of a value, in one line."""
    text = value.text if isinstance(value, BaseMessage) else as_text(value)
    if isinstance(value, AIMessage) and not text:
        text = ", ".join(f"{call['name']}(…)" for call in value.tool_calls)
    return cut(" ".join(text[: 4 * SHORT].split()), SHORT)[0]


def as_text(value: Any) -> str:
    """A text as it is, another value as JSON."""
    return value if isinstance(value, str) else encoded(value).decode()


def are_ids(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the lines of a value are ids alone, which pages fold."""
    return bool(lines) and all(_ID.fullmatch(line["text"]) for line in lines)


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
            yield "other", block_name(block) if kind else _DATA.sub(r"[\1]", as_text(block))
        else:
            yield "text" if kind == "text" else "reasoning", text


def _moment(seconds: Any) -> datetime | None:
    with suppress(TypeError, ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(seconds, UTC)
    return None


def changes(change: StateDifference) -> list[dict[str, Any]]:
    """The elements added and removed, by channel; langgraph's triggers of nodes are left out."""
    out = []
    for channel, each in change.channels.items():
        if channel.startswith(("branch:to:", "__")):
            continue
        removed, lines = dict(each.removed), []
        for value in each.added.values():
            # what it replaces: an element of the same id, or the value of a channel stored whole
            replaced = [at for at, old in removed.items() if each.whole or _same(old, value)][:1]
            lines += [_line("-", removed.pop(at)) for at in replaced] + [_line("+", value)]
        lines += [_line("-", value) for value in removed.values()]
        out.append(
            {
                "channel": channel,
                "added": each.added_count,
                "removed": each.removed_count,
                "whole": each.whole,
                "lines": lines,
                "left": each.added_count + each.removed_count - len(lines),
            }
        )
    return out


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, BaseMessage) and isinstance(new, BaseMessage):
        return old.id is not None and old.id == new.id
    return _is_pair(old) and _is_pair(new) and bool(old[0] == new[0])


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _line(sign: str, value: Any) -> dict[str, Any]:
    named = _is_pair(value) and isinstance(value[0], str)
    text = f"{value[0]}: {short(value[1])}" if named else short(value)
    return {"sign": sign, "type": getattr(value, "type", None), "text": text}

"""ChatGPT's export: `conversations.json`, an array of conversations, each a tree of messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from langchain_core.messages import BaseMessage, convert_to_messages
from pydantic import BaseModel, ValidationError

from perdure.cli.transcripts import Conversation, Node, about, fault, made_up_id
from perdure.errors import ImportFailed

# kinds that are text: one without any is a place that ChatGPT keeps, and nothing is lost with it
_TEXT: Final = {None, "text", "multimodal_text", "code", "execution_output"}


class _Author(BaseModel):
    role: Literal["user", "assistant", "system", "tool"]
    name: str | None = None


class _Content(BaseModel):
    content_type: str | None = None
    parts: list[Any] | None = None
    text: str | None = None
    result: str | None = None


class _Message(BaseModel):
    author: _Author
    content: _Content
    create_time: float | None = None
    metadata: Any = None


class _Node(BaseModel):
    message: _Message | None = None
    parent: str | None = None


class _Export(BaseModel):
    mapping: dict[str, _Node]
    current_node: str | None = None
    conversation_id: str | None = None
    id: str | None = None


def from_export(path: Path, text: str) -> Iterator[Conversation]:
    """The conversations of an export.

    Raises:
        ImportFailed: It is malformed: says where and why.
    """
    decoder = json.JSONDecoder()
    at, line, number = text.index("[") + 1, 1, 0
    counted = 0  # up to where line ends have been counted
    while True:
        while at < len(text) and (text[at].isspace() or text[at] == ","):
            at += 1
        line += text.count("\n", counted, at)
        counted = at
        if at >= len(text):
            raise ImportFailed(f"{str(path)!r}, line {line}: the file ends within its array")
        if text[at] == "]":
            return
        try:
            found, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as exc:
            raise ImportFailed(f"{str(path)!r}, line {exc.lineno}: {exc.msg}") from exc
        number += 1
        read = conversation(f"{str(path)!r}, conversation {number} (line {line})", found)
        yield replace(read, until=at / len(text))


def conversation(where: str, found: Any) -> Conversation:
    """One conversation of an export.

    Args:
        where: How errors name its place.
        found: Its JSON.

    Raises:
        ImportFailed: It is malformed: says where and why.
    """
    export = _checked(where, found)
    nodes = export.mapping
    parents = {key: node.parent if node.parent in nodes else None for key, node in nodes.items()}
    shown = export.current_node if export.current_node in nodes else _newest_leaf(nodes, parents)
    main = _climb(where, parents, shown, {})
    order: dict[str, None] = {}
    on_main = set(main)
    for key in nodes:
        if key not in on_main:
            order.update(dict.fromkeys(_climb(where, parents, key, order)))
    order.update(dict.fromkeys(main))
    left_out: Counter[str] = Counter()
    said = {
        key: message for key in order if (message := _message(key, nodes[key].message, left_out))
    }
    above: dict[str, str | None] = {}
    for key in order:  # a node follows its nearest ancestor that says something
        parent = parents[key]
        above[key] = parent if parent in said else above.get(parent or "")
    name = export.conversation_id or export.id or made_up_id("conversation", sorted(nodes))
    leaf = next((key for key in reversed(main) if key in said), None)
    kept = [Node(key, above[key], said[key]) for key in order if key in said]
    return Conversation(name, kept, leaf, about(found), dict(left_out))


def _checked(where: str, found: Any) -> _Export:
    if isinstance(found, dict) and "mapping" not in found and found.keys() & {"role", "messages"}:
        raise ImportFailed(
            f"{where}: has no 'mapping', so it is not ChatGPT's; messages of OpenAI's form are "
            "read as JSONL, one object per line with no brackets around them"
        )
    try:
        return _Export.model_validate(found)
    except ValidationError as exc:
        place, reason = fault(exc)
        inside = f", message {place[1]!r}" if place[:1] == ["mapping"] and place[1:] else ""
        name = ".".join(map(str, place[3:] if inside else place))
        raise ImportFailed(f"{where}{inside}: {repr(name) if name else 'it'} {reason}") from exc


def _climb(
    where: str, parents: dict[str, str | None], key: str | None, known: dict[str, None]
) -> list[str]:
    """A node and its ancestors up to a known one, the oldest first."""
    path: dict[str, None] = {}
    while key is not None and key not in known:
        if key in path:
            raise ImportFailed(f"{where}, message {key!r}: is its own ancestor")
        path[key] = None
        key = parents[key]
    return list(path)[::-1]


def _newest_leaf(nodes: dict[str, _Node], parents: dict[str, str | None]) -> str | None:
    inner = set(parents.values())
    leaves = [key for key in nodes if key not in inner]
    return max(leaves, key=lambda key: _time(nodes[key]), default=None)


def _time(node: _Node) -> float:
    return (node.message.create_time if node.message else None) or 0.0


def _message(key: str, found: _Message | None, left_out: Counter[str]) -> BaseMessage | None:
    """A node's message; None for the empty ones that ChatGPT keeps for itself."""
    if found is None:
        return None
    text = _text(found.content)
    hidden = isinstance(found.metadata, dict) and found.metadata.get(
        "is_visually_hidden_from_conversation"
    )
    if hidden or not text:
        if text or found.content.content_type not in _TEXT:
            left_out["hidden" if hidden else str(found.content.content_type)] += 1
        return None
    role: str = found.author.role
    if role == "tool":  # ChatGPT's own tools: their calls are not in the export, so no pair to keep
        role, text = "assistant", f"[{found.author.name or 'tool'}] {text}"
    time = {} if found.create_time is None else {"create_time": found.create_time}
    (message,) = convert_to_messages(
        [{"role": role, "content": text, "id": key, "response_metadata": time}]
    )
    return message


def _text(content: _Content) -> str:
    if content.parts is None:
        return content.text or content.result or ""
    texts = [
        part
        if isinstance(part, str)
        else str(part.get("text") or f"[{part.get('content_type', 'attachment')}]")
        for part in content.parts
        if isinstance(part, str | dict)
    ]
    return "\n".join(text for text in texts if text)

"""Conversations from files: ChatGPT's `conversations.json`, and JSONL of OpenAI-style messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from langchain_core.messages import BaseMessage, convert_to_messages

from perdure.errors import ImportFailed

_ROLES = {"user", "assistant", "system", "tool"}


@dataclass(frozen=True, slots=True)
class Node:
    """One message, and the node it followed."""

    id: str
    parent: str | None
    message: BaseMessage


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as a tree of messages: parents before children, the main branch last.

    `leaf` is the node where the main branch ends.
    """

    id: str
    nodes: list[Node]
    leaf: str | None


def read(path: Path) -> Iterator[Conversation]:
    """The conversations of a file, one after the other; the good ones before a fault come first.

    Raises:
        ImportFailed: The file is missing, or malformed: says where and why.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = _first_character(file)
            if first == "[":
                yield from _chatgpt(path, file.read())
            elif first == "{":
                yield from _jsonl(path, file)
            else:
                raise ImportFailed(
                    f"{str(path)!r} begins with {first!r}; expected ChatGPT's conversations.json "
                    "(a JSON array) or JSONL (an object on each line)"
                )
    except UnicodeDecodeError as exc:
        raise ImportFailed(f"{str(path)!r} is not UTF-8 text: {exc}") from exc
    except OSError as exc:
        raise ImportFailed(f"{str(path)!r} cannot be read: {exc.strerror}") from exc


def _first_character(file: TextIO) -> str:
    while (character := file.read(1)).isspace():
        pass
    file.seek(0)
    return character


def _node_id(*parts: object) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "perdure:" + json.dumps(parts, default=str)))


# -- ChatGPT's export


def _chatgpt(path: Path, text: str) -> Iterator[Conversation]:
    decoder = json.JSONDecoder()
    at, number = text.index("[") + 1, 0
    while True:
        while at < len(text) and (text[at].isspace() or text[at] == ","):
            at += 1
        line = text.count("\n", 0, at) + 1
        if at >= len(text):
            raise ImportFailed(f"{str(path)!r}, line {line}: the file ends within its array")
        if text[at] == "]":
            return
        try:
            found, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as exc:
            raise ImportFailed(f"{str(path)!r}, line {exc.lineno}: {exc.msg}") from exc
        number += 1
        where = f"{str(path)!r}, conversation {number} (line {line})"
        yield _chatgpt_conversation(where, found)


def _chatgpt_conversation(where: str, found: Any) -> Conversation:
    mapping = found.get("mapping") if isinstance(found, dict) else None
    if not isinstance(mapping, dict):
        raise ImportFailed(f"{where}: expected an object with a 'mapping' of messages")
    name = found.get("conversation_id") or found.get("id")
    if not isinstance(name, str):
        name = _node_id("conversation", sorted(mapping))
    order = _tree_order(where, mapping)
    main = _path(mapping, found.get("current_node") or _newest_leaf(mapping, order))
    on_main = set(main)
    nodes: dict[str, Node] = {}
    above: dict[str, str | None] = {}
    for key in [*(k for k in order if k not in on_main), *main]:
        entry = mapping[key]
        message = _chatgpt_message(f"{where}, message {key!r}", key, entry.get("message"))
        if message is not None:
            nodes[key] = Node(key, None, message)
    for key in order:  # a node's parent is its nearest ancestor that says something
        parent = mapping[key].get("parent")
        above[key] = parent if parent in nodes else above.get(parent)
    ordered = [k for k in order if k in nodes and k not in on_main]
    ordered = _parents_first(ordered, [k for k in main if k in nodes], above)
    leaf = next((k for k in reversed(main) if k in nodes), None)
    return Conversation(name, [Node(k, above[k], nodes[k].message) for k in ordered], leaf)


def _parents_first(others: list[str], main: list[str], above: dict[str, str | None]) -> list[str]:
    """Branches, each after what it branches from, and the main branch's own end last."""
    placed: dict[str, None] = {}
    for key in others:
        chain = []
        at: str | None = key
        while at is not None and at not in placed:
            chain.append(at)
            at = above[at]
        placed.update(dict.fromkeys(reversed(chain)))
    placed.update(dict.fromkeys(key for key in main if key not in placed))
    return list(placed)


def _tree_order(where: str, mapping: dict[str, Any]) -> list[str]:
    """Every node, parents first."""
    order: list[str] = []
    waiting = [k for k, v in mapping.items() if not isinstance(v, dict) or not v.get("parent")]
    while waiting:
        key = waiting.pop(0)
        entry = mapping.get(key)
        if not isinstance(entry, dict):
            raise ImportFailed(f"{where}: node {key!r} is {entry!r}; expected an object")
        order.append(key)
        waiting = [c for c in entry.get("children") or [] if c in mapping] + waiting
        if len(order) > len(mapping):
            raise ImportFailed(f"{where}: its messages form a circle")
    return order


def _path(mapping: dict[str, Any], leaf: str | None) -> list[str]:
    path: list[str] = []
    while leaf in mapping and leaf not in path:
        path.append(leaf)
        leaf = mapping[leaf].get("parent")
    return path[::-1]


def _newest_leaf(mapping: dict[str, Any], order: list[str]) -> str | None:
    leaves = [key for key in order if not mapping[key].get("children")]
    return max(leaves, key=lambda k: _time(mapping[k]), default=None)


def _time(entry: dict[str, Any]) -> float:
    created = (entry.get("message") or {}).get("create_time")
    return created if isinstance(created, int | float) else 0.0


def _chatgpt_message(where: str, key: str, found: Any) -> BaseMessage | None:
    """A node's message; None for the empty ones that ChatGPT keeps for itself."""
    if found is None:
        return None
    try:
        role = found["author"]["role"]
        content = found["content"]
        hidden = (found.get("metadata") or {}).get("is_visually_hidden_from_conversation")
    except (KeyError, TypeError) as exc:
        raise ImportFailed(f"{where}: has no {exc}; expected author, role and content") from exc
    if role not in _ROLES:
        raise ImportFailed(f"{where}: its role is {role!r}; expected one of {sorted(_ROLES)}")
    text = _chatgpt_text(content)
    if hidden or not text:
        return None
    if role == "tool":  # ChatGPT's own tools: their calls are not in the export, so no pair to keep
        role, text = "assistant", f"[{found['author'].get('name') or 'tool'}] {text}"
    (message,) = convert_to_messages([{"role": role, "content": text, "id": key}])
    return message


def _chatgpt_text(content: Any) -> str:
    if not isinstance(content, dict):
        return ""
    parts = content.get("parts")
    if parts is None:
        parts = [content.get("text") or content.get("result") or ""]
    texts = [
        part
        if isinstance(part, str)
        else str(part.get("text") or f"[{part.get('content_type', 'attachment')}]")
        for part in parts
        if isinstance(part, str | dict)
    ]
    return "\n".join(text for text in texts if text)


# -- JSONL


def _jsonl(path: Path, file: TextIO) -> Iterator[Conversation]:
    loose: list[dict[str, Any]] = []
    loose_id = ""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{str(path)!r}, line {number}"
        found = _object(where, line)
        if "messages" not in found:
            name = str(found.pop("thread_id", None) or path.stem)
            _check_message(where, found)
            if loose and name != loose_id:
                yield _linear(where, loose_id, loose)
                loose = []
            loose_id = name
            loose.append(found)
            continue
        if loose:
            yield _linear(where, loose_id, loose)
            loose = []
        if not isinstance(found["messages"], list):
            raise ImportFailed(f"{where}: 'messages' is not a list")
        for message in found["messages"]:
            _check_message(where, message)
        name = found.get("thread_id") or found.get("id") or f"{path.stem}-{number}"
        yield _linear(where, str(name), found["messages"])
    if loose:
        yield _linear(f"{str(path)!r}", loose_id, loose)


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as exc:
        raise ImportFailed(f"{where}, column {exc.colno}: {exc.msg}") from exc
    if not isinstance(found, dict):
        raise ImportFailed(f"{where}: expected an object, not {type(found).__name__}")
    return found


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES | {"developer"}:
        role = message.get("role") if isinstance(message, dict) else message
        raise ImportFailed(f"{where}: its role is {role!r}; expected one of {sorted(_ROLES)}")
    if not isinstance(message.get("content", ""), str | list | None):
        raise ImportFailed(
            f"{where}: its content is {message['content']!r}; expected text or parts"
        )


def _linear(where: str, name: str, messages: list[dict[str, Any]]) -> Conversation:
    nodes: list[Node] = []
    parent = None
    for i, given in enumerate(messages):
        key = str(given.get("id") or _node_id(name, i, given.get("role"), given.get("content")))
        try:
            (message,) = convert_to_messages([{"content": "", **given, "id": key}])
        except (ValueError, KeyError, TypeError, NotImplementedError) as exc:
            raise ImportFailed(f"{where}: message {i + 1} of {name!r}: {exc}") from exc
        nodes.append(Node(key, parent, message))
        parent = key
    return Conversation(name, nodes, parent)

"""JSONL of OpenAI-style messages: a message on each line, or a conversation on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from langchain_core.messages import convert_to_messages
from pydantic import BaseModel, ConfigDict, ValidationError

from perdure.cli.transcripts import Conversation, Node, fault, made_up_id, one_line
from perdure.errors import ImportFailed


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant", "system", "tool", "developer"]
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


def from_lines(path: Path, file: TextIO) -> Iterator[Conversation]:
    """The conversations of a file; lines of one message are put together by their thread.

    Raises:
        ImportFailed: A line is malformed. What stood before it comes first.
    """
    threads: dict[str, list[Node]] = {}
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                found = _object(f"{str(path)!r}, line {number}", line)
                if "messages" in found:
                    yield _conversation(path, number, found)
                else:
                    name = str(found.pop("thread_id", None) or path.stem)
                    nodes = threads.setdefault(name, [])
                    nodes.append(_node(f"{str(path)!r}, line {number}", name, nodes, found))
    except ImportFailed:
        yield from _together(threads)
        raise
    yield from _together(threads)


def _together(threads: dict[str, list[Node]]) -> Iterator[Conversation]:
    for name, nodes in threads.items():
        if nodes:
            yield Conversation(name, nodes, nodes[-1].id)


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as exc:
        raise ImportFailed(f"{where}, column {exc.colno}: {exc.msg}") from exc
    if not isinstance(found, dict):
        raise ImportFailed(f"{where}: expected an object, not {type(found).__name__}")
    return found


def _conversation(path: Path, number: int, found: dict[str, Any]) -> Conversation:
    where = f"{str(path)!r}, line {number}"
    if not isinstance(found["messages"], list):
        raise ImportFailed(f"{where}: 'messages' is not a list")
    name = str(found.get("thread_id") or found.get("id") or f"{path.stem}-{number}")
    nodes: list[Node] = []
    for given in found["messages"]:
        nodes.append(_node(f"{where}, message {len(nodes) + 1} of {name!r}", name, nodes, given))
    return Conversation(name, nodes, nodes[-1].id if nodes else None)


def _node(where: str, name: str, before: list[Node], given: Any) -> Node:
    """One message, which follows those before it."""
    try:
        _Message.model_validate(given)
        key = str(
            given.get("id") or made_up_id(name, len(before), given["role"], given.get("content"))
        )
        (message,) = convert_to_messages([{"content": "", **given, "id": key}])
    except ValidationError as exc:
        place, reason = fault(exc)
        field = next((str(part) for part in place if part in _Message.model_fields), "it")
        raise ImportFailed(f"{where}: {field} {reason}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as exc:
        raise ImportFailed(f"{where}: {one_line(exc)}") from exc
    return Node(key, before[-1].id if before else None, message)

"""Conversations from files: which kind a file is, and what the kinds have in common."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import ValidationError

from perdure.errors import ImportFailed

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage


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
    from perdure.cli.chatgpt import from_export
    from perdure.cli.jsonl import from_lines

    try:
        with path.open(encoding="utf-8-sig") as file:
            first = _first_character(file)
            if first == "[":
                yield from from_export(path, file.read())
            elif first == "{":
                yield from from_lines(path, file)
            else:
                raise ImportFailed(
                    f"{str(path)!r} begins with {first!r}; expected ChatGPT's conversations.json "
                    "(a JSON array) or JSONL (an object on each line)"
                )
    except UnicodeDecodeError as exc:
        raise ImportFailed(f"{str(path)!r} is not UTF-8 text: {exc}") from exc
    except OSError as exc:
        raise ImportFailed(f"{str(path)!r} cannot be read: {exc.strerror}") from exc
    except RecursionError as exc:
        raise ImportFailed(f"{str(path)!r} is nested too deeply to be a conversation") from exc


def _first_character(file: TextIO) -> str:
    while (character := file.read(1)).isspace():
        pass
    file.seek(0)
    return character


def made_up_id(*parts: object) -> str:
    """An id for what has none: the same for the same parts."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "perdure:" + json.dumps(parts, default=str)))


def fault(error: ValidationError) -> tuple[list[str | int], str]:
    """Where in a value its first fault is, and what is wrong, on one line."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "missing":
        return list(first["loc"]), "is missing"
    return list(first["loc"]), f"is {_short(first['input'])}: {first['msg']}"


def one_line(error: Exception) -> str:
    """What an error says, on one line."""
    return (
        f"has no {error}" if isinstance(error, KeyError) else _short(" ".join(str(error).split()))
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and " " in value else repr(value)
    return text if len(text) <= 200 else f"{text[:199]}…"

"""Conversations from files: which kind a file is, and what the kinds have in common."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import ValidationError

from perdure.errors import ImportFailed

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

ABOUT = ("title", "create_time", "update_time")  # what is kept of a conversation beside messages


@dataclass(frozen=True, slots=True)
class Node:
    """One message, and the node it followed."""

    id: str
    parent: str | None
    message: BaseMessage


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as a tree of messages: parents before children, the main branch last.

    Attributes:
        id: What its thread is called.
        nodes: Its messages.
        leaf: The node where the main branch ends.
        about: Its title and times, those that it has; times in seconds since 1970 (UTC).
        left_out: How many messages of each kind that is not text were left out.
        until: The share of the file that is read when it has been.
    """

    id: str
    nodes: list[Node]
    leaf: str | None
    about: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    until: float = 1.0


@contextmanager
def at_hand(path: Path) -> Iterator[tuple[Path, Path]]:
    """A file that can be read twice, and what to call it: a pipe or `-` is put into one first.

    Raises:
        ImportFailed: The pipe cannot be read.
    """
    if path != Path("-") and (not path.exists() or path.is_file() or path.is_dir()):
        yield path, path
        return
    called = Path("stdin") if path == Path("-") else path
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "import"
        try:
            with copy.open("wb") as file:
                if path == Path("-"):
                    shutil.copyfileobj(sys.stdin.buffer, file)
                else:
                    with path.open("rb") as pipe:
                        shutil.copyfileobj(pipe, file)
        except OSError as exc:
            raise ImportFailed(f"{str(called)!r} cannot be read: {exc.strerror}") from exc
        yield called, copy


def read(path: Path, called: Path | None = None) -> Iterator[Conversation]:
    """The conversations of a file, one after the other; the good ones before a fault come first.

    Args:
        path: The file.
        called: Its name in messages, and for threads that have none; None: its own.

    Raises:
        ImportFailed: The file is missing, or malformed: says where and why.
    """
    called = called or path
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from _conversations(called, file, os.path.getsize(path))
    except UnicodeDecodeError as exc:
        raise ImportFailed(
            f"{str(called)!r} is not UTF-8 text: byte {exc.start} of what was read is "
            f"{exc.object[exc.start]:#04x}"
        ) from exc
    except OSError as exc:
        raise ImportFailed(f"{str(called)!r} cannot be read: {exc.strerror}") from exc
    except RecursionError as exc:
        raise ImportFailed(f"{str(called)!r} is nested too deeply to be a conversation") from exc


def _conversations(called: Path, file: TextIO, size: int) -> Iterator[Conversation]:
    from perdure.cli.chatgpt import from_export
    from perdure.cli.jsonl import from_lines

    first = _first_character(file)
    if first == "[":
        yield from from_export(called, file.read())
    elif first == "{":
        whole = _over_several_lines(called, file)
        if whole is None:
            yield from from_lines(called, file, size)
        else:
            yield from from_export(called, f"[{whole}]")
    else:
        raise ImportFailed(
            f"{str(called)!r} {f'begins with {first!r}' if first else 'is empty'}; expected "
            "ChatGPT's conversations.json (a JSON array) or JSONL (an object on each line)"
        )


def _first_character(file: TextIO) -> str:
    while (character := file.read(1)).isspace():
        pass
    file.seek(0)
    return character


def _over_several_lines(called: Path, file: TextIO) -> str | None:
    """The text of one conversation of ChatGPT's over several lines; None: there is JSONL.

    Raises:
        ImportFailed: It is another object over several lines.
    """
    first = next(line for line in file if line.strip())
    file.seek(0)
    if _parsed(first) is not None:
        return None
    text = file.read()
    file.seek(0)
    found = _parsed(text)
    if isinstance(found, dict) and "mapping" in found:
        return text
    if found is not None or first.strip() == "{":
        raise ImportFailed(
            f"{str(called)!r}, line 1: the object goes on over several lines; expected one object "
            "per line, a conversation or a message, with no line break in it"
        )
    return None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def made_up_id(*parts: object) -> str:
    """An id for what has none: the same for the same parts."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "perdure:" + json.dumps(parts, default=str)))


def about(found: Mapping[str, Any]) -> dict[str, Any]:
    """The title and the times of a conversation, as far as they are what they should be."""
    known = {name: found.get(name) for name in ABOUT}
    title = known.pop("title")
    named = {}
    if isinstance(title, str) and title.strip():
        named["title"] = title.encode("utf-8", "replace").decode()  # half a character is no text
    return {**named, **{name: value for name, value in known.items() if is_time(value)}}


def is_time(value: Any) -> bool:
    """Whether a value can be a time in seconds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12


def fault(error: ValidationError) -> tuple[list[str | int], str]:
    """Where in a value its first fault is, and what is wrong, on one line."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "missing":
        return list(first["loc"]), "is missing"
    # pydantic names its own classes here, which mean nothing to who wrote the file
    why = "expected an object" if first["type"].startswith("model_") else first["msg"]
    return list(first["loc"]), f"is {shown(first['input'])}: {why}"


def one_line(error: Exception) -> str:
    """What an error says, on one line."""
    if isinstance(error, KeyError):
        return f"has no {error}"
    return _cut(" ".join(str(error).split()))


def shown(value: Any) -> str:
    """A value of a file, as it stands there, cut if it is long."""
    return _cut(json.dumps(value, ensure_ascii=False, default=str))


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"

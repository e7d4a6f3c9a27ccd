"""JSONL of OpenAI-style messages: a message on each line, or a conversation on each line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, convert_to_messages
from pydantic import BaseModel, ConfigDict, ValidationError

from perdure.cli.transcripts import (
    Conversation,
    Node,
    about,
    fault,
    is_time,
    made_up_id,
    one_line,
)
from perdure.errors import ImportFailed


class _Call(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant", "system", "tool", "developer", "function"]
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: _Call | None = None
    name: str | None = None


def from_lines(path: Path, file: TextIO, size: int) -> Iterator[Conversation]:
    """The conversations of a file; lines of one message are put together by their thread.

    Args:
        path: The file's name.
        file: The file, opened.
        size: How long it is, about.

    Raises:
        ImportFailed: A line is malformed. What stood before it comes first.
    """
    lines = _Lines(path)
    read = 0
    try:
        for number, line in enumerate(file, 1):
            read += len(line)
            if line.strip():
                whole = lines.take(number, line)
                if whole is not None:
                    yield replace(whole, until=min(1.0, read / max(1, size)))
    except ImportFailed:
        yield from lines.together()
        raise
    yield from lines.together()


@dataclass(slots=True)
class _Lines:
    """What the lines of a file have said so far.

    Attributes:
        path: The file's name.
        loose: Threads whose messages have a line each, with the first of these lines.
        whole: Of each conversation on one line: which, how many messages, and a digest of them.
    """

    path: Path
    loose: dict[str, tuple[int, _Talk]] = field(default_factory=dict)
    whole: dict[str, tuple[int, int, bytes]] = field(default_factory=dict)

    def take(self, number: int, line: str) -> Conversation | None:
        """Read a line; a conversation, if it has one."""
        where = f"{str(self.path)!r}, line {number}"
        found = _object(where, line)
        if "mapping" in found:
            from perdure.cli.chatgpt import conversation

            return conversation(where, found)
        if "messages" in found:
            return self._conversation(where, number, found)
        name = str(found.pop("thread_id", None) or self.path.stem)
        if name in self.whole:
            raise _twice(where, name, self.whole[name][0])
        self.loose.setdefault(name, (number, _Talk(name)))[1].add(where, found)
        return None

    def together(self) -> Iterator[Conversation]:
        """The conversations whose messages have a line each."""
        for name, (_, talk) in self.loose.items():
            if talk.nodes:
                yield Conversation(name, talk.nodes, talk.nodes[-1].id)

    def _conversation(self, where: str, number: int, found: dict[str, Any]) -> Conversation:
        if not isinstance(found["messages"], list):
            raise ImportFailed(f"{where}: 'messages' is not a list")
        name = str(found.get("thread_id") or found.get("id") or f"{self.path.stem}-{number}")
        if name in self.loose:
            raise _twice(where, name, self.loose[name][0])
        talk = _Talk(name)
        for place, given in enumerate(found["messages"], 1):
            talk.add(f"{where}, message {place} of {name!r}", given)
        first, count, digest = self.whole.get(name, (number, 0, _digest([])))
        if digest != _digest(talk.nodes[:count]):
            raise _twice(where, name, first)
        self.whole[name] = number, len(talk.nodes), _digest(talk.nodes)
        return Conversation(
            name, talk.nodes, talk.nodes[-1].id if talk.nodes else None, about(found)
        )


@dataclass(slots=True)
class _Talk:
    """A conversation in the making: each message follows those before it."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def add(self, where: str, given: Any) -> None:
        """Add a message.

        Raises:
            ImportFailed: It is malformed, or another one has its id.
        """
        node = self._node(where, given)
        place = self.places.setdefault(node.id, len(self.nodes))
        if place == len(self.nodes):
            self.nodes.append(node)
        elif self.nodes[place].message != node.message:
            raise ImportFailed(
                f"{where}: its id {node.id!r} is that of message {place + 1} of {self.name!r}, "
                "which says something else; give each message an id of its own, or none"
            )

    def _node(self, where: str, given: Any) -> Node:
        try:
            checked = _Message.model_validate(given)
            key = str(
                given.get("id")
                or made_up_id(self.name, len(self.nodes), given["role"], given.get("content"))
            )
            _check_content(where, given)
            plain = self._in_todays_form(where, key, checked, {"content": "", **given, "id": key})
            message = _converted(where, plain)
        except ValidationError as exc:
            place, reason = fault(exc)
            part = next((str(part) for part in place if part in _Message.model_fields), "it")
            raise ImportFailed(f"{where}: {part} {reason}") from exc
        return Node(key, self.nodes[-1].id if self.nodes else None, message)

    def _in_todays_form(
        self, where: str, key: str, checked: _Message, given: dict[str, Any]
    ) -> dict[str, Any]:
        """A message with its time where perdure keeps it, and functions as tools."""
        if given["content"] is None:
            given["content"] = ""
        if is_time(given.get("create_time")):
            time = {"create_time": given.pop("create_time")}
            given["response_metadata"] = {**(given.get("response_metadata") or {}), **time}
        if checked.function_call is not None and not checked.tool_calls:
            call = given.pop("function_call")
            given["tool_calls"] = [{"id": f"call-{key}", "type": "function", "function": call}]
        if checked.role == "function":
            given |= {"role": "tool", "tool_call_id": self._call_to(where, checked.name)}
        return given

    def _call_to(self, where: str, name: str | None) -> str:
        """The id of the newest call of a function that has no answer yet."""
        answered = set()
        for node in reversed(self.nodes):
            message = node.message
            if isinstance(message, ToolMessage):
                answered.add(message.tool_call_id)
            elif isinstance(message, AIMessage):
                for call in message.tool_calls:
                    if call["name"] == name and call["id"] and call["id"] not in answered:
                        return call["id"]
        raise ImportFailed(
            f"{where}: the answer of the function {name!r} follows no function_call of that name "
            "that is without one"
        )


def _converted(where: str, given: dict[str, Any]) -> BaseMessage:
    try:
        (message,) = convert_to_messages([given])
    except ValidationError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as exc:
        reason = one_line(exc)
        if isinstance(exc, json.JSONDecodeError):
            reason = f"the arguments of a call are not JSON: {reason}"
        elif "tool_call()" in reason:  # what langchain-core's own function for them says
            reason = 'expected {"id": ..., "function": {"name": ..., "arguments": ...}} for each'
        raise ImportFailed(
            f"{where}: {'tool_calls: ' if given.get('tool_calls') else ''}{reason}"
        ) from exc
    return message


def _check_content(where: str, given: dict[str, Any]) -> None:
    """Refuse a message that says nothing; an assistant may call, or decline, instead."""
    if given.get("content") is not None:
        return
    instead = {"content", "tool_calls", "function_call", "refusal", "audio"}
    if given["role"] != "assistant" or not instead & given.keys():
        raise ImportFailed(f"{where}: content is missing; expected text or a list of parts")


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as exc:
        raise ImportFailed(f"{where}, column {exc.colno}: {exc.msg}") from exc
    if not isinstance(found, dict):
        raise ImportFailed(f"{where}: expected an object, not {json.dumps(found)[:80]}")
    return found


def _twice(where: str, name: str, first: int) -> ImportFailed:
    return ImportFailed(
        f"{where}: the thread {name!r} is on line {first} already, and this does not go on from "
        "what it says there; give one of them another thread_id"
    )


def _digest(nodes: list[Node]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for node in nodes:
        digest.update(f"{node.id}\0{node.message!r}\0".encode("utf-8", "surrogatepass"))
    return digest.digest()

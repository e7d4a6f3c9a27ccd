"""Values of JSON one after the other, and messages of OpenAI's form in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages

from perdure.checkpointers.titles import ABOUT, WHOSE
from perdure.cli.conversation import (
    Conversation,
    Odd,
    described,
    find,
    made_up_id,
    seconds,
    short,
    whole,
)

_ROLES: Final = ("user", "assistant", "system", "developer", "tool", "function")
_INSTEAD: Final = ("content", "tool_calls", "function_call", "refusal", "audio")
_SPACE: Final = re.compile(r"[\s,]*")

_Path = dict[str, None]  # the ids of the messages that led to the next one


def values(text: str) -> Iterator[tuple[int, Any]]:
    """The values of a JSON array, or those that stand one after the other, each with its number.

    The number is the place in the array, or the line. What cannot be read comes as an `Odd`.
    """
    decoder = json.JSONDecoder()
    at = _after_space(text, 0)
    array = text.startswith("[", at)
    at += array
    number, counted_to = 0 if array else 1, 0
    value: Any = None
    while (at := _after_space(text, at)) < len(text):
        if array and text[at] == "]":
            return
        number += 1 if array else text.count("\n", counted_to, at)
        counted_to = at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as exc:
            why = "nested too deeply" if isinstance(exc, RecursionError) else "not JSON"
            value = Odd("not JSON: the rest" if array and why == "not JSON" else why)
            value.__cause__ = exc
            at = len(text) if array else (text.find("\n", at) + 1 or len(text))
        yield number, value
    if array and not isinstance(value, Odd):
        yield number + 1, Odd("the file ends within its array")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


class Lines:
    """Conversations of a file that has an object for each message, or for several of them.

    Objects of one thread go on from one another; where they differ, they are branches.
    """

    def __init__(self, name: str) -> None:
        self._name = name  # what a thread is called that has no id
        self._talks: dict[str, tuple[Conversation, _Path]] = {}

    def talks(self) -> list[Conversation]:
        """The conversations of all objects."""
        return [talk for talk, _ in self._talks.values()]

    def add_conversation(self, number: str, found: Mapping[str, Any]) -> None:
        """Add the messages of an object, from the first one of the thread on."""
        if not isinstance(found["messages"], list):
            raise Odd("'messages' is no list")
        name = found.get("thread_id") or found.get("id") or f"{self._name}-{number}"
        talk, path = self._thread(name, found)
        path.clear()
        for given in found["messages"]:
            _add(talk, path, given)

    def add_message(self, found: Mapping[str, Any]) -> None:
        """Add an object that is a message, after the last one."""
        whose = {name: found[name] for name in WHOSE if name in found}
        message = {k: v for k, v in found.items() if k != "thread_id" and k not in whose}
        _add(*self._thread(found.get("thread_id") or self._name, whose), message)

    def _thread(self, name: object, found: Mapping[str, Any]) -> tuple[Conversation, _Path]:
        numbers = {key: str(found[key]) for key in WHOSE if type(found.get(key)) is int}
        names = {key: key for key in (*ABOUT, *WHOSE)}
        made = described(str(name), {**found, **numbers}, names)
        talk, path = self._talks.setdefault(made.id, (made, {}))
        talk.about |= made.about
        return talk, path


def _add(talk: Conversation, path: _Path, given: Any) -> None:
    """Add a message, which follows those before it, or note why it is left out."""
    above = next(reversed(path), None)
    last = talk.nodes[above].message if above else None
    try:
        message = _message(given, last, talk.id, len(path))
    except Odd as exc:
        talk.problem(str(exc), short(given["id"]) if find(given, dict).get("id") else None)
        return
    path[talk.add(message, above)] = None
    talk.leaf = next(reversed(path))


def _message(found: Any, last: BaseMessage | None, *place: object) -> BaseMessage:
    given = _checked(found)
    key = whole(str(found.get("id") or made_up_id(*place, found["role"], found.get("content"))))
    given |= {"id": key, "content": found.get("content") or ""}
    if (at := seconds(given.get("create_time"))) is not None:
        given.pop("create_time")
        given["response_metadata"] = {**find(given, dict, "response_metadata"), "create_time": at}
    if isinstance(given.get("function_call"), dict) and not given.get("tool_calls"):
        call = given.pop("function_call")
        given["tool_calls"] = [{"id": f"call-{key}", "type": "function", "function": call}]
    if given["role"] == "function":  # the answer to a single call, right after it
        if not (isinstance(last, AIMessage) and last.tool_calls):
            raise Odd("the answer of a function that was not called")
        given |= {"role": "tool", "tool_call_id": last.tool_calls[0]["id"]}
    try:
        (message,) = convert_to_messages([given])
    except json.JSONDecodeError as exc:
        raise Odd("the arguments of a call are not JSON") from exc
    except Exception as exc:  # of whatever kind: langchain-core raises many for a malformed message
        part = "tool_calls" if given.get("tool_calls") else given["role"]
        raise Odd(f"malformed message ({part})") from exc
    return message


def _checked(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise Odd("the message is no object")
    role, content = found.get("role"), found.get("content")
    if role not in _ROLES:
        raise Odd(f"unknown role {short(str(role), 40)!r}")
    if content is None and not (role == "assistant" and any(n in found for n in _INSTEAD)):
        raise Odd("no content")
    parts = all(isinstance(part, str | dict) for part in find(content, list))
    if not (parts and isinstance(content, str | list | None)):
        raise Odd("content is neither text nor a list of parts")
    return dict(found)

"""Messages of OpenAI's form: a message for each object, or a conversation for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from perdure.cli.conversation import (
    Conversation,
    Node,
    Odd,
    described,
    dict_of,
    list_of,
    made_up_id,
    seconds,
    short,
    whole,
)
from perdure.cli.threads import ABOUT

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

_ROLES: Final = ("user", "assistant", "system", "developer", "tool", "function")
_INSTEAD: Final = ("content", "tool_calls", "function_call", "refusal", "audio")

_Seen = dict[str, "BaseMessage"]  # by id


class Lines:
    """What the objects of a file have said so far."""

    def __init__(self, name: str) -> None:
        self._name = name  # what a thread is called that has no id
        self._loose: dict[str, tuple[Conversation, _Seen]] = {}  # an object for each message
        self._whole: dict[str, Conversation] = {}  # an object for all of them

    def conversation(self, number: int, found: Mapping[str, Any]) -> Conversation:
        """A conversation in one object, which may go on from what was said on its thread."""
        name = str(found.get("thread_id") or found.get("id") or f"{self._name}-{number}")
        if not isinstance(found["messages"], list):
            raise Odd("'messages' is no list")
        talk = described(name, found, {each: each for each in ABOUT})
        seen: _Seen = {}
        for given in found["messages"]:
            _add(talk, seen, given)
        before = self._whole.get(name)
        goes_on = before is None or before.nodes == talk.nodes[: len(before.nodes)]
        if name in self._loose or not goes_on:
            raise Odd(f"the thread {short(name, 40)!r} is there already and says something else")
        self._whole[name] = talk
        return talk

    def message(self, found: Mapping[str, Any]) -> None:
        """A message in one object."""
        name = str(found.get("thread_id") or self._name)
        if name in self._whole:
            raise Odd(f"the thread {short(name, 40)!r} is there already as a conversation")
        given = {key: value for key, value in found.items() if key != "thread_id"}
        _add(*self._loose.setdefault(name, (Conversation(whole(name)), {})), given)

    def together(self) -> list[Conversation]:
        """The conversations whose messages have an object each."""
        return [talk for talk, _ in self._loose.values()]


def _add(talk: Conversation, seen: _Seen, given: Any) -> None:
    """Add a message, which follows those before it, or note why it is left out."""
    try:
        message = _message(given, talk)
    except Odd as exc:
        id = dict_of(given).get("id")
        talk.problem(str(exc), None if id is None else str(id))
        return
    key = str(message.id)
    if key not in seen:
        talk.nodes.append(Node(key, talk.leaf, message))
        talk.leaf = key
    elif seen[key] != message:
        talk.problem("the id of another message", key)
    seen.setdefault(key, message)


def _message(found: Any, talk: Conversation) -> BaseMessage:
    from langchain_core.messages import convert_to_messages

    given = _checked(found)
    made_of = talk.id, len(talk.nodes), found["role"], found.get("content")
    key = whole(str(found.get("id") or made_up_id(*made_of)))
    given |= {"id": key, "content": found.get("content") or ""}
    if (at := seconds(given.get("create_time"))) is not None:
        given.pop("create_time")
        given["response_metadata"] = {**dict_of(given.get("response_metadata")), "create_time": at}
    if isinstance(given.get("function_call"), dict) and not given.get("tool_calls"):
        call = given.pop("function_call")
        given["tool_calls"] = [{"id": f"call-{key}", "type": "function", "function": call}]
    if given["role"] == "function":
        given |= {"role": "tool", "tool_call_id": _call_to(talk, given.get("name"))}
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
    parts = all(isinstance(part, str | dict) for part in list_of(content))
    if not (parts and isinstance(content, str | list | None)):
        raise Odd("content is neither text nor a list of parts")
    return dict(found)


def _call_to(talk: Conversation, name: Any) -> str:
    """The id of the newest call of a function that has no answer yet."""
    answered = set()
    for node in reversed(talk.nodes):
        message: Any = node.message
        if message.type == "tool":
            answered.add(message.tool_call_id)
        for call in getattr(message, "tool_calls", ()):
            if call["name"] == name and call["id"] and call["id"] not in answered:
                return str(call["id"])
    raise Odd("the answer of a function that was not called")

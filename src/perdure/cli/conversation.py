"""Conversations that are imported, as trees of messages; as JSON Lines, read and written.

A tree has what all readers of exports share. Lines have messages in OpenAI's form.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    convert_to_messages,
    convert_to_openai_messages,
    messages_from_dict,
)

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.labels import USER_LABELS
from perdure.checkpointers.thread_copy import SaidTree, said_on
from perdure.checkpointers.titles import ABOUT, about, existing_head
from perdure.errors import InvalidMessages
from perdure.memory.conversation import SHORTENED
from perdure.memory.thread_messages import REMEMBER, time_of

_ROLES: Final = ("user", "assistant", "system", "developer", "tool", "function")
_INSTEAD: Final = ("content", "tool_calls", "function_call", "refusal", "audio")
_EXACT: Final = "langchain"  # fields of a message that OpenAI's form does not have
_SPACE: Final = re.compile(r"[\s,]*")

_Path = dict[str, None]  # the ids of the messages that led to the next one
_LONGEST_ID: Final = 500  # bytes; no export has longer ones, and a key of a memory has room for it

CREATED: Final = "create_time"  # in a message's `response_metadata`: when it was said

Kind = TypeVar("Kind", str, int, dict[str, Any], list[Any])


class Odd(ValueError):
    """A part of a file that is not as expected: it is left out, counted and named."""


class Problem(NamedTuple):
    """What was not as expected, and where."""

    reason: str
    conversation: str | None = None
    message: str | None = None


class MessageNode(NamedTuple):
    """A message, the id of the one that it follows, and when it was said: s since 1970."""

    parent: str | None
    message: BaseMessage
    at: float | None


@dataclass(slots=True)
class Conversation:
    """A conversation as a tree of messages."""

    id: str  # of its thread
    about: dict[str, Any] = field(default_factory=dict)  # see `ABOUT`; times in s since 1970 (UTC)
    nodes: dict[str, MessageNode] = field(
        default_factory=dict
    )  # by id, parents first, main branch last
    leaf: str | None = None  # the message where the main branch ends
    left_out: Counter[str] = field(default_factory=Counter)  # messages that tell a reader nothing
    problems: list[Problem] = field(default_factory=list)
    seen: int = 0  # messages that its source has, also those that are left out

    def at(self, key: str | None) -> float:
        """The time of a message or of one before it, else of the conversation, else infinity."""
        while key is not None:
            key, _, at = self.nodes[key]
            if at is not None:
                return at
        return float(self.about.get("update_time", self.about.get("create_time", math.inf)))

    def way(self, key: str | None) -> list[str]:
        """The messages up to one, the oldest first."""
        keys = []
        while key is not None:
            keys.append(key)
            key = self.nodes[key].parent
        return keys[::-1]

    def problem(self, reason: str, message: str | None = None) -> None:
        """Note a problem."""
        self.problems.append(Problem(reason, self.id, message))

    def add(
        self,
        message: BaseMessage,
        parent: str | None,
        at: float | None = None,
        *,
        variant: bool = False,
    ) -> str:
        """Add a message after another; returns its key: its id, but of a `variant` of one."""
        key = str(message.id)
        at = created(message) if at is None else at
        held = self.nodes.get(key)
        if variant and held is not None and held[:2] != (parent, message):
            key = made_up_id(key, parent, repr(message))  # variants may differ in any field
        node = self.nodes.setdefault(key, MessageNode(parent, message, at))
        if node.message is not message and node.message != message:
            self.problem("the id of another message", key)
        return key

    def fill(
        self,
        parents: dict[str, str | None],
        messages: Mapping[str, list[BaseMessage]],
        shown: str,
    ) -> None:
        """Add what the parts of a tree say, in order.

        The main branch ends with the one shown, or if that is none of them with the last.
        """
        ends: dict[str | None, str | None] = {}  # the last message of each part or of its ancestors

        def path(key: str | None) -> list[str]:
            """A part and its ancestors up to one that is done, the oldest first."""
            parts: dict[str, None] = {}
            while key is not None and key not in ends:
                parts[key] = None
                above = parents[key]
                if above in parts or above not in parents:
                    if above in parts:
                        self.problem("its own ancestor, read as a beginning", key)
                    elif above is not None and key in messages:
                        self.problem("parent missing, read as a beginning", key)
                    parents[key] = above = None
                key = above
            return list(reversed(parts))

        leaf = shown if shown in parents else next(reversed(parents), None)
        main = dict.fromkeys(path(leaf))
        for end in [*(key for key in parents if key not in main), leaf]:
            for key in path(end):
                last = ends.get(parents[key])
                for message in messages.get(key, ()):
                    last = self.add(message, last)
                ends[key] = last
        self.leaf = ends.get(leaf)


def described(
    name: object, conversation: Mapping[str, Any], names: Mapping[str, str], *made_of: object
) -> Conversation:
    """A conversation without its messages, of its JSON.

    `names` has its keys by what they are called in `ABOUT`; an id that is none is made up.
    """
    about: dict[str, Any] = {}
    for ours, theirs in names.items():
        time, text = seconds(conversation.get(theirs)), find(conversation, str, theirs)
        value = time if ours.endswith("_time") else text if text.strip() else None
        if value is not None:
            about[ours] = value
    id = name if isinstance(name, str) and name else made_up_id("conversation", *made_of)
    if len(id.encode("utf-8", "replace")) > _LONGEST_ID:
        id = made_up_id("conversation", id)
    return Conversation(whole(id), about)


def spoken(role: str, text: str, key: str, *, tool: bool = False, **about: Any) -> BaseMessage:
    """A message of the user, assistant or system, with its id and what is known of it.

    What a program said (`tool`) becomes no memory.
    """
    kinds: dict[str, type[BaseMessage]] = {"user": HumanMessage, "assistant": AIMessage}
    metadata = {name: value for name, value in about.items() if value not in (None, "")}
    if tool:
        metadata[REMEMBER] = False
    return kinds.get(role, SystemMessage)(
        content=whole(text), id=whole(key), response_metadata=metadata
    )


# -- values of JSON that may be anything


def find(value: Any, kind: type[Kind], *path: str) -> Kind:
    """The value at a path of keys, if it is of this kind, else an empty one."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    part = value if isinstance(value, kind) else kind()
    return whole(part) if isinstance(part, str) else part


def whole(text: str) -> str:
    """Text without halves of characters, which no file can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def seconds(value: Any) -> float | None:
    """A moment given in seconds since 1970 or in ISO 8601; None: it is neither."""
    at = time_of(value) if isinstance(value, str | int | float) else None
    return None if at is None else at.timestamp()


def created(message: BaseMessage) -> float | None:
    """When a message says that it was said: s since 1970."""
    return seconds(message.response_metadata.get(CREATED))


def made_up_id(*parts: object) -> str:
    """An id for what has none: the same for the same parts."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "perdure:" + json.dumps(parts, default=str)))


# -- what stands in a text for something else


def short(text: Any, limit: int = 200) -> str:
    """Text on one line, cut if it is long."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def label(noun: object, about: object = "") -> str:
    """What stands for a file, a picture or a call: "[file: dates.pdf]"."""
    text = short(about)
    return f"[{short(noun, 40)}: {text}]" if text else f"[{short(noun, 40)}]"


def fenced(code: str, language: str = "") -> str:
    """Code with its lines, as Markdown."""
    mark = "```"
    while mark in code:
        mark += "`"
    return f"{mark}{language}\n{code.strip(chr(10))}\n{mark}"


# -- JSON Lines, read


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
    match = _SPACE.match(text, at)
    return match.end() if match else at


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

    def add_conversation(self, number: str, conversation: Mapping[str, Any]) -> None:
        """Add the messages of an object, from the first one of the thread on."""
        if not isinstance(conversation["messages"], list):
            raise Odd("'messages' is no list")
        name = conversation.get("thread_id") or conversation.get("id") or f"{self._name}-{number}"
        talk, path = self._thread(name, conversation)
        path.clear()
        keys = [_add(talk, path, message) for message in conversation["messages"]]
        leaf = talk.leaf
        for branch in find(conversation, list, "branches"):
            after, messages = find(branch, int, "after"), find(branch, list, "messages")
            if not 0 <= after <= len(keys):
                talk.problem("a branch follows no message")
                continue
            begin = talk.way(keys[after - 1]) if after else []
            path = dict.fromkeys(begin)
            keys += [_add(talk, path, message, variant=True) for message in messages]
        talk.leaf = leaf

    def add_message(self, line: Mapping[str, Any]) -> None:
        """Add an object that is a message, after the last one."""
        whose = {name: line[name] for name in USER_LABELS if name in line}
        message = {k: v for k, v in line.items() if k != "thread_id" and k not in whose}
        _add(*self._thread(line.get("thread_id") or self._name, whose), message)

    def _thread(self, name: object, line: Mapping[str, Any]) -> tuple[Conversation, _Path]:
        numbers = {key: str(line[key]) for key in USER_LABELS if type(line.get(key)) is int}
        names = {key: key for key in (*ABOUT, *USER_LABELS)}
        made = described(str(name), {**line, **numbers}, names)
        talk, path = self._talks.setdefault(made.id, (made, {}))
        talk.about |= made.about
        return talk, path


def _add(talk: Conversation, path: _Path, line: Any, *, variant: bool = False) -> str | None:
    """Add a message, which follows those before it, or note why it is left out; where it is."""
    talk.seen += 1
    above = next(reversed(path), None)
    last = talk.nodes[above].message if above else None
    try:
        message = _message(line, last, talk.id, len(path))
    except Odd as exc:
        talk.problem(str(exc), short(line["id"]) if find(line, dict).get("id") else None)
        return above
    path[talk.add(message, above, seconds(line.get("at")), variant=variant)] = None
    talk.leaf = next(reversed(path))
    return talk.leaf


def _message(line: Any, last: BaseMessage | None, *place: object) -> BaseMessage:
    form = _checked(line)
    key = whole(str(line.get("id") or made_up_id(*place, line["role"], line.get("content"))))
    form |= {"id": key, "content": line.get("content") or ""}
    if seconds(form.get("at")) is not None:
        del form["at"]
    if (at := seconds(form.get(CREATED))) is not None:
        form.pop(CREATED)
        form["response_metadata"] = {**find(form, dict, "response_metadata"), CREATED: at}
    if isinstance(form.get("function_call"), dict) and not form.get("tool_calls"):
        call = form.pop("function_call")
        form["tool_calls"] = [{"id": f"call-{key}", "type": "function", "function": call}]
    if form["role"] == "function":  # the answer to a single call, right after it
        if not (isinstance(last, AIMessage) and last.tool_calls):
            raise Odd("the answer of a function that was not called")
        form |= {"role": "tool", "tool_call_id": last.tool_calls[0]["id"]}
    fields = form.pop(_EXACT, None)
    try:
        (message,) = convert_to_messages([form])
        if fields is not None:
            kind = fields.get("type", message.type)
            plain = message.model_dump() if kind == message.type else {}
            data = {**plain, **fields, "id": key}
            (message,) = messages_from_dict([{"type": kind, "data": data}])
            if isinstance(message, RemoveMessage):
                raise ValueError("it is no message")
    except json.JSONDecodeError as exc:
        raise Odd("the arguments of a call are not JSON") from exc
    except Exception as exc:  # of whatever kind: langchain-core raises many for a malformed message
        part = "tool_calls" if form.get("tool_calls") else form["role"]
        raise Odd(f"malformed message ({part})") from exc
    return message


def _checked(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Odd("the message is no object")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise Odd(f"unknown role {short(str(role), 40)!r}")
    if content is None and not (role == "assistant" and any(n in message for n in _INSTEAD)):
        raise Odd("no content")
    parts = all(isinstance(part, str | dict) for part in find(content, list))
    if not (parts and isinstance(content, str | list | None)):
        raise Odd("content is neither text nor a list of parts")
    return dict(message)


# -- written


def build_thread_export(saver: Checkpointer, thread_id: str) -> dict[str, Any]:
    """Build the exported object of a thread, with the messages up to its head and on branches.

    Raises:
        InvalidMessages: The messages of the thread cannot be exported.
    """
    newest = existing_head(saver, thread_id).metadata
    said = saver.database.read(partial(said_on, saver._reader, thread_id))
    whose = {name: newest[name] for name in USER_LABELS if newest.get(name)}
    line = {"thread_id": thread_id, **about(saver, thread_id, newest), **whose, "messages": []}
    if said is not None and said.ways:
        main, *others = _parts(said)
        line["messages"] = main["messages"]
        if said.is_lost or (said.values and not (main["messages"] or others)):
            why = "has neither a stored value nor a history"
            if said.values:
                first = next(iter(said.values.values()))
                why = f"contains items of type {type(first).__name__} instead of messages"
            raise InvalidMessages(
                f"the thread {thread_id!r} cannot be exported: its channel 'messages' {why}; "
                "export the other threads by passing their ids"
            )
        line |= {} if said.is_known else {"in_state": "unknown"}
        branches = [part for part in others if part["messages"]]
        line |= {"branches": branches} if branches else {}
    return line


def _parts(said: SaidTree) -> Iterator[dict[str, Any]]:
    """What each way adds to those before it, and after how many of all the messages.

    A branch that others go on from adds nothing of its own.
    """
    messages = {at: message for at, value in said.values.items() if (message := _of(value))}
    ways = [_latest(way, messages) for way in said.ways]
    inner, ends = set[int](), list[int]()
    numbers: dict[tuple[int, int], int] = {}  # of a message, by that before it and its position
    for way in ways:
        above = 0
        for at in way:
            inner.add(above)
            above = numbers.setdefault((above, at), len(numbers) + 1)
        ends.append(above)
    numbers.clear()
    for way, end in zip(ways, ends, strict=True):
        above, after, added = 0, 0, list[dict[str, Any]]()
        for at in way if way is ways[0] or end not in inner else ():
            if (above, at) not in numbers:
                after = after if added else above
                added.append(_written(messages[at], said.times.get(at)))
            above = numbers.setdefault((above, at), len(numbers) + 1)
        yield {"after": after, "messages": added}


def _latest(way: Sequence[int], messages: Mapping[int, BaseMessage]) -> list[int]:
    """Where the last whole version of each message is, in the order in which they were said."""
    last: dict[object, int] = {}
    for at in way:
        if message := messages.get(at):
            shortened = SHORTENED in message.additional_kwargs
            last[message.id or at] = last.get(message.id, at) if shortened else at
    return list(last.values())


def _of(value: Any) -> BaseMessage | None:
    """The message that a value is, or stands for; None: it is none."""
    try:
        return convert_to_messages([value])[0]
    except Exception:  # of whatever kind, see `_message`
        return None


def _written(message: BaseMessage, at: Any) -> dict[str, Any]:
    """A message in OpenAI's form, with the fields by which its own differs."""
    try:
        form = convert_to_openai_messages([message])[0]
        read = _message(form, None)
    except (Odd, ValueError):  # it has no such form
        form = {"role": "assistant", "content": str(message.text)}
        read = _message(form, None)
    written = {"role": form.pop("role"), **({"id": message.id} if message.id else {}), **form}
    if (own_time := created(message)) is not None:
        written[CREATED] = own_time
        read.response_metadata = {CREATED: own_time}
    elif (moment := seconds(at)) is not None:
        written["at"] = datetime.fromtimestamp(moment, UTC).isoformat()
    fields, plain = message.model_dump(), read.model_dump() if read.type == message.type else {}
    differing = {name: fields[name] for name in fields if fields[name] != plain.get(name)}
    differing.pop("id", None)
    return {**written, _EXACT: differing} if differing else written

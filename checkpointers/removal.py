"""Removal of messages and their quotations from values, at any depth.

A message is a langchain message, or what langgraph's `add_messages` takes for one: a dict with a
role and content, the dumped forms of a message, a `(role, text)` pair, or bare text. What else is a
quotation: docs/erasure.md.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    convert_to_messages,
)
from langgraph.types import Interrupt, Send
from pydantic import BaseModel

GONE: Final = object()  # stands for a value that is removed
LONG: Final = 16  # characters from which on a text is taken to be one message's own
_RESULT: Final = {"tool_call_id", "name"}  # what makes a message the result of a call
_TEXT_KEYS: Final = ("text", "thinking", "reasoning")  # of content blocks
_PLAIN: Final = {int, float, bool, type(None), bytes, bytearray}


class Where(NamedTuple):
    """The context of a value.

    Attributes:
        inputs: Whether a reducer has yet to give ids to messages in it: then one without an id is
            removed too if its content is that of a message that is.
        texts: Whether bare text in it, or a pair, may be such a message: it is written to a channel
            of them.
        tasks: Whether it describes a task (a `Send`, an interrupt, an error, metadata): then a text
            quotes a message if it contains what the message says.
        kept: Whether it is part of a message that stays, whose texts and calls are its own.
    """

    inputs: bool = False
    texts: bool = False
    tasks: bool = False
    kept: bool = False


@dataclass(slots=True)
class Remover:
    """Takes messages out of values.

    Args:
        ids: Which messages.

    Attributes:
        removed: Every message found under one of the ids, in all its versions.
        channels: The names of channels that held one.
        calls: The ids of their tool calls.
    """

    ids: frozenset[str]
    removed: dict[str, BaseMessage] = field(default_factory=dict)
    channels: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    _says: set[str] = field(default_factory=set)
    _texts: set[str] = field(default_factory=set)  # long contents
    _traces: set[str] = field(default_factory=set)  # long texts that tell of them in tasks
    _deeds: set[str] = field(default_factory=set)  # calls without their ids
    _path: set[int] = field(default_factory=set)

    def without(self, value: Any, where: Where) -> Any:
        """The value without them: itself if it has none, `GONE` if it is one."""
        if type(value) is str and not self._is_input(value, where):
            return "" if self._quotes(value, where) else value
        if type(value) in _PLAIN or id(value) in self._path:
            return value
        if self.is_gone(value, where):
            return GONE
        self._path.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dict(value, where)
            if isinstance(value, list | tuple | set | frozenset | deque):
                return self._elements(value, where)
            return self._object(value, where)
        finally:
            self._path.discard(id(value))

    def is_gone(self, value: Any, where: Where) -> bool:
        """Whether a value is one of them itself, or a call of one."""
        if isinstance(value, str):
            return self._is_input(value, where)
        found = _identified(value)
        if found is None:
            return not where.kept and self._is_call(value, where)
        uid, fields = found
        if uid is None:
            if not isinstance(value, BaseMessage | dict) and not where.texts:
                return False  # two words, where no message would be written as a pair
            return where.inputs and bool(self._says) and self._is_twin(_message(fields))
        if uid in self.ids:
            self._note(_message(fields))
        return uid in self.ids

    def _is_input(self, text: str, where: Where) -> bool:
        return where.texts and bool(self._says) and _saying(HumanMessage(text)) in self._says

    def _is_twin(self, message: BaseMessage | None) -> bool:
        return message is not None and _saying(message) in self._says

    def _is_call(self, value: Any, where: Where) -> bool:
        if where.tasks and isinstance(value, dict) and {"name", "args"} <= value.keys():
            return _deed(value) in self._deeds or _get(value, "id") in self.calls
        return _get(value, "id") in self.calls

    def _is_result(self, value: Any) -> bool:
        """Whether a message that stays answers a call that goes."""
        return _identified(value) is not None and _get(value, "tool_call_id") in self.calls

    def _quotes(self, text: str, where: Where) -> bool:
        if len(text) < LONG or where.kept:
            return False
        return text in self._texts or (where.tasks and any(t in text for t in self._traces))

    def _note(self, message: BaseMessage | None) -> None:
        if message is None or type(message) is RemoveMessage:
            return
        version = f"{type(message)}{message.__dict__}"
        if self.removed.setdefault(version, message) is not message:
            return
        calls = _calls(message)
        if message.content or calls:  # an empty one has no twin
            self._says.add(_saying(message))
        self.calls |= {call["id"] for call in calls if call["id"]}
        self._deeds |= set(map(_deed, calls))
        self._texts |= _contents(message)
        self._traces |= _traces(message)

    def spare(self, value: Any) -> None:
        """Learn what a message that stays says too: that is not the removed messages' own."""
        found = _identified(value)
        if found is None or not found[0] or found[0] in self.ids or self._is_result(value):
            return
        message = _message(found[1])
        if message is not None:
            calls = _calls(message)
            self.calls -= {call["id"] for call in calls}
            self._deeds -= set(map(_deed, calls))
            self._texts -= _contents(message)
            self._traces -= _traces(message)

    def needles(self) -> list[bytes] | None:
        """Texts of which one is in the bytes of each value to be changed; None: there are none."""
        texts: list[str | None] = [*self.ids, *self.calls, *self._texts, *self._traces]
        texts += map(_telling, self.removed.values())
        texts += (call["name"] for each in self.removed.values() for call in _calls(each))
        if None in texts or "" in self.ids:
            return None
        try:
            return list({text.encode() for text in texts if text})
        except UnicodeEncodeError:
            return None

    # -- the parts of values

    def _dict(self, value: dict[Any, Any], where: Where) -> Any:
        changed = self._changed(value, value.items(), where, texts=False)
        if not changed:
            return value
        out = copy.copy(value)
        for key, new in changed.items():
            if new is GONE:
                del out[key]
            else:
                out[key] = new
        return out

    def _object(self, value: Any, where: Where) -> Any:
        """A model, a dataclass: a copy with other attributes. A `Send` is never altered."""
        if isinstance(value, type | Enum):
            return value
        changed = self._changed(value, _attributes(value), where, texts=where.texts)
        if not changed:
            return value
        if isinstance(value, Send):
            return GONE
        changed = {name: None if new is GONE else new for name, new in changed.items()}
        if isinstance(value, BaseModel):
            return value.model_copy(update=changed)
        out = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(out, name, new)  # it may be frozen
        return out

    def _changed(
        self, value: Any, parts: Iterable[tuple[Any, Any]], where: Where, *, texts: bool
    ) -> dict[Any, Any]:
        """The parts of a dict or an object that do not stay as they are."""
        inner, result = self._within(value, where), self._is_result(value)
        inputs = where.inputs and not isinstance(value, BaseMessage)
        changed = {}
        for name, part in parts:
            if result and name in _RESULT:
                continue
            within = inner._replace(texts=inputs and (texts or name in self.channels))
            new = self.without(part, within)
            if isinstance(value, dict) and type(name) is str and not inner.kept:
                new = GONE if name in self.calls or self._quotes(name, inner) else new
            if new is not part:
                changed[name] = new
        if result and _get(value, "name"):
            changed["name"] = None
        return changed

    def _within(self, value: Any, where: Where) -> Where:
        """The context of the parts of a value."""
        if _identified(value) is not None:
            result = self._is_result(value)
            return where._replace(kept=not result, tasks=result)
        if isinstance(value, Send | Interrupt):
            return where._replace(tasks=True)
        return where

    def _elements(self, value: Any, where: Where) -> Any:
        news = [self.without(part, where) for part in value]
        if all(new is part for new, part in zip(news, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            make: Any = type(value)
            return make(*(None if new is GONE else new for new in news))
        kept = [new for new in news if new is not GONE]
        if isinstance(value, deque):
            return deque(kept, value.maxlen)
        return type(value)(kept)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        yield from {**value.__dict__, **(value.__pydantic_extra__ or {})}.items()
        return
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names |= dict.fromkeys((slots,) if isinstance(slots, str) else slots)
    for name in names:
        if not name.startswith("__") and hasattr(value, name):
            yield name, getattr(value, name)


def _get(value: Any, name: str) -> str:
    """A text that a dict or an object has under a name; else an empty one."""
    found = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return found if type(found) is str else ""


def _identified(value: Any) -> tuple[str | None, Any] | None:
    """The id of what may be a message, and what it is made of; None: it is none."""
    if isinstance(value, BaseMessage):
        return value.id, value
    if isinstance(value, dict):
        return _identified_dict(value)
    if isinstance(value, tuple | list) and len(value) == 2 and all(type(v) is str for v in value):
        return None, value
    return None


def _identified_dict(value: dict[Any, Any]) -> tuple[str | None, Any] | None:
    if value.get("lc") == 1 and isinstance(value.get("kwargs"), dict):  # langchain's `dumpd`
        fields, made_of = value["kwargs"], value
    elif "type" in value and isinstance(value.get("data"), dict):  # its `message_to_dict`
        fields = value["data"]
        made_of = {**fields, "type": value["type"]}
    elif "role" in value or "type" in value:
        fields = made_of = value
    else:
        return None
    return (_get(fields, "id") or None, made_of) if "content" in fields else None


def _message(value: Any) -> BaseMessage | None:
    try:
        return convert_to_messages([value])[0]
    except Exception:  # whatever it is, it is not what a reducer would make a message of
        return None


# -- what messages say


def _saying(message: BaseMessage) -> str:
    """The content of a message, of any role and in any form."""
    return repr((message.content, getattr(message, "tool_calls", [])))


def _calls(message: BaseMessage) -> list[Any]:
    if not isinstance(message, AIMessage):
        return []
    return [*message.tool_calls, *message.invalid_tool_calls]


def _deed(call: Any) -> str:
    return repr((call["name"], call["args"]))


def _contents(message: BaseMessage) -> set[str]:
    """The long texts of a message: its content, or that of its text blocks."""
    blocks = [message.content] if isinstance(message.content, str) else message.content
    texts = {b if isinstance(b, str) else _get(b, key) for b in blocks for key in _TEXT_KEYS}
    return {text for text in texts if len(text) >= LONG}


def _traces(message: BaseMessage) -> set[str]:
    """Long texts by which what describes a task tells of a message, as they are or printed."""
    calls = _calls(message)
    texts = {*_contents(message), *_strings([call["args"] for call in calls])}
    texts |= {call["id"] for call in calls if call["id"]} | {message.id or ""}
    texts |= {repr(text)[1:-1] for text in texts} | {json.dumps(text)[1:-1] for text in texts}
    for call in calls:
        texts |= {repr(call["args"]), json.dumps(call["args"], default=repr)}
    return {text for text in texts if len(text) >= LONG}


def _telling(message: BaseMessage) -> str | None:
    """A text that is in every form in which a message without an id may be stored."""
    if not message.content:
        calls = _calls(message)
        return calls[0]["name"] if calls else ""  # an empty one is not looked for
    return max(_strings(message.content), key=len, default="") or None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)

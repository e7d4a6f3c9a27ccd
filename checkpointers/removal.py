"""Values without some messages: taken out wherever in lists, dicts and objects they stand.

A message is a langchain message, or what langgraph's `add_messages` takes for one: a dict with a
role and content, the dumped forms of a message, a `(role, text)` pair, or bare text.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage, HumanMessage, RemoveMessage, convert_to_messages
from pydantic import BaseModel

GONE: Final = object()  # stands for a value that is itself a message to be removed
_PLAIN: Final = {int, float, bool, type(None), bytes, bytearray}


class Where(NamedTuple):
    """What a value is part of.

    Attributes:
        inputs: Whether a reducer has yet to give ids to messages in it: then one without an id is
            removed too if its content is that of a message that is.
        texts: Whether bare text in it, or a pair, may be such a message: it is written to a channel
            of them.
        holes: Whether elements keep their places: what is removed becomes None.
    """

    inputs: bool = False
    texts: bool = False
    holes: bool = False


@dataclass(slots=True)
class Remover:
    """Takes messages out of values.

    Args:
        ids: Which messages.

    Attributes:
        removed: Every message found under one of the ids, in all its versions.
        channels: The names of channels that held one.
    """

    ids: frozenset[str]
    removed: dict[str, BaseMessage] = field(default_factory=dict)
    channels: set[str] = field(default_factory=set)
    _says: set[str] = field(default_factory=set)
    _path: set[int] = field(default_factory=set)

    def without(self, value: Any, where: Where) -> Any:
        """The value without them: itself if it has none, `GONE` if it is one."""
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
        """Whether a value is one of them itself."""
        if isinstance(value, str):
            return where.texts and _saying(HumanMessage(value)) in self._says
        found = _identified(value)
        if found is None:
            return False
        uid, fields = found
        if uid is None:
            if not isinstance(value, BaseMessage | dict) and not where.texts:
                return False  # two words, where no message would be written as a pair
            return where.inputs and bool(self._says) and self._is_twin(_message(fields))
        if uid in self.ids:
            self._note(_message(fields))
        return uid in self.ids

    def _is_twin(self, message: BaseMessage | None) -> bool:
        return message is not None and _saying(message) in self._says

    def _note(self, message: BaseMessage | None) -> None:
        if message is not None and type(message) is not RemoveMessage:
            self.removed.setdefault(f"{type(message)}{message.__dict__}", message)
            if message.content or getattr(message, "tool_calls", None):  # an empty one has no twin
                self._says.add(_saying(message))

    def needles(self, *, contents: bool) -> list[bytes] | None:
        """Texts of which one is in the bytes of each value to be changed; None: there are none.

        Args:
            contents: Whether messages without ids are looked for too.
        """
        texts: list[str | None] = [*self.ids]
        if contents:
            texts += map(_telling, self.removed.values())
        if None in texts or "" in self.ids:
            return None
        try:
            return list({text.encode() for text in texts if text})
        except UnicodeEncodeError:
            return None

    def _dict(self, value: dict[Any, Any], where: Where) -> Any:
        changed = {}
        for key, part in value.items():
            texts = where.inputs and key in self.channels
            new = self.without(part, where._replace(texts=texts, holes=False))
            if new is not part:
                changed[key] = new
        if not changed:
            return value
        out = copy.copy(value)
        for key, new in changed.items():
            if new is GONE:
                del out[key]
            else:
                out[key] = new
        return out

    def _elements(self, value: Any, where: Where) -> Any:
        news = [self.without(part, where._replace(holes=False)) for part in value]
        if all(new is part for new, part in zip(news, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            make: Any = type(value)
            return make(*(None if new is GONE else new for new in news))
        if where.holes:
            news = [None if new is GONE else new for new in news]
        kept = [new for new in news if new is not GONE]
        if isinstance(value, deque):
            return deque(kept, value.maxlen)
        return type(value)(kept)

    def _object(self, value: Any, where: Where) -> Any:
        """A model, a dataclass, a `Send`: a copy with other attributes."""
        if isinstance(value, type | Enum):
            return value
        changed = {}
        for name, part in _attributes(value):
            texts = where.inputs and (where.texts or name in self.channels)
            texts = texts and not isinstance(value, BaseMessage)
            new = self.without(part, where._replace(texts=texts, holes=False))
            if new is not part:
                changed[name] = None if new is GONE else new
        if not changed:
            return value
        if isinstance(value, BaseModel):
            return value.model_copy(update=changed)
        out = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(out, name, new)  # it may be frozen
        return out


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
    if "content" not in fields:
        return None
    uid = fields.get("id")
    return uid if type(uid) is str else None, made_of


def _message(value: Any) -> BaseMessage | None:
    try:
        return convert_to_messages([value])[0]
    except Exception:  # whatever it is, it is not what a reducer would make a message of
        return None


def _saying(message: BaseMessage) -> str:
    """What a message says, whoever says it, and in whatever form it was put."""
    return repr((message.content, getattr(message, "tool_calls", [])))


def _telling(message: BaseMessage) -> str | None:
    """A text that is in every form in which a message without an id may be stored."""
    if not message.content:
        calls = getattr(message, "tool_calls", [])
        return calls[0]["name"] if calls else ""  # an empty one is not looked for
    if isinstance(message.content, str):
        return message.content
    texts = [text for text in _texts(message.content) if text]
    return max(texts, key=len) if texts else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)

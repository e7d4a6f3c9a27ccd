"""Removal of messages and their quotations from values, at any depth (docs/erasure.md).

A message is a langchain message, or what langgraph's `add_messages` takes for one: a dict with a
role and content, the dumped forms of a message, a `(role, text)` pair, or bare text.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple, Self

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    convert_to_messages,
)
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME, TASKS
from langgraph.types import Interrupt, Send
from pydantic import BaseModel

from perdure.checkpointers.status import CANCELLED, FORMER

TASK_CHANNELS: Final = {ERROR, INTERRUPT, RESUME, TASKS, FORMER}
"""The channels whose values describe tasks."""
UNALTERED: Final = {INTERRUPT, RESUME, FORMER}
"""The channels whose values are removed as a whole if a part of them is to be removed."""
NO_WRITES: Final = "__no_writes__"
"""The channel to which langgraph writes when a task returns nothing."""
NEXT_NODE: Final = "branch:to:"
"""The prefix of the names of the channels that start a node."""
_CANCELLED: Final = Send(CANCELLED, None)  # a task that never runs, to keep the order of others
GONE: Final = object()  # stands for a value that is removed
_LONG: Final = 16  # characters from which on a text is taken to be one message's own
_RESULT: Final = {"tool_call_id", "name"}  # what makes a message the result of a call
_TEXT_KEYS: Final = ("text", "thinking", "reasoning")  # of content blocks
_KINDS: Final = ("says", "calls", "deeds", "texts", "traces")  # kinds of the texts of a `Remover`
_PLAIN: Final = {int, float, bool, type(None), bytes, bytearray}


class Where(NamedTuple):
    """The context of a value.

    Attributes:
        inputs: A reducer has yet to give ids to messages in it: one without an id is removed if
            its content is that of a removed message.
        texts: Bare text or a pair in it may be such a message: a channel of messages gets it.
        tasks: It describes a task (a `Send`, an interrupt, an error, metadata): a text quotes a
            message if it contains what the message says.
        kept: It is part of a message that stays, whose texts and calls are its own.
    """

    inputs: bool = False
    texts: bool = False
    tasks: bool = False
    kept: bool = False


class TextSet(set[str]):
    """Texts to search for in values. A subclass may know some texts only by their hashes."""

    def has_part_of(self, text: str) -> bool:
        """Return whether a text contains one of these texts."""
        return any(each in text for each in self)


@dataclass(slots=True)
class Remover:
    """Removes messages from values: first by their ids, after `settle` also what quotes them.

    Args:
        ids: Which messages.
        texts_of: A function that returns the texts in a value of a registered type, or None for a
            value of any other type.

    Attributes:
        found: Whether any was found.
        removed: The messages found, in all their versions.
        channels: The names of channels that held one.
    """

    ids: Set[str]
    texts_of: Callable[[Any], Iterable[str] | None] = lambda value: None
    found: bool = False
    removed: dict[str, BaseMessage] = field(default_factory=dict)
    channels: TextSet = field(default_factory=TextSet)
    _says: TextSet = field(default_factory=TextSet)
    _calls: TextSet = field(default_factory=TextSet)  # ids
    _deeds: TextSet = field(default_factory=TextSet)  # calls without their ids
    _texts: TextSet = field(default_factory=TextSet)  # long contents
    _traces: TextSet = field(default_factory=TextSet)  # long texts in tasks that quote the messages
    _path: set[int] = field(default_factory=set)

    @classmethod
    def from_known_texts(
        cls,
        known: Callable[[str], TextSet],
        texts_of: Callable[[Any], Iterable[str] | None],
    ) -> Self:
        """Build a `Remover` for messages that another `Remover` has already identified.

        Args:
            known: A function that returns the texts of a kind, for the kinds in `known_texts`.
            texts_of: See the class.
        """
        own: dict[str, Any] = {f"_{kind}": known(kind) for kind in _KINDS}
        return cls(known("ids"), texts_of, channels=known("channels"), **own)

    def known_texts(self) -> dict[str, Set[str]]:
        """Return the ids, channels and texts by which the messages are recognised, by kind."""
        own = {kind: getattr(self, f"_{kind}") for kind in _KINDS}
        return {"ids": self.ids, "channels": self.channels, **own}

    def settle(self) -> None:
        """Learn what the messages found say."""
        own = self._calls, self._deeds, self._texts, self._traces
        for message in self.removed.values():
            if message.content or _calls(message):  # an empty one has no twin
                self._says.add(_saying(message))
            for texts, more in zip(own, _tells(message), strict=True):
                texts |= more

    def needles(self) -> list[bytes]:
        """Texts of which one is in the bytes of each value that may have to change."""
        texts = {*self.ids, *self._calls, *self._texts, *self._traces}
        for message in self.removed.values():
            texts |= {call["name"] or "" for call in _calls(message)}
            if message.content:  # "" is in all
                texts.add(max(_strings(message.content), key=len, default=""))
        return [text.encode(errors="surrogatepass") for text in texts]

    def spare(self, others: Iterable[Any]) -> None:
        """Learn what else is said by a message that stays: that is not their own."""
        own = self._calls, self._deeds, self._texts, self._traces
        for value in others:
            uid, fields = _identified(value)
            if not uid or uid in self.ids or _get(value, "tool_call_id") in self._calls:
                continue
            other = _message(fields)
            if other is not None:
                for texts, theirs in zip(own, _tells(other), strict=True):
                    texts -= theirs

    def without(self, value: Any, where: Where) -> Any:
        """The value without them: itself if it has none, `GONE` if it is one."""
        if type(value) in _PLAIN or id(value) in self._path:
            return value
        if self.is_gone(value, where):
            return GONE
        if isinstance(value, str):
            return "" if not isinstance(value, Enum) and self._quotes(value, where) else value
        if (texts := self.texts_of(value)) is not None:
            return GONE if any(self._contains_erased_text(text, where) for text in texts) else value
        self._path.add(id(value))
        try:
            if isinstance(value, list | tuple | set | frozenset | deque):
                return self._elements(value, where)
            return self._parts(value, where)
        finally:
            self._path.discard(id(value))

    def is_gone(self, value: Any, where: Where) -> bool:
        """Whether a value is one of them itself, or a call of one."""
        if isinstance(value, str):
            return where.texts and bool(self._says) and self._is_twin(HumanMessage(value))
        uid, fields = _identified(value)
        if fields is None:
            return not where.kept and self._is_call(value, where)
        if uid is None:
            # a pair is two words, where no message would be written as a pair
            possible = where.inputs if isinstance(value, BaseMessage | dict) else where.texts
            return possible and bool(self._says) and self._is_twin(_message(fields))
        if uid in self.ids:
            self.found = True
            message = _message(fields)
            if message is not None and type(message) is not RemoveMessage:
                self.removed.setdefault(f"{type(message)}{message.__dict__}", message)
        return uid in self.ids

    def _is_twin(self, message: BaseMessage | None) -> bool:
        return message is not None and _saying(message) in self._says

    def _is_call(self, value: Any, where: Where) -> bool:
        if where.tasks and isinstance(value, dict) and {"name", "args"} <= value.keys():
            return _deed(value) in self._deeds or _get(value, "id") in self._calls
        return _get(value, "id") in self._calls

    def _quotes(self, text: str, where: Where) -> bool:
        if len(text) < _LONG or where.kept:
            return False
        return text in self._texts or (where.tasks and self._traces.has_part_of(text))

    def _contains_erased_text(self, text: str, where: Where) -> bool:
        """Return whether a text of a registered type contains the text of an erased message."""
        return self._texts.has_part_of(text) or (where.tasks and self._traces.has_part_of(text))

    def _parts(self, value: Any, where: Where) -> Any:
        """A dict or an object with other parts, if they change. A `Send` is never altered."""
        changed = self._changed(value, where)
        if not changed:
            return value
        if isinstance(value, Send):
            return GONE
        if isinstance(value, dict):
            out = copy.copy(value)
            out.update(changed)
            for name in [name for name, new in changed.items() if new is GONE]:
                del out[name]
            return out
        changed = {name: None if new is GONE else new for name, new in changed.items()}
        if isinstance(value, BaseModel):
            return value.model_copy(update=changed)
        out = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(out, name, new)  # it may be frozen
        return out

    def _changed(self, value: Any, where: Where) -> dict[Any, Any]:
        """The parts of a dict or an object that do not stay as they are."""
        is_dict, is_message = isinstance(value, dict), _identified(value)[1] is not None
        result = is_message and _get(value, "tool_call_id") in self._calls
        if is_message:
            where = where._replace(kept=not result, tasks=result)
        elif isinstance(value, Send | Interrupt):
            where = where._replace(tasks=True)
        inputs = where.inputs and not isinstance(value, BaseMessage)
        changed = {}
        for name, part in value.items() if is_dict else _attributes(value).items():
            if result and name in _RESULT:
                continue
            texts = inputs and ((where.texts and not is_dict) or name in self.channels)
            new = self.without(part, where._replace(texts=texts))
            if is_dict and type(name) is str and not where.kept:
                new = GONE if name in self._calls or self._quotes(name, where) else new
            if new is not part:
                changed[name] = new
        if result and _get(value, "name"):
            changed["name"] = None
        return changed

    def _elements(self, value: Any, where: Where) -> Any:
        news = [self.without(part, where) for part in value]
        if all(new is part for new, part in zip(news, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            make: Any = type(value)
            return make(*(None if new is GONE else new for new in news))
        kept = [new for new in news if new is not GONE]
        return deque(kept, value.maxlen) if isinstance(value, deque) else type(value)(kept)


def _attributes(value: Any) -> Mapping[str, Any]:
    """The attributes of an object, in its `__dict__` and its slots."""
    if isinstance(value, type | Enum):
        return {}
    if isinstance(value, BaseModel):
        return {**value.__dict__, **(value.__pydantic_extra__ or {})}
    state: Any = object.__getstate__(value)
    if isinstance(state, tuple):
        state = {**(state[0] or {}), **state[1]}
    return state or {}


def _get(value: Any, name: str) -> str:
    """A text that a dict or an object has under a name; else an empty one."""
    try:
        text = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    except Exception:  # a property's
        return ""
    return text if type(text) is str else ""


def _identified(value: Any) -> tuple[str | None, Any]:
    """The id of what may be a message, and what it is made of; `(None, None)`: it is none."""
    if isinstance(value, BaseMessage):
        return value.id, value
    if isinstance(value, tuple | list) and len(value) == 2 and all(type(v) is str for v in value):
        return None, value
    if not isinstance(value, dict):
        return None, None
    fields = made_of = value
    if value.get("lc") == 1 and isinstance(value.get("kwargs"), dict):  # langchain's `dumpd`
        fields = value["kwargs"]
    elif "type" in value and isinstance(value.get("data"), dict):  # its `message_to_dict`
        fields = value["data"]
        made_of = {**fields, "type": value["type"]}
    elif not value.keys() & {"role", "type"}:
        return None, None
    return (_get(fields, "id") or None, made_of) if "content" in fields else (None, None)


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


def _tells(message: BaseMessage) -> tuple[set[str], ...]:
    """What tells of a message: the ids of its calls, these without ids, its texts, its traces.

    Its texts are its content, or that of its text blocks; its traces are what tells of it in what
    describes a task, as it is or printed. Short ones are left out.
    """
    calls = _calls(message)
    blocks = [message.content] if isinstance(message.content, str) else message.content
    texts = _long({b if isinstance(b, str) else _get(b, k) for b in blocks for k in _TEXT_KEYS})
    ids = {call["id"] for call in calls if call["id"]}
    traces = {*texts, *_strings([call["args"] for call in calls]), *ids, message.id or ""}
    traces |= {repr(text)[1:-1] for text in traces} | {json.dumps(text)[1:-1] for text in traces}
    for call in calls:
        traces |= {repr(call["args"]), json.dumps(call["args"], default=repr)}
    return ids, set(map(_deed, calls)), texts, _long(traces)


def _long(texts: set[str]) -> set[str]:
    return {text for text in texts if len(text) >= _LONG}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def hash_message(key: bytes, message: BaseMessage) -> str:
    """Return the BLAKE2b-256 (RFC 7693) of a message's type, id and content, as JSON."""
    says = [message.type, message.id, message.content]
    text = json.dumps(says, ensure_ascii=False, separators=(",", ":"), default=repr)
    data = text.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=32, key=key).hexdigest()


# -- tasks


def remove_quoting_tasks(
    remover: Remover, tasks: Sequence[Send]
) -> tuple[list[Send], dict[int, Send]]:
    """Remove the tasks that quote an erased message, and keep the positions of the others.

    Returns:
        The remaining tasks, and the removed tasks by position. A removed task before a remaining
        one is replaced by a task that never runs.
    """
    gone = {
        at: task
        for at, task in enumerate(tasks)
        if remover.without(task, Where(tasks=True)) is GONE
    }
    left = [_CANCELLED if at in gone else task for at, task in enumerate(tasks)]
    while left and left[-1] is _CANCELLED:
        left.pop()
    return left, gone


def has_no_result(writes: list[Any]) -> bool:
    """Return whether a task has written no result, because it failed or waits for an answer."""
    return all(index < 0 for index, _, _ in writes)

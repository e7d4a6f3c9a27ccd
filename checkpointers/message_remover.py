"""Remove erased messages, and quotations of them, from nested values.

docs/erasure.md defines what a quotation is. A message is a langchain message, or a value that
langgraph's `add_messages` accepts as a message: a dict with a role and content, the dumped forms of
a message, a `(role, text)` pair, or bare text.
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

from perdure.checkpointers.status import CANCELLED, FORMER_WRITES_CHANNEL

TASK_CHANNELS: Final = {ERROR, INTERRUPT, RESUME, TASKS, FORMER_WRITES_CHANNEL}
"""The channels whose values describe tasks."""
UNALTERED: Final = {INTERRUPT, RESUME, FORMER_WRITES_CHANNEL}
"""Channels whose values are removed entirely if any part of them must be removed."""
NO_WRITES: Final = "__no_writes__"
"""The channel to which langgraph writes when a task returns nothing."""
NEXT_NODE: Final = "branch:to:"
"""The prefix of the names of the channels that start a node."""
_CANCELLED_TASK: Final = Send(CANCELLED, None)
"""A task that never runs. It replaces a removed task, so that later tasks keep their position."""
REMOVED: Final = object()
"""The value returned in place of a value that must be removed entirely."""
_MIN_QUOTATION_CHARS: Final = 16
"""Minimum length, in characters, of a text that is recognised as a quotation.

Shorter texts are ignored, because they occur in many messages by chance.
"""
# Names of the fields that link a tool message to its tool call.
_RESULT_FIELDS: Final = {"tool_call_id", "name"}
# Keys under which message content blocks contain text.
_TEXT_KEYS: Final = ("text", "thinking", "reasoning")
_TEXT_ATTRIBUTES: Final = {
    # Comparison keys of messages. Two messages have the same key if their content and their tool
    # calls are equal.
    "says": "_contents",
    # Ids of tool calls.
    "calls": "_call_ids",
    # Names and arguments of tool calls.
    "deeds": "_call_keys",
    # Texts from the content of erased messages. Only texts with at least `_MIN_QUOTATION_CHARS`
    # characters are included. A string outside of kept messages counts as a quotation if it equals
    # one of these texts.
    "texts": "_long_texts",
    # Texts of erased messages, such as contents and tool call arguments, that have at least
    # `_MIN_QUOTATION_CHARS` characters. The descriptions of tasks, such as the arguments of
    # `Send`s, are searched for these texts.
    "traces": "_task_texts",
}
"""Maps each kind of text to the attribute of `Remover` that holds the texts.

Removal records store hashes that depend on the kinds, so the names of the kinds never change.
"""
# Types whose values contain no text.
_PLAIN_TYPES: Final = {int, float, bool, type(None), bytes, bytearray}


class ValueContext(NamedTuple):
    """The place in a thread where a value occurs.

    The place where a value occurs, such as a message channel or an interrupt, determines the rules
    for finding erased messages in the value.

    Attributes:
        is_input: Whether the value has not yet passed through a reducer, so that its messages may
            lack ids. If True, a message without an id is removed if its content and tool calls
            equal those of an erased message.
        allows_bare_text: Whether bare text or a `(role, text)` pair may be a message, because a
            channel of messages receives the value.
        describes_task: Whether the value describes a task (a `Send`, an interrupt, an error,
            metadata). Text in it is a quotation if it contains a text of an erased message.
        in_kept_message: Whether the value is part of a message that is kept. Its texts and tool
            calls are then not treated as quotations.
    """

    is_input: bool = False
    allows_bare_text: bool = False
    describes_task: bool = False
    in_kept_message: bool = False


class TextSet(set[str]):
    """A set of texts from erased messages, used to find quotations in values.

    A subclass can store hashes of the texts instead of the texts themselves.
    """

    def has_substring_of(self, text: str) -> bool:
        """Return whether any text in this set is a substring of `text`."""
        return any(part in text for part in self)


@dataclass(slots=True)
class Remover:
    """Removes erased messages from values.

    Messages are recognised by their ids. Quotations, and copies without an id, are recognised only
    after a call to `remember_texts_of_removed_messages`. A `Remover` built with
    `from_erased_text_sets` recognises copies and quotations even if
    `remember_texts_of_removed_messages` has not been called.

    Args:
        ids: The ids of the messages.
        extract_texts: A function that returns the texts in a value of a registered type, or None
            for a value of any other type.

    Attributes:
        has_match: Whether one of the messages was found.
        removed_messages: Each different version of every message that was found. The keys are built
            from the type and the fields of the message.
        channels: The names of the channels that contained one of the messages. The callers of
            `remove_messages_from` add the names.
    """

    ids: Set[str]
    extract_texts: Callable[[Any], Iterable[str] | None] = lambda value: None
    has_match: bool = False
    removed_messages: dict[str, BaseMessage] = field(default_factory=dict)
    channels: TextSet = field(default_factory=TextSet)
    # Keys for comparing messages with the erased messages. Messages with equal content have equal
    # keys.
    _contents: TextSet = field(default_factory=TextSet)
    # Ids of the tool calls in erased messages.
    _call_ids: TextSet = field(default_factory=TextSet)
    # Names and arguments of the tool calls in erased messages.
    _call_keys: TextSet = field(default_factory=TextSet)
    # Texts from the content of erased messages, except short texts.
    _long_texts: TextSet = field(default_factory=TextSet)
    # Texts of the erased messages, except short texts. To find quotations of erased messages,
    # perdure searches task data, such as `Send`s and interrupts, for these texts.
    _task_texts: TextSet = field(default_factory=TextSet)
    # The `id()` of the container being processed and of each container around it. A repeated id
    # means a reference cycle.
    _ancestors: set[int] = field(default_factory=set)

    @classmethod
    def from_erased_text_sets(
        cls,
        get_text_set_of_kind: Callable[[str], TextSet],
        extract_texts: Callable[[Any], Iterable[str] | None],
    ) -> Self:
        """Build a `Remover` from sets of texts that have already been collected.

        Args:
            get_text_set_of_kind: A function that accepts a key of `texts_by_kind()` and returns the
                set of texts of this kind.
            extract_texts: See the class.
        """
        texts: Any = {name: get_text_set_of_kind(kind) for kind, name in _TEXT_ATTRIBUTES.items()}
        return cls(
            get_text_set_of_kind("ids"),
            extract_texts,
            channels=get_text_set_of_kind("channels"),
            **texts,
        )

    def texts_by_kind(self) -> dict[str, Set[str]]:
        """Return the ids and texts by which erased messages are recognised, grouped by kind."""
        texts = {kind: getattr(self, name) for kind, name in _TEXT_ATTRIBUTES.items()}
        return {"ids": self.ids, "channels": self.channels, **texts}

    def remember_texts_of_removed_messages(self) -> None:
        """Collect the texts and tool calls of the removed messages.

        The `Remover` uses the collected texts and tool calls to recognise quotations of the removed
        messages.
        """
        text_sets = self._call_ids, self._call_keys, self._long_texts, self._task_texts
        for message in self.removed_messages.values():
            # Skip a removed message without content and tool calls, because every empty message of
            # the thread would count as its copy.
            if message.content or _list_tool_calls(message):
                self._contents.add(_build_message_comparison_key(message))
            for texts, new_texts in zip(text_sets, _collect_message_texts(message), strict=True):
                texts |= new_texts

    def build_byte_strings_of_erased_messages(self) -> list[bytes]:
        """Return byte strings for preselecting encoded values that may contain erased messages.

        Every encoded value that contains or quotes an erased message includes at least one of the
        returned byte strings.
        """
        texts = {*self.ids, *self._call_ids, *self._long_texts, *self._task_texts}
        for message in self.removed_messages.values():
            texts |= {call["name"] or "" for call in _list_tool_calls(message)}
            # Empty content is skipped. Empty content would add the empty string, which occurs in
            # every encoded value, so all values of the thread would be searched. Non-empty content
            # without any text still adds the empty string. The search is then slower, and its
            # result stays correct.
            if message.content:
                texts.add(max(_iter_strings(message.content), key=len, default=""))
        return [text.encode(errors="surrogatepass") for text in texts]

    def exclude_texts_that_kept_messages_contain(self, values: Iterable[Any]) -> None:
        """Do not treat texts and tool calls as quotations if they also occur in kept messages.

        If an erased and a kept message contain the same text, values with that text are kept,
        because they may quote the kept message. A tool message that answers an erased tool call is
        also kept. Texts in a tool message that answers an erased tool call are treated differently.
        If a text occurs in an erased message and in a tool message that answers an erased tool
        call, the text is treated as a quotation of the erased message.
        """
        text_sets = self._call_ids, self._call_keys, self._long_texts, self._task_texts
        for value in values:
            uid, fields = _get_message_id_and_langchain_representation(value)
            if (
                not uid
                or uid in self.ids
                or _get_text_field(value, "tool_call_id") in self._call_ids
            ):
                continue
            other = _convert_to_message(fields)
            if other is not None:
                for texts, other_texts in zip(
                    text_sets, _collect_message_texts(other), strict=True
                ):
                    texts -= other_texts

    def remove_messages_from(self, value: Any, context: ValueContext) -> Any:
        """Remove erased messages, and quotations of them, from a value.

        Returns:
            The same object if nothing is to be removed, `REMOVED` if the value itself is to be
            removed, otherwise a changed copy. The changed copy of a str that is a quotation is
            `""`.
        """
        if type(value) in _PLAIN_TYPES or id(value) in self._ancestors:
            return value
        if self.is_erased(value, context):
            return REMOVED
        if isinstance(value, str):
            is_quotation = not isinstance(value, Enum) and self._quotes_erased_message(
                value, context
            )
            return "" if is_quotation else value
        if (texts := self.extract_texts(value)) is not None:
            has_text = any(self._contains_erased_text(text, context) for text in texts)
            return REMOVED if has_text else value
        self._ancestors.add(id(value))
        try:
            if isinstance(value, list | tuple | set | frozenset | deque):
                return self._remove_messages_from_collection(value, context)
            return self._remove_messages_from_dict_or_object(value, context)
        finally:
            self._ancestors.discard(id(value))

    def is_erased(self, value: Any, context: ValueContext) -> bool:
        """Return whether a value is an erased message, or a tool call of an erased message.

        If the value is a message that has one of the erased ids, it is added to `removed_messages`.
        """
        if isinstance(value, str):
            is_possible = context.allows_bare_text and bool(self._contents)
            return is_possible and self._has_erased_content(HumanMessage(value))
        uid, fields = _get_message_id_and_langchain_representation(value)
        if fields is None:
            return not context.in_kept_message and self._is_erased_tool_call(value, context)
        if uid is None:
            # Any list of two strings looks like a `(role, text)` pair, so such lists are treated as
            # messages only in message channels.
            is_pair = not isinstance(value, BaseMessage | dict)
            is_possible = context.allows_bare_text if is_pair else context.is_input
            if not is_possible or not self._contents:
                return False
            return self._has_erased_content(_convert_to_message(fields))
        if uid in self.ids:
            self.has_match = True
            message = _convert_to_message(fields)
            if message is not None and type(message) is not RemoveMessage:
                self.removed_messages.setdefault(f"{type(message)}{message.__dict__}", message)
        return uid in self.ids

    def _has_erased_content(self, message: BaseMessage | None) -> bool:
        """Return whether a message has the same content and tool calls as an erased message."""
        return message is not None and _build_message_comparison_key(message) in self._contents

    def _is_erased_tool_call(self, value: Any, context: ValueContext) -> bool:
        """Return whether a value is a tool call from an erased message.

        A tool call is recognised by its id. A tool call in a task description, for example in the
        argument of a `Send`, may have no id. If a tool call is part of a task description, the
        method also recognises the tool call by its name and arguments.
        """
        if context.describes_task and isinstance(value, dict) and {"name", "args"} <= value.keys():
            return (
                _build_tool_call_key(value) in self._call_keys
                or _get_text_field(value, "id") in self._call_ids
            )
        return _get_text_field(value, "id") in self._call_ids

    def _quotes_erased_message(self, text: str, context: ValueContext) -> bool:
        """Return whether a text is a quotation of an erased message.

        A text is a quotation if it equals a text from an erased message. In a task description,
        such as the argument of a `Send`, any string that contains text from an erased message
        counts as a quotation. Short texts, and texts in kept messages, are never treated as
        quotations.
        """
        if len(text) < _MIN_QUOTATION_CHARS or context.in_kept_message:
            return False
        return text in self._long_texts or (
            context.describes_task and self._task_texts.has_substring_of(text)
        )

    def _contains_erased_text(self, text: str, context: ValueContext) -> bool:
        """Return whether a text from an erased message occurs anywhere in a string.

        `text` is a string from an object whose type was registered with `StoredType`.
        """
        is_in_task = context.describes_task and self._task_texts.has_substring_of(text)
        return is_in_task or self._long_texts.has_substring_of(text)

    def _remove_messages_from_dict_or_object(self, value: Any, context: ValueContext) -> Any:
        """Remove erased messages, and quotations of them, from the fields of a dict or an object.

        A `Send` is never altered. If any part of a `Send` contains or quotes an erased message, the
        whole `Send` is removed.
        """
        changed = self._build_new_values_of_changed_fields(value, context)
        if not changed:
            return value
        if isinstance(value, Send):
            return REMOVED
        if isinstance(value, dict):
            changed_copy = copy.copy(value)
            changed_copy.update(changed)
            for name in [name for name, new in changed.items() if new is REMOVED]:
                del changed_copy[name]
            return changed_copy
        changed = {name: None if new is REMOVED else new for name, new in changed.items()}
        if isinstance(value, BaseModel):
            return value.model_copy(update=changed)
        changed_copy = copy.copy(value)
        for name, new in changed.items():
            # Call `object.__setattr__`, because the class may be a frozen dataclass.
            object.__setattr__(changed_copy, name, new)
        return changed_copy

    def _build_new_values_of_changed_fields(
        self, value: Any, context: ValueContext
    ) -> dict[Any, Any]:
        """Return a dict that maps the name of each field that must change to its new value.

        In the returned dict, the special value `REMOVED` marks a field to be removed. A tool
        message that answers an erased tool call is kept. The `name` field of this tool message is
        set to None. Quotations of erased messages are also removed from the tool message.
        """
        is_dict, is_message = (
            isinstance(value, dict),
            _get_message_id_and_langchain_representation(value)[1] is not None,
        )
        is_result = is_message and _get_text_field(value, "tool_call_id") in self._call_ids
        if is_message:
            context = context._replace(in_kept_message=not is_result, describes_task=is_result)
        elif isinstance(value, Send | Interrupt):
            context = context._replace(describes_task=True)
        is_input = context.is_input and not isinstance(value, BaseMessage)
        changed = {}
        for name, part in value.items() if is_dict else _get_instance_attributes(value).items():
            if is_result and name in _RESULT_FIELDS:
                continue
            # A state update is a dict keyed by channel name. A plain string in a state update can
            # be a message that was written as bare text. The string is compared with the erased
            # messages only if the string's channel is known to have contained an erased message.
            allows_bare_text = is_input and (
                (context.allows_bare_text and not is_dict) or name in self.channels
            )
            new = self.remove_messages_from(
                part, context._replace(allows_bare_text=allows_bare_text)
            )
            if is_dict and type(name) is str and not context.in_kept_message:
                is_erased = name in self._call_ids or self._quotes_erased_message(name, context)
                new = REMOVED if is_erased else new
            if new is not part:
                changed[name] = new
        if is_result and _get_text_field(value, "name"):
            changed["name"] = None
        return changed

    def _remove_messages_from_collection(self, collection: Any, context: ValueContext) -> Any:
        """Remove erased messages, and quotations of them, from a collection's elements.

        In a named tuple, removed fields are set to None, so that the tuple keeps its length.
        """
        results = [self.remove_messages_from(part, context) for part in collection]
        if all(result is part for result, part in zip(results, collection, strict=True)):
            return collection
        if isinstance(collection, tuple) and hasattr(collection, "_fields"):
            build: Any = type(collection)
            return build(*(None if result is REMOVED else result for result in results))
        remaining = [result for result in results if result is not REMOVED]
        if isinstance(collection, deque):
            return deque(remaining, collection.maxlen)
        return type(collection)(remaining)


def _get_instance_attributes(value: Any) -> Mapping[str, Any]:
    """Return an object's attributes, including those stored in slots, keyed by name."""
    if isinstance(value, type | Enum):
        return {}
    if isinstance(value, BaseModel):
        return {**value.__dict__, **(value.__pydantic_extra__ or {})}
    state: Any = object.__getstate__(value)
    if isinstance(state, tuple):
        state = {**(state[0] or {}), **state[1]}
    return state or {}


def _get_text_field(value: Any, name: str) -> str:
    """Return a string from a dict key or an object attribute, or `""` if there is none."""
    try:
        text = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    # Catch all exceptions, because accessing a property of `value` may raise any exception.
    except Exception:
        return ""
    return text if type(text) is str else ""


def _get_message_id_and_langchain_representation(value: Any) -> tuple[str | None, Any]:
    """Parse a value that may be a message.

    Returns:
        A pair. The first element is the id of the message, or None if the message has no id. The
        second element is the value from which langchain can build the message, or None if the value
        is not a message.
    """
    if isinstance(value, BaseMessage):
        return value.id, value
    if isinstance(value, tuple | list) and len(value) == 2 and all(type(v) is str for v in value):
        return None, value
    if not isinstance(value, dict):
        return None, None
    fields = message_form = value
    # The dict has the format that langchain's `dumpd` function returns.
    if value.get("lc") == 1 and isinstance(value.get("kwargs"), dict):
        fields = value["kwargs"]
    elif "type" in value and isinstance(value.get("data"), dict):
        # The dict has the format that langchain's `message_to_dict` function returns.
        fields = value["data"]
        message_form = {**fields, "type": value["type"]}
    elif not value.keys() & {"role", "type"}:
        return None, None
    return (
        (_get_text_field(fields, "id") or None, message_form)
        if "content" in fields
        else (None, None)
    )


def _convert_to_message(value: Any) -> BaseMessage | None:
    """Convert a value to a message, or return None if langchain cannot convert it."""
    try:
        return convert_to_messages([value])[0]
    except Exception:
        # Catch all exceptions, because langchain may raise almost any exception if the value is not
        # a message. Such a value is not a message for langgraph's `add_messages` either.
        return None


# -- texts of messages


def _build_message_comparison_key(message: BaseMessage) -> str:
    """Return a key for comparing messages.

    Messages with equal content and tool calls have equal keys, even if their roles differ.
    """
    return repr((message.content, getattr(message, "tool_calls", [])))


def _list_tool_calls(message: BaseMessage) -> list[Any]:
    """Return all tool calls of a message, the valid calls before the invalid ones."""
    if not isinstance(message, AIMessage):
        return []
    return [*message.tool_calls, *message.invalid_tool_calls]


def _build_tool_call_key(call: Any) -> str:
    """Return a key for comparing tool calls by their names and arguments."""
    return repr((call["name"], call["args"]))


class _MessageTexts(NamedTuple):
    """Texts of one message, used to find copies of the message and quotations from the message.

    Attributes:
        call_ids: The ids of its tool calls.
        call_keys: The keys of its tool calls; see `_build_tool_call_key`.
        content_texts: The texts of its content, without short texts.
        task_texts: The texts by which descriptions of tasks quote it, without short texts. These
            are its content, its id, and the ids and arguments of its tool calls. The set also
            contains each text with the escapes of `repr` and with the escapes of JSON.
    """

    call_ids: set[str]
    call_keys: set[str]
    content_texts: set[str]
    task_texts: set[str]


def _collect_message_texts(message: BaseMessage) -> _MessageTexts:
    """Collect the texts by which a message, and quotations of it, can be recognised."""
    calls = _list_tool_calls(message)
    blocks = [message.content] if isinstance(message.content, str) else message.content
    texts = _select_long_texts(
        {b if isinstance(b, str) else _get_text_field(b, k) for b in blocks for k in _TEXT_KEYS}
    )
    ids = {call["id"] for call in calls if call["id"]}
    task_texts = {*texts, *_iter_strings([call["args"] for call in calls]), *ids, message.id or ""}
    printed = {repr(text)[1:-1] for text in task_texts}
    task_texts |= printed | {json.dumps(text)[1:-1] for text in task_texts}
    for call in calls:
        task_texts |= {repr(call["args"]), json.dumps(call["args"], default=repr)}
    keys = set(map(_build_tool_call_key, calls))
    return _MessageTexts(ids, keys, texts, _select_long_texts(task_texts))


def _select_long_texts(texts: set[str]) -> set[str]:
    """Return the texts that are long enough to be used for recognising quotations."""
    return {text for text in texts if len(text) >= _MIN_QUOTATION_CHARS}


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield all strings in nested dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _iter_strings(part)


def hash_message_type_id_and_content(hash_key: bytes, message: BaseMessage) -> str:
    """Return the BLAKE2b-256 hash of a JSON array that contains a message's type, id and content.

    RFC 7693 defines the hash function BLAKE2b.
    """
    text = json.dumps(
        [message.type, message.id, message.content],
        ensure_ascii=False,
        separators=(",", ":"),
        default=repr,
    )
    return hashlib.blake2b(
        text.encode(errors="surrogatepass"), digest_size=32, key=hash_key
    ).hexdigest()


# -- tasks


def split_remaining_and_removed_tasks_by_index(
    remover: Remover, tasks: Sequence[Send]
) -> tuple[list[Send], dict[int, Send]]:
    """Divide the `Send`s of a superstep into those that remain and those that are removed.

    A `Send` is removed if it contains or quotes an erased message. All other `Send`s keep their
    positions.

    Returns:
        A pair. The first element is the list of remaining tasks. In this list, a placeholder that
        never runs replaces each removed task that is followed by a remaining task. The second
        element is a dict of the removed tasks, by position.
    """
    removed = {
        index: task
        for index, task in enumerate(tasks)
        if remover.remove_messages_from(task, ValueContext(describes_task=True)) is REMOVED
    }
    remaining = [_CANCELLED_TASK if index in removed else task for index, task in enumerate(tasks)]
    while remaining and remaining[-1] is _CANCELLED_TASK:
        remaining.pop()
    return remaining, removed


def is_task_without_result(writes: list[Any]) -> bool:
    """Return whether a task has no result yet, given its pending writes.

    A task that has failed or is interrupted has no result. A task without a result has written only
    to special channels, such as `__error__`. Writes to special channels have negative indices.
    """
    return all(index < 0 for index, _, _ in writes)

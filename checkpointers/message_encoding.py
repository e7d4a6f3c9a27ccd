"""Encode and decode the compact form in which messages are stored, cached, compared and copied.

The compact form of a message is the msgpack encoding of `[class code, fields]`. For speed, messages
are encoded and decoded without validation and without a Python loop over their fields. Because
decoding does not validate the fields, a message is stored in the compact form only if its fields
contain plain data that validation would not change. A decoded message equals the message that
LangGraph's serializer returns, including the types of all values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from types import NoneType
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from ormsgpack import packb
from pydantic import BaseModel

from perdure.checkpointers.values import PACK, unpack_all
from perdure.errors import CorruptRecord

# The numbers that identify message classes are part of the file format and must never change.
CLASSES: Final[dict[int, type[BaseMessage]]] = {
    1: HumanMessage,
    2: AIMessage,
    3: SystemMessage,
    4: ToolMessage,
}
_CODES: Final = {cls: code for code, cls in CLASSES.items()}
_TYPES: Final = {
    HumanMessage: "human",
    AIMessage: "ai",
    SystemMessage: "system",
    ToolMessage: "tool",
}
_COMMON: Final = {"content", "additional_kwargs", "response_metadata", "type", "name", "id"}
_FIELDS: Final[dict[type[BaseMessage], set[str]]] = {
    HumanMessage: _COMMON,
    AIMessage: _COMMON | {"tool_calls", "invalid_tool_calls", "usage_metadata"},
    SystemMessage: _COMMON,
    ToolMessage: _COMMON | {"tool_call_id", "artifact", "status"},
}
"""The fields of each class that `is_message_unchanged_by_validation` checks."""


# -- checks for plain data

_TEXT_OR_NONE: Final = {str, NoneType}
_INT: Final = {int}
_DICT: Final = {dict}
_TOOL_CALL_KEYS: Final = {"name", "args", "id", "type"}
_USAGE_COUNTS: Final = {"input_tokens", "output_tokens", "total_tokens"}
_USAGE_DETAILS: Final = {"input_token_details", "output_token_details"}


def is_message_unchanged_by_validation(message: BaseMessage) -> bool:
    """Return whether validation would leave the fields of a message unchanged.

    Objects that are nested in the values of the message's fields are not checked. Encoding a
    message fails if an object nested in its fields is not plain data.
    """
    cls, fields = type(message), message.__dict__
    if fields.keys() != _FIELDS.get(cls) and not _are_fields_added_by_newer_versions_at_defaults(
        cls, fields
    ):
        return False
    if message.__pydantic_extra__ or message.__pydantic_private__:
        return False
    content, metadata = fields["content"], fields["response_metadata"]
    return (
        (type(content) is str or (type(content) is list and {*map(type, content)} <= {str, dict}))
        and type(fields["additional_kwargs"]) is dict
        and type(metadata) is dict
        and "output_version" not in metadata
        and fields["type"] == _TYPES[cls]
        and type(fields["id"]) in _TEXT_OR_NONE
        and type(fields["name"]) in _TEXT_OR_NONE
        and (cls is not AIMessage or _has_plain_tool_calls_and_usage(fields))
        and (
            cls is not ToolMessage
            or (type(fields["tool_call_id"]) is str and fields["status"] in ("success", "error"))
        )
    )


def _are_fields_added_by_newer_versions_at_defaults(
    cls: type[BaseMessage], fields: dict[str, Any]
) -> bool:
    """Return whether all message fields other than those in `_FIELDS` have their default values.

    A newer version of langchain-core may have added fields to a message class.
    """
    known_fields, declared = _FIELDS.get(cls), cls.model_fields
    if (
        known_fields is None
        or fields.keys() != declared.keys()
        or not fields.keys() >= known_fields
    ):
        return False
    new_defaults = {
        name: declared[name].get_default(call_default_factory=True)
        for name in fields.keys() - known_fields
    }
    return all(type(fields[n]) is type(v) and fields[n] == v for n, v in new_defaults.items())


def _has_plain_tool_calls_and_usage(ai_message_fields: dict[str, Any]) -> bool:
    """Return whether an `AIMessage`'s tool calls and token counts have only JSON types."""
    calls, usage = ai_message_fields["tool_calls"], ai_message_fields["usage_metadata"]
    if (
        "tool_calls" in ai_message_fields["additional_kwargs"]
        or ai_message_fields["invalid_tool_calls"] != []
        or type(calls) is not list
        or not _DICT.issuperset(map(type, calls))
    ):
        return False
    for call in calls:
        if not (
            call.keys() == _TOOL_CALL_KEYS
            and type(call["name"]) is str
            and type(call["args"]) is dict
            and type(call["id"]) in _TEXT_OR_NONE
            and call["type"] == "tool_call"
        ):
            return False
    if usage is None:
        return True
    if (
        type(usage) is not dict
        or not usage.keys() >= _USAGE_COUNTS
        or not _INT.issuperset(map(type, map(usage.__getitem__, _USAGE_COUNTS)))
    ):
        return False
    if len(usage) == len(_USAGE_COUNTS):
        return True
    details = [usage[key] for key in usage.keys() - _USAGE_COUNTS]
    return (
        usage.keys() <= _USAGE_COUNTS | _USAGE_DETAILS
        and _DICT.issuperset(map(type, details))
        and _INT.issuperset(type(n) for detail in details for n in detail.values())
    )


# -- encoding and decoding

_get_fields = attrgetter("__dict__")
_get_extra = attrgetter("__pydantic_extra__")
_set_dict = BaseModel.__dict__["__dict__"].__set__
_set_fields_set = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__


def pack_messages_if_all_plain(messages: Sequence[BaseMessage]) -> list[bytes] | None:
    """Return each message as msgpack bytes, or None if msgpack cannot represent a message's fields.

    None is also returned if a message has fields that its class does not declare.

    Messages can be compared by comparing their encodings. Before storing the encoding of a message,
    callers must check the message with `is_message_unchanged_by_validation`.

    Args:
        messages: The messages, whose classes must be in `CLASSES`.
    """
    if any(map(_get_extra, messages)):
        return None
    codes = map(_CODES.__getitem__, map(type, messages))
    pairs = zip(codes, map(_get_fields, messages), strict=True)
    try:
        return list(map(packb, pairs, repeat(None), repeat(PACK)))
    except TypeError:
        return None


def pack_message_in_declared_field_order(message: BaseMessage) -> bytes:
    """Encode a message with its fields in the order in which its class declares them."""
    cls, fields = type(message), message.__dict__
    return packb((_CODES[cls], {name: fields[name] for name in cls.model_fields}), None, PACK)


def unpack_messages(
    packed: Sequence[bytes], *, is_packed_by_this_process: bool = False
) -> list[BaseMessage]:
    """Decode messages into new objects, so that callers never share mutable data.

    Args:
        packed: The bytes of the messages.
        is_packed_by_this_process: Whether the bytes were packed by this process. If False, a
            message whose fields differ from the fields of its class is validated, because another
            version of langchain-core has written the message.

    Raises:
        CorruptRecord: The bytes are not messages in the compact form.
    """
    try:
        pairs = unpack_all(packed)
        classes = [CLASSES[code] for code, _ in pairs]
        names = {cls: {*cls.model_fields} for cls in set(classes)}
        messages: list[BaseMessage] = list(map(object.__new__, classes))
        for assignment in (
            map(_set_dict, messages, [fields for _, fields in pairs]),
            map(_set_fields_set, messages, map(names.__getitem__, classes)),
            map(_set_extra, messages, [{} for _ in messages]),
            map(_set_private, messages, repeat(None)),
        ):
            deque(assignment, maxlen=0)
        for i, (_, fields) in enumerate(pairs):
            # Validate a message if its stored fields differ from the fields that its class
            # declares. Such a difference means that another version of langchain-core stored the
            # message.
            if fields.keys() != names[classes[i]] and not is_packed_by_this_process:
                messages[i] = classes[i].model_validate(fields)
    except Exception as exc:
        raise CorruptRecord(
            f"the database is damaged: stored messages cannot be decoded ({exc}); restore it from "
            "a backup"
        ) from exc
    return messages

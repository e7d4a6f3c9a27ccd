"""Messages as bytes, in one form that is stored, kept in memory, compared and copied.

It is msgpack of `[class code, fields]`, which is made, and made into messages again, without a loop
in Python over the fields and without validation. So only messages have it that are plain data all
through, and that validation would leave as they are: what is rebuilt equals what langgraph's
serializer gives back, type for type.
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

# part of the format of files: a code is never changed
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
"""The fields that `is_plain` knows how to check."""


# -- which messages have the form

_TEXT_OR_NONE: Final = {str, NoneType}
_INT: Final = {int}
_DICT: Final = {dict}
_TOOL_CALL_KEYS: Final = {"name", "args", "id", "type"}
_USAGE_COUNTS: Final = {"input_tokens", "output_tokens", "total_tokens"}
_USAGE_DETAILS: Final = {"input_token_details", "output_token_details"}


def is_plain(message: BaseMessage) -> bool:
    """Whether validating the fields of a message again would change none of them."""
    cls, fields = type(message), message.__dict__
    if fields.keys() != _FIELDS.get(cls) and not _adds_defaults(cls, fields):
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
        and (cls is not AIMessage or _says_plain(fields))
        and (cls is not ToolMessage or _result_plain(fields))
    )


def _adds_defaults(cls: type[BaseMessage], fields: dict[str, Any]) -> bool:
    """Whether a class has got fields since this was written, and the message sets none of them."""
    fields_known, declared = _FIELDS.get(cls), cls.model_fields
    if (
        fields_known is None
        or fields.keys() != declared.keys()
        or not fields.keys() >= fields_known
    ):
        return False
    new = {
        name: declared[name].get_default(call_default_factory=True)
        for name in fields.keys() - fields_known
    }
    return all(type(fields[n]) is type(v) and fields[n] == v for n, v in new.items())


def _result_plain(fields: dict[str, Any]) -> bool:
    return type(fields["tool_call_id"]) is str and fields["status"] in ("success", "error")


def _says_plain(fields: dict[str, Any]) -> bool:
    """Of an answer: its tool calls and token counts."""
    calls, usage = fields["tool_calls"], fields["usage_metadata"]
    if "tool_calls" in fields["additional_kwargs"] or fields["invalid_tool_calls"] != []:
        return False
    if type(calls) is not list or not _DICT.issuperset(map(type, calls)):
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
    if type(usage) is not dict or not usage.keys() >= _USAGE_COUNTS:
        return False
    details = [usage[key] for key in usage.keys() - _USAGE_COUNTS]
    return (
        usage.keys() <= _USAGE_COUNTS | _USAGE_DETAILS
        and _INT.issuperset(map(type, map(usage.__getitem__, _USAGE_COUNTS)))
        and _DICT.issuperset(map(type, details))
        and _INT.issuperset(type(n) for detail in details for n in detail.values())
    )


# -- to bytes and back

_fields_of = attrgetter("__dict__")
_extra_of = attrgetter("__pydantic_extra__")
_set_dict = BaseModel.__dict__["__dict__"].__set__
_set_fields_set = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__


def packed_messages(
    classes: Sequence[type[BaseMessage]], messages: Sequence[BaseMessage]
) -> list[bytes] | None:
    """The bytes of each message, all of `classes` in `CLASSES`; None if one is no plain data.

    They are good for comparing; what is stored, `is_plain` has to be asked about.
    """
    if any(map(_extra_of, messages)):
        return None
    pairs = zip(map(_CODES.__getitem__, classes), map(_fields_of, messages), strict=True)
    try:
        return list(map(packb, pairs, repeat(None), repeat(PACK)))
    except TypeError:
        return None


def packed_in_order(message: BaseMessage) -> bytes | None:
    """The bytes of a message whose fields are not in the order of its class, in that order."""
    cls, fields = type(message), message.__dict__
    if [*fields] == [*cls.model_fields]:
        return None
    return packb((_CODES[cls], {name: fields[name] for name in cls.model_fields}), None, PACK)


def unpacked_messages(packed: Sequence[bytes], *, as_given: bool = False) -> list[BaseMessage]:
    """New messages from their bytes: no two callers share a mutable part.

    One with other fields than its class has is validated, or `as_given`, if it was packed just now.

    Raises:
        CorruptRecord: They are no such bytes.
    """
    try:
        pairs = unpack_all(packed)
        classes = [CLASSES[code] for code, _ in pairs]
        names = {cls: {*cls.model_fields} for cls in set(classes)}
        made: list[BaseMessage] = list(map(object.__new__, classes))
        for setting in (
            map(_set_dict, made, [fields for _, fields in pairs]),
            map(_set_fields_set, made, map(names.__getitem__, classes)),
            map(_set_extra, made, [{} for _ in made]),
            map(_set_private, made, repeat(None)),
        ):
            deque(setting, maxlen=0)
        for i, (_, fields) in enumerate(pairs):
            if fields.keys() != names[classes[i]] and not as_given:  # of another langchain-core
                made[i] = classes[i].model_validate(fields)
    except Exception as exc:
        raise CorruptRecord(f"stored messages cannot be read back ({exc})") from exc
    return made

"""The compact form of messages: their fields less the defaults, rebuilt without validation.

Only messages that are plain data all through, and that validation would leave as they are, have
it; what is rebuilt, from bytes that perdure itself wrote, equals what langgraph's serializer gives
back, type for type.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import BaseModel

from perdure.checkpointers.packing import array_header, pack, unpack
from perdure.errors import CorruptRecord

# the first byte of a stored message
CLASSES: Final[dict[int, type[BaseMessage]]] = {
    1: HumanMessage,
    2: AIMessage,
    3: SystemMessage,
    4: ToolMessage,
}
_CODES: Final = {cls: code for code, cls in CLASSES.items()}
fields_of = attrgetter("__dict__")
extra_of = attrgetter("__pydantic_extra__")

_make = object.__new__
_set_dict = BaseModel.__dict__["__dict__"].__set__
_set_fields_set = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__

_FIELDS: Final = {cls: tuple(cls.model_fields) for cls in _CODES}
_NAMES: Final = {cls: frozenset(names) for cls, names in _FIELDS.items()}
_INDEX: Final = {cls: {n: i for i, n in enumerate(names)} for cls, names in _FIELDS.items()}
_REQUIRED: Final = {
    cls: {name for name, field in cls.model_fields.items() if field.is_required()} for cls in _CODES
}
# in the order of the fields, as the serializer rebuilds them; required ones hold a place only
_DEFAULTS: Final[dict[type[BaseMessage], dict[str, Any]]] = {
    cls: {
        name: None if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in cls.model_fields.items()
    }
    for cls in _CODES
}
_PACKED_DEFAULTS: Final = {cls: pack(defaults) for cls, defaults in _DEFAULTS.items()}
_TOOL_CALL_KEYS: Final = {"name", "args", "id", "type"}
_USAGE_COUNTS: Final = {"input_tokens", "output_tokens", "total_tokens"}
_USAGE_DETAILS: Final = {"input_token_details", "output_token_details"}


def unpack_fields(
    classes: Sequence[type[BaseMessage]], stored: Sequence[bytes]
) -> list[dict[str, Any]]:
    """All fields of stored messages, new at each call.

    Raises:
        CorruptRecord: The bytes are not what `pack_message` gave.
    """
    header = array_header(len(stored))
    try:
        kept = unpack(b"".join((header, *(item[1:] for item in stored))))
        fields: list[dict[str, Any]] = unpack(
            b"".join((header, *map(_PACKED_DEFAULTS.__getitem__, classes)))
        )
        for own, changed, names in zip(fields, kept, map(_FIELDS.get, classes), strict=True):
            for i, value in changed.items():
                own[names[i]] = value  # type: ignore[index]
    except Exception as exc:
        raise CorruptRecord(f"stored messages cannot be read back ({exc})") from exc
    return fields


def rebuilt(
    classes: Sequence[type[BaseMessage]], fields: Sequence[dict[str, Any]]
) -> list[BaseMessage]:
    """Messages of these classes that take over these fields."""
    names = {cls: set(_FIELDS[cls]) for cls in set(classes)}
    made: list[BaseMessage] = list(map(_make, classes))
    for setting in (
        map(_set_dict, made, fields),
        map(_set_fields_set, made, map(names.__getitem__, classes)),
        map(_set_extra, made, [{} for _ in made]),
        map(_set_private, made, repeat(None)),
    ):
        deque(setting, maxlen=0)
    return made


def pack_message(message: BaseMessage) -> bytes | None:
    """The compact form, or None for a message that the serializer might rebuild differently."""
    cls = type(message)
    fields = message.__dict__
    if (
        cls not in _CODES
        or fields.keys() != _NAMES[cls]
        or message.__pydantic_extra__
        or message.__pydantic_private__
    ):
        return None
    if not _as_validated(cls, fields):
        return None
    index, defaults, required = _INDEX[cls], _DEFAULTS[cls], _REQUIRED[cls]
    kept = {
        index[name]: fields[name]
        for name in _FIELDS[cls]
        if name in required or not _is_default(fields[name], defaults[name])
    }
    try:
        return bytes((_CODES[cls],)) + pack(kept)
    except TypeError:
        return None


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _as_validated(cls: type[BaseMessage], fields: dict[str, Any]) -> bool:
    """Whether validating these fields again would change none of them."""
    content = fields["content"]
    if type(content) is not str and not (
        type(content) is list and all(type(block) in (str, dict) for block in content)
    ):
        return False
    metadata, kwargs = fields["response_metadata"], fields["additional_kwargs"]
    if type(metadata) is not dict or type(kwargs) is not dict or "output_version" in metadata:
        return False
    if not (_text_or_none(fields["id"]) and _text_or_none(fields["name"])):
        return False
    if fields["type"] != _DEFAULTS[cls]["type"]:
        return False
    if cls is AIMessage:
        return (
            "tool_calls" not in kwargs
            and fields["invalid_tool_calls"] == []
            and _tool_calls_valid(fields["tool_calls"])
            and _usage_valid(fields["usage_metadata"])
        )
    if cls is ToolMessage:
        return type(fields["tool_call_id"]) is str and fields["status"] in ("success", "error")
    return True


def _text_or_none(value: Any) -> bool:
    return value is None or type(value) is str


def _tool_calls_valid(calls: Any) -> bool:
    return type(calls) is list and all(
        type(call) is dict
        and call.keys() == _TOOL_CALL_KEYS
        and type(call["name"]) is str
        and type(call["args"]) is dict
        and _text_or_none(call["id"])
        and call["type"] == "tool_call"
        for call in calls
    )


def _usage_valid(usage: Any) -> bool:
    if usage is None:
        return True
    if type(usage) is not dict or not usage.keys() >= _USAGE_COUNTS:
        return False
    return all(
        type(value) is int
        if key in _USAGE_COUNTS
        else key in _USAGE_DETAILS
        and type(value) is dict
        and all(type(count) is int for count in value.values())
        for key, value in usage.items()
    )

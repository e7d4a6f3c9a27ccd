"""The compact form of messages: their fields less the defaults, rebuilt without validation.

Only messages that are plain data all through, and that validation would leave as they are, have
it; what is rebuilt, from bytes that perdure itself wrote, equals what langgraph's serializer gives
back, type for type.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from ormsgpack import packb
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from perdure.checkpointers.packing import PACK, array_header, is_plain, pack, unpack
from perdure.errors import CorruptRecord

# The format of stored messages, ours and fixed. A message begins with the byte of its class; its
# fields go by their places here, and are left out when they have these values. langchain-core may
# add fields: they are not stored here, so a message that uses one goes through the serializer.
# Nothing in these tables is ever changed or moved; a new field would come at the end of its tuple.
CLASSES: Final[dict[int, type[BaseMessage]]] = {
    1: HumanMessage,
    2: AIMessage,
    3: SystemMessage,
    4: ToolMessage,
}
_COMMON: Final = ("content", "additional_kwargs", "response_metadata", "type", "name", "id")
_FIELDS: Final[dict[type[BaseMessage], tuple[str, ...]]] = {
    HumanMessage: _COMMON,
    AIMessage: (*_COMMON, "tool_calls", "invalid_tool_calls", "usage_metadata"),
    SystemMessage: _COMMON,
    ToolMessage: (*_COMMON, "tool_call_id", "artifact", "status"),
}
_TYPES: Final = {
    HumanMessage: "human",
    AIMessage: "ai",
    SystemMessage: "system",
    ToolMessage: "tool",
}
_EMPTY: Final[dict[str, Any]] = {
    "additional_kwargs": {},
    "response_metadata": {},
    "name": None,
    "id": None,
    "tool_calls": [],
    "invalid_tool_calls": [],
    "usage_metadata": None,
    "artifact": None,
    "status": "success",
}
_REQUIRED: Final = {"content", "tool_call_id"}  # always stored
_fields_of = attrgetter("__dict__")
_extra_of = attrgetter("__pydantic_extra__")

_make = object.__new__
_set_dict = BaseModel.__dict__["__dict__"].__set__
_set_fields_set = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__

_CODES: Final = {cls: code for code, cls in CLASSES.items()}
_DEFAULTS: Final[dict[type[BaseMessage], dict[str, Any]]] = {
    cls: {**{name: _EMPTY.get(name) for name in names}, "type": _TYPES[cls]}
    for cls, names in _FIELDS.items()
}


@dataclass(frozen=True, slots=True)
class Form:
    """How a class of this langchain-core goes with what is stored of it.

    Attributes:
        fresh: All fields of a message with nothing set, packed, in the order of the class.
        names: The names of its fields.
        places: Those that the format knows, with their places in it.
        added: Those that it does not know, with their defaults.
    """

    fresh: bytes
    names: frozenset[str]
    places: dict[str, int]
    added: dict[str, Any]


def form_of(cls: type[BaseMessage], fields: Mapping[str, FieldInfo]) -> Form:
    """The form of a class with these fields."""
    defaults = {name: _plain_default(field) for name, field in fields.items()} | _DEFAULTS[cls]
    fresh = {name: defaults[name] for name in fields}
    return Form(
        pack(fresh),
        frozenset(fields),
        {name: place for place, name in enumerate(_FIELDS[cls]) if name in fresh},
        {name: value for name, value in fresh.items() if name not in _DEFAULTS[cls]},
    )


def _plain_default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    return default if is_plain(default) else None


_FORMS: Final = {cls: form_of(cls, cls.model_fields) for cls in _CODES}
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
    fresh = {cls: _FORMS[cls].fresh for cls in set(classes)}
    try:
        kept = unpack(b"".join((header, *(item[1:] for item in stored))))
        fields: list[dict[str, Any]] = unpack(b"".join((header, *map(fresh.__getitem__, classes))))
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
    names = {cls: set(_FORMS[cls].names) for cls in set(classes)}
    made: list[BaseMessage] = list(map(_make, classes))
    for setting in (
        map(_set_dict, made, fields),
        map(_set_fields_set, made, map(names.__getitem__, classes)),
        map(_set_extra, made, [{} for _ in made]),
        map(_set_private, made, repeat(None)),
    ):
        deque(setting, maxlen=0)
    return made


# -- the full form: class code and all fields, as they stand. It is not stored: it is what a process
# keeps of a message, because comparing and copying it needs no loop in Python over its fields.


def full_messages(
    classes: Sequence[type[BaseMessage]], messages: Sequence[BaseMessage]
) -> list[bytes] | None:
    """The full form of each message; None if one of them is not plain data all through.

    Args:
        classes: Their types, each one of `CLASSES`.
        messages: The messages.
    """
    if any(map(_extra_of, messages)):
        return None
    pairs = zip(map(_CODES.__getitem__, classes), map(_fields_of, messages), strict=True)
    try:
        return list(map(packb, pairs, repeat(None), repeat(PACK)))
    except TypeError:
        return None


def full_from_stored(stored: Sequence[bytes]) -> list[bytes]:
    """The full form of each of these compact forms, its fields in the order of the class.

    Raises:
        CorruptRecord: The bytes are not what `pack_message` gave.
    """
    codes = [item[0] for item in stored]
    fields = unpack_fields([CLASSES[code] for code in codes], stored)
    return list(map(packb, zip(codes, fields, strict=True), repeat(None), repeat(PACK)))


def messages_from_full(full: Sequence[bytes]) -> list[BaseMessage]:
    """New messages from their full forms: no two callers share a mutable part."""
    pairs = unpack(array_header(len(full)) + b"".join(full))
    return rebuilt([CLASSES[code] for code, _ in pairs], [fields for _, fields in pairs])


def pack_message(message: BaseMessage) -> bytes | None:
    """The compact form, or None for a message that the serializer might rebuild differently."""
    cls = type(message)
    fields = message.__dict__
    form = _FORMS.get(cls)
    if (
        form is None
        or fields.keys() != form.names
        or message.__pydantic_extra__
        or message.__pydantic_private__
    ):
        return None
    if not _as_validated(cls, fields):
        return None
    if form.added and not all(_is_default(fields[n], value) for n, value in form.added.items()):
        return None
    defaults = _DEFAULTS[cls]
    kept = {
        place: fields[name]
        for name, place in form.places.items()
        if name in _REQUIRED or not _is_default(fields[name], defaults[name])
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
    if fields["type"] != _TYPES[cls]:
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

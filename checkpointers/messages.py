"""Messages as bytes: a compact form that is stored, and a full form that is compared and copied.

Only messages that are plain data all through, and that validation would leave as they are, have
them. What is rebuilt, without validation, from bytes that perdure itself wrote equals what
langgraph's serializer gives back, type for type.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from types import NoneType
from typing import Any, Final, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from ormsgpack import packb
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from perdure.checkpointers.values import PACK, pack, unpack_all
from perdure.errors import CorruptRecord

# The format of stored messages, ours and fixed. A message begins with the byte of its class; its
# fields go by their places here, and are left out when they have these values. langchain-core may
# add fields: they are not stored here, so a message that uses one goes through the serializer.
# Nothing in these tables is ever changed or moved; a new field would come at the end of its tuple,
# a new class with a code below 16, from where on codec.py has its own.
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

_CODES: Final = {cls: code for code, cls in CLASSES.items()}
_DEFAULTS: Final[dict[type[BaseMessage], dict[str, Any]]] = {
    cls: {**{name: _EMPTY.get(name) for name in names}, "type": _TYPES[cls]}
    for cls, names in _FIELDS.items()
}


class Form(NamedTuple):
    """How a class of this langchain-core goes with what is stored of it.

    Attributes:
        fresh: All fields of a message with nothing set, packed, in the order of the class.
        names: The names of its fields.
        added: Those that the format does not know, with their defaults.
    """

    fresh: bytes
    names: frozenset[str]
    added: dict[str, Any]


def form_of(cls: type[BaseMessage], fields: Mapping[str, FieldInfo]) -> Form:
    """The form of a class with these fields."""
    known = _DEFAULTS[cls]
    fresh = {n: known[n] if n in known else _plain_default(field) for n, field in fields.items()}
    added = {name: value for name, value in fresh.items() if name not in known}
    return Form(pack(fresh), frozenset(fields), added)


def _plain_default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    try:
        pack(default)
    except TypeError:
        return None
    return default


_FORMS: Final = {cls: form_of(cls, cls.model_fields) for cls in _CODES}
_ORDERS: Final[dict[type[BaseMessage], list[str]]] = {cls: [*cls.model_fields] for cls in _CODES}
_PLACES: Final = {
    cls: [(place, name, defaults[name]) for place, name in enumerate(_FIELDS[cls])]
    for cls, defaults in _DEFAULTS.items()
}


# -- the compact form


def pack_message(message: BaseMessage) -> bytes | None:
    """The compact form, or None for a message that the serializer might rebuild differently."""
    cls = type(message)
    fields = message.__dict__
    form = _FORMS.get(cls)
    if form is None or fields.keys() != form.names:
        return None
    if message.__pydantic_extra__ or message.__pydantic_private__:
        return None
    if not _as_validated(cls, fields):
        return None
    if not all(_is_default(fields[name], value) for name, value in form.added.items()):
        return None
    kept = {}
    for place, name, default in _PLACES[cls]:
        value = fields.get(name, default)
        if name in _REQUIRED or type(value) is not type(default) or value != default:
            kept[place] = value
    try:
        return bytes((_CODES[cls],)) + pack(kept)
    except TypeError:
        return None


def in_order(message: BaseMessage) -> bool:
    """Whether the fields of a message stand in the order of its class, as those read back do."""
    return [*message.__dict__] == _ORDERS[type(message)]


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


_TEXT_OR_NONE: Final = {str, NoneType}
_TOOL_CALL_KEYS: Final = {"name", "args", "id", "type"}
_USAGE_COUNTS: Final = {"input_tokens", "output_tokens", "total_tokens"}
_USAGE_DETAILS: Final = {"input_token_details", "output_token_details"}


def _as_validated(cls: type[BaseMessage], fields: dict[str, Any]) -> bool:
    """Whether validating these fields again would change none of them."""
    content, kwargs, metadata = map(fields.get, _COMMON[:3])
    return (
        (type(content) is str or _all_of(content, str, dict))
        and type(kwargs) is dict
        and type(metadata) is dict
        and "output_version" not in metadata
        and fields["type"] == _TYPES[cls]
        and type(fields["id"]) in _TEXT_OR_NONE
        and type(fields["name"]) in _TEXT_OR_NONE
        and (cls is not AIMessage or ("tool_calls" not in kwargs and _calls_valid(fields)))
        and (cls is not ToolMessage or _result_valid(fields))
    )


def _all_of(parts: Any, *types: type) -> bool:
    return type(parts) is list and all(type(part) in types for part in parts)


def _result_valid(fields: dict[str, Any]) -> bool:
    return type(fields["tool_call_id"]) is str and fields["status"] in ("success", "error")


def _calls_valid(fields: dict[str, Any]) -> bool:
    calls, usage = fields["tool_calls"], fields["usage_metadata"]
    if fields["invalid_tool_calls"] != [] or not _all_of(calls, dict):
        return False
    return (usage is None or _usage_valid(usage)) and all(
        call.keys() == _TOOL_CALL_KEYS
        and type(call["name"]) is str
        and type(call["args"]) is dict
        and type(call["id"]) in _TEXT_OR_NONE
        and call["type"] == "tool_call"
        for call in calls
    )


def _usage_valid(usage: Any) -> bool:
    return (
        type(usage) is dict
        and usage.keys() >= _USAGE_COUNTS
        and usage.keys() <= _USAGE_COUNTS | _USAGE_DETAILS
        and all(
            type(usage[key]) is dict and all(type(count) is int for count in usage[key].values())
            for key in usage.keys() & _USAGE_DETAILS
        )
        and all(type(usage[key]) is int for key in _USAGE_COUNTS)
    )


# -- the full form: class code and all fields, as they stand. It is not stored: it is what a process
# keeps of a message, because comparing and copying it needs no loop in Python over its fields.

_fields_of = attrgetter("__dict__")
_extra_of = attrgetter("__pydantic_extra__")
_set_dict = BaseModel.__dict__["__dict__"].__set__
_set_fields_set = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__


def full_messages(
    classes: Sequence[type[BaseMessage]], messages: Sequence[BaseMessage]
) -> list[bytes] | None:
    """The full form of each message, all of `classes` in `CLASSES`; None if one is not plain."""
    if any(map(_extra_of, messages)):
        return None
    pairs = zip(map(_CODES.__getitem__, classes), map(_fields_of, messages), strict=True)
    try:
        return list(map(packb, pairs, repeat(None), repeat(PACK)))
    except TypeError:
        return None


def full_from_stored(stored: Sequence[bytes]) -> list[bytes]:
    """The full form of each of these compact forms, its fields in the order of the class."""
    codes = [item[0] for item in stored]
    classes = [CLASSES[code] for code in codes]
    try:
        kept = unpack_all([item[1:] for item in stored])
        fields = unpack_all([_FORMS[cls].fresh for cls in classes])
        for own, changed, names in zip(fields, kept, map(_FIELDS.get, classes), strict=True):
            for i, value in changed.items():
                own[names[i]] = value  # type: ignore[index]
    except Exception as exc:
        raise CorruptRecord(f"stored messages cannot be read back ({exc})") from exc
    return list(map(packb, zip(codes, fields, strict=True), repeat(None), repeat(PACK)))


def messages_from_full(full: Sequence[bytes]) -> list[BaseMessage]:
    """New messages from their full forms: no two callers share a mutable part."""
    pairs = unpack_all(full)
    classes = [CLASSES[code] for code, _ in pairs]
    names = {cls: set(_FORMS[cls].names) for cls in set(classes)}
    made: list[BaseMessage] = list(map(object.__new__, classes))
    for setting in (
        map(_set_dict, made, [fields for _, fields in pairs]),
        map(_set_fields_set, made, map(names.__getitem__, classes)),
        map(_set_extra, made, [{} for _ in made]),
        map(_set_private, made, repeat(None)),
    ):
        deque(setting, maxlen=0)
    return made

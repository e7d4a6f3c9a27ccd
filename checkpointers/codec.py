"""Items to bytes and back: a compact form for messages, the serializer's own for everything else.

Messages are most of what a thread holds. Under langgraph's `JsonPlusSerializer` they are stored as
their fields less the defaults, and rebuilt without validation, from bytes that perdure itself
wrote; the result equals what that serializer gives back, type for type. A message that is not
plain data all through, and every value under another serializer, goes through the serializer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import ormsgpack
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

from perdure.errors import CorruptRecord, ForbiddenType, Unstorable

# the options langgraph's serializer packs with, so that both take the same values for plain data
PACK: Final = (
    ormsgpack.OPT_NON_STR_KEYS
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_UUID
    | ormsgpack.OPT_REPLACE_SURROGATES
)
UNPACK: Final = ormsgpack.OPT_NON_STR_KEYS

# first byte of an item: a message class, or how the serializer named its output
_CLASSES: Final[dict[int, type[BaseMessage]]] = {
    1: HumanMessage,
    2: AIMessage,
    3: SystemMessage,
    4: ToolMessage,
}
_CODES: Final = {cls: code for code, cls in _CLASSES.items()}
_TYPED: Final = {"msgpack": 16, "null": 17, "bytes": 18, "bytearray": 19}
_TYPE_NAMES: Final = {code: name for name, code in _TYPED.items()}
_MSGPACK: Final = bytes((_TYPED["msgpack"],))
_NAMED: Final = 31  # any other name follows: its length in one byte, then itself

MESSAGE_CLASSES: Final = frozenset(_CODES)
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
_MUTABLE_DEFAULTS: Final = {
    cls: tuple(name for name, value in defaults.items() if type(value) in (dict, list))
    for cls, defaults in _DEFAULTS.items()
}
_EXT: Final = object()
_TOOL_CALL_KEYS: Final = {"name", "args", "id", "type"}
_USAGE_COUNTS: Final = {"input_tokens", "output_tokens", "total_tokens"}
_USAGE_DETAILS: Final = {"input_token_details", "output_token_details"}


class Template:
    """A decoded message, never handed out itself: each caller gets a fresh copy of it."""

    __slots__ = ("cls", "containers", "fields", "packed", "packed_keys")

    def __init__(self, cls: type[BaseMessage], fields: dict[str, Any]) -> None:
        self.cls = cls
        self.fields = fields
        held = [(key, value) for key, value in fields.items() if type(value) in (dict, list)]
        # most containers hold scalars, or dicts of scalars: copying those beats unpacking them
        self.containers = tuple((k, v, inner) for k, v in held if (inner := _inner(v)) is not None)
        self.packed_keys = tuple(key for key, value in held if _inner(value) is None)
        self.packed = ormsgpack.packb([fields[key] for key in self.packed_keys], option=PACK)

    def fresh(self, names: set[str]) -> BaseMessage:
        """A new message that shares no mutable part with any other but `names`, its fields set."""
        message = _make(self.cls)
        fields = self.fields.copy()
        for key, value, inner in self.containers:
            copied = fields[key] = value.copy()
            for name, part in inner:
                copied[name] = part.copy()
        if self.packed_keys:
            parts = ormsgpack.unpackb(self.packed, option=UNPACK)
            fields.update(zip(self.packed_keys, parts, strict=True))
        _set_dict(message, fields)
        _set_fields_set(message, names)
        _set_extra(message, {})
        _set_private(message, None)
        return message


class Item:
    """One item of a log: its stored bytes and, once asked for again, its decoded form."""

    __slots__ = ("asked", "stored", "template")

    def __init__(self, stored: bytes) -> None:
        self.stored = stored
        self.template: Template | None = None
        self.asked = False


def _inner(value: dict[Any, Any] | list[Any]) -> tuple[tuple[Any, Any], ...] | None:
    """The containers directly within a container; None when they hold containers themselves."""
    parts = value.items() if type(value) is dict else enumerate(value)
    inner = tuple((name, part) for name, part in parts if type(part) in (dict, list))
    for _, part in inner:
        within = part.values() if type(part) is dict else part
        if any(type(x) in (dict, list) for x in within):
            return None
    return inner


class Codec:
    """Encodes items for the log with one serializer.

    Args:
        serde: The serializer. The compact form of messages is used only with langgraph's own.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self.serde = serde
        self.compact = type(serde) is JsonPlusSerializer

    def encode(self, value: Any, path: Callable[[], str]) -> bytes:
        """One value as stored bytes; equal values give equal bytes.

        Args:
            value: What to store.
            path: Says where the value stands, should it be refused.

        Raises:
            Unstorable: The serializer refuses it, or a part of it.
            ForbiddenType: It could be stored, but its type is not on the allowlist for reading.
        """
        if self.compact and type(value) in _CODES:
            packed = _pack_message(value)
            if packed is not None:
                return packed
        try:
            name, data = self.serde.dumps_typed(value)
        except Exception as exc:
            where, part, reason = _culprit(self.serde, value, path(), exc)
            raise Unstorable(
                f"{where} is {_shown(part)}, which cannot be stored: {reason}. "
                "Keep plain data, messages, pydantic models or dataclasses in the state"
            ) from exc
        if self.compact and name == "msgpack" and not is_plain(value):
            self._refuse_forbidden(name, data, path)
        return _tagged(name, bytes(data))

    def _refuse_forbidden(self, name: str, data: bytes, path: Callable[[], str]) -> None:
        """Raise for what could be written and would then not be read back."""
        with _Blocked() as blocked:
            self.serde.loads_typed((name, data))
        if blocked:
            raise _forbidden(blocked[0], path())

    def fresh(self, items: Iterable[Item]) -> list[Any]:
        """The values of items, new at each call: no two callers share a mutable part.

        An item asked for once is rebuilt from its bytes; from then on from a template, which takes
        memory and a third of the time.

        Raises:
            ForbiddenType: A type in one is not on the allowlist.
            CorruptRecord: The bytes are not what `encode` writes.
        """
        names = {cls: set(fields) for cls, fields in _FIELDS.items()}
        out = []
        for item in items:
            template = item.template
            if template is not None:
                out.append(template.fresh(names[template.cls]))
                continue
            cls = _CLASSES.get(item.stored[0])
            if cls is None:
                out.append(self.decode(item.stored))
            elif item.asked:
                template = item.template = Template(cls, _unpack_fields(cls, item.stored))
                out.append(template.fresh(names[cls]))
            else:
                item.asked = True
                out.append(_rebuilt(cls, _unpack_fields(cls, item.stored), names[cls]))
        return out

    def content(self, items: Iterable[Item]) -> bytes | None:
        """What `content_bytes` of the items' values ends with; None: compare them one by one."""
        parts = []
        for item in items:
            cls = _CLASSES.get(item.stored[0])
            if item.template is not None:
                parts.append(ormsgpack.packb(item.template.fields, option=PACK))
            elif cls is not None:
                parts.append(ormsgpack.packb(_unpack_fields(cls, item.stored), option=PACK))
            elif (
                self.compact and item.stored[:1] == _MSGPACK and _unpacked(item.stored) is not _EXT
            ):
                parts.append(item.stored[1:])
            else:
                return None
        return b"".join(parts)

    def decode(self, stored: bytes) -> Any:
        """The value of stored bytes, new at each call.

        Raises:
            ForbiddenType: A type in it is not on the allowlist.
            CorruptRecord: The bytes are not what `encode` writes.
        """
        cls = _CLASSES.get(stored[0]) if stored else None
        if cls is not None:
            return _rebuilt(cls, _unpack_fields(cls, stored), set(_FIELDS[cls]))
        if self.compact and stored[:1] == _MSGPACK:
            value = _unpacked(stored)
            if value is not _EXT:
                return value
        return self.read(stored)

    def read(self, stored: bytes) -> Any:
        """The value of bytes that the serializer wrote.

        Raises:
            ForbiddenType: A type in it is not on the allowlist.
            CorruptRecord: The bytes are not what `encode` writes.
        """
        try:
            name, data = _untagged(stored)
        except (IndexError, KeyError, UnicodeDecodeError) as exc:
            raise CorruptRecord(
                f"a stored value of {len(stored)} bytes does not say how it was written"
            ) from exc
        return self.load(name, data)

    def load(self, name: str, data: bytes) -> Any:
        """What the serializer wrote, under the name it gave its output.

        Raises:
            ForbiddenType: A type in it is not on the allowlist.
            CorruptRecord: The serializer cannot read it.
        """
        try:
            with _Blocked() as blocked:
                value = self.serde.loads_typed((name, data))
        except Exception as exc:
            raise CorruptRecord(
                f"a stored value of {len(data)} bytes cannot be read back ({exc}); "
                "was it written with another serializer?"
            ) from exc
        if blocked:
            raise _forbidden(blocked[0], "a stored value")
        return value


def _unpack_fields(cls: type[BaseMessage], stored: bytes) -> dict[str, Any]:
    try:
        kept = ormsgpack.unpackb(memoryview(stored)[1:], option=UNPACK)
        fields = _DEFAULTS[cls].copy()
        for name in _MUTABLE_DEFAULTS[cls]:
            fields[name] = fields[name].copy()
        names = _FIELDS[cls]
        for i, value in kept.items():
            fields[names[i]] = value
    except Exception as exc:
        raise CorruptRecord(f"a stored {cls.__name__} cannot be read back ({exc})") from exc
    return fields


def _rebuilt(cls: type[BaseMessage], fields: dict[str, Any], names: set[str]) -> BaseMessage:
    message: BaseMessage = _make(cls)
    _set_dict(message, fields)
    _set_fields_set(message, names)
    _set_extra(message, {})
    _set_private(message, None)
    return message


def _unpacked(stored: bytes) -> Any:
    """Plain data as msgpack reads it, or `_EXT` when only the serializer can."""
    try:
        return ormsgpack.unpackb(memoryview(stored)[1:], option=UNPACK)
    except ValueError:
        return _EXT


def is_plain(value: Any) -> bool:
    """Whether a value is data that msgpack knows by itself."""
    try:
        ormsgpack.packb(value, option=PACK)
    except TypeError:
        return False
    return True


def content_bytes(values: Sequence[Any]) -> bytes | None:
    """What several items hold, as bytes to compare, in one pass without a Python loop.

    None when they are not all messages or all plain data: then they are compared one by one.
    """
    types = set(map(type, values))
    if types <= MESSAGE_CLASSES:
        if any(map(extra_of, values)):
            return None
        values = list(map(fields_of, values))
    elif types & MESSAGE_CLASSES:
        return None
    try:
        return ormsgpack.packb(values, option=PACK)
    except TypeError:
        return None


def content_header(n: int) -> bytes:
    """What `content_bytes` of `n` items begins with: msgpack's array header."""
    if n < 16:
        return bytes((0x90 | n,))
    return b"\xdc" + n.to_bytes(2, "big") if n < 1 << 16 else b"\xdd" + n.to_bytes(4, "big")


def _pack_message(message: BaseMessage) -> bytes | None:
    """The compact form, or None for a message that the serializer might rebuild differently."""
    cls = type(message)
    fields = message.__dict__
    if fields.keys() != _NAMES[cls] or message.__pydantic_extra__ or message.__pydantic_private__:
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
        return bytes((_CODES[cls],)) + ormsgpack.packb(kept, option=PACK)
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


def _tagged(name: str, data: bytes) -> bytes:
    code = _TYPED.get(name)
    if code is not None:
        return bytes((code,)) + data
    text = name.encode()
    return bytes((_NAMED, len(text))) + text + data


def _untagged(stored: bytes) -> tuple[str, bytes]:
    code = stored[0]
    if code == _NAMED:
        end = 2 + stored[1]
        return stored[2:end].decode(), stored[end:]
    return _TYPE_NAMES[code], stored[1:]


# -- saying which part of a value is to blame


def _shown(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__qualname__} ({text if len(text) <= 80 else text[:77] + '...'})"


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def _culprit(
    serde: SerializerProtocol, value: Any, path: str, error: Exception, depth: int = 0
) -> tuple[str, Any, Exception]:
    """The innermost part of a value that the serializer refuses by itself."""
    for step, part in _parts(value) if depth < 20 else []:
        try:
            serde.dumps_typed(part)
        except Exception as exc:
            return _culprit(serde, part, path + step, exc, depth + 1)
    return path, value, error


# -- the strict allowlist: langgraph's serializer reports a refused type only as an event

_refused = threading.local()


def _note_refusal(event: SerdeEvent) -> None:
    names = getattr(_refused, "names", None)
    if names is not None and event["kind"] in ("msgpack_blocked", "msgpack_method_blocked"):
        names.append((event["module"], event["name"]))


register_serde_event_listener(_note_refusal)


class _Blocked(list[tuple[str, str]]):
    """Collects the types that the serializer refuses in this thread while it is entered."""

    def __enter__(self) -> _Blocked:
        _refused.names = self
        return self

    def __exit__(self, *exc: object) -> None:
        _refused.names = None


def _forbidden(name: tuple[str, str], where: str) -> ForbiddenType:
    module, cls = name
    return ForbiddenType(
        f"{where} holds a {module}.{cls}, which is not on the allowlist of types that may be "
        f"rebuilt from a database; if you trust it, open the checkpointer with "
        f"allow=[({module!r}, {cls!r})] (or allow=[{cls}])"
    )

"""Values that are not plain data, as msgpack extension types, and back.

The format is langgraph's (`langgraph.checkpoint.serde.jsonplus`): an extension holds `[module,
name, payload, ...]`. Names are qualified, models are stored by attribute, not by `model_dump()`,
and a tuple within a set or a plain data class stays one. Only the types listed in `_KNOWN`, and
those on an allowlist, are ever called; plain data classes are put together by `objects`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, Final

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

from perdure.checkpointers.objects import (
    attributes_of,
    find_class,
    kind_of,
    name_of,
    private_of,
    rebuilt,
)
from perdure.checkpointers.packing import PACK, UNPACK

_log = logging.getLogger("perdure")

Name = tuple[str, str]  # of a class: its module and qualified name

# lone surrogates raise, and what derives from a builtin is shown to `Encoder`
STORED: Final = (PACK & ~ormsgpack.OPT_REPLACE_SURROGATES) | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
_EXACT: Final = STORED | ormsgpack.OPT_PASSTHROUGH_TUPLE
MAX_LEVELS: Final = 254  # ormsgpack's own limit for lists and dicts within each other
_MAX_OBJECTS: Final = 128  # each takes a share of the thread's stack

# langgraph's extension codes
_SINGLE, _POSITIONAL, _KEYWORDS, _METHOD, _MODEL_V1, _MODEL, _ARRAY, _SNAPSHOT = range(8)
_TUPLE: Final = 64  # ours: an array that is to be a tuple

# the types that langgraph's serializer rebuilds in strict mode, by calling them
_KNOWN_NAMES: Final = {
    "datetime": "datetime date time timedelta timezone",
    "uuid": "UUID",
    "decimal": "Decimal",
    "builtins": "set frozenset",
    "collections": "deque",
    "ipaddress": "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network",
    "pathlib": "Path PosixPath WindowsPath",
    "pathlib._local": "Path PosixPath WindowsPath",
    "zoneinfo": "ZoneInfo",
    "re": "compile Pattern",
    "pydantic.types": "SecretStr SecretBytes",
    "langchain_core.messages.base": "BaseMessage BaseMessageChunk",
    "langchain_core.messages.human": "HumanMessage HumanMessageChunk",
    "langchain_core.messages.ai": "AIMessage AIMessageChunk",
    "langchain_core.messages.system": "SystemMessage SystemMessageChunk",
    "langchain_core.messages.chat": "ChatMessage ChatMessageChunk",
    "langchain_core.messages.tool": "ToolMessage ToolMessageChunk",
    "langchain_core.messages.function": "FunctionMessage FunctionMessageChunk",
    "langchain_core.messages.modifier": "RemoveMessage",
    "langchain_core.documents.base": "Document",
    "langgraph.types": ("Send TimeoutPolicy Interrupt Command StateSnapshot PregelTask Overwrite"),
    "langgraph.store.base": "Item GetOp",
}
_KNOWN: Final = frozenset(
    (module, name) for module, names in _KNOWN_NAMES.items() for name in names.split()
)
_SEND: Final = ("langgraph.types", "Send")
_ITEM: Final = ("langgraph.store.base", "Item")
_DELTA_SNAPSHOT: Final = ("langgraph.checkpoint.serde.types", "_DeltaSnapshot")
_FROM_ISO: Final = "fromisoformat"

_langgraphs: Final = JsonPlusSerializer(allowed_msgpack_modules=None)


class TypeNotAllowed(TypeError):
    """A class that may not be rebuilt under the allowlist in force; `name` is its name."""

    def __init__(self, name: Name) -> None:
        super().__init__(f"{name[0]}.{name[1]} is not on the allowlist")
        self.name = name


class DetachedFields(dict[str, Any]):
    """The fields of an object whose class this process has not got.

    Stored again, it is an object of that class, with the fields it has by then.

    Attributes:
        origin: The extension code, the module, the name and what follows the payload.
        whole: Whether the dict is the payload; else the payload is its `value`.
    """

    __slots__ = ("origin", "whole")

    origin: tuple[int, str, str, list[Any]]
    whole: bool


class Allowlist:
    """Which classes may be rebuilt, as a langgraph serializer says.

    With the name `LOADED` among its `allowed_msgpack_modules`, or with `True` in their place,
    these are the plain data classes that the process has imported, and all classes named. Without
    they are those named: the strict rule.

    Args:
        serde: The serializer. Names that `with_msgpack_allowlist` has added count.
    """

    LOADED: Final = ("perdure", "any plain data class that is loaded")

    def __init__(self, serde: JsonPlusSerializer) -> None:
        everything = _names(serde, ("", ""))
        self.strict = not everything and not _names(serde, self.LOADED)
        self.names: Callable[[str, str], bool] = functools.lru_cache(maxsize=1024)(
            lambda module, name: not everything and _names(serde, (module, name))
        )


def _names(serde: JsonPlusSerializer, name: Name) -> bool:
    """Whether an allowlist has a name: adding it then changes nothing."""
    return serde.with_msgpack_allowlist([name]) is serde


class Encoder:
    """Encodes one value that is not plain data all through."""

    def __init__(self, allowlist: Allowlist) -> None:
        self._allowlist = allowlist
        self._depth = 0
        self._error: Exception | None = None

    def pack(self, value: Any) -> bytes:
        """A value as msgpack.

        Raises:
            TypeNotAllowed: A class in it is not on the allowlist.
            TypeError: It, or a part of it, cannot be stored.
        """
        try:
            return self._pack(value, STORED)
        except Exception as exc:
            raise self._error or exc from None

    def _pack(self, value: Any, option: int) -> bytes:
        return ormsgpack.packb(value, default=self._default, option=option)

    def _default(self, value: Any) -> Any:
        self._depth += 1
        try:
            if self._depth > _MAX_OBJECTS:
                raise TypeError(f"objects are nested deeper than {_MAX_OBJECTS} levels")
            return self._reduced(value)
        except Exception as exc:
            # ormsgpack would tell only the class; the first is the innermost
            self._error = self._error or exc
            raise
        finally:
            self._depth -= 1

    def _extension(self, code: int, parts: list[Any], *, exact: bool) -> ormsgpack.Ext:
        return ormsgpack.Ext(code, self._pack(parts, _EXACT if exact else STORED))

    def _reduced(self, value: Any) -> Any:
        cls: type = type(value)
        if cls is tuple:
            return self._extension(_TUPLE, list(value), exact=True)
        name = (cls.__module__, cls.__qualname__)
        if name in _KNOWN:
            return self._known(value, name)
        if name == _DELTA_SNAPSHOT:
            return ormsgpack.Ext(_SNAPSHOT, self._pack(value.value, STORED))
        if isinstance(value, BaseException):
            raise TypeError("an exception would come back as text; store str(error) or its parts")
        if cls is DetachedFields:
            return self._detached(value)
        if (kind := kind_of(cls)) is not None:
            return self._object(value, kind)
        for builtin, exactly in _BUILTINS.items():
            if isinstance(value, builtin):
                return exactly(value)
        if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
            return _array(numpy, value)
        return self._other(value, name)

    def _known(self, value: Any, name: Name) -> ormsgpack.Ext:
        """As langgraph encodes it, but with what it holds encoded by this encoder."""
        if isinstance(value, set | frozenset):
            return self._extension(_SINGLE, [*name, list(value)], exact=True)
        if name == ("collections", "deque"):
            return self._extension(_SINGLE, [*name, list(value)], exact=False)
        if name == _SEND:
            args = [value.node, value.arg]
            if (timeout := getattr(value, "timeout", None)) is not None:
                args.append(timeout)
            return self._extension(_POSITIONAL, [*name, args], exact=False)
        if isinstance(value, BaseModel):
            parts = [*name, value.model_dump(), "model_validate_json"]
            return self._extension(_MODEL, parts, exact=False)
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        elif isinstance(value, tuple):
            fields = attributes_of(value)
        elif name == _ITEM:
            fields = {slot: getattr(value, slot) for slot in type(value).__slots__}
        else:
            return _by_langgraph(value)
        return self._extension(_KEYWORDS, [*name, fields], exact=False)

    def _object(self, value: Any, kind: str) -> ormsgpack.Ext:
        name = name_of(type(value))
        if self._allowlist.strict and not self._allowlist.names(*name):
            raise TypeNotAllowed(name)
        fields = attributes_of(value)
        if kind == "enum":
            return self._extension(_SINGLE, [*name, fields["value"]], exact=True)
        if kind == "model":
            given = sorted(value.__pydantic_fields_set__)
            parts = [*name, fields, None, private_of(value) or None, given]
            return self._extension(_MODEL, parts, exact=True)
        return self._extension(_KEYWORDS, [*name, fields], exact=True)

    def _detached(self, value: DetachedFields) -> ormsgpack.Ext:
        code, module, name, rest = value.origin
        if self._allowlist.strict and not self._allowlist.names(module, name):
            raise TypeNotAllowed((module, name))
        payload = dict(value) if value.whole else value.get("value")
        return self._extension(code, [module, name, payload, *rest], exact=True)

    def _other(self, value: Any, name: Name) -> ormsgpack.Ext:
        """A class that only langgraph's serializer knows how to take apart, and that is trusted."""
        taken_apart = _by_langgraph(value)
        if not self._allowlist.names(*name):
            raise TypeNotAllowed(name)
        return taken_apart


def _by_langgraph(value: Any) -> ormsgpack.Ext:
    made: ormsgpack.Ext = ormsgpack.unpackb(
        _langgraphs.dumps_typed(value)[1], ext_hook=ormsgpack.Ext
    )
    return made


# what msgpack has a form for, from a class that derives from it, as langgraph's serializer does
_BUILTINS: Final[dict[type, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    list: list,
    dict: dict,
}


def _array(numpy: Any, value: Any) -> ormsgpack.Ext:
    if (
        type(value) is not numpy.ndarray
        or value.dtype.hasobject
        or numpy.dtype(value.dtype.str) != value.dtype
    ):
        raise TypeError(
            f"a {type(value).__name__} of {value.dtype} would not come back as it is; store a "
            "numpy.ndarray of numbers, booleans or text, or a list"
        )
    return _by_langgraph(value)


class Decoder:
    """Decodes one value."""

    def __init__(self, allowlist: Allowlist) -> None:
        self._allowlist = allowlist
        self._depth = 0
        self._error: Exception | None = None

    def unpack(self, data: bytes | memoryview) -> Any:
        """The value of what `Encoder.pack`, or langgraph's serializer, gave.

        Raises:
            TypeNotAllowed: A class in it is not on the allowlist, under the strict rule.
            ValueError: It is nothing that they gave.
        """
        try:
            return self._unpack(data)
        except Exception as exc:
            raise self._error or exc from None

    def _unpack(self, data: bytes | memoryview) -> Any:
        return ormsgpack.unpackb(data, ext_hook=self._hook, option=UNPACK)

    def _hook(self, code: int, data: bytes) -> Any:
        self._depth += 1
        try:
            if self._depth > _MAX_OBJECTS:
                raise ValueError(f"objects are nested deeper than {_MAX_OBJECTS} levels")
            return self._value(code, data)
        except Exception as exc:
            self._error = self._error or exc  # ormsgpack would tell nothing of it
            raise
        finally:
            self._depth -= 1

    def _value(self, code: int, data: bytes) -> Any:
        if code == _TUPLE:
            return tuple(self._unpack(data))
        if code == _SNAPSHOT:
            return _from_langgraph(code, ormsgpack.packb(None))._replace(value=self._unpack(data))
        if code == _ARRAY:
            array = _from_langgraph(code, data)
            if array is None:
                raise ValueError("an array needs numpy to be read, or is damaged")
            return array
        module, name, payload, *rest = self._unpack(data)
        if code > _MODEL or type(module) is not str or type(name) is not str:
            raise ValueError(f"it holds an unknown extension type, {code}")
        if (module, name) in _KNOWN:
            return _known_value(code, module, name, payload, rest)
        return self._object((code, module, name, rest), payload)

    def _object(self, origin: tuple[int, str, str, list[Any]], payload: Any) -> Any:
        code, module, name, rest = origin
        named = self._allowlist.names(module, name)
        if self._allowlist.strict and not named:
            raise TypeNotAllowed((module, name))
        cls = find_class(module, name, load=named)
        kind = kind_of(cls) if cls is not None else None
        why = "this process has not imported it"
        try:
            if cls is not None and kind is not None:
                exact = len(rest) == 3  # what langgraph writes of a model has one part more
                private, given = rest[1:] if exact else (None, None)
                dumped = kind == "model" and not exact
                return rebuilt(cls, payload, private, given, dumped=dumped)
            if cls is not None and named:
                return _called(cls, code, payload, rest)
            if cls is not None:
                why = "it is no pydantic model, dataclass, enum or named tuple"
        except Exception as exc:
            why = f"it cannot be rebuilt: {exc}"
        _note_detached(module, name, why)
        whole = type(payload) is dict and kind != "enum"
        found = DetachedFields(payload if whole else {"value": payload})
        found.origin, found.whole = origin, whole
        return found


def _from_langgraph(code: int, data: bytes) -> Any:
    return _langgraphs.loads_typed(("msgpack", ormsgpack.packb(ormsgpack.Ext(code, data))))


def _known_value(code: int, module: str, name: str, payload: Any, rest: list[Any]) -> Any:
    try:
        return _called(getattr(importlib.import_module(module), name), code, payload, rest)
    except Exception as exc:  # then langgraph's serializer gives the payload, too
        _note_detached(module, name, f"it cannot be rebuilt: {exc}")
        return payload


def _called(cls: Any, code: int, payload: Any, rest: list[Any]) -> Any:
    """What a trusted class makes of a payload."""
    if code == _SINGLE:
        return cls(payload)
    if code == _POSITIONAL:
        if len(payload) == 3 and name_of(cls) == _SEND:
            return cls(*payload[:2], timeout=payload[2])
        return cls(*payload)
    if code == _METHOD:
        if rest != [_FROM_ISO]:
            raise ValueError(f"the method {rest!r} is not allowed")
        return cls.fromisoformat(payload)
    if code != _MODEL:
        return cls(**payload)
    try:
        return cls(**payload)
    except Exception:
        return cls.model_construct(**payload)


_noted: set[Name] = set()  # logged already
_MAX_NOTED: Final = 1000


def _note_detached(module: str, name: str, why: str) -> None:
    if (module, name) in _noted or len(_noted) >= _MAX_NOTED:
        return
    _noted.add((module, name))
    _log.warning(
        "a stored value is a %s.%s, and %s; its fields are given as a dict (import the class "
        "before reading, or open the checkpointer with allow=[(%r, %r)]). Logged once",
        module,
        name,
        why,
        module,
        name,
    )


def allowlist_of(serde: SerializerProtocol) -> Allowlist | None:
    """The allowlist of langgraph's own serializer; None for any other serializer."""
    return Allowlist(serde) if type(serde) is JsonPlusSerializer else None

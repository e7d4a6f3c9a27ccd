"""Values that are not plain data, as msgpack and back.

Only the types listed in `KNOWN`, and those that an allowlist names, are ever called; plain data
classes are taken apart and put together by `objects`.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any, Final

import ormsgpack
from pydantic import BaseModel

from perdure.checkpointers.extensions import (
    ARRAY,
    KEYWORDS,
    KNOWN,
    METHOD,
    MODEL,
    PAIRS,
    POSITIONAL,
    SEND,
    SINGLE,
    SNAPSHOT,
    STRICT_SERDE,
    TUPLE,
    Allowlist,
    DetachedFields,
    Name,
    TooDeep,
    TypeNotAllowed,
)
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

# lone surrogates raise, and what derives from a builtin is shown to `Encoder`
_EXACT: Final = PACK | ormsgpack.OPT_PASSTHROUGH_TUPLE
_MAX_LEVELS: Final = 254  # ormsgpack's own limit for lists and dicts within each other
_MAX_OBJECTS: Final = 100  # each takes a share of the thread's stack
_KEYS: Final = frozenset((str, int, float, bool, bytes, NoneType))
_ITEM: Final = ("langgraph.store.base", "Item")
_DELTA_SNAPSHOT: Final = ("langgraph.checkpoint.serde.types", "_DeltaSnapshot")


class _Course:
    """One course through objects within each other."""

    def __init__(self, allowlist: Allowlist) -> None:
        self._allowlist = allowlist
        self._depth = 0
        self._error: Exception | None = None  # the innermost; ormsgpack would tell only its class

    def _deeper(self, step: Callable[..., Any], *args: Any) -> Any:
        self._depth += 1
        try:
            if self._depth > _MAX_OBJECTS:
                raise TooDeep(f"objects are nested deeper than {_MAX_OBJECTS} levels")
            return step(*args)
        except Exception as exc:
            self._error = self._error or exc
            raise
        finally:
            self._depth -= 1


class Encoder(_Course):
    """Encodes one value that is not plain data all through."""

    def pack(self, value: Any) -> bytes:
        """A value as msgpack.

        Raises:
            TypeNotAllowed: A class in it is not on the allowlist.
            TooDeep: It is nested too deep.
            TypeError: It, or a part of it, cannot be stored.
        """
        try:
            return self._pack(value, PACK)
        except Exception as exc:
            error = self._error or exc
            if isinstance(error, RecursionError) or str(error) == "Recursion limit reached":
                error = TooDeep(f"lists and dicts are nested deeper than {_MAX_LEVELS} levels")
            raise error from None

    def _pack(self, value: Any, option: int) -> bytes:
        step = partial(self._deeper, self._reduced)
        return ormsgpack.packb(value, default=step, option=option)

    def _extension(self, code: int, parts: list[Any], *, exact: bool) -> ormsgpack.Ext:
        if not exact:
            return ormsgpack.Ext(code, self._pack(parts, PACK))
        return ormsgpack.Ext(code, self._pack(self._exactly(parts), _EXACT))

    def _exactly(self, value: Any) -> Any:
        """A value in which nothing is left that msgpack would make plainer without a word."""
        if type(value) is list or type(value) is tuple:
            return type(value)(map(self._exactly, value))
        if type(value) is bytearray:
            parts = ["builtins", "bytearray", bytes(value)]
            return self._extension(SINGLE, parts, exact=False)
        if type(value) is not dict:
            return value
        if all(map(_is_plain_key, value)):
            return {key: self._exactly(part) for key, part in value.items()}
        return self._extension(PAIRS, [[*pair] for pair in value.items()], exact=True)

    def _reduced(self, value: Any) -> Any:
        cls: type = type(value)
        if cls is tuple:
            return self._extension(TUPLE, list(value), exact=True)
        name = (cls.__module__, cls.__qualname__)
        if name in KNOWN:
            return self._known(value, name)
        if name == _DELTA_SNAPSHOT:
            return ormsgpack.Ext(SNAPSHOT, self._pack(value.value, PACK))
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
            return self._extension(SINGLE, [*name, list(value)], exact=True)
        if name == ("collections", "deque"):
            return self._extension(SINGLE, [*name, list(value)], exact=False)
        if name == SEND:
            args = [value.node, value.arg]
            if (timeout := getattr(value, "timeout", None)) is not None:
                args.append(timeout)
            return self._extension(POSITIONAL, [*name, args], exact=False)
        if isinstance(value, BaseModel):
            parts = [*name, value.model_dump(), "model_validate_json"]
            return self._extension(MODEL, parts, exact=False)
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        elif isinstance(value, tuple):
            fields = attributes_of(value)
        elif name[0] == "pydantic.networks":
            return self._extension(SINGLE, [*name, str(value)], exact=False)
        elif name == _ITEM:
            fields = {slot: getattr(value, slot) for slot in type(value).__slots__}
        else:
            return _by_langgraph(value)
        return self._extension(KEYWORDS, [*name, fields], exact=False)

    def _object(self, value: Any, kind: str) -> ormsgpack.Ext:
        name = name_of(type(value))
        if self._allowlist.strict and not self._allowlist.names(*name):
            raise TypeNotAllowed(name)
        fields = attributes_of(value)
        if kind == "enum":
            return self._extension(SINGLE, [*name, fields["value"]], exact=True)
        if kind == "model":
            given = sorted(value.__pydantic_fields_set__)
            parts = [*name, fields, None, private_of(value) or None, given]
            return self._extension(MODEL, parts, exact=True)
        return self._extension(KEYWORDS, [*name, fields], exact=True)

    def _detached(self, value: DetachedFields) -> ormsgpack.Ext:
        code, module, name, rest = value.origin
        if self._allowlist.strict and not self._allowlist.names(module, name):
            raise TypeNotAllowed((module, name))
        payload = dict(value) if value.whole else value.get("value")
        return self._extension(code, [module, name, payload, *rest], exact=True)

    def _other(self, value: Any, name: Name) -> ormsgpack.Ext:
        """A class that only langgraph's serializer knows how to take apart, and that is trusted."""
        made = _by_langgraph(value)
        if not self._allowlist.names(*name):
            raise TypeNotAllowed(name)
        return made


def _is_plain_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(map(_is_plain_key, key)))


def _by_langgraph(value: Any) -> ormsgpack.Ext:
    packed = STRICT_SERDE.dumps_typed(value)[1]
    return ormsgpack.unpackb(packed, ext_hook=ormsgpack.Ext)  # type: ignore[no-any-return]


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


class Decoder(_Course):
    """Decodes one value."""

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
        step = partial(self._deeper, self._value)
        return ormsgpack.unpackb(data, ext_hook=step, option=UNPACK)

    def _value(self, code: int, data: bytes) -> Any:
        if code == TUPLE:
            return tuple(self._unpack(data))
        if code == PAIRS:
            return dict(self._unpack(data))
        if code == SNAPSHOT:
            return _from_langgraph(code, ormsgpack.packb(None))._replace(value=self._unpack(data))
        if code == ARRAY:
            array = _from_langgraph(code, data)
            if array is None:
                raise ValueError("an array needs numpy to be read, or is damaged")
            return array
        module, name, payload, *rest = self._unpack(data)
        if code > MODEL or type(module) is not str or type(name) is not str:
            raise ValueError(f"it holds an unknown extension type, {code}")
        if (module, name) in KNOWN:
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
    return STRICT_SERDE.loads_typed(("msgpack", ormsgpack.packb(ormsgpack.Ext(code, data))))


def _known_value(code: int, module: str, name: str, payload: Any, rest: list[Any]) -> Any:
    try:
        return _called(getattr(importlib.import_module(module), name), code, payload, rest)
    except Exception as exc:  # then langgraph's serializer gives the payload, too
        _note_detached(module, name, f"it cannot be rebuilt: {exc}")
        return payload


def _called(cls: Any, code: int, payload: Any, rest: list[Any]) -> Any:
    """The object that a trusted class makes of a payload."""
    if code == SINGLE:
        return cls(payload)
    if code == POSITIONAL:
        if len(payload) == 3 and name_of(cls) == SEND:
            return cls(*payload[:2], timeout=payload[2])
        return cls(*payload)
    if code == METHOD:
        if rest != ["fromisoformat"]:
            raise ValueError(f"the method {rest!r} is not allowed")
        return cls.fromisoformat(payload)
    if code != MODEL:
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

"""Values that are not plain data all through, from msgpack.

Only the types listed in `KNOWN`, and those that an allowlist names, are ever called; plain data
classes are put together by `objects`.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

import ormsgpack

from perdure.checkpointers.extensions import (
    ARRAY,
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
    TypeNotAllowed,
)
from perdure.checkpointers.objects import find_class, kind_of, name_of, rebuilt
from perdure.checkpointers.packing import UNPACK

_log = logging.getLogger("perdure")

_MAX_OBJECTS: Final = 100  # each takes a share of the thread's stack
_FROM_ISO: Final = "fromisoformat"


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
    """What a trusted class makes of a payload."""
    if code == SINGLE:
        return cls(payload)
    if code == POSITIONAL:
        if len(payload) == 3 and name_of(cls) == SEND:
            return cls(*payload[:2], timeout=payload[2])
        return cls(*payload)
    if code == METHOD:
        if rest != [_FROM_ISO]:
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

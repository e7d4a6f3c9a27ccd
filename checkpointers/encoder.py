"""Values that are not plain data all through, as msgpack."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import NoneType
from typing import Any, Final

import ormsgpack
from pydantic import BaseModel

from perdure.checkpointers.extensions import (
    KEYWORDS,
    KNOWN,
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
from perdure.checkpointers.objects import attributes_of, kind_of, name_of, private_of
from perdure.checkpointers.packing import PACK

# lone surrogates raise, and what derives from a builtin is shown to `Encoder`
_EXACT: Final = PACK | ormsgpack.OPT_PASSTHROUGH_TUPLE
_MAX_LEVELS: Final = 254  # ormsgpack's own limit for lists and dicts within each other
_MAX_OBJECTS: Final = 100  # each takes a share of the thread's stack
_KEYS: Final = frozenset((str, int, float, bool, bytes, NoneType))
_ITEM: Final = ("langgraph.store.base", "Item")
_DELTA_SNAPSHOT: Final = ("langgraph.checkpoint.serde.types", "_DeltaSnapshot")


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
        return ormsgpack.packb(value, default=self._default, option=option)

    def _default(self, value: Any) -> Any:
        self._depth += 1
        try:
            if self._depth > _MAX_OBJECTS:
                raise TooDeep(f"objects are nested deeper than {_MAX_OBJECTS} levels")
            return self._reduced(value)
        except Exception as exc:
            # ormsgpack would tell only the class; the first is the innermost
            self._error = self._error or exc
            raise
        finally:
            self._depth -= 1

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
        taken_apart = _by_langgraph(value)
        if not self._allowlist.names(*name):
            raise TypeNotAllowed(name)
        return taken_apart


def _is_plain_key(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(map(_is_plain_key, key)))


def _by_langgraph(value: Any) -> ormsgpack.Ext:
    made: ormsgpack.Ext = ormsgpack.unpackb(
        STRICT_SERDE.dumps_typed(value)[1], ext_hook=ormsgpack.Ext
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

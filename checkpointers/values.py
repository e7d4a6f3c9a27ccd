"""Convert values to msgpack and back.

Plain data (None, booleans, numbers, text, bytes, lists and dicts) is stored as ordinary msgpack.
Values that are not plain data become msgpack extensions in the format of langgraph's serializer
(`langgraph.checkpoint.serde.jsonplus`). An instance of a class is stored as a msgpack extension
that contains the encoded list `[module, name, payload, ...]`.

`KNOWN` lists the classes that perdure always decodes, such as `datetime` and langchain's message
classes. In this module, a "rebuildable class" is a pydantic model, dataclass, enum or named tuple
that is not in `KNOWN`. Instances of rebuildable classes are encoded in langgraph's format, with
three differences. The name of the class is its `__qualname__`, whereas langgraph stores its
`__name__`. Pydantic models are encoded from their attributes, not with `model_dump()`. The encoding
preserves the types of tuples, bytearrays and dict keys.

A registered type is a class that the program passes to the checkpointer as a `StoredType`. Decoding
calls the constructor of a class only in three cases. First, the class is in `KNOWN`. The second
case is a class on the allowlist whose instances can be rebuilt only by calling the class's
constructor. Third, the `load` function of a registered type calls the constructor. Instances of
rebuildable classes are rebuilt without running code of the class, except its default factories; see
`objects.py`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, NamedTuple

import ormsgpack
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

from perdure.checkpointers.known_types import KNOWN, Name
from perdure.checkpointers.objects import (
    detect_enum_model_dataclass_or_namedtuple,
    explain_missing_class,
    find_class,
    get_module_and_class_name,
    read_instance_attributes,
    read_private_attributes,
    rebuild_object_of_class,
)
from perdure.checkpointers.stored_types import (
    NO_TYPES,
    StoredType,
    StoredTypes,
    replace_renamed_class_name,
)

_log = logging.getLogger("perdure")

# Options for ormsgpack. They are the options of langgraph's serializer, with two differences.
# perdure adds OPT_PASSTHROUGH_SUBCLASS, so that ormsgpack passes instances of subclasses of builtin
# types to `Converter` instead of encoding them itself. langgraph always passes
# OPT_REPLACE_SURROGATES, but `Converter` passes it only for values that contain lone surrogates.
PACK: Final = (
    ormsgpack.OPT_NON_STR_KEYS
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
# ormsgpack options that preserve the types of nested values. `Converter` encodes tuples as msgpack
# extensions, because ormsgpack would encode them as arrays, like lists.
_EXACT: Final = PACK | ormsgpack.OPT_PASSTHROUGH_TUPLE
# message of the error that ormsgpack raises for lone surrogates
SURROGATES: Final = "string contains surrogates"
_UNPACK: Final = ormsgpack.OPT_NON_STR_KEYS
# maximum nesting depth of lists and dicts that ormsgpack supports
_MAX_LIST_DEPTH: Final = 254
# maximum nesting depth of objects; the limit prevents an overflow of the OS thread's stack
_MAX_OBJECT_DEPTH: Final = 100
_TOO_DEEP: Final = (
    f"lists and dicts are nested deeper than {_MAX_LIST_DEPTH} levels, or objects are nested "
    f"deeper than {_MAX_OBJECT_DEPTH} levels"
)
# types that `Converter` accepts as keys of a msgpack map or as elements of a tuple used as a key
_PLAIN_KEY_TYPES: Final = frozenset((str, int, float, bool, bytes, NoneType))

# langgraph's msgpack extension codes, in order: a class called with one argument, with positional
# arguments or with keyword arguments; a class method called with one argument; a pydantic v1 model;
# a pydantic v2 model; a numpy array; a snapshot of a `DeltaChannel`.
_SINGLE, _POSITIONAL, _KEYWORDS, _METHOD, _MODEL_V1, _MODEL, _ARRAY, _SNAPSHOT = range(8)
# perdure's own msgpack extension codes: 64 for a tuple, stored as an array; 65 for a dict with keys
# that msgpack does not support, stored as key-value pairs; and 66 for a value of a registered type,
# stored as [module, name, result of `dump`].
_TUPLE, _PAIRS, _REGISTERED = 64, 65, 66

_SEND: Final = ("langgraph.types", "Send")
_ITEM: Final = ("langgraph.store.base", "Item")
_DELTA_SNAPSHOT: Final = ("langgraph.checkpoint.serde.types", "_DeltaSnapshot")

# langgraph's serializer. perdure uses this serializer for objects that perdure does not encode
# itself: numpy arrays, simple objects such as UUIDs and dates, and instances of other allowlisted
# classes.
_LANGGRAPH: Final = JsonPlusSerializer(allowed_msgpack_modules=None)
DeltaSnapshot: Final[Any] = type(
    _LANGGRAPH.loads_typed(
        ("msgpack", ormsgpack.packb(ormsgpack.Ext(_SNAPSHOT, ormsgpack.packb(None))))
    )
)
"""langgraph's class for snapshots of a `DeltaChannel`, which langgraph does not export."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The items to append to a channel's list, passed to `put` instead of the complete list.

    To store many checkpoints of one growing list, for example in an import, pass a `Continuation`
    to `put` as the channel's value instead of the complete list. Only the new `items` are encoded
    and compared with the stored log. The cost of storing a checkpoint therefore does not depend on
    the length of the channel's complete list. The items of a `Continuation` are always appended to
    the list in the parent checkpoint, even if the parent is not the head of the thread.
    """

    items: list[Any]


# -- plain data


# `pack` raises TypeError if the value or a part of it is not plain data.
pack: Final[Callable[[Any], bytes]] = functools.partial(ormsgpack.packb, option=PACK)
# `unpack` raises ValueError if the bytes are not valid msgpack or contain an extension.
unpack: Final[Callable[[bytes | memoryview], Any]] = functools.partial(
    ormsgpack.unpackb, option=_UNPACK
)


def unpack_all(encoded: Sequence[bytes]) -> list[Any]:
    """Unpack several values in one call, which is faster than calling `unpack` for each value."""
    # Build the header of a msgpack array; for its format, see https://msgpack.org.
    count = len(encoded)
    if count < 16:
        header = bytes((0x90 | count,))
    else:
        header = b"\xdc" + count.to_bytes(2) if count < 1 << 16 else b"\xdd" + count.to_bytes(4)
    values: list[Any] = unpack(header + b"".join(encoded))
    return values


# -- which classes may be rebuilt


class TypeNotAllowed(TypeError):
    """A value cannot be stored or loaded, because its class is not on the allowlist."""

    def __init__(self, name: Name) -> None:
        super().__init__(f"{name[0]}.{name[1]} is not on the allowlist")
        self.name = name


class Allowlist:
    """Decides which classes perdure may deserialize, based on the option `allowed_msgpack_modules`.

    The serializer option `allowed_msgpack_modules` names the classes that the checkpointer may
    rebuild. If `allowed_msgpack_modules` is True or contains `LOADED`, the allowlist also accepts
    rebuildable classes (see the module docstring) from any module that is already imported. With
    any other value of `allowed_msgpack_modules`, the allowlist is strict, which means that it
    accepts only the classes that the option names.

    Attributes:
        types: The types that the program has registered, and its aliases for stored names.
        is_strict: Whether only classes that the option names may be rebuilt.
        has_name: A function that returns whether the option names a class. If the option is True,
            the function returns False for every class. The option then names no classes, so
            `Converter` calls only the constructors of classes in `KNOWN`.
    """

    # This is not the name of a class. It has the form of a class name, so that it can be an element
    # of `allowed_msgpack_modules`.
    LOADED: Final = ("perdure", "any plain data class that is loaded")

    def __init__(self, serde: JsonPlusSerializer, types: StoredTypes = NO_TYPES) -> None:
        self.types = types

        def allows_name(name: Name) -> bool:
            # with_msgpack_allowlist returns the serializer itself if the serializer already allows
            # the class name
            return serde.with_msgpack_allowlist([name]) is serde

        everything = allows_name(("", ""))
        self.is_strict = not everything and not allows_name(self.LOADED)
        self.has_name = functools.lru_cache(maxsize=1024)(
            lambda name: not everything and allows_name(name)
        )

    def check_allowed(self, name: Name) -> None:
        """Raise `TypeNotAllowed` if the allowlist is strict and does not name the class.

        An instance of a rebuildable class (see the module docstring) may be rebuilt if
        `check_allowed` does not raise. For any other class, call the constructor only if `has_name`
        also returns True.
        """
        if self.is_strict and not self.has_name(name):
            raise TypeNotAllowed(name)


class ObjectOrigin(NamedTuple):
    """How an object was encoded.

    Attributes:
        extension_code: The code of the msgpack extension.
        class_name: The name of the object's class.
        further_parts: The elements of the extension's list after the payload.
    """

    extension_code: int
    class_name: Name
    further_parts: list[Any]


class DetachedFields(dict[str, Any]):
    """A dict of an object's fields, returned instead of the object if the object cannot be rebuilt.

    An object cannot be rebuilt, for example, if its class is not importable in this process. When a
    `DetachedFields` is stored, its current entries are encoded as the fields of an instance of the
    original class.

    Attributes:
        origin: How the object was encoded.
        is_payload: Whether the dict itself is the payload. If False, the payload is the entry
            `value` of the dict.
    """

    __slots__ = ("is_payload", "origin")

    origin: ObjectOrigin
    is_payload: bool

    # Hash by identity. A `DetachedFields` must be hashable, because it may replace an object that
    # is an element of a set or a key of a dict.
    __hash__ = object.__hash__  # type: ignore[assignment]


# -- values that are not plain data


class Converter:
    """Converts one value, including its nested values, to msgpack or from msgpack.

    Args:
        allowlist: The classes that may occur in the value.
        exact: Whether lone surrogates are refused in every text. By default, they are replaced with
            "?", except in keys of dicts, in ids of messages, and in values that are encoded by
            `_encode_extension_with_exact_types` (such as sets and instances of rebuildable classes)
            or are of a registered type. There, they are always refused.
        former: Maps the present name of a class to the earlier name to write.

    Attributes:
        replacing: Whether lone surrogates are replaced with "?", because the value has some.
    """

    def __init__(
        self,
        allowlist: Allowlist,
        *,
        exact: bool = False,
        former: Mapping[Name, Name] | None = None,
    ) -> None:
        self._allowlist, self._types, self._former = allowlist, allowlist.types, former or {}
        self._may_replace = not exact
        self.replacing = False
        # True while a value of a registered type is being encoded. Also True in the `Converter`
        # with which `_encode_value_of_registered_type` checks that the encoded value can be
        # decoded. If the `load` function of a nested value fails in this check, its error is
        # raised, and the value is not replaced with `DetachedFields`.
        self._in_registered = False
        self._depth = 0
        # The first exception raised while converting a nested object. It is kept so that it can be
        # raised later, because ormsgpack replaces it with an exception of its own.
        self._error: Exception | None = None

    def pack(self, value: Any) -> bytes:
        """Convert a value to msgpack.

        Raises:
            TypeNotAllowed: A class in the value is not on the allowlist.
            RecursionError: The value is nested too deeply.
            TypeError: The value or a part of it cannot be stored.
        """
        try:
            return self._pack_with_extensions(value)
        except Exception as exc:
            error = self._error or exc
            if self._may_replace and not self.replacing and str(error) == SURROGATES:
                self.replacing, self._error = True, None
                return self.pack(value)
            if isinstance(error, RecursionError) or str(error) == "Recursion limit reached":
                error = RecursionError(_TOO_DEEP)
            raise error from None

    def unpack(self, data: bytes | memoryview) -> Any:
        """Decode a value from msgpack data that `pack` or langgraph's serializer has written.

        Raises:
            TypeNotAllowed: The allowlist is strict, and does not name a class in the value.
            ValueError: The data has another format.
        """
        try:
            return self._unpack_value(data)
        except Exception as exc:
            raise self._error or exc from None

    def _pack_with_extensions(self, value: Any, ormsgpack_options: int = PACK) -> bytes:
        if self.replacing and ormsgpack_options == PACK:
            ormsgpack_options |= ormsgpack.OPT_REPLACE_SURROGATES
        return ormsgpack.packb(
            value,
            functools.partial(self._call_within_nesting_limit, self._encode_as_msgpack_extension),
            ormsgpack_options,
        )

    def _unpack_value(self, data: bytes | memoryview) -> Any:
        hook = functools.partial(self._call_within_nesting_limit, self._decode_msgpack_extension)
        return ormsgpack.unpackb(data, ext_hook=hook, option=_UNPACK)

    def _call_within_nesting_limit(self, convert: Callable[..., Any], *args: Any) -> Any:
        """Convert a nested object by calling `convert`, and enforce the nesting limit."""
        self._depth += 1
        try:
            if self._depth > _MAX_OBJECT_DEPTH:
                raise RecursionError(_TOO_DEEP)
            return convert(*args)
        except Exception as exc:
            self._error = self._error or exc
            raise
        finally:
            self._depth -= 1

    # -- to msgpack

    def _encode_as_msgpack_extension(self, value: Any) -> Any:
        """Convert a value that ormsgpack passes to its `default` hook because of the value's type.

        If the value is an instance of a subclass of a builtin type, return a value of the builtin
        type. Otherwise, return a msgpack extension.
        """
        cls: type = type(value)
        name = (cls.__module__, cls.__qualname__)
        if cls is tuple:
            return self._encode_extension_with_exact_types(_TUPLE, list(value))
        if cls is DetachedFields:
            return self._reencode_object_of_unavailable_class(value)
        if (registered := self._types.by_class.get(cls)) is not None:
            return self._encode_value_of_registered_type(value, registered)
        if self.replacing and isinstance(value, BaseMessage):
            # Encode the message's id and discard the encoded id. The encoding raises an error if
            # the id contains a lone surrogate.
            ormsgpack.packb(value.id)
        if name in KNOWN:
            return self._encode_instance_of_known_class(value, name)
        if name == _DELTA_SNAPSHOT:
            return ormsgpack.Ext(_SNAPSHOT, self._pack_with_extensions(value.value))
        if isinstance(value, BaseException):
            raise TypeError(
                "exceptions cannot be stored, because perdure would read them back as text; store "
                "str(error) or the attributes of the exception instead"
            )
        if detect_enum_model_dataclass_or_namedtuple(cls) is not None:
            return self._encode_data_class_instance(value)
        return self._encode_builtin_subclass_or_use_langgraph_serializer(value, name)

    def _encode_extension_with_exact_types(
        self, extension_code: int, parts: list[Any]
    ) -> ormsgpack.Ext:
        """Build a msgpack extension that preserves the exact types of all nested values."""
        return ormsgpack.Ext(
            extension_code,
            self._pack_with_extensions(self._replace_types_that_msgpack_changes(parts), _EXACT),
        )

    def _replace_types_that_msgpack_changes(self, value: Any) -> Any:
        """Replace nested values with msgpack extensions if msgpack cannot represent them exactly.

        These values are bytearrays, and dicts with a key that msgpack does not support.

        Each replaced value becomes a msgpack extension that also records the value's original type.
        Tuples need no replacement here, because an encoder with the options `_EXACT` writes tuples
        as msgpack extensions.
        """
        if type(value) is list or type(value) is tuple:
            return type(value)(map(self._replace_types_that_msgpack_changes, value))
        if type(value) is bytearray:
            return ormsgpack.Ext(_SINGLE, pack(["builtins", "bytearray", bytes(value)]))
        if type(value) is not dict:
            return value
        if all(map(_is_plain_key, value)):
            return {
                key: self._replace_types_that_msgpack_changes(part) for key, part in value.items()
            }
        return self._encode_extension_with_exact_types(_PAIRS, [[*pair] for pair in value.items()])

    def _encode_instance_of_known_class(self, value: Any, name: Name) -> ormsgpack.Ext:
        """Encode an instance of one of the classes in `KNOWN`, using LangGraph's format.

        Values nested in the instance are encoded by the `Converter`, not by langgraph.
        """
        cls: Any = type(value)
        code, further_parts = _KEYWORDS, []
        payload: Any
        if isinstance(value, set | frozenset):
            # Sort the elements of the set, so that equal sets are encoded to equal bytes even if
            # their iteration orders differ.
            parts = sorted(
                value,
                key=lambda part: self._pack_with_extensions(
                    self._replace_types_that_msgpack_changes(part), _EXACT
                ),
            )
            return self._encode_extension_with_exact_types(_SINGLE, [*name, parts])
        if isinstance(value, deque):
            return self._encode_deque(value, name)
        if name == _SEND:
            code, payload = _POSITIONAL, [value.node, value.arg]
            if (timeout := getattr(value, "timeout", None)) is not None:
                payload.append(timeout)
        elif isinstance(value, BaseModel):
            code, payload, further_parts = _MODEL, value.model_dump(), ["model_validate_json"]
            # `model_dump` converts `DetachedFields` and values of registered types to text or plain
            # dicts. For fields that contain such values, use the original field values instead.
            payload |= {
                n: v
                for n, v in value.__dict__.items()
                if self._contains_registered_type_or_detached_fields(v)
            }
        elif detect_enum_model_dataclass_or_namedtuple(cls) is not None:
            payload = read_instance_attributes(value)
        elif name[0] == "pydantic.networks":
            code, payload = _SINGLE, str(value)
        elif name == _ITEM:
            payload = {slot: getattr(value, slot) for slot in cls.__slots__}
        else:
            return _encode_by_langgraph(value)
        return ormsgpack.Ext(code, self._pack_with_extensions([*name, payload, *further_parts]))

    def _encode_deque(self, value: deque[Any], name: Name) -> ormsgpack.Ext:
        """Encode a deque in LangGraph's format, and add its `maxlen`, which LangGraph omits."""
        items = list(value)
        if value.maxlen is None:
            return ormsgpack.Ext(_SINGLE, self._pack_with_extensions([*name, items]))
        return ormsgpack.Ext(
            _POSITIONAL, self._pack_with_extensions([*name, [items, value.maxlen]])
        )

    def _encode_data_class_instance(self, value: Any) -> ormsgpack.Ext:
        """Encode an instance of a rebuildable class as its class name and attributes.

        The docstring of the module defines "rebuildable class".
        """
        cls: Any = type(value)
        name, kind, fields = (
            get_module_and_class_name(cls),
            detect_enum_model_dataclass_or_namedtuple(cls),
            read_instance_attributes(value),
        )
        self._allowlist.check_allowed(name)
        name = replace_renamed_class_name(name, self._former) if self._former else name
        if kind == "enum":
            return self._encode_extension_with_exact_types(_SINGLE, [*name, fields["value"]])
        if kind == "model":
            return self._encode_extension_with_exact_types(
                _MODEL,
                [
                    *name,
                    fields,
                    None,
                    read_private_attributes(value) or None,
                    sorted(value.__pydantic_fields_set__),
                ],
            )
        return self._encode_extension_with_exact_types(_KEYWORDS, [*name, fields])

    def _encode_value_of_registered_type(
        self, value: Any, registered: StoredType[Any]
    ) -> ormsgpack.Ext:
        """Encode a value of a registered type with `dump`, and check that `load` can read it."""
        name = replace_renamed_class_name(registered.stored_name, self._former)
        outermost, self._in_registered = not self._in_registered, True
        packed = self._pack_with_extensions(
            self._replace_types_that_msgpack_changes([*name, registered.dump_value(value)]), _EXACT
        )
        if outermost:
            self._in_registered = False
            check = Converter(self._allowlist)
            check._in_registered = True
            registered.load_value(check.unpack(packed)[2])
        return ormsgpack.Ext(_REGISTERED, packed)

    def _contains_registered_type_or_detached_fields(self, value: Any) -> bool:
        """Return whether a value contains `DetachedFields` or a value of a registered type."""
        cls = type(value)
        if cls is DetachedFields or cls in self._types.by_class:
            return True
        if isinstance(value, dict):
            return any(map(self._contains_registered_type_or_detached_fields, value.values()))
        return isinstance(value, list | tuple | set | frozenset | deque) and any(
            map(self._contains_registered_type_or_detached_fields, value)
        )

    def _reencode_object_of_unavailable_class(
        self, detached_fields: DetachedFields
    ) -> ormsgpack.Ext:
        code, name, rest = detached_fields.origin
        self._allowlist.check_allowed(name)
        payload = (
            dict(detached_fields) if detached_fields.is_payload else detached_fields.get("value")
        )
        return self._encode_extension_with_exact_types(code, [*name, payload, *rest])

    def _encode_builtin_subclass_or_use_langgraph_serializer(self, value: Any, name: Name) -> Any:
        """Encode a value whose type has no dedicated encoding.

        An instance of a subclass of str, int, list or dict is encoded as that type. Numpy arrays
        are encoded by langgraph's serializer. For any other object, `TypeNotAllowed` is raised if
        the allowlist does not name its class. An object whose class is in the allowlist is encoded
        by langgraph's serializer. As an exception, `_encode_deque` encodes an instance of a deque
        subclass if the instance has a `maxlen`.
        """
        for builtin, plain in _BUILTINS.items():
            if isinstance(value, builtin):
                return plain(value)
        if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
            dtype = value.dtype
            if (
                type(value) is numpy.ndarray
                and not dtype.hasobject
                and numpy.dtype(dtype.str) == dtype
            ):
                return _encode_by_langgraph(value)
            raise TypeError(
                f"a {type(value).__name__} with the dtype {dtype} cannot be stored, because "
                "perdure would read it back as a different value; store a list, or a numpy.ndarray "
                "of numbers, booleans or text"
            )
        has_limit = isinstance(value, deque) and value.maxlen is not None
        encoded = self._encode_deque(value, name) if has_limit else _encode_by_langgraph(value)
        if not self._allowlist.has_name(name):
            raise TypeNotAllowed(name)
        return encoded

    # -- from msgpack

    def _decode_msgpack_extension(self, code: int, data: bytes) -> Any:
        """Decode a msgpack extension from its type code and its content."""
        if code == _TUPLE:
            return tuple(self._unpack_value(data))
        if code == _PAIRS:
            return dict(self._unpack_value(data))
        if code == _SNAPSHOT:
            return _decode_by_langgraph(code, pack(None))._replace(value=self._unpack_value(data))
        if code == _ARRAY:
            array = _decode_by_langgraph(code, data)
            if array is None:
                raise ValueError("a numpy array cannot be decoded; check that numpy is installed")
            return array
        module, name, payload, *rest = self._unpack_value(data)
        if (
            (code > _MODEL and code != _REGISTERED)
            or type(module) is not str
            or type(name) is not str
        ):
            raise ValueError(f"the data contains an unknown extension type, {code}")
        if code == _REGISTERED:
            return self._load_value_of_registered_type((module, name), payload)
        if (module, name) in KNOWN:
            try:
                return _call_class_with_stored_arguments(
                    getattr(importlib.import_module(module), name), code, payload, rest
                )
            except Exception as exc:
                # If the object cannot be rebuilt, return the payload, as langgraph's serializer
                # does.
                _log_that_class_is_read_as_dict(
                    (module, name), f"the object cannot be rebuilt ({exc})"
                )
                return payload
        return self._rebuild_object_or_detach_its_fields(
            ObjectOrigin(code, (module, name), rest), payload
        )

    def _rebuild_object_or_detach_its_fields(self, origin: ObjectOrigin, payload: Any) -> Any:
        """Rebuild an object of a class that is not in `KNOWN`.

        If the object cannot be rebuilt, for example because its class is not available, return its
        fields as `DetachedFields`.
        """
        code, name, rest = origin
        cls = self._types.find_alias_target(name)
        if cls is None:
            self._allowlist.check_allowed(name)
            is_named = self._allowlist.has_name(name)
            cls = find_class(*name, load=is_named)
        else:
            self._allowlist.check_allowed(get_module_and_class_name(cls))
            is_named = self._allowlist.has_name(get_module_and_class_name(cls))
        kind = detect_enum_model_dataclass_or_namedtuple(cls) if cls is not None else None
        reason = explain_missing_class(*name)
        try:
            if kind is not None:
                # Perdure writes exactly 3 elements after the payload of a pydantic model; langgraph
                # writes a different number.
                is_exact = len(rest) == 3
                private, fields_set = rest[1:] if is_exact else (None, None)
                return rebuild_object_of_class(
                    cls,
                    payload,
                    private,
                    fields_set,
                    is_model_dump=kind == "model" and not is_exact,
                )
            if cls is not None and is_named:
                return _call_class_with_stored_arguments(cls, code, payload, rest)
            if cls is not None:
                reason = "the class is not a pydantic model, dataclass, enum or named tuple"
        except Exception as exc:
            reason = f"the object cannot be rebuilt ({exc})"
        _log_that_class_is_read_as_dict(name, reason)
        return _wrap_fields_of_unavailable_class(
            origin, payload, is_payload=type(payload) is dict and kind != "enum"
        )

    def _load_value_of_registered_type(self, name: Name, payload: Any) -> Any:
        """Load a value of a registered type.

        If the value cannot be loaded, return its stored payload wrapped in a `DetachedFields`.
        """
        registered = self._types.find_registered_type(name)
        if registered is None:
            self._allowlist.check_allowed(name)
            reason = "this checkpointer was opened without a registered type of this name"
        else:
            try:
                return registered.load_value(payload)
            except TypeError as exc:
                if self._in_registered:
                    raise
                reason = f"the value cannot be loaded: {exc}"
        _log_that_class_is_read_as_dict(
            name,
            reason,
            "open the checkpointer with types=[StoredType(cls, dump, load)] for this type",
        )
        return _wrap_fields_of_unavailable_class(
            ObjectOrigin(_REGISTERED, name, []), payload, is_payload=type(payload) is dict
        )


def _wrap_fields_of_unavailable_class(
    origin: ObjectOrigin, fields_or_value: Any, *, is_payload: bool
) -> DetachedFields:
    detached = DetachedFields(fields_or_value if is_payload else {"value": fields_or_value})
    detached.origin, detached.is_payload = origin, is_payload
    return detached


def _is_plain_key(key: Any) -> bool:
    return type(key) in _PLAIN_KEY_TYPES or (type(key) is tuple and all(map(_is_plain_key, key)))


# `_BUILTINS` maps builtin types to functions. Each function converts an instance of a subclass to
# the builtin type, as langgraph's serializer does.
_BUILTINS: Final[dict[type, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    list: list,
    dict: dict,
}


def _encode_by_langgraph(value: Any) -> ormsgpack.Ext:
    packed = _LANGGRAPH.dumps_typed(value)[1]
    return ormsgpack.unpackb(packed, ext_hook=ormsgpack.Ext)  # type: ignore[no-any-return]


def _decode_by_langgraph(code: int, data: bytes) -> Any:
    return _LANGGRAPH.loads_typed(("msgpack", ormsgpack.packb(ormsgpack.Ext(code, data))))


def _call_class_with_stored_arguments(
    cls: Any, extension_code: int, stored_arguments: Any, further_parts: list[Any]
) -> Any:
    """Build an object by calling its class in the way that its msgpack extension code specifies.

    The class must be trusted.
    """
    if extension_code == _SINGLE:
        return cls(stored_arguments)
    if extension_code == _POSITIONAL:
        if len(stored_arguments) == 3 and get_module_and_class_name(cls) == _SEND:
            return cls(*stored_arguments[:2], timeout=stored_arguments[2])
        if issubclass(cls, deque):
            # A subclass of deque might have a constructor that does not accept `maxlen`.
            with suppress(TypeError):
                return cls(*stored_arguments)
            return cls(stored_arguments[0])
        return cls(*stored_arguments)
    if extension_code == _METHOD:
        if further_parts != ["fromisoformat"]:
            raise ValueError(
                f"decoding the stored value would call the method {further_parts!r}, which is not "
                "allowed"
            )
        return cls.fromisoformat(stored_arguments)
    if extension_code != _MODEL:
        return cls(**stored_arguments)
    try:
        return cls(**stored_arguments)
    except Exception:
        return cls.model_construct(**stored_arguments)


_noted: set[Name] = set()
_MAX_NOTED: Final = 1000


def _log_that_class_is_read_as_dict(name: Name, reason: str, remedy: str = "") -> None:
    """Log a warning that objects of a class are loaded as dicts, and say how to avoid this.

    The warning is logged only once per class, and for at most `_MAX_NOTED` classes.

    Args:
        name: The stored name of the class.
        reason: The reason, as a clause.
        remedy: The advice; the default is to import the class, allow it or give an alias.
    """
    if name in _noted or len(_noted) >= _MAX_NOTED:
        return
    _noted.add(name)
    remedy = remedy or (
        "import the class before reading, or open the checkpointer with "
        f"allow=[{name!r}]; if the class was renamed or moved, with aliases={{{name!r}: NewClass}}"
    )
    _log.warning(
        "a stored value is a %s.%s, but %s; its fields are returned as a dict (%s). Logged once",
        *(*name, reason, remedy),
    )

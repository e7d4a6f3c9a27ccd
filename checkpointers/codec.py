"""Encode values to bytes, and decode them again.

With langgraph's `JsonPlusSerializer`, messages have their own compact encoding (module `messages`),
because most stored values are messages. Values that are not messages are encoded as msgpack (module
`values`). Decoding returns the same objects as langgraph's serializer, with one exception. Inside
sets, pydantic models, dataclasses, enums and named tuples, perdure preserves the types of tuples,
bytearrays and dict keys (see the module `values`). If the checkpointer uses a serializer other than
`JsonPlusSerializer`, that serializer encodes all values.

`Codec.encode` encodes equal values of the same types as equal bytes, unless they contain dicts
whose keys are in different orders. In the bytes that `Codec.encode` returns for a message, the
fields are in a fixed order. `Codec.encode_for_comparison` keeps the field order of the message
object, and is therefore faster than `Codec.encode`.
"""

from __future__ import annotations

import logging
import reprlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from types import NoneType
from typing import Any, Final

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from ormsgpack import packb
from pydantic import BaseModel

from perdure.checkpointers.message_encoding import (
    CLASSES,
    is_message_unchanged_by_validation,
    pack_message_in_declared_field_order,
    pack_messages_if_all_plain,
    unpack_messages,
)
from perdure.checkpointers.objects import (
    detect_enum_model_dataclass_or_namedtuple,
    read_instance_attributes,
    read_private_attributes,
)
from perdure.checkpointers.stored_types import NO_TYPES, StoredTypes
from perdure.checkpointers.values import (
    PACK,
    SURROGATES,
    Allowlist,
    Converter,
    TypeNotAllowed,
    pack,
    unpack,
    unpack_all,
)
from perdure.errors import CorruptRecord, ForbiddenType, SerializationError, Unstorable

# The first byte of an encoded value identifies the format of the remaining bytes. A message in
# compact form has no separate format byte, because the compact form always starts with the byte
# `MESSAGE`.
_FORMAT_CODES: Final = {"msgpack": 16, "null": 17, "bytes": 18, "bytearray": 19}
_FORMAT_NAMES: Final = {code: name for name, code in _FORMAT_CODES.items()}
# First byte of a value whose encoding has no code in `_FORMAT_CODES`. The next byte contains the
# length of the encoding's name, and the name follows.
_OTHER_FORMAT: Final = 31
_PLAIN: Final = b"\x10"  # "msgpack"
# First byte of a message in compact form. It is the msgpack header of a two-element array.
MESSAGE: Final = b"\x92"
_MESSAGES: Final = frozenset(CLASSES.values())
_NULL: Final = b"\x11"
# Types that langgraph's serializer encodes in a format other than msgpack.
_SERIALIZER_TYPES: Final = (bytes, bytearray, NoneType)
_log = logging.getLogger("perdure")
# Maximum number of steps, such as `.name` or `[0]`, in the path that an error message shows. The
# path leads to the part of a value that cannot be encoded. The number of steps is limited, because
# each step requires encoding parts of the value again.
_MAX_STEPS: Final = 20


class Codec:
    """Encodes values for storage and decodes stored values, using one serializer.

    Args:
        serde: The serializer. If it is langgraph's own serializer, msgpack is encoded and decoded
            here, with the serializer's allowlist; see `Allowlist`.
        types: Registered types and aliases, which are used only with langgraph's serializer.

    Attributes:
        former_names: Tables that map present names of classes to earlier names, for
            `iter_encodings_with_former_class_names`.
        packs_messages: Whether the serializer is langgraph's own, so that messages are encoded in
            their compact form.
        replaced_path: The path of the first value in which a lone surrogate was replaced, or `""`.
        is_replacement_logged: Whether the replacement was logged.
    """

    def __init__(self, serde: SerializerProtocol, types: StoredTypes = NO_TYPES) -> None:
        self.serde, self.types = serde, types
        self._allowlist = Allowlist(serde, types) if type(serde) is JsonPlusSerializer else None
        self.former_names = (
            types.build_former_class_name_maps() if self._allowlist is not None else []
        )
        self.packs_messages = self._allowlist is not None
        self.replaced_path = ""
        self.is_replacement_logged = False

    def encode(self, value: Any, get_path: Callable[[], str], *, exact: bool = False) -> bytes:
        """Encode one value.

        Decoding a message and encoding it again yields the same bytes.

        Args:
            value: The value.
            get_path: A function that returns the path of the value, for error messages.
            exact: Whether a text with a lone surrogate is refused everywhere. If `exact` is False,
                "?" replaces the surrogate, except in the places where `Converter` refuses it always
                (see its argument `exact`).

        Raises:
            Unstorable: The value or a part of it cannot be stored, or would be read back as a
                different value.
            ForbiddenType: The value contains a type that could not be read back, because it is not
                on the allowlist.
        """
        if value is None and self.packs_messages:
            return _NULL
        if not self.packs_messages or isinstance(value, _SERIALIZER_TYPES):
            return self._encode_or_raise_error_with_path(value, get_path)
        if isinstance(value, BaseMessage):
            return self.encode_for_storage(
                value, self.encode_for_comparison([value], lambda _: get_path())[0], get_path
            )
        try:
            return _PLAIN + pack(value)
        # A part of the value is not plain data.
        except TypeError:
            return self._encode_or_raise_error_with_path(value, get_path, exact=exact)

    def _decode_and_reencode_message(self, encoded_message: bytes) -> bytes:
        """Decode an encoded message, encode it again, and return the resulting bytes.

        A message that was encoded with pickle is returned unchanged.
        """
        if encoded_message[:1] != _PLAIN:
            return encoded_message
        value = self.decode(encoded_message)
        packed = (
            pack_messages_if_all_plain([value])
            if isinstance(value, BaseMessage) and is_message_unchanged_by_validation(value)
            else None
        )
        return packed[0] if packed else self._encode_value_without_wrapping_errors(value)

    def _encode_or_raise_error_with_path(
        self, value: Any, get_path: Callable[[], str], *, exact: bool = False
    ) -> bytes:
        """Encode a value, or raise an error that identifies the part that cannot be stored.

        If the value cannot be stored as msgpack and the serializer's `pickle_fallback` is set, the
        value is encoded with pickle.
        """
        try:
            return self._encode_value_without_wrapping_errors(value, get_path, exact=exact)
        except Exception as exc:
            if self.packs_messages and getattr(self.serde, "pickle_fallback", False):
                with suppress(Exception):
                    name, data = self.serde.dumps_typed(value)
                    if name == "pickle":
                        return _prepend_format_code(name, data)
            # The error names the part of the value that cannot be encoded. To find this part,
            # `_build_storage_error` encodes each part by itself. If a lone surrogate caused the
            # error, `exact=True` is needed, so that the surrogate is refused and not replaced.
            encode = partial(
                self._encode_value_without_wrapping_errors, exact=exact or str(exc) == SURROGATES
            )
            raise _build_storage_error(encode, value, get_path(), exc) from exc

    def _encode_value_without_wrapping_errors(
        self, value: Any, get_path: Callable[[], str] | None = None, *, exact: bool = False
    ) -> bytes:
        """Encode a value.

        Errors raised by the serializer or the `Converter` are propagated unchanged.
        """
        if self._allowlist is None or isinstance(value, _SERIALIZER_TYPES):
            name, data = self.serde.dumps_typed(value)
            return _prepend_format_code(name, bytes(data))
        converter = Converter(self._allowlist, exact=exact)
        packed = converter.pack(value)
        if converter.replacing and get_path is not None:
            self.replaced_path = self.replaced_path or get_path()
        return _PLAIN + packed

    def decode(self, stored: bytes) -> Any:
        """Decode a value. Each call returns a new object.

        Raises:
            ForbiddenType: A type in the value is not on the allowlist.
            CorruptRecord: The bytes are not in a format that `encode` writes, or the serializer
                cannot read them.
        """
        if stored[:1] == _PLAIN and self.packs_messages:
            # If `unpack` raises an exception, the value contains a msgpack extension type or is
            # damaged. Ignore the exception, because the code after the `with` block decodes the
            # value with the serializer, or raises `ForbiddenType` or `CorruptRecord`.
            with suppress(Exception):
                return unpack(stored[1:])
        try:
            if stored[:1] == MESSAGE:
                return unpack_messages([stored])[0]
            name, data = _split_format_name_and_data(stored)
        except (IndexError, KeyError, UnicodeDecodeError) as exc:
            raise CorruptRecord(
                f"a stored value of {len(stored)} bytes has an unknown format and is damaged; "
                "restore the database from a backup"
            ) from exc
        return self.load_with_serializer(name, data)

    def load_with_serializer(self, format_name: str, data: bytes) -> Any:
        """Decode bytes that the serializer or this codec encoded in the format `format_name`.

        Args:
            format_name: The name of the format, such as "msgpack".
            data: The bytes.

        Raises:
            ForbiddenType: A type in the value is not on the allowlist.
            CorruptRecord: The serializer cannot read the bytes.
        """
        try:
            if format_name == "msgpack" and self._allowlist is not None:
                return Converter(self._allowlist).unpack(data)
            with _collect_types_rejected_by_serializer() as blocked:
                value = self.serde.loads_typed((format_name, data))
        except TypeNotAllowed as exc:
            raise _build_forbidden_type_error(exc.name, "a stored value") from exc
        except Exception as exc:
            raise CorruptRecord(
                f"a stored value of {len(data)} bytes cannot be decoded ({exc}); open the "
                "checkpointer with the serializer that wrote the value"
            ) from exc
        if blocked:
            raise _build_forbidden_type_error(blocked[0], "a stored value")
        return value

    def warn_once_about_replaced_unicode_surrogate(self, thread_id: str) -> None:
        """Log a warning that a lone surrogate was replaced, at most once per codec."""
        if self.replaced_path and not self.is_replacement_logged:
            self.is_replacement_logged = True
            _log.warning(
                "%s of thread %r contains a lone surrogate (half of a character, such as a cut "
                "emoji), which is not valid Unicode; '?' is stored in its place. Logged once",
                *(self.replaced_path, thread_id),
            )

    # -- many values at once

    def encode_for_comparison(
        self, values: Sequence[Any], get_path: Callable[[int], str]
    ) -> list[bytes]:
        """Encode values for comparison with log items and with each other.

        Message fields are encoded in the order in which the message's `__dict__` contains them.

        Args:
            values: The values.
            get_path: A function that returns the path of a value, given its index in `values`.
                Error messages contain the path.
        """
        if self.packs_messages and _MESSAGES.issuperset(map(type, values)):
            packed = pack_messages_if_all_plain(values)
            if packed is not None:
                return packed
        elif self.packs_messages:
            # `packb` raises TypeError if a value is not plain data.
            with suppress(TypeError):
                return list(map(_PLAIN.__add__, map(packb, values, repeat(None), repeat(PACK))))
        if len(values) == 1:
            # Convert a bytearray to bytes, as the serializer does with a bytearray inside a list.
            value = bytes(values[0]) if type(values[0]) is bytearray else values[0]
            return [self._encode_or_raise_error_with_path(value, lambda: get_path(0))]
        encoded = []
        for index, value in enumerate(values):
            get_path_of_value = partial(lambda i, _: get_path(i), index)
            encoded += self.encode_for_comparison([value], get_path_of_value)
        return encoded

    def encode_for_storage(
        self, value: Any, encoding_for_comparison: bytes, get_path: Callable[[], str]
    ) -> bytes:
        """Return the bytes that the database stores for a value.

        The argument `encoding_for_comparison` must be the bytes that `encode_for_comparison`
        returned for the same value.

        For a value that is not a message, `encoding_for_comparison` is returned unchanged. A
        message's fields are reordered to match the order in which its class declares them. Decoding
        can change a message, because the message class validates the fields and may convert their
        values. If decoding an encoded message would change the message's fields, the method decodes
        the message once, encodes the decoded message again, and returns the new bytes. A message
        that is loaded and stored again therefore keeps the same bytes.

        Args:
            value: The value.
            encoding_for_comparison: Its encoding for comparison.
            get_path: A function that returns the path of the value, for error messages.
        """
        if not self.packs_messages or not isinstance(value, BaseMessage):
            return encoding_for_comparison
        if encoding_for_comparison[:1] == MESSAGE:
            # Equal messages must be encoded as equal bytes, regardless of the order of their
            # fields.
            if is_message_unchanged_by_validation(value):
                if [*value.__dict__] == [*type(value).model_fields]:
                    return encoding_for_comparison
                return pack_message_in_declared_field_order(value)
            encoding_for_comparison = self._encode_or_raise_error_with_path(value, get_path)
        return self._decode_and_reencode_message(encoding_for_comparison)

    def iter_encodings_with_former_class_names(
        self, value: Any, current_encoding: bytes
    ) -> Iterator[bytes]:
        """Yield the encodings that a value would have if its classes still had their former names.

        After a class was renamed, perdure uses the former class name to find items that were stored
        under this name. perdure then reuses these items instead of storing equal objects again.
        """
        for names in self.former_names:
            if not any(name.encode() in current_encoding for _, name in names):
                continue
            # Ignore errors that occur while the value is encoded with former class names, because
            # the resulting encoding is never stored. This encoding only serves to find items that
            # were stored before a class was renamed.
            with suppress(Exception):
                former = _PLAIN + Converter(self._allowlist, former=names).pack(value)  # type: ignore[arg-type]
                if former != current_encoding:
                    yield former

    def decode_all(self, stored: Sequence[bytes]) -> list[Any]:
        """Decode several values. Each call returns new objects.

        Raises:
            ForbiddenType, CorruptRecord: See `decode`.
        """
        kinds = {item[:1] for item in stored}
        if kinds == {MESSAGE}:
            return unpack_messages(stored)
        if kinds == {_PLAIN} and self.packs_messages:
            # If a value contains a msgpack extension type, `unpack_all` raises ValueError, and the
            # values are decoded one by one instead.
            with suppress(ValueError):
                return unpack_all([item[1:] for item in stored])
        return [*map(self.decode, stored)]


def _prepend_format_code(format_name: str, data: bytes) -> bytes:
    code = _FORMAT_CODES.get(format_name)
    if code is not None:
        return bytes((code,)) + data
    text = format_name.encode()
    return bytes((_OTHER_FORMAT, len(text))) + text + data


def _split_format_name_and_data(stored: bytes) -> tuple[str, bytes]:
    code = stored[0]
    if code == _OTHER_FORMAT:
        end = 2 + stored[1]
        return stored[2:end].decode(), stored[end:]
    return _FORMAT_NAMES[code], stored[1:]


# -- errors for values that cannot be stored


def _build_storage_error(
    encode: Callable[[Any], object], value: Any, path: str, reason: Exception
) -> SerializationError:
    """Build an error that identifies the innermost part of a value that cannot be encoded."""
    part_path, parts = path, _list_elements_or_attributes_with_paths(value)
    for _ in range(_MAX_STEPS):
        for step, part in parts:
            try:
                encode(part)
            except Exception as exc:
                part_path, value, reason = part_path + step, part, exc
                break
        else:
            break
        parts = _list_elements_or_attributes_with_paths(value)
    if isinstance(reason, TypeNotAllowed):
        return _build_forbidden_type_error(reason.name, part_path)
    if isinstance(reason, RecursionError):
        return Unstorable(
            f"{path} cannot be stored, because at {part_path} {reason}. Flatten the value, or "
            "store it as text"
        )
    cls = type(value)
    description = f"a {cls.__qualname__} ({reprlib.repr(value)[:80]})"
    remedy = (
        "Keep plain data, messages, pydantic models, dataclasses, enums or named tuples in the "
        "state"
    )
    if cls.__module__ != "builtins" and not isinstance(value, BaseException):
        remedy += (
            f", or register the type with types=[StoredType({cls.__qualname__}, dump, load)] when "
            "you open the checkpointer (docs/threads.md). Alternatively, "
            "serde=JsonPlusSerializer(pickle_fallback=True) stores the value with pickle, which "
            "runs code from the database when the value is read"
        )
    return Unstorable(f"{part_path} is {description}, which cannot be stored: {reason}. {remedy}")


def _list_elements_or_attributes_with_paths(value: Any) -> list[tuple[str, Any]]:
    """Return the path (such as `[0]` or `.name`) and the value of each element or attribute."""
    # Import `Send` here and not at the top of the module, because `langgraph.types` is slow to
    # import, and this function is called only to build an error message.
    from langgraph.types import Send

    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, Send):
        return [(".arg", value.arg)]
    cls: Any = type(value)
    if detect_enum_model_dataclass_or_namedtuple(cls) not in (None, "enum"):
        parts = read_instance_attributes(value)
        if isinstance(value, BaseModel):
            parts |= read_private_attributes(value)
        return [(f".{name}", part) for name, part in parts.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return []


# -- langgraph's serializers report a rejected type only as an event, so a listener records it

_rejected_types = threading.local()


def _record_rejected_type(event: SerdeEvent) -> None:
    names = getattr(_rejected_types, "names", None)
    if names is not None and event["kind"] in ("msgpack_blocked", "msgpack_method_blocked"):
        names.append((event["module"], event["name"]))


register_serde_event_listener(_record_rejected_type)


@contextmanager
def _collect_types_rejected_by_serializer() -> Iterator[list[tuple[str, str]]]:
    """Yield a list that collects the types the serializer rejects during the `with` block."""
    _rejected_types.names = names = list[tuple[str, str]]()
    try:
        yield names
    finally:
        _rejected_types.names = None


def _build_forbidden_type_error(type_name: tuple[str, ...], location: str) -> ForbiddenType:
    """Build an error that names a rejected type and explains how to allow it."""
    module, cls = type_name
    return ForbiddenType(
        f"{location} contains a {module}.{cls}, which is not on the allowlist of types that may be "
        f"rebuilt from a database; if you trust it, open the checkpointer with "
        f"allow=[({module!r}, {cls!r})] (or allow=[{cls}])"
    )


class ValuesAsEncoded(Sequence[Any]):
    """A sequence of values that decodes a message anew each time the message is accessed.

    Later changes to the original message object therefore do not appear in the sequence. A value
    that is not encoded in the compact form for messages is returned unchanged.
    """

    def __init__(self, values: Sequence[Any], encoded: list[bytes]) -> None:
        self._values, self._encoded = values, encoded

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, i: Any) -> Any:
        encoded_value = self._encoded[i]
        if encoded_value[:1] != MESSAGE:
            return self._values[i]
        return unpack_messages([encoded_value], is_packed_by_this_process=True)[0]

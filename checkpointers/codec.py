"""Values to bytes and back.

Under langgraph's `JsonPlusSerializer` messages, most of what a thread holds, have a form of their
own (`messages`), and everything else is msgpack (`values`). What is rebuilt equals what that
serializer gives back, type for type. Under another serializer every value goes through that one.
Equal values have equal bytes, but for the order of a message's fields.
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

from perdure.checkpointers.messages import (
    CLASSES,
    is_plain,
    pack_in_class_order,
    pack_messages,
    unpack_messages,
)
from perdure.checkpointers.objects import kind_of, read_attributes, read_private_attributes
from perdure.checkpointers.stored_types import NO_TYPES, StoredTypes
from perdure.checkpointers.values import (
    PACK,
    SURROGATES,
    Allowlist,
    Converter,
    TypeNotAllowed,
    pack,
    unpack_all,
)
from perdure.errors import CorruptRecord, ForbiddenType, SerializationError, Unstorable

# first byte of a value that is no message: what the rest of it is
_FORM_CODES: Final = {"msgpack": 16, "null": 17, "bytes": 18, "bytearray": 19}
_FORM_NAMES: Final = {code: name for name, code in _FORM_CODES.items()}
_OTHER_FORM: Final = 31  # any other name follows: its length in one byte, then itself
_PLAIN: Final = b"\x10"  # "msgpack"
MESSAGE: Final = b"\x92"  # msgpack's array of two, with which a message in its own form begins
_MESSAGES: Final = frozenset(CLASSES.values())
_NULL: Final = b"\x11"
_SERIALIZER_TYPES: Final = (bytes, bytearray, NoneType)  # what langgraph's serializer has forms for
_log = logging.getLogger("perdure")
_MAX_STEPS: Final = 20  # of a path; each takes a trial of all parts on the way


class Codec:
    """Encodes values for the log with one serializer.

    Args:
        serde: The serializer. Of langgraph's own only the allowlist and `pickle_fallback` count,
            see `Allowlist`; messages have their own form only with it.
        types: Registered types and aliases, which are used only with langgraph's serializer.

    Attributes:
        former_names: Tables that map present names of classes to earlier names. `former_forms`
            uses them.
    """

    def __init__(self, serde: SerializerProtocol, types: StoredTypes = NO_TYPES) -> None:
        self.serde, self.types = serde, types
        self._allowlist = Allowlist(serde, types) if type(serde) is JsonPlusSerializer else None
        self.former_names = types.build_former_name_tables() if self._allowlist is not None else []
        self.packs_messages = self._allowlist is not None
        self.replaced_path = (
            ""  # the path of the first value with a lone surrogate, if there was one
        )
        self.is_replacement_logged = False

    def encode(self, value: Any, path: Callable[[], str], *, exact: bool = False) -> bytes:
        """One value as stored bytes, equal for equal values; an error names its `path`.

        A message is encoded as it comes back, so that encoding it then gives the same bytes. In a
        text a lone surrogate becomes "?", unless it is to be `exact`.

        Raises:
            Unstorable: It, or a part of it, cannot be stored, or would come back as another.
            ForbiddenType: It could be stored, but its type is not on the allowlist for reading.
        """
        if value is None and self.packs_messages:
            return _NULL
        if not self.packs_messages or isinstance(value, _SERIALIZER_TYPES):
            return self._encode_or_explain(value, path)
        if isinstance(value, BaseMessage):
            return self.encode_for_storage(
                value, self.encode_for_comparison([value], lambda _: path())[0], path
            )
        try:
            return _PLAIN + pack(value)
        except TypeError:  # something in it is not plain data
            return self._encode_or_explain(value, path, exact=exact)

    def _encode_as_read_back(self, stored: bytes) -> bytes:
        """The encoding of what a message, encoded as it is, comes back as."""
        if stored[:1] != _PLAIN:
            return stored
        value = self.decode(stored)
        packed = (
            _encode_all_plain([value])
            if isinstance(value, BaseMessage) and is_plain(value)
            else None
        )
        return packed[0] if packed else self._encode_unchecked(value)

    def _encode_or_explain(
        self, value: Any, path: Callable[[], str], *, exact: bool = False
    ) -> bytes:
        try:
            return self._encode_unchecked(value, path, exact=exact)
        except Exception as exc:
            if self.packs_messages and getattr(self.serde, "pickle_fallback", False):
                with suppress(Exception):
                    name, data = self.serde.dumps_typed(value)
                    if name == "pickle":
                        return _add_form_tag(name, data)
            encode = partial(self._encode_unchecked, exact=exact or str(exc) == SURROGATES)
            raise _build_refusal(encode, value, path(), exc) from exc

    def _encode_unchecked(
        self, value: Any, path: Callable[[], str] | None = None, *, exact: bool = False
    ) -> bytes:
        if self._allowlist is None or isinstance(value, _SERIALIZER_TYPES):
            name, data = self.serde.dumps_typed(value)
            return _add_form_tag(name, bytes(data))
        converter = Converter(self._allowlist, exact=exact)
        packed = converter.pack(value)
        if converter.replacing and path is not None:
            self.replaced_path = self.replaced_path or path()
        return _PLAIN + packed

    def decode(self, stored: bytes) -> Any:
        """The value of stored bytes, new at each call.

        Raises:
            ForbiddenType: A type in it is not on the allowlist.
            CorruptRecord: The bytes are not what `encode` writes.
        """
        try:
            if stored[:1] == MESSAGE:
                return unpack_messages([stored])[0]
            name, data = _split_form_tag(stored)
        except (IndexError, KeyError, UnicodeDecodeError) as exc:
            raise CorruptRecord(
                f"a stored value of {len(stored)} bytes does not say how it was written"
            ) from exc
        return self.load_with_serializer(name, data)

    def load_with_serializer(self, name: str, data: bytes) -> Any:
        """What the serializer wrote, or this codec in its place, under the name of the form.

        Raises:
            ForbiddenType: A type in it is not on the allowlist.
            CorruptRecord: The serializer cannot read it.
        """
        try:
            if name == "msgpack" and self._allowlist is not None:
                return Converter(self._allowlist).unpack(data)
            with _collect_refused_types() as blocked:
                value = self.serde.loads_typed((name, data))
        except TypeNotAllowed as exc:
            raise _forbidden_type_error(exc.name, "a stored value") from exc
        except Exception as exc:
            raise CorruptRecord(
                f"a stored value of {len(data)} bytes cannot be read back ({exc}); "
                "was it written with another serializer?"
            ) from exc
        if blocked:
            raise _forbidden_type_error(blocked[0], "a stored value")
        return value

    def log_replacement(self, thread_id: str) -> None:
        """Log that a character of a text was replaced, once for each codec."""
        if self.replaced_path and not self.is_replacement_logged:
            self.is_replacement_logged = True
            _log.warning(
                "%s of thread %r contains a lone surrogate (half of a character, such as a cut "
                "emoji), which is not valid Unicode; '?' is stored in its place. Logged once",
                *(self.replaced_path, thread_id),
            )

    # -- many values at once

    def encode_for_comparison(
        self, values: Sequence[Any], path: Callable[[int], str]
    ) -> list[bytes]:
        """The bytes by which values are compared; an error, as of `encode`, names the `path`."""
        if self.packs_messages and (packed := _encode_all_plain(values)) is not None:
            return packed
        return [self._encode_one_for_comparison(value, path, i) for i, value in enumerate(values)]

    def _encode_one_for_comparison(self, value: Any, path: Callable[[int], str], i: int) -> bytes:
        if self.packs_messages and (packed := _encode_all_plain([value])) is not None:
            return packed[0]
        if type(value) is bytearray:  # within a list the serializer makes them bytes
            value = bytes(value)
        return self._encode_or_explain(value, lambda: path(i))

    def encode_for_storage(self, value: Any, full: bytes, path: Callable[[], str]) -> bytes:
        """The bytes that are stored for a value: those by which it is compared, if it comes back.

        Else those of what comes back in its place: storing that gives the same bytes again.
        """
        if not self.packs_messages or not isinstance(value, BaseMessage):
            return full
        if full[:1] == MESSAGE:
            if is_plain(value):  # of equal messages the bytes are equal, whatever their order
                return pack_in_class_order(value) or full
            full = self._encode_or_explain(value, path)
        return self._encode_as_read_back(full)

    def iter_former_encodings(self, value: Any, stored: bytes) -> Iterator[bytes]:
        """Yield the encodings of a value under the earlier names of its classes.

        They find the items that were stored before a class was renamed. Otherwise a thread would
        store all objects of the class again.
        """
        for names in self.former_names:
            if not any(name.encode() in stored for _, name in names):
                continue
            with suppress(Exception):  # the value itself was encoded already
                former = _PLAIN + Converter(self._allowlist, former=names).pack(value)  # type: ignore[arg-type]
                if former != stored:
                    yield former

    def decode_all(self, stored: Sequence[bytes]) -> list[Any]:
        """New values; no two callers share a mutable part.

        Raises:
            ForbiddenType, CorruptRecord: See `decode`.
        """
        kinds = {item[:1] for item in stored}
        if kinds == {MESSAGE}:
            return unpack_messages(stored)
        if kinds == {_PLAIN} and self.packs_messages:
            with suppress(ValueError):  # only the serializer knows what is in one of them
                return unpack_all([item[1:] for item in stored])
        return [*map(self.decode, stored)]


def _encode_all_plain(values: Sequence[Any]) -> list[bytes] | None:
    """The bytes of values that are all messages, or all plain data; else None."""
    classes = list(map(type, values))
    kinds = set(classes)
    if kinds <= _MESSAGES:
        return pack_messages(classes, values)
    try:
        return [_PLAIN + item for item in map(packb, values, repeat(None), repeat(PACK))]
    except TypeError:
        return None


def _add_form_tag(name: str, data: bytes) -> bytes:
    code = _FORM_CODES.get(name)
    if code is not None:
        return bytes((code,)) + data
    text = name.encode()
    return bytes((_OTHER_FORM, len(text))) + text + data


def _split_form_tag(stored: bytes) -> tuple[str, bytes]:
    code = stored[0]
    if code == _OTHER_FORM:
        end = 2 + stored[1]
        return stored[2:end].decode(), stored[end:]
    return _FORM_NAMES[code], stored[1:]


# -- refusing values: which part of one cannot be stored


def _build_refusal(
    encode: Callable[[Any], object], value: Any, path: str, reason: Exception
) -> SerializationError:
    """The error that names the innermost part of a value for which `encode` raises."""
    where, parts = path, _named_parts(value)
    for _ in range(_MAX_STEPS):
        for step, part in parts:
            try:
                encode(part)
            except Exception as exc:
                where, value, reason = where + step, part, exc
                break
        else:
            break
        parts = _named_parts(value)
    if isinstance(reason, TypeNotAllowed):
        return _forbidden_type_error(reason.name, where)
    if isinstance(reason, RecursionError):
        return Unstorable(
            f"{path} cannot be stored: from {where} on, {reason}. Flatten it, or store it as text"
        )
    cls = type(value)
    shown = f"a {cls.__qualname__} ({reprlib.repr(value)[:80]})"
    remedy = (
        "Keep plain data, messages, pydantic models, dataclasses, enums or named tuples in the "
        "state"
    )
    if cls.__module__ != "builtins" and not isinstance(value, BaseException):
        remedy += (
            ", or register the type when you open the checkpointer, "
            f"types=[StoredType({cls.__qualname__}, dump, load)] (docs/threads.md). "
            "serde=JsonPlusSerializer(pickle_fallback=True) stores it with pickle, which runs code "
            "from the file when the value is read"
        )
    return Unstorable(f"{where} is {shown}, which cannot be stored: {reason}. {remedy}")


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    from langgraph.types import Send  # slow to import, and only an error needs it

    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, Send):
        return [(".arg", value.arg)]
    cls: Any = type(value)
    if kind_of(cls) not in (None, "enum"):
        parts = read_attributes(value)
        if isinstance(value, BaseModel):
            parts |= read_private_attributes(value)
        return [(f".{name}", part) for name, part in parts.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return []


# -- langgraph's own serializers report a refused type only as an event

_refused = threading.local()


def _note_refusal(event: SerdeEvent) -> None:
    names = getattr(_refused, "names", None)
    if names is not None and event["kind"] in ("msgpack_blocked", "msgpack_method_blocked"):
        names.append((event["module"], event["name"]))


register_serde_event_listener(_note_refusal)


@contextmanager
def _collect_refused_types() -> Iterator[list[tuple[str, str]]]:
    """The types that the serializer refuses in this thread meanwhile."""
    _refused.names = names = list[tuple[str, str]]()
    try:
        yield names
    finally:
        _refused.names = None


def _forbidden_type_error(name: tuple[str, ...], where: str) -> ForbiddenType:
    """The error that names a refused type, and how to allow it."""
    module, cls = name
    return ForbiddenType(
        f"{where} holds a {module}.{cls}, which is not on the allowlist of types that may be "
        f"rebuilt from a database; if you trust it, open the checkpointer with "
        f"allow=[({module!r}, {cls!r})] (or allow=[{cls}])"
    )


class ValuesAsEncoded(Sequence[Any]):
    """Values of which each message is rebuilt as it was when it was encoded."""

    def __init__(self, values: Sequence[Any], full: list[bytes]) -> None:
        self._values, self._full = values, full

    def __len__(self) -> int:
        return len(self._full)

    def __getitem__(self, i: Any) -> Any:
        full = self._full[i]
        if full[:1] != MESSAGE:
            return self._values[i]
        return unpack_messages([full], trusts_fields=True)[0]

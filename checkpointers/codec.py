"""Items to bytes and back: messages in a compact form, everything else as msgpack.

Under langgraph's `JsonPlusSerializer` messages, most of what a thread holds, are stored as their
fields less the defaults; plain data as msgpack; other values as its extension types (see
`values`). What is rebuilt equals what that serializer gives back, type for type. Under another
serializer every value goes through that one.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener
from pydantic import BaseModel

from perdure.checkpointers.extensions import Allowlist, Name, TooDeep, TypeNotAllowed, allowlist_of
from perdure.checkpointers.messages import CLASSES, pack_message, rebuilt, unpack_fields
from perdure.checkpointers.objects import attributes_of, kind_of, private_of
from perdure.checkpointers.packing import pack
from perdure.checkpointers.values import Decoder, Encoder
from perdure.errors import CorruptRecord, ForbiddenType, SerializationError, Unstorable

# first byte of an item that is no message: what the rest of it is
_MSGPACK: Final = 16
_TYPED: Final = {"msgpack": _MSGPACK, "null": 17, "bytes": 18, "bytearray": 19}
_TYPE_NAMES: Final = {code: name for name, code in _TYPED.items()}
_NAMED: Final = 31  # any other name follows: its length in one byte, then itself
_MAX_STEPS: Final = 20  # of a path; each takes a trial of all parts on the way


class Codec:
    """Encodes items for the log with one serializer.

    Args:
        serde: The serializer. Of langgraph's own only the allowlist and `pickle_fallback` count,
            see `Allowlist`; the compact form of messages is used only with it.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self.serde = serde
        self._allowlist = allowlist_of(serde)
        self.compact = self._allowlist is not None

    def encode(self, value: Any, path: Callable[[], str]) -> bytes:
        """One value as stored bytes, equal for equal values; an error names its `path`.

        Raises:
            Unstorable: It, or a part of it, cannot be stored, or would come back as another.
            ForbiddenType: It could be stored, but its type is not on the allowlist for reading.
        """
        if self.compact and isinstance(value, BaseMessage):
            packed = pack_message(value)
            if packed is not None:
                return packed
        try:
            return self._encoded(value)
        except Exception as exc:
            pickled = self._pickled(value)
            if pickled is None:
                raise _refusal(self._encoded, value, path(), exc) from exc
            return pickled

    def _encoded(self, value: Any) -> bytes:
        if self._allowlist is None:
            name, data = self.serde.dumps_typed(value)
            return _tagged(name, bytes(data))
        if value is None:
            return _tagged("null", b"")
        if isinstance(value, bytes | bytearray):
            return _tagged("bytes" if isinstance(value, bytes) else "bytearray", bytes(value))
        try:
            packed = pack(value)
        except TypeError:  # something in it is not plain data
            packed = Encoder(self._allowlist).pack(value)
        return _tagged("msgpack", packed)

    def _pickled(self, value: Any) -> bytes | None:
        """The fallback of langgraph's serializer, if its user set one."""
        if not getattr(self.serde, "pickle_fallback", False) or not self.compact:
            return None
        with suppress(Exception):
            name, data = self.serde.dumps_typed(value)
            if name == "pickle":
                return _tagged(name, data)
        return None

    def decode(self, stored: bytes) -> Any:
        """The value of stored bytes, new at each call.

        Raises:
            ForbiddenType: A type in it is not on the allowlist.
            CorruptRecord: The bytes are not what `encode` writes.
        """
        try:
            kind = stored[0]
            if kind in CLASSES:
                return rebuilt([CLASSES[kind]], unpack_fields([CLASSES[kind]], [stored]))[0]
            if kind == _MSGPACK and self._allowlist is not None:
                return _unpacked(memoryview(stored)[1:], self._allowlist)
            name, data = _untagged(stored)
        except (IndexError, KeyError, UnicodeDecodeError) as exc:
            raise CorruptRecord(
                f"a stored value of {len(stored)} bytes does not say how it was written"
            ) from exc
        return self.load(name, data)

    def load(self, name: str, data: bytes) -> Any:
        """What the serializer wrote, or this codec in its place, under the name of the form.

        Raises:
            ForbiddenType: A type in it is not on the allowlist.
            CorruptRecord: The serializer cannot read it.
        """
        if name == "msgpack" and self._allowlist is not None:
            return _unpacked(data, self._allowlist)
        try:
            with _blocked() as blocked:
                value = self.serde.loads_typed((name, data))
        except Exception as exc:
            raise _unreadable(data, exc) from exc
        if blocked:
            raise _forbidden(blocked[0], "a stored value")
        return value


def _unpacked(data: bytes | memoryview, allowlist: Allowlist) -> Any:
    try:
        return Decoder(allowlist).unpack(data)
    except TypeNotAllowed as exc:
        raise _forbidden(exc.name, "a stored value") from exc
    except Exception as exc:
        raise _unreadable(data, exc) from exc


def _unreadable(data: bytes | memoryview, error: Exception) -> CorruptRecord:
    return CorruptRecord(
        f"a stored value of {len(data)} bytes cannot be read back ({error}); "
        "was it written with another serializer?"
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


# -- refusing values: which part of one cannot be stored


def _refusal(
    pack: Callable[[Any], object], value: Any, path: str, reason: Exception
) -> SerializationError:
    """The error that names the innermost part of a value for which `pack` raises."""
    where, parts = path, _parts(value)
    for _ in range(_MAX_STEPS):
        for step, part in parts:
            try:
                pack(part)
            except Exception as exc:
                where, value, reason = where + step, part, exc
                break
        else:
            break
        parts = _parts(value)
    if isinstance(reason, TypeNotAllowed):
        return _forbidden(reason.name, where)
    if isinstance(reason, TooDeep):
        return Unstorable(
            f"{path} cannot be stored: from {where} on, {reason}. Flatten it, or store it as text"
        )
    shown = f"a {type(value).__qualname__} ({reprlib.repr(value)[:80]})"
    return Unstorable(
        f"{where} is {shown}, which cannot be stored: {reason}. Keep plain data, messages, "
        "pydantic models, dataclasses, enums or named tuples in the state"
    )


def _parts(value: Any) -> list[tuple[str, Any]]:
    from langgraph.types import Send  # slow to import, and only an error needs it

    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, Send):
        return [(".arg", value.arg)]
    cls: Any = type(value)
    if kind_of(cls) not in (None, "enum"):
        parts = attributes_of(value)
        if isinstance(value, BaseModel):
            parts |= private_of(value)
        return [(f".{name}", part) for name, part in parts.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return []


# -- the strict allowlist: langgraph's serializer reports a refused type only as an event

_refused = threading.local()


def _note_refusal(event: SerdeEvent) -> None:
    names = getattr(_refused, "names", None)
    if names is not None and event["kind"] in ("msgpack_blocked", "msgpack_method_blocked"):
        names.append((event["module"], event["name"]))


register_serde_event_listener(_note_refusal)


@contextmanager
def _blocked() -> Iterator[list[Name]]:
    """The types that the serializer refuses in this thread meanwhile."""
    found: list[Name] = []
    _refused.names = found
    try:
        yield found
    finally:
        _refused.names = None


def _forbidden(name: Name, where: str) -> ForbiddenType:
    """The error that names a refused type, and how to allow it."""
    module, cls = name
    return ForbiddenType(
        f"{where} holds a {module}.{cls}, which is not on the allowlist of types that may be "
        f"rebuilt from a database; if you trust it, open the checkpointer with "
        f"allow=[({module!r}, {cls!r})] (or allow=[{cls}])"
    )

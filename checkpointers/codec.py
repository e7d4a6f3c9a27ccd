"""Items to bytes and back: a compact form for messages, the serializer's own for everything else.

Messages are most of what a thread holds. Under langgraph's `JsonPlusSerializer` they are stored as
their fields less the defaults, and rebuilt without validation, from bytes that perdure itself
wrote; the result equals what that serializer gives back, type for type. A message that is not
plain data all through, and every value under another serializer, goes through the serializer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.checkpointers.messages import CLASSES, pack_message, rebuilt, unpack_fields
from perdure.checkpointers.packing import is_plain, unpack
from perdure.checkpointers.refusals import Blocked, forbidden, unstorable
from perdure.errors import CorruptRecord

PLAIN: Final = 16
# first byte of an item that is no message: how the serializer named its output
_TYPED: Final = {"msgpack": PLAIN, "null": 17, "bytes": 18, "bytearray": 19}
_TYPE_NAMES: Final = {code: name for name, code in _TYPED.items()}
_NAMED: Final = 31  # any other name follows: its length in one byte, then itself


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
        if self.compact and isinstance(value, BaseMessage):
            packed = pack_message(value)
            if packed is not None:
                return packed
        try:
            name, data = self.serde.dumps_typed(value)
        except Exception as exc:
            raise unstorable(self.serde, value, path(), exc) from exc
        if self.compact and name == "msgpack" and not is_plain(value):
            self._refuse_forbidden(name, data, path)
        return _tagged(name, bytes(data))

    def _refuse_forbidden(self, name: str, data: bytes, path: Callable[[], str]) -> None:
        """Raise for what could be written and would then not be read back."""
        with Blocked() as blocked:
            self.serde.loads_typed((name, data))
        if blocked:
            raise forbidden(blocked[0], path())

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
            if kind == PLAIN and self.compact:
                with suppress(ValueError):  # only the serializer knows what is in it
                    return unpack(memoryview(stored)[1:])
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
            with Blocked() as blocked:
                value = self.serde.loads_typed((name, data))
        except Exception as exc:
            raise CorruptRecord(
                f"a stored value of {len(data)} bytes cannot be read back ({exc}); "
                "was it written with another serializer?"
            ) from exc
        if blocked:
            raise forbidden(blocked[0], "a stored value")
        return value


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

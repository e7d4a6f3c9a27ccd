"""Items in memory, in a full form that is compared and copied without Python loops.

The full form of a message is msgpack of `[class code, fields]`, of other plain data the stored form
itself, and of everything else what the serializer wrote. Equal items have equal full forms, but for
the order of a message's fields; `Items.expanded` gives the one form that stands for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Final

from langchain_core.messages import BaseMessage
from ormsgpack import packb

from perdure.checkpointers.codec import Codec
from perdure.checkpointers.messages import (
    CLASSES,
    full_from_stored,
    full_messages,
    messages_from_full,
    pack_message,
)
from perdure.checkpointers.packing import PACK, array_header, unpack

_MESSAGES: Final = frozenset(CLASSES.values())
_PLAIN: Final = b"\x10"  # the tag of an item that is plain msgpack
_PLAIN_CODE: Final = _PLAIN[0]
_FULL_MESSAGE: Final = 0x92  # msgpack's array of two; no stored item begins with it


class Items:
    """Turns values into items and back.

    Args:
        codec: Encodes what is neither a message nor plain data.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def full(self, values: Sequence[Any], path: Callable[[int], str]) -> list[bytes]:
        """The full form of each value.

        Args:
            values: The elements of a list, or `[key, value]` of a dict.
            path: How an error names the value at an index.

        Raises:
            Unstorable: One cannot be stored.
        """
        if self.codec.compact:
            classes = list(map(type, values))
            kinds = set(classes)
            if kinds <= _MESSAGES:
                found = full_messages(classes, values)
                if found is not None:
                    return found
            elif not any(issubclass(kind, BaseMessage) for kind in kinds):
                try:
                    packed = list(map(packb, values, repeat(None), repeat(PACK)))
                except TypeError:  # the loop below finds which, and says so
                    pass
                else:
                    return [_PLAIN + each for each in packed]
        return [self._full(value, path, i) for i, value in enumerate(values)]

    def _full(self, value: Any, path: Callable[[int], str], i: int) -> bytes:
        if self.codec.compact:
            if type(value) in _MESSAGES:
                found = full_messages([type(value)], [value])
                if found is not None:
                    return found[0]
            elif not isinstance(value, BaseMessage):
                try:
                    return _PLAIN + packb(value, None, PACK)
                except TypeError:
                    pass
        if type(value) is bytearray:  # within a list the serializer makes them bytes
            value = bytes(value)
        return self.codec.encode(value, lambda: path(i))

    def stored(self, value: Any, full: bytes, path: Callable[[], str]) -> bytes:
        """The form in which a value is stored, given its full form.

        Raises:
            Unstorable: It cannot be stored.
        """
        if full[0] != _FULL_MESSAGE:
            return full
        return pack_message(value) or self.codec.encode(value, path)

    def expanded(self, stored: Sequence[bytes]) -> list[bytes]:
        """The full forms of stored items.

        Raises:
            CorruptRecord: One cannot be read.
        """
        places = [i for i, each in enumerate(stored) if each and each[0] in CLASSES]
        if not places or not self.codec.compact:
            return list(stored)
        found = full_from_stored([stored[i] for i in places])
        if len(places) == len(stored):
            return found
        out = list(stored)
        for i, full in zip(places, found, strict=True):
            out[i] = full
        return out

    def values(self, full: Sequence[bytes]) -> list[Any]:
        """New values from full forms; no two callers share a mutable part.

        Raises:
            CorruptRecord: One cannot be read.
        """
        kinds = {each[0] for each in full if each}
        if kinds == {_FULL_MESSAGE}:
            return messages_from_full(full)
        if kinds == {_PLAIN_CODE} and self.codec.compact:
            try:
                elements: list[Any] = unpack(
                    array_header(len(full)) + b"".join([each[1:] for each in full])
                )
            except ValueError:  # only the serializer knows what is in one of them
                pass
            else:
                return elements
        return [self._value(each) for each in full]

    def _value(self, full: bytes) -> Any:
        if full and full[0] == _FULL_MESSAGE:
            return messages_from_full([full])[0]
        return self.codec.decode(full)

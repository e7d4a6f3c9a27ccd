"""Runs of items of one log as a single msgpack array: compared, and copied, in one pass.

A loop over messages in Python costs more than the work within it; msgpack's own loop does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.checkpointers.messages import CLASSES, extra_of, fields_of, rebuilt, unpack_fields
from perdure.checkpointers.packing import array_header, pack, unpack

_MESSAGES: Final = frozenset(CLASSES.values())
PLAIN: Final = 16  # the first byte of an item that is plain msgpack


@dataclass(frozen=True, slots=True)
class Piece:
    """The contents of consecutive items; it never changes.

    Attributes:
        classes: Their classes; nothing when they are plain data.
        count: How many they are.
        packed: Their fields, or they themselves, as a msgpack array.
    """

    classes: tuple[type[BaseMessage], ...]
    count: int
    packed: bytes

    def copies(self) -> list[Any]:
        """The items, new at each call: no two callers share a mutable part."""
        values: list[Any] = unpack(self.packed)
        return rebuilt(self.classes, values) if self.classes else values

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether these are just its items, by content."""
        types = set(map(type, values))
        if self.classes:
            if not types <= _MESSAGES or any(map(extra_of, values)):
                return False
            values = list(map(fields_of, values))
        elif types & _MESSAGES:
            return False
        try:
            return pack(values) == self.packed
        except TypeError:
            return False

    def joined(self, other: Piece) -> Piece | None:
        """The two as one, if they are of one kind."""
        if self.count and bool(self.classes) is not bool(other.classes):
            return None
        count = self.count + other.count
        packed = array_header(count) + self._elements() + other._elements()
        return Piece(self.classes + other.classes, count, packed)

    def _elements(self) -> bytes:
        return self.packed[len(array_header(self.count)) :]


def read_piece(stored: Sequence[bytes]) -> tuple[Piece, list[Any]] | None:
    """Items as a piece, and a first copy of them; None when they are not all of one kind.

    Args:
        stored: Each item as langgraph's serializer and the compact form of messages write it.

    Raises:
        CorruptRecord: A message cannot be read.
    """
    kinds = {item[0] for item in stored}
    if kinds <= CLASSES.keys():
        classes = tuple(CLASSES[item[0]] for item in stored)
        fields = unpack_fields(classes, stored)
        return Piece(classes, len(fields), pack(fields)), rebuilt(classes, fields)
    if kinds != {PLAIN}:
        return None
    packed = b"".join((array_header(len(stored)), *(item[1:] for item in stored)))
    try:
        values = unpack(packed)
    except ValueError:
        return None
    return Piece((), len(stored), packed), values

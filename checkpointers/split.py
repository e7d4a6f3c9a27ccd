"""Values as parts of a log: which of them the log of the channel has, and which are new.

langgraph says which channels a step wrote to; the others are as in the parent. In those that were
written to equality is decided by content alone: nothing is trusted for being the same object, so
one that was changed in place is stored again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from operator import eq
from types import NoneType
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage

from perdure.checkpointers.cache import ChannelLog, Thread, log_at_hand
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.manifest import (
    ALIASES,
    DICT,
    DICT_HERE,
    ITEM,
    LIST,
    LIST_HERE,
    MAP,
    Range,
    Ranges,
    positions,
)
from perdure.checkpointers.values import pack
from perdure.errors import Unstorable

START: Final = "__start__"  # langgraph's input channel: a dict of other channels' updates
INLINE_BYTES: Final = 128  # up to here a value stands in the checkpoint itself
_LONG: Final = 8  # elements of an update from which on it is worth a look at the log
_NUMBERS: Final = {int, float, bool, NoneType}
_KEYS: Final = frozenset({str, int})


class Split(NamedTuple):
    """A value stored as items of its channel's log: one item, or those of a list or dict, in order.

    Its parts are ranges of the log, and items that are not known to be stored. The first `kept` are
    those with which the parent's value begins.
    """

    kind: int
    parts: list[bytes | Range]
    kept: int


Node = Split | bytes | list[Any]  # the last two are references that need no log


class Encoded(NamedTuple):
    """A value that a channel holds, encoded.

    Attributes:
        kind: LIST, DICT or ITEM; None: `stored` stands in the checkpoint itself.
        values, full: The elements of a list, or the pairs of a dict, and the bytes of each.
        stored: A value that is not split.
    """

    kind: int | None
    values: list[Any]
    full: list[bytes]
    stored: bytes


def encoded(codec: Codec, value: Any, path: str) -> Encoded:
    """A value as it is compared with the log of its channel.

    Raises:
        Unstorable: It cannot be stored.
    """
    if _splittable(value):
        kind = DICT if type(value) is dict else LIST
        return Encoded(kind, *_elements(codec, value, path), b"")
    stored = codec.encode(value, lambda: path)
    inline = len(stored) <= INLINE_BYTES and not isinstance(value, BaseMessage)
    return Encoded(None if inline else ITEM, [], [], stored)


def held(codec: Codec, log: ChannelLog, value: Encoded, hint: Ranges, path: str) -> Node:
    """What a channel holds, against its log; `hint`: where the parent's value stands."""
    if value.kind is None:
        return value.stored
    if value.kind != ITEM:
        return _match(codec, value.kind, log, log.find, value.values, value.full, hint, path)
    position = log.find(value.stored)
    return Split(ITEM, [value.stored if position is None else (position, position + 1)], 0)


def here(
    codec: Codec,
    thread: Thread | None,
    channel: str,
    value: Any,
    path: str,
    *,
    nested: bool = False,
) -> Any:
    """A reference to a value that no channel holds: its parts stand in it.

    Of a long list, like the messages that a subgraph is given or gives back, the parts that the
    channel's log has are named by their ranges; without a `thread` none are looked for.

    Raises:
        Unstorable: It cannot be stored.
    """
    if not _splittable(value):
        return codec.encode(value, lambda: path)
    split = type(value) is dict and not nested and len(value) <= 32
    if split and any(map(_has_parts, value.values())):
        entries = {}
        for key, part in value.items():
            name = str(key) if channel == START else channel  # an input is by channel
            entries[key] = here(codec, thread, name, part, f"{path}[{key!r}]", nested=True)
        return [MAP, entries]
    kind = DICT_HERE if type(value) is dict else LIST_HERE
    elements, full = _elements(codec, value, path)
    if thread is not None and len(elements) >= _LONG:
        log = log_at_hand(thread, channel)
        if log.items:  # nothing may rest on what is not committed
            found = _match(codec, kind, log, log.find_stored, elements, full, [], path).parts
            return [
                kind,
                [p if isinstance(p, bytes) else [log.key, p[0], p[1] - p[0]] for p in found],
            ]
    pairs = zip(elements, full, strict=True)
    stored = [codec.stored(element, each, lambda: path) for element, each in pairs]
    if sum(map(len, stored)) > INLINE_BYTES or any(isinstance(e, BaseMessage) for e in elements):
        return [kind, stored]
    return codec.encode(value, lambda: path)


def _elements(codec: Codec, value: Any, path: str) -> tuple[list[Any], list[bytes]]:
    """The elements of a list, or the pairs of a dict, and the bytes of each."""
    elements = [[*pair] for pair in value.items()] if type(value) is dict else value
    try:
        return elements, codec.full(elements, lambda i: f"{path}[{i}]")
    except Unstorable:
        if type(value) is dict:
            codec.encode(value, lambda: path)  # names its parts by their keys
        raise


def _match(
    codec: Codec,
    kind: int,
    log: ChannelLog,
    find: Callable[[bytes], int | None],
    values: list[Any],
    full: list[bytes],
    hint: Ranges,
    path: str,
) -> Split:
    """Elements, given with their bytes, as ranges of the log, as far as it has them.

    `hint` is where the parent's value stands, likely to be much the same.
    """
    parts: list[bytes | Range] = []
    i = 0
    for start, stop in hint:
        if not log.holds(start, stop, full[i : i + stop - start]):
            break
        parts.append((start, stop))
        i += stop - start
    kept = len(parts)
    near = _positions(log, hint[kept:]) if i < len(values) else {}
    while i < len(values):
        position = near.get(full[i])
        if position is None:
            position = find(full[i])
        if position is None:
            stored = codec.stored(values[i], full[i], partial("{}[{}]".format, path, i))
            position = find(stored) if stored is not full[i] else None
            if position is None:
                parts.append(stored)
                i += 1
                continue
        stop = position + _run(log, position, full, i)
        parts.append((position, stop))
        i += stop - position
    return Split(kind, parts, kept)


def _run(log: ChannelLog, position: int, full: list[bytes], i: int) -> int:
    """How many items from a position on are those from `i` on, one at least."""
    at = log.items.get if position < ALIASES else log.get
    run, size, more = 1, 8, 8
    while more == size:  # in growing pieces: a slice of all that follows would be copied each time
        size *= 2
        piece = full[i + run : i + run + size]
        known = map(at, range(position + run, position + run + size))
        more = sum(takewhile(bool, map(eq, known, piece)))
        run += more
    return run


def _element(log: ChannelLog, part: bytes | Range) -> Any:
    """A part of a list as it stands in a reference."""
    return part if isinstance(part, bytes) else [log.key, part[0], part[1] - part[0]]


def _positions(log: ChannelLog, ranges: Ranges) -> dict[bytes, int]:
    """The positions of the items of ranges, by content."""
    out: dict[bytes, int] = {}
    for position in positions(ranges):
        full = log.get(position)
        if full is not None:
            out.setdefault(full, position)
    return out


def _packs(keys: list[Any]) -> bool:
    try:
        pack(keys)
    except TypeError:  # a lone surrogate, or a number out of range: refused with the whole value
        return False
    return True


def _has_parts(value: Any) -> bool:
    return type(value) in (list, dict) or isinstance(value, BaseMessage)


def _splittable(value: Any) -> bool:
    """Whether a value has parts worth their own place; numbers (an embedding) have not."""
    if type(value) is dict:
        return bool(value) and _KEYS.issuperset(map(type, value)) and _packs([*value])
    return type(value) is list and not _NUMBERS.issuperset(map(type, value))

"""References without some messages: what is left of values whose parts stand in a thread's log.

Each value is gone over twice: first only looked at, to learn what the messages say and which
channels hold them, then written. No item is changed in place: what is left of one is a new item.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from langgraph.checkpoint.serde.types import RESUME

from perdure.checkpointers.log import Log, Written
from perdure.checkpointers.manifest import (
    DICT,
    ITEM,
    LIST,
    MAP,
    Range,
    Ranges,
    count,
    once,
    positions,
    unflat,
)
from perdure.checkpointers.plan import New
from perdure.checkpointers.reading import BLOCKS, Reader
from perdure.checkpointers.records import item_place
from perdure.checkpointers.removing import GONE, Remover, Where
from perdure.checkpointers.schema import span
from perdure.storage.flow import Flow, Statement

PAGE: Final = 1024  # items looked at at once
_MESSAGE_FIELDS: Final = 64  # a dict of more entries is no message


@dataclass(slots=True)
class Rewriter:
    """The references of one thread, without some messages.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
        log: The flows that append.
        out: The thread, and what is appended to its log.
        lanes: The names of its logs.
        remover: Takes the messages out of values.

    Attributes:
        looking: Whether nothing is written yet, and messages are found by id alone.
        found: Whether there was anything to remove.
        touched: The items that are not as they were, by lane and position.
    """

    sql: dict[str, str]
    reader: Reader
    log: Log
    out: Written
    lanes: dict[int, str]
    remover: Remover
    looking: bool = True
    found: bool = False
    touched: set[tuple[int, int]] = field(default_factory=set)
    _suspects: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _order: dict[int, list[int]] = field(default_factory=dict)
    _results: dict[Any, Any] = field(default_factory=dict)
    _blocks: dict[tuple[int, int], Ranges] = field(default_factory=dict)
    _dicts: set[int] = field(default_factory=set)  # lanes whose items are pairs
    _parts_of_gone: set[tuple[int, int]] = field(default_factory=set)  # pairs of removed dicts

    def suspect(self) -> Flow[None]:
        """Set apart the items that may have to change."""
        compact = self.reader.codec.compact
        needles = self.remover.needles(contents=not self.looking) if compact else None
        for lane, name, end in (yield Statement(self.sql["thread_lanes"], (self.out.key,))):
            for start in range(0, end if name != BLOCKS else 0, PAGE):
                between = span(lane, start, start + PAGE)
                for key, body in (yield Statement(self.sql["items_between"], between)):
                    position = key & 0xFFFFFFFF
                    stored = self._opened(lane, position, body)
                    if needles is not None and not any(map(stored.__contains__, needles)):
                        continue
                    if self._mentions(self.reader.codec.decode(stored)):
                        self._suspects.setdefault(lane, {})[position] = stored
        self._order = {lane: sorted(items) for lane, items in self._suspects.items()}

    def begin(self) -> Flow[None]:
        """From now on write, and find also what went in under no id."""
        self.looking = False
        self._results.clear()
        yield from self.suspect()

    def _opened(self, lane: int, position: int, body: bytes) -> bytes:
        bound = item_place(self.out.thread_id, self.lanes[lane], position)
        return self.reader.seal.open(body, bound)

    def _mentions(self, value: Any) -> bool:
        """Whether a value, whatever it is part of, may not stay as it is."""
        # of a dict that was split, the pair that holds its id
        pair = type(value) is list and len(value) == 2 and type(value[1]) is str
        if pair and value[1] in self.remover.ids:
            return True
        return self.remover.without(value, Where(inputs=True, texts=True)) is not value

    # -- references

    def where(self, channel: str, *, inputs: bool) -> Where:
        """What the value of a channel, or a write to it, is part of."""
        if self.looking:
            return Where()
        return Where(inputs, inputs and channel in self.remover.channels, channel == RESUME)

    def ref(self, channel: str, ref: Any, *, inputs: bool) -> Flow[Any]:
        """A reference to what is left of a value: the same if all of it is, `GONE` if nothing."""
        where = self.where(channel, inputs=inputs)
        if isinstance(ref, bytes):
            new = self.inline(ref, where)
        elif ref[0] == MAP:
            new = yield from self._map(ref, inputs)
        elif ref[0] == ITEM:
            new = yield from self._single(ref, where)
        else:
            new = yield from self._many(ref, where)
        if new is not ref:
            self.found = True
            if self.looking and not channel.startswith("__"):
                self.remover.channels.add(channel)
        return new

    def inline(self, stored: bytes, where: Where) -> Any:
        """A value that stands in place: the same if all of it stays, `GONE` if nothing."""
        value = self.reader.codec.decode(stored)
        new = self.remover.without(value, where)
        if new is value:
            return stored
        self.found = True
        return GONE if new is GONE else self.encoded(new)

    def _map(self, ref: Any, inputs: bool) -> Flow[Any]:
        entries = {}
        for key, inner in ref[1].items():
            entries[key] = yield from self.ref(key, inner, inputs=inputs)
        if all(entries[key] is inner for key, inner in ref[1].items()):
            return ref
        return [MAP, {key: inner for key, inner in entries.items() if inner is not GONE}]

    def _single(self, ref: Any, where: Where) -> Flow[Any]:
        _, lane, position = ref
        parts = self._parts(lane, [(position, position + 1)], False, where)
        if not parts:
            return ref if parts is None else GONE
        return [ITEM, lane, (yield from self._append(lane, parts))[0][0]]

    def _many(self, ref: Any, where: Where) -> Flow[Any]:
        kind, lane, numbers = ref
        ranges = yield from self._ranges(lane, numbers)
        if kind == DICT:
            self._dicts.add(lane)
            if (yield from self._is_message(lane, ranges, where)):
                at = {(lane, position) for position in positions(ranges)}
                self._parts_of_gone |= at
                self.touched |= at
                return GONE
        parts = self._parts(lane, ranges, kind == DICT, where)
        if parts is None:
            return ref
        ranges = yield from self._append(lane, parts)
        return [kind, lane, (yield from self._written(ranges))]

    def said(self, ref: Any, before: Any) -> Flow[Any]:
        """What was said up to a checkpoint, where it is not just what the channel holds.

        Args:
            ref: What the channel holds, as it was written; None: nothing that stays.
            before: Lane and ranges, as they were written.
        """
        lane, numbers = before
        ranges = yield from self._ranges(lane, numbers)
        split = isinstance(ref, list) and ref[0] in (LIST, DICT)
        parts = self._parts(lane, ranges, ref[0] == DICT if split else lane in self._dicts, Where())
        gone: set[tuple[int, int]] = set()
        if self._parts_of_gone:
            gone = self._parts_of_gone.intersection((lane, p) for p in positions(ranges))
        if gone and split:  # what is part of another value too
            gone -= {(lane, p) for p in positions((yield from self._ranges(lane, ref[2])))}
        if parts is None and not gone:
            return before
        self.found = True
        kept: list[New | Range] = []
        for part in ranges if parts is None else parts:
            if isinstance(part, New):
                kept.append(part)
            else:
                kept += ((p, p + 1) for p in range(*part) if (lane, p) not in gone)
        ranges = yield from self._append(lane, kept)
        return [lane, (yield from self._written(once(ranges)))]

    def _append(self, lane: int, parts: list[New | Range]) -> Flow[Ranges]:
        if self.looking:
            return [(0, 1)]  # nobody will read it
        return (yield from self.log.append(self.out, self.lanes[lane], parts))

    def _written(self, ranges: Ranges) -> Flow[list[Any]]:
        if self.looking:
            return []
        return (yield from self.log.written_ranges(self.out, ranges))

    def _ranges(self, lane: int, numbers: Any) -> Flow[Ranges]:
        """Ranges from the form in which they are written; no block is read twice."""
        if not numbers or isinstance(numbers[0], int):
            return unflat(numbers)
        (blocks, *places), *rest = numbers
        out: Ranges = []
        for position in places:
            if (blocks, position) not in self._blocks:
                found = yield from self.reader.block(blocks, position)
                self._blocks[blocks, position] = found
            out += self._blocks[blocks, position]
        return out + unflat(rest)

    # -- items

    def _hits(self, lane: int, start: int, stop: int) -> Iterator[int]:
        """The suspects of a range."""
        order = self._order.get(lane, [])
        for i in range(bisect_left(order, start), bisect_left(order, stop)):
            yield order[i]

    def _parts(
        self, lane: int, ranges: Ranges, pairs: bool, where: Where
    ) -> list[New | Range] | None:
        """What is left of a list or dict; None: all of it."""
        parts: list[New | Range] = []
        same = True
        for start, stop in ranges:
            at = start
            for position in self._hits(lane, start, stop):
                new = self._item(lane, position, pairs, where)
                if new is None:
                    continue
                same = False
                if at < position:
                    parts.append((at, position))
                if new is not GONE:
                    parts.append(New(new))
                at = position + 1
            if at < stop:
                parts.append((at, stop))
        return None if same else parts

    def _item(self, lane: int, position: int, pair: bool, where: Where) -> Any:
        """A suspect without the messages, as it is stored; None: it stays as it is."""
        asked = (lane, position, pair, where)
        if asked not in self._results:
            value = self.reader.codec.decode(self._suspects[lane][position])
            pair = pair and type(value) is list and len(value) == 2
            before = {value[0]: value[1]} if pair else value
            new = self.remover.without(before, where)
            if new is before:
                self._results[asked] = None
                return None
            self.touched.add((lane, position))
            if pair:
                new = [*new.popitem()] if new else GONE
            if new is GONE and where.holes:
                new = None
            self._results[asked] = GONE if new is GONE else self.encoded(new)
        return self._results[asked]

    def encoded(self, value: Any) -> bytes:
        """A value as it is stored."""
        return self.reader.codec.encode(value, lambda: "a value that held an erased message")

    def _is_message(self, lane: int, ranges: Ranges, where: Where) -> Flow[bool]:
        """Whether a dict that was split is itself a message."""
        if count(ranges) > _MESSAGE_FIELDS:
            return False
        if not any(True for start, stop in ranges for _ in self._hits(lane, start, stop)):
            return False
        pairs = []
        for start, stop in ranges:
            for key, body in (yield Statement(self.sql["items_between"], span(lane, start, stop))):
                stored = self._opened(lane, key & 0xFFFFFFFF, body)
                pairs.append(self.reader.codec.decode(stored))
        return self.remover.is_gone(dict(pairs), where)

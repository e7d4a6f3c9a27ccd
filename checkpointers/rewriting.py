"""References without some messages: what is left of values whose parts stand in a thread's log.

Each value is gone over twice: first only looked at, to learn what the messages say and which
channels hold them, then written. No item is changed in place: what is left of one is a new item.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME, TASKS
from langgraph.types import Send

from perdure.checkpointers.cache import ChannelLog, Thread
from perdure.checkpointers.log import Appender
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
    count,
    flat,
    once,
    positions,
    references,
)
from perdure.checkpointers.packing import unpack
from perdure.checkpointers.planner import New
from perdure.checkpointers.reader import Reader
from perdure.checkpointers.records import content_hash, item_place, log_spans, span
from perdure.checkpointers.removal import GONE, Remover, Where
from perdure.storage.flow import Flow, Statement

BLOCKS: Final = "#blocks"  # the log in which the first version kept long manifests
CANCELLED: Final = Send("__erased__", None)  # keeps the places of the tasks after it; never runs
PAGE: Final = 1024  # items looked at at once
_TASKS: Final = {ERROR, INTERRUPT, RESUME, TASKS}
_MESSAGE_FIELDS: Final = 64  # a dict of more entries is no message


@dataclass(slots=True)
class Rewriter:
    """The references of one thread, without some messages.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
        appender: Takes what is appended to its log.
        thread: What is read of it; not the cache's.
        remover: Takes the messages out of values.

    Attributes:
        looking: Whether nothing is written yet, and messages are found by id alone.
        found: Whether there was anything to remove.
        sent: Whether the values are a subgraph's that was sent a task which quoted a message.
        awaited: Whether a list ended with a call that goes, which nobody has answered.
        touched: The items that are not as they were, by log and position.
    """

    sql: dict[str, str]
    reader: Reader
    appender: Appender
    thread: Thread
    remover: Remover
    looking: bool = True
    found: bool = False
    sent: bool = False
    awaited: bool = False
    touched: set[tuple[int, int]] = field(default_factory=set)
    _needles: list[bytes] | None = None
    _suspects: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _order: dict[int, list[int]] = field(default_factory=dict)
    _results: dict[Any, Any] = field(default_factory=dict)
    _calling: set[tuple[int, int]] = field(default_factory=set)  # messages with calls that go
    _dicts: set[int] = field(default_factory=set)  # logs whose items are pairs
    _parts_of_gone: set[tuple[int, int]] = field(default_factory=set)  # pairs of removed dicts

    def begin(self, *, looking: bool) -> Flow[None]:
        """Set apart the items that may have to change: known by id, or else by all they say."""
        self.looking = looking
        self._results.clear()
        compact = self.reader.items.codec.compact
        self._needles = self.remover.needles() if compact else None
        suspects = {}
        for key, name, *ends in (yield Statement(self.sql["thread_logs"], (self.thread.key,))):
            (_, end), (_, last) = log_spans(*ends)
            if name != BLOCKS:
                log = self.thread.log(key, name)
                suspects[log] = yield from self._suspicious(log, end)
                if looking:
                    yield from self._read_aliases(log, last)
        for log, found in suspects.items():  # once all that is spared is known
            self._suspects[log.key] = {p: s for p, s in found.items() if self._mentions(s)}
            hits = self._suspects[log.key]
            aliases = (alias for alias, origin in log.origins.items() if origin in hits)
            self._order[log.key] = [*sorted(hits), *sorted(aliases)]

    def _suspicious(self, log: ChannelLog, end: int) -> Flow[dict[int, bytes]]:
        out = {}
        for start in range(0, end, PAGE):
            between = span(log.key, start, min(start + PAGE, end))
            for position, stored in (yield from self._rows(log, between)):
                if self._may_mention([stored]):
                    out[position] = stored
                    if not self.looking:
                        self.remover.spare(self.reader.items.codec.decode(stored))
        return out

    def _read_aliases(self, log: ChannelLog, last: int) -> Flow[None]:
        for start in range(ALIASES, last, PAGE):
            rows = yield from self._rows(log, span(log.key, start, min(start + PAGE, last)))
            log.origins.update((position, unpack(body)) for position, body in rows)

    def _rows(self, log: ChannelLog, between: tuple[int, int]) -> Flow[list[tuple[int, bytes]]]:
        rows = yield Statement(self.sql["items_between"], between)
        out = []
        for key, body in rows:
            position = key & 0xFFFFFFFF
            bound = item_place(self.appender.thread_id, log.name, position)
            out.append((position, self.reader.seal.open(body, bound)))
        return out

    def _may_mention(self, stored: list[bytes]) -> bool:
        needles = self._needles
        return needles is None or any(n in each for each in stored for n in needles)

    def _mentions(self, stored: bytes) -> bool:
        """Whether an item, whatever it is part of, may not stay as it is."""
        value = self.reader.items.codec.decode(stored)
        # of a dict that was split, the pair that holds its id
        pair = type(value) is list and len(value) == 2 and type(value[1]) is str
        if pair and value[1] in self.remover.ids:
            return True
        return self.remover.without(value, Where(True, True, True)) is not value

    # -- references

    def ref(self, channel: str, ref: Any, *, inputs: bool) -> Flow[Any]:
        """A reference to what is left of a value: the same if all of it is, `GONE` if nothing."""
        inputs = inputs and not self.looking
        texts, tasks = inputs and channel in self.remover.channels, channel in _TASKS or self.sent
        where = Where(inputs, texts, tasks)
        if isinstance(ref, bytes):
            new = self.inline(ref, where)
        elif ref[0] in (MAP, LIST_HERE, DICT_HERE):
            new = ref
            if any(True for _ in references(ref)) or self._may_mention([*_stored(ref)]):
                value = yield from self.value(ref)
                new = self._left(value, where, ref)
        elif ref[0] == ITEM:
            new = yield from self._single(ref, where)
        else:
            new = yield from self._many(ref, where)
        if new is not ref:
            self.found = True
            if self.looking and not channel.startswith("__"):
                self.remover.channels.add(channel)
        return new

    def value(self, ref: Any) -> Flow[Any]:
        """What a reference stands for."""
        return (yield from self.reader.value(self.appender.thread_id, self.thread, ref))

    def inline(self, stored: bytes, where: Where) -> Any:
        """A value that stands in place: the same if all of it stays, `GONE` if nothing."""
        if not self._may_mention([stored]):
            return stored
        return self._left(self.reader.items.codec.decode(stored), where, stored)

    def _left(self, value: Any, where: Where, ref: Any) -> Any:
        new = self.remover.without(value, where)
        if new is value:
            return ref
        self.found = True
        return GONE if new is GONE else self.encoded(new)

    def tasks(self, ref: Any) -> Flow[tuple[Any, dict[int, Send]]]:
        """The tasks sent to run next, without those that quote, and these by their places."""
        value = yield from self.value(ref)
        gone = {}
        for place, task in enumerate(value if isinstance(value, list) else []):
            if self.remover.without(task, Where(tasks=True)) is GONE:
                gone[place] = task
        if not gone:
            return ref, {}
        self.found = True
        left = [CANCELLED if place in gone else task for place, task in enumerate(value)]
        while left and left[-1] is CANCELLED:
            left.pop()
        return self.encoded(left), gone

    def _single(self, ref: Any, where: Where) -> Flow[Any]:
        _, log, position = ref
        parts = self._parts(log, [(position, position + 1)], False, where)
        if not parts:
            return ref if parts is None else GONE
        return [ITEM, log, (yield from self._append(log, parts))[0][0]]

    def _many(self, ref: Any, where: Where) -> Flow[Any]:
        kind, log, numbers = ref
        ranges = yield from self.reader.ranges(numbers)
        if kind == DICT:
            self._dicts.add(log)
            if (yield from self._is_message(log, ranges, where)):
                at = {(log, position) for position in positions(ranges)}
                self._parts_of_gone |= at
                self.touched |= at
                return GONE
        parts = self._parts(log, ranges, kind == DICT, where)
        if parts is None:
            return ref
        last = self.thread.logs[log].origin(ranges[-1][1] - 1)
        self.awaited = self.awaited or (log, last) in self._calling
        return [kind, log, flat((yield from self._append(log, parts)))]

    def said(self, ref: Any, before: Any) -> Flow[Any]:
        """What was said up to a checkpoint, where it is not just what the channel holds.

        Args:
            ref: What the channel holds, as it was written; None: nothing that stays.
            before: Log and ranges, as they were written.
        """
        log, numbers = before
        ranges = yield from self.reader.ranges(numbers)
        split = isinstance(ref, list) and ref[0] in (LIST, DICT)
        pairs = ref[0] == DICT if split else log in self._dicts
        parts = self._parts(log, ranges, pairs, Where(tasks=self.sent))
        gone: set[tuple[int, int]] = set()
        if self._parts_of_gone:
            gone = self._parts_of_gone.intersection((log, p) for p in positions(ranges))
        if gone and split:  # what is part of another value too
            gone -= {(log, p) for p in positions((yield from self.reader.ranges(ref[2])))}
        if parts is None and not gone:
            return before
        self.found = True
        kept: list[New | Range] = []
        for part in ranges if parts is None else parts:
            if isinstance(part, New):
                kept.append(part)
            else:
                kept += ((p, p + 1) for p in range(*part) if (log, p) not in gone)
        return [log, flat(once((yield from self._append(log, kept))))]

    def _append(self, log: int, parts: list[New | Range]) -> Flow[Ranges]:
        if self.looking:
            return [(0, 1)]  # nobody will read it
        channel = self.thread.logs[log].name
        for part in parts:
            if isinstance(part, New) and (channel, part.stored) not in self.appender.placed:
                yield from self._find(log, channel, part.stored)
        return self.appender.append(channel, parts)

    def _find(self, log: int, channel: str, stored: bytes) -> Flow[None]:
        """What is left of an item may be one that the log has."""
        hashed = content_hash(self.reader.seal, log, stored)
        for key, body in (yield Statement(self.sql["same_hashes"], (json.dumps([hashed]),))):
            position = key & 0xFFFFFFFF
            bound = item_place(self.appender.thread_id, channel, position)
            if key >> 32 == log and self.reader.seal.open(body, bound) == stored:
                self.appender.placed[channel, stored] = position

    # -- items

    def _hits(self, log: int, start: int, stop: int) -> Iterator[int]:
        """The suspects of a range."""
        order = self._order.get(log, [])
        for i in range(bisect_left(order, start), bisect_left(order, stop)):
            yield order[i]

    def _parts(
        self, log: int, ranges: Ranges, pairs: bool, where: Where
    ) -> list[New | Range] | None:
        """What is left of a list or dict; None: all of it."""
        parts: list[New | Range] = []
        same = True
        for start, stop in ranges:
            at = start
            for position in self._hits(log, start, stop):
                new = self._item(log, self.thread.logs[log].origin(position), pairs, where)
                if new is None:
                    continue
                same = False
                if at < position:
                    parts.append((at, position))
                if new is not GONE:
                    parts.append(New(new, new))
                at = position + 1
            if at < stop:
                parts.append((at, stop))
        return None if same else parts

    def _item(self, log: int, position: int, pair: bool, where: Where) -> Any:
        """A suspect without the messages, as it is stored; None: it stays as it is."""
        asked = (log, position, pair, where)
        if asked not in self._results:
            value = self.reader.items.codec.decode(self._suspects[log][position])
            pair = pair and type(value) is list and len(value) == 2
            before = {value[0]: value[1]} if pair else value
            new = self.remover.without(before, where)
            if new is before:
                self._results[asked] = None
                return None
            self.touched.add((log, position))
            if pair:
                new = [*new.popitem()] if new else GONE
            if new is GONE and getattr(value, "tool_calls", None):
                self._calling.add((log, position))
            self._results[asked] = GONE if new is GONE else self.encoded(new)
        return self._results[asked]

    def encoded(self, value: Any) -> bytes:
        """A value as it is stored."""
        return self.reader.items.codec.encode(value, lambda: "a value that held an erased message")

    def _is_message(self, log: int, ranges: Ranges, where: Where) -> Flow[bool]:
        """Whether a dict that was split is itself a message."""
        if count(ranges) > _MESSAGE_FIELDS:
            return False
        if not any(True for start, stop in ranges for _ in self._hits(log, start, stop)):
            return False
        value = yield from self.value([DICT, log, flat(ranges)])
        return self.remover.is_gone(value, where)


def _stored(ref: Any) -> Iterator[bytes]:
    """The bytes that stand in a reference."""
    if isinstance(ref, bytes):
        yield ref
    elif ref[0] in (LIST_HERE, DICT_HERE):
        yield from (element for element in ref[1] if isinstance(element, bytes))
    elif ref[0] == MAP:
        for inner in ref[1].values():
            yield from _stored(inner)

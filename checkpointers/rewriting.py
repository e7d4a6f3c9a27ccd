"""References to a thread's log without some messages.

Each value is gone over twice: first only looked at, to learn what the messages say and which
channels hold them, then written. No item is changed in place: what is left of one is a new item.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import Any, Final

from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME, TASKS
from langgraph.types import Send

from perdure.checkpointers.cache import Thread
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
from perdure.checkpointers.planner import New
from perdure.checkpointers.reader import PAGE, Reader
from perdure.checkpointers.records import content_hash, log_spans, open_item
from perdure.checkpointers.removal import GONE, Remover, Where
from perdure.checkpointers.values import pack, unpack
from perdure.storage.flow import Flow

BLOCKS: Final = "#blocks"  # the log in which the first version kept long manifests
CANCELLED: Final = Send("__erased__", None)  # keeps the places of the tasks after it; never runs
_TASKS: Final = {ERROR, INTERRUPT, RESUME, TASKS}
_MESSAGE_FIELDS: Final = 64  # a dict of more entries is no message


class Rewriter:
    """The references of one thread, without some messages.

    Attributes:
        looking: Whether nothing is written yet, and messages are found by id alone.
        found: Whether there was anything to remove.
        sent: Whether the values are a subgraph's that was sent a task which quoted a message.
        awaited: Whether a list ended with a call that goes, which nobody has answered.
        touched: The items that are not as they were, by log and position.
    """

    def __init__(
        self, reader: Reader, appender: Appender, thread: Thread, remover: Remover
    ) -> None:
        self.reader, self.sql, self.codec = reader, reader.sql, reader.codec
        self.appender, self.thread, self.remover = appender, thread, remover
        self.looking = True
        self.found = self.sent = self.awaited = False
        self.touched: set[tuple[int, int]] = set()
        self._needles: list[bytes] | None = None
        # items that have to change, by log and position; and the positions of these, sorted
        self._suspects: dict[int, dict[int, bytes]] = {}
        self._order: dict[int, list[int]] = {}
        self._results: dict[Any, Any] = {}
        self._calling: set[tuple[int, int]] = set()  # messages with calls that go
        self._dicts: set[int] = set()  # logs whose items are pairs
        self._parts_of_gone: set[tuple[int, int]] = set()  # pairs of removed dicts

    def begin(self, *, looking: bool) -> Flow[None]:
        """Set apart the items that may have to change: known by id, or else by all they say."""
        self.looking = looking
        self._results.clear()
        self._needles = self.remover.needles() if self.codec.compact else None
        suspects = []
        for key, name, *ends in (yield self.sql("thread_logs", self.thread.key)):
            if name == BLOCKS:
                continue
            of, log = (self.appender.thread_id, name, key), self.thread.log(key, name)
            (_, end), (_, last) = log_spans(*ends)
            found = {}
            for start in range(0, end, PAGE):
                items = yield from self.reader.stored(*of, start, start + PAGE)
                found.update({p: stored for p, stored in items if self._may_mention(stored)})
            for start in range(ALIASES, last, PAGE):
                items = yield from self.reader.stored(*of, start, start + PAGE)
                log.origins.update((alias, unpack(body)) for alias, body in items)
            for stored in () if looking else found.values():
                self.remover.spare(self.codec.decode(stored))
            suspects.append((log, found))
        for log, found in suspects:  # once all that is spared is known
            hits = {p: stored for p, stored in found.items() if self._mentions(stored)}
            aliases = [alias for alias, origin in log.origins.items() if origin in hits]
            self._suspects[log.key], self._order[log.key] = hits, sorted([*hits, *aliases])

    def _may_mention(self, stored: bytes) -> bool:
        return self._needles is None or any(needle in stored for needle in self._needles)

    def _mentions(self, stored: bytes) -> bool:
        """Whether an item, whatever it is part of, may not stay as it is."""
        value = self.codec.decode(stored)
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
        where, new = Where(inputs, texts, tasks), ref
        if isinstance(ref, bytes):
            new = self.inline(ref, where)
        elif ref[0] in (MAP, LIST_HERE, DICT_HERE):
            if any(references(ref)) or self._may_mention(pack(ref)):
                new = self._left((yield from self.value(ref)), where, ref)
        else:
            new = yield from self._split(ref, where)
        if new is not ref:
            self.found = True
            if self.looking and not channel.startswith("__"):
                self.remover.channels.add(channel)
        return new

    def value(self, ref: Any) -> Flow[Any]:
        """The value of a reference."""
        return (yield from self.reader.value(self.appender.thread_id, self.thread, ref))

    def inline(self, stored: bytes, where: Where) -> Any:
        """A value that stands in place: the same if all of it stays, `GONE` if nothing."""
        if not self._may_mention(stored):
            return stored
        return self._left(self.codec.decode(stored), where, stored)

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

    def _split(self, ref: Any, where: Where) -> Flow[Any]:
        kind, log, numbers = ref
        numbers = [numbers, 1] if kind == ITEM else numbers
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
        if kind == ITEM:
            return [ITEM, log, (yield from self._append(log, parts))[0][0]] if parts else GONE
        last = self.thread.logs[log].origin(ranges[-1][1] - 1)
        self.awaited = self.awaited or (log, last) in self._calling
        return [kind, log, flat((yield from self._append(log, parts)))]

    def said(self, ref: Any, before: Any) -> Flow[Any]:
        """The history up to a checkpoint, if it differs from the channel's value.

        Both are as they were written: `ref`, what the channel holds; `before`, log and ranges.
        """
        log, numbers = before
        ranges = yield from self.reader.ranges(numbers)
        split = isinstance(ref, list) and ref[0] in (LIST, DICT)
        pairs = ref[0] == DICT if split else log in self._dicts
        parts = self._parts(log, ranges, pairs, Where(tasks=self.sent))
        gone = self._parts_of_gone and self._parts_of_gone.intersection(
            (log, p) for p in positions(ranges)
        )
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
        channel, placed = self.thread.logs[log].name, self.appender.placed
        for part in parts:
            if isinstance(part, New) and (channel, part.stored) not in placed:
                # what is left of an item may be one that the log has
                hashed = content_hash(self.reader.seal, log, part.stored)
                for key, body in (yield self.sql("same_hashes", json.dumps([hashed]))):
                    if key >> 32 == log:  # else two logs have one hash
                        of = self.reader.seal, self.appender.thread_id, channel
                        position, stored = open_item(*of, key, body)
                        placed.setdefault((channel, stored), position)
        return self.appender.append(channel, parts)

    # -- items

    def _hits(self, log: int, start: int, stop: int) -> list[int]:
        """The suspects of a range."""
        order = self._order.get(log, [])
        return order[bisect_left(order, start) : bisect_left(order, stop)]

    def _parts(
        self, log: int, ranges: Ranges, pairs: bool, where: Where
    ) -> list[New | Range] | None:
        """The remaining parts of a list or dict; None: all of it."""
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
            value = self.codec.decode(self._suspects[log][position])
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
        return self.codec.encode(value, lambda: "a value that held an erased message")

    def _is_message(self, log: int, ranges: Ranges, where: Where) -> Flow[bool]:
        """Whether a dict that was split is itself a message."""
        if count(ranges) > _MESSAGE_FIELDS:
            return False
        if not any(self._hits(log, *each) for each in ranges):
            return False
        value = yield from self.value([DICT, log, flat(ranges)])
        return self.remover.is_gone(value, where)

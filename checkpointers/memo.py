"""What this process remembers of threads: their items and recent checkpoints, within a budget.

Never the source of truth. An item at a position never changes, so what is remembered of it stays
right whoever writes; only a deletion makes it stale, and each deletion moves the thread's `swept`
counter, which every operation reads from the database and compares.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from perdure.checkpointers.codec import Codec
from perdure.checkpointers.manifest import Range, Ranges
from perdure.checkpointers.messages import CLASSES
from perdure.checkpointers.pieces import Piece

PIECE: Final = 256  # items compared at once
_PIECES_MIN: Final = 16
_WEIGH_EVERY: Final = 64  # requests between two looks at how much is remembered
_THREAD_OVERHEAD: Final = 20_000  # bytes of a thread with nothing in it and its checkpoints
_NOTHING: Final = Piece((), 0, b"\x90")
_RECENT: Final = 8  # checkpoints remembered per thread
_ITEM_OVERHEAD: Final = 500  # bytes that an item takes beside its text twice, about


class Lane:
    """The remembered part of one log."""

    __slots__ = ("_index", "_indexed", "_pieces", "items", "key", "name")

    def __init__(self, key: int, name: str) -> None:
        self.key = key
        self.name = name
        self.items: dict[int, bytes] = {}
        self._pieces: dict[int, Piece] = {}
        self._index: dict[bytes, int] = {}
        self._indexed = 0

    def has(self, start: int, stop: int) -> bool:
        """Whether every item of a range is here."""
        return all(map(self.items.__contains__, range(start, stop)))

    def fresh(self, ranges: Ranges, codec: Codec) -> list[Any]:
        """New values of the items of ranges that are all here."""
        out: list[Any] = []
        for start, stop in pieces(ranges):
            if start in self._pieces:
                piece = self._piece(start, stop, codec)
                if piece is not None:
                    out += piece.copies()
                    continue
            stored = [self.items[i] for i in range(start, stop)]
            read = codec.piece(stored)
            if read is None:
                out += map(codec.decode, stored)
            else:
                self._keep(start, read[0])
                out += read[1]
        return out

    def find(self, stored: bytes) -> int | None:
        """The position of an item with these bytes, if one is here."""
        if self._indexed != len(self.items):
            for position in list(self.items)[self._indexed :]:
                self._index.setdefault(self.items[position], position)
            self._indexed = len(self.items)
        return self._index.get(stored)

    def holds_messages(self) -> bool:
        """Whether its first remembered item is a message."""
        stored = next(iter(self.items.values()), b"")
        return bool(stored) and stored[0] in CLASSES

    def known(self, start: int, stop: int) -> bool:
        """Whether a range is at hand as a piece, so that `same` has only to compare."""
        piece = self._pieces.get(start)
        return piece is not None and piece.count == stop - start

    def same(self, values: Sequence[Any], start: int, codec: Codec) -> bool:
        """Whether the items from `start` on hold just these values, by content."""
        stop = start + len(values)
        piece = self._piece(start, stop, codec) if self.has(start, stop) else None
        return piece is not None and piece.holds(values)

    def _piece(self, start: int, stop: int, codec: Codec) -> Piece | None:
        """The items of a range as a piece; one that is here already is made longer."""
        known = self._pieces.get(start, _NOTHING)
        if known.count > stop - start:
            known = _NOTHING
        if known.count < stop - start:
            read = codec.piece([self.items[i] for i in range(start + known.count, stop)])
            if read is None or (joined := known.joined(read[0])) is None:
                return None
            known = joined
            self._keep(start, known)
        return known

    def _keep(self, start: int, piece: Piece) -> None:
        if piece.count < self._pieces.get(start, _NOTHING).count:
            return
        if len(self._pieces) > _PIECES_MIN + 2 * len(self.items) // PIECE:
            self._pieces.clear()  # a window that moves leaves pieces behind that no one asks for
        self._pieces[start] = piece


@dataclass(slots=True)
class Snapshot:
    """A checkpoint's row, unpacked, with the ranges of its lists and dicts at hand.

    Attributes:
        uid: The checkpoint id.
        key: The row's key.
        parent: The parent's id.
        fields: As stored: what of the checkpoint has no attribute here, and the metadata.
        versions: Channel versions.
        seen: Versions seen, by node.
        refs: A reference for each channel that has a value.
        ranges: For channels split into a log: its lane and ranges.
        said: The same, for what was said on the way here.
    """

    uid: str
    key: int
    parent: str | None
    fields: list[Any]
    versions: dict[str, Any]
    seen: dict[str, dict[str, Any]]
    refs: dict[str, Any]
    ranges: dict[str, tuple[int, Ranges]] = field(default_factory=dict)
    said: dict[str, tuple[int, Ranges]] = field(default_factory=dict)

    def holds(self, channel: str, version: Any) -> bool:
        """Whether it has a value of a channel, in this version."""
        return channel in self.refs and self.versions.get(channel) == version

    def take(self, channel: str, parent: Snapshot) -> None:
        """Have a channel as the parent has it."""
        self.refs[channel] = parent.refs[channel]
        if channel in parent.ranges:
            self.ranges[channel] = parent.ranges[channel]


class Thread:
    """What is remembered of one thread, true as long as `key` and `swept` are."""

    __slots__ = ("key", "lanes", "lines", "recent", "size", "swept", "thread_id")

    def __init__(self, thread_id: str, key: int, swept: int) -> None:
        self.thread_id = thread_id
        self.key = key
        self.swept = swept
        self.lanes: dict[int, Lane] = {}
        self.lines: dict[str, int] = {}
        self.recent: OrderedDict[tuple[str, str], Snapshot] = OrderedDict()
        self.size = _THREAD_OVERHEAD

    def lane_named(self, name: str) -> Lane | None:
        """The lane of a channel, if anything of it is remembered."""
        return next((lane for lane in list(self.lanes.values()) if lane.name == name), None)

    def lane(self, key: int, name: str) -> Lane:
        """The lane with a key."""
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes.setdefault(key, Lane(key, name))
        return lane

    def add_items(self, lane: Lane, items: Iterable[tuple[int, bytes]]) -> None:
        """Remember items at their positions."""
        for position, stored in items:
            if position not in lane.items:
                lane.items[position] = stored
                self.size += 2 * len(stored) + _ITEM_OVERHEAD

    def remember(self, ns: str, snapshot: Snapshot) -> None:
        """Keep a checkpoint at hand for the puts that follow it."""
        with suppress(KeyError):  # another thread may be at it too
            self.recent[ns, snapshot.uid] = snapshot
            self.recent.move_to_end((ns, snapshot.uid))
            while len(self.recent) > _RECENT:
                self.recent.popitem(last=False)


class Memo:
    """The threads remembered, the least recently used forgotten first.

    Args:
        limit_bytes: About how much memory to use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._threads: OrderedDict[str, Thread] = OrderedDict()
        self._lock = threading.Lock()
        self._asked = 0

    def peek(self, thread_id: str) -> Thread | None:
        """What is remembered, if anything; it may be stale."""
        return self._threads.get(thread_id)

    def thread(self, thread_id: str, key: int, swept: int) -> Thread:
        """What is remembered of a thread in this state; nothing of a former one."""
        with self._lock:
            known = self._threads.get(thread_id)
            if known is None or known.key != key or known.swept < swept:
                known = self._threads[thread_id] = Thread(thread_id, key, swept)
            elif known.swept > swept:
                return Thread(thread_id, key, swept)  # a reader on an older snapshot
            self._threads.move_to_end(thread_id)
            self._asked += 1
            if self._asked % _WEIGH_EVERY == 0:
                self._shed()
            return known

    def _shed(self) -> None:
        total = sum(thread.size for thread in self._threads.values())
        while total > self._limit and len(self._threads) > 1:
            total -= self._threads.popitem(last=False)[1].size

    def forget(self, thread_id: str) -> None:
        """Drop what is remembered of a thread."""
        with self._lock:
            self._threads.pop(thread_id, None)


def pieces(ranges: Ranges) -> Iterable[Range]:
    """Ranges cut at multiples of `PIECE`, so that the same pieces come up again and again."""
    for start, stop in ranges:
        while start < stop:
            end = min(stop, (start // PIECE + 1) * PIECE)
            yield start, end
            start = end

"""What to store of a channel's value: which parts the log has already, and which are new.

langgraph says which channels a step wrote to; the others are as in the parent. In those that were
written to equality is decided by content alone: nothing is trusted for being the same object, so
one that was changed in place is stored again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, Literal

from langchain_core.messages import BaseMessage, RemoveMessage
from langgraph.checkpoint.base import WRITES_IDX_MAP, ChannelVersions, Checkpoint

from perdure.checkpointers.base import Address
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.manifest import DICT, LIST, Range, Ranges
from perdure.checkpointers.memo import Lane, Thread, pieces
from perdure.errors import Unstorable

INLINE_BYTES: Final = 128  # up to here a value stands in the checkpoint itself
_OWN_FIELDS: Final = {"id", "channel_values", "channel_versions", "versions_seen"}
_NUMBERS: Final = {int, float, bool, NoneType}
INPUTS: Final = (
    "#inputs"  # what a reducer turns into something else; apart from what it makes of it
)
START: Final = "__start__"  # langgraph's input channel: a dict of other channels' updates


@dataclass(frozen=True, slots=True)
class New:
    """An item that is not known to be stored."""

    stored: bytes


@dataclass(frozen=True, slots=True)
class Inline:
    """A small value, in place."""

    stored: bytes


@dataclass(frozen=True, slots=True)
class One:
    """A value stored as one item of a lane."""

    lane: str
    item: New | Range


@dataclass(frozen=True, slots=True)
class Many:
    """A list or dict stored as items of a lane, in order."""

    kind: int
    lane: str
    parts: list[New | Range]


@dataclass(frozen=True, slots=True)
class Map:
    """A small dict of values that are split themselves."""

    entries: dict[str, Node]


Node = Inline | One | Many | Map


@dataclass(slots=True)
class PlannedPut:
    """A checkpoint to put. A channel without a plan is as it is in the parent.

    `remembered` is the state of the thread that the plan rests on, if it rests on one.
    """

    thread_id: str
    ns: str
    uid: str
    parent: str | None
    fields: list[Any]
    metadata: dict[str, Any]
    versions: dict[str, Any]
    seen: dict[str, dict[str, Any]]
    nodes: dict[str, Node | None]
    remembered: tuple[int, int] | None
    contests: bool
    on_conflict: Literal["fork", "error"]


@dataclass(slots=True)
class PlannedWrites:
    """Pending writes of one task: `(index, channel, node)` each."""

    thread_id: str
    ns: str
    uid: str
    task: str
    path: str
    writes: list[tuple[int, str, Node]]
    replace: bool
    remembered: tuple[int, int] | None


@dataclass(slots=True)
class Planner:
    """Plans values against what is remembered of their thread.

    Args:
        codec: Encodes items.
        thread: What is remembered of it.
        alone: Whether the plan has to stand by itself, because what it would rest on is gone.
    """

    codec: Codec
    thread: Thread | None
    alone: bool = False

    def plan(
        self, lane: str, value: Any, path: str, *, hint: Ranges | None = None, held: bool = False
    ) -> Node:
        """Plan one value.

        Args:
            lane: The log its items belong to.
            value: The value.
            path: How an error names the value.
            hint: Where the channel's former value stands, likely to be much the same.
            held: Whether a channel holds the value, so that its items are history, however few.

        Raises:
            Unstorable: It, or a part of it, cannot be stored.
            ForbiddenType: A type in it is not on the allowlist.
        """
        if not held and lane != START and self._will_change(lane, value):
            lane = INPUTS
        if lane == START and _is_input(value):
            return Map({k: self.plan(k, v, f"{path}[{k!r}]") for k, v in value.items()})
        if type(value) is list and _splittable(value) and (held or not self._small(value, path)):
            return Many(LIST, lane, self._match(lane, value, hint, path))
        if type(value) is dict and _splittable(value) and (held or not self._small(value, path)):
            try:
                return Many(
                    DICT, lane, self._match(lane, [[*kv] for kv in value.items()], hint, path)
                )
            except Unstorable:
                self.codec.encode(value, lambda: path)  # names the path by key
                raise
        stored = self.codec.encode(value, lambda: path)
        if len(stored) <= INLINE_BYTES and not isinstance(value, BaseMessage):
            return Inline(stored)
        return One(lane, self._known(lane, stored) or New(stored))

    def checkpoint(
        self,
        at: Address,
        checkpoint: Checkpoint,
        metadata: dict[str, Any],
        new_versions: ChannelVersions,
        contests: bool,
        on_conflict: Literal["fork", "error"],
    ) -> PlannedPut:
        """Plan a checkpoint whose parent is at an address.

        Args:
            at: The address of the parent.
            checkpoint: As langgraph made it.
            metadata: To be stored with it.
            new_versions: The channels that changed since the parent.
            contests: Whether the parent has to be the head still; else `on_conflict` holds.
            on_conflict: Whether a checkpoint that lost becomes a fork or an error.

        Raises:
            Unstorable: A value cannot be stored.
            ForbiddenType: A value could not be read back.
        """
        versions = checkpoint["channel_versions"]
        recent = self.thread.recent if self.thread else {}
        parent = recent.get((at.checkpoint_ns, at.checkpoint_id or ""))
        nodes: dict[str, Node | None] = {}
        for channel, value in checkpoint["channel_values"].items():
            if (
                not self.alone
                and at.checkpoint_id is not None
                and channel not in new_versions
                and channel in versions
                and (parent is None or parent.holds(channel, versions[channel]))
            ):
                nodes[channel] = None  # as in the parent; else the writer says `Stale`
                continue
            hint = parent.ranges.get(channel) if parent is not None else None
            path = f"channel_values[{channel!r}]"
            nodes[channel] = self.plan(
                channel, value, path, hint=hint[1] if hint else None, held=True
            )
        other = {k: v for k, v in checkpoint.items() if k not in _OWN_FIELDS}
        fields = [
            self.codec.encode(other, lambda: "checkpoint"),
            self.codec.encode(metadata, lambda: "metadata"),
        ]
        return PlannedPut(
            at.thread_id,
            at.checkpoint_ns,
            checkpoint["id"],
            at.checkpoint_id,
            fields,
            metadata,
            dict(versions),
            {node: dict(seen) for node, seen in checkpoint["versions_seen"].items()},
            nodes,
            self._state(),
            contests,
            on_conflict,
        )

    def writes(
        self,
        at: Address,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
        replace: bool,
    ) -> PlannedWrites:
        """Plan what a task wrote.

        Raises:
            Unstorable: A value cannot be stored.
            ForbiddenType: A value could not be read back.
        """
        planned = [
            (
                WRITES_IDX_MAP.get(channel, i),
                channel,
                self.plan(channel, value, f"the write to {channel!r}"),
            )
            for i, (channel, value) in enumerate(writes)
        ]
        return PlannedWrites(
            at.thread_id,
            at.checkpoint_ns,
            at.checkpoint_id or "",
            task_id,
            task_path,
            planned,
            replace,
            self._state(),
        )

    def _state(self) -> tuple[int, int] | None:
        return (self.thread.key, self.thread.swept) if self.thread else None

    def _will_change(self, name: str, value: Any) -> bool:
        """Whether a channel's reducer is likely to make something else of an update.

        In the channel's log it would never be part of the channel, and leave a gap.
        """
        parts = value if type(value) is list else [value]
        if all(map(_final, parts)):
            return False
        if any(map(_like_a_message, parts)):
            return True
        lane = self.thread.lane_named(name) if self.thread else None
        return (
            lane.holds_messages()
            if lane and lane.items
            else any(type(part) is str for part in parts)
        )

    def _small(self, value: list[Any] | dict[Any, Any], path: str) -> bool:
        """Whether a list or dict is too small to be worth splitting."""
        if len(value) > INLINE_BYTES:
            return False
        parts: Sequence[Any] = value if isinstance(value, list) else list(value.values())
        if any(isinstance(part, BaseMessage) for part in parts):
            return False
        return len(self.codec.encode(value, lambda: path)) <= INLINE_BYTES

    def _known(self, lane: str, stored: bytes) -> Range | None:
        found = self.thread.lane_named(lane) if self.thread else None
        position = found.find(stored) if found else None
        return None if position is None else (position, position + 1)

    def _match(
        self, name: str, values: list[Any], hint: Ranges | None, path: str
    ) -> list[New | Range]:
        lane = self.thread.lane_named(name) if self.thread else None
        if lane is None:
            return [New(self._element(v, path, i)) for i, v in enumerate(values)]
        parts: list[New | Range] = []
        i = 0
        for start, stop in pieces(hint or []):
            part = values[i : i + stop - start]
            # the first tells most lists that were cut apart from those that were not
            if not part or lane.items.get(start) != self._element(part[0], path, i):
                break
            if not lane.same(part, start, self.codec):
                break
            parts.append((start, start + len(part)))
            i += len(part)
        while i < len(values):
            stored = self._element(values[i], path, i)
            position = lane.find(stored)
            i += 1
            if position is None:
                parts.append(New(stored))
            else:
                length = 1 + self._run(lane, values, i, position + 1, path)
                parts.append((position, position + length))
                i += length - 1
        return parts

    def _element(self, value: Any, path: str, i: int) -> bytes:
        """An element of a list as stored; within one the serializer makes bytearrays bytes."""
        if type(value) is bytearray:
            value = bytes(value)
        return self.codec.encode(value, lambda: f"{path}[{i}]")

    def _run(self, lane: Lane, values: list[Any], i: int, start: int, path: str) -> int:
        """How many values from `i` on stand in the lane from `start` on."""
        length = 0
        for first, stop in pieces([(start, start + len(values) - i)]):
            part = values[i + length : i + length + stop - first]
            if lane.known(first, stop) and lane.same(part, first, self.codec):
                length += len(part)
                continue
            for position, value in enumerate(part, first):
                if lane.items.get(position) != self._element(value, path, i + length):
                    return length
                length += 1
        return length


def known_ranges(node: Node) -> Iterator[tuple[str, Range]]:
    """Every range of a plan that was taken to be stored, with its lane."""
    match node:
        case One(lane, tuple() as item):
            yield lane, item
        case Many(_, lane, parts):
            for part in parts:
                if not isinstance(part, New):
                    yield lane, part
        case Map(entries):
            for inner in entries.values():
                yield from known_ranges(inner)


def _final(part: Any) -> bool:
    """Whether a message is as its channel will hold it: `add_messages` gives ids and removes."""
    return isinstance(part, BaseMessage) and part.id is not None and type(part) is not RemoveMessage


def _like_a_message(part: Any) -> bool:
    """Whether `add_messages` takes it for a message, among the things that are none."""
    if type(part) is dict:
        return "content" in part and ("role" in part or "type" in part)
    return isinstance(part, BaseMessage) or (
        type(part) in (tuple, list) and len(part) == 2 and type(part[0]) is str
    )


def _is_input(value: Any) -> bool:
    return type(value) is dict and 0 < len(value) <= 32 and all(type(k) is str for k in value)


def _splittable(value: list[Any] | dict[Any, Any]) -> bool:
    """Whether a list or dict has parts worth their own place; numbers (an embedding) have not."""
    if type(value) is dict:
        return bool(value) and all(type(key) in (str, int) for key in value)
    return any(type(part) not in _NUMBERS for part in value)

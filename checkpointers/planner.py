"""The plan of a put: which parts of a checkpoint's values are in the log, and which are new.

langgraph says which channels a step wrote to; the others are as in the parent. In those that were
written to equality is decided by content alone: nothing is trusted for being the same object, so
one that was changed in place is stored again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from types import NoneType
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import WRITES_IDX_MAP, ChannelVersions, Checkpoint
from langgraph.checkpoint.serde.types import ERROR

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import ChannelLog, Snapshot, Thread, Write, log_at_hand
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

_log = logging.getLogger("perdure")

START: Final = "__start__"  # langgraph's input channel: a dict of other channels' updates
INLINE_BYTES: Final = 128  # up to here a value stands in the checkpoint itself
_LONG: Final = 8  # elements of an update from which on it is worth a look at the log
_OWN_FIELDS: Final = {"id", "channel_values", "channel_versions", "versions_seen"}
_NUMBERS: Final = {int, float, bool, NoneType}
_KEYS: Final = frozenset({str, int})


class New(NamedTuple):
    """An item that is not known to be stored: its stored form and its full form."""

    stored: bytes
    full: bytes


class Split(NamedTuple):
    """A value stored as items of its channel's log: one item, or those of a list or dict, in order.

    The first `kept` parts are those with which the parent's value begins.
    """

    kind: int
    parts: list[New | Range]
    kept: int


Node = Split | bytes | list[Any]  # the last two are references that need no log


@dataclass(slots=True)
class PlannedPut:
    """A checkpoint to put. A channel whose node is None is as it is in the parent.

    Attributes:
        at: The address of its parent.
        snapshot: What of it needs no log.
        deliberate: Whether its parent was read by its id: to go on from just there.
        rests_on: Key and generation of the thread that the plan rests on, if it rests on one.
    """

    at: Address
    snapshot: Snapshot
    metadata: dict[str, Any]
    nodes: dict[str, Node | None]
    deliberate: bool
    rests_on: tuple[int, int] | None


@dataclass(slots=True)
class PlannedWrites:
    """What a task wrote at the checkpoint of an address; `rests_on`: see `PlannedPut`."""

    at: Address
    task: str
    path: str
    writes: list[Write]
    rests_on: tuple[int, int] | None


@dataclass(slots=True)
class Planner:
    """Plans values against what is kept of their thread.

    Args:
        codec: Encodes values.
        thread: What is kept of it.
        alone: Whether the plan has to stand by itself, because what it would rest on is gone.
    """

    codec: Codec
    thread: Thread | None
    alone: bool = False

    def checkpoint(
        self,
        at: Address,
        checkpoint: Checkpoint,
        metadata: dict[str, Any],
        new_versions: ChannelVersions,
        *,
        deliberate: bool = False,
    ) -> PlannedPut:
        """Plan a checkpoint whose parent is at an address; `new_versions`: what changed since.

        Raises:
            Unstorable: A value cannot be stored.
        """
        versions = checkpoint["channel_versions"]
        parent = None
        if self.thread is not None and at.checkpoint_id is not None:
            parent = self.thread.recent.get((at.checkpoint_ns, at.checkpoint_id))
        nodes: dict[str, Node | None] = {}
        for channel, value in checkpoint["channel_values"].items():
            if (
                channel not in new_versions
                and not self.alone
                and at.checkpoint_id is not None
                and channel in versions
                and (parent is None or parent.holds(channel, versions[channel]))
            ):
                nodes[channel] = None  # as in the parent; else the writer says `Stale`
            else:
                nodes[channel] = self._held(channel, value, parent)
        encode = self.codec.encode
        other = {k: v for k, v in checkpoint.items() if k not in _OWN_FIELDS}
        ids = encode(metadata, lambda: "metadata", exact=True)  # some of it is users' and threads'
        fields = [encode(other, lambda: "checkpoint"), ids]
        seen = {node: dict(seen) for node, seen in checkpoint["versions_seen"].items()}
        uid, step = checkpoint["id"], metadata.get("step")
        snapshot = Snapshot(uid, 0, at.checkpoint_id, 0, fields, dict(versions), seen)
        snapshot.step = step if type(step) is int else None
        self._note_replaced(at)
        return PlannedPut(at, snapshot, metadata, nodes, deliberate, self._rests_on())

    def writes(
        self, at: Address, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> PlannedWrites:
        """Plan what a task wrote.

        Raises:
            Unstorable: A value cannot be stored.
        """
        planned: dict[int, Write] = {}
        for i, (channel, value) in enumerate(writes):
            index = WRITES_IDX_MAP.get(channel, i)
            if channel == ERROR and isinstance(value, BaseException):
                value = repr(value)  # as langgraph's savers store what a task raised
            ref = self._here(channel, value, f"the write to {channel!r}")
            planned[index] = [index, channel, ref]
        self._note_replaced(at)
        return PlannedWrites(at, task_id, task_path, list(planned.values()), self._rests_on())

    def _note_replaced(self, at: Address) -> None:
        """Log, once for each codec, that a text is not stored as it is."""
        if self.codec.replaced_in and not self.codec.replacement_noted:
            self.codec.replacement_noted = True
            _log.warning(
                "%s of thread %r holds a lone surrogate (half of a character, as of a cut emoji), "
                "which is no Unicode text; '?' is stored in its place. Logged once",
                *(self.codec.replaced_in, at.thread_id),
            )

    def _rests_on(self) -> tuple[int, int] | None:
        return (self.thread.key, self.thread.generation) if self.thread is not None else None

    # -- values that stand where they are

    def _here(self, channel: str, value: Any, path: str, *, nested: bool = False) -> Any:
        """A reference to a value that no channel holds: its parts stand in it.

        Of a long list, like the messages that a subgraph is given or gives back, the parts that the
        channel's log has are named by their ranges.
        """
        if not _splittable(value):
            return self.codec.encode(value, lambda: path)
        split = type(value) is dict and not nested and len(value) <= 32
        if split and any(map(_has_parts, value.values())):
            entries = {}
            for key, part in value.items():
                name = str(key) if channel == START else channel  # an input is by channel
                entries[key] = self._here(name, part, f"{path}[{key!r}]", nested=True)
            return [MAP, entries]
        kind = DICT_HERE if type(value) is dict else LIST_HERE
        elements, full = self._elements(value, path)
        log = log_at_hand(self.thread, channel)
        if log.items and len(elements) >= _LONG:
            found = self._match(kind, log, elements, full, [], path).parts
            return [kind, [_element(log, part) for part in found]]
        pairs = zip(elements, full, strict=True)
        stored = [[*self.codec.stored(element, each, lambda: path)][-1] for element, each in pairs]
        if sum(map(len, stored)) > INLINE_BYTES or any(map(_is_message, elements)):
            return [kind, stored]
        return self.codec.encode(value, lambda: path)

    def _elements(self, value: Any, path: str) -> tuple[list[Any], list[bytes]]:
        """The elements of a list, or the pairs of a dict, and their full forms."""
        elements = [[*pair] for pair in value.items()] if type(value) is dict else value
        try:
            return elements, self.codec.full(elements, lambda i: f"{path}[{i}]")
        except Unstorable:
            if type(value) is dict:
                self.codec.encode(value, lambda: path)  # names its parts by their keys
            raise

    # -- values that a channel holds

    def _held(self, channel: str, value: Any, parent: Snapshot | None) -> Node:
        path = f"channel_values[{channel!r}]"
        if channel.startswith("__"):  # tasks and inputs on their way are no history
            here: Node = self._here(channel, value, path)
            return here
        log = log_at_hand(self.thread, channel)
        if _splittable(value):
            hint = parent.ranges.get(channel, (0, []))[1] if parent is not None else []
            kind = DICT if type(value) is dict else LIST
            return self._match(kind, log, *self._elements(value, path), hint, path)
        stored = self.codec.encode(value, lambda: path)
        if len(stored) <= INLINE_BYTES and not _is_message(value):
            return stored
        (full,) = self.codec.expanded([stored])
        position = log.find(full)
        part = New(stored, full) if position is None else (position, position + 1)
        return Split(ITEM, [part], 0)

    def _match(
        self,
        kind: int,
        log: ChannelLog,
        values: list[Any],
        full: list[bytes],
        hint: Ranges,
        path: str,
    ) -> Split:
        """Elements, given with their full forms, as ranges of the log, as far as it has them.

        `hint` is where the parent's value stands, likely to be much the same.
        """
        parts: list[New | Range] = []
        i = 0
        for start, stop in hint:
            same = log.has(start, stop) and full[i : i + stop - start] == log.full([(start, stop)])
            if not same:
                break
            parts.append((start, stop))
            i += stop - start
        kept = len(parts)
        here = _positions(log, hint[kept:]) if i < len(values) else {}
        while i < len(values):
            position = here.get(full[i])
            if position is None:
                position = log.find(full[i])
            if position is None:
                item = self._item(log, values[i], full[i], f"{path}[{i}]")
                if isinstance(item, New):
                    parts.append(item)
                    i += 1
                    continue
                position = item
            at = log.items.get if position < ALIASES else log.get
            following = map(at, range(position + 1, position + len(full) - i))
            run = 1 + sum(takewhile(bool, map(eq, following, full[i + 1 :])))
            parts.append((position, position + run))
            i += run
        return Split(kind, parts, kept)

    def _item(self, log: ChannelLog, value: Any, full: bytes, path: str) -> New | int:
        """An item, or the position of one that comes back as the value does."""
        for stored in self.codec.stored(value, full, lambda: path):
            (full,) = self.codec.expanded([stored])
            position = log.find(full)
            if position is not None:
                return position
        return New(stored, full)


def _element(log: ChannelLog, part: New | Range) -> Any:
    """A part of a list as it stands in a reference."""
    return part.stored if isinstance(part, New) else [log.key, part[0], part[1] - part[0]]


def _positions(log: ChannelLog, ranges: Ranges) -> dict[bytes, int]:
    """The positions of the items of ranges, by content."""
    out: dict[bytes, int] = {}
    for position in positions(ranges):
        full = log.get(position)
        if full is not None:
            out.setdefault(full, position)
    return out


def _is_message(value: Any) -> bool:
    return isinstance(value, BaseMessage)


def _packs(keys: list[Any]) -> bool:
    try:
        pack(keys)
    except TypeError:  # a lone surrogate, or a number out of range: refused with the whole value
        return False
    return True


def _has_parts(value: Any) -> bool:
    return type(value) in (list, dict) or _is_message(value)


def _splittable(value: Any) -> bool:
    """Whether a value has parts worth their own place; numbers (an embedding) have not."""
    if type(value) is dict:
        return bool(value) and _KEYS.issuperset(map(type, value)) and _packs([*value])
    return type(value) is list and any(type(part) not in _NUMBERS for part in value)

"""Items of langgraph's `DeltaChannel`, whose value langgraph replays from the writes of tasks.

langgraph stores the value of such a channel only now and then, as a snapshot. When a checkpoint is
put without one, the values that the tasks of its parent wrote become items of the channel's log and
join the transcript. For messages, the ranges of the channel's value are derived as well: their ids,
`RemoveMessage` and `REMOVE_ALL_MESSAGES` are followed. With any other reducer the value is unknown
until the next snapshot, since a reducer is code of the graph, which a saver cannot call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage, RemoveMessage, convert_to_messages

from perdure.checkpointers.cache import ChannelLog, Pending
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.manifest import DICT, LIST, Range, Ranges, joined, positions

COUNTERS: Final = "counters_since_delta_snapshot"
"""Metadata: the `DeltaChannel`s of a graph whose values at a checkpoint are no snapshots."""
_REMOVE_ALL: Final = "__remove_all__"  # langgraph.graph.message.REMOVE_ALL_MESSAGES
_OVERWRITE: Final = "__overwrite__"  # the JSON form of langgraph's `Overwrite`
_PAIR_KEYS: Final = frozenset({str, int})
_NUMBERS: Final = frozenset({int, float, bool})


class Entry(NamedTuple):
    """One change that a write makes to the value of a channel.

    Attributes:
        item: The bytes of an item that is added; None if the entry removes something.
        message_id: The id of the message that is added, replaced or removed.
        message: The message that is added.
        clears: Whether everything before this entry is removed.
        is_new: Whether the item is added although the log may have an equal one: a message without
            an id that is written twice was said twice. After everything was removed, it is taken
            for one that is put back.
    """

    item: bytes | None = None
    message_id: str | None = None
    message: BaseMessage | None = None
    clears: bool = False
    is_new: bool = False


@dataclass(slots=True)
class ChannelUpdate:
    """The writes of one superstep to a channel.

    Attributes:
        kind: DICT if the items are `[key, value]` pairs, otherwise LIST.
        entries: The changes, in the order in which langgraph applies them.
        is_messages: Whether all items are messages.
        base: The ranges of the parent's value; None if the value is unknown.
        places: The positions in `base` of the messages that have an id of `entries`.
        repeated: Items that are left out of the transcript, as they repeat a message of it.
    """

    kind: int
    entries: list[Entry]
    is_messages: bool
    base: Ranges | None
    places: Mapping[str, int] = field(default_factory=dict)
    repeated: frozenset[bytes] = frozenset()

    @property
    def clears(self) -> bool:
        """Whether an entry removes everything before it."""
        return any(entry.clears for entry in self.entries)

    def parts(self, log: ChannelLog) -> list[bytes | Range]:
        """Return the added items that the log does not have, and the ranges of the others."""
        parts: list[bytes | Range] = []
        for entry in self.entries:
            if entry.item is not None:
                position = None if entry.is_new else log.find(entry.item)
                parts.append(entry.item if position is None else (position, position + 1))
        return parts

    def value_ranges(self, added: Sequence[int | None]) -> Ranges:
        """Return the ranges of the value after the update.

        Args:
            added: For each entry, the position of the item that it adds, or None.
        """
        base = self.base or []
        ids = [entry.message_id for entry in self.entries if entry.message_id is not None]
        if not self.places and None not in added and len({*ids}) == len(ids):
            return joined([*base, *((p, p + 1) for p in added if p is not None)])
        value: list[int | None] = [*positions(base)]
        order = {position: number for number, position in enumerate(value)}
        numbers = {uid: order[position] for uid, position in self.places.items()}
        for entry, position in zip(self.entries, added, strict=True):
            if entry.clears:
                value, numbers = [], {}
            elif position is None:
                number = numbers.pop(entry.message_id or "", None)
                if number is not None:
                    value[number] = None
            elif entry.message_id in numbers:
                value[numbers[entry.message_id]] = position
            else:
                if entry.message_id is not None:
                    numbers[entry.message_id] = len(value)
                value.append(position)
        return joined((p, p + 1) for p in value if p is not None)


@dataclass(slots=True)
class DeltaWrites:
    """What a put takes from the pending writes of its parent.

    Attributes:
        updates: The update of each `DeltaChannel` that has no snapshot.
        pending: The writes by task, which may refer to the log after the put.
        size: The bytes in the rows of `pending` and 1 for each row; see the statement
            `advance_replayed`. None: no writes were read.
        repeated: For channels with a snapshot, the items in it that repeat a message of the
            transcript in another form.
    """

    updates: dict[str, ChannelUpdate] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    size: int | None = None
    repeated: dict[str, frozenset[bytes]] = field(default_factory=dict)


def plan_update(
    codec: Codec,
    channel: str,
    values: Sequence[Any],
    base: Ranges | None,
    has_messages: bool | None,
) -> ChannelUpdate:
    """Return the update that the values written to a channel make.

    Args:
        codec: Encodes the items.
        channel: The channel. If it is "messages", whatever converts to messages is messages.
        values: The values, in the order in which langgraph applies them.
        base: The ranges of the parent's value; None if the value is unknown.
        has_messages: Whether the channel had messages before; None if it had nothing.
    """
    writes = [_opened(value) for value in values]
    parts = [part for _, _, write in writes for part in write]
    if has_messages is not False and (
        has_messages
        or channel == "messages"
        or any(isinstance(part, BaseMessage) for part in parts)
    ):
        converted = [_messages_of(write) for _, _, write in writes]
        if None not in converted:
            made = _message_entries(codec, channel, writes, converted)
            return ChannelUpdate(LIST, made, True, base)
    entries, kind = list[Entry](), LIST
    for overwrites, value, write in writes:
        if overwrites:
            entries.append(Entry(clears=True))
        items = [part for part in write if not isinstance(part, RemoveMessage)]
        if type(value) is dict:
            kind = DICT
            items = pairs_of(value) or items
        entries += map(Entry, _encoded(codec, channel, items))
    return ChannelUpdate(kind, entries, False, None)


def pairs_of(value: dict[Any, Any]) -> list[Any]:
    """Return the pairs of a dict, or nothing if a key would not come back as it is."""
    return [[*pair] for pair in value.items()] if _PAIR_KEYS.issuperset(map(type, value)) else []


def _opened(value: Any) -> tuple[bool, Any, list[Any]]:
    """Return whether a written value is an `Overwrite`, the value in it, and its elements."""
    overwrites = False
    if type(value) is dict and value.keys() == {_OVERWRITE}:
        overwrites, value = True, value[_OVERWRITE]
    elif type(value).__name__ == "Overwrite" and type(value).__module__ == "langgraph.types":
        overwrites, value = True, value.value
    if type(value) is list and not (value and _NUMBERS.issuperset(map(type, value))):
        return overwrites, value, value
    return overwrites, value, [] if value is None else [value]


def _messages_of(write: list[Any]) -> list[BaseMessage] | None:
    """Return the messages that reducers of messages make of a write; None if they are none."""
    try:
        return convert_to_messages(write)
    except Exception:  # langchain-core raises many kinds for what is no message
        return None


def _message_entries(
    codec: Codec, channel: str, writes: Sequence[Any], converted: Sequence[Any]
) -> list[Entry]:
    """Return the entries of written messages."""
    entries, is_cleared = list[Entry](), False
    for (overwrites, _, _), messages in zip(writes, converted, strict=True):
        if overwrites:
            entries.append(Entry(clears=True))
            is_cleared = True
        added = [message for message in messages if not isinstance(message, RemoveMessage)]
        items = iter(_encoded(codec, channel, added))
        for message in messages:
            uid = message.id or None
            if not isinstance(message, RemoveMessage):
                is_new = uid is None and not is_cleared
                entries.append(Entry(next(items), uid, message, is_new=is_new))
            elif uid == _REMOVE_ALL:
                entries.append(Entry(clears=True))
                is_cleared = True
            else:
                entries.append(Entry(message_id=uid))
    return entries


def _encoded(codec: Codec, channel: str, values: Sequence[Any]) -> list[bytes]:
    """Return the bytes that the log of a channel stores for each value."""
    path = partial("the write to {!r}, element {}".format, channel)
    full = codec.full(values, path)
    return [
        codec.stored(value, data, partial(path, i))
        for i, (value, data) in enumerate(zip(values, full, strict=True))
    ]


def message_ids(codec: Codec, log: ChannelLog, ranges: Ranges) -> dict[str, int]:
    """Return the positions of the messages of ranges, by their ids; all items must be at hand."""
    places = [*positions(ranges)]
    unread = [place for place in places if place not in log.ids]
    if unread:
        items = codec.values([log.full([(place, place + 1)])[0] for place in unread])
        log.ids.update(
            (place, getattr(item, "id", None)) for place, item in zip(unread, items, strict=True)
        )
    return {uid: place for place in places if (uid := log.ids[place]) is not None}


def says(message: BaseMessage) -> tuple[str, str]:
    """Return what a message says, whatever its id, its metadata, and whether it is a chunk."""
    kind = message.type.removesuffix("MessageChunk").lower()
    return kind, repr((message.content, getattr(message, "tool_calls", [])))


def find_put_back(update: ChannelUpdate, said: Sequence[Any]) -> frozenset[bytes]:
    """Find the items that put back, with an id, a message that was written without one.

    A node that removes all messages and returns some of them again gives ids to those that had
    none.

    Args:
        update: The update of a channel of messages.
        said: The messages of the transcript before the update.
    """
    transcript, is_cleared, found = Transcript(), False, set[bytes]()
    for message in said:
        if isinstance(message, BaseMessage) and not message.id:
            transcript.add(message)
    for entry in update.entries:
        is_cleared = is_cleared or entry.clears
        if entry.item is None:
            continue
        if entry.message_id and is_cleared and transcript.take(entry.message) is not None:
            found.add(entry.item)
        elif not entry.message_id and not is_cleared:
            transcript.add(entry.message)
    return frozenset(found)


class Transcript:
    """The messages of a transcript, to find those that another list repeats in another form.

    A reducer may make a message of a chunk, and give an id to a message that was written without
    one. Such a message says the same and has the same id, or only one of the two has an id.
    """

    def __init__(self, messages: Sequence[Any] = ()) -> None:
        self._said: dict[tuple[str, str], list[tuple[int, str | None]]] = {}
        self._count = 0
        for message in messages:
            self.add(message)

    def add(self, message: Any) -> None:
        """Add a message. What is none is only counted."""
        if isinstance(message, BaseMessage):
            known = self._said.setdefault(says(message), [])
            known.append((self._count, message.id or None))
        self._count += 1

    def take(self, message: Any) -> int | None:
        """Return the number of the message that this one repeats, which is taken only once."""
        known = self._said.get(says(message), []) if isinstance(message, BaseMessage) else []
        for entry in known:
            if entry[1] == (message.id or None) or None in (entry[1], message.id or None):
                known.remove(entry)
                return entry[0]
        return None

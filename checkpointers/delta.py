"""Compute which log items make up the value of a `DeltaChannel`.

langgraph stores a snapshot of a `DeltaChannel`'s value only in some checkpoints, and otherwise
recomputes the value by replaying task writes. A checkpoint can lack the snapshot of a
`DeltaChannel` even if the channel has changed. If a checkpoint lacks a snapshot of a channel,
perdure collects the values that tasks have written to the channel since the parent checkpoint, and
appends them to the channel's log and transcript. If the channel contains only messages, perdure
computes which log items make up its value. Message ids, `RemoveMessage` and `REMOVE_ALL_MESSAGES`
are handled in the same way as in langgraph. If the channel contains anything other than messages,
its value is unknown until the next snapshot, because only the graph's reducer can compute the value
and a checkpointer cannot call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage, RemoveMessage, convert_to_messages

from perdure.checkpointers.cache import ChannelLog, PendingTask
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.manifest import (
    DICT,
    LIST,
    Range,
    Ranges,
    iter_positions,
    join_adjacent_ranges,
)

COUNTERS: Final = "counters_since_delta_snapshot"
"""langgraph's metadata key for a dict of counters.

The dict maps the name of each `DeltaChannel` for which the checkpoint stores no snapshot to the
numbers of updates and supersteps since the channel's last snapshot. perdure uses only the names.
"""
# The value of langgraph's constant `langgraph.graph.message.REMOVE_ALL_MESSAGES`.
_REMOVE_ALL: Final = "__remove_all__"
# Key of the single-entry dict that represents langgraph's `Overwrite` in JSON.
_OVERWRITE: Final = "__overwrite__"
# Key types that allow a dict to be split into `[key, value]` pairs. A dict with keys of any other
# type is stored as one item.
_PAIR_KEYS: Final = frozenset({str, int})
# The types that count as numbers. When a list of numbers, such as an embedding vector, is written
# to a `DeltaChannel`, the whole list becomes one log item. Other lists are split into one log item
# per element.
_NUMBERS: Final = frozenset({int, float, bool})


class ChannelChange(NamedTuple):
    """One change that a write makes to a channel's value, such as adding or removing an item.

    Attributes:
        item: The bytes of an added item, or None if the change removes something.
        message_id: The id of the message that is added, replaced or removed, or None if it has no
            id or the item is no message.
        message: The message that is added, or None.
        clears: Whether the change removes everything before it.
        is_new: Whether to add the item to the log even if the log contains an equal item. True only
            for messages without an id that are not preceded by a clearing change. A write that
            repeats such a message adds another one. After a clearing change, an equal message in
            the log is taken to be the same message, which the write restores.
    """

    item: bytes | None = None
    message_id: str | None = None
    message: BaseMessage | None = None
    clears: bool = False
    is_new: bool = False


class _UnwrappedWrite(NamedTuple):
    """A value that a task wrote to a channel, without the `Overwrite` wrapper if it had one.

    Attributes:
        is_overwrite: Whether the written value was an `Overwrite`.
        value: The unwrapped value.
        elements: If the value is a list, its elements. If the value is a list of numbers or not a
            list, a list with the value as its only element. If the value is None, an empty list.
    """

    is_overwrite: bool
    value: Any
    elements: list[Any]


@dataclass(slots=True)
class ChannelUpdate:
    """The changes that one superstep makes to a channel's value.

    Attributes:
        kind: DICT if the items are `[key, value]` pairs, otherwise LIST.
        changes: The changes, in the order in which langgraph applies them.
        is_messages: Whether all items are messages.
        parent_ranges: The ranges of the parent's value, or None if that value is unknown.
        positions_by_id: Maps the id of each message that is in both `parent_ranges` and `changes`
            to its log position.
        repeated: Items that are not added to the transcript, because the transcript contains the
            same message in another encoding.
    """

    kind: int
    changes: list[ChannelChange]
    is_messages: bool
    parent_ranges: Ranges | None
    positions_by_id: Mapping[str, int] = field(default_factory=dict)
    repeated: frozenset[bytes] = frozenset()

    @property
    def clears(self) -> bool:
        """True if the update removes all earlier items of the channel."""
        return any(change.clears for change in self.changes)

    def list_added_items_as_bytes_or_log_range(self, log: ChannelLog) -> list[bytes | Range]:
        """Return the added items in order, each as bytes or as a range of log positions.

        For an item that the log already contains, the range `(position, position + 1)` is returned.
        Items that are not yet in the log are returned as bytes.
        """
        parts: list[bytes | Range] = []
        for change in self.changes:
            if change.item is not None:
                position = None if change.is_new else log.find_item_position(change.item)
                parts.append(change.item if position is None else (position, position + 1))
        return parts

    def compute_log_ranges_of_updated_value(
        self, added_log_positions: Sequence[int | None]
    ) -> Ranges:
        """Return the ranges of log positions that hold the channel's value after this update.

        Args:
            added_log_positions: For each change, the log position of the item that the change
                adds, or None if it adds nothing.
        """
        base = self.parent_ranges or []
        ids = [change.message_id for change in self.changes if change.message_id is not None]
        # If the changes only add messages, and if the ids of these messages are distinct and do not
        # occur in the parent's value, the new value consists of the parent's items followed by the
        # added items.
        if not self.positions_by_id and None not in added_log_positions and len({*ids}) == len(ids):
            return join_adjacent_ranges(
                [*base, *((p, p + 1) for p in added_log_positions if p is not None)]
            )
        value: list[int | None] = [*iter_positions(base)]
        index_by_position = {position: index for index, position in enumerate(value)}
        index_by_id = {
            message_id: index_by_position[position]
            for message_id, position in self.positions_by_id.items()
        }
        for change, position in zip(self.changes, added_log_positions, strict=True):
            if change.clears:
                value, index_by_id = [], {}
            elif position is None:
                removed_index = index_by_id.pop(change.message_id or "", None)
                if removed_index is not None:
                    value[removed_index] = None
            elif change.message_id in index_by_id:
                value[index_by_id[change.message_id]] = position
            else:
                if change.message_id is not None:
                    index_by_id[change.message_id] = len(value)
                value.append(position)
        return join_adjacent_ranges((p, p + 1) for p in value if p is not None)


@dataclass(slots=True)
class DeltaChannelWrites:
    """`DeltaChannel` updates that were computed from a parent checkpoint's pending writes.

    Attributes:
        updates: The update of each `DeltaChannel` without a snapshot, by channel.
        pending_writes: The writes of each task, by task id. The transaction that stores the new
            checkpoint replaces their values with log references where it can.
        size_bytes: The number of bytes in the bodies of the rows of `pending_writes`, plus 1 for
            each row, so that a row with an empty body counts too. The statement
            `advance_replayed_thread` compares the number with the stored rows, to detect writes
            that were added meanwhile. None if no writes were read.
        repeated_items: For each channel with a snapshot, the items of the snapshot that repeat a
            message of the transcript in another form.
    """

    updates: dict[str, ChannelUpdate] = field(default_factory=dict)
    pending_writes: dict[str, PendingTask] = field(default_factory=dict)
    size_bytes: int | None = None
    repeated_items: dict[str, frozenset[bytes]] = field(default_factory=dict)


def build_delta_channel_update(
    codec: Codec,
    channel: str,
    values: Sequence[Any],
    parent_ranges: Ranges | None,
    has_messages: bool | None,
) -> ChannelUpdate:
    """Build a `ChannelUpdate` from the values that tasks wrote to a `DeltaChannel`.

    Args:
        codec: The codec that encodes the items.
        channel: The name of the channel. In the channel "messages", every value that can be
            converted to messages is treated as messages.
        values: The written values, in the order in which langgraph applies them.
        parent_ranges: The ranges of the parent's value, or None if that value is unknown.
        has_messages: Whether the channel contained messages before; None if it was empty.
    """
    writes = [_unwrap_overwrite_and_split_elements(value) for value in values]
    parts = [part for write in writes for part in write.elements]
    if has_messages is not False and (
        has_messages
        or channel == "messages"
        or any(isinstance(part, BaseMessage) for part in parts)
    ):
        converted = [_try_converting_to_messages(write.elements) for write in writes]
        if None not in converted:
            message_changes = _build_message_changes(codec, channel, writes, converted)
            return ChannelUpdate(LIST, message_changes, True, parent_ranges)
    changes, kind = list[ChannelChange](), LIST
    for is_overwrite, value, elements in writes:
        if is_overwrite:
            changes.append(ChannelChange(clears=True))
        items = [part for part in elements if not isinstance(part, RemoveMessage)]
        if type(value) is dict:
            kind = DICT
            items = list_pairs_of_dict_with_str_or_int_keys(value) or items
        changes += map(ChannelChange, _encode_items(codec, channel, items))
    return ChannelUpdate(kind, changes, False, None)


def list_pairs_of_dict_with_str_or_int_keys(value: dict[Any, Any]) -> list[Any]:
    """Return a dict's `[key, value]` pairs.

    If any key of the dict is neither a str nor an int, an empty list is returned.
    """
    return [[*pair] for pair in value.items()] if _PAIR_KEYS.issuperset(map(type, value)) else []


def _unwrap_overwrite_and_split_elements(value: Any) -> _UnwrappedWrite:
    """Unwrap a written value if it is an `Overwrite`, and split it into its elements."""
    is_overwrite = False
    if type(value) is dict and value.keys() == {_OVERWRITE}:
        is_overwrite, value = True, value[_OVERWRITE]
    elif type(value).__name__ == "Overwrite" and type(value).__module__ == "langgraph.types":
        is_overwrite, value = True, value.value
    if type(value) is list and not (value and _NUMBERS.issuperset(map(type, value))):
        return _UnwrappedWrite(is_overwrite, value, value)
    return _UnwrappedWrite(is_overwrite, value, [] if value is None else [value])


def _try_converting_to_messages(written_elements: list[Any]) -> list[BaseMessage] | None:
    """Convert elements to messages as langgraph's reducers do, or return None if that fails."""
    try:
        return convert_to_messages(written_elements)
    # Catch all exceptions, because langchain-core raises many types of errors if a value cannot be
    # converted to a message.
    except Exception:
        return None


def _build_message_changes(
    codec: Codec, channel: str, writes: Sequence[_UnwrappedWrite], messages_by_write: Sequence[Any]
) -> list[ChannelChange]:
    """Return the changes that writes of messages make to a channel's value."""
    changes, is_cleared = list[ChannelChange](), False
    for write, messages in zip(writes, messages_by_write, strict=True):
        if write.is_overwrite:
            changes.append(ChannelChange(clears=True))
            is_cleared = True
        added = [message for message in messages if not isinstance(message, RemoveMessage)]
        items = iter(_encode_items(codec, channel, added))
        for message in messages:
            message_id = message.id or None
            if not isinstance(message, RemoveMessage):
                is_new = message_id is None and not is_cleared
                changes.append(ChannelChange(next(items), message_id, message, is_new=is_new))
            elif message_id == _REMOVE_ALL:
                changes.append(ChannelChange(clears=True))
                is_cleared = True
            else:
                changes.append(ChannelChange(message_id=message_id))
    return changes


def _encode_items(codec: Codec, channel: str, values: Sequence[Any]) -> list[bytes]:
    """Encode values as items of a channel's log."""
    path = partial("the write to {!r}, element {}".format, channel)
    encodings = codec.encode_for_comparison(values, path)
    return [
        codec.encode_for_storage(value, encoding, partial(path, i))
        for i, (value, encoding) in enumerate(zip(values, encodings, strict=True))
    ]


def find_positions_by_message_id(codec: Codec, log: ChannelLog, ranges: Ranges) -> dict[str, int]:
    """Return a dict that maps message ids to log positions, for the messages in `ranges`.

    Messages without an id are omitted. All items in the ranges must be cached in `log`.
    """
    item_positions = [*iter_positions(ranges)]
    unread_positions = [position for position in item_positions if position not in log.message_ids]
    if unread_positions:
        items = codec.decode_all(
            [log.get_items([(position, position + 1)])[0] for position in unread_positions]
        )
        log.message_ids.update(
            (position, getattr(item, "id", None))
            for position, item in zip(unread_positions, items, strict=True)
        )
    return {
        message_id: position
        for position in item_positions
        if (message_id := log.message_ids[position]) is not None
    }


def build_id_independent_message_key(message: BaseMessage) -> tuple[str, str]:
    """Return the type, the content and the tool calls of a message as a key for comparison.

    Messages that differ only in fields such as the id or metadata have equal keys. A message and a
    message chunk have equal keys if they have the same content and tool calls.
    """
    kind = message.type.removesuffix("MessageChunk").lower()
    return kind, repr((message.content, getattr(message, "tool_calls", [])))


def find_encoded_messages_that_later_got_ids(
    update: ChannelUpdate, transcript_messages: Sequence[Any]
) -> frozenset[bytes]:
    """Find messages that have an id in an update, but were added earlier without an id.

    If a node removes all messages and then re-adds some of them, langgraph assigns ids to the
    re-added messages that have none. For each message that was removed without an id and re-added
    with an id, the function returns the encoded message from the update. A message is returned only
    if the transcript, or an earlier part of the update, contains a message with the same content
    but without an id.

    Args:
        update: The update of a channel of messages.
        transcript_messages: The messages of the transcript before the update.
    """
    unmatched, is_cleared, restored = TranscriptMessageIndex(), False, set[bytes]()
    for message in transcript_messages:
        if isinstance(message, BaseMessage) and not message.id:
            unmatched.add_message(message)
    for change in update.changes:
        is_cleared = is_cleared or change.clears
        if change.item is None:
            continue
        if (
            change.message_id
            and is_cleared
            and unmatched.pop_index_of_matching_message(change.message) is not None
        ):
            restored.add(change.item)
        elif not change.message_id and not is_cleared:
            unmatched.add_message(change.message)
    return frozenset(restored)


class TranscriptMessageIndex:
    """An index for finding the message in a transcript that matches a given message.

    Two messages match if their type, content and tool calls are equal, and their ids are equal or
    one of them has no id. A message without an id matches a message with an id, because a reducer
    can assign an id to a message. A message chunk can match a message, because a reducer can
    convert a chunk to a message.
    """

    def __init__(self, messages: Sequence[Any] = ()) -> None:
        self._entries: dict[tuple[str, str], list[tuple[int, str | None]]] = {}
        self._count = 0
        for message in messages:
            self.add_message(message)

    def add_message(self, message: Any) -> None:
        """Add a message to the index.

        A message's index is the number of values that were added before the message. Values that
        are not messages are also counted, but are never returned as a match.
        """
        if isinstance(message, BaseMessage):
            entries = self._entries.setdefault(build_id_independent_message_key(message), [])
            entries.append((self._count, message.id or None))
        self._count += 1

    def pop_index_of_matching_message(self, message: Any) -> int | None:
        """Return the index of a transcript message that matches `message`, or None.

        A transcript message is removed from the index once it has been returned as a match.
        """
        candidates = (
            self._entries.get(build_id_independent_message_key(message), [])
            if isinstance(message, BaseMessage)
            else []
        )
        for entry in candidates:
            if entry[1] == (message.id or None) or None in (entry[1], message.id or None):
                candidates.remove(entry)
                return entry[0]
        return None

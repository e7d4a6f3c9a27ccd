"""Compute the updates of `DeltaChannel`s in a new checkpoint from its parent's pending writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import writes_sort_key

from perdure.checkpointers.cache import NO_TITLE, Head, PendingTask, Snapshot, Thread
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.delta import (
    ChannelUpdate,
    DeltaChannelWrites,
    TranscriptMessageIndex,
    build_delta_channel_update,
    find_encoded_messages_that_later_got_ids,
    find_positions_by_message_id,
    list_pairs_of_dict_with_str_or_int_keys,
)
from perdure.checkpointers.manifest import (
    DICT_HERE,
    LIST,
    LIST_HERE,
    MAP,
    Ranges,
    ValueReference,
    extract_value_reference_from_delta_channel_reference,
    iter_positions,
)
from perdure.checkpointers.put import (
    START_SOURCES,
    TITLE_CANDIDATES,
    CheckpointPut,
    build_title,
)
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import decode_stored_id, decrypt_writes
from perdure.checkpointers.values import DeltaSnapshot
from perdure.storage.flow import Flow, Row, get_result_if_no_request_is_needed


def find_cached_delta_channel_writes(
    reader: CheckpointReader, put: CheckpointPut, thread: Thread, head: Head, parent: Snapshot
) -> DeltaChannelWrites | None:
    """Build a new checkpoint's `DeltaChannelWrites` using only cached data.

    If the pending writes or any log items to which they refer are not cached, None is returned. A
    caller that receives None must read the pending writes and log items from the database.
    """
    rows = head.write_rows.copy() if head.write_rows is not None else None
    if rows is None and put.delta_channels:
        return None
    return get_result_if_no_request_is_needed(
        read_delta_channel_writes(reader, put, thread, head, parent, [*(rows or {}).values()])
    )


def read_delta_channel_writes(
    reader: CheckpointReader,
    put: CheckpointPut,
    thread: Thread,
    head: Head,
    parent: Snapshot,
    rows: Sequence[Row],
) -> Flow[DeltaChannelWrites]:
    """Build the updates of `DeltaChannel`s from the values that the parent's tasks wrote.

    The new checkpoint may store the full value of a channel. If the new checkpoint stores a
    channel's full value, some messages in this value may be encoded differently from their earlier
    copies in the transcript. The function also finds these messages. If an item of a channel's log
    is cached, the function uses the cached item instead of reading the item from the database. A
    run can start from an older checkpoint that still has an earlier run's pending writes. The
    earlier run's writes to a channel are ignored if the new checkpoint stores the channel's full
    value.

    Args:
        reader: The reader of items.
        put: The request to store the new checkpoint. Its `title` is set if the writes may change
            the thread's title.
        thread: The thread, to whose logs the writes may refer.
        head: The head before the put.
        parent: The parent of the checkpoint.
        rows: The rows `(checkpoint_id, task_id, task_path, body)` of all writes at the parent.
    """
    delta_writes = DeltaChannelWrites()
    is_head = head.snapshot is not None and head.snapshot.key == parent.key
    is_fork = put.metadata.get("source") in START_SOURCES and not is_head
    changed = [
        channel
        for channel in put.delta_channels
        if parent.channel_versions.get(channel) != put.channel_version(channel)
        and not (is_fork and channel in put.checkpoint["channel_values"])
    ]
    values = yield from _read_written_values_by_channel(
        reader, put, thread, rows, changed, delta_writes
    )
    for channel in changed:
        update = yield from _build_channel_update(
            reader, put, thread, parent, channel, values[channel]
        )
        delta_writes.updates[channel] = update
        if channel == "messages":
            yield from _set_title_from_first_messages(reader, put, thread, parent, update)
    for channel in put.snapshot_channels:
        repeated = yield from _find_items_repeating_transcript_messages(
            reader, put, thread, parent, channel
        )
        if repeated:
            delta_writes.repeated_items[channel] = repeated
    return delta_writes


def _read_written_values_by_channel(
    reader: CheckpointReader,
    put: CheckpointPut,
    thread: Thread,
    rows: Sequence[Row],
    channels: Sequence[str],
    delta_writes: DeltaChannelWrites,
) -> Flow[dict[str, list[Any]]]:
    """Read the values written to the given channels, in the order in which langgraph applies them.

    The function also sets the attributes `pending_writes` and `size_bytes` of `delta_writes`.
    """
    entries: list[tuple[Any, str, Any]] = []
    delta_writes.size_bytes = 0 if channels else None
    for row in rows if channels else ():
        task_id, task_path, writes = decode_stored_id(row[1]) or "", row[2], []
        for index, channel, ref in decrypt_writes(reader.seal, *put.address[:2], row):
            if channel in channels:
                value = yield from reader.read_value(put.address.thread_id, thread, ref)
                entries.append((writes_sort_key(task_path, task_id, index), channel, value))
                if isinstance(ref, bytes) or ref[0] == MAP:
                    ref = _build_reference_with_inline_elements(reader.codec, ref, value)
            writes.append([index, channel, ref])
        pending: PendingTask = (task_path, writes, row[3])
        delta_writes.pending_writes[task_id] = pending
        delta_writes.size_bytes = (delta_writes.size_bytes or 0) + 1 + len(row[3])
    entries.sort(key=lambda entry: entry[0])
    values: dict[str, list[Any]] = {channel: [] for channel in channels}
    for _, channel, value in entries:
        values[channel].append(value)
    return values


def _build_reference_with_inline_elements(
    codec: Codec, default_ref: ValueReference, value: Any
) -> ValueReference:
    """Build a reference that holds the encoded elements of a list or dict inline.

    Each element is encoded as if it were a log item. If `value` is empty or is neither a list nor a
    dict, `ref` is returned unchanged.
    """
    elements = (
        value
        if type(value) is list
        else list_pairs_of_dict_with_str_or_int_keys(value)
        if type(value) is dict
        else []
    )
    kind = DICT_HERE if type(value) is dict else LIST_HERE
    return (
        [kind, codec.encode_for_comparison(elements, "the element {}".format)]
        if elements
        else default_ref
    )


def _build_channel_update(
    reader: CheckpointReader,
    put: CheckpointPut,
    thread: Thread,
    parent: Snapshot,
    channel: str,
    values: Sequence[Any],
) -> Flow[ChannelUpdate]:
    """Build a `ChannelUpdate` from the values that one superstep wrote to a `DeltaChannel`.

    The update also depends on the channel's value in the parent checkpoint. That value is allowed
    to be unknown.
    """
    parent_ranges, has_messages = _find_log_ranges_of_parent_value(reader, parent, channel), None
    key, transcript_ranges = parent.transcript.get(channel, (0, []))
    if parent_ranges or transcript_ranges:
        # The channel is assumed to contain messages if its last item is a message.
        last = (parent_ranges or transcript_ranges)[-1][1] - 1
        [value] = yield from reader.read_and_decode_items(
            put.address.thread_id, thread, key, [(last, last + 1)]
        )
        has_messages = isinstance(value, BaseMessage)
    update = build_delta_channel_update(reader.codec, channel, values, parent_ranges, has_messages)
    if update.is_messages and parent_ranges:
        wanted_ids = {change.message_id for change in update.changes}
        log = yield from reader.load_log_items_into_cache(
            put.address.thread_id, thread, key, parent_ranges
        )
        ids = find_positions_by_message_id(reader.codec, log, parent_ranges)
        update.positions_by_id = {
            message_id: position for message_id, position in ids.items() if message_id in wanted_ids
        }
    if update.is_messages and update.clears:
        messages = yield from reader.read_and_decode_items(
            put.address.thread_id, thread, key, transcript_ranges
        )
        update.repeated = find_encoded_messages_that_later_got_ids(update, messages)
    return update


def _find_log_ranges_of_parent_value(
    reader: CheckpointReader, parent: Snapshot, channel: str
) -> Ranges | None:
    """Return the ranges of log items that make up a channel's value in the parent checkpoint.

    Return None if a non-empty value is not stored as a list of log items.
    """
    if channel not in parent.references:
        return None if channel in parent.channel_versions else []
    ref = extract_value_reference_from_delta_channel_reference(parent.references[channel])
    if isinstance(ref, bytes):
        value = reader.codec.decode(ref)
        value = value.value if type(value) is DeltaSnapshot else value
        return [] if value in ([], None) else None
    return parent.ranges[channel][1] if ref is not None and ref[0] == LIST else None


def _set_title_from_first_messages(
    reader: CheckpointReader,
    put: CheckpointPut,
    thread: Thread,
    parent: Snapshot,
    update: ChannelUpdate,
) -> Flow[None]:
    """Set `put.title` if messages in the new checkpoint could change the thread's title.

    The title of a thread is taken from the first messages of its transcript.
    """
    if put.title or put.address.checkpoint_ns:
        return
    new_ids = {change.message_id or "" for change in update.changes}
    title = thread.title
    if title is not None and title != NO_TITLE and title.message_id not in new_ids:
        return
    key, transcript = parent.transcript.get("messages", (0, []))
    first_ranges = [
        (position, position + 1)
        for position in islice(iter_positions(transcript), TITLE_CANDIDATES)
    ]
    items = list[bytes]()
    if first_ranges:
        items = (
            yield from reader.load_log_items_into_cache(
                put.address.thread_id, thread, key, first_ranges
            )
        ).get_items(first_ranges)
    items += [change.item for change in update.changes if change.item is not None]
    put.title = build_title({}, reader.codec.decode_all(items[:TITLE_CANDIDATES]))


def _find_items_repeating_transcript_messages(
    reader: CheckpointReader, put: CheckpointPut, thread: Thread, parent: Snapshot, channel: str
) -> Flow[frozenset[bytes]]:
    """Find snapshot items that are re-encoded copies of messages in the transcript.

    A message's encoding changes, for example, if a reducer assigns it an id.
    """
    key, transcript = parent.transcript.get(channel, (0, []))
    log = thread.logs_by_channel.get(channel)
    if log is None or not transcript or log.key != key:
        return frozenset()
    transcript_positions = yield from reader.read_transcript_positions(
        put.address.thread_id, thread, parent, channel
    )
    new_items: list[tuple[Any, bytes]] = []
    for value, encoded in put.iter_encoded_elements(channel):
        if log.find_item_position(encoded) not in transcript_positions:
            stored = reader.codec.encode_for_storage(value, encoded, partial("{}".format, channel))
            if log.find_item_position(stored) not in transcript_positions:
                new_items.append((value, stored))
    if not new_items:
        return frozenset()
    messages = TranscriptMessageIndex(
        (yield from reader.read_and_decode_items(put.address.thread_id, thread, key, transcript))
    )
    return frozenset(
        stored
        for value, stored in new_items
        if messages.pop_index_of_matching_message(value) is not None
    )

"""Encode checkpoints and pending writes for storage.

For each new checkpoint, LangGraph passes the names of the channels that have changed since the
parent checkpoint. Unchanged channels keep the values they have in the parent checkpoint. To find
the new items of a changed channel, its encoded items are compared with the stored items. Because
encodings are compared, not object identities, an object that was changed in place is stored again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from math import inf
from operator import eq
from types import NoneType
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import WRITES_IDX_MAP, ChannelVersions, Checkpoint
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import NO_TITLE, ChannelLog, Snapshot, Thread, Title, Write
from perdure.checkpointers.codec import Codec, ValuesAsEncoded
from perdure.checkpointers.delta import COUNTERS, ChannelUpdate, DeltaChannelWrites
from perdure.checkpointers.head_merge import Merge
from perdure.checkpointers.manifest import (
    ALIASES,
    DELTA,
    DICT,
    DICT_HERE,
    ITEM,
    LIST,
    LIST_HERE,
    MAP,
    Range,
    Ranges,
    ValueReference,
    decode_ranges,
    iter_positions,
)
from perdure.checkpointers.values import Continuation, DeltaSnapshot, pack
from perdure.errors import UnknownCheckpoint, Unstorable

START: Final = "__start__"
"""langgraph's input channel, whose value is a dict of updates for other channels."""
START_SOURCES: Final = {"input", "update", "fork"}
"""The values of `source` in the metadata of a checkpoint that starts a run."""
# Maximum encoded size, in bytes, of a value that is stored inline in its checkpoint's row.
MAX_INLINE_BYTES: Final = 128
# Minimum length of a list or dict in a pending write for its elements to be looked up in the
# channel's log. Shorter lists and dicts are stored without references to the log.
_MIN_ELEMENTS_FOR_LOG: Final = 8
_CONTAINERS: Final = {list, dict}
_NUMBERS: Final = {int, float, bool, NoneType}
_KEYS: Final = frozenset({str, int})
# Maximum length of a thread title, in characters. Longer titles are truncated.
MAX_TITLE_CHARS: Final = 80
# Number of messages at the start of a thread that are searched for a human message. If the metadata
# contains no title, the text of the first human message becomes the thread's title.
TITLE_CANDIDATES: Final = 2
TIMES_KEY: Final = "times"
"""The metadata key under which an imported checkpoint stores the times of its last messages.

The times are in seconds since 1970.
"""
# LangGraph's config key for a run's durability mode.
_DURABILITY_KEY: Final = "__pregel_durability"
_OWN_FIELDS: Final = {"id", "channel_values", "channel_versions", "versions_seen"}
"""The fields of a checkpoint that are not stored in `CheckpointPut.encoded_fields`."""


class SplitValue(NamedTuple):
    """A channel's value, split into new items and ranges of existing items in the channel's log.

    Attributes:
        kind: LIST or DICT for a list or dict, whose elements are separate items. ITEM for a value
            that is stored as a single item. DELTA for a `DeltaChannel` for which writes are stored.
        kept_ranges: The log ranges at the start of the value that are also at the start of the
            parent's value.
        parts: The rest of the value: ranges of the log, and items that were not found in the log.
        is_log_complete: Whether all items of the log were cached. If so, an item that was not found
            in the cache is not in the database either.
        is_snapshot: Whether the value is a snapshot of a `DeltaChannel`.
        repeated_items: Items of a snapshot that are not added to the transcript; see
            `DeltaChannelWrites`.
        update: The writes to a `DeltaChannel` that has no snapshot, or whose snapshot is in
            `undivided`.
        undivided: The value of a snapshot that is stored as a single value, or None.
    """

    kind: int
    kept_ranges: Ranges
    parts: list[bytes | Range]
    is_log_complete: bool
    is_snapshot: bool = False
    repeated_items: frozenset[bytes] = frozenset()
    update: ChannelUpdate | None = None
    undivided: SplitValue | bytes | None = None


ValueToStore = SplitValue | bytes | list[Any]
"""The value of a channel in a put: a `SplitValue` or a finished reference.

The new items of a `SplitValue` are appended to the channel's log. For references, see `manifest`.
"""


class EncodedValue(NamedTuple):
    """A channel's value, encoded as a whole or element by element.

    Attributes:
        kind: LIST, DICT or ITEM for a value that is stored in the log. None for a value that is
            stored in the checkpoint row.
        elements: The elements of a list, or the `[key, value]` pairs of a dict.
        encoded_elements: The encoding of each element.
        encoded: The encoding of a value that is encoded as a whole, otherwise empty.
        is_snapshot: Whether the encoded value was taken out of a snapshot of a `DeltaChannel`.
        continues_parent: Whether the elements are appended to the value of the parent; see
            `Continuation`.
    """

    kind: int | None
    elements: Sequence[Any]
    encoded_elements: list[bytes]
    encoded: bytes
    is_snapshot: bool = False
    continues_parent: bool = False


@dataclass(slots=True)
class CheckpointPut:
    """A request to store a checkpoint, with its encoded values.

    Attributes:
        address: The address of the parent checkpoint.
        checkpoint: The checkpoint as passed by langgraph.
        metadata: The metadata.
        new_versions: The versions of the channels that have changed since the parent.
        continues_chosen_checkpoint: Whether the run read the parent by its id and therefore
            continues this checkpoint on purpose.
        encoded_fields: Two encoded values: the fields of the checkpoint other than its id and its
            channels, and the metadata.
        cached_thread: The cached thread to whose log items the encoded values may refer, or None.
        title: The title that the checkpoint gives to its thread, or None.
        config: The config that was passed to `put`, which can identify the user. None if the
            request does not come from a run.
        created_at: The time in the checkpoint's `ts`, in seconds since 1970, at least 0. The time
            is infinite if the checkpoint has no valid `ts`.
        item_times: The times of items that are given in the metadata, in seconds since 1970, keyed
            by channel and encoded item.
        loaded_removal: The sequence number of the thread's latest removal record at the time the
            state was loaded. It is used only if `config` is None.
        delta_channels: The `DeltaChannel`s that have a version but no snapshot, or whose snapshot
            is stored as a single value, such as a set.
        snapshot_channels: The `DeltaChannel`s whose snapshot is a list or dict that is stored
            element by element.
        replayed: The writes of the parent's tasks to `delta_channels` and `snapshot_channels`. None
            until they have been read.
        merge: The channels that are copied from the head; see `MergePlanner`.
        run_started_at: The time at which its run started, in seconds since 1970; None if unknown.
        continues_run: Whether the parent was stored by the same run, so that both have the same run
            start time.
    """

    address: Address
    checkpoint: Checkpoint
    metadata: dict[str, Any]
    new_versions: ChannelVersions
    continues_chosen_checkpoint: bool = False
    encoded_fields: list[bytes] = field(default_factory=list)
    cached_thread: Thread | None = None
    title: Title | None = None
    config: RunnableConfig | None = None
    created_at: float = inf
    item_times: dict[tuple[str, bytes], float] = field(default_factory=dict)
    loaded_removal: int = 0
    delta_channels: Sequence[str] = ()
    snapshot_channels: Sequence[str] = ()
    replayed: DeltaChannelWrites | None = None
    merge: Merge | None = None
    run_started_at: float | None = None
    continues_run: bool = False
    _values: dict[str, Any] = field(default_factory=dict)
    _versions: dict[str, Any] = field(default_factory=dict)
    _versions_seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    _encoded: dict[str, EncodedValue] = field(default_factory=dict)
    _inline: dict[str, Any] = field(default_factory=dict)

    @property
    def is_only_checkpoint_of_run(self) -> bool:
        """Whether this checkpoint is the only one that the run stores.

        A run with durability `exit` makes a single `put` call, when it ends or is interrupted.
        """
        config = self.config or {}
        return bool(config.get("configurable", {}).get(_DURABILITY_KEY) == "exit")

    def encode_values(self, codec: Codec, cached_thread: Thread | None) -> None:
        """Encode the changed channels, the metadata, and the other fields of the checkpoint.

        The encoded values are kept in this object. The channel values are encoded as soon as
        langgraph calls `put`, because the graph may change the objects before the transaction runs.

        Args:
            codec: Encodes values.
            cached_thread: The cached thread, if there is one. Items that the logs of the cached
                thread contain are not stored again.

        Raises:
            Unstorable: A value cannot be stored.
        """
        checkpoint = self.checkpoint
        self._values = dict(checkpoint["channel_values"])
        self._versions = dict(checkpoint["channel_versions"])
        versions_seen = checkpoint["versions_seen"]
        self._versions_seen = dict(
            zip(versions_seen, map(dict, versions_seen.values()), strict=True)
        )
        self.cached_thread = cached_thread
        for channel, value in self._values.items():
            # LangGraph's internal channels, such as the task channel, have names that start with
            # "__".
            if channel.startswith("__"):
                path = f"channel_values[{channel!r}]"
                self._inline[channel] = encode_value_as_inline_reference(
                    codec, cached_thread, channel, value, path
                )
            elif channel in self.new_versions or self.address.checkpoint_id is None:
                self._encode_channel_value(codec, channel)
        # `ts` might not be a valid timestamp. Ignore the errors that parsing an invalid `ts`
        # raises.
        with suppress(TypeError, ValueError, OverflowError):
            created_at = datetime.fromisoformat(checkpoint["ts"])
            created_at = created_at.replace(tzinfo=created_at.tzinfo or UTC)
            self.created_at = max(0.0, created_at.timestamp())
        if TIMES_KEY in self.metadata and "messages" in self._encoded:
            self._record_creation_times_of_last_messages(
                self._encoded["messages"].encoded_elements, self.metadata[TIMES_KEY]
            )
        if COUNTERS in self.metadata:
            counted_channels = self.metadata[COUNTERS] or ()
            channels_without_snapshot = [
                c for c in counted_channels if c in self._versions and c not in self._values
            ]
            self.delta_channels = [*self.delta_channels, *channels_without_snapshot]
        if not self.address.checkpoint_ns:
            self.title = build_title(self.metadata, self._values.get("messages"))
        other_fields: dict[str, Any] = {**checkpoint}
        for name in _OWN_FIELDS:
            other_fields.pop(name, None)
        self.encoded_fields = [
            codec.encode(other_fields, lambda: "checkpoint"),
            # Reject lone surrogates in the metadata, because replacing them could change a user id.
            codec.encode(self.metadata, lambda: "metadata", exact=True),
        ]

    def _record_creation_times_of_last_messages(
        self, items: list[bytes], unix_times: object
    ) -> None:
        """Set `item_times` from the creation times of the latest items in the `messages` channel.

        The lists `items` and `unix_times` can have different lengths, and are aligned at the end:
        the last element of `unix_times` is the creation time of the last item. Times in the future
        are ignored.
        """
        now = time.time()
        for item, item_time in zip(
            items[::-1], unix_times[::-1] if type(unix_times) is list else (), strict=False
        ):
            if type(item_time) is float and 0 <= item_time <= now:
                self.item_times["messages", item] = item_time

    def encode_unchanged_channels(self, codec: Codec) -> None:
        """Encode unchanged channels as well, in case the stored parent lacks their values."""
        for channel in self._values.keys() - self._inline.keys():
            self._encode_channel_value(codec, channel)

    def replace_cache_references_and_messages_by_copies(
        self, thread_key: int, generation: int
    ) -> None:
        """Copy messages. If the cached thread is outdated, replace log references with the items.

        Call this method before retrying the write with current data from the database. The cached
        thread and the message objects may have changed since the values were encoded. If the cached
        thread is outdated (its key or generation differs from `thread_key` or `generation`),
        references to log items are replaced with the items themselves. Each message is replaced
        with a copy, decoded from its encoded form.
        """
        for channel, ref in self._inline.items():
            self._inline[channel] = replace_log_ranges_by_items_if_outdated(
                ref, self.cached_thread, (thread_key, generation)
            )
        for channel, value in self._encoded.items():
            self._encoded[channel] = value._replace(
                elements=ValuesAsEncoded(value.elements, value.encoded_elements)
            )

    def _encode_channel_value(self, codec: Codec, channel: str) -> EncodedValue:
        """Encode a channel's value, and return the encoded value.

        The elements of a list or dict that is stored in the log are encoded one by one, so that
        each encoded element can be compared with the items in the log.

        The value of each channel is encoded only once, when this method is first called for the
        channel.

        Raises:
            Unstorable: The value cannot be stored.
        """
        if channel in self._encoded:
            return self._encoded[channel]
        path, value = f"channel_values[{channel!r}]", self._values[channel]
        inner_value = value.value if type(value) is DeltaSnapshot else value
        is_snapshot = inner_value is not value
        if type(value) is Continuation:
            elements = _list_elements_and_encodings(codec, value.items, path)
            encoded_value = EncodedValue(LIST, *elements, b"", continues_parent=True)
        elif type(inner_value) in _CONTAINERS and _are_elements_stored_separately(inner_value):
            kind = DICT if type(inner_value) is dict else LIST
            elements = _list_elements_and_encodings(codec, inner_value, path)
            encoded_value = EncodedValue(kind, *elements, b"", is_snapshot)
        else:
            encoded = codec.encode(value, lambda: path)
            is_inline = len(encoded) <= MAX_INLINE_BYTES and not isinstance(value, BaseMessage)
            if is_snapshot and not is_inline:
                encoded = codec.encode(inner_value, lambda: path)
            encoded_value = EncodedValue(
                None if is_inline else ITEM, [], [], encoded, is_snapshot and not is_inline
            )
        self._encoded[channel] = encoded_value
        if encoded_value.is_snapshot and encoded_value.kind != ITEM:
            self.snapshot_channels = [*self.snapshot_channels, channel]
        elif is_snapshot:
            self.delta_channels = [*self.delta_channels, channel]
        return encoded_value

    def channel_version(self, channel: str) -> Any:
        """Return the version of a channel."""
        return self._versions[channel]

    def iter_encoded_elements(self, channel: str) -> Iterable[tuple[Any, bytes]]:
        """Return `(element, encoding)` pairs for a channel value that is a list or dict."""
        value = self._encoded[channel]
        return zip(value.elements, value.encoded_elements, strict=True)

    def build_channel_values_to_store(
        self, codec: Codec, logs: Mapping[str, ChannelLog], parent: Snapshot | None
    ) -> dict[str, ValueToStore | None]:
        """Convert each channel's value to its stored form: log items or encoded bytes.

        Args:
            codec: Encodes values.
            logs: The cached logs of the thread, by channel.
            parent: The parent of the checkpoint, or None.

        Returns:
            The value of each channel, by channel name. The value is None if the channel keeps the
            value of the parent.

        Raises:
            UnknownCheckpoint: A `Continuation` has no parent value that it could continue.
        """
        versions, changed = self._versions, self.new_versions
        values_to_store: dict[str, ValueToStore | None] = {}
        for channel in self._values:
            is_unchanged = channel not in changed and channel in versions
            if (
                is_unchanged
                and parent is not None
                and channel in parent.references
                and parent.channel_versions.get(channel) == versions[channel]
                and parent.references[channel][0] != DELTA
            ):
                values_to_store[channel] = None
            elif channel in self._inline:
                values_to_store[channel] = self._inline[channel]
            else:
                value = self._encoded.get(channel) or self._encode_channel_value(codec, channel)
                values_to_store[channel] = (
                    value.encoded
                    if value.kind is None
                    else self._split_value(codec, logs, parent, channel, value)
                )
        if self.replayed is not None:
            self._add_replayed_writes_to_values(self.replayed, logs, values_to_store)
        return values_to_store

    def _split_value(
        self,
        codec: Codec,
        logs: Mapping[str, ChannelLog],
        parent: Snapshot | None,
        channel: str,
        value: EncodedValue,
    ) -> SplitValue:
        """Split a value into ranges of items that are already in the log and new items.

        To find the items that the log already contains, the encoded elements are compared with the
        items in the log. The ranges of the parent's value are compared first.

        Raises:
            UnknownCheckpoint: A `Continuation` has no parent value that it could continue.
        """
        log = logs.get(channel) or ChannelLog(0, channel)
        if value.continues_parent and (parent is None or channel not in parent.ranges):
            thread_id, _, parent_id = self.address
            reason = (
                "it extends a list of the parent checkpoint, but the config names no parent"
                if parent_id is None
                else f"it extends a list that the parent checkpoint {parent_id!r} does not contain"
            )
            raise UnknownCheckpoint(
                f"the list in channel {channel!r} of thread {thread_id!r} was not stored, "
                f"because {reason}. The parent checkpoint may have been deleted; try again"
            )
        parent_ranges = parent.ranges.get(channel, (0, []))[1] if parent is not None else []
        # Check before searching the log whether all committed items are cached. After the search,
        # another OS thread could have finished loading the log, although some items had already
        # been reported as missing.
        is_log_complete = len(log.items) + log.planned_count == log.next_position
        if value.kind == ITEM:
            position = log.find_item_position(value.encoded)
            parts: list[bytes | Range] = [
                value.encoded if position is None else (position, position + 1)
            ]
            return SplitValue(ITEM, [], parts, is_log_complete, value.is_snapshot)
        kept_ranges, parts = _find_ranges_and_parts_in_log(
            codec,
            log,
            log.find_item_position,
            value.elements,
            value.encoded_elements,
            [] if value.continues_parent else parent_ranges,
            f"channel_values[{channel!r}]",
        )
        kept_ranges = parent_ranges if value.continues_parent else kept_ranges
        return SplitValue(
            value.kind or LIST, kept_ranges, parts, is_log_complete, value.is_snapshot
        )

    def _add_replayed_writes_to_values(
        self,
        replayed: DeltaChannelWrites,
        logs: Mapping[str, ChannelLog],
        values_to_store: dict[str, ValueToStore | None],
    ) -> None:
        """Add the writes of tasks to the `DeltaChannel` values in `values_to_store`.

        If the checkpoint has no snapshot of a `DeltaChannel`, the writes that tasks made since the
        parent checkpoint are added to the channel's value in `values_to_store`. If the checkpoint
        has a snapshot of a `DeltaChannel`, some messages in the snapshot may already be in the
        transcript with a different encoding. Messages that are already in the transcript are
        recorded in the value's `repeated_items` and are not added to the transcript again.
        """
        for channel, update in replayed.updates.items():
            log = logs.get(channel) or ChannelLog(0, channel)
            is_log_complete = len(log.items) + log.planned_count == log.next_position
            former_value = values_to_store.get(channel)
            parts = update.list_added_items_as_bytes_or_log_range(log)
            if isinstance(former_value, SplitValue):
                parts += former_value.parts
            elif not isinstance(former_value, bytes):
                former_value = None
            values_to_store[channel] = SplitValue(
                DELTA, [], parts, is_log_complete, update=update, undivided=former_value
            )
        for channel, repeated_items in replayed.repeated_items.items():
            value_to_store = values_to_store[channel]
            if isinstance(value_to_store, SplitValue):
                values_to_store[channel] = value_to_store._replace(repeated_items=repeated_items)

    def decode_values_other_fields_and_metadata(
        self, codec: Codec
    ) -> tuple[dict[str, Any], Any, Any]:
        """Decode a checkpoint into its channel values, its other fields and its metadata.

        If the value of a channel was passed as a `Continuation`, the returned channel value is a
        list that contains only the new items.
        """
        self.encode_unchanged_channels(codec)
        self.replace_cache_references_and_messages_by_copies(0, -1)
        values = {
            channel: decode_value_of_inline_reference(codec, ref)
            for channel, ref in self._inline.items()
        }
        for channel, encoded in self._encoded.items():
            if encoded.kind in (LIST, DICT):
                elements: Any = [*encoded.elements]
                value = dict(elements) if encoded.kind == DICT else elements
            else:
                value = codec.decode(encoded.encoded)
            needs_snapshot = encoded.is_snapshot and type(value) is not DeltaSnapshot
            values[channel] = DeltaSnapshot(value) if needs_snapshot else value
        other_fields, metadata = map(codec.decode, self.encoded_fields)
        return values, other_fields, metadata

    def copy_with_values(
        self, codec: Codec, values: dict[str, Any], other_fields: Any, metadata: Any
    ) -> CheckpointPut:
        """Return a copy of this encoded request with different values, fields and metadata."""
        for channel, encoded in self._encoded.items():
            if encoded.continues_parent:
                values[channel] = Continuation(values.get(channel, []))
        checkpoint: Any = {**other_fields, "id": self.checkpoint["id"], "channel_values": values}
        checkpoint |= {"channel_versions": self._versions, "versions_seen": self._versions_seen}
        parts = (
            self.address,
            checkpoint,
            metadata,
            self.new_versions,
            self.continues_chosen_checkpoint,
        )
        put = CheckpointPut(*parts, config=self.config, loaded_removal=self.loaded_removal)
        put.run_started_at, put.continues_run = self.run_started_at, self.continues_run
        put.encode_values(codec, None)
        put.encode_unchanged_channels(codec)
        return put

    def build_snapshot(self, parent: Snapshot | None) -> Snapshot:
        """Build the `Snapshot` of the checkpoint.

        The returned `Snapshot` contains no references to channel values. The caller must add these
        references.
        """
        step = self.metadata.get("step")
        snapshot = Snapshot(
            self.checkpoint["id"],
            0,
            self.address.checkpoint_id,
            0,
            [*self.encoded_fields],
            self._versions,
            self._versions_seen,
        )
        snapshot.step = step if type(step) is int else None
        snapshot.is_update = self.metadata.get("source") == "update"
        # A merged checkpoint has no run start time, because it combines messages from different
        # runs.
        if self.merge is None:
            snapshot.run_started_at = (
                parent.run_started_at if self.continues_run and parent else self.run_started_at
            )
        return snapshot


@dataclass(slots=True)
class TaskWrites:
    """A request to store the pending writes of one task.

    Attributes:
        address: The address of the checkpoint.
        task_id, task_path: The id and the path of the task.
        writes: The `(channel, value)` pairs as passed by langgraph.
        encoded: The writes in their stored form.
        cached_thread: The cached thread to whose log items the encoded values may refer, or None.
        has_interrupt: Whether the task is interrupted.
        is_stopped: Whether the task is interrupted or has failed.
        may_fold: Whether a state update may have replaced the checkpoint as the head. If so,
            `try_making_run_checkpoint_head_again` is called after the writes are stored.
        continues_chosen_checkpoint, config, loaded_removal: See `CheckpointPut`.
    """

    address: Address
    task_id: str
    task_path: str
    writes: Sequence[tuple[str, Any]]
    encoded: list[Write] = field(default_factory=list)
    cached_thread: Thread | None = None
    has_interrupt: bool = False
    is_stopped: bool = False
    may_fold: bool = True
    continues_chosen_checkpoint: bool = False
    config: RunnableConfig | None = None
    loaded_removal: int = 0

    def encode_values(self, codec: Codec, cached_thread: Thread | None) -> None:
        """Encode the writes. The encoded writes are kept in `encoded`.

        Elements that are already in the thread's logs are replaced with references to log items.

        Raises:
            Unstorable: A value cannot be stored.
        """
        writes_by_index: dict[int, Write] = {}
        for i, (channel, value) in enumerate(self.writes):
            index = WRITES_IDX_MAP.get(channel, i)
            if channel == ERROR and isinstance(value, BaseException):
                # Store the `repr` of the exception, as LangGraph's own savers do.
                value = repr(value)
            elif channel == INTERRUPT:
                self.has_interrupt = True
            self.is_stopped = self.is_stopped or channel in (ERROR, INTERRUPT)
            reference = encode_value_as_inline_reference(
                codec, cached_thread, channel, value, f"the write to {channel!r}"
            )
            writes_by_index[index] = [index, channel, reference]
        self.encoded, self.cached_thread = list(writes_by_index.values()), cached_thread

    def get_writes_without_outdated_references(
        self, thread_key: int, generation: int
    ) -> list[Write]:
        """Return the encoded writes, after replacing outdated references to log items by the items.

        The encoded writes can contain references to log items of the cached thread. References to
        log items are outdated if the thread's key or generation has changed since the thread was
        cached.
        """
        return [
            [
                i,
                c,
                replace_log_ranges_by_items_if_outdated(
                    ref, self.cached_thread, (thread_key, generation)
                ),
            ]
            for i, c, ref in self.encoded
        ]


def replace_log_ranges_by_items_if_outdated(
    ref: ValueReference, cached_thread: Thread | None, thread_key_and_generation: tuple[int, int]
) -> ValueReference:
    """Return `ref` unchanged, or a copy without log ranges if the cached thread is outdated.

    Args:
        ref: A reference from `encode_value_as_inline_reference`.
        cached_thread: The cached thread to whose logs the reference may point.
        thread_key_and_generation: The key and the generation of the thread.

    Returns:
        The reference itself if the cached thread has this key and generation. Otherwise, a copy of
        the reference in which log ranges are replaced by the items.
    """
    if (
        isinstance(ref, bytes)
        or cached_thread is None
        or (cached_thread.key, cached_thread.generation) == thread_key_and_generation
    ):
        return ref
    kind, content = ref
    if kind == MAP:
        return [
            MAP,
            {
                name: replace_log_ranges_by_items_if_outdated(
                    part, cached_thread, thread_key_and_generation
                )
                for name, part in content.items()
            },
        ]
    items: list[bytes] = []
    for element in content:
        if isinstance(element, bytes):
            items.append(element)
        else:
            items += cached_thread.logs[element[0]].get_items(decode_ranges(element[1:]))
    return [kind, items]


def build_title(metadata: Mapping[str, Any], messages: Any) -> Title | None:
    """Build the title of a thread from the metadata or the first messages of a checkpoint."""
    # Ignore all exceptions, because reading a malformed message can raise many types of exceptions.
    # The thread then gets no title from this checkpoint.
    with suppress(Exception):
        message_id: str | None = None
        text = metadata.get("title")
        if not text:
            messages = messages.value if type(messages) is DeltaSnapshot else messages
            for message in messages[:TITLE_CANDIDATES] if type(messages) is list else ():
                if isinstance(message, BaseMessage) and message.type == "human":
                    text, message_id = message.text, message.id or ""
                    break
            else:
                return None
        text = str(text).strip()[:MAX_TITLE_CHARS]
        return Title(text if text.isascii() else text.encode(errors="replace").decode(), message_id)
    return None


def choose_title(
    put: CheckpointPut, thread: Thread, values_to_store: dict[str, ValueToStore | None]
) -> Title | None:
    """Decide whether a thread keeps its current title or gets the title from a new checkpoint.

    The new title is used only in three cases: the thread has no title yet, the new title comes from
    the metadata, or the new title comes from an edited version of the message that provided the
    current title. A title that comes from a message can replace the thread's current title only if
    the checkpoint changes the messages. If the first checkpoint of a thread contains no title, the
    thread's title is set to `NO_TITLE`.
    """
    former, title = thread.title, put.title
    if title is None:
        return NO_TITLE if former is None and thread.last_seq == 1 else former
    if title.message_id is not None and values_to_store.get("messages") is None:
        # Keep the current title, because the new checkpoint does not change the messages.
        return former
    if former is None or former == NO_TITLE or title.message_id in (None, former.message_id):
        return title
    return former


# -- values as parts of a log


def encode_value_as_inline_reference(
    codec: Codec,
    cached_thread: Thread | None,
    channel: str,
    value: Any,
    path: str,
    *,
    is_nested_value: bool = False,
) -> Any:
    """Encode a value for storage in the row of a checkpoint or of pending writes.

    The encoded form that this function returns is called an inline reference. An inline reference
    has one of two forms. In the first form, an inline reference is the whole encoded value, as
    bytes. The second form is possible only for a list or dict. An inline reference in the second
    form contains the elements of the list or dict as separate parts. Each part is an encoded
    element, a reference to a log range, or another inline reference. Inline references are used for
    the values of pending writes and of LangGraph's internal channels. Long lists and dicts often
    contain elements that are already in the channel's log, such as messages that are passed to or
    returned from a subgraph. If a list or dict has eight or more elements, those that are already
    in the log are replaced with references to log ranges.

    Args:
        codec: Encodes values.
        cached_thread: The cached thread whose logs are searched, or None to search no log.
        channel: The channel to which the value is written.
        value: The value.
        path: The path of the value, for error messages.
        is_nested_value: Whether the value is an entry of a dict that is already split.

    Raises:
        Unstorable: The value cannot be stored.
    """
    if type(value) not in _CONTAINERS or not _are_elements_stored_separately(value):
        return codec.encode(value, lambda: path)
    is_split = type(value) is dict and not is_nested_value and len(value) <= 32
    if is_split and any(map(_has_parts, value.values())):
        references = {}
        for key, part in value.items():
            # If the value is a graph's input, its keys are channel names.
            name = str(key) if channel == START else channel
            references[key] = encode_value_as_inline_reference(
                codec, cached_thread, name, part, f"{path}[{key!r}]", is_nested_value=True
            )
        return [MAP, references]
    kind = DICT_HERE if type(value) is dict else LIST_HERE
    elements, comparison_forms = _list_elements_and_encodings(codec, value, path)
    if cached_thread is not None and len(elements) >= _MIN_ELEMENTS_FOR_LOG:
        log = cached_thread.logs_by_channel.get(channel)
        # Search only committed log items. A reference to an uncommitted item would become invalid
        # if the transaction that adds the item were rolled back.
        if log is not None and log.items:
            _, parts = _find_ranges_and_parts_in_log(
                codec, log, log.find_committed_item_position, elements, comparison_forms, [], path
            )
            # A new item is stored as bytes, and a log range as `[log_key, start, length]`.
            return [
                kind,
                [
                    part if isinstance(part, bytes) else [log.key, part[0], part[1] - part[0]]
                    for part in parts
                ],
            ]
    pairs = zip(elements, comparison_forms, strict=True)
    encoded_elements = [
        codec.encode_for_storage(element, data, lambda: path) for element, data in pairs
    ]
    if sum(map(len, encoded_elements)) > MAX_INLINE_BYTES or any(
        isinstance(e, BaseMessage) for e in elements
    ):
        return [kind, encoded_elements]
    return codec.encode(value, lambda: path)


def decode_value_of_inline_reference(codec: Codec, ref: ValueReference) -> Any:
    """Decode an inline reference.

    The reference must be an inline reference, and must not contain log ranges.
    """
    if isinstance(ref, bytes):
        return codec.decode(ref)
    kind, content = ref
    if kind == MAP:
        return {
            name: decode_value_of_inline_reference(codec, part) for name, part in content.items()
        }
    parts = codec.decode_all(content)
    return dict(parts) if kind == DICT_HERE else parts


def _list_elements_and_encodings(
    codec: Codec, value: Any, path: str
) -> tuple[list[Any], list[bytes]]:
    """Return two lists: the elements of a value and the encodings of these elements.

    If the value is a dict, its elements are its key-value pairs.
    """
    elements = [[*pair] for pair in value.items()] if type(value) is dict else [*value]
    try:
        return elements, codec.encode_for_comparison(elements, lambda i: f"{path}[{i}]")
    except Unstorable:
        if type(value) is dict:
            # Encode the dict as a whole, so that the error message includes the key of the value
            # that cannot be stored.
            codec.encode(value, lambda: path)
        raise


def _find_ranges_and_parts_in_log(
    codec: Codec,
    log: ChannelLog,
    find_position: Callable[[bytes], int | None],
    elements: Sequence[Any],
    encoded_elements: list[bytes],
    likely_ranges: Ranges,
    path: str,
) -> tuple[Ranges, list[bytes | Range]]:
    """Find the elements of a value in a log.

    Args:
        codec: Encodes values.
        log: The cached part of the channel's log.
        find_position: Returns the position of an encoded item in the log, or None.
        elements: The elements.
        encoded_elements: The encoding of each element.
        likely_ranges: The ranges of the parent's value, which often begins with the same elements.
        path: The path of the value, for error messages.

    Returns:
        Two lists: the leading ranges of `likely_ranges` with which the value begins, and the rest
        of the value as log ranges and encoded new items.
    """
    kept_ranges: Ranges = []
    parts: list[bytes | Range] = []
    i = 0
    for start, stop in likely_ranges:
        get_item = log.items.get if start < ALIASES else log.get
        if list(map(get_item, range(start, stop))) != encoded_elements[i : i + stop - start]:
            break
        kept_ranges.append((start, stop))
        i += stop - start
    other_ranges = likely_ranges[len(kept_ranges) :]
    likely_positions = (
        _find_positions_by_content(log, other_ranges) if other_ranges and i < len(elements) else {}
    )
    while i < len(elements):
        position = likely_positions.get(encoded_elements[i])
        if position is None:
            position = find_position(encoded_elements[i])
        if position is None:
            stored_form = codec.encode_for_storage(
                elements[i], encoded_elements[i], partial("{}[{}]".format, path, i)
            )
            position = (
                find_position(stored_form) if stored_form is not encoded_elements[i] else None
            )
            if position is None and codec.former_names:
                former_positions = map(
                    find_position,
                    codec.iter_encodings_with_former_class_names(elements[i], stored_form),
                )
                position = next(
                    (
                        former_position
                        for former_position in former_positions
                        if former_position is not None
                    ),
                    None,
                )
            if position is None:
                parts.append(stored_form)
                i += 1
                continue
        stop = position + _count_elements_equal_to_log_items(log, position, encoded_elements, i)
        parts.append((position, stop))
        i += stop - position
    return kept_ranges, parts


def _count_elements_equal_to_log_items(
    log: ChannelLog, first_position: int, encoded_elements: list[bytes], first_index: int
) -> int:
    """Count the list elements that equal the log items at the corresponding positions.

    The caller has already found that the element at `first_index` equals the log item at
    `first_position`. The first list element and the first log item are already known to be equal,
    so the function counts them as equal without comparing them. The comparison starts with the
    second pair. The comparison stops at the first difference.
    """
    get_item = log.items.get if first_position < ALIASES else log.get
    equal_count, size, new_matches = 1, 8, 8
    # Compare slices of increasing size, so that an early mismatch is found without copying all
    # remaining elements.
    while new_matches == size:
        size *= 2
        piece = encoded_elements[first_index + equal_count : first_index + equal_count + size]
        log_items = map(
            get_item, range(first_position + equal_count, first_position + equal_count + size)
        )
        new_matches = sum(takewhile(bool, map(eq, log_items, piece)))
        equal_count += new_matches
    return equal_count


def _find_positions_by_content(log: ChannelLog, ranges: Ranges) -> dict[bytes, int]:
    """Return a dict from the content of each cached item in `ranges` to the item's log position."""
    by_content: dict[bytes, int] = {}
    for position in iter_positions(ranges):
        item = log.get(position)
        if item is not None:
            by_content.setdefault(item, position)
    return by_content


def _can_encode_keys_as_msgpack(keys: list[Any]) -> bool:
    try:
        pack(keys)
    # msgpack cannot encode lone surrogates, or integers that do not fit into 64 bits.
    except TypeError:
        return False
    return True


def _has_parts(value: Any) -> bool:
    return type(value) in (list, dict) or isinstance(value, BaseMessage)


def _are_elements_stored_separately(value: list[Any] | dict[Any, Any]) -> bool:
    """Return whether the elements of a list or dict are stored as separate log items.

    Each element of a list or dict is usually stored as a separate log item. A list of numbers, such
    as an embedding, is stored as a single value. A dict is stored as a single value if msgpack
    cannot encode its keys.
    """
    if type(value) is dict:
        return (
            bool(value)
            and _KEYS.issuperset(map(type, value))
            and _can_encode_keys_as_msgpack([*value])
        )
    return not _NUMBERS.issuperset(map(type, value))

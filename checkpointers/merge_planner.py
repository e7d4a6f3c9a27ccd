"""Merge a state update's checkpoint with the checkpoints of a concurrent run.

LangGraph's `update_state` reads a checkpoint and stores a child checkpoint. If a run concurrently
continues from the checkpoint that `update_state` has read, the run stores a second child, which
would split the thread into two branches. To keep the thread in one branch, perdure merges the state
update's checkpoint with the run's checkpoint. The two checkpoints are not merged if the state
update and the run have written to the same channel. If the state update's checkpoint is stored
before the run's next checkpoint, perdure copies values from the update's checkpoint to the run's
next checkpoint. The copied values are those of the channels that the update changed. If a run and a
state update are concurrent and the run's checkpoint is stored first, the channel values that the
run changed are copied into the state update's checkpoint. A merged checkpoint always takes its
tasks, its `versions_seen` and LangGraph's routing channels (such as `branch:to:...`) from the run,
never from the state update.

The run is not aware that its checkpoint was merged with a state update. The run continues from its
in-memory state, which lacks the values that the state update wrote. The state update's values would
be missing from later checkpoints of the run. To prevent this loss, perdure merges these values into
each later checkpoint of the run until the run has read the values. A merge assigns a new version to
each channel whose value it copies. To find out whether the run has read the copied value, perdure
checks the channel's version in a later checkpoint of the run. The run has read the value if this
version is equal to or higher than the version that the merge assigned. The metadata key `MERGED` of
a run's checkpoint lists channels whose values a merge has copied from a state update. A channel
remains under the metadata key `MERGED` in the run's later checkpoints until the run has read the
value that the merge copied into the channel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final
from uuid import uuid4

from langgraph.checkpoint.serde.types import ERROR, INTERRUPT

from perdure.checkpointers.cache import Head, Snapshot, Thread
from perdure.checkpointers.head_merge import (
    Merge,
    build_lowest_channel_version_of_merge_epoch,
    extract_merge_epoch_from_version_bits,
    find_max_merge_epoch_of_versions,
    is_state_channel,
    parse_whole_part_of_version,
)
from perdure.checkpointers.labels import (
    MERGED,
    list_ids_of_checkpoints_changed_by_state_updates,
)
from perdure.checkpointers.manifest import DELTA, SNAPSHOT
from perdure.checkpointers.put import START, CheckpointPut, TaskWrites
from perdure.checkpointers.reader import CheckpointReader, StoredCheckpoint
from perdure.checkpointers.records import (
    VIEWS_NAMESPACE,
    build_put_writes_statement,
    decrypt_writes,
    encode_id_for_storage,
    encrypt_checkpoint,
)
from perdure.checkpointers.status import ASIDE_SUFFIX, NULL_TASK, is_update_path
from perdure.storage.flow import Flow, Row

# Maximum number of checkpoints to read while following parent ids from the head.
_MAX_STEPS: Final = 64
# Channels to which langgraph writes when a task fails or is interrupted.
_STOP_CHANNELS: Final = (ERROR, INTERRUPT)
_ANCHOR_STEP: Final = -2
"""The step of the empty checkpoint at which the first run of a thread stores its writes to
`DeltaChannel`s if the durability is `exit`."""
# Bit mask that extracts a checkpoint's sequence number from its row key.
_SEQ_MASK: Final = 0xFFFFFFFF
_EMPTY_CHECKPOINT: Final = Snapshot("", 0, None, 0, [], {}, {})
"""Placeholder for the parent of a new checkpoint that has no parent."""


class MergePlanner:
    """Decides whether and how a new checkpoint is merged with the head of its namespace.

    Call the methods of `MergePlanner` only in the transaction that stores the new checkpoint.

    Args:
        reader: The reader of the database.
        thread_id: The thread.
        ns: The namespace of the put.
        thread: The thread as the transaction has read it.
        head: The head of the namespace.
    """

    def __init__(
        self, reader: CheckpointReader, thread_id: str, ns: str, thread: Thread, head: Head
    ) -> None:
        self._reader, self._thread_id, self._ns = reader, thread_id, ns
        self._thread, self._head = thread, head

    def plan_merge(self, put: CheckpointPut, parent: Snapshot | None) -> Flow[Merge | None]:
        """Decide whether and how a new checkpoint is merged with the head of its namespace.

        Args:
            put: The request to store the new checkpoint.
            parent: The parent of the new checkpoint, or None if it has none.

        Returns:
            The merge, or None if the put is stored as it is. If `keeps_head` of the merge is set,
            the put is stored without being merged, and does not become the head.
        """
        source, current = put.metadata.get("source"), self._head.snapshot
        if (
            current is None
            or put.config is None
            or put.continues_chosen_checkpoint
            or source == "fork"
            or self._ns == VIEWS_NAMESPACE
        ):
            return None
        if parent is None and put.address.checkpoint_id is not None:
            return (
                yield from self._plan_put_with_pruned_parent(
                    put, current, put.address.checkpoint_id
                )
            )
        if parent is not None and parent.checkpoint_id == current.checkpoint_id:
            merged = self._list_merged_channels_unread_by_run(current)
            return (
                (yield from self._plan_put_on_merged_head(put, current, merged)) if merged else None
            )
        base = _EMPTY_CHECKPOINT if parent is None else parent
        if source == "update":
            is_behind_run = yield from self._is_ancestor_of_head(base, {"loop", "input", "update"})
            return self._plan_merge_of_state_update(put, current, base) if is_behind_run else None
        is_anchor = parent is None and put.metadata.get("step") == _ANCHOR_STEP
        if is_anchor and any(_is_delta(ref) for ref in current.references.values()):
            # Do not merge the run's new checkpoint with the head, because the head contains a
            # `DeltaChannel`. Both the run and a state update may have written to this
            # `DeltaChannel`.
            return None
        is_run = is_anchor or source in ("loop", "input")
        if is_run and (yield from self._is_ancestor_of_head(base, {"update"})):
            return self._plan_merge_of_run_checkpoint(put, current, base)
        return None

    def _plan_put_with_pruned_parent(
        self, put: CheckpointPut, current_head: Snapshot, parent_id: str
    ) -> Flow[Merge | None]:
        """Build the merge plan for a new checkpoint whose parent was pruned.

        For example, a state update stores a new head while a run is active. A retention rule then
        deletes the run's most recent checkpoint. The run still names the deleted checkpoint as the
        parent of its next checkpoint. A run's checkpoint that cannot be merged becomes the head
        only if its source is `input` or if it is the run's only checkpoint.

        Args:
            put: The request to store the new checkpoint.
            current_head: The checkpoint that is the head.
            parent_id: The id of the pruned parent.
        """
        base = _infer_snapshot_of_pruned_checkpoint(put, current_head, parent_id)
        if put.metadata.get("source") == "update":
            return (
                self._plan_merge_of_state_update(put, current_head, base)
                if _may_head_descend_from_base_in_same_turn(current_head, base)
                else None
            )
        if put.metadata.get("source") not in ("loop", "input"):
            return None
        merge = None
        if (yield from self._is_ancestor_of_head(base, {"update"})):
            merge = self._plan_merge_of_run_checkpoint(put, current_head, base)
        if (
            merge is not None
            or put.metadata.get("source") == "input"
            or put.is_only_checkpoint_of_run
        ):
            return merge
        return Merge(current_head, {}, keeps_head=current_head)

    def _plan_put_on_merged_head(
        self, put: CheckpointPut, current_head: Snapshot, merged_channels: Collection[str]
    ) -> Flow[Merge | None]:
        """Build the merge plan for a new checkpoint that is a child of the head.

        The method is called only if the head has merged channels.

        A merged channel is one whose value was copied to the head from another checkpoint. A merge
        can copy channel values to the head while a run is in progress. The run may store its next
        checkpoint before the run has read the copied values. A run may overwrite a channel without
        having read the value that a merge copied into this channel. The run's new checkpoint then
        does not become the head, except if the current head is an anchor, which is an empty
        checkpoint.

        Args:
            put: The request to store the new checkpoint.
            current_head: The checkpoint that is the head.
            merged_channels: The channels whose values were copied to the head.
        """
        unread = {
            channel
            for channel in merged_channels
            if not _has_run_read_channel(put, channel, current_head)
        }
        if any(channel in put.new_versions for channel in unread):
            if self._reader.decode_superstep_number(current_head) == _ANCHOR_STEP:
                # Normally, a run's next checkpoint does not become the head if the run overwrites a
                # copied value without having read the value. This rule does not apply if the head
                # is an anchor. An anchor is an empty checkpoint at which a thread's first run
                # stores its `DeltaChannel` writes.
                return None
            return Merge(
                current_head,
                {},
                keeps_head=(yield from self._find_last_merged_state_update(current_head, unread)),
            )
        return (
            self._plan_merge_that_copies_channels_from_head(put, current_head, unread)
            if unread
            else None
        )

    def _plan_merge_of_run_checkpoint(
        self, put: CheckpointPut, current_head: Snapshot, base_checkpoint: Snapshot
    ) -> Merge | None:
        """Build the plan for merging a run's new checkpoint with a state update's checkpoint.

        The state update's checkpoint is the head of the namespace.

        Return None if the run and the state update have written to the same channel.
        """
        unread = {
            c
            for c in self._list_merged_channels_unread_by_run(base_checkpoint)
            if not _has_run_read_channel(put, c, base_checkpoint)
        }
        written = {
            c
            for c in _find_channels_written_since(current_head, base_checkpoint)
            if c in current_head.references
        }
        versions = put.checkpoint["channel_versions"]
        written_by_both = {
            c
            for c in unread | written
            if c in put.new_versions
            or (c not in unread and versions.get(c) != base_checkpoint.channel_versions.get(c))
        }
        return (
            None
            if written_by_both
            else self._plan_merge_that_copies_channels_from_head(
                put, current_head, unread | written
            )
        )

    def _plan_merge_of_state_update(
        self, put: CheckpointPut, current_head: Snapshot, base_checkpoint: Snapshot
    ) -> Merge | None:
        """Build the merge plan for a state update and a run that continue from the same checkpoint.

        Return None if the state update and the run have written to the same channel. Return None if
        the state update writes to a `DeltaChannel` whose full value is stored in the head.
        """
        # The written channels include each updated `DeltaChannel` without a stored value, because
        # langgraph rebuilds the value of such a channel from its writes.
        written = {
            c
            for c in put.new_versions
            if is_state_channel(c)
            and (c in put.checkpoint["channel_values"] or c in put.delta_channels)
        }
        written_by_both = written & _find_channels_written_since(current_head, base_checkpoint)
        if not all(
            _is_channel_version_changed_only_by_merge(channel, current_head, base_checkpoint)
            for channel in written_by_both
        ):
            return None
        if written.intersection(put.delta_channels, current_head.stored_channels()):
            # Do not merge the state update with the head, because the head stores a
            # `DeltaChannel`'s full value. LangGraph would load this value from the head. LangGraph
            # would then ignore the state update's pending writes to the `DeltaChannel`, which are
            # stored at an older checkpoint.
            return None
        codec, step = self._reader.codec, self._reader.decode_superstep_number(current_head)
        put.encoded_fields[0] = codec.encode(
            {**codec.decode(current_head.encoded_fields[0]), "ts": put.checkpoint["ts"]},
            lambda: "checkpoint",
        )
        if step is not None:
            self._set_metadata_value_of_put(put, "step", step + 1)
        other_versions = {
            c: version for c, version in current_head.channel_versions.items() if c not in written
        }
        return Merge(current_head, other_versions, written)

    def _plan_merge_that_copies_channels_from_head(
        self, put: CheckpointPut, current_head: Snapshot, channels: Iterable[str]
    ) -> Merge | None:
        """Build the plan for a merge that copies channels from the head.

        Returns:
            The merge, or None if no new versions can be assigned to the channels, because the
            existing versions are of different kinds or of a kind without epochs.
        """
        own_epoch = find_max_merge_epoch_of_versions(put.checkpoint["channel_versions"].values())
        last_epoch = find_max_merge_epoch_of_versions(
            [*put.checkpoint["channel_versions"].values(), *current_head.channel_versions.values()]
        )
        if own_epoch is None or last_epoch is None:
            return None
        versions = {}
        for channel in channels:
            version = current_head.channel_versions[channel]
            # The merge epoch is the part of a channel's version that merges increase. If the merge
            # epoch of a channel's version is higher than every merge epoch that the run knows, keep
            # the channel's version. The channel's version is then already higher than any version
            # that the run can assign.
            is_newer = (extract_merge_epoch_from_version_bits(version) or 0) > own_epoch
            versions[channel] = (
                version
                if is_newer
                else build_lowest_channel_version_of_merge_epoch(version, last_epoch + 1)
            )
        if versions:
            self._set_metadata_value_of_put(put, MERGED, sorted(versions))
        return Merge(current_head, versions)

    def _set_metadata_value_of_put(self, put: CheckpointPut, key: str, value: Any) -> None:
        """Set a key in a new checkpoint's metadata and re-encode the metadata."""
        put.metadata = {**put.metadata, key: value}
        put.encoded_fields[1] = self._reader.codec.encode(
            put.metadata, lambda: "metadata", exact=True
        )

    def finish_merge_and_check_if_checkpoint_changed(self, merge: Merge, head: Head) -> Flow[bool]:
        """Update the thread list and, if necessary, the head after a merged checkpoint was stored.

        If the new checkpoint could not be merged, the attribute `merge.keeps_head` contains the
        checkpoint that is the head after the put. If the new checkpoint in the root namespace could
        not be merged, the method copies metadata from the head to the thread's entry in the thread
        list. If the new checkpoint belongs to a state update and a task of the run has failed or
        been interrupted, the update's values are copied into the run's checkpoint. The run's
        checkpoint then becomes the head again.

        Args:
            merge: The merge.
            head: The head after the put.

        Returns:
            Whether the content of an existing checkpoint has changed.
        """
        self._head, reader = head, self._reader
        if merge.keeps_head is not None and not self._ns:
            (row,) = yield reader.sql("checkpoint_row", merge.keeps_head.key)
            yield from reader.update_thread_list_entry_from_head(self._thread_id, row)
        if merge.written is None:
            return False
        return (
            yield from self.try_copying_state_updates_into_run_checkpoint(
                merge.head.checkpoint_id, requires_stopped_task=True
            )
        )

    def try_copying_state_updates_into_run_checkpoint(
        self, run_checkpoint_id: str, *, requires_stopped_task: bool
    ) -> Flow[bool]:
        """Copy values from state updates into a run's checkpoint, and make it the new head.

        If a task fails or is interrupted, the run stores no further checkpoint. In this case, a
        state update's values cannot be merged into a later checkpoint of the run, because no later
        checkpoint exists.

        Args:
            run_checkpoint_id: The id of the run's checkpoint.
            requires_stopped_task: Whether to copy values only if a task that started from the run's
                checkpoint has failed or been interrupted.

        Returns:
            Whether the values of the updates were copied. The values are not copied if the run's
            checkpoint is the head, or if a checkpoint between the run's checkpoint and the head is
            not an update.
        """
        current = self._head.snapshot
        if current is None or current.checkpoint_id == run_checkpoint_id:
            return False
        run = yield from self._read_snapshot(run_checkpoint_id)
        if run is None or not (yield from self._is_ancestor_of_head(run, {"update"})):
            return False
        if requires_stopped_task and not (yield from self._has_failed_or_interrupted_task(run)):
            return False
        last_epoch = find_max_merge_epoch_of_versions(
            [*run.channel_versions.values(), *current.channel_versions.values()]
        )
        if last_epoch is None:
            return False
        written = [c for c in _find_channels_written_since(current, run) if c in current.references]
        merged, parent = {*written, *self._list_merged_channels_unread_by_run(run)}, run.parent_id
        Merge(
            current,
            {
                c: build_lowest_channel_version_of_merge_epoch(
                    current.channel_versions[c], last_epoch + 1
                )
                for c in written
            },
        ).copy_head_channels_into(run)
        run.parent_id, run.run_started_at, codec = parent, None, self._reader.codec
        run.encoded_fields[1] = codec.encode(
            self._reader.decode_metadata(run) | {MERGED: sorted(merged)},
            lambda: "metadata",
            exact=True,
        )
        yield from self._store_changed_checkpoint_as_head(run)
        return True

    def _has_failed_or_interrupted_task(self, checkpoint: Snapshot) -> Flow[bool]:
        """Return whether any task of a checkpoint has failed or been interrupted."""
        stored = StoredCheckpoint(self._thread, self._head.namespace_key, checkpoint)
        for row in (yield from self._reader.read_rows_of_writes(stored)):
            writes = decrypt_writes(self._reader.seal, self._thread_id, self._ns, row)
            # A task that failed or was interrupted counts as stopped only if it has not finished
            # since then. For example, an interrupted task can finish after its interrupt has been
            # answered.
            has_finished = any(index >= 0 for index, _, _ in writes)
            if not has_finished and any(channel in _STOP_CHANNELS for _, channel, _ in writes):
                return True
        return False

    def _store_changed_checkpoint_as_head(self, checkpoint: Snapshot) -> Flow[None]:
        """Store a modified checkpoint, and make it the head."""
        reader, thread_and_ns = self._reader, (self._thread_id, self._ns)
        (row,) = yield reader.sql("checkpoint_row", checkpoint.key)
        body = encrypt_checkpoint(
            reader.seal,
            *thread_and_ns,
            row,
            checkpoint,
        )
        yield [
            reader.sql("rewrite_checkpoint", body, checkpoint.key),
            reader.sql("set_explicit_head", checkpoint.key & _SEQ_MASK, self._head.namespace_key),
            reader.sql("mark_rows_removed", self._thread.key),
        ]
        if not self._ns:
            yield from reader.update_thread_list_entry_from_head(self._thread_id, (*row[:5], body))

    def has_merged_channels_unread_by_run(self, head: Head | None) -> bool:
        """Return whether the head contains merged values that the run may not have read yet.

        A merged channel is one whose value was copied to the head from another checkpoint. A merge
        can copy values into the head before the active run has read them. The head is not cached
        while it contains merged values that the active run may not have read. If the head is not
        cached, the transaction that stores the next checkpoint uses a `MergePlanner` to decide
        whether to merge the checkpoint with the head.
        """
        snapshot = None if head is None else head.snapshot
        return snapshot is not None and bool(self._list_merged_channels_unread_by_run(snapshot))

    # -- checkpoints of the namespace

    def _read_snapshot(self, checkpoint_id: str) -> Flow[Snapshot | None]:
        """Read a checkpoint of the namespace by its id, or return None if it does not exist."""
        return (
            yield from self._reader.read_snapshot(
                self._thread_id, self._ns, self._head.namespace_key, checkpoint_id, self._thread
            )
        )

    def _is_ancestor_of_head(
        self, ancestor: Snapshot, allowed_sources: Collection[str]
    ) -> Flow[bool]:
        """Return whether all checkpoints from the head back to `ancestor` have an allowed source.

        The `source` of the head and of each checkpoint between `ancestor` and the head must be in
        `allowed_sources`. If `ancestor` is not an ancestor of the head, False is returned.

        Args:
            ancestor: The checkpoint.
            allowed_sources: The allowed values of `source` in the metadata of these checkpoints.
        """
        snapshot = self._head.snapshot
        for _ in range(_MAX_STEPS):
            metadata = {} if snapshot is None else self._reader.decode_metadata(snapshot)
            if snapshot is None or metadata.get("source") not in allowed_sources:
                return False
            parent_id = snapshot.parent_id
            updated_ids = (
                list_ids_of_checkpoints_changed_by_state_updates(parent_id, metadata)
                if "update" in allowed_sources
                else []
            )
            if ancestor.checkpoint_id in (parent_id or "", *updated_ids):
                return True
            snapshot = (yield from self._read_snapshot(parent_id)) if parent_id else None
            if snapshot is None and updated_ids and updated_ids[-1] != parent_id:
                snapshot = yield from self._read_snapshot(updated_ids[-1])
        return False

    def _find_last_merged_state_update(
        self, current_head: Snapshot, channels: Collection[str]
    ) -> Flow[Snapshot]:
        """Return the checkpoint of the last state update that was merged into the head.

        If no state update was merged into the head, the method returns the head.

        The method also returns the head if a channel in `channels` has different values in the head
        and in the state update's checkpoint.
        """
        snapshot: Snapshot | None = current_head
        for _ in range(_MAX_STEPS):
            if snapshot is None or not self._list_merged_channels_unread_by_run(snapshot):
                break
            snapshot = (
                (yield from self._read_snapshot(snapshot.parent_id)) if snapshot.parent_id else None
            )
        if snapshot is None or self._reader.decode_metadata(snapshot).get("source") != "update":
            return current_head
        return (
            snapshot
            if all(snapshot.references.get(c) == current_head.references.get(c) for c in channels)
            else current_head
        )

    def _list_merged_channels_unread_by_run(self, snapshot: Snapshot) -> list[str]:
        """Return the channels whose merged values the run may not have read yet.

        A merge copied these values into `snapshot` from another checkpoint.
        """
        names = (
            self._reader.decode_labels_for_child_checkpoints(snapshot).get(MERGED)
            if snapshot.encoded_fields
            else None
        )
        return (
            [c for c in names if c in snapshot.channel_versions] if isinstance(names, list) else []
        )


def _has_run_read_channel(put: CheckpointPut, channel: str, base_checkpoint: Snapshot) -> bool:
    """Return whether a run has read the channel value that was merged into `base_checkpoint`.

    The merge epoch is the part of a channel version that counts merges. If the run wrote to the
    channel, the function compares the merge epoch of the new version with the merge epoch of the
    version in `base_checkpoint`. Suppose that the channel's merge epoch in the new checkpoint is
    equal to or higher than the channel's merge epoch in `base_checkpoint`. The run has then read
    the merged value. If the run did not write to the channel, the function compares the channel's
    versions in the new checkpoint and in `base_checkpoint`. If the run did not write to the
    channel, the run has read the merged value only if the new checkpoint and `base_checkpoint`
    contain the same version of the channel.
    """
    version, merged_version = (
        put.checkpoint["channel_versions"].get(channel),
        base_checkpoint.channel_versions[channel],
    )
    if channel in put.new_versions:
        return (extract_merge_epoch_from_version_bits(version) or 0) >= (
            extract_merge_epoch_from_version_bits(merged_version) or 0
        )
    return bool(version == merged_version)


def _find_channels_written_since(current_head: Snapshot, base_checkpoint: Snapshot) -> set[str]:
    """Return the state channels whose versions differ between the head and `base_checkpoint`."""
    versions = current_head.channel_versions.items()
    return {
        c
        for c, version in versions
        if is_state_channel(c) and version != base_checkpoint.channel_versions.get(c)
    }


def _infer_snapshot_of_pruned_checkpoint(
    put: CheckpointPut, current_head: Snapshot, checkpoint_id: str
) -> Snapshot:
    """Infer a pruned checkpoint's channel versions from a new child checkpoint.

    If the new checkpoint did not change a channel, the new checkpoint and the pruned parent contain
    the same version of the channel. LangGraph assigns each changed channel a version that is higher
    than all versions the run has read. For each changed channel, the function compares the head's
    version with the versions that the new checkpoint assigned. If the head's version of a channel
    is lower than every version that the new checkpoint assigned, the channel has not changed
    between the pruned parent and the head. For such a channel, the function uses the head's version
    as the pruned parent's version. Other changed channels are omitted from the returned snapshot,
    because their versions in the pruned parent are unknown.
    """
    versions: dict[str, Any] = dict(put.checkpoint["channel_versions"])
    lowest_new = min(
        (parse_whole_part_of_version(version) or 0 for version in put.new_versions.values()),
        default=0,
    )
    if put.is_only_checkpoint_of_run and START in put.new_versions:
        # The run's first version was that of its input in the channel `START`. The next step has
        # read the channel, and has replaced this version with the next one.
        lowest_new -= 1
    for channel in put.new_versions:
        versions.pop(channel, None)
        head_version = current_head.channel_versions.get(channel)
        whole = parse_whole_part_of_version(head_version)
        if whole is not None and whole < lowest_new:
            versions[channel] = head_version
    return Snapshot(checkpoint_id, 0, None, 0, [], versions, {})


def _may_head_descend_from_base_in_same_turn(
    current_head: Snapshot, base_checkpoint: Snapshot
) -> bool:
    """Return whether the head could be a later checkpoint in the same turn as `base_checkpoint`."""
    for channel, version in base_checkpoint.channel_versions.items():
        current_version = current_head.channel_versions.get(channel)
        if current_version != version and not _is_lower(version, current_version):
            return False
    return bool(
        current_head.channel_versions.get(START) == base_checkpoint.channel_versions.get(START)
    )


def _is_lower(version: Any, other: Any) -> bool:
    """Return whether the integer part of a channel version is lower than that of `other`."""
    whole, other_whole = parse_whole_part_of_version(version), parse_whole_part_of_version(other)
    return whole is not None and other_whole is not None and whole < other_whole


def _is_delta(ref: Any) -> bool:
    """Return whether `ref` refers to a `DeltaChannel`, with or without a snapshot of its value."""
    return isinstance(ref, list) and ref[0] in (DELTA, SNAPSHOT)


def _is_channel_version_changed_only_by_merge(
    channel: str, current_head: Snapshot, base_checkpoint: Snapshot
) -> bool:
    """Return whether a channel's version changed only because checkpoints were merged.

    The function looks at the changes between `base_checkpoint` and the head. A merge combines a
    state update's checkpoint with the checkpoint of a concurrent run.

    A merge can increase the epoch of a channel's version without changing the channel's value, so
    both the epochs and the values are compared. If a run writes the same value again, the channel's
    version changes and the version's epoch stays the same. The function therefore compares epochs
    to detect a merge. The function compares values, because a run and a state update can assign the
    same version to different values.
    """
    old_epoch, new_epoch = (
        extract_merge_epoch_from_version_bits(base_checkpoint.channel_versions.get(channel)),
        extract_merge_epoch_from_version_bits(current_head.channel_versions[channel]),
    )
    has_same_value = current_head.references.get(channel) == base_checkpoint.references.get(channel)
    return has_same_value and (new_epoch or 0) > (old_epoch or 0)


# -- pending writes


def try_making_run_checkpoint_head_again(
    reader: CheckpointReader, request: TaskWrites, thread: Thread, row: Row
) -> Flow[bool]:
    """Make a run's checkpoint the head again after a state update has replaced it.

    The run's checkpoint becomes the head again only if a task that started from that checkpoint has
    failed or been interrupted. If one of the run's tasks stores its writes later than a state
    update, the run was still active when the state update was stored. See
    `MergePlanner.try_copying_state_updates_into_run_checkpoint` for details.

    Args:
        reader: The reader of the database.
        request: The request to store the writes of a task at the run's checkpoint.
        thread: The thread as the transaction has read it.
        row: The key of the namespace, the number `Head.explicit_head`, and the key of the head.

    Returns:
        Whether the head has changed.
    """
    address, (namespace, explicit_head, key) = request.address, row
    if (
        request.continues_chosen_checkpoint
        or request.task_id == NULL_TASK
        or is_update_path(request.task_path)
    ):
        # If a state update's checkpoint has become the head, only a write of a run in progress can
        # make the run's checkpoint the head again. Writes of state updates, of responses to
        # interrupts and of runs deliberately resumed from an earlier checkpoint do not change the
        # head.
        return False
    rows = yield reader.sql("checkpoint_row", key)
    snapshot = reader.decrypt_checkpoint_row(*address[:2], rows[0]) if rows else None
    if snapshot is None or snapshot.checkpoint_id == address.checkpoint_id:
        return False
    yield from reader.unflatten_ranges_in_snapshot(address.thread_id, thread, snapshot)
    planner = MergePlanner(
        reader,
        address.thread_id,
        address.checkpoint_ns,
        thread,
        Head(namespace, explicit_head, snapshot),
    )
    return (
        yield from planner.try_copying_state_updates_into_run_checkpoint(
            address.checkpoint_id or "", requires_stopped_task=not request.is_stopped
        )
    )


def avoid_task_id_clash_and_get_new_task_id_and_path(
    reader: CheckpointReader, request: TaskWrites, namespace: int, stored_row: Row
) -> Flow[tuple[str, str]]:
    """Prevent a state update and a task from storing their writes under the same task id.

    LangGraph's `update_state` sometimes stores its writes under the id of a task of a concurrent
    run. To avoid a conflict with the task's writes, the state update's writes are stored under a
    new, random task id. A state update may already have stored its writes under the id of a run's
    task. The state update's writes are then moved to a new, random task id. The transaction that
    stores the task's writes also moves the state update's writes to the new task id.

    Args:
        reader: The reader of the database.
        request: The writes to store now.
        namespace: The key of the namespace.
        stored_row: The path and the body of the writes that are stored under the id of the task.

    Returns:
        The id and the path under which the writes of `request` are to be stored.
    """
    new_task_id, (path, body) = str(uuid4()), stored_row
    if is_update_path(request.task_path):
        return new_task_id, request.task_path + ASIDE_SUFFIX
    uid = encode_id_for_storage(request.address.checkpoint_id)
    stored = decrypt_writes(
        reader.seal, *request.address[:2], (uid, encode_id_for_storage(request.task_id), path, body)
    )
    yield build_put_writes_statement(
        reader.sql,
        reader.seal,
        namespace,
        (*request.address, new_task_id, path + ASIDE_SUFFIX),
        stored,
    )
    return request.task_id, request.task_path

"""Compare the states at two checkpoints, reading only the values that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Snapshot, Thread
from perdure.checkpointers.manifest import (
    DICT,
    LIST,
    Ranges,
    ValueReference,
    extract_value_reference_from_delta_channel_reference,
    iter_positions,
    join_adjacent_ranges,
    merge_ranges,
    subtract_ranges,
)
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.reports import ChannelDifference, StateDifference
from perdure.checkpointers.status import SENDS, find_send_targets
from perdure.checkpointers.thread_reader import build_not_found_error, find_checkpoint_or_raise
from perdure.storage.flow import Flow

# Placeholder for the item position in a `ChannelDifference` whose values are compared as a whole.
_WHOLE_VALUE: Final = -1


class Differences:
    """Compares the states at two checkpoints.

    The methods of this class are flows, which are generators that yield SQL statements.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader

    def compare_checkpoints(
        self, address: Address, pairs: Sequence[tuple[str | None, str]], limit: int
    ) -> Flow[list[StateDifference]]:
        """Compare pairs of checkpoints; see `Checkpointer.differences`."""
        # Read the head of the namespace. The returned `StoredCheckpoint` also contains the cached
        # thread and the namespace key, which the code below needs.
        head = yield from find_checkpoint_or_raise(self.reader, address)
        snapshots: dict[str | None, Snapshot | None] = {None: None}
        for checkpoint_id in {checkpoint_id for pair in pairs for checkpoint_id in pair} - {None}:
            parts = (
                address.thread_id,
                address.checkpoint_ns,
                head.namespace_key,
                str(checkpoint_id),
            )
            snapshots[checkpoint_id] = yield from self.reader.read_snapshot(*parts)
        differences = []
        for old, new in pairs:
            new_snapshot = snapshots[new]
            if new_snapshot is None:
                raise build_not_found_error(address._replace(checkpoint_id=new))
            channels = yield from self._compare_channels(
                address.thread_id, head.thread, snapshots[old], new_snapshot, limit
            )
            # If the older of two compared checkpoints was removed, the nodes that ran between them
            # are unknown.
            ran: tuple[str, ...] = ()
            if old is None or snapshots[old] is not None:
                ran = yield from self._find_executed_nodes(
                    address, head.namespace_key, snapshots[old], new_snapshot
                )
            differences.append(StateDifference(ran, channels))
        return differences

    def _find_executed_nodes(
        self, address: Address, namespace: int, old: Snapshot | None, new: Snapshot
    ) -> Flow[tuple[str, ...]]:
        """Return the nodes that ran between two checkpoints, each once.

        The nodes are in the order of the supersteps in which they first ran. If `new` does not
        descend from `old`, or if a checkpoint between them is missing, the order in which the nodes
        ran is unknown. If the execution order is unknown, the nodes are returned in the key order
        of `new.versions_seen`.
        """
        nodes: list[str] = []
        step: Snapshot | None = new
        while step is not None and (old is None or step.checkpoint_id != old.checkpoint_id):
            parent = old if old is not None and step.parent_id == old.checkpoint_id else None
            if parent is None and step.parent_id is not None:
                parent = yield from self.reader.read_snapshot(
                    address.thread_id, address.checkpoint_ns, namespace, step.parent_id
                )
            nodes[:0] = yield from self._find_nodes_executed_in_superstep(
                address.thread_id, parent, step
            )
            step = parent
        # If the later checkpoint does not descend from the earlier one, or a checkpoint between
        # them was pruned, find the nodes that ran by comparing the `versions_seen` of both.
        if step is None and old is not None:
            nodes = _find_nodes_with_changed_versions_seen(old, new)
        return tuple(dict.fromkeys(nodes))

    def _find_nodes_executed_in_superstep(
        self, thread_id: str, parent: Snapshot | None, checkpoint: Snapshot
    ) -> Flow[list[str]]:
        """Return the nodes that ran in one superstep.

        The field `versions_seen` of a checkpoint contains the channel versions that each node has
        seen. If a node's entry in `versions_seen` differs between the checkpoint and its parent, a
        channel triggered the node and the node ran. For a checkpoint with the source `input`, no
        nodes are returned. In `input` checkpoints, langgraph updates `versions_seen` even for nodes
        that did not run. Tasks created by a `Send` do not update `versions_seen`, so their nodes
        are read from the `Send`s stored in the parent checkpoint.
        """
        source, nodes = self.reader.decode_metadata(checkpoint).get("source"), list[str]()
        if source == "loop" and parent is not None and SENDS in parent.references:
            sends = yield from self.reader.read_referenced_value(
                thread_id, parent.references[SENDS]
            )
            nodes += [node for node in find_send_targets(sends) if node is not None]
        return (
            []
            if source == "input"
            else [*nodes, *_find_nodes_with_changed_versions_seen(parent, checkpoint)]
        )

    def _compare_channels(
        self, thread_id: str, thread: Thread, old: Snapshot | None, new: Snapshot, limit: int
    ) -> Flow[dict[str, ChannelDifference]]:
        """Compare the values of all channels between two checkpoints.

        Returns:
            The differences by channel. Equal channels are left out.
        """
        old_refs: Mapping[str, Any] = old.references if old else {}
        channels = {}
        for channel in dict.fromkeys([*old_refs, *new.references]):
            old_ref, new_ref = old_refs.get(channel), new.references.get(channel)
            if _has_unknown_value(old_ref) or _has_unknown_value(new_ref):
                difference = yield from self._compare_transcripts(
                    thread_id, thread, channel, old, new, limit
                )
                if difference.added_count or difference.removed_count:
                    channels[channel] = difference
                continue
            old_ref, new_ref = (
                extract_value_reference_from_delta_channel_reference(old_ref),
                extract_value_reference_from_delta_channel_reference(new_ref),
            )
            if old_ref == new_ref:
                continue
            log = next((ref[1] for ref in (new_ref, old_ref) if isinstance(ref, list)), None)
            if (
                log is not None
                and self._is_value_empty_or_in_log(old_ref)
                and self._is_value_empty_or_in_log(new_ref)
            ):
                ranges = [
                    snapshot.ranges.get(channel, (0, []))[1] if snapshot else []
                    for snapshot in (old, new)
                ]
                change = self._compare_ranges(thread_id, thread, log, ranges[0], ranges[1], limit)
            else:
                change = self._compare_values(thread_id, thread, old_ref, new_ref)
            channels[channel] = yield from change
        return channels

    def _is_value_empty_or_in_log(self, ref: ValueReference | None) -> bool:
        """Return whether a value can be compared by its log positions instead of its contents.

        A list or dict can be compared by log positions if it is empty or if each of its elements is
        a separate log item. A missing value is treated like an empty list or dict.
        """
        if isinstance(ref, bytes):
            value = self.reader.codec.decode(ref)
            return type(value) in (list, dict) and not value
        return ref is None or ref[0] in (LIST, DICT)

    def _compare_ranges(
        self, thread_id: str, thread: Thread, log_key: int, old: Ranges, new: Ranges, limit: int
    ) -> Flow[ChannelDifference]:
        """Compare two lists or dicts stored in the same log, by the log positions of their items.

        Args:
            thread_id: The thread.
            thread: The cached thread.
            log_key: The key of the log.
            old: The ranges of the earlier value.
            new: The ranges of the later value.
            limit: The maximum number of added items and of removed items to return. The last ones
                are returned.
        """
        removed = yield from self.reader.read_positions_with_aliases_resolved(
            thread_id, thread, log_key, subtract_ranges(old, merge_ranges(new))
        )
        added = yield from self.reader.read_positions_with_aliases_resolved(
            thread_id, thread, log_key, subtract_ranges(new, merge_ranges(old))
        )
        # An alias is a log entry that refers to an earlier item of the same log. An item counts as
        # unchanged even if the old value contains the item itself and the new value contains an
        # alias of the item.
        in_both = {*removed} & {*added}
        removed = [position for position in removed if position not in in_both]
        added = [position for position in added if position not in in_both]
        parts = []
        for changed in (added, removed):
            ranges = join_adjacent_ranges(
                (position, position + 1) for position in changed[max(0, len(changed) - limit) :]
            )
            values = yield from self.reader.read_and_decode_items(
                thread_id, thread, log_key, ranges
            )
            parts.append(dict(zip(iter_positions(ranges), values, strict=True)))
        return ChannelDifference(parts[0], parts[1], len(added), len(removed), whole=False)

    def _compare_transcripts(
        self,
        thread_id: str,
        thread: Thread,
        channel: str,
        old: Snapshot | None,
        new: Snapshot,
        limit: int,
    ) -> Flow[ChannelDifference]:
        """Compare a channel's transcripts at two checkpoints.

        The transcript at a checkpoint contains every item that was stored for the channel in the
        checkpoint or in its ancestors, including items that were later removed from the state. An
        item counts as removed only if it is missing from the later checkpoint's transcript.
        """
        key, later = new.transcript.get(channel, (0, []))
        old_key, earlier = old.transcript.get(channel, (0, [])) if old else (0, [])
        return (
            yield from self._compare_ranges(
                thread_id, thread, key or old_key, earlier, later, limit
            )
        )

    def _compare_values(
        self, thread_id: str, thread: Thread, old_ref: Any, new_ref: Any
    ) -> Flow[ChannelDifference]:
        """Return the complete new and old values as the difference, without comparing elements."""
        parts = []
        for ref in (new_ref, old_ref):
            values = {}
            if ref is not None:
                values[_WHOLE_VALUE] = yield from self.reader.read_value(thread_id, thread, ref)
            parts.append(values)
        added, removed = parts
        return ChannelDifference(added, removed, len(added), len(removed), whole=True)


def _has_unknown_value(ref: Any) -> bool:
    """Return whether `ref` refers to a `DeltaChannel` whose value is unknown.

    The value is unknown if only the graph's reducer can compute it from the pending writes.
    """
    return ref is not None and extract_value_reference_from_delta_channel_reference(ref) is None


def _find_nodes_with_changed_versions_seen(old: Snapshot | None, new: Snapshot) -> list[str]:
    """Return the nodes whose `versions_seen` entries differ between two checkpoints."""
    old_versions = old.versions_seen if old else {}
    return [
        node
        for node, versions in new.versions_seen.items()
        if versions != old_versions.get(node) and not node.startswith("__")
    ]

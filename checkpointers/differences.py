"""What changed in the state between checkpoints: a flow that reads only what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Snapshot, Thread
from perdure.checkpointers.manifest import (
    DICT,
    LIST,
    Ranges,
    iter_positions,
    join_ranges,
    merge_ranges,
    value_reference,
)
from perdure.checkpointers.manifest import subtract_ranges as lacking
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.reports import ChannelDifference, StateDifference
from perdure.checkpointers.status import SENDS, find_send_targets
from perdure.checkpointers.threads import build_not_found_error
from perdure.storage.flow import Flow

_WHOLE_VALUE: Final = -1  # in place of a position


class Differences:
    """The flows that compare checkpoints."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader

    def compare(
        self, at: Address, pairs: Sequence[tuple[str | None, str]], most: int
    ) -> Flow[list[StateDifference]]:
        """See `Checkpointer.differences`."""
        checkpoint = yield from self.reader.find_checkpoint(at)
        if checkpoint is None:
            raise build_not_found_error(at)
        snapshots: dict[str | None, Snapshot | None] = {None: None}
        for uid in {uid for pair in pairs for uid in pair} - {None}:
            parts = at.thread_id, at.checkpoint_ns, checkpoint.namespace_key, str(uid)
            snapshots[uid] = yield from self.reader.read_snapshot(*parts)
        out = []
        for old, new in pairs:
            after = snapshots[new]
            if after is None:
                raise build_not_found_error(at._replace(checkpoint_id=new))
            channels = yield from self._compare_channels(
                at.thread_id, checkpoint.thread, snapshots[old], after, most
            )
            ran: tuple[str, ...] = ()
            if old is None or snapshots[old] is not None:
                ran = yield from self._find_ran_nodes(
                    at, checkpoint.namespace_key, snapshots[old], after
                )
            out.append(StateDifference(ran, channels))
        return out

    def _find_ran_nodes(
        self, at: Address, namespace: int, old: Snapshot | None, new: Snapshot
    ) -> Flow[tuple[str, ...]]:
        """The nodes that ran on the way from one checkpoint to another, in order."""
        ran: list[str] = []
        step: Snapshot | None = new
        while step is not None and (old is None or step.checkpoint_id != old.checkpoint_id):
            parent = old if old is not None and step.parent_id == old.checkpoint_id else None
            if parent is None and step.parent_id is not None:
                parts = at.thread_id, at.checkpoint_ns, namespace, step.parent_id
                parent = yield from self.reader.read_snapshot(*parts)
            ran[:0] = yield from self._find_nodes_of_step(at.thread_id, parent, step)
            step = parent
        if step is None and old is not None:  # one does not lead to the other
            ran = _nodes_with_new_versions(old, new)
        return tuple(dict.fromkeys(ran))

    def _find_nodes_of_step(
        self, thread_id: str, parent: Snapshot | None, step: Snapshot
    ) -> Flow[list[str]]:
        """The nodes that ran in one superstep.

        One that a channel triggers sees its version; so does one that was to run when an input
        came, and did not. A `Send` is a task of the checkpoint before, and leaves no version.
        """
        source, ran = self.reader.decode_metadata(step).get("source"), list[str]()
        if source == "loop" and parent is not None and SENDS in parent.references:
            sends = yield from self.reader.read_value_of_thread(thread_id, parent.references[SENDS])
            ran += [node for node in find_send_targets(sends) if node is not None]
        return [] if source == "input" else [*ran, *_nodes_with_new_versions(parent, step)]

    def _compare_channels(
        self, thread_id: str, thread: Thread, old: Snapshot | None, new: Snapshot, most: int
    ) -> Flow[dict[str, ChannelDifference]]:
        before: Mapping[str, Any] = old.references if old else {}
        channels = {}
        for channel in dict.fromkeys([*before, *new.references]):
            had, has = before.get(channel), new.references.get(channel)
            if _has_unknown_value(had) or _has_unknown_value(has):
                parts = thread_id, thread, channel, old, new, most
                found = yield from self._compare_transcripts(*parts)
                if found.added_count or found.removed_count:
                    channels[channel] = found
                continue
            had, has = value_reference(had), value_reference(has)
            if had == has:
                continue
            log = next((ref[1] for ref in (has, had) if isinstance(ref, list)), None)
            if log is not None and self._is_in_log(had) and self._is_in_log(has):
                ranges = [
                    snapshot.ranges.get(channel, (0, []))[1] if snapshot else []
                    for snapshot in (old, new)
                ]
                change = self._compare_ranges(thread_id, thread, log, ranges[0], ranges[1], most)
            else:
                change = self._compare_values(thread_id, thread, had, has)
            channels[channel] = yield from change
        return channels

    def _is_in_log(self, ref: Any) -> bool:
        """Whether a value is a list or dict in the log of its channel, or empty or absent."""
        if isinstance(ref, bytes):
            value = self.reader.codec.decode(ref)
            return type(value) in (list, dict) and not value
        return ref is None or ref[0] in (LIST, DICT)

    def _compare_ranges(
        self, thread_id: str, thread: Thread, key: int, old: Ranges, new: Ranges, most: int
    ) -> Flow[ChannelDifference]:
        gone = yield from self.reader.read_origins(
            thread_id, thread, key, lacking(old, merge_ranges(new))
        )
        come = yield from self.reader.read_origins(
            thread_id, thread, key, lacking(new, merge_ranges(old))
        )
        both = {*gone} & {*come}  # they stand elsewhere
        gone, come = ([at for at in places if at not in both] for places in (gone, come))
        parts = []
        for places in (come, gone):
            shown = join_ranges((at, at + 1) for at in places[max(0, len(places) - most) :])
            log = yield from self.reader.load_items(thread_id, thread, key, shown)
            parts.append(
                dict(
                    zip(
                        iter_positions(shown),
                        self.reader.codec.decode_all(log.items_in(shown)),
                        strict=True,
                    )
                )
            )
        return ChannelDifference(parts[0], parts[1], len(come), len(gone), whole=False)

    def _compare_transcripts(
        self,
        thread_id: str,
        thread: Thread,
        channel: str,
        old: Snapshot | None,
        new: Snapshot,
        most: int,
    ) -> Flow[ChannelDifference]:
        """Compare the values that were written to a channel up to each checkpoint.

        An item is reported as removed only if its write does not precede the new checkpoint.
        """
        key, later = new.transcript.get(channel, (0, []))
        old_key, earlier = old.transcript.get(channel, (0, [])) if old else (0, [])
        return (
            yield from self._compare_ranges(thread_id, thread, key or old_key, earlier, later, most)
        )

    def _compare_values(
        self, thread_id: str, thread: Thread, had: Any, has: Any
    ) -> Flow[ChannelDifference]:
        parts = []
        for ref in (has, had):
            values = {}
            if ref is not None:
                values[_WHOLE_VALUE] = yield from self.reader.read_value(thread_id, thread, ref)
            parts.append(values)
        added, removed = parts
        return ChannelDifference(added, removed, len(added), len(removed), whole=True)


def _has_unknown_value(ref: Any) -> bool:
    """Return whether a reference belongs to a `DeltaChannel` with an unknown value."""
    return ref is not None and value_reference(ref) is None


def _nodes_with_new_versions(old: Snapshot | None, new: Snapshot) -> list[str]:
    """The nodes that have seen other versions at a checkpoint than at one before it."""
    before = old.versions_seen if old else {}
    nodes = (node for node, versions in new.versions_seen.items() if versions != before.get(node))
    return [node for node in nodes if not node.startswith("__")]

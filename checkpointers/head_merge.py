"""Merge a new checkpoint with the head of its namespace, and parse and build channel versions.

`merge_planner` plans the merges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from perdure.checkpointers.cache import Snapshot

_EPOCH_BITS: Final = 32
"""The number of low bits of a channel version. The low bits count writes to the channel. The high
bits, called the epoch, count merges. A version of a new epoch is higher than any version that a run
can assign without having read the merged value."""
_ROUTING_PREFIXES: Final = ("__", "branch:to:", "join:")
"""The name prefixes of channels that only route a run."""


@dataclass(slots=True)
class Merge:
    """Describes how a new checkpoint is merged with the head of its namespace.

    In a merge, the values of some channels are copied from the head to the new checkpoint, and the
    head becomes the parent of the new checkpoint.

    Attributes:
        head: The head before the put.
        versions: The channels whose values are copied from the head, with the versions that they
            have in the new checkpoint. For a state update, these are all channels of the head that
            the update has not written.
        written: For a state update, the channels that the update has written. None for a run's
            checkpoint.
        keeps_head: If the put cannot be merged, the checkpoint that is the head after the put. None
            if the put is merged.
    """

    head: Snapshot
    versions: dict[str, Any]
    written: Collection[str] | None = None
    keeps_head: Snapshot | None = None

    def copy_head_channels_into(self, snapshot: Snapshot) -> None:
        """Copy each channel in `versions` from the head into the new checkpoint `snapshot`.

        The head becomes the parent of the new checkpoint. If the head and the new checkpoint cannot
        be merged, neither of them is changed.
        """
        head, written = self.head, self.written
        if self.keeps_head is not None:
            return
        snapshot.parent_id = head.checkpoint_id
        snapshot.channel_versions = dict(snapshot.channel_versions)
        if written is not None:
            snapshot.references = {c: ref for c, ref in snapshot.references.items() if c in written}
            snapshot.ranges = {
                c: value_ranges for c, value_ranges in snapshot.ranges.items() if c in written
            }
            own = {c: version for c, version in snapshot.channel_versions.items() if c in written}
            snapshot.channel_versions = {**head.channel_versions, **own}
            snapshot.versions_seen = head.versions_seen
            snapshot.transcript |= {
                c: transcript for c, transcript in head.transcript.items() if c not in written
            }
        for channel in self.versions:
            copy_channel(snapshot, head, channel)
        snapshot.versions_seen = {
            node: {
                c: self._get_version_seen_after_merge(snapshot, c, version)
                for c, version in seen.items()
            }
            for node, seen in snapshot.versions_seen.items()
        }
        snapshot.channel_versions |= self.versions

    def _get_version_seen_after_merge(
        self, snapshot: Snapshot, channel: str, version_seen_before: Any
    ) -> Any:
        """Return the channel version to store in a node's `versions_seen` after a merge.

        If a node has seen the channel's latest version, the node also counts as having seen the
        merged version. With an older version in `versions_seen`, LangGraph would run the node again
        for the merged value.
        """
        is_newest = version_seen_before == snapshot.channel_versions.get(channel)
        return self.versions.get(channel, version_seen_before) if is_newest else version_seen_before


def copy_channel(target: Snapshot, source: Snapshot, channel: str) -> None:
    """Copy a channel's value and transcript from one checkpoint to another."""
    target.ranges.pop(channel, None)
    if channel in source.references:
        target.inherit_channel(channel, source)
    if channel in source.transcript:
        target.transcript[channel] = source.transcript[channel]


def is_state_channel(channel: str) -> bool:
    """Return whether a channel is part of the graph's state. Other channels only route a run."""
    return not channel.startswith(_ROUTING_PREFIXES)


# -- versions


def find_max_merge_epoch_of_versions(channel_versions: Iterable[Any]) -> int | None:
    """Return the highest merge epoch of the given channel versions.

    The merge epoch is stored in the high bits of a channel version. Merging a channel increases the
    channel's merge epoch.

    Returns:
        The epoch, or None if the versions are of different kinds or of a kind without epochs.
    """
    values = [*channel_versions]
    epochs = [extract_merge_epoch_from_version_bits(version) for version in values]
    if None in epochs or len({type(version) for version in values}) > 1:
        return None
    return max((epoch for epoch in epochs if epoch is not None), default=0)


def extract_merge_epoch_from_version_bits(channel_version: Any) -> int | None:
    """Return the merge epoch in a channel version, or None if the version is not a number.

    A channel version is a number, or a string that contains a number, such as `"007.25"`. The merge
    epoch is stored in the high bits of a channel version. Merging a channel increases the channel's
    merge epoch.
    """
    whole = parse_whole_part_of_version(channel_version)
    return None if whole is None else whole >> _EPOCH_BITS


def parse_whole_part_of_version(version: Any) -> int | None:
    """Return the integer part of a channel version, or None if the version has none.

    Channel versions are ordered by their integer parts. The fractional part of a channel version is
    random or zero.

    >>> [parse_whole_part_of_version(version) for version in (7, "007.25", "x")]
    [7, 7, None]
    """
    if isinstance(version, bool):
        return None
    if isinstance(version, int | float):
        return int(version)
    digits = version.partition(".")[0] if isinstance(version, str) else ""
    return int(digits) if digits.isdecimal() else None


def build_lowest_channel_version_of_merge_epoch(example_version: Any, merge_epoch: int) -> Any:
    """Return the lowest channel version of a merge epoch, in the format of `example_version`.

    >>> [build_lowest_channel_version_of_merge_epoch(version, 1) for version in (7, "007.25")]
    [4294967296, '4294967296.25']
    """
    first = merge_epoch << _EPOCH_BITS
    if not isinstance(example_version, str):
        return type(example_version)(first)
    digits, dot, rest = example_version.partition(".")
    return f"{first:0{len(digits)}d}{dot}{rest}"

"""What a put takes over from the head when it is merged with it; see `merge_planner`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from perdure.checkpointers.cache import Snapshot

_EPOCH_BITS: Final = 32  # low bits of a version, which count writes; the others count merges
_ROUTING_PREFIXES: Final = ("__", "branch:to:", "join:")
"""The beginnings of the names of channels that route a run."""


@dataclass(slots=True)
class Merge:
    """What a put takes over from the head of its namespace, which becomes its parent.

    Attributes:
        head: The head before the put.
        versions: The channels to take over, with the versions that they get.
        written: Of an update, the channels that it has written; everything else is the head's.
        keeps_head: If nothing can be merged, the checkpoint that is the head after the put.
    """

    head: Snapshot
    versions: dict[str, Any]
    written: Collection[str] | None = None
    keeps_head: Snapshot | None = None

    def apply(self, snapshot: Snapshot) -> None:
        """Give a planned checkpoint the channels to take over."""
        head, written = self.head, self.written
        if self.keeps_head is not None:
            return
        snapshot.parent_id = head.checkpoint_id
        snapshot.channel_versions = dict(snapshot.channel_versions)
        if written is not None:
            snapshot.references = {c: ref for c, ref in snapshot.references.items() if c in written}
            snapshot.ranges = {c: held for c, held in snapshot.ranges.items() if c in written}
            own = {c: version for c, version in snapshot.channel_versions.items() if c in written}
            snapshot.channel_versions = {**head.channel_versions, **own}
            snapshot.versions_seen = head.versions_seen
            snapshot.transcript |= {
                c: said for c, said in head.transcript.items() if c not in written
            }
        for channel in self.versions:
            take_channel(snapshot, head, channel)
        snapshot.versions_seen = {
            node: {c: self._seen_version(snapshot, c, version) for c, version in seen.items()}
            for node, seen in snapshot.versions_seen.items()
        }
        snapshot.channel_versions |= self.versions

    def _seen_version(self, snapshot: Snapshot, channel: str, version: Any) -> Any:
        """Return the version that a node has seen, so that no merge triggers the node."""
        is_newest = version == snapshot.channel_versions.get(channel)
        return self.versions.get(channel, version) if is_newest else version


def take_channel(snapshot: Snapshot, other: Snapshot, channel: str) -> None:
    """Give a checkpoint the value and the history that a channel has in another one."""
    snapshot.ranges.pop(channel, None)
    if channel in other.references:
        snapshot.inherit_channel(channel, other)
    if channel in other.transcript:
        snapshot.transcript[channel] = other.transcript[channel]


def is_state(channel: str) -> bool:
    """Return whether a channel is part of the state, and does not route a run."""
    return not channel.startswith(_ROUTING_PREFIXES)


# -- versions


def last_epoch(versions: Iterable[Any]) -> int | None:
    """Return the last epoch of versions; None if they are not all of one kind that has epochs."""
    values = [*versions]
    epochs = [epoch_of(version) for version in values]
    if None in epochs or len({type(version) for version in values}) > 1:
        return None
    return max((epoch for epoch in epochs if epoch is not None), default=0)


def epoch_of(version: Any) -> int | None:
    """Return the number of merges before a version was given; None if its kind has no epochs."""
    whole = whole_part(version)
    return None if whole is None else whole >> _EPOCH_BITS


def whole_part(version: Any) -> int | None:
    """Return the whole part of a version, by which versions are ordered, or None.

    The rest of a version is random or zero.

    >>> whole_part(7), whole_part("007.25"), whole_part("x")
    (7, 7, None)
    """
    if isinstance(version, bool):
        return None
    if isinstance(version, int | float):
        return int(version)
    digits = version.partition(".")[0] if isinstance(version, str) else ""
    return int(digits) if digits.isdecimal() else None


def first_of(version: Any, epoch: int) -> Any:
    """Return the first version of an epoch, in the form of another version.

    >>> first_of(7, 1), first_of("007.25", 1)
    (4294967296, '4294967296.25')
    """
    first = epoch << _EPOCH_BITS
    if not isinstance(version, str):
        return type(version)(first)
    digits, dot, rest = version.partition(".")
    return f"{first:0{len(digits)}d}{dot}{rest}"

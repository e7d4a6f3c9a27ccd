"""What is asked to be stored, encoded once: a checkpoint, or what a task wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from langgraph.checkpoint.base import WRITES_IDX_MAP, ChannelVersions, Checkpoint
from langgraph.checkpoint.serde.types import ERROR

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Snapshot, Thread, Write, log_at_hand
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.split import Encoded, Node, encoded, held, here

_OWN_FIELDS: Final = {"id", "channel_values", "channel_versions", "versions_seen"}


@dataclass(slots=True)
class CheckpointPut:
    """A checkpoint to store.

    Attributes:
        at: The address of its parent.
        new_versions: The channels that changed since.
        deliberate: Whether its parent was read by its id: to go on from just there.
        fields: As they are stored: what of the checkpoint is neither channels nor its id, and the
            metadata.
        rests_on: Key and generation of the thread whose items it refers to, if it is known.
    """

    at: Address
    checkpoint: Checkpoint
    metadata: dict[str, Any]
    new_versions: ChannelVersions
    deliberate: bool = False
    fields: list[bytes] = field(default_factory=list)
    rests_on: tuple[int, int] | None = None
    _values: dict[str, Any] = field(default_factory=dict)
    _versions: dict[str, Any] = field(default_factory=dict)
    _seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    _encoded: dict[str, Encoded] = field(default_factory=dict)
    _here: dict[str, Any] = field(default_factory=dict)

    def encode(self, codec: Codec, thread: Thread | None) -> None:
        """Encode it as it is now: a graph may change its values before they are stored.

        Raises:
            Unstorable: A value cannot be stored.
        """
        checkpoint = self.checkpoint
        self._values = dict(checkpoint["channel_values"])
        self._versions = dict(checkpoint["channel_versions"])
        self._seen = {node: dict(seen) for node, seen in checkpoint["versions_seen"].items()}
        self.encode_tasks(codec, thread)
        for channel in self._values:
            changed = channel in self.new_versions or self.at.checkpoint_id is None
            if changed and not channel.startswith("__"):
                self._held(codec, channel)
        other = {k: v for k, v in checkpoint.items() if k not in _OWN_FIELDS}
        self.fields = [
            codec.encode(other, lambda: "checkpoint"),
            codec.encode(self.metadata, lambda: "metadata", exact=True),  # some of it is users' ids
        ]

    def encode_tasks(self, codec: Codec, thread: Thread | None) -> None:
        """Encode tasks and inputs on their way, which are no history."""
        for channel, value in self._values.items():
            if channel.startswith("__"):
                path = f"channel_values[{channel!r}]"
                self._here[channel] = here(codec, thread, channel, value, path)
        self.rests_on = (thread.key, thread.generation) if thread is not None else None

    def _held(self, codec: Codec, channel: str) -> Encoded:
        """A channel's value. If it did not change it is needed only if the parent is gone."""
        found = self._encoded.get(channel)
        if found is None:
            path = f"channel_values[{channel!r}]"
            found = self._encoded[channel] = encoded(codec, self._values[channel], path)
        return found

    def nodes(
        self, codec: Codec, thread: Thread, parent: Snapshot | None
    ) -> dict[str, Node | None]:
        """The values of channels against the logs of the thread; None: it is as in the parent."""
        versions, changed = self._versions, self.new_versions
        out: dict[str, Node | None] = {}
        for channel in self._values:
            kept = channel not in changed and channel in versions
            if kept and parent is not None and parent.holds(channel, versions[channel]):
                out[channel] = None
            elif channel in self._here:
                out[channel] = self._here[channel]
            else:
                hint = parent.ranges.get(channel, (0, []))[1] if parent is not None else []
                log, path = log_at_hand(thread, channel), f"channel_values[{channel!r}]"
                out[channel] = held(codec, log, self._held(codec, channel), hint, path)
        return out

    def snapshot(self) -> Snapshot:
        """The checkpoint, without the values of its channels."""
        uid, step, fields = self.checkpoint["id"], self.metadata.get("step"), [*self.fields]
        made = Snapshot(uid, 0, self.at.checkpoint_id, 0, fields, self._versions, self._seen)
        made.step = step if type(step) is int else None
        return made


@dataclass(slots=True)
class TaskWrites:
    """What a task wrote at the checkpoint of an address.

    Attributes:
        encoded: The writes as they are stored.
        rests_on: Key and generation of the thread whose items they refer to, if it is known.
    """

    at: Address
    task: str
    path: str
    writes: Sequence[tuple[str, Any]]
    encoded: list[Write] = field(default_factory=list)
    rests_on: tuple[int, int] | None = None

    def encode(self, codec: Codec, thread: Thread | None) -> None:
        """Encode the writes; they may refer to what is in the logs of the thread.

        Raises:
            Unstorable: A value cannot be stored.
        """
        out: dict[int, Write] = {}
        for i, (channel, value) in enumerate(self.writes):
            index = WRITES_IDX_MAP.get(channel, i)
            if channel == ERROR and isinstance(value, BaseException):
                value = repr(value)  # as langgraph's savers store what a task raised
            ref = here(codec, thread, channel, value, f"the write to {channel!r}")
            out[index] = [index, channel, ref]
        self.encoded = list(out.values())
        self.rests_on = (thread.key, thread.generation) if thread is not None else None

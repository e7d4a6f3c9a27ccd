"""What a langgraph `DeltaChannel` is rebuilt from: the writes on the way to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from langgraph.checkpoint.base import DeltaChannelHistory, PendingWrite

from perdure.checkpointers.base import Address
from perdure.checkpointers.reading import Found, Reader
from perdure.storage.flow import Flow


def delta_history(
    sql: dict[str, str], reader: Reader, at: Address, channels: Sequence[str]
) -> Flow[Mapping[str, DeltaChannelHistory]]:
    """Walk from a checkpoint's parent to the nearest stored value of each channel.

    Contract: `BaseCheckpointSaver.get_delta_channel_history`.
    """
    writes: dict[str, list[list[PendingWrite]]] = {channel: [] for channel in channels}
    seeds: dict[str, object] = {}
    target = (yield from reader.find(at)) if channels else None
    uid = target.snapshot.parent if target else None
    remaining = set(channels)
    while target and uid and remaining:
        snapshot = yield from reader.snapshot(at.thread_id, at.checkpoint_ns, target.line, uid)
        if snapshot is None:
            break
        here = Found(target.thread, target.line, snapshot)
        found = yield from reader.writes(here, at.checkpoint_ns, frozenset(remaining))
        for channel in remaining:
            writes[channel].append(
                [(task, c, value) for _, task, c, value in found if c == channel]
            )
        for channel in remaining & snapshot.refs.keys():
            seeds[channel] = yield from reader.value(target.thread, snapshot.refs[channel])
        remaining -= snapshot.refs.keys()
        uid = snapshot.parent
    out: dict[str, DeltaChannelHistory] = {}
    for channel in channels:
        out[channel] = {"writes": [w for step in reversed(writes[channel]) for w in step]}
        if channel in seeds:
            out[channel]["seed"] = seeds[channel]
    return out

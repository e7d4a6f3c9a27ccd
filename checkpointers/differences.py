"""What changed in the state between checkpoints: a flow that reads only what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Snapshot, Thread
from perdure.checkpointers.manifest import DICT, LIST, Ranges, covered, joined, positions
from perdure.checkpointers.manifest import missing as lacking
from perdure.checkpointers.reader import Reader
from perdure.checkpointers.reports import ChannelDifference, StateDifference
from perdure.checkpointers.threads import missing
from perdure.storage.flow import Flow

_WHOLE: Final = -1  # in place of a position


class Differences:
    """The flows that compare checkpoints."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def of(
        self, at: Address, pairs: Sequence[tuple[str | None, str]], most: int
    ) -> Flow[list[StateDifference]]:
        """See `Checkpointer.differences`."""
        found = yield from self.reader.find(at)
        if found is None:
            raise missing(at)
        known: dict[str | None, Snapshot | None] = {None: None}
        for uid in {uid for pair in pairs for uid in pair} - {None}:
            parts = at.thread_id, at.checkpoint_ns, found.namespace, str(uid)
            known[uid] = yield from self.reader.snapshot(*parts)
        out = []
        for old, new in pairs:
            after = known[new]
            if after is None:
                raise missing(at._replace(checkpoint_id=new))
            between = self._between(at.thread_id, found.thread, known[old], after, most)
            out.append((yield from between))
        return out

    def _between(
        self, thread_id: str, thread: Thread, old: Snapshot | None, new: Snapshot, most: int
    ) -> Flow[StateDifference]:
        before: Mapping[str, Any] = old.refs if old else {}
        channels = {}
        for channel in dict.fromkeys([*before, *new.refs]):
            had, has = before.get(channel), new.refs.get(channel)
            if had == has:
                continue
            log = next((ref[1] for ref in (has, had) if isinstance(ref, list)), None)
            if log is not None and self._in_log(had) and self._in_log(has):
                ranges = [
                    each.ranges.get(channel, (0, []))[1] if each else [] for each in (old, new)
                ]
                change = self._of_log(thread_id, thread, log, ranges[0], ranges[1], most)
            else:
                change = self._of_value(thread_id, thread, had, has)
            channels[channel] = yield from change
        seen = old.seen if old else {}
        ran = tuple(
            node
            for node, versions in new.seen.items()
            if not node.startswith("__") and versions != seen.get(node)
        )
        return StateDifference(ran, channels)

    def _in_log(self, ref: Any) -> bool:
        """Whether a value is a list or dict in the log of its channel, or empty or absent."""
        if isinstance(ref, bytes):
            value = self.reader.codec.decode(ref)
            return type(value) in (list, dict) and not value
        return ref is None or ref[0] in (LIST, DICT)

    def _of_log(
        self, thread_id: str, thread: Thread, key: int, old: Ranges, new: Ranges, most: int
    ) -> Flow[ChannelDifference]:
        gone = yield from self.reader.origins(thread_id, thread, key, lacking(old, covered(new)))
        come = yield from self.reader.origins(thread_id, thread, key, lacking(new, covered(old)))
        both = {*gone} & {*come}  # they stand elsewhere
        gone, come = ([at for at in each if at not in both] for each in (gone, come))
        parts = []
        for each in (come, gone):
            shown = joined((at, at + 1) for at in each[max(0, len(each) - most) :])
            log = yield from self.reader.load(thread_id, thread, key, shown)
            parts.append(
                dict(zip(positions(shown), self.reader.codec.values(log.full(shown)), strict=True))
            )
        return ChannelDifference(parts[0], parts[1], len(come), len(gone), whole=False)

    def _of_value(
        self, thread_id: str, thread: Thread, had: Any, has: Any
    ) -> Flow[ChannelDifference]:
        parts = []
        for ref in (has, had):
            values = {}
            if ref is not None:
                values[_WHOLE] = yield from self.reader.value(thread_id, thread, ref)
            parts.append(values)
        added, removed = parts
        return ChannelDifference(added, removed, len(added), len(removed), whole=True)

"""Keep an update of the state together with the run during which it was made.

LangGraph's `update_state` reads a checkpoint and puts a new one upon it. If a run goes on from the
same checkpoint, the two would be branches of each other. They are merged instead, if no channel
was written by both: the put that comes second takes over the channels that the other has written.
A channel that routes the run, its tasks and `versions_seen` are always those of the run.

The run itself does not notice. It goes on with the state that it has in memory, which lacks what
the update wrote. Its next puts are recognised by the versions of their channels: a merge gives the
channels that it takes over a version that no run reaches which has not read them. Their names are
in the metadata of the checkpoint, under `MERGED`, until a put has read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final
from uuid import uuid4

from langgraph.checkpoint.serde.types import ERROR, INTERRUPT

from perdure.checkpointers.cache import Head, Snapshot, Thread
from perdure.checkpointers.labels import MERGED, find_updated
from perdure.checkpointers.manifest import DELTA, SNAPSHOT
from perdure.checkpointers.merge import Merge, epoch_of, first_of, is_state, last_epoch, whole_part
from perdure.checkpointers.put import START, CheckpointPut, TaskWrites
from perdure.checkpointers.reader import CheckpointReader, StoredCheckpoint
from perdure.checkpointers.records import (
    VIEWS_NAMESPACE,
    decrypt_writes,
    encrypt_checkpoint,
    encrypt_writes,
    pack_id,
    transcript_to_store,
)
from perdure.checkpointers.status import ASIDE, NULL_TASK, is_by_update
from perdure.storage.flow import Flow, Row

_MOST_STEPS: Final = 64  # checkpoints from the head back to the parent of a put that are read
_STOPS: Final = (ERROR, INTERRUPT)
_ANCHOR_STEP: Final = -2
"""The step of the empty checkpoint at which the first run of a thread stores its writes to
`DeltaChannel`s if the durability is `exit`."""
_LOW: Final = 0xFFFFFFFF  # the part of a checkpoint's key that is its sequence number
_NOTHING: Final = Snapshot("", 0, None, 0, [], {}, {})
"""What a put without a parent is put upon."""


class MergePlanner:
    """Plans merges in the transaction of a put.

    Args:
        reader: Reads checkpoints.
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

    def plan(self, put: CheckpointPut, parent: Snapshot | None) -> Flow[Merge | None]:
        """Return what a put takes over from the head, or None if it is stored as it is.

        Args:
            put: The put.
            parent: The checkpoint upon which it is put; None if it has none.
        """
        source, now = put.metadata.get("source"), self._head.snapshot
        if now is None or put.config is None or put.deliberate or source == "fork":
            return None
        if self._ns == VIEWS_NAMESPACE:
            return None
        if parent is None and put.at.checkpoint_id is not None:
            return (yield from self._plan_upon_pruned(put, now, put.at.checkpoint_id))
        if parent is not None and parent.checkpoint_id == now.checkpoint_id:
            merged = self._merged_in(now)
            return (yield from self._plan_next(put, now, merged)) if merged else None
        upon = _NOTHING if parent is None else parent
        if source == "update":
            is_one = yield from self._leads_to_head(upon, {"loop", "input", "update"})
            return self._plan_update(put, now, upon) if is_one else None
        is_anchor = parent is None and put.metadata.get("step") == _ANCHOR_STEP
        if is_anchor and any(_is_delta(ref) for ref in now.references.values()):
            return None  # the run may have written the channel, too
        is_run = is_anchor or source in ("loop", "input")
        if is_run and (yield from self._leads_to_head(upon, {"update"})):
            return self._plan_run(put, now, upon)
        return None

    def _plan_upon_pruned(self, put: CheckpointPut, now: Snapshot, uid: str) -> Flow[Merge | None]:
        """Plan a put whose parent, the last checkpoint that its run had put or read, was pruned.

        So the head was put by an update of the pruned checkpoint or by a later run.
        """
        upon = _infer_pruned(put, now, uid)
        if put.metadata.get("source") == "update":
            return self._plan_update(put, now, upon) if _is_same_turn(now, upon) else None
        if put.metadata.get("source") not in ("loop", "input"):
            return None
        merge = None
        if (yield from self._leads_to_head(upon, {"update"})):
            merge = self._plan_run(put, now, upon)
        if merge is not None or put.metadata.get("source") == "input" or put.is_whole_run:
            return merge
        return Merge(now, {}, keeps_head=now)

    def _plan_next(
        self, put: CheckpointPut, now: Snapshot, merged: Collection[str]
    ) -> Flow[Merge | None]:
        """Plan a put upon a head that has taken over channels."""
        unread = {channel for channel in merged if not _has_read(put, channel, now)}
        if any(channel in put.new_versions for channel in unread):
            if self._reader.step(now) == _ANCHOR_STEP:
                return None  # the run takes the head, as it does without an anchor
            return Merge(now, {}, keeps_head=(yield from self._last_update(now, unread)))
        return self._take_over(put, now, unread) if unread else None

    def _plan_run(self, put: CheckpointPut, now: Snapshot, upon: Snapshot) -> Merge | None:
        """Plan a put of a run upon whose last checkpoint an update was put meanwhile."""
        unread = {c for c in self._merged_in(upon) if not _has_read(put, c, upon)}
        written = {c for c in _written_since(now, upon) if c in now.references}
        versions = put.checkpoint["channel_versions"]
        is_written = {
            c
            for c in unread | written
            if c in put.new_versions
            or (c not in unread and versions.get(c) != upon.channel_versions.get(c))
        }
        return None if is_written else self._take_over(put, now, unread | written)

    def _plan_update(self, put: CheckpointPut, now: Snapshot, upon: Snapshot) -> Merge | None:
        """Plan an update upon a checkpoint from which a run has gone on meanwhile."""
        written = {c for c in put.new_versions if is_state(c) and has_value(put, c)}
        both = written & _written_since(now, upon)
        if not all(_has_only_new_epoch(channel, now, upon) for channel in both):
            return None
        if written.intersection(put.deltas, now.stored_channels()):
            return None  # langgraph would not find the writes of the update behind that value
        codec, step = self._reader.codec, self._reader.step(now)
        fields = {**codec.decode(now.encoded_fields[0]), "ts": put.checkpoint["ts"]}
        put.fields[0] = codec.encode(fields, lambda: "checkpoint")
        if step is not None:
            self._set_metadata(put, "step", step + 1)
        rest = {c: version for c, version in now.channel_versions.items() if c not in written}
        return Merge(now, rest, written)

    def _take_over(
        self, put: CheckpointPut, now: Snapshot, channels: Iterable[str]
    ) -> Merge | None:
        """Plan to take over channels of the head; None if their versions cannot be told apart."""
        own = last_epoch(put.checkpoint["channel_versions"].values())
        last = last_epoch(
            [*put.checkpoint["channel_versions"].values(), *now.channel_versions.values()]
        )
        if own is None or last is None:
            return None
        versions = {}
        for channel in channels:
            version = now.channel_versions[channel]
            is_newer = (epoch_of(version) or 0) > own
            versions[channel] = version if is_newer else first_of(version, last + 1)
        if versions:
            self._set_metadata(put, MERGED, sorted(versions))
        return Merge(now, versions)

    def _set_metadata(self, put: CheckpointPut, name: str, value: Any) -> None:
        put.metadata = {**put.metadata, name: value}
        put.fields[1] = self._reader.codec.encode(put.metadata, lambda: "metadata", exact=True)

    def finish(self, merge: Merge, head: Head) -> Flow[bool]:
        """Store what follows from a merge once its checkpoint is stored.

        An update that came after a task of the run had stopped does not keep the head.

        Args:
            merge: The merge.
            head: The head after the put.

        Returns:
            Whether a checkpoint has other content now.
        """
        self._head, reader = head, self._reader
        if merge.keeps_head is not None and not self._ns:
            (row,) = yield reader.sql("checkpoint_row", merge.keeps_head.key)
            yield from reader.retell(self._thread_id, row)
        if merge.written is None:
            return False
        return (yield from self.fold(merge.head.checkpoint_id, needs_stop=True))

    def fold(self, uid: str, *, needs_stop: bool) -> Flow[bool]:
        """Make the checkpoint of a run the head, with what the update has written that is it now.

        A task of the run has stopped there, with a question or an error. The run puts no further
        checkpoint, which could take over what the update has written.

        Args:
            uid: The id of the run's checkpoint.
            needs_stop: Whether to check that a task has stopped at that checkpoint.

        Returns:
            Whether it is done. It is not if the run's checkpoint is the head, or if something else
            than an update came between.
        """
        now = self._head.snapshot
        if now is None or now.checkpoint_id == uid:
            return False
        run = yield from self._read(uid)
        if run is None or not (yield from self._leads_to_head(run, {"update"})):
            return False
        if needs_stop and not (yield from self._has_stopped_task(run)):
            return False
        last = last_epoch([*run.channel_versions.values(), *now.channel_versions.values()])
        if last is None:
            return False
        written = [c for c in _written_since(now, run) if c in now.references]
        merged, parent = {*written, *self._merged_in(run)}, run.parent_id
        Merge(now, {c: first_of(now.channel_versions[c], last + 1) for c in written}).apply(run)
        run.parent_id, run.run_started_at, codec = parent, None, self._reader.codec
        metadata = self._reader.metadata(run) | {MERGED: sorted(merged)}
        run.encoded_fields[1] = codec.encode(metadata, lambda: "metadata", exact=True)
        yield from self._rewrite(run)
        return True

    def _has_stopped_task(self, run: Snapshot) -> Flow[bool]:
        """Return whether a task of a checkpoint waits for an answer, or has failed."""
        stored = StoredCheckpoint(self._thread, self._head.namespace_key, run)
        for row in (yield from self._reader.read_write_rows(stored)):
            writes = decrypt_writes(self._reader.seal, self._thread_id, self._ns, row)
            has_finished = any(index >= 0 for index, _, _ in writes)  # perhaps after an answer
            if not has_finished and any(channel in _STOPS for _, channel, _ in writes):
                return True
        return False

    def _rewrite(self, run: Snapshot) -> Flow[None]:
        """Store a checkpoint anew, and make it the head."""
        reader, at = self._reader, (self._thread_id, self._ns)
        (row,) = yield reader.sql("checkpoint_row", run.key)
        body = encrypt_checkpoint(reader.seal, *at, row, run, transcript_to_store(run))
        yield [
            reader.sql("rewrite_checkpoint", body, run.key),
            reader.sql("set_explicit_head", run.key & _LOW, self._head.namespace_key),
            reader.sql("mark_rows_removed", self._thread.key),
        ]
        if not self._ns:
            yield from reader.retell(self._thread_id, (*row[:5], body))

    def is_merged(self, head: Head | None) -> bool:
        """Return whether a head has taken over channels that no put has read.

        Such a head is not kept in memory, so that each put upon it is planned with a planner.
        """
        snapshot = None if head is None else head.snapshot
        return snapshot is not None and bool(self._merged_in(snapshot))

    # -- checkpoints of the namespace

    def _read(self, uid: str) -> Flow[Snapshot | None]:
        rows = yield self._reader.sql("find_checkpoint", self._head.namespace_key, pack_id(uid))
        if not rows:
            return None
        snapshot = self._reader.open_row(self._thread_id, self._ns, rows[0])
        yield from self._reader.resolve(self._thread_id, self._thread, snapshot)
        return snapshot

    def _leads_to_head(self, upon: Snapshot, sources: Collection[str]) -> Flow[bool]:
        """Return whether only checkpoints of these sources lead from one to the head."""
        at = self._head.snapshot
        for _ in range(_MOST_STEPS):
            metadata = {} if at is None else self._reader.metadata(at)
            if at is None or metadata.get("source") not in sources:
                return False
            before = at.parent_id
            updated = find_updated(before, metadata) if "update" in sources else None
            if upon.checkpoint_id in (before or "", updated):
                return True
            at = (yield from self._read(before)) if before else None
            if at is None and updated != before:
                at = yield from self._read(updated or "")
        return False

    def _last_update(self, now: Snapshot, channels: Collection[str]) -> Flow[Snapshot]:
        """Return the update whose channels the head has taken over, or else the head."""
        at: Snapshot | None = now
        for _ in range(_MOST_STEPS):
            if at is None or not self._merged_in(at):
                break
            at = (yield from self._read(at.parent_id)) if at.parent_id else None
        if at is None or self._reader.metadata(at).get("source") != "update":
            return now
        return at if all(at.references.get(c) == now.references.get(c) for c in channels) else now

    def _merged_in(self, snapshot: Snapshot) -> list[str]:
        """Return the channels of a checkpoint that it has taken over, and no put has read."""
        names = self._reader.labels(snapshot).get(MERGED) if snapshot.encoded_fields else None
        return (
            [c for c in names if c in snapshot.channel_versions] if isinstance(names, list) else []
        )


def has_value(put: CheckpointPut, channel: str) -> bool:
    """Return whether a channel has a value, or writes from which its value is rebuilt."""
    return channel in put.checkpoint["channel_values"] or channel in put.deltas


def _has_read(put: CheckpointPut, channel: str, upon: Snapshot) -> bool:
    """Return whether the run of a put has read a channel that was taken over."""
    version, taken = put.checkpoint["channel_versions"].get(channel), upon.channel_versions[channel]
    if channel in put.new_versions:
        return (epoch_of(version) or 0) >= (epoch_of(taken) or 0)
    return bool(version == taken)


def _written_since(now: Snapshot, upon: Snapshot) -> set[str]:
    """Return the channels of the state that have another version than in an earlier checkpoint."""
    versions = now.channel_versions.items()
    return {c for c, version in versions if is_state(c) and version != upon.channel_versions.get(c)}


def _infer_pruned(put: CheckpointPut, now: Snapshot, uid: str) -> Snapshot:
    """Infer the channel versions of a pruned checkpoint from the put that has it as its parent.

    If the put has not written a channel, the channel has the version that the run has read. If the
    put has written it, the new version is higher than all versions that the run has read. So if the
    version in the head is lower than all new versions, it is still that of the pruned checkpoint.
    If not, the channel was written after that checkpoint, and its version there is unknown.
    """
    versions: dict[str, Any] = dict(put.checkpoint["channel_versions"])
    first = min(put.new_versions.values(), key=lambda version: whole_part(version) or 0, default=0)
    for channel in put.new_versions:
        versions.pop(channel, None)
        if _is_lower(now.channel_versions.get(channel), first):
            versions[channel] = now.channel_versions[channel]
    return Snapshot(uid, 0, None, 0, [], versions, {})


def _is_same_turn(now: Snapshot, upon: Snapshot) -> bool:
    """Return whether a head can descend from a checkpoint with no other input between the two."""
    for channel, version in upon.channel_versions.items():
        present = now.channel_versions.get(channel)
        if present != version and not _is_lower(version, present):
            return False
    return bool(now.channel_versions.get(START) == upon.channel_versions.get(START))


def _is_lower(version: Any, other: Any) -> bool:
    """Return whether a version is lower than another one, compared by their whole parts."""
    own, others = whole_part(version), whole_part(other)
    return own is not None and others is not None and own < others


def _is_delta(ref: Any) -> bool:
    """Return whether a reference is that of a `DeltaChannel`, with or without a snapshot."""
    return isinstance(ref, list) and ref[0] in (DELTA, SNAPSHOT)


def _has_only_new_epoch(channel: str, now: Snapshot, upon: Snapshot) -> bool:
    """Return whether the version of a channel differs because of a merge, and not of a write.

    The run may also have written an equal value. The version that it gave to the channel can be
    the same as the version of a concurrent update.
    """
    before, after = (
        epoch_of(upon.channel_versions.get(channel)),
        epoch_of(now.channel_versions[channel]),
    )
    is_same = now.references.get(channel) == upon.references.get(channel)
    return is_same and (after or 0) > (before or 0)


# -- pending writes


def fold_update(
    reader: CheckpointReader, request: TaskWrites, thread: Thread, row: Row
) -> Flow[bool]:
    """Make the checkpoint of a stopped task the head if an update is; see `MergePlanner.fold`.

    A write of another task after that shows that the run was still under way during the update.

    Args:
        reader: Reads checkpoints.
        request: The writes of a task at the checkpoint, which are stored.
        thread: The thread as the transaction has read it.
        row: The key of the namespace, the number `Head.pinned`, and the key of the head.
    """
    at, (namespace, pinned, key) = request.at, row
    if request.deliberate or request.task == NULL_TASK or is_by_update(request.path):
        return False  # a person writes, and no run that goes on
    rows = yield reader.sql("checkpoint_row", key)
    snapshot = reader.open_row(*at[:2], rows[0]) if rows else None
    if snapshot is None or snapshot.checkpoint_id == at.checkpoint_id:
        return False
    yield from reader.resolve(at.thread_id, thread, snapshot)
    now = Head(namespace, pinned, snapshot)
    planner = MergePlanner(reader, at.thread_id, at.checkpoint_ns, thread, now)
    return (yield from planner.fold(at.checkpoint_id or "", needs_stop=not request.stops))


def set_writes_apart(
    reader: CheckpointReader, request: TaskWrites, namespace: int, before: Row
) -> Flow[tuple[str, str]]:
    """Keep apart what a task of a run writes and what an update wrote in the name of that task.

    What the update wrote is stored under the id of no task.

    Args:
        reader: Reads and seals rows.
        request: What is written now.
        namespace: The key of the namespace.
        before: The path and the body of what is stored under the id of the task.

    Returns:
        The id and the path under which the present writes are stored.
    """
    aside, (path, body) = str(uuid4()), before
    if is_by_update(request.path):
        return aside, request.path + ASIDE
    uid = pack_id(request.at.checkpoint_id)
    row = uid, pack_id(request.task), path, body
    stored = decrypt_writes(reader.seal, *request.at[:2], row)
    sealed = encrypt_writes(reader.seal, (*request.at, aside, path + ASIDE), stored)
    yield reader.sql("put_writes", namespace, uid, pack_id(aside), path + ASIDE, sealed)
    return request.task, request.path

"""Writes of checkpoints and pending writes: flows within one transaction of the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Cache, Pending, Snapshot, Thread, Write, keep
from perdure.checkpointers.log import Appender
from perdure.checkpointers.manifest import (
    DICT,
    DICT_HERE,
    ITEM,
    LIST,
    LIST_HERE,
    flat,
    joined,
)
from perdure.checkpointers.messages import CLASSES
from perdure.checkpointers.planner import PlannedPut, PlannedWrites
from perdure.checkpointers.reader import Reader
from perdure.checkpointers.records import (
    LABELS,
    labels_in,
    open_writes,
    pack_id,
    place,
    seal_checkpoint,
    seal_writes,
    tags_of,
    unpack_id,
    written_said,
)
from perdure.storage.flow import Flow, Hope, Last, Row, Statement, Unexpected

ACTIVITY_S: Final = 0.1  # how exactly a thread's last activity is known
_LOW: Final = 0xFFFFFFFF
_BEGINNINGS: Final = {"input", "update", "fork"}  # metadata sources; langgraph's CheckpointMetadata
_MESSAGES: Final = {bytes((code,)) for code in CLASSES}
_HERE: Final = {LIST_HERE: LIST, DICT_HERE: DICT}
_log = logging.getLogger("perdure")


class Stale(Exception):
    """A plan rests on what is not there, deleted meanwhile perhaps: plan again, from nothing."""


@dataclass(slots=True)
class Written:
    """The state that a flow found and wrote; the cache takes it after the commit.

    Attributes:
        at: The thread and namespace.
        known: What is kept of the thread, if it is true still.
        head: Of the namespace: key, began and packed id.
        existing: The key of the checkpoint, if it was put before.
        branch: Whether it is a branch that nobody asked for.
        writes: Of a task, by its checkpoint and id.
    """

    at: Address
    now: float
    known: Thread | None
    key: int
    seq: int
    generation: int
    updated_at: float
    namespace: int
    pinned: int
    head: tuple[int | None, int | None, bytes | str | None]
    existing: int | None
    snapshot: Snapshot | None = None
    branch: bool = False
    appender: Appender | None = None
    writes: tuple[str, str, Pending] | None = None

    def take_over(self, cache: Cache) -> None:
        """Keep what was written, and say if it is a branch nobody asked for."""
        ns = self.at.checkpoint_ns
        thread = cache.thread(self.at.thread_id, self.key, self.generation)
        state = self.key, self.seq, self.generation, self.updated_at, self.namespace, self.pinned
        if self.snapshot is not None or ns not in thread.states:
            keep(thread.states, ns, (*state, *self.head, None))
        if self.appender is not None:
            self.appender.take_over(thread, self.seq)
        if self.snapshot is not None:
            keep(thread.recent, (ns, self.snapshot.uid), self.snapshot)
            thread.pending.pop((ns, self.snapshot.parent or ""), None)
        if self.writes is not None:
            uid, task, pending = self.writes
            keep(thread.pending, (ns, uid), {**thread.pending.get((ns, uid), {}), task: pending})
        if self.branch and self.snapshot is not None:
            _log.info(
                "thread %r: a run went on after a later one began; its checkpoint %s is a branch",
                self.at.thread_id,
                self.snapshot.uid,
            )


class Writer:
    """The flows that write."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.cache = reader, reader.cache
        self.sql, self.seal = reader.sql, reader.seal

    def job(self, plan: PlannedPut | PlannedWrites) -> Callable[[], Flow[Written]]:
        """Makes the flow that stores what was planned.

        What is known of the thread is taken for what the first statement will answer, and the
        flow is run so far here, in the caller's thread: then the thread that commits has next to
        nothing to do in Python, and the database is asked once. If the thread is not as it was
        known, the flow begins anew (docs/decisions/0013).
        """

        def make() -> Flow[Written]:
            return self.put(plan) if isinstance(plan, PlannedPut) else self.put_writes(plan)

        state = self._state(plan.at)
        if state is None:
            return make
        ahead: list[Flow[Written]] = [make()]
        try:
            first = ahead[0].send(None)
            then = ahead[0].send([state])
        except Stale:
            return make
        last = Last if isinstance(plan, PlannedPut) else list
        if state[4] is None or state[-1] is not None or not isinstance(then, last):
            return make  # it makes a namespace, or replaces a checkpoint, or has more to ask
        hope = Hope([self._check(plan, first, then, state), *then])

        def hopeful() -> Flow[Written]:
            if not ahead:
                return (yield from make())
            if isinstance(plan, PlannedPut) and self._state(plan.at) != state:
                return (yield from self.job(plan)())  # another put of the thread came between
            flow = ahead.pop()
            try:
                yield hope
            except Unexpected:
                return (yield from make())
            try:
                flow.send([[(1,)]])
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            raise AssertionError("a flow went on after its last request")

        return hopeful

    def _check(
        self, plan: PlannedPut | PlannedWrites, first: Any, then: list[Statement], state: Row
    ) -> Statement:
        """The statement that fails if the thread is not in a state in which `then` is right."""
        # the last activity decides nothing, and an id goes with its key
        key, seq, generation, _, namespace, pinned, head, began, *_ = state
        if isinstance(plan, PlannedPut):
            at = key, seq, generation, namespace, pinned, head or 0, began or 0
            return self.sql("unchanged", *first.params, *at)
        # pending writes do not mind which checkpoints come meanwhile
        then[0] = Statement(self.sql["new_writes"], then[0].params)
        return self.sql("known", plan.at.thread_id, key, generation, namespace)

    def _state(self, at: Address) -> Row | None:
        """What `state` would answer, as far as is known."""
        thread = self.cache.peek(at.thread_id)
        state = thread.states.get(at.checkpoint_ns) if thread is not None else None
        if thread is None or state is None:
            return None
        newest = max(thread.states.copy().values(), key=itemgetter(1))  # of any namespace
        key, _, generation, _, *rest = state
        return key, newest[1], generation, newest[3], *rest

    # -- a checkpoint

    def put(self, plan: PlannedPut) -> Flow[Written]:
        """Store a checkpoint; the head moves to it unless a run that began later has it."""
        out = yield from self._begin(plan, plan.snapshot.uid)
        uid = plan.at.checkpoint_id
        parent = None if uid is None else (yield from self._parent(out, uid))
        plan = self._labelled(plan, parent)
        snapshot = out.snapshot = replace(plan.snapshot, refs={}, ranges={}, said={})
        appender = out.appender = Appender(
            self.sql, self.seal, plan.at.thread_id, out.key, out.seq, out.known
        )
        yield from appender.prepare(plan.nodes)
        _fill(snapshot, plan, parent, appender)
        statements = appender.statements()
        if out.existing is None:
            statements += self._added(out, plan, snapshot, parent)
        else:
            statements += yield from self._replaced(out, snapshot)
        tags = [(number, snapshot.key) for number in tags_of(self.seal, plan.metadata)]
        if tags:
            statements.append(Statement(self.sql["add_tag"], tags, many=True))
        if out.known is not None and uid is not None:
            pending = out.known.pending.get((plan.at.checkpoint_ns, uid), {})
            for task, (path, writes, body) in pending.items():
                referring = [_referring(appender, snapshot, write) for write in writes]
                if referring != writes:
                    row = pack_id(uid), pack_id(task), path
                    sealed = seal_writes(self.seal, *plan.at[:2], row, referring)
                    statements.append(
                        self.sql("refer_writes", sealed, out.namespace, *row[:2], body)
                    )
        yield Last(statements)
        return out

    def _begin(self, plan: PlannedPut | PlannedWrites, uid: str | None) -> Flow[Written]:
        """The thread and namespace as they are; new ones if need be."""
        now, thread_id, ns = time.time(), plan.at.thread_id, plan.at.checkpoint_ns
        state = self.sql("state", pack_id(uid), ns, thread_id)
        rows = yield state
        if not rows:
            yield self.sql("new_thread", thread_id, now, now)
            rows = yield state
        key, seq, generation, updated_at, namespace, pinned, *head, existing = rows[0]
        if plan.rests_on not in (None, (key, generation)):
            raise Stale
        if namespace is None:
            pinned = 0
            ((namespace,),) = yield self.sql("new_namespace", key, ns)
        known = self._known(thread_id, key, generation)
        found = key, seq, generation, updated_at, namespace, pinned, tuple(head), existing
        return Written(plan.at, now, known, *found)

    def _known(self, thread_id: str, key: int, generation: int) -> Thread | None:
        """What is kept of a thread in this state."""
        known = self.cache.peek(thread_id)
        return known if known and (known.key, known.generation) == (key, generation) else None

    def _parent(self, out: Written, uid: str) -> Flow[Snapshot | None]:
        """The parent: kept, or read."""
        at = out.at
        found = out.known.recent.get((at.checkpoint_ns, uid)) if out.known is not None else None
        if found is None:
            found = yield from self.reader.snapshot(*at[:2], out.namespace, uid)
            if out.known is None:  # what was read now is kept; it may be of a later state already
                out.known = self._known(at.thread_id, out.key, out.generation)
        return found

    def _labelled(self, plan: PlannedPut, parent: Snapshot | None) -> PlannedPut:
        """The plan with the labels that its parent's metadata has and its own lacks."""
        inherited = self.reader.labels(parent) if parent and not plan.at.checkpoint_ns else {}
        names = sorted({*inherited, *labels_in(plan.metadata)})
        if not names:
            plan.snapshot.labels = {}
            return plan
        metadata = {**inherited, **plan.metadata, LABELS: names}
        fields = [plan.snapshot.fields[0], self.reader.codec.encode(metadata, lambda: "metadata")]
        labels = {name: metadata[name] for name in names}
        snapshot = replace(plan.snapshot, fields=fields, labels=labels)
        return replace(plan, snapshot=snapshot, metadata=metadata)

    def _added(
        self, out: Written, plan: PlannedPut, snapshot: Snapshot, parent: Snapshot | None
    ) -> list[Statement]:
        """A new checkpoint: its row, the head, and the thread's counters."""
        out.seq += 1
        snapshot.key = place(out.namespace, out.seq)
        snapshot.began = out.seq
        if parent is not None and not self._begins(out, plan, parent):
            snapshot.began = parent.began
        key, uid, *at, body = self._row(out, snapshot)
        statements = [self.sql("add_checkpoint", key, out.namespace, uid, *at, body)]
        pinned = out.pinned
        if _takes_head(out, snapshot):
            out.head = snapshot.key, snapshot.began, uid
            out.pinned = 0
        elif not pinned and out.head[0] is not None:  # else it is where it was
            out.branch = True
            out.pinned = out.head[0] & _LOW
        if out.pinned != pinned:
            statements.append(self.sql("pin", out.pinned, out.namespace))
        statements.append(self.sql("advance", out.seq, out.key))
        return statements + self._touched(out)

    def _touched(self, out: Written) -> list[Statement]:
        """The thread's last activity, to a tenth of a second: its index is written seldom."""
        if out.now - out.updated_at <= ACTIVITY_S:
            return []
        out.updated_at = out.now
        return [self.sql("touch", out.now, out.key)]

    def _begins(self, out: Written, plan: PlannedPut, parent: Snapshot) -> bool:
        """Whether a put begins something, rather than going on with what its parent began.

        It does if it is an input, an update or a fork, skips steps (durability `exit` writes a
        whole run at once), or goes on from a checkpoint read by its id that is not the head.
        """
        if plan.metadata.get("source") in _BEGINNINGS:
            return True
        if plan.deliberate and out.head[0] != parent.key:
            return True
        step, before = plan.snapshot.step, self.reader.step(parent)
        return step is not None and before is not None and step != before + 1

    def _replaced(self, out: Written, snapshot: Snapshot) -> Flow[list[Statement]]:
        """The same checkpoint, put once more, in the place it has."""
        (row,) = yield self.sql("checkpoint_at", out.existing)
        before = self.reader.open_row(*out.at[:2], row)
        snapshot.key, snapshot.began = before.key, before.began
        key, _, parent, _, _, body = self._row(out, snapshot)
        out.generation += 1
        old = tags_of(self.seal, self.reader.metadata(before))
        return [
            *(self.sql("drop_tag", number, key) for number in old),
            self.sql("replace_checkpoint", parent, out.now, body, key),
            self.sql("removed", out.key),
            *self._touched(out),
        ]

    def _row(self, out: Written, snapshot: Snapshot) -> Row:
        """`(id, uid, parent, began, put_at, body)`."""
        uid, parent = pack_id(snapshot.uid), pack_id(snapshot.parent)
        row, said = (snapshot.key, uid, parent, snapshot.began, out.now), written_said(snapshot)
        return *row, seal_checkpoint(self.seal, *out.at[:2], row, snapshot, said)

    def rewind(self, at: Address) -> Flow[bool]:
        """Move the head to a checkpoint. Returns whether there is such a checkpoint."""
        uid = pack_id(at.checkpoint_id)
        rows = yield self.sql("checkpoint_of", uid, at.thread_id, at.checkpoint_ns)
        if rows:
            yield self.sql("pin", rows[0][3] & _LOW, rows[0][2])
        return bool(rows)

    # -- pending writes

    def put_writes(self, plan: PlannedWrites) -> Flow[Written]:
        """Store what a task wrote, for its checkpoint, which may not be there yet."""
        out = yield from self._begin(plan, None)
        row = (pack_id(plan.at.checkpoint_id or ""), pack_id(plan.task), plan.path)
        writes, body = plan.writes, seal_writes(self.seal, *plan.at[:2], row, plan.writes)
        add = self.sql("add_writes", out.namespace, *row, body)
        added, *_ = yield [add, *self._touched(out)]
        if not added:
            ((path, stored),) = yield self.sql("find_writes", out.namespace, *row[:2])
            before = open_writes(self.seal, *plan.at[:2], (*row[:2], path, stored))
            merged = {write[0]: write for write in before}
            for write in plan.writes:
                if write[0] < 0 or write[0] not in merged:  # the special ones are replaced
                    merged[write[0]] = write
            writes = [merged[i] for i in sorted(merged)]
            body = seal_writes(self.seal, *plan.at[:2], row, writes)
            yield self.sql("put_writes", out.namespace, *row, body)
        if not added or any(map(_may_be_in_a_log, writes)):
            out.writes = plan.at.checkpoint_id or "", plan.task, (plan.path, writes, body)
        return out


def _fill(
    snapshot: Snapshot, plan: PlannedPut, parent: Snapshot | None, appender: Appender
) -> None:
    """Give a checkpoint its channels: what was planned, and what is as in the parent."""
    if parent is not None:
        snapshot.said.update(parent.said)
    for channel, node in plan.nodes.items():
        if node is not None:
            snapshot.refs[channel] = appender.resolve(channel, node, snapshot, parent)
        elif parent is None or not parent.holds(channel, snapshot.versions[channel]):
            raise Stale
        else:
            snapshot.take(channel, parent)
    if parent is not None:
        for channel, version in snapshot.versions.items():
            # a graph that does not know a channel carries its version on, not its value
            if channel not in snapshot.refs and parent.holds(channel, version):
                snapshot.take(channel, parent)


def _takes_head(out: Written, snapshot: Snapshot) -> bool:
    """Whether a new checkpoint becomes the head: the later beginning has it (0005)."""
    key, began, packed = out.head
    uid = unpack_id(packed)
    if key is None or snapshot.parent == uid or snapshot.began == out.seq:
        return True
    return (snapshot.began, snapshot.uid) > (began or 0, uid or "")


def _may_be_in_a_log(write: Write) -> bool:
    """Whether the next checkpoint may hold items of a write."""
    ref = write[2]
    return ref[:1] in _MESSAGES if isinstance(ref, bytes) else ref[0] in _HERE


def _referring(appender: Appender, snapshot: Snapshot, write: Write) -> Write:
    """A write that led to a checkpoint, pointing into the log where that holds all of it."""
    index, channel, ref = write
    held = snapshot.ranges.get(channel)
    if held is None:
        return write
    if isinstance(ref, bytes):
        position = appender.placed.get((channel, ref))
        return write if position is None else [index, channel, [ITEM, held[0], position]]
    ranges = []
    for element in ref[1] if ref[0] in _HERE else [b""]:
        if not isinstance(element, bytes):
            ranges.append((element[1], element[1] + element[2]))
            continue
        position = appender.placed.get((channel, element))
        if position is None:
            return write
        ranges.append((position, position + 1))
    return [index, channel, [_HERE[ref[0]], held[0], flat(joined(ranges))]]

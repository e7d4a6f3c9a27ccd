"""Putting checkpoints and writes: flows that run within one transaction of the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perdure.checkpointers.address import Address
from perdure.checkpointers.cache import Cache, Pending, Snapshot, Thread, Write
from perdure.checkpointers.items import Items
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
    checkpoint_place,
    pack_id,
    pack_snapshot,
    pack_writes,
    place,
    tags_of,
    unpack_id,
    unpack_writes,
    writes_place,
)
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Row, Statement

ACTIVITY_S: Final = 0.1  # how exactly a thread's last activity is known
_LOW: Final = 0xFFFFFFFF
_log = logging.getLogger("perdure")


def _same_state(found: Row, known: Row) -> bool:
    """Whether two answers of the statement `state` are the same, the last activity apart."""
    return found[:3] == known[:3] and found[4:] == known[4:]


class Stale(Exception):
    """A plan rests on what is not there, deleted meanwhile perhaps: plan again, from nothing."""


@dataclass(slots=True)
class Written:
    """What a flow found and wrote, for the cache to take over once it is committed."""

    thread_id: str
    ns: str
    key: int
    seq: int
    generation: int
    updated_at: float
    namespace: int
    pinned: int
    known: Thread | None
    head: tuple[int | None, int | None, bytes | str | None]  # key, began, packed id
    existing: int | None = None
    snapshot: Snapshot | None = None
    branch_of: str | None = None
    appender: Appender | None = None
    writes: tuple[str, str, Pending] | None = None  # of a task, by its checkpoint and id

    def take_over(self, cache: Cache) -> None:
        """Keep what was written, and say if it is a branch nobody asked for."""
        thread = cache.thread(self.thread_id, self.key, self.generation)
        state = self.key, self.seq, self.generation, self.updated_at, self.namespace, self.pinned
        thread.remember_state(self.ns, (*state, *self.head, None))
        if self.appender is not None:
            self.appender.take_over(thread, self.seq)
        if self.snapshot is not None:
            thread.remember(self.ns, self.snapshot)
            thread.pending.pop((self.ns, self.snapshot.parent or ""), None)
        if self.writes is not None:
            thread.remember_writes(self.ns, *self.writes)
        if self.branch_of is not None:
            _log.info(
                "thread %r: a run went on after a later one began; its checkpoint %s is a branch",
                self.thread_id,
                self.branch_of,
            )


@dataclass(slots=True)
class Writer:
    """The flows that write.

    Args:
        sql: The statements, by name.
        seal: Encrypts what is written.
        cache: What is kept of threads.
        items: Encodes items.
        reader: The flows that read.
    """

    sql: dict[str, str]
    seal: Seal
    cache: Cache
    items: Items
    reader: Reader

    def job(self, plan: PlannedPut | PlannedWrites) -> Callable[[], Flow[Written]]:
        """Makes the flow that stores what was planned.

        What is known of the thread is taken for what the first statement will answer, and the
        flow is run so far here, in the caller's thread: then the thread that commits has next to
        nothing to do in Python but to see that the answer is that one. If it is not, the flow
        begins anew.
        """

        def make() -> Flow[Written]:
            return self.put(plan) if isinstance(plan, PlannedPut) else self.put_writes(plan)

        thread = self.cache.peek(plan.thread_id)
        state = thread.states.get(plan.ns) if thread is not None else None
        if state is None:
            return make
        ahead: list[Flow[Written]] = [make()]
        try:
            first = ahead[0].send(None)
            then = ahead[0].send([state])
        except Stale:
            return make

        def verified() -> Flow[Written]:
            if not ahead:
                return (yield from make())
            flow = ahead.pop()
            rows = yield first
            if not rows or not _same_state(rows[0], state):
                return (yield from make())
            request = then
            try:
                while True:
                    request = flow.send((yield request))
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]

        return verified

    # -- a checkpoint

    def put(self, plan: PlannedPut) -> Flow[Written]:
        """Store a checkpoint; the head moves to it unless a run that began later has it.

        Raises:
            Stale: Something the plan rests on was deleted.
        """
        now = time.time()
        out = yield from self._begin(plan.thread_id, plan.ns, plan.uid)
        if plan.rests_on is not None and plan.rests_on != (out.key, out.generation):
            raise Stale
        parent = yield from self._parent(out, plan.parent)
        snapshot = Snapshot(
            plan.uid, 0, plan.parent, 0, plan.fields, plan.versions, plan.seen, {}, {}, {}
        )
        snapshot.step = plan.step
        appender = out.appender = Appender(
            self.sql, self.seal, self.items, plan.thread_id, out.key, out.seq, out.known
        )
        yield from appender.prepare(plan.nodes)
        self._fill(snapshot, plan, parent, appender)
        statements = appender.statements()
        if out.existing is None:
            statements += self._added(out, plan, snapshot, parent, now)
        else:
            statements += yield from self._replaced(out, plan, snapshot, now)
        tags = [(number, snapshot.key) for number in tags_of(self.seal, plan.metadata)]
        if tags:
            statements.append(Statement(self.sql["add_tag"], tags, many=True))
        if out.known is not None and plan.parent is not None:
            statements += self._refer_writes(out, plan.parent, snapshot)
        yield statements
        out.snapshot = snapshot
        return out

    def _fill(
        self, snapshot: Snapshot, plan: PlannedPut, parent: Snapshot | None, appender: Appender
    ) -> None:
        """Give a checkpoint its channels: what was planned, and what is as in the parent."""
        if parent is not None:
            snapshot.said.update(parent.said)
        for channel, node in plan.nodes.items():
            if node is not None:
                snapshot.refs[channel] = appender.resolve(channel, node, snapshot, parent)
            elif parent is None or not parent.holds(channel, plan.versions[channel]):
                raise Stale
            else:
                snapshot.take(channel, parent)
        if parent is not None:
            for channel, version in plan.versions.items():
                # a graph that does not know a channel carries its version on, not its value
                if channel not in snapshot.refs and parent.holds(channel, version):
                    snapshot.take(channel, parent)

    def _begin(self, thread_id: str, ns: str, uid: str | None) -> Flow[Written]:
        """The thread and namespace as they are; new ones if need be."""
        params = (pack_id(uid), ns, thread_id)
        rows = yield Statement(self.sql["state"], params)
        if not rows:
            now = time.time()
            yield Statement(self.sql["new_thread"], (thread_id, now, now))
            rows = yield Statement(self.sql["state"], params)
        thread, seq, generation, updated_at, namespace, pinned, *head, existing = rows[0]
        if namespace is None:
            pinned = 0
            ((namespace,),) = yield Statement(self.sql["new_namespace"], (thread, ns))
        known = self.cache.peek(thread_id)
        if known is None or (known.key, known.generation) != (thread, generation):
            known = None
        at = thread, seq, generation, updated_at, namespace, pinned
        return Written(thread_id, ns, *at, known, tuple(head), existing)

    def _parent(self, out: Written, uid: str | None) -> Flow[Snapshot | None]:
        """The parent: kept, or read."""
        if uid is None:
            return None
        found = out.known.recent.get((out.ns, uid)) if out.known is not None else None
        if found is None:
            found = yield from self.reader.snapshot(out.thread_id, out.ns, out.namespace, uid)
            if out.known is None:
                out.known = self.cache.peek(out.thread_id)
        return found

    def _added(
        self,
        out: Written,
        plan: PlannedPut,
        snapshot: Snapshot,
        parent: Snapshot | None,
        now: float,
    ) -> list[Statement]:
        """A new checkpoint: its row, the head, and the thread's counters."""
        out.seq += 1
        snapshot.key = place(out.namespace, out.seq)
        snapshot.began = (
            out.seq if self._begins(out, plan, parent) or parent is None else parent.began
        )
        key, *at = row = self._row(plan, snapshot, now)
        body, uid = self._sealed(plan, snapshot, row), row[1]
        params = (key, out.namespace, *at, body)
        statements = [Statement(self.sql["add_checkpoint"], params)]
        if self._takes_head(out, snapshot):
            out.head = snapshot.key, snapshot.began, uid
            if out.pinned:
                out.pinned = 0
                statements.append(Statement(self.sql["pin"], (0, out.namespace)))
        else:
            if not out.pinned and out.head[0] is not None:  # else it is where it was
                out.branch_of = plan.uid
                out.pinned = out.head[0] & _LOW
                statements.append(Statement(self.sql["pin"], (out.pinned, out.namespace)))
        statements.append(Statement(self.sql["advance"], (out.seq, out.key)))
        return statements + self._touched(out, now)

    def _touched(self, out: Written, now: float) -> list[Statement]:
        """The thread's last activity, to a tenth of a second: its index is written seldom."""
        if now - out.updated_at <= ACTIVITY_S:
            return []
        out.updated_at = now
        return [Statement(self.sql["touch"], (now, out.key))]

    def _begins(self, out: Written, plan: PlannedPut, parent: Snapshot | None) -> bool:
        """Whether a put begins something, rather than going on with what its parent began.

        Design: a put begins something if it is an input, an update or a fork, has no parent, skips
        steps (durability `exit` writes a whole run at once), or goes on from a checkpoint that was
        read by its id and is not the head.
        """
        if parent is None or plan.begins:
            return True
        if plan.deliberate and out.head[0] != parent.key:
            return True
        before = self.reader.step(parent)
        return plan.step is not None and before is not None and plan.step != before + 1

    def _takes_head(self, out: Written, snapshot: Snapshot) -> bool:
        """Whether a new checkpoint becomes the head: the later beginning has it."""
        key, began, packed = out.head
        uid = unpack_id(packed)
        if key is None or snapshot.parent == uid or snapshot.began == out.seq:
            return True
        return (snapshot.began, snapshot.uid) > (began or 0, uid or "")

    def _replaced(
        self, out: Written, plan: PlannedPut, snapshot: Snapshot, now: float
    ) -> Flow[list[Statement]]:
        """The same checkpoint, put once more, in the place it has."""
        assert out.existing is not None
        row = (yield Statement(self.sql["checkpoint_at"], (out.existing,)))[0]
        before = self.reader.open_row(plan.thread_id, plan.ns, row)
        snapshot.key, snapshot.began = before.key, before.began
        replaced = self._row(plan, snapshot, now)
        params = (replaced[2], now, self._sealed(plan, snapshot, replaced), snapshot.key)
        statements = [
            Statement(self.sql["drop_tag"], (number, snapshot.key))
            for number in tags_of(self.seal, self.reader.metadata(before))
        ]
        statements.append(Statement(self.sql["replace_checkpoint"], params))
        statements.append(Statement(self.sql["removed"], (out.key,)))
        out.generation += 1
        return statements + self._touched(out, now)

    def _row(self, plan: PlannedPut, snapshot: Snapshot, now: float) -> Row:
        return snapshot.key, pack_id(plan.uid), pack_id(plan.parent), snapshot.began, now

    def _sealed(self, plan: PlannedPut, snapshot: Snapshot, row: Row) -> bytes:
        bound = checkpoint_place(plan.thread_id, plan.ns, row)
        return self.seal.seal(pack_snapshot(snapshot), bound)

    def rewind(self, at: Address) -> Flow[bool]:
        """Move the head to a checkpoint. Returns whether there is such a checkpoint."""
        params = (pack_id(at.checkpoint_id), at.thread_id, at.checkpoint_ns)
        rows = yield Statement(self.sql["checkpoint_of"], params)
        if rows:
            yield Statement(self.sql["pin"], (rows[0][3] & _LOW, rows[0][2]))
        return bool(rows)

    # -- pending writes

    def put_writes(self, plan: PlannedWrites) -> Flow[Written]:
        """Store what a task wrote, for its checkpoint, which may not be there yet.

        Raises:
            Stale: Something the plan rests on was deleted.
        """
        now = time.time()
        out = yield from self._begin(plan.thread_id, plan.ns, None)
        if plan.rests_on is not None and plan.rests_on != (out.key, out.generation):
            raise Stale
        row = (plan.thread_id, plan.ns, plan.uid, plan.task)
        bound = writes_place(*row, plan.path)
        body = self.seal.seal(pack_writes(plan.writes), bound)
        at = out.namespace, pack_id(plan.uid), pack_id(plan.task)
        added, *_ = yield [
            Statement(self.sql["add_writes"], (*at, plan.path, body)),
            *self._touched(out, now),
        ]
        if added:
            if any(map(_may_be_in_a_log, plan.writes)):
                out.writes = plan.uid, plan.task, (plan.path, plan.writes, body)
            return out
        ((path, stored),) = yield Statement(self.sql["find_writes"], at)
        had = unpack_writes(self.seal.open(stored, writes_place(*row, path)))
        merged = {write[0]: write for write in had}
        for write in plan.writes:
            if write[0] < 0 or write[0] not in merged:  # the special ones are replaced
                merged[write[0]] = write
        writes = [merged[i] for i in sorted(merged)]
        sealed = self.seal.seal(pack_writes(writes), bound)
        yield Statement(self.sql["put_writes"], (*at, plan.path, sealed))
        out.writes = plan.uid, plan.task, (plan.path, writes, sealed)
        return out

    def _refer_writes(self, out: Written, uid: str, snapshot: Snapshot) -> list[Statement]:
        """Let the writes that led to a checkpoint point into the log where it holds them."""
        assert out.known is not None
        assert out.appender is not None
        statements = []
        for task, (path, writes, body) in out.known.pending.get((out.ns, uid), {}).items():
            referring = [self._referring(out.appender, snapshot, write) for write in writes]
            if all(new is write for new, write in zip(referring, writes, strict=True)):
                continue
            bound = writes_place(out.thread_id, out.ns, uid, task, path)
            sealed = self.seal.seal(pack_writes(referring), bound)
            params = (sealed, out.namespace, pack_id(uid), pack_id(task), body)
            statements.append(Statement(self.sql["refer_writes"], params))
        return statements

    def _referring(self, appender: Appender, snapshot: Snapshot, write: Write) -> Write:
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


def _may_be_in_a_log(write: Write) -> bool:
    """Whether the next checkpoint may hold items of a write."""
    ref = write[2]
    return ref[:1] in _MESSAGES if isinstance(ref, bytes) else ref[0] in _HERE


_MESSAGES: Final = {bytes((code,)) for code in CLASSES}
_HERE: Final = {LIST_HERE: LIST, DICT_HERE: DICT}

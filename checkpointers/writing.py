"""Putting checkpoints and writes: flows that run within one transaction of the writer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from perdure.checkpointers.base import Address
from perdure.checkpointers.log import Log, Written
from perdure.checkpointers.manifest import (
    said,
)
from perdure.checkpointers.memo import Memo, Snapshot
from perdure.checkpointers.plan import (
    Node,
    PlannedPut,
    PlannedWrites,
    known_ranges,
)
from perdure.checkpointers.reading import Reader
from perdure.checkpointers.records import (
    checkpoint_place,
    pack_id,
    pack_snapshot,
    pack_writes,
    tags_of,
    unpack_writes,
    writes_place,
)
from perdure.checkpointers.schema import place, span
from perdure.errors import ConcurrentUpdate
from perdure.storage.encryption import Seal
from perdure.storage.flow import Flow, Statement

ACTIVITY_S: Final = 0.1  # how exactly a thread's last activity is known


class Stale(Exception):
    """A plan rests on what is not there, deleted meanwhile perhaps: plan again, from nothing."""


@dataclass(slots=True)
class Writer:
    """The flows that write.

    Args:
        sql: The statements, by name.
        seal: Encrypts what is written.
        memo: What is remembered of threads.
        reader: The flows that read.
        log: The flows that append.
    """

    sql: dict[str, str]
    seal: Seal
    memo: Memo
    reader: Reader
    log: Log

    # -- a checkpoint

    def put(self, plan: PlannedPut) -> Flow[Written]:
        """Store a checkpoint and move the head to it, or leave it as a fork.

        Raises:
            Stale: Something the plan rests on was deleted.
            ConcurrentUpdate: Another run moved the head, and conflicts are errors.
        """
        now = time.time()
        out = yield from self._begin(plan.thread_id, plan.ns, now)
        planned = [node for node in plan.nodes.values() if node is not None]
        yield from self._verify(out, planned, plan.remembered)
        parent = yield from self._snapshot(out, plan.parent)
        moves = self._moves_head(plan, parent, out)
        out.forked = None if moves else plan.uid
        snapshot = yield from self._build(out, plan, parent)
        body = pack_snapshot(snapshot, (yield from self._written_said(out, snapshot)))
        yield from self._store(out, plan, snapshot, body, moves, now)
        return out

    def _begin(self, thread_id: str, ns: str, now: float) -> Flow[Written]:
        """The thread and namespace as they are; new ones if need be."""
        rows = yield Statement(self.sql["state"], (ns, thread_id))
        if not rows:
            yield Statement(self.sql["new_thread"], (thread_id, now, now))
            rows = yield Statement(self.sql["state"], (ns, thread_id))
        thread, seq, swept, updated_at, line, pinned, head = rows[0]
        if line is None:
            ((line,),) = yield Statement(self.sql["new_line"], (thread, ns))
        out = Written(thread_id, ns, thread, swept, line, head or 0, bool(pinned), seq)
        if now - updated_at > ACTIVITY_S:
            yield Statement(self.sql["touch"], (now, thread))
        known = self.memo.peek(thread_id)
        if known is not None and (known.key, known.swept) == (thread, swept):
            out.known = known
            out.lanes.update({lane.name: key for key, lane in list(known.lanes.items())})
        return out

    def _verify(
        self, out: Written, nodes: Iterable[Node], remembered: tuple[int, int] | None
    ) -> Flow[None]:
        """Make sure that what a plan takes to be stored is; a deletion may have come between."""
        thread = out.key
        if remembered is None or remembered == (thread, out.swept):
            return
        for node in nodes:
            for name, (start, stop) in known_ranges(node):
                if remembered[0] != thread:
                    raise Stale  # another thread by the same id: its log is another log
                rows = yield Statement(self.sql["find_lane"], (thread, name))
                if not rows:
                    raise Stale
                (counted,) = (
                    yield Statement(self.sql["count_between"], span(rows[0][0], start, stop))
                )[0]
                if counted != stop - start:
                    raise Stale

    def _snapshot(self, out: Written, uid: str | None) -> Flow[Snapshot | None]:
        """The parent: remembered, or read."""
        if uid is None:
            return None
        found = out.known.recent.get((out.ns, uid)) if out.known else None
        if found is not None:
            return found
        return (yield from self.reader.snapshot(out.thread_id, out.ns, out.line, uid))

    def _moves_head(self, plan: PlannedPut, parent: Snapshot | None, out: Written) -> bool:
        """Compare and swap on the parent: False leaves the checkpoint as the tip of a fork."""
        if not plan.contests or out.head == 0:
            return True
        if parent is not None and parent.key == place(out.line, out.head):
            return True
        if plan.on_conflict == "error":
            raise ConcurrentUpdate(
                f"thread {plan.thread_id!r}: another run moved its head on from checkpoint "
                f"{plan.parent!r} while this one was at work; run it again from the new head, or "
                "open the checkpointer with on_conflict='fork' or 'wait'"
            )
        return False

    def _build(self, out: Written, plan: PlannedPut, parent: Snapshot | None) -> Flow[Snapshot]:
        snapshot = Snapshot(
            plan.uid, 0, plan.parent, plan.fields, plan.versions, plan.seen, {}, {}, {}
        )
        for channel, node in plan.nodes.items():
            if node is not None:
                snapshot.refs[channel] = yield from self.log.resolve(out, node, snapshot, channel)
            elif parent is None or not parent.holds(channel, plan.versions[channel]):
                raise Stale
            else:
                snapshot.take(channel, parent)
        if parent is not None:
            for channel, version in plan.versions.items():
                # a graph that does not know a channel carries its version on, not its value
                if channel not in snapshot.refs and parent.holds(channel, version):
                    snapshot.take(channel, parent)
            snapshot.said.update(parent.said)
        for channel, (lane, ranges) in snapshot.ranges.items():
            if channel.startswith("__"):
                continue  # langgraph's own: tasks on their way are not what was said
            before = snapshot.said.get(channel)
            former = before[1] if before is not None and before[0] == lane else []
            snapshot.said[channel] = (lane, said(former, ranges))
        return snapshot

    def _written_said(self, out: Written, snapshot: Snapshot) -> Flow[dict[str, Any]]:
        """What was said, where it differs from what the channel holds now."""
        result = {}
        for channel, (lane, ranges) in snapshot.said.items():
            if snapshot.ranges.get(channel) != (lane, ranges):
                result[channel] = [lane, (yield from self.log.written_ranges(out, ranges))]
        return result

    def _store(
        self,
        out: Written,
        plan: PlannedPut,
        snapshot: Snapshot,
        body: bytes,
        moves: bool,
        now: float,
    ) -> Flow[None]:
        key = snapshot.key = place(out.line, out.seq + 1)
        sealed = self._sealed(plan, key, body)
        uid, parent = pack_id(plan.uid), pack_id(plan.parent)
        values = (key, out.line, uid, parent, now, sealed)
        if (yield Statement(self.sql["add_checkpoint"], values)):
            out.seq += 1
            if moves is out.pinned:  # else the head is as it has to be: the newest, or where it was
                yield Statement(self.sql["pin"], (0 if moves else out.head, out.line))
            grown = (out.seq, 1, out.added, out.size + len(sealed), out.key)
        else:
            row = (yield Statement(self.sql["find_checkpoint"], (out.line, uid)))[0]
            key = snapshot.key = row[0]
            sealed = self._sealed(plan, key, body)
            yield from self._untag(plan, row)
            yield Statement(self.sql["replace_checkpoint"], (parent, now, sealed, key))
            yield Statement(self.sql["swept"], (0, 0, len(row[3]), out.key))
            out.swept += 1
            grown = (out.seq, 0, out.added, out.size + len(sealed), out.key)
        for number in tags_of(self.seal, plan.metadata):
            yield Statement(self.sql["add_tag"], (number, key))
        yield Statement(self.sql["grow"], grown)
        out.snapshot = snapshot

    def _sealed(self, plan: PlannedPut, key: int, body: bytes) -> bytes:
        bound = checkpoint_place(plan.thread_id, plan.ns, plan.uid, plan.parent, key)
        return self.seal.seal(body, bound)

    def _untag(self, plan: PlannedPut, row: tuple[Any, ...]) -> Flow[None]:
        former = self.reader.open_row(plan.thread_id, plan.ns, row)
        for number in tags_of(self.seal, self.reader.metadata(former)):
            yield Statement(self.sql["drop_tag"], (number, row[0]))

    def rewind(self, at: Address) -> Flow[bool]:
        """Move the head to a checkpoint. Returns whether there is such a checkpoint."""
        params = (pack_id(at.checkpoint_id), at.thread_id, at.checkpoint_ns)
        rows = yield Statement(self.sql["checkpoint_of"], params)
        if rows:
            yield Statement(self.sql["pin"], (rows[0][3] & 0xFFFFFFFF, rows[0][2]))
        return bool(rows)

    # -- pending writes

    def put_writes(self, plan: PlannedWrites) -> Flow[Written]:
        """Store what a task wrote, for its checkpoint, which may not be there yet.

        Raises:
            Stale: Something the plan rests on was deleted.
        """
        now = time.time()
        out = yield from self._begin(plan.thread_id, plan.ns, now)
        yield from self._verify(out, [node for _, _, node in plan.writes], plan.remembered)
        new: dict[int, list[Any]] = {}
        for index, channel, node in plan.writes:
            ref = yield from self.log.resolve(out, node, None, channel)
            new[index] = [index, channel, ref]
        size = yield from self._store_writes(out, plan, list(new.values()))
        yield Statement(self.sql["grow"], (out.seq, 0, out.added, out.size + size, out.key))
        return out

    def _store_writes(self, out: Written, plan: PlannedWrites, new: list[list[Any]]) -> Flow[int]:
        """Returns by how many bytes the row grew."""
        uid, task = pack_id(plan.uid), pack_id(plan.task)
        row = (plan.thread_id, plan.ns, plan.uid, plan.task)
        bound = writes_place(*row, plan.path)
        body = self.seal.seal(pack_writes(new), bound)
        if (yield Statement(self.sql["add_writes"], (out.line, uid, task, plan.path, body))):
            return len(body)
        path, stored = (yield Statement(self.sql["find_writes"], (out.line, uid, task)))[0]
        had = unpack_writes(self.seal.open(stored, writes_place(*row, path)))
        first, then = (had, new) if plan.replace else (new, had)
        merged = {write[0]: write for write in [*first, *then]}
        body = self.seal.seal(pack_writes([merged[i] for i in sorted(merged)]), bound)
        yield Statement(self.sql["put_writes"], (out.line, uid, task, plan.path, body))
        return len(body) - len(stored)

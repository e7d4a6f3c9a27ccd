"""Erasing messages: out of every checkpoint, history and pending write of a thread, for good.

One transaction: what is to go is found, everything that holds it is written anew without it, and
what nothing refers to any more is swept. The thread's `generation` moves, so that whoever keeps its
items reads them again. What counts as a quotation, and which tasks are cancelled: docs/erasure.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.types import INTERRUPT, RESUME, TASKS

from perdure.checkpointers.cache import Thread
from perdure.checkpointers.log import Appender
from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.reader import Reader
from perdure.checkpointers.records import (
    checkpoint_place,
    item_place,
    log_spans,
    pack_row,
    pack_writes,
    place,
    span,
    tags_of,
    unpack_id,
    unpack_writes,
    writes_place,
)
from perdure.checkpointers.removal import GONE, Remover, Where
from perdure.checkpointers.reports import ErasureReport
from perdure.checkpointers.rewriting import BLOCKS, PAGE, Rewriter
from perdure.errors import CorruptRecord, ForbiddenType
from perdure.storage.database import scrub_wanted
from perdure.storage.flow import Flow, Row, Statement

_NO_WRITES: Final = "__no_writes__"  # what langgraph stores for a task that wrote nothing
_NEXT: Final = "branch:to:"  # how langgraph names the channels that start a node
_SENT: Final = "~__pregel_push, {:010d}"  # and the path of the task that was sent at a place


@dataclass(slots=True)
class _Erasure:
    """One erasure under way.

    Attributes:
        to: Rewrites references.
        checkpoints: How many checkpoints changed.
        cancelled: The tasks of heads that will not run.
        sent: The tasks sent that quoted a message, by checkpoint and place, for one namespace.
        subgraphs: The namespaces of those that have run.
    """

    to: Rewriter
    checkpoints: int = 0
    cancelled: set[str] = field(default_factory=set)
    sent: dict[str, dict[int, str]] = field(default_factory=dict)
    subgraphs: tuple[str, ...] = ()


@dataclass(slots=True)
class Eraser:
    """The flows that erase.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
        maintenance: Sweeps up.
    """

    sql: dict[str, str]
    reader: Reader
    maintenance: Maintenance

    def erase(self, thread_id: str, message_ids: Collection[str]) -> Flow[ErasureReport]:
        """Take messages out of a thread; unknown ones are no error."""
        rows = yield Statement(self.sql["find_thread"], (thread_id,))
        if not rows:
            return ErasureReport()
        key, seq, generation = rows[0]
        thread = Thread(key, generation)
        seal, items = self.reader.seal, self.reader.items
        appender = Appender(self.sql, seal, items, thread_id, key, seq, thread)
        yield from appender.find_ends(())
        remover = Remover(frozenset(message_ids))
        to = Rewriter(self.sql, self.reader, appender, thread, remover)
        yield from to.begin(looking=True)
        yield from self._rewrite(_Erasure(to))
        if not to.found:
            return ErasureReport()
        yield from to.begin(looking=False)
        done = _Erasure(to)
        yield from self._rewrite(done)
        yield appender.statements()
        yield from self.maintenance.sweep(thread_id, key)
        yield Statement(self.sql["removed"], (key,))
        yield from scrub_wanted()
        hashes = sorted({self._hash(message) for message in remover.removed.values()})
        cancelled = tuple(sorted(done.cancelled))
        return ErasureReport(done.checkpoints, len(to.touched), tuple(hashes), cancelled)

    def erase_thread(self, thread_id: str) -> Flow[ErasureReport]:
        """Remove a whole thread; an unknown one is no error."""
        rows = yield Statement(self.sql["find_thread"], (thread_id,))
        if not rows:
            return ErasureReport()
        hashes: set[str] = set()
        for log, name, *last in (yield Statement(self.sql["thread_logs"], (rows[0][0],))):
            (_, end), _ = log_spans(*last)
            for start in range(0, end if name != BLOCKS else 0, PAGE):
                between = span(log, start, min(start + PAGE, end))
                for row in (yield Statement(self.sql["items_between"], between)):
                    hashes |= self._hash_of_item(thread_id, name, row)
        report = yield from self.maintenance.delete_thread(thread_id)
        yield from scrub_wanted()
        return ErasureReport(report.checkpoints, report.items, tuple(sorted(hashes)))

    def _hash_of_item(self, thread_id: str, log: str, row: Row) -> set[str]:
        """The hash of an item that is a message; what cannot be read is deleted all the same."""
        with suppress(CorruptRecord, ForbiddenType):
            bound = item_place(thread_id, log, row[0] & 0xFFFFFFFF)
            value = self.reader.items.codec.decode(self.reader.seal.open(row[1], bound))
            return {self._hash(value)} if isinstance(value, BaseMessage) else set()
        return set()

    def _hash(self, message: BaseMessage) -> str:
        """BLAKE2b-256 (RFC 7693) of a message's type, id and content, as JSON."""
        says = [message.type, message.id, message.content]
        text = json.dumps(says, ensure_ascii=False, separators=(",", ":"), default=repr)
        data = text.encode(errors="surrogatepass")
        return hashlib.blake2b(data, digest_size=32, key=self.reader.seal.hash_key).hexdigest()

    # -- everything that refers to items

    def _rewrite(self, done: _Erasure) -> Flow[None]:
        """Go over a whole thread."""
        to = done.to
        for namespace, ns, at in (yield Statement(self.sql["thread_namespaces"], (to.thread.key,))):
            to.sent = f"{ns}|".startswith(done.subgraphs)
            done.sent, head = {}, place(namespace, at)
            rows = yield Statement(self.sql["checkpoint_bodies"], span(namespace))
            uid = next((unpack_id(row[1]) for row in rows if row[0] == head), None)
            for row in rows:
                yield from self._checkpoint(done, ns, row, is_head=row[0] == head)
            for row in (yield Statement(self.sql["namespace_writes"], (namespace,))):
                yield from self._writes(done, namespace, ns, row, uid)
            done.cancelled |= {_task(ns, node) for node in done.sent.get(uid or "", {}).values()}

    def _checkpoint(self, done: _Erasure, ns: str, row: Row, *, is_head: bool) -> Flow[None]:
        to = done.to
        snapshot = self.reader.open_row(to.appender.thread_id, ns, row)
        to.awaited = False
        other, metadata = snapshot.fields
        fields = [to.inline(other, Where()), to.inline(metadata, Where(tasks=True))]
        fields = [to.encoded({}) if stored is GONE else stored for stored in fields]
        refs = {}
        for channel, ref in snapshot.refs.items():
            if channel == TASKS:
                refs[channel], gone = yield from to.tasks(ref)
                done.sent[snapshot.uid] = {at: task.node for at, task in gone.items()}
            else:
                inputs = channel.startswith("__")
                refs[channel] = yield from to.ref(channel, ref, inputs=inputs)
        said = {}
        for channel, before in snapshot.said.items():
            held = None if refs.get(channel) is GONE else snapshot.refs.get(channel)
            said[channel] = yield from to.said(held, before)
        if to.awaited:
            for channel in [channel for channel in refs if channel.startswith(_NEXT)]:
                refs[channel] = GONE
                if is_head:
                    done.cancelled.add(_task(ns, channel.removeprefix(_NEXT)))
        same = (
            all(new is stored for new, stored in zip(fields, snapshot.fields, strict=True))
            and all(said[channel] is before for channel, before in snapshot.said.items())
            and all(refs[channel] is ref for channel, ref in snapshot.refs.items())
        )
        if to.looking or same:
            return
        yield from self._retag(row[0], snapshot.fields[1], fields[1])
        snapshot.fields = fields
        snapshot.refs = {channel: ref for channel, ref in refs.items() if ref is not GONE}
        bound = checkpoint_place(to.appender.thread_id, ns, row)
        body = self.reader.seal.seal(pack_row(snapshot, said), bound)
        yield Statement(self.sql["rewrite_checkpoint"], (body, row[0]))
        done.checkpoints += 1

    def _retag(self, key: int, before: bytes, now: bytes) -> Flow[None]:
        """Let a checkpoint be found no more by what its metadata does not hold any more."""
        decode, seal = self.reader.items.codec.decode, self.reader.seal
        for number in {*tags_of(seal, decode(before))} - {*tags_of(seal, decode(now))}:
            yield Statement(self.sql["drop_tag"], (number, key))

    # -- pending writes

    def _writes(
        self, done: _Erasure, namespace: int, ns: str, row: Row, head: str | None
    ) -> Flow[None]:
        to = done.to
        uid, task, path, body = row
        ids = unpack_id(uid) or "", unpack_id(task) or ""
        bound = writes_place(to.appender.thread_id, ns, *ids, path)
        writes = unpack_writes(self.reader.seal.open(body, bound))
        waits, sent = ids[0] == head, done.sent.get(ids[0], {})
        quoting = next((at for at in sent if path.startswith(_SENT.format(at))), None)
        if quoting is not None:
            name = _task(ns, sent[quoting], ids[1])
            done.subgraphs += (f"{name}|",)
        if quoting is not None and waits:
            kept: list[list[Any]] = []
            sent.pop(quoting)
            done.cancelled.add(name)
        else:
            kept = yield from self._left(done, ns, writes, waits)
            if _is_stopped(writes) and len(kept) < len(writes):
                kept = [[0, _NO_WRITES, to.encoded(None)]]
                if waits and any(channel == INTERRUPT for _, channel, _ in writes):
                    node = path.rpartition(", ")[2]
                    done.cancelled.discard(_task(ns, node))
                    done.cancelled.add(_task(ns, node, ids[1]))
            elif not _is_stopped(writes) and _is_stopped(kept):  # else the task would run again
                kept.append([0, _NO_WRITES, to.encoded(None)])
        same = [id(ref) for _, _, ref in kept] == [id(ref) for _, _, ref in writes]
        if to.looking or same:
            return
        new = self.reader.seal.seal(pack_writes(kept), bound)
        yield Statement(self.sql["put_writes"], (namespace, *row[:3], new))

    def _left(
        self, done: _Erasure, ns: str, writes: list[list[Any]], waits: bool
    ) -> Flow[list[list[Any]]]:
        """What is left of what a task wrote. What it asked and was answered is never altered."""
        kept = []
        for write in writes:
            index, channel, ref = write
            new = yield from done.to.ref(channel, ref, inputs=True)
            if new is ref:
                kept.append(write)
            elif new is not GONE and channel not in (INTERRUPT, RESUME):
                kept.append([index, channel, new])
            elif waits and channel == TASKS:
                sent = yield from done.to.value(ref)
                done.cancelled.add(_task(ns, getattr(sent, "node", TASKS)))
        return kept


def _is_stopped(writes: list[list[Any]]) -> bool:
    """Whether a task wrote no result: it failed, or waits for an answer."""
    return all(index < 0 for index, _, _ in writes)


def _task(ns: str, node: str, task_id: str = "") -> str:
    """A task as langgraph names it in a namespace."""
    name = f"{node}:{task_id}" if task_id else node
    return f"{ns}|{name}" if ns else name

"""Erasure: messages are removed from all checkpoints, history and pending writes of a thread.

One transaction: what is to go is found, everything that holds it is written anew without it, and
what nothing refers to any more is swept. The thread's `generation` moves, so that whoever keeps its
items reads them again. What counts as a quotation, and which tasks are cancelled: docs/erasure.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.types import INTERRUPT, RESUME, TASKS

from perdure.checkpointers.cache import Snapshot, Thread, Write
from perdure.checkpointers.log import Appender
from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.reader import PAGE, Reader
from perdure.checkpointers.records import (
    log_spans,
    open_item,
    open_writes,
    place,
    seal_checkpoint,
    seal_writes,
    span,
    tags_of,
    unpack_id,
)
from perdure.checkpointers.removal import GONE, Remover, Where
from perdure.checkpointers.reports import ErasureReport
from perdure.checkpointers.rewriting import BLOCKS, Rewriter
from perdure.errors import CorruptRecord, ForbiddenType
from perdure.storage.database import scrub_wanted
from perdure.storage.flow import Flow, Row

_NO_WRITES: Final = "__no_writes__"  # what langgraph stores for a task that wrote nothing
_NEXT: Final = "branch:to:"  # how langgraph names the channels that start a node
_SENT: Final = "~__pregel_push, {:010d}"  # and the path of the task that was sent at a place


def erased(
    reader: Reader, maintenance: Maintenance, thread_id: str, message_ids: Collection[str]
) -> Flow[ErasureReport]:
    """Take messages out of a thread; unknown ones are no error."""
    rows = yield reader.sql("find_thread", thread_id)
    if not rows:
        return ErasureReport()
    key, seq, generation = rows[0]
    thread = Thread(key, generation)  # not the cache's
    appender = Appender(reader.sql, reader.seal, thread_id, key, seq, thread)
    yield from appender.find_ends(())
    remover = Remover(frozenset(message_ids))
    to = Rewriter(reader, appender, thread, remover)
    for looking in (True, False):
        yield from to.begin(looking=looking)
        course = _Course(reader, to)
        yield from course.run()
        if not to.found:
            return ErasureReport()
    yield appender.statements()
    yield from maintenance.sweep(thread_id, key)
    yield reader.sql("removed", key)
    yield from scrub_wanted()
    hashes = sorted({_hash(reader, message) for message in remover.removed.values()})
    cancelled = tuple(sorted(course.cancelled))
    return ErasureReport(course.checkpoints, len(to.touched), tuple(hashes), cancelled)


def erased_thread(reader: Reader, maintenance: Maintenance, thread_id: str) -> Flow[ErasureReport]:
    """Remove a whole thread; an unknown one is no error."""
    rows = yield reader.sql("find_thread", thread_id)
    if not rows:
        return ErasureReport()
    hashes: set[str] = set()
    for log, name, *last in (yield reader.sql("thread_logs", rows[0][0])):
        (_, end), _ = log_spans(*last)
        for start in range(0, end if name != BLOCKS else 0, PAGE):
            for row in (yield reader.sql("items_between", *span(log, start, start + PAGE))):
                with suppress(CorruptRecord, ForbiddenType):  # it is deleted all the same
                    _, stored = open_item(reader.seal, thread_id, name, *row)
                    value = reader.codec.decode(stored)
                    if isinstance(value, BaseMessage):
                        hashes.add(_hash(reader, value))
    report = yield from maintenance.delete_thread(thread_id)
    yield from scrub_wanted()
    return ErasureReport(report.checkpoints, report.items, tuple(sorted(hashes)))


def _hash(reader: Reader, message: BaseMessage) -> str:
    """BLAKE2b-256 (RFC 7693) of a message's type, id and content, as JSON."""
    says = [message.type, message.id, message.content]
    text = json.dumps(says, ensure_ascii=False, separators=(",", ":"), default=repr)
    data = text.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=32, key=reader.seal.hash_key).hexdigest()


class _Course:
    """One course through everything in a thread that refers to items.

    Attributes:
        checkpoints: How many checkpoints changed.
        cancelled: The tasks of heads that will not run.
    """

    def __init__(self, reader: Reader, to: Rewriter) -> None:
        self.reader, self.sql, self.seal, self.to = reader, reader.sql, reader.seal, to
        self.thread_id = to.appender.thread_id
        self.checkpoints = 0
        self.cancelled: set[str] = set()
        # the tasks sent that quoted a message, by checkpoint and place, for one namespace
        self._sent: dict[str, dict[int, str]] = {}
        self._subgraphs: tuple[str, ...] = ()  # the namespaces of those that have run

    def run(self) -> Flow[None]:
        """Go over the thread."""
        for namespace, ns, at in (yield self.sql("thread_namespaces", self.to.thread.key)):
            self.to.sent = f"{ns}|".startswith(self._subgraphs)
            self._sent, head = {}, None
            for row, snapshot in (yield from self.reader.rows(self.thread_id, ns, namespace)):
                is_head = row[0] == place(namespace, at)
                head = snapshot.uid if is_head else head
                yield from self._checkpoint(ns, row, snapshot, is_head=is_head)
            for row in (yield self.sql("namespace_writes", namespace)):
                yield from self._writes(namespace, ns, row, head)
            self.cancelled |= {_task(ns, node) for node in self._sent.get(head or "", {}).values()}

    def _checkpoint(self, ns: str, row: Row, snapshot: Snapshot, *, is_head: bool) -> Flow[None]:
        to = self.to
        to.awaited = False
        other, metadata = snapshot.fields
        fields = [to.inline(other, Where()), to.inline(metadata, Where(tasks=True))]
        fields = [to.encoded({}) if stored is GONE else stored for stored in fields]
        refs, said = {}, {}
        for channel, ref in snapshot.refs.items():
            if channel == TASKS:
                refs[channel], gone = yield from to.tasks(ref)
                self._sent[snapshot.uid] = {at: task.node for at, task in gone.items()}
            else:
                inputs = channel.startswith("__")
                refs[channel] = yield from to.ref(channel, ref, inputs=inputs)
        for channel, before in snapshot.said.items():
            held = None if refs.get(channel) is GONE else snapshot.refs.get(channel)
            said[channel] = yield from to.said(held, before)
        for channel in refs if to.awaited else ():
            if channel.startswith(_NEXT):
                refs[channel] = GONE
                if is_head:
                    self.cancelled.add(_task(ns, channel.removeprefix(_NEXT)))
        if to.looking or (fields, refs, said) == (snapshot.fields, snapshot.refs, snapshot.said):
            return
        # it is found no more by what its metadata does not hold any more
        decode = to.codec.decode
        old, new = ({*tags_of(self.seal, decode(each))} for each in (metadata, fields[1]))
        for number in old - new:
            yield self.sql("drop_tag", number, row[0])
        snapshot.fields = fields
        snapshot.refs = {channel: ref for channel, ref in refs.items() if ref is not GONE}
        body = seal_checkpoint(self.seal, self.thread_id, ns, row, snapshot, said)
        yield self.sql("rewrite_checkpoint", body, row[0])
        self.checkpoints += 1

    def _writes(self, namespace: int, ns: str, row: Row, head: str | None) -> Flow[None]:
        uid, task, path = unpack_id(row[0]) or "", unpack_id(row[1]) or "", row[2]
        writes = open_writes(self.seal, self.thread_id, ns, row)
        waits, sent = uid == head, self._sent.get(uid, {})
        quoting = next((at for at in sent if path.startswith(_SENT.format(at))), None)
        kept: list[Write] = []
        if quoting is not None:
            name = _task(ns, sent[quoting], task)
            self._subgraphs += (f"{name}|",)
        if quoting is not None and waits:
            sent.pop(quoting)
            self.cancelled.add(name)
        else:
            kept = yield from self._left(ns, writes, waits)
            if _is_stopped(writes) and len(kept) < len(writes):
                kept = [[0, _NO_WRITES, self.to.encoded(None)]]
                if waits and any(channel == INTERRUPT for _, channel, _ in writes):
                    node = path.rpartition(", ")[2]
                    self.cancelled.discard(_task(ns, node))
                    self.cancelled.add(_task(ns, node, task))
            elif not _is_stopped(writes) and _is_stopped(kept):  # else the task would run again
                kept.append([0, _NO_WRITES, self.to.encoded(None)])
        if not self.to.looking and kept != writes:
            body = seal_writes(self.seal, self.thread_id, ns, row, kept)
            yield self.sql("put_writes", namespace, *row[:3], body)

    def _left(self, ns: str, writes: list[Write], waits: bool) -> Flow[list[Write]]:
        """The remaining writes of a task. Its questions and answers are never altered."""
        kept = []
        for index, channel, ref in writes:
            new = yield from self.to.ref(channel, ref, inputs=True)
            if new is ref or (new is not GONE and channel not in (INTERRUPT, RESUME)):
                kept.append([index, channel, new])
            elif waits and channel == TASKS:
                sent = yield from self.to.value(ref)
                self.cancelled.add(_task(ns, getattr(sent, "node", TASKS)))
        return kept


def _is_stopped(writes: list[Any]) -> bool:
    """Whether a task wrote no result: it failed, or waits for an answer."""
    return all(index < 0 for index, _, _ in writes)


def _task(ns: str, node: str, task_id: str = "") -> str:
    """A task as langgraph names it in a namespace."""
    name = f"{node}:{task_id}" if task_id else node
    return f"{ns}|{name}" if ns else name

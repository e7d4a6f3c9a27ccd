"""Copies of threads, which share nothing with their source."""

from __future__ import annotations

import random
import time
from typing import Any

from perdure.checkpointers.address import Address
from perdure.checkpointers.manifest import ALIASES, DICT_HERE, LIST, LIST_HERE, MAP
from perdure.checkpointers.reader import PAGE, CheckpointReader
from perdure.checkpointers.records import (
    content_hash,
    item_place,
    leading_to,
    log_spans,
    open_title,
    open_writes,
    place,
    seal_checkpoint,
    seal_title,
    seal_writes,
    span,
    tags_of,
    unpack_id,
)
from perdure.checkpointers.threads import missing
from perdure.errors import InvalidConfig
from perdure.storage.flow import ALL, Flow, Row, Statement

_LOW = 0xFFFFFFFF


def copied(
    reader: CheckpointReader, source: str, target: str, checkpoint_id: str | None
) -> Flow[tuple[int, list[int]]]:
    """Copy a thread; with a checkpoint, only the way to it.

    Returns the new thread's key, and the keys that are left.

    Raises:
        UnknownThread: There is no source.
        UnknownCheckpoint: It has no such checkpoint in its root namespace.
        InvalidConfig: The target exists.
    """
    rows = yield reader.sql("one_thread", source)
    if not rows:
        raise missing(Address(source, "", None))
    if (yield reader.sql("one_thread", target)):
        raise InvalidConfig(f"thread {target!r} exists already; copy to a new thread_id")
    last = _LOW
    if checkpoint_id is not None:
        at = Address(source, "", checkpoint_id)
        found = yield from reader.find(at)
        if found is None:
            raise missing(at)
        last = found.snapshot.key & _LOW
    thread, _, created_at, _, _, stored = rows[0]
    title = open_title(reader.seal, source, stored)
    ((_, seq, _),) = yield reader.sql("find_thread", source)
    logs = yield reader.sql("thread_logs", thread)
    namespaces = yield reader.sql("thread_namespaces", thread)
    keys = yield from reader.new_keys(1 + len(logs) + len(namespaces))
    new = keys.pop()
    stamp = random.getrandbits(62)
    yield reader.sql("new_thread", new, target, seq, stamp, created_at, time.time())
    if title is not None and (checkpoint_id is None or title.message is None):
        yield reader.sql("set_title", seal_title(reader.seal, target, title), new)
    copier = _Copier(reader, source, target, new, keys)
    yield from copier.copy_logs(logs)
    for namespace, ns, head in namespaces:
        yield from copier.copy_namespace(ns, namespace, head, last)
    return new, keys


class _Copier:
    """The flows that copy the parts of one thread into the new one with the key `new`."""

    def __init__(
        self, reader: CheckpointReader, source: str, target: str, new: int, keys: list[int]
    ) -> None:
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal
        self.source, self.target, self.new = source, target, new
        self.keys = keys  # of its logs and namespaces
        self.logs: dict[int, int] = {}  # which became which

    def copy_logs(self, logs: list[Row]) -> Flow[None]:
        for log, name, *ends in logs:
            key = self.logs[log] = self.keys.pop()
            yield self.sql("new_log", key, self.new, name)
            for first, stop in log_spans(*ends):
                for start in range(first, stop, PAGE):
                    page = self.reader.stored(self.source, name, log, start, start + PAGE)
                    copies = []
                    for at, stored in (yield from page):
                        hashed = content_hash(self.seal, key, stored) if at < ALIASES else 0
                        body = self.seal.seal(stored, item_place(self.target, name, at))
                        copies.append((place(key, at), hashed, body))
                    yield Statement(self.sql["add_item"], copies, many=True)

    def copy_namespace(self, ns: str, source: int, head: int, last: int) -> Flow[None]:
        """Copy what was put in a namespace up to a place; of the root, what leads there."""
        rows = yield self.sql("checkpoints_page", *span(source), ALL)
        yield from self.reader.check_complete(len(rows), *span(source))
        if last != _LOW:
            rows = [row for row in rows if row[0] & _LOW <= last]
            rows = rows if ns else leading_to(rows, place(source, last))
            head = max((row[0] & _LOW for row in rows), default=0)
        if not rows:
            return
        namespace = self.keys.pop()
        yield self.sql("new_namespace", namespace, self.new, ns)
        yield self.sql("pin", head, namespace)
        for row in rows:
            yield from self._copy_checkpoint(ns, namespace, row)
        uids = {row[1] for row in rows}
        for row in (yield self.sql("namespace_writes", source)):
            if row[0] in uids:
                writes = open_writes(self.seal, self.source, ns, row)
                moved = [[i, channel, self._moved(ref)] for i, channel, ref in writes]
                at = unpack_id(row[0]) or "", unpack_id(row[1]) or "", row[2]
                body = seal_writes(self.seal, (self.target, ns, *at), moved)
                yield self.sql("put_writes", namespace, *row[:3], body)

    def _copy_checkpoint(self, ns: str, namespace: int, row: Row) -> Flow[None]:
        snapshot = self.reader.open_row(self.source, ns, row)
        snapshot.refs = {c: self._moved(ref) for c, ref in snapshot.refs.items()}
        said = {c: self._moved([LIST, *written])[1:] for c, written in snapshot.said.items()}
        key = place(namespace, row[0] & _LOW)
        body = seal_checkpoint(self.seal, self.target, ns, (key, *row[1:5]), snapshot, said)
        yield self.sql("add_checkpoint", key, namespace, *row[1:5], body)
        for number in tags_of(self.seal, self.reader.metadata(snapshot)):
            yield self.sql("add_tag", number, key)

    def _moved(self, ref: Any) -> Any:
        """A reference, in the logs of the other thread."""
        if isinstance(ref, bytes):
            return ref
        kind, *rest = ref
        if kind == MAP:
            return [MAP, {key: self._moved(inner) for key, inner in rest[0].items()}]
        if kind in (LIST_HERE, DICT_HERE):
            parts = [e if isinstance(e, bytes) else [self.logs[e[0]], *e[1:]] for e in rest[0]]
            return [kind, parts]
        log, numbers = rest
        return [kind, self.logs[log], numbers]

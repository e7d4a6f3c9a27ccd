"""Copying threads: into new ones that share nothing with their source."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from perdure.checkpointers.manifest import ALIASES, DICT_HERE, ITEM, LIST_HERE, MAP
from perdure.checkpointers.reader import Reader
from perdure.checkpointers.records import (
    checkpoint_place,
    content_hash,
    item_place,
    log_spans,
    pack_id,
    pack_row,
    pack_writes,
    place,
    span,
    tags_of,
    unpack_id,
    unpack_writes,
    writes_place,
)
from perdure.errors import InvalidConfig, UnknownCheckpoint, UnknownThread
from perdure.storage.flow import Flow, Row, Statement


def copied(
    sql: dict[str, str], reader: Reader, source: str, target: str, checkpoint_id: str | None
) -> Flow[int]:
    """Copy a thread; with a checkpoint, only the way to it. Returns the new thread's key.

    Raises:
        UnknownThread: There is no source.
        UnknownCheckpoint: It has no such checkpoint in its root namespace.
        InvalidConfig: The target exists.
    """
    rows = yield Statement(sql["one_thread"], (source,))
    if not rows:
        raise UnknownThread(f"there is no thread {source!r} to copy")
    if (yield Statement(sql["one_thread"], (target,))):
        raise InvalidConfig(f"thread {target!r} exists already; copy to a new thread_id")
    thread, _, created_at, *_ = rows[0]
    new: int = (yield Statement(sql["new_thread"], (target, created_at, time.time())))[0][0]
    seq = (yield Statement(sql["find_thread"], (source,)))[0][1]
    copier = _Copier(sql, reader, source, target)
    logs = yield from copier.copy_logs(thread, new)
    last = yield from copier.last_place(thread, checkpoint_id)
    for namespace, ns, head in (yield Statement(sql["thread_namespaces"], (thread,))):
        to = _Copied(source, target, ns, namespace, logs)
        path_to = last if ns == "" else None
        yield from copier.copy_namespace(to, new, head, path_to, last)
    yield Statement(sql["advance"], (seq, new))
    return new


_PAGE: Final = 1024  # items copied at once


@dataclass(slots=True)
class _Copier:
    """The flows that copy the parts of one thread."""

    sql: dict[str, str]
    reader: Reader
    source: str
    target: str

    def last_place(self, thread: int, checkpoint_id: str | None) -> Flow[int | None]:
        if checkpoint_id is None:
            return None
        for namespace, ns, _ in (yield Statement(self.sql["thread_namespaces"], (thread,))):
            if ns == "":
                params = (namespace, pack_id(checkpoint_id))
                rows = yield Statement(self.sql["find_checkpoint"], params)
                if rows:
                    return int(rows[0][0]) & 0xFFFFFFFF
        raise UnknownCheckpoint(f"thread {self.source!r} has no checkpoint {checkpoint_id!r}")

    def copy_logs(self, thread: int, new: int) -> Flow[dict[int, int]]:
        """Which log became which."""
        out: dict[int, int] = {}
        for log, name, end, last in (yield Statement(self.sql["thread_logs"], (thread,))):
            key = out[log] = (yield Statement(self.sql["new_log"], (new, name)))[0][0]
            for first, stop in log_spans(end, last):
                for start in range(first, stop, _PAGE):
                    between = span(log, start, min(stop, start + _PAGE))
                    rows = yield Statement(self.sql["items_between"], between)
                    copies = [self._item(name, key, *row) for row in rows]
                    yield Statement(self.sql["add_item"], copies, many=True)
        return out

    def _item(self, name: str, log: int, key: int, body: bytes) -> tuple[int, int, bytes]:
        seal, at = self.reader.seal, key & 0xFFFFFFFF
        stored = seal.open(body, item_place(self.source, name, at))
        hashed = content_hash(seal, log, stored) if at < ALIASES else 0
        return place(log, at), hashed, seal.seal(stored, item_place(self.target, name, at))

    def copy_namespace(
        self, to: _Copied, thread: int, head: int, path_to: int | None, last: int | None
    ) -> Flow[None]:
        rows = yield Statement(self.sql["checkpoint_bodies"], span(to.namespace))
        yield from self.reader.check_complete(len(rows), *span(to.namespace))
        rows = [row for row in rows if last is None or row[0] & 0xFFFFFFFF <= last]
        if path_to is not None:
            rows, head = _path(rows, place(to.namespace, path_to)), path_to
        elif last is not None:
            head = max((row[0] & 0xFFFFFFFF for row in rows), default=0)
        if not rows:
            return
        namespace = (yield Statement(self.sql["new_namespace"], (thread, to.ns)))[0][0]
        yield Statement(self.sql["pin"], (head, namespace))
        for row in rows:
            yield from self._copy_checkpoint(to, namespace, row)
        uids = {row[1] for row in rows}
        for uid, task, path, body in (
            yield Statement(self.sql["namespace_writes"], (to.namespace,))
        ):
            if uid in uids:
                ids = unpack_id(uid) or "", unpack_id(task) or ""
                body = self._copied_writes(to, (*ids, path), body)
                yield Statement(self.sql["put_writes"], (namespace, uid, task, path, body))

    def _copy_checkpoint(self, to: _Copied, namespace: int, row: Row) -> Flow[None]:
        snapshot = self.reader.open_row(to.source, to.ns, row)
        snapshot.refs = {c: _moved(ref, to.logs) for c, ref in snapshot.refs.items()}
        said = {
            c: [to.logs[log], _moved_ranges(numbers, to.logs)]
            for c, (log, numbers) in snapshot.said.items()
        }
        key = place(namespace, row[0] & 0xFFFFFFFF)
        bound = checkpoint_place(to.target, to.ns, (key, *row[1:]))
        body = self.reader.seal.seal(pack_row(snapshot, said), bound)
        yield Statement(self.sql["add_checkpoint"], (key, namespace, *row[1:5], body))
        for number in tags_of(self.reader.seal, self.reader.metadata(snapshot)):
            yield Statement(self.sql["add_tag"], (number, key))

    def _copied_writes(self, to: _Copied, row: tuple[str, str, str], body: bytes) -> bytes:
        seal = self.reader.seal
        writes = unpack_writes(seal.open(body, writes_place(to.source, to.ns, *row)))
        moved = [[i, channel, _moved(ref, to.logs)] for i, channel, ref in writes]
        return seal.seal(pack_writes(moved), writes_place(to.target, to.ns, *row))


@dataclass(frozen=True, slots=True)
class _Copied:
    """One namespace on its way from a thread to another."""

    source: str
    target: str
    ns: str
    namespace: int
    logs: dict[int, int]


def _moved(ref: Any, logs: dict[int, int]) -> Any:
    """A reference, in the logs of another thread."""
    if isinstance(ref, bytes):
        return ref
    if ref[0] == MAP:
        return [MAP, {key: _moved(inner, logs) for key, inner in ref[1].items()}]
    if ref[0] in (LIST_HERE, DICT_HERE):
        return [ref[0], [e if isinstance(e, bytes) else [logs[e[0]], *e[1:]] for e in ref[1]]]
    if ref[0] == ITEM:
        return [ITEM, logs[ref[1]], ref[2]]
    return [ref[0], logs[ref[1]], _moved_ranges(ref[2], logs)]


def _moved_ranges(numbers: Any, logs: dict[int, int]) -> Any:
    if numbers and not isinstance(numbers[0], int):
        (blocks, *places), *rest = numbers
        return [[logs[blocks], *places], *rest]
    return numbers


def _path(rows: list[Row], key: int) -> list[Row]:
    """The rows on the way to a checkpoint."""
    by_uid = {row[1]: row for row in rows}
    at: Row | None = next(row for row in rows if row[0] == key)
    out = []
    while at is not None:
        out.append(at)
        at = by_uid.get(at[2])
    return out

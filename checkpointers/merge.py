"""Merging the threads of another database of perdure's own into this one.

A thread in both is left if it is the same or went on here, replaced by what it became if it went on
there, and refused if it went on in both. Each thread is written in one transaction.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.manifest import (
    ALIASES,
    DICT,
    DICT_HERE,
    ITEM,
    LIST,
    MAP,
    Ranges,
    positions,
    unflat,
)
from perdure.checkpointers.records import open_client
from perdure.checkpointers.reports import ImportReport
from perdure.checkpointers.thread_copy import (
    ThreadRecords,
    read_items,
    thread_records,
    write_thread,
)
from perdure.checkpointers.values import pack, unpack
from perdure.errors import ConfigurationError, ImportFailed, UnknownThread
from perdure.storage.flow import Flow

_NAMED: Final = 20  # refused threads


@dataclass
class ThreadContents:
    """What a thread holds, wherever its items stand in its logs; values as digests."""

    checkpoints: list[tuple[str, str, str | None, bytes]]  # in put order
    heads: dict[str, str]
    writes: dict[tuple[str, str, str, str, int], tuple[str, bytes]]

    def continues(self, other: ThreadContents) -> bool:
        """Whether this is what the other one was or became."""
        begun = self.checkpoints[: len(other.checkpoints)] == other.checkpoints
        return begun and all(
            at in self.writes and (self.writes[at] == write or at[-1] < 0)  # resumed once more
            for at, write in other.writes.items()
        )


def contents(records: ThreadRecords) -> ThreadContents:
    """The contents of a thread whose items were read."""
    digests = _Digests(records.items or {})
    checkpoints, heads, writes = [], {}, {}
    for ns, head, stored, written in records.namespaces:
        for within, _, snapshot in stored:
            digest = digests.of_checkpoint(snapshot)
            checkpoints.append((within, (ns, snapshot.uid, snapshot.parent, digest)))
            if within == head:
                heads[ns] = snapshot.uid
        for uid, task, path, task_writes in written:
            for number, channel, ref in task_writes:
                writes[ns, uid, task, path, number] = channel, digests.of(ref)
    in_order = [checkpoint for _, checkpoint in sorted(checkpoints, key=lambda pair: pair[0])]
    return ThreadContents(in_order, heads, writes)


class _Digests:
    """The digests of values, by what they hold and not by how they refer to it."""

    def __init__(self, items: dict[int, dict[int, bytes]]) -> None:
        self._origins = {
            log: {at: unpack(stored) for at, stored in held.items() if at >= ALIASES}
            for log, held in items.items()
        }
        self._digests = {
            log: {at: _digest(stored) for at, stored in held.items() if at < ALIASES}
            for log, held in items.items()
        }

    def of_checkpoint(self, snapshot: Any) -> bytes:
        refs = {channel: self.of(ref) for channel, ref in sorted(snapshot.refs.items())}
        said = {
            channel: ref[1:]
            for channel, ref in snapshot.refs.items()
            if isinstance(ref, list) and ref[0] in (LIST, DICT) and not channel.startswith("__")
        } | snapshot.said
        told = {}
        for channel, (log, numbers) in sorted(said.items()):
            first = dict.fromkeys(self._places(log, unflat(numbers)))
            told[channel] = _digest(b"".join(self._digests[log][at] for at in first))
        return _digest(pack([snapshot.fields, snapshot.versions, snapshot.seen, refs, told]))

    def of(self, ref: Any) -> bytes:
        if isinstance(ref, bytes):
            return _digest(ref)
        kind = ref[0]
        if kind == MAP:
            return _digest(pack({key: self.of(inner) for key, inner in ref[1].items()}))
        if kind == ITEM:
            return self._of_items(ref[1], [(ref[2], ref[2] + 1)])
        elements = [[ref[1], *ref[2]]] if kind in (LIST, DICT) else ref[1]
        parts = [
            _digest(element)
            if isinstance(element, bytes)
            else self._of_items(element[0], unflat(element[1:]))
            for element in elements
        ]
        return _digest(bytes([kind in (DICT, DICT_HERE)]) + b"".join(parts))

    def _of_items(self, log: int, ranges: Ranges) -> bytes:
        return b"".join(self._digests[log][at] for at in self._places(log, ranges))

    def _places(self, log: int, ranges: Ranges) -> Iterator[int]:
        origins = self._origins[log]
        return (origins.get(at, at) for at in positions(ranges))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class Merge:
    """Takes over the threads of another database; `names` are new ids of some of them.

    Once `stopped` is set, no further thread is taken over.
    """

    def __init__(self, source: Maintenance, target: Maintenance, names: Mapping[str, str]) -> None:
        self.source, self.target, self.names = source, target, names
        self.stopped = threading.Event()

    def run(self) -> ImportReport:
        """Take over all threads but those that went on in both, which are named in the end."""
        threads = [*self.source.listing.thread_ids()]
        path = self.source.database.path
        if unknown := self.names.keys() - {*threads}:
            raise ConfigurationError(f"{path} has no thread {sorted(unknown)[0]!r} to rename")
        report, refused = ImportReport(), list[str]()
        for thread_id in threads:
            if self.stopped.is_set():
                raise ImportFailed(f"the import of {path!r} was cancelled")
            try:
                records = self.source.database.read(partial(self._read, thread_id))
            except UnknownThread:  # it was deleted just now
                continue
            done = self._write(records, self.names.get(thread_id, thread_id))
            report += done or ImportReport()
            if done is None:
                refused.append(thread_id)
        if refused:
            more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
            raise ImportFailed(
                f"these threads are others here than in {path!r}, and neither continues the other: "
                f"{', '.join(map(repr, refused[:_NAMED]))}{more}. {report.threads} others are "
                "imported. Give new ids to take both: names={'ID': 'NEW'}, or 'perdure import "
                "--as ID=NEW'"
            )
        return report

    def _read(self, thread_id: str) -> Flow[ThreadRecords]:
        records = yield from thread_records(self.source.reader, thread_id)
        yield from read_items(self.source.reader, records)
        return records

    def _write(self, records: ThreadRecords, target: str) -> ImportReport | None:
        """Write a thread as far as it is not here; None: it is refused."""
        reader, keys = self.target.reader, list[int]()
        there = contents(records)

        def flow() -> Flow[ImportReport | None]:
            here = ThreadContents([], {}, {})
            if (yield reader.sql("one_thread", target)):
                stored = yield from thread_records(reader, target)
                yield from read_items(reader, stored)
                here = contents(stored)
                onward, back = there.continues(here), here.continues(there)
                if here == there or (back and not onward):
                    return ImportReport(1, 1, skipped=len(there.checkpoints))
                if back or not onward:
                    return None
            keys[:] = yield from reader.new_keys(records.keys)
            for _, records.status, _, client in (yield reader.sql("hold_client", target)):
                records.client = open_client(reader.seal, target, client)
            yield from self.target.delete_thread(target)
            yield from write_thread(reader, records, target, keys, records.updated_at)
            known = len(here.checkpoints)
            more = len(there.writes) - len(here.writes)
            return ImportReport(1, 0, len(there.checkpoints) - known, more, known)

        def committed(_: object) -> None:
            if keys:
                reader.cache.keys.renew(keys)
            reader.cache.forget(target)

        return self.target.database.write(flow, committed, exclusive=(target,))

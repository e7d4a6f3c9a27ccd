"""Erasing messages: out of every checkpoint, history and pending write of a thread, for good.

One transaction: what is to go is found, everything that holds it is written anew without it, and
what nothing refers to any more is swept. The thread's `swept` counter moves, so whoever remembers
its items reads them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from langchain_core.messages import BaseMessage

from perdure.checkpointers.base import ErasureReport
from perdure.checkpointers.log import Log, Written
from perdure.checkpointers.pruning import Pruner
from perdure.checkpointers.reading import BLOCKS, Reader
from perdure.checkpointers.records import (
    checkpoint_place,
    item_place,
    pack_snapshot,
    pack_writes,
    tags_of,
    unpack_id,
    unpack_writes,
    writes_place,
)
from perdure.checkpointers.removing import GONE, Remover
from perdure.checkpointers.rewriting import PAGE, Rewriter
from perdure.checkpointers.schema import span
from perdure.errors import CorruptRecord, ForbiddenType
from perdure.storage.database import scrub_wanted
from perdure.storage.flow import Flow, Row, Statement

_NO_WRITES: Final = "__no_writes__"  # what langgraph stores for a task that wrote nothing


@dataclass(slots=True)
class Eraser:
    """The flows that erase.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
        log: The flows that append.
        pruner: Sweeps up.
    """

    sql: dict[str, str]
    reader: Reader
    log: Log
    pruner: Pruner

    def erase(self, thread_id: str, message_ids: Collection[str]) -> Flow[ErasureReport]:
        """Take messages out of a thread; unknown ones are no error."""
        rows = yield Statement(self.sql["find_thread"], (thread_id,))
        if not rows:
            return ErasureReport()
        thread, seq, swept = rows[0]
        out = Written(thread_id, "", thread, swept, 0, 0, False, seq)
        lanes = {k: name for k, name, _ in (yield Statement(self.sql["thread_lanes"], (thread,)))}
        remover = Remover(frozenset(message_ids))
        rewriter = Rewriter(self.sql, self.reader, self.log, out, lanes, remover)
        yield from rewriter.suspect()
        yield from self._rewrite(rewriter)
        if not rewriter.found:
            return ErasureReport()
        yield from rewriter.begin()
        checkpoints, saved = yield from self._rewrite(rewriter)
        yield Statement(self.sql["grow"], (seq, 0, out.added, out.size, thread))
        items, freed = yield from self.pruner.sweep(thread_id, thread)
        yield Statement(self.sql["swept"], (0, items, freed + saved, thread))
        yield from scrub_wanted()
        hashes = {self._hash(message) for message in remover.removed.values()}
        return ErasureReport(checkpoints, len(rewriter.touched), tuple(sorted(hashes)))

    def erase_thread(self, thread_id: str) -> Flow[ErasureReport]:
        """Remove a whole thread; an unknown one is no error."""
        rows = yield Statement(self.sql["find_thread"], (thread_id,))
        if not rows:
            return ErasureReport()
        hashes: set[str] = set()
        for lane, name, end in (yield Statement(self.sql["thread_lanes"], (rows[0][0],))):
            for start in range(0, end if name != BLOCKS else 0, PAGE):
                between = span(lane, start, start + PAGE)
                for row in (yield Statement(self.sql["items_between"], between)):
                    hashes |= self._hash_of_item(thread_id, name, row)
        report = yield from self.pruner.delete_thread(thread_id)
        yield from scrub_wanted()
        return ErasureReport(report.checkpoints, report.items, tuple(sorted(hashes)))

    def _hash_of_item(self, thread_id: str, lane: str, row: Row) -> set[str]:
        """The hash of an item that is a message; what cannot be read is deleted all the same."""
        with suppress(CorruptRecord, ForbiddenType):
            bound = item_place(thread_id, lane, row[0] & 0xFFFFFFFF)
            value = self.reader.codec.decode(self.reader.seal.open(row[1], bound))
            return {self._hash(value)} if isinstance(value, BaseMessage) else set()
        return set()

    def _hash(self, message: BaseMessage) -> str:
        """BLAKE2b-256 (RFC 7693) of a message's type, id and content, as JSON."""
        says = [message.type, message.id, message.content]
        text = json.dumps(says, ensure_ascii=False, separators=(",", ":"), default=repr)
        data = text.encode(errors="surrogatepass")
        return hashlib.blake2b(data, digest_size=32, key=self.reader.seal.hash_key).hexdigest()

    # -- everything that refers to items

    def _rewrite(self, to: Rewriter) -> Flow[tuple[int, int]]:
        """Go over a whole thread: how many checkpoints changed, by how many bytes it shrank."""
        checkpoints = saved = 0
        for line, ns, _ in (yield Statement(self.sql["thread_lines"], (to.out.key,))):
            for row in (yield Statement(self.sql["line_bodies"], span(line))):
                body = yield from self._checkpoint(to, ns, row)
                if body is not None:
                    yield Statement(self.sql["rewrite_checkpoint"], (body, row[0]))
                    checkpoints += 1
                    saved += len(row[3]) - len(body)
            for row in (yield Statement(self.sql["line_writes"], (line,))):
                body = yield from self._writes(to, ns, row)
                if body is not None:
                    yield Statement(self.sql["put_writes"], (line, *row[:3], body))
                    saved += len(row[3]) - len(body)
        return checkpoints, saved

    def _checkpoint(self, to: Rewriter, ns: str, row: Row) -> Flow[bytes | None]:
        """The new body of a checkpoint; None: it stays as it is."""
        snapshot = self.reader.open_row(to.out.thread_id, ns, row)
        fields = [to.inline(stored, to.where("", inputs=True)) for stored in snapshot.fields]
        fields = [to.encoded({}) if stored is GONE else stored for stored in fields]
        refs = {}
        for channel, ref in snapshot.refs.items():
            refs[channel] = yield from to.ref(channel, ref, inputs=channel.startswith("__"))
        said = {}
        for channel, before in snapshot.said.items():
            held = None if refs.get(channel) is GONE else snapshot.refs.get(channel)
            said[channel] = yield from to.said(held, before)
        same = (
            all(new is stored for new, stored in zip(fields, snapshot.fields, strict=True))
            and all(said[channel] is before for channel, before in snapshot.said.items())
            and all(refs[channel] is ref for channel, ref in snapshot.refs.items())
        )
        if to.looking or same:
            return None
        yield from self._retag(row[0], snapshot.fields[1], fields[1])
        snapshot.fields = fields
        snapshot.refs = {channel: ref for channel, ref in refs.items() if ref is not GONE}
        bound = checkpoint_place(to.out.thread_id, ns, snapshot.uid, snapshot.parent, row[0])
        return self.reader.seal.seal(pack_snapshot(snapshot, said), bound)

    def _retag(self, key: int, before: bytes, now: bytes) -> Flow[None]:
        """Let a checkpoint be found no more by what its metadata does not hold any more."""
        decode, seal = self.reader.codec.decode, self.reader.seal
        for number in {*tags_of(seal, decode(before))} - {*tags_of(seal, decode(now))}:
            yield Statement(self.sql["drop_tag"], (number, key))

    def _writes(self, to: Rewriter, ns: str, row: Row) -> Flow[bytes | None]:
        """What a task wrote, anew; None: it stays as it is."""
        uid, task, path, body = row
        ids = unpack_id(uid) or "", unpack_id(task) or ""
        bound = writes_place(to.out.thread_id, ns, *ids, path)
        writes = []
        same = True
        for index, channel, ref in unpack_writes(self.reader.seal.open(body, bound)):
            new = yield from to.ref(channel, ref, inputs=True)
            same = same and new is ref
            if new is not GONE:
                writes.append([index, channel, new])
            elif index < 0:  # an interrupt, or what resumes one: it happened all the same
                writes.append([index, channel, to.encoded(None)])
        if to.looking or same:
            return None
        if not writes:  # else the task would run again
            writes = [[0, _NO_WRITES, to.encoded(None)]]
        return self.reader.seal.seal(pack_writes(writes), bound)

"""Erasure: messages are removed from all checkpoints, history and pending writes of a thread.

One transaction. What refers to items is gone over twice: the messages are found by their ids, then
everything that holds or quotes one is written anew without it; no item is changed in place. What
nothing refers to any more is swept. What counts as a quotation, and which tasks are cancelled:
docs/erasure.md.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage
from langgraph.checkpoint.serde.types import INTERRUPT, TASKS
from langgraph.types import Send

from perdure.checkpointers.additions import Additions
from perdure.checkpointers.cache import NO_TITLE, Snapshot, Thread, Title, Write
from perdure.checkpointers.collector import collector_paused
from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.manifest import (
    ALIASES,
    DELTA,
    DICT,
    ITEM,
    LIST,
    SNAPSHOT,
    Range,
    Ranges,
    count,
    flat,
    once,
    positions,
    references,
    unflat,
    value_reference,
)
from perdure.checkpointers.put import TITLE_LENGTH
from perdure.checkpointers.reader import PAGE, CheckpointReader
from perdure.checkpointers.records import (
    VIEWS_NAMESPACE,
    RunRow,
    decrypt_client_metadata,
    decrypt_cron,
    decrypt_item,
    decrypt_list_entry,
    decrypt_run,
    decrypt_writes,
    encrypt_checkpoint,
    encrypt_client_metadata,
    encrypt_list_entry,
    encrypt_run,
    encrypt_writes,
    key_range,
    metadata_tags,
    next_log_positions,
    row_key,
    unpack_id,
)
from perdure.checkpointers.removal import (
    GONE,
    NEXT_NODE,
    NO_WRITES,
    TASK_CHANNELS,
    UNALTERED,
    Remover,
    TextSet,
    Where,
    has_no_result,
    hash_message,
    remove_quoting_tasks,
)
from perdure.checkpointers.reports import ErasureReport
from perdure.checkpointers.said import unsay
from perdure.checkpointers.values import DeltaSnapshot, pack, unpack
from perdure.errors import CorruptRecord, ForbiddenType
from perdure.storage.flow import NO_LIMIT, Flow, Row

_MESSAGE_FIELDS: Final = 64  # a dict of more entries is no message
_SENT: Final = "~__pregel_push, {:010d}"  # and the path of the task that was sent at a place


def erase_from_thread(
    reader: CheckpointReader,
    maintenance: Maintenance,
    thread_id: str,
    message_ids: Collection[str] | None,
) -> Flow[ErasureReport]:
    """Erase messages from a thread, or delete the thread if `message_ids` is None.

    Unknown ids are no error. Python's garbage collector is paused meanwhile. Otherwise the many new
    objects would start collections of the whole heap, for which all threads wait.
    """
    with collector_paused():
        if message_ids is None:
            return (yield from _erase_thread(reader, maintenance, thread_id))
        remover = Remover(frozenset(message_ids), reader.codec.types.texts_of)
        report = yield from _erase_messages(reader, maintenance, thread_id, remover)
        if message_ids:
            number = yield from reader.removals.add_record(thread_id, remover.known_texts(), None)
            for thread, *_ in (yield reader.sql("find_thread", thread_id)):
                yield reader.sql("note_removal", number, thread)
        return report


def _erase_messages(
    reader: CheckpointReader, maintenance: Maintenance, thread_id: str, remover: Remover
) -> Flow[ErasureReport]:
    """Erase the messages of a remover from a thread and from its runs and crons."""
    rows = yield reader.sql("find_thread", thread_id)
    if not rows:
        return ErasureReport()
    of_runs = rows[0][0], 0, NO_LIMIT
    yield [reader.sql("stop_storing_events", *of_runs), reader.sql("mark_erased", rows[0][0])]
    events = len((yield reader.sql("drop_events", *of_runs, NO_LIMIT)))
    eraser = _Eraser(reader, thread_id, rows[0], remover)
    yield from eraser.read_logs()
    yield from eraser.run(looking=True)
    if not eraser.remover.found:
        yield from eraser.untitle()
        if events:
            yield from maintenance.database.request_scrub()
        return ErasureReport(events=events)
    views = yield from _drop_views(reader, maintenance, thread_id, rows[0][0])
    eraser.settle()
    if eraser.dicts:  # histories come before the older dicts whose parts they hold
        channels = TextSet(eraser.remover.channels)
        yield from eraser.run(looking=True)
        eraser.remover.channels = channels
    yield from eraser.run(looking=False)
    yield eraser.additions.statements()
    items, _ = yield from maintenance.sweep(thread_id, rows[0][0])
    yield reader.sql("mark_rows_removed", rows[0][0])
    yield from unsay(reader.sql, rows[0][0])
    yield from eraser.untitle()
    yield from maintenance.database.request_scrub()
    hashes = sorted(
        {hash_message(reader.seal.hash_key, message) for message in eraser.remover.removed.values()}
    )
    cancelled = tuple(sorted(eraser.cancelled))
    counts = eraser.checkpoints + views, items
    report = ErasureReport(*counts, tuple(hashes), cancelled)
    return replace(report, runs=eraser.runs, events=events, crons=eraser.crons)


def _drop_views(
    reader: CheckpointReader, maintenance: Maintenance, thread_id: str, thread: int
) -> Flow[int]:
    """Remove what models were shown: memories and summaries in it may quote messages."""
    views = 0
    for namespace, ns, _ in (yield reader.sql("thread_namespaces", thread)):
        if ns == VIEWS_NAMESPACE:
            views = yield from maintenance.empty_namespace(thread_id, ns, namespace)
            yield reader.sql("set_explicit_head", 0, namespace)
    return views


def _erase_thread(
    reader: CheckpointReader, maintenance: Maintenance, thread_id: str
) -> Flow[ErasureReport]:
    """Delete a thread, and report the hashes of all of its messages."""
    rows = yield reader.sql("find_thread", thread_id)
    if not rows:
        return ErasureReport()
    hashes: set[str] = set()
    for log, name, *_ in (yield reader.sql("thread_logs", rows[0][0])):
        for row in (yield reader.sql("items_between", *key_range(log, 0, ALIASES))):
            with suppress(CorruptRecord, ForbiddenType):  # it is deleted all the same
                _, stored = decrypt_item(reader.seal, thread_id, name, *row)
                value = reader.codec.decode(stored)
                if isinstance(value, BaseMessage):
                    hashes.add(hash_message(reader.seal.hash_key, value))
    report = yield from maintenance.delete_thread(thread_id)
    yield from maintenance.database.request_scrub()
    counts = report.checkpoints, report.items
    erased = ErasureReport(*counts, tuple(sorted(hashes)))
    return replace(erased, runs=report.runs, events=report.events, crons=report.crons)


class _Eraser:
    """Goes over everything in a thread that refers to items.

    Attributes:
        checkpoints: How many checkpoints changed.
        cancelled: The tasks of heads that will not run.
        dicts: Logs whose items are pairs.
        deltas: Logs of `DeltaChannel`s, whose items may come from writes of tasks.
        runs: How many runs of the server changed.
        crons: How many crons of the server were deleted.
    """

    def __init__(
        self, reader: CheckpointReader, thread_id: str, row: Row, remover: Remover
    ) -> None:
        key, _, generation, removals = row
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal
        self.codec, self.thread_id, self.remover = reader.codec, thread_id, remover
        self.thread = Thread(key, generation, removals)  # not the cache's
        self.additions = Additions(reader.sql, reader.seal, thread_id, self.thread, time.time())
        self.checkpoints = self.runs = self.crons = 0
        self.cancelled: set[str] = set()
        self.dicts: set[int] = set()
        self.deltas: set[int] = set()
        self._needles = remover.needles()
        self._types_with_texts = reader.codec.types.encoded_names_of_searchable_types
        self._looking = True  # nothing is written yet
        self._stored: dict[int, dict[int, bytes]] = {}  # all items, by log and position
        # the positions of those whose bytes may name a message, and of those that may change
        self._suspects: dict[int, list[int]] = {}
        self._times: dict[int, dict[int, float]] = {}  # time of first storage, by log and position
        self._hits: dict[int, list[int]] = {}
        self._items: dict[tuple[int, int, bool, Where], Any] = {}  # what is left of hits
        self._calling: set[tuple[int, int]] = set()  # messages with calls that go
        self._parts_of_gone: set[tuple[int, int]] = set()  # pairs of removed dicts
        # the tasks sent that quoted a message, by checkpoint and place, for one namespace
        self._sent: dict[str, dict[int, str]] = {}
        self._subgraphs: tuple[str, ...] = ()  # the namespaces of those that have run
        self._in_sent = False  # whether this namespace is one of them
        self._awaited = False  # whether a list ended with a call that goes, unanswered

    def read_logs(self) -> Flow[None]:
        """Read all items of the thread."""
        for key, name, *ends in (yield self.sql("thread_logs", self.thread.key)):
            log, items = self.thread.get_or_add_log(key, name), dict[int, bytes]()
            log.next_position, log.next_alias = (stop for _, stop in next_log_positions(*ends))
            for first, stop in next_log_positions(*ends):
                for start in range(first, stop, PAGE):
                    page = self.reader.stored(self.thread_id, name, key, start, start + PAGE)
                    items.update((yield from page))
            self._times[key] = yield from self.reader.read_item_times(key, [(0, log.next_position)])
            log.origins = {p: unpack(items.pop(p)) for p in [*items] if p >= ALIASES}
            self._stored[key] = items
            for position, stored in items.items():  # what is left of another item may be this
                self.additions.placed.setdefault((name, stored), position)

    def untitle(self) -> Flow[None]:
        """Leave nothing that quotes what is erased where lists of threads read."""
        for thread, *_, stored in (yield self.sql("one_thread", self.thread_id)):
            title, told = decrypt_list_entry(self.seal, self.thread_id, stored)
            if self._quotes(title):
                yield self.sql("set_list_entry", None, None, thread)
            elif told is not None and (left := self._inline(told, Where(tasks=True))) is not told:
                left = self._encoded({}) if left is GONE else left
                listed = encrypt_list_entry(
                    self.seal, self.thread_id, title, (self.codec.decode(left), left)
                )
                yield self.sql("set_list_entry", *listed, thread)
        for thread, *_, stored in (yield self.sql("lock_client_metadata", self.thread_id)):
            client = decrypt_client_metadata(self.seal, self.thread_id, stored)
            if client is None:
                continue
            of_client = self.remover.without(client.metadata, Where(tasks=True))
            if of_client is not client.metadata:
                client = client._replace(metadata={} if of_client is GONE else of_client)
                sealed = encrypt_client_metadata(self.seal, self.thread_id, client)
                yield self.sql("set_client_metadata", *sealed, thread)

    def _quotes(self, title: Title | None) -> bool:
        """Whether a title has a part of what is erased."""
        if title is None or title == NO_TITLE:
            return False
        told = {"title": title.text}
        if self.remover.without(told, Where(tasks=True)) is not told:
            return True
        if title.message_id is None:  # what a cut one quotes cannot be told
            return bool(self.remover.found) and len(title.text) >= TITLE_LENGTH
        return title.message_id in {"", *self.remover.ids}

    def settle(self) -> None:
        """Learn what the messages found say that no other message says."""
        self.remover.settle()
        self._needles = self.remover.needles()
        stored = (stored for items in self._stored.values() for stored in items.values())
        self.remover.spare(map(self.codec.decode, filter(self._may_name, stored)))

    def _may_name(self, stored: bytes) -> bool:
        """Whether something to erase may be in these bytes; what cannot hold it is not decoded."""
        if not self.codec.packs_messages or any(needle in stored for needle in self._needles):
            return True
        return any(name in stored for name in self._types_with_texts)

    def run(self, *, looking: bool) -> Flow[None]:
        """Go over the thread once."""
        self._looking, self._subgraphs = looking, ()
        self._items.clear()
        self.cancelled.clear()
        for key, items in self._stored.items():
            suspects = {p for p, stored in items.items() if self._may_name(stored)}
            hits = {p for p in suspects if self._is_hit(self.codec.decode(items[p]))}
            origins = self.thread.logs[key].origins.items()
            for places, at in (self._suspects, suspects), (self._hits, hits):
                places[key] = sorted([*at, *(p for p, origin in origins if origin in at)])
        for namespace, ns, newest in (yield self.sql("thread_namespaces", self.thread.key)):
            self._in_sent = f"{ns}|".startswith(self._subgraphs)
            self._sent, head = {}, None
            for row, snapshot in (yield from self.reader.rows(self.thread_id, ns, namespace)):
                is_head = row[0] == row_key(namespace, newest)
                head = snapshot.checkpoint_id if is_head else head
                yield from self._checkpoint(ns, row, snapshot, is_head=is_head)
            for row in (yield self.sql("namespace_writes", namespace)):
                yield from self._writes(namespace, ns, row, head)
            self.cancelled |= {_task(ns, node) for node in self._sent.get(head or "", {}).values()}
        for row in (yield self.sql("runs_of_thread", self.thread_id, "")):
            yield from self._run(decrypt_run(self.seal, row))
        yield from self._crons_and_webhooks()

    def _crons_and_webhooks(self) -> Flow[None]:
        """Those of the thread that quote what is erased are deleted."""
        where = Where(inputs=True, texts=True, tasks=True)
        for row in (yield self.sql("crons_of_thread", self.thread_id)):
            content = decrypt_cron(self.seal, row).content
            if self.remover.without(content, where) is not content and not self._looking:
                yield self.sql("drop_cron", row[0])
                self.crons += 1
        for run_id, sealed in (yield self.sql("webhooks_of_thread", self.thread_id)):
            told = json.loads(self.seal.unseal(sealed, ("webhook", run_id)))
            if self.remover.without(told, where) is not told and not self._looking:
                yield self.sql("drop_webhook", run_id)

    def _run(self, run: RunRow) -> Flow[None]:
        """What a run of the server is asked, and what is told of it."""
        before = [*run[3:6]]
        wheres = Where(tasks=True), Where(tasks=True), Where(inputs=True, texts=True, tasks=True)
        left = [self.remover.without(*each) for each in zip(before, wheres, strict=True)]
        if self._looking or all(new is old for new, old in zip(left, before, strict=True)):
            return
        left = [old and {} if new is GONE else new for new, old in zip(left, before, strict=True)]
        yield self.sql("rewrite_run", *encrypt_run(self.seal, run.live, left), *run.live[1:3])
        self.runs += 1

    def _is_hit(self, value: Any) -> bool:
        """Whether an item, whatever it is part of, may not stay as it is."""
        where, entry = Where(True, True, True), _entry(value)
        if entry is not None and self.remover.without(entry, where) is not entry:
            return True
        return self.remover.without(value, where) is not value

    # -- checkpoints and pending writes

    def _checkpoint(self, ns: str, row: Row, snapshot: Snapshot, *, is_head: bool) -> Flow[None]:
        self._awaited = False
        other, metadata = snapshot.encoded_fields
        fields = [self._inline(other, Where()), self._inline(metadata, Where(tasks=True))]
        fields = [self._encoded({}) if stored is GONE else stored for stored in fields]
        refs, said = {}, {}
        for channel, ref in snapshot.references.items():
            if channel == TASKS:
                refs[channel] = yield from self._tasks(snapshot.checkpoint_id, ref)
            else:
                refs[channel] = yield from self._ref(channel, ref, channel.startswith("__"))
        for channel, before in snapshot.transcript.items():
            held = None if refs.get(channel) is GONE else snapshot.references.get(channel)
            said[channel] = self._said(held, *before)
        for channel in refs if self._awaited else ():
            if channel.startswith(NEXT_NODE):
                refs[channel] = GONE
                if is_head:
                    self.cancelled.add(_task(ns, channel.removeprefix(NEXT_NODE)))
        if self._looking or (fields, refs, said) == (
            snapshot.encoded_fields,
            snapshot.references,
            snapshot.transcript,
        ):
            return
        if fields[1] is not metadata:  # it is found no more by what this does not hold any more
            old, new = (
                {*metadata_tags(self.seal, self.codec.decode(stored))}
                for stored in (metadata, fields[1])
            )
            for number in old - new:
                yield self.sql("drop_tag", number, row[0])
        snapshot.encoded_fields = fields
        snapshot.references = {channel: ref for channel, ref in refs.items() if ref is not GONE}
        body = encrypt_checkpoint(self.seal, self.thread_id, ns, row, snapshot, said)
        yield self.sql("rewrite_checkpoint", body, row[0])
        self.checkpoints += 1

    def _tasks(self, uid: str, ref: Any) -> Flow[Any]:
        """The tasks sent to run next, without those that quote."""
        value = (yield from self._value(ref)) if self._may_change(ref) else None
        if not (isinstance(value, list) and all(isinstance(task, Send) for task in value)):
            return (yield from self._ref(TASKS, ref, inputs=True))  # a program's own
        left, gone = remove_quoting_tasks(self.remover, value)
        self._sent[uid] = {at: task.node for at, task in gone.items()}
        return self._encoded(left) if gone else ref

    def _writes(self, namespace: int, ns: str, row: Row, head: str | None) -> Flow[None]:
        """The writes of one task. A task with a result gets no run again."""
        uid, task, path = unpack_id(row[0]) or "", unpack_id(row[1]) or "", row[2]
        writes = decrypt_writes(self.seal, self.thread_id, ns, row)
        waits, sent = uid == head, self._sent.get(uid, {})
        quoting = next((at for at in sent if path.startswith(_SENT.format(at))), None)
        name = _task(ns, sent[quoting] if quoting is not None else "", task)
        if quoting is not None:
            self._subgraphs += (f"{name}|",)
        kept: list[Write] = []
        if quoting is not None and waits:
            del sent[quoting]
            self.cancelled.add(name)
        else:
            kept = yield from self._left_writes(ns, writes, waits)
            if has_no_result(writes) and len(kept) < len(writes):
                kept = [[0, NO_WRITES, self._encoded(None)]]
                if waits and any(channel == INTERRUPT for _, channel, _ in writes):
                    node = path.rpartition(", ")[2]
                    self.cancelled.discard(_task(ns, node))
                    self.cancelled.add(_task(ns, node, task))
            elif not has_no_result(writes) and has_no_result(kept):  # else the task would run again
                kept.append([0, NO_WRITES, self._encoded(None)])
        if not self._looking and kept != writes:
            body = encrypt_writes(self.seal, (self.thread_id, ns, uid, task, path), kept)
            yield self.sql("put_writes", namespace, *row[:3], body)

    def _left_writes(self, ns: str, writes: list[Write], waits: bool) -> Flow[list[Write]]:
        """The remaining writes of a task. Its questions and answers are never altered."""
        kept = []
        for index, channel, ref in writes:
            new = yield from self._ref(channel, ref, True)
            if new is ref or (new is not GONE and channel not in UNALTERED):
                kept.append([index, channel, new])
            elif waits and channel == TASKS:
                sent = yield from self._value(ref)
                self.cancelled.add(_task(ns, getattr(sent, "node", TASKS)))
        return kept

    # -- references

    def _ref(self, channel: str, ref: Any, inputs: bool) -> Flow[Any]:
        """A reference to what is left of a value: the same if all of it is, `GONE` if nothing."""
        texts, tasks = inputs and channel in self.remover.channels, channel in TASK_CHANNELS
        where, new = Where(inputs, texts, tasks or self._in_sent), ref
        if not isinstance(ref, bytes) and ref[0] in (SNAPSHOT, DELTA):
            return (yield from self._erase_from_delta(channel, ref))
        if not isinstance(ref, bytes) and ref[0] in (ITEM, LIST, DICT):
            new = yield from self._split(ref, where)
        elif self._may_change(ref):
            new = self._left((yield from self._value(ref)), where, ref)
        if new is not ref and self._looking and not channel.startswith("__"):
            self.remover.channels.add(channel)
        return new

    def _erase_from_delta(self, channel: str, ref: Any) -> Flow[Any]:
        """Return a reference to the value of a `DeltaChannel` without the erased messages."""
        kind, inner = ref
        if isinstance(inner, int):
            return ref
        # from a replayed value, messages without ids are erased as they are from the writes
        left = yield from self._ref(channel, inner, kind == DELTA)
        if left is GONE:  # without a snapshot here, langgraph would use an older one
            empty = self._encoded(DeltaSnapshot(None))
            return empty if inner[0] == ITEM else [kind, [*inner[:2], []]]
        return ref if left is inner else [kind, left]

    def _may_change(self, ref: Any) -> bool:
        return self._may_name(ref if isinstance(ref, bytes) else pack(ref)) or any(
            _between(self._suspects, log, *part)
            for log, numbers in references(ref)
            for part in unflat(numbers)
        )

    def _value(self, ref: Any) -> Flow[Any]:
        return (yield from self.reader.value(self.thread_id, self.thread, ref))

    def _inline(self, stored: bytes, where: Where) -> Any:
        if not self._may_name(stored):
            return stored
        return self._left(self.codec.decode(stored), where, stored)

    def _left(self, value: Any, where: Where, ref: Any) -> Any:
        new = self.remover.without(value, where)
        return ref if new is value else GONE if new is GONE else self._encoded(new)

    def _encoded(self, value: Any) -> bytes:
        return self.codec.encode(value, lambda: "a value that held an erased message")

    def _split(self, ref: Any, where: Where) -> Flow[Any]:
        kind, log, numbers = ref
        ranges = unflat([numbers, 1] if kind == ITEM else numbers)
        if kind == DICT:
            self.dicts.add(log)
            if (yield from self._is_message(log, ranges, where)):
                self._parts_of_gone |= {(log, position) for position in positions(ranges)}
                return GONE
        parts = self._parts(log, ranges, where, pairs=kind == DICT)
        if parts is None:
            return ref
        if kind == ITEM:
            return [ITEM, log, self._append(log, parts)[0][0]] if parts else GONE
        last = self.thread.logs[log].origin_position(ranges[-1][1] - 1)
        self._awaited = self._awaited or (log, last) in self._calling
        return [kind, log, flat(self._append(log, parts))]

    def _is_message(self, log: int, ranges: Ranges, where: Where) -> Flow[bool]:
        """Whether a dict that was split is itself a message."""
        suspects = (_between(self._suspects, log, *part) for part in ranges)
        if count(ranges) > _MESSAGE_FIELDS or not any(suspects):
            return False
        return self.remover.is_gone((yield from self._value([DICT, log, flat(ranges)])), where)

    def _said(self, held: Any, log: int, numbers: Any) -> Any:
        """The history up to a checkpoint, `held` by a channel in part, if it does not stay."""
        ranges = unflat(numbers)
        ref, are_pairs = value_reference(held), False
        if ref is not held:
            self.deltas.add(log)
            are_pairs = held[1] == DICT
        split = isinstance(ref, list) and ref[0] in (LIST, DICT)
        pairs = ref[0] == DICT if split else are_pairs or log in self.dicts
        where = Where(inputs=log in self.deltas, tasks=self._in_sent)
        parts = self._parts(log, ranges, where, pairs=pairs)
        gone = self._parts_of_gone and self._parts_of_gone.intersection(
            (log, position) for position in positions(ranges)
        )
        if gone and split:  # keep items that are also part of another value
            gone -= {(log, p) for p in positions(unflat(ref[2]))}
        if parts is None and not gone:
            return [log, numbers]
        kept: list[bytes | Range] = []
        for part in ranges if parts is None else parts:
            if isinstance(part, bytes):
                kept.append(part)
            else:
                kept += ((p, p + 1) for p in range(*part) if (log, p) not in gone)
        return [log, flat(once(self._append(log, kept)))]

    def _append(self, log: int, parts: list[bytes | Range]) -> Ranges:
        if self._looking:
            return [(0, 1)]  # nobody will read it
        return self.additions.append(self.thread.logs[log].name, parts)

    # -- items

    def _parts(
        self, log: int, ranges: Ranges, where: Where, *, pairs: bool
    ) -> list[bytes | Range] | None:
        """The remaining parts of a list or dict; None: all of it."""
        parts: list[bytes | Range] = []
        same = True
        for start, stop in ranges:
            for position in _between(self._hits, log, start, stop):
                new = self._item(log, self.thread.logs[log].origin_position(position), pairs, where)
                if new is None:
                    continue
                same = False
                parts += [(start, position)] if start < position else []
                parts += [] if new is GONE else [new]
                start = position + 1
            parts += [(start, stop)] if start < stop else []
        return None if same else parts

    def _item(self, *hit: Any) -> Any:
        """See `_new_item`. A `functools.cache` of it would hold this object in a cycle."""
        if hit not in self._items:
            self._items[hit] = self._new_item(*hit)
        return self._items[hit]

    def _new_item(self, log: int, position: int, pair: bool, where: Where) -> Any:
        """A hit without the messages, as it is stored; None: it stays as it is."""
        value = self.codec.decode(self._stored[log][position])
        entry = _entry(value) if pair else None
        before = value if entry is None else entry
        new = self.remover.without(before, where)
        if new is before:
            return None
        if new is GONE and isinstance(value, AIMessage) and value.tool_calls:
            self._calling.add((log, position))
        if entry is not None and new is not GONE:
            new = [*new.popitem()] if new else GONE
        if new is GONE:
            return GONE
        stored = self._encoded(new)
        times, key = self.additions.times, (self.thread.logs[log].name, stored)
        times[key] = min(times.get(key, inf), self._times[log].get(position, inf))
        return stored


def _between(places: dict[int, list[int]], log: int, start: int, stop: int) -> list[int]:
    at = places.get(log, [])
    return at[bisect_left(at, start) : bisect_left(at, stop)]


def _entry(value: Any) -> dict[Any, Any] | None:
    """The entry of a dict of which an item is the pair; None: it is none."""
    if type(value) is list and len(value) == 2:
        with suppress(TypeError):  # no key
            return dict([value])
    return None


def _task(ns: str, node: str, task_id: str = "") -> str:
    """A task as langgraph names it in a namespace."""
    name = f"{node}:{task_id}" if task_id else node
    return f"{ns}|{name}" if ns else name

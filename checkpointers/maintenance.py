"""Deletion of threads, runs, checkpoints, and of items that nothing refers to.

Garbage is reachability: an item goes when no checkpoint, pending write or history of its thread
refers to it. All of it runs in the writer's transactions, so no put can come between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from perdure.checkpointers.manifest import ALIASES, Ranges, covered, missing, references
from perdure.checkpointers.packing import unpack
from perdure.checkpointers.reader import Reader
from perdure.checkpointers.records import (
    log_spans,
    open_writes,
    pack_id,
    place,
    seal_checkpoint,
    span,
    tags_of,
)
from perdure.checkpointers.reports import PruneReport, Retention
from perdure.checkpointers.thread_copy import copied
from perdure.errors import ConfigurationError, CorruptRecord
from perdure.storage.database import Database
from perdure.storage.flow import Flow, Statement, rows_of

T = TypeVar("T")

PRUNE_BATCH: Final = 500  # checkpoints deleted per transaction
Keep = Callable[[list["Kept"]], set[str]]
"""Given a namespace's checkpoints, newest first, the ids of those that stay."""


class Kept(NamedTuple):
    """A checkpoint of a namespace, as retention rules look at it."""

    key: int
    uid: str
    parent: str | None
    put_at: float
    metadata: Mapping[str, Any]
    channels: frozenset[str]
    is_head: bool


class Maintenance:
    """Deletes, copies and prunes threads, in batches that let others write in between."""

    def __init__(self, reader: Reader, database: Database) -> None:
        self.reader, self.sql, self.database = reader, reader.sql, database

    # -- whole threads

    def delete_threads(self, thread_ids: Sequence[str]) -> None:
        """Remove threads and give their space back; unknown ones are no error."""
        for thread_id in thread_ids:
            self.write(thread_id, lambda: self.delete_thread(thread_id))  # noqa: B023 - run at once
        self.database.shrink()

    def copy_thread(self, source: str, target: str, checkpoint_id: str | None) -> None:
        """Copy a thread into a new one; see `Checkpointer.copy_thread`."""

        def flow() -> Flow[None]:
            new = yield from copied(self.reader, source, target, checkpoint_id)
            if checkpoint_id is not None:
                yield from self.sweep(target, new)
                yield self.sql("removed", new)

        self.database.write(flow)

    def delete_checkpoints(self, doomed: Mapping[str, set[int]]) -> None:
        """Remove checkpoints by their keys, by thread."""
        for thread_id, keys in doomed.items():
            self._prune(thread_id, lambda kept: {c.uid for c in kept if c.key not in keys})  # noqa: B023
        if doomed:
            self.database.shrink()

    def prune(self, thread_ids: Sequence[str], strategy: str) -> None:
        """See `Checkpointer.prune`."""
        if strategy in ("delete", "delete_all"):
            self.delete_threads(thread_ids)
            return
        if strategy != "keep_latest":
            raise ConfigurationError(
                f"strategy is {strategy!r}; expected 'keep_latest' or 'delete'"
            )
        for thread_id in thread_ids:
            self._prune(thread_id, lambda kept: {c.uid for c in kept if c.is_head})
        if thread_ids:
            self.database.shrink()

    def retain(self, rule: Retention, thread_ids: Sequence[str] | None) -> PruneReport:
        """See `Checkpointer.retain`."""
        _check_rule(rule)
        keep = _keep_rule(rule, time.time())
        checkpoints = items = threads = 0
        for thread_id in self._thread_ids() if thread_ids is None else thread_ids:
            done = self._prune(thread_id, keep, history=rule.history)
            checkpoints += done.checkpoints
            items += done.items
            threads += done.checkpoints > 0
        self.database.shrink()
        return PruneReport(checkpoints, items, threads)

    def _thread_ids(self) -> Iterator[str]:
        """Every thread, a page at a time."""
        last = 0
        while rows := self.database.read(rows_of(self.sql["thread_ids"], last, 256)):
            yield from (thread_id for _, thread_id, _ in rows)
            last = rows[-1][0]

    def _prune(self, thread_id: str, keep: Keep, *, history: bool = True) -> PruneReport:
        """Delete all but what `keep` names, see `pruned`, a batch in each transaction."""
        checkpoints = items = 0
        while True:
            done = self.write(thread_id, lambda: self.pruned(thread_id, keep, history=history))
            checkpoints += done.checkpoints
            items += done.items
            if done.checkpoints < PRUNE_BATCH:
                return PruneReport(checkpoints, items)

    def write(self, thread_id: str, make: Callable[[], Flow[T]]) -> T:
        """Write what makes the cache of a thread stale."""
        return self.database.write(make, lambda _: self.reader.cache.forget(thread_id))

    def delete_thread(self, thread_id: str) -> Flow[PruneReport]:
        """Remove a thread and all that belongs to it. An unknown one is no error."""
        rows = yield self.sql("one_thread", thread_id)
        if not rows:
            return PruneReport()
        thread = rows[0][0]
        ((checkpoints, items, _),) = yield self.sql("sizes", thread)
        for namespace, ns, _ in (yield self.sql("thread_namespaces", thread)):
            for row in (yield self.sql("checkpoints_page", *span(namespace), -1)):
                try:
                    metadata = self.reader.metadata(self.reader.open_row(thread_id, ns, row))
                except CorruptRecord:  # it goes all the same
                    yield self.sql("drop_tags", row[0])
                else:
                    yield self._untagged(row[0], metadata)
            yield self.sql("drop_namespace_checkpoints", *span(namespace))
            yield self.sql("drop_namespace_writes", namespace)
        for log, *_ in (yield self.sql("thread_logs", thread)):
            yield self.sql("drop_items", *span(log))
        for table in ("drop_namespaces", "drop_logs", "drop_thread"):
            yield self.sql(table, thread)
        return PruneReport(checkpoints, items, 1)

    def _untagged(self, key: int, metadata: Mapping[str, Any]) -> list[Statement]:
        return [self.sql("drop_tag", number, key) for number in tags_of(self.reader.seal, metadata)]

    # -- some checkpoints of a thread

    def pruned(self, thread_id: str, keep: Keep, *, history: bool) -> Flow[PruneReport]:
        """Delete the checkpoints that `keep` does not name, then the items that nothing needs."""
        rows = yield self.sql("find_thread", thread_id)
        if not rows:
            return PruneReport()
        thread = rows[0][0]
        dropped = 0
        for namespace, ns, head in (yield self.sql("thread_namespaces", thread)):
            kept = []
            for row, snapshot in (yield from self.reader.rows(thread_id, ns, namespace)):
                metadata, is_head = self.reader.metadata(snapshot), row[0] == place(namespace, head)
                known = row[0], snapshot.uid, snapshot.parent, row[4], metadata
                kept.append(Kept(*known, frozenset(snapshot.refs), is_head))
            stay = _with_ancestors(kept, keep(kept))
            doomed = [c for c in reversed(kept) if c.uid not in stay][: PRUNE_BATCH - dropped]
            dropped += len(doomed)
            for each in doomed:
                yield [
                    *self._untagged(each.key, each.metadata),
                    self.sql("drop_writes", namespace, pack_id(each.uid)),
                    self.sql("drop_checkpoint", each.key),
                ]
                if each.is_head:
                    yield self.sql("pin", 0, namespace)
            if not history:
                yield from self._forget_said(thread_id, ns, namespace)
        if not dropped and history:
            return PruneReport()
        items = yield from self.sweep(thread_id, thread)
        yield self.sql("removed", thread)
        return PruneReport(dropped, items)

    def _forget_said(self, thread_id: str, ns: str, namespace: int) -> Flow[None]:
        """Let kept checkpoints remember only what they hold."""
        for row, snapshot in (yield from self.reader.rows(thread_id, ns, namespace)):
            if snapshot.said:
                body = seal_checkpoint(self.reader.seal, thread_id, ns, row, snapshot, {})
                yield self.sql("rewrite_checkpoint", body, row[0])

    # -- items

    def sweep(self, thread_id: str, thread: int) -> Flow[int]:
        """Delete the items of a thread that nothing refers to. Returns how many."""
        live: dict[int, Ranges] = defaultdict(list)
        for namespace, ns, _ in (yield self.sql("thread_namespaces", thread)):
            yield from self._mark(thread_id, ns, namespace, live)
        items = 0
        for log, name, *last in (yield self.sql("thread_logs", thread)):
            yield from self._mark_origins(thread_id, name, log, live[log])
            for start, stop in missing(log_spans(*last), covered(live[log])):
                if start < ALIASES:
                    rows = yield self.sql("count_items", *span(log, start, stop))
                    items += rows[0][0]
                yield self.sql("drop_items", *span(log, start, stop))
        return items

    def _mark(self, thread_id: str, ns: str, namespace: int, live: dict[int, Ranges]) -> Flow[None]:
        for _, snapshot in (yield from self.reader.rows(thread_id, ns, namespace)):
            yield from self._mark_refs(snapshot.refs.values(), live)
            for log, numbers in snapshot.said.values():  # as written
                yield from self._mark_ranges(log, numbers, live)
        for row in (yield self.sql("namespace_writes", namespace)):
            writes = open_writes(self.reader.seal, thread_id, ns, row)
            yield from self._mark_refs((ref for _, _, ref in writes), live)

    def _mark_refs(self, refs: Iterable[Any], live: dict[int, Ranges]) -> Flow[None]:
        for ref in refs:
            for log, numbers in references(ref):
                yield from self._mark_ranges(log, numbers, live)

    def _mark_ranges(self, log: int, numbers: Any, live: dict[int, Ranges]) -> Flow[None]:
        if numbers and not isinstance(numbers[0], int):
            (blocks, *places), *_ = numbers
            live[blocks] += [(position, position + 1) for position in places]
        live[log] += yield from self.reader.ranges(numbers)
        if len(live[log]) > 4096:
            live[log] = covered(live[log])

    def _mark_origins(self, thread_id: str, name: str, log: int, live: Ranges) -> Flow[None]:
        """Keep what the aliases of a log repeat."""
        found: Ranges = []
        for start, stop in covered(live):
            if stop > ALIASES:
                aliases = self.reader.stored(thread_id, name, log, max(start, ALIASES), stop)
                origins = [unpack(body) for _, body in (yield from aliases)]
                found += [(origin, origin + 1) for origin in origins]
        live += found


def _with_ancestors(kept: list[Kept], stay: set[str]) -> set[str]:
    """Add the ancestors whose writes a kept checkpoint's DeltaChannel is rebuilt from."""
    by_uid: dict[str | None, Kept] = {c.uid: c for c in kept}
    out = set(stay)
    for checkpoint in kept:
        counters = checkpoint.metadata.get("counters_since_delta_snapshot") or {}
        lacking = set(counters) - checkpoint.channels
        at = by_uid.get(checkpoint.parent) if checkpoint.uid in stay else None
        while lacking and at is not None:
            out.add(at.uid)
            lacking -= at.channels
            at = by_uid.get(at.parent)
    return out


def _keep_rule(rule: Retention, now: float) -> Keep:
    """A retention rule as a choice among the checkpoints of a namespace."""

    def keep(namespace: list[Kept]) -> set[str]:
        stay = [c for c in namespace if c.is_head]
        if rule.last is not None:
            stay += namespace[: rule.last]
        if rule.days is not None:
            stay += [c for c in namespace if c.put_at >= now - rule.days * 86400]
        if rule.turns:
            inside = {c.parent for c in namespace if c.metadata.get("source") == "loop"}
            stay += [c for c in namespace if c.uid not in inside]
        return {c.uid for c in stay}

    return keep


def _check_rule(rule: Retention) -> None:
    if rule.last is None and rule.days is None and not rule.turns:
        raise ConfigurationError("the retention rule is empty; give last=, days= or turns=True")
    for name, value in (("last", rule.last), ("days", rule.days)):
        if value is not None and value < 0:
            raise ConfigurationError(f"retention {name}={value!r}; expected zero or more")

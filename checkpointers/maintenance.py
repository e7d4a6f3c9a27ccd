"""Deleting: threads, runs, checkpoints, and the items nothing refers to any more.

Garbage is reachability: an item goes when no checkpoint, pending write or history of its thread
refers to it. All of it runs in the writer's transactions, so no put can come between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from perdure.checkpointers.cache import Cache
from perdure.checkpointers.manifest import ALIASES, Ranges, covered, missing, references
from perdure.checkpointers.packing import unpack
from perdure.checkpointers.reader import Reader
from perdure.checkpointers.records import (
    checkpoint_place,
    item_place,
    log_spans,
    pack_row,
    place,
    span,
    tags_of,
    unpack_id,
    unpack_writes,
    writes_place,
)
from perdure.checkpointers.reports import PruneReport, Retention
from perdure.checkpointers.thread_copy import copied
from perdure.checkpointers.threads import sizes
from perdure.errors import ConfigurationError, CorruptRecord
from perdure.storage.database import Database
from perdure.storage.flow import Flow, Row, Statement, rows_of

T = TypeVar("T")

PRUNE_BATCH: Final = 500  # checkpoints deleted per transaction
Keep = Callable[[list["Kept"]], set[int]]


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint of a namespace, as retention rules look at it."""

    key: int
    parent_key: int | None
    put_at: float
    metadata: Mapping[str, Any]
    channels: frozenset[str]
    is_head: bool


@dataclass(slots=True)
class Maintenance:
    """Deletes, copies and prunes threads, in batches that let others write in between.

    Args:
        sql: The statements, by name.
        reader: The flows that read.
        database: Runs them.
        cache: Forgets what was changed.
    """

    sql: dict[str, str]
    reader: Reader
    database: Database
    cache: Cache

    # -- whole threads

    def delete_threads(self, thread_ids: Sequence[str]) -> None:
        """Remove threads and give their space back; unknown ones are no error."""
        for thread_id in thread_ids:
            self._write(thread_id, lambda: self.delete_thread(thread_id))  # noqa: B023 - run at once
        self.database.shrink()

    def copy_thread(self, source: str, target: str, checkpoint_id: str | None) -> None:
        """Copy a thread into a new one; see `Checkpointer.copy_thread`."""

        def flow() -> Flow[None]:
            new = yield from copied(self.sql, self.reader, source, target, checkpoint_id)
            if checkpoint_id is not None:
                yield from self.sweep(target, new)
                yield Statement(self.sql["removed"], (new,))

        self.database.write(flow)

    def delete_checkpoints(self, doomed: Mapping[str, set[int]]) -> None:
        """Remove checkpoints by their keys, by thread."""
        for thread_id, keys in doomed.items():
            self._prune(thread_id, _keep_but(keys), history=True)
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
            self._prune(thread_id, _keep_heads, history=True)
        if thread_ids:
            self.database.shrink()

    def retain(self, rule: Retention, thread_ids: Sequence[str] | None) -> PruneReport:
        """See `Checkpointer.retain`."""
        _check_rule(rule)
        keep = _keep_rule(rule, time.time())
        total = PruneReport()
        for thread_id in self._thread_ids() if thread_ids is None else thread_ids:
            done = self._prune(thread_id, keep, history=rule.history)
            total += PruneReport(done.checkpoints, done.items, 1 if done.checkpoints else 0)
        self.database.shrink()
        return total

    def _thread_ids(self) -> Iterator[str]:
        """Every thread, a page at a time."""
        last = 0
        while rows := self.database.read(rows_of(self.sql["thread_ids"], last, 256)):
            yield from (thread_id for _, thread_id, _ in rows)
            last = rows[-1][0]

    def _prune(self, thread_id: str, keep: Keep, *, history: bool) -> PruneReport:
        total = PruneReport()
        while True:
            done = self._write(
                thread_id, lambda: self.pruned(thread_id, keep, history=history, limit=PRUNE_BATCH)
            )
            total += done
            if done.checkpoints < PRUNE_BATCH:
                return total

    def _write(self, thread_id: str, make: Callable[[], Flow[T]]) -> T:
        return self.database.write(make, lambda _: self.cache.forget(thread_id))

    def delete_thread(self, thread_id: str) -> Flow[PruneReport]:
        """Remove a thread and all that belongs to it. An unknown one is no error."""
        rows = yield Statement(self.sql["one_thread"], (thread_id,))
        if not rows:
            return PruneReport()
        thread = rows[0][0]
        checkpoints, items, _ = yield from sizes(self.sql, thread)
        namespaces = yield Statement(self.sql["thread_namespaces"], (thread,))
        for namespace, ns, _ in namespaces:
            for row in (yield Statement(self.sql["checkpoint_bodies"], span(namespace))):
                yield from self._untag(thread_id, ns, row)
            yield Statement(self.sql["drop_namespace_checkpoints"], span(namespace))
            yield Statement(self.sql["drop_namespace_writes"], (namespace,))
        for log, *_ in (yield Statement(self.sql["thread_logs"], (thread,))):
            yield Statement(self.sql["drop_items"], span(log))
        for table in ("drop_namespaces", "drop_logs", "drop_thread"):
            yield Statement(self.sql[table], (thread,))
        return PruneReport(checkpoints, items, 1)

    def _untag(self, thread_id: str, ns: str, row: Row) -> Flow[None]:
        try:
            metadata = self.reader.metadata(self.reader.open_row(thread_id, ns, row))
        except CorruptRecord:
            yield Statement(
                self.sql["drop_tags"], (row[0],)
            )  # what cannot be read goes all the same
            return
        for number in tags_of(self.reader.seal, metadata):
            yield Statement(self.sql["drop_tag"], (number, row[0]))

    # -- some checkpoints of a thread

    def pruned(self, thread_id: str, keep: Keep, *, history: bool, limit: int) -> Flow[PruneReport]:
        """Delete the checkpoints that `keep` does not name, then the items that nothing needs.

        Args:
            thread_id: Whose.
            keep: Given a namespace's checkpoints, newest first, the keys of those that stay.
            history: Whether everything said stays readable.
            limit: How many checkpoints to delete at most; call again until none are.
        """
        rows = yield Statement(self.sql["find_thread"], (thread_id,))
        if not rows:
            return PruneReport()
        thread = rows[0][0]
        dropped = 0
        for namespace, ns, head in (yield Statement(self.sql["thread_namespaces"], (thread,))):
            kept = yield from self._checkpoints(thread_id, ns, namespace, head)
            stay = _with_ancestors(kept, keep(kept))
            doomed = [c.key for c in reversed(kept) if c.key not in stay][: limit - dropped]
            yield from self._drop(thread_id, ns, namespace, doomed)
            dropped += len(doomed)
            if place(namespace, head) in doomed:
                yield Statement(self.sql["pin"], (0, namespace))
            if not history:
                yield from self._forget_said(thread_id, ns, namespace)
        if not dropped and history:
            return PruneReport()
        items = yield from self.sweep(thread_id, thread)
        yield Statement(self.sql["removed"], (thread,))
        return PruneReport(dropped, items)

    def _checkpoints(self, thread_id: str, ns: str, namespace: int, head: int) -> Flow[list[Kept]]:
        rows = yield Statement(self.sql["checkpoint_bodies"], span(namespace))
        by_uid = {row[1]: row[0] for row in rows}
        out = []
        for row in rows:
            snapshot = self.reader.open_row(thread_id, ns, row)
            out.append(
                Kept(
                    row[0],
                    by_uid.get(row[2]),
                    row[4],
                    self.reader.metadata(snapshot),
                    frozenset(snapshot.refs),
                    row[0] == place(namespace, head),
                )
            )
        return out

    def _drop(self, thread_id: str, ns: str, namespace: int, doomed: list[int]) -> Flow[None]:
        for key in doomed:
            row = (yield Statement(self.sql["checkpoint_at"], (key,)))[0]
            yield from self._untag(thread_id, ns, row)
            yield Statement(self.sql["drop_writes"], (namespace, row[1]))
            yield Statement(self.sql["drop_checkpoint"], (key,))

    def _forget_said(self, thread_id: str, ns: str, namespace: int) -> Flow[None]:
        """Let kept checkpoints remember only what they hold."""
        for row in (yield Statement(self.sql["checkpoint_bodies"], span(namespace))):
            snapshot = self.reader.open_row(thread_id, ns, row)
            if snapshot.said:
                bound = checkpoint_place(thread_id, ns, row)
                body = self.reader.seal.seal(pack_row(snapshot, {}), bound)
                yield Statement(self.sql["rewrite_checkpoint"], (body, row[0]))

    # -- items

    def sweep(self, thread_id: str, thread: int) -> Flow[int]:
        """Delete the items of a thread that nothing refers to. Returns how many."""
        live: dict[int, Ranges] = defaultdict(list)
        for namespace, ns, _ in (yield Statement(self.sql["thread_namespaces"], (thread,))):
            yield from self._mark(thread_id, ns, namespace, live)
        items = 0
        for log, name, *last in (yield Statement(self.sql["thread_logs"], (thread,))):
            yield from self._mark_origins(thread_id, name, log, live[log])
            for start, stop in missing(log_spans(*last), covered(live[log])):
                if start < ALIASES:
                    rows = yield Statement(self.sql["count_items"], span(log, start, stop))
                    items += rows[0][0]
                yield Statement(self.sql["drop_items"], span(log, start, stop))
        return items

    def _mark(self, thread_id: str, ns: str, namespace: int, live: dict[int, Ranges]) -> Flow[None]:
        rows = yield Statement(self.sql["checkpoint_bodies"], span(namespace))
        yield from self.reader.check_complete(len(rows), *span(namespace))
        for row in rows:
            snapshot = self.reader.open_row(thread_id, ns, row)
            for ref in snapshot.refs.values():
                yield from self._mark_ref(ref, live)
            for log, numbers in snapshot.said.values():  # as written
                yield from self._mark_ranges(log, numbers, live)
        for uid, task, path, body in (yield Statement(self.sql["namespace_writes"], (namespace,))):
            ids = unpack_id(uid) or "", unpack_id(task) or ""
            bound = writes_place(thread_id, ns, *ids, path)
            for _, _, ref in unpack_writes(self.reader.seal.open(body, bound)):
                yield from self._mark_ref(ref, live)

    def _mark_ref(self, ref: Any, live: dict[int, Ranges]) -> Flow[None]:
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
        found = []
        for start, stop in covered(live):
            if stop > ALIASES:
                between = span(log, max(start, ALIASES), stop)
                for key, body in (yield Statement(self.sql["items_between"], between)):
                    bound = item_place(thread_id, name, key & 0xFFFFFFFF)
                    origin = unpack(self.reader.seal.open(body, bound))
                    found.append((origin, origin + 1))
        live += found


def _with_ancestors(kept: list[Kept], stay: set[int]) -> set[int]:
    """Add the ancestors whose writes a kept checkpoint's DeltaChannel is rebuilt from."""
    by_key = {c.key: c for c in kept}
    out = set(stay)
    for checkpoint in kept:
        if checkpoint.key not in stay:
            continue
        counters = checkpoint.metadata.get("counters_since_delta_snapshot") or {}
        lacking = set(counters) - checkpoint.channels
        at = by_key.get(checkpoint.parent_key or 0)
        while lacking and at is not None:
            out.add(at.key)
            lacking -= at.channels
            at = by_key.get(at.parent_key or 0)
    return out


def _keep_rule(rule: Retention, now: float) -> Keep:
    """A retention rule as a choice among the checkpoints of a namespace."""

    def keep(namespace: list[Kept]) -> set[int]:
        stay = {c.key for c in namespace if c.is_head}
        if rule.last is not None:
            stay |= {c.key for c in namespace[: rule.last]}
        if rule.days is not None:
            stay |= {c.key for c in namespace if c.put_at >= now - rule.days * 86400}
        if rule.turns:
            inside = {c.parent_key for c in namespace if c.metadata.get("source") == "loop"}
            stay |= {c.key for c in namespace if c.key not in inside}
        return stay

    return keep


def _keep_heads(namespace: list[Kept]) -> set[int]:
    """Only the checkpoint from which the next run starts."""
    return {c.key for c in namespace if c.is_head}


def _keep_but(doomed: set[int]) -> Keep:
    """All but some."""
    return lambda namespace: {c.key for c in namespace} - doomed


def _check_rule(rule: Retention) -> None:
    if rule.last is None and rule.days is None and not rule.turns:
        raise ConfigurationError("the retention rule is empty; give last=, days= or turns=True")
    for name, value in (("last", rule.last), ("days", rule.days)):
        if value is not None and value < 0:
            raise ConfigurationError(f"retention {name}={value!r}; expected zero or more")

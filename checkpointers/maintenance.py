"""Deletion of threads, runs, checkpoints, and of items that nothing refers to.

An item goes when no checkpoint, pending write or history of its thread refers to it. All of it runs
in the writer's transactions, so no put can come between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

from perdure.checkpointers.address import check_thread_ids
from perdure.checkpointers.cache import Snapshot
from perdure.checkpointers.labels import UPDATED, find_updated
from perdure.checkpointers.listing import Listing
from perdure.checkpointers.manifest import (
    ALIASES,
    Ranges,
    covered,
    flat,
    missing,
    references,
    unflat,
    value_reference,
)
from perdure.checkpointers.reader import CheckpointReader
from perdure.checkpointers.records import (
    decrypt_list_entry,
    decrypt_writes,
    encrypt_checkpoint,
    key_range,
    metadata_tags,
    next_log_positions,
    pack_id,
    row_key,
    unpack_id,
)
from perdure.checkpointers.reports import PruneReport, Retention, ThreadInfo
from perdure.checkpointers.said import unsay
from perdure.checkpointers.threads import ThreadReader
from perdure.checkpointers.values import unpack
from perdure.errors import ConfigurationError, CorruptRecord
from perdure.storage.database import Database
from perdure.storage.flow import NO_LIMIT, Flow, Row, Statement

T = TypeVar("T")

PRUNE_BATCH: Final = 500  # checkpoints deleted per transaction
RUN_DAYS: Final = 1
"""The number of days after an update of the state during which retention keeps the checkpoint that
was updated. A run may still go on from it."""
Keep = Callable[[list["Kept"]], set[str]]
"""Given a namespace's checkpoints, newest first, the ids of those that stay."""


class Kept(NamedTuple):
    """A checkpoint of a namespace, as retention rules look at it."""

    key: int
    uid: str
    parent: str | None
    active_at: float
    metadata: Mapping[str, Any]
    channels: frozenset[str]
    is_head: bool
    size: int


class Maintenance:
    """Deletes, copies and prunes threads, in batches that let others write in between."""

    def __init__(self, reader: CheckpointReader, listing: Listing, database: Database) -> None:
        self.reader, self.sql, self.seal = reader, reader.sql, reader.seal
        self.listing, self.database, self.threads = listing, database, ThreadReader(reader)

    def delete_threads(self, thread_ids: Sequence[str], *, recorded: bool = True) -> None:
        """Delete threads and return their space to the disk; see `delete_thread`."""
        for thread_id in check_thread_ids(thread_ids):
            self.write(thread_id, partial(self.delete_thread, thread_id, recorded=recorded))
        self.database.shrink()

    def delete_for_runs(self, run_ids: Iterable[str], thread_id: str | None = None) -> None:
        """See `Checkpointer.delete_for_runs`."""
        doomed: dict[str, set[int]] = defaultdict(set)
        for run_id in run_ids:
            owners = self.database.read(partial(self.listing.owners, {"run_id": run_id}))
            for owner, key in owners or ():
                if thread_id in (None, owner):
                    doomed[owner].add(key)
        for owner, keys in doomed.items():
            self.write(owner, partial(self._record_rollback, owner, keys))
            self._prune(owner, partial(_all_but, keys))
            self.write(owner, partial(self.untitled, owner, of_metadata=True))
        if doomed:
            self.database.shrink()

    def _record_rollback(self, thread_id: str, keys: Iterable[int]) -> Flow[None]:
        """Record the ids of checkpoints that are removed with their run."""
        ids = []
        for key in keys:
            rows = yield self.sql("checkpoint_row", key)
            ids += [unpack_id(row[1]) or "" for row in rows]
        yield from self.reader.removals.add_rollback(thread_id, ids)

    def prune(self, thread_ids: Sequence[str], strategy: str) -> None:
        """See `Checkpointer.prune`."""
        if strategy in ("delete", "delete_all"):
            self.delete_threads(thread_ids)
        elif strategy == "keep_latest":
            self.retain(Retention(last=0), check_thread_ids(thread_ids))
        else:
            raise ConfigurationError(
                f"strategy is {strategy!r}; expected 'keep_latest' or 'delete'"
            )

    def retain(self, rule: Retention, thread_ids: object, *, dry_run: bool = False) -> PruneReport:
        """See `Checkpointer.retain`."""
        _check_rule(rule)
        keep, total = _keep_rule(rule, time.time()), PruneReport()
        for thread_id in self._chosen(thread_ids):
            if dry_run:
                options: Any = {"spares_runs": True, "dry_run": True}
                pruned = partial(self.pruned, thread_id, keep, rule.history, **options)
                done = self.database.read(pruned)
            else:
                done = self._prune(thread_id, keep, rule.history, spares_runs=True)
            total += replace(done, threads=int(done.checkpoints > 0))
        if not dry_run:
            self.database.shrink()
        return total

    def delete_idle(
        self, before: datetime, thread_ids: object, *, dry_run: bool
    ) -> list[ThreadInfo]:
        """See `Checkpointer.delete_idle`."""

        def idle(thread_id: str, delete: bool) -> Flow[ThreadInfo | None]:
            info = yield from self.threads.idle(thread_id, before)
            if info is not None and delete:
                yield from self.delete_thread(thread_id)
            return info

        gone = []
        for thread_id in self._chosen(thread_ids):
            info = self.database.read(partial(idle, thread_id, False))
            if info is not None and not dry_run:
                info = self.write(thread_id, partial(idle, thread_id, True))
            if info is not None:
                gone.append(info)
        if gone and not dry_run:
            self.database.shrink()
        return gone

    def _chosen(self, thread_ids: object) -> Iterable[str]:
        """The threads of an argument that names them; None: all."""
        return self.listing.thread_ids() if thread_ids is None else check_thread_ids(thread_ids)

    def _prune(
        self, thread_id: str, keep: Keep, history: bool = True, *, spares_runs: bool = False
    ) -> PruneReport:
        """Delete all but what `keep` names, see `pruned`, a batch in each transaction."""
        total = PruneReport()
        while True:
            pruned = partial(self.pruned, thread_id, keep, history, spares_runs=spares_runs)
            done = self.write(thread_id, pruned)
            total += done
            if done.checkpoints < PRUNE_BATCH:
                return total

    def write(self, thread_id: str, make_flow: Callable[[], Flow[T]]) -> T:
        """Remove parts of a thread, which makes its cache stale."""
        forget = self.reader.cache.drop_thread
        return self.database.write(
            make_flow, lambda _: forget(thread_id), exclusive_names=(thread_id,), deletes_rows=True
        )

    def untitled(self, thread_id: str, *, of_metadata: bool = False) -> Flow[None]:
        """Leave no title that quotes what may be removed: a message, or metadata too.

        What lists tell of the thread is read from its head anew, once for all lists.
        """
        for row in (yield self.sql("one_thread", thread_id)):
            title, _ = decrypt_list_entry(self.seal, thread_id, row[-1])
            if title is None or title.message_id is not None or of_metadata:
                yield from self.threads.tell_anew(row)

    def delete_thread(
        self, thread_id: str, *, runs: bool = True, recorded: bool = True
    ) -> Flow[PruneReport]:
        """Delete a thread and all of its data. An unknown id is no error.

        Args:
            thread_id: The thread.
            runs: Whether its runs, events, crons and webhooks are deleted as well.
            recorded: Whether to write a removal record, so that runs in progress can store nothing
                in the thread any more.
        """
        rows = yield self.sql("find_thread", thread_id)
        if not rows:
            return PruneReport()
        thread = rows[0][0]
        ((checkpoints, items, size),) = yield self.sql("thread_sizes", thread)
        if recorded:
            ids = yield from self._load_checkpoint_ids(thread)
            yield from self.reader.removals.add_record(thread_id, {}, ids)
        for namespace, ns, _ in (yield self.sql("thread_namespaces", thread)):
            yield from self.empty_namespace(thread_id, ns, namespace)
        for log, *_ in (yield self.sql("thread_logs", thread)):
            yield self.sql("drop_items", *key_range(log))
        for table in ("drop_namespaces", "drop_logs", "drop_thread"):
            yield self.sql(table, thread)
        yield from unsay(self.sql, thread)
        if not runs:
            return PruneReport(checkpoints, items, 1, size)
        gone = yield self.sql("drop_runs", thread)
        events = yield self.sql("drop_events", thread, 0, NO_LIMIT, NO_LIMIT)
        crons = yield self.sql("drop_crons", thread_id)
        yield self.sql("drop_webhooks", thread_id)
        return PruneReport(checkpoints, items, 1, size, len(gone), len(events), len(crons))

    def _load_checkpoint_ids(self, thread: int) -> Flow[set[str]]:
        """Return the ids of all checkpoints of a thread, also of those that only have writes."""
        packed = set[Any]()
        for namespace, *_ in (yield self.sql("thread_namespaces", thread)):
            packed |= {
                uid for _, uid, _ in (yield self.sql("checkpoint_keys", *key_range(namespace)))
            }
            packed |= {row[0] for row in (yield self.sql("namespace_writes", namespace))}
        return {unpack_id(uid) or "" for uid in packed}

    def empty_namespace(self, thread_id: str, ns: str, namespace: int) -> Flow[int]:
        """Remove the checkpoints of a namespace and their writes; returns how many there were."""
        rows = yield self.sql("checkpoints_page", *key_range(namespace), NO_LIMIT)
        for row in rows:
            try:
                metadata = self.reader.metadata(self.reader.open_row(thread_id, ns, row))
            except CorruptRecord:  # it goes all the same
                yield self.sql("drop_tags", row[0])
            else:
                yield self._untagged(row[0], metadata)
        yield self.sql("drop_namespace_checkpoints", *key_range(namespace))
        yield self.sql("drop_namespace_writes", namespace)
        return len(rows)

    def _untagged(self, key: int, metadata: Mapping[str, Any]) -> list[Statement]:
        return [self.sql("drop_tag", number, key) for number in metadata_tags(self.seal, metadata)]

    # -- some checkpoints of a thread

    def pruned(
        self,
        thread_id: str,
        keep: Keep,
        history: bool,
        *,
        spares_runs: bool = False,
        dry_run: bool = False,
    ) -> Flow[PruneReport]:
        """Delete a batch of the checkpoints that `keep` does not name, and the items left over.

        Args:
            thread_id: The thread.
            keep: Names the checkpoints that stay.
            history: Whether everything said on the way to a kept checkpoint stays readable.
            spares_runs: Whether the checkpoints stay that tell how far runs of a server came which
                have not ended. The next server would else apply their inputs again.
            dry_run: Whether to read only, and to count all of them.
        """
        rows, live = (yield self.sql("find_thread", thread_id)), set[str]()
        if spares_runs and rows:
            live = {run_id for (run_id,) in (yield self.sql("live_runs_of_thread", thread_id))}
        doomed = []
        if rows:
            doomed = yield from self._doomed(thread_id, rows[0][0], keep, live, dry_run)
        if not rows or (history and not doomed):
            return PruneReport()
        thread, size, gone = rows[0][0], 0, set[Any]()
        doomed = doomed if dry_run else doomed[:PRUNE_BATCH]
        for namespace, checkpoint in doomed:
            at = namespace, pack_id(checkpoint.uid)
            ((written,),) = yield self.sql("size_of_writes", *at)
            size += checkpoint.size + written
            gone |= {checkpoint.key, at}
            if not dry_run:
                yield [
                    *self._untagged(checkpoint.key, checkpoint.metadata),
                    self.sql("drop_writes", *at),
                    self.sql("drop_checkpoint", checkpoint.key),
                    *([self.sql("set_explicit_head", 0, namespace)] if checkpoint.is_head else []),
                ]
        items, freed = yield from self.sweep(
            thread_id, thread, gone=gone, history=history, dry_run=dry_run
        )
        if not dry_run:
            yield self.sql("mark_rows_removed", thread)
        if items and not dry_run:
            yield from unsay(self.sql, thread)
        if not dry_run and any(each.is_head for _, each in doomed):
            yield from self.untitled(thread_id, of_metadata=True)
        elif items and not dry_run:
            yield from self.untitled(thread_id)
        return PruneReport(len(doomed), items, size_bytes=size + freed)

    def _doomed(
        self, thread_id: str, thread: int, keep: Keep, live: set[str], dry_run: bool
    ) -> Flow[list[tuple[int, Kept]]]:
        """Return the checkpoints that `keep` does not name, with their namespaces, oldest first.

        Those stay that tell how far the `live` runs of a server came.
        """
        doomed: list[tuple[int, Kept]] = []
        for namespace, ns, head in (yield self.sql("thread_namespaces", thread)):
            kept = list[Kept]()
            for row, snapshot in (yield from self.reader.rows(thread_id, ns, namespace)):
                metadata, is_head = (
                    self.reader.metadata(snapshot),
                    row[0] == row_key(namespace, head),
                )
                at = self.reader.active_at(snapshot, row[4])
                parts = row[0], snapshot.checkpoint_id, snapshot.parent_id, at, metadata
                kept.append(Kept(*parts, snapshot.stored_channels(), is_head, len(row[5])))
            stay = keep(kept)
            if live and not ns:
                stay |= yield from self._find_progress(namespace, kept, live)
            stay = _with_ancestors(kept, stay)
            if not dry_run:
                yield from self._note_updated(thread_id, ns, kept, stay)
            doomed += [
                (namespace, checkpoint)
                for checkpoint in reversed(kept)
                if checkpoint.uid not in stay
            ]
        return doomed

    def _find_progress(self, namespace: int, kept: list[Kept], live: set[str]) -> Flow[set[str]]:
        """Return the ids of the newest checkpoint of each live run, and of that where it starts."""
        newest = dict[Any, str]()
        for checkpoint in kept:
            newest.setdefault(checkpoint.metadata.get("run_id"), checkpoint.uid)
        stay = {uid for run_id, uid in newest.items() if run_id in live}
        tasks = {pack_id(run_id) for run_id in live}
        for uid, task, *_ in (yield self.sql("namespace_writes", namespace)):
            if task in tasks:
                stay.add(unpack_id(uid) or "")
        return stay

    def _note_updated(
        self, thread_id: str, ns: str, namespace: list[Kept], stay: set[str]
    ) -> Flow[None]:
        """Store in a head which checkpoint it has updated, if updates in between are removed."""
        for head in namespace:
            updated = _find_updated(namespace, head) if head.is_head else None
            if updated is None or updated == find_updated(head.parent, head.metadata):
                continue
            if head.uid in stay and head.parent not in stay:
                (row,) = yield self.sql("checkpoint_row", head.key)
                snapshot = self.reader.open_row(thread_id, ns, row)
                metadata = {**head.metadata, UPDATED: updated}
                snapshot.encoded_fields[1] = self.reader.codec.encode(
                    metadata, lambda: "metadata", exact=True
                )
                body = encrypt_checkpoint(
                    self.seal, thread_id, ns, row, snapshot, snapshot.transcript
                )
                yield self.sql("rewrite_checkpoint", body, head.key)

    # -- items

    def sweep(
        self,
        thread_id: str,
        thread: int,
        *,
        gone: Container[Any] = (),
        history: bool = True,
        dry_run: bool = False,
    ) -> Flow[tuple[int, int]]:
        """Delete the items of a thread that nothing refers to; returns how many, and bytes.

        The checkpoints and writes `gone` do not count. Without `history`, the checkpoints are made
        to remember only what they hold. For a `DeltaChannel` with an unknown value, those are the
        items to which any checkpoint or pending write refers. A dry run only counts.
        """
        live: dict[int, Ranges] = defaultdict(list)
        forgetting: list[tuple[str, Row, Snapshot, dict[str, Any]]] = []
        for namespace, ns, _ in (yield self.sql("thread_namespaces", thread)):
            for row, snapshot in (yield from self.reader.rows(thread_id, ns, namespace)):
                if row[0] in gone:
                    continue
                _mark_refs(snapshot.references.values(), live)
                if history:
                    _mark(snapshot.transcript.values(), live)  # as written
                elif snapshot.transcript:
                    unknown = _find_unknown_transcripts(snapshot)
                    forgetting.append((ns, row, snapshot, unknown))
                    _mark((said for said in unknown.values() if _has_aliases(said)), live)
            for row in (yield self.sql("namespace_writes", namespace)):
                if (namespace, row[0]) not in gone:
                    writes = decrypt_writes(self.seal, thread_id, ns, row)
                    _mark_refs((ref for _, _, ref in writes), live)
        for ns, row, snapshot, unknown in forgetting if not dry_run else ():
            said = {
                channel: written if _has_aliases(written) else _drop_unreferenced(written, live)
                for channel, written in unknown.items()
            }
            body = encrypt_checkpoint(self.seal, thread_id, ns, row, snapshot, said)
            yield self.sql("rewrite_checkpoint", body, row[0])
        return (yield from self._drop_others(thread_id, thread, live, dry_run))

    def _drop_others(
        self, thread_id: str, thread: int, live: dict[int, Ranges], dry_run: bool
    ) -> Flow[tuple[int, int]]:
        """Delete the items of a thread that are not live."""
        items = freed = 0
        for log, name, *last in (yield self.sql("thread_logs", thread)):
            yield from self._mark_origins(thread_id, name, log, live[log])
            for start, stop in missing(next_log_positions(*last), covered(live[log])):
                keys = key_range(log, start, stop)
                ((many, size),) = yield self.sql("count_items", *keys)
                items += many if start < ALIASES else 0
                freed += size
                if not dry_run:
                    yield self.sql("drop_items", *keys)
        return items, freed

    def _mark_origins(self, thread_id: str, name: str, log: int, live: Ranges) -> Flow[None]:
        """Keep what the aliases of a log repeat."""
        repeated: Ranges = []
        for start, stop in covered(live):
            if stop > ALIASES:
                aliases = self.reader.stored(thread_id, name, log, max(start, ALIASES), stop)
                origins = [unpack(body) for _, body in (yield from aliases)]
                repeated += [(origin, origin + 1) for origin in origins]
        live += repeated


def _find_unknown_transcripts(snapshot: Snapshot) -> dict[str, Any]:
    """Return the written transcripts of the channels whose values are unknown."""
    return {
        channel: written
        for channel, written in snapshot.transcript.items()
        if channel in snapshot.references and value_reference(snapshot.references[channel]) is None
    }


def _has_aliases(written: Any) -> bool:
    """Return whether a written transcript contains ranges of aliases."""
    return any(start >= ALIASES for start, _ in unflat(written[1]))


def _drop_unreferenced(written: Any, live: Mapping[int, Ranges]) -> list[Any]:
    """Return a written transcript without the items that nothing else refers to."""
    log, numbers = written
    ranges = unflat(numbers)
    return [log, flat(missing(ranges, covered(missing(ranges, covered(live.get(log, []))))))]


def _mark_refs(refs: Iterable[Any], live: dict[int, Ranges]) -> None:
    _mark(chain.from_iterable(map(references, refs)), live)


def _mark(refs: Iterable[tuple[int, Any]], live: dict[int, Ranges]) -> None:
    """Mark what `(log, written ranges)` refer to."""
    for log, numbers in refs:
        live[log] += unflat(numbers)
        if len(live[log]) > 4096:
            live[log] = covered(live[log])


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


def _find_updated(namespace: list[Kept], head: Kept) -> str | None:
    """Return the id of the checkpoint that a head has updated, if need be by several updates.

    Returns:
        The id, or None if the head is no update.
    """
    by_uid = {checkpoint.uid: checkpoint for checkpoint in namespace}
    updated, at = None, by_uid.get(head.uid)
    while at is not None and (before := find_updated(at.parent, at.metadata)) is not None:
        updated, at = before, by_uid.get(before)
    return updated


def _all_but(keys: Container[int], namespace: list[Kept]) -> set[str]:
    return {c.uid for c in namespace if c.key not in keys}


def _keep_rule(rule: Retention, now: float) -> Keep:
    """A retention rule as a choice among the checkpoints of a namespace."""

    def keep(namespace: list[Kept]) -> set[str]:
        stay = [c for c in namespace if c.is_head]
        recent = [head for head in stay if head.active_at >= now - RUN_DAYS * 86400]
        updated = {_find_updated(namespace, head) for head in recent}
        stay += [c for c in namespace if c.uid in updated]
        if rule.last is not None:
            stay += namespace[: rule.last]
        if rule.days is not None:
            stay += [c for c in namespace if c.active_at >= now - rule.days * 86400]
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

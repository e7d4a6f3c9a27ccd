"""Retention: what is old goes, by rules, from both halves of a database.

`plan` reports what the rules would remove and writes nothing; `apply` removes it. The work is done
in bounded batches that let others write in between. It may be cut off at any moment and called
again: what is left is found again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from perdure.checkpointers import Retention, ThreadInfo
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.errors import AlreadyLocked, StorageUnavailable, VersionConflict
from perdure.memory.records import QUARANTINE, RESERVED_LABEL, WATERMARKS
from perdure.memory.thread_messages import build_failure_reset
from perdure.settings import Rules
from perdure.stores import StoredItem, VersionRetention
from perdure.stores.base import Namespace
from perdure.stores.whole_store import WholeStore

__all__ = ["Removal", "Report", "Rules", "aapply", "aplan", "apply", "plan"]

T = TypeVar("T")
_LOCK: Final = "\0retention"  # no thread can have this name
_THREADS: Final = 200  # locked at once
_PAGE: Final = 1_000


@dataclass(frozen=True, slots=True)
class Removal:
    """What one rule removes.

    Attributes:
        what: A plural noun; `"messages"` are those, and other items of logs, that are of no
            checkpoint and no history any more.
        count: How many.
        size_bytes: About how many bytes: those of the stored values, without indexes. What goes by
            two rules may be counted twice before it goes.
        ids: Which threads, or `namespace/key`; empty where there are too many to name.
    """

    what: str
    count: int
    size_bytes: int = 0
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What retention removed, or would remove.

    Attributes:
        removals: An entry for each rule that was given.
        left: Idle threads that were left for the next time, as a run holds their lock.
    """

    removals: tuple[Removal, ...]
    left: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """About how many bytes in all. The file has so many more for other data to come."""
        return sum(each.size_bytes for each in self.removals)

    def count(self, what: str) -> int:
        """How many of one kind."""
        return sum(each.count for each in self.removals if each.what == what)

    def __bool__(self) -> bool:
        return any(each.count for each in self.removals)


def plan(
    rules: Rules,
    saver: Checkpointer,
    store: WholeStore,
    *,
    thread_ids: Sequence[str] | None = None,
    skip: Collection[str] = (),
) -> Report:
    """What `apply` with these arguments would remove now. Nothing is written, nor locked."""
    thread_ids = None if thread_ids is None else [*dict.fromkeys(thread_ids)]
    return _Run(rules, saver, store, thread_ids, skip, dry_run=True).report()


def apply(
    rules: Rules,
    saver: Checkpointer,
    store: WholeStore,
    *,
    thread_ids: Sequence[str] | None = None,
    skip: Collection[str] = (),
    timeout_s: float = 0.0,
) -> Report:
    """Remove what the rules do not keep; items whose time to live is over always go.

    Entries in quarantine and memories are erased: no version of them is left.

    Args:
        rules: See `Rules`; those of the settings are `perdure.settings.load().retention`.
        saver: The threads.
        store: The items.
        thread_ids: Only these threads, and no items. None: everything.
        skip: Threads that do not count as idle, say because something is to be extracted from them.
        timeout_s: How long to wait while another process applies retention to the database.

    Raises:
        StorageUnavailable: Another process applies retention.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(saver.database.lock(_LOCK, timeout_s=timeout_s))
        except StorageUnavailable as exc:
            raise StorageUnavailable(
                f"retention is being applied to {saver.database.path!r} already; try again later"
            ) from exc
        return _Run(rules, saver, store, thread_ids, skip, dry_run=False).report()


async def aplan(*args: Any, **options: Any) -> Report:
    """See `plan`."""
    return await asyncio.to_thread(plan, *args, **options)


async def aapply(*args: Any, **options: Any) -> Report:
    """See `apply`."""
    return await asyncio.to_thread(apply, *args, **options)


@dataclass(slots=True)
class _Run:
    """One pass over the database. Each part comes after those whose result it depends on."""

    rules: Rules
    saver: Checkpointer
    store: WholeStore
    thread_ids: Sequence[str] | None
    skip: Collection[str]
    dry_run: bool
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    idle: list[str] = field(default_factory=list)  # threads that go
    left: list[str] = field(default_factory=list)
    gone: set[tuple[Namespace, str]] = field(default_factory=set)  # items that are erased

    def report(self) -> Report:
        """Do it, or only look."""
        rules, everything = self.rules, self.thread_ids is None
        removals: list[Removal] = []
        if rules.quarantine_days is not None and everything:
            removals += self._quarantine(rules.quarantine_days)
        if rules.idle_days is not None:
            removals += self._threads(self._ago(rules.idle_days))
        if rules.checkpoints:
            removals += self._checkpoints()
        if everything:
            removals += self._items()
        if rules.jobs_days is not None and everything:
            removals += self._jobs(rules.jobs_days)
        return Report(tuple(removals), tuple(self.left))

    def _quarantine(self, days: float) -> Iterator[Removal]:
        """Erase entries by the moments at which they came: each tells one version."""
        place = (RESERVED_LABEL, QUARANTINE)
        came, size = [each.value["at"] for each in self._older(place, "at", days)], 0
        for some in _batched(came, _PAGE):
            size += self._forget(place, filter={"at": {"$in": some}})
        names = tuple("/".join((*namespace[2:], key)) for namespace, key in sorted(self.gone))
        yield Removal("entries in quarantine", len(names), size, names)

    def _threads(self, before: datetime) -> Iterator[Removal]:
        old = self.saver.delete_idle(before, thread_ids=self.thread_ids, dry_run=True)
        ids = [info.thread_id for info in old if info.thread_id not in {*self.skip}]
        already, size, deleted = len(self.gone), 0, list[ThreadInfo]()
        for some in _batched(ids, _THREADS):
            with ExitStack() as stack:
                if not self.dry_run:
                    some = [each for each in some if self._locked(each, stack)]
                idle = self.saver.delete_idle(before, thread_ids=some, dry_run=True)
                some = [info.thread_id for info in idle]
                if self.rules.memories and some:  # first: nothing else tells that they are to go
                    size += self._forget((), provenance={"thread_id": {"$in": some}})
                if not self.dry_run:
                    idle = self.saver.delete_idle(before, thread_ids=some)
                deleted += idle
        self.idle = sorted(info.thread_id for info in deleted)
        freed = sum(info.size_bytes for info in deleted)
        yield Removal("idle threads", len(deleted), freed, tuple(self.idle))
        if self.rules.memories:
            yield Removal("memories of idle threads", len(self.gone) - already, size)

    def _locked(self, thread_id: str, stack: ExitStack) -> bool:
        """Lock a thread; one that a run has locked is left for the next time."""
        try:
            stack.enter_context(self.saver.lock(thread_id, timeout_s=0))
        except (StorageUnavailable, AlreadyLocked):
            self.left.append(thread_id)
            return False
        return True

    def _forget(self, place: Namespace, **what: Any) -> int:
        """Erase items with all their versions; returns their bytes."""
        receipt = self.store.forget(place, **what, dry_run=self.dry_run)
        self.gone |= {*receipt.keys}
        return receipt.size_bytes

    def _checkpoints(self) -> Iterator[Removal]:
        r = self.rules
        rule = Retention(r.checkpoints_last, r.checkpoints_days, r.turns, r.history)
        done = self.saver.retain(rule, thread_ids=self.thread_ids, dry_run=self.dry_run)
        counts = [done.checkpoints, done.size_bytes, done.items]
        if self.dry_run and self.idle:  # those that would be gone are there still
            idle = self.saver.retain(rule, thread_ids=self.idle, dry_run=True)
            gone = (idle.checkpoints, idle.size_bytes, idle.items)
            counts = [count - less for count, less in zip(counts, gone, strict=True)]
        yield Removal("checkpoints", counts[0], counts[1])
        yield Removal("messages", counts[2])

    def _items(self) -> Iterator[Removal]:
        """Close items whose time is over, then drop closed versions."""
        bounds = self.rules.versions_last, self.rules.versions_days
        rule = None if bounds == (None, None) else VersionRetention(*bounds)
        removable = [
            e for e in self.store.find_removable(rule) if (e.namespace, e.key) not in self.gone
        ]
        expired, versions = sum(e.expired for e in removable), sum(e.versions for e in removable)
        if not self.dry_run:
            expired = int(self.store.sweep_ttl())
            versions = self.store.retain(rule) if rule else 0
        yield Removal("expired items", expired)
        if rule is not None:
            yield Removal("old versions", versions, sum(e.size_bytes for e in removable))

    def _jobs(self, days: float) -> Iterator[Removal]:
        ids = []
        for note in self._older((RESERVED_LABEL, WATERMARKS), "failed_at", days):
            with suppress(VersionConflict):  # an extraction has written it just now
                if not self.dry_run:
                    self.store.batch([build_failure_reset(note)])
                ids.append(note.value.get("thread_id", note.key))
        yield Removal("failed extractions", len(ids), 0, tuple(sorted(ids)))

    def _older(self, place: Namespace, name: str, days: float) -> list[StoredItem]:
        """The items under a namespace with a moment in a field that is longer ago."""
        when = {name: {"$lt": self._ago(days).isoformat()}}
        items: list[Any] = self.store.search(
            place, filter=when, limit=sys.maxsize, refresh_ttl=False
        )
        return items

    def _ago(self, days: float) -> datetime:
        return self.now - timedelta(days=min(days, 700_000))


def _batched(values: list[T], size: int) -> Iterator[list[T]]:
    return (values[start : start + size] for start in range(0, len(values), size))

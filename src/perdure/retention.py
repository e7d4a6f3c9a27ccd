"""Apply retention rules, which remove old threads, checkpoints, items and memories.

`apply` removes all data that is due for removal under the rules in a `Rules` object. `plan` reports
the data that `apply` would remove, without writing anything. Old data is removed in batches, so
that other processes can write to the database between batches. If `apply` is interrupted, call it
again to remove the remaining old data.
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
from perdure.memory.long_term.records import QUARANTINE, RESERVED_LABEL, WATERMARKS
from perdure.memory.thread_messages import build_put_clearing_extraction_failure
from perdure.settings import Rules
from perdure.stores import StoredItem, VersionRetention
from perdure.stores.base import Namespace
from perdure.stores.whole_store import WholeStore

__all__ = ["Removal", "Report", "Rules", "aapply", "aplan", "apply", "plan"]

T = TypeVar("T")
# Name of the lock that is held while retention is applied. The lock of a thread is named after the
# thread id. The two names cannot collide, because this name is not a valid thread id.
_LOCK_NAME: Final = "\0retention"
# Maximum number of idle threads that are locked and deleted at the same time.
_THREADS_PER_BATCH: Final = 200
# Maximum number of timestamps passed to a single `forget` call, which selects quarantine entries by
# their timestamps.
_ENTRIES_PER_BATCH: Final = 1_000


@dataclass(frozen=True, slots=True)
class Removal:
    """The data that one rule removes.

    Attributes:
        what: The kind of data, a plural noun. `"messages"` are log items that belong to no
            checkpoint and to no history any more.
        count: The number of objects.
        size_bytes: The approximate size of the stored values, without indexes. A plan may count
            an object twice if two rules remove it.
        ids: The ids of threads, or `namespace/key` of items. Empty if there are too many to list.
    """

    what: str
    count: int
    size_bytes: int = 0
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `apply`, or of `plan`.

    Attributes:
        removals: One entry for each kind of data to which a rule applies.
        left: The ids of idle threads that were not deleted because a run holds their lock.
    """

    removals: tuple[Removal, ...]
    left: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The approximate total size of the removed data, in bytes.

        An SQLite file shrinks as its free pages are released after writes. On Postgres, the freed
        space is reused for new data.
        """
        return sum(removal.size_bytes for removal in self.removals)

    def count(self, kind: str) -> int:
        """Return the number of removed objects of the given kind, such as `"checkpoints"`."""
        return sum(removal.count for removal in self.removals if removal.what == kind)

    def __bool__(self) -> bool:
        return any(removal.count for removal in self.removals)


def plan(
    rules: Rules,
    saver: Checkpointer,
    store: WholeStore,
    *,
    thread_ids: Sequence[str] | None = None,
    skip: Collection[str] = (),
) -> Report:
    """Report the data that `apply` would remove now if called with the same arguments.

    Nothing is written or locked. See `apply` for the arguments.
    """
    thread_ids = None if thread_ids is None else [*dict.fromkeys(thread_ids)]
    return _RetentionPass(rules, saver, store, thread_ids, skip, dry_run=True).run()


def apply(
    rules: Rules,
    saver: Checkpointer,
    store: WholeStore,
    *,
    thread_ids: Sequence[str] | None = None,
    skip: Collection[str] = (),
    timeout_s: float = 0.0,
) -> Report:
    """Delete the data that is due for removal under the retention rules.

    Expired store items are always removed, except if `thread_ids` is given. Memories and
    quarantined texts that are due for removal are erased together with all their versions.

    Args:
        rules: The rules. `perdure.settings.load().retention` returns the rules of the settings.
        saver: The checkpointer that stores the threads.
        store: The store that contains the items.
        thread_ids: The rules are applied only to these threads, and to no items except the memories
            of these threads. None means all threads and items.
        skip: Threads that do not count as idle, for example because an extraction is due.
        timeout_s: Seconds to wait while another process applies retention to the database.

    Raises:
        StorageUnavailable: Another process is applying retention.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(saver.database.lock(_LOCK_NAME, timeout_s=timeout_s))
        except StorageUnavailable as exc:
            raise StorageUnavailable(
                f"another process is already applying retention to {saver.database.path!r}; try "
                "again later"
            ) from exc
        return _RetentionPass(rules, saver, store, thread_ids, skip, dry_run=False).run()


async def aplan(*args: Any, **options: Any) -> Report:
    """See `plan`."""
    return await asyncio.to_thread(plan, *args, **options)


async def aapply(*args: Any, **options: Any) -> Report:
    """See `apply`."""
    return await asyncio.to_thread(apply, *args, **options)


@dataclass(slots=True)
class _RetentionPass:
    """Applies the retention rules once, or only counts the data that would be removed.

    Attributes:
        idle_thread_ids: The ids of the threads that are deleted because they are idle.
        left: See `Report.left`.
        erased_keys: The namespaces and keys of the items that are erased.
    """

    rules: Rules
    saver: Checkpointer
    store: WholeStore
    thread_ids: Sequence[str] | None
    skip: Collection[str]
    dry_run: bool
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    idle_thread_ids: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    erased_keys: set[tuple[Namespace, str]] = field(default_factory=set)

    def run(self) -> Report:
        """Apply the rules and return the report. With `dry_run`, only count the data.

        The rules are applied in a fixed order, because applying a rule can require the results of
        the rules before it.
        """
        rules, applies_to_all_data = self.rules, self.thread_ids is None
        removals: list[Removal] = []
        if rules.quarantine_days is not None and applies_to_all_data:
            removals += self._erase_old_quarantine_entries(rules.quarantine_days)
        if rules.idle_days is not None:
            removals += self._delete_idle_threads(self._days_ago(rules.idle_days))
        if rules.checkpoints:
            removals += self._remove_checkpoints()
        if applies_to_all_data:
            removals += self._remove_expired_items_and_old_versions()
        if rules.jobs_days is not None and applies_to_all_data:
            removals += self._remove_failed_jobs(rules.jobs_days)
        return Report(tuple(removals), tuple(self.left))

    def _erase_old_quarantine_entries(self, min_age_days: float) -> Iterator[Removal]:
        """Erase the extracted texts that were quarantined more than `min_age_days` days ago."""
        namespace_prefix = (RESERVED_LABEL, QUARANTINE)
        timestamps, size = (
            [
                item.value["at"]
                for item in self._find_items_older_than(namespace_prefix, "at", min_age_days)
            ],
            0,
        )
        for batch in _split_into_batches(timestamps, _ENTRIES_PER_BATCH):
            size += self._erase_items_and_get_size_bytes(
                namespace_prefix, filter={"at": {"$in": batch}}
            )
        names = tuple(
            "/".join((*namespace[2:], key)) for namespace, key in sorted(self.erased_keys)
        )
        yield Removal("entries in quarantine", len(names), size, names)

    def _delete_idle_threads(self, idle_since: datetime) -> Iterator[Removal]:
        """Delete threads whose last activity was before a given time.

        If `rules.memories` is set, the memories that were extracted from the deleted threads are
        also erased.
        """
        # With `dry_run`, `delete_idle` only lists the idle threads.
        idle_candidates = self.saver.delete_idle(
            idle_since, thread_ids=self.thread_ids, dry_run=True
        )
        ids = [info.thread_id for info in idle_candidates if info.thread_id not in {*self.skip}]
        erased_before, size, deleted = len(self.erased_keys), 0, list[ThreadInfo]()
        for batch in _split_into_batches(ids, _THREADS_PER_BATCH):
            with ExitStack() as stack:
                if not self.dry_run:
                    batch = [
                        thread_id for thread_id in batch if self._try_lock_thread(thread_id, stack)
                    ]
                # List the idle threads again, because a run may have written to a thread after the
                # threads were first listed but before the thread was locked.
                batch_infos = self.saver.delete_idle(idle_since, thread_ids=batch, dry_run=True)
                batch = [info.thread_id for info in batch_infos]
                if self.rules.memories and batch:
                    # Erase the memories before the threads. If the process were killed after
                    # deleting the threads, the thread ids would be lost, and the threads' memories
                    # could no longer be found.
                    size += self._erase_items_and_get_size_bytes(
                        (), provenance={"thread_id": {"$in": batch}}
                    )
                if not self.dry_run:
                    batch_infos = self.saver.delete_idle(idle_since, thread_ids=batch)
                deleted += batch_infos
        self.idle_thread_ids = sorted(info.thread_id for info in deleted)
        yield Removal(
            "idle threads",
            len(deleted),
            sum(info.size_bytes for info in deleted),
            tuple(self.idle_thread_ids),
        )
        if self.rules.memories:
            yield Removal("memories of idle threads", len(self.erased_keys) - erased_before, size)

    def _try_lock_thread(self, thread_id: str, stack: ExitStack) -> bool:
        """Try to lock a thread, and return whether the lock was acquired.

        If the thread's lock cannot be acquired, the thread id is added to `left`, the list of
        threads that retention has skipped.
        """
        try:
            stack.enter_context(self.saver.lock(thread_id, timeout_s=0))
        except (StorageUnavailable, AlreadyLocked):
            self.left.append(thread_id)
            return False
        return True

    def _erase_items_and_get_size_bytes(
        self, namespace_prefix: Namespace, **conditions: Any
    ) -> int:
        """Erase items with all their versions, and return the size of the erased data in bytes."""
        receipt = self.store.forget(namespace_prefix, **conditions, dry_run=self.dry_run)
        self.erased_keys |= {*receipt.keys}
        return receipt.size_bytes

    def _remove_checkpoints(self) -> Iterator[Removal]:
        """Remove old checkpoints, and messages that no remaining checkpoint refers to."""
        rules = self.rules
        rule = Retention(rules.checkpoints_last, rules.checkpoints_days, rules.turns, rules.history)
        removed = self.saver.retain(rule, thread_ids=self.thread_ids, dry_run=self.dry_run)
        counts = [removed.checkpoints, removed.size_bytes, removed.items]
        if self.dry_run and self.idle_thread_ids:
            # In a dry run, idle threads are not deleted, so `retain` also counts the checkpoints of
            # idle threads. Subtract these checkpoints from the counts, because a real run would
            # delete them together with the idle threads.
            removed_with_threads = self.saver.retain(
                rule, thread_ids=self.idle_thread_ids, dry_run=True
            )
            thread_counts = (
                removed_with_threads.checkpoints,
                removed_with_threads.size_bytes,
                removed_with_threads.items,
            )
            counts = [
                count - thread_count
                for count, thread_count in zip(counts, thread_counts, strict=True)
            ]
        yield Removal("checkpoints", counts[0], counts[1])
        yield Removal("messages", counts[2])

    def _remove_expired_items_and_old_versions(self) -> Iterator[Removal]:
        """Remove expired items, and then old versions of items."""
        limits = self.rules.versions_last, self.rules.versions_days
        rule = None if limits == (None, None) else VersionRetention(*limits)
        removable = [
            e
            for e in self.store.find_removable(rule)
            if (e.namespace, e.key) not in self.erased_keys
        ]
        expired, versions = sum(e.expired for e in removable), sum(e.versions for e in removable)
        if not self.dry_run:
            expired = int(self.store.sweep_ttl())
            versions = self.store.retain(rule) if rule else 0
        yield Removal("expired items", expired)
        if rule is not None:
            yield Removal("old versions", versions, sum(e.size_bytes for e in removable))

    def _remove_failed_jobs(self, min_age_days: float) -> Iterator[Removal]:
        """Clear the records of extractions that failed more than `min_age_days` days ago."""
        ids = []
        for note in self._find_items_older_than(
            (RESERVED_LABEL, WATERMARKS), "failed_at", min_age_days
        ):
            # If the extraction record has changed since it was read, `batch` raises VersionConflict
            # and does not clear the record.
            with suppress(VersionConflict):
                if not self.dry_run:
                    self.store.batch([build_put_clearing_extraction_failure(note)])
                ids.append(note.value.get("thread_id", note.key))
        yield Removal("failed extractions", len(ids), 0, tuple(sorted(ids)))

    def _find_items_older_than(
        self, namespace_prefix: Namespace, timestamp_field: str, days: float
    ) -> list[StoredItem]:
        """Find items whose timestamp in the field `timestamp_field` is more than `days` days old.

        Only items under the namespace prefix are searched.
        """
        items: list[Any] = self.store.search(
            namespace_prefix,
            filter={timestamp_field: {"$lt": self._days_ago(days).isoformat()}},
            limit=sys.maxsize,
            refresh_ttl=False,
        )
        return items

    def _days_ago(self, days: float) -> datetime:
        # Limit `days` to 700,000, because a `datetime` cannot represent a date before the year 1.
        return self.started_at - timedelta(days=min(days, 700_000))


def _split_into_batches(values: list[T], size: int) -> Iterator[list[T]]:
    return (values[start : start + size] for start in range(0, len(values), size))

"""Changing threads as a whole: deleting, copying, pruning, retention, rewinding, taking over."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.checkpointers.base import (
    Address,
    ErasureReport,
    ImportReport,
    PruneReport,
    Retention,
)
from perdure.checkpointers.base import check_thread_id as checked
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.engine import Engine
from perdure.checkpointers.importing import Record, Source, TaskWrites, lacking, same
from perdure.checkpointers.listing import Listing
from perdure.checkpointers.memo import Memo
from perdure.checkpointers.plan import PlannedWrites, Planner
from perdure.checkpointers.pruning import Keep, keep_but, keep_heads, keep_rule
from perdure.errors import ConfigurationError, ImportFailed, UnknownCheckpoint
from perdure.storage.flow import rows_of

PRUNE_BATCH = 500  # checkpoints deleted per transaction


class Upkeep(Engine):
    """The part of a checkpointer that changes threads as a whole."""

    # -- deleting and copying

    def _prune(self, thread_id: str, keep: Keep, *, history: bool) -> PruneReport:
        total = PruneReport()
        while True:
            flow = partial(self._pruner.prune, thread_id, keep, history=history, limit=PRUNE_BATCH)
            done = self.database.write(flow, lambda _: self._memo.forget(thread_id))
            total += done
            if done.checkpoints < PRUNE_BATCH:
                return total

    def delete_thread(self, thread_id: str) -> None:
        """Remove a thread and give its space back; an unknown one is no error."""
        self._delete_threads([checked(thread_id)])

    async def adelete_thread(self, thread_id: str) -> None:
        """See `delete_thread`."""
        await asyncio.to_thread(self.delete_thread, thread_id)

    def _delete_threads(self, thread_ids: Sequence[str]) -> PruneReport:
        total = PruneReport()
        for thread_id in thread_ids:
            flow = partial(self._pruner.delete_thread, thread_id)
            total += self.database.write(flow, _forgetting(self._memo, thread_id))
        self.database.shrink()
        return total

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove every checkpoint, with its writes, whose metadata names one of these runs."""
        listing = Listing(self._sql, self._reader, self._read)
        doomed: dict[str, set[int]] = {}
        for run_id in run_ids:
            for thread_id, key in listing.keys_with("run_id", run_id):
                doomed.setdefault(thread_id, set()).add(key)
        for thread_id, keys in doomed.items():
            self._prune(thread_id, keep_but(keys), history=True)
        if doomed:
            self.database.shrink()

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """See `delete_for_runs`."""
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    def erase(self, thread_id: str, message_ids: Collection[str] | None = None) -> ErasureReport:
        """Take messages out of a thread for good: no read finds them, nor a look at the raw file.

        They go from every checkpoint of every namespace, from history and from pending writes, in
        each version there was of them, also out of values that hold them somewhere within. What
        was put in under no id yet (an input, a node's answer) goes if it says the same as a
        message that goes. All else stays as it is, and the thread can go on.

        Not touched: copies of the thread, other values that quote a message, and a tool's result
        when the call of it is erased, or the reverse. A run that is under way still holds the
        messages and puts them again: erase when the thread rests.

        Everyone who writes waits while the file is rewritten.

        Args:
            thread_id: Whose; an unknown one is no error.
            message_ids: Which messages; unknown ones are no error. None: the whole thread.

        Raises:
            ConfigurationError: `message_ids` is not a collection of texts.
            ForbiddenType: A value holds a type that is not on the allowlist. Nothing was erased.
            CorruptRecord: A row cannot be read. Nothing was erased.
        """
        thread_id = checked(thread_id)
        if message_ids is None:
            flow = partial(self._eraser.erase_thread, thread_id)
        else:
            flow = partial(self._eraser.erase, thread_id, _check_ids(message_ids))
        done = self.database.write(flow, _forgetting(self._memo, thread_id))
        return replace(done, scrubbed=self.database.scrub())

    async def aerase(
        self, thread_id: str, message_ids: Collection[str] | None = None
    ) -> ErasureReport:
        """See `erase`."""
        return await asyncio.to_thread(self.erase, thread_id, message_ids)

    def copy_thread(
        self, source_thread_id: str, target_thread_id: str, *, checkpoint_id: str | None = None
    ) -> None:
        """Copy a thread, with its history, into a new one that shares nothing with it.

        Args:
            source_thread_id: What to copy.
            target_thread_id: The new thread.
            checkpoint_id: Copy only the way to this checkpoint, which becomes the head.

        Raises:
            UnknownThread: There is no source.
            UnknownCheckpoint: The source has no such checkpoint.
            InvalidConfig: The target exists.
        """
        source, target = checked(source_thread_id), checked(target_thread_id)
        self.database.write(lambda: self._copier.copy_thread(source, target, checkpoint_id))

    async def acopy_thread(
        self, source_thread_id: str, target_thread_id: str, *, checkpoint_id: str | None = None
    ) -> None:
        """See `copy_thread`."""
        await asyncio.to_thread(
            self.copy_thread, source_thread_id, target_thread_id, checkpoint_id=checkpoint_id
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete the checkpoints of threads, or the threads.

        What was said on the way to a kept checkpoint stays readable through `history()`, and a
        checkpoint that a `DeltaChannel` of a kept one is rebuilt from stays too.

        Args:
            thread_ids: Which; unknown ones are no error.
            strategy: `"keep_latest"` keeps the head of each namespace, `"delete"` nothing.

        Raises:
            ConfigurationError: The strategy is another.
        """
        if strategy not in ("keep_latest", "delete"):
            raise ConfigurationError(
                f"strategy is {strategy!r}; expected 'keep_latest' or 'delete'"
            )
        ids = [checked(thread_id) for thread_id in thread_ids]
        if strategy == "delete":
            self._delete_threads(ids)
            return
        for thread_id in ids:
            self._prune(thread_id, keep_heads, history=True)
        if ids:
            self.database.shrink()

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """See `prune`."""
        await asyncio.to_thread(self.prune, thread_ids, strategy=strategy)

    def retain(self, rule: Retention, *, thread_ids: Sequence[str] | None = None) -> PruneReport:
        """Apply a retention rule, in batches that let others write in between.

        Args:
            rule: Which checkpoints stay.
            thread_ids: Of which threads; None: of all.

        Raises:
            ConfigurationError: The rule keeps nothing in particular, or has a negative number.
        """
        _check_rule(rule)
        keep = keep_rule(rule, time.time())
        total = PruneReport()
        ids = self._thread_ids() if thread_ids is None else [checked(t) for t in thread_ids]
        for thread_id in ids:
            done = self._prune(thread_id, keep, history=rule.history)
            total += PruneReport(done.checkpoints, done.items, 1 if done.checkpoints else 0)
        self.database.shrink()
        return total

    async def aretain(
        self, rule: Retention, *, thread_ids: Sequence[str] | None = None
    ) -> PruneReport:
        """See `retain`."""
        return await asyncio.to_thread(self.retain, rule, thread_ids=thread_ids)

    def rewind(self, thread_id: str, checkpoint_id: str, *, checkpoint_ns: str = "") -> None:
        """Make an older checkpoint the one the next run starts from. Nothing is deleted.

        Raises:
            UnknownCheckpoint: The thread has no such checkpoint.
        """
        at = Address(checked(thread_id), checkpoint_ns, checkpoint_id)
        if not self.database.write(lambda: self._writer.rewind(at)):
            raise UnknownCheckpoint(
                f"thread {thread_id!r} has no checkpoint {checkpoint_id!r} in namespace "
                f"{checkpoint_ns!r}; checkpoints() lists them"
            )

    async def arewind(self, thread_id: str, checkpoint_id: str, *, checkpoint_ns: str = "") -> None:
        """See `rewind`."""
        await asyncio.to_thread(self.rewind, thread_id, checkpoint_id, checkpoint_ns=checkpoint_ns)

    def _thread_ids(self) -> Iterator[str]:
        """Every thread, a page at a time."""
        last = 0
        while rows := self._read(rows_of(self._sql["thread_ids"], last, 256)):
            yield from (thread_id for _, thread_id in rows)
            last = rows[-1][0]

    # -- taking over

    def import_from(
        self,
        langgraph_sqlite_path: str | os.PathLike[str],
        *,
        serde: SerializerProtocol | None = None,
    ) -> ImportReport:
        """Take over a database that langgraph-checkpoint-sqlite wrote; it is only read.

        All threads, namespaces, checkpoints and pending writes, under their ids; each is read back
        and compared. It may be cut off and run again: what is here already is left as it is.

        Args:
            langgraph_sqlite_path: The file.
            serde: The serializer it was written with; None: this checkpointer's own.

        Raises:
            ConfigurationError: There is no such file.
            NotADatabase: Another application wrote it.
            ForbiddenType: A type in it is not on the allowlist.
            ImportFailed: A thread went on here and there since, or a checkpoint is not the same
                when read back. The threads before it are kept.
        """
        report = ImportReport()
        with Source(langgraph_sqlite_path, Codec(serde or self.serde)) as source:
            for thread_id in source.thread_ids():
                self._check_unforked(source, thread_id)
                report += ImportReport(threads=1)
                for record in source.records(thread_id):
                    report += self._take(source, record)
        return report

    async def aimport_from(
        self,
        langgraph_sqlite_path: str | os.PathLike[str],
        *,
        serde: SerializerProtocol | None = None,
    ) -> ImportReport:
        """See `import_from`."""
        return await asyncio.to_thread(self.import_from, langgraph_sqlite_path, serde=serde)

    def _check_unforked(self, source: Source, thread_id: str) -> None:
        """Refuse a thread that has checkpoints here that the source lacks, and the reverse."""
        there = source.addresses(thread_id)
        here = {(at.checkpoint_ns, at.checkpoint_id) for at in self._addresses(thread_id)}
        if here - there and there - here:
            raise ImportFailed(
                f"thread {thread_id!r} has {len(here - there)} checkpoints here that "
                f"{source.path!r} lacks, and {len(there - here)} there that are not here; "
                "import into a new file, or delete the thread here first"
            )

    def _addresses(self, thread_id: str) -> Iterator[Address]:
        everywhere: RunnableConfig = {"configurable": {"thread_id": thread_id}}
        return Listing(self._sql, self._reader, self._read).addresses(everywhere, {}, None, None)

    def _take(self, source: Source, record: Record) -> ImportReport:
        found = self._read(self._reader.get(record.at))
        new = found is None
        if found is None:
            versions = record.checkpoint["channel_versions"]
            self._write(
                lambda planner: planner.checkpoint(
                    record.parent,
                    cast(Checkpoint, record.checkpoint),
                    record.metadata,
                    versions,
                    False,
                    "fork",
                ),
                record.at.thread_id,
            )
        elif not same(record, found, self._codec.serde):
            raise self._differs(source, record, "is another one here")
        tasks = record.tasks if found is None else lacking(record, found, self._codec.serde)
        for task in tasks:
            self._write(_writes_plan(record.at, task), record.at.thread_id)
        found = self._read(self._reader.get(record.at)) if new or tasks else found
        if (
            found is None
            or not same(record, found, self._codec.serde)
            or lacking(record, found, self._codec.serde)
        ):
            raise self._differs(source, record, "is not the same when read back")
        writes = sum(len(task.writes) for task in tasks)
        return ImportReport(checkpoints=int(new), writes=writes, skipped=int(not new))

    def _differs(self, source: Source, record: Record, how: str) -> ImportFailed:
        return ImportFailed(
            f"{source.path!r}, thread {record.at.thread_id!r}: checkpoint "
            f"{record.at.checkpoint_id!r} {how}"
        )


def _forgetting(memo: Memo, thread_id: str) -> Callable[[object], None]:
    return lambda _: memo.forget(thread_id)


def _check_ids(message_ids: Collection[str]) -> Collection[str]:
    if isinstance(message_ids, str) or not all(isinstance(uid, str) for uid in message_ids):
        raise ConfigurationError(
            f"message_ids is {message_ids!r}; expected a list of message ids, each a text"
        )
    return message_ids


def _check_rule(rule: Retention) -> None:
    if rule.last is None and rule.days is None and not rule.turns:
        raise ConfigurationError("the retention rule is empty; give last=, days= or turns=True")
    for name, value in (("last", rule.last), ("days", rule.days)):
        if value is not None and value < 0:
            raise ConfigurationError(f"retention {name}={value!r}; expected zero or more")


def _writes_plan(at: Address, task: TaskWrites) -> Callable[[Planner], PlannedWrites]:
    return lambda planner: planner.writes(at, task.writes, task.task_id, task.path, False)

"""The checkpointer: a saver of langgraph's, and what perdure adds to one.

Threads are looked at, locked, and changed as a whole. The work is done by parts that know no
driver: `threads` and `differences` find and show, `maintenance` and `erasure` delete.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.checkpointers.address import (
    build_address,
    check_datetime,
    check_optional_text,
    check_texts,
    check_thread_id,
)
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.differences import Differences
from perdure.checkpointers.import_langgraph import Importer, open_source
from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.reports import (
    CheckpointInfo,
    ErasureReport,
    HistoryItem,
    ImportReport,
    PruneReport,
    Retention,
    StateDifference,
    ThreadHead,
    ThreadInfo,
    ThreadStatus,
    ThreadUsage,
)
from perdure.checkpointers.run_starts import find_brought_after
from perdure.checkpointers.saver import CheckpointSaver
from perdure.checkpointers.thread_copy import Merge, copy_thread
from perdure.checkpointers.threads import ThreadReader, missing
from perdure.errors import ConfigurationError
from perdure.settings import LIST_LIMIT, THREADS_LIMIT
from perdure.storage.database import Lock, make_async_twin
from perdure.storage.flow import fetch_rows, sum_by_month
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES

_List = list  # within the class the name is a method's


class Checkpointer(CheckpointSaver):
    """A checkpointer over a database, which it closes. Users open one with `SQLiteCheckpointer`."""

    def _create_parts(self) -> None:
        super()._create_parts()
        self._threads = ThreadReader(self._reader)
        self._differences = Differences(self._reader)
        self._maintenance = Maintenance(self._reader, self._listing, self.database)

    def lock(self, thread_id: str, *, timeout_s: float | None = None) -> Lock:
        """A lock on a thread, for `with` and `async with`, to run one turn at a time.

        It holds across threads, event loops and processes of this machine, and is released when its
        process ends. Runs that do not take it are not stopped; see `put` for overlapping runs.

            async with saver.lock("thread-1", timeout_s=30):
                await graph.ainvoke(question, config)

        Raises:
            InvalidConfig: The thread_id is not valid.
            StorageUnavailable: It was not free within `timeout_s` seconds.
            AlreadyLocked: The same run holds it already.
        """
        return self.database.lock(check_thread_id(thread_id), timeout_s=timeout_s)

    # -- looking at threads

    def history(
        self,
        thread_id: str,
        *,
        channel: str = "messages",
        checkpoint_id: str | None = None,
        checkpoint_ns: str = "",
        ends: tuple[int, int] | None = None,
        before: int | None = None,
        missing_ok: bool = False,
    ) -> _List[HistoryItem]:
        """All items of a channel up to a checkpoint, in order, including removed ones.

        Args:
            thread_id: The thread.
            channel: A channel that holds a list or dict.
            checkpoint_id: None: up to the head, with items of branches marked.
            checkpoint_ns: The namespace of a subgraph; `""` is the root graph.
            ends: How many items from the beginning and from the end: `(0, 50)` reads the newest 50
                only. None: all.
            before: Only what stands before the item at this `position`: a page further up.
            missing_ok: Whether to return an empty list if the thread or namespace does not exist,
                as a chat page needs it for a new thread. An unknown `checkpoint_id` of an existing
                thread raises `UnknownCheckpoint` in any case.

        Raises:
            ConfigurationError: `ends` is no pair of counts.
            UnknownThread: There is no such thread or namespace, and `missing_ok` is False.
            UnknownCheckpoint: It has no such checkpoint.
        """
        at = build_address(thread_id, checkpoint_ns, checkpoint_id)
        return self._read(
            lambda: self._threads.history(at, channel, ends, before, missing_ok=missing_ok)
        )()

    async def ahistory(
        self,
        thread_id: str,
        *,
        channel: str = "messages",
        checkpoint_id: str | None = None,
        checkpoint_ns: str = "",
        ends: tuple[int, int] | None = None,
        before: int | None = None,
        missing_ok: bool = False,
    ) -> _List[HistoryItem]:
        """See `history`."""
        at = build_address(thread_id, checkpoint_ns, checkpoint_id)
        decoded = await self.database.aread(
            lambda: self._threads.history(at, channel, ends, before, missing_ok=missing_ok)
        )
        return await self.database.run_in_thread(decoded)

    def delta_values(
        self, thread_id: str, *, checkpoint_id: str | None = None, checkpoint_ns: str = ""
    ) -> dict[str, Any]:
        """Return the values of the `DeltaChannel`s at a checkpoint, by channel.

        langgraph stores snapshots of such a value, which `get_tuple` returns. Between two snapshots
        it replays the writes of tasks with the reducer of the graph. perdure can replay messages
        without the graph. Any other value is None if the checkpoint has no snapshot of it.

        Args:
            thread_id: The thread.
            checkpoint_id: None means the head.
            checkpoint_ns: The namespace of a subgraph; `""` is the root graph.

        Raises:
            UnknownThread: The thread or the namespace does not exist.
            UnknownCheckpoint: The thread has no such checkpoint.
        """
        at = build_address(thread_id, checkpoint_ns, checkpoint_id)
        return self._read(lambda: self._threads.delta_values(at))

    adelta_values = make_async_twin(delta_values)

    def threads(
        self,
        *,
        limit: int = THREADS_LIMIT,
        after: str | None = None,
        prefix: str = "",
        active_since: datetime | None = None,
    ) -> _List[ThreadInfo]:
        """A page of threads, the latest activity first.

        The next page comes `after` the last thread_id of this one. With a `prefix`, only ids that
        begin with it; with `active_since`, only threads written to at this moment or later.

        Raises:
            ConfigurationError: An argument is wrong, or `active_since` has no time zone.
            UnknownThread: `after` names no thread.
        """
        return self.database.read(lambda: self._threads.page(limit, after, prefix, active_since))

    async def athreads(
        self,
        *,
        limit: int = THREADS_LIMIT,
        after: str | None = None,
        prefix: str = "",
        active_since: datetime | None = None,
    ) -> _List[ThreadInfo]:
        """See `threads`."""
        return await self.database.aread(
            lambda: self._threads.page(limit, after, prefix, active_since)
        )

    def heads(
        self,
        *,
        limit: int = 200,
        after: str | None = None,
        prefix: str = "",
        active_since: datetime | None = None,
        filter: Mapping[str, Any] | None = None,
        waiting: bool = False,
    ) -> _List[ThreadHead]:
        """The heads of a page of threads: cheaper than `threads`, whose arguments it takes.

        With a `filter`, only heads whose metadata has these values, as in `list`; with `waiting`,
        only threads that wait for an answer.
        """
        query = limit, after, prefix, active_since, filter or {}, waiting
        return self.database.read(lambda: self._threads.heads(*query))

    aheads = make_async_twin(heads)

    def head(self, thread_id: str) -> ThreadHead | None:
        """Return the head of a thread, or None if there is no such thread.

        A head is cheaper to read than the sizes and counts that `thread` returns.
        """
        return self.database.read(lambda: self._threads.head(thread_id))

    ahead = make_async_twin(head)

    def status(
        self, thread_id: str, *, checkpoint_ns: str = "", checkpoint_id: str | None = None
    ) -> ThreadStatus:
        """Whether a thread waits for an answer, was cut off, or is idle, whoever wrote it.

        It is told by the head, or by a checkpoint, and its pending writes; no graph is needed.

        Raises:
            UnknownThread: There is no such thread or namespace.
            UnknownCheckpoint: It has no such checkpoint.
        """
        at = build_address(thread_id, checkpoint_ns, checkpoint_id)
        return self._read(lambda: self._threads.status(at))

    astatus = make_async_twin(status)

    def thread(self, thread_id: str) -> ThreadInfo:
        """One thread.

        Raises:
            UnknownThread: There is no such thread.
        """
        return self.database.read(lambda: self._threads.one(thread_id))

    athread = make_async_twin(thread)

    def unique_prefix(self, thread_id: str, min_length: int = 8) -> str:
        """The first characters of an id, `least` or more, with which no other id begins.

        It is for lists that people read; `threads(prefix=…)` finds the thread by it.
        """
        return self.database.read(lambda: self._threads.beginning(thread_id, min_length))

    aunique_prefix = make_async_twin(unique_prefix)

    def checkpoints(
        self,
        thread_id: str,
        *,
        checkpoint_ns: str | None = None,
        limit: int | None = None,
        before: int | None = None,
    ) -> _List[CheckpointInfo]:
        """The checkpoints of a thread without their values, the last put first.

        With a `checkpoint_ns`, those of this namespace; at most `limit` of each namespace; only
        those `before` one, named by its `order`: the next page.

        Raises:
            UnknownThread: There is no such thread.
        """
        return self.database.read(
            lambda: self._threads.checkpoints(thread_id, checkpoint_ns, limit, before)
        )

    acheckpoints = make_async_twin(checkpoints)

    def differences(
        self,
        thread_id: str,
        pairs: Sequence[tuple[str | None, str]],
        *,
        checkpoint_ns: str = "",
        limit: int = 20,
    ) -> _List[StateDifference]:
        """What changed between checkpoints, pair by pair, without reading their whole values.

        Args:
            thread_id: The thread.
            pairs: The ids of an earlier and a later checkpoint; an earlier one that is None, or is
                not there any more, had no values.
            checkpoint_ns: The namespace of a subgraph; `""` is the root graph.
            most: Of each list or dict, at most so many elements that came or went: the last ones.

        Raises:
            UnknownThread: There is no such thread or namespace.
            UnknownCheckpoint: It has no such later checkpoint.
        """
        at = build_address(thread_id, checkpoint_ns, None)
        return self._read(lambda: self._differences.of(at, pairs, limit))

    adifferences = make_async_twin(differences)

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes, counts, and the driver that is in use."""
        sizes = self.database.stats()
        ((threads, checkpoints, items, size),) = self.database.read(
            lambda: fetch_rows(self._sql["totals"])
        )
        counts = {"threads": threads, "checkpoints": checkpoints, "items": items}
        return {**sizes, **counts, "thread_bytes": size}

    astats = make_async_twin(stats)

    def usage(self, limit: int = LIST_LIMIT) -> ThreadUsage:
        """The largest threads, at most `limit`, and in which months the threads were begun."""
        largest = self.database.read(lambda: self._threads.largest(limit))
        days = self.database.read(lambda: fetch_rows(self._sql["count_threads_by_day"]))
        return ThreadUsage(tuple(largest), sum_by_month(days))

    ausage = make_async_twin(usage)

    # -- changing threads as a whole

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread and return its space to the disk. An unknown id is no error.

        A run of the thread that is in progress cannot store anything any more, and ends with
        `ThreadDeleted`.
        """
        self._maintenance.delete_threads([thread_id])

    adelete_thread = make_async_twin(delete_thread)

    def delete_for_runs(self, run_ids: Sequence[str], *, thread_id: str | None = None) -> None:
        """Remove every checkpoint, with its writes, whose metadata names one of these runs.

        langgraph copies `run_id` to a checkpoint's metadata from `configurable` and from `metadata`
        of a run's config; one at the top level of the config reaches no checkpoint.

        Args:
            run_ids: The ids of the runs.
            thread_id: The only thread from which checkpoints are removed. None means all threads,
                and so also copies of the thread of a run.
        """
        thread_id = None if thread_id is None else check_thread_id(thread_id)
        self._maintenance.delete_for_runs(check_texts("run_ids", run_ids), thread_id)

    async def adelete_for_runs(
        self, run_ids: Sequence[str], *, thread_id: str | None = None
    ) -> None:
        """See `delete_for_runs`."""  # not `make_async_twin`: mypy would use another signature
        await asyncio.to_thread(self.delete_for_runs, run_ids, thread_id=thread_id)

    def erase(self, thread_id: str, message_ids: Collection[str] | None = None) -> ErasureReport:
        """Remove messages from a thread for good, also from the bytes of the file.

        They are removed from every checkpoint of every namespace, from history and pending writes,
        in each version and from other values, with their tool calls and quotations
        (docs/erasure.md). A message without an id is removed if its content is equal. A task that
        quotes a message is cancelled and named in the report. A tool's result stays unless its own
        message is erased. The thread can continue. Unknown ids are no error.

        Copies of the thread and paraphrases are kept. A run that is in progress still holds the
        messages; they are removed from everything that it stores later. If the whole thread is
        erased, the run ends with `ThreadDeleted`. Other writers wait while the file is rewritten.

        Args:
            thread_id: The thread.
            message_ids: Which messages. None: the whole thread.

        Raises:
            InvalidConfig: `message_ids` is not a collection of texts.
            CorruptRecord: A row cannot be read. Nothing was erased.
            ForbiddenType: A value that may hold a message has a class that is not allowed. Nothing
                was erased.
        """
        from perdure.checkpointers.erasure import (
            erase_from_thread,
        )  # langgraph.types is slow to import

        thread_id = check_thread_id(thread_id)
        ids = None if message_ids is None else check_texts("message_ids", message_ids)
        parts = self._reader, self._maintenance, thread_id, ids
        report = self._maintenance.write(thread_id, lambda: erase_from_thread(*parts))
        return replace(report, scrubbed=self.database.scrub())

    aerase = make_async_twin(erase)

    def removals(self, thread_id: str) -> int:
        """Return the number of erasures from a thread and of deletions of a thread with this id.

        Call this before you read messages for long work, and pass the number to `removed` as
        `since` when the work is done.
        """
        thread_id = check_thread_id(thread_id)
        return self.database.read(lambda: self._removals.count_removals(thread_id))

    aremovals = make_async_twin(removals)

    def removed(
        self, thread_id: str, messages: Sequence[BaseMessage], *, since: int | RunnableConfig
    ) -> _List[bool]:
        """Return for each message whether it, or its whole thread, was removed since it was read.

        Args:
            thread_id: The thread.
            messages: The messages that were read from the thread.
            since: The number that `removals` returned before the messages were read. Or the config
                that a node receives, for messages from the state that its run has loaded.
        """
        from perdure.checkpointers.stale_puts import find_erased  # langgraph.types is slow

        thread_id = check_thread_id(thread_id)
        number = (
            since
            if isinstance(since, int)
            else self._removals.find_number_of_config(since, thread_id)[0]
        )
        return self._read(lambda: find_erased(self._reader, thread_id, messages, number))

    aremoved = make_async_twin(removed)

    def said_after(
        self,
        thread_id: str,
        message_ids: Sequence[str],
        moment: datetime,
        *,
        channel: str = "messages",
        config: RunnableConfig | None = None,
    ) -> _List[bool]:
        """Return for each message whether a run that began after a moment has brought it.

        The run must be one of this database. The answer is False for messages of updates, imports,
        merges and copies, whatever their times, and whenever it is not certain: for example if the
        checkpoint before the message was pruned. A resume belongs to the run that it continues.

        Args:
            thread_id: The thread.
            message_ids: The ids of messages up to the head of the thread.
            moment: With a time zone.
            channel: The channel of the messages.
            config: The config that a node receives, for messages in the state of its run.

        Raises:
            ConfigurationError: The moment has no time zone.
        """
        thread_id, ids = check_thread_id(thread_id), check_texts("message_ids", message_ids)
        after = check_datetime("moment", moment).timestamp()
        what = thread_id, channel, ids, after, config
        return self._read(lambda: find_brought_after(self._reader, self._run_starts, *what))

    asaid_after = make_async_twin(said_after)

    def copy_thread(
        self, source_thread_id: str, target_thread_id: str, *, checkpoint_id: str | None = None
    ) -> None:
        """Copy a thread with its history into a new, independent one.

        With a `checkpoint_id`, only up to this checkpoint, which becomes the head.

        Raises:
            UnknownThread: There is no source.
            UnknownCheckpoint: The source has no such checkpoint.
            InvalidConfig: The target exists, or an id is not valid.
        """
        source, target = check_thread_id(source_thread_id), check_thread_id(target_thread_id)
        checkpoint_id = check_optional_text("checkpoint_id", checkpoint_id)
        copy_thread(self._maintenance, source, target, checkpoint_id)

    async def acopy_thread(
        self, source_thread_id: str, target_thread_id: str, *, checkpoint_id: str | None = None
    ) -> None:
        """See `copy_thread`."""  # not `make_async_twin`: mypy would use another signature
        await asyncio.to_thread(
            self.copy_thread, source_thread_id, target_thread_id, checkpoint_id=checkpoint_id
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete checkpoints of threads, or the threads; unknown ids are no error.

        `"keep_latest"` keeps the head of each namespace, and what its `DeltaChannel`s are rebuilt
        from; items up to it stay readable through `history()`. If the head is an update of the
        state that is less than a day old, the checkpoint that was updated is kept as well. So is
        the newest checkpoint of each run of the server that has not ended. `"delete"`, or
        `"delete_all"` as langgraph's server says, keeps nothing.

        Raises:
            ConfigurationError: The strategy is another.
        """
        self._maintenance.prune(thread_ids, strategy)

    aprune = make_async_twin(prune)

    def retain(
        self, rule: Retention, *, thread_ids: Sequence[str] | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Apply a retention rule to some threads, or to all, in batches that let others write.

        A dry run only reports what would go.

        Raises:
            ConfigurationError: The rule is empty, or has a negative number.
        """
        return self._maintenance.retain(rule, thread_ids, dry_run=dry_run)

    aretain = make_async_twin(retain)

    def delete_idle(
        self, before: datetime, *, thread_ids: Sequence[str] | None = None, dry_run: bool = False
    ) -> _List[ThreadInfo]:
        """Delete threads, of some or of all, whose conversation did not go on since a moment.

        The moment of a conversation is its head's `ts`, which for an imported thread is older than
        the import. Each thread is checked again in the transaction that deletes it. A dry run only
        reports them.

        Returns:
            The threads as they were.

        Raises:
            ConfigurationError: The moment has no time zone.
        """
        before = check_datetime("before", before)
        return self._maintenance.delete_idle(before, thread_ids, dry_run=dry_run)

    adelete_idle = make_async_twin(delete_idle)

    def rewind(self, thread_id: str, checkpoint_id: str, *, checkpoint_ns: str = "") -> None:
        """Make an older checkpoint the head. Nothing is deleted.

        Raises:
            UnknownCheckpoint: The thread has no such checkpoint.
        """
        at = build_address(thread_id, checkpoint_ns, checkpoint_id)
        if not self.database.write(
            lambda: self._writer.set_explicit_head(at), exclusive_names=(thread_id,)
        ):
            raise missing(at._replace(checkpoint_id=checkpoint_id))

    arewind = make_async_twin(rewind)

    def import_from(
        self,
        source: str | os.PathLike[str] | Checkpointer,
        *,
        serde: SerializerProtocol | None = None,
        names: Mapping[str, str] | None = None,
        max_value_bytes: int = IMPORT_VALUE_BYTES,
    ) -> ImportReport:
        """Import a database of langgraph's own saver, or another checkpointer; it is only read.

        All threads, namespaces, checkpoints and pending writes keep their ids. The import may be
        cut off and repeated. What langgraph's saver wrote is read back and compared, and existing
        checkpoints stay. The threads of a checkpointer are merged, as stored bytes: a thread in
        both is left if it is the same or went on here, and becomes what it is there if it went on
        there. Memory is that of the largest thread.

        Args:
            source: The path of a file, a Postgres DSN, or an open checkpointer.
            serde: The serializer with which langgraph's saver wrote; None: this checkpointer's own.
            names: New ids of threads of a checkpointer, by their ids there.
            max_value_bytes: The size of the largest value that is read from a file.

        Raises:
            ConfigurationError: There is no such file, or no such thread to rename.
            MissingDependency: It is a DSN, and `langgraph-checkpoint-postgres` is not installed.
            NotADatabase: Another application wrote it.
            StorageError: The file is damaged, or has a larger value than `max_value_bytes`.
            ImportFailed: Threads went on in both, and are named; of a checkpointer, all others are
                imported. Or a checkpoint differs when read back. The threads before it are kept.
        """
        return self._build_importer(source, serde, names, max_value_bytes).run()

    async def aimport_from(
        self,
        source: str | os.PathLike[str] | Checkpointer,
        *,
        serde: SerializerProtocol | None = None,
        names: Mapping[str, str] | None = None,
        max_value_bytes: int = IMPORT_VALUE_BYTES,
    ) -> ImportReport:
        """See `import_from`. If it is cancelled, the import stops at the next checkpoint."""
        make = partial(self._build_importer, source, serde, names, max_value_bytes)
        importer = await asyncio.to_thread(make)
        try:
            return await asyncio.to_thread(importer.run)
        finally:
            importer.stopped.set()

    def _build_importer(
        self,
        source: str | os.PathLike[str] | Checkpointer,
        serde: SerializerProtocol | None,
        names: Mapping[str, str] | None,
        max_value_bytes: int,
    ) -> Importer | Merge:
        for new in (names or {}).values():
            check_thread_id(new)
        if isinstance(source, Checkpointer):
            return Merge(source._maintenance, self._maintenance, names or {})
        if names:
            raise ConfigurationError("names are for an open checkpointer; a file keeps its own ids")
        codec = Codec(serde or self.serde, self.types)
        other = open_source(source, codec, max_value_bytes)
        return Importer(other, self._reader, self._read, self._write)

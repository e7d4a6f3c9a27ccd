"""Extend langgraph's saver with methods that inspect, lock, change and delete threads.

The methods are implemented in modules that all database drivers share. The modules `threads` and
`differences` implement most read operations, `maintenance` and `erasure` implement deletions, and
`thread_copy` and `import_langgraph` implement copies and imports.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.checkpointers.address import (
    build_address,
    check_has_time_zone,
    check_optional_text,
    check_storable_texts,
    check_thread_id,
)
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.differences import Differences
from perdure.checkpointers.heads import make_checkpoint_head_if_exists
from perdure.checkpointers.import_langgraph import Importer, open_import_source
from perdure.checkpointers.listing import Listing
from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.reader import CheckpointReader
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
from perdure.checkpointers.run_starts import find_which_messages_were_added_after
from perdure.checkpointers.saver import CheckpointSaver
from perdure.checkpointers.thread_copy import DatabaseImport, copy_thread
from perdure.checkpointers.thread_reader import ThreadReader, build_not_found_error
from perdure.errors import ConfigurationError
from perdure.settings import LIST_LIMIT, THREADS_LIMIT
from perdure.storage.database import Lock, make_async_twin
from perdure.storage.encryption import Seal
from perdure.storage.flow import NamedSQL, OwnWrites, fetch_rows, sum_by_month
from perdure.storage.untrusted_sqlite import IMPORT_VALUE_BYTES

# Annotations in the class `Checkpointer` use the alias `_List`, because the class has a method
# named `list`.
_List = list
# Sequence number of the latest erasure or deletion that is recorded for a thread id.
RemovalNumber = int


class CheckpointerParts(NamedTuple):
    """The internal objects that make up a checkpointer.

    Attributes:
        sql: The SQL statements of the checkpointer, by name.
        seal: Encrypts the rows.
        reader: Reads checkpoints, and caches them.
        maintenance: Deletes and prunes threads.
        listing: Finds checkpoints by their metadata.
        own_writes: Counts the writes of this checkpointer, which its cache already contains.
    """

    sql: NamedSQL
    seal: Seal
    reader: CheckpointReader
    maintenance: Maintenance
    listing: Listing
    own_writes: OwnWrites


class Checkpointer(CheckpointSaver):
    """A checkpointer that stores its data in a database.

    The checkpointer owns and closes the database. Users do not instantiate `Checkpointer` directly,
    but one of its subclasses, `SQLiteCheckpointer` or `PostgresCheckpointer`.
    """

    def _create_codec_cache_reader_and_writer(self) -> None:
        super()._create_codec_cache_reader_and_writer()
        self._threads = ThreadReader(self._reader)
        self._differences = Differences(self._reader)
        self._maintenance = Maintenance(self._reader, self._listing, self.database)

    @property
    def parts(self) -> CheckpointerParts:
        """The checkpointer's internal objects, for use by other packages of perdure."""
        return CheckpointerParts(
            self._sql, self._seal, self._reader, self._maintenance, self._listing, self._own_writes
        )

    def lock(self, thread_id: str, *, timeout_s: float | None = None) -> Lock:
        """Return a lock that lets only one turn of a thread run at a time.

        Use the lock in a `with` or `async with` statement. A thread's lock works across OS threads,
        event loops and processes. With SQLite, all processes that use the lock must run on the same
        machine. When a process ends, its locks are released. The lock is advisory, which means that
        a run can use the thread without acquiring the lock. See `put` for what happens when runs of
        the same thread overlap. For example:

            async with saver.lock("thread-1", timeout_s=30):
                await graph.ainvoke(question, config)

        Raises:
            InvalidConfig: The thread_id is not valid.
            StorageUnavailable: The lock was not free within `timeout_s` seconds.
            AlreadyLocked: The calling run, identified by its `contextvars` context, already holds
                the lock.
            ConfigurationError: The only DSN of the Postgres database leads to a pooler.
        """
        return self.database.lock(check_thread_id(thread_id), timeout_s=timeout_s)

    # -- reading threads

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
        """Return all items written to a channel up to a checkpoint, in order.

        The result includes items that were later removed from the channel.

        Args:
            thread_id: The thread.
            channel: A channel whose value is a list or dict.
            checkpoint_id: None means the head; items of branches are then included and marked.
            checkpoint_ns: The namespace of a subgraph; `""` is the root graph.
            ends: The numbers of items to return from the beginning and from the end. For example,
                `(0, 50)` returns only the newest 50. None means all.
            before: Only items before the item with this `position`, for the previous page.
            missing_ok: Whether to return an empty list if the thread or namespace does not exist,
                for example to show a chat page for a new thread. An unknown `checkpoint_id` of an
                existing thread raises `UnknownCheckpoint` in any case.

        Raises:
            ConfigurationError: `ends` is not a pair of counts.
            UnknownThread: There is no such thread or namespace, and `missing_ok` is False.
            UnknownCheckpoint: The thread has no such checkpoint.
        """
        address = build_address(thread_id, checkpoint_ns, checkpoint_id)
        return self._read(
            lambda: self._threads.read_history_for_later_decoding(
                address, channel, ends, before, missing_ok=missing_ok
            )
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
        address = build_address(thread_id, checkpoint_ns, checkpoint_id)
        decode_items = await self.database.aread(
            lambda: self._threads.read_history_for_later_decoding(
                address, channel, ends, before, missing_ok=missing_ok
            )
        )
        return await self.database.run_in_thread(decode_items)

    def delta_values(
        self, thread_id: str, *, checkpoint_id: str | None = None, checkpoint_ns: str = ""
    ) -> dict[str, Any]:
        """Return the values of a checkpoint's `DeltaChannel`s, keyed by channel name.

        langgraph stores the value of a `DeltaChannel` only in some checkpoints, as a snapshot that
        `get_tuple` returns. At a checkpoint without a snapshot, langgraph applies the channel's
        reducer to the writes that tasks have made since the last snapshot. If the channel contains
        messages, perdure can compute its value without the graph. If the channel contains anything
        other than messages and the checkpoint has no snapshot of it, the channel's value is
        returned as None.

        Args:
            thread_id: The thread.
            checkpoint_id: None means the head.
            checkpoint_ns: The namespace of a subgraph; `""` is the root graph.

        Raises:
            UnknownThread: The thread or the namespace does not exist.
            UnknownCheckpoint: The thread has no such checkpoint.
        """
        address = build_address(thread_id, checkpoint_ns, checkpoint_id)
        return self._read(lambda: self._threads.read_delta_channel_values(address))

    adelta_values = make_async_twin(delta_values)

    def threads(
        self,
        *,
        limit: int = THREADS_LIMIT,
        after: str | None = None,
        prefix: str = "",
        active_since: datetime | None = None,
    ) -> _List[ThreadInfo]:
        """Return one page of threads, most recently active first.

        Args:
            limit: The maximum number of threads.
            after: The last thread_id of the previous page.
            prefix: Only threads whose id begins with this text.
            active_since: Only threads with activity at this time or later.

        Raises:
            ConfigurationError: An argument is wrong, or `active_since` has no time zone.
            UnknownThread: `after` names no thread.
        """
        return self.database.read(
            lambda: self._threads.list_threads(limit, after, prefix, active_since)
        )

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
            lambda: self._threads.list_threads(limit, after, prefix, active_since)
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
        """Return the heads of one page of threads, most recently active first.

        `heads` is cheaper than `threads`, which also computes the size in bytes of each thread and
        counts its checkpoints, items and messages.

        Args:
            limit: The maximum number of threads.
            after: The last thread_id of the previous page.
            prefix: Only threads whose id begins with this text.
            active_since: Only threads with activity at this time or later.
            filter: Only heads whose metadata has these values, as in `list`.
            waiting: Only threads that wait for the answer to an interrupt.
        """
        return self.database.read(
            lambda: self._threads.list_heads(
                limit, after, prefix, active_since, filter or {}, waiting
            )
        )

    aheads = make_async_twin(heads)

    def head(self, thread_id: str) -> ThreadHead | None:
        """Return the head of a thread, or None if there is no such thread.

        Calling `head` is cheaper than calling `thread`, which also computes the thread's size in
        bytes and counts its checkpoints, items and messages.
        """
        return self.database.read(lambda: self._threads.read_head(thread_id))

    ahead = make_async_twin(head)

    def status(
        self, thread_id: str, *, checkpoint_ns: str = "", checkpoint_id: str | None = None
    ) -> ThreadStatus:
        """Return a thread's status: waiting for an answer to an interrupt, unfinished, or idle.

        The status of a thread is computed from one of its checkpoints and the pending writes of
        that checkpoint. If no `checkpoint_id` is passed, the thread's head is used. The graph is
        not needed to compute the status, even if another library's checkpointer wrote the
        checkpoint.

        Raises:
            UnknownThread: There is no such thread or namespace.
            UnknownCheckpoint: The thread has no such checkpoint.
        """
        address = build_address(thread_id, checkpoint_ns, checkpoint_id)
        return self._read(lambda: self._threads.read_status(address))

    astatus = make_async_twin(status)

    def thread(self, thread_id: str) -> ThreadInfo:
        """Return the size, the timestamps and the item and message counts of a thread.

        Raises:
            UnknownThread: There is no such thread.
        """
        return self.database.read(lambda: self._threads.read_info(thread_id))

    athread = make_async_twin(thread)

    def unique_prefix(self, thread_id: str, min_length: int = 8) -> str:
        """Return the shortest prefix that uniquely identifies a thread id.

        Users can type the prefix instead of the full thread id. To find the thread whose id starts
        with a prefix, call `threads(prefix=…)`.

        Args:
            thread_id: The thread id.
            min_length: The minimum length of the prefix in characters.
        """
        return self.database.read(
            lambda: self._threads.shortest_unique_prefix(thread_id, min_length)
        )

    aunique_prefix = make_async_twin(unique_prefix)

    def checkpoints(
        self,
        thread_id: str,
        *,
        checkpoint_ns: str | None = None,
        limit: int | None = None,
        before: int | None = None,
    ) -> _List[CheckpointInfo]:
        """Return the checkpoints of a thread without their values, most recently stored first.

        Args:
            thread_id: The thread.
            checkpoint_ns: Only checkpoints of this namespace.
            limit: The maximum number of checkpoints per namespace.
            before: Only checkpoints before the one with this `order`, for the next page.

        Raises:
            UnknownThread: There is no such thread.
        """
        return self.database.read(
            lambda: self._threads.list_checkpoints(thread_id, checkpoint_ns, limit, before)
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
        """Return the differences between checkpoints, without reading entire channel values.

        Args:
            thread_id: The thread.
            pairs: Pairs of the ids of an earlier and a later checkpoint. If the earlier id is None,
                or the earlier checkpoint does not exist any more, all values of the later one are
                new.
            checkpoint_ns: The namespace of a subgraph; `""` is the root graph.
            limit: The maximum number of added and of removed elements to return for each list or
                dict. The last ones are returned.

        Returns:
            One difference for each pair, in order.

        Raises:
            UnknownThread: There is no such thread or namespace.
            UnknownCheckpoint: A later checkpoint does not exist.
        """
        address = build_address(thread_id, checkpoint_ns, None)
        return self._read(lambda: self._differences.compare_checkpoints(address, pairs, limit))

    adifferences = make_async_twin(differences)

    def stats(self) -> dict[str, Any]:
        """Return statistics by name: sizes in bytes, row counts, the SQLite or Postgres version."""
        sizes = self.database.stats()
        ((threads, checkpoints, items, size),) = self.database.read(
            lambda: fetch_rows(self._sql["totals"])
        )
        return {
            **sizes,
            "threads": threads,
            "checkpoints": checkpoints,
            "items": items,
            "thread_bytes": size,
        }

    astats = make_async_twin(stats)

    def usage(self, limit: int = LIST_LIMIT) -> ThreadUsage:
        """Return the `limit` largest threads by stored bytes, and the threads created per month."""
        largest = self.database.read(lambda: self._threads.list_largest_threads(limit))
        return ThreadUsage(
            tuple(largest),
            sum_by_month(self.database.read(lambda: fetch_rows(self._sql["count_threads_by_day"]))),
        )

    ausage = make_async_twin(usage)

    # -- changing and deleting threads

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread and free its disk space. An unknown id is not an error.

        A run in progress on the deleted thread can no longer store anything, and fails with
        `ThreadDeleted`.
        """
        self._maintenance.delete_threads([thread_id])

    adelete_thread = make_async_twin(delete_thread)

    def delete_for_runs(self, run_ids: Sequence[str], *, thread_id: str | None = None) -> None:
        """Delete the checkpoints whose metadata contains one of the given run ids.

        The pending writes of each deleted checkpoint are deleted with it.

        langgraph copies `run_id` into a checkpoint's metadata from the `configurable` and
        `metadata` entries of the run's config. langgraph does not copy a `run_id` at the top level
        of the config into the checkpoint's metadata.

        Args:
            run_ids: The ids of the runs.
            thread_id: The only thread from which checkpoints are removed. None means all threads,
                including copies of the thread of a run.
        """
        thread_id = None if thread_id is None else check_thread_id(thread_id)
        self._maintenance.delete_checkpoints_of_runs(
            check_storable_texts("run_ids", run_ids), thread_id
        )

    async def adelete_for_runs(
        self, run_ids: Sequence[str], *, thread_id: str | None = None
    ) -> None:
        """See `delete_for_runs`."""
        # Do not use `make_async_twin` here: mypy rejects the signature of its result.
        await asyncio.to_thread(self.delete_for_runs, run_ids, thread_id=thread_id)

    def erase(self, thread_id: str, message_ids: Collection[str] | None = None) -> ErasureReport:
        """Erase messages from a thread permanently, including their bytes in the database file.

        perdure removes the erased messages from the checkpoints of all namespaces, from the
        transcript and from pending writes. The values of all channels are searched, not only the
        values of the channel `messages`. All stored versions of an erased message are removed. Tool
        calls in the erased messages are removed with them. Metadata and other values in the thread
        may quote an erased message. perdure removes the quotations that docs/erasure.md describes.
        A stored message without an id is removed if its content equals that of an erased message. A
        pending task that contains text copied from an erased message is cancelled and listed in the
        returned `ErasureReport`. If an erased message contains a tool call, the tool message with
        the result is kept, unless the id of the tool message is also in `message_ids`. The thread
        can continue. Unknown ids are not an error.

        `erase` leaves copies of the thread unchanged and cannot detect paraphrases of the erased
        messages. A run in progress still holds the erased messages in memory, but they are removed
        from everything that the run stores later. If the whole thread is erased, a run in progress
        fails with `ThreadDeleted`. Other writers wait while the database file is rewritten.

        Args:
            thread_id: The thread.
            message_ids: The ids of the messages. None means the whole thread.

        Raises:
            InvalidConfig: `message_ids` is not a collection of texts.
            CorruptRecord: A row cannot be read. Nothing was erased.
            ForbiddenType: A value that may hold a message has a class that is not allowed. Nothing
                was erased.
        """
        from perdure.checkpointers.erasure import (
            erase_messages_or_thread,
        )  # langgraph.types is slow to import

        thread_id = check_thread_id(thread_id)
        ids = None if message_ids is None else check_storable_texts("message_ids", message_ids)
        report = self._maintenance.delete_and_drop_cached_thread(
            thread_id,
            lambda: erase_messages_or_thread(self._reader, self._maintenance, thread_id, ids),
        )
        return replace(report, scrubbed=self.database.scrub_deleted_rows())

    aerase = make_async_twin(erase)

    def removals(self, thread_id: str) -> RemovalNumber:
        """Return the sequence number of the latest erasure or deletion recorded for a thread id.

        The number is 0 if none is recorded. To detect messages that were erased while a program was
        processing them, call `removals` before reading the messages. After processing the messages,
        call the method `removed`. The `since` argument of `removed` must be the number that
        `removals` returned earlier.
        """
        thread_id = check_thread_id(thread_id)
        return self.database.read(lambda: self._removals.read_newest_removal_number(thread_id))

    aremovals = make_async_twin(removals)

    def removed(
        self, thread_id: str, messages: Sequence[BaseMessage], *, since: int | RunnableConfig
    ) -> _List[bool]:
        """Return a list with one bool for each message.

        The bool is True if the message was erased, or its thread was erased or deleted, after the
        message was read.

        Args:
            thread_id: The thread.
            messages: The messages that were read from the thread.
            since: The number that `removals` returned before the messages were read. Or the config
                that a node receives, for messages from the state that its run has loaded.
        """
        from perdure.checkpointers.stale_puts import (
            find_which_messages_were_erased,
        )  # langgraph.types is slow

        thread_id = check_thread_id(thread_id)
        number = (
            since
            if isinstance(since, int)
            else self._removals.find_newest_removal_number_when_config_was_loaded(
                since, thread_id
            ).number
        )
        return self._read(
            lambda: find_which_messages_were_erased(self._reader, thread_id, messages, number)
        )

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
        """Return, for each message, whether the run that added it started after `moment`.

        A message counts as added by a run only if the run used this checkpointer's database. The
        result is False for a message that was added by a state update, an import, a merge or a
        copy. If it is unknown which run added a message, for example because the checkpoint before
        the message was pruned, the result for the message is False. A run that resumes an
        interrupted run counts as part of the interrupted run.

        Args:
            thread_id: The thread.
            message_ids: The ids of the messages.
            moment: A time with a time zone.
            channel: The channel of the messages.
            config: The config that a node receives, for messages in the state of its run. None
                means that the messages are in the transcript of the thread's head.

        Raises:
            ConfigurationError: `moment` has no time zone.
        """
        thread_id, ids = (
            check_thread_id(thread_id),
            check_storable_texts("message_ids", message_ids),
        )
        after = check_has_time_zone("moment", moment).timestamp()
        return self._read(
            lambda: find_which_messages_were_added_after(
                self._reader, self._run_starts, thread_id, channel, ids, after, config
            )
        )

    asaid_after = make_async_twin(said_after)

    def copy_thread(
        self, source_thread_id: str, target_thread_id: str, *, checkpoint_id: str | None = None
    ) -> None:
        """Copy a thread with its history to a new, independent thread.

        Args:
            source_thread_id: The thread to copy.
            target_thread_id: The id of the new thread.
            checkpoint_id: The last checkpoint to copy, which becomes the head. None means the head.

        Raises:
            UnknownThread: The source thread does not exist.
            UnknownCheckpoint: The source thread has no such checkpoint.
            InvalidConfig: The target thread exists, or an id is not valid.
        """
        source, target = check_thread_id(source_thread_id), check_thread_id(target_thread_id)
        checkpoint_id = check_optional_text("checkpoint_id", checkpoint_id)
        copy_thread(self._maintenance, source, target, checkpoint_id)

    async def acopy_thread(
        self, source_thread_id: str, target_thread_id: str, *, checkpoint_id: str | None = None
    ) -> None:
        """See `copy_thread`."""
        # Do not use `make_async_twin` here: mypy rejects the signature of its result.
        await asyncio.to_thread(
            self.copy_thread, source_thread_id, target_thread_id, checkpoint_id=checkpoint_id
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete old checkpoints of threads, or whole threads. Unknown ids are not an error.

        Args:
            thread_ids: The threads.
            strategy: `"keep_latest"` keeps the head of each namespace and the ancestors from which
                its `DeltaChannel`s are rebuilt; all items up to the head stay readable through
                `history()`. If the head was stored by an update of the state less than a day ago,
                the checkpoint to which the update was applied is kept as well. If a run of the
                server has not ended, the checkpoints that are needed to continue it are kept, too.
                `"delete"` deletes the threads; langgraph's server calls this strategy
                `"delete_all"`.

        Raises:
            ConfigurationError: The strategy is unknown.
        """
        self._maintenance.prune(thread_ids, strategy)

    aprune = make_async_twin(prune)

    def retain(
        self, rule: Retention, *, thread_ids: Sequence[str] | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Apply a retention rule to threads in batches, so that other writers wait only briefly.

        Args:
            rule: The rule, which says which checkpoints are kept.
            thread_ids: The threads; None means all.
            dry_run: Whether to report what would be deleted, without deleting it.

        Raises:
            ConfigurationError: The rule is empty, or contains a negative number.
        """
        return self._maintenance.retain(rule, thread_ids, dry_run=dry_run)

    aretain = make_async_twin(retain)

    def delete_idle(
        self, before: datetime, *, thread_ids: Sequence[str] | None = None, dry_run: bool = False
    ) -> _List[ThreadInfo]:
        """Delete threads whose last activity was before the given time.

        A thread is deleted if the `ts` of its head is earlier than `before`. A thread with an
        unfinished server run, or with a cron that will run again, is never deleted. An import keeps
        the original `ts` of each checkpoint. A thread with an old head can therefore be deleted
        even if the thread was imported after the time `before`. Whether a thread can be deleted is
        checked again in the transaction that deletes it.

        Args:
            before: A time with a time zone.
            thread_ids: Only these threads are considered; None means all.
            dry_run: Whether to return the threads without deleting them.

        Returns:
            The deleted threads, with their sizes and times before the deletion.

        Raises:
            ConfigurationError: `before` has no time zone.
        """
        before = check_has_time_zone("before", before)
        return self._maintenance.delete_idle(before, thread_ids, dry_run=dry_run)

    adelete_idle = make_async_twin(delete_idle)

    def rewind(self, thread_id: str, checkpoint_id: str, *, checkpoint_ns: str = "") -> None:
        """Make an older checkpoint the head. Nothing is deleted.

        Raises:
            UnknownCheckpoint: The thread has no such checkpoint.
        """
        address = build_address(thread_id, checkpoint_ns, checkpoint_id)
        if not self.database.write(
            lambda: make_checkpoint_head_if_exists(self._reader, address),
            exclusive_names=(thread_id,),
        ):
            raise build_not_found_error(address._replace(checkpoint_id=checkpoint_id))

    arewind = make_async_twin(rewind)

    def import_from(
        self,
        source: str | os.PathLike[str] | Checkpointer,
        *,
        serde: SerializerProtocol | None = None,
        names: Mapping[str, str] | None = None,
        max_value_bytes: int = IMPORT_VALUE_BYTES,
    ) -> ImportReport:
        """Import all threads stored by another perdure checkpointer or by LangGraph's own saver.

        The source is only read. Imported threads, namespaces, checkpoints and pending writes keep
        the ids that they have in the source. An interrupted import can be repeated. Each checkpoint
        imported from langgraph's own saver is read back after it is stored, and compared with the
        source. Existing checkpoints are kept. If the source is a checkpointer, the stored bytes of
        its threads are copied without being decoded. If a thread exists in the source and in this
        database, but was continued in only one of the two, this database contains the continued
        copy after the import. The largest thread of the source must fit in memory.

        Args:
            source: The path of a file, a Postgres DSN, or an open checkpointer.
            serde: The serializer that langgraph's saver has used. None means the serializer of this
                checkpointer.
            names: New ids for threads of a checkpointer, by their ids in the source.
            max_value_bytes: The maximum size in bytes of a value that is read from a file.

        Raises:
            ConfigurationError: There is no such file, or no such thread to rename.
            MissingDependency: The source is a DSN, and `langgraph-checkpoint-postgres` is not
                installed.
            NotADatabase: Another application wrote the file.
            StorageError: The file is damaged, or has a larger value than `max_value_bytes`.
            ImportFailed: Threads have continued differently in both databases. The error names
                them, and all other threads of a checkpointer are imported. Or a checkpoint differs
                when it is read back; the threads before it are kept.
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
        """See `import_from`.

        If the `aimport_from` call is cancelled, the import stops before storing another checkpoint.
        If the source is a checkpointer, a cancelled import stops before copying the next thread.
        """
        importer = await asyncio.to_thread(
            partial(self._build_importer, source, serde, names, max_value_bytes)
        )
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
    ) -> Importer | DatabaseImport:
        """Check the arguments of `import_from`, and build the object that runs the import."""
        for new_id in (names or {}).values():
            check_thread_id(new_id)
        if isinstance(source, Checkpointer):
            return DatabaseImport(source._maintenance, self._maintenance, names or {})
        if names:
            raise ConfigurationError(
                f"the argument 'names' ({names!r:.80}) requires an open checkpointer as the "
                "source; omit 'names', or pass an open checkpointer"
            )
        codec = Codec(serde or self.serde, self.types)
        return Importer(
            open_import_source(source, codec, max_value_bytes),
            self._reader,
            self._read,
            self._execute_write,
        )

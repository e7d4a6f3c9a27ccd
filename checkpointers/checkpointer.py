"""The checkpointer: langgraph's `BaseCheckpointSaver` over perdure's log, sync and async.

This file is its whole surface. The work is done by parts that know no driver: `writer` plans what
to store, `reader` reads it, `listing` and `threads` find and show, `maintenance`
and `erasure` delete. Reads run in the calling thread, writes in the database's writer; an `a` form
does the same in another thread.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, Final, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.checkpointers.address import (
    Address,
    address,
    check_moment,
    check_text,
    check_texts,
    check_thread_id,
    context_values,
    named,
    optional_text,
)
from perdure.checkpointers.cache import Cache
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.differences import Differences
from perdure.checkpointers.import_langgraph import Importer, source_of
from perdure.checkpointers.listing import Listing
from perdure.checkpointers.maintenance import Maintenance
from perdure.checkpointers.merge import Merge
from perdure.checkpointers.objects import name_of
from perdure.checkpointers.put import CheckpointPut, TaskWrites
from perdure.checkpointers.reader import CheckpointReader, collector_paused
from perdure.checkpointers.records import LABELS
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
from perdure.checkpointers.threads import ThreadReader, missing
from perdure.checkpointers.values import Allowlist
from perdure.checkpointers.writer import CheckpointWriter
from perdure.errors import ConfigurationError, InvalidConfig
from perdure.settings import LIST_LIMIT
from perdure.storage.database import Database, DatabaseOwner, Lock, Watch, awaited
from perdure.storage.encryption import Clear, LangGraphCipher, Seal, seal_for
from perdure.storage.flow import Flow, NamedSQL, by_month, rows_of

T = TypeVar("T")
_List = list  # within the class the name is a method's

OFF_LOOP_ITEMS: Final = 512  # longer lists are compared in a thread, not on the event loop
_LONGEST_LABEL: Final = 4096  # characters of a value that a run's context has; a namespace's limit
_REMEMBERED: Final = 1024  # checkpoints read by their id, threads with labels: not put upon yet


class Checkpointer(DatabaseOwner, BaseCheckpointSaver[Any]):
    """A checkpointer over a database, which it closes. Users open one with `SQLiteCheckpointer`.

    Args:
        database: The database.
        sql: The statements in its dialect, by name.
        serde: The serializer.
        seal: Encrypts rows.
        cache_bytes: About how much memory decoded items may take.
    """

    def __init__(
        self,
        database: Database,
        sql: NamedSQL,
        serde: SerializerProtocol,
        seal: Seal,
        cache_bytes: int,
    ) -> None:
        super().__init__(serde=serde)
        self.database = database
        self._sql, self._seal, self._cache_bytes = sql, seal, cache_bytes
        self._read_by_id: dict[Address, bool] = {}
        self._labels: dict[str, set[str]] = {}
        self._bind()

    def _bind(self) -> None:
        """Make the parts, for the serializer as it is."""
        self._codec = Codec(self.serde)
        self._cache = Cache(self._cache_bytes)
        self._reader = CheckpointReader(self._sql, self._seal, self._cache, self._codec)
        self._watch = Watch()
        self._writer = CheckpointWriter(self._reader, self._watch)
        self._threads = ThreadReader(self._reader)
        self._differences = Differences(self._reader)
        self._listing = Listing(self._reader, self.database)
        self._maintenance = Maintenance(self._reader, self._listing, self.database)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> Checkpointer:
        """The same checkpointer, which may also rebuild these types; closing one closes both."""
        clone = super().with_allowlist(extra_allowlist)
        assert isinstance(clone, Checkpointer)
        if clone is not self:
            clone._bind()
        return clone

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

    # -- reading

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that a config names, or the head of its thread and namespace.

        Raises:
            InvalidConfig: The config has no usable thread_id.
            CorruptRecord: A stored row is damaged or was tampered with.
        """
        at = address(config)
        epoch = self.database.epoch(self._watch) if self._reader.is_kept(at) else None
        return self._at_hand(at, epoch) or self._read(lambda: self._get(at))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `get_tuple`."""
        at = address(config)
        if self._reader.is_kept(at, OFF_LOOP_ITEMS):
            epoch = self.database.epoch(self._watch)
            if epoch is None:
                epoch = await self.database.epoch_soon(self._watch)
            found = self._at_hand(at, epoch)
            if found is not None:
                return found
        return await self.database.in_thread(lambda: self._read(lambda: self._get(at)))

    def _at_hand(self, at: Address, epoch: object | None) -> CheckpointTuple | None:
        """The head as this process keeps it, if nobody else has written since."""
        if epoch is None:
            return None
        with collector_paused():
            return self._reader.at_hand(at, epoch)

    def _get(self, at: Address) -> Flow[CheckpointTuple | None]:
        """Read a checkpoint, and remember if it was asked for by its id and is not the head.

        What is put upon it goes on from there on purpose.
        """
        found = yield from self._reader.get(at)
        if found is None or at.checkpoint_id is None or (yield from self._reader.is_head(at)):
            return found
        _remember(self._read_by_id, at, True)
        return found

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, the last put first, each read as it is asked for.

        The head of a namespace comes first; without a thread, they come thread by thread.

        Args:
            config: The thread; without a `checkpoint_ns`, all its namespaces; None: all threads.
            filter: Metadata values to match, all of them. Indexed for text, numbers and booleans.
                A key with dots also names a value within a dict: `"user.access-level"`.
            before: Only those put before this checkpoint; an id of another namespace is compared
                with the ids, which sort by time.
            limit: At most so many.
        """
        many = None if limit is None else max(limit, 0)
        for at, key in islice(self._listing.addresses(config, filter, before), many):
            found = self._read(partial(self._reader.get, at, key))
            if found is not None:  # it may have been pruned since
                yield found

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """See `list`."""
        found = self.list(config, filter=filter, before=before, limit=limit)
        while (each := await self.database.in_thread(lambda: next(found, None))) is not None:
            yield each

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """The writes of each channel up to a checkpoint, and the value before them."""
        return self._read(lambda: self._reader.delta_history(address(config), channels))

    aget_delta_channel_history = awaited(get_delta_channel_history)

    # -- writing

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint upon the one that the config names; then a crash cannot lose it.

        It becomes the head of its thread and namespace if its parent is the head, or if it begins a
        run: by an input, an update, a fork, or a resume from a checkpoint that was read by its id.
        If a later run has begun meanwhile, it becomes a branch. Channels that `new_versions` does
        not name are those of the parent. Lists and dicts cost only what is new in them.

        Returns:
            The address of the checkpoint.

        Raises:
            InvalidConfig: The config has no usable thread_id, or the checkpoint no usable id.
            Unstorable: A value cannot be stored; the message names the path to it.
        """
        asked = self._put(config, checkpoint, metadata, new_versions)
        self._write(asked)
        return asked.at.config(checkpoint["id"])

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `put`."""
        asked = self._put(config, checkpoint, metadata, new_versions)
        await self._awrite(asked, _items_in(checkpoint["channel_values"].values()))
        return asked.at.config(checkpoint["id"])

    def _put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> CheckpointPut:
        at = address(config)
        check_text("the id of the checkpoint", checkpoint["id"])
        known = dict(get_checkpoint_metadata(config, metadata))
        names = self._labels.get(at.thread_id)
        if names and not at.checkpoint_ns:
            values = context_values(config, names).items()
            texts = ((n, v) for n, v in values if isinstance(v, str) and "\0" not in v)
            labels = {name: text for name, text in texts if len(text) <= _LONGEST_LABEL}
            known |= {**labels, LABELS: sorted(labels)} if labels else {}
        return CheckpointPut(at, checkpoint, known, new_versions, self._read_by_id.pop(at, False))

    def label(self, thread_id: str, names: Collection[str]) -> None:
        """Write values of a run's context, like `user_id`, into the metadata of its checkpoints.

        langgraph copies a run's `configurable` to them, and nothing of its `context`, which may
        hold secrets; memory nodes name here what they read of it. From the next checkpoint of the
        root graph on, texts of these names (of 4,096 characters at most, as of a namespace) are in
        its metadata, in place of what `configurable` says. Checkpoints that follow it have them as
        well, unless their own run names others.

        Raises:
            InvalidConfig: The thread_id is not valid.
        """
        thread_id = check_thread_id(thread_id)
        before = self._labels.get(thread_id, set())
        if not before.issuperset(names):
            _remember(self._labels, thread_id, before | {*names})

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store the writes of a task with the checkpoint from which it ran.

        A task's writes are stored once; errors, interrupts and the like replace earlier ones.

        Raises:
            InvalidConfig: The config has no thread_id or no checkpoint_id, or the task no text as
                its id or path.
            Unstorable: A value cannot be stored; the message names the path to it.
        """
        self._write(_task_writes(config, writes, task_id, task_path))

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """See `put_writes`."""
        asked = _task_writes(config, writes, task_id, task_path)
        await self._awrite(asked, _items_in(map(itemgetter(1), writes)))

    def get_next_version(self, current: Any, channel: None) -> Any:
        """The next version of a channel: a whole number, or in another saver's form."""
        if current is None:
            return 1
        if isinstance(current, str):
            return f"{int(current.split('.')[0]) + 1:032}.{random.random():016}"
        return current + 1

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

        Raises:
            ConfigurationError: `ends` is no pair of counts.
            UnknownThread: There is no such thread or namespace.
            UnknownCheckpoint: It has no such checkpoint.
        """
        at = named(thread_id, checkpoint_ns, checkpoint_id)
        return self._read(lambda: self._threads.history(at, channel, ends, before))()

    async def ahistory(
        self,
        thread_id: str,
        *,
        channel: str = "messages",
        checkpoint_id: str | None = None,
        checkpoint_ns: str = "",
        ends: tuple[int, int] | None = None,
        before: int | None = None,
    ) -> _List[HistoryItem]:
        """See `history`."""
        at = named(thread_id, checkpoint_ns, checkpoint_id)
        decoded = await self.database.aread(
            lambda: self._threads.history(at, channel, ends, before)
        )
        return await self.database.in_thread(decoded)

    def threads(
        self,
        *,
        limit: int = 50,
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
        limit: int = 50,
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
        asked = limit, after, prefix, active_since, filter or {}, waiting
        return self.database.read(lambda: self._threads.heads(*asked))

    aheads = awaited(heads)

    def head(self, thread_id: str) -> ThreadHead:
        """The head of one thread: cheaper than `thread`.

        Raises:
            UnknownThread: There is no such thread.
        """
        return self.database.read(lambda: self._threads.head(thread_id))

    ahead = awaited(head)

    def status(
        self, thread_id: str, *, checkpoint_ns: str = "", checkpoint_id: str | None = None
    ) -> ThreadStatus:
        """Whether a thread waits for an answer, was cut off, or is idle, whoever wrote it.

        It is told by the head, or by a checkpoint, and its pending writes; no graph is needed.

        Raises:
            UnknownThread: There is no such thread or namespace.
            UnknownCheckpoint: It has no such checkpoint.
        """
        at = named(thread_id, checkpoint_ns, checkpoint_id)
        return self._read(lambda: self._threads.status(at))

    astatus = awaited(status)

    def thread(self, thread_id: str) -> ThreadInfo:
        """One thread.

        Raises:
            UnknownThread: There is no such thread.
        """
        return self.database.read(lambda: self._threads.one(thread_id))

    athread = awaited(thread)

    def beginning(self, thread_id: str, least: int = 8) -> str:
        """The first characters of an id, `least` or more, with which no other id begins.

        It is for lists that people read; `threads(prefix=…)` finds the thread by it.
        """
        return self.database.read(lambda: self._threads.beginning(thread_id, least))

    abeginning = awaited(beginning)

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

    acheckpoints = awaited(checkpoints)

    def differences(
        self,
        thread_id: str,
        pairs: Sequence[tuple[str | None, str]],
        *,
        checkpoint_ns: str = "",
        most: int = 20,
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
        at = named(thread_id, checkpoint_ns, None)
        return self._read(lambda: self._differences.of(at, pairs, most))

    adifferences = awaited(differences)

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes, counts, and the driver that is in use."""
        file = self.database.stats()
        ((threads, checkpoints, items, size),) = self.database.read(
            lambda: rows_of(self._sql["totals"])
        )
        counts = {"threads": threads, "checkpoints": checkpoints, "items": items}
        return {**file, **counts, "thread_bytes": size}

    astats = awaited(stats)

    def usage(self, limit: int = LIST_LIMIT) -> ThreadUsage:
        """The largest threads, at most `limit`, and in which months the threads were begun."""
        largest = self.database.read(lambda: self._threads.largest(limit))
        days = self.database.read(lambda: rows_of(self._sql["begun_by_day"]))
        return ThreadUsage(tuple(largest), by_month(days))

    ausage = awaited(usage)

    # -- changing threads as a whole

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread and return its space to the disk; an unknown id is no error."""
        self._maintenance.delete_threads([thread_id])

    adelete_thread = awaited(delete_thread)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove every checkpoint, with its writes, whose metadata names one of these runs.

        langgraph copies `run_id` to a checkpoint's metadata from `configurable` and from `metadata`
        of a run's config; one at the top level of the config reaches no checkpoint.
        """
        self._maintenance.delete_for_runs(check_texts("run_ids", run_ids))

    adelete_for_runs = awaited(delete_for_runs)

    def erase(self, thread_id: str, message_ids: Collection[str] | None = None) -> ErasureReport:
        """Remove messages from a thread for good, also from the bytes of the file.

        They are removed from every checkpoint of every namespace, from history and pending writes,
        in each version and from other values, with their tool calls and quotations
        (docs/erasure.md). A message without an id is removed if its content is equal. A task that
        quotes a message is cancelled and named in the report. A tool's result stays unless its own
        message is erased. The thread can continue. Unknown ids are no error.

        Copies of the thread and paraphrases stay. A run under way still holds the messages and
        stores them again, so erase when no run is active. Other writers wait while the file is
        rewritten.

        Args:
            thread_id: The thread.
            message_ids: Which messages. None: the whole thread.

        Raises:
            InvalidConfig: `message_ids` is not a collection of texts.
            CorruptRecord: A row cannot be read. Nothing was erased.
            ForbiddenType: A value that may hold a message has a class that is not allowed. Nothing
                was erased.
        """
        from perdure.checkpointers.erasure import erased  # langgraph.types is slow to import

        thread_id = check_thread_id(thread_id)
        ids = None if message_ids is None else check_texts("message_ids", message_ids)
        parts = self._reader, self._maintenance, thread_id, ids
        done = self._maintenance.write(thread_id, lambda: erased(*parts))
        return replace(done, scrubbed=self.database.scrub())

    aerase = awaited(erase)

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
        self._maintenance.copy_thread(source, target, optional_text("checkpoint_id", checkpoint_id))

    async def acopy_thread(
        self, source_thread_id: str, target_thread_id: str, *, checkpoint_id: str | None = None
    ) -> None:
        """See `copy_thread`."""
        await asyncio.to_thread(
            self.copy_thread, source_thread_id, target_thread_id, checkpoint_id=checkpoint_id
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete checkpoints of threads, or the threads; unknown ids are no error.

        `"keep_latest"` keeps the head of each namespace, and what its `DeltaChannel`s are rebuilt
        from; items up to it stay readable through `history()`. `"delete"`, or `"delete_all"` as
        langgraph's server says, keeps nothing.

        Raises:
            ConfigurationError: The strategy is another.
        """
        self._maintenance.prune(thread_ids, strategy)

    aprune = awaited(prune)

    def retain(
        self, rule: Retention, *, thread_ids: Sequence[str] | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Apply a retention rule to some threads, or to all, in batches that let others write.

        A dry run only reports what would go.

        Raises:
            ConfigurationError: The rule is empty, or has a negative number.
        """
        return self._maintenance.retain(rule, thread_ids, dry_run=dry_run)

    aretain = awaited(retain)

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
        before = check_moment("before", before)
        return self._maintenance.delete_idle(before, thread_ids, dry_run=dry_run)

    adelete_idle = awaited(delete_idle)

    def rewind(self, thread_id: str, checkpoint_id: str, *, checkpoint_ns: str = "") -> None:
        """Make an older checkpoint the head. Nothing is deleted.

        Raises:
            UnknownCheckpoint: The thread has no such checkpoint.
        """
        at = named(thread_id, checkpoint_ns, checkpoint_id)
        if not self.database.write(lambda: self._writer.rewind(at), exclusive=(thread_id,)):
            raise missing(at._replace(checkpoint_id=checkpoint_id))

    arewind = awaited(rewind)

    def import_from(
        self,
        source: str | os.PathLike[str] | Checkpointer,
        *,
        serde: SerializerProtocol | None = None,
        names: Mapping[str, str] | None = None,
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

        Raises:
            ConfigurationError: There is no such file, or no such thread to rename.
            MissingDependency: It is a DSN, and `langgraph-checkpoint-postgres` is not installed.
            NotADatabase: Another application wrote it.
            ImportFailed: Threads went on in both, and are named; of a checkpointer, all others are
                imported. Or a checkpoint differs when read back. The threads before it are kept.
        """
        return self._importer(source, serde, names).run()

    async def aimport_from(
        self,
        source: str | os.PathLike[str] | Checkpointer,
        *,
        serde: SerializerProtocol | None = None,
        names: Mapping[str, str] | None = None,
    ) -> ImportReport:
        """See `import_from`. If it is cancelled, the import stops at the next checkpoint."""
        importer = await asyncio.to_thread(self._importer, source, serde, names)
        try:
            return await asyncio.to_thread(importer.run)
        finally:
            importer.stopped.set()

    def _importer(
        self,
        source: str | os.PathLike[str] | Checkpointer,
        serde: SerializerProtocol | None,
        names: Mapping[str, str] | None,
    ) -> Importer | Merge:
        for new in (names or {}).values():
            check_thread_id(new)
        if isinstance(source, Checkpointer):
            return Merge(source._maintenance, self._maintenance, names or {})
        if names:
            raise ConfigurationError("names are for an open checkpointer; a file keeps its own ids")
        found = source_of(source, Codec(serde or self.serde))
        return Importer(found, self._reader, self._read, self._write)

    # -- running flows

    def _read(self, make: Callable[[], Flow[T]]) -> T:
        with collector_paused():
            return self.database.read(make)

    def _write(self, asked: CheckpointPut | TaskWrites) -> None:
        self.database.write(*self._writer.job(asked))

    async def _awrite(self, asked: CheckpointPut | TaskWrites, items: int) -> None:
        if items <= OFF_LOOP_ITEMS:
            job = self._writer.job(asked)
        else:
            job = await self.database.in_thread(lambda: self._writer.job(asked))
        await self.database.awrite(*job)


def serde_and_seal(
    key: bytes | str | None,
    serde: SerializerProtocol | None,
    allow: Sequence[type | tuple[str, str]],
    strict: bool,
) -> tuple[SerializerProtocol, Seal]:
    """The serializer and the encryption that these options of a checkpointer mean."""
    seal = seal_for(key)
    if serde is None:
        names = [name_of(t) if isinstance(t, type) else t for t in allow]
        names += [] if strict else [Allowlist.LOADED]
        serde = JsonPlusSerializer(allowed_msgpack_modules=names or None)
    if not isinstance(serde, EncryptedSerializer):
        return serde, seal
    if not isinstance(seal, Clear):
        raise ConfigurationError(
            "both a key and an EncryptedSerializer are given; take one of them: key= (or "
            "PERDURE_KEY) also binds each row to its place"
        )
    # its ciphertext differs each time; what is compared is the plain text within
    return serde.serde, LangGraphCipher(serde.cipher)


def _remember(kept: dict[Any, Any], key: Any, value: Any) -> None:
    while len(kept) >= _REMEMBERED:
        kept.pop(next(iter(kept)), None)
    kept[key] = value


def _items_in(values: Iterable[Any]) -> int:
    items = 0
    for value in values:
        if type(value) is _List or type(value) is dict:
            items += len(value)
    return items


def _task_writes(
    config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
) -> TaskWrites:
    at = address(config)
    check_text("task_id", task_id)
    check_text("task_path", task_path)
    if at.checkpoint_id is None:
        raise InvalidConfig(
            f"writes for thread {at.thread_id!r} name no checkpoint_id; pass the config that "
            "put() returned"
        )
    return TaskWrites(at, task_id, task_path, writes)

"""The checkpointer: langgraph's `BaseCheckpointSaver` over perdure's log, in both colours.

Each method is written once. The blocking form runs its flow in the calling thread (reads) or hands
it to the writer and waits; the `a` form awaits the same work in another thread.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
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

from perdure.checkpointers.base import Address, OnConflict, PruneReport, Retention, address
from perdure.checkpointers.base import check_thread_id as checked
from perdure.checkpointers.cipher import Clear, LangGraphCipher, Seal
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.conflicts import Origin, origin_of, set_out
from perdure.checkpointers.delta import delta_history
from perdure.checkpointers.listing import Listing
from perdure.checkpointers.memo import Memo
from perdure.checkpointers.plan import PlannedPut, PlannedWrites, Planner
from perdure.checkpointers.pruning import Keep, Pruner, keep_but, keep_heads, keep_rule
from perdure.checkpointers.reading import Reader
from perdure.checkpointers.views import Views
from perdure.checkpointers.waiting import Queue
from perdure.checkpointers.writing import Stale, Writer, Written
from perdure.errors import ConfigurationError, InvalidConfig, UnknownCheckpoint
from perdure.storage.flow import Flow
from perdure.storage.sqlite import Database

T = TypeVar("T")

OFF_LOOP_ITEMS = 512  # longer lists are compared in a thread, not on the event loop
PRUNE_BATCH = 500  # checkpoints deleted per transaction


class LogSaver(Views, BaseCheckpointSaver[Any]):
    """A checkpointer over an open database. Users open one with `SQLiteCheckpointer.open`.

    Args:
        database: The open database, which the saver closes.
        sql: The statements in its dialect, by name.
        serde: The serializer.
        seal: Encrypts rows.
        on_conflict: What happens when two runs meet on one thread; see `SQLiteCheckpointer`.
        cache_bytes: About how much memory decoded items may take.
    """

    def __init__(
        self,
        database: Database,
        sql: dict[str, str],
        *,
        serde: SerializerProtocol,
        seal: Seal | None = None,
        on_conflict: OnConflict = "fork",
        cache_bytes: int = 128 << 20,
    ) -> None:
        super().__init__(serde=serde)
        if on_conflict not in ("fork", "wait", "error"):
            raise ConfigurationError(
                f"on_conflict is {on_conflict!r}; expected 'fork', 'wait' or 'error'"
            )
        self.database = database
        self.on_conflict = on_conflict
        self._sql = sql
        self._cache_bytes = cache_bytes
        self._queue = Queue()
        self._bind(seal or Clear())

    def _bind(self, seal: Seal) -> None:
        serde = self.serde
        if isinstance(serde, EncryptedSerializer):
            # its ciphertext differs each time; what is compared is the plain text within
            seal = LangGraphCipher(serde.cipher)
            serde = serde.serde
        self._seal = seal
        self._codec = Codec(serde)
        self._memo = Memo(self._cache_bytes)
        self._reader = Reader(self._sql, seal, self._memo, self._codec)
        self._writer = Writer(self._sql, seal, self._memo, self._reader)
        self._pruner = Pruner(self._sql, self._reader)

    # -- opening and closing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def close(self) -> None:
        """Close the database, once everything handed to it is written."""
        self.database.close()

    async def aclose(self) -> None:
        """See `close`."""
        await asyncio.to_thread(self.database.close)

    # -- running work in either colour

    def _read(self, flow: Flow[T]) -> T:
        return self.database.read(flow)

    def _aread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return self.database.in_thread(work)

    def _flow(self, plan: PlannedPut | PlannedWrites) -> Flow[Written]:
        if isinstance(plan, PlannedPut):
            return self._writer.put(plan)
        return self._writer.put_writes(plan)

    def _take_over(self, written: Written) -> None:
        written.take_over(self._memo)

    def _write(self, plan: Callable[[Planner], PlannedPut | PlannedWrites], thread_id: str) -> None:
        try:
            self.database.write(self._flow(plan(self._planner(thread_id))), self._take_over)
        except Stale:
            self._memo.forget(thread_id)
            self.database.write(self._flow(plan(Planner(self._codec, None))), self._take_over)

    async def _awrite(
        self, plan: Callable[[Planner], PlannedPut | PlannedWrites], thread_id: str, items: int
    ) -> None:
        async def planned(planner: Planner) -> PlannedPut | PlannedWrites:
            if items <= OFF_LOOP_ITEMS:
                return plan(planner)
            return await self.database.in_thread(lambda: plan(planner))

        try:
            ready = await planned(self._planner(thread_id))
            await self.database.awrite(self._flow(ready), self._take_over)
        except Stale:
            self._memo.forget(thread_id)
            ready = await planned(Planner(self._codec, None))
            await self.database.awrite(self._flow(ready), self._take_over)

    def _planner(self, thread_id: str) -> Planner:
        return Planner(self._codec, self._memo.peek(thread_id))

    # -- reading

    def _get(self, at: Address) -> Flow[CheckpointTuple | None]:
        found = yield from self._reader.find(at)
        return None if found is None else (yield from self._reader.checkpoint_tuple(at, found))

    def _set_out(self, at: Address, found: CheckpointTuple | None) -> CheckpointTuple | None:
        checkpoint_id = found.checkpoint["id"] if found else None
        set_out(at.thread_id, at.checkpoint_ns, Origin(checkpoint_id, at.checkpoint_id is not None))
        return found

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint a config names, or the head of its thread and namespace.

        Raises:
            InvalidConfig: The config has no usable thread_id.
            CorruptRecord: A stored row is damaged or was tampered with.
            ForbiddenType: A stored value is of a type that is not on the allowlist.
        """
        at = address(config)
        if self.on_conflict == "wait":
            self._queue.wait(config, at)
        return self._set_out(at, self._read(self._get(at)))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `get_tuple`."""
        at = address(config)
        if self.on_conflict == "wait":
            await self._queue.await_(config, at)
        return self._set_out(at, await self._aread(lambda: self._read(self._get(at))))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, the last put first, each read as it is asked for.

        No lock and no connection is held between two of them.

        Args:
            config: Whose; without a `checkpoint_ns`, of all namespaces; None: of all threads.
            filter: Metadata values to match, all of them. Indexed for text, numbers and booleans.
            before: Only those put before this checkpoint.
            limit: At most so many.
        """
        listing = Listing(self._sql, self._reader, self._read)
        for at in listing.addresses(config, filter, before, limit):
            found = self._read(self._get(at))
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
        tuples = self.list(config, filter=filter, before=before, limit=limit)
        while (found := await self._aread(lambda: next(tuples, None))) is not None:
            yield found

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """For each channel the writes on the way to a checkpoint, and the value they start from."""
        return self._read(delta_history(self._sql, self._reader, address(config), channels))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """See `get_delta_channel_history`."""
        at = address(config)
        return await self._aread(
            lambda: self._read(delta_history(self._sql, self._reader, at, channels))
        )

    # -- writing

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint; when this returns, a crash cannot lose it.

        Args:
            config: The address of its parent.
            checkpoint: The checkpoint. Lists and dicts in it cost only what is new in them.
            metadata: Stored with it, joined by the config's own.
            new_versions: The channels that changed since the parent.

        Returns:
            The address of the checkpoint.

        Raises:
            InvalidConfig: The config has no usable thread_id.
            Unstorable: A value cannot be serialised; the message names the path to it.
            ForbiddenType: A value could not be read back; its type is not on the allowlist.
            ConcurrentUpdate: With `on_conflict="error"`, another run moved the thread's head.
        """
        at, plan = self._put_plan(config, checkpoint, metadata, new_versions)
        self._write(plan, at.thread_id)
        return at.config(checkpoint["id"])

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `put`."""
        at, plan = self._put_plan(config, checkpoint, metadata, new_versions)
        await self._awrite(plan, at.thread_id, _items(checkpoint["channel_values"].values()))
        return at.config(checkpoint["id"])

    def _put_plan(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> tuple[Address, Callable[[Planner], PlannedPut]]:
        at = address(config)
        known: dict[str, Any] = dict(get_checkpoint_metadata(config, metadata))
        origin = origin_of(config, known, at.thread_id, at.checkpoint_ns)

        def plan(planner: Planner) -> PlannedPut:
            return planner.checkpoint(
                at,
                checkpoint,
                known,
                new_versions,
                origin,
                "error" if self.on_conflict == "error" else "fork",
            )

        return at, plan

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what a task wrote, next to the checkpoint it ran from.

        A task's writes are stored once: what is there already stays, but for errors, interrupts
        and the like, which are replaced.

        Raises:
            InvalidConfig: The config has no thread_id or no checkpoint_id.
            Unstorable: A value cannot be serialised.
            ForbiddenType: A value could not be read back.
        """
        at = _of_checkpoint(config)
        self._write(self._writes_plan(at, writes, task_id, task_path), at.thread_id)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """See `put_writes`."""
        at = _of_checkpoint(config)
        plan = self._writes_plan(at, writes, task_id, task_path)
        await self._awrite(plan, at.thread_id, _items(value for _, value in writes))

    def _writes_plan(
        self, at: Address, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> Callable[[Planner], PlannedWrites]:
        return lambda planner: planner.writes(
            at, writes, task_id, task_path, all(channel in WRITES_IDX_MAP for channel, _ in writes)
        )

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Whole numbers; for a thread that began under another saver, more of what it has."""
        if current is None:
            return 1
        if isinstance(current, str):
            return f"{int(current.split('.')[0]) + 1:032}.{random.random():016}"
        return current + 1

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> LogSaver:
        """The same checkpointer, which may also rebuild these types."""
        clone = super().with_allowlist(extra_allowlist)
        assert isinstance(clone, LogSaver)
        if clone is not self:
            clone._bind(self._seal)
        return clone

    # -- deleting and copying

    def _prune(self, thread_id: str, keep: Keep, *, history: bool) -> PruneReport:
        total = PruneReport()
        while True:
            flow = self._pruner.prune(thread_id, keep, history=history, limit=PRUNE_BATCH)
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
            flow = self._pruner.delete_thread(thread_id)
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
        self.database.write(self._pruner.copy_thread(source, target, checkpoint_id))

    async def acopy_thread(
        self, source_thread_id: str, target_thread_id: str, *, checkpoint_id: str | None = None
    ) -> None:
        """See `copy_thread`."""
        await asyncio.to_thread(
            self.copy_thread, source_thread_id, target_thread_id, checkpoint_id=checkpoint_id
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Prune threads.

        What was said stays readable through `history()`, and a checkpoint that a `DeltaChannel`
        of a kept one is rebuilt from stays too.

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
        if not self.database.write(self._writer.rewind(at)):
            raise UnknownCheckpoint(
                f"thread {thread_id!r} has no checkpoint {checkpoint_id!r} in namespace "
                f"{checkpoint_ns!r}; checkpoints() lists them"
            )

    async def arewind(self, thread_id: str, checkpoint_id: str, *, checkpoint_ns: str = "") -> None:
        """See `rewind`."""
        await asyncio.to_thread(self.rewind, thread_id, checkpoint_id, checkpoint_ns=checkpoint_ns)


def _items(values: Any) -> int:
    return sum(len(value) for value in values if isinstance(value, list | dict))


def _forgetting(memo: Memo, thread_id: str) -> Callable[[object], None]:
    return lambda _: memo.forget(thread_id)


def _of_checkpoint(config: RunnableConfig) -> Address:
    at = address(config)
    if at.checkpoint_id is None:
        raise InvalidConfig(
            f"writes for thread {at.thread_id!r} name no checkpoint_id; pass the config that "
            "put() returned"
        )
    return at


def _check_rule(rule: Retention) -> None:
    if rule.last is None and rule.days is None and not rule.turns:
        raise ConfigurationError("the retention rule is empty; give last=, days= or turns=True")
    for name, value in (("last", rule.last), ("days", rule.days)):
        if value is not None and value < 0:
            raise ConfigurationError(f"retention {name}={value!r}; expected zero or more")

"""The checkpointer: langgraph's `BaseCheckpointSaver` over perdure's log, in both colours.

Each method is written once. The blocking form runs its flow in the calling thread (reads) or hands
it to the writer and waits; the `a` form awaits the same work in another thread.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

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

from perdure.checkpointers.base import Address, OnConflict, address
from perdure.checkpointers.cipher import LangGraphCipher
from perdure.checkpointers.conflicts import contests, note_listed, note_read
from perdure.checkpointers.delta import delta_history
from perdure.checkpointers.listing import Listing
from perdure.checkpointers.plan import PlannedPut, PlannedWrites, Planner
from perdure.checkpointers.upkeep import Upkeep
from perdure.checkpointers.views import Views
from perdure.checkpointers.waiting import Queue
from perdure.errors import InvalidConfig
from perdure.storage.database import Database
from perdure.storage.encryption import Clear, Seal


class LogSaver(Views, Upkeep, BaseCheckpointSaver[Any]):
    """A checkpointer over an open database. Users open one with `SQLiteCheckpointer.open`.

    Args:
        database: The open database, which the saver closes.
        sql: The statements in its dialect, by name.
        serde: The serializer.
        seal: Encrypts rows.
        on_conflict: What happens when two runs meet on one thread; see `SQLiteCheckpointer`.
        wait_s: How long a run waits for another at most, with `on_conflict="wait"`.
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
        wait_s: float = 600.0,
        cache_bytes: int = 128 << 20,
    ) -> None:
        super().__init__(serde=serde)
        self.database = database
        self.on_conflict = on_conflict
        self._sql = sql
        self._cache_bytes = cache_bytes
        self._queue = Queue(wait_s) if on_conflict == "wait" else None
        self._share = [database]
        self._bind(seal or Clear())

    def close(self) -> None:
        """Close the database, once everything handed to it is written; runs that wait are told."""
        if self._queue is not None:
            self._queue.close()
        super().close()

    # -- reading

    def _noted(
        self, config: RunnableConfig, at: Address, found: CheckpointTuple | None
    ) -> CheckpointTuple | None:
        there = at._replace(checkpoint_id=found.checkpoint["id"] if found else None)
        note_read(config, there, as_head=at.checkpoint_id is None)
        return found

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint a config names, or the head of its thread and namespace.

        Raises:
            InvalidConfig: The config has no usable thread_id.
            CorruptRecord: A stored row is damaged or was tampered with.
            ForbiddenType: A stored value is of a type that is not on the allowlist.
        """
        at = address(config)
        if self._queue is not None:
            self._queue.wait(config, at)
        return self._noted(config, at, self._read(self._reader.get(at)))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `get_tuple`."""
        at = address(config)
        if self._queue is not None:
            await self._queue.await_(config, at)
        found = await self._aread(lambda: self._read(self._reader.get(at)))
        return self._noted(config, at, found)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, the last put first, each read as it is asked for.

        Of all threads they come thread by thread. No lock and no connection is held in between.

        Args:
            config: Whose; without a `checkpoint_ns`, of all namespaces; None: of all threads.
            filter: Metadata values to match, all of them. Indexed for text, numbers and booleans.
            before: Only those put before this checkpoint.
            limit: At most so many.
        """
        for found in self._listed(config, filter, before, limit):
            note_listed(config, found.config)
            yield found
        note_listed(config, None)

    def _listed(
        self,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Iterator[CheckpointTuple]:
        listing = Listing(self._sql, self._reader, self._read)
        for at in listing.addresses(config, filter, before, limit):
            found = self._read(self._reader.get(at))
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
        tuples = self._listed(config, filter, before, limit)
        while (found := await self._aread(lambda: next(tuples, None))) is not None:
            note_listed(config, found.config)
            yield found
        note_listed(config, None)

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
            new_versions: The channels that changed since the parent; the others are taken from
                there, so that what a node changed in place and did not return is not stored (as
                with langgraph's savers for memory and Postgres).

        Returns:
            The address of the checkpoint.

        Raises:
            InvalidConfig: The config has no usable thread_id.
            Unstorable: A value cannot be serialised; the message names the path to it.
            ForbiddenType: A value could not be read back; its type is not on the allowlist.
            ConcurrentUpdate: With `on_conflict="error"`, another run moved the thread's head.
        """
        at, plan = self._put_plan(config, checkpoint, metadata, new_versions)
        self._heard(at)
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
        self._heard(at)
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
        contested = contests(config, known, at)

        def plan(planner: Planner) -> PlannedPut:
            return planner.checkpoint(
                at,
                checkpoint,
                known,
                new_versions,
                contested,
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
        self._heard(at)
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
        self._heard(at)
        plan = self._writes_plan(at, writes, task_id, task_path)
        await self._awrite(plan, at.thread_id, _items(value for _, value in writes))

    def _heard(self, at: Address) -> None:
        if self._queue is not None:
            self._queue.heard(at.thread_id)

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
        """The same checkpointer, which may also rebuild these types; closing one closes both."""
        clone = super().with_allowlist(extra_allowlist)
        assert isinstance(clone, LogSaver)
        if clone is not self:
            clone._bind(Clear() if isinstance(self._seal, LangGraphCipher) else self._seal)
        return clone


def _items(values: Any) -> int:
    return sum(len(value) for value in values if isinstance(value, list | dict))


def _of_checkpoint(config: RunnableConfig) -> Address:
    at = address(config)
    if at.checkpoint_id is None:
        raise InvalidConfig(
            f"writes for thread {at.thread_id!r} name no checkpoint_id; pass the config that "
            "put() returned"
        )
    return at

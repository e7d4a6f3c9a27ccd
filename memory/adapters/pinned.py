"""A checkpointer as it was at one moment, so that an update rests on the state that was read.

`update_state` reads the head by itself. Between a reading and an update a run may have written; the
update would then rest on messages that nobody looked at. A graph compiled with this is given the
checkpoint that was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)


class Pinned(BaseCheckpointSaver[Any]):
    """A checkpointer whose head is the checkpoint that was read.

    Args:
        saver: The checkpointer; it is written to.
        config: The thread.
        head: What was read; None: there is no such thread.
    """

    def __init__(
        self,
        saver: BaseCheckpointSaver[Any],
        config: RunnableConfig,
        head: CheckpointTuple | None,
    ) -> None:
        super().__init__(serde=saver.serde)
        self._saver = saver
        self._config = config
        self._head = head

    @classmethod
    def read(cls, saver: BaseCheckpointSaver[Any], config: RunnableConfig) -> Self:
        """Read the head of a thread."""
        return cls(saver, config, saver.get_tuple(config))

    @classmethod
    async def aread(cls, saver: BaseCheckpointSaver[Any], config: RunnableConfig) -> Self:
        """See `read`."""
        return cls(saver, config, await saver.aget_tuple(config))

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """What was read."""
        return self._head

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """What was read."""
        return self._head

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint upon what was read."""
        return self._saver.put(config, self._whole(checkpoint), metadata, new_versions)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `put`."""
        return await self._saver.aput(config, self._whole(checkpoint), metadata, new_versions)

    def _whole(self, checkpoint: Checkpoint) -> Checkpoint:
        """With the channels of the thread's own graph, which one of messages alone knows not of."""
        former = self._head.checkpoint if self._head else None
        if former is None:
            return checkpoint
        versions = checkpoint["channel_versions"]
        kept = {
            channel: value
            for channel, value in former["channel_values"].items()
            if versions.get(channel) == former["channel_versions"].get(channel)
        }
        return {**checkpoint, "channel_values": {**kept, **checkpoint["channel_values"]}}

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what led to a checkpoint."""
        self._saver.put_writes(config, writes, task_id, task_path)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """See `put_writes`."""
        await self._saver.aput_writes(config, writes, task_id, task_path)

    def get_next_version(self, current: Any, channel: None) -> Any:
        """The checkpointer's own."""
        return self._saver.get_next_version(current, channel)

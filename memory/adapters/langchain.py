"""LangChain's chat message history over the threads of a checkpointer.

For `RunnableWithMessageHistory` and whatever else takes a `ChatMessageHistory`, as in the guide
https://python.langchain.com/v0.1/docs/use_cases/chatbots/memory_management/. Any chat graph
with the same checkpointer continues the thread, and vice versa.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any
from uuid import uuid4

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    empty_checkpoint,
)

from perdure.checkpointers.address import check_thread_id
from perdure.errors import AlreadyLocked
from perdure.memory.adapters.window import Change, checked_messages, presentable
from perdure.memory.options import instance


class ThreadMessageHistory(BaseChatMessageHistory):
    """The messages of one thread, in the channel `messages` of its root graph.

    With a checkpointer of perdure, writes take the lock of the thread, so simultaneous writes
    follow each other. With langgraph's own the last write wins. A run that has not taken the lock
    and overlaps a write becomes a branch.

    Args:
        checkpointer: Any langgraph checkpointer.
        thread_id: The thread, say the session id; None: a new one.
        keep_history: Whether `clear` leaves the messages in perdure's `history(thread_id)` and in
            the file. False: it deletes the thread.

    Raises:
        ConfigurationError: `checkpointer` is something else.
        InvalidConfig: `thread_id` is empty or of another type.
    """

    def __init__(
        self,
        checkpointer: BaseCheckpointSaver[Any],
        thread_id: Any = None,
        *,
        keep_history: bool = False,
    ) -> None:
        expected = "a langgraph checkpointer, say SQLiteCheckpointer.open('agent.db')"
        self.checkpointer = instance("checkpointer", checkpointer, BaseCheckpointSaver, expected)
        self.thread_id = check_thread_id(uuid4() if thread_id is None else thread_id)
        self.keep_history = keep_history
        self._config: RunnableConfig = {
            "configurable": {"thread_id": self.thread_id, "checkpoint_ns": ""}
        }

    @property
    def messages(self) -> list[BaseMessage]:
        """The messages, oldest first, without those that providers refuse.

        These are blank messages and tool calls or results alone. Assigning replaces the messages;
        perdure's history keeps those before.
        """
        return presentable(self._found(self.checkpointer.get_tuple(self._config)))

    @messages.setter
    def messages(self, messages: list[BaseMessage]) -> None:
        self.change(lambda _: messages)

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end, in one write; a second message of one id gets a new id."""
        new = checked_messages(messages)
        self.change(lambda found: [*found, *new])

    def change(self, change: Change) -> None:
        """Replace the messages by what a function makes of them, in one step.

        Raises:
            InvalidMessages: It returned something else; nothing was written.
        """
        with self._locked():
            head = self.checkpointer.get_tuple(self._config)
            found = self._found(head)
            now = _with_ids(checked_messages(change(list(found))))
            if now == found:
                return
            before = head.checkpoint if head else empty_checkpoint()
            versions = before["channel_versions"]
            newest = max(versions.values(), default=None)
            version = self.checkpointer.get_next_version(newest, None)
            fresh = empty_checkpoint()
            after: Checkpoint = {
                **before,  # its other channels, too, and which nodes are next
                "id": fresh["id"],
                "ts": fresh["ts"],
                "channel_values": {**before["channel_values"], "messages": now},
                "channel_versions": {**versions, "messages": version},
                "updated_channels": None,  # or langgraph looks for the next nodes among these alone
            }
            step = head.metadata.get("step", -1) + 1 if head else 0
            metadata: CheckpointMetadata = {"source": "update", "step": step, "parents": {}}
            config = head.config if head else self._config
            self.checkpointer.put(config, after, metadata, {"messages": version})

    def _found(self, head: CheckpointTuple | None) -> list[BaseMessage]:
        """The messages of a checkpoint."""
        found = head.checkpoint["channel_values"].get("messages") if head else None
        return checked_messages(found or [], f"channel 'messages' of thread {self.thread_id!r}")

    def clear(self) -> None:
        """Delete the thread, out of history and file; with `keep_history`, empty its state."""
        if self.keep_history:
            self.change(lambda _: [])
            return
        with self._locked():
            erase = getattr(self.checkpointer, "erase", self.checkpointer.delete_thread)
            erase(self.thread_id)

    def _locked(self) -> ExitStack:
        """The lock of the thread, taken; langgraph's checkpointers have none."""
        held = ExitStack()
        lock = getattr(self.checkpointer, "lock", None)  # theirs, if any, is a lock itself
        if callable(lock):
            with suppress(AlreadyLocked):  # by this run, which may write
                held.enter_context(lock(self.thread_id))
        return held


def _with_ids(messages: list[BaseMessage]) -> list[BaseMessage]:
    """The messages, each with an id of its own; the caller's messages are not changed."""
    found: dict[str | None, BaseMessage] = {}
    for message in messages:
        if not message.id or message.id in found:
            message = message.model_copy(update={"id": str(uuid4())})
        found[message.id] = message
    return list(found.values())

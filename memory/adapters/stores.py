"""Where chat memories keep their messages: LangChain4j's `ChatMemoryStore`, and two of them.

The contract is that of https://docs.langchain4j.dev/tutorials/chat-memory (persistence).
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.memory.adapters.thread import Change, ThreadMessages, checked_new


@runtime_checkable
class ChatMemoryStore(Protocol):
    """Where the messages of memories are kept.

    One that also has `change_messages(memory_id, change)`, which writes what `change` makes of the
    messages in one piece with reading them, loses nothing when two add at once.
    """

    def get_messages(self, memory_id: Any) -> Sequence[BaseMessage]:
        """All messages of a memory, oldest first."""

    def update_messages(self, memory_id: Any, messages: Sequence[BaseMessage]) -> None:
        """Put messages in the place of all; called for each message that is added."""

    def delete_messages(self, memory_id: Any) -> None:
        """Delete all messages of a memory."""


class InMemoryChatMemoryStore:
    """Messages in a dict, gone with the process."""

    def __init__(self) -> None:
        self._messages: dict[Any, list[BaseMessage]] = {}
        self._lock = Lock()

    def get_messages(self, memory_id: Any) -> list[BaseMessage]:
        """All messages of a memory, oldest first."""
        return list(self._messages.get(memory_id, ()))

    def update_messages(self, memory_id: Any, messages: Sequence[BaseMessage]) -> None:
        """Put messages in the place of all."""
        self._messages[memory_id] = checked_new(messages)

    def delete_messages(self, memory_id: Any) -> None:
        """Delete all messages of a memory."""
        self._messages.pop(memory_id, None)

    def change_messages(self, memory_id: Any, change: Change) -> list[BaseMessage]:
        """Write what a function makes of the messages; see `ThreadMessages.change`."""
        with self._lock:
            self.update_messages(memory_id, change(self.get_messages(memory_id)))
            return self.get_messages(memory_id)

    def ids(self) -> list[Any]:
        """The memories that there are, oldest first."""
        return list(self._messages)


class CheckpointerChatMemoryStore:
    """Messages in the threads of a checkpointer; a memory's id is its thread_id.

    Args:
        checkpointer: Any langgraph checkpointer; with perdure's, nothing is lost when two processes
            write at once, and `history(thread_id)` keeps what was evicted.
        keep_history: Whether it keeps what was deleted, too. False: deleting deletes the thread.
    """

    def __init__(
        self, checkpointer: BaseCheckpointSaver[Any], *, keep_history: bool = True
    ) -> None:
        self.checkpointer = checkpointer
        self.keep_history = keep_history

    def thread(self, memory_id: Any) -> ThreadMessages:
        """The thread of a memory.

        Raises:
            InvalidConfig: The id is empty, or neither text nor a number nor a UUID.
        """
        return ThreadMessages(self.checkpointer, memory_id)

    def get_messages(self, memory_id: Any) -> list[BaseMessage]:
        """All messages of a memory, oldest first."""
        return self.thread(memory_id).read()

    def update_messages(self, memory_id: Any, messages: Sequence[BaseMessage]) -> None:
        """Put messages in the place of all."""
        self.thread(memory_id).replace(messages)

    def delete_messages(self, memory_id: Any) -> None:
        """Delete all messages of a memory; see `keep_history`."""
        thread = self.thread(memory_id)
        if self.keep_history:
            thread.clear()
        else:
            self.checkpointer.delete_thread(thread.thread_id)

    def change_messages(self, memory_id: Any, change: Change) -> list[BaseMessage]:
        """Write what a function makes of the messages; see `ThreadMessages.change`."""
        return self.thread(memory_id).change(change)

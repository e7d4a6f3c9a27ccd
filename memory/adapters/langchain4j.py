"""Chat memory as LangChain4j has it: a window of messages or tokens over a store.

Behaviour and names follow https://docs.langchain4j.dev/tutorials/chat-memory. What differs: over a
checkpointer, what is evicted stays in perdure's `history()`; and where LangChain4j would evict what
was just said (a system message that fills the budget, a window shorter than an exchange),
`BudgetExceeded` is raised and nothing is written.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.errors import ConfigurationError
from perdure.memory.adapters.evicting import admit, evict, without_orphans
from perdure.memory.adapters.thread import Change, ThreadMessages, checked_new
from perdure.memory.counting import Countable
from perdure.memory.counting import token_counter as counter_of


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


class WindowChatMemory(ABC):
    """What both windows have in common.

    Args:
        id: Which memory of the store; its type is the store's affair.
        store: Where it is kept; None: in memory.
        always_keep_system_message_first: Whether a new system message is put first, not last.
    """

    def __init__(
        self,
        id: Any = "default",
        store: ChatMemoryStore | None = None,
        always_keep_system_message_first: bool = False,
    ) -> None:
        if store is not None and not isinstance(store, ChatMemoryStore):
            raise ConfigurationError(
                f"store is {store!r:.80}; expected an object with get_messages, update_messages "
                "and delete_messages: for a checkpointer, CheckpointerChatMemoryStore(checkpointer)"
            )
        self.id = id
        self.store: ChatMemoryStore = store or InMemoryChatMemoryStore()
        self.always_keep_system_message_first = always_keep_system_message_first

    @abstractmethod
    def fitted(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """What of messages fits into the window."""

    def add(self, message: BaseMessage) -> None:
        """Add a message at the end and evict what no longer fits, from the store as well.

        An equal system message is ignored, a different one takes the place of the former.

        Raises:
            BudgetExceeded: The message cannot be shown within the window; nothing was written.
            InvalidMessages: It is no message.
        """
        checked_new([message])
        first = self.always_keep_system_message_first

        def change(found: list[BaseMessage]) -> list[BaseMessage]:
            now = admit(found, message, first=first)
            return found if now is None else self.fitted(now)

        atomic = getattr(self.store, "change_messages", None)
        if atomic is not None:
            atomic(self.id, change)
            return
        found = list(self.store.get_messages(self.id))
        now = change(found)
        if now is not found:
            self.store.update_messages(self.id, now)

    def messages(self) -> list[BaseMessage]:
        """What the model is to be shown: what fits, without tool calls or results that are alone.

        Raises:
            BudgetExceeded: The store, written to by others or with a longer window, ends with what
                cannot be shown within this one.
        """
        return without_orphans(self.fitted(checked_new(self.store.get_messages(self.id))))

    def clear(self) -> None:
        """Delete all messages from the store."""
        self.store.delete_messages(self.id)

    async def aadd(self, message: BaseMessage) -> None:
        """See `add`; the store is called in another thread."""
        await asyncio.to_thread(self.add, message)

    async def amessages(self) -> list[BaseMessage]:
        """See `messages`."""
        return await asyncio.to_thread(self.messages)

    async def aclear(self) -> None:
        """See `clear`."""
        await asyncio.to_thread(self.clear)


class MessageWindowChatMemory(WindowChatMemory):
    """A window of the newest messages.

    Args:
        max_messages: At most so many, the system message included.
        id: Which memory of the store.
        store: Where it is kept; None: in memory.
        always_keep_system_message_first: Whether a new system message is put first, not last.

    Raises:
        ConfigurationError: `max_messages` is not positive, or `store` is none.
    """

    def __init__(
        self,
        max_messages: int,
        id: Any = "default",
        store: ChatMemoryStore | None = None,
        always_keep_system_message_first: bool = False,
    ) -> None:
        super().__init__(id, store, always_keep_system_message_first)
        self.max_messages = positive("max_messages", max_messages)

    def fitted(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """See `WindowChatMemory`."""
        return evict(messages, self.max_messages, lambda _: 1, "messages")


class TokenWindowChatMemory(WindowChatMemory):
    """A window of the newest tokens; a message is shown whole or not at all.

    Args:
        max_tokens: At most so many, the system message included.
        token_counter: What counts them: a model, its name, a function from a list of messages to a
            number, a `TokenCounter`; None: an estimate. See `perdure.memory.counting`.
        id: Which memory of the store.
        store: Where it is kept; None: in memory.
        always_keep_system_message_first: Whether a new system message is put first, not last.

    Raises:
        ConfigurationError: `max_tokens` is not positive, or another argument is none.
        UnknownModel: No encoding is known for a model of that name.
    """

    def __init__(
        self,
        max_tokens: int,
        token_counter: Countable | None,
        id: Any = "default",
        store: ChatMemoryStore | None = None,
        always_keep_system_message_first: bool = False,
    ) -> None:
        super().__init__(id, store, always_keep_system_message_first)
        self.max_tokens = positive("max_tokens", max_tokens)
        self.token_counter = counter_of(token_counter)

    def fitted(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """See `WindowChatMemory`."""
        counter = self.token_counter.fitted(messages)
        return evict(messages, self.max_tokens, counter.message, "tokens", counter.request)


def positive(name: str, value: Any) -> int:
    """A whole number of at least 1.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}; expected a whole number of at least 1")
    return value

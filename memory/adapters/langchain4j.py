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
from typing import Any

from langchain_core.messages import BaseMessage

from perdure.errors import ConfigurationError
from perdure.memory.adapters.evicting import admit, evict, showable
from perdure.memory.adapters.stores import ChatMemoryStore, InMemoryChatMemoryStore
from perdure.memory.adapters.thread import checked_new
from perdure.memory.options import whole
from perdure.memory.tokens import Countable
from perdure.memory.tokens import token_counter as counter_of
from perdure.memory.window import one


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
        """What the model is to be shown: what fits, without what no provider takes.

        Left out are tool calls or results that are alone, and messages that say nothing.

        Raises:
            BudgetExceeded: The store, written to by others or with a longer window, ends with what
                cannot be shown within this one.
        """
        return showable(self.fitted(checked_new(self.store.get_messages(self.id))))

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
        self.max_messages = whole("max_messages", max_messages, 1)

    def fitted(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """See `WindowChatMemory`."""
        return evict(messages, self.max_messages, one, "messages")


class TokenWindowChatMemory(WindowChatMemory):
    """A window of the newest tokens; a message is shown whole or not at all.

    Args:
        max_tokens: At most so many, the system message included.
        token_counter: What counts them: a model, its name, a function from a list of messages to a
            number, a `TokenCounter`; None: an estimate. See `perdure.memory.tokens`.
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
        self.max_tokens = whole("max_tokens", max_tokens, 1)
        self.token_counter = counter_of(token_counter)

    def fitted(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """See `WindowChatMemory`."""
        counter = self.token_counter.fitted(messages)
        return evict(messages, self.max_tokens, counter.message, "tokens", counter.request)

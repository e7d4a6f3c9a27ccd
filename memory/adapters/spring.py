"""Chat memory in Spring AI's shape: `add`, `get`, `clear` by conversation, over a repository.

Names follow Spring AI's reference, "Chat Memory"
(https://docs.spring.io/spring-ai/reference/api/chat-memory.html). The advisors are in
`perdure.memory.adapters.advisors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.errors import ConfigurationError
from perdure.memory.adapters.evicting import admit, evict, showable
from perdure.memory.adapters.stores import CheckpointerChatMemoryStore, InMemoryChatMemoryStore
from perdure.memory.adapters.thread import Change, checked_new
from perdure.memory.options import whole
from perdure.memory.window import one

_PAGE: Final = 200


class ChatMemory(Protocol):
    """A memory of many conversations; what the advisors take."""

    def add(self, conversation_id: str, messages: BaseMessage | Sequence[BaseMessage]) -> None:
        """Add a message, or messages, at the end of a conversation."""

    def get(self, conversation_id: str, last_n: int | None = None) -> list[BaseMessage]:
        """The newest messages of a conversation, oldest first."""

    def clear(self, conversation_id: str) -> None:
        """Forget a conversation."""


@runtime_checkable
class ChatMemoryRepository(Protocol):
    """Where conversations are kept.

    One that also has `change_messages(conversation_id, change)`, which writes what `change` makes
    of the messages in one piece with reading them, is rid of what the memory evicts, and loses
    nothing when two add at once; another keeps everything, and the window is a matter of reading.
    """

    def save(self, conversation_id: str, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end of a conversation."""

    def load(self, conversation_id: str, last_n: int | None = None) -> Sequence[BaseMessage]:
        """The newest so many messages of a conversation, or all, oldest first."""

    def delete(self, conversation_id: str) -> None:
        """Delete a conversation."""


class InMemoryChatMemoryRepository:
    """Conversations in a dict, gone with the process.

    It is a `ChatMemory` itself, as in the first example of Spring AI's page: one without a window.
    """

    def __init__(self) -> None:
        self._store = InMemoryChatMemoryStore()

    def add(self, conversation_id: str, messages: BaseMessage | Sequence[BaseMessage]) -> None:
        """Add a message, or messages, at the end of a conversation, in one write.

        Raises:
            InvalidMessages: They are not messages.
        """
        new = _listed(messages)
        self.change_messages(conversation_id, lambda found: _admitted(found, new))

    def get(self, conversation_id: str, last_n: int | None = None) -> list[BaseMessage]:
        """The newest so many messages of a conversation, or all; see `MessageChatMemory.get`."""
        return _shown(self.load(conversation_id), last_n)

    def clear(self, conversation_id: str) -> None:
        """Forget a conversation."""
        self.delete(conversation_id)

    def save(self, conversation_id: str, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end of a conversation."""
        new = checked_new(messages)
        self.change_messages(conversation_id, lambda found: [*found, *new])

    def load(self, conversation_id: str, last_n: int | None = None) -> list[BaseMessage]:
        """The newest so many messages of a conversation, or all, oldest first."""
        return _newest(self._store.get_messages(conversation_id), last_n)

    def delete(self, conversation_id: str) -> None:
        """Delete a conversation."""
        self._store.delete_messages(conversation_id)

    def change_messages(self, conversation_id: str, change: Change) -> list[BaseMessage]:
        """Write what a function makes of the messages; see `ThreadMessages.change`."""
        return self._store.change_messages(conversation_id, change)

    def conversation_ids(self) -> list[str]:
        """The conversations that there are, oldest first."""
        return self._store.ids()


class CheckpointerChatMemoryRepository:
    """Conversations in the threads of a checkpointer; a conversation's id is its thread_id.

    So a chat graph with the same checkpointer goes on with a conversation, and the other way round.

    Args:
        checkpointer: Any langgraph checkpointer; perdure's is what `JdbcChatMemoryRepository` is to
            Spring, without a server.
        keep_history: Whether its `history(thread_id)` keeps what was deleted. False: deleting
            deletes the thread.
    """

    def __init__(
        self, checkpointer: BaseCheckpointSaver[Any], *, keep_history: bool = True
    ) -> None:
        self.checkpointer = checkpointer
        self._store = CheckpointerChatMemoryStore(checkpointer, keep_history=keep_history)

    def save(self, conversation_id: str, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end of a conversation."""
        self._store.thread(conversation_id).append(messages)

    def load(self, conversation_id: str, last_n: int | None = None) -> list[BaseMessage]:
        """The newest so many messages of a conversation, or all, oldest first."""
        return _newest(self._store.get_messages(conversation_id), last_n)

    def delete(self, conversation_id: str) -> None:
        """Delete a conversation; see `keep_history`."""
        self._store.delete_messages(conversation_id)

    def change_messages(self, conversation_id: str, change: Change) -> list[BaseMessage]:
        """Write what a function makes of the messages; see `ThreadMessages.change`."""
        return self._store.change_messages(conversation_id, change)

    def conversation_ids(self) -> list[str]:
        """The threads of the checkpointer, the latest activity first; cleared ones too.

        Of langgraph's own checkpointers all checkpoints are read for that.
        """
        return list(dict.fromkeys(_thread_ids(self.checkpointer)))


class MessageChatMemory:
    """A window of the newest messages of each conversation.

    The window's rules are those of LangChain4j's: a call goes with its results, one system message
    is kept, say a summary, and a different one takes its place.

    Args:
        repository: Where conversations are kept; None: in memory.
        max_size: At most so many messages, the system message included.

    Raises:
        ConfigurationError: `max_size` is not positive, or `repository` is none.
    """

    def __init__(self, repository: ChatMemoryRepository | None = None, max_size: int = 20) -> None:
        if repository is not None and not isinstance(repository, ChatMemoryRepository):
            raise ConfigurationError(
                f"repository is {repository!r:.80}; expected an object with save, load and delete: "
                "for a checkpointer, CheckpointerChatMemoryRepository(checkpointer)"
            )
        self.repository: ChatMemoryRepository = repository or InMemoryChatMemoryRepository()
        self.max_size = whole("max_size", max_size, 1)

    def add(self, conversation_id: str, messages: BaseMessage | Sequence[BaseMessage]) -> None:
        """Add a message, or messages, at the end of a conversation, in one write.

        Raises:
            BudgetExceeded: What was said last cannot be shown within the window; nothing was
                written.
            InvalidMessages: They are not messages.
        """
        new = _listed(messages)

        def change(found: list[BaseMessage]) -> list[BaseMessage]:
            now = _admitted(found, new)
            return found if now is found else _window(now, self.max_size)

        atomic = getattr(self.repository, "change_messages", None)
        if atomic is not None:
            atomic(conversation_id, change)
        else:
            change(list(self.repository.load(conversation_id, None)))
            self.repository.save(conversation_id, new)

    def get(self, conversation_id: str, last_n: int | None = None) -> list[BaseMessage]:
        """The newest messages of a conversation, oldest first, as the model may be shown them.

        Args:
            conversation_id: The conversation.
            last_n: At most so many, the system message included; None: the window.

        Raises:
            BudgetExceeded: So few cannot be shown: what was said last needs its call beside it, or
                the system message.
            ConfigurationError: `last_n` is not positive.
        """
        size = self.max_size if last_n is None else min(whole("last_n", last_n, 1), self.max_size)
        return _shown(self.repository.load(conversation_id, None), size)

    def clear(self, conversation_id: str) -> None:
        """Forget a conversation."""
        self.repository.delete(conversation_id)

    async def aadd(
        self, conversation_id: str, messages: BaseMessage | Sequence[BaseMessage]
    ) -> None:
        """See `add`; the repository is called in another thread."""
        await asyncio.to_thread(self.add, conversation_id, messages)

    async def aget(self, conversation_id: str, last_n: int | None = None) -> list[BaseMessage]:
        """See `get`."""
        return await asyncio.to_thread(self.get, conversation_id, last_n)

    async def aclear(self, conversation_id: str) -> None:
        """See `clear`."""
        await asyncio.to_thread(self.clear, conversation_id)


def _listed(messages: BaseMessage | Sequence[BaseMessage]) -> list[BaseMessage]:
    return checked_new([messages] if isinstance(messages, BaseMessage) else messages)


def _admitted(found: list[BaseMessage], new: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Messages with those that are new; the very same list if these change nothing."""
    for message in new:
        found = admit(found, message) or found
    return found


def _window(messages: Sequence[BaseMessage], size: int) -> list[BaseMessage]:
    return evict(messages, size, one, "messages")


def _shown(kept: Sequence[BaseMessage], size: int | None) -> list[BaseMessage]:
    """The newest so many of what a repository has kept, former system messages among it."""
    found = _admitted([], checked_new(kept))
    return showable(found if size is None else _window(found, whole("last_n", size, 1)))


def _newest(messages: list[BaseMessage], last_n: int | None) -> list[BaseMessage]:
    return messages if last_n is None else messages[-whole("last_n", last_n, 1) :]


def _thread_ids(checkpointer: BaseCheckpointSaver[Any]) -> Iterator[str]:
    threads = getattr(checkpointer, "threads", None)
    if threads is None:
        for found in checkpointer.list(None):
            yield found.config["configurable"]["thread_id"]
        return
    page = threads(limit=_PAGE)
    while page:
        yield from (thread.thread_id for thread in page)
        page = threads(limit=_PAGE, after=page[-1].thread_id)

"""LangChain4j's chat memory (https://docs.langchain4j.dev/tutorials/chat-memory).

Over a checkpointer, evicted messages stay in perdure's `history()` until the memory is cleared.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.checkpointers.address import check_thread_id
from perdure.memory.adapters.langchain import (
    Change,
    ThreadMessageHistory,
    checked_messages,
    presentable,
)
from perdure.memory.conversation import Messages, says_something
from perdure.memory.options import instance, whole
from perdure.memory.tokens import Countable, count_tokens, token_counter

_LOG: Final = logging.getLogger(__name__)


@runtime_checkable
class ChatMemoryStore(Protocol):
    """Where memories keep their messages, oldest first.

    A store may also have `change_messages(memory_id, change)`, which replaces the messages by
    `change(messages)` in one step, so that nothing is lost when two processes add at once.
    """

    def get_messages(self, memory_id: Any) -> Sequence[BaseMessage]:
        """All messages of a memory."""

    def update_messages(self, memory_id: Any, messages: Sequence[BaseMessage]) -> None:
        """Replace all messages of a memory; called for each message that is added."""

    def delete_messages(self, memory_id: Any) -> None:
        """Delete all messages of a memory; called when it is cleared."""


class InMemoryChatMemoryStore:
    """Messages in a dict; they end with the process."""

    def __init__(self) -> None:
        self._messages: dict[Any, list[BaseMessage]] = {}
        self._lock = Lock()

    def get_messages(self, memory_id: Any) -> list[BaseMessage]:
        """All messages of a memory, oldest first."""
        return list(self._messages.get(memory_id, ()))

    def update_messages(self, memory_id: Any, messages: Sequence[BaseMessage]) -> None:
        """Replace all messages of a memory."""
        self._messages[memory_id] = checked_messages(messages)

    def delete_messages(self, memory_id: Any) -> None:
        """Delete all messages of a memory."""
        self._messages.pop(memory_id, None)

    def change_messages(self, memory_id: Any, change: Change) -> None:
        """Replace the messages by what `change` returns, in one step."""
        with self._lock:
            self.update_messages(memory_id, change(self.get_messages(memory_id)))


class CheckpointerChatMemoryStore:
    """Messages in the threads of a checkpointer; the id of a memory is the thread_id.

    With `keep_history` deleted messages stay in perdure's `history(thread_id)` and in the file.
    """

    def __init__(self, checkpointer: BaseCheckpointSaver[Any], *, keep_history: bool = False):
        self.checkpointer = checkpointer
        self.keep_history = keep_history

    def get_messages(self, memory_id: Any) -> list[BaseMessage]:
        """All messages of a memory, oldest first."""
        return self._thread(memory_id).messages

    def update_messages(self, memory_id: Any, messages: Sequence[BaseMessage]) -> None:
        """Replace all messages of a memory."""
        self.change_messages(memory_id, lambda _: messages)

    def delete_messages(self, memory_id: Any) -> None:
        """Delete all messages of a memory; see `keep_history`."""
        self._thread(memory_id).clear()

    def change_messages(self, memory_id: Any, change: Change) -> None:
        """Replace the messages by what `change` returns, in one step."""
        self._thread(memory_id).change(change)

    def _thread(self, memory_id: Any) -> ThreadMessageHistory:
        thread_id = check_thread_id(memory_id)  # None would be a new thread
        return ThreadMessageHistory(self.checkpointer, thread_id, keep_history=self.keep_history)


@dataclass(kw_only=True, eq=False)
class WindowChatMemory(ABC):
    """The base of both windows; `id` says which memory of the store it is.

    A new system message goes to the end, or with `always_keep_system_message_first` to the front.
    """

    id: Any = "default"
    store: ChatMemoryStore = field(default_factory=InMemoryChatMemoryStore)
    always_keep_system_message_first: bool = False

    def __post_init__(self) -> None:
        expected = "a ChatMemoryStore; for a checkpointer, CheckpointerChatMemoryStore(it)"
        instance("store", self.store, ChatMemoryStore, expected)

    @abstractmethod
    def fits(self, messages: list[BaseMessage]) -> bool:
        """Whether messages fit into the window."""

    def add(self, messages: BaseMessage | Sequence[BaseMessage]) -> None:
        """Add a message, or several, at the end; evict what no longer fits, from the store too."""
        new = checked_messages([messages] if isinstance(messages, BaseMessage) else messages)

        def change(found: list[BaseMessage]) -> list[BaseMessage]:
            return windowed(found, new, self.fits, self.always_keep_system_message_first)

        atomic = getattr(self.store, "change_messages", None)
        if atomic is not None:
            atomic(self.id, change)
            return
        found = list(self.store.get_messages(self.id))
        if (now := change(found)) != found:
            self.store.update_messages(self.id, now)

    def messages(self) -> list[BaseMessage]:
        """The messages to show to the model: those of the window that providers take."""
        found = checked_messages(self.store.get_messages(self.id))
        return presentable(windowed(found, (), self.fits))

    def clear(self) -> None:
        """Delete all messages from the store."""
        self.store.delete_messages(self.id)


@dataclass(eq=False)
class MessageWindowChatMemory(WindowChatMemory):
    """A window of the newest `max_messages` messages, the system message included."""

    max_messages: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("max_messages", self.max_messages, 1)

    def fits(self, messages: list[BaseMessage]) -> bool:
        """See `WindowChatMemory`."""
        return len(messages) <= self.max_messages


@dataclass(eq=False)
class TokenWindowChatMemory(WindowChatMemory):
    """A window of the newest `max_tokens` tokens, the system message included.

    A message that does not fit is evicted completely. `token_counter` is as of `trim`.
    """

    max_tokens: int
    token_counter: Countable

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("max_tokens", self.max_tokens, 1)
        self.token_counter = token_counter(self.token_counter)

    def fits(self, messages: list[BaseMessage]) -> bool:
        """See `WindowChatMemory`."""
        return count_tokens(messages, self.token_counter) <= self.max_tokens


def windowed(
    messages: Messages,
    new: Messages,
    fits: Callable[[list[BaseMessage]], bool],
    first: bool = False,
) -> list[BaseMessage]:
    """The messages with new ones at the end, as far as they fit.

    A new system message replaces the one before, at the end or, with `first`, at the front; an
    equal or a blank one is ignored. It is never evicted; else the oldest message goes first, a tool
    call with its results. A message that alone does not fit is evicted with all before it.
    """
    found = list(messages)
    for message in new:
        if isinstance(message, SystemMessage):
            held = [other.content for other in found if isinstance(other, SystemMessage)]
            if not says_something(message) or message.content in held:
                continue
            found = [other for other in found if not isinstance(other, SystemMessage)]
        found.insert(0 if first and isinstance(message, SystemMessage) else len(found), message)

    def after(cut: int) -> list[BaseMessage]:
        return [*(m for m in found[:cut] if isinstance(m, SystemMessage)), *found[cut:]]

    # no cut between a call and its results
    inner = (i for i, m in enumerate(found) if i and not isinstance(m, ToolMessage))
    cuts = [0, *inner, len(found)]
    cut = cuts[bisect_left(cuts[:-1], True, key=lambda at: fits(after(at)))]
    if found and cut == len(found) and not isinstance(found[-1], SystemMessage):
        _LOG.warning("the newest message does not fit into the window of a chat memory: evicted")
    return after(cut)

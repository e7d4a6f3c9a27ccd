"""`ThreadMessageHistory`: a thread as a langchain `BaseChatMessageHistory`.

So `RunnableWithMessageHistory`, and what else is written for a `ChatMessageHistory`, runs over a
checkpointer. Source: LangChain's guide "Memory management" for chatbots
(https://python.langchain.com/v0.1/docs/use_cases/chatbots/memory_management/).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.memory.adapters.evicting import showable
from perdure.memory.adapters.thread import ThreadMessages


class ThreadMessageHistory(BaseChatMessageHistory):
    """The messages of a thread; what is cleared stays in perdure's `history(thread_id)`.

    Args:
        checkpointer: Any langgraph checkpointer.
        thread_id: The thread, say the session id; None: a new one.

    Raises:
        ConfigurationError: `checkpointer` is something else.
        InvalidConfig: `thread_id` is empty or no text.
    """

    def __init__(
        self, checkpointer: BaseCheckpointSaver[Any], thread_id: str | None = None
    ) -> None:
        super().__init__()
        chosen = str(uuid4()) if thread_id is None else thread_id
        self.thread = ThreadMessages(checkpointer, chosen)

    @property
    def thread_id(self) -> str:
        """The thread."""
        return self.thread.thread_id

    @property
    def messages(self) -> list[BaseMessage]:
        """The messages in the order in which they were added, without what no provider takes.

        Left out are calls and results that are alone, and messages that say nothing. A system
        message stands where it was added, as with langchain's own histories. Where a prompt has one
        too, a node between prompt and model, `lambda asked: window(asked.to_messages())` with
        `window = trim(max_tokens=4_000)`, shows the model one, first: the newer.
        """
        return showable(self.thread.read())

    @messages.setter
    def messages(self, messages: list[BaseMessage]) -> None:
        self.thread.replace(messages)

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end, in one write."""
        self.thread.append(messages)

    def clear(self) -> None:
        """Take all messages out of the thread's state."""
        self.thread.clear()

    async def aget_messages(self) -> list[BaseMessage]:
        """See `messages`."""
        return showable(await self.thread.aread())

    async def aadd_messages(self, messages: Sequence[BaseMessage]) -> None:
        """See `add_messages`."""
        await self.thread.aappend(messages)

    async def aclear(self) -> None:
        """See `clear`."""
        await self.thread.aclear()

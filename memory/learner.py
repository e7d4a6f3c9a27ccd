"""Nodes that learn from a conversation: they change nothing in the state."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig

from perdure.memory.conversation import Messages
from perdure.memory.effects import Effects, arun, run
from perdure.memory.nodes import channel, checked, is_messages


class Learner(Runnable[Any, Any]):
    """A node that learns, like `update_instructions(…)` and `update_profile(…)`.

    Its doors are those of every node of short-term memory: from a state it learns and returns an
    empty update, messages it passes on as they are.

    Args:
        messages_key: The channel of the messages.
    """

    def __init__(self, messages_key: str) -> None:
        self.messages_key = messages_key

    @abstractmethod
    def learning(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> Effects[object]:
        """Learn from messages.

        Args:
            messages: They.
            state: That they are in; None: they came alone.
            config: Of the run.
        """

    def __call__(self, said: Any, config: RunnableConfig | None = None) -> list[BaseMessage]:
        """The messages as they are, once they are learned from.

        Args:
            said: The state, as a node is given it, or a list of messages.
            config: Of the run; within a graph it is known without.

        Raises:
            InvalidMessages: They are no messages.
            PerdureError: What learning raises.
        """
        messages, state = self._in(said)
        run(self.learning(messages, state, config))
        return list(messages)

    async def acall(self, said: Any, config: RunnableConfig | None = None) -> list[BaseMessage]:
        """See `__call__`."""
        messages, state = self._in(said)
        await arun(self.learning(messages, state, config))
        return list(messages)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """The update for a state, which changes nothing in it; or for messages, the messages."""
        messages = self(input, config)
        return messages if is_messages(input) else {}

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """See `invoke`."""
        messages = await self.acall(input, config)
        return messages if is_messages(input) else {}

    def _in(self, said: Any) -> tuple[Messages, Any]:
        """Messages, and the state that they are in."""
        if is_messages(said):
            return checked(said, "the messages"), None
        found = channel(said, self.messages_key)
        return checked(found, f"the channel {self.messages_key!r}"), said

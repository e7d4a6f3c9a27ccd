"""Nodes that learn from a conversation: they change nothing in the state."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig

from perdure.memory.conversation import Messages
from perdure.memory.effects import Effects, awaiting, blocking
from perdure.memory.nodes import channel, checked, is_messages
from perdure.memory.options import text


class Learner(Runnable[Any, Any]):
    """A node that learns, like `update_instructions(…)` and `update_profile(…)`.

    It is called like every node of short-term memory: of a state it returns an empty update, of
    messages the messages as they are.

    Args:
        messages_key: The channel of the messages.
    """

    def __init__(self, messages_key: str) -> None:
        self.messages_key = text("messages_key", messages_key, "a channel's name")

    @abstractmethod
    def learning(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> Effects[object]:
        """Learn from messages.

        Args:
            messages: The conversation.
            state: The state that has the messages; None: they came alone.
            config: Of the run.
        """

    def _call(self, given: Any, config: RunnableConfig | None = None) -> Effects[list[BaseMessage]]:
        """The messages as they are, after learning from them.

        Args:
            given: The state, as a node is given it, or a list of messages.
            config: Of the run; within a graph it is known without.

        Raises:
            InvalidMessages: They are no messages.
            PerdureError: What learning raises.
        """
        if is_messages(given):
            messages, state = checked(given, "the messages"), None
        else:
            found = channel(given, self.messages_key)
            messages, state = checked(found, f"the channel {self.messages_key!r}"), given
        yield from self.learning(messages, state, config)
        return list(messages)

    def _invoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Effects[Any]:
        """The update for a state, which changes nothing in it; or for messages, the messages."""
        messages = yield from self._call(input, config)
        return messages if is_messages(input) else {}

    __call__ = blocking(_call)
    acall = awaiting(_call)
    invoke = blocking(_invoke)
    ainvoke = awaiting(_invoke)

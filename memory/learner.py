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

    Of a state it returns an empty update, of messages the messages as they are.
    """

    def __init__(self, messages_key: str) -> None:
        self.messages_key = text("messages_key", messages_key, "a channel's name")

    @abstractmethod
    def learning(
        self, messages: Messages, state: Any, config: RunnableConfig | None
    ) -> Effects[object]:
        """Learn from messages; `state` is the one that has them, None if they came alone."""

    def _call(self, given: Any, config: RunnableConfig | None = None) -> Effects[list[BaseMessage]]:
        """The messages of a state, or of a list, as they are, after learning from them."""
        state = None if is_messages(given) else given
        found = given if state is None else channel(state, self.messages_key)
        what = "the messages" if state is None else f"the channel {self.messages_key!r}"
        messages = checked(found, what)
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
    invoke = blocking(_invoke)  # type: ignore[arg-type]
    ainvoke = awaiting(_invoke)  # type: ignore[arg-type]

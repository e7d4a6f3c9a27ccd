"""What the model is shown: the parts of short-term memory, each applied to what the last left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError
from perdure.memory.nodes import MessagesNode, Shown
from perdure.memory.options import instance


def view(*parts: MessagesNode) -> View:
    """A node that shows the model what each part in turn leaves.

    `view(summary, use_memories(), trim(max_tokens=4_000))` shows the summary, the messages that it
    does not cover and the memories that answer the newest, cut to 4,000 tokens. The part that cuts
    comes last. The state stays as it is, whatever the modes of the parts.

    Raises:
        ConfigurationError: There is no part, one is not a part of a view, or they read different
            channels.
    """
    for part in parts or (None,):
        instance("a part of the view", part, MessagesNode, "parts like trim(max_tokens=4_000)")
    keys = sorted({part.messages_key for part in parts})
    if len(keys) > 1:
        raise ConfigurationError(f"the parts of the view read the channels {keys}; expected one")
    return View(parts_of(parts), keys[0])


def parts_of(nodes: Sequence[MessagesNode]) -> list[MessagesNode]:
    """The parts of nodes in order: the parts of each view, and every other node itself."""
    return [
        part
        for node in nodes
        for part in (parts_of(node.parts) if isinstance(node, View) else [node])
    ]


def changes_state(part: MessagesNode) -> bool:
    """Whether a part does more than to show: it removes from the state, or summarises it."""
    return getattr(part, "mode", "view") == "state" or hasattr(part, "is_due")


class View(MessagesNode):
    """See `view`, which makes it."""

    def __init__(self, parts: Sequence[MessagesNode], messages_key: str) -> None:
        super().__init__(messages_key)
        # `use_memories` has to know what the parts after it leave
        self.parts = tuple(
            part.followed_by(parts[number:]) if hasattr(part, "followed_by") else part
            for number, part in enumerate(parts, 1)
        )

    def with_tools(self, tools: Sequence[Any]) -> Self:
        """See `MessagesNode.with_tools`."""
        return type(self)([part.with_tools(tools) for part in self.parts], self.messages_key)

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """What the parts leave, one after the other."""
        for part in self.parts:
            shown = part.through(shown, state, config)
        return shown

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`."""
        for part in self.parts:
            shown = await part.athrough(shown, state, config)
        return shown

"""What the model is shown: the parts of short-term memory, one upon the other."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError
from perdure.memory.nodes import MessagesNode, Shown
from perdure.memory.update_instructions import UpdateInstructions


def view(*parts: MessagesNode) -> View:
    """A node that shows the model what is left after each part in turn.

    `view(summary, clear_tool_outputs(), trim(max_tokens=4_000))` shows the summary and what it does
    not cover, without bulky old results, cut to 4,000 tokens. The part that cuts comes last: what
    follows it could pass its budget. The state stays as it is, whatever the modes of the parts.

    Raises:
        ConfigurationError: There is no part, one is no node of perdure's, or they read different
            channels.
    """
    if not parts:
        raise ConfigurationError("a view has no parts; expected nodes like trim(max_tokens=4_000)")
    for part in parts:
        if isinstance(part, UpdateInstructions):
            raise ConfigurationError(
                "update_instructions() shows the model nothing, so it is no part of a view; "
                "expected use_instructions() there, and that as a node of its own after the answer"
            )
        if not isinstance(part, MessagesNode):
            raise ConfigurationError(
                f"a part of the view is {part!r:.80}; expected nodes like trim(max_tokens=4_000)"
            )
    keys = {part.messages_key for part in parts}
    if len(keys) > 1:
        raise ConfigurationError(
            f"the parts of the view read the channels {sorted(keys)}; expected one"
        )
    return View(parts, keys.pop())


class View(MessagesNode):
    """See `view`, which makes it."""

    def __init__(self, parts: tuple[MessagesNode, ...], messages_key: str) -> None:
        super().__init__(messages_key)
        self.parts = parts

    def with_tools(self, tools: Sequence[Any]) -> Self:
        """See `MessagesNode.with_tools`."""
        made = copy(self)
        made.parts = tuple(part.with_tools(tools) for part in self.parts)
        return made

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """What the parts make of what is shown, one upon the other."""
        for part in self.parts:
            shown = part.through(shown, state, config)
        return shown

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`."""
        for part in self.parts:
            shown = await part.athrough(shown, state, config)
        return shown

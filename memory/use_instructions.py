"""Using instructions: what an agent has learned, in front of what the model is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig

from perdure.memory.clock import Clock, clock_of
from perdure.memory.instructions import Instructions, check_instructions
from perdure.memory.nodes import MessagesNode, Shown
from perdure.memory.presenting import presented, taken_apart


def use_instructions(
    instructions: Instructions,
    *,
    as_of: Clock | str | None = None,
    messages_key: str = "messages",
) -> UseInstructions:
    """A node that puts the current instructions in front, as the one system message.

    A system message that is there and equal stays, a different one is replaced; the summary of
    `summarize()` in it stays. What is shown is a valid sequence, `llm_input_messages`; the state
    stays as it is. With other nodes that decide what is shown, put it into one `view`, before the
    part that cuts.

    Args:
        instructions: They.
        as_of: Gives the moment whose instructions are used, of the run's config, or the name of it
            there; None, or where that gives None: those that hold now.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: Those are no instructions, or the key is none.
    """
    return UseInstructions(instructions, messages_key, clock_of("as_of", as_of))


class UseInstructions(MessagesNode):
    """See `use_instructions`, which makes it."""

    def __init__(self, instructions: Instructions, messages_key: str, as_of: Clock) -> None:
        super().__init__(messages_key)
        self.instructions, self._as_of = check_instructions(instructions), as_of

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """The same, under the instructions."""
        return _under(self.instructions.current(config, as_of=self._as_of(config)).text, shown)

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`."""
        held = await self.instructions.acurrent(config, as_of=self._as_of(config))
        return _under(held.text, shown)


def _under(text: str, shown: Shown) -> Shown:
    if shown.system is None:
        return shown.under(text)
    summary, plain = taken_apart([shown.system])
    bare = replace(shown, system=plain[0] if plain else None).under(text)
    return bare if summary is None else presented(bare, summary, "system")

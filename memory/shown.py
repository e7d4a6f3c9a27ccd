"""What a model is to be shown, in the making: from the newest turn backwards, as far as one looks.

So a part that shows the last ten turns of a thread costs what ten turns cost, however long the
thread, and so do the parts before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Self

from langchain_core.messages import BaseMessage, SystemMessage

from perdure.memory.conversation import Messages, Turn, backwards, system_index


@dataclass(frozen=True, slots=True)
class Shown:
    """A conversation, to be shown to a model. It can be looked at once.

    Attributes:
        system: The system message.
        turns: The turns, newest first.
        before: What stands between the system message and the turns, and is as safe as it.
    """

    system: BaseMessage | None
    turns: Iterator[Turn]
    before: tuple[BaseMessage, ...] = field(default=())

    @classmethod
    def of(cls, messages: Messages, *, to_answer: bool = True) -> Self:
        """All that a provider takes of messages; `to_answer` as in `backwards`."""
        index = system_index(messages)
        system = None if index is None else messages[index]
        return cls(system, backwards(messages, to_answer=to_answer))

    def under(self, text: str) -> Self:
        """The same under a system message that says just this."""
        if self.system is not None and self.system.text == text:
            return self
        return replace(self, system=SystemMessage(text))

    def fixed(self) -> list[BaseMessage]:
        """What stands before the turns."""
        return [*([] if self.system is None else [self.system]), *self.before]

    def messages(self) -> list[BaseMessage]:
        """All of it, in the order in which a model takes it."""
        turns = list(self.turns)
        turns.reverse()
        said = (unit.messages for turn in turns for unit in turn.units)
        return [*self.fixed(), *chain.from_iterable(said)]


def sequence(messages: Messages) -> list[BaseMessage]:
    """All of a conversation that a provider takes, in the order in which it takes it.

    The system message first (the newest, if there are several), then from the first human message
    on, without orphaned calls and results, and up to what a model is to answer.
    """
    return Shown.of(messages).messages()

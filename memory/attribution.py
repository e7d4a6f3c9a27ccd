"""Attribution: whose words a memory rests on that a model keeps: the user's, a tool's or its own.

A model may be told by a web page what "the user wants". So it is not asked: the memory is compared
with the messages of the run, word by word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, get_args

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from perdure.memory.conversation import role
from perdure.memory.records import Role
from perdure.memory.run_config import source
from perdure.stores.base import Provenance
from perdure.stores.text import STOP_WORDS, tokens

_LIGHT: Final = STOP_WORDS | {
    stem for word in (*STOP_WORDS, *get_args(Role)) for stem in tokens(word)
}  # "the user" is in every such memory, whoever it is from
_MOST: Final = 0.5  # of the words of a memory
_SUMMARY: Final = "lc_source"  # langchain gives a summary the role of the user

Words = Mapping[int, set[str]]  # by the index of a message


@dataclass(frozen=True, slots=True)
class Attribution:
    """The messages of a run, with which memories are compared.

    `recalling` names the tools that return memories: their results are nothing new.
    """

    config: RunnableConfig | None = None
    messages: Sequence[BaseMessage] = ()
    recalling: Collection[str] = ()

    def of(self, texts: Iterable[str], known: Iterable[str] = ()) -> Provenance:
        """Where the texts of a memory come from; `trust` says whose words they are.

        They are the user's if most of their words are in human messages, or in known texts of the
        user, where a word that only a tool has used counts against it; a tool's if most are in tool
        messages; else the assistant's, also without messages.
        """
        words = set().union(*map(_words, texts))
        said, told = self._by_role("human"), self._by_role("tool")
        fresh = {i: each for i, each in told.items() if self.messages[i].name not in self.recalling}
        users = set().union(*said.values(), *map(_words, known))
        foreign = set().union(*fresh.values()) - users
        tools = set().union(*told.values())
        trust: str = "assistant"
        rests_on: Words = {}
        if words and len(words & users) - len(words & foreign) >= _MOST * len(words):
            trust, rests_on = "user", said
        elif words and len(words & tools) >= _MOST * len(words):
            trust, rests_on = "tool", told
        found = [self.messages[i] for i in sorted(_covering(words, rests_on))]
        names = {message.name for message in found}
        return Provenance(
            *source(self.config),
            message_ids=tuple(message.id for message in found if message.id),
            actor=(names.pop() if len(names) == 1 else None) or trust,
            trust=trust,
            at=datetime.now(UTC),
        )

    def _by_role(self, wanted: str) -> Words:
        return {
            i: _words(message.text)
            for i, message in enumerate(self.messages)
            if role(message) == wanted and _SUMMARY not in message.additional_kwargs
        }


def messages_in(state: Any, key: str) -> Sequence[BaseMessage]:
    """The messages of a graph's state: a dict, a model or a list; none where there are none."""
    found = state.get(key) if isinstance(state, Mapping) else getattr(state, key, state)
    given = found if isinstance(found, list | tuple) else ()
    return [message for message in given if isinstance(message, BaseMessage)]


def _words(text: Any) -> set[str]:
    """The stems of a text without stop words; of a script without spaces, pairs of characters."""
    return {word for word in tokens(str(text)) if word not in _LIGHT}


def _covering(words: set[str], messages: Words) -> Iterator[int]:
    """The few messages with the words: the one with the most of them, the newest of equals."""
    left = set(words)
    while messages:
        best = max(messages, key=lambda i: (len(left & messages[i]), i))
        if not left & messages[best]:
            return
        yield best
        left -= messages[best]

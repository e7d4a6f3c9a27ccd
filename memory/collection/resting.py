"""Whose words a memory rests on that a model keeps: the user's, a tool's, or its own.

A model may be told by a web page what "the user wants". So it is not asked: what it keeps is
compared with what was said in the run, word by word, however they are put.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from perdure.memory.conversation import role
from perdure.memory.records import Role
from perdure.memory.run_config import source
from perdure.stores.base import Provenance
from perdure.stores.text import STOP_WORDS, tokens

_ABOUT: Final = "user human customer person remember note assistant"
# of who is spoken of, and of the asking itself: nobody's words
_LIGHT: Final = STOP_WORDS | {
    stem for word in (*STOP_WORDS, *_ABOUT.split()) for stem in tokens(word)
}
_MOST: Final = 0.5  # of the words of a memory
_SUMMARY: Final = "lc_source"  # langchain puts a summary into the mouth of the user


@dataclass(frozen=True, slots=True)
class Ground:
    """What was said in a run, for what a model keeps of it.

    Attributes:
        messages: Of the run.
        recalled: The names of tools that only tell what is remembered.
    """

    messages: Sequence[BaseMessage] = ()
    recalled: Collection[str] = ()

    def of(
        self, texts: Iterable[str], config: RunnableConfig | None, known: Iterable[str] = ()
    ) -> tuple[Role, Provenance]:
        """Whose words texts rest on, and where they come from.

        They are the user's if most of the words that mean something are in human messages, where a
        word that only a tool has said weighs against that; else a tool's if most are in results;
        else the assistant's own. Without messages they are that as well.

        Args:
            texts: Of the memory.
            config: Of the run.
            known: What the user has said before: in the memory that is changed, say.
        """
        words = set().union(*map(_words, texts))
        said, told, recalled = self._said("human"), self._told(), self._told(of_memories=True)
        users = set().union(*said.values(), *map(_words, known))
        foreign = set().union(*told.values()) - users
        tools = set().union(*told.values(), *recalled.values())
        whose: Role = "assistant"
        rests: Mapping[int, set[str]] = {}
        if words and len(words & users) - len(words & foreign) >= _MOST * len(words):
            whose, rests = "user", said
        elif words and len(words & tools) >= _MOST * len(words):
            whose, rests = "tool", {**told, **recalled}
        return whose, self._source(whose, list(_covering(words, rests)), config)

    def _source(
        self, whose: Role, rests_on: Sequence[int], config: RunnableConfig | None
    ) -> Provenance:
        thread_id, checkpoint_id = source(config)
        found = [self.messages[i] for i in sorted(rests_on)]
        ids = tuple(message.id for message in found if message.id)
        names = {message.name for message in found}
        actor = names.pop() if len(names) == 1 else None
        at = datetime.now(UTC)
        made = Provenance(thread_id, checkpoint_id, actor=actor or whose, trust=whose, at=at)
        return replace(made, message_ids=ids)

    def _said(self, kind: str) -> dict[int, set[str]]:
        return {
            i: _words(message.text)
            for i, message in enumerate(self.messages)
            if role(message) == kind and _SUMMARY not in message.additional_kwargs
        }

    def _told(self, *, of_memories: bool = False) -> dict[int, set[str]]:
        return {
            i: words
            for i, words in self._said("tool").items()
            if (self.messages[i].name in self.recalled) == of_memories
        }


def messages_in(state: Any, key: str) -> Sequence[BaseMessage]:
    """The messages of a graph's state, whatever that is; none where there are none."""
    found = state
    if isinstance(state, Mapping):
        found = state.get(key)
    elif not isinstance(state, list):
        found = getattr(state, key, None)
    if not isinstance(found, list | tuple):
        return ()
    return [message for message in found if isinstance(message, BaseMessage)]


def _words(text: Any) -> set[str]:
    """What carries meaning: stems, but of stop words; of a script without spaces, pairs."""
    return {word for word in tokens(str(text)) if word not in _LIGHT}


def _covering(words: set[str], said: Mapping[int, set[str]]) -> Iterator[int]:
    """The few messages in which the words are: the one with the most, the newest of equals."""
    left = set(words)
    while said:
        best = max(said, key=lambda i: (len(left & said[i]), i))
        if not left & said[best]:
            return
        yield best
        left -= said[best]

"""Memories as a part of a view: those that answer the newest message, in the system message.

They are quoted there and nowhere else: nothing is written to the state, so that no memory is taken
for a message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import chain, islice, tee
from typing import Any, Final, Literal, Self

from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import BudgetExceeded, EmbeddingFailed, PerdureError, StorageError
from perdure.memory.clock import Clock, clock_of
from perdure.memory.conversation import Turn
from perdure.memory.effects import Effect, Effects, arun, run
from perdure.memory.nodes import MessagesNode, Shown
from perdure.memory.options import choice
from perdure.memory.recall import NAMESPACE, Labels, MemorySearch, ShownMessages
from perdure.memory.run_config import source
from perdure.memory.store_adapter import StoreAdapter
from perdure.stores.text import STOP_WORDS, query_tokens

_LOG = logging.getLogger("perdure")
_MARK: Final = "perdure_memories"  # in additional_kwargs, which no provider is sent
_SHORT: Final = 3  # words
_LONGEST: Final = 2_000  # characters of a query; a longer one is cut in its middle
_TOKEN: Final = " the"  # about one token, whatever counts


def use_memories(
    store: BaseStore | None = None,
    *,
    namespace: Labels = NAMESPACE,
    kinds: Sequence[str] | None = None,
    limit: int = 20,
    max_tokens: int = 1_000,
    as_of: Clock | str | None = None,
    on_failure: Literal["skip", "raise"] = "skip",
    messages_key: str = "messages",
) -> UseMemories:
    """A part of a view that adds a section `<memories>` to the system message.

    `view(use_memories(), trim(max_tokens=4_000))`: before the part that cuts, so that its budget counts
    the memories, and after `use_instructions`, which replaces the system message.

    The query is the newest human message, with the one before it if it is as short as "and then?".
    Memories that rest only on messages which the model is shown after all parts of the view are
    left out; memories of messages that are cut off are not.

    Args:
        store: Any langgraph store; None: the one that the graph was compiled with.
        namespace: As of `recall`; so are kinds, limit and max_tokens.
        kinds: Only memories of these kinds.
        limit: The largest number of memories.
        max_tokens: The tokens that they may take.
        as_of: A function of the run's config that gives the moment at which to remember, or the
            name of that moment in the config; None, or if it gives None: the present.
        on_failure: If the store or its embedder fails: `"skip"` logs a warning, and the turn goes
            on without memories; `"raise"` raises.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: An option is wrong.
    """
    return UseMemories(
        MemorySearch(namespace, kinds, limit, max_tokens),
        None if store is None else StoreAdapter(store).store,
        clock_of("as_of", as_of),
        choice("on_failure", on_failure, ("skip", "raise")) == "skip",
        messages_key,
    )


class UseMemories(MessagesNode):
    """See `use_memories`, which makes it."""

    def __init__(
        self,
        search: MemorySearch,
        store: BaseStore | None,
        as_of: Clock,
        skips: bool,
        messages_key: str,
    ) -> None:
        super().__init__(messages_key)
        self._search, self._store = search, store
        self._as_of, self._skips = as_of, skips
        self._following: list[MessagesNode] = []

    def followed_by(self, parts: Sequence[MessagesNode]) -> Self:
        """The same before these parts of a view."""
        made = copy(self)
        made._following = [part for part in parts if not isinstance(part, UseMemories)]
        return made

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """The same, with memories in the system message."""
        return run(self._through(shown, state, config))

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`."""
        return await arun(self._through(shown, state, config))

    def _through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Effects[Shown]:
        newest, possible, turns = tee(shown.turns, 3)
        query, text = query_of(list(islice(newest, 2))), ""
        if query:
            messages = yield from self._messages(replace(shown, turns=possible), state, config)
            text = yield from self._section(query, messages, config)
        return _with_section(replace(shown, turns=turns), text)

    def _messages(
        self, shown: Shown, state: Any, config: RunnableConfig | None
    ) -> Effects[ShownMessages]:
        """The messages that the model is shown if the memories take all of their budget."""
        newest = list(islice(shown.turns, 1))
        reserved = _TOKEN * (self._search.max_tokens or 0)
        shown = _with_section(replace(shown, turns=chain(newest, shown.turns)), reserved)
        try:
            for part in self._following:
                shown = yield _through(part, shown, state, config)
            left = [message for turn in shown.turns for u in turn.units for message in u.messages]
        except BudgetExceeded:  # the newest turn fits beside fewer memories, or the model is asked
            left = []  # nothing: the part raises again
        ids = {message.id for message in (*left, *(m for turn in newest for m in turn.messages))}
        return ShownMessages(source(config)[0], frozenset(id for id in ids if id is not None))

    def _section(
        self, query: str, shown: ShownMessages, config: RunnableConfig | None
    ) -> Effects[str]:
        """The section of memories; "" for none."""
        try:
            as_of = self._as_of(config)
            found = yield from self._search.found(query, self._store, config, as_of, shown)
        except (StorageError, EmbeddingFailed) as exc:
            return self._failed(exc)
        except PerdureError:
            raise  # a mistake in the setup, which every later turn would meet too
        except Exception as exc:  # of the driver of another store
            return self._failed(exc)
        return str(found)

    def _failed(self, exc: Exception) -> str:
        if not self._skips:
            raise exc
        _LOG.warning("nothing is recalled in this turn: %s", exc, exc_info=exc)
        return ""


def _through(part: MessagesNode, shown: Shown, state: Any, config: RunnableConfig | None) -> Effect:
    return Effect(
        lambda: part.through(shown, state, config), lambda: part.athrough(shown, state, config)
    )


def query_of(turns: Sequence[Turn]) -> str:
    """The query for the newest turns, newest first; "" if there is no text."""
    texts = [turn.messages[0].text.strip() for turn in turns[:2]]
    if not texts or not texts[0]:
        return ""
    text = "\n".join(reversed(texts)) if _is_elliptic(texts[0]) else texts[0]
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}\n{text[-half:]}"


def _is_elliptic(text: str) -> bool:
    """Whether a message is understood only from the one before it, as "and then?", "Bruges?"."""
    telling = [word for word in query_tokens(text) if word not in STOP_WORDS]
    return not telling or (len(telling) == 1 and len(text.split()) <= _SHORT)


def _with_section(shown: Shown, text: str) -> Shown:
    """The same with a section at the end of the system message; one that is there is replaced."""
    system = None if shown.system is None else _without_section(shown.system)
    if not text:
        return replace(shown, system=system)
    mark = {_MARK: text}
    if system is None:
        return replace(shown, system=SystemMessage(text, additional_kwargs=mark))
    content: Any = system.content
    if isinstance(content, str):
        joined: Any = f"{content}\n\n{text}" if content else text
    else:  # the blocks before stay as they are, so that a provider's cache of them holds
        joined = [*content, {"type": "text", "text": text}]
    kwargs = {**system.additional_kwargs, **mark}
    update = {"content": joined, "additional_kwargs": kwargs}
    return replace(shown, system=system.model_copy(update=update))


def _without_section(system: BaseMessage) -> BaseMessage | None:
    """A system message without its section of memories; None: there is nothing else in it."""
    text = system.additional_kwargs.get(_MARK)
    if text is None:
        return system
    content: Any = system.content
    if isinstance(content, str):
        left: Any = content.replace(f"\n\n{text}", "", 1) if content != text else ""
    else:
        left = [block for block in content if block != {"type": "text", "text": text}]
    if not left:
        return None
    kwargs = {key: value for key, value in system.additional_kwargs.items() if key != _MARK}
    return system.model_copy(update={"content": left, "additional_kwargs": kwargs})

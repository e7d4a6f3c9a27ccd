"""Recalled memories as a part of a view: quoted in the system message, never in the state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice, tee
from typing import Any, Final, Self

from langchain_core.messages import SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.effects import Effect, awaiting, blocking
from perdure.errors import BudgetExceeded, EmbeddingFailed, PerdureError, StorageError
from perdure.memory.conversation import Turn
from perdure.memory.nodes import MessagesNode, Shown, extended
from perdure.memory.quotation import section
from perdure.memory.recall import NAMESPACE, Labels, MemorySearch
from perdure.memory.records import Memory
from perdure.memory.run_config import Clock, clock_of, source
from perdure.memory.store_adapter import StoreAdapter
from perdure.stores.text import STOP_WORDS, query_tokens

_SHORT: Final = 3  # words
_LONGEST: Final = 2_000  # characters of a query; a longer one is cut in its middle
_TOKEN: Final = " the"  # about one token, whatever counts
_LOG = logging.getLogger("perdure")


class UseMemories(MessagesNode):
    """A part of a view that adds a section `<memories>` to the system message.

    `view(use_memories(), trim(max_tokens=4_000))`: before the part that cuts, so that its budget
    counts the memories, and after `use_instructions`, which replaces the system message.

    The query is the newest human message, with the one before it if it is as short as "and then?".
    Memories that rest only on messages which the model is shown after all parts of the view are
    left out. If the store or its embedder fails, a warning is logged, and the turn goes on without
    memories. The options are those of `recall`, and `min_score` that of `SQLiteStore.search`;
    `as_of` is the name of the moment in the run's config, or a function of the config.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        *,
        namespace: Labels = NAMESPACE,
        kinds: Sequence[str] | None = None,
        limit: int = 20,
        max_tokens: int = 1_000,
        min_score: float | None = None,
        as_of: Clock | str | None = None,
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        self._search = MemorySearch(namespace, kinds, limit, max_tokens, min_score)
        self._store = None if store is None else StoreAdapter(store).store
        self._as_of = clock_of("as_of", as_of)
        self._following: list[MessagesNode] = []

    def followed_by(self, parts: Sequence[MessagesNode]) -> Self:
        """The same before these parts of a view."""
        made = copy(self)
        made._following = [part for part in parts if not isinstance(part, UseMemories)]
        return made

    async def _through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """The same, with memories in the system message."""
        newest, turns = tee(shown.turns)
        query, room = query_of(list(islice(newest, 2))), self._search.max_tokens or 0
        lines: tuple[str, ...] = ()
        while query and room:
            possible, turns = tee(turns)
            filled = _with_section(replace(shown, turns=possible), _TOKEN * room)
            try:
                left = await self._left(filled, state, config)
            except BudgetExceeded:  # of a part that follows
                room //= 2
                continue
            lines = await self._recalled(query, room, left, config)
            break
        while lines:
            possible, turns = tee(turns)
            filled = _with_section(replace(shown, turns=possible), section("memories", lines))
            try:
                await self._left(filled, state, config)
                break
            except BudgetExceeded:  # its counter counts them dearer than the estimate does
                lines = lines[:-1]
        shown = replace(shown, turns=turns)
        return _with_section(shown, section("memories", lines)) if lines else shown

    through, athrough = blocking(_through), awaiting(_through)  # type: ignore[arg-type]

    async def _left(
        self, shown: Shown, state: Any, config: RunnableConfig | None
    ) -> frozenset[str | None]:
        for part in self._following:
            given = (shown, state, config)
            shown = await Effect(partial(part.through, *given), partial(part.athrough, *given))
        return frozenset(message.id for message in shown.messages())

    async def _recalled(
        self, query: str, room: int, left: frozenset[str | None], config: RunnableConfig | None
    ) -> tuple[str, ...]:
        thread_id, _ = source(config)

        def accepts(memory: Memory) -> bool:
            origin = memory.provenance
            if origin is None or not origin.message_ids:
                return True
            elsewhere = thread_id is not None and origin.thread_id not in (None, thread_id)
            return elsewhere or not left.issuperset(origin.message_ids)

        try:
            options: dict[str, Any] = {"as_of": self._as_of(config), "max_tokens": room}
            options |= {"accepts": accepts, "rejected": len(left)}
            return (await self._search.found(query, self._store, config, **options)).lines
        except Exception as exc:  # also of the driver of another store
            passing = StorageError | EmbeddingFailed
            if isinstance(exc, PerdureError) and not isinstance(exc, passing):
                raise  # a mistake, which every turn would meet
            _LOG.warning("nothing is recalled in this turn: %s", exc, exc_info=exc)
            return ()


use_memories = UseMemories


def query_of(turns: Sequence[Turn]) -> str:
    """The query for the newest turns, newest first; "" if there is no text."""
    texts = [turn.messages[0].text.strip() for turn in turns[:2]]
    if not texts or not texts[0]:
        return ""
    telling = [word for word in query_tokens(texts[0]) if word not in STOP_WORDS]
    # as "and then?", "Bruges?"
    is_elliptic = not telling or (len(telling) == 1 and len(texts[0].split()) <= _SHORT)
    text = "\n".join(reversed(texts)) if is_elliptic else texts[0]
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}\n{text[-half:]}"


def _with_section(shown: Shown, text: str) -> Shown:
    if shown.system is None:
        return replace(shown, system=SystemMessage(text))
    content = extended(shown.system.content, text)
    return replace(shown, system=shown.system.model_copy(update={"content": content}))

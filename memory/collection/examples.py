"""Episodes: what was asked, in which situation, what was done and why; and as few-shot examples.

What is searched is the input and its context, so the episodes of situations like the present one
are found, whatever came of them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError
from perdure.memory.collection.collection import Collection, telling_of
from perdure.memory.collection.episodes import (
    Example,
    checked_parts,
    example_of,
    is_episode,
    key_of,
    value_of,
)
from perdure.memory.collection.forgetting import unknown
from perdure.memory.counting import Countable, token_counter
from perdure.memory.effects import Effects, arun, run
from perdure.memory.fitting import fitting
from perdure.memory.gate import Gate
from perdure.memory.options import whole
from perdure.memory.records import EPISODE, Outcome, Role
from perdure.memory.tokens import TokenCounter
from perdure.stores.base import Provenance
from perdure.stores.namespaces import check_key

_OTHERS: Final = 2  # memories looked at for one, where some are no episodes


class Examples:
    """Episodes under a namespace of a store, selected by how like the present one they are.

    Methods that begin with `a` are the async forms. `config` is that of the run; None: within a
    node, the run it belongs to. What is written passes a gate first: see the `Outcome`.

    Args:
        store: Any; None: within a graph, the store it was compiled with.
        namespace: Labels; see `Template`.
        gate: What decides on what is kept.
        counter: What counts tokens; see `token_counter`.

    Attributes:
        memories: The same as a collection, for its other methods: history, forget and so on.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("examples", "{user_id}"),
        *,
        gate: Gate | None = None,
        counter: Countable | None = None,
    ) -> None:
        self.memories = Collection(store, namespace, gate=gate, kind=EPISODE)
        self._counter: TokenCounter = token_counter(counter)

    # -- writing

    def add(
        self,
        input: str,
        outcome: str,
        *,
        context: str | None = None,
        why: str | None = None,
        score: float | None = None,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
    ) -> Outcome:
        """Keep an episode. One of the same input, context and outcome is one, and is updated.

        Args:
            input: What was asked.
            outcome: What was done, or answered.
            context: The situation; searched as well.
            why: Why it went well, or badly.
            score: How well, on a scale of your own.
            config: Of the run.
            provenance: Where it comes from; None: the run's thread, and now.
            role: Whose words it rests on.

        Returns:
            What became of it.

        Raises:
            InvalidValue: A part is no text, or input or outcome is empty.
            ConfigurationError: There is no store, or the config does not fill the namespace.
            VersionConflict: Other processes changed examples here, again and again.
            StorageError: The store refuses.
        """
        parts = checked_parts(input=input, outcome=outcome, context=context, why=why, score=score)
        return run(self._adding(parts, config, provenance, role))

    async def aadd(
        self,
        input: str,
        outcome: str,
        *,
        context: str | None = None,
        why: str | None = None,
        score: float | None = None,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
    ) -> Outcome:
        """See `add`."""
        parts = checked_parts(input=input, outcome=outcome, context=context, why=why, score=score)
        return await arun(self._adding(parts, config, provenance, role))

    def update(
        self,
        key: str,
        *,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
        **parts: Any,
    ) -> Outcome:
        """Change parts of an episode: `input`, `outcome`, `context`, `why`, `score`.

        Raises:
            UnknownMemory: There is none by that id.
            ConfigurationError: There is no such part; see also `add`, as for other errors.
        """
        return run(self._updating(key, checked_parts(**parts), config, provenance, role))

    async def aupdate(
        self,
        key: str,
        *,
        config: RunnableConfig | None = None,
        provenance: Provenance | None = None,
        role: Role = "user",
        **parts: Any,
    ) -> Outcome:
        """See `update`."""
        return await arun(self._updating(key, checked_parts(**parts), config, provenance, role))

    def delete(self, key: str, *, config: RunnableConfig | None = None) -> Outcome:
        """See `Collection.delete`."""
        return self.memories.delete(key, config=config)

    async def adelete(self, key: str, *, config: RunnableConfig | None = None) -> Outcome:
        """See `Collection.delete`."""
        return await self.memories.adelete(key, config=config)

    # -- selecting

    def select(
        self,
        query: str,
        *,
        budget: int | None = 1_000,
        limit: int = 5,
        config: RunnableConfig | None = None,
        as_of: datetime | None = None,
    ) -> list[Example]:
        """The episodes most like a situation, best first.

        Args:
            query: What is asked now, with its context.
            budget: Tokens that they may take as a section; None: as many as they take.
            limit: How many at most.
            config: Of the run.
            as_of: At that moment of the past.

        Raises:
            ConfigurationError: An argument is wrong, or there is no store.
            StorageError: The store refuses.
        """
        return run(self.selecting(query, budget, limit, config, as_of))

    async def aselect(
        self,
        query: str,
        *,
        budget: int | None = 1_000,
        limit: int = 5,
        config: RunnableConfig | None = None,
        as_of: datetime | None = None,
    ) -> list[Example]:
        """See `select`."""
        return await arun(self.selecting(query, budget, limit, config, as_of))

    # -- steps

    def selecting(
        self,
        query: str,
        budget: int | None = 1_000,
        limit: int = 5,
        config: RunnableConfig | None = None,
        as_of: datetime | None = None,
    ) -> Effects[list[Example]]:
        """See `select`."""
        if not isinstance(query, str):
            raise ConfigurationError(f"query is {query!r:.80}; expected text")
        whole("limit", limit, 1)
        if budget is not None:
            whole("budget", budget, 1)
        if not query.strip():
            return []
        # each by itself: two episodes of one thread are no neighbours in a conversation
        options: dict[str, Any] = {"as_of": as_of, "context": False}
        found = yield from self.memories.searching(
            query, limit=limit * _OTHERS, config=config, **options
        )
        examples = [example_of(memory) for memory in found if is_episode(memory)][:limit]
        lines = [str(example) for example in examples]
        return [examples[n] for n in fitting("examples", lines, budget, self._counter).taken]

    def _adding(
        self,
        parts: dict[str, Any],
        config: RunnableConfig | None,
        provenance: Provenance | None,
        role: Role,
    ) -> Effects[Outcome]:
        # a case that is there keeps what is not told again
        value = {name: part for name, part in value_of(parts).items() if part is not None}
        telling = telling_of(value, config, provenance, role)
        return self.memories.changing(config).putting(telling, key_of(parts))

    def _updating(
        self,
        key: str,
        parts: dict[str, Any],
        config: RunnableConfig | None,
        provenance: Provenance | None,
        role: Role,
    ) -> Effects[Outcome]:
        changing = self.memories.changing(config)
        former = yield from changing.adapter.got(changing.namespace, check_key(key))
        if former is None or not is_episode(former):
            raise unknown(changing.namespace, key)
        value = value_of({**former.value, **parts})
        telling = telling_of(value, config, provenance, role)
        return (yield from changing.replacing(key, telling, "updated"))

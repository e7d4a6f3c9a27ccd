"""Recall: what memory has to say to a query, ranked, without repeats, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError
from perdure.memory.context import fitting
from perdure.memory.effects import Effects, arun, run
from perdure.memory.instructions import TEXT
from perdure.memory.options import whole
from perdure.memory.recollection.merging import Hit, Standing, merged
from perdure.memory.recollection.reach import NAMESPACES, ThreadHistory, filled, templates
from perdure.memory.recollection.unformed import Tails, ranked_among
from perdure.memory.recollection.when import named_span
from perdure.memory.records import Memory
from perdure.memory.rendering import memory_line, section
from perdure.memory.store_adapter import StoreAdapter, adapter_of
from perdure.memory.tokens import Countable, TokenCounter, token_counter
from perdure.stores.base import Namespace, Span

Waiting = Callable[[Sequence[Namespace], RunnableConfig | None], Effects[list[Memory]]]
"""What `Tails.waiting` is."""
_REPEATS: Final = 5  # memories looked at beyond the limit: some say what others have said
_OTHERS: Final = 4  # memories looked at for one of the kinds that are wanted


@dataclass(frozen=True, slots=True)
class Recollection:
    """What was recalled. As text it is the section that a model is shown.

    Attributes:
        memories: Best first.
        tokens: What the section takes.
        left_out: How many more were found that did not fit into the budget.
        span: The time that the query was taken to mean; None: none.
        standings: With `explain`, how each memory came to its place.
        lines: Each memory as a line that quotes it, with who said it, when and where.
    """

    memories: list[Memory]
    tokens: int = 0
    left_out: int = 0
    span: Span | None = None
    standings: tuple[Standing, ...] = ()
    lines: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return section("memories", self.lines) if self.lines else ""


def recall(
    query: str,
    *,
    store: BaseStore | None = None,
    namespaces: Sequence[Sequence[str]] = NAMESPACES,
    budget: int | None = 1_000,
    limit: int = 20,
    as_of: datetime | None = None,
    now: datetime | None = None,
    config: RunnableConfig | None = None,
    kinds: Sequence[str] | None = None,
    explain: bool = False,
    counter: Countable | None = None,
    tails: Tails | Waiting | None = None,
    min_score: float | None = None,
) -> Recollection:
    """What is remembered that answers a query. `recalling` is the same as a node of a graph.

    In one namespace, the order is that of the store's search; results of several are merged by
    rank. What says the same comes once. A time that the query names, "last week" or "since March",
    lifts what was said then; it leaves nothing out.

    Args:
        query: In the user's words.
        store: Any; None: within a graph, the one it was compiled with.
        namespaces: Labels of each; see `Template`. One that is under another counts once.
        budget: Tokens that the memories may take as they are shown; None: as many as they take.
        limit: How many at most.
        as_of: What was remembered at that moment; only of a perdure store.
        now: When the query is asked, in the user's time zone; None: `as_of`, else the present in
            the local one.
        config: Of the run, which fills in the namespaces; None: within a node, that of its run.
        kinds: Only memories of these kinds.
        explain: Say how each memory came to its place.
        counter: What counts tokens; see `token_counter`.
        tails: Knows what is not yet formed, so that this is recalled as well.
        min_score: As of the store's `search`; only of a perdure store.

    Raises:
        ConfigurationError: An argument is wrong, or there is no store.
        InvalidConfig: The config does not fill in a namespace.
        StorageError: The store refuses.
    """
    asks = Recall(namespaces, budget, limit, kinds, counter, tails, explain, min_score)
    return run(asks.use_memories(query, store, config, as_of, now))


async def arecall(
    query: str,
    *,
    store: BaseStore | None = None,
    namespaces: Sequence[Sequence[str]] = NAMESPACES,
    budget: int | None = 1_000,
    limit: int = 20,
    as_of: datetime | None = None,
    now: datetime | None = None,
    config: RunnableConfig | None = None,
    kinds: Sequence[str] | None = None,
    explain: bool = False,
    counter: Countable | None = None,
    tails: Tails | Waiting | None = None,
    min_score: float | None = None,
) -> Recollection:
    """See `recall`."""
    asks = Recall(namespaces, budget, limit, kinds, counter, tails, explain, min_score)
    return await arun(asks.use_memories(query, store, config, as_of, now))


class Recall:
    """How to recall; its arguments are those of `recall`.

    Raises:
        ConfigurationError: One is wrong.
    """

    def __init__(
        self,
        namespaces: Sequence[Sequence[str]] = NAMESPACES,
        budget: int | None = 1_000,
        limit: int = 20,
        kinds: Sequence[str] | None = None,
        counter: Countable | None = None,
        tails: Tails | Waiting | None = None,
        explain: bool = False,
        min_score: float | None = None,
    ) -> None:
        self._templates = templates(namespaces)
        self._budget = None if budget is None else whole("budget", budget, 1)
        self._limit, self._explain = whole("limit", limit, 1), bool(explain)
        self._kinds = _checked_kinds(kinds)
        self._min_score = min_score
        self._counter: TokenCounter = token_counter(counter)
        self._waiting = _checked_tails(tails)

    def use_memories(
        self,
        query: str,
        store: BaseStore | None,
        config: RunnableConfig | None = None,
        as_of: datetime | None = None,
        now: datetime | None = None,
        said: ThreadHistory | None = None,
    ) -> Effects[Recollection]:
        """What is recalled, as steps; without memories of what is `said` there anyway.

        Raises:
            PerdureError: See `recall`.
        """
        if not isinstance(query, str):
            raise ConfigurationError(f"query is {query!r:.80}; expected text")
        check_moments(as_of=as_of, now=now)
        adapter = adapter_of(store)
        if self._min_score is not None and not adapter.versioned:
            raise ConfigurationError(
                f"min_score is {self._min_score!r}, but {type(adapter.store).__name__} has no "
                "scores that can be compared; use a perdure store, or leave it out"
            )
        prefixes = filled(self._templates, config)
        if not query.strip():
            return Recollection([])
        span = named_span(query, now or as_of or datetime.now().astimezone())
        rankings = []
        for prefix in prefixes:
            options = {
                "query": query,
                "as_of": as_of,
                "during": span,
                "explain": self._explain,
                "min_score": self._min_score,
            }
            found = yield from self._found(adapter, prefix, options, said)
            rankings.append(
                [
                    Hit(rank, memory)
                    for rank, memory in enumerate(found, 1)
                    if said is None or not said.covers(memory)
                ]
            )
        if self._waiting is not None:
            waiting = yield from self._waiting(prefixes, config)
            unsaid = [each for each in waiting if said is None or not said.covers(each)]
            formed = [hit.memory for ranking in rankings for hit in ranking]
            tail = self._tail(unsaid, formed, as_of)
            if tail:
                rankings.append(ranked_among(query, span, tail, formed))
        return self._fitted(merged(rankings, self._limit), span)

    def _found(
        self,
        adapter: StoreAdapter,
        prefix: Namespace,
        options: dict[str, Any],
        said: ThreadHistory | None,
    ) -> Effects[list[Memory]]:
        """What a search of one namespace finds: more than the limit, for some will be left out."""
        wanted = self._limit + max(self._limit // 2, _REPEATS)
        wanted += 0 if said is None else len(said.message_ids)
        if self._kinds is None:
            return (yield from adapter.found(prefix, limit=wanted, **options))
        reach = wanted * _OTHERS
        while True:
            found = yield from adapter.found(prefix, limit=reach, **options)
            chosen = [memory for memory in found if memory.kind in self._kinds]
            if len(chosen) >= wanted or len(found) < reach:
                return chosen[:wanted]
            # perdure's filters are exact, but read every value; those of others know no "or"
            if adapter.versioned:
                options["filter"] = _of_kinds(self._kinds)
            reach *= _OTHERS

    def _tail(
        self, waiting: Sequence[Memory], formed: Sequence[Memory], as_of: datetime | None
    ) -> list[Memory]:
        """What waits, without what was formed meanwhile, is of another kind, or was said later."""
        keys = {(memory.namespace, memory.key) for memory in formed}
        return [
            memory
            for memory in waiting
            if (memory.namespace, memory.key) not in keys
            and (self._kinds is None or memory.kind in self._kinds)
            and (as_of is None or _is_said_by(memory, as_of))
        ]

    def _fitted(self, standings: Sequence[Standing], span: Span | None) -> Recollection:
        """As much as fits into the budget."""
        lines = [memory_line(each.memory) for each in standings]
        taken, tokens = fitting("memories", lines, self._budget, self._counter)
        kept = [standings[number] for number in taken]
        return Recollection(
            [each.memory for each in kept],
            tokens,
            len(standings) - len(kept),
            span,
            tuple(kept) if self._explain else (),
            tuple(lines[number] for number in taken),
        )


def check_moments(**moments: Any) -> None:
    """Moments have a time zone, or are None.

    Raises:
        ConfigurationError: One is something else.
    """
    for name, moment in moments.items():
        if moment is not None and (not isinstance(moment, datetime) or moment.tzinfo is None):
            raise ConfigurationError(
                f"{name} is {moment!r:.80}; expected a datetime with a time zone, like "
                "datetime.now(UTC)"
            )


def _checked_kinds(kinds: Any) -> tuple[str, ...] | None:
    if kinds is None:
        return None
    if isinstance(kinds, str) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise ConfigurationError(f"kinds is {kinds!r:.80}; expected a list, like ['fact'], or None")
    return tuple(kinds)


def _checked_tails(tails: Any) -> Waiting | None:
    if tails is None:
        return None
    waiting = tails.waiting if isinstance(tails, Tails) else tails
    if not callable(waiting):
        raise ConfigurationError(
            f"tails is {tails!r:.80}; expected an object with waiting(namespaces, config)"
        )
    return waiting


def _of_kinds(kinds: Sequence[str]) -> dict[str, Any]:
    """The filter for memories of some kinds; instructions are told by their field."""
    listed = {"kind": {"$in": list(kinds)}}
    return {"$or": [listed, {TEXT: {"$exists": True}}]} if TEXT in kinds else listed


def _is_said_by(memory: Memory, moment: datetime) -> bool:
    at = memory.provenance.at if memory.provenance is not None else None
    return at is not None and at <= moment

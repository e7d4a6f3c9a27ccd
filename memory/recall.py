"""Recall: the memories that answer a query, best first, each once, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from unicodedata import normalize

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.memory.context import fitting
from perdure.memory.effects import Effects, awaiting, blocking
from perdure.memory.normal_form import normal
from perdure.memory.options import instance, whole
from perdure.memory.quotation import memory_line, past_since, section
from perdure.memory.records import TURN, Memory
from perdure.memory.store_adapter import StoreAdapter, adapter_of, namespace_of
from perdure.memory.templates import Template
from perdure.memory.tokens import token_counter
from perdure.stores.base import Namespace

NAMESPACE: Final = ("memories", "{user_id}")
"""The namespace of memories, unless another is given."""
Labels = Sequence[str] | Sequence[Sequence[str]]
"""The labels of a namespace, or a list of the labels of several; see `Template`."""
_SPARE: Final = 5  # memories that are looked at beyond the limit: some repeat others
_DEEPER: Final = 4  # times as many memories are looked at if too many are left out
_K: Final = 60  # of reciprocal rank fusion: how little the first ranks stand out
_NO_SIGNS: Final = {code: None for code in range(128) if not chr(code).isalnum()}
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a memory came to its place.

    Attributes:
        memory: The memory; `memory.parts` are the parts of its score.
        ranks: Its rank in each search that found it, from 1.
        fused: The sum of `1 / (60 + rank)`; memories are sorted by it.
        stands_for: The keys of the memories that are left out in its favour: those with the same
            text, the turn that it was extracted from, the turns that it superseded.
    """

    memory: Memory
    ranks: tuple[int, ...]
    fused: float
    stands_for: tuple[str, ...] = ()

    def __str__(self) -> str:
        ranks = " and ".join(map(str, self.ranks))
        parts = ", ".join(f"{name} {part:.2f}" for name, part in (self.memory.parts or {}).items())
        sentences = [
            f"{self.memory.key}: rank {ranks} of its search",
            f"its score the sum of {parts}" if parts else "",
            f"stands for {', '.join(self.stands_for)}" if self.stands_for else "",
        ]
        return "; ".join(filter(None, sentences))


@dataclass(frozen=True, slots=True)
class RecallResult:
    """The memories that were recalled. As text it is a section of quoted data for a model.

    Attributes:
        memories: Best first.
        tokens: The tokens of the text.
        left_out: How many more were found that did not fit into the budget.
        placements: How each memory came to its place.
        lines: Each memory as a quoted line, with its speaker, date and thread.
    """

    memories: list[Memory]
    tokens: int = 0
    left_out: int = 0
    placements: tuple[Placement, ...] = ()
    lines: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return section("memories", self.lines) if self.lines else ""


class ShownMessages(NamedTuple):
    """The messages that the model is shown beside the memories.

    Attributes:
        thread_id: Their thread; None: not known.
        ids: Their ids.
    """

    thread_id: str | None
    ids: frozenset[str]

    def cover(self, memory: Memory) -> bool:
        """Whether a memory rests on these messages only."""
        source = memory.provenance
        if source is None or not source.message_ids:
            return False
        if self.thread_id is not None and source.thread_id not in (None, self.thread_id):
            return False  # another thread may have messages of the same ids
        return self.ids.issuperset(source.message_ids)


class MemorySearch:
    """A search for memories; see `recall` for its options.

    Raises:
        ConfigurationError: An option is wrong.
    """

    def __init__(
        self,
        namespace: Labels = NAMESPACE,
        kinds: Sequence[str] | None = None,
        limit: int = 20,
        max_tokens: int | None = 1_000,
    ) -> None:
        several = isinstance(namespace, list | tuple) and not any(
            isinstance(each, str) for each in namespace
        )
        every: Any = namespace if several and namespace else [namespace]
        self._templates = [Template(labels) for labels in every]
        expected = "a list of kinds, like ['fact'], or None"
        self.kinds = None if kinds is None else instance("kinds", kinds, (list, tuple), expected)
        self.limit = whole("limit", limit, 1)
        self.max_tokens = None if max_tokens is None else whole("max_tokens", max_tokens, 1)
        self._counter = token_counter(None)

    def namespaces(self, config: RunnableConfig | None) -> list[Namespace]:
        """The namespaces of a run, without those under another of them.

        Raises:
            InvalidConfig: The config does not fill in a namespace.
            InvalidNamespace: One is reserved for perdure's own notes.
        """
        every = dict.fromkeys(namespace_of(template, config) for template in self._templates)
        return [
            namespace
            for namespace in every
            if not any(namespace[:length] in every for length in range(1, len(namespace)))
        ]

    def found(
        self,
        query: str,
        store: BaseStore | None,
        config: RunnableConfig | None,
        as_of: datetime | None = None,
        shown: ShownMessages | None = None,
    ) -> Effects[RecallResult]:
        """The memories that answer a query, without those that rest on shown messages only."""
        instance("query", query, str, "text")
        adapter, prefixes = adapter_of(store), self.namespaces(config)
        if not query.strip():
            return RecallResult([])
        rankings = []
        for prefix in prefixes:
            rankings.append((yield from self._ranking(adapter, prefix, query, as_of, shown)))
        placements = placed(rankings, self.limit)
        lines = [memory_line(each.memory) for each in placements]
        taken, tokens = fitting("memories", lines, self.max_tokens, self._counter)
        return RecallResult(
            [placements[number].memory for number in taken],
            tokens,
            len(placements) - len(taken),
            tuple(placements[number] for number in taken),
            tuple(lines[number] for number in taken),
        )

    def _ranking(
        self,
        adapter: StoreAdapter,
        prefix: Namespace,
        query: str,
        as_of: datetime | None,
        shown: ShownMessages | None,
    ) -> Effects[list[tuple[int, Memory]]]:
        """Memories of one namespace with their ranks: more than the limit, as some repeat others.

        If too many of those that the store finds are left out, it is asked for more.
        """
        wanted = self.limit + max(self.limit // 2, _SPARE)
        reach = wanted + (0 if shown is None else min(len(shown.ids), wanted))
        filter = None
        while True:
            found = yield from adapter.found(
                prefix, query=query, filter=filter, limit=reach, as_of=as_of, explain=True
            )
            chosen = [
                (rank, memory)
                for rank, memory in enumerate(found, 1)
                if (self.kinds is None or memory.kind in self.kinds)
                and (shown is None or not shown.cover(memory))
            ]
            if len(chosen) >= wanted or len(found) < reach:
                return chosen[:wanted]
            reach *= _DEEPER
            # perdure's filters are exact, but read every value; those of other stores know no $in
            if adapter.versioned and self.kinds is not None:
                filter = {"kind": {"$in": list(self.kinds)}}


def _recall(
    query: str,
    *,
    store: BaseStore | None = None,
    config: RunnableConfig | None = None,
    namespace: Labels = NAMESPACE,
    kinds: Sequence[str] | None = None,
    limit: int = 20,
    max_tokens: int | None = 1_000,
    as_of: datetime | None = None,
) -> Effects[RecallResult]:
    """The memories that answer a query. `use_memories` does the same for a model's node.

    In one namespace the order is that of the store's search; the results of several are merged by
    rank. A text comes once. A memory that was superseded is left out if the one that superseded it
    is recalled, else it is shown with the date until which it held.

    Args:
        query: In the user's words.
        store: Any langgraph store; None: within a graph, the one it was compiled with.
        config: Of the run: it fills in the namespace; None: within a node, that of its run.
        namespace: Where to look; a list of namespaces for several. See `Template`.
        kinds: Only memories of these kinds.
        limit: The largest number of memories.
        max_tokens: The tokens that they may take as the model is shown them; None: any number.
        as_of: Recall what was remembered at that moment; only of a perdure store.

    Raises:
        ConfigurationError: An argument is wrong, or there is no store.
        InvalidConfig: The config does not fill in a namespace.
        StorageError: The store fails.
    """
    search = MemorySearch(namespace, kinds, limit, max_tokens)
    return (yield from search.found(query, store, config, as_of))


recall = blocking(_recall)
arecall = awaiting(_recall)


# -- several rankings as one


@dataclass(slots=True)
class _Group:
    """Memories of one text, found by several searches."""

    memory: Memory
    best: int
    ranks: dict[int, int]
    stands_for: list[str] = field(default_factory=list)

    def add(self, search: int, rank: int, memory: Memory) -> None:
        other = memory
        if rank < self.best:
            self.memory, self.best, other = memory, rank, self.memory
        if other.key != self.memory.key:
            self.stands_for.append(other.key)
        self.ranks.setdefault(search, rank)

    @property
    def fused(self) -> float:
        return sum(1 / (_K + rank) for rank in self.ranks.values())

    def placement(self) -> Placement:
        keys = tuple(dict.fromkeys(self.stands_for))
        return Placement(self.memory, tuple(self.ranks.values()), self.fused, keys)


def placed(rankings: Sequence[Sequence[tuple[int, Memory]]], limit: int) -> list[Placement]:
    """Rankings as one, best first, ties newest first, without repetitions.

    Args:
        rankings: Of each search, memories with their ranks. Their scores cannot be compared.
        limit: How many memories are kept.

    Source: reciprocal rank fusion, Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion
    Outperforms Condorcet and Individual Rank Learning Methods" (SIGIR 2009).
    """
    groups: list[_Group] = []
    by_letters: dict[str, list[_Group]] = {}
    for search, ranking in enumerate(rankings):
        for rank, memory in ranking:
            near = by_letters.setdefault(_letters(memory.text), [])
            text = normal(memory.text) if near else ""
            group = next((each for each in near if normal(each.memory.text) == text), None)
            if group is None:
                groups.append(_Group(memory, rank, {search: rank}))
                near.append(groups[-1])
            else:
                group.add(search, rank, memory)
    groups.sort(key=lambda each: _date(each.memory), reverse=True)
    groups.sort(key=lambda each: each.fused, reverse=True)
    kept = _without_past(_without_sources(groups), limit)
    return [group.placement() for group in kept[:limit]]


def _without_sources(groups: Sequence[_Group]) -> list[_Group]:
    """Without turns from which, and from nothing else, a better memory was extracted.

    A turn that ranks before its facts answers better than they do: then all stay.
    """
    kept: list[_Group] = []
    made: dict[tuple[str | None, tuple[str, ...]], _Group] = {}
    for group in groups:
        source = group.memory.provenance
        place = (source.thread_id, source.message_ids) if source and source.message_ids else None
        if place in made and group.memory.kind == TURN:
            made[place].stands_for += [group.memory.key, *group.stands_for]
            continue
        if place is not None and group.memory.kind != TURN:
            made.setdefault(place, group)
        kept.append(group)
    return kept


def _without_past(groups: Sequence[_Group], limit: int) -> list[_Group]:
    """Without past memories whose successor is among the first; the others tell until when."""
    successors = {
        id: group
        for group in groups[:limit]
        for previous in group.memory.previous
        for id in previous.message_ids
    }
    kept = []
    for group in groups:
        source = group.memory.provenance
        ids = source.message_ids if source and past_since(group.memory) else ()
        if ids and successors.keys() >= set(ids):
            successors[ids[0]].stands_for.append(group.memory.key)
        else:
            kept.append(group)
    return kept


def _letters(text: str) -> str:
    """The letters and digits of a text, which texts of one normal form have in common.

    It takes 1 µs, the normal form 40.
    """
    if text.isascii():
        return text.lower().translate(_NO_SIGNS)
    return "".join(filter(str.isalnum, normalize("NFKC", text).casefold()))


def _date(memory: Memory) -> datetime:
    source = memory.provenance
    return (source.at if source is not None else None) or memory.valid_from or _EARLIEST

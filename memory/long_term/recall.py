"""Recall the memories that answer a query, best first, within a token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.effects import build_async_function, build_blocking_function, run_operation
from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.memory.long_term.periods import Period
from perdure.memory.long_term.recorded_templates import record_templates
from perdure.memory.long_term.records import (
    TURN,
    Memory,
    StoreAdapter,
    fill_namespaces,
    find_end_of_validity,
    get_adapter,
    is_below_min_score,
    render_memory_line,
)
from perdure.memory.long_term.repeated_questions import (
    is_same_as_query,
    rank_answers_first_and_count_answers,
)
from perdure.memory.namespace_templates import Template
from perdure.memory.options import check_instance, check_min_score, check_whole_number
from perdure.memory.quotation import render_section, select_fitting_indices_and_count_tokens
from perdure.memory.short_term.tokens import token_counter
from perdure.settings import SEARCH_LIMIT, SHOWN_LIMIT
from perdure.stores.base import Namespace
from perdure.stores.search.text_equivalence import (
    is_text_stating_same_fact,
    normalize_text_for_comparison,
)
from perdure.stores.store import Store

# The default namespace of memories.
NAMESPACE: Final = ("memories", "{user_id}")
Labels = Sequence[str] | Sequence[Sequence[str]]
"""The labels of a namespace, or a list of the labels of several namespaces; see `Template`."""
Ranking = list[tuple[int, Memory]]
"""The rank of each memory that a search found, from 1, with the memory; best first."""
_MAX_REJECTED_FACTOR: Final = 3
"""Limit for the additional memories that the first search reads to replace rejected memories.

The limit is this factor times the number of memories that the search has to return.
"""
# Minimum number of spare memories that a search reads beyond its limit, to make up for duplicates
# that are removed later.
_MIN_SPARE: Final = 5
# Factor by which the search limit grows when a search finds too few suitable memories and is
# repeated.
_DEPTH_FACTOR: Final = 4
# Maximum number of top-ranked memories that are compared with a memory to find duplicates.
_MAX_COMPARED: Final = 100
# The constant k of reciprocal rank fusion, which gives rank r the weight 1 / (k + r). The larger k
# is, the smaller the advantage of high ranks over low ranks.
_FUSION_CONSTANT: Final = 60
# Maximum number of characters of a memory to show in an explanation. Longer texts are truncated.
_MAX_EXPLAINED_CHARS: Final = 120
# Minimum absolute value of the score components that an explanation shows. Smaller components are
# omitted.
_MIN_EXPLAINED_PART: Final = 0.005
# Estimates the tokens of the rendered memories.
_TOKEN_COUNTER: Final = token_counter(None)
# Date that is used for sorting if a memory has no date. Memories are sorted newest first, so
# memories without a date come last.
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class RecallResult:
    """The recalled memories. `str(result)` renders the memories as quoted data for a prompt.

    Attributes:
        memories: The memories, best first. `Memory.parts` are the parts of their scores.
        tokens: The number of tokens of the rendered text.
        left_out: The number of further memories that did not fit into the budget.
        lines: The memories as lines of the rendered text, with speaker, date and thread.
        min_score: The minimum score, or 0 if there is no minimum.
        below_min_score: With `explain=True`, the best memories below the minimum score.
    """

    memories: list[Memory]
    tokens: int = 0
    left_out: int = 0
    lines: tuple[str, ...] = field(default=(), repr=False)
    min_score: float = 0.0
    below_min_score: list[Memory] = field(default_factory=list)

    def __str__(self) -> str:
        return render_section("memories", self.lines) if self.lines else ""

    def explain(self) -> str:
        """Explain in human-readable form which memories were recalled and which scored too low.

        Memories below the minimum score are listed only if `explain=True` was passed to `recall`.
        For each memory, one line shows its score, key and text, and a second line shows the
        components of the score.
        """
        limit = f"minimum score {self.min_score:.2f}" if self.min_score else "no minimum score"
        lines = [
            f"recalled, best first ({limit}):",
            *map(_render_memory_explanation, self.memories),
        ]
        if not self.memories:
            lines = [f"nothing was recalled ({limit})"]
        if self.left_out:
            lines.append(f"{self.left_out} more memories did not fit into the token budget")
        if self.below_min_score:
            lines += [
                "below the minimum score, best first:",
                *map(_render_memory_explanation, self.below_min_score),
            ]
        return "\n".join(lines)

    def describe_memories_below_min_score(self) -> str:
        """Return a message that says how many memories scored below the minimum score.

        The message is "" if there are none.
        """
        number = len(self.below_min_score)
        which = "memory is" if number == 1 else f"{number} memories are"
        if not number:
            return ""
        return f"the nearest {which} below the minimum score {self.min_score:.2f}"


def _render_memory_explanation(memory: Memory) -> str:
    """Render a memory with its score and the score's components, in human-readable form."""
    score = "   -" if memory.score is None else f"{memory.score:.2f}"
    parts = sorted((memory.parts or {}).items(), key=lambda part: -abs(part[1]))
    why = ", ".join(
        f"{name} {part:+.2f}" for name, part in parts if abs(part) >= _MIN_EXPLAINED_PART
    )
    text = " ".join(memory.text.split())
    text = text if len(text) <= _MAX_EXPLAINED_CHARS else f"{text[:_MAX_EXPLAINED_CHARS]}…"
    return f"  {score}  {memory.key}: {text}" + (f"\n        {why}" if why else "")


def list_namespaces_of_options(
    namespace: Labels, namespaces: Sequence[Sequence[str]] | None
) -> Sequence[Any]:
    """Return the labels of each namespace that the options `namespace` and `namespaces` name.

    Raises:
        ConfigurationError: Both options are given, or `namespaces` is not a list of lists of
            labels.
    """
    if namespaces is None:
        is_one_namespace = not isinstance(namespace, list | tuple) or any(
            isinstance(labels, str) for labels in namespace
        )
        return [namespace] if is_one_namespace or not namespace else namespace
    is_list_of_lists = isinstance(namespaces, list | tuple) and all(
        isinstance(labels, list | tuple) for labels in namespaces
    )
    if not is_list_of_lists or not namespaces:
        raise ConfigurationError(
            f"the argument 'namespaces' is {namespaces!r:.80}; expected a list of namespaces, such "
            "as [('memories', '{user_id}'), ('teams', '{team}')]"
        )
    if tuple(namespace) != NAMESPACE:
        raise ConfigurationError(
            "pass either 'namespace' or 'namespaces', not both; to use several namespaces, list "
            "all of them in 'namespaces'"
        )
    return namespaces


class MemorySearch:
    """A reusable search for memories.

    The options of the search are passed to the constructor of this class and apply to every query.

    Args:
        namespace: See `recall`.
        kinds: See `recall`.
        limit: See `recall`.
        max_tokens: See `recall`.
        min_score: See `recall`.
        all_below: If the namespaces contain fewer memories than this number, all memories are
            found.
        namespaces: See `recall`.
    """

    def __init__(
        self,
        namespace: Labels = NAMESPACE,
        kinds: Sequence[str] | None = None,
        limit: int = SHOWN_LIMIT,
        max_tokens: int | None = 1_000,
        min_score: float | None = None,
        all_below: int | None = None,
        namespaces: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self._templates = [
            Template(labels, shared=True)
            for labels in list_namespaces_of_options(namespace, namespaces)
        ]
        self._kinds = (
            None
            if kinds is None
            else check_instance(
                "kinds", kinds, (list, tuple), "a list of kinds, like ['fact'], or None"
            )
        )
        self._limit = check_whole_number("limit", limit, 1)
        self.max_tokens = (
            None if max_tokens is None else check_whole_number("max_tokens", max_tokens, 1)
        )
        self._min_score = check_min_score(min_score)
        self._all_below = (
            None if all_below is None else check_whole_number("all_below", all_below, 1)
        )

    def list_searched_namespaces(self, config: RunnableConfig | None) -> list[Namespace]:
        """Return the namespaces that a run searches, omitting those nested in another one.

        A namespace is nested if another namespace in the list is a prefix of it. A search of a
        namespace also finds the memories in the namespaces that are nested in it.

        If memory is disabled for the run, the returned list contains no user or team namespaces.
        """
        namespaces = dict.fromkeys(
            [
                namespace
                for template in self._templates
                if not template.is_memory_disabled_for_run(config)
                for namespace in fill_namespaces(template, config)
            ]
        )
        return [
            namespace
            for namespace in namespaces
            if not any(namespace[:size] in namespaces for size in range(1, len(namespace)))
        ]

    async def find_memories(
        self,
        query: str,
        store: BaseStore | None,
        config: RunnableConfig | None,
        *,
        as_of: datetime | None = None,
        during: Period | None = None,
        accepts: Callable[[Memory], bool] | None = None,
        max_tokens: int | None = None,
        expected_rejections: int = 0,
        explain: bool = False,
    ) -> RecallResult:
        """Find the memories that answer a query, best first.

        Args:
            query: The query.
            store: The store, or None to use the running graph's store.
            config: The config of the run.
            as_of: A time in the past, to search the memories that were current then. Only perdure's
                stores support it.
            during: The period that the query is about.
            accepts: A function that returns whether the result may include a memory, or None if the
                result may include every memory.
            max_tokens: The maximum number of tokens, or None to use this search's maximum.
            expected_rejections: About how many memories `accepts` will reject. The first search
                reads additional memories that replace the rejected memories.
            explain: Whether the result also includes memories below the minimum score.
        """
        check_instance("query", query, str, "text")
        adapter = get_adapter(store, *self._templates)
        prefixes = self.list_searched_namespaces(config)
        # Record the namespace templates of this search in the store. To export or delete a person's
        # data, perdure finds the person's namespaces by means of the recorded templates.
        await record_templates(adapter.store, self._templates)
        min_score = adapter.get_min_score_or_default(self._min_score)
        if not query.strip() or not prefixes:
            return RecallResult([], min_score=min_score)
        all_memories = list[Memory]()
        if self._all_below is not None:
            all_memories = await self._read_all_memories_if_few(
                adapter, prefixes, self._all_below, as_of, accepts
            )
        limit = max(self._limit, len(all_memories))
        # If all memories are returned, none is left out because of its score.
        min_score = 0.0 if all_memories else min_score
        # Always ask the store for the parts of the scores. The parameter `explain` decides only
        # whether memories below the minimum score are returned.
        options: dict[str, Any] = {
            "query": query,
            "as_of": as_of,
            "explain": True,
            "min_score": 0.0 if explain else min_score,
        }
        if during is not None:
            options["during"] = during
        rankings_of_prefixes = [
            await self._rank_memories_in_namespace(
                adapter, prefix, options, accepts, expected_rejections, min_score, limit
            )
            for prefix in prefixes
        ]
        rankings = [ranking for ranking, _ in rankings_of_prefixes]
        below_rankings = [below_ranking for _, below_ranking in rankings_of_prefixes]
        if all_memories:
            rankings.append(_rank_memories_absent_from_rankings(all_memories, rankings))
        memories = merge_rankings_by_reciprocal_rank(rankings, limit)
        # Rerank the merged list. Merging the rankings of several namespaces can move a turn that
        # repeats the query's question above a turn that answers the question.
        if len(prefixes) > 1:
            ordered, _ = rank_answers_first_and_count_answers([*enumerate(memories, 1)], query)
            memories = [memory for _, memory in ordered]
        below = _merge_below_rankings(below_rankings, rankings, limit) if explain else []
        lines = [render_memory_line(memory) for memory in memories]
        fitting_numbers, tokens = select_fitting_indices_and_count_tokens(
            "memories", lines, max_tokens or self.max_tokens, _TOKEN_COUNTER
        )
        fitting_memories = [memories[number] for number in fitting_numbers]
        if as_of is None:
            await adapter.refresh_time_to_live(fitting_memories)
        return RecallResult(
            fitting_memories,
            tokens,
            left_out=len(memories) - len(fitting_memories),
            lines=tuple(lines[number] for number in fitting_numbers),
            min_score=min_score,
            below_min_score=below,
        )

    async def _read_all_memories_if_few(
        self,
        adapter: StoreAdapter,
        prefixes: Sequence[Namespace],
        all_below: int,
        as_of: datetime | None,
        accepts: Callable[[Memory], bool] | None,
    ) -> list[Memory]:
        """Return all memories in the namespaces if there are fewer than `all_below`, otherwise [].

        Memories excluded by `kinds` or `accepts` are not returned, but they are counted when the
        number of memories is compared with `all_below`.
        """
        few: list[Memory] = []
        for prefix in prefixes:
            few += await adapter.search(prefix, limit=all_below, as_of=as_of)
        if len(few) >= all_below:
            return []
        return [
            memory
            for memory in few
            if (self._kinds is None or memory.kind in self._kinds)
            and (accepts is None or accepts(memory))
        ]

    async def _rank_memories_in_namespace(
        self,
        adapter: StoreAdapter,
        prefix: Namespace,
        options: dict[str, Any],
        accepts: Callable[[Memory], bool] | None,
        expected_rejections: int,
        min_score: float,
        limit: int,
    ) -> tuple[Ranking, Ranking]:
        """Return the rankings of the memories of one namespace that a search finds.

        The first ranking contains the memories that reach the minimum score, and the second ranking
        contains the memories that do not. Together, they may be longer than `limit`, because the
        caller removes duplicates from them. Only memories for which `accepts` returns True are
        returned.
        """
        max_results = limit + max(limit // 2, _MIN_SPARE)
        depth = max_results + min(expected_rejections, _MAX_REJECTED_FACTOR * max_results)
        query = options["query"]
        # The search goes on until it has found `min_answers` memories that answer the query. Half
        # as many answers as `limit` are usually required, because later results rarely answer the
        # query. If the search is restricted to certain kinds of memories, memories of these kinds
        # may be rare, so `limit` answers are required.
        min_answers = limit if self._kinds is not None else limit // 2
        while True:
            memories = await adapter.search(prefix, limit=depth, **options)
            candidates = [
                (rank, memory)
                for rank, memory in enumerate(memories, 1)
                if (self._kinds is None or memory.kind in self._kinds)
                and (accepts is None or accepts(memory))
                and not is_same_as_query(memory, query)
            ]
            above = [pair for pair in candidates if not is_below_min_score(pair[1], min_score)]
            ordered, answers = rank_answers_first_and_count_answers(above, query)
            # If all memories reach the minimum score, the store may have more such memories.
            may_have_more = (
                sum(not is_below_min_score(memory, min_score) for memory in memories) >= depth
            )
            if answers >= min_answers or not may_have_more:
                below = [pair for pair in candidates if is_below_min_score(pair[1], min_score)]
                return ordered[:max_results], below[: max(max_results - len(ordered), 0)]
            depth *= _DEPTH_FACTOR
            # Filter by kind only if the first search found too few memories, because the filter
            # makes the store read every memory. Never filter in other libraries' stores, because
            # they do not support the `$in` operator.
            if adapter.versioned and self._kinds is not None:
                options = {**options, "filter": {"kind": {"$in": list(self._kinds)}}}


def _merge_below_rankings(
    below_rankings: Sequence[Ranking], rankings: Sequence[Ranking], limit: int
) -> list[Memory]:
    """Merge the rankings of memories below the minimum score, best first.

    Memories whose text is also the text of a memory in `rankings` are left out.
    """
    texts = {
        normalize_text_for_comparison(memory.text) for ranking in rankings for _, memory in ranking
    }
    return [
        memory
        for memory in merge_rankings_by_reciprocal_rank(below_rankings, limit)
        if normalize_text_for_comparison(memory.text) not in texts
    ]


def _rank_memories_absent_from_rankings(
    memories: Sequence[Memory], rankings: Sequence[Ranking]
) -> Ranking:
    """Assign a rank to each memory in `memories` that none of the `rankings` contains.

    The ranks that the function assigns begin after the largest rank in `rankings`.
    """
    ranked = {(m.namespace, m.key) for ranking in rankings for _, m in ranking}
    last_rank = max((rank for ranking in rankings for rank, _ in ranking), default=0)
    rest = [memory for memory in memories if (memory.namespace, memory.key) not in ranked]
    return list(enumerate(rest, last_rank + 1))


async def _recall(
    query: str,
    *,
    store: BaseStore | None = None,
    config: RunnableConfig | None = None,
    namespace: Labels = NAMESPACE,
    kinds: Sequence[str] | None = None,
    limit: int = SHOWN_LIMIT,
    max_tokens: int | None = 1_000,
    min_score: float | None = None,
    as_of: datetime | None = None,
    during: Period | None = None,
    explain: bool = False,
    namespaces: Sequence[Sequence[str]] | None = None,
) -> RecallResult:
    """Return the memories that are relevant to a query.

    The node `use_memories` performs the same search as `recall` before a model is called. The first
    search with a namespace template may record the template in the store, so that all namespaces of
    a person can be found.

    The store searches each namespace separately and ranks the memories that it finds there. A
    memory that contains a message is called a turn, and every other memory is called an extracted
    memory. The ranks of extracted memories are halved, so that they usually come before turns. A
    memory that was extracted from a turn always ranks above that turn. If several namespaces are
    searched, their search results are merged by rank. If several memories state the same fact, only
    the best one is returned. If a turn only repeats the question in the query, the turn is ranked
    below the memories that answer the question.

    A turn whose text equals the query is not returned. A turn is not returned if a higher-ranked
    memory was extracted from that turn alone. A superseded memory is not returned if its successor
    is recalled. If only a superseded memory is recalled, without its successor, the memory is shown
    with its end date.

    Args:
        query: The query, in the words of the user.
        store: Any langgraph store, or None to use the graph's store.
        config: The config of the run, which fills in the namespace. None means, within a node, the
            config of the current run.
        namespace: The namespace to search, or a list of several. See `Template`.
        kinds: Only memories of these kinds.
        limit: The maximum number of memories.
        max_tokens: The maximum number of tokens of the memories as they are rendered for the model,
            or None for no limit.
        min_score: The minimum score, or 0 for no minimum. None means `perdure.settings.MIN_SCORE`
            for perdure's stores. For other stores, whose scores have a different meaning, None
            means no minimum.
        as_of: A time in the past, to recall the memories that were current then. Only perdure's
            stores support it.
        during: The start and end of the period that the query is about, such as last week. Memories
            from this period rank higher, but other memories can still be recalled. Only perdure's
            stores support this option.
        explain: Whether the result's `below_min_score` contains the best memories below the minimum
            score, at most `limit` of them.
        namespaces: Several namespaces, instead of `namespace`. `("teams", "{team}")` stands for the
            namespaces of all teams of the run, and for none in a run without a team.
    """
    search = MemorySearch(namespace, kinds, limit, max_tokens, min_score, namespaces=namespaces)
    return await search.find_memories(
        query, store, config, as_of=as_of, during=during, explain=explain
    )


# The public functions `recall` and `arecall` run `_recall`, see `perdure.effects`.
recall, arecall = build_blocking_function(_recall), build_async_function(_recall)


def merge_rankings_by_reciprocal_rank(rankings: Sequence[Ranking], limit: int) -> list[Memory]:
    """Merge rankings into one list without duplicates, best first. Ties are ordered newest first.

    The rankings are merged by reciprocal rank fusion, which uses only the ranks of the memories and
    ignores the scores of the store.

    Args:
        rankings: For each search, memories with their ranks.
        limit: The maximum number of memories.

    Source: Cormack, Clarke and Buettcher (SIGIR 2009).
    """
    # (memory, ranks) pairs. Each `ranks` dict maps the index of a ranking in `rankings` to the
    # memory's rank in that ranking.
    entries: list[tuple[Memory, dict[int, int]]] = []
    # Maps the normalized text of a memory to the memory's index in `entries`.
    index_by_text: dict[str, int] = {}
    for ranking_index, ranking in enumerate(rankings):
        for rank, memory in ranking:
            text = normalize_text_for_comparison(memory.text)
            if text not in index_by_text:
                compared_entries = enumerate(entries[:_MAX_COMPARED])
                similar_indices = (
                    similar_index
                    for similar_index, (representative, _) in compared_entries
                    if is_text_stating_same_fact(representative.text, memory.text)
                )
                index_by_text[text] = next(similar_indices, len(entries))
            index = index_by_text[text]
            if index == len(entries):
                entries.append((memory, {}))
            representative, ranks = entries[index]
            better = rank < min(ranks.values(), default=rank)
            entries[index] = memory if better else representative, {ranking_index: rank, **ranks}

    def get_score_and_date(entry: tuple[Memory, dict[int, int]]) -> tuple[float, datetime]:
        """Return the reciprocal rank score of a memory and the memory's date."""
        memory, ranks = entry
        date = (memory.provenance and memory.provenance.at) or memory.valid_from or _EARLIEST
        return sum(1 / (_FUSION_CONSTANT + rank) for rank in ranks.values()), date

    entries.sort(key=get_score_and_date, reverse=True)
    memories = [memory for memory, _ in entries]
    if any(memory.kind == TURN for memory in memories):
        memories = _rank_extracted_memories_first(
            _remove_turns_ranked_below_extracted_memories(memories)
        )
    return _remove_superseded(memories, limit)[:limit]


def _rank_extracted_memories_first(memories: Sequence[Memory]) -> list[Memory]:
    """Reorder a ranking so that extracted memories precede the turns they were extracted from.

    Divide the rank of each extracted memory by two (rank 1 is the best). The extracted memory
    thereby moves up in the ranking, even if the search did not find the turn from which it was
    extracted. Every memory that is not a turn counts as an extracted memory.
    """
    rank_of_turn = {
        message: rank
        for rank, memory in reversed([*enumerate(memories, 1)])
        if memory.kind == TURN
        for message in _list_source_messages(memory)
    }
    # the sort key of each memory: its adjusted rank, and whether it is a turn
    sort_keys: list[tuple[float, bool]] = []
    for rank, memory in enumerate(memories, 1):
        sources = rank_of_turn.keys() & _list_source_messages(memory)
        extracted_rank = min([rank / 2, *(rank_of_turn[message] - 0.5 for message in sources)])
        sort_keys.append((rank, True) if memory.kind == TURN else (extracted_rank, False))
    return [memories[i] for i in sorted(range(len(memories)), key=sort_keys.__getitem__)]


def _list_source_messages(memory: Memory) -> list[tuple[str | None, str]]:
    """Return (thread id, message id) for each message from which a memory was created."""
    source = memory.provenance
    return [(source.thread_id, id) for id in source.message_ids] if source else []


def _remove_turns_ranked_below_extracted_memories(memories: Sequence[Memory]) -> list[Memory]:
    """Remove turns that rank below an extracted memory with the same source messages."""
    remaining: list[Memory] = []
    extracted: set[tuple[str | None, tuple[str, ...]] | None] = set()
    for memory in memories:
        source = memory.provenance
        source_key = (
            (source.thread_id, source.message_ids) if source and source.message_ids else None
        )
        if memory.kind != TURN:
            extracted.add(source_key)
        if memory.kind != TURN or source_key is None or source_key not in extracted:
            remaining.append(memory)
    return remaining


def _remove_superseded(memories: Sequence[Memory], limit: int) -> list[Memory]:
    """Remove the memories that were superseded by one of the first `limit` memories of the list."""
    superseded_ids = {
        message_id
        for memory in memories[:limit]
        for previous in memory.previous
        for message_id in previous.message_ids
    }
    return [
        memory
        for memory in memories
        if not (
            memory.provenance
            and memory.provenance.message_ids
            and superseded_ids.issuperset(memory.provenance.message_ids)
            and find_end_of_validity(memory) is not None
        )
    ]


Expected = str | Sequence[str]
"""The key of a memory, a text that a memory contains, or a list of keys and texts."""


class CheckedQuestion(NamedTuple):
    """A question tested with `check_recall`, and the rank of each memory that it should recall.

    Attributes:
        question: The question.
        expected: The keys or texts of the expected memories.
        ranks: The rank of each expected memory, from 1, or None if it was not recalled.
        recall: The share of the expected memories that was recalled.
    """

    question: str
    expected: Sequence[str]
    ranks: list[int | None]
    recall: float

    def __str__(self) -> str:
        ranks = ", ".join(str(rank or "-") for rank in self.ranks)
        return f"{ranks:>4}  {self.question} -> {' and '.join(self.expected)}"


class RecallReport(NamedTuple):
    """The result of `check_recall`. `str(report)` has one line per question.

    Attributes:
        questions: The questions.
        limit: The number of top-ranked memories that count as recalled.
        recall: The mean of the questions' recall.
        mrr: The mean, over the questions, of 1 / rank of the expected memory that ranks highest. A
            question that recalls no expected memory counts as 0.
        missed: The questions that did not recall all expected memories.
    """

    questions: list[CheckedQuestion]
    limit: int
    recall: float
    mrr: float
    missed: list[CheckedQuestion]

    def __str__(self) -> str:
        total, right = len(self.questions), len(self.questions) - len(self.missed)
        measures = f"recall@{self.limit} {self.recall:.3f}, MRR {self.mrr:.3f}"
        last = f"{measures}: expected memories recalled for {right} of {total} questions"
        return "\n".join([*map(str, self.questions), last])


def check_recall(
    questions: Mapping[str, Expected] | Iterable[tuple[str, Expected]],
    *,
    store: BaseStore | None = None,
    config: RunnableConfig | None = None,
    namespace: Labels = NAMESPACE,
    limit: int = SEARCH_LIMIT,
    min_score: float | None = None,
) -> RecallReport:
    """Recall memories for test questions, and report the ranks of the expected memories.

    Recalling memories for a test does not refresh their time to live.

    Args:
        questions: The questions, each with the key of the memory that it should recall, a text that
            this memory contains, or a list of both. Case and spaces of a text are ignored.
        store: See `recall`.
        config: See `recall`.
        namespace: See `recall`.
        limit: The number of top-ranked memories that count as recalled.
        min_score: See `recall`.

    Raises:
        ConfigurationError: The questions are not pairs, or there are none.
    """
    search = MemorySearch(namespace, None, limit, None, min_score)
    adapter, checked_questions = get_adapter(store), []
    store_without_refresh: BaseStore = (
        adapter.store.without_refresh() if isinstance(adapter.store, Store) else adapter.store
    )

    def is_key(text: str) -> bool:
        """Return whether a text is the key of a stored memory."""
        # `get` also raises InvalidNamespace for an invalid key. In this case, `text` cannot be the
        # key of a stored memory.
        with suppress(InvalidNamespace):
            return any(
                run_operation(adapter.get(namespace, text))
                for namespace in search.list_searched_namespaces(config)
            )
        return False

    for question, expected in _validate_questions_with_expected_texts(questions):
        result = run_operation(search.find_memories(question, store_without_refresh, config))
        memories, ranks = result.memories, list[int | None]()
        for text in expected:
            by_key = is_key(text)
            is_expected = [
                memory.key == text if by_key else _contains_text(memory, text)
                for memory in memories
            ]
            ranks.append(is_expected.index(True) + 1 if any(is_expected) else None)
        checked_questions.append(
            CheckedQuestion(question, expected, ranks, 1 - ranks.count(None) / len(ranks))
        )
    recalled = fmean(checked_question.recall for checked_question in checked_questions)
    mrr = fmean(
        max(1 / rank if rank else 0.0 for rank in checked_question.ranks)
        for checked_question in checked_questions
    )
    return RecallReport(
        checked_questions,
        limit,
        recalled,
        mrr,
        [checked_question for checked_question in checked_questions if checked_question.recall < 1],
    )


def _validate_questions_with_expected_texts(questions: Any) -> list[tuple[str, Sequence[str]]]:
    """Validate the questions, and return (question, list of expected keys or texts) tuples."""
    expectation = "expected at least one pair like ('Who lives in Ghent?', 'Ann')"
    pairs: list[tuple[str, Sequence[str]]] = []
    for pair in questions.items() if isinstance(questions, Mapping) else questions:
        question, expected = pair if isinstance(pair, tuple | list) and len(pair) == 2 else ("", "")
        expected_texts = expected if isinstance(expected, list | tuple) else [expected]
        if not expected_texts or not all(
            isinstance(e, str) and e.strip() for e in (question, *expected_texts)
        ):
            raise ConfigurationError(f"questions[{len(pairs)}] is {pair!r:.80}; {expectation}")
        pairs.append((question, expected_texts))
    if not pairs:
        raise ConfigurationError(f"the argument 'questions' is empty; {expectation}")
    return pairs


def _contains_text(memory: Memory, text: str) -> bool:
    """Return whether a memory contains a text, ignoring case and repeated whitespace."""
    return " ".join(text.casefold().split()) in " ".join(memory.text.casefold().split())

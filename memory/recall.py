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
from perdure.memory.options import check_instance, check_min_score, check_whole_number
from perdure.memory.periods import Period
from perdure.memory.quotation import render_section, select_fitting_indices_and_count_tokens
from perdure.memory.records import (
    TURN,
    Memory,
    StoreAdapter,
    fill_namespaces,
    find_end_of_validity,
    get_adapter,
    is_below_min_score,
    render_memory_line,
)
from perdure.memory.repeated_questions import is_same_as_query, rank_answers_first_and_count_answers
from perdure.memory.run_config import Template
from perdure.memory.sameness import is_text_stating_same_fact
from perdure.memory.tokens import token_counter
from perdure.settings import SEARCH_LIMIT, SHOWN_LIMIT
from perdure.stores.base import Namespace
from perdure.stores.normal_form import normalize_text_for_comparison
from perdure.stores.store import Store

# The default namespace of memories.
NAMESPACE: Final = ("memories", "{user_id}")
Labels = Sequence[str] | Sequence[Sequence[str]]
"""The labels of a namespace, or a list of the labels of several namespaces; see `Template`."""
_MAX_REJECTED_FACTOR: Final = 3
"""Limit for the additional memories that the first search reads to replace rejected memories.

The limit is this factor times the number of memories that the search has to return.
"""
# Minimum number of spare memories that a search reads beyond its limit, to make up for duplicates
# that are removed later.
_MIN_SPARE: Final = 5
# Factor by which the limit grows each time a search is repeated because it found too few usable
# memories.
_DEPTH_FACTOR: Final = 4
# Maximum number of comparisons per memory when rankings are merged and duplicates are removed. Each
# memory is compared only with the first memories that were added to the merged list.
_MAX_COMPARED: Final = 100
# The constant k of reciprocal rank fusion, which gives rank r the weight 1 / (k + r). The larger k
# is, the smaller the advantage of high ranks over low ranks.
_FUSION_CONSTANT: Final = 60
# Maximum number of characters of a memory to show in an explanation. Longer texts are truncated.
_MAX_EXPLAINED_CHARS: Final = 120
# Minimum absolute value of the score components that an explanation shows. Smaller components are
# omitted.
_MIN_EXPLAINED_PART: Final = 0.005
# Sort date for memories that have no date. Memories are sorted newest first, so memories with this
# date come last.
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
        For each memory, one line shows its score, key and text, and a second line shows the parts
        of the score.
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


def resolve_namespace_or_namespaces_option(
    namespace: Labels, namespaces: Sequence[Sequence[str]] | None
) -> Labels:
    """Return the option `namespaces`, or the option `namespace` if `namespaces` is None.

    Raises:
        ConfigurationError: Both options are given, or `namespaces` is not a list of lists of
            labels.
    """
    if namespaces is None:
        return namespace
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
            "the arguments 'namespace' and 'namespaces' cannot be combined; remove 'namespace', "
            "and add its namespace to the list 'namespaces'"
        )
    return namespaces


def wrap_single_namespace_in_list(namespace_or_list: Labels) -> Sequence[Any]:
    """Wrap a single namespace in a list, and return a list of namespaces unchanged.

    If `namespace_or_list` is a single namespace, the result is `[namespace]`.
    """
    is_list_of_lists = isinstance(namespace_or_list, list | tuple) and not any(
        isinstance(labels, str) for labels in namespace_or_list
    )
    return namespace_or_list if is_list_of_lists and namespace_or_list else [namespace_or_list]


class MemorySearch:
    """A reusable search for memories.

    The search options are passed to the constructor and apply to every query.

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
        namespace = resolve_namespace_or_namespaces_option(namespace, namespaces)
        label_lists = wrap_single_namespace_in_list(namespace)
        self._templates = [Template(labels, shared=True) for labels in label_lists]
        expected = "a list of kinds, like ['fact'], or None"
        self._kinds = (
            None if kinds is None else check_instance("kinds", kinds, (list, tuple), expected)
        )
        self._limit = check_whole_number("limit", limit, 1)
        self.max_tokens = (
            None if max_tokens is None else check_whole_number("max_tokens", max_tokens, 1)
        )
        self._min_score = check_min_score(min_score)
        self._all_below = (
            None if all_below is None else check_whole_number("all_below", all_below, 1)
        )
        self._counter = token_counter(None)

    def list_searched_namespaces(self, config: RunnableConfig | None) -> list[Namespace]:
        """Return the namespaces that a run searches, except those nested within another one.

        A namespace is nested if another namespace in the list is a prefix of it. Searching the
        outer namespace also finds the memories in the nested one.

        The user's and the teams' namespaces are left out if memory is disabled for the run.
        """
        templates = [
            template
            for template in self._templates
            if not template.is_memory_disabled_for_run(config)
        ]
        namespaces = dict.fromkeys(
            namespace for template in templates for namespace in fill_namespaces(template, config)
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
        accepts: Callable[[Memory], bool] = lambda memory: True,
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
            accepts: A function that returns whether the result may include a memory.
            max_tokens: The maximum number of tokens, or None to use this search's maximum.
            expected_rejections: About how many memories `accepts` will reject. The first search
                reads additional memories that replace the rejected memories.
            explain: Whether the result also includes memories below the minimum score.
        """
        check_instance("query", query, str, "text")
        adapter, prefixes = (
            get_adapter(store, *self._templates),
            self.list_searched_namespaces(config),
        )
        await adapter.record_templates()
        min_score = adapter.get_min_score_or_default(self._min_score)
        if not query.strip() or not prefixes:
            return RecallResult([], min_score=min_score)
        options: dict[str, Any] = {"query": query, "as_of": as_of, "explain": True}
        if during is not None:
            options["during"] = during
        options["min_score"] = 0.0 if explain else min_score
        all_memories = await self._read_all_memories_if_few(adapter, prefixes, as_of, accepts)
        limit = max(self._limit, len(all_memories))
        if all_memories:
            options["min_score"] = min_score = 0.0
        rankings, below_rankings = [], []
        for prefix in prefixes:
            ranking = await self._rank_memories_in_namespace(
                adapter, prefix, options, accepts, expected_rejections, min_score, limit
            )
            rankings.append(
                [pair for pair in ranking if not is_below_min_score(pair[1], min_score)]
            )
            below_rankings.append(
                [pair for pair in ranking if is_below_min_score(pair[1], min_score)]
            )
        memories = merge_rankings_by_reciprocal_rank(
            [*rankings, _rank_memories_absent_from_rankings(all_memories, rankings)], limit
        )
        # The results from each namespace already rank answers before turns that only repeat the
        # question. Merging the results from several namespaces can undo this order, so rerank the
        # merged list.
        if len(prefixes) > 1:
            ordered, _ = rank_answers_first_and_count_answers([*enumerate(memories, 1)], query)
            memories = [memory for _, memory in ordered]
        texts = {
            normalize_text_for_comparison(memory.text)
            for ranking in rankings
            for _, memory in ranking
        }
        below = [
            memory
            for memory in merge_rankings_by_reciprocal_rank(below_rankings, limit)
            if normalize_text_for_comparison(memory.text) not in texts
        ]
        lines = [render_memory_line(memory) for memory in memories]
        fitting_numbers, tokens = select_fitting_indices_and_count_tokens(
            "memories", lines, max_tokens or self.max_tokens, self._counter
        )
        fitting_memories = [memories[number] for number in fitting_numbers]
        left_out = len(memories) - len(fitting_numbers)
        fitting_lines = tuple(lines[number] for number in fitting_numbers)
        if as_of is None:
            await adapter.refresh_time_to_live(fitting_memories)
        return RecallResult(fitting_memories, tokens, left_out, fitting_lines, min_score, below)

    async def _read_all_memories_if_few(
        self,
        adapter: StoreAdapter,
        prefixes: Sequence[Namespace],
        as_of: datetime | None,
        accepts: Callable[[Memory], bool],
    ) -> list[Memory]:
        """Return all memories in the namespaces if there are fewer than `all_below`, or else [].

        Memories of other kinds and memories for which `accepts` returns False count towards
        `all_below`, but are not returned.
        """
        few: list[Memory] = []
        for prefix in prefixes if self._all_below is not None else ():
            few += await adapter.search(prefix, limit=self._all_below, as_of=as_of)
        if self._all_below is None or len(few) >= self._all_below:
            return []
        kinds = self._kinds
        return [m for m in few if (kinds is None or m.kind in kinds) and accepts(m)]

    async def _rank_memories_in_namespace(
        self,
        adapter: StoreAdapter,
        prefix: Namespace,
        options: dict[str, Any],
        accepts: Callable[[Memory], bool],
        expected_rejections: int,
        min_score: float,
        limit: int,
    ) -> list[tuple[int, Memory]]:
        """Return (rank, memory) pairs for the best-matching memories of one namespace.

        The list may be longer than `limit`, because the caller removes duplicates. Only memories
        for which `accepts` returns True are returned. Memories that reach the minimum score come
        before memories that do not.
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
                and accepts(memory)
                and not is_same_as_query(memory, query)
            ]
            above = [pair for pair in candidates if not is_below_min_score(pair[1], min_score)]
            ordered, answers = rank_answers_first_and_count_answers(above, query)
            if (
                answers >= min_answers
                or sum(not is_below_min_score(m, min_score) for m in memories) < depth
            ):
                below = [pair for pair in candidates if is_below_min_score(pair[1], min_score)]
                return [*ordered, *below][:max_results]
            depth *= _DEPTH_FACTOR
            # Filtering by kind is slow because the store has to read the value of every memory, so
            # only repeated searches use the filter. Searches in stores from other libraries never
            # use the filter, because these stores do not support the `$in` operator.
            if adapter.versioned and self._kinds is not None:
                options = {**options, "filter": {"kind": {"$in": list(self._kinds)}}}


def _rank_memories_absent_from_rankings(
    memories: Sequence[Memory], rankings: Sequence[Sequence[tuple[int, Memory]]]
) -> list[tuple[int, Memory]]:
    """Assign a rank to each memory that appears in no ranking.

    The returned list contains (rank, memory) pairs. The assigned ranks continue the numbering after
    the largest rank in `rankings`.
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

    The node `use_memories` performs the same search as `recall` before a model is called.

    The store's search ranks the memories within each namespace. A turn is a memory that contains a
    message. All other memories count as extracted memories. The ranks of extracted memories are
    halved, so that extracted memories tend to come before turns. A memory that was extracted from a
    turn always ranks above that turn. Results from multiple namespaces are merged by rank. If
    several memories state the same fact, only the best one is returned. A turn that merely asks the
    same question as the query ranks below a statement that answers it.

    A turn is not returned if its text equals the query, or if the search ranks it below a memory
    that was extracted from this turn alone. A superseded memory is not returned if its successor is
    recalled. A superseded memory whose successor is not recalled is shown with the date on which it
    stopped being true.

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


recall, arecall = build_blocking_function(_recall), build_async_function(_recall)


def merge_rankings_by_reciprocal_rank(
    rankings: Sequence[Sequence[tuple[int, Memory]]], limit: int
) -> list[Memory]:
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
    numbers: dict[str, int] = {}
    for ranking_index, ranking in enumerate(rankings):
        for rank, memory in ranking:
            text = normalize_text_for_comparison(memory.text)
            if text not in numbers:
                first = enumerate(entries[:_MAX_COMPARED])
                similar_numbers = (
                    n
                    for n, (representative, _) in first
                    if is_text_stating_same_fact(representative.text, memory.text)
                )
                numbers[text] = next(similar_numbers, len(entries))
            number = numbers[text]
            if number == len(entries):
                entries.append((memory, {}))
            representative, ranks = entries[number]
            better = rank < min(ranks.values(), default=rank)
            entries[number] = memory if better else representative, {ranking_index: rank, **ranks}
    sorted_entries = sorted(entries, key=lambda entry: _get_date(entry[0]), reverse=True)
    sorted_entries.sort(
        key=lambda entry: sum(1 / (_FUSION_CONSTANT + rank) for rank in entry[1].values()),
        reverse=True,
    )
    memories = _rank_facts_first(
        _remove_turns_ranked_below_extracted_memories([memory for memory, _ in sorted_entries])
    )
    return _remove_superseded(memories, limit)[:limit]


def _rank_facts_first(memories: Sequence[Memory]) -> list[Memory]:
    """Move extracted memories ahead of the turns from which they were extracted.

    In addition, the rank of each extracted memory is halved. Every memory that is not a turn counts
    as an extracted memory.
    """
    turns = {
        message: rank
        for rank, memory in reversed([*enumerate(memories, 1)])
        if memory.kind == TURN
        for message in _list_source_messages(memory)
    }

    def get_sort_key(rank: int, memory: Memory) -> tuple[float, bool]:
        """Return a memory's sort key, the tuple (adjusted rank, is_turn)."""
        if memory.kind == TURN:
            return rank, True
        turn_ranks = [
            turns[message] - 0.5 for message in _list_source_messages(memory) if message in turns
        ]
        return min([rank / 2, *turn_ranks]), False

    sort_keys = {id(memory): get_sort_key(rank, memory) for rank, memory in enumerate(memories, 1)}
    return sorted(memories, key=lambda memory: sort_keys[id(memory)])


def _list_source_messages(memory: Memory) -> list[tuple[str | None, str]]:
    """Return (thread id, message id) for each message from which a memory was created."""
    source = memory.provenance
    return [(source.thread_id, id) for id in source.message_ids] if source else []


def _remove_turns_ranked_below_extracted_memories(memories: Sequence[Memory]) -> list[Memory]:
    """Remove each turn that ranks below a memory that was extracted from that turn alone.

    A memory that was extracted from a single turn has the same source messages as that turn.
    """
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
    """Remove memories that were superseded by one of the first `limit` memories."""
    superseded_ids = {
        message_id
        for memory in memories[:limit]
        for previous in memory.previous
        for message_id in previous.message_ids
    }

    def is_replaced(memory: Memory) -> bool:
        """Return whether a memory was superseded and its successor is among the recalled memories.

        A memory that is no longer true counts as replaced if all of its source messages are also
        sources of the recalled memories' previous texts.
        """
        ids = memory.provenance.message_ids if memory.provenance else ()
        return (
            bool(ids)
            and find_end_of_validity(memory) is not None
            and superseded_ids.issuperset(ids)
        )

    return [memory for memory in memories if not is_replaced(memory)]


def _get_date(memory: Memory) -> datetime:
    """Return the timestamp by which memories are sorted."""
    return (memory.provenance and memory.provenance.at) or memory.valid_from or _EARLIEST


Expected = str | Sequence[str]
"""The key of a memory, a text that a memory contains, or a list of keys and texts."""


class CheckedQuestion(NamedTuple):
    """A question that was tested with `check_recall`, with the ranks of the expected memories.

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
    given_store = adapter.store
    store_without_refresh: BaseStore = (
        given_store.without_refresh() if isinstance(given_store, Store) else given_store
    )

    def is_key(text: str) -> bool:
        """Return whether a text is the key of a stored memory."""
        # `get` raises InvalidNamespace if the text is not a valid key.
        with suppress(InvalidNamespace):
            return any(
                run_operation(adapter.get(namespace, text))
                for namespace in search.list_searched_namespaces(config)
            )
        return False

    for question, expected in _validate_questions_with_expected_texts(questions):
        memories, ranks = (
            run_operation(search.find_memories(question, store_without_refresh, config)).memories,
            list[int | None](),
        )
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

"""Recall: the memories that answer a query, best first, each once, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.effects import awaiting, blocking, run
from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.memory.options import check_instance, check_min_score, check_whole_number
from perdure.memory.periods import Period
from perdure.memory.quotation import fit_section, render_section
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
from perdure.memory.repeated_questions import is_the_query, rank_answers_first
from perdure.memory.run_config import Template
from perdure.memory.sameness import is_equivalent_text
from perdure.memory.tokens import token_counter
from perdure.settings import SEARCH_LIMIT, SHOWN_LIMIT
from perdure.stores.base import Namespace
from perdure.stores.normal_form import normalize_text
from perdure.stores.store import Store

NAMESPACE: Final = ("memories", "{user_id}")  # the namespace of memories, unless another is given
Labels = Sequence[str] | Sequence[Sequence[str]]
"""The labels of a namespace, or a list of the labels of several; see `Template`."""
_MAX_REJECTED_FACTOR: Final = (
    3  # times the memories that are wanted, more are read in the first search
)
_MIN_SPARE: Final = 5  # memories that are looked at beyond the limit: some repeat others
_DEPTH_FACTOR: Final = 4  # times as many memories are looked at if too many are left out
_MAX_COMPARED: Final = 100  # memories, the first, of which others may be near duplicates
_FUSION_CONSTANT: Final = 60  # of reciprocal rank fusion: how little the first ranks stand out
_MAX_EXPLAINED_CHARS: Final = 120  # characters of a memory in an explanation
_MIN_EXPLAINED_PART: Final = 0.005  # the least part of a score that is told
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class RecallResult:
    """The memories that were recalled. As text it is a section of quoted data for a model.

    `explain()` is for a person: why these, and what was below the floor.
    """

    memories: list[Memory]  # best first; `memory.parts` are the parts of a score
    tokens: int = 0  # of the text
    left_out: int = 0  # how many more were found that did not fit into the budget
    lines: tuple[str, ...] = field(default=(), repr=False)  # with speaker, date and thread
    min_score: float = 0.0  # the lowest score of an answer; 0: any
    below_min_score: list[Memory] = field(
        default_factory=list
    )  # with `explain`: the best under the floor

    def __str__(self) -> str:
        return render_section("memories", self.lines) if self.lines else ""

    def explain(self) -> str:
        """What was recalled and, of a recall with `explain=True`, what was below the floor.

        Each memory has a line with its score, key and text, and one with the parts of the score.
        """
        floor = f"the floor is {self.min_score:.2f}" if self.min_score else "there is no floor"
        lines = [f"recalled, best first ({floor}):", *map(_explain_memory, self.memories)]
        if not self.memories:
            lines = [f"nothing was recalled ({floor})"]
        if self.left_out:
            lines.append(f"{self.left_out} more did not fit into the budget of tokens")
        if self.below_min_score:
            lines += ["below the floor, best first:", *map(_explain_memory, self.below_min_score)]
        return "\n".join(lines)

    def describe_nearest(self) -> str:
        """That memories are below the floor, in words; "" if there are none."""
        number = len(self.below_min_score)
        which = "memory is" if number == 1 else f"{number} memories are"
        return f"the nearest {which} below the floor {self.min_score:.2f}" if number else ""


def _explain_memory(memory: Memory) -> str:
    score = "   -" if memory.score is None else f"{memory.score:.2f}"
    parts = sorted((memory.parts or {}).items(), key=lambda part: -abs(part[1]))
    why = ", ".join(
        f"{name} {part:+.2f}" for name, part in parts if abs(part) >= _MIN_EXPLAINED_PART
    )
    text = " ".join(memory.text.split())
    text = text if len(text) <= _MAX_EXPLAINED_CHARS else f"{text[:_MAX_EXPLAINED_CHARS]}…"
    return f"  {score}  {memory.key}: {text}" + (f"\n        {why}" if why else "")


def choose_labels(namespace: Labels, namespaces: Sequence[Sequence[str]] | None) -> Labels:
    """Return the labels that one of two options names.

    Raises:
        ConfigurationError: Both are given, or `namespaces` has no list of labels.
    """
    if namespaces is None:
        return namespace
    is_list_of_lists = isinstance(namespaces, list | tuple) and all(
        isinstance(labels, list | tuple) for labels in namespaces
    )
    if not is_list_of_lists or not namespaces or tuple(namespace) != NAMESPACE:
        raise ConfigurationError(
            f"namespaces is {namespaces!r:.80}; expected a list of the labels of several, like "
            "[('memories', '{user_id}'), ('teams', '{team}')], in place of namespace"
        )
    return namespaces


def list_namespace_labels(namespace: Labels) -> Sequence[Any]:
    """Return the labels of each namespace."""
    is_list_of_lists = isinstance(namespace, list | tuple) and not any(
        isinstance(labels, str) for labels in namespace
    )
    return namespace if is_list_of_lists and namespace else [namespace]


class MemorySearch:
    """A search for memories; see `recall` for its options."""

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
        namespace = choose_labels(namespace, namespaces)
        label_lists = list_namespace_labels(namespace)
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

    def fill_namespaces(self, config: RunnableConfig | None) -> list[Namespace]:
        """The namespaces of a run, without those under another of them.

        In a run that has no memory, those of its user and teams are left out.
        """
        templates = [template for template in self._templates if not template.lacks_memory(config)]
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
        """The memories that answer a query and are accepted, in `max_tokens` or its own budget.

        About `rejected` memories will not be accepted, so more are read at once. With `explain`
        the result has those that were found below the min_score, too.
        """
        check_instance("query", query, str, "text")
        adapter, prefixes = get_adapter(store, *self._templates), self.fill_namespaces(config)
        await adapter.record_templates()
        min_score = adapter.resolve_min_score(self._min_score)
        if not query.strip() or not prefixes:
            return RecallResult([], min_score=min_score)
        options: dict[str, Any] = {"query": query, "as_of": as_of, "explain": True}
        if during is not None:
            options["during"] = during
        options["min_score"] = 0.0 if explain else min_score
        all_memories = await self._read_few(adapter, prefixes, as_of, accepts)
        limit = max(self._limit, len(all_memories))
        if all_memories:
            options["min_score"] = min_score = 0.0
        rankings, below_rankings = [], []
        for prefix in prefixes:
            ranking = await self._rank_namespace(
                adapter, prefix, options, accepts, expected_rejections, min_score, limit
            )
            rankings.append(
                [pair for pair in ranking if not is_below_min_score(pair[1], min_score)]
            )
            below_rankings.append(
                [pair for pair in ranking if is_below_min_score(pair[1], min_score)]
            )
        memories = merge_rankings([*rankings, _rank_remaining(all_memories, rankings)], limit)
        if len(prefixes) > 1:  # a question in one namespace must rank behind an answer in another
            ordered, _ = rank_answers_first([*enumerate(memories, 1)], query)
            memories = [memory for _, memory in ordered]
        texts = {normalize_text(memory.text) for ranking in rankings for _, memory in ranking}
        below = [
            each
            for each in merge_rankings(below_rankings, limit)
            if normalize_text(each.text) not in texts
        ]
        lines = [render_memory_line(memory) for memory in memories]
        fitting_numbers, tokens = fit_section(
            "memories", lines, max_tokens or self.max_tokens, self._counter
        )
        fitting_memories, left_out = (
            [memories[number] for number in fitting_numbers],
            len(memories) - len(fitting_numbers),
        )
        fitting_lines = tuple(lines[number] for number in fitting_numbers)
        if as_of is None:
            await adapter.keep_alive(fitting_memories)
        return RecallResult(fitting_memories, tokens, left_out, fitting_lines, min_score, below)

    async def _read_few(
        self,
        adapter: StoreAdapter,
        prefixes: Sequence[Namespace],
        as_of: datetime | None,
        accepts: Callable[[Memory], bool],
    ) -> list[Memory]:
        """Return all memories of the namespaces if there are fewer than `all_below`, else none."""
        few: list[Memory] = []
        for prefix in prefixes if self._all_below is not None else ():
            few += await adapter.search(prefix, limit=self._all_below, as_of=as_of)
        if self._all_below is None or len(few) >= self._all_below:
            return []
        kinds = self._kinds
        return [m for m in few if (kinds is None or m.kind in kinds) and accepts(m)]

    async def _rank_namespace(
        self,
        adapter: StoreAdapter,
        prefix: Namespace,
        options: dict[str, Any],
        accepts: Callable[[Memory], bool],
        expected_rejections: int,
        min_score: float,
        limit: int,
    ) -> list[tuple[int, Memory]]:
        """Memories of one namespace with their ranks, more than the limit: some repeat others."""
        max_results = limit + max(limit // 2, _MIN_SPARE)
        depth = max_results + min(expected_rejections, _MAX_REJECTED_FACTOR * max_results)
        query = options["query"]
        # what is not among so many is hardly an answer; but of a rare kind it may be
        min_answers = limit if self._kinds is not None else limit // 2
        while True:
            memories = await adapter.search(prefix, limit=depth, **options)
            candidates = [
                (rank, memory)
                for rank, memory in enumerate(memories, 1)
                if (self._kinds is None or memory.kind in self._kinds)
                and accepts(memory)
                and not is_the_query(memory, query)
            ]
            above = [pair for pair in candidates if not is_below_min_score(pair[1], min_score)]
            ordered, answers = rank_answers_first(above, query)
            if (
                answers >= min_answers
                or sum(not is_below_min_score(m, min_score) for m in memories) < depth
            ):
                below = [pair for pair in candidates if is_below_min_score(pair[1], min_score)]
                return [*ordered, *below][:max_results]
            depth *= _DEPTH_FACTOR
            # perdure's filters are exact, but read every value; those of other stores know no $in
            if adapter.versioned and self._kinds is not None:
                options = {**options, "filter": {"kind": {"$in": list(self._kinds)}}}


def _rank_remaining(
    memories: Sequence[Memory], rankings: Sequence[Sequence[tuple[int, Memory]]]
) -> list[tuple[int, Memory]]:
    """Return the memories that are in no ranking, with ranks behind those of all rankings."""
    ranked = {(m.namespace, m.key) for ranking in rankings for _, m in ranking}
    last = max((rank for ranking in rankings for rank, _ in ranking), default=0)
    rest = [memory for memory in memories if (memory.namespace, memory.key) not in ranked]
    return list(enumerate(rest, last + 1))


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
    """The memories that answer a query. `use_memories` does the same for a model's node.

    In one namespace the order is that of the store's search, but a memory that was extracted or
    written by a tool counts as at half its rank, and comes before the turns that it was made from.
    The results of several are merged by rank. What says the same comes once. A turn that only asks
    what the query asks ranks behind a statement that answers it. A turn with exactly the text of
    the query is left out. A memory that was superseded is left out if the one that superseded it is
    recalled, else it is shown with the date until which it held.

    Args:
        query: In the user's words.
        store: Any langgraph store; None: that of the graph.
        config: Of the run: it fills in the namespace; None: within a node, that of its run.
        namespace: Where to look; a list of namespaces for several. See `Template`.
        kinds: Only memories of these kinds.
        limit: How many memories at most.
        max_tokens: The tokens that they may take as the model is shown them; None: any number.
        min_score: The lowest score of an answer, 0 for any; None: `perdure.settings.MIN_SCORE`, and
            for a store that is not perdure's, whose scores mean something else, any.
        as_of: Recall what was remembered at that moment; only of a perdure store.
        during: The period, start and end, that the query is about, such as last week. Memories from
            it rank higher; others can still be recalled. This has no effect in other stores than
            those of perdure.
        explain: Whether the result has the memories that were found below the floor, in `below`,
            `limit` of them at most.
        namespaces: Several namespaces, in place of `namespace`. `("teams", "{team}")` stands for
            those of all teams of the run; without a team it is left out.
    """
    search = MemorySearch(namespace, kinds, limit, max_tokens, min_score, namespaces=namespaces)
    return await search.find_memories(
        query, store, config, as_of=as_of, during=during, explain=explain
    )


recall, arecall = blocking(_recall), awaiting(_recall)


def merge_rankings(rankings: Sequence[Sequence[tuple[int, Memory]]], limit: int) -> list[Memory]:
    """Rankings as one, best first, ties newest first, without repetitions.

    By reciprocal rank fusion, whatever a store's scores mean: Cormack, Clarke and Buettcher (SIGIR
    2009).
    """
    entries: list[tuple[Memory, dict[int, int]]] = []  # with the rank in each search
    numbers: dict[str, int] = {}  # of the places, by text
    for search, ranking in enumerate(rankings):
        for rank, memory in ranking:
            text = normalize_text(memory.text)
            if text not in numbers:
                first = enumerate(entries[:_MAX_COMPARED])
                similar_numbers = (
                    n
                    for n, (representative, _) in first
                    if is_equivalent_text(representative.text, memory.text)
                )
                numbers[text] = next(similar_numbers, len(entries))
            number = numbers[text]
            if number == len(entries):
                entries.append((memory, {}))
            representative, ranks = entries[number]
            better = rank < min(ranks.values(), default=rank)
            entries[number] = memory if better else representative, {search: rank, **ranks}
    sorted_entries = sorted(entries, key=lambda entry: _get_date(entry[0]), reverse=True)
    sorted_entries.sort(
        key=lambda entry: sum(1 / (_FUSION_CONSTANT + rank) for rank in entry[1].values()),
        reverse=True,
    )
    memories = _rank_facts_first(_remove_source_turns([memory for memory, _ in sorted_entries]))
    return _remove_superseded(memories, limit)[:limit]


def _rank_facts_first(memories: Sequence[Memory]) -> list[Memory]:
    """The same with what is no turn at half its rank, and before the turns it was made from."""
    turns = {
        message: rank
        for rank, memory in reversed([*enumerate(memories, 1)])
        if memory.kind == TURN
        for message in _list_source_messages(memory)
    }

    def get_sort_key(rank: int, memory: Memory) -> tuple[float, bool]:
        if memory.kind == TURN:
            return rank, True
        before = [
            turns[message] - 0.5 for message in _list_source_messages(memory) if message in turns
        ]
        return min([rank / 2, *before]), False

    sort_keys = {id(memory): get_sort_key(rank, memory) for rank, memory in enumerate(memories, 1)}
    return sorted(memories, key=lambda memory: sort_keys[id(memory)])


def _list_source_messages(memory: Memory) -> list[tuple[str | None, str]]:
    """The messages that a memory was made from."""
    source = memory.provenance
    return [(source.thread_id, id) for id in source.message_ids] if source else []


def _remove_source_turns(memories: Sequence[Memory]) -> list[Memory]:
    """Without turns that rank after a memory that was extracted from them alone."""
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
    """Without past memories whose successor is among the first."""
    superseded_ids = {
        id
        for memory in memories[:limit]
        for previous in memory.previous
        for id in previous.message_ids
    }

    def is_replaced(memory: Memory) -> bool:
        ids = memory.provenance.message_ids if memory.provenance else ()
        return (
            bool(ids)
            and find_end_of_validity(memory) is not None
            and superseded_ids.issuperset(ids)
        )

    return [memory for memory in memories if not is_replaced(memory)]


def _get_date(memory: Memory) -> datetime:
    return (memory.provenance and memory.provenance.at) or memory.valid_from or _EARLIEST


Expected = str | Sequence[str]
"""The key of a memory, or a text that one contains; or a list of these."""


class CheckedQuestion(NamedTuple):
    """A question and what it is to recall."""

    question: str
    expected: Sequence[str]
    ranks: list[int | None]  # of each that is expected, from 1; None: not recalled
    recall: float  # the share of them that was recalled

    def __str__(self) -> str:
        ranks = ", ".join(str(rank or "-") for rank in self.ranks)
        return f"{ranks:>4}  {self.question} -> {' and '.join(self.expected)}"


class RecallReport(NamedTuple):
    """The questions of a check with their ranks. As text it has a line for each."""

    questions: list[CheckedQuestion]
    limit: int
    recall: float  # the mean of the questions'
    mrr: float  # the mean reciprocal rank of the first expected memory
    missed: list[CheckedQuestion]  # those that did not recall all that they should

    def __str__(self) -> str:
        total, right = len(self.questions), len(self.questions) - len(self.missed)
        measures = f"recall@{self.limit} {self.recall:.3f}, MRR {self.mrr:.3f}"
        last = f"{measures}: {right} of {total} questions recall what they should"
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
    """Ask questions, and report at which rank each recalls the expected memories.

    Each comes with the key of the memory that it is to recall, or a text that this contains,
    whatever its capitals and spaces; or with a list, of which all are asked for. At most `limit`
    memories count as recalled; the other options are those of `recall`. No time to live is
    refreshed.
    """
    search = MemorySearch(namespace, None, limit, None, min_score)
    adapter, checked_questions = get_adapter(store), []
    given_store = adapter.store
    store_without_refresh: BaseStore = (
        given_store.without_refresh() if isinstance(given_store, Store) else given_store
    )

    def is_key(text: str) -> bool:
        with suppress(InvalidNamespace):  # what cannot be a key
            return any(run(adapter.get(place, text)) for place in search.fill_namespaces(config))
        return False

    for question, expected in _check_questions(questions):
        memories, ranks = (
            run(search.find_memories(question, store_without_refresh, config)).memories,
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


def _check_questions(questions: Any) -> list[tuple[str, Sequence[str]]]:
    expectation = "expected pairs like ('Who lives in Ghent?', 'Ann'), at least one"
    pairs: list[tuple[str, Sequence[str]]] = []
    for pair in questions.items() if isinstance(questions, Mapping) else questions:
        question, expected = pair if isinstance(pair, tuple | list) and len(pair) == 2 else ("", "")
        expected_texts = expected if isinstance(expected, list | tuple) else [expected]
        if not expected_texts or not all(
            isinstance(e, str) and e.strip() for e in (question, *expected_texts)
        ):
            raise ConfigurationError(f"question number {len(pairs)} is {pair!r:.80}; {expectation}")
        pairs.append((question, expected_texts))
    if not pairs:
        raise ConfigurationError(f"there are no questions; {expectation}")
    return pairs


def _contains_text(memory: Memory, text: str) -> bool:
    return " ".join(text.casefold().split()) in " ".join(memory.text.casefold().split())

"""A check of recall for your own CI: do questions recall what they should, and at which rank?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.memory.effects import run
from perdure.memory.recall import NAMESPACE, Labels, MemorySearch
from perdure.memory.records import Memory
from perdure.memory.store_adapter import adapter_of
from perdure.settings import SEARCH_LIMIT

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
) -> RecallReport:
    """Ask questions, and report at which rank each recalls the expected memories.

    Each comes with the key of the memory that it is to recall, or a text that this contains,
    whatever its capitals and spaces; or with a list, of which all are asked for. At most `limit`
    memories count as recalled; the other options are those of `recall`.
    """
    search, adapter, asked = MemorySearch(namespace, None, limit, None), adapter_of(store), []

    def is_key(text: str) -> bool:
        with suppress(InvalidNamespace):  # what cannot be a key
            return any(run(adapter.got(each, text)) for each in search.namespaces(config))
        return False

    for question, expected in _pairs(questions):
        found, ranks = run(search.found(question, store, config)).memories, list[int | None]()
        for wanted in expected:
            by_key = is_key(wanted)
            right = [each.key == wanted if by_key else _has(each, wanted) for each in found]
            ranks.append(right.index(True) + 1 if any(right) else None)
        asked.append(CheckedQuestion(question, expected, ranks, 1 - ranks.count(None) / len(ranks)))
    recalled = fmean(each.recall for each in asked)
    mrr = fmean(max(1 / rank if rank else 0.0 for rank in each.ranks) for each in asked)
    return RecallReport(asked, limit, recalled, mrr, [each for each in asked if each.recall < 1])


def _pairs(questions: Any) -> list[tuple[str, Sequence[str]]]:
    expectation = "expected pairs like ('Who lives in Ghent?', 'Ann'), at least one"
    pairs: list[tuple[str, Sequence[str]]] = []
    for pair in questions.items() if isinstance(questions, Mapping) else questions:
        question, expected = pair if isinstance(pair, tuple | list) and len(pair) == 2 else ("", "")
        several = expected if isinstance(expected, list | tuple) else [expected]
        if not several or not all(isinstance(e, str) and e.strip() for e in (question, *several)):
            raise ConfigurationError(f"question number {len(pairs)} is {pair!r:.80}; {expectation}")
        pairs.append((question, several))
    if not pairs:
        raise ConfigurationError(f"there are no questions; {expectation}")
    return pairs


def _has(memory: Memory, text: str) -> bool:
    return " ".join(text.casefold().split()) in " ".join(memory.text.casefold().split())

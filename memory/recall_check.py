"""A check of recall for your own CI: do questions recall what they should, and at which rank?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError, InvalidNamespace, NotRecalled
from perdure.memory.effects import Effects, awaiting, blocking
from perdure.memory.options import number
from perdure.memory.recall import NAMESPACE, Labels, MemorySearch
from perdure.memory.records import Memory
from perdure.memory.store_adapter import StoreAdapter, adapter_of
from perdure.stores.base import Namespace

_FORM: Final = "expected pairs like ('Who lives in Ghent?', 'Ann'), at least one"
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

    def assert_recalled(self, minimum: float = 0.9) -> None:
        """Raise NotRecalled, with the report, unless `recall` is at least this share, 0 to 1."""
        if self.recall < number("minimum", minimum, 0, 1):
            raise NotRecalled(f"less is recalled than {minimum}:\n{self}")

    def __str__(self) -> str:
        total, right = len(self.questions), len(self.questions) - len(self.missed)
        measures = f"recall@{self.limit} {self.recall:.3f}, MRR {self.mrr:.3f}"
        last = f"{measures}: {right} of {total} questions recall what they should"
        return "\n".join([*map(str, self.questions), last])


def _check_recall(
    questions: Mapping[str, Expected] | Iterable[tuple[str, Expected]],
    *,
    store: BaseStore | None = None,
    config: RunnableConfig | None = None,
    namespace: Labels = NAMESPACE,
    limit: int = 10,
) -> Effects[RecallReport]:
    """Ask questions, and report at which rank each recalls the expected memories.

    `check_recall(questions, store=store, config=config).assert_recalled(0.9)`

    Each comes with the key of the memory that it is to recall, or a text that this contains,
    whatever its capitals and spaces; or with a list, of which all are asked for. At most `limit`
    memories count as recalled; the other options are those of `recall`.
    """
    search, adapter, asked = MemorySearch(namespace, None, limit, None), adapter_of(store), []
    for question, expected in _pairs(questions):
        found = (yield from search.found(question, store, config)).memories
        ranks: list[int | None] = []
        for wanted in expected:
            is_key = yield from _is_key(adapter, search.namespaces(config), wanted)
            right = [each.key == wanted if is_key else _has(each, wanted) for each in found]
            ranks.append(right.index(True) + 1 if any(right) else None)
        asked.append(CheckedQuestion(question, expected, ranks, 1 - ranks.count(None) / len(ranks)))
    recalled = fmean(each.recall for each in asked)
    mrr = fmean(max(1 / rank if rank else 0.0 for rank in each.ranks) for each in asked)
    return RecallReport(asked, limit, recalled, mrr, [each for each in asked if each.recall < 1])


check_recall = blocking(_check_recall)
acheck_recall = awaiting(_check_recall)


def _pairs(questions: Any) -> list[tuple[str, Sequence[str]]]:
    pairs: list[tuple[str, Sequence[str]]] = []
    for pair in questions.items() if isinstance(questions, Mapping) else questions:
        question, expected = pair if isinstance(pair, tuple | list) and len(pair) == 2 else ("", "")
        several = expected if isinstance(expected, list | tuple) else [expected]
        if not several or not all(isinstance(e, str) and e.strip() for e in (question, *several)):
            raise ConfigurationError(f"question number {len(pairs)} is {pair!r:.80}; {_FORM}")
        pairs.append((question, several))
    if not pairs:
        raise ConfigurationError(f"there are no questions; {_FORM}")
    return pairs


def _is_key(adapter: StoreAdapter, namespaces: Sequence[Namespace], key: str) -> Effects[bool]:
    with suppress(InvalidNamespace):  # what cannot be a key
        for namespace in namespaces:
            if (yield from adapter.got(namespace, key)) is not None:
                return True
    return False


def _has(memory: Memory, text: str) -> bool:
    return " ".join(text.casefold().split()) in " ".join(memory.text.casefold().split())

"""A check of recall for your own CI: do questions recall what they should, and at which rank?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError, InvalidNamespace, NotRecalled
from perdure.memory.effects import Effects, awaiting, blocking
from perdure.memory.options import number
from perdure.memory.recall import NAMESPACE, Labels, MemorySearch
from perdure.memory.records import Memory
from perdure.memory.store_adapter import StoreAdapter, adapter_of
from perdure.stores.base import Namespace

_FORM: Final = "expected pairs like ('Who lives in Ghent?', 'Ann')"
Expected = str | Sequence[str]
"""The key of a memory, or a text that one contains; or a list of these."""


@dataclass(frozen=True, slots=True)
class CheckedQuestion:
    """A question and the ranks at which it recalled the expected memories.

    Attributes:
        question: The question.
        expected: The keys or texts that it is to recall.
        ranks: The rank of each, from 1; None: it is not among the recalled.
    """

    question: str
    expected: tuple[str, ...]
    ranks: tuple[int | None, ...]

    @property
    def recall(self) -> float:
        """The share of the expected memories that was recalled, 0 to 1."""
        return sum(rank is not None for rank in self.ranks) / len(self.ranks)

    def __str__(self) -> str:
        ranks = ", ".join(str(rank or "-") for rank in self.ranks)
        return f"{ranks:>4}  {self.question} -> {' and '.join(self.expected)}"


@dataclass(frozen=True, slots=True)
class RecallReport:
    """The questions of a check with their ranks. As text it has a line for each."""

    questions: tuple[CheckedQuestion, ...]
    limit: int

    @property
    def recall(self) -> float:
        """The mean share of the expected memories that is among the first `limit`."""
        return sum(each.recall for each in self.questions) / len(self.questions)

    @property
    def mrr(self) -> float:
        """The mean reciprocal rank of the first expected memory."""
        best = [min(filter(None, each.ranks), default=None) for each in self.questions]
        return sum(1 / rank for rank in best if rank) / len(best)

    @property
    def missed(self) -> list[CheckedQuestion]:
        """The questions that did not recall all that they should."""
        return [each for each in self.questions if each.recall < 1]

    def assert_recalled(self, minimum: float = 0.9) -> None:
        """Raise NotRecalled, with the report, unless `recall` is at least this share, 0 to 1."""
        if self.recall < number("minimum", minimum, 0, 1):
            raise NotRecalled(f"less is recalled than {minimum}:\n{self}")

    def __str__(self) -> str:
        right = len(self.questions) - len(self.missed)
        total = (
            f"recall@{self.limit} {self.recall:.3f}, MRR {self.mrr:.3f}: "
            f"{right} of {len(self.questions)} questions recall what they should"
        )
        return "\n".join([*map(str, self.questions), total])


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

    Args:
        questions: Each with the key of the memory that it is to recall, or a text that this
            contains, whatever its capitals and spaces; or with a list, of which all are asked for.
        store: As of `recall`; so are config and namespace.
        config: Of the run, which fills in the namespace.
        namespace: Where to look.
        limit: How many memories count as recalled.
    """
    search, adapter = MemorySearch(namespace, None, limit, None), adapter_of(store)
    listed = questions.items() if isinstance(questions, Mapping) else questions
    pairs = [_pair(place, pair) for place, pair in enumerate(listed)]
    if not pairs:
        raise ConfigurationError(f"there are no questions; {_FORM}")
    checked = []
    for question, expected in pairs:
        found = (yield from search.found(question, store, config)).memories
        ranks = []
        for each in expected:
            wanted = yield from _by_key(adapter, search.namespaces(config), each)
            ranks.append(_rank(found, wanted or each))
        checked.append(CheckedQuestion(question, tuple(expected), tuple(ranks)))
    return RecallReport(tuple(checked), limit)


check_recall = blocking(_check_recall)
acheck_recall = awaiting(_check_recall)


def _pair(place: int, pair: Any) -> tuple[str, Sequence[str]]:
    question, expected = pair if isinstance(pair, tuple | list) and len(pair) == 2 else ("", "")
    several = expected if isinstance(expected, list | tuple) else [expected]
    if not several or not all(isinstance(e, str) and e.strip() for e in (question, *several)):
        raise ConfigurationError(f"question number {place} is {pair!r:.80}; {_FORM}")
    return question, several


def _by_key(
    adapter: StoreAdapter, namespaces: Sequence[Namespace], key: str
) -> Effects[Memory | None]:
    """The memory with this key; None: it is a text."""
    with suppress(InvalidNamespace):  # it cannot be a key
        for namespace in namespaces:
            memory = yield from adapter.got(namespace, key)
            if memory is not None:
                return memory
    return None


def _rank(found: Sequence[Memory], wanted: Memory | str) -> int | None:
    for rank, memory in enumerate(found, 1):
        if isinstance(wanted, Memory):
            if (memory.namespace, memory.key) == (wanted.namespace, wanted.key):
                return rank
        elif _plain(wanted) in _plain(memory.text):
            return rank
    return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())

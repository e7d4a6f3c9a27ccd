"""A check of recall for your own CI: do questions recall what they should, and at which rank?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError, InvalidNamespace, NotRecalled
from perdure.memory.effects import Effect, Effects, awaiting, blocking
from perdure.memory.options import number, whole
from perdure.memory.recall import NAMESPACE, Labels, MemorySearch
from perdure.memory.records import Memory
from perdure.memory.store_adapter import StoreAdapter, adapter_of

_DEPTH: Final = 200  # memories that are looked at for an expected one below the limit
_WIDTH: Final = 48  # characters of a column
_FORM: Final = (
    "expected pairs like ('Who lives in Ghent?', 'Ann') or ('Who teaches?', ['ann', 'bo'])"
)
Expected = str | Sequence[str]
"""The key of a memory, or a text that one contains; or a list of these."""


@dataclass(frozen=True, slots=True)
class CheckedQuestion:
    """A question and the ranks at which it recalled the expected memories.

    Attributes:
        question: The question.
        expected: The keys or texts that it is to recall.
        ranks: The rank of each, from 1; None: it is not among the recalled.
        reasons: Why each was not recalled; "" for one that was.
    """

    question: str
    expected: tuple[str, ...]
    ranks: tuple[int | None, ...]
    reasons: tuple[str, ...]

    @property
    def recall(self) -> float:
        """The share of the expected memories that was recalled, 0 to 1."""
        return sum(rank is not None for rank in self.ranks) / len(self.ranks)


@dataclass(frozen=True, slots=True)
class RecallReport:
    """The questions of a check with their ranks. As text it is a table.

    Attributes:
        questions: In order.
        limit: How many memories count as recalled.
    """

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

    def passed(self, minimum: float = 0.9) -> bool:
        """Whether `recall` is at least this share, 0 to 1."""
        return self.recall >= number("minimum", minimum, 0, 1)

    def assert_recalled(self, minimum: float = 0.9) -> None:
        """Fail unless `recall` is at least this share.

        Raises:
            NotRecalled: It is less; the message has the table.
            ConfigurationError: `minimum` is not from 0 to 1.
        """
        if not self.passed(minimum):
            raise NotRecalled(f"{self.total}, where {minimum} is asked for:\n{self}")

    @property
    def total(self) -> str:
        """The measures in a line."""
        right = len(self.questions) - len(self.missed)
        return (
            f"recall@{self.limit} {self.recall:.3f}, MRR {self.mrr:.3f}: "
            f"{right} of {len(self.questions)} questions recall what they should"
        )

    def __str__(self) -> str:
        rows = [("rank", "question", "expected", "why not")]
        for each in self.questions:
            ranks = ", ".join(str(rank or "-") for rank in each.ranks)
            why = "; ".join(filter(None, each.reasons))
            rows.append((ranks, _short(each.question), _short(" and ".join(each.expected)), why))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join([*(f"{row[n]:<{widths[n]}}" for n in range(3)), row[3]]).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self.total])


def _check_recall(
    questions: Mapping[str, Expected] | Iterable[tuple[str, Expected]],
    *,
    store: BaseStore | None = None,
    config: RunnableConfig | None = None,
    namespace: Labels = NAMESPACE,
    kinds: Sequence[str] | None = None,
    limit: int = 10,
    as_of: datetime | None = None,
) -> Effects[RecallReport]:
    """Ask questions, and report at which rank each recalls the expected memories.

    `check_recall(questions, store=store, config=config).assert_recalled(0.9)`

    Args:
        questions: Each with the key of the memory that it is to recall, or a text that this
            contains, whatever its capitals and spaces; or with a list, of which all are asked for.
        store: As of `recall`; so are config, namespace, kinds and as_of.
        config: Of the run, which fills in the namespace.
        namespace: Where to look.
        kinds: Only memories of these kinds.
        limit: How many memories count as recalled.
        as_of: What was remembered at that moment.

    Raises:
        ConfigurationError: An argument is wrong, or there is no store.
        InvalidConfig: The config does not fill in a namespace.
        StorageError: The store fails.
    """
    depth = max(whole("limit", limit, 1), _DEPTH)
    search, adapter = MemorySearch(namespace, kinds, depth, None), adapter_of(store)
    listed = questions.items() if isinstance(questions, Mapping) else questions
    pairs = [_pair(place, pair) for place, pair in enumerate(listed)]
    if not pairs:
        raise ConfigurationError(f"there are no questions; {_FORM}")
    checked = []
    for question, expected in pairs:
        found = (yield from search.found(question, store, config, as_of)).memories
        ranks: list[int | None] = []
        reasons: list[str] = []
        for each in expected:
            memory = yield from _by_key(adapter, search, each, config, as_of)
            rank = _rank(found, memory or each)
            reason = f"it is recalled at rank {rank}" if rank and rank > limit else ""
            if rank is None:
                why = {"query": question, "as_of": as_of}
                reason = yield from _why_not(adapter, search, memory, why)
            ranks.append(None if reason else rank)
            reasons.append(reason)
        checked.append(CheckedQuestion(question, tuple(expected), tuple(ranks), tuple(reasons)))
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
    adapter: StoreAdapter,
    search: MemorySearch,
    expected: str,
    config: RunnableConfig | None,
    as_of: datetime | None,
) -> Effects[Memory | None]:
    """The memory with this key; None: it is a text."""
    try:
        for namespace in search.namespaces(config):
            memory = yield from adapter.got(namespace, expected, as_of)
            if memory is not None:
                return memory
    except InvalidNamespace:  # a text that cannot be a key
        pass
    return None


def _rank(found: Sequence[Memory], wanted: Memory | str) -> int | None:
    for rank, memory in enumerate(found, 1):
        if isinstance(wanted, Memory):
            if (memory.namespace, memory.key) == (wanted.namespace, wanted.key):
                return rank
        elif _plain(wanted) in _plain(memory.text):
            return rank
    return None


def _why_not(
    adapter: StoreAdapter, search: MemorySearch, memory: Memory | None, options: dict[str, Any]
) -> Effects[str]:
    """Why a memory, or any with the expected text, is not among those that were found."""
    if memory is None:
        return f"no memory among the first {search.limit} contains it"
    if search.kinds is not None and memory.kind not in search.kinds:
        return f"it is a {memory.kind!r}, and only {list(search.kinds)} are recalled"
    if not adapter.versioned:
        return f"it is not among the first {search.limit}"
    why = yield Effect(
        lambda: adapter.store.why_not(memory.namespace, memory.key, **options),
        lambda: adapter.store.awhy_not(memory.namespace, memory.key, **options),
    )
    return str(why.reason)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _short(text: str) -> str:
    """A text on one line that fits into a column."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"

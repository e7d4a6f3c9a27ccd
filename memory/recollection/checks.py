"""Checking recall: whether questions recall what they should, to be run in one's own CI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.memory.effects import Effect, Effects, arun, run
from perdure.memory.options import whole
from perdure.memory.recollection.check_reports import Asked, CheckReport, Missing
from perdure.memory.recollection.reach import NAMESPACES, filled, templates
from perdure.memory.recollection.recall import Recall, Waiting
from perdure.memory.recollection.unformed import Tails
from perdure.memory.records import Memory
from perdure.memory.store_adapter import StoreAdapter, adapter_of
from perdure.stores.base import Namespace

_DEPTH: Final = 200  # memories looked at for what is not among the first


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Several memories of which a question is to recall one; see `any_of`."""

    expected: tuple[Memory | str, ...]


Expected = Memory | str | Sequence[Memory | str] | AnyOf
"""What a question is to recall: a memory, the key of one, a text that one contains, or several."""


def any_of(*expected: Memory | str) -> AnyOf:
    """One of several is enough, where a list in `check` asks for all of them."""
    return AnyOf(expected)


def check(
    pairs: Iterable[tuple[str, Expected]] | Mapping[str, Expected],
    *,
    store: BaseStore | None = None,
    namespaces: Sequence[Sequence[str]] = NAMESPACES,
    config: RunnableConfig | None = None,
    limit: int = 10,
    kinds: Sequence[str] | None = None,
    as_of: datetime | None = None,
    now: datetime | None = None,
    tails: Tails | Waiting | None = None,
) -> CheckReport:
    """Ask questions, and report which of them recall what they should, and at which rank.

    `check(pairs, store=store, config=config).assert_recalled(0.9)`

    Args:
        pairs: Questions, each with what it is to recall: a memory, the key of one, or a text that
            one contains, whatever its capitals and spaces. A list asks for all of its elements,
            `any_of(…)` for one.
        store: Any; None: within a graph, the one it was compiled with.
        namespaces: As of `recall`; so are the others.
        config: Of the run, which fills in the namespaces.
        limit: How many memories count as recalled.
        kinds: Only memories of these kinds.
        as_of: What was remembered at that moment.
        now: When the questions are asked.
        tails: Knows what is not yet formed.

    Raises:
        ConfigurationError: An argument is wrong, or there is no store.
        InvalidConfig: The config does not fill in a namespace.
        StorageError: The store refuses.
    """
    checker = _Checker(namespaces, limit, kinds, tails, as_of, now)
    return run(checker.checking(pairs, store, config))


async def acheck(
    pairs: Iterable[tuple[str, Expected]] | Mapping[str, Expected],
    *,
    store: BaseStore | None = None,
    namespaces: Sequence[Sequence[str]] = NAMESPACES,
    config: RunnableConfig | None = None,
    limit: int = 10,
    kinds: Sequence[str] | None = None,
    as_of: datetime | None = None,
    now: datetime | None = None,
    tails: Tails | Waiting | None = None,
) -> CheckReport:
    """See `check`."""
    checker = _Checker(namespaces, limit, kinds, tails, as_of, now)
    return await arun(checker.checking(pairs, store, config))


class _Checker:
    """Asks questions of a store."""

    def __init__(
        self,
        namespaces: Sequence[Sequence[str]],
        limit: int,
        kinds: Sequence[str] | None,
        tails: Tails | Waiting | None,
        as_of: datetime | None,
        now: datetime | None,
    ) -> None:
        self._templates = templates(namespaces)
        self._limit, self._as_of, self._now = whole("limit", limit, 1), as_of, now
        self._kinds = kinds
        self._asks = Recall(namespaces, None, limit, kinds, None, tails)
        self._deeper = Recall(namespaces, None, max(_DEPTH, limit), kinds, None, tails)

    def checking(
        self, pairs: Any, store: BaseStore | None, config: RunnableConfig | None
    ) -> Effects[CheckReport]:
        """The report, as steps."""
        listed = _listed(pairs)
        adapter, prefixes = adapter_of(store), filled(self._templates, config)
        asked = []
        for question, expected in listed:
            several = expected.expected if isinstance(expected, AnyOf) else _all(expected)
            found = yield from self._recalled(self._asks, question, store, config)
            ranks: list[int | None] = []
            wanted = []
            for each in several:
                memory = yield from self._meant(adapter, prefixes, each)
                wanted.append(memory)
                ranks.append(_rank(found, memory))
            result = Asked(question, tuple(map(_named, several)), tuple(ranks), _is_any(expected))
            if not result.recalled:
                lacking = [each for each, rank in zip(wanted, ranks, strict=True) if rank is None]
                missing = yield from self._reasons(
                    question, lacking, adapter, prefixes, store, config
                )
                result = replace(result, missing=missing)
            asked.append(result)
        return CheckReport(tuple(asked), self._limit)

    def _recalled(
        self, asks: Recall, question: str, store: BaseStore | None, config: RunnableConfig | None
    ) -> Effects[list[Memory]]:
        found = yield from asks.use_memories(question, store, config, self._as_of, self._now)
        return found.memories

    def _meant(
        self, adapter: StoreAdapter, prefixes: Sequence[Namespace], expected: Memory | str
    ) -> Effects[Memory | str]:
        """The memory whose key is given; else the text."""
        if isinstance(expected, Memory):
            return expected
        try:
            for prefix in prefixes:
                memory = yield from adapter.got(prefix, expected, self._as_of)
                if memory is not None:
                    return memory
        except InvalidNamespace:  # it could be no key
            return expected
        return expected

    def _reasons(
        self,
        question: str,
        lacking: Sequence[Memory | str],
        adapter: StoreAdapter,
        prefixes: Sequence[Namespace],
        store: BaseStore | None,
        config: RunnableConfig | None,
    ) -> Effects[tuple[Missing, ...]]:
        """Why each was not recalled."""
        deep = yield from self._recalled(self._deeper, question, store, config)
        out = []
        for each in lacking:
            rank = _rank(deep, each)
            reason = f"it is recalled at rank {rank}"
            if rank is None and isinstance(each, Memory):
                reason = yield from self._why_not(adapter, prefixes, each, question)
            elif rank is None:
                reason = f"no memory among the first {self._deeper_limit} contains it"
            out.append(Missing(_named(each), reason))
        return tuple(out)

    @property
    def _deeper_limit(self) -> int:
        return max(_DEPTH, self._limit)

    def _why_not(
        self, adapter: StoreAdapter, prefixes: Sequence[Namespace], memory: Memory, question: str
    ) -> Effects[str]:
        inside = (each for each in prefixes if memory.namespace[: len(each)] == each)
        prefix = next(inside, None)
        if prefix is None:
            return f"it is in {memory.namespace!r}, where nothing is recalled from"
        if self._kinds is not None and memory.kind not in self._kinds:
            return f"it is a {memory.kind!r}, and only {list(self._kinds)} are recalled"
        if not adapter.versioned:
            return f"it is not among the first {self._deeper_limit}"
        options = {"query": question, "as_of": self._as_of, "prefix": prefix}
        place = memory.namespace, memory.key
        why = yield Effect(
            lambda: adapter.store.why_not(*place, **options),
            lambda: adapter.store.awhy_not(*place, **options),
        )
        return str(why.reason)


def _listed(pairs: Any) -> list[tuple[str, Any]]:
    listed = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
    if not listed:
        raise ConfigurationError("there are no pairs to check; expected (question, expected)")
    for number, pair in enumerate(listed):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigurationError(
                f"pair number {number} is {pair!r:.80}; expected (question, expected)"
            )
        expected = pair[1].expected if isinstance(pair[1], AnyOf) else _all(pair[1])
        if not expected or not all(map(_is_expectable, expected)):
            raise ConfigurationError(
                f"pair number {number} expects {pair[1]!r:.80}; expected a memory, the key of one, "
                "a text that one contains, a list of them, or any_of(…)"
            )
    return [(pair[0], pair[1]) for pair in listed]


def _is_expectable(expected: Any) -> bool:
    return isinstance(expected, Memory) or (isinstance(expected, str) and bool(expected.strip()))


def _is_any(expected: Any) -> bool:
    return isinstance(expected, AnyOf)


def _all(expected: Any) -> Sequence[Any]:
    return expected if isinstance(expected, list | tuple) else (expected,)


def _rank(found: Sequence[Memory], wanted: Memory | str) -> int | None:
    """The place of what is wanted among what was found, from 1."""
    for rank, memory in enumerate(found, 1):
        if isinstance(wanted, Memory):
            if (memory.namespace, memory.key) == (wanted.namespace, wanted.key):
                return rank
        elif _plain(wanted) in _plain(memory.text):
            return rank
    return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _named(expected: Memory | str) -> str:
    return expected.key if isinstance(expected, Memory) else expected

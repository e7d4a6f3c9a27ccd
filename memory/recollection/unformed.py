"""UseMemories what is not yet formed: the ends of threads, ranked among what the store found.

These texts are in no index. They are ranked by words, neighbours, speaker and date as the store
ranks, together with the best that it found, so that a weak answer which has just been said does not
stand above a good one from last year. Vectors are left out: to make them would take too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, Protocol, runtime_checkable

import numpy as np
from langchain_core.runnables import RunnableConfig
from numpy.typing import NDArray

from perdure.memory.effects import Effects
from perdure.memory.recollection.merging import Hit, said_at
from perdure.memory.records import Memory
from perdure.stores.base import Namespace, Span
from perdure.stores.bm25 import Term
from perdure.stores.context import Arrangement, arrange
from perdure.stores.cues import named_actors, names_of, said_when
from perdure.stores.kinship import kin_of
from perdure.stores.ranking import Cues, rank
from perdure.stores.text import asks, query_tokens, tokens

_KEPT: Final = 2_048  # texts whose tokens are kept: 2 MB
_NONE: Final[frozenset[str]] = frozenset()


@runtime_checkable
class Tails(Protocol):
    """What knows of memories that are not yet formed."""

    def waiting(
        self, namespaces: Sequence[Namespace], config: RunnableConfig | None
    ) -> Effects[list[Memory]]:
        """What will be memories of these namespaces; with the thread and position of each."""


def ranked_among(
    query: str, span: Span | None, waiting: Sequence[Memory], found: Sequence[Memory]
) -> list[Hit]:
    """Those that wait and answer a query, each at its rank among these and what was found.

    Args:
        query: In the user's words.
        span: The time that it means.
        waiting: Not yet formed.
        found: What searches found.

    Returns:
        Best first, of equal ones the newest; what was found is not among them.
    """
    rows = sorted(
        [(memory, True) for memory in waiting] + [(memory, False) for memory in found],
        key=lambda row: _place(row[0]),
    )
    memories = [memory for memory, _ in rows]
    words = [_words(memory.text) for memory in memories]
    named = _named(query, memories)
    terms = _terms(query, words, _NONE.union(*map(names_of, named)))
    if not terms:
        return []
    at = np.array([said_at(memory).timestamp() for memory in memories])
    when = None if span is None else (span[0].timestamp(), span[1].timestamp())
    scores = rank(
        len(rows),
        terms=terms,
        lengths=np.array([len(each) for each in words], np.float32),
        arrangement=_arrangement(memories, words, at),
        cues=Cues(
            actor=np.array([_actor(memory) in named for memory in memories]) if named else None,
            date=said_when(query, when, at),
        ),
    ).scores
    waits = np.array([waits for _, waits in rows])
    own = np.flatnonzero(waits & (scores > 0))
    own = own[np.lexsort((-at[own], -scores[own]))]
    ranks = np.searchsorted(np.sort(-scores), -scores[own], side="left") + 1
    return [
        Hit(int(number), memories[int(row)], True) for number, row in zip(ranks, own, strict=True)
    ]


@lru_cache(_KEPT)
def _words(text: str) -> tuple[str, ...]:
    """The tokens of a text; the same tails are looked at turn after turn."""
    return tuple(tokens(text))


def _place(memory: Memory) -> tuple[str, int]:
    """By which the rows of a thread lie side by side, in its order."""
    source = memory.provenance
    return ("", 0) if source is None else (source.thread_id or "", source.position or 0)


def _actor(memory: Memory) -> str | None:
    return None if memory.provenance is None else memory.provenance.actor


def _named(query: str, memories: Sequence[Memory]) -> list[str]:
    """The actors that a query names."""
    actors = list({actor: None for memory in memories if (actor := _actor(memory))})
    named = named_actors(query_tokens(query), actors)
    return [actor for actor, is_named in zip(actors, named, strict=True) if is_named]


def _terms(query: str, words: Sequence[Sequence[str]], names: frozenset[str]) -> list[Term]:
    """The query's words, and their kin, in the rows."""
    wanted = query_tokens(query)
    kin = {word: [] if word in names else kin_of(word) for word in wanted}
    searched = {*wanted, *(other for near in kin.values() for other, _ in near)}
    postings: dict[str, Counter[int]] = {word: Counter() for word in searched}
    for row, said in enumerate(words):
        for word in said:
            if word in searched:
                postings[word][row] += 1
    found = []
    for word in wanted:
        near = tuple(
            (_rows(postings[other]), likeness) for other, likeness in kin[word] if postings[other]
        )
        if postings[word] or near:
            counts = np.array(list(postings[word].values()), np.float32)
            found.append(Term(_rows(postings[word]), counts, near))
    return found


def _rows(posting: Counter[int]) -> NDArray[np.int64]:
    return np.array(list(posting), np.int64)


def _arrangement(
    memories: Sequence[Memory], words: Sequence[Sequence[str]], at: NDArray[np.float64]
) -> Arrangement:
    """Who is next to whom; of what was found, not all of a thread is there."""
    codes: dict[str, int] = {}
    threads = [memory.provenance.thread_id if memory.provenance else None for memory in memories]
    thread = np.array([-1 if id is None else codes.setdefault(id, len(codes)) for id in threads])
    position = np.array(
        [
            np.nan if memory.provenance is None or memory.provenance.position is None
            else memory.provenance.position
            for memory in memories
        ]
    )  # fmt: skip
    whole = arrange(
        thread,
        np.array([len(each) for each in words], np.float32),
        np.array([asks(memory.text) for memory in memories]),
        at,
    )
    beside = [
        position[step:] - position[:-step] <= step for step in range(1, len(whole.from_before) + 1)
    ]
    return replace(
        whole,
        from_before=tuple(a * b for a, b in zip(whole.from_before, beside, strict=True)),
        from_after=tuple(a * b for a, b in zip(whole.from_after, beside, strict=True)),
    )

"""A scope of a search: the selected rows, of one namespace or many, as dense arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perdure.stores.context import Arrangement
from perdure.stores.index_view import NOWHERE, Columns, Found, Ints, View
from perdure.stores.models import Model
from perdure.stores.spelling import Trigrams
from perdure.stores.vectors import Floats


class Sought(NamedTuple):
    """The data of a scope that is too large for memory, as a search needs it."""

    words: Iterable[str] = ()  # whose rows it needs
    vector: Floats | None = None  # the query's
    model: Model | None = None
    vocabulary: bool = False  # whether it needs all words
    some: bool = False  # whether some rows will do, once it is seen to be too large


@dataclass
class Part:
    """The rows of one namespace."""

    view: View | None  # None: it was let go, and what was sought is here
    columns: Columns
    actors: Sequence[str]
    threads: int
    terms: dict[str, Found] = field(default_factory=dict)
    cosines: Floats | None = None
    vocabulary: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, view: View) -> Part:
        """All rows of a view."""
        return cls(view, view.columns, view.actors, view.threads)

    def let_go(self, sought: Sought, approximate_above: int) -> None:
        """Take what is sought from the view, and keep no more of it."""
        if self.view is None:
            return
        found = ((word, self.view.term(word)) for word in sought.words)
        self.terms = {word: term for word, term in found if len(term[0])}
        if sought.vector is not None:
            self.cosines = self.view.cosines(sought.vector, approximate_above)
        if sought.vocabulary:
            self.vocabulary = self.view.words()
        self.view = None

    def term(self, word: str) -> Found:
        """The rows that have a word, each once, and how often."""
        return self.terms.get(word, NOWHERE) if self.view is None else self.view.term(word)


class Scope:
    """The rows of some namespaces."""

    def __init__(self, parts: Sequence[Part], model: Model | None, approximate_above: int) -> None:
        self._parts = parts
        self.model = model
        self._approximate_above = approximate_above
        # whether it can be asked for any word and vector, not only for what was sought
        self.held = all(part.view is not None for part in parts)
        self._terms: dict[str, Found] = {}
        numbers: dict[str, int] = {}
        if len(parts) == 1:
            self.columns, self.actors = parts[0].columns, parts[0].actors
        else:
            self.columns = _joined(parts, numbers)
            self.actors = list(numbers)
        self.ids, self.thread = self.columns.ids, self.columns.thread
        self.actor, self.at = self.columns.actor, self.columns.at
        self.lengths, self.asks = self.columns.lengths, self.columns.asks

    def __len__(self) -> int:
        return len(self.ids)

    def arrangement(self) -> Arrangement | None:
        """The neighbours of rows; None if no row belongs to a thread."""
        return self.columns.arrangement

    def term(self, word: str) -> Found:
        """The rows that have a word, each once, and how often."""
        found = self._terms.get(word)
        if found is None:
            found = self._terms[word] = self._found(word)
        return found

    def _found(self, word: str) -> Found:
        if len(self._parts) == 1:
            return self._parts[0].term(word)
        rows, counts = [NOWHERE[0]], [NOWHERE[1]]
        base = 0
        for part in self._parts:
            found, often = part.term(word)
            if len(found):
                rows.append(found + base)
                counts.append(often)
            base += len(part.columns.ids)
        return np.concatenate(rows), np.concatenate(counts)

    def cosines(self, query: Floats) -> Floats:
        """Similarity of each row's best vector to the query's; NaN for a row without one."""
        found = [
            part.cosines if part.view is None else part.view.cosines(query, self._approximate_above)
            for part in self._parts
        ]
        return np.concatenate([np.empty(0, np.float32), *(f for f in found if f is not None)])

    def similar(self, word: str) -> str | None:
        """The word nearest to one that no row has, of those that some rows have."""
        only = self._parts[0].view if len(self._parts) == 1 else None
        if only is not None:
            found = only.vocabulary.similar(word, lambda other: len(only.term(other)[0]) > 0)
        else:
            found = self._spelling.similar(word, limit=1)
        return found[0][0] if found else None

    @cached_property
    def _spelling(self) -> Trigrams:
        words: set[str] = set()
        for part in self._parts:
            words |= part.vocabulary if part.view is None else part.view.words()
        return Trigrams(sorted(words))


def _joined(parts: Sequence[Part], numbers: dict[str, int]) -> Columns:
    """The rows of several namespaces, one after another, and the numbers of all actors."""
    threads, actors, base = [], [], 0
    for part in parts:
        thread = part.columns.thread
        threads.append(np.where(thread >= 0, thread + base, -1))
        base += part.threads
        actors.append(_translated(part, numbers))
    every = [part.columns for part in parts]
    return Columns(
        ids=np.concatenate([np.empty(0, np.int64), *(c.ids for c in every)]),
        thread=np.concatenate([np.empty(0, np.int64), *threads]),
        actor=np.concatenate([np.empty(0, np.int64), *actors]),
        at=np.concatenate([np.empty(0, np.float64), *(c.at for c in every)]),
        lengths=np.concatenate([np.empty(0, np.float32), *(c.lengths for c in every)]),
        asks=np.concatenate([np.empty(0, np.bool_), *(c.asks for c in every)]),
    )


def _translated(part: Part, numbers: dict[str, int]) -> Ints:
    of: Mapping[str, int] = numbers
    for name in part.actors:
        numbers.setdefault(name, len(numbers))
    table = np.array([*(of[name] for name in part.actors), -1], np.int64)
    return table[part.columns.actor]

"""The scope of a search: the rows of one namespace or many, with what the query needs of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from perdure.storage.flow import Flow
from perdure.stores.expansion import nearest
from perdure.stores.index_view import NOWHERE, ROW, Columns, Found, View
from perdure.stores.models import Model
from perdure.stores.text import is_misspellable
from perdure.stores.vectors import Floats

_MOST_MISSPELT: Final = 16  # words of a query: 1 ms each
_CANDIDATES: Final = 8  # for one of them: some are only words of deleted items

# What a function takes of each namespace's view, in the same order each time
Each = Callable[[Callable[[View], Any]], Flow[list[Any]]]


class Sought(NamedTuple):
    """The words and the vector of a query."""

    words: Mapping[str, Sequence[str]]  # as the index has them, with their synonyms
    vector: Floats | None = None
    model: Model | None = None  # of the vector
    corrected: bool = True  # whether a word that no row has stands for the nearest one


@dataclass
class Scope:
    """The rows that a search ranks, with what its query needs of them."""

    columns: Columns
    actors: Sequence[str]  # by number
    threads: int  # how many have a number
    terms: dict[str, Found]  # of the words that some rows have
    cosines: Floats | None  # NaN for a row without a vector; None: nothing to compare

    def __len__(self) -> int:
        return len(self.columns.ids)

    def term(self, word: str) -> Found:
        """The rows that have a word, each once, and how often."""
        return self.terms.get(word, NOWHERE)


def scope_of(
    each: Each, sought: Sought, model: Model | None, approximate_above: int
) -> Flow[Scope]:
    """The rows of some views; all are looked at again if words of the query may be misspelt."""

    def part(view: View) -> Scope:
        cosines = None
        if sought.vector is not None and sought.model is not None and model is not None:
            if sought.model != model:
                raise model.mismatch(sought.model)
            cosines = view.cosines(sought.vector, approximate_above)
        words = {other for word, some in sought.words.items() for other in (word, *some)}
        return Scope(view.columns, view.actors, view.threads, view.terms(words), cosines)

    scope = _joined((yield from each(part)))
    unknown = _unknown(scope, sought)
    if unknown:
        known = {word for words in (yield from each(_vocabulary)) for word in words}
        nearby = {word: nearest(word, known, _CANDIDATES) for word in unknown}
        others = {other for some in nearby.values() for other in some}
        terms = _joined_terms((yield from each(lambda view: (len(view.order), view.terms(others)))))
        for word, some in nearby.items():
            scope.terms[word] = next((terms[other] for other in some if other in terms), NOWHERE)
    return scope


def _unknown(scope: Scope, sought: Sought) -> list[str]:
    """The words of a query that may be misspelt: no row has them or a synonym."""
    if not sought.corrected:
        return []
    unknown = [
        word
        for word, others in sought.words.items()
        if is_misspellable(word) and not any(other in scope.terms for other in (word, *others))
    ]
    return unknown[:_MOST_MISSPELT]


def _vocabulary(view: View) -> list[str]:
    return list(view.vocabulary)


def _joined(parts: Sequence[Scope]) -> Scope:
    """The rows of several namespaces, one after another."""
    if len(parts) == 1:
        return parts[0]
    every = [Columns.of(np.empty(0, ROW)), *(part.columns for part in parts)]
    threads, actors = [every[0].thread], [every[0].actor]
    base, numbers = 0, dict[str, int]()
    for part in parts:
        thread = part.columns.thread
        threads.append(np.where(thread >= 0, thread + base, -1))
        base += part.threads
        codes = [numbers.setdefault(name, len(numbers)) for name in part.actors]
        actors.append(np.array([*codes, -1], np.int64)[part.columns.actor])
    cosines = [part.cosines for part in parts if part.cosines is not None]
    return Scope(
        Columns(
            ids=np.concatenate([columns.ids for columns in every]),
            thread=np.concatenate(threads),
            actor=np.concatenate(actors),
            at=np.concatenate([columns.at for columns in every]),
            lengths=np.concatenate([columns.lengths for columns in every]),
            asks=np.concatenate([columns.asks for columns in every]),
        ),
        list(numbers),
        base,
        _joined_terms((len(part), part.terms) for part in parts),
        np.concatenate(cosines) if cosines else None,
    )


def _joined_terms(parts: Iterable[tuple[int, Mapping[str, Found]]]) -> dict[str, Found]:
    """The rows of words in several namespaces, given how many rows each has, and its own."""
    found = defaultdict[str, list[Found]](list)
    base = 0
    for count, terms in parts:
        for word, (rows, counts) in terms.items():
            found[word].append((rows + base, counts))
        base += count
    return {
        word: (np.concatenate([rows for rows, _ in some]), np.concatenate([c for _, c in some]))
        for word, some in found.items()
    }

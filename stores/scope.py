"""The scope of a search: the rows of one namespace or many, with what the query needs of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from perdure.storage.flow import Flow
from perdure.stores.expansion import nearest
from perdure.stores.index_view import NOWHERE, ROW, Candidates, Found, Ints, View
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

    candidates: Candidates
    actors: Sequence[str]  # by number
    threads: int  # how many have a number
    terms: dict[str, Found]  # of the words that some rows have
    cosines: Floats | None  # NaN for a row without a vector; None: nothing to compare

    def __len__(self) -> int:
        return len(self.candidates.rows)

    @property
    def ids(self) -> Ints:
        """The id of each row."""
        return np.asarray(self.candidates.rows["id"])

    def term(self, word: str) -> Found:
        """The rows that have a word, each once, and how often."""
        return self.terms.get(word, NOWHERE)


def scope_of(
    each: Each, sought: Sought, model: Model | None, approximate_above: int
) -> Flow[Scope]:
    """The rows of some views; all are looked at again if words of the query may be misspelt."""
    words = {other for word, some in sought.words.items() for other in (word, *some)}

    def part(view: View) -> Scope:
        cosines = None
        if sought.vector is not None and sought.model is not None and model is not None:
            if sought.model != model:
                raise model.mismatch(sought.model)
            cosines = view.cosines(sought.vector, approximate_above)
        found = ((word, view.term(word)) for word in words)
        terms = {word: term for word, term in found if len(term[0])}
        return Scope(view.candidates, view.actors, view.threads, terms, cosines)

    scope = _joined((yield from each(part)))
    unknown = _unknown(scope, sought) if len(scope) else []
    if unknown:
        known = {word for some in (yield from each(_vocabulary)) for word in some}
        nearby = {word: nearest(word, known, _CANDIDATES) for word in unknown}
        words.update(other for some in nearby.values() for other in some)
        if any(nearby.values()):
            scope = _joined((yield from each(part)))
        for word, some in nearby.items():
            scope.terms[word] = next((scope.terms[w] for w in some if w in scope.terms), NOWHERE)
    return scope


def _unknown(scope: Scope, sought: Sought) -> list[str]:
    """The words of a query that may be misspelt: no row has them or a synonym."""
    unknown = [
        word
        for word, others in sought.words.items()
        if is_misspellable(word) and not any(other in scope.terms for other in (word, *others))
    ]
    return unknown[:_MOST_MISSPELT] if sought.corrected else []


def _vocabulary(view: View) -> list[str]:
    return list(view.vocabulary)


def _joined(parts: Sequence[Scope]) -> Scope:
    """The rows of several namespaces, one after another."""
    if len(parts) == 1:
        return parts[0]
    every, cosines = [np.empty(0, ROW)], [np.empty(0, np.float32)]
    numbers = dict[str, int]()
    found = defaultdict[str, list[Found]](list)
    first_row = first_thread = 0
    for part in parts:
        own = part.candidates.rows.copy()
        own["thread"][own["thread"] >= 0] += first_thread
        codes = [numbers.setdefault(name, len(numbers)) for name in part.actors]
        own["actor"] = np.array([*codes, -1])[own["actor"]]
        every.append(own)
        cosines += [] if part.cosines is None else [part.cosines]
        for word, (rows, counts) in part.terms.items():
            found[word].append((rows + first_row, counts))
        first_row += len(part)
        first_thread += part.threads
    terms = {
        word: (np.concatenate([rows for rows, _ in some]), np.concatenate([c for _, c in some]))
        for word, some in found.items()
    }
    together = np.concatenate(cosines) if len(cosines) > 1 else None
    return Scope(Candidates(np.concatenate(every)), list(numbers), first_thread, terms, together)

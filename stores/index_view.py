"""What a search sees: the index of a namespace at a moment, and the rows of one or many.

A `View` has the rows, words and vectors of a namespace. A `Scope` joins the rows of the selected
views, with what the query needs of them, so that the views themselves may be dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.storage.flow import Flow
from perdure.stores.expansion import Vocabulary, nearest
from perdure.stores.models import Model
from perdure.stores.ranking import Arrangement, arrange
from perdure.stores.text import is_misspellable
from perdure.stores.vectors import Floats, Matrix, second_look

Ints = NDArray[np.int64]
Rows = NDArray[np.integer[Any]]
Found = tuple[Ints, Floats]  # rows that have a word, each once, and how often

_MOST_MISSPELT: Final = 16  # words of a query: 1 ms each
_CANDIDATES: Final = 64  # for one of them: some are only words of rows that are not searched
_FEW: Final = 4  # a filter that leaves less than one row in so many: only these are compared
NOWHERE: Final[Found] = np.empty(0, np.int64), np.empty(0, np.float32)
ROW: Final = np.dtype(
    [
        ("id", "<i8"),
        ("expires", "<i8"),  # microseconds since 1970
        ("since", "<i8"),  # when it was put, likewise
        ("position", "<f8"),
        ("at", "<f8"),  # seconds since 1970; NaN: unknown
        ("thread", "<i4"),  # -1: none; so for `actor`
        ("actor", "<i4"),
        ("length", "<i4"),  # words
        ("asks", "?"),
        ("alive", "?"),
    ],
    align=True,
)


class Postings(NamedTuple):
    """The rows that have each word."""

    starts: Ints  # where each word's entries begin, and where the last one's end
    rows: Rows  # in order
    counts: NDArray[np.uint8]  # how often each has the word


class Vectors(NamedTuple):
    """Vectors and the row of each; the vectors of a row stand side by side."""

    matrix: Matrix
    owner: NDArray[np.int32]


@dataclass(frozen=True)
class Candidates:
    """The rows of a search; those of a thread are adjacent, in its order."""

    rows: NDArray[Any]  # of `ROW`

    @cached_property
    def lengths(self) -> Floats:
        """Words in each row."""
        return np.asarray(self.rows["length"], np.float32)

    @cached_property
    def arrangement(self) -> Arrangement | None:
        """The neighbours of rows; None if no row belongs to a thread."""
        thread = np.asarray(self.rows["thread"], np.int64)
        if not (thread >= 0).any():
            return None
        return arrange(thread, self.lengths, self.rows["asks"], self.rows["at"])


@dataclass(frozen=True)
class View:
    """An index as it was at a moment, or some of its rows."""

    order: Ints  # the rows that are in, those of a thread side by side, in its order
    vocabulary: Vocabulary  # may have got more
    actors: Sequence[str]  # by number
    threads: Sequence[str]  # by number
    nbytes: int  # what the index takes, about
    rows: NDArray[Any]
    postings: Postings
    recent: tuple[Rows, Rows, NDArray[np.uint8]]  # words, rows and counts, not sorted in yet
    vectors: tuple[Vectors, ...]

    @cached_property
    def _is_whole(self) -> bool:
        """Whether all rows are in, in their own order."""
        return len(self.order) == len(self.rows) and bool((self.order[1:] > self.order[:-1]).all())

    @cached_property
    def _places(self) -> NDArray[np.int32]:
        return places(self.order, len(self.rows))

    @cached_property
    def candidates(self) -> Candidates:
        """The rows that are in."""
        return Candidates(self.rows if self._is_whole else self.rows[self.order])

    def term(self, word: str) -> Found:
        """The rows that have a word, each once, and how often."""
        number = self.vocabulary.get(word)
        if number is None:
            return NOWHERE
        rows: Rows = np.empty(0, np.int32)
        counts = np.empty(0, np.uint8)
        if number < len(self.postings.starts) - 1:
            begin, end = self.postings.starts[number : number + 2]
            rows, counts = self.postings.rows[begin:end], self.postings.counts[begin:end]
        words, of, often = self.recent
        hits = (words == number).nonzero()[0]
        if len(hits):
            rows = np.concatenate([rows, of[hits]])
            counts = np.concatenate([counts, often[hits]])
        if self._is_whole:
            return rows.astype(np.int64), counts.astype(np.float32)
        at = self._places[rows]
        inside = at >= 0
        return at[inside].astype(np.int64), counts[inside].astype(np.float32)

    def cosines(self, query: Floats, approximate_above: int) -> Floats:
        """Similarity of each row's best vector to the query's; NaN for a row without one."""
        out = np.full(len(self.rows), np.nan, np.float32)
        few = _FEW * len(self.order) < len(self.rows)  # the best of all need not be among them
        for matrix, owner in self.vectors:
            if few:
                chosen = np.flatnonzero(self._places[owner] >= 0)
                matrix, owner = matrix.taken(chosen), owner[chosen]
            count = len(owner)
            if count > approximate_above and matrix.sketch is not None:
                scores = matrix.estimates(query, 0, count, second_look(count))
            else:
                scores = matrix.scores(query, 0, count)
            firsts = np.flatnonzero(np.diff(owner, prepend=-1))  # of each row
            if len(firsts) < count:
                scores = np.maximum.reduceat(scores, firsts)
            out[owner[firsts]] = scores
        return out if self._is_whole else out[self.order]

    def narrowed(self, ids: Ints) -> View:
        """The same with only the rows that have one of some ids."""
        return replace(self, order=self.order[np.isin(self.rows["id"][self.order], ids)])

    def until(self, at: int) -> View:
        """The same without the rows that were put after a moment."""
        inside = self.rows["since"][self.order] <= at
        return self if inside.all() else replace(self, order=self.order[inside])


def ordered(rows: NDArray[Any], some: Ints) -> Ints:
    """Some rows by thread, place in the thread, and age."""
    thread = rows["thread"][some]
    if not (thread >= 0).any():
        return some[np.argsort(rows["id"][some], kind="stable")]
    return some[np.lexsort((rows["id"][some], rows["position"][some], thread))]


def places(order: Ints, count: int) -> NDArray[np.int32]:
    """The place of each row among some, or -1."""
    place = np.full(count, -1, np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return place


# -- the rows of a search

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

    def rethreaded(self, names: Sequence[Hashable]) -> Scope:
        """The same with threads of one name made one; a name for each number of a thread."""
        numbers = dict[Hashable, int]()
        codes = [numbers.setdefault(name, len(numbers)) for name in names]
        rows = self.candidates.rows.copy()
        rows["thread"] = np.array([*codes, -1])[rows["thread"]]
        order = ordered(rows, np.arange(len(rows)))
        place = places(order, len(rows)).astype(np.int64)
        terms = {word: (place[of], counts) for word, (of, counts) in self.terms.items()}
        cosines = None if self.cosines is None else self.cosines[order]
        return Scope(Candidates(rows[order]), self.actors, len(numbers), terms, cosines)


def scope_of(
    each: Each, sought: Sought, model: Model | None, approximate_above: int
) -> Flow[Scope]:
    """The rows of some views; all are looked at again if words of the query may be misspelt."""
    words = {other for word, some in sought.words.items() for other in (word, *some)}

    def terms_of(view: View) -> dict[str, Found]:
        found = ((word, view.term(word)) for word in words)
        return {word: term for word, term in found if len(term[0])}

    def part(view: View) -> Scope:
        cosines = None
        if sought.vector is not None and sought.model is not None and model is not None:
            if sought.model != model:
                raise model.mismatch(sought.model)
            cosines = view.cosines(sought.vector, approximate_above)
        return Scope(view.candidates, view.actors, len(view.threads), terms_of(view), cosines)

    scope = _joined((yield from each(part)))
    unknown = _unknown(scope, sought) if len(scope) else []
    if unknown:
        like = yield from each(lambda view: [view.vocabulary.near(word) for word in unknown])
        nearby = {
            word: nearest(word, chain.from_iterable(some), _CANDIDATES)
            for word, some in zip(unknown, zip(*like, strict=True), strict=True)
        }
        words = {other for some in nearby.values() for other in some}
        found = _terms((yield from each(lambda view: (len(view.order), terms_of(view)))))
        for word, some in nearby.items():
            scope.terms[word] = next((found[w] for w in some if w in found), NOWHERE)
    return scope


def _unknown(scope: Scope, sought: Sought) -> list[str]:
    """The words of a query that may be misspelt: no row has them or a synonym."""
    unknown = [
        word
        for word, others in sought.words.items()
        if is_misspellable(word) and not any(other in scope.terms for other in (word, *others))
    ]
    return unknown[:_MOST_MISSPELT] if sought.corrected else []


def _terms(parts: Sequence[tuple[int, dict[str, Found]]]) -> dict[str, Found]:
    """The terms of several namespaces, each with how many rows it has, one after another."""
    if len(parts) == 1:
        return parts[0][1]
    found = defaultdict[str, list[Found]](list)
    first = 0
    for size, terms in parts:
        for word, (rows, counts) in terms.items():
            found[word].append((rows + first, counts))
        first += size
    return {
        word: (np.concatenate([rows for rows, _ in some]), np.concatenate([c for _, c in some]))
        for word, some in found.items()
    }


def _joined(parts: Sequence[Scope]) -> Scope:
    """The rows of several namespaces, one after another."""
    if len(parts) == 1:
        return parts[0]
    every, cosines = [np.empty(0, ROW)], [np.empty(0, np.float32)]
    numbers = dict[str, int]()
    first_thread = 0
    for part in parts:
        own = part.candidates.rows.copy()
        own["thread"][own["thread"] >= 0] += first_thread
        codes = [numbers.setdefault(name, len(numbers)) for name in part.actors]
        own["actor"] = np.array([*codes, -1])[own["actor"]]
        every.append(own)
        cosines += [] if part.cosines is None else [part.cosines]
        first_thread += part.threads
    terms = _terms([(len(part), part.terms) for part in parts])
    together = np.concatenate(cosines) if len(cosines) > 1 else None
    return Scope(Candidates(np.concatenate(every)), list(numbers), first_thread, terms, together)

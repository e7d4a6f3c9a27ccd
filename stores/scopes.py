"""A scope: the rows a search is about, as dense arrays, whichever segments they lie in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.stores.context import Arrangement, arrange
from perdure.stores.models import Model
from perdure.stores.segments import Ints, Segment
from perdure.stores.vectors import Floats, second_look


@dataclass(slots=True)
class _Run:
    """The rows of one segment that are in the scope.

    Attributes:
        segment: The segment.
        start, stop: The run under the prefix.
        places: For each row of the run its row in the scope, or -1; None: they follow from `base`.
        base: The row of the scope that the run begins at, when all of it is in.
    """

    segment: Segment
    start: int
    stop: int
    places: Ints | None
    base: int

    @property
    def vectors(self) -> int:
        """How many vectors its rows have."""
        chunks = self.segment.chunks
        return int(chunks[self.stop] - chunks[self.start])


class Known(NamedTuple):
    """What numbers in segments stand for; the index may be made anew while a search goes on.

    Attributes:
        words: The number of each word.
        actors: Who said something, by number.
        model: What the vectors come from; None: there are none.
    """

    words: Mapping[str, int]
    actors: Sequence[str]
    model: Model | None


class Scope:
    """Rows under a prefix, at most those with some ids; rows of a thread side by side, in order.

    Args:
        segments: Where to look.
        known: What the numbers in them stand for.
        prefix: The path of the prefix.
        ids: Sorted ids that the rows are limited to; None: all that are alive.
    """

    def __init__(
        self, segments: Sequence[Segment], known: Known, prefix: bytes, ids: Ints | None = None
    ) -> None:
        self.known = known
        self._runs: list[_Run] = []
        self._chosen: list[tuple[Segment, slice | Ints]] = []
        self._order: Ints | None = None
        base = 0
        for segment in segments:
            start, stop = segment.under(prefix)
            if start == stop:
                continue
            inside = _inside(segment, start, stop, ids)
            if inside is None:
                self._runs.append(_Run(segment, start, stop, None, base))
                self._chosen.append((segment, slice(start, stop)))
                base += stop - start
            else:
                rows = np.flatnonzero(inside)
                places = np.full(stop - start, -1, np.int64)
                places[rows] = np.arange(len(rows)) + base
                self._runs.append(_Run(segment, start, stop, places, base))
                self._chosen.append((segment, rows + start))
                base += len(rows)
        if len(self._runs) > 1 and (self.thread >= 0).any():
            self._reorder(np.lexsort((self.position, self.thread)))

    def __len__(self) -> int:
        return len(self.ids)

    def _column(self, name: str, kind: Any) -> Any:
        """One value a row; gathered when it is asked for, for few searches need all of them."""
        parts = [getattr(segment, name)[rows] for segment, rows in self._chosen]
        joined = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, kind), *parts])
        joined = joined.astype(kind, copy=False)
        return joined if self._order is None else joined[self._order]

    @cached_property
    def ids(self) -> Ints:
        """The items."""
        return self._column("ids", np.int64)  # type: ignore[no-any-return]

    @cached_property
    def thread(self) -> Ints:
        """The number of its thread; negative: none."""
        return self._column("thread", np.int64)  # type: ignore[no-any-return]

    @cached_property
    def position(self) -> NDArray[np.float64]:
        """Its place in the thread."""
        return self._column("position", np.float64)  # type: ignore[no-any-return]

    @cached_property
    def actor(self) -> Ints:
        """The number of who said it; negative: nobody."""
        return self._column("actor", np.int64)  # type: ignore[no-any-return]

    @cached_property
    def at(self) -> NDArray[np.float64]:
        """When it was said."""
        return self._column("at", np.float64)  # type: ignore[no-any-return]

    @cached_property
    def lengths(self) -> Floats:
        """How many words it has."""
        return self._column("lengths", np.float32)  # type: ignore[no-any-return]

    @cached_property
    def asks(self) -> NDArray[np.bool_]:
        """Whether it is a question."""
        return self._column("asks", np.bool_)  # type: ignore[no-any-return]

    def _reorder(self, order: Ints) -> None:
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        for run in self._runs:
            if run.places is None:
                run.places = place[run.base : run.base + run.stop - run.start]
            else:
                inside = run.places >= 0
                run.places[inside] = place[run.places[inside]]
        self._order = order
        for name in ("thread", "position"):  # gathered in the former order
            self.__dict__.pop(name, None)

    def arrangement(self) -> Arrangement | None:
        """Who is next to whom; None if no row belongs to a thread."""
        if not len(self) or not (self.thread >= 0).any():
            return None
        return arrange(self.thread, self.lengths, self.asks, self.at)

    def term(self, number: int) -> tuple[Ints, Floats]:
        """The rows that have a term, each once, and how often."""
        found: list[tuple[Any, Any]] = []
        for run in self._runs:
            rows, counts = run.segment.posting(number, run.start, run.stop)
            if not len(rows):
                continue
            if run.places is None:
                found.append((rows - run.start + run.base, counts))
            else:
                places = run.places[rows - run.start]
                inside = places >= 0
                found.append((places[inside], counts[inside]))
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        if len(found) == 1:
            return found[0]
        return np.concatenate([r for r, _ in found]), np.concatenate([c for _, c in found])

    def cosines(self, query: Floats, approximate_above: int) -> Floats:
        """Similarity of each row's best vector to the query's; NaN for a row without one.

        Args:
            query: `float32[dims]`, normalised.
            approximate_above: Vectors under the prefix from which sketches are used.
        """
        out = np.full(len(self), np.nan, np.float32)
        count = sum(run.vectors for run in self._runs)
        share = second_look(count) if count > approximate_above else None
        for run in self._runs:
            scores = _of_run(run, query, share)
            if scores is None:
                continue
            if run.places is None:
                out[run.base : run.base + len(scores)] = scores
            else:
                inside = run.places >= 0
                out[run.places[inside]] = scores[inside]
        return out


def _inside(segment: Segment, start: int, stop: int, ids: Ints | None) -> NDArray[np.bool_] | None:
    """Which rows of a run are in; None: all."""
    alive = segment.alive[start:stop] if segment.dead else None
    if ids is None:
        return None if alive is None or alive.all() else alive
    of = segment.ids[start:stop]
    place = np.minimum(np.searchsorted(ids, of), max(len(ids) - 1, 0))
    wanted = ids[place] == of if len(ids) else np.zeros(len(of), bool)
    return np.asarray(wanted if alive is None else wanted & alive)


def _of_run(run: _Run, query: Floats, share: float | None) -> Floats | None:
    matrix, chunks = run.segment.matrix, run.segment.chunks
    first, last = int(chunks[run.start]), int(chunks[run.stop])
    if matrix is None or first == last:
        return None
    if share is not None and matrix.sketch is not None:
        scores = matrix.estimates(query, first, last, share)
    else:
        scores = matrix.scores(query, first, last)
    begins = chunks[run.start : run.stop] - first
    sizes = np.diff(chunks[run.start : run.stop + 1])
    if (sizes == 1).all():
        return scores
    out = np.full(len(sizes), np.nan, np.float32)
    some = sizes > 0
    out[some] = np.maximum.reduceat(scores, begins[some])
    return out

"""A segment: what search needs of some items, in arrays sorted by namespace and thread.

Sorted so, everything under a prefix is one run of rows, and the neighbours of a message in its
thread are the rows beside it. A segment is immutable but for the rows that died since.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.stores.namespaces import span
from perdure.stores.vectors import Matrix

Ints = NDArray[np.int64]

_NONE: Final = np.empty(0, np.int32)
_COUNT_BITS: Final = 12
_MOST_COUNTED: Final = (1 << _COUNT_BITS) - 1  # more often counts no more


class Entry(NamedTuple):
    """What search needs of one version.

    Attributes:
        id: Of the version.
        path: Of its namespace.
        terms: Numbers of its tokens, in their order.
        vectors: Its stored vectors, one after another.
        thread: Number of its thread within its namespace, or -1.
        position: Its place in the thread.
        actor: Number of who said it, or -1.
        at: When it was said, in seconds since 1970; NaN: unknown.
        asks: Whether it is a question.
    """

    id: int
    path: bytes
    terms: NDArray[np.int32]
    vectors: bytes
    thread: int
    position: float
    actor: int
    at: float
    asks: bool


@dataclass(slots=True)
class Segment:
    """Rows of several items.

    Attributes:
        paths: The distinct paths, in order.
        starts: `int64[paths + 1]`: where each path's rows begin.
        ids, thread, position, actor, at, asks, lengths: One value a row.
        alive: Whether the row's version is still the present one.
        terms: The distinct terms, in order.
        postings: `int64[terms + 1]`: where each term's entries begin in `rows` and `counts`.
        rows, counts: The rows that have a term, in order, and how often.
        chunks: `int64[rows + 1]`: where each row's vectors begin in `matrix`.
        matrix: All vectors.
    """

    paths: list[bytes]
    starts: Ints
    ids: Ints
    thread: Ints
    position: NDArray[np.float64]
    actor: Ints
    at: NDArray[np.float64]
    asks: NDArray[np.bool_]
    lengths: NDArray[np.float32]
    alive: NDArray[np.bool_]
    terms: NDArray[np.int32]
    postings: Ints
    rows: NDArray[np.int32]
    counts: NDArray[np.float32]
    chunks: Ints
    matrix: Matrix | None
    dead: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def under(self, prefix: bytes) -> tuple[int, int]:
        """The run of rows under a prefix."""
        low, high = span(prefix)
        return (
            int(self.starts[bisect_left(self.paths, low)]),
            int(self.starts[bisect_left(self.paths, high)]),
        )

    def posting(self, term: int, start: int, stop: int) -> tuple[Any, Any]:
        """The rows of a run that have a term, and how often."""
        place = int(np.searchsorted(self.terms, term))
        if place == len(self.terms) or self.terms[place] != term:
            return self.rows[:0], self.counts[:0]
        begin, end = int(self.postings[place]), int(self.postings[place + 1])
        of = self.rows[begin:end]
        low, high = np.searchsorted(of, (start, stop))
        return of[low:high], self.counts[begin:end][low:high]

    def kill(self, ids: Ints) -> None:
        """Mark versions as no longer present."""
        if not len(self.ids):
            return
        hit = np.flatnonzero(np.isin(self.ids, ids))
        if len(hit):
            self.alive = self.alive.copy()  # a search that is under way keeps what it saw
            self.alive[hit] = False
            self.dead = int(len(self.alive) - self.alive.sum())

    def without_dead(self) -> Segment:
        """The same rows, less those that died."""
        return merged([self]) if self.dead else self


def segment(entries: Sequence[Entry], width: int, matrix: Matrix | None) -> Segment:
    """A segment of some items.

    Args:
        entries: What of each item.
        width: Bytes of a vector; 0: there are none.
        matrix: Their vectors, in the order of the entries.
    """
    sizes = np.array([len(e.terms) for e in entries], np.int64)
    flat = np.concatenate([_NONE, *(e.terms for e in entries)])
    raw = _Raw(
        paths=[e.path for e in entries],
        ids=np.array([e.id for e in entries], np.int64),
        thread=np.array([e.thread for e in entries], np.int64),
        position=np.array([e.position for e in entries], np.float64),
        actor=np.array([e.actor for e in entries], np.int64),
        at=np.array([e.at for e in entries], np.float64),
        asks=np.array([e.asks for e in entries], bool),
        lengths=sizes.astype(np.float32),
        owners=np.repeat(np.arange(len(entries)), sizes),
        terms=flat,
        counts=None,
        vectors=np.array([len(e.vectors) // width if width else 0 for e in entries], np.int64),
        matrix=matrix,
    )
    return _arranged(raw)


def merged(segments: Sequence[Segment]) -> Segment:
    """One segment of the living rows of several."""
    keep = [np.flatnonzero(s.alive) for s in segments]
    offsets = np.cumsum([0, *(len(k) for k in keep)])
    owners, terms, counts = [], [], []
    for s, rows, offset in zip(segments, keep, offsets, strict=False):
        number = np.full(len(s), -1, np.int64)
        number[rows] = np.arange(len(rows)) + offset
        owner = number[s.rows]
        living = owner >= 0
        owners.append(owner[living])
        terms.append(np.repeat(s.terms, np.diff(s.postings))[living])
        counts.append(s.counts[living])
    parts = [
        s.matrix.taken(_expanded(s.chunks, rows))
        for s, rows in zip(segments, keep, strict=True)
        if s.matrix is not None
    ]
    every = list(zip(segments, keep, strict=True))
    raw = _Raw(
        paths=[path for s, rows in every for path in _paths_of(s, rows)],
        ids=np.concatenate([s.ids[k] for s, k in every]),
        thread=np.concatenate([s.thread[k] for s, k in every]),
        position=np.concatenate([s.position[k] for s, k in every]),
        actor=np.concatenate([s.actor[k] for s, k in every]),
        at=np.concatenate([s.at[k] for s, k in every]),
        asks=np.concatenate([s.asks[k] for s, k in every]),
        lengths=np.concatenate([s.lengths[k] for s, k in every]),
        owners=np.concatenate(owners),
        terms=np.concatenate(terms),
        counts=np.concatenate(counts),
        vectors=np.concatenate([np.diff(s.chunks)[k] for s, k in every]),
        matrix=Matrix.joined(parts) if parts else None,
    )
    return _arranged(raw)


@dataclass(slots=True)
class _Raw:
    """Rows in any order, on their way to a segment."""

    paths: list[bytes]
    ids: Ints
    thread: Ints
    position: NDArray[np.float64]
    actor: Ints
    at: NDArray[np.float64]
    asks: NDArray[np.bool_]
    lengths: NDArray[np.float32]
    owners: Ints
    terms: NDArray[np.int32]
    counts: NDArray[np.float32] | None  # how often each row has each term; None: count them
    vectors: Ints
    matrix: Matrix | None


def _arranged(raw: _Raw) -> Segment:
    paths = sorted(set(raw.paths))
    number: Mapping[bytes, int] = {path: i for i, path in enumerate(paths)}
    ranks = np.array([number[path] for path in raw.paths], np.int64)
    order = np.lexsort((raw.ids, raw.position, raw.thread, ranks))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    terms, postings, rows, counts = _inverted(raw, place)
    first = np.cumsum(np.concatenate([[0], raw.vectors]))
    return Segment(
        paths=paths,
        starts=np.searchsorted(ranks[order], np.arange(len(paths) + 1)),
        ids=raw.ids[order],
        thread=raw.thread[order],
        position=raw.position[order],
        actor=raw.actor[order],
        at=raw.at[order],
        asks=raw.asks[order],
        lengths=raw.lengths[order],
        alive=np.ones(len(order), bool),
        terms=terms,
        postings=postings,
        rows=rows,
        counts=counts,
        chunks=np.cumsum(np.concatenate([[0], raw.vectors[order]])),
        matrix=None if raw.matrix is None else raw.matrix.taken(_expanded(first, order)),
    )


def _inverted(raw: _Raw, place: Ints) -> tuple[Any, Ints, Any, Any]:
    """Entries by term and row, each once, with how often the row has the term."""
    size = max(len(place), 1)
    key = raw.terms.astype(np.int64) * size + place[raw.owners]
    if raw.counts is None:
        key.sort()
        first = np.flatnonzero(np.diff(key, prepend=-1))
        counts = np.diff(first, append=len(key)).astype(np.float32)
        key = key[first]
    else:  # each pair is there once: its count rides along in the low bits
        key = (key << _COUNT_BITS) | np.minimum(raw.counts, _MOST_COUNTED).astype(np.int64)
        key.sort()
        counts = (key & _MOST_COUNTED).astype(np.float32)
        key >>= _COUNT_BITS
    term_of = (key // size).astype(np.int32)
    begins = np.flatnonzero(np.diff(term_of, prepend=-1))
    return (
        term_of[begins],
        np.append(begins, len(term_of)).astype(np.int64),
        (key - term_of.astype(np.int64) * size).astype(np.int32),
        counts,
    )


def _expanded(first: Ints, rows: Ints) -> Ints:
    """The numbers of all vectors of some rows, in the rows' order."""
    begins, sizes = first[rows], first[rows + 1] - first[rows]
    if (sizes == 1).all():
        return begins
    ends = np.cumsum(sizes)
    return np.asarray(np.arange(int(sizes.sum())) - np.repeat(ends - sizes - begins, sizes))


def _paths_of(s: Segment, rows: Ints) -> list[bytes]:
    place = np.searchsorted(s.starts, rows, side="right") - 1
    return [s.paths[i] for i in place]

"""The in-memory index of one namespace: its items, words and vectors in arrays.

Rows are appended as items are put. Their words go to a short list that is searched from end to end;
when that has grown, it is sorted into the postings (`Index.compact`), where each word has its rows.
A search works on a `View`, which stays as it is while the index changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.stores.expansion import Vocabulary
from perdure.stores.index_view import ROW, Ints, Postings, Vectors, View, ordered, places
from perdure.stores.models import Model
from perdure.stores.vectors import Matrix

FOREVER: Final = (1 << 63) - 1  # when what does not expire expires
_SHORT: Final = 1 << 13  # entries of the list of words, 128 vectors: not sorted in before
_SHARE: Final = 32  # nor before they are one in so many of what is sorted
_MOST_COUNTED: Final = 255  # more often in one row counts no more
_PER_NAME: Final = 120  # bytes of a name in a dict, about
_ROW_BITS, _COUNT_BITS = 30, 8  # of a number that sorts by word, then row; the count rides along


class Entry(NamedTuple):
    """The data of one version that search needs."""

    id: int  # of the version
    words: Sequence[str]  # tokens
    asks: bool  # whether it is a question
    vectors: bytes  # as stored, one after another
    thread: str | None
    position: float  # its place in the thread
    actor: str | None  # who said it
    at: float  # seconds since 1970; NaN: unknown
    expires: int  # microseconds since 1970
    since: int  # when it was put, likewise


class Covered(NamedTuple):
    """The content of an index."""

    newest: int  # the highest id that was looked at
    items: int  # that were present, those that search does not find included
    embedded: int  # how often items of the store had got their vectors later


class Index:
    """The data of a namespace's items that search needs. Not for several threads at once."""

    def __init__(self, model: Model | None, approximate_above: int) -> None:
        self.model = model
        self._approximate_above = approximate_above
        self.vocabulary = Vocabulary()
        self.threads = numbered()
        self.actors = numbered()
        self.rows = np.empty(0, ROW)
        self.postings = Postings(
            np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8)
        )
        self.vectors: Vectors | None = None
        self._no_recent()

    def _no_recent(self) -> None:
        none = np.empty(0, np.int32)
        self._recent = (none, none, np.empty(0, np.uint8))  # words, rows, counts
        self._recent_vectors: list[bytes] = []
        self._recent_owners: list[int] = []
        self._view: View | None = None
        self._valid = (0, 0)  # from when to when the view holds

    @property
    def nbytes(self) -> int:
        """Its size in memory, about."""
        total = 3 * self.rows.nbytes + sum(map(len, self._recent_vectors))
        total += sum(array.nbytes for array in (*self.postings, *self._recent))
        if self.vectors is not None:
            total += self.vectors.matrix.nbytes + self.vectors.owner.nbytes
        names = len(self.vocabulary) + len(self.threads) + len(self.actors)
        return total + _PER_NAME * names

    # -- changing

    def add(self, entries: Sequence[Entry]) -> None:
        """Take items in, newer than those that are there."""
        if not entries:
            return
        first = len(self.rows)
        added = [
            (
                entry.id,
                entry.expires,
                entry.since,
                entry.position,
                entry.at,
                -1 if entry.thread is None else self.threads[entry.thread],
                -1 if entry.actor is None else self.actors[entry.actor],
                len(entry.words),
                entry.asks,
                True,
            )
            for entry in entries
        ]
        self.rows = np.concatenate([self.rows, np.array(added, ROW)])
        numbers = self.vocabulary
        words = np.array([numbers[word] for entry in entries for word in entry.words], np.int64)
        of = np.repeat(np.arange(first, len(self.rows)), [len(e.words) for e in entries])
        pairs, counts = np.unique((words << _ROW_BITS) | of, return_counts=True)
        counts = np.minimum(counts, _MOST_COUNTED)
        recent = self._recent
        self._recent = (
            np.concatenate([recent[0], (pairs >> _ROW_BITS).astype(np.int32)]),
            np.concatenate([recent[1], (pairs & ((1 << _ROW_BITS) - 1)).astype(np.int32)]),
            np.concatenate([recent[2], counts.astype(np.uint8)]),
        )
        for row, entry in enumerate(entries, first):
            self._give(row, entry.vectors)
        self._changed()

    def fill(self, vectors: Mapping[int, bytes]) -> None:
        """Take in the vectors of items, by id, that had none."""
        for row, number in self._rows_of(vectors):
            self._give(row, vectors[number])
        self._changed()

    def _rows_of(self, ids: Mapping[int, Any]) -> list[tuple[int, int]]:
        """The rows of some ids that are here, with the id."""
        rows = np.flatnonzero(np.isin(self.rows["id"], list(ids)))
        return list(zip(rows.tolist(), self.rows["id"][rows].tolist(), strict=True))

    def _give(self, row: int, vectors: bytes) -> None:
        if self.model is not None and vectors:
            self._recent_vectors.append(vectors)
            self._recent_owners += [row] * (len(vectors) // self.model.width)

    def keep(self, present: Ints) -> None:
        """Let go of the items that are not among some."""
        self.rows["alive"] &= np.isin(self.rows["id"], present)
        self._changed()

    def drop(self, gone: Ints) -> None:
        """Let go of some items."""
        self.rows["alive"] &= ~np.isin(self.rows["id"], gone)
        self._changed()

    def _changed(self) -> None:
        self._view = None
        words, vectors = len(self._recent[0]), len(self._recent_owners)
        sorted_in = len(self.postings.rows)
        embedded = 0 if self.vectors is None else len(self.vectors.owner)
        dead = len(self.rows) - np.count_nonzero(self.rows["alive"])
        if (
            words > max(_SHORT, sorted_in // _SHARE)
            or vectors > max(_SHORT // 64, embedded // _SHARE)
            or dead > max(64, len(self.rows) // 2)
        ):
            self.compact()

    def compact(self) -> None:
        """Sort all words into the postings; drop rows that died, and words that no row has."""
        rows = self.rows
        order = ordered(rows, np.flatnonzero(rows["alive"]))
        place = places(order, len(rows))
        vectors = self._joined_vectors(place)
        words, of, counts = self._recent
        starts, sorted_rows, sorted_counts = self.postings
        key = np.concatenate([np.repeat(np.arange(len(starts) - 1), np.diff(starts)), words])
        of = place[np.concatenate([sorted_rows, of])]
        inside = of >= 0
        key <<= _ROW_BITS  # in place: there may be millions
        key |= of
        key <<= _COUNT_BITS
        key |= np.concatenate([sorted_counts, counts])
        key = key[inside]
        key[np.count_nonzero(inside[: len(sorted_rows)]) :].sort()
        key.sort(kind="stable")  # which merges what is in order: rows keep their order
        numbers = np.arange(len(self.vocabulary) + 1) << (_ROW_BITS + _COUNT_BITS)
        starts = np.searchsorted(key, numbers)
        used = np.flatnonzero(np.diff(starts))
        if len(used) < len(self.vocabulary):
            known = list(self.vocabulary)
            self.vocabulary = Vocabulary(known[number] for number in used.tolist())
        counts = (key & _MOST_COUNTED).astype(np.uint8)
        key >>= _COUNT_BITS
        key &= (1 << _ROW_BITS) - 1
        kind = np.uint16 if len(order) <= 1 << 16 else np.int32
        self.postings = Postings(np.append(starts[used], len(key)), key.astype(kind), counts)
        rows = rows[order]
        self.threads = _renumbered(rows, "thread", self.threads)
        self.actors = _renumbered(rows, "actor", self.actors)
        self.rows = rows
        self.vectors = vectors
        self._no_recent()

    def _joined_vectors(self, place: NDArray[np.int32]) -> Vectors | None:
        """The vectors of the rows that have a place, in the order of these."""
        parts = self._parts()
        if not parts:
            return None
        matrix = parts[0].matrix if len(parts) == 1 else Matrix.joined([p.matrix for p in parts])
        owner = place[np.concatenate([part.owner for part in parts])]
        order = np.argsort(owner, kind="stable")
        order = order[np.count_nonzero(owner < 0) :]
        return self.sketched(matrix.taken(order), owner[order]) if len(order) else None

    def sketched(self, matrix: Matrix, owner: NDArray[np.int32]) -> Vectors:
        """Vectors, ready for approximate scores if there are many."""
        return Vectors(matrix.sketched() if len(owner) > self._approximate_above else matrix, owner)

    def _parts(self) -> tuple[Vectors, ...]:
        parts = [] if self.vectors is None else [self.vectors]
        if self._recent_owners and self.model is not None:
            matrix = Matrix.of(b"".join(self._recent_vectors), self.model.dims, self.model.kind)
            parts.append(Vectors(matrix, np.array(self._recent_owners, np.int32)))
        return tuple(parts)

    # -- time

    def due(self, since: int, now: int) -> list[int]:
        """The items that expire within a span, as far as is known here."""
        if self._holds(since) and self._holds(now):
            return []
        rows = self.rows
        hit = rows["alive"] & (rows["expires"] > since) & (rows["expires"] <= now)
        return list(rows["id"][hit].tolist())

    def _holds(self, now: int) -> bool:
        """Whether nothing seems to expire between the last view's moment and this one."""
        return self._view is not None and self._valid[0] <= now < self._valid[1]

    def prolong(self, expiries: Mapping[int, int]) -> None:
        """Note when items expire, by id, that were read meanwhile."""
        for row, number in self._rows_of(expiries):
            self.rows["expires"][row] = expiries[number]
        self._view = None

    # -- looking

    def bare(self) -> list[int]:
        """The items without vectors."""
        bare = self.rows["alive"].copy()
        for _, owner in self._parts():
            bare[owner] = False
        return list(self.rows["id"][bare].tolist())

    def view(self, now: int) -> View:
        """The items that are alive at a moment, in microseconds."""
        if self._view is not None and self._holds(now):
            return self._view
        rows, parts = self.rows, self._parts()
        inside = rows["length"] > 0
        if not inside.all():  # what has neither words nor vectors is never found
            for part in parts:
                inside[part.owner] = True
        inside &= rows["alive"]
        ends = rows["expires"]
        self._valid = (
            ends.max(where=ends <= now, initial=-FOREVER),
            ends.min(where=ends > now, initial=FOREVER),
        )
        order = ordered(rows, np.flatnonzero(inside & (ends > now)))
        self._view = View(
            order,
            self.vocabulary,
            list(self.actors),
            list(self.threads),
            self.nbytes,
            rows,
            self.postings,
            self._recent,
            parts,
        )
        return self._view


def numbered(names: Iterable[str] = ()) -> dict[str, int]:
    """A dict that gives each new key the next number."""
    out: dict[str, int] = defaultdict(lambda: len(out))
    out.update(zip(names, count()))
    return out


def _renumbered(rows: NDArray[Any], column: str, names: Mapping[str, int]) -> dict[str, int]:
    """The names that rows still have, numbered anew, in the rows too."""
    used, numbers = np.unique(rows[column], return_inverse=True)
    none = int(len(used) > 0 and used[0] < 0)
    rows[column] = numbers - none
    known = list(names)
    return numbered(known[number] for number in used[none:].tolist())

"""The in-memory index of one namespace: its items, words and vectors in arrays.

Rows are appended as items are put. Their words go to a short list that is searched from end to end;
when that has grown, it is sorted into the postings (`Index.compact`), where each word has its rows.
A search works on a `View`, which stays as it is while the index changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.stores.index_view import Ints, Postings, Vectors, View, Vocabulary, places
from perdure.stores.models import Model
from perdure.stores.vectors import Matrix

FOREVER: Final = (1 << 63) - 1  # when what does not expire expires
ROW: Final = np.dtype(
    [
        ("id", "<i8"),
        ("expires", "<i8"),  # microseconds since 1970
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


class Growing:
    """An array that grows at its end; a part that was handed out before stays as it is."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._buffer = values
        self._size = len(values)

    def __len__(self) -> int:
        return self._size

    @property
    def values(self) -> NDArray[Any]:
        """Its content."""
        return self._buffer[: self._size]

    def extend(self, values: Any) -> None:
        """Add values at the end."""
        end = self._size + len(values)
        if end > len(self._buffer):
            buffer = np.empty(max(end, self._size * 3 // 2, 16), self._buffer.dtype)
            buffer[: self._size] = self.values
            self._buffer = buffer
        self._buffer[self._size : end] = values
        self._size = end


class Index:
    """The data of a namespace's items that search needs. Not for several threads at once."""

    def __init__(self, model: Model | None, approximate_above: int) -> None:
        self.model = model
        self._approximate_above = approximate_above
        self.vocabulary = Vocabulary()
        self.threads: dict[str, int] = _numbers(())
        self.actors: dict[str, int] = _numbers(())
        self.rows = Growing(np.empty(0, ROW))
        self.postings = Postings(
            np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8)
        )
        self.vectors: Vectors | None = None
        self._no_recent()

    @classmethod
    def of(
        cls,
        model: Model | None,
        approximate_above: int,
        *,
        rows: NDArray[Any],
        words: Iterable[str],
        threads: Iterable[str],
        actors: Iterable[str],
        postings: Postings,
        vectors: tuple[Matrix, NDArray[np.int32]] | None,
    ) -> Index:
        """An index of what a compact one held."""
        out = cls(model, approximate_above)
        out.rows = Growing(rows)
        out.vocabulary = Vocabulary(words)
        out.threads, out.actors = _numbers(threads), _numbers(actors)
        out.postings = postings
        out.vectors = None if vectors is None else out._sketched(Vectors(*vectors))
        return out

    def _no_recent(self) -> None:
        self._recent = tuple(Growing(np.empty(0, kind)) for kind in (np.int32, np.int32, np.uint8))
        self._recent_vectors: list[bytes] = []
        self._recent_owners: list[int] = []
        self._view: View | None = None
        self._valid = (0, 0)  # from when to when the view holds

    @property
    def nbytes(self) -> int:
        """Its size in memory, about."""
        arrays = [self.rows.values, *self.postings, *(part.values for part in self._recent)]
        total = sum(array.nbytes for array in arrays) + 2 * self.rows.values.nbytes
        total += sum(map(len, self._recent_vectors))
        if self.vectors is not None:
            total += self.vectors.matrix.nbytes + self.vectors.owner.nbytes
        return total + self.vocabulary.nbytes + _PER_NAME * (len(self.threads) + len(self.actors))

    # -- changing

    def add(self, entries: Sequence[Entry]) -> None:
        """Take items in, newer than those that are there."""
        if not entries:
            return
        first = len(self.rows)
        self.rows.extend(
            np.array(
                [
                    (
                        entry.id,
                        entry.expires,
                        entry.position,
                        entry.at,
                        -1 if entry.thread is None else self.threads[entry.thread],
                        -1 if entry.actor is None else self.actors[entry.actor],
                        len(entry.words),
                        entry.asks,
                        True,
                    )
                    for entry in entries
                ],
                ROW,
            )
        )
        numbers = self.vocabulary.numbers
        words = np.array([numbers[word] for entry in entries for word in entry.words], np.int64)
        of = np.repeat(np.arange(first, len(self.rows)), [len(e.words) for e in entries])
        pairs = np.sort((words << _ROW_BITS) | of)
        firsts = np.flatnonzero(np.diff(pairs, prepend=-1))
        counts = np.diff(firsts, append=len(pairs))
        pairs = pairs[firsts]
        self._recent[0].extend(pairs >> _ROW_BITS)
        self._recent[1].extend(pairs & ((1 << _ROW_BITS) - 1))
        self._recent[2].extend(np.minimum(counts, _MOST_COUNTED))
        for row, entry in enumerate(entries, first):
            self._give(row, entry.vectors)
        self._changed()

    def fill(self, vectors: Mapping[int, bytes]) -> None:
        """Take in the vectors of items, by id, that had none."""
        rows = self.rows.values
        for row in np.flatnonzero(np.isin(rows["id"], list(vectors))).tolist():
            self._give(row, vectors[int(rows["id"][row])])
        self._changed()

    def _give(self, row: int, vectors: bytes) -> None:
        if self.model is not None and vectors:
            self._recent_vectors.append(vectors)
            self._recent_owners += [row] * (len(vectors) // self.model.width)

    def keep(self, present: Ints) -> None:
        """Let go of the items that are not among some."""
        rows = self.rows.values
        rows["alive"] &= np.isin(rows["id"], present)
        self._changed()

    def _changed(self) -> None:
        self._view = None
        words, vectors = len(self._recent[0]), len(self._recent_owners)
        sorted_in = len(self.postings.rows)
        embedded = 0 if self.vectors is None else len(self.vectors.owner)
        dead = len(self.rows) - np.count_nonzero(self.rows.values["alive"])
        if (
            words > max(_SHORT, sorted_in // _SHARE)
            or vectors > max(_SHORT // 64, embedded // _SHARE)
            or dead > max(64, len(self.rows) // 2)
        ):
            self.compact()

    def compact(self) -> None:
        """Sort all words into the postings; drop rows that died, and words that no row has."""
        rows = self.rows.values
        order = _ordered(rows, np.flatnonzero(rows["alive"]))
        place = places(order, len(rows))
        vectors = self._joined_vectors(place)
        words, of, counts = (part.values for part in self._recent)
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
            known = list(self.vocabulary.numbers)
            self.vocabulary = Vocabulary([known[number] for number in used.tolist()])
        counts = (key & _MOST_COUNTED).astype(np.uint8)
        key >>= _COUNT_BITS
        key &= (1 << _ROW_BITS) - 1
        kind = np.uint16 if len(order) <= 1 << 16 else np.int32
        self.postings = Postings(np.append(starts[used], len(key)), key.astype(kind), counts)
        rows = rows[order]
        self.threads = _renumbered(rows, "thread", self.threads)
        self.actors = _renumbered(rows, "actor", self.actors)
        self.rows = Growing(rows)
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
        return self._sketched(Vectors(matrix.taken(order), owner[order])) if len(order) else None

    def _sketched(self, vectors: Vectors) -> Vectors:
        if len(vectors.matrix) <= self._approximate_above:
            return vectors
        return Vectors(vectors.matrix.sketched(), vectors.owner)

    def _parts(self) -> tuple[Vectors, ...]:
        parts = [] if self.vectors is None else [self.vectors]
        if self._recent_owners and self.model is not None:
            matrix = Matrix.of(b"".join(self._recent_vectors), self.model.dims, self.model.kind)
            parts.append(Vectors(matrix, np.array(self._recent_owners, np.int32)))
        return tuple(parts)

    # -- time

    def is_settled(self, now: int) -> bool:
        """Whether nothing seems to have expired since the last view."""
        return self._view is not None and self._valid[0] <= now < self._valid[1]

    def due(self, since: int, now: int) -> list[int]:
        """The items that expire within a span, as far as is known here."""
        rows = self.rows.values
        hit = rows["alive"] & (rows["expires"] > since) & (rows["expires"] <= now)
        found: list[int] = rows["id"][hit].tolist()
        return found

    def prolong(self, expiries: Mapping[int, int]) -> None:
        """Note when items expire, by id, that were read meanwhile."""
        rows = self.rows.values
        for row in np.flatnonzero(np.isin(rows["id"], list(expiries))):
            rows["expires"][row] = expiries[int(rows["id"][row])]
        self._view = None

    # -- looking

    def bare(self) -> list[int]:
        """The items without vectors."""
        rows = self.rows.values
        bare = rows["alive"].copy()
        for part in self._parts():
            bare[part.owner] = False
        found: list[int] = rows["id"][bare].tolist()
        return found

    def view(self, now: int) -> View:
        """The items that are alive at a moment, in microseconds."""
        if self._view is None or not self.is_settled(now):
            self._view = self._made(now)
        return self._view

    def _made(self, now: int) -> View:
        rows, parts = self.rows.values, self._parts()
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
        order = _ordered(rows, np.flatnonzero(inside & (ends > now)))
        return View(
            order,
            places(order, len(rows)),
            self.vocabulary,
            list(self.actors),
            len(self.threads),
            self.model,
            self.nbytes,
            rows,
            self.postings,
            tuple(part.values for part in self._recent),  # type: ignore[arg-type]
            parts,
        )


def _ordered(rows: NDArray[Any], some: Ints) -> Ints:
    """Some rows by thread, place in the thread, and age."""
    thread = rows["thread"][some]
    if not (thread >= 0).any():
        return some[np.argsort(rows["id"][some], kind="stable")]
    return some[np.lexsort((rows["id"][some], rows["position"][some], thread))]


def _numbers(names: Iterable[str]) -> dict[str, int]:
    """A dict that gives each new key the next number."""
    out: dict[str, int] = defaultdict(lambda: len(out))
    for number, name in enumerate(names):
        out[name] = number
    return out


def _renumbered(rows: NDArray[Any], column: str, names: Mapping[str, int]) -> dict[str, int]:
    """The names that rows still have, numbered anew, in the rows too."""
    used, numbers = np.unique(rows[column], return_inverse=True)
    none = int(len(used) > 0 and used[0] < 0)
    rows[column] = numbers - none
    known = list(names)
    return _numbers(known[number] for number in used[none:].tolist())

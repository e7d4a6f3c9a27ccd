"""The index of a namespace: its items, words and vectors in arrays, in memory and in the file.

Rows are appended as items are put. Their words go to a short list that is searched from end to end;
when that has grown, it is sorted into the postings (`Index.compact`), where each word has its rows.
A search works on an `IndexView`, which stays as it is while the index changes. The compact form,
`packed`, is a head in JSON, then the arrays, then the words.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.errors import CorruptRecord
from perdure.storage.encryption import AssociatedData, Seal
from perdure.stores.namespaces import decode_path
from perdure.stores.ranking import Arrangement, arrange
from perdure.stores.separation import (
    MAX_WORDED,
    Separation,
    measure,
    pairs_sharing_words,
    sample_size,
)
from perdure.stores.text import Vocabulary
from perdure.stores.vectors import Floats, Matrix, Model, rescored_share

Ints = NDArray[np.int64]
Rows = NDArray[np.integer[Any]]
Hits = tuple[Ints, Floats]  # rows that have a word, each once, and how often

_FEW: Final = 4  # a filter that leaves less than one row in so many: only these are compared
NOWHERE: Final[Hits] = np.empty(0, np.int64), np.empty(0, np.float32)
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
FOREVER: Final = (1 << 63) - 1  # when what does not expire expires
_SHORT: Final = 1 << 13  # entries of the list of words, 128 vectors: not sorted in before
_SHARE: Final = 32  # nor before they are one in so many of what is sorted
_MOST_COUNTED: Final = 255  # more often in one row counts no more
_PER_NAME: Final = 120  # bytes of a name in a dict, about
_ROW_BITS, _COUNT_BITS = 30, 8  # of a number that sorts by word, then row; the count rides along
_LOG = logging.getLogger("perdure")
_FORM: Final = 3  # its version
_ALIGNED: Final = 8  # bytes
_LENGTH: Final = 8  # bytes of the length of the head
_LARGEST: Final = 1 << 29  # bytes that are written; SQLite's own limit is 10^9


class IndexedItem(NamedTuple):
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


class _Sample(NamedTuple):
    """The rows in which the separation of an index was measured."""

    ids: Ints
    separation: Separation


class Covered(NamedTuple):
    """The content of an index."""

    newest: int  # the highest id that was looked at
    items: int  # that were present, those that search does not find included
    embedded: int  # how often items of the store had got their vectors later
    closed: int  # the newest closing of a version that it knows of


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
        self._sample: _Sample | None = None
        self._no_recent()

    def _no_recent(self) -> None:
        none = np.empty(0, np.int32)
        self._recent = (none, none, np.empty(0, np.uint8))  # words, rows, counts
        self._recent_vectors: list[bytes] = []
        self._recent_owners: list[int] = []
        self._view: IndexView | None = None
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

    def add(self, entries: Sequence[IndexedItem]) -> None:
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
        self._sample = None
        self._changed()

    def _rows_of(self, ids: Mapping[int, Any]) -> list[tuple[int, int]]:
        """The rows of some ids that are here, with the id."""
        rows = np.flatnonzero(np.isin(self.rows["id"], list(ids)))
        return list(zip(rows.tolist(), self.rows["id"][rows].tolist(), strict=True))

    def _give(self, row: int, vectors: bytes) -> None:
        if self.model is not None and vectors:
            self._recent_vectors.append(vectors)
            self._recent_owners += [row] * (len(vectors) // self.model.vector_bytes)

    def drop(self, gone: Ints) -> None:
        """Let go of some items."""
        self.rows["alive"] &= ~np.isin(self.rows["id"], gone)
        if self._sample is not None and np.isin(self._sample.ids, gone).any():
            self._sample = None  # a process that loads the index now would measure other rows
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
        self._sample = None
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

    def view(self, now: int) -> IndexView:
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
        self._view = IndexView(
            order,
            self.vocabulary,
            list(self.actors),
            list(self.threads),
            self.nbytes,
            rows,
            self.postings,
            self._recent,
            parts,
            self._find_separation(parts),
        )
        return self._view

    def _find_separation(self, parts: Sequence[Vectors]) -> Separation:
        """Return how well the vectors separate the first rows.

        A former measurement is used again only if it is of the same rows. So the result depends
        only on the rows that are present.
        """
        embedded = np.zeros(len(self.rows), bool)
        for _, owner in parts:
            embedded[owner] = True
        embedded &= self.rows["alive"]
        size = sample_size(int(np.count_nonzero(embedded)))
        if self._sample is None or len(self._sample.ids) != size:
            rows = np.flatnonzero(embedded)
            first = rows[np.argsort(self.rows["id"][rows], kind="stable")[:size]]
            self._sample = _Sample(self.rows["id"][first], self._measure(parts, first))
        return self._sample.separation

    def _measure(self, parts: Sequence[Vectors], first: Ints) -> Separation:
        size = len(first)
        if not size:
            return Separation()
        place = places(first, len(self.rows))
        vectors: Floats | None = None
        for matrix, owner in parts:
            firsts = np.flatnonzero(np.diff(owner, prepend=-1))  # of each row
            chosen = firsts[place[owner[firsts]] >= 0]
            wide = matrix.taken(chosen).widened()
            vectors = np.zeros((size, wide.shape[1]), np.float32) if vectors is None else vectors
            vectors[place[owner[chosen]]] = wide
        assert vectors is not None
        rows = self.rows[first]
        return measure(
            vectors,
            rows["thread"],
            rows["position"],
            rows["length"],
            partial(self._find_pairs_sharing_words, place, min(size, MAX_WORDED)),
        )

    def _find_pairs_sharing_words(self, place: NDArray[np.int32], count: int) -> Rows:
        words, rows = self._words_of(np.where(place < count, place, -1))
        return pairs_sharing_words(words, rows, count)

    def _words_of(self, place: NDArray[np.int32]) -> tuple[Rows, Rows]:
        """Return the words of the rows that have a place, and the place for each word."""
        starts, rows, _ = self.postings
        at = place[rows]
        hits = np.flatnonzero(at >= 0)
        words, of, _ = self._recent
        inside = place[of] >= 0
        return (
            np.concatenate([np.searchsorted(starts, hits, side="right") - 1, words[inside]]),
            np.concatenate([at[hits], place[of[inside]]]),
        )


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


# -- what a search sees


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
class IndexView:
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
    separation: Separation  # of all rows of the index, not only those of the view

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

    def term(self, word: str) -> Hits:
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

    def frequent_words(self, share: float) -> list[str]:
        """Return the words that at least a share of the index's rows have."""
        words = list(self.vocabulary)  # a copy, because words may be added meanwhile
        counts = np.bincount(self.recent[0], minlength=len(words))
        counts[: len(self.postings.starts) - 1] += np.diff(self.postings.starts)
        numbers = np.flatnonzero(counts >= max(share * len(self.rows), 1))
        return [words[number] for number in numbers.tolist()]

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
                scores = matrix.estimates(query, 0, count, rescored_share(count))
            else:
                scores = matrix.scores(query, 0, count)
            firsts = np.flatnonzero(np.diff(owner, prepend=-1))  # of each row
            if len(firsts) < count:
                scores = np.maximum.reduceat(scores, firsts)
            out[owner[firsts]] = scores
        return out if self._is_whole else out[self.order]

    def narrowed(self, ids: Ints) -> IndexView:
        """The same with only the rows that have one of some ids."""
        return replace(self, order=self.order[np.isin(self.rows["id"][self.order], ids)])

    def until(self, at: int) -> IndexView:
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


# -- the form in the file


def opened(
    seal: Seal,
    path: bytes,
    body: bytes,
    model: Model | None,
    approximate_above: int,
    made: Sequence[Any],
) -> tuple[Index, Covered] | None:
    """The index of a compact form; None: it is damaged, or was made in another way."""
    try:
        return _unpacked(seal.unseal(body, _place(path)), model, approximate_above, made)
    except (CorruptRecord, LookupError, TypeError, ValueError) as exc:
        of = decode_path(path)
        _LOG.warning("the search index of %r is damaged, and is made anew: %s", of, exc)
        return None


def _place(path: bytes) -> AssociatedData:
    """The data that binds a compact form to its namespace."""
    return ("index", path.decode())


def sealed(
    seal: Seal, path: bytes, index: Index, covered: Covered, made: Sequence[Any]
) -> bytes | None:
    """The compact form of an index, which is compacted first; None: it is too large.

    It is encrypted if the file is.
    """
    index.compact()
    vectors = index.vectors
    arrays: list[NDArray[Any]] = [index.rows, *index.postings]
    if vectors is not None:
        arrays += [vectors.owner, vectors.matrix.rows]
        arrays += [] if vectors.matrix.scale is None else [vectors.matrix.scale]
    words = "\n".join(index.vocabulary).encode()
    head = {
        "version": _FORM,
        "made": made,
        "covered": covered,
        "model": None if index.model is None else index.model.number,
        "arrays": [(array.dtype.str, array.shape) for array in arrays[1:]],
        "rows": len(index.rows),
        "words": len(words),
        "threads": list(index.threads),
        "actors": list(index.actors),
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % _ALIGNED)
    parts = [len(text).to_bytes(_LENGTH, "little"), text]
    for array in arrays:
        parts += [array.tobytes(), b"\0" * (-array.nbytes % _ALIGNED)]
    body = b"".join([*parts, words])
    return seal.seal(body, _place(path)) if len(body) <= _LARGEST else None


def _unpacked(
    body: bytes, model: Model | None, approximate_above: int, made: Sequence[Any]
) -> tuple[Index, Covered] | None:
    """The index of a compact form, without vectors if they are of another model.

    Returns:
        None: Its words or vectors were made in another way.
    """
    begin = _LENGTH + int.from_bytes(body[:_LENGTH], "little")
    head = json.loads(body[_LENGTH:begin])
    if head["version"] != _FORM or head["made"] != list(made):
        return None
    arrays = []
    for kind, shape in [(ROW, (head["rows"],)), *head["arrays"]]:
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(body, kind, count, begin).reshape(shape))
        size = arrays[-1].nbytes
        begin += size + -size % _ALIGNED
    rows, starts, of, counts, *rest = arrays
    words = body[begin : begin + head["words"]].decode()
    index = Index(model, approximate_above)
    index.rows = rows.copy()
    index.postings = Postings(starts, of, counts)
    index.vocabulary = Vocabulary(words.split("\n") if words else ())
    index.threads, index.actors = numbered(head["threads"]), numbered(head["actors"])
    if rest and model is not None and head["model"] == model.number:
        owner, numbers, *scale = rest
        index.vectors = index.sketched(Matrix(numbers, *scale), owner)
    return index, Covered(*head["covered"])

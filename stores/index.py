"""The search index of one namespace, as arrays in memory, and its encoding for storage.

The index has a row for each item. A search appends rows for the items that were written since the
last search (see `indexes.py`). The words of new rows are appended to an unsorted list, which every
search scans in full. When the unsorted list gets too long, `NamespaceIndex.compact` merges its
words into the sorted postings. The postings are an inverted index: for each word, they contain the
rows in which the word occurs. A search works on an `IndexView`, a snapshot that is not affected by
later changes to the index. An encoded index consists of a JSON header, the arrays and the words.
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
from perdure.stores.namespaces import decode_namespace_path
from perdure.stores.ranking import RowContexts, build_row_contexts
from perdure.stores.separation import (
    MAX_WORDED,
    VectorSeparation,
    compute_sample_size_for_vector_separation,
    find_row_pairs_sharing_rare_word,
    measure_how_vectors_separate_related_rows,
)
from perdure.stores.text import Vocabulary
from perdure.stores.vectors import (
    Floats,
    Model,
    VectorMatrix,
    compute_share_of_rows_to_score_exactly,
)

Ints = NDArray[np.int64]
Rows = NDArray[np.integer[Any]]
# the rows that contain a word, without duplicates, and the word's term frequency in each row
WordHits = tuple[Ints, Floats]

# If a view contains less than 1/4 of the rows of its index, only the vectors of the view's rows are
# compared with the query.
_FEW_DIVISOR: Final = 4
NO_HITS: Final[WordHits] = np.empty(0, np.int64), np.empty(0, np.float32)
ROW_DTYPE: Final = np.dtype(
    [
        ("id", "<i8"),
        ("expires", "<i8"),  # expiry time, as a Unix timestamp in microseconds
        # time when the version was written, as a Unix timestamp in microseconds
        ("since", "<i8"),
        # position in the thread, or the version id if the position is unknown
        ("position", "<f8"),
        ("at", "<f8"),  # Unix timestamp of the message, in seconds; NaN if unknown
        # number that the index assigned to the item's thread, or -1 if the item belongs to no
        # thread
        ("thread", "<i4"),
        # number that the index assigned to the speaker, or -1 if the speaker is unknown
        ("actor", "<i4"),
        ("length", "<i4"),  # number of words
        ("asks", "?"),  # whether the text ends with a question
        ("alive", "?"),  # False once the item has been removed from the index
    ],
    align=True,
)
FOREVER: Final = (1 << 63) - 1  # expiry of an item that never expires
# An index is compacted if the number of its unsorted words exceeds both this minimum and 1/32 of
# the number of its sorted words (see `_UNSORTED_DIVISOR`). For unsorted vectors, the minimum is
# 1/64 of this number. A word is counted once for each row that contains it.
_MIN_UNSORTED: Final = 1 << 13
# With a value of 32, an index is compacted when it has more than 1/32 as many unsorted words or
# vectors as sorted ones.
_UNSORTED_DIVISOR: Final = 32
_MAX_WORD_COUNT: Final = 255  # maximum count of a word in one row
_BYTES_PER_NAME: Final = 120  # approximate bytes of a name in a dict
# Number of bits for the row number and for the count in a sort key, an integer into which a word
# number, a row number and a count are packed.
_ROW_BITS, _COUNT_BITS = 30, 8
_LOG = logging.getLogger("perdure")
_FORMAT_VERSION: Final = 3  # version of the encoded form of an index
# alignment of encoded arrays, in bytes
_ALIGNMENT: Final = 8
# size in bytes of the header-length field at the start of an encoded index
_LENGTH_BYTES: Final = 8
# maximum size of an encoded index in bytes; a larger index is not stored. SQLite's limit for a
# value is 10^9 bytes.
_MAX_ENCODED_BYTES: Final = 1 << 29


class IndexedItem(NamedTuple):
    """The data that a search needs about one version of an item."""

    id: int  # id of the version, which identifies the item in the index
    words: Sequence[str]  # tokens of the text
    ends_with_question: bool  # whether the text ends with a question
    # encoded vectors of the item's text, concatenated
    vectors: bytes
    thread: str | None
    position: float  # position in the thread, or the version id if the position is unknown
    actor: str | None  # the speaker
    sent_at: float  # Unix timestamp of the message, in seconds; NaN if unknown
    expires: int  # expiry time, as a Unix timestamp in microseconds
    # time when the version was written, as a Unix timestamp in microseconds
    put_at: int


class _Sample(NamedTuple):
    """A sample of rows, and how well their vectors separate related rows from random rows."""

    ids: Ints  # ids of the item versions in the sample
    separation: VectorSeparation


class Coverage(NamedTuple):
    """A record of how far an index covers its namespace."""

    newest: int  # highest version id that the index has read
    items: int  # number of current items, including items that are excluded from search
    # value of the store's counter `embedded` when the index was last updated; the store increments
    # the counter when it adds vectors to items that were stored without vectors
    embedded: int
    # sequence number of the latest change that the index reflects and that closed a version by
    # replacement, deletion or expiry
    closed: int


class NamespaceIndex:
    """The search index of one namespace's items.

    Instances are not thread-safe.

    Args:
        model: The model of the vectors, or None if the index has no vectors.
        approximate_above: The number of vectors above which search is approximate.
    """

    def __init__(self, model: Model | None, approximate_above: int) -> None:
        self.model = model
        self._approximate_above = approximate_above
        self.vocabulary = Vocabulary()
        self.threads = build_auto_numbering_dict()
        self.actors = build_auto_numbering_dict()
        self.rows = np.empty(0, ROW_DTYPE)
        self.postings = Postings(
            np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8)
        )
        self.vectors: Vectors | None = None
        self._sample: _Sample | None = None
        self._reset_unsorted_words_vectors_and_cached_view()

    def _reset_unsorted_words_vectors_and_cached_view(self) -> None:
        """Drop the cached view and all unsorted words and vectors."""
        no_numbers = np.empty(0, np.int32)
        # unsorted words, their rows, and counts
        self._unsorted_words = (no_numbers, no_numbers, np.empty(0, np.uint8))
        # unsorted vectors: the encoded vectors of each row, and the row number of each vector
        self._unsorted_vectors: list[bytes] = []
        self._rows_of_unsorted_vectors: list[int] = []
        self._view: IndexView | None = None
        # The cached view is valid at any time `t` for which
        # `_view_bounds[0] <= t < _view_bounds[1]`.
        self._view_bounds = (0, 0)

    @property
    def nbytes(self) -> int:
        """The approximate in-memory size of the index, in bytes."""
        total = 3 * self.rows.nbytes + sum(map(len, self._unsorted_vectors))
        total += sum(array.nbytes for array in (*self.postings, *self._unsorted_words))
        if self.vectors is not None:
            total += self.vectors.matrix.nbytes + self.vectors.owner.nbytes
        names = len(self.vocabulary) + len(self.threads) + len(self.actors)
        return total + _BYTES_PER_NAME * names

    # -- changes

    def add_items(self, entries: Sequence[IndexedItem]) -> None:
        """Add new items to the index, which must not contain them yet."""
        if not entries:
            return
        first = len(self.rows)
        added = [
            (
                entry.id,
                entry.expires,
                entry.put_at,
                entry.position,
                entry.sent_at,
                -1 if entry.thread is None else self.threads[entry.thread],
                -1 if entry.actor is None else self.actors[entry.actor],
                len(entry.words),
                entry.ends_with_question,
                True,
            )
            for entry in entries
        ]
        self.rows = np.concatenate([self.rows, np.array(added, ROW_DTYPE)])
        vocabulary = self.vocabulary
        words = np.array([vocabulary[word] for entry in entries for word in entry.words], np.int64)
        row_of_word = np.repeat(np.arange(first, len(self.rows)), [len(e.words) for e in entries])
        pairs, counts = np.unique((words << _ROW_BITS) | row_of_word, return_counts=True)
        counts = np.minimum(counts, _MAX_WORD_COUNT)
        unsorted = self._unsorted_words
        self._unsorted_words = (
            np.concatenate([unsorted[0], (pairs >> _ROW_BITS).astype(np.int32)]),
            np.concatenate([unsorted[1], (pairs & ((1 << _ROW_BITS) - 1)).astype(np.int32)]),
            np.concatenate([unsorted[2], counts.astype(np.uint8)]),
        )
        for row, entry in enumerate(entries, first):
            self._append_vectors(row, entry.vectors)
        self._compact_if_needed()

    def add_vectors_of_items(self, vectors_by_item_id: Mapping[int, bytes]) -> None:
        """Add vectors for items that were stored without vectors.

        The keys of `vectors_by_item_id` are item ids.
        """
        for row, number in self._find_rows_by_id(vectors_by_item_id):
            self._append_vectors(row, vectors_by_item_id[number])
        self._sample = None
        self._compact_if_needed()

    def _find_rows_by_id(self, ids: Mapping[int, Any]) -> list[tuple[int, int]]:
        """Return (row number, id) pairs for those of the given ids that are in the index."""
        rows = np.flatnonzero(np.isin(self.rows["id"], list(ids)))
        return list(zip(rows.tolist(), self.rows["id"][rows].tolist(), strict=True))

    def _append_vectors(self, row_index: int, vectors: bytes) -> None:
        """Append the encoded vectors of a row to the list of unsorted vectors."""
        if self.model is not None and vectors:
            self._unsorted_vectors.append(vectors)
            self._rows_of_unsorted_vectors += [row_index] * (
                len(vectors) // self.model.vector_bytes
            )

    def remove_items(self, item_ids: Ints) -> None:
        """Remove the items with these ids."""
        self.rows["alive"] &= ~np.isin(self.rows["id"], item_ids)
        if self._sample is not None and np.isin(self._sample.ids, item_ids).any():
            # Discard the measured vector separation, because some of the measured rows have been
            # removed. The result must depend only on the current rows, so that every process gets
            # the same result.
            self._sample = None
        self._compact_if_needed()

    def _compact_if_needed(self) -> None:
        """Discard the cached view. Compact the index if it has many unsorted or removed entries."""
        self._view = None
        unsorted_word_count = len(self._unsorted_words[0])
        unsorted_vector_count = len(self._rows_of_unsorted_vectors)
        sorted_words = len(self.postings.rows)
        sorted_vectors = 0 if self.vectors is None else len(self.vectors.owner)
        removed_rows = len(self.rows) - np.count_nonzero(self.rows["alive"])
        if (
            unsorted_word_count > max(_MIN_UNSORTED, sorted_words // _UNSORTED_DIVISOR)
            or unsorted_vector_count > max(_MIN_UNSORTED // 64, sorted_vectors // _UNSORTED_DIVISOR)
            or removed_rows > max(64, len(self.rows) // 2)
        ):
            self.compact()

    def compact(self) -> None:
        """Sort the rows by thread and position, and merge the unsorted words into the postings.

        The unsorted vectors are merged too. Removed rows are dropped, and so are words that no
        longer occur in any row.
        """
        rows = self.rows
        order = sort_rows_by_thread_and_position(rows, np.flatnonzero(rows["alive"]))
        positions = build_position_of_each_row(order, len(rows))
        vectors = self._sort_vectors_by_row_position(positions)
        words, row_of_word, counts = self._unsorted_words
        starts, sorted_rows, sorted_counts = self.postings
        key = np.concatenate([np.repeat(np.arange(len(starts) - 1), np.diff(starts)), words])
        row_of_word = positions[np.concatenate([sorted_rows, row_of_word])]
        is_present = row_of_word >= 0
        # Change the array of sort keys in place, because it may have millions of elements.
        key <<= _ROW_BITS
        key |= row_of_word
        key <<= _COUNT_BITS
        key |= np.concatenate([sorted_counts, counts])
        key = key[is_present]
        key[np.count_nonzero(is_present[: len(sorted_rows)]) :].sort()
        # The array of sort keys consists of two sorted runs, which numpy's stable sort merges
        # quickly.
        key.sort(kind="stable")
        numbers = np.arange(len(self.vocabulary) + 1) << (_ROW_BITS + _COUNT_BITS)
        starts = np.searchsorted(key, numbers)
        used = np.flatnonzero(np.diff(starts))
        if len(used) < len(self.vocabulary):
            all_words = list(self.vocabulary)
            self.vocabulary = Vocabulary(all_words[number] for number in used.tolist())
        counts = (key & _MAX_WORD_COUNT).astype(np.uint8)
        key >>= _COUNT_BITS
        key &= (1 << _ROW_BITS) - 1
        row_type = np.uint16 if len(order) <= 1 << 16 else np.int32
        self.postings = Postings(np.append(starts[used], len(key)), key.astype(row_type), counts)
        rows = rows[order]
        self.threads = _renumber_names_in_column(rows, "thread", self.threads)
        self.actors = _renumber_names_in_column(rows, "actor", self.actors)
        self.rows = rows
        self.vectors = vectors
        self._sample = None
        self._reset_unsorted_words_vectors_and_cached_view()

    def _sort_vectors_by_row_position(
        self, position_of_each_row: NDArray[np.int32]
    ) -> Vectors | None:
        """Return the vectors sorted by the new position of their row.

        Vectors of rows without a position are omitted.
        """
        parts = self._get_sorted_and_unsorted_vectors()
        if not parts:
            return None
        matrix = (
            parts[0].matrix
            if len(parts) == 1
            else VectorMatrix.concatenate([p.matrix for p in parts])
        )
        owner = position_of_each_row[np.concatenate([part.owner for part in parts])]
        order = np.argsort(owner, kind="stable")
        order = order[np.count_nonzero(owner < 0) :]
        return (
            self.build_vectors_with_sketches_if_many(matrix.take_rows(order), owner[order])
            if len(order)
            else None
        )

    def build_vectors_with_sketches_if_many(
        self, matrix: VectorMatrix, row_of_each_vector: NDArray[np.int32]
    ) -> Vectors:
        """Return a `Vectors` object with a matrix of vectors and the row number of each vector.

        If there are many vectors, the matrix also gets a sketch of each vector. A sketch is a short
        bit string that lets a search estimate how similar the vector is to the query.
        """
        return Vectors(
            matrix.copy_with_sign_bit_sketches()
            if len(row_of_each_vector) > self._approximate_above
            else matrix,
            row_of_each_vector,
        )

    def _get_sorted_and_unsorted_vectors(self) -> tuple[Vectors, ...]:
        """Return the sorted vectors and the unsorted vectors, omitting whichever is empty."""
        parts = [] if self.vectors is None else [self.vectors]
        if self._rows_of_unsorted_vectors and self.model is not None:
            matrix = VectorMatrix.from_bytes(
                b"".join(self._unsorted_vectors), self.model.dims, self.model.kind
            )
            parts.append(Vectors(matrix, np.array(self._rows_of_unsorted_vectors, np.int32)))
        return tuple(parts)

    # -- expiry

    def find_item_ids_expiring_between(self, after_us: int, until_us: int) -> list[int]:
        """Return the ids of the items that expire after `after_us` and no later than `until_us`.

        The expiry times are taken from the index. An item's expiry time in the database may be
        later than the one in the index, because reading an item can restart its TTL. If the cached
        view is valid both at `after_us` and at `until_us`, no item expires in between.
        """
        if self._is_view_valid(after_us) and self._is_view_valid(until_us):
            return []
        rows = self.rows
        is_expiring = rows["alive"] & (rows["expires"] > after_us) & (rows["expires"] <= until_us)
        return list(rows["id"][is_expiring].tolist())

    def _is_view_valid(self, now: int) -> bool:
        """Return whether a view is cached and still valid at the time `now`."""
        return self._view is not None and self._view_bounds[0] <= now < self._view_bounds[1]

    def update_expiries(self, expiry_by_item_id: Mapping[int, int]) -> None:
        """Update expiry times, given as a mapping from item ids to new expiry times."""
        for row, number in self._find_rows_by_id(expiry_by_item_id):
            self.rows["expires"][row] = expiry_by_item_id[number]
        self._view = None

    # -- views

    def list_item_ids_without_vectors(self) -> list[int]:
        """Return the ids of the items without vectors."""
        lacks_vector = self.rows["alive"].copy()
        for _, owner in self._get_sorted_and_unsorted_vectors():
            lacks_vector[owner] = False
        return list(self.rows["id"][lacks_vector].tolist())

    def get_view_of_unexpired_items(self, now: int) -> IndexView:
        """Return a view of the items that have not expired at the time `now`.

        `now` is a Unix timestamp in microseconds.
        """
        if self._view is not None and self._is_view_valid(now):
            return self._view
        rows, parts = self.rows, self._get_sorted_and_unsorted_vectors()
        is_searchable = rows["length"] > 0
        # Omit rows that have neither words nor vectors, because no search can find them.
        if not is_searchable.all():
            for part in parts:
                is_searchable[part.owner] = True
        is_searchable &= rows["alive"]
        expiries = rows["expires"]
        self._view_bounds = (
            expiries.max(where=expiries <= now, initial=-FOREVER),
            expiries.min(where=expiries > now, initial=FOREVER),
        )
        order = sort_rows_by_thread_and_position(
            rows, np.flatnonzero(is_searchable & (expiries > now))
        )
        self._view = IndexView(
            order,
            self.vocabulary,
            list(self.actors),
            list(self.threads),
            self.nbytes,
            rows,
            self.postings,
            self._unsorted_words,
            parts,
            self._get_or_measure_vector_separation(parts),
        )
        return self._view

    def _get_or_measure_vector_separation(
        self, vector_parts: Sequence[Vectors]
    ) -> VectorSeparation:
        """Return how well the index's vectors distinguish related rows from random rows.

        The vector separation is measured on the oldest rows that have vectors. A cached measurement
        is reused only if it was made on the same rows, so that the result depends only on the rows
        in the index.
        """
        embedded = np.zeros(len(self.rows), bool)
        for _, owner in vector_parts:
            embedded[owner] = True
        embedded &= self.rows["alive"]
        size = compute_sample_size_for_vector_separation(int(np.count_nonzero(embedded)))
        if self._sample is None or len(self._sample.ids) != size:
            rows = np.flatnonzero(embedded)
            first = rows[np.argsort(self.rows["id"][rows], kind="stable")[:size]]
            self._sample = _Sample(
                self.rows["id"][first],
                self._measure_how_well_vectors_separate_related_rows(vector_parts, first),
            )
        return self._sample.separation

    def _measure_how_well_vectors_separate_related_rows(
        self, vector_parts: Sequence[Vectors], first_rows: Ints
    ) -> VectorSeparation:
        """Measure how well the vectors of `first_rows` distinguish related rows from random rows.

        `first_rows` are the oldest rows that have vectors.
        """
        size = len(first_rows)
        if not size:
            return VectorSeparation()
        positions = build_position_of_each_row(first_rows, len(self.rows))
        vectors: Floats | None = None
        for matrix, owner in vector_parts:
            # index of the first vector of each row
            first_vectors = np.flatnonzero(np.diff(owner, prepend=-1))
            chosen = first_vectors[positions[owner[first_vectors]] >= 0]
            float_rows = matrix.take_rows(chosen).to_float32()
            vectors = (
                np.zeros((size, float_rows.shape[1]), np.float32) if vectors is None else vectors
            )
            vectors[positions[owner[chosen]]] = float_rows
        assert vectors is not None
        rows = self.rows[first_rows]
        return measure_how_vectors_separate_related_rows(
            vectors,
            rows["thread"],
            rows["position"],
            rows["length"],
            partial(self._find_row_pairs_sharing_rare_words, positions, min(size, MAX_WORDED)),
        )

    def _find_row_pairs_sharing_rare_words(
        self, position_of_each_row: NDArray[np.int32], position_limit: int
    ) -> Rows:
        """Return pairs of rows that share a rare word.

        Both rows of each pair have a position below `position_limit`.
        """
        words, rows = self._collect_words_and_their_row_positions(
            np.where(position_of_each_row < position_limit, position_of_each_row, -1)
        )
        return find_row_pairs_sharing_rare_word(words, rows, position_limit)

    def _collect_words_and_their_row_positions(
        self, position_of_each_row: NDArray[np.int32]
    ) -> tuple[Rows, Rows]:
        """Return the words of the selected rows as two parallel arrays.

        The first array contains word numbers, and the second contains the positions of the rows in
        which these words occur. Rows whose entry in `position_of_each_row` is -1 are skipped.
        """
        starts, rows, _ = self.postings
        posting_positions = position_of_each_row[rows]
        posting_hits = np.flatnonzero(posting_positions >= 0)
        words, unsorted_rows, _ = self._unsorted_words
        is_present = position_of_each_row[unsorted_rows] >= 0
        return (
            np.concatenate(
                [np.searchsorted(starts, posting_hits, side="right") - 1, words[is_present]]
            ),
            np.concatenate(
                [posting_positions[posting_hits], position_of_each_row[unsorted_rows[is_present]]]
            ),
        )


def build_auto_numbering_dict(names: Iterable[str] = ()) -> dict[str, int]:
    """Return a dict that assigns the next integer to each new key when it is first looked up."""
    numbering: dict[str, int] = defaultdict(lambda: len(numbering))
    numbering.update(zip(names, count()))
    return numbering


def _renumber_names_in_column(
    rows: NDArray[Any], column: str, number_by_name: Mapping[str, int]
) -> dict[str, int]:
    """Replace the numbers that represent names in a column with new, consecutive numbers.

    Names that no row uses are dropped. The returned dict maps each remaining name to its number.
    """
    used, numbers = np.unique(rows[column], return_inverse=True)
    absent = int(len(used) > 0 and used[0] < 0)
    rows[column] = numbers - absent
    all_names = list(number_by_name)
    return build_auto_numbering_dict(all_names[number] for number in used[absent:].tolist())


# -- what a search sees


class Postings(NamedTuple):
    """The inverted index, which maps each word to the rows that contain it."""

    # Offsets into `rows`: the entries for word number `w` are `rows[starts[w] : starts[w + 1]]`.
    starts: Ints
    # numbers of the rows that contain a word, grouped by word and in ascending order within each
    # word
    rows: Rows
    # term frequency of the word in each row
    counts: NDArray[np.uint8]


class Vectors(NamedTuple):
    """A matrix of vectors, with the row number of each vector.

    All vectors of a row are adjacent in the matrix.
    """

    matrix: VectorMatrix
    owner: NDArray[np.int32]


@dataclass(frozen=True)
class Candidates:
    """The rows that a search ranks.

    The rows of each thread are adjacent and in message order.
    """

    rows: NDArray[Any]  # rows of `ROW_DTYPE`

    @cached_property
    def lengths(self) -> Floats:
        """The number of words in each row."""
        return np.asarray(self.rows["length"], np.float32)

    @cached_property
    def row_contexts(self) -> RowContexts | None:
        """The contexts of the rows, or None if no row belongs to a thread.

        A row's context consists of its thread, its neighbours in the thread and its recency.
        """
        thread = np.asarray(self.rows["thread"], np.int64)
        if not (thread >= 0).any():
            return None
        return build_row_contexts(thread, self.lengths, self.rows["asks"], self.rows["at"])


@dataclass(frozen=True)
class IndexView:
    """An immutable snapshot of an index, with all or some of its rows."""

    # The row numbers that the view's rows have in the index. The rows of each thread are adjacent
    # and in message order.
    order: Ints
    # All words of the index. They may include words of rows that were added after the view was
    # created.
    vocabulary: Vocabulary
    actors: Sequence[str]  # names by number
    threads: Sequence[str]  # names by number
    nbytes: int  # approximate size of the index in memory, in bytes
    rows: NDArray[Any]  # all rows of the index, as an array of `ROW_DTYPE`
    postings: Postings
    # Word occurrences that are not yet merged into the sorted `postings`, as parallel arrays of
    # word numbers, row numbers and counts
    unsorted_words: tuple[Rows, Rows, NDArray[np.uint8]]
    vectors: tuple[Vectors, ...]
    # statistics that show how well the vectors of the whole index separate related rows from random
    # rows
    separation: VectorSeparation

    @cached_property
    def _is_whole(self) -> bool:
        """Whether the view contains all rows of the index, in the same order as in the index."""
        return len(self.order) == len(self.rows) and bool((self.order[1:] > self.order[:-1]).all())

    @cached_property
    def _positions(self) -> NDArray[np.int32]:
        return build_position_of_each_row(self.order, len(self.rows))

    @cached_property
    def candidates(self) -> Candidates:
        """The rows of the view."""
        return Candidates(self.rows if self._is_whole else self.rows[self.order])

    def find_word_hits(self, word: str) -> WordHits:
        """Return the view's rows that contain a word, with the word's term frequency in each."""
        number = self.vocabulary.get(word)
        if number is None:
            return NO_HITS
        rows: Rows = np.empty(0, np.int32)
        counts = np.empty(0, np.uint8)
        if number < len(self.postings.starts) - 1:
            begin, end = self.postings.starts[number : number + 2]
            rows, counts = self.postings.rows[begin:end], self.postings.counts[begin:end]
        words, unsorted_rows, unsorted_counts = self.unsorted_words
        hits = (words == number).nonzero()[0]
        if len(hits):
            rows = np.concatenate([rows, unsorted_rows[hits]])
            counts = np.concatenate([counts, unsorted_counts[hits]])
        if self._is_whole:
            return rows.astype(np.int64), counts.astype(np.float32)
        positions = self._positions[rows]
        is_present = positions >= 0
        return positions[is_present].astype(np.int64), counts[is_present].astype(np.float32)

    def frequent_words(self, min_share: float) -> list[str]:
        """Return the words that occur in at least the given fraction of the rows in the index."""
        # Copy the words of the vocabulary, because another OS thread may add words while this
        # method counts the rows of each word.
        words = list(self.vocabulary)
        counts = np.bincount(self.unsorted_words[0], minlength=len(words))
        counts[: len(self.postings.starts) - 1] += np.diff(self.postings.starts)
        numbers = np.flatnonzero(counts >= max(min_share * len(self.rows), 1))
        return [words[number] for number in numbers.tolist()]

    def compute_cosines(self, query: Floats, approximate_above: int) -> Floats:
        """Return the highest cosine between the query and each row's vectors.

        For a row without vectors, the result is NaN. If more than `approximate_above` vectors are
        compared with the query, most cosines may be estimates.
        """
        cosines = np.full(len(self.rows), np.nan, np.float32)
        # If the view is a small part of the index, compare the query only with the vectors of the
        # view's rows. A sketch search would return the most similar rows of the whole index, and a
        # small view might contain none of these rows.
        is_small_part = _FEW_DIVISOR * len(self.order) < len(self.rows)
        for matrix, owner in self.vectors:
            if is_small_part:
                chosen = np.flatnonzero(self._positions[owner] >= 0)
                matrix, owner = matrix.take_rows(chosen), owner[chosen]
            count = len(owner)
            if count > approximate_above and matrix.sketch is not None:
                scores = matrix.estimate_cosine_similarities(
                    query, 0, count, compute_share_of_rows_to_score_exactly(count)
                )
            else:
                scores = matrix.compute_exact_cosine_similarities(query, 0, count)
            # index of the first vector of each row
            first_vectors = np.flatnonzero(np.diff(owner, prepend=-1))
            if len(first_vectors) < count:
                scores = np.maximum.reduceat(scores, first_vectors)
            cosines[owner[first_vectors]] = scores
        return cosines if self._is_whole else cosines[self.order]

    def select_ids(self, ids: Ints) -> IndexView:
        """Return an index view that contains only the rows with the given ids."""
        return replace(self, order=self.order[np.isin(self.rows["id"][self.order], ids)])

    def without_later_puts(self, moment: int) -> IndexView:
        """Return an index view without the items that were written after the given time."""
        is_earlier = self.rows["since"][self.order] <= moment
        return self if is_earlier.all() else replace(self, order=self.order[is_earlier])


def sort_rows_by_thread_and_position(rows: NDArray[Any], selected: Ints) -> Ints:
    """Return the selected rows sorted by thread, then by position in the thread, then by id."""
    thread = rows["thread"][selected]
    if not (thread >= 0).any():
        return selected[np.argsort(rows["id"][selected], kind="stable")]
    return selected[np.lexsort((rows["id"][selected], rows["position"][selected], thread))]


def build_position_of_each_row(order: Ints, row_count: int) -> NDArray[np.int32]:
    """Return an array that maps each row number below `row_count` to its position in `order`.

    Row numbers that are not in `order` are mapped to -1.
    """
    positions = np.full(row_count, -1, np.int32)
    positions[order] = np.arange(len(order), dtype=np.int32)
    return positions


# -- the form in the file


def decode_index_or_none_if_outdated(
    seal: Seal,
    path: bytes,
    body: bytes,
    model: Model | None,
    approximate_above: int,
    computation_fingerprint: Sequence[Any],
) -> tuple[NamespaceIndex, Coverage] | None:
    """Decode a stored index, or return None if the index is damaged or outdated.

    Args:
        seal: Decrypts the stored index, or verifies its checksum if it is not encrypted.
        path: The path of the namespace.
        body: The stored bytes.
        model: The embedding model recorded in the database.
        approximate_above: The number of vectors above which search is approximate.
        computation_fingerprint: How words and vectors are computed now, from
            `PutPreparer.describe_how_index_is_computed`.

    Returns:
        The index, and a record of how far it covers the namespace.
    """
    try:
        return _decode_index_body_or_none_if_outdated(
            seal.unseal(body, _build_associated_data(path)),
            model,
            approximate_above,
            computation_fingerprint,
        )
    except (CorruptRecord, LookupError, TypeError, ValueError) as exc:
        namespace = decode_namespace_path(path)
        _LOG.warning(
            "the search index of %r is damaged and will be built again: %s", namespace, exc
        )
        return None


def _build_associated_data(path: bytes) -> AssociatedData:
    """Return the associated data that binds a sealed index to its namespace."""
    return ("index", path.decode())


def encode_index_or_none_if_too_large(
    seal: Seal,
    path: bytes,
    index: NamespaceIndex,
    covered: Coverage,
    computation_fingerprint: Sequence[Any],
) -> bytes | None:
    """Compact and encode an index, or return None if it is too large to be stored.

    The encoded index is encrypted if the database is encrypted. Otherwise, it gets a checksum.
    """
    index.compact()
    vectors = index.vectors
    arrays: list[NDArray[Any]] = [index.rows, *index.postings]
    if vectors is not None:
        arrays += [vectors.owner, vectors.matrix.rows]
        arrays += [] if vectors.matrix.scale is None else [vectors.matrix.scale]
    words = "\n".join(index.vocabulary).encode()
    header = {
        "version": _FORMAT_VERSION,
        "made": computation_fingerprint,
        "covered": covered,
        "model": None if index.model is None else index.model.number,
        "arrays": [(array.dtype.str, array.shape) for array in arrays[1:]],
        "rows": len(index.rows),
        "words": len(words),
        "threads": list(index.threads),
        "actors": list(index.actors),
    }
    header_text = json.dumps(header).encode()
    header_text += b" " * (-len(header_text) % _ALIGNMENT)
    parts = [len(header_text).to_bytes(_LENGTH_BYTES, "little"), header_text]
    for array in arrays:
        parts += [array.tobytes(), b"\0" * (-array.nbytes % _ALIGNMENT)]
    body = b"".join([*parts, words])
    return (
        seal.seal(body, _build_associated_data(path)) if len(body) <= _MAX_ENCODED_BYTES else None
    )


def _decode_index_body_or_none_if_outdated(
    body: bytes, model: Model | None, approximate_above: int, computation_fingerprint: Sequence[Any]
) -> tuple[NamespaceIndex, Coverage] | None:
    """Decode an index from its unsealed bytes. Vectors of other models are omitted.

    Returns:
        The index and its coverage, or None if the format version or the way in which words and
        vectors are computed has changed.
    """
    begin = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    header = json.loads(body[_LENGTH_BYTES:begin])
    if header["version"] != _FORMAT_VERSION or header["made"] != list(computation_fingerprint):
        return None
    arrays = []
    for dtype, shape in [(ROW_DTYPE, (header["rows"],)), *header["arrays"]]:
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(body, dtype, count, begin).reshape(shape))
        size = arrays[-1].nbytes
        begin += size + -size % _ALIGNMENT
    rows, starts, posting_rows, counts, *vector_arrays = arrays
    words = body[begin : begin + header["words"]].decode()
    index = NamespaceIndex(model, approximate_above)
    index.rows = rows.copy()
    index.postings = Postings(starts, posting_rows, counts)
    index.vocabulary = Vocabulary(words.split("\n") if words else ())
    index.threads, index.actors = (
        build_auto_numbering_dict(header["threads"]),
        build_auto_numbering_dict(header["actors"]),
    )
    if vector_arrays and model is not None and header["model"] == model.number:
        owner, vector_rows, *scale = vector_arrays
        index.vectors = index.build_vectors_with_sketches_if_many(
            VectorMatrix(vector_rows, *scale), owner
        )
    return index, Coverage(*header["covered"])

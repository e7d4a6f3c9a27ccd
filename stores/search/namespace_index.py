"""The search index of one namespace, as arrays in memory, and its encoding for storage.

The index has a row for each item. A search appends rows for the items that were written since the
last search (see `index_cache.py`). The words of new rows are appended to an unsorted list, which
every search scans in full. When the unsorted list gets too long, `NamespaceIndex.compact` merges
its words into the sorted postings. The postings are an inverted index: for each word, they contain
the rows in which the word occurs. A search works on an `IndexView`, a snapshot that is not affected
by later changes to the index. An encoded index consists of a JSON header, the arrays and the words.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.errors import CorruptRecord
from perdure.storage.encryption import AssociatedData, Seal
from perdure.stores.namespaces import decode_namespace_path
from perdure.stores.search.ranking import RowContexts, build_row_contexts
from perdure.stores.search.separation import (
    MAX_WORDED,
    MIN_ROWS,
    UNMEASURED,
    VectorSeparation,
    compute_sample_size_for_vector_separation,
    find_row_pairs_sharing_rare_word,
    measure_how_vectors_separate_related_rows,
)
from perdure.stores.search.text import Vocabulary
from perdure.stores.search.vectors import (
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
# Divisor that determines when an index is compacted. Because it is 32, an index is compacted when
# the number of unsorted words or vectors exceeds 1/32 of the number of sorted words or vectors.
_UNSORTED_DIVISOR: Final = 32
_MAX_WORD_COUNT: Final = 255  # maximum count of a word in one row
_BYTES_PER_NAME: Final = 120  # approximate bytes of a name in a dict
# Bit widths of the row index and the term frequency in a sort key. A sort key is an integer that
# contains a word's index, a row's index and the word's frequency in this row.
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
    """Sampled rows, with a measure of how well their vectors identify related rows."""

    ids: Ints  # ids of the item versions in the sample
    separation: VectorSeparation


class Coverage(NamedTuple):
    """Records which versions and changes of a namespace have been applied to its index."""

    newest: int  # highest version id that the index has read
    items: int  # number of current items, including items that are excluded from search
    # value of the store's counter `embedded` when the index was last updated; the store increments
    # the counter when it adds vectors to items that were stored without vectors
    embedded: int
    # Sequence number of the last applied change that ended the validity of an item version. All
    # earlier changes of this kind have also been applied to the index. The validity of an item
    # version ends when the item is replaced, is deleted or expires.
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
        """Drop the cached view, and all words and vectors that are not yet in sorted arrays."""
        no_numbers = np.empty(0, np.int32)
        # unsorted words, their rows, and counts
        self._unsorted_words = (no_numbers, no_numbers, np.empty(0, np.uint8))
        # Vectors that are not yet merged into the sorted arrays. The first list contains one byte
        # string per row, which consists of all encoded vectors of the row. The second list contains
        # one row number per vector.
        self._unsorted_vectors: list[bytes] = []
        self._rows_of_unsorted_vectors: list[int] = []
        self._view: IndexView | None = None
        # The cached view is valid at any time `t` for which
        # `_view_bounds[0] <= t < _view_bounds[1]`.
        self._view_bounds = (0, 0)

    @property
    def nbytes(self) -> int:
        """The approximate in-memory size of the index, in bytes."""
        total: int = 3 * self.rows.nbytes + sum(map(len, self._unsorted_vectors))
        total += sum(map(attrgetter("nbytes"), (*self.postings, *self._unsorted_words)))
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
        """Return (row number, id) pairs for the given ids that are in the index."""
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

        The unsorted vectors are merged too. Rows that are marked as removed are dropped from the
        arrays, and so are words that no longer occur in any row.
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
        self.threads = _drop_unused_names_and_renumber_column(rows, "thread", self.threads)
        self.actors = _drop_unused_names_and_renumber_column(rows, "actor", self.actors)
        self.rows = rows
        self.vectors = vectors
        self._sample = None
        self._reset_unsorted_words_vectors_and_cached_view()

    def _sort_vectors_by_row_position(
        self, position_of_each_row: NDArray[np.int32]
    ) -> Vectors | None:
        """Return the vectors of the index in the order of their rows' new positions.

        Vectors of removed rows (-1 in `position_of_each_row`) are dropped.
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

        If there are many vectors, the matrix also stores a sketch (a compressed approximation) of
        each vector. A sketch is a short bit string from which a search estimates a vector's
        similarity to the query.
        """
        return Vectors(
            matrix.copy_with_sign_bit_sketches()
            if len(row_of_each_vector) > self._approximate_above
            else matrix,
            row_of_each_vector,
        )

    def _get_sorted_and_unsorted_vectors(self) -> tuple[Vectors, ...]:
        """Return the index's sorted vectors, if any, followed by its unsorted vectors, if any."""
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

        This method uses the expiry times that are cached in the index. An item's expiry time in the
        database may be later than the one in the index, because reading an item can restart its
        TTL. If the validity period of the cached view includes both `after_us` and `until_us`, no
        item expires between these two times. The returned list is empty if no item expires between
        `after_us` and `until_us`.
        """
        valid_from, valid_until = self._view_bounds
        if self._view is not None and valid_from <= after_us <= until_us < valid_until:
            return []
        rows = self.rows
        is_expiring = rows["alive"] & (rows["expires"] > after_us) & (rows["expires"] <= until_us)
        return list(rows["id"][is_expiring].tolist())

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
        valid_from, valid_until = self._view_bounds
        if self._view is not None and valid_from <= now < valid_until:
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
        """Return how well the index's vectors distinguish related rows from unrelated rows.

        The separation of related rows from unrelated rows is measured on the oldest rows that have
        vectors. The vector separation, which shows how well vectors distinguish related from
        unrelated rows, is cached. A cached measurement of how well the vectors distinguish rows is
        reused only if a new measurement would use the same rows. Measuring how well the vectors
        distinguish related rows is deterministic, so two indexes with the same rows return the same
        result. If fewer than `MIN_ROWS` rows have vectors, the vector separation is not measured,
        and `UNMEASURED` is returned.
        """
        embedded = np.zeros(len(self.rows), bool)
        for _, owner in vector_parts:
            embedded[owner] = True
        embedded &= self.rows["alive"]
        row_count = int(np.count_nonzero(embedded))
        if row_count < MIN_ROWS:
            return UNMEASURED
        size = compute_sample_size_for_vector_separation(row_count)
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
        """Measure how well the vectors of `first_rows` distinguish related from unrelated rows.

        `first_rows` are the oldest rows that have vectors.
        """
        size = len(first_rows)
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

        Both rows of each pair have a position (see `position_of_each_row`) below `position_limit`.
        """
        words, rows = self._collect_words_and_their_row_positions(
            np.where(position_of_each_row < position_limit, position_of_each_row, -1)
        )
        return find_row_pairs_sharing_rare_word(words, rows, position_limit)

    def _collect_words_and_their_row_positions(
        self, position_of_each_row: NDArray[np.int32]
    ) -> tuple[Rows, Rows]:
        """Return each word of the selected rows with the row's position, as two parallel arrays.

        For each word of each selected row, the first array contains the word's number, and the
        second array contains the row's position. Rows whose entry in `position_of_each_row` is -1
        are skipped.
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


def _drop_unused_names_and_renumber_column(
    rows: NDArray[Any], column: str, number_by_name: Mapping[str, int]
) -> dict[str, int]:
    """Assign new numbers to the names used in a column of `rows`, and drop names that no row uses.

    The new numbers are consecutive and start at 0.

    Each integer in the column encodes a name, for example the name of a speaker. The dict
    `number_by_name` maps names to these integers. Return a dict that maps each remaining name to
    its new number.
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
    """A matrix of embedding vectors, and the item to which each vector belongs.

    For the vector in row `i` of `matrix`, `owner[i]` is the item's row number in the index.

    An item in the index has one vector for each chunk of its text. All vectors of the same item
    occupy consecutive rows of the matrix.
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
        """The thread, neighbours and recency of each row, or None if no row belongs to a thread.

        A row's context consists of its thread, its neighbours in the thread and its recency.
        """
        thread = np.asarray(self.rows["thread"], np.int64)
        if not (thread >= 0).any():
            return None
        return build_row_contexts(thread, self.lengths, self.rows["asks"], self.rows["at"])


@dataclass(frozen=True)
class IndexView:
    """An immutable snapshot of an index, with all or some of its rows."""

    # For each row of the view, its row number in the index. The rows of each thread are adjacent
    # and in message order.
    order: Ints
    # All words in the index, possibly including words from rows that were added after the view was
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
    # statistics that show how well the vectors of the whole index distinguish related rows from
    # unrelated rows
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

    def find_hits_by_word(self, words: Iterable[str]) -> dict[str, WordHits]:
        """Return a dict from each word to the rows of the view that contain the word.

        Words that occur in no row are omitted.
        """
        hits_by_word = dict[str, WordHits]()
        starts, posting_rows, posting_counts = self.postings
        unsorted_numbers, unsorted_rows, unsorted_counts = self.unsorted_words
        for word in words:
            number = self.vocabulary.get(word)
            if number is None:
                continue
            # A word that was added after the postings were sorted has no postings.
            begin, end = starts[number : number + 2] if number < len(starts) - 1 else (0, 0)
            rows, counts = posting_rows[begin:end], posting_counts[begin:end]
            unsorted = (unsorted_numbers == number).nonzero()[0]
            if len(unsorted):
                rows = np.concatenate([rows, unsorted_rows[unsorted]])
                counts = np.concatenate([counts, unsorted_counts[unsorted]])
            if not self._is_whole:
                rows = self._positions[rows]
                is_present = rows >= 0
                rows, counts = rows[is_present], counts[is_present]
            if len(rows):
                hits_by_word[word] = rows.astype(np.int64), counts.astype(np.float32)
        return hits_by_word

    def frequent_words(self, min_share: float) -> list[str]:
        """Return the words that occur in at least the given fraction of the rows in the index."""
        # Copy the words of the vocabulary, because another OS thread may add words while this
        # method counts the rows of each word.
        words = list(self.vocabulary)
        counts = np.bincount(self.unsorted_words[0], minlength=len(words))
        counts[: len(self.postings.starts) - 1] += np.diff(self.postings.starts)
        numbers = np.flatnonzero(counts >= max(min_share * len(self.rows), 1))
        return list(map(words.__getitem__, numbers.tolist()))

    def compute_cosines(self, query: Floats, approximate_above: int) -> Floats:
        """Return, for each row, the highest cosine similarity of its vectors to the query vector.

        For a row without vectors, NaN is returned instead of a cosine. If more than
        `approximate_above` vectors are compared with the query, most cosines may be estimates.
        """
        cosines = np.full(len(self.rows), np.nan, np.float32)
        # If the view contains only a small part of the index, compare the query only with the
        # vectors of the view's rows. An approximate search of the whole index computes exact
        # cosines only for the most similar rows, and these rows might all be outside the view.
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
            `PutPreparer.build_index_computation_fingerprint`.

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
        _LOG.warning("the search index of %r is damaged and will be rebuilt: %s", namespace, exc)
        return None


def _build_associated_data(path: bytes) -> AssociatedData:
    """Return the associated data that binds an encrypted or signed index to its namespace."""
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
    """Decode an index from its unsealed (decrypted or verified) bytes.

    Vectors of other models are omitted.

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

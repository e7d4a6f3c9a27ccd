"""Measure, without labelled data, how well an embedder distinguishes related from unrelated rows.

Three samples of cosines are taken from the vectors of a namespace:

    neighbours   rows that follow each other in a conversation
    sharing      rows that share a rare word
    random       rows that are far apart, in different conversations if there are several

The separation of a sample is the distance between the mean cosine of the sample and the mean cosine
of random rows, in standard deviations (d' of signal detection theory). The separation shows how
much more similar the vectors of related rows are than those of random rows. Because the separation
is measured in standard deviations, it is comparable between embedding models. Cosine similarities
that were computed with different embedding models are not comparable. The cosine of two random
texts may be 0.1 with one model and 0.8 with another. If an embedder's vectors carry no meaning,
related rows are no more similar than random rows, so their separation is near 0.

The separation between related and random rows determines how much vectors count in search scores.
The three attributes of `VectorCalibration` are derived from the measured cosine similarities. A
search uses the three attributes to compute scores. `trust` reduces the weight of vectors, down to
0, if the vectors of related rows are hardly more similar than those of random rows. `gain`
increases the weight of vectors. If `gain` is positive, a row's score also includes a bonus if the
row's thread contains vectors that are similar to the query's vector. `gain` is positive only if the
rows are long and the vectors of neighbouring rows are clearly more similar than those of random
rows. `gain` is 0 if the rows are short. For example, the vector of the short answer "Yes, on
Monday" hardly shows which question the answer belongs to. `origin` is an estimate of the lowest
cosine similarity that two unrelated rows can have. A search uses `origin` as the baseline when it
converts cosines to scores. Decision 0037 has the measurements.

Only the oldest rows of a namespace, at most `MAX_ROWS`, are used to measure how well vectors
distinguish related rows from unrelated rows. Later rows are ignored. When rows are added to or
removed from the set of measured rows, the separation between related and unrelated rows is measured
again. The vector separation (how much more similar the vectors of related rows are than those of
random rows) is not stored in the database. All processes and all database backends compute the same
vector separation from the same rows. Vector separation measures how well the vectors distinguish
related rows from unrelated rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]

# Maximum number of rows per namespace whose vectors are compared to measure how well vectors
# distinguish related rows from unrelated rows.
MAX_ROWS: Final = 512
# Maximum number of rows per namespace whose words are compared to find pairs of rows that share a
# rare word.
MAX_WORDED: Final = 256
# Minimum number of rows with vectors in a namespace. If fewer rows have vectors, the search does
# not measure how well vectors distinguish related from unrelated rows.
MIN_ROWS: Final = 16
_MAX_PAIRS: Final = 512  # maximum number of pairs in each sample
# maximum number of row pairs that are compared for each shared word
_MAX_PAIRS_PER_WORD: Final = 4
_RARE_DIVISOR: Final = 8  # a word is rare if it occurs in at most 1/8 of the rows
# To form random pairs, row i of n rows is paired with row (i + stride * n) modulo n, for each
# stride in `_STRIDES`.
_STRIDES: Final = (0.382, 0.236)
# Weight of the default separation `_PRIOR`, as a number of row pairs. The measured separation is
# averaged with this default to limit the effect of chance in small samples. The same number is the
# minimum number of pairs of neighbouring rows for their separation to be used for `trust`.
_PRIOR_PAIRS: Final = 16
# Default separation, which is used before any row pairs are measured. It is an assumed difference
# between the mean cosines of related and random rows, in standard deviations. When row pairs have
# been measured, the default is averaged with the measured separation (see `_PRIOR_PAIRS`).
_PRIOR: Final = 1.0
# minimum standard deviation of cosine similarities; smaller values are due to rounding errors
_MIN_SPREAD: Final = 1e-3
# Two thresholds for the separation between related and random rows, in standard deviations. Below
# the first threshold, `VectorCalibration.trust` is 0, so vectors have no weight in scores. Above
# the second threshold, `trust` is 1. Between the two thresholds, `trust` rises linearly.
_USELESS, _USEFUL = 0.2, 0.5
# Two thresholds for the separation between neighbouring rows of a thread and random rows, in
# standard deviations. Below the first threshold, `VectorCalibration.gain` is 0. Above the second
# threshold, `gain` is 1 if the rows are long. Between the two thresholds, `gain` rises linearly.
_STRONG, _STRONGEST = 1.1, 2.0
# Two thresholds for the mean number of words per row. Between the two thresholds, the factor that
# scales `VectorCalibration.gain` rises linearly from 0 to 1.
_SHORT, _LONG = 40, 100
# Number of standard deviations subtracted from the mean cosine of random pairs to get
# `VectorCalibration.origin`. `VectorCalibration.origin` estimates the lowest cosine of two
# unrelated rows.
_DEVIATIONS: Final = 4.0


class SampleStatistics(NamedTuple):
    """The count, the sum and the sum of squares of the values in a sample."""

    size: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def from_values(cls, values: Floats) -> Self:
        """Return the count, the sum and the sum of squares of the values."""
        exact = values.astype(np.float64)
        return cls(len(exact), float(exact.sum()), float((exact * exact).sum()))

    def combine_with(self, other: SampleStatistics) -> SampleStatistics:
        """Return the combined statistics of two samples."""
        return SampleStatistics(
            self.size + other.size, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> float:
        """The mean of the values in the sample, or 0 if the sample is empty."""
        return self.total / self.size if self.size else 0.0

    @property
    def variance(self) -> float:
        """The variance of the values in the sample, or 0 if the sample is empty."""
        return max(self.squares / self.size - self.mean**2, 0.0) if self.size else 0.0


_EMPTY_SAMPLE: Final = SampleStatistics()


class VectorCalibration(NamedTuple):
    """Parameters that adapt search scores to the quality of the vectors.

    Vectors have a higher weight in the search score if they distinguish related rows well from
    random rows. The measure is the difference between the mean cosine similarities of related rows
    and of random rows.

    Attributes:
        trust: The factor by which the usual weight of vectors is multiplied, from 0 to 1.
        gain: The additional weight of vectors, as a fraction of the maximum, from 0 to 1.
        origin: The lowest cosine to be expected between two unrelated rows.
    """

    trust: float = 1.0
    gain: float = 0.0
    origin: float = 0.0


USUAL: Final = VectorCalibration()
"""The calibration of vectors that were not measured."""


@dataclass(frozen=True)
class VectorSeparation:
    """Statistics that show how well vectors distinguish related rows from unrelated rows.

    The attributes `neighbours`, `sharing` and `random` contain statistics of cosine similarities.
    Each of the three attributes describes a different sample of row pairs. The statistics describe
    rows from one or more namespaces.

    Attributes:
        neighbours: Statistics of the cosines of rows that follow each other in a thread.
        sharing: Statistics of the cosines of rows that share a rare word.
        random: Statistics of the cosines of random pairs of rows.
        words: Statistics of the number of words in each measured row.
    """

    neighbours: SampleStatistics = _EMPTY_SAMPLE
    sharing: SampleStatistics = _EMPTY_SAMPLE
    random: SampleStatistics = _EMPTY_SAMPLE
    words: SampleStatistics = _EMPTY_SAMPLE

    def combine_with(self, other: VectorSeparation) -> VectorSeparation:
        """Return the combined statistics of this object and `other`."""
        return VectorSeparation(
            self.neighbours.combine_with(other.neighbours),
            self.sharing.combine_with(other.sharing),
            self.random.combine_with(other.random),
            self.words.combine_with(other.words),
        )

    @cached_property
    def vector_weight_calibration(self) -> VectorCalibration:
        """The parameters that adapt search scores to the measured vector separation."""
        # The sample of random pairs is empty if no rows were measured, or if all measured rows have
        # the same vector.
        if not self.random.size:
            return VectorCalibration(trust=0.0) if self.words.size else USUAL
        trust = self.compute_vector_weight_factor(self.sharing)
        if self.neighbours.size >= _PRIOR_PAIRS:
            trust = max(trust, self.compute_vector_weight_factor(self.neighbours))
        strong = self._compute_separation_from_random_pairs(self.neighbours)
        gain = _interpolate(strong, _STRONG, _STRONGEST) * _interpolate(
            self.words.mean, _SHORT, _LONG
        )
        lowest = self.random.mean - _DEVIATIONS * math.sqrt(self.random.variance)
        return VectorCalibration(trust, gain, max(lowest, 0.0))

    def compute_vector_weight_factor(self, cosine_sample: SampleStatistics) -> float:
        """Compute `trust`, which scales the weight of vector similarity in a row's score.

        The argument `cosine_sample` contains statistics of the cosine similarity between the
        vectors of related rows. Related rows follow each other in a thread, or share a rare word.

        `trust` ranges from 0 to 1. `trust` is 0 if the sample is large and its mean cosine
        similarity is no higher than that of random row pairs. If the sample is small, `trust` is
        mainly determined by `_PRIOR`, the assumed separation between related and random rows.
        """
        return _interpolate(
            self._compute_separation_from_random_pairs(cosine_sample), _USELESS, _USEFUL
        )

    def _compute_separation_from_random_pairs(self, cosine_sample: SampleStatistics) -> float:
        """Return how many standard deviations a sample's mean cosine is above that of random pairs.

        The measured separation is the mean cosine of the sample minus the mean cosine of random
        pairs, divided by the pooled standard deviation of the two samples. To reduce sampling
        noise, a weighted mean of the measured separation and the default separation `_PRIOR` is
        returned. In the weighted mean, the weight of the measured separation is the number of row
        pairs in the smaller of the two samples. In the weighted mean, the default separation
        `_PRIOR` counts as much as `_PRIOR_PAIRS` measured row pairs. If the cosine similarity of
        only a few row pairs was measured, the returned mean is close to the default separation
        `_PRIOR`. If the vector separation equals the default `_PRIOR`, vector similarity keeps its
        full weight in the search score.
        """
        count = min(cosine_sample.size, self.random.size)
        spread = math.sqrt((cosine_sample.variance + self.random.variance) / 2)
        distance = (cosine_sample.mean - self.random.mean) / max(spread, _MIN_SPREAD)
        return (count * distance + _PRIOR_PAIRS * _PRIOR) / (count + _PRIOR_PAIRS)


UNMEASURED: Final = VectorSeparation()
"""The statistics of vectors that were not measured."""


def _interpolate(value: float, low: float, high: float) -> float:
    """Interpolate linearly from 0 at `low` to 1 at `high`, and clamp the result to this range."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


def compute_sample_size_for_vector_separation(row_count: int) -> int:
    """Return the sample size, in rows, for measuring how well vectors identify related rows.

    Return 0 if there are too few rows for a measurement.

    The number of rows with vectors is rounded down to three significant bits (for example, from 350
    to 320) and capped at `MAX_ROWS`. Because the sample size is rounded down, adding one row to a
    namespace rarely changes the number of sampled rows. As long as this number is unchanged, an
    earlier measurement can be reused.
    """
    if row_count < MIN_ROWS:
        return 0
    step = 1 << (row_count.bit_length() - 3)
    return min(row_count // step * step, MAX_ROWS)


def measure_how_vectors_separate_related_rows(
    vectors: Floats,
    thread_codes: Ints,
    positions: Floats,
    lengths: Floats,
    list_pairs_with_shared_word: Callable[[], Ints],
) -> VectorSeparation:
    """Measure how well the vectors in a namespace distinguish related rows from unrelated rows.

    Each array argument has one element for each row in the measured sample. The elements are
    ordered by row id.

    Args:
        vectors: One vector of length 1 for each row; float[n, dims].
        thread_codes: A code for each row's thread, negative for none; int[n].
        positions: The position of each row in its thread; float[n].
        lengths: The number of words in each row; float[n].
        list_pairs_with_shared_word: Returns pairs of rows that share a rare word; see
            `find_row_pairs_sharing_rare_word`. The function is called only if neighbours do not
            show that the vectors are useful.
    """
    n = len(vectors)
    order = np.lexsort((np.arange(n), positions, thread_codes))
    first_rows, second_rows = order[:-1], order[1:]
    is_followed = (thread_codes[first_rows] == thread_codes[second_rows]) & (
        thread_codes[first_rows] >= 0
    )
    neighbour_pairs = np.column_stack([first_rows[is_followed], second_rows[is_followed]])
    # Sort the pairs of neighbouring rows by row index, so that every process gets the same order.
    # The unsorted order depends on thread codes, which can differ between processes.
    neighbour_pairs = neighbour_pairs[np.argsort(neighbour_pairs[:, 1])]
    rows = np.arange(n)
    partners = np.concatenate([(rows + max(int(n * stride), 1)) % n for stride in _STRIDES])
    random_pairs = np.column_stack([np.tile(rows, len(_STRIDES)), partners])
    strangers = (thread_codes[random_pairs[:, 0]] != thread_codes[random_pairs[:, 1]]) | (
        thread_codes[random_pairs[:, 0]] < 0
    )
    if strangers.any():
        random_pairs = random_pairs[strangers]
    separation = VectorSeparation(
        neighbours=_compute_cosine_statistics(vectors, neighbour_pairs),
        random=_compute_cosine_statistics(vectors, random_pairs),
        words=SampleStatistics.from_values(lengths),
    )
    if (
        separation.neighbours.size >= _PRIOR_PAIRS
        and separation.compute_vector_weight_factor(separation.neighbours) == 1
    ):
        return separation
    return replace(
        separation, sharing=_compute_cosine_statistics(vectors, list_pairs_with_shared_word())
    )


def _compute_cosine_statistics(vectors: Floats, row_pairs: Ints) -> SampleStatistics:
    """Compute the cosine of each pair of rows, and return the statistics of the cosines.

    The statistics are the count, the sum and the sum of squares of the cosines. Pairs of rows with
    equal vectors are left out of the statistics. Otherwise, repeated texts, such as an assistant's
    "Noted.", would give many pairs of unrelated rows a cosine similarity of 1.
    """
    chosen = _sample_row_pairs_evenly(row_pairs)
    first_vectors, second_vectors = vectors[chosen[:, 0]], vectors[chosen[:, 1]]
    differ = (first_vectors != second_vectors).any(axis=1)
    return SampleStatistics.from_values(
        np.einsum("ij,ij->i", first_vectors[differ], second_vectors[differ])
    )


def _sample_row_pairs_evenly(row_pairs: Ints) -> Ints:
    """Return at most `_MAX_PAIRS` of the given pairs, evenly spaced."""
    if len(row_pairs) <= _MAX_PAIRS:
        return row_pairs
    return row_pairs[np.linspace(0, len(row_pairs) - 1, _MAX_PAIRS).astype(np.intp)]


def find_row_pairs_sharing_rare_word(word_numbers: Ints, row_numbers: Ints, row_count: int) -> Ints:
    """Return pairs of rows that share a rare word, as an integer array of shape `[pairs, 2]`.

    The arrays `word_numbers` and `row_numbers` together specify which word occurs in which row.
    `word_numbers` and `row_numbers` have one element for each combination of a word and a row that
    contains it. No combination occurs twice.

    Args:
        word_numbers: The number of the word; int[combinations].
        row_numbers: The index of the row that contains the word; int[combinations].
        row_count: The number of rows.
    """
    key = word_numbers.astype(np.int64) * row_count + row_numbers
    key.sort()
    word, row = np.divmod(key, row_count)
    starts = np.flatnonzero(np.diff(word, prepend=-1))
    sizes = np.diff(np.append(starts, len(key)))
    place = np.arange(len(key)) - np.repeat(starts, sizes)
    rare = np.repeat(sizes <= max(row_count // _RARE_DIVISOR, 2), sizes)
    second = np.flatnonzero(rare & (place > 0) & (place <= _MAX_PAIRS_PER_WORD))
    pairs = np.unique(row[second - 1] * row_count + row[second])
    return _sample_row_pairs_evenly(np.column_stack(np.divmod(pairs, row_count)))

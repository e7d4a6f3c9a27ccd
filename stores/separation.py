"""Measure, without labelled data, how well an embedder separates related rows from random rows.

Three samples of cosines are taken from the vectors of a namespace:

    neighbours   rows that follow each other in a conversation
    sharing      rows that share a rare word
    random       rows that are far apart, in different conversations if there are several

The separation of a sample is the distance between the mean cosine of the sample and the mean cosine
of random rows, in standard deviations (d' of signal detection theory). The separation shows how
much more similar the vectors of related rows are than those of random rows. The separation is
comparable between embedding models, although the cosine of two random texts may be 0.1 with one
model and 0.8 with another. If an embedder's vectors carry no meaning, the separation is near 0.

The measured separation affects search scores through the three attributes of `VectorCalibration`.
`trust` reduces the weight of vectors, down to 0, if the vectors of related rows are hardly more
similar than those of random rows. `gain` increases the weight of vectors, and makes the vectors of
the whole conversation contribute to each row's score. `gain` is positive only if the rows are long
and the vectors of neighbouring rows are clearly more similar than those of random rows. `gain` is 0
for short rows, because the vector of a short answer says little about the question that it answers.
`origin` is the lowest cosine to be expected between two unrelated rows, which a search uses as the
baseline when it converts cosines to scores. Decision 0037 has the measurements.

The samples are taken from the oldest rows of a namespace, at most `MAX_ROWS`. The separation is
measured again when the number of measured rows changes. Rows beyond the first `MAX_ROWS` do not
affect the separation. The separation is not stored in the database, because every process and every
backend computes the same value from the same rows.
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

# Maximum number of rows per namespace that are used to measure the separation.
MAX_ROWS: Final = 512
# Maximum number of rows per namespace that are examined to find rows with a rare word in common.
MAX_WORDED: Final = 256
# minimum number of rows with vectors; with fewer rows, the separation is not measured
_MIN_ROWS: Final = 16
_MAX_PAIRS: Final = 512  # maximum number of pairs in each sample
# maximum number of row pairs that are compared for each shared word
_MAX_PAIRS_PER_WORD: Final = 4
_RARE_DIVISOR: Final = 8  # a word is rare if it occurs in at most 1/8 of the rows
# Offsets from the first to the second row of a random pair, as fractions of the number of measured
# rows.
_STRIDES: Final = (0.382, 0.236)
# Weight of the default separation `_PRIOR`, as a number of row pairs. The measured separation is
# averaged with this default to limit the effect of chance in small samples. The same number is the
# minimum number of pairs of neighbouring rows for their separation to be used for `trust`.
_PRIOR_PAIRS: Final = 16
# Default separation, in standard deviations. It is the result for a sample without pairs, and the
# value towards which the results of small samples are drawn.
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
# Two thresholds for the mean number of words per row. `VectorCalibration.gain` is multiplied by a
# factor that depends on this mean. The factor is 0 below the first threshold and 1 above the second
# threshold, and rises linearly in between.
_SHORT, _LONG = 40, 100
# The lowest cosine to be expected between two unrelated rows (`VectorCalibration.origin`) is
# estimated to lie this many standard deviations below the mean cosine of random pairs.
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
        """The mean of the values, or 0 if there are no values."""
        return self.total / self.size if self.size else 0.0

    @property
    def variance(self) -> float:
        """The variance of the values, or 0 if there are no values."""
        return max(self.squares / self.size - self.mean**2, 0.0) if self.size else 0.0


_EMPTY_SAMPLE: Final = SampleStatistics()


class VectorCalibration(NamedTuple):
    """The weight of vectors in search scores, and the cosine that counts as 0.

    The more the measured cosines of related rows exceed those of random rows, the more weight
    vectors get.

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
    """Statistics that show how well vectors separate related rows from random rows.

    The statistics describe three samples of cosines, and the lengths of the measured rows. The rows
    come from one or more namespaces.

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
        """Return a new object with the combined statistics of both objects."""
        return VectorSeparation(
            self.neighbours.combine_with(other.neighbours),
            self.sharing.combine_with(other.sharing),
            self.random.combine_with(other.random),
            self.words.combine_with(other.words),
        )

    @cached_property
    def vector_weight_calibration(self) -> VectorCalibration:
        """The weight of vectors and the cosine that counts as 0, computed from the samples."""
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
        """Return the factor `trust` for the weight of vectors, computed from one sample of cosines.

        The factor ranges from 0 to 1. A sample whose cosines are no higher than those of random
        pairs gives 0 if it is large enough to outweigh the default separation.
        """
        return _interpolate(
            self._compute_separation_from_random_pairs(cosine_sample), _USELESS, _USEFUL
        )

    def _compute_separation_from_random_pairs(self, cosine_sample: SampleStatistics) -> float:
        """Return the separation of a sample of cosines from the cosines of random pairs of rows.

        The measured separation is the mean cosine of the sample minus the mean cosine of random
        pairs, divided by the pooled standard deviation of the two samples. The result is a weighted
        average of the measured separation and the default separation `_PRIOR`, whose weight is that
        of `_PRIOR_PAIRS` pairs. With few measured pairs, the result therefore stays close to
        `_PRIOR`, at which vectors have their usual weight.
        """
        count = min(cosine_sample.size, self.random.size)
        spread = math.sqrt((cosine_sample.variance + self.random.variance) / 2)
        distance = (cosine_sample.mean - self.random.mean) / max(spread, _MIN_SPREAD)
        return (count * distance + _PRIOR_PAIRS * _PRIOR) / (count + _PRIOR_PAIRS)


def _interpolate(value: float, low: float, high: float) -> float:
    """Interpolate linearly from 0 at `low` to 1 at `high`, and clamp the result to this range."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


def compute_sample_size_for_vector_separation(row_count: int) -> int:
    """Return the number of rows to measure in a namespace, or 0 if it has too few rows.

    The result is the number of rows with vectors, rounded down to three significant bits and capped
    at `MAX_ROWS`. Because of the rounding, the result rarely changes when a row is added, so the
    separation rarely has to be measured again.
    """
    if row_count < _MIN_ROWS:
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
    """Measure how well the vectors in a namespace separate related rows from random rows.

    Each array argument has one element per measured row, ordered by row id.

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
    # Sort the pairs of neighbouring rows by row index. Up to this point, the pairs are in the order
    # of the thread codes, which can differ between processes.
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

    The statistics are the count, the sum and the sum of squares. Pairs of rows with equal vectors
    are ignored, because repeated texts, such as an assistant's "Noted.", would give many random
    pairs a cosine of 1.
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

    The two array arguments list which word occurs in which row. They have one element for each
    combination of a word and a row that contains it. No combination occurs twice.

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

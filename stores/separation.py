"""Measurement, without labels, of how well an embedder separates related rows from random ones.

Three samples of cosines are taken from the vectors of a namespace:

    neighbours   rows that follow each other in a thread
    sharing      rows that share a word which few rows have
    random       rows that are far from each other, of different threads if there are several

The separation of a sample is the distance between its mean and that of the random rows, in standard
deviations (d' of signal detection theory). The result does not depend on the level of an embedder's
cosines: two random texts have a cosine of 0.1 with one model and of 0.8 with another. An embedder
whose vectors carry no meaning has a separation near 0.

A search uses the result in three ways (`Calibration`). Vectors that do not separate related rows
from random ones count less. If the rows are long, vectors that separate neighbours well count more,
and they count for threads as a whole. The vector of a short turn contains little information about
the question that the turn answers. A similarity is judged by its distance from the similarities of
random rows. Decision 0037 has the measurements.

The samples are taken from the first rows of a namespace, so the result depends on these rows alone.
Every process and every backend therefore computes the same numbers, and nothing has to be stored.
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

# maximum number of rows from which pairs of neighbours and random pairs are taken
MAX_ROWS: Final = 512
# maximum number of rows that are searched for pairs with a common rare word
MAX_WORDED: Final = 256
_MIN_ROWS: Final = 16  # minimum number of rows with vectors; with fewer rows, nothing is measured
_MAX_PAIRS: Final = 512  # maximum number of pairs in each sample
_MAX_PAIRS_PER_WORD: Final = 4  # maximum number of pairs that are taken from the rows of one word
_RARE_DIVISOR: Final = 8  # a word is rare if at most one in this many rows has it
# distances between the two rows of random pairs, as shares of all measured rows
_STRIDES: Final = (0.382, 0.236)
# number of imaginary pairs that are averaged with the real ones, so that chance has little effect
# in small samples
_PRIOR_PAIRS: Final = 16
_PRIOR: Final = 1.0  # separation of the imaginary pairs
# minimum standard deviation of cosines; smaller values are rounding errors
_MIN_SPREAD: Final = 1e-3
# separations between which the weight of vectors rises from zero to its usual value
_USELESS, _USEFUL = 0.2, 0.5
# separations of neighbours between which vectors gain additional weight
_STRONG, _STRONGEST = 1.1, 2.0
# mean numbers of words per row between which the additional weight of vectors rises from zero to
# its full value
_SHORT, _LONG = 40, 100
# number of standard deviations below the mean of random cosines at which the lowest cosine is
# assumed
_DEVIATIONS: Final = 4.0


class Moments(NamedTuple):
    """Statistics of a sample of values: their number, their sum, and the sum of their squares."""

    size: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def from_values(cls, values: Floats) -> Self:
        """Return the moments of some values."""
        exact = values.astype(np.float64)
        return cls(len(exact), float(exact.sum()), float((exact * exact).sum()))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the union of both samples."""
        return Moments(
            self.size + other.size, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> float:
        """The mean of the values, or 0 if there are none."""
        return self.total / self.size if self.size else 0.0

    @property
    def variance(self) -> float:
        """The variance of the values, or 0 if there are none."""
        return max(self.squares / self.size - self.mean**2, 0.0) if self.size else 0.0


_NO_MOMENTS: Final = Moments()


class Calibration(NamedTuple):
    """The weight of vectors in a search, as computed from their separation.

    Attributes:
        trust: The share of their usual weight that the vectors have, 0 to 1.
        gain: The share of the additional weight that the vectors have, 0 to 1.
        origin: The lowest cosine that two unrelated rows are expected to have.
    """

    trust: float = 1.0
    gain: float = 0.0
    origin: float = 0.0


USUAL: Final = Calibration()
"""The calibration of vectors that were not measured."""


@dataclass(frozen=True)
class Separation:
    """The samples of cosines by which the separation of one or several namespaces is measured.

    Attributes:
        neighbours: Cosines of rows that follow each other in a thread.
        sharing: Cosines of rows that share a rare word.
        random: Cosines of random pairs of rows.
        words: The number of words in each measured row.
    """

    neighbours: Moments = _NO_MOMENTS
    sharing: Moments = _NO_MOMENTS
    random: Moments = _NO_MOMENTS
    words: Moments = _NO_MOMENTS

    def merge(self, other: Separation) -> Separation:
        """Return an object with the samples of both objects combined."""
        return Separation(
            self.neighbours.merge(other.neighbours),
            self.sharing.merge(other.sharing),
            self.random.merge(other.random),
            self.words.merge(other.words),
        )

    @cached_property
    def calibration(self) -> Calibration:
        """The calibration of vectors for a search of the measured namespaces."""
        if not self.random.size:  # Nothing was measured, or all vectors are equal.
            return Calibration(trust=0.0) if self.words.size else USUAL
        trust = self.compute_trust(self.sharing)
        if self.neighbours.size >= _PRIOR_PAIRS:
            trust = max(trust, self.compute_trust(self.neighbours))
        strong = self._compute_separation(self.neighbours)
        gain = _interpolate(strong, _STRONG, _STRONGEST) * _interpolate(
            self.words.mean, _SHORT, _LONG
        )
        lowest = self.random.mean - _DEVIATIONS * math.sqrt(self.random.variance)
        return Calibration(trust, gain, max(lowest, 0.0))

    def compute_trust(self, sample: Moments) -> float:
        """Return the trust in the vectors, from 0 to 1, according to one sample."""
        return _interpolate(self._compute_separation(sample), _USELESS, _USEFUL)

    def _compute_separation(self, sample: Moments) -> float:
        """Return the distance of a sample's mean from that of random pairs, in standard deviations.

        The fewer pairs a sample contains, the nearer the result is to `_PRIOR`. With a separation
        of `_PRIOR`, vectors have their usual weight.
        """
        count = min(sample.size, self.random.size)
        spread = math.sqrt((sample.variance + self.random.variance) / 2)
        distance = (sample.mean - self.random.mean) / max(spread, _MIN_SPREAD)
        return (count * distance + _PRIOR_PAIRS * _PRIOR) / (count + _PRIOR_PAIRS)


def _interpolate(value: float, low: float, high: float) -> float:
    """Return 0 for values up to `low`, 1 from `high` on, and interpolate linearly between them."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


def compute_sample_size(row_count: int) -> int:
    """Return the number of first rows that are measured, or 0 if there are too few rows.

    The number grows in steps of an eighth to a quarter, so that a put seldom changes the sample.
    """
    if row_count < _MIN_ROWS:
        return 0
    step = 1 << (row_count.bit_length() - 3)
    return min(row_count // step * step, MAX_ROWS)


def measure_separation(
    vectors: Floats,
    thread: Ints,
    position: Floats,
    lengths: Floats,
    sharing: Callable[[], Ints],
) -> Separation:
    """Measure how well vectors separate related rows of a namespace.

    All arrays contain the first rows of the namespace, in the order of their ids.

    Args:
        vectors: One vector of length 1 for each row; float[n, dims].
        thread: A code for each row's thread, negative for none; int[n].
        position: The position of each row in its thread; float[n].
        lengths: The number of words in each row; float[n].
        sharing: Returns pairs of rows that share a rare word; see `find_pairs_sharing_words`. The
            function is called only if neighbours do not show that the vectors are useful.
    """
    n = len(vectors)
    order = np.lexsort((np.arange(n), position, thread))
    first_rows, second_rows = order[:-1], order[1:]
    is_followed = (thread[first_rows] == thread[second_rows]) & (thread[first_rows] >= 0)
    neighbour_pairs = np.column_stack([first_rows[is_followed], second_rows[is_followed]])
    # This order does not depend on the numbers of threads, which may differ between processes.
    neighbour_pairs = neighbour_pairs[np.argsort(neighbour_pairs[:, 1])]
    rows = np.arange(n)
    partners = np.concatenate([(rows + max(int(n * stride), 1)) % n for stride in _STRIDES])
    random_pairs = np.column_stack([np.tile(rows, len(_STRIDES)), partners])
    strangers = (thread[random_pairs[:, 0]] != thread[random_pairs[:, 1]]) | (
        thread[random_pairs[:, 0]] < 0
    )
    if strangers.any():
        random_pairs = random_pairs[strangers]
    separation = Separation(
        neighbours=_measure_pairs(vectors, neighbour_pairs),
        random=_measure_pairs(vectors, random_pairs),
        words=Moments.from_values(lengths),
    )
    if (
        separation.neighbours.size >= _PRIOR_PAIRS
        and separation.compute_trust(separation.neighbours) == 1
    ):
        return separation
    return replace(separation, sharing=_measure_pairs(vectors, sharing()))


def _measure_pairs(vectors: Floats, pairs: Ints) -> Moments:
    """Return the moments of the cosines between the two vectors of each pair of rows.

    Pairs of equal vectors are left out.

    If an assistant often repeats a text such as "Noted.", many random pairs have equal vectors.
    """
    chosen = _select_pairs_evenly(pairs)
    first_vectors, second_vectors = vectors[chosen[:, 0]], vectors[chosen[:, 1]]
    differ = (first_vectors != second_vectors).any(axis=1)
    return Moments.from_values(np.einsum("ij,ij->i", first_vectors[differ], second_vectors[differ]))


def _select_pairs_evenly(pairs: Ints) -> Ints:
    """Return at most `_MAX_PAIRS` of the pairs, evenly spaced in their order."""
    if len(pairs) <= _MAX_PAIRS:
        return pairs
    return pairs[np.linspace(0, len(pairs) - 1, _MAX_PAIRS).astype(np.intp)]


def find_pairs_sharing_words(words: Ints, rows: Ints, count: int) -> Ints:
    """Return pairs of rows that share a word which few of the rows have; int[pairs, 2].

    Args:
        words: The word of each entry, as a number; int[entries].
        rows: The row of each entry. A row has at most one entry for a word; int[entries].
        count: The number of rows.
    """
    key = words.astype(np.int64) * count + rows
    key.sort()
    word, row = np.divmod(key, count)
    starts = np.flatnonzero(np.diff(word, prepend=-1))
    sizes = np.diff(np.append(starts, len(key)))
    place = np.arange(len(key)) - np.repeat(starts, sizes)
    rare = np.repeat(sizes <= max(count // _RARE_DIVISOR, 2), sizes)
    second = np.flatnonzero(rare & (place > 0) & (place <= _MAX_PAIRS_PER_WORD))
    pairs = np.unique(row[second - 1] * count + row[second])
    return _select_pairs_evenly(np.column_stack(np.divmod(pairs, count)))

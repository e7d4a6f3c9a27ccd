"""BM25 scores of rows over dense arrays, with synonyms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.stores.weighting import DEFAULT, Weights

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Scores = npt.NDArray[np.float32]

_BLOCK = 1 << 17  # counts computed at a time: 512 kB
_LEAST = np.float32(1e-6)  # a penalty of 0 would be a division by it


@dataclass(frozen=True)
class Term:
    """One word of the query in the rows of the scope."""

    rows: Ints  # that have the word, each once
    tf: Floats  # how often each has it
    kin: tuple[tuple[Ints, float], ...] = ()  # rows of words near in meaning, and similarity


def idf(found: int, rows: int) -> float:
    """Worth of a word that `found` of `rows` rows have, by Robertson and Spärck Jones; above 0.

    Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009),
    eq. 3.3, with the 1 inside the logarithm that Lucene's BM25Similarity adds.
    """
    return float(np.log1p((rows - found + 0.5) / (found + 0.5)))


def blocks(
    terms: Sequence[Term], n: int, weights: Weights = DEFAULT
) -> Iterator[tuple[Scores, Scores]]:
    """The words' counts in all n rows, and what they are worth; float32[some, n], float32[some].

    So many at a time that what is computed of them stays in the cache. Okapi BM25 of a block is
    `worths @ (counts / (counts + length_penalty(...)))`.

    Source: Robertson and Zaragoza (2009), eq. 3.15. The constant factor (k1 + 1) is left out, as
    Lucene does since version 8: it changes no order.
    """
    some = max(1, _BLOCK // max(n, 1))
    found = [term for term in terms if len(term.rows) or term.kin]
    for begin in range(0, len(found), some):
        part = found[begin : begin + some]
        counts = np.zeros((len(part), n), np.float32)
        for of, term in zip(counts, part, strict=True):
            of[term.rows] = term.tf
            for rows, near in term.kin:
                of[rows] = np.maximum(of[rows], np.float32(weights.kin * near))
        yield counts, np.array([worth_of(term, n) for term in part], np.float32)


def worth_of(term: Term, n: int) -> float:
    """The weight of a word: more if rare; a word with synonyms only is as rare as they are."""
    found = len(term.rows) or sum(len(rows) for rows, _ in term.kin)
    return idf(min(found, n), n)


def length_penalty(lengths: Floats, k1: float, b: float, mean: float | None = None) -> Scores:
    """k1 times how long each row is beside the mean, as far as b lets it count; float32[n]."""
    if mean is None:
        mean = float(np.mean(lengths)) if len(lengths) else 0.0
    relative = np.asarray(lengths, np.float32) / np.float32(mean if mean > 0 else 1)
    penalty = np.float32(k1 * (1 - b)) + np.float32(k1 * b) * relative
    return np.asarray(np.maximum(penalty, _LEAST), np.float32)

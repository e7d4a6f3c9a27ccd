"""How well rows have the words of a query: BM25 over dense arrays, with words near in meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.stores.weighting import DEFAULT, Weights

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Term:
    """One word of the query in the rows of the scope.

    Args:
        rows: Rows that have the word, each once; int[m].
        tf: How often each has it; float[m].
        is_name: Whether the word names an actor of the scope.
        kin: Postings of words near in meaning: rows, each once, and similarity 0 to 1.
    """

    rows: Ints
    tf: Floats
    is_name: bool = False
    kin: tuple[tuple[Ints, float], ...] = ()


def idf(found: int, rows: int) -> float:
    """Worth of a word that `found` of `rows` rows have, by Robertson and Spärck Jones; above 0.

    Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009),
    eq. 3.3, with the 1 inside the logarithm that Lucene's BM25Similarity adds.
    """
    return float(np.log1p((rows - found + 0.5) / (found + 0.5)))


def bm25(
    terms: Sequence[Term],
    lengths: Floats,
    weights: Weights = DEFAULT,
) -> Scores:
    """Okapi BM25 with idf and mean length of the scope; 0 where no word is found; float32[n].

    Args:
        terms: The query's words, each once.
        lengths: Words in each row; float[n].
        weights: `k1`, `b`, `name` and `kin` of it.

    Source: Robertson and Zaragoza (2009), eq. 3.15. The constant factor (k1 + 1) is left out, as
    Lucene does since version 8: it changes no order.
    """
    scores = np.zeros(len(lengths), np.float32)
    penalty = length_penalty(lengths, weights.k1, weights.b)
    for term in terms:
        rows, tf = occurrences(term, len(scores), weights)
        scores[rows] += worth_of(term, len(scores), weights) * (tf / (tf + penalty[rows]))
    return scores


def occurrences(term: Term, n: int, weights: Weights) -> tuple[Ints, Scores]:
    """Rows of a word and its kin, each once, with how often they have it; kin count as less."""
    tf = np.asarray(term.tf, np.float32)
    if not term.kin:
        return term.rows, tf
    best = np.zeros(n, np.float32)
    best[term.rows] = tf
    for rows, near in term.kin:
        best[rows] = np.maximum(best[rows], np.float32(weights.kin * near))
    every = np.flatnonzero(best)
    return every, best[every]


def worth_of(term: Term, n: int, weights: Weights) -> np.float32:
    """What a word counts: rare ones more; for one that only kin have, as rare as the kin."""
    found = len(term.rows) or sum(len(rows) for rows, _ in term.kin)
    return np.float32(idf(min(found, n), n) * (weights.name if term.is_name else 1.0))


def length_penalty(lengths: Floats, k1: float, b: float) -> Scores:
    """k1 times how long each row is beside the mean, as far as b lets it count; float32[n]."""
    mean = float(np.mean(lengths)) if len(lengths) else 0.0
    relative = np.asarray(lengths, np.float32) / np.float32(mean if mean > 0 else 1)
    return np.float32(k1 * (1 - b)) + np.float32(k1 * b) * relative

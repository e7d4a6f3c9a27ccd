"""What each row of a search scores: words, vectors, and what stands around a row in its thread.

Pure numpy over dense arrays of the n rows in scope; no store, no text. A row's score is a sum of
parts, each of which `Ranked.parts` shows:

    text         BM25 over the query's words, as a share of the best row's
    vector       the cosine, as a share of the best row's distance from the mean
    neighbours   what the rows just before and after in the thread lend of both
    thread       how well the thread as a whole answers the words
    actor, date  the query names who said it, or when
    question     a row that asks is seldom the row that answers

A word counts once: a row has it (full worth), or a neighbour has it (a share of it), never both. So
a reply is found by the words of what it replies to, and a row does not rise for standing in a
crowd. All weights were chosen on conversations with `benchmarks/recall.py`; each sits on a plateau.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from perdure.stores.bm25 import Floats, Scores, Term, bm25, length_penalty, occurrences, worth_of
from perdure.stores.context import (
    Arrangement,
    Bools,
    arrange,
    in_threads,
    lend,
    lend_rows,
    thread_penalty,
    to_rows,
)
from perdure.stores.weighting import DEFAULT, Weights

__all__ = ["Arrangement", "Cues", "Ranked", "Term", "Weights", "arrange", "bm25", "rank"]


@dataclass(frozen=True)
class Cues:
    """What the query says of speaker and time, as rows; and factors a caller brings.

    Args:
        actor: Rows said by an actor that the query names; bool[n].
        date: Rows said at a time that the query names; bool[n].
        age_s: Age of each row in seconds, NaN where unknown; float[n].
    """

    actor: Bools | None = None
    date: Bools | None = None
    age_s: Floats | None = None

    @property
    def silent(self) -> bool:
        """Whether there are none."""
        return self.actor is None and self.date is None and self.age_s is None


NO_CUES = Cues()


@dataclass(frozen=True)
class Ranked:
    """Scores of the rows, higher is better, and the parts they are the sum of; float32[n] each."""

    scores: Scores
    parts: Mapping[str, Scores] = field(default_factory=dict)


def rank(
    n: int,
    *,
    terms: Sequence[Term] = (),
    lengths: Floats | None = None,
    cosines: Floats | None = None,
    arrangement: Arrangement | None = None,
    cues: Cues = NO_CUES,
    weights: Weights = DEFAULT,
) -> Ranked:
    """Score the n rows of a scope.

    Args:
        n: How many rows.
        terms: The query's words; none for a semantic search.
        lengths: Words in each row, float[n]; needed with `terms`.
        cosines: Similarity of each row's vector to the query's, NaN for a row without a vector,
            float[n]; None for a search by text alone.
        arrangement: Neighbours and threads; None switches context off.
        cues: Speaker, date and factors.
        weights: How much each part counts.

    Raises:
        ValueError: `terms` without `lengths`.
    """
    if terms and lengths is None:
        raise ValueError("rank() got terms without lengths: give the number of words of each row")
    parts: dict[str, Scores] = {}
    around = np.zeros(n, np.float32)
    share = np.float32(0.0 if cosines is None else weights.vector if terms else 1.0)
    if terms and lengths is not None:
        own, lent, thread = _by_words(terms, lengths, arrangement, weights)
        scale = (1 - share) / max(lent.max(initial=np.float32(0)), np.float32(1e-9))
        parts["text"] = own * scale
        around += (lent - own) * scale
        parts["thread"] = thread
    if cosines is not None:
        own = above_mean(cosines)
        parts["vector"] = own * share
        around += (lend(own, arrangement, weights) - own) * share
    if arrangement is not None:
        parts["neighbours"] = around
    parts.update(_from_cues(n, cues, weights))
    scores = np.sum(list(parts.values()), axis=0, dtype=np.float32) + np.zeros(n, np.float32)
    if arrangement is not None and arrangement.asks is not None:
        parts["question"] = scores * arrangement.asks * np.float32(-weights.question)
        scores = scores + parts["question"]
    return Ranked(scores, parts)


def above_mean(cosines: Floats) -> Scores:
    """How far each cosine stands above the mean, as a share of the highest; 0 below it and for NaN.

    The mean takes away what all rows of a scope share with the query, so the part means the same
    for every embedder and scope. Where nothing stands out (one row, equal rows) it is the cosine.
    """
    valid = np.isfinite(cosines)
    if not valid.any():
        return np.zeros(len(cosines), np.float32)
    known = np.where(valid, cosines, 0).astype(np.float32)
    mean = known.sum(dtype=np.float64) / np.count_nonzero(valid)
    room = float(known.max(where=valid, initial=-1)) - mean
    standing = known if room < 1e-6 else (known - np.float32(mean)) / np.float32(room)
    return np.where(valid, np.clip(standing, 0, 1), np.float32(0))


def _by_words(
    terms: Sequence[Term], lengths: Floats, arrangement: Arrangement | None, weights: Weights
) -> tuple[Scores, Scores, Scores]:
    """The words' worth in each row alone, with what neighbours lend, and in its thread."""
    n = len(lengths)
    if arrangement is None:
        own = bm25(terms, lengths, weights)
        return own, own, np.zeros(n, np.float32)
    own, lent, scratch = np.zeros((3, n), np.float32)
    threads = np.zeros(arrangement.threads)
    penalty = length_penalty(lengths, weights.k1, weights.b)
    whole = thread_penalty(lengths, arrangement)
    for term in terms:
        rows, tf = occurrences(term, n, weights)
        worth = worth_of(term, n, weights)
        scratch[rows] = worth * (tf / (tf + penalty[rows]))
        own[rows] += scratch[rows]
        reached = lend_rows(scratch, rows, arrangement, weights)
        lent[reached] += scratch[reached]  # a row reached twice is still written once
        scratch[reached] = 0
        threads += worth * in_threads(rows, tf, whole, arrangement)
    return own, lent, to_rows(threads, arrangement, weights)


def _from_cues(n: int, cues: Cues, weights: Weights) -> dict[str, Scores]:
    """The parts that the query's cues and the caller's factors give; float32[n] each."""
    parts = {}
    if cues.actor is not None and weights.actor:
        parts["actor"] = cues.actor * np.float32(weights.actor)
    if cues.date is not None and weights.date:
        parts["date"] = cues.date * np.float32(weights.date)
    if cues.age_s is not None and weights.recency:
        fade = np.exp2(-np.maximum(cues.age_s, 0) / weights.half_life_s)
        parts["recency"] = np.nan_to_num(fade * weights.recency).astype(np.float32)
    return parts

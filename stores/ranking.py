"""The score of each row of a search: words, vectors, and context in its thread.

Pure numpy over dense arrays of the n rows in scope; no store, no text. A row's score is a sum of
parts, each of which `Ranked.parts` shows:

    text         BM25 over the query's words, as a share of the best row's
    vector       the cosine, as a share of the best row's distance from the mean
    neighbours   what the rows just before and after in the thread lend of both
    thread       how well the thread as a whole answers the words
    actor, date  the query names who said it, or when
    recency      of the rows of a conversation the newest gain a share of the rest
    question     a row that only asks is seldom the row that answers

A word counts once: a row has it (full worth), or a neighbour has it (a share of it), never both. So
a reply is found by the words of what it replies to, and a row does not rise for standing in a
crowd. All weights were chosen with `benchmarks/recall.py`; each sits on a plateau.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from perdure.stores.bm25 import Floats, Scores, Term, blocks, length_penalty, worth_of
from perdure.stores.context import (
    Arrangement,
    Bools,
    in_threads,
    lend,
    thread_penalty,
    to_rows,
)
from perdure.stores.weighting import DEFAULT, Weights

_STRANGERS = 4  # rows of cosine 0 that are added to a scope's: one row alone is no measure


@dataclass(frozen=True)
class Cues:
    """The rows of the speakers and times that the query names."""

    actor: Bools | None = None  # rows said by an actor that the query names
    date: Bools | None = None  # rows said at a time that it names

    @property
    def silent(self) -> bool:
        """Whether there are none."""
        return self.actor is None and self.date is None


NO_CUES = Cues()


@dataclass(frozen=True)
class Ranked:
    """Scores of the rows, higher is better, and the parts they are the sum of; float32[n] each."""

    scores: Scores  # relative to the best row of this search
    parts: Mapping[str, Scores] = field(default_factory=dict)
    # how much of the query the rows answer at best, 0 to 1: the share that the words of one row
    # have in the worth of all of the query's, or how near its vector comes
    answered: float = 1.0

    def comparable(self) -> Ranked:
        """The same scaled so that the best score is `answered`, which means the same everywhere."""
        best = float(self.scores.max(initial=0))
        scale = np.float32(self.answered / best if best > 0 else 1)
        parts = {name: part * scale for name, part in self.parts.items()}
        return Ranked(self.scores * scale, parts, self.answered)


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
        terms: The query's words, also those that no row has; none for a semantic search.
        lengths: Words in each row, float[n]; needed with `terms`.
        cosines: Similarity of each row's vector to the query's, NaN for a row without a vector,
            float[n]; None for a search by text alone.
        arrangement: Neighbours and threads; None switches context off.
        cues: Speaker and date.
        weights: How much each part counts.
    """
    if terms and lengths is None:
        raise ValueError("rank() got terms without lengths: give the number of words of each row")
    parts: dict[str, Scores] = {}
    answered = 0.0
    around = np.zeros(n, np.float32)
    share = np.float32(0.0 if cosines is None else weights.vector if terms else 1.0)
    if terms and lengths is not None:
        words = _by_words(terms, lengths, arrangement, weights)
        answered = words.answered
        scale = (1 - share) / max(words.lent.max(initial=np.float32(0)), np.float32(1e-9))
        parts["text"] = words.own * scale
        around += (words.lent - words.own) * scale
        parts["thread"] = words.thread
    if cosines is not None:
        answered = max(answered, _nearest(cosines))
        own = above_mean(cosines)
        parts["vector"] = own * share
        if arrangement is not None:
            around += (lend(own, arrangement, weights) - own) * share
    if arrangement is not None:
        parts["neighbours"] = around
    parts.update(_from_cues(cues, weights))
    if arrangement is not None:
        parts.update(_adjusted(_sum(n, parts), arrangement, weights))
    return Ranked(_sum(n, parts), parts, answered)


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


def _nearest(cosines: Floats) -> float:
    """How near the nearest vector comes, from what any vector of the scope has (0) to equal (1)."""
    known = cosines[np.isfinite(cosines)]
    mean = max(float(known.sum(dtype=np.float64)) / (len(known) + _STRANGERS), 0.0)
    best = min(float(known.max(initial=0)), 1.0)
    return max(best - mean, 0.0) / (1 - mean) if mean < 1 else 0.0


@dataclass(frozen=True)
class _Words:
    """The word score of each row alone, with its neighbours, and of its thread."""

    own: Scores
    lent: Scores
    thread: Scores
    answered: float


def _by_words(
    terms: Sequence[Term], lengths: Floats, arrangement: Arrangement | None, weights: Weights
) -> _Words:
    n = len(lengths)
    own, lent, covered = np.zeros((3, n), np.float32)
    threads = np.zeros(0 if arrangement is None else len(arrangement.starts), np.float32)
    penalty = length_penalty(lengths, weights.k1, weights.b)
    whole = None if arrangement is None else thread_penalty(lengths, arrangement, weights)
    for counts, worths in blocks(terms, n, weights):
        each = counts / (counts + penalty)
        own += worths @ each
        covered += worths @ np.minimum(counts, 1)
        if arrangement is not None and whole is not None:
            lent += worths @ lend(each, arrangement, weights)
            threads += worths @ in_threads(counts, whole, arrangement)
    total = sum(worth_of(term, n) for term in terms)
    answered = min(float(covered.max(initial=0)) / max(total, 1e-9), 1.0)
    if arrangement is None:
        return _Words(own, own, np.zeros(n, np.float32), answered)
    return _Words(own, lent, to_rows(threads, arrangement, weights), answered)


def _from_cues(cues: Cues, weights: Weights) -> dict[str, Scores]:
    """The parts that the query's cues give; float32[n] each."""
    parts = {}
    if cues.actor is not None and weights.actor:
        parts["actor"] = cues.actor * np.float32(weights.actor)
    if cues.date is not None and weights.date:
        parts["date"] = cues.date * np.float32(weights.date)
    return parts


def _adjusted(scores: Scores, arrangement: Arrangement, weights: Weights) -> dict[str, Scores]:
    """The gain of new rows, and the loss of rows that only ask; float32[n] each."""
    gain = scores * arrangement.recent * np.float32(weights.recency)
    return {
        "recency": gain,
        "question": (scores + gain) * arrangement.asks * np.float32(-weights.question),
    }


def _sum(n: int, parts: Mapping[str, Scores]) -> Scores:
    return np.sum(list(parts.values()), axis=0, dtype=np.float32) + np.zeros(n, np.float32)

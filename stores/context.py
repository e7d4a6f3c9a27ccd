"""Scores from the context of rows: their neighbours in threads, and the threads.

A row of a few words means little without those around it; one of a page has its own words, and
with what its neighbours lend it would answer everything. So what a row takes from around it shrinks
with its own length. That is all that the kind of conversation has to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perdure.stores.bm25 import Floats, Ints, Scores, length_penalty
from perdure.stores.weighting import DEFAULT, Weights

Bools = npt.NDArray[np.bool_]

# words up to which a row takes all that neighbours lend, all of its thread's worth, and up to which
# a row that ends with a question is a question and nothing else
TAKES_ALL, HAS_ALL, ONLY_ASKS = 50, 200, 25
_FADES = 0.2  # share of the rows after which recency is half


@dataclass(frozen=True)
class Arrangement:
    """How the rows of a scope stand to each other. Make it with `arrange`; it serves many searches.

    `from_before[k - 1][i]` is how much of what row i lends row i + k takes, 0 if they are of
    different threads; `from_after` the same of what row i + k lends and row i takes.
    """

    starts: npt.NDArray[np.intp]  # of each thread, and of each run of rows without one
    run: npt.NDArray[np.intp]  # the number of each row's run
    threads: Bools  # whether a run is a thread
    from_before: tuple[Scores, ...]
    from_after: tuple[Scores, ...]
    of_thread: Scores  # how much of its thread's worth each row has
    asks: Bools  # whether a row is a question and nothing else
    recent: Scores  # how new each row is among them, 1 to 0


def arrange(
    thread: Ints,
    lengths: Floats,
    asks: Bools | None = None,
    at: Floats | None = None,
    *,
    steps: int = len(DEFAULT.neighbours),
) -> Arrangement:
    """Precompute who is next to whom.

    Args:
        thread: A code for each row's thread, negative for none; int[n]. The rows of a thread lie
            side by side, in its order.
        lengths: Words in each row; float[n].
        asks: Whether a row ends with a question; bool[n]; None: none does.
        at: When each row was said, NaN for unknown; float[n]; None: that is known of none.
        steps: How far neighbours reach, 1 or more; as long as `Weights.neighbours` to use it all.
    """
    n, has = len(thread), thread >= 0
    begins = np.ones(n, bool)
    begins[1:] = thread[1:] != thread[:-1]
    starts = np.flatnonzero(begins)
    words = np.maximum(np.asarray(lengths, np.float32), 1)
    takes = np.minimum(1, np.float32(TAKES_ALL) / words)
    joined = [(thread[k:] == thread[:-k]) & has[k:] for k in range(1, min(steps, n - 1) + 1)]
    return Arrangement(
        starts,
        np.cumsum(begins) - 1,
        has[starts],
        tuple(each * takes[k:] for k, each in enumerate(joined, 1)),
        tuple(each * takes[:-k] for k, each in enumerate(joined, 1)),
        np.where(has, np.minimum(1, np.float32(HAS_ALL) / words), np.float32(0)),
        np.zeros(n, bool) if asks is None else asks & (lengths <= ONLY_ASKS),
        _recent(np.full(n, np.nan) if at is None else at),
    )


def _recent(at: Floats) -> Scores:
    """1 for the newest row, half of it for one with a fifth of all after it; 0 at unknown times."""
    known = at[np.isfinite(at)]
    after = len(known) - np.searchsorted(np.sort(known), at, side="right")
    fading = np.exp2(after / np.float32(-_FADES * max(len(known), 1))).astype(np.float32)
    return np.where(np.isfinite(at), fading, np.float32(0))


def thread_penalty(lengths: Floats, arrangement: Arrangement, weights: Weights) -> Scores:
    """The length penalty of runs, each taken as one text; float32[runs]."""
    sizes: Floats = np.bincount(arrangement.run, lengths, len(arrangement.starts)).astype(float)
    mean = sizes[arrangement.threads].mean() if arrangement.threads.any() else 0.0
    return length_penalty(sizes, weights.k1, weights.b, mean)


def in_threads(counts: Scores, penalty: Scores, arrangement: Arrangement) -> Scores:
    """The score of each run for some words, 0 to 1; float32[words, runs]."""
    sums = np.add.reduceat(counts, arrangement.starts, axis=1)
    return np.asarray(sums / (sums + penalty) * arrangement.threads, np.float32)


def to_rows(threads: Floats, arrangement: Arrangement, weights: Weights) -> Scores:
    """Each row's part of its thread's score, of which the best thread's is 1; float32[n]."""
    best = max(float(threads.max(initial=0.0)), 1e-9)
    shares = (threads * (weights.thread / best)).astype(np.float32)
    return np.asarray(shares[arrangement.run] * arrangement.of_thread)


def lend(scores: Scores, arrangement: Arrangement, weights: Weights) -> Scores:
    """The higher of each row's score and what its neighbours lend it; float32[..., n]."""
    best = scores.copy()
    steps: Sequence[tuple[float, Scores, Scores]] = list(
        zip(weights.neighbours, arrangement.from_before, arrangement.from_after, strict=False)
    )
    for k, (share, before, after) in enumerate(steps, 1):
        for taken, lent, into in (
            (before, scores[..., :-k], best[..., k:]),
            (after, scores[..., k:], best[..., :-k]),
        ):
            np.maximum(into, lent * (taken * np.float32(share)), out=into)
    return best

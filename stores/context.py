"""How the rows of a scope stand to each other in their threads, and what they lend each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perdure.stores.bm25 import Floats, Ints, Scores, length_penalty
from perdure.stores.weighting import Weights

Bools = npt.NDArray[np.bool_]

THREAD_K1, THREAD_B = 1.2, 0.5  # a thread is a long text: the usual k1; half the length counts


@dataclass(frozen=True)
class Arrangement:
    """How the rows of a scope stand to each other. Make it with `arrange`; it serves many searches.

    Args:
        thread: Number of each row's thread, dense from 0, or -1; intp[n].
        threads: How many threads there are.
        joined: `joined[k - 1][i]`: row i belongs to the thread of row i - k; bool[n + k] each, with
            False before the first row and after the last.
        asks: Whether a row is a question; bool[n].
    """

    thread: npt.NDArray[np.intp]
    threads: int
    joined: tuple[Bools, ...]
    asks: Bools | None = None


def arrange(thread: Ints, asks: Bools | None = None, *, steps: int = 2) -> Arrangement:
    """Precompute who is next to whom.

    Args:
        thread: A code for each row's thread, negative for none; int[n]. The rows of a thread lie
            side by side, in its order.
        asks: Whether a row is a question; bool[n].
        steps: How far neighbours reach, 1 or more; as long as `Weights.neighbours` to use it all.
    """
    n, has = len(thread), thread >= 0
    joined = tuple(np.zeros(n + k, bool) for k in range(1, steps + 1))
    for k, each in enumerate(joined, 1):
        each[k:n] = (thread[k:] == thread[:-k]) & has[k:]
    starts = has & ~joined[0][:n]
    numbers = np.where(has, np.cumsum(starts) - 1, -1)
    return Arrangement(numbers, int(np.count_nonzero(starts)), joined, asks)


def thread_penalty(lengths: Floats, arrangement: Arrangement) -> Floats:
    """The length penalty of threads, each taken as one text; float32[threads]."""
    inside = arrangement.thread >= 0
    sizes = np.bincount(
        arrangement.thread[inside], np.asarray(lengths, float)[inside], arrangement.threads
    ).astype(float)
    return length_penalty(sizes, THREAD_K1, THREAD_B)


def in_threads(rows: Ints, tf: Scores, penalty: Floats, arrangement: Arrangement) -> Floats:
    """How well each thread has a word, 0 to 1; float64[threads]."""
    thread = arrangement.thread[rows]
    inside = thread >= 0
    counts = np.bincount(thread[inside], tf[inside], arrangement.threads)
    found: Floats = counts / (counts + penalty)
    return found


def to_rows(threads: Floats, arrangement: Arrangement, weights: Weights) -> Scores:
    """Each row's part of its thread's score; 0 for a row without thread; float32[n]."""
    best = threads.max(initial=0.0)
    if best <= 0:
        return np.zeros(len(arrangement.thread), np.float32)
    padded = np.append(threads * (weights.thread / best), 0.0).astype(np.float32)
    return padded[arrangement.thread]  # -1 is the padding


def lend_rows(
    scores: Scores, lenders: Ints, arrangement: Arrangement, weights: Weights
) -> npt.NDArray[np.intp]:
    """Lend the scores of `lenders` to neighbours, in place; returns all rows that have one."""
    rows = np.asarray(lenders, np.intp)
    worth = scores[rows]
    reached = [rows]
    for k, (share, joined) in enumerate(_steps(arrangement, weights), 1):
        for target, lender in ((rows + k, joined[rows + k]), (rows - k, joined[rows])):
            near = target[lender]
            scores[near] = np.maximum(scores[near], share * worth[lender])
            reached.append(near)
    return np.concatenate(reached)


def lend(scores: Scores, arrangement: Arrangement | None, weights: Weights) -> Scores:
    """The higher of each row's score and what its neighbours lend it; float32[n]."""
    best = scores.copy()
    if arrangement is None:
        return best
    n = len(scores)
    for k, (share, joined) in enumerate(_steps(arrangement, weights), 1):
        lent, beside = scores * share, joined[k:n]
        np.maximum(best[k:], lent[:-k], out=best[k:], where=beside)
        np.maximum(best[:-k], lent[k:], out=best[:-k], where=beside)
    return best


def _steps(arrangement: Arrangement, weights: Weights) -> Iterator[tuple[np.float32, Bools]]:
    """What a row lends at each distance, and to whom."""
    for share, joined in zip(weights.neighbours, arrangement.joined, strict=False):
        yield np.float32(share), joined

"""The weights of the parts of a score, chosen with `benchmarks/recall.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weights:
    """How much each part counts.

    Args:
        vector: Share of the vector in words plus vector, 0 to 1.
        k1: How slowly a word's repetitions saturate.
        b: How much a row's length lowers its score, 0 to 1.
        neighbours: The share of a row's score that rows one step away in its thread get, two steps
            away, ...
        thread: Added for the best thread.
        actor: Added if the query names the speaker.
        date: Added if the query names the time.
        question: Share of its score that a row loses for being a short question.
        kin: The weight of a synonym, times its similarity.
        recency: Share of its score that the newest row of a conversation gains; it halves with
            each fifth of the rows that one goes back.
    """

    vector: float = 0.35
    k1: float = 1.2
    b: float = 0.5
    neighbours: tuple[float, ...] = (0.6, 0.4, 0.2)
    thread: float = 0.45
    actor: float = 0.1
    date: float = 0.15
    question: float = 0.15
    kin: float = 0.7
    recency: float = 0.1


DEFAULT = Weights()

"""The score of each row of a search: words, vectors, and context in its thread.

Pure numpy over dense arrays of the n rows in scope. A score is a sum of parts:

    text         BM25 over the query's words, which count more if they are rare in the language too,
                 as a share of the best row's
    vector       the cosine, as a share of the best row's distance from the mean; how much this
                 counts follows from how well vectors separate (`perdure.stores.separation`)
    neighbours   what the rows just before and after in the thread lend of both
    thread       how well the thread as a whole answers the words, and how near its vectors are
    actor, date  the query names who said it, or is about the time at which it was said
    recency      of the rows of a conversation the newest gain a share of the rest
    question     a row that only asks is seldom the row that answers

A word counts once: a row has it (full worth), or a neighbour has it (a share of it), never both. So
a reply is found by the words of what it replies to, and a row does not rise for standing in a
crowd. What a row takes from around it shrinks with its own length: a row of a few words means
little alone, one of a page has its own words. All numbers were chosen with `benchmarks/recall.py`.

How high the best score is tells how much evidence its row gives, which means the same for one row
and for 100,000, for short and long queries. Evidence is counted in nats:

    words     the sum of -ln of the share of messages of the language that have a word of the query
              which the row has (or a share of it: as above), times the share that this is in the
              sum of all the query's words to the power of 0.35
    vector    5 times how near the nearest comes, from what any of the scope has (0) to equal (1)
    chance    less ln n: the more rows, the more the best of them has by chance

The last is the correction for the number of comparisons of Karlin and Altschul, PNAS 87 (1990). The
numbers were chosen with `benchmarks/quiet.py`.

The score of each row is limited by its own evidence: by its words, by those that its neighbours
lend it, and by its vector or that of a neighbour, less a share of ln n. A row without evidence
therefore stays below the minimum score of a recall and behind the rows that have evidence, whether
or not another row answers the query. Decision 0033 has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.stores.separation import USUAL, Calibration

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]
Scores = NDArray[np.float32]
Bools = NDArray[np.bool_]

# words up to which a row takes all that neighbours lend, all of its thread's worth, and up to which
# a row that ends with a question is a question and nothing else
MAX_WORDS_FULL_LOAN, MAX_WORDS_FULL_THREAD, MAX_WORDS_QUESTION = 50, 200, 25
_RECENCY_HALF_LIFE: Final = 0.2  # share of the rows after which recency is half
# imaginary unrelated rows that are included in the mean cosine of a scope, which may have one row
_PRIOR_ROWS: Final = 4
_BLOCK_COUNTS: Final = 1 << 17  # counts computed at a time: 512 kB
# of vectors, chosen with benchmarks/recall.py; decision 0037
_GAIN_WEIGHT: Final = 0.6  # the share of its weight that is added to the vector at a gain of 1
_THREAD_VECTOR_WEIGHT: Final = (
    0.6  # the weight of the nearest thread, as a share of the vector's weight
)
_NEAREST_PER_THREAD: Final = 3  # rows of a thread, the nearest ones, that count for the thread
_BELOW_ALL: Final = 2.0  # more than any score
_MIN_PENALTY: Final = np.float32(1e-6)  # a penalty of 0 would be a division by it
# of evidence, chosen with benchmarks/quiet.py
_UNLISTED_FREQUENCY: Final = 2.4e-6  # the share of messages that have a word which no list has
_PRIOR_MESSAGES: Final = (
    30.0  # messages of the language that a message of the scope is weighed against
)
_COVERAGE_POWER: Final = 0.35  # the power of the share of the query that a row answers
_NEARNESS_NATS: Final = 5.0  # what the nearest vector tells at most
_NATS_PER_LOGIT: Final = 4.0  # nats that make odds of one to one those of e to one
_MAX_LOGIT: Final = 80.0  # more is no number of 32 bits
_RARITY_POWER: Final = 1.5  # the power of what a word tells in its weight
_PERSON_NATS: Final = 2.25  # nats that are added if query and rows are about the same person
_NEARLY_ALL: Final = 0.85  # share of the rows; a word in more rows is no evidence
_MIN_ROWS_NEARLY_ALL: Final = 5  # rows; in a smaller scope, no word counts as being in nearly all
_CHANCE_SHARE: Final = 0.25  # share of ln n that is subtracted from the evidence of each single row
_SLIGHT_NATS: Final = 1.45  # nats; a row with less evidence of its own scores less than MIN_SCORE
_LIMIT_SLOPE: Final = 15.0  # nats that each nat above `_SLIGHT` adds to the limit of a row's score


@dataclass(frozen=True)
class Weights:
    """How much each part counts.

    Args:
        vector: Share of the vector in words plus vector, 0 to 1.
        k1: How slowly a word's repetitions saturate.
        b: How much a row's length lowers its score, 0 to 1.
        neighbours: The share of a row's score that rows one, two and three steps away in its
            thread get.
        thread: Added for the best thread.
        actor: Added if the query names the speaker.
        date: Added if the row was said in the period that the query is about (`during=`).
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


DEFAULT: Final = Weights()


class Term(NamedTuple):
    """One word of the query in the rows of the scope."""

    rows: Ints  # that have the word, each once
    tf: Floats  # how often each has it
    synonyms: Sequence[tuple[Ints, float]] = ()  # rows of its synonyms, and their similarity
    message_frequency: float = (
        0.0  # the share of messages of the language that have it; 0: not known
    )
    names_actor: bool = False  # it names the actor of rows
    names_subject: bool = False  # whether it names the person whom nearly all rows are about


@dataclass(frozen=True)
class Ranked:
    """Scores of the rows, higher is better, and the parts they are the sum of; float32[n] each."""

    scores: Scores  # of `rank`, relative to the best row; `comparable`, 0 to 1
    parts: Mapping[str, Scores] = field(default_factory=dict)
    # what the best row tells, in nats, beyond what the best of so many rows tells by chance; or, of
    # a search by vectors alone, how near the nearest is, 0 to 1
    evidence: float = 0.0
    odds: Scores | None = None  # of a search by words: each row's, as a share of the best row's
    order: Floats | None = None  # rows are ranked by it, or by their scores if None
    limits: Scores | None = None  # the most evidence that each row's score may express, in nats

    @classmethod
    def from_cosines(cls, cosines: Floats) -> Ranked:
        """The rows by a vector alone; one that is missing, NaN, comes last, and scores 0."""
        scores = np.clip(np.nan_to_num(cosines, nan=0), 0, 1)
        return cls(scores, {"vector": scores}, order=np.nan_to_num(cosines, nan=-np.inf))

    def with_vectors_first(self, cosines: Floats) -> Ranked:
        """The same with the rows that have no vector, NaN, after all others, and with score 0."""
        has_vector = np.isfinite(cosines)
        order = self.rank_keys - np.where(has_vector, np.float32(0), np.float32(_BELOW_ALL))
        return replace(self, scores=self.scores * has_vector, order=order)

    @property
    def rank_keys(self) -> Floats:
        """What ranks the rows: the higher, the better; also where scores are equal."""
        return self.scores if self.order is None else self.order

    def explain_row(self, row: int) -> dict[str, float]:
        """The parts of one row's score."""
        total = sum(float(part[row]) for part in self.parts.values())
        scale = float(self.scores[row]) / total if total else 0.0
        return {name: float(part[row]) * scale for name, part in self.parts.items()}

    def to_comparable(self) -> Ranked:
        """Return the rows with scores that mean the same in every search.

        The odds of the best row are e to its evidence / `_SCALE`, so 0.5 is what the best of so
        many rows has by chance. Those of another row are lower by the square root of its share in
        the best score, and at most e to its limit / `_SCALE`. Rows that the limits lower are ranked
        by what is left. In a search by vectors alone the best score is how near the vector is.
        """
        if self.odds is None:
            scores = _divide_by_best(self.scores) * np.float32(self.evidence)
            return replace(self, scores=scores, order=self.scores)
        with np.errstate(divide="ignore"):  # odds of 0 are -inf
            logits = np.log(self.odds, dtype=np.float64) + self.evidence / _NATS_PER_LOGIT
        if self.limits is not None:
            logits = np.minimum(logits, self.limits / _NATS_PER_LOGIT)
        odds = np.exp(np.minimum(logits, _MAX_LOGIT)).astype(np.float32)
        return replace(self, scores=odds / (1 + odds), order=logits)


def rank_rows(
    lengths: Floats,
    *,
    terms: Sequence[Term] = (),
    cosines: Floats | None = None,
    arrangement: Arrangement | None = None,
    actor: Bools | None = None,
    date: Bools | None = None,
    is_personal: bool = False,
    weights: Weights = DEFAULT,
    calibration: Calibration = USUAL,
) -> Ranked:
    """Score the n rows of a scope.

    Args:
        lengths: Words in each row, float[n].
        terms: The query's words, also those that no row has; none for a semantic search.
        cosines: Similarity of each row's vector to the query's, NaN for a row without a vector,
            float[n]; None for a search by text alone.
        arrangement: Neighbours and threads; None switches context off.
        actor: The rows said by somebody whom the query names; bool[n].
        date: The rows of the period that the query is about; bool[n].
        is_personal: Whether the query and the rows are about the same person.
        weights: How much each part counts.
        calibration: How well the vectors of the scope separate related rows from random ones.
    """
    n = len(lengths)
    parts: dict[str, Scores] = {}
    calibration = calibration if terms else USUAL  # else there is nothing but the vectors
    nearness = _compute_nearness(cosines, n, calibration)
    nearest = evidence = float(nearness.max(initial=0))
    neighbour_scores = np.zeros(n, np.float32)
    vector_share = np.float32(_compute_vector_share(cosines, terms, weights, calibration))
    evidence_of_terms = _compute_word_evidence(terms, n, arrangement)
    if terms:
        own_scores, shared_scores, parts["thread"], evidence_of_rows = _score_words(
            terms, evidence_of_terms, lengths, arrangement, actor, weights
        )
        scale = (1 - vector_share) / max(shared_scores.max(initial=np.float32(0)), np.float32(1e-9))
        parts["text"] = own_scores * scale
        neighbour_scores += (shared_scores - own_scores) * scale
    if cosines is not None:
        own_scores = scale_above_mean(cosines)
        parts["vector"] = own_scores * vector_share
        if arrangement is not None:
            neighbour_scores += (
                _lend_to_neighbours(own_scores, arrangement, weights) - own_scores
            ) * vector_share
            if calibration.gain:
                parts["thread"] += _score_threads_by_vectors(
                    own_scores, arrangement, weights, calibration.gain
                )
    for name, is_match, weight in (("actor", actor, weights.actor), ("date", date, weights.date)):
        if is_match is not None and weight:
            parts[name] = is_match * np.float32(weight)
    if arrangement is not None:
        parts["neighbours"] = neighbour_scores
        scores = sum(parts.values(), np.zeros(n, np.float32))
        recency_gain = parts["recency"] = scores * arrangement.recency * np.float32(weights.recency)
        parts["question"] = (
            (scores + recency_gain) * arrangement.is_only_question * np.float32(-weights.question)
        )
    scores, odds, limits = sum(parts.values(), np.zeros(n, np.float32)), None, None
    if terms:
        odds = np.sqrt(_divide_by_best(scores))
        total = max(sum(evidence_of_terms), 1e-9)
        chance = math.log(max(n, 1))
        best = float((evidence_of_rows * odds).max(initial=0))
        evidence = (
            best * min(best / total, 1.0) ** _COVERAGE_POWER + _NEARNESS_NATS * nearest - chance
        )
        evidence += _PERSON_NATS * is_personal
        if arrangement is not None:
            nearness = _lend_to_neighbours(nearness, arrangement, weights)
        limits = evidence_of_rows * np.minimum(
            evidence_of_rows / np.float32(total), 1
        ) ** np.float32(_COVERAGE_POWER)
        limits += np.float32(_NEARNESS_NATS) * nearness - np.float32(_CHANCE_SHARE * chance)
        limits += np.float32(_LIMIT_SLOPE) * np.maximum(limits - np.float32(_SLIGHT_NATS), 0)
    return Ranked(scores, parts, evidence, odds, limits=limits)


def _divide_by_best(scores: Scores) -> Scores:
    """The share of each row in the best score, 0 to 1."""
    best = max(float(scores.max(initial=0)), 1e-9)
    return np.asarray(np.maximum(scores, 0) / np.float32(best), np.float32)


# -- vectors


def _compute_vector_share(
    cosines: Floats | None, terms: Sequence[Term], weights: Weights, calibration: Calibration
) -> float:
    """Return the share of the vector in words plus vector.

    If no row has a word of the query, only vectors can rank the rows. They then have their usual
    weight whatever the trust in them is.
    """
    if cosines is None or not terms:
        return float(cosines is not None)
    is_known = any(len(term.rows) or term.synonyms for term in terms)
    trust = calibration.trust if is_known else 1.0
    return min(weights.vector * (trust + _GAIN_WEIGHT * calibration.gain), 1.0)


def _score_threads_by_vectors(
    vector_scores: Scores, arrangement: Arrangement, weights: Weights, gain: float
) -> Scores:
    """Return what is added to the score of each row for the vectors of its thread.

    The worth of a thread is the sum of the vector scores of its `_BEST_OF_THREAD` nearest rows. It
    counts as a share of the worth of the best thread.
    """
    starts, run_of_row, remaining = (
        arrangement.run_starts,
        arrangement.run_of_row,
        vector_scores.copy(),
    )
    worth = np.zeros(len(starts), np.float32)
    for _ in range(_NEAREST_PER_THREAD):
        highest = np.maximum.reduceat(remaining, starts)
        worth += highest
        best_rows = np.flatnonzero((remaining == highest[run_of_row]) & (remaining > 0))
        remaining[best_rows[np.diff(run_of_row[best_rows], prepend=-1) > 0]] = (
            0  # the first of each thread
        )
    shares = _divide_by_best(worth * arrangement.is_thread) * np.float32(
        _THREAD_VECTOR_WEIGHT * gain * weights.vector
    )
    return np.asarray(shares[run_of_row] * arrangement.thread_share, np.float32)


def scale_above_mean(cosines: Floats) -> Scores:
    """How far each cosine stands above the mean, as a share of the highest; 0 below it and for NaN.

    The mean takes away what all rows of a scope share with the query, so the part means the same
    for every embedder and scope. Where nothing stands out (one row, equal rows) it is the cosine.
    """
    valid = np.isfinite(cosines)
    if not valid.any():
        return np.zeros(len(cosines), np.float32)
    finite = np.where(valid, cosines, 0).astype(np.float32)
    mean = finite.sum(dtype=np.float64) / np.count_nonzero(valid)
    distance = float(finite.max(where=valid, initial=-1)) - mean
    scaled = finite if distance < 1e-6 else (finite - np.float32(mean)) / np.float32(distance)
    return np.where(valid, np.clip(scaled, 0, 1), np.float32(0))


def _compute_nearness(cosines: Floats | None, n: int, calibration: Calibration) -> Scores:
    """Return how near each vector is, from 0 (as any vector of the scope) to 1 (equal).

    A row without a vector, NaN, has 0. All values are multiplied by the trust in the vectors.
    """
    if cosines is None:
        return np.zeros(n, np.float32)
    valid = np.isfinite(cosines)
    finite = np.where(valid, np.minimum(cosines, 1), 0).astype(np.float32)
    total = float(finite.sum(dtype=np.float64)) + _PRIOR_ROWS * calibration.origin
    mean = max(total / (np.count_nonzero(valid) + _PRIOR_ROWS), 0.0)
    if mean >= 1:
        return np.zeros(n, np.float32)
    scale = np.float32(calibration.trust / (1 - mean))
    return np.asarray(np.maximum(finite - np.float32(mean), 0) * scale, np.float32)


# -- words


def idf(count: int, rows: int) -> float:
    """Worth of a word that `found` of `rows` rows have, by Robertson and Spärck Jones; above 0.

    Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009),
    eq. 3.3, with the 1 inside the logarithm that Lucene's BM25Similarity adds.
    """
    return math.log1p((rows - count + 0.5) / (count + 0.5))


def word_information(term: Term, n: int) -> float:
    """What a row tells by having a word: -ln of the share of other messages that have it, in nats.

    Of messages of the language; of a word whose share there is not known, and that is no name, of
    those of the scope: a word that the conversation is full of tells little.
    """
    share = term.message_frequency or _UNLISTED_FREQUENCY
    if not term.message_frequency and not term.names_actor:
        share = (
            max(_count_rows_with_word(term, n) - 1, 0) + _PRIOR_MESSAGES * _UNLISTED_FREQUENCY
        ) / (n - 1 + _PRIOR_MESSAGES)
    return -math.log(share)


def _compute_word_evidence(
    terms: Sequence[Term], n: int, arrangement: Arrangement | None
) -> list[float]:
    """Return the evidence, in nats, that a row gives by having each of the words.

    This is the information of the word, with two exceptions. A word that is judged by the rows of
    the scope counts twice, because ln n is subtracted from the evidence: the word would otherwise
    never tell anything beyond chance once two rows have it. Rows that only ask are not counted. A
    word that nearly all rows have is no evidence, unless all words of the query are such words.
    """
    is_only_question = np.zeros(n, bool) if arrangement is None else arrangement.is_only_question
    evidence, is_shared_list = list[float](), list[bool]()
    for term in terms:
        rows = term.rows[~is_only_question[term.rows]]
        nats = word_information(term._replace(rows=rows) if len(rows) else term, n)
        if not term.message_frequency and not term.names_actor:
            nats = max(nats, min(2 * nats, -math.log(_UNLISTED_FREQUENCY)))
        evidence.append(nats)
        is_shared_list.append(term.names_subject or is_in_nearly_all(len(term.rows), n))
    if all(is_shared_list):
        return evidence
    return [
        0.0 if is_shared else nats for nats, is_shared in zip(evidence, is_shared_list, strict=True)
    ]


def is_in_nearly_all(count: int, n: int) -> bool:
    """Return whether `found` of `n` rows are nearly all, so that their words are no evidence."""
    return n >= _MIN_ROWS_NEARLY_ALL and count >= _NEARLY_ALL * n


def word_weight(term: Term, n: int) -> float:
    """The weight of a word: more if it is rare, in the scope and in the language."""
    rarity = -math.log(term.message_frequency or _UNLISTED_FREQUENCY)
    return idf(_count_rows_with_word(term, n), n) * math.pow(rarity, _RARITY_POWER)


def _count_rows_with_word(term: Term, n: int) -> int:
    """How many rows have a word; one with synonyms only is as rare as they are."""
    return min(len(term.rows) or sum(len(rows) for rows, _ in term.synonyms), n)


def iter_count_blocks(
    terms: Sequence[Term], n: int, weights: Weights = DEFAULT
) -> Iterator[tuple[Sequence[Term], Scores]]:
    """The words that any row has, and their counts in all n rows; float32[some, n].

    So many at a time that what is computed of them stays in the cache. Okapi BM25 of a block is
    `worths @ (counts / (counts + length_penalty(...)))`.

    Source: Robertson and Zaragoza (2009), eq. 3.15. The constant factor (k1 + 1) is left out, as
    Lucene does since version 8: it changes no order.
    """
    block_size = max(1, _BLOCK_COUNTS // max(n, 1))
    matching = [term for term in terms if len(term.rows) or term.synonyms]
    for begin in range(0, len(matching), block_size):
        block = matching[begin : begin + block_size]
        counts = np.zeros((len(block), n), np.float32)
        for term_counts, term in zip(counts, block, strict=True):
            term_counts[term.rows] = term.tf
            for rows, similarity in term.synonyms:
                term_counts[rows] = np.maximum(
                    term_counts[rows], np.float32(weights.kin * similarity)
                )
        yield block, counts


def length_penalty(
    lengths: Floats, weights: Weights = DEFAULT, mean: float | None = None
) -> Scores:
    """k1 times how long each row is beside the mean, as far as b lets it count; float32[n]."""
    if mean is None:
        mean = float(np.mean(lengths)) if len(lengths) else 0.0
    relative = np.asarray(lengths, np.float32) / np.float32(mean if mean > 0 else 1)
    k1, b = weights.k1, weights.b
    penalty = np.float32(k1 * (1 - b)) + np.float32(k1 * b) * relative
    return np.asarray(np.maximum(penalty, _MIN_PENALTY), np.float32)


def _score_words(
    terms: Sequence[Term],
    evidence_of_terms: Sequence[float],
    lengths: Floats,
    arrangement: Arrangement | None,
    actor: Bools | None,
    weights: Weights,
) -> tuple[Scores, Scores, Scores, Scores]:
    """The word scores of each row, with its neighbours, and of its thread; what its words tell."""
    n = len(lengths)
    own_scores, score_sums = np.zeros(n, np.float32), np.zeros((2, n), np.float32)
    shared_scores, evidence_of_rows = score_sums
    penalty = length_penalty(lengths, weights)
    thread_scores = thread_penalty = np.zeros(0, np.float32)
    if arrangement is not None:
        thread_scores = np.zeros(len(arrangement.run_starts), np.float32)
        sizes: Floats = np.bincount(arrangement.run_of_row, lengths, len(thread_scores)).astype(
            float
        )
        thread_sizes = sizes[arrangement.is_thread]
        mean = thread_sizes.mean() if len(thread_sizes) else 0.0
        thread_penalty = length_penalty(sizes, weights, mean)
    evidence = {id(term): nats for term, nats in zip(terms, evidence_of_terms, strict=True)}
    for block, counts in iter_count_blocks(terms, n, weights):
        factors_of_terms = [(word_weight(term, n), evidence[id(term)]) for term in block]
        worths, nats = factors = np.ascontiguousarray(np.array(factors_of_terms, np.float32).T)
        saturated = counts / (counts + penalty)
        own_scores += worths @ saturated
        if arrangement is not None:
            saturated = _lend_to_neighbours(saturated, arrangement, weights)
            sums = np.add.reduceat(counts, arrangement.run_starts, axis=1)
            thread_scores += worths @ (sums / (sums + thread_penalty) * arrangement.is_thread)
        score_sums += factors @ saturated
        for row_has_word, term, nats_of_word in zip(saturated, block, nats, strict=True):
            if term.names_actor and actor is not None:  # what somebody said is about them
                evidence_of_rows += nats_of_word * np.maximum(
                    actor / (1 + penalty) - row_has_word, 0
                )
    evidence_of_rows *= 1 + penalty  # a word that a row has once counts as 1
    if arrangement is None:
        return own_scores, shared_scores, np.zeros(n, np.float32), evidence_of_rows
    best_thread = max(float(thread_scores.max(initial=0.0)), 1e-9)
    shares = (thread_scores * (weights.thread / best_thread)).astype(np.float32)
    return (
        own_scores,
        shared_scores,
        shares[arrangement.run_of_row] * arrangement.thread_share,
        evidence_of_rows,
    )


# -- context


@dataclass(frozen=True)
class Arrangement:
    """How the rows of a scope stand to each other. Make it with `arrange`; it serves many searches.

    `from_before[k - 1][i]` is how much of what row i lends row i + k takes, 0 if they are of
    different threads; `from_after` the same of what row i + k lends and row i takes.
    """

    run_starts: NDArray[np.intp]  # of each thread, and of each run of rows without one
    run_of_row: NDArray[np.intp]  # the number of each row's run
    is_thread: Bools  # whether a run is a thread
    share_from_previous: tuple[Scores, ...]
    share_from_next: tuple[Scores, ...]
    thread_share: Scores  # how much of its thread's worth each row has
    is_only_question: Bools  # whether a row is a question and nothing else
    recency: Scores  # how new each row is among them, 1 to 0


def build_arrangement(
    thread: Ints, lengths: Floats, ends_with_question: Bools, said_at: Floats
) -> Arrangement:
    """Precompute who is next to whom.

    Args:
        thread: A code for each row's thread, negative for none; int[n]. The rows of a thread lie
            side by side, in its order.
        lengths: Words in each row; float[n].
        asks: Whether a row ends with a question; bool[n].
        at: When each row was said, NaN for unknown; float[n].
    """
    n, has_thread = len(thread), thread >= 0
    begins = np.ones(n, bool)
    begins[1:] = thread[1:] != thread[:-1]
    starts = np.flatnonzero(begins)
    words = np.maximum(np.asarray(lengths, np.float32), 1)
    loan_share = np.minimum(1, np.float32(MAX_WORDS_FULL_LOAN) / words)
    steps = range(1, min(len(DEFAULT.neighbours), n - 1) + 1)
    is_same_thread = [(thread[k:] == thread[:-k]) & has_thread[k:] for k in steps]
    known_times = said_at[np.isfinite(said_at)]
    later_count = len(known_times) - np.searchsorted(np.sort(known_times), said_at, side="right")
    fading = np.exp2(
        later_count / np.float32(-_RECENCY_HALF_LIFE * max(len(known_times), 1))
    ).astype(np.float32)
    return Arrangement(
        starts,
        np.cumsum(begins) - 1,
        has_thread[starts],
        tuple(is_same * loan_share[k:] for k, is_same in enumerate(is_same_thread, 1)),
        tuple(is_same * loan_share[:-k] for k, is_same in enumerate(is_same_thread, 1)),
        np.where(
            has_thread, np.minimum(1, np.float32(MAX_WORDS_FULL_THREAD) / words), np.float32(0)
        ),
        ends_with_question & (lengths <= MAX_WORDS_QUESTION),
        np.where(np.isfinite(said_at), fading, np.float32(0)),
    )


def _lend_to_neighbours(scores: Scores, arrangement: Arrangement, weights: Weights) -> Scores:
    """The higher of each row's score and what its neighbours lend it; float32[..., n]."""
    best = scores.copy()
    steps: Sequence[tuple[float, Scores, Scores]] = list(
        zip(
            weights.neighbours,
            arrangement.share_from_previous,
            arrangement.share_from_next,
            strict=False,
        )
    )
    for k, (share, from_previous, from_next) in enumerate(steps, 1):
        for share_taken, lenders, borrowers in (
            (from_previous, scores[..., :-k], best[..., k:]),
            (from_next, scores[..., k:], best[..., :-k]),
        ):
            np.maximum(borrowers, lenders * (share_taken * np.float32(share)), out=borrowers)
    return best

"""Score the rows of a search by keywords, vectors, and context within the thread.

The functions in this module work on numpy arrays and need no database. The arrays are dense, with
one element for each of the n rows that are searched. A score is a sum of parts:

    text         BM25 score of the query's words, as a fraction of the best row's score; words that
                 are rare in the language count more
    vector       cosine similarity, scaled so that the mean is 0 and the best row's is 1; its weight
                 depends on how well the vectors distinguish related rows from unrelated ones (see
                 `perdure.stores.search.separation`)
    neighbours   word and vector scores passed on from up to three previous and three next rows of
                 the thread
    thread       how well the whole thread matches the words, and how near its vectors are
    actor, date  bonus if the query names the speaker, or is about the time of the message
    recency      bonus for the newest rows with a known time, proportional to their other parts
    question     penalty for a row that consists only of a question, which seldom is an answer

A row receives a score for each word of the query that it contains. If a neighbouring row contains
the word, it contributes a fraction of its own score for the word. A row's score for a query word is
the larger of the following two numbers. The first number is the row's own score for the word. The
second number is the largest score that a single neighbouring row contributes to the row for the
word. For example, a query with the words of a question also finds the row after the question, which
usually is the answer. The longer a row is, the less its score gains from the words of its
neighbours, because a long row contains enough words of its own. The weights of the components of a
score were tuned with `benchmarks/recall.py`.

The best row's score is derived from its evidence, which measures how strongly words and vectors
indicate that the row is relevant. Scores from different searches are comparable. The queries may
differ in length, and the number of searched rows may be anything from 1 to 100,000. Evidence is
counted in nats:

    words     the sum of the information content of the query's words that occur in the row,
              multiplied by (this sum / the sum over all words of the query) ** 0.35; the
              information content of a word is -ln(fraction of messages in the language that contain
              the word)
    vector    5 times the nearness of the nearest vector, from 0 (cosine at most the mean) to 1
    person    2.25 if the query and the rows are about the same person
    chance    -ln n, because the best of many rows has more evidence by chance

The last term is the correction for the number of comparisons of Karlin and Altschul, PNAS 87
(1990). The constants in the formulas for evidence, such as the maximum evidence of a vector, were
tuned with `benchmarks/quiet.py`.

Each row's score has an upper limit, which depends on how well the row and its neighbours match the
query's words and vector. A row's maximum score is computed from the row's evidence. The evidence
measures, in nats, how strongly matching words and similar vectors indicate that the row is relevant
to the query. First, `_CHANCE_SHARE * ln(n)` nats are subtracted from the row's evidence score,
where n is the number of searched rows. With more searched rows, chance matches are more likely. The
subtraction corrects for rows that match the query by chance. If neither words nor vectors provide
evidence for a row or its neighbours, the row's score is below the default minimum score of
`recall`. Even with bonuses, for example for the speaker or the date, a row without evidence stays
below the default minimum score. A row's score cap is independent of which other rows match the
query. Decision 0033 has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.stores.search.separation import USUAL, VectorCalibration

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]
Scores = NDArray[np.float32]
Bools = NDArray[np.bool_]

# The first number is the length in words up to which a row gains the full share of its neighbours'
# scores. The second number is the length up to which a row gains the full score of its thread. The
# third number is the length up to which a row that ends with a question mark counts as only a
# question.
MAX_WORDS_FULL_LOAN, MAX_WORDS_FULL_THREAD, MAX_WORDS_QUESTION = 50, 200, 25
# Half-life of a row's recency, as a fraction of the rows with a known time. The newest row has a
# recency of 1. With a half-life of 0.2, a row's recency is 0.5 if 20% of dated rows are newer.
_RECENCY_HALF_LIFE: Final = 0.2
# When the mean cosine of the searched rows is computed, this number of imaginary rows is added to
# them. Each imaginary row has the default cosine `VectorCalibration.origin`. A row whose cosine
# equals the mean counts as unrelated to the query. Without the imaginary rows, the only row of a
# one-row search would always count as unrelated to the query.
_PRIOR_ROWS: Final = 4
# maximum number of term frequencies to compute at a time; an array of this size takes 512 kB
_BLOCK_COUNTS: Final = 1 << 17
# Amount that is added to the trust factor of vectors if `VectorCalibration.gain` is 1. With the
# usual trust of 1, the weight of vectors is then 1.6 times their usual weight. `_GAIN_WEIGHT`,
# `_THREAD_VECTOR_WEIGHT` and `_NEAREST_PER_THREAD` were chosen with benchmarks/recall.py; see
# decision 0037.
_GAIN_WEIGHT: Final = 0.6
# Maximum score that a row gains from the vectors of its thread, as a fraction of `Weights.vector`
_THREAD_VECTOR_WEIGHT: Final = 0.6
# Maximum number of rows per thread that count towards the thread's vector score. If the thread has
# more rows, those with the highest vector scores count.
_NEAREST_PER_THREAD: Final = 3
# Penalty that ranks rows without vectors behind all other rows. It is subtracted from the rows'
# sort keys, and is larger than any score.
_BELOW_ALL: Final = 2.0
# Minimum value of a row's length penalty; it prevents a division by zero.
_MIN_PENALTY: Final = np.float32(1e-6)
# Assumed fraction of messages that contain a word, for words that appear in no frequency list. This
# constant and the following constants were tuned with benchmarks/quiet.py.
_UNLISTED_FREQUENCY: Final = 2.4e-6
# Pseudo-count that smooths the estimated frequency of a word. When a word's frequency is estimated,
# this many imaginary messages are added to the searched rows. The estimate assumes that the word
# occurs in the imaginary messages at the frequency `_UNLISTED_FREQUENCY`.
_PRIOR_MESSAGES: Final = 30.0
# Exponent of the penalty for rows that contain only some of the query's words. A row's evidence, in
# nats, measures how strongly the query words in the row suggest that the row is relevant. The row's
# evidence is multiplied by `(row's evidence / evidence of all query words) ** _COVERAGE_POWER`.
_COVERAGE_POWER: Final = 0.35
_NEARNESS_NATS: Final = 5.0  # maximum evidence of a vector, in nats
# Scale factor that converts evidence in nats to the log-odds that a row is relevant. The log-odds
# are the evidence divided by this number.
_NATS_PER_LOGIT: Final = 4.0
# Maximum logit of a score. Larger logits are clipped to this value, so that their exponential does
# not overflow a 32-bit float.
_MAX_LOGIT: Final = 80.0
# Exponent that `compute_word_weight` applies to a word's rarity. A larger exponent gives rare words
# more weight.
_RARITY_POWER: Final = 1.5
# Bonus, in nats, that is added to the best row's evidence score if the search query and the rows
# are about the same person. For example, a user searches the memories about themselves. The
# evidence score measures how strongly a row matches the query.
_PERSON_NATS: Final = 2.25
# Threshold for common words. A word contained in at least this fraction of the rows does not count
# as evidence, because it does not help to distinguish relevant rows from others.
_NEARLY_ALL: Final = 0.85
# Minimum number of searched rows for a word to be treated as too common to count as evidence (see
# `_NEARLY_ALL`). With fewer rows, every word counts as evidence, however common it is.
_MIN_ROWS_NEARLY_ALL: Final = 5
# Strength of the correction for chance matches. With more searched rows, it is more likely that a
# row matches the query by chance. Before the upper limit of a row's score is computed,
# `_CHANCE_SHARE * ln(n)` nats are subtracted from the row's evidence, where n is the number of
# searched rows.
_CHANCE_SHARE: Final = 0.25
# Amount of evidence, in nats, at which a row's maximum score is about `settings.MIN_SCORE`. The
# maximum score of a row with less evidence is lower.
_SLIGHT_NATS: Final = 1.45
# Additional nats by which a row's score limit rises for each nat of evidence above `_SLIGHT_NATS`.
# The score limit (`RankedRows.limits`) is measured in nats. If a row's evidence after the
# correction for chance is at most `_SLIGHT_NATS`, the score limit equals this corrected evidence.
# Above `_SLIGHT_NATS`, the limit rises by 1 + `_LIMIT_SLOPE` nats for each nat of evidence.
_LIMIT_SLOPE: Final = 15.0


@dataclass(frozen=True)
class Weights:
    """The weight of each part of a score.

    Args:
        vector: The weight of vectors, from 0 to 1. The weight of words is 1 minus this weight.
        k1: The BM25 parameter k1, which controls how fast the term frequency saturates.
        b: The BM25 parameter b, from 0 to 1, which controls how much the length of a row lowers
            its score.
        neighbours: The fractions of a row's score that are passed on to the rows at a distance of
            one, two and three in its thread.
        thread: The score that is added to the rows of the best thread.
        actor: The score that is added if the query names the speaker.
        date: The score that is added if the message is from the period that the query is about
            (`during=`).
        question: The fraction of its score that a short question loses.
        kin: The weight of a synonym, which is multiplied by the synonym's similarity to the word.
        recency: The fraction of its score that the newest row gains. For other rows, the fraction
            halves for every 20% of the rows that are newer. Only rows with a known time gain it.
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
    """A word of the query, together with the searched rows that contain it."""

    # distinct rows that contain the word
    rows: Ints
    # the word's term frequency in each row of `rows`
    tf: Floats
    # For each synonym of the word: the rows that contain the synonym, and the synonym's similarity
    # to the word.
    synonyms: Sequence[tuple[Ints, float]] = ()
    # fraction of all messages in the query's language that contain the word; 0 if unknown
    message_frequency: float = 0.0
    # whether the word is part of the name of a speaker whom the query mentions
    names_actor: bool = False
    # True if nearly all searched rows are about one person, and the word is that person's name
    names_subject: bool = False


@dataclass(frozen=True)
class RankedRows:
    """The scores of the rows in a search, with the components of each score.

    A higher score is better. A row's score is first computed as the sum of its components.
    `get_score_parts_of_row` scales the components so that they add up to the score. All arrays in
    this class have one element for each row.
    """

    # Each row's score. Scores are not comparable across searches until
    # `with_scores_comparable_between_searches` has mapped them to the range 0 to 1.
    scores: Scores
    parts: Mapping[str, Scores] = field(default_factory=dict)  # the components, by name
    # The evidence in nats that the best row is relevant to the query. The evidence that the best of
    # n random rows would have by chance is already subtracted. If the query has no words, the field
    # is the highest nearness of a vector to the query, from 0 to 1; see
    # `_compute_nearness_to_query`.
    evidence: float = 0.0
    # The odds that each row is relevant, divided by the best row's odds. None if the query has no
    # words.
    odds: Scores | None = None
    # Sort key of each row, or None if the rows are ranked by their scores.
    order: Floats | None = None
    # Upper limit of the evidence that each row is relevant, in nats. The limit caps the row's
    # score.
    limits: Scores | None = None

    @classmethod
    def from_cosines(cls, cosines: Floats) -> RankedRows:
        """Rank the rows only by their cosine similarity to the query.

        A row without a vector (NaN) is ranked last and scores 0.
        """
        scores = np.clip(np.nan_to_num(cosines, nan=0), 0, 1)
        return cls(scores, {"vector": scores}, order=np.nan_to_num(cosines, nan=-np.inf))

    def with_rows_lacking_vectors_last(self, cosines: Floats) -> RankedRows:
        """Return a ranking in which rows without a vector (NaN) come last and score 0."""
        has_vector = np.isfinite(cosines)
        order = self.row_sort_keys - np.where(has_vector, np.float32(0), np.float32(_BELOW_ALL))
        return replace(self, scores=self.scores * has_vector, order=order)

    @property
    def row_sort_keys(self) -> Floats:
        """The sort key of each row.

        The row with the highest sort key ranks first. Rows are ranked by sort key, which is not
        always equal to the score. Rows without vectors all have a score of 0, but their sort keys
        can differ.
        """
        return self.scores if self.order is None else self.order

    def get_score_parts_of_row(self, row: int) -> dict[str, float]:
        """Return the components that add up to a row's score, keyed by name."""
        parts = {name: float(part[row]) for name, part in self.parts.items()}
        total = sum(parts.values())
        scale = float(self.scores[row]) / total if total else 0.0
        return {name: part * scale for name, part in parts.items()}

    def with_scores_comparable_between_searches(self) -> RankedRows:
        """Return the ranking with scores normalised so that they are comparable across searches.

        A score is odds / (1 + odds), where `odds` are the odds that the row is relevant to the
        query. The odds that the best row is relevant are `exp(evidence / _NATS_PER_LOGIT)`. The
        best row's score is 0.5 if the row matches the query only as well as expected by chance. The
        evidence expected by chance is the evidence that the best row would have if all searched
        rows were random. The odds that another row is relevant are the best row's odds times
        `sqrt(score / best_score)`. Before the rows are ranked by their odds, the odds of each row
        are capped at a maximum. The odds that row i is relevant are at most `exp(limits[i] /
        _NATS_PER_LOGIT)`. If the query has no words, the scores are scaled so that the best row's
        score equals the highest nearness of any row. Nearness is the cosine similarity of a row's
        vector and the query's vector, rescaled to the range from 0 to 1; see
        `_compute_nearness_to_query`.
        """
        if self.odds is None:
            return replace(
                self,
                scores=_divide_by_best(self.scores) * np.float32(self.evidence),
                order=self.scores,
            )
        with np.errstate(divide="ignore"):  # the logarithm of odds of 0 is -inf
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
    row_contexts: RowContexts | None = None,
    actor: Bools | None = None,
    date: Bools | None = None,
    is_personal: bool = False,
    weights: Weights = DEFAULT,
    calibration: VectorCalibration = USUAL,
) -> RankedRows:
    """Score the n rows that are searched.

    Args:
        lengths: The number of words in each row, float[n].
        terms: The query's words, including words that no row has. Empty for a semantic search.
        cosines: The similarity of each row's vector to the query's, NaN for a row without a vector,
            float[n]. None for a search by text alone.
        row_contexts: Neighbours, threads and recency. None switches context off.
        actor: Whether the query names the speaker of each row; bool[n].
        date: Whether each row is from the period that the query is about; bool[n].
        is_personal: Whether the query and the rows are about the same person.
        weights: The weight of each part.
        calibration: The weight that the vectors deserve. It was measured by how well they separate
            related rows from random ones.
    """
    n = len(lengths)
    parts: dict[str, Scores] = {}
    # If the query has no words, rows are ranked by vectors alone, so the measured calibration is
    # irrelevant and the default `USUAL` is used.
    calibration = calibration if terms else USUAL
    nearness = _compute_nearness_to_query(cosines, n, calibration)
    nearest = evidence = float(nearness.max(initial=0))
    neighbour_scores = np.zeros(n, np.float32)
    vector_share = np.float32(_compute_vector_weight(cosines, terms, weights, calibration))
    evidence_of_terms = _compute_evidence_in_nats_by_word(terms, n, row_contexts)
    if terms:
        own_scores, shared_scores, parts["thread"], evidence_of_rows = _score_rows_by_words(
            terms, evidence_of_terms, lengths, row_contexts, actor, weights
        )
        scale = (1 - vector_share) / max(shared_scores.max(initial=np.float32(0)), np.float32(1e-9))
        parts["text"] = own_scores * scale
        neighbour_scores += (shared_scores - own_scores) * scale
    if cosines is not None:
        own_scores = scale_mean_to_0_and_best_to_1(cosines)
        parts["vector"] = own_scores * vector_share
        if row_contexts is not None:
            neighbour_scores += (
                _raise_scores_by_neighbours(own_scores, row_contexts, weights) - own_scores
            ) * vector_share
            if calibration.gain:
                parts["thread"] += _compute_score_bonuses_from_thread_vectors(
                    own_scores, row_contexts, weights, calibration.gain
                )
    for name, is_match, weight in (("actor", actor, weights.actor), ("date", date, weights.date)):
        if is_match is not None and weight:
            parts[name] = is_match * np.float32(weight)
    if row_contexts is not None:
        parts["neighbours"] = neighbour_scores
        scores = sum(parts.values(), np.zeros(n, np.float32))
        recency_gain = parts["recency"] = (
            scores * row_contexts.recency * np.float32(weights.recency)
        )
        parts["question"] = (
            (scores + recency_gain) * row_contexts.is_only_question * np.float32(-weights.question)
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
        if row_contexts is not None:
            nearness = _raise_scores_by_neighbours(nearness, row_contexts, weights)
        limits = evidence_of_rows * np.minimum(
            evidence_of_rows / np.float32(total), 1
        ) ** np.float32(_COVERAGE_POWER)
        limits += np.float32(_NEARNESS_NATS) * nearness - np.float32(_CHANCE_SHARE * chance)
        limits += np.float32(_LIMIT_SLOPE) * np.maximum(limits - np.float32(_SLIGHT_NATS), 0)
    return RankedRows(scores, parts, evidence, odds, limits=limits)


def _divide_by_best(scores: Scores) -> Scores:
    """Normalise scores to the range from 0 to 1 by dividing them by the best score."""
    best = max(float(scores.max(initial=0)), 1e-9)
    return np.asarray(np.maximum(scores, 0) / np.float32(best), np.float32)


# -- vectors


def _compute_vector_weight(
    cosines: Floats | None, terms: Sequence[Term], weights: Weights, calibration: VectorCalibration
) -> float:
    """Return the weight of vectors in a row's score, from 0 to 1.

    The weight of words in the score is 1 minus the weight of vectors. In the score, the weight of
    vectors is 0 if no vectors are compared with the query, and 1 if the query has no words.

    If no row contains any word of the query, the rows can be ranked only by their vectors. If no
    row contains a query word, vectors get their full weight, and `calibration.trust` is ignored.
    """
    if cosines is None or not terms:
        return float(cosines is not None)
    is_known = any(len(term.rows) or term.synonyms for term in terms)
    trust = calibration.trust if is_known else 1.0
    return min(weights.vector * (trust + _GAIN_WEIGHT * calibration.gain), 1.0)


def _compute_score_bonuses_from_thread_vectors(
    vector_scores: Scores, row_contexts: RowContexts, weights: Weights, thread_bonus_factor: float
) -> Scores:
    """Return each row's score bonus for vectors in the same thread that match the query.

    A thread's vector score is the sum of the highest vector scores of its rows (at most
    `_NEAREST_PER_THREAD` of them), scaled so that the best thread's score is 1.
    """
    starts, run_of_row, remaining = (
        row_contexts.run_starts,
        row_contexts.run_of_row,
        vector_scores.copy(),
    )
    thread_values = np.zeros(len(starts), np.float32)
    for _ in range(_NEAREST_PER_THREAD):
        highest = np.maximum.reduceat(remaining, starts)
        thread_values += highest
        best_rows = np.flatnonzero((remaining == highest[run_of_row]) & (remaining > 0))
        # If several rows of a thread tie for the highest score, each pass of the loop counts only
        # one of these rows.
        remaining[best_rows[np.diff(run_of_row[best_rows], prepend=-1) > 0]] = 0
    shares = _divide_by_best(thread_values * row_contexts.is_thread) * np.float32(
        _THREAD_VECTOR_WEIGHT * thread_bonus_factor * weights.vector
    )
    return np.asarray(shares[run_of_row] * row_contexts.thread_share, np.float32)


def scale_mean_to_0_and_best_to_1(cosines: Floats) -> Scores:
    """Scale cosine similarities so that their mean becomes 0 and their maximum becomes 1.

    Cosine similarities that are NaN or below the mean become 0.

    With many embedders, even unrelated texts have a high cosine similarity. Subtracting the mean
    cosine similarity of all rows makes the scaled similarities comparable across embedders and
    searches. If all cosines are nearly equal, they are clipped to the range from 0 to 1 without
    being scaled.
    """
    has_vector = np.isfinite(cosines)
    if not has_vector.any():
        return np.zeros(len(cosines), np.float32)
    finite = np.where(has_vector, cosines, 0).astype(np.float32)
    mean_cosine = finite.sum(dtype=np.float64) / np.count_nonzero(has_vector)
    distance = float(finite.max(where=has_vector, initial=-1)) - mean_cosine
    scaled = (
        finite if distance < 1e-6 else (finite - np.float32(mean_cosine)) / np.float32(distance)
    )
    return np.where(has_vector, np.clip(scaled, 0, 1), np.float32(0))


def _compute_nearness_to_query(
    cosines: Floats | None, row_count: int, calibration: VectorCalibration
) -> Scores:
    """Return how close each row's vector is to the query's vector, on a scale from 0 to 1.

    A row's nearness is 0 if the row has no vector, that is, if its cosine similarity is NaN. A
    row's nearness (its rescaled vector similarity to the query) is also 0 if the row's cosine
    similarity to the query does not exceed the mean cosine similarity of all rows. A cosine of 1
    gives the nearness 1. Each returned value is multiplied by `VectorCalibration.trust`, which is
    low if the vectors hardly distinguish related texts from unrelated texts.
    """
    if cosines is None:
        return np.zeros(row_count, np.float32)
    has_vector = np.isfinite(cosines)
    finite = np.where(has_vector, np.minimum(cosines, 1), 0).astype(np.float32)
    total = float(finite.sum(dtype=np.float64)) + _PRIOR_ROWS * calibration.origin
    mean = max(total / (np.count_nonzero(has_vector) + _PRIOR_ROWS), 0.0)
    if mean >= 1:
        return np.zeros(row_count, np.float32)
    scale = np.float32(calibration.trust / (1 - mean))
    return np.asarray(np.maximum(finite - np.float32(mean), 0) * scale, np.float32)


# -- words


def inverse_document_frequency(count: int, rows: int) -> float:
    """Return the inverse document frequency of a word that occurs in `count` of `rows` rows.

    The result is always positive.

    Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009),
    equation 3.3. As in Lucene's BM25Similarity, 1 is added inside the logarithm.
    """
    return math.log1p((rows - count + 0.5) / (count + 0.5))


def compute_word_information_nats(term: Term, row_count: int) -> float:
    """Return the information content of a word in nats.

    The information content is -ln(share), where `share` is the fraction of messages that contain
    the word.

    If the word's frequency in the query's language is known, `share` is the fraction of all
    messages in that language that contain the word. If the frequency of the word in the language is
    unknown, `share` is estimated from the searched rows. If a word is part of a speaker's name and
    its frequency in the language is unknown, `share` is `_UNLISTED_FREQUENCY`. The estimate of
    `share` subtracts 1 from the number of rows with the word, so that a word in a single row counts
    as rare. A word that occurs in most messages carries little information.
    """
    share = term.message_frequency or _UNLISTED_FREQUENCY
    if not term.message_frequency and not term.names_actor:
        share = (
            max(_count_rows_with_word(term, row_count) - 1, 0)
            + _PRIOR_MESSAGES * _UNLISTED_FREQUENCY
        ) / (row_count - 1 + _PRIOR_MESSAGES)
    return -math.log(share)


def _compute_evidence_in_nats_by_word(
    terms: Sequence[Term], row_count: int, row_contexts: RowContexts | None
) -> list[float]:
    """Return, for each query word, how strongly its occurrence indicates that a row is relevant.

    A word's evidence score is measured in nats. Usually, a word's evidence score is its information
    content (see `compute_word_information_nats`).

    If a word's information content was estimated from the searched rows, the word's evidence score
    is twice its information content, capped at a maximum. A word that occurs in two of n rows has
    an information content of about ln n nats. To correct for chance matches among n searched rows,
    ln(n) nats are subtracted from the best row's evidence score. If the score were not doubled, the
    correction for chance would cancel the evidence from a word that occurs in only two rows.

    A word's evidence score is 0 if the word occurs in nearly all rows, or is the name of the person
    whom the rows are about. If every query word occurs in nearly all rows or refers to the person
    whom the rows are about, each word keeps its usual evidence score instead of the score 0.

    The information content of a word may be estimated from the number of rows that contain the
    word. For this estimate, rows that consist only of a question are not counted. Such rows are
    counted only if no other row contains the word.
    """
    is_only_question = (
        np.zeros(row_count, bool) if row_contexts is None else row_contexts.is_only_question
    )
    evidence, is_shared_list = list[float](), list[bool]()
    for term in terms:
        rows = term.rows[~is_only_question[term.rows]]
        nats = compute_word_information_nats(
            term._replace(rows=rows) if len(rows) else term, row_count
        )
        if not term.message_frequency and not term.names_actor:
            nats = max(nats, min(2 * nats, -math.log(_UNLISTED_FREQUENCY)))
        evidence.append(nats)
        is_shared_list.append(
            term.names_subject or is_word_in_nearly_all_rows(len(term.rows), row_count)
        )
    if not all(is_shared_list):
        for i in np.flatnonzero(is_shared_list):
            evidence[i] = 0.0
    return evidence


def is_word_in_nearly_all_rows(word_row_count: int, row_count: int) -> bool:
    """Return whether a word is too common to indicate which rows are relevant.

    `word_row_count` is the number of rows that contain the word, and `row_count` is the number of
    all searched rows.
    """
    return row_count >= _MIN_ROWS_NEARLY_ALL and word_row_count >= _NEARLY_ALL * row_count


def compute_word_weight(term: Term, row_count: int) -> float:
    """Return the weight of a word in a row's score.

    Words that are rare in the searched rows or in the language have a higher weight.
    """
    rarity = -math.log(term.message_frequency or _UNLISTED_FREQUENCY)
    return inverse_document_frequency(_count_rows_with_word(term, row_count), row_count) * math.pow(
        rarity, _RARITY_POWER
    )


def _count_rows_with_word(term: Term, row_count: int) -> int:
    """Return the number of rows that contain a word or, if no row does, one of its synonyms."""
    return min(len(term.rows) or sum(len(rows) for rows, _ in term.synonyms), row_count)


def iter_term_blocks_with_frequencies_in_rows(
    terms: Sequence[Term], row_count: int, weights: Weights = DEFAULT
) -> Iterator[tuple[Sequence[Term], Scores]]:
    """Split the query words into blocks, and yield each block with its term frequencies.

    For each query word in the block, the term frequencies give the number of occurrences in each
    row.

    A block is a group of words. The term frequencies of a block are a float32[words, n] array that
    is small enough to fit in the CPU cache. If a row contains a synonym of a query word, the row's
    term frequency for the query word is at least `similarity * Weights.kin`. Query words that have
    no synonyms and occur in no row are omitted.

    The Okapi BM25 scores for a block are
    `word_weights @ (frequencies / (frequencies + compute_length_penalty(...)))`. In the formula,
    `frequencies` is the array of term frequencies, and `word_weights` contains one weight for each
    word of the block.

    Source: Robertson and Zaragoza (2009), eq. 3.15. The constant factor (k1 + 1) of the BM25
    formula is omitted, as in Lucene 8 and later, because it does not affect the ranking.
    """
    block_size = max(1, _BLOCK_COUNTS // max(row_count, 1))
    matching = [term for term in terms if len(term.rows) or term.synonyms]
    for begin in range(0, len(matching), block_size):
        block = matching[begin : begin + block_size]
        counts = np.zeros((len(block), row_count), np.float32)
        for term_counts, term in zip(counts, block, strict=True):
            term_counts[term.rows] = term.tf
            for rows, similarity in term.synonyms:
                term_counts[rows] = np.maximum(
                    term_counts[rows], np.float32(weights.kin * similarity)
                )
        yield block, counts


def compute_length_penalty(
    lengths: Floats, weights: Weights = DEFAULT, mean: float | None = None
) -> Scores:
    """Compute each row's BM25 length normalisation, k1 * (1 - b + b * length / mean); float32."""
    if mean is None:
        mean = float(np.mean(lengths)) if len(lengths) else 0.0
    relative = np.asarray(lengths, np.float32) / np.float32(mean if mean > 0 else 1)
    k1, b = weights.k1, weights.b
    penalty = np.float32(k1 * (1 - b)) + np.float32(k1 * b) * relative
    return np.asarray(np.maximum(penalty, _MIN_PENALTY), np.float32)


class _WordScores(NamedTuple):
    """Each row's scores and evidence, computed from the words of a query.

    A row's evidence is a score, in nats, for how strongly the matching words indicate that the row
    is relevant.

    Attributes:
        own: The score of the row's own words; float32[n].
        shared: The score of the words in the row and in its neighbours; float32[n].
        thread: The amount that the row gains from the score of its thread; float32[n].
        evidence: The evidence of the words in the row and in its neighbours, in nats; float32[n].
    """

    own: Scores
    shared: Scores
    thread: Scores
    evidence: Scores


def _score_rows_by_words(
    terms: Sequence[Term],
    evidence_of_terms: Sequence[float],
    lengths: Floats,
    row_contexts: RowContexts | None,
    names_speaker_of_row: Bools | None,
    weights: Weights,
) -> _WordScores:
    """Score the rows by how well they match the words of the query."""
    n = len(lengths)
    own_scores, score_sums = np.zeros(n, np.float32), np.zeros((2, n), np.float32)
    shared_scores, evidence_of_rows = score_sums
    penalty = compute_length_penalty(lengths, weights)
    thread_scores = thread_penalty = np.zeros(0, np.float32)
    if row_contexts is not None:
        thread_scores = np.zeros(len(row_contexts.run_starts), np.float32)
        sizes: Floats = np.bincount(row_contexts.run_of_row, lengths, len(thread_scores)).astype(
            float
        )
        thread_sizes = sizes[row_contexts.is_thread]
        mean = thread_sizes.mean() if len(thread_sizes) else 0.0
        thread_penalty = compute_length_penalty(sizes, weights, mean)
    evidence = dict(zip(map(id, terms), evidence_of_terms, strict=True))
    for block, counts in iter_term_blocks_with_frequencies_in_rows(terms, n, weights):
        factors_of_terms = [(compute_word_weight(term, n), evidence[id(term)]) for term in block]
        weights_of_terms, nats = factors = np.ascontiguousarray(
            np.array(factors_of_terms, np.float32).T
        )
        saturated = counts / (counts + penalty)
        own_scores += weights_of_terms @ saturated
        if row_contexts is not None:
            saturated = _raise_scores_by_neighbours(saturated, row_contexts, weights)
            counts_in_threads = np.add.reduceat(counts, row_contexts.run_starts, axis=1)
            thread_scores += weights_of_terms @ (
                counts_in_threads / (counts_in_threads + thread_penalty) * row_contexts.is_thread
            )
        score_sums += factors @ saturated
        for row_has_word, term, nats_of_word in zip(saturated, block, nats, strict=True):
            # If the query names a speaker, that speaker's rows are treated as if they contained the
            # name.
            if term.names_actor and names_speaker_of_row is not None:
                evidence_of_rows += nats_of_word * np.maximum(
                    names_speaker_of_row / (1 + penalty) - row_has_word, 0
                )
    # For a word that occurs once in a row, the BM25 formula yields `1 / (1 + penalty)`, where
    # `penalty` depends on the row's length. Multiply each row's evidence by `1 + penalty`, so that
    # a single occurrence of a word counts as 1.
    evidence_of_rows *= 1 + penalty
    if row_contexts is None:
        return _WordScores(own_scores, shared_scores, np.zeros(n, np.float32), evidence_of_rows)
    best_thread = max(float(thread_scores.max(initial=0.0)), 1e-9)
    shares = (thread_scores * (weights.thread / best_thread)).astype(np.float32)
    return _WordScores(
        own_scores,
        shared_scores,
        shares[row_contexts.run_of_row] * row_contexts.thread_share,
        evidence_of_rows,
    )


# -- context


@dataclass(frozen=True)
class RowContexts:
    """The context of each row, which consists of its thread, its neighbours and its recency.

    A `RowContexts` object is built by `build_row_contexts`. All searches of the same rows can use
    the same `RowContexts` object.

    Each row receives a fraction of the scores of neighbouring rows in its thread. Rows i and i + k
    are neighbours at distance k. `share_from_previous[k - 1][i]` is the fraction of row i's score
    that row i + k receives. `share_from_next[k - 1][i]` is the fraction of row i + k's score that
    row i receives. If rows i and i + k belong to different threads, `share_from_previous[k - 1][i]`
    and `share_from_next[k - 1][i]` are 0.
    """

    # Index of the first row of each run. A run is either all rows of one thread, or a sequence of
    # consecutive rows that belong to no thread.
    run_starts: NDArray[np.intp]
    # for each row, the index in `run_starts` of the run that contains the row
    run_of_row: NDArray[np.intp]
    is_thread: Bools  # whether a run is a thread
    share_from_previous: tuple[Scores, ...]
    share_from_next: tuple[Scores, ...]
    # For each row, the fraction of its thread's score that is added to the row's own score
    thread_share: Scores
    is_only_question: Bools  # whether the row is only a question
    recency: Scores  # recency of each row: 1 for the newest, approaching 0 for old rows


def build_row_contexts(
    thread_codes: Ints, lengths: Floats, ends_with_question: Bools, sent_at: Floats
) -> RowContexts:
    """Build the context of each row.

    Args:
        thread_codes: A code for each row's thread, negative for none; int[n]. The rows of a thread
            are adjacent and in message order.
        lengths: The number of words in each row; float[n].
        ends_with_question: Whether a row ends with a question; bool[n].
        sent_at: The time of each row's message, NaN if unknown; float[n].
    """
    n, is_in_thread = len(thread_codes), thread_codes >= 0
    is_run_start = np.ones(n, bool)
    is_run_start[1:] = thread_codes[1:] != thread_codes[:-1]
    starts = np.flatnonzero(is_run_start)
    lengths_or_one = np.maximum(np.asarray(lengths, np.float32), 1)
    loan_share = np.minimum(1, np.float32(MAX_WORDS_FULL_LOAN) / lengths_or_one)
    steps = range(1, min(len(DEFAULT.neighbours), n - 1) + 1)
    is_same_thread = [(thread_codes[k:] == thread_codes[:-k]) & is_in_thread[k:] for k in steps]
    known_times = sent_at[np.isfinite(sent_at)]
    later_count = len(known_times) - np.searchsorted(np.sort(known_times), sent_at, side="right")
    fading = np.exp2(
        later_count / np.float32(-_RECENCY_HALF_LIFE * max(len(known_times), 1))
    ).astype(np.float32)
    return RowContexts(
        starts,
        np.cumsum(is_run_start) - 1,
        is_in_thread[starts],
        tuple(is_same * loan_share[k:] for k, is_same in enumerate(is_same_thread, 1)),
        tuple(is_same * loan_share[:-k] for k, is_same in enumerate(is_same_thread, 1)),
        np.where(
            is_in_thread,
            np.minimum(1, np.float32(MAX_WORDS_FULL_THREAD) / lengths_or_one),
            np.float32(0),
        ),
        ends_with_question & (lengths <= MAX_WORDS_QUESTION),
        np.where(np.isfinite(sent_at), fading, np.float32(0)),
    )


def _raise_scores_by_neighbours(
    scores: Scores, row_contexts: RowContexts, weights: Weights
) -> Scores:
    """Set each row's score to the maximum of its own score and its neighbours' contributions.

    The argument `scores` and the returned scores are float32 arrays of shape `[..., n]`, where n is
    the number of rows.
    """
    best = scores.copy()
    steps: Sequence[tuple[float, Scores, Scores]] = list(
        zip(
            weights.neighbours,
            row_contexts.share_from_previous,
            row_contexts.share_from_next,
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

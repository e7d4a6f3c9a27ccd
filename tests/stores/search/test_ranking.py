"""Scores of rows: BM25, vectors, context, and their sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.settings import MIN_SCORE
from perdure.stores.search.ranking import (
    DEFAULT,
    RankedRows,
    RowContexts,
    Term,
    Weights,
    build_row_contexts,
    compute_length_penalty,
    compute_word_information_nats,
    compute_word_weight,
    inverse_document_frequency,
    iter_term_blocks_with_frequencies_in_rows,
    rank_rows,
    scale_mean_to_0_and_best_to_1,
)

PLAIN = Weights(k1=1.2, b=0.75)


def make_term(rows: list[int], counts: list[int] | None = None) -> Term:
    occurrences = np.array(counts if counts is not None else [1] * len(rows), np.float32)
    return Term(
        np.array(rows, np.int64), occurrences, message_frequency=1 / math.e
    )  # each word has one nat of information


def make_floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def make_row_contexts(
    thread: np.ndarray,
    lengths: np.ndarray,
    asks: np.ndarray | None = None,
    at: np.ndarray | None = None,
) -> RowContexts:
    """Compute contexts of rows of which, by default, none is a question or has a known time."""
    n = len(thread)
    asks = np.zeros(n, bool) if asks is None else asks
    return build_row_contexts(thread, lengths, asks, np.full(n, math.nan) if at is None else at)


def compute_bm25(terms: list[Term], lengths: np.ndarray, weights: Weights = DEFAULT) -> np.ndarray:
    penalty = compute_length_penalty(lengths, weights)
    scores = np.zeros(len(lengths), np.float32)
    for part, counts in iter_term_blocks_with_frequencies_in_rows(terms, len(scores), weights):
        worths = np.array(
            [compute_word_weight(make_term, len(scores)) for make_term in part], np.float32
        )
        scores += worths @ (counts / (counts + penalty))
    return scores


def test_idf_of_rare_and_common_words_equals_formula() -> None:
    """A word in one of three rows has the idf ln(1 + 2.5/1.5).

    The idf of a word in all rows is positive.
    """
    assert inverse_document_frequency(1, 3) == pytest.approx(math.log(1 + 2.5 / 1.5))
    assert inverse_document_frequency(3, 3) == pytest.approx(math.log(1 + 0.5 / 3.5))


def test_bm25_equals_scores_computed_by_hand() -> None:
    """The scores of three rows of 2, 4 and 6 words are calculated by hand.

    The mean is 4, so the penalties are 1.2 * (0.25 + 0.75 * length / 4) = 0.75, 1.2 and 1.65.
    """
    words = [make_term([0, 1], [1, 2]), make_term([2], [3])]
    expected = [
        math.log(1 + 1.5 / 2.5) * 1 / (1 + 0.75),
        math.log(1 + 1.5 / 2.5) * 2 / (2 + 1.2),
        math.log(1 + 2.5 / 1.5) * 3 / (3 + 1.65),
    ]

    assert compute_bm25(words, make_floats(2, 4, 6), PLAIN).tolist() == pytest.approx(expected)


def test_bm25_without_rows_words_or_lengths_is_zero() -> None:
    """Empty rows do not cause a division by zero."""
    assert compute_bm25([], make_floats()).tolist() == []
    assert compute_bm25([], make_floats(3, 4)).tolist() == [0, 0]
    assert compute_bm25([make_term([])], make_floats(3, 4)).tolist() == [0, 0]
    assert compute_bm25([make_term([0], [0])], make_floats(0, 0)).tolist() == [0, 0]


@given(st.lists(st.integers(1, 50), min_size=2, max_size=12), st.integers(1, 20))
def test_bm25_rises_with_repetition_and_falls_with_length(sizes: list[int], tf: int) -> None:
    """A score rises with the number of occurrences and falls with the length of the row."""
    lengths = np.array(sizes, np.float32)
    everywhere = list(range(len(sizes)))
    less, more = (
        compute_bm25([make_term(everywhere, [n] * len(sizes))], lengths) for n in (tf, tf + 1)
    )

    assert (more > less).all()
    assert (np.diff(less[np.argsort(lengths)]) <= 1e-7).all()


def test_synonym_scores_less_than_the_word_itself() -> None:
    """A row with both the word and a synonym counts the word only."""
    kin = ((np.array([0, 1]), 0.9), (np.array([1, 2]), 0.6))
    word = Term(np.array([0]), make_floats(1), kin, message_frequency=1 / math.e)
    scores = compute_bm25([word], make_floats(5, 5, 5, 5))

    assert scores[0] > scores[1] > scores[2] > scores[3] == 0
    assert scores[0] == compute_bm25([make_term([0])], make_floats(5, 5, 5, 5))[0]


def test_missing_word_is_as_rare_as_its_synonyms() -> None:
    """A word that no row contains is weighted by the rows that contain its synonyms."""
    word = Term(
        np.array([], np.int64), make_floats(), ((np.array([1]), 1.0),), message_frequency=1 / math.e
    )
    scores = compute_bm25([word], make_floats(5, 5), Weights(kin=1.0))

    assert scores.tolist() == compute_bm25([make_term([1])], make_floats(5, 5)).tolist()


def test_row_contexts_group_rows_by_thread() -> None:
    """Neighbours are rows of one thread. Rows without a thread have no neighbours."""
    row_contexts = make_row_contexts(np.array([-1, -1, 7, 7, 7, 2]), np.ones(6))

    assert row_contexts.run_of_row.tolist() == [0, 0, 1, 1, 1, 2]
    assert row_contexts.run_starts.tolist() == [0, 2, 5]
    assert row_contexts.is_thread.tolist() == [False, True, True]
    for shares in (row_contexts.share_from_previous, row_contexts.share_from_next):
        assert [share.tolist() for share in shares] == [[0, 0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0]]


def test_long_row_takes_smaller_share_from_neighbours() -> None:
    """In a thread of 10, 100 and 400 words, the long rows take a half and an eighth."""
    row_contexts = make_row_contexts(np.zeros(3, np.int64), make_floats(10, 100, 400))

    assert row_contexts.share_from_previous[0].tolist() == pytest.approx([0.5, 0.125])
    assert row_contexts.share_from_next[0].tolist() == pytest.approx([1, 0.5])
    assert row_contexts.thread_share.tolist() == pytest.approx([1, 1, 0.5])


def test_only_short_row_with_question_counts_as_question() -> None:
    """A row of more than 25 words that ends with a question is not treated as a mere question."""
    row_contexts = make_row_contexts(
        np.zeros(3, np.int64), make_floats(25, 26, 3), np.array([True, True, False])
    )

    assert row_contexts.is_only_question.tolist() == [True, False, False]


@pytest.mark.parametrize("codes", [[], [-1], [3], [3, 3]])
def test_fewer_rows_than_neighbour_distance_are_ranked(codes: list[int]) -> None:
    n = len(codes)
    row_contexts = make_row_contexts(np.array(codes, np.int64), np.ones(n))
    rows = list(range(n))[:1]
    ranked = rank_rows(
        np.ones(n), terms=[make_term(rows)], cosines=np.ones(n), row_contexts=row_contexts
    )

    assert len(ranked.scores) == n
    assert np.isfinite(ranked.scores).all()


def test_match_adds_share_to_neighbours_in_its_thread() -> None:
    """Rows one, two and three steps away gain 0.6, 0.4 and 0.2 of the score."""
    row_contexts = make_row_contexts(np.array([0, 0, 0, 0, 0, 1]), np.ones(6))
    ranked = rank_rows(np.ones(6), terms=[make_term([4])], row_contexts=row_contexts)

    assert ranked.parts["text"].tolist() == [0, 0, 0, 0, 1, 0]
    assert ranked.parts["neighbours"].tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0, 0])


def test_row_gains_once_per_word_that_its_neighbours_match() -> None:
    """A row between two matches gains once if both match the same word, and twice otherwise."""
    row_contexts = make_row_contexts(np.zeros(3, np.int64), np.ones(3))
    weights = Weights(thread=0.0)
    same = rank_rows(
        np.ones(3), terms=[make_term([0, 2])], row_contexts=row_contexts, weights=weights
    )
    two = rank_rows(
        np.ones(3),
        terms=[make_term([0]), make_term([2])],
        row_contexts=row_contexts,
        weights=weights,
    )

    assert same.scores.tolist() == pytest.approx([1, 0.6, 1])
    assert two.scores[1] == pytest.approx(two.scores.max() * 1.2 / 1.4)


def test_neighbours_gain_from_vector_in_semantic_search() -> None:
    row_contexts = make_row_contexts(np.zeros(4, np.int64), np.ones(4))
    ranked = rank_rows(
        np.ones(4), cosines=make_floats(-0.5, -0.5, -0.5, 0.5), row_contexts=row_contexts
    )

    assert ranked.scores.tolist() == pytest.approx([0.2, 0.4, 0.6, 1])


def test_rows_of_best_matching_thread_gain() -> None:
    """Rows of a thread with fewer matches gain less, and rows without a thread nothing."""
    row_contexts = make_row_contexts(np.array([0] * 4 + [1] * 4 + [-1]), np.ones(9))
    words = [make_term([0, 3, 4, 8]), make_term([3])]
    ranked = rank_rows(np.ones(9), terms=words, row_contexts=row_contexts)
    thread = ranked.parts["thread"].tolist()

    assert thread[:4] == pytest.approx([Weights().thread] * 4)
    assert 0 < thread[4] == thread[7] < thread[0]
    assert thread[8] == 0


def test_hybrid_score_splits_between_text_and_vector_by_weight() -> None:
    """Each part is relative to the best row of that part."""
    weights = Weights(vector=0.25)
    ranked = rank_rows(
        np.ones(2), terms=[make_term([0])], cosines=make_floats(0.1, 0.3), weights=weights
    )

    assert ranked.parts["text"].tolist() == pytest.approx([0.75, 0])
    assert ranked.parts["vector"].tolist() == pytest.approx([0, 0.25])


def test_row_without_vector_is_ranked_by_its_words() -> None:
    """NaN as a cosine means that the item has no vector yet."""
    cosines = make_floats(math.nan, 0.2, 0.4)
    ranked = rank_rows(np.ones(3), terms=[make_term([0])], cosines=cosines)

    assert np.isfinite(ranked.scores).all()
    assert ranked.scores.argmax() == 0
    assert rank_rows(np.ones(2), cosines=make_floats(math.nan, math.nan)).scores.tolist() == [0, 0]


def test_scale_above_mean_keeps_cosines_of_equal_rows() -> None:
    """A single row, or equal rows, keep their cosine. Negative cosines become zero."""
    assert scale_mean_to_0_and_best_to_1(make_floats(0.5)).tolist() == [0.5]
    assert scale_mean_to_0_and_best_to_1(make_floats(0.25, 0.25)).tolist() == [0.25, 0.25]
    assert scale_mean_to_0_and_best_to_1(make_floats(-0.5, -0.5)).tolist() == [0, 0]
    assert scale_mean_to_0_and_best_to_1(make_floats(-0.5)).tolist() == [0]
    assert scale_mean_to_0_and_best_to_1(make_floats()).tolist() == []


def test_actor_and_date_raise_score_and_question_lowers_it() -> None:
    """A question loses its share of the whole score."""
    row_contexts = make_row_contexts(np.array([-1, -1]), np.ones(2), np.array([False, True]))
    actor, date = np.array([True, True]), np.array([False, True])
    weights = Weights(actor=0.1, date=0.3, question=0.5)
    ranked = rank_rows(
        np.ones(2), row_contexts=row_contexts, actor=actor, date=date, weights=weights
    )

    assert ranked.scores.tolist() == pytest.approx([0.1, 0.2])
    assert ranked.parts["question"].tolist() == pytest.approx([0, -0.2])


def test_newest_row_gains_most_from_recency() -> None:
    """The gain halves with each fifth of the rows. A row of unknown time gains nothing."""
    times = make_floats(*range(10), math.nan).astype(np.float64)
    row_contexts = make_row_contexts(np.zeros(11, np.int64), np.ones(11), at=times)
    weights = Weights(recency=0.5, neighbours=(), thread=0.0)
    ranked = rank_rows(
        np.ones(11), terms=[make_term(list(range(11)))], row_contexts=row_contexts, weights=weights
    )

    assert ranked.scores[[9, 7, 5, 10]].tolist() == pytest.approx([1.5, 1.25, 1.125, 1])


def test_word_information_is_minus_log_of_message_frequency() -> None:
    """The frequency is that of the language, or else that among the other rows in scope.

    Eleven of 71 rows have the word, so ten of 70 other rows do. To them 30 messages of a language
    are added in which 2.4 of a million messages have the word. A name has the same information
    as a word that is in no frequency list.
    """
    scarce, frequent = make_term([3]), make_term(list(range(11)))

    assert compute_word_information_nats(
        scarce._replace(message_frequency=0.01), 71
    ) == pytest.approx(math.log(100))
    assert compute_word_information_nats(scarce._replace(message_frequency=0), 71) == pytest.approx(
        -math.log(30 * 2.4e-6 / 100)
    )
    assert compute_word_information_nats(
        frequent._replace(message_frequency=0), 71
    ) == pytest.approx(-math.log(0.10000072))
    assert compute_word_information_nats(
        frequent._replace(message_frequency=0, names_actor=True), 71
    ) == -math.log(2.4e-6)


def test_unlisted_word_of_few_rows_passes_min_score() -> None:
    """Two or four of 40 rows are found, thirty are not. Rows that are questions do not count."""
    lengths = np.ones(40)

    def best_score(rows: list[int], asks: list[int] | None = None) -> float:
        asking = np.isin(np.arange(40), asks or [])
        row_contexts = make_row_contexts(np.arange(40), lengths, asking)
        words = [make_term(rows)._replace(message_frequency=0)]
        return float(
            rank_rows(lengths, terms=words, row_contexts=row_contexts)
            .with_scores_comparable_between_searches()
            .scores[0]
        )

    assert best_score([0, 1]) >= MIN_SCORE
    assert best_score([0, 1, 2, 3]) >= MIN_SCORE
    assert best_score(list(range(30))) < MIN_SCORE
    assert best_score(list(range(30)), list(range(2, 30))) >= MIN_SCORE


def test_word_of_nearly_all_rows_counts_only_if_alone_in_query() -> None:
    """The name of a person in facts about that person, for example, tells nothing."""
    lengths = np.ones(20)
    name = make_term(list(range(19)))._replace(message_frequency=math.exp(-8))
    other, absent = (
        make_term(rows)._replace(message_frequency=math.exp(-9)) for rows in ([3], list[int]())
    )

    def rows_above_min_score(*terms: Term) -> list[int]:
        scores = rank_rows(lengths, terms=terms).with_scores_comparable_between_searches().scores
        return np.flatnonzero(scores >= MIN_SCORE).tolist()

    assert rows_above_min_score(name, other) == [3]
    assert rows_above_min_score(name, absent) == []
    assert rows_above_min_score(name) == list(range(19))


def test_comparable_score_equals_formula_computed_by_hand() -> None:
    """All penalties of three rows of one word are 1.2, and one occurrence counts as one.

    The evidence of a row with all words is the sum of their information minus ln 3. A row with half
    of the query's information has half of that sum, times 0.5 ** 0.35. The odds are e to a quarter
    of the evidence.
    """
    lengths, nowhere = np.ones(3), make_term([])._replace(message_frequency=math.exp(-8))
    one, other = (make_term([row])._replace(message_frequency=math.exp(-8)) for row in (1, 0))

    def best_score(*terms: Term, **options: Any) -> float:
        return float(
            rank_rows(lengths, terms=terms, **options)
            .with_scores_comparable_between_searches()
            .scores.max()
        )

    def expected_score(evidence: float) -> float:
        return 1 / (1 + math.exp(-(evidence - math.log(3)) / 4))

    near, alike = make_floats(0.9, 0.3, 0.2), make_floats(0.3, 0.3, 0.3)

    assert best_score(one) == pytest.approx(expected_score(8))
    assert best_score(one, other) == pytest.approx(expected_score(8 * 0.5**0.35))
    assert best_score(one, nowhere) == pytest.approx(expected_score(8 * 0.5**0.35))
    assert best_score(one, cosines=make_floats(0.2, 0.9, 0.3)) == pytest.approx(
        expected_score(8 + 5 * 0.7 / 0.8)
    )
    assert best_score(nowhere, cosines=near) == pytest.approx(expected_score(5 * 0.7 / 0.8))
    assert best_score(cosines=near) == pytest.approx(0.7 / 0.8)
    assert best_score(cosines=alike) == pytest.approx((0.3 - 0.9 / 7) / (1 - 0.9 / 7))


def test_score_is_limited_by_evidence_of_its_own_row() -> None:
    """Of 16 rows, row 0 has a word with ten nats of information, and row 1 a remote synonym.

    The limit of row 1 is the information of the synonym minus ln 16 / 4. The limit of row 0 is far
    above its evidence.
    """
    n = 16
    kin = ((np.array([1, 2]), 0.1),)
    word = Term(np.array([0]), make_floats(1), kin, message_frequency=math.exp(-10))
    weights = Weights(kin=1.0)
    ranked = rank_rows(
        np.ones(n), terms=[word], weights=weights
    ).with_scores_comparable_between_searches()
    tf = 0.1 * (1 + 1.2) / (0.1 + 1.2)  # a tenth of an occurrence; one occurrence counts 1
    limit = 10 * tf * tf**0.35 - math.log(n) / 4

    assert float(ranked.scores[0]) == pytest.approx(
        1 / (1 + math.exp(-(10 - math.log(n)) / 4)), abs=1e-5
    )
    assert float(ranked.scores[1]) == pytest.approx(1 / (1 + math.exp(-limit / 4)), abs=1e-5)
    assert ranked.scores[1] < MIN_SCORE < ranked.scores[0]


@pytest.mark.parametrize("n", [3, 12, 40, 600])
@pytest.mark.parametrize("has_match", [True, False])
def test_matching_row_does_not_lift_other_rows_over_min_score(n: int, has_match: bool) -> None:
    """Rows whose vectors are a little above the mean stay below the minimum score."""
    cosines = np.full(n, 0.1, np.float32)
    cosines[1] = 0.3
    words = [make_term([0] if has_match else [])._replace(message_frequency=math.exp(-12))]
    cosines[0] = 0.9 if has_match else 0.1
    ranked = rank_rows(
        np.ones(n), terms=words, cosines=cosines
    ).with_scores_comparable_between_searches()

    assert (ranked.scores[0] >= MIN_SCORE) == has_match
    assert ranked.scores[1:].max() < MIN_SCORE


def test_neighbours_of_match_pass_min_score() -> None:
    """Rows beside a match pass the minimum score, and rows of another thread do not."""
    row_contexts = make_row_contexts(np.array([0] * 5 + [1] * 5), np.ones(10))
    words = [make_term([2])._replace(message_frequency=math.exp(-12))]
    cosines = np.full(10, 0.1, np.float32)
    ranked = rank_rows(
        np.ones(10), terms=words, cosines=cosines, row_contexts=row_contexts
    ).with_scores_comparable_between_searches()

    assert (ranked.scores >= MIN_SCORE).tolist() == [True] * 5 + [False] * 5


def test_row_with_matching_word_ranks_before_row_with_other_gains() -> None:
    """A row that gains only by its actor, date or vector comes after a row with a word."""
    words = [
        make_term([0])._replace(message_frequency=math.exp(-12)),
        make_term([1])._replace(message_frequency=math.exp(-6)),
    ]
    cosines = make_floats(0.9, -0.5, 0.2, *[-0.5] * 37)
    bonus = np.arange(40) == 2
    weights = Weights(actor=0.5, date=0.5)
    cues = {"actor": bonus, "date": bonus, "weights": weights}
    ranked = rank_rows(np.ones(40), terms=words, cosines=cosines, **cues)
    after = ranked.with_scores_comparable_between_searches()

    assert ranked.scores[2] > ranked.scores[1]
    assert np.argsort(-after.row_sort_keys, kind="stable")[:3].tolist() == [0, 1, 2]
    assert after.scores[1] >= MIN_SCORE > after.scores[2]


@pytest.mark.parametrize("n", [2, 30, 5_000])
def test_match_that_is_expected_by_chance_scores_one_half(n: int) -> None:
    """A word of one in n messages that occurs in one of n rows has even odds, for every n."""
    ranked = rank_rows(
        np.ones(n), terms=[make_term([0])._replace(message_frequency=1 / n)]
    ).with_scores_comparable_between_searches()

    assert ranked.scores.max() == pytest.approx(0.5, abs=1e-5)


@st.composite
def random_searches(draw: st.DrawFn) -> tuple[int, list[Term], np.ndarray, np.ndarray, list[int]]:
    """Draw the number of rows, words, lengths, cosines (some NaN) and thread codes."""
    n = draw(st.integers(1, 12))
    some = st.lists(st.integers(0, n - 1), unique=True, max_size=n)
    words = [
        make_term(rows, [1 + row % 3 for row in rows]) for rows in draw(st.lists(some, max_size=4))
    ]
    cosine = st.one_of(st.floats(-1, 1, width=32), st.just(math.nan))
    lengths = draw(st.lists(st.integers(0, 30), min_size=n, max_size=n))
    cosines = draw(st.lists(cosine, min_size=n, max_size=n))
    codes = sorted(draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n)))
    return n, words, np.array(lengths, np.float32), np.array(cosines, np.float32), codes


@given(random_searches(), st.booleans(), st.booleans())
def test_scores_are_finite_sums_of_their_parts(
    search: tuple[int, list[Term], np.ndarray, np.ndarray, list[int]], vectors: bool, context: bool
) -> None:
    n, words, lengths, cosines, codes = search
    row_contexts = (
        make_row_contexts(np.array(codes), lengths, np.arange(n) % 2 == 0) if context else None
    )
    ranked = rank_rows(
        lengths,
        terms=words,
        cosines=cosines if vectors else None,
        row_contexts=row_contexts,
    )
    total = sum(ranked.parts.values(), np.zeros(n, np.float32))

    assert ranked.scores.shape == (n,)
    assert ranked.scores.dtype == np.float32
    assert np.isfinite(ranked.scores).all()
    assert (ranked.scores >= -1e-6).all()
    np.testing.assert_allclose(ranked.scores, total, atol=1e-6)


@given(random_searches(), st.sampled_from(["cosine", "semantic", "hybrid", "text"]), st.booleans())
def test_scores_of_a_search_lie_between_0_and_1(
    search: tuple[int, list[Term], np.ndarray, np.ndarray, list[int]], mode: str, context: bool
) -> None:
    """Scores fall in the order of the results, and rows without a vector have no semantic score."""
    _, words, lengths, cosines, codes = search
    row_contexts = make_row_contexts(np.array(codes), lengths) if context else None
    near = cosines * np.float32(1.0007)  # int8 vectors can give a cosine above 1
    if mode == "cosine":
        ranked = RankedRows.from_cosines(near)
    else:
        ranked = rank_rows(
            lengths,
            terms=[] if mode == "semantic" else words,
            cosines=None if mode == "text" else near,
            row_contexts=row_contexts,
        ).with_scores_comparable_between_searches()
        ranked = ranked.with_rows_lacking_vectors_last(near) if mode == "semantic" else ranked
    in_order = np.argsort(-ranked.row_sort_keys, kind="stable")
    lacking = np.isnan(cosines)

    assert ((ranked.scores >= 0) & (ranked.scores <= 1)).all()
    assert (np.diff(ranked.scores[in_order]) <= 0).all()
    shown = [sum(ranked.get_score_parts_of_row(row).values()) for row in range(len(lengths))]
    np.testing.assert_allclose(ranked.scores, shown, atol=1e-5)
    if mode in ("cosine", "semantic"):
        assert not ranked.scores[lacking].any()
        assert lacking[in_order].tolist() == sorted(lacking.tolist())


@given(random_searches(), st.randoms(use_true_random=False))
def test_order_of_unthreaded_rows_does_not_matter(
    search: tuple[int, list[Term], np.ndarray, np.ndarray, list[int]], random: object
) -> None:
    """Rows without a thread keep their scores in any order."""
    n, words, lengths, cosines, _ = search
    order = np.arange(n)
    random.shuffle(order)  # type: ignore[attr-defined]  # Hypothesis gives a random.Random
    place = np.argsort(order)
    moved = [Term(place[word.rows], word.tf) for word in words]

    def rank(terms: list[Term], sizes: np.ndarray, near: np.ndarray) -> RankedRows:
        nobody = make_row_contexts(np.full(n, -1), sizes)
        return rank_rows(sizes, terms=terms, cosines=near, row_contexts=nobody)

    before = rank(words, lengths, cosines).scores
    after = rank(moved, lengths[order], cosines[order]).scores
    np.testing.assert_allclose(after, before[order], atol=1e-6)


@given(random_searches())
def test_order_of_threads_does_not_matter(
    search: tuple[int, list[Term], np.ndarray, np.ndarray, list[int]],
) -> None:
    """Rows keep their scores in any order of threads, if the order within each thread stays."""
    n, words, lengths, cosines, codes = search
    order = np.argsort(-np.array(codes), kind="stable")
    place = np.argsort(order)
    moved = [Term(place[word.rows], word.tf) for word in words]

    def compute_scores(made: RowContexts, terms: list[Term], at: np.ndarray) -> np.ndarray:
        ranked = rank_rows(lengths[at], terms=terms, cosines=cosines[at], row_contexts=made)
        return ranked.scores

    before = compute_scores(make_row_contexts(np.array(codes), lengths), words, np.arange(n))
    after = compute_scores(make_row_contexts(np.array(codes)[order], lengths[order]), moved, order)
    np.testing.assert_allclose(after, before[order], atol=1e-6)

"""Scores of rows: BM25, vectors, what stands around a row, and their sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.settings import MIN_SCORE
from perdure.stores.ranking import (
    DEFAULT,
    Ranked,
    Term,
    ThreadArrangement,
    Weights,
    compute_length_penalty,
    compute_word_information,
    compute_word_weight,
    inverse_document_frequency,
    iter_blocks_of_word_counts,
    rank_rows,
    scale_mean_to_0_and_best_to_1,
)
from perdure.stores.ranking import build_thread_arrangement as arranged

PLAIN = Weights(k1=1.2, b=0.75)


def term(rows: list[int], tf: list[int] | None = None) -> Term:
    counts = np.array(tf if tf is not None else [1] * len(rows), np.float32)
    return Term(np.array(rows, np.int64), counts, message_frequency=1 / math.e)  # tells one nat


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def arrange(
    thread: np.ndarray,
    lengths: np.ndarray,
    asks: np.ndarray | None = None,
    at: np.ndarray | None = None,
) -> ThreadArrangement:
    """Rows of which none asks, and of unknown time, unless it is told."""
    n = len(thread)
    asks = np.zeros(n, bool) if asks is None else asks
    return arranged(thread, lengths, asks, np.full(n, math.nan) if at is None else at)


def bm25(terms: list[Term], lengths: np.ndarray, weights: Weights = DEFAULT) -> np.ndarray:
    penalty = compute_length_penalty(lengths, weights)
    scores = np.zeros(len(lengths), np.float32)
    for part, counts in iter_blocks_of_word_counts(terms, len(scores), weights):
        worths = np.array([compute_word_weight(term, len(scores)) for term in part], np.float32)
        scores += worths @ (counts / (counts + penalty))
    return scores


def test_idf_of_rare_and_common_words() -> None:
    """A word of one row in three is worth ln(1 + 2.5/1.5); one of all rows is above zero."""
    assert inverse_document_frequency(1, 3) == pytest.approx(math.log(1 + 2.5 / 1.5))
    assert inverse_document_frequency(3, 3) == pytest.approx(math.log(1 + 0.5 / 3.5))


def test_bm25_by_hand() -> None:
    """Three rows of 2, 4 and 6 words, worked out with pencil and paper.

    The mean is 4, so the penalties are 1.2 * (0.25 + 0.75 * length / 4) = 0.75, 1.2 and 1.65.
    """
    words = [term([0, 1], [1, 2]), term([2], [3])]
    expected = [
        math.log(1 + 1.5 / 2.5) * 1 / (1 + 0.75),
        math.log(1 + 1.5 / 2.5) * 2 / (2 + 1.2),
        math.log(1 + 2.5 / 1.5) * 3 / (3 + 1.65),
    ]

    assert bm25(words, floats(2, 4, 6), PLAIN).tolist() == pytest.approx(expected)


def test_bm25_without_rows_words_or_lengths() -> None:
    """Nothing to search scores nothing, and rows of no words divide by no zero."""
    assert bm25([], floats()).tolist() == []
    assert bm25([], floats(3, 4)).tolist() == [0, 0]
    assert bm25([term([])], floats(3, 4)).tolist() == [0, 0]
    assert bm25([term([0], [0])], floats(0, 0)).tolist() == [0, 0]


@given(st.lists(st.integers(1, 50), min_size=2, max_size=12), st.integers(1, 20))
def test_bm25_rises_with_repetition_and_falls_with_length(sizes: list[int], tf: int) -> None:
    """More of a word scores higher, a longer row lower, all else being the same."""
    lengths = np.array(sizes, np.float32)
    everywhere = list(range(len(sizes)))
    less, more = (bm25([term(everywhere, [n] * len(sizes))], lengths) for n in (tf, tf + 1))

    assert (more > less).all()
    assert (np.diff(less[np.argsort(lengths)]) <= 1e-7).all()


def test_kin_count_less_than_the_word() -> None:
    """A row with a kindred word scores, but below one with the very word, and not twice."""
    kin = ((np.array([0, 1]), 0.9), (np.array([1, 2]), 0.6))
    word = Term(np.array([0]), floats(1), kin, message_frequency=1 / math.e)
    scores = bm25([word], floats(5, 5, 5, 5))

    assert scores[0] > scores[1] > scores[2] > scores[3] == 0
    assert scores[0] == bm25([term([0])], floats(5, 5, 5, 5))[0]


def test_kin_of_a_word_that_no_row_has() -> None:
    """A word that only kin have is as rare as they are."""
    word = Term(
        np.array([], np.int64), floats(), ((np.array([1]), 1.0),), message_frequency=1 / math.e
    )
    scores = bm25([word], floats(5, 5), Weights(kin=1.0))

    assert scores.tolist() == bm25([term([1])], floats(5, 5)).tolist()


def test_arrangement_of_threads() -> None:
    """Neighbours are rows of one thread; rows without thread have none."""
    made = arrange(np.array([-1, -1, 7, 7, 7, 2]), np.ones(6))

    assert made.run_of_row.tolist() == [0, 0, 1, 1, 1, 2]
    assert made.run_starts.tolist() == [0, 2, 5]
    assert made.is_thread.tolist() == [False, True, True]
    for taken in (made.share_from_previous, made.share_from_next):
        assert [each.tolist() for each in taken] == [[0, 0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0]]


def test_a_long_row_takes_less_from_around_it() -> None:
    """In a thread of 10, 100 and 400 words, the long ones take a half and an eighth."""
    made = arrange(np.zeros(3, np.int64), floats(10, 100, 400))

    assert made.share_from_previous[0].tolist() == pytest.approx([0.5, 0.125])
    assert made.share_from_next[0].tolist() == pytest.approx([1, 0.5])
    assert made.thread_share.tolist() == pytest.approx([1, 1, 0.5])


def test_a_long_row_that_ends_with_a_question_says_something_too() -> None:
    """Only a row of at most 25 words is taken for a question and nothing else."""
    made = arrange(np.zeros(3, np.int64), floats(25, 26, 3), np.array([True, True, False]))

    assert made.is_only_question.tolist() == [True, False, False]


@pytest.mark.parametrize("codes", [[], [-1], [3], [3, 3]])
def test_arrangement_of_few_rows(codes: list[int]) -> None:
    """Fewer rows than neighbours reach are arranged and ranked all the same."""
    n = len(codes)
    made = arrange(np.array(codes, np.int64), np.ones(n))
    rows = list(range(n))[:1]
    found = rank_rows(np.ones(n), terms=[term(rows)], cosines=np.ones(n), arrangement=made)

    assert len(found.scores) == n
    assert np.isfinite(found.scores).all()


def test_neighbours_lend_a_share() -> None:
    """A match lends 0.6, 0.4, 0.2 to rows one, two and three steps away in its thread alone."""
    made = arrange(np.array([0, 0, 0, 0, 0, 1]), np.ones(6))
    found = rank_rows(np.ones(6), terms=[term([4])], arrangement=made)

    assert found.parts["text"].tolist() == [0, 0, 0, 0, 1, 0]
    assert found.parts["neighbours"].tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0, 0])


def test_a_word_counts_once_but_two_words_add_up() -> None:
    """A row between two matches of one word gains once; of two words, twice."""
    made = arrange(np.zeros(3, np.int64), np.ones(3))
    weights = Weights(thread=0.0)
    same = rank_rows(np.ones(3), terms=[term([0, 2])], arrangement=made, weights=weights)
    two = rank_rows(np.ones(3), terms=[term([0]), term([2])], arrangement=made, weights=weights)

    assert same.scores.tolist() == pytest.approx([1, 0.6, 1])
    assert two.scores[1] == pytest.approx(two.scores.max() * 1.2 / 1.4)


def test_vectors_lend_as_words_do() -> None:
    """In a semantic search a row's neighbours gain from its vector."""
    made = arrange(np.zeros(4, np.int64), np.ones(4))
    found = rank_rows(np.ones(4), cosines=floats(-0.5, -0.5, -0.5, 0.5), arrangement=made)

    assert found.scores.tolist() == pytest.approx([0.2, 0.4, 0.6, 1])


def test_the_thread_that_answers_best() -> None:
    """All rows of the thread that has the words gain; rows without thread do not."""
    made = arrange(np.array([0] * 4 + [1] * 4 + [-1]), np.ones(9))
    words = [term([0, 3, 4, 8]), term([3])]
    found = rank_rows(np.ones(9), terms=words, arrangement=made)
    thread = found.parts["thread"].tolist()

    assert thread[:4] == pytest.approx([Weights().thread] * 4)
    assert 0 < thread[4] == thread[7] < thread[0]
    assert thread[8] == 0


def test_hybrid_shares() -> None:
    """Text and vector share the score as the weights say, each relative to its best row."""
    weights = Weights(vector=0.25)
    found = rank_rows(np.ones(2), terms=[term([0])], cosines=floats(0.1, 0.3), weights=weights)

    assert found.parts["text"].tolist() == pytest.approx([0.75, 0])
    assert found.parts["vector"].tolist() == pytest.approx([0, 0.25])


def test_rows_without_vectors_keep_their_text() -> None:
    """NaN, as of an item not embedded yet, is no vector: the row is ranked by its words."""
    cosines = floats(math.nan, 0.2, 0.4)
    found = rank_rows(np.ones(3), terms=[term([0])], cosines=cosines)

    assert np.isfinite(found.scores).all()
    assert found.scores.argmax() == 0
    assert rank_rows(np.ones(2), cosines=floats(math.nan, math.nan)).scores.tolist() == [0, 0]


def test_above_mean_where_nothing_stands_out() -> None:
    """One row, or equal rows, keep their cosine; opposite ones get nothing."""
    assert scale_mean_to_0_and_best_to_1(floats(0.5)).tolist() == [0.5]
    assert scale_mean_to_0_and_best_to_1(floats(0.25, 0.25)).tolist() == [0.25, 0.25]
    assert scale_mean_to_0_and_best_to_1(floats(-0.5, -0.5)).tolist() == [0, 0]
    assert scale_mean_to_0_and_best_to_1(floats(-0.5)).tolist() == [0]
    assert scale_mean_to_0_and_best_to_1(floats()).tolist() == []


def test_cues_and_questions() -> None:
    """Who and when add their worth; a question loses its share of everything."""
    made = arrange(np.array([-1, -1]), np.ones(2), np.array([False, True]))
    actor, date = np.array([True, True]), np.array([False, True])
    weights = Weights(actor=0.1, date=0.3, question=0.5)
    found = rank_rows(np.ones(2), arrangement=made, actor=actor, date=date, weights=weights)

    assert found.scores.tolist() == pytest.approx([0.1, 0.2])
    assert found.parts["question"].tolist() == pytest.approx([0, -0.2])


def test_the_newest_row_gains_a_share() -> None:
    """Half of it is left a fifth of the rows further back; an unknown time gains nothing."""
    at = floats(*range(10), math.nan).astype(np.float64)
    made = arrange(np.zeros(11, np.int64), np.ones(11), at=at)
    weights = Weights(recency=0.5, neighbours=(), thread=0.0)
    found = rank_rows(np.ones(11), terms=[term(list(range(11)))], arrangement=made, weights=weights)

    assert found.scores[[9, 7, 5, 10]].tolist() == pytest.approx([1.5, 1.25, 1.125, 1])


def test_what_a_word_tells() -> None:
    """-ln of the share of messages that have it: of the language, else of the others in scope.

    Of 71 rows eleven have the word, so it is in ten of 70 others; 30 messages of a language that
    has it in 2.4 of a million are added. A name tells what any word does which no list has.
    """
    scarce, frequent = term([3]), term(list(range(11)))

    assert compute_word_information(scarce._replace(message_frequency=0.01), 71) == pytest.approx(
        math.log(100)
    )
    assert compute_word_information(scarce._replace(message_frequency=0), 71) == pytest.approx(
        -math.log(30 * 2.4e-6 / 100)
    )
    assert compute_word_information(frequent._replace(message_frequency=0), 71) == pytest.approx(
        -math.log(0.10000072)
    )
    assert compute_word_information(
        frequent._replace(message_frequency=0, names_actor=True), 71
    ) == -math.log(2.4e-6)


def test_a_word_that_several_rows_have_and_no_list() -> None:
    """Two or four of 40 rows that have it are found; rows that only ask do not make it common."""
    lengths = np.ones(40)

    def best(rows: list[int], asks: list[int] | None = None) -> float:
        asking = np.isin(np.arange(40), asks or [])
        made = arrange(np.arange(40), lengths, asking)
        words = [term(rows)._replace(message_frequency=0)]
        return float(
            rank_rows(lengths, terms=words, arrangement=made)
            .with_scores_comparable_between_searches()
            .scores[0]
        )

    assert best([0, 1]) >= MIN_SCORE
    assert best([0, 1, 2, 3]) >= MIN_SCORE
    assert best(list(range(30))) < MIN_SCORE
    assert best(list(range(30)), list(range(2, 30))) >= MIN_SCORE


def test_a_word_that_nearly_all_rows_have_tells_nothing() -> None:
    """The name of a person, over facts about this person; by itself it finds them all."""
    lengths = np.ones(20)
    name = term(list(range(19)))._replace(message_frequency=math.exp(-8))
    other, absent = (
        term(rows)._replace(message_frequency=math.exp(-9)) for rows in ([3], list[int]())
    )

    def passing(*terms: Term) -> list[int]:
        scores = rank_rows(lengths, terms=terms).with_scores_comparable_between_searches().scores
        return np.flatnonzero(scores >= MIN_SCORE).tolist()

    assert passing(name, other) == [3]
    assert passing(name, absent) == []
    assert passing(name) == list(range(19))


def test_scores_that_mean_the_same_in_every_search() -> None:
    """By hand: of three rows of one word the penalties are all 1.2, and a word counts as one.

    A row with all words has their sum for evidence, less ln 3; one with half of what the query
    tells has half of it, times 0.5 ** 0.35. The odds are e to a quarter of that.
    """
    lengths, nowhere = np.ones(3), term([])._replace(message_frequency=math.exp(-8))
    one, other = (term([row])._replace(message_frequency=math.exp(-8)) for row in (1, 0))

    def best(*terms: Term, **options: Any) -> float:
        return float(
            rank_rows(lengths, terms=terms, **options)
            .with_scores_comparable_between_searches()
            .scores.max()
        )

    def score(evidence: float) -> float:
        return 1 / (1 + math.exp(-(evidence - math.log(3)) / 4))

    near, alike = floats(0.9, 0.3, 0.2), floats(0.3, 0.3, 0.3)

    assert best(one) == pytest.approx(score(8))
    assert best(one, other) == pytest.approx(score(8 * 0.5**0.35))
    assert best(one, nowhere) == pytest.approx(score(8 * 0.5**0.35))
    assert best(one, cosines=floats(0.2, 0.9, 0.3)) == pytest.approx(score(8 + 5 * 0.7 / 0.8))
    assert best(nowhere, cosines=near) == pytest.approx(score(5 * 0.7 / 0.8))
    assert best(cosines=near) == pytest.approx(0.7 / 0.8)
    assert best(cosines=alike) == pytest.approx((0.3 - 0.9 / 7) / (1 - 0.9 / 7))


def test_a_score_is_limited_by_the_evidence_of_its_own_row() -> None:
    """By hand: of 16 rows row 0 has a word that tells ten nats, and row 1 a remote synonym of it.

    The limit of row 1 is what the synonym tells, less ln 16 / 4. The limit of row 0 is far above
    its evidence.
    """
    n = 16
    kin = ((np.array([1, 2]), 0.1),)
    word = Term(np.array([0]), floats(1), kin, message_frequency=math.exp(-10))
    weights = Weights(kin=1.0)
    found = rank_rows(
        np.ones(n), terms=[word], weights=weights
    ).with_scores_comparable_between_searches()
    tf = 0.1 * (1 + 1.2) / (0.1 + 1.2)  # a tenth of an occurrence; one occurrence counts 1
    limit = 10 * tf * tf**0.35 - math.log(n) / 4

    assert float(found.scores[0]) == pytest.approx(
        1 / (1 + math.exp(-(10 - math.log(n)) / 4)), abs=1e-5
    )
    assert float(found.scores[1]) == pytest.approx(1 / (1 + math.exp(-limit / 4)), abs=1e-5)
    assert found.scores[1] < MIN_SCORE < found.scores[0]


@pytest.mark.parametrize("n", [3, 12, 40, 600])
@pytest.mark.parametrize("answered", [True, False])
def test_an_answer_lifts_no_row_without_evidence(n: int, answered: bool) -> None:
    """Vectors a little above the mean stay below the minimum score beside a row that answers."""
    cosines = np.full(n, 0.1, np.float32)
    cosines[1] = 0.3
    words = [term([0] if answered else [])._replace(message_frequency=math.exp(-12))]
    cosines[0] = 0.9 if answered else 0.1
    found = rank_rows(
        np.ones(n), terms=words, cosines=cosines
    ).with_scores_comparable_between_searches()

    assert (found.scores[0] >= MIN_SCORE) == answered
    assert found.scores[1:].max() < MIN_SCORE


def test_a_neighbour_lends_its_evidence() -> None:
    """The rows beside a match pass the minimum score; the same rows of another thread do not."""
    made = arrange(np.array([0] * 5 + [1] * 5), np.ones(10))
    words = [term([2])._replace(message_frequency=math.exp(-12))]
    cosines = np.full(10, 0.1, np.float32)
    found = rank_rows(
        np.ones(10), terms=words, cosines=cosines, arrangement=made
    ).with_scores_comparable_between_searches()

    assert (found.scores >= MIN_SCORE).tolist() == [True] * 5 + [False] * 5


def test_a_row_with_evidence_ranks_before_one_without() -> None:
    """A row that only gains by its speaker, period or nearness comes after one with a word."""
    words = [
        term([0])._replace(message_frequency=math.exp(-12)),
        term([1])._replace(message_frequency=math.exp(-6)),
    ]
    cosines = floats(0.9, -0.5, 0.2, *[-0.5] * 37)
    bonus = np.arange(40) == 2
    weights = Weights(actor=0.5, date=0.5)
    cues = {"actor": bonus, "date": bonus, "weights": weights}
    found = rank_rows(np.ones(40), terms=words, cosines=cosines, **cues)
    after = found.with_scores_comparable_between_searches()

    assert found.scores[2] > found.scores[1]
    assert np.argsort(-after.values_to_rank_by, kind="stable")[:3].tolist() == [0, 1, 2]
    assert after.scores[1] >= MIN_SCORE > after.scores[2]


@pytest.mark.parametrize("n", [2, 30, 5_000])
def test_what_comes_by_chance_is_no_evidence(n: int) -> None:
    """A word that one in n messages has, in one of n rows, has even odds: 0.5, for every n."""
    found = rank_rows(
        np.ones(n), terms=[term([0])._replace(message_frequency=1 / n)]
    ).with_scores_comparable_between_searches()

    assert found.scores.max() == pytest.approx(0.5, abs=1e-5)


@st.composite
def searches(draw: st.DrawFn) -> tuple[int, list[Term], np.ndarray, np.ndarray, list[int]]:
    """Rows, words, lengths, cosines (some NaN) and thread codes."""
    n = draw(st.integers(1, 12))
    some = st.lists(st.integers(0, n - 1), unique=True, max_size=n)
    words = [term(rows, [1 + row % 3 for row in rows]) for rows in draw(st.lists(some, max_size=4))]
    cosine = st.one_of(st.floats(-1, 1, width=32), st.just(math.nan))
    lengths = draw(st.lists(st.integers(0, 30), min_size=n, max_size=n))
    cosines = draw(st.lists(cosine, min_size=n, max_size=n))
    codes = sorted(draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n)))
    return n, words, np.array(lengths, np.float32), np.array(cosines, np.float32), codes


@given(searches(), st.booleans(), st.booleans())
def test_scores_are_finite_sums_of_their_parts(
    search: tuple[int, list[Term], np.ndarray, np.ndarray, list[int]], vectors: bool, context: bool
) -> None:
    """Whatever the rows, each score is a number and the sum of the parts shown."""
    n, words, lengths, cosines, codes = search
    made = arrange(np.array(codes), lengths, np.arange(n) % 2 == 0) if context else None
    found = rank_rows(
        lengths,
        terms=words,
        cosines=cosines if vectors else None,
        arrangement=made,
    )
    total = sum(found.parts.values(), np.zeros(n, np.float32))

    assert found.scores.shape == (n,)
    assert found.scores.dtype == np.float32
    assert np.isfinite(found.scores).all()
    assert (found.scores >= -1e-6).all()
    np.testing.assert_allclose(found.scores, total, atol=1e-6)


@given(searches(), st.sampled_from(["cosine", "semantic", "hybrid", "text"]), st.booleans())
def test_scores_of_a_search_lie_between_0_and_1(
    search: tuple[int, list[Term], np.ndarray, np.ndarray, list[int]], mode: str, context: bool
) -> None:
    """In every mode, and none is higher than that of a row before it; no vector, no score."""
    _, words, lengths, cosines, codes = search
    made = arrange(np.array(codes), lengths) if context else None
    near = cosines * np.float32(1.0007)  # as of int8
    if mode == "cosine":
        found = Ranked.from_cosines(near)
    else:
        found = rank_rows(
            lengths,
            terms=[] if mode == "semantic" else words,
            cosines=None if mode == "text" else near,
            arrangement=made,
        ).with_scores_comparable_between_searches()
        found = found.with_rows_lacking_vectors_last(near) if mode == "semantic" else found
    in_order = np.argsort(-found.values_to_rank_by, kind="stable")
    lacking = np.isnan(cosines)

    assert ((found.scores >= 0) & (found.scores <= 1)).all()
    assert (np.diff(found.scores[in_order]) <= 0).all()
    shown = [sum(found.explain_row(row).values()) for row in range(len(lengths))]
    np.testing.assert_allclose(found.scores, shown, atol=1e-5)
    if mode in ("cosine", "semantic"):
        assert not found.scores[lacking].any()
        assert lacking[in_order].tolist() == sorted(lacking.tolist())


@given(searches(), st.randoms(use_true_random=False))
def test_order_of_unthreaded_rows_does_not_matter(
    search: tuple[int, list[Term], np.ndarray, np.ndarray, list[int]], random: object
) -> None:
    """Rows without thread may come in any order: each keeps its score."""
    n, words, lengths, cosines, _ = search
    order = np.arange(n)
    random.shuffle(order)  # type: ignore[attr-defined]  # Hypothesis gives a random.Random
    place = np.argsort(order)
    moved = [Term(place[word.rows], word.tf) for word in words]

    def scores(terms: list[Term], sizes: np.ndarray, near: np.ndarray) -> Ranked:
        nobody = arrange(np.full(n, -1), sizes)
        return rank_rows(sizes, terms=terms, cosines=near, arrangement=nobody)

    before = scores(words, lengths, cosines).scores
    after = scores(moved, lengths[order], cosines[order]).scores
    np.testing.assert_allclose(after, before[order], atol=1e-6)


@given(searches())
def test_order_of_threads_does_not_matter(
    search: tuple[int, list[Term], np.ndarray, np.ndarray, list[int]],
) -> None:
    """Threads may come in any order, each with its rows in their own order."""
    n, words, lengths, cosines, codes = search
    order = np.argsort(-np.array(codes), kind="stable")
    place = np.argsort(order)
    moved = [Term(place[word.rows], word.tf) for word in words]

    def scores(made: ThreadArrangement, terms: list[Term], at: np.ndarray) -> np.ndarray:
        found = rank_rows(lengths[at], terms=terms, cosines=cosines[at], arrangement=made)
        return found.scores

    before = scores(arrange(np.array(codes), lengths), words, np.arange(n))
    after = scores(arrange(np.array(codes)[order], lengths[order]), moved, order)
    np.testing.assert_allclose(after, before[order], atol=1e-6)

"""The weight of vectors depends on how well they separate the rows of a namespace."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from perdure.settings import MIN_SCORE
from perdure.stores import Provenance
from perdure.stores.search.namespace_index import FOREVER, IndexedItem, NamespaceIndex
from perdure.stores.search.ranking import Weights, rank_rows
from perdure.stores.search.separation import (
    MAX_ROWS,
    SampleStatistics,
    VectorCalibration,
    VectorSeparation,
    compute_sample_size_for_vector_separation,
    find_row_pairs_sharing_rare_word,
    measure_how_vectors_separate_related_rows,
)
from perdure.stores.search.vectors import Model, encode_vectors, scale_rows_to_unit_length
from tests.store_backends import BACKENDS
from tests.stores.search.test_ranking import make_floats, make_row_contexts, make_term

DIMS, TALKS, TURNS, LONG, SHORT = 48, 30, 8, 120, 12
NAMESPACE = ("talks",)
QUERY = "q3 w17 w18 w19"  # a topic that is no word of any row, and words of other talks
Vector = NDArray[np.float64]
ALL_BACKENDS = [
    "memory",
    "file",
    "sealed",
    pytest.param("postgres", marks=pytest.mark.postgres),
]


def random_vector(text: str) -> Vector:
    """Return a vector that depends on the text but says nothing about it."""
    return np.random.default_rng(zlib.crc32(text.encode())).standard_normal(DIMS)


def topic_vector(text: str) -> Vector:
    """Return a vector that identifies the talk of a text, `k3` in a row or `q3` in a query."""
    return 3 * random_vector(text.split()[0][1:]) + random_vector(text)


def shifted_topic_vector(text: str) -> Vector:
    """Return `topic_vector` plus a constant, so that the cosines of all texts are near 1."""
    vector = topic_vector(text)
    constant = random_vector("constant")
    return vector / np.linalg.norm(vector) + 2 * constant / np.linalg.norm(constant)


class FunctionEmbedder:
    """An embedder that computes its vectors by a function."""

    dims = DIMS
    in_process = True
    name = "made"

    def __init__(self, vector: Callable[[str], Vector]) -> None:
        self.vector = vector

    def embed(self, texts: Sequence[str]) -> Any:
        return np.array([self.vector(text) for text in texts])

    async def aembed(self, texts: Sequence[str]) -> Any:
        return self.embed(texts)


def open_store_with_vectors(backend: str, folder: Path, vector: Callable[[str], Vector]) -> Any:
    folder.mkdir(exist_ok=True)
    return BACKENDS[backend](folder, index={"embed": FunctionEmbedder(vector), "fields": ["text"]})


def fill_store(store: Any, words: int = LONG, talks: int = TALKS) -> None:
    """Put talks whose turns have the same topic and otherwise consist of random words."""
    draw = random.Random(3)
    for talk in range(talks):
        for place in range(TURNS):
            body = " ".join(f"w{draw.randrange(400)}" for _ in range(words))
            source = Provenance(thread_id=f"talk-{talk}", position=place)
            value = {"text": f"k{talk} {body}"}
            store.put(NAMESPACE, f"{talk}-{place}", value, provenance=source)


def search_scores(store: Any, query: str, **options: Any) -> list[tuple[str, float]]:
    results = store.search(NAMESPACE, query=query, limit=20, **options)
    return [(item.key, item.score) for item in results]


def read_thread_parts(store: Any) -> list[float]:
    """Return the thread parts of the scores of talk 3 for the query `q3`."""
    results = store.search(NAMESPACE, query="q3", limit=TALKS * TURNS, explain=True)
    return [item.parts["thread"] for item in results if item.key.startswith("3-")]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_uninformative_vectors_do_not_change_word_search(backend: str, tmp_path: Path) -> None:
    """Results and scores equal those of a search by words."""
    with open_store_with_vectors(backend, tmp_path, random_vector) as store:
        fill_store(store)
        for number in range(5):
            query = f"w{number} w{number + 50} w{number + 90}"
            assert search_scores(store, query) == search_scores(store, query, mode="text")


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_well_separating_vectors_raise_scores_of_their_thread(backend: str, tmp_path: Path) -> None:
    """All rows of the talk about the query's topic gain, and most come before other rows."""
    with open_store_with_vectors(backend, tmp_path, topic_vector) as store:
        fill_store(store)
        assert min(read_thread_parts(store)) > 0
        assert sum(key.startswith("3-") for key, _ in search_scores(store, QUERY)) >= TURNS - 2


def test_vectors_of_short_rows_do_not_raise_scores_of_their_thread(tmp_path: Path) -> None:
    """Short turns say little about their thread, however well their vectors separate."""
    with open_store_with_vectors("memory", tmp_path, topic_vector) as store:
        fill_store(store, SHORT)
        assert max(read_thread_parts(store)) == 0


@pytest.mark.parametrize("backend", ["memory", ALL_BACKENDS[-1]])
def test_constant_added_to_all_vectors_hardly_changes_scores(backend: str, tmp_path: Path) -> None:
    """Most of the same rows have nearly the same scores."""
    scores = []
    for vector in (topic_vector, shifted_topic_vector):
        with open_store_with_vectors(backend, tmp_path / vector.__name__, vector) as store:
            fill_store(store)
            scores.append(dict(search_scores(store, QUERY)))
    both = scores[0].keys() & scores[1].keys()
    assert len(both) >= 15
    for key in both:
        assert scores[0][key] == pytest.approx(scores[1][key], abs=0.05)


def test_vectors_of_few_rows_have_default_weight(tmp_path: Path) -> None:
    """Separation is not measured for a few rows."""
    with open_store_with_vectors("memory", tmp_path, random_vector) as store:
        fill_store(store, talks=1)
        results = store.search(NAMESPACE, query="w17", explain=True)
        assert max(item.parts["vector"] for item in results) > 0


@pytest.mark.parametrize("vector", [random_vector, topic_vector, shifted_topic_vector])
def test_scores_are_the_same_after_reopening(
    vector: Callable[[str], Vector], tmp_path: Path
) -> None:
    with open_store_with_vectors("file", tmp_path, vector) as store:
        fill_store(store)
        first = [search_scores(store, QUERY), search_scores(store, "w5 w6")]
    with open_store_with_vectors("file", tmp_path, vector) as store:
        assert [search_scores(store, QUERY), search_scores(store, "w5 w6")] == first


@pytest.mark.postgres
@pytest.mark.parametrize("vector", [random_vector, topic_vector, shifted_topic_vector])
def test_sqlite_and_postgres_compute_same_scores(
    vector: Callable[[str], Vector], tmp_path: Path
) -> None:
    scores = []
    for backend in ("file", "postgres"):
        with open_store_with_vectors(backend, tmp_path / backend, vector) as store:
            fill_store(store)
            scores.append([search_scores(store, QUERY), search_scores(store, "w5 w6")])
    assert scores[0] == scores[1]


def test_items_of_other_namespace_do_not_change_scores(tmp_path: Path) -> None:
    with open_store_with_vectors("memory", tmp_path, topic_vector) as store:
        fill_store(store)
        before = search_scores(store, QUERY)
        for number in range(100):
            store.put(("other",), str(number), {"text": f"x{number} other words"})
        assert search_scores(store, QUERY) == before


@pytest.mark.parametrize("backend", ["file", ALL_BACKENDS[-1]])
def test_past_search_does_not_change_scores_of_later_search(backend: str, tmp_path: Path) -> None:
    """Closed versions that a past search has loaded do not count as present rows."""
    moments = []
    with open_store_with_vectors(backend, tmp_path, topic_vector) as store:
        fill_store(store)
        moments.append(datetime.now(UTC))
        for talk in range(TALKS):
            for place in range(0, TURNS, 2):
                store.delete(NAMESPACE, f"{talk}-{place}")
        for number in range(100):
            store.put(NAMESPACE, str(number), {"text": f"z{number} w{number}"})
        moments.append(datetime.now(UTC))
        for number in range(100):
            store.delete(NAMESPACE, str(number))
        first = search_scores(store, QUERY, as_of=moments[0])
        search_scores(store, QUERY, as_of=moments[1])
        assert search_scores(store, QUERY, as_of=moments[0]) == first


def test_open_store_has_same_scores_as_reopened_one_after_changes(tmp_path: Path) -> None:
    """A few of the measured items are replaced in between."""

    def weak_topic_vector(text: str) -> Vector:
        return 0.2 * random_vector(text.split()[0][1:]) + random_vector(text)

    with open_store_with_vectors("file", tmp_path, weak_topic_vector) as store:
        fill_store(store, SHORT, talks=8)
        search_scores(store, QUERY)
        for talk in range(7):
            source = Provenance(thread_id=f"talk-{talk}", position=3)
            value = {"text": f"k{talk} w17 changed"}
            store.put(NAMESPACE, f"{talk}-3", value, provenance=source)
        scores = search_scores(store, QUERY)
    with open_store_with_vectors("file", tmp_path, weak_topic_vector) as store:
        assert search_scores(store, QUERY) == scores


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_query_without_known_words_ranks_items_by_untrusted_vectors(
    backend: str, tmp_path: Path
) -> None:
    """If no word of the query is known, only the vectors can rank the items."""
    with open_store_with_vectors(
        backend, tmp_path, lambda text: random_vector(text.replace("zebra", "milk"))
    ) as store:
        store.put(NAMESPACE, "same", {"text": "milk"})
        fill_store(store)
        [first, *others] = search_scores(store, "zebra")
        assert first[0] == "same"
        assert first[1] < MIN_SCORE
        assert others


# -- the samples


def make_indexed_items(
    first: int, count: int, vector: Callable[[str], Vector]
) -> list[IndexedItem]:
    out = []
    for number in range(first, first + count):
        text = f"k{number // TURNS} row{number}"
        body = encode_vectors(scale_rows_to_unit_length(vector(text)[None, :]), MODEL.kind)
        thread = f"talk-{number // TURNS}"
        words, position = text.split(), float(number)
        out.append(IndexedItem(number, words, False, body, thread, position, None, 0.0, FOREVER, 0))
    return out


MODEL = Model("made", DIMS, "int8", 1)


def test_separation_follows_added_and_removed_rows() -> None:
    index = NamespaceIndex(MODEL, 1 << 30)
    assert (
        index.get_view_of_unexpired_items(0).separation.vector_weight_calibration
        == VectorCalibration()
    )
    index.add_items(make_indexed_items(1, 64, topic_vector))
    strong = index.get_view_of_unexpired_items(0).separation
    assert strong._compute_separation_from_random_pairs(strong.neighbours) > 2
    index.add_items(make_indexed_items(65, 192, random_vector))
    mixed = index.get_view_of_unexpired_items(0).separation
    assert mixed._compute_separation_from_random_pairs(
        mixed.neighbours
    ) < strong._compute_separation_from_random_pairs(strong.neighbours)
    index.remove_items(np.arange(1, 65))
    weak = index.get_view_of_unexpired_items(0).separation
    assert weak.vector_weight_calibration.trust == 0


def test_separation_does_not_depend_on_batches_or_compaction() -> None:
    """Rows are added at once or one by one, with and without compaction."""
    whole, slow = NamespaceIndex(MODEL, 1 << 30), NamespaceIndex(MODEL, 1 << 30)
    whole.add_items(make_indexed_items(1, 100, topic_vector))
    for entry in make_indexed_items(1, 100, topic_vector):
        slow.add_items([entry])
        slow.get_view_of_unexpired_items(0)
    slow.compact()
    assert (
        whole.get_view_of_unexpired_items(0).separation
        == slow.get_view_of_unexpired_items(0).separation
    )


def test_separation_of_changed_index_equals_that_of_new_index() -> None:
    """The separation depends on the present rows only, not on earlier ones."""
    changed, new = NamespaceIndex(MODEL, 1 << 30), NamespaceIndex(MODEL, 1 << 30)
    rows = make_indexed_items(1, 64, topic_vector)
    late = [row._replace(thread="talk-0") for row in make_indexed_items(65, 2, topic_vector)]
    changed.add_items(rows)
    before = changed.get_view_of_unexpired_items(0).separation
    changed.remove_items(np.arange(1, 8))  # all rows of the first thread
    changed.add_items(late)
    new.add_items([*rows[7:], *late])
    assert (
        changed.get_view_of_unexpired_items(0).separation
        == new.get_view_of_unexpired_items(0).separation
        != before
    )


def test_sample_size_grows_in_steps_up_to_a_maximum() -> None:
    sizes = [compute_sample_size_for_vector_separation(rows) for rows in range(3 * MAX_ROWS)]
    assert sizes[:16] == [0] * 16
    assert sizes == sorted(sizes)
    assert max(sizes) == MAX_ROWS
    assert all(0.75 * rows <= size <= rows for rows, size in enumerate(sizes[16:MAX_ROWS], 16))
    assert len(set(sizes)) < 25


def test_merged_moments_equal_moments_of_all_values() -> None:
    values = np.random.default_rng(1).standard_normal(50)
    joined = SampleStatistics.from_values(values[:20]).combine_with(
        SampleStatistics.from_values(values[20:])
    )
    assert joined.size == 50
    assert joined.mean == pytest.approx(values.mean())
    assert joined.variance == pytest.approx(values.var())
    assert SampleStatistics().mean == SampleStatistics().variance == 0
    assert VectorSeparation().combine_with(VectorSeparation()) == VectorSeparation()


def test_pairs_of_rows_share_a_rare_word() -> None:
    """Word 1 is in two rows, word 2 in all rows, and word 3 in one row."""
    words = np.array([1, 1, *[2] * 32, 3])
    rows = np.array([4, 9, *range(32), 7])
    assert find_row_pairs_sharing_rare_word(words, rows, 32).tolist() == [[4, 9]]
    none = np.empty(0, np.int64)
    assert find_row_pairs_sharing_rare_word(none, none, 32).shape == (0, 2)


def test_separation_without_threads_uses_rows_with_common_words() -> None:
    """Vectors are useful if rows that share a rare word are similar."""
    draw = np.random.default_rng(5)
    none, n = np.full(400, -1), 400
    pairs = np.column_stack([np.arange(0, n, 2), np.arange(1, n, 2)])
    random = scale_rows_to_unit_length(draw.standard_normal((n, DIMS)))
    related = scale_rows_to_unit_length(
        np.repeat(draw.standard_normal((n // 2, DIMS)), 2, axis=0) + random
    )
    for vectors, trust in ((related, 1), (random, 0)):
        separation = measure_how_vectors_separate_related_rows(
            vectors, none, np.zeros(n), np.full(n, 9), partial(np.copy, pairs)
        )
        assert separation.neighbours.size == 0
        assert separation.vector_weight_calibration.trust == trust


def test_separation_does_not_depend_on_numbering_of_threads() -> None:
    """Processes number threads differently, and the last bit of a sum depends on its order."""
    threads, rows = np.arange(500) % 20, np.arange(500, dtype=np.float64)
    none = partial(np.copy, np.empty((0, 2), np.int64))
    for seed in range(20):
        draw = np.random.default_rng(seed)
        vectors, numbers = (
            scale_rows_to_unit_length(draw.standard_normal((500, DIMS))),
            draw.permutation(20),
        )
        one, other = (
            measure_how_vectors_separate_related_rows(vectors, x, rows, rows, none)
            for x in (threads, numbers[threads])
        )
        assert one == other


def test_separation_ignores_pairs_of_equal_rows() -> None:
    """A reply that occurs many times does not hide that the other vectors are useful."""
    draw = np.random.default_rng(5)
    n = 256
    vectors = scale_rows_to_unit_length(draw.standard_normal((n, DIMS)))
    vectors[2::4] = scale_rows_to_unit_length(
        np.asarray(vectors[0::4] + vectors[2::4], np.float64)
    )  # rows 0 and 2 of each four rows are similar
    vectors[1::2] = vectors[1]  # every other row is the same reply
    pairs = np.column_stack([np.arange(0, n, 4), np.arange(2, n, 4)])
    thread, rows = np.arange(n) // 2, np.arange(n, dtype=np.float64)
    separation = measure_how_vectors_separate_related_rows(
        vectors, thread, rows, rows, partial(np.copy, pairs)
    )
    assert separation.vector_weight_calibration.trust == 1
    assert separation.random.mean < 0.2
    same = np.repeat(vectors[:1], n, axis=0)
    nothing = measure_how_vectors_separate_related_rows(
        same, thread, rows, rows, partial(np.copy, pairs)
    )
    assert nothing.vector_weight_calibration == VectorCalibration(trust=0)


# -- the ranking


def test_calibration_changes_weight_of_vector_score() -> None:
    """Without trust only words count; with full gain the vector has 0.56 of the score."""
    weights, cosines = Weights(), make_floats(0.9, 0.1, 0.2)
    args: dict[str, Any] = {"terms": [make_term([1])], "cosines": cosines}
    for calibration, share in (
        (VectorCalibration(), weights.vector),
        (VectorCalibration(trust=0), 0),
        (VectorCalibration(trust=0.5), weights.vector / 2),
        (VectorCalibration(gain=1), 1.6 * weights.vector),
    ):
        ranked = rank_rows(np.ones(3), calibration=calibration, **args)
        assert ranked.scores.tolist() == pytest.approx([share, 1 - share, 0], abs=1e-6)


def test_three_nearest_rows_determine_thread_score() -> None:
    """Rows 0 to 3 and rows 4 to 5 are the threads; the mean of the cosines is 0.35."""
    cosines = make_floats(0.75, 0.75, 0.75, 0.75, -0.9, 0)
    row_contexts = make_row_contexts(np.array([0, 0, 0, 0, 1, 1]), np.ones(6))
    ranked = rank_rows(
        np.ones(6),
        terms=[make_term([5])],
        cosines=cosines,
        row_contexts=row_contexts,
        calibration=VectorCalibration(gain=1),
        weights=Weights(thread=0),
    )
    assert ranked.parts["thread"].tolist() == pytest.approx([0.21] * 4 + [0, 0])


def test_cosine_evidence_is_relative_to_cosine_of_random_rows() -> None:
    """Rows with cosines around 0.8 are not similar if random rows have the same cosine."""
    args: dict[str, Any] = {"terms": [make_term([])], "cosines": make_floats(0.8, 0.82, 0.81)}
    near = rank_rows(np.ones(3), **args).evidence
    far = rank_rows(np.ones(3), calibration=VectorCalibration(origin=0.8), **args).evidence
    assert near > far + 2

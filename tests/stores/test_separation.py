"""How much vectors count follows from how well they separate the rows of a namespace."""

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
from perdure.stores.index import FOREVER, IndexedItem, NamespaceIndex
from perdure.stores.ranking import Weights, rank_rows
from perdure.stores.separation import (
    MAX_ROWS,
    SampleMoments,
    VectorCalibration,
    VectorSeparation,
    compute_sample_size,
    find_pairs_sharing_words,
    measure_separation_of_related_rows,
)
from perdure.stores.vectors import Model, encode_vectors, normalize_rows
from tests.store_backends import BACKENDS
from tests.stores.test_ranking import make_arrangement, make_floats, make_term

DIMS, TALKS, TURNS, LONG, SHORT = 48, 30, 8, 120, 12
NAMESPACE = ("talks",)
QUERY = "q3 w17 w18 w19"  # a topic, which is no word of a row, and words that are in other talks
Vector = NDArray[np.float64]
EVERYWHERE = [
    "memory",
    "file",
    "sealed",
    pytest.param("postgres", marks=pytest.mark.postgres),
]


def of_nothing(text: str) -> Vector:
    """A vector that says nothing about its text."""
    return np.random.default_rng(zlib.crc32(text.encode())).standard_normal(DIMS)


def of_topic(text: str) -> Vector:
    """A vector that says which talk a text is about: `k3` in a row, `q3` in a query."""
    return 3 * of_nothing(text.split()[0][1:]) + of_nothing(text)


def shifted(text: str) -> Vector:
    """`of_topic` with a constant added, so that the cosines of all texts are near 1."""
    vector = of_topic(text)
    constant = of_nothing("constant")
    return vector / np.linalg.norm(vector) + 2 * constant / np.linalg.norm(constant)


class Made:
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


def opened(backend: str, folder: Path, vector: Callable[[str], Vector]) -> Any:
    folder.mkdir(exist_ok=True)
    return BACKENDS[backend](folder, index={"embed": Made(vector), "fields": ["text"]})


def fill(store: Any, words: int = LONG, talks: int = TALKS) -> None:
    """Put talks whose turns have the same topic and are otherwise made of random words."""
    draw = random.Random(3)
    for talk in range(talks):
        for place in range(TURNS):
            body = " ".join(f"w{draw.randrange(400)}" for _ in range(words))
            source = Provenance(thread_id=f"talk-{talk}", position=place)
            value = {"text": f"k{talk} {body}"}
            store.put(NAMESPACE, f"{talk}-{place}", value, provenance=source)


def search(store: Any, query: str, **options: Any) -> list[tuple[str, float]]:
    found = store.search(NAMESPACE, query=query, limit=20, **options)
    return [(item.key, item.score) for item in found]


def thread_parts(store: Any) -> list[float]:
    """What the rows of the talk that `q3` is about have for it, of a query without known words."""
    found = store.search(NAMESPACE, query="q3", limit=TALKS * TURNS, explain=True)
    return [item.parts["thread"] for item in found if item.key.startswith("3-")]


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_vectors_that_say_nothing_do_not_count(backend: str, tmp_path: Path) -> None:
    """The rows and their scores are those of a search by words."""
    with opened(backend, tmp_path, of_nothing) as store:
        fill(store)
        for number in range(5):
            query = f"w{number} w{number + 50} w{number + 90}"
            assert search(store, query) == search(store, query, mode="text")


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_vectors_that_separate_well_count_for_threads(backend: str, tmp_path: Path) -> None:
    """All rows of a talk about the topic of the query gain, and most are before other rows."""
    with opened(backend, tmp_path, of_topic) as store:
        fill(store)
        assert min(thread_parts(store)) > 0
        assert sum(key.startswith("3-") for key, _ in search(store, QUERY)) >= TURNS - 2


def test_vectors_of_short_turns_do_not_count_for_threads(tmp_path: Path) -> None:
    """They say little about what the turn answers, however well they separate."""
    with opened("memory", tmp_path, of_topic) as store:
        fill(store, SHORT)
        assert max(thread_parts(store)) == 0


@pytest.mark.parametrize("backend", ["memory", EVERYWHERE[-1]])
def test_a_constant_in_all_vectors_changes_little(backend: str, tmp_path: Path) -> None:
    """Most of the same rows have nearly the same scores."""
    told = []
    for vector in (of_topic, shifted):
        with opened(backend, tmp_path / vector.__name__, vector) as store:
            fill(store)
            told.append(dict(search(store, QUERY)))
    both = told[0].keys() & told[1].keys()
    assert len(both) >= 15
    for key in both:
        assert told[0][key] == pytest.approx(told[1][key], abs=0.05)


def test_few_rows_are_not_measured(tmp_path: Path) -> None:
    """Vectors then have their usual weight, whatever they say."""
    with opened("memory", tmp_path, of_nothing) as store:
        fill(store, talks=1)
        found = store.search(NAMESPACE, query="w17", explain=True)
        assert max(item.parts["vector"] for item in found) > 0


@pytest.mark.parametrize("vector", [of_nothing, of_topic, shifted])
def test_scores_outlast_a_restart(vector: Callable[[str], Vector], tmp_path: Path) -> None:
    """A store that is opened later scores as the one that was filled, and so do both databases."""
    with opened("file", tmp_path, vector) as store:
        fill(store)
        first = [search(store, QUERY), search(store, "w5 w6")]
    with opened("file", tmp_path, vector) as store:
        assert [search(store, QUERY), search(store, "w5 w6")] == first


@pytest.mark.postgres
@pytest.mark.parametrize("vector", [of_nothing, of_topic, shifted])
def test_both_databases_measure_alike(vector: Callable[[str], Vector], tmp_path: Path) -> None:
    told = []
    for backend in ("file", "postgres"):
        with opened(backend, tmp_path / backend, vector) as store:
            fill(store)
            told.append([search(store, QUERY), search(store, "w5 w6")])
    assert told[0] == told[1]


def test_namespaces_are_measured_by_themselves(tmp_path: Path) -> None:
    """What another namespace holds changes no score."""
    with opened("memory", tmp_path, of_topic) as store:
        fill(store)
        before = search(store, QUERY)
        for number in range(100):
            store.put(("other",), str(number), {"text": f"x{number} other words"})
        assert search(store, QUERY) == before


@pytest.mark.parametrize("backend", ["file", EVERYWHERE[-1]])
def test_earlier_searches_of_the_past_change_nothing(backend: str, tmp_path: Path) -> None:
    """The closed versions that an earlier search has loaded are not measured."""
    moments = []
    with opened(backend, tmp_path, of_topic) as store:
        fill(store)
        moments.append(datetime.now(UTC))
        for talk in range(TALKS):
            for place in range(0, TURNS, 2):
                store.delete(NAMESPACE, f"{talk}-{place}")
        for number in range(100):
            store.put(NAMESPACE, str(number), {"text": f"z{number} w{number}"})
        moments.append(datetime.now(UTC))
        for number in range(100):
            store.delete(NAMESPACE, str(number))
        first = search(store, QUERY, as_of=moments[0])
        search(store, QUERY, as_of=moments[1])
        assert search(store, QUERY, as_of=moments[0]) == first


def test_a_store_that_stays_open_scores_like_one_that_is_opened_later(tmp_path: Path) -> None:
    """Also after a few of the measured items were replaced."""

    def weak(text: str) -> Vector:
        return 0.2 * of_nothing(text.split()[0][1:]) + of_nothing(text)

    with opened("file", tmp_path, weak) as store:
        fill(store, SHORT, talks=8)
        search(store, QUERY)
        for talk in range(7):
            source = Provenance(thread_id=f"talk-{talk}", position=3)
            value = {"text": f"k{talk} w17 changed"}
            store.put(NAMESPACE, f"{talk}-3", value, provenance=source)
        scores = search(store, QUERY)
    with opened("file", tmp_path, weak) as store:
        assert search(store, QUERY) == scores


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_without_a_known_word_items_are_ranked_by_their_vectors(
    backend: str, tmp_path: Path
) -> None:
    """There is nothing else to rank them by, so vectors that are not trusted are better."""
    with opened(backend, tmp_path, lambda text: of_nothing(text.replace("zebra", "milk"))) as store:
        store.put(NAMESPACE, "same", {"text": "milk"})
        fill(store)
        [first, *others] = search(store, "zebra")
        assert first[0] == "same"
        assert first[1] < MIN_SCORE
        assert others


# -- the samples


def entries(first: int, count: int, vector: Callable[[str], Vector]) -> list[IndexedItem]:
    out = []
    for number in range(first, first + count):
        text = f"k{number // TURNS} row{number}"
        body = encode_vectors(normalize_rows(vector(text)[None, :]), MODEL.kind)
        thread = f"talk-{number // TURNS}"
        words, position = text.split(), float(number)
        out.append(IndexedItem(number, words, False, body, thread, position, None, 0.0, FOREVER, 0))
    return out


MODEL = Model("made", DIMS, "int8", 1)


def test_an_index_measures_its_first_rows() -> None:
    index = NamespaceIndex(MODEL, 1 << 30)
    assert index.get_view(0).separation.calibration == VectorCalibration()
    index.add_items(entries(1, 64, of_topic))
    strong = index.get_view(0).separation
    assert strong._compute_distance_from_random_pairs(strong.neighbours) > 2
    index.add_items(entries(65, 192, of_nothing))
    mixed = index.get_view(0).separation
    assert mixed._compute_distance_from_random_pairs(
        mixed.neighbours
    ) < strong._compute_distance_from_random_pairs(strong.neighbours)
    index.remove_items(np.arange(1, 65))
    weak = index.get_view(0).separation
    assert weak.calibration.trust == 0


def test_a_loaded_index_measures_the_same() -> None:
    """Whether rows came at once or one by one, and whether they were compacted."""
    whole, slow = NamespaceIndex(MODEL, 1 << 30), NamespaceIndex(MODEL, 1 << 30)
    whole.add_items(entries(1, 100, of_topic))
    for entry in entries(1, 100, of_topic):
        slow.add_items([entry])
        slow.get_view(0)
    slow.compact()
    assert whole.get_view(0).separation == slow.get_view(0).separation


def test_a_changed_index_measures_the_same_as_a_new_one() -> None:
    """It depends on the present rows alone, whatever was measured before and whatever is gone."""
    changed, new = NamespaceIndex(MODEL, 1 << 30), NamespaceIndex(MODEL, 1 << 30)
    rows = entries(1, 64, of_topic)
    late = [row._replace(thread="talk-0") for row in entries(65, 2, of_topic)]
    changed.add_items(rows)
    before = changed.get_view(0).separation
    changed.remove_items(np.arange(1, 8))  # all of the first thread
    changed.add_items(late)
    new.add_items([*rows[7:], *late])
    assert changed.get_view(0).separation == new.get_view(0).separation != before


def test_sample_sizes_grow_in_steps() -> None:
    sizes = [compute_sample_size(rows) for rows in range(3 * MAX_ROWS)]
    assert sizes[:16] == [0] * 16
    assert sizes == sorted(sizes)
    assert max(sizes) == MAX_ROWS
    assert all(0.75 * rows <= size <= rows for rows, size in enumerate(sizes[16:MAX_ROWS], 16))
    assert len(set(sizes)) < 25


def test_moments_of_parts_are_those_of_all() -> None:
    values = np.random.default_rng(1).standard_normal(50)
    joined = SampleMoments.from_values(values[:20]).merge(SampleMoments.from_values(values[20:]))
    assert joined.size == 50
    assert joined.mean == pytest.approx(values.mean())
    assert joined.variance == pytest.approx(values.var())
    assert SampleMoments().mean == SampleMoments().variance == 0
    assert VectorSeparation().merge(VectorSeparation()) == VectorSeparation()


def test_pairs_share_a_word_that_is_rare() -> None:
    """Here the word 1 is in two rows and the word 2 in all; one row has the word 3."""
    words = np.array([1, 1, *[2] * 32, 3])
    rows = np.array([4, 9, *range(32), 7])
    assert find_pairs_sharing_words(words, rows, 32).tolist() == [[4, 9]]
    none = np.empty(0, np.int64)
    assert find_pairs_sharing_words(none, none, 32).shape == (0, 2)


def test_rows_without_threads_are_measured_by_their_words() -> None:
    """Rows that share a rare word are alike if vectors are useful."""
    draw = np.random.default_rng(5)
    none, n = np.full(400, -1), 400
    pairs = np.column_stack([np.arange(0, n, 2), np.arange(1, n, 2)])
    random = normalize_rows(draw.standard_normal((n, DIMS)))
    related = normalize_rows(np.repeat(draw.standard_normal((n // 2, DIMS)), 2, axis=0) + random)
    for vectors, trust in ((related, 1), (random, 0)):
        found = measure_separation_of_related_rows(
            vectors, none, np.zeros(n), np.full(n, 9), partial(np.copy, pairs)
        )
        assert found.neighbours.size == 0
        assert found.calibration.trust == trust


def test_the_numbers_of_threads_change_nothing() -> None:
    """Each process numbers threads by itself, and the last bit of a sum depends on its order."""
    threads, rows = np.arange(500) % 20, np.arange(500, dtype=np.float64)
    none = partial(np.copy, np.empty((0, 2), np.int64))
    for seed in range(20):
        draw = np.random.default_rng(seed)
        vectors, numbers = normalize_rows(draw.standard_normal((500, DIMS))), draw.permutation(20)
        one, other = (
            measure_separation_of_related_rows(vectors, x, rows, rows, none)
            for x in (threads, numbers[threads])
        )
        assert one == other


def test_equal_rows_are_not_compared() -> None:
    """A reply that is given again and again does not hide that the other vectors are useful."""
    draw = np.random.default_rng(5)
    n = 256
    vectors = normalize_rows(draw.standard_normal((n, DIMS)))
    vectors[2::4] = normalize_rows(
        np.asarray(vectors[0::4] + vectors[2::4], np.float64)
    )  # rows 0 and 2 of each four are alike
    vectors[1::2] = vectors[1]  # every other row is the same reply
    pairs = np.column_stack([np.arange(0, n, 4), np.arange(2, n, 4)])
    thread, rows = np.arange(n) // 2, np.arange(n, dtype=np.float64)
    found = measure_separation_of_related_rows(vectors, thread, rows, rows, partial(np.copy, pairs))
    assert found.calibration.trust == 1
    assert found.random.mean < 0.2
    same = np.repeat(vectors[:1], n, axis=0)
    nothing = measure_separation_of_related_rows(same, thread, rows, rows, partial(np.copy, pairs))
    assert nothing.calibration == VectorCalibration(trust=0)


# -- the ranking


def test_a_calibration_changes_the_weight_of_the_vector() -> None:
    """Without trust only words count; with the whole gain 0.56 of a score are of the vector."""
    weights, cosines = Weights(), make_floats(0.9, 0.1, 0.2)
    args: dict[str, Any] = {"terms": [make_term([1])], "cosines": cosines}
    for calibration, share in (
        (VectorCalibration(), weights.vector),
        (VectorCalibration(trust=0), 0),
        (VectorCalibration(trust=0.5), weights.vector / 2),
        (VectorCalibration(gain=1), 1.6 * weights.vector),
    ):
        found = rank_rows(np.ones(3), calibration=calibration, **args)
        assert found.scores.tolist() == pytest.approx([share, 1 - share, 0], abs=1e-6)


def test_the_three_nearest_rows_count_for_their_thread() -> None:
    """The threads are 0 to 3 and 4 to 5; the mean of the cosines is 0.35."""
    cosines = make_floats(0.75, 0.75, 0.75, 0.75, -0.9, 0)
    made = make_arrangement(np.array([0, 0, 0, 0, 1, 1]), np.ones(6))
    found = rank_rows(
        np.ones(6),
        terms=[make_term([5])],
        cosines=cosines,
        row_contexts=made,
        calibration=VectorCalibration(gain=1),
        weights=Weights(thread=0),
    )
    assert found.parts["thread"].tolist() == pytest.approx([0.21] * 4 + [0, 0])


def test_similarity_is_compared_with_that_of_random_rows() -> None:
    """Two of few rows with cosines around 0.8 are not near if random rows have as much."""
    args: dict[str, Any] = {"terms": [make_term([])], "cosines": make_floats(0.8, 0.82, 0.81)}
    near = rank_rows(np.ones(3), **args).evidence
    far = rank_rows(np.ones(3), calibration=VectorCalibration(origin=0.8), **args).evidence
    assert near > far + 2

"""Vectors against numpy: the same nearest in the same order, whatever the file went through."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from langgraph.store.base import PutOp
from numpy.typing import NDArray

from perdure.stores import SQLiteStore
from perdure.stores.base import Mode
from perdure.stores.index import FOREVER, IndexedItem, NamespaceIndex
from perdure.stores.vectors import Model, VectorMatrix, encode_vectors, rescored_share
from tests.backends import KEY
from tests.store_backends import keys

A = ("a",)
DIMS = 48
Floats = NDArray[np.float64]


class Given:
    """An embedder that gives texts the vectors it was told."""

    name = "given"
    dims = DIMS
    in_process = True

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.of: dict[str, Floats] = {}

    def new(self, text: str, centre: Floats | None = None) -> str:
        """Give a text a random vector, near a centre if one is given."""
        vector = self.random.standard_normal(DIMS)
        self.of[text] = vector if centre is None else centre + 0.35 * vector
        return text

    def embed(self, texts: Any) -> Any:
        return np.array([self.of[text] for text in texts])

    async def aembed(self, texts: Any) -> Any:
        return self.embed(texts)


def opened(path: Any, given: Given, **options: Any) -> SQLiteStore:
    index = {"embed": given, "dims": DIMS, "fields": ["texts[*]"]}
    return SQLiteStore.open(path, index=index, synchronous="normal", **options)


def nearest(given: Given, query: str, living: dict[str, list[str]], count: int) -> list[str]:
    """The keys whose best text is nearest, by numpy in float64."""
    if not living:
        return []
    rows = given.embed([text for texts in living.values() for text in texts])
    cosines = rows @ given.of[query] / np.linalg.norm(rows, axis=1)
    first = np.cumsum([0, *map(len, living.values())])[:-1]
    order = np.argsort(-np.maximum.reduceat(cosines, first))
    every = list(living)
    return [every[place] for place in order[:count].tolist()]


class Course:
    """A store, and beside it what it holds: key to texts."""

    def __init__(self, store: SQLiteStore, given: Given) -> None:
        self.store, self.given = store, given
        self.living: dict[str, list[str]] = {}
        self.count = 0

    def texts(self) -> list[str]:
        self.count += 1
        how_many = 1 + int(self.given.random.integers(0, 3))
        return [self.given.new(f"text {self.count} {part}") for part in range(how_many)]

    def change(self, size: int) -> None:
        """Put, replace and delete some."""
        ops: list[Any] = []
        for number in self.given.random.integers(0, 400, size).tolist():
            key = f"k{number}"
            if number % 5 == 0 and key in self.living:
                ops.append(PutOp(A, key, None))
                del self.living[key]
            else:
                self.living[key] = self.texts()
                ops.append(PutOp(A, key, {"texts": self.living[key], "odd": number % 2}))
        self.store.batch(ops)

    def check(self) -> None:
        """The order is numpy's down to the mean; what is below it scores nothing."""
        query = self.given.new(f"query {self.count}")
        odd = {key: texts for key, texts in self.living.items() if int(key[1:]) % 2}
        for living, filter in ((self.living, None), (odd, {"odd": 1})):
            wanted = nearest(self.given, query, living, len(living))
            for count in (1, 10, 1000):
                found = self.store.search(
                    A, query=query, mode="semantic", limit=count, filter=filter
                )
                above = sum((item.score or 0) > 0 for item in found)
                assert wanted[:above] == keys(found[:above])
                assert set(wanted[: len(found)]) == set(keys(found)) or count < len(living)
                assert above >= min(count, len(living)) // 3


@pytest.mark.parametrize("key", [None, KEY])
def test_the_nearest_are_numpys(key: bytes | None, tmp_path: Path) -> None:
    """Through puts, updates, deletes, merges of segments and a reopening: recall is 1.0."""
    given = Given()
    with opened(tmp_path / "x.db", given, key=key, vectors="float32") as store:
        course = Course(store, given)
        for size in (1, 1, 3, 40, 1, 100, 2, 2, 2, 300, 1, 1, 70, 5):
            course.change(size)
            course.check()
        for _ in range(90):
            course.change(1)
            store.search(A, query=given.new(f"small {course.count}"), mode="semantic")
        course.check()
    with opened(tmp_path / "x.db", given, key=key) as store:
        course.store = store
        course.check()
        course.change(20)
        course.check()


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_smaller_kinds_are_close(kind: Any, tmp_path: Path) -> None:
    """Vectors kept in fewer bytes find nearly the same; of ten nearest at least nine on average."""
    given = Given(1)
    with opened(tmp_path / "x.db", given, vectors=kind) as store:
        texts = {f"k{n}": [given.new(f"text {n}")] for n in range(800)}
        store.batch([PutOp(A, key, {"texts": of}) for key, of in texts.items()])
        right = 0
        for n in range(20):
            query = given.new(f"query {n}")
            found = keys(store.search(A, query=query, mode="semantic", limit=10))
            right += len(set(found) & set(nearest(given, query, texts, 10)))

    assert right >= 180


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_scores_lie_between_0_and_1(kind: Any, tmp_path: Path) -> None:
    """Of the very vector and of one that points away, in every mode, best first."""
    given = Given(3)
    texts = [given.new(f"text {n}") for n in range(60)]
    given.of["away"] = -given.of["text 0"]
    with opened(tmp_path / "x.db", given, vectors=kind) as store:
        for text in [*texts, "away"]:
            store.put(A, text, {"texts": [text]})
        for text in texts:
            for mode, context in product(get_args(Mode), (False, True)):
                found = store.search(A, query=text, mode=mode, context=context, limit=99)
                scores = [item.score or 0 for item in found]

                assert keys(found)[0] == text
                assert scores == sorted(scores, reverse=True)
                assert 0 <= scores[-1] <= scores[0] <= 1


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_the_approximate_index_of_a_store(kind: Any, tmp_path: Path) -> None:
    """Above `approximate_above` under a prefix sketches are used; the nearest are found."""
    given = Given(2)
    centres = given.random.standard_normal((60, DIMS))
    with opened(tmp_path / "x.db", given, vectors=kind, approximate_above=1000) as store:
        texts = {f"k{n}": [given.new(f"text {n}", centres[n % 60])] for n in range(5000)}
        few = {key: texts[key] for key in list(texts)[:50]}
        for namespace, part in ((A, texts), (("few",), few)):
            store.batch([PutOp(namespace, key, {"texts": of}) for key, of in part.items()])
        right = 0
        for n in range(20):
            query = given.new(f"query {n}", centres[n * 3])
            found = keys(store.search(A, query=query, mode="semantic", limit=10))
            right += len(set(found) & set(nearest(given, query, texts, 10)))
        in_few = keys(store.search(("few",), query=query, mode="semantic", limit=5))

    assert right >= 190
    assert len(set(in_few) & set(nearest(given, query, few, 5))) >= 4


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_sketches_find_the_nearest(kind: Any) -> None:
    """On 60,000 clustered vectors, of which 4,000 are looked at twice, recall at 10 is 0.95."""
    random = np.random.default_rng(4)
    centres = random.standard_normal((600, 128)).astype(np.float32)
    rows = centres[random.integers(0, 600, 60_000)]
    rows += 0.5 * random.standard_normal(rows.shape, np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    matrix = VectorMatrix.from_bytes(encode_vectors(rows, kind), 128, kind).with_sketches()
    right = 0
    for centre in centres[:20]:
        query = centre + 0.5 * random.standard_normal(128, np.float32)
        query /= np.linalg.norm(query)
        exact = np.argsort(-(rows @ query))[:10]
        estimates = matrix.estimate_scores(query, 0, len(rows), rescored_share(len(rows)))
        right += len(set(exact) & set(np.argsort(-estimates)[:10]))

    assert right >= 190


def test_what_a_filter_leaves_is_compared_exactly() -> None:
    """Of 20,000 rows, most of them estimated, a filter leaves 60: the nearest are right."""
    random = np.random.default_rng(5)
    rows = random.standard_normal((20_000, DIMS)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    index = NamespaceIndex(Model("m", DIMS, "float32", 1), 1000)
    index.add_items(
        [
            IndexedItem(number, (), False, row.tobytes(), None, number, None, math.nan, FOREVER, 0)
            for number, row in enumerate(rows)
        ]
    )
    ids = np.sort(random.choice(len(rows), 60, replace=False))
    left = index.get_view(0).select_ids(ids)
    for _ in range(5):
        query = random.standard_normal(DIMS).astype(np.float32)
        query /= np.linalg.norm(query)
        exact = ids[np.argsort(-(rows[ids] @ query))[:10]]

        assert exact.tolist() == ids[np.argsort(-left.compute_cosines(query, 1000))[:10]].tolist()


@pytest.mark.parametrize(("kind", "error"), [("float32", 1e-6), ("float16", 2e-3), ("int8", 2e-2)])
def test_scores_of_a_matrix(kind: Any, error: float) -> None:
    """Cosines of stored vectors are float64's but for rounding, in any run of rows."""
    random = np.random.default_rng(3)
    rows = random.standard_normal((5000, 37))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    query = rows[17].astype(np.float32)
    matrix = VectorMatrix.from_bytes(encode_vectors(rows.astype(np.float32), kind), 37, kind)
    exact = rows @ rows[17]

    for start, stop in ((0, 5000), (4095, 4098), (17, 18), (5, 5)):
        assert np.allclose(exact[start:stop], matrix.score_rows(query, start, stop), atol=error)
    taken = matrix.take_rows(np.array([3, 3, 4999]))
    assert np.allclose(exact[[3, 3, 4999]], taken.score_rows(query, 0, 3), atol=error)


def test_a_zero_vector_is_no_answer(tmp_path: Path) -> None:
    """A text whose vector is zero is stored, and stands behind all that is near."""
    given = Given()
    given.of["zero"] = np.zeros(DIMS)
    with opened(tmp_path / "x.db", given) as store:
        store.put(A, "zero", {"texts": ["zero"]})
        store.put(A, "near", {"texts": [given.new("query")]})
        found = keys(store.search(A, query="query", mode="semantic"))

    assert found == ["near", "zero"]

"""Vector search compared with numpy: the same items in the same order after any changes."""

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
from perdure.stores.search.namespace_index import FOREVER, IndexedItem, NamespaceIndex
from perdure.stores.search.vectors import (
    Model,
    VectorMatrix,
    compute_share_of_rows_to_score_exactly,
    encode_vectors,
)
from tests.backends import KEY
from tests.store_backends import list_item_keys

A = ("a",)
DIMS = 48
Floats = NDArray[np.float64]


class FixedEmbedder:
    """An embedder that returns the vectors that were assigned to texts."""

    name = "given"
    dims = DIMS
    in_process = True

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.vectors: dict[str, Floats] = {}

    def assign_vector(self, text: str, centre: Floats | None = None) -> str:
        """Assign a random vector to a text, near `centre` or anywhere, and return the text."""
        vector = self.random.standard_normal(DIMS)
        self.vectors[text] = vector if centre is None else centre + 0.35 * vector
        return text

    def embed(self, texts: Any) -> Any:
        return np.array([self.vectors[text] for text in texts])

    async def aembed(self, texts: Any) -> Any:
        return self.embed(texts)


def open_store_with_vectors(path: Any, embedder: FixedEmbedder, **options: Any) -> SQLiteStore:
    index = {"embed": embedder, "dims": DIMS, "fields": ["texts[*]"]}
    return SQLiteStore.open(path, index=index, synchronous="normal", **options)


def find_nearest_keys(
    embedder: FixedEmbedder, query: str, living: dict[str, list[str]], count: int
) -> list[str]:
    """Return the keys whose nearest text is nearest to the query, by numpy in float64."""
    if not living:
        return []
    rows = embedder.embed([text for texts in living.values() for text in texts])
    cosines = rows @ embedder.vectors[query] / np.linalg.norm(rows, axis=1)
    first = np.cumsum([0, *map(len, living.values())])[:-1]
    order = np.argsort(-np.maximum.reduceat(cosines, first))
    every = list(living)
    return [every[place] for place in order[:count].tolist()]


class ComparedStore:
    """A store, and a dictionary of the keys and texts that it should contain."""

    def __init__(self, store: SQLiteStore, embedder: FixedEmbedder) -> None:
        self.store, self.embedder = store, embedder
        self.living: dict[str, list[str]] = {}
        self.count = 0

    def make_texts(self) -> list[str]:
        self.count += 1
        how_many = 1 + int(self.embedder.random.integers(0, 3))
        return [
            self.embedder.assign_vector(f"text {self.count} {part}") for part in range(how_many)
        ]

    def change_items(self, size: int) -> None:
        """Put, replace and delete some items."""
        ops: list[Any] = []
        for number in self.embedder.random.integers(0, 400, size).tolist():
            key = f"k{number}"
            if number % 5 == 0 and key in self.living:
                ops.append(PutOp(A, key, None))
                del self.living[key]
            else:
                self.living[key] = self.make_texts()
                ops.append(PutOp(A, key, {"texts": self.living[key], "odd": number % 2}))
        self.store.batch(ops)

    def compare_with_numpy(self) -> None:
        """Compare the order of results above the mean with numpy's.

        Items below the mean score zero.
        """
        query = self.embedder.assign_vector(f"query {self.count}")
        odd = {key: texts for key, texts in self.living.items() if int(key[1:]) % 2}
        for living, filter in ((self.living, None), (odd, {"odd": 1})):
            wanted = find_nearest_keys(self.embedder, query, living, len(living))
            for count in (1, 10, 1000):
                results = self.store.search(
                    A, query=query, mode="semantic", limit=count, filter=filter
                )
                above = sum((item.score or 0) > 0 for item in results)
                assert wanted[:above] == list_item_keys(results[:above])
                assert set(wanted[: len(results)]) == set(list_item_keys(results)) or count < len(
                    living
                )
                assert above >= min(count, len(living)) // 3


@pytest.mark.parametrize("key", [None, KEY])
def test_semantic_search_returns_same_order_as_numpy(key: bytes | None, tmp_path: Path) -> None:
    """The test covers puts, updates, deletes, compaction and reopening."""
    embedder = FixedEmbedder()
    with open_store_with_vectors(tmp_path / "x.db", embedder, key=key, vectors="float32") as store:
        compared = ComparedStore(store, embedder)
        for size in (1, 1, 3, 40, 1, 100, 2, 2, 2, 300, 1, 1, 70, 5):
            compared.change_items(size)
            compared.compare_with_numpy()
        for _ in range(90):
            compared.change_items(1)
            store.search(
                A, query=embedder.assign_vector(f"small {compared.count}"), mode="semantic"
            )
        compared.compare_with_numpy()
    with open_store_with_vectors(tmp_path / "x.db", embedder, key=key) as store:
        compared.store = store
        compared.compare_with_numpy()
        compared.change_items(20)
        compared.compare_with_numpy()


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_search_with_smaller_vector_encoding_finds_nearly_the_same(
    kind: Any, tmp_path: Path
) -> None:
    """At least nine of the ten nearest items are found on average."""
    embedder = FixedEmbedder(1)
    with open_store_with_vectors(tmp_path / "x.db", embedder, vectors=kind) as store:
        texts = {f"k{n}": [embedder.assign_vector(f"text {n}")] for n in range(800)}
        store.batch([PutOp(A, key, {"texts": of}) for key, of in texts.items()])
        right = 0
        for n in range(20):
            query = embedder.assign_vector(f"query {n}")
            found_keys = list_item_keys(store.search(A, query=query, mode="semantic", limit=10))
            right += len(set(found_keys) & set(find_nearest_keys(embedder, query, texts, 10)))

    assert right >= 180


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_scores_lie_between_0_and_1_and_fall_in_order(kind: Any, tmp_path: Path) -> None:
    """Scores of an identical and of an opposite vector are valid in every mode."""
    embedder = FixedEmbedder(3)
    texts = [embedder.assign_vector(f"text {n}") for n in range(60)]
    embedder.vectors["away"] = -embedder.vectors["text 0"]
    with open_store_with_vectors(tmp_path / "x.db", embedder, vectors=kind) as store:
        for text in [*texts, "away"]:
            store.put(A, text, {"texts": [text]})
        for text in texts:
            for mode, context in product(get_args(Mode), (False, True)):
                results = store.search(A, query=text, mode=mode, context=context, limit=99)
                scores = [item.score or 0 for item in results]

                assert list_item_keys(results)[0] == text
                assert scores == sorted(scores, reverse=True)
                assert 0 <= scores[-1] <= scores[0] <= 1


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_approximate_search_finds_nearest_items(kind: Any, tmp_path: Path) -> None:
    """Sketches are used for prefixes with more than `approximate_above` items."""
    embedder = FixedEmbedder(2)
    centres = embedder.random.standard_normal((60, DIMS))
    with open_store_with_vectors(
        tmp_path / "x.db", embedder, vectors=kind, approximate_above=1000
    ) as store:
        texts = {
            f"k{n}": [embedder.assign_vector(f"text {n}", centres[n % 60])] for n in range(5000)
        }
        few = {key: texts[key] for key in list(texts)[:50]}
        for namespace, part in ((A, texts), (("few",), few)):
            store.batch([PutOp(namespace, key, {"texts": of}) for key, of in part.items()])
        right = 0
        for n in range(20):
            query = embedder.assign_vector(f"query {n}", centres[n * 3])
            found_keys = list_item_keys(store.search(A, query=query, mode="semantic", limit=10))
            right += len(set(found_keys) & set(find_nearest_keys(embedder, query, texts, 10)))
        in_few = list_item_keys(store.search(("few",), query=query, mode="semantic", limit=5))

    assert right >= 190
    assert len(set(in_few) & set(find_nearest_keys(embedder, query, few, 5))) >= 4


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_sketches_find_nearest_of_many_clustered_vectors(kind: Any) -> None:
    """Of 60,000 vectors 4,000 are scored exactly, and the recall at 10 is 0.95."""
    random = np.random.default_rng(4)
    centres = random.standard_normal((600, 128)).astype(np.float32)
    rows = centres[random.integers(0, 600, 60_000)]
    rows += 0.5 * random.standard_normal(rows.shape, np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    matrix = VectorMatrix.from_bytes(
        encode_vectors(rows, kind), 128, kind
    ).copy_with_sign_bit_sketches()
    right = 0
    for centre in centres[:20]:
        query = centre + 0.5 * random.standard_normal(128, np.float32)
        query /= np.linalg.norm(query)
        exact = np.argsort(-(rows @ query))[:10]
        estimates = matrix.estimate_cosine_similarities(
            query, 0, len(rows), compute_share_of_rows_to_score_exactly(len(rows))
        )
        right += len(set(exact) & set(np.argsort(-estimates)[:10]))

    assert right >= 190


def test_rows_selected_by_filter_are_scored_exactly() -> None:
    """Of 20,000 rows, most of which are estimated, the filter selects 60."""
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
    left = index.get_view_of_unexpired_items(0).select_ids(ids)
    for _ in range(5):
        query = random.standard_normal(DIMS).astype(np.float32)
        query /= np.linalg.norm(query)
        exact = ids[np.argsort(-(rows[ids] @ query))[:10]]

        assert exact.tolist() == ids[np.argsort(-left.compute_cosines(query, 1000))[:10]].tolist()


@pytest.mark.parametrize(("kind", "error"), [("float32", 1e-6), ("float16", 2e-3), ("int8", 2e-2)])
def test_vector_matrix_scores_equal_exact_cosines_within_rounding(kind: Any, error: float) -> None:
    """Scores of any range of rows equal the float64 cosines except for rounding."""
    random = np.random.default_rng(3)
    rows = random.standard_normal((5000, 37))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    query = rows[17].astype(np.float32)
    matrix = VectorMatrix.from_bytes(encode_vectors(rows.astype(np.float32), kind), 37, kind)
    exact = rows @ rows[17]

    for start, stop in ((0, 5000), (4095, 4098), (17, 18), (5, 5)):
        assert np.allclose(
            exact[start:stop],
            matrix.compute_exact_cosine_similarities(query, start, stop),
            atol=error,
        )
    taken = matrix.take_rows(np.array([3, 3, 4999]))
    assert np.allclose(
        exact[[3, 3, 4999]], taken.compute_exact_cosine_similarities(query, 0, 3), atol=error
    )


def test_item_with_zero_vector_ranks_last(tmp_path: Path) -> None:
    embedder = FixedEmbedder()
    embedder.vectors["zero"] = np.zeros(DIMS)
    with open_store_with_vectors(tmp_path / "x.db", embedder) as store:
        store.put(A, "zero", {"texts": ["zero"]})
        store.put(A, "near", {"texts": [embedder.assign_vector("query")]})
        found_keys = list_item_keys(store.search(A, query="query", mode="semantic"))

    assert found_keys == ["near", "zero"]

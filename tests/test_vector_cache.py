"""Each text is embedded once: batches, doubles, and the vectors that are kept."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import EmbeddingFailed
from perdure.stores.embedders import VectorCache, digest, embedder_from


class Counting:
    """A model of three dimensions that notes the batches it is given."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts: list[str]) -> list[list[float]]:
        self.batches.append(list(texts))
        return [[float(len(text)), 1.0, 0.0] for text in texts]


def test_each_text_is_embedded_once() -> None:
    """Doubles within a call and texts of calls before do not reach the model; order is kept."""
    model = Counting()
    embedder = embedder_from(model)
    first = embedder.embed(["a", "bb", "a", "a", "ccc"])
    second = asyncio.run(embedder.aembed(["ccc", "d", "bb"]))

    assert model.batches == [["a", "bb", "ccc"], ["d"]]
    assert (first[[4, 1]] == second[[0, 2]]).all()
    assert (first[0] == first[2]).all()


def test_texts_go_in_batches_and_what_was_embedded_is_kept() -> None:
    """After a failure in the third batch only that and what follows is asked for again."""
    model = Counting()
    failing = [True]

    def fails_once(texts: list[str]) -> Any:
        if "4" in texts and failing.pop():
            raise ConnectionError
        return model(texts)

    embedder = embedder_from(fails_once, batch_size=2)
    texts = [str(i) for i in range(7)]
    with pytest.raises(EmbeddingFailed):
        embedder.embed(texts)
    failing.append(False)
    vectors = embedder.embed(texts)

    assert model.batches == [["0", "1"], ["2", "3"], ["4", "5"], ["6"]]
    assert vectors.shape == (7, 3)


def test_queries_are_kept_apart_and_all_is_dropped_when_told() -> None:
    """A query is embedded once; `clear_cache` forgets queries and documents."""
    model = Counting()
    embedder = embedder_from(model)
    for _ in range(2):
        embedder.embed_query("query")
        embedder.embed(["text"])
    embedder.clear_cache()
    embedder.embed_query("query")
    embedder.embed(["text"])

    assert model.batches == [["query"], ["text"], ["query"], ["text"]]


def test_no_texts_no_call() -> None:
    """Nothing to embed is not an error, and not a call."""
    model = Counting()

    assert embedder_from(model, dims=3).embed([]).shape == (0, 3)
    assert model.batches == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=60))
def test_the_cache_stays_within_its_bytes(puts: list[tuple[int, int]]) -> None:
    """Whatever is kept, in whatever sizes; what is found is what was kept last under its key."""
    cache, model = VectorCache(3_000), {}
    for number, size in puts:
        key = digest(str(number))
        vector = np.full(size * 10, number, np.float32)
        if not cache.found([key]):
            model[key] = vector
        cache.keep([(key, vector)])

        assert cache.nbytes <= 3_000

    found = cache.found(list(model))
    assert all((model[key] == vector).all() for key, vector in found.items())

    cache.clear()

    assert (cache.nbytes, cache.found(list(model))) == (0, {})


def test_the_least_recently_used_goes_first() -> None:
    """Three vectors fit; the one that was not looked at makes room. Kept rows are copies."""
    cache = VectorCache(3 * (400 + 250))
    rows = np.ones((4, 100), np.float32)
    keys = [digest(str(i)) for i in range(4)]
    cache.keep(zip(keys[:3], rows, strict=False))
    cache.found([keys[0]])
    cache.keep([(keys[3], rows[3])])
    found = cache.found(keys)
    rows[:] = 0.0

    assert [keys[0], keys[2], keys[3]] == list(found)
    assert all(vector.sum() == 100 for vector in found.values())


def test_many_threads_share_an_embedder() -> None:
    """The first answers of many threads agree on the dimensions, and all get their own vectors."""
    embedder = embedder_from(Counting())
    outcomes: list[bool] = []

    def work(number: int) -> None:
        texts = ["x" * (i % 50) for i in range(number, number + 40)]
        vectors = embedder.embed(texts)
        expected = [[len(t), 1.0, 0.0] / np.hypot(len(t), 1.0) for t in texts]
        outcomes.append(bool(np.allclose(vectors, expected)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert outcomes == [True] * 16

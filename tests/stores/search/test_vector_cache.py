"""The cache of vectors: each text is embedded once, and the cache is bounded."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import EmbeddingFailed
from perdure.stores.search.embedders import embedder_from


class RecordingModel:
    """A model of three dimensions that records its batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts: list[str]) -> list[list[float]]:
        self.batches.append(list(texts))
        return [[float(len(text)), 1.0, 0.0] for text in texts]


def test_repeated_texts_are_embedded_once() -> None:
    """Neither duplicates within a call nor texts of earlier calls reach the model again."""
    model = RecordingModel()
    embedder = embedder_from(model)
    first = embedder.embed(["a", "bb", "a", "a", "ccc"])
    second = asyncio.run(embedder.aembed(["ccc", "d", "bb"]))

    assert model.batches == [["a", "bb", "ccc"], ["d"]]
    assert (first[[4, 1]] == second[[0, 2]]).all()
    assert (first[0] == first[2]).all()


def test_finished_batches_are_not_embedded_again_after_failure() -> None:
    """After a failure in the third batch, only that batch and the following ones are embedded."""
    model = RecordingModel()
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


def test_clear_cache_forgets_queries_and_documents() -> None:
    """Before the cache is cleared, a query is embedded once, separately from documents."""
    model = RecordingModel()
    embedder = embedder_from(model)
    for _ in range(2):
        embedder.embed_query("query")
        embedder.embed(["text"])
    embedder.clear_cache()
    embedder.embed_query("query")
    embedder.embed(["text"])

    assert model.batches == [["query"], ["text"], ["query"], ["text"]]


def test_embed_of_no_texts_does_not_call_the_model() -> None:
    model = RecordingModel()

    assert embedder_from(model, dims=3).embed([]).shape == (0, 3)
    assert model.batches == []


@given(st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=20), st.integers(0, 6))
def test_cache_keeps_most_recently_used_vectors(calls: list[list[int]], cache_size: int) -> None:
    """Each text gets its own vector, whatever is evicted."""
    model, used = RecordingModel(), list[str]()
    embedder = embedder_from(model, dims=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perdure.stores.search.embedders.CACHE_SIZE", cache_size)
        for numbers in calls:
            texts = ["x" * number for number in numbers]
            cached, model.batches = used[-cache_size:] if cache_size else [], []
            vectors = embedder.embed(texts)
            new = [text for text in dict.fromkeys(texts) if text not in cached]
            again = [text for text in dict.fromkeys(texts) if text in cached]
            used = [text for text in cached if text not in texts] + again + new

            assert [text for batch in model.batches for text in batch] == new
            for text, vector in zip(texts, vectors, strict=True):
                assert vector.tolist() == pytest.approx(
                    np.array([len(text), 1.0, 0.0]) / np.hypot(len(text), 1.0)
                )


def test_changing_returned_vectors_does_not_change_the_cache() -> None:
    embedder = embedder_from(RecordingModel())
    first = embedder.embed(["a", "bb"])
    expected = first.copy()
    first[:] = 0.0

    assert (expected == embedder.embed(["a", "bb"])).all()


def test_concurrent_embed_calls_return_correct_vectors() -> None:
    """The first calls of many threads agree on the dimensions."""
    embedder = embedder_from(RecordingModel())
    outcomes: list[bool] = []

    def embed_texts(number: int) -> None:
        texts = ["x" * (i % 50) for i in range(number, number + 40)]
        vectors = embedder.embed(texts)
        expected = [[len(t), 1.0, 0.0] / np.hypot(len(t), 1.0) for t in texts]
        outcomes.append(bool(np.allclose(vectors, expected)))

    threads = [threading.Thread(target=embed_texts, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert outcomes == [True] * 16

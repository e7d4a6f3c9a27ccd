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
from perdure.stores.embedders import embedder_from


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


@given(st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=20), st.integers(0, 6))
def test_the_vectors_used_last_are_kept(calls: list[list[int]], most: int) -> None:
    """As many as fit; whatever is dropped, each text gets its own vector."""
    model, used = Counting(), list[str]()
    embedder = embedder_from(model, dims=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perdure.stores.embedders.CACHE_SIZE", most)
        for numbers in calls:
            texts = ["x" * number for number in numbers]
            kept, model.batches = used[-most:] if most else [], []
            vectors = embedder.embed(texts)
            new = [text for text in dict.fromkeys(texts) if text not in kept]
            again = [text for text in dict.fromkeys(texts) if text in kept]
            used = [text for text in kept if text not in texts] + again + new

            assert [text for batch in model.batches for text in batch] == new
            for text, vector in zip(texts, vectors, strict=True):
                assert vector.tolist() == pytest.approx(
                    np.array([len(text), 1.0, 0.0]) / np.hypot(len(text), 1.0)
                )


def test_rows_that_are_kept_are_copies() -> None:
    """What a caller does to its vectors changes no later answer."""
    embedder = embedder_from(Counting())
    first = embedder.embed(["a", "bb"])
    expected = first.copy()
    first[:] = 0.0

    assert (expected == embedder.embed(["a", "bb"])).all()


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

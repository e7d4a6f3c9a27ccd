"""Embedders supplied by users: accepted types, accepted results, and the number of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings

from perdure.errors import ConfigurationError, EmbeddingFailed, MissingDependency
from perdure.stores.search.embedders import CheckedEmbedder, Embedder, embedder_from
from perdure.stores.search.static_embedder import StaticEmbedder
from perdure.stores.search.vectors import check_and_normalize_vectors


async def embed_async(texts: list[str]) -> list[list[float]]:
    await asyncio.sleep(0)
    return [[float(len(text)), 1.0] for text in texts]


class AsyncCallable:
    async def __call__(self, texts: list[str]) -> list[list[float]]:
        return await embed_async(texts)


class AsyncOnlyEmbeddings(Embeddings):
    """A langchain class with async methods only."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise NotImplementedError

    def embed_query(self, text: str) -> list[float]:
        raise NotImplementedError

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return await embed_async(texts)

    async def aembed_query(self, text: str) -> list[float]:
        return (await embed_async([text]))[0]


class AsymmetricEmbeddings(Embeddings):
    """A langchain class that embeds queries differently from documents."""

    model = "two-faced"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[0.0, 2.0]] * len(texts)

    def embed_query(self, text: str) -> list[float]:
        return [3.0, 0.0]


class OwnEmbedder:
    """An implementation of the `Embedder` protocol."""

    name = "own/1"
    dims = 2

    def embed(self, texts: Sequence[str]) -> Any:
        return np.array([[len(text), 1] for text in texts])

    async def aembed(self, texts: Sequence[str]) -> Any:
        return self.embed(texts)


EQUIVALENT_MODELS: list[Any] = [
    lambda texts: [[len(text), 1] for text in texts],
    lambda texts: tuple((len(text), 1) for text in texts),
    lambda texts: np.array([[len(text), 1] for text in texts], np.float16),
    lambda texts: [np.array([len(text), 1], np.int32) for text in texts],
    embed_async,
    lambda texts: embed_async(texts),
    AsyncCallable(),
    AsyncOnlyEmbeddings(),
    OwnEmbedder(),
]


@pytest.mark.parametrize("model", EQUIVALENT_MODELS)
def test_every_kind_of_model_returns_same_vectors_blocking_and_async(model: Any) -> None:
    """Functions, classes and async models return the same vectors, also inside an event loop."""
    texts = ["", "a", "bcd"]
    rows = np.array([[0, 1], [1, 1], [3, 1]])
    expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)

    async def embed_awaited() -> tuple[Any, ...]:
        fresh = embedder_from(model)  # its cache is empty
        return await fresh.aembed(texts), await fresh.aembed_query("bcd")

    async def embed_blocking_in_loop() -> Any:
        return embedder_from(model).embed(texts)

    embedder = embedder_from(model)
    vectors, (avectors, aquery) = embedder.embed(texts), asyncio.run(embed_awaited())

    assert np.dtype(np.float32) == vectors.dtype
    assert expected == pytest.approx(vectors)
    assert (vectors == avectors).all()
    assert (vectors == asyncio.run(embed_blocking_in_loop())).all()
    assert (vectors[2] == embedder.embed_query("bcd")).all()
    assert (vectors[2] == aquery).all()
    assert embedder.dims == 2


def test_queries_are_embedded_with_embed_query_only() -> None:
    """`embed_query` is used for queries and never for documents."""
    embedder = embedder_from(AsymmetricEmbeddings())

    assert embedder.embed(["text"])[0].tolist() == [0.0, 1.0]
    assert embedder.embed_query("text").tolist() == [1.0, 0.0]
    assert asyncio.run(embedder.aembed_query("other")).tolist() == [1.0, 0.0]
    assert embedder.embed(["text"])[0].tolist() == [0.0, 1.0]


def test_offline_embedder_keeps_its_vectors_when_checked() -> None:
    """The default embedder is wrapped like any other, and its vectors are unchanged."""
    embedder = embedder_from(StaticEmbedder())

    assert (StaticEmbedder().embed(["a lake"]) == embedder.embed(["a lake"])).all()
    assert (256, StaticEmbedder.name) == (embedder.dims, embedder.name)
    assert isinstance(embedder, Embedder)


WRONG_ANSWERS: list[tuple[Any, str]] = [
    ([[1.0, 2.0]], "1 vectors for 2 texts"),
    ([[1.0, 2.0]] * 3, "3 vectors for 2 texts"),
    ([], "0 vectors for 2 texts"),
    ([[1.0, 2.0, 3.0]] * 2, "3 dimensions; expected 2"),
    ([[1.0, 2.0], [1.0]], "1 to 2 dimensions"),
    ([[], []], "expected a list of vectors"),
    ([[1.0, float("nan")], [1.0, 2.0]], "nan at position 1 of vector 0"),
    ([[1.0, 2.0], [float("-inf"), 2.0]], "-inf at position 0 of vector 1"),
    ([["1", "2"], ["1", "2"]], "expected a list of vectors"),
    ([[None, 1.0], [1.0, 1.0]], "expected a list of vectors"),
    ([[True, False]] * 2, "expected a list of vectors"),
    ([[1j, 1.0]] * 2, "expected a list of vectors"),
    ([1.0, 2.0], "expected a list of vectors"),
    ([[[1.0, 2.0]], [[1.0, 2.0]]], "expected a list of vectors"),
    (None, "None; expected a list of vectors"),
    ("vectors", "'vectors'; expected"),
    ({"data": []}, "expected a list of vectors"),
]


@pytest.mark.parametrize(("answer", "expected_message"), WRONG_ANSWERS)
def test_wrong_answer_of_model_is_described_in_error(answer: Any, expected_message: str) -> None:
    """The message contains the model's name, the returned value and the expected one."""
    embedder = embedder_from(lambda _: answer, dims=2, name="odd")
    with pytest.raises(EmbeddingFailed, match=expected_message) as blocking:
        embedder.embed(["a", "b"])
    with pytest.raises(EmbeddingFailed, match=expected_message):
        asyncio.run(embedder.aembed(["a", "b"]))

    assert "'odd'" in str(blocking.value)


def test_first_vector_fixes_dimension_of_model() -> None:
    """Without `dims`, a later vector of another length is refused."""
    embedder = embedder_from(lambda texts: [[1.0] * len(text) for text in texts])

    assert embedder.dims is None

    embedder.embed(["abc"])

    assert embedder.dims == 3
    with pytest.raises(EmbeddingFailed, match="4 dimensions; expected 3"):
        embedder.embed(["abcd"])


@given(
    st.lists(
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    )
)
def test_vectors_are_normalised_to_length_one(rows: list[list[float]]) -> None:
    """Vectors of large and small numbers are normalised; a zero vector stays zero."""
    vectors = check_and_normalize_vectors(rows, len(rows), 3, "model")
    lengths = [float(any(row)) for row in rows]

    assert lengths == pytest.approx(np.linalg.norm(vectors.astype(np.float64), axis=1), abs=1e-6)


def test_embed_accepts_texts_in_any_sequence() -> None:
    """An array and a generator are accepted; a value that is not a list of strings is refused."""
    embedder = embedder_from(OwnEmbedder())
    texts: Any
    for texts in (("a", "bb"), np.array(["a", "bb"]), (text for text in ("a", "bb"))):
        assert np.array_equal(embedder.embed(["a", "bb"]), embedder.embed(texts))
    texts = np.array([], str)
    assert embedder.embed(texts).shape == (0, 2)
    with pytest.raises(ConfigurationError, match="expected a list of strings"):
        embedder.embed("text")


def test_text_with_lone_surrogate_can_be_embedded() -> None:
    """JSON can contain half a surrogate pair, and an embedder must accept it."""
    assert embedder_from(StaticEmbedder()).embed(["half \ud83d"]).shape == (1, 256)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (OwnEmbedder(), "own/1"),
        (
            AsymmetricEmbeddings(),
            "tests.stores.search.test_embedding.AsymmetricEmbeddings:two-faced",
        ),
        (embed_async, "tests.stores.search.test_embedding.embed_async"),
        (
            DeterministicFakeEmbedding(size=4),
            "langchain_core.embeddings.fake.DeterministicFakeEmbedding",
        ),
    ],
)
def test_model_has_name_unless_overridden(model: Any, name: str) -> None:
    """The name that is recorded with the vectors identifies the model; `name` overrides it."""
    assert embedder_from(model).name.endswith(name)
    assert embedder_from(model, name="mine").name == "mine"


def test_checked_embedder_is_not_wrapped_again() -> None:
    """A second wrapper would keep a second cache."""
    embedder = embedder_from(OwnEmbedder())

    assert embedder is embedder_from(embedder)
    assert isinstance(embedder_from(embedder, name="other"), CheckedEmbedder)
    with pytest.raises(ConfigurationError, match="with 2 dimensions"):
        embedder_from(embedder, dims=3)


def test_model_string_without_langchain_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r'pip install "perdure\[agents\]'):
        embedder_from("openai:text-embedding-3-small")


@pytest.mark.parametrize(
    ("raised", "expected_error"),
    [(ImportError("pip install x"), MissingDependency), (ValueError("no key"), ConfigurationError)],
)
def test_error_of_langchain_for_model_string_is_configuration_error(
    raised: Exception, expected_error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider that is not installed, or has no key, is reported as a configuration error."""

    def fails(spec: str) -> Embeddings:
        raise raised

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("perdure.stores.search.embedders.ensure_embeddings", fails)
    with pytest.raises(expected_error, match=str(raised)):
        embedder_from("provider:model")


def test_model_string_is_resolved_by_langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The string is the embedder's name, and langchain creates the model."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(
        "perdure.stores.search.embedders.ensure_embeddings", lambda spec: AsymmetricEmbeddings()
    )
    embedder = embedder_from("provider:model")

    assert (embedder.name, embedder.embed_query("a").tolist()) == ("provider:model", [1.0, 0.0])


INVALID_CALLS: list[Callable[[], Any]] = [
    lambda: embedder_from(42),  # type: ignore[arg-type]
    lambda: embedder_from(None),  # type: ignore[arg-type]
    lambda: embedder_from(OwnEmbedder(), dims=3),
    lambda: embedder_from(embed_async, dims=0),
    lambda: embedder_from(embed_async, batch_size=0),
    lambda: embedder_from(embed_async, timeout_s=0),
    lambda: embedder_from(embed_async).embed("a text"),
    lambda: embedder_from(embed_async).embed([1]),  # type: ignore[list-item]
    lambda: embedder_from(embed_async).embed_query(b"a"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("call", INVALID_CALLS)
def test_invalid_model_dimension_or_texts_are_refused(call: Callable[[], Any]) -> None:
    """A wrong model, dimension or list of texts is a configuration error."""
    with pytest.raises(ConfigurationError, match=r"expected|leave it out"):
        call()

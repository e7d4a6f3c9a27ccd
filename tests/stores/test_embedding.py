"""Embedders of the user's: what they may be, what they may answer, how often they are asked."""

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
from perdure.stores.embedders import CheckedEmbedder, Embedder, embedder_from
from perdure.stores.offline import StaticEmbedder
from perdure.stores.vectors import check_vectors


async def afunction(texts: list[str]) -> list[list[float]]:
    await asyncio.sleep(0)
    return [[float(len(text)), 1.0] for text in texts]


class AsyncCallable:
    async def __call__(self, texts: list[str]) -> list[list[float]]:
        return await afunction(texts)


class AsyncOnly(Embeddings):
    """As classes of async clients are written."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise NotImplementedError

    def embed_query(self, text: str) -> list[float]:
        raise NotImplementedError

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return await afunction(texts)

    async def aembed_query(self, text: str) -> list[float]:
        return (await afunction([text]))[0]


class Asymmetric(Embeddings):
    """Queries are embedded in another way."""

    model = "two-faced"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[0.0, 2.0]] * len(texts)

    def embed_query(self, text: str) -> list[float]:
        return [3.0, 0.0]


class Own:
    """An `Embedder` of the user's."""

    name = "own/1"
    dims = 2

    def embed(self, texts: Sequence[str]) -> Any:
        return np.array([[len(text), 1] for text in texts])

    async def aembed(self, texts: Sequence[str]) -> Any:
        return self.embed(texts)


ALIKE: list[Any] = [
    lambda texts: [[len(text), 1] for text in texts],
    lambda texts: tuple((len(text), 1) for text in texts),
    lambda texts: np.array([[len(text), 1] for text in texts], np.float16),
    lambda texts: [np.array([len(text), 1], np.int32) for text in texts],
    afunction,
    lambda texts: afunction(texts),
    AsyncCallable(),
    AsyncOnly(),
    Own(),
]


@pytest.mark.parametrize("model", ALIKE)
def test_every_kind_of_model_in_both_colours(model: Any) -> None:
    """Functions, classes and async ones answer alike, blocking or awaited, within a loop or not."""
    texts = ["", "a", "bcd"]
    rows = np.array([[0, 1], [1, 1], [3, 1]])
    expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)

    async def awaited() -> tuple[Any, ...]:
        fresh = embedder_from(model)  # its cache is empty
        return await fresh.aembed(texts), await fresh.aembed_query("bcd")

    async def blocking_in_a_loop() -> Any:
        return embedder_from(model).embed(texts)

    embedder = embedder_from(model)
    vectors, (avectors, aquery) = embedder.embed(texts), asyncio.run(awaited())

    assert np.dtype(np.float32) == vectors.dtype
    assert expected == pytest.approx(vectors)
    assert (vectors == avectors).all()
    assert (vectors == asyncio.run(blocking_in_a_loop())).all()
    assert (vectors[2] == embedder.embed_query("bcd")).all()
    assert (vectors[2] == aquery).all()
    assert embedder.dims == 2


def test_queries_have_their_own_door() -> None:
    """`embed_query` is what queries are embedded with, and never answers for documents."""
    embedder = embedder_from(Asymmetric())

    assert embedder.embed(["text"])[0].tolist() == [0.0, 1.0]
    assert embedder.embed_query("text").tolist() == [1.0, 0.0]
    assert asyncio.run(embedder.aembed_query("other")).tolist() == [1.0, 0.0]
    assert embedder.embed(["text"])[0].tolist() == [0.0, 1.0]


def test_the_offline_embedder_goes_through_too() -> None:
    """The default is an embedder like others; its vectors are not changed on the way."""
    embedder = embedder_from(StaticEmbedder())

    assert (StaticEmbedder().embed(["a lake"]) == embedder.embed(["a lake"])).all()
    assert (256, StaticEmbedder.name) == (embedder.dims, embedder.name)
    assert isinstance(embedder, Embedder)


WRONG: list[tuple[Any, str]] = [
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


@pytest.mark.parametrize(("answer", "said"), WRONG)
def test_a_wrong_answer_says_what_it_was(answer: Any, said: str) -> None:
    """Count, dimensions, numbers: the message has the model, what came and what was expected."""
    embedder = embedder_from(lambda _: answer, dims=2, name="odd")
    with pytest.raises(EmbeddingFailed, match=said) as blocking:
        embedder.embed(["a", "b"])
    with pytest.raises(EmbeddingFailed, match=said):
        asyncio.run(embedder.aembed(["a", "b"]))

    assert "'odd'" in str(blocking.value)


def test_the_first_vector_says_how_long_they_are() -> None:
    """Without `dims`, a model that changes its mind is found out."""
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
def test_vectors_have_length_one(rows: list[list[float]]) -> None:
    """However large or small the numbers; a zero vector stays zero."""
    vectors = check_vectors(rows, len(rows), 3, "model")
    lengths = [float(any(row)) for row in rows]

    assert lengths == pytest.approx(np.linalg.norm(vectors.astype(np.float64), axis=1), abs=1e-6)


def test_texts_come_in_any_sequence() -> None:
    """Also in an array, and from a generator; what is no list of strings is refused."""
    embedder = embedder_from(Own())
    texts: Any
    for texts in (("a", "bb"), np.array(["a", "bb"]), (text for text in ("a", "bb"))):
        assert np.array_equal(embedder.embed(["a", "bb"]), embedder.embed(texts))
    texts = np.array([], str)
    assert embedder.embed(texts).shape == (0, 2)
    with pytest.raises(ConfigurationError, match="expected a list of strings"):
        embedder.embed("text")


def test_lone_surrogates_can_be_embedded() -> None:
    """JSON can hold half a character; an embedder must not fall over it."""
    assert embedder_from(StaticEmbedder()).embed(["half \ud83d"]).shape == (1, 256)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Own(), "own/1"),
        (Asymmetric(), "tests.stores.test_embedding.Asymmetric:two-faced"),
        (afunction, "tests.stores.test_embedding.afunction"),
        (
            DeterministicFakeEmbedding(size=4),
            "langchain_core.embeddings.fake.DeterministicFakeEmbedding",
        ),
    ],
)
def test_models_have_names(model: Any, name: str) -> None:
    """What is recorded with the vectors tells one model from another; `name` overrides it."""
    assert embedder_from(model).name.endswith(name)
    assert embedder_from(model, name="mine").name == "mine"


def test_an_embedder_that_is_checked_stays_as_it_is() -> None:
    """Checking twice would keep two caches."""
    embedder = embedder_from(Own())

    assert embedder is embedder_from(embedder)
    assert isinstance(embedder_from(embedder, name="other"), CheckedEmbedder)
    with pytest.raises(ConfigurationError, match="have 2"):
        embedder_from(embedder, dims=3)


def test_a_string_needs_langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the message says what to install; with it, its own complaint is passed on."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install langchain"):
        embedder_from("openai:text-embedding-3-small")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(ImportError("pip install x"), MissingDependency), (ValueError("no key"), ConfigurationError)],
)
def test_what_langchain_cannot_make(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider that is not installed, or has no key, is a mistake of configuration."""

    def fails(spec: str) -> Embeddings:
        raise raised

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("perdure.stores.embedders.ensure_embeddings", fails)
    with pytest.raises(expected, match=str(raised)):
        embedder_from("provider:model")


def test_a_string_is_made_by_langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The string is the name, and what langchain makes of it the model."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("perdure.stores.embedders.ensure_embeddings", lambda spec: Asymmetric())
    embedder = embedder_from("provider:model")

    assert (embedder.name, embedder.embed_query("a").tolist()) == ("provider:model", [1.0, 0.0])


BAD: list[Callable[[], Any]] = [
    lambda: embedder_from(42),  # type: ignore[arg-type]
    lambda: embedder_from(None),  # type: ignore[arg-type]
    lambda: embedder_from(Own(), dims=3),
    lambda: embedder_from(afunction, dims=0),
    lambda: embedder_from(afunction, batch_size=0),
    lambda: embedder_from(afunction, timeout_s=0),
    lambda: embedder_from(afunction).embed("a text"),
    lambda: embedder_from(afunction).embed([1]),  # type: ignore[list-item]
    lambda: embedder_from(afunction).embed_query(b"a"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("call", BAD)
def test_what_cannot_be_meant_is_refused(call: Callable[[], Any]) -> None:
    """No model, no such dimension, no list of texts: the developer's mistake, told as such."""
    with pytest.raises(ConfigurationError, match=r"expected|leave it out"):
        call()

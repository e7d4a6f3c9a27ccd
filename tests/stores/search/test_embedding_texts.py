"""Which texts an embedder receives: long ones in chunks, equal ones once, many in one call."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import PutOp

from perdure.stores import SQLiteStore
from tests.store_backends import BACKENDS, DIMS, WordEmbedder, list_item_keys, put_texts
from tests.stores.search.test_embedders import open_store_with_embedder, open_store_with_words

A = ("a",)


class FillerBlindWords(WordEmbedder):
    """An embedder that ignores filler words."""

    @staticmethod
    def vector(text: str) -> Any:
        return WordEmbedder.vector(re.sub(r"filler\w*", "", text))


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_text_is_found_by_its_first_and_last_words(backend: str, tmp_path: Path) -> None:
    """The first and the last words of a text of 20,000 words are found by meaning."""
    words = FillerBlindWords()
    middle = " ".join(f"filler{n}" for n in range(20_000))
    with BACKENDS[backend](tmp_path, index={"embed": words, "dims": DIMS}) as store:
        store.put(A, "long", {"text": f"my physician. {middle}. the last journey"})
        put_texts(store, A, short="something short")
        first = store.search(A, query="doctor", mode="semantic", limit=1)
        last = store.search(A, query="trip", mode="semantic", limit=1)
    pieces = [text for call in words.calls for text in call]

    assert list_item_keys(first) == list_item_keys(last) == ["long"]
    assert max(len(piece.split()) for piece in pieces) <= 200
    assert {f"filler{n}" for n in range(20_000)} <= {
        word.strip(".") for piece in pieces for word in piece.split()
    }


def test_equal_texts_are_embedded_once(tmp_path: Path) -> None:
    """Putting the same text again does not call the model."""
    store, words = open_store_with_words("file", tmp_path)
    with store:
        for n in range(5):
            store.put(A, f"k{n}", {"text": "the same"})
    assert words.calls == [["the same"]]


def test_texts_of_batch_are_embedded_in_one_call(tmp_path: Path) -> None:
    store, words = open_store_with_words("file", tmp_path)
    with store:
        store.batch([PutOp(A, f"k{n}", {"text": f"text {n}"}) for n in range(50)])
    assert [[f"text {n}" for n in range(50)]] == words.calls


def embed_blocking(texts: list[str]) -> list[list[float]]:
    return [list(map(float, WordEmbedder.vector(text))) for text in texts]


async def embed_async(texts: list[str]) -> list[list[float]]:
    await asyncio.sleep(0)
    return embed_blocking(texts)


@pytest.mark.parametrize("embed", [embed_blocking, embed_async])
def test_blocking_and_async_functions_work_as_embedders(embed: Any, tmp_path: Path) -> None:
    """Blocking and async functions serve both blocking and async calls of the store."""

    async def put_and_search(store: SQLiteStore) -> list[str]:
        await store.aput(A, "a", {"text": "my car"})
        await store.aput(A, "b", {"text": "the sea"})
        return list_item_keys(await store.asearch(A, query="automobile", mode="semantic", limit=1))

    with open_store_with_embedder(tmp_path / "x.db", embed, DIMS) as store:
        awaited = asyncio.run(put_and_search(store))
        put_texts(store, A, c="my dog")
        blocking = list_item_keys(store.search(A, query="dog", mode="semantic", limit=1))

    assert awaited == ["a"]
    assert blocking == ["c"]

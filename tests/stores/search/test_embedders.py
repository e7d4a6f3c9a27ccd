"""Stores with embedders that fail, differ or change, and items that wait for their vectors."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langgraph.store.base import PutOp

from perdure.errors import ConfigurationError, EmbedderMismatch, EmbeddingFailed
from perdure.stores import Provenance, SQLiteStore
from tests.store_backends import (
    BACKENDS,
    DIMS,
    WordEmbedder,
    list_item_keys,
    make_options,
    open_store,
    put_texts,
)

A = ("a",)


def open_store_with_embedder(
    path: Path, embed: Any, dims: int | None = None, **options: Any
) -> SQLiteStore:
    """Open a store with an embedder."""
    return SQLiteStore.open(
        path, index={"embed": embed, "dims": dims}, synchronous="normal", **options
    )


def open_store_with_words(backend: str, folder: Path) -> tuple[SQLiteStore, WordEmbedder]:
    options = make_options()
    return BACKENDS[backend](folder, **options), options["index"]["embed"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("door", ["blocking", "awaited"])
def test_item_put_while_embedder_fails_is_pending_and_embedded_later(
    backend: str, door: str, tmp_path: Path
) -> None:
    """The item is stored, found by its words, listed as pending, and embedded later."""
    store, words = open_store_with_words(backend, tmp_path)
    with store:
        put_texts(store, A, before="a dog")
        words.failing = True
        if door == "awaited":
            asyncio.run(store.aput(A, "k", {"text": "my car"}))
        else:
            store.put(A, "k", {"text": "my car"})
        stored = store.get(A, "k")
        by_words = list_item_keys(store.search(A, query="car", mode="text"))
        pending = store.pending_embeddings()
        elsewhere = store.pending_embeddings(("b",))
        with pytest.raises(EmbeddingFailed):
            store.embed_pending()
        with pytest.raises(EmbeddingFailed, match="away"):
            store.search(A, query="automobile", mode="semantic")
        words.failing = False
        done = store.embed_pending()
        by_vector = store.search(A, query="automobile", mode="semantic", limit=1)

    assert stored is not None
    assert by_words == ["k"]
    assert [(item.namespace, item.key, item.attempts) for item in pending] == [(A, "k", 1)]
    assert "the model is away" in pending[0].error
    assert elsewhere == []
    assert done == 1
    assert list_item_keys(by_vector) == ["k"]


def test_next_put_embeds_pending_items(tmp_path: Path) -> None:
    """Once the embedder works again, a put also embeds the pending items."""
    store, words = open_store_with_words("file", tmp_path)
    with store:
        words.failing = True
        put_texts(store, A, a="my car", b="my dog", c="gone soon", d="replaced soon")
        store.delete(A, "c")
        words.failing = False
        put_texts(store, A, d="a house")
        pending = store.pending_embeddings()
        found_keys = list_item_keys(store.search(A, query="automobile", mode="semantic", limit=1))

    assert pending == []
    assert found_keys == ["a"]


class HookedWords(WordEmbedder):
    """An embedder that calls `before` before each call."""

    before: Callable[[], object] = staticmethod(lambda: None)

    def embed(self, texts: Sequence[str]) -> Any:
        self.before()
        return super().embed(texts)


def test_closed_versions_are_not_pending(tmp_path: Path) -> None:
    """Neither versions that the same transaction closes nor items deleted meanwhile are pending."""
    words = HookedWords()
    lines = [
        json.dumps({"namespace": ["i"], "key": "k", "value": {"text": f"{n}"}, "version": n})
        for n in (1, 2, 3)
    ]

    async def put_at_once() -> None:
        await asyncio.gather(*(store.aput(A, "k", {"text": f"tea {n}"}) for n in range(3)))

    with open_store_with_embedder(tmp_path / "x.db", words) as store:
        words.failing = True
        asyncio.run(put_at_once())
        store.import_lines(lines)
        listed_count, pending_count = len(store.pending_embeddings()), store.stats().pending

        words.before = lambda: store.delete(A, "k")
        with pytest.raises(EmbeddingFailed):
            store.embed_pending()
        pending_after_delete = store.stats().pending

    assert (listed_count, pending_count, pending_after_delete) == (2, 2, 1)


def test_pending_items_are_remembered_after_reopening(tmp_path: Path) -> None:
    """Pending items are recorded in the file, for every process that opens it."""
    store, words = open_store_with_words("file", tmp_path)
    with store:
        words.failing = True
        put_texts(store, A, a="my car")
    store, words = open_store_with_words("file", tmp_path)
    with store:
        waiting = store.pending_embeddings()
        done = store.embed_pending()
        found_keys = list_item_keys(store.search(A, query="automobile", mode="semantic"))

    assert [(item.key, item.attempts) for item in waiting] == [("a", 1)]
    assert done == 1
    assert found_keys == ["a"]


WRONG_ANSWERS: dict[str, Any] = {
    "too few": lambda texts: [[1.0, 0.0]] * (len(texts) - 1),
    "too many": lambda texts: [[1.0, 0.0]] * (len(texts) + 1),
    "other dims": lambda texts: [[1.0, 0.0, 0.0]] * len(texts),
    "ragged": lambda texts: [[1.0] * (2 + n % 2) for n, _ in enumerate(texts)],
    "nan": lambda texts: [[float("nan"), 0.0]] * len(texts),
    "infinite": lambda texts: np.full((len(texts), 2), np.inf),
    "no numbers": lambda texts: [["a", "b"]] * len(texts),
    "nothing": lambda texts: None,
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS)
def test_invalid_vectors_from_embedder_are_not_stored(answer: str, tmp_path: Path) -> None:
    """Vectors with a wrong count, dimension or numbers are not stored; the item is."""
    with open_store_with_embedder(tmp_path / "x.db", WRONG_ANSWERS[answer], 2) as store:
        store.put(A, "k", {"text": "tea", "more": ["milk"]}, index=["text", "more[*]"])
        pending = store.pending_embeddings()
        found_keys = list_item_keys(store.search(A, query="tea", mode="text"))
        if answer != "ragged":  # a single vector is never ragged
            with pytest.raises(EmbeddingFailed):
                store.search(A, query="tea", mode="semantic")

    assert ["k"] == found_keys == list_item_keys(pending)
    assert "returned" in pending[0].error


def make_other_embedder(name: str, dims: int = DIMS) -> WordEmbedder:
    """Return an embedder like `Words` with another name or other dimensions."""

    class Other(WordEmbedder):
        @staticmethod
        def vector(text: str) -> Any:
            return np.resize(WordEmbedder.vector(text), dims)

    other = Other()
    other.name, other.dims = name, dims
    return other


@pytest.mark.parametrize(
    ("name", "dims"), [("other", DIMS), ("words", 2 * DIMS), ("other", 2 * DIMS)]
)
@pytest.mark.parametrize("backend", ["file", "sealed"])
def test_other_model_is_refused_until_reembed(
    backend: str, name: str, dims: int, tmp_path: Path
) -> None:
    """Another model or dimension raises an error that recommends reembed(), which then fixes it."""
    with BACKENDS[backend](tmp_path) as store:
        put_texts(store, A, a="my car", b="the sea")
    other = make_other_embedder(name, dims)
    with BACKENDS[backend](tmp_path, index={"embed": other, "dims": dims}) as store:
        with pytest.raises(EmbedderMismatch, match=r"words.*reembed"):
            store.search(A, query="automobile")
        with pytest.raises(EmbedderMismatch):
            store.put(A, "c", {"text": "new"})
        text = list_item_keys(store.search(A, query="car", mode="text"))
        progress_calls: list[tuple[int, int | None]] = []
        done = store.reembed(lambda now, of: progress_calls.append((now, of)))
        store.put(A, "c", {"text": "new"})
        found_keys = list_item_keys(store.search(A, query="automobile", mode="semantic", limit=1))
        second_count = store.reembed()
    with (
        BACKENDS[backend](tmp_path) as store,
        pytest.raises(EmbedderMismatch),
    ):
        store.search(A, query="automobile")

    assert text == ["a"]
    assert done == 2
    assert progress_calls == [(2, 2)]
    assert found_keys == ["a"]
    assert second_count == 0


def test_other_vector_encoding_is_refused_with_option_name(tmp_path: Path) -> None:
    """The error says that the option `vectors` differs, not the embedder."""
    with BACKENDS["file"](tmp_path, vectors="float32") as store:
        put_texts(store, A, a="my car")
    with BACKENDS["file"](tmp_path) as store:
        assert list_item_keys(store.search(A, query="automobile")) == [
            "a"
        ]  # without the option, the encoding of the file is used
    with (
        BACKENDS["file"](tmp_path, vectors="int8") as store,
        pytest.raises(EmbedderMismatch, match=r"with vectors='int8'; open it with vectors='float3"),
    ):
        store.search(A, query="automobile")


def test_reembed_continues_after_failure(tmp_path: Path) -> None:
    """After a failure, finished items stay finished; text search finds all items meanwhile."""
    with BACKENDS["file"](tmp_path) as store:
        for n in range(600):
            store.put(A, f"k{n}", {"text": f"word{n} tea"})
    other = make_other_embedder("other")

    def start_failing(done: int, of: int | None) -> None:
        other.failing = True

    with BACKENDS["file"](tmp_path, index={"embed": other, "dims": DIMS}) as store:
        with pytest.raises(EmbeddingFailed):
            store.reembed(start_failing)
        meanwhile = len(store.search(A, query="tea", mode="text", limit=1000))
        other.failing = False
        half = len(other.calls)
        progress_calls: list[tuple[int, int | None]] = []
        rest = asyncio.run(store.areembed(lambda done, of: progress_calls.append((done, of))))
        results = store.search(A, query="word7", mode="semantic", limit=1)

    assert meanwhile == 600
    assert 0 < rest < 600
    assert progress_calls[-1] == (rest, rest)
    assert len(other.calls) > half
    assert results[0].score is not None


@pytest.mark.parametrize("backend", ["file", "sealed"])
@pytest.mark.parametrize("with_provenance", [False, True])
def test_items_not_yet_reembedded_are_found_by_words_only(
    backend: str, with_provenance: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Items without new vectors are counted as pending, logged once, and ranked last."""

    def make_item_provenance(n: int) -> Provenance | None:
        return Provenance("t", actor="Ann", position=n) if with_provenance else None

    with BACKENDS[backend](tmp_path) as store:
        for n in range(300):
            store.put(A, f"k{n}", {"text": f"word{n} tea"}, provenance=make_item_provenance(n))
        store.put(A, "bare", {"n": None})
    other = make_other_embedder("other")

    def start_failing(done: int, of: int | None) -> None:
        other.failing = True

    with BACKENDS[backend](tmp_path, index={"embed": other, "dims": DIMS}) as store:
        with pytest.raises(EmbeddingFailed):
            store.reembed(start_failing)
        other.failing = False
        pending = store.stats().pending
        for n in (299, 7):  # k299 has no new vector, k7 has one
            results = store.search(A, query=f"word{n}", mode="semantic", limit=301)
            assert {f"k{n}" for n in range(256, 300)} == set(list_item_keys(results[-pending:]))
            assert [0] * pending == [item.score for item in results[-pending:]]
        by_words = list_item_keys(store.search(A, query="word299", limit=1))
        warnings = [
            r.getMessage() for r in caplog.records if "only by their words" in r.getMessage()
        ]
        past = store.search(A, query="tea", as_of=results[0].valid_from)
        done, pending_after = store.reembed(), store.stats().pending
        first = list_item_keys(store.search(A, query="word299", mode="semantic", limit=1))

    assert (pending, pending_after) == (44, 0)
    assert len(warnings) == 1
    assert warnings[0].startswith("44 of 300 items can be found only by their words")
    assert by_words == first == ["k299"]
    assert done >= pending
    assert past


def test_writes_during_reembed_are_kept(tmp_path: Path) -> None:
    """Puts, replacements and deletions between the batches of reembed() keep their effect."""
    with BACKENDS["file"](tmp_path) as store:
        for n in range(600):
            store.put(A, f"k{n}", {"text": f"tea {n}"})
    other = make_other_embedder("other")
    with BACKENDS["file"](tmp_path, index={"embed": other, "dims": DIMS}) as store:

        def write_between_batches(done: int, of: int | None) -> None:
            store.delete(A, "k599")
            store.put(A, "k598", {"text": "my car"})
            store.search(A, query="tea")

        store.reembed(write_between_batches)
        results = store.search(A, query="automobile", mode="semantic", limit=1)
        all_keys = list_item_keys(store.search(A, query="tea", mode="semantic", limit=1000))

    assert list_item_keys(results) == ["k598"]
    assert sorted(f"k{n}" for n in range(599)) == sorted(all_keys)


class CountingConnection(sqlite3.Connection):
    """A connection class that counts all statements of its instances."""

    count = 0

    def execute(self, *args: Any) -> sqlite3.Cursor:
        type(self).count += 1
        return super().execute(*args)


def test_search_loads_vectors_of_other_process_in_few_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of statements does not grow with the number of new vectors."""
    monkeypatch.setattr(
        "perdure.stores.search.index_cache._PAGE_ROWS", 100
    )  # small pages, so that several are read
    store, words = open_store_with_words("file", tmp_path)
    with store:
        put_texts(store, A, first="milk")
        words.failing = True
        store.batch([PutOp(A, f"k{n}", {"text": f"word{n}"}) for n in range(800)])
        options = make_options(read_only=True, connections=CountingConnection)
        with open_store(tmp_path / "plain.db", **options) as other_store:
            other_store.search(A, query="milk")
            words.failing = False
            done = store.embed_pending()
            before = CountingConnection.count
            results = other_store.search(A, query="word7", mode="semantic", limit=1000)
            used = (
                CountingConnection.count - before - len(results)
            )  # each result is read with its own statement

    assert done == 800
    assert "k7" in list_item_keys(results[:3])  # some words share an axis of the vectors
    assert used <= 30


def test_reembed_without_embedder_raises(tmp_path: Path) -> None:
    """Without an embedder, reembed() raises an error and embed_pending() does nothing."""
    with SQLiteStore.open(tmp_path / "x.db", index=None) as store:
        put_texts(store, A, a="tea")
        with pytest.raises(ConfigurationError, match="embedder"):
            store.reembed()
    with BACKENDS["memory"](tmp_path) as store:
        assert store.embed_pending() == 0


@pytest.mark.parametrize(
    "index",
    ["online", 7, {}, {"dims": 3}, {"embed": 3}, {"embed": WordEmbedder(), "dims": 3}]
    + [{"embed": WordEmbedder(), "fields": fields} for fields in ("text", [""], [1], 3)],
    ids=repr,
)
def test_open_refuses_invalid_index_configuration(index: Any, tmp_path: Path) -> None:
    """An invalid configuration is refused before the file is created."""
    with pytest.raises(ConfigurationError):
        SQLiteStore.open(tmp_path / "x.db", index=index)

    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize("index", [True, "text", [1], [""], {"a": 1}, 7], ids=repr)
def test_put_refuses_invalid_index_argument(index: Any, file_store: SQLiteStore) -> None:
    """An invalid `index` of a put is refused, and nothing is written."""
    with pytest.raises(ConfigurationError, match="index"):
        file_store.put(A, "k", {"text": "tea"}, index=index)

    assert file_store.get(A, "k") is None

"""What a store does with embedders that fail, differ, change, and with texts longer than theirs."""

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
from tests.store_backends import BACKENDS, DIMS, Words, keys, of_words, open_store, write

A = ("a",)


def opened(path: Path, embed: Any, dims: int | None = None, **options: Any) -> SQLiteStore:
    """A store with an embedder."""
    return SQLiteStore.open(
        path, index={"embed": embed, "dims": dims}, synchronous="normal", **options
    )


def with_words(backend: str, folder: Path) -> tuple[SQLiteStore, Words]:
    options = of_words()
    return BACKENDS[backend](folder, **options), options["index"]["embed"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("door", ["blocking", "awaited"])
def test_an_embedder_that_fails(backend: str, door: str, tmp_path: Path) -> None:
    """The item is stored, found by its words, listed as pending, and embedded later."""
    store, words = with_words(backend, tmp_path)
    with store:
        write(store, A, before="a dog")
        words.failing = True
        if door == "awaited":
            asyncio.run(store.aput(A, "k", {"text": "my car"}))
        else:
            store.put(A, "k", {"text": "my car"})
        stored = store.get(A, "k")
        by_words = keys(store.search(A, query="car", mode="text"))
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
    assert [(each.namespace, each.key, each.attempts) for each in pending] == [(A, "k", 1)]
    assert "the model is away" in pending[0].error
    assert elsewhere == []
    assert done == 1
    assert keys(by_vector) == ["k"]


def test_the_next_put_embeds_what_waits(tmp_path: Path) -> None:
    """Once the embedder answers again, items that wait get their vectors on the way."""
    store, words = with_words("file", tmp_path)
    with store:
        words.failing = True
        write(store, A, a="my car", b="my dog", c="gone soon", d="replaced soon")
        store.delete(A, "c")
        words.failing = False
        write(store, A, d="a house")
        pending = store.pending_embeddings()
        found = keys(store.search(A, query="automobile", mode="semantic", limit=1))

    assert pending == []
    assert found == ["a"]


class Meddling(Words):
    """Does something else before it embeds."""

    before: Callable[[], object] = staticmethod(lambda: None)

    def embed(self, texts: Sequence[str]) -> Any:
        self.before()
        return super().embed(texts)


def test_only_present_versions_wait(tmp_path: Path) -> None:
    """Of versions that one transaction closes again, and of what goes meanwhile, none waits."""
    words = Meddling()
    lines = [
        json.dumps({"namespace": ["i"], "key": "k", "value": {"text": f"{n}"}, "version": n})
        for n in (1, 2, 3)
    ]

    async def put_at_once() -> None:
        await asyncio.gather(*(store.aput(A, "k", {"text": f"tea {n}"}) for n in range(3)))

    with opened(tmp_path / "x.db", words) as store:
        words.failing = True
        asyncio.run(put_at_once())
        store.import_lines(lines)
        waiting, counted = len(store.pending_embeddings()), store.stats().pending

        words.before = lambda: store.delete(A, "k")
        with pytest.raises(EmbeddingFailed):
            store.embed_pending()
        left = store.stats().pending

    assert (waiting, counted, left) == (2, 2, 1)


def test_pending_after_reopening(tmp_path: Path) -> None:
    """What waits is remembered in the file, whoever opens it."""
    store, words = with_words("file", tmp_path)
    with store:
        words.failing = True
        write(store, A, a="my car")
    store, words = with_words("file", tmp_path)
    with store:
        waiting = store.pending_embeddings()
        done = store.embed_pending()
        found = keys(store.search(A, query="automobile", mode="semantic"))

    assert [(each.key, each.attempts) for each in waiting] == [("a", 1)]
    assert done == 1
    assert found == ["a"]


ANSWERS: dict[str, Any] = {
    "too few": lambda texts: [[1.0, 0.0]] * (len(texts) - 1),
    "too many": lambda texts: [[1.0, 0.0]] * (len(texts) + 1),
    "other dims": lambda texts: [[1.0, 0.0, 0.0]] * len(texts),
    "ragged": lambda texts: [[1.0] * (2 + n % 2) for n, _ in enumerate(texts)],
    "nan": lambda texts: [[float("nan"), 0.0]] * len(texts),
    "infinite": lambda texts: np.full((len(texts), 2), np.inf),
    "no numbers": lambda texts: [["a", "b"]] * len(texts),
    "nothing": lambda texts: None,
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_wrong_answers(answer: str, tmp_path: Path) -> None:
    """An answer of the wrong count, dimension or numbers is stored nowhere; the item is."""
    with opened(tmp_path / "x.db", ANSWERS[answer], 2) as store:
        store.put(A, "k", {"text": "tea", "more": ["milk"]}, index=["text", "more[*]"])
        pending = store.pending_embeddings()
        found = keys(store.search(A, query="tea", mode="text"))
        if answer != "ragged":  # one vector alone is not
            with pytest.raises(EmbeddingFailed):
                store.search(A, query="tea", mode="semantic")

    assert ["k"] == found == keys(pending)
    assert "returned" in pending[0].error


def renamed(name: str, dims: int = DIMS) -> Words:
    """The same under another name, or with other dimensions."""

    class Other(Words):
        @staticmethod
        def vector(text: str) -> Any:
            return np.resize(Words.vector(text), dims)

    other = Other()
    other.name, other.dims = name, dims
    return other


@pytest.mark.parametrize(
    ("name", "dims"), [("other", DIMS), ("words", 2 * DIMS), ("other", 2 * DIMS)]
)
@pytest.mark.parametrize("backend", ["file", "sealed"])
def test_another_model(backend: str, name: str, dims: int, tmp_path: Path) -> None:
    """Another model or dimension is an error that says what to do; reembed() does it."""
    with BACKENDS[backend](tmp_path) as store:
        write(store, A, a="my car", b="the sea")
    other = renamed(name, dims)
    with BACKENDS[backend](tmp_path, index={"embed": other, "dims": dims}) as store:
        with pytest.raises(EmbedderMismatch, match=r"words.*reembed"):
            store.search(A, query="automobile")
        with pytest.raises(EmbedderMismatch):
            store.put(A, "c", {"text": "new"})
        text = keys(store.search(A, query="car", mode="text"))
        seen: list[tuple[int, int | None]] = []
        done = store.reembed(lambda now, of: seen.append((now, of)))
        store.put(A, "c", {"text": "new"})
        found = keys(store.search(A, query="automobile", mode="semantic", limit=1))
        again = store.reembed()
    with (
        BACKENDS[backend](tmp_path) as store,
        pytest.raises(EmbedderMismatch),
    ):
        store.search(A, query="automobile")

    assert text == ["a"]
    assert done == 2
    assert seen == [(2, 2)]
    assert found == ["a"]
    assert again == 0


def test_vectors_stored_in_another_way(tmp_path: Path) -> None:
    """It is the option that differs, not the embedder, and the error says which."""
    with BACKENDS["file"](tmp_path, vectors="float32") as store:
        write(store, A, a="my car")
    with BACKENDS["file"](tmp_path) as store:
        assert keys(store.search(A, query="automobile")) == ["a"]  # unless it is given
    with (
        BACKENDS["file"](tmp_path, vectors="int8") as store,
        pytest.raises(EmbedderMismatch, match=r"with vectors='int8': open it with vectors='float3"),
    ):
        store.search(A, query="automobile")


def test_reembedding_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Cut off by a failure, what is done stays done; meanwhile text search finds everything."""
    with BACKENDS["file"](tmp_path) as store:
        for n in range(600):
            store.put(A, f"k{n}", {"text": f"word{n} tea"})
    other = renamed("other")

    def stop(done: int, of: int | None) -> None:
        other.failing = True

    with BACKENDS["file"](tmp_path, index={"embed": other, "dims": DIMS}) as store:
        with pytest.raises(EmbeddingFailed):
            store.reembed(stop)
        meanwhile = len(store.search(A, query="tea", mode="text", limit=1000))
        other.failing = False
        half = len(other.calls)
        seen: list[tuple[int, int | None]] = []
        rest = asyncio.run(store.areembed(lambda done, of: seen.append((done, of))))
        found = store.search(A, query="word7", mode="semantic", limit=1)

    assert meanwhile == 600
    assert 0 < rest < 600
    assert seen[-1] == (rest, rest)
    assert len(other.calls) > half
    assert found[0].score is not None


@pytest.mark.parametrize("backend", ["file", "sealed"])
@pytest.mark.parametrize("threaded", [False, True])
def test_what_reembedding_has_not_come_to(
    backend: str, threaded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut off, it leaves items that words alone find: counted, told once, and ranked last."""

    def whence(n: int) -> Provenance | None:
        return Provenance("t", actor="Ann", position=n) if threaded else None

    with BACKENDS[backend](tmp_path) as store:
        for n in range(300):
            store.put(A, f"k{n}", {"text": f"word{n} tea"}, provenance=whence(n))
        store.put(A, "bare", {"n": None})
    other = renamed("other")

    def stop(done: int, of: int | None) -> None:
        other.failing = True

    with BACKENDS[backend](tmp_path, index={"embed": other, "dims": DIMS}) as store:
        with pytest.raises(EmbeddingFailed):
            store.reembed(stop)
        other.failing = False
        left = store.stats().pending
        for n in (299, 7):  # without a vector, with one
            found = store.search(A, query=f"word{n}", mode="semantic", limit=301)
            assert {f"k{n}" for n in range(256, 300)} == set(keys(found[-left:]))
            assert [0] * left == [item.score for item in found[-left:]]
        by_words = keys(store.search(A, query="word299", limit=1))
        told = [r.getMessage() for r in caplog.records if "their words only" in r.getMessage()]
        past = store.search(A, query="tea", as_of=found[0].valid_from)
        done, rest = store.reembed(), store.stats().pending
        first = keys(store.search(A, query="word299", mode="semantic", limit=1))

    assert (left, rest) == (44, 0)
    assert len(told) == 1
    assert told[0].startswith("44 of 300 items are found by their words only")
    assert by_words == first == ["k299"]
    assert done >= left
    assert past


def test_reembedding_while_others_write(tmp_path: Path) -> None:
    """Puts, replacements and deletions between its batches keep their meaning."""
    with BACKENDS["file"](tmp_path) as store:
        for n in range(600):
            store.put(A, f"k{n}", {"text": f"tea {n}"})
    other = renamed("other")
    with BACKENDS["file"](tmp_path, index={"embed": other, "dims": DIMS}) as store:

        def meddle(done: int, of: int | None) -> None:
            store.delete(A, "k599")
            store.put(A, "k598", {"text": "my car"})
            store.search(A, query="tea")

        store.reembed(meddle)
        found = store.search(A, query="automobile", mode="semantic", limit=1)
        every = keys(store.search(A, query="tea", mode="semantic", limit=1000))

    assert keys(found) == ["k598"]
    assert sorted(f"k{n}" for n in range(599)) == sorted(every)


class Counted(sqlite3.Connection):
    """Counts the statements of all its kind."""

    count = 0

    def execute(self, *args: Any) -> sqlite3.Cursor:
        type(self).count += 1
        return super().execute(*args)


def test_searching_while_others_embed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes in the vectors made meanwhile with a few statements, however many lack."""
    monkeypatch.setattr("perdure.stores.indexes._PAGE_ROWS", 100)  # so that there are several pages
    store, words = with_words("file", tmp_path)
    with store:
        write(store, A, first="milk")
        words.failing = True
        store.batch([PutOp(A, f"k{n}", {"text": f"word{n}"}) for n in range(800)])
        options = of_words(read_only=True, connections=Counted)
        with open_store(tmp_path / "plain.db", **options) as other:
            other.search(A, query="milk")
            words.failing = False
            done = store.embed_pending()
            before = Counted.count
            found = other.search(A, query="word7", mode="semantic", limit=1000)
            used = Counted.count - before - len(found)  # each result is read by itself

    assert done == 800
    assert "k7" in keys(found[:3])  # some words share an axis
    assert used <= 30


def test_no_embedder_to_embed_with(tmp_path: Path) -> None:
    """Without an embedder there is nothing to reembed with, and the error says so."""
    with SQLiteStore.open(tmp_path / "x.db", index=None) as store:
        write(store, A, a="tea")
        with pytest.raises(ConfigurationError, match="embedder"):
            store.reembed()
    with BACKENDS["memory"](tmp_path) as store:
        assert store.embed_pending() == 0


@pytest.mark.parametrize(
    "index",
    ["online", 7, {}, {"dims": 3}, {"embed": 3}, {"embed": Words(), "dims": 3}]
    + [{"embed": Words(), "fields": fields} for fields in ("text", [""], [1], 3)],
    ids=repr,
)
def test_configurations_that_make_no_sense(index: Any, tmp_path: Path) -> None:
    """A wrong configuration is refused before the file is made."""
    with pytest.raises(ConfigurationError):
        SQLiteStore.open(tmp_path / "x.db", index=index)

    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize("index", [True, "text", [1], [""], {"a": 1}, 7], ids=repr)
def test_indexes_of_a_put_that_make_no_sense(index: Any, plain: SQLiteStore) -> None:
    """A wrong `index` of a put is refused, and nothing is written."""
    with pytest.raises(ConfigurationError, match="index"):
        plain.put(A, "k", {"text": "tea"}, index=index)

    assert plain.get(A, "k") is None

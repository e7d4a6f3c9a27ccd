"""Forgetting: what is left in the files, in threads, and with other processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import HumanMessage
from langgraph.store.base import PutOp

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.storage.flow import fetch_rows
from perdure.stores import Provenance, SQLiteStore, indexes
from perdure.stores.vectors import encode_vectors
from tests.backends import KEY
from tests.contracts.puts import put, read_history_texts
from tests.store_backends import Clock, keys, of_words
from tests.stores.erasing import (
    ALICE,
    BOB,
    SECRETS,
    Dense,
    collect_traces,
    fill_store,
    make_provenance,
    open_dense_store,
    read_all_bytes,
)

FILES = ("file", "sealed", "keyed")
PATIENCE_S = 60.0


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of a namespace is written whenever a search found something new."""
    monkeypatch.setattr(indexes, "_is_worth_saving", lambda unsaved, items: unsaved > 0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("backend", FILES)
def test_no_byte_is_left(backend: str, tmp_path: Path, clock: Clock) -> None:
    """No value, word, stem or vector, in clear or as it was encrypted, nor any key's name."""
    embedder = Dense()
    secret = Dense().embed(["zorbaxing horses were running"]).astype("<f4").tobytes()
    with open_dense_store(backend, tmp_path, clock, embedder) as store:
        fill_store(store, clock, embedder)
        store.search((), query="horse")
        store.put(BOB, "late", {"text": "tea"})  # after the words were handed over
        path = Path(store.database.path)
        told = [*collect_traces(path, ALICE), b"unsearched", b"alice\0deep", secret]
        before = [part for part in told if part in read_all_bytes(tmp_path)]
        receipt = store.forget(ALICE)
        during = [part for part in told if part in read_all_bytes(tmp_path)]
        found = keys(store.search((), query="horse"))
    after = [part for part in told if part in read_all_bytes(tmp_path)]

    assert receipt.clean
    assert len(before) > 15
    assert [] == during == after
    assert "near" in found


class Forgetful(Dense):
    """Forgets what it embeds, if it is told where."""

    store: SQLiteStore | None = None

    def embed(self, texts: Sequence[str]) -> Any:
        if self.store is not None and SECRETS[0] in texts:
            assert self.store.forget(ALICE).clean
        return super().embed(texts)


@pytest.mark.parametrize("again", ["embed_pending", "reembed"])
def test_vectors_that_were_being_made(again: str, tmp_path: Path, clock: Clock) -> None:
    """What is forgotten while its vectors are made gets none."""
    embedder = Forgetful()
    secret = encode_vectors(Dense().embed([SECRETS[0]]).astype(np.float32), "int8")
    embedder.failing = again == "embed_pending"
    with open_dense_store("file", tmp_path, clock, embedder) as store:
        store.put(ALICE, "k", {"text": SECRETS[0]})
    embedder.failing = False
    embedder.name = Dense.name if again == "embed_pending" else "other"
    with open_dense_store("file", tmp_path, clock, embedder) as store:
        embedder.store = store
        getattr(store, again)()
        left = read_all_bytes(tmp_path)
        rows = store.database.read(lambda: fetch_rows("SELECT count(*) FROM store_search_data"))

    assert rows == [(0,)]
    assert secret not in left


def test_what_was_forgotten_while_a_search_began(tmp_path: Path, clock: Clock) -> None:
    """A search of the past does not answer it either, if its query took long to embed."""
    embedder = Forgetful()
    with open_dense_store("file", tmp_path, clock, embedder) as store:
        store.put(ALICE, "k", {"text": SECRETS[0]})
        store.put(BOB, "k", {"text": SECRETS[0]})
        embedder.store = store
        found = store.search((), query=SECRETS[0], as_of=clock.at())

    assert [item.namespace for item in found] == [BOB]


@pytest.mark.parametrize("backend", FILES)
def test_no_byte_is_left_by_ways_past(backend: str, tmp_path: Path, clock: Clock) -> None:
    """Nor of what was closed, dropped, swept, embedded again, or lay in large values."""
    embedder = Dense()
    long = " ".join(f"{secret}{n}" for n in range(900) for secret in SECRETS)
    with open_dense_store(backend, tmp_path, clock, embedder) as store:
        fill_store(store, clock, embedder)
        store.put(ALICE, "long", {"text": long})
        store.put(ALICE, "long", {"text": f"short {SECRETS[0]}"})
        store.delete(ALICE, "long")
        store.sweep_ttl()
        if backend == "file":
            store.create_index("text")
        told = [*collect_traces(Path(store.database.path), ALICE), *(s.encode() for s in SECRETS)]
        receipt = store.forget(query=SECRETS[0]), store.forget(ALICE)
        during = [part[:40] for part in told if part in read_all_bytes(tmp_path)]

    assert during == []
    assert [each.clean for each in receipt] == [True, True]


def messages(saver: SQLiteCheckpointer, thread: str, *ids: str) -> None:
    put(
        saver,
        {"messages": [HumanMessage(f"{thread} {uid} zorbaxing", id=uid) for uid in ids]},
        thread=thread,
    )


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("door", ["forget", "aforget"])
def test_messages_go_with_their_items(door: str, key: bytes | None, tmp_path: Path) -> None:
    """Messages that provenance names leave their threads, of closed versions too; others stay."""
    path = tmp_path / "x.db"
    with (
        SQLiteCheckpointer.open(path, key=key) as saver,
        SQLiteStore.open(path, key=key, **of_words(synchronous="full")) as store,
    ):
        messages(saver, "t", "m0", "m1", "m2", "m3")
        messages(saver, "b", "m0")
        messages(saver, "whole", "m0", "m1")
        store.put(
            ALICE, "k", {"text": "zorbaxing"}, provenance=make_provenance("t", "m0", "unknown")
        )
        store.put(ALICE, "k", {"text": "horse"}, provenance=make_provenance("t", "m2"))
        store.put(
            ALICE, "nowhere", {"text": "x"}, provenance=make_provenance("no such thread", "m0")
        )
        store.put(ALICE, "threadless", {"text": "x"}, provenance=Provenance(message_ids=("m3",)))
        store.put(ALICE, "unspecific", {"text": "x"}, provenance=Provenance(thread_id="b"))
        store.put(BOB, "k", {"text": "horse"}, provenance=make_provenance("t", "m3"))
        asked: dict[str, Any] = {"checkpointer": saver, "threads": ["whole"]}
        rehearsed = store.forget(ALICE, dry_run=True, **asked)
        there = (
            read_history_texts(saver, "t"),
            read_history_texts(saver, "b"),
            read_history_texts(saver, "whole"),
        )
        if door == "forget":
            receipt = store.forget(ALICE, **asked)
        else:
            receipt = asyncio.run(store.aforget(ALICE, **asked))
        left = read_history_texts(saver, "t"), read_history_texts(saver, "b")
        threads = {info.thread_id for info in saver.threads()}
        bytes_ = read_all_bytes(tmp_path)

    assert [len(each) for each in there] == [4, 1, 2]
    assert left == (["t m1 zorbaxing", "t m3 zorbaxing"], ["b m0 zorbaxing"])
    assert {"t", "b"} == threads
    assert ("no such thread", "t", "whole") == receipt.threads == rehearsed.threads
    assert receipt.clean
    assert receipt.messages >= 4
    for gone in (b"t m0 zorb", b"t m2 zorb", b"whole m0"):
        assert gone not in bytes_


def test_only_threads(tmp_path: Path) -> None:
    """Threads alone go whole, and no item."""
    path = tmp_path / "x.db"
    with (
        SQLiteCheckpointer.open(path) as saver,
        SQLiteStore.open(path, **of_words(synchronous="full")) as store,
    ):
        messages(saver, "t", "m0")
        messages(saver, "b", "m0")
        store.put(ALICE, "k", {"text": "tea"}, provenance=make_provenance("b", "m0"))
        rehearsed = store.forget(threads=["t"], checkpointer=saver, dry_run=True)
        receipt = store.forget(threads=["t"], checkpointer=saver)
        left, items = read_history_texts(saver, "b"), keys(store.search(()))
        threads = [info.thread_id for info in saver.threads()]
        with pytest.raises(ConfigurationError, match="scoped"):
            store.scoped(ALICE).forget((), checkpointer=saver)

    assert (rehearsed.threads, rehearsed.items) == (("t",), 0)
    assert (receipt.threads, receipt.items, receipt.keys, receipt.clean) == (("t",), 0, (), True)
    assert (left, items, threads) == (["b m0 zorbaxing"], ["k"], ["b"])


def searcher(path: Path, pipe: Connection) -> None:
    """Another process, which answers queries with keys and with the texts it can read."""
    with SQLiteStore.open(path, **of_words()) as store:
        for query in iter(pipe.recv, None):
            modes: list[Any] = ["hybrid", "text", "semantic"]
            found = [store.search((), query=query, mode=mode, limit=99) for mode in modes]
            pipe.send([sorted(item.key for item in each if item.score) for each in found])


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_another_process_forgets_too(tmp_path: Path) -> None:
    """A process that has searched before finds nothing afterwards, and finds what is new."""
    path = tmp_path / "x.db"
    context = get_context("forkserver")
    context.set_forkserver_preload(["pytest", "perdure.stores", "tests.store_backends"])
    ours, theirs = context.Pipe()
    child = context.Process(target=searcher, args=(path, theirs), daemon=True)
    with SQLiteStore.open(path, **of_words()) as store:
        store.batch([PutOp(ALICE, f"k{n}", {"text": "zorbax"}) for n in range(3)])
        store.put(BOB, "other", {"text": "milk"})
        child.start()

        def asked(query: str) -> Any:
            ours.send(query)
            assert ours.poll(PATIENCE_S)
            return ours.recv()

        before = asked("zorbax")
        receipt = store.forget(query="zorbax")
        after = asked("zorbax")
        store.put(BOB, "new", {"text": "zorbax"})
        new, other = asked("zorbax"), asked("milk")
        ours.send(None)
        child.join(PATIENCE_S)

    assert before == [["k0", "k1", "k2"]] * 3
    assert (receipt.items, after, new) == (3, [[]] * 3, [["new"]] * 3)
    assert other == [["other"]] * 3

"""`forget`: what is left in files, in threads, and in other processes."""

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
from perdure.stores import Provenance, SQLiteStore
from perdure.stores.search import index_cache
from perdure.stores.search.vectors import encode_vectors
from tests.backends import KEY
from tests.contracts.puts import put, read_history_texts
from tests.store_backends import Clock, list_item_keys, make_options
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
def eager_index_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the index of a namespace whenever a search has read something new."""
    monkeypatch.setattr(index_cache, "_should_save_index_again", lambda unsaved, items: unsaved > 0)


@pytest.mark.usefixtures("eager_index_saving")
@pytest.mark.parametrize("backend", FILES)
def test_forget_leaves_no_byte_of_erased_items_in_the_file(
    backend: str, tmp_path: Path, clock: Clock
) -> None:
    """No value, word, stem, vector or key is left, neither in clear text nor encrypted."""
    embedder = Dense()
    secret = Dense().embed(["zorbaxing horses were running"]).astype("<f4").tobytes()
    with open_dense_store(backend, tmp_path, clock, embedder) as store:
        fill_store(store, clock, embedder)
        store.search((), query="horse")
        store.put(BOB, "late", {"text": "tea"})  # after the index was saved
        path = Path(store.database.path)
        traces = [*collect_traces(path, ALICE), b"unsearched", b"alice\0deep", secret]
        before = [part for part in traces if part in read_all_bytes(tmp_path)]
        receipt = store.forget(ALICE)
        during = [part for part in traces if part in read_all_bytes(tmp_path)]
        found_keys = list_item_keys(store.search((), query="horse"))
    after = [part for part in traces if part in read_all_bytes(tmp_path)]

    assert receipt.clean
    assert len(before) > 15
    assert [] == during == after
    assert "near" in found_keys


class ForgettingEmbedder(Dense):
    """An embedder that calls `forget` on `store`, if that is set, while it embeds a secret."""

    store: SQLiteStore | None = None

    def embed(self, texts: Sequence[str]) -> Any:
        if self.store is not None and SECRETS[0] in texts:
            assert self.store.forget(ALICE).clean
        return super().embed(texts)


@pytest.mark.parametrize("method", ["embed_pending", "reembed"])
def test_item_forgotten_during_embedding_gets_no_vector(
    method: str, tmp_path: Path, clock: Clock
) -> None:
    """An item that is erased while its vectors are computed does not get them afterwards."""
    embedder = ForgettingEmbedder()
    secret = encode_vectors(Dense().embed([SECRETS[0]]).astype(np.float32), "int8")
    embedder.failing = method == "embed_pending"
    with open_dense_store("file", tmp_path, clock, embedder) as store:
        store.put(ALICE, "k", {"text": SECRETS[0]})
    embedder.failing = False
    embedder.name = Dense.name if method == "embed_pending" else "other"
    with open_dense_store("file", tmp_path, clock, embedder) as store:
        embedder.store = store
        getattr(store, method)()
        remaining_bytes = read_all_bytes(tmp_path)
        rows = store.database.read(lambda: fetch_rows("SELECT count(*) FROM store_search_data"))

    assert rows == [(0,)]
    assert secret not in remaining_bytes


def test_past_search_omits_item_forgotten_while_query_is_embedded(
    tmp_path: Path, clock: Clock
) -> None:
    embedder = ForgettingEmbedder()
    with open_dense_store("file", tmp_path, clock, embedder) as store:
        store.put(ALICE, "k", {"text": SECRETS[0]})
        store.put(BOB, "k", {"text": SECRETS[0]})
        embedder.store = store
        results = store.search((), query=SECRETS[0], as_of=clock.at())

    assert [item.namespace for item in results] == [BOB]


@pytest.mark.parametrize("backend", FILES)
def test_forget_leaves_no_byte_of_closed_swept_or_large_values(
    backend: str, tmp_path: Path, clock: Clock
) -> None:
    """No byte is left of closed, dropped, swept or indexed versions, nor of large values."""
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
        traces = [*collect_traces(Path(store.database.path), ALICE), *(s.encode() for s in SECRETS)]
        receipts = store.forget(query=SECRETS[0]), store.forget(ALICE)
        during = [part[:40] for part in traces if part in read_all_bytes(tmp_path)]

    assert during == []
    assert [receipt.clean for receipt in receipts] == [True, True]


def put_messages(saver: SQLiteCheckpointer, thread: str, *ids: str) -> None:
    put(
        saver,
        {"messages": [HumanMessage(f"{thread} {uid} zorbaxing", id=uid) for uid in ids]},
        thread=thread,
    )


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("door", ["forget", "aforget"])
def test_forget_erases_messages_named_by_provenance_of_items(
    door: str, key: bytes | None, tmp_path: Path
) -> None:
    """Messages that any version's provenance names are removed from their threads; others stay."""
    path = tmp_path / "x.db"
    with (
        SQLiteCheckpointer.open(path, key=key) as saver,
        SQLiteStore.open(path, key=key, **make_options(synchronous="full")) as store,
    ):
        put_messages(saver, "t", "m0", "m1", "m2", "m3")
        put_messages(saver, "b", "m0")
        put_messages(saver, "whole", "m0", "m1")
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
        arguments: dict[str, Any] = {"checkpointer": saver, "threads": ["whole"]}
        dry_run_receipt = store.forget(ALICE, dry_run=True, **arguments)
        texts_before = (
            read_history_texts(saver, "t"),
            read_history_texts(saver, "b"),
            read_history_texts(saver, "whole"),
        )
        if door == "forget":
            receipt = store.forget(ALICE, **arguments)
        else:
            receipt = asyncio.run(store.aforget(ALICE, **arguments))
        texts_after = read_history_texts(saver, "t"), read_history_texts(saver, "b")
        threads = {info.thread_id for info in saver.threads()}
        bytes_ = read_all_bytes(tmp_path)

    assert [len(texts) for texts in texts_before] == [4, 1, 2]
    assert texts_after == (["t m1 zorbaxing", "t m3 zorbaxing"], ["b m0 zorbaxing"])
    assert {"t", "b"} == threads
    assert ("no such thread", "t", "whole") == receipt.threads == dry_run_receipt.threads
    assert receipt.clean
    assert receipt.messages >= 4
    for gone in (b"t m0 zorb", b"t m2 zorb", b"whole m0"):
        assert gone not in bytes_


def test_forget_of_threads_alone_erases_threads_and_no_items(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with (
        SQLiteCheckpointer.open(path) as saver,
        SQLiteStore.open(path, **make_options(synchronous="full")) as store,
    ):
        put_messages(saver, "t", "m0")
        put_messages(saver, "b", "m0")
        store.put(ALICE, "k", {"text": "tea"}, provenance=make_provenance("b", "m0"))
        dry_run_receipt = store.forget(threads=["t"], checkpointer=saver, dry_run=True)
        receipt = store.forget(threads=["t"], checkpointer=saver)
        remaining_texts, items = read_history_texts(saver, "b"), list_item_keys(store.search(()))
        threads = [info.thread_id for info in saver.threads()]
        with pytest.raises(ConfigurationError, match="scoped"):
            store.scoped(ALICE).forget((), checkpointer=saver)

    assert (dry_run_receipt.threads, dry_run_receipt.items) == (("t",), 0)
    assert (receipt.threads, receipt.items, receipt.keys, receipt.clean) == (("t",), 0, (), True)
    assert (remaining_texts, items, threads) == (["b m0 zorbaxing"], ["k"], ["b"])


def answer_queries(path: Path, pipe: Connection) -> None:
    """Run in another process: for each query from the pipe, send back the keys of each mode."""
    with SQLiteStore.open(path, **make_options()) as store:
        for query in iter(pipe.recv, None):
            modes: list[Any] = ["hybrid", "text", "semantic"]
            results = [store.search((), query=query, mode=mode, limit=99) for mode in modes]
            pipe.send([sorted(item.key for item in items if item.score) for items in results])


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_other_process_no_longer_finds_forgotten_items(tmp_path: Path) -> None:
    """A process that has searched before finds nothing after the erasure, and finds new items."""
    path = tmp_path / "x.db"
    context = get_context("forkserver")
    context.set_forkserver_preload(["pytest", "perdure.stores", "tests.store_backends"])
    ours, theirs = context.Pipe()
    child = context.Process(target=answer_queries, args=(path, theirs), daemon=True)
    with SQLiteStore.open(path, **make_options()) as store:
        store.batch([PutOp(ALICE, f"k{n}", {"text": "zorbax"}) for n in range(3)])
        store.put(BOB, "other", {"text": "milk"})
        child.start()

        def query_child(query: str) -> Any:
            ours.send(query)
            assert ours.poll(PATIENCE_S)
            return ours.recv()

        before = query_child("zorbax")
        receipt = store.forget(query="zorbax")
        after = query_child("zorbax")
        store.put(BOB, "new", {"text": "zorbax"})
        new, other = query_child("zorbax"), query_child("milk")
        ours.send(None)
        child.join(PATIENCE_S)

    assert before == [["k0", "k1", "k2"]] * 3
    assert (receipt.items, after, new) == (3, [[]] * 3, [["new"]] * 3)
    assert other == [["other"]] * 3

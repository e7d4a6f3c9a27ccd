"""Helpers for the tests of `forget`: a store with items in every state, and its raw bytes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from perdure.stores import Provenance, SQLiteStore
from perdure.stores.search.text import tokenize
from tests.store_backends import BACKENDS, Clock

ALICE, DEEP, BOB, NEAR = ("u", "alice"), ("u", "alice", "deep"), ("u", "bob"), ("u", "alicex")
DENSE = 16
SECRETS = [
    *("zorbaxing", "quimboes", "vexnorly", "hadlupped", "wizzocked", "trundlering", "plimsters"),
]


class Dense:
    """An embedder whose vectors have no zeros, so that their bytes are found nowhere by chance."""

    name = "dense"
    dims = DENSE
    in_process = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = False

    def embed(self, texts: Sequence[str]) -> Any:
        if self.failing:
            raise OSError("the model is away")
        self.calls += texts
        seeds = [zlib.crc32(text.encode()) for text in texts]
        return np.array([np.random.default_rng(seed).normal(size=DENSE) for seed in seeds])

    async def aembed(self, texts: Sequence[str]) -> Any:
        return self.embed(texts)


def open_dense_store(backend: str, folder: Path, clock: Clock, embedder: Dense) -> SQLiteStore:
    """Open a store of a backend that embeds with `embedder`."""
    return BACKENDS[backend](folder, clock=clock, index={"embed": embedder, "dims": DENSE})


def make_provenance(thread: str, *messages: str, actor: str | None = None) -> Provenance:
    return Provenance(thread_id=thread, message_ids=messages, actor=actor)


def fill_store(store: SQLiteStore, clock: Clock, embedder: Dense | None = None) -> None:
    """Put items of others and of Alice (old versions, deleted, expired, unsearchable, pending)."""
    for n, secret in enumerate(SECRETS[:3]):
        text = f"{secret} horses were running"
        store.put(
            ALICE, "versions", {"text": text, "n": n}, provenance=make_provenance("t", f"m{n}")
        )
        store.put(
            BOB,
            "versions",
            {"text": "tea and horses", "n": n},
            provenance=make_provenance("b", "b0"),
        )
        clock.forward()
    store.put(
        ALICE, "deleted", {"text": SECRETS[3], "n": 7}, provenance=make_provenance("t", "m0", "m7")
    )
    clock.forward()
    store.delete(ALICE, "deleted")
    store.put(ALICE, "expired", {"text": SECRETS[4]}, ttl=1, provenance=make_provenance("t2", "x"))
    clock.forward(120)
    store.put(ALICE, "unsearched", {"list": [{"word": SECRETS[5]}]}, index=False)
    store.put(DEEP, "deep", {"text": "a horse runs"}, provenance=Provenance(actor="Eve"))
    store.put(NEAR, "near", {"text": "they run with a horse", "n": 1})
    store.put(
        BOB, "other", {"text": "coffee", "n": 1}, provenance=make_provenance("t", actor="Eve")
    )
    store.put(BOB, "plain", {"text": "milk and tea"})
    if embedder is not None:
        embedder.failing = True
    store.put(ALICE, "pending", {"text": f"{SECRETS[6]} pending"})
    if embedder is not None:
        embedder.failing = False


def read_all_bytes(folder: Path) -> bytes:
    """Return the bytes of all files in a folder."""
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file())


def hash_values(*values: Any) -> tuple[str, ...]:
    """Return the hashes that a receipt should contain for these values."""
    texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]
    return tuple(sorted(hashlib.blake2b(t.encode(), digest_size=16).hexdigest() for t in texts))


def collect_traces(path: Path, namespace: Sequence[str]) -> list[bytes]:
    """Return bytes that reveal items under a namespace: cells of their rows, words and stems."""
    low = "".join(f"{label}\0" for label in namespace).encode()
    rows = (
        "SELECT {} FROM {} JOIN store_namespaces n USING (namespace_key) "
        "WHERE n.path >= ? AND n.path < ?"
    )
    with closing(sqlite3.connect(path)) as db:
        cells: list[Any] = []
        bound = (low, low[:-1] + b"\1")
        cells += db.execute(rows.format("substr(body, -40)", "store_search_indexes"), bound)
        for table in ("store_items", "store_versions"):
            cells += db.execute(rows.format("value, provenance", table), bound)
            ids = [row for (row,) in db.execute(rows.format("id", table), bound)]
            marks = ", ".join("?" * len(ids))
            cells += db.execute(f"SELECT vectors FROM store_search_data WHERE id IN ({marks})", ids)
    long_cells = [cell for row in cells for cell in row if cell is not None and len(cell) > 8]
    words = [*SECRETS, *(token for secret in SECRETS for token in tokenize(secret))]
    return [text.encode() if isinstance(text, str) else text for text in [*long_cells, *words]]

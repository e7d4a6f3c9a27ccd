"""Compare the word index in memory with SQLite's FTS5, for one tenant among many.

    python benchmarks/text_index.py                     # 200,000 items, 1,000 to a namespace
    python benchmarks/text_index.py --items 50000

Every item is fifteen words drawn as a language draws them (Zipf); a query is four words of one item
of the namespace it is asked in. FTS5 has the porter tokenizer and ranks by its own bm25(). All
indexes are given the same namespaces and the same queries, one after the other, in one run. Times
are CPU times.
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from langgraph.store.base import PutOp

from perdure.stores import SQLiteStore
from perdure.stores.search.text import STOP_WORDS

VOCABULARY = Path(__file__).parent.parent / "stores" / "weights" / "static-en-256.vocab"
WORDS, SIZE, ASKED, QUERIES = 15, 1_000, 4, 200
Search = Callable[[str, list[str]], list[str]]

COLUMN = """SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words, 0.0, 1.0) LIMIT 10"""
JOIN = """SELECT words.rowid FROM words JOIN items ON items.id = words.rowid
WHERE words MATCH ? AND items.ns = ? ORDER BY bm25(words, 0.0, 1.0) LIMIT 10"""


def texts(count: int) -> Iterator[str]:
    """Yield the texts of items; each call yields the same ones."""
    draw = np.random.default_rng(1)
    words = [w for w in VOCABULARY.read_text("utf-8").splitlines() if re.fullmatch("[a-z]{3,}", w)]
    words = [word for word in words if word not in STOP_WORDS]
    draw.shuffle(words)
    chance = 1 / np.arange(10, len(words) + 10)
    for numbers in draw.choice(len(words), (count, WORDS), p=chance / chance.sum()):
        yield " ".join(words[number] for number in numbers)


def tenants(count: int) -> list[tuple[str, list[str]]]:
    """Return namespaces with their items."""
    every = list(texts(count))
    return [(f"u{at // SIZE}", every[at : at + SIZE]) for at in range(0, count, SIZE)]


def fts5(data: list[tuple[str, list[str]]]) -> sqlite3.Connection:
    """Create an FTS5 table with the namespace as a column, and a table to join it with."""
    db = sqlite3.connect(":memory:")
    db.execute(
        "CREATE VIRTUAL TABLE words USING fts5(ns, text, content='', tokenize='porter unicode61')"
    )
    db.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, ns TEXT)")
    db.execute("CREATE INDEX items_ns ON items (ns)")
    rows = ((ns, text) for ns, held in data for text in held)
    for number, (ns, text) in enumerate(rows):
        db.execute("INSERT INTO words (rowid, ns, text) VALUES (?, ?, ?)", (number, ns, text))
        db.execute("INSERT INTO items VALUES (?, ?)", (number, ns))
    db.execute("INSERT INTO words (words) VALUES ('optimize')")
    return db


def any_of(words: list[str]) -> str:
    return " OR ".join(f'"{word}"' for word in words)


def ways(db: sqlite3.Connection, store: SQLiteStore) -> dict[str, Search]:
    """Return the compared ways to find the ten best items of a namespace, by name."""

    def column(ns: str, words: list[str]) -> list[str]:
        match = f"ns : {ns} AND text : ({any_of(words)})"
        return [str(row) for (row,) in db.execute(COLUMN, (match,))]

    def join(ns: str, words: list[str]) -> list[str]:
        return [str(row) for (row,) in db.execute(JOIN, (f"text : ({any_of(words)})", ns))]

    def ours(ns: str, words: list[str]) -> list[str]:
        return [found.key for found in store.search((ns,), query=" ".join(words), mode="text")]

    return {"FTS5, namespace in MATCH": column, "FTS5, namespace joined": join, "perdure": ours}


def put_all(store: SQLiteStore, data: list[tuple[str, list[str]]]) -> None:
    number = 0
    for ns, held in data:
        store.batch(PutOp((ns,), str(number + at), {"text": text}) for at, text in enumerate(held))
        number += len(held)


def timed(searches: dict[str, Search], data: list[tuple[str, list[str]]]) -> None:
    """Run each query with every kind of search, and print the times of each kind."""
    draw = np.random.default_rng(2)
    took: dict[str, list[float]] = {name: [] for name in searches}
    for _ in range(QUERIES):
        ns, held = data[draw.integers(len(data))]
        words = list(draw.choice(held[draw.integers(len(held))].split(), ASKED, replace=False))
        for name, search in searches.items():
            began = time.process_time()
            search(ns, words)
            took[name].append((time.process_time() - began) * 1e3)
    for name, each in took.items():
        p50, p95 = np.quantile(each, (0.5, 0.95))
        print(f"{name:26} p50 {p50:7.2f} ms   p95 {p95:7.2f} ms")


def first_search(path: Path) -> float:
    """Return the CPU seconds from opening a file to its first search result."""
    began = time.process_time()
    with SQLiteStore.open(path, index=None) as store:
        store.search(("u0",), query="nothing", mode="text")
    return time.process_time() - began


def one_tenant_and_another() -> None:
    """Show how another tenant's items affect the ranking of one's own items."""
    mine = ("u0", ["apple pie", "cherry tart", "cherry jam"])
    theirs = ("u1", ["apple juice"] * 100 + ["plum cake"] * 200)
    for data in ([mine], [mine, theirs]):
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(fts5(data)) as db,
            SQLiteStore.open(Path(folder) / "two.db", index=None) as store,
        ):
            put_all(store, data)
            for name, search in ways(db, store).items():
                best = mine[1][int(search("u0", ["apple", "cherry"])[0])]
                whose = "alone" if len(data) == 1 else "with a neighbour"
                print(f"{name:26} {whose:18} {best!r} comes first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--loaded", type=int, default=100_000, help="items of the file to open")
    args = parser.parse_args()
    print(f"SQLite {sqlite3.sqlite_version}, {args.items:,} items, {SIZE:,} to a namespace")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.db"
        data = tenants(args.items)
        with SQLiteStore.open(path, index=None) as store, closing(fts5(data)) as db:
            put_all(store, data)
            store.search(("u0",), query="nothing", mode="text")
            timed(ways(db, store), data)
        path = Path(folder) / "loaded.db"
        with SQLiteStore.open(path, index=None) as store:
            put_all(store, data[: args.loaded // SIZE])
        for which in ("analysed", "read"):
            took = first_search(path)
            print(f"first search of {SIZE:,} of {args.loaded:,} items, {which}: {took:.2f} s")
    one_tenant_and_another()


if __name__ == "__main__":
    main()

"""Measure a search on Postgres in one large namespace, and in a small one among many.

    python benchmarks/postgres_search.py postgresql://postgres@127.0.0.1:5432/postgres
    python benchmarks/postgres_search.py DSN --sizes 10000,200000 --others 999000
    python benchmarks/postgres_search.py DSN --vectors 50000

Rows are loaded by COPY into a schema that is dropped at the end. For each size, the benchmark
measures the first search of all, which analyses the texts; the first search of another process, and
its later searches; a search after a put; and a search with a filter that one item in a hundred
matches. Texts have 15 words.

With `--vectors`, the benchmark instead searches vectors of 384 dimensions in 500 clusters with such
a filter, on SQLite, on Postgres, and with an HNSW index if the server has pgvector.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psycopg
from langgraph.store.base import PutOp
from many_items import Texts, memory_mb, spent, told

from perdure.stores import PostgresStore, SQLiteStore

SCHEMA = "perdure_search_benchmark"
SIZES = "1000,10000,50000,200000"
ASKED, QUERIES, PAGE = 6, 50, 10_000
NOW = 1_700_000_000_000_000


def namespace(size: int) -> tuple[str, str]:
    return "sized", str(size)


def rows(size: int, first: int) -> Iterator[tuple[Any, ...]]:
    texts = Texts(size)
    for start in range(first, size, PAGE):
        for number, text in enumerate(texts.made(min(PAGE, size - start), 15), start):
            value = {"text": text, "group": number % 100, "user": {"name": f"u{number % 1000}"}}
            body = b"\0" + json.dumps(value, separators=(",", ":")).encode()
            yield f"k{number}", NOW, len(body), body


def load(dsn: str, sizes: list[int], others: int) -> None:
    """Store one namespace of each size, and other namespaces of 1,000 items each."""
    with PostgresStore.open(dsn, schema=SCHEMA) as store:
        for size in sizes:
            store.put(namespace(size), "k0", {"text": "the first"})
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"SET search_path TO {SCHEMA}")
        for size in sizes:
            keys = conn.execute("SELECT namespace_key FROM store_namespaces ORDER BY 1").fetchall()
            namespace_key = keys[sizes.index(size)][0]
            sql = (
                "COPY store_items "
                "(namespace_key, key, version, created_at, valid_from, size, searchable, value) "
                "FROM STDIN"
            )
            with conn.cursor().copy(sql) as copy:
                for key, now, length, body in rows(size, 1):
                    copy.write_row((namespace_key, key, 1, now, now, length, True, body))
            conn.execute(
                "UPDATE store_namespaces SET item_count = %s, change_count = change_count + 1 "
                "WHERE namespace_key = %s",
                (size, namespace_key),
            )
        conn.execute(
            "INSERT INTO store_namespaces (path, item_count, change_count) "
            r"SELECT '\x6f7468657200' || convert_to(n::text, 'UTF8') || '\x00', 1000, 1 "
            "FROM generate_series(1, %s) AS n",
            (others // 1000,),
        )
        conn.execute(
            "INSERT INTO store_items "
            "(namespace_key, key, version, created_at, valid_from, size, searchable, value) "
            "SELECT n.namespace_key, 'k' || k, 1, i.created_at, i.valid_from, i.size, true, "
            "i.value "
            "FROM store_namespaces n CROSS JOIN generate_series(0, 999) AS k "
            "JOIN store_items i "
            "ON i.namespace_key = (SELECT min(namespace_key) FROM store_namespaces) "
            "AND i.key = 'k' || k WHERE n.path >= 'other' AND n.path < 'othes'"
        )
        conn.execute("VACUUM ANALYZE store_items, store_namespaces")


def visit(dsn: str, size: int) -> None:
    """Measure searches in a separate process."""
    texts = Texts(time.time_ns()).made(3 * QUERIES, ASKED)
    with PostgresStore.open(dsn, schema=SCHEMA) as store:
        store.get(namespace(size), "k0")
        before = memory_mb()
        within = namespace(size)
        out = {
            "first": spent(lambda n: store.search(within, query=texts[-1]), 1),
            "then": spent(lambda n: store.search(within, query=texts[n]), QUERIES),
        }

        def filtered(number: int) -> Any:
            return store.search(within, query=texts[QUERIES + number], filter={"group": number})

        def after_put(number: int) -> Any:
            store.put(within, f"new{number}", {"text": texts[number]})
            return store.search(within, query=texts[QUERIES + number])

        out["filter 1 %, with a query"] = spent(filtered, 10)
        out["filter 1 %, no query"] = spent(lambda n: store.search(within, filter={"group": n}), 10)
        out["list 10"] = spent(lambda n: store.search(within), 10)
        out["after a put"] = spent(after_put, 10)
        memory = memory_mb() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"took": out, "memory": memory, "peak": peak}))


# -- vectors under a filter


class Vectors:
    """An embedder for texts that are numbers; the last texts are queries."""

    name, dims, in_process = "random", 384, True

    def __init__(self, stored: int) -> None:
        draw = np.random.default_rng(7)
        centres = draw.standard_normal((500, self.dims), np.float32)
        rows = centres[draw.integers(0, 500, stored + QUERIES)]
        rows += 0.7 * draw.standard_normal(rows.shape, np.float32)
        self.rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def embed(self, texts: Sequence[str]) -> Any:
        return self.rows[[int(text) for text in texts]]

    async def aembed(self, texts: Sequence[str]) -> Any:
        return self.embed(texts)


def of_stores(dsn: str, stored: int) -> None:
    given = Vectors(stored)

    def recall(search: Callable[[int, int], list[int]]) -> tuple[float, dict[str, list[float]]]:
        found = dict[int, list[int]]()

        def call(number: int) -> None:
            found[number] = search(stored + number, number)

        took = spent(call, QUERIES)
        right = 0
        for number, keys in found.items():
            some = np.arange(number, stored, 100)
            best = np.argsort(-(given.rows[some] @ given.rows[stored + number]))[:10]
            right += len({*some[best].tolist()} & set(keys))
        return right / 10 / QUERIES, took

    with tempfile.TemporaryDirectory() as folder:
        options: Any = {"index": {"embed": given, "dims": given.dims, "fields": ["text"]}}
        for name, opened in {
            "SQLite": lambda: SQLiteStore.open(f"{folder}/v.db", **options),
            "Postgres": lambda: PostgresStore.open(dsn, schema=SCHEMA, **options),
        }.items():
            with opened() as store:
                for start in range(0, stored, 2_000):
                    store.batch(
                        PutOp(("v",), str(n), {"text": str(n), "group": n % 100})
                        for n in range(start, min(start + 2_000, stored))
                    )

                def search(text: int, group: int, store: Any = store) -> list[int]:
                    only = {"group": group}
                    found = store.search(("v",), query=str(text), mode="semantic", filter=only)
                    return [int(item.key) for item in found]

                search(0, 0)
                right, took = recall(search)
                told(f"{name}, recall at 10 {right:.3f}", took)
    with psycopg.connect(dsn, autocommit=True) as conn:
        of_pgvector(conn, given.rows, stored, recall)


def of_pgvector(conn: Any, rows: Any, stored: int, recall: Any) -> None:
    if not conn.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchall():
        return
    conn.execute(f"CREATE EXTENSION IF NOT EXISTS vector SCHEMA {SCHEMA}")
    conn.execute(f"SET search_path TO {SCHEMA}")
    conn.execute("SET maintenance_work_mem TO '1GB'")
    conn.execute(f"CREATE TABLE v (id bigint PRIMARY KEY, g int, e vector({rows.shape[1]}))")
    with conn.cursor().copy("COPY v FROM STDIN") as copy:
        for number in range(stored):
            copy.write_row((number, number % 100, str(rows[number].tolist())))
    began = time.perf_counter()
    conn.execute("CREATE INDEX ON v USING hnsw (e vector_cosine_ops)")
    conn.execute("VACUUM ANALYZE v")
    print(f"pgvector: HNSW built in {time.perf_counter() - began:.0f} s")
    ways = [("off", 40), ("strict_order", 40), ("relaxed_order", 40), ("relaxed_order", 400)]
    for scan, among in ways:
        conn.execute(f"SET hnsw.iterative_scan TO {scan}")
        conn.execute(f"SET hnsw.ef_search TO {among}")
        conn.execute("SET enable_seqscan TO off")

        def search(text: int, group: int) -> list[int]:
            sql = "SELECT id FROM v WHERE g = %s ORDER BY e <=> %s::vector LIMIT 10"
            return [n for (n,) in conn.execute(sql, (group, str(rows[text].tolist())))]

        search(0, 0)
        right, took = recall(search)
        told(f"pgvector {scan} {among}, {right:.3f}", took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dsn")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--others", type=int, default=999_000)
    parser.add_argument("--vectors", type=int)
    parser.add_argument("--visit", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.visit:
        visit(args.dsn, args.visit)
        return
    sizes = [int(size) for size in args.sizes.split(",")]
    drop = f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE"
    with psycopg.connect(args.dsn, autocommit=True) as conn:
        conn.execute(drop)
        try:
            if args.vectors:
                of_stores(args.dsn, args.vectors)
                return
            load(args.dsn, sizes, args.others)
            for size in sizes:
                command = [sys.executable, __file__, args.dsn, "--visit", str(size)]
                for which in ("ever", "of a process"):
                    found = json.loads(subprocess.check_output(command))
                    took = found["took"]
                    print(f"{size:,} items, {found['memory']:.0f} MB, peak {found['peak']:.0f} MB")
                    told(f"first search {which}", took.pop("first"))
                    for name, each in took.items():
                        told(name, each)
        finally:
            conn.execute(drop)


if __name__ == "__main__":
    main()

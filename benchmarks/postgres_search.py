"""What a search costs on Postgres: in one large namespace, and in a small one among many.

    python benchmarks/postgres_search.py postgresql://postgres@127.0.0.1:5432/postgres
    python benchmarks/postgres_search.py DSN --sizes 10000,200000 --others 999000

Rows are loaded by COPY into a schema that is dropped at the end. For each size: the first search
ever, which analyses the texts; the first of another process; those after it; one after a put; and
a search under a filter of which one item in a hundred has the value. Texts have 15 words.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from many_items import Texts, memory_mb, spent, told

from perdure.stores import PostgresStore

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
    """A namespace of each size, and others of 1,000 items."""
    with PostgresStore.open(dsn, schema=SCHEMA) as store:
        for size in sizes:
            store.put(namespace(size), "k0", {"text": "the first"})
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"SET search_path TO {SCHEMA}")
        for size in sizes:
            path = conn.execute("SELECT ns FROM store_namespaces ORDER BY ns").fetchall()
            ns = path[sizes.index(size)][0]
            sql = (
                "COPY store_items (ns, key, version, created_at, valid_from, size, searched, value)"
                " FROM STDIN"
            )
            with conn.cursor().copy(sql) as copy:
                for key, now, length, body in rows(size, 1):
                    copy.write_row((ns, key, 1, now, now, length, True, body))
            conn.execute(
                "UPDATE store_namespaces SET items = %s, changes = changes + 1 WHERE ns = %s",
                (size, ns),
            )
        conn.execute(
            "INSERT INTO store_namespaces (path, items, changes) "
            r"SELECT convert_to('other', 'UTF8') || '\x00' || convert_to(n::text, 'UTF8') || '\x00', 1000, 1 "
            "FROM generate_series(1, %s) AS n",
            (others // 1000,),
        )
        conn.execute(
            "INSERT INTO store_items "
            "(ns, key, version, created_at, valid_from, size, searched, value) "
            "SELECT n.ns, 'k' || k, 1, i.created_at, i.valid_from, i.size, true, i.value "
            "FROM store_namespaces n CROSS JOIN generate_series(0, 999) AS k "
            "JOIN store_items i ON i.ns = (SELECT min(ns) FROM store_namespaces) "
            "AND i.key = 'k' || k WHERE n.path >= 'other' AND n.path < 'othes'"
        )
        conn.execute("VACUUM ANALYZE store_items, store_namespaces")


def visit(dsn: str, size: int) -> None:
    """Search in a process of its own."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dsn")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--others", type=int, default=999_000)
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

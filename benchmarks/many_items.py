"""How the store's operations take to more items: milliseconds at each size.

    python benchmarks/many_items.py --items 1000 10000 100000

Items lie in 1,000 namespaces of ten organisations. Nothing is embedded here.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langgraph.store.base import PutOp

from perdure.stores import SQLiteStore

NAMESPACES, ORGS, BATCH = 1_000, 10, 100
WORDS = [
    "oil",
    "invoice",
    "server",
    "rollback",
    "quarter",
    "estimate",
    "python",
    "product",
    "owner",
    "day",
    "summary",
    "plan",
]


def namespace(number: int) -> tuple[str, str]:
    user = number % NAMESPACES
    return f"org{user % ORGS}", f"user{user}"


def value(number: int) -> dict[str, Any]:
    random_ = random.Random(number)
    return {
        "text": " ".join(random_.choices(WORDS, k=30)),
        "kind": random_.choice(["fact", "rule", "plan", "note"]),
        "score": random_.random(),
    }


def put(number: int) -> PutOp:
    return PutOp(namespace(number), f"k{number}", value(number))


def puts(start: int) -> list[PutOp]:
    return [put(number) for number in range(start, start + BATCH)]


def p50(call: Callable[[int], Any], times: int = 100) -> float:
    call(0)
    took = []
    for number in range(times):
        began = time.perf_counter()
        call(number)
        took.append((time.perf_counter() - began) * 1e3)
    return sorted(took)[times // 2]


def measured(store: SQLiteStore, size: int) -> dict[str, float]:
    for start in range(0, size, BATCH * 10):
        store.batch([put(number) for number in range(start, min(size, start + BATCH * 10))])

    def few(number: int) -> Any:
        return store.search((f"org{number % ORGS}",), filter={"score": {"$gte": 0.98}})

    out = {
        "put": p50(lambda n: store.put(namespace(n), f"new{n}", value(n))),
        "batch of 100": p50(lambda n: store.batch(puts(size + n * BATCH)), 20),
        "get": p50(lambda n: store.get(namespace(n), f"k{n}")),
        "filter, namespace": p50(lambda n: store.search(namespace(n), filter={"kind": "fact"})),
        "newest under a prefix": p50(lambda n: store.search((f"org{n % ORGS}",))),
        "filter (2 %), prefix": p50(few),
        "namespaces, a page": p50(lambda n: store.list_namespaces(prefix=(f"org{n % ORGS}",))),
    }
    store.create_index("score")
    out["the same with an index"] = p50(few)
    began = time.perf_counter()
    store.search((), query="oil")
    out["first query"] = (time.perf_counter() - began) * 1e3
    out["words, namespace"] = p50(lambda n: store.search(namespace(n), query="oil estimate"))
    out["words, prefix"] = p50(lambda n: store.search((f"org{n % ORGS}",), query="oil estimate"))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--items", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    sizes = parser.parse_args().items
    columns = []
    for size in sizes:
        with (
            tempfile.TemporaryDirectory() as folder,
            SQLiteStore.open(Path(folder) / "store.db", index=None) as store,
        ):
            columns.append(measured(store, size))
    print(f"{'p50, ms':24}", *(f"{size:>10,}" for size in sizes))
    for name in columns[0]:
        print(f"{name:24}", *(f"{column[name]:10.2f}" for column in columns))


if __name__ == "__main__":
    main()

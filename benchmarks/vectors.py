"""Measure vector search among many vectors: time, memory, and recall against exact search.

    python benchmarks/vectors.py --items 50000
    python benchmarks/vectors.py --items 1000000 --kind int8

The vectors lie in clusters, as those of texts do; a query lies near one of them.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perdure.stores import SQLiteStore

DIMS, CLUSTERS, SMALL = 384, 2_000, 1_000


class Made:
    """An embedder with synthetic vectors; the last word of a text is the seed of its vector."""

    name, dims, in_process = "made-up", DIMS, True

    def __init__(self) -> None:
        self.centres = np.random.default_rng(0).normal(size=(CLUSTERS, DIMS)).astype(np.float32)

    def embed(self, texts: Any) -> Any:
        out = np.empty((len(texts), DIMS), np.float32)
        for row, text in enumerate(texts):
            rng = np.random.default_rng(int(text.split()[-1]))
            out[row] = self.centres[rng.integers(CLUSTERS)] + rng.standard_normal(DIMS, np.float32)
        return out

    async def aembed(self, texts: Any) -> Any:
        return self.embed(texts)


def peak_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def resident_mb() -> float:
    """Return the current memory use where the system reports it; otherwise the peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_mb()
    return pages * resource.getpagesize() / 1e6


def items(count: int) -> Iterator[str]:
    for number in range(count):
        where = "small" if number % (count // SMALL) == 0 else "large"
        value = {"t": f"item {number}"}
        yield json.dumps({"namespace": [where], "key": str(number), "value": value})


def timed(
    store: SQLiteStore, prefix: tuple[str, ...], mode: Any, count: int
) -> tuple[float, list[set[str]]]:
    took, found = [], []
    for number in range(20):
        query = f"query {10**7 + number}"
        began = time.perf_counter()
        hits = store.search(prefix, query=query, mode=mode, limit=10)
        took.append((time.perf_counter() - began) * 1e3)
        found.append({hit.key for hit in hits})
    return sorted(took)[len(took) // 2], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--kind", default="float32", choices=("float32", "float16", "int8"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        options: Any = {"index": {"embed": Made(), "dims": DIMS}, "vectors": given.kind}
        began = time.perf_counter()
        with SQLiteStore.open(path, synchronous="normal", **options) as store:
            store.import_lines(items(given.items))
        print(f"{given.items:,} items put in {time.perf_counter() - began:.0f} s")
        before = resident_mb()
        began = time.perf_counter()
        with SQLiteStore.open(path, **options) as store:
            print(f"opened in {(time.perf_counter() - began) * 1e3:.0f} ms")
            began = time.perf_counter()
            store.search(("small",), query="item 1", mode="semantic")
            print(f"first search {time.perf_counter() - began:.1f} s, ", end="")
            print(f"index {resident_mb() - before:.0f} MB")
            for prefix in (("large",), ("small",)):
                for mode in ("semantic", "text", "hybrid"):
                    took, _ = timed(store, prefix, mode, given.items)
                    print(f"{prefix[0]:6} {mode:9} p50 {took:6.2f} ms")
            _, near = timed(store, ("large",), "semantic", given.items)
        with SQLiteStore.open(path, approximate_above=1 << 40, **options) as store:
            _, exact = timed(store, ("large",), "semantic", given.items)
            share = sum(len(a & b) for a, b in zip(near, exact, strict=True)) / (10 * len(exact))
            print(f"recall@10 against exact search {share:.3f}; peak {peak_mb():.0f} MB")


if __name__ == "__main__":
    main()

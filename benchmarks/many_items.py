"""Measure a search in a file with many namespaces, and in a namespace with many items.

    python benchmarks/many_items.py                      # 100,000 items
    python benchmarks/many_items.py --items 1000000
    python benchmarks/many_items.py --index none         # without vectors

A twentieth of the items is in one large namespace, the others are in namespaces of 100. Opening,
the first search and memory use are each measured in a separate process. The benchmark also searches
a namespace of 6,000 messages of 2 kB, and alternates puts and searches in it. CPU time is that of
the searching OS thread.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from langgraph.store.base import PutOp

from perdure.stores import SQLiteStore
from perdure.stores.search.text import STOP_WORDS

VOCABULARY = Path(__file__).parent.parent / "stores" / "weights" / "static-en-256.vocab"
SMALL, LARGE_SHARE, BATCH, ASKED, QUERIES = 100, 20, 2_000, 6, 100
LARGE = ("large",)
MESSAGES, MESSAGE_WORDS = 6_000, 350
Search = Callable[[int], Any]


class Texts:
    """Generates texts whose word frequencies follow Zipf's law."""

    def __init__(self, seed: int) -> None:
        lines = VOCABULARY.read_text("utf-8").splitlines()
        words = [w for w in lines if re.fullmatch("[a-z]{3,}", w) and w not in STOP_WORDS]
        np.random.default_rng(0).shuffle(words)
        self.words = np.array(words)
        chance = 1 / np.arange(10, len(words) + 10)
        self.chance = chance / chance.sum()
        self.draw = np.random.default_rng(seed)

    def made(self, count: int, length: int) -> list[str]:
        chosen = self.draw.choice(len(self.words), (count, length), p=self.chance)
        return [" ".join(row) for row in self.words[chosen]]


def small(number: int) -> tuple[str, str]:
    return "small", f"user{number}"


def memory_mb() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    # Return the peak if the system does not report the current use.
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return pages * resource.getpagesize() / 1e6


def load(store: SQLiteStore, items: int, length: int) -> None:
    """Fill a store in batches that cover several namespaces."""
    texts = Texts(1)
    large = items // LARGE_SHARE
    for start in range(0, items, BATCH):
        store.batch(
            PutOp(
                LARGE if number < large else small((number - large) // SMALL),
                f"k{number}",
                {"text": text},
            )
            for number, text in enumerate(texts.made(min(BATCH, items - start), length), start)
        )


def spent(call: Search, times: int) -> dict[str, list[float]]:
    """Return the milliseconds of each call, in wall time and CPU time."""
    out: dict[str, list[float]] = {"wall": [], "cpu": []}
    for number in range(times):
        began, cpu = time.perf_counter(), time.thread_time()
        call(number)
        out["wall"].append((time.perf_counter() - began) * 1e3)
        out["cpu"].append((time.thread_time() - cpu) * 1e3)
    return out


def told(name: str, took: dict[str, list[float]]) -> None:
    parts = [name.ljust(34)]
    for clock, each in took.items():
        p50, p95 = np.quantile(each, (0.5, 0.95))
        parts.append(f"{clock} p50 {p50:8.2f}  p95 {p95:8.2f} ms")
    print("   ".join(parts), flush=True)


def opened(path: str, index: str) -> SQLiteStore:
    options: Any = {"index": "offline" if index == "offline" else None}
    return SQLiteStore.open(path, synchronous="normal", **options)


# -- in a process of its own


def visit(path: str, index: str, which: str, namespaces: int) -> dict[str, Any]:
    """Measure opening a store, its first search and later searches."""
    texts = Texts(time.time_ns()).made(QUERIES + 1, ASKED)
    began = time.perf_counter()
    store = opened(path, index)
    out: dict[str, Any] = {"open": (time.perf_counter() - began) * 1e3}
    store.get(small(0), "none")
    before = memory_mb()
    first = LARGE if which == "large" else small(7 % namespaces)

    def search(number: int) -> Any:
        return store.search(first, query=texts[number])

    if which != "memory":
        out["first"] = spent(search, 1)
        out["then"] = spent(search, QUERIES)
    else:
        for number in range(100):
            store.search(small(number % namespaces), query=texts[number])
        out["memory"] = memory_mb() - before
    store.close()
    return out


def visits(path: str, index: str, which: str, namespaces: int, times: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--visit", path, index, which, str(namespaces)]
    return [json.loads(subprocess.check_output(command)) for _ in range(times)]


# -- all


def many(folder: str, items: int, index: str) -> None:
    path = os.path.join(folder, "many.db")
    namespaces = max((items - items // LARGE_SHARE) // SMALL, 1)
    print(f"{items:,} items: {namespaces:,} namespaces of {SMALL}, one of {items // LARGE_SHARE:,}")
    began = time.perf_counter()
    with opened(path, index) as store:
        load(store, items, 15)
    print(f"put in {time.perf_counter() - began:.0f} s, {os.path.getsize(path) / 1e6:.0f} MB")
    for which in ("small", "large"):
        [never] = visits(path, index, which, namespaces, 1)
        told(f"{which}: the first search ever", never["first"])
        times = visits(path, index, which, namespaces, 5)
        told(f"{which}: open", {"wall": [each["open"] for each in times]})
        for part in ("first", "then"):
            joined: dict[str, list[float]] = {"wall": [], "cpu": []}
            for each in times:
                for clock, took in each[part].items():
                    joined[clock] += took
            told(f"{which}: {'first search' if part == 'first' else 'then'}", joined)
    [last] = visits(path, index, "memory", namespaces, 1)
    print(f"memory after searching 100 small ones: {last['memory']:.0f} MB above the start")
    began = time.perf_counter()
    with opened(path, index) as store:
        store.search((), query="oil price")
        print(f"a search of all namespaces, the first {time.perf_counter() - began:.1f} s", end="")
        began = time.perf_counter()
        store.search((), query="oil price")
        print(f", the second {time.perf_counter() - began:.1f} s")


def messages(folder: str, index: str) -> None:
    """Measure one namespace of long messages."""
    texts = Texts(3)
    with opened(os.path.join(folder, "messages.db"), index) as store:
        held = texts.made(MESSAGES, MESSAGE_WORDS)
        for start in range(0, MESSAGES, BATCH):
            page = enumerate(held[start : start + BATCH], start)
            store.batch(PutOp(LARGE, f"k{number}", {"text": text}) for number, text in page)
        asked = texts.made(2 * QUERIES + 1, ASKED)
        new = texts.made(QUERIES, MESSAGE_WORDS)
        store.search(LARGE, query=asked[-1])
        print(f"{MESSAGES:,} messages of {len(held[0]):,} characters in one namespace")
        told("search", spent(lambda n: store.search(LARGE, query=asked[n]), QUERIES))

        def turn(number: int) -> Any:
            store.put(LARGE, f"new{number}", {"text": new[number]})
            return store.search(LARGE, query=asked[QUERIES + number])

        told("put and search in turn", spent(turn, QUERIES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--index", choices=("offline", "none"), default="offline")
    parser.add_argument("--visit", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.visit:
        path, index, which, namespaces = args.visit
        print(json.dumps(visit(path, index, which, int(namespaces))))
        return
    with tempfile.TemporaryDirectory() as folder:
        many(folder, args.items, args.index)
        messages(folder, args.index)


if __name__ == "__main__":
    main()

"""Measure searches of transcripts: the first one after many new threads, and later ones.

python -m benchmarks.thread_search [THREADS] [DSN of an empty database]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.memory import search_threads
from perdure.stores import open_store
from perdure.stores.search.text import _load_synonym_table

TURNS, USERS, RUNS = 5, 10, 21


def fill(saver: Checkpointer, many: int) -> None:
    """Store threads of five turns, one checkpoint per turn, with words drawn by frequency."""
    rng = random.Random(7)
    words = _load_synonym_table().stems
    ranks = [1 / rank for rank in range(1, len(words) + 1)]

    def text(count: int) -> str:
        return " ".join(rng.choices(words, ranks, k=count))

    for number in range(many):
        config: Any = {"configurable": {"thread_id": f"thread-{number}", "checkpoint_ns": ""}}
        said: list[Any] = []
        for turn in range(TURNS):
            said += [HumanMessage(text(20), id=f"q{turn}"), AIMessage(text(60), id=f"a{turn}")]
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"messages": [*said]}
            checkpoint["channel_versions"] = {"messages": turn + 1}
            metadata: Any = {"source": "loop", "step": turn, "user_id": f"user{number % USERS}"}
            config = saver.put(config, checkpoint, metadata, {"messages": turn + 1})


def main() -> None:
    """Print times and sizes."""
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    with tempfile.TemporaryDirectory() as folder:
        db = sys.argv[2] if len(sys.argv) > 2 else str(Path(folder) / "threads.db")
        with open_checkpointer(db) as saver, open_store(db) as store:
            fill(saver, many)
            before = saver.stats()["size_bytes"]
            start, cpu = time.perf_counter(), time.process_time()
            first = search_threads(saver, store, "canoe harbour", wait_s=0.5)
            hits, left = len(first), first.unread
            search_threads(saver, store, "canoe harbour")
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            print(f"after 0.5 s: {hits} hits, {left} of {many} threads are not read yet")
            print(f"first search: {wall:.2f} s, {cpu:.2f} s of the processor")
            more = saver.stats()["size_bytes"] - before
            messages = many * TURNS * 2
            print(f"{messages} messages: {more / messages:.0f} bytes each, {before} before")
            for name, options in {
                "of one user": {"user": "user3"},
                "of all": {},
                "of none": {"user": "x"},
            }.items():
                times = []
                for number in range(RUNS):
                    start = time.perf_counter()
                    search_threads(saver, store, f"canoe harbour {number}", **options)
                    times.append((time.perf_counter() - start) * 1000)
                print(f"later, {name}: {sorted(times)[RUNS // 2]:.1f} ms, {max(times):.1f} at most")
            start = time.perf_counter()
            fill(saver, 20)
            made = time.perf_counter()
            search_threads(saver, store, "canoe harbour")
            print(f"after 20 threads went on: {(time.perf_counter() - made) * 1000:.1f} ms")
        with open_checkpointer(db) as saver, open_store(db) as store:
            start = time.perf_counter()
            search_threads(saver, store, "canoe harbour")
            print(f"the first of another process: {(time.perf_counter() - start) * 1000:.1f} ms")


if __name__ == "__main__":
    main()

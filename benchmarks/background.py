"""Check that a worker that is killed repeatedly extracts each thread once and loses none.

python benchmarks/background.py --threads 1000 --kill-every 3

A process extracts; it gets SIGKILL every few seconds and is started again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory.long_term.background import Background, run_worker
from perdure.memory.long_term.extraction import Extraction, Pace
from perdure.stores import SQLiteStore

WARM = [
    "perdure.memory.long_term.background",
    "perdure.checkpointers",
]
USERS = 10
TURNS = 3
PATIENCE_S = 900.0


def config_of(number: int) -> Any:
    return {"configurable": {"thread_id": f"t{number}", "user_id": f"u{number % USERS}"}}


def said(number: int) -> list[Any]:
    messages: list[Any] = []
    for turn in range(TURNS):
        place = f"town {number}, street {turn}"
        messages.append(HumanMessage(f"My aunt number {number * TURNS + turn} lives in {place}."))
        messages.append(AIMessage(f"Then you could visit her in {place} some time."))
    return messages


def fill(path: Path, threads: int) -> int:
    """Store the conversations; return the number of their messages."""
    builder = StateGraph(MessagesState)
    builder.add_node("nothing", lambda state: None)
    builder.add_edge(START, "nothing")
    with SQLiteCheckpointer.open(path, synchronous="normal") as saver:
        graph = builder.compile(checkpointer=saver)
        for number in range(threads):
            graph.invoke({"messages": said(number)}, config_of(number))
    return threads * TURNS * 2


def background(saver: Any, store: Any, database: str | None, **options: Any) -> Background:
    pace = Pace(delay_s=1.0, backoff_s=0.5)
    return Background(Extraction(saver, store), pace=pace, database=database, **options)


def serve(path: Path, database: str | None) -> None:
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        run_worker(background(saver, store, database))


class Worker:
    """A worker process that is killed from time to time."""

    def __init__(self, path: Path, database: str | None) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(WARM)  # a fresh interpreter imports for seconds
        self.work = (path, database)
        self.kills = 0
        self.process = self.started()

    def started(self) -> Any:
        process = self.context.Process(target=serve, args=self.work)
        process.start()
        return process

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.kills += 1
        self.process = self.started()

    def end(self) -> None:
        self.process.terminate()
        self.process.join()


def until_extracted(asker: Background, worker: Worker, kill_every_s: float) -> float:
    """Kill the worker repeatedly until no jobs are left; return the seconds this took."""
    began = time.monotonic()
    chance = random.Random(1)
    kill_at = began + kill_every_s
    while _left(asker) and time.monotonic() - began < PATIENCE_S:
        time.sleep(0.2)
        if kill_every_s and time.monotonic() > kill_at:
            worker.kill()
            kill_at = time.monotonic() + kill_every_s * chance.uniform(0.8, 1.2)
    return time.monotonic() - began


def _left(asker: Background) -> bool:
    return any(job.state not in ("done", "dead") for job in asker.jobs())


def extracted(store: SQLiteStore) -> Counter[tuple[str, str]]:
    """Count, for each message of a thread, the memories that are based on it."""
    counts: Counter[tuple[str, str]] = Counter()
    for user in range(USERS):
        for item in store.search(("memories", f"u{user}"), limit=1_000_000):
            source = item.provenance
            if source is not None:
                for message in source.message_ids:
                    counts[str(source.thread_id), message] += 1
    return counts


def run(threads: int, kill_every_s: float, folder: Path, database: str | None) -> bool:
    path = folder / "memory.db"
    messages = fill(path, threads)
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        asker = background(saver, store, database, work=False)
        worker = Worker(path, database)
        took = until_extracted(asker, worker, kill_every_s)
        worker.end()
        jobs = Counter(job.state for job in asker.jobs())
        asker.stop()
        counts = extracted(store)
    twice = sum(count > 1 for count in counts.values())
    print(f"{threads} threads of {TURNS * 2} messages: {took:.1f} s, {worker.kills} kills")
    print(f"memories for {len(counts)} of {messages} messages, {twice} twice; jobs: {dict(jobs)}")
    return len(counts) == messages and not twice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1000)
    parser.add_argument("--kill-every", type=float, default=3.0, help="seconds; 0: never")
    parser.add_argument("--database", help="postgresql://…; else a file beside the store's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not run(args.threads, args.kill_every, Path(folder), args.database):
            sys.exit("some were lost, or extracted twice")


if __name__ == "__main__":
    main()

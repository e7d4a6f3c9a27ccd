"""Measure the size of threads and items in Postgres, also while old threads are deleted.

    python -m benchmarks.postgres_growth postgresql://postgres@127.0.0.1:5432/postgres
    python -m benchmarks.postgres_growth DSN --threads 10000 --rounds 4
    python -m benchmarks.postgres_growth DSN --rounds 0 --items 5000

Each round has as many new threads of twenty turns (a question of 120 characters, an answer of 600),
sixteen at once. Then all but the latest checkpoint of each thread are deleted, the threads of the
previous round are deleted, and free space is released. Items with 300 bytes of text are stored one
by one in a single namespace, which is then searched once; each item is stored again with a
different text. The benchmark creates its own schema, and drops it at the end. The WAL volume is
that of the whole server, so nothing else should use the server meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import psycopg
from benchmarks.common import WORDS
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from perdure import PostgresCheckpointer, PostgresStore
from perdure.checkpointers import Retention

SCHEMA = "perdure_growth"
MB = 1_000_000


def text(chance: random.Random, length: int) -> str:
    return " ".join(chance.choices(WORDS, k=length // 6))[:length]


def graph_of(saver: PostgresCheckpointer, chance: random.Random) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("answer", lambda state: {"messages": [AIMessage(text(chance, 600))]})
    return builder.add_edge(START, "answer").compile(checkpointer=saver)


async def talk(saver: PostgresCheckpointer, names: list[str], turns: int, at_once: int) -> None:
    chance = random.Random(names[0])
    graph, free = graph_of(saver, chance), asyncio.Semaphore(at_once)

    async def one(name: str) -> None:
        async with free:
            for _ in range(turns):
                said = {"messages": [("human", text(chance, 120))]}
                await graph.ainvoke(said, {"configurable": {"thread_id": name}})

    await asyncio.gather(*map(one, names))


def wal(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        ((found,),) = conn.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchall()
    return int(found)


def size(opened: PostgresCheckpointer | PostgresStore) -> int:
    return int(opened.database.stats()["size_bytes"])


def measured(dsn: str, threads: int, turns: int, rounds: int, at_once: int) -> None:
    """Run the rounds, and print a line for each."""
    print("round  turns/s  bytes/turn  WAL/turn  full MB  newest only MB  before gone, shrunk MB")
    last: list[str] = []
    with PostgresCheckpointer.open(dsn, schema=SCHEMA) as saver:
        for number in range(rounds):
            names = [f"{number}-{n}" for n in range(threads)]
            before, logged, begun = size(saver), wal(dsn), time.perf_counter()
            asyncio.run(talk(saver, names, turns, at_once))
            count, took = threads * turns, time.perf_counter() - begun
            written, full = wal(dsn) - logged, size(saver)
            saver.retain(Retention(last=1))
            saver.database.release_unused_disk_space()
            newest = size(saver)
            if last:
                saver.prune(last, strategy="delete")
                saver.database.release_unused_disk_space()
            last = names
            print(
                f"{number + 1:5} {count / took:8.0f} {(full - before) / count:11.0f}"
                f" {written / count:9.0f} {full / MB:8.1f} {newest / MB:15.1f}"
                f" {size(saver) / MB:23.1f}",
                flush=True,
            )
        saver.prune(last, strategy="delete")
        saver.database.release_unused_disk_space()
        print(f"all gone: {size(saver) / MB:.1f} MB, {len(saver.threads())} threads")


def items_measured(dsn: str, count: int) -> None:
    """Print the size of an item, of the namespace's index and of a new version of an item."""
    chance, namespace, found = random.Random(count), ("memories", "ann"), 0
    for step in ("items", "a search", "new versions"):
        with PostgresStore.open(dsn, schema=SCHEMA) as store:
            before, logged = found or size(store), wal(dsn)
            if step == "a search":
                store.search(namespace, query="refund of an order")
            else:
                for number in range(count):
                    store.put(namespace, str(number), {"text": text(chance, 300)})
        with PostgresStore.open(dsn, schema=SCHEMA) as store:  # what is posted is written by now
            found, written = size(store), wal(dsn) - logged
        print(f"{step}: {(found - before) / count:.0f} bytes/item, {written / count:.0f} WAL/item")


def main() -> None:
    """Run it, in a schema that is dropped at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dsn")
    parser.add_argument("--threads", type=int, default=1_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--items", type=int, default=5_000)
    given = parser.parse_args()
    drop = f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE"
    with psycopg.connect(given.dsn, autocommit=True) as conn:
        conn.execute(drop)
        try:
            measured(given.dsn, given.threads, given.turns, given.rounds, given.at_once)
            items_measured(given.dsn, given.items)
        finally:
            conn.execute(drop)


if __name__ == "__main__":
    main()

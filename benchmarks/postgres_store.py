"""Measure the operations of a store on Postgres, against langgraph's `AsyncPostgresStore`.

    python -m benchmarks.postgres_store postgresql://postgres@127.0.0.1:5432/postgres
    python -m benchmarks.postgres_store DSN --operations 1000 --callers 16

The DSN is that of a superuser on this machine. Each store has its own database, with 10,000 items
of about 350 bytes in 1,000 namespaces. Blocks of operations alternate between the stores. A load is
a batch of 100 new items. A search reads one namespace with a filter. A filtered search reads a
tenth of the namespaces. The benchmark prints the CPU time of the client, of the server's processes
that serve it, and of both.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
from benchmarks.common import table, text
from langgraph.store.base import PutOp
from langgraph.store.postgres.aio import AsyncPostgresStore
from psycopg.conninfo import make_conninfo

from perdure.stores import PostgresStore

ITEMS, NAMESPACES, BATCH, BLOCKS = 10_000, 1_000, 100, 10
KINDS = ("fact", "preference", "episode", "task", "rule")
PEER = "AsyncPostgresStore"
Operation = Callable[[Any, int], Awaitable[Any]]


def build_namespace(number: int) -> tuple[str, str, str]:
    user = number % NAMESPACES
    return f"org{user % 10}", f"user{user}", "memories"


def build_value(number: int) -> dict[str, Any]:
    kind = KINDS[number // NAMESPACES % len(KINDS)]
    score = number * 7919 % 1000 / 1000
    return {"text": text(number, 250), "kind": kind, "score": score, "source": {"turn": number}}


def build_batch(first: int) -> list[PutOp]:
    return [PutOp(build_namespace(n), f"k{n}", build_value(n)) for n in range(first, first + BATCH)]


def choose_stored_number(number: int) -> int:
    return random.Random(number).randrange(ITEMS)


OPERATIONS: dict[str, Operation] = {
    "put a new item": lambda s, n: s.aput(build_namespace(n), f"new{n}", build_value(n)),
    "put a stored item": lambda s, n: s.aput(
        build_namespace(choose_stored_number(n)), f"k{choose_stored_number(n)}", build_value(n)
    ),
    "get": lambda s, n: s.aget(
        build_namespace(choose_stored_number(n)), f"k{choose_stored_number(n)}"
    ),
    "search": lambda s, n: s.asearch(
        build_namespace(choose_stored_number(n)), filter={"kind": KINDS[n % 5]}
    ),
    "filtered search": lambda s, n: s.asearch((f"org{n % 10}",), filter={"score": {"$gte": 0.98}}),
    "delete": lambda s, n: s.adelete(build_namespace(n), f"new{n}"),
    "load": lambda s, n: s.abatch(build_batch(ITEMS + n * BATCH)),
}


class ServerCpu:
    """Reads the CPU time of the server processes that serve a database."""

    def __init__(self, conn: psycopg.Connection[Any], database: str) -> None:
        self._conn, self._database = conn, database
        self._nanoseconds: dict[int, int] = {}  # by process, also of those that have ended

    def read_seconds(self) -> float:
        sql = "SELECT pid FROM pg_stat_activity WHERE datname = %s"
        for (pid,) in self._conn.execute(sql, (self._database,)).fetchall():
            with suppress(OSError):
                used = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
                self._nanoseconds[pid] = int(used)
        return sum(self._nanoseconds.values()) / 1e9


async def run_block(awaitables: list[Awaitable[Any]], callers: int) -> None:
    remaining = iter(awaitables)

    async def call() -> None:
        for awaitable in remaining:
            await awaitable

    await asyncio.gather(*(call() for _ in range(callers)))


async def measure(dsn: str, operations: int, callers: int) -> None:
    databases = {"perdure": "bench_store_perdure", PEER: "bench_store_peer"}
    with psycopg.connect(dsn, autocommit=True) as conn:
        for database in databases.values():
            conn.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
            conn.execute(f"CREATE DATABASE {database}")
        try:
            async with AsyncExitStack() as stack:
                places = {name: make_conninfo(dsn, dbname=db) for name, db in databases.items()}
                ours = PostgresStore(places["perdure"], index=None)
                peer = AsyncPostgresStore.from_conn_string(places[PEER])
                stores: dict[str, Any] = {
                    "perdure": await stack.enter_async_context(ours),
                    PEER: await stack.enter_async_context(peer),
                }
                await stores[PEER].setup()
                for store in stores.values():
                    for first in range(0, ITEMS, BATCH):
                        await store.abatch(build_batch(first))
                servers = {name: ServerCpu(conn, db) for name, db in databases.items()}
                rows = []
                for title, operation in OPERATIONS.items():
                    size = max(1, (operations // 10 if title == "load" else operations) // BLOCKS)
                    client, server = dict.fromkeys(stores, 0.0), dict.fromkeys(stores, 0.0)
                    for block in range(BLOCKS + 1):
                        numbers = range(block * size, (block + 1) * size)
                        for name, store in stores.items():
                            awaitables = [operation(store, number) for number in numbers]
                            before = servers[name].read_seconds(), time.process_time()
                            await run_block(awaitables, callers)
                            if block:  # The first block fills caches and prepares statements.
                                client[name] += time.process_time() - before[1]
                                server[name] += servers[name].read_seconds() - before[0]
                    total = {name: client[name] + server[name] for name in stores}
                    for name in stores:
                        figures = [client[name], server[name], total[name]]
                        per_operation = [f"{f / size / BLOCKS * 1e6:.0f}" for f in figures]
                        share = f"{total[name] / total[PEER]:.2f}"
                        rows.append([title, name, *per_operation, share])
                table(
                    f"CPU in µs for each operation, {callers} callers",
                    ["operation", "store", "client", "server", "both", f"ratio to {PEER}"],
                    rows,
                )
        finally:
            for database in databases.values():
                conn.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dsn")
    parser.add_argument("--operations", type=int, default=400, help="of each kind")
    parser.add_argument("--callers", type=int, default=1, help="concurrent callers")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.dsn, arguments.operations, arguments.callers))


if __name__ == "__main__":
    main()

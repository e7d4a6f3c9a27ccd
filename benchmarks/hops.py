"""Compare three ways to run a transaction of six statements on SQLite from an event loop.

`aiosqlite` awaits each statement; `one hop` runs the transaction in a thread with `to_thread`;
`writer` is perdure's writer thread, where transactions that wait together share a commit.

    python -m benchmarks.hops --callers 1 16
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiosqlite
from benchmarks.common import ratio, table

from perdure.storage.database import Schema
from perdure.storage.flow import Flow, Statement
from perdure.storage.sqlite import SQLiteDatabase

TABLE = "CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, body BLOB)"
INSERT = "INSERT INTO t (body) VALUES (?)"
SETUP = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", TABLE)
BODY = b"x" * 300
STATEMENTS = 6
EACH = 60

Work = Callable[[], Awaitable[Any]]
Road = tuple[Work, Work]  # a transaction, and closing


async def rate(work: Work, callers: int) -> tuple[float, float]:
    """Return the microseconds of wall time and CPU time for each transaction."""

    async def caller() -> None:
        for _ in range(EACH):
            await work()

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    count = callers * EACH / 1e6
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


async def through_aiosqlite(path: Path) -> Road:
    lock = asyncio.Lock()
    conn = await aiosqlite.connect(path)
    for statement in SETUP:
        await conn.execute(statement)

    async def work() -> None:
        async with lock:
            for _ in range(STATEMENTS):
                await conn.execute(INSERT, (BODY,))
            await conn.commit()

    return work, conn.close


async def through_a_thread(path: Path) -> Road:
    lock = threading.Lock()
    conn = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    for statement in SETUP:
        conn.execute(statement)

    def transaction() -> None:
        with lock:
            conn.execute("BEGIN IMMEDIATE")
            for _ in range(STATEMENTS):
                conn.execute(INSERT, (BODY,))
            conn.execute("COMMIT")

    return lambda: asyncio.to_thread(transaction), lambda: asyncio.to_thread(conn.close)


async def through_the_writer(path: Path) -> Road:
    database = SQLiteDatabase(path, Schema("bench", TABLE))
    await database.aconnect()

    def flow() -> Flow[None]:
        for _ in range(STATEMENTS):
            yield Statement(INSERT, (BODY,))

    return lambda: database.awrite(flow), lambda: asyncio.to_thread(database.close)


ROADS = {
    "aiosqlite": through_aiosqlite,
    "one hop": through_a_thread,
    "writer": through_the_writer,
}


async def measure(callers: int, rounds: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ROADS}
    with tempfile.TemporaryDirectory() as folder:
        roads = {name: await road(Path(folder) / f"{name}.db") for name, road in ROADS.items()}
        for _ in range(rounds):
            for name, (work, _) in roads.items():
                found[name].append(await rate(work, callers))
        for _, close in roads.values():
            await close()
    medians = {n: [statistics.median(x) for x in zip(*r, strict=True)] for n, r in found.items()}
    base = medians["aiosqlite"]
    rows = [[n, ratio(m[0], base[0]), ratio(m[1], base[1])] for n, m in medians.items()]
    table(f"{callers} callers", ["road", "µs a transaction", "CPU µs"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for callers in args.callers:
        asyncio.run(measure(callers, args.rounds))


if __name__ == "__main__":
    main()

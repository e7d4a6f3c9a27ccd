"""Measure agents of `create_agent` on Postgres, against langgraph's `AsyncPostgresSaver`.

    python -m benchmarks.postgres_agents postgresql://postgres@127.0.0.1:5432/postgres --turns 200
    python -m benchmarks.postgres_agents DSN --shapes threads --at-once 16 256

The DSN is that of a superuser on this machine; nothing else should use that server. Each saver has
its own database, process and pool of ten connections. Blocks of five turns alternate between the
savers. Short threads run in blocks, each as large as the number of concurrent threads. CPU time is
that of the process and of all server processes; its resolution is 10 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from benchmarks import agents
from benchmarks.common import Saver, Worker, ratio, table
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from perdure import PostgresCheckpointer

BLOCK, LAST = 5, 4
BLOCKS = 6
TURNS, POOL = 4, 10
TICK = os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def peer(dsn: str) -> AsyncIterator[Saver]:
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    async with AsyncConnectionPool(dsn, max_size=POOL, kwargs=options) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        yield saver


@asynccontextmanager
async def ours(dsn: str) -> AsyncIterator[Saver]:
    async with PostgresCheckpointer(dsn, pool_size=POOL) as saver:
        yield saver


@asynccontextmanager
async def memory(dsn: str) -> AsyncIterator[Saver]:
    yield InMemorySaver()


SAVERS: dict[str, Callable[[Any], Any]] = {
    "AsyncPostgresSaver": peer,
    "perdure": ours,
    "InMemorySaver": memory,
}
PEER = "AsyncPostgresSaver"


def course(name: str) -> agents.Course:
    agents.SAVERS.update(SAVERS)
    return agents.Course(name)


class Server:
    """Reads the Postgres server's figures, and has a database for each saver."""

    def __init__(self, dsn: str) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True)
        stat = Path(f"/proc/{self.conn.info.backend_pid}/stat").read_text()
        self.pid = int(stat.rsplit(")", 1)[1].split()[1])
        self.dsns = {name: make_conninfo(dsn, dbname=f"bench_{name.lower()}") for name in SAVERS}

    def cpu(self) -> float:
        """Return the CPU seconds of the server's processes, including those that have ended."""
        total = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(path.parent.name) == self.pid:
                total += sum(map(int, fields[11:15]))
            elif int(fields[1]) == self.pid:
                total += int(fields[11]) + int(fields[12])
        return total / TICK

    def make(self) -> None:
        """Create a new database for each saver."""
        for name in SAVERS:
            self.conn.execute(f"DROP DATABASE IF EXISTS bench_{name.lower()} WITH (FORCE)")
            self.conn.execute(f"CREATE DATABASE bench_{name.lower()}")

    def one(self, sql: str) -> Any:
        ((found,),) = self.conn.execute(sql).fetchall()
        return found


def long_thread(server: Server, shape: str, turns: int) -> None:
    """Measure the last twenty turns of a single conversation thread with each saver."""
    server.make()
    workers = {name: Worker(partial(course, name)) for name in SAVERS}
    cpu: dict[str, list[float]] = {name: [] for name in SAVERS}
    wall: dict[str, list[float]] = {name: [] for name in SAVERS}
    wal: dict[str, list[float]] = {name: [] for name in SAVERS}
    for name, worker in workers.items():
        worker.call("open", shape, server.dsns[name])
        worker.call("turns", "warm", range(3))
    for block in range(turns // BLOCK):
        for name, worker in workers.items():
            before, at = server.cpu(), server.one("SELECT pg_current_wal_lsn()")
            numbers = range(block * BLOCK, (block + 1) * BLOCK)
            took, used = worker.call("turns", "long", numbers)
            wall[name] += took
            cpu[name].append(used + server.cpu() - before)
            wal[name].append(float(server.one(f"SELECT pg_current_wal_lsn() - '{at}'")))
    rows = []
    for name, worker in workers.items():
        size = server.one(f"SELECT pg_database_size('bench_{name.lower()}')")
        worker.call("close")
        worker.stop()
        used, theirs = (sum(cpu[each][-LAST:]) / LAST / BLOCK * 1e3 for each in (name, PEER))
        took, wait = (statistics.median(wall[each][-20:]) * 1e3 for each in (name, PEER))
        written = [statistics.median(each[-LAST:]) / BLOCK / 1e3 for each in (wal[name], wal[PEER])]
        rows.append([name, ratio(used, theirs), ratio(took, wait), ratio(*written), size / 1e6])
    title = f"{shape}, {turns} turns, the last twenty"
    table(title, ["", "CPU ms a turn", "ms a turn", "WAL kB a turn", "database MB"], rows)


def crowd(server: Server, at_once: int) -> None:
    """Measure short conversations, with the given number running concurrently."""
    server.make()
    workers = {name: Worker(partial(course, name)) for name in SAVERS}
    cpu: dict[str, list[float]] = {name: [] for name in SAVERS}
    wall: dict[str, list[float]] = {name: [] for name in SAVERS}
    size = max(at_once, 64)  # threads of a block
    for name, worker in workers.items():
        worker.call("open", "chat", server.dsns[name])
        worker.call("crowd", range(-size, 0), TURNS, at_once)
    for block in range(BLOCKS):
        for name, worker in workers.items():
            before = server.cpu()
            seconds, used = worker.call(
                "crowd", range(block * size, (block + 1) * size), TURNS, at_once
            )
            cpu[name].append((used + server.cpu() - before) / size / TURNS * 1e3)
            wall[name].append(size * TURNS / seconds)
    rows = []
    for name, worker in workers.items():
        worker.call("close")
        worker.stop()
        took, used = ([statistics.median(of[each]) for each in (name, PEER)] for of in (wall, cpu))
        rows.append([name, ratio(*took), ratio(*used)])
    title = f"{BLOCKS} times {size} threads of {TURNS} turns of chat, {at_once} at once"
    table(title, ["", "turns a second", "CPU ms a turn"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dsn")
    parser.add_argument("--turns", type=int, default=200, help="a multiple of 5, at least 40")
    shapes = ["chat", "tools", "team", "threads"]
    parser.add_argument("--shapes", nargs="+", choices=[*agents.SHAPES, "threads"], default=shapes)
    parser.add_argument("--at-once", nargs="+", type=int, default=[16, 256], help="of threads")
    args = parser.parse_args()
    server = Server(args.dsn)
    for shape in args.shapes:
        if shape == "threads":
            for at_once in args.at_once:
                crowd(server, at_once)
        else:
            long_thread(server, shape, max(40, args.turns // BLOCK * BLOCK))


if __name__ == "__main__":
    main()

"""Agents of `create_agent` on Postgres, against langgraph's `AsyncPostgresSaver`.

    python -m benchmarks.postgres_agents postgresql://postgres@127.0.0.1:5432/postgres --turns 200

The DSN is that of a superuser on this machine; nothing else should use that server. Each saver has
a database and a process of its own, and they work in blocks of five turns, one after the other.
CPU is that of the process and of all of the server's, so that its resolution is 10 ms.
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

from perdure import PostgresCheckpointer

BLOCK, LAST = 5, 4
THREADS, TURNS, AT_ONCE = 256, 4, 16
TICK = os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def peer(dsn: str) -> AsyncIterator[Saver]:
    async with AsyncPostgresSaver.from_conn_string(dsn) as saver:
        await saver.setup()
        yield saver


@asynccontextmanager
async def ours(dsn: str) -> AsyncIterator[Saver]:
    async with PostgresCheckpointer(dsn) as saver:
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
    """The server's figures, and a database for each saver."""

    def __init__(self, dsn: str) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True)
        stat = Path(f"/proc/{self.conn.info.backend_pid}/stat").read_text()
        self.pid = int(stat.rsplit(")", 1)[1].split()[1])
        self.dsns = {name: make_conninfo(dsn, dbname=f"bench_{name.lower()}") for name in SAVERS}

    def cpu(self) -> float:
        """Seconds of its processes, those that have ended included."""
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
        """New databases."""
        for name in SAVERS:
            self.conn.execute(f"DROP DATABASE IF EXISTS bench_{name.lower()} WITH (FORCE)")
            self.conn.execute(f"CREATE DATABASE bench_{name.lower()}")

    def one(self, sql: str) -> Any:
        ((found,),) = self.conn.execute(sql).fetchall()
        return found


def long_thread(server: Server, shape: str, turns: int) -> None:
    """Turns on one thread, with every saver; the figures are of the last twenty turns."""
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


def crowd(server: Server) -> None:
    """Short threads, many at once."""
    server.make()
    rows: dict[str, list[float]] = {}
    for name in SAVERS:
        worker = Worker(partial(course, name))
        worker.call("open", "chat", server.dsns[name])
        worker.call("crowd", range(THREADS, THREADS + AT_ONCE), 2, AT_ONCE)
        before = server.cpu()
        seconds, used = worker.call("crowd", range(THREADS), TURNS, AT_ONCE)
        turns = THREADS * TURNS
        rows[name] = [turns / seconds, (used + server.cpu() - before) / turns * 1e3]
        worker.call("close")
        worker.stop()
    shown = [[n, *(ratio(a, b) for a, b in zip(rows[n], rows[PEER], strict=True))] for n in rows]
    title = f"{THREADS} threads of {TURNS} turns of chat, {AT_ONCE} at once"
    table(title, ["", "turns a second", "CPU ms a turn"], shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dsn")
    parser.add_argument("--turns", type=int, default=200, help="a multiple of 5, at least 40")
    shapes = ["chat", "tools", "team", "threads"]
    parser.add_argument("--shapes", nargs="+", choices=[*agents.SHAPES, "threads"], default=shapes)
    args = parser.parse_args()
    server = Server(args.dsn)
    for shape in args.shapes:
        if shape == "threads":
            crowd(server)
        else:
            long_thread(server, shape, max(40, args.turns // BLOCK * BLOCK))


if __name__ == "__main__":
    main()

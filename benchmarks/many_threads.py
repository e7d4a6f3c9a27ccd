"""Measure how the cost of operations grows with the number of threads in a database.

    python -m benchmarks.many_threads                    # 10,000, 100,000 and 300,000 threads
    python -m benchmarks.many_threads --folder FOLDER    # keeps built files for the next run
    python -m benchmarks.many_threads --copy             # also `perdure copy`
    python -m benchmarks.many_threads DSN --threads 10000 100000    # on Postgres

Each user has 185 threads. A thread has one checkpoint with three messages. One thread in a hundred
waits for an answer, and one in twenty has an `owner` other than its `user_id`. The store has one
namespace with one item for every two threads, but at least 5,000 namespaces, and the watermarks of
all but the last hundred threads, as if a background worker had extracted memories from them.

Building takes about 1 ms of CPU time for each thread, so 300,000 threads need about five minutes,
if the reservation of keys for new threads does not read the whole table. Each database is built and
measured in processes of its own. Writes are measured on a copy. The DSN is that of a superuser on
this machine. On Postgres, the databases `many_threads_…` are dropped at the end, unless `--keep` is
given. A kept database or file is only valid for builds with the same tables.

CPU time is that of the process, of all its OS threads, and on Postgres also that of all processes
of the server, whose resolution is 10 ms. Nothing else should use that server. The ratios in
brackets compare with the smallest number of threads.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psycopg
from benchmarks import copy_database
from benchmarks.common import Worker, ratio, table, text
from benchmarks.many_items import memory_mb
from benchmarks.postgres_agents import Server
from benchmarks.server_faults import database_uri
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.store.base import PutOp
from langgraph.types import Interrupt

from perdure import people, retention
from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.memory.long_term.extraction import DueThreads, Extraction, Pace
from perdure.memory.thread_messages import Watermark
from perdure.run_tables.component import create_server_tables
from perdure.server import create_app
from perdure.settings import Rules, Settings
from perdure.stores import open_store
from perdure.stores.whole_store import WholeStore

SIZES = (10_000, 100_000, 300_000)
THREADS_OF_USER, WAITING, OWNED = 185, 100, 20
# One namespace for so many threads; the least number of namespaces; the first one of a page.
THREADS_OF_NAMESPACE, MIN_NAMESPACES, OFFSET = 2, 5_000, 4_000
UNREAD = 100  # the last threads, from which no memories were extracted
# Half of the idle threads are deleted by `delete_idle`, and half by `retention.apply`.
MAX_IDLE, IDLE_DAYS = 10_000, (90, 60)
AT_ONCE, BATCH = 32, 2_000  # puts at once; threads, or items, between two pauses
BUDGET_S, MIN_RUNS, MAX_RUNS = 0.5, 3, 100  # of a measurement
BUILDING, COPY = "many_threads_building", "many_threads_copy"
PATH = "~__pregel_pull, ask"
TEXTS = [text(number, 600) for number in range(200)]
Costs = dict[str, tuple[float, float]]  # by operation: milliseconds of CPU, and elapsed


# -- the threads


def user_count(threads: int) -> int:
    return max(threads // THREADS_OF_USER, 1)


def idle_count(threads: int) -> int:
    """Return how many threads each of the two deletions deletes."""
    return min(MAX_IDLE, threads // 4)


def user_name(number: int, threads: int) -> str:
    return f"user{number % user_count(threads)}"


def thread_name(number: int, threads: int) -> str:
    return f"{user_name(number, threads)}-{number}"


def started_at(number: int, threads: int) -> datetime:
    """Return the time of a thread's checkpoint. The first threads are idle."""
    group = number // max(idle_count(threads), 1)
    return datetime.now(UTC) - timedelta(days=IDLE_DAYS[group] if group < len(IDLE_DAYS) else 0)


async def put_thread(saver: Checkpointer, number: int, threads: int) -> str:
    """Store a thread, and return the id of its checkpoint."""
    thread_id, words = thread_name(number, threads), TEXTS[number % len(TEXTS)]
    checkpoint = empty_checkpoint()
    checkpoint["ts"] = started_at(number, threads).isoformat()
    checkpoint["channel_values"] = {
        "messages": [
            HumanMessage(f"question {number}: {words[:120]}", id=f"{thread_id}-0"),
            AIMessage(f"answer {number}: {words}", id=f"{thread_id}-1"),
            HumanMessage(f"thanks for {number}", id=f"{thread_id}-2"),
        ]
    }
    checkpoint["channel_versions"] = {"messages": 1}
    labels = {"user_id": user_name(number, threads)}
    if number % OWNED == 3:
        labels["owner"] = f"organisation{number % 7}"
    config: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": "", **labels}}
    metadata: Any = {"source": "loop", "step": 1, "parents": {}, **labels}
    config = await saver.aput(config, checkpoint, metadata, {"messages": 1})
    if number % WAITING == 0:
        question = Interrupt("may I?", id="i")
        await saver.aput_writes(config, [("__interrupt__", [question])], "task", PATH)
    return checkpoint["id"]


async def fill(saver: Checkpointer, store: WholeStore, threads: int) -> None:
    """Store the threads, the watermarks of most of them, and the items."""
    free = asyncio.Semaphore(AT_ONCE)

    async def put(number: int) -> str:
        async with free:
            return await put_thread(saver, number, threads)

    create_server_tables(saver)
    for start in range(0, threads, BATCH):
        numbers = range(start, min(start + BATCH, threads))
        heads = await asyncio.gather(*map(put, numbers))
        await store.abatch(
            Watermark()
            .advance((), head)
            .build_put(("memories", user_name(number, threads)), thread_name(number, threads))
            for number, head in zip(numbers, heads, strict=True)
            if number < threads - UNREAD
        )
    namespaces = max(threads // THREADS_OF_NAMESPACE, MIN_NAMESPACES)
    for start in range(0, namespaces, BATCH):
        await store.abatch(
            PutOp(("notes", f"note{number:06}"), "k", {"text": TEXTS[number % len(TEXTS)][:60]})
            for number in range(start, min(start + BATCH, namespaces))
        )


# -- the measurements of one database, in a process of their own


class Meter:
    """Measures calls.

    Args:
        server: The Postgres server, or None.
    """

    def __init__(self, server: Server | None) -> None:
        self.costs: Costs = {}
        self._server = server

    async def measure(
        self,
        name: str,
        call: Callable[[], Any],
        expected: int | None = None,
        *,
        repeats: bool = True,
        count: float = 1,
    ) -> None:
        """Measure a blocking or async call: the median of its runs, after a run that is not timed.

        Args:
            name: The name of the operation.
            call: The call.
            expected: The length of its result, which is checked.
            repeats: If False, the only run is timed.
            count: How many operations a call is. The costs are those of one operation.
        """
        if repeats:
            await _finish(call())
        begun, runs = time.perf_counter(), list[tuple[float, float]]()
        server_cpu = self._read_server_cpu()
        while not runs or (repeats and _goes_on(len(runs), time.perf_counter() - begun)):
            cpu, start = time.process_time(), time.perf_counter()
            result = await _finish(call())
            runs.append((time.process_time() - cpu, time.perf_counter() - start))
        server_cpu = (self._read_server_cpu() - server_cpu) / len(runs)
        if expected is not None and len(result) != expected:
            raise AssertionError(f"{name} has {len(result)} results instead of {expected}")
        cpu, wall = (statistics.median(each) for each in zip(*runs, strict=True))
        self.costs[name] = (cpu + server_cpu) * 1e3 / count, wall * 1e3 / count

    def _read_server_cpu(self) -> float:
        return self._server.cpu() if self._server else 0.0


async def _finish(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _goes_on(runs: int, elapsed_s: float) -> bool:
    """Return whether there is another run."""
    return runs < MIN_RUNS or (runs < MAX_RUNS and elapsed_s < BUDGET_S)


class Subject:
    """A database of many threads: builds and measures it.

    Args:
        db: The path of a file or a DSN.
        threads: The number of threads.
        dsn: The DSN of the Postgres server, or None for a file.
    """

    def __init__(self, db: str, threads: int, dsn: str | None) -> None:
        self.db, self.threads = db, threads
        self.meter = Meter(Server(dsn) if dsn else None)
        self.options: dict[str, Any] = {} if dsn else {"synchronous": "normal"}
        self.user = user_name(user_count(threads) // 2, threads)

    def _open_saver(self) -> Checkpointer:
        return open_checkpointer(self.db, **self.options)

    def _open_store(self) -> WholeStore:
        return open_store(self.db, index=None, **self.options)

    async def build(self) -> tuple[float, float]:
        """Fill the database, and return the CPU time and the elapsed time, in seconds."""
        cpu, began = time.process_time(), time.perf_counter()
        async with self._open_saver() as saver, self._open_store() as store:
            await fill(saver, store, self.threads)
        return time.process_time() - cpu, time.perf_counter() - began

    async def measure_reads(self) -> tuple[Costs, float, float]:
        """Measure opening, lists and reads.

        Returns:
            The costs, the size of the database, and the resident memory at the end, both in MB.
        """
        await self.meter.measure("open, and read one head", self._open_and_read_head)
        with self._open_saver() as saver, self._open_store() as store:
            await self._measure_lists(saver)
            await self.meter.measure("stats()", saver.stats)
            await self.meter.measure("usage()", saver.usage)
            page = partial(store.list_namespaces, limit=50, offset=OFFSET)
            await self.meter.measure(f"list_namespaces(limit=50, offset={OFFSET})", page, 50)
            await self._measure_due(saver, store)
            long_ago = datetime.now(UTC) - timedelta(days=10 * max(IDLE_DAYS))
            idle = partial(saver.delete_idle, long_ago, dry_run=True)
            await self.meter.measure("delete_idle, no idle thread", idle, 0, repeats=False)
            archive = partial(people.export, self.user, saver, store)
            await self.meter.measure("export of one user", lambda: [*archive()])
            size = saver.stats()["size_bytes"] / 1e6
        return self.meter.costs, size, memory_mb()

    def _open_and_read_head(self) -> None:
        with self._open_saver() as saver:
            saver.head(thread_name(0, self.threads))

    async def _measure_lists(self, saver: Checkpointer) -> None:
        """Measure `heads` and `threads`."""
        for name, user, found in (("one user", self.user, 50), ("no match", "nobody", 0)):
            for limit in (5, 50):
                page = partial(saver.heads, filter={"user_id": user}, limit=limit)
                await self.meter.measure(
                    f"heads(filter=…, limit={limit}), {name}", page, min(found, limit)
                )
            page = partial(saver.heads, prefix=f"{user}-", limit=50)
            await self.meter.measure(f"heads(prefix=…, limit=50), {name}", page, found)
        waiting = partial(saver.heads, waiting=True, limit=20)
        await self.meter.measure("heads(waiting=True, limit=20)", waiting, 20)
        await self.meter.measure("heads(limit=50)", partial(saver.heads, limit=50), 50)
        await self.meter.measure("threads(limit=50)", partial(saver.threads, limit=50), 50)

    async def _measure_due(self, saver: Checkpointer, store: WholeStore) -> None:
        """Measure how a background worker finds the threads that are due."""
        due = DueThreads(Extraction(saver, store), Pace())
        search = partial(due.list_jobs, exclude_deleted=False)
        await self.meter.measure("due threads, first search", search, UNREAD, repeats=False)
        await self.meter.measure("due threads, each further search", search, UNREAD)

    async def measure_server(self) -> Costs:
        """Measure the start of the server, its first page, and its searches of threads."""
        app = create_app(Settings(db=self.db, user="ann"))
        transport = httpx.ASGITransport(app)
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        async with AsyncExitStack() as stack:
            running = app.router.lifespan_context(app)
            start = partial(stack.enter_async_context, running)
            await self.meter.measure("server: start", start, repeats=False)
            await self._measure_requests(client)
        return self.meter.costs

    async def _measure_requests(self, client: httpx.AsyncClient) -> None:
        async def load_page(query: str) -> None:
            (await client.get(f"/ui/threads{query}")).raise_for_status()

        async def search(**body: Any) -> list[Any]:
            found = await client.post("/threads/search", json=body)
            return list(found.raise_for_status().json())

        await self.meter.measure("server: first page", partial(load_page, ""))
        of_user = f"?meta=user_id%3D{self.user}"
        await self.meter.measure("server: page of one user", partial(load_page, of_user))
        fields = ["thread_id", "status", "metadata"]
        searches: dict[str, tuple[dict[str, Any], int]] = {
            "with values": ({}, 50),
            "without values": ({"select": fields}, 50),
            "one user": ({"select": fields, "metadata": {"user_id": self.user}}, 50),
            "no match": ({"select": fields, "metadata": {"user_id": "nobody"}}, 0),
        }
        for name, (body, found) in searches.items():
            await self.meter.measure(
                f"server: threads.search, {name}", partial(search, limit=50, **body), found
            )
        waiting = partial(search, limit=20, status="interrupted", select=fields)
        await self.meter.measure("server: threads.search, interrupted", waiting, 20)

    async def measure_writes(self) -> Costs:
        """Measure the erasure of a message, the deletion of idle threads, and a new thread."""
        idle = idle_count(self.threads)
        with self._open_saver() as saver, self._open_store() as store:
            last = range(self.threads - 1, self.threads - MAX_RUNS - 2, -1)
            threads = iter([thread_name(number, self.threads) for number in last])

            def erase() -> None:
                thread_id = next(threads)
                saver.erase(thread_id, [f"{thread_id}-0"])

            await self.meter.measure("erase of one message", erase)
            now = datetime.now(UTC)
            before = now - timedelta(days=sum(IDLE_DAYS) / 2)
            await self.meter.measure(
                "delete_idle, each deleted thread",
                partial(saver.delete_idle, before),
                idle,
                repeats=False,
                count=idle,
            )
            rules = Rules(idle_days=IDLE_DAYS[-1] / 2)
            await self.meter.measure(
                "retention.apply, each deleted thread",
                partial(retention.apply, rules, saver, store),
                repeats=False,
                count=idle,
            )
            if left := self.threads - 2 * idle - saver.stats()["threads"]:
                raise AssertionError(f"{left} threads too many were deleted")
        new = itertools.count(self.threads)

        async def put_new_thread() -> None:
            async with self._open_saver() as saver:
                await put_thread(saver, next(new), self.threads)

        await self.meter.measure("open, and put a new thread", put_new_thread)
        return self.meter.costs


# -- where databases are


class Files:
    """Databases that are files in a folder."""

    dsn = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def address(self, name: str) -> str:
        return str(self._folder / f"{name}.db")

    def exists(self, name: str) -> bool:
        return Path(self.address(name)).exists()

    def create(self, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def rename(self, name: str, new_name: str) -> None:
        Path(self.address(name)).rename(self.address(new_name))

    def copy(self, name: str, new_name: str) -> None:
        shutil.copyfile(self.address(name), self.address(new_name))

    def drop(self, name: str) -> None:
        for path in self._folder.glob(f"{name}.db*"):
            path.unlink()


class Databases:
    """Databases of a Postgres server."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._conn = psycopg.connect(dsn, autocommit=True)

    def address(self, name: str) -> str:
        return database_uri(self.dsn, name)

    def exists(self, name: str) -> bool:
        sql = "SELECT 1 FROM pg_database WHERE datname = %s"
        return self._conn.execute(sql, [name]).fetchone() is not None

    def create(self, name: str) -> None:
        self._conn.execute(f"CREATE DATABASE {name}".encode())

    def rename(self, name: str, new_name: str) -> None:
        """Rename a database that was built, after its tables have been analyzed."""
        with psycopg.connect(self.address(name), autocommit=True) as conn:
            conn.execute("VACUUM ANALYZE")
        self._conn.execute(f"ALTER DATABASE {name} RENAME TO {new_name}".encode())

    def copy(self, name: str, new_name: str) -> None:
        self._conn.execute(f"CREATE DATABASE {new_name} TEMPLATE {name}".encode())

    def drop(self, name: str) -> None:
        self._conn.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())


Places = Files | Databases


# -- all


def call_subject(subject: Callable[[], Subject], method: str) -> Any:
    """Call a method of a subject in a new process."""
    worker = Worker(subject)
    try:
        return worker.call(method)
    finally:
        worker.stop()


def measure_copy(places: Places, name: str, threads: int) -> Costs:
    """Measure `perdure copy` into a new database of the same kind."""
    server = Server(places.dsn) if places.dsn else None
    places.drop(COPY)
    places.create(COPY)
    before = server.cpu() if server else 0.0
    wall, cpu = copy_database.run(
        "copy", "--from", places.address(name), "--to", places.address(COPY)
    )
    cpu += server.cpu() - before if server else 0.0
    places.drop(COPY)
    return {"perdure copy, each thread": (cpu * 1e3 / threads, wall * 1e3 / threads)}


def measure_size(places: Places, threads: int, copies: bool) -> tuple[Costs, list[Any]]:
    """Build a database, unless it exists, and measure it. Return its costs and its sizes."""
    name, built = f"many_threads_{threads}", "kept"
    if not places.exists(name):
        places.drop(BUILDING)
        places.create(BUILDING)
        subject = partial(Subject, places.address(BUILDING), threads, places.dsn)
        cpu, wall = call_subject(subject, "build")
        built = f"{cpu:.0f} s CPU, {wall:.0f} s"
        places.rename(BUILDING, name)
    print(f"{threads:,} threads: {built}", flush=True)
    subject = partial(Subject, places.address(name), threads, places.dsn)
    costs, size, memory = call_subject(subject, "measure_reads")
    costs |= call_subject(subject, "measure_server")
    places.drop(COPY)
    places.copy(name, COPY)
    subject = partial(Subject, places.address(COPY), threads, places.dsn)
    costs |= call_subject(subject, "measure_writes")
    places.drop(COPY)
    if copies:
        costs |= measure_copy(places, name, threads)
    return costs, [f"{threads:,}", built, f"{size:.0f}", f"{memory:.0f}"]


def print_tables(costs: dict[int, Costs], sizes: list[list[Any]]) -> None:
    """Print the sizes of the databases, and a row for each operation."""
    table("databases", ["threads", "built in", "MB", "memory after reads, MB"], sizes)
    clocks = [f"{threads:,}: {clock}" for threads in costs for clock in ("CPU ms", "ms")]
    base, *_ = costs.values()
    rows = [
        [
            name,
            *(
                ratio(cost, 0.0 if each is base else base_cost)
                for each in costs.values()
                for cost, base_cost in zip(each[name], base[name], strict=True)
            ),
        ]
        for name in base
    ]
    table("operations", ["", *clocks], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dsn", nargs="?", help="of a Postgres server; without, files are measured")
    parser.add_argument("--threads", nargs="+", type=int, default=SIZES)
    parser.add_argument("--folder", type=Path, help="of the built files, which are kept there")
    parser.add_argument("--keep", action="store_true", help="keep the databases in Postgres")
    parser.add_argument("--copy", action="store_true", help="also measure `perdure copy`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CONFIG_HOME": folder, "XDG_DATA_HOME": folder}
        places = Databases(args.dsn) if args.dsn else Files(args.folder or Path(folder))
        costs, sizes = dict[int, Costs](), list[list[Any]]()
        try:
            for threads in args.threads:
                costs[threads], size = measure_size(places, threads, args.copy)
                sizes.append(size)
        finally:
            kept = [] if args.keep or not args.dsn else args.threads
            for name in (BUILDING, COPY, *(f"many_threads_{threads}" for threads in kept)):
                places.drop(name)
        print_tables(costs, sizes)


if __name__ == "__main__":
    main()

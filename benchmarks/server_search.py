"""Measure the server's pages of memories, items and storage for a namespace of many items.

    python benchmarks/server_search.py                  # 100,000 memories of one user
    python benchmarks/server_search.py --items 10000

The server is `perdure serve` in a process of its own. A third of the memories have provenance.
Times are those of whole HTTP requests from the same machine: the median and the slowest of twenty
different requests after the first one. The first request loads the search index, in the first
server from the items, and in the other servers from its compact form. One memory in a hundred was
changed or deleted after the time to which the `as_of` searches refer. CPU time and resident memory
are those of the server's process.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from many_items import Texts

from perdure.stores import Provenance, PutItem, SQLiteStore

USER, ROUNDS, CHANGED = "ann", 20, 100


def filled(path: Path, items: int) -> datetime:
    """Store one user's memories and 1,000 other namespaces; return a time before some changes."""
    texts, now = Texts(1), datetime.now(UTC)
    with SQLiteStore.open(path) as store:
        for begin in range(0, items, 2_000):
            some = texts.made(min(2_000, items - begin), 12)
            store.batch([put(begin + n, text, now) for n, text in enumerate(some)])
        store.batch([PutItem(("notes", f"user{n}"), "k", {"n": n}) for n in range(1_000)])
        time.sleep(0.01)
        past = datetime.now(UTC)
        some, changed = range(0, items, CHANGED), list[PutItem]()
        for n, text in zip(some, texts.made(len(some), 12), strict=True):
            each = put(n, text, now)
            changed.append(PutItem(each.namespace, each.key, None) if n % 1_000 == 0 else each)
        store.batch(changed)
    return past


def put(number: int, text: str, now: datetime) -> PutItem:
    """Build the operation that stores a memory."""
    value = {"text": text, "kind": "turn" if number % 3 else "fact"}
    at = now - timedelta(minutes=number)
    said = Provenance(thread_id=f"t{number // 60}", position=number % 60, actor="user", at=at)
    given = None if number % 3 else said
    return PutItem(("memories", USER), f"k{number}", value, ["text"], provenance=given)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=100_000)
    items = parser.parse_args().items
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.db"
        past = filled(path, items)
        with serving(path) as (client, pid):
            line("search, from items", pid, client, [("/ui/memories", {"q": "tea"})] * 5)
            time.sleep(3)  # the compact form is written
        with serving(path) as (client, pid):
            measured(client, pid, items)
        with serving(path) as (client, pid):
            of_the_past(client, pid, past)


@contextmanager
def serving(path: Path) -> Iterator[tuple[httpx.Client, int]]:
    """Start a server, and yield a client and the server's process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = ["-c", "from perdure.cli import main; main()", "serve", "--db", str(path)]
    command = [sys.executable, *serve, "--user", USER, "--port", str(port)]
    with (
        subprocess.Popen(command, stderr=subprocess.DEVNULL) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        try:
            client.headers["accept"] = "text/html"
            for _ in range(300):
                try:
                    client.get("/ok")
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            yield client, server.pid
        finally:
            server.terminate()


def measured(client: httpx.Client, pid: int, items: int) -> None:
    """Print a line for each page."""
    texts = Texts(2)
    print(f"idle: {resident(pid)} MB")
    words = queries(texts)
    pages = {
        "search": [("/ui/memories", {"q": each}) for each in words],
        "search, facts only": [("/ui/memories", {"q": w, "kind": "fact"}) for w in words],
        "search, why not": [("/ui/memories", {"q": w, "why": "k77"}) for w in words],
        "list, newest": [("/ui/memories", {"start": n * 50}) for n in range(ROUNDS + 1)],
        "list, in the middle": [("/ui/memories", {"start": items // 2})] * 5,
        "list, facts": [("/ui/memories", {"kind": "fact", "start": n}) for n in range(9)],
        "item": [("/ui/memory", {"key": f"k{n}"}) for n in range(ROUNDS + 1)],
        "store": [("/ui/store", {})] * 9,
        "store, 1,000 below": [("/ui/store", {"ns": "notes"})] * 9,
        "items, filtered": [("/ui/store/items", {"ns": "memories", "filter": FILTER})] * 5,
        "storage": [("/ui/storage", {})] * 5,
        "retention": [("/ui/storage/retention", {})] * 5,
        "jobs": [("/ui/jobs", {})] * 5,
    }
    for name, asked in pages.items():
        line(name, pid, client, asked)


def queries(texts: Texts) -> list[str]:
    """Return queries that are the first words of texts."""
    return [" ".join(each.split()[:5]) for each in texts.made(ROUNDS + 1, 12)]


def of_the_past(client: httpx.Client, pid: int, past: datetime) -> None:
    """Measure each kind of `as_of` search, and print a line for each."""
    words = queries(Texts(2))
    asked = {
        "as of": [{"q": each, "as_of": past.isoformat()} for each in words],
        "as of, facts only": [
            {"q": each, "as_of": past.isoformat(), "kind": "fact"} for each in words
        ],
        "as of, other moments": [
            {"q": each, "as_of": (past + timedelta(microseconds=n)).isoformat()}
            for n, each in enumerate(words)
        ],
        "as of, list": [{"as_of": past.isoformat(), "start": n * 50} for n in range(ROUNDS + 1)],
    }
    for name, params in asked.items():
        line(name, pid, client, [("/ui/memories", each) for each in params])


def line(name: str, pid: int, client: httpx.Client, asked: list[tuple[str, Any]]) -> None:
    """Measure requests, and print a line."""
    first, _ = timed(client, pid, *asked[0])
    times, cpu = zip(*(timed(client, pid, *each) for each in asked[1:]), strict=True)
    print(
        f"{name:20} first {first:7.1f} ms, then median {statistics.median(times):6.1f} ms, "
        f"slowest {max(times):6.1f} ms, CPU {statistics.mean(cpu):5.1f} ms; {resident(pid)} MB",
        flush=True,
    )


FILTER = '{"kind": "fact"}'


def timed(client: httpx.Client, pid: int, path: str, params: dict[str, Any]) -> tuple[float, float]:
    """Return the milliseconds of a request, and the CPU milliseconds of the server."""
    begun, worked = time.perf_counter(), cpu_ms(pid)
    client.get(path, params=params).raise_for_status()
    return (time.perf_counter() - begun) * 1e3, cpu_ms(pid) - worked


def cpu_ms(pid: int) -> float:
    """Return the CPU milliseconds used by the OS threads of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e6


def resident(pid: int) -> int:
    """Return the resident memory of a process in megabytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


if __name__ == "__main__":
    main()

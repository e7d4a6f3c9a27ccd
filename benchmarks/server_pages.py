"""Measure how long pages of `perdure serve` take on large databases, and the server's memory.

A graph fills a thread with 3,000 messages of 300 to 2,000 characters, with tools and recorded
views. With `--memories`, a namespace is also filled with the given number of memories. The server
is a process of its own; the median request's time is that of a client on the same machine, CPU that
of the server.

    python -m benchmarks.server_pages --messages 3000
    python -m benchmarks.server_pages --messages 3000 --untrimmed
    python -m benchmarks.server_pages --messages 100 --memories 100000
"""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from benchmarks.common import table
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs.chat import chat_graph
from perdure.memory import record_views, trim
from perdure.stores import SQLiteStore

USER, REPEATS = "ann", 20
WORDS = (Path(__file__).parent / "common.py").read_text().replace('"', " ").split()


def text(random: random.Random, least: int = 300, most: int = 2_000) -> str:
    """Return random words with a random total length."""
    size = random.randint(least, most)
    return " ".join(random.choices(WORDS, k=size))[:size]


class Model(GenericFakeChatModel):
    """A scripted model to which tools can be bound."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """Return the model itself."""
        return self


@tool
def look_up(word: str) -> str:
    """What is known of a word."""
    return text(random.Random(word))


def fill(path: str, messages: int, untrimmed: bool) -> None:
    """Run a conversation whose turns have a question, a tool call, its result and an answer."""
    some = random.Random(7)

    def said() -> Iterator[AIMessage]:
        while True:
            call = {
                "name": "look_up",
                "args": {"word": text(some, 8, 30)},
                "id": str(some.random()),
            }
            yield AIMessage("", tool_calls=[call])
            yield AIMessage(text(some))

    with SQLiteCheckpointer.open(path) as saver:
        memory = [] if untrimmed else [trim(max_tokens=8_000)]
        graph = chat_graph(Model(messages=said()), [look_up], memory=memory, checkpointer=saver)
        config: Any = {
            "configurable": {"thread_id": "long", "user_id": USER},
            "callbacks": [record_views(saver)],
        }
        for _ in range(messages // 4):
            graph.invoke({"messages": [("user", text(some))]}, config)


def remember(path: str, count: int) -> None:
    """Store memories."""
    some = random.Random(11)
    with SQLiteStore.open(path) as store:
        for start in range(0, count, 1000):
            for number in range(start, min(start + 1000, count)):
                value = {"content": text(some, 60, 160), "kind": "fact"}
                store.put(("memories", USER), f"m{number}", value)


@contextmanager
def serving(db: str) -> Iterator[tuple[str, int]]:
    """Start a server, and yield its address and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from perdure.cli import main; main()", "serve"]
    options = ["--db", db, "--port", str(port), "--user", USER]
    with subprocess.Popen([*command, *options]) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(200):
                try:
                    httpx.get(f"{url}/ok")
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            yield url, process.pid
        finally:
            process.terminate()


def resident(pid: int) -> float:
    """Return the resident memory of a process in megabytes."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1000 if found else 0.0


def cpu(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Fill, serve and measure."""
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--messages", type=int, default=3000)
    given.add_argument("--memories", type=int, default=0)
    given.add_argument("--untrimmed", action="store_true")
    given.add_argument("--db", help="a file to keep; one that exists is not filled")
    asked = given.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        db = asked.db or str(Path(folder) / "memory.db")
        if not Path(db).exists():
            fill(db, asked.messages, asked.untrimmed)
            remember(db, asked.memories)
        paths = ["/ui/threads", "/ui/thread?id=long", "/ui/thread.json?id=long"]
        paths += ["/ui/checkpoints?id=long", "/ui/prune?id=long&last=10"]
        paths += ["/ui/memories?q=order+refund+budget"] if asked.memories else []
        rows = []
        with serving(db) as (url, pid), httpx.Client(base_url=url, timeout=120) as client:
            idle = resident(pid)
            for path in paths:
                took, before = [], cpu(pid)
                for _ in range(REPEATS + 1):
                    start = time.perf_counter()
                    answer = client.get(path)
                    took.append((time.perf_counter() - start) * 1e3)
                    answer.raise_for_status()
                each = (cpu(pid) - before) / len(took) * 1e3
                sizes = f"{len(answer.content) / 1000:.0f} kB"
                first, median, worst = took[0], statistics.median(took[1:]), max(took[1:])
                rows.append(
                    [path, f"{first:.0f}", f"{median:.0f}", f"{worst:.0f}", f"{each:.0f}", sizes]
                )
            rows.append([f"memory, idle {idle:.0f} MB", "", "", "", "", f"{resident(pid):.0f} MB"])
        columns = ["page", "first, ms", "median, ms", "worst, ms", "CPU, ms", "size"]
        table(f"{asked.messages} messages, {asked.memories} memories", columns, rows)


if __name__ == "__main__":
    main()
